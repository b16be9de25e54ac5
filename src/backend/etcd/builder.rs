//! The builder of the etcd backend.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::EtcdBackend;
use super::keys::Keys;
use super::open::Data;
use super::wire::{Environment, Settings, Url};
use crate::backend::prefix;
#[cfg(feature = "tls-no-provider")]
use crate::backend::tls::TlsSettings;
use crate::error::ConfigError;
use crate::protocol::liveness::Grace;
use crate::sync::Mutex;

/// Builds an [`EtcdBackend`]. See [`EtcdBackend::builder`] for an example.
#[derive(Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct EtcdBackendBuilder {
    url: String,
    prefix: Option<String>,
    connect_timeout: Duration,
    grace: Grace,
    environment: Option<Arc<dyn Environment>>,
    #[cfg(feature = "tls-no-provider")]
    tls: Option<TlsSettings>,
}

impl EtcdBackendBuilder {
    pub(super) const fn new(url: String) -> Self {
        Self {
            url,
            prefix: None,
            connect_timeout: EtcdBackend::DEFAULT_CONNECT_TIMEOUT,
            grace: Grace::Half,
            environment: None,
            #[cfg(feature = "tls-no-provider")]
            tls: None,
        }
    }

    /// Sets the prefix of all keys: 1 to 40 characters of `A-Z a-z 0-9 . _ -`. Processes share permits only if they use
    /// the same prefix.
    ///
    /// Default: the path of the URL; if it has none, `semaphore`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = Some(prefix.into());
        self
    }

    /// Sets how long opening a connection to one member may take, with its first two writes; more than zero.
    ///
    /// Default: 1 s.
    pub const fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Keeps the places of a process that seems dead for a whole lease more, not for half of one.
    ///
    /// Then the limit holds even if etcd ends the lease of a process too early, by an operator's command or a defect of its
    /// versions before 3.4.31 and 3.5.13, while that process cannot reach the cluster.
    ///
    /// Default: `false`.
    pub const fn whole_grace(mut self, whole: bool) -> Self {
        self.grace = if whole { Grace::Whole } else { Grace::Half };
        self
    }

    /// Sets the trusted certificate authorities and the client certificate. The URL must begin with `etcds`. Accepts a
    /// [`rustls::ClientConfig`] as well.
    ///
    /// Default: [`TlsSettings::new`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::backend::{EtcdBackend, TlsSettings};
    ///
    /// # fn example(authority: &str) -> Result<(), tower_semaphore::ConfigError> {
    /// let tls = TlsSettings::new().root_certificates(authority);
    /// let backend = EtcdBackend::builder("etcds://a.internal,b.internal,c.internal").tls(tls).build()?;
    /// # let _ = backend; Ok(()) }
    /// ```
    #[cfg(feature = "tls-no-provider")]
    pub fn tls(mut self, settings: impl Into<TlsSettings>) -> Self {
        self.tls = Some(settings.into());
        self
    }

    /// Sets the network and the clocks of the process: those of a simulation.
    #[cfg(feature = "unstable-backend")]
    #[doc(hidden)]
    pub fn environment(mut self, environment: Arc<dyn Environment>) -> Self {
        self.environment = Some(environment);
        self
    }

    /// Builds the backend, without connecting. For TLS, this reads the system's certificate authorities unless others
    /// are set.
    ///
    /// # Errors
    ///
    /// If the URL, the prefix or a certificate is invalid, if a timeout is zero, or if there are TLS settings but the URL
    /// does not use TLS.
    pub fn build(self) -> Result<EtcdBackend, ConfigError> {
        let url = Url::parse(&self.url)?;
        let prefix = self.prefix.as_deref().or(url.prefix.as_deref()).unwrap_or("semaphore");
        if !prefix::is_allowed(prefix) {
            let allowed = prefix::ALLOWED;
            return Err(ConfigError::new(format!("prefix is {prefix:?}; expected {allowed}")));
        }
        if self.connect_timeout.is_zero() {
            return Err(ConfigError::new("connect timeout is 0; expected more than 0"));
        }
        let keys = Keys::new(prefix);
        Ok(EtcdBackend {
            settings: match self.environment.clone() {
                Some(environment) => self.settings(&url)?.with_environment(environment),
                None => self.settings(&url)?,
            },
            endpoints: url.endpoints,
            keys,
            grace: self.grace,
            connect_timeout: self.connect_timeout,
            next: AtomicUsize::new(0),
            connections: AtomicU64::new(0),
            data: Mutex::new(Data::default()),
            shared: OnceLock::new(),
        })
    }

    fn settings(&self, url: &Url) -> Result<Settings, ConfigError> {
        #[cfg(feature = "tls-no-provider")]
        if let Some(tls) = &self.tls {
            return Settings::with_tls(url, self.connect_timeout, tls.clone());
        }
        Settings::new(url, self.connect_timeout)
    }
}

impl fmt::Debug for EtcdBackendBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackendBuilder").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}
