//! How a layer is set up.

mod fair;
mod hold;
mod once;
mod refusal;
mod wait;

use std::any::{type_name, type_name_of_val};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http::request::Parts;

use self::once::Once;
use super::cached::CachedLimit;
use super::client_timeout::ClientTimeout;
use super::fair::{EachSource, Fair};
use super::key::{GlobalKey, KeyExtractor, MissingKey};
use super::labels::KeyLabels;
use super::layer::ConcurrencyLimitLayer;
use super::refusal_response::RefusalResponse;
use super::required::{Part, Required};
use super::settings::{HoldUntil, KeySource, LimitSource, OnLost, Settings, Skip, WaitTimeoutOf};
use super::shadow::Shadow;
use crate::error::ConfigError;
use crate::name::Name;
use crate::policy::{Limit, Policy, PolicyBuilder};
use crate::semaphore::Remembered;
use crate::semaphore::Semaphore;

/// Longest name of a layer, in bytes.
const NAME_MAX: usize = 40;
/// Longest pause that clients are told to make, before jitter.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// Builds a [`ConcurrencyLimitLayer`].
///
/// Made by [`ConcurrencyLimitLayer::builder`]. A limit is required; everything else has a default.
#[must_use = "`build` returns the layer"]
pub struct ConcurrencyLimitBuilder {
    semaphore: Semaphore,
    name: String,
    policy: PolicyBuilder,
    fair: Fair,
    each: Once<EachSource>,
    headroom: u32,
    /// With the type of the extractor.
    key: Once<(KeySource, &'static str)>,
    missing_key: Option<MissingKey>,
    missing_tenant: Option<MissingKey>,
    wait_timeout: Option<Arc<WaitTimeoutOf>>,
    client_timeout: Option<ClientTimeout>,
    limit: Once<LimitSource>,
    skip: Option<Skip>,
    hold_until: HoldUntil,
    on_lost: OnLost,
    full_status: StatusCode,
    retry_after: Duration,
    rate_limit_fields: bool,
    key_labels: KeyLabels,
    tenant_labels: Option<KeyLabels>,
    grpc_status: bool,
    response: Option<Arc<dyn RefusalResponse>>,
    shadow: bool,
}

impl ConcurrencyLimitBuilder {
    pub(super) fn new(semaphore: &Semaphore, name: String) -> Self {
        Self {
            semaphore: semaphore.clone(),
            name,
            policy: Policy::builder(Limit::Unlimited),
            fair: Fair::default(),
            each: Once::new("each"),
            headroom: 0,
            key: Once::new("key"),
            missing_key: None,
            missing_tenant: None,
            wait_timeout: None,
            client_timeout: None,
            limit: Once::new("limit"),
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

    /// Sets the extractor of the key: requests with the same key share the permits of one semaphore.
    ///
    /// The default is [`GlobalKey`], one key for all requests.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::ExtensionKey;
    ///
    /// /// Inserted into the request's extensions by authentication.
    /// #[derive(Clone)]
    /// struct Tenant(String);
    ///
    /// impl AsRef<[u8]> for Tenant {
    ///     fn as_ref(&self) -> &[u8] {
    ///         self.0.as_bytes()
    ///     }
    /// }
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(ExtensionKey::<Tenant>::new())
    ///     .limit(5)
    ///     .build()
    /// # }
    /// ```
    pub fn key(mut self, extractor: impl KeyExtractor) -> Self {
        let kind = type_name_of_val(&extractor);
        self.key.set("key", (KeySource::Sync(Arc::new(extractor)), kind));
        self
    }

    /// Sets an async function that looks the key up; `None` if the request has none.
    ///
    /// The request waits until the future is done: nothing but a timeout outside the layer bounds that. The future
    /// is dropped if the client leaves.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::request::Parts;
    ///
    /// # async fn account_of(token: String) -> Option<String> { Some(token) }
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "account")
    ///     .key_async(|parts: &Parts| {
    ///         // The future cannot borrow from the request.
    ///         let token = parts.headers.get("authorization").cloned();
    ///         async move { account_of(token?.to_str().ok()?.to_owned()).await }
    ///     })
    ///     .limit(5)
    ///     .build()
    /// # }
    /// ```
    pub fn key_async<F, Fut, K>(mut self, extractor: F) -> Self
    where
        F: Fn(&Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<K>> + Send + 'static,
        K: Into<Name>,
    {
        let source = KeySource::Async(Arc::new(move |parts| {
            let key = extractor(parts);
            Box::pin(async move { key.await.map(Into::into) })
        }));
        self.key.set("key_async", (source, type_name::<F>()));
        self
    }

    /// Sets what happens to a request without a key.
    ///
    /// By default the [extractor](KeyExtractor::missing_key) decides: most reject the request with 400,
    /// `MatchedPathKey` lets it pass. The response names the header that the request lacks, if the key is taken from
    /// one.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::StatusCode;
    /// use tower_semaphore::limit::{HeaderKey, MissingKey};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(HeaderKey::from_static("x-tenant"))
    ///     .on_missing_key(MissingKey::Reject(StatusCode::UNAUTHORIZED))
    ///     .limit(5)
    ///     .build()
    /// # }
    /// ```
    pub const fn on_missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = Some(missing_key);
        self
    }

    /// Sets the number of permits of each key. With 0, every request is rejected.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai").limit(10).build()
    /// # }
    /// ```
    pub fn limit(mut self, limit: impl Into<Limit>) -> Self {
        self.limit.set("limit", LimitSource::Fixed(limit.into()));
        self
    }

    /// Sets the number of permits by key and request.
    ///
    /// Called for each request in the task that serves it: it must not block. Requests of one key should have one
    /// limit: each is judged by its own, and waits behind those that came before it, whatever their limit.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use http::request::Parts;
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// /// Inserted into the request's extensions by authentication.
    /// #[derive(Clone, Copy)]
    /// enum Plan { Free, Paid }
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(HeaderKey::from_static("x-tenant"))
    ///     .limit_by(|_: &Name, parts: &Parts| match parts.extensions.get::<Plan>() {
    ///         Some(Plan::Paid) => 20,
    ///         Some(Plan::Free) | None => 2,
    ///     })
    ///     .build()
    /// # }
    /// ```
    pub fn limit_by<F, L>(mut self, limit: F) -> Self
    where
        F: Fn(&Name, &Parts) -> L + Send + Sync + 'static,
        L: Into<Limit>,
    {
        let limit = LimitSource::Sync(Arc::new(move |key, parts| limit(key, parts).into()));
        self.limit.set("limit_by", limit);
        self
    }

    /// Sets an async function that looks up the number of permits of a key.
    ///
    /// Called for each request, which waits for it. [`limit_cached`](Self::limit_cached) caches the answers, and
    /// bounds the time that a lookup may take.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use http::request::Parts;
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # async fn permits_of(tenant: Name) -> u32 { 5 }
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(HeaderKey::from_static("x-tenant"))
    ///     .limit_by_async(|tenant: &Name, _: &Parts| permits_of(tenant.clone()))
    ///     .build()
    /// # }
    /// ```
    pub fn limit_by_async<F, Fut, L>(mut self, limit: F) -> Self
    where
        F: Fn(&Name, &Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = L> + Send + 'static,
        L: Into<Limit>,
    {
        let limit = LimitSource::Async(Arc::new(move |key, parts| {
            let limit = limit(key, parts);
            Box::pin(async move { limit.await.into() })
        }));
        self.limit.set("limit_by_async", limit);
        self
    }

    /// Sets a source of limits by key, with a cache: the plans of tenants in a database, for example.
    ///
    /// A request whose limit is unknown is rejected with 503, unless
    /// [`on_failure`](super::CachedBuilder::on_failure) sets a limit for it.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::{CachedLimit, HeaderKey};
    ///
    /// # fn layer(semaphore: &Semaphore, plans: &CachedLimit) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(HeaderKey::from_static("x-tenant"))
    ///     .limit_cached(plans)
    ///     .build()
    /// # }
    /// ```
    pub fn limit_cached(mut self, limits: &CachedLimit) -> Self {
        self.limit.set("limit_cached", LimitSource::Cached(limits.clone()));
        self
    }

    /// Sets which requests pass without a permit, such as health checks.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "api")
    ///     .limit(100)
    ///     .skip(|parts| parts.uri.path() == "/health")
    ///     .build()
    /// # }
    /// ```
    pub fn skip(mut self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.skip = Some(Arc::new(skip));
        self
    }

    /// Sets which keys the [metrics](crate::metrics) tell apart by a label `key`. The default is none, without
    /// such a label.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::{HeaderKey, KeyLabels};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(HeaderKey::from_static("x-tenant"))
    ///     .limit(5)
    ///     .key_labels(KeyLabels::listed(["acme", "globex"]))
    ///     .build()
    /// # }
    /// ```
    #[cfg(feature = "metrics")]
    pub fn key_labels(mut self, labels: KeyLabels) -> Self {
        self.key_labels = labels;
        self
    }

    /// Sets whether the layer only counts what it would have rejected: to try a limit on real traffic before
    /// enforcing it. The default is `false`.
    ///
    /// In shadow a request takes a permit if one is free, so that all processes count together and
    /// [`inspect`](Semaphore::inspect) shows them. If none is free, the request passes all the same and is counted
    /// by its reason: in [`shadow_counts`](ConcurrencyLimitLayer::shadow_counts), in `tracing` at debug, and in the
    /// extensions of request and response as a [`WouldRefuse`](super::WouldRefuse). A request is never rejected and
    /// never waits for others; it waits for the backend's answer for 100 ms at most, and not at all while the
    /// backend is known to be unavailable. (A key or limit that is looked up is waited for as usual.) A lost permit
    /// aborts nothing. A handler that takes the `Permit` always finds one; if none was free, it holds nothing.
    ///
    /// # What the counts mean
    ///
    /// With a wait timeout of zero, `full` is the number of requests that would have been rejected. With a longer
    /// one it is a lower bound of those that would have had to wait: when enforced, these hold their permits later,
    /// so more requests find none free. How many of them would have waited in vain cannot be told from it.
    ///
    /// What passes without a permit is not counted as in use, so `in_use` never exceeds the limit, though more
    /// requests may be in flight. The permits are real: an enforcing layer of the same name, in this process or
    /// another, has fewer left, and rejects requests because of them. Try a limit under a name of its own, or in
    /// the whole fleet at once.
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

    /// Builds the layer.
    ///
    /// # Errors
    ///
    /// If no limit is set, or it is set twice; if a value is out of its range, or has no effect beside the others.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
    /// let semaphore = Semaphore::in_memory();
    /// let error = ConcurrencyLimitLayer::builder(&semaphore, "api").build().unwrap_err();
    /// assert!(error.to_string().starts_with("limit is not set"));
    /// ```
    pub fn build(mut self) -> Result<ConcurrencyLimitLayer, ConfigError> {
        let Self { name, full_status, retry_after, .. } = &self;
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(allowed) {
            return Err(ConfigError::new(format!(
                "layer name is {name:?}; expected 1 to {NAME_MAX} of A-Z a-z 0-9 . _ -"
            )));
        }
        if !full_status.is_client_error() && !full_status.is_server_error() {
            return Err(ConfigError::new(format!(
                "full status is {full_status}; expected 400 to 599"
            )));
        }
        for (what, missing) in
            [("missing key", self.missing_key), ("missing tenant", self.missing_tenant)]
        {
            if let Some(MissingKey::Reject(status)) = missing
                && !status.is_client_error()
                && !status.is_server_error()
            {
                return Err(ConfigError::new(format!(
                    "status for a {what} is {status}; expected 400 to 599"
                )));
            }
        }
        if *retry_after > RETRY_AFTER_MAX {
            return Err(ConfigError::new(format!(
                "retry after is {retry_after:?}; expected 0 to {RETRY_AFTER_MAX:?}"
            )));
        }
        let (key, key_extractor) = match (self.key.take()?, self.missing_key) {
            (Some(key), _) => key,
            (None, None) => (KeySource::Sync(Arc::new(GlobalKey)), type_name::<GlobalKey>()),
            (None, Some(_)) => {
                return Err(ConfigError::new(
                    "on_missing_key is set without a key that could be missing; set key, too",
                ));
            }
        };
        let Some(limit) = self.limit.take()? else {
            return Err(ConfigError::new(
                "limit is not set; expected a number of permits, `Limit::Unlimited`, or a closure",
            ));
        };
        let fixed = match limit {
            LimitSource::Fixed(limit) => Some(limit),
            _ => None,
        };
        self.fair.each = self.each.take()?;
        self.fair.validate(self.headroom, fixed, self.tenant_labels.is_some())?;
        match (&mut self.fair.tenant, self.missing_tenant) {
            (Some(tenant), missing) => tenant.required.missing = missing,
            (None, Some(_)) => {
                return Err(ConfigError::new(
                    "on_missing_tenant is set without a tenant to apply it to; set fair_by, too",
                ));
            }
            (None, None) => {}
        }
        if self.tenant_labels.is_some() && !self.key_labels.is_none() {
            return Err(ConfigError::new(
                "tenant_labels is set beside key_labels; set one of them",
            ));
        }
        let policy = self.policy.limit(fixed.unwrap_or(Limit::Unlimited)).build()?;
        // One that goes by the request is no value of a gauge.
        let wait_timeout = self.wait_timeout.is_none().then_some(policy.wait_timeout);
        // A layer in shadow has series of its own, apart from those of an enforcing one.
        let metered = if self.shadow { format!("shadow:{}", self.name) } else { self.name.clone() };
        let settings = Settings {
            meter: match &self.tenant_labels {
                Some(labels) => labels.meter("tenant", &metered, wait_timeout)?,
                None => self.key_labels.meter("key", &metered, wait_timeout)?,
            },
            is_metered_by_tenant: self.tenant_labels.is_some(),
            policy,
            semaphore: self.semaphore,
            full_name: Name::new(&self.name),
            remembered: Remembered::default(),
            name: self.name.into(),
            key,
            key_required: Required::new(Part::Key, self.missing_key, key_extractor),
            wait_timeout: self.wait_timeout,
            client_timeout: self.client_timeout,
            limit,
            fair: Some(self.fair).filter(Fair::is_set),
            skip: self.skip,
            hold_until: self.hold_until,
            on_lost: if self.shadow { OnLost::Continue } else { self.on_lost },
            full_status: self.full_status,
            retry_after: self.retry_after,
            response: self.response,
            rate_limit_fields: self.rate_limit_fields,
            grpc_status: self.grpc_status,
            shadow: self.shadow.then(Shadow::default),
        };
        Ok(ConcurrencyLimitLayer::new(settings))
    }
}

impl fmt::Debug for ConcurrencyLimitBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyLimitBuilder").field("name", &self.name).finish_non_exhaustive()
    }
}
