//! Limits from a source that is slow, fails, or hangs: it is asked rarely, and never waited for long.

use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::time::{Instant, advance, sleep, timeout};
use tokio_test::{assert_pending, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::{
    CachedBuilder, CachedLimit, HeaderKey, OnUnknown, Refusal, RefusalReason, ResponseBody,
    WouldRefuse,
};
use tower_semaphore::{ConcurrencyLimitLayer, Limit, Name, Semaphore};

type Answer = Response<ResponseBody<Full<bytes::Bytes>>>;

#[derive(Clone, Copy)]
enum Mood {
    /// Answers with this after a while.
    Knows(u32),
    Fails,
    Hangs,
}

/// A source that takes 10 ms.
#[derive(Clone)]
struct Plans {
    mood: Arc<Mutex<Mood>>,
    calls: Arc<AtomicUsize>,
}

impl Plans {
    fn new(mood: Mood) -> Self {
        Self { mood: Arc::new(Mutex::new(mood)), calls: Arc::default() }
    }

    fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Fresh for 10 s, stale for another 20 s, and half a second for a call.
    fn limits(&self) -> CachedBuilder<Limit> {
        let plans = self.clone();
        CachedLimit::builder(move |_, _| {
            plans.calls.fetch_add(1, Ordering::Relaxed);
            let mood = *plans.mood.lock().unwrap();
            async move {
                sleep(Duration::from_millis(10)).await;
                match mood {
                    Mood::Knows(limit) => Ok(limit),
                    Mood::Fails => Err("the database is away"),
                    Mood::Hangs => pending().await,
                }
            }
        })
        .time_to_live(Duration::from_secs(10))
        .stale_for(Duration::from_secs(20))
    }
}

fn layer(semaphore: &Semaphore, limits: &CachedLimit) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::builder(semaphore, "tenant")
        .key(HeaderKey::from_static("x-tenant"))
        .limit_cached(limits)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap()
}

async fn ask(layer: &ConcurrencyLimitLayer, tenant: &str) -> Answer {
    let handler = service_fn(async |request: Request<()>| {
        let mut response = Response::new(Full::from("served"));
        response.extensions_mut().extend(request.extensions().clone());
        Ok::<_, Infallible>(response)
    });
    let request = Request::builder().header("x-tenant", tenant).body(()).unwrap();
    layer.layer(handler).oneshot(request).await.unwrap()
}

/// Returns the limit that requests get: the number that can be in flight.
async fn limit_in_force(layer: &ConcurrencyLimitLayer, tenant: &str) -> usize {
    let mut open = Vec::new();
    loop {
        let response = ask(layer, tenant).await;
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            return open.len();
        }
        assert_eq!(response.status(), StatusCode::OK);
        open.push(response);
    }
}

fn assert_unknown(response: &Answer) {
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key("retry-after"));
    let refusal: &Refusal = response.extensions().get().unwrap();
    assert_eq!(refusal.reason, RefusalReason::LimitUnknown);
    assert_eq!(refusal.reason.as_str(), "limit_unknown");
    let error = refusal.error.as_ref().unwrap().to_string();
    let expected =
        ["the look-up failed: the database is away", "the look-up had no answer within 0.5 s"];
    assert!(expected.contains(&&*error), "{error}");
}

