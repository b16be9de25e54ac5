//! Many tasks, with permits enough: how many pairs of acquire and release a second.
//!
//! The reference waits for the acknowledgement of its release, so ours is judged with that, too. The figure without it
//! is shown besides.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::runtime::{Builder, Runtime};
use tower_semaphore::{Policy, Semaphore};

use super::plots::{self, Line};
use super::redis::Redis;
use super::reference::Reference;
use super::stats::{each, median};
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "throughput";
const LIMIT: u32 = 1000;

struct Bench<'a> {
    redis: &'a Redis,
    semaphore: Semaphore,
    reference: Reference,
    runtime: Runtime,
    time: Duration,
}

#[derive(Clone, Copy)]
enum How {
    Acknowledged,
    Dropped,
    Reference,
}

struct Round {
    pairs_a_second: f64,
    /// CPU time of Redis, in µs for each pair.
    cpu: f64,
    /// In µs for each script call.
    per_script: f64,
}

pub(crate) fn run(context: &mut Context) {
    let (redis, time) = (Redis::start(), context.seconds(0.25, 1.5));
    let bench = Bench::new(&redis, runtime(), time);
    let mut curves: [Vec<(f64, f64)>; 3] = Default::default();
    for (tasks, keys) in [(1, 1), (4, 1), (16, 1), (64, 1), (256, 1), (64, 64)] {
        let rounds = bench.rounds(context.rounds(), tasks, keys);
        if keys == 1 {
            for (curve, rounds) in curves.iter_mut().zip(&rounds) {
                curve.push((f64::from(tasks), median(&each(rounds, |r| r.pairs_a_second))));
            }
        }
        let what = match (tasks, keys) {
            (1, _) => "1 task".to_owned(),
            (_, 1) => format!("{tasks} tasks on one semaphore"),
            _ => format!("{tasks} tasks on {keys} semaphores"),
        };
        let bound = match (tasks, keys) {
            (64, 1) => Some(5.0),
            (256, 1) => Some(2.5),
            (64, 64) => Some(0.9),
            _ => None,
        };
        rows(context, &what, bound, &rounds);
    }
    bench.end();
    // With two threads, a woken task runs on either, and the driver as soon as the first task has something to send.
    let threads = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let bench = Bench::new(&redis, threads.expect("a runtime"), time);
    let rounds = bench.rounds(context.rounds(), 64, 1);
    rows(context, "64 tasks on one semaphore, two threads", None, &rounds);
    bench.end();
    let [acknowledged, dropped, reference] = curves;
    plots::lines(
        &context.directory.join("throughput.svg"),
        "Pairs of acquire and release a second, one semaphore",
        ("tasks", "pairs/s"),
        &[
            Line { name: "tower-semaphore, release dropped", points: dropped },
            Line { name: "tower-semaphore, release acknowledged", points: acknowledged },
            Line { name: "minimal scripts by hand", points: reference },
        ],
        true,
    );
}

fn rows(context: &mut Context, what: &str, bound: Option<f64>, rounds: &[Vec<Round>; 3]) {
    let [acknowledged, dropped, reference] = rounds;
    let of = |rounds: &[Round], figure: fn(&Round) -> f64| each(rounds, figure);
    let base = of(reference, |r| r.pairs_a_second);
    for (how, rounds) in [("acknowledged", acknowledged), ("dropped", dropped)] {
        let ours = of(rounds, |r| r.pairs_a_second);
        let note = format!(
            "Redis: {} µs a script call, by hand {}",
            number(median(&of(rounds, |r| r.per_script))),
            number(median(&of(reference, |r| r.per_script)))
        );
        let row = Row::new(CASE, format!("{what}, release {how}"), "pairs/s", &ours)
            .against("by hand", &ours, &base)
            .note(note);
        context.table.add(match bound {
            Some(bound) if how == "acknowledged" => row.bound(Bound::RatioLeast(bound)),
            _ => row,
        });
    }
    let (ours, base) = (of(acknowledged, |r| r.cpu), of(reference, |r| r.cpu));
    let row = Row::new(CASE, format!("{what}: Redis' CPU a pair"), "µs", &ours)
        .against("by hand", &ours, &base)
        .note(format!("release dropped: {}", number(median(&of(dropped, |r| r.cpu)))));
    let is_hot = bound.is_some_and(|bound| bound > 1.0);
    context.table.add(if is_hot { row.bound(Bound::Most(3.0)) } else { row });
}

impl<'a> Bench<'a> {
    fn new(redis: &'a Redis, runtime: Runtime, time: Duration) -> Self {
        let (semaphore, reference) =
            runtime.block_on(async { (redis.semaphore(), Reference::connect(&redis.url()).await) });
        Self { redis, semaphore, reference, runtime, time }
    }

    fn end(self) {
        self.runtime.block_on(self.semaphore.shutdown());
    }

    fn rounds(&self, count: usize, tasks: u32, keys: u32) -> [Vec<Round>; 3] {
        let mut rounds: [Vec<Round>; 3] = Default::default();
        for round in 0..count {
            let mut order = [How::Acknowledged, How::Reference, How::Dropped];
            order.rotate_left(round % 3);
            for how in order {
                let seen = self.runtime.block_on(self.round(how, tasks, keys));
                rounds[how as usize].push(seen);
            }
        }
        rounds
    }

    async fn round(&self, how: How, tasks: u32, keys: u32) -> Round {
        let time = self.time;
        // Leaves out connecting, and creating what is kept of the names.
        self.tasks(how, tasks, keys, time / 10).await;
        let before = self.redis.usage();
        let began = Instant::now();
        let pairs = self.tasks(how, tasks, keys, time).await;
        let took = began.elapsed().as_secs_f64();
        let usage = self.redis.usage().since(before);
        Round {
            pairs_a_second: pairs / took,
            cpu: usage.cpu_us / pairs,
            per_script: usage.per_script(),
        }
    }

    /// Returns how many pairs all tasks made.
    async fn tasks(&self, how: How, tasks: u32, keys: u32, time: Duration) -> f64 {
        let end = Instant::now() + time;
        let tasks = (0..tasks).map(|i| {
            let (semaphore, reference) = (self.semaphore.clone(), self.reference.clone());
            let name: Arc<str> = format!("s{}", i % keys).into();
            tokio::spawn(async move {
                match how {
                    How::Reference => by_hand(reference, &name, end).await,
                    _ => ours(&semaphore, &name, matches!(how, How::Acknowledged), end).await,
                }
            })
        });
        join_all(tasks).await.into_iter().map(|pairs| f64::from(pairs.expect("no panic"))).sum()
    }
}

async fn ours(semaphore: &Semaphore, name: &str, acknowledged: bool, end: Instant) -> u32 {
    let policy = Policy::new(LIMIT);
    let mut pairs = 0;
    while Instant::now() < end {
        let permit = semaphore.acquire(name, &policy).await.expect("a permit");
        if acknowledged {
            permit.release().await.expect("an answer");
        }
        pairs += 1;
    }
    pairs
}

async fn by_hand(mut reference: Reference, name: &str, end: Instant) -> u32 {
    let key = format!("reference:{{{name}}}");
    let mut pairs = 0;
    while Instant::now() < end {
        let id = reference.acquire(&key, LIMIT).await.expect("a permit");
        reference.release(&key, &id).await;
        pairs += 1;
    }
    pairs
}
