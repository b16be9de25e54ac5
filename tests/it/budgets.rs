//! Budgets, such as tokens a minute, beside the limit of requests in flight.
//!
//! Each test in `on_each!` runs on each backend, with the semaphores of several processes.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::limit::{ConcurrencyLimitBuilder, Refusal, RefusalReason};
use tower_semaphore::{
    AcquireError, Ask, Budget, ConcurrencyLimitLayer, Limit, Permit, Policy, RejectReason,
    Semaphore, feedback,
};

use crate::support::on_each;
use crate::support::semaphore::{rejection, waiting};

const SECOND: Duration = Duration::from_secs(1);

on_each! {
    who_waits_for_a_budget_is_served_in_order_as_it_refills
    a_rejection_names_the_budget_and_says_when_it_has_enough
    what_was_used_replaces_the_estimate_with_the_release
    more_than_was_estimated_is_charged_up_to_a_bound
    a_provider_can_only_lower_what_is_left
    an_estimate_of_nothing_waits_only_for_what_others_used_beyond_theirs
    without_a_limit_only_the_budget_counts
    a_request_has_up_to_two_budgets_beside_its_other_limits
    an_estimate_that_can_never_be_met_is_a_bad_one
    a_settlement_serves_who_waits
    the_estimate_of_a_process_that_dies_stands
    an_inspection_tells_what_is_left_of_budgets
    a_shorter_burst_makes_nobody_forget_what_was_used
}

/// As while a configuration is rolled out.
async fn a_shorter_burst_makes_nobody_forget_what_was_used(node: &dyn Fn() -> Semaphore) {
    let (old, new, minute) = (node(), node(), Duration::from_secs(60));
    let before = Budget::new("tokens", 60_000, minute).unwrap();
    let after = before.clone().burst(20_000).unwrap();
    let mut granted = 0;
    for _ in 0..5 {
        for (semaphore, budget, units) in [(&old, &before, 59_000), (&new, &after, 1_000)] {
            if let Ok(permit) = semaphore.try_acquire(asks(budget, units), &Policy::new(9)).await {
                permit.release().await.unwrap();
                granted += units;
            }
        }
    }
    // Each has one.
    assert_eq!(granted, 59_000 + 5 * 1_000);
}

/// A hundred units in so many seconds.
fn hundred(seconds: u64) -> Budget {
    Budget::new("tokens", 100, Duration::from_secs(seconds)).unwrap()
}

fn asks(budget: &Budget, units: u64) -> Ask {
    Ask::of("x").estimate(budget, units)
}

async fn rejected(semaphore: &Semaphore, ask: Ask) -> tower_semaphore::Rejected {
    rejection(semaphore.try_acquire(ask, &Policy::new(10)).await)
}

async fn who_waits_for_a_budget_is_served_in_order_as_it_refills(node: &dyn Fn() -> Semaphore) {
    let nodes = [node(), node()];
    let policy = Policy::builder(100).wait_timeout(20 * SECOND).build().unwrap();
    // 20 ms for a unit.
    let tokens = hundred(2);
    drop(nodes[0].acquire(asks(&tokens, 100), &policy).await.unwrap());
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for i in 0..4_u8 {
        let acquire = nodes[usize::from(i % 2)].acquire(asks(&tokens, 20), &policy);
        tasks.spawn(async move {
            let permit = acquire.await.unwrap();
            let at = Instant::now();
            drop(permit);
            (i, at)
        });
        waiting(&nodes[0], "x", u64::from(i) + 1).await;
    }
    let mut order = Vec::new();
    while let Some(done) = tasks.join_next().await {
        let (i, at) = done.unwrap();
        // What it was charged ended some ms before `began`.
        let due = Duration::from_millis(400) * (u32::from(i) + 1);
        let since = at.duration_since(began);
        assert!(since + Duration::from_millis(100) >= due, "{i} after {since:?}");
        order.push(i);
    }
    assert_eq!(order, [0, 1, 2, 3]);
}

