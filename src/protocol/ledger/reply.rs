//! What a ledger answers.

use smallvec::SmallVec;

#[cfg(doc)]
use super::Ledger;
use crate::protocol::claim::Claim;
use crate::protocol::id::PlaceId;

/// What the ledger says of one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceStatus {
    /// It is not there, or not any more.
    Gone,
    /// It has a permit.
    Held,
    /// It waits, and this is its ticket.
    Waiting(u64),
    /// It was refused: no permit is free, and it may not wait.
    NoPermit,
    /// It was refused: as many wait as may, in all or in its tenant's line.
    QueueFull,
    /// It was refused: its tenant has as many permits in use as it may, and it may not wait.
    TenantFull,
    /// It was refused: it asks for more permits than it could ever have.
    NeverFits,
}

/// A place that was promoted, with the lease end that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The place.
    pub id: PlaceId,
    /// The end of its lease, ms by the ledger's clock.
    pub lease_end: u64,
}

/// A grant, as the process of the place is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hint {
    /// The place's number.
    pub n: u64,
    /// Its claim.
    pub claim: Option<Claim>,
    /// The end of the lease that it keeps, ms by the ledger's clock.
    pub lease_end: u64,
}

impl From<Grant> for Hint {
    fn from(Grant { id, lease_end }: Grant) -> Self {
        Self { n: id.n, claim: id.claim, lease_end }
    }
}

/// What an operation answers; a release tells its grants alone. Redis leaves the counts out, too, where
/// permits are free and nobody needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reply {
    /// The lease end that the operation gave, ms; 0 where it gives none.
    pub lease_end: u64,
    /// The earliest lease end among all places, ms, while anyone waits; else 0, and 0 if `more`.
    /// Asking again just after it replaces a dead holder without delay.
    pub earliest: u64,
    /// How many permits are in use, after the operation.
    pub in_use: u64,
    /// How many places wait, after the operation.
    pub waiting: u64,
    /// One for each id of the operation, in its order; as they stood *before* the grants below,
    /// but for `acquire`.
    pub statuses: SmallVec<[PlaceStatus; 1]>,
    /// Places of the calling node that this operation granted. Other nodes get a hint.
    pub granted: Vec<Grant>,
    /// The places of the calling node that an audit found.
    pub found: Vec<PlaceId>,
    /// The bound on work was reached while permits were free and places waited: call again. A
    /// [`release`](Ledger::release) of no ids is enough.
    pub more: bool,
}
