//! Whether scripts take longer with many names or places, and the memory of a place in Redis.
//!
//! Data that only has to exist is written to Redis in the format of the crate (see `lua/acquire.lua`). The crate itself
//! makes the places whose memory is counted.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deadpool_redis::redis::{Cmd, Pipeline, cmd};
use futures_util::future::join_all;
use tower_semaphore::{AcquireError, Policy, RejectReason, Semaphore};

use super::redis::{Redis, until_waiting};
use super::stats::alternate;
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "scale";
const MANY: u64 = 100_000;
const FEW: u64 = 10;
const OTHERS: u64 = 1_000_000;
const PLACES: u32 = 10_000;
const DAY_MS: u64 = 24 * 3600 * 1000;

pub(crate) fn run(context: &mut Context) {
    let runtime = runtime();
    runtime.block_on(async {
        let redis = Redis::start();
        let semaphore = redis.semaphore();
        holders(context, &redis, &semaphore).await;
        waiters(context, &redis, &semaphore).await;
        others(context, &redis, &semaphore).await;
        memory(context).await;
        semaphore.shutdown().await;
    });
}

async fn holders(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    for (name, count) in [("holders-few", FEW), ("holders-many", MANY)] {
        fill(redis, name, count, 0);
    }
    let pairs = context.either(300, 1500);
    let (many, few) = alternate(
        context.rounds(),
        async || pair(redis, semaphore, "holders-many", pairs).await,
        async || pair(redis, semaphore, "holders-few", pairs).await,
    )
    .await;
    add(context, "acquire and release, 100,000 hold", &many, &few);
}

async fn waiters(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    for (name, count) in [("waiters-few", FEW), ("waiters-many", MANY)] {
        fill(redis, name, FEW, count);
    }
    let pairs = context.either(100, 400);
    let (many, few) = alternate(
        context.rounds(),
        async || join_and_leave(redis, semaphore, "waiters-many", pairs).await,
        async || join_and_leave(redis, semaphore, "waiters-few", pairs).await,
    )
    .await;
    add(context, "join and leave the queue, 100,000 wait", &many, &few);
}

async fn others(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let full = Redis::start();
    // Much faster than a million commands.
    let script = "
        for i = ARGV[1], ARGV[2] do
          local key = 'semaphore:{other-' .. string.format('%d', i) .. '}'
          redis.call('ZADD', key, ARGV[3], 'FillerNode0:' .. string.format('%d', i))
          redis.call('PEXPIRE', key, ARGV[4])
        end";
    for from in (0..OTHERS).step_by(20_000) {
        let mut eval = cmd("EVAL");
        eval.arg(script).arg(0).arg(from).arg(from + 19_999).arg(lease_end()).arg(DAY_MS);
        full.query::<()>(&eval);
    }
    let keys: u64 = full.query(&cmd("DBSIZE"));
    assert_eq!(keys, OTHERS);
    let on_full = full.semaphore();
    let pairs = context.either(300, 1500);
    let (many, few) = alternate(
        context.rounds(),
        async || pair(&full, &on_full, "alone", pairs).await,
        async || pair(redis, semaphore, "alone", pairs).await,
    )
    .await;
    add(context, "acquire and release, 1,000,000 other semaphores", &many, &few);
    on_full.shutdown().await;
}

fn add(context: &mut Context, what: &str, many: &[f64], few: &[f64]) {
    let row = Row::new(CASE, format!("a script call: {what}"), "µs", many);
    context.table.add(row.against("10", many, few).bound(Bound::RatioMost(1.5)));
}

/// Writes a semaphore with this number of places, whose leases last for a day.
fn fill(redis: &Redis, name: &str, holding: u64, waiting: u64) {
    let (lease_end, first_ticket) = (lease_end(), micros_since_1970() - 1_000_000);
    for from in (0..holding + waiting).step_by(1000) {
        let mut zadd = add_to(name);
        for n in from..(from + 1000).min(holding + waiting) {
            zadd.arg(lease_end).arg(format!("FillerNode0:{n}"));
            if n >= holding {
                zadd.arg(first_ticket + n).arg(format!("{}FillerNode0:{n}", "q".repeat(52)));
            }
        }
        let mut pipeline = Pipeline::new();
        pipeline.add_command(zadd).ignore();
        pipeline.pexpire(key(name), i64::try_from(DAY_MS).expect("small")).ignore();
        redis.pipeline(&pipeline);
    }
}

