//! The layer under real servers and real clients: how long a permit is held when sockets are between requests and
//! responses.

use std::convert::Infallible;
use std::future::pending;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::WebSocketUpgrade;
use axum::response::Response;
use axum::routing::{MethodRouter, any, get, head, post};
use futures_util::{SinkExt, StreamExt, stream};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tokio_tungstenite::tungstenite::Message;
use tower::ServiceBuilder;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, HeaderKey, OnLost};
use tower_semaphore::{AcquireError, ConcurrencyLimitLayer, Limit, Permit, Policy, Semaphore};

use crate::support::eventually;
use crate::support::http::{Server, curl, get as get_request, text};
use crate::support::redis::TestRedis;

const NAME: &str = "api";
const LONG: Duration = Duration::from_secs(20);

/// The backend, and two processes on it: the one behind the server, and another one that observes.
struct Stage {
    store: Store,
    server: Semaphore,
    other: Semaphore,
}

enum Store {
    Memory(MemoryBackend),
    Redis(TestRedis),
}

impl Stage {
    fn memory() -> Self {
        let backend = MemoryBackend::new();
        let server = Semaphore::new(backend.clone());
        let other = Semaphore::new(backend.clone());
        Self { store: Store::Memory(backend), server, other }
    }

    fn redis() -> Self {
        let redis = TestRedis::start();
        let (server, other) = (redis.semaphore(), redis.semaphore());
        Self { store: Store::Redis(redis), server, other }
    }

    /// Limit 1, and no request may wait, unless set.
    fn layer(&self) -> ConcurrencyLimitBuilder {
        ConcurrencyLimitLayer::builder(&self.server, NAME).limit(1).wait_timeout(Duration::ZERO)
    }

    /// The same, but a request waits as long as it takes.
    fn patient(&self) -> ConcurrencyLimitLayer {
        self.layer().wait_timeout(LONG).build().unwrap()
    }

    async fn hold(&self) -> Permit {
        self.other.acquire(NAME, &Policy::new(1)).await.unwrap()
    }

    async fn is_full(&self) -> bool {
        matches!(
            self.other.try_acquire(NAME, &Policy::new(1)).await,
            Err(AcquireError::Rejected(rejected)) if rejected.in_use == Some(1)
        )
    }

    /// Waits until this number of requests hold, and this number wait.
    async fn until(&self, in_use: u64, waiting: u64) {
        eventually(&format!("{in_use} in use, {waiting} waiting"), async || {
            let seen = self.other.inspect(NAME).await.unwrap();
            (seen.in_use, seen.waiting) == (in_use, waiting)
        })
        .await;
    }

    async fn until_empty(&self) {
        eventually("nothing is stored", async || match &self.store {
            Store::Memory(backend) => backend.is_empty(),
            Store::Redis(redis) => redis.keys() == 0,
        })
        .await;
    }
}

macro_rules! on_both_backends {
    ($($name:ident)*) => {
        mod memory {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&super::Stage::memory()).await;
            })*
        }
        mod redis {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&super::Stage::redis()).await;
            })*
        }
    };
}

on_both_backends! {
    a_stream_of_many_leases_keeps_its_permit_to_its_end
    whoever_has_read_one_response_is_never_refused_the_next
    a_client_that_leaves_the_queue_leaves_no_place_and_reaches_no_handler
    a_client_that_leaves_while_the_handler_runs_frees_the_permit
    a_client_that_leaves_mid_stream_frees_the_permit
    a_stream_reset_in_the_queue_leaves_no_place
    a_stream_reset_while_the_handler_runs_frees_the_permit
    a_stream_reset_mid_stream_frees_the_permit
    an_upload_is_held_while_the_handler_reads_it
    a_websocket_that_took_the_permit_holds_it_until_it_closes
    a_websocket_that_did_not_take_the_permit_holds_none
    a_background_task_can_keep_the_permit
}

// ===== handlers =====

/// Has a stream of one response send the next frame; the stream ends when this is dropped.
type Tap = mpsc::UnboundedSender<&'static str>;

