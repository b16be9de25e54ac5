//! The operator's page, on an address of its own.

use std::net::SocketAddr;

use axum::Router;
use tower_semaphore::{ConfigError, Semaphore, admin};

use super::secret::Secret;
use super::{args, site};

/// Where the page is served, and to whom.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub(crate) struct AdminArgs {
    /// Serve the operator's page on a port of loopback, or on ADDR:PORT, which requires --admin-token
    #[arg(long = "admin", value_name = "[ADDR:]PORT", value_parser = site::own_address)]
    pub(crate) address: Option<SocketAddr>,

    /// The token of the operator's page, 16 to 256 characters; in a browser, the password of any user. Put it into the
    /// file of --config: other users of this machine can read the command line
    #[arg(long = "admin-token", value_name = "TOKEN")]
    pub(crate) token: Option<Secret>,

    /// A host name by which the operator's page may be requested, in addition to localhost and the address on which it
    /// listens; can be repeated
    #[arg(long = "admin-host", value_name = "NAME")]
    pub(crate) hosts: Vec<String>,
}

impl AdminArgs {
    /// Takes from `other` what is not set here.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            address: self.address.or(other.address),
            token: self.token.or(other.token),
            hosts: if self.hosts.is_empty() { other.hosts } else { self.hosts },
        }
    }

    fn router(&self, address: SocketAddr, semaphore: Semaphore) -> Result<Router, ConfigError> {
        let mut builder = match &self.token {
            Some(token) => admin::with_token(semaphore, token.as_str()),
            None => admin::without_token(semaphore),
        };
        builder = builder.bound_to(address);
        for host in &self.hosts {
            builder = builder.allow_host(host);
        }
        builder.build()
    }
}

/// The page. Exits the process with 2 if a setting is invalid.
pub(crate) fn router(settings: &AdminArgs, address: SocketAddr, semaphore: Semaphore) -> Router {
    if !address.ip().is_loopback() && settings.token.is_none() {
        args::refuse(format!("--admin: {address}; expected loopback, or set --admin-token"));
    }
    let router = settings.router(address, semaphore);
    router.unwrap_or_else(|error| args::refuse(format!("--admin: {error}")))
}
