//! Clients of HTTP/1.1 that leave while some of their bytes are unread: an upload that no handler reads yet, or a byte
//! after their request. Their places are free soon, and live clients that look the same keep theirs.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::routing::any;
use axum::{Extension, Router};
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_semaphore::limit::{Connection, ConnectionIo};
use tower_semaphore::{ConcurrencyLimitLayer, Permit, Policy, Semaphore};

use crate::support::gateway::Gateway;
use crate::support::http::{Buffered, Server};
use crate::support::redis::TestRedis;
use crate::support::semaphore::{in_use, waiting};
use crate::support::wire::{Wire, WireServer};

const NAME: &str = "api";
/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(20);
/// Half a second is promised, but the machine may be busy.
const SOON: Duration = Duration::from_secs(2);
/// Several visits to each socket.
const A_WHILE: Duration = Duration::from_millis(1200);

/// What a client sends that is not read while its request waits.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Chunked,
    /// More than hyper reads ahead.
    Long,
    /// The first byte of another request.
    ByteBehind,
}

const SHAPES: [Shape; 3] = [Shape::Chunked, Shape::Long, Shape::ByteBehind];
const LONG_BODY: usize = 100_000;

impl Shape {
    fn begins(self) -> Vec<u8> {
        match self {
            Self::Chunked => {
                let head = "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
                format!("{head}5\r\nhello\r\n").into_bytes()
            }
            Self::Long => {
                let head =
                    format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {LONG_BODY}\r\n\r\n");
                let mut all = head.into_bytes();
                all.resize(all.len() + LONG_BODY, b'x');
                all
            }
            Self::ByteBehind => b"GET / HTTP/1.1\r\nhost: a\r\n\r\nG".to_vec(),
        }
    }

    /// Completes the request. Returns the length of its body.
    const fn ends(self) -> (&'static [u8], usize) {
        match self {
            Self::Chunked => (b"0\r\n\r\n", 5),
            Self::Long => (b"", LONG_BODY),
            Self::ByteBehind => (b"", 0),
        }
    }

    async fn client(self, address: &str) -> TcpStream {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        socket.write_all(&self.begins()).await.unwrap();
        socket
    }
}

#[derive(Clone, Copy, Debug)]
enum Leaves {
    Fin,
    Rst,
}

const WAYS: [Leaves; 2] = [Leaves::Fin, Leaves::Rst];

impl Leaves {
    fn leave(self, socket: TcpStream) {
        if matches!(self, Self::Rst) {
            SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap();
        }
        drop(socket);
    }
}

async fn status(socket: &mut TcpStream) -> u16 {
    head(socket).await.split(' ').nth(1).unwrap().parse().unwrap()
}

async fn head(socket: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(LONG, socket.read_u8()).await.expect("a response").unwrap());
    }
    String::from_utf8(head).unwrap()
}

// ===== `limit::serve` =====

struct Stage {
    semaphore: Semaphore,
    calls: Arc<AtomicUsize>,
    server: Server,
}

