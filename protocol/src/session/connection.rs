//! Connections: they open and break.

use super::{Quarantine, Session};
use crate::call::Op;
use crate::ledger::Usage;
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

impl Session {
    /// Takes a new connection: what is unanswered is sent again (rule 5).
    pub fn handle_connected(&mut self, connected: Connected, now: Time) {
        let Connected { poll_only, same_data, quarantine } = connected;
        self.places.set_poll_only(poll_only);
        self.quarantine.handle_connected(quarantine);
        if quarantine.lost_at.is_some() {
            self.want_end_of_quarantine();
        }
        self.outage = None;
        self.movement.handle_change(now);
        self.end_reuse(now);
        self.take_calls_back();
        self.releases.handle_connected();
        for n in self.revocations.handle_connected() {
            if let Some(place) = self.places.find(n) {
                place.check = true;
                self.renewals.want();
            }
        }
        self.renewals.handle_connected(&mut self.places, same_data, now);
        self.joins.handle_connected(&mut self.places);
        self.audit.handle_connected(same_data);
        // In the outage its end was later.
        self.want_end(now);
    }

    /// Takes a call that is unanswered because its connection broke: it may or may not have been carried out. The next
    /// connection takes it up again.
    pub fn handle_unanswered(&mut self, op: &Op) {
        self.end_call(op);
        match op {
            Op::Renew { .. } | Op::Reassert { .. } => self.renewals.handle_unanswered(),
            Op::Audit { .. } => self.audit.handle_unanswered(),
            Op::Acquire { .. } | Op::Release { .. } => {}
        }
    }

    /// Takes back every call that was sent: none will be answered.
    pub(super) fn take_calls_back(&mut self) {
        self.renewals.take_back();
        self.audit.take_back();
        self.releases.take_back();
    }

    #[inline]
    pub(super) fn end_resync(&mut self) {
        self.renewals.end_resync(self.revocations.is_checking(), &self.places);
    }

    /// When the quarantine ends; `None` once [`handle_timeout`](Self::handle_timeout) has noticed that it is over.
    #[must_use]
    pub fn quarantined_until(&self) -> Option<Time> {
        self.quarantine.until(self.limits.any_lease())
    }

    /// Why a request is refused that found no permit or no room in the queue: because of the quarantine, if there was one
    /// at that time and the request would have had its permit without it, as far as is known.
    pub(super) fn blame(
        &self,
        index: usize,
        reason: RejectReason,
        seen: Option<Usage>,
        at: Time,
    ) -> RejectReason {
        let is_on = self.quarantined_until().is_some_and(|end| at < end);
        let Some(place) = self.places.get(index).filter(|_| is_on) else { return reason };
        let room = self.limits.in_force_for(place.limit).saturating_sub(place.headroom());
        let in_use = seen.map_or(0, |seen| seen.in_use);
        let is_full = in_use.saturating_add(u64::from(place.cost())) > u64::from(room)
            || self.counts.tenants().exceeds_each(place.claim());
        if is_full { reason } else { RejectReason::Quarantine }
    }

    /// Notes that the backend lost a held place, or may have.
    pub(super) fn handle_data_lost(&mut self, at: Time) {
        self.quarantine.handle_lost(at);
        self.movement.handle_change(at);
        self.want_end_of_quarantine();
    }

    fn want_end_of_quarantine(&mut self) {
        self.quarantined_until().into_iter().for_each(|end| self.want(end));
    }
}
