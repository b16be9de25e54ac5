//! Accepts connections, and drains them.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::extract::Request;
use axum::http::Response;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::Layer;
use tower_semaphore::limit::ConnectionIo;

use super::body::ResponseBody;
use super::connect::{TCP_PROBES, tcp_interval};
use super::connection::{Activity, WatchedIo};
use super::connections::Connections;
use super::counts::OpenConnection;
use super::progress::Bounds;

/// The largest request head.
const HEAD_BYTES: usize = 64 * 1024;
/// Concurrent requests on one connection of HTTP/2.
const STREAMS: u32 = 100;
/// How much of a request's body over HTTP/2 is read ahead, while the request waits for instance. The connection's window
/// is the sum of its streams', so that a body that is not read holds up no other.
const WINDOW: u32 = 64 * 1024;
/// How much of a response over HTTP/2 is written ahead.
const SEND_BYTES: usize = 64 * 1024;
/// How often the listener looks for an idle connection while it has no room for a new one.
const LOOK: Duration = Duration::from_millis(50);
/// How often it says so at most.
const WARN: Duration = Duration::from_secs(60);
/// How long it pauses if it cannot accept any.
const PAUSE: Duration = Duration::from_secs(1);

/// Handles requests.
pub(crate) trait Serve: Send + Sync + 'static {
    fn serve(
        self: Arc<Self>,
        request: Request<Incoming>,
        from: Peer,
    ) -> impl Future<Output = Response<ResponseBody>> + Send;

    /// Counts a new connection until it ends, if such connections are counted.
    fn connected(&self) -> Option<OpenConnection> {
        None
    }
}

/// The connection of a request.
#[derive(Clone)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) activity: Arc<Activity>,
    pub(crate) rests: Rests,
}

/// Where connections come from, and how many may be open.
pub(crate) struct Listener {
    pub(crate) socket: TcpListener,
    pub(crate) most: usize,
    /// Its connections.
    pub(crate) open: Arc<Connections>,
    /// Other listeners' connections, of which one can be closed if file descriptors run out.
    pub(crate) others: Vec<Arc<Connections>>,
}

/// Serves until `stop`, and then drains: requests in flight end within the bound or are cut off.
///
/// Beyond the maximum, or if file descriptors run out, a new connection takes the place of the one that has been idle for
/// longest. If none is idle, it waits.
pub(crate) async fn run<S: Serve>(
    listener: Listener,
    service: &Arc<S>,
    bounds: Bounds,
    stop: impl Future<Output = ()>,
) {
    let Listener { socket, most, open, others } = listener;
    let (draining, drains) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    // One that was accepted, and for which there is no room yet.
    let mut next = None;
    let mut warned: Option<Instant> = None;
    loop {
        if connections.len() < most
            && let Some((socket, peer)) = next.take()
        {
            let activity = Arc::new(Activity::new(bounds));
            let entered = open.enter(&activity);
            let (service, drains) = (Arc::clone(service), drains.clone());
            connections.spawn(async move {
                connection(socket, peer, activity, service, drains).await;
                drop(entered);
            });
        }
        if next.is_some() {
            open.replace_one();
            if is_due(&mut warned) {
                tracing::warn!(
                    "the maximum of {most} connections is reached; idle ones are closed for new ones"
                );
            }
        }
        tokio::select! {
            () = &mut stop => break,
            Some(_) = connections.join_next() => {}
            () = tokio::time::sleep(LOOK), if next.is_some() => {}
            accepted = socket.accept(), if next.is_none() => match accepted {
                Ok(accepted) => next = Some(accepted),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    let mut all = others.iter().chain([&open]);
                    let pause = wait_for_room(&error, all.any(|open| open.spare_one()), &mut warned);
                    tokio::select! {
                        () = &mut stop => break,
                        Some(_) = connections.join_next() => {}
                        () = tokio::time::sleep(pause) => {}
                    }
                }
            },
        }
    }
    drop(socket);
    let _ = draining.send(true);
    drain(connections, bounds.drain).await;
}

/// Waits until all connections have ended, and cuts off those that take longer than `bound`.
async fn drain(mut connections: JoinSet<()>, bound: Duration) {
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(bound, all).await.is_err() {
        let left = connections.len();
        tracing::warn!("the drain timeout has passed; {left} connections are cut off");
        connections.shutdown().await;
    }
}

/// Reports that no connection can be accepted, most likely because file descriptors are exhausted. Returns how long to
/// wait for room: a moment if an idle connection is `closed` for it.
fn wait_for_room(error: &io::Error, closed: bool, warned: &mut Option<Instant>) -> Duration {
    if !closed {
        tracing::error!(%error, "cannot accept a connection");
        return PAUSE;
    }
    if is_due(warned) {
        tracing::warn!(%error, "idle connections are closed for new ones");
    }
    LOOK
}

