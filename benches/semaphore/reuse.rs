//! Permits that go straight to the next request of their process, beside permits that do not. On two threads; another
//! process is another connection, with a runtime of its own where its waits are measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::runtime::Builder;
use tokio::time::sleep;
use tower_semaphore::{Policy, Semaphore};

use super::redis::{Redis, Usage};
use super::reference::Reference;
use super::stats::{each, max, median, micros};
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "reuse";

/// The figures of one round.
#[derive(Clone, Copy)]
struct Round {
    a_second: f64,
    /// The share of the time in which permits were in use.
    in_use: f64,
    /// Measured after all tasks have had a permit.
    scripts_a_second: f64,
    /// How long a request of the other process waits, p50 and at most, in µs.
    waited: [f64; 2],
}

/// This number of tasks in each of this number of processes, which take permits of one name in turn.
#[derive(Clone, Copy)]
struct Crowd {
    processes: usize,
    /// The number in each process.
    tasks: usize,
    limit: u32,
    hold: Duration,
    other: Other,
}

/// Another process that requests a permit now and then.
#[derive(Clone, Copy)]
enum Other {
    None,
    Recalls,
    /// Its recalls are lost.
    Silent,
}

const ALONE: Crowd =
    Crowd { processes: 1, tasks: 64, limit: 8, hold: Duration::from_millis(1), other: Other::None };

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let time = context.seconds(0.15, 2.0);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let both = |crowd: Crowd| -> [Vec<Round>; 2] {
        let mut rounds: [Vec<Round>; 2] = Default::default();
        for round in 0..context.rounds() {
            for reuse in [round % 2 == 0, round % 2 == 1] {
                let seen = runtime.block_on(crowd.round(&redis, reuse, time));
                rounds[usize::from(!reuse)].push(seen);
            }
        }
        rounds
    };
    let hot: Vec<_> = [1, 64, 256]
        .map(|tasks| (tasks, Crowd { tasks, limit: 1000, hold: Duration::ZERO, ..ALONE }))
        .map(|(tasks, crowd)| (tasks, both(crowd)))
        .into();
    let full = both(ALONE);
    let two = both(Crowd { processes: 2, tasks: 8, ..ALONE });
    let other = both(Crowd { tasks: 8, other: Other::Recalls, ..ALONE });
    let silent = both(Crowd { tasks: 8, other: Other::Silent, ..ALONE });
    let pings = runtime.block_on(async {
        let mut reference = Reference::connect(&redis.url()).await;
        let mut times = Vec::new();
        for _ in 0..500 {
            let began = Instant::now();
            reference.ping().await;
            times.push(micros(began.elapsed()));
        }
        median(&times)
    });

    let table = &mut context.table;
    for (tasks, [with, without]) in &hot {
        let (ours, base) = (each(with, |r| r.a_second), each(without, |r| r.a_second));
        let what =
            if *tasks == 1 { "1 task, limit 1,000".to_owned() } else { format!("{tasks} tasks") };
        let row = Row::new(CASE, what, "acquires/s", &ours).against("without", &ours, &base);
        let row = if *tasks == 64 { row.bound(Bound::Least(1e6)) } else { row };
        let calls = number(median(&each(with, |r| r.scripts_a_second)));
        table.add(row.note(format!("{calls} script calls a second")));
    }
    for (tasks, [with, _]) in &hot {
        let calls = each(with, |r| r.scripts_a_second);
        let what = if *tasks == 1 { "1 task: script calls a second" } else { "the same" };
        let row = Row::new(CASE, what, "", &calls).bound(Bound::Most(50.0));
        // A machine that is stopped for long has all permits given back.
        table.add(if *tasks == 1 { row.counted() } else { row.note(format!("{tasks} tasks")) });
    }
    let (ours, base) = (each(&full[0], |r| r.in_use), each(&full[1], |r| r.in_use));
    table.add(
        Row::new(CASE, "64 tasks, limit 8, holds of 1 ms: permits in use", "share", &ours)
            .against("without", &ours, &base)
            .bound(Bound::Least(0.95)),
    );
    let (ours, base) = (each(&two[0], |r| r.a_second), each(&two[1], |r| r.a_second));
    table.add(
        Row::new(CASE, "two processes of 8 tasks, limit 8: grants", "a second", &ours)
            .against("without", &ours, &base)
            .bound(Bound::RatioLeast(0.98)),
    );
    let more: Vec<f64> =
        other[0].iter().zip(&other[1]).map(|(a, b)| a.waited[0] - b.waited[0]).collect();
    table.add(
        Row::new(CASE, "8 tasks hot, another process' wait, p50: more than without", "µs", &more)
            .against("PING", &more, &vec![pings; more.len()])
            .bound(Bound::RatioMost(2.0))
            .note(format!(
                "with {} µs, without {} µs",
                number(median(&each(&other[0], |r| r.waited[0]))),
                number(median(&each(&other[1], |r| r.waited[0])))
            )),
    );
    let [p50, longest] = [0, 1].map(|at| each(&silent[0], |r| r.waited[at] / 1e3));
    table.add(
        Row::new(CASE, "the same, all recalls lost: longest wait", "ms", &longest)
            // 50 ms, a hold of 2 ms by Tokio's timers, and round trips.
            .bound(Bound::Most(55.0))
            .note(format!("p50 {} ms", number(median(&p50)))),
    );
}

