//! Layers with several limits in one step.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt, service_fn};
#[cfg(feature = "redis")]
use tower_semaphore::OnUnavailable;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, HeaderKey, Refusal, RefusalReason};
use tower_semaphore::{
    AcquireError, Ask, ConcurrencyLimitLayer, Limit, Name, Policy, RejectReason, Semaphore,
};

const TENANT: HeaderKey = HeaderKey::from_static("x-tenant");
const MODEL: HeaderKey = HeaderKey::from_static("x-model");

fn route(parts: &Parts) -> Option<String> {
    Some(parts.uri.path().to_owned())
}

fn builder(semaphore: &Semaphore) -> ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, "llm").limit(10).wait_timeout(Duration::ZERO)
}

/// A request that holds its permit while the response is kept.
async fn call(
    layer: &ConcurrencyLimitLayer,
    path: &str,
    headers: &[(&str, &str)],
) -> Response<impl http_body::Body<Data = Bytes, Error: std::fmt::Debug> + use<>> {
    let mut service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"x"))))
    }));
    let request = Request::builder().uri(path);
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    service.ready().await.unwrap().call(request.body(()).unwrap()).await.unwrap()
}

#[tokio::test]
async fn a_full_route_is_named_and_the_others_of_the_tenant_go_on() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).fair_by(TENANT).also("route", route, 2).build().unwrap();
    let acme = [("x-tenant", "acme")];
    let held = [call(&layer, "/chat", &acme).await, call(&layer, "/chat", &acme).await];
    let refused = call(&layer, "/chat", &[("x-tenant", "other")]).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.reason, RefusalReason::FurtherLimit);
    assert_eq!(refusal.to_string(), "all 2 permits of llm that its route limit allows are in use");
    assert_eq!(
        refused.headers()["ratelimit-policy"],
        "\"llm\";q=10;qu=\"concurrent-requests\", \"llm/route\";q=2;qu=\"concurrent-requests\""
    );
    assert_eq!(refused.headers()["ratelimit"], "\"llm/route\";r=0");
    assert!(refused.headers().contains_key("retry-after"));
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["reason"], "further_limit");
    assert_eq!(problem["detail"], "all permits of llm that its route limit allows are in use");
    assert_eq!(problem["violated-policies"], serde_json::json!(["llm/route"]));
    assert_eq!(call(&layer, "/other", &acme).await.status(), StatusCode::OK);
    drop(held);
    assert_eq!(call(&layer, "/chat", &acme).await.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_wait_in_vain_for_a_full_route_says_so() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "llm").limit(10).also("route", route, 1);
    let layer = layer.wait_timeout(Duration::from_secs(1)).build().unwrap();
    let _held = call(&layer, "/chat", &[]).await;
    let refused = call(&layer, "/chat", &[]).await;
    assert_eq!(refused.headers()["ratelimit"], "\"llm/route\";r=0");
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["reason"], "queue_timeout");
    assert_eq!(problem["violated-policies"], serde_json::json!(["llm/route"]));
    assert_eq!(
        problem["detail"],
        "no permit of llm came free within 1.0 s; its route limit was full when it began to wait"
    );
}

