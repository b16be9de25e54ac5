//! Permits counted in Redis.

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
mod queries;
mod scripts;
mod sentinel;
mod slots;
#[cfg_attr(not(feature = "tls"), path = "tls_disabled.rs")]
mod tls;
mod url;
mod values;

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use deadpool_redis::Pool;
use deadpool_redis::redis::{
    AsyncConnectionConfig, PushInfo, PushKind, RedisError, ServerErrorKind, Value, cmd,
};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use self::cluster::Cluster;
use self::connection::{Member, Named, RedisConnection};
use self::dial::{Patience, dial};
use self::endpoint::Endpoint;
use self::keys::Keys;
use self::multiplexed::Multiplexed;
use self::sentinel::Sentinel;
use self::tls::Tls;
#[cfg(feature = "tls")]
pub use self::tls::TlsSettings;
use self::url::Url;
use super::{AddressedCall, Answer, Backend, Connection, Mailbox, OVERRIDES, Shard};
use crate::error::{BackendError, ConfigError};
use crate::name::Name;
use crate::protocol::call::Op;
use crate::protocol::id::{Ids, NodeId, PlaceId};

/// The backend for a fleet: each semaphore is one sorted set in Redis.
///
/// Redis 6.2 or later, or Valkey: one server, one that Sentinel watches over, or a cluster; see
/// [`builder`](Self::builder) for the URLs. Uses one connection to each server that it needs, made by
/// [`deadpool_redis`], with `TCP_NODELAY` and RESP3; hints arrive on it too. Every call is bounded in
/// time, and none is repeated behind anyone's back.
///
/// # Users
///
/// A user with an ACL needs, with the default prefix, `~semaphore:* &semaphore:*` and
/// `+evalsha +eval +script|load +subscribe +publish +time +zadd +zrem +zcard +zcount +zmscore +zrange
/// +zrevrange +zrangebyscore +pttl +pexpire +hello`; `+hget +hgetall`, to go by what operators set, and
/// `+hset +hdel +persist` to set it; `+scan`, to list semaphores; and `+info`, to see a restart and an eviction
/// policy that loses semaphores.
///
/// In a cluster it needs `+cluster|slots +asking` too, and all of that on each node, replicas among
/// them. A sentinel's own user needs `+sentinel|get-master-addr-by-name`.
///
/// # Sentinel
///
/// Sentinels are asked in turn for the master, again for each connection, and the one that named it four
/// times a second after that: an old master that lives goes on granting for some ten seconds after a
/// new one was named, and is left at once. Name the sentinels in the same order in all processes, so
/// that all go to the new master together. What the old one granted
/// and had not sent to its replica is lost in a failover: [`AfterLoss`] says what happens then. An
/// old master that is cut off from the sentinels, together with a process of yours, goes on granting
/// to that one until the network is whole again; `min-replicas-to-write 1` keeps it from that.
///
/// # Cluster
///
/// Each semaphore is in the slot of its name. Each master has a connection of its own, and its own
/// state: one that is away harms only its own semaphores, if the cluster has
/// `cluster-require-full-coverage no`; with `yes`, which is Redis' default, all nodes stop until it is
/// replaced. When a slot moves, or a replica is promoted, what is in it is asked for there. Hints go
/// by the cluster's own bus to all of its nodes. A process that died while it waited is passed over
/// when its lease ends, not at once, because in a cluster nobody can tell that it is gone.
pub struct RedisBackend {
    servers: Servers,
    keys: Keys,
    patience: Patience,
    after_loss: AfterLoss,
    /// Who calls, and who is told: see [`Backend::attach`].
    caller: Arc<OnceLock<Caller>>,
}

/// Where connections lead.
enum Servers {
    One(Box<Endpoint>),
    Sentinel(Arc<Sentinel>),
    Cluster(Arc<Cluster>),
    /// Connections are made elsewhere.
    Pool(Pool),
}

type Caller = (NodeId, Weak<dyn Mailbox>);

/// What happens after Redis may have lost data: it was restarted, or another server answers.
///
/// What is in flight is counted again in any case, as soon as its process has noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AfterLoss {
    /// Permits are granted at once. Until all processes have renewed what they hold, within a third
    /// of a lease, there can be up to twice as many in flight as may.
    #[default]
    Continue,
    /// Nothing is granted for one lease; requests wait meanwhile, or are refused if they may not.
    /// So the cap holds through the loss.
    Quarantine,
}

