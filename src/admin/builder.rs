//! How the page is set up.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;

use super::access::{Access, Token};
use crate::error::ConfigError;
use crate::semaphore::Semaphore;

/// Sets up the operator's page: the hosts by which it may be asked, and its token.
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
#[must_use = "it does nothing until it is built"]
pub struct AdminBuilder {
    semaphore: Semaphore,
    access: Access,
    error: Option<ConfigError>,
}

/// Sets up the operator's page. See [`AdminBuilder`] for what can be set, and the [module](super) for its routes.
pub fn builder(semaphore: Semaphore) -> AdminBuilder {
    AdminBuilder { semaphore, access: Access::default(), error: None }
}

impl AdminBuilder {
    /// Allows requests to a host: a name or an IP address, without a port. Can be repeated.
    ///
    /// `localhost`, names that end with `.localhost`, and addresses of loopback are always allowed. A request whose
    /// `Host` is none of these is rejected with 403: a site can have its own name lead to this server, and its
    /// pages in an operator's browser would then read and change what is here (DNS rebinding).
    pub fn allow_host(mut self, host: impl AsRef<str>) -> Self {
        if let Err(error) = self.access.hosts.allow(host.as_ref()) {
            self.error.get_or_insert(error);
        }
        self
    }

    /// Allows requests to the address on which the server listens. `0.0.0.0` and `[::]` stand for every IP address;
    /// names are still to be [allowed](Self::allow_host).
    pub fn bound_to(mut self, address: SocketAddr) -> Self {
        self.access.hosts.allow_address(address.ip());
        self
    }

    /// Rejects requests without this token with 401. It has 16 to 256 characters, of those of a bearer token:
    /// letters, digits, and `-._~+/=`.
    ///
    /// A program sends it as `Authorization: Bearer TOKEN`. A browser asks for a user and a password: any user name
    /// goes, and the token is the password. It is compared in constant time, and kept as its SHA-256. Neither of these
    /// hides it from those who read the network: serve the page over TLS where that is not yours alone.
    pub fn token(mut self, token: impl AsRef<str>) -> Self {
        match Token::new(token.as_ref()) {
            Ok(token) => self.access.token = Some(token),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
        self
    }

    /// The routes of the page.
    ///
    /// # Errors
    ///
    /// If a host or the token cannot be used.
    pub fn build(self) -> Result<Router, ConfigError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(super::routes(self.semaphore, Arc::new(self.access))),
        }
    }
}
