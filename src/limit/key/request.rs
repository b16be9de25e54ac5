//! Keys that a request brings in its head.

use http::HeaderName;
use http::request::Parts;

use super::KeyExtractor;
use crate::name::Name;

/// Gives all requests one key.
///
/// ```
/// use http::Request;
/// use tower_semaphore::limit::{GlobalKey, KeyExtractor};
///
/// let (parts, ()) = Request::new(()).into_parts();
/// assert!(GlobalKey.extract(&parts).is_some());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalKey;

impl KeyExtractor for GlobalKey {
    fn extract(&self, _: &Parts) -> Option<Name> {
        Some(Name::empty())
    }
}

/// Extracts the value of a header, byte for byte; the first one, if there are several.
///
/// A client that can set the header chooses its key: use a header that your gateway sets or checks. An empty value is
/// a key like any other.
///
/// ```
/// use http::Request;
/// use tower_semaphore::limit::{HeaderKey, KeyExtractor};
///
/// let key = HeaderKey::from_static("x-tenant");
/// let (parts, ()) = Request::builder().header("x-tenant", "acme").body(()).unwrap().into_parts();
/// assert_eq!(key.extract(&parts), Some("acme".into()));
/// ```
#[derive(Clone, Debug)]
pub struct HeaderKey {
    header: HeaderName,
}

impl HeaderKey {
    /// Extracts the value of this header.
    ///
    /// ```
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// let key = HeaderKey::new(http::HeaderName::from_static("x-api-client"));
    /// ```
    #[must_use]
    pub const fn new(header: HeaderName) -> Self {
        Self { header }
    }

    /// Extracts the value of the header with this name, which must be written in lower case.
    ///
    /// # Panics
    ///
    /// If this is not the name of a header in lower case.
    ///
    /// ```
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// const TENANT: HeaderKey = HeaderKey::from_static("x-tenant");
    /// ```
    #[must_use]
    pub const fn from_static(header: &'static str) -> Self {
        let mut rest = header.as_bytes();
        while let [first, others @ ..] = rest {
            assert!(
                !first.is_ascii_uppercase(),
                "`HeaderKey::from_static` takes the name of a header in lower case, such as \"x-tenant\""
            );
            rest = others;
        }
        Self::new(HeaderName::from_static(header))
    }
}

impl KeyExtractor for HeaderKey {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        parts.headers.get(&self.header).map(|value| Name::new(value.as_bytes()))
    }

    fn missing_header(&self, _: &Parts) -> Option<HeaderName> {
        Some(self.header.clone())
    }
}

/// Extracts the path as it was sent.
///
/// Each path is a key, and a client can make up any number of them: with a router, prefer the matched route
/// (`MatchedPathKey`, feature `axum`).
///
/// ```
/// use http::Request;
/// use tower_semaphore::limit::{KeyExtractor, PathKey};
///
/// let (parts, ()) = Request::get("/users?page=2").body(()).unwrap().into_parts();
/// assert_eq!(PathKey.extract(&parts), Some("/users".into()));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct PathKey;

impl KeyExtractor for PathKey {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        Some(Name::new(parts.uri.path()))
    }
}
