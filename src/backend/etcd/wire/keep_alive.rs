//! Keeping leases alive.

use std::fmt;

use super::error::WireError;
use super::exchange::Exchange;
use super::messages::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};

/// The number of requests that may wait to be sent.
const WAITING_MAX: usize = 64;

/// A stream that keeps leases alive. The caller decides when, and how long an answer may take. Dropping it ends the
/// stream, and no lease.
///
/// An answer is no proof: a member that no longer leads, and does not know it yet, answers too.
pub struct KeepAlive {
    exchange: Exchange<LeaseKeepAliveRequest, LeaseKeepAliveResponse>,
}

/// The answer for one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptAlive {
    pub lease: i64,
    /// The length of the lease from now on, in seconds. `None`: there is no such lease.
    pub ttl: Option<u64>,
    /// The term of the leader that answered. One that was deposed, and does not know it, answers with an old one.
    pub term: u64,
}

impl KeepAlive {
    pub(super) fn new(
        open: impl FnOnce(usize) -> Exchange<LeaseKeepAliveRequest, LeaseKeepAliveResponse>,
    ) -> Self {
        Self { exchange: open(WAITING_MAX) }
    }

    /// Asks for a lease to be kept alive. Answers come in the order of the requests. Returns `false` if 64 requests
    /// wait to be sent, so that this one is not sent, or if the stream has ended.
    #[must_use]
    pub fn send(&self, lease: i64) -> bool {
        self.exchange.send(LeaseKeepAliveRequest { id: lease })
    }

    /// Returns the next answer.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no answer.
    ///
    /// # Errors
    ///
    /// If the stream has ended. It is of no further use.
    pub async fn next(&mut self) -> Result<KeptAlive, WireError> {
        let LeaseKeepAliveResponse { header, id, ttl } = self.exchange.next().await?;
        let term = header.map_or(0, |header| header.raft_term);
        Ok(KeptAlive { lease: id, ttl: u64::try_from(ttl).ok().filter(|ttl| *ttl > 0), term })
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepAlive").finish_non_exhaustive()
    }
}
