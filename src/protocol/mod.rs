//! The protocol, sans-IO: how a backend counts permits, and what a process may rely on.
//!
//! Two state machines make every decision. The [`Ledger`] is one semaphore as the backend counts it; the scripts in `lua/`
//! are the same ledger in Redis. The [`Session`] is one process's half: its requests, the replies to them, and the leases
//! that it may still rely on. Both are plain data: time and messages are arguments; calls, events and the next deadline
//! are results. This folder has no clock, lock, waker, task or socket, so the model and the simulation in `tests/` explore
//! the code that ships.
//!
//! `README.md` in this folder describes the protocol. The module is public for custom backends and for those tests.
//! Unstable: it may change in any release before 1.0.

pub(crate) mod bound;
pub(crate) mod call;
pub(crate) mod claim;
pub(crate) mod id;
pub(crate) mod ledger;
pub(crate) mod lines;
pub(crate) mod overrides;
pub mod session;
pub(crate) mod time;

pub use self::bound::Bound;
pub use self::call::{Call, Op, Single};
pub use self::claim::{Claim, Tenant};
pub use self::id::{Ids, NodeId, Numbered, PlaceId};
pub use self::ledger::{
    Caller, Done, Grant, HINT_WORK, Hint, LINE_MAX, Ledger, PlaceStatus, Post, Reply, TICKET_MIN,
    WORK_MAX,
};
pub use self::session::Session;
pub use self::time::Time;
