//! A limit that finds itself by the refusals of the upstream.
//!
//! Each test in `on_each!` runs on each backend, with the semaphores of several processes.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::operate::Inspection;
use tower_semaphore::{
    AcquireError, Adaptive, ConcurrencyLimitLayer, Feedback, Limit, Permit, Policy, Semaphore,
    feedback,
};

use crate::support::eventually_or;
use crate::support::on_each;
use crate::support::semaphore::waiting;
use crate::support::stopwatch::Stopwatch;
use crate::support::upstream::{self, Phases};

on_each! {
    a_burst_of_refusals_lowers_it_once
    a_request_that_goes_on_later_lowers_it_again
    growth_makes_no_response_one_that_comes_too_late
    it_grows_while_requests_wait_and_back_to_its_maximum
    it_never_leaves_its_range
    an_operators_limit_wins_in_each_order
    a_process_that_starts_meanwhile_knows_it
    other_limits_stay_as_they_are
    a_pause_and_a_decrease_go_together
}

fn policy(min: u32, max: u32) -> Policy {
    let builder = Policy::builder(max).wait_timeout(Duration::from_secs(20));
    builder.adaptive(Adaptive::between(min, max)).build().unwrap()
}

async fn take(semaphore: &Semaphore, policy: &Policy) -> Permit {
    semaphore.acquire("x", policy).await.unwrap()
}

async fn take_all(semaphore: &Semaphore, policy: &Policy, count: usize) -> Vec<Permit> {
    let mut permits = Vec::new();
    for _ in 0..count {
        permits.push(take(semaphore, policy).await);
    }
    permits
}

type Wait = JoinHandle<Result<Permit, AcquireError>>;

fn wait(semaphore: &Semaphore, policy: &Policy) -> Wait {
    tokio::spawn(semaphore.acquire("x", policy))
}

async fn look(semaphore: &Semaphore) -> Inspection {
    semaphore.inspect("x").await.unwrap()
}

/// Waits until the limit in force is this in a process that uses the semaphore.
async fn limit_is(semaphore: &Semaphore, limit: u32) {
    eventually_or(&format!("limit {limit}"), async || {
        let seen = look(semaphore).await;
        if seen.limit == Some(limit) { Ok(()) } else { Err(seen.limit) }
    })
    .await;
}

/// Waits until the limit is lower than this. Returns it.
async fn is_lowered(semaphore: &Semaphore, before: u32) -> u32 {
    eventually_or("it is lowered", async || match look(semaphore).await.limit {
        Some(limit) if limit < before => Ok(()),
        limit => Err(limit),
    })
    .await;
    look(semaphore).await.limit.unwrap()
}

/// Waits until everything that was asked for before has been carried out.
async fn settled(semaphore: &Semaphore) {
    semaphore.set_limit("other", 1).await.unwrap();
}

/// The last of these requests to go on, when as many as the limit allows were in flight, was refused.
fn refuse(permits: &[Permit]) {
    permits.last().unwrap().feedback(Feedback::TooMany);
}

async fn a_burst_of_refusals_lowers_it_once(node: &dyn Fn() -> Semaphore) {
    let (a, b, range) = (node(), node(), policy(2, 100));
    let permits = [take_all(&a, &range, 20).await, take_all(&b, &range, 20).await].concat();
    assert_eq!((look(&a).await.limit, look(&a).await.adapted), (Some(100), None));
    permits.iter().rev().for_each(|permit| permit.feedback(Feedback::TooMany));
    let lowered = is_lowered(&a, 100).await;
    // By a tenth of the forty in flight, of the twenty that the other process saw, if it was first, or of the limit, where
    // that is all that a reply tells.
    assert!([18, 36, 90].contains(&lowered), "{lowered}");
    for semaphore in [&a, &b] {
        limit_is(semaphore, lowered).await;
        // None of these was sent later.
        permits.iter().rev().for_each(|permit| permit.feedback(Feedback::TooMany));
        settled(semaphore).await;
        assert_eq!(look(semaphore).await.limit, Some(lowered));
    }
}

