//! The layer, and how it is set up.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http::request::Parts;
use tower_layer::Layer;

use super::budget::ClientTimeout;
use super::cached::CachedLimit;
use super::fair::Fair;
use super::key::{GlobalKey, KeyExtractor, MissingKey};
use super::labels::KeyLabels;
use super::refusal::{Problem, RefusalResponse};
use super::service::ConcurrencyLimit;
use super::settings::{HoldUntil, KeySource, LimitSource, OnLost, Settings, Skip, WaitTimeoutOf};
use super::shadow::{Shadow, ShadowCounts};
use crate::error::ConfigError;
use crate::name::Name;
use crate::semaphore::{Limit, OnUnavailable, Policy, PolicyBuilder, Semaphore};

/// Longest name of a layer, in bytes.
const NAME_MAX: usize = 40;
/// Longest pause that clients are told to make, before it is jittered.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// Takes a permit for each request and holds it as long as the response.
///
/// Clones share everything, so one layer can be put on any number of routes: Axum puts a clone on
/// each.
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore::limit::HeaderKey;
/// use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// let semaphore = Semaphore::in_memory();
/// let layer = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
///     .key(HeaderKey::from_static("x-tenant"))
///     .limit(5)
///     .wait_timeout(Duration::from_secs(1))
///     .build()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ConcurrencyLimitLayer {
    settings: Arc<Settings>,
}

/// Builds a [`ConcurrencyLimitLayer`].
#[must_use = "`build` gives the layer"]
pub struct ConcurrencyLimitBuilder {
    semaphore: Semaphore,
    name: String,
    pub(super) policy: PolicyBuilder,
    pub(super) fair: Fair,
    pub(super) headroom: u32,
    key: KeySource,
    missing_key: Option<MissingKey>,
    wait_timeout: Option<Arc<WaitTimeoutOf>>,
    client_timeout: Option<ClientTimeout>,
    limit: Option<LimitSource>,
    skip: Option<Skip>,
    hold_until: HoldUntil,
    on_lost: OnLost,
    full_status: StatusCode,
    retry_after: Duration,
    rate_limit_fields: bool,
    key_labels: KeyLabels,
    pub(super) tenant_labels: Option<KeyLabels>,
    grpc_status: bool,
    response: Option<Arc<dyn RefusalResponse>>,
    shadow: bool,
}

impl ConcurrencyLimitLayer {
    /// A layer that takes its permits from this semaphore.
    ///
    /// The name tells layers apart: permits are taken from `<name>`, or from `<name>:<key>` where
    /// the key is not global, and `semaphore.acquire(name, ...)` shares them. Clients see it in a
    /// refusal. 1 to 40 of `A-Z a-z 0-9 . _ -`.
    pub fn builder(semaphore: &Semaphore, name: impl Into<String>) -> ConcurrencyLimitBuilder {
        ConcurrencyLimitBuilder {
            semaphore: semaphore.clone(),
            name: name.into(),
            policy: Policy::builder(Limit::Unlimited),
            fair: Fair::default(),
            headroom: 0,
            key: KeySource::Sync(Arc::new(GlobalKey)),
            missing_key: None,
            wait_timeout: None,
            client_timeout: None,
            limit: None,
            skip: None,
            hold_until: HoldUntil::default(),
            on_lost: OnLost::default(),
            full_status: StatusCode::TOO_MANY_REQUESTS,
            retry_after: Duration::from_secs(1),
            rate_limit_fields: true,
            key_labels: KeyLabels::default(),
            tenant_labels: None,
            grpc_status: true,
            response: None,
            shadow: false,
        }
    }

    /// What a layer in [shadow](ConcurrencyLimitBuilder::shadow) has counted so far; `None` for one
    /// that is in force.
    #[must_use]
    pub fn shadow_counts(&self) -> Option<ShadowCounts> {
        self.settings.shadow.as_ref().map(Shadow::counts)
    }
}

impl<S> Layer<S> for ConcurrencyLimitLayer {
    type Service = ConcurrencyLimit<S>;

    fn layer(&self, inner: S) -> ConcurrencyLimit<S> {
        ConcurrencyLimit::new(inner, Arc::clone(&self.settings))
    }
}

/// Nothing implements it: it stands here so that the compiler can say what is missing where a builder is used
/// as a layer.
#[diagnostic::on_unimplemented(
    message = "`ConcurrencyLimitBuilder` is not a layer yet: call `build()`",
    label = "the layer is not built: `build()` checks what was set, and gives the layer"
)]
#[doc(hidden)]
pub trait Built {}

