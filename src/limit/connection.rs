//! A connection that holds the permit of its upgrade, and notices that its peer has left.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::socket::Locate;
use crate::error::LeaseLost;
use crate::semaphore::{Permit, Semaphore, Visited};

/// A server's connection that holds the permit of its upgrade request until it is dropped, and fails once the peer of a
/// request has left.
///
/// With Axum, use `limit::serve` (feature `axum`). With another server, wrap each connection, and insert its
/// [`Connection`] into the extensions of each request on it.
///
/// # Upgrades
///
/// The response to an upgrade (101) ends at once, so a WebSocket or tunnel does not hold its permit by the
/// response. A connection in this wrapper holds it instead, without any code in the handler. If the permit's lease
/// is lost and the layer aborts on loss, reads and writes fail with [`LeaseLost`], before another byte passes.
///
/// A closed connection cannot be told from a broken one, so a permit of a layer with a
/// [linger](super::ConcurrencyLimitBuilder::linger) lingers after either.
///
/// Only HTTP/1.1 upgrades in this way. A WebSocket over HTTP/2 shares its connection with other requests; its
/// handler has to keep the [`Permit`] itself.
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
/// A handler whose own client has the layer can pass the [`Connection`] on, in the extensions of the request to that
/// client: then the connection is looked at as long as that request waits, or holds its permit. If that client's
/// connection is upgraded, its permit is held until this one closes; so pass it on only where the handler upgrades this
/// one, too.
///
/// # Examples
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
pub struct ConnectionIo<I> {
    shared: Arc<Shared<I>>,
}

/// A handle on a [`ConnectionIo`], for the extensions of its requests, where
/// [`ConcurrencyLimit`](super::ConcurrencyLimit) finds it.
///
/// It does not keep the connection open.
#[derive(Clone)]
pub struct Connection {
    link: Weak<dyn Link>,
}

/// A request that waits in a layer, or holds a permit, on a connection.
#[derive(Debug)]
pub(super) struct Inside {
    connection: Connection,
}

struct Shared<I> {
    /// Taken by the task of the connection, and by the watchdog for a look. Dropped before the permits.
    io: Mutex<I>,
    locate: Locate<I>,
    core: Core,
}

/// What does not depend on the kind of the connection.
struct Core {
    /// The permits that it holds: one of each layer around the handler.
    permits: Mutex<Vec<KeptPermit>>,
    alarm: Arc<Alarm>,
    /// Requests that wait in a layer, or hold a permit.
    inside: AtomicUsize,
    /// The watchdog visits it.
    is_visited: AtomicBool,
    has_peer_left: AtomicBool,
    half_close: AtomicBool,
    has_socket: bool,
}

/// A connection of any kind.
trait Link: Visited {
    fn core(&self) -> &Core;
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
            permits: Mutex::default(),
            alarm: Arc::default(),
            inside: AtomicUsize::new(0),
            is_visited: AtomicBool::new(false),
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

    /// The handle to insert into the extensions of each request on this connection.
    #[must_use]
    pub fn connection(&self) -> Connection {
        let link: Weak<Shared<I>> = Arc::downgrade(&self.shared);
        Connection { link }
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

impl Connection {
    /// A request enters a layer. Until what is returned is dropped, the connection is looked at.
    pub(super) fn enter(&self, semaphore: &Semaphore) -> Inside {
        if let Some(link) = self.link.upgrade()
            && link.core().enter()
        {
            semaphore.visit(Weak::clone(&self.link) as _);
        }
        Inside { connection: self.clone() }
    }
}

impl Inside {
    /// Holds the permit until the connection is dropped. `abort`: the connection fails when the permit is lost.
    pub(super) fn keep(&self, permit: Permit, abort: bool) {
        let kept = KeptPermit { permit, abort };
        let Some(link) = self.connection.link.upgrade() else { return };
        let core = link.core();
        let alarm = Waker::from(Arc::clone(&core.alarm));
        let is_lost = abort && !kept.permit.on_lost(&alarm);
        core.permits().push(kept);
        if is_lost {
            alarm.wake();
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(link) = self.connection.link.upgrade() {
            link.core().inside.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Core {
    fn permits(&self) -> MutexGuard<'_, Vec<KeptPermit>> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One request more. Returns whether the watchdog has to be asked for visits.
    fn enter(&self) -> bool {
        self.inside.fetch_add(1, Ordering::SeqCst);
        self.has_socket && !self.is_visited.swap(true, Ordering::SeqCst)
    }

    /// Returns whether to go on with the visits.
    fn is_entered(&self) -> bool {
        if self.inside.load(Ordering::SeqCst) > 0 {
            return true;
        }
        self.is_visited.store(false, Ordering::SeqCst);
        // A request that came meanwhile may have seen that it is visited.
        self.inside.load(Ordering::SeqCst) > 0 && !self.is_visited.swap(true, Ordering::SeqCst)
    }

    /// Fails once the peer has left.
    fn check_peer(&self) -> io::Result<()> {
        if !self.has_peer_left.load(Ordering::Acquire) {
            return Ok(());
        }
        let what = "the peer closed the connection before its request was over";
        Err(io::Error::new(io::ErrorKind::ConnectionAborted, what))
    }

    /// Fails, too, once a permit is lost that it cannot be without.
    fn check(&self) -> io::Result<()> {
        self.check_peer()?;
        let is_lost = self.permits().iter().any(|kept| kept.abort && kept.permit.is_lost());
        if is_lost { Err(io::Error::other(LeaseLost::new())) } else { Ok(()) }
    }
}

impl<I> Shared<I> {
    fn lock(&self) -> MutexGuard<'_, I> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
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
        if !core.is_entered() {
            return false;
        }
        let io = match self.io.try_lock() {
            Ok(io) => io,
            Err(TryLockError::Poisoned(io)) => io.into_inner(),
            // It reads or writes, and notices an end by itself.
            Err(TryLockError::WouldBlock) => return true,
        };
        let has_left = self.locate.has_peer_left(&io, core.half_close.load(Ordering::Relaxed));
        drop(io);
        if has_left {
            core.has_peer_left.store(true, Ordering::Release);
            // The task that read the head serves the connection. It flushes whenever it is woken.
            core.alarm.reader.wake();
        }
        !has_left
    }

    fn left_out(&self) {
        self.core.is_visited.store(false, Ordering::SeqCst);
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.reader.wake();
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
        self.shared.core.check()?;
        Pin::new(&mut *self.shared.lock()).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.shared.core.check()?;
        Pin::new(&mut *self.shared.lock()).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.shared.lock().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.core.check_peer()?;
        Pin::new(&mut *self.shared.lock()).poll_flush(cx)
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

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}
