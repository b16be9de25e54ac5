//! Limits and plans from an async source, cached.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::request::Parts;
use quick_cache::sync::Cache;
use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, timeout};

use super::BoxError;
use super::plan::Plan;
use crate::error::{BackendError, ConfigError, Seconds};
use crate::name::Name;
use crate::policy::Limit;

/// Most keys in a cache.
const CAPACITY_MAX: usize = 10_000_000;
/// Longest time that an answer may be used, fresh or stale.
const TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Longest time that a request may wait for an answer.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Pause after a failure before the source is asked again for the same key.
const PAUSE: Duration = Duration::from_secs(1);

/// Answers of an async source, cached: limits, or the plans of tenants, from a database or behind an API, for example.
///
/// [`CachedLimit`] and [`CachedPlan`] are the two that a layer takes.
///
/// Each process asks the source once for a key and caches the answer. Clones share the cache, so several layers can
/// use it.
///
/// * *One call for each key.* Requests that come during a call wait for its answer, or use the cached one. If the
///   request that made the call is dropped, so is the call, and the next request makes one.
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

/// Builds a [`Cached`].
///
/// Made by [`Cached::builder`].
#[must_use]
pub struct CachedBuilder<V> {
    source: Arc<Source<V>>,
    capacity: usize,
    terms: Terms<V>,
}

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

#[derive(Clone, Copy, Debug)]
struct Terms<V> {
    time_to_live: Duration,
    stale_for: Duration,
    timeout: Duration,
    on_failure: OnUnknown<V>,
}

struct Inner<V> {
    source: Arc<Source<V>>,
    terms: Terms<V>,
    entries: Cache<Name, Arc<Entry<V>>>,
}

/// The cache entry of one key.
struct Entry<V> {
    seen: Mutex<Seen<V>>,
    /// Held while the source is asked.
    asking: Arc<tokio::sync::Mutex<()>>,
}

struct Seen<V> {
    answer: Option<(V, Instant)>,
    /// The last failure since then.
    failure: Option<(BackendError, Instant)>,
}

impl<V> Default for Entry<V> {
    fn default() -> Self {
        Self { seen: Mutex::default(), asking: Arc::default() }
    }
}

impl<V> Default for Seen<V> {
    fn default() -> Self {
        Self { answer: None, failure: None }
    }
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
        CachedBuilder {
            source,
            capacity: 10_000,
            terms: Terms {
                time_to_live: Duration::from_secs(60),
                stale_for: Duration::from_secs(600),
                timeout: Duration::from_millis(500),
                on_failure: OnUnknown::default(),
            },
        }
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

    /// The answer, or a lookup of it.
    pub(super) fn find(&self, key: &Name, parts: &Parts) -> Found<V> {
        let made = || Ok::<_, Infallible>(Arc::<Entry<V>>::default());
        let Ok(entry) = self.inner.entries.get_or_insert_with(key, made);
        let (now, terms) = (Instant::now(), &self.inner.terms);
        if let Some(answer) = entry.seen().answer(terms, now) {
            return Found::Known(answer);
        }
        let asking = Arc::clone(&entry.asking);
        let Ok(turn) = Arc::clone(&asking).try_lock_owned() else {
            // Only the request that asks waits, if there is a stale answer for the others.
            if let Some(answer) = entry.seen().usable(terms, now) {
                return Found::Known(Ok(answer));
            }
            let step = Step::Queueing(Box::pin(asking.lock_owned()));
            return Found::Later(LookUp { cache: self.clone(), entry, step });
        };
        // Another request may have asked between the two.
        if let Some(answer) = entry.seen().answer(terms, now) {
            return Found::Known(answer);
        }
        let step = self.ask(&entry, turn, key, parts);
        Found::Later(LookUp { cache: self.clone(), entry, step })
    }

    fn ask(&self, entry: &Arc<Entry<V>>, turn: Turn, key: &Name, parts: &Parts) -> Step<V> {
        let source = (self.inner.source)(key, parts);
        let (entry, terms) = (Arc::clone(entry), self.inner.terms);
        Step::Asking(Box::pin(async move {
            let _turn = turn;
            entry.ask(source, &terms).await
        }))
    }
}

/// An answer, if it is known.
pub(super) enum Found<V> {
    Known(Result<V, BackendError>),
    Later(LookUp<V>),
}

/// An answer that is being looked up.
pub(super) struct LookUp<V> {
    cache: Cached<V>,
    entry: Arc<Entry<V>>,
    step: Step<V>,
}

type Turn = OwnedMutexGuard<()>;

enum Step<V> {
    /// Another request asks.
    Queueing(BoxFuture<'static, Turn>),
    Asking(BoxFuture<'static, Result<V, BackendError>>),
}

impl<V: Copy + Send + Sync + 'static> LookUp<V> {
    pub(super) fn poll(
        &mut self,
        key: &Name,
        parts: &Parts,
        cx: &mut Context<'_>,
    ) -> Poll<Result<V, BackendError>> {
        loop {
            match &mut self.step {
                Step::Queueing(turn) => {
                    let turn = ready!(turn.as_mut().poll(cx));
                    let terms = &self.cache.inner.terms;
                    if let Some(answer) = self.entry.seen().answer(terms, Instant::now()) {
                        return Poll::Ready(answer);
                    }
                    // The request that asked was dropped before it had an answer.
                    self.step = self.cache.ask(&self.entry, turn, key, parts);
                }
                Step::Asking(answer) => return answer.as_mut().poll(cx),
            }
        }
    }
}

impl<V: Copy> Entry<V> {
    fn seen(&self) -> MutexGuard<'_, Seen<V>> {
        // No panic leaves it half changed.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(
        &self,
        source: BoxFuture<'static, Result<V, BoxError>>,
        terms: &Terms<V>,
    ) -> Result<V, BackendError> {
        let answer = match timeout(terms.timeout, source).await {
            Ok(answer) => answer.map_err(|error| {
                BackendError::call(format!("the look-up failed: {error}")).with_source(error)
            }),
            Err(_) => Err(BackendError::call(format!(
                "the look-up had no answer within {}",
                Seconds(terms.timeout)
            ))),
        };
        let now = Instant::now();
        let mut seen = self.seen();
        match answer {
            Ok(answer) => *seen = Seen { answer: Some((answer, now)), failure: None },
            Err(error) => {
                tracing::debug!(target: "tower_semaphore", %error, "the source of limits or plans failed; the cached answer is used, if there is one");
                seen.failure = Some((error, now));
            }
        }
        seen.outcome(terms, now)
    }
}

