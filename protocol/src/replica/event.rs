//! Events of a replica.

use super::value::ValueError;
use crate::ledger::{Hint, Reply};

/// An event. Events are in the order in which they happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A call has its answer.
    Answered {
        /// The number of the call.
        call: u64,
        /// The answer.
        answer: Answer,
    },
    /// A waiting place of this process was granted, and no reply says so.
    Granted(Hint),
    /// A place of another process waits, and none did before: give back permits that are kept for this process's own next
    /// requests.
    Recalled,
    /// A process that does not know the limit removed places, and a place of this process waits: make a call that promotes,
    /// such as a renewal.
    Freed,
    /// The newest value cannot be read. Nothing is written, and calls are refused, until another value replaces it.
    Stopped(ValueError),
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It was carried out. Lease ends in the reply say which lease a place has, and are no times.
    Reply(Reply),
    /// It was not carried out: the store refused the transaction, the newest value cannot be read, or the call names a place
    /// twice or a place of another process.
    Refused,
    /// It was refused, but an earlier transaction with it had an unknown outcome, so it may have been carried out.
    Failed,
}
