//! Connections over TLS.
//!
//! The redis crate's own TLS is not used: it accepts no rustls configuration, requires a process-wide crypto provider,
//! and reads the system's certificates again for each connection.

use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::error::ConfigError;

/// TLS settings for connections to a backend: trusted authorities, client certificate, crypto provider.
///
/// By default, TLS trusts the system's certificate authorities (or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`),
/// presents no client certificate, and uses TLS 1.2 or 1.3 with the crypto provider of the process, or `ring` if none
/// is installed. With the feature `tls-no-provider` alone there is no `ring`, and a provider must be installed or
/// [named](Self::crypto_provider). Certificates are read once, when the backend is built, and nothing is installed for
/// the process. Server certificates are always verified, unless [your own configuration](Self::from_config) has a
/// verifier that does not.
///
/// The certificate of a server must be valid for the host in the URL, or for the host that Sentinel or the cluster
/// announces. The latter is an address by default; `replica-announce-ip`, `sentinel announce-hostnames` and
/// `cluster-preferred-endpoint-type hostname` change that. For certificates without addresses,
/// [`server_name`](Self::server_name) sets one name for all servers.
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
    /// Creates the default settings: the system's certificate authorities, and no client certificate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Uses your own rustls configuration, with its provider, certificates and verifier.
    ///
    /// It can only be combined with [`server_name`](Self::server_name).
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

    /// Trusts the certificate authorities in this PEM text instead of the system's. Repeated calls add to them.
    pub fn root_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.roots.get_or_insert_default().push(pem.into());
        self
    }

    /// Presents this certificate to servers that request one (`tls-auth-clients`): the certificate with its
    /// intermediates, and its key (PKCS #8, PKCS #1 or SEC 1), both as PEM.
    ///
    /// To present a renewed certificate, build a new backend, or use a [configuration](Self::from_config) with your own
    /// resolver.
    pub fn client_certificate(
        mut self,
        certificates: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        self.client = Some((certificates.into(), key.into()));
        self
    }

    /// Uses this crypto provider instead of that of the process or `ring`.
    pub fn crypto_provider(mut self, provider: impl Into<Arc<CryptoProvider>>) -> Self {
        self.provider = Some(provider.into());
        self
    }

    /// Verifies server certificates against this name instead of the host, and sends it to servers (SNI).
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    /// Builds the connector. `what` names these settings in errors.
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
        Ok(Tls { config, server_name })
    }
}

/// Builds a configuration. Errors do not contain the PEM parser's text, which may quote a key.
fn configure(
    provider: Option<Arc<CryptoProvider>>,
    roots: Option<&[Vec<u8>]>,
    client: Option<(Vec<u8>, Vec<u8>)>,
) -> Result<ClientConfig, String> {
    let provider = provider.or_else(|| CryptoProvider::get_default().cloned()).or_else(built_in);
    let provider = provider.ok_or(
        "no crypto provider; install one for the process, name one with TlsSettings::crypto_provider, or \
         enable the feature `tls` of tower-semaphore",
    )?;
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

/// Returns the provider that the feature `tls` brings.
fn built_in() -> Option<Arc<CryptoProvider>> {
    #[cfg(feature = "tls")]
    return Some(Arc::new(rustls::crypto::ring::default_provider()));
    #[cfg(not(feature = "tls"))]
    None
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
    // Some of the system's certificates may be unsupported.
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
    /// Shows neither certificates nor keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSettings")
            .field("has_config", &self.config.is_some())
            .field("has_root_certificates", &self.roots.is_some())
            .field("has_client_certificate", &self.client.is_some())
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}

/// Validated settings, shared by all connections.
#[derive(Clone)]
pub(super) struct Tls {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
}

impl Tls {
    /// Offers one protocol to servers (ALPN).
    #[cfg(feature = "etcd")]
    pub(super) fn speaking(self, protocol: &[u8]) -> Self {
        let mut config = ClientConfig::clone(&self.config);
        config.alpn_protocols = vec![protocol.to_vec()];
        Self { config: Arc::new(config), ..self }
    }

    /// Performs the handshake over a socket. The caller applies the timeout.
    pub(super) async fn secure<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        host: &str,
        stream: S,
    ) -> io::Result<TlsStream<S>> {
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(io::Error::other)?,
        };
        TlsConnector::from(Arc::clone(&self.config)).connect(name, stream).await
    }
}
