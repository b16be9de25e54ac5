//! Sequences of events that once broke a promise of the layer: several layers, losses, timeouts, shutdowns.

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::{BoxError, ClientTimeout, ConnectionIo, Refusal};
use tower_semaphore::{ConcurrencyLimitLayer, Limit, Name, Permit, Policy, Semaphore};

const LINGER: Duration = Duration::from_millis(400);

async fn in_use(semaphore: &Semaphore, name: &'static str) -> u64 {
    semaphore.inspect(name).await.unwrap().in_use
}

async fn revoke_all(semaphore: &Semaphore, name: &'static str) {
    let seen = semaphore.inspect(name).await.unwrap();
    for place in seen.holders {
        assert!(semaphore.revoke(name, place.id).await.unwrap());
    }
}

/// A layer for one request at a time that lingers.
fn lingering(semaphore: &Semaphore, name: &'static str) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::builder(semaphore, name).limit(1).linger(LINGER).build().unwrap()
}

/// A layer for one request at a time that lets none wait.
fn impatient(semaphore: &Semaphore, name: &'static str) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::builder(semaphore, name)
        .limit(1)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap()
}

/// Two frames, and then no end.
fn endless() -> StreamBody<impl futures_util::Stream<Item = Result<Frame<Bytes>, BoxError>>> {
    let frames = ["one", "two"].map(|text| Ok(Frame::data(Bytes::from(text))));
    let stream = futures_util::stream::iter(frames);
    StreamBody::new(futures_util::StreamExt::chain(stream, futures_util::stream::pending()))
}

#[tokio::test(start_paused = true)]
async fn a_request_that_a_layer_further_in_cuts_off_lingers_in_those_outside() {
    let semaphore = Semaphore::in_memory();
    let outer = lingering(&semaphore, "quota");
    let inner = lingering(&semaphore, "tenant");
    let hangs = service_fn(|_: Request<()>| pending::<Result<Response<Full<Bytes>>, Infallible>>());
    let call = tokio::spawn(outer.layer(inner.layer(hangs)).oneshot(Request::new(())));
    sleep(Duration::from_millis(10)).await;
    assert_eq!(in_use(&semaphore, "quota").await, 1);
    revoke_all(&semaphore, "tenant").await;
    let response = call.await.unwrap().unwrap();
    assert_eq!(response.status(), 503);
    drop(response);
    // The handler's call was dropped in the middle: the upstream still counts it.
    assert_eq!(in_use(&semaphore, "quota").await, 1, "the outer permit is free at once");
}

