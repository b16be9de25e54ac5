//! Budgets that each tenant has for itself: what is used up of one delays nobody but its tenant.
//!
//! Each test in `on_each!` runs on each backend, with the semaphores of several processes.

use std::convert::Infallible;
use std::time::Duration;

use http::{HeaderName, Request, Response, StatusCode};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::HeaderKey;
use tower_semaphore::{
    Ask, Budget, ConcurrencyLimitLayer, Name, Policy, RejectReason, Semaphore, feedback,
};

use crate::budgets::gives_back_to_who_waits;
use crate::support::on_each;
use crate::support::semaphore::{rejection, waiting};

const SECOND: Duration = Duration::from_secs(1);

on_each! {
    a_tenant_without_budget_delays_nobody_else
    who_waits_for_a_budget_of_its_own_has_its_permit_once_that_has_enough
    what_a_request_gives_back_serves_its_tenant
    a_line_that_is_asleep_keeps_no_further_limit_from_others
    the_tenants_budgets_are_behind_that_of_all
    without_a_tenant_requests_count_as_one
    whoever_leaves_while_its_line_is_asleep_leaves_nothing
    an_inspection_tells_whose_a_budget_is
}

fn each(seconds: u64) -> Budget {
    Budget::new("tokens", 100, Duration::from_secs(seconds)).unwrap().each()
}

fn asks(tenant: &str, budget: &Budget, units: u64) -> Ask {
    Ask::of("x").by(Name::new(tenant)).estimate(budget, units)
}

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(100 * SECOND).build().unwrap()
}

async fn a_tenant_without_budget_delays_nobody_else(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let (tokens, policy) = (each(1000), policy(2));
    let used = own.acquire(asks("acme", &tokens, 100), &policy).await.unwrap();
    let _waits = tokio::spawn(own.acquire(asks("acme", &tokens, 50), &policy));
    waiting(&own, "x", 1).await;
    // A permit is free, and the line of acme is asleep.
    let held = other.try_acquire(asks("globex", &tokens, 50), &policy).await.unwrap();
    // None is free: who waits gets the next one, though acme's line came before.
    let next = tokio::spawn(other.acquire(asks("globex", &tokens, 50), &policy));
    waiting(&own, "x", 2).await;
    used.release().await.unwrap();
    let next = next.await.unwrap().unwrap();
    drop((held, next));
    let refused = rejection(other.try_acquire(asks("globex", &tokens, 1), &policy).await);
    assert_eq!(refused.reason, RejectReason::Budget(0));
    assert!(refused.ends_in.is_some_and(|at| at > 5 * SECOND && at <= 10 * SECOND), "{refused:?}");
    drop(own.try_acquire(asks("initech", &tokens, 100), &policy).await.unwrap());
}

async fn who_waits_for_a_budget_of_its_own_has_its_permit_once_that_has_enough(
    node: &dyn Fn() -> Semaphore,
) {
    let nodes = [node(), node()];
    // 20 ms for a unit.
    let (tokens, policy) = (each(2), policy(100));
    let mut tasks = JoinSet::new();
    let tenants = ["acme", "globex", "initech"];
    for tenant in tenants {
        drop(nodes[0].acquire(asks(tenant, &tokens, 100), &policy).await.unwrap());
    }
    let began = Instant::now();
    for i in 0..6_u64 {
        let tenant = tenants[(i % 3) as usize];
        let acquire = nodes[(i % 2) as usize].acquire(asks(tenant, &tokens, 20), &policy);
        tasks.spawn(async move {
            let permit = acquire.await.unwrap();
            let at = Instant::now();
            drop(permit);
            (i, at)
        });
        waiting(&nodes[0], "x", i + 1).await;
    }
    let mut order = Vec::new();
    while let Some(done) = tasks.join_next().await {
        let (i, at) = done.unwrap();
        // What they were charged ended some ms before `began`.
        let due = Duration::from_millis(400) * u32::try_from(i / 3 + 1).unwrap();
        let since = at.duration_since(began);
        assert!(since + Duration::from_millis(100) >= due, "{i} after {since:?}");
        order.push(i);
    }
    for tenant in 0..3 {
        let of: Vec<_> = order.iter().copied().filter(|i| i % 3 == tenant).collect();
        assert_eq!(of, [tenant, tenant + 3]);
    }
}

async fn what_a_request_gives_back_serves_its_tenant(node: &dyn Fn() -> Semaphore) {
    let tokens = each(1000);
    gives_back_to_who_waits(node, |units| asks("acme", &tokens, units)).await;
}

