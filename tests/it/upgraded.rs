//! Upgraded connections: each holds its permit exactly as long as it is of use, whatever its handler does meanwhile.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::routing::any;
use axum::{Extension, Router};
use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::{ConcurrencyLimitBuilder, Connection};
use tower_semaphore::{ConcurrencyLimitLayer, LeaseLost, Semaphore};

use crate::support::http::Server;
use crate::support::semaphore::in_use;

const NAME: &str = "api";
/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(20);
/// Half a second is promised, but the machine may be busy.
const SOON: Duration = Duration::from_secs(3);
/// Several visits to each socket.
const A_WHILE: Duration = Duration::from_millis(1200);
const UPGRADE: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: push\r\n\r\n";

/// An upgraded connection, as its handler has it, and the handle on it.
type Handler = (TokioIo<hyper::upgrade::Upgraded>, Connection);

fn builder(semaphore: &Semaphore) -> ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, NAME).limit(1).wait_timeout(Duration::from_secs(2))
}

fn switching<B: Default>() -> Response<B> {
    let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
    let response = response.header("connection", "upgrade").header("upgrade", "push");
    response.body(B::default()).unwrap()
}

/// A route whose handler passes each upgraded connection to the test.
fn handing_over() -> (axum::routing::MethodRouter, mpsc::UnboundedReceiver<Handler>) {
    let (handlers, opened) = mpsc::unbounded_channel();
    let route =
        any(async move |Extension(connection): Extension<Connection>, mut request: Request| {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let socket = TokioIo::new(upgrade.await.unwrap());
                handlers.send((socket, connection))
            });
            switching::<Body>()
        });
    (route, opened)
}

async fn head(socket: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(LONG, socket.read_u8()).await.expect("a response").unwrap());
    }
    String::from_utf8(head).unwrap()
}

async fn status(socket: &mut TcpStream) -> u16 {
    head(socket).await.split(' ').nth(1).unwrap().parse().unwrap()
}

async fn ask(address: SocketAddr) -> TcpStream {
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(UPGRADE).await.unwrap();
    client
}

/// A client and its handler's end, and a server that holds the permit.
struct Stage {
    semaphore: Semaphore,
    client: TcpStream,
    handler: TokioIo<hyper::upgrade::Upgraded>,
    connection: Connection,
    _server: Server,
}

impl Stage {
    async fn start() -> Self {
        let semaphore = Semaphore::in_memory();
        let (route, mut opened) = handing_over();
        let layer = builder(&semaphore).build().unwrap();
        let server = Server::start_holding(Router::new().route("/", route).layer(layer)).await;
        let mut client = ask(server.address).await;
        assert_eq!(status(&mut client).await, 101);
        let (handler, connection) = opened.recv().await.unwrap();
        in_use(&semaphore, NAME, 1).await;
        Self { semaphore, client, handler, connection, _server: server }
    }
}

async fn revoke(semaphore: &Semaphore) {
    let id = semaphore.inspect(NAME).await.unwrap().holders[0].id;
    assert!(semaphore.revoke(NAME, id).await.unwrap());
}