async fn a_rejection_names_the_budget_and_says_when_it_has_enough(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let tokens = hundred(100);
    let _held = own.try_acquire(asks(&tokens, 70), &Policy::new(10)).await.unwrap();
    let rejected = rejected(&other, asks(&tokens, 50)).await;
    assert_eq!((rejected.reason, rejected.limit_name()), (RejectReason::Budget(0), Some("tokens")));
    let left = rejected.ends_in.unwrap();
    assert!(left > 15 * SECOND && left <= 20 * SECOND, "{left:?}");
    let text = AcquireError::Rejected(rejected).to_string();
    let said = "the tokens budget is used up, 100/100s; it allows the request in ";
    assert!(text.starts_with(said), "{text}");
    let _fits = other.try_acquire(asks(&tokens, 30), &Policy::new(10)).await.unwrap();
    // Another name has a budget of its own, and so has another budget.
    let ask = Ask::of("y").estimate(&tokens, 100);
    drop(other.try_acquire(ask, &Policy::new(10)).await.unwrap());
    let ask = asks(&Budget::new("bytes", 100, SECOND).unwrap(), 100);
    drop(other.try_acquire(ask, &Policy::new(10)).await.unwrap());
}

async fn what_was_used_replaces_the_estimate_with_the_release(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let tokens = hundred(1000);
    let take = async |units| own.try_acquire(asks(&tokens, units), &Policy::new(10)).await;
    let permit = take(90).await.unwrap();
    assert!(!permit.settle("bytes", 1));
    assert!(permit.settle("tokens", 80) && permit.clone().settle("tokens", 10));
    // Not before it is given back.
    assert_eq!(rejected(&other, asks(&tokens, 50)).await.reason, RejectReason::Budget(0));
    permit.release().await.unwrap();
    let half = other.try_acquire(asks(&tokens, 50), &Policy::new(10)).await.unwrap();
    let rest = take(39).await.unwrap();
    assert!(take(2).await.is_err());
    // The settlement goes with the call of a newcomer, too.
    half.settle("tokens", 0);
    drop(half);
    drop(other.acquire(asks(&tokens, 50), &Policy::new(10)).await.unwrap());
    // Nothing is settled: the estimates stand.
    rest.release().await.unwrap();
    assert!(take(12).await.is_err());
}

async fn more_than_was_estimated_is_charged_up_to_a_bound(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let tokens = hundred(100);
    let permit = semaphore.try_acquire(asks(&tokens, 10), &Policy::new(10)).await.unwrap();
    permit.settle("tokens", 60);
    permit.release().await.unwrap();
    assert!(semaphore.try_acquire(asks(&tokens, 45), &Policy::new(10)).await.is_err());
    let permit = semaphore.try_acquire(asks(&tokens, 35), &Policy::new(10)).await.unwrap();
    permit.settle("tokens", u64::MAX);
    permit.release().await.unwrap();
    // A burst refills in 100 s.
    let ends_in = rejected(&semaphore, asks(&tokens, 0)).await.ends_in.unwrap();
    assert!(ends_in > 90 * SECOND && ends_in <= 100 * SECOND, "{ends_in:?}");
}

async fn a_provider_can_only_lower_what_is_left(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let tokens = hundred(1000);
    let says = async |units, left| {
        let permit = own.try_acquire(asks(&tokens, units), &Policy::new(10)).await.unwrap();
        assert!(permit.budget_left("tokens", left));
        permit.release().await.unwrap();
    };
    says(20, 100).await;
    let most = rejected(&other, asks(&tokens, 90)).await;
    assert_eq!(most.reason, RejectReason::Budget(0), "20 were used, whatever the provider says");
    says(10, 30).await;
    assert!(other.try_acquire(asks(&tokens, 33), &Policy::new(10)).await.is_err());
    drop(other.try_acquire(asks(&tokens, 30), &Policy::new(10)).await.unwrap());
    // Beside what was used.
    let permit = own.try_acquire(asks(&tokens, 0), &Policy::new(10)).await.unwrap();
    permit.settle("tokens", 0);
    permit.budget_left("tokens", 0);
    permit.release().await.unwrap();
    assert!(other.try_acquire(asks(&tokens, 3), &Policy::new(10)).await.is_err());
}

