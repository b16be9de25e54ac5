//! The layer as a Tower service, without sockets: when it calls the inner service, and when it releases a permit.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, pending, ready};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full};
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{
    BoxError, ConcurrencyLimitBuilder, HeaderKey, HoldUntil, MissingKey, OnLost, Refusal,
    RefusalReason,
};
use tower_semaphore::{
    ConcurrencyLimit, ConcurrencyLimitLayer, LeaseLost, Limit, Name, Permit, Policy, Rejected,
    Semaphore,
};
use tower_test::mock::{self, Mock};

use crate::support::told::Told;

const NAME: &str = "api";
const LINGER: Duration = Duration::from_millis(400);

type Inner = Mock<Request<()>, Response<Script>>;

/// What a test works with: the backend shows what is stored, the semaphore what holds and waits.
struct Bench {
    backend: MemoryBackend,
    semaphore: Semaphore,
}

impl Bench {
    fn new() -> Self {
        let backend = MemoryBackend::new();
        let semaphore = Semaphore::new(backend.clone());
        Self { backend, semaphore }
    }

    fn builder(&self) -> ConcurrencyLimitBuilder {
        ConcurrencyLimitLayer::builder(&self.semaphore, NAME).wait_timeout(Duration::from_secs(5))
    }

    fn layer(&self, limit: u32) -> ConcurrencyLimitLayer {
        self.builder().limit(limit).build().unwrap()
    }

    /// Returns how many hold, and how many wait.
    async fn places(&self) -> (u64, u64) {
        let seen = self.semaphore.inspect(NAME).await.unwrap();
        (seen.in_use, seen.waiting)
    }
}

fn request() -> Request<()> {
    Request::new(())
}

fn full(text: &'static str) -> Response<Full<Bytes>> {
    Response::new(Full::from(text))
}

/// The calls of a service that answers at once.
trait Answers<B>:
    Service<Request<()>, Response = Response<B>, Error = Infallible, Future = Answer<B>> + Clone
{
}

type Answer<B> = Ready<Result<Response<B>, Infallible>>;

impl<S, B> Answers<B> for S where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible, Future = Answer<B>> + Clone
{
}

/// A service that answers every request with this response.
fn answers<B>(response: impl Fn() -> Response<B> + Clone) -> impl Answers<B> {
    service_fn(move |_| ready(Ok(response())))
}

fn refusal<B>(response: &Response<B>) -> &Refusal {
    response.extensions().get().expect("a refusal")
}

fn rejected(refusal: &Refusal) -> Rejected {
    refusal.rejected.clone().expect("what the semaphore said")
}

// ===== a body with given steps =====

#[derive(Debug)]
enum Step {
    Data(&'static str),
    Trailers,
    Error,
    Panic,
    /// Pending, without waking any task.
    Pending,
}

/// A body of these steps. `foretells` means that it knows beforehand when no more frames come.
#[derive(Debug)]
struct Script {
    steps: VecDeque<Step>,
    foretells: bool,
}

impl Script {
    fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self { steps: steps.into_iter().collect(), foretells: false }
    }

    fn foretelling(steps: impl IntoIterator<Item = Step>) -> Self {
        Self { foretells: true, ..Self::new(steps) }
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(match self.steps.pop_front() {
            None => None,
            Some(Step::Data(text)) => Some(Ok(Frame::data(Bytes::from(text)))),
            Some(Step::Trailers) => Some(Ok(Frame::trailers(trailers()))),
            Some(Step::Error) => Some(Err("the source ran dry".into())),
            Some(Step::Panic) => panic!("the body panics, as it is told to"),
            Some(Step::Pending) => return Poll::Pending,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.foretells && self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let bytes = self.steps.iter().map(|step| match step {
            Step::Data(text) => text.len() as u64,
            _ => 0,
        });
        SizeHint::with_exact(bytes.sum())
    }
}

fn trailers() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", HeaderValue::from_static("17"));
    trailers
}

// ===== poll_ready and call =====

#[tokio::test]
async fn the_service_inside_is_made_ready_once_there_is_a_permit() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    handle.allow(0);
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    assert_eq!(bench.places().await, (1, 0), "it has its permit");
    let mut two = ask(&mut service);
    assert_pending!(two.poll());

    handle.allow(1);
    assert!(one.is_woken());
    assert!(!two.is_woken(), "it waits for a permit, and for nothing else");
    assert_pending!(one.poll());
    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(one.poll());
}

#[tokio::test]
async fn a_service_that_cannot_be_made_ready_fails_its_request_and_gives_its_permit_back() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    handle.send_error("broken for good");
    let error = assert_ready_err!(ask(&mut service).poll());
    assert_eq!(error.to_string(), "broken for good");
    assert_eq!(bench.places().await, (0, 0));
}

#[tokio::test]
async fn a_client_that_leaves_before_the_service_is_ready_gives_its_permit_back() {
    let bench = Bench::new();
    let (mut service, mut handle) =
        spawn(&bench.builder().limit(1).linger(LINGER).build().unwrap());
    handle.allow(0);
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    drop(one);
    assert_eq!(bench.places().await, (0, 0), "nothing was begun, so nothing lingers");
}

#[tokio::test]
async fn the_queue_of_one_key_reserves_nothing_of_the_service_inside() {
    let bench = Bench::new();
    let by_tenant = bench.builder().key(HeaderKey::from_static("x-tenant")).limit(1).build();
    // Like Tower's own limit, a buffer or a tonic channel: being ready takes a slot.
    let service = tower::ServiceBuilder::new()
        .layer(by_tenant.unwrap())
        .layer(tower::limit::ConcurrencyLimitLayer::new(3))
        .service(service_fn(|request: Request<()>| async move {
            if request.uri().path() == "/hangs" {
                pending::<()>().await;
            }
            Ok::<_, Infallible>(full("served"))
        }));
    let of = |tenant: &str, path: &str| {
        let request = Request::get(path).header("x-tenant", tenant).body(()).unwrap();
        task::spawn(service.clone().oneshot(request))
    };
    let mut backlog: Vec<_> = (0..10).map(|_| of("a", "/hangs")).collect();
    for request in &mut backlog {
        assert_pending!(request.poll());
    }
    assert_ready_ok!(of("b", "/").poll());
}