#[tokio::test(start_paused = true)]
async fn many_requests_of_one_tenant_make_one_call() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Knows(20)));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    let answers = join_all((0..50).map(|_| ask(&layer, "a"))).await;
    let passed = answers.iter().filter(|answer| answer.status() == StatusCode::OK).count();
    assert_eq!((passed, plans.calls()), (20, 1));
    drop(answers);
    for _ in 0..50 {
        assert_eq!(ask(&layer, "a").await.status(), StatusCode::OK);
    }
    assert_eq!(plans.calls(), 1);
    ask(&layer, "b").await;
    assert_eq!(plans.calls(), 2, "another tenant, another call");

    // The plan changes, which is noticed when the old one is stale.
    plans.set(Mood::Knows(3));
    assert_eq!(limit_in_force(&layer, "a").await, 20);
    advance(Duration::from_secs(10)).await;
    assert_eq!(limit_in_force(&layer, "a").await, 3);
    assert_eq!(plans.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn while_the_source_fails_what_was_known_is_used_and_then_no_more() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Knows(2)));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    assert_eq!(limit_in_force(&layer, "a").await, 2);
    plans.set(Mood::Fails);
    advance(Duration::from_secs(10)).await;
    let began = Instant::now();
    let before = plans.calls();
    while began.elapsed() < Duration::from_millis(19_500) {
        assert_eq!(limit_in_force(&layer, "a").await, 2);
        advance(Duration::from_millis(100)).await;
    }
    // Once a second, not for each request.
    let calls = plans.calls() - before;
    assert!((15..=20).contains(&calls), "{calls}");

    advance(Duration::from_secs(1)).await;
    assert_unknown(&ask(&layer, "a").await);
    let calls = plans.calls();
    for _ in 0..10 {
        assert_unknown(&ask(&layer, "a").await);
    }
    assert_eq!(plans.calls(), calls, "it is left alone for a second");

    plans.set(Mood::Knows(5));
    advance(Duration::from_secs(1)).await;
    assert_eq!(limit_in_force(&layer, "a").await, 5);
}

#[tokio::test(start_paused = true)]
async fn a_limit_can_be_assumed_where_none_is_known() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Fails));
    let limits = plans.limits().on_failure(OnUnknown::Assume(Limit::Permits(1)));
    let layer = layer(&semaphore, &limits.build().unwrap());
    assert_eq!(limit_in_force(&layer, "a").await, 1);
    plans.set(Mood::Knows(4));
    assert_eq!(limit_in_force(&layer, "a").await, 1);
    advance(Duration::from_secs(1)).await;
    assert_eq!(limit_in_force(&layer, "a").await, 4);
}

