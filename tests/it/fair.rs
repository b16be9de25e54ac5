//! Layers that are fair between tenants.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{
    CachedPlan, ExtensionKey, HeaderKey, MissingKey, OnUnknown, Plan, Refusal, RefusalReason,
};
use tower_semaphore::operate::TenantChange;
use tower_semaphore::{
    AcquireError, Ask, ConcurrencyLimitLayer, ConfigError, Limit, Name, OnUnavailable, Permit,
    Policy, RejectReason, Semaphore, feedback,
};

use crate::support::told::Told;

const TENANT: HeaderKey = HeaderKey::from_static("x-tenant");

fn number(parts: &Parts, header: &str) -> u32 {
    parts.headers.get(header).map_or(0, |value| value.to_str().unwrap().parse().unwrap())
}

/// A request that holds its permit while the response is kept.
async fn call(
    layer: &ConcurrencyLimitLayer,
    tenant: &str,
) -> Response<impl http_body::Body<Data = Bytes, Error: std::fmt::Debug> + use<>> {
    call_with(layer, tenant, "cost", 1).await
}

async fn call_with(
    layer: &ConcurrencyLimitLayer,
    tenant: &str,
    header: &str,
    value: u32,
) -> Response<impl http_body::Body<Data = Bytes, Error: std::fmt::Debug> + use<>> {
    let mut service = layer.layer(service_fn(|request: Request<()>| async move {
        let cost = request.extensions().get::<Permit>().map_or(0, Permit::cost);
        let mut response = Response::new(Full::new(Bytes::from_static(b"x")));
        response.headers_mut().insert("cost", cost.into());
        Ok::<_, std::convert::Infallible>(response)
    }));
    let request = Request::builder().header("x-tenant", tenant).header(header, value);
    service.ready().await.unwrap().call(request.body(()).unwrap()).await.unwrap()
}

fn refusal<B>(response: &Response<B>) -> &Refusal {
    response.extensions().get().expect("a refusal")
}

#[tokio::test]
async fn a_tenant_at_its_cap_is_told_so_and_others_pass() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "openai")
        .limit(10)
        .fair_by(TENANT)
        .each(2)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let held = [call(&layer, "acme").await, call(&layer, "acme").await];
    let refused = call_with(&layer, "acme", "cost", 1).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refusal(&refused).reason, RefusalReason::TenantLimit);
    let fields = ["ratelimit-policy", "ratelimit", "retry-after"]
        .map(|name| refused.headers().get(name).map(|value| value.to_str().unwrap().to_owned()));
    assert_eq!(
        fields[..2],
        [
            Some(
                "\"openai\";q=10;qu=\"concurrent-requests\", \
                 \"openai/each\";q=2;qu=\"concurrent-requests\""
                    .to_owned()
            ),
            Some("\"openai/each\";r=0".to_owned())
        ]
    );
    assert!(fields[2].is_some());
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["reason"], "tenant_limit");
    assert_eq!(problem["title"], "Too many requests of the tenant are in flight");
    assert_eq!(problem["detail"], "all permits of openai that the tenant may have are in use");
    assert_eq!(problem["violated-policies"], serde_json::json!(["openai/each"]));
    assert_eq!(call(&layer, "other").await.status(), StatusCode::OK);
    drop(held);
    assert_eq!(call(&layer, "acme").await.status(), StatusCode::OK);
}

/// The error without a layer, and the refusal of a layer for it, in the same words.
#[tokio::test]
async fn a_tenant_whose_line_is_full_is_told_so_with_and_without_a_layer() {
    let semaphore = Semaphore::in_memory();
    let minute = Duration::from_secs(60);
    let policy = Policy::builder(1).wait_timeout(minute).max_queue(1).build().unwrap();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "openai")
        .limit(1)
        .fair_by(TENANT)
        .wait_timeout(minute)
        .max_queue(1)
        .build()
        .unwrap();
    let ask = |tenant: &str| semaphore.acquire(Ask::of("openai").by(tenant), &policy);
    let held = ask("acme").await.unwrap();
    let waiting = [ask("acme"), ask("globex")];

    let AcquireError::Rejected(rejected) = ask("acme").await.unwrap_err() else { panic!() };
    assert_eq!((rejected.reason, rejected.waiting), (RejectReason::QueueFull, Some(2)));
    assert_eq!(
        AcquireError::Rejected(rejected).to_string(),
        "the tenant's queue is full; 2 requests of all tenants are waiting"
    );
    let response = call(&layer, "acme").await;
    assert_eq!(
        refusal(&response).to_string(),
        "the tenant's queue for openai is full; 2 requests of all tenants are waiting"
    );
    drop((held, waiting));

    let one = Policy::builder(1).wait_timeout(minute).max_queue(0).build().unwrap();
    let held = semaphore.acquire("jobs", &one).await.unwrap();
    let error = semaphore.acquire("jobs", &one).await.unwrap_err();
    assert_eq!(error.to_string(), "the queue is full; 0 requests are waiting");
    drop(held);
}

