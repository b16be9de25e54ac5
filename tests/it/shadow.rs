//! A layer in shadow: it counts what it would have rejected, and neither rejects nor delays.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::{
    BoxError, ConcurrencyLimitBuilder, HeaderKey, OnLost, RefusalReason, ResponseBody, WouldRefuse,
};
use tower_semaphore::{ConcurrencyLimitLayer, OnUnavailable, Permit, Policy, Semaphore};

use crate::support::redis::TestRedis;
use crate::support::semaphore::{down, empty, in_use, up, warm};
use crate::support::stopwatch::Stopwatch;

const NAME: &str = "api";

fn builder(semaphore: &Semaphore) -> ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, NAME).wait_timeout(Duration::from_secs(30))
}

/// What the handler saw, as header fields; and how long it took.
async fn ask(layer: &ConcurrencyLimitLayer) -> (Response<ResponseBody<Full<Bytes>>>, Duration) {
    let handler = service_fn(async |request: Request<()>| {
        let permit = request.extensions().get::<Permit>().expect("a permit in any case");
        let would = request.extensions().get::<WouldRefuse>();
        let reason = would.map_or("none", |would| would.refusal().reason.as_str());
        let response = Response::builder().header("permit", permit.name()).header("would", reason);
        Ok::<_, Infallible>(response.body(Full::from("served")).unwrap())
    });
    let began = Stopwatch::start();
    let response = layer.layer(handler).oneshot(Request::new(())).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["permit"], NAME);
    (response, began.elapsed())
}

fn would(response: &Response<ResponseBody<Full<Bytes>>>) -> Option<RefusalReason> {
    let reason = response.extensions().get().map(|would: &WouldRefuse| would.refusal().reason);
    // The handler saw the same.
    assert_eq!(response.headers()["would"], reason.map_or("none", RefusalReason::as_str));
    reason
}

#[tokio::test]
async fn beyond_the_limit_requests_pass_at_once_and_are_counted_in_the_fleet() {
    let redis = TestRedis::start();
    let processes = [redis.semaphore(), redis.semaphore()];
    let layers = [&processes[0], &processes[1]]
        .map(|semaphore| builder(semaphore).limit(3).shadow(true).build().unwrap());
    for process in &processes {
        warm(process).await;
    }
    let mut open = Vec::new();
    for i in 0..10 {
        let (response, took) = ask(&layers[i % 2]).await;
        // 30 s, had it waited.
        assert!(took < Duration::from_secs(1), "{took:?}");
        let expected = (i >= 3).then_some(RefusalReason::Limit);
        assert_eq!(would(&response), expected, "request {i}");
        open.push(response);
    }
    let seen = layers.each_ref().map(|layer| layer.shadow_counts().unwrap());
    assert_eq!((seen[0].passed, seen[1].passed), (2, 1));
    assert_eq!((seen[0].full, seen[1].full), (3, 4));
    // A request that passed without a permit is not counted, and none waits.
    let inspection = processes[0].inspect(NAME).await.unwrap();
    assert_eq!((inspection.in_use, inspection.waiting), (3, 0));
    let refusal = open[9].extensions().get::<WouldRefuse>().unwrap().refusal();
    let rejected = refusal.rejected.as_ref().unwrap();
    assert_eq!((rejected.limit, rejected.in_use, &*refusal.policy), (3, Some(3), NAME));

    // The next request takes a freed permit.
    drop(open.remove(0));
    in_use(&processes[0], NAME, 2).await;
    assert_eq!(would(&ask(&layers[0]).await.0), None);
    drop(open);
    empty(&redis).await;
}

#[tokio::test]
async fn who_would_be_refused_for_ever_passes_too() {
    let semaphore = Semaphore::in_memory();
    let none = builder(&semaphore).limit(0).shadow(true).build().unwrap();
    assert_eq!(would(&ask(&none).await.0), Some(RefusalReason::Limit));
    let keyed = builder(&semaphore).key(HeaderKey::from_static("x-tenant")).limit(1).shadow(true);
    let keyed = keyed.build().unwrap();
    assert_eq!(would(&ask(&keyed).await.0), Some(RefusalReason::MissingKey));
    let seen = keyed.shadow_counts().unwrap();
    assert_eq!((seen.missing_key, seen.full, seen.passed), (1, 0, 0));
    semaphore.shutdown().await;
    let some = builder(&semaphore).limit(1).shadow(true).build().unwrap();
    assert_eq!(would(&ask(&some).await.0), Some(RefusalReason::Closed));
    assert_eq!(some.shadow_counts().unwrap().unavailable, 1);
}

#[tokio::test]
async fn in_force_there_is_nothing_to_see() {
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).limit(1).shadow(false).build().unwrap();
    assert_eq!(would(&ask(&layer).await.0), None);
    assert_eq!(layer.shadow_counts(), None);
}

