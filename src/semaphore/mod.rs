//! Semaphores and permits, without HTTP.

mod acquire;
mod instrument;
#[cfg(all(test, shuttle))]
mod locks;
mod operate;
mod permit;
mod place_handle;
#[cfg(all(test, not(shuttle)))]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::acquire::Acquire;
pub(crate) use self::acquire::AcquireRequest;
pub use self::operate::{
    AdaptedLimit, BudgetUse, Cursor, FurtherLimitUse, Holder, Inspection, Listed, Page, Paused,
    PlaceId, ProcessUse, RateUse, TenantId, TenantUse, Waiter,
};
pub use self::permit::Permit;
use crate::ask::Ask;
#[cfg(feature = "etcd")]
use crate::backend::EtcdBackend;
#[cfg(feature = "redis")]
use crate::backend::RedisBackend;
use crate::backend::{Backend, MemoryBackend};
#[cfg(doc)]
use crate::error::AcquireError;
use crate::error::BackendError;
#[cfg(any(feature = "etcd", feature = "redis"))]
use crate::error::ConfigError;
use crate::node::Node;
pub use crate::node::health::{ConnectionState, Health};
pub(crate) use crate::node::sessions::Remembered;
#[cfg(doc)]
use crate::policy::PolicyBuilder;
use crate::policy::{Limit, Policy};
use crate::tasks::Tasks;
pub(crate) use crate::tasks::rounds::Visited;
pub(crate) use crate::tasks::visitor::Visitor;
use crate::tenants::TenantNumbers;

/// How long a shutdown waits for the last releases.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Permits by name, counted together by all processes that use the same backend.
///
/// One is enough for a process: clones are cheap and share everything, and it serves any number of names. Each name is
/// a semaphore of its own, which exists as long as a permit of it is held or waited for.
///
/// # Fairness
///
/// Permits are granted first come, first served, over all processes: in the order in which requests reached the
/// backend. While a request waits, a newcomer queues behind it, or is rejected if it may not wait. A freed permit goes
/// to the head of the queue in the same step. With [`PolicyBuilder::reuse`], requests of another process can go first
/// for at most 50 ms.
///
/// If tenants share a semaphore, an [`Ask`] names the tenant. A freed permit then goes to the tenant with the fewest
/// permits in use by weight; see [`Ask::by`].
///
/// # Leases
///
/// Each request that waits or holds a permit has a lease, which background tasks of this process renew. If the
/// process dies, its permits are freed when their leases end. See [`Permit::lost`] for what happens when a lease
/// cannot be renewed.
///
/// # Runtimes
///
/// Make requests inside a Tokio runtime with its timer enabled (and its I/O, for Redis). The background tasks run in
/// the runtime of the first request. When that runtime is shut down, another one takes over, in which requests are made
/// or a [loss](Permit::lost) is awaited. A current-thread runtime does nothing while it is not driven: if the
/// background tasks run in one, no lease is renewed meanwhile, and no request of another runtime is answered. So make
/// the first request in a runtime that is always driven.
///
/// A process gets its identity at the first use of its semaphore. A semaphore that was built, but not used, before a
/// fork can be used in each child. One that was used before fails in the runtime of a child with
/// [`Unavailable`](crate::AcquireError::Unavailable), because the child would take the parent's permits for its own. A
/// child that goes on in the runtime of its parent, which Tokio does not support, is not noticed. A snapshot of a whole
/// process or machine copies the identity unnoticed: use the semaphore only after such a snapshot is restored.
///
/// If the last runtime is shut down before the semaphore is, a warning is logged, and permits that are still held end
/// with their leases. Call [`shutdown`](Self::shutdown) first.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore::{Policy, Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let semaphore = Semaphore::in_memory();
/// let policy = Policy::builder(2).wait_timeout(Duration::from_secs(1)).build()?;
///
/// let permit = semaphore.acquire("openai", &policy).await?;
/// // ... one of two requests in flight ...
/// drop(permit);
///
/// semaphore.shutdown().await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Semaphore {
    inner: Arc<Inner>,
    tenants: TenantNumbers,
}

/// Closes the node with the last clone of the semaphore. Permits own the tasks, but not this.
struct Inner {
    tasks: Arc<Tasks>,
}

