//! The key of a request.

mod compose;
mod extension;
mod peer;
mod request;

use http::request::Parts;
use http::{HeaderName, StatusCode};

pub use self::extension::ExtensionKey;
pub use self::peer::PeerIpKey;
pub use self::request::{GlobalKey, HeaderKey, PathKey};
use crate::name::Name;

/// Extracts the key of a request: requests with the same key share the permits of one semaphore.
///
/// Implemented by closures that take [`&Parts`](Parts), by tuples of extractors, whose keys are joined, by `Arc<K>` and
/// by `Option<K>`: with `None`, all requests have one key, as with [`GlobalKey`]. For a key that must be looked up, see
/// [`key_async`](super::ConcurrencyLimitBuilder::key_async).
///
/// # Examples
///
/// ```
/// use http::request::Parts;
/// use tower_semaphore::limit::{HeaderKey, KeyExtractor, PathKey};
///
/// fn is_extractor(_: impl KeyExtractor) {}
///
/// is_extractor(HeaderKey::from_static("x-tenant"));
/// is_extractor((PathKey, HeaderKey::from_static("x-tenant")));
/// is_extractor(|parts: &Parts| Some(parts.method.as_str().to_owned()));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not extract the key of a request",
    label = "not a `KeyExtractor`",
    note = "a closure is one if it takes `&http::request::Parts`, is `Send + Sync + 'static`, and returns \
            `Option<K>` with `K: Into<Name>`, such as `Option<String>`",
    note = "the argument needs its type: `|parts: &Parts| ...`",
    note = "`ExtensionKey<T>` is one if `T: AsRef<[u8]> + Send + Sync + 'static`; `ExtensionKey::by` takes a closure \
            for any other `T`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Extracts the key; `None` if the request has none. Then [`MissingKey`] says what happens to it.
    fn extract(&self, parts: &Parts) -> Option<Name>;

    /// What happens to a request without a key, unless the layer
    /// [sets it](super::ConcurrencyLimitBuilder::on_missing_key) (or, where this extracts the tenant,
    /// [here](super::ConcurrencyLimitBuilder::on_missing_tenant)). By default the request is rejected with 400;
    /// it is, too, if the status of [`MissingKey::Reject`] is no error.
    ///
    /// An extractor of something that the server adds to each request returns a status of 500 or above: then the server
    /// is at fault, which the layer logs once as an error. [`PeerIpKey`] does.
    ///
    /// If this is [`MissingKey::Bypass`], and the first 100 requests had no key, the layer logs a warning that it
    /// limits nothing; not where the layer sets it.
    fn missing_key(&self, parts: &Parts) -> MissingKey {
        let _ = parts;
        MissingKey::default()
    }

    /// The header that a request without a key lacks: the response names it. `None`, the default, if the key is taken
    /// from something else.
    fn missing_header(&self, parts: &Parts) -> Option<HeaderName> {
        let _ = parts;
        None
    }
}

impl Default for MissingKey {
    fn default() -> Self {
        Self::Reject(StatusCode::BAD_REQUEST)
    }
}

/// What happens to a request without a key, or without a tenant.
///
/// See [`on_missing_key`](super::ConcurrencyLimitBuilder::on_missing_key) and
/// [`on_missing_tenant`](super::ConcurrencyLimitBuilder::on_missing_tenant).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// It is rejected with this status, 400 to 599. The default, with 400: the client is at fault.
    Reject(StatusCode),
    /// It passes without a permit.
    Bypass,
    /// It shares one key, or is of one tenant, with all other requests that have none.
    Shared,
}
