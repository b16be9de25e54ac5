//! The response to a rejected client, field by field, as curl sees it; and the errors of invalid settings.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::response::IntoResponse;
use axum::routing::get;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{Empty, Full};
use serde_json::json;
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{
    BoxError, ConcurrencyLimitBuilder, ExactStatus, HeaderKey, MissingKey, PathKey, PeerIpKey,
    Refusal, RefusalBody, RefusalReason,
};
use tower_semaphore::{ConcurrencyLimitLayer, Name, Permit, Policy, Semaphore};

use crate::support::eventually;
use crate::support::http::{Reply, Server, curl};
#[cfg(feature = "redis")]
use crate::support::redis::TestRedis;

const NAME: &str = "llm-provider";
const QUOTA: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// A server behind one layer, whose permits another process can take.
struct Bench {
    semaphore: Semaphore,
    server: Server,
}

impl Bench {
    /// No request may wait, unless set.
    async fn new(set: impl FnOnce(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder) -> Self {
        Self::on(Semaphore::in_memory(), set).await
    }

    async fn on(
        semaphore: Semaphore,
        set: impl FnOnce(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder,
    ) -> Self {
        let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).wait_timeout(Duration::ZERO);
        let layer = set(builder).build().unwrap();
        let router = Router::new().route("/", get(async || "served")).layer(layer);
        Self { semaphore, server: Server::start(router).await }
    }

    /// Takes all permits of the layer's name.
    async fn fill(&self, limit: u32) -> Vec<Permit> {
        let policy = Policy::new(limit);
        let mut permits = Vec::new();
        for _ in 0..limit {
            permits.push(self.semaphore.try_acquire(NAME, &policy).await.unwrap());
        }
        permits
    }

    async fn curl(&self, args: &[&str]) -> Reply {
        curl(&self.server.url("/"), args).await
    }
}

/// Returns `Retry-After`, in whole seconds.
fn retry_after(reply: &Reply) -> u64 {
    let value = reply.header("retry-after").expect("Retry-After");
    assert!(value.bytes().all(|byte| byte.is_ascii_digit()), "{value:?}");
    value.parse().unwrap()
}

fn assert_problem(reply: &Reply) {
    assert_eq!(reply.header("content-type"), Some("application/problem+json"));
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    assert_eq!(reply.header("content-length"), Some(&*reply.body.len().to_string()));
    let problem = reply.json();
    assert_eq!(problem["status"], reply.status);
    assert!(problem["title"].as_str().is_some_and(|title| !title.is_empty()), "{problem}");
}

fn assert_no_rate_limit_fields(reply: &Reply) {
    assert_eq!(reply.header("ratelimit"), None);
    assert_eq!(reply.header("ratelimit-policy"), None);
}

// ===== full =====

#[tokio::test]
async fn a_full_semaphore_is_told_in_every_field() {
    let bench = Bench::new(|layer| layer.limit(10)).await;
    assert_eq!(bench.curl(&[]).await.status, 200);
    let permits = bench.fill(10).await;

    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 429);
    assert_problem(&reply);
    assert!((1..=2).contains(&retry_after(&reply)));
    assert_eq!(
        reply.header("ratelimit-policy"),
        Some("\"llm-provider\";q=10;qu=\"concurrent-requests\"")
    );
    assert_eq!(reply.header("ratelimit"), Some("\"llm-provider\";r=0"));
    assert_eq!(
        reply.json(),
        json!({
            "type": QUOTA,
            "title": "Too many requests are in flight",
            "status": 429,
            "detail": "all permits of llm-provider are in use",
            "violated-policies": [NAME],
            "reason": "limit",
            "ahead": 0,
        })
    );

    drop(permits);
    let reply = bench.curl(&[]).await;
    assert_eq!((reply.status, &*reply.body), (200, "served"));
    assert_no_rate_limit_fields(&reply);
    assert_eq!(reply.header("retry-after"), None);
}

#[tokio::test]
async fn a_head_request_is_refused_without_a_body() {
    let bench = Bench::new(|layer| layer.limit(0)).await;
    let reply = bench.curl(&["-I"]).await;
    assert_eq!((reply.status, &*reply.body), (429, ""));
    assert!(reply.header("content-length").is_some_and(|length| length != "0"));
}

