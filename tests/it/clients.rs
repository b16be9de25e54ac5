//! The layer on clients: those of hyper-util and reqwest, with refusals as responses and as errors.

#[path = "../../examples/client/adapter.rs"]
mod adapter;

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::mpsc;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{
    BoxError, ConcurrencyLimitBuilder, HeaderKey, Refusal, RefusalReason,
};
use tower_semaphore::{ConcurrencyLimitLayer, Policy, Semaphore};

use self::adapter::limited;
use crate::support::eventually;
use crate::support::http::Server;
use crate::support::redis::{TestRedis, free_port};

const NAME: &str = "third-party";

type Body = Empty<Bytes>;

fn client() -> Client<HttpConnector, Body> {
    Client::builder(TokioExecutor::new()).build_http()
}

fn request(url: &str) -> Request<Body> {
    Request::get(url).body(Body::new()).unwrap()
}

/// Limit 1, and no request may wait, unless set.
fn builder(semaphore: &Semaphore) -> ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, NAME).limit(1).wait_timeout(Duration::ZERO)
}

/// The API of a third party: answers at `/`, and streams at `/stream` until the tap is dropped.
async fn api() -> (Server, mpsc::UnboundedReceiver<mpsc::UnboundedSender<&'static str>>) {
    let (taps, opened) = mpsc::unbounded_channel();
    let streaming = get(async move || {
        let (tap, frames) = mpsc::unbounded_channel::<&'static str>();
        taps.send(tap).unwrap();
        axum::body::Body::from_stream(stream::unfold(frames, async |mut frames| {
            frames.recv().await.map(|frame| (Ok::<_, Infallible>(frame), frames))
        }))
    });
    let router = Router::new().route("/", get(async || "answer")).route("/stream", streaming);
    (Server::start(router).await, opened)
}

async fn until_empty(backend: &MemoryBackend) {
    eventually("nothing is stored", async || backend.is_empty()).await;
}

fn refusal(error: &BoxError) -> &Refusal {
    error.downcast_ref().unwrap_or_else(|| panic!("not a refusal: {error}"))
}

#[tokio::test]
async fn a_refusal_can_be_an_error() {
    let (api, mut opened) = api().await;
    let backend = MemoryBackend::new();
    let layer = builder(&Semaphore::new(backend.clone())).build().unwrap().into_error();
    let client = layer.layer(client());
    let response = client.clone().oneshot(request(&api.url("/stream"))).await.unwrap();
    let tap = opened.recv().await.unwrap();

    let error = client.clone().oneshot(request(&api.url("/"))).await.unwrap_err();
    let refused = refusal(&error);
    assert_eq!(
        (refused.reason, refused.rejected.as_ref().unwrap().limit),
        (RefusalReason::Limit, 1)
    );
    assert!(refused.retry_after.is_some());
    assert_eq!(error.to_string(), "all 1 permits of third-party are in use");

    // To the end of the body, as always.
    drop(tap);
    assert!(response.into_body().collect().await.unwrap().to_bytes().is_empty());
    let response = client.clone().oneshot(request(&api.url("/"))).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "answer");
    until_empty(&backend).await;
}

#[tokio::test]
async fn an_error_of_the_client_comes_out_as_it_is() {
    let nobody = format!("http://127.0.0.1:{}/", free_port());
    let backend = MemoryBackend::new();
    let layer = builder(&Semaphore::new(backend.clone())).build().unwrap().into_error();
    let error = layer.layer(client()).oneshot(request(&nobody)).await.unwrap_err();
    let error = error.downcast::<hyper_util::client::legacy::Error>().unwrap();
    assert!(error.is_connect());
    until_empty(&backend).await;
}

