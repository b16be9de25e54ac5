//! Very many requests wait, and the leases of a dead holder end one after the other.
//!
//! Each end frees one permit for the first in the queue. It must cost a look at the head of the queue, and no message
//! to each waiting request.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tower_semaphore::{Policy, Semaphore};

use super::process::{self, Parent, Process};
use super::server::TestRedis;
use super::{Figures, count, seconds};

const NAME: &str = "hot";
/// The number of permits of the dead process, and the time between the ends of their leases.
const HELD: u32 = 100;
const APART: Duration = Duration::from_millis(40);
/// Longer than it takes all to join, so that no lease is renewed before the last request waits.
const LEASE: Duration = Duration::from_secs(15);
/// The number of replicas among which the waiting requests are spread.
const PROCESSES: usize = 3;
/// How long after the last end all permits must have been granted.
const PASSED_ON: Duration = Duration::from_millis(500);
const SILENCE: Duration = Duration::from_secs(60);
/// The bounds on the cost: the share of the server's time, and calls per second.
const SHARE: f64 = 0.1;
const CALLS: f64 = 60.0;

/// Holds permits whose leases end one after the other, or waits this number of times.
#[derive(Serialize, Deserialize)]
pub(crate) enum Job {
    Hold(String),
    Wait(String, usize),
}

pub(crate) fn lease_ends(figures: &mut Figures, waiters: usize) -> Result<(), String> {
    for processes in [1, PROCESSES] {
        println!(" {waiters} wait in {processes} processes");
        run(figures, waiters, processes)?;
    }
    Ok(())
}

fn run(figures: &mut Figures, waiters: usize, processes: usize) -> Result<(), String> {
    let redis = TestRedis::start();
    let start = |job| Process::start(&process::Job::LeaseEnds(job));
    let holder = start(Job::Hold(redis.url()));
    let _: String = holder.hear(SILENCE)?;
    // The last lease began a moment ago, the first one earlier.
    let held = Instant::now();
    drop(holder);
    let each = waiters / processes;
    let mut waiting: Vec<_> = (0..processes).map(|_| start(Job::Wait(redis.url(), each))).collect();
    for process in &waiting {
        let _: String = process.hear(SILENCE)?;
    }
    until_waiting(&redis, each * processes)?;

    let first = held + LEASE - APART * HELD;
    let Some(until) = first.checked_duration_since(Instant::now()) else {
        return Err("they joined too late: their number is too high for this machine".to_owned());
    };
    let before = Cost::of(&redis);
    sleep(until);
    figures.tell("calls per second before the first end", Cost::of(&redis).since(&before).rate());
    let before = Cost::of(&redis);
    sleep(APART * HELD);
    let cost = Cost::of(&redis).since(&before);
    let over = Instant::now();
    let mut granted = 0;
    while granted < HELD as usize && over.elapsed() < PASSED_ON {
        granted = 0;
        for process in &mut waiting {
            process.tell("report");
            granted += process.hear::<usize>(SILENCE)?;
        }
    }
    figures.least("permits that were passed on", count(granted), f64::from(HELD));
    figures.most("share of the server's time, %", 100.0 * cost.share(), 100.0 * SHARE);
    figures.most("calls per second", cost.rate(), CALLS);
    Ok(())
}

fn until_waiting(redis: &TestRedis, waiters: usize) -> Result<(), String> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(super::waiters::until_waiting(&redis.semaphore(), NAME, waiters))
}

/// The work of the server up to a moment.
struct Cost {
    at: Instant,
    cpu: f64,
    calls: u64,
}

impl Cost {
    fn of(redis: &TestRedis) -> Self {
        let info: String = redis.command(&["INFO", "cpu"]);
        let used = |field: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(field));
            let value =
                line.and_then(|line| line.trim_start_matches(':').trim().parse::<f64>().ok());
            value.expect("a field")
        };
        let cpu = used("used_cpu_user:") + used("used_cpu_sys:");
        Self { at: Instant::now(), cpu, calls: redis.calls("evalsha") }
    }

    /// Returns its work since then.
    fn since(self, before: &Self) -> Spent {
        let calls = usize::try_from(self.calls - before.calls).unwrap_or(usize::MAX);
        Spent { over: self.at.duration_since(before.at), cpu: self.cpu - before.cpu, calls }
    }
}

/// The work of the server in an interval.
struct Spent {
    over: Duration,
    cpu: f64,
    calls: usize,
}

impl Spent {
    fn share(&self) -> f64 {
        self.cpu / seconds(self.over)
    }

    fn rate(&self) -> f64 {
        count(self.calls) / seconds(self.over)
    }
}

pub(crate) async fn child(job: &Job, parent: Parent) {
    let policy = Policy::builder(HELD).lease(LEASE).wait_timeout(2 * SILENCE).max_queue(u32::MAX);
    let policy = policy.build().expect("in range");
    match job {
        Job::Hold(url) => {
            let semaphore = Semaphore::redis(url).expect("a URL");
            let mut held = Vec::new();
            for _ in 0..HELD {
                let next = tokio::time::sleep(APART);
                held.push(semaphore.acquire(NAME, &policy).await.expect("a permit"));
                next.await;
            }
            parent.say(&"held");
            parent.heard().await;
        }
        Job::Wait(url, waiters) => {
            let semaphore = Semaphore::redis(url).expect("a URL");
            let all = (0..*waiters).map(|_| tokio::spawn(semaphore.acquire(NAME, &policy)));
            let all: Vec<_> = all.collect();
            parent.say(&"ask");
            let mut parent = parent;
            loop {
                parent = parent.heard().await;
                parent.say(&all.iter().filter(|acquire| acquire.is_finished()).count());
            }
        }
    }
}