#[tokio::test(start_paused = true)]
async fn a_source_that_hangs_costs_one_request_its_timeout_and_the_others_nothing() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Hangs));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    // Without a known plan, all requests wait for the one call, and no longer.
    let began = Instant::now();
    for answer in join_all((0..20).map(|_| ask(&layer, "a"))).await {
        assert_unknown(&answer);
    }
    assert_eq!((began.elapsed().as_millis(), plans.calls()), (500, 1));

    // With a known plan, only the request that makes the call waits; the others use that plan.
    plans.set(Mood::Knows(100));
    advance(Duration::from_secs(1)).await;
    assert_eq!(ask(&layer, "a").await.status(), StatusCode::OK);
    plans.set(Mood::Hangs);
    advance(Duration::from_secs(10)).await;
    let waits = join_all((0..20).map(async |_| {
        let began = Instant::now();
        assert_eq!(ask(&layer, "a").await.status(), StatusCode::OK);
        began.elapsed().as_millis()
    }))
    .await;
    assert_eq!(waits.iter().filter(|wait| **wait == 0).count(), 19, "{waits:?}");
    assert_eq!(waits.iter().sum::<u128>(), 500);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_put_aside_delays_no_other() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Knows(5)));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    // One that made the call, and one that waits for it. Neither is polled again.
    let mut aside = [task::spawn(ask(&layer, "a")), task::spawn(ask(&layer, "a"))];
    aside.iter_mut().for_each(|request| assert_pending!(request.poll()));
    let answer = timeout(Duration::from_millis(20), ask(&layer, "a")).await;
    assert_eq!(answer.expect("an answer as soon as the source has one").status(), StatusCode::OK);
    assert_eq!(plans.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_put_aside_prolongs_no_timeout() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Hangs));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    let mut aside = task::spawn(ask(&layer, "a"));
    assert_pending!(aside.poll());
    advance(Duration::from_millis(100)).await;
    let answer = timeout(Duration::from_millis(401), ask(&layer, "a")).await;
    assert_unknown(&answer.expect("an answer within the timeout of the call"));

    // It is asked again, and the failure of the old call changes nothing.
    plans.set(Mood::Knows(2));
    advance(Duration::from_secs(1)).await;
    assert_eq!(limit_in_force(&layer, "a").await, 2);
    assert_eq!(aside.await.status(), StatusCode::OK);
    advance(Duration::from_secs(10)).await;
    plans.set(Mood::Knows(3));
    assert_eq!((limit_in_force(&layer, "a").await, plans.calls()), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_not_polled_is_driven_by_another_request_and_replaced_when_it_is_old() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Knows(1)));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    assert_eq!(limit_in_force(&layer, "a").await, 1);
    // With a known plan, the others use that until the timeout of the call.
    advance(Duration::from_secs(10)).await;
    plans.set(Mood::Knows(2));
    let mut aside = task::spawn(ask(&layer, "a"));
    assert_pending!(aside.poll());
    plans.set(Mood::Knows(3));
    advance(Duration::from_millis(499)).await;
    assert_eq!((limit_in_force(&layer, "a").await, plans.calls()), (1, 2));
    advance(Duration::from_millis(1)).await;
    assert_eq!((limit_in_force(&layer, "a").await, plans.calls()), (2, 2));
    assert_eq!(aside.await.status(), StatusCode::OK);

    advance(Duration::from_secs(10)).await;
    let mut aside = task::spawn(ask(&layer, "a"));
    assert_pending!(aside.poll());
    plans.set(Mood::Knows(4));
    advance(Duration::from_millis(1500)).await;
    assert_eq!((limit_in_force(&layer, "a").await, plans.calls()), (4, 4));
    // The answer of the old call is for this request alone.
    assert_eq!(aside.await.status(), StatusCode::OK);
    assert_eq!((limit_in_force(&layer, "a").await, plans.calls()), (4, 4));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_comes_with_the_timeout_of_a_call_does_not_undo_its_failure() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Hangs));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    let mut first = task::spawn(ask(&layer, "a"));
    assert_pending!(first.poll());
    advance(Duration::from_millis(500)).await;
    let mut last = task::spawn(ask(&layer, "a"));
    assert_pending!(last.poll());
    assert_unknown(&first.await);
    assert_unknown(&timeout(Duration::from_millis(1), ask(&layer, "a")).await.expect("a pause"));
    assert_unknown(&last.await);
    assert_eq!(plans.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_call_ends_with_the_last_request_that_waits_for_it() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Knows(1)));
    let layer = layer(&semaphore, &plans.limits().build().unwrap());
    let mut leaves = task::spawn(ask(&layer, "a"));
    let mut stays = task::spawn(ask(&layer, "a"));
    assert_pending!(leaves.poll());
    assert_pending!(stays.poll());
    drop(leaves);
    assert_eq!(stays.await.status(), StatusCode::OK);
    assert_eq!(plans.calls(), 1);

    plans.set(Mood::Hangs);
    let mut all_leave = [task::spawn(ask(&layer, "b")), task::spawn(ask(&layer, "b"))];
    all_leave.iter_mut().for_each(|request| assert_pending!(request.poll()));
    drop(all_leave);
    plans.set(Mood::Knows(1));
    assert_eq!(ask(&layer, "b").await.status(), StatusCode::OK);
    assert_eq!(plans.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_source_that_panics_costs_one_request() {
    let (semaphore, calls) = (Semaphore::in_memory(), Arc::new(AtomicUsize::new(0)));
    let limits = CachedLimit::builder(move |_, _| {
        let call = calls.fetch_add(1, Ordering::Relaxed);
        async move {
            sleep(Duration::from_millis(10)).await;
            assert_ne!(call, 0, "the first call");
            Ok::<_, std::io::Error>(9)
        }
    });
    let layer = layer(&semaphore, &limits.build().unwrap());
    let asks = (0..3).map(|_| std::panic::AssertUnwindSafe(ask(&layer, "a")).catch_unwind());
    let (answers, panics): (Vec<_>, Vec<_>) =
        join_all(asks).await.into_iter().partition(Result::is_ok);
    assert_eq!((answers.len(), panics.len()), (2, 1));
    assert!(answers.into_iter().all(|answer| answer.unwrap().status() == StatusCode::OK));
    let payload = panics.into_iter().next().unwrap().unwrap_err();
    assert!(payload.downcast::<String>().unwrap().contains("the first call"));
}

#[tokio::test(start_paused = true)]
async fn what_is_remembered_is_bounded() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Knows(1)));
    let hour = Duration::from_secs(3600);
    let limits = plans.limits().capacity(100).time_to_live(hour).build().unwrap();
    let layer = layer(&semaphore, &limits);
    for round in 0..2 {
        for tenant in 0..20 {
            ask(&layer, &format!("regular-{tenant}")).await;
        }
        assert_eq!(limits.len(), 20, "round {round}");
    }
    assert_eq!(plans.calls(), 20);
    for tenant in 0..2000 {
        ask(&layer, &format!("made-up-{tenant}")).await;
        assert!(limits.len() <= 100, "{}", limits.len());
    }
    // Keys that came again were not evicted by keys that came once.
    let calls = plans.calls();
    for tenant in 0..20 {
        ask(&layer, &format!("regular-{tenant}")).await;
    }
    let again = plans.calls() - calls;
    assert!(again <= 5, "{again} of 20 were forgotten");
}