/// A route whose responses stream what the test sends: it gets a tap for each.
fn streaming() -> (MethodRouter, mpsc::UnboundedReceiver<Tap>) {
    let (taps, opened) = mpsc::unbounded_channel();
    let route = get(async move || {
        let (tap, frames) = mpsc::unbounded_channel();
        taps.send(tap).unwrap();
        body_of(frames)
    });
    (route, opened)
}

/// Returns the tap of the next response.
async fn opened(taps: &mut mpsc::UnboundedReceiver<Tap>) -> Tap {
    timeout(LONG, taps.recv()).await.expect("the handler is called").unwrap()
}

fn body_of(frames: mpsc::UnboundedReceiver<&'static str>) -> Body {
    body_with(frames, ())
}

/// A body that keeps a value for as long as it lives.
fn body_with<T: Send + 'static>(frames: mpsc::UnboundedReceiver<&'static str>, kept: T) -> Body {
    Body::from_stream(stream::unfold((frames, kept), async |(mut frames, kept)| {
        frames.recv().await.map(|frame| (Ok::<_, Infallible>(frame), (frames, kept)))
    }))
}

/// A route that never answers, and the number of its calls.
fn never() -> (MethodRouter, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let route = get(async move || {
        counted.fetch_add(1, Ordering::Relaxed);
        pending::<&'static str>().await
    });
    (route, calls)
}

async fn serve(path: &str, route: MethodRouter, layer: ConcurrencyLimitLayer) -> Server {
    Server::start(Router::new().route(path, route).layer(layer)).await
}

// ===== streams =====

async fn a_stream_of_many_leases_keeps_its_permit_to_its_end(stage: &Stage) {
    let (route, mut taps) = streaming();
    let layer = stage.layer().lease(Policy::MIN_LEASE).build().unwrap();
    let server = serve("/", route, layer).await;
    let response = server.get("/").await;
    assert_eq!(response.status(), StatusCode::OK);
    let tap = opened(&mut taps).await;

    let mut body = response.into_body();
    let began = Instant::now();
    while began.elapsed() < 4 * Policy::MIN_LEASE {
        tap.send("data").unwrap();
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "data");
        assert!(stage.is_full().await, "after {:?}", began.elapsed());
        let second = server.get("/").await;
        assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
        sleep(Duration::from_millis(50)).await;
    }
    drop(tap);
    assert!(body.frame().await.is_none());
    stage.until_empty().await;
    assert_eq!(server.get("/").await.status(), StatusCode::OK);
}

/// At limit 1, one request after the other on one connection: for any kind of response, the permit is free before the
/// end is seen.
async fn whoever_has_read_one_response_is_never_refused_the_next(stage: &Stage) {
    let streamed = || async {
        let (tap, frames) = mpsc::unbounded_channel();
        tap.send("a").unwrap();
        tap.send("b").unwrap();
        body_of(frames)
    };
    let router = Router::new()
        .route("/text", get(async || "text"))
        .route("/none", get(async || StatusCode::NO_CONTENT))
        .route("/same", get(async || StatusCode::NOT_MODIFIED))
        .route("/stream", get(streamed))
        .layer(stage.layer().build().unwrap());
    let server = Server::start(router).await;
    let mut connection = server.http1().await;
    for round in 0..50 {
        for (method, path, status) in [
            ("GET", "/text", 200),
            ("HEAD", "/text", 200),
            ("GET", "/none", 204),
            ("GET", "/same", 304),
            ("GET", "/stream", 200),
            ("HEAD", "/stream", 200),
        ] {
            let request = Request::builder().method(method).uri(path).header("host", "localhost");
            let request = request.body(Full::default()).unwrap();
            let response = connection.send(request).await.unwrap();
            assert_eq!(response.status(), status, "round {round}, {method} {path}");
            text(response).await;
        }
    }
    stage.until_empty().await;
}