#[doc(hidden)]
impl<S: Built> Layer<S> for ConcurrencyLimitBuilder {
    type Service = S;

    fn layer(&self, inner: S) -> S {
        inner
    }
}

impl ConcurrencyLimitBuilder {
    /// Whose permits a request takes. [`GlobalKey`] unless set.
    pub fn key(mut self, extractor: impl KeyExtractor) -> Self {
        self.key = KeySource::Sync(Arc::new(extractor));
        self
    }

    /// Whose permits a request takes, where that must be looked up. The request waits for it, for as
    /// long as it takes; `None`: it has no key.
    ///
    /// The future is dropped if the client leaves.
    pub fn key_async<F, Fut, K>(mut self, extractor: F) -> Self
    where
        F: Fn(&Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<K>> + Send + 'static,
        K: Into<Name>,
    {
        self.key = KeySource::Async(Arc::new(move |parts| {
            let key = extractor(parts);
            Box::pin(async move { key.await.map(Into::into) })
        }));
        self
    }

    /// What becomes of a request without a key. Unless set, its [extractor](KeyExtractor::missing_key) says so:
    /// most reject it with 400.
    pub const fn on_missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = Some(missing_key);
        self
    }

    /// Permits of each key. 0: every request is refused.
    pub fn limit(mut self, limit: impl Into<Limit>) -> Self {
        self.limit = Some(LimitSource::Fixed(limit.into()));
        self
    }

    /// Permits by key: called for each request, so it should be quick.
    pub fn limit_by<F, L>(mut self, limit: F) -> Self
    where
        F: Fn(&Name, &Parts) -> L + Send + Sync + 'static,
        L: Into<Limit>,
    {
        self.limit = Some(LimitSource::Sync(Arc::new(move |key, parts| limit(key, parts).into())));
        self
    }

    /// Permits by key, where that must be looked up: called for each request, which waits for it. To
    /// remember the answers, see [`limit_cached`](Self::limit_cached).
    pub fn limit_by_async<F, Fut, L>(mut self, limit: F) -> Self
    where
        F: Fn(&Name, &Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = L> + Send + 'static,
        L: Into<Limit>,
    {
        self.limit = Some(LimitSource::Async(Arc::new(move |key, parts| {
            let limit = limit(key, parts);
            Box::pin(async move { limit.await.into() })
        })));
        self
    }

    /// Permits by key, from a source of yours whose answers are remembered: the plan of each tenant,
    /// say. A request whose limit is not known is refused with 503, unless
    /// [`on_failure`](super::CachedLimitBuilder::on_failure) says otherwise.
    pub fn limit_cached(mut self, limits: &CachedLimit) -> Self {
        self.limit = Some(LimitSource::Cached(limits.clone()));
        self
    }

    /// How long a request may wait for a permit. Zero: it is refused at once. See
    /// [`PolicyBuilder::wait_timeout`].
    ///
    /// Of layers that are stacked, each counts what the request has waited in those outside it: see
    /// [`WaitBudget`](super::WaitBudget).
    pub const fn wait_timeout(mut self, timeout: Duration) -> Self {
        self.policy = self.policy.wait_timeout(timeout);
        self
    }

    /// How long a request of this key may wait for a permit, in place of [`wait_timeout`](Self::wait_timeout): by
    /// its plan, say. Called for each request, so it should be quick. More than
    /// [`Policy::MAX_WAIT_TIMEOUT`] is that.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::request::Parts;
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    ///
    /// /// What authentication put into the request's extensions.
    /// #[derive(Clone, Copy)]
    /// struct Plan { patience: Duration }
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .wait_timeout_by(|_: &Name, parts: &Parts| {
    ///         parts.extensions.get::<Plan>().map_or(Duration::ZERO, |plan| plan.patience)
    ///     })
    ///     .build()
    /// # }
    /// ```
    pub fn wait_timeout_by<F>(mut self, wait_timeout: F) -> Self
    where
        F: Fn(&Name, &Parts) -> Duration + Send + Sync + 'static,
    {
        self.wait_timeout = Some(Arc::new(wait_timeout));
        self
    }

    /// Where a request says how long its client waits for the answer: it waits for a permit no longer than
    /// that, nor do layers further in let it. A field that is missing or cannot be read changes nothing.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::ClientTimeout;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "model").limit(10).client_timeout(ClientTimeout::grpc()).build()
    /// # }
    /// ```
    pub fn client_timeout(mut self, timeout: ClientTimeout) -> Self {
        self.client_timeout = Some(timeout);
        self
    }

    /// How long a permit stays taken after its request was broken off: the client left, the response body
    /// failed or was dropped before its end, the service inside returned an error, or it answered with 408
    /// or 504. See [`PolicyBuilder::linger`].
    ///
    /// For quotas that somebody else counts: an LLM provider or another upstream notices only after a while that
    /// a client is gone, and counts its request until then. Choose what it needs for that, measured, and some
    /// more.
    ///
    /// ```
    /// use std::time::Duration;
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .linger(Duration::from_millis(200))
    ///     .build()
    /// # }
    /// ```
    pub const fn linger(mut self, linger: Duration) -> Self {
        self.policy = self.policy.linger(linger);
        self
    }

    /// How many may wait for one key, in the whole fleet; with [`fair_by`](Self::fair_by), so many of each
    /// tenant. See [`PolicyBuilder::max_queue`].
    pub const fn max_queue(mut self, places: u32) -> Self {
        self.policy = self.policy.max_queue(places);
        self
    }

    /// How long a permit outlives a process that dies. See [`PolicyBuilder::lease`].
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.policy = self.policy.lease(lease);
        self
    }

    /// How long a permit is held. Until the body ends, unless set.
    pub const fn hold_until(mut self, hold_until: HoldUntil) -> Self {
        self.hold_until = hold_until;
        self
    }

    /// What becomes of a request whose permit was lost. It is cut off, unless set.
    pub const fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.on_lost = on_lost;
        self
    }

    /// What becomes of a request while the backend cannot be asked. It is refused with 503, unless
    /// set. See [`PolicyBuilder::on_unavailable`].
    pub const fn on_unavailable(mut self, on_unavailable: OnUnavailable) -> Self {
        self.policy = self.policy.on_unavailable(on_unavailable);
        self
    }

    /// Requests for which this is true pass without a permit: health checks, say.
    pub fn skip(mut self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.skip = Some(Arc::new(skip));
        self
    }

    /// The status for a semaphore that is full. 429 unless set, which blames the caller; 503 is
    /// right for a pool that all callers share. A client or server error.
    pub const fn full_status(mut self, status: StatusCode) -> Self {
        self.full_status = status;
        self
    }

    /// After about how long a refused client is told to come back (`Retry-After`): between this and
    /// twice this, at random, in whole seconds. 1 s unless set; a day at the most.
    pub const fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = pause;
        self
    }

