//! The activity on one connection of a client, and its timeouts.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};

use axum::http::{Extensions, StatusCode, Version};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::access_log::Entry;
use super::body::Shared;
use super::progress::{Bounds, Progress, until};
use super::upgrade::Tunnel;

/// The state of one connection.
pub(crate) struct Activity {
    bounds: Bounds,
    state: Mutex<State>,
    tunnel: Mutex<Option<Tunnel>>,
    /// Ends the connection.
    closed: Notify,
    /// That of the request that made it a tunnel.
    entry: Mutex<Option<Entry>>,
    /// HTTP/1: at any time, all bytes on the connection belong to one request.
    is_http1: AtomicBool,
    read: Progress,
    written: Progress,
    bytes_written: AtomicU64,
}

struct State {
    in_flight: usize,
    /// Bodies of requests that are not over, in HTTP/1, whether a response is in flight or not.
    uploads: usize,
    /// The connection carries a tunnel, or will.
    is_tunnel: bool,
    /// Since when nothing is in flight.
    idle: Instant,
    /// When the first byte of the next head arrived.
    head: Option<Instant>,
    had_request: bool,
    /// hyper has not asked for more since the last bytes came. While a request is in flight, HTTP/1 asks for more at
    /// once, to notice a client that leaves, unless a part of the next head lies in its buffer.
    has_rest: bool,
    responses: Vec<Weak<Shared>>,
}

/// What has exceeded its timeout.
enum Overdue {
    /// Nothing until then.
    No(Option<Instant>),
    /// These responses.
    Responses(Vec<Arc<Shared>>),
    /// The connection.
    Connection,
}