#[tokio::test]
async fn the_length_of_a_response_stays_known() {
    let stage = Stage::memory();
    let server = serve("/", get(async || "12345"), stage.layer().build().unwrap()).await;
    for args in [&[][..], &["-I"]] {
        let reply = curl(&server.url("/"), args).await;
        assert_eq!(reply.header("content-length"), Some("5"));
        assert_eq!(reply.header("transfer-encoding"), None);
    }
}

// ===== clients that leave, HTTP/1 =====

async fn a_client_that_leaves_the_queue_leaves_no_place_and_reaches_no_handler(stage: &Stage) {
    let (route, calls) = never();
    let server = serve("/", route, stage.patient()).await;
    let permit = stage.hold().await;
    let mut connection = server.http1().await;
    let response = connection.begin(get_request("/"));
    stage.until(1, 1).await;

    connection.cut();
    stage.until(1, 0).await;
    drop(permit);
    stage.until_empty().await;
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    assert!(response.await.unwrap().is_err());
}

async fn a_client_that_leaves_while_the_handler_runs_frees_the_permit(stage: &Stage) {
    let (route, calls) = never();
    let server = serve("/", route, stage.patient()).await;
    let mut connection = server.http1().await;
    let _response = connection.begin(get_request("/"));
    stage.until(1, 0).await;
    eventually("the handler runs", async || calls.load(Ordering::Relaxed) == 1).await;
    connection.cut();
    stage.until_empty().await;
}

async fn a_client_that_leaves_mid_stream_frees_the_permit(stage: &Stage) {
    let (route, mut taps) = streaming();
    let server = serve("/", route, stage.patient()).await;
    let mut connection = server.http1().await;
    let response = connection.send(get_request("/")).await.unwrap();
    let tap = opened(&mut taps).await;
    tap.send("data").unwrap();
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    stage.until(1, 0).await;

    connection.cut();
    stage.until_empty().await;
    timeout(LONG, tap.closed()).await.expect("the body inside is dropped");
}

// ===== clients that leave, HTTP/2 =====

/// Sends another request on the connection, which has outlived the reset of a stream.
async fn assert_alive(
    sender: &mut hyper::client::conn::http2::SendRequest<Full<bytes::Bytes>>,
    uri: &str,
) {
    let response = sender.send_request(get_request(uri)).await.unwrap();
    assert_eq!(response.version(), http::Version::HTTP_2);
    assert_eq!(text(response).await, "fine");
}

/// A route under the limit, and one beside it that always answers.
async fn serve2(route: MethodRouter, layer: ConcurrencyLimitLayer) -> Server {
    let router = Router::new().route("/", route).layer(layer);
    Server::start(router.route("/fine", get(async || "fine"))).await
}

