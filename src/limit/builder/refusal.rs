//! How requests are rejected.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::ConcurrencyLimitBuilder;
#[cfg(doc)]
use crate::limit::Refusal;
use crate::limit::refusal_response::RefusalResponse;

/// # Rejecting
impl ConcurrencyLimitBuilder {
    /// Sets the status of a response to a request that found the semaphore full. The default is 429, which blames
    /// the caller; 503 fits a pool that all callers share. It must be a client or server error. A tenant at its own
    /// [cap](Self::each) is answered with 429 instead of a server error.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::StatusCode;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "database")
    ///     .limit(50)
    ///     .full_status(StatusCode::SERVICE_UNAVAILABLE)
    ///     .build()
    /// # }
    /// ```
    pub const fn full_status(mut self, status: StatusCode) -> Self {
        self.config.full_status = status;
        self
    }

    /// Sets the least pause in `Retry-After`: whole seconds, at least 1, at random between this and twice this. The default
    /// is 1 s; at most a day.
    ///
    /// The pause is longer where the queue is known to need longer: the
    /// [expected wait](crate::Rejected::expected_wait) less half of the time that the request may wait, and at random
    /// up to a tenth more. With a [rate](Self::rate), it is as long as that needs at least for those who wait, and up to a
    /// tenth more: with ten starts a second and 600 waiting requests, a minute.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use std::time::Duration;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "reports").limit(2).retry_after(Duration::from_secs(30)).build()
    /// # }
    /// ```
    pub const fn retry_after(mut self, pause: Duration) -> Self {
        self.config.retry_after = pause;
        self
    }

    /// Sets whether the default response has the headers `RateLimit-Policy` and `RateLimit`
    /// (draft-ietf-httpapi-ratelimit-headers-11). The default is `true`.
    ///
    /// The first has the limit, the rate and the cap of a tenant, as far as there are any. The second names the one that
    /// kept the request back, and is omitted if none did: without a limit, the process's own share in an outage.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "internal").limit(10).rate_limit_fields(false).build()
    /// # }
    /// ```
    pub const fn rate_limit_fields(mut self, send: bool) -> Self {
        self.config.rate_limit_fields = send;
        self
    }

    /// Sets whether a gRPC call (a POST with a content type of gRPC over HTTP/2, or of gRPC-Web) is rejected with a gRPC
    /// status. The default is `true`.
    ///
    /// The status is `RESOURCE_EXHAUSTED` for a full semaphore, or `UNAVAILABLE` if
    /// [`full_status`](Self::full_status) is a server error; and `UNAVAILABLE` for an unavailable backend. It comes
    /// with `grpc-retry-pushback-ms`. A stream whose permit is lost ends with `UNAVAILABLE`.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // A proxy that translates HTTP statuses itself.
    /// ConcurrencyLimitLayer::builder(semaphore, "upstream").limit(10).grpc_status(false).build()
    /// # }
    /// ```
    pub const fn grpc_status(mut self, send: bool) -> Self {
        self.config.grpc_status = send;
        self
    }

    /// Sets the response to a rejected request, in place of the default one, a problem document (RFC 9457).
    ///
    /// [`Refusal::response`] makes the default one, for those that the closure leaves alone. A response of the closure
    /// with 200 gets the refusal's status; [`ExactStatus`](crate::limit::ExactStatus) keeps it.
    ///
    /// A gRPC call ends with its status all the same, unless [`grpc_status`](Self::grpc_status) is off. The
    /// [`Refusal`] is in the response's extensions in any case.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::Response;
    /// use tower_semaphore::limit::Refusal;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .refusal(|refusal: &Refusal| {
    ///         let message = format!("{{\"error\":{{\"type\":\"{}\"}}}}", refusal.reason.as_str());
    ///         // Its status is the refusal's, as none is set here.
    ///         Response::new(message)
    ///     })
    ///     .build()
    /// # }
    /// ```
    pub fn refusal(mut self, response: impl RefusalResponse) -> Self {
        self.config.response = Some(Arc::new(response));
        self
    }
}
