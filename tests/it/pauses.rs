//! Pauses until a time, which responses of the upstream ask for and operators order.
//!
//! Each test in `on_each!` runs on each backend, with the semaphores of several processes.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, Refusal, RefusalReason, ResponseBody};
use tower_semaphore::operate::{Mode, PauseCause};
use tower_semaphore::{
    AcquireError, ConcurrencyLimitLayer, Feedback, Permit, Policy, RejectReason, Rejected,
    Semaphore, feedback,
};

#[cfg(feature = "redis")]
use crate::support::eventually;
use crate::support::on_each;
#[cfg(feature = "redis")]
use crate::support::redis::TestRedis;
use crate::support::semaphore::{rejection, waiting};
use crate::support::stopwatch::Stopwatch;

/// What counts as "at once": half of the second after which every process reads by itself.
const AT_ONCE: Duration = Duration::from_millis(500);
/// A pause whose end no test awaits.
const LONG: Duration = Duration::from_secs(30);
const BRIEF: Duration = Duration::from_millis(400);

on_each! {
    nobody_is_granted_before_the_end_and_all_keep_their_turn
    a_response_pauses_all_processes_at_once
    the_later_end_wins
    resume_ends_it_and_it_does_not_come_back
    what_an_operator_set_wins_in_each_order
    a_process_that_starts_meanwhile_knows_it
    a_short_pause_is_short
    an_upstream_can_pause_no_longer_than_the_policy_allows
    it_says_who_asked_for_it_and_why
    a_pause_that_is_no_pause_is_an_error
}

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(20)).build().unwrap()
}

