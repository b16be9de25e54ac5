//! A connection that holds the permit of what it was upgraded to.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::LeaseLost;
use crate::semaphore::Permit;

pin_project! {
    /// A connection that keeps the permit of a request that it was upgraded with, until it is
    /// dropped.
    ///
    /// The response to an upgrade (101) ends at once, and what comes after it has no part in HTTP: so
    /// neither a WebSocket nor a tunnel holds a permit by its response. Around a server's connection
    /// this does, for handlers that know nothing of permits. If the permit's lease is lost and the
    /// layer is set to abort, reading and writing fail with [`LeaseLost`], before one more byte
    /// passes.
    ///
    /// With Axum, `limit::serve` (feature `axum`) does all of it. With another server, wrap each connection in
    /// one, and insert its [`Connection`] into the extensions of each request on it.
    ///
    /// The end of a connection cannot be told from a break, so a permit of a layer with a
    /// [linger](super::ConcurrencyLimitBuilder::linger) lingers after either.
    ///
    /// Only HTTP/1.1 is upgraded in this way. A WebSocket over HTTP/2 shares its connection with
    /// other requests; its handler has to keep the permit itself.
    #[derive(Debug)]
    pub struct ConnectionIo<I> {
        #[pin]
        io: I,
        kept: Arc<Kept>,
    }
}

/// Where a [`ConcurrencyLimit`](super::ConcurrencyLimit) finds the [`ConnectionIo`] that a request
/// came by: in the request's extensions.
///
/// Keeps nothing alive.
#[derive(Clone, Debug)]
pub struct Connection {
    kept: Weak<Kept>,
}

/// The permits that a connection keeps: one of each layer around the handler.
struct Kept {
    permits: Mutex<Vec<KeptPermit>>,
    alarm: Arc<Alarm>,
}

struct KeptPermit {
    permit: Permit,
    /// Nothing passes without it.
    abort: bool,
}

/// Wakes the reader. Does not hold the permits: their records hold it.
#[derive(Default)]
struct Alarm {
    reader: AtomicWaker,
}

/// The end of a connection cannot be told from a break: its permits linger, if their layers say so.
impl Drop for KeptPermit {
    fn drop(&mut self) {
        self.permit.break_off();
    }
}

impl<I> ConnectionIo<I> {
    /// Around a connection.
    pub fn new(io: I) -> Self {
        Self { io, kept: Arc::new(Kept { permits: Mutex::default(), alarm: Arc::default() }) }
    }

    /// What to put into the extensions of the requests on this connection.
    #[must_use]
    pub fn connection(&self) -> Connection {
        Connection { kept: Arc::downgrade(&self.kept) }
    }

    /// The connection inside.
    pub const fn get_ref(&self) -> &I {
        &self.io
    }

    /// The connection inside.
    pub const fn get_mut(&mut self) -> &mut I {
        &mut self.io
    }
}

impl Connection {
    /// Keeps the permit as long as the connection; if that is gone, not at all. `abort`: the
    /// connection lasts no longer than the permit's lease.
    pub(super) fn keep(&self, permit: Permit, abort: bool) {
        let Some(kept) = self.kept.upgrade() else { return };
        let alarm = Waker::from(Arc::clone(&kept.alarm));
        let is_lost = abort && !permit.on_lost(&alarm);
        kept.lock().push(KeptPermit { permit, abort });
        if is_lost {
            alarm.wake();
        }
    }
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Vec<KeptPermit>> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> io::Result<()> {
        let is_lost = self.lock().iter().any(|kept| kept.abort && kept.permit.is_lost());
        if is_lost { Err(io::Error::other(LeaseLost::new())) } else { Ok(()) }
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.reader.wake();
    }
}

impl<I: AsyncRead> AsyncRead for ConnectionIo<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // First, so that a loss between the look and the read wakes us.
        self.kept.alarm.reader.register(cx.waker());
        self.kept.check()?;
        self.project().io.poll_read(cx, buffer)
    }
}

impl<I: AsyncWrite> AsyncWrite for ConnectionIo<I> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.kept.check()?;
        self.project().io.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.kept.check()?;
        self.project().io.poll_write_vectored(cx, slices)
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

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").finish_non_exhaustive()
    }
}
