//! The builder of the operator's page.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;

use super::access::{Access, Token};
use crate::error::ConfigError;
use crate::semaphore::Semaphore;

/// Builds the routes of the operator's page: allowed hosts and a token.
///
/// # Examples
///
/// ```
/// use std::net::SocketAddr;
///
/// use tower_semaphore::{ConfigError, Semaphore, admin};
///
/// # fn example(semaphore: Semaphore, token: &str) -> Result<axum::Router, ConfigError> {
/// let address = SocketAddr::from(([10, 0, 0, 7], 9090));
/// let router = admin::builder(semaphore)
///     .bound_to(address)
///     .allow_host("semaphores.ops.example")
///     .token(token)
///     .build()?;
/// # Ok(router) }
/// ```
#[derive(Debug)]
#[must_use = "a builder does nothing until it is built"]
pub struct AdminBuilder {
    semaphore: Semaphore,
    access: Access,
    error: Option<ConfigError>,
}

/// Returns a builder for the operator's page. See [`AdminBuilder`] for its settings, and the [module](super) for the
/// routes.
///
/// # Examples
///
/// ```
/// use tower_semaphore::{ConfigError, Semaphore, admin};
///
/// # fn example(token: &str) -> Result<axum::Router, ConfigError> {
/// let router = admin::builder(Semaphore::in_memory()).token(token).build()?;
/// # Ok(router) }
/// ```
pub fn builder(semaphore: Semaphore) -> AdminBuilder {
    AdminBuilder { semaphore, access: Access::default(), error: None }
}

impl AdminBuilder {
    /// Allows requests to a host: a name or an IP address, without a port. Can be repeated.
    ///
    /// `localhost`, names that end with `.localhost`, and loopback addresses are always allowed. A request with any
    /// other `Host` is rejected with 403. This prevents DNS rebinding: a site can point its own name at this server,
    /// and its pages in an operator's browser could then read and change semaphores.
    pub fn allow_host(mut self, host: impl AsRef<str>) -> Self {
        if let Err(error) = self.access.hosts.allow(host.as_ref()) {
            self.error.get_or_insert(error);
        }
        self
    }

    /// Allows requests to the address that the server listens on. `0.0.0.0` and `[::]` stand for every IP address;
    /// names still have to be [allowed](Self::allow_host).
    pub fn bound_to(mut self, address: SocketAddr) -> Self {
        self.access.hosts.allow_address(address.ip());
        self
    }

    /// Requires this token; a request without it is rejected with 401. A token has 16 to 256 characters: letters,
    /// digits, and `-._~+/=`.
    ///
    /// A program sends it as `Authorization: Bearer TOKEN`. A browser prompts for a user and a password: enter the
    /// token as the password, with any user name. The token is stored as its SHA-256 and compared in constant time.
    /// It is readable on the network, so serve the page over TLS wherever others share the network.
    pub fn token(mut self, token: impl AsRef<str>) -> Self {
        match Token::new(token.as_ref()) {
            Ok(token) => self.access.token = Some(token),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
        self
    }

    /// Builds the routes of the page.
    ///
    /// # Errors
    ///
    /// If a host or the token is invalid.
    pub fn build(self) -> Result<Router, ConfigError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(super::routes(self.semaphore, Arc::new(self.access))),
        }
    }
}