/// Whether to say it again.
fn is_due(warned: &mut Option<Instant>) -> bool {
    let is_due = warned.is_none_or(|warned| warned.elapsed() > WARN);
    if is_due {
        *warned = Some(Instant::now());
    }
    is_due
}

/// Whether only this connection failed, which is already closed.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Fails on a dead socket only.
fn set_options(socket: &TcpStream, keepalive: Option<Duration>) {
    // Without this, small frames of a stream are held back.
    let _ = socket.set_nodelay(true);
    if let Some(time) = keepalive {
        let keepalive = TcpKeepalive::new().with_time(time);
        let keepalive = keepalive.with_interval(tcp_interval(time)).with_retries(TCP_PROBES);
        let _ = SockRef::from(socket).set_tcp_keepalive(&keepalive);
    }
}

async fn connection<S: Serve>(
    socket: TcpStream,
    address: SocketAddr,
    activity: Arc<Activity>,
    service: Arc<S>,
    mut drains: watch::Receiver<bool>,
) {
    set_options(&socket, activity.bounds().keepalive);
    let _open = service.connected();

    // Dropped last, which aborts the connection's remaining streams.
    let streams = Streams::default();
    // A client that leaves is noticed though its upload lies unread.
    let io =
        ConnectionIo::over_tcp(WatchedIo::new(socket, Arc::clone(&activity)), WatchedIo::get_ref);
    let connection = io.connection();
    let peer = Peer {
        address,
        activity: Arc::clone(&activity),
        rests: Rests { streams: Arc::downgrade(&streams.0), drains: drains.clone() },
    };
    let serve = tower::service_fn(move |request| {
        let answer = Arc::clone(&service).serve(request, peer.clone());
        async move { Ok::<_, Infallible>(answer.await) }
    });
    // Holds permits past the end of HTTP.
    let serve = TowerToHyperService::new(connection.layer(serve));

    let builder = http(streams.clone(), activity.bounds().keepalive);
    {
        let mut serving = pin!(builder.serve_connection_with_upgrades(TokioIo::new(io), serve));
        let mut is_draining = false;
        loop {
            tokio::select! {
                end = serving.as_mut() => {
                    if let Err(error) = end {
                        tracing::debug!(error, "a client's connection broke");
                    }
                    break;
                }
                _ = drains.changed(), if !is_draining => {
                    is_draining = true;
                    serving.as_mut().graceful_shutdown();
                }
                () = activity.watch() => {
                    tracing::debug!("a client's connection exceeded a timeout");
                    break;
                }
            }
        }
    }
    if let Some(tunnel) = activity.take_tunnel() {
        tunnel.carry(&activity, &connection).await;
    }
}

/// HTTP of both versions, with the bounds of what a client may make this process keep.
fn http(streams: Streams, keepalive: Option<Duration>) -> auto::Builder<Streams> {
    let mut builder = auto::Builder::new(streams);
    // `Activity::watch` has the header timeout, with all others.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(HEAD_BYTES);
    let head_bytes = u32::try_from(HEAD_BYTES).unwrap_or(u32::MAX);
    let mut http2 = builder.http2();
    http2.timer(TokioTimer::new());
    if let Some(keepalive) = keepalive {
        http2.keep_alive_interval(keepalive).keep_alive_timeout(keepalive);
    }
    http2.max_header_list_size(head_bytes).max_concurrent_streams(STREAMS);
    http2.initial_stream_window_size(WINDOW);
    http2.initial_connection_window_size(WINDOW * STREAMS).max_send_buf_size(SEND_BYTES);
    builder
}

/// Reads the rests of bodies that nothing else reads, until the connection ends or drains.
#[derive(Clone)]
pub(crate) struct Rests {
    streams: Weak<Mutex<JoinSet<()>>>,
    drains: watch::Receiver<bool>,
}

impl Rests {
    pub(crate) fn read(&self, rest: impl Future<Output = ()> + Send + 'static) {
        let Some(streams) = self.streams.upgrade() else { return };
        let mut drains = self.drains.clone();
        Streams(streams).execute(async move {
            tokio::select! {
                () = rest => {}
                _ = drains.wait_for(|drains| *drains) => {}
            }
        });
    }
}

/// Runs the streams of one connection of HTTP/2; aborts them on drop.
#[derive(Clone, Default)]
struct Streams(Arc<Mutex<JoinSet<()>>>);

impl<F> Executor<F> for Streams
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, stream: F) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while streams.try_join_next().is_some() {}
        streams.spawn(stream);
    }
}
