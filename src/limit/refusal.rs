//! Why a request was rejected.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, StatusCode};

use super::builder::RETRY_AFTER_MAX;
use crate::budget::Budget;
use crate::error::{AcquireError, BackendError, ByTime, RejectReason, Rejected};
use crate::name::Name;

/// Clients that are refused in a pause come back within this part of it after its end: the longer it lasts, the more they
/// are, and the less a second matters to them.
const PAUSE_SPREAD_PART: u32 = 8;
/// The same in seconds, at most: after a pause of an hour nobody waits for minutes more.
const PAUSE_SPREAD_MAX: u64 = 8;

/// Why a request was rejected, and what is known about it.
///
/// It is in the extensions of every response with which a layer rejects a request, for the layers outside it: an
/// access log, for example.
///
/// ```
/// use http::Response;
/// use tower_semaphore::limit::Refusal;
///
/// fn log<B>(response: &Response<B>) {
///     if let Some(refusal) = response.extensions().get::<Refusal>() {
///         tracing::info!(reason = refusal.reason.as_str(), waited = ?refusal.waited(), "{refusal}");
///     }
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Refusal {
    /// The layer's name.
    pub policy: Arc<str>,
    /// The request's key, if it had one. `None`, too, if its permit was lost and the semaphore's name is too long to be
    /// stored as it is.
    pub key: Option<Name>,
    /// The request's tenant, if the layer has [tenants](super::ConcurrencyLimitBuilder::fair_by). `None` if its permit
    /// was lost.
    pub tenant: Option<Name>,
    /// Why it was rejected.
    pub reason: RefusalReason,
    /// The status of the response.
    pub status: StatusCode,
    /// What the semaphore said: the limit, what was in use, how long the request waited. `None` if it was not asked, or did
    /// not answer: the request has no key, its limit is unknown, the backend is unavailable, the semaphore was shut down,
    /// or the permit was lost.
    pub rejected: Option<Rejected>,
    /// When to try again: whole seconds with jitter, at least one, and not before the end of a quarantine, or before a
    /// request can expect its permit in time, where [that is known](Rejected::expected_wait). With a
    /// [rate](super::ConcurrencyLimitBuilder::rate), not before the rate can have let those start that wait. In a
    /// [pause](RefusalReason::UpstreamPause) not before its end, and after that within an eighth of what is left of it,
    /// 1 to 8 s. `None` where the request itself is at fault: it has no key or no tenant, or its cost is too high.
    pub retry_after: Option<Duration>,
    /// The error of the backend, or of the source of the limit, if that is why.
    pub error: Option<BackendError>,
    /// The header that the request lacks, if it has no key or no tenant and that is taken from a header.
    pub missing_header: Option<HeaderName>,
    /// The type of the extractor that found no key or no tenant.
    pub(super) extractor: Option<&'static str>,
    /// How long the request waited for the permit that it lost.
    pub(super) waited_for_lost: Option<Duration>,
    /// Whether the default response has the `RateLimit` headers.
    pub(super) has_rate_limit_fields: bool,
}