async fn a_stream_reset_in_the_queue_leaves_no_place(stage: &Stage) {
    let (route, calls) = never();
    let server = serve2(route, stage.patient()).await;
    let permit = stage.hold().await;
    let mut sender = server.http2().await;
    let first = tokio::spawn(sender.send_request(get_request(&server.url("/"))));
    let second = tokio::spawn(sender.send_request(get_request(&server.url("/"))));
    stage.until(1, 2).await;

    first.abort();
    stage.until(1, 1).await;
    second.abort();
    stage.until(1, 0).await;
    assert_alive(&mut sender, &server.url("/fine")).await;
    drop(permit);
    stage.until_empty().await;
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

async fn a_stream_reset_while_the_handler_runs_frees_the_permit(stage: &Stage) {
    let (route, calls) = never();
    let server = serve2(route, stage.patient()).await;
    let mut sender = server.http2().await;
    let response = tokio::spawn(sender.send_request(get_request(&server.url("/"))));
    eventually("the handler runs", async || calls.load(Ordering::Relaxed) == 1).await;
    stage.until(1, 0).await;
    response.abort();
    stage.until_empty().await;
    assert_alive(&mut sender, &server.url("/fine")).await;
}

async fn a_stream_reset_mid_stream_frees_the_permit(stage: &Stage) {
    let (route, mut taps) = streaming();
    let server = serve2(route, stage.patient()).await;
    let mut sender = server.http2().await;
    let response = sender.send_request(get_request(&server.url("/"))).await.unwrap();
    let tap = opened(&mut taps).await;
    tap.send("data").unwrap();
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    stage.until(1, 0).await;

    drop(body);
    stage.until_empty().await;
    timeout(LONG, tap.closed()).await.expect("the body inside is dropped");
    assert_alive(&mut sender, &server.url("/fine")).await;
}

// ===== uploads =====

/// Reads until the text has come; panics if anything else comes.
async fn expect(socket: &mut TcpStream, wanted: &str) {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(wanted) {
        let read = timeout(LONG, socket.read_buf(&mut seen)).await.expect("an answer").unwrap();
        assert_ne!(read, 0, "{wanted:?} is not in {:?}", String::from_utf8_lossy(&seen));
    }
}

async fn an_upload_is_held_while_the_handler_reads_it(stage: &Stage) {
    let route = post(async |body: String| body);
    let server = serve("/", route, stage.patient()).await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..3 {
        socket.write_all(b"5\r\nhello\r\n").await.unwrap();
        stage.until(1, 0).await;
        assert!(stage.is_full().await);
    }
    socket.write_all(b"0\r\n\r\n").await.unwrap();
    expect(&mut socket, "hellohellohello").await;
    stage.until_empty().await;
}

#[tokio::test]
async fn whoever_waits_is_not_told_to_upload_yet() {
    let stage = Stage::memory();
    let server = serve("/", post(async |body: String| body), stage.patient()).await;
    let permit = stage.hold().await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\
                content-length: 5\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    stage.until(1, 1).await;
    let mut byte = [0];
    let early = timeout(Duration::from_millis(200), socket.read(&mut byte)).await;
    assert!(early.is_err(), "told to go on while it waits");

    drop(permit);
    expect(&mut socket, "HTTP/1.1 100 Continue\r\n\r\n").await;
    socket.write_all(b"hello").await.unwrap();
    expect(&mut socket, "\r\n\r\nhello").await;
    stage.until_empty().await;
}

// ===== upgrades, and other work that goes on =====

async fn echo(mut socket: axum::extract::ws::WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            break;
        }
    }
}

async fn connect_websocket(server: &Server) -> tokio_tungstenite::WebSocketStream<TcpStream> {
    let socket = TcpStream::connect(server.address).await.unwrap();
    let url = format!("ws://{}/", server.address);
    let (mut socket, response) = tokio_tungstenite::client_async(url, socket).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    say(&mut socket).await;
    socket
}

/// Asserts that it still sends.
async fn say(socket: &mut tokio_tungstenite::WebSocketStream<TcpStream>) {
    socket.send(Message::text("hello")).await.unwrap();
    let heard = timeout(LONG, socket.next()).await.expect("an echo").unwrap().unwrap();
    assert_eq!(heard, Message::text("hello"));
}

async fn a_websocket_that_took_the_permit_holds_it_until_it_closes(stage: &Stage) {
    let route = any(async |ws: WebSocketUpgrade, permit: Permit| -> Response {
        ws.on_upgrade(async move |socket| {
            let _permit = permit;
            echo(socket).await;
        })
    });
    let layer = stage.layer().lease(Policy::MIN_LEASE).build().unwrap();
    let server = serve("/", route, layer).await;
    let mut socket = connect_websocket(&server).await;
    let began = Instant::now();
    while began.elapsed() < 3 * Policy::MIN_LEASE {
        say(&mut socket).await;
        assert!(stage.is_full().await, "after {:?}", began.elapsed());
        sleep(Duration::from_millis(100)).await;
    }
    socket.close(None).await.unwrap();
    stage.until_empty().await;

    // A client that vanishes frees it, too.
    let socket = connect_websocket(&server).await;
    stage.until(1, 0).await;
    drop(socket);
    stage.until_empty().await;
}

