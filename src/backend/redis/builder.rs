//! The builder of the Redis backend.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "deadpool-redis")]
use deadpool_redis::Pool;

use super::cluster::Cluster;
use super::dial::Timeouts;
use super::endpoint::Endpoint;
use super::keys::Keys;
use super::sentinel::Sentinel;
use super::url::{self, Url};
use super::{RedisBackend, Servers};
use crate::backend::AfterLoss;
use crate::backend::tls::Tls;
#[cfg(feature = "tls-no-provider")]
use crate::backend::tls::TlsSettings;
use crate::error::ConfigError;
use crate::policy::Policy;

/// Builds a [`RedisBackend`]. See [`RedisBackend::builder`] for an example.
#[derive(Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct RedisBackendBuilder {
    source: Source,
    prefix: String,
    connect_timeout: Duration,
    response_timeout: Duration,
    after_loss: AfterLoss,
    #[cfg(feature = "tls-no-provider")]
    tls: Option<TlsSettings>,
    #[cfg(feature = "tls-no-provider")]
    sentinel_tls: Option<TlsSettings>,
}

#[derive(Clone)]
pub(super) enum Source {
    Url(String),
    #[cfg(feature = "deadpool-redis")]
    Pool(Pool),
}

impl RedisBackendBuilder {
    pub(super) fn new(source: Source) -> Self {
        Self {
            source,
            prefix: "semaphore".to_owned(),
            connect_timeout: RedisBackend::DEFAULT_CONNECT_TIMEOUT,
            response_timeout: RedisBackend::DEFAULT_RESPONSE_TIMEOUT,
            after_loss: AfterLoss::default(),
            #[cfg(feature = "tls-no-provider")]
            tls: None,
            #[cfg(feature = "tls-no-provider")]
            sentinel_tls: None,
        }
    }

    /// Sets the prefix of all keys and channels: 1 to 40 characters of `A-Z a-z 0-9 . _ -`. Processes share permits
    /// only if they use the same prefix.
    ///
    /// Default: `semaphore`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets how long opening a connection may take; more than zero.
    ///
    /// Default: 500 ms.
    pub const fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets how long an answer may take before the connection is closed and opened again; more than zero. Keep it well
    /// below the lease, so that a renewal can be repeated.
    ///
    /// Default: 500 ms.
    pub const fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// Sets what to do after Redis may have lost data.
    ///
    /// Default: [`AfterLoss::Continue`].
    pub const fn after_loss(mut self, after_loss: AfterLoss) -> Self {
        self.after_loss = after_loss;
        self
    }

    /// Sets the trusted certificate authorities and the client certificate for connections to the servers. The URL must
    /// begin with `rediss`. Accepts a [`rustls::ClientConfig`] as well.
    ///
    /// Default: [`TlsSettings::new`].
    ///
    /// # Examples
    ///
    /// A private certificate authority:
    ///
    /// ```
    /// use tower_semaphore::backend::{RedisBackend, TlsSettings};
    ///
    /// # fn example(authority: &str) -> Result<(), tower_semaphore::ConfigError> {
    /// let tls = TlsSettings::new().root_certificates(authority);
    /// let backend = RedisBackend::builder("rediss-cluster://a.internal,b.internal").tls(tls).build()?;
    /// # let _ = backend; Ok(()) }
    /// ```
    #[cfg(feature = "tls-no-provider")]
    pub fn tls(mut self, settings: impl Into<TlsSettings>) -> Self {
        self.tls = Some(settings.into());
        self
    }

    /// Sets the same for connections to sentinels.
    ///
    /// Default: the settings of [`tls`](Self::tls), including its client certificate and server name.
    ///
    /// # Examples
    ///
    /// Sentinels with their own certificate authority, and servers that are announced by address but have certificates
    /// for a name:
    ///
    /// ```
    /// use tower_semaphore::backend::{RedisBackend, TlsSettings};
    ///
    /// # fn example(of_sentinels: &str, of_servers: &str) -> Result<(), tower_semaphore::ConfigError> {
    /// let backend = RedisBackend::builder("rediss-sentinel://a.internal,b.internal/mymaster")
    ///     .tls(TlsSettings::new().root_certificates(of_servers).server_name("redis.internal"))
    ///     .sentinel_tls(TlsSettings::new().root_certificates(of_sentinels))
    ///     .build()?;
    /// # let _ = backend; Ok(()) }
    /// ```
    #[cfg(feature = "tls-no-provider")]
    pub fn sentinel_tls(mut self, settings: impl Into<TlsSettings>) -> Self {
        self.sentinel_tls = Some(settings.into());
        self
    }

