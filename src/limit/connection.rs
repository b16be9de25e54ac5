//! A connection that holds the permit of its upgrade, and notices that its peer has left.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::guests::Guests;
use super::socket::Locate;
use crate::error::LeaseLost;
use crate::semaphore::{Permit, Semaphore};
use crate::semaphore::{Visited, Visitor};

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
/// If the permit's lease is lost and the layer aborts on loss, reads and writes fail with [`LeaseLost`], before another
/// byte passes. A task that waits in one is woken, and the socket is shut down within half a second, whether the handler
/// reads it or not. A connection that was reset gives its permit back in the same time; that the peer has closed its sending
/// half is no end, because a tunnel may go on in the other direction. A handler that neither reads nor writes can wait for
/// either with [`Connection::ended`].
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

/// A handle on a [`ConnectionIo`], in the extensions of its requests, where
/// [`ConcurrencyLimit`](super::ConcurrencyLimit) finds it.
///
/// It is a [`Layer`](tower_layer::Layer) for the service of that connection, and does not keep the connection open.
///
/// # Limited clients in a handler
///
/// A handler whose own client has the layer can pass the handle on, in the extensions of the request to that client, of
/// whatever version: then the connection is looked at as long as that request waits, or holds its permit. If the upstream
/// answers that request with an upgrade, its permit is held until the handler has answered, and if it answers with an
/// upgrade, too, until this connection closes: as a reverse proxy needs it. A handler that upgrades connections to
/// upstreams for itself passes no handle on for them.
#[derive(Clone)]
pub struct Connection {
    link: Weak<dyn Link>,
    /// Many requests share it: it is of none.
    is_of_many: bool,
}

/// A request that waits in a layer or holds a permit on a connection, or a permit that the connection holds.
#[derive(Debug)]
pub(super) struct Inside {
    link: Weak<dyn Link>,
    visitor: Visitor,
}

/// A request on a connection, until its response.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Of a connection that has one request at a time.
    link: Option<Weak<dyn Link>>,
    is_tunnel: bool,
}

struct Shared<I> {
    /// Taken by the task of the connection, and by the watchdog for a look. Dropped before the permits.
    io: Mutex<I>,
    locate: Locate<I>,
    core: Core,
}

/// What does not depend on the kind of the connection.
struct Core {
    held: Mutex<Held>,
    alarm: Arc<Alarm>,
    guests: Guests,
    has_peer_left: AtomicBool,
    half_close: AtomicBool,
    has_socket: bool,
}

/// The permits that a connection holds: one of each layer around the handler.
#[derive(Default)]
struct Held {
    permits: Vec<KeptPermit>,
    phase: Phase,
}

/// What a connection carries.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// No request, or none that is known of.
    #[default]
    Idle,
    /// A request without a response, which may become an upgrade.
    Request,
    Upgraded,
}

/// A connection of any kind.
trait Link: Visited {
    fn core(&self) -> &Core;
}

struct KeptPermit {
    permit: Permit,
    /// Reads and writes fail without it.
    abort: bool,
    /// The connection is looked at as long as this is here.
    _inside: Inside,
}

/// Wakes the tasks that wait for the connection. Does not hold the permits, because their records hold it.
#[derive(Default)]
struct Alarm {
    reader: AtomicWaker,
    writer: AtomicWaker,
    ended: Notify,
}

/// Whether a response makes the connection one of another protocol. `is_tunnel`: the request asks for a tunnel.
pub(super) fn is_upgrade(status: StatusCode, is_tunnel: bool) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (is_tunnel && status.is_success())
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

impl Connection {
    /// Waits until the connection is of no more use: it was dropped, its peer has left, or, after an upgrade, a permit that
    /// it cannot be without is lost.
    ///
    /// That a peer has left is seen as long as a request on the connection waits in a layer or holds a permit, or the
    /// connection holds one; for an upgraded connection it means a reset.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again.
    ///
    /// # Examples
    ///
    /// ```
    /// use tokio::io::{AsyncWrite, AsyncWriteExt};
    /// use tokio::sync::mpsc::Receiver;
    /// use tower_semaphore::limit::Connection;
    ///
    /// /// The handler of an upgraded connection that has nothing to read.
    /// async fn push(mut io: impl AsyncWrite + Unpin, on: Connection, mut news: Receiver<String>) {
    ///     loop {
    ///         tokio::select! {
    ///             () = on.ended() => return,
    ///             text = news.recv() => match text {
    ///                 Some(text) if io.write_all(text.as_bytes()).await.is_ok() => {}
    ///                 _ => return,
    ///             },
    ///         }
    ///     }
    /// }
    /// ```
    pub async fn ended(&self) {
        let Some(link) = self.link.upgrade() else { return };
        let alarm = Arc::clone(&link.core().alarm);
        drop(link);
        loop {
            let mut rung = pin!(alarm.ended.notified());
            rung.as_mut().enable();
            if self.link.upgrade().is_none_or(|link| link.core().check().is_err()) {
                return;
            }
            rung.await;
        }
    }