    /// Whether the ready refusal has the fields `RateLimit-Policy` and `RateLimit`
    /// (draft-ietf-httpapi-ratelimit-headers-11). It has, unless set.
    pub const fn rate_limit_fields(mut self, send: bool) -> Self {
        self.rate_limit_fields = send;
        self
    }

    /// Whether requests of gRPC, known by their content type, are refused with a gRPC status: they
    /// are, unless set. It is `RESOURCE_EXHAUSTED` for a semaphore that is full, or `UNAVAILABLE` if
    /// [`full_status`](Self::full_status) is a server error, and for a backend that cannot be asked;
    /// with `grpc-retry-pushback-ms`. A stream whose permit is lost then ends with `UNAVAILABLE`.
    pub const fn grpc_status(mut self, send: bool) -> Self {
        self.grpc_status = send;
        self
    }

    /// The response to refused requests, instead of the ready one. Requests of gRPC get their status
    /// all the same, unless [`grpc_status`](Self::grpc_status) is off.
    pub fn refusal(mut self, response: impl RefusalResponse) -> Self {
        self.response = Some(Arc::new(response));
        self
    }

    /// The keys that the [metrics](crate::metrics) tell apart by their label `key`. None unless set:
    /// there is no such label then.
    #[cfg(feature = "metrics")]
    pub fn key_labels(mut self, labels: KeyLabels) -> Self {
        self.key_labels = labels;
        self
    }

