//! Requests that start by time, beside the limit of those in flight.
//!
//! Each test in `on_each!` runs on each backend, with the semaphores of several processes.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, Refusal, RefusalReason};
use tower_semaphore::operate::RateUse;
use tower_semaphore::{
    AcquireError, Ask, ConcurrencyLimitLayer, Limit, Policy, PolicyBuilder, RejectReason, Semaphore,
};

use crate::support::semaphore::{rejection, waiting};
use crate::support::{eventually, on_each};

const SECOND: Duration = Duration::from_secs(1);

on_each! {
    no_window_has_more_starts_than_the_rate
    who_waits_for_the_window_is_served_in_order_when_it_opens
    a_rejection_says_when_the_next_can_start
    without_a_limit_only_the_rate_counts
    a_smooth_rate_is_spread_over_its_window
    tenants_share_the_starts
    a_cost_counts_as_many_starts
    requests_with_and_without_a_rate_or_a_cost_are_granted_in_the_order_of_their_arrival
    who_waits_adopts_a_rate_that_a_reload_adds
    a_rejection_says_when_the_next_can_start_though_a_tenant_waits_for_its_cap
    each_of_two_rejected_together_is_told_its_own_opening
    a_request_that_is_rejected_makes_no_room_for_a_larger_one
    a_short_window_that_was_set_does_not_forget_a_long_one
    an_inspection_tells_how_much_of_the_rate_is_used
    an_inspection_of_the_fleet_tells_a_smooth_rate_as_the_policy_has_it
    a_rate_is_told_when_its_last_request_is_long_over
    an_operator_sets_a_rate_in_the_whole_fleet
    a_rate_that_replaces_none_is_not_told_to_be_in_force
}

fn patient(limit: impl Into<Limit>) -> PolicyBuilder {
    Policy::builder(limit).wait_timeout(Duration::from_secs(20))
}

async fn no_window_has_more_starts_than_the_rate(node: &dyn Fn() -> Semaphore) {
    let (starts, window) = (20, Duration::from_millis(200));
    let policy = patient(15).rate(starts, window).build().unwrap();
    let began = Instant::now();
    let end = began + 10 * window;
    let mut processes: Vec<JoinSet<Vec<(Instant, Instant)>>> = Vec::new();
    for _ in 0..3 {
        let (semaphore, mut tasks) = (node(), JoinSet::new());
        for _ in 0..16 {
            let (semaphore, policy) = (semaphore.clone(), policy.clone());
            tasks.spawn(async move {
                let mut grants = Vec::new();
                while Instant::now() < end {
                    let sent = Instant::now();
                    let permit = semaphore.acquire("x", &policy).await.unwrap();
                    grants.push((sent, Instant::now()));
                    drop(permit);
                }
                grants
            });
        }
        processes.push(tasks);
    }
    // What it held and where it waited ends with its leases; what it started counts.
    drop(processes.pop());
    let mut grants = Vec::new();
    for mut tasks in processes {
        while let Some(of_task) = tasks.join_next().await {
            grants.extend(of_task.unwrap());
        }
    }
    // A grant was made between the two moments. Those that were certainly made in one window are counted.
    for (from, _) in &grants {
        let to = *from + window;
        let certain = grants.iter().filter(|(sent, came)| sent >= from && *came < to).count();
        assert!(certain <= starts as usize, "{certain} in one window");
    }
    let (took, most) = (began.elapsed().as_secs_f64(), f64::from(starts));
    let possible = most * (took / window.as_secs_f64()).ceil();
    let count = grants.len();
    assert!(count as f64 <= possible, "{count} in {took} s");
    assert!(count as f64 >= possible * 0.7, "only {count} of {possible} in {took} s");
}

