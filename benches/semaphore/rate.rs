//! The cost of a rate beside a plain semaphore, and how promptly and fully its windows are used.

use std::time::{Duration, Instant};

use futures_util::future::{join_all, try_join_all};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_semaphore::{Permit, Policy, PolicyBuilder, Semaphore};

use super::redis::{Redis, until_waiting};
use super::stats::max;
use super::table::{Bound, Row};
use super::{Context, runtime};

const CASE: &str = "rate";
const MINUTE: Duration = Duration::from_secs(60);

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    runtime().block_on(async {
        let semaphore = redis.semaphore();
        uncontended(context, &redis, &semaphore).await;
        memory(context, &redis, &semaphore).await;
        opening(context, &redis).await;
        hammered(context, &redis).await;
        semaphore.shutdown().await;
    });
}

fn patient(permits: u32) -> PolicyBuilder {
    Policy::builder(permits).wait_timeout(Duration::from_secs(30))
}

async fn uncontended(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let mut names = 0;
    // In one window, the last half of which is measured.
    let mut pairs = async |policy: Policy| {
        names += 1;
        let name = format!("window {names}");
        let held = try_join_all((0..10).map(|_| semaphore.acquire(&*name, &policy))).await;
        let _held = held.expect("permits");
        let turns = async |count| {
            for _ in 0..count {
                let permit = semaphore.acquire(&*name, &policy).await.expect("a permit");
                permit.release().await.expect("an answer");
            }
        };
        turns(290).await;
        let before = redis.usage();
        turns(290).await;
        let usage = redis.usage().since(before);
        usage.per_script() * usage.scripts / 290.0
    };
    let (mut rated, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..context.either(5, 15) {
        rated.push(pairs(patient(100).rate(600, MINUTE).build().expect("a policy")).await);
        plain.push(pairs(patient(100).build().expect("a policy")).await);
    }
    let what = "acquire and release, 300 to 590 starts in the window: Redis' time";
    let row = Row::new(CASE, what, "µs", &rated).against("plain", &rated, &plain);
    context.table.add(row.bound(Bound::RatioMost(1.4)));
}

async fn memory(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let policy = patient(600).rate(600, MINUTE).build().expect("a policy");
    // The first request makes what every name costs.
    drop(semaphore.acquire("other", &policy).await);
    let before = redis.memory();
    for _ in 0..30 {
        let some = (0..20).map(|_| semaphore.acquire("memory", &policy));
        let permits = try_join_all(some).await.expect("permits");
        try_join_all(permits.into_iter().map(Permit::release)).await.expect("answers");
    }
    let row = Row::new(CASE, "600 starts in a window", "kB", &[(redis.memory() - before) / 1e3]);
    context.table.add(row.bound(Bound::Most(80.0)));
}

/// 200 requests of two processes wait for a window.
async fn opening(context: &mut Context, redis: &Redis) {
    let nodes = [redis.semaphore(), redis.semaphore()];
    let policy = patient(1000).rate(200, Duration::from_secs(1)).build().expect("a policy");
    let (mut late, mut calls) = (Vec::new(), Vec::new());
    for round in 0..context.either(3, 10) {
        let name = format!("opening {round}");
        let first = try_join_all((0..200).map(|_| nodes[0].acquire(&*name, &policy))).await;
        let opens = Instant::now() + Duration::from_secs(1);
        drop(first.expect("permits"));
        let mut waiting = JoinSet::new();
        for i in 0..200 {
            let acquire = nodes[i % 2].acquire(&*name, &policy);
            waiting.spawn(async move {
                let permit = acquire.await.expect("a permit");
                // The others are awaited, so that no release is counted.
                (Instant::now(), permit)
            });
        }
        until_waiting(&nodes[0], &name, 200).await;
        sleep(opens.saturating_duration_since(Instant::now()) - Duration::from_millis(20)).await;
        let before = redis.usage();
        let all = waiting.join_all().await;
        calls.push(redis.usage().since(before).scripts / 2.0);
        let last = all.iter().map(|(at, _)| *at).max().unwrap_or(opens);
        late.push(last.saturating_duration_since(opens).as_secs_f64() * 1e3);
    }
    let row = Row::new(
        CASE,
        "a window opens for 200 waiters: until the last has its permit",
        "ms",
        &late,
    );
    context.table.add(row.bound(Bound::Most(10.0)));
    let row = Row::new(CASE, "the same: calls of a process, renewals included", "", &calls);
    context.table.add(row.bound(Bound::Most(2.0)));
    join_all(nodes.iter().map(Semaphore::shutdown)).await;
}

/// Three processes ask for all they can get; one of them ends without a word in the middle.
async fn hammered(context: &mut Context, redis: &Redis) {
    let (starts, window) = (20, Duration::from_millis(200));
    let policy = patient(100).rate(starts, window).build().expect("a policy");
    let length = context.either(15, 50) * window;
    let (began, mut processes) = (Instant::now(), Vec::new());
    for _ in 0..3 {
        let (semaphore, mut tasks) = (redis.semaphore(), JoinSet::new());
        for _ in 0..16 {
            let (semaphore, policy) = (semaphore.clone(), policy.clone());
            tasks.spawn(async move {
                let mut grants = Vec::new();
                while began.elapsed() < length {
                    let permit = semaphore.acquire("hammered", &policy).await.expect("a permit");
                    grants.push(Instant::now());
                    drop(permit);
                }
                grants
            });
        }
        processes.push(tasks);
    }
    sleep(length / 2).await;
    drop(processes.pop());
    let half = Instant::now();
    let mut grants = Vec::new();
    for tasks in processes {
        grants.extend(tasks.join_all().await.into_iter().flatten());
    }
    // The times of grants are known here by their replies, whose delays differ by less than this.
    let certain = window - Duration::from_millis(20);
    let most = grants.iter().map(|from| {
        grants.iter().filter(|came| (*from..*from + certain).contains(*came)).count() as f64
    });
    let row = Row::new(
        CASE,
        "20 in 200 ms: most starts in a window",
        "",
        &[max(&most.collect::<Vec<_>>())],
    );
    context.table.add(row.bound(Bound::Most(f64::from(starts))));
    // Whole windows, after those that the dead process may have used.
    let from = half + 2 * window;
    let windows = (began + length).duration_since(from).as_millis() / window.as_millis();
    let windows = u32::try_from(windows).expect("a few");
    let used = grants.iter().filter(|came| (from..from + windows * window).contains(*came));
    let used = used.count() as f64 / f64::from(windows * starts);
    let row = Row::new(CASE, "the same: use of the rate by two processes", "", &[used]);
    context.table.add(row.bound(Bound::Least(0.98)));
}
