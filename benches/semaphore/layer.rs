//! The cost of the layer for a request on the embedded backend, where no network hides it.
//!
//! `cargo bench --bench embedded` shows the same in more detail.

use std::time::Instant;

use tower_semaphore::Semaphore;

use super::requests::{Before, Extensions, answer};
use super::stats::{each, median};
use super::table::{Bound, Row};
use super::{Context, runtime};

const CASE: &str = "layer";
const BATCH: u32 = 500;

pub(crate) fn run(context: &mut Context) {
    let semaphore = Semaphore::in_memory();
    let batches = context.either(200, 1500);
    let runtime = runtime();
    let rounds: Vec<[f64; 3]> =
        (0..context.rounds()).map(|_| runtime.block_on(round(&semaphore, batches))).collect();
    let ours = each(&rounds, |[bare, _, ours]| ours - bare);
    let tower = each(&rounds, |[bare, tower, _]| tower - bare);
    let bare = each(&rounds, |[bare, _, _]| *bare);
    let table = &mut context.table;
    table.add(
        Row::new(CASE, "added to a request, embedded backend", "ns", &ours)
            .bound(Bound::Most(1000.0)),
    );
    table.add(
        Row::new(CASE, "the same", "ns", &ours)
            .against("tower::limit", &ours, &tower)
            .bound(Bound::RatioMost(4.0)),
    );
    table.add(Row::new(CASE, "a request without a layer", "ns", &bare));
    runtime.block_on(semaphore.shutdown());
}

/// Returns the ns for each request: bare, with Tower's layer, and with ours.
async fn round(semaphore: &Semaphore, batches: u32) -> [f64; 3] {
    let sides = [Before::Nothing, Before::Tower, Before::Ours];
    let mut times: [Vec<f64>; 3] = Default::default();
    for batch in 0..batches {
        for turn in 0..3 {
            let side = (batch as usize + turn) % 3;
            let began = Instant::now();
            answer(sides[side], Extensions::Some, BATCH, semaphore).await;
            times[side].push(began.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH));
        }
    }
    times.map(|times| median(&times))
}