async fn a_websocket_that_did_not_take_the_permit_holds_none(stage: &Stage) {
    let route = any(async |ws: WebSocketUpgrade| -> Response { ws.on_upgrade(echo) });
    let server = serve("/", route, stage.layer().build().unwrap()).await;
    let mut one = connect_websocket(&server).await;
    stage.until_empty().await;
    let mut two = connect_websocket(&server).await;
    stage.until_empty().await;
    say(&mut one).await;
    say(&mut two).await;
}

async fn a_background_task_can_keep_the_permit(stage: &Stage) {
    let (done, wait) = tokio::sync::watch::channel(false);
    let route = post(async move |permit: Permit| {
        let mut wait = wait.clone();
        tokio::spawn(async move {
            let _permit = permit;
            wait.wait_for(|done| *done).await.unwrap();
        });
        StatusCode::ACCEPTED
    });
    let server = serve("/", route, stage.layer().build().unwrap()).await;
    let reply = curl(&server.url("/"), &["-X", "POST"]).await;
    assert_eq!(reply.status, 202);
    assert!(stage.is_full().await);
    done.send(true).unwrap();
    stage.until_empty().await;
}

// ===== where the layer can stand =====

/// Asserts that the layer is around what answers at `path`: once the only permit is in use, it rejects.
async fn assert_limited(stage: &Stage, router: Router, path: &str) {
    let server = Server::start(router).await;
    for _ in 0..2 {
        assert_eq!(server.get(path).await.status(), StatusCode::OK, "{path}");
        stage.until_empty().await;
        let permit = stage.hold().await;
        let response = server.get(path).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS, "{path}");
        drop(permit);
    }
}

#[tokio::test]
async fn it_can_be_put_on_routers_routes_methods_and_nested_routers() {
    let stage = Stage::memory();
    let layer = stage.layer().build().unwrap();
    let router = || Router::new().route("/a", get(async || "a"));

    assert_limited(&stage, router().layer(layer.clone()), "/a").await;
    assert_limited(&stage, router().route_layer(layer.clone()), "/a").await;
    let method = Router::new().route("/a", get(async || "a").layer(layer.clone()));
    assert_limited(&stage, method, "/a").await;
    let nested = Router::new().nest("/deep", router().layer(layer.clone()));
    assert_limited(&stage, nested, "/deep/a").await;
    let around = Router::new().nest("/deep", router()).layer(layer.clone());
    assert_limited(&stage, around, "/deep/a").await;
    let fallback = Router::new().fallback(async || "found").layer(layer.clone());
    assert_limited(&stage, fallback, "/nowhere").await;
    let with_state = Router::<u8>::new()
        .route("/a", get(async |state: axum::extract::State<u8>| state.0.to_string()))
        .layer(layer.clone())
        .with_state(7);
    assert_limited(&stage, with_state, "/a").await;
}

