//! A connection opens, and breaks.

use std::time::Duration;

use super::local::LocalQueue;
use super::place::Sent;
use super::{Session, State};
use crate::call::Op;
use crate::reject::RejectReason;
use crate::time::Time;

/// A connection, as far as it concerns a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Connected {
    /// Hints do not arrive on it.
    pub poll_only: bool,
    /// The server is certain to have the data that the connection before it acknowledged.
    pub same_data: bool,
    /// What a loss of data means, and when there was one.
    pub quarantine: Quarantine,
}

/// After data was lost nothing is granted for one lease, where that is asked for: all calls of this
/// process say that there are no permits, so newcomers queue and nobody is promoted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Quarantine {
    /// Whether that is asked for.
    pub is_on: bool,
    /// How long it lasts at least: other processes may have longer leases.
    pub at_least: Duration,
    /// When data was lost last, if that may still matter.
    pub lost_at: Option<Time>,
}

impl Session {
    /// There is a new connection: what went unanswered is asked for again (rule 5).
    pub fn handle_connected(&mut self, connected: Connected, now: Time) {
        let Connected { poll_only, same_data, quarantine } = connected;
        self.places.set_poll_only(poll_only);
        (self.quarantine.is_on, self.quarantine.at_least) = (quarantine.is_on, quarantine.at_least);
        if let Some(at) = quarantine.lost_at {
            self.data_was_lost(at);
        }
        self.outage = false;
        self.end_reuse(now);
        self.local_queue = LocalQueue::new();
        self.take_calls_back();
        self.renewals.clear();
        self.releases.handle_connected();
        self.renew_at = None;
        // Whether a place is gone is asked again.
        self.ask_revocations = false;
        for check in std::mem::take(&mut self.revocation_checks) {
            if let Some(place) = self.places.find(check.new) {
                place.check = true;
                self.renew = true;
            }
        }
        self.reasserts.clear();
        let (mut joins, mut is_live) = (Vec::new(), false);
        for place in self.places.iter_mut() {
            is_live |= place.is_live();
            place.restoring = false;
            let due = now >= place.acked + place.interval();
            match &mut place.state {
                State::Admitted { .. } => {
                    place.refused = false;
                    place.acked = now;
                    self.reasserts.push_back(place.n);
                }
                State::Held => self.renew |= due || place.check || place.refused,
                // Its hint may have been lost.
                State::Waiting { .. } => self.renew = true,
                State::Joining { sent, hint } => {
                    // A hint that was kept is of the connection before, and perhaps of data before. An
                    // id that was sent stays as it is.
                    *hint = None;
                    if *sent == Sent::No {
                        place.poll_only = poll_only;
                    }
                    joins.push((place.arrival, place.n));
                }
                _ => {}
            }
        }
        joins.sort_unstable();
        self.joins = joins.into_iter().map(|(_, n)| n).collect();
        // What is not known since an earlier connection is not known yet.
        self.resync = is_live && (self.resync || !same_data);
        self.renew |= self.resync;
        self.audit.handle_connected(same_data);
        // In the outage it was to be kept for longer.
        self.want_end(now);
    }

    /// A connection broke with this call unanswered: it may or may not have been carried out. What it
    /// was about is taken up again when there is a connection.
    pub fn handle_unanswered(&mut self, op: &Op) {
        self.arrived(op);
        match op {
            Op::Renew { .. } | Op::Reassert { .. } => self.renew |= self.resync,
            Op::Audit { .. } => self.audit.handle_unanswered(),
            Op::Acquire { .. } | Op::Release { .. } => {}
        }
    }

    /// No call is on its way any more.
    pub(super) fn take_calls_back(&mut self) {
        self.renewing = 0;
        self.audit.take_back();
        self.releases.take_back();
    }

    #[inline]
    pub(super) fn end_resync(&mut self) {
        if self.resync {
            self.end_resync_if_done();
        }
    }

    #[inline(never)]
    fn end_resync_if_done(&mut self) {
        if self.renewing == 0
            && !self.renew
            && self.renewals.is_empty()
            && self.reasserts.is_empty()
            && self.revocation_checks.is_empty()
            && (self.renew_at.is_none() || !self.is_any_put_off())
        {
            self.resync = false;
        }
    }

    /// Whether a place is to be renewed that was refused.
    fn is_any_put_off(&self) -> bool {
        self.places.iter().any(|(_, place)| place.refused && place.is_live())
    }

    /// When the quarantine ends, if there is one: not before the watchdog has noticed that it is over.
    #[must_use]
    pub fn quarantined_until(&self) -> Option<Time> {
        let lost_at = self.quarantine.lost_at.filter(|_| self.quarantine.is_on)?;
        Some(
            lost_at
                + self
                    .limits
                    .lease()
                    .max(self.limits.longest_lease())
                    .max(self.quarantine.at_least),
        )
    }

    /// Why a request is refused for lack of a permit or of room in the queue: because of a quarantine, if there was one
    /// `at` that time and the request would have had its permit otherwise, as far as is known.
    pub(super) fn blame(
        &self,
        index: usize,
        reason: RejectReason,
        in_use: u64,
        at: Time,
    ) -> RejectReason {
        let is_on = self.quarantined_until().is_some_and(|end| at < end);
        let Some(place) = self.places.get(index).filter(|_| is_on) else { return reason };
        let room = self.limits.in_force_for(place.limit).saturating_sub(place.headroom());
        let is_full = in_use.saturating_add(u64::from(place.cost())) > u64::from(room)
            || self.counts.tenants().exceeds_each(place.claim());
        if is_full { reason } else { RejectReason::Quarantine }
    }

    /// The backend forgot a place that was held, or may have.
    pub(super) fn data_was_lost(&mut self, at: Time) {
        if self.quarantine.is_on {
            self.quarantine.lost_at = self.quarantine.lost_at.max(Some(at));
            if let Some(end) = self.quarantined_until() {
                self.want(end);
            }
        }
    }
}