#[tokio::test]
async fn being_ready_takes_no_permit() {
    let bench = Bench::new();
    let mut one = bench.layer(1).layer(answers(|| full("")));
    let mut two = one.clone();
    one.ready().await.unwrap();
    two.ready().await.unwrap();
    assert!(bench.backend.is_empty());

    // So a service that is ready and never called is in no other's way.
    two.call(request()).await.unwrap();
    drop((one, two));
    assert!(bench.backend.is_empty());
}

/// Panics if it is called without having been ready; a clone of it is not ready.
struct Strict {
    ready: bool,
    calls: Arc<AtomicUsize>,
}

impl Strict {
    fn new() -> Self {
        Self { ready: false, calls: Arc::default() }
    }
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { ready: false, calls: Arc::clone(&self.calls) }
    }
}

impl Service<Request<()>> for Strict {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without having been made ready");
        self.calls.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::default()))
    }
}

#[tokio::test]
async fn the_service_that_was_made_ready_is_the_one_called() {
    let bench = Bench::new();
    let inner = Strict::new();
    let calls = Arc::clone(&inner.calls);
    let mut service = bench.layer(1).layer(inner);

    // Several at the same time, each with the service that was ready when it came.
    let mut futures = Vec::new();
    for _ in 0..3 {
        futures.push(service.ready().await.unwrap().call(request()));
    }
    for future in futures {
        future.await.unwrap();
    }
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn requests_that_wait_are_answered_at_once_on_a_shutdown_and_those_in_flight_go_on() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let (mut one, mut two) = (ask(&mut service), ask(&mut service));
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    bench.semaphore.stop_waiting();
    assert!(two.is_woken());
    let response = assert_ready_ok!(two.poll());
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refusal(&response).reason.as_str(), "closed");
    // Nor may another request wait, and it gets the same answer.
    let response = assert_ready_ok!(ask(&mut service).poll());
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refusal(&response).reason.as_str(), "closed");
    // If no request ever waits, nothing changes.
    let builder = bench.builder().limit(1).wait_timeout(Duration::ZERO);
    let (mut impatient, _handle) = spawn(&builder.build().unwrap());
    let response = assert_ready_ok!(ask(&mut impatient).poll());
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);

    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(one.poll());
    // A free permit can still be taken.
    let mut three = ask(&mut service);
    assert_pending!(three.poll());
    assert_eq!(bench.places().await, (1, 0));
}

#[tokio::test]
async fn a_request_that_is_refused_does_not_reach_the_service() {
    let bench = Bench::new();
    let inner = Strict::new();
    let calls = Arc::clone(&inner.calls);
    let layer = bench.builder().limit(0).build().unwrap();
    let response = layer.layer(inner).oneshot(request()).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

// ===== what tower's own concurrency limit promises =====

fn spawn(layer: &ConcurrencyLimitLayer) -> (mock::Spawn<ConcurrencyLimit<Inner>>, Handle) {
    mock::spawn_with(|inner| layer.layer(inner))
}

type Handle = mock::Handle<Request<()>, Response<Script>>;

/// Makes another request; the mock is always ready.
fn ask(
    service: &mut mock::Spawn<ConcurrencyLimit<Inner>>,
) -> task::Spawn<<ConcurrencyLimit<Inner> as Service<Request<()>>>::Future> {
    assert_ready_ok!(service.poll_ready());
    task::spawn(service.call(request()))
}

/// Sends the response to the next request that reaches the service.
async fn next(handle: &mut Handle) -> mock::SendResponse<Response<Script>> {
    handle.next_request().await.expect("a request").1
}

fn empty() -> Response<Script> {
    Response::new(Script::foretelling([]))
}

#[tokio::test]
async fn only_so_many_requests_are_inside() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(2));
    let (mut one, mut two, mut three) = (ask(&mut service), ask(&mut service), ask(&mut service));
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    assert_pending!(three.poll());
    assert_eq!(bench.places().await, (2, 1));

    let first = next(&mut handle).await;
    let second = next(&mut handle).await;
    assert_pending!(task::spawn(handle.next_request()).poll(), "the third came in");

    first.send_response(empty());
    assert_ready_ok!(one.poll());
    assert!(three.is_woken());
    assert_pending!(three.poll());
    assert_eq!(bench.places().await, (2, 0));
    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(three.poll());

    second.send_response(empty());
    assert_ready_ok!(two.poll());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn clones_share_the_limit() {
    let bench = Bench::new();
    let layer = bench.layer(1);
    let (mut service, mut handle) = spawn(&layer);
    let mut clone = service.clone();
    let (mut other_route, _other_handle) = spawn(&layer.clone());

    let mut one = ask(&mut service);
    let mut two = ask(&mut clone);
    let mut three = ask(&mut other_route);
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    assert_pending!(three.poll());
    assert_eq!(bench.places().await, (1, 2));

    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(one.poll());
    assert!(two.is_woken() && !three.is_woken());
}

