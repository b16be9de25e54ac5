//! Why not, and how that looks.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use serde_json::json;
use sync_wrapper::SyncWrapper;

use super::BoxError;
use crate::error::{AcquireError, BackendError, RejectReason};
use crate::name::Name;

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");

/// A request that was refused, with all that is known of it.
///
/// It stands in the extensions of every response that a layer refuses with, for layers around it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Refusal {
    /// The layer's name.
    pub policy: Arc<str>,
    /// Whose permits were asked for; `None` if the request had no key.
    pub key: Option<Name>,
    /// The tenant, where requests of one key are [compared](super::ConcurrencyLimitBuilder::fair_by) by it.
    pub tenant: Option<Name>,
    /// What stood in the way.
    pub reason: RefusalReason,
    /// The status that the layer is set to answer this with.
    pub status: StatusCode,
    /// The limit in force, permits.
    pub limit: u32,
    /// How many permits were out, as far as is known.
    pub in_use: u64,
    /// How many requests were waiting, as far as is known.
    pub waiting: u64,
    /// How long this one waited.
    pub waited: Duration,
    /// How many permits it asked for.
    pub cost: u32,
    /// How many permits its tenant may have in use, if that has a cap of its own.
    pub each: Option<u32>,
    /// Whether that cap was in the way, as far as is known: see
    /// [`Rejected::is_tenant_full`](crate::Rejected::is_tenant_full).
    pub is_tenant_full: bool,
    /// When to try again, jittered: whole seconds, at least one. `None` where trying again as it is
    /// makes no sense.
    pub retry_after: Option<Duration>,
    /// What the backend said, if it is to blame; or why the limit is not known.
    pub error: Option<BackendError>,
}

/// What stood in the way of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalReason {
    /// All permits are out, or others wait for one, and this request may not wait.
    Limit,
    /// The tenant has as many permits in use as it may, and this request may not wait.
    TenantLimit,
    /// The request asks for more permits than it could ever have: see
    /// [`RejectReason::CostTooHigh`]. Always answered with 400.
    CostTooHigh,
    /// As many requests wait as may.
    QueueFull,
    /// No permit came free within the wait timeout.
    QueueTimeout,
    /// An operator lets the semaphore run empty. Always answered with 503.
    Draining,
    /// An operator took its place in the queue out. Always answered with 503.
    Revoked,
    /// The request has no key.
    MissingKey,
    /// The request's limit could not be looked up, and nothing is set to take its place.
    LimitUnknown,
    /// The backend could not be asked, or the semaphore was shut down.
    Unavailable,
    /// The lease of the permit was lost before there was a response.
    LeaseLost,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, limit, waiting, waited, .. } = self;
        match self.reason {
            RefusalReason::Limit => write!(f, "all {limit} permits of {policy} are in use"),
            RefusalReason::TenantLimit => match self.each {
                Some(0) => write!(f, "the tenant may have no permits of {policy}"),
                Some(each) => {
                    write!(f, "all {each} permits of {policy} that the tenant may have are in use")
                }
                None => write!(f, "the tenant has all permits of {policy} that it may have"),
            },
            RefusalReason::CostTooHigh => {
                let (cost, limit) = (self.cost, self.limit);
                write!(f, "the request asks for {cost} permits of {policy}; the limit is {limit}")?;
                self.each.map_or(Ok(()), |each| write!(f, ", its tenant's cap {each}"))
            }
            RefusalReason::QueueFull => {
                write!(f, "the queue of {policy} is full: {waiting} requests are waiting")
            }
            RefusalReason::QueueTimeout => {
                write!(f, "none of {limit} permits of {policy} came free in {waited:?}")
            }
            RefusalReason::Draining => write!(f, "{policy} is being drained"),
            RefusalReason::Revoked => write!(f, "the request's place in {policy} was revoked"),
            RefusalReason::MissingKey => write!(f, "the request has no key for {policy}"),
            RefusalReason::LimitUnknown => write!(f, "the limit in {policy} cannot be looked up"),
            RefusalReason::Unavailable => write!(f, "permits of {policy} cannot be had for now"),
            RefusalReason::LeaseLost => write!(f, "the lease of the permit of {policy} was lost"),
        }
    }
}

/// What a client of a [layer that refuses with errors](super::ConcurrencyLimitLayer::into_error)
/// gets.
impl Error for Refusal {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.as_ref().map(|error| error as _)
    }
}

