//! The cost of a budget beside a plain semaphore, and how fully it is used.

use std::time::{Duration, Instant};

use futures_util::future::{join_all, try_join_all};
use tokio::task::JoinSet;
use tower_semaphore::{Ask, Budget, Policy, PolicyBuilder, Semaphore};

use super::redis::Redis;
use super::table::{Bound, Row};
use super::{Context, runtime};

const CASE: &str = "budget";
const MINUTE: Duration = Duration::from_secs(60);

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    runtime().block_on(async {
        let semaphore = redis.semaphore();
        uncontended(context, &redis, &semaphore).await;
        semaphore.shutdown().await;
        used(context, &redis).await;
    });
}

fn patient(permits: u32) -> PolicyBuilder {
    Policy::builder(permits).wait_timeout(Duration::from_secs(30))
}

/// Half of it is in use, and each request settles half of its estimate.
async fn uncontended(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let tokens = Budget::new("tokens", 1_000_000_000, MINUTE).expect("a budget");
    let mut names = 0;
    let mut pairs = async |policy: Policy, units: Option<u64>| {
        names += 1;
        let name = format!("budget {names}");
        let ask = |units: Option<u64>| match units {
            Some(units) => Ask::of(&*name).estimate(&tokens, units),
            None => Ask::of(&*name),
        };
        let first = semaphore.acquire(ask(units.map(|_| 500_000_000)), &policy).await;
        let others = (0..9).map(|_| semaphore.acquire(ask(units), &policy));
        let _held = (first.expect("a permit"), try_join_all(others).await.expect("permits"));
        let turns = async |count| {
            for _ in 0..count {
                let permit = semaphore.acquire(ask(units), &policy).await.expect("a permit");
                permit.settle("tokens", 500);
                permit.release().await.expect("an answer");
            }
        };
        turns(290).await;
        let before = redis.usage();
        turns(290).await;
        let usage = redis.usage().since(before);
        usage.per_script() * usage.scripts / 290.0
    };
    let (mut budget, mut both, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    let of = |rate: bool| {
        let policy = patient(100);
        let policy = if rate { policy.rate(600, MINUTE) } else { policy };
        policy.build().expect("a policy")
    };
    for _ in 0..context.either(5, 15) {
        budget.push(pairs(of(false), Some(1000)).await);
        plain.push(pairs(of(false), None).await);
        both.push(pairs(of(true), Some(1000)).await);
    }
    for (what, values, most) in [
        ("acquire and release, which settles: Redis' time", &budget, 1.6),
        ("the same, with a rate, 300 to 590 starts in the window", &both, 1.8),
    ] {
        let row = Row::new(CASE, what, "µs", values).against("plain", values, &plain);
        context.table.add(row.bound(Bound::RatioMost(most)));
    }
}

/// Three processes ask for all they can get. Estimates are twice what is used.
async fn used(context: &mut Context, redis: &Redis) {
    const UNITS: u64 = 1000;
    let second = Duration::from_secs(1);
    let tokens = Budget::new("tokens", UNITS, second).and_then(|tokens| tokens.burst(UNITS / 5));
    let (tokens, policy) = (tokens.expect("a budget"), patient(20).build().expect("a policy"));
    let nodes = [redis.semaphore(), redis.semaphore(), redis.semaphore()];
    let mut shares = Vec::new();
    for round in 0..context.either(2, 5) {
        let began = Instant::now();
        let end = began + 3 * second;
        let mut tasks = JoinSet::new();
        for i in 0..24 {
            let (semaphore, tokens, policy) =
                (nodes[i % 3].clone(), tokens.clone(), policy.clone());
            tasks.spawn(async move {
                let mut used = 0;
                while Instant::now() < end {
                    let ask = Ask::of(format!("used {round}")).estimate(&tokens, 20);
                    let permit = semaphore.acquire(ask, &policy).await.expect("a permit");
                    permit.settle("tokens", 10);
                    permit.release().await.expect("an answer");
                    used += 10;
                }
                used
            });
        }
        let used: u64 = tasks.join_all().await.into_iter().sum();
        let possible = began.elapsed().as_secs_f64() * UNITS as f64 + UNITS as f64 / 5.0;
        shares.push(used as f64 / possible);
    }
    let row = Row::new(CASE, "three processes ask for all of it: what they use", "share", &shares);
    context.table.add(row.bound(Bound::Least(0.95)));
    join_all(nodes.iter().map(Semaphore::shutdown)).await;
}
