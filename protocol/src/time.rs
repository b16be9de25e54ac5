//! Time: a number that is passed in.

use std::ops::Add;
use std::time::Duration;

/// A moment of one process's monotonic clock, in ns since an epoch that the process chooses.
///
/// Nothing in the protocol reads a clock: every input carries the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time(u64);

impl Time {
    /// The epoch.
    pub const ZERO: Self = Self(0);

    /// The moment this long after the epoch.
    #[must_use]
    pub fn since_epoch(elapsed: Duration) -> Self {
        Self(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The time elapsed since the epoch, in ns.
    #[must_use]
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// The time elapsed since the epoch.
    #[must_use]
    pub const fn elapsed_since_epoch(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// The time elapsed since `earlier`; zero if that is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Time {
    /// The moment this long before; `None` if that is before the epoch.
    #[must_use]
    pub fn checked_sub(self, duration: Duration) -> Option<Self> {
        self.0.checked_sub(Self::since_epoch(duration).0).map(Self)
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(Self::since_epoch(duration).0))
    }
}
