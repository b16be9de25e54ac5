//! Which requests share permits.

use std::any::{type_name, type_name_of_val};
use std::future::Future;
use std::sync::Arc;

use http::request::Parts;

use super::ConcurrencyLimitBuilder;
use crate::limit::key::{KeyExtractor, MissingKey};
use crate::limit::settings::KeySource;
use crate::name::Name;

/// # Keys
impl ConcurrencyLimitBuilder {
    /// Sets the extractor of the key: requests with the same key share the permits of one semaphore.
    ///
    /// The default is [`GlobalKey`](crate::limit::GlobalKey), one key for all requests.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::ExtensionKey;
    ///
    /// /// Inserted into the request's extensions by authentication.
    /// #[derive(Clone)]
    /// struct Tenant(String);
    ///
    /// impl AsRef<[u8]> for Tenant {
    ///     fn as_ref(&self) -> &[u8] {
    ///         self.0.as_bytes()
    ///     }
    /// }
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(ExtensionKey::<Tenant>::new())
    ///     .limit(5)
    ///     .build()
    /// # }
    /// ```
    pub fn key(mut self, extractor: impl KeyExtractor) -> Self {
        let kind = type_name_of_val(&extractor);
        self.key.set("key", (KeySource::Sync(Arc::new(extractor)), kind));
        self
    }

    /// Sets an async function that looks the key up; `None` if the request has none.
    ///
    /// The request waits until the future is done: nothing but a timeout outside the layer bounds that. The future
    /// is dropped if the client leaves.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::request::Parts;
    ///
    /// # async fn account_of(token: String) -> Option<String> { Some(token) }
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "account")
    ///     .key_async(|parts: &Parts| {
    ///         // The future cannot borrow from the request.
    ///         let token = parts.headers.get("authorization").cloned();
    ///         async move { account_of(token?.to_str().ok()?.to_owned()).await }
    ///     })
    ///     .limit(5)
    ///     .build()
    /// # }
    /// ```
    pub fn key_async<F, Fut, K>(mut self, extractor: F) -> Self
    where
        F: Fn(&Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<K>> + Send + 'static,
        K: Into<Name>,
    {
        let source = KeySource::Async(Arc::new(move |parts| {
            let key = extractor(parts);
            Box::pin(async move { key.await.map(Into::into) })
        }));
        self.key.set("key_async", (source, type_name::<F>()));
        self
    }

    /// Sets what happens to a request without a key.
    ///
    /// By default the [extractor](KeyExtractor::missing_key) decides: most reject the request with 400,
    /// [`PeerIpKey`](crate::limit::PeerIpKey) with 500, and `MatchedPathKey` lets it pass. The response names the header
    /// that the request lacks, if the key is taken from one.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::StatusCode;
    /// use tower_semaphore::limit::{HeaderKey, MissingKey};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "tenant")
    ///     .key(HeaderKey::from_static("x-tenant"))
    ///     .on_missing_key(MissingKey::Reject(StatusCode::UNAUTHORIZED))
    ///     .limit(5)
    ///     .build()
    /// # }
    /// ```
    pub const fn on_missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = Some(missing_key);
        self
    }
}
