//! Redis goes away, or loses its data, and comes back.

use std::time::{Duration, Instant};

use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::backend::{AfterLoss, RedisBackend};
use tower_semaphore::{
    AcquireError, ConcurrencyLimitLayer, OnUnavailable, Policy, RejectReason, Semaphore,
};

use crate::support::eventually;
use crate::support::redis::TestRedis;
use crate::support::semaphore::{down, empty, rejection, up, waiting, warm};
use crate::support::stopwatch::Stopwatch;
use crate::support::told::Told;

fn policy(limit: u32, on_unavailable: OnUnavailable) -> Policy {
    Policy::builder(limit)
        .wait_timeout(Duration::from_secs(10))
        .lease(Duration::from_secs(2))
        .on_unavailable(on_unavailable)
        .build()
        .unwrap()
}

/// A semaphore that has been in use.
async fn used(redis: &TestRedis) -> Semaphore {
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    semaphore
}

#[tokio::test]
async fn refuses_at_once_while_redis_is_down_and_serves_again_soon_after() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let policy = policy(1, OnUnavailable::Refuse);
    redis.kill();
    down(&semaphore).await;
    for _ in 0..100 {
        let began = Stopwatch::start();
        let error = semaphore.acquire("x", &policy).await.unwrap_err();
        assert!(matches!(error, AcquireError::Unavailable(_)), "{error}");
        assert!(began.elapsed() < Duration::from_millis(50), "{:?}", began.elapsed());
    }
    assert!(semaphore.health().refused_by_policy >= 100);
    redis.restart();
    let back = Stopwatch::start();
    up(&semaphore).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    assert!(back.elapsed() < Duration::from_secs(1), "{:?}", back.elapsed());
    empty(&redis).await;
}

#[tokio::test]
async fn a_frozen_redis_is_answered_for_within_a_bound() {
    let redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let policy = policy(1, OnUnavailable::Refuse);
    redis.signal("STOP");
    let began = Stopwatch::start();
    let error = semaphore.acquire("x", &policy).await.unwrap_err();
    assert!(matches!(error, AcquireError::Unavailable(_)), "{error}");
    assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
    down(&semaphore).await;
    redis.signal("CONT");
    let back = Stopwatch::start();
    up(&semaphore).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    assert!(back.elapsed() < Duration::from_millis(1500), "{:?}", back.elapsed());
    empty(&redis).await;
}

#[tokio::test]
async fn admits_what_comes_and_has_it_counted_afterwards() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let admit = policy(2, OnUnavailable::Admit);
    redis.kill();
    down(&semaphore).await;
    let mut permits = Vec::new();
    for _ in 0..5 {
        permits.push(semaphore.acquire("x", &admit).await.unwrap());
    }
    assert_eq!(semaphore.health().admitted_by_policy, 5);
    drop(permits.pop());
    redis.restart();
    // The permits in flight, which are more than the limit.
    eventually("they are counted", async || {
        semaphore.inspect("x").await.is_ok_and(|seen| seen.in_use == 4)
    })
    .await;
    let refused = semaphore.try_acquire("x", &admit).await;
    assert!(matches!(refused, Err(AcquireError::Rejected(_))));
    // They live as others do, past the lease.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(permits.iter().all(|permit| !permit.is_lost()));
    assert_eq!(semaphore.inspect("x").await.unwrap().in_use, 4);
    drop(permits);
    empty(&redis).await;
}

