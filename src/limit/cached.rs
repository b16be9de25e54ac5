//! Limits that are looked up, and remembered for a while.

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
use crate::error::{BackendError, ConfigError};
use crate::name::Name;
use crate::semaphore::Limit;

/// Keys that are remembered, at the most.
const CAPACITY_MAX: usize = 10_000_000;
/// The longest that a limit may be good for, fresh or stale.
const TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest that a request may be made to wait for a limit.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// How long after a failure the source is asked again for the same key.
const PAUSE: Duration = Duration::from_secs(1);

/// Limits that a source of yours knows: the plan of each tenant, in a database or behind an API.
///
/// Each process asks the source once for a key and remembers the answer for a while. Clones share
/// what is remembered, so several layers can have one.
///
/// * *One call for each key*: requests that come while it is asked wait for the same answer, or use
///   the one that they had. If the request that asks is dropped, so is its call, and the next one
///   asks.
/// * *A failing source* (an error, or no answer within [`timeout`](CachedLimitBuilder::timeout)) is
///   left alone for a second. Meanwhile the limit of before is used, as long as it may be
///   [`stale`](CachedLimitBuilder::stale_for); where there is none, requests get what
///   [`on_failure`](CachedLimitBuilder::on_failure) says: 503, unless set.
/// * *What is kept is bounded*: of more keys than [`capacity`](CachedLimitBuilder::capacity), those
///   asked for again stay, so a client that makes up keys drives out others like its own.
///
/// # Processes that differ
///
/// A limit that changes at the source is known to each process within its time to live, and not in
/// all of them at once. Until then each request goes by the limit that its own process knows: one
/// that knows the higher limit is given permits up to that, so the fleet's cap is the highest limit
/// that any of them goes by; one that knows the lower limit waits, or is refused, at the lower one.
/// What was granted under a higher limit is not taken back. [`forget`](CachedLimit::forget) makes
/// one process ask again.
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
#[derive(Clone)]
pub struct CachedLimit {
    inner: Arc<Inner>,
}

/// Builds a [`CachedLimit`].
#[derive(Clone)]
#[must_use]
pub struct CachedLimitBuilder {
    source: Arc<Source>,
    capacity: usize,
    terms: Terms,
}

/// What becomes of a request whose limit is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnknownLimit {
    /// It is refused with 503. The default.
    #[default]
    Refuse,
    /// It goes by this limit.
    Assume(Limit),
}

type Source = dyn Fn(&Name, &Parts) -> BoxFuture<'static, Result<Limit, BoxError>> + Send + Sync;

#[derive(Clone, Copy, Debug)]
struct Terms {
    time_to_live: Duration,
    stale_for: Duration,
    timeout: Duration,
    on_failure: OnUnknownLimit,
}

struct Inner {
    source: Arc<Source>,
    terms: Terms,
    entries: Cache<Name, Arc<Entry>>,
}

/// What is known of one key.
#[derive(Default)]
struct Entry {
    seen: Mutex<Seen>,
    /// Held while the source is asked.
    asking: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Default)]
struct Seen {
    limit: Option<(Limit, Instant)>,
    /// Since the limit was looked up last.
    failure: Option<(BackendError, Instant)>,
}

impl CachedLimit {
    /// Limits from this source: the permits of a key, or why they are not known.
    ///
    /// What it answers must depend on nothing but the key. The request's head is there because the
    /// key's own text is [encoded](Name): the value that it was made of stands there.
    pub fn builder<F, Fut, L, E>(source: F) -> CachedLimitBuilder
    where
        F: Fn(&Name, &Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<L, E>> + Send + 'static,
        L: Into<Limit>,
        E: Into<BoxError>,
    {
        let source: Arc<Source> = Arc::new(move |key, parts| {
            let limit = source(key, parts);
            Box::pin(async move { limit.await.map(Into::into).map_err(Into::into) })
        });
        CachedLimitBuilder {
            source,
            capacity: 10_000,
            terms: Terms {
                time_to_live: Duration::from_secs(60),
                stale_for: Duration::from_secs(600),
                timeout: Duration::from_millis(500),
                on_failure: OnUnknownLimit::default(),
            },
        }
    }

    /// Makes the next request with this key ask the source: for when a plan has changed. In this
    /// process only; a call that is on its way still tells its answer to those who wait for it.
    ///
    /// The key is that of the request, without the layer's name. One that was written down is read with
    /// [`Name::from_stored`], however long it was.
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

    /// How many keys are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.entries.len()
    }

