//! Calls of a session to the ledger.

use super::charge::Used;
use super::id::{Ids, PlaceId};

/// One operation on one semaphore, for any number of places of one process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The limit of the semaphore, as the calling process knows it: that of the newcomers, or the highest of this
    /// process's places that wait. A place that waits already is judged by the [`Bound`](super::Bound) in its id.
    pub limit: u32,
    /// The permits that are reserved for requests of class 0.
    pub headroom: u32,
    /// Whether the limit counts for all places, whatever they brought.
    pub for_all: bool,
    /// How many places may wait, in all lines together, once a place with a claim has joined; see
    /// [`max_queue`](Op::Acquire::max_queue).
    pub max_waiting: u32,
    /// Whether newcomers that have to wait recall permits that other processes keep.
    pub recalls: bool,
    /// What those of the places that leave have used of their budgets that say so, in their order.
    pub used: Vec<(PlaceId, Used)>,
    /// The operation.
    pub op: Op,
}

impl Call {
    /// A call without limits, which a session fills in.
    #[must_use]
    pub const fn of(op: Op) -> Self {
        Self {
            limit: 0,
            headroom: 0,
            for_all: false,
            max_waiting: 0,
            recalls: false,
            used: Vec::new(),
            op,
        }
    }
}

/// An operation of the [`Ledger`](super::ledger::Ledger). Each is answered by a
/// [`Reply`](super::ledger::Reply).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Removes the places that leave; then grants each newcomer a permit, queues it, or rejects it.
    Acquire {
        /// The places that leave: those released since the last call. Without room for one of its own, because a call is
        /// moved often, and seldom has any.
        leaving: Vec<PlaceId>,
        /// Length of the lease, ms.
        lease_ms: u64,
        /// The longest queue, or line where places have claims; `None`: the newcomers may not wait.
        max_queue: Option<u32>,
        /// The newcomers.
        ids: Ids,
    },
    /// Removes places, waiting or held. Without any, only sweeps and promotes.
    Release {
        /// The places.
        ids: Ids,
    },
    /// Renews leases.
    Renew {
        /// Length of the lease, ms.
        lease_ms: u64,
        /// The places.
        ids: Ids,
    },
    /// Renews leases with proof.
    Reassert {
        /// Length of the lease, ms.
        lease_ms: u64,
        /// Places, each with its last lease end (ms) or ticket (µs); 0: the next one replaces it.
        proofs: Vec<(PlaceId, u64)>,
    },
    /// Lists the places of the calling process.
    Audit {
        /// How many places of the semaphore to examine, those with the earliest lease ends first.
        most: u32,
    },
}

impl Op {
    /// The places that leave.
    #[must_use]
    pub fn leaving(&self) -> &[PlaceId] {
        match self {
            Self::Acquire { leaving, .. } => leaving,
            Self::Release { ids } => ids,
            Self::Renew { .. } | Self::Reassert { .. } | Self::Audit { .. } => &[],
        }
    }

    /// How many places the operation names.
    #[must_use]
    pub fn places(&self) -> usize {
        match self {
            Self::Acquire { leaving, ids, .. } => leaving.len() + ids.len(),
            Self::Release { ids } | Self::Renew { ids, .. } => ids.len(),
            Self::Reassert { proofs, .. } => proofs.len(),
            Self::Audit { most } => *most as usize,
        }
    }

    /// The lease that the operation gives, ms; 0 where it gives none.
    #[must_use]
    pub const fn lease_ms(&self) -> u64 {
        match self {
            Self::Acquire { lease_ms, .. }
            | Self::Renew { lease_ms, .. }
            | Self::Reassert { lease_ms, .. } => *lease_ms,
            Self::Release { .. } | Self::Audit { .. } => 0,
        }
    }
}
