//! The process's monotonic clock, as the protocol counts it.

use tokio::time::Instant;

use crate::protocol::time::Time;

/// Turns [`Instant`]s into [`Time`]s and back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    epoch: Instant,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { epoch: Instant::now() }
    }

    /// The moment from which [`Time`]s count.
    pub(super) const fn epoch(self) -> Instant {
        self.epoch
    }

    pub(super) fn time(self, at: Instant) -> Time {
        Time::since_epoch(at.saturating_duration_since(self.epoch))
    }

    pub(super) fn instant(self, at: Time) -> Instant {
        self.epoch + at.elapsed_since_epoch()
    }
}
