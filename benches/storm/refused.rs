//! Very many names are used once: what is left of them in the process ten seconds later.
//!
//! An allocator may keep memory that was freed, as glibc does below a block that is still in use: a process that had
//! held 10,000 names once kept 20 MB with all records gone, and no more after five rounds. So a second round, with
//! other names, shows what is left of the first.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tower_semaphore::{Policy, Semaphore};

use super::process::{self, Parent, Process};
use super::server::TestRedis;
use super::{Figures, count, seconds};

/// The number of requests on one name that are refused.
const HOT: usize = 5_000_000;
/// When everything must be gone.
const AFTER: Duration = Duration::from_secs(10);
/// The MB that a process may then use more than before.
const GROWTH: f64 = 20.0;
/// The CPU time that it may then use, in percent of a core.
const CPU: f64 = 2.0;
/// How long a process may print nothing.
const SILENCE: Duration = Duration::from_secs(180);

/// Uses names, one after the other or all at a time.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
    names: usize,
    /// The number of requests on one name.
    hot: usize,
    /// They are served and held for a while instead of being refused.
    held: bool,
}

/// MB, percent and seconds.
#[derive(Serialize, Deserialize)]
struct Report {
    what: String,
    wrong: usize,
    took: f64,
    base: f64,
    peak: f64,
    /// Ten seconds after the first round, and after the second.
    after: [f64; 2],
    /// The number of records ten seconds after the first round, when nothing is in use.
    records: usize,
    cpu: f64,
}

pub(crate) fn refused(figures: &mut Figures, names: usize) -> Result<(), String> {
    let mut redis = TestRedis::start();
    let url = redis.url();
    redis.kill();
    run(figures, Job { url: url.clone(), names, hot: 0, held: false })?;
    run(figures, Job { url, names: 0, hot: HOT, held: false })
}

pub(crate) fn released(figures: &mut Figures, names: usize) -> Result<(), String> {
    let redis = TestRedis::start();
    run(figures, Job { url: redis.url(), names, hot: 0, held: true })
}

fn run(figures: &mut Figures, job: Job) -> Result<(), String> {
    let is_held = job.held;
    let process = Process::start(&process::Job::Use(job));
    let report: Report = process.hear(SILENCE)?;
    println!(" {}", report.what);
    let Report { wrong, took, base, peak, after: [first, second], records, cpu, .. } = report;
    figures.most("requests that had another answer than they should", count(wrong), 0.0);
    figures.tell("the first round took, s", took);
    figures.most("records ten seconds later", count(records), 0.0);
    figures.tell("memory before, MB", base);
    figures.tell("memory at the end of the first round, MB", peak);
    let more = "memory ten seconds later, more than before, MB";
    if is_held {
        figures.tell(more, first - base);
    } else {
        figures.most(more, first - base, GROWTH);
    }
    figures.most(
        "memory ten seconds after a second round, more than that, MB",
        second - first,
        GROWTH,
    );
    figures.most("CPU then, % of a core", cpu, CPU);
    Ok(())
}

pub(crate) async fn child(job: &Job, parent: Parent) {
    let semaphore = Semaphore::redis(&job.url).expect("a URL");
    let lease = if job.held { Duration::from_secs(3600) } else { Policy::DEFAULT_LEASE };
    let policy = Policy::builder(1).lease(lease).build().expect("in range");
    // What the process uses in any case.
    for i in 0..100 {
        let _ = semaphore.acquire(format!("warm{i}"), &policy).await;
    }
    sleep(Duration::from_secs(1)).await;
    let (base, began) = (process::rss(), Instant::now());
    let mut wrong = once(&semaphore, &policy, job, 0).await;
    let (took, peak) = (seconds(began.elapsed()), process::rss());
    sleep(AFTER).await;
    let (first, records) = (process::rss(), semaphore.health().semaphores);
    wrong += once(&semaphore, &policy, job, 1).await;
    sleep(AFTER).await;
    let (second, cpu, since) = (process::rss(), process::cpu(), Instant::now());
    sleep(AFTER / 2).await;
    let cpu = 100.0 * (process::cpu() - cpu) / seconds(since.elapsed());
    let what = match job {
        Job { held: true, names, .. } => format!("{names} names held for six seconds"),
        Job { hot: 0, names, .. } => format!("{names} names refused"),
        Job { hot, .. } => format!("{hot} requests on one name refused"),
    };
    parent.say(&Report { what, wrong, took, base, peak, after: [first, second], records, cpu });
    parent.heard().await;
}

/// Makes one round, with names of its own. Returns how many requests had the wrong answer.
async fn once(semaphore: &Semaphore, policy: &Policy, job: &Job, round: usize) -> usize {
    let names = (0..job.names).map(|i| format!("name{round}-{i}"));
    if job.held {
        return hold(semaphore, policy, names.collect()).await;
    }
    let mut wrong = 0;
    for name in names {
        wrong += usize::from(semaphore.acquire(name, policy).await.is_ok());
    }
    for _ in 0..job.hot {
        wrong += usize::from(semaphore.acquire("hot", policy).await.is_ok());
    }
    wrong
}

/// Returns how many names were not served.
async fn hold(semaphore: &Semaphore, policy: &Policy, names: Vec<String>) -> usize {
    let mut permits = Vec::new();
    for some in names.chunks(500) {
        let some = some.iter().map(|name| semaphore.acquire(&**name, policy));
        permits.extend(join_all(some).await.into_iter().flatten());
    }
    // Until the watchdog handles the sessions of these names for the first time.
    sleep(Duration::from_secs(6)).await;
    names.len() - permits.len()
}