#[tokio::test]
async fn a_local_share_is_a_cap_of_its_own_with_a_queue() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let local = policy(10, OnUnavailable::Local(2));
    redis.kill();
    down(&semaphore).await;
    let one = semaphore.acquire("x", &local).await.unwrap();
    let two = semaphore.acquire("x", &local).await.unwrap();
    let rejected = match semaphore.try_acquire("x", &local).await {
        Err(AcquireError::Rejected(rejected)) => rejected,
        other => panic!("{other:?}"),
    };
    assert_eq!((rejected.reason, rejected.in_use), (RejectReason::Limit, Some(2)));
    let mut third = tokio::spawn(semaphore.acquire("x", &local));
    let mut fourth = tokio::spawn(semaphore.acquire("x", &local));
    tokio::task::yield_now().await;
    assert!(!third.is_finished());
    drop(one);
    let three = (&mut third).await.unwrap().unwrap();
    assert!(!fourth.is_finished());
    // Redis serves the rest of the queue when it is back.
    redis.restart();
    let four = (&mut fourth).await.unwrap().unwrap();
    eventually("all are counted", async || {
        semaphore.inspect("x").await.is_ok_and(|seen| seen.in_use == 3)
    })
    .await;
    drop((two, three, four));
    empty(&redis).await;
}

#[tokio::test]
async fn a_local_wait_ends_with_its_timeout() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let local = Policy::builder(10)
        .wait_timeout(Duration::from_millis(100))
        .on_unavailable(OnUnavailable::Local(1))
        .build()
        .unwrap();
    redis.kill();
    down(&semaphore).await;
    let held = semaphore.acquire("x", &local).await.unwrap();
    match semaphore.acquire("x", &local).await {
        Err(AcquireError::Rejected(rejected)) => {
            assert_eq!(rejected.reason, RejectReason::QueueTimeout)
        }
        other => panic!("{other:?}"),
    }
    drop(held);
    drop(semaphore.acquire("x", &local).await.unwrap());
}

#[tokio::test]
async fn a_refusal_by_a_local_share_counts_this_process_alone() {
    let mut redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let local = |share| policy(10, OnUnavailable::Local(share));
    redis.kill();
    down(&semaphore).await;
    let none = rejection(semaphore.try_acquire("x", &local(0)).await);
    assert_eq!((none.in_use, none.waiting), (Some(0), Some(0)));
    let held = semaphore.acquire("x", &local(1)).await.unwrap();
    let waits = tokio::spawn(semaphore.acquire("x", &local(1)));
    tokio::task::yield_now().await;
    let full = rejection(semaphore.try_acquire("x", &local(1)).await);
    assert_eq!((full.in_use, full.waiting), (Some(1), Some(1)));
    drop(held);
    drop(waits.await.unwrap().unwrap());
}

#[tokio::test]
async fn a_waiter_keeps_its_turn_through_an_outage() {
    // One process, because another process's waiters can come back before the holder, and be granted.
    let mut redis = TestRedis::start();
    let a = used(&redis).await;
    let policy = policy(1, OnUnavailable::Refuse);
    let held = a.acquire("x", &policy).await.unwrap();
    let first = tokio::spawn(a.acquire("x", &policy));
    eventually("one waits", async || a.inspect("x").await.unwrap().waiting == 1).await;
    let second = tokio::spawn(a.acquire("x", &policy));
    eventually("two wait", async || a.inspect("x").await.unwrap().waiting == 2).await;
    // It is empty, too.
    redis.kill();
    down(&a).await;
    redis.restart();
    eventually("all are back", async || {
        a.inspect("x").await.is_ok_and(|seen| (seen.in_use, seen.waiting) == (1, 2))
    })
    .await;
    assert!(!held.is_lost());
    drop(held);
    let permit = first.await.unwrap().unwrap();
    assert!(!second.is_finished());
    drop(permit);
    drop(second.await.unwrap().unwrap());
    empty(&redis).await;
}

