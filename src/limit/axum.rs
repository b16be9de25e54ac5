//! Extractors for Axum: the matched route as a key, and the permit.

use std::convert::Infallible;
use std::fmt;

use axum::extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use super::key::{KeyExtractor, MissingKey};
use super::refusal::Refusal;
use crate::name::Name;
use crate::semaphore::Permit;

/// Extracts the matched route, as it is written in the router: `/users/{id}`.
///
/// A layer sees the matched route if it was added with `Router::layer`, `Router::route_layer` or
/// `MethodRouter::layer`. A layer around the whole router (`layer.layer(router)`, or a `ServiceBuilder` with the
/// router as its service) sees none and limits nothing; it logs a warning after 100 requests, unless
/// [`on_missing_key`](super::ConcurrencyLimitBuilder::on_missing_key) was called: then passing may be intended.
///
/// A request that matches no route passes without a permit, unless the layer
/// [sets it otherwise](super::ConcurrencyLimitBuilder::on_missing_key): it gets the router's 404 or fallback. Where
/// the fallback does the work, as in a proxy, use another key.
///
/// ```
/// use axum::Router;
/// use axum::routing::get;
/// use tower_semaphore::limit::MatchedPathKey;
/// use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// # let semaphore = Semaphore::in_memory();
/// let layer =
///     ConcurrencyLimitLayer::builder(&semaphore, "route").key(MatchedPathKey).limit(10).build()?;
/// let app: Router = Router::new().route("/users/{id}", get(async || "hello")).layer(layer);
/// # Ok(()) }
/// ```
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

/// The default [response](Refusal::response): a handler can return a refusal that it got as the error of a client.
impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        self.response().into_response()
    }
}

/// The rejection of the extractor [`Permit`]: the request has no permit, because no
/// [`ConcurrencyLimit`](super::ConcurrencyLimit) is around the handler, or because it let the request pass without
/// one.
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

/// Extracts the permit of the request. Keep it, or a clone, to hold the permit beyond the response.
///
/// ```
/// use tower_semaphore::Permit;
///
/// async fn handler(permit: Permit) {
///     tokio::spawn(async move {
///         // ... work that counts against the limit ...
///         drop(permit);
///     });
/// }
/// ```
impl<S: Send + Sync> FromRequestParts<S> for Permit {
    type Rejection = PermitMissing;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, PermitMissing> {
        parts.extensions.get::<Self>().cloned().ok_or(PermitMissing)
    }
}

/// Extracts the permit of the request, if it has one.
impl<S: Send + Sync> OptionalFromRequestParts<S> for Permit {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}
