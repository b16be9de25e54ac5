//! The process's monotonic clock, as the protocol counts it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::Backend;
use crate::protocol::Time;
use crate::suspension;

/// The [`Time`] at which a process begins. A loss of data before it matters for up to twice the longest lease.
const BEFORE: Duration = Duration::from_secs(48 * 3600);

/// Turns [`Instant`]s into [`Time`]s and back. A `Time` includes suspensions of the machine, an `Instant` does not.
#[derive(Clone)]
pub(crate) struct Clock {
    epoch: Instant,
    /// The epoch as a `Time`.
    first: Time,
    /// How long the machine had been suspended at the epoch.
    suspended: Duration,
    backend: Arc<dyn Backend>,
}

impl Clock {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        let epoch = Instant::now();
        let suspended = backend.suspended().unwrap_or_else(|| suspension::check(epoch));
        let before = if backend.embedded().is_some() { Duration::ZERO } else { BEFORE };
        Self { epoch, first: Time::since_epoch(before), suspended, backend }
    }

    /// Returns the moment from which [`Time`]s count on the embedded backend.
    pub(crate) const fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Returns the current time. Decide by this, or by [`time`](Self::time), whether a lease still runs.
    pub(crate) fn now(&self) -> Time {
        self.time(Instant::now())
    }

    /// Like [`now`](Self::now), for a `now` that was read just before.
    pub(crate) fn time(&self, now: Instant) -> Time {
        let suspended = self.backend.suspended().unwrap_or_else(|| suspension::check(now));
        self.at(now, suspended)
    }

    /// Like [`time`](Self::time), but does not check for a suspension of the machine, so the result may be too early.
    /// Costs half as much; never decides whether a lease still runs.
    pub(crate) fn time_unless_suspended(&self, now: Instant) -> Time {
        self.at(now, self.noticed())
    }

    /// Returns the instant of `at`, provided that the machine is not suspended before.
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
