//! Medians and quantiles, and rounds that alternate.

use std::time::Duration;

/// Returns the value below which this fraction of all values lies, from 0 to 1; NaN without values.
pub(crate) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = q * last as f64;
    // Counted, because converting a float to an index would need a cast.
    let below = (0..last).take_while(|i| *i as f64 + 1.0 <= at).count();
    let (low, high) = (sorted[below], sorted[(below + 1).min(last)]);
    low + (high - low) * (at - below as f64)
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

pub(crate) fn max(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NAN, f64::max)
}

/// Returns the spread of the rounds.
pub(crate) fn spread(values: &[f64]) -> (f64, f64) {
    (values.iter().copied().fold(f64::NAN, f64::min), max(values))
}

pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// One figure of all rounds.
pub(crate) fn each<T>(rounds: &[T], figure: impl Fn(&T) -> f64) -> Vec<f64> {
    rounds.iter().map(figure).collect()
}

/// Runs both sides in turn, so that disturbances of the machine affect both alike. Each side goes first every other
/// time.
pub(crate) async fn alternate<A, B>(
    rounds: usize,
    mut ours: impl AsyncFnMut() -> A,
    mut reference: impl AsyncFnMut() -> B,
) -> (Vec<A>, Vec<B>) {
    let (mut of_ours, mut of_reference) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        if round % 2 == 0 {
            of_ours.push(ours().await);
            of_reference.push(reference().await);
        } else {
            of_reference.push(reference().await);
            of_ours.push(ours().await);
        }
    }
    (of_ours, of_reference)
}
