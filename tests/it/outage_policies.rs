//! The edges of each outage policy: waiting requests, late answers, large queues.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::Full;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{sleep, timeout};
use tokio_test::{assert_pending, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::backend::RedisBackend;
use tower_semaphore::{
    AcquireError, ConcurrencyLimitLayer, OnUnavailable, Permit, Policy, PolicyBuilder,
    RejectReason, Semaphore,
};

use crate::support::eventually;
use crate::support::proxy::{Proxy, REPLIES, REQUESTS};
use crate::support::redis::TestRedis;
use crate::support::semaphore::{down, empty, in_use, up, waiting, warm};

const SECOND: Duration = Duration::from_secs(1);

fn policy(limit: u32, on_unavailable: OnUnavailable) -> PolicyBuilder {
    Policy::builder(limit).wait_timeout(10 * SECOND).on_unavailable(on_unavailable)
}

/// A semaphore that has been in use.
async fn used(redis: &TestRedis) -> Semaphore {
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    semaphore
}

/// A used semaphore that reaches its server through a proxy, and gives up no connection.
async fn patient(proxy: &Proxy) -> Semaphore {
    let backend = RedisBackend::builder(proxy.url()).response_timeout(20 * SECOND);
    let semaphore = Semaphore::new(backend.build().unwrap());
    warm(&semaphore).await;
    semaphore
}

/// A used semaphore that notices within 100 ms that its server does not answer.
async fn impatient(redis: &TestRedis) -> Semaphore {
    let short = Duration::from_millis(50);
    let backend = RedisBackend::builder(redis.url()).response_timeout(short).connect_timeout(short);
    let semaphore = Semaphore::new(backend.build().unwrap());
    warm(&semaphore).await;
    semaphore
}

/// Runs a future on a thread and in a runtime of its own, so that one that spins does not block others.
fn apart<F>(future: F) -> oneshot::Receiver<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    let (to, output) = oneshot::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _ = to.send(runtime.block_on(future));
    });
    output
}

/// Returns the output of a future that runs [`apart`]. Closes the semaphore that it waits for if it takes too long.
async fn output<T>(output: oneshot::Receiver<T>, bound: Duration, semaphore: &Semaphore) -> T {
    if let Ok(output) = timeout(bound, output).await {
        return output.expect("the thread does not panic");
    }
    let _ = timeout(SECOND, semaphore.shutdown()).await;
    panic!("no answer within {bound:?}");
}

fn reason(result: Result<Permit, AcquireError>) -> RejectReason {
    match result {
        Err(AcquireError::Rejected(rejected)) => rejected.reason,
        other => panic!("not refused as full: {other:?}"),
    }
}

// ===== a local share: who waits =====

/// A request waits in the queue of a server, which is killed then.
async fn a_wait_through_an_outage_ends(
    because: RejectReason,
    prepare: impl AsyncFn(&Semaphore) -> Option<Permit>,
) {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let _held = prepare(&semaphore).await;
    let local = policy(1, OnUnavailable::Local(1)).wait_timeout(2 * SECOND).build().unwrap();
    let began = Instant::now();
    let waits = apart(semaphore.acquire("x", &local));
    waiting(&semaphore, "x", 1).await;
    redis.kill();
    down(&semaphore).await;
    let refused = output(waits, 4 * SECOND, &semaphore).await;
    assert_eq!(reason(refused), because);
    let took = began.elapsed();
    assert!(took > Duration::from_millis(1990) && took < 3 * SECOND, "{took:?}");
}

#[tokio::test]
async fn a_queued_request_is_refused_at_its_wait_timeout_while_the_local_share_is_used_up() {
    a_wait_through_an_outage_ends(RejectReason::QueueTimeout, async |semaphore| {
        let local = policy(1, OnUnavailable::Local(1)).build().unwrap();
        Some(semaphore.acquire("x", &local).await.unwrap())
    })
    .await;
}

#[tokio::test]
async fn a_queued_request_is_refused_at_its_wait_timeout_while_its_name_is_paused() {
    a_wait_through_an_outage_ends(RejectReason::Paused, async |semaphore| {
        semaphore.pause("x").await.unwrap();
        None
    })
    .await;
}