async fn an_estimate_of_nothing_waits_only_for_what_others_used_beyond_theirs(
    node: &dyn Fn() -> Semaphore,
) {
    let semaphore = node();
    let tokens = hundred(100);
    let nothing = async || semaphore.try_acquire(asks(&tokens, 0), &Policy::new(10)).await;
    let all = semaphore.try_acquire(asks(&tokens, 100), &Policy::new(10)).await.unwrap();
    drop(nothing().await.unwrap());
    all.settle("tokens", 120);
    all.release().await.unwrap();
    assert_eq!(rejection(nothing().await).reason, RejectReason::Budget(0));
}

async fn without_a_limit_only_the_budget_counts(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let (tokens, policy) = (hundred(1000), Policy::new(Limit::Unlimited));
    let mut permits = Vec::new();
    for _ in 0..5 {
        permits.push(semaphore.try_acquire(asks(&tokens, 20), &policy).await.unwrap());
    }
    let rejected = rejection(semaphore.try_acquire(asks(&tokens, 20), &policy).await);
    assert_eq!((rejected.reason, rejected.limit), (RejectReason::Budget(0), u32::MAX));
    drop(semaphore.try_acquire("x", &policy).await.unwrap());
}

async fn a_request_has_up_to_two_budgets_beside_its_other_limits(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let (tokens, input) = (hundred(1000), Budget::new("input", 50, 1000 * SECOND).unwrap());
    let policy = Policy::builder(10).rate(100, SECOND).build().unwrap();
    let ask = |tokens_used, input_used| {
        let ask = Ask::of("x").by("acme").each(5).also("route", "/chat", 5).cost(2);
        ask.estimate(&tokens, tokens_used).estimate(&input, input_used)
    };
    let permit = semaphore.try_acquire(ask(10, 40), &policy).await.unwrap();
    let one = rejection(semaphore.try_acquire(ask(10, 20), &policy).await);
    assert_eq!((one.reason, one.limit_name()), (RejectReason::Budget(1), Some("input")));
    let both = rejection(semaphore.try_acquire(ask(100, 20), &policy).await);
    assert_eq!((both.reason, both.limit_name()), (RejectReason::Budget(1), Some("input")));
    let other = rejection(semaphore.try_acquire(ask(100, 10), &policy).await);
    assert_eq!((other.reason, other.limit_name()), (RejectReason::Budget(0), Some("tokens")));
    permit.settle("input", 0);
    permit.release().await.unwrap();
    let permits = [
        semaphore.try_acquire(ask(10, 20), &policy).await,
        semaphore.try_acquire(ask(80, 20), &policy).await,
    ];
    let full = rejection(semaphore.try_acquire(ask(0, 0), &policy).await);
    assert_eq!(full.reason, RejectReason::TenantLimit, "of five, four are in use");
    assert!(permits.iter().all(Result::is_ok));
    let thrice = ask(1, 1).estimate(&Budget::new("third", 1, SECOND).unwrap(), 1);
    for ask in [thrice, Ask::of("x").estimate(&tokens, 1).estimate(&tokens, 1)] {
        let rejected = rejection(semaphore.try_acquire(ask, &policy).await);
        assert_eq!(rejected.reason, RejectReason::InvalidLimits);
        assert_eq!(
            AcquireError::Rejected(rejected).to_string(),
            "the request names more than 3 further limits or 2 budgets, or one of them twice"
        );
    }
}