impl RefusalReason {
    /// The reason as one lower-case word, as it stands in problem documents.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Limit => RejectReason::Limit.as_str(),
            Self::TenantLimit => RejectReason::TenantLimit.as_str(),
            Self::CostTooHigh => RejectReason::CostTooHigh.as_str(),
            Self::QueueFull => RejectReason::QueueFull.as_str(),
            Self::QueueTimeout => RejectReason::QueueTimeout.as_str(),
            Self::Draining => RejectReason::Draining.as_str(),
            Self::Revoked => RejectReason::Revoked.as_str(),
            Self::MissingKey => "missing_key",
            Self::LimitUnknown => "limit_unknown",
            Self::Unavailable => "unavailable",
            Self::LeaseLost => "lease_lost",
        }
    }

    /// Whether the semaphore is full, rather than out of order or not asked.
    #[must_use]
    pub const fn is_full(self) -> bool {
        matches!(self, Self::Limit | Self::TenantLimit | Self::QueueFull | Self::QueueTimeout)
    }
}

/// Makes the response to a refused request. Closures do, that return a [`Response`]; with the feature `axum`,
/// anything that is `IntoResponse`.
///
/// A response with 200, which is what [`Response::new`] has, gets the [status](Refusal::status) of the refusal.
///
/// ```
/// use http::Response;
/// use tower_semaphore::limit::{Refusal, RefusalResponse};
///
/// fn is_response(_: impl RefusalResponse) {}
///
/// is_response(|refusal: &Refusal| {
///     Response::new(format!("come back later: {}", refusal.reason.as_str()))
/// });
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not make the response to a refused request",
    label = "not a `RefusalResponse`",
    note = "a closure is one if it takes `&Refusal`, is `Send + Sync + 'static`, and returns `Response<B>` with a \
            body of `Bytes` (with the feature `axum`, anything that is `IntoResponse`)",
    note = "the argument needs its type: `|refusal: &Refusal| ...`"
)]
pub trait RefusalResponse: Send + Sync + 'static {
    /// The response.
    fn response(&self, refusal: &Refusal) -> Response<RefusalBody>;
}

impl<F, R> RefusalResponse for F
where
    F: Fn(&Refusal) -> R + Send + Sync + 'static,
    R: IntoRefusalResponse,
{
    fn response(&self, refusal: &Refusal) -> Response<RefusalBody> {
        let mut response = self(refusal).into_refusal_response();
        if response.status() == StatusCode::OK {
            *response.status_mut() = refusal.status;
        }
        response
    }
}

/// What a closure that is a [`RefusalResponse`] can return: a [`Response`], or anything that is
/// `IntoResponse` with the feature `axum`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no response to a refused request",
    label = "not a `Response<B>` with a body of `Bytes`",
    note = "with the feature `axum`, anything that is `axum::response::IntoResponse` is one"
)]
pub trait IntoRefusalResponse {
    /// The response.
    fn into_refusal_response(self) -> Response<RefusalBody>;
}

#[cfg(not(feature = "axum"))]
impl<B> IntoRefusalResponse for Response<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    fn into_refusal_response(self) -> Response<RefusalBody> {
        self.map(RefusalBody::new)
    }
}

#[cfg(feature = "axum")]
impl<R: axum::response::IntoResponse> IntoRefusalResponse for R {
    fn into_refusal_response(self) -> Response<RefusalBody> {
        self.into_response().map(RefusalBody::new)
    }
}

/// The ready response: status, `Retry-After`, `Cache-Control`, `RateLimit` fields and a problem
/// document.
#[derive(Clone, Copy, Debug)]
pub(super) struct Problem {
    /// Whether to send `RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers-11).
    pub(super) rate_limit_fields: bool,
}

