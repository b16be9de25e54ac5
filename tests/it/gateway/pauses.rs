//! A response of the upstream that says "later" stops all gateways.

use std::time::{Duration, Instant};

use super::Stage;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::TestRedis;
use crate::support::wire::{Wire, WireServer};

const LATER: &str = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 2\r\nx-own: kept\r\n\
                     connection: close\r\ncontent-length: 5\r\n\r\nlater";
const OK: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

async fn send(gateway: &Gateway) -> Wire {
    let mut client = Wire::connect(gateway.url()).await;
    client.send(GET).await;
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_pauses_all_gateways_and_is_passed_on_unchanged() {
    let (redis, upstream) = (TestRedis::start(), WireServer::start().await);
    let url = redis.url();
    let start = |wait| {
        let args = ["--limit", "5", "--wait", wait, "--redis", &url, "--pause-on", "429,503"];
        Gateway::start(&upstream.url(), &args)
    };
    let (a, b, patient) = (start("0s"), start("0s"), start("20s"));
    // Each has a connection to Redis.
    for gateway in [&a, &b, &patient] {
        let mut client = send(gateway).await;
        let mut server = upstream.accept().await;
        server.head().await;
        server.send(OK).await;
        assert_eq!(client.status().await.0, 200);
    }
    let (mut client, mut server) = (send(&a).await, upstream.accept().await);
    server.head().await;
    let (mut flies, mut under_way) = (send(&b).await, upstream.accept().await);
    under_way.head().await;
    let began = Instant::now();
    server.send(LATER).await;
    let (status, head) = client.status().await;
    assert_eq!((status, &*client.bytes(5).await), (429, "later"));
    assert!(head.contains("retry-after: 2\r\n") && head.contains("x-own: kept\r\n"), "{head}");
    // This one at once, the other in a message's time.
    let refused = async |gateway: &Gateway| {
        let mut client = send(gateway).await;
        tokio::select! {
            (status, head) = client.status() => Some((status, head)),
            mut server = upstream.accept() => {
                server.head().await;
                server.send(OK).await;
                None
            }
        }
    };
    let (status, head) = refused(&a).await.expect("nothing is sent");
    assert_eq!(status, 503);
    let left: u64 = head
        .lines()
        .find_map(|line| line.strip_prefix("retry-after: "))
        .and_then(|left| left.parse().ok())
        .expect("seconds");
    assert!((2..=4).contains(&left), "{head}");
    let mut waits = send(&patient).await;
    // Its message comes to that gateway before the answer to anything that is asked for later, and what it says is read
    // in one round trip. A gateway that the message did not reach would grant for a second.
    eventually("it is recorded", async || {
        redis.command::<u64>(&["HLEN", "semaphore:{!overrides}:pauses"]) > 0
    })
    .await;
    let mut granted = 0;
    while refused(&b).await.is_none() {
        granted += 1;
        assert!(granted <= 3, "still granted");
    }
    // What is under way goes on, and the one that may wait goes on afterwards.
    under_way.send(OK).await;
    assert_eq!(flies.status().await.0, 200);
    let mut server = upstream.accept().await;
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    server.head().await;
    server.send(OK).await;
    assert_eq!(waits.status().await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_is_as_long_as_the_gateway_allows_and_only_for_its_statuses() {
    let hostile = LATER.replace("retry-after: 2", "retry-after: 86400");
    let stage = Stage::waiting("9s", &["--pause-on", "429", "--max-pause", "300ms"]).await;
    let (mut client, mut server, _) = stage.ask(GET).await;
    let began = Instant::now();
    server.send(&hostile).await;
    assert_eq!(client.status().await.0, 429);
    assert!(stage.is_free().await);
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(300), "{took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");

    let stage = Stage::start(&["--pause-on", "503"]).await;
    let (mut client, mut server, _) = stage.ask(GET).await;
    server.send(&hostile).await;
    assert_eq!(client.status().await.0, 429);
    drop(client);
    assert!(stage.is_free().await, "another status");
}

#[test]
fn a_longest_pause_without_a_pause_is_an_error() {
    let args = ["--upstream", "http://127.0.0.1:9", "--limit", "1", "--max-pause", "20s"];
    let output = Gateway::command().args(args).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("--max-pause: no status pauses anything; set pause-on, too"), "{said}");
}

#[test]
fn a_status_that_no_refusal_has_is_an_error() {
    for statuses in ["200", "429,", "", "x", "42", "429 503"] {
        let mut command = Gateway::command();
        let args = ["--upstream", "http://127.0.0.1:9", "--limit", "1", "--pause-on", statuses];
        let output = command.args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{statuses:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        let allowed = "expected statuses from 400 to 599, such as 429,503";
        assert!(said.contains(allowed) || statuses.is_empty(), "{said}");
    }
}
