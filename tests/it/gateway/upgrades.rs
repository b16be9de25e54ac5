//! WebSockets and other upgrades: they pass, and hold their permit until the connection ends.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message};
use tower_semaphore::Semaphore;

use super::Stage;
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway};
use crate::support::redis::TestRedis;
use crate::support::semaphore::in_use;

const UPGRADE: &str = "GET /chat HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\n\
    upgrade: toy/1\r\n\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_passes_and_holds_its_permit() {
    let stage = Stage::start(&[]).await;
    for client_ends in [true, false] {
        let (mut client, mut server, head) = stage.ask(UPGRADE).await;
        assert!(head.contains("\r\nupgrade: toy/1\r\n"), "{head}");
        assert!(head.contains("\r\nconnection: upgrade\r\n"), "{head}");
        // The first words of the new protocol come together with the response.
        let accepted =
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: toy/1\r\n\r\nhi";
        server.send(accepted).await;
        let (status, head) = client.status().await;
        assert_eq!(status, 101);
        assert!(head.contains("\r\nupgrade: toy/1\r\n"), "{head}");
        assert_eq!(client.bytes(2).await, "hi");
        client.send("\0ping").await;
        assert_eq!(server.bytes(5).await, "\0ping");
        server.send("pong").await;
        assert_eq!(client.bytes(4).await, "pong");
        assert!(!stage.is_free().await, "the permit is held");
        let (gone, left) = if client_ends { (client, server) } else { (server, client) };
        drop(gone);
        let mut left = left;
        assert_eq!(left.rest().await, "");
        drop(left);
        eventually("the permit is free", async || stage.is_free().await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_that_is_not_taken_is_a_request_like_any_other() {
    let stage = Stage::start(&[]).await;
    let (mut client, mut server, _) = stage.ask(UPGRADE).await;
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno").await;
    assert_eq!(client.status().await.0, 200);
    assert_eq!(client.bytes(2).await, "no");
    let next = "GET /next HTTP/1.1\r\nhost: a\r\n\r\n";
    assert!(stage.ask_on(&mut server, &mut client, next).await.starts_with("get /next"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_is_not_tunneled_past_the_limit() {
    let stage = Stage::start(&[]).await;
    for protocol in ["h2c", "H2C, websocket", "HTTP/2.0"] {
        let request = format!(
            "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\n\
             upgrade: {protocol}\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n"
        );
        let (mut client, mut server, head) = stage.ask(&request).await;
        assert!(!head.contains("upgrade") && !head.contains("http2-settings"), "{head}");
        // An upstream that changes the protocol without a request is not followed.
        server
            .send("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
            .await;
        assert_eq!(client.status().await.0, 502);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websockets_pass_as_they_are() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let Ok(mut socket) = tokio_tungstenite::accept_async(socket).await else { return };
                while let Some(Ok(message)) = socket.next().await {
                    if message.is_text() || message.is_binary() {
                        let _ = socket.send(message).await;
                    }
                }
            });
        }
    });
    let gateway =
        Gateway::start(&upstream, &["--limit", "1", "--wait", "0s", "--on-lost", "abort"]);
    let url = gateway.url().replace("http://", "ws://");
    let (mut socket, response) = tokio_tungstenite::connect_async(&url).await.unwrap();
    assert_eq!(response.status(), 101);
    let Err(Error::Http(refused)) = tokio_tungstenite::connect_async(&url).await else {
        panic!("the second is let in");
    };
    assert_eq!(refused.status(), 429);

    for message in [
        Message::text(""),
        Message::text("grüße"),
        Message::binary(vec![0; 125]),
        Message::binary(vec![1; 126]),
        Message::binary(vec![2; 65_536]),
        Message::binary(vec![3; 4 << 20]),
    ] {
        socket.send(message.clone()).await.unwrap();
        assert!(socket.next().await.unwrap().unwrap() == message, "{} bytes", message.len());
    }
    socket.send(Message::Ping(vec![7].into())).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::Pong(vec![7].into()));
    let reason = CloseFrame { code: CloseCode::Away, reason: "bye".into() };
    socket.close(Some(reason.clone())).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::Close(Some(reason)));
    assert!(socket.next().await.is_none());
    drop(socket);
    let client = Client::new();
    eventually("the permit is free", async || client.get(gateway.url()).await != 429).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgraded_connection_that_stands_still_ends() {
    let stage = Stage::start(&["--idle-timeout", "600ms"]).await;
    let (mut client, mut server, _) = stage.ask(UPGRADE).await;
    server
        .send("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: toy/1\r\n\r\n")
        .await;
    assert_eq!(client.status().await.0, 101);
    // It stays as long as either end sends something.
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(150)).await;
        client.send("x").await;
    }
    assert_eq!(server.bytes(8).await, "xxxxxxxx");
    assert_eq!(client.rest().await, "");
    eventually("the permit is free", async || stage.is_free().await).await;
}

// ===== an upload that is stuck =====

const NAME: &str = "tunnels";

/// A tunnel whose upstream reads nothing, and whose client has sent all that fits.
struct Stuck {
    _redis: TestRedis,
    semaphore: Semaphore,
    _gateway: Gateway,
    client: TcpStream,
    upstream: TcpStream,
}

impl Stuck {
    async fn start() -> Self {
        let redis = TestRedis::start();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let redis_url = redis.url();
        let args = ["--redis", &redis_url, "--name", NAME, "--limit", "1"];
        let gateway = Gateway::start(&url, &args);
        let address = gateway.url().strip_prefix("http://").unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(UPGRADE.as_bytes()).await.unwrap();
        let (mut upstream, _) = listener.accept().await.unwrap();
        until_the_end_of_a_head(&mut upstream).await;
        let accepted = "HTTP/1.1 101 x\r\nconnection: upgrade\r\nupgrade: toy/1\r\n\r\n";
        upstream.write_all(accepted.as_bytes()).await.unwrap();
        until_the_end_of_a_head(&mut client).await;
        let chunk = vec![b'x'; 64 * 1024];
        let fits = async { while client.write(&chunk).await.is_ok() {} };
        let _ = tokio::time::timeout(Duration::from_secs(1), fits).await;
        let semaphore = redis.semaphore();
        in_use(&semaphore, NAME, 1).await;
        Self { _redis: redis, semaphore, _gateway: gateway, client, upstream }
    }
}

async fn until_the_end_of_a_head(socket: &mut TcpStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.unwrap());
    }
}

/// Waits until the other end has closed or reset the connection, without reading.
async fn is_over(socket: &TcpStream) {
    let is_over = async {
        let either = Interest::READABLE | Interest::WRITABLE;
        while !socket.ready(either).await.unwrap().is_read_closed() {
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), is_over).await.expect("it is over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_whose_permit_is_lost_is_closed_on_both_sides_though_its_upload_is_stuck() {
    let stuck = Stuck::start().await;
    let id = stuck.semaphore.inspect(NAME).await.unwrap().holders[0].id;
    assert!(stuck.semaphore.revoke(NAME, id).await.unwrap());
    is_over(&stuck.client).await;
    is_over(&stuck.upstream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_whose_client_is_reset_ends_though_its_upload_is_stuck() {
    let Stuck { _redis, semaphore, _gateway, client, upstream } = Stuck::start().await;
    SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    in_use(&semaphore, NAME, 0).await;
    is_over(&upstream).await;
}