fn add_to(name: &str) -> Cmd {
    let mut zadd = cmd("ZADD");
    zadd.arg(key(name));
    zadd
}

fn key(name: &str) -> String {
    format!("semaphore:{{{name}}}")
}

fn micros_since_1970() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later");
    u64::try_from(now.as_micros()).expect("not for long")
}

fn lease_end() -> u64 {
    micros_since_1970() / 1000 + DAY_MS
}

/// Returns the µs of a script call.
async fn pair(redis: &Redis, semaphore: &Semaphore, name: &str, pairs: u32) -> f64 {
    let policy = Policy::new(u32::MAX);
    // Creates what this process keeps of a name, and the connection.
    drop(semaphore.acquire(name, &policy).await);
    let before = redis.usage();
    for _ in 0..pairs {
        let permit = semaphore.acquire(name, &policy).await.expect("a permit");
        permit.release().await.expect("an answer");
    }
    redis.usage().since(before).per_script()
}

/// Returns the µs of a script call that grants no permit.
async fn join_and_leave(redis: &Redis, semaphore: &Semaphore, name: &str, pairs: u32) -> f64 {
    let limit = u32::try_from(FEW).expect("small");
    let policy = Policy::builder(limit).wait_timeout(Duration::from_millis(1)).max_queue(u32::MAX);
    let policy = policy.build().expect("in range");
    let before = redis.usage();
    for _ in 0..pairs {
        let refused = semaphore.acquire(name, &policy).await;
        let Err(AcquireError::Rejected(rejected)) = refused else { panic!("{refused:?}") };
        // The place joined the queue, and leaves with the next call.
        assert_eq!(rejected.reason, RejectReason::QueueTimeout, "{rejected:?}");
        assert!(rejected.waiting >= Some(FEW), "{rejected:?}");
    }
    let usage = redis.usage().since(before);
    assert!(usage.scripts >= f64::from(pairs), "{} calls", usage.scripts);
    usage.per_script()
}

async fn memory(context: &mut Context) {
    let redis = Redis::start();
    let semaphore = redis.semaphore();
    let policy = |limit: u32| {
        let policy = Policy::builder(limit).max_queue(u32::MAX);
        policy.wait_timeout(Duration::from_secs(600)).build().expect("in range")
    };
    drop(semaphore.acquire("other", &policy(1)).await);
    let before = redis.memory();
    let held = join_all((0..PLACES).map(|_| semaphore.acquire("held", &policy(PLACES)))).await;
    assert!(held.iter().all(Result::is_ok));
    let between = redis.memory();
    // They have their places at once, and are answered in turn.
    let first = semaphore.acquire("waiting", &policy(1)).await.expect("a permit");
    let waiting: Vec<_> = (0..PLACES).map(|_| semaphore.acquire("waiting", &policy(1))).collect();
    until_waiting(&semaphore, "waiting", PLACES).await;
    let after = redis.memory();
    for (what, name, most, whole) in [
        ("memory of one that holds", "held", 150.0, between - before),
        ("memory of one that waits", "waiting", 325.0, after - between),
    ] {
        // A table that has grown is moved step by step, one step for each look-up, and exists twice until then.
        let mut looks = Pipeline::new();
        for _ in 0..2 * PLACES {
            looks.cmd("ZSCORE").arg(key(name)).arg("nobody");
        }
        redis.pipeline(&looks);
        let mut usage = cmd("MEMORY");
        usage.arg("USAGE").arg(key(name)).arg("SAMPLES").arg(0);
        let bytes: f64 = redis.query(&usage);
        let each = |bytes: f64| bytes / f64::from(PLACES);
        context.table.add(
            Row::new(CASE, what, "bytes", &[each(bytes)])
                .bound(Bound::Most(most))
                .counted()
                .note(format!("the whole server's memory grew by {}", number(each(whole)))),
        );
    }
    drop((first, waiting, held));
    semaphore.shutdown().await;
}
