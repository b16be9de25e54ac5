//! 500 requests wait behind one, and are granted one by one.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tower_semaphore::{Policy, Semaphore};

use super::naive::Naive;
use super::redis::{Redis, Usage, until_waiting};
use super::stats::{each, mean, median, micros};
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "drain";
const WAITERS: u32 = 500;
const HOLD: Duration = Duration::from_millis(1);

struct Round {
    ms: f64,
    hold_ms: f64,
    /// The time from a release to the next holder, p50, in µs.
    hand_off: f64,
    /// Grants to a request that came after one that still waits.
    inversions: f64,
    usage: Option<Usage>,
}

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let runtime = runtime();
    let [ours, naive, tokio] = runtime.block_on(async {
        let semaphore = redis.semaphore();
        let naive = Naive::connect(&redis.url(), 0).await;
        let mut rounds: [Vec<Round>; 3] = Default::default();
        for round in 0..3 {
            let mut sides = [0, 1, 2];
            sides.rotate_left(round);
            for side in sides {
                rounds[side].push(match side {
                    0 => ours(&redis, &semaphore).await,
                    1 => by_hand(&naive).await,
                    _ => tokio().await,
                });
            }
        }
        semaphore.shutdown().await;
        rounds
    });
    let (ms, tokio_ms) = (each(&ours, |r| r.ms), each(&tokio, |r| r.ms));
    let holds = (median(&each(&ours, |r| r.hold_ms)), median(&each(&tokio, |r| r.hold_ms)));
    let usage = |figure: fn(Usage) -> f64| each(&ours, |r| r.usage.map_or(f64::NAN, figure));
    let table = &mut context.table;
    table.add(
        Row::new(CASE, format!("{WAITERS} waiting, limit 1"), "ms", &ms)
            .against("Tokio", &ms, &tokio_ms)
            .bound(Bound::RatioMost(1.08))
            .note(format!("holds of {} ms, Tokio's {} ms", number(holds.0), number(holds.1))),
    );
    let (hand_off, by_hand) = (each(&ours, |r| r.hand_off), each(&naive, |r| r.hand_off));
    let note = format!("Tokio's {} µs", number(median(&each(&tokio, |r| r.hand_off))));
    table.add(
        Row::new(CASE, "hand-off, p50", "µs", &hand_off)
            .against("queue by hand", &hand_off, &by_hand)
            .bound(Bound::RatioMost(1.0))
            .note(note),
    );
    let scripts = usage(|usage| usage.scripts / f64::from(WAITERS));
    table.add(
        Row::new(CASE, "script calls a grant", "", &scripts).bound(Bound::Most(1.05)).counted(),
    );
    let inversions = each(&ours, |r| r.inversions);
    table.add(Row::new(CASE, "out of order", "", &inversions).bound(Bound::Most(0.0)).counted());
    let cpu = usage(|usage| usage.cpu_us / f64::from(WAITERS));
    let per_script = median(&usage(Usage::per_script));
    let note = format!("{} µs a script call", number(per_script));
    table.add(Row::new(CASE, "Redis' CPU a grant", "µs", &cpu).note(note));
}

async fn ours(redis: &Redis, semaphore: &Semaphore) -> Round {
    let policy =
        Policy::builder(1).wait_timeout(Duration::from_secs(60)).build().expect("in range");
    let held = semaphore.acquire("s", &policy).await.expect("a permit");
    let acquire = {
        let semaphore = semaphore.clone();
        move || semaphore.acquire("s", &policy)
    };
    let queue = async || {
        until_waiting(semaphore, "s", WAITERS).await;
        redis.usage()
    };
    let (round, before) = drain(acquire, queue, || drop(held)).await;
    Round { usage: Some(redis.usage().since(before)), ..round }
}

async fn by_hand(naive: &Naive) -> Round {
    let name: Arc<str> = "s".into();
    let held = naive.acquire(&name, 1).await;
    let acquire = {
        let (naive, name) = (naive.clone(), Arc::clone(&name));
        move || {
            let (naive, name) = (naive.clone(), Arc::clone(&name));
            async move { Ok::<_, Infallible>(naive.acquire(&name, 1).await) }
        }
    };
    let queue = async || {
        while naive.waiting("s").await < WAITERS {
            tokio::task::yield_now().await;
        }
    };
    drain(acquire, queue, || drop(held)).await.0
}

async fn tokio() -> Round {
    let semaphore = Arc::new(tokio::sync::Semaphore::new(1));
    let held = Arc::clone(&semaphore).acquire_owned().await.expect("a permit");
    let acquire = move || Arc::clone(&semaphore).acquire_owned();
    // Nothing shows that they wait; after a hundred turns, all have run once.
    let queue = async || {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    };
    drain(acquire, queue, || drop(held)).await.0
}

/// Lets all requests wait, releases the permit, and measures the grants.
async fn drain<F, P, E, Q>(
    acquire: impl Fn() -> F + Clone + Send + 'static,
    queue: impl AsyncFn() -> Q,
    release: impl FnOnce(),
) -> (Round, Q)
where
    F: Future<Output = Result<P, E>> + Send,
    P: Send,
    E: std::fmt::Debug + Send,
{
    let (granted, mut grants) = mpsc::unbounded_channel();
    let mut waiters = Vec::new();
    for number in 0..WAITERS {
        let (acquire, granted) = (acquire.clone(), granted.clone());
        waiters.push(tokio::spawn(async move {
            let permit = acquire().await.expect("a permit");
            let began = Instant::now();
            granted.send(number).expect("someone listens");
            sleep(HOLD).await;
            let ended = Instant::now();
            drop(permit);
            (began, ended)
        }));
    }
    let queue = queue().await;
    let began = Instant::now();
    release();
    let mut stays: Vec<_> =
        join_all(waiters).await.into_iter().map(|stay| stay.expect("no panic")).collect();
    let ms = began.elapsed().as_secs_f64() * 1e3;

    let (mut inversions, mut last) = (0, 0);
    while let Ok(number) = grants.try_recv() {
        inversions += u32::from(number < last);
        last = last.max(number);
    }
    stays.sort_unstable();
    let hand_offs: Vec<f64> = stays
        .windows(2)
        .map(|pair| micros(pair[1].0.saturating_duration_since(pair[0].1)))
        .collect();
    let holds: Vec<f64> = stays.iter().map(|(from, to)| micros(*to - *from) / 1e3).collect();
    let (hold_ms, hand_off) = (mean(&holds), median(&hand_offs));
    (Round { ms, hold_ms, hand_off, inversions: f64::from(inversions), usage: None }, queue)
}