impl Activity {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let state = State {
            in_flight: 0,
            uploads: 0,
            is_tunnel: false,
            idle: Instant::now(),
            head: None,
            had_request: false,
            has_rest: false,
            responses: Vec::new(),
        };
        Self {
            bounds,
            state: Mutex::new(state),
            tunnel: Mutex::default(),
            closed: Notify::new(),
            entry: Mutex::default(),
            is_http1: AtomicBool::new(false),
            read: Progress::new(),
            written: Progress::new(),
            bytes_written: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a new request.
    pub(crate) fn begin(self: &Arc<Self>, version: Version, entry: Option<Entry>) -> Exchange {
        self.is_http1.store(version != Version::HTTP_2, Ordering::Relaxed);
        let mut state = self.lock();
        state.in_flight += 1;
        state.head = None;
        state.had_request = true;
        drop(state);
        Exchange { activity: Arc::clone(self), progress: Arc::new(Progress::new()), entry }
    }

    /// What the connection carries once it is no longer HTTP.
    pub(crate) fn set_tunnel(&self, tunnel: Tunnel) {
        self.lock().is_tunnel = true;
        *self.tunnel.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
    }

    pub(crate) fn take_tunnel(&self) -> Option<Tunnel> {
        self.tunnel.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Since when nothing is in flight on the connection, if so.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let state = self.lock();
        (state.in_flight == 0 && !state.is_tunnel).then_some(state.idle)
    }

    /// Ends the connection. One that carries a tunnel goes on.
    pub(crate) fn close(&self) {
        self.closed.notify_one();
    }

    pub(crate) fn take_entry(&self) -> Option<Entry> {
        self.entry.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Bytes that were written to the client's socket.
    pub(crate) fn bytes_written(&self) -> u64 {
        self.bytes_written.load(Ordering::Relaxed)
    }

    fn wrote(&self, bytes: usize) {
        self.written.moved();
        self.bytes_written.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// When the socket last carried data, in either direction.
    pub(crate) fn last(&self) -> Instant {
        self.read.last().max(self.written.last())
    }

    pub(crate) const fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Cuts off stalled responses; resolves when the connection has to end.
    ///
    /// Cancel safe: all its state is the connection's.
    pub(crate) async fn watch(&self) {
        tokio::select! {
            () = self.closed.notified() => {}
            () = self.outlast() => {}
        }
    }

    async fn outlast(&self) {
        // Whatever begins after a check has at least this long.
        let shortest = self.bounds.header.into_iter().chain(self.bounds.idle).min();
        loop {
            let next = match self.overdue(Instant::now()) {
                Overdue::Connection => return,
                Overdue::Responses(responses) => {
                    tracing::info!(
                        "a response made no progress within the idle timeout and is cut off"
                    );
                    responses.iter().for_each(|response| response.cut());
                    continue;
                }
                Overdue::No(next) => next,
            };
            let look = shortest.map(|shortest| Instant::now() + shortest);
            until(next.into_iter().chain(look).min()).await;
        }
    }

    fn overdue(&self, now: Instant) -> Overdue {
        let is_http1 = self.is_http1.load(Ordering::Relaxed);
        let state = self.lock();
        if state.in_flight == 0 && state.uploads > 0 {
            // The rest of a body, behind its response.
            let last = state.idle.max(self.read.last());
            return match self.bounds.idle.map(|bound| last + bound) {
                Some(deadline) if deadline <= now => Overdue::Connection,
                deadline => Overdue::No(deadline),
            };
        }
        if state.in_flight == 0 {
            let starts = state.head.filter(|_| is_http1 || !state.had_request);
            let deadline = match (starts, state.had_request) {
                (Some(head), _) => self.bounds.header.map(|bound| head + bound),
                (None, false) => self.bounds.header.map(|bound| state.idle + bound),
                (None, true) => self.bounds.idle.map(|bound| state.idle + bound),
            };
            return match deadline {
                Some(deadline) if deadline <= now => Overdue::Connection,
                deadline => Overdue::No(deadline),
            };
        }
        let Some(bound) = self.bounds.idle else { return Overdue::No(None) };
        let responses: Vec<_> = state.responses.iter().filter_map(Weak::upgrade).collect();
        let in_flight = state.in_flight;
        drop(state);
        let (cut, flowing): (Vec<_>, Vec<_>) =
            responses.into_iter().partition(|response| response.is_cut());
        if cut.len() == in_flight {
            return Overdue::Connection;
        }
        let deadline = |response: &Arc<Shared>| {
            // In HTTP/1, what was written belongs to this response.
            let written = Some(self.written.last()).filter(|_| is_http1);
            written.max(Some(response.last())).unwrap_or(now) + bound
        };
        let next = flowing.iter().map(deadline).min();
        if next.is_some_and(|next| next <= now) {
            let late = flowing.into_iter().filter(|response| deadline(response) <= now);
            return Overdue::Responses(late.collect());
        }
        Overdue::No(next)
    }
}

/// A request in flight, from its head to the end of its response. Dropping it records the end.
pub(crate) struct Exchange {
    activity: Arc<Activity>,
    progress: Arc<Progress>,
    entry: Option<Entry>,
}

impl Exchange {
    pub(crate) const fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    pub(crate) const fn entry(&self) -> Option<&Entry> {
        self.entry.as_ref()
    }

    /// Counts the request's body until that is over: what arrives until then is no head.
    pub(crate) fn uploads(&self) -> Uploading {
        self.activity.lock().uploads += 1;
        Uploading(Arc::clone(&self.activity))
    }

    /// Registers the response, so that it can be cut off.
    pub(crate) fn responds(&self, response: &Arc<Shared>) {
        self.activity.lock().responses.push(Arc::downgrade(response));
    }

    pub(crate) fn answered(&mut self, status: StatusCode, extensions: &Extensions) {
        if let Some(entry) = &mut self.entry {
            entry.answered(status, extensions);
        }
        if status == StatusCode::SWITCHING_PROTOCOLS {
            let mut kept = self.activity.entry.lock().unwrap_or_else(PoisonError::into_inner);
            *kept = self.entry.take();
        }
    }

    /// Adds bytes of the response.
    pub(crate) fn passed(&mut self, bytes: usize) {
        if let Some(entry) = &mut self.entry {
            entry.passed(bytes as u64);
        }
    }
}

/// A request's body that is not over.
pub(crate) struct Uploading(Arc<Activity>);

impl Drop for Uploading {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.uploads -= 1;
        if state.in_flight == 0 {
            state.idle = Instant::now();
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let mut state = self.activity.lock();
        state.in_flight -= 1;
        state.idle = Instant::now();
        if state.in_flight == 0 && state.uploads == 0 && state.has_rest {
            // The next head began before.
            state.head = Some(state.idle);
        }
        let progress = &self.progress;
        state.responses.retain(|response| {
            response.upgrade().is_some_and(|response| !response.is_of(progress))
        });
    }
}

pin_project_lite::pin_project! {
    /// A socket that reports reads and writes to its [`Activity`].
    pub(crate) struct WatchedIo<I> {
        #[pin]
        io: I,
        activity: Arc<Activity>,
    }
}

impl<I> WatchedIo<I> {
    pub(crate) const fn new(io: I, activity: Arc<Activity>) -> Self {
        Self { io, activity }
    }

    pub(crate) const fn get_ref(&self) -> &I {
        &self.io
    }
}

impl<I: AsyncRead> AsyncRead for WatchedIo<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.project();
        let before = buffer.filled().len();
        let Poll::Ready(read) = this.io.poll_read(cx, buffer) else {
            this.activity.lock().has_rest = false;
            return Poll::Pending;
        };
        read?;
        if buffer.filled().len() > before {
            this.activity.read.moved();
            let mut state = this.activity.lock();
            state.has_rest = true;
            if state.in_flight == 0 && state.uploads == 0 && state.head.is_none() {
                state.head = Some(Instant::now());
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncWrite> AsyncWrite for WatchedIo<I> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.project();
        let written = ready!(this.io.poll_write(cx, bytes));
        this.activity.wrote(written.as_ref().map_or(0, |bytes| *bytes));
        Poll::Ready(written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.project();
        let written = ready!(this.io.poll_write_vectored(cx, slices));
        this.activity.wrote(written.as_ref().map_or(0, |bytes| *bytes));
        Poll::Ready(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().io.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().io.poll_shutdown(cx)
    }
}
