//! The address of the peer as the key.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use http::StatusCode;
use http::request::Parts;

use super::{KeyExtractor, MissingKey};
use crate::error::ConfigError;
use crate::name::Name;

/// Extracts the address of the peer: an IPv4 address, or the network of an IPv6 address.
///
/// The constructor names what inserts the address into the request's extensions: your own middleware
/// ([`from_extension`](Self::from_extension)), Axum (`from_axum`, feature `axum`) or tonic (`from_tonic`, feature
/// `tonic`). Behind a proxy, that is the proxy's address and all clients have one key: use a header that the proxy sets
/// instead.
///
/// A request without an address is rejected with 500, and the first one is logged as an error: what should insert the
/// address is missing, or further in than the layer.
///
/// IPv6 addresses are taken by their first 64 bits, because a client usually has such a network to itself; see
/// [`ipv6_prefix`](Self::ipv6_prefix).
///
/// # Examples
///
/// ```
/// use std::net::IpAddr;
/// use http::Request;
/// use tower_semaphore::limit::{KeyExtractor, PeerIpKey};
///
/// let address: IpAddr = "2001:db8::1".parse().unwrap();
/// let (parts, ()) = Request::builder().extension(address).body(()).unwrap().into_parts();
/// assert_eq!(PeerIpKey::from_extension().extract(&parts), Some("2001:db8::/64".into()));
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct PeerIpKey {
    source: Source,
    ipv6_prefix: u8,
}

/// What inserts the address.
#[derive(Clone, Copy, Debug)]
enum Source {
    Extension,
    #[cfg(feature = "axum")]
    Axum,
    #[cfg(feature = "tonic")]
    Tonic,
}

impl PeerIpKey {
    /// Extracts the address from an extension of type `SocketAddr`, or else `IpAddr`.
    pub const fn from_extension() -> Self {
        Self::new(Source::Extension)
    }

    /// Extracts the address that Axum inserts: `ConnectInfo<SocketAddr>`, or `MockConnectInfo<SocketAddr>` in tests.
    ///
    /// Serve with [`limit::serve`](crate::limit::serve()), or with
    /// `axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())`.
    ///
    /// ```
    /// use tower_semaphore::limit::PeerIpKey;
    /// use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// # let semaphore = Semaphore::in_memory();
    /// let four_each =
    ///     ConcurrencyLimitLayer::builder(&semaphore, "client").key(PeerIpKey::from_axum()).limit(4).build()?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "axum")]
    pub const fn from_axum() -> Self {
        Self::new(Source::Axum)
    }

    /// Extracts the address that tonic's server inserts, with and without TLS: `TcpConnectInfo`.
    ///
    /// With the feature `tls`, the address behind a TLS acceptor of your own is found, too, as
    /// `TlsConnectInfo<TcpConnectInfo>`.
    #[cfg(feature = "tonic")]
    pub const fn from_tonic() -> Self {
        Self::new(Source::Tonic)
    }

    const fn new(source: Source) -> Self {
        Self { source, ipv6_prefix: 64 }
    }

    /// Sets by how many of its first bits an IPv6 address is taken, 1 to 128. The default is 64.
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
    /// let key = PeerIpKey::from_extension().ipv6_prefix(56)?;
    /// # let _ = key; Ok(()) }
    /// ```
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self, ConfigError> {
        if !(1..=128).contains(&bits) {
            return Err(ConfigError::new(format!("IPv6 prefix is {bits} bits; expected 1 to 128")));
        }
        self.ipv6_prefix = bits;
        Ok(self)
    }
}

impl Source {
    fn address(self, parts: &Parts) -> Option<IpAddr> {
        match self {
            Self::Extension => {
                let peer = parts.extensions.get::<SocketAddr>().map(SocketAddr::ip);
                peer.or_else(|| parts.extensions.get::<IpAddr>().copied())
            }
            #[cfg(feature = "axum")]
            Self::Axum => axum_address(parts),
            #[cfg(feature = "tonic")]
            Self::Tonic => tonic_address(parts),
        }
    }
}

/// As `Request::remote_addr` of tonic finds it.
#[cfg(feature = "tonic")]
fn tonic_address(parts: &Parts) -> Option<IpAddr> {
    use tonic::transport::server::TcpConnectInfo;

    let peer = parts.extensions.get::<TcpConnectInfo>();
    // Behind a TLS acceptor of the application's own, this is the only one.
    #[cfg(feature = "tls")]
    let peer = peer.or_else(|| {
        use tonic::transport::server::TlsConnectInfo;

        Some(parts.extensions.get::<TlsConnectInfo<TcpConnectInfo>>()?.get_ref())
    });
    Some(peer?.remote_addr()?.ip())
}

/// As the extractor `ConnectInfo` finds it.
#[cfg(feature = "axum")]
fn axum_address(parts: &Parts) -> Option<IpAddr> {
    use axum::extract::ConnectInfo;
    use axum::extract::connect_info::MockConnectInfo;

    let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip());
    peer.or_else(|| Some(parts.extensions.get::<MockConnectInfo<SocketAddr>>()?.0.ip()))
}

impl KeyExtractor for PeerIpKey {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        let text = match self.source.address(parts)?.to_canonical() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => {
                let mask = u128::MAX << (128 - u32::from(self.ipv6_prefix));
                format!("{}/{}", Ipv6Addr::from(u128::from(address) & mask), self.ipv6_prefix)
            }
        };
        Some(Name::new(text))
    }

    fn missing_key(&self, _: &Parts) -> MissingKey {
        MissingKey::Reject(StatusCode::INTERNAL_SERVER_ERROR)
    }
}