#[tokio::test]
async fn a_status_of_the_other_side_is_no_refusal() {
    let busy = async || StatusCode::TOO_MANY_REQUESTS;
    let api = Server::start(Router::new().route("/", get(busy))).await;
    let layer = builder(&Semaphore::in_memory()).build().unwrap().into_error();
    let response = layer.layer(client()).oneshot(request(&api.url("/"))).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_backend_that_is_away_is_the_source_of_the_error() {
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    redis.kill();
    let layer = builder(&semaphore).build().unwrap().into_error();
    let error = layer.layer(client()).oneshot(request("http://localhost/")).await.unwrap_err();
    let refused = refusal(&error);
    assert_eq!(refused.reason, RefusalReason::Unavailable);
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(std::error::Error::source(refused).is_some());
}

#[tokio::test]
async fn the_outermost_layer_makes_errors_of_all_refusals() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let _permit = semaphore.acquire("inner", &Policy::new(1)).await.unwrap();
    let inner = ConcurrencyLimitLayer::builder(&semaphore, "inner").limit(1);
    let stack = ServiceBuilder::new()
        .layer(builder(&semaphore).build().unwrap().into_error())
        .layer(inner.wait_timeout(Duration::ZERO).build().unwrap())
        .service(client());
    let error = stack.oneshot(request("http://localhost/")).await.unwrap_err();
    assert_eq!(&*refusal(&error).policy, "inner");
    // The permit of the outer layer is released.
    assert!(semaphore.try_acquire(NAME, &Policy::new(1)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn each_refusal_says_what_stood_in_the_way() {
    let semaphore = Semaphore::in_memory();
    let told = async |layer: ConcurrencyLimitBuilder| {
        let client = layer.build().unwrap().into_error().layer(client());
        let error = client.oneshot(request("http://localhost/")).await.unwrap_err();
        (refusal(&error).reason, error.to_string())
    };
    let keyed = builder(&semaphore).key(HeaderKey::from_static("x-tenant"));
    let (reason, text) = told(keyed).await;
    assert_eq!(reason, RefusalReason::MissingKey);
    assert_eq!(text, "the request has no key for third-party: it has no x-tenant header");

    let _permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    let (reason, text) = told(builder(&semaphore).wait_timeout(Duration::from_millis(20))).await;
    assert_eq!(reason, RefusalReason::QueueTimeout);
    assert_eq!(text, "none of 1 permits of third-party came free in time");

    semaphore.shutdown().await;
    let (reason, text) = told(builder(&semaphore)).await;
    assert_eq!(reason.as_str(), "closed");
    assert_eq!(text, "the semaphore of third-party was shut down");
}

#[tokio::test]
async fn dropping_a_call_leaves_nothing() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    let patient = builder(&semaphore).wait_timeout(Duration::from_secs(20)).build().unwrap();
    let mut client = patient.into_error().layer(client());
    let waiting = client.ready().await.unwrap().call(request("http://localhost/"));
    assert_eq!(semaphore.inspect(NAME).await.unwrap().waiting, 1);
    drop(waiting);
    drop(permit);
    until_empty(&backend).await;
}

// ===== reqwest =====

fn reqwest_client(
    layer: ConcurrencyLimitLayer,
) -> impl Service<reqwest::Request, Response = reqwest::Response, Error = BoxError, Future: Send>
+ Clone
+ Send {
    limited(reqwest::Client::builder().no_proxy().build().unwrap(), layer)
}

/// A call in a task of its own, and a stand-in for the client: both need what the adapter's type promises.
#[tokio::test]
async fn the_adapter_of_reqwest_can_be_spawned_and_wraps_any_service() {
    let stand_in = tower::service_fn(async |request: reqwest::Request| {
        let path = request.url().path().to_owned();
        Ok::<_, Infallible>(reqwest::Response::from(Response::new(path)))
    });
    let backend = MemoryBackend::new();
    let layer = builder(&Semaphore::new(backend.clone())).build().unwrap();
    let client = tower::util::BoxCloneService::new(limited(stand_in, layer));
    let request = |path: &str| {
        let url = format!("http://localhost{path}").parse().unwrap();
        reqwest::Request::new(reqwest::Method::GET, url)
    };
    let call = tokio::spawn(client.clone().oneshot(request("/one")));
    let held = call.await.unwrap().unwrap();
    let refused = tokio::spawn(client.clone().oneshot(request("/two"))).await.unwrap();
    assert_eq!(refusal(&refused.unwrap_err()).reason, RefusalReason::Limit);
    assert_eq!(held.text().await.unwrap(), "/one");
    until_empty(&backend).await;
}

#[tokio::test]
async fn reqwest_holds_its_permit_until_the_body_is_read() {
    let (api, mut opened) = api().await;
    let backend = MemoryBackend::new();
    let layer = builder(&Semaphore::new(backend.clone())).build().unwrap();
    let client = reqwest_client(layer);
    let get = |path: &str| {
        let url = api.url(path).parse().unwrap();
        client.clone().oneshot(reqwest::Request::new(reqwest::Method::GET, url))
    };
    let mut response = get("/stream").await.unwrap();
    let tap = opened.recv().await.unwrap();
    tap.send("data").unwrap();
    assert_eq!(response.chunk().await.unwrap().unwrap(), "data");
    assert_eq!(refusal(&get("/").await.unwrap_err()).reason, RefusalReason::Limit);

    drop(tap);
    assert_eq!(response.chunk().await.unwrap(), None);
    assert_eq!(get("/").await.unwrap().text().await.unwrap(), "answer");
    // Dropped unread, which ends it, too.
    drop(get("/stream").await.unwrap());
    until_empty(&backend).await;
}

/// A body that can be sent again, and one of a known length, are still so behind the adapter.
#[tokio::test]
async fn reqwest_sends_what_it_was_given() {
    let echo = axum::routing::post(async |headers: http::HeaderMap, body: String| {
        let length = headers.get("content-length").map_or("?", |length| length.to_str().unwrap());
        format!("{length} {} {body}", headers["x-own"].to_str().unwrap())
    });
    let api = Server::start(Router::new().route("/", echo)).await;
    let layer = builder(&Semaphore::in_memory()).build().unwrap();
    let mut request = reqwest::Request::new(reqwest::Method::POST, api.url("/").parse().unwrap());
    request.headers_mut().insert("x-own", "value".parse().unwrap());
    *request.body_mut() = Some("hello".into());
    let response = reqwest_client(layer).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.content_length(), Some(13));
    assert_eq!(response.text().await.unwrap(), "5 value hello");
}

#[tokio::test]
async fn a_request_that_cannot_be_sent_is_an_error_and_costs_no_permit() {
    let backend = MemoryBackend::new();
    let layer = builder(&Semaphore::new(backend.clone())).build().unwrap();
    let url = format!("http://127.0.0.1/{}", "long".repeat(20_000)).parse().unwrap();
    let request = reqwest::Request::new(reqwest::Method::GET, url);
    let error = reqwest_client(layer).oneshot(request).await.unwrap_err();
    assert!(error.downcast_ref::<Refusal>().is_none(), "{error}");
    until_empty(&backend).await;
}

/// `Full` and the like: any request body will do.
#[tokio::test]
async fn bodies_of_requests_may_be_anything() {
    let echo = axum::routing::post(async |body: String| body);
    let api = Server::start(Router::new().route("/", echo)).await;
    let layer = builder(&Semaphore::in_memory()).build().unwrap().into_error();
    let client = layer.layer(Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>());
    let request = Request::post(api.url("/")).body(Full::from("hello")).unwrap();
    let response = client.oneshot(request).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
}
