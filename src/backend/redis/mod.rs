//! Permits counted in Redis.

mod info;
mod keys;
mod lane;
mod scripts;

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use deadpool_redis::redis::io::tcp::TcpSettings;
use deadpool_redis::redis::{
    AsyncConnectionConfig, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, PushInfo, PushKind,
    RedisError, ServerErrorKind, Value, cmd,
};
use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime, Timeouts};

use tokio::sync::watch;

use self::keys::Keys;
use self::lane::RedisLane;
use super::{Answer, Backend, Call, Lane, Mailbox, Op, Shard};
use crate::error::{BackendError, ConfigError};
use crate::ledger::{Ids, NodeId, PlaceId};

/// The backend for a fleet: each semaphore is one sorted set in Redis.
///
/// Redis 6.2 or later, or Valkey. Uses one connection, from a [`deadpool_redis::Pool`] of its own,
/// with `TCP_NODELAY` and RESP3; hints arrive on it too. Every call is bounded in time.
///
/// A user with an ACL needs, with the default prefix, `~semaphore:* &semaphore:*` and
/// `+evalsha +eval +script|load +subscribe +publish +time +zadd +zrem +zcard +zcount +zmscore +zrange
/// +zrevrange +zrangebyscore +pttl +pexpire +hello`; and `+info`, to see a restart and an eviction
/// policy that loses semaphores.
pub struct RedisBackend {
    pool: Pool,
    keys: Keys,
    response_timeout: Duration,
    after_loss: AfterLoss,
    /// How often a connection was closed.
    closings: watch::Receiver<u64>,
    /// Who calls, and who is told: see [`Backend::attach`].
    caller: Arc<OnceLock<Caller>>,
}

type Caller = (NodeId, Weak<dyn Mailbox>);

/// What happens after Redis may have lost data: it was restarted, or another server answers.
///
/// What is in flight is counted again in any case, as soon as its process has noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    url: String,
    prefix: String,
    connect_timeout: Duration,
    response_timeout: Duration,
    after_loss: AfterLoss,
}

impl RedisBackend {
    /// How long opening a connection may take, unless said otherwise: 500 ms.
    pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
    /// How long an answer may take, unless said otherwise: 500 ms.
    pub const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

    /// For a URL: `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS (feature `tls`),
    /// `redis+unix:///path` for a socket.
    pub fn builder(url: impl Into<String>) -> RedisBackendBuilder {
        RedisBackendBuilder {
            url: url.into(),
            prefix: "semaphore".to_owned(),
            connect_timeout: Self::DEFAULT_CONNECT_TIMEOUT,
            response_timeout: Self::DEFAULT_RESPONSE_TIMEOUT,
            after_loss: AfterLoss::default(),
        }
    }
}

impl RedisBackendBuilder {
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

    /// How long an answer may take before the connection is given up and opened anew. 500 ms unless
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

    /// The backend. Does not connect yet.
    ///
    /// # Errors
    ///
    /// If the URL or the prefix cannot be used, or a timeout is zero.
    pub fn build(self) -> Result<RedisBackend, ConfigError> {
        let keys = Keys::new(&self.prefix)?;
        for (name, timeout) in
            [("connect timeout", self.connect_timeout), ("response timeout", self.response_timeout)]
        {
            if timeout.is_zero() {
                return Err(ConfigError::new(format!("{name}: 0 cannot be used; allowed: more")));
            }
        }
        let info = connection_info(&self.url)?;
        let caller = Arc::new(OnceLock::new());
        let (closed, closings) = watch::channel(0);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            // The desk bounds the answers: it knows what to do about it.
            .set_response_timeout(None)
            .set_pipeline_buffer_size(1024)
            .set_push_sender(deliver(Arc::clone(&caller), keys.clone(), closed));
        let manager = Manager::new_with_config(info, config).map_err(|error| bad_url(&error))?;
        let pool = Pool::builder(manager)
            .max_size(1)
            .timeouts(Timeouts {
                wait: Some(self.connect_timeout),
                create: Some(self.connect_timeout),
                recycle: Some(self.connect_timeout),
            })
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| ConfigError::new(format!("connection pool: {error}")))?;
        Ok(RedisBackend {
            pool,
            keys,
            response_timeout: self.response_timeout,
            after_loss: self.after_loss,
            closings,
            caller,
        })
    }
}

