//! Whatever is dropped, at any point, leaves nothing.
//!
//! This file uses the embedded backend, where every step can be counted: each future is polled k times and dropped, for
//! k = 0, 1, 2, ... until it is done. What happens between two polls (a permit is freed, a lookup ends, a frame
//! arrives) is seen by the next poll, or never. `network` does the same with Redis and etcd, where a call is in flight for
//! a while.

#[cfg(feature = "redis")]
mod network;

use std::any::Any;
use std::cell::RefCell;
use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, Service, service_fn};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::backend::seam::{Backend, Connection, Embedded, Mailbox, Shard};
use tower_semaphore::limit::{ConcurrencyLimitBuilder, HoldUntil, ResponseBody};
use tower_semaphore::protocol::NodeId;
use tower_semaphore::{
    Acquire, AcquireError, BackendError, ConcurrencyLimitLayer, Name, Permit, Policy, RejectReason,
    Semaphore,
};

const WAIT: Duration = Duration::from_secs(20);

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(WAIT).build().unwrap()
}

/// The name and the key whose permits a test uses.
const LAYER: &str = "api";
const KEY: &str = "key";

fn name() -> Name {
    Name::new(LAYER).part(KEY)
}

/// The process under test, and others on the same backend.
struct Bench {
    backend: MemoryBackend,
    limit: u32,
    semaphore: Semaphore,
    others: Semaphore,
    /// The permits of the others, and their waiting requests.
    holders: RefCell<Vec<Permit>>,
    waiters: RefCell<Vec<Acquire>>,
    /// What the request under test waits for, besides its permit.
    gate: Gate,
}

impl Bench {
    fn new(limit: u32) -> Self {
        let backend = MemoryBackend::new();
        let (semaphore, others) =
            (Semaphore::new(backend.clone()), Semaphore::new(backend.clone()));
        let (holders, waiters, gate) = (RefCell::default(), RefCell::default(), Gate::default());
        Self { backend, limit, semaphore, others, holders, waiters, gate }
    }

    /// All permits are held by others.
    fn full(&self) {
        for _ in 0..self.limit {
            let permit = now(self.others.acquire(name(), &policy(self.limit))).unwrap();
            self.holders.borrow_mut().push(permit);
        }
    }

    /// Another of the others queues.
    fn queue(&self) {
        self.waiters.borrow_mut().push(self.others.acquire(name(), &policy(self.limit)));
    }

    /// One of the others releases its permit.
    fn free(&self) {
        drop(self.holders.borrow_mut().pop().expect("one who holds"));
    }

    fn acquire(&self) -> Acquire {
        self.semaphore.acquire(name(), &policy(self.limit))
    }

    fn layer(&self) -> ConcurrencyLimitBuilder {
        ConcurrencyLimitLayer::builder(&self.semaphore, LAYER).wait_timeout(WAIT)
    }

    /// Asserts that nothing is left of what was under test, and nothing is in the way of others.
    fn nothing_left(self, what: &str) {
        let (holders, waiters) = (self.holders.into_inner(), self.waiters.into_inner());
        let seen = now(self.others.inspect(name())).unwrap();
        let places = (holders.len() + waiters.len()) as u64;
        let in_use = places.min(self.limit.into());
        assert_eq!((seen.in_use, seen.waiting), (in_use, places - in_use), "{what}");
        drop(holders);
        for waiter in waiters {
            let _ = now(waiter)
                .unwrap_or_else(|error| panic!("{what}: a waiter is not served: {error}"));
        }
        assert!(self.backend.is_empty(), "{what}");
        let acquire = || now(self.others.try_acquire(name(), &policy(self.limit)));
        let all: Vec<_> = (0..self.limit).map(|_| acquire()).collect();
        assert!(all.iter().all(Result::is_ok), "{what}: {all:?}");
        assert!(acquire().is_err(), "{what}: over the cap");
        drop(all);
        assert!(self.backend.is_empty(), "{what}");
    }
}

/// The embedded backend answers at once.
fn now<F: Future>(future: F) -> F::Output {
    future.now_or_never().expect("done at once")
}

/// A gate that opens step by step. A future that waits for a step is polled by hand.
#[derive(Clone, Default)]
struct Gate(Arc<AtomicUsize>);

