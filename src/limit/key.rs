//! Who is asking.

use std::fmt;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use http::request::Parts;
use http::{HeaderName, StatusCode};

use crate::error::ConfigError;
use crate::name::Name;

/// Says whose permits a request takes.
///
/// Closures over [`&Parts`](Parts) are extractors, and so are tuples of extractors: their keys
/// together are the key. For a key that must be waited for, see
/// [`key_async`](super::ConcurrencyLimitBuilder::key_async).
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
    message = "`{Self}` does not say whose permits a request takes",
    label = "not a `KeyExtractor`",
    note = "a closure is one if it takes `&http::request::Parts`, is `Send + Sync + 'static`, and returns \
            `Option<K>` with `K: Into<Name>`, such as `Option<String>`",
    note = "the argument needs its type: `|parts: &Parts| ...`",
    note = "`ExtensionKey<T>` is one if `T: AsRef<[u8]> + Send + Sync + 'static`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// The key; `None` if the request has none: then [`MissingKey`] says what to do.
    fn extract(&self, parts: &Parts) -> Option<Name>;

    /// What becomes of this request, which has no key, unless the layer
    /// [says otherwise](super::ConcurrencyLimitBuilder::on_missing_key). It is rejected with 400, unless an
    /// extractor knows better.
    fn missing_key(&self, parts: &Parts) -> MissingKey {
        let _ = parts;
        MissingKey::default()
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

            /// As the first one says that finds none.
            #[allow(non_snake_case, reason = "named as their types are")]
            fn missing_key(&self, parts: &Parts) -> MissingKey {
                let ($($name,)*) = self;
                $(if $name.extract(parts).is_none() {
                    return $name.missing_key(parts);
                })*
                MissingKey::default()
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

/// What becomes of a request without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// It is refused with this status. The default, with 400.
    Reject(StatusCode),
    /// It passes without a permit.
    Bypass,
    /// It shares the permits of one key with all others that have none.
    Shared,
}

/// One key for all requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalKey;

impl KeyExtractor for GlobalKey {
    fn extract(&self, _: &Parts) -> Option<Name> {
        Some(Name::empty())
    }
}

/// The value of a header, byte for byte; the first one, if there are several.
///
/// A client that can set the header chooses whose permits it takes: use one that your own gateway sets or
/// checks. A header that is there but empty is a value like any other.
#[derive(Clone, Debug)]
pub struct HeaderKey {
    header: HeaderName,
}

impl HeaderKey {
    /// The value of this header.
    #[must_use]
    pub const fn new(header: HeaderName) -> Self {
        Self { header }
    }

    /// The value of the header with this name, in lower case.
    ///
    /// # Panics
    ///
    /// If that cannot be the name of a header.
    #[must_use]
    pub const fn from_static(header: &'static str) -> Self {
        Self::new(HeaderName::from_static(header))
    }
}

impl KeyExtractor for HeaderKey {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        parts.headers.get(&self.header).map(|value| Name::new(value.as_bytes()))
    }
}

/// The path as it was sent.
///
/// Each path is a key of its own, and a client can make up any number of them; behind a router
/// prefer the matched route (`MatchedPathKey`, feature `axum`).
#[derive(Clone, Copy, Debug, Default)]
pub struct PathKey;

impl KeyExtractor for PathKey {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        Some(Name::new(parts.uri.path()))
    }
}

/// The address that the connection comes from: an IPv4 address, or the network of an IPv6 address.
///
/// Found in the request's extensions: Axum's `ConnectInfo<SocketAddr>` (feature `axum`; serve with
/// `into_make_service_with_connect_info::<SocketAddr>()`), tonic's `TcpConnectInfo` (feature
/// `tonic`, and `tls` where tonic serves TLS; its server puts it there), or else a `SocketAddr` or `IpAddr`. Behind
/// a proxy that is the proxy's address, one key for everyone: take a header that it sets instead.
#[derive(Clone, Copy, Debug)]
pub struct PeerIpKey {
    ipv6_prefix: u8,
}

impl PeerIpKey {
    /// IPv6 addresses by their first 64 bits, of which every client has a whole network.
    #[must_use]
    pub const fn new() -> Self {
        Self { ipv6_prefix: 64 }
    }

    /// IPv6 addresses by their first `bits` bits.
    ///
    /// # Errors
    ///
    /// If that is not 1 to 128.
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
    // With TLS it stands inside of what is known of the session.
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

/// A value in the request's extensions, such as what an authentication layer found out.
pub struct ExtensionKey<T> {
    value: PhantomData<fn() -> T>,
}

impl<T> ExtensionKey<T> {
    /// The extension of type `T`.
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
