//! The calls that are not answered yet, in their order.

use std::collections::{BTreeSet, VecDeque};

use crate::call::{Call, Op};
use crate::id::{NodeId, PlaceId};

/// The most places that the calls of one transaction name; a single call may name more.
const PLACES_MAX: usize = 512;

/// A call, with the number by which its answer is known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pending {
    pub(super) id: u64,
    pub(super) call: Call,
    /// A transaction with it had an unknown outcome: it may have been carried out.
    pub(super) in_doubt: bool,
    /// It may wait for others; see [`Replica::may_wait`](super::Replica::may_wait).
    pub(super) is_patient: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Calls(VecDeque<Pending>);

impl Calls {
    pub(super) fn push(&mut self, id: u64, call: Call) {
        self.0.push_back(Pending { id, call, in_doubt: false, is_patient: false });
    }

    pub(super) fn last_mut(&mut self) -> Option<&mut Pending> {
        self.0.back_mut()
    }

    pub(super) fn all_may_wait(&self) -> bool {
        self.0.iter().all(|pending| pending.is_patient)
    }

    /// Whether a call asks for further permits.
    pub(super) fn any_joins(&self) -> bool {
        self.0.iter().any(|pending| matches!(&pending.call.op, Op::Acquire { .. }))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The first calls, as many as go into one transaction.
    pub(super) fn batch(&self) -> impl Iterator<Item = &Call> {
        let mut places = 0;
        self.0.iter().map(|pending| &pending.call).take_while(move |call| {
            let is_first = places == 0;
            places += named(&call.op).count().max(1);
            is_first || places <= PLACES_MAX
        })
    }

    /// The numbers of the places that the calls name.
    pub(super) fn named(&self) -> BTreeSet<u64> {
        self.0.iter().flat_map(|pending| named(&pending.call.op)).map(|id| id.n).collect()
    }

    /// Whether a call removes this place.
    pub(super) fn release(&self, n: u64) -> bool {
        self.0.iter().any(|pending| pending.call.op.leaving().iter().any(|id| id.n == n))
    }

    /// The places that calls remove, but those of the first calls, and of calls that a transaction of unknown outcome had.
    pub(super) fn released(&self, but_first: usize) -> impl Iterator<Item = &PlaceId> {
        let calls = self.0.iter().skip(but_first).filter(|pending| !pending.in_doubt);
        calls.flat_map(|pending| pending.call.op.leaving())
    }

    /// The outcome of a transaction with the first calls is unknown.
    pub(super) fn handle_unknown(&mut self, count: usize) {
        self.0.iter_mut().take(count).for_each(|pending| pending.in_doubt = true);
    }

    pub(super) fn pop(&mut self) -> Option<Pending> {
        self.0.pop_front()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The places that an operation names.
fn named(op: &Op) -> impl Iterator<Item = &PlaceId> {
    op.leaving().iter().chain(staying(op))
}

/// Those of them that do not leave.
fn staying(op: &Op) -> impl Iterator<Item = &PlaceId> {
    let (ids, proofs): (&[PlaceId], &[(PlaceId, u64)]) = match op {
        Op::Acquire { ids, .. } | Op::Renew { ids, .. } => (ids, &[]),
        Op::Reassert { proofs, .. } => (&[], proofs),
        Op::Release { .. } | Op::Audit { .. } => (&[], &[]),
    };
    ids.iter().chain(proofs.iter().map(|(id, _)| id))
}

/// Whether the call names places of this process alone, and each of them once. One that leaves may be named again: a
/// session that releases a place twice sends both in one call.
pub(super) fn is_well_formed(call: &Call, node: NodeId) -> bool {
    let mut numbers: BTreeSet<_> = call.op.leaving().iter().map(|id| id.n).collect();
    named(&call.op).all(|id| id.node == node) && staying(&call.op).all(|id| numbers.insert(id.n))
}

/// Whether the call only asks: if it changes nothing, its reply says what the replica knows.
pub(super) fn only_asks(op: &Op) -> bool {
    match op {
        Op::Renew { .. } | Op::Audit { .. } => true,
        Op::Release { ids } => ids.is_empty(),
        Op::Acquire { .. } | Op::Reassert { .. } => false,
    }
}
