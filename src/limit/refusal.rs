//! Why a request was rejected.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, StatusCode};

use crate::error::{AcquireError, BackendError, QUARANTINE, RejectReason, Within};
use crate::name::Name;

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
///         tracing::info!(reason = refusal.reason.as_str(), waited = ?refusal.waited, "{refusal}");
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
    /// The limit in force, in permits.
    pub limit: u32,
    /// Permits in use, as far as is known.
    pub in_use: u64,
    /// Waiting requests, as far as is known.
    pub waiting: u64,
    /// How long this request waited in this layer.
    pub waited: Duration,
    /// Permits that this request asked for.
    pub cost: u32,
    /// The cap of its tenant, in permits, if there is one.
    pub each: Option<u32>,
    /// Whether that cap was the reason, as far as is known: see
    /// [`Rejected::is_tenant_full`](crate::Rejected::is_tenant_full).
    pub is_tenant_full: bool,
    /// When to try again: whole seconds with jitter, at least one, and not before the end of a quarantine. `None` where the request itself is at fault: it has
    /// no key or no tenant, or its cost is too high.
    pub retry_after: Option<Duration>,
    /// The error of the backend, or of the source of the limit, if that is why.
    pub error: Option<BackendError>,
    /// The header that the request lacks, if it has no key or no tenant and that is taken from a header.
    pub missing_header: Option<HeaderName>,
    /// The type of the extractor that found no key or no tenant.
    pub(super) extractor: Option<&'static str>,
    /// How soon the reason ends, if that is known.
    pub(super) ends_in: Option<Duration>,
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
    /// The request asks for more permits than it could ever have: see
    /// [`RejectReason::CostTooHigh`]. The status is always 400.
    CostTooHigh,
    /// The queue is full.
    QueueFull,
    /// No permit came free within the wait timeout, or there was none for a request whose
    /// [budget](super::WaitBudget) left it no time to wait.
    QueueTimeout,
    /// The backend may have lost data, and grants nothing for one lease: see
    /// [`RejectReason::Quarantine`]. The status is always 503.
    Quarantine,
    /// An operator [paused](crate::Semaphore::pause) the semaphore, or [set](crate::Semaphore::set_limit) its limit to
    /// 0. The status is always 503.
    Paused,
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
    /// The backend is unavailable; or the semaphore was [shut down](crate::Semaphore::shutdown), or lets no request
    /// wait [any more](crate::Semaphore::stop_waiting). The status is always 503.
    Unavailable,
    /// The permit's lease was lost before the inner service responded. The status is always 503.
    LeaseLost,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, limit, waiting, .. } = self;
        let waited = Within(self.waited);
        match self.reason {
            RefusalReason::Limit => write!(f, "all {limit} permits of {policy} are in use"),
            RefusalReason::TenantLimit => match self.each {
                Some(0) => write!(f, "the tenant may have no permits of {policy}"),
                Some(each) => {
                    write!(f, "all {each} permits of {policy} that the tenant may have are in use")
                }
                None => write!(f, "all permits of {policy} that the tenant may have are in use"),
            },
            RefusalReason::CostTooHigh => {
                let (cost, limit) = (self.cost, self.limit);
                write!(f, "the request asks for {cost} permits of {policy}; the limit is {limit}")?;
                self.each.map_or(Ok(()), |each| write!(f, ", its tenant's cap {each}"))
            }
            RefusalReason::QueueFull if self.tenant.is_some() => write!(
                f,
                "the tenant's queue for {policy} is full; {waiting} requests of all tenants are waiting"
            ),
            RefusalReason::QueueFull => {
                write!(f, "the queue of {policy} is full: {waiting} requests are waiting")
            }
            RefusalReason::QueueTimeout => match self.each.filter(|_| self.is_tenant_full) {
                Some(each) => write!(
                    f,
                    "none of the {each} permits of {policy} that the tenant may have came free {waited}"
                ),
                None => write!(f, "none of {limit} permits of {policy} came free {waited}"),
            },
            RefusalReason::Quarantine => write!(f, "{policy}: {QUARANTINE}"),
            RefusalReason::Paused => write!(f, "{policy} is paused"),
            RefusalReason::Draining => write!(f, "{policy} is being drained"),
            RefusalReason::Revoked => write!(f, "the request's place in {policy} was revoked"),
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
            RefusalReason::LeaseLost => write!(f, "the lease of the permit of {policy} was lost"),
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
            Self::CostTooHigh => RejectReason::CostTooHigh.as_str(),
            Self::QueueFull => RejectReason::QueueFull.as_str(),
            Self::QueueTimeout => RejectReason::QueueTimeout.as_str(),
            Self::Quarantine => RejectReason::Quarantine.as_str(),
            Self::Paused => RejectReason::Paused.as_str(),
            Self::Draining => RejectReason::Draining.as_str(),
            Self::Revoked => RejectReason::Revoked.as_str(),
            Self::MissingKey => "missing_key",
            Self::MissingTenant => "missing_tenant",
            Self::LimitUnknown => "limit_unknown",
            Self::Unavailable => "unavailable",
            Self::LeaseLost => "lease_lost",
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
        matches!(self, Self::Limit | Self::TenantLimit | Self::QueueFull | Self::QueueTimeout)
    }
}