/// Builds a [`RedisBackend`].
#[derive(Clone)]
#[must_use]
pub struct RedisBackendBuilder {
    to: To,
    prefix: String,
    connect_timeout: Duration,
    response_timeout: Duration,
    after_loss: AfterLoss,
    #[cfg(feature = "tls")]
    tls: Option<TlsSettings>,
    #[cfg(feature = "tls")]
    sentinel_tls: Option<TlsSettings>,
}

#[derive(Clone)]
enum To {
    Url(String),
    Pool(Pool),
}

impl RedisBackend {
    /// How long opening a connection may take, unless said otherwise: 500 ms.
    pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
    /// How long an answer may take, unless said otherwise: 500 ms.
    pub const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

    /// For a URL:
    ///
    /// | Redis is | URL |
    /// |---|---|
    /// | one server | `redis://[user:password@]host[:port][/db]` |
    /// | with TLS (feature `tls`) | `rediss://...`; also `rediss-sentinel://`, `rediss-cluster://` |
    /// | on a Unix socket | `redis+unix:///path[?db=...&user=...&pass=...]` or `unix://` |
    /// | watched by Sentinel | `redis-sentinel://[user:password@]host[:port][,host[:port]...]/master[/db]` |
    /// | a cluster | `redis-cluster://[user:password@]host[:port][,host[:port]...]` |
    ///
    /// The hosts are those of the sentinels (port 26379 unless named), or some nodes of the cluster
    /// (6379); user and password are those of the servers, percent-encoded where they have one of
    /// `/ ? # , @ %`. Sentinels that ask for their own get them from
    /// `?sentinel_username=...&sentinel_password=...`. They are spoken to over TLS if the servers are, or as
    /// `?sentinel_tls=true` or `false` says.
    ///
    /// `valkey://` and `valkeys://` are the same as `redis://` and `rediss://`. Over TLS the system's
    /// certificate authorities are trusted; [`tls`](RedisBackendBuilder::tls) and
    /// [`sentinel_tls`](RedisBackendBuilder::sentinel_tls) set others, and a client certificate.
    ///
    /// No error of the URL and no `Debug` output shows a piece of the URL, except a number of up to five
    /// digits where a port or a database belongs.
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
        RedisBackendBuilder::new(To::Url(url.into()))
    }

    /// For connections from a pool of yours, with the settings that it has; to one server. One
    /// connection is taken out of it for good, whenever one is opened.
    ///
    /// This has a price. The pool tries a connection that it has kept first (`+unwatch +ping`). Hints
    /// cannot arrive on a connection that was made elsewhere, so waiting requests poll every 100 ms, and
    /// each can be passed over once by another process's request. A closed connection is noticed only
    /// with the next call. TCP_NODELAY is off in such a
    /// pool unless you turn it on. [`builder`](Self::builder) costs none of that.
    ///
    /// The pool is one of [`deadpool_redis`](crate::backend::deadpool_redis) 0.23. The feature `tls` of this
    /// crate does not give TLS to pools: depend on `deadpool-redis` with its own feature for that.
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
    pub fn from_pool(pool: Pool) -> RedisBackendBuilder {
        RedisBackendBuilder::new(To::Pool(pool))
    }
}

