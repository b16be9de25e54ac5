//! A connection that holds the permit of its upgrade.

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
    /// A server's connection that, once upgraded, holds the permit of its upgrade request until it is dropped.
    ///
    /// The response to an upgrade (101) ends at once, so a WebSocket or tunnel does not hold its permit by the
    /// response. A connection in this wrapper holds it instead, without any code in the handler. If the permit's lease
    /// is lost and the layer aborts on loss, reads and writes fail with [`LeaseLost`], before another byte passes.
    ///
    /// With Axum, use `limit::serve` (feature `axum`). With another server, wrap each connection, and insert its
    /// [`Connection`] into the extensions of each request on it.
    ///
    /// A closed connection cannot be told from a broken one, so a permit of a layer with a
    /// [linger](super::ConcurrencyLimitBuilder::linger) lingers after either.
    ///
    /// Only HTTP/1.1 upgrades in this way. A WebSocket over HTTP/2 shares its connection with other requests; its
    /// handler has to keep the [`Permit`] itself.
    ///
    /// ```
    /// use http::Request;
    /// use tokio::net::TcpStream;
    /// use tower_semaphore::limit::ConnectionIo;
    ///
    /// fn serve(stream: TcpStream) {
    ///     let io = ConnectionIo::new(stream);
    ///     let connection = io.connection();
    ///     let handler = move |mut request: Request<String>| {
    ///         request.extensions_mut().insert(connection.clone());
    ///         // ... call the service with the layer ...
    ///     };
    ///     // ... serve `io` with hyper ...
    /// }
    /// ```
    #[derive(Debug)]
    pub struct ConnectionIo<I> {
        #[pin]
        io: I,
        kept: Arc<Kept>,
    }
}

/// A handle on a [`ConnectionIo`], for the extensions of its requests, where
/// [`ConcurrencyLimit`](super::ConcurrencyLimit) finds it.
///
/// It does not keep the connection open.
#[derive(Clone, Debug)]
pub struct Connection {
    kept: Weak<Kept>,
}

/// The permits that a connection holds: one of each layer around the handler.
struct Kept {
    permits: Mutex<Vec<KeptPermit>>,
    alarm: Arc<Alarm>,
}

struct KeptPermit {
    permit: Permit,
    /// Reads and writes fail without it.
    abort: bool,
}

/// Wakes the reader. Does not hold the permits, because their records hold it.
#[derive(Default)]
struct Alarm {
    reader: AtomicWaker,
}

/// A closed connection cannot be told from a broken one: its permits linger if their layers are configured so.
impl Drop for KeptPermit {
    fn drop(&mut self) {
        self.permit.break_off();
    }
}

impl<I> ConnectionIo<I> {
    /// Wraps a connection.
    pub fn new(io: I) -> Self {
        Self { io, kept: Arc::new(Kept { permits: Mutex::default(), alarm: Arc::default() }) }
    }

    /// The handle to insert into the extensions of each request on this connection.
    #[must_use]
    pub fn connection(&self) -> Connection {
        Connection { kept: Arc::downgrade(&self.kept) }
    }

    /// Returns a reference to the inner connection.
    pub const fn get_ref(&self) -> &I {
        &self.io
    }

    /// Returns a mutable reference to the inner connection.
    pub const fn get_mut(&mut self) -> &mut I {
        &mut self.io
    }
}

impl Connection {
    /// Holds the permit until the connection is dropped, if that has not happened yet. `abort`: the connection fails
    /// when the permit is lost.
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
        // Before the check, so that a loss between check and read wakes the reader.
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
