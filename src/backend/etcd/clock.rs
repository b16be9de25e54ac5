//! The clocks of this process.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::protocol::Time;
use crate::suspension;

/// The [`Time`] at which a process begins: some moments before that are times, too.
const FIRST: Duration = Duration::from_secs(3600);

/// Reads the clocks. Its [`Time`]s count suspensions of the machine.
#[derive(Debug)]
pub(super) struct Clock {
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
    pub(super) fn new() -> Self {
        let epoch = Instant::now();
        Self { epoch, suspended: suspension::check(epoch) }
    }

    pub(super) fn now(&self) -> Now {
        let instant = Instant::now();
        let suspended = suspension::check(instant).saturating_sub(self.suspended);
        let since = instant.saturating_duration_since(self.epoch) + suspended;
        let time = Time::since_epoch(FIRST + since);
        Now { instant, time, wall: wall() }
    }
}

/// The wall clock, µs since 1970.
pub(super) fn wall() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX)
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
