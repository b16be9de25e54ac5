//! The connection that a server reads and writes.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::Connection;
use super::guests::Guests;
use super::link::{Core, Link, Phase};
use super::socket::Locate;
use crate::semaphore::Visited;

/// A server's connection that holds the permit of its upgrade request until it is dropped, and fails once the peer of a
/// request has left.
///
/// With Axum, use `limit::serve` (feature `axum`). With another server, wrap each connection, and wrap the service of its
/// requests in its [`Connection`], which is a [`Layer`](tower_layer::Layer).
///
/// # Upgrades
///
/// The response to an upgrade (101) ends at once, so a WebSocket or tunnel does not hold its permit by the
/// response. A connection in this wrapper holds it instead, without any code in the handler, if the service answers with
/// an upgrade in the end: where a layer further out rejects it, the permit is given back with that response.
///
/// If the permit's lease is lost and the layer aborts on loss, reads and writes fail with [`LeaseLost`](crate::LeaseLost), before another
/// byte passes. A task that waits in one is woken, and the socket is shut down within half a second, whether the handler
/// reads it or not. A connection that was reset gives its permit back in the same time; that the peer has closed its sending
/// half is no end, because a tunnel may go on in the other direction. A handler that neither reads nor writes can wait for
/// either with [`Connection::ended`].
///
/// A closed connection cannot be told from a broken one, so a permit of a layer with a
/// [linger](crate::limit::ConcurrencyLimitBuilder::linger) lingers after either.
///
/// Only HTTP/1.1 upgrades in this way. A WebSocket over HTTP/2 shares its connection with other requests; its
/// handler has to keep the [`Permit`](crate::Permit) itself.
///
/// # Clients that leave
///
/// Over HTTP/1.1 a server notices the end of a connection when it reads it, and it reads nothing while a request waits
/// whose body lies unread: a chunked one, or one that is longer than what the server reads ahead. The same holds once a
/// further byte lies behind the request (pipelining). A connection in this wrapper is looked at four times a second
/// as long as a request on it waits in a layer, or holds a permit. Once the socket says that the peer has closed it,
/// the wrapper fails; so the server drops the connection with its request, which leaves the queue, or gives its permit
/// back.
///
/// As in hyper, a client that closes its sending half before it has its response counts as one that has left. Where
/// hyper's option `half_close` is set, set [`half_close`](Self::half_close), too. With its option `pipeline_flush`, a
/// client that left a byte behind its request is not noticed before there is a response to write.
///
/// [`new`](Self::new) looks at a [`TcpStream`] and at a `UnixStream`, [`over_tcp`](Self::over_tcp) at the socket
/// under another connection, such as TLS. HTTP/2 needs none of this, as its connections are read all the time.
///
/// # Examples
///
/// ```
/// use http::{Request, Response};
/// use tokio::net::TcpStream;
/// use tower::Layer;
/// use tower_semaphore::limit::ConnectionIo;
///
/// async fn handle(_: Request<String>) -> std::io::Result<Response<String>> {
///     Ok(Response::new("hello".to_owned()))
/// }
///
/// fn serve(stream: TcpStream) {
///     let io = ConnectionIo::new(stream);
///     // With the limiting layers inside.
///     let service = io.connection().layer(tower::service_fn(handle));
///     // ... serve `io` with hyper and `service`, by hyper-util's `TowerToHyperService` ...
/// }
/// ```
pub struct ConnectionIo<I> {
    shared: Arc<Shared<I>>,
}

struct Shared<I> {
    /// Taken by the task of the connection, and by the watchdog for a look. Dropped before the permits.
    io: Mutex<I>,
    locate: Locate<I>,
    core: Core,
}