impl RedisBackendBuilder {
    fn new(to: To) -> Self {
        Self {
            to,
            prefix: "semaphore".to_owned(),
            connect_timeout: RedisBackend::DEFAULT_CONNECT_TIMEOUT,
            response_timeout: RedisBackend::DEFAULT_RESPONSE_TIMEOUT,
            after_loss: AfterLoss::default(),
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "tls")]
            sentinel_tls: None,
        }
    }

    /// What all keys and channels begin with. `semaphore` unless set; 1 to 40 of
    /// `A-Z a-z 0-9 . _ -`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long opening a connection may take. 500 ms unless set; more than zero.
    pub const fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long an answer may take before the connection is given up and opened again. 500 ms unless
    /// set; more than zero. Should be well below the lease, so that a renewal can be repeated.
    pub const fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// What happens after Redis may have lost data. Grants go on, unless set.
    pub const fn after_loss(mut self, after_loss: AfterLoss) -> Self {
        self.after_loss = after_loss;
        self
    }

    /// Sets which certificate authorities are trusted and which client certificate is presented on
    /// connections to the servers, if the URL begins with `rediss`. The [default](TlsSettings::new) unless
    /// set. Takes a [`rustls::ClientConfig`] as well.
    ///
    /// # Examples
    ///
    /// A private certificate authority:
    ///
    /// ```
    /// use tower_semaphore::backend::{RedisBackend, TlsSettings};
    ///
    /// # fn example(authority: &str) -> Result<(), tower_semaphore::ConfigError> {
    /// let tls = TlsSettings::new().root_certificates(authority);
    /// let backend = RedisBackend::builder("rediss-cluster://a.internal,b.internal").tls(tls).build()?;
    /// # let _ = backend; Ok(()) }
    /// ```
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    pub fn tls(mut self, settings: impl Into<TlsSettings>) -> Self {
        self.tls = Some(settings.into());
        self
    }

    /// Sets the same for connections to sentinels. They use the settings of [`tls`](Self::tls) unless set, with
    /// the client certificate and the server name that are set there.
    ///
    /// # Examples
    ///
    /// Sentinels with a certificate authority of their own, and servers that are announced by address but
    /// have certificates for a name:
    ///
    /// ```
    /// use tower_semaphore::backend::{RedisBackend, TlsSettings};
    ///
    /// # fn example(of_sentinels: &str, of_servers: &str) -> Result<(), tower_semaphore::ConfigError> {
    /// let backend = RedisBackend::builder("rediss-sentinel://a.internal,b.internal/mymaster")
    ///     .tls(TlsSettings::new().root_certificates(of_servers).server_name("redis.internal"))
    ///     .sentinel_tls(TlsSettings::new().root_certificates(of_sentinels))
    ///     .build()?;
    /// # let _ = backend; Ok(()) }
    /// ```
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    pub fn sentinel_tls(mut self, settings: impl Into<TlsSettings>) -> Self {
        self.sentinel_tls = Some(settings.into());
        self
    }

    /// The backend. Does not connect yet. Over TLS the system's certificate authorities are read here, unless
    /// others are set.
    ///
    /// # Errors
    ///
    /// If the URL, the prefix or a certificate cannot be used, if a timeout is zero, or if there are settings
    /// for TLS where the URL says none.
    pub fn build(self) -> Result<RedisBackend, ConfigError> {
        let keys = Keys::new(&self.prefix)?;
        for (name, timeout) in
            [("connect timeout", self.connect_timeout), ("response timeout", self.response_timeout)]
        {
            if timeout.is_zero() {
                return Err(ConfigError::new(format!("{name}: 0 cannot be used; allowed: more")));
            }
        }
        let servers = match &self.to {
            To::Pool(pool) => {
                self.connectors(false, false)?;
                Servers::Pool(pool.clone())
            }
            To::Url(url) => {
                let Url { servers, tls, sentinel_tls } = Url::parse(url)?;
                let (tls, sentinel_tls) = self.connectors(tls, sentinel_tls)?;
                let server = |info| Endpoint::new(info, tls.clone());
                match servers {
                    url::Servers::One(info) => Servers::One(Box::new(server(info))),
                    url::Servers::Sentinel { sentinels, master, server: info } => {
                        let sentinels = sentinels.into_iter();
                        let sentinels =
                            sentinels.map(|info| Endpoint::new(info, sentinel_tls.clone()));
                        let sentinel = Sentinel::new(sentinels.collect(), master, server(info));
                        Servers::Sentinel(Arc::new(sentinel))
                    }
                    url::Servers::Cluster(seeds) => {
                        let seeds = seeds.into_iter().map(server).collect();
                        Servers::Cluster(Arc::new(Cluster::new(seeds)))
                    }
                }
            }
        };
        Ok(RedisBackend {
            servers,
            keys,
            patience: Patience { connect: self.connect_timeout, answer: self.response_timeout },
            after_loss: self.after_loss,
            caller: Arc::default(),
        })
    }

    /// What connections to servers and to sentinels go by.
    #[cfg(feature = "tls")]
    fn connectors(
        &self,
        tls: bool,
        sentinel_tls: bool,
    ) -> Result<(Option<Tls>, Option<Tls>), ConfigError> {
        if self.tls.is_some() && !tls {
            return Err(ConfigError::new(
                "TLS settings: no server is reached over TLS; expected a URL that begins with rediss",
            ));
        }
        if self.sentinel_tls.is_some() && !sentinel_tls {
            return Err(ConfigError::new(
                "TLS settings of sentinels: no sentinel is reached over TLS; expected a URL that begins \
                 with rediss-sentinel, or has sentinel_tls=true",
            ));
        }
        let servers = tls.then(|| self.tls.clone().unwrap_or_default().build("TLS settings"));
        let servers = servers.transpose()?;
        let sentinels = match (&self.sentinel_tls, &servers) {
            _ if !sentinel_tls => None,
            (Some(settings), _) => Some(settings.clone().build("TLS settings of sentinels")?),
            (None, Some(servers)) => Some(servers.clone()),
            (None, None) => Some(TlsSettings::new().build("TLS settings of sentinels")?),
        };
        Ok((servers, sentinels))
    }

    #[cfg(not(feature = "tls"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with the feature")]
    const fn connectors(
        &self,
        _: bool,
        _: bool,
    ) -> Result<(Option<Tls>, Option<Tls>), ConfigError> {
        Ok((None, None))
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

    fn quarantines(&self) -> bool {
        self.after_loss == AfterLoss::Quarantine
    }

    fn response_timeout(&self) -> Duration {
        self.patience.answer
    }
}