impl Gate {
    fn open(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn is_open(&self, step: usize) -> bool {
        self.0.load(Ordering::SeqCst) > step
    }

    async fn pass(&self, step: usize) {
        poll_fn(|_| if self.is_open(step) { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

/// What happens before a poll.
type Event = fn(&Bench);

const NOTHING: Event = |_| {};
const FREE: Event = Bench::free;
const OPEN: Event = |bench| bench.gate.open();

/// Drops what `begin` makes, after each number of polls until it is done: before the next event, and after it. Before
/// each poll the next of `events` happens.
///
/// Returns the number of these cells.
async fn at_every_poll<F: Future>(
    what: &str,
    limit: u32,
    set_up: Event,
    begin: impl Fn(&Bench) -> F,
    events: &[Event],
) -> usize {
    let event = |bench: &Bench, polls: usize| events.get(polls).unwrap_or(&NOTHING)(bench);
    let mut cells = 0;
    for polls in 0..20 {
        for unseen in [false, true] {
            let what = format!("{what}, dropped after {polls} polls, event unseen: {unseen}");
            let bench = Bench::new(limit);
            set_up(&bench);
            let mut output = None;
            {
                let mut future = pin!(begin(&bench));
                let mut cx = Context::from_waker(std::task::Waker::noop());
                for poll in 0..polls {
                    event(&bench, poll);
                    // Lets a task of the semaphore run.
                    tokio::task::yield_now().await;
                    if let Poll::Ready(done) = future.as_mut().poll(&mut cx) {
                        output = Some(done);
                        break;
                    }
                }
                if unseen && output.is_none() {
                    event(&bench, polls);
                }
            }
            let done = output.take().is_some();
            bench.nothing_left(&what);
            cells += 1;
            if done {
                assert!(polls >= events.len(), "{what}: done before its time");
                eprintln!("{:<60} {cells:>3} cells", what.split(", dropped").next().unwrap());
                return cells;
            }
        }
    }
    panic!("{what}: never done");
}

#[tokio::test]
async fn an_acquire_that_is_dropped_leaves_nothing() {
    let begin = Bench::acquire;
    at_every_poll("acquire, free", 2, NOTHING, begin, &[]).await;
    at_every_poll("acquire, full", 2, Bench::full, begin, &[NOTHING, FREE]).await;
    // With others behind it, which must not be delayed by what was dropped.
    let crowded: &[Event] = &[Bench::queue, Bench::queue, FREE];
    at_every_poll("acquire, full, others behind", 1, Bench::full, begin, crowded).await;
    let behind: Event = |bench| {
        bench.full();
        bench.queue();
    };
    let turns: &[Event] = &[NOTHING, FREE, |bench| drop(bench.waiters.borrow_mut().pop())];
    at_every_poll("acquire, full, behind another", 1, behind, begin, turns).await;
    at_every_poll("acquire, granted before it is polled", 1, Bench::full, begin, &[FREE]).await;
    let begin = |bench: &Bench| bench.semaphore.try_acquire(name(), &policy(bench.limit));
    at_every_poll("try_acquire, free", 1, NOTHING, begin, &[]).await;
    at_every_poll("try_acquire, full", 1, Bench::full, begin, &[]).await;
    let begin = |bench: &Bench| {
        let narrow = Policy::builder(bench.limit).max_queue(1).build().unwrap();
        bench.semaphore.acquire(name(), &narrow)
    };
    at_every_poll("acquire, queue full", 1, behind, begin, &[]).await;
    let close: Event = |bench| assert!(bench.semaphore.shutdown().now_or_never().is_none());
    let begin = Bench::acquire;
    at_every_poll("acquire, shut down meanwhile", 1, Bench::full, begin, &[NOTHING, close]).await;
}

#[tokio::test]
async fn what_was_taken_for_another_caller_goes_on_when_one_is_dropped() {
    // Each in a queue of three is dropped; the others are still served.
    for gone in 0..3 {
        let bench = Bench::new(1);
        bench.full();
        let mut queue: Vec<_> = (0..3).map(|_| task::spawn(bench.acquire())).collect();
        queue.iter_mut().for_each(|waiter| assert_pending!(waiter.poll()));
        drop(queue.remove(gone));
        bench.free();
        for mut waiter in queue {
            assert!(waiter.is_woken());
            drop(assert_ready_ok!(waiter.poll()));
        }
        bench.nothing_left("one of three");
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_waited_too_long_leaves_nothing() {
    for seen in [false, true] {
        let bench = Bench::new(1);
        bench.full();
        // Sooner than a lease ends.
        let mut late = task::spawn(bench.semaphore.acquire(name(), &Policy::new(1)));
        assert_pending!(late.poll());
        tokio::time::advance(Policy::DEFAULT_WAIT_TIMEOUT).await;
        if seen {
            match late.poll() {
                Poll::Ready(Err(AcquireError::Rejected(rejected))) => {
                    assert_eq!(rejected.reason, RejectReason::QueueTimeout);
                }
                other => panic!("{other:?}"),
            }
            // Even before the future is gone.
            assert_eq!(now(bench.others.inspect(name())).unwrap().waiting, 0);
        }
        drop(late);
        bench.nothing_left("timed out");
    }
}

/// A permit of the process under test.
fn held(bench: &Bench) -> Permit {
    now(bench.acquire()).unwrap()
}

#[tokio::test]
async fn what_is_asked_of_a_permit_leaves_nothing_when_it_is_dropped() {
    let release = |bench: &Bench| held(bench).release();
    at_every_poll("release", 1, NOTHING, release, &[]).await;
    let others: &[Event] = &[Bench::queue];
    at_every_poll("release, others wait", 1, NOTHING, release, others).await;
    let clone = |bench: &Bench| {
        let permit = held(bench);
        let clone = permit.clone();
        async move {
            permit.release().await.unwrap();
            assert!(!clone.is_lost());
        }
    };
    at_every_poll("release, a clone lives on", 1, NOTHING, clone, &[]).await;
    let lost = |bench: &Bench| {
        let permit = held(bench);
        async move { permit.lost().await }
    };
    let close: Event = |bench| assert!(bench.semaphore.shutdown().now_or_never().is_none());
    at_every_poll("lost", 1, NOTHING, lost, &[NOTHING, NOTHING, close]).await;
}

#[tokio::test]
async fn waiting_for_the_loss_of_a_permit_can_be_given_up_and_begun_again() {
    let bench = Bench::new(1);
    let permit = held(&bench);
    for _ in 0..3 {
        assert_pending!(task::spawn(permit.lost()).poll());
    }
    assert!(!permit.is_lost());
    assert!(bench.others.try_acquire(name(), &policy(1)).await.is_err());
    let mut last = task::spawn(permit.lost());
    assert_pending!(last.poll());
    bench.semaphore.shutdown().await;
    assert!(last.is_woken());
    assert!(last.poll().is_ready());
    drop(last);
    drop(permit);
    bench.nothing_left("lost");
}

#[tokio::test]
async fn an_inspection_and_a_shutdown_that_are_dropped_leave_nothing() {
    let inspect = |bench: &Bench| {
        let (permit, semaphore) = (held(bench), bench.semaphore.clone());
        async move {
            let seen = semaphore.inspect(name()).await.unwrap();
            drop(permit);
            seen
        }
    };
    at_every_poll("inspect", 1, NOTHING, inspect, &[]).await;
    let shutdown = |bench: &Bench| {
        let (permit, waiter) = (held(bench), bench.acquire());
        let semaphore = bench.semaphore.clone();
        async move {
            semaphore.shutdown().await;
            assert!(permit.is_lost());
            assert!(matches!(waiter.await, Err(AcquireError::Closed)));
        }
    };
    at_every_poll("shutdown", 1, NOTHING, shutdown, &[]).await;
}

#[tokio::test]
async fn a_shutdown_that_is_dropped_has_happened() {
    for polled in [false, true] {
        let bench = Bench::new(1);
        let permit = held(&bench);
        let waiter = bench.acquire();
        let mut shutdown = task::spawn(bench.semaphore.shutdown());
        if polled {
            assert_pending!(shutdown.poll());
        }
        drop(shutdown);
        // A future that was never polled has done nothing.
        assert_eq!(bench.backend.is_empty(), polled);
        assert_eq!(permit.is_lost(), polled);
        drop(permit);
        assert_eq!(waiter.await.is_err(), polled);
        bench.nothing_left("shutdown");
    }
}

// ===== the layer =====

/// Frames that come as the gate opens, from a certain step on; then the end.
struct Frames {
    gate: Gate,
    next: usize,
    end: usize,
    then: End,
}

#[derive(Clone, Copy)]
enum End {
    Ends,
    Fails,
}

impl Body for Frames {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        if !self.gate.is_open(self.next) {
            return Poll::Pending;
        }
        self.next += 1;
        Poll::Ready(match self.then {
            _ if self.next <= self.end => Some(Ok(Frame::data(Bytes::from_static(b"frame")))),
            End::Ends => None,
            End::Fails => Some(Err(std::io::Error::other("the source ran dry"))),
        })
    }
}

/// One request from its call to the end of its body. Key, limit, handler and each frame wait for a step of the gate;
/// the permit is awaited between limit and handler.
fn request(bench: &Bench, layer: ConcurrencyLimitBuilder, then: End) -> impl Future + use<> {
    let gate = bench.gate.clone();
    let handler = service_fn(move |request: Request<()>| {
        let gate = gate.clone();
        async move {
            assert!(request.extensions().get::<Permit>().is_some());
            gate.pass(2).await;
            Ok::<_, Infallible>(Response::new(Frames { gate, next: 3, end: 5, then }))
        }
    });
    let (limit, gate) = (bench.limit, bench.gate.clone());
    let key_gate = gate.clone();
    let layer = layer
        .key_async(move |_| {
            let gate = key_gate.clone();
            async move {
                gate.pass(0).await;
                Some(KEY)
            }
        })
        .limit_by_async(move |_, _| {
            let gate = gate.clone();
            async move {
                gate.pass(1).await;
                limit
            }
        });
    let mut service = layer.build().unwrap().layer(handler);
    let response = service.call(Request::new(()));
    async move {
        let response = response.await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let mut body: ResponseBody<_> = response.into_body();
        while let Some(Ok(_)) = body.frame().await {}
        // It is released at the end, not when the body is dropped.
        body
    }
}

/// All of them: key, limit, permit, handler, two frames, end.
const STEPS: &[Event] = &[NOTHING, OPEN, OPEN, FREE, OPEN, OPEN, OPEN, OPEN];

#[tokio::test]
async fn a_request_that_is_dropped_leaves_nothing_from_its_key_to_the_end_of_its_body() {
    let begin = |bench: &Bench| request(bench, bench.layer(), End::Ends);
    at_every_poll("a request", 1, Bench::full, begin, STEPS).await;
    at_every_poll("a request under the cap", 2, NOTHING, begin, &[OPEN; 6]).await;
    let begin = |bench: &Bench| request(bench, bench.layer(), End::Fails);
    at_every_poll("a request whose body fails", 1, Bench::full, begin, STEPS).await;
    let begin = |bench: &Bench| {
        request(bench, bench.layer().hold_until(HoldUntil::ResponseHead), End::Ends)
    };
    at_every_poll("a request held to its head", 1, Bench::full, begin, STEPS).await;
}

#[tokio::test]
async fn a_request_that_is_refused_leaves_nothing() {
    let begin = |bench: &Bench| {
        let layer = bench.layer().limit(bench.limit).key(|_: &_| Some(KEY));
        let layer = layer.wait_timeout(Duration::ZERO);
        let mut service = layer
            .build()
            .unwrap()
            .layer(service_fn(|_| async { Ok::<_, Infallible>(Response::new(String::new())) }));
        let response = service.call(Request::new(()));
        async move { assert_eq!(response.await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS) }
    };
    at_every_poll("a request that is refused", 1, Bench::full, begin, &[]).await;
}

#[tokio::test]
async fn a_response_that_is_dropped_before_its_body_is_asked_for_leaves_nothing() {
    // Like a client that leaves right after the head; and a body that is taken apart from its head.
    for apart in [false, true] {
        let bench = Bench::new(1);
        let mut service = layered(&bench, |_| async { Ok(Response::new("body".to_owned())) });
        let response = service.call(Request::new(())).await.unwrap();
        assert_eq!(now(bench.others.inspect(name())).unwrap().in_use, 1);
        if apart {
            let (head, body) = response.into_parts();
            drop(head);
            assert_eq!(now(bench.others.inspect(name())).unwrap().in_use, 1);
            drop(body);
        } else {
            drop(response);
        }
        drop(service);
        bench.nothing_left("a response");
    }
}

/// A handler behind the layer.
fn layered<F, Fut>(
    bench: &Bench,
    handler: F,
) -> impl Service<
    Request<()>,
    Response = Response<ResponseBody<String>>,
    Error = Infallible,
    Future: Send + 'static,
> + use<F, Fut>
where
    F: FnMut(Request<()>) -> Fut + Clone + Send,
    Fut: Future<Output = Result<Response<String>, Infallible>> + Send + 'static,
    F: 'static,
{
    let layer = bench.layer().limit(bench.limit).key(|_: &_| Some(KEY));
    layer.build().unwrap().layer(service_fn(handler))
}

// ===== how and where it is dropped =====

/// On a thread without a runtime.
fn elsewhere<T: Send + 'static>(what: T) {
    std::thread::spawn(move || drop(what)).join().expect("dropping does not panic");
}

#[tokio::test]
async fn anything_may_be_dropped_on_a_thread_without_a_runtime() {
    let bench = Bench::new(1);
    elsewhere(held(&bench));
    bench.nothing_left("a permit");

    for polled in [false, true] {
        for granted in [false, true] {
            let bench = Bench::new(1);
            bench.full();
            let mut acquire = Box::pin(bench.acquire());
            if polled {
                assert!(acquire.as_mut().now_or_never().is_none());
            }
            if granted {
                bench.free();
            }
            elsewhere(acquire);
            bench.nothing_left("an acquire");
        }
    }

    let bench = Bench::new(1);
    let mut service = layered(&bench, |_| pending());
    let mut response = Box::pin(service.call(Request::new(())));
    assert!(response.as_mut().now_or_never().is_none());
    assert_eq!(now(bench.others.inspect(name())).unwrap().in_use, 1);
    elsewhere(response);
    drop(service);
    bench.nothing_left("a response future");

    let bench = Bench::new(1);
    let mut service = layered(&bench, |_| async { Ok(Response::new("body".to_owned())) });
    elsewhere(service.call(Request::new(())).await.unwrap());
    drop(service);
    bench.nothing_left("a response");

    // The last handle of the process, and what it had.
    let bench = Bench::new(1);
    let one = Semaphore::new(bench.backend.clone());
    let permit = one.acquire(name(), &policy(1)).await.unwrap();
    elsewhere((one, permit));
    bench.nothing_left("a semaphore");
}

#[test]
fn anything_may_be_dropped_after_its_runtime_was_shut_down() {
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let bench = Bench::new(1);
    let first = runtime().unwrap();
    let (permit, waiter) = first.block_on(async {
        let permit = held(&bench);
        let mut waiter = Box::pin(bench.acquire());
        assert!(waiter.as_mut().now_or_never().is_none());
        (permit, waiter)
    });
    first.shutdown_background();
    drop(permit);
    drop(waiter);
    assert!(bench.backend.is_empty());
    // The semaphore works on with the next one.
    let second = runtime().unwrap();
    second.block_on(async {
        drop(bench.acquire().await.unwrap());
        bench.nothing_left("after a runtime");
    });
}

#[test]
fn an_embedded_semaphore_goes_on_in_the_next_runtime() {
    let semaphore = Semaphore::in_memory();
    for _ in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for _ in 0..10 {
                drop(semaphore.acquire("x", &policy(1)).await.unwrap());
                tokio::task::yield_now().await;
            }
        });
    }
}

/// A backend that notifies when the last handle on a process is gone, and its record of places with it.
struct Watched<B>(
    B,
    #[allow(dead_code, reason = "what is watched is whether it is there")] Arc<()>,
);

impl<B: Backend> Backend for Watched<B> {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.attach(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.0.key(name)
    }

    fn embedded(&self) -> Option<&dyn Embedded> {
        self.0.embedded()
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        self.0.connect(shard)
    }
}

/// Drops a permit, its semaphore and their runtime in each order. No memory is kept.
fn drops_in_each_order<B: Backend>(backend: impl Fn() -> B) {
    let mut kept = Vec::new();
    // All six may hold: without a runtime, a permit exists until its lease ends.
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let alive = Arc::new(());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let semaphore = Semaphore::new(Watched(backend(), Arc::clone(&alive)));
        let permit =
            runtime.block_on(async { semaphore.acquire(name(), &policy(6)).await }).unwrap();
        let mut what: [Option<Box<dyn Any>>; 3] =
            [Some(Box::new(permit)), Some(Box::new(semaphore)), Some(Box::new(runtime))];
        for i in order {
            drop(what[i].take());
        }
        if Arc::strong_count(&alive) > 1 {
            kept.push(order.map(|i| ["permit", "semaphore", "runtime"][i]));
        }
    }
    assert!(kept.is_empty(), "memory is kept after {kept:?}");
}

#[test]
fn no_memory_is_kept_in_whatever_order_permit_semaphore_and_runtime_go() {
    drops_in_each_order(MemoryBackend::new);
}

#[tokio::test]
async fn a_panic_while_holding_or_waiting_gives_everything_back() {
    let bench = Bench::new(1);
    let acquire = bench.acquire();
    let task = tokio::spawn(async move {
        let _permit = acquire.await.unwrap();
        panic!("while holding, as it is told to");
    });
    assert!(task.await.unwrap_err().is_panic());
    bench.nothing_left("a holder");

    let bench = Bench::new(1);
    bench.full();
    let acquire = bench.acquire();
    let task = tokio::spawn(async move {
        let mut acquire = pin!(acquire);
        assert!(acquire.as_mut().now_or_never().is_none());
        panic!("while waiting, as it is told to");
    });
    assert!(task.await.unwrap_err().is_panic());
    bench.nothing_left("a waiter");

    let bench = Bench::new(1);
    let mut service = layered(&bench, |_| async { panic!("in the handler, as it is told to") });
    let task = tokio::spawn(service.call(Request::new(())));
    assert!(task.await.unwrap_err().is_panic());
    drop(service);
    bench.nothing_left("a handler");
}

#[tokio::test]
async fn an_aborted_task_gives_back_what_it_had() {
    for waits in [false, true] {
        let bench = Bench::new(1);
        if waits {
            bench.full();
        }
        let acquire = bench.acquire();
        let task = tokio::spawn(async move {
            let _permit = acquire.await.unwrap();
            pending::<()>().await;
        });
        tokio::task::yield_now().await;
        let seen = now(bench.others.inspect(name())).unwrap();
        assert_eq!((seen.in_use, seen.waiting), (1, u64::from(waits)));
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        bench.nothing_left("aborted");
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_is_forgotten_is_kept_as_long_as_its_process_lives() {
    let bench = Bench::new(1);
    #[expect(clippy::mem_forget, reason = "that is what is tested")]
    std::mem::forget(held(&bench));
    for _ in 0..20 {
        tokio::time::sleep(Policy::DEFAULT_LEASE / 4).await;
        assert_eq!(now(bench.others.inspect(name())).unwrap().in_use, 1);
    }
    bench.semaphore.shutdown().await;
    bench.nothing_left("forgotten");
}

#[tokio::test(start_paused = true)]
async fn a_semaphore_may_be_dropped_before_what_came_from_it() {
    let backend = MemoryBackend::new();
    let others = Semaphore::new(backend.clone());
    let one = Semaphore::new(backend.clone());
    let permit = one.acquire(name(), &policy(1)).await.unwrap();
    let waiter = one.acquire(name(), &policy(1));
    drop(one);
    // Its places are still renewed.
    tokio::time::sleep(2 * Policy::DEFAULT_LEASE).await;
    let seen = now(others.inspect(name())).unwrap();
    assert_eq!((seen.in_use, seen.waiting), (1, 1));
    drop(permit);
    drop(waiter.await.unwrap());
    assert!(backend.is_empty());
}

#[tokio::test]
async fn an_acquire_may_move_between_tasks() {
    let bench = Bench::new(1);
    bench.full();
    let mut acquire = bench.acquire();
    // Each task leaves its waker behind; the last task's waker is the one to wake.
    for _ in 0..5 {
        acquire = tokio::spawn(async move {
            assert!((&mut acquire).now_or_never().is_none());
            (acquire,)
        })
        .await
        .unwrap()
        .0;
    }
    let last = tokio::spawn(acquire);
    tokio::task::yield_now().await;
    bench.free();
    let granted = tokio::time::timeout(Duration::from_secs(5), last).await;
    drop(granted.expect("the last task is woken").unwrap().unwrap());
    bench.nothing_left("moved");
}

#[tokio::test]
async fn an_acquire_made_anew_in_each_round_of_a_loop_leaves_nothing() {
    let bench = Bench::new(1);
    bench.full();
    let mut rounds = 0;
    let permit = loop {
        tokio::select! {
            biased;
            permit = bench.acquire() => break permit.unwrap(),
            () = tokio::task::yield_now() => rounds += 1,
        }
        assert_eq!(now(bench.others.inspect(name())).unwrap().waiting, 0);
        if rounds == 50 {
            bench.free();
        }
    };
    assert_eq!(rounds, 50);
    drop(permit);
    bench.nothing_left("a loop");
}