async fn a_request_that_goes_on_later_lowers_it_again(node: &dyn Fn() -> Semaphore) {
    let (own, range) = (node(), policy(1, 10));
    let mut permits = take_all(&own, &range, 10).await;
    refuse(&permits);
    limit_is(&own, 9).await;
    permits.truncate(5);
    permits.push(take(&own, &range).await);
    refuse(&permits);
    is_lowered(&own, 9).await;
}

async fn growth_makes_no_response_one_that_comes_too_late(node: &dyn Fn() -> Semaphore) {
    let (own, range) = (node(), policy(1, 10));
    let permits = take_all(&own, &range, 10).await;
    refuse(&permits);
    limit_is(&own, 9).await;
    drop(permits);
    let permits = take_all(&own, &range, 9).await;
    // It grows, and the request gets the tenth permit.
    let tenth = take(&own, &range).await;
    limit_is(&own, 10).await;
    // Sent after the decrease, and before the growth.
    refuse(&permits);
    is_lowered(&own, 10).await;
    drop(tenth);
}

async fn it_grows_while_requests_wait_and_back_to_its_maximum(node: &dyn Fn() -> Semaphore) {
    let (a, b, range) = (node(), node(), policy(1, 4));
    let permits = take_all(&a, &range, 4).await;
    refuse(&permits);
    limit_is(&a, 3).await;
    drop(permits);
    // Nobody waits, so it stays.
    let held = take_all(&b, &range, 3).await;
    // Of a busy machine, time in which nothing ran counts, too.
    let began = Instant::now();
    let seen = look(&b).await.adapted.expect("a number");
    let waits = wait(&a, &range);
    waiting(&b, "x", 1).await;
    let permit = waits.await.unwrap().unwrap();
    assert!(seen.unchanged_for + began.elapsed() >= Duration::from_millis(1000));
    limit_is(&a, 4).await;
    limit_is(&b, 4).await;
    drop((held, permit));
}

async fn it_never_leaves_its_range(node: &dyn Fn() -> Semaphore) {
    let (own, range) = (node(), policy(3, 5));
    eventually_or("it is at its minimum", async || {
        let permit = take(&own, &range).await;
        permit.feedback(Feedback::TooMany);
        permit.release().await.unwrap();
        let limit = look(&own).await.limit.unwrap();
        assert!((3..=5).contains(&limit), "{limit}");
        if limit == 3 { Ok(()) } else { Err(limit) }
    })
    .await;
    let held = take_all(&own, &range, 3).await;
    assert!(own.try_acquire("x", &range).await.is_err());
    refuse(&held);
    settled(&own).await;
    assert_eq!(look(&own).await.limit, Some(3));
}

async fn an_operators_limit_wins_in_each_order(node: &dyn Fn() -> Semaphore) {
    let (operator, own, range) = (node(), node(), policy(1, 10));
    let permits = take_all(&own, &range, 10).await;
    // First the operator.
    operator.set_limit("x", 7).await.unwrap();
    limit_is(&own, 7).await;
    refuse(&permits);
    settled(&own).await;
    assert_eq!((look(&own).await.limit, look(&own).await.adapted), (Some(7), None));
    operator.clear_limit("x").await.unwrap();
    limit_is(&own, 10).await;
    // First the upstream.
    refuse(&permits);
    limit_is(&own, 9).await;
    operator.set_limit("x", 12).await.unwrap();
    limit_is(&own, 12).await;
    drop(permits);
    let late = take_all(&own, &range, 12).await;
    assert!(own.try_acquire("x", &range).await.is_err());
    refuse(&late);
    settled(&own).await;
    let seen = look(&own).await;
    assert_eq!((seen.limit, seen.adapted.map(|adapted| adapted.limit)), (Some(12), Some(9)));
    operator.clear_limit("x").await.unwrap();
    limit_is(&own, 9).await;
    drop(late);
    // Both at once: whichever comes first, the operator's is in force.
    refuse(&[take(&own, &range).await]);
    operator.set_limit("x", 8).await.unwrap();
    limit_is(&own, 8).await;
    settled(&own).await;
    let held = take_all(&own, &range, 8).await;
    assert!(own.try_acquire("x", &range).await.is_err());
    drop(held);
    // A pause as well.
    operator.pause("x").await.unwrap();
    limit_is(&own, 0).await;
    assert!(own.try_acquire("x", &range).await.is_err());
}

