//! Long responses: each kind of stream holds its permit for four leases, while another request is rejected, and the
//! next one gets it as soon as the stream ends. On a real Redis, through real sockets.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, WebSocketUpgrade};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::serve::Listener;
use futures_util::{SinkExt, StreamExt, stream};
use http::StatusCode;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tonic::Code;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, IncomingConnection, OnLost};
use tower_semaphore::{AcquireError, ConcurrencyLimitLayer, Permit, Policy, Semaphore};

use crate::support::grpc::GrpcServer;
use crate::support::http::{Buffered, Server};
use crate::support::redis::TestRedis;
use crate::support::semaphore::{empty, in_use, waiting};

const NAME: &str = "api";
const LONG: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_secs(1);
/// Far less than a lease: it was released, and did not expire.
const SOON: Duration = Duration::from_millis(400);

/// A Redis, the process that serves, and another one that observes.
struct Stage {
    redis: TestRedis,
    server: Semaphore,
    other: Semaphore,
}

impl Stage {
    fn new() -> Self {
        let redis = TestRedis::start();
        let (server, other) = (redis.semaphore(), redis.semaphore());
        Self { redis, server, other }
    }

    fn builder(&self) -> ConcurrencyLimitBuilder {
        ConcurrencyLimitLayer::builder(&self.server, NAME)
            .limit(1)
            .lease(LEASE)
            .wait_timeout(Duration::ZERO)
    }

    fn layer(&self) -> ConcurrencyLimitLayer {
        self.builder().build().unwrap()
    }

    /// For four leases the stream sends, holds the only permit, and another request is rejected.
    async fn is_held(&self, mut talk: impl AsyncFnMut(), mut refused: impl AsyncFnMut()) {
        let began = Instant::now();
        while began.elapsed() < 4 * LEASE {
            talk().await;
            let seen = self.other.try_acquire(NAME, &Policy::new(1)).await;
            let after = began.elapsed();
            assert!(matches!(&seen, Err(AcquireError::Rejected(_))), "{seen:?} after {after:?}");
            refused().await;
            sleep(LEASE / 10).await;
        }
    }

    /// A request waits in another process; the stream ends, and the request gets the permit; then nothing is left.
    async fn passes_it_on(self, what: &str, end: impl AsyncFnOnce()) {
        let policy = Policy::builder(1).wait_timeout(LONG).build().unwrap();
        let other = self.other.clone();
        let next = tokio::spawn(async move {
            let permit = other.acquire(NAME, &policy).await.unwrap();
            (Instant::now(), permit)
        });
        waiting(&self.other, NAME, 1).await;
        let began = Instant::now();
        end().await;
        let (granted, permit) = next.await.unwrap();
        let took = granted - began;
        println!("{what}: another process has the permit {took:?} after the end");
        assert!(took < SOON, "{took:?}");
        drop(permit);
        empty(&self.redis).await;
    }
}

async fn assert_refused(server: &Server) {
    assert_eq!(server.get("/").await.status(), StatusCode::TOO_MANY_REQUESTS);
}

// ===== server-sent events =====

#[tokio::test]
async fn server_sent_events_hold_their_permit() {
    let stage = Stage::new();
    let (taps, mut opened) = mpsc::unbounded_channel();
    let events = get(async move || {
        let (tap, events) = mpsc::unbounded_channel::<u32>();
        taps.send(tap).unwrap();
        Sse::new(stream::unfold(events, async |mut events| {
            let event = Event::default().data(events.recv().await?.to_string());
            Some((Ok::<_, Infallible>(event), events))
        }))
    });
    let server = Server::start(Router::new().route("/", events).layer(stage.layer())).await;
    let mut body = server.get("/").await.into_body();
    let tap = opened.recv().await.unwrap();
    let mut sent = 0;
    let talk = async || {
        sent += 1;
        tap.send(sent).unwrap();
        let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(frame, format!("data: {sent}\n\n"));
    };
    stage.is_held(talk, async || assert_refused(&server).await).await;
    let end = async || {
        drop(tap);
        assert!(body.frame().await.is_none());
    };
    stage.passes_it_on("server-sent events", end).await;
}

// ===== a chunked upload =====

#[tokio::test]
async fn a_chunked_upload_holds_its_permit() {
    let stage = Stage::new();
    let route = post(async |body: String| body.len().to_string()).get(async || "never");
    let server = Server::start(Router::new().route("/", route).layer(stage.layer())).await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    in_use(&stage.other, NAME, 1).await;
    let mut sent = 0;
    let talk = async || {
        socket.write_all(b"5\r\nhello\r\n").await.unwrap();
        sent += 5;
    };
    stage.is_held(talk, async || assert_refused(&server).await).await;
    let end = async || {
        socket.write_all(b"0\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        while !String::from_utf8_lossy(&answer).ends_with(&format!("\r\n\r\n{sent}")) {
            let read = timeout(LONG, socket.read_buf(&mut answer)).await.unwrap().unwrap();
            assert_ne!(read, 0, "{answer:?}");
        }
    };
    stage.passes_it_on("a chunked upload", end).await;
}

