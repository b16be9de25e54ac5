//! Axum's `serve`, over connections that hold permits and notice that their client has left.

mod accept;
mod connect_info;

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::extract::Request;
use axum::extract::connect_info::Connected;
use axum::response::Response;
use axum::serve::Listener;
use futures_util::future::BoxFuture;
use tokio::net::TcpStream;
use tower_service::Service;

use self::accept::{ConnectionListener, MakeConnectionService};
pub use self::connect_info::IncomingConnection;

/// Serves as `axum::serve` does; upgraded connections hold the permit of their request until they close, and clients
/// that leave are noticed.
///
/// A WebSocket is counted as long as it is open, without any code in its handler. If its permit is lost, the
/// connection is closed within half a second, unless [`OnLost::Continue`](super::OnLost::Continue) is set.
///
/// A client that leaves while its request waits in a layer, or holds a permit, is noticed within half a second, even
/// over HTTP/1.1 with an upload that no handler reads yet, or with a further byte behind its request. This needs a
/// listener of TCP or Unix sockets; for connections over TCP, such as TLS, call [`over_tcp`](Serve::over_tcp).
///
/// See [`ConnectionIo`](super::ConnectionIo) for how this works, for HTTP/2, and for clients that close half of their
/// connection.
///
/// Requests have the `ConnectInfo` of their peer's address, which `axum::serve` inserts only with
/// `into_make_service_with_connect_info`. For one of your own, call [`connect_info`](Serve::connect_info).
///
/// Returns a future, which never ends: to stop serving, call [`with_graceful_shutdown`](Serve::with_graceful_shutdown),
/// or drop it.
///
/// # Examples
///
/// ```no_run
/// use axum::Router;
/// use axum::extract::ws::{WebSocket, WebSocketUpgrade};
/// use axum::routing::any;
/// use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
///
/// # async fn main_() -> Result<(), Box<dyn std::error::Error>> {
/// let semaphore = Semaphore::redis("redis://127.0.0.1/")?;
/// let ten_sockets = ConcurrencyLimitLayer::builder(&semaphore, "sockets").limit(10).build()?;
///
/// let app = Router::new()
///     .route("/", any(async |upgrade: WebSocketUpgrade| upgrade.on_upgrade(talk)))
///     .layer(ten_sockets);
/// async fn talk(_: WebSocket) {}
///
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
/// tower_semaphore::limit::serve(listener, app).await?;
/// # Ok(()) }
/// ```
pub fn serve<L, S>(listener: L, service: S) -> Serve<L, S>
where
    L: Listener,
    L::Addr: Clone + Sync + 'static,
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    Serve {
        listener: ConnectionListener::new(listener),
        service: MakeConnectionService::new(service),
    }
}

/// A server that is not started yet: the result of [`serve`], which becomes a future by `.await`.
#[must_use = "a server does nothing unless it is awaited"]
pub struct Serve<L: Listener, S> {
    listener: ConnectionListener<L>,
    service: MakeConnectionService<L, S>,
}

/// A server that stops gracefully.
///
/// Made by [`Serve::with_graceful_shutdown`].
#[must_use = "a server does nothing unless it is awaited"]
pub struct WithGracefulShutdown<L: Listener, S, F> {
    serve: Serve<L, S>,
    signal: F,
}

/// The future of a [`Serve`], and of a [`WithGracefulShutdown`].
///
/// # Cancel safety
///
/// Dropping it stops accepting connections; those that are open go on.
#[must_use = "futures must be awaited or polled"]
pub struct ServeFuture {
    future: BoxFuture<'static, io::Result<()>>,
}

impl<L: Listener, S> Serve<L, S> {
    /// Names the TCP socket under a connection, for listeners of connections over TCP, such as TLS:
    /// `|tls| tls.get_ref().0` for the streams of tokio-rustls.
    ///
    /// The socket says whether the client has left.
    ///
    /// ```no_run
    /// use axum::Router;
    /// use axum::serve::Listener;
    /// use tokio::io::BufStream;
    /// use tokio::net::TcpStream;
    /// use tower_semaphore::limit::serve;
    ///
    /// /// With a listener of your own.
    /// async fn run<L>(listener: L, app: Router) -> std::io::Result<()>
    /// where
    ///     L: Listener<Io = BufStream<TcpStream>, Addr = std::net::SocketAddr>,
    /// {
    ///     serve(listener, app).over_tcp(|io| io.get_ref()).await
    /// }
    /// ```
    pub fn over_tcp(mut self, socket: fn(&L::Io) -> &TcpStream) -> Self {
        self.listener.over_tcp(socket);
        self
    }

