//! What responses say about the requests that come next.

use std::sync::Arc;
use std::time::Duration;

use super::ConcurrencyLimitBuilder;
use crate::feedback::{Feedback, Head};
#[cfg(doc)]
use crate::policy::{Limit, PolicyBuilder};

/// # Pausing
impl ConcurrencyLimitBuilder {
    /// Sets the reader of what the inner service's responses say about the requests that come next: that the upstream
    /// refuses requests for some time. The semaphore of that request is paused until then in the whole fleet; see
    /// [`Permit::feedback`](crate::Permit::feedback). The default reads nothing. [`feedback`](crate::feedback) has
    /// readers for `Retry-After` and for some providers.
    ///
    /// The reader sees the status and the headers of each response, except for rejections by layers further in. The
    /// response is passed on unchanged. Has no effect in shadow, nor where no limit applies: with [`Limit::Unlimited`]
    /// and no rate, a request has nothing to pause.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
    /// use tower_semaphore::feedback::{Feedback, Head};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tiles")
    ///     .limit(30)
    ///     .on_response(|head: Head<'_>| match head.status.as_u16() {
    ///         // This upstream does not say for how long.
    ///         420 => Feedback::Backoff(Duration::from_secs(10)),
    ///         _ => Feedback::None,
    ///     })
    ///     .build()
    /// # }
    /// ```
    pub fn on_response(
        mut self,
        read: impl Fn(Head<'_>) -> Feedback + Send + Sync + 'static,
    ) -> Self {
        self.config.on_response = Some(Arc::new(read));
        self
    }

    /// Sets the longest pause that a response can ask for. The default is 60 s. See [`PolicyBuilder::max_pause`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore, feedback};
    /// use std::time::Duration;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(30)
    ///     .on_response(feedback::openai)
    ///     .max_pause(Duration::from_secs(20))
    ///     .build()
    /// # }
    /// ```
    pub const fn max_pause(mut self, max_pause: Duration) -> Self {
        self.policy = self.policy.max_pause(max_pause);
        self
    }
}
