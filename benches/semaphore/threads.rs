//! Permits of the embedded backend, taken and released by several threads at once: all of one name, and each of its own
//! name. The reference is `tokio::sync::Semaphore`, which has no names: one for all threads, or one for each.
//!
//! Each thread has a runtime of its own, and no request ever waits. The rates depend on the number of free cores, so
//! the gain from a second thread is compared with Tokio's gain.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use tower_semaphore::{Name, Policy, Semaphore};

use super::stats::{each, mean};
use super::table::{Bound, Row};
use super::{Context, runtime};

const CASE: &str = "threads";
const THREADS: [usize; 3] = [1, 2, 4];
/// A limit that is never reached.
const LIMIT: u32 = 1000;
const BATCH: u32 = 64;

pub(crate) fn run(context: &mut Context) {
    let time = context.seconds(0.05, 0.3);
    let semaphore = Semaphore::in_memory();
    for (what, is_own) in [("one name", false), ("a name each", true)] {
        let (mut ours, mut tokio) = ([(); 3].map(|()| Vec::new()), [(); 3].map(|()| Vec::new()));
        for _ in 0..context.rounds() {
            // In turn, so that disturbances of the machine affect all of them alike.
            for (at, threads) in THREADS.into_iter().enumerate() {
                ours[at].push(ours_in(&semaphore, threads, is_own, time));
                tokio[at].push(tokios_in(threads, is_own, time));
            }
        }
        for (at, threads) in THREADS.into_iter().enumerate() {
            let what = format!("acquire and drop, {what}, threads: {threads}");
            let [ours, tokio] = [&ours[at], &tokio[at]].map(|of| each(of, |[rate, _]| *rate));
            let row = Row::new(CASE, what, "1/s", &ours);
            context.table.add(row.against("tokio's semaphore", &ours, &tokio));
        }
        // The reference shows how many cores are free.
        let [gain, base] = [&ours, &tokio].map(|of| -> Vec<f64> {
            of[1].iter().zip(&of[0]).map(|([two, _], [one, _])| two / one).collect()
        });
        let row = Row::new(CASE, format!("{what}, two threads for one"), "×", &gain);
        let row = row.against("tokio's semaphore", &gain, &base);
        context.table.add(if is_own { row.bound(Bound::RatioLeast(0.85)) } else { row });
        let [one, two, _] = ours.map(|of| each(&of, |[_, cpu]| *cpu));
        let row = Row::new(CASE, format!("processor time, {what}, threads: 2"), "ns", &two);
        context.table.add(row.against("one thread", &two, &one));
    }
    runtime().block_on(semaphore.shutdown());
}

fn ours_in(semaphore: &Semaphore, threads: usize, is_own: bool, time: Duration) -> [f64; 2] {
    let policy = Policy::new(LIMIT);
    rate(threads, time, async |thread| {
        let name = Name::new(format!("threads-{}", if is_own { thread } else { 0 }));
        for _ in 0..BATCH {
            drop(semaphore.acquire(name.clone(), &policy).await.expect("a permit"));
        }
    })
}

fn tokios_in(threads: usize, is_own: bool, time: Duration) -> [f64; 2] {
    let semaphores: Vec<_> =
        (0..threads).map(|_| Arc::new(tokio::sync::Semaphore::new(LIMIT as usize))).collect();
    rate(threads, time, async |thread| {
        let semaphore = &semaphores[if is_own { thread } else { 0 }];
        for _ in 0..BATCH {
            drop(Arc::clone(semaphore).acquire_owned().await.expect("not closed"));
        }
    })
}

/// Returns how often all threads together execute a batch per second, and the ns of CPU time for each.
fn rate(threads: usize, time: Duration, batch: impl AsyncFn(usize) + Sync) -> [f64; 2] {
    let start = Barrier::new(threads);
    let one = |thread: usize| {
        runtime().block_on(async {
            batch(thread).await;
            start.wait();
            let (began, busy, mut done) = (Instant::now(), busy_ns(), 0);
            while began.elapsed() < time {
                batch(thread).await;
                done += BATCH;
            }
            [f64::from(done) / began.elapsed().as_secs_f64(), (busy_ns() - busy) / f64::from(done)]
        })
    };
    let all: Vec<[f64; 2]> = thread::scope(|scope| {
        let one = &one;
        let all: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        all.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    [each(&all, |[rate, _]| *rate).iter().sum(), mean(&each(&all, |[_, cpu]| *cpu))]
}

/// Returns the CPU time of this thread.
fn busy_ns() -> f64 {
    let busy = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    busy.tv_sec as f64 * 1e9 + busy.tv_nsec as f64
}
