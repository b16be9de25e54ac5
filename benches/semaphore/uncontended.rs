//! One task, with permits enough: what a request waits for.
//!
//! On an idle machine a round trip to Redis takes 90 µs or 11 µs, depending on whether the cores sleep between the
//! hops. So PING, acquire and release alternate, and only ratios are judged. PING has a connection of the benchmark's
//! own, because that of the crate cannot be used from outside.

use std::time::Instant;

use tower_semaphore::{Policy, Semaphore};

use super::redis::{Redis, Usage};
use super::reference::Reference;
use super::stats::{each, median, micros};
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "uncontended";
const LIMIT: u32 = 10;

/// Medians of a round, in µs.
struct Round {
    ping: f64,
    acquire: f64,
    release: f64,
    reference_acquire: f64,
    reference_release: f64,
}

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let pairs = context.either(600, 4000);
    let rounds = context.rounds();
    let runtime = runtime();
    let (acknowledged, dropped, ours_alone, reference_alone) = runtime.block_on(async {
        let semaphore = redis.semaphore();
        let mut reference = Reference::connect(&redis.url()).await;
        round(&semaphore, &mut reference, pairs / 4, true).await;
        let (mut acknowledged, mut dropped) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            acknowledged.push(round(&semaphore, &mut reference, pairs, true).await);
            dropped.push(round(&semaphore, &mut reference, pairs / 2, false).await);
        }
        let before = redis.usage();
        for _ in 0..pairs {
            let permit = semaphore.acquire("s", &Policy::new(LIMIT)).await.expect("a permit");
            permit.release().await.expect("an answer");
        }
        let between = redis.usage();
        for _ in 0..pairs {
            let id = reference.acquire("reference:{s}", LIMIT).await.expect("a permit");
            reference.release("reference:{s}", &id).await;
        }
        let after = redis.usage();
        semaphore.shutdown().await;
        (acknowledged, dropped, between.since(before), after.since(between))
    });

    let besides = |usage: Usage| {
        format!(
            "Redis: {} µs a script call, {} µs CPU a pair",
            number(usage.per_script()),
            number(usage.cpu_us / pairs as f64)
        )
    };
    let row = |what: &str, rounds: &[Round], figure: fn(&Round) -> f64, note: String| {
        let (ours, ping) = (each(rounds, figure), each(rounds, |round| round.ping));
        Row::new(CASE, what, "µs", &ours).against("PING", &ours, &ping).note(note)
    };
    let rows = [
        row("acquire, p50", &acknowledged, |r| r.acquire, besides(ours_alone)),
        row("release, acknowledged, p50", &acknowledged, |r| r.release, String::new()),
        row("acquire where permits are dropped, p50", &dropped, |r| r.acquire, String::new()),
        row(
            "by hand: acquire, p50",
            &acknowledged,
            |r| r.reference_acquire,
            besides(reference_alone),
        ),
        row("by hand: release, p50", &acknowledged, |r| r.reference_release, String::new()),
    ];
    rows.into_iter().for_each(|row| context.table.add(row));
    let (ours, by_hand) =
        (each(&acknowledged, |r| r.acquire), each(&acknowledged, |r| r.reference_acquire));
    let row = Row::new(CASE, "acquire, p50", "µs", &ours).against("by hand", &ours, &by_hand);
    context.table.add(row.bound(Bound::RatioMost(1.0)));
}

/// How long each took, in µs.
#[derive(Default)]
pub(crate) struct Times {
    pub(crate) pings: Vec<f64>,
    pub(crate) acquires: Vec<f64>,
    /// `None` if permits are dropped.
    releases: Vec<f64>,
    pub(crate) reference_acquires: Vec<f64>,
    reference_releases: Vec<f64>,
}

async fn round(
    semaphore: &Semaphore,
    reference: &mut Reference,
    pairs: usize,
    acknowledged: bool,
) -> Round {
    let times = measure(semaphore, reference, pairs, acknowledged).await;
    Round {
        ping: median(&times.pings),
        acquire: median(&times.acquires),
        release: median(&times.releases),
        reference_acquire: median(&times.reference_acquires),
        reference_release: median(&times.reference_releases),
    }
}

/// Makes this number of pairs of acquire and release on each side, in turn, with a PING before each.
pub(crate) async fn measure(
    semaphore: &Semaphore,
    reference: &mut Reference,
    pairs: usize,
    acknowledged: bool,
) -> Times {
    let policy = Policy::new(LIMIT);
    let mut times = Times::default();
    for i in 0..pairs {
        for ours in [i % 2 == 0, i % 2 == 1] {
            let began = Instant::now();
            reference.ping().await;
            times.pings.push(micros(began.elapsed()));
            let began = Instant::now();
            if ours {
                let permit = semaphore.acquire("s", &policy).await.expect("a permit");
                times.acquires.push(micros(began.elapsed()));
                if acknowledged {
                    let began = Instant::now();
                    permit.release().await.expect("an answer");
                    times.releases.push(micros(began.elapsed()));
                }
            } else {
                let id = reference.acquire("reference:{s}", LIMIT).await.expect("a permit");
                times.reference_acquires.push(micros(began.elapsed()));
                let began = Instant::now();
                reference.release("reference:{s}", &id).await;
                times.reference_releases.push(micros(began.elapsed()));
            }
        }
    }
    times
}
