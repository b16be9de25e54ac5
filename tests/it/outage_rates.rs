//! What a layer with a rate answers while Redis is away, by the process's own share.

use std::convert::Infallible;
use std::time::Duration;

use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::limit::{ConcurrencyLimitBuilder, Refusal, RefusalReason};
use tower_semaphore::{ConcurrencyLimitLayer, Limit, OnUnavailable, Semaphore};

use crate::support::redis::TestRedis;
use crate::support::semaphore::{down, warm};

const MINUTE: Duration = Duration::from_secs(60);

/// A semaphore whose Redis has just gone.
async fn without_redis() -> Semaphore {
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    redis.kill();
    down(&semaphore).await;
    semaphore
}

/// A layer that lets no request wait.
fn layer(semaphore: &Semaphore, limit: Limit, share: u32) -> ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, "api")
        .limit(limit)
        .rate(600, MINUTE)
        .on_unavailable(OnUnavailable::Local(share))
        .wait_timeout(Duration::ZERO)
}

/// Answers two requests, the second before the first response is read if `at_once`. Returns what the second, which is
/// refused, is told: the refusal, the header fields, the problem document.
async fn second(
    layer: ConcurrencyLimitBuilder,
    at_once: bool,
) -> (Refusal, HeaderMap, serde_json::Value) {
    let mut service = layer.build().unwrap().layer(service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new("served".to_owned()))
    }));
    let first = service.ready().await.unwrap().call(Request::new(())).await.unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    let first = if at_once { Some(first) } else { None };
    let refused = service.ready().await.unwrap().call(Request::new(())).await.unwrap();
    drop(first);
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal = refused.extensions().get::<Refusal>().unwrap().clone();
    let (head, body) = refused.into_parts();
    let problem = serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
    (refusal, head.headers, problem)
}

#[tokio::test]
async fn a_request_that_the_part_of_a_smooth_rate_keeps_back_is_told_of_the_rate() {
    let semaphore = without_redis().await;
    // Ten of 600 a minute, with a limit or without: one each 6 s.
    for (limit, policies) in [
        (Limit::Permits(600), "\"api\";q=600;qu=\"concurrent-requests\", \"api/rate\";q=600;w=60"),
        (Limit::Unlimited, "\"api/rate\";q=600;w=60"),
    ] {
        let layer = layer(&semaphore, limit, 10).key(move |_: &_| Some(format!("{limit:?}")));
        let (refusal, headers, problem) = second(layer.smooth(), false).await;
        assert_eq!(refusal.reason, RefusalReason::Rate, "{limit:?}");
        let text = refusal.to_string();
        assert!(text.contains("as the rate allows, 600/60s; the next can in "), "{text}");
        assert_eq!(headers["ratelimit-policy"], policies);
        assert_eq!(headers["ratelimit"], "\"api/rate\";r=0;t=6");
        let after: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((6..=7).contains(&after), "{after}");
        assert_eq!(problem["violated-policies"][0], "api/rate");
    }
}

#[tokio::test]
async fn without_a_limit_a_share_in_use_is_not_told_as_a_policy_that_there_is_not() {
    let semaphore = without_redis().await;
    let layer = layer(&semaphore, Limit::Unlimited, 1);
    let (refusal, headers, problem) = second(layer, true).await;
    assert_eq!(refusal.reason, RefusalReason::Limit);
    assert_eq!(refusal.to_string(), "no permit of api is free");
    assert_eq!(headers["ratelimit-policy"], "\"api/rate\";q=600;w=60");
    assert_eq!(headers.get("ratelimit"), None);
    assert_eq!(problem.get("violated-policies"), None);
}
