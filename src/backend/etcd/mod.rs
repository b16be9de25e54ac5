//! Permits counted in etcd.
//!
//! ```text
//!  driver ─► connection ─► engine ─► link ─► wire ─► etcd
//!                            ▲         │
//!                            └─────────┘
//! ```
//!
//! The [`engine`] is what the process knows of the cluster, over all connections: replicas of the semaphores that it uses,
//! its signs of life, and those of others. A [`link`] is one connection in use. The [`wire`] speaks etcd's protocol.

mod builder;
mod changes;
mod clock;
mod connection;
mod engine;
mod keys;
mod link;
mod open;
mod overrides;
mod queries;
mod requests;
mod shared;
mod status;
#[cfg_attr(
    not(feature = "unstable-backend"),
    allow(
        dead_code,
        unreachable_pub,
        unused_imports,
        reason = "some of it is for tests of the wire alone"
    )
)]
#[allow(missing_docs, reason = "public for tests alone")]
pub mod wire;

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

pub use self::builder::EtcdBackendBuilder;
use self::keys::Keys;
use self::shared::Shared;
use self::wire::{Endpoint, Settings};
use super::{Backend, Connection, Mailbox, Shard};
use crate::error::BackendError;
use crate::protocol::NodeId;
use crate::protocol::liveness::Grace;
use crate::sync::Mutex;

/// Counts permits in etcd, for a fleet: a failover loses none of them.
///
/// etcd 3.4 or later. Each semaphore is one key, and every grant is a transaction that a majority of the members has
/// stored. Each process uses one HTTP/2 connection to one member, with one watch; if that is lost, it goes to the next
/// member.
///
/// # Leases
///
/// A lease is rounded up to whole seconds, and to the shortest that the cluster grants: 1.5 of its election timeouts, so 2 s
/// by default. Permits of a process that died are free after the lease, half a second in which etcd notices, and half a
/// lease, at least 2 s: within that time, a process whose lease etcd ended too early would have come back. A process can
/// have 16 lengths of leases.
///
/// # Examples
///
/// ```
/// use tower_semaphore::Semaphore;
/// use tower_semaphore::backend::EtcdBackend;
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// let backend = EtcdBackend::builder("etcd://a.internal,b.internal,c.internal").build()?;
/// let semaphore = Semaphore::new(backend);
/// # let _ = semaphore; Ok(()) }
/// ```
pub struct EtcdBackend {
    endpoints: Vec<Endpoint>,
    settings: Settings,
    keys: Keys,
    grace: Grace,
    connect_timeout: Duration,
    /// The member to connect to next.
    next: AtomicUsize,
    /// The number of the last connection.
    connections: AtomicU64,
    /// The data of the last connection, as [`ServerInfo::data`](super::ServerInfo::data) has it.
    data: Mutex<open::Data>,
    /// What the process knows of the cluster; see [`Backend::attach`].
    shared: OnceLock<Arc<Shared>>,
}

impl EtcdBackend {
    /// The default [connect timeout](EtcdBackendBuilder::connect_timeout): 1 s.
    pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

    /// Returns a builder for the members of a URL: `etcd://[user:password@]host[:port][,host[:port]...][/prefix]`, or
    /// `etcds://` for TLS (feature `tls`). The default port is 2379.
    ///
    /// Name all members: they are not discovered. Each process begins with another one of them. Percent-encode
    /// `/ ? # , @ : %` in user and password. The user needs read and write rights on the keys below the prefix,
    /// `semaphore/` by default.
    ///
    /// Errors of building show no part of the URL, except numbers of up to five digits where a port is expected. Errors of
    /// opening a connection name the member as `host:port`, and `Debug` output shows the prefix. Neither shows the user or
    /// the password.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Semaphore;
    /// use tower_semaphore::backend::EtcdBackend;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let backend = EtcdBackend::builder("etcd://app:secret@a.internal,b.internal,c.internal/shop")
    ///     .connect_timeout(Duration::from_millis(500))
    ///     .build()?;
    /// let semaphore = Semaphore::new(backend);
    /// # let _ = semaphore; Ok(()) }
    /// ```
    pub fn builder(url: impl Into<String>) -> EtcdBackendBuilder {
        EtcdBackendBuilder::new(url.into())
    }
}

impl Backend for EtcdBackend {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        let environment = || Arc::clone(self.settings.environment());
        let shared = || Shared::new(node, mailbox, self.keys.clone(), self.grace, environment());
        _ = self.shared.get_or_init(shared);
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.keys.semaphore(name)
    }

    fn routing(&self) -> Option<u64> {
        Some(0)
    }

    fn connect<'a>(
        &'a self,
        _: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        self.open().map(|opened| Ok(Some(Arc::new(opened?) as _))).boxed()
    }

    fn response_timeout(&self) -> Duration {
        link::ANSWER_TIMEOUT
    }
}

impl fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackend").field("keys", &self.keys).finish_non_exhaustive()
    }
}
