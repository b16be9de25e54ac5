//! Several limits in one step.

use std::sync::Arc;

use http::request::Parts;

use super::ConcurrencyLimitBuilder;
#[cfg(doc)]
use crate::ask::Ask;
use crate::limit::further::{Cap, FurtherLimit};
use crate::limit::key::KeyExtractor;
use crate::name::Name;
use crate::policy::Limit;

/// # Several limits in one step
///
/// A request can count under the limit of its key, its tenant's cap, and up to three further limits: of its route, its
/// model, its region. It gets a permit of each in one step and one round trip, or waits and holds none.
///
/// ```
/// use http::request::Parts;
/// use tower_semaphore::limit::HeaderKey;
/// use tower_semaphore::{ConcurrencyLimitLayer, Name, Semaphore};
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// # let semaphore = Semaphore::in_memory();
/// let layer = ConcurrencyLimitLayer::builder(&semaphore, "llm")
///     .limit(50)
///     .fair_by(HeaderKey::from_static("x-tenant"))
///     .each(5)
///     .also("route", |parts: &Parts| Some(parts.uri.path().to_owned()), 20)
///     .also_by("model", HeaderKey::from_static("x-model"), |model: &Name, _: &Parts| match model.as_str() {
///         "opus" => 10,
///         _ => 30,
///     })
///     .build()?;
/// # Ok(()) }
/// ```
impl ConcurrencyLimitBuilder {
    /// Adds a limit beside that of the key: of all requests of a key that have the same `value`, such as the same route, no
    /// more than `cap` are in flight, whoever's they are. See [`Ask::also`] for who is served when.
    ///
    /// A request for which `value` finds none does not count under this limit. A request that a full limit keeps back
    /// delays none that does not need it, not even of the same tenant. If the layer lets no request wait, a request
    /// is rejected that finds one of its limits full; the response names the limit: `violated-policies: ["llm/route"]`.
    /// How long such a request will wait is not estimated: [`refuse_hopeless`](Self::refuse_hopeless) has no effect on it.
    ///
    /// With [`Limit::Unlimited`] as the limit of the layer, only the further limits and the tenant's cap count.
    ///
    /// # Introducing it
    ///
    /// Processes of a version that knows no further limits must not share a key with others that have some. First give all
    /// processes the new version, then the first of them such a limit.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "llm")
    ///     .limit(50)
    ///     .also("model", HeaderKey::from_static("x-model"), 20)
    ///     .build()
    /// # }
    /// ```
    pub fn also(
        mut self,
        name: impl Into<String>,
        value: impl KeyExtractor,
        cap: impl Into<Limit>,
    ) -> Self {
        let (name, value) = (name.into(), Arc::new(value));
        let cap = Cap::Fixed(cap.into());
        self.config.fair.further.push(FurtherLimit { name, value, cap });
        self
    }

    /// Adds a limit beside that of the key whose cap depends on the value and the request. See [`also`](Self::also). With 0
    /// a request is rejected; with [`Limit::Unlimited`] it does not count under this limit.
    ///
    /// Called for each request in the task that serves it: it must not block.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use http::request::Parts;
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "llm")
    ///     .limit(50)
    ///     .also_by("model", HeaderKey::from_static("x-model"), |model: &Name, _: &Parts| {
    ///         if model.as_str() == "opus" { 10 } else { 30 }
    ///     })
    ///     .build()
    /// # }
    /// ```
    pub fn also_by<F, L>(
        mut self,
        name: impl Into<String>,
        value: impl KeyExtractor,
        cap: F,
    ) -> Self
    where
        F: Fn(&Name, &Parts) -> L + Send + Sync + 'static,
        L: Into<Limit>,
    {
        let (name, value) = (name.into(), Arc::new(value));
        let cap = Cap::Sync(Arc::new(move |value, parts| cap(value, parts).into()));
        self.config.fair.further.push(FurtherLimit { name, value, cap });
        self
    }
}