impl Crowd {
    async fn round(self, redis: &Redis, reuse: bool, time: Duration) -> Round {
        let policy = self.policy(reuse);
        let semaphores: Vec<_> = (0..self.processes).map(|_| redis.semaphore()).collect();
        // Leaves out the time to connect.
        for semaphore in &semaphores {
            drop(semaphore.acquire("s", &policy).await.expect("a permit"));
        }
        let held = Arc::new(AtomicU64::new(0));
        let (began, end) = (Instant::now(), Instant::now() + time);
        let tasks = (0..self.processes * self.tasks).map(|task| {
            let semaphore = semaphores[task % self.processes].clone();
            let (policy, held, hold) = (policy.clone(), Arc::clone(&held), self.hold);
            tokio::spawn(async move {
                let mut grants = 0_u64;
                while Instant::now() < end {
                    let permit = semaphore.acquire("s", &policy).await.expect("a permit");
                    grants += 1;
                    if hold.is_zero() {
                        // All tasks hold one at the same time.
                        tokio::task::yield_now().await;
                        drop(permit);
                        continue;
                    }
                    let since = Instant::now();
                    sleep(hold).await;
                    let nanos = u64::try_from(since.elapsed().as_nanos()).expect("seconds");
                    drop(permit);
                    held.fetch_add(nanos, Ordering::Relaxed);
                }
                grants
            })
        });
        let tasks: Vec<_> = tasks.collect();
        // In a runtime of its own, because timers of one runtime go off together.
        let url = redis.url();
        let other = tokio::task::spawn_blocking(move || {
            let reuse = match self.other {
                Other::None => return [f64::NAN; 2],
                Other::Recalls => reuse,
                Other::Silent => false,
            };
            let policy = self.policy(reuse);
            self.other(&url, &policy, end)
        });
        // By then each task has had a permit of its own.
        sleep(time / 3).await;
        let (counted_from, before) = (Instant::now(), redis.usage());
        let waited = other.await.expect("no panic");
        let grants = join_all(tasks).await.into_iter().map(|grants| grants.expect("no panic"));
        let grants = grants.sum::<u64>() as f64;
        let [took, counted] = [began, counted_from].map(|since| since.elapsed().as_secs_f64());
        let Usage { scripts, .. } = redis.usage().since(before);
        for semaphore in &semaphores {
            semaphore.shutdown().await;
        }
        let held = held.load(Ordering::Relaxed) as f64 / 1e9;
        Round {
            a_second: grants / took,
            in_use: held / took / f64::from(self.limit),
            scripts_a_second: scripts / counted,
            waited,
        }
    }

    fn policy(self, reuse: bool) -> Policy {
        let builder = Policy::builder(self.limit).wait_timeout(Duration::from_secs(60));
        builder.reuse(reuse).build().expect("in range")
    }

    /// Makes requests of another process, with pauses. Returns how long they wait, p50 and at most, in µs.
    fn other(self, url: &str, policy: &Policy, end: Instant) -> [f64; 2] {
        let (runtime, semaphore) = (runtime(), Semaphore::redis(url).expect("a URL"));
        let mut waits = Vec::new();
        let acquire = |name| runtime.block_on(semaphore.acquire(name, policy)).expect("a permit");
        drop(acquire("warm"));
        while Instant::now() < end {
            std::thread::sleep(Duration::from_micros(fastrand::u64(8_000..12_000)));
            let called = Instant::now();
            let permit = acquire("s");
            waits.push(micros(called.elapsed()));
            std::thread::sleep(self.hold);
            drop(permit);
        }
        runtime.block_on(semaphore.shutdown());
        [median(&waits), max(&waits)]
    }
}
