//! Samples of use and waiting for the plots. They are taken only while someone views a page.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Samples are kept for this many names, those viewed last.
const NAMES_MAX: usize = 64;
/// How long a sample is kept.
pub(super) const KEPT: Duration = Duration::from_secs(240);
/// At most one sample is kept per step, however many viewers there are. The page refreshes every two seconds.
const STEP: Duration = Duration::from_secs(1);

/// Samples by name, the name viewed last in front.
#[derive(Default)]
pub(super) struct History {
    rings: Mutex<VecDeque<(Arc<str>, VecDeque<Sample>)>>,
}

/// The use of a semaphore at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) in_use: u64,
    pub(super) waiting: u64,
    pub(super) limit: Option<u32>,
}

impl History {
    /// Keeps a sample. Returns all samples of this name.
    pub(super) fn keep(&self, name: &str, sample: Sample) -> Vec<Sample> {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let at = rings.iter().position(|(known, _)| **known == *name);
        let (name, mut ring) = at.and_then(|at| rings.remove(at)).unwrap_or_else(|| {
            rings.truncate(NAMES_MAX - 1);
            (name.into(), VecDeque::new())
        });
        while ring.front().is_some_and(|first| sample.at.duration_since(first.at) > KEPT) {
            ring.pop_front();
        }
        match ring.back_mut() {
            Some(last) if sample.at.duration_since(last.at) < STEP => {
                *last = Sample { at: last.at, ..sample };
            }
            _ => ring.push_back(sample),
        }
        let samples = ring.iter().copied().collect();
        rings.push_front((name, ring));
        samples
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{History, KEPT, NAMES_MAX, Sample};

    #[test]
    fn it_is_bounded_in_names_and_in_samples() {
        let (history, start) = (History::default(), Instant::now());
        let sample = |i: u64| Sample {
            at: start + Duration::from_millis(100 * i),
            in_use: i,
            waiting: 0,
            limit: None,
        };
        for i in 0..5000 {
            let seen = history.keep("x", sample(i));
            assert!(seen.len() as u64 <= KEPT.as_secs() + 1, "{}", seen.len());
            assert_eq!(seen.last().unwrap().in_use, i);
        }
        assert_eq!(history.keep("x", sample(9000)).len(), 1, "the others are too old");
        for i in 0..1000 {
            assert_eq!(history.keep(&i.to_string(), sample(i)).len(), 1);
        }
        assert_eq!(history.rings.lock().unwrap().len(), NAMES_MAX);
        assert_eq!(history.keep("999", sample(1100)).len(), 2, "kept");
        assert_eq!(history.keep("x", sample(9001)).len(), 1, "forgotten");
    }
}
