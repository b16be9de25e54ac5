//! The pool of connections to the upstream.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::connect::{CONNECT_TIMEOUT, Connected, Connector, Io};
use super::counts::OpenConnection;
use super::headers;
use super::progress::Bounds;
use super::upload::{Stream, Upload};
use super::upstream::{Protocol, Upstream};

/// Idle connections of HTTP/1.1 that are kept.
const MOST_IDLE: usize = 1024;
/// Concurrent requests on one connection of HTTP/2, where the upstream allows as many; servers commonly allow 100 or
/// more.
const STREAMS: u16 = 100;
/// How much of a response over HTTP/2 is read ahead of its client. The connection's window is the sum of its streams', so
/// that a client that does not read holds up no other.
const WINDOW: u32 = 256 * 1024;
/// Fields in the head of a response.
const FIELDS: usize = 512;
/// The largest head of a response over HTTP/2.
const HEAD_BYTES: u32 = 64 * 1024;

/// The connections to one upstream.
pub(crate) struct Pool {
    connector: Connector,
    bounds: Bounds,
    idle: Mutex<Vec<Idle>>,
    shared: Mutex<Sharing>,
    /// Wakes one request that waits: a stream may be free, or a further connection needed. Each that leaves or opens
    /// one wakes the next, until there is nothing to do.
    opened: Notify,
    /// Whether connections to the upstream can be shared, as far as known.
    is_shared: AtomicBool,
}

struct Idle {
    sender: http1::SendRequest<Body>,
    connection: AbortHandle,
    since: Instant,
}

/// The connections of HTTP/2, and the requests for which there are too few of them.
struct Sharing {
    connections: Vec<Shared>,
    waiting: usize,
    /// Connections that are being opened.
    opening: usize,
    /// Requests that the last connection to be opened may carry.
    expected: usize,
    /// How often none could be opened, and why it could not the last time.
    failures: u64,
    failure: Arc<str>,
}

#[derive(Clone)]
struct Shared {
    sender: http2::SendRequest<Body>,
    /// Streams that the upstream allows, as far as it has said so.
    allowed: watch::Receiver<usize>,
    /// One clone for each request on it.
    streams: Arc<()>,
    /// When it was first seen without a request since the last one.
    idle: Option<Instant>,
}

/// A connection for one request.
pub(crate) enum Lease {
    Http1 { sender: http1::SendRequest<Body>, connection: AbortHandle, is_reused: bool },
    Http2 { sender: http2::SendRequest<Body>, stream: Arc<Stream>, is_reused: bool },
}

impl Pool {
    pub(crate) fn new(upstream: &Upstream, bounds: Bounds) -> Result<Arc<Self>, String> {
        let shared = Sharing {
            connections: Vec::new(),
            waiting: 0,
            opening: 0,
            expected: usize::from(STREAMS),
            failures: 0,
            failure: "".into(),
        };
        let pool = Arc::new(Self {
            connector: Connector::new(upstream, bounds.keepalive)?,
            bounds,
            idle: Mutex::default(),
            shared: Mutex::new(shared),
            opened: Notify::new(),
            is_shared: AtomicBool::new(upstream.protocol != Protocol::Http),
        });
        if let Some(idle) = bounds.upstream_idle {
            tokio::spawn(sweep(Arc::downgrade(&pool), idle));
        }
        Ok(pool)
    }

    /// A pooled connection, or a new one if there is none or `fresh` is set. `upgrade` is for a request
    /// that asks for an upgrade, which needs HTTP/1.1.
    pub(crate) async fn lease(&self, fresh: bool, upgrade: bool) -> Result<Lease, BoxError> {
        let may_share = !upgrade && self.is_shared.load(Ordering::Relaxed);
        if may_share && let Some(lease) = self.share().await? {
            return Ok(lease);
        }
        if !fresh && let Some(lease) = self.reuse() {
            return Ok(lease);
        }
        let connected = self.connector.connect(upgrade).await?;
        self.start(connected, upgrade).await
    }