async fn a_process_that_starts_meanwhile_knows_it(node: &dyn Fn() -> Semaphore) {
    let (own, range) = (node(), policy(1, 4));
    let permits = take_all(&own, &range, 4).await;
    refuse(&permits);
    limit_is(&own, 3).await;
    drop(permits);
    // Something else is set later, so that this is not the last change.
    own.set_limit("y", 3).await.unwrap();
    own.shutdown().await;
    drop(own);
    let late = node();
    // Its very first calls are judged by it.
    let held = take_all(&late, &range, 3).await;
    assert!(late.try_acquire("x", &range).await.is_err());
    assert_eq!(look(&late).await.limit, Some(3));
    drop(held);
}

async fn other_limits_stay_as_they_are(node: &dyn Fn() -> Semaphore) {
    let (own, plain) = (node(), Policy::new(4));
    let permits = take_all(&own, &plain, 4).await;
    permits.iter().for_each(|permit| permit.feedback(Feedback::TooMany));
    settled(&own).await;
    assert_eq!((look(&own).await.limit, look(&own).await.adapted), (Some(4), None));
}

async fn a_pause_and_a_decrease_go_together(node: &dyn Fn() -> Semaphore) {
    let (own, range) = (node(), policy(1, 4));
    let permits = take_all(&own, &range, 4).await;
    permits[3].feedback(Feedback::Backoff(Duration::from_millis(200)));
    drop(permits);
    // No growth counts that a pause made wait.
    let all: Vec<_> = (0..4).map(|_| wait(&own, &range)).collect();
    waiting(&own, "x", 1).await;
    assert_eq!(look(&own).await.in_use, 3);
    assert_eq!(look(&own).await.limit, Some(3));
    drop(all);
}

#[tokio::test]
async fn what_cannot_be_meant_is_an_error() {
    let of = |limit: Limit, min, max| {
        Policy::builder(limit)
            .adaptive(Adaptive::between(min, max))
            .build()
            .unwrap_err()
            .to_string()
    };
    let permits = Limit::Permits;
    assert_eq!(
        of(permits(100), 0, 100),
        "adaptive limit is from 0 to 100, and with 0 no response would ever come that lets it grow; expected 1 or more"
    );
    for min in [100, 101] {
        assert_eq!(
            of(permits(100), min, 100),
            format!("adaptive limit is from {min} to 100; expected a minimum below the maximum")
        );
    }
    for limit in [50, 200, 0] {
        assert_eq!(
            of(permits(limit), 5, 100),
            format!(
                "limit is {limit}, and the adaptive limit begins at its maximum of 100; expected the same number"
            )
        );
    }
    assert_eq!(
        of(Limit::Unlimited, 5, 100),
        "adaptive limit is set without a limit that could be lowered; expected a limit of 100 permits"
    );
    let builder = || Policy::builder(100).adaptive(Adaptive::between(5, 100));
    assert_eq!(
        builder().headroom(5).build().unwrap_err().to_string(),
        "headroom is 5, which leaves nothing of the lowest adaptive limit of 5 to the other classes; expected 0 to 4"
    );
    assert!(builder().headroom(4).build().is_ok());
    for (interval, text) in [(999, "999ms"), (60_001, "60.001s")] {
        let range = Adaptive::between(5, 100).grow_every(Duration::from_millis(interval));
        assert_eq!(
            Policy::builder(100).adaptive(range).build().unwrap_err().to_string(),
            format!("adaptive limit grows every {text}; expected 1s to 60s")
        );
    }
    let policy = builder().build().unwrap();
    assert_eq!(policy.adaptive(), Some(Adaptive::between(5, 100)));
    assert_eq!(policy.clone().with_limit(100).adaptive(), policy.adaptive());
    assert_eq!(policy.with_limit(20).adaptive(), None);
}

#[tokio::test]
async fn a_layer_begins_at_the_maximum() {
    let semaphore = Semaphore::in_memory();
    let builder = || {
        let range = Adaptive::between(5, 100);
        ConcurrencyLimitLayer::builder(&semaphore, "x")
            .adaptive(range)
            .on_response(feedback::retry_after)
    };
    assert!(builder().build().is_ok());
    assert!(builder().limit(100).build().is_ok());
    let error = builder().limit(50).build().unwrap_err().to_string();
    assert!(error.starts_with("limit is 50, and the adaptive limit begins"), "{error}");
    let error = builder().limit(Limit::Unlimited).build().unwrap_err().to_string();
    assert!(error.starts_with("adaptive limit is set without a limit"), "{error}");
    assert!(builder().limit_by(|_, _| 100).build().is_ok());
}