#[tokio::test]
async fn a_full_queue_is_told() {
    let bench =
        Bench::new(|layer| layer.limit(1).wait_timeout(Duration::from_secs(30)).max_queue(1)).await;
    let permits = bench.fill(1).await;
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(30)).build().unwrap();
    let waiting = bench.semaphore.acquire(NAME, &policy);
    assert_eq!(bench.semaphore.inspect(NAME).await.unwrap().waiting, 1);

    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 429);
    assert_problem(&reply);
    assert_eq!(reply.json()["reason"], "queue_full");
    assert_eq!(reply.json()["title"], "Too many requests are waiting");
    assert_eq!(reply.json()["detail"], "the queue of llm-provider is full");
    assert_eq!(reply.json()["type"], QUOTA);
    assert_eq!(reply.header("ratelimit"), Some("\"llm-provider\";r=0"));
    drop((waiting, permits));
}

#[tokio::test]
async fn waiting_in_vain_is_told() {
    let bench = Bench::new(|layer| layer.limit(1).wait_timeout(Duration::from_millis(300))).await;
    let permits = bench.fill(1).await;
    let began = Instant::now();
    let reply = bench.curl(&[]).await;
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert_eq!(reply.status, 429);
    assert_problem(&reply);
    assert_eq!(reply.json()["reason"], "queue_timeout");
    assert_eq!(reply.json()["title"], "Too many requests are in flight");
    assert_eq!(reply.json()["detail"], "no permit of llm-provider came free within 0.3 s");
    drop(permits);
}

#[tokio::test]
async fn waiting_is_rewarded_when_a_permit_comes_free() {
    let bench = Bench::new(|layer| layer.limit(1).wait_timeout(Duration::from_secs(20))).await;
    let permits = bench.fill(1).await;
    let semaphore = bench.semaphore.clone();
    let free = tokio::spawn(async move {
        eventually("it waits", async || semaphore.inspect(NAME).await.unwrap().waiting == 1).await;
        drop(permits);
    });
    assert_eq!(bench.curl(&[]).await.status, 200);
    free.await.unwrap();
}

#[tokio::test]
async fn the_time_to_come_back_is_jittered() {
    // One curl for many requests; their responses follow each other.
    let bench = Bench::new(|layer| layer.limit(0).retry_after(Duration::from_secs(100))).await;
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..12 {
        seen.insert(retry_after(&bench.curl(&[]).await));
    }
    assert!(seen.first() >= Some(&100) && seen.last() <= Some(&200), "{seen:?}");
    // Twelve out of a hundred: it does not happen by chance that only three differ.
    assert!(seen.len() > 3, "{seen:?}");
}

#[tokio::test]
async fn by_default_to_come_back_is_in_one_or_two_seconds() {
    let bench = Bench::new(|layer| layer.limit(0)).await;
    let mut seen = std::collections::BTreeSet::new();
    // All equal by chance: once in 2^29.
    for _ in 0..30 {
        seen.insert(retry_after(&bench.curl(&[]).await));
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 2]);
}

#[tokio::test]
async fn to_come_back_at_once_is_a_second_all_the_same() {
    for pause in [Duration::ZERO, Duration::from_millis(10)] {
        let bench = Bench::new(|layer| layer.limit(0).retry_after(pause)).await;
        assert_eq!(retry_after(&bench.curl(&[]).await), 1);
    }
}

// ===== settings =====

#[tokio::test]
async fn rate_limit_fields_can_be_left_out() {
    let bench = Bench::new(|layer| layer.limit(0).rate_limit_fields(false)).await;
    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 429);
    assert_problem(&reply);
    assert_no_rate_limit_fields(&reply);
    assert!(reply.header("retry-after").is_some());
}

#[tokio::test]
async fn a_shared_pool_answers_503_if_so_set() {
    let bench =
        Bench::new(|layer| layer.limit(0).full_status(StatusCode::SERVICE_UNAVAILABLE)).await;
    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 503);
    assert_problem(&reply);
    assert!((1..=2).contains(&retry_after(&reply)));
    assert_eq!(reply.header("ratelimit"), Some("\"llm-provider\";r=0"));
    assert_eq!(
        reply.json(),
        json!({
            "type": CAPACITY,
            "title": "Too many requests are in flight",
            "status": 503,
            "detail": "the limit of llm-provider is 0",
            "violated-policies": [NAME],
            "reason": "limit",
        })
    );
}

