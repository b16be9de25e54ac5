//! A ledger as bytes, for a backend that stores each as one value.
//!
//! Every process that reads them must come to the same ledger, and two processes with the same ledger to the same bytes.
//! So there is one coding of each ledger: tables and places are sorted, and whatever is written otherwise is an error.
//! The README has the layout.
//!
//! What follows from the places is not stored: units in use, queues, indexes. Where the lines stand is, because it says
//! since when they wait; so are the starts that count for a rate, and the budgets that are not full.

mod error;
mod numbers;
mod read;
mod table;
mod terms;
mod write;

pub use self::error::DecodeError;
use super::Ledger;

/// The version of the coding.
const VERSION: u8 = 1;

/// The oldest version whose processes may change what is written.
const OLDEST_WRITER: u8 = 1;

impl Ledger {
    /// Appends the ledger as bytes.
    ///
    /// Ledgers that are equal, and whose lines stand alike, have the same bytes, however they came about. The ids of
    /// places must be such as [`PlaceId::parse`](crate::PlaceId::parse) reads, or the bytes are not read back.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore_protocol::{Caller, Ledger, NodeId, PlaceId};
    ///
    /// let node = NodeId::new(7);
    /// let now = 1_795_169_853_126_543;
    /// let caller = Caller { now, limit: 1, headroom: 0, for_all: false, max_waiting: 0, node, recalls: false };
    /// let ids = [1, 2].map(|n| PlaceId { node, poll_only: false, n, bound: None, claim: None });
    /// let mut ledger = Ledger::new();
    /// ledger.acquire(caller, 10_000, Some(100), &[], &ids, &mut |_, _| true);
    ///
    /// let mut bytes = Vec::new();
    /// ledger.encode(&mut bytes);
    /// assert!(bytes.len() < 60);
    ///
    /// let copy = Ledger::decode(&bytes)?;
    /// assert_eq!(copy, ledger);
    /// assert_eq!((copy.in_use(), copy.waiting()), (1, 1));
    /// # Ok::<(), tower_semaphore_protocol::DecodeError>(())
    /// ```
    pub fn encode(&self, out: &mut Vec<u8>) {
        write::write(self, out);
    }

    /// Reads what [`encode`](Self::encode) writes.
    ///
    /// The ledger replies to every operation as the one that was written would. Its bound on work is
    /// [`WORK_MAX`](crate::WORK_MAX). Memory is taken in proportion to the bytes, whatever they say.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Version`] if the bytes have a version that this one does not know, or that it may not change. A
    /// process stops using such a ledger. Any other error if the bytes are not as `encode` writes them.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        read::read(bytes)
    }
}
