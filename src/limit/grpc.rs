//! What a gRPC client understands. No gRPC library is needed for it: a refusal is three headers.

use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version};

use super::refusal::{Refusal, RefusalBody, RefusalReason};

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
const UNAVAILABLE: u16 = 14;
const UNAUTHENTICATED: u16 = 16;

/// How a message says that it is gRPC.
#[derive(Clone, Debug)]
pub(super) enum Dialect {
    Grpc,
    /// gRPC-Web, of this very type: what a browser can speak. It has no trailers of HTTP.
    Web(HeaderValue),
}

impl Dialect {
    /// Of a request; `None`: it is not gRPC at all. A request that only says so gets a response of HTTP: one with
    /// a status of 200 would be taken for a success, and be cached.
    pub(super) fn of_request(parts: &Parts) -> Option<Self> {
        let dialect = Self::of(&parts.headers).filter(|_| parts.method == Method::POST)?;
        let is_spoken = match dialect {
            Self::Grpc => parts.version == Version::HTTP_2,
            Self::Web(_) => true,
        };
        is_spoken.then_some(dialect)
    }

    /// By the content type; `None`: it is not gRPC at all.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let value = headers.get(CONTENT_TYPE)?;
        let bytes = value.as_bytes();
        let (start, rest) = bytes.split_at_checked(GRPC.len())?;
        if !start.eq_ignore_ascii_case(GRPC.as_bytes()) {
            return None;
        }
        match rest.first() {
            None | Some(b'+' | b';' | b' ') => Some(Self::Grpc),
            // The types of gRPC-Web that there are, and no other text of a client's.
            Some(b'-') => WEB
                .iter()
                .find(|web| bytes.eq_ignore_ascii_case(web.as_bytes()))
                .map(|web| Self::Web(HeaderValue::from_static(web))),
            Some(_) => None,
        }
    }

    /// An answer of headers alone, with which the call ends.
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
            // Clients read a signed number of 32 bits.
            let pause = i32::try_from(after.as_millis()).unwrap_or(i32::MAX);
            headers.insert(PUSHBACK, pause.into());
        }
        response
    }
}

/// Whether the headers or trailers of a response say that its call was given up in the middle: canceled, past its
/// deadline, or unavailable.
pub(super) fn is_broken_off(headers: &HeaderMap) -> bool {
    let status = headers.get(STATUS).map(HeaderValue::as_bytes);
    matches!(status, Some(b"1" | b"4" | b"14"))
}

/// What ends a stream whose lease was lost.
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
            | RefusalReason::LeaseLost
            | RefusalReason::Draining
            | RefusalReason::Revoked,
            _,
        ) => UNAVAILABLE,
        (RefusalReason::CostTooHigh, _) => INVALID_ARGUMENT,
        (_, status) if status.is_server_error() => UNAVAILABLE,
        (RefusalReason::MissingKey, StatusCode::UNAUTHORIZED) => UNAUTHENTICATED,
        (RefusalReason::MissingKey, StatusCode::FORBIDDEN) => PERMISSION_DENIED,
        (RefusalReason::MissingKey, _) => INVALID_ARGUMENT,
        (
            RefusalReason::Limit
            | RefusalReason::TenantLimit
            | RefusalReason::QueueFull
            | RefusalReason::QueueTimeout,
            _,
        ) => RESOURCE_EXHAUSTED,
    }
}

/// Plain ASCII without `%`, so that it need not be encoded; no numbers that only we need know.
const fn message(refusal: &Refusal) -> &'static str {
    match refusal.reason {
        RefusalReason::Limit => "limit: all permits are in use",
        RefusalReason::TenantLimit => "tenant_limit: the tenant has all permits that it may have",
        RefusalReason::CostTooHigh => "cost_too_high: the request asks for more than it could have",
        RefusalReason::QueueFull => "queue_full: as many requests wait as may",
        RefusalReason::QueueTimeout => "queue_timeout: no permit came free in time",
        RefusalReason::MissingKey => "missing_key: the request does not say whose permit it takes",
        RefusalReason::LimitUnknown => {
            "limit_unknown: the request's limit cannot be looked up for now"
        }
        RefusalReason::Unavailable => "unavailable: permits cannot be had for now",
        RefusalReason::Draining => "draining: no more permits are given out, for now",
        RefusalReason::Revoked => "revoked: an operator took the request's place",
        RefusalReason::LeaseLost => "lease_lost: the lease of the request's permit was lost",
    }
}