impl RedisBackend {
    async fn open_to(&self, shard: &Shard) -> Result<Option<RedisConnection>, BackendError> {
        match &self.servers {
            Servers::One(server) => self.open(server, None).await.map(Some),
            Servers::Pool(pool) => {
                let connection = tokio::time::timeout(self.patience.connect, dial::from(pool));
                let connection = connection.await.map_err(|_| no_answer())??;
                self.prepare(connection, None, None).await.map(Some)
            }
            Servers::Sentinel(sentinel) => {
                let server = sentinel.master(self.patience).await?;
                let mut opened = self.open(&server, None).await;
                match &mut opened {
                    Ok(opened) => {
                        let (by, patience) = (Arc::clone(sentinel), self.patience);
                        opened.named = Some(Named { by, server, patience });
                    }
                    // It may be a master no more, or not be there: another one may know better.
                    Err(_) => sentinel.distrust(),
                }
                opened.map(Some)
            }
            Servers::Cluster(cluster) => {
                let told = cluster.refresh(shard, self.patience).await;
                let Some(server) = cluster.endpoint(shard) else {
                    told?;
                    return if cluster.is_complete() { Ok(None) } else { Err(no_master()) };
                };
                if told.is_ok() && !cluster.has(shard) {
                    return Ok(None);
                }
                let (cluster, node) = (Arc::clone(cluster), shard.clone());
                let member = Member { cluster, node, patience: self.patience };
                self.open(&server, Some(member)).await.map(Some)
            }
        }
    }

    async fn open(
        &self,
        to: &Endpoint,
        member: Option<Member>,
    ) -> Result<RedisConnection, BackendError> {
        let (closed, closings) = watch::channel(false);
        let (caller, keys) = (Arc::clone(&self.caller), self.keys.clone());
        let config = AsyncConnectionConfig::new().set_push_sender(deliver(
            caller,
            keys,
            member.clone(),
            closed,
        ));
        let connection = dial(to, config, self.patience).await?;
        self.prepare(connection, Some(closings), member).await
    }

    /// Makes a connection ready for calls, and tries it. Without `closed` it can get no hints.
    async fn prepare(
        &self,
        mut connection: Multiplexed,
        closed: Option<watch::Receiver<bool>>,
        member: Option<Member>,
    ) -> Result<RedisConnection, BackendError> {
        let opened = async {
            let server = info::ask(&mut connection).await?;
            let mut opened = RedisConnection { connection, server, closed, member, named: None };
            // A user that may not load scripts sends them whole, once.
            let scripts = scripts::load();
            let count = scripts.len();
            opened
                .connection
                .send_packed_commands(&scripts, 0, count)
                .await
                .map_err(error::broken)?;
            let Some((node, _)) = self.caller.get() else { return Ok(opened) };
            self.probe(&mut opened, *node).await?;
            if opened.closed.is_some() {
                let channels = [self.keys.mailbox(*node), self.keys.overrides()];
                match opened.connection.subscribe(&channels).await {
                    Ok(()) => opened.server.poll_only = false,
                    Err(error) if is_forbidden(&error) => {
                        tracing::debug!(target: "tower_semaphore", %error, "may not subscribe");
                    }
                    Err(error) => return Err(error::broken(error)),
                }
            }
            Ok(opened)
        };
        tokio::time::timeout(self.patience.answer, opened).await.map_err(|_| no_answer())?
    }