async fn who_waits_for_the_window_is_served_in_order_when_it_opens(node: &dyn Fn() -> Semaphore) {
    let nodes = [node(), node()];
    let policy = patient(100).rate(2, SECOND).build().unwrap();
    for _ in 0..2 {
        drop(nodes[0].acquire("x", &policy).await.unwrap());
    }
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for i in 0..4_u8 {
        let acquire = nodes[usize::from(i % 2)].acquire("x", &policy);
        tasks.spawn(async move {
            let permit = acquire.await.unwrap();
            (i, Instant::now(), permit)
        });
        waiting(&nodes[0], "x", u64::from(i) + 1).await;
    }
    let mut order = Vec::new();
    while let Some(done) = tasks.join_next().await {
        let (i, at, permit) = done.unwrap();
        order.push((i, at.duration_since(began)));
        drop(permit);
    }
    let mut of_window: Vec<_> = order.iter().map(|(i, _)| *i).collect();
    // Two of one window can come in either order.
    of_window[..2].sort_unstable();
    of_window[2..].sort_unstable();
    assert_eq!(of_window, [0, 1, 2, 3]);
    assert!(order[1].1 < SECOND + SECOND / 2, "{order:?}");
    assert!(order[2].1 > SECOND + SECOND / 2, "{order:?}");
}

async fn a_rejection_says_when_the_next_can_start(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let policy = Policy::builder(5).rate(1, 30 * SECOND).build().unwrap();
    drop(own.try_acquire("x", &policy).await.unwrap());
    let rejected = rejection(other.try_acquire("x", &policy).await);
    assert_eq!(rejected.reason, RejectReason::Rate);
    assert_eq!(rejected.rate(), policy.rate());
    let left = rejected.ends_in.unwrap();
    assert!(left > 25 * SECOND && left <= 30 * SECOND, "{left:?}");
    let text = AcquireError::Rejected(rejected).to_string();
    let said = "as many requests have started lately as the rate allows, 1/30s; the next can in ";
    assert!(text.starts_with(said), "{text}");
    // Another name has a window of its own.
    drop(other.try_acquire("y", &policy).await.unwrap());
}

async fn without_a_limit_only_the_rate_counts(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let policy = Policy::builder(Limit::Unlimited).rate(3, 30 * SECOND).build().unwrap();
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(semaphore.try_acquire("x", &policy).await.unwrap());
    }
    let rejected = rejection(semaphore.try_acquire("x", &policy).await);
    assert_eq!((rejected.reason, rejected.limit), (RejectReason::Rate, u32::MAX));
    drop(permits);
    assert_eq!(rejection(semaphore.try_acquire("x", &policy).await).reason, RejectReason::Rate);
}

async fn a_smooth_rate_is_spread_over_its_window(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let policy = patient(5).rate(10, SECOND).smooth().build().unwrap();
    let began = Instant::now();
    for _ in 0..4 {
        drop(semaphore.acquire("x", &policy).await.unwrap());
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(295) && took < SECOND, "{took:?}");
}

async fn tenants_share_the_starts(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let policy = patient(50).rate(1, Duration::from_millis(300)).build().unwrap();
    let mut busy = JoinSet::new();
    for i in 0..5 {
        busy.spawn(own.acquire(Ask::of("x").by("busy"), &policy));
        waiting(&other, "x", i).await;
    }
    let began = Instant::now();
    let late = other.acquire(Ask::of("x").by("late"), &policy);
    drop(timeout(2 * SECOND, late).await.unwrap().unwrap());
    // Its turn is at most the next but one, and not behind all four.
    assert!(began.elapsed() < Duration::from_millis(1000), "{:?}", began.elapsed());
}

async fn a_cost_counts_as_many_starts(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let policy = Policy::builder(50).rate(3, 30 * SECOND).build().unwrap();
    let two = Ask::of("x").by("a").cost(2);
    drop(semaphore.try_acquire(two.clone(), &policy).await.unwrap());
    assert_eq!(rejection(semaphore.try_acquire(two, &policy).await).reason, RejectReason::Rate);
    drop(semaphore.try_acquire(Ask::of("x").by("b"), &policy).await.unwrap());
    let four = Ask::of("x").by("a").cost(4);
    let rejected = rejection(semaphore.try_acquire(four, &policy).await);
    assert_eq!(rejected.reason, RejectReason::CostTooHigh);
    let text = AcquireError::Rejected(rejected).to_string();
    assert!(text.ends_with("within the limit of 50 and the rate of 3/30s"), "{text}");
    let unlimited = Policy::builder(Limit::Unlimited).rate(3, 30 * SECOND).build().unwrap();
    let rejected = rejection(semaphore.try_acquire(Ask::of("y").cost(4), &unlimited).await);
    let text = AcquireError::Rejected(rejected).to_string();
    assert!(text.ends_with("expected 1 to 64, within the rate of 3/30s"), "{text}");
}