    /// Whether no key is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The limit, or how to come by it.
    pub(super) fn find(&self, key: &Name, parts: &Parts) -> Found {
        let made = || Ok::<_, Infallible>(Arc::<Entry>::default());
        let Ok(entry) = self.inner.entries.get_or_insert_with(key, made);
        let (now, terms) = (Instant::now(), &self.inner.terms);
        if let Some(answer) = entry.seen().answer(terms, now) {
            return Found::Known(answer);
        }
        let asking = Arc::clone(&entry.asking);
        let Ok(turn) = Arc::clone(&asking).try_lock_owned() else {
            // The request that asks waits; others need not, where there is something to go by.
            if let Some(limit) = entry.seen().usable(terms, now) {
                return Found::Known(Ok(limit));
            }
            let step = Step::Queueing(Box::pin(asking.lock_owned()));
            return Found::Later(LookUp { limits: self.clone(), entry, step });
        };
        // The request that asked may be done just now.
        if let Some(answer) = entry.seen().answer(terms, now) {
            return Found::Known(answer);
        }
        let step = self.ask(&entry, turn, key, parts);
        Found::Later(LookUp { limits: self.clone(), entry, step })
    }

    fn ask(&self, entry: &Arc<Entry>, turn: Turn, key: &Name, parts: &Parts) -> Step {
        let source = (self.inner.source)(key, parts);
        let (entry, terms) = (Arc::clone(entry), self.inner.terms);
        Step::Asking(Box::pin(async move {
            let _turn = turn;
            entry.ask(source, &terms).await
        }))
    }
}

/// Where a limit comes from.
pub(super) enum Found {
    Known(Result<Limit, BackendError>),
    Later(LookUp),
}

/// A limit that is being looked up.
pub(super) struct LookUp {
    limits: CachedLimit,
    entry: Arc<Entry>,
    step: Step,
}

type Turn = OwnedMutexGuard<()>;