#[tokio::test]
async fn a_request_that_queued_before_the_outage_precedes_newcomers_in_the_local_share() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let local = policy(1, OnUnavailable::Local(1)).build().unwrap();
    let held = semaphore.acquire("x", &local).await.unwrap();
    let mut first = tokio::spawn(semaphore.acquire("x", &local));
    waiting(&semaphore, "x", 1).await;
    redis.kill();
    down(&semaphore).await;
    let mut newcomer = tokio::spawn(semaphore.acquire("x", &local));
    yield_now().await;
    drop(held);
    tokio::select! {
        biased;
        first = &mut first => drop(first.unwrap().unwrap()),
        _ = &mut newcomer => panic!("the newcomer passed a request that had queued before it"),
        () = sleep(5 * SECOND) => panic!("nobody is given the share that came free"),
    }
    drop(newcomer.await.unwrap().unwrap());
}

#[tokio::test]
async fn a_newcomer_does_not_pass_those_that_wait_when_a_permit_is_lost() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    // More than one round, because a failed attempt to connect serves them, too.
    for round in 0..5 {
        let name = format!("x{round}");
        let short = policy(2, OnUnavailable::Local(1)).lease(SECOND).build().unwrap();
        let held = semaphore.acquire(&*name, &short).await.unwrap();
        redis.kill();
        down(&semaphore).await;
        let mut first = task::spawn(semaphore.acquire(&*name, &short));
        assert_pending!(first.poll());
        held.lost().await;
        let newcomer = semaphore.try_acquire(&*name, &short).await;
        assert!(newcomer.is_err(), "the newcomer passed a request that waited before it");
        drop(held);
        drop(timeout(5 * SECOND, first).await.expect("the share is free").unwrap());
        redis.restart();
        up(&semaphore).await;
    }
}

#[tokio::test]
async fn when_a_local_queue_is_too_long_the_newest_are_refused() {
    let redis = TestRedis::start();
    let semaphore = impatient(&redis).await;
    let local = policy(5, OnUnavailable::Local(1)).max_queue(2).build().unwrap();
    redis.signal("STOP");
    // None is answered, and it is not known yet that the server is unreachable.
    let mut requests: Vec<_> =
        (0..5).map(|_| task::spawn(semaphore.acquire("x", &local))).collect();
    requests.iter_mut().for_each(|request| assert_pending!(request.poll()));
    down(&semaphore).await;
    let results: Vec<_> =
        requests.iter_mut().map(|request| (&mut **request).now_or_never()).collect();
    redis.signal("CONT");
    let what: Vec<_> = results
        .iter()
        .map(|result| match result {
            None => "waits".to_owned(),
            Some(Ok(_)) => "passes".to_owned(),
            Some(Err(AcquireError::Rejected(rejected))) => format!("{:?}", rejected.reason),
            Some(Err(error)) => error.to_string(),
        })
        .collect();
    assert_eq!(what, ["passes", "waits", "waits", "QueueFull", "QueueFull"]);
}

// ===== a local share: late answers =====

#[tokio::test]
async fn a_try_that_was_refused_before_its_answer_came_leaves_no_idle_permit() {
    let redis = TestRedis::start();
    let (proxy, others) = (Proxy::start(redis.port()).await, used(&redis).await);
    let semaphore = patient(&proxy).await;
    let local = policy(2, OnUnavailable::Local(1)).lease(60 * SECOND).build().unwrap();
    let held = semaphore.acquire("x", &local).await.unwrap();
    proxy.hold(REPLIES);
    // The server grants it, and its answer is delayed.
    let granted = in_use(&others, "x", 2);
    let (refused, ()) = tokio::join!(semaphore.try_acquire("x", &local), granted);
    assert!(refused.is_err(), "{refused:?}");
    proxy.flow();
    let released = timeout(SECOND, in_use(&others, "x", 1)).await;
    assert!(released.is_ok(), "a permit that nobody holds is idle a second later");
    drop(held);
    empty(&redis).await;
}

#[tokio::test]
async fn a_try_that_was_refused_while_the_server_was_frozen_leaves_no_idle_permit() {
    let redis = TestRedis::start();
    let (semaphore, others) = (used(&redis).await, used(&redis).await);
    let local = policy(2, OnUnavailable::Local(1)).lease(60 * SECOND).build().unwrap();
    let held = semaphore.acquire("x", &local).await.unwrap();
    redis.signal("STOP");
    let refused = semaphore.try_acquire("x", &local).await;
    assert!(refused.is_err(), "{refused:?}");
    redis.signal("CONT");
    let thawed = Instant::now();
    for process in [&semaphore, &others] {
        up(process).await;
    }
    in_use(&others, "x", 1).await;
    // Two seconds, because a connection is opened first.
    assert!(thawed.elapsed() < 2 * SECOND, "{:?}", thawed.elapsed());
    sleep(SECOND).await;
    assert_eq!(others.inspect("x").await.unwrap().in_use, 1);
    drop(held);
    empty(&redis).await;
}