#[tokio::test]
async fn a_semaphore_that_an_operator_stopped_does_not_blame_the_client() {
    for wait in [Duration::ZERO, Duration::from_millis(20)] {
        let bench = Bench::new(|layer| layer.limit(3).wait_timeout(wait)).await;
        bench.semaphore.pause(NAME).await.unwrap();
        let paused = bench.curl(&[]).await;
        bench.semaphore.resume(NAME).await.unwrap();
        bench.semaphore.set_limit(NAME, 0).await.unwrap();
        for reply in [paused, bench.curl(&[]).await] {
            assert_eq!(reply.status, 503);
            assert_problem(&reply);
            assert!((1..=2).contains(&retry_after(&reply)));
            assert_no_rate_limit_fields(&reply);
            assert_eq!(
                reply.json(),
                json!({
                    "type": "about:blank",
                    "title": "Service Unavailable",
                    "status": 503,
                    "detail": "an operator paused llm-provider",
                    "reason": "paused",
                })
            );
        }
    }
}

#[tokio::test]
async fn a_closure_can_answer_in_its_own_words() {
    let bench = Bench::new(|layer| {
        layer.limit(0).refusal(|refusal: &Refusal| {
            let text = format!("{}: {}", refusal.policy, refusal.reason.as_str());
            Response::builder()
                .status(418)
                .header("x-own", "yes")
                .body(Full::<Bytes>::from(text))
                .unwrap()
        })
    })
    .await;
    let reply = bench.curl(&[]).await;
    assert_eq!((reply.status, &*reply.body), (418, "llm-provider: limit"));
    assert_eq!(reply.header("x-own"), Some("yes"));
    // Nothing is added to it.
    assert_no_rate_limit_fields(&reply);
    assert_eq!(reply.header("retry-after"), None);
}

#[tokio::test]
async fn a_closure_can_say_200_and_it_is_a_rejection_all_the_same() {
    let bench = Bench::new(|layer| {
        layer.limit(0).refusal(|_: &Refusal| ExactStatus(axum::Json(json!({ "errors": [] }))))
    })
    .await;
    let reply = bench.curl(&[]).await;
    assert_eq!((reply.status, reply.json()), (200, json!({ "errors": [] })));

    // Layers further out know it by its mark.
    let semaphore = Semaphore::in_memory();
    let inner = ConcurrencyLimitLayer::builder(&semaphore, "inner")
        .limit(0)
        .refusal(|_: &Refusal| ExactStatus(Response::new(String::new())));
    let outer = ConcurrencyLimitLayer::builder(&semaphore, "outer").limit(1).build().unwrap();
    let handler = tower::service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(Response::new(String::new()))
    });
    let inside = inner.build().unwrap().layer(handler);
    let response = outer.layer(inside.clone()).oneshot(Request::new(())).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.extensions().get::<Refusal>().is_some());
    assert_eq!(semaphore.inspect("outer").await.unwrap().in_use, 0, "its body needs no permit");
    let error = outer.into_error().layer(inside).oneshot(Request::new(())).await.unwrap_err();
    assert_eq!(&*error.downcast_ref::<Refusal>().unwrap().policy, "inner");
}

#[tokio::test]
async fn a_closure_can_answer_as_an_axum_handler_does() {
    let bench = Bench::new(|layer| {
        layer.limit(0).refusal(|refusal: &Refusal| {
            (
                refusal.status,
                axum::Json(json!({ "limit": refusal.rejected.as_ref().map(|it| it.limit) })),
            )
                .into_response()
        })
    })
    .await;
    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 429);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(reply.json(), json!({ "limit": 0 }));
}

