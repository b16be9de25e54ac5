//! Replies of a ledger.

use smallvec::SmallVec;

#[cfg(doc)]
use super::Ledger;
use crate::bound::Bound;
use crate::bound_rate::BoundRate;
use crate::claim::Claim;
use crate::id::PlaceId;

/// The status of one place in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceStatus {
    /// It is not there, or no longer.
    Gone,
    /// It holds a permit.
    Held,
    /// It waits, and this is its ticket.
    Waiting(u64),
    /// The same of a newcomer whose further limit of this index, from 0, was full.
    WaitingFor(u64, u8),
    /// It was rejected: no permit is free, and it may not wait.
    NoPermit,
    /// It was rejected: the queue is full, in all or in its tenant's line.
    QueueFull,
    /// It was rejected: its tenant has reached its limit, and it may not wait.
    TenantFull,
    /// It was rejected: its further limit of this index, from 0, is full, and it may not wait.
    LimitFull(u8),
    /// It was rejected: it asks for more permits than it can ever get.
    NeverFits,
    /// It was rejected: permits are free, but as many were granted lately as its rate allows, and it may not wait. In so
    /// many ms, rounded up, the rate allows it.
    NoStart(u64),
    /// It was rejected: permits are free, but the budget of this index, from 0, does not allow its charge, and it may not
    /// wait. In so many ms, rounded up, it does.
    NoBudget(u8, u64),
}

impl PlaceStatus {
    /// The ticket of a place that waits.
    #[must_use]
    pub const fn ticket(self) -> Option<u64> {
        match self {
            Self::Waiting(ticket) | Self::WaitingFor(ticket, _) => Some(ticket),
            _ => None,
        }
    }
}

/// A place that was promoted, with the lease end that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The place.
    pub id: PlaceId,
    /// The end of its lease, ms by the ledger's clock.
    pub lease_end: u64,
}

/// A grant, as a message to the process of the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hint {
    /// The place's number.
    pub n: u64,
    /// The limit that it is judged by.
    pub bound: Option<Bound>,
    /// Its claim.
    pub claim: Option<Claim>,
    /// The end of the lease that it keeps, ms by the ledger's clock.
    pub lease_end: u64,
}

impl From<Grant> for Hint {
    fn from(Grant { id, lease_end }: Grant) -> Self {
        Self { n: id.n, bound: id.bound, claim: id.claim, lease_end }
    }
}

/// How many permits and places there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usage {
    /// Permits in use.
    pub in_use: u64,
    /// Places that wait.
    pub waiting: u64,
}

/// How much of a rate is used at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RateUsage {
    /// The rate.
    pub rate: BoundRate,
    /// The permits that were granted in the window that ends at the moment.
    pub started: u64,
    /// From when on the rate allows one more, µs; `None`: now.
    pub opens_at: Option<u64>,
}

impl RateUsage {
    /// Of this rate, nothing is used.
    #[must_use]
    pub fn unused(rate: BoundRate) -> Self {
        Self { rate: rate.alone(), started: 0, opens_at: None }
    }
}

/// The reply to an operation. A release only reports its grants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reply {
    /// The lease end that the operation set, in ms; 0 if it sets none.
    pub lease_end: u64,
    /// The earliest lease end of all places, in ms, while any place waits; otherwise, or if `more`, 0. A call just after
    /// it replaces a dead holder without delay.
    pub earliest: u64,
    /// The counts after the operation; `None` where the reply does not contain them. Redis omits them while permits are
    /// free.
    pub usage: Option<Usage>,
    /// One for each id of the operation, in order; as of *before* the grants below, except for `acquire`.
    pub statuses: SmallVec<[PlaceStatus; 1]>,
    /// The places of the calling node that this operation granted. Other nodes get hints.
    pub granted: Vec<Grant>,
    /// The places of the calling node that an audit found.
    pub found: Vec<PlaceId>,
    /// The bound on work was reached while permits were free and places waited: call again. A
    /// [`release`](Ledger::release) of no ids is enough.
    pub more: bool,
    /// In how many ms, rounded up, time allows the grant of the next in turn, for which a permit is free: its rate and its
    /// budgets do; 0: no place is kept back by these alone. A call then promotes again.
    pub opens_in: u64,
}