/// The capacity of an upstream changes twice. `tests/long storm adaptive` does the same with Redis and the real clock.
#[tokio::test(start_paused = true)]
async fn a_fleet_finds_the_capacity_of_its_upstream_whatever_its_size() {
    const PHASES: Phases = &[
        (40, Duration::from_secs(120)),
        (10, Duration::from_secs(80)),
        (40, Duration::from_secs(100)),
    ];
    let mut uses = Vec::new();
    for processes in [1, 3, 20] {
        let backend = MemoryBackend::new();
        let nodes: Vec<_> = (0..processes).map(|_| Semaphore::new(backend.clone())).collect();
        let range = Adaptive::between(1, 100);
        let patient = Policy::builder(100).wait_timeout(Policy::MAX_WAIT_TIMEOUT).adaptive(range);
        let patient = patient.build().unwrap();
        let of = upstream::ask(&nodes, "x", &patient, PHASES, Duration::from_secs(60)).await;
        println!("{processes} processes: {of:?}");
        assert!(of.used >= 0.88, "{processes} processes: {of:?}");
        assert!(of.refused <= 0.03, "{processes} processes: {of:?}");
        uses.push(of.used);
    }
    let (most, least) =
        (uses.iter().copied().fold(0.0, f64::max), uses.iter().copied().fold(1.0, f64::min));
    assert!(most - least <= 0.06, "{uses:?}");
}

/// Where Redis keeps it, and what bounds, refuses and loses it.
#[cfg(feature = "redis")]
mod in_redis {
    use tower_semaphore::backend::RedisBackend;
    use tower_semaphore::backend::seam::{Backend, Change, OVERRIDES};
    use tower_semaphore::protocol::{Adjustment, SentUnder};

    use super::*;
    use crate::support::eventually;
    use crate::support::redis::TestRedis;

    const ADAPTIVE: &str = "semaphore:{!overrides}:adaptive";
    const RANGE: Adaptive = Adaptive::between(5, 100);
    /// The most records.
    const MOST: usize = 1000;

    const fn lower(version: u64) -> Adjustment {
        Adjustment::Lower(SentUnder { version, in_use: u32::MAX })
    }

    /// Asks for changes, one after the other, over a connection of their own. Returns which were refused.
    async fn ask(
        server: &TestRedis,
        changes: impl IntoIterator<Item = (String, Adjustment)>,
    ) -> Vec<String> {
        let backend = RedisBackend::builder(server.url()).build().unwrap();
        let key = backend.key(OVERRIDES);
        let connection = backend.connect(&backend.shard(&key)).await.unwrap().unwrap();
        let asked = async {
            let mut refused = Vec::new();
            for (name, adjustment) in changes {
                let change = Change::Adapt { range: RANGE, adjustment };
                let answer = connection.set_override(&key, &name.as_str().into(), change).await;
                if answer.is_err() {
                    refused.push(name);
                }
            }
            refused
        };
        tokio::select! {
            refused = asked => refused,
            () = connection.drive() => panic!("the connection was closed"),
        }
    }

    async fn change(server: &TestRedis, adjustment: Adjustment) {
        assert!(ask(server, [("x".to_owned(), adjustment)]).await.is_empty());
    }

    /// Returns the limit and the versions in the record of `x`.
    fn record(server: &TestRedis) -> Option<[u64; 3]> {
        let record: Option<String> = server.command(&["HGET", ADAPTIVE, "x"]);
        let numbers: Vec<_> =
            record?.split(' ').map(|word| word.parse().expect("a number")).collect();
        Some(numbers.try_into().expect("three"))
    }

