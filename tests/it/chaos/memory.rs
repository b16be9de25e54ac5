//! Checks whether memory grows: samples of a run, and their comparison.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use serde::Serialize;

/// The parts of a run that are compared: after it has warmed up, and at its end. In 20 minutes these are the fourth and
/// the fifth, and the last two.
const WARM: Range<f64> = 0.15..0.25;
const LAST: Range<f64> = 0.9..1.0;
/// What may be added between the two, as a fraction of what was there.
const PART: f64 = 0.1;

/// One quantity over a run.
pub(super) struct Series {
    pub(super) what: String,
    /// What may be added in any case.
    pub(super) allowed: f64,
    /// The samples: when, and how much.
    pub(super) samples: Vec<(Duration, f64)>,
}

#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    what: String,
    /// The medians after the run had warmed up, and at its end.
    warm: Option<f64>,
    last: Option<f64>,
    allowed: f64,
    pub(super) flat: bool,
}

impl Series {
    /// Compares medians, because a single peak or a missing sample proves nothing.
    pub(super) fn verdict(&self, length: Duration) -> Verdict {
        let median_of = |part: Range<f64>| {
            let part = length.mul_f64(part.start)..length.mul_f64(part.end);
            median(self.samples.iter().filter(|(at, _)| part.contains(at)).map(|(_, much)| *much))
        };
        let (warm, last) = (median_of(WARM), median_of(LAST));
        let allowed = self.allowed.max(warm.unwrap_or(0.0) * PART);
        let flat = matches!((warm, last), (Some(warm), Some(last)) if last - warm <= allowed);
        Verdict { what: self.what.clone(), warm, last, allowed, flat }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, allowed, .. } = self;
        let outcome = if self.flat { "flat" } else { "NOT FLAT" };
        match (self.warm, self.last) {
            (Some(warm), Some(last)) => {
                let more = last - warm;
                write!(f, "{what:<24} {warm:8.2} -> {last:8.2}: {more:+.2}")?;
                write!(f, ", allowed +{allowed:.2}: {outcome}")
            }
            _ => write!(f, "{what:<24} samples are missing: {outcome}"),
        }
    }
}

pub(super) fn median(of: impl Iterator<Item = f64>) -> Option<f64> {
    let mut all: Vec<_> = of.collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}

/// A process of 15 MB that is sampled each second for 20 minutes.
#[cfg(test)]
fn of_20_minutes(grown: impl Fn(f64) -> f64) -> Verdict {
    let sample = |second: u32| {
        // Comes and goes with the load.
        let noise = f64::from(second * 7919 % 13) / 10.0;
        let minute = f64::from(second) / 60.0;
        (Duration::from_secs(second.into()), 15.0 + noise + grown(minute))
    };
    let samples = (0..1200).map(sample).collect();
    Series { what: "planted".to_owned(), allowed: 3.0, samples }.verdict(Duration::from_secs(1200))
}

#[test]
fn what_grows_by_1_mb_a_minute_is_found() {
    let verdict = of_20_minutes(|minute| minute);
    assert!(!verdict.flat, "{verdict}");
    // And a quarter of that, which is 60 bytes a request.
    let verdict = of_20_minutes(|minute| minute / 4.0);
    assert!(!verdict.flat, "{verdict}");
}

#[test]
fn a_leap_in_the_second_half_is_found() {
    let verdict = of_20_minutes(|minute| if minute > 15.0 { 4.0 } else { 0.0 });
    assert!(!verdict.flat, "{verdict}");
}

#[test]
fn what_warms_up_or_has_a_peak_is_flat() {
    for verdict in [
        of_20_minutes(|_| 0.0),
        of_20_minutes(|minute| minute.min(2.0) * 10.0),
        of_20_minutes(|minute| if (18.5..19.0).contains(&minute) { 50.0 } else { 0.0 }),
    ] {
        assert!(verdict.flat, "{verdict}");
    }
}

#[test]
fn a_run_without_samples_is_not_called_flat() {
    let half: Vec<_> = (0..600).map(|second| (Duration::from_secs(second), 15.0)).collect();
    for samples in [Vec::new(), half] {
        let series = Series { what: "planted".to_owned(), allowed: 3.0, samples };
        assert!(!series.verdict(Duration::from_secs(1200)).flat);
    }
}