#[tokio::test]
async fn a_closure_can_leave_some_refusals_to_the_default() {
    let bench = Bench::new(|layer| {
        layer.limit(1).key(HeaderKey::from_static("x-tenant")).rate_limit_fields(false).refusal(
            |refusal: &Refusal| match refusal.reason {
                RefusalReason::MissingKey => Response::new(RefusalBody::from("who?".to_owned())),
                _ => refusal.response(),
            },
        )
    })
    .await;
    let own = bench.curl(&[]).await;
    assert_eq!((own.status, &*own.body), (400, "who?"));
    let name = Name::new(NAME).part("acme");
    let permit = bench.semaphore.acquire(name, &Policy::new(1)).await.unwrap();
    let default = bench.curl(&["-H", "x-tenant: acme"]).await;
    assert_eq!(default.status, 429);
    assert_problem(&default);
    assert!((1..=2).contains(&retry_after(&default)));
    assert_eq!(default.json()["reason"], "limit");
    assert_no_rate_limit_fields(&default);
    drop(permit);
}

#[tokio::test]
async fn a_handler_can_pass_on_the_refusal_of_its_client() {
    let semaphore = Semaphore::in_memory();
    let client = ConcurrencyLimitLayer::builder(&semaphore, NAME)
        .limit(0)
        .build()
        .unwrap()
        .into_error()
        .layer(tower::service_fn(async |_: Request<()>| {
            Ok::<_, BoxError>(Response::new(Full::<Bytes>::default()))
        }));
    let client = BoxCloneSyncService::new(client);
    let handler = get(async move || match client.oneshot(Request::new(())).await {
        Ok(_) => StatusCode::OK.into_response(),
        Err(error) => error.downcast::<Refusal>().expect("a refusal").into_response(),
    });
    let server = Server::start(Router::new().route("/", handler)).await;
    let reply = curl(&server.url("/"), &[]).await;
    assert_eq!(reply.status, 429);
    assert_problem(&reply);
    assert!((1..=2).contains(&retry_after(&reply)));
    assert_eq!(reply.header("ratelimit"), Some("\"llm-provider\";r=0"));
    assert_eq!(reply.json()["reason"], "limit");
}

#[tokio::test]
async fn layers_around_it_see_the_refusal() {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, NAME)
        .key(HeaderKey::from_static("x-tenant"))
        .limit(3)
        .wait_timeout(Duration::ZERO)
        .refusal(|_: &Refusal| Response::new(Empty::<Bytes>::new()))
        .build()
        .unwrap();
    let seen: Arc<Mutex<Vec<Refusal>>> = Arc::default();
    let around = Arc::clone(&seen);
    let router = Router::new().route("/", get(async || "served")).layer(layer).layer(
        axum::middleware::map_response(move |response: axum::response::Response| {
            around.lock().unwrap().extend(response.extensions().get::<Refusal>().cloned());
            std::future::ready(response)
        }),
    );
    let server = Server::start(router).await;
    curl(&server.url("/"), &["-H", "x-tenant: acme"]).await;
    assert!(seen.lock().unwrap().is_empty());

    let name = Name::new(NAME).part("acme");
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(semaphore.try_acquire(name.clone(), &Policy::new(3)).await.unwrap());
    }
    curl(&server.url("/"), &["-H", "x-tenant: acme"]).await;
    curl(&server.url("/"), &[]).await;
    let seen = seen.lock().unwrap();
    let [full, missing] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!(&*full.policy, NAME);
    assert_eq!(full.key.as_ref().unwrap().as_str(), "acme");
    assert_eq!(full.reason, RefusalReason::Limit);
    assert!(full.reason.is_full());
    assert_eq!(full.status, StatusCode::TOO_MANY_REQUESTS);
    let said = full.rejected.as_ref().unwrap();
    assert_eq!((said.limit, said.in_use, said.waiting), (3, Some(3), Some(0)));
    assert!(full.retry_after.is_some_and(|pause| pause >= Duration::from_secs(1)));
    assert!(full.error.is_none());
    assert_eq!(missing.reason, RefusalReason::MissingKey);
    assert_eq!((&missing.key, missing.retry_after), (&None, None));
}

// ===== no key =====