impl Semaphore {
    /// Creates a semaphore whose permits are counted in this process.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("jobs", &Policy::new(1)).await?;
    /// assert_eq!(permit.name(), "jobs");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn in_memory() -> Self {
        Self::new(MemoryBackend::new())
    }

    /// Creates a semaphore whose permits are counted in Redis, for all processes that use the same Redis.
    ///
    /// Takes any URL of [`RedisBackend::builder`], with its defaults: one server, a Unix socket, Sentinel or a cluster.
    /// Does not connect yet: the first use does, and the connection is reopened whenever it breaks.
    ///
    /// # Errors
    ///
    /// If the URL cannot be used.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::redis("redis://redis.internal/")?;
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    /// # drop(permit); Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    pub fn redis(url: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(RedisBackend::builder(url).build()?))
    }

    /// Creates a semaphore whose permits are counted in etcd, for all processes that use the same cluster and prefix.
    ///
    /// Takes any URL of [`EtcdBackend::builder`], with its defaults. Does not connect yet: the first use does, and the
    /// connection is reopened whenever it breaks.
    ///
    /// # Errors
    ///
    /// If the URL cannot be used.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::etcd("etcd://a.internal,b.internal,c.internal")?;
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    /// # drop(permit); Ok(()) }
    /// ```
    #[cfg(feature = "etcd")]
    pub fn etcd(url: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(EtcdBackend::builder(url).build()?))
    }

    /// Creates a semaphore whose permits are counted by `backend`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    /// use tower_semaphore::backend::MemoryBackend;
    ///
    /// // Two semaphores over one backend, as two processes over one Redis.
    /// let backend = MemoryBackend::new();
    /// let (one, other) = (Semaphore::new(backend.clone()), Semaphore::new(backend));
    /// # let _ = (one, other);
    /// ```
    #[must_use]
    pub fn new(backend: impl Backend) -> Self {
        let node = Node::new(Arc::new(backend));
        let inner = Inner { tasks: Tasks::new(node) };
        Self { inner: Arc::new(inner), tenants: TenantNumbers::salted(b"") }
    }

    /// Sets a salt for the names of tenants, which must be the same in the whole fleet.
    ///
    /// The backend knows a tenant by a hash of its name, a number of 24 bits. Two tenants with the same number share
    /// their turns and their cap. The probability of such a pair is 1.5 % among 1,000 tenants, and 78 % among 10,000.
    /// Each process that sees both logs it at debug level; another salt separates them. If clients choose their own
    /// names, a secret salt keeps them from choosing one that collides with another's.
    ///
    /// Call this before anything else: clones and layers keep the salt that was set when they were created.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    ///
    /// let semaphore = Semaphore::in_memory().tenant_salt("read from the fleet's secrets");
    /// # let _ = semaphore;
    /// ```
    #[must_use]
    pub fn tenant_salt(mut self, salt: impl AsRef<[u8]>) -> Self {
        self.tenants = TenantNumbers::salted(salt.as_ref());
        self
    }

    fn node(&self) -> &Arc<Node> {
        self.inner.tasks.node()
    }

    /// Returns the node, after starting the tasks that queries need.
    fn running_node(&self) -> Result<&Node, BackendError> {
        let node = self.node();
        if node.embedded().is_none() {
            // Each query would open a connection for itself alone.
            if node.is_closed() {
                return Err(BackendError::call("the semaphore was shut down"));
            }
            self.inner.tasks.ensure_running()?;
        }
        Ok(node)
    }

    /// Waits for a permit of the semaphore of this name, up to the wait timeout of the policy. An [`Ask`] can also name
    /// a tenant and a number of permits.
    ///
    /// The request joins the queue when this is called, not when the future is first polled. The future is `Unpin`.
    /// With a wait timeout of zero this is [`try_acquire`](Self::try_acquire).
    ///
    /// # Errors
    ///
    /// [`Rejected`](AcquireError::Rejected) if no permit was freed in time, or the queue is full;
    /// [`Unavailable`](AcquireError::Unavailable) if the backend gave no answer within a second;
    /// [`Closed`](AcquireError::Closed) after a [`shutdown`](Self::shutdown), or for a request that would have to
    /// wait after [`stop_waiting`](Self::stop_waiting).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue, and its turn is lost; a permit that was already granted
    /// is released. See [`Acquire`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{AcquireError, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let policy = Policy::builder(1).wait_timeout(Duration::from_millis(50)).build()?;
    ///
    /// let first = semaphore.acquire("api", &policy).await?;
    /// let second = semaphore.acquire("api", &policy).await;
    /// assert!(matches!(second, Err(AcquireError::Rejected(_))));
    ///
    /// drop(first);
    /// let third = semaphore.acquire("api", &policy).await?;
    /// # drop(third); Ok(()) }
    /// ```
    pub fn acquire(&self, ask: impl Into<Ask>, policy: &Policy) -> Acquire {
        let meter = self.node().meters.of(policy.name, policy.wait_timeout);
        let ask = ask.into();
        self.acquire_for(AcquireRequest {
            name: ask.name(),
            ask: Some(&ask),
            policy,
            meter,
            is_out_of_time: false,
            answer_timeout: None,
            remembered: None,
        })
    }

    /// Like [`acquire`](Self::acquire), for a request of a layer.
    pub(crate) fn acquire_for(&self, request: AcquireRequest<'_>) -> Acquire {
        Acquire::new(self, request)
    }

    /// Takes a permit if one is free and no request waits for it. Ignores the wait timeout of the policy.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases a permit that was already granted. See [`Acquire`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{AcquireError, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let policy = Policy::new(1);
    ///
    /// let permit = semaphore.try_acquire("api", &policy).await?;
    /// let error = semaphore.try_acquire("api", &policy).await.unwrap_err();
    /// assert!(matches!(error, AcquireError::Rejected(rejected) if rejected.in_use == Some(1)));
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(&self, ask: impl Into<Ask>, policy: &Policy) -> Acquire {
        let policy = Policy { wait_timeout: Duration::ZERO, ..policy.clone() };
        self.acquire(ask, &policy)
    }

    /// Applies limit, headroom and rate of `policy` to the requests for `name` that wait in this process.
    ///
    /// A request is judged by the policy that it was made with. When you reload your settings, this applies the new
    /// ones to the requests that came before. They keep their turn, and those that the new limit admits get their
    /// permit a few round trips later. Permits that are held stay held. Other processes have to reload by themselves;
    /// [`set_limit`](Self::set_limit) changes the limit for all of them at once.
    ///
    /// A policy with a [rate](crate::PolicyBuilder::rate) gives it to all that wait, and one without takes it from them.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_semaphore::AcquireError> {
    /// let semaphore = Semaphore::in_memory();
    /// let one = semaphore.acquire("api", &Policy::new(1)).await?;
    /// let waits = tokio::spawn(semaphore.acquire("api", &Policy::new(1)));
    /// # tokio::task::yield_now().await;
    /// semaphore.update_waiting("api", &Policy::new(2));
    /// let two = waits.await.expect("no panic")?;
    /// # drop((one, two)); Ok(()) }
    /// ```
    pub fn update_waiting(&self, name: impl Into<crate::Name>, policy: &Policy) {
        let node = self.node();
        let Some(shared) = node.sessions.get(name.into().as_str()) else { return };
        let limit = if let Limit::Permits(limit) = policy.limit { limit } else { u32::MAX };
        let (mut state, now) = (shared.lock(), node.now());
        let meter = state.any_meter();
        let shown = state.adapt_within(policy.adaptive, meter, now);
        state.session.handle_policy(limit, policy.headroom, policy.rate, now);
        node.finish(&shared, state, now, None);
        if let Some((meter, limit)) = shown {
            meter.on_adapted(limit, false);
        }
    }

    /// Returns the watchdog's visitor, which visits things from time to time while the background tasks run.
    pub(crate) fn visitor(&self) -> Visitor {
        Visitor::new(&self.inner.tasks)
    }

    /// Returns whether the backend can be asked, and how often policies had to answer in its place.
    ///
    /// Does not ask the backend.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{ConnectionState, Semaphore};
    ///
    /// let semaphore = Semaphore::in_memory();
    /// assert!(matches!(semaphore.health().connection, ConnectionState::Embedded));
    /// ```
    #[must_use]
    pub fn health(&self) -> Health {
        self.node().health()
    }

    /// Answers all waiting requests with [`Closed`](AcquireError::Closed), and from then on every request that would
    /// have to wait. A request that finds a permit free still takes it. Permits in use are not affected.
    ///
    /// Call it when a graceful shutdown begins; otherwise the server waits until every queued request has been
    /// answered. A layer answers these requests with 503 and the reason
    /// [`closed`](crate::limit::RefusalReason::Closed).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{AcquireError, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("api", &Policy::new(1)).await?;
    /// let waits = tokio::spawn(semaphore.acquire("api", &Policy::new(1)));
    /// # tokio::task::yield_now().await;
    ///
    /// // SIGTERM:
    /// semaphore.stop_waiting();
    /// assert!(matches!(waits.await?, Err(AcquireError::Closed)));
    /// assert!(!permit.is_lost());
    ///
    /// // Once the server has ended:
    /// drop(permit);
    /// semaphore.shutdown().await;
    /// # Ok(()) }
    /// ```
    pub fn stop_waiting(&self) {
        self.node().stop_waiting();
    }

    /// Releases everything and ends the background tasks. Waiting requests, and all later ones, are answered with
    /// [`Closed`](AcquireError::Closed); permits that are still held are lost.
    ///
    /// Takes at most about two seconds, if the backend does not answer.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, the tasks still end, but nothing waits for them.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{AcquireError, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("api", &Policy::new(1)).await?;
    ///
    /// semaphore.shutdown().await;
    /// assert!(permit.is_lost());
    /// assert!(matches!(semaphore.acquire("api", &Policy::new(1)).await, Err(AcquireError::Closed)));
    /// # Ok(()) }
    /// ```
    pub async fn shutdown(&self) {
        let node = self.node();
        node.close();
        node.give_back();
        self.inner.tasks.rounds.end();
        self.inner.tasks.join(SHUTDOWN_TIMEOUT).await;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tasks.node().close();
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore").field("node", self.node()).finish_non_exhaustive()
    }
}