#[tokio::test]
async fn a_try_that_was_refused_in_a_long_freeze_leaves_no_idle_permit() {
    let redis = TestRedis::start();
    let (semaphore, others) = (used(&redis).await, used(&redis).await);
    let local = policy(1, OnUnavailable::Local(0)).lease(60 * SECOND).build().unwrap();
    redis.signal("STOP");
    let refused = semaphore.try_acquire("x", &local).await;
    assert!(refused.is_err(), "{refused:?}");
    // Longer than a process keeps the session of an unused name.
    sleep(8 * SECOND).await;
    redis.signal("CONT");
    for process in [&semaphore, &others] {
        up(process).await;
    }
    let released = timeout(2 * SECOND, in_use(&others, "x", 0)).await;
    let idle = others.inspect("x").await.unwrap().in_use;
    assert!(released.is_ok(), "{idle} permits that nobody holds are idle");
    drop(timeout(2 * SECOND, others.acquire("x", &local)).await.unwrap().unwrap());
    empty(&redis).await;
}

#[tokio::test]
async fn a_layer_in_shadow_that_did_not_await_the_answer_leaves_no_idle_permit() {
    let redis = TestRedis::start();
    let (proxy, others) = (Proxy::start(redis.port()).await, used(&redis).await);
    let semaphore = patient(&proxy).await;
    let local = policy(2, OnUnavailable::Local(1)).lease(60 * SECOND).build().unwrap();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "x")
        .limit(2)
        .lease(60 * SECOND)
        .on_unavailable(OnUnavailable::Local(1))
        .shadow(true)
        .build()
        .unwrap();
    let held = semaphore.acquire("x", &local).await.unwrap();
    proxy.hold(REPLIES);
    let handler = service_fn(async |_| Ok::<_, Infallible>(Response::new(Full::new(Bytes::new()))));
    let passed = layer.layer(handler).oneshot(Request::new(()));
    let (passed, ()) = tokio::join!(passed, in_use(&others, "x", 2));
    drop(passed.unwrap());
    proxy.flow();
    let released = timeout(SECOND, in_use(&others, "x", 1)).await;
    assert!(released.is_ok(), "a permit that nobody holds is idle a second later");
    drop(held);
    empty(&redis).await;
}

// ===== admitted by policy =====

#[tokio::test]
async fn a_request_admitted_after_an_error_of_its_call_is_counted_when_the_error_is_gone() {
    let redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let admit = policy(1, OnUnavailable::Admit).build().unwrap();
    let errors = || {
        let stats: String = redis.command(&["INFO", "errorstats"]);
        let line = stats.lines().find_map(|line| line.strip_prefix("errorstat_OOM:count="));
        line.map_or(0, |count| count.trim().parse::<u64>().unwrap())
    };
    redis.command::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    redis.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let permit = semaphore.acquire("x", &admit).await.unwrap();
    assert_eq!(semaphore.health().admitted_by_policy, 1);
    // The place of its acquire, and that of the first attempt to have it counted.
    eventually("both calls fail", async || errors() >= 2).await;
    redis.command::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    let counted = timeout(5 * SECOND, in_use(&semaphore, "x", 1)).await;
    assert!(counted.is_ok(), "not counted in five seconds");
    assert!(!permit.is_lost());
    drop(permit);
    empty(&redis).await;
}

#[tokio::test]
async fn a_request_admitted_by_policy_stays_in_flight_though_it_is_counted_late() {
    let redis = TestRedis::start();
    let (proxy, others) = (Proxy::start(redis.port()).await, used(&redis).await);
    let semaphore = patient(&proxy).await;
    let admit = policy(1, OnUnavailable::Admit).lease(Policy::MIN_LEASE).build().unwrap();
    let held = others.acquire("x", &admit).await.unwrap();
    proxy.hold(REPLIES);
    // Its acquire remains unanswered, and so does the call that has it counted.
    let admitted = semaphore.acquire("x", &admit).await.unwrap();
    in_use(&others, "x", 2).await;
    // The answer to that call comes when its lease is over.
    in_use(&others, "x", 1).await;
    proxy.flow();
    let counted = timeout(5 * SECOND, in_use(&others, "x", 2)).await;
    let seen = others.inspect("x").await.unwrap();
    assert!(
        counted.is_ok() && !admitted.is_lost(),
        "{} in use and {} waiting, where two are in flight",
        seen.in_use,
        seen.waiting
    );
    drop((held, admitted));
    empty(&redis).await;
}