#[tokio::test]
async fn a_lost_permit_is_said_to_be_lost_though_nothing_answers() {
    let redis = TestRedis::start();
    let semaphore = used(&redis).await;
    let lease = Duration::from_millis(600);
    let policy = Policy::builder(1).lease(lease).build().unwrap();
    let began = Instant::now();
    let permit = semaphore.acquire("x", &policy).await.unwrap();
    redis.signal("STOP");
    permit.lost().await;
    let took = began.elapsed();
    redis.signal("CONT");
    assert!(permit.is_lost());
    // One renewal may have been answered before.
    assert!(
        took >= lease - Duration::from_millis(2) && took < 2 * lease + Duration::from_millis(300),
        "{took:?}"
    );
    assert_eq!(semaphore.health().lost, 1);
    // The answers of Redis do not revive it.
    up(&semaphore).await;
    assert!(permit.is_lost());
    empty(&redis).await;
}

fn quarantining(redis: &TestRedis) -> Semaphore {
    let backend = RedisBackend::builder(redis.url()).after_loss(AfterLoss::Quarantine);
    Semaphore::new(backend.build().unwrap())
}

/// Redis is killed and started empty; the other processes were there before.
async fn lose_data(redis: &mut TestRedis, processes: &[&Semaphore]) {
    let before: Vec<_> = processes.iter().map(|p| p.health().disconnects).collect();
    redis.restart();
    for (process, before) in processes.iter().zip(before) {
        eventually("it noticed", async || process.health().disconnects > before).await;
        up(process).await;
    }
}

#[tokio::test]
async fn quarantine_keeps_a_newcomer_from_passing_the_cap_after_a_loss() {
    let mut redis = TestRedis::start();
    let (a, b) = (quarantining(&redis), quarantining(&redis));
    let policy = policy(1, OnUnavailable::Refuse);
    let held = a.acquire("x", &policy).await.unwrap();
    drop(b.acquire("warm", &policy).await.unwrap());
    lose_data(&mut redis, &[&a, &b]).await;
    // Two processes that were there before, and one that was not: the server is young.
    for process in [&a, &b, &quarantining(&redis)] {
        let refused = process.try_acquire("x", &policy).await;
        assert!(matches!(refused, Err(AcquireError::Rejected(_))), "{refused:?}");
        let refused = process.try_acquire("y", &policy).await;
        assert!(matches!(refused, Err(AcquireError::Rejected(_))), "nothing at all is granted");
    }
    assert!(!held.is_lost());
    drop(held);
    drop(b.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}

#[tokio::test]
async fn a_request_that_a_quarantine_refuses_is_told_so() {
    let mut redis = TestRedis::start();
    let semaphore = quarantining(&redis);
    let builder = || Policy::builder(1).lease(Duration::from_secs(4)).max_queue(1);
    let policy = builder().wait_timeout(Duration::from_secs(20)).build().unwrap();
    let held = semaphore.acquire("x", &policy).await.unwrap();
    lose_data(&mut redis, &[&semaphore]).await;
    // One that may not wait, one that waits in vain, and one that finds the queue full.
    let refused = rejection(semaphore.try_acquire("y", &policy).await);
    assert_eq!(refused.reason.as_str(), "quarantine");
    let short = builder().wait_timeout(Duration::from_millis(50)).build().unwrap();
    assert_eq!(rejection(semaphore.acquire("y", &short).await).reason.as_str(), "quarantine");
    let waits = semaphore.acquire("y", &policy);
    waiting(&semaphore, "y", 1).await;
    let full = rejection(semaphore.acquire("y", &policy).await);
    assert_eq!(full.reason.as_str(), "quarantine");
    // A name that would be full anyway is rejected as full.
    let counted = async || semaphore.inspect("x").await.is_ok_and(|seen| seen.in_use == 1);
    eventually("it is counted again", counted).await;
    let refused = rejection(semaphore.try_acquire("x", &policy).await);
    assert_eq!(refused.reason.as_str(), "limit");
    // A later rejection has nothing to do with it.
    let permit = waits.await.unwrap();
    assert_eq!(rejection(semaphore.try_acquire("y", &policy).await).reason.as_str(), "limit");
    drop((held, permit));
    empty(&redis).await;
}

#[tokio::test]
async fn a_response_in_quarantine_says_when_to_come_back() {
    // The server is young, so all of its data may be lost.
    let redis = TestRedis::start();
    let (semaphore, lease) = (quarantining(&redis), Duration::from_secs(30));
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(1).lease(lease);
    let layer = layer.wait_timeout(Duration::ZERO).build().unwrap();
    let service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(Response::new(Full::<bytes::Bytes>::from("served")))
    }));
    let refused = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(refused.status(), 503);
    let after: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    // A loaded machine may take seconds to get here, but one or two seconds would still be too soon.
    assert!((15..=31).contains(&after), "{after}");
    assert!(!refused.headers().contains_key("ratelimit"));
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["reason"], "quarantine");
}