    /// A stream of a connection that requests share. Opens as many as the requests need by what the upstream allows;
    /// `None`: connections to this upstream cannot be shared.
    async fn share(&self) -> Result<Option<Lease>, BoxError> {
        if let Some(lease) = lock(&self.shared).lease() {
            return Ok(Some(lease));
        }
        let waiting = Waiting::new(self);
        loop {
            let mut opened = pin!(self.opened.notified());
            opened.as_mut().enable();
            let opening = {
                let mut shared = lock(&self.shared);
                if let Some(lease) = shared.lease() {
                    return Ok(Some(lease));
                }
                if !self.is_shared.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                if shared.failures != waiting.failures {
                    // Those that there are will be free sooner than another attempt ends.
                    let lease = shared.least_used();
                    return lease.map(Some).ok_or_else(|| String::from(&*shared.failure).into());
                }
                let is_enough = shared.opening * shared.expected >= shared.waiting;
                (!is_enough).then(|| Opening::new(self, &mut shared))
            };
            let Some(opening) = opening else {
                opened.await;
                continue;
            };
            // Another one may be needed.
            self.opened.notify_one();
            let connected = async {
                let connected = self.connector.connect(false).await?;
                self.start(connected, false).await
            };
            match connected.await {
                Ok(lease) => return Ok(Some(lease)),
                Err(error) => opening.failed(&error),
            }
        }
    }

    /// Speaks HTTP on a new connection.
    async fn start(&self, connected: Connected, upgrade: bool) -> Result<Lease, BoxError> {
        let open = OpenConnection::to_upstream();
        if !connected.is_http2 {
            if !upgrade {
                self.is_shared.store(false, Ordering::Relaxed);
            }
            let mut builder = http1::Builder::new();
            let (sender, connection) = builder.max_headers(FIELDS).handshake(connected.io).await?;
            let connection = tokio::spawn(async move {
                let _open = open;
                if let Err(error) = connection.with_upgrades().await {
                    tracing::debug!(%error, "a connection to the upstream broke");
                }
            });
            let connection = connection.abort_handle();
            return Ok(Lease::Http1 { sender, connection, is_reused: false });
        }
        self.is_shared.store(true, Ordering::Relaxed);
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).max_header_list_size(HEAD_BYTES);
        if let Some(keepalive) = self.bounds.keepalive {
            builder.keep_alive_interval(keepalive).keep_alive_timeout(keepalive);
            builder.keep_alive_while_idle(true);
        }
        builder.initial_stream_window_size(WINDOW);
        builder.initial_connection_window_size(WINDOW * u32::from(STREAMS));
        // Until the upstream says how many it allows.
        builder.initial_max_send_streams(0);
        let (sender, connection) = builder.handshake(connected.io).await?;
        let (says, mut allowed) = watch::channel(0);
        tokio::spawn(async move {
            let _open = open;
            if let Err(error) = drive(connection, says).await {
                tracing::debug!(%error, "a connection to the upstream broke");
            }
        });
        // It says so in the first frame that it sends (RFC 9113, 3.4).
        let said = tokio::time::timeout(CONNECT_TIMEOUT, allowed.wait_for(|streams| *streams > 0));
        let expected = match said.await {
            Ok(Ok(streams)) => (*streams).min(STREAMS.into()),
            Ok(Err(_)) => {
                return Err("the upstream closed the connection before its SETTINGS".into());
            }
            Err(_) => return Err("the upstream sent no SETTINGS that allow a request".into()),
        };
        let shared = Shared { sender, allowed, streams: Arc::default(), idle: None };
        let mut sharing = lock(&self.shared);
        sharing.expected = expected;
        sharing.connections.push(shared.clone());
        Ok(shared.lease(false))
    }

    /// Gives no more requests to a shared connection.
    pub(crate) fn retire(&self, streams: &Weak<()>) {
        let gone = Weak::as_ptr(streams);
        let mut shared = lock(&self.shared);
        shared.connections.retain(|shared| !std::ptr::eq(Arc::as_ptr(&shared.streams), gone));
    }

    fn reuse(&self) -> Option<Lease> {
        let mut idle = lock(&self.idle);
        // The most recently used one, so that the others can expire.
        while let Some(Idle { sender, connection, since }) = idle.pop() {
            if sender.is_ready() && !self.is_over(since) {
                return Some(Lease::Http1 { sender, connection, is_reused: true });
            }
        }
        None
    }

    fn is_over(&self, since: Instant) -> bool {
        self.bounds.upstream_idle.is_some_and(|idle| since.elapsed() >= idle)
    }

    /// Returns the connection to the pool once the response is over.
    fn keep(self: &Arc<Self>, mut sender: http1::SendRequest<Body>, connection: AbortHandle) {
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            if sender.ready().await.is_err() {
                return;
            }
            let Some(pool) = pool.upgrade() else { return };
            let mut idle = lock(&pool.idle);
            if idle.len() < MOST_IDLE {
                idle.push(Idle { sender, connection, since: Instant::now() });
            }
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes connections that were idle for this long.
async fn sweep(pool: Weak<Pool>, idle: Duration) {
    loop {
        // More often costs more than it closes sooner.
        tokio::time::sleep((idle / 2).max(Duration::from_millis(100))).await;
        let Some(pool) = pool.upgrade() else { return };
        lock(&pool.idle).retain(|idle| idle.sender.is_ready() && !pool.is_over(idle.since));
        lock(&pool.shared).connections.retain_mut(|shared| {
            let is_used = shared.used() > 0;
            let since = *shared.idle.get_or_insert_with(Instant::now);
            if is_used {
                shared.idle = None;
            }
            !shared.sender.is_closed() && (is_used || !pool.is_over(since))
        });
    }
}

/// Runs a connection, and reports how many streams the upstream allows.
async fn drive(
    mut connection: http2::Connection<Io, Body, TokioExecutor>,
    allowed: watch::Sender<usize>,
) -> hyper::Result<()> {
    let mut looks = tokio::time::interval(Duration::from_millis(1));
    poll_fn(|cx| {
        if let Poll::Ready(end) = Pin::new(&mut connection).poll(cx) {
            return Poll::Ready(end);
        }
        loop {
            let streams = connection.current_max_send_streams();
            allowed.send_if_modified(|known| std::mem::replace(known, streams) != streams);
            // Nothing wakes at the first SETTINGS, which are there after a moment. Later ones are seen with the next
            // request.
            if streams > 0 || looks.poll_tick(cx).is_pending() {
                return Poll::Pending;
            }
        }
    })
    .await
}

/// A request that waits for a connection. Dropping it has the next one look.
struct Waiting<'a> {
    pool: &'a Pool,
    /// Those before it came.
    failures: u64,
}