/// As in a rolling deploy that adds a rate, or a cost.
async fn requests_with_and_without_a_rate_or_a_cost_are_granted_in_the_order_of_their_arrival(
    node: &dyn Fn() -> Semaphore,
) {
    let (own, other) = (node(), node());
    let plain = patient(2).build().unwrap();
    let rated = patient(2).rate(600, 60 * SECOND).build().unwrap();
    let held = [own.acquire("x", &plain).await.unwrap(), other.acquire("x", &rated).await.unwrap()];
    // No two neighbours fit at once.
    let asks = [
        (&own, Ask::of("x").cost(2), &plain),
        (&other, Ask::of("x"), &plain),
        (&own, Ask::of("x").cost(2), &rated),
        (&other, Ask::of("x"), &rated),
        (&other, Ask::of("x").cost(2), &plain),
        (&own, Ask::of("x"), &rated),
        (&own, Ask::of("x").cost(2), &rated),
        (&own, Ask::of("x"), &plain),
    ];
    let (granted, mut order) = mpsc::unbounded_channel();
    let mut waits = JoinSet::new();
    for (i, (semaphore, ask, policy)) in asks.into_iter().enumerate() {
        let (acquire, granted) = (semaphore.acquire(ask, policy), granted.clone());
        waits.spawn(async move { granted.send((i, acquire.await.unwrap())) });
        waiting(&own, "x", i as u64 + 1).await;
    }
    drop(held);
    for expected in 0..8 {
        let (i, permit) = order.recv().await.unwrap();
        assert_eq!(i, expected);
        drop(permit);
    }
}

async fn who_waits_adopts_a_rate_that_a_reload_adds(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let before = patient(1).build().unwrap();
    let after = patient(1).rate(1, 60 * SECOND).build().unwrap();
    let held = semaphore.acquire("x", &before).await.unwrap();
    let mut waits = JoinSet::new();
    for i in 0..3 {
        waits.spawn(semaphore.acquire("x", &before));
        waiting(&semaphore, "x", i + 1).await;
    }
    semaphore.update_waiting("x", &after);
    eventually("all three return with a rate", async || {
        let seen = semaphore.inspect("x").await.unwrap();
        let rated = seen.waiters.iter().filter(|place| place.id.to_string().contains('/'));
        seen.waiting == 3 && rated.count() == 3
    })
    .await;
    drop(held);
    drop(waits.join_next().await);
    eventually("its permit is free", async || semaphore.inspect("x").await.unwrap().in_use == 0)
        .await;
    waiting(&semaphore, "x", 2).await;
    assert!(rate_of(&semaphore).await.unwrap().opens_in.is_some());
}

async fn a_rejection_says_when_the_next_can_start_though_a_tenant_waits_for_its_cap(
    node: &dyn Fn() -> Semaphore,
) {
    let semaphore = node();
    let policy = Policy::builder(10).rate(2, 60 * SECOND).build().unwrap();
    let capped = || Ask::of("x").by("capped").each(1);
    let _held = semaphore.acquire(capped(), &policy).await.unwrap();
    let long = patient(10).rate(2, 60 * SECOND).build().unwrap();
    let _waits = tokio::spawn(semaphore.acquire(capped(), &long));
    waiting(&semaphore, "x", 1).await;
    drop(semaphore.try_acquire(Ask::of("x").by("other"), &policy).await.unwrap());
    let rejected = rejection(semaphore.try_acquire(Ask::of("x").by("other"), &policy).await);
    assert_eq!(rejected.reason, RejectReason::Rate);
    assert!(rejected.ends_in.is_some_and(|left| left > 50 * SECOND), "{rejected:?}");
}

async fn each_of_two_rejected_together_is_told_its_own_opening(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let policy = Policy::builder(50).rate(60, 60 * SECOND).smooth().build().unwrap();
    drop(semaphore.try_acquire("x", &policy).await.unwrap());
    let (large, small) = tokio::join!(
        semaphore.try_acquire(Ask::of("x").cost(30), &policy),
        semaphore.try_acquire("x", &policy),
    );
    let (large, small) = (rejection(large), rejection(small));
    assert_eq!((large.reason, small.reason), (RejectReason::Rate, RejectReason::Rate));
    assert!(small.ends_in.is_some_and(|left| left <= SECOND), "{small:?}");
    assert!(large.ends_in.is_some_and(|left| left > 20 * SECOND), "{large:?}");
}