#[tokio::test(start_paused = true)]
async fn a_limit_can_be_forgotten() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Knows(1)));
    let limits = plans.limits().build().unwrap();
    let layer = layer(&semaphore, &limits);
    assert_eq!(limit_in_force(&layer, "a/b").await, 1);
    plans.set(Mood::Knows(2));
    assert_eq!(limit_in_force(&layer, "a/b").await, 1);
    limits.forget(&Name::new("a/b"));
    assert!(limits.is_empty());
    assert_eq!(limit_in_force(&layer, "a/b").await, 2);
}

#[tokio::test(start_paused = true)]
async fn in_shadow_an_unknown_limit_lets_pass() {
    let (semaphore, plans) = (Semaphore::in_memory(), Plans::new(Mood::Fails));
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
        .limit_cached(&plans.limits().build().unwrap())
        .shadow(true)
        .build()
        .unwrap();
    let response = ask(&layer, "a").await;
    assert_eq!(response.status(), StatusCode::OK);
    let would: &WouldRefuse = response.extensions().get().unwrap();
    assert_eq!(would.refusal().reason, RefusalReason::LimitUnknown);
    assert_eq!(layer.shadow_counts().unwrap().limit_unknown, 1);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn of_two_processes_that_differ_each_goes_by_its_own_limit() {
    let redis = crate::support::redis::TestRedis::start();
    let processes = [redis.semaphore(), redis.semaphore()];
    let plan = Arc::new(std::sync::atomic::AtomicU32::new(1));
    let layers = processes.each_ref().map(|process| {
        let plan = Arc::clone(&plan);
        let limits = CachedLimit::builder(move |_, _| {
            let plan = plan.load(Ordering::Relaxed);
            async move { Ok::<_, std::io::Error>(plan) }
        });
        layer(process, &limits.build().unwrap())
    });
    let first = ask(&layers[0], "a").await;
    // The other request asks later, and gets the new plan.
    plan.store(3, Ordering::Relaxed);
    let more = [ask(&layers[1], "a").await, ask(&layers[1], "a").await];
    assert!(more.iter().all(|response| response.status() == StatusCode::OK));
    assert_eq!(ask(&layers[1], "a").await.status(), StatusCode::TOO_MANY_REQUESTS);
    drop((first, more));
    crate::support::semaphore::empty(&redis).await;
}

#[test]
fn what_cannot_be_is_told_when_it_is_built() {
    let limits = || Plans::new(Mood::Fails).limits();
    let week = Duration::from_secs(7 * 24 * 3600);
    let wrong = [
        (limits().capacity(0), "capacity is 0 keys; expected 1 to 10000000"),
        (limits().time_to_live(Duration::ZERO), "time to live is 0ns; expected "),
        (limits().time_to_live(week * 2), "time to live is 1209600s; expected "),
        (limits().stale_for(week * 2), "stale for is 1209600s; expected 0 to 604800s"),
        (limits().timeout(Duration::ZERO), "timeout is 0ns; expected "),
        (limits().timeout(week), "timeout is 604800s; expected "),
    ];
    for (builder, words) in wrong {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
    assert!(limits().time_to_live(week).stale_for(Duration::ZERO).build().is_ok());
}
