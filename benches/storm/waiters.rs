//! Very many requests wait for one permit in a process that is killed.

use std::time::{Duration, Instant};

use deadpool_redis::redis::{Client, cmd};
use futures_util::FutureExt;
use serde::{Deserialize, Serialize};
use tower_semaphore::{Policy, Semaphore};

use super::process::{self, Parent, Process};
use super::server::TestRedis;
use super::{Figures, count, seconds};

const NAME: &str = "hot";
/// Longer than it takes all to join, so that their places are not freed by the ends of their leases.
const LEASE: Duration = Duration::from_secs(120);
const SILENCE: Duration = Duration::from_secs(120);
/// The most time that the server may work on one call, in µs.
const SLOW: u32 = 10_000;

/// Waits this number of times.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
    waiters: usize,
}

pub(crate) fn waiters(figures: &mut Figures, waiters: usize) -> Result<(), String> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(run(figures, waiters))
}

async fn run(figures: &mut Figures, waiters: usize) -> Result<(), String> {
    let redis = TestRedis::start();
    let client = Client::open(redis.url()).expect("a URL");
    let mut admin = client.get_connection().expect("a connection");
    let semaphore = Semaphore::redis(&redis.url()).expect("a URL");
    let policy = policy();
    let held = semaphore.acquire(NAME, &policy).await.expect("a permit");

    let slow = cmd("CONFIG").arg("SET").arg("slowlog-log-slower-than").arg(SLOW).query(&mut admin);
    let _: () = slow.expect("an answer");
    let _: () = cmd("SLOWLOG").arg("RESET").query(&mut admin).expect("an answer");

    let job = Job { url: redis.url(), waiters };
    let others = Process::start(&process::Job::Wait(job));
    let _: String = others.hear(SILENCE)?;
    until_waiting(&semaphore, NAME, waiters).await?;
    let mut next = semaphore.acquire(NAME, &policy);
    assert!((&mut next).now_or_never().is_none(), "the limit is 1");
    until_waiting(&semaphore, NAME, waiters + 1).await?;
    // Its connections are gone with it, so nobody receives its messages.
    drop(others);
    let before = semaphore.inspect(NAME).await.map_err(|error| error.to_string())?;
    let _: () = cmd("CONFIG").arg("RESETSTAT").query(&mut admin).expect("an answer");

    let began = Instant::now();
    drop(held);
    let granted = next.await;
    let took = began.elapsed();
    let slow: usize = cmd("SLOWLOG").arg("LEN").query(&mut admin).expect("an answer");
    let after = semaphore.inspect(NAME).await.map_err(|error| error.to_string())?;
    let passed = before.waiting.saturating_sub(after.waiting + 1);
    let all = u32::try_from(waiters).map_or(f64::MAX, f64::from);
    figures.least("places that were passed over", count(usize::try_from(passed).unwrap_or(0)), all);
    figures.most("calls that kept the server for 10 ms", count(slow), 0.0);
    figures.tell("calls", count(usize::try_from(redis.calls("evalsha")).unwrap_or(usize::MAX)));
    figures.tell("seconds until the one behind them had its permit", seconds(took));
    granted.map(drop).map_err(|error| error.to_string())
}

/// Waits until this number of requests wait.
pub(crate) async fn until_waiting(
    semaphore: &Semaphore,
    name: &str,
    waiters: usize,
) -> Result<(), String> {
    let began = Instant::now();
    loop {
        let seen = semaphore.inspect(name).await.map_err(|error| error.to_string())?;
        if seen.waiting >= waiters as u64 {
            return Ok(());
        }
        if began.elapsed() > SILENCE {
            return Err(format!("only {} of {waiters} wait", seen.waiting));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn policy() -> Policy {
    let policy = Policy::builder(1).lease(LEASE).wait_timeout(LEASE).max_queue(u32::MAX);
    policy.build().expect("in range")
}

pub(crate) async fn child(job: &Job, parent: Parent) {
    let semaphore = Semaphore::redis(&job.url).expect("a URL");
    let policy = policy();
    let mut waiting: Vec<_> = (0..job.waiters).map(|_| semaphore.acquire(NAME, &policy)).collect();
    for acquire in &mut waiting {
        assert!(acquire.now_or_never().is_none(), "the limit is 1");
    }
    parent.say(&"all ask");
    parent.heard().await;
}