#[tokio::test]
async fn a_quarantine_is_logged_when_it_begins_and_when_it_ends() {
    let told = Told::new();
    let mut redis = TestRedis::start();
    let semaphore = quarantining(&redis);
    let policy = Policy::builder(1).lease(Duration::from_secs(4));
    let policy = policy.wait_timeout(Duration::from_secs(20)).build().unwrap();
    let lines = || {
        let lines = told.aloud().into_iter().map(|event| event.name);
        lines.filter(|line| line.contains("granted")).collect::<Vec<_>>()
    };
    drop(semaphore.acquire("x", &policy).await.unwrap());
    assert!(lines().len() <= 2, "the server was young, perhaps: {:?}", lines());
    eventually("that is over", async || lines().len() != 1).await;
    let before = lines().len();
    lose_data(&mut redis, &[&semaphore]).await;
    let until = semaphore.health().quarantined_until.expect("in quarantine");
    assert!(until > tokio::time::Instant::now());
    // Many names, one log line.
    for name in ["x", "y", "z"] {
        let refused = rejection(semaphore.try_acquire(name, &policy).await);
        assert_eq!(refused.reason.as_str(), "quarantine");
    }
    let new = lines().split_off(before);
    assert_eq!(
        new,
        [
            "data may have been lost; no permits are granted until those in use have been counted again"
        ]
    );
    eventually("it ends", async || lines().len() > before + 1).await;
    assert_eq!(
        lines().split_off(before + 1),
        ["the quarantine is over; permits are granted again"]
    );
    assert_eq!(semaphore.health().quarantined_until, None);
    drop(semaphore.acquire("x", &policy).await.unwrap());
    assert_eq!(lines().len(), before + 2);
}

#[tokio::test]
async fn quarantine_ends_after_one_lease_and_the_queue_goes_on() {
    let mut redis = TestRedis::start();
    let semaphore = quarantining(&redis);
    let policy = policy(1, OnUnavailable::Refuse);
    drop(semaphore.acquire("x", &policy).await.unwrap());
    lose_data(&mut redis, &[&semaphore]).await;
    let began = Instant::now();
    let first = semaphore.acquire("x", &policy);
    let second = semaphore.acquire("x", &policy);
    let permit = first.await.unwrap();
    let took = began.elapsed();
    // The lease is 2 s.
    assert!(took > Duration::from_millis(1500) && took < Duration::from_millis(3500), "{took:?}");
    drop(permit);
    drop(second.await.unwrap());
    empty(&redis).await;
}

#[tokio::test]
async fn a_quarantine_lasts_for_the_longest_lease_of_the_fleet_where_that_is_set() {
    let mut redis = TestRedis::start();
    let longest = Duration::from_secs(3);
    let backend = RedisBackend::builder(redis.url());
    let backend = backend.after_loss(AfterLoss::QuarantineFor(longest)).build().unwrap();
    let semaphore = Semaphore::new(backend);
    let short = Policy::builder(1).lease(Duration::from_millis(500));
    let short = short.wait_timeout(Duration::from_secs(20)).build().unwrap();
    drop(semaphore.acquire("x", &short).await.unwrap());
    let began = Instant::now();
    lose_data(&mut redis, &[&semaphore]).await;
    drop(semaphore.acquire("x", &short).await.unwrap());
    let took = began.elapsed();
    assert!(took >= longest && took < 3 * longest, "{took:?}");
}

