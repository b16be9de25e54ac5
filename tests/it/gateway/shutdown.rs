//! SIGTERM: requests in flight may end, and those that do not are cut off.

use std::time::{Duration, Instant};

use super::Stage;
use crate::support::gateway::Gateway;
use crate::support::redis::TestRedis;
use crate::support::wire::{Wire, WireServer};

const DRAIN: Duration = Duration::from_secs(1);

/// Sends SIGTERM. The process must end within the time to drain and one more second, and Redis must have no permit.
async fn drains(gateway: Gateway, redis: &TestRedis) -> Duration {
    let began = Instant::now();
    gateway.signal("TERM");
    assert_eq!(gateway.exit().await, Some(0));
    let took = began.elapsed();
    assert!(took < DRAIN + Duration::from_secs(1), "{took:?}");
    assert_eq!(redis.keys(), 0, "permits are given back");
    took
}

async fn start() -> (TestRedis, WireServer, Gateway) {
    let (redis, upstream) = (TestRedis::start(), WireServer::start().await);
    let args = ["--redis", &redis.url(), "--limit", "1", "--drain", "1s"];
    let gateway = Gateway::start(&upstream.url(), &args);
    (redis, upstream, gateway)
}

async fn ask(gateway: &Gateway, upstream: &WireServer, request: &str) -> (Wire, Wire) {
    let mut client = Wire::connect(gateway.url()).await;
    client.send(request).await;
    let mut server = upstream.accept().await;
    server.head().await;
    (client, server)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_head_does_not_keep_the_process() {
    let (redis, _upstream, gateway) = start().await;
    let mut client = Wire::connect(gateway.url()).await;
    client.send("GET / HTTP/1.1\r\nhos").await;
    let mut http2 = Wire::connect(gateway.url()).await;
    http2.send("PRI * HT").await;
    // Both permits were taken.
    let mut idle = Wire::connect(gateway.url()).await;
    idle.send("GET / HTTP/1.1\r\n\r\n").await;
    assert_eq!(idle.status().await.0, 400);
    drains(gateway, &redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_upload_does_not_keep_the_process() {
    let (redis, upstream, gateway) = start().await;
    let request = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhal";
    let (_client, _server) = ask(&gateway, &upstream, request).await;
    assert_eq!(redis.keys(), 1);
    drains(gateway, &redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_behind_its_response_does_not_keep_the_process() {
    let stage = Stage::start(&["--drain", "9s"]).await;
    let request = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\nhal";
    let (mut client, mut server, _) = stage.ask(request).await;
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    let began = Instant::now();
    stage.gateway.signal("TERM");
    assert_eq!(client.rest().await, "");
    assert_eq!(stage.gateway.exit().await, Some(0));
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_upstream_does_not_keep_the_process() {
    let (redis, upstream, gateway) = start().await;
    let (_client, _server) = ask(&gateway, &upstream, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(redis.keys(), 1);
    drains(gateway, &redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_streams_do_not_keep_the_process() {
    let (redis, upstream, gateway) = start().await;
    let (mut client, mut server) =
        ask(&gateway, &upstream, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    server.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n").await;
    assert_eq!(client.status().await.0, 200);
    assert_eq!(redis.keys(), 1);
    drains(gateway, &redis).await;
    assert!(!client.rest().await.ends_with("0\r\n\r\n"), "the end does not look like a whole body");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_http2_do_not_keep_the_process() {
    use http_body_util::Empty;
    use hyper::client::conn::http2;
    use hyper_util::rt::{TokioExecutor, TokioIo};

    let (redis, upstream, gateway) = start().await;
    let address = gateway.url().strip_prefix("http://").unwrap();
    let io = TokioIo::new(tokio::net::TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::get("http://a/").body(Empty::<bytes::Bytes>::new()).unwrap();
    let response = tokio::spawn(async move { sender.send_request(request).await });
    let mut server = upstream.accept().await;
    server.head().await;
    assert_eq!(redis.keys(), 1);
    drains(gateway, &redis).await;
    assert!(response.await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgraded_connections_do_not_keep_the_process() {
    let (redis, upstream, gateway) = start().await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: toy\r\n\r\n";
    let (mut client, mut server) = ask(&gateway, &upstream, request).await;
    server
        .send("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: toy\r\n\r\n")
        .await;
    assert_eq!(client.status().await.0, 101);
    assert_eq!(redis.keys(), 1);
    drains(gateway, &redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_without_a_request_end_at_once() {
    let stage = Stage::start(&["--drain", "9s"]).await;
    let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    let _silent = stage.client().await;
    // What is in flight ends normally; then nothing is waited for.
    let mut last = stage.client().await;
    stage.ask_on(&mut server, &mut last, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let began = Instant::now();
    stage.gateway.signal("TERM");
    assert_eq!(client.rest().await, "");
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    assert_eq!(last.status().await.0, 200);
    assert_eq!(last.bytes(2).await, "ok");
    assert_eq!(stage.gateway.exit().await, Some(0));
    assert!(began.elapsed() < Duration::from_secs(3));
}
