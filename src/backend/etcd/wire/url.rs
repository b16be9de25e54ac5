//! Parses URLs of clusters of etcd.

use std::fmt;

use percent_encoding::percent_decode_str;

use crate::backend::prefix;
use crate::backend::url::{Host, parts, split, unknown_scheme};
use crate::error::ConfigError;

const ALLOWED: &str = "etcd://[user:password@]host[:port][,host[:port]...][/prefix], \
                       etcds://... with the feature `tls`";
const PORT: u16 = 2379;

/// A parsed URL.
#[derive(Clone)]
pub struct Url {
    /// The members to connect to, each once.
    pub endpoints: Vec<Endpoint>,
    pub credentials: Option<Credentials>,
    /// Whether connections use TLS.
    pub is_tls: bool,
    /// The prefix of all keys, if the URL has one.
    pub prefix: Option<String>,
}

impl Url {
    /// Parses a URL.
    ///
    /// # Errors
    ///
    /// If it is invalid. The error shows nothing of the URL that may be a password.
    pub fn parse(url: &str) -> Result<Self, ConfigError> {
        Self::read(url).map_err(|why| {
            ConfigError::new(format!("etcd URL cannot be used: {why}; expected {ALLOWED}"))
        })
    }

    /// The error says what is wrong.
    fn read(url: &str) -> Result<Self, String> {
        let (scheme, rest) = split(url)?;
        let is_tls = match scheme {
            "etcd" => false,
            "etcds" => true,
            scheme => return Err(unknown_scheme(scheme)),
        };
        if is_tls && cfg!(not(feature = "tls-no-provider")) {
            return Err("etcds:// needs the feature `tls` of tower-semaphore".to_owned());
        }
        let parts = parts(rest, PORT, ",@")?;
        if !parts.query.is_empty() {
            return Err("it has options, of which none is known".to_owned());
        }
        if !parts.path.is_empty() && !prefix::is_allowed(parts.path) {
            return Err(format!("the prefix is invalid; expected {}", prefix::ALLOWED));
        }
        let mut endpoints: Vec<Endpoint> = Vec::new();
        for (i, host) in parts.hosts.into_iter().enumerate() {
            let same = |other: &Endpoint| other.0.is_same(&host);
            if let Some(at) = endpoints.iter().position(same) {
                return Err(format!("host {} is host {} once more", i + 1, at + 1));
            }
            endpoints.push(Endpoint(host));
        }
        let user = parts.user.strip_suffix('@');
        Ok(Self {
            endpoints,
            credentials: user.map(Credentials::parse).transpose()?,
            is_tls,
            prefix: Some(parts.path).filter(|path| !path.is_empty()).map(str::to_owned),
        })
    }
}

impl fmt::Debug for Url {
    /// Shows neither hosts nor credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Url").field("is_tls", &self.is_tls).finish_non_exhaustive()
    }
}

/// A member's address. Displayed as `host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(Host);

impl Endpoint {
    /// The host, as it is looked up.
    pub(super) fn host(&self) -> &str {
        self.0.address()
    }

    pub(super) const fn port(&self) -> u16 {
        self.0.port
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A user and its password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub(super) user: String,
    pub(super) password: String,
}

impl Credentials {
    /// Parses `user:password`.
    fn parse(text: &str) -> Result<Self, String> {
        let (user, password) = text.split_once(':').unwrap_or((text, ""));
        let decode = |text: &str| {
            let decoded = percent_decode_str(text).decode_utf8();
            decoded.map(Into::into).map_err(|_| "user or password is not valid UTF-8".to_owned())
        };
        let (user, password): (String, String) = (decode(user)?, decode(password)?);
        if user.is_empty() || password.is_empty() {
            return Err("the user or its password is missing before @".to_owned());
        }
        Ok(Self { user, password })
    }
}

impl fmt::Debug for Credentials {
    /// Shows neither user nor password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