#[tokio::test]
async fn a_request_without_a_value_does_not_count_under_that_limit() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).also("model", MODEL, 1).build().unwrap();
    let opus = [("x-model", "opus")];
    let _held = call(&layer, "/", &opus).await;
    assert_eq!(call(&layer, "/", &opus).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(call(&layer, "/", &[]).await.status(), StatusCode::OK);
    assert_eq!(call(&layer, "/", &[("x-model", "haiku")]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_cap_can_depend_on_the_value_and_the_request() {
    let semaphore = Semaphore::in_memory();
    let cap = |model: &Name, parts: &Parts| match model.as_str() {
        "none" => Limit::Permits(0),
        "any" => Limit::Unlimited,
        _ if parts.headers.contains_key("x-plan") => Limit::Permits(2),
        _ => Limit::Permits(1),
    };
    let layer = builder(&semaphore).also_by("model", MODEL, cap).build().unwrap();
    let refused = call(&layer, "/", &[("x-model", "none")]).await;
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.reason, RefusalReason::FurtherLimit);
    assert_eq!(refusal.to_string(), "the request may have no permits of llm: its model limit is 0");
    let _any = [
        call(&layer, "/", &[("x-model", "any")]).await,
        call(&layer, "/", &[("x-model", "any")]).await,
    ];
    let _one = call(&layer, "/", &[("x-model", "opus")]).await;
    assert_eq!(call(&layer, "/", &[("x-model", "opus")]).await.status(), 429);
    let paid = [("x-model", "opus"), ("x-plan", "paid")];
    assert_eq!(call(&layer, "/", &paid).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn without_a_limit_of_its_own_a_layer_counts_the_others() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "routes")
        .limit(Limit::Unlimited)
        .also("route", route, 1)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let _held = call(&layer, "/chat", &[]).await;
    let refused = call(&layer, "/chat", &[]).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(
        refused.headers()["ratelimit-policy"],
        "\"routes/route\";q=1;qu=\"concurrent-requests\""
    );
    assert_eq!(call(&layer, "/other", &[]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_shadow_counts_what_a_further_limit_would_keep_back() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).also("route", route, 1).shadow(true).build().unwrap();
    let _held = [call(&layer, "/chat", &[]).await, call(&layer, "/chat", &[]).await];
    let counts = layer.shadow_counts().unwrap();
    assert_eq!((counts.passed, counts.further_limit, counts.full), (1, 1, 0));
}

#[tokio::test]
async fn what_cannot_be_meant_is_an_error_of_the_builder() {
    let semaphore = Semaphore::in_memory();
    let error = |of: fn(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder| {
        of(builder(&semaphore)).build().unwrap_err().to_string()
    };
    let four = error(|layer| {
        ["a", "b", "c", "d"].into_iter().fold(layer, |layer, name| layer.also(name, MODEL, 1))
    });
    assert_eq!(four, "also is called 4 times; expected at most 3 further limits");
    let twice = error(|layer| layer.also("model", MODEL, 1).also("model", TENANT, 1));
    assert_eq!(twice, "two further limits are called \"model\"; expected a name for each");
    for name in ["", "each", "rate", "a b", "\u{fc}"] {
        let layer = builder(&semaphore).also(name, MODEL, 1);
        let error = layer.build().unwrap_err().to_string();
        assert!(error.starts_with(&format!("the name of a further limit is {name:?}")), "{error}");
    }
    let none = error(|layer| layer.also("model", MODEL, 0));
    assert!(none.starts_with("the model limit is 0, which rejects every request"), "{none}");
    let more = error(|layer| layer.also("model", MODEL, 11));
    assert!(more.starts_with("the model limit is 11, more than the limit of 10"), "{more}");
    assert!(builder(&semaphore).also("model", MODEL, Limit::Unlimited).build().is_ok());
}

#[tokio::test]
async fn too_many_limits_of_a_request_are_an_error_that_says_so() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::new(5);
    let four = ["a", "b", "c", "d"].into_iter();
    let four = four.fold(Ask::of("x"), |ask, limit| ask.also(limit, "v", 1));
    let twice = Ask::of("x").also("a", "v", 1).also("a", "w", 1);
    for ask in [four, twice] {
        let error = semaphore.acquire(ask, &policy).await.unwrap_err();
        let AcquireError::Rejected(rejected) = &error else { panic!("{error}") };
        assert_eq!(rejected.reason, RejectReason::InvalidLimits);
        assert_eq!(
            error.to_string(),
            "the request names more than 3 further limits or 2 budgets, or one of them twice"
        );
    }
}

/// While the backend is away, each process applies the caps to its own requests.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_local_share_observes_further_limits() {
    let semaphore = Semaphore::redis("redis://127.0.0.1:1/").unwrap();
    let policy = Policy::builder(9).on_unavailable(OnUnavailable::Local(3));
    let policy = policy.wait_timeout(Duration::from_secs(5)).build().unwrap();
    let ask = |route: &str| Ask::of("x").also("route", route, 1);
    let held = semaphore.acquire(ask("/a"), &policy).await.unwrap();
    let waits = tokio::spawn(semaphore.acquire(ask("/a"), &policy));
    let other = semaphore.acquire(ask("/b"), &policy).await.expect("it needs another limit");
    let now = Policy::builder(9).on_unavailable(OnUnavailable::Local(3));
    let now = now.wait_timeout(Duration::ZERO).build().unwrap();
    let error = semaphore.acquire(ask("/b"), &now).await.unwrap_err();
    assert!(
        matches!(&error, AcquireError::Rejected(of) if of.limit_name() == Some("route")),
        "{error}"
    );
    drop(held);
    drop((waits.await.unwrap().unwrap(), other));
}