impl<V: Copy> Seen<V> {
    /// The answer from the cache; `None`: the source is to be asked.
    fn answer(&self, terms: &Terms<V>, now: Instant) -> Option<Result<V, BackendError>> {
        let is_fresh =
            |(answer, at): (V, Instant)| (now < at + terms.time_to_live).then_some(Ok(answer));
        let is_paused = self.failure.as_ref().is_some_and(|(_, at)| now < *at + PAUSE);
        self.answer.and_then(is_fresh).or_else(|| is_paused.then(|| self.outcome(terms, now)))
    }

    /// The answer without the source.
    fn outcome(&self, terms: &Terms<V>, now: Instant) -> Result<V, BackendError> {
        match (self.usable(terms, now), &self.failure, terms.on_failure) {
            (Some(answer), _, _) | (None, _, OnUnknown::Assume(answer)) => Ok(answer),
            (None, Some((error, _)), OnUnknown::Refuse) => Err(error.clone()),
            (None, None, OnUnknown::Refuse) => {
                Err(BackendError::call("the look-up has no answer yet"))
            }
        }
    }

    /// The last answer, if it may still be used.
    fn usable(&self, terms: &Terms<V>, now: Instant) -> Option<V> {
        let (answer, at) = self.answer?;
        (now < at + terms.time_to_live + terms.stale_for).then_some(answer)
    }
}

impl<V: Copy> CachedBuilder<V> {
    /// Sets the most keys that the cache holds, 1 to 10 million. The default is 10,000.
    ///
    /// ```
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).capacity(100_000).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys;
        self
    }

    /// Sets how long an answer is fresh: more than zero, at most a week. The default is 60 s.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).time_to_live(Duration::from_secs(10)).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn time_to_live(mut self, time: Duration) -> Self {
        self.terms.time_to_live = time;
        self
    }

    /// Sets how much longer an answer is used while the source fails, at most a week. The default is 10 min; with
    /// zero, it is not used then.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).stale_for(Duration::from_secs(3600)).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn stale_for(mut self, time: Duration) -> Self {
        self.terms.stale_for = time;
        self
    }

    /// Sets how long the source may take before that counts as a failure: more than zero, at most a minute. The
    /// default is 500 ms.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).timeout(Duration::from_millis(100)).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.terms.timeout = timeout;
        self
    }

    /// Sets what happens to a request whose limit or plan is unknown, because the source fails and the cache has nothing
    /// recent enough. The default is [`OnUnknown::Refuse`].
    ///
    /// ```
    /// use tower_semaphore::Limit;
    /// use tower_semaphore::limit::{CachedLimit, OnUnknown};
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).on_failure(OnUnknown::Assume(Limit::Permits(1))).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn on_failure(mut self, on_failure: OnUnknown<V>) -> Self {
        self.terms.on_failure = on_failure;
        self
    }

    /// Builds the cache, which is empty.
    ///
    /// # Errors
    ///
    /// If a value is out of its range.
    pub fn build(self) -> Result<Cached<V>, ConfigError> {
        let Terms { time_to_live, stale_for, timeout, .. } = self.terms;
        if !(1..=CAPACITY_MAX).contains(&self.capacity) {
            return Err(ConfigError::new(format!(
                "capacity is {} keys; expected 1 to {CAPACITY_MAX}",
                self.capacity
            )));
        }
        if time_to_live.is_zero() || time_to_live > TIME_MAX {
            return Err(ConfigError::new(format!(
                "time to live is {time_to_live:?}; expected more than 0, to {TIME_MAX:?}"
            )));
        }
        if stale_for > TIME_MAX {
            return Err(ConfigError::new(format!(
                "stale for is {stale_for:?}; expected 0 to {TIME_MAX:?}"
            )));
        }
        if timeout.is_zero() || timeout > TIMEOUT_MAX {
            return Err(ConfigError::new(format!(
                "timeout is {timeout:?}; expected more than 0, to {TIMEOUT_MAX:?}"
            )));
        }
        let entries = Cache::new(self.capacity);
        let inner = Inner { source: self.source, terms: self.terms, entries };
        Ok(Cached { inner: Arc::new(inner) })
    }
}

impl<V: fmt::Debug> fmt::Debug for Cached<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached")
            .field("terms", &self.inner.terms)
            .field("len", &self.inner.entries.len())
            .finish_non_exhaustive()
    }
}

impl<V: Copy> Clone for CachedBuilder<V> {
    fn clone(&self) -> Self {
        let Self { source, capacity, terms } = self;
        Self { source: Arc::clone(source), capacity: *capacity, terms: *terms }
    }
}

impl<V: fmt::Debug> fmt::Debug for CachedBuilder<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedBuilder")
            .field("capacity", &self.capacity)
            .field("terms", &self.terms)
            .finish_non_exhaustive()
    }
}