#[tokio::test]
async fn a_route_beside_it_is_not_limited() {
    let stage = Stage::memory();
    let router = Router::new()
        .route("/a", get(async || "a").layer(stage.layer().build().unwrap()))
        .route("/b", get(async || "b"));
    let server = Server::start(router).await;
    let _permit = stage.hold().await;
    assert_eq!(server.get("/a").await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(server.get("/b").await.status(), StatusCode::OK);
    assert_eq!(server.get("/c").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn it_stands_beside_other_layers() {
    let stage = Stage::memory();
    let layer = stage.layer().build().unwrap();
    let timeout = TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LONG);
    let router = || Router::new().route("/a", get(async || "a"));

    let one_stack = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(CatchPanicLayer::new())
        .layer(layer.clone())
        .layer(timeout);
    assert_limited(&stage, router().layer(one_stack), "/a").await;
    let innermost = ServiceBuilder::new()
        .layer(CatchPanicLayer::new())
        .layer(layer.clone())
        .layer(TraceLayer::new_for_http());
    assert_limited(&stage, router().layer(innermost), "/a").await;
    let one_by_one = router()
        .layer(CatchPanicLayer::new())
        .layer(layer.clone())
        .layer(timeout)
        .layer(TraceLayer::new_for_http());
    assert_limited(&stage, one_by_one, "/a").await;
}

#[tokio::test]
async fn a_handler_that_panics_frees_the_permit() {
    let stage = Stage::memory();
    let route = || {
        get(async || {
            if true {
                panic!("the handler panics, as it is told to");
            }
            "never"
        })
    };
    // Caught outside, the future is unwound. Caught inside, its 500 is a response like any other.
    let layer = stage.layer().build().unwrap();
    let router = Router::new().route("/", route()).layer(layer.clone());
    let outside = Server::start(router.layer(CatchPanicLayer::new())).await;
    let router = Router::new().route("/", route()).layer(CatchPanicLayer::new());
    let inside = Server::start(router.layer(layer)).await;
    for server in [outside, inside] {
        for _ in 0..3 {
            let response = server.get("/").await;
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            text(response).await;
            stage.until_empty().await;
        }
    }
}

#[tokio::test]
async fn a_timeout_around_it_takes_the_request_out_of_the_queue() {
    let stage = Stage::memory();
    let (route, calls) = never();
    let soon = Duration::from_millis(300);
    let router = Router::new()
        .route("/", route)
        .layer(stage.patient())
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, soon));
    let server = Server::start(router).await;
    let permit = stage.hold().await;
    assert_eq!(server.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
    stage.until(1, 0).await;
    drop(permit);
    stage.until_empty().await;
    assert_eq!(calls.load(Ordering::Relaxed), 0);

    // It is also out of the handler.
    assert_eq!(server.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    stage.until_empty().await;
}

#[tokio::test]
async fn one_layer_on_several_routes_is_one_limit() {
    let stage = Stage::memory();
    let (route, mut taps) = streaming();
    let layer = stage.layer().build().unwrap();
    let router = Router::new()
        .route("/a", route.layer(layer.clone()))
        .route("/b", get(async || "b").layer(layer.clone()))
        .merge(Router::new().route("/c", get(async || "c")).layer(layer));
    let server = Server::start(router).await;
    let streaming = server.get("/a").await;
    let _tap = opened(&mut taps).await;
    assert_eq!(server.get("/b").await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(server.get("/c").await.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(streaming);
    stage.until_empty().await;
    assert_eq!(server.get("/b").await.status(), StatusCode::OK);
    stage.until_empty().await;
    assert_eq!(server.get("/c").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn two_layers_of_one_request_hold_a_permit_each() {
    let stage = Stage::memory();
    let (route, mut taps) = streaming();
    let tenant = ConcurrencyLimitLayer::builder(&stage.server, "tenant")
        .key(HeaderKey::from_static("x-tenant"))
        .limit(1)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let all = ConcurrencyLimitLayer::builder(&stage.server, NAME)
        .limit(2)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let server = Server::start(Router::new().route("/", route).layer(tenant).layer(all)).await;
    let ask = async |tenant: &str| {
        let mut request = get_request("/");
        request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
        server.send(request).await
    };
    let a = ask("a").await;
    let refused = ask("a").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(text(refused).await.contains("\"tenant\""));
    // A request that is rejected inside holds nothing outside.
    stage.until(1, 0).await;
    let b = ask("b").await;
    assert_eq!((a.status(), b.status()), (StatusCode::OK, StatusCode::OK));
    let refused = ask("c").await;
    assert!(text(refused).await.contains("\"api\""));
    let _taps = (opened(&mut taps).await, opened(&mut taps).await);
    drop((a, b));
    stage.until_empty().await;
}

#[tokio::test]
async fn a_handler_that_needs_a_permit_says_so_where_there_is_none() {
    let stage = Stage::memory();
    let router = Router::new()
        .route("/must", get(async |permit: Permit| permit.name().to_owned()))
        .route("/may", get(async |permit: Option<Permit>| permit.is_some().to_string()));
    let bare = Server::start(router.clone()).await;
    let response = bare.get("/must").await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text(response).await.contains("ConcurrencyLimitLayer"));
    assert_eq!(text(bare.get("/may").await).await, "false");

    let limited = Server::start(router.layer(stage.patient())).await;
    assert_eq!(text(limited.get("/must").await).await, NAME);
    assert_eq!(text(limited.get("/may").await).await, "true");
}

// ===== a Redis that stands still =====

/// Stops a process, and resumes it when this is dropped.
struct Frozen(u32);

impl Frozen {
    fn new(redis: &TestRedis) -> Self {
        signal("-STOP", redis.pid());
        Self(redis.pid())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        signal("-CONT", self.0);
    }
}

fn signal(signal: &str, process: u32) {
    let status = Command::new("kill").args([signal, &process.to_string()]).status().unwrap();
    assert!(status.success());
}

/// A server whose handler streams and reports when its permit is lost.
struct Lost {
    redis: TestRedis,
    server: Server,
    taps: mpsc::UnboundedReceiver<Tap>,
    lost: mpsc::UnboundedReceiver<()>,
}

impl Lost {
    async fn new(on_lost: OnLost) -> Self {
        let redis = TestRedis::start();
        let (open, taps) = mpsc::unbounded_channel();
        let (tell, lost) = mpsc::unbounded_channel();
        let route = get(async move |permit: Permit| {
            // The permit is kept exactly as long as the body.
            let (alive, ended) = oneshot::channel::<Infallible>();
            tokio::spawn(async move {
                tokio::select! {
                    // The loss ends the body, too; it is the body's to report.
                    biased;
                    () = permit.lost() => {
                        assert!(permit.is_lost());
                        let _ = tell.send(());
                    }
                    _ = ended => {}
                }
            });
            let (tap, frames) = mpsc::unbounded_channel();
            open.send(tap).unwrap();
            body_with(frames, alive)
        });
        let layer = ConcurrencyLimitLayer::builder(&redis.semaphore(), NAME)
            .limit(1)
            .lease(Policy::MIN_LEASE)
            .wait_timeout(Duration::ZERO)
            .on_lost(on_lost)
            .build()
            .unwrap();
        let server = serve("/", route, layer).await;
        Self { redis, server, taps, lost }
    }

    /// Once Redis goes on, it serves, and nothing is left.
    async fn assert_recovered(&self) {
        eventually("it serves again", async || {
            self.server.get("/").await.status() == StatusCode::OK
        })
        .await;
        eventually("nothing is stored", async || self.redis.keys() == 0).await;
    }
}

#[tokio::test]
async fn a_stream_whose_permit_is_lost_is_cut_off() {
    let mut bench = Lost::new(OnLost::Abort).await;
    let response = bench.server.get("/").await;
    let tap = opened(&mut bench.taps).await;
    let mut body = response.into_body();
    tap.send("before").unwrap();
    body.frame().await.unwrap().unwrap();
    // Longer than the lease: it was renewed.
    sleep(2 * Policy::MIN_LEASE).await;
    tap.send("renewed").unwrap();
    body.frame().await.unwrap().unwrap();

    let frozen = Frozen::new(&bench.redis);
    let end = timeout(LONG, body.frame()).await.expect("it is cut off").expect("not a clean end");
    assert!(end.is_err(), "{end:?}");
    timeout(LONG, bench.lost.recv()).await.expect("the handler is told");
    timeout(LONG, tap.closed()).await.expect("the body inside is dropped");
    drop(frozen);
    bench.assert_recovered().await;
}

#[tokio::test]
async fn a_stream_whose_permit_is_lost_goes_on_if_so_set() {
    let mut bench = Lost::new(OnLost::Continue).await;
    let response = bench.server.get("/").await;
    let tap = opened(&mut bench.taps).await;
    let mut body = response.into_body();
    tap.send("before").unwrap();
    body.frame().await.unwrap().unwrap();

    let frozen = Frozen::new(&bench.redis);
    timeout(LONG, bench.lost.recv()).await.expect("the handler is told");
    for _ in 0..3 {
        tap.send("after").unwrap();
        let frame = timeout(LONG, body.frame()).await.expect("it goes on").unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "after");
    }
    drop(frozen);
    tap.send("at last").unwrap();
    drop(tap);
    assert_eq!(body.collect().await.unwrap().to_bytes(), "at last");
    bench.assert_recovered().await;
}

#[tokio::test]
async fn a_request_whose_permit_is_lost_before_its_response_is_refused() {
    let redis = TestRedis::start();
    let (route, calls) = never();
    let layer = ConcurrencyLimitLayer::builder(&redis.semaphore(), NAME)
        .limit(1)
        .lease(Policy::MIN_LEASE)
        .build()
        .unwrap();
    let server = serve("/", route, layer).await;
    let mut connection = server.http1().await;
    let response = connection.begin(get_request("/"));
    eventually("the handler runs", async || calls.load(Ordering::Relaxed) == 1).await;
    let frozen = Frozen::new(&redis);
    let response = timeout(LONG, response).await.expect("an answer").unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key("retry-after"));
    assert!(text(response).await.contains("\"lease_lost\""));
    drop(frozen);
    eventually("nothing is stored", async || redis.keys() == 0).await;
}

#[tokio::test]
async fn while_redis_stands_still_requests_are_answered_and_then_served_again() {
    let redis = TestRedis::start();
    let layer = ConcurrencyLimitLayer::builder(&redis.semaphore(), NAME).limit(1).build().unwrap();
    let server = serve("/", get(async || "served"), layer).await;
    assert_eq!(server.get("/").await.status(), StatusCode::OK);

    let frozen = Frozen::new(&redis);
    for _ in 0..5 {
        let began = Instant::now();
        let response = server.get("/").await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(3), "{took:?}");
    }
    drop(frozen);
    eventually("it serves again", async || server.get("/").await.status() == 200).await;
    for _ in 0..5 {
        let response = server.get("/").await;
        assert_eq!(text(response).await, "served");
    }
    eventually("nothing is stored", async || redis.keys() == 0).await;
}

// ===== HEAD =====

/// What a response to HEAD says of the body.
async fn fields_of_head(router: Router) -> [Option<String>; 2] {
    let server = Server::start(router).await;
    let reply = curl(&server.url("/"), &["--head"]).await;
    assert_eq!(reply.status, 200);
    ["content-length", "transfer-encoding"].map(|name| reply.header(name).map(ToOwned::to_owned))
}

#[tokio::test]
async fn a_response_to_head_has_no_length_that_the_upstream_did_not_say() {
    // What a proxy passes on from an upstream that did not say: a body that is known to be empty.
    let upstream = tower::service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    });
    let semaphore = Semaphore::in_memory();
    for limit in [Limit::Permits(1), Limit::Unlimited] {
        let layer = ConcurrencyLimitLayer::builder(&semaphore, "api").limit(limit).build().unwrap();
        let router = Router::new().fallback_service(upstream).layer(layer);
        assert_eq!(fields_of_head(router).await, [None, None]);
    }
}

#[tokio::test]
async fn a_response_to_head_says_of_its_body_what_the_handler_said() {
    let semaphore = Semaphore::in_memory();
    let layers = [OnLost::Abort, OnLost::Continue].map(|on_lost| {
        let builder = ConcurrencyLimitLayer::builder(&semaphore, "api").limit(1);
        builder.on_lost(on_lost).build().unwrap()
    });
    let text = || Router::new().route("/", get(async || "text"));
    let streams = || {
        let handler = async || Body::from_stream(stream::iter([Ok::<_, Infallible>("data")]));
        Router::new().route("/", get(handler))
    };
    let says_17 = || {
        let handler = async || ([("content-length", "17")], Body::empty());
        Router::new().route("/", head(handler))
    };
    for router in [text as fn() -> Router, streams, says_17] {
        let plain = fields_of_head(router()).await;
        for layer in &layers {
            assert_eq!(fields_of_head(router().layer(layer.clone())).await, plain);
        }
    }
}
