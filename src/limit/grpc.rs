//! Rejections as gRPC statuses: three headers, so no gRPC library is needed.

use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version};

use super::refusal::{Refusal, RefusalReason};
use super::refusal_response::RefusalBody;
use crate::error::ByTime;

// Messages are constant ASCII texts without counts, so nothing has to be percent-encoded.
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// When to retry, by the retry design of gRPC (A6).
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const GRPC: &str = "application/grpc";
const WEB: [&str; 4] = [
    "application/grpc-web",
    "application/grpc-web+proto",
    "application/grpc-web-text",
    "application/grpc-web-text+proto",
];

const INVALID_ARGUMENT: u16 = 3;
const PERMISSION_DENIED: u16 = 7;
const RESOURCE_EXHAUSTED: u16 = 8;
const INTERNAL: u16 = 13;
const UNAVAILABLE: u16 = 14;
const UNAUTHENTICATED: u16 = 16;

/// The kind of gRPC that a message is.
#[derive(Clone, Debug)]
pub(super) enum Dialect {
    Grpc,
    /// gRPC-Web, with this content type. It has no HTTP trailers.
    Web(HeaderValue),
}

impl Dialect {
    /// Of a request; `None` if it is not gRPC. A content type alone does not make it one: an HTTP client would take
    /// a response with the status 200 for a success, and could cache it.
    pub(super) fn of_request(parts: &Parts) -> Option<Self> {
        if parts.method != Method::POST {
            return None;
        }
        let dialect = Self::of(&parts.headers)?;
        let is_spoken = match dialect {
            Self::Grpc => parts.version == Version::HTTP_2,
            Self::Web(_) => true,
        };
        is_spoken.then_some(dialect)
    }

    /// By the content type; `None` if it is not gRPC.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let value = headers.get(CONTENT_TYPE)?;
        let bytes = value.as_bytes();
        let (start, rest) = bytes.split_at_checked(GRPC.len())?;
        if !start.eq_ignore_ascii_case(GRPC.as_bytes()) {
            return None;
        }
        match rest.first() {
            None | Some(b'+' | b';' | b' ') => Some(Self::Grpc),
            // Only known types: the value goes into the response.
            Some(b'-') => WEB
                .iter()
                .find(|web| bytes.eq_ignore_ascii_case(web.as_bytes()))
                .map(|web| Self::Web(HeaderValue::from_static(web))),
            Some(_) => None,
        }
    }

    /// A response of headers alone, which ends the call.
    pub(super) fn refuse(self, refusal: &Refusal) -> Response<RefusalBody> {
        let mut response = Response::new(RefusalBody::from(String::new()));
        let headers = response.headers_mut();
        let content_type = match self {
            Self::Grpc => HeaderValue::from_static(GRPC),
            Self::Web(content_type) => content_type,
        };
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(STATUS, code(refusal).into());
        headers.insert(MESSAGE, HeaderValue::from_static(message(refusal)));
        if let Some(after) = refusal.retry_after {
            // Clients read a signed 32-bit number.
            let pause = i32::try_from(after.as_millis()).unwrap_or(i32::MAX);
            headers.insert(PUSHBACK, pause.into());
        }
        response
    }
}

/// Whether the headers or trailers of a response say that its call was broken off: `CANCELLED`, `DEADLINE_EXCEEDED`
/// or `UNAVAILABLE`.
pub(super) fn is_broken_off(headers: &HeaderMap) -> bool {
    let status = headers.get(STATUS).map(HeaderValue::as_bytes);
    matches!(status, Some(b"1" | b"4" | b"14"))
}

/// The trailers that end a stream whose lease was lost.
pub(super) fn lost() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert(STATUS, UNAVAILABLE.into());
    let message = "the lease of the request's permit was lost";
    trailers.insert(MESSAGE, HeaderValue::from_static(message));
    trailers
}