#[tokio::test]
async fn numbers_that_nobody_said_are_not_made_up() {
    let semaphore = Semaphore::in_memory();
    let rejected =
        async |ask: Ask, limit: u32| match semaphore.acquire(ask, &Policy::new(limit)).await {
            Err(AcquireError::Rejected(rejected)) => rejected,
            other => panic!("{other:?}"),
        };
    // Neither is asked of the backend.
    let none = rejected(Ask::of("x"), 0).await;
    assert_eq!((none.limit, none.in_use, none.waiting), (0, None, None));
    let big = rejected(Ask::of("x").cost(65), 9).await;
    assert_eq!((big.reason, big.in_use, big.waiting), (RejectReason::CostTooHigh, None, None));
    assert_eq!(
        AcquireError::Rejected(big).to_string(),
        "the request asks for 65 permits; expected 1 to 64, within the limit of 9"
    );

    let layer =
        ConcurrencyLimitLayer::builder(&semaphore, "x").key(TENANT).limit(1).build().unwrap();
    let mut service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(Response::new(Full::<Bytes>::default()))
    }));
    let response = service.call(Request::new(())).await.unwrap();
    assert_eq!(refusal(&response).reason, RefusalReason::MissingKey);
    assert_eq!((&refusal(&response).rejected, refusal(&response).waited()), (&None, None));
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_its_own_cap_made_too_long_says_so() {
    let semaphore = Semaphore::in_memory();
    let build = |each: u32| {
        ConcurrencyLimitLayer::builder(&semaphore, "openai")
            .limit(2)
            .fair_by(TENANT)
            .each(each)
            .wait_timeout(Duration::from_secs(1))
            .build()
            .unwrap()
    };
    let layer = build(1);
    let held = call(&layer, "acme").await;
    let own = call(&layer, "acme").await;
    assert_eq!(refusal(&own).reason, RefusalReason::QueueTimeout);
    assert!(refusal(&own).rejected.as_ref().unwrap().is_tenant_full);
    assert_eq!(
        refusal(&own).to_string(),
        "none of the 1 permits of openai that the tenant may have came free within 1.0 s"
    );
    let own = problem(own).await;
    assert_eq!(own["title"], "Too many requests of the tenant are in flight");
    assert_eq!(
        own["detail"],
        "none of the permits of openai that the tenant may have came free within 1.0 s"
    );
    let other = call(&layer, "other").await;
    let full = call(&layer, "third").await;
    assert_eq!(refusal(&full).reason, RefusalReason::QueueTimeout);
    assert!(!refusal(&full).rejected.as_ref().unwrap().is_tenant_full, "the limit was");
    assert_eq!(refusal(&full).to_string(), "none of 2 permits of openai came free within 1.0 s");
    let full = problem(full).await;
    assert_eq!(full["title"], "Too many requests are in flight");
    assert_eq!(full["detail"], "no permit of openai came free within 1.0 s");
    drop((held, other));
}

#[tokio::test]
async fn a_request_for_more_than_there_can_be_is_a_bad_one() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "gpu")
        .limit(4)
        .cost_by(|parts: &Parts| number(parts, "cost"))
        .build()
        .unwrap();
    for cost in [5, 64, 65, u32::MAX] {
        let refused = call_with(&layer, "acme", "cost", cost).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{cost}");
        assert_eq!(refusal(&refused).reason, RefusalReason::CostTooHigh);
        assert!(refused.headers().get("retry-after").is_none());
    }
    let three = call_with(&layer, "acme", "cost", 3).await;
    assert_eq!(three.headers()["cost"], "3");
    let seen = semaphore.inspect("gpu").await.unwrap();
    assert_eq!(seen.in_use, 3);
    let nothing = call_with(&layer, "acme", "cost", 0).await;
    assert_eq!(nothing.headers()["cost"], "1");
}

