//! What was seen of use and waiting, for as long as someone looked.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// Names of which something is kept: those that were looked at last.
const NAMES_MAX: usize = 64;
/// Samples of a name. The page asks every two seconds.
const SAMPLES_MAX: usize = 120;

/// Rings of samples by name.
#[derive(Default)]
pub(super) struct History {
    rings: Mutex<VecDeque<(Arc<str>, VecDeque<Sample>)>>,
}

/// What was seen at one time.
#[derive(Clone, Copy)]
pub(super) struct Sample {
    pub(super) in_use: u64,
    pub(super) waiting: u64,
}

impl History {
    /// Keeps a sample; gives all that are kept of this name.
    pub(super) fn keep(&self, name: &str, sample: Sample) -> Vec<Sample> {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let at = rings.iter().position(|(known, _)| **known == *name);
        let mut ring = at.and_then(|at| rings.remove(at)).unwrap_or_else(|| {
            rings.truncate(NAMES_MAX - 1);
            (name.into(), VecDeque::with_capacity(SAMPLES_MAX))
        });
        if ring.1.len() == SAMPLES_MAX {
            ring.1.pop_front();
        }
        ring.1.push_back(sample);
        let samples = ring.1.iter().copied().collect();
        rings.push_front(ring);
        samples
    }
}

/// A plot of samples, the newest at the right, as SVG.
pub(super) fn plot(title: &str, samples: &[u64]) -> String {
    let most = samples.iter().copied().max().unwrap_or(0).max(1);
    let mut points = String::new();
    let gap = SAMPLES_MAX - samples.len().min(SAMPLES_MAX);
    for (i, sample) in samples.iter().enumerate() {
        // In tenths of a unit, which are whole numbers.
        let height = u128::from(*sample) * 400 / u128::from(most);
        let y = 420 - height;
        let _ = write!(points, "{},{}.{} ", 2 * (gap + i), y / 10, y % 10);
    }
    format!(
        "<figure><figcaption>{title}: {} now, {most} at the top</figcaption>\
         <svg viewBox=\"0 0 240 44\" role=\"img\" aria-label=\"{title}\">\
         <polyline points=\"{}\"/></svg></figure>",
        samples.last().copied().unwrap_or(0),
        points.trim_end(),
    )
}

#[cfg(test)]
mod tests {
    use super::{History, NAMES_MAX, SAMPLES_MAX, Sample, plot};

    #[test]
    fn it_is_bounded_in_names_and_in_samples() {
        let history = History::default();
        for i in 0..1000 {
            let seen = history.keep("x", Sample { in_use: i, waiting: 0 });
            assert_eq!(seen.len(), SAMPLES_MAX.min(usize::try_from(i).unwrap() + 1));
            assert_eq!(seen.last().unwrap().in_use, i);
        }
        for i in 0..1000 {
            assert_eq!(history.keep(&i.to_string(), Sample { in_use: i, waiting: 0 }).len(), 1);
        }
        assert_eq!(history.rings.lock().unwrap().len(), NAMES_MAX);
        assert_eq!(history.keep("999", Sample { in_use: 0, waiting: 0 }).len(), 2, "kept");
        assert_eq!(history.keep("x", Sample { in_use: 0, waiting: 0 }).len(), 1, "forgotten");
    }

    #[test]
    fn a_plot_stays_within_its_frame() {
        for samples in [vec![], vec![0], vec![u64::MAX, 0, 1], vec![7; SAMPLES_MAX]] {
            let svg = plot("in use", &samples);
            let points = svg.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
            for point in points.split_whitespace() {
                let (x, y) = point.split_once(',').unwrap();
                assert!((0.0..=240.0).contains(&x.parse::<f64>().unwrap()), "{point}");
                assert!((0.0..=44.0).contains(&y.parse::<f64>().unwrap()), "{point}");
            }
        }
    }
}
