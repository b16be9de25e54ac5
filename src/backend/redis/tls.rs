//! Connections over TLS.
//!
//! They are opened here and not by redis: that takes no rustls configuration of the user's, needs a crypto
//! provider that is installed for the whole process, and reads the system's certificates again for each
//! connection.

use std::fmt;
use std::io;
use std::sync::Arc;

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, RedisError};
use futures_util::future::select_ok;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::multiplexed::Multiplexed;
use crate::error::ConfigError;

/// TLS settings for connections to Redis: trusted authorities, client certificate, crypto provider.
///
/// The defaults are the system's certificate authorities (or those of `SSL_CERT_FILE` and
/// `SSL_CERT_DIR`), no client certificate, TLS 1.2 and 1.3, and the crypto provider that is installed for
/// the process, or `ring` if none is. Certificates are read once, when the backend is built, and nothing is
/// installed for the process. The certificates of servers are always verified, except by a verifier in a
/// [configuration of your own](Self::from_config).
///
/// The certificate of a server must be valid for the host by which it is reached. That is the host of the
/// URL, or the host that Sentinel and the nodes of a cluster announce, which is an address by default
/// (`replica-announce-ip`, `sentinel announce-hostnames` and `cluster-preferred-endpoint-type hostname`
/// change that). For certificates without addresses, [`server_name`](Self::server_name) sets one name for
/// all servers.
///
/// # Examples
///
/// A private certificate authority, and a client certificate:
///
/// ```no_run
/// use tower_semaphore::Semaphore;
/// use tower_semaphore::backend::{RedisBackend, TlsSettings};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let tls = TlsSettings::new()
///     .root_certificates(std::fs::read("/etc/redis/ca.pem")?)
///     .client_certificate(std::fs::read("/etc/redis/app.pem")?, std::fs::read("/etc/redis/app.key")?);
/// let backend = RedisBackend::builder("rediss://redis.internal/").tls(tls).build()?;
/// let semaphore = Semaphore::new(backend);
/// # let _ = semaphore; Ok(()) }
/// ```
#[derive(Clone, Default)]
#[must_use]
pub struct TlsSettings {
    config: Option<Arc<ClientConfig>>,
    provider: Option<Arc<CryptoProvider>>,
    /// PEM.
    roots: Option<Vec<Vec<u8>>>,
    /// Certificates and key, PEM.
    client: Option<(Vec<u8>, Vec<u8>)>,
    server_name: Option<String>,
}

impl TlsSettings {
    /// The system's certificate authorities, and no client certificate.
    pub fn new() -> Self {
        Self::default()
    }

    /// A rustls configuration of your own, with its provider, its certificates and its verifier.
    ///
    /// Only [`server_name`](Self::server_name) can be set besides.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_semaphore::backend::rustls::{ClientConfig, RootCertStore, crypto::ring, version};
    /// use tower_semaphore::backend::{RedisBackend, TlsSettings};
    ///
    /// # fn example(roots: RootCertStore) -> Result<(), Box<dyn std::error::Error>> {
    /// let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
    ///     .with_protocol_versions(&[&version::TLS13])?
    ///     .with_root_certificates(roots)
    ///     .with_no_client_auth();
    /// let tls = TlsSettings::from_config(config);
    /// let backend = RedisBackend::builder("rediss://redis.internal/").tls(tls).build()?;
    /// # let _ = backend; Ok(()) }
    /// ```
    pub fn from_config(config: impl Into<Arc<ClientConfig>>) -> Self {
        Self { config: Some(config.into()), ..Self::default() }
    }

    /// Trusts the certificate authorities in this PEM text, and no longer the system's. Called again it
    /// adds to them.
    pub fn root_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.roots.get_or_insert_default().push(pem.into());
        self
    }

    /// Presents this certificate to servers that ask for one (`tls-auth-clients`): PEM texts of the
    /// certificate with its intermediates, and of its key (PKCS #8, PKCS #1 or SEC 1).
    ///
    /// Files are not read again: to present a renewed certificate, build a new backend, or use a
    /// [configuration](Self::from_config) with a resolver of your own.
    pub fn client_certificate(
        mut self,
        certificates: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        self.client = Some((certificates.into(), key.into()));
        self
    }

    /// Does the cryptography with this provider, and not with that of the process or `ring`.
    pub fn crypto_provider(mut self, provider: impl Into<Arc<CryptoProvider>>) -> Self {
        self.provider = Some(provider.into());
        self
    }

    /// Expects certificates for this name, by whatever host or address a server is reached. It is sent to
    /// the server as well (SNI).
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    /// Ready to connect. `what` is what these are called in errors.
    pub(super) fn build(self, what: &str) -> Result<Tls, ConfigError> {
        let Self { config, provider, roots, client, server_name } = self;
        let bad = |why: String| ConfigError::new(format!("{what}: {why}"));
        let server_name = server_name.map(|name| {
            let parsed = ServerName::try_from(name.clone());
            parsed.map_err(|_| {
                bad(format!("server name {name:?}; expected a DNS name or an IP address"))
            })
        });
        let server_name = server_name.transpose()?;
        let config = match config {
            Some(_) if provider.is_some() || roots.is_some() || client.is_some() => {
                return Err(bad("a rustls configuration of your own has its own provider, root \
                                certificates and client certificate; expected none besides"
                    .to_owned()));
            }
            Some(config) => config,
            None => Arc::new(configure(provider, roots.as_deref(), client).map_err(bad)?),
        };
        Ok(Tls { connector: config.into(), server_name })
    }
}

