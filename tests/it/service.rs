//! The layer for requests of any type: when the inner service is called, what becomes of the permit, and what
//! the errors are.

use std::future::{Future, pending};
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::{
    AcquireError, Ask, LeaseLost, Name, Permit, PermitLayer, Policy, RejectReason, Semaphore,
};
use tower_test::mock::{self, Handle, Mock};

const NAME: &str = "jobs";
const LINGER: Duration = Duration::from_millis(400);

type Inner = Mock<Job, u32>;

/// A request that is none of HTTP.
#[derive(Debug, Default)]
struct Job {
    tenant: &'static str,
    permit: Option<Permit>,
}

fn job() -> Job {
    Job::default()
}

fn waits() -> Policy {
    Policy::builder(1).wait_timeout(Duration::from_secs(5)).build().unwrap()
}

/// One that lets no request wait.
fn at_once(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::ZERO).build().unwrap()
}

fn layer(semaphore: &Semaphore, policy: Policy) -> PermitLayer<Job> {
    PermitLayer::new(semaphore, policy, |_: &Job| NAME)
}

/// Holding and waiting requests of `NAME`.
async fn places(semaphore: &Semaphore) -> (u64, u64) {
    let seen = semaphore.inspect(NAME).await.unwrap();
    (seen.in_use, seen.waiting)
}

async fn next(handle: &mut Handle<Job, u32>) -> mock::SendResponse<u32> {
    handle.next_request().await.expect("a call").1
}

fn ask<S: Service<Job>>(service: &mut S) -> task::Spawn<S::Future> {
    task::spawn(service.call(job()))
}

fn spawn<L: Layer<Inner>>(layer: &L) -> (L::Service, Handle<Job, u32>) {
    let (inner, handle) = mock::pair();
    (layer.layer(inner), handle)
}

fn rejected(error: &BoxError) -> RejectReason {
    match error.downcast_ref() {
        Some(AcquireError::Rejected(rejected)) => rejected.reason,
        other => panic!("no rejection: {other:?}"),
    }
}

#[tokio::test]
async fn a_permit_is_held_exactly_while_the_call_is_in_flight() {
    let semaphore = Semaphore::in_memory();
    let (mut service, mut handle) = spawn(&layer(&semaphore, waits()));
    handle.allow(2);
    let (mut one, mut two) = (ask(&mut service), ask(&mut service));
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    assert_eq!(places(&semaphore).await, (1, 1));

    next(&mut handle).await.send_response(1);
    assert_eq!(places(&semaphore).await, (1, 1), "nobody has seen the response yet");
    assert_eq!(assert_ready_ok!(one.poll()), 1);
    assert_eq!(
        places(&semaphore).await,
        (1, 0),
        "the permit is the other's, before the future is dropped"
    );
    assert!(two.is_woken());
    assert_pending!(two.poll());
    next(&mut handle).await.send_response(2);
    assert_eq!(assert_ready_ok!(two.poll()), 2);
    assert_eq!(places(&semaphore).await, (0, 0));
}

#[tokio::test]
async fn a_request_joins_the_queue_as_it_is_called_and_leaves_it_as_it_is_dropped() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let (mut service, mut handle) = spawn(&layer(&semaphore, waits()));
    handle.allow(3);
    let mut one = ask(&mut service);
    let (two, mut three) = (ask(&mut service), ask(&mut service));
    assert_eq!(places(&semaphore).await, (1, 2), "none was polled");
    assert_pending!(one.poll());
    drop(two);
    assert_eq!(places(&semaphore).await, (1, 1));

    // A call that is dropped in flight.
    drop(one);
    assert_pending!(three.poll());
    drop(next(&mut handle).await);
    assert_eq!(places(&semaphore).await, (1, 0));
    drop(three);
    assert!(backend.is_empty());
}

#[tokio::test]
async fn a_request_without_a_permit_fails_and_does_not_reach_the_service() {
    let semaphore = Semaphore::in_memory();
    let (mut service, mut handle) = spawn(&layer(&semaphore, at_once(1)));
    let permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    let error = assert_ready_err!(ask(&mut service).poll());
    assert_eq!(rejected(&error), RejectReason::Limit);
    assert_eq!(error.to_string(), "all 1 permits are in use");
    assert_pending!(task::spawn(handle.next_request()).poll());

    drop(permit);
    handle.allow(1);
    assert_pending!(ask(&mut service).poll());

    semaphore.shutdown().await;
    let error = assert_ready_err!(ask(&mut service).poll());
    assert!(matches!(error.downcast_ref(), Some(AcquireError::Closed)), "{error:?}");
}