    /// Inserts a `ConnectInfo<C>` into each request, beside that of the peer's address.
    ///
    /// `C` is made once for each connection. Implement Axum's [`Connected`] for it, with [`IncomingConnection`] as the
    /// argument.
    ///
    /// ```no_run
    /// use axum::Router;
    /// use axum::extract::ConnectInfo;
    /// use axum::extract::connect_info::Connected;
    /// use axum::routing::get;
    /// use tokio::net::TcpListener;
    /// use tower_semaphore::limit::{IncomingConnection, serve};
    ///
    /// #[derive(Clone)]
    /// struct LocalPort(u16);
    ///
    /// impl Connected<IncomingConnection<'_, TcpListener>> for LocalPort {
    ///     fn connect_info(connection: IncomingConnection<'_, TcpListener>) -> Self {
    ///         Self(connection.io().local_addr().map_or(0, |address| address.port()))
    ///     }
    /// }
    ///
    /// # async fn run(listener: TcpListener) -> std::io::Result<()> {
    /// let port = async |ConnectInfo(port): ConnectInfo<LocalPort>| port.0.to_string();
    /// let app = Router::new().route("/", get(port));
    /// serve(listener, app).connect_info::<LocalPort>().await
    /// # }
    /// ```
    pub fn connect_info<C>(mut self) -> Self
    where
        C: for<'a> Connected<IncomingConnection<'a, L>>,
    {
        self.service.insert::<C>();
        self
    }

    /// Stops the server when `signal` ends: it accepts no more connections, and ends once those that are open have
    /// answered their requests.
    ///
    /// Requests that wait for a permit wait on, and delay the end: call
    /// [`Semaphore::stop_waiting`](crate::Semaphore::stop_waiting) with the signal.
    ///
    /// ```no_run
    /// use axum::Router;
    /// use tower_semaphore::Semaphore;
    /// use tower_semaphore::limit::serve;
    ///
    /// # async fn run(semaphore: Semaphore, app: Router) -> std::io::Result<()> {
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    /// let waiting = semaphore.clone();
    /// serve(listener, app)
    ///     .with_graceful_shutdown(async move {
    ///         let _ = tokio::signal::ctrl_c().await;
    ///         waiting.stop_waiting();
    ///     })
    ///     .await?;
    /// semaphore.shutdown().await;
    /// # Ok(()) }
    /// ```
    pub fn with_graceful_shutdown<F>(self, signal: F) -> WithGracefulShutdown<L, S, F>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        WithGracefulShutdown { serve: self, signal }
    }

    /// Returns the local address of the listener.
    ///
    /// # Errors
    ///
    /// As the listener's.
    pub fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

impl<L: Listener, S, F> WithGracefulShutdown<L, S, F> {
    /// Returns the local address of the listener.
    ///
    /// # Errors
    ///
    /// As the listener's.
    pub fn local_addr(&self) -> io::Result<L::Addr> {
        self.serve.local_addr()
    }
}

impl<L, S> IntoFuture for Serve<L, S>
where
    L: Listener,
    L::Addr: Clone + Sync + fmt::Debug + 'static,
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Output = io::Result<()>;
    type IntoFuture = ServeFuture;

    fn into_future(self) -> ServeFuture {
        let serve = axum::serve(self.listener, self.service);
        ServeFuture { future: Box::pin(serve.into_future()) }
    }
}

impl<L, S, F> IntoFuture for WithGracefulShutdown<L, S, F>
where
    L: Listener,
    L::Addr: Clone + Sync + fmt::Debug + 'static,
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    F: Future<Output = ()> + Send + 'static,
{
    type Output = io::Result<()>;
    type IntoFuture = ServeFuture;

    fn into_future(self) -> ServeFuture {
        let Serve { listener, service } = self.serve;
        let serve = axum::serve(listener, service).with_graceful_shutdown(self.signal);
        ServeFuture { future: Box::pin(serve.into_future()) }
    }
}

impl Future for ServeFuture {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.future.as_mut().poll(cx)
    }
}

impl<L: Listener, S> fmt::Debug for Serve<L, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serve").finish_non_exhaustive()
    }
}

impl<L: Listener, S, F> fmt::Debug for WithGracefulShutdown<L, S, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WithGracefulShutdown").finish_non_exhaustive()
    }
}

impl fmt::Debug for ServeFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServeFuture").finish_non_exhaustive()
    }
}