#[tokio::test]
async fn dropping_the_response_future_frees_the_permit() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let mut one = ask(&mut service);
    let mut two = ask(&mut service);
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    let _first = next(&mut handle).await;

    drop(one);
    assert!(two.is_woken());
    assert_pending!(two.poll());
    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(two.poll());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn dropping_the_service_leaves_its_requests_alone_and_nothing_behind() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let mut one = ask(&mut service);
    let mut two = ask(&mut service);
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    drop(service);

    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(one.poll());
    assert_pending!(two.poll());
    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(two.poll());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn an_error_frees_the_permit() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let mut one = ask(&mut service);
    let mut two = ask(&mut service);
    assert_pending!(one.poll());
    assert_pending!(two.poll());

    next(&mut handle).await.send_error("boom");
    assert_ready_err!(one.poll());
    assert!(two.is_woken());
    assert_pending!(two.poll());
    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(two.poll());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn those_who_wait_are_served_in_their_order() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let mut waiting: VecDeque<_> = (0..5).map(|_| ask(&mut service)).collect();
    // Being polled first does not make a request the first in the queue.
    for future in waiting.iter_mut().rev() {
        let _ = future.poll();
    }
    while let Some(mut head) = waiting.pop_front() {
        assert_pending!(head.poll());
        let inside = next(&mut handle).await;
        assert!(waiting.iter().all(|other| !other.is_woken()));
        inside.send_response(empty());
        assert_ready_ok!(head.poll());
        if let Some(next) = waiting.front() {
            assert!(next.is_woken());
        }
    }
    assert!(bench.backend.is_empty());
}

// ===== leaving early, and going wrong =====