async fn a_line_that_is_asleep_keeps_no_further_limit_from_others(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let (tokens, policy) = (each(1000), policy(10));
    let chat = |tenant, units| asks(tenant, &tokens, units).also("route", "/chat", 1);
    drop(own.acquire(chat("acme", 100), &policy).await.unwrap());
    let _waits = tokio::spawn(own.acquire(chat("acme", 50), &policy));
    waiting(&own, "x", 1).await;
    let held = other.try_acquire(chat("globex", 10), &policy).await.unwrap();
    let next = tokio::spawn(own.acquire(chat("initech", 10), &policy));
    waiting(&own, "x", 2).await;
    held.release().await.unwrap();
    drop(next.await.unwrap().unwrap());
    // Another route of the same tenant, of which it takes nothing.
    let other_route = Ask::of("x").by("acme").also("route", "/embed", 1);
    drop(own.try_acquire(other_route, &policy).await.unwrap());
}

async fn the_tenants_budgets_are_behind_that_of_all(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let policy = policy(10);
    let all = Budget::new("all", 100, 1000 * SECOND).unwrap();
    let tokens = each(1000);
    let ask = |tenant, units| asks(tenant, &tokens, units).estimate(&all, units);
    let _held = own.try_acquire(ask("acme", 70), &policy).await.unwrap();
    let of = async |tenant, units| rejection(other.try_acquire(ask(tenant, units), &policy).await);
    // 50 of its own 30 and of 30 of all: both by the same time; the first one is named.
    assert_eq!(of("acme", 50).await.reason, RejectReason::Budget(0));
    assert_eq!(of("globex", 50).await.limit_name(), Some("all"));
    let _rest = other.try_acquire(ask("globex", 30), &policy).await.unwrap();
    assert_eq!(of("initech", 1).await.limit_name(), Some("all"));
}

async fn without_a_tenant_requests_count_as_one(node: &dyn Fn() -> Semaphore) {
    let semaphore = node();
    let (tokens, policy) = (each(1000), policy(10));
    let nobodys = |units| Ask::of("x").estimate(&tokens, units);
    let _held = semaphore.try_acquire(nobodys(100), &policy).await.unwrap();
    let refused = rejection(semaphore.try_acquire(nobodys(1), &policy).await);
    assert_eq!(refused.reason, RejectReason::Budget(0));
    let _waits = tokio::spawn(semaphore.acquire(nobodys(50), &policy));
    waiting(&semaphore, "x", 1).await;
    drop(semaphore.try_acquire(asks("acme", &tokens, 1), &policy).await.unwrap());
    drop(semaphore.try_acquire("x", &policy).await.unwrap());
}

async fn whoever_leaves_while_its_line_is_asleep_leaves_nothing(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let (tokens, policy) = (each(1000), policy(10));
    let held = own.acquire(asks("acme", &tokens, 100), &policy).await.unwrap();
    let waits = tokio::spawn(own.acquire(asks("acme", &tokens, 50), &policy));
    waiting(&other, "x", 1).await;
    waits.abort();
    waiting(&other, "x", 0).await;
    held.settle("tokens", 0);
    held.release().await.unwrap();
    let seen = other.inspect("x").await.unwrap();
    assert_eq!((seen.in_use, seen.waiting, seen.budgets), (0, 0, Vec::new()));
}

