//! Spans and events: their names and fields are an interface, and nothing is logged while all is well.

use std::time::Duration;

use tokio_test::{assert_pending, task};
use tower_semaphore::{Policy, Semaphore};

use crate::support::told::Told;

fn policy(wait: Duration) -> Policy {
    Policy::builder(1).wait_timeout(wait).lease(Policy::MIN_LEASE).build().unwrap()
}

/// Everything that is not a fault: at once, after a wait, rejected, timed out, left, renewed, shut down.
async fn normal_run(semaphore: &Semaphore) {
    let long = policy(Duration::from_secs(10));
    let held = semaphore.acquire("x", &long).await.unwrap();
    semaphore.try_acquire("x", &long).await.unwrap_err();
    semaphore.acquire("x", &policy(Duration::from_millis(20))).await.unwrap_err();
    let mut leaves = task::spawn(semaphore.acquire("x", &long));
    assert_pending!(leaves.poll());
    drop(leaves);
    let next = tokio::spawn(semaphore.acquire("x", &long));
    // Longer than the lease: it is renewed.
    let is_lost = tokio::time::timeout(2 * Policy::MIN_LEASE, held.lost()).await.is_ok();
    assert!(!is_lost);
    held.release().await.unwrap();
    drop(next.await.unwrap().unwrap());
    semaphore.shutdown().await;
}

fn check_normal_run(told: &Told) {
    let aloud = told.aloud();
    assert!(aloud.is_empty(), "not quiet: {aloud:#?}");
    for item in told.events().iter().chain(&told.spans()) {
        assert_eq!(item.target, "tower_semaphore", "{item:?}");
    }
    let mut outcomes = Vec::new();
    for span in told.spans() {
        assert_eq!((span.name.as_str(), span.level), ("acquire", tracing::Level::DEBUG));
        let mut fields: Vec<&str> = span.fields.keys().map(String::as_str).collect();
        let is_granted = span.fields["outcome"].starts_with("acquired");
        assert_eq!(fields.contains(&"place"), is_granted, "{span:?}");
        fields.retain(|field| *field != "place");
        assert_eq!(fields, ["limit", "outcome", "semaphore", "waited_ms"]);
        assert_eq!((&*span.fields["semaphore"], &*span.fields["limit"]), ("x", "1"));
        outcomes.push(span.fields["outcome"].clone());
    }
    outcomes.sort();
    let expected =
        ["acquired", "acquired_after_wait", "limit", "queue_timeout", "request_canceled"];
    assert_eq!(outcomes, expected);
    let answered = told.events().into_iter().filter(|event| event.name == "answered");
    assert_eq!(answered.count(), expected.len());
}

#[tokio::test]
async fn an_embedded_semaphore_is_quiet_and_has_a_span_for_each_request() {
    let told = Told::new();
    normal_run(&Semaphore::in_memory()).await;
    check_normal_run(&told);
}

#[cfg(feature = "redis")]
mod redis {
    use super::*;
    use crate::support::eventually;
    use crate::support::redis::TestRedis;
    use crate::support::semaphore::{down, up};

    #[tokio::test]
    async fn a_semaphore_on_redis_is_quiet_and_has_a_span_for_each_request() {
        let told = Told::new();
        normal_run(&TestRedis::start().semaphore()).await;
        check_normal_run(&told);
    }

    #[tokio::test]
    async fn an_outage_is_told_once_and_so_is_its_end() {
        let told = Told::new();
        let mut redis = TestRedis::start();
        let semaphore = redis.semaphore();
        let policy = policy(Duration::ZERO);
        let mut held = Vec::new();
        for n in 0..50 {
            held.push(semaphore.acquire(format!("x{n}"), &policy).await.unwrap());
        }
        redis.kill();
        down(&semaphore).await;
        for _ in 0..50 {
            semaphore.acquire("x", &policy).await.unwrap_err();
        }
        let untold = |name: &str| {
            let aloud = told.aloud();
            assert!(aloud.len() < 10, "{aloud:#?}");
            aloud.into_iter().filter(|event| event.name.contains(name)).collect::<Vec<_>>()
        };
        for permit in &held {
            permit.lost().await;
        }
        eventually("all losses are told", async || {
            let told = untold("were lost");
            told.iter()
                .map(|event| event.fields["permits"].parse::<usize>().unwrap())
                .sum::<usize>()
                == held.len()
        })
        .await;
        assert!(untold("were lost").len() <= 3, "{:#?}", untold("were lost"));
        redis.restart();
        up(&semaphore).await;
        let (away, back) = (untold("is unreachable"), untold("reachable again"));
        assert_eq!((away.len(), back.len()), (1, 1), "{:#?}", told.aloud());
        assert_eq!((away[0].level, back[0].level), (tracing::Level::WARN, tracing::Level::INFO));
        assert!(away[0].fields["error"].contains("Redis"), "{away:?}");
        assert!(back[0].fields["away_ms"].parse::<u64>().unwrap() < 20_000, "{back:?}");
    }

    #[tokio::test]
    async fn a_warning_is_told_once_though_connections_come_and_go() {
        let told = Told::new();
        let redis = TestRedis::start();
        let _: () = redis.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
        let _: () = redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
        let semaphore = redis.semaphore();
        for losses in 1..4 {
            let acquire = semaphore.acquire("x", &policy(Duration::ZERO)).await;
            drop(acquire.unwrap());
            let _: () = redis.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
            eventually("it is lost", async || semaphore.health().disconnects >= losses).await;
            up(&semaphore).await;
        }
        assert_eq!(told.aloud().len(), 1, "{:#?}", told.aloud());
        assert!(told.aloud()[0].fields["warning"].contains("maxmemory"), "{:#?}", told.aloud());
    }

    #[tokio::test]
    async fn a_backend_that_refuses_calls_is_told_once_for_all_of_them() {
        let told = Told::new();
        let redis = TestRedis::start();
        let semaphore = redis.semaphore();
        let _: () = redis.command(&["SET", "semaphore:{taken}", "1"]);
        for _ in 0..20 {
            semaphore.acquire("taken", &policy(Duration::ZERO)).await.unwrap_err();
        }
        let aloud = told.aloud();
        assert_eq!(aloud.len(), 1, "{aloud:#?}");
        assert_eq!(aloud[0].name, "the backend refused a call");
        assert_eq!(aloud[0].fields["semaphore"], "taken");
        assert!(aloud[0].fields["error"].contains("WRONGTYPE"), "{aloud:#?}");
    }
}

#[tokio::test]
async fn the_span_of_a_permit_names_its_place() {
    let told = Told::new();
    let semaphore = Semaphore::in_memory();
    let held = semaphore.acquire("x", &policy(Duration::ZERO)).await.unwrap();
    let holder = semaphore.inspect("x").await.unwrap().holders[0].id.to_string();
    assert_eq!(told.spans()[0].fields["place"], holder);
    drop(held);
}
