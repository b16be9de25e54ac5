//! 10,000 permits in 1,000 semaphores, held by one process that does nothing else: the cost of renewing them, for the
//! process and for Redis.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tower_semaphore::{Policy, Semaphore};

use super::child::{self, Child, Parent};
use super::redis::Redis;
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "watchdog";
const SEMAPHORES: u32 = 1000;
const PERMITS: u32 = 10;
/// The number of intervals; in each, everything is renewed once.
const THIRDS: u32 = 3;

#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
    lease: Duration,
}

pub(crate) fn run(context: &mut Context) {
    let lease = context.either(Duration::from_secs(3), Policy::DEFAULT_LEASE);
    let redis = Redis::start();
    let mut child = Child::start(&child::Job::Watch(Job { url: redis.url(), lease }));
    assert_eq!(child.hear(), "held");
    // Renewals come together: keep them away from the edge of the interval.
    sleep(lease / 2);
    let before = (redis.usage(), cpu_ns(&child));
    sleep(lease * THIRDS / 3);
    let (usage, used_ns) = (redis.usage().since(before.0), cpu_ns(&child) - before.1);

    // In percent of a core, with the default lease.
    let share = |cpu_us: f64| {
        [100.0 * cpu_us / f64::from(THIRDS) / (Policy::DEFAULT_LEASE.as_secs_f64() * 1e6 / 3.0)]
    };
    let note = format!("measured with a lease of {lease:?}, for the default of 10 s");
    let table = &mut context.table;
    table.add(
        Row::new(CASE, "CPU of the process that holds 10,000", "%", &share(used_ns / 1e3))
            .bound(Bound::Most(2.0))
            .note(&note),
    );
    table.add(
        Row::new(CASE, "Redis' CPU for 10,000 held", "%", &share(usage.cpu_us))
            .bound(Bound::Most(2.0))
            .note(format!("{note}; {} µs a script call", number(usage.per_script()))),
    );
    let calls = usage.scripts / f64::from(THIRDS * SEMAPHORES);
    table.add(
        Row::new(CASE, "script calls a semaphore and third of a lease", "", &[calls])
            .bound(Bound::Most(1.05))
            .counted(),
    );
}

/// CPU time of all threads, in ns.
pub(crate) fn cpu_ns(child: &Child) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{}/task", child.pid())).expect("it lives");
    let of_one = |task: fs::DirEntry| -> f64 {
        let text = fs::read_to_string(task.path().join("schedstat")).expect("it lives");
        let ns = text.split(' ').next();
        ns.expect("a field").parse().expect("a number")
    };
    tasks.map(|task| of_one(task.expect("it lives"))).sum()
}

pub(crate) fn child(job: &Job, parent: &Parent) {
    runtime().block_on(async {
        let semaphore = Semaphore::redis(&job.url).expect("a URL");
        let policy = Policy::builder(PERMITS).lease(job.lease).build().expect("in range");
        let mut permits = Vec::new();
        for number in 0..SEMAPHORES {
            let name = format!("s{number}");
            let some = (0..PERMITS).map(|_| semaphore.acquire(&*name, &policy));
            permits.extend(join_all(some).await);
        }
        assert!(permits.iter().all(Result::is_ok));
        parent.say("held");
        std::future::pending::<()>().await;
    });
}
