//! The layer.

use std::sync::Arc;

use tower_layer::Layer;

use super::service::ConcurrencyLimit;
use super::settings::Settings;
use super::shadow::{Shadow, ShadowCounts};

/// A [`Layer`] that takes a permit for each request and holds it as long as the response.
///
/// Clones share everything, so one layer can be added to any number of routes, as Axum's `Router::layer` does.
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

impl ConcurrencyLimitLayer {
    pub(super) fn new(settings: Settings) -> Self {
        Self { settings: Arc::new(settings) }
    }

    /// The counts of a layer in [shadow](super::ConcurrencyLimitBuilder::shadow); `None` for one that enforces its limit.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn main() -> Result<(), ConfigError> {
    /// # let semaphore = Semaphore::in_memory();
    /// let layer = ConcurrencyLimitLayer::builder(&semaphore, "api").limit(100).shadow(true).build()?;
    /// assert_eq!(layer.shadow_counts().map(|counts| counts.full), Some(0));
    /// # Ok(()) }
    /// ```
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