    /// The handle for the requests of this service. `is_of_many`: the connection has several at a time.
    pub(super) fn of_many(&self, is_of_many: bool) -> Self {
        Self { link: Weak::clone(&self.link), is_of_many }
    }

    /// A request enters a layer. Until what is returned is dropped, the connection is looked at.
    pub(super) fn enter(&self, semaphore: &Semaphore) -> Option<Inside> {
        if self.is_of_many {
            return None;
        }
        Some(Inside::new(&self.link, semaphore.visitor()))
    }

    /// A request arrives at the service of the connection.
    pub(super) fn begin(&self, is_tunnel: bool) -> Exchange {
        let link = (!self.is_of_many).then(|| Weak::clone(&self.link));
        if let Some(link) = link.as_ref().and_then(Weak::upgrade) {
            link.core().go_on(Phase::Request);
        }
        Exchange { link, is_tunnel }
    }
}

impl Exchange {
    pub(super) fn answered(&mut self, status: StatusCode) {
        self.end(if is_upgrade(status, self.is_tunnel) { Phase::Upgraded } else { Phase::Idle });
    }

    fn end(&mut self, phase: Phase) {
        if let Some(link) = self.link.take().and_then(|link| link.upgrade()) {
            link.core().go_on(phase);
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.end(Phase::Idle);
    }
}

impl Inside {
    fn new(link: &Weak<dyn Link>, visitor: Visitor) -> Self {
        if let Some(open) = link.upgrade()
            && open.core().guests.enter(&visitor)
            && open.core().has_socket
        {
            let connection: Weak<dyn Visited> = Weak::clone(link) as _;
            open.core().guests.seek_visitor(&connection);
        }
        Self { link: Weak::clone(link), visitor }
    }

    /// The connection holds the permit until it is dropped, if the request that it carries becomes its upgrade. `abort`:
    /// it fails when the permit is lost. Returns whether it holds the permit.
    pub(super) fn keep(&self, permit: &Permit, abort: bool) -> bool {
        let Some(link) = self.link.upgrade() else { return false };
        let core = link.core();
        let permit = permit.clone();
        let alarm = Waker::from(Arc::clone(&core.alarm));
        let is_lost = abort && !permit.on_lost(&alarm);
        let inside = Self::new(&self.link, self.visitor.clone());
        let mut held = core.held();
        if held.phase != Phase::Request {
            return false;
        }
        held.permits.push(KeptPermit { permit, abort, _inside: inside });
        drop(held);
        if is_lost {
            alarm.wake();
        }
        true
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            link.core().guests.leave(&self.visitor);
        }
    }
}

impl Core {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection carries something else from now on. What is no upgrade gives back what was held for it.
    fn go_on(&self, phase: Phase) {
        let mut held = self.held();
        held.phase = phase;
        let permits = (phase != Phase::Upgraded).then(|| std::mem::take(&mut held.permits));
        drop(held);
        drop(permits);
        // A permit may be lost already.
        if phase == Phase::Upgraded {
            self.alarm.ring();
        }
    }

    /// Fails once the peer has left, or a permit is lost that the connection cannot be without.
    fn check(&self) -> io::Result<()> {
        if self.has_peer_left.load(Ordering::Acquire) {
            let what = "the peer has closed the connection";
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, what));
        }
        if self.held().is_lost() { Err(io::Error::other(LeaseLost::new())) } else { Ok(()) }
    }

    fn end_by_peer(&self) {
        self.has_peer_left.store(true, Ordering::Release);
        // The task that read the head serves the connection. It flushes whenever it is woken.
        self.alarm.ring();
        let mut held = self.held();
        let permits = (held.phase == Phase::Upgraded).then(|| std::mem::take(&mut held.permits));
        drop(held);
        // Nothing passes any more, whatever the handler still does.
        drop(permits);
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.alarm.ended.notify_waiters();
    }
}

impl Held {
    fn is_lost(&self) -> bool {
        self.phase == Phase::Upgraded
            && self.permits.iter().any(|kept| kept.abort && kept.permit.is_lost())
    }
}

impl<I> Shared<I> {
    fn lock(&self) -> MutexGuard<'_, I> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None`: its task reads or writes just now.
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
        let (is_upgraded, is_lost) = (held.phase == Phase::Upgraded, held.is_lost());
        drop(held);
        if is_lost {
            return !self.shut_down();
        }
        // Else it notices an end by itself, or there is a next time.
        let Some(io) = self.try_lock() else { return true };
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
        if self.core.held().is_lost() {
            self.shut_down();
        }
    }
}

impl Alarm {
    fn ring(&self) {
        self.reader.wake();
        self.writer.wake();
        self.ended.notify_waiters();
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.ring();
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

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}
