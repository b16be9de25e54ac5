//! A server in this process, reached over connections that can break.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, ready};
use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{
    AddressedCall, AfterLoss, Answer, Answers, Backend, Change, Connection, Embedded, Listing,
    Mailbox, MemoryBackend, Names, Overrides, PeerMessage, Queries, Query, QueryError, ServerInfo,
    Shard,
};
use crate::error::BackendError;
use crate::protocol::{BoundRate, NodeId, PlaceId, Time};

/// A stand-in for Redis in tests: it counts permits in this process, as [`MemoryBackend`] does, but is reached over
/// connections, which a test can break.
///
/// Everything above the connection runs as with Redis: the outage policy, reconnects, renewals, the log and
/// [`health`](crate::Semaphore::health). Calls take no time, so with Tokio's clock paused, a test of an outage of
/// minutes takes milliseconds. `docs/testing.md` has tests to start from.
///
/// Clones are the same server: each [`Semaphore`](crate::Semaphore) on a clone is a process of the fleet.
///
/// # Examples
///
/// ```
/// use tower_semaphore::backend::MemoryServer;
/// use tower_semaphore::{AcquireError, OnUnavailable, Policy, Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server = MemoryServer::new();
/// let semaphore = Semaphore::new(server.clone());
/// let refuse = Policy::new(10);
/// let admit = Policy::builder(10).on_unavailable(OnUnavailable::Admit).build()?;
///
/// server.set_available(false);
/// let refused = semaphore.acquire("openai", &refuse).await;
/// assert!(matches!(refused, Err(AcquireError::Unavailable(_))));
/// let _permit = semaphore.acquire("openai", &admit).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct MemoryServer {
    memory: MemoryBackend,
    state: Arc<watch::Sender<State>>,
    after_loss: AfterLoss,
}

#[derive(Clone, Copy, Debug)]
struct State {
    is_available: bool,
    /// The number of outages. A connection that was opened before the last one is dead.
    outages: u64,
    /// The number of losses of data, and when the present data began.
    losses: u64,
    since: Instant,
}

/// A connection to a [`MemoryServer`].
struct MemoryConnection {
    memory: MemoryBackend,
    state: watch::Receiver<State>,
    outages: u64,
    info: ServerInfo,
}

impl MemoryServer {
    /// Creates a server that is available and holds nothing.
    #[must_use]
    pub fn new() -> Self {
        let state = State { is_available: true, outages: 0, losses: 0, since: Instant::now() };
        Self {
            memory: MemoryBackend::new(),
            state: Arc::new(watch::Sender::new(state)),
            after_loss: AfterLoss::default(),
        }
    }

    /// Sets what the processes do after a loss of data, as
    #[cfg_attr(
        feature = "redis",
        doc = "[`RedisBackendBuilder::after_loss`](super::RedisBackendBuilder::after_loss)"
    )]
    #[cfg_attr(not(feature = "redis"), doc = "`RedisBackendBuilder::after_loss`")]
    /// does.
    ///
    /// Applies to this clone, those made from it, and the semaphores on them. With [`AfterLoss::Quarantine`] nothing is
    /// granted until the server is one lease old.
    #[must_use]
    pub const fn after_loss(mut self, after_loss: AfterLoss) -> Self {
        self.after_loss = after_loss;
        self
    }

    /// Makes the server unavailable, like a Redis that was killed, or available again.
    ///
    /// With `false`, all connections break, and none can be opened until this is called with `true`; the data is kept.
    /// Processes notice the outage when their tasks next run, and the return of the server within a quarter of a
    /// second.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_semaphore::backend::MemoryServer;
    /// # let server = MemoryServer::new();
    /// server.set_available(false);
    /// // ... requests are answered by their outage policy ...
    /// server.set_available(true);
    /// ```
    pub fn set_available(&self, available: bool) {
        self.state.send_if_modified(|state| {
            let changes = state.is_available != available;
            state.outages += u64::from(changes && !available);
            state.is_available = available;
            changes
        });
    }

    /// Loses all data: places, queues and overrides.
    ///
    /// While the server is available, this is a `FLUSHALL`: no connection breaks, and each process notices it when it
    /// renews its leases. During an outage it is a restart without data.
    pub fn forget_all(&self) {
        self.memory.forget_all();
        self.state.send_modify(|state| {
            state.losses += 1;
            state.since = Instant::now();
        });
    }

    /// Returns the number of semaphores with a waiting or held place.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether no semaphore has a place.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }
}

impl Default for MemoryServer {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for MemoryServer {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.memory.attach(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.memory.key(name)
    }

    fn connect<'a>(
        &'a self,
        _: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        let receiver = self.state.subscribe();
        let state = *receiver.borrow();
        if !state.is_available {
            return ready(Err(unavailable())).boxed();
        }
        let info = ServerInfo {
            // As with a `FLUSHALL`, connections that are open do not notice a change.
            data: Some(format!("{}", state.losses)),
            age: Some(state.since.elapsed()),
            ..ServerInfo::default()
        };
        let memory = self.memory.clone();
        let opened = MemoryConnection { memory, state: receiver, outages: state.outages, info };
        ready(Ok(Some(Arc::new(opened) as _))).boxed()
    }

    fn quarantine(&self) -> Option<Duration> {
        self.after_loss.quarantine()
    }

    fn suspended(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }
}

impl MemoryConnection {
    fn is_open(&self) -> bool {
        self.state.borrow().outages == self.outages
    }

    /// Sends a query, if the connection is open.
    fn ask<T: Send + 'static>(&self, ask: impl FnOnce(&MemoryBackend) -> Query<T>) -> Query<T> {
        if self.is_open() {
            ask(&self.memory)
        } else {
            ready(Err(QueryError::Failed(unavailable()))).boxed()
        }
    }
}

impl Connection for MemoryConnection {
    fn server(&self) -> &ServerInfo {
        &self.info
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        let mut state = self.state.clone();
        async move {
            // An error means that the last clone of the server is gone, so nothing can break this connection any more.
            if state.wait_for(|state| state.outages != self.outages).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        .boxed()
    }

    fn send(&self, calls: Arc<[AddressedCall]>) -> Answers {
        let (is_open, memory) = (self.is_open(), self.memory.clone());
        async move {
            if !is_open {
                return Err(unavailable());
            }
            let answer = |AddressedCall { key, node, call }: &AddressedCall| {
                let counter = memory.counter(key, Instant::now());
                Answer::from(counter.call(*node, call, Time::ZERO))
            };
            Ok(calls.iter().map(answer).enumerate().collect())
        }
        .into_stream()
        .boxed()
    }
}

impl Queries for MemoryConnection {
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing> {
        self.ask(|memory| memory.inspect(key, most, rate))
    }

    fn list(&self, key: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        self.ask(|memory| memory.list(key, from, most))
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        self.ask(|memory| memory.overrides(key, known))
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.ask(|memory| memory.set_override(key, name, change))
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.ask(|memory| memory.revoke(key, id, take))
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.ask(|memory| memory.send_message(key, to, message))
    }
}

fn unavailable() -> BackendError {
    BackendError::connection("the server was made unavailable with `set_available(false)`")
}
