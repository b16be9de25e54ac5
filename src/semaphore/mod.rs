//! Permits without HTTP.

mod acquire;
mod ask;
mod clock;
mod driver;
mod exchange;
mod health;
mod inspect;
mod instrument;
#[cfg(all(test, shuttle))]
mod locks;
mod mailbox;
mod node;
mod operate;
mod outbox;
mod overrides;
mod peers;
mod permit;
mod place_handle;
mod policy;
mod refresh;
mod server;
mod servers;
mod sessions;
mod shared_session;
mod tallies;
mod tasks;
mod tenants;
#[cfg(all(test, not(shuttle)))]
mod tests;
mod timers;
mod watchdog;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::acquire::Acquire;
pub use self::ask::Ask;
pub use self::health::{ConnectionState, Health};
pub use self::inspect::{Cursor, Holder, Inspection, Listed, Page, ProcessUse, TenantUse, Waiter};
use self::node::Node;
pub use self::permit::Permit;
pub use self::policy::{Limit, OnUnavailable, Policy, PolicyBuilder};
use self::tasks::Tasks;
use self::tenants::TenantNumbers;
pub use self::tenants::TenantOverride;
#[cfg(feature = "redis")]
use crate::backend::RedisBackend;
use crate::backend::{Backend, MemoryBackend};
#[cfg(doc)]
use crate::error::AcquireError;
use crate::error::BackendError;
#[cfg(feature = "redis")]
use crate::error::ConfigError;
use crate::metrics::requests::Meter;
use crate::name::Name;

/// How long a shutdown waits for what is still to be released.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Permits by name, counted together by all who use the same backend.
///
/// One is enough for a process: clones are cheap and share everything, and any number of names can
/// be asked for. Each name is a semaphore of its own; it exists as long as someone holds or waits
/// for a permit of it.
///
/// # Fairness
///
/// First come is first served, over all processes: permits are granted in the order in which
/// requests reached the backend. While anyone waits, a newcomer queues too, or is refused if it may
/// not wait. A permit that comes free goes to the head of the queue in the same step.
///
/// Where tenants share a semaphore, an [`Ask`] names the tenant. Then a permit that comes free goes to the
/// tenant with the fewest in use by weight; see [`Ask::by`].
///
/// # Leases
///
/// Each place, waiting or held, has a lease, and background tasks of this process keep it alive. If the
/// process dies, its permits come free when their leases end. See [`Permit::lost`] for what happens
/// when a lease cannot be renewed.
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
    handle: Arc<Handle>,
    tenants: TenantNumbers,
}

struct Handle {
    node: Arc<Node>,
    tasks: Tasks,
}

impl Semaphore {
    /// Permits counted in this process.
    #[must_use]
    pub fn in_memory() -> Self {
        Self::new(MemoryBackend::new())
    }