/// A configuration, or what is wrong with it. No text of a PEM parser is in that: it may be of a key.
fn configure(
    provider: Option<Arc<CryptoProvider>>,
    roots: Option<&[Vec<u8>]>,
    client: Option<(Vec<u8>, Vec<u8>)>,
) -> Result<ClientConfig, String> {
    let provider = provider
        .or_else(|| CryptoProvider::get_default().cloned())
        .unwrap_or_else(|| Arc::new(rustls::crypto::ring::default_provider()));
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("the crypto provider cannot be used: {error}"))?;
    let roots = roots.map_or_else(roots_of_the_system, roots_of)?;
    let builder = builder.with_root_certificates(roots);
    let Some((certificates, key)) = client else { return Ok(builder.with_no_client_auth()) };
    let certificates = certificates_in(&certificates, "client certificate")?;
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|_| {
        "client key: no private key was found; expected PEM with PKCS #8, PKCS #1 or SEC 1, not encrypted"
    })?;
    builder
        .with_client_auth_cert(certificates, key)
        .map_err(|error| format!("client certificate and key: {error}"))
}

fn roots_of(pems: &[Vec<u8>]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for pem in pems {
        for certificate in certificates_in(pem, "root certificates")? {
            roots.add(certificate).map_err(|error| format!("root certificates: {error}"))?;
        }
    }
    Ok(roots)
}

fn roots_of_the_system() -> Result<RootCertStore, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Among the system's there may be some that are not understood.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map(|error| format!(" ({error})")).unwrap_or_default();
        return Err(format!(
            "the system has no root certificates{why}; install them, set SSL_CERT_FILE, or name your \
             own with TlsSettings::root_certificates"
        ));
    }
    Ok(roots)
}

fn certificates_in(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    certificates.ok().filter(|found| !found.is_empty()).ok_or_else(|| {
        format!("{what}: no certificate was found; expected PEM (-----BEGIN CERTIFICATE-----)")
    })
}

impl From<ClientConfig> for TlsSettings {
    fn from(config: ClientConfig) -> Self {
        Self::from_config(config)
    }
}

impl From<Arc<ClientConfig>> for TlsSettings {
    fn from(config: Arc<ClientConfig>) -> Self {
        Self::from_config(config)
    }
}

impl fmt::Debug for TlsSettings {
    /// Shows no certificate and no key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSettings")
            .field("has_config", &self.config.is_some())
            .field("has_root_certificates", &self.roots.is_some())
            .field("has_client_certificate", &self.client.is_some())
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}

/// Settings that were found to be usable, shared by all connections that use them.
#[derive(Clone)]
pub(super) struct Tls {
    connector: TlsConnector,
    server_name: Option<ServerName<'static>>,
}

impl Tls {
    /// A connection to a server. The caller bounds it in time.
    pub(super) async fn open(
        &self,
        info: &ConnectionInfo,
        config: AsyncConnectionConfig,
    ) -> Result<Multiplexed, RedisError> {
        let stream = self.connect(info.addr()).await?;
        let opened = MultiplexedConnection::new_with_config(info.redis_settings(), stream, config);
        let (connection, driver) = opened.await?;
        Ok(Multiplexed::spawn(connection, driver))
    }

    async fn connect(&self, address: &ConnectionAddr) -> io::Result<TlsStream<TcpStream>> {
        let ConnectionAddr::Tcp(host, port) = address else {
            return Err(io::Error::other("there is no TLS on a Unix socket"));
        };
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.clone()).map_err(io::Error::other)?,
        };
        // All at once, as redis does it: an address that does not answer must not use up the time.
        let addresses: Vec<_> = lookup_host((host.as_str(), *port)).await?.collect();
        if addresses.is_empty() {
            return Err(io::Error::other("the host has no address"));
        }
        let dials = addresses.into_iter().map(|address| Box::pin(TcpStream::connect(address)));
        let (stream, _) = select_ok(dials).await?;
        stream.set_nodelay(true)?;
        self.connector.connect(name, stream).await
    }
}