#[tokio::test]
async fn the_place_in_the_queue_is_taken_by_the_call() {
    let bench = Bench::new();
    let mut service = bench.layer(1).layer(answers(|| full("x")));
    let unpolled = service.call(request());
    assert_eq!(bench.places().await, (1, 0));
    drop(unpolled);
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn whoever_leaves_the_queue_leaves_no_place() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let mut one = ask(&mut service);
    let mut two = ask(&mut service);
    let mut three = ask(&mut service);
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    assert_pending!(three.poll());
    assert_eq!(bench.places().await, (1, 2));
    drop(two);
    assert_eq!(bench.places().await, (1, 1));

    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(one.poll());
    assert!(three.is_woken());
    drop(three);
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn whoever_leaves_just_as_it_was_granted_passes_the_permit_on() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let mut one = ask(&mut service);
    let mut two = ask(&mut service);
    let mut three = ask(&mut service);
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    assert_pending!(three.poll());
    let _inside = next(&mut handle).await;
    drop(one);
    assert!(two.is_woken());
    // It was granted, and not polled since.
    drop(two);
    assert!(three.is_woken());
    assert_pending!(three.poll());
    next(&mut handle).await.send_response(empty());
    assert_ready_ok!(three.poll());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn a_handler_that_panics_gives_the_permit_back() {
    let bench = Bench::new();
    let inner = service_fn(|_: Request<()>| async {
        if true {
            panic!("the handler panics, as it is told to");
        }
        Ok::<_, Infallible>(full(""))
    });
    let service = bench.layer(1).layer(inner);
    let caught = AssertUnwindSafe(service.clone().oneshot(request())).catch_unwind().await;
    assert!(caught.is_err());
    assert!(bench.backend.is_empty());

    let task = tokio::spawn(service.oneshot(request()));
    assert!(task.await.unwrap_err().is_panic());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn a_service_that_panics_in_its_call_gives_the_permit_back() {
    let bench = Bench::new();
    let inner = service_fn(|_: Request<()>| -> Ready<Result<Response<Script>, Infallible>> {
        panic!("the call panics, as it is told to")
    });
    let service = bench.layer(1).layer(inner);
    let caught = AssertUnwindSafe(service.oneshot(request())).catch_unwind().await;
    assert!(caught.is_err());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn a_body_that_panics_gives_the_permit_back() {
    let bench = Bench::new();
    let inner = answers(|| Response::new(Script::new([Step::Data("x"), Step::Panic])));
    let service = bench.layer(1).layer(inner);
    let body = service.oneshot(request()).await.unwrap().into_body();
    assert_eq!(bench.places().await, (1, 0));
    let caught = AssertUnwindSafe(body.collect()).catch_unwind().await;
    assert!(caught.is_err());
    assert!(bench.backend.is_empty());
}

/// An error that is not a `std::error::Error`, which Tower allows.
#[derive(Debug, PartialEq)]
struct Odd(u32);

#[tokio::test]
async fn an_error_of_the_service_comes_out_as_it_is() {
    let bench = Bench::new();
    let inner = service_fn(|_: Request<()>| ready(Err::<Response<Script>, _>(Odd(42))));
    let service = bench.layer(1).layer(inner);
    assert_eq!(service.oneshot(request()).await.unwrap_err(), Odd(42));
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn after_a_shutdown_requests_are_refused_with_503() {
    let bench = Bench::new();
    let (mut service, mut handle) = spawn(&bench.layer(1));
    let mut one = ask(&mut service);
    let mut two = ask(&mut service);
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    let _inside = next(&mut handle).await;
    bench.semaphore.shutdown().await;

    let waited = assert_ready_ok!(two.poll());
    assert_eq!(waited.status(), StatusCode::SERVICE_UNAVAILABLE);
    let came_later = assert_ready_ok!(ask(&mut service).poll());
    assert_eq!(came_later.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refusal(&waited).reason.as_str(), "closed");
    assert_eq!(refusal(&came_later).reason.as_str(), "closed");
    assert!(came_later.headers().contains_key("retry-after"));
    assert!(bench.backend.is_empty());
}

// ===== the end of the body =====

/// The response of a service at limit 1, with an unread body.
async fn respond<B>(
    bench: &Bench,
    response: impl Fn() -> Response<B> + Clone,
) -> Response<tower_semaphore::limit::ResponseBody<B>>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let service = bench.layer(1).layer(answers(response));
    let response = service.oneshot(request()).await.unwrap();
    assert!(response.extensions().get::<Refusal>().is_none());
    response
}

#[tokio::test]
async fn the_last_data_frame_of_a_body_that_foretells_its_end_frees_the_permit() {
    let bench = Bench::new();
    let steps = || Script::foretelling([Step::Data("a"), Step::Data("b")]);
    let mut body = respond(&bench, move || Response::new(steps())).await.into_body();
    assert_eq!(bench.places().await, (1, 0));
    body.frame().await.unwrap().unwrap();
    assert_eq!(bench.places().await, (1, 0));
    body.frame().await.unwrap().unwrap();
    assert!(bench.backend.is_empty());
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn the_end_of_a_body_that_does_not_foretell_it_frees_the_permit() {
    let bench = Bench::new();
    let steps = || Script::new([Step::Data("a")]);
    let mut body = respond(&bench, move || Response::new(steps())).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(bench.places().await, (1, 0));
    assert!(body.frame().await.is_none());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn trailers_of_a_body_that_foretells_its_end_free_the_permit() {
    let bench = Bench::new();
    let steps = || Script::foretelling([Step::Data("a"), Step::Trailers]);
    let mut body = respond(&bench, move || Response::new(steps())).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(bench.places().await, (1, 0));
    assert!(body.frame().await.unwrap().unwrap().is_trailers());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn trailers_free_the_permit_since_nothing_comes_after_them() {
    // Like the bodies of `BodyExt::with_trailers` and `StreamBody`, which never say that they have ended.
    let bench = Bench::new();
    let steps = || Script::new([Step::Data("a"), Step::Trailers]);
    let mut body = respond(&bench, move || Response::new(steps())).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(bench.places().await, (1, 0));
    assert!(body.frame().await.unwrap().unwrap().is_trailers());
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn an_error_of_the_body_frees_the_permit_and_is_passed_on() {
    let bench = Bench::new();
    let steps = || Script::new([Step::Data("a"), Step::Error, Step::Data("never asked for")]);
    let mut body = respond(&bench, move || Response::new(steps())).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(bench.places().await, (1, 0));
    let error = body.frame().await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the source ran dry");
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn a_body_that_is_dropped_before_its_end_frees_the_permit() {
    let bench = Bench::new();
    let steps = || Script::new([Step::Data("a"), Step::Pending]);
    let mut body = respond(&bench, move || Response::new(steps())).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_pending!(task::spawn(body.frame()).poll());
    assert_eq!(bench.places().await, (1, 0));
    drop(body);
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn a_response_that_is_dropped_unread_frees_the_permit() {
    let bench = Bench::new();
    let response = respond(&bench, || full("unread")).await;
    assert_eq!(bench.places().await, (1, 0));
    drop(response);
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn a_body_that_is_empty_from_the_start_holds_nothing() {
    let bench = Bench::new();
    for status in [200, 204, 304, 101, 500] {
        let response = respond(&bench, move || {
            Response::builder().status(status).body(Empty::<Bytes>::new()).unwrap()
        })
        .await;
        assert_eq!(response.status(), status);
        assert!(bench.backend.is_empty(), "{status}");
        drop(response);
    }
}

#[tokio::test]
async fn size_and_end_are_those_of_the_body_inside() {
    let bench = Bench::new();
    let steps = || Script::foretelling([Step::Data("abc"), Step::Data("de"), Step::Trailers]);
    let mut outer = respond(&bench, move || Response::new(steps())).await.into_body();
    let mut inner = steps();
    for _ in 0..3 {
        assert_eq!(outer.size_hint().exact(), inner.size_hint().exact());
        assert_eq!(outer.is_end_stream(), inner.is_end_stream());
        let (ours, theirs) = (outer.frame().await, inner.frame().await);
        assert_eq!(
            ours.unwrap().unwrap().into_data().ok(),
            theirs.unwrap().unwrap().into_data().ok()
        );
    }
    assert_eq!(outer.size_hint().exact(), Some(0));
    assert!(outer.is_end_stream() && inner.is_end_stream());

    // A body that does not know its size.
    let steps = || Script::new([]);
    let outer = respond(&bench, move || Response::new(steps())).await.into_body();
    assert!(!outer.is_end_stream());
    drop(outer);
    let unsized_body = || full("x").into_body().map_frame(|frame| frame);
    assert_eq!(unsized_body().size_hint().exact(), None);
    let outer = respond(&bench, move || Response::new(unsized_body())).await.into_body();
    assert_eq!(outer.size_hint().exact(), None);
}

#[tokio::test]
async fn frames_and_trailers_come_out_as_they_are() {
    let bench = Bench::new();
    let steps = || Script::new([Step::Data("ab"), Step::Data(""), Step::Data("c"), Step::Trailers]);
    let body = respond(&bench, move || Response::new(steps())).await.into_body();
    let collected = body.collect().await.unwrap();
    assert_eq!(collected.trailers(), Some(&trailers()));
    assert_eq!(collected.to_bytes(), "abc");
}

#[tokio::test]
async fn a_body_with_nothing_to_give_yet_is_pending() {
    let bench = Bench::new();
    let steps = || Script::new([Step::Pending, Step::Data("a")]);
    let mut body = respond(&bench, move || Response::new(steps())).await.into_body();
    assert_pending!(task::spawn(body.frame()).poll());
    assert_eq!(bench.places().await, (1, 0));
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
}

/// At limit 1, one request after the other, the next one as soon as the end of the previous one is seen.
async fn sequential_client(semaphore: &Semaphore) {
    let layer = ConcurrencyLimitLayer::builder(semaphore, NAME)
        .limit(1)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let bodies: [fn() -> Script; 4] = [
        || Script::foretelling([Step::Data("a")]),
        || Script::new([Step::Data("a")]),
        || Script::foretelling([Step::Data("a"), Step::Trailers]),
        || Script::new([Step::Data("a"), Step::Error]),
    ];
    let policy = Policy::new(1);
    for round in 0..80 {
        for body in bodies {
            let mut service = layer.layer(answers(move || Response::new(body())));
            let response = service.ready().await.unwrap().call(request()).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "round {round}");
            let mut body = response.into_body();
            while let Some(Ok(_)) = body.frame().await {
                if body.is_end_stream() {
                    break;
                }
            }
            // The body still exists.
            let permit = semaphore.try_acquire(NAME, &policy).await;
            assert!(permit.is_ok(), "round {round}: {permit:?}");
            drop((permit, body));
        }
    }
}

#[tokio::test]
async fn whoever_saw_the_end_finds_the_permit_free() {
    let bench = Bench::new();
    sequential_client(&bench.semaphore).await;
    assert!(bench.backend.is_empty());
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn whoever_saw_the_end_finds_the_permit_free_on_redis() {
    let redis = crate::support::redis::TestRedis::start();
    sequential_client(&redis.semaphore()).await;
    crate::support::eventually("nothing is stored", async || redis.keys() == 0).await;
}

// ===== settings =====

#[tokio::test]
async fn held_until_the_head_the_permit_is_free_before_the_body() {
    let bench = Bench::new();
    let layer = bench.builder().limit(1).hold_until(HoldUntil::ResponseHead).build().unwrap();
    let inner = answers(|| Response::new(Script::new([Step::Data("a"), Step::Trailers])));
    let response = layer.layer(inner).oneshot(request()).await.unwrap();
    assert!(bench.backend.is_empty());
    let collected = response.into_body().collect().await.unwrap();
    assert!(collected.trailers().is_some());
    assert_eq!(collected.to_bytes(), "a");
}

#[tokio::test]
async fn requests_to_skip_pass_without_a_permit() {
    let bench = Bench::new();
    let layer = bench
        .builder()
        .limit(0)
        .key(|_: &Parts| -> Option<Name> { panic!("asked for a key that does not matter") })
        .skip(|parts| parts.uri.path() == "/health")
        .build()
        .unwrap();
    let inner = service_fn(|request: Request<()>| {
        assert!(request.extensions().get::<Permit>().is_none());
        ready(Ok::<_, Infallible>(full("fine")))
    });
    let request = Request::get("/health").body(()).unwrap();
    let response = layer.layer(inner).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn requests_not_to_skip_take_a_permit() {
    let bench = Bench::new();
    let layer =
        bench.builder().limit(0).skip(|parts| parts.uri.path() == "/health").build().unwrap();
    let service = layer.layer(answers(|| full("")));
    let request = Request::get("/healthy").body(()).unwrap();
    assert_eq!(service.oneshot(request).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test(start_paused = true)]
async fn a_limit_of_none_refuses_all_at_once() {
    let bench = Bench::new();
    let began = tokio::time::Instant::now();
    let service = bench.layer(0).layer(answers(|| full("")));
    for _ in 0..3 {
        let response = service.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let refusal = refusal(&response);
        assert_eq!((refusal.reason, rejected(refusal).limit), (RefusalReason::Limit, 0));
    }
    assert!(began.elapsed().is_zero(), "waited for a permit that cannot come");
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn without_a_limit_everything_passes_and_nothing_is_stored() {
    let bench = Bench::new();
    let layer = bench.builder().limit(Limit::Unlimited).build().unwrap();
    let service = layer.layer(answers(|| full("x")));
    let mut held = Vec::new();
    for _ in 0..100 {
        let response = service.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        held.push(response);
    }
    assert!(bench.backend.is_empty());
}

fn tenant(tenant: &str) -> Request<()> {
    Request::get("/").header("x-tenant", tenant).body(()).unwrap()
}

/// Returns whether each tenant gets as many permits as its header's text is long, and no more.
async fn limits_by_length(bench: &Bench, layer: ConcurrencyLimitLayer) {
    let service = layer.layer(answers(|| full("x")));
    for name in ["a", "bb", "ccc"] {
        let mut held = Vec::new();
        for _ in 0..name.len() {
            let response = service.clone().oneshot(tenant(name)).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            held.push(response);
        }
        let response = service.clone().oneshot(tenant(name)).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let refusal = refusal(&response);
        assert_eq!(rejected(refusal).limit as usize, name.len());
        assert_eq!(refusal.key.as_ref().unwrap().as_str(), name);
    }
    assert!(bench.backend.is_empty());
}

fn length(name: &Name) -> u32 {
    u32::try_from(name.as_str().len()).unwrap()
}

#[tokio::test]
async fn the_limit_can_be_each_keys_own() {
    let bench = Bench::new();
    let layer = bench
        .builder()
        .key(HeaderKey::from_static("x-tenant"))
        .wait_timeout(Duration::ZERO)
        .limit_by(|name, parts| {
            assert_eq!(parts.headers["x-tenant"], name.as_str());
            length(name)
        })
        .build()
        .unwrap();
    limits_by_length(&bench, layer).await;
}

#[tokio::test]
async fn the_limit_can_be_looked_up() {
    let bench = Bench::new();
    let layer = bench
        .builder()
        .key(HeaderKey::from_static("x-tenant"))
        .wait_timeout(Duration::ZERO)
        .limit_by_async(|name, _| {
            let limit = length(name);
            async move {
                tokio::task::yield_now().await;
                Limit::Permits(limit)
            }
        })
        .build()
        .unwrap();
    limits_by_length(&bench, layer).await;
}

#[tokio::test]
async fn the_limit_can_change_from_one_request_to_the_next() {
    let bench = Bench::new();
    let limit = Arc::new(AtomicU32::new(1));
    let layer = bench
        .builder()
        .wait_timeout(Duration::ZERO)
        .limit_by({
            let limit = Arc::clone(&limit);
            move |_, _| limit.load(Ordering::Relaxed)
        })
        .build()
        .unwrap();
    let service = layer.layer(answers(|| full("x")));
    let status = async || service.clone().oneshot(request()).await.unwrap();

    let one = status().await;
    assert_eq!(status().await.status(), StatusCode::TOO_MANY_REQUESTS);
    limit.store(2, Ordering::Relaxed);
    let two = status().await;
    assert_eq!(two.status(), StatusCode::OK);
    limit.store(1, Ordering::Relaxed);
    drop(one);
    assert_eq!(status().await.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(two);
    assert_eq!(status().await.status(), StatusCode::OK);
}

#[tokio::test]
async fn the_key_can_be_looked_up() {
    let bench = Bench::new();
    let layer = bench
        .builder()
        .key_async(|parts| {
            let header = parts.headers.get("x-tenant").cloned();
            async move {
                tokio::task::yield_now().await;
                header
            }
        })
        .limit(1)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let service = layer.layer(answers(|| full("x")));
    let a = service.clone().oneshot(tenant("a")).await.unwrap();
    let b = service.clone().oneshot(tenant("b")).await.unwrap();
    assert_eq!((a.status(), b.status()), (StatusCode::OK, StatusCode::OK));
    let again = service.clone().oneshot(tenant("a")).await.unwrap();
    assert_eq!(again.status(), StatusCode::TOO_MANY_REQUESTS);
    let none = service.oneshot(request()).await.unwrap();
    assert_eq!(none.status(), StatusCode::BAD_REQUEST);
    assert_eq!(refusal(&none).reason, RefusalReason::MissingKey);
}

#[tokio::test]
async fn a_lookup_ends_with_the_request_that_waits_for_it() {
    for limit in [false, true] {
        let bench = Bench::new();
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        let lookup = move || {
            let held = Arc::clone(&held);
            async move {
                let _held = held;
                pending::<()>().await;
            }
        };
        let builder = bench.builder();
        let layer = if limit {
            builder.limit_by_async(move |_, _| lookup().map(|()| 1))
        } else {
            builder.limit(1).key_async(move |_| lookup().map(|()| Some("x")))
        };
        let mut service = layer.build().unwrap().layer(answers(|| full("x")));
        let before = Arc::strong_count(&alive);
        let mut future = task::spawn(service.call(request()));
        assert_pending!(future.poll());
        assert_eq!(Arc::strong_count(&alive), before + 1);
        drop(future);
        assert_eq!(Arc::strong_count(&alive), before);
        assert!(bench.backend.is_empty());
    }
}

#[tokio::test]
async fn without_a_key_a_request_is_let_pass_or_shares_one_if_so_set() {
    let bench = Bench::new();
    let builder = || {
        bench
            .builder()
            .key(HeaderKey::from_static("x-tenant"))
            .limit(1)
            .wait_timeout(Duration::ZERO)
    };
    let layer = builder().on_missing_key(MissingKey::Bypass).build().unwrap();
    let service = layer.layer(answers(|| full("x")));
    let one = service.clone().oneshot(request()).await.unwrap();
    let two = service.oneshot(request()).await.unwrap();
    assert_eq!((one.status(), two.status()), (StatusCode::OK, StatusCode::OK));
    assert!(bench.backend.is_empty());

    let layer = builder().on_missing_key(MissingKey::Shared).build().unwrap();
    let service = layer.layer(answers(|| full("x")));
    let one = service.clone().oneshot(request()).await.unwrap();
    let two = service.clone().oneshot(request()).await.unwrap();
    assert_eq!((one.status(), two.status()), (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS));
    // A request with a key cannot reach their permits.
    for key in ["", "!", "%21"] {
        let response = service.clone().oneshot(tenant(key)).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{key:?}");
    }
}

// ===== the permit, as handlers see it =====

/// Keeps the permit of each request.
fn keeper(kept: &Arc<Mutex<Vec<Permit>>>) -> impl Answers<Full<Bytes>> + use<> {
    let kept = Arc::clone(kept);
    service_fn(move |mut request: Request<()>| {
        let permit = request.extensions_mut().remove::<Permit>().expect("a permit");
        kept.lock().unwrap().push(permit);
        ready(Ok(full("x")))
    })
}

#[tokio::test]
async fn a_permit_that_the_handler_keeps_outlives_the_response() {
    let bench = Bench::new();
    let kept = Arc::default();
    let service = bench.layer(1).layer(keeper(&kept));
    let response = service.oneshot(request()).await.unwrap();
    response.into_body().collect().await.unwrap();
    assert_eq!(bench.places().await, (1, 0));

    let permit = kept.lock().unwrap().pop().unwrap();
    assert_eq!(permit.name(), NAME);
    assert!(!permit.is_lost());
    let clone = permit.clone();
    drop(permit);
    assert_eq!(bench.places().await, (1, 0));
    drop(clone);
    assert!(bench.backend.is_empty());
}

#[tokio::test]
async fn a_handler_can_give_the_permit_back_before_its_response() {
    let bench = Bench::new();
    let kept = Arc::default();
    let service = bench.layer(1).layer(keeper(&kept));
    let response = service.oneshot(request()).await.unwrap();
    let permit = kept.lock().unwrap().pop().unwrap();
    assert_eq!(bench.places().await, (1, 0));
    permit.release().await.unwrap();
    assert!(bench.backend.is_empty());
    // The rest of the response neither fails nor releases a second time.
    let other = bench.semaphore.try_acquire(NAME, &Policy::new(1)).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "x");
    assert_eq!(bench.places().await, (1, 0));
    drop(other);
}

#[tokio::test(start_paused = true)]
async fn a_permit_says_how_long_it_was_waited_for() {
    let bench = Bench::new();
    let kept = Arc::default();
    let service = bench.layer(1).layer(keeper(&kept));
    let first = bench.semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    let waiting = tokio::spawn(service.oneshot(request()));
    tokio::time::sleep(Duration::from_millis(300)).await;
    drop(first);
    waiting.await.unwrap().unwrap();
    let waited = kept.lock().unwrap()[0].waited();
    assert!((300..310).contains(&waited.as_millis()), "{waited:?}");
}

// ===== time =====

#[tokio::test(start_paused = true)]
async fn whoever_waits_too_long_is_refused_and_leaves_the_queue() {
    let bench = Bench::new();
    let layer = bench.builder().limit(1).wait_timeout(Duration::from_millis(700)).build().unwrap();
    let (mut service, mut handle) = spawn(&layer);
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    let _inside = next(&mut handle).await;

    let began = tokio::time::Instant::now();
    let response = service.call(request()).await.unwrap();
    let waited = began.elapsed().as_millis();
    assert!((700..750).contains(&waited), "{waited} ms");
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal = refusal(&response);
    assert_eq!(refusal.reason, RefusalReason::QueueTimeout);
    let said = rejected(refusal);
    assert_eq!((said.limit, said.in_use), (1, Some(1)));
    assert!(refusal.waited() >= Some(Duration::from_millis(700)));
    assert_eq!(refusal.waited(), Some(said.waited));
    assert_eq!(bench.places().await, (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_response_may_last_many_leases() {
    let bench = Bench::new();
    let layer = bench.builder().limit(1).lease(Policy::MIN_LEASE).build().unwrap();
    let steps = || Script::new([Step::Pending, Step::Data("at last")]);
    let service = layer.layer(answers(move || Response::new(steps())));
    let mut body = service.oneshot(request()).await.unwrap().into_body();
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.places().await, (1, 0));
        assert!(bench.semaphore.try_acquire(NAME, &Policy::new(1)).await.is_err());
    }
    assert_pending!(task::spawn(body.frame()).poll());
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "at last");
    drop(body);
    assert!(bench.backend.is_empty());
}

/// A process that is stopped past its lease: nothing is renewed, and no holder is notified.
fn stand_still() {
    std::thread::sleep(Policy::MIN_LEASE + Duration::from_millis(150));
}

#[tokio::test]
async fn a_process_that_stood_still_past_its_lease_cuts_the_body_off() {
    let bench = Bench::new();
    let layer = bench.builder().limit(1).lease(Policy::MIN_LEASE).build().unwrap();
    let steps = || Script::new([Step::Data("a"), Step::Data("b"), Step::Data("c")]);
    let service = layer.layer(answers(move || Response::new(steps())));
    let mut body = service.oneshot(request()).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    stand_still();
    // Not one more frame, though there is one.
    let error = body.frame().await.unwrap().unwrap_err();
    assert_eq!(error.downcast_ref().map(LeaseLost::name), Some(NAME));
    assert!(body.frame().await.is_none());
    assert!(body.is_end_stream());
    crate::support::eventually("nothing is stored", async || bench.backend.is_empty()).await;
}

#[tokio::test]
async fn whoever_reads_a_body_is_woken_when_the_permit_is_lost() {
    let bench = Bench::new();
    let layer = bench.builder().limit(1).lease(Policy::MIN_LEASE).build().unwrap();
    let service = layer.layer(answers(|| Response::new(Script::new([Step::Pending]))));
    let mut body = service.oneshot(request()).await.unwrap().into_body();
    // Not the task that got the response: that one knows of the permit already.
    let mut reader = task::spawn(body.frame());
    assert_pending!(reader.poll());
    stand_still();
    crate::support::eventually("it is woken", async || reader.is_woken()).await;
    let Poll::Ready(Some(Err(error))) = reader.poll() else { panic!("it is not cut off") };
    assert_eq!(error.downcast_ref().map(LeaseLost::name), Some(NAME));
}

#[tokio::test]
async fn a_process_that_stood_still_past_its_lease_goes_on_if_so_set() {
    let bench = Bench::new();
    let layer = bench
        .builder()
        .limit(1)
        .lease(Policy::MIN_LEASE)
        .on_lost(OnLost::Continue)
        .build()
        .unwrap();
    let steps = || Script::new([Step::Data("a"), Step::Data("b")]);
    let service = layer.layer(answers(move || Response::new(steps())));
    let mut body = service.oneshot(request()).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    stand_still();
    assert_eq!(body.collect().await.unwrap().to_bytes(), "b");
    crate::support::eventually("nothing is stored", async || bench.backend.is_empty()).await;
}

#[tokio::test]
async fn a_permit_that_is_lost_before_the_head_is_a_refusal() {
    let bench = Bench::new();
    let builder = bench.builder().key(|_: &Parts| Some("acme/eu")).limit(1);
    let layer = builder.lease(Policy::MIN_LEASE).build().unwrap();
    let (mut service, mut handle) = spawn(&layer);
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    let inside = next(&mut handle).await;
    stand_still();
    inside.send_response(Response::new(Script::new([])));
    let response = assert_ready_ok!(one.poll());
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refusal(&response).reason, RefusalReason::LeaseLost);
    assert_eq!(refusal(&response).key, Some(Name::new("acme/eu")));
    drop(response);
    crate::support::eventually("nothing is stored", async || bench.backend.is_empty()).await;
}

// ===== everything else stays as it is =====

#[derive(Clone, Debug, PartialEq)]
struct Mark(u8);

#[tokio::test]
async fn request_and_response_pass_unchanged() {
    let bench = Bench::new();
    let inner = service_fn(|request: Request<String>| {
        assert_eq!(request.method(), Method::PATCH);
        assert_eq!(request.uri(), "/things/7?deep=yes");
        assert_eq!(request.version(), Version::HTTP_2);
        assert_eq!(request.headers().get_all("x-many").iter().count(), 2);
        assert_eq!(request.headers().len(), 2);
        assert_eq!(request.extensions().get::<Mark>(), Some(&Mark(1)));
        assert_eq!(request.body(), "the body");
        let response = Response::builder()
            .status(StatusCode::IM_A_TEAPOT)
            .version(Version::HTTP_10)
            .header("x-answer", "42")
            .extension(Mark(2))
            .body(Full::<Bytes>::from("answered"));
        ready(response.map_err(|error| error.to_string()))
    });
    let request = Request::builder()
        .method(Method::PATCH)
        .uri("/things/7?deep=yes")
        .version(Version::HTTP_2)
        .header("x-many", "1")
        .header("x-many", "2")
        .extension(Mark(1))
        .body("the body".to_owned())
        .unwrap();
    let response = bench.layer(1).layer(inner).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::IM_A_TEAPOT);
    assert_eq!(response.version(), Version::HTTP_10);
    assert_eq!(response.headers().len(), 1);
    assert_eq!(response.headers()["x-answer"], "42");
    assert_eq!(response.extensions().get::<Mark>(), Some(&Mark(2)));
    assert!(response.extensions().get::<Refusal>().is_none());
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "answered");
}

#[tokio::test]
async fn a_refusal_knows_its_length() {
    let bench = Bench::new();
    let service = bench.layer(0).layer(answers(|| full("")));
    let body = service.oneshot(request()).await.unwrap().into_body();
    let length = body.size_hint().exact().expect("an exact length");
    assert!(!body.is_end_stream());
    assert_eq!(body.collect().await.unwrap().to_bytes().len() as u64, length);
}

/// A rejection belongs to the response that a layer made, not to any that looks like it.
#[tokio::test]
async fn a_handler_that_answers_with_the_head_of_a_rejection_holds_its_permit_to_the_end() {
    let bench = Bench::new();
    let builder = ConcurrencyLimitLayer::builder(&bench.semaphore, "client");
    let client = builder.limit(0).build().unwrap().layer(answers(|| full("never")));
    for (passes_its_request, takes_all) in [(false, true), (false, false), (true, true)] {
        let client = client.clone();
        let handler = service_fn(move |request: Request<()>| {
            let client = client.clone();
            async move {
                let request = if passes_its_request { request } else { Request::new(()) };
                let refused = client.oneshot(request).await.unwrap();
                assert!(refused.extensions().get::<Refusal>().is_some());
                let own = Full::new(Bytes::from("a page of its own"));
                if takes_all {
                    return Ok::<_, Infallible>(refused.map(|_| own));
                }
                let mut response = Response::new(own);
                *response.extensions_mut() = refused.extensions().clone();
                Ok(response)
            }
        });
        let in_use = async || bench.semaphore.inspect(NAME).await.unwrap().in_use;
        let limited = bench.layer(1).layer(handler.clone());
        let response = limited.oneshot(request()).await.unwrap();
        assert_eq!(in_use().await, 1, "its body is not over");
        response.into_body().collect().await.unwrap();
        assert_eq!(in_use().await, 0);

        // Nor is it an error of a client that calls this handler.
        let layer = bench.builder().limit(1).build().unwrap().into_error();
        let response = layer.layer(handler).oneshot(request()).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "a page of its own");
    }
}

#[tokio::test]
async fn services_that_are_neither_send_nor_static_can_be_inside() {
    let bench = Bench::new();
    let calls = std::cell::Cell::new(0);
    let inner = service_fn(|_: Request<()>| {
        calls.set(calls.get() + 1);
        ready(Ok::<_, Infallible>(full("x")))
    });
    bench.layer(1).layer(inner).oneshot(request()).await.unwrap();
    assert_eq!(calls.get(), 1);
}

#[test]
fn everything_can_be_shown() {
    fn shown(value: &impl fmt::Debug) -> bool {
        !format!("{value:?}").is_empty()
    }
    let bench = Bench::new();
    let layer = bench.layer(1);
    assert!(shown(&layer) && shown(&layer.layer(())) && shown(&bench.builder()));
}

// ===== two versions of the crate =====

/// What every version of this crate puts into the extensions of a request: a promise that must be kept.
type VersionMark = ([(); 29_541], &'static str, std::any::TypeId);

#[tokio::test]
async fn a_layer_of_another_version_around_the_same_requests_is_noticed_once() {
    let told = Told::new();
    let seen = Arc::<Mutex<Vec<VersionMark>>>::default();
    let by_handler = Arc::clone(&seen);
    let handler = service_fn(move |request: Request<()>| {
        by_handler.lock().unwrap().extend(request.extensions().get::<VersionMark>());
        ready(Ok::<_, Infallible>(full("served")))
    });
    let semaphore = Semaphore::in_memory();
    let layer = |name| ConcurrencyLimitLayer::builder(&semaphore, name).limit(1).build().unwrap();
    let service = layer("outer").layer(layer("inner").layer(handler));
    drop(service.clone().oneshot(request()).await.unwrap());
    let [(_, version, copy)] = seen.lock().unwrap()[..] else { panic!("one mark") };
    assert!(told.aloud().is_empty(), "two layers of one version: {:?}", told.aloud());

    for other in [("0.0.1", std::any::TypeId::of::<()>()), (version, std::any::TypeId::of::<()>())]
    {
        let mut request = request();
        request.extensions_mut().insert::<VersionMark>(([(); 29_541], other.0, other.1));
        drop(service.clone().oneshot(request).await.unwrap());
        assert_ne!(seen.lock().unwrap().pop(), Some(([(); 29_541], version, copy)));
    }
    let warnings = told.aloud();
    assert_eq!(warnings.len(), 2, "each layer once: {warnings:?}");
    for (warning, layer) in warnings.iter().zip(["outer", "inner"]) {
        assert_eq!(warning.level, tracing::Level::WARN);
        assert!(warning.name.contains("another version"), "{warning:?}");
        assert_eq!(warning.fields["layer"], layer);
        assert_eq!(warning.fields["version"], version);
        assert_eq!(warning.fields["other_version"], "0.0.1");
    }
}
