//! An operator sets a rate while a crowd waits for it.

use std::time::Duration;

use tokio::task::JoinSet;
use tower_semaphore::{Limit, Policy};

use crate::support::redis::TestRedis;
use crate::support::semaphore::{waiting, warm};

const SECOND: Duration = Duration::from_secs(1);
const PROCESSES: usize = 20;
const OF_EACH: usize = 500;
const STARTS: u32 = 2000;

/// The times of the last starts, in s by Redis' clock, in their order. Some 4,000 are kept.
fn last_starts(redis: &TestRedis) -> Vec<f64> {
    let scores: Vec<String> =
        redis.command(&["ZRANGEBYSCORE", "semaphore:{x}", "-inf", "(-33554432", "WITHSCORES"]);
    let scores = scores.iter().skip(1).step_by(2);
    scores.rev().map(|score| -score.parse::<f64>().unwrap()).collect()
}

/// Each place is replaced by one with another rate, twice, and most of them at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_in_twenty_processes_start_by_a_rate_that_is_set_while_they_wait() {
    let redis = TestRedis::start();
    let nodes: Vec<_> = (0..PROCESSES).map(|_| redis.semaphore()).collect();
    let operator = redis.semaphore();
    // For longer than this test takes, one starts.
    let policy = Policy::builder(Limit::Permits(100_000))
        .rate(1, 3600 * SECOND)
        .max_queue(100_000)
        .wait_timeout(300 * SECOND)
        .build()
        .unwrap();
    for node in &nodes {
        warm(node).await;
    }
    drop(nodes[0].acquire("x", &policy).await.unwrap());
    let mut requests = JoinSet::new();
    for node in nodes.iter().flat_map(|node| [node; OF_EACH]) {
        let acquire = node.acquire("x", &policy);
        requests.spawn(async move { acquire.await.map(drop) });
    }
    waiting(&operator, "x", (PROCESSES * OF_EACH) as u64).await;

    let calls = redis.calls("evalsha");
    operator.set_rate("x", STARTS - 1, SECOND).await.unwrap();
    requests.join_next().await.unwrap().unwrap().unwrap();
    operator.set_rate("x", STARTS, SECOND).await.unwrap();
    while let Some(ended) = requests.join_next().await {
        ended.unwrap().unwrap();
    }
    let calls = redis.calls("evalsha") - calls;
    assert!(calls < (2 * PROCESSES * OF_EACH) as u64, "{calls} calls");
    assert!(nodes.iter().all(|node| node.health().lost == 0));
    let starts = last_starts(&redis);
    assert!(starts.len() >= 4000);
    for window in starts.windows(STARTS as usize + 1) {
        // A score is as exact as a quarter of a µs.
        let took = window[STARTS as usize] - window[0];
        assert!(took > 0.999_999, "{} starts in {took} s", STARTS + 1);
    }
    // The window has no more room than before for those that it kept back.
    let used = operator.inspect("x").await.unwrap().rate.unwrap();
    assert!(used.started <= u64::from(STARTS), "{used:?}");
}