impl Stage {
    /// The handler returns the length of the body.
    async fn start() -> Self {
        let calls = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&calls);
        let handler = async move |body: Bytes| {
            counted.fetch_add(1, Ordering::SeqCst);
            body.len().to_string()
        };
        Self::with(any(handler), calls).await
    }

    async fn with(route: axum::routing::MethodRouter, calls: Arc<AtomicUsize>) -> Self {
        let semaphore = Semaphore::in_memory();
        let layer = ConcurrencyLimitLayer::builder(&semaphore, NAME)
            .limit(1)
            .max_queue(20)
            .wait_timeout(LONG)
            .build()
            .unwrap();
        let server = Server::start_holding(Router::new().route("/", route).layer(layer)).await;
        Self { semaphore, calls, server }
    }

    async fn hold(&self) -> Permit {
        self.semaphore.acquire(NAME, &Policy::new(1)).await.unwrap()
    }

    async fn client(&self, shape: Shape) -> TcpStream {
        shape.client(&self.server.address.to_string()).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_clients_that_left_take_no_place_of_the_queue() {
    for (shape, way) in SHAPES.iter().flat_map(|shape| WAYS.map(|way| (*shape, way))) {
        let stage = Stage::start().await;
        let permit = stage.hold().await;
        let mut clients = Vec::new();
        for _ in 0..20 {
            clients.push(stage.client(shape).await);
        }
        waiting(&stage.semaphore, NAME, 20).await;
        assert_eq!(status(&mut stage.client(shape).await).await, 429, "the queue is full");

        let began = Instant::now();
        clients.into_iter().for_each(|client| way.leave(client));
        waiting(&stage.semaphore, NAME, 0).await;
        let took = began.elapsed();
        println!("{shape:?}, {way:?}: all have left the queue after {took:?}");
        assert!(took < SOON, "{shape:?}, {way:?}: {took:?}");

        let mut live = stage.client(Shape::ByteBehind).await;
        waiting(&stage.semaphore, NAME, 1).await;
        drop(permit);
        assert_eq!(status(&mut live).await, 200);
        assert_eq!(stage.calls.load(Ordering::SeqCst), 1, "of those that left, none is served");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_left_with_a_byte_behind_its_request_frees_its_permit() {
    /// Counts the handlers that were dropped.
    struct Ended(Arc<AtomicUsize>);
    impl Drop for Ended {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    for way in WAYS {
        let ended = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&ended);
        let hangs = any(async move || {
            let _ended = Ended(Arc::clone(&counted));
            pending::<()>().await;
        });
        let stage = Stage::with(hangs, Arc::default()).await;
        let client = stage.client(Shape::ByteBehind).await;
        in_use(&stage.semaphore, NAME, 1).await;
        sleep(A_WHILE).await;
        assert_eq!(ended.load(Ordering::SeqCst), 0, "as long as its client is there");
        let began = Instant::now();
        way.leave(client);
        in_use(&stage.semaphore, NAME, 0).await;
        let took = began.elapsed();
        assert!(took < SOON, "{way:?}: {took:?}");
        assert_eq!(ended.load(Ordering::SeqCst), 1, "its handler is dropped");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_stream_whose_client_left_with_a_byte_behind_its_request_frees_its_permit() {
    for way in WAYS {
        let streams = any(async || {
            let frames = stream::iter([Ok::<_, std::convert::Infallible>("frame")]);
            Body::from_stream(frames.chain(stream::pending()))
        });
        let stage = Stage::with(streams, Arc::default()).await;
        let mut client = stage.client(Shape::ByteBehind).await;
        assert!(head(&mut client).await.contains("chunked"));
        let mut frame = [0; 10];
        client.read_exact(&mut frame).await.unwrap();
        assert_eq!(&frame, b"5\r\nframe\r\n");
        sleep(A_WHILE).await;
        in_use(&stage.semaphore, NAME, 1).await;
        let began = Instant::now();
        way.leave(client);
        in_use(&stage.semaphore, NAME, 0).await;
        let took = began.elapsed();
        assert!(took < SOON, "{way:?}: {took:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stays_keeps_its_place_though_its_bytes_lie_unread() {
    for shape in SHAPES {
        let stage = Stage::start().await;
        let permit = stage.hold().await;
        let mut client = stage.client(shape).await;
        waiting(&stage.semaphore, NAME, 1).await;
        sleep(A_WHILE).await;
        waiting(&stage.semaphore, NAME, 1).await;
        drop(permit);
        let (rest, length) = shape.ends();
        client.write_all(rest).await.unwrap();
        let head = head(&mut client).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{shape:?}: {head}");
        let mut body = vec![0; length.to_string().len()];
        client.read_exact(&mut body).await.unwrap();
        assert_eq!(body, length.to_string().into_bytes(), "{shape:?}");
        if let Shape::ByteBehind = shape {
            // The other request is complete now, and is answered on the same connection.
            client.write_all(b"ET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
            assert_eq!(status(&mut client).await, 200);
        }
    }
}

/// As hyper treats a request without a body, unless its option `half_close` is set: when the client closes its half,
/// the client is taken to be gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_closes_its_half_counts_as_gone_whatever_lies_in_front() {
    let whole = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    for request in [&whole[..], b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"] {
        let stage = Stage::start().await;
        let permit = stage.hold().await;
        let mut client = TcpStream::connect(stage.server.address).await.unwrap();
        client.write_all(request).await.unwrap();
        waiting(&stage.semaphore, NAME, 1).await;
        let began = Instant::now();
        client.shutdown().await.unwrap();
        waiting(&stage.semaphore, NAME, 0).await;
        assert!(began.elapsed() < SOON);
        drop(permit);
        assert_eq!(client.read(&mut [0]).await.unwrap_or(0), 0, "it gets no response");
        assert_eq!(stage.calls.load(Ordering::SeqCst), 0);
    }
}

/// The layer is around a client in the handler, and not around the handler.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limited_client_in_a_handler_notices_it_on_the_connection_that_is_passed_on() {
    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).wait_timeout(LONG);
    let client = builder.build().unwrap().layer(tower::service_fn(async |_: http::Request<()>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(Full::<Bytes>::default()))
    }));
    let handler = async move |Extension(connection): Extension<Connection>| {
        let request = http::Request::builder().extension(connection).body(()).unwrap();
        client.oneshot(request).await.unwrap().map(Body::new)
    };
    let server = Server::start_holding(Router::new().route("/", any(handler))).await;
    let permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    for way in WAYS {
        let client = Shape::ByteBehind.client(&server.address.to_string()).await;
        waiting(&semaphore, NAME, 1).await;
        let began = Instant::now();
        way.leave(client);
        waiting(&semaphore, NAME, 0).await;
        assert!(began.elapsed() < SOON, "{way:?}");
    }
    let mut live = Shape::ByteBehind.client(&server.address.to_string()).await;
    waiting(&semaphore, NAME, 1).await;
    drop(permit);
    assert_eq!(status(&mut live).await, 200);
}

/// Like a client of tonic, or of a pool that speaks both versions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limited_client_in_a_handler_notices_it_whatever_version_its_own_request_has() {
    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).wait_timeout(LONG);
    let client = builder.build().unwrap().layer(tower::service_fn(async |_: http::Request<()>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(Full::<Bytes>::default()))
    }));
    let handler = async move |Extension(connection): Extension<Connection>| {
        let request = http::Request::builder().version(http::Version::HTTP_2);
        let request = request.extension(connection).body(()).unwrap();
        client.oneshot(request).await.unwrap().map(Body::new)
    };
    let server = Server::start_holding(Router::new().route("/", any(handler))).await;
    let _permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    let client = Shape::ByteBehind.client(&server.address.to_string()).await;
    waiting(&semaphore, NAME, 1).await;
    let began = Instant::now();
    drop(client);
    waiting(&semaphore, NAME, 0).await;
    assert!(began.elapsed() < SOON);
}

