//! Permits counted in Redis.

mod builder;
mod calls;
mod cluster;
mod connection;
mod dial;
mod endpoint;
mod error;
mod info;
mod keys;
mod messages;
mod multiplexed;
mod open;
mod queries;
mod scripts;
mod sentinel;
mod slots;
mod url;
mod values;

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

#[cfg(feature = "deadpool-redis")]
use deadpool_redis::Pool;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

pub use self::builder::RedisBackendBuilder;
use self::builder::Source;
use self::cluster::Cluster;
use self::dial::Timeouts;
use self::endpoint::Endpoint;
use self::keys::Keys;
use self::sentinel::Sentinel;
use super::{AfterLoss, Backend, Connection, Mailbox, Shard};
use crate::error::BackendError;
use crate::protocol::NodeId;

/// Counts permits in Redis, for a fleet. Each semaphore is one sorted set.
///
/// Redis 6.2 or later, or Valkey: one server, one that Sentinel watches over, or a cluster; see
/// [`builder`](Self::builder) for the URLs. Uses one RESP3 connection to each server that it needs, with
/// `TCP_NODELAY`; hints arrive on the same connection. Every call is bounded in time, and the Redis client repeats none
/// on its own.
///
/// # Examples
///
/// ```
/// use tower_semaphore::Semaphore;
/// use tower_semaphore::backend::{AfterLoss, RedisBackend};
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// let backend = RedisBackend::builder("redis-sentinel://s1.internal,s2.internal,s3.internal/mymaster")
///     .after_loss(AfterLoss::Quarantine)
///     .build()?;
/// let semaphore = Semaphore::new(backend);
/// # let _ = semaphore; Ok(()) }
/// ```
///
/// # Users
///
/// A user with an ACL needs, with the default prefix, `~semaphore:* &semaphore:*` and
/// `+evalsha +eval +script|load +subscribe +publish +time +zadd +zrem +zcard +zcount +zmscore +zrange
/// +zrangebyscore +pttl +pexpire +hello`. To apply overrides it needs `+hget +hgetall`, to set
/// them `+hset +hdel +hlen +persist`; to list semaphores `+scan`; and to detect restarts and an eviction policy that loses
/// semaphores `+info`.
///
/// In a cluster it also needs `+cluster|slots +asking`, and all of these on each node, replicas included. The user of a
/// sentinel needs `+sentinel|get-master-addr-by-name`.
///
/// # Sentinel
///
/// For each connection the sentinels are asked in turn for the master. While connected, the backend asks the sentinel
/// that named it four times a second, and disconnects as soon as another master is named: an old master that is still
/// running would grant permits for about ten seconds after that. Name the sentinels in the same order in all processes,
/// so that all of them switch to the new master together. Grants that the old master had not replicated are lost in a
/// failover; [`AfterLoss`] determines what happens then. An old master that is partitioned from the sentinels together
/// with one of your processes keeps granting to that process until the partition heals; `min-replicas-to-write 1`
/// prevents this.
///
/// # Cluster
///
/// A semaphore lives in the slot of its name. Each master has its own connection and state, so a master that is down
/// affects only its own semaphores, provided that the cluster has `cluster-require-full-coverage no`. With `yes`,
/// Redis' default, all nodes stop serving until it is replaced. When a slot moves or a replica is promoted, the backend
/// follows. Hints travel over the cluster bus to all nodes. A process that died while waiting is passed over when its
/// lease ends and not at once, because a cluster cannot tell that the process is gone.
pub struct RedisBackend {
    servers: Servers,
    keys: Keys,
    timeouts: Timeouts,
    after_loss: AfterLoss,
    /// The calling process and its mailbox; see [`Backend::attach`].
    caller: Arc<OnceLock<Caller>>,
}

/// The servers to connect to.
enum Servers {
    One(Box<Endpoint>),
    Sentinel(Arc<Sentinel>),
    Cluster(Arc<Cluster>),
    /// The user's pool opens the connections.
    #[cfg(feature = "deadpool-redis")]
    Pool(Pool),
}

type Caller = (NodeId, Weak<dyn Mailbox>);

impl RedisBackend {
    /// The default [connect timeout](RedisBackendBuilder::connect_timeout): 500 ms.
    pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
    /// The default [response timeout](RedisBackendBuilder::response_timeout): 500 ms.
    pub const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

