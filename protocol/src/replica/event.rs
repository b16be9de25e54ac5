//! What a replica says.

use super::value::ValueError;
use crate::ledger::{Hint, Reply};

/// Something that happened, in the order in which it did.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A call has its answer.
    Answered {
        /// The number of the call.
        call: u64,
        /// The answer.
        answer: Answer,
    },
    /// A waiting place of this process was granted, by another process or without a reply that says so.
    Granted(Hint),
    /// A place of another process waits, and none did: permits that this process keeps for its own next requests are to
    /// be given back.
    Recalled,
    /// Places were removed by a process that did not know the limit, while a place of this process waits: a call that
    /// promotes is to be made, such as a renewal.
    Freed,
    /// The newest value is not read, so nothing is written and calls are refused until a value that is read replaces it.
    Stopped(ValueError),
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It was carried out. Lease ends in the reply say which lease a place has, and are no times.
    Reply(Reply),
    /// Nothing was done of it: the store refused the transaction, the newest value is not read, or the call names a place
    /// twice or one of another process.
    Refused,
    /// The same, but an earlier transaction with it had an unknown outcome, so it may have been carried out.
    Failed,
}