impl Backend for RedisBackend {
    type Lane = RedisLane;

    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        let _ = self.caller.set((node, mailbox));
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.keys.semaphore(name)
    }

    async fn connect(&self, _: &Shard) -> Result<Option<RedisLane>, BackendError> {
        // Taken out of the pool for its life: going back would cost a round trip each time.
        let connection = self.pool.get().await.map_err(unreachable)?;
        let mut connection = Connection::take(connection);
        let opened = async {
            let server = info::ask(&mut connection).await?;
            let closed_before = *self.closings.borrow();
            let closings = self.closings.clone();
            let mut lane = RedisLane { connection, server, closings, closed_before };
            // Who may not load scripts sends them whole, once.
            let scripts = scripts::load();
            let count = scripts.len();
            lane.connection.send_packed_commands(&scripts, 0, count).await.map_err(lane::broken)?;
            if let Some((node, _)) = self.caller.get() {
                self.probe(&mut lane, *node).await?;
                match lane.connection.subscribe(self.keys.mailbox(*node)).await {
                    Ok(()) => lane.server.deaf = false,
                    Err(error) if is_forbidden(&error) => {
                        tracing::debug!(target: "tower_semaphore", %error, "may not subscribe");
                    }
                    Err(error) => return Err(lane::broken(error)),
                }
            }
            Ok(Some(lane))
        };
        tokio::time::timeout(self.response_timeout, opened)
            .await
            .map_err(|_| BackendError::connection("Redis gave no answer in time"))?
    }

    fn quarantines(&self) -> bool {
        self.after_loss == AfterLoss::Quarantine
    }

    fn response_timeout(&self) -> Duration {
        self.response_timeout
    }
}

impl RedisBackend {
    /// Whether this server can be used: it is not a replica, is not loading, knows the newest command
    /// that the scripts use, and lets this user call them. Leaves nothing.
    async fn probe(&self, lane: &mut RedisLane, node: NodeId) -> Result<(), BackendError> {
        let ids = Ids::from_elem(PlaceId { node, deaf: true, n: 0 }, 1);
        let acquire =
            Op::Acquire { leaving: ids.clone(), lease_ms: 1, max_queue: None, ids: ids.clone() };
        let calls = [acquire, Op::Release { ids }].map(|op| Call {
            // No name is encoded so.
            key: self.keys.semaphore("!probe"),
            node,
            limit: 0,
            op,
        });
        for answer in lane.send(Arc::from(calls)).await? {
            if let Answer::Failed(error) = answer {
                return Err(BackendError::connection(error.to_string()).with_source(error));
            }
        }
        // Goes to nobody: there is no such node.
        let channel = self.keys.mailbox(NodeId::new(0));
        let published = cmd("PUBLISH").arg(channel).arg("").to_owned();
        if let Err(error) = published.query_async::<()>(&mut lane.connection).await {
            if !is_forbidden(&error) {
                return Err(lane::broken(error));
            }
            let advice = lane::advice(&error);
            lane.server.warning.get_or_insert_with(|| {
                format!("hints cannot be sent, so whoever waits elsewhere polls: {error}{advice}")
            });
        }
        Ok(())
    }
}

/// Runs on the connection's own task: passes hints on at once, and must not wait.
fn deliver(
    caller: Arc<OnceLock<Caller>>,
    keys: Keys,
    closed: watch::Sender<u64>,
) -> impl Fn(PushInfo) -> Result<(), ()> + Send + Sync + 'static {
    move |push| {
        if push.kind == PushKind::Disconnection {
            closed.send_modify(|count| *count += 1);
        }
        let PushInfo { kind: PushKind::Message, data } = push else { return Ok(()) };
        let [_, Value::BulkString(message)] = data.as_slice() else { return Ok(()) };
        let mailbox = caller.get().and_then(|(_, mailbox)| mailbox.upgrade()).ok_or(())?;
        if let Some((key, hints)) = scripts::hints(message)
            && let Some(name) = keys.name(key)
        {
            hints.for_each(|(n, lease_end)| mailbox.hint(name, n, lease_end));
        }
        Ok(())
    }
}

fn connection_info(url: &str) -> Result<ConnectionInfo, ConfigError> {
    // rustls must be told once in a process who does the cryptography; what the user chose counts.
    #[cfg(feature = "tls")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    let info = url.into_connection_info().map_err(|error| bad_url(&error))?;
    let settings = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        // A call that an ACL need not allow for, and nobody here asks for what it tells.
        .set_skip_set_lib_name();
    let tcp = TcpSettings::default().set_nodelay(true);
    Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
}

// Never shows the URL: it may hold a password.
fn bad_url(error: &RedisError) -> ConfigError {
    ConfigError::new(format!(
        "Redis URL: cannot be used ({}); allowed: redis://[user:password@]host[:port][/db], \
         rediss://... with the feature `tls`, redis+unix:///path",
        error.category()
    ))
}

fn is_forbidden(error: &RedisError) -> bool {
    error.kind() == deadpool_redis::redis::ErrorKind::Server(ServerErrorKind::NoPerm)
}

fn unreachable(error: PoolError) -> BackendError {
    let text = match &error {
        PoolError::Timeout(_) => {
            "Redis could not be reached in time; is it there, and does it speak TLS on this port if \
             and only if the URL says rediss?"
                .to_owned()
        }
        PoolError::Backend(error) => {
            format!("Redis could not be reached: {error}{}", lane::advice(error))
        }
        error => format!("Redis could not be reached: {error}"),
    };
    BackendError::connection(text).with_source(error)
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
        let _ = super::scripts::decode_wire(op, places, wire);
    }

    /// What Redis sends to a node.
    pub fn hints(message: &[u8]) {
        if let Some((_, hints)) = super::scripts::hints(message) {
            hints.for_each(drop);
        }
    }
}
