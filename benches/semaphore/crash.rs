//! A process that holds all permits is killed, while ten requests wait elsewhere.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deadpool_redis::redis::cmd;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tower_semaphore::{Policy, Semaphore};

use super::child::{self, Child, Parent};
use super::redis::{Redis, until_waiting};
use super::stats::{max, spread};
use super::table::{Bound, Row};
use super::{Context, runtime};

const CASE: &str = "crash";
const PERMITS: u32 = 10;
const LEASE: Duration = Duration::from_secs(2);

/// Holds all permits until it is killed.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
}

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let runtime = runtime();
    let rounds: Vec<Vec<f64>> = (0..3)
        .map(|_| {
            let mut child = Child::start(&child::Job::Hold(Job { url: redis.url() }));
            assert_eq!(child.hear(), "held");
            runtime.block_on(round(&redis, child))
        })
        .collect();
    let last: Vec<f64> = rounds.iter().map(|waits| max(waits)).collect();
    let first: Vec<f64> = rounds.iter().map(|waits| spread(waits).0).collect();
    let what = "after the dead holder's lease end: last of ten granted";
    context.table.add(Row::new(CASE, what, "ms", &last).bound(Bound::Most(60.0)));
    context.table.add(Row::new(CASE, "first of ten", "ms", &first));
}

fn policy() -> Policy {
    let policy = Policy::builder(PERMITS).lease(LEASE).wait_timeout(Duration::from_secs(60));
    policy.build().expect("in range")
}

/// The time from the end of the dead process's leases to each grant, in ms.
async fn round(redis: &Redis, mut holder: Child) -> Vec<f64> {
    // Each waits in a semaphore of this process: the machine's clock is that of Redis.
    let semaphore = redis.semaphore();
    let waiters: Vec<_> = (0..PERMITS)
        .map(|_| {
            let acquire = semaphore.acquire("s", &policy());
            tokio::spawn(async move {
                let permit = acquire.await.expect("a permit");
                (permit, ms_since_1970())
            })
        })
        .collect();
    until_waiting(&semaphore, "s", PERMITS).await;
    holder.kill();
    // By now, Redis has executed everything that it sent.
    sleep(Duration::from_millis(20)).await;
    let lease_end = lease_end(redis);
    let granted = join_all(waiters).await.into_iter().map(|granted| granted.expect("no panic"));
    let waits = granted.map(|(permit, at)| {
        // All ten must be granted at once.
        drop(permit);
        at - lease_end
    });
    let waits = waits.collect();
    semaphore.shutdown().await;
    waits
}

/// Returns when the last lease of the holders ends, in ms since 1970 by the clock of Redis.
fn lease_end(redis: &Redis) -> f64 {
    let mut all = cmd("ZRANGE");
    all.arg("semaphore:{s}").arg(0).arg(-1).arg("WITHSCORES");
    let members: Vec<(String, f64)> = redis.query(&all);
    let waiting: BTreeSet<&str> = members
        .iter()
        .filter(|(_, score)| *score >= 1e14)
        .filter_map(|(q, _)| q.get(52..))
        .collect();
    let holding =
        members.iter().filter(|(member, score)| *score < 1e14 && !waiting.contains(&**member));
    let ends: Vec<f64> = holding.map(|(_, end)| *end).collect();
    assert_eq!(ends.len(), PERMITS as usize, "they hold still: {members:?}");
    max(&ends)
}

fn ms_since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later").as_secs_f64() * 1e3
}

pub(crate) fn child(job: &Job, parent: &Parent) {
    runtime().block_on(async {
        let semaphore = Semaphore::redis(&job.url).expect("a URL");
        let permits = join_all((0..PERMITS).map(|_| semaphore.acquire("s", &policy()))).await;
        assert!(permits.iter().all(Result::is_ok), "{permits:?}");
        parent.say("held");
        std::future::pending::<()>().await;
    });
}
