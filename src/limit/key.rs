//! Key extractors.

use std::fmt;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use http::request::Parts;
use http::{HeaderName, StatusCode};

use crate::error::ConfigError;
use crate::name::Name;

/// Extracts the key of a request: requests with the same key share the permits of one semaphore.
///
/// Implemented by closures that take [`&Parts`](Parts), and by tuples of extractors, whose keys are joined. For a key
/// that must be looked up, see [`key_async`](super::ConcurrencyLimitBuilder::key_async).
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
    note = "`ExtensionKey<T>` is one if `T: AsRef<[u8]> + Send + Sync + 'static`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Extracts the key; `None` if the request has none. Then [`MissingKey`] says what happens to it.
    fn extract(&self, parts: &Parts) -> Option<Name>;

    /// What happens to a request without a key, unless the layer
    /// [sets it](super::ConcurrencyLimitBuilder::on_missing_key) (or, where this extracts the tenant,
    /// [here](super::ConcurrencyLimitBuilder::on_missing_tenant)). By default the request is rejected with 400;
    /// it is, too, if the status of [`MissingKey::Reject`] is no error.
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

macro_rules! pointer {
    ($($pointer:ty),*) => {$(
        impl KeyExtractor for $pointer {
            fn extract(&self, parts: &Parts) -> Option<Name> {
                (**self).extract(parts)
            }

            fn missing_key(&self, parts: &Parts) -> MissingKey {
                (**self).missing_key(parts)
            }

            fn missing_header(&self, parts: &Parts) -> Option<HeaderName> {
                (**self).missing_header(parts)
            }
        }
    )*};
}

pointer!(Arc<dyn KeyExtractor>, Box<dyn KeyExtractor>);

impl<F, K> KeyExtractor for F
where
    F: Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    K: Into<Name>,
{
    fn extract(&self, parts: &Parts) -> Option<Name> {
        self(parts).map(Into::into)
    }
}

macro_rules! tuple {
    ($($name:ident)*) => {
        impl<$($name: KeyExtractor),*> KeyExtractor for ($($name,)*) {
            #[allow(non_snake_case, reason = "named as their types are")]
            fn extract(&self, parts: &Parts) -> Option<Name> {
                let ($($name,)*) = self;
                let name = Name::empty();
                $(let name = name.join(&$name.extract(parts)?);)*
                Some(name)
            }

            /// Decided by the first extractor that finds no key.
            #[allow(non_snake_case, reason = "named as their types are")]
            fn missing_key(&self, parts: &Parts) -> MissingKey {
                let ($($name,)*) = self;
                $(if $name.extract(parts).is_none() {
                    return $name.missing_key(parts);
                })*
                MissingKey::default()
            }

            /// Of the first extractor that finds no key.
            #[allow(non_snake_case, reason = "named as their types are")]
            fn missing_header(&self, parts: &Parts) -> Option<HeaderName> {
                let ($($name,)*) = self;
                $(if $name.extract(parts).is_none() {
                    return $name.missing_header(parts);
                })*
                None
            }
        }
    };
}

tuple!(A B);
tuple!(A B C);
tuple!(A B C D);

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
    /// It is rejected with this status, 400 to 599. The default, with 400.
    Reject(StatusCode),
    /// It passes without a permit.
    Bypass,
    /// It shares one key, or is of one tenant, with all other requests that have none.
    Shared,
}

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

/// Extracts the address of the peer: an IPv4 address, or the network of an IPv6 address.
///
/// The address is read from the request's extensions: Axum's `ConnectInfo<SocketAddr>` (feature `axum`; serve with
/// `into_make_service_with_connect_info::<SocketAddr>()`), tonic's `TcpConnectInfo`, which its server inserts
/// (feature `tonic`, and `tls` where tonic serves TLS), or else a `SocketAddr` or `IpAddr`. Behind a proxy, that is
/// the proxy's address and all clients have one key: use a header that the proxy sets instead.
///
/// ```
/// use std::net::IpAddr;
/// use http::Request;
/// use tower_semaphore::limit::{KeyExtractor, PeerIpKey};
///
/// let address: IpAddr = "2001:db8::1".parse().unwrap();
/// let (parts, ()) = Request::builder().extension(address).body(()).unwrap().into_parts();
/// assert_eq!(PeerIpKey::new().extract(&parts), Some("2001:db8::/64".into()));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PeerIpKey {
    ipv6_prefix: u8,
}