async fn an_estimate_that_can_never_be_met_is_a_bad_one(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let tokens = hundred(1).burst(40).unwrap();
    drop(semaphore.try_acquire(asks(&tokens, 40), &Policy::new(10)).await.unwrap());
    let rejected = rejection(semaphore.acquire(asks(&tokens, 41), &Policy::new(10)).await);
    assert_eq!(
        (rejected.reason, rejected.limit_name()),
        (RejectReason::CostTooHigh, Some("tokens"))
    );
    assert_eq!(
        AcquireError::Rejected(rejected).to_string(),
        "the request is estimated to use 41 of the tokens budget; expected 0 to 40, as much as may be used at once"
    );
}

async fn a_settlement_serves_who_waits(node: &dyn Fn() -> Semaphore) {
    let tokens = hundred(1000);
    gives_back_to_who_waits(node, |units| asks(&tokens, units)).await;
}

/// A request takes all of a budget that refills in 1000 s, and used a fifth of it: another has its 60 at once.
pub(crate) async fn gives_back_to_who_waits(
    node: &dyn Fn() -> Semaphore,
    ask: impl Fn(u64) -> Ask,
) {
    let (own, other) = (node(), node());
    let policy = Policy::builder(10).wait_timeout(100 * SECOND).build().unwrap();
    let held = own.acquire(ask(100), &policy).await.unwrap();
    let waits = tokio::spawn(other.acquire(ask(60), &policy));
    waiting(&own, "x", 1).await;
    held.settle("tokens", 20);
    held.release().await.unwrap();
    let permit = waits.await.unwrap().unwrap();
    assert!(permit.waited() < 50 * SECOND, "it waits for nobody: {:?}", permit.waited());
}

async fn the_estimate_of_a_process_that_dies_stands(node: &dyn Fn() -> Semaphore) {
    let (dead, own) = (node(), node());
    let policy = Policy::builder(1).lease(SECOND).linger(SECOND / 2).wait_timeout(10 * SECOND);
    let policy = policy.build().unwrap();
    let tokens = hundred(1000);
    let permit = dead.acquire(asks(&tokens, 70), &policy).await.unwrap();
    permit.settle("tokens", 0);
    // A lingering permit is left to its lease, as that of a process that is killed.
    permit.break_off();
    drop(permit);
    dead.shutdown().await;
    drop(own.acquire(asks(&tokens, 20), &policy).await.unwrap());
    assert_eq!(rejected(&own, asks(&tokens, 20)).await.reason, RejectReason::Budget(0));
}