fn code(refusal: &Refusal) -> u16 {
    match (refusal.reason, refusal.status) {
        (
            RefusalReason::LimitUnknown
            | RefusalReason::Unavailable
            | RefusalReason::Closed
            | RefusalReason::LeaseLost
            | RefusalReason::Quarantine
            | RefusalReason::Paused
            | RefusalReason::UpstreamPause
            | RefusalReason::Draining
            | RefusalReason::Revoked,
            _,
        ) => UNAVAILABLE,
        (RefusalReason::CostTooHigh, _) => INVALID_ARGUMENT,
        (
            RefusalReason::MissingKey | RefusalReason::MissingTenant,
            StatusCode::INTERNAL_SERVER_ERROR,
        ) => INTERNAL,
        (_, status) if status.is_server_error() => UNAVAILABLE,
        (RefusalReason::MissingKey | RefusalReason::MissingTenant, status) => match status {
            StatusCode::UNAUTHORIZED => UNAUTHENTICATED,
            StatusCode::FORBIDDEN => PERMISSION_DENIED,
            _ => INVALID_ARGUMENT,
        },
        (
            RefusalReason::Limit
            | RefusalReason::TenantLimit
            | RefusalReason::FurtherLimit
            | RefusalReason::QueueFull
            | RefusalReason::QueueTimeout
            | RefusalReason::Rate
            | RefusalReason::Budget
            | RefusalReason::Hopeless,
            _,
        ) => RESOURCE_EXHAUSTED,
    }
}

/// ASCII without `%`, which needs no encoding. Without counts, which are not the client's business.
fn message(refusal: &Refusal) -> &'static str {
    match refusal.reason {
        RefusalReason::Limit => "limit: all permits are in use",
        RefusalReason::TenantLimit => {
            "tenant_limit: all permits that the tenant may have are in use"
        }
        RefusalReason::FurtherLimit => {
            "further_limit: all permits that a limit of the request allows are in use"
        }
        RefusalReason::CostTooHigh => "cost_too_high: the request asks for more than it could have",
        RefusalReason::QueueFull if refusal.tenant.is_some() => {
            "queue_full: the tenant's queue is full"
        }
        RefusalReason::QueueFull => "queue_full: the queue is full",
        RefusalReason::QueueTimeout if let Some(by) = refusal.by_time() => match by {
            ByTime::Rate => "queue_timeout: the rate allowed no start in time",
            ByTime::Budget(_) => "queue_timeout: a budget allowed no start in time",
            ByTime::Either => "queue_timeout: the rate or a budget allowed no start in time",
        },
        RefusalReason::QueueTimeout if refusal.is_tenant_full() => {
            "queue_timeout: none of the permits that the tenant may have came free in time"
        }
        RefusalReason::QueueTimeout => "queue_timeout: no permit came free in time",
        RefusalReason::Rate => "rate: too many requests have started lately",
        RefusalReason::Budget => "budget: too much of a budget is used",
        RefusalReason::Hopeless => "hopeless: no permit will come free in time",
        RefusalReason::MissingKey => "missing_key: the request has no key",
        RefusalReason::MissingTenant => "missing_tenant: the request has no tenant",
        RefusalReason::LimitUnknown if refusal.tenant.is_some() => {
            "limit_unknown: the plan of the tenant cannot be looked up"
        }
        RefusalReason::LimitUnknown => "limit_unknown: the request's limit cannot be looked up",
        RefusalReason::Unavailable => "unavailable: permits are unavailable",
        RefusalReason::Closed => "closed: permits are no longer granted here",
        RefusalReason::Quarantine => {
            "quarantine: data may have been lost; no permits are granted until those in use have been counted again"
        }
        RefusalReason::Paused => "paused: no permits are granted at the moment",
        RefusalReason::UpstreamPause => {
            "upstream_pause: no permits are granted until a time that is known"
        }
        RefusalReason::Draining => "draining: no permits are granted at the moment",
        RefusalReason::Revoked => "revoked: an operator removed the request from the queue",
        RefusalReason::LeaseLost => "lease_lost: the lease of the request's permit was lost",
    }
}
