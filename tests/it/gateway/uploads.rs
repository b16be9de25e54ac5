//! Responses that end before their uploads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::Stage;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::wire::{Wire, WireServer};

const UPLOAD: &str = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000\r\n\r\nsome";
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Returns whether the connection has ended. What comes before the end is read.
async fn is_gone(wire: &mut Wire) -> bool {
    wire.glimpse().await;
    wire.is_over().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_ends_with_its_response() {
    let stage = Stage::waiting("9s", &[]).await;
    let mut before: Option<(Wire, Wire)> = None;
    for (response, stands_still) in [
        (OK, false),
        (OK, true),
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", false),
        ("HTTP/1.1 204 No Content\r\n\r\n", true),
        (
            "HTTP/1.1 413 Content Too Large\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
            false,
        ),
        (OK, false),
    ] {
        let (mut client, mut server, _) = stage.ask(UPLOAD).await;
        if let Some((_, before)) = &mut before {
            assert!(is_gone(before).await, "the upstream has two exchanges at once: {response}");
        }
        if stands_still {
            // The upstream accepts no more of it.
            client.fill().await;
        } else {
            assert_eq!(server.bytes(4).await, "some");
        }
        server.send(response).await;
        let status = client.status().await.0;
        assert_eq!(status, response[9..12].parse::<u16>().unwrap());
        client.send("more").await;
        before = Some((client, server));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_by_http2_ends_with_its_response() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("h2c://{}", listener.local_addr().unwrap());
    let open = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&open);
    tokio::spawn(async move {
        let mut connection =
            h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let counted = Arc::clone(&counted);
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                let mut body = request.into_body();
                body.data().await.unwrap().unwrap();
                respond.send_response(http::Response::new(()), true).unwrap();
                while let Some(Ok(data)) = body.data().await {
                    body.flow_control().release_capacity(data.len()).unwrap();
                }
                counted.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    let gateway = Gateway::start(&url, &["--limit", "1", "--wait", "9s"]);
    let mut clients = Vec::new();
    for _ in 0..10 {
        let mut client = Wire::connect(gateway.url()).await;
        client.send(UPLOAD).await;
        assert_eq!(client.status().await.0, 200);
        client.send("more").await;
        clients.push(client);
    }
    eventually("no upload goes on", async || open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_an_upload_is_read_and_its_connection_used_again() {
    let stage = Stage::start(&["--header-timeout", "400ms"]).await;
    let head = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 200000\r\n\r\n";
    let part = "x".repeat(20_000);
    let (mut client, mut server, _) = stage.ask(head).await;
    server.send("HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 413);
    // Longer than a head may take.
    for _ in 0..10 {
        client.send(&part).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(is_gone(&mut server).await);
    client.send("GET /next HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut server = stage.upstream.accept().await;
    assert!(server.head().await.starts_with("get /next"));
    server.send(OK).await;
    assert_eq!(client.status().await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_a_refused_upload_is_read_and_its_connection_used_again() {
    let upstream = WireServer::start().await;
    let gateway = Gateway::start(&upstream.url(), &["--limit", "0"]);
    let mut client = Wire::connect(gateway.url()).await;
    for _ in 0..2 {
        client.send("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3000000\r\n\r\n").await;
        client.send("x".repeat(3_000_000)).await;
        let (status, head) = client.status().await;
        assert_eq!(status, 429);
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        client.bytes(length.parse().unwrap()).await;
    }
    // A client that asks first is not asked for it.
    client
        .send("POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n")
        .await;
    assert_eq!(client.status().await.0, 429);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_an_upload_of_http2_is_reset_without_an_error() {
    let stage = Stage::start(&[]).await;
    let address = stage.gateway.url().strip_prefix("http://").unwrap();
    let socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let (sender, connection) = h2::client::handshake(socket).await.unwrap();
    tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let request = http::Request::post("http://a/").body(()).unwrap();
    let (response, mut stream) = sender.send_request(request, false).unwrap();
    stream.send_data("some".into(), false).unwrap();
    let mut server = stage.upstream.accept().await;
    server.head().await;
    assert_eq!(server.bytes(9).await, "4\r\nsome\r\n");
    server.send(OK).await;
    let response = response.await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "ok");
    assert!(body.data().await.is_none());
    let reset = std::future::poll_fn(|cx| stream.poll_reset(cx));
    let reset = tokio::time::timeout(Duration::from_secs(5), reset).await;
    assert_eq!(reset.expect("it is reset").unwrap(), h2::Reason::NO_ERROR);
    assert!(is_gone(&mut server).await);
}