    /// Permits counted in a Redis, for all processes that use it with the same prefix.
    ///
    /// For any of the URLs of [`RedisBackend::builder`], with its defaults: one server, a Unix socket,
    /// Sentinel or a cluster. Does not connect yet: that happens at the first use, and again whenever
    /// the connection breaks.
    ///
    /// # Errors
    ///
    /// If the URL cannot be used.
    #[cfg(feature = "redis")]
    pub fn redis(url: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(RedisBackend::builder(url).build()?))
    }

    /// Permits counted by a backend.
    #[must_use]
    pub fn new(backend: impl Backend) -> Self {
        let node = Node::new(Arc::new(backend));
        let handle = Arc::new(Handle { node, tasks: Tasks::default() });
        Self { handle, tenants: TenantNumbers::salted(b"") }
    }

    /// The same semaphore with a salt for the names of tenants, the same in the whole fleet.
    ///
    /// In the backend a tenant is a number of 25 bits, a hash of its name; two tenants of one number share
    /// their turns and their cap. Of 1,000 tenants some pair does with a chance of 1.5 %, of 10,000 with one of
    /// 78 %; each process that sees both logs it at debug, and another salt parts them. Where clients choose
    /// their own names, a salt that they do not know keeps them from choosing one that collides with another's.
    ///
    /// To be called before anything is made of the semaphore: clones and layers keep the salt that it had then.
    ///
    /// ```
    /// # use tower_semaphore::Semaphore;
    /// let semaphore = Semaphore::in_memory().tenant_salt("read from the fleet's secrets");
    /// ```
    #[must_use]
    pub fn tenant_salt(mut self, salt: impl AsRef<[u8]>) -> Self {
        self.tenants = TenantNumbers::salted(salt.as_ref());
        self
    }

    /// The node, with its tasks running where it needs them for questions.
    fn running_node(&self) -> Result<&Node, BackendError> {
        let Handle { node, tasks } = &*self.handle;
        if node.embedded().is_none() {
            // Each question would open a connection, for itself alone.
            if node.is_closed() {
                return Err(BackendError::call("the semaphore was shut down"));
            }
            tasks.ensure_running(node)?;
        }
        Ok(node)
    }

    /// Waits for a permit, for as long as the policy lets it: of the semaphore of this name, or as an
    /// [`Ask`] says for which tenant and how many.
    ///
    /// Takes its place in the queue when it is called, not when it is first polled, and is `Unpin`.
    /// With a wait timeout of zero it is [`try_acquire`](Self::try_acquire).
    ///
    /// # Errors
    ///
    /// [`Rejected`](AcquireError::Rejected) if no permit came free in time, or the queue is full;
    /// [`Unavailable`](AcquireError::Unavailable) if the backend gave no answer within a second;
    /// [`Closed`](AcquireError::Closed) after a [`shutdown`](Self::shutdown).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue, and its turn is lost; a permit that was
    /// already granted is released. See [`Acquire`].
    pub fn acquire(&self, ask: impl Into<Ask>, policy: &Policy) -> Acquire {
        let meter = self.handle.node.meters.of(policy.name, policy.wait_timeout);
        let ask = ask.into();
        self.acquire_measured(ask.name(), Some(&ask), policy, meter)
    }

    /// As [`acquire`](Self::acquire), counted by a meter of the caller's.
    /// `ask`: where the name is not all that is asked for.
    pub(crate) fn acquire_measured(
        &self,
        name: &Name,
        ask: Option<&Ask>,
        policy: &Policy,
        meter: Meter,
    ) -> Acquire {
        Acquire::new(self, name.as_str(), ask, policy, meter)
    }

    /// Takes a permit if one is free and it is nobody else's turn. The policy's wait timeout does not
    /// matter.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue, and its turn is lost; a permit that was
    /// already granted is released. See [`Acquire`].
    pub fn try_acquire(&self, ask: impl Into<Ask>, policy: &Policy) -> Acquire {
        let policy = Policy { wait_timeout: Duration::ZERO, ..policy.clone() };
        self.acquire(ask, &policy)
    }

    /// Whether the backend can be asked, and how often the policy answered in its place.
    #[must_use]
    pub fn health(&self) -> Health {
        self.handle.node.health()
    }

    /// Answers all waiting requests with [`Closed`](AcquireError::Closed) at once, and lets none wait any more: a
    /// request that finds no permit free is rejected. Permits in use are not affected.
    ///
    /// Call it when a graceful shutdown begins; otherwise the server waits until every queued request has been
    /// answered. A layer answers queued requests with 503.
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
        self.handle.node.stop_waiting();
    }

    /// Gives everything back and ends the background tasks. Waiting requests are answered with
    /// [`Closed`](AcquireError::Closed), and so are all that come later; permits that are still held
    /// are lost to their holders.
    ///
    /// Takes two seconds at the most, if the backend does not answer.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, the tasks still end, but nobody waits for them.
    pub async fn shutdown(&self) {
        let node = &self.handle.node;
        node.close();
        node.give_back();
        self.handle.tasks.join(SHUTDOWN_TIMEOUT).await;
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.node.close();
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore").field("node", &self.handle.node.id()).finish_non_exhaustive()
    }
}