#[tokio::test]
async fn a_redis_that_is_away_delays_nobody() {
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    let layer = builder(&semaphore).limit(1).shadow(true).build().unwrap();
    redis.kill();
    down(&semaphore).await;
    for _ in 0..100 {
        let (response, took) = ask(&layer).await;
        assert!(took < Duration::from_millis(50), "{took:?}");
        assert_eq!(would(&response), Some(RefusalReason::Unavailable));
    }
    assert_eq!(layer.shadow_counts().unwrap().unavailable, 100);
    redis.restart();
    up(&semaphore).await;
    assert_eq!(would(&ask(&layer).await.0), None);
    empty(&redis).await;
}

#[tokio::test]
async fn a_redis_that_stands_still_delays_nobody_for_long() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    let layer = builder(&semaphore).limit(1).shadow(true).build().unwrap();
    redis.signal("STOP");
    let mut longest = Duration::ZERO;
    // Through the whole outage: before it is noticed, while a connection is tried, and after.
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1500) {
        let (response, took) = ask(&layer).await;
        assert_eq!(would(&response), Some(RefusalReason::Unavailable));
        longest = longest.max(took);
    }
    redis.signal("CONT");
    println!("the longest took {longest:?}");
    // 100 ms and what the machine adds; without shadow it is a second.
    assert!(longest < Duration::from_millis(400), "{longest:?}");
    assert!(longest >= Duration::from_millis(90), "it never stood still: {longest:?}");
    up(&semaphore).await;
    empty(&redis).await;
}

#[tokio::test]
async fn the_policy_for_an_outage_holds_in_shadow_too() {
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    let local = builder(&semaphore).limit(9).on_unavailable(OnUnavailable::Local(1)).shadow(true);
    let local = local.build().unwrap();
    redis.kill();
    down(&semaphore).await;
    let (one, _) = ask(&local).await;
    let (two, took) = ask(&local).await;
    assert_eq!((would(&one), would(&two)), (None, Some(RefusalReason::Limit)));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[tokio::test]
async fn a_permit_that_is_lost_cuts_nothing_off() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    let layer = builder(&semaphore)
        .limit(1)
        .lease(Duration::from_millis(500))
        .on_lost(OnLost::Abort)
        .shadow(true)
        .build()
        .unwrap();
    let (frames, body) = tokio::sync::mpsc::unbounded_channel::<&'static str>();
    let body = std::sync::Mutex::new(Some(body));
    let handler = service_fn(|_: Request<()>| {
        let body = body.lock().unwrap().take().unwrap();
        let frames = futures_util::stream::unfold(body, async |mut body| {
            let text = body.recv().await?;
            let frame = http_body::Frame::data(Bytes::from_static(text.as_bytes()));
            Some((Ok::<_, BoxError>(frame), body))
        });
        std::future::ready(Ok::<_, Infallible>(Response::new(StreamBody::new(Box::pin(frames)))))
    });
    let response = layer.layer(handler).oneshot(Request::new(())).await.unwrap();
    redis.signal("STOP");
    crate::support::eventually("the permit is lost", async || semaphore.health().lost == 1).await;
    redis.signal("CONT");
    frames.send("still here").unwrap();
    drop(frames);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "still here");
    empty(&redis).await;
}

#[tokio::test]
async fn its_permits_are_real() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let layer = builder(&semaphore).limit(2).shadow(true).build().unwrap();
    warm(&semaphore).await;
    let (held, _) = ask(&layer).await;
    let policy = Policy::new(2);
    let one = semaphore.try_acquire(NAME, &policy).await.unwrap();
    assert!(semaphore.try_acquire(NAME, &policy).await.is_err());
    drop((held, one));
    empty(&redis).await;
}

#[tokio::test]
async fn a_higher_limit_in_shadow_lifts_no_cap_that_is_enforced() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let policy = Policy::builder(2).wait_timeout(Duration::from_secs(30)).build().unwrap();
    let held = [
        semaphore.acquire(NAME, &policy).await.unwrap(),
        semaphore.acquire(NAME, &policy).await.unwrap(),
    ];
    let shadow = builder(&semaphore).limit(10).shadow(true).build().unwrap();
    // It is counted, as the third of ten.
    let (third, _) = ask(&shadow).await;
    in_use(&semaphore, NAME, 3).await;
    let mut waits = semaphore.acquire(NAME, &policy);
    let brief = Duration::from_millis(1500);
    assert!(tokio::time::timeout(brief, &mut waits).await.is_err(), "three are in use, of two");
    // What it frees, and a request that passes meanwhile, leave two in use.
    drop(ask(&shadow).await);
    drop(third);
    assert!(tokio::time::timeout(brief, &mut waits).await.is_err(), "two are in use, of two");
    drop(held);
    drop(waits.await.unwrap());
    empty(&redis).await;
}