#[tokio::test(start_paused = true)]
async fn so_does_a_stream_whatever_it_ends_with() {
    for grpc in [false, true] {
        let semaphore = Semaphore::in_memory();
        let outer = lingering(&semaphore, "quota");
        let inner = lingering(&semaphore, "tenant");
        let kind = if grpc { "application/grpc" } else { "text/plain" };
        let streams = service_fn(move |_: Request<()>| async move {
            Ok::<_, Infallible>(
                Response::builder().header("content-type", kind).body(endless()).unwrap(),
            )
        });
        let request = Request::post("/")
            .version(Version::HTTP_2)
            .header("content-type", kind)
            .body(())
            .unwrap();
        let response = outer.layer(inner.layer(streams)).oneshot(request).await.unwrap();
        let reader = tokio::spawn(response.into_body().collect());
        sleep(Duration::from_millis(10)).await;
        revoke_all(&semaphore, "tenant").await;
        let _ = reader.await.unwrap();
        assert_eq!(in_use(&semaphore, "quota").await, 1, "grpc: {grpc}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_further_in_is_no_timeout() {
    let semaphore = Semaphore::in_memory();
    let outer = ConcurrencyLimitLayer::builder(&semaphore, "quota")
        .limit(2)
        .linger(LINGER)
        .build()
        .unwrap();
    let inner = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
        .limit(1)
        .wait_timeout(Duration::ZERO)
        .refusal(|_: &Refusal| Response::builder().status(504).body(String::new()).unwrap())
        .build()
        .unwrap();
    let _taken = semaphore.acquire("tenant", &Policy::new(1)).await.unwrap();
    let served = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("x")))
    });
    let response = outer.layer(inner.layer(served)).oneshot(Request::new(())).await.unwrap();
    assert_eq!(response.status(), 504);
    drop(response);
    assert_eq!(in_use(&semaphore, "quota").await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_of_grpc_lingers() {
    let semaphore = Semaphore::in_memory();
    let outer = lingering(&semaphore, "quota");
    // The response of tonic's own server timeout.
    let times_out = service_fn(|_: Request<()>| async {
        sleep(Duration::from_millis(50)).await;
        Ok::<_, Infallible>(
            tonic::Status::deadline_exceeded("Timeout expired").into_http::<Empty<Bytes>>(),
        )
    });
    let request = Request::builder().header("content-type", "application/grpc").body(()).unwrap();
    let response = outer.layer(times_out).oneshot(request).await.unwrap();
    drop(response);
    assert_eq!(in_use(&semaphore, "quota").await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_waits_no_longer_though_its_limit_is_looked_up() {
    let semaphore = Semaphore::in_memory();
    let header = http::HeaderName::from_static("x-timeout");
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "quota")
        .limit_by_async(|_: &Name, _: &http::request::Parts| async {
            sleep(Duration::from_millis(300)).await;
            1
        })
        .wait_timeout(Duration::from_secs(5))
        .client_timeout(ClientTimeout::milliseconds(header))
        .build()
        .unwrap();
    let _taken = semaphore.acquire("quota", &Policy::new(1)).await.unwrap();
    let served = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("x")))
    });
    let request = Request::builder().header("x-timeout", "400").body(()).unwrap();
    let began = Instant::now();
    let response = layer.layer(served).oneshot(request).await.unwrap();
    assert_eq!(response.status(), 429);
    assert!(began.elapsed() <= Duration::from_millis(410), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_client_waits_no_longer_though_a_service_in_between_is_not_ready() {
    let semaphore = Semaphore::in_memory();
    let header = http::HeaderName::from_static("x-timeout");
    let outer = ConcurrencyLimitLayer::builder(&semaphore, "a")
        .limit(100)
        .client_timeout(ClientTimeout::milliseconds(header))
        .build()
        .unwrap();
    let inner = ConcurrencyLimitLayer::builder(&semaphore, "b")
        .limit(1)
        .wait_timeout(Duration::from_secs(5))
        .build()
        .unwrap();
    let _taken = semaphore.acquire("b", &Policy::new(1)).await.unwrap();
    let served = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("x")))
    });
    // A slot in between that is free after 300 ms.
    let slots = tower::limit::ConcurrencyLimit::new(inner.layer(served), 1);
    let mut other = slots.clone();
    poll_fn(|cx| tower::Service::<Request<()>>::poll_ready(&mut other, cx)).await.unwrap();
    tokio::spawn(async move {
        sleep(Duration::from_millis(300)).await;
        drop(other);
    });
    let request = Request::builder().header("x-timeout", "400").body(()).unwrap();
    let began = Instant::now();
    let response = outer.layer(slots).oneshot(request).await.unwrap();
    assert_eq!(response.status(), 429);
    assert!(began.elapsed() <= Duration::from_millis(410), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn clones_of_a_stacked_permit_have_a_task_each() {
    let semaphore = Semaphore::in_memory();
    let outer = ConcurrencyLimitLayer::builder(&semaphore, "outer").limit(1).build().unwrap();
    let inner = ConcurrencyLimitLayer::builder(&semaphore, "inner").limit(1).build().unwrap();
    let kept: Arc<Mutex<Option<Permit>>> = Arc::default();
    let keeps = Arc::clone(&kept);
    let served = service_fn(move |request: Request<()>| {
        *keeps.lock().unwrap() = request.extensions().get::<Permit>().cloned();
        async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("x"))) }
    });
    drop(outer.layer(inner.layer(served)).oneshot(Request::new(())).await.unwrap());
    let permit = kept.lock().unwrap().take().unwrap();
    let tasks: Vec<_> = (0..2)
        .map(|_| {
            let permit = permit.clone();
            tokio::spawn(async move { poll_fn(|cx| permit.poll_lost(cx)).await })
        })
        .collect();
    sleep(Duration::from_millis(10)).await;
    revoke_all(&semaphore, "outer").await;
    for (i, task) in tasks.into_iter().enumerate() {
        let woken = tokio::time::timeout(Duration::from_secs(60), task).await;
        assert!(woken.is_ok(), "task {i} sleeps on; is_lost: {}", permit.is_lost());
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_counts_nothing_stands_behind_none() {
    let semaphore = Semaphore::in_memory();
    let outer = ConcurrencyLimitLayer::builder(&semaphore, "outer")
        .limit(Limit::Unlimited)
        .build()
        .unwrap();
    let inner = ConcurrencyLimitLayer::builder(&semaphore, "inner").limit(1).build().unwrap();
    let served = service_fn(move |request: Request<()>| async move {
        let permit = request.extensions().get::<Permit>().unwrap();
        let outer = permit.outer().map(|outer| (outer.name().to_owned(), outer.cost()));
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(format!("{outer:?}"))))
    });
    let response = outer.layer(inner.layer(served)).oneshot(Request::new(())).await.unwrap();
    let text = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(text, "None");
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_keeps_its_permit_as_an_upgrade_does() {
    for (method, status) in [(Method::GET, 101), (Method::CONNECT, 200)] {
        let semaphore = Semaphore::in_memory();
        let layer = ConcurrencyLimitLayer::builder(&semaphore, "tunnels").limit(1).build().unwrap();
        let served = service_fn(move |_: Request<()>| async move {
            Ok::<_, Infallible>(
                Response::builder().status(status).body(Empty::<Bytes>::new()).unwrap(),
            )
        });
        let io = ConnectionIo::new(tokio::io::empty());
        let request = Request::builder().method(&method).uri("example.org:443").body(()).unwrap();
        let service = io.connection().layer(layer.layer(served));
        drop(service.oneshot(request).await.unwrap());
        assert_eq!(in_use(&semaphore, "tunnels").await, 1, "{method} {status}");
        drop(io);
        sleep(Duration::from_millis(1)).await;
        assert_eq!(in_use(&semaphore, "tunnels").await, 0, "{method} {status}");
    }
}

