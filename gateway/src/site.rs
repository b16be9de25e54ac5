//! The settings of a gateway that are not part of a rule.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use serde::Deserialize;
#[cfg(feature = "etcd")]
use tower_semaphore::backend::EtcdBackend;
use tower_semaphore::backend::{AfterLoss, RedisBackend};
use tower_semaphore::{ConfigError, Semaphore};

use super::args::{duration, in_range};
#[cfg(feature = "tls")]
use super::certificates::Certificates;
use super::descriptors;
use super::peer::TrustedProxies;
use super::progress::Bounds;
use super::secret::Secret;
use super::upstream::Upstream;

const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(5 * 60);
const IDLE_TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// Below the timeout of most servers, so that the server seldom closes a connection first.
const UPSTREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Less than the 30 s that Kubernetes gives a pod by default.
const DRAIN: Duration = Duration::from_secs(25);

/// The settings that are given once, not for each limit.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Site {
    /// The address to listen on, for HTTP/1.1 and HTTP/2; port 0 takes a free port [default:
    /// 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(crate) listen: Option<SocketAddr>,

    /// The upstream: http://host[:port][/base], or h2c:// for HTTP/2 without TLS, or https://
    #[arg(long, value_name = "URL")]
    pub(crate) upstream: Option<Upstream>,

    /// The Redis in which permits are counted; without it, they are counted in this process. Other users of this machine
    /// can read the command line: a URL with a password belongs into the environment, or into the file of --config
    #[arg(long, value_name = "URL", env = "REDIS_URL", hide_env_values = true)]
    pub(crate) redis: Option<Secret>,

    /// The etcd in which permits are counted, in place of a Redis: etcd://host[:port][,host[:port]...][/prefix]. The same
    /// applies to a URL with a password
    #[cfg(feature = "etcd")]
    #[arg(long, value_name = "URL", env = "ETCD_URL", hide_env_values = true)]
    pub(crate) etcd: Option<Secret>,

    /// After a gateway died, keep its permits taken for a whole lease more, not for half of one: the limit then holds even
    /// if etcd ends the lease of a gateway too early while that cannot reach the cluster
    #[cfg(feature = "etcd")]
    #[arg(long)]
    pub(crate) etcd_whole_grace: bool,

    #[cfg(feature = "tls")]
    #[command(flatten)]
    pub(crate) certificates: Certificates,

    /// After Redis may have lost data: continue granting, or grant nothing for one lease
    /// [default: continue]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) after_loss: Option<Loss>,

    /// A file with a secret, the same for all gateways, for --fair-by where clients choose the names
    /// of tenants. Whitespace around the secret is ignored
    #[arg(long, value_name = "PATH")]
    pub(crate) tenant_salt_file: Option<PathBuf>,

    /// The host that the upstream gets: the one that the client used, or the upstream's own
    /// [default: client]
    #[arg(long, value_enum, value_name = "WHOSE")]
    pub(crate) host: Option<HostSent>,

    /// Networks of proxies whose X-Forwarded-For is trusted, such as 10.0.0.0/8,fd00::/8: the client is
    /// the last address in it that is in none of these networks
    #[arg(long, value_name = "CIDR,...")]
    pub(crate) trusted_proxies: Option<TrustedProxies>,

    /// How long a request head may take from its first byte, and how long a new connection may be
    /// silent. TIME, or `none` [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = bound)]
    pub(crate) header_timeout: Option<Bound>,

    /// How long the upstream may take from the end of a request to the response head; then 504.
    /// TIME, or `none` [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = bound)]
    pub(crate) upstream_timeout: Option<Bound>,

    /// How long a body, an upgraded connection, or a connection without a request may be idle.
    /// TIME, or `none` [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = bound)]
    pub(crate) idle_timeout: Option<Bound>,

    /// How long a connection to the upstream is kept without a request. TIME, or `none` [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = bound)]
    pub(crate) upstream_idle_timeout: Option<Bound>,

    /// How long a connection is silent before TCP, and PING of HTTP/2, probe whether the peer is still
    /// there. One that does not answer for as long again is closed. TIME, or `none` [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = keepalive)]
    pub(crate) keepalive: Option<Bound>,

    /// How long requests in flight may take after SIGTERM before they are cut off [default: 25s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) drain: Option<Duration>,

    /// Connections of clients that may be open. A new one beyond that takes the place of the one that has been idle for
    /// longest; if none is idle, it waits [default: half of the limit of file descriptors, less 32; at most 65536]
    #[arg(long, value_name = "N", value_parser = max_connections)]
    pub(crate) max_connections: Option<usize>,

    /// Requests that may be in this gateway at a time, those that wait for a permit and those at the upstream. A further
    /// one is rejected with 503, so that N bounds the memory that requests take [default: no maximum]
    #[arg(long, value_name = "N", value_parser = max_requests)]
    pub(crate) max_requests: Option<usize>,

    /// Serve /-/healthy, /-/ready and /-/metrics on a port of loopback, or on ADDR:PORT. --admin serves
    /// them, too
    #[arg(long, value_name = "[ADDR:]PORT", value_parser = own_address)]
    pub(crate) status: Option<SocketAddr>,

    /// Append a line of JSON for each request to this file; `-` is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) access_log: Option<PathBuf>,

    /// Include keys in the access log; they may be secrets
    #[arg(long)]
    pub(crate) access_log_keys: bool,

    #[cfg(feature = "admin")]
    #[command(flatten)]
    pub(crate) admin: super::admin::AdminArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Loss {
    Continue,
    Quarantine,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HostSent {
    Client,
    Upstream,
}

/// A timeout; `None`: no timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bound(Option<Duration>);

impl Site {
    /// Takes from `other` what is not set here.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            listen: self.listen.or(other.listen),
            upstream: self.upstream.or(other.upstream),
            redis: self.redis.or(other.redis),
            #[cfg(feature = "etcd")]
            etcd: self.etcd.or(other.etcd),
            #[cfg(feature = "etcd")]
            etcd_whole_grace: self.etcd_whole_grace || other.etcd_whole_grace,
            #[cfg(feature = "tls")]
            certificates: self.certificates.or(other.certificates),
            after_loss: self.after_loss.or(other.after_loss),
            tenant_salt_file: self.tenant_salt_file.or(other.tenant_salt_file),
            host: self.host.or(other.host),
            trusted_proxies: self.trusted_proxies.or(other.trusted_proxies),
            header_timeout: self.header_timeout.or(other.header_timeout),
            upstream_timeout: self.upstream_timeout.or(other.upstream_timeout),
            idle_timeout: self.idle_timeout.or(other.idle_timeout),
            upstream_idle_timeout: self.upstream_idle_timeout.or(other.upstream_idle_timeout),
            keepalive: self.keepalive.or(other.keepalive),
            drain: self.drain.or(other.drain),
            max_connections: self.max_connections.or(other.max_connections),
            max_requests: self.max_requests.or(other.max_requests),
            status: self.status.or(other.status),
            access_log: self.access_log.or(other.access_log),
            access_log_keys: self.access_log_keys || other.access_log_keys,
            #[cfg(feature = "admin")]
            admin: self.admin.or(other.admin),
        }
    }

    /// The first field that differs and that only a restart can change.
    pub(crate) fn differs(&self, other: &Self) -> Option<&'static str> {
        let fixed = [
            ("listen", self.listen == other.listen),
            ("redis", self.redis == other.redis),
            #[cfg(feature = "etcd")]
            ("etcd", self.etcd == other.etcd),
            #[cfg(feature = "etcd")]
            ("etcd-whole-grace", self.etcd_whole_grace == other.etcd_whole_grace),
            #[cfg(feature = "tls")]
            ("backend-ca", self.certificates.ca == other.certificates.ca),
            #[cfg(feature = "tls")]
            ("backend-cert", self.certificates.cert == other.certificates.cert),
            #[cfg(feature = "tls")]
            ("backend-key", self.certificates.key == other.certificates.key),
            ("after-loss", self.after_loss == other.after_loss),
            ("tenant-salt-file", self.tenant_salt_file == other.tenant_salt_file),
            ("host", self.host == other.host),
            ("trusted-proxies", self.trusted_proxies == other.trusted_proxies),
            ("header-timeout", self.header_timeout == other.header_timeout),
            ("upstream-timeout", self.upstream_timeout == other.upstream_timeout),
            ("idle-timeout", self.idle_timeout == other.idle_timeout),
            ("upstream-idle-timeout", self.upstream_idle_timeout == other.upstream_idle_timeout),
            ("keepalive", self.keepalive == other.keepalive),
            ("drain", self.drain == other.drain),
            ("max-connections", self.max_connections == other.max_connections),
            ("max-requests", self.max_requests == other.max_requests),
            ("status", self.status == other.status),
            ("access-log", self.access_log == other.access_log),
            ("access-log-keys", self.access_log_keys == other.access_log_keys),
            #[cfg(feature = "admin")]
            ("admin", self.admin == other.admin),
        ];
        fixed.into_iter().find(|(_, is_same)| !is_same).map(|(field, _)| field)
    }

    pub(crate) fn listen(&self) -> SocketAddr {
        self.listen.unwrap_or(LISTEN)
    }

    pub(crate) fn max_connections(&self) -> usize {
        self.max_connections.unwrap_or_else(descriptors::connections)
    }

    /// Whether probes and metrics are served.
    pub(crate) const fn is_watched(&self) -> bool {
        #[cfg(feature = "admin")]
        if self.admin.address.is_some() {
            return true;
        }
        self.status.is_some()
    }

    pub(crate) fn bounds(&self) -> Bounds {
        let of = |said: Option<Bound>, default| said.map_or(Some(default), |bound| bound.0);
        Bounds {
            header: of(self.header_timeout, HEADER_TIMEOUT),
            upstream: of(self.upstream_timeout, UPSTREAM_TIMEOUT),
            idle: of(self.idle_timeout, IDLE_TIMEOUT),
            upstream_idle: of(self.upstream_idle_timeout, UPSTREAM_IDLE_TIMEOUT),
            keepalive: of(self.keepalive, KEEPALIVE),
            drain: self.drain.unwrap_or(DRAIN),
        }
    }

    /// The semaphore; an error names the field, and why it cannot be used.
    pub(crate) fn semaphore(&self) -> Result<Semaphore, (&'static str, String)> {
        let semaphore = self.counted()?;
        let Some(path) = &self.tenant_salt_file else { return Ok(semaphore) };
        let salt = salt(path).map_err(|what| ("tenant-salt-file", what))?;
        Ok(semaphore.tenant_salt(salt))
    }

    /// The semaphore, counted where the settings say.
    fn counted(&self) -> Result<Semaphore, (&'static str, String)> {
        #[cfg(feature = "etcd")]
        if let Some(url) = &self.etcd {
            self.check_etcd()?;
            let builder = EtcdBackend::builder(url.as_str()).whole_grace(self.etcd_whole_grace);
            #[cfg(feature = "tls")]
            let builder = match self.certificates.settings()? {
                Some(settings) => builder.tls(settings),
                None => builder,
            };
            let backend = builder.build().map(Semaphore::new);
            return backend.map_err(|error| self.refused("etcd", &error));
        }
        #[cfg(feature = "etcd")]
        if self.etcd_whole_grace {
            let what = "is set without etcd; expected both, or neither";
            return Err(("etcd-whole-grace", what.to_owned()));
        }
        let Some(url) = &self.redis else { return self.counted_alone() };
        let builder = RedisBackend::builder(url.as_str()).after_loss(self.after_loss());
        #[cfg(feature = "tls")]
        let builder = match self.certificates.settings()? {
            Some(settings) => builder.tls(settings),
            None => builder,
        };
        builder.build().map(Semaphore::new).map_err(|error| self.refused("redis", &error))
    }

    #[cfg_attr(
        not(feature = "tls"),
        expect(
            clippy::unused_self,
            clippy::unnecessary_wraps,
            reason = "with the feature they are used"
        )
    )]
    fn counted_alone(&self) -> Result<Semaphore, (&'static str, String)> {
        #[cfg(feature = "tls")]
        if let Some(field) = self.certificates.field() {
            let what = "permits are counted in this process, without TLS; expected a Redis or an etcd with a URL that \
                        begins with rediss or etcds";
            return Err((field, what.to_owned()));
        }
        Ok(Semaphore::in_memory())
    }

    /// The field that an error of the crate is about, and what it says. `url` is that of the server.
    #[cfg_attr(
        not(feature = "tls"),
        expect(clippy::unused_self, reason = "with the feature it is used")
    )]
    fn refused(&self, url: &'static str, error: &ConfigError) -> (&'static str, String) {
        #[cfg(feature = "tls")]
        if let Some(refused) = self.certificates.refused(error) {
            return refused;
        }
        (url, error.to_string())
    }

    #[cfg(feature = "etcd")]
    fn check_etcd(&self) -> Result<(), (&'static str, String)> {
        if self.redis.is_some() {
            let what = "redis is set, too (--redis, REDIS_URL or the file); leave out redis to count permits in etcd, or \
                        etcd (--etcd, ETCD_URL or the file) to count them in Redis";
            return Err(("etcd", what.to_owned()));
        }
        if self.after_loss == Some(Loss::Quarantine) {
            let what = "quarantine is for Redis alone, because a failover of etcd loses no permit; expected continue";
            return Err(("after-loss", what.to_owned()));
        }
        Ok(())
    }

    /// The server in which permits are counted, if there is one.
    pub(crate) const fn server(&self) -> Option<&'static str> {
        #[cfg(feature = "etcd")]
        if self.etcd.is_some() {
            return Some("etcd");
        }
        if self.redis.is_some() { Some("Redis") } else { None }
    }

    const fn after_loss(&self) -> AfterLoss {
        match self.after_loss {
            None | Some(Loss::Continue) => AfterLoss::Continue,
            Some(Loss::Quarantine) => AfterLoss::Quarantine,
        }
    }
}

