//! The places that this process has, as its calls and their replies tell.

use std::collections::BTreeSet;

use super::calls::Calls;
use crate::call::Op;
use crate::id::PlaceId;
use crate::ledger::{PlaceStatus, Reply};

/// The numbers of the places that the process has or asks for. Any other place of it in a value is a stranger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct OwnPlaces(BTreeSet<u64>);

impl OwnPlaces {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn has(&self, n: u64) -> bool {
        self.0.contains(&n)
    }

    pub(super) fn handle_call(&mut self, op: &Op) {
        for id in op.leaving() {
            self.0.remove(&id.n);
        }
        match op {
            Op::Acquire { ids, .. } | Op::Renew { ids, .. } => self.0.extend(ids.iter().map(n_of)),
            Op::Reassert { proofs, .. } => self.0.extend(proofs.iter().map(|(id, _)| id.n)),
            Op::Release { .. } | Op::Audit { .. } => {}
        }
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
                self.0.remove(&id.n);
            } else if !self.has(id.n) && !later.release(id.n) {
                self.0.insert(id.n);
            }
        }
    }

    /// Takes a refusal: the call was not carried out.
    pub(super) fn handle_refused(&mut self, op: &Op) {
        if let Op::Acquire { ids, .. } = op {
            ids.iter().for_each(|id| _ = self.0.remove(&id.n));
        }
    }
}

fn n_of(id: &PlaceId) -> u64 {
    id.n
}
