//! The clocks of this process.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::wire::Environment;
use crate::protocol::Time;

/// The [`Time`] at which a process begins: some moments before that are times, too.
const FIRST: Duration = Duration::from_secs(3600);

/// Reads the clocks. Its [`Time`]s count suspensions of the machine.
pub(super) struct Clock {
    environment: Arc<dyn Environment>,
    epoch: Instant,
    suspended: Duration,
}

/// One moment by all clocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) instant: Instant,
    pub(super) time: Time,
    /// µs since 1970.
    pub(super) wall: u64,
}

impl Clock {
    pub(super) fn new(environment: Arc<dyn Environment>) -> Self {
        let epoch = Instant::now();
        let suspended = environment.suspended(epoch);
        Self { environment, epoch, suspended }
    }

    pub(super) fn now(&self) -> Now {
        let instant = Instant::now();
        let suspended = self.environment.suspended(instant).saturating_sub(self.suspended);
        let since = instant.saturating_duration_since(self.epoch) + suspended;
        let time = Time::since_epoch(FIRST + since);
        Now { instant, time, wall: self.environment.wall() }
    }
}

impl Now {
    /// Returns the instant that is as far from this moment as `time` is. `None` if it is before all instants: the machine
    /// was suspended for longer than it has run.
    pub(super) fn instant_of(self, time: Time) -> Option<Instant> {
        if time > self.time {
            return Some(self.instant + time.since(self.time));
        }
        self.instant.checked_sub(self.time.since(time))
    }
}