async fn an_inspection_tells_what_is_left_of_budgets(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let (tokens, input) = (hundred(1000), Budget::new("input", 50, 1000 * SECOND).unwrap());
    let ask = asks(&tokens, 30).estimate(&input, 0);
    let _held = own.acquire(ask, &Policy::new(10)).await.unwrap();
    let seen = own.inspect("x").await.unwrap();
    let shown: Vec<_> = seen.budgets.iter().map(|one| (one.budget.clone(), one.left())).collect();
    assert!(matches!(shown[0].1, Some(70..=71)), "{shown:?}");
    assert_eq!(shown[1], (Some(input), Some(50)));
    assert_eq!(shown[0].0.as_ref(), Some(&tokens));
    let full_in = seen.budgets[0].full_in;
    assert!(full_in > 290 * SECOND && full_in <= 300 * SECOND, "{full_in:?}");
    // The other process knows what is charged, and not what it is called.
    let seen = other.inspect("x").await.unwrap();
    assert_eq!((seen.budgets.len(), seen.in_use), (1, 1));
    assert_eq!((seen.budgets[0].budget.as_ref(), seen.budgets[0].left()), (None, None));
    assert!(seen.budgets[0].full_in <= full_in);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_budget_that_is_full_leaves_no_key() {
    let redis = crate::support::redis::TestRedis::start();
    let semaphore = redis.semaphore();
    let tokens = Budget::new("tokens", 100, SECOND).unwrap();
    let policy = Policy::builder(1).lease(SECOND / 2).build().unwrap();
    let permit = semaphore.acquire(asks(&tokens, 100), &policy).await.unwrap();
    permit.release().await.unwrap();
    assert!(!redis.is_clear(), "it is not full yet");
    crate::support::eventually("the key ends", async || redis.is_clear()).await;
    let permit = semaphore.acquire(asks(&tokens, 50), &policy).await.unwrap();
    permit.settle("tokens", 0);
    permit.release().await.unwrap();
    assert!(redis.is_clear());
}

/// Though nothing else is to be kept for so long.
#[cfg(feature = "redis")]
#[tokio::test]
async fn the_key_is_kept_until_its_budgets_are_full() {
    let redis = crate::support::redis::TestRedis::start();
    let semaphore = redis.semaphore();
    let policy = Policy::builder(10).lease(SECOND / 2).build().unwrap();
    let _first = semaphore.acquire(asks(&hundred(100), 30), &policy).await.unwrap();
    let _second = semaphore.acquire(asks(&hundred(100), 40), &policy).await.unwrap();
    let ms: i64 = redis.command(&["PTTL", "semaphore:{x}"]);
    assert!((60_000..=72_000).contains(&ms), "seventy seconds refill what was taken: {ms}");
}

// --- layers -------------------------------------------------------------------------------------

fn estimate(parts: &Parts) -> u64 {
    let tokens = parts.headers.get("x-tokens").and_then(|value| value.to_str().ok());
    tokens.and_then(|tokens| tokens.parse().ok()).unwrap_or(10)
}

fn builder(semaphore: &Semaphore) -> ConcurrencyLimitBuilder {
    let layer = ConcurrencyLimitLayer::builder(semaphore, "llm");
    layer.limit(10).wait_timeout(Duration::ZERO).budget(hundred(1000), estimate)
}

/// A request that is estimated to use so much. The response says this.
async fn call(
    layer: &ConcurrencyLimitLayer,
    tokens: u64,
    says: &'static [(&'static str, &'static str)],
) -> Response<impl http_body::Body<Data = Bytes, Error: std::fmt::Debug> + use<>> {
    let mut service = layer.layer(service_fn(async |request: Request<()>| {
        let response =
            says.iter().fold(Response::builder(), |response, (name, value)| match *name {
                "settles" => {
                    let permit = request.extensions().get::<Permit>().unwrap();
                    permit.settle("tokens", value.parse().unwrap());
                    response
                }
                name => response.header(name, *value),
            });
        Ok::<_, Infallible>(response.body(Full::new(Bytes::from_static(b"x"))).unwrap())
    }));
    let request = Request::builder().header("x-tokens", tokens).body(()).unwrap();
    service.ready().await.unwrap().call(request).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_layer_names_the_budget_that_is_used_up() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).build().unwrap();
    assert_eq!(call(&layer, 80, &[]).await.status(), StatusCode::OK);
    let refused = call(&layer, 50, &[]).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.reason, RefusalReason::Budget);
    // The draft has no unit for tokens.
    assert_eq!(refused.headers()["ratelimit-policy"], "\"llm\";q=10;qu=\"concurrent-requests\"");
    assert_eq!(refused.headers()["ratelimit"], "\"llm/tokens\";r=0;t=300");
    let after: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((300..=330).contains(&after), "{after}");
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["reason"], "budget");
    assert_eq!(problem["title"], "Too much of a budget is used");
    assert_eq!(problem["detail"], "the tokens budget of llm is used up");
    assert_eq!(problem["violated-policies"], serde_json::json!(["llm/tokens"]));

    let refused = call(&layer, 101, &[]).await;
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["reason"], "cost_too_high");
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        detail.starts_with("the request is estimated to use 101 of the tokens budget"),
        "{detail}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_wait_in_vain_for_a_budget_says_so() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).wait_timeout(SECOND).build().unwrap();
    drop(call(&layer, 80, &[]).await);
    let refused = call(&layer, 50, &[]).await;
    assert_eq!(refused.headers()["ratelimit"], "\"llm/tokens\";r=0;t=299");
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.reason, RefusalReason::QueueTimeout);
    assert_eq!(
        refusal.to_string(),
        "the tokens budget of llm, 100/1000s, allowed no start within 1.0 s; the next can in 299.0 s"
    );
}