#[tokio::test]
async fn permits_that_come_free_go_to_the_tenant_with_the_fewest() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::new(2);
    let ask = |tenant: &str| semaphore.acquire(Ask::of("openai").by(tenant), &policy);
    let (first, second) = (ask("acme").await.unwrap(), ask("acme").await.unwrap());
    let mut queued: Vec<_> = (0..5).map(|_| ask("acme")).collect();
    let late = ask("other");
    drop(first);
    let late = late.await.expect("before five that came first");
    drop(second);
    let next = queued.remove(0).await.unwrap();
    assert_eq!(semaphore.inspect("openai").await.unwrap().waiting, 4);
    drop((late, next));
}

#[tokio::test]
async fn caps_come_from_a_source() {
    let semaphore = Semaphore::in_memory();
    let plans = CachedPlan::builder(|tenant: &Name, _: &Parts| {
        let plan = if tenant.as_str() == "acme" { Plan::new().each(1) } else { Plan::new() };
        async move { Ok::<_, ConfigError>(plan) }
    });
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "openai")
        .limit(4)
        .fair_by(TENANT)
        .plan_cached(&plans.build().unwrap())
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let acme = call(&layer, "acme").await;
    let refused = call(&layer, "acme").await;
    assert_eq!(refusal(&refused).reason, RefusalReason::TenantLimit);
    let others = [call(&layer, "b").await, call(&layer, "b").await, call(&layer, "b").await];
    assert!(others.iter().all(|response| response.status() == StatusCode::OK));
    let refused = call(&layer, "b").await;
    assert_eq!(refusal(&refused).reason, RefusalReason::Limit);
    drop(acme);
}

