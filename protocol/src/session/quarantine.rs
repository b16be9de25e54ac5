//! The quarantine after a loss of data.

use std::time::Duration;

use crate::time::Time;

/// What a loss of data means. If the quarantine is on, nothing is granted for one lease after it: all calls of this
/// process say that there are no permits, so newcomers queue and nobody is promoted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Quarantine {
    /// Whether a loss starts a quarantine.
    pub is_on: bool,
    /// How long a quarantine lasts at least: other processes may have longer leases.
    pub at_least: Duration,
    /// When data was last lost, if that may still matter.
    pub lost_at: Option<Time>,
}

impl Quarantine {
    /// When it ends, if data was lost. `lease`: the longest lease that the session knows.
    pub(super) fn until(&self, lease: Duration) -> Option<Time> {
        let lost_at = self.lost_at.filter(|_| self.is_on)?;
        Some(lost_at + lease.max(self.at_least))
    }

    /// The backend forgot a place that was held, or may have.
    pub(super) fn handle_lost(&mut self, at: Time) {
        if self.is_on {
            self.lost_at = self.lost_at.max(Some(at));
        }
    }

    /// There is a new connection.
    pub(super) fn handle_connected(&mut self, new: Self) {
        (self.is_on, self.at_least) = (new.is_on, new.at_least);
        new.lost_at.into_iter().for_each(|at| self.handle_lost(at));
    }

    /// Ends it once its time is over. Returns whether it ended, and when to call this again.
    pub(super) fn handle_timeout(&mut self, lease: Duration, now: Time) -> (bool, Option<Time>) {
        match self.until(lease) {
            Some(end) if now < end => (false, Some(end)),
            Some(_) => {
                self.lost_at = None;
                (true, None)
            }
            None => (false, None),
        }
    }
}