#[test]
fn a_quarantine_that_no_lease_can_need_is_an_error() {
    let backend = |duration| {
        let backend = RedisBackend::builder("redis://localhost/");
        backend.after_loss(AfterLoss::QuarantineFor(duration)).build()
    };
    assert!(backend(Policy::MAX_LEASE).is_ok());
    let error = backend(Policy::MAX_LEASE + Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.to_string(), "quarantine is 86401s; expected 0 to 86400s");
}

#[tokio::test]
async fn a_process_that_starts_when_no_lease_of_before_a_loss_can_go_on_grants_at_once() {
    let redis = TestRedis::start();
    let lease = Duration::from_millis(1000);
    eventually("the server is older than a lease", async || {
        let info: String = redis.command(&["INFO", "server"]);
        let uptime = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:"));
        uptime.unwrap().trim().parse::<u64>().unwrap() >= 2
    })
    .await;
    let policy = Policy::builder(1).lease(lease).build().unwrap();
    let permit = quarantining(&redis).try_acquire("x", &policy).await;
    assert!(permit.is_ok(), "{permit:?}");
}

#[tokio::test]
async fn an_eviction_policy_that_loses_semaphores_is_reported() {
    let redis =
        TestRedis::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    let semaphore = used(&redis).await;
    let warning = semaphore.health().warning.unwrap();
    assert!(warning.contains("allkeys-lru") && warning.contains("noeviction"), "{warning}");
    let redis = TestRedis::start();
    assert_eq!(used(&redis).await.health().warning, None);
}

/// After a failover, the new server may lack the last releases.
#[tokio::test]
async fn a_release_that_a_failover_undid_is_made_again() {
    let redis = TestRedis::start();
    let (a, b) = (used(&redis).await, used(&redis).await);
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(20)).build().unwrap();
    let others = b.acquire("y", &policy).await.unwrap();
    let mut waits = tokio::spawn(a.acquire("y", &policy));
    let short = Policy::builder(1).lease(Duration::from_secs(1)).build().unwrap();
    let held = a.acquire("x", &short).await.unwrap();
    let key = "semaphore:{x}";
    let places: Vec<String> = redis.command(&["ZRANGE", key, "0", "-1", "WITHSCORES"]);
    let [id, lease_end] = &*places else { panic!("{places:?}") };
    let lease_end = (lease_end.parse::<u64>().unwrap() + 10_000).to_string();
    drop(held);
    eventually("it is given back", async || redis.command::<u64>(&["EXISTS", key]) == 0).await;
    // Past the next renewal, which finds no server: even so the record is kept for some more seconds.
    tokio::time::sleep(Duration::from_millis(500)).await;
    redis.command::<u64>(&["ZADD", key, &lease_end, id]);
    // As a promoted replica it has another history.
    for role in [["127.0.0.1", "1"], ["NO", "ONE"]] {
        redis.command::<String>(&[&["REPLICAOF"], &role[..]].concat());
    }
    for kind in ["pubsub", "normal"] {
        redis.command::<u64>(&["CLIENT", "KILL", "TYPE", kind]);
    }
    let cut = Stopwatch::start();
    drop(b.acquire("x", &policy).await.expect("a permit, though the lease is 10 s"));
    println!("given back {:?} after the cut", cut.elapsed());
    assert!(cut.elapsed() < Duration::from_millis(1500), "{:?}", cut.elapsed());
    // Nothing else is.
    let waited = tokio::time::timeout(Duration::from_millis(300), &mut waits).await;
    assert!(waited.is_err() && !others.is_lost(), "{waited:?}");
    drop(others);
    drop(waits.await.unwrap().unwrap());
    empty(&redis).await;
}