impl RefusalResponse for Problem {
    fn response(&self, refusal: &Refusal) -> Response<RefusalBody> {
        let status = refusal.status;
        let (kind, title) = match refusal.reason {
            reason if !reason.is_full() => {
                ("about:blank", status.canonical_reason().unwrap_or("Refused"))
            }
            _ if status == StatusCode::SERVICE_UNAVAILABLE => (
                "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                "Too many requests are in flight",
            ),
            _ => (
                "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "Too many requests of yours are in flight",
            ),
        };
        let mut problem = json!({
            "type": kind,
            "title": title,
            "status": status.as_u16(),
            "reason": refusal.reason.as_str(),
        });
        if refusal.reason == RefusalReason::CostTooHigh {
            problem["detail"] = json!(refusal.to_string());
        }
        if refusal.reason.is_full() {
            problem["violated-policies"] = json!([refusal.violated()]);
        }

        let mut response = Response::new(RefusalBody::from(problem.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, PROBLEM);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(after) = refusal.retry_after {
            headers.insert(RETRY_AFTER, after.as_secs().max(1).into());
        }
        if self.rate_limit_fields && refusal.reason.is_full() {
            for (name, value) in refusal.rate_limit_fields() {
                // The layer's name was checked when it was built: this always is a value.
                if let Ok(value) = HeaderValue::try_from(value) {
                    headers.insert(name, value);
                }
            }
        }
        response
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
        }
    }

    /// What an acquire failed with; `status` is for a semaphore that is full.
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
                    RejectReason::Limit => RefusalReason::Limit,
                    RejectReason::TenantLimit => RefusalReason::TenantLimit,
                    RejectReason::CostTooHigh => RefusalReason::CostTooHigh,
                    RejectReason::QueueFull => RefusalReason::QueueFull,
                    RejectReason::QueueTimeout => RefusalReason::QueueTimeout,
                    RejectReason::Draining => RefusalReason::Draining,
                    RejectReason::Revoked => RefusalReason::Revoked,
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

    /// The policy that was in the way: the layer's, or the cap that it sets to each tenant.
    fn violated(&self) -> String {
        let policy = &self.policy;
        if self.is_tenant_full { format!("{policy}/each") } else { policy.to_string() }
    }

    /// The fields of draft-ietf-httpapi-ratelimit-headers-11: each policy, and what is left of those of which it
    /// is known.
    fn rate_limit_fields(&self) -> [(HeaderName, String); 2] {
        let Self { policy, limit, .. } = self;
        let unit = "qu=\"concurrent-requests\"";
        let mut policies = format!("\"{policy}\";q={limit};{unit}");
        let mut left = format!("\"{policy}\";r=0");
        if let Some(each) = self.each {
            policies += &format!(", \"{policy}/each\";q={each};{unit}");
        }
        if self.is_tenant_full {
            // What is left of the quota would tell what the other tenants use.
            left = format!("\"{policy}/each\";r=0");
        }
        [(RATE_LIMIT_POLICY, policies), (RATE_LIMIT, left)]
    }

    /// To be tried again after about `base`, up to twice that: requests refused at one moment do
    /// not come back at one moment.
    pub(super) fn retry_after(mut self, base: Duration) -> Self {
        let seconds = (base.as_secs_f64() * (1.0 + fastrand::f64())).round().max(1.0);
        self.retry_after = Duration::try_from_secs_f64(seconds).ok();
        self
    }
}

/// The body of a response to a refused request.
pub struct RefusalBody {
    inner: Inner,
}

enum Inner {
    Text(Full<Bytes>),
    Other(SyncWrapper<UnsyncBoxBody<Bytes, BoxError>>, Rest),
}

/// What a body said last of what is to come of it: the wrapper around it can only be asked by its owner.
struct Rest {
    size: SizeHint,
    is_end: bool,
}

impl Rest {
    fn of(body: &impl Body) -> Self {
        Self { size: body.size_hint(), is_end: body.is_end_stream() }
    }
}

impl RefusalBody {
    /// Any body.
    pub fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let body = body.map_err(Into::into).boxed_unsync();
        let rest = Rest::of(&body);
        Self { inner: Inner::Other(SyncWrapper::new(body), rest) }
    }
}

impl From<String> for RefusalBody {
    fn from(text: String) -> Self {
        Self { inner: Inner::Text(Full::from(text)) }
    }
}

impl Body for RefusalBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.inner {
            Inner::Text(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            Inner::Other(body, rest) => {
                let frame = Pin::new(body.get_mut()).poll_frame(cx);
                *rest = Rest::of(body.get_mut());
                frame
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Text(body) => body.is_end_stream(),
            Inner::Other(_, rest) => rest.is_end,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Text(body) => body.size_hint(),
            Inner::Other(_, rest) => rest.size,
        }
    }
}

impl fmt::Debug for RefusalBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefusalBody").finish_non_exhaustive()
    }
}