#[tokio::test]
async fn one_look_up_has_the_whole_plan_of_a_tenant() {
    let calls = Arc::new(AtomicUsize::new(0));
    let source = {
        let calls = Arc::clone(&calls);
        CachedPlan::builder(move |tenant: &Name, _: &Parts| {
            calls.fetch_add(1, Ordering::Relaxed);
            let plan = match tenant.as_str() {
                "paid" => Ok(Plan::new().each(6).weight(3).cost(2)),
                "batch" => Ok(Plan::new().class(1)),
                _ => Err("the database is away"),
            };
            async move {
                tokio::task::yield_now().await;
                plan
            }
        })
    };
    let semaphore = Semaphore::in_memory();
    let layer = |plans: &CachedPlan| {
        ConcurrencyLimitLayer::builder(&semaphore, "openai")
            .limit(10)
            .headroom(4)
            .fair_by(TENANT)
            .plan_cached(plans)
            .wait_timeout(Duration::ZERO)
    };
    let plans = source.clone().build().unwrap();
    let built = layer(&plans).build().unwrap();
    let held = [call(&built, "paid").await, call(&built, "paid").await, call(&built, "paid").await];
    assert!(held.iter().all(|response| response.headers()["cost"] == "2"));
    let seen = semaphore.inspect("openai").await.unwrap();
    let [paid] = &seen.tenants[..] else { panic!("{seen:?}") };
    assert_eq!((paid.in_use, paid.weight, paid.each), (6, 3, Some(6)));
    let capped = call(&built, "paid").await;
    assert_eq!(refusal(&capped).reason, RefusalReason::TenantLimit);
    // Four of ten are reserved for class 0.
    let batch = call(&built, "batch").await;
    assert_eq!(refusal(&batch).reason, RefusalReason::Limit);
    assert_eq!(calls.load(Ordering::Relaxed), 2, "one for each tenant");

    let unknown = call(&built, "new").await;
    assert_eq!(unknown.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refusal(&unknown).reason, RefusalReason::LimitUnknown);
    assert_eq!(refusal(&unknown).to_string(), "the tenant's plan in openai cannot be looked up");
    drop(held);
    let assumed = source.on_failure(OnUnknown::Assume(Plan::new().cost(3))).build().unwrap();
    let assumed = call(&layer(&assumed).build().unwrap(), "new").await;
    assert_eq!(assumed.headers()["cost"], "3");

    // The closure that sees the request takes precedence; a value that the plan has as well cannot be set beside it.
    let own = layer(&plans).class_by(|_: &Name, _: &Parts| 0).cost_by(|_: &Parts| 4);
    let own = call(&own.build().unwrap(), "batch").await;
    assert_eq!(own.headers()["cost"], "4");
    for (built, word) in [
        (layer(&plans).each(2).build(), "each is set beside plan_cached"),
        (layer(&plans).weight_by(|_: &Name, _: &Parts| 2).build(), "weight_by is set beside"),
        (
            ConcurrencyLimitLayer::builder(&semaphore, "x").limit(1).plan_cached(&plans).build(),
            "plan_cached is set without a tenant",
        ),
    ] {
        let error = built.map(drop).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[tokio::test]
async fn an_operator_sets_a_tenants_cap_and_weight() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(4).wait_timeout(Duration::ZERO).build().unwrap();
    let ask = |tenant: &str| semaphore.acquire(Ask::of("openai").by(tenant).each(3), &policy);
    let change = |change| semaphore.set_tenant("openai", "acme", change);
    change(TenantChange::new().limit(1)).await.unwrap();
    change(TenantChange::new().weight(5)).await.unwrap();
    let set = semaphore.tenant_override_of("openai", "acme").await.unwrap();
    assert_eq!((set.limit, set.weight), (Some(1), Some(5)));
    let held = ask("acme").await.unwrap();
    assert!(ask("acme").await.is_err());
    drop(ask("other").await.unwrap());
    for _ in 0..2 {
        change(TenantChange::new().limit(None)).await.unwrap();
        let set = semaphore.tenant_override_of("openai", "acme").await.unwrap();
        assert_eq!((set.limit, set.weight), (None, Some(5)), "what is not named stays");
    }
    change(TenantChange::new().weight(None)).await.unwrap();
    drop(ask("acme").await.unwrap());
    change(TenantChange::new().limit(0)).await.unwrap();
    assert!(ask("acme").await.is_err(), "none at all");
    for weight in [0, 65] {
        let error = change(TenantChange::new().limit(9).weight(weight)).await.unwrap_err();
        assert_eq!(error.to_string(), format!("weight is {weight}; expected 1 to 64"));
    }
    let set = semaphore.tenant_override_of("openai", "acme").await.unwrap();
    assert_eq!((set.limit, set.weight), (Some(0), None), "all or nothing of what is not allowed");
    drop(held);
}

#[test]
fn what_cannot_be_meant_is_refused_when_it_is_built() {
    let semaphore = Semaphore::in_memory();
    let unset = || ConcurrencyLimitLayer::builder(&semaphore, "openai");
    let (builder, unlimited) = (|| unset().limit(4), || unset().limit(Limit::Unlimited));
    let fair = || builder().fair_by(TENANT);
    let class = |_: &Name, _: &Parts| 1;
    let weight = |_: &Name, _: &Parts| 1;
    for (built, word) in [
        (unlimited().cost_by(|_: &Parts| 1).build(), "cost_by"),
        (builder().weight_by(weight).build(), "weight_by"),
        (builder().class_by(class).build(), "class_by"),
        (builder().each(2).build(), "each"),
        (fair().each(0).build(), "each is 0"),
        (fair().headroom(1).build(), "class_by"),
        (fair().class_by(class).headroom(4).build(), "0 to 3"),
        (unlimited().fair_by(TENANT).build(), "fair_by"),
        (
            unlimited().on_response(feedback::retry_after).build(),
            "on_response is set on an unlimited layer",
        ),
        (fair().each(5).build(), "each is 5, more than the limit of 4 permits"),
        (builder().limit(4).build(), "limit is set by `limit` and again by `limit`"),
        (
            builder().limit_by(|_: &Name, _: &Parts| 4).build(),
            "limit is set by `limit` and again by `limit_by`",
        ),
        (
            fair().each(2).each_by(|_: &Name, _: &Parts| 2).build(),
            "each is set by `each` and again by `each_by`",
        ),
        (builder().key(TENANT).key(TENANT).build(), "key is set by `key` and again by `key`"),
        (
            builder().key(TENANT).key_async(|_: &Parts| async { Some("a") }).build(),
            "key is set by `key` and again by `key_async`",
        ),
        (
            builder().on_missing_key(MissingKey::Shared).build(),
            "on_missing_key is set without a key",
        ),
        (
            builder().on_unavailable(OnUnavailable::Local(5)).build(),
            "local share is 5, more than the limit of 4 permits",
        ),
    ] {
        let error = built.expect_err(word).to_string();
        assert!(error.contains(word), "{error}");
    }
    fair().class_by(class).headroom(3).build().expect("one permit is for all classes");
    Policy::builder(3).headroom(3).build().expect_err("nothing is left");
    fair().each(4).build().expect("a tenant alone may have all");
    fair().each(Limit::Unlimited).build().expect("no cap");
    builder().on_unavailable(OnUnavailable::Local(4)).build().expect("one process alone");
    unlimited().on_unavailable(OnUnavailable::Local(5)).build().expect("nothing is counted");
    let rated = unlimited().rate(60, Duration::from_secs(60));
    rated.on_response(feedback::retry_after).build().expect("a rate can be paused");
    let by_key = unset().limit_by(|_: &Name, _: &Parts| 4).on_unavailable(OnUnavailable::Local(5));
    by_key.build().expect("another key may have more");
}

#[test]
fn a_local_share_above_the_limit_is_refused_in_a_policy() {
    let share = |share| Policy::builder(4).on_unavailable(OnUnavailable::Local(share)).build();
    let error = share(5).unwrap_err().to_string();
    assert!(error.contains("local share is 5, more than the limit of 4 permits"), "{error}");
    share(4).expect("one process alone");
}

// ===== requests without a tenant =====

async fn call_without_tenant(
    layer: &ConcurrencyLimitLayer,
) -> Response<impl http_body::Body<Data = Bytes, Error: std::fmt::Debug> + use<>> {
    let service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from_static(b"x"))))
    }));
    service.oneshot(Request::new(())).await.unwrap()
}

