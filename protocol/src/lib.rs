//! The protocol, sans-IO: how a backend counts permits, and what a process may rely on.
//!
//! Two state machines make every decision about permits. The [`Ledger`] is one semaphore as the backend counts it; the scripts in `lua/`
//! are the same ledger in Redis. The [`Session`] is one process's half: its requests, the replies to them, and the leases
//! that it may still rely on. Both are plain data: time and messages are arguments; calls, events and the next deadline
//! are results. This crate has no clock, lock, waker, task or socket, so the model and the simulation of
//! [`tower-semaphore`](https://docs.rs/tower-semaphore) explore the code that ships.
//!
//! Where the backend has leases of its own, [`liveness`] has two more: what keeps the leases of a process, and what
//! notices that another process is dead.
//! Where permits are stored in something that counts nothing, a [`Replica`] is a third machine: one process's view of a
//! ledger that is stored as one value.
//!
//! The README describes the protocol. Use this crate to write a backend of your own; `tower_semaphore::protocol` is the
//! same. Unstable, except for the types that `tower_semaphore` exports without a feature: anything else may change in any
//! release.

mod adaptive;
mod base36;
mod bound;
mod bound_rate;
mod call;
mod charge;
mod claim;
mod further;
mod id;
mod ledger;
mod lines;
pub mod liveness;
mod moments;
mod overrides;
mod rate;
mod reject;
pub mod replica;
mod row;
pub mod session;
mod time;

pub use self::adaptive::{Adapted, Adaptive, Adjustment, SentUnder};
pub use self::bound::Bound;
pub use self::bound_rate::BoundRate;
pub use self::call::{Call, Op};
pub use self::charge::{Charge, Charges, Used, UsedOf};
pub use self::claim::{Claim, LineId, Tenant};
pub use self::further::{Further, FurtherLimit};
pub use self::id::{IdText, Ids, NodeId, Numbered, ParsePlaceIdError, PlaceId};
pub use self::ledger::{
    Caller, DecodeError, FURTHER_WORK, Grant, HINT_WORK, Hint, LINE_MAX, Ledger, PlaceStatus, Post,
    RateUsage, Reply, TICKET_MIN, Usage, WORK_MAX,
};
pub use self::overrides::{Mode, Override, Pause, PauseCause};
pub use self::rate::Rate;
pub use self::reject::RejectReason;
pub use self::replica::Replica;
pub use self::session::Session;
pub use self::time::Time;
