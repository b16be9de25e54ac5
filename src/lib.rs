//! crate docs

pub mod backend;
mod error;
pub mod ledger;
pub mod limit;
mod name;
mod semaphore;

pub use self::error::{AcquireError, BackendError, ConfigError, Full, FullReason, LeaseLost};
pub use self::limit::{ConcurrencyLimit, ConcurrencyLimitLayer};
pub use self::name::Name;
pub use self::semaphore::{
    Acquire, Holder, Inspection, Limit, Permit, Policy, PolicyBuilder, Semaphore, Waiter,
};
