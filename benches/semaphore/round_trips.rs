//! The number of round trips of an acquire that does not wait, if Redis is on another machine.
//!
//! A proxy before Redis delays everything. A round trip is the median of a PING through it in the same round: the
//! delay, and what sockets and sleeping threads add.

use std::time::Duration;

use tower_semaphore::Semaphore;

use super::proxy::Proxy;
use super::redis::Redis;
use super::reference::Reference;
use super::stats::{each, median, quantile};
use super::table::{Bound, Row, number};
use super::uncontended::{Times, measure};
use super::{Context, runtime};

const CASE: &str = "round-trips";
const DELAYS: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(2)];

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    for delay in DELAYS {
        let (pairs, rounds) = (context.either(60, 400), context.rounds());
        let proxy = Proxy::start(redis.address(), delay);
        let rounds: Vec<Times> = runtime().block_on(async {
            let semaphore = Semaphore::redis(&proxy.url()).expect("a URL");
            let mut reference = Reference::connect(&proxy.url()).await;
            measure(&semaphore, &mut reference, 5, false).await;
            let mut seen = Vec::new();
            for _ in 0..rounds {
                seen.push(measure(&semaphore, &mut reference, pairs, false).await);
            }
            semaphore.shutdown().await;
            seen
        });
        rows(context, delay, &rounds);
    }
}

fn rows(context: &mut Context, delay: Duration, rounds: &[Times]) {
    let pings = each(rounds, |times| median(&times.pings));
    for (what, q, most) in [("p50", 0.5, 1.2), ("p99", 0.99, 1.5)] {
        let in_pings = |of: fn(&Times) -> &Vec<f64>| -> Vec<f64> {
            rounds.iter().zip(&pings).map(|(times, ping)| quantile(of(times), q) / ping).collect()
        };
        let ours = in_pings(|times| &times.acquires);
        let by_hand = in_pings(|times| &times.reference_acquires);
        let ping = median(&in_pings(|times| &times.pings));
        let figure = format!("acquire over {} ms, {what}", number(delay.as_secs_f64() * 1e3));
        context.table.add(
            Row::new(CASE, figure, "round trips", &ours)
                .against("by hand", &ours, &by_hand)
                .bound(Bound::Most(most))
                .note(format!(
                    "a round trip: {} ms; PING, {what}: {}",
                    number(median(&pings) / 1e3),
                    number(ping)
                )),
        );
    }
}