impl PeerIpKey {
    /// Extracts IPv6 addresses by their first 64 bits, as a client usually has such a network to itself.
    #[must_use]
    pub const fn new() -> Self {
        Self { ipv6_prefix: 64 }
    }

    /// Extracts IPv6 addresses by their first `bits` bits.
    ///
    /// # Errors
    ///
    /// If `bits` is not 1 to 128.
    ///
    /// ```
    /// use tower_semaphore::limit::PeerIpKey;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // Providers assign whole sites, too.
    /// let key = PeerIpKey::ipv6_prefix(56)?;
    /// # Ok(()) }
    /// ```
    pub fn ipv6_prefix(bits: u8) -> Result<Self, ConfigError> {
        if !(1..=128).contains(&bits) {
            return Err(ConfigError::new(format!("IPv6 prefix: {bits} bits; allowed: 1 to 128")));
        }
        Ok(Self { ipv6_prefix: bits })
    }

    fn address(parts: &Parts) -> Option<IpAddr> {
        #[cfg(feature = "tonic")]
        if let Some(address) = tonic_address(parts) {
            return Some(address);
        }
        #[cfg(feature = "axum")]
        if let Some(info) = parts.extensions.get::<::axum::extract::ConnectInfo<SocketAddr>>() {
            return Some(info.0.ip());
        }
        let peer = parts.extensions.get::<SocketAddr>().map(SocketAddr::ip);
        peer.or_else(|| parts.extensions.get::<IpAddr>().copied())
    }
}

#[cfg(feature = "tonic")]
fn tonic_address(parts: &Parts) -> Option<IpAddr> {
    use tonic::transport::server::TcpConnectInfo;

    let info = parts.extensions.get::<TcpConnectInfo>();
    // With TLS, it is inside the information on the session.
    #[cfg(feature = "tls")]
    let info = info.or_else(|| {
        use tonic::transport::server::TlsConnectInfo;
        parts.extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref)
    });
    Some(info?.remote_addr()?.ip())
}

impl Default for PeerIpKey {
    fn default() -> Self {
        Self::new()
    }
}

impl KeyExtractor for PeerIpKey {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        let text = match Self::address(parts)?.to_canonical() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => {
                let mask = u128::MAX << (128 - u32::from(self.ipv6_prefix));
                format!("{}/{}", Ipv6Addr::from(u128::from(address) & mask), self.ipv6_prefix)
            }
        };
        Some(Name::new(text))
    }
}

/// Extracts a value from the request's extensions, such as the account that authentication inserted.
///
/// See [`key`](super::ConcurrencyLimitBuilder::key) for an example.
pub struct ExtensionKey<T> {
    value: PhantomData<fn() -> T>,
}

impl<T> ExtensionKey<T> {
    /// Extracts the extension of type `T`.
    ///
    /// ```
    /// use http::Request;
    /// use tower_semaphore::limit::{ExtensionKey, KeyExtractor};
    ///
    /// let request = Request::builder().extension("acme".to_owned()).body(()).unwrap();
    /// let (parts, ()) = request.into_parts();
    /// assert_eq!(ExtensionKey::<String>::new().extract(&parts), Some("acme".into()));
    /// ```
    #[must_use]
    pub const fn new() -> Self {
        Self { value: PhantomData }
    }
}

impl<T: AsRef<[u8]> + Send + Sync + 'static> KeyExtractor for ExtensionKey<T> {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        parts.extensions.get::<T>().map(Name::new)
    }
}

impl<T> Default for ExtensionKey<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Clone for ExtensionKey<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for ExtensionKey<T> {}

impl<T> fmt::Debug for ExtensionKey<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExtensionKey<{}>", std::any::type_name::<T>())
    }
}
