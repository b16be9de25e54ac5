//! One place alone is to be sent: then its call can be made without a message, where the ledger is in this process.
//!
//! What this leaves is what [`Session::poll_call`] and [`Session::handle_reply`] leave of the same call; a test holds the
//! two against each other.

use super::place::{LEASE_GRAIN, Place, Sent};
use super::{Session, State};
use crate::call::Single;
use crate::ledger::Done;
use crate::time::Time;

impl Session {
    /// The call that is to be made, if it concerns one place without a claim and nothing else is to be done or told.
    /// Nothing changes until [`handle_single`](Self::handle_single).
    #[must_use]
    #[inline]
    pub fn poll_single(&self, now: Time) -> Option<Single> {
        if self.reuse.is_some()
            || self.resync
            || self.renew
            || self.ask
            || self.audit
            || self.more
            || self.ask_revocations
            || self.releases.len() + self.joins.len() != 1
            || !self.renewals.is_empty()
            || !self.reasserts.is_empty()
            || !self.releasing.is_empty()
            || !self.events.is_empty()
            || self.tenants.lines() > 0
        {
            return None;
        }
        if let Some((id, until)) = self.releases.front() {
            // One that would be dropped, or whose caller waits for the acknowledgement, is rare.
            let is_plain = id.claim.is_none()
                && now < *until + self.lease
                && self.places.index(id.n).is_none();
            return is_plain.then_some(Single::Release { id: *id });
        }
        let n = *self.joins.front()?;
        let place = self.places.get(self.places.index(n)?).filter(|place| joins(place))?;
        Some(Single::Acquire {
            id: place.id(self.node),
            limit: self.limit_of_call(place.limit, now),
            lease_ms: place.lease_ms(),
        })
    }

    /// The call was carried out. Returns the index of the place, if it was granted: its request can go on.
    #[inline]
    pub fn handle_single(&mut self, single: &Single, done: Done, now: Time) -> Option<usize> {
        match single {
            Single::Release { .. } => {
                self.releases.clear();
                self.want_end(now);
                None
            }
            Single::Acquire { id, .. } => {
                self.joins.clear();
                let index = self.places.index(id.n)?;
                let place = self.places.get_mut(index)?;
                place.lease_end = done.lease_end;
                (place.acked, place.held_at, place.granted_at) = (now, now, now);
                let renewal = now + place.held_interval();
                self.set(index, State::Held);
                self.seen = (done.in_use, 0);
                self.want(renewal);
                Some(index)
            }
        }
    }
}

/// Whether the place awaits an acquire that was never sent, whose reply would not come too late as it is made.
fn joins(place: &Place) -> bool {
    matches!(place.state, State::Joining { sent: Sent::No, hint: None })
        && place.options.claim.is_none()
        && place.options.lease > LEASE_GRAIN
}