/// Waits until the semaphore refuses for this reason, within `most`.
async fn refuses(semaphore: &Semaphore, reason: RejectReason, most: Duration) -> Rejected {
    let began = Stopwatch::start();
    loop {
        match semaphore.try_acquire("x", &policy(5)).await {
            Err(AcquireError::Rejected(rejected)) if rejected.reason == reason => return rejected,
            other => assert!(began.elapsed() < most, "still {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

async fn is_paused(semaphore: &Semaphore) -> Rejected {
    refuses(semaphore, RejectReason::UpstreamPause, AT_ONCE).await
}

async fn granted(wait: JoinHandle<Result<Permit, AcquireError>>, most: Duration) -> Permit {
    timeout(most, wait).await.expect("in time").unwrap().unwrap()
}

async fn nobody_is_granted_before_the_end_and_all_keep_their_turn(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let one = policy(1);
    let held = other.acquire("x", &one).await.unwrap();
    let first = tokio::spawn(other.acquire("x", &one));
    waiting(&operator, "x", 1).await;
    // Longer than waiting processes take to call again.
    let (pause, began) = (Duration::from_millis(1500), Instant::now());
    operator.pause_for("x", pause).await.unwrap();
    let rejected = is_paused(&other).await;
    assert!(rejected.ends_in.is_some_and(|left| left <= pause), "{rejected:?}");
    assert_eq!(rejected.limit, 5, "that of the policy");
    assert!(!held.is_lost());
    held.release().await.unwrap();
    let second = tokio::spawn(operator.acquire("x", &one));
    waiting(&operator, "x", 2).await;
    assert_eq!(operator.inspect("x").await.unwrap().in_use, 0);
    let short = Policy::builder(1).wait_timeout(Duration::from_millis(20)).build().unwrap();
    let in_vain = rejection(other.acquire("x", &short).await);
    assert_eq!(in_vain.reason, RejectReason::UpstreamPause);
    let permit = granted(first, pause + AT_ONCE).await;
    assert!(began.elapsed() >= pause, "{:?}", began.elapsed());
    assert!(!second.is_finished());
    drop(permit);
    drop(granted(second, AT_ONCE).await);
    assert_eq!(operator.inspect("x").await.unwrap().paused, None);
}

async fn a_response_pauses_all_processes_at_once(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    drop(other.acquire("x", &policy(5)).await.unwrap());
    let permit = own.acquire("x", &policy(5)).await.unwrap();
    permit.feedback(Feedback::None);
    drop(own.try_acquire("x", &policy(5)).await.unwrap());
    let began = Instant::now();
    permit.feedback(Feedback::Backoff(BRIEF));
    // Without any wait.
    let here = rejection(own.try_acquire("x", &policy(5)).await);
    assert_eq!(here.reason, RejectReason::UpstreamPause);
    assert!(!permit.is_lost());
    is_paused(&other).await;
    drop(own.try_acquire("y", &policy(5)).await.unwrap());
    drop(timeout(BRIEF + AT_ONCE, other.acquire("x", &policy(5))).await.expect("in time").unwrap());
    assert!(began.elapsed() >= BRIEF, "{:?}", began.elapsed());
}

async fn the_later_end_wins(node: &dyn Fn() -> Semaphore) {
    let (a, b) = (node(), node());
    let permits =
        (a.acquire("x", &policy(5)).await.unwrap(), b.acquire("x", &policy(5)).await.unwrap());
    let long_left = |rejected: Rejected| rejected.ends_in.is_some_and(|left| left > LONG / 2);
    a.pause_for("x", LONG).await.unwrap();
    b.pause_for("x", BRIEF).await.unwrap();
    permits.1.feedback(Feedback::Backoff(BRIEF));
    assert!(long_left(is_paused(&a).await));
    assert!(long_left(is_paused(&b).await));
    a.resume("x").await.unwrap();
    a.pause_for("x", BRIEF).await.unwrap();
    b.pause_for("x", LONG).await.unwrap();
    assert!(long_left(is_paused(&b).await));
    permits.0.feedback(Feedback::Backoff(BRIEF));
    while !long_left(is_paused(&a).await) {}
}

async fn resume_ends_it_and_it_does_not_come_back(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let permit = other.acquire("x", &policy(5)).await.unwrap();
    permit.feedback(Feedback::Backoff(LONG));
    is_paused(&operator).await;
    let wait = tokio::spawn(other.acquire("x", &policy(5)));
    waiting(&operator, "x", 1).await;
    operator.resume("x").await.unwrap();
    drop(granted(wait, AT_ONCE).await);
    // Here, too, and before any message.
    permit.feedback(Feedback::Backoff(LONG));
    other.resume("x").await.unwrap();
    drop(other.try_acquire("x", &policy(5)).await.unwrap());
    let wait = operator.acquire("x", &policy(5));
    drop(timeout(AT_ONCE, wait).await.expect("at once").unwrap());
    assert_eq!(operator.inspect("x").await.unwrap().paused, None);
    drop(node().try_acquire("x", &policy(5)).await.unwrap());
}

async fn what_an_operator_set_wins_in_each_order(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    drop(other.acquire("x", &policy(5)).await.unwrap());
    for is_first in [true, false] {
        // A pause without an end.
        if is_first {
            operator.pause("x").await.unwrap();
        }
        operator.pause_for("x", BRIEF).await.unwrap();
        if !is_first {
            operator.pause("x").await.unwrap();
        }
        refuses(&other, RejectReason::Paused, AT_ONCE).await;
        let ended = Instant::now() + BRIEF;
        while Instant::now() < ended + Duration::from_millis(50) {
            assert_eq!(
                rejection(other.try_acquire("x", &policy(5)).await).reason,
                RejectReason::Paused
            );
        }
        operator.resume("x").await.unwrap();
        drop(timeout(AT_ONCE, other.acquire("x", &policy(5))).await.expect("at once").unwrap());

        // A drain.
        if is_first {
            operator.drain("x", Duration::ZERO).await.unwrap();
        }
        operator.pause_for("x", LONG).await.unwrap();
        if !is_first {
            operator.drain("x", Duration::ZERO).await.unwrap();
        }
        refuses(&other, RejectReason::Draining, AT_ONCE).await;
        assert_eq!(operator.limit_of("x").await.unwrap().mode, Mode::Draining);
        operator.resume("x").await.unwrap();

        // A limit, which is neither lost nor a way around the pause.
        if is_first {
            operator.set_limit("x", 1).await.unwrap();
        }
        operator.pause_for("x", BRIEF).await.unwrap();
        if !is_first {
            operator.set_limit("x", 1).await.unwrap();
        }
        is_paused(&other).await;
        let held = timeout(BRIEF + AT_ONCE, other.acquire("x", &policy(5))).await.expect("in time");
        let held = held.unwrap();
        let full = refuses(&other, RejectReason::Limit, AT_ONCE).await;
        assert_eq!(full.limit, 1);
        drop(held);
        operator.clear_limit("x").await.unwrap();
    }
}

async fn a_process_that_starts_meanwhile_knows_it(node: &dyn Fn() -> Semaphore) {
    let own = node();
    let began = Instant::now();
    let pause = Duration::from_millis(1500);
    own.acquire("x", &policy(5)).await.unwrap().feedback(Feedback::Backoff(pause));
    eventually_paused(&own).await;
    // Something else is set later, so that the pause is not the last change.
    own.set_limit("y", 3).await.unwrap();
    own.shutdown().await;
    drop(own);
    let late = node();
    // Its very first call applies it.
    let rejected = rejection(late.try_acquire("x", &policy(5)).await);
    assert_eq!(rejected.reason, RejectReason::UpstreamPause);
    let slack = Duration::from_millis(250);
    let left = (pause + slack).saturating_sub(began.elapsed());
    assert!(rejected.ends_in.is_some_and(|ends_in| ends_in <= left + AT_ONCE), "{rejected:?}");
    drop(timeout(left + AT_ONCE, late.acquire("x", &policy(5))).await.expect("in time").unwrap());
    assert!(began.elapsed() >= pause, "{:?}", began.elapsed());
}

/// Waits until the backend has recorded it.
async fn eventually_paused(semaphore: &Semaphore) {
    let began = Stopwatch::start();
    while semaphore.inspect("x").await.unwrap().paused.is_none() {
        assert!(began.elapsed() < AT_ONCE, "it is not recorded");
    }
}

async fn an_upstream_can_pause_no_longer_than_the_policy_allows(node: &dyn Fn() -> Semaphore) {
    let own = node();
    let day = Feedback::Backoff(Duration::from_secs(86_400));
    let bounded = |max_pause| Policy::builder(5).max_pause(max_pause).build().unwrap();
    let never = own.acquire("x", &bounded(Duration::ZERO)).await.unwrap();
    never.feedback(day);
    drop(own.try_acquire("x", &policy(5)).await.unwrap());
    own.acquire("x", &bounded(BRIEF)).await.unwrap().feedback(day);
    let left = is_paused(&own).await.ends_in.unwrap();
    assert!(left <= BRIEF, "{left:?}");
    let wait = own.acquire("x", &policy(5));
    let permit = timeout(BRIEF + 2 * AT_ONCE, wait).await.expect("in time").unwrap();
    permit.feedback(day);
    let left = is_paused(&own).await.ends_in.unwrap();
    assert!(left <= Policy::DEFAULT_MAX_PAUSE, "{left:?}");
    let error = Policy::builder(5).max_pause(Duration::from_secs(3601)).build().unwrap_err();
    assert_eq!(error.to_string(), "longest pause is 3601s; expected 0 (never pause) to 3600s");
}

async fn a_short_pause_is_short(node: &dyn Fn() -> Semaphore) {
    let (own, other) = (node(), node());
    let (asked, most) = (Duration::from_millis(12), Duration::from_millis(20));
    let permit = own.acquire("x", &policy(5)).await.unwrap();
    // The quickest of some: this machine may be busy.
    let mut quickest = Duration::MAX;
    for node in [&own, &other, &own, &other, &own] {
        let began = Instant::now();
        permit.feedback(Feedback::Backoff(asked));
        drop(timeout(AT_ONCE, own.acquire("x", &policy(5))).await.expect("in time").unwrap());
        let took = began.elapsed();
        assert!(took >= asked, "{took:?}");
        quickest = quickest.min(took);
        drop(timeout(AT_ONCE, node.acquire("x", &policy(5))).await.expect("in time").unwrap());
    }
    assert!(quickest < asked * 4, "{quickest:?}");
    drop(permit);
    let brief = Policy::builder(5).max_pause(most).build().unwrap();
    let left = Cell::new(Duration::MAX);
    // Where the machine is busy, it is over before the question.
    eventually("it is in force", async || {
        own.acquire("x", &brief).await.unwrap().feedback(Feedback::Backoff(LONG));
        let Err(AcquireError::Rejected(rejected)) = own.try_acquire("x", &policy(5)).await else {
            return false;
        };
        rejected.ends_in.inspect(|ends_in| left.set(*ends_in)).is_some()
    })
    .await;
    assert!(left.get() <= most, "{left:?}");
}

async fn it_says_who_asked_for_it_and_why(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let permit = other.acquire("x", &policy(5)).await.unwrap();
    assert_eq!(operator.inspect("x").await.unwrap().paused, None);
    permit.feedback(Feedback::Backoff(LONG));
    is_paused(&operator).await;
    let paused = operator.inspect("x").await.unwrap().paused.unwrap();
    let pid = format!(":{}", std::process::id());
    assert!(paused.by.ends_with(&pid), "{paused:?}");
    assert_eq!(paused.cause, PauseCause::Upstream);
    assert!(paused.left > LONG / 2 && paused.left <= LONG + AT_ONCE, "{paused:?}");
    operator.pause_for("x", 2 * LONG).await.unwrap();
    let paused = operator.inspect("x").await.unwrap().paused.unwrap();
    assert_eq!(paused.cause, PauseCause::Operator);
    assert!(paused.left > LONG + AT_ONCE, "{paused:?}");
}

async fn a_pause_that_is_no_pause_is_an_error(node: &dyn Fn() -> Semaphore) {
    for (pause, text) in [(0, "0ns"), (86_400_001, "86400.001s")] {
        let pause = node().pause_for("x", Duration::from_millis(pause)).await;
        let error = pause.unwrap_err().to_string();
        assert_eq!(error, format!("pause is {text}; expected 1ms to 86400s"));
    }
}

/// A layer with this limit on an upstream that answers as told by the path: `/<status>/<Retry-After>`.
fn upstream(
    semaphore: &Semaphore,
    set: impl FnOnce(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder,
) -> impl Service<Request<()>, Response = Response<ResponseBody<String>>, Error = Infallible> {
    let builder =
        ConcurrencyLimitLayer::builder(semaphore, "x").limit(5).wait_timeout(Duration::ZERO);
    let layer = set(builder.on_response(feedback::retry_after)).build().unwrap();
    ServiceBuilder::new().layer(layer).service_fn(async |request: Request<()>| {
        let mut parts = request.uri().path().split('/').skip(1);
        let response = Response::builder().status(parts.next().unwrap());
        let after = parts.next().unwrap();
        Ok::<_, Infallible>(response.header(RETRY_AFTER, after).body("own".to_owned()).unwrap())
    })
}

fn get(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

#[tokio::test]
async fn a_layer_pauses_for_a_response_and_passes_it_on_unchanged() {
    let semaphore = Semaphore::in_memory();
    let mut service = upstream(&semaphore, |builder| builder);
    for passes in ["/200/20", "/429/0", "/429/-1", "/429/soon"] {
        let response = service.ready().await.unwrap().call(get(passes)).await.unwrap();
        assert!(response.extensions().get::<Refusal>().is_none(), "{passes}");
        assert_eq!(semaphore.inspect("x").await.unwrap().paused, None, "{passes}");
    }
    let response = service.ready().await.unwrap().call(get("/429/20")).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()[RETRY_AFTER], "20");
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "own");
    let paused = semaphore.inspect("x").await.unwrap().paused.unwrap();
    assert_eq!(paused.cause, PauseCause::Status(429));
    let refused = service.ready().await.unwrap().call(get("/200/0")).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    // With the slack, between 20 and 20.25 s are left, and those who are refused at once come back within an eighth.
    let after = seconds(&refused);
    assert!((21..=23).contains(&after), "{after}");
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.reason, RefusalReason::UpstreamPause);
    assert_eq!(refusal.reason.as_str(), "upstream_pause");
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["reason"], "upstream_pause");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.starts_with("x is paused for another 20."), "{detail}");
}

fn seconds<B>(refused: &Response<B>) -> u64 {
    refused.headers()[RETRY_AFTER].to_str().unwrap().parse().unwrap()
}

/// What the clients are told that are refused in a pause of this many seconds, at once.
async fn told(pause: u64) -> BTreeSet<u64> {
    let semaphore = Semaphore::in_memory();
    // However far apart others come back.
    let set = |builder: ConcurrencyLimitBuilder| {
        builder.max_pause(Policy::MAX_MAX_PAUSE).retry_after(Duration::from_secs(100))
    };
    let mut service = upstream(&semaphore, set);
    service.ready().await.unwrap().call(get(&format!("/429/{pause}"))).await.unwrap();
    let mut told = BTreeSet::new();
    for _ in 0..200 {
        let refused = service.ready().await.unwrap().call(get("/200/0")).await.unwrap();
        let refusal = refused.extensions().get::<Refusal>().unwrap();
        let left = refusal.rejected.as_ref().unwrap().ends_in.unwrap();
        assert!(Duration::from_secs(seconds(&refused)) >= left, "{left:?}");
        told.insert(seconds(&refused));
    }
    told
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_in_a_pause_comes_back_after_its_end_and_not_with_all_others() {
    for (pause, first, last) in
        [(1, 2, 3), (5, 6, 7), (20, 21, 23), (60, 61, 68), (3600, 3600, 3608)]
    {
        assert_eq!(told(pause).await, (first..=last).collect(), "{pause} s");
    }
}

#[tokio::test]
async fn a_layer_bounds_a_pause_and_makes_none_in_shadow() {
    let semaphore = Semaphore::in_memory();
    let mut shadow = upstream(&semaphore, |builder| builder.shadow(true));
    let mut bounded = upstream(&semaphore, |builder| builder.max_pause(BRIEF));
    shadow.ready().await.unwrap().call(get("/429/20")).await.unwrap();
    assert_eq!(semaphore.inspect("x").await.unwrap().paused, None);
    bounded.ready().await.unwrap().call(get("/503/86400")).await.unwrap();
    let paused = semaphore.inspect("x").await.unwrap().paused.unwrap();
    assert!(paused.left <= BRIEF, "{paused:?}");
}

/// What a layer further in says is not the upstream's.
#[tokio::test]
async fn a_rejection_further_in_is_no_response_of_the_upstream() {
    let semaphore = Semaphore::in_memory();
    let layer =
        |name| ConcurrencyLimitLayer::builder(&semaphore, name).on_response(feedback::retry_after);
    let outer = layer("outer").limit(5).build().unwrap();
    let inner = layer("inner").limit(0).build().unwrap();
    let service = ServiceBuilder::new().layer(outer).layer(inner);
    let mut service = service
        .service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new())));
    let refused = service.ready().await.unwrap().call(get("/")).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key(RETRY_AFTER));
    assert_eq!(semaphore.inspect("outer").await.unwrap().paused, None);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn thirty_responses_at_once_are_one_write() {
    let server = TestRedis::start();
    let nodes = [server.semaphore(), server.semaphore(), server.semaphore()];
    let mut permits = Vec::new();
    for at in 0..30 {
        permits.push(nodes[at % 3].acquire("x", &policy(30)).await.unwrap());
    }
    let _: String = server.command(&["CONFIG", "RESETSTAT"]);
    for permit in &permits {
        permit.feedback(Feedback::Backoff(LONG));
    }
    for node in &nodes {
        is_paused(node).await;
        eventually_paused(node).await;
    }
    assert_eq!(server.calls("hset"), 1);
    assert_eq!(server.calls("publish"), 1);
    // Each process knows an end that is late enough, and sends nothing.
    let asked = server.calls("time");
    for permit in &permits {
        permit.feedback(Feedback::Backoff(LONG));
    }
    // A round trip, which such a record would have been sent before.
    for node in &nodes {
        let _ = node.try_acquire("x", &policy(30)).await;
    }
    assert_eq!(server.calls("hset"), 1);
    assert!(server.calls("hgetall") <= 3 + 3, "one attempt of each process, and one reading");
    assert!(server.calls("time") - asked <= 3, "only the acquires");
}