/// Why a request was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalReason {
    /// All permits are in use or others wait for them, and the layer lets no request wait.
    Limit,
    /// The tenant has as many permits in use as it may, and the layer lets no request wait.
    TenantLimit,
    /// A [further limit](super::ConcurrencyLimitBuilder::also) of the request is full, and the layer lets no request wait;
    /// [`Rejected::limit_name`] says which.
    FurtherLimit,
    /// The request asks for more permits than it could ever have, or is estimated to use more of a budget: see
    /// [`RejectReason::CostTooHigh`]. The status is always 400.
    CostTooHigh,
    /// As many requests have started lately as the [rate](super::ConcurrencyLimitBuilder::rate) allows, and the layer
    /// lets no request wait. [`retry_after`](field@Refusal::retry_after) is when the next can. In an outage with a
    /// [local share](crate::OnUnavailable::Local), both go by the part of the rate that this process has.
    Rate,
    /// A [budget](super::ConcurrencyLimitBuilder::budget) has too little left for what the request is estimated to use, and
    /// the layer lets no request wait; [`Rejected::limit_name`] says which.
    /// [`retry_after`](field@Refusal::retry_after) is when it has enough.
    Budget,
    /// The queue is full.
    QueueFull,
    /// No permit came free within the wait timeout, or the rate or a budget allowed no start; or there was none for a request whose
    /// [budget](super::WaitBudget) left it no time to wait.
    QueueTimeout,
    /// The request would wait in vain: see [`refuse_hopeless`](super::ConcurrencyLimitBuilder::refuse_hopeless).
    Hopeless,
    /// The backend may have lost data, and grants nothing for one lease: see
    /// [`RejectReason::Quarantine`]. The status is always 503.
    Quarantine,
    /// An operator [paused](crate::Semaphore::pause) the semaphore, or [set](crate::Semaphore::set_limit) its limit to
    /// 0. The status is always 503.
    Paused,
    /// Grants are paused until a time, because the upstream asked for that, or an operator
    /// [did](crate::Semaphore::pause_for): see [`RejectReason::UpstreamPause`]. The status is always 503, and
    /// [`retry_after`](field@Refusal::retry_after) is soon after the end of the pause.
    UpstreamPause,
    /// An operator is [draining](crate::Semaphore::drain) the semaphore. The status is always 503.
    Draining,
    /// An operator removed the request from the queue. The status is always 503.
    Revoked,
    /// The request has no key.
    MissingKey,
    /// The request has no tenant.
    MissingTenant,
    /// The request's limit, or the plan of its tenant, could not be looked up, and there is no fallback. The status is always 503.
    LimitUnknown,
    /// The backend is unavailable. The status is always 503.
    Unavailable,
    /// The semaphore was [shut down](crate::Semaphore::shutdown), or lets no request wait
    /// [any more](crate::Semaphore::stop_waiting): this process ends, and others may have permits. The status is always
    /// 503.
    Closed,
    /// The permit's lease was lost before the inner service responded. The status is always 503.
    LeaseLost,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policy = &*self.policy;
        if let Some(rejected) = &self.rejected {
            return rejected.said_of(Some(policy)).fmt(f);
        }
        match self.reason {
            RefusalReason::MissingKey => {
                write!(f, "the request has no key for {policy}: ")?;
                self.write_what_is_missing(f)
            }
            RefusalReason::MissingTenant => {
                write!(f, "the request has no tenant for {policy}: ")?;
                self.write_what_is_missing(f)
            }
            RefusalReason::LimitUnknown if self.tenant.is_some() => {
                write!(f, "the tenant's plan in {policy} cannot be looked up")
            }
            RefusalReason::LimitUnknown => write!(f, "the limit in {policy} cannot be looked up"),
            RefusalReason::Unavailable => write!(f, "permits of {policy} are unavailable"),
            RefusalReason::Closed => write!(f, "the semaphore of {policy} was shut down"),
            RefusalReason::LeaseLost => write!(f, "the lease of the permit of {policy} was lost"),
            // The semaphore's own, with what it said.
            other => write!(f, "{policy}: {}", other.as_str()),
        }
    }
}

/// The error of a layer that [rejects with errors](super::ConcurrencyLimitLayer::into_error).
impl Error for Refusal {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.as_ref().map(|error| error as _)
    }
}