// ===== WebSockets =====

async fn echo(mut socket: axum::extract::ws::WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            break;
        }
    }
}

async fn open(server: &Server) -> WebSocketStream<TcpStream> {
    let socket = TcpStream::connect(server.address).await.unwrap();
    let url = format!("ws://{}/", server.address);
    let (socket, response) = tokio_tungstenite::client_async(url, socket).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    socket
}

async fn say(socket: &mut WebSocketStream<TcpStream>) {
    socket.send(Message::text("hello")).await.unwrap();
    let heard = timeout(LONG, socket.next()).await.expect("an echo").unwrap().unwrap();
    assert_eq!(heard, Message::text("hello"));
}

/// Handlers that know nothing of permits.
fn plain_sockets(layer: ConcurrencyLimitLayer) -> Router {
    let route = any(async |upgrade: WebSocketUpgrade| upgrade.on_upgrade(echo));
    Router::new().route("/", route).layer(layer)
}

async fn a_websocket_is_held(what: &str, stage: Stage, server: Server) {
    let mut socket = open(&server).await;
    let refused = async || assert_refused(&server).await;
    stage.is_held(async || say(&mut socket).await, refused).await;
    stage.passes_it_on(what, async || socket.close(None).await.unwrap()).await;
}

#[tokio::test]
async fn a_websocket_whose_handler_keeps_the_permit_holds_it() {
    let stage = Stage::new();
    let route = any(async |upgrade: WebSocketUpgrade, permit: Permit| -> Response {
        upgrade.on_upgrade(async move |socket| {
            let _permit = permit;
            echo(socket).await;
        })
    });
    let server = Server::start(Router::new().route("/", route).layer(stage.layer())).await;
    a_websocket_is_held("a WebSocket, by its handler", stage, server).await;
}

#[tokio::test]
async fn a_websocket_whose_connection_keeps_the_permit_holds_it() {
    let stage = Stage::new();
    let server = Server::start_holding(plain_sockets(stage.layer())).await;
    a_websocket_is_held("a WebSocket, by its connection", stage, server).await;
}

#[tokio::test]
async fn a_connection_that_vanishes_gives_the_permit_back() {
    let stage = Stage::new();
    let server = Server::start_holding(plain_sockets(stage.layer())).await;
    let mut socket = open(&server).await;
    say(&mut socket).await;
    in_use(&stage.other, NAME, 1).await;
    stage.passes_it_on("a WebSocket whose client vanishes", async || drop(socket)).await;
}

