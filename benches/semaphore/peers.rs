//! This crate beside a library: locks of `rslock`, as semaphores with one permit.
//!
//! These locks do not queue: a caller that finds one taken tries again after a random pause. So they are compared
//! without contention, and with eight tasks that wait for one permit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use rslock::LockManager;
use tokio::time::sleep;
use tower_semaphore::{Policy, Semaphore};

use super::redis::Redis;
use super::reference::Reference;
use super::stats::{each, median, micros};
use super::table::{Row, number};
use super::{Context, runtime};

const CASE: &str = "peers";
const LIBRARY: &str = "rslock";
const LEASE: Duration = Duration::from_secs(30);

#[derive(Clone)]
enum Side {
    Ours(Semaphore, Policy),
    Library(LockManager),
}

/// The figures of one round.
struct Round {
    pairs_a_second: f64,
    /// CPU time of Redis, in µs for each pair.
    cpu: f64,
    /// The share of the time in which the permit of a name was in use.
    in_use: f64,
    /// How long an acquire takes, p50, in µs.
    acquire: f64,
    ping: f64,
}

/// The tasks that acquire, and what they acquire.
#[derive(Clone, Copy)]
struct Crowd {
    tasks: u32,
    names: u32,
    hold: Duration,
}

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let runtime = runtime();
    let time = context.seconds(0.2, 1.5);
    let sides = runtime.block_on(async {
        let policy = Policy::builder(1).lease(LEASE).wait_timeout(Duration::from_secs(60));
        let ours = Side::Ours(redis.semaphore(), policy.build().expect("in range"));
        let mut library = LockManager::new(vec![redis.url()]);
        library.set_retry(u32::MAX, Duration::from_millis(10));
        [ours, Side::Library(library)]
    });
    for (what, crowd) in [
        ("1 task", Crowd { tasks: 1, names: 1, hold: Duration::ZERO }),
        ("64 tasks on 64 names", Crowd { tasks: 64, names: 64, hold: Duration::ZERO }),
        ("8 tasks, 1 permit, 1 ms", Crowd { tasks: 8, names: 1, hold: Duration::from_millis(1) }),
    ] {
        let mut rounds: [Vec<Round>; 2] = Default::default();
        for round in 0..context.rounds() {
            for side in [round % 2, (round + 1) % 2] {
                let seen = runtime.block_on(crowd.round(&redis, &sides[side], time));
                rounds[side].push(seen);
            }
        }
        let [ours, library] = &rounds;
        let mut row = |figure: &str, unit, of: fn(&Round) -> f64, note: String| {
            let (a, b) = (each(ours, of), each(library, of));
            let row = Row::new(CASE, format!("{what}: {figure}"), unit, &a);
            context.table.add(row.against(LIBRARY, &a, &b).note(note));
        };
        if crowd.hold.is_zero() {
            let ping = number(median(&each(ours, |r| r.ping)));
            row("acquire, p50", "µs", |r| r.acquire, format!("PING {ping} µs"));
            row("pairs", "a second", |r| r.pairs_a_second, String::new());
        } else {
            row("permit in use", "share", |r| r.in_use, String::new());
        }
        row("Redis' CPU a pair", "µs", |r| r.cpu, String::new());
    }
}

impl Crowd {
    async fn round(self, redis: &Redis, side: &Side, time: Duration) -> Round {
        let mut reference = Reference::connect(&redis.url()).await;
        let mut pings = Vec::new();
        for _ in 0..50 {
            let began = Instant::now();
            reference.ping().await;
            pings.push(micros(began.elapsed()));
        }
        // Leaves out the time to connect.
        side.once("s0", Duration::ZERO).await;
        let (before, held) = (redis.usage(), Arc::new(AtomicU64::new(0)));
        let (began, end) = (Instant::now(), Instant::now() + time);
        let tasks = (0..self.tasks).map(|task| {
            let (side, held) = (side.clone(), Arc::clone(&held));
            let name = format!("s{}", task % self.names);
            tokio::spawn(async move {
                let mut acquires = Vec::new();
                while Instant::now() < end {
                    let (acquire, hold) = side.once(&name, self.hold).await;
                    acquires.push(micros(acquire));
                    let nanos = u64::try_from(hold.as_nanos()).expect("seconds");
                    held.fetch_add(nanos, Ordering::Relaxed);
                }
                acquires
            })
        });
        let acquires: Vec<f64> =
            join_all(tasks).await.into_iter().flat_map(|all| all.expect("no panic")).collect();
        let took = began.elapsed();
        let pairs = acquires.len() as f64;
        Round {
            pairs_a_second: pairs / took.as_secs_f64(),
            cpu: redis.usage().since(before).cpu_us / pairs,
            in_use: held.load(Ordering::Relaxed) as f64 / 1e9 / took.as_secs_f64(),
            acquire: median(&acquires),
            ping: median(&pings),
        }
    }
}

impl Side {
    /// Takes a permit, holds it and releases it, acknowledged. Returns how long the acquire and the release took.
    async fn once(&self, name: &str, hold: Duration) -> (Duration, Duration) {
        let began = Instant::now();
        match self {
            Self::Ours(semaphore, policy) => {
                let permit = semaphore.acquire(name, policy).await.expect("a permit");
                let (acquire, held) = (began.elapsed(), self::hold(hold).await);
                permit.release().await.expect("an answer");
                (acquire, held)
            }
            Self::Library(library) => {
                let lock = library.lock(name, LEASE).await.expect("a lock");
                let (acquire, held) = (began.elapsed(), self::hold(hold).await);
                library.unlock(&lock).await;
                (acquire, held)
            }
        }
    }
}

async fn hold(time: Duration) -> Duration {
    let began = Instant::now();
    if !time.is_zero() {
        sleep(time).await;
    }
    began.elapsed()
}
