//! How many permits a key has.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;

use super::ConcurrencyLimitBuilder;
use crate::limit::cached::CachedLimit;
use crate::limit::settings::LimitSource;
use crate::name::Name;
use crate::policy::Limit;
use crate::protocol::Adaptive;

/// # Limits
impl ConcurrencyLimitBuilder {
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

    /// Sets how many requests of each key may start within a time, beside the limit of those in flight: see
    /// [`PolicyBuilder::rate`](crate::PolicyBuilder::rate). A request waits until both allow it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai").limit(10).rate(600, Duration::from_secs(60)).build()
    /// # }
    /// ```
    ///
    /// Without a limit of those in flight, say so:
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Limit, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "mail")
    ///     .limit(Limit::Unlimited)
    ///     .rate(100, Duration::from_secs(1))
    ///     .build()
    /// # }
    /// ```
    pub fn rate(mut self, starts: u32, window: Duration) -> Self {
        self.policy = self.policy.rate(starts, window);
        self
    }

    /// Spreads the [rate](Self::rate) evenly over its window: see
    /// [`PolicyBuilder::smooth`](crate::PolicyBuilder::smooth).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // One each 100 ms.
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .rate(600, Duration::from_secs(60))
    ///     .smooth()
    ///     .build()
    /// # }
    /// ```
    pub fn smooth(mut self) -> Self {
        self.policy = self.policy.smooth();
        self
    }

    /// Lets the limit of each key find itself within a range, by the refusals of the inner service: see
    /// [`PolicyBuilder::adaptive`](crate::PolicyBuilder::adaptive). [`on_response`](Self::on_response) says which responses
    /// are refusals. [`limit`](Self::limit) need not be set; if it is, it must be the maximum. Of the limits that a function
    /// returns, the maximum finds itself, and others stay as they are.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::{Adaptive, feedback};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "search")
    ///     .adaptive(Adaptive::between(5, 100))
    ///     .on_response(feedback::retry_after)
    ///     .build()
    /// # }
    /// ```
    pub const fn adaptive(mut self, range: Adaptive) -> Self {
        self.policy = self.policy.adaptive(range);
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
    /// [`on_failure`](crate::limit::CachedBuilder::on_failure) sets a limit for it.
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
}