async fn an_inspection_tells_whose_a_budget_is(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let (tokens, policy) = (each(1000), policy(10));
    let _held = own.acquire(asks("acme", &tokens, 30), &policy).await.unwrap();
    drop(own.acquire(asks("globex", &tokens, 0), &policy).await.unwrap());
    let seen = own.inspect("x").await.unwrap();
    let [budget] = &seen.budgets[..] else { panic!("{:?}: one is not full", seen.budgets) };
    assert_eq!(
        (budget.tenant.as_ref(), budget.budget.as_ref()),
        (Some(&"acme".into()), Some(&tokens))
    );
    assert!(matches!(budget.left(), Some(70..=71)), "{budget:?}");
    let seen = other.inspect("x").await.unwrap();
    assert_eq!((seen.budgets.len(), &seen.budgets[0].tenant), (1, &None));
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_line_that_was_asleep_leaves_no_key() {
    let redis = crate::support::redis::TestRedis::start();
    whoever_leaves_while_its_line_is_asleep_leaves_nothing(&|| redis.semaphore()).await;
    assert!(redis.is_clear());
}

/// In an outage, as with the backend.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_local_share_passes_over_a_tenant_without_budget() {
    let mut redis = crate::support::redis::TestRedis::start();
    let semaphore = redis.semaphore();
    let local = tower_semaphore::OnUnavailable::Local(5);
    let policy =
        Policy::builder(5).on_unavailable(local).wait_timeout(100 * SECOND).build().unwrap();
    // 20 ms for a unit.
    let tokens = each(2);
    drop(semaphore.acquire(asks("acme", &tokens, 1), &policy).await.unwrap());
    redis.kill();
    crate::support::semaphore::down(&semaphore).await;
    let _used = semaphore.acquire(asks("acme", &tokens, 90), &policy).await.unwrap();
    let waits = tokio::spawn(semaphore.acquire(asks("acme", &tokens, 90), &policy));
    let _others = semaphore.acquire(asks("globex", &tokens, 90), &policy).await.unwrap();
    let permit = waits.await.unwrap().unwrap();
    assert!(permit.waited() > SECOND, "{:?}", permit.waited());
}

#[tokio::test(start_paused = true)]
async fn a_layer_has_budgets_of_tenants() {
    let semaphore = Semaphore::in_memory();
    let tokens = HeaderName::from_static("x-used");
    let builder = || {
        ConcurrencyLimitLayer::builder(&semaphore, "llm")
            .limit(10)
            .wait_timeout(Duration::ZERO)
            .budget(each(1000), |_| 60)
            .settle_by("tokens", feedback::header_number(tokens.clone()))
    };
    assert_eq!(
        builder().build().unwrap_err().to_string(),
        "the tokens budget is of each tenant, and there are no tenants; set fair_by, too"
    );
    let layer = builder().fair_by(HeaderKey::from_static("x-tenant")).build().unwrap();
    let call = async |tenant: &str, used: u64| {
        let service = layer.layer(service_fn(async |_: Request<()>| {
            Ok::<_, Infallible>(
                Response::builder().header("x-used", used).body(String::new()).unwrap(),
            )
        }));
        let request = Request::builder().header("x-tenant", tenant).body(()).unwrap();
        let response = service.oneshot(request).await.unwrap();
        let limit =
            response.headers().get("ratelimit").map(|limit| limit.to_str().unwrap().to_owned());
        (response.status(), limit)
    };
    assert_eq!(call("acme", 70).await.0, StatusCode::OK);
    let (status, limit) = call("acme", 1).await;
    assert_eq!(
        (status, limit.as_deref()),
        (StatusCode::TOO_MANY_REQUESTS, Some("\"llm/tokens\";r=0;t=300"))
    );
    assert_eq!(call("globex", 5).await.0, StatusCode::OK);
    assert_eq!(call("globex", 5).await.0, StatusCode::OK);
}

/// Its line is asleep, so no reply says when its budget has enough; but permits are free.
#[tokio::test(start_paused = true)]
async fn who_waits_in_vain_for_a_budget_of_its_own_is_told_so() {
    let semaphore = Semaphore::in_memory();
    let tokens = each(1000);
    let policy = Policy::builder(10).wait_timeout(Duration::from_secs(2)).build().unwrap();
    drop(semaphore.acquire(asks("acme", &tokens, 100), &policy).await.unwrap());
    let rejected = rejection(semaphore.acquire(asks("acme", &tokens, 10), &policy).await);
    assert_eq!(rejected.reason, RejectReason::QueueTimeout);
    assert_eq!(rejected.budget().map(Budget::name), Some("tokens"));
    assert_eq!(rejected.ends_in, Some(Duration::from_secs(100)));
}

/// The pool that all share has room.
#[tokio::test]
async fn a_tenant_that_used_up_its_budget_is_told_429_in_any_case() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "llm")
        .limit(9)
        .fair_by(HeaderKey::from_static("x-tenant"))
        .full_status(StatusCode::SERVICE_UNAVAILABLE)
        .wait_timeout(Duration::ZERO)
        .budget(each(1000).burst(1).unwrap(), |_| 1)
        .build()
        .unwrap();
    let call = async || {
        let answer = async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new()));
        let request = Request::builder().header("x-tenant", "acme").body(()).unwrap();
        layer.layer(service_fn(answer)).oneshot(request).await.unwrap().status()
    };
    assert_eq!(call().await, StatusCode::OK);
    assert_eq!(call().await, StatusCode::TOO_MANY_REQUESTS);
}