enum Step {
    /// Someone else asks.
    Queueing(BoxFuture<'static, Turn>),
    Asking(BoxFuture<'static, Result<Limit, BackendError>>),
}

impl LookUp {
    pub(super) fn poll(
        &mut self,
        key: &Name,
        parts: &Parts,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Limit, BackendError>> {
        loop {
            match &mut self.step {
                Step::Queueing(turn) => {
                    let turn = ready!(turn.as_mut().poll(cx));
                    let terms = &self.limits.inner.terms;
                    if let Some(answer) = self.entry.seen().answer(terms, Instant::now()) {
                        return Poll::Ready(answer);
                    }
                    // The request that asked has left without an answer.
                    self.step = self.limits.ask(&self.entry, turn, key, parts);
                }
                Step::Asking(answer) => return answer.as_mut().poll(cx),
            }
        }
    }
}

impl Entry {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        // Nothing is left half changed by a panic.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(
        &self,
        source: BoxFuture<'static, Result<Limit, BoxError>>,
        terms: &Terms,
    ) -> Result<Limit, BackendError> {
        let answer = match timeout(terms.timeout, source).await {
            Ok(answer) => answer.map_err(|error| {
                BackendError::call(format!("the limit could not be looked up: {error}"))
                    .with_source(error)
            }),
            Err(_) => Err(BackendError::call(format!(
                "the limit could not be looked up within {:?}",
                terms.timeout
            ))),
        };
        let now = Instant::now();
        let mut seen = self.seen();
        match answer {
            Ok(limit) => *seen = Seen { limit: Some((limit, now)), failure: None },
            Err(error) => {
                tracing::debug!(target: "tower_semaphore", %error, "what was known before goes on, if anything was");
                seen.failure = Some((error, now));
            }
        }
        seen.outcome(terms, now)
    }
}

impl Seen {
    /// What to go by; `None`: ask first.
    fn answer(&self, terms: &Terms, now: Instant) -> Option<Result<Limit, BackendError>> {
        let is_fresh =
            |(limit, at): (Limit, Instant)| (now < at + terms.time_to_live).then_some(Ok(limit));
        let is_paused = self.failure.as_ref().is_some_and(|(_, at)| now < *at + PAUSE);
        self.limit.and_then(is_fresh).or_else(|| is_paused.then(|| self.outcome(terms, now)))
    }

    /// What to go by where the source cannot be asked.
    fn outcome(&self, terms: &Terms, now: Instant) -> Result<Limit, BackendError> {
        match (self.usable(terms, now), &self.failure, terms.on_failure) {
            (Some(limit), _, _) | (None, _, OnUnknownLimit::Assume(limit)) => Ok(limit),
            (None, Some((error, _)), OnUnknownLimit::Refuse) => Err(error.clone()),
            (None, None, OnUnknownLimit::Refuse) => {
                Err(BackendError::call("the limit was not looked up"))
            }
        }
    }

    /// The limit that was looked up last, if it may be used still.
    fn usable(&self, terms: &Terms, now: Instant) -> Option<Limit> {
        let (limit, at) = self.limit?;
        (now < at + terms.time_to_live + terms.stale_for).then_some(limit)
    }
}

impl CachedLimitBuilder {
    /// How many keys are remembered, at the most. 10 000 unless set; 1 to 10 million.
    pub const fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys;
        self
    }

    /// How long an answer of the source is good for. A minute unless set; more than zero, up to a
    /// week.
    pub const fn time_to_live(mut self, time: Duration) -> Self {
        self.terms.time_to_live = time;
        self
    }

    /// For how much longer an answer is used while the source fails. Ten minutes unless set; up to a
    /// week. Zero: not at all.
    pub const fn stale_for(mut self, time: Duration) -> Self {
        self.terms.stale_for = time;
        self
    }

    /// How long the source may take; then it has failed. Half a second unless set; up to a minute.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.terms.timeout = timeout;
        self
    }

    /// What becomes of a request whose limit is not known, because the source fails and nothing, or
    /// nothing recent enough, is remembered. It is refused with 503, unless set.
    pub const fn on_failure(mut self, on_failure: OnUnknownLimit) -> Self {
        self.terms.on_failure = on_failure;
        self
    }

    /// The limits; none is looked up yet.
    ///
    /// # Errors
    ///
    /// If a value is out of its range.
    pub fn build(self) -> Result<CachedLimit, ConfigError> {
        let Terms { time_to_live, stale_for, timeout, .. } = self.terms;
        if !(1..=CAPACITY_MAX).contains(&self.capacity) {
            return Err(ConfigError::new(format!(
                "capacity: {} keys; allowed: 1 to {CAPACITY_MAX}",
                self.capacity
            )));
        }
        if time_to_live.is_zero() || time_to_live > TIME_MAX {
            return Err(ConfigError::new(format!(
                "time to live: {time_to_live:?} is out of range; allowed: more than 0, to {TIME_MAX:?}"
            )));
        }
        if stale_for > TIME_MAX {
            return Err(ConfigError::new(format!(
                "stale for: {stale_for:?} is too long; allowed: 0 to {TIME_MAX:?}"
            )));
        }
        if timeout.is_zero() || timeout > TIMEOUT_MAX {
            return Err(ConfigError::new(format!(
                "timeout: {timeout:?} is out of range; allowed: more than 0, to {TIMEOUT_MAX:?}"
            )));
        }
        let entries = Cache::new(self.capacity);
        let inner = Inner { source: self.source, terms: self.terms, entries };
        Ok(CachedLimit { inner: Arc::new(inner) })
    }
}

impl fmt::Debug for CachedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedLimit")
            .field("terms", &self.inner.terms)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for CachedLimitBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedLimitBuilder")
            .field("capacity", &self.capacity)
            .field("terms", &self.terms)
            .finish_non_exhaustive()
    }
}
