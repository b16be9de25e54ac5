//! The builder of the operator's page, which begins with the choice of a token or none.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;

use super::access::{Access, Hosts, Token};
use crate::error::ConfigError;
use crate::semaphore::Semaphore;

/// Builds the routes of the operator's page: the hosts that a request may name. Made by [`with_token`] or
/// [`without_token`].
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
/// let router = admin::with_token(semaphore, token)
///     .bound_to(address)
///     .allow_host("semaphores.ops.example")
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

/// Returns a builder for the operator's page that requires this token; a request without it is rejected with 401. See
/// [`AdminBuilder`] for further settings, and the [module](super) for the routes.
///
/// A token has 16 to 256 characters: letters, digits, and `-._~+/=`; [`build`](AdminBuilder::build) fails for any other.
/// A program sends it as `Authorization: Bearer TOKEN`. A browser prompts for a user and a password: enter the token as
/// the password, with any user name. The token is stored as its SHA-256 and compared in constant time. It is readable on
/// the network, so serve the page over TLS wherever others share the network.
///
/// # Examples
///
/// ```
/// use tower_semaphore::{ConfigError, Semaphore, admin};
///
/// # fn example(token: &str) -> Result<axum::Router, ConfigError> {
/// let router = admin::with_token(Semaphore::in_memory(), token).build()?;
/// # Ok(router) }
/// # assert!(example("0123456789abcdef").is_ok() && example("brief").is_err());
/// ```
pub fn with_token(semaphore: Semaphore, token: impl AsRef<str>) -> AdminBuilder {
    let (token, error) = match Token::new(token.as_ref()) {
        Ok(token) => (Some(token), None),
        Err(error) => (None, Some(error)),
    };
    AdminBuilder { semaphore, access: Access { hosts: Hosts::default(), token }, error }
}

/// Returns a builder for an operator's page that requires no token: **every client that reaches it can change limits,
/// pause, drain and revoke**.
///
/// The check of the host protects operators' browsers from other sites. It authenticates nobody, since any program can
/// send `Host: localhost`. Use this behind authentication of your own, or on a loopback address of a machine or pod
/// whose every user and container may do what an operator may.
///
/// # Examples
///
/// ```
/// use axum::Router;
/// use axum::extract::Request;
/// use axum::middleware::{Next, from_fn};
/// use axum::response::Response;
/// use http::StatusCode;
/// use tower_semaphore::{ConfigError, Semaphore, admin};
///
/// async fn authenticate(request: Request, next: Next) -> Result<Response, StatusCode> {
///     // ... look at the session, a client certificate ...
/// #   let is_operator = false;
///     if is_operator { Ok(next.run(request).await) } else { Err(StatusCode::UNAUTHORIZED) }
/// }
///
/// # fn main() -> Result<(), ConfigError> {
/// let admin = admin::without_token(Semaphore::in_memory()).allow_host("ops.example").build()?;
/// let app: Router = Router::new().nest_service("/ops", admin).layer(from_fn(authenticate));
/// # let _ = app; Ok(()) }
/// ```
pub fn without_token(semaphore: Semaphore) -> AdminBuilder {
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

    /// Builds the routes of the page.
    ///
    /// The plots cover the last four minutes, for the 64 names viewed last. Samples are taken only while someone views
    /// the page of a name.
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
