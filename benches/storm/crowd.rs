//! Very many processes request permits for very many tenants at once, after an outage and without one.
//!
//! The processes themselves make the queue, so the server is never unavailable: nothing may be lost, broken or admitted
//! because of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tower_semaphore::{AcquireError, Ask, ConnectionState, OnUnavailable, Policy, Semaphore};

use super::process::{self, Parent, Process};
use super::server::TestRedis;
use super::{Figures, count, seconds};

/// The number of processes after an outage, and without one.
const PROCESSES: usize = 25;
const FLOODERS: usize = 1;
/// The number of permits of other names that each process holds.
const HELD: usize = 5;
const OUTAGE: Duration = Duration::from_secs(2);
/// How long a request may wait.
const WAIT: Duration = Duration::from_secs(20);
/// How long a permit is held.
const HOLD: Duration = Duration::from_millis(5);
/// How often a permit of a new name is requested, and how soon it must be granted once the crowd has settled.
const PROBE: Duration = Duration::from_millis(100);
const SERVED: Duration = Duration::from_millis(500);
const SETTLED: Duration = Duration::from_secs(5);
/// How long a process is watched.
const WATCHED: Duration = Duration::from_secs(15);
const SILENCE: Duration = Duration::from_secs(60);
/// How late an answer may be on a busy machine, in seconds.
const LATE: f64 = 5.0;
/// How often a process may lose its connection once the server is there.
const RECONNECTS: f64 = 2.0;

/// Requests a permit for each of many tenants at once.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
    number: usize,
    tenants: usize,
    admits: bool,
}

/// What a process observed.
#[derive(Serialize, Deserialize)]
struct Report {
    lost: u64,
    reconnects: u64,
    admitted: u64,
    granted: usize,
    rejected: usize,
    unavailable: usize,
    /// The slowest answer, in seconds.
    slowest: f64,
    /// The time until new names were always served in time, in seconds.
    settled: f64,
}

pub(crate) fn crowd(figures: &mut Figures, tenants: usize) -> Result<(), String> {
    let mut redis = TestRedis::start();
    let mut processes = start(&redis, PROCESSES, tenants, false)?;
    redis.kill();
    sleep(OUTAGE);
    redis.restart();
    told(figures, &redis, &mut processes)
}

pub(crate) fn flood(figures: &mut Figures, tenants: usize) -> Result<(), String> {
    let redis = TestRedis::start();
    let mut processes = start(&redis, FLOODERS, tenants, true)?;
    told(figures, &redis, &mut processes)
}

/// Starts processes, which take the permits that they are to hold.
fn start(
    redis: &TestRedis,
    processes: usize,
    tenants: usize,
    admits: bool,
) -> Result<Vec<Process>, String> {
    let job = |number| Job { url: redis.url(), number, tenants, admits };
    let processes: Vec<_> =
        (0..processes).map(|number| Process::start(&process::Job::Crowd(job(number)))).collect();
    for process in &processes {
        let _: String = process.hear(SILENCE)?;
    }
    Ok(processes)
}

/// Makes all requests at once, and returns what became of them.
fn told(figures: &mut Figures, redis: &TestRedis, processes: &mut [Process]) -> Result<(), String> {
    redis.command::<()>(&["CONFIG", "RESETSTAT"]);
    for process in &mut *processes {
        process.tell("go");
    }
    let mut reports = Vec::new();
    for process in &*processes {
        reports.push(process.hear::<Report>(SILENCE)?);
    }
    let most = |of: fn(&Report) -> f64| reports.iter().map(of).fold(0.0, f64::max);
    let sum = |of: fn(&Report) -> usize| count(reports.iter().map(of).sum());
    let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let all = |of: fn(&Report) -> u64| count(number(reports.iter().map(of).sum()));
    figures.most("permits lost", all(|report| report.lost), 0.0);
    figures.most(
        "connections lost by a process while the server was there",
        most(|report| count(usize::try_from(report.reconnects).unwrap_or(usize::MAX))),
        RECONNECTS,
    );
    figures.most("admitted by policy", all(|report| report.admitted), 0.0);
    let settled = "seconds until a new name was served within 0.5 s for good";
    figures.most(settled, most(|report| report.settled), seconds(SETTLED));
    figures.most("slowest answer, s", most(|report| report.slowest), seconds(WAIT) + LATE);
    figures.tell("granted", sum(|report| report.granted));
    figures.tell("rejected", sum(|report| report.rejected));
    figures.most("told that the server is unavailable", sum(|report| report.unavailable), 0.0);
    figures.tell("calls", count(number(redis.calls("evalsha"))));
    Ok(())
}

