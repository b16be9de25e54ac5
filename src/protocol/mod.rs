//! The protocol, sans-IO: what is counted, and what each process believes of it.
//!
//! Two state machines hold every decision. The [`Ledger`] is one semaphore as the
//! backend counts it; the scripts in `lua/` are the same ledger in Redis. The
//! [`Session`] is one process's half: its requests, what it was told, and what it
//! may still rely on. Both are plain data. Time and messages come in as arguments; calls, events and
//! the next deadline come out. There is no clock, lock, waker, task or socket in this folder, so the
//! model and the simulation in `tests/` explore the code that ships.
//!
//! `README.md` in this folder describes the protocol. The module is public for backends of your own
//! and for those tests; it may change in any release.

pub(crate) mod call;
pub(crate) mod claim;
pub(crate) mod id;
pub(crate) mod ledger;
pub(crate) mod lines;
pub(crate) mod overrides;
pub mod session;
pub(crate) mod time;

pub use self::call::{Call, Op};
pub use self::claim::{Claim, Tenant};
pub use self::id::{Ids, NodeId, PlaceId};
pub use self::ledger::{
    Caller, Grant, HINT_WORK, Hint, LINE_MAX, Ledger, PlaceStatus, Post, Reply, TICKET_MIN,
    WORK_MAX,
};
pub use self::session::Session;
pub use self::time::Time;
