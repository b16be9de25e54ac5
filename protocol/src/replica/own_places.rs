//! The places that this process has, as its calls and their replies tell.

use std::collections::BTreeMap;
use std::time::Duration;

use super::calls::Calls;
use crate::call::Op;
use crate::id::PlaceId;
use crate::ledger::{PlaceStatus, Reply};
use crate::time::Time;

/// The numbers of the places that the process has or asks for, each with when a call last named it. Any other place of it in
/// a value is a stranger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct OwnPlaces {
    places: BTreeMap<u64, Time>,
    now: Time,
}

impl OwnPlaces {
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(super) fn has(&self, n: u64) -> bool {
        self.places.contains_key(&n)
    }

    pub(super) fn handle_call(&mut self, op: &Op) {
        for id in op.leaving() {
            self.places.remove(&id.n);
        }
        let now = self.now;
        let named = |id: &PlaceId| (id.n, now);
        match op {
            Op::Acquire { ids, .. } | Op::Renew { ids, .. } => {
                self.places.extend(ids.iter().map(named));
            }
            Op::Reassert { proofs, .. } => {
                self.places.extend(proofs.iter().map(|(id, _)| named(id)));
            }
            Op::Release { .. } | Op::Audit { .. } => {}
        }
    }

    pub(super) const fn handle_time(&mut self, now: Time) {
        self.now = now;
    }

    /// Forgets places by how long no call has named them. Returns whether there were any.
    pub(super) fn forget_if(&mut self, is_forgotten: impl Fn(u64, Duration) -> bool) -> bool {
        let (before, now) = (self.places.len(), self.now);
        self.places.retain(|n, named_at| !is_forgotten(*n, now.since(*named_at)));
        self.places.len() < before
    }

    /// Takes a reply. `later`: the calls after this one.
    pub(super) fn handle_reply(&mut self, op: &Op, reply: &Reply, later: &Calls) {
        let ids: &mut dyn Iterator<Item = &PlaceId> = match op {
            Op::Acquire { ids, .. } | Op::Renew { ids, .. } => &mut ids.iter(),
            Op::Reassert { proofs, .. } => &mut proofs.iter().map(|(id, _)| id),
            Op::Release { .. } | Op::Audit { .. } => return,
        };
        for (id, status) in ids.zip(&reply.statuses) {
            if *status != PlaceStatus::Held && status.ticket().is_none() {
                self.places.remove(&id.n);
            } else if !self.has(id.n) && !later.release(id.n) {
                self.places.insert(id.n, self.now);
            }
        }
    }

    /// Takes a refusal: the call was not carried out.
    pub(super) fn handle_refused(&mut self, op: &Op) {
        if let Op::Acquire { ids, .. } = op {
            ids.iter().for_each(|id| _ = self.places.remove(&id.n));
        }
    }
}