#[derive(Default)]
struct Outcomes {
    granted: AtomicUsize,
    rejected: AtomicUsize,
    unavailable: AtomicUsize,
    slowest: Mutex<Duration>,
}

impl Outcomes {
    fn answered(&self, after: Duration) {
        let mut slowest = self.slowest.lock().expect("no panic");
        *slowest = slowest.max(after);
    }
}

pub(crate) async fn child(job: &Job, parent: Parent) {
    let semaphore = Semaphore::redis(&job.url).expect("a URL");
    let single = Policy::builder(1).wait_timeout(Duration::from_secs(10)).build();
    let single = single.expect("in range");
    let names = (0..HELD).map(|i| format!("own-{}-{i}", job.number));
    let own = join_all(names.map(|name| semaphore.acquire(name, &single))).await;
    let own: Vec<_> = own.into_iter().map(|permit| permit.expect("a permit")).collect();
    parent.say(&"held");
    let parent = parent.heard().await;

    let on_unavailable = if job.admits { OnUnavailable::Admit } else { OnUnavailable::Refuse };
    let policy = Policy::builder(10).wait_timeout(WAIT).on_unavailable(on_unavailable);
    let policy = policy.build().expect("in range");
    // A request that comes earlier is refused at once.
    while !matches!(semaphore.health().connection, ConnectionState::Up) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (began, before) = (Instant::now(), semaphore.health());
    let outcomes = Arc::<Outcomes>::default();
    let requests: Vec<_> = (0..job.tenants)
        .map(|tenant| {
            let ask = Ask::of("hot").by(format!("{}-{tenant}", job.number));
            let (acquire, outcomes) = (semaphore.acquire(ask, &policy), Arc::clone(&outcomes));
            tokio::spawn(async move {
                let answer = acquire.await;
                outcomes.answered(began.elapsed());
                let outcome = match &answer {
                    Ok(_) => &outcomes.granted,
                    Err(AcquireError::Unavailable(_)) => &outcomes.unavailable,
                    Err(_) => &outcomes.rejected,
                };
                outcome.fetch_add(1, Ordering::Relaxed);
                if answer.is_ok() {
                    tokio::time::sleep(HOLD).await;
                }
            })
        })
        .collect();
    let mut probes = Vec::new();
    while began.elapsed() < WATCHED {
        let acquire = semaphore.acquire(format!("new-{}-{}", job.number, probes.len()), &single);
        probes.push(tokio::spawn(async move {
            let since = Instant::now();
            let is_served = acquire.await.is_ok() && since.elapsed() < SERVED;
            if is_served { Duration::ZERO } else { began.elapsed() }
        }));
        tokio::time::sleep(PROBE).await;
    }
    join_all(requests).await;
    let settled = join_all(probes).await.into_iter().map(|settled| settled.expect("no panic"));
    let settled = seconds(settled.max().unwrap_or_default());
    let (slowest, after) = (*outcomes.slowest.lock().expect("no panic"), semaphore.health());
    let of = |outcome: &AtomicUsize| outcome.load(Ordering::Relaxed);
    parent.say(&Report {
        lost: after.lost,
        reconnects: after.disconnects - before.disconnects,
        admitted: after.admitted_by_policy,
        granted: of(&outcomes.granted),
        rejected: of(&outcomes.rejected),
        unavailable: of(&outcomes.unavailable),
        slowest: seconds(slowest),
        settled,
    });
    drop(own);
    parent.heard().await;
}