struct Looked {
    in_look: Arc<AtomicUsize>,
    gone: Arc<AtomicBool>,
}
impl Body for Looked {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Pending
    }
    fn size_hint(&self) -> SizeHint {
        if self.in_look.compare_exchange(1, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            while self.in_look.load(Ordering::SeqCst) != 3 {
                std::thread::yield_now();
            }
        }
        SizeHint::default()
    }
}
impl Drop for Looked {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_loss_during_a_look_at_the_size_is_not_missed() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "quota").limit(1).build().unwrap();
    let (in_look, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (look, went) = (Arc::clone(&in_look), Arc::clone(&gone));
    let served = service_fn(move |_: Request<()>| {
        let body = Looked { in_look: Arc::clone(&look), gone: Arc::clone(&went) };
        async { Ok::<_, Infallible>(Response::new(body)) }
    });
    let response = layer.layer(served).oneshot(Request::new(())).await.unwrap();
    let mut body = response.into_body();
    // A reader that waits for a frame, and must be woken.
    let waker = futures_util::task::noop_waker();
    assert!(Pin::new(&mut body).poll_frame(&mut Context::from_waker(&waker)).is_pending());
    in_look.store(1, Ordering::SeqCst);
    let looker = std::thread::spawn(move || {
        let _ = body.size_hint();
        body
    });
    while in_look.load(Ordering::SeqCst) != 2 {
        sleep(Duration::from_millis(1)).await;
    }
    revoke_all(&semaphore, "quota").await;
    sleep(Duration::from_millis(50)).await;
    in_look.store(3, Ordering::SeqCst);
    let _body = looker.join().unwrap();
    sleep(Duration::from_secs(1)).await;
    assert!(gone.load(Ordering::SeqCst), "the source behind the body goes on");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_further_in_that_became_an_error_does_not_linger() {
    let semaphore = Semaphore::in_memory();
    let quota = ConcurrencyLimitLayer::builder(&semaphore, "quota")
        .limit(2)
        .linger(LINGER)
        .build()
        .unwrap();
    let tenant = impatient(&semaphore, "tenant");
    let _taken = semaphore.acquire("tenant", &Policy::new(1)).await.unwrap();
    let served = service_fn(|_: Request<()>| async {
        Ok::<_, BoxError>(Response::new(Full::<Bytes>::from("x")))
    });
    let stack = quota.into_error().layer(tenant.into_error().layer(served));
    let error = stack.oneshot(Request::new(())).await.unwrap_err();
    assert!(error.downcast_ref::<Refusal>().is_some());
    assert_eq!(in_use(&semaphore, "quota").await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_refused_attempt_spares_no_other_that_was_passed_on() {
    let semaphore = Semaphore::in_memory();
    let hangs = service_fn(|_: Request<()>| pending::<Result<Response<Full<Bytes>>, BoxError>>());
    let attempt = impatient(&semaphore, "tenant").layer(hangs);
    // The first answer of two attempts, the second of which the tenant's layer rejects.
    let hedge = service_fn(move |request: Request<()>| {
        let (first, second) = (attempt.clone(), attempt.clone());
        async move {
            tokio::select! {
                biased;
                answer = first.oneshot(request.clone()) => answer,
                answer = second.oneshot(request) => answer,
            }
        }
    });
    let quota = lingering(&semaphore, "quota");
    let response = quota.layer(hedge.clone()).oneshot(Request::new(())).await.unwrap();
    assert_eq!(response.status(), 429);
    drop(response);
    assert_eq!(in_use(&semaphore, "quota").await, 1, "the first attempt was dropped in the middle");
    sleep(LINGER + Duration::from_millis(10)).await;
    assert_eq!(in_use(&semaphore, "quota").await, 0);
    let as_error = hedge.and_then(|answer: Response<_>| async move {
        match answer.extensions().get::<Refusal>() {
            Some(refusal) => Err(BoxError::from(refusal.clone())),
            None => Ok(answer),
        }
    });
    quota.layer(as_error).oneshot(Request::new(())).await.unwrap_err();
    assert_eq!(in_use(&semaphore, "quota").await, 1, "the first attempt was dropped in the middle");
}

#[tokio::test(start_paused = true)]
async fn a_refused_attempt_spares_nothing_that_comes_after_it() {
    let semaphore = Semaphore::in_memory();
    let served = service_fn(|_: Request<()>| async {
        Ok::<_, BoxError>(Response::new(Full::<Bytes>::from("x")))
    });
    let first = impatient(&semaphore, "first").layer(served);
    // A second provider, which has no layer of its own.
    let called = Arc::new(AtomicUsize::new(0));
    let fallback = {
        let called = called.clone();
        service_fn(move |request: Request<()>| {
            let (first, called) = (first.clone(), called.clone());
            async move {
                let answer = first.oneshot(request).await?;
                if answer.extensions().get::<Refusal>().is_none() {
                    return Ok(answer);
                }
                called.fetch_add(1, Ordering::SeqCst);
                pending::<Result<_, BoxError>>().await
            }
        })
    };
    let _taken = semaphore.acquire("first", &Policy::new(1)).await.unwrap();
    let call = lingering(&semaphore, "quota").layer(fallback).oneshot(Request::new(()));
    let timeout = tokio::time::timeout(Duration::from_millis(10), call).await;
    assert!(timeout.is_err() && called.load(Ordering::SeqCst) == 1);
    assert_eq!(in_use(&semaphore, "quota").await, 1, "the second provider still serves it");
}

#[tokio::test(start_paused = true)]
async fn nor_does_it_where_that_answers_at_once() {
    let semaphore = Semaphore::in_memory();
    let served = service_fn(|_: Request<()>| async { Ok::<_, BoxError>(Response::new(endless())) });
    let first = impatient(&semaphore, "first").layer(served);
    let fallback = service_fn(move |request: Request<()>| {
        let first = first.clone();
        async move {
            let answer = first.oneshot(request).await?;
            let is_refused = answer.extensions().get::<Refusal>().is_some();
            assert!(is_refused);
            Ok::<_, BoxError>(Response::new(endless()))
        }
    });
    let _taken = semaphore.acquire("first", &Policy::new(1)).await.unwrap();
    let call = lingering(&semaphore, "quota").layer(fallback).oneshot(Request::new(()));
    drop(call.await.unwrap());
    assert_eq!(in_use(&semaphore, "quota").await, 1, "the second provider still streams");
}

#[tokio::test(start_paused = true)]
async fn an_upgraded_connection_lingers_after_its_end() {
    let semaphore = Semaphore::in_memory();
    let layer = lingering(&semaphore, "quota");
    let served = service_fn(move |_: Request<()>| async move {
        Ok::<_, Infallible>(Response::builder().status(101).body(Empty::<Bytes>::new()).unwrap())
    });
    let io = ConnectionIo::new(tokio::io::empty());
    let service = io.connection().layer(layer.layer(served));
    drop(service.oneshot(Request::new(())).await.unwrap());
    assert_eq!(in_use(&semaphore, "quota").await, 1);
    drop(io);
    assert_eq!(in_use(&semaphore, "quota").await, 1, "after the connection broke");
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_lingers_though_its_semaphore_is_gone() {
    let redis = crate::support::redis::TestRedis::start();
    let (semaphore, other) = (redis.semaphore(), redis.semaphore());
    let policy = Policy::builder(1).lease(Duration::from_secs(10)).linger(LINGER).build().unwrap();
    let permit = semaphore.acquire("quota", &policy).await.unwrap();
    drop(semaphore);
    permit.break_off();
    drop(permit);
    assert_eq!(in_use(&other, "quota").await, 1);
    sleep(LINGER + Duration::from_millis(300)).await;
    assert_eq!(in_use(&other, "quota").await, 0);
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_again_once_waiting_has_stopped() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(1)
        .lease(Duration::from_secs(2))
        .wait_timeout(Duration::from_secs(60))
        .build()
        .unwrap();
    // Granted, and not polled yet.
    let mut late = semaphore.acquire("quota", &policy);
    semaphore.stop_waiting();
    // The process is stopped for longer than the lease, and the permit is taken meanwhile, here by an operator's limit.
    semaphore.set_limit("quota", 0).await.unwrap();
    tokio::time::advance(Duration::from_secs(3)).await;
    let began = Instant::now();
    let _ = (&mut late).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[cfg(feature = "redis")]
struct PanicsInDrop;
#[cfg(feature = "redis")]
impl Body for PanicsInDrop {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Pending
    }
}
#[cfg(feature = "redis")]
impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("in the drop of a body");
        }
    }
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_panics_as_it_is_dropped_takes_no_other_permit_along() {
    let redis = crate::support::redis::TestRedis::start();
    let (semaphore, other) = (redis.semaphore(), redis.semaphore());
    let layer = |name: &str| {
        ConcurrencyLimitLayer::builder(&semaphore, name)
            .limit(1)
            .lease(Duration::from_secs(1))
            .build()
            .unwrap()
    };
    let first =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(PanicsInDrop)) });
    let second =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(endless())) });
    let first = layer("a").layer(first).oneshot(Request::new(())).await.unwrap();
    let second = layer("b").layer(second).oneshot(Request::new(())).await.unwrap();
    let reader = tokio::spawn(second.into_body().collect());
    sleep(Duration::from_millis(100)).await;
    assert_eq!(in_use(&other, "b").await, 1);
    // An operator elsewhere.
    revoke_all(&other, "a").await;
    sleep(Duration::from_secs(4)).await;
    let policy = Policy::builder(1).wait_timeout(Duration::ZERO).build().unwrap();
    let taken = other.acquire("b", &policy).await;
    assert!(
        taken.is_err() || reader.is_finished(),
        "two have the one permit of b, and nobody is told"
    );
    std::mem::forget(first);
}

