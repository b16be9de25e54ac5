//! The process's monotonic clock, as the protocol counts it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::suspension;
use crate::backend::Backend;
use crate::protocol::Time;

/// What happened so long before a process began matters to it: twice the longest lease.
const BEFORE: Duration = Duration::from_secs(48 * 3600);

/// Turns [`Instant`]s into [`Time`]s and back. A `Time` counts the time in which the machine was suspended, an `Instant`
/// does not.
#[derive(Clone)]
pub(crate) struct Clock {
    epoch: Instant,
    /// What that is as a `Time`: data can have been lost before.
    first: Time,
    /// For how long the machine had been suspended then.
    suspended: Duration,
    backend: Arc<dyn Backend>,
}

impl Clock {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        let epoch = Instant::now();
        let suspended = backend.suspended().unwrap_or_else(|| suspension::look(epoch));
        let before = if backend.embedded().is_some() { Duration::ZERO } else { BEFORE };
        Self { epoch, first: Time::since_epoch(before), suspended, backend }
    }

    /// The moment from which [`Time`]s count, where the backend is in this process.
    pub(crate) const fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Returns the current time. Only what this says can be the reason to rely on a lease.
    pub(crate) fn now(&self) -> Time {
        self.time(Instant::now())
    }

    /// As [`now`](Self::now), where `now` was read just before.
    pub(crate) fn time(&self, now: Instant) -> Time {
        let suspended = self.backend.suspended().unwrap_or_else(|| suspension::look(now));
        self.at(now, suspended)
    }

    /// As [`time`](Self::time), without a look whether the machine was suspended: the time may be later than that. At
    /// half the cost, for what is no reason to rely on a lease.
    pub(crate) fn time_unless_suspended(&self, now: Instant) -> Time {
        self.at(now, self.noticed())
    }

    /// Returns when it will be `at`, unless the machine is suspended until then.
    pub(crate) fn instant(&self, at: Time) -> Instant {
        let since = self.noticed().saturating_sub(self.suspended);
        self.epoch + at.since(self.first).saturating_sub(since)
    }

    fn at(&self, now: Instant, suspended: Duration) -> Time {
        let since = suspended.saturating_sub(self.suspended);
        self.first + (now.saturating_duration_since(self.epoch) + since)
    }

    fn noticed(&self) -> Duration {
        self.backend.suspended().unwrap_or_else(suspension::noticed)
    }
}
