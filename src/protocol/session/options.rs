//! What a request asks for, and what becomes of it in an outage.

use std::time::Duration;

use crate::protocol::claim::Claim;

/// What becomes of a request while the backend cannot be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnUnavailable {
    /// It is refused. The default: the cap holds.
    #[default]
    Refuse,
    /// It passes, whatever is in flight: there is no cap until the backend is back. Where an operator
    /// paused the semaphore, or set its limit to 0, it is refused.
    Admit,
    /// It takes one of this many permits of the process's own, and waits for one as it would
    /// otherwise. Permits that the process held before count against them. With the limit divided by
    /// the number of processes the fleet keeps the cap, if no process held more than its share when
    /// the backend went away; what it held beyond that comes on top until it is released. A limit that
    /// an operator set is never passed; 0 or a pause lets nothing in.
    Local(u32),
}

/// What a place asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AcquireOptions {
    /// The lease.
    pub lease: Duration,
    /// How many places may wait; `None`: this one may not.
    pub max_queue: Option<u32>,
    /// What becomes of it while the backend cannot be asked.
    pub on_unavailable: OnUnavailable,
    /// So many permits are left to requests of class 0.
    pub headroom: u32,
    /// Whose it is, where the semaphore is shared between tenants.
    pub claim: Option<Claim>,
    /// For how long its permit stays taken if the request is broken off, ms.
    pub linger_ms: u32,
}

impl AcquireOptions {
    pub(super) fn lease_ms(&self) -> u64 {
        u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX)
    }
}
