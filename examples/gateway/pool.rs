//! The pool of connections to the upstream.

use std::future::poll_fn;
use std::pin::Pin;
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
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::connect::{CONNECT_TIMEOUT, Connector};
use super::headers;
use super::upload::Upload;
use super::upstream::{Protocol, Upstream};

/// How long an idle connection of HTTP/1.1 is kept. Below the timeout of most servers, so that the
/// server seldom closes it first.
const IDLE: Duration = Duration::from_secs(30);
/// Idle connections of HTTP/1.1 that are kept.
const MOST_IDLE: usize = 1024;
/// Concurrent requests on one connection of HTTP/2; servers commonly allow 100 or more.
const STREAMS: usize = 100;
/// How often a connection of HTTP/2 with requests on it is pinged.
const PING: Duration = Duration::from_secs(20);

/// The connections to one upstream.
pub(crate) struct Pool {
    connector: Connector,
    idle: Mutex<Vec<Idle>>,
    shared: Mutex<Vec<Shared>>,
    /// Serializes the opening of connections that requests can share.
    opening: tokio::sync::Mutex<()>,
    /// Whether connections to the upstream can be shared, as far as known.
    is_shared: AtomicBool,
}

struct Idle {
    sender: http1::SendRequest<Body>,
    connection: AbortHandle,
    since: Instant,
}

#[derive(Clone)]
struct Shared {
    sender: http2::SendRequest<Body>,
    /// One clone for each request on it.
    streams: Arc<()>,
}

/// A request on a connection of HTTP/2.
pub(crate) struct Stream(Arc<()>);

/// A connection for one request.
pub(crate) enum Lease {
    Http1 { sender: http1::SendRequest<Body>, connection: AbortHandle, is_reused: bool },
    Http2 { sender: http2::SendRequest<Body>, stream: Arc<Stream>, is_reused: bool },
}

impl Pool {
    pub(crate) fn new(upstream: &Upstream) -> Result<Arc<Self>, String> {
        let pool = Arc::new(Self {
            connector: Connector::new(upstream)?,
            idle: Mutex::default(),
            shared: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            is_shared: AtomicBool::new(upstream.protocol != Protocol::Http),
        });
        tokio::spawn(sweep(Arc::downgrade(&pool)));
        Ok(pool)
    }

    /// A pooled connection, or a new one if there is none or `fresh` is set. `upgrade` is for a request
    /// that asks for an upgrade, which needs HTTP/1.1.
    pub(crate) async fn lease(&self, fresh: bool, upgrade: bool) -> Result<Lease, BoxError> {
        if !fresh && let Some(lease) = self.reuse(upgrade) {
            return Ok(lease);
        }
        let _opening = if self.is_shared.load(Ordering::Relaxed) && !upgrade {
            // Requests wait for each other no longer than for an upstream that does not answer.
            let turn = tokio::time::timeout(CONNECT_TIMEOUT, self.opening.lock()).await.ok();
            if !fresh && let Some(lease) = self.reuse(upgrade) {
                return Ok(lease);
            }
            // The request before may have found that connections to this upstream cannot be shared.
            turn.filter(|_| self.is_shared.load(Ordering::Relaxed))
        } else {
            None
        };
        let connected = self.connector.connect(upgrade).await?;
        if !connected.is_http2 {
            if !upgrade {
                self.is_shared.store(false, Ordering::Relaxed);
            }
            let (sender, connection) = http1::handshake(connected.io).await?;
            let connection = tokio::spawn(async move {
                if let Err(error) = connection.with_upgrades().await {
                    tracing::debug!(%error, "a connection to the upstream broke");
                }
            });
            let connection = connection.abort_handle();
            return Ok(Lease::Http1 { sender, connection, is_reused: false });
        }
        self.is_shared.store(true, Ordering::Relaxed);
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).keep_alive_interval(PING);
        let (sender, connection) = builder.handshake(connected.io).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to the upstream broke");
            }
        });
        let shared = Shared { sender, streams: Arc::default() };
        lock(&self.shared).push(shared.clone());
        Ok(shared.lease(false))
    }

    /// Gives no more requests to a shared connection.
    pub(crate) fn retire(&self, streams: &Weak<()>) {
        let gone = Weak::as_ptr(streams);
        lock(&self.shared).retain(|shared| !std::ptr::eq(Arc::as_ptr(&shared.streams), gone));
    }

    fn reuse(&self, upgrade: bool) -> Option<Lease> {
        if !upgrade {
            let mut shared = lock(&self.shared);
            shared.retain(|shared| !shared.sender.is_closed());
            let free = shared.iter().find(|shared| Arc::strong_count(&shared.streams) <= STREAMS);
            if let Some(shared) = free {
                return Some(shared.clone().lease(true));
            }
        }
        let mut idle = lock(&self.idle);
        // The most recently used one, so that the others can expire.
        while let Some(Idle { sender, connection, since }) = idle.pop() {
            if sender.is_ready() && since.elapsed() < IDLE {
                return Some(Lease::Http1 { sender, connection, is_reused: true });
            }
        }
        None
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

/// Closes idle connections.
async fn sweep(pool: Weak<Pool>) {
    loop {
        tokio::time::sleep(IDLE / 2).await;
        let Some(pool) = pool.upgrade() else { return };
        lock(&pool.idle).retain(|idle| idle.sender.is_ready() && idle.since.elapsed() < IDLE);
        lock(&pool.shared).retain(|shared| !shared.sender.is_closed());
    }
}

impl Shared {
    fn lease(self, is_reused: bool) -> Lease {
        Lease::Http2 { sender: self.sender, stream: Arc::new(Stream(self.streams)), is_reused }
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