/// One semaphore's watchdog visits the socket for the requests of all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_semaphore_that_shuts_down_ends_no_looks_at_the_sockets_of_another_s_requests() {
    let [first, semaphore] = [0; 2].map(|_| Semaphore::in_memory());
    let outer = ConcurrencyLimitLayer::builder(&first, "outer").limit(1).build().unwrap();
    let inner = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).wait_timeout(LONG);
    let app = Router::new()
        .route("/before", any(async || "").layer(outer))
        .route("/", any(async || "").layer(inner.build().unwrap()));
    let server = Server::start_holding(app).await;
    let _permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    let mut client = TcpStream::connect(server.address).await.unwrap();
    client.write_all(b"GET /before HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&mut client).await, 200);
    client.write_all(&Shape::ByteBehind.begins()).await.unwrap();
    waiting(&semaphore, NAME, 1).await;
    first.shutdown().await;
    let began = Instant::now();
    drop(client);
    waiting(&semaphore, NAME, 0).await;
    assert!(began.elapsed() < SOON);
}

// ===== other servers and other sockets =====

/// Serves one connection with hyper alone.
async fn serve_by_hand(socket: TcpStream, layer: ConcurrencyLimitLayer, half_close: bool) {
    let io = ConnectionIo::over_tcp(BufStream::new(socket), |io| io.get_ref());
    let io = io.half_close(half_close);
    let connection = io.connection();
    let served = tower::service_fn(async |request: http::Request<Incoming>| {
        let length = request.into_body().collect().await?.to_bytes().len();
        Ok::<_, hyper::Error>(http::Response::new(Full::new(Bytes::from(length.to_string()))))
    });
    let service = TowerToHyperService::new(connection.layer(layer.layer(served)));
    let mut builder = hyper::server::conn::http1::Builder::new();
    let _ = builder.half_close(half_close).serve_connection(TokioIo::new(io), service).await;
}