/// The secret in a file. An error does not show the path, which may be the secret by mistake.
fn salt(path: &Path) -> Result<String, String> {
    let text =
        std::fs::read_to_string(path).map_err(|e| format!("the file cannot be read: {e}"))?;
    match text.trim() {
        "" => Err("the file is empty; expected a secret of one byte or more".to_owned()),
        salt => Ok(salt.to_owned()),
    }
}

pub(crate) fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "expected an IP address and a port, such as 127.0.0.1:8080")
}

/// An address, or a port of loopback.
pub(crate) fn own_address(text: &str) -> Result<SocketAddr, &'static str> {
    let port = text.parse().map(|port: u16| SocketAddr::from(([127, 0, 0, 1], port)));
    port.or_else(|_| text.parse()).map_err(|_| "expected a port, or an IP address and a port")
}

pub(crate) fn max_connections(text: &str) -> Result<usize, String> {
    in_range(text, 1, 1_000_000)
}

pub(crate) fn max_requests(text: &str) -> Result<usize, String> {
    in_range(text, 1, 1_000_000)
}

pub(crate) fn bound(text: &str) -> Result<Bound, String> {
    match text {
        "none" => Ok(Bound(None)),
        _ => match duration(text) {
            Ok(Duration::ZERO) => Err("expected 1ms or more, or none".to_owned()),
            Ok(bound) => Ok(Bound(Some(bound))),
            Err(allowed) => Err(format!("{allowed}, or none")),
        },
    }
}

/// TCP takes whole seconds.
pub(crate) fn keepalive(text: &str) -> Result<Bound, String> {
    match bound(text) {
        Ok(Bound(Some(time))) if time < Duration::from_secs(1) => {
            Err("expected 1s or more, or none".to_owned())
        }
        bound => bound,
    }
}