async fn a_limit_of_zero_admits_nobody(share: OnUnavailable) {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    semaphore.set_limit("x", 0).await.unwrap();
    let short = policy(1, share).wait_timeout(SECOND).build().unwrap();
    let queued = apart(semaphore.acquire("x", &short));
    waiting(&semaphore, "x", 1).await;
    redis.kill();
    down(&semaphore).await;
    let tries = semaphore.try_acquire("x", &short).await.is_ok();
    let waits = semaphore.acquire("x", &short).await.is_ok();
    let queued = output(queued, 4 * SECOND, &semaphore).await.is_ok();
    assert_eq!(
        [tries, waits, queued],
        [false; 3],
        "whether a request passes that may not wait, that may, and that had queued before"
    );
    // Other names are not affected.
    drop(semaphore.acquire("y", &short).await.unwrap());
}

#[tokio::test]
async fn a_limit_of_zero_admits_nobody_under_admit_while_the_server_is_away() {
    a_limit_of_zero_admits_nobody(OnUnavailable::Admit).await;
}

#[tokio::test]
async fn a_limit_of_zero_admits_nobody_under_local_while_the_server_is_away() {
    a_limit_of_zero_admits_nobody(OnUnavailable::Local(1)).await;
}

// ===== a request that is rarely polled, or waits through trouble =====

#[tokio::test]
async fn a_request_whose_permit_was_lost_before_it_saw_it_asks_again() {
    let redis = TestRedis::start();
    let (semaphore, others) = (used(&redis).await, used(&redis).await);
    let lease = Policy::MIN_LEASE;
    let refuse = policy(1, OnUnavailable::Refuse).lease(lease).build().unwrap();
    let mut request = task::spawn(semaphore.acquire("x", &refuse));
    assert_pending!(request.poll());
    in_use(&others, "x", 1).await;
    redis.signal("STOP");
    sleep(2 * lease).await;
    redis.signal("CONT");
    for process in [&semaphore, &others] {
        up(process).await;
    }
    let permit = timeout(5 * SECOND, request).await.expect("the permit is free");
    drop(permit.expect("a permit"));
    empty(&redis).await;
}

#[tokio::test]
async fn a_request_that_the_server_forgot_goes_on_waiting_though_answers_are_slow() {
    let redis = TestRedis::start();
    let (proxy, others) = (Proxy::start(redis.port()).await, used(&redis).await);
    let semaphore = patient(&proxy).await;
    let lease = Policy::MIN_LEASE;
    let refuse = policy(1, OnUnavailable::Refuse).lease(lease).build().unwrap();
    proxy.hold(REPLIES);
    let mut request = task::spawn(semaphore.acquire("x", &refuse));
    assert_pending!(request.poll());
    in_use(&others, "x", 1).await;
    // It learns of its grant when that can no longer be trusted, and is forgotten meanwhile.
    sleep(lease + lease / 10).await;
    redis.command::<()>(&["FLUSHALL"]);
    // From here on, round trips are slow in one direction, then in the other.
    for way in [REQUESTS, REPLIES].into_iter().cycle().take(16) {
        proxy.flow();
        proxy.hold(way);
        sleep(Duration::from_millis(100)).await;
        if let Poll::Ready(result) = request.poll() {
            drop(result.expect("it may wait for ten seconds"));
            return;
        }
    }
    proxy.flow();
    let permit = timeout(5 * SECOND, request).await.expect("the permit is free");
    drop(permit.expect("it may wait for ten seconds"));
    empty(&redis).await;
}

// ===== many requests on one name =====

/// The greatest delay of a 10 ms timer.
struct Ticker {
    longest: Arc<Mutex<Duration>>,
    ticks: JoinHandle<()>,
}

impl Ticker {
    fn start() -> Self {
        const TICK: Duration = Duration::from_millis(10);
        let longest = Arc::<Mutex<Duration>>::default();
        let shared = Arc::clone(&longest);
        let ticks = tokio::spawn(async move {
            loop {
                let before = Instant::now();
                sleep(TICK).await;
                let late = before.elapsed().saturating_sub(TICK);
                let mut longest = shared.lock().unwrap();
                *longest = late.max(*longest);
            }
        });
        Self { longest, ticks }
    }