#[tokio::test]
async fn a_request_without_a_key_is_a_bad_one() {
    let bench = Bench::new(|layer| layer.limit(1).key(HeaderKey::from_static("x-tenant"))).await;
    assert_eq!(bench.curl(&["-H", "x-tenant: acme"]).await.status, 200);
    // curl sends a header that is present but empty if it ends with a semicolon.
    assert_eq!(bench.curl(&["-H", "x-tenant;"]).await.status, 200);

    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 400);
    assert_problem(&reply);
    assert_no_rate_limit_fields(&reply);
    // Repeating it unchanged makes no sense.
    assert_eq!(reply.header("retry-after"), None);
    assert_eq!(
        reply.json(),
        json!({
            "type": "about:blank",
            "title": "Bad Request",
            "status": 400,
            "detail": "the request has no x-tenant header",
            "reason": "missing_key",
        })
    );
}

#[tokio::test]
async fn a_request_without_a_key_can_be_refused_with_another_status() {
    let bench = Bench::new(|layer| {
        layer
            .limit(1)
            .key(HeaderKey::from_static("x-tenant"))
            .on_missing_key(MissingKey::Reject(StatusCode::UNAUTHORIZED))
    })
    .await;
    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 401);
    assert_eq!(reply.json()["title"], "Unauthorized");
}

// ===== no Redis =====

#[cfg(feature = "redis")]
fn assert_unavailable(reply: &Reply) {
    assert_eq!(reply.status, 503);
    assert_problem(reply);
    assert!((1..=2).contains(&retry_after(reply)));
    assert_no_rate_limit_fields(reply);
    assert_eq!(
        reply.json(),
        json!({
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": 503,
            "detail": "permits of llm-provider cannot be counted",
            "reason": "unavailable",
        })
    );
}

