//! Permits that go from one place of this process to its next one ahead of the transaction that says so.
//!
//! If the first places of the queue are all of this process, a permit that it releases will be granted to the first of
//! them, whoever writes next: newcomers join at the tail, and nobody but this process can release the permit. So the place
//! is told of its grant at once. Until a transaction is carried out, the permit stands in the value under its earlier
//! place, and counts there; the transaction takes that out and has the later one hold. So a permit is at every moment one
//! held place of the value: the places that had it since are its *chain*.
//!
//! The order stays that of the queue, unlike with permits that a session passes on by itself. It is lock cohorting (Dice,
//! Marathe and Shavit, 2012) without its unfairness, because only those go on that were first anyway.

use super::Replica;
use super::calls::Calls;
use super::event::Event;
use super::known::{Read, View};
use super::own_places::OwnPlaces;
use crate::id::PlaceId;
use crate::ledger::{Grant, Ledger};

/// The permits whose place in the value is not their last one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Succession {
    permits: Vec<Permit>,
    /// The limit of the last call.
    limit: u32,
}

/// A permit, by the places that have had it since it was written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Permit {
    /// The first of them that the value has holds there. The last one may use it, unless it was released.
    chain: Vec<PlaceId>,
    lease_end: u64,
    /// A transaction that may still be carried out gives it up.
    is_given_up: bool,
}

impl Permit {
    fn last(&self) -> &PlaceId {
        &self.chain[self.chain.len() - 1]
    }

    /// Whether a place of this lease may have it next. What has a cost or a rate waits for the transaction.
    fn fits(&self, id: &PlaceId, lease_end: u64, own: &OwnPlaces) -> bool {
        !self.is_given_up
            && !own.has(self.last().n)
            && self.lease_end == lease_end
            && id.claim.is_none()
            && self.last().claim.is_none()
    }

    fn has(&self, n: u64) -> bool {
        self.chain.iter().any(|id| id.n == n)
    }
}

impl Succession {
    /// Whether a place was told that it was granted, and the value does not say so yet.
    pub(super) fn is_told(&self, n: u64) -> bool {
        self.permits.iter().any(|permit| permit.chain.len() > 1 && permit.last().n == n)
    }

    /// Whether a place has had a permit that others of this process have had, too, since it was written.
    pub(super) fn has_passed_on(&self, n: u64) -> bool {
        self.permits.iter().any(|permit| permit.chain.len() > 1 && permit.has(n))
    }

    /// Whether each permit that was released went to another place, which has it still.
    pub(super) fn all_are_in_use(&self, own: &OwnPlaces) -> bool {
        self.permits.iter().all(|permit| own.has(permit.last().n))
    }

    pub(super) const fn handle_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// There is a newer value, so no earlier transaction is carried out any more.
    pub(super) fn handle_value(&mut self, view: &View, own: &OwnPlaces) {
        self.permits.retain_mut(|permit| {
            permit.is_given_up = false;
            let Some(at) = permit.chain.iter().position(|id| view.holds(id.n)) else {
                return false;
            };
            permit.chain.drain(..at);
            permit.chain.len() > 1 || !own.has(permit.last().n)
        });
    }

    /// Has the last place of each chain hold in place of the one that does. Before anything is released, strangers
    /// included: then nobody else is granted what is in use.
    pub(super) fn carry_out(&self, ledger: &mut Ledger, own: &OwnPlaces) {
        for permit in self.permits.iter().filter(|permit| own.has(permit.last().n)) {
            if let Some(holds) = permit.chain.iter().find(|id| ledger.is_held(id)) {
                ledger.hand_down(holds, permit.last());
            }
        }
    }

    /// A transaction that leads to this ledger is sent.
    pub(super) fn handle_sent(&mut self, ledger: &Ledger) {
        for permit in &mut self.permits {
            permit.is_given_up |= !permit.chain.iter().any(|id| ledger.is_held(id));
        }
    }

    /// Passes on what was released. `flight`: how many of the calls are in the transaction under way.
    fn pass_on(
        &mut self,
        read: &Read,
        own: &OwnPlaces,
        calls: &Calls,
        flight: usize,
    ) -> Vec<Grant> {
        for (id, lease_end) in calls.released(flight).filter_map(|id| read.view.held(id.n)) {
            if !self.permits.iter().any(|permit| permit.has(id.n)) {
                self.permits.push(Permit { chain: vec![id], lease_end, is_given_up: false });
            }
        }
        let in_use = read.value.ledger.in_use();
        let mut grants = Vec::new();
        for (id, lease_end) in &read.view.first_in_queue {
            // Those that left are passed over, and those that were told have their permits.
            if !own.has(id.n) || self.is_told(id.n) {
                continue;
            }
            let limit = id.bound.map_or(self.limit, |bound| bound.limit.min(self.limit));
            if in_use > u64::from(limit) {
                break;
            }
            let fits = |permit: &&mut Permit| permit.fits(id, *lease_end, own);
            let Some(permit) = self.permits.iter_mut().find(fits) else { break };
            permit.chain.push(*id);
            grants.push(Grant { id: *id, lease_end: *lease_end });
        }
        grants
    }
}

impl Replica {
    /// Passes permits on that calls release, if the value says that it is this process's turn.
    pub(super) fn succeed(&mut self) {
        let Some(read) = self.known.as_read() else { return };
        if read.view.first_in_queue.is_empty() || self.calls.is_empty() {
            return;
        }
        let flight = self.flight.as_ref().map_or(0, |flight| flight.replies.len());
        let grants = self.succession.pass_on(read, &self.own, &self.calls, flight);
        self.events.extend(grants.into_iter().map(|grant| Event::Granted(grant.into())));
    }
}
