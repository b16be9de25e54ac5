//! How long requests wait, and how many.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;

use super::ConcurrencyLimitBuilder;
use crate::limit::client_timeout::ClientTimeout;
use crate::name::Name;
#[cfg(doc)]
use crate::policy::{Policy, PolicyBuilder};

/// # Waiting
impl ConcurrencyLimitBuilder {
    /// Sets how long a request may wait for a permit. The default is 2 s; with zero, a request that finds no permit
    /// free is rejected at once. See [`PolicyBuilder::wait_timeout`].
    ///
    /// The waits of stacked layers do not add up: see [`WaitBudget`](crate::limit::WaitBudget).
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .wait_timeout(Duration::from_secs(20))
    ///     .build()
    /// # }
    /// ```
    pub const fn wait_timeout(mut self, timeout: Duration) -> Self {
        self.policy = self.policy.wait_timeout(timeout);
        self
    }

    /// Sets how long a request may wait by key and request, in place of [`wait_timeout`](Self::wait_timeout): a
    /// plan may wait longer, for example.
    ///
    /// Called for each request in the task that serves it: it must not block. More than
    /// [`Policy::MAX_WAIT_TIMEOUT`] counts as that. As the layer has no single wait timeout then, its metrics have
    /// no gauge `concurrency_limit.wait_timeout`.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use std::time::Duration;
    /// use http::request::Parts;
    ///
    /// /// Inserted into the request's extensions by authentication.
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
        self.config.wait_timeout = Some(Arc::new(wait_timeout));
        self
    }

    /// Sets the header in which a request says how long its client waits for the response.
    ///
    /// The request does not wait for a permit past that time, in this layer or in those inside it. Counts from when
    /// the request reaches the layer. A header that is missing or cannot be read changes nothing. The call itself
    /// is not bounded by it: that is for a timeout outside the layer, see
    /// [`WaitBudget`](crate::limit::WaitBudget#what-it-does-not-bound).
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
        self.config.client_timeout = Some(timeout);
        self
    }

    /// Sets whether a request is rejected at once that is expected to wait more than twice as long as it may, with the
    /// reason [`Hopeless`](crate::limit::RefusalReason::Hopeless). The default is `false`.
    ///
    /// For layers whose requests may wait for different times only, by [`client_timeout`](Self::client_timeout),
    /// [`wait_timeout_by`](Self::wait_timeout_by) or a [`WaitBudget`](crate::limit::WaitBudget). See
    /// [`PolicyBuilder::refuse_hopeless`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
    /// use tower_semaphore::limit::ClientTimeout;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "model")
    ///     .limit(10)
    ///     .wait_timeout(Duration::from_secs(60))
    ///     .client_timeout(ClientTimeout::grpc())
    ///     .refuse_hopeless(true)
    ///     .build()
    /// # }
    /// ```
    pub const fn refuse_hopeless(mut self, refuse: bool) -> Self {
        self.policy = self.policy.refuse_hopeless(refuse);
        self
    }

    /// Sets how many requests of one key may wait in the whole fleet; with [`fair_by`](Self::fair_by), how many of
    /// each tenant. The default is 10,000. See [`PolicyBuilder::max_queue`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai").limit(10).max_queue(50).build()
    /// # }
    /// ```
    pub const fn max_queue(mut self, places: u32) -> Self {
        self.policy = self.policy.max_queue(places);
        self
    }

    /// Sets how many requests of one key may wait in the whole fleet, of all tenants together. The default is 20,000, or
    /// twice [`max_queue`](Self::max_queue) if that is more. See [`PolicyBuilder::max_waiting`].
    ///
    /// ```
    /// # use tower_semaphore::limit::PathKey;
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// # let tenant = PathKey;
    /// let layer = ConcurrencyLimitLayer::builder(semaphore, "openai").limit(10).fair_by(tenant);
    /// layer.max_queue(50).max_waiting(1000).build()
    /// # }
    /// ```
    ///
    /// [`PolicyBuilder::max_waiting`]: crate::PolicyBuilder::max_waiting
    pub const fn max_waiting(mut self, places: u32) -> Self {
        self.policy = self.policy.max_waiting(places);
        self
    }
}