impl<'a> Waiting<'a> {
    fn new(pool: &'a Pool) -> Self {
        let mut shared = lock(&pool.shared);
        shared.waiting += 1;
        Self { pool, failures: shared.failures }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.pool.shared).waiting -= 1;
        self.pool.opened.notify_one();
    }
}

/// A connection that is being opened. Dropping it has a request that waits look again.
struct Opening<'a>(&'a Pool);

impl<'a> Opening<'a> {
    const fn new(pool: &'a Pool, shared: &mut Sharing) -> Self {
        shared.opening += 1;
        Self(pool)
    }

    fn failed(self, error: &BoxError) {
        let mut shared = lock(&self.0.shared);
        shared.failures += 1;
        shared.failure = error.to_string().into();
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        lock(&self.0.shared).opening -= 1;
        self.0.opened.notify_one();
    }
}

impl Sharing {
    /// A stream that is free.
    fn lease(&mut self) -> Option<Lease> {
        self.connections.retain(|shared| !shared.sender.is_closed());
        let mut all = self.connections.iter_mut();
        let free = all.find(|shared| shared.used() < shared.allowed());
        free.map(|shared| {
            shared.idle = None;
            shared.clone().lease(true)
        })
    }

    /// A stream that has to wait, on the connection with the fewest.
    fn least_used(&self) -> Option<Lease> {
        let least = self.connections.iter().min_by_key(|shared| shared.used());
        least.map(|shared| shared.clone().lease(true))
    }
}

impl Shared {
    fn lease(self, is_reused: bool) -> Lease {
        Lease::Http2 { sender: self.sender, stream: Arc::new(Stream(self.streams)), is_reused }
    }

    /// Requests that may be on it.
    fn allowed(&self) -> usize {
        (*self.allowed.borrow()).min(STREAMS.into())
    }

    /// Requests on it.
    fn used(&self) -> usize {
        Arc::strong_count(&self.streams) - 1
    }
}

impl Lease {
    pub(crate) const fn is_reused(&self) -> bool {
        match self {
            Self::Http1 { is_reused, .. } | Self::Http2 { is_reused, .. } => *is_reused,
        }
    }

    /// Identifies the connection, if requests can share it.
    pub(crate) fn shared(&self) -> Option<Weak<()>> {
        match self {
            Self::Http1 { .. } => None,
            Self::Http2 { stream, .. } => Some(Arc::downgrade(&stream.0)),
        }
    }

    pub(crate) const fn is_http2(&self) -> bool {
        matches!(self, Self::Http2 { .. })
    }

