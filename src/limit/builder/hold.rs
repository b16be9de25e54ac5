//! How long requests hold their permits.

use std::time::Duration;

use super::ConcurrencyLimitBuilder;
use crate::limit::settings::{HoldUntil, OnLost};
use crate::policy::OnUnavailable;
#[cfg(doc)]
use crate::policy::PolicyBuilder;

/// # Holding
impl ConcurrencyLimitBuilder {
    /// Sets how long a request holds its permit. The default is [`HoldUntil::BodyEnd`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::HoldUntil;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // Server-sent events cost nothing once they flow.
    /// ConcurrencyLimitLayer::builder(semaphore, "events")
    ///     .limit(100)
    ///     .hold_until(HoldUntil::ResponseHead)
    ///     .build()
    /// # }
    /// ```
    pub const fn hold_until(mut self, hold_until: HoldUntil) -> Self {
        self.config.hold_until = hold_until;
        self
    }

    /// Sets how long a permit stays taken after its request was broken off: the client left, the response body
    /// failed or was dropped before its end, the inner service returned an error, or it responded with 408 or 504.
    /// The default is zero. See [`PolicyBuilder::linger`].
    ///
    /// A handler that gives up a call that it has begun, and responds with another status, calls
    /// [`Permit::break_off`](crate::Permit::break_off): with 400, because the request's body broke off while it was passed
    /// on, or with 502.
    ///
    /// The permit of an upgraded connection lingers after its end in any case, because a WebSocket that its client closed
    /// cannot be told from one that broke. A handler that keeps the permit can [release](crate::Permit::release) it.
    ///
    /// For quotas that somebody else counts: an LLM provider notices only after a while that a client is gone, and
    /// counts its request until then. Measure that time, and choose a longer one.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
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

    /// Sets whether a permit that is given back goes straight to the next request of this process, without a call to the
    /// backend, as long as this process knows that no other one waits. Use it for names that are hot in each process, with
    /// permits that are held for milliseconds. It has no effect in shadow.
    ///
    /// The default is `false`. `build` refuses it together with a wait timeout or a queue of zero. See
    /// [`PolicyBuilder::reuse`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "database").limit(20).reuse(true).build()
    /// # }
    /// ```
    pub const fn reuse(mut self, reuse: bool) -> Self {
        self.policy = self.policy.reuse(reuse);
        self
    }

    /// Sets how long a permit outlives a process that dies. The default is 10 s. See [`PolicyBuilder::lease`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "sockets").limit(100).lease(Duration::from_secs(3)).build()
    /// # }
    /// ```
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.policy = self.policy.lease(lease);
        self
    }

    /// Sets what happens to a request whose permit is lost. The default is [`OnLost::Abort`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::OnLost;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "downloads").limit(100).on_lost(OnLost::Continue).build()
    /// # }
    /// ```
    pub const fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.config.on_lost = on_lost;
        self
    }

    /// Sets what happens to a request while the backend is unavailable. The default is
    /// [`OnUnavailable::Refuse`]: it is rejected with 503. See [`PolicyBuilder::on_unavailable`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::OnUnavailable;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // Five replicas share ten permits: without Redis, each goes by two of its own.
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .on_unavailable(OnUnavailable::Local(2))
    ///     .build()
    /// # }
    /// ```
    pub const fn on_unavailable(mut self, on_unavailable: OnUnavailable) -> Self {
        self.policy = self.policy.on_unavailable(on_unavailable);
        self
    }
}