/// Returns the address of a server that is not Axum's.
async fn by_hand(half_close: bool) -> (Semaphore, std::net::SocketAddr) {
    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).wait_timeout(LONG);
    let layer = builder.build().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            tokio::spawn(serve_by_hand(socket, layer.clone(), half_close));
        }
    });
    (semaphore, address)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_notices_it_at_the_socket_under_its_connections() {
    let (semaphore, address) = by_hand(false).await;
    let _permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    for way in WAYS {
        let client = Shape::Chunked.client(&address.to_string()).await;
        waiting(&semaphore, NAME, 1).await;
        let began = Instant::now();
        way.leave(client);
        waiting(&semaphore, NAME, 0).await;
        assert!(began.elapsed() < SOON, "{way:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_half_of_a_connection_may_be_closed_only_a_reset_is_an_end() {
    let (semaphore, address) = by_hand(true).await;
    let requests = [
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello",
        "GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    ];
    for request in requests {
        let permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        waiting(&semaphore, NAME, 1).await;
        sleep(A_WHILE).await;
        waiting(&semaphore, NAME, 1).await;
        drop(permit);
        assert_eq!(status(&mut client).await, 200);
    }
    in_use(&semaphore, NAME, 0).await;
    let _permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    let client = Shape::Chunked.client(&address.to_string()).await;
    waiting(&semaphore, NAME, 1).await;
    let began = Instant::now();
    Leaves::Rst.leave(client);
    waiting(&semaphore, NAME, 0).await;
    assert!(began.elapsed() < SOON);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_over_a_listener_of_ones_own_that_left_takes_no_place() {
    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).wait_timeout(LONG);
    let app = Router::new().route("/", any(async || "never")).layer(builder.build().unwrap());
    let listener = Buffered::bind().await;
    let serve = tower_semaphore::limit::serve(listener, app).over_tcp(|io| io.get_ref());
    let address = serve.local_addr().unwrap().to_string();
    let server = tokio::spawn(serve.into_future());
    let _permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    for shape in SHAPES {
        let client = shape.client(&address).await;
        waiting(&semaphore, NAME, 1).await;
        let began = Instant::now();
        drop(client);
        waiting(&semaphore, NAME, 0).await;
        assert!(began.elapsed() < SOON, "{shape:?}");
    }
    server.abort();
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_a_unix_socket_that_left_takes_no_place() {
    use tokio::net::{UnixListener, UnixStream};

    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).wait_timeout(LONG);
    let app = Router::new().route("/", any(async || "never")).layer(builder.build().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let server = tokio::spawn(tower_semaphore::limit::serve(listener, app).into_future());
    let _permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    for shape in SHAPES {
        let mut client = UnixStream::connect(&path).await.unwrap();
        client.write_all(&shape.begins()).await.unwrap();
        waiting(&semaphore, NAME, 1).await;
        let began = Instant::now();
        drop(client);
        waiting(&semaphore, NAME, 0).await;
        assert!(began.elapsed() < SOON, "{shape:?}");
    }
    server.abort();
}

// ===== the gateway =====

async fn gateway() -> (TestRedis, Semaphore, WireServer, Gateway) {
    let (redis, upstream) = (TestRedis::start(), WireServer::start().await);
    let url = redis.url();
    let args = ["--redis", &url, "--name", NAME, "--limit", "1", "--wait", "20s"];
    let gateway = Gateway::start(&upstream.url(), &[&args[..], &["--max-queue", "20"]].concat());
    let semaphore = redis.semaphore();
    (redis, semaphore, upstream, gateway)
}

fn address(gateway: &Gateway) -> &str {
    gateway.url().strip_prefix("http://").unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_left_a_gateway_take_no_place_of_its_queue_and_reach_no_upstream() {
    let (_redis, semaphore, upstream, gateway) = gateway().await;
    for (shape, way) in SHAPES.iter().flat_map(|shape| WAYS.map(|way| (*shape, way))) {
        let permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
        let mut clients = Vec::new();
        for _ in 0..20 {
            clients.push(shape.client(address(&gateway)).await);
        }
        waiting(&semaphore, NAME, 20).await;
        let began = Instant::now();
        clients.into_iter().for_each(|client| way.leave(client));
        waiting(&semaphore, NAME, 0).await;
        let took = began.elapsed();
        println!("{shape:?}, {way:?}: all have left the queue after {took:?}");
        assert!(took < SOON, "{shape:?}, {way:?}: {took:?}");

        // A client that stays gets the place, and is the first that the upstream sees.
        let mut live = Wire::connect(gateway.url()).await;
        live.send("GET /live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        waiting(&semaphore, NAME, 1).await;
        drop(permit);
        let mut server = upstream.accept().await;
        assert!(server.head().await.starts_with("get /live"), "{shape:?}, {way:?}");
        server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(live.status().await.0, 200);
        in_use(&semaphore, NAME, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_left_a_gateway_frees_its_permit_though_the_upstream_is_not_done() {
    let (_redis, semaphore, upstream, gateway) = gateway().await;
    for way in WAYS {
        let client = Shape::ByteBehind.client(address(&gateway)).await;
        let mut server = upstream.accept().await;
        server.head().await;
        in_use(&semaphore, NAME, 1).await;
        sleep(A_WHILE).await;
        in_use(&semaphore, NAME, 1).await;
        let began = Instant::now();
        way.leave(client);
        in_use(&semaphore, NAME, 0).await;
        let took = began.elapsed();
        assert!(took < SOON, "{way:?}: {took:?}");
        assert_eq!(server.rest().await, "", "the gateway leaves the upstream");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stays_keeps_its_place_in_a_gateway_though_its_bytes_lie_unread() {
    let (_redis, semaphore, upstream, gateway) = gateway().await;
    for shape in SHAPES {
        let permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
        let mut client = shape.client(address(&gateway)).await;
        waiting(&semaphore, NAME, 1).await;
        sleep(A_WHILE).await;
        waiting(&semaphore, NAME, 1).await;
        drop(permit);
        let (rest, length) = shape.ends();
        client.write_all(rest).await.unwrap();
        let mut server = upstream.accept().await;
        let head = server.head().await;
        assert!(head.starts_with("post /") || head.starts_with("get /"), "{head}");
        match shape {
            Shape::Chunked => assert_eq!(server.bytes(15).await, "5\r\nhello\r\n0\r\n\r\n"),
            Shape::Long => assert_eq!(server.raw(length).await.len(), length),
            Shape::ByteBehind => {}
        }
        server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(status(&mut client).await, 200, "{shape:?}");
        in_use(&semaphore, NAME, 0).await;
    }
}