async fn problem<B>(response: Response<B>) -> serde_json::Value
where
    B: http_body::Body<Data = Bytes, Error: std::fmt::Debug>,
{
    let body = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap()
}

#[tokio::test]
async fn a_request_without_a_tenant_is_a_bad_one_and_is_told_what_it_lacks() {
    let told = Told::new();
    let semaphore = Semaphore::in_memory();
    let fair = || ConcurrencyLimitLayer::builder(&semaphore, "openai").limit(4);
    let layer = fair().fair_by(TENANT).build().unwrap();
    for _ in 0..200 {
        let refused = call_without_tenant(&layer).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        assert!(refused.headers().get("retry-after").is_none());
        let text = refusal(&refused).to_string();
        assert_eq!(text, "the request has no tenant for openai: it has no x-tenant header");
        let problem = problem(refused).await;
        assert_eq!(problem["reason"], "missing_tenant");
        assert_eq!(problem["detail"], "the request has no x-tenant header");
    }
    assert_eq!(semaphore.inspect("openai").await.unwrap().in_use, 0);
    let warnings = || told.aloud();
    assert_eq!(warnings().len(), 1, "{:?}", warnings());
    let warning = &warnings()[0];
    assert_eq!(warning.level, tracing::Level::WARN);
    assert_eq!(warning.fields["layer"], "openai");
    assert!(warning.fields["extractor"].contains("HeaderKey"), "{warning:?}");

    // What an extension lacks is an error of the server.
    let layer = fair().fair_by(ExtensionKey::<String>::new()).build().unwrap();
    let refused = call_without_tenant(&layer).await;
    let text = refusal(&refused).to_string();
    assert!(text.starts_with("the request has no tenant for openai: "), "{text}");
    assert!(text.contains("ExtensionKey<alloc::string::String"), "{text}");
    let problem = problem(refused).await;
    assert_eq!((&problem["reason"], problem.get("detail")), (&"missing_tenant".into(), None));
    assert_eq!(warnings().len(), 2, "one of each layer");
}