    #[tokio::test]
    async fn a_decrease_is_compared_with_the_last_decrease() {
        let server = TestRedis::start();
        change(&server, Adjustment::Raise).await;
        assert_eq!(record(&server), None, "it is at its maximum");
        change(&server, lower(0)).await;
        let [limit, lowered, changed] = record(&server).unwrap();
        assert_eq!((limit, lowered), (90, changed));
        change(&server, lower(0)).await;
        change(&server, lower(lowered - 1)).await;
        assert_eq!(record(&server), Some([90, lowered, changed]));
        // Growth, by the server's clock: not before its time, however often it is asked for.
        change(&server, Adjustment::Raise).await;
        assert_eq!(record(&server), Some([90, lowered, changed]));
        eventually("it grows", async || {
            change(&server, Adjustment::Raise).await;
            record(&server).unwrap()[0] > 90
        })
        .await;
        change(&server, Adjustment::Raise).await;
        let [limit, still, grown] = record(&server).unwrap();
        assert_eq!((limit, still), (91, lowered));
        assert!(grown >= changed + 1_000_000, "{grown} {changed}");
        // Sent before the growth, and after the decrease.
        change(&server, lower(lowered)).await;
        assert_eq!(record(&server).unwrap()[0], 81);
        for _ in 0..50 {
            change(&server, lower(u64::MAX >> 12)).await;
            assert!(record(&server).unwrap()[0] >= 5);
        }
        let at_minimum = record(&server);
        assert_eq!(at_minimum.unwrap()[0], 5);
        change(&server, lower(u64::MAX >> 12)).await;
        assert_eq!(record(&server), at_minimum, "no write");
    }

    #[tokio::test]
    async fn a_burst_is_one_write_and_one_call_of_each_process() {
        let server = TestRedis::start();
        let (nodes, range) = ([server.semaphore(), server.semaphore()], policy(1, 40));
        let permits =
            [take_all(&nodes[0], &range, 20).await, take_all(&nodes[1], &range, 20).await];
        let _: String = server.command(&["CONFIG", "RESETSTAT"]);
        for permit in permits.iter().flatten() {
            permit.feedback(Feedback::TooMany);
        }
        for node in &nodes {
            limit_is(node, 36).await;
            settled(node).await;
        }
        // Two more are those of `settled`.
        assert_eq!(server.calls("hset"), 1 + 2);
        assert_eq!(record(&server).unwrap()[0], 36);
        drop(permits);
    }

    #[tokio::test]
    async fn a_lost_message_costs_a_second() {
        let server = TestRedis::start();
        let poll_only = Semaphore::new(server.without_messages());
        let (own, range) = (server.semaphore(), policy(1, 4));
        drop(take(&poll_only, &range).await);
        let permits = take_all(&own, &range, 4).await;
        refuse(&permits);
        limit_is(&own, 3).await;
        drop(permits);
        let began = Stopwatch::start();
        loop {
            let held = take_all(&poll_only, &range, 3).await;
            if poll_only.try_acquire("x", &range).await.is_err() {
                break drop(held);
            }
            assert!(began.elapsed() < Duration::from_millis(1500), "it is not known");
        }
    }

    #[tokio::test]
    async fn a_loss_of_data_returns_to_the_maximum() {
        let server = TestRedis::start();
        let (own, range) = (server.semaphore(), policy(1, 4));
        let permits = take_all(&own, &range, 4).await;
        refuse(&permits);
        limit_is(&own, 3).await;
        let _: String = server.command(&["FLUSHALL"]);
        limit_is(&own, 4).await;
        // And down again: no version from before the loss stands in the way.
        drop(permits);
        let permits = take_all(&own, &range, 4).await;
        refuse(&permits);
        limit_is(&own, 3).await;
    }

    #[tokio::test]
    async fn it_outlives_the_connections_and_a_restart_of_all_processes() {
        let server = TestRedis::start();
        let (own, range) = (server.semaphore(), policy(1, 4));
        let permits = take_all(&own, &range, 4).await;
        refuse(&permits);
        limit_is(&own, 3).await;
        let _: u64 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        eventually("it is there again", async || own.inspect("x").await.is_ok()).await;
        assert_eq!(look(&own).await.limit, Some(3));
        drop(permits);
        drop(own);
        let late = server.semaphore();
        let held = take_all(&late, &range, 3).await;
        assert!(late.try_acquire("x", &range).await.is_err());
        drop(held);
    }