/// A body that is slow to drop.
struct SlowInDrop;
impl Body for SlowInDrop {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Pending
    }
}
impl Drop for SlowInDrop {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_secs(3));
    }
}

/// In a single-threaded runtime, which the drop must not block.
#[tokio::test]
async fn a_body_that_is_slow_to_drop_blocks_no_worker() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "a").limit(1).build().unwrap();
    let service =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(SlowInDrop)) });
    let slow = layer.layer(service).oneshot(Request::new(())).await.unwrap();
    let began = Instant::now();
    revoke_all(&semaphore, "a").await;
    for _ in 0..10 {
        sleep(Duration::from_millis(20)).await;
    }
    assert!(began.elapsed() < Duration::from_secs(2), "blocked for {:?}", began.elapsed());
    assert!(slow.into_body().collect().await.is_err());
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_body_that_is_slow_to_drop_does_not_delay_the_end_of_others() {
    let redis = crate::support::redis::TestRedis::start();
    let (semaphore, other) = (redis.semaphore(), redis.semaphore());
    let layer = |name: &str| ConcurrencyLimitLayer::builder(&semaphore, name).limit(1).build();
    let first =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(SlowInDrop)) });
    let second =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(endless())) });
    let slow = layer("a").unwrap().layer(first).oneshot(Request::new(())).await.unwrap();
    let second = layer("b").unwrap().layer(second).oneshot(Request::new(())).await.unwrap();
    let reader = tokio::spawn(second.into_body().collect());
    assert_eq!((in_use(&other, "a").await, in_use(&other, "b").await), (1, 1));
    // An operator elsewhere.
    revoke_all(&other, "a").await;
    revoke_all(&other, "b").await;
    let ended = tokio::time::timeout(Duration::from_secs(2), reader).await;
    assert!(ended.expect("it waits for the slow one").unwrap().is_err());
    drop(slow);
}