async fn a_request_that_is_rejected_makes_no_room_for_a_larger_one(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    // One may start each second, and ten at once each ten seconds.
    let policy = Policy::builder(10).rate(60, 60 * SECOND).smooth().build().unwrap();
    let large = || semaphore.try_acquire(Ask::of("x").by("a").cost(10), &policy);
    let held = large().await.unwrap();
    eventually("a small one could start", async || {
        rate_of(&semaphore).await.unwrap().opens_in.is_none()
    })
    .await;
    let small = semaphore.try_acquire(Ask::of("x").by("b"), &policy).await;
    assert_eq!(rejection(small).reason, RejectReason::Limit);
    drop(held);
    // Twenty starts within two seconds.
    assert_eq!(rejection(large().await).reason, RejectReason::Rate);
}

async fn a_short_window_that_was_set_does_not_forget_a_long_one(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let policy = patient(50).rate(2, 60 * SECOND).build().unwrap();
    for _ in 0..2 {
        drop(semaphore.try_acquire("x", &policy).await.unwrap());
    }
    semaphore.set_rate("x", 1, Duration::from_millis(20)).await.unwrap();
    for _ in 0..3 {
        drop(semaphore.acquire("x", &policy).await.unwrap());
    }
    semaphore.clear_rate("x").await.unwrap();
    let after = semaphore.try_acquire("x", &policy).await;
    assert_eq!(rejection(after).reason, RejectReason::Rate);
    assert_eq!(rate_of(&semaphore).await.unwrap().started, 5);
}

async fn an_operator_sets_a_rate_in_the_whole_fleet(node: &dyn Fn() -> Semaphore) {
    let (own, other, operator) = (node(), node(), node());
    let policy = patient(50).rate(1, 30 * SECOND).build().unwrap();
    let rate_of = |starts| Policy::builder(1).rate(starts, 30 * SECOND).build().unwrap().rate();
    drop(own.acquire("x", &policy).await.unwrap());
    let waits = tokio::spawn(other.acquire("x", &policy));
    waiting(&operator, "x", 1).await;
    operator.set_rate("x", 2, 30 * SECOND).await.unwrap();
    drop(timeout(5 * SECOND, waits).await.unwrap().unwrap().unwrap());
    assert_eq!(operator.limit_of("x").await.unwrap().rate, rate_of(2));
    let set = operator.overrides().await.unwrap();
    assert_eq!(
        set.iter().map(|(name, set)| (name.as_str(), set.rate)).collect::<Vec<_>>(),
        [("x", rate_of(2))]
    );
    let now = Policy::builder(50).rate(1, 30 * SECOND).build().unwrap();
    assert_eq!(rejection(own.try_acquire("x", &now).await).rate(), rate_of(2));
    // Beside it, the limit and the mode stay as they are set.
    operator.set_limit("x", 7).await.unwrap();
    operator.pause("x").await.unwrap();
    operator.resume("x").await.unwrap();
    let set = operator.limit_of("x").await.unwrap();
    assert_eq!((set.limit, set.rate), (Some(7), rate_of(2)));
    operator.clear_rate("x").await.unwrap();
    let set = operator.limit_of("x").await.unwrap();
    assert_eq!((set.limit, set.rate), (Some(7), None));
    own.overrides().await.unwrap();
    assert_eq!(rejection(own.try_acquire("x", &now).await).rate(), rate_of(1));
}

async fn rate_of(semaphore: &Semaphore) -> Option<RateUse> {
    semaphore.inspect("x").await.unwrap().rate
}