impl Refusal {
    pub(super) fn new(policy: &Arc<str>, key: Option<Name>, status: StatusCode) -> Self {
        Self {
            policy: Arc::clone(policy),
            key,
            tenant: None,
            reason: RefusalReason::MissingKey,
            status,
            limit: 0,
            in_use: 0,
            waiting: 0,
            waited: Duration::ZERO,
            cost: 1,
            each: None,
            is_tenant_full: false,
            retry_after: None,
            error: None,
            missing_header: None,
            extractor: None,
            ends_in: None,
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
                refusal.reason = match rejected.reason {
                    RejectReason::TenantLimit => RefusalReason::TenantLimit,
                    RejectReason::CostTooHigh => RefusalReason::CostTooHigh,
                    RejectReason::QueueFull => RefusalReason::QueueFull,
                    RejectReason::QueueTimeout => RefusalReason::QueueTimeout,
                    RejectReason::Quarantine => RefusalReason::Quarantine,
                    RejectReason::Paused => RefusalReason::Paused,
                    RejectReason::Draining => RefusalReason::Draining,
                    RejectReason::Revoked => RefusalReason::Revoked,
                    // `Limit`; there are no others.
                    _ => RefusalReason::Limit,
                };
                if !refusal.reason.is_full() {
                    refusal.status = StatusCode::SERVICE_UNAVAILABLE;
                }
                refusal.limit = rejected.limit;
                refusal.in_use = rejected.in_use;
                refusal.waiting = rejected.waiting;
                refusal.waited = rejected.waited;
                refusal.cost = rejected.cost;
                refusal.each = rejected.each;
                refusal.is_tenant_full = rejected.is_tenant_full;
                refusal.ends_in = rejected.ends_in;
                if refusal.is_tenant_full && refusal.reason.is_full() && status.is_server_error() {
                    // The pool that all share has room: it is this caller who has too many.
                    refusal.status = StatusCode::TOO_MANY_REQUESTS;
                }
                if refusal.reason == RefusalReason::CostTooHigh {
                    refusal.status = StatusCode::BAD_REQUEST;
                }
            }
            AcquireError::Unavailable(error) => {
                refusal.reason = RefusalReason::Unavailable;
                refusal.status = StatusCode::SERVICE_UNAVAILABLE;
                refusal.error = Some(error);
            }
            AcquireError::Closed => {
                refusal.reason = RefusalReason::Unavailable;
                refusal.status = StatusCode::SERVICE_UNAVAILABLE;
            }
        }
        refusal
    }

    /// Sets when to try again: between `base` and twice that, so that requests rejected together do not come back
    /// together.
    pub(super) fn retry_after(mut self, base: Duration) -> Self {
        let jitter = base.mul_f64(fastrand::f64()).as_secs_f64();
        let seconds = match self.ends_in {
            // Not before the reason is over.
            Some(left) => (left.max(base).as_secs_f64() + jitter).ceil(),
            None => (base.as_secs_f64() + jitter).round(),
        };
        self.retry_after = Duration::try_from_secs_f64(seconds.max(1.0)).ok();
        self
    }
}
