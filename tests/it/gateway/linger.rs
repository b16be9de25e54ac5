//! Requests that are broken off after their sending has begun: the upstream notices later.

use std::time::{Duration, Instant};

use super::Stage;
use crate::support::gateway::Gateway;
use crate::support::redis::free_port;
use crate::support::wire::Wire;

const LINGER: Duration = Duration::from_millis(700);

/// A gateway whose permit lingers for [`LINGER`].
async fn stage() -> Stage {
    Stage::waiting("9s", &["--linger", "700ms"]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_lingers_whose_client_breaks_off_its_upload() {
    const BY_LENGTH: &str = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nhalf";
    const CHUNKED: &str =
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n";
    let stage = stage().await;
    for begins in [BY_LENGTH, CHUNKED] {
        for is_reset in [false, true] {
            let (client, _server, _) = stage.ask(begins).await;
            let began = Instant::now();
            if is_reset {
                client.reset()
            } else {
                drop(client)
            }
            assert!(stage.is_free().await);
            let took = began.elapsed();
            assert!(took >= LINGER, "reset: {is_reset}, free after {took:?}: {begins}");
        }
    }
    let (mut client, _server, _) = stage.ask(CHUNKED).await;
    let began = Instant::now();
    client.send("no length\r\n").await;
    assert!(stage.is_free().await);
    let took = began.elapsed();
    assert!(took >= LINGER, "a malformed chunk, free after {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_lingers_whose_response_cannot_be_passed_on() {
    let stage = stage().await;
    for response in [
        "HTTP/1.1 200 OK\r\nno field\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ] {
        let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let began = Instant::now();
        server.send(response).await;
        assert_eq!(client.status().await.0, 502, "{response}");
        assert!(stage.is_free().await);
        let took = began.elapsed();
        assert!(took >= LINGER, "free after {took:?}: {response}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_does_not_linger_whose_request_was_not_sent() {
    let nowhere = format!("http://127.0.0.1:{}", free_port());
    let gateway = Gateway::start(&nowhere, &["--limit", "1", "--wait", "0s", "--linger", "5s"]);
    for _ in 0..3 {
        let mut client = Wire::connect(gateway.url()).await;
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        // Not 429.
        assert_eq!(client.status().await.0, 502);
    }
}
