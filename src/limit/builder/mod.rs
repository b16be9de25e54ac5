//! How a layer is set up.

mod budgets;
mod build;
mod fair;
mod further;
mod hold;
mod key;
mod limit;
mod once;
mod pause;
mod refusal;
mod wait;

pub(super) use self::build::RETRY_AFTER_MAX;

use std::fmt;
use std::sync::Arc;

use http::request::Parts;
use tower_layer::Layer;

use self::once::Once;
use super::estimates::{CountIn, Says};
use super::fair::EachSource;
use super::key::MissingKey;
use super::labels::KeyLabels;
use super::layer::ConcurrencyLimitLayer;
use super::settings::{Config, KeySource, LimitSource};
use crate::policy::{Limit, Policy, PolicyBuilder};
use crate::semaphore::Semaphore;

/// Builds a [`ConcurrencyLimitLayer`].
///
/// Made by [`ConcurrencyLimitLayer::builder`]. A limit is required; everything else has a default.
#[must_use = "`build` returns the layer"]
pub struct ConcurrencyLimitBuilder {
    name: String,
    config: Config,
    policy: PolicyBuilder,
    each: Once<EachSource>,
    headroom: u32,
    /// With the type of the extractor.
    key: Once<(KeySource, &'static str)>,
    missing_key: Option<MissingKey>,
    missing_tenant: Option<MissingKey>,
    limit: Once<LimitSource>,
    key_labels: KeyLabels,
    tenant_labels: Option<KeyLabels>,
    /// Of responses, for the budgets with these names.
    readers: Vec<(String, Says, Arc<CountIn>)>,
    shadow: bool,
}

impl ConcurrencyLimitLayer {
    /// Builds a layer that takes its permits from this semaphore.
    ///
    /// Permits are taken from the semaphore `<name>`, or `<name>:<key>` where the layer has a key, and are shared
    /// with `semaphore.acquire(name, ...)` and with layers of the same name. Clients see the name in rejections.
    /// Allowed are 1 to 40 of `A-Z a-z 0-9 . _ -`.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn main() -> Result<(), ConfigError> {
    /// let semaphore = Semaphore::in_memory();
    /// let layer = ConcurrencyLimitLayer::builder(&semaphore, "openai").limit(10).build()?;
    /// # Ok(()) }
    /// ```
    pub fn builder(semaphore: &Semaphore, name: impl Into<String>) -> ConcurrencyLimitBuilder {
        ConcurrencyLimitBuilder::new(semaphore, name.into())
    }
}

impl ConcurrencyLimitBuilder {
    fn new(semaphore: &Semaphore, name: String) -> Self {
        Self {
            name,
            config: Config::new(semaphore.clone()),
            policy: Policy::builder(Limit::Unlimited),
            each: Once::new("each"),
            headroom: 0,
            key: Once::new("key"),
            missing_key: None,
            missing_tenant: None,
            limit: Once::new("limit"),
            key_labels: KeyLabels::default(),
            tenant_labels: None,
            readers: Vec::new(),
            shadow: false,
        }
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
        self.config.skip = Some(Arc::new(skip));
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
}

/// Implemented by nothing, so that the compiler can say what is missing where a builder is used as a layer.
#[diagnostic::on_unimplemented(
    message = "`ConcurrencyLimitBuilder` is not a layer yet: call `build()`",
    label = "the layer is not built: `build()` checks the settings and returns it"
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

impl fmt::Debug for ConcurrencyLimitBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyLimitBuilder").field("name", &self.name).finish_non_exhaustive()
    }
}
