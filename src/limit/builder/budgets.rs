//! Budgets, such as tokens a minute.

use std::sync::Arc;

use http::request::Parts;

use super::ConcurrencyLimitBuilder;
#[cfg(doc)]
use crate::ask::Ask;
use crate::budget::Budget;
use crate::feedback::Head;
use crate::limit::estimates::{LayerBudget, Says};
#[cfg(doc)]
use crate::semaphore::Permit;

/// # Budgets
///
/// A provider that counts tokens has a [`Budget`]: each request takes what it is estimated to use, together with its permit,
/// and what it truly used replaces that once it is over.
///
/// ```
/// use std::time::Duration;
/// use http::HeaderName;
/// use http::request::Parts;
/// use tower_semaphore::{Budget, ConcurrencyLimitLayer, Semaphore, feedback};
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// # let semaphore = Semaphore::in_memory();
/// let minute = Duration::from_secs(60);
/// let layer = ConcurrencyLimitLayer::builder(&semaphore, "openai")
///     .limit(30)
///     .rate(600, minute)
///     .budget(Budget::new("tokens", 80_000, minute)?, |parts: &Parts| {
///         let tokens = parts.headers.get("x-tokens").and_then(|value| value.to_str().ok());
///         let tokens: Option<u64> = tokens.and_then(|tokens| tokens.parse().ok());
///         tokens.unwrap_or(4_000).clamp(500, 20_000)
///     })
///     .settle_by("tokens", feedback::header_number(HeaderName::from_static("x-used-tokens")))
///     .left_by("tokens", feedback::header_number(HeaderName::from_static("x-ratelimit-remaining-tokens")))
///     .build()?;
/// # Ok(()) }
/// ```
impl ConcurrencyLimitBuilder {
    /// Has each request of a key take of a budget what `estimate` says: see [`Ask::estimate`]. If the layer lets no request
    /// wait, a request is rejected that finds too little of it; the response names the budget:
    /// `violated-policies: ["openai/tokens"]`. An estimate above the budget's [burst](Budget::burst) is rejected with 400.
    ///
    /// Up to two budgets with different names. Each key has budgets of its own, and with [`Budget::each`] each tenant:
    /// where a tenant's is used up, only its own requests wait. Cannot be combined with [`reuse`](Self::reuse).
    ///
    /// What a request was estimated to use stands if its client leaves, the inner service fails, or the response says nothing.
    /// A request that a layer further in rejected used nothing.
    ///
    /// Take the estimate from what you know of the request. A client that can choose it can pass with 0, or keep everybody
    /// waiting for a large one: bound it, and give [each](Budget::each) tenant a budget of its own.
    ///
    /// `estimate` is called for each request in the task that serves it: it must not block. It sees no body; put what it
    /// needs into a header or an extension. A handler settles what was used by [`Permit::settle`].
    ///
    /// # Introducing it
    ///
    /// Processes of a version that knows no budgets must not share a key with others that have some: first give all
    /// processes the new version, then the first of them a budget.
    ///
    /// ```
    /// # use tower_semaphore::{Budget, ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// let bytes = Budget::new("bytes", 50_000_000, Duration::from_secs(60))?;
    /// ConcurrencyLimitLayer::builder(semaphore, "uploads")
    ///     .limit(30)
    ///     .budget(bytes, |parts: &http::request::Parts| {
    ///         let length = parts.headers.get("content-length").and_then(|value| value.to_str().ok());
    ///         length.and_then(|length| length.parse().ok()).unwrap_or(1_000_000)
    ///     })
    ///     .build()
    /// # }
    /// ```
    pub fn budget(
        mut self,
        budget: Budget,
        estimate: impl Fn(&Parts) -> u64 + Send + Sync + 'static,
    ) -> Self {
        self.config.fair.budgets.push(LayerBudget::new(budget, Arc::new(estimate)));
        self
    }

    /// Sets the reader of what a response says that its request used of a budget, in the budget's units: see
    /// [`Permit::settle`]. Where it finds nothing, the estimate stands, or what the handler settled.
    ///
    /// It sees the head of the response alone. Most providers say in the body what was used, at the end of a stream: read it
    /// there, and call [`Permit::settle`] on the permit of the request.
    ///
    /// ```
    /// # use tower_semaphore::{Budget, ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
    /// use http::HeaderName;
    /// use tower_semaphore::feedback::{self, Head};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(30)
    ///     .budget(Budget::new("tokens", 80_000, Duration::from_secs(60))?, |_| 4_000)
    ///     .settle_by("tokens", |head: Head<'_>| match head.status.as_u16() {
    ///         // This upstream counts no request that it refuses.
    ///         400..=499 => Some(0),
    ///         _ => feedback::header_number(HeaderName::from_static("x-used-tokens"))(head),
    ///     })
    ///     .build()
    /// # }
    /// ```
    pub fn settle_by(
        mut self,
        budget: impl Into<String>,
        used: impl Fn(Head<'_>) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        self.readers.push((budget.into(), Says::Used, Arc::new(used)));
        self
    }

    /// Sets the reader of how much of a budget is left by its provider, in the budget's units, such as that of
    /// `x-ratelimit-remaining-tokens`: see [`Permit::budget_left`]. It can only lower what is left, once the permit is given
    /// back.
    ///
    /// ```
    /// # use tower_semaphore::{Budget, ConcurrencyLimitLayer, ConfigError, Semaphore, feedback};
    /// use std::time::Duration;
    /// use http::HeaderName;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(30)
    ///     .budget(Budget::new("tokens", 80_000, Duration::from_secs(60))?, |_| 4_000)
    ///     .left_by("tokens", feedback::header_number(HeaderName::from_static("x-ratelimit-remaining-tokens")))
    ///     .build()
    /// # }
    /// ```
    pub fn left_by(
        mut self,
        budget: impl Into<String>,
        left: impl Fn(Head<'_>) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        self.readers.push((budget.into(), Says::Left, Arc::new(left)));
        self
    }
}
