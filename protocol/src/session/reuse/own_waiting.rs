//! The places of this process that wait in the backend's queue, as far as replies and hints tell.

use std::collections::BTreeMap;

use crate::call::Op;
use crate::claim::Tenant;
use crate::id::PlaceId;
use crate::ledger::{PlaceStatus, Reply};
use crate::session::State;
use crate::session::place::Place;
use crate::session::places::Places;
use crate::time::Time;

/// Replies come in the order of their calls, so these are the places of this process that a reply counts as waiting.
/// Places that were only sent are not among them: counting one too many takes another process's waiter for its own,
/// counting one too few only sends a permit through the backend.
///
/// If a hint is lost, a place that was granted still stands here, and the place of another process is taken for it. So
/// it matters when the places were last heard of. Permits are granted in the order of the tickets: while the first of
/// these waits, all of them do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct OwnWaiting {
    /// By ticket and number: when the last call was sent whose reply said that the place waits.
    heard: BTreeMap<(u64, u64), Time>,
    tickets: BTreeMap<u64, u64>,
    /// The tenant of all of them.
    tenant: Option<Tenant>,
}

impl OwnWaiting {
    pub(super) fn len(&self) -> u64 {
        self.heard.len() as u64
    }

    /// When the call was sent since which all of them are known to wait.
    pub(super) fn heard(&self) -> Option<Time> {
        self.heard.first_key_value().map(|(_, at)| *at)
    }

    /// Their numbers, in the order in which they are granted.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.heard.keys().map(|(_, n)| *n)
    }

    fn insert(&mut self, id: &PlaceId, ticket: u64, sent: Time) {
        let tenant = id.tenant();
        if self.tenant != tenant {
            // The tickets of two tenants do not say which is granted first.
            self.clear();
            self.tenant = tenant;
        }
        if let Some(before) = self.tickets.insert(id.n, ticket) {
            self.heard.remove(&(before, id.n));
        }
        self.heard.insert((ticket, id.n), sent);
    }

    pub(super) fn remove(&mut self, n: u64) {
        let Some(ticket) = self.tickets.remove(&n) else { return };
        let is_first = self.heard.first_key_value().is_some_and(|(first, _)| *first == (ticket, n));
        let at = self.heard.remove(&(ticket, n));
        if is_first
            && let Some(at) = at
            && let Some(mut next) = self.heard.first_entry()
        {
            let heard = at.max(*next.get());
            next.insert(heard);
        }
    }

    pub(super) fn clear(&mut self) {
        self.heard.clear();
        self.tickets.clear();
    }

    /// For explorers: makes equal what was heard of before `floor`.
    pub(super) fn coarsen(&mut self, floor: Time) {
        self.heard.values_mut().for_each(|at| *at = floor.max(*at));
    }

    /// Takes in what a call that was sent at `sent` says of its places.
    pub(super) fn hear(&mut self, op: &Op, reply: &Reply, late: bool, sent: Time, places: &Places) {
        // Hints are handled as they come, replies when their task runs: a hint that came later may be known already.
        let is_granted = |place: &Place| match place.state {
            State::Joining { hint, .. } => hint.is_some_and(|end| end >= reply.lease_end),
            state => matches!(state, State::Held),
        };
        let mut stands = |id: &PlaceId, status: &PlaceStatus| {
            let place = places.index(id.n).and_then(|index| places.get(index));
            match status.ticket() {
                // A release that was sent later may have been carried out before.
                Some(ticket) if !late && !place.is_some_and(is_granted) => {
                    self.insert(id, ticket, sent);
                }
                _ => self.remove(id.n),
            }
        };
        match op {
            Op::Acquire { ids, .. } | Op::Renew { ids, .. } => {
                ids.iter().zip(&reply.statuses).for_each(|(id, status)| stands(id, status));
            }
            Op::Reassert { proofs, .. } => {
                proofs.iter().zip(&reply.statuses).for_each(|((id, _), status)| stands(id, status));
            }
            Op::Release { .. } | Op::Audit { .. } => {}
        }
        op.leaving().iter().for_each(|id| self.remove(id.n));
        reply.granted.iter().for_each(|grant| self.remove(grant.id.n));
    }
}

#[cfg(test)]
impl OwnWaiting {
    /// Both ways to look at it tell the same.
    pub(super) fn check(&self) {
        let tickets = self.heard.keys().map(|(ticket, n)| (*n, *ticket)).collect();
        assert_eq!(self.tickets, tickets, "tickets of what stands there");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::id::NodeId;

    #[test]
    fn what_is_heard_of_the_first_holds_for_all_and_nothing_else_does() {
        let id =
            |n| PlaceId { node: NodeId::new(1), poll_only: false, n, bound: None, claim: None };
        let at = |ms| Time::ZERO + Duration::from_millis(ms);
        let mut own = OwnWaiting::default();
        for (n, heard) in [(1, 0), (2, 5), (3, 1)] {
            own.insert(&id(n), 10 * n, at(heard));
        }
        assert_eq!(own.heard(), Some(at(0)));
        own.remove(2);
        assert_eq!(own.heard(), Some(at(0)), "the second waited longer than is known of the first");
        own.insert(&id(1), 10, at(9));
        own.remove(1);
        assert_eq!(own.heard(), Some(at(9)), "while the first waited, the third did");
        own.check();
    }
}