#[tokio::test]
async fn a_connection_keeps_nothing_for_what_is_no_upgrade() {
    let stage = Stage::new();
    let layer = stage.layer();
    let router = Router::new().route("/", get(async || "text")).layer(layer.clone());
    let server = Server::start_holding(router).await;
    let mut connection = server.http1().await;
    for _ in 0..20 {
        let response = connection.send(crate::support::http::get("/")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().collect().await.unwrap();
    }
    empty(&stage.redis).await;
}

#[tokio::test]
async fn a_connection_keeps_the_permit_where_a_response_holds_it_to_the_head_alone() {
    let stage = Stage::new();
    let head = stage.builder().hold_until(tower_semaphore::limit::HoldUntil::ResponseHead);
    let server = Server::start_holding(plain_sockets(head.build().unwrap())).await;
    let mut socket = open(&server).await;
    say(&mut socket).await;
    in_use(&stage.other, NAME, 1).await;
    drop(socket);
    empty(&stage.redis).await;
}

#[tokio::test]
async fn a_connection_keeps_the_permits_of_all_layers() {
    let stage = Stage::new();
    let outer = ConcurrencyLimitLayer::builder(&stage.server, "outer").limit(1).build().unwrap();
    let server = Server::start_holding(plain_sockets(stage.layer()).layer(outer)).await;
    let mut socket = open(&server).await;
    say(&mut socket).await;
    in_use(&stage.other, NAME, 1).await;
    in_use(&stage.other, "outer", 1).await;
    drop(socket);
    empty(&stage.redis).await;
}

/// A WebSocket on a connection that keeps its permit, while Redis is stopped past the lease.
async fn lose_a_websocket(on_lost: OnLost) -> (Stage, WebSocketStream<TcpStream>, Server) {
    let stage = Stage::new();
    let layer = stage.builder().on_lost(on_lost).build().unwrap();
    let server = Server::start_holding(plain_sockets(layer)).await;
    let mut socket = open(&server).await;
    say(&mut socket).await;
    stage.redis.signal("STOP");
    (stage, socket, server)
}

#[tokio::test]
async fn a_connection_whose_permit_is_lost_is_closed_though_it_is_silent() {
    let (stage, mut socket, _server) = lose_a_websocket(OnLost::Abort).await;
    let end = timeout(LONG, socket.next()).await.expect("it is closed");
    stage.redis.signal("CONT");
    assert!(matches!(end, None | Some(Err(_))), "{end:?}");
    empty(&stage.redis).await;
}

#[tokio::test]
async fn a_connection_whose_permit_is_lost_sends_nothing_more() {
    let (stage, mut socket, _server) = lose_a_websocket(OnLost::Abort).await;
    let end = Instant::now() + LONG;
    let mut last_heard = Instant::now();
    let began = Instant::now();
    // It is answered until its lease ends, and not afterwards.
    while Instant::now() < end {
        if socket.send(Message::text("hello")).await.is_err() {
            break;
        }
        match timeout(LONG, socket.next()).await.expect("an echo or an end") {
            Some(Ok(Message::Text(_))) => last_heard = Instant::now(),
            _ => break,
        }
        sleep(Duration::from_millis(5)).await;
    }
    stage.redis.signal("CONT");
    let heard = last_heard - began;
    assert!(heard < LEASE + Duration::from_millis(100), "heard {heard:?} after the last renewal");
    empty(&stage.redis).await;
}

#[tokio::test]
async fn a_connection_whose_permit_is_lost_goes_on_if_so_set() {
    let (stage, mut socket, _server) = lose_a_websocket(OnLost::Continue).await;
    let began = Instant::now();
    while began.elapsed() < 2 * LEASE {
        say(&mut socket).await;
        sleep(LEASE / 10).await;
    }
    stage.redis.signal("CONT");
    say(&mut socket).await;
    drop(socket);
    empty(&stage.redis).await;
}

/// A server on such connections still learns the peer's address, and can stop gracefully.
#[tokio::test]
async fn serving_on_such_connections_is_as_axum_serves() {
    let who = get(async |peer: ConnectInfo<SocketAddr>| peer.0.ip().to_string().into_response());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serve = tower_semaphore::limit::serve(listener, Router::new().route("/", who));
    assert_eq!(serve.local_addr().unwrap(), address);
    let serve = serve.with_graceful_shutdown(async { drop(stopped.await) });
    let task = tokio::spawn(serve.into_future());
    let reply = crate::support::http::curl(&format!("http://{address}/"), &[]).await;
    assert_eq!((reply.status, &*reply.body), (200, "127.0.0.1"));
    stop.send(()).unwrap();
    timeout(LONG, task).await.expect("it stops").unwrap().unwrap();
}

/// What a user's own listener tells of a connection reaches the handler, beside the address of the peer.
#[tokio::test]
async fn requests_have_what_their_connection_tells_of_itself() {
    #[derive(Clone)]
    struct LocalPort(u16);
    impl Connected<IncomingConnection<'_, Buffered>> for LocalPort {
        fn connect_info(connection: IncomingConnection<'_, Buffered>) -> Self {
            assert!(connection.remote_addr().ip().is_loopback());
            Self(connection.io().get_ref().local_addr().unwrap().port())
        }
    }
    let told = async |ConnectInfo(port): ConnectInfo<LocalPort>, peer: ConnectInfo<SocketAddr>| {
        format!("{} of {}", port.0, peer.0.ip())
    };
    let listener = Buffered::bind().await;
    let port = listener.local_addr().unwrap().port();
    let serve = tower_semaphore::limit::serve(listener, Router::new().route("/", get(told)));
    let task = tokio::spawn(serve.connect_info::<LocalPort>().into_future());
    let reply = crate::support::http::curl(&format!("http://127.0.0.1:{port}/"), &[]).await;
    assert_eq!((reply.status, &*reply.body), (200, &*format!("{port} of 127.0.0.1")));
    task.abort();
}

// ===== gRPC =====

#[tokio::test]
async fn a_bidirectional_grpc_stream_holds_its_permit() {
    let stage = Stage::new();
    let server = GrpcServer::start(stage.layer()).await;
    let (say, said) = mpsc::unbounded_channel::<String>();
    let texts = stream::unfold(said, async |mut said| said.recv().await.map(|text| (text, said)));
    let mut heard = server.client().await.bidi(texts).await.unwrap();
    let mut other = server.client().await;
    let talk = async || {
        say.send("hello".to_owned()).unwrap();
        assert_eq!(heard.message().await.unwrap().unwrap(), "hello");
    };
    let refused = async || {
        let status = other.unary("other").await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
    };
    stage.is_held(talk, refused).await;
    let end = async || {
        drop(say);
        assert_eq!(heard.message().await.unwrap(), None);
    };
    stage.passes_it_on("a bidirectional gRPC stream", end).await;
}
