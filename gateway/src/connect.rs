//! Opens connections to the upstream.

use std::time::Duration;

use axum::BoxError;
use axum::http::Uri;
use hyper::rt::{Read, Write};
use hyper::upgrade::Upgraded;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::net::TcpStream;
use tower::ServiceExt;

use super::upstream::{Protocol, Upstream};

/// How long an upstream may take to accept a connection.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Probes of TCP without an answer until a peer is considered gone.
pub(crate) const TCP_PROBES: u32 = 3;

/// How far they are apart; the system takes whole seconds.
pub(crate) fn tcp_interval(keepalive: Duration) -> Duration {
    (keepalive / TCP_PROBES).max(Duration::from_secs(1))
}

/// A connection, with or without TLS.
pub(crate) type Io = Box<dyn ReadWrite>;

pub(crate) trait ReadWrite: Read + Write + Send + Unpin {
    fn socket(&self) -> &TcpStream;
}

impl ReadWrite for TokioIo<TcpStream> {
    fn socket(&self) -> &TcpStream {
        self.inner()
    }
}

/// Resets a connection: what was written and not sent yet is discarded. One that cannot be reset is closed.
pub(crate) fn reset(connection: Upgraded) {
    if let Ok(parts) = connection.downcast::<Io>() {
        let _ = SockRef::from(parts.io.socket()).set_linger(Some(Duration::ZERO));
    }
}

/// How to reach one upstream.
pub(crate) struct Connector {
    address: Uri,
    protocol: Protocol,
    tcp: HttpConnector,
    #[cfg(feature = "tls")]
    tls: Option<tls::Connectors>,
}

/// A connection, and whether it speaks HTTP/2.
pub(crate) struct Connected {
    pub(crate) io: Io,
    pub(crate) is_http2: bool,
}

impl Connector {
    /// # Errors
    ///
    /// If TLS cannot be set up: there are no certificates to trust.
    pub(crate) fn new(upstream: &Upstream, keepalive: Option<Duration>) -> Result<Self, String> {
        let address = upstream.address().ok_or(Upstream::ALLOWED)?;
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_keepalive(keepalive);
        tcp.set_keepalive_interval(keepalive.map(tcp_interval));
        tcp.set_keepalive_retries(keepalive.map(|_| TCP_PROBES));
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        tcp.enforce_http(false);
        Ok(Self {
            address,
            protocol: upstream.protocol,
            #[cfg(feature = "tls")]
            tls: match upstream.protocol {
                Protocol::Https => Some(tls::Connectors::new(&tcp)?),
                Protocol::Http | Protocol::H2c => None,
            },
            tcp,
        })
    }

    /// `http1_only` is for a request that asks for an upgrade.
    pub(crate) async fn connect(&self, http1_only: bool) -> Result<Connected, BoxError> {
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let connecting = tls.connect(self.address.clone(), http1_only);
            return tokio::time::timeout(CONNECT_TIMEOUT * 2, connecting).await?;
        }
        #[cfg(not(feature = "tls"))]
        let _ = http1_only;
        let io = self.tcp.clone().oneshot(self.address.clone()).await?;
        Ok(Connected { io: Box::new(io), is_http2: self.protocol == Protocol::H2c })
    }
}

#[cfg(feature = "tls")]
mod tls {
    use std::sync::Arc;

    use axum::BoxError;
    use axum::http::Uri;
    use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
    use hyper_util::client::legacy::connect::{Connection, HttpConnector};
    use hyper_util::rt::TokioIo;
    use rustls::{ClientConfig, RootCertStore};
    use tokio::net::TcpStream;
    use tower::ServiceExt;

    use super::{Connected, ReadWrite};

    impl ReadWrite for MaybeHttpsStream<TokioIo<TcpStream>> {
        fn socket(&self) -> &TcpStream {
            match self {
                Self::Http(tcp) => tcp.inner(),
                Self::Https(tls) => tls.inner().get_ref().0.inner().inner(),
            }
        }
    }

    /// With the system's certificates, or those of `SSL_CERT_FILE`.
    pub(super) struct Connectors {
        any: HttpsConnector<HttpConnector>,
        http1: HttpsConnector<HttpConnector>,
    }

    impl Connectors {
        pub(super) fn new(tcp: &HttpConnector) -> Result<Self, String> {
            let found = rustls_native_certs::load_native_certs();
            let mut roots = RootCertStore::empty();
            let (usable, _) = roots.add_parsable_certificates(found.certs);
            if usable == 0 {
                let why = found.errors.first().map_or(String::new(), |error| format!(": {error}"));
                return Err(format!(
                    "https:// needs trusted certificates; the system has none{why}"
                ));
            }
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?
                .with_root_certificates(roots)
                .with_no_client_auth();
            let builder = || HttpsConnectorBuilder::new().with_tls_config(config.clone());
            Ok(Self {
                any: builder().https_only().enable_all_versions().wrap_connector(tcp.clone()),
                http1: builder().https_only().enable_http1().wrap_connector(tcp.clone()),
            })
        }

        pub(super) async fn connect(
            &self,
            address: Uri,
            http1_only: bool,
        ) -> Result<Connected, BoxError> {
            let connector = if http1_only { &self.http1 } else { &self.any };
            let io = connector.clone().oneshot(address).await?;
            let is_http2 = io.connected().is_negotiated_h2();
            Ok(Connected { io: Box::new(io), is_http2 })
        }
    }
}
