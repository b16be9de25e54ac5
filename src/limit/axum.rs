//! What only Axum knows.

use std::convert::Infallible;
use std::fmt;

use axum::extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use super::key::{KeyExtractor, MissingKey};
use crate::name::Name;
use crate::semaphore::Permit;

/// The route that matched, as it is written in the router: `/users/{id}`.
///
/// There is one in `Router::layer`, `Router::route_layer` and `MethodRouter::layer`. There is none
/// in a fallback, nor in a layer around the whole router: such a layer limits nothing.
///
/// A request that no route matches passes without a permit, unless the layer
/// [says otherwise](super::ConcurrencyLimitBuilder::on_missing_key): its answer is the router's 404, or what its
/// fallback says. Where the fallback does the work, as in a proxy, take another key.
#[derive(Clone, Copy, Debug, Default)]
pub struct MatchedPathKey;

impl KeyExtractor for MatchedPathKey {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        parts.extensions.get::<MatchedPath>().map(|path| Name::new(path.as_str()))
    }

    fn missing_key(&self, _: &Parts) -> MissingKey {
        MissingKey::Bypass
    }
}

/// There is no permit in the request's extensions: no [`ConcurrencyLimit`](super::ConcurrencyLimit)
/// is around the handler, or it let the request pass without one.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PermitMissing;

impl fmt::Display for PermitMissing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request has no permit: is a ConcurrencyLimitLayer around the handler?")
    }
}

impl std::error::Error for PermitMissing {}

impl IntoResponse for PermitMissing {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

/// The permit of the request. Keep it, or a clone, to keep the permit after the response.
impl<S: Send + Sync> FromRequestParts<S> for Permit {
    type Rejection = PermitMissing;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, PermitMissing> {
        parts.extensions.get::<Self>().cloned().ok_or(PermitMissing)
    }
}

/// The permit of the request, if it has one.
impl<S: Send + Sync> OptionalFromRequestParts<S> for Permit {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}
