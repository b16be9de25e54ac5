//! The probe: one call for all places that wait, when a permit may be free for the first of them.

use std::time::Duration;

use super::place::Place;
use super::places::Places;
use crate::call::Op;
use crate::ledger::Reply;
use crate::time::Time;

/// How long after the earliest lease end the probe is sent.
const AFTER_LEASE_END: Duration = Duration::from_millis(2);
/// Leases that end at short intervals are probed together: no more often than this.
const GAP: Duration = Duration::from_millis(100);

/// When a probe is due. It renews one place that waits: every call sweeps and promotes, and its reply says when the next
/// lease ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Probe {
    is_due: bool,
    /// Just after the earliest lease end of the semaphore.
    at: Option<Time>,
    last_at: Option<Time>,
    /// The server stopped promoting at its bound: it is to be called again at once, with any call.
    has_more: bool,
}

impl Probe {
    #[inline]
    pub(super) const fn is_due(&self) -> bool {
        self.is_due
    }

    #[inline]
    pub(super) const fn has_more(&self) -> bool {
        self.has_more
    }

    /// A permit may be free. `has_waiting`: a place of this process waits.
    pub(super) const fn want(&mut self, has_waiting: bool) {
        self.is_due |= has_waiting;
    }

    /// Ends the wish for a probe. Returns whether there was one.
    pub(super) const fn take(&mut self) -> bool {
        std::mem::replace(&mut self.is_due, false)
    }

    /// Chooses the place to renew; `None`: there is none, and a call without places does the same. `is_put_off`: places
    /// that were refused are not tried yet.
    pub(super) fn choose(
        &mut self,
        places: &Places,
        is_put_off: bool,
        has_waiting: bool,
        now: Time,
    ) -> Option<u64> {
        self.last_at = Some(now);
        let is_there = |place: &Place| {
            place.is_waiting() && !place.restoring && !(is_put_off && place.refused)
        };
        let place = places.iter().find(|(_, place)| is_there(place));
        if place.is_none() {
            self.has_more |= has_waiting;
        }
        place.map(|(_, place)| place.n)
    }

    /// A call that promotes is sent. If it stops at its bound again, its reply says so.
    pub(super) const fn handle_call(&mut self) {
        self.has_more = false;
    }

    /// Notes when the next lease ends. Returns when to probe, if a reply says so.
    pub(super) fn handle_reply(&mut self, op: &Op, reply: &Reply, now: Time) -> Option<Time> {
        self.has_more |= reply.more;
        if reply.earliest == 0 {
            return None;
        }
        let server_now = reply.lease_end.saturating_sub(op.lease_ms());
        let left = Duration::from_millis(reply.earliest.saturating_sub(server_now));
        let at = now + left + AFTER_LEASE_END;
        self.at = Some(self.last_at.map_or(at, |last_at| at.max(last_at + GAP)));
        self.at
    }

    /// Returns when to call this again.
    pub(super) fn handle_timeout(&mut self, has_waiting: bool, now: Time) -> Option<Time> {
        let at = self.at?;
        if has_waiting && now < at {
            return Some(at);
        }
        self.want(has_waiting);
        self.at = None;
        None
    }

    /// For explorers: rounds when it is due, and forgets what is too old to matter.
    pub(super) fn coarsen(&mut self, round: impl Fn(Time) -> Time, now: Time) {
        self.at = self.at.map(&round);
        self.last_at = self.last_at.filter(|at| now < *at + GAP).map(round);
    }
}