    /// Returns a builder for the servers of a URL:
    ///
    /// | servers | URL |
    /// |---|---|
    /// | one server | `redis://[user:password@]host[:port][/db]` |
    /// | over TLS (feature `tls`) | `rediss://...`; also `rediss-sentinel://`, `rediss-cluster://` |
    /// | on a Unix socket | `redis+unix:///path[?db=...&user=...&pass=...]` or `unix://` |
    /// | watched by Sentinel | `redis-sentinel://[user:password@]host[:port][,host[:port]...]/master[/db]` |
    /// | a cluster | `redis-cluster://[user:password@]host[:port][,host[:port]...]` |
    ///
    /// The hosts are those of the sentinels (default port 26379), or some nodes of the cluster (6379). User and
    /// password are those of the servers; percent-encode `/ ? # , @ %` in them. Set
    /// `?sentinel_username=...&sentinel_password=...` for sentinels with their own password. Connections to sentinels
    /// use TLS if those to the servers do, unless `?sentinel_tls=true` or `false` is set.
    ///
    /// `valkey://` and `valkeys://` are equivalent to `redis://` and `rediss://`. TLS trusts the system's certificate
    /// authorities; [`tls`](RedisBackendBuilder::tls) and [`sentinel_tls`](RedisBackendBuilder::sentinel_tls) set
    /// other ones, and a client certificate.
    ///
    /// Errors of building and `Debug` output show no part of the URL, except numbers of up to five digits where a port or
    /// a database is expected. Errors of opening a connection name the server as `host:port`. Neither shows the user or
    /// the password.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Semaphore;
    /// use tower_semaphore::backend::RedisBackend;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let backend = RedisBackend::builder("redis://app:secret@redis.internal/")
    ///     .prefix("shop")
    ///     .response_timeout(Duration::from_millis(250))
    ///     .build()?;
    /// let semaphore = Semaphore::new(backend);
    /// # let _ = semaphore; Ok(()) }
    /// ```
    pub fn builder(url: impl Into<String>) -> RedisBackendBuilder {
        RedisBackendBuilder::new(Source::Url(url.into()))
    }

    /// Returns a builder that takes its connections to one server from your pool, with the settings of the pool. A
    /// connection that was taken is never returned.
    ///
    /// This has drawbacks that [`builder`](Self::builder) does not have. The pool checks an idle connection before it
    /// hands it out (`+unwatch +ping`). A connection from a pool cannot receive hints, so waiting requests poll every
    /// 100 ms, and each can be overtaken once by a request of another process. A closed connection is noticed only by
    /// the next call. `TCP_NODELAY` is off unless you enable it for the pool.
    ///
    /// The pool is one of [`deadpool_redis`](crate::backend::deadpool_redis) 0.23. The feature `tls` of this crate does
    /// not apply to pools: enable that of `deadpool-redis` instead.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::backend::RedisBackend;
    /// use tower_semaphore::backend::deadpool_redis::{Config, Runtime};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = Config::from_url("redis://redis.internal/").create_pool(Some(Runtime::Tokio1))?;
    /// let backend = RedisBackend::from_pool(pool).build()?;
    /// # let _ = backend; Ok(()) }
    /// ```
    #[cfg(feature = "deadpool-redis")]
    #[cfg_attr(nightly_docs, doc(cfg(feature = "deadpool-redis")))]
    pub fn from_pool(pool: Pool) -> RedisBackendBuilder {
        RedisBackendBuilder::new(Source::Pool(pool))
    }
}

impl Backend for RedisBackend {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        let _ = self.caller.set((node, mailbox));
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.keys.semaphore(name)
    }

    fn shard(&self, key: &str) -> Shard {
        match &self.servers {
            Servers::Cluster(cluster) => cluster.master(key),
            _ => Shard::default(),
        }
    }

    fn shards(&self) -> Vec<Shard> {
        match &self.servers {
            Servers::Cluster(cluster) => cluster.masters(),
            _ => vec![Shard::default()],
        }
    }

    fn routing(&self) -> Option<u64> {
        match &self.servers {
            Servers::Cluster(cluster) => Some(cluster.version()),
            _ => Some(0),
        }
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        let opened = self.open_to(shard);
        opened.map(|opened| Ok(opened?.map(|connection| Arc::new(connection) as _))).boxed()
    }

    fn quarantine(&self) -> Option<Duration> {
        self.after_loss.quarantine()
    }

    fn response_timeout(&self) -> Duration {
        self.timeouts.answer
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("keys", &self.keys).finish_non_exhaustive()
    }
}

/// The decoders, for the fuzz targets.
#[cfg(fuzzing)]
pub(crate) mod fuzz {
    /// Decodes a reply to a call.
    pub fn reply(op: u8, places: usize, wire: &[u8]) {
        let _ = super::calls::decode_wire(op, places, wire);
    }

    /// Decodes a message to a node.
    pub fn hints(message: &[u8]) {
        if let Some((_, hints)) = super::messages::hints(message) {
            hints.for_each(drop);
        }
    }
}