#[tokio::test]
async fn errors_of_the_service_pass_as_they_are_and_give_the_permit_back() {
    let semaphore = Semaphore::in_memory();
    let mut service = layer(&semaphore, waits())
        .layer(service_fn(async |_: Job| Err::<(), _>(io::Error::from(io::ErrorKind::TimedOut))));
    let error = service.call(job()).await.unwrap_err();
    assert_eq!(error.downcast::<io::Error>().unwrap().kind(), io::ErrorKind::TimedOut);
    assert_eq!(places(&semaphore).await, (0, 0));
}

#[tokio::test]
async fn the_service_inside_is_made_ready_once_there_is_a_permit() {
    let semaphore = Semaphore::in_memory();
    let (mut service, mut handle) = spawn(&layer(&semaphore, waits()));
    handle.allow(0);
    assert_ready_ok!(task::spawn(service.ready()).poll());
    assert_eq!(places(&semaphore).await, (0, 0), "being ready takes no permit");
    let (mut one, mut two) = (ask(&mut service), ask(&mut service));
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    assert_eq!(places(&semaphore).await, (1, 1));
    handle.allow(1);
    assert!(one.is_woken());
    assert!(!two.is_woken(), "it waits for a permit, and for nothing else");

    handle.send_error("broken for good");
    let error = assert_ready_err!(one.poll());
    assert_eq!(error.to_string(), "broken for good");
    assert_eq!(places(&semaphore).await, (1, 0));
}

#[tokio::test]
async fn a_call_whose_permit_is_lost_is_dropped() {
    let semaphore = Semaphore::in_memory();
    let in_flight = Arc::new(());
    let call = Arc::clone(&in_flight);
    let mut service = layer(&semaphore, waits()).layer(service_fn(move |_: Job| {
        let call = Arc::clone(&call);
        async move {
            pending::<()>().await;
            drop(call);
            Ok::<_, io::Error>(())
        }
    }));
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    let before = Arc::strong_count(&in_flight);
    let id = semaphore.inspect(NAME).await.unwrap().holders[0].id;
    semaphore.revoke(NAME, id).await.unwrap();
    assert!(one.is_woken());
    let error = assert_ready_err!(one.poll());
    assert_eq!(error.downcast_ref().map(LeaseLost::name), Some(NAME));
    assert!(Arc::strong_count(&in_flight) < before);
    assert_pending!(one.poll());
}

#[tokio::test]
async fn a_permit_that_is_lost_while_the_service_becomes_ready_makes_no_call() {
    let semaphore = Semaphore::in_memory();
    let (mut service, mut handle) = spawn(&layer(&semaphore, waits()));
    handle.allow(0);
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    let id = semaphore.inspect(NAME).await.unwrap().holders[0].id;
    semaphore.revoke(NAME, id).await.unwrap();
    handle.allow(1);
    assert!(assert_ready_err!(one.poll()).is::<LeaseLost>());
    assert_pending!(task::spawn(handle.next_request()).poll());
}

#[tokio::test]
async fn a_service_that_panics_gives_its_permit_back() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let limit = layer(&semaphore, waits());
    let mut in_call = limit.layer(service_fn(|_: Job| -> std::future::Ready<io::Result<()>> {
        panic!("the call panics, as it is told to")
    }));
    let mut in_future = limit.layer(service_fn(async |_: Job| -> io::Result<()> {
        panic!("the future panics, as it is told to")
    }));
    assert!(AssertUnwindSafe(in_call.call(job())).catch_unwind().await.is_err());
    assert!(backend.is_empty());
    assert!(AssertUnwindSafe(in_future.call(job())).catch_unwind().await.is_err());
    assert!(backend.is_empty());
}

#[tokio::test]
async fn clones_share_their_permits_and_names_tell_requests_apart() {
    let semaphore = Semaphore::in_memory();
    let by_tenant =
        PermitLayer::new(&semaphore, at_once(1), |job: &Job| Name::new(NAME).part(job.tenant));
    let hangs = service_fn(async |_: Job| pending::<io::Result<()>>().await);
    let mut service = by_tenant.layer(hangs);
    let (mut clone, mut other) = (service.clone(), by_tenant.layer(hangs));
    let of = |tenant| Job { tenant, ..job() };

    let mut one = task::spawn(service.call(of("acme")));
    assert_pending!(one.poll());
    assert_ready_err!(task::spawn(clone.call(of("acme"))).poll());
    assert_ready_err!(task::spawn(other.call(of("acme"))).poll());
    assert_pending!(task::spawn(other.call(of("globex"))).poll());
    drop(one);
    assert_pending!(task::spawn(clone.call(of("acme"))).poll());
}