/// Handles requests that come while Redis cannot be reached. Each is answered in bounded time.
#[cfg(feature = "redis")]
async fn all_unavailable(bench: &Bench) {
    for _ in 0..5 {
        let began = Instant::now();
        assert_unavailable(&bench.curl(&[]).await);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(3), "{took:?}");
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn while_redis_is_away_requests_are_answered_503_and_then_served_again() {
    let mut redis = TestRedis::start();
    redis.kill();
    // It was never there.
    let bench =
        Bench::on(redis.semaphore(), |layer| layer.limit(1).wait_timeout(Duration::from_secs(10)))
            .await;
    for _ in 0..2 {
        all_unavailable(&bench).await;
        redis.restart();
        let back = Instant::now();
        loop {
            let reply = bench.curl(&[]).await;
            if reply.status == 200 {
                break;
            }
            assert_unavailable(&reply);
            assert!(back.elapsed() < Duration::from_secs(10), "not served again");
        }
        // From then on without exception.
        for _ in 0..5 {
            assert_eq!(bench.curl(&[]).await.status, 200);
        }
        eventually("nothing is stored", async || redis.keys() == 0).await;
        redis.kill();
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_redis_that_answers_with_something_else_is_no_500() {
    // A listener that accepts connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", silent.local_addr().unwrap());
    let bench = Bench::on(Semaphore::redis(&url).unwrap(), |layer| layer.limit(1)).await;
    all_unavailable(&bench).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn an_own_response_sees_why_redis_could_not_be_asked() {
    let port = crate::support::redis::free_port();
    let url = format!("redis://:hunter2@127.0.0.1:{port}/");
    let bench = Bench::on(Semaphore::redis(&url).unwrap(), |layer| {
        layer.limit(1).refusal(|refusal: &Refusal| {
            let error = refusal.error.as_ref().expect("an error");
            (refusal.status, format!("{error} / {error:?}")).into_response()
        })
    })
    .await;
    let reply = bench.curl(&[]).await;
    assert_eq!(reply.status, 503);
    assert!(reply.body.contains("could not be reached"), "{}", reply.body);
    assert!(!reply.body.contains("hunter2"), "{}", reply.body);
}

// ===== settings that cannot be used =====

fn build(
    set: impl FnOnce(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder,
) -> Result<(), String> {
    let semaphore = Semaphore::new(MemoryBackend::new());
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1);
    set(builder).build().map(drop).map_err(|error| error.to_string())
}

/// A message names the setting, the value and what is allowed.
fn assert_told(result: Result<(), String>, words: &[&str]) {
    let message = result.expect_err("it was accepted");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
    assert!(message.contains("; expected "), "{message:?}");
    assert!(!message.contains('\n'), "{message:?}");
}

#[test]
fn a_layers_name_must_be_short_and_plain() {
    let semaphore = Semaphore::in_memory();
    let named = |name: &str| {
        let layer = ConcurrencyLimitLayer::builder(&semaphore, name).limit(1).build();
        layer.map(drop).map_err(|error| error.to_string())
    };
    let long = "n".repeat(41);
    for name in ["", "a b", "a:b", "a\"b", "a{b}", "ä", "a\r\nb", &long] {
        assert_told(named(name), &["name", &format!("{name:?}"), "1 to 40", "A-Z a-z 0-9 . _ -"]);
    }
    for name in ["a", "A.b_c-9", &long[1..]] {
        assert_eq!(named(name), Ok(()));
    }
}

#[test]
fn a_status_must_refuse() {
    for status in [100, 200, 302, 399, 600, 999] {
        let status = StatusCode::from_u16(status).unwrap();
        let words = [status.as_str(), "400 to 599"];
        assert_told(
            build(|layer| layer.full_status(status)),
            &[&words[..], &["full status"]].concat(),
        );
        assert_told(
            build(|layer| layer.key(PathKey).on_missing_key(MissingKey::Reject(status))),
            &[&words[..], &["missing key"]].concat(),
        );
    }
    for status in [400, 429, 499, 500, 599] {
        let status = StatusCode::from_u16(status).unwrap();
        assert_eq!(build(|layer| layer.full_status(status)), Ok(()));
        assert_eq!(
            build(|layer| layer.key(PathKey).on_missing_key(MissingKey::Reject(status))),
            Ok(())
        );
    }
}

#[test]
fn times_must_be_in_their_range() {
    let ms = Duration::from_millis;
    for (lease, shown) in [
        (Duration::ZERO, "0ns"),
        (ms(499), "499ms"),
        (Policy::MAX_LEASE + ms(1), "86400.001s"),
        (Duration::MAX, "s"),
    ] {
        assert_told(build(|layer| layer.lease(lease)), &["lease", shown, "500ms", "86400s"]);
    }
    for lease in [Policy::MIN_LEASE, Policy::MAX_LEASE] {
        assert_eq!(build(|layer| layer.lease(lease)), Ok(()));
    }

    let wait = Policy::MAX_WAIT_TIMEOUT + ms(1);
    assert_told(
        build(|layer| layer.wait_timeout(wait)),
        &["wait timeout", "3600.001s", "0 (reject at once)", "3600s"],
    );
    for wait in [Duration::ZERO, Policy::MAX_WAIT_TIMEOUT] {
        assert_eq!(build(|layer| layer.wait_timeout(wait)), Ok(()));
    }

    let pause = Duration::from_secs(86_401);
    assert_told(build(|layer| layer.retry_after(pause)), &["retry after", "86401s", "86400s"]);
    for pause in [Duration::ZERO, Duration::from_secs(86_400)] {
        assert_eq!(build(|layer| layer.retry_after(pause)), Ok(()));
    }
}

#[test]
fn a_limit_must_be_set() {
    let semaphore = Semaphore::in_memory();
    let layer = || ConcurrencyLimitLayer::builder(&semaphore, NAME);
    let none = layer().build().map(drop).map_err(|error| error.to_string());
    assert_told(none, &["limit", "not set", "Limit::Unlimited"]);
    assert!(layer().limit(0).build().is_ok() && layer().limit(u32::MAX).build().is_ok());
}

#[test]
fn an_ipv6_prefix_has_1_to_128_bits() {
    for bits in [0, 129, 255] {
        let key = PeerIpKey::from_extension()
            .ipv6_prefix(bits)
            .map(drop)
            .map_err(|error| error.to_string());
        assert_told(key, &["IPv6 prefix", &bits.to_string(), "1 to 128"]);
    }
    for bits in [1, 128] {
        assert!(PeerIpKey::from_extension().ipv6_prefix(bits).is_ok());
    }
}

#[cfg(feature = "redis")]
#[test]
fn a_redis_url_that_cannot_be_used_keeps_its_password() {
    for url in [
        "",
        "nonsense hunter2",
        "http://user:hunter2@localhost/",
        "redis://user:hunter2@localhost:port/",
        "redis://user:hunter2@localhost:99999/",
        "redis://user:hunter2@localhost/database",
        "redis://user:hunter2@/0",
        "redis://user:hunter2@[::1/0",
    ] {
        let error = Semaphore::redis(url).err().unwrap_or_else(|| panic!("{url:?} was accepted"));
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        assert_told(Err(error.to_string()), &["Redis URL", "redis://"]);
    }
    for url in ["redis://localhost", "redis://:pass@localhost:1/3", "redis+unix:///tmp/socket"] {
        assert!(Semaphore::redis(url).is_ok(), "{url:?}");
    }
}

#[cfg(feature = "redis")]
#[test]
fn a_redis_backend_that_cannot_work_is_not_built() {
    use tower_semaphore::backend::RedisBackend;

    let builder = || RedisBackend::builder("redis://127.0.0.1/");
    let long = "p".repeat(41);
    for prefix in ["", "a:b", "{a}", "a b", "ä", &long] {
        let built = builder().prefix(prefix).build().map(drop).map_err(|error| error.to_string());
        assert_told(built, &["prefix", &format!("{prefix:?}"), "1 to 40", "A-Z a-z 0-9 . _ -"]);
    }
    assert!(builder().prefix(&long[1..]).build().is_ok());

    let built = builder().connect_timeout(Duration::ZERO).build();
    assert_told(built.map(drop).map_err(|error| error.to_string()), &["connect timeout", "0"]);
    let built = builder().response_timeout(Duration::ZERO).build();
    assert_told(built.map(drop).map_err(|error| error.to_string()), &["response timeout", "0"]);
}

#[tokio::test]
async fn a_refusal_is_no_reason_to_close_the_connection() {
    let bench = Bench::new(|layer| layer.limit(0)).await;
    let mut connection = bench.server.http1().await;
    for _ in 0..3 {
        let response = connection.send(crate::support::http::get("/")).await.unwrap();
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers().get("connection"), None::<&HeaderValue>);
        crate::support::http::text(response).await;
    }
}

// ===== custom responses =====

#[tokio::test]
async fn a_body_of_ones_own_keeps_its_length() {
    let bench = Bench::new(|layer| {
        layer
            .limit(0)
            .refusal(|_: &Refusal| Response::new(Full::new(Bytes::from("come back later"))))
    })
    .await;
    let reply = bench.curl(&[]).await;
    assert_eq!(reply.header("content-length"), Some("15"));
    assert_eq!(reply.header("transfer-encoding"), None);
    assert_eq!(reply.body, "come back later");
}

#[tokio::test]
async fn a_status_that_was_not_set_is_that_of_the_refusal() {
    let bench =
        Bench::new(|layer| layer.limit(0).refusal(|_: &Refusal| Response::new(Empty::new()))).await;
    assert_eq!(bench.curl(&[]).await.status, 429);
    let bench = Bench::new(|layer| layer.limit(0).refusal(|_: &Refusal| "come back later")).await;
    let reply = bench.curl(&[]).await;
    assert_eq!((reply.status, &*reply.body), (429, "come back later"));
}

#[tokio::test]
async fn a_refusal_can_be_anything_that_axum_takes() {
    let bench = Bench::new(|layer| {
        layer.limit(0).refusal(|refusal: &Refusal| {
            let said = json!({ "error": refusal.reason.as_str() });
            (StatusCode::SERVICE_UNAVAILABLE, [("x-reason", "busy")], axum::Json(said))
        })
    })
    .await;
    let reply = bench.curl(&[]).await;
    assert_eq!((reply.status, reply.header("x-reason")), (503, Some("busy")));
    assert_eq!(reply.json(), json!({ "error": "limit" }));
    assert_eq!(reply.header("content-length"), Some("17"));
}

#[tokio::test]
async fn a_limit_of_zero_is_named_as_one() {
    let bench = Bench::new(|layer| layer.limit(0)).await;
    let reply = bench.curl(&[]).await;
    assert!(reply.body.contains("the limit of llm-provider is 0"), "{}", reply.body);
    let refused = bench.semaphore.try_acquire("x", &Policy::new(0)).await;
    assert_eq!(refused.unwrap_err().to_string(), "the limit is 0");
}