impl<I: Send + 'static> ConnectionIo<I> {
    /// Wraps a connection.
    ///
    /// Whether its peer has left is seen if it is a [`TcpStream`] or, on Unix, a `UnixStream`.
    pub fn new(io: I) -> Self {
        Self::located(io, Locate::Itself)
    }

    /// Wraps a connection over TCP, and looks at its socket for whether the peer has left: `|tls| tls.get_ref().0` for a
    /// stream of tokio-rustls.
    ///
    /// ```
    /// use tokio::io::BufStream;
    /// use tokio::net::TcpStream;
    /// use tower_semaphore::limit::ConnectionIo;
    ///
    /// fn wrap(stream: TcpStream) -> ConnectionIo<BufStream<TcpStream>> {
    ///     ConnectionIo::over_tcp(BufStream::new(stream), |io| io.get_ref())
    /// }
    /// ```
    pub fn over_tcp(io: I, socket: fn(&I) -> &TcpStream) -> Self {
        Self::located(io, Locate::Within(socket))
    }

    fn located(io: I, locate: Locate<I>) -> Self {
        let core = Core {
            held: Mutex::default(),
            alarm: Arc::default(),
            guests: Guests::default(),
            has_peer_left: AtomicBool::new(false),
            half_close: AtomicBool::new(false),
            has_socket: locate.is_known(&io),
        };
        Self { shared: Arc::new(Shared { io: Mutex::new(io), locate, core }) }
    }

    /// Sets whether a client may close its sending half and still get its response: as hyper's option of that name,
    /// which is off by default. Of clients that leave, only those whose connection is reset are noticed then.
    #[must_use]
    pub fn half_close(self, allowed: bool) -> Self {
        self.shared.core.half_close.store(allowed, Ordering::Relaxed);
        self
    }

    /// The layer for the service of this connection, which inserts it into the extensions of each request.
    #[must_use]
    pub fn connection(&self) -> Connection {
        let link: Weak<Shared<I>> = Arc::downgrade(&self.shared);
        Connection { link, is_of_many: false }
    }
}

impl<I> ConnectionIo<I> {
    /// Returns a reference to the inner connection. Do not keep it: reads and writes wait for its end.
    #[must_use]
    pub fn get_ref(&self) -> impl Deref<Target = I> {
        self.shared.lock()
    }

    /// Returns a mutable reference to the inner connection, as [`get_ref`](Self::get_ref).
    #[must_use]
    pub fn get_mut(&mut self) -> impl DerefMut<Target = I> {
        self.shared.lock()
    }
}

impl<I> Shared<I> {
    fn lock(&self) -> MutexGuard<'_, I> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None`: its task reads or writes just now. The watchdog takes the lock only if it is free; waking the task for a
    /// look would poll the whole stack of the connection.
    fn try_lock(&self) -> Option<MutexGuard<'_, I>> {
        match self.io.try_lock() {
            Ok(io) => Some(io),
            Err(TryLockError::Poisoned(io)) => Some(io.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl<I: Unpin> Shared<I> {
    fn poll_write<T>(
        &self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut I>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        self.core.check()?;
        let written = write(Pin::new(&mut *self.lock()), cx);
        if written.is_pending() {
            self.core.alarm.writer.register(cx.waker());
            // What came before that woke nobody.
            self.core.check()?;
        }
        written
    }
}

impl<I: Send + 'static> Shared<I> {
    /// Closes the socket under a handler that may neither read nor write. Returns whether that is done.
    fn shut_down(&self) -> bool {
        let Some(io) = self.try_lock() else { return false };
        self.locate.shut_down(&io);
        true
    }
}

impl<I: Send + 'static> Link for Shared<I> {
    fn core(&self) -> &Core {
        &self.core
    }
}

impl<I: Send + 'static> Visited for Shared<I> {
    fn visit(&self) -> bool {
        let core = &self.core;
        if !core.guests.are_there() {
            return false;
        }
        let held = core.held();
        let (is_upgraded, is_lost) = (held.phase == Phase::Upgraded, held.lost().is_some());
        drop(held);
        if is_lost {
            return !self.shut_down();
        }
        // Else it notices an end by itself, or there is a next time.
        let Some(io) = self.try_lock() else { return true };
        // Half of a tunnel may be closed, so a FIN is left to its handler.
        let has_left = if is_upgraded {
            self.locate.is_reset(&io)
        } else {
            self.locate.has_peer_left(&io, core.half_close.load(Ordering::Relaxed))
        };
        drop(io);
        if has_left {
            core.end_by_peer();
        }
        !has_left
    }

    fn on_rounds_end(self: Arc<Self>) {
        let connection: Weak<Self> = Arc::downgrade(&self);
        let connection: Weak<dyn Visited> = connection;
        self.core.guests.seek_visitor(&connection);
        // The permits of a semaphore that is shut down are lost.
        if self.core.held().lost().is_some() {
            self.shut_down();
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for ConnectionIo<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let shared = &self.shared;
        // Before the check, so that a loss between check and read wakes the reader.
        shared.core.alarm.reader.register(cx.waker());
        shared.core.check()?;
        Pin::new(&mut *shared.lock()).poll_read(cx, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for ConnectionIo<I> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.shared.poll_write(cx, |io, cx| io.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.shared.poll_write(cx, |io, cx| io.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        self.shared.lock().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.poll_write(cx, |io, cx| io.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.shared.lock()).poll_shutdown(cx)
    }
}

impl<I> fmt::Debug for ConnectionIo<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionIo").finish_non_exhaustive()
    }
}