    #[tokio::test]
    async fn it_expires_with_its_last_change() {
        let server = TestRedis::start();
        change(&server, lower(0)).await;
        let kept = 1..=600_000;
        let left = || server.command::<i64>(&["PTTL", ADAPTIVE]);
        assert!(kept.contains(&left()), "{}", left());
        // A record that is over counts no more, though others keep the key.
        let [_, _, version] = record(&server).unwrap();
        let old = version - 600_000_000;
        let record_of = |limit: u64, at: u64| format!("{limit} {at} {at}");
        let _: u64 = server.command(&["HSET", ADAPTIVE, "x", &record_of(50, old)]);
        let (own, range) = (server.semaphore(), policy(5, 100));
        drop(take(&own, &range).await);
        assert_eq!((look(&own).await.limit, look(&own).await.adapted), (Some(100), None));
        change(&server, lower(0)).await;
        limit_is(&own, 90).await;
    }

    #[tokio::test]
    async fn what_the_script_did_not_write_changes_nothing() {
        let server = TestRedis::start();
        let (range, version) = (policy(5, 100), "1700000000000000");
        let far = "9000000000000000";
        for record in [
            "",
            "50",
            "50 1",
            "50 1 1 1",
            "-50 1 1",
            "5e1 1 1",
            "50 2 1",
            "99999999999 1 1",
            "50 9000000000000000 9000000000000000",
            "50 1 99999999999999999999",
            "x y z",
        ] {
            let _: u64 =
                server.command(&["HSET", ADAPTIVE, "@", version, "x", record, "y", record]);
            let _: u64 = server.command(&["HSET", ADAPTIVE, "z", "\u{fffd} 1 1"]);
            let own = server.semaphore();
            let permit = take(&own, &range).await;
            assert_eq!(look(&own).await.limit, Some(100), "{record:?}");
            permit.feedback(Feedback::TooMany);
            limit_is(&own, 90).await;
            let _: u64 = server.command(&["DEL", ADAPTIVE]);
        }
        // Nor does a version.
        for of_hash in ["", "soon", "-1", "99999999999999999999", far] {
            let _: u64 = server.command(&["HSET", ADAPTIVE, "@", of_hash]);
            let own = server.semaphore();
            let permit = take(&own, &range).await;
            permit.feedback(Feedback::TooMany);
            limit_is(&own, 90).await;
            permit.release().await.unwrap();
            let permit = take(&own, &range).await;
            permit.feedback(Feedback::TooMany);
            limit_is(&own, 81).await;
            let left: i64 = server.command(&["PTTL", ADAPTIVE]);
            assert!((1..=600_000).contains(&left), "{of_hash}: {left}");
            let _: u64 = server.command(&["DEL", ADAPTIVE]);
        }
        // Limits outside of the range are as its ends.
        for (limit, expected) in [("0", 5), ("4294967295", 100)] {
            let [seconds, _]: [String; 2] = server.command(&["TIME"]);
            let now = format!("{seconds}000000");
            let record = format!("{limit} {now} {now}");
            let _: u64 = server.command(&["HSET", ADAPTIVE, "@", &now, "x", &record]);
            let own = server.semaphore();
            drop(take(&own, &range).await);
            assert_eq!(look(&own).await.limit, Some(expected));
        }
    }

    #[tokio::test]
    async fn there_are_so_many_and_no_more() {
        let server = TestRedis::start();
        let all = (0..MOST + 2).map(|i| (i.to_string(), lower(0)));
        assert_eq!(ask(&server, all).await, ["1000", "1001"]);
        // One that has a record goes on, and one that is over makes room.
        let known = [("7".to_owned(), lower(u64::MAX >> 12))];
        assert!(ask(&server, known).await.is_empty());
        let _: u64 = server.command(&["HSET", ADAPTIVE, "8", "50 1 1"]);
        assert_eq!(ask(&server, [("1000".to_owned(), lower(0))]).await, [""; 0]);
        assert_eq!(server.command::<Option<String>>(&["HGET", ADAPTIVE, "8"]), None);
        // A process whose name finds no room has its maximum, and is none the worse for it.
        let (own, range) = (server.semaphore(), policy(5, 100));
        let permit = take(&own, &range).await;
        permit.feedback(Feedback::TooMany);
        settled(&own).await;
        assert_eq!(look(&own).await.limit, Some(100));
        permit.release().await.unwrap();
    }
}