#[tokio::test]
async fn a_request_without_a_tenant_can_be_told_otherwise() {
    let told = Told::new();
    let semaphore = Semaphore::in_memory();
    let fair = |missing| {
        let fair = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(4).fair_by(TENANT).each(1);
        fair.wait_timeout(Duration::ZERO).on_missing_tenant(missing).build()
    };
    let in_use = async || semaphore.inspect("x").await.unwrap().in_use;
    let reject = fair(MissingKey::Reject(StatusCode::FORBIDDEN)).unwrap();
    assert_eq!(call_without_tenant(&reject).await.status(), StatusCode::FORBIDDEN);
    assert_eq!(told.aloud().len(), 1);

    let bypass = fair(MissingKey::Bypass).unwrap();
    let passed = call_without_tenant(&bypass).await;
    assert_eq!((passed.status(), in_use().await), (StatusCode::OK, 0));

    let shared = fair(MissingKey::Shared).unwrap();
    let held = call_without_tenant(&shared).await;
    assert_eq!((held.status(), in_use().await), (StatusCode::OK, 1));
    let refused = call_without_tenant(&shared).await;
    assert_eq!(refusal(&refused).reason, RefusalReason::TenantLimit, "one tenant together");
    assert_eq!(told.aloud().len(), 1, "that was asked for");

    let error = fair(MissingKey::Reject(StatusCode::OK)).map(drop).unwrap_err().to_string();
    assert!(
        error.starts_with("status for a missing tenant is 200 OK") && error.contains("400 to 599"),
        "{error}"
    );
    let alone = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(4);
    let error = alone.on_missing_tenant(MissingKey::Shared).build().map(drop).unwrap_err();
    assert!(error.to_string().contains("fair_by"), "{error}");
}

#[tokio::test]
async fn a_layer_in_shadow_counts_requests_without_a_tenant() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(4).fair_by(TENANT);
    let layer = layer.shadow(true).build().unwrap();
    assert_eq!(call_without_tenant(&layer).await.status(), StatusCode::OK);
    let seen = layer.shadow_counts().unwrap();
    assert_eq!((seen.missing_tenant, seen.passed), (1, 0));
}

#[tokio::test]
async fn an_inspection_shows_tenants() {
    let backend = MemoryBackend::new();
    let [own, other] = [(); 2].map(|()| Semaphore::new(backend.clone()));
    let policy = Policy::new(3);
    let ask = |of: &Semaphore, ask: Ask| of.acquire(ask, &policy);
    let acme = || Ask::of("openai").by("acme").weight(2).each(2);
    let big = ask(&own, acme().cost(2)).await.unwrap();
    let small = ask(&other, Ask::of("openai").by("b/c")).await.unwrap();
    let waits = [ask(&own, acme()), ask(&other, Ask::of("openai").by("b/c"))];
    let nobody = ask(&other, Ask::of("openai"));

    for seen in [own.inspect("openai").await, own.inspect_fleet("openai").await] {
        let seen = seen.unwrap();
        assert_eq!((seen.in_use, seen.waiting), (3, 3));
        assert_eq!(seen.holders.iter().map(|one| one.cost).sum::<u32>(), 3);
        assert_eq!(seen.tenants.len(), 2);
        let acme = &seen.tenants[0];
        assert_eq!(acme.name, Some(Name::new("acme")));
        assert_eq!((acme.in_use, acme.waiting), (2, 1));
        assert_eq!((acme.weight, acme.each), (2, Some(2)));
        assert!(acme.longest_wait.is_some());
        let waits: Vec<_> =
            seen.waiters.iter().map(|one| (one.tenant, one.waited.is_some())).collect();
        assert_eq!(waits[0], (None, true), "those without a tenant first");
    }
    let alone = own.inspect("openai").await.unwrap();
    assert_eq!((&alone.tenants[1].name, alone.tenants[1].longest_wait), (&None, None));
    let fleet = own.inspect_fleet("openai").await.unwrap();
    assert_eq!(fleet.tenants[1].name, Some(Name::new("b/c")), "as the other process told");
    assert!(fleet.tenants[1].longest_wait.is_some());
    assert!(fleet.waiters.iter().all(|one| one.waited.is_some()));

    own.set_tenant("openai", "acme", TenantChange::new().limit(1)).await.unwrap();
    own.set_tenant("openai", "b/c", TenantChange::new().weight(3)).await.unwrap();
    let all = own.tenant_overrides().await.unwrap();
    let all: Vec<_> = all
        .iter()
        .map(|(name, tenant, set)| (name.as_str(), tenant.as_str(), set.limit, set.weight))
        .collect();
    assert_eq!(all, [("openai", "acme", Some(1), None), ("openai", "b%2Fc", None, Some(3))]);
    assert!(own.overrides().await.unwrap().is_empty(), "no names of their own");
    assert_eq!(own.inspect("openai").await.unwrap().tenants[0].set.limit, Some(1));
    drop((big, small, waits, nobody));
}

