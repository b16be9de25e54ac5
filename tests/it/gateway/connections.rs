//! Many connections: none keeps the others, or the probes, from an answer, and none costs much.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use h2::client::SendRequest;
use tokio::net::TcpStream;

use super::Stage;
use crate::support::eventually;
use crate::support::gateway::Gateway;

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// Resident memory, in bytes.
#[cfg(target_os = "linux")]
fn resident(gateway: &Gateway) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
}

/// A connection of HTTP/2.
async fn by_http2(gateway: &Gateway) -> SendRequest<Bytes> {
    let address = gateway.url().strip_prefix("http://").unwrap();
    let socket = TcpStream::connect(address).await.unwrap();
    let (sender, connection) = h2::client::handshake(socket).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Begins to send 1 MB; how much of it the gateway takes before its window is closed for a moment.
async fn upload(
    sender: &SendRequest<Bytes>,
    path: &str,
) -> (usize, h2::client::ResponseFuture, h2::SendStream<Bytes>) {
    const SIZE: usize = 1_000_000;
    let request = http::Request::post(format!("http://a{path}")).body(()).unwrap();
    let mut sender = sender.clone().ready().await.unwrap();
    let (response, mut stream) = sender.send_request(request, false).unwrap();
    let mut sent = 0;
    while sent < SIZE {
        stream.reserve_capacity(SIZE - sent);
        let capacity = std::future::poll_fn(|cx| stream.poll_capacity(cx));
        let Ok(capacity) = tokio::time::timeout(Duration::from_millis(700), capacity).await else {
            break;
        };
        let part = Bytes::from(vec![b'x'; capacity.unwrap().unwrap().min(SIZE - sent)]);
        sent += part.len();
        stream.send_data(part, sent == SIZE).unwrap();
    }
    (sent, response, stream)
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_of_http2_that_waits_costs_little_memory() {
    const QUEUED: usize = 60;
    let stage = Stage::waiting("1m", &[]).await;
    let (_holder, _server, _) = stage.ask(GET).await;
    let before = resident(&stage.gateway);
    let uploads = (0..QUEUED).map(async |_| {
        let sender = by_http2(&stage.gateway).await;
        upload(&sender, "/").await
    });
    let uploads = join_all(uploads).await;
    let sent: usize = uploads.iter().map(|upload| upload.0).sum();
    let mut most = before;
    for _ in 0..20 {
        most = most.max(resident(&stage.gateway));
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let each = (most - before) / QUEUED;
    println!("{sent} bytes of {QUEUED} uploads cost {each} bytes each");
    assert!(sent > QUEUED * 16_384, "they wait: {sent}");
    assert!(each <= 200_000, "{each} bytes for each upload");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_of_http2_that_wait_do_not_stop_others_of_their_connection() {
    let stage = Stage::waiting("1m", &["--prefix", "/waits"]).await;
    let (_holder, _server, _) = stage.ask("GET /waits HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let sender = by_http2(&stage.gateway).await;
    let waiting = join_all((0..30).map(|_| upload(&sender, "/waits"))).await;
    let passes = async {
        let mut server = stage.upstream.accept().await;
        server.head().await;
        server.raw(1_000_000).await;
        server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    };
    let ((sent, response, _stream), ()) = tokio::join!(upload(&sender, "/passes"), passes);
    assert_eq!(sent, 1_000_000);
    assert_eq!(response.await.unwrap().status(), 200);
    drop(waiting);
    eventually("the connection is left", async || stage.upstream.is_left_alone().await).await;
}
