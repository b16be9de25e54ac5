//! Limits and plans from an async source, cached.

mod builder;
mod call;
mod entry;
mod lookup;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use http::request::Parts;
use quick_cache::sync::Cache;

pub use self::builder::CachedBuilder;
use self::entry::{CacheOptions, Entry};
pub(super) use self::lookup::{Found, Lookup};
use super::BoxError;
use super::plan::Plan;
use crate::name::Name;
use crate::policy::Limit;

/// Answers of an async source, cached: limits, or the plans of tenants, from a database or behind an API, for example.
///
/// [`CachedLimit`] and [`CachedPlan`] are the two that a layer takes.
///
/// Each process asks the source once for a key and caches the answer. Clones share the cache, so several layers can
/// use it.
///
/// * *One call for each key.* Requests that come during a call wait for its answer, or use the cached one. Each of
///   those that wait drives the call, so none depends on another being polled. If all of them are dropped, so is the
///   call, and the next request makes one. A panic of the source reaches one of them, and the others make another call.
/// * *A failing source* (an error, or no answer within [`timeout`](CachedBuilder::timeout)) is not asked again
///   for a second. Meanwhile the cached answer is used, as long as it may be
///   [stale](CachedBuilder::stale_for). Without one, [`on_failure`](CachedBuilder::on_failure) decides: by
///   default, the request is rejected with 503.
/// * *The cache is bounded.* Beyond [`capacity`](CachedBuilder::capacity), keys that are asked for repeatedly
///   stay: a client that makes up keys evicts others of that kind.
///
/// # When a limit changes
///
/// A limit that changes at the source reaches each process within its time to live, and not all at once. Until then,
/// each request is judged by the limit that its own process knows, so the limit of the fleet is the highest of
/// these. A process that knows a lower limit waits, or rejects, at that. Permits granted under a higher limit are not
/// revoked. [`forget`](Self::forget) makes one process ask again. The same holds for the cap of a plan.
pub struct Cached<V> {
    inner: Arc<Inner<V>>,
}

/// Limits by key, for [`limit_cached`](super::ConcurrencyLimitBuilder::limit_cached).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore::limit::{CachedLimit, HeaderKey};
/// use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
///
/// # async fn plan_of(tenant: Option<http::HeaderValue>) -> Result<u32, std::io::Error> { Ok(5) }
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// # let semaphore = Semaphore::in_memory();
/// let plans = CachedLimit::builder(|_key, parts| plan_of(parts.headers.get("x-tenant").cloned()))
///     .time_to_live(Duration::from_secs(30))
///     .build()?;
///
/// let layer = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
///     .key(HeaderKey::from_static("x-tenant"))
///     .limit_cached(&plans)
///     .build()?;
/// # Ok(()) }
/// ```
pub type CachedLimit = Cached<Limit>;

/// Plans by tenant, for [`plan_cached`](super::ConcurrencyLimitBuilder::plan_cached).
///
/// # Examples
///
/// ```
/// use tower_semaphore::limit::{CachedPlan, HeaderKey, Plan};
/// use tower_semaphore::{ConcurrencyLimitLayer, Name, Semaphore};
///
/// # struct Row { permits: u32, share: u32 }
/// # async fn row_of(tenant: Name) -> Result<Row, std::io::Error> { Ok(Row { permits: 4, share: 3 }) }
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// # let semaphore = Semaphore::in_memory();
/// let plans = CachedPlan::builder(|tenant: &Name, _| {
///     let tenant = tenant.clone();
///     async move {
///         let row = row_of(tenant).await?;
///         Ok::<_, std::io::Error>(Plan::new().each(row.permits).weight(row.share))
///     }
/// })
/// .build()?;
///
/// let layer = ConcurrencyLimitLayer::builder(&semaphore, "openai")
///     .limit(10)
///     .fair_by(HeaderKey::from_static("x-tenant"))
///     .plan_cached(&plans)
///     .build()?;
/// # Ok(()) }
/// ```
pub type CachedPlan = Cached<Plan>;

/// What happens to a request whose limit or plan is unknown.
///
/// See [`on_failure`](CachedBuilder::on_failure).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnknown<V> {
    /// It is rejected with 503. The default.
    #[default]
    Refuse,
    /// This one is used.
    Assume(V),
}

type Source<V> = dyn Fn(&Name, &Parts) -> BoxFuture<'static, Result<V, BoxError>> + Send + Sync;

struct Inner<V> {
    source: Arc<Source<V>>,
    options: CacheOptions<V>,
    entries: Cache<Name, Arc<Entry<V>>>,
}

impl<V> Clone for Cached<V> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<V: Copy + Send + Sync + 'static> Cached<V> {
    /// Builds a cache of the answers of this source: a function of the key (of a plan: the tenant) and the head of a
    /// request, which has it.
    ///
    /// The answer must depend on the key alone. The head is an argument because the text of a key is
    /// [encoded](Name), and the original value is there.
    ///
    /// ```
    /// use std::io;
    /// use http::request::Parts;
    /// use tower_semaphore::Name;
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn query(tenant: Name) -> io::Result<u32> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|tenant: &Name, _: &Parts| query(tenant.clone())).build()?;
    /// assert!(plans.is_empty());
    /// # Ok(()) }
    /// ```
    pub fn builder<F, Fut, A, E>(source: F) -> CachedBuilder<V>
    where
        F: Fn(&Name, &Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<A, E>> + Send + 'static,
        A: Into<V>,
        E: Into<BoxError>,
    {
        let source: Arc<Source<V>> = Arc::new(move |key, parts| {
            let answer = source(key, parts);
            Box::pin(async move { answer.await.map(Into::into).map_err(Into::into) })
        });
        CachedBuilder::new(source)
    }

    /// Removes a key from the cache of this process, so that the next request with it asks the source: after a plan
    /// has changed, for example. Requests that wait for a call in progress get its answer.
    ///
    /// The key is that of the request, without the layer's name; of a plan, the tenant. [`Name::from_stored`] makes it from text that was
    /// stored.
    ///
    /// ```
    /// # use tower_semaphore::{Name, limit::CachedLimit};
    /// # fn example(plans: &CachedLimit) {
    /// plans.forget(&Name::new("acme/eu"));
    /// // The same, by what the source was given, as text.
    /// plans.forget(&Name::from_stored("acme%2Feu").expect("the text of a name"));
    /// # }
    /// ```
    pub fn forget(&self, key: &Name) {
        self.inner.entries.remove(key);
    }

    /// The number of cached keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.entries.len()
    }

    /// Whether the cache is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<V: fmt::Debug> fmt::Debug for Cached<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached")
            .field("options", &self.inner.options)
            .field("len", &self.inner.entries.len())
            .finish_non_exhaustive()
    }
}