#[tokio::test]
async fn a_stopped_line_does_not_keep_what_is_free_from_others() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::new(4);
    let ask = |ask: Ask| semaphore.acquire(ask, &policy);
    let one = || Ask::of("x").by("a").each(1);
    let held = ask(one()).await.unwrap();
    let stopped = ask(one());
    let others: Vec<_> = futures_util::future::join_all((0..3).map(|_| ask(Ask::of("x")))).await;
    assert!(others.iter().all(Result::is_ok), "requests without a tenant pass it, too");
    drop(held);
    drop(stopped.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_cap_is_blamed_only_where_it_was_in_the_way() {
    let semaphore = Semaphore::in_memory();
    let long = Policy::builder(10).wait_timeout(Duration::from_secs(60)).build().unwrap();
    let short = Policy::builder(10).wait_timeout(Duration::from_secs(1)).build().unwrap();
    let refused = async |ask: Ask| match semaphore.acquire(ask, &short).await {
        Err(AcquireError::Rejected(rejected)) => rejected,
        other => panic!("{other:?}"),
    };
    let held = semaphore.acquire(Ask::of("x").by("a").cost(5), &long).await.unwrap();
    let big = semaphore.acquire(Ask::of("x").by("c").cost(8), &long);
    // Five are free, and kept for the large one.
    let waited = refused(Ask::of("x").by("b").each(4)).await;
    assert_eq!((waited.reason, waited.is_tenant_full), (RejectReason::QueueTimeout, false));
    drop((held, big));
    let own = semaphore.acquire(Ask::of("x").by("b").each(1), &long).await.unwrap();
    let waited = refused(Ask::of("x").by("b").each(1)).await;
    assert_eq!((waited.reason, waited.is_tenant_full), (RejectReason::QueueTimeout, true));
    drop(own);
    let refused = refused(Ask::of("x").by("b").each(0)).await;
    assert_eq!((refused.reason, refused.is_tenant_full), (RejectReason::TenantLimit, true));
}

#[tokio::test]
async fn requests_that_name_no_tenant_but_a_cost_are_of_no_tenant() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::new(4);
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(4).fair_by(TENANT);
    let layer = layer.on_missing_tenant(MissingKey::Shared).build().unwrap();
    let held = semaphore.acquire(Ask::of("x").cost(1), &policy).await.unwrap();
    let mut service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from_static(b"x"))))
    }));
    let kept = service.ready().await.unwrap().call(Request::new(())).await.unwrap();
    let seen = semaphore.inspect("x").await.unwrap();
    // Those of the layer are one tenant together.
    assert_eq!((seen.in_use, seen.tenants.len(), seen.tenants[0].in_use), (2, 1, 1));
    drop((held, kept));
}

#[tokio::test]
async fn a_tenant_at_its_cap_is_to_blame_even_where_all_share_the_pool() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "x")
        .limit(2)
        .fair_by(TENANT)
        .each(1)
        .wait_timeout(Duration::ZERO)
        .full_status(StatusCode::SERVICE_UNAVAILABLE)
        .build()
        .unwrap();
    let first = call_with(&layer, "a", "cost", 1).await;
    assert_eq!(call_with(&layer, "a", "cost", 1).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let second = call_with(&layer, "b", "cost", 1).await;
    assert_eq!((first.status(), second.status()), (StatusCode::OK, StatusCode::OK));
    let full = call_with(&layer, "c", "cost", 1).await;
    assert_eq!(full.status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn a_layer_in_shadow_tells_caps_and_costs_apart() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "x")
        .limit(4)
        .fair_by(TENANT)
        .each(1)
        .cost_by(|parts: &Parts| number(parts, "cost").max(1))
        .shadow(true)
        .build()
        .unwrap();
    let kept = [
        call_with(&layer, "a", "cost", 1).await,
        call_with(&layer, "a", "cost", 1).await,
        call_with(&layer, "b", "cost", 5).await,
    ];
    let seen = layer.shadow_counts().unwrap();
    assert_eq!((seen.passed, seen.tenant_limit, seen.cost_too_high, seen.full), (1, 1, 1, 0));
    drop(kept);
}