// ===== a permit that is lost =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_whose_permit_is_lost_is_closed_though_its_handler_neither_reads_nor_writes() {
    let mut stage = Stage::start().await;
    sleep(A_WHILE).await;
    revoke(&stage.semaphore).await;
    let end = timeout(SOON, stage.client.read(&mut [0])).await.expect("it is closed");
    assert_eq!(end.unwrap_or(0), 0);
    let error = stage.handler.write_all(b"more").await.unwrap_err();
    let lost = error.get_ref().and_then(|error| error.downcast_ref());
    assert_eq!(lost.map(LeaseLost::name), Some(NAME));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_whose_write_is_stuck_is_told_that_its_permit_is_lost() {
    let stage = Stage::start().await;
    let mut handler = stage.handler;
    let writes = tokio::spawn(async move {
        let bytes = [b'x'; 65_536];
        while handler.write_all(&bytes).await.is_ok() {}
    });
    // Until the socket accepts no more.
    sleep(A_WHILE).await;
    revoke(&stage.semaphore).await;
    timeout(SOON, writes).await.expect("its write ends").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_connection_is_closed_as_its_semaphore_is_shut_down() {
    let mut stage = Stage::start().await;
    stage.semaphore.shutdown().await;
    let end = timeout(SOON, stage.client.read(&mut [0])).await.expect("it is closed");
    assert_eq!(end.unwrap_or(0), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_can_wait_for_the_end_of_its_connection() {
    for is_lost in [true, false] {
        let Stage { semaphore, client, handler, connection, _server } = Stage::start().await;
        assert!(timeout(A_WHILE, connection.ended()).await.is_err(), "it is of use");
        let waits = tokio::spawn(async move { connection.ended().await });
        if is_lost {
            revoke(&semaphore).await;
        } else {
            SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
            drop(client);
        }
        timeout(SOON, waits).await.expect("it is told").unwrap();
        drop(handler);
    }
    // The handle does not outlive the connection either.
    let stage = Stage::start().await;
    let waits = tokio::spawn(async move { stage.connection.ended().await });
    drop(stage.handler);
    timeout(SOON, waits).await.expect("it is told").unwrap();
}

// ===== a client that leaves =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_connection_gives_its_permit_back_though_its_handler_does_not_read() {
    for is_byte_unread in [false, true] {
        let Stage { semaphore, mut client, handler, _server, .. } = Stage::start().await;
        if is_byte_unread {
            client.write_all(b"x").await.unwrap();
        }
        sleep(A_WHILE).await;
        in_use(&semaphore, NAME, 1).await;
        SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
        let began = Instant::now();
        drop(client);
        in_use(&semaphore, NAME, 0).await;
        let took = began.elapsed();
        assert!(took < SOON, "{is_byte_unread}: {took:?}");
        drop(handler);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_closed_its_half_of_an_upgraded_connection_has_not_left() {
    let Stage { semaphore, mut client, mut handler, _server, .. } = Stage::start().await;
    client.write_all(b"all I have to say").await.unwrap();
    client.shutdown().await.unwrap();
    sleep(A_WHILE).await;
    in_use(&semaphore, NAME, 1).await;
    let mut said = String::new();
    handler.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "all I have to say");
    handler.write_all(b"late").await.unwrap();
    handler.shutdown().await.unwrap();
    let mut heard = String::new();
    client.read_to_string(&mut heard).await.unwrap();
    assert_eq!(heard, "late");
    sleep(A_WHILE).await;
    in_use(&semaphore, NAME, 1).await;
    drop(handler);
    in_use(&semaphore, NAME, 0).await;
}

// ===== what is upgraded, and what is not =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_that_a_layer_outside_rejects_leaves_no_permit_with_the_connection() {
    let semaphore = Semaphore::in_memory();
    let forbids = axum::middleware::map_response(async |_: Response<Body>| StatusCode::FORBIDDEN);
    let route = any(async || switching::<Body>());
    let app = Router::new().route("/", route).layer(builder(&semaphore).build().unwrap());
    let server = Server::start_holding(app.layer(forbids)).await;
    let mut client = ask(server.address).await;
    for _ in 0..2 {
        assert_eq!(status(&mut client).await, 403);
        in_use(&semaphore, NAME, 0).await;
        client.write_all(UPGRADE).await.unwrap();
    }
}

/// A limited client whose upstream upgrades everything.
fn upgrading_client(
    semaphore: &Semaphore,
) -> impl tower::Service<
    http::Request<()>,
    Response = Response<tower_semaphore::limit::ResponseBody<Full<Bytes>>>,
    Error = Infallible,
    Future: Send,
> + Clone
+ Send
+ Sync
+ 'static {
    let upstream = service_fn(|_: http::Request<()>| async {
        Ok::<_, Infallible>(switching::<Full<Bytes>>())
    });
    builder(semaphore).build().unwrap().layer(upstream)
}

fn upgrade_on(connection: Connection) -> http::Request<()> {
    http::Request::builder().header("upgrade", "push").extension(connection).body(()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_in_a_limited_client_is_over_when_its_handler_answers_with_a_response() {
    let semaphore = Semaphore::in_memory();
    let client = upgrading_client(&semaphore);
    let route = any(async move |Extension(connection): Extension<Connection>| {
        let response = client.oneshot(upgrade_on(connection)).await.unwrap();
        StatusCode::from_u16(response.status().as_u16() + 100).unwrap()
    });
    let server = Server::start_holding(Router::new().route("/", route)).await;
    let mut client = TcpStream::connect(server.address).await.unwrap();
    for _ in 0..2 {
        client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        assert_eq!(status(&mut client).await, 201);
        in_use(&semaphore, NAME, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_in_a_limited_client_is_held_by_the_connection_that_is_upgraded_with_it() {
    let semaphore = Semaphore::in_memory();
    let limited = upgrading_client(&semaphore);
    let (sockets, mut opened) = mpsc::unbounded_channel();
    let route =
        any(async move |Extension(connection): Extension<Connection>, mut request: Request| {
            let upgrade = hyper::upgrade::on(&mut request);
            drop(limited.oneshot(upgrade_on(connection)).await.unwrap());
            tokio::spawn(async move { sockets.send(upgrade.await.unwrap()) });
            switching::<Body>()
        });
    let server = Server::start_holding(Router::new().route("/", route)).await;
    let mut client = ask(server.address).await;
    assert_eq!(status(&mut client).await, 101);
    let socket = opened.recv().await.unwrap();
    sleep(A_WHILE).await;
    in_use(&semaphore, NAME, 1).await;
    drop(socket);
    in_use(&semaphore, NAME, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgraded_connection_holds_no_permit_of_what_its_handler_upgrades_later() {
    let semaphore = Semaphore::in_memory();
    let limited = upgrading_client(&semaphore);
    let (done, mut all_done) = mpsc::unbounded_channel();
    let route =
        any(async move |Extension(connection): Extension<Connection>, mut request: Request| {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let _socket = upgrade.await.unwrap();
                for _ in 0..3 {
                    let response = limited.clone().oneshot(upgrade_on(connection.clone())).await;
                    done.send(response.unwrap().status()).unwrap();
                }
                drop(done);
                std::future::pending::<()>().await;
            });
            switching::<Body>()
        });
    let server = Server::start_holding(Router::new().route("/", route)).await;
    let mut client = ask(server.address).await;
    assert_eq!(status(&mut client).await, 101);
    for _ in 0..3 {
        let status = timeout(LONG, all_done.recv()).await.unwrap().unwrap();
        assert_eq!(status, StatusCode::SWITCHING_PROTOCOLS, "it has a permit");
    }
    in_use(&semaphore, NAME, 0).await;
}