#[tokio::test(start_paused = true)]
async fn responses_and_handlers_settle() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore)
        .settle_by("tokens", feedback::header_number(HeaderName::from_static("x-used")))
        .left_by("tokens", feedback::header_number(HeaderName::from_static("x-left")))
        .build()
        .unwrap();
    for (says, used) in [
        (&[("x-used", "20")][..], 20),
        (&[("settles", "30")], 30),
        // The head of the response is the last report.
        (&[("settles", "30"), ("x-used", "20")], 20),
        (&[("x-used", "-1")], 90),
        (&[("x-used", "10"), ("x-left", "55")], 45),
    ] {
        let response = call(&layer, 90, says).await;
        assert_eq!(response.status(), StatusCode::OK);
        drop(response);
        // What is left, as far as it can be seen from outside.
        assert_eq!(call(&layer, 101 - used, &[]).await.status(), 429, "{says:?}");
        let rest = call(&layer, 100 - used, &[("x-used", "0")]).await;
        assert_eq!(rest.status(), StatusCode::OK, "{says:?}");
        drop(rest);
        tokio::time::sleep(2000 * SECOND).await;
    }
}

#[tokio::test]
async fn what_cannot_be_meant_is_an_error_of_the_builder() {
    let semaphore = Semaphore::in_memory();
    let error = |builder: ConcurrencyLimitBuilder| builder.build().unwrap_err().to_string();
    let other = |name: &str| Budget::new(name, 1, SECOND).unwrap();
    let own = || builder(&semaphore);
    assert_eq!(
        error(own().budget(other("a"), estimate).budget(other("b"), estimate)),
        "budget is called 3 times; expected at most 2 budgets"
    );
    assert_eq!(
        error(own().budget(other("tokens"), estimate)),
        "two budgets are called \"tokens\"; expected a name for each"
    );
    assert_eq!(
        error(own().also("tokens", |_: &Parts| Some("x"), 5)),
        "a budget and a further limit are called \"tokens\"; expected a name for each"
    );
    assert_eq!(
        error(own().settle_by("bytes", feedback::header_number(HeaderName::from_static("x-used")))),
        "settle_by is set for \"bytes\", and no budget is called that; set budget, too"
    );
    assert!(
        error(own().left_by("bytes", feedback::header_number(HeaderName::from_static("x"))))
            .starts_with("left_by is set")
    );
    let reuse = own().wait_timeout(SECOND).reuse(true);
    assert!(error(reuse).starts_with("reuse is set beside a budget"));
    let unlimited = ConcurrencyLimitLayer::builder(&semaphore, "llm").limit(Limit::Unlimited);
    assert!(unlimited.budget(hundred(1), estimate).build().is_ok(), "the budget counts");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_a_layer_further_in_rejects_uses_nothing() {
    let semaphore = Semaphore::in_memory();
    let (outer, policy) = (builder(&semaphore).build().unwrap(), Policy::new(1));
    let inner = ConcurrencyLimitLayer::builder(&semaphore, "inner").limit(1);
    let inner = inner.wait_timeout(Duration::ZERO).build().unwrap();
    let held = semaphore.acquire("inner", &policy).await.unwrap();
    let service = service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"x"))))
    });
    let service = outer.layer(inner.layer(service));
    let call = async |tokens: u64| {
        let request = Request::builder().header("x-tokens", tokens).body(()).unwrap();
        service.clone().oneshot(request).await.unwrap().status()
    };
    for _ in 0..5 {
        assert_eq!(call(80).await, StatusCode::TOO_MANY_REQUESTS);
    }
    assert_eq!(semaphore.inspect("llm").await.unwrap().budgets[0].left(), Some(100));
    drop(held);
    assert_eq!(call(80).await, StatusCode::OK);
    assert_eq!(call(80).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(semaphore.inspect("llm").await.unwrap().budgets[0].left(), Some(20));
}