    async fn stop(self) -> Duration {
        // The present delay counts, too.
        sleep(Duration::from_millis(20)).await;
        self.ticks.abort();
        *self.longest.lock().unwrap()
    }
}

/// How late a timer may be: a debug build is slow, and its machine is busy.
const STALL: Duration = Duration::from_millis(if cfg!(debug_assertions) { 1000 } else { 300 });

/// Makes this number of requests, each in a task.
async fn requests(
    semaphore: &Semaphore,
    policy: &Policy,
    count: usize,
) -> Vec<JoinHandle<(Result<Permit, AcquireError>, Duration)>> {
    let mut requests = Vec::new();
    for i in 0..count {
        let acquire = semaphore.acquire("x", policy);
        requests.push(tokio::spawn(async move {
            let began = Instant::now();
            let result = acquire.await;
            (result, began.elapsed())
        }));
        if i % 50 == 49 {
            yield_now().await;
        }
    }
    requests
}

#[tokio::test]
async fn twenty_thousand_requests_wait_for_a_local_share_and_timers_go_on() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let wait = policy(1, OnUnavailable::Local(1)).wait_timeout(120 * SECOND).max_queue(30_000);
    let wait = wait.build().unwrap();
    redis.kill();
    down(&semaphore).await;
    let held = semaphore.acquire("x", &wait).await.unwrap();
    let (shared, local) = (semaphore.clone(), wait);
    // In a runtime of its own, which may stand still.
    let began = Instant::now();
    let stall = apart(async move {
        let ticker = Ticker::start();
        let all = requests(&shared, &local, 20_000).await;
        let joined = ticker.stop().await;
        let ticker = Ticker::start();
        // Some attempts to connect fail meanwhile, and another request comes now and then.
        for _ in 0..20 {
            sleep(SECOND / 10).await;
            let refused = shared.try_acquire("x", &local).await;
            assert!(refused.is_err(), "{refused:?}");
        }
        let waited = ticker.stop().await;
        all.iter().for_each(JoinHandle::abort);
        (joined, waited)
    });
    let (joined, waited) = output(stall, 45 * SECOND, &semaphore).await;
    println!(
        "timers were late by {joined:?} at most as they came, and by {waited:?} as they waited"
    );
    println!("{:?} in all", began.elapsed());
    drop(held);
    assert!(joined < STALL && waited < STALL, "timers were late by {joined:?}, {waited:?}");
}

#[tokio::test]
async fn ten_thousand_queued_requests_have_their_answer_in_time_when_the_server_goes() {
    const WAIT: Duration = Duration::from_secs(8);
    let mut redis = TestRedis::start();
    let (semaphore, others) = (used(&redis).await, used(&redis).await);
    let refuse = policy(1, OnUnavailable::Refuse).wait_timeout(WAIT).max_queue(20_000);
    let refuse = refuse.build().unwrap();
    let held = others.acquire("x", &refuse).await.unwrap();
    let (shared, policy, began) = (semaphore.clone(), refuse, Instant::now());
    let (queue, mut is_queued) = oneshot::channel();
    let (kill, killed) = oneshot::channel();
    let answers = apart(async move {
        let all = requests(&shared, &policy, 10_000).await;
        let _ = queue.send(());
        let _ = killed.await;
        let ticker = Ticker::start();
        let answers = join_all(all).await;
        let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
        (answers, ticker.stop().await)
    });
    timeout(WAIT, &mut is_queued).await.expect("they come").unwrap();
    let queued = timeout(WAIT, async {
        while others.inspect("x").await.map_or(0, |seen| seen.waiting) < 10_000 {
            sleep(Duration::from_millis(50)).await;
        }
    });
    queued.await.expect("all wait");
    println!("all wait after {:?}", began.elapsed());
    redis.kill();
    let _ = kill.send(());
    let (answers, late) = output(answers, WAIT + 20 * SECOND, &semaphore).await;
    drop(held);
    let longest = answers.iter().map(|(_, took)| *took).max().unwrap();
    println!("the last after {longest:?}; timers were late by {late:?}");
    assert!(answers.iter().all(|(answer, _)| answer.is_err()), "the server was away to the end");
    assert!(longest < WAIT + 2 * STALL, "{longest:?}");
    assert!(late < STALL, "timers were late by {late:?}");
}
