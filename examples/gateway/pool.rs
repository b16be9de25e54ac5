//! The pool of connections to the upstream.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Response, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::Instant;

use super::connect::{CONNECT_TIMEOUT, Connector};
use super::headers;
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
    since: Instant,
}

#[derive(Clone)]
struct Shared {
    sender: http2::SendRequest<Body>,
    /// One clone for each request on it.
    streams: Arc<()>,
}

/// A connection for one request.
pub(crate) enum Lease {
    Http1 { sender: http1::SendRequest<Body>, is_reused: bool },
    Http2 { sender: http2::SendRequest<Body>, stream: Arc<()>, is_reused: bool },
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
            tokio::spawn(async move {
                if let Err(error) = connection.with_upgrades().await {
                    tracing::debug!(%error, "a connection to the upstream broke");
                }
            });
            return Ok(Lease::Http1 { sender, is_reused: false });
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
        while let Some(Idle { sender, since }) = idle.pop() {
            if sender.is_ready() && since.elapsed() < IDLE {
                return Some(Lease::Http1 { sender, is_reused: true });
            }
        }
        None
    }

    /// Returns the connection to the pool once the response is over.
    fn keep(self: &Arc<Self>, mut sender: http1::SendRequest<Body>) {
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            if sender.ready().await.is_err() {
                return;
            }
            let Some(pool) = pool.upgrade() else { return };
            let mut idle = lock(&pool.idle);
            if idle.len() < MOST_IDLE {
                idle.push(Idle { sender, since: Instant::now() });
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
        Lease::Http2 { sender: self.sender, stream: self.streams, is_reused }
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
            Self::Http2 { stream, .. } => Some(Arc::downgrade(stream)),
        }
    }

    pub(crate) const fn is_http2(&self) -> bool {
        matches!(self, Self::Http2 { .. })
    }

    /// Sends the request, and returns the head of the response.
    ///
    /// # Errors
    ///
    /// With the request, if nothing of it was sent.
    pub(crate) async fn send(
        self,
        pool: &Arc<Pool>,
        request: Request,
    ) -> Result<Response<UpstreamBody>, Box<TrySendError<Request>>> {
        match self {
            Self::Http1 { mut sender, .. } => {
                let mut response = sender.try_send_request(request).await?;
                if headers::has_two_lengths(response.headers()) {
                    // Transfer-Encoding overrides it (RFC 9112, 6.3). What follows on such a connection is trusted by
                    // nobody.
                    response.headers_mut().remove(header::CONTENT_LENGTH);
                } else {
                    // An upgraded connection never becomes ready again.
                    pool.keep(sender);
                }
                Ok(response.map(|inner| UpstreamBody { inner, _stream: None }))
            }
            Self::Http2 { mut sender, stream, .. } => {
                let response = sender.try_send_request(request).await?;
                Ok(response.map(|inner| UpstreamBody { inner, _stream: Some(stream) }))
            }
        }
    }
}

/// A response's body, which counts as a stream of its connection.
pub(crate) struct UpstreamBody {
    inner: Incoming,
    _stream: Option<Arc<()>>,
}

impl HttpBody for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