    /// Builds the backend, without connecting. For TLS, this reads the system's certificate authorities unless others
    /// are set.
    ///
    /// # Errors
    ///
    /// If the URL, the prefix or a certificate is invalid, if a timeout is zero, or if there are TLS settings but the
    /// URL does not use TLS.
    pub fn build(self) -> Result<RedisBackend, ConfigError> {
        let keys = Keys::new(&self.prefix)?;
        for (name, timeout) in
            [("connect timeout", self.connect_timeout), ("response timeout", self.response_timeout)]
        {
            if timeout.is_zero() {
                return Err(ConfigError::new(format!("{name} is 0; expected more than 0")));
            }
        }
        if let AfterLoss::QuarantineFor(duration) = self.after_loss
            && duration > Policy::MAX_LEASE
        {
            let allowed = Policy::MAX_LEASE;
            return Err(ConfigError::new(format!(
                "quarantine is {duration:?}; expected 0 to {allowed:?}"
            )));
        }
        let servers = match &self.source {
            #[cfg(feature = "deadpool-redis")]
            Source::Pool(pool) => {
                self.connectors(false, false)?;
                Servers::Pool(pool.clone())
            }
            Source::Url(url) => {
                let Url { servers, tls, sentinel_tls } = Url::parse(url)?;
                let (tls, sentinel_tls) = self.connectors(tls, sentinel_tls)?;
                let server = |info| Endpoint::new(info, tls.clone());
                match servers {
                    url::Servers::One(info) => Servers::One(Box::new(server(info))),
                    url::Servers::Sentinel { sentinels, master, server: info } => {
                        let sentinels = sentinels.into_iter();
                        let sentinels =
                            sentinels.map(|info| Endpoint::new(info, sentinel_tls.clone()));
                        let sentinel = Sentinel::new(sentinels.collect(), master, server(info));
                        Servers::Sentinel(Arc::new(sentinel))
                    }
                    url::Servers::Cluster(seeds) => {
                        let seeds = seeds.into_iter().map(server).collect();
                        Servers::Cluster(Arc::new(Cluster::new(seeds)))
                    }
                }
            }
        };
        Ok(RedisBackend {
            servers,
            keys,
            timeouts: Timeouts { connect: self.connect_timeout, answer: self.response_timeout },
            after_loss: self.after_loss,
            caller: Arc::default(),
        })
    }

    /// Builds the connectors for servers and for sentinels, if they use TLS.
    #[cfg(feature = "tls-no-provider")]
    fn connectors(
        &self,
        tls: bool,
        sentinel_tls: bool,
    ) -> Result<(Option<Tls>, Option<Tls>), ConfigError> {
        if self.tls.is_some() && !tls {
            return Err(ConfigError::new(
                "TLS settings: no server is reached over TLS; expected a URL that begins with rediss",
            ));
        }
        if self.sentinel_tls.is_some() && !sentinel_tls {
            return Err(ConfigError::new(
                "TLS settings of sentinels: no sentinel is reached over TLS; expected a URL that begins \
                 with rediss-sentinel, or has sentinel_tls=true",
            ));
        }
        let servers = tls.then(|| self.tls.clone().unwrap_or_default().build("TLS settings"));
        let servers = servers.transpose()?;
        let sentinels = match (&self.sentinel_tls, &servers) {
            _ if !sentinel_tls => None,
            (Some(settings), _) => Some(settings.clone().build("TLS settings of sentinels")?),
            (None, Some(servers)) => Some(servers.clone()),
            (None, None) => Some(TlsSettings::new().build("TLS settings of sentinels")?),
        };
        Ok((servers, sentinels))
    }

    #[cfg(not(feature = "tls-no-provider"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with the feature")]
    const fn connectors(
        &self,
        _: bool,
        _: bool,
    ) -> Result<(Option<Tls>, Option<Tls>), ConfigError> {
        Ok((None, None))
    }
}

impl fmt::Debug for RedisBackendBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackendBuilder").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}