impl RefusalReason {
    /// The reason as one lower-case word: the member `reason` of problem documents.
    ///
    /// ```
    /// use tower_semaphore::limit::RefusalReason;
    ///
    /// assert_eq!(RefusalReason::QueueTimeout.as_str(), "queue_timeout");
    /// ```
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Limit => RejectReason::Limit.as_str(),
            Self::TenantLimit => RejectReason::TenantLimit.as_str(),
            Self::FurtherLimit => RejectReason::FurtherLimit(0).as_str(),
            Self::CostTooHigh => RejectReason::CostTooHigh.as_str(),
            Self::Rate => RejectReason::Rate.as_str(),
            Self::Budget => RejectReason::Budget(0).as_str(),
            Self::QueueFull => RejectReason::QueueFull.as_str(),
            Self::QueueTimeout => RejectReason::QueueTimeout.as_str(),
            Self::Hopeless => RejectReason::Hopeless.as_str(),
            Self::Quarantine => RejectReason::Quarantine.as_str(),
            Self::Paused => RejectReason::Paused.as_str(),
            Self::UpstreamPause => RejectReason::UpstreamPause.as_str(),
            Self::Draining => RejectReason::Draining.as_str(),
            Self::Revoked => RejectReason::Revoked.as_str(),
            Self::MissingKey => "missing_key",
            Self::MissingTenant => "missing_tenant",
            Self::LimitUnknown => "limit_unknown",
            Self::Unavailable => "unavailable",
            Self::Closed => "closed",
            Self::LeaseLost => "lease_lost",
        }
    }

    const fn of(reason: RejectReason) -> Self {
        match reason {
            RejectReason::TenantLimit => Self::TenantLimit,
            RejectReason::FurtherLimit(_) => Self::FurtherLimit,
            RejectReason::CostTooHigh => Self::CostTooHigh,
            RejectReason::Rate => Self::Rate,
            RejectReason::Budget(_) => Self::Budget,
            RejectReason::QueueFull => Self::QueueFull,
            RejectReason::QueueTimeout => Self::QueueTimeout,
            RejectReason::Hopeless => Self::Hopeless,
            RejectReason::Quarantine => Self::Quarantine,
            RejectReason::Paused => Self::Paused,
            RejectReason::UpstreamPause => Self::UpstreamPause,
            RejectReason::Draining => Self::Draining,
            RejectReason::Revoked => Self::Revoked,
            // `Limit`; there are no others.
            _ => Self::Limit,
        }
    }

    /// Returns the status for what the semaphore said; `full` is that of a full one.
    fn status(self, full: StatusCode, is_of_tenant: bool) -> StatusCode {
        match self {
            Self::CostTooHigh => StatusCode::BAD_REQUEST,
            // The pool that all share has room: it is this caller who has too many.
            _ if self.is_full() && is_of_tenant && full.is_server_error() => {
                StatusCode::TOO_MANY_REQUESTS
            }
            _ if self.is_full() => full,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Whether the semaphore was full, and trying again later makes sense.
    ///
    /// ```
    /// use tower_semaphore::limit::RefusalReason;
    ///
    /// assert!(RefusalReason::QueueTimeout.is_full());
    /// assert!(!RefusalReason::MissingKey.is_full());
    /// ```
    #[must_use]
    pub const fn is_full(self) -> bool {
        matches!(
            self,
            Self::Limit
                | Self::TenantLimit
                | Self::FurtherLimit
                | Self::Rate
                | Self::Budget
                | Self::QueueFull
                | Self::QueueTimeout
                | Self::Hopeless
        )
    }
}

impl Refusal {
    /// Returns how long the request waited in this layer; `None` if it did not get as far as a queue, or that is unknown.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::Refusal;
    ///
    /// fn was_in_vain(refusal: &Refusal) -> bool {
    ///     refusal.waited().is_some_and(|waited| waited > Duration::from_secs(1))
    /// }
    /// ```
    #[must_use]
    pub fn waited(&self) -> Option<Duration> {
        self.rejected.as_ref().map(|rejected| rejected.waited).or(self.waited_for_lost)
    }

    /// What kept the request back that time allows, as far as is known.
    pub(super) fn by_time(&self) -> Option<ByTime<'_>> {
        self.rejected.as_ref()?.by_time()
    }

    /// How soon the reason ends, if that is known.
    pub(super) fn ends_in(&self) -> Option<Duration> {
        self.rejected.as_ref()?.ends_in
    }

    /// How long the queue needs until a request that waits for half of its time, which is the same as the last time, can
    /// expect its permit; if that is known.
    fn queue(&self) -> Option<Duration> {
        let queue = self.rejected.as_ref()?.queue.as_ref()?;
        Some(queue.expected_wait?.saturating_sub(queue.wait_timeout / 2))
    }

    /// How long the rate needs at least for those who wait, from the next start on.
    fn rate_wait(&self) -> Duration {
        let queue = self.rejected.as_ref().and_then(|rejected| rejected.queue.as_ref());
        queue.map_or(Duration::ZERO, |queue| queue.rate_wait)
    }

    /// Whether the cap of the tenant was the reason, as far as is known.
    pub(super) fn is_tenant_full(&self) -> bool {
        self.rejected.as_ref().is_some_and(|rejected| rejected.is_tenant_full)
    }

    pub(super) fn new(policy: &Arc<str>, key: Option<Name>, status: StatusCode) -> Self {
        Self {
            policy: Arc::clone(policy),
            key,
            tenant: None,
            reason: RefusalReason::MissingKey,
            status,
            rejected: None,
            retry_after: None,
            error: None,
            missing_header: None,
            extractor: None,
            waited_for_lost: None,
            has_rate_limit_fields: true,
        }
    }

    fn write_what_is_missing(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.missing_header, self.extractor) {
            (Some(header), _) => write!(f, "it has no {header} header"),
            (None, Some(extractor)) => write!(f, "{extractor} found none"),
            (None, None) => f.write_str("its extractor found none"),
        }
    }

    /// From the error of an acquire; `status` is the one for a full semaphore.
    pub(super) fn from_error(
        policy: &Arc<str>,
        key: Option<Name>,
        status: StatusCode,
        error: AcquireError,
    ) -> Self {
        let mut refusal = Self::new(policy, key, status);
        match error {
            AcquireError::Rejected(rejected) => {
                refusal.reason = RefusalReason::of(rejected.reason);
                let is_of_tenant =
                    rejected.is_tenant_full || rejected.budget().is_some_and(Budget::is_each);
                refusal.status = refusal.reason.status(status, is_of_tenant);
                refusal.rejected = Some(rejected);
            }
            AcquireError::Unavailable(error) => {
                refusal.reason = RefusalReason::Unavailable;
                refusal.status = StatusCode::SERVICE_UNAVAILABLE;
                refusal.error = Some(error);
            }
            AcquireError::Closed => {
                refusal.reason = RefusalReason::Closed;
                refusal.status = StatusCode::SERVICE_UNAVAILABLE;
            }
        }
        refusal
    }

    /// Sets when to try again: between `base` and twice that, so that requests rejected together do not come back
    /// together; later where the queue needs longer.
    pub(super) fn retry_after(mut self, base: Duration) -> Self {
        let queue = self.queue().unwrap_or_default().min(RETRY_AFTER_MAX);
        let rate_wait = self.rate_wait().min(RETRY_AFTER_MAX);
        // Neither before the reason is over, nor before those who wait can have started.
        let least = self.ends_in().unwrap_or_default() + rate_wait;
        let jitter = base.max(queue.max(rate_wait) / 10).mul_f64(fastrand::f64()).as_secs_f64();
        let seconds = if self.reason == RefusalReason::UpstreamPause {
            after_pause(least)
        } else {
            // An estimate is rounded, and a bound is kept.
            let estimate = (base.max(queue).as_secs_f64() + jitter).round();
            estimate.max((least.as_secs_f64() + jitter).ceil())
        };
        self.retry_after = Duration::try_from_secs_f64(seconds.max(1.0)).ok();
        self
    }
}

/// Returns in how many seconds to come back after a pause. Its end is known exactly, so nobody comes earlier, or much
/// later; but a pause stops a whole fleet, and all that it refuses at once would come back in one second.
fn after_pause(left: Duration) -> f64 {
    let spread = (left / PAUSE_SPREAD_PART).as_secs().clamp(1, PAUSE_SPREAD_MAX);
    left.as_secs_f64().ceil() + fastrand::u64(..=spread) as f64
}