#[tokio::test]
async fn tenants_and_costs_count_as_they_do_without_a_layer() {
    let semaphore = Semaphore::in_memory();
    let limit = PermitLayer::new(&semaphore, at_once(4), |job: &Job| {
        Ask::of(NAME).by(job.tenant).each(2).cost(2)
    });
    let mut service = limit.layer(service_fn(async |_: Job| pending::<io::Result<()>>().await));
    let of = |tenant| Job { tenant, ..job() };
    let mut one = task::spawn(service.call(of("acme")));
    assert_pending!(one.poll());
    let error = assert_ready_err!(task::spawn(service.call(of("acme"))).poll());
    assert_eq!(rejected(&error), RejectReason::TenantLimit);
    assert_pending!(task::spawn(service.call(of("globex"))).poll());
}

#[tokio::test]
async fn a_request_that_takes_its_permit_along_holds_it_beyond_the_response() {
    let semaphore = Semaphore::in_memory();
    let limit = layer(&semaphore, waits()).attach(|job, permit| job.permit = Some(permit));
    let (left, mut kept) = tokio::sync::mpsc::unbounded_channel();
    let mut service = limit.layer(service_fn(move |job: Job| {
        let left = left.clone();
        async move { left.send(job.permit) }
    }));
    service.call(job()).await.unwrap();
    assert_eq!(places(&semaphore).await, (1, 0));
    let permit = kept.recv().await.flatten().expect("a permit");
    assert_eq!(permit.name(), NAME);
    drop(permit);
    assert_eq!(places(&semaphore).await, (0, 0));
}

#[tokio::test]
async fn a_response_that_keeps_the_permit_counts_until_it_is_dropped() {
    let semaphore = Semaphore::in_memory();
    let limit = layer(&semaphore, waits()).keep(|pages: u32, permit| (pages, permit));
    let (mut service, mut handle) = spawn(&limit);
    handle.allow(2);
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    next(&mut handle).await.send_response(3);
    let (pages, permit) = assert_ready_ok!(one.poll());
    drop(one);
    assert_eq!((pages, places(&semaphore).await), (3, (1, 0)));
    drop(permit);
    assert_eq!(places(&semaphore).await, (0, 0));

    let mut two = ask(&mut service);
    assert_pending!(two.poll());
    next(&mut handle).await.send_error("it has nothing to keep");
    assert_ready_err!(two.poll());
    assert_eq!(places(&semaphore).await, (0, 0));
}

#[tokio::test]
async fn a_permit_lingers_after_a_call_that_was_broken_off_and_only_then() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(9).linger(LINGER).build().unwrap();
    let (mut service, mut handle) = spawn(&layer(&semaphore, policy));
    handle.allow(1);
    let mut one = ask(&mut service);
    assert_pending!(one.poll());
    next(&mut handle).await.send_response(1);
    assert_ready_ok!(one.poll());
    assert_eq!(places(&semaphore).await, (0, 0), "it is complete");

    let mut two = ask(&mut service);
    assert_pending!(two.poll());
    drop(two);
    assert_eq!(places(&semaphore).await, (0, 0), "nothing was begun");

    handle.allow(1);
    let mut three = ask(&mut service);
    assert_pending!(three.poll());
    drop(three);
    assert_eq!(places(&semaphore).await, (1, 0), "the other side may go on with it");
}

#[tokio::test]
async fn it_fits_into_a_stack_of_towers_own_layers() {
    let semaphore = Semaphore::in_memory();
    let mut service = ServiceBuilder::new()
        .map_err(|error: BoxError| error.is::<AcquireError>())
        .concurrency_limit(8)
        .layer(layer(&semaphore, at_once(1)))
        .filter(Ok::<Job, BoxError>)
        .layer(layer(&semaphore, at_once(1)))
        .service_fn(async |_: Job| Ok::<_, io::Error>(()))
        .boxed_clone();
    // The second layer finds the permit of the first one taken.
    assert_eq!(service.ready().await.unwrap().call(job()).await, Err(true));
}

/// What can be sent and stored wherever its parts can.
#[test]
fn it_can_be_sent_shared_and_cloned() {
    fn is_free<T: Send + Sync + Unpin + 'static>(_: &T) {}
    fn is_send<T: Send>(_: &T) {}
    let semaphore = Semaphore::in_memory();
    let limit = layer(&semaphore, Policy::new(0)).keep(|_: (), permit: Permit| permit);
    let mut service = limit.layer(service_fn(async |_: Job| Ok::<_, io::Error>(())));
    is_free(&limit);
    is_free(&service.clone());
    let future = service.call(job());
    is_send(&future);
    fn boxed<T>(_: impl Future<Output = Result<T, BoxError>>) {}
    boxed(future);
}