/// What each of a thousand responses asks for ends later than what is known.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_thousand_responses_a_second_are_ten_writes_a_second() {
    let server = TestRedis::start();
    let most = Duration::from_secs(1);
    let brief = Policy::builder(5).max_pause(most).build().unwrap();
    let (own, other) = (server.semaphore(), server.semaphore());
    drop(other.acquire("x", &policy(5)).await.unwrap());
    let permit = own.acquire("x", &brief).await.unwrap();
    for pause in [Duration::from_millis(12), most] {
        let _: String = server.command(&["CONFIG", "RESETSTAT"]);
        let (began, mut asked) = (Instant::now(), 0);
        let mut each = tokio::time::interval(Duration::from_millis(1));
        while server.calls("hset") < 6 {
            for _ in 0..10 {
                each.tick().await;
                permit.feedback(Feedback::Backoff(pause));
                asked += 1;
            }
        }
        let (writes, took) = (server.calls("hset"), began.elapsed());
        println!("{pause:?}: {asked} responses in {took:?}, {writes} writes");
        assert!(took >= Duration::from_millis(100) * 5, "{writes} in {took:?}");
        assert!(took < Duration::from_secs(3), "the later end is recorded, too: {took:?}");
    }
    // The others know the end that was asked for last.
    is_paused(&other).await;
    let began = Instant::now();
    permit.feedback(Feedback::Backoff(most));
    drop(own.acquire("x", &policy(5)).await.unwrap());
    assert!(began.elapsed() >= most, "{:?}", began.elapsed());
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_lost_message_costs_a_second() {
    let server = TestRedis::start();
    let (own, poll_only) = (server.semaphore(), Semaphore::new(server.without_messages()));
    drop(poll_only.acquire("x", &policy(5)).await.unwrap());
    own.acquire("x", &policy(5)).await.unwrap().feedback(Feedback::Backoff(LONG));
    refuses(&poll_only, RejectReason::UpstreamPause, Duration::from_millis(1500)).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_pause_outlives_the_connections_and_leaves_nothing() {
    let server = TestRedis::start();
    let (own, other) = (server.semaphore(), server.semaphore());
    drop(other.acquire("x", &policy(5)).await.unwrap());
    let permit = own.acquire("x", &policy(5)).await.unwrap();
    let pause = Duration::from_millis(1500);
    let began = Instant::now();
    permit.feedback(Feedback::Backoff(pause));
    // The connection breaks before the record is answered, and messages reach nobody.
    let _: u64 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    for node in [&own, &other] {
        is_paused(node).await;
    }
    eventually_paused(&other).await;
    let _: u64 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    for node in [&own, &other] {
        is_paused(node).await;
    }
    let wait = other.acquire("x", &policy(5));
    drop(timeout(pause + AT_ONCE, wait).await.expect("in time").unwrap());
    assert!(began.elapsed() >= pause, "{:?}", began.elapsed());
    drop(permit);
    eventually("nothing is left", async || server.keys() == 0).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn while_redis_is_away_a_process_pauses_itself() {
    use tower_semaphore::OnUnavailable;
    let mut server = TestRedis::start();
    let semaphore = server.semaphore();
    let admit = Policy::builder(5)
        .wait_timeout(Duration::from_secs(20))
        .on_unavailable(OnUnavailable::Admit)
        .build()
        .unwrap();
    let permit = semaphore.acquire("x", &admit).await.unwrap();
    server.kill();
    crate::support::semaphore::down(&semaphore).await;
    drop(semaphore.acquire("x", &admit).await.unwrap());
    permit.feedback(Feedback::Backoff(LONG));
    let refused = semaphore.acquire("x", &admit).await;
    assert!(matches!(refused, Err(AcquireError::Unavailable(_))), "{refused:?}");
    drop(semaphore.acquire("y", &admit).await.unwrap());
    // It is recorded as soon as that is possible.
    server.restart();
    let other = server.semaphore();
    refuses(&other, RejectReason::UpstreamPause, Duration::from_secs(5)).await;
    is_paused(&semaphore).await;
}

/// A pause ends and expires by itself, whatever is set beside it.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_pause_is_a_field_that_ends() {
    const PAUSES: &str = "semaphore:{!overrides}:pauses";
    let server = TestRedis::start();
    let operator = server.semaphore();
    operator.pause_for("x", BRIEF).await.unwrap();
    let left: i64 = server.command(&["PTTL", PAUSES]);
    assert!((1..=400).contains(&left), "{left}");
    operator.set_limit("y", 3).await.unwrap();
    eventually("it has expired", async || server.command::<u64>(&["EXISTS", PAUSES]) == 0).await;
    operator.clear_limit("y").await.unwrap();
    assert_eq!(server.keys(), 0);
    // What cannot be read pauses nothing.
    for value in ["", "5", "soon 0 x 429", "99999999999999999999 0 x 429", "9999999999999 x x 429"]
    {
        let _: u64 = server.command(&["HSET", PAUSES, "@", "5", "x", value]);
        drop(server.semaphore().acquire("x", &policy(5)).await.unwrap());
        operator.pause_for("x", BRIEF).await.unwrap();
        is_paused(&operator).await;
        operator.resume("x").await.unwrap();
    }
}

/// An upstream that serves 300 requests in each minute by its clock, and answers others 429 with the seconds until the
/// next minute.
#[derive(Default)]
struct Quota {
    minute: u64,
    served_in_it: u64,
    served: u64,
    refused: u64,
}

impl Quota {
    const A_MINUTE: u64 = 300;

    /// Returns `Retry-After`, if the request is refused.
    fn ask(&mut self, now: Duration) -> Option<Duration> {
        let minute = now.as_secs() / 60;
        if self.minute != minute {
            (self.minute, self.served_in_it) = (minute, 0);
        }
        if self.served_in_it < Self::A_MINUTE {
            self.served_in_it += 1;
            self.served += 1;
            return None;
        }
        self.refused += 1;
        Some(Duration::from_secs(60 * (minute + 1)) - Duration::from_secs(now.as_secs()))
    }
}

/// A hundred requests always want to run, thirty may, and each takes about a second; a refusal takes 50 ms.
#[tokio::test(start_paused = true)]
async fn a_fleet_that_pauses_is_refused_rarely_and_served_nearly_always() {
    const MINUTES: u64 = 5;
    for processes in [1, 3, 20] {
        let backend = MemoryBackend::new();
        let nodes: Vec<_> = (0..processes).map(|_| Semaphore::new(backend.clone())).collect();
        let (quota, began) = (Arc::new(Mutex::new(Quota::default())), Instant::now());
        let patient = Policy::builder(30).wait_timeout(Policy::MAX_WAIT_TIMEOUT).build().unwrap();
        let mut requests = JoinSet::new();
        for (number, node) in (0..100_u64).zip(nodes.iter().cycle()) {
            let (node, quota) = (node.clone(), Arc::clone(&quota));
            let patient = patient.clone();
            requests.spawn(async move {
                for turn in 0.. {
                    let permit = node.acquire("x", &patient).await.unwrap();
                    let answer = quota.lock().unwrap().ask(began.elapsed());
                    if let Some(after) = answer {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        permit.feedback(Feedback::Backoff(after));
                    } else {
                        let spread = (number * 37 + turn * 101) % 1000;
                        tokio::time::sleep(Duration::from_millis(500 + spread)).await;
                    }
                }
            });
        }
        tokio::time::sleep(Duration::from_secs(60 * MINUTES)).await;
        requests.shutdown().await;
        let Quota { served, refused, .. } = *quota.lock().unwrap();
        let share = served as f64 / (Quota::A_MINUTE * MINUTES) as f64;
        println!("{processes} processes: {refused} refused in {MINUTES} min, {share:.3} served");
        assert!(refused <= 4 * MINUTES, "{processes} processes: {refused} in {MINUTES} minutes");
        assert!(share >= 0.97, "{processes} processes: {share}");
    }
}