async fn an_inspection_tells_how_much_of_the_rate_is_used(node: &dyn Fn() -> Semaphore) {
    let (own, operator) = (node(), node());
    let policy = Policy::builder(10).rate(3, 30 * SECOND).build().unwrap();
    assert_eq!(rate_of(&own).await, None, "nothing is known");
    let held = own.acquire("x", &policy).await.unwrap();
    drop(own.acquire("x", &policy).await.unwrap());
    // The operator's process knows no policy: the rate is that of the place.
    for semaphore in [&own, &operator] {
        let used = rate_of(semaphore).await.unwrap();
        assert_eq!((Some(used.rate), used.started), (policy.rate(), 2));
        assert_eq!(used.opens_in, None);
    }
    drop(own.acquire("x", &policy).await.unwrap());
    drop(held);
    eventually("nothing is in use", async || operator.inspect("x").await.unwrap().in_use == 0)
        .await;
    let used = rate_of(&own).await.unwrap();
    assert_eq!((Some(used.rate), used.started), (policy.rate(), 3));
    let opens_in = used.opens_in.unwrap();
    assert!((10 * SECOND..=30 * SECOND).contains(&opens_in), "{opens_in:?}");
    assert_eq!(rate_of(&operator).await, None, "no place is left");

    operator.set_rate("x", 4, 30 * SECOND).await.unwrap();
    let used = rate_of(&operator).await.unwrap();
    assert_eq!((used.rate.starts(), used.started, used.opens_in), (4, 3, None));
    operator.set_rate("x", 2, 20 * SECOND).await.unwrap();
    let used = rate_of(&operator).await.unwrap();
    assert_eq!((used.rate.starts(), used.started), (2, 3), "more than are allowed now");
    assert!(used.opens_in.unwrap() <= 20 * SECOND, "{used:?}");
    operator.set_rate("x", 5000, 30 * SECOND).await.unwrap();
    let used = rate_of(&operator).await.unwrap();
    assert_eq!((used.rate.starts(), used.rate.is_smooth()), (5000, true));
}

async fn an_inspection_of_the_fleet_tells_a_smooth_rate_as_the_policy_has_it(
    node: &dyn Fn() -> Semaphore,
) {
    let (own, operator) = (node(), node());
    let policy = Policy::builder(10).rate(6, 120 * SECOND).smooth().build().unwrap();
    let _held = own.acquire("x", &policy).await.unwrap();
    let part = rate_of(&operator).await.unwrap();
    assert_eq!((part.rate.starts(), part.rate.window()), (1, 20 * SECOND));
    // On a busy machine the answer may come too late.
    eventually("it tells", async || {
        let used = operator.inspect_fleet("x").await.unwrap().rate.unwrap();
        assert_eq!(used.started, 1);
        assert!(used.opens_in.is_some_and(|left| left <= 20 * SECOND), "{used:?}");
        Some(used.rate) == policy.rate()
    })
    .await;
}

async fn a_rate_is_told_when_its_last_request_is_long_over(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let policy = Policy::builder(10).rate(3, 60 * SECOND).build().unwrap();
    drop(semaphore.acquire("x", &policy).await.unwrap());
    eventually("its record is gone", async || semaphore.health().semaphores == 0).await;
    let used = rate_of(&semaphore).await.unwrap();
    assert_eq!((Some(used.rate), used.started), (policy.rate(), 1));
}

async fn a_rate_that_replaces_none_is_not_told_to_be_in_force(node: &dyn Fn() -> Semaphore) {
    let (own, operator) = (node(), node());
    let policy = Policy::builder(9).build().unwrap();
    let held = own.acquire("x", &policy).await.unwrap();
    let error = own.set_rate("x", 7, 60 * SECOND).await.unwrap_err().to_string();
    assert!(
        error.ends_with("so nothing would be judged by 7/60s; set a rate in the policy first"),
        "{error}"
    );
    assert_eq!(own.limit_of("x").await.unwrap().rate, None);
    // This one does not know the policy.
    operator.set_rate("x", 7, 60 * SECOND).await.unwrap();
    let set = own.limit_of("x").await.unwrap().rate;
    assert_eq!(set.map(|set| set.starts()), Some(7));
    let seen = own.inspect("x").await.unwrap();
    assert_eq!((seen.rate, seen.set.rate), (None, set));
    assert_eq!(rate_of(&operator).await.map(|used| used.rate), set, "it may replace one");
    // On a busy machine the answer may come too late.
    eventually("the fleet is known to have none", async || {
        operator.inspect_fleet("x").await.unwrap().rate.is_none()
    })
    .await;
    drop(held);
    eventually("its record is gone", async || own.health().semaphores == 0).await;
    assert_eq!(rate_of(&own).await, None, "the last policy had none");
    // Another policy may come.
    own.set_rate("x", 8, 60 * SECOND).await.unwrap();
    let rated = Policy::builder(9).rate(2, 60 * SECOND).build().unwrap();
    let _held = own.acquire("x", &rated).await.unwrap();
    assert_eq!(rate_of(&own).await.map(|used| used.rate.starts()), Some(8));
}

