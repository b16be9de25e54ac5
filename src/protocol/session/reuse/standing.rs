//! The places of this process in the backend's queue, as far as they are certain to stand there.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::call::Op;
use crate::protocol::id::PlaceId;
use crate::protocol::ledger::{PlaceStatus, Reply};
use crate::protocol::session::State;
use crate::protocol::session::place::{Places, lease_at_least};
use crate::protocol::time::Time;

/// By what came before on this connection: replies come in the order of their calls, so these are the places that a
/// reply has counted of this process. To take another's for one's own would pass it by, so a place of which nothing
/// is heard is not counted longer than its lease lasts at least.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Standing {
    until: BTreeMap<u64, Time>,
    by_end: BTreeSet<(Time, u64)>,
}

impl Standing {
    pub(super) fn len(&self) -> u64 {
        self.until.len() as u64
    }

    fn insert(&mut self, n: u64, until: Time) {
        if let Some(before) = self.until.insert(n, until) {
            self.by_end.remove(&(before, n));
        }
        self.by_end.insert((until, n));
    }

    pub(super) fn remove(&mut self, n: u64) {
        if let Some(until) = self.until.remove(&n) {
            self.by_end.remove(&(until, n));
        }
    }

    pub(super) fn clear(&mut self) {
        self.until.clear();
        self.by_end.clear();
    }

    /// Takes out those whose leases may have ended there.
    pub(super) fn expire(&mut self, now: Time) {
        while let Some((until, n)) = self.by_end.first().copied()
            && until <= now
        {
            self.remove(n);
        }
    }

    /// Takes in what a call that was sent at `sent` says of its places.
    pub(super) fn hear(&mut self, op: &Op, reply: &Reply, late: bool, sent: Time, places: &Places) {
        // Hints are handled as they come, replies when their task runs: a hint that came later may be known already.
        let is_granted = |n: u64| {
            let place = places.index(n).and_then(|index| places.get(index));
            place.is_some_and(|place| match place.state {
                State::Joining { hint, .. } => hint.is_some_and(|end| end >= reply.lease_end),
                state => matches!(state, State::Held),
            })
        };
        let until = sent + lease_at_least(op.lease_ms());
        let mut stands = |id: &PlaceId, status: &PlaceStatus| {
            // A release that was sent later may have been carried out before.
            if matches!(status, PlaceStatus::Waiting(_)) && !late && !is_granted(id.n) {
                self.insert(id.n, until);
            } else {
                self.remove(id.n);
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
        if let Op::Acquire { leaving: ids, .. } | Op::Release { ids } = op {
            ids.iter().for_each(|id| self.remove(id.n));
        }
        reply.granted.iter().for_each(|grant| self.remove(grant.id.n));
    }
}

#[cfg(test)]
impl Standing {
    /// Both ways to look at it tell the same. Gives the numbers of those that stand there still.
    pub(super) fn check(&self, now: Time) -> impl Iterator<Item = u64> {
        let by_end = self.until.iter().map(|(n, until)| (*until, *n)).collect::<BTreeSet<_>>();
        assert_eq!(self.by_end, by_end);
        self.until.iter().filter(move |(_, until)| now < **until).map(|(n, _)| *n)
    }
}
