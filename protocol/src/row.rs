//! The places that live by one lease of a store.

use std::time::Duration;

use crate::id::NodeId;

/// The lease end of a place is this plus the length of its lease, ms: above every time, and below the tickets.
pub(crate) const ROW_BASE: u64 = 90_000_000_000_000;

/// The places of one process that have one length of lease.
///
/// The store has a lease for each row, which the process keeps alive: no place has a lease of its own.
/// Rows are ordered by process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row {
    /// The process.
    pub node: NodeId,
    /// The length of the lease, in whole seconds.
    pub seconds: u32,
}

impl Row {
    /// The row of a place of this process whose policy asks for a lease of this length, where the store grants leases of
    /// whole seconds, and none shorter than `shortest`.
    #[must_use]
    pub fn of(node: NodeId, lease_ms: u64, shortest: Duration) -> Self {
        let shortest = u64::try_from(shortest.as_millis()).unwrap_or(u64::MAX);
        let seconds = lease_ms.max(shortest).div_ceil(1000).max(1);
        Self { node, seconds: u32::try_from(seconds).unwrap_or(u32::MAX) }
    }

    /// The row of a place with this lease end.
    #[must_use]
    pub fn with_lease_end(node: NodeId, lease_end: u64) -> Self {
        let seconds = lease_end.saturating_sub(ROW_BASE) / 1000;
        Self { node, seconds: u32::try_from(seconds).unwrap_or(u32::MAX) }
    }

    /// The lease end of its places, ms, which is no time.
    #[must_use]
    pub const fn lease_end(self) -> u64 {
        ROW_BASE + self.seconds as u64 * 1000
    }
}