#[tokio::test]
async fn a_rate_that_cannot_be_meant_is_not_set() {
    let semaphore = Semaphore::in_memory();
    let minute = 60 * SECOND;
    for (starts, window, said) in [
        (0, minute, "rate is 0, which rejects every request; expected 1 or more, or no rate"),
        (1, Duration::ZERO, "window of the rate is 0ns; expected 1ms to 86400s"),
        (9000, 10 * SECOND / 1000, "rate is 9000 in 10ms; expected at most 4000 in 10 ms"),
    ] {
        let error = semaphore.set_rate("x", starts, window).await.unwrap_err().to_string();
        assert!(error.ends_with(said), "{error}");
    }
    semaphore.set_rate("x", 60_000, minute).await.unwrap();
    let set = semaphore.limit_of("x").await.unwrap().rate.unwrap();
    assert_eq!((set.starts(), set.window()), (60_000, minute));
}

#[tokio::test]
async fn a_layer_tells_both_of_its_policies() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "api")
        .limit(10)
        .rate(1, 60 * SECOND)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let inner =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let service = ServiceBuilder::new().layer(layer).service(inner);
    let answered = service.clone().oneshot(Request::new(())).await.unwrap();
    assert_eq!(answered.status(), StatusCode::OK);
    let refused = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let header = |name: &str| refused.headers()[name].to_str().unwrap().to_owned();
    let both = "\"api\";q=10;qu=\"concurrent-requests\", \"api/rate\";q=1;w=60";
    assert_eq!(header("ratelimit-policy"), both);
    assert_eq!(header("ratelimit"), "\"api/rate\";r=0;t=60");
    let after: u64 = header(RETRY_AFTER.as_str()).parse().unwrap();
    assert!((60..=61).contains(&after), "{after}");
    let reason = refused.extensions().get::<Refusal>().unwrap().reason;
    assert_eq!((reason, reason.as_str()), (RefusalReason::Rate, "rate"));
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["violated-policies"][0], "api/rate");
    assert_eq!(problem["title"], "Too many requests have started lately");
}

#[test]
fn a_rate_that_cannot_be_meant_is_an_error() {
    let error = |policy: PolicyBuilder| policy.build().unwrap_err().to_string();
    let reused = error(Policy::builder(5).rate(600, 60 * SECOND).reuse(true));
    assert!(reused.starts_with("reuse is set beside a rate of 600/60s"), "{reused}");
    let smooth = error(Policy::builder(5).smooth());
    assert_eq!(smooth, "smooth is set without a rate to spread; set rate, too");
    let many = error(Policy::builder(5).rate(4001, SECOND));
    assert!(many.ends_with("expected at most 4000 in a window; or a smooth one"), "{many}");
    assert!(Policy::builder(5).rate(4001, SECOND).smooth().build().is_ok());
}

