//! Where permits are counted: in this process, or in Redis or etcd for a whole fleet.
//!
//! [`MemoryBackend`] counts permits in this process; `RedisBackend` (feature `redis`) shares them between all processes
//! that use the same Redis, `EtcdBackend` (feature `etcd`) between all that use the same etcd cluster. [`MemoryServer`]
//! stands in for a Redis in tests: it can be made unavailable.
//!
//! With the feature `unstable-backend`, `seam` has the traits that a backend implements.
//!
#![cfg_attr(feature = "redis", doc = "```")]
#![cfg_attr(not(feature = "redis"), doc = "```ignore")]
//! use tower_semaphore::Semaphore;
//! use tower_semaphore::backend::{MemoryBackend, RedisBackend};
//!
//! # fn example(url: Option<&str>) -> Result<Semaphore, tower_semaphore::ConfigError> {
//! let semaphore = match url {
//!     Some(url) => Semaphore::new(RedisBackend::builder(url).build()?),
//!     None => Semaphore::new(MemoryBackend::new()),
//! };
//! # Ok(semaphore) }
//! ```
//!
//! [`Semaphore`]: crate::Semaphore

#[cfg(feature = "etcd")]
mod etcd;
mod listing;
mod memory;
mod memory_server;
mod overrides;
mod peer_message;
#[cfg(any(feature = "etcd", feature = "redis"))]
mod prefix;
#[cfg(feature = "redis")]
mod redis;
#[cfg(any(feature = "etcd", feature = "redis"))]
mod socket;
#[cfg(any(feature = "etcd", feature = "redis", feature = "tls-no-provider"))]
#[cfg_attr(not(feature = "tls-no-provider"), path = "tls_disabled.rs")]
#[cfg_attr(
    not(any(feature = "etcd", feature = "redis")),
    expect(dead_code, reason = "no backend uses TLS")
)]
mod tls;
#[cfg(any(feature = "etcd", feature = "redis"))]
mod url;

#[cfg(feature = "unstable-backend")]
pub mod seam;
#[cfg(not(feature = "unstable-backend"))]
#[allow(dead_code, unreachable_pub, reason = "some of it is for backends of other crates")]
mod seam;

use std::time::Duration;

#[cfg(all(feature = "etcd", feature = "unstable-backend"))]
#[doc(hidden)]
pub use self::etcd::wire as etcd_wire;
#[cfg(feature = "etcd")]
pub use self::etcd::{EtcdBackend, EtcdBackendBuilder};
pub use self::memory::MemoryBackend;
pub use self::memory_server::MemoryServer;
#[cfg(all(fuzzing, feature = "redis"))]
pub(crate) use self::redis::fuzz;
#[cfg(feature = "redis")]
pub use self::redis::{RedisBackend, RedisBackendBuilder};
#[cfg(feature = "redis")]
pub(crate) use self::seam::InOrder;
pub(crate) use self::seam::{
    ALL_NAMES, AddressedCall, Answer, Answers, Backend, Change, Connection, Counter, Embedded,
    Listing, Mailbox, Names, OVERRIDES, Overrides, PeerMessage, Queries, Query, QueryError,
    ServerInfo, Shard,
};
#[cfg(feature = "tls-no-provider")]
pub use self::tls::TlsSettings;
/// The version of `deadpool-redis` whose pools [`RedisBackend::from_pool`] accepts: 0.23, with `redis` 1 as
/// `deadpool_redis::redis`.
#[cfg(feature = "deadpool-redis")]
pub use deadpool_redis;
/// The version of `rustls` whose configurations [`TlsSettings`] accepts: 0.23.
#[cfg(feature = "tls-no-provider")]
pub use rustls;

/// What a process does after Redis may have lost data: it was restarted, or another server answers.
///
/// Permits in flight are counted again in either case, as soon as their process notices the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AfterLoss {
    /// Grants permits at once. Until all processes have renewed their permits, within a third of a lease, up to twice
    /// the limit can be in flight.
    #[default]
    Continue,
    /// Grants nothing for one lease; requests wait meanwhile, or are rejected if they may not wait. The limit holds
    /// throughout, if all processes use the same lease for a name: each process knows only its own.
    Quarantine,
    /// As [`Quarantine`](Self::Quarantine), and for this long at least: where leases differ, the longest that any
    /// process uses. At most [`Policy::MAX_LEASE`](crate::Policy::MAX_LEASE).
    QuarantineFor(Duration),
}

impl AfterLoss {
    /// For how long a quarantine lasts at least, if there is one.
    const fn quarantine(self) -> Option<Duration> {
        match self {
            Self::Continue => None,
            Self::Quarantine => Some(Duration::ZERO),
            Self::QuarantineFor(duration) => Some(duration),
        }
    }
}
