//! What a connection tells its requests.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::extract::Request;
use axum::serve::Listener;
use http::Extensions;
use tower_service::Service;

/// A connection that was accepted, of which a type with Axum's `Connected` makes a `ConnectInfo`.
///
/// See [`Serve::connect_info`](super::Serve::connect_info).
pub struct IncomingConnection<'a, L: Listener> {
    io: &'a L::Io,
    remote_addr: &'a L::Addr,
}

impl<'a, L: Listener> IncomingConnection<'a, L> {
    pub(super) const fn new(io: &'a L::Io, remote_addr: &'a L::Addr) -> Self {
        Self { io, remote_addr }
    }

    /// Returns a reference to the connection as the listener made it.
    #[must_use]
    pub const fn io(&self) -> &'a L::Io {
        self.io
    }

    /// Returns the address of the peer.
    #[must_use]
    pub const fn remote_addr(&self) -> &'a L::Addr {
        self.remote_addr
    }
}

impl<L: Listener> Clone for IncomingConnection<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Listener> Copy for IncomingConnection<'_, L> {}

impl<L: Listener<Addr: fmt::Debug>> fmt::Debug for IncomingConnection<'_, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncomingConnection")
            .field("remote_addr", self.remote_addr)
            .finish_non_exhaustive()
    }
}

/// Inserts one thing that a connection tells its requests.
pub(super) type Insert = Arc<dyn Fn(&mut Extensions) + Send + Sync>;

/// The service of one connection, whose requests get what it tells them.
#[derive(Clone)]
pub(super) struct WithConnectInfo<S> {
    inner: S,
    infos: Arc<[Insert]>,
}

impl<S> WithConnectInfo<S> {
    pub(super) const fn new(inner: S, infos: Arc<[Insert]>) -> Self {
        Self { inner, infos }
    }
}

impl<S: Service<Request>> Service<Request> for WithConnectInfo<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request) -> S::Future {
        for insert in &*self.infos {
            insert(request.extensions_mut());
        }
        self.inner.call(request)
    }
}