#[tokio::test]
async fn a_loss_of_data_empties_the_window() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let policy = Policy::builder(5).rate(1, 60 * SECOND).build().unwrap();
    drop(semaphore.try_acquire("x", &policy).await.unwrap());
    assert_eq!(rejection(semaphore.try_acquire("x", &policy).await).reason, RejectReason::Rate);
    backend.forget_all();
    drop(semaphore.try_acquire("x", &policy).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_window_outlives_the_semaphore_that_filled_it() {
    let backend = MemoryBackend::new();
    let policy = Policy::builder(5).rate(1, 60 * SECOND).build().unwrap();
    drop(Semaphore::new(backend.clone()).try_acquire("x", &policy).await.unwrap());
    let other = Semaphore::new(backend.clone());
    assert_eq!(rejection(other.try_acquire("x", &policy).await).reason, RejectReason::Rate);
    tokio::time::advance(60 * SECOND).await;
    drop(other.try_acquire("x", &policy).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_the_rate_in_vain_is_told_that_it_was_the_rate() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(50).rate(1, 60 * SECOND).wait_timeout(SECOND).build().unwrap();
    drop(semaphore.acquire("x", &policy).await.unwrap());
    let text = semaphore.acquire("x", &policy).await.unwrap_err().to_string();
    let expected = "the rate, 1/60s, allowed no start within 1.0 s; the next can in 59.0 s";
    assert_eq!(text, expected);

    let builder = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(50);
    let layer = builder.rate(1, 60 * SECOND).wait_timeout(SECOND).build().unwrap();
    let service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    let response = service.oneshot(Request::new(())).await.unwrap();
    let text = response.extensions().get::<Refusal>().unwrap().to_string();
    let expected = "the rate of x, 1/60s, allowed no start within 1.0 s; the next can in 58.0 s";
    assert_eq!(text, expected);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["detail"], "the rate of x allowed no start within 1.0 s");
}

/// What a layer tells one more request, where 600 wait of which ten can start a second.
async fn beyond_the_queue(
    policy: PolicyBuilder,
    set: impl FnOnce(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder,
) -> (Refusal, Duration) {
    let semaphore = Semaphore::in_memory();
    let policy = policy.max_queue(600).wait_timeout(900 * SECOND).build().unwrap();
    let mut requests = JoinSet::new();
    for _ in 0..1220 {
        requests.spawn(semaphore.acquire("x", &policy));
    }
    while semaphore.inspect("x").await.unwrap().waiting < 600 {
        tokio::task::yield_now().await;
    }
    let rate = policy.rate().unwrap();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(1000).max_queue(600);
    let builder = builder.rate(rate.starts(), rate.window()).wait_timeout(10 * SECOND);
    let builder = set(if rate.is_smooth() { builder.smooth() } else { builder });
    let layer = builder.build().unwrap();
    let service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    let response = service.oneshot(Request::new(())).await.unwrap();
    let refusal = response.extensions().get::<Refusal>().unwrap().clone();
    let after = response.headers()[RETRY_AFTER].to_str().unwrap().parse().unwrap();
    assert_eq!(refusal.rejected.as_ref().unwrap().expected_wait(), None);
    requests.shutdown().await;
    (refusal, Duration::from_secs(after))
}

#[tokio::test(start_paused = true)]
async fn nobody_is_told_to_come_back_before_those_who_wait_can_have_started() {
    for (starts, window, is_smooth) in [
        (10, SECOND, false),
        (10, SECOND, true),
        (600, 60 * SECOND, false),
        (600, 60 * SECOND, true),
    ] {
        let policy = || {
            let policy = Policy::builder(1000).rate(starts, window);
            if is_smooth { policy.smooth() } else { policy }
        };
        let mut told = BTreeSet::new();
        for _ in 0..8 {
            let (refusal, after) = beyond_the_queue(policy(), |builder| builder).await;
            assert_eq!(refusal.reason, RefusalReason::QueueFull);
            let first = refusal.rejected.as_ref().unwrap().ends_in.unwrap();
            let least = first + 60 * SECOND;
            assert!(after >= least && after <= least * 11 / 10 + SECOND, "{after:?}");
            told.insert(after);
        }
        assert!(told.len() > 1, "those who are refused at once come back together: {told:?}");

        let none = |builder: ConcurrencyLimitBuilder| builder.wait_timeout(Duration::ZERO);
        let (refusal, after) = beyond_the_queue(policy(), none).await;
        assert!(refusal.reason.is_full() && refusal.reason != RefusalReason::QueueFull);
        assert!(after >= 60 * SECOND, "{after:?}");

        // In ten seconds a hundred of them have started, or none.
        let longer = |builder: ConcurrencyLimitBuilder| builder.max_queue(1000);
        let (refusal, after) = beyond_the_queue(policy(), longer).await;
        assert_eq!(refusal.reason, RefusalReason::QueueTimeout);
        let waited = refusal.waited().unwrap();
        assert!(after + waited >= 59 * SECOND, "{after:?}");
        assert!(after >= 49 * SECOND, "{after:?}");
    }
}
