//! The layer in stacks with others: what they do to a response does not affect its permit.

use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{MethodRouter, any_service, get};
use futures_util::{StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::sync::mpsc;
use tower::{ServiceBuilder, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::timeout::{ResponseBodyTimeoutLayer, TimeoutLayer};
use tower_http::trace::TraceLayer;
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::{ConcurrencyLimitLayer, Policy, Semaphore};

use crate::support::eventually;
use crate::support::http::{Server, curl, get as get_request};

const NAME: &str = "api";
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(200);

struct Stage {
    backend: MemoryBackend,
    semaphore: Semaphore,
    layer: ConcurrencyLimitLayer,
}

impl Stage {
    /// Limit 1, and no request may wait.
    fn new() -> Self {
        let backend = MemoryBackend::new();
        let semaphore = Semaphore::new(backend.clone());
        let layer = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1);
        let layer = layer.wait_timeout(Duration::ZERO).build().unwrap();
        Self { backend, semaphore, layer }
    }

    async fn is_full(&self) -> bool {
        self.semaphore.try_acquire(NAME, &Policy::new(1)).await.is_err()
    }

    async fn until_empty(&self) {
        eventually("nothing is stored", async || self.backend.is_empty()).await;
    }
}

type Taps = mpsc::UnboundedReceiver<mpsc::UnboundedSender<&'static str>>;

/// A route that streams what the taps send.
fn streaming() -> (MethodRouter, Taps) {
    let (taps, opened) = mpsc::unbounded_channel();
    let route = get(async move || {
        let (tap, frames) = mpsc::unbounded_channel::<&'static str>();
        taps.send(tap).unwrap();
        let frames = stream::unfold(frames, async |mut frames| {
            frames.recv().await.map(|frame| (Ok::<_, Infallible>(frame), frames))
        });
        // Compression polls once more after the end.
        Body::from_stream(frames.fuse())
    });
    (route, opened)
}

// ===== compression =====

const TEXT: &str = "a text that is long enough to be compressed, and then some, and then some more";

/// `/` answers with a text, `/stream` streams; both under these layers.
async fn compressed(stack: impl FnOnce(Router) -> Router) -> (Server, Taps) {
    let (route, taps) = streaming();
    let router = Router::new().route("/", get(async || TEXT)).route("/stream", route);
    (Server::start(stack(router)).await, taps)
}

async fn compression_changes_nothing(stage: &Stage, server: &Server, taps: &mut Taps) {
    let zipped = &["-H", "accept-encoding: gzip", "--compressed"];
    for _ in 0..3 {
        let reply = curl(&server.url("/"), zipped).await;
        assert_eq!((reply.status, &*reply.body), (200, TEXT));
        assert_eq!(reply.header("content-encoding"), Some("gzip"));
        stage.until_empty().await;
    }

    let mut request = get_request("/stream");
    request.headers_mut().insert("accept-encoding", "gzip".parse().unwrap());
    let response = server.send(request).await;
    assert_eq!(response.headers()["content-encoding"], "gzip");
    let tap = taps.recv().await.unwrap();
    tap.send("data").unwrap();
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    assert!(stage.is_full().await);
    let reply = curl(&server.url("/"), zipped).await;
    assert_eq!((reply.status, &reply.json()["reason"]), (429, &"limit".into()));
    assert_eq!(reply.header("content-type"), Some("application/problem+json"));
    drop(tap);
    assert!(body.collect().await.is_ok());
    stage.until_empty().await;

    // Also if it is not read to its end.
    drop(server.get("/stream").await);
    stage.until_empty().await;
}

#[tokio::test]
async fn compression_may_be_outside() {
    let stage = Stage::new();
    let layer = stage.layer.clone();
    let stack = |router: Router| router.layer(layer).layer(CompressionLayer::new());
    let (server, mut taps) = compressed(stack).await;
    compression_changes_nothing(&stage, &server, &mut taps).await;
}

#[tokio::test]
async fn compression_may_be_inside() {
    let stage = Stage::new();
    let layer = stage.layer.clone();
    let stack = |router: Router| router.layer(CompressionLayer::new()).layer(layer);
    let (server, mut taps) = compressed(stack).await;
    compression_changes_nothing(&stage, &server, &mut taps).await;
}

// ===== timeouts =====

#[tokio::test]
async fn a_timeout_inside_gives_the_permit_back() {
    let stage = Stage::new();
    let router = Router::new()
        .route("/", get(pending::<&str>))
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, SHORT))
        .layer(stage.layer.clone());
    let server = Server::start(router).await;
    for _ in 0..2 {
        assert_eq!(server.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
        stage.until_empty().await;
    }
}

/// A stream that stands still for too long is an error of the body, on either side of the layer.
#[tokio::test]
async fn a_timeout_of_the_body_gives_the_permit_back() {
    for inside in [true, false] {
        let idle = ResponseBodyTimeoutLayer::new(SHORT);
        let stage = Stage::new();
        let (route, mut taps) = streaming();
        let router = Router::new().route("/", route);
        let router = if inside {
            router.layer(idle).layer(stage.layer.clone())
        } else {
            router.layer(stage.layer.clone()).layer(idle)
        };
        let server = Server::start(router).await;
        let mut body = server.get("/").await.into_body();
        let tap = taps.recv().await.unwrap();
        tap.send("data").unwrap();
        body.frame().await.unwrap().unwrap();
        assert!(stage.is_full().await);
        let end = tokio::time::timeout(LONG, body.frame()).await.expect("it times out");
        assert!(end.unwrap().is_err());
        stage.until_empty().await;
    }
}

// ===== services that are no handlers =====

async fn is_limited(stage: &Stage, router: Router, path: &str) {
    let server = Server::start(router).await;
    assert_eq!(server.get(path).await.status(), StatusCode::OK, "{path}");
    stage.until_empty().await;
    let permit = stage.semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    assert_eq!(server.get(path).await.status(), StatusCode::TOO_MANY_REQUESTS, "{path}");
    drop(permit);
}

#[tokio::test]
async fn it_can_be_in_any_stack_of_services() {
    let stage = Stage::new();
    let answer = service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Full::<bytes::Bytes>::from("a")))
    });
    let service = || ServiceBuilder::new().layer(stage.layer.clone()).service(answer);

    is_limited(&stage, Router::new().route_service("/a", service()), "/a").await;
    is_limited(&stage, Router::new().nest_service("/deep", service()), "/deep/a").await;
    is_limited(&stage, Router::new().fallback_service(service()), "/nowhere").await;
    is_limited(&stage, Router::new().route("/a", any_service(service())), "/a").await;
    let stacked = get(async || "a").layer(
        ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(CatchPanicLayer::new())
            .layer(CompressionLayer::new())
            .layer(stage.layer.clone())
            .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LONG)),
    );
    is_limited(&stage, Router::new().route("/a", stacked), "/a").await;
}
