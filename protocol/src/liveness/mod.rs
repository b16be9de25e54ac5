//! Which processes live, where the backend has leases of its own.
//!
//! A store such as etcd has leases, and removes a key with the lease to which it is attached. A process holds one lease
//! for each lease length, and a key for each of them, its *sign of life*. Places belong to a [`Row`]: their process and
//! the length of their lease. A row lives while its sign is there, so no place has a lease end of its own, and no clock
//! is compared with another one.
//!
//! Two machines without a clock, lock or socket decide what follows from that:
//!
//! * [`OwnRows`] keeps the signs of this process, and says from when its leases count.
//! * [`OtherRows`] notices that the sign of another process is gone, and says when its places are to be forgotten.
//!
//! The rules are in the README of this crate, under "Signs of life"; comments name them by their numbers.
//!
//! # Time
//!
//! A [`Time`] here must count the time in which the machine was suspended, as everywhere in this crate: the store's leases
//! run on meanwhile. A process that was frozen or suspended finds on its first look that its deadlines have passed. Its
//! observations of others are stale then, so it waits for a whole grace again.
//!
//! # Other data
//!
//! Revisions and leases mean nothing in another store, or in one that was restored from a backup. The caller starts with
//! new machines then, and treats its places as after any loss of data.
//!
//! # Examples
//!
//! ```
//! use std::time::Duration;
//! use tower_semaphore_protocol::Time;
//! use tower_semaphore_protocol::liveness::{Action, OwnRows, Sign, deadline};
//!
//! let at = |ms| Time::since_epoch(Duration::from_millis(ms));
//! let mut own = OwnRows::new(Duration::from_secs(2));
//! own.handle_connected(at(0));
//!
//! let grant = own.poll_request(at(0)).unwrap();
//! assert_eq!(grant.action, Action::Grant { seconds: 2 });
//! own.handle_granted(grant.id, 77, 2, at(5));
//!
//! let put = own.poll_request(at(5)).unwrap();
//! assert_eq!(put.action, Action::PutSign { seconds: 2, lease: 77, over: 0 });
//! // The transaction put the key, and read it.
//! own.handle_sign(put.id, Some(Sign { lease: 77, created: 10, modified: 10 }), 1, at(9));
//!
//! // The lease counts from when the grant was sent.
//! assert!(own.is_registered(2));
//! assert_eq!(own.leases_from(2), Some(at(0)));
//! assert_eq!(deadline(at(0), 2), at(1970));
//! ```

mod others;
mod own;

use std::time::Duration;

pub use self::others::{Cleanup, OtherRows, ROWS_MAX, Seen};
pub use self::own::{Action, LENGTHS_MAX, OwnRows, Request, RequestId, SILENT_AFTER};
pub use crate::row::Row;
use crate::time::Time;

/// A lease of the store.
pub type LeaseId = i64;

/// A revision of the store: each change has a higher one. 0 is before all of them.
pub type Revision = i64;

/// A term of the store's leader.
pub type Term = u64;

/// A sign of life, as the store has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sign {
    /// The lease that removes it.
    pub lease: LeaseId,
    /// Since which revision it has been there without a gap.
    pub created: Revision,
    /// The revision of its last change.
    pub modified: Revision,
}

/// Returns the end of a lease of this length that counts from `from`, as its own process may rely on it: less the
/// [`margin`].
#[must_use]
pub fn deadline(from: Time, seconds: u32) -> Time {
    from + Duration::from_secs(u64::from(seconds)).saturating_sub(margin(seconds))
}

/// Returns how much earlier than it ends its own process stops relying on a lease: 1 % of it, because clocks run at
/// different speeds, and 10 ms.
///
/// A [`Session`](crate::Session) subtracts 1 ms of a lease. A backend that tells it from when a lease counts names a time
/// that is earlier by the rest.
#[must_use]
pub fn margin(seconds: u32) -> Duration {
    Duration::from_secs(u64::from(seconds)) / 100 + Duration::from_millis(10)
}

/// How long the places of a row are kept after its sign is gone.
///
/// A store can remove a sign too early: an etcd leader that was deposed, and does not know it yet, revokes leases that the
/// new leader keeps alive (fixed in 2024), and an operator can revoke a lease. Within the grace, a process that lives puts
/// its sign again and keeps its places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Grace {
    /// Half of the lease, at least 2 s. If a sign is removed early while its process cannot reach the store, the process
    /// can rely on a permit for up to half a lease after others forgot it.
    #[default]
    Half,
    /// A whole lease. Then not even such a process relies on a permit that others forgot.
    Whole,
}

impl Grace {
    /// The least grace: two of etcd's election timeouts.
    pub const MIN: Duration = Duration::from_secs(2);

    /// Returns the grace of a row whose leases have this length.
    #[must_use]
    pub fn of(self, seconds: u32) -> Duration {
        let lease = Duration::from_secs(u64::from(seconds));
        let grace = match self {
            Self::Half => lease / 2,
            Self::Whole => lease,
        };
        grace.max(Self::MIN)
    }
}
