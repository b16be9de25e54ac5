//! Axum's `serve`, with connections that can hold a permit, and notice that their client has left.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::task::{Context, Poll};

use axum::Extension;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::AddExtension;
use axum::response::Response;
use axum::serve::{IncomingStream, Listener, Serve};
use tokio::net::TcpStream;
use tower_layer::Layer;
use tower_service::Service;

use super::connection::ConnectionIo;
use super::on_connection::OnConnection;

/// Serves as `axum::serve` does, with upgraded connections that hold the permit of their request until they close, and
/// with clients that are noticed when they leave.
///
/// A WebSocket is counted as long as it is open, without any code in its handler. If its permit is lost, the
/// connection is closed within half a second, unless [`OnLost::Continue`](super::OnLost::Continue) is set.
///
/// A client that leaves while its request waits in a layer, or holds a permit, is noticed within half a second, even
/// over HTTP/1.1 with an upload that no handler reads yet, or with a further byte behind its request. This needs a
/// listener of TCP or Unix sockets; for connections over TCP, such as TLS, use [`serve_over_tcp`].
///
/// See [`ConnectionIo`] for how this works, for HTTP/2, and for clients that close half of their connection. Requests
/// have the `ConnectInfo` of their peer, as with `into_make_service_with_connect_info`.
///
/// Returns Axum's [`Serve`], which is a future and has `with_graceful_shutdown`.
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
pub fn serve<L, S>(
    listener: L,
    service: S,
) -> Serve<ConnectionListener<L>, MakeConnectionService<S>, ConnectionService<S, L::Addr>>
where
    L: Listener,
    L::Addr: Clone + Sync + 'static,
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    axum::serve(ConnectionListener { listener, socket: None }, MakeConnectionService { service })
}

/// As [`serve`], over a listener whose connections run over TCP, such as TLS. `socket` returns the socket of a
/// connection, which is looked at for whether the client has left: `|tls| tls.get_ref().0` for the streams of
/// tokio-rustls.
///
/// ```no_run
/// use axum::Router;
/// use axum::serve::Listener;
/// use tokio::io::BufStream;
/// use tokio::net::TcpStream;
///
/// /// With a listener of your own.
/// async fn serve<L>(listener: L, app: Router) -> std::io::Result<()>
/// where
///     L: Listener<Io = BufStream<TcpStream>, Addr = std::net::SocketAddr>,
/// {
///     tower_semaphore::limit::serve_over_tcp(listener, app, |io| io.get_ref()).await
/// }
/// ```
pub fn serve_over_tcp<L, S>(
    listener: L,
    service: S,
    socket: fn(&L::Io) -> &TcpStream,
) -> Serve<ConnectionListener<L>, MakeConnectionService<S>, ConnectionService<S, L::Addr>>
where
    L: Listener,
    L::Addr: Clone + Sync + 'static,
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    let listener = ConnectionListener { listener, socket: Some(socket) };
    axum::serve(listener, MakeConnectionService { service })
}

/// The service of one connection.
type ConnectionService<S, A> = OnConnection<AddExtension<S, ConnectInfo<A>>>;

/// The listener of [`serve`]: wraps each connection in a [`ConnectionIo`].
#[derive(Debug)]
pub struct ConnectionListener<L: Listener> {
    listener: L,
    /// The socket under a connection that is none itself.
    socket: Option<fn(&L::Io) -> &TcpStream>,
}

impl<L: Listener> Listener for ConnectionListener<L> {
    type Io = ConnectionIo<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (io, address) = self.listener.accept().await;
        let io = match self.socket {
            None => ConnectionIo::new(io),
            Some(socket) => ConnectionIo::over_tcp(io, socket),
        };
        (io, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// Makes the service of each connection for [`serve`].
#[derive(Clone, Debug)]
pub struct MakeConnectionService<S> {
    service: S,
}

impl<L, S> Service<IncomingStream<'_, ConnectionListener<L>>> for MakeConnectionService<S>
where
    L: Listener,
    L::Addr: Clone + Sync + 'static,
    S: Clone,
{
    type Response = ConnectionService<S, L::Addr>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, stream: IncomingStream<'_, ConnectionListener<L>>) -> Self::Future {
        let peer = Extension(ConnectInfo(stream.remote_addr().clone()));
        ready(Ok(stream.io().connection().layer(peer.layer(self.service.clone()))))
    }
}
