//! How to reach a cluster.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::auth::Tokens;
use super::environment::{Environment, Machine};
use super::url::{Credentials, Url};
use crate::backend::tls::Tls;
#[cfg(feature = "tls-no-provider")]
use crate::backend::tls::TlsSettings;
use crate::error::ConfigError;

/// The connection settings that all members of a cluster share.
#[derive(Clone)]
pub struct Settings {
    pub(super) credentials: Option<Credentials>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) tls: Option<Tls>,
    pub(super) connect_timeout: Duration,
    pub(super) environment: Arc<dyn Environment>,
}

impl Settings {
    /// Returns the settings of a URL. A member that does not answer within `connect_timeout` is not used; the check of a
    /// password may take longer. For TLS, this reads the system's certificate authorities.
    ///
    /// # Errors
    ///
    /// If the URL uses TLS and the system has no certificate authorities, or there is no crypto provider.
    pub fn new(url: &Url, connect_timeout: Duration) -> Result<Self, ConfigError> {
        #[cfg(feature = "tls-no-provider")]
        if url.is_tls {
            return Self::with_tls(url, connect_timeout, TlsSettings::new());
        }
        Ok(Self::of(url, connect_timeout, None))
    }

    /// Returns the same with TLS settings of your own.
    ///
    /// # Errors
    ///
    /// If the URL does not use TLS, or a certificate is invalid.
    #[cfg(feature = "tls-no-provider")]
    pub fn with_tls(
        url: &Url,
        connect_timeout: Duration,
        settings: TlsSettings,
    ) -> Result<Self, ConfigError> {
        if !url.is_tls {
            return Err(ConfigError::new(
                "TLS settings: no member is reached over TLS; expected a URL that begins with etcds",
            ));
        }
        let tls = settings.build("TLS settings")?.speaking(b"h2");
        Ok(Self::of(url, connect_timeout, Some(tls)))
    }

    fn of(url: &Url, connect_timeout: Duration, tls: Option<Tls>) -> Self {
        let credentials = url.credentials.clone();
        let (tokens, environment) = (Arc::default(), Arc::new(Machine));
        Self { credentials, tokens, tls, connect_timeout, environment }
    }

    /// Returns the same for a process with another network and other clocks.
    #[must_use]
    pub fn with_environment(self, environment: Arc<dyn Environment>) -> Self {
        Self { environment, ..self }
    }

    /// Returns the network and the clocks of this process.
    #[must_use]
    pub fn environment(&self) -> &Arc<dyn Environment> {
        &self.environment
    }
}

impl fmt::Debug for Settings {
    /// Shows neither user nor password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("has_credentials", &self.credentials.is_some())
            .field("has_tls", &self.tls.is_some())
            .field("connect_timeout", &self.connect_timeout)
            .finish()
    }
}