    /// Whether the layer only counts what it would have refused: to try a limit on real traffic
    /// before it is in force. It is in force, unless set.
    ///
    /// In shadow a request takes a permit if one is free, so that all processes count together and
    /// [`inspect`](Semaphore::inspect) shows it. Where none is, it passes all the same and is counted
    /// by its reason: in [`shadow_counts`](ConcurrencyLimitLayer::shadow_counts), in `tracing` at
    /// debug, and in the extensions of request and response as a
    /// [`WouldRefuse`](super::WouldRefuse). It is never refused, never waits for others, and waits for
    /// the backend's answer for 100 ms at the most; for none where the backend is known to be away.
    /// (A key or limit of your own that must be looked up is waited for as ever.) A permit that is
    /// lost cuts nothing off.
    /// A handler that takes the `Permit` finds one in any case; it holds nothing if none was free.
    ///
    /// # What the figures mean
    ///
    /// With a wait timeout of zero, `full` is how many would have been refused. With a longer one it
    /// is how many would have had to wait, *at least*: in force those would have had permits later
    /// on, and so more would have found none free. How many of them would have waited in vain cannot
    /// be known from this.
    ///
    /// What passes without a permit is not counted as in use: `in_use` never exceeds the limit,
    /// though more may be in flight. And the permits are real. A layer of the same name that is in
    /// force, in this process or another, has so many fewer; what it refuses then is refused. So try
    /// a limit under a name of its own, or in the whole fleet together.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// # let semaphore = Semaphore::in_memory();
    /// let layer = ConcurrencyLimitLayer::builder(&semaphore, "api").limit(100).shadow(true).build()?;
    /// // Some days later:
    /// if let Some(seen) = layer.shadow_counts() {
    ///     println!("{} of {} would have had to wait", seen.full, seen.full + seen.passed);
    /// }
    /// # Ok(()) }
    /// ```
    pub const fn shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self
    }

    /// The layer.
    ///
    /// # Errors
    ///
    /// If no limit was set, or a value is out of its range.
    pub fn build(self) -> Result<ConcurrencyLimitLayer, ConfigError> {
        let Self { name, full_status, retry_after, .. } = &self;
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(allowed) {
            return Err(ConfigError::new(format!(
                "layer name: {name:?} cannot be used; allowed: 1 to {NAME_MAX} of A-Z a-z 0-9 . _ -"
            )));
        }
        if !full_status.is_client_error() && !full_status.is_server_error() {
            return Err(ConfigError::new(format!(
                "full status: {full_status} does not refuse anything; allowed: 400 to 599"
            )));
        }
        if let Some(MissingKey::Reject(status)) = self.missing_key
            && !status.is_client_error()
            && !status.is_server_error()
        {
            return Err(ConfigError::new(format!(
                "missing key: {status} does not refuse anything; allowed: 400 to 599"
            )));
        }
        if *retry_after > RETRY_AFTER_MAX {
            return Err(ConfigError::new(format!(
                "retry after: {retry_after:?} is too long; allowed: 0 to {RETRY_AFTER_MAX:?}"
            )));
        }
        let Some(limit) = self.limit else {
            return Err(ConfigError::new(
                "limit: not set; allowed: a number of permits, `Limit::Unlimited`, or a closure",
            ));
        };
        let fixed = match limit {
            LimitSource::Fixed(limit) => Some(limit),
            _ => None,
        };
        self.fair.validate(self.headroom, fixed, self.tenant_labels.is_some())?;
        if self.tenant_labels.is_some() && !self.key_labels.is_none() {
            return Err(ConfigError::new(
                "tenant_labels: set beside key_labels; allowed: one of them",
            ));
        }
        let problem = Problem { rate_limit_fields: self.rate_limit_fields };
        let policy = self.policy.build()?;
        // What only would have been is not mixed with what was.
        let metered = if self.shadow { format!("shadow:{}", self.name) } else { self.name.clone() };
        let settings = Settings {
            meter: match &self.tenant_labels {
                Some(labels) => labels.meter("tenant", &metered, &policy)?,
                None => self.key_labels.meter("key", &metered, &policy)?,
            },
            is_metered_by_tenant: self.tenant_labels.is_some(),
            policy,
            semaphore: self.semaphore,
            full_name: Name::new(&self.name),
            name: self.name.into(),
            key: self.key,
            missing_key: self.missing_key,
            wait_timeout: self.wait_timeout,
            client_timeout: self.client_timeout,
            limit,
            fair: Some(self.fair).filter(Fair::is_set),
            skip: self.skip,
            hold_until: self.hold_until,
            on_lost: if self.shadow { OnLost::Continue } else { self.on_lost },
            full_status: self.full_status,
            retry_after: self.retry_after,
            response: self.response.unwrap_or_else(|| Arc::new(problem)),
            grpc_status: self.grpc_status,
            shadow: self.shadow.then(Shadow::default),
        };
        Ok(ConcurrencyLimitLayer { settings: Arc::new(settings) })
    }
}

impl fmt::Debug for ConcurrencyLimitBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyLimitBuilder").field("name", &self.name).finish_non_exhaustive()
    }
}