#[tokio::test(start_paused = true)]
async fn a_rejection_behind_others_does_not_say_that_all_permits_are_in_use() {
    let semaphore = Semaphore::in_memory();
    let (tokens, policy) =
        (hundred(100), Policy::builder(10).wait_timeout(50 * SECOND).build().unwrap());
    drop(semaphore.acquire(asks(&tokens, 100), &policy).await.unwrap());
    let waits = tokio::spawn(semaphore.acquire(asks(&tokens, 40), &policy));
    waiting(&semaphore, "x", 1).await;
    let rejected = rejected(&semaphore, Ask::of("x")).await;
    assert_eq!(rejected.reason, RejectReason::Limit);
    let said = AcquireError::Rejected(rejected).to_string();
    assert_eq!(said, "other requests wait, and are served first");
    drop(waits.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn who_waits_in_vain_is_told_what_it_waited_for_if_only_one_can_be_it() {
    let semaphore = Semaphore::in_memory();
    let wait = |rate: bool| {
        let policy = Policy::builder(10).wait_timeout(SECOND);
        let policy = if rate { policy.rate(50, SECOND) } else { policy };
        policy.build().unwrap()
    };
    let (tokens, input) = (hundred(1000), Budget::new("input", 9, SECOND).unwrap());
    drop(semaphore.acquire(asks(&tokens, 90), &wait(false)).await.unwrap());
    for (ask, rate, name, said) in [
        (
            asks(&tokens, 20),
            false,
            Some("tokens"),
            "the tokens budget, 100/1000s, allowed no start",
        ),
        (asks(&tokens, 20), true, None, "the rate or a budget allowed no start"),
        (asks(&tokens, 20).estimate(&input, 1), false, None, "a budget allowed no start"),
    ] {
        let rejected = rejection(semaphore.acquire(ask, &wait(rate)).await);
        assert_eq!(rejected.reason, RejectReason::QueueTimeout);
        assert_eq!(rejected.budget().map(Budget::name), name);
        let text = AcquireError::Rejected(rejected).to_string();
        assert!(text.starts_with(said), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shadow_counts_what_a_budget_would_keep_back() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).shadow(true).build().unwrap();
    for _ in 0..3 {
        assert_eq!(call(&layer, 50, &[]).await.status(), StatusCode::OK);
    }
    let counts = layer.shadow_counts().unwrap();
    assert_eq!((counts.passed, counts.full), (2, 1));
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_local_share_has_its_part_of_the_budget() {
    let mut redis = crate::support::redis::TestRedis::start();
    let semaphore = redis.semaphore();
    let local = tower_semaphore::OnUnavailable::Local(5);
    let policy =
        Policy::builder(10).on_unavailable(local).wait_timeout(Duration::ZERO).build().unwrap();
    let tokens = hundred(1000);
    drop(semaphore.acquire(asks(&tokens, 20), &policy).await.unwrap());
    redis.kill();
    crate::support::semaphore::down(&semaphore).await;
    // Half of the budget, of which twenty are used, as if twice as much.
    let passes = async |units| semaphore.try_acquire(asks(&tokens, units), &policy).await;
    assert_eq!(rejection(passes(31).await).reason, RejectReason::Budget(0));
    let permit = passes(29).await.unwrap();
    assert_eq!(rejection(passes(3).await).reason, RejectReason::Budget(0));
    permit.settle("tokens", 9);
    drop(permit);
    drop(passes(19).await.unwrap());
}

/// What the scripts do with the members of budgets.
#[cfg(feature = "redis")]
mod members {
    use deadpool_redis::redis;
    use tower_semaphore::protocol::{Charge, Claim, NodeId, PlaceId};
    use tower_semaphore::{Budget, Policy};

    use super::{SECOND, asks};
    use crate::support::redis::TestRedis;
    use crate::support::scripts::{SCRIPTS, whole};

    const KEY: &str = "semaphore:{x}";

    fn charged(n: u64, number: u64, taken: u64, burst: u64) -> String {
        let claim = Claim::without_tenant();
        let claim = Some(claim.charged(Charge::of_hash(number, taken, burst).unwrap()));
        PlaceId { node: NodeId::new(1), poll_only: false, n, bound: None, claim }.to_string()
    }

    fn acquire(redis: &TestRedis, ids: &[String]) -> redis::Value {
        let (_, text) = SCRIPTS.into_iter().find(|(name, _)| *name == "acquire").unwrap();
        let (text, node) = (whole(text, &|_, text| text.to_owned()), NodeId::new(1).text());
        let node = std::str::from_utf8(&node).unwrap();
        let mut words =
            vec!["EVAL", &text, "1", KEY, "1000", "0", "0", "30000", "-1", "0", "1", node];
        words.extend(["0", "0"]);
        words.extend(ids.iter().map(String::as_str));
        redis.command(&words)
    }

    #[test]
    fn a_call_that_is_repeated_charges_once() {
        let redis = TestRedis::start();
        let hour = 3_600_000_000;
        // The second finds a member of the budget.
        for n in [1, 2] {
            let one = [charged(n, 6, hour / 10, hour)];
            acquire(&redis, &one);
            let before: f64 = redis.command(&["ZSCORE", KEY, "b00007"]);
            acquire(&redis, &one);
            let after: f64 = redis.command(&["ZSCORE", KEY, "b00007"]);
            assert!(after >= before, "{before}, then {after}");
        }
    }

    #[test]
    fn one_call_takes_out_a_thousand_budgets_that_are_full_at_most() {
        let redis = TestRedis::start();
        let numbers: Vec<String> = (0..20_000u32).map(|i| format!("bz{i:05}")).collect();
        for numbers in numbers.chunks(1000) {
            let mut words = vec!["ZADD", KEY];
            numbers.iter().for_each(|member| words.extend(["-200000000", member]));
            redis.command::<u32>(&words);
        }
        let ids: Vec<_> = (1..=512).map(|n| charged(n, 1000 + n, 1000, 1_000_000)).collect();
        acquire(&redis, &ids);
        let left: u32 = redis.command(&["ZCOUNT", KEY, "-200000000", "-200000000"]);
        assert!((19_000..20_000).contains(&left), "{left} are left");
    }

    #[tokio::test]
    async fn budgets_that_are_full_are_taken_out_though_others_are_used() {
        let redis = TestRedis::start();
        let (semaphore, policy) = (redis.semaphore(), Policy::new(1000));
        let steady = Budget::new("steady", 1_000_000, 100 * SECOND).unwrap();
        drop(semaphore.acquire(asks(&steady, 100), &policy).await.unwrap());
        for i in 0..300 {
            let budget = Budget::new(format!("b{i}"), 1, SECOND).unwrap();
            drop(semaphore.acquire(asks(&budget, 1), &policy).await.unwrap());
        }
        let mut rounds = 0;
        while redis.command::<u32>(&["ZCARD", KEY]) > 2 {
            rounds += 1;
            assert!(rounds < 20_000, "{} members", redis.command::<u32>(&["ZCARD", KEY]));
            let permit = semaphore.acquire(asks(&steady, 1), &policy).await.unwrap();
            permit.release().await.unwrap();
        }
    }
}