    /// Sends the request, and returns the head of the response. If the response has no body, the upload has ended, too.
    ///
    /// # Errors
    ///
    /// With the request, if nothing of it was sent.
    pub(crate) async fn send(
        self,
        pool: &Arc<Pool>,
        request: Request,
        upload: &Arc<Upload>,
    ) -> Result<Response<UpstreamBody>, Box<TrySendError<Request>>> {
        let response = match self {
            Self::Http1 { mut sender, connection, .. } => {
                let mut exchange = Exchange::new(upload, Some(connection.clone()));
                let response = sender.try_send_request(request).await;
                let mut response = response.inspect_err(|_| exchange.leave())?;
                if headers::has_two_lengths(response.headers()) {
                    // Transfer-Encoding overrides it (RFC 9112, 6.3). What follows on such a connection is trusted by
                    // nobody.
                    response.headers_mut().remove(header::CONTENT_LENGTH);
                } else {
                    // An upgraded connection never becomes ready again.
                    pool.keep(sender, connection);
                }
                response.map(|inner| UpstreamBody { inner, exchange, last: None })
            }
            Self::Http2 { mut sender, stream, .. } => {
                upload.occupy(Arc::clone(&stream));
                let mut exchange = Exchange::new(upload, None);
                let response = sender.try_send_request(request).await;
                let response = response.inspect_err(|_| exchange.leave())?;
                exchange.stream = Some(stream);
                response.map(|inner| UpstreamBody { inner, exchange, last: None })
            }
        };
        let is_upgrade = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let (parts, mut body) = response.into_parts();
        if is_upgrade {
            body.exchange.leave();
        } else if body.inner.is_end_stream() {
            body.exchange.end();
            poll_fn(|cx| body.exchange.poll_ended(cx)).await;
        }
        Ok(Response::from_parts(parts, body))
    }
}

/// An exchange with the upstream, which ends with its response, or when this is dropped.
struct Exchange {
    upload: Arc<Upload>,
    /// That of HTTP/1.1.
    connection: Option<AbortHandle>,
    /// That of HTTP/2.
    stream: Option<Arc<Stream>>,
    state: Sending,
}

/// The upload of an exchange.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sending {
    /// It may go on.
    Flows,
    /// It was cut off, and is let go of in a moment.
    Ends,
    /// Nothing that has to be waited for.
    Ended,
}

impl Exchange {
    fn new(upload: &Arc<Upload>, connection: Option<AbortHandle>) -> Self {
        let upload = Arc::clone(upload);
        Self { upload, connection, stream: None, state: Sending::Flows }
    }

    /// Does not end the upload.
    const fn leave(&mut self) {
        self.state = Sending::Ended;
    }

    /// Ends the upload.
    fn end(&mut self) {
        if self.state != Sending::Flows {
            return;
        }
        self.state = match (self.upload.cut(), &self.connection) {
            (Some(_), Some(connection)) => {
                // Its upstream would take what follows for the rest of this upload.
                connection.abort();
                Sending::Ends
            }
            (Some(true), None) => Sending::Ends,
            // In HTTP/2 the upstream's window may be closed: the stream stands still until the upstream opens it, and is
            // reset then.
            (None, _) | (Some(false), None) => Sending::Ended,
        };
    }

    /// Ready once nothing sends the upload any longer.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.state == Sending::Ends {
            ready!(self.upload.poll_gone(cx));
            self.state = Sending::Ended;
        }
        Poll::Ready(())
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.end();
    }
}

/// A response's body, with which the upload ends: its permit is released with the last frame.
pub(crate) struct UpstreamBody {
    inner: Incoming,
    exchange: Exchange,
    /// The last frame, or the end, while the upload ends.
    last: Option<Option<Result<Frame<Bytes>, hyper::Error>>>,
}

impl HttpBody for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.last.is_none() {
            let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
            let goes_on = matches!(&frame, Some(Ok(frame)) if frame.is_data());
            if goes_on && !self.inner.is_end_stream() {
                return Poll::Ready(frame);
            }
            self.exchange.end();
            self.last = Some(frame);
        }
        ready!(self.exchange.poll_ended(cx));
        Poll::Ready(self.last.take().flatten())
    }

    fn is_end_stream(&self) -> bool {
        self.last.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.last {
            Some(_) => SizeHint::default(),
            None => self.inner.size_hint(),
        }
    }
}