    /// Whether this server can be used: it is not a replica, is not loading, knows the newest command
    /// that the scripts use, and lets this user call them. Leaves nothing.
    async fn probe(&self, opened: &mut RedisConnection, node: NodeId) -> Result<(), BackendError> {
        let ids = Ids::from_elem(PlaceId { node, poll_only: true, n: 0, claim: None }, 1);
        let acquire =
            Op::Acquire { leaving: ids.clone(), lease_ms: 1, max_queue: None, ids: ids.clone() };
        // No name is encoded so.
        let name = match &opened.member {
            None => "!probe".to_owned(),
            Some(Member { cluster, node, .. }) => {
                let key = |name: &str| self.keys.semaphore(name).to_string();
                let Some(name) = cluster.name_at(node, key) else { return Ok(()) };
                name
            }
        };
        let key = self.keys.semaphore(&name);
        let calls = [acquire, Op::Release { ids }].map(|op| AddressedCall {
            key: Arc::clone(&key),
            node,
            limit: 0,
            headroom: 0,
            op,
        });
        for answer in opened.send(Arc::from(calls)).await? {
            if let Answer::Failed(error) = answer {
                return Err(BackendError::connection(error.to_string()).with_source(error));
            }
        }
        // Goes to nobody: there is no such node.
        let channel = self.keys.mailbox(NodeId::new(0));
        let published = cmd("PUBLISH").arg(channel).arg("").to_owned();
        if let Err(error) = published.query_async::<()>(&mut *opened.connection).await {
            if !is_forbidden(&error) {
                return Err(error::broken(error));
            }
            let advice = error::advice(&error);
            opened.server.warning.get_or_insert_with(|| {
                format!("hints cannot be sent, so waiting requests of other processes poll: {error}{advice}")
            });
        }
        Ok(())
    }
}

/// Runs on the connection's own task: passes hints on at once, and must not wait.
fn deliver(
    caller: Arc<OnceLock<Caller>>,
    keys: Keys,
    member: Option<Member>,
    closed: watch::Sender<bool>,
) -> impl Fn(PushInfo) -> Result<(), ()> + Send + Sync + 'static {
    move |push| {
        if push.kind == PushKind::Disconnection {
            closed.send_replace(true);
        }
        let PushInfo { kind: PushKind::Message, data } = push else { return Ok(()) };
        let [_, Value::BulkString(message)] = data.as_slice() else { return Ok(()) };
        let mailbox = caller.get().and_then(|(_, mailbox)| mailbox.upgrade()).ok_or(())?;
        if let Some((key, hints)) = messages::hints(message)
            && let Some(name) = keys.name(key)
            && (name == OVERRIDES || Name::from_stored(name).is_some())
            // In a cluster each node sends every message on: what counts comes from the master.
            && member.as_ref().is_none_or(|member| member.is_master_of(key))
        {
            if name == OVERRIDES {
                mailbox.overridden();
                return Ok(());
            }
            if let Some(message) = messages::peer_message(message) {
                mailbox.message(name, message);
                return Ok(());
            }
            hints.for_each(|hint| mailbox.hint(name, hint));
        }
        Ok(())
    }
}

fn is_forbidden(error: &RedisError) -> bool {
    error.kind() == deadpool_redis::redis::ErrorKind::Server(ServerErrorKind::NoPerm)
}

fn no_answer() -> BackendError {
    BackendError::connection("Redis gave no answer in time")
}

fn no_master() -> BackendError {
    BackendError::connection("no node of the cluster serves this slot")
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl fmt::Debug for RedisBackendBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackendBuilder").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// For `fuzz/`.
#[cfg(fuzzing)]
pub(crate) mod fuzz {
    /// What Redis answers to a call.
    pub fn reply(op: u8, places: usize, wire: &[u8]) {
        let _ = super::calls::decode_wire(op, places, wire);
    }

    /// What Redis sends to a node.
    pub fn hints(message: &[u8]) {
        if let Some((_, hints)) = super::messages::hints(message) {
            hints.for_each(drop);
        }
    }
}
