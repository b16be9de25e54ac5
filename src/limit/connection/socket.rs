//! What a socket knows of its peer while data of that lies unread in front.

use std::any::Any;
use std::io;
use std::net::Shutdown;

use futures_util::FutureExt;
use socket2::SockRef;
use tokio::io::{Interest, Ready};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

/// Where the socket of a connection is.
pub(super) enum Locate<I> {
    /// The connection is the socket, or nothing is known of it.
    Itself,
    Within(fn(&I) -> &TcpStream),
}

/// A socket whose readiness can be asked for.
enum Socket<'a> {
    Tcp(&'a TcpStream),
    #[cfg(unix)]
    Unix(&'a UnixStream),
}

impl<I: 'static> Locate<I> {
    /// Whether there is a socket.
    pub(super) fn is_known(&self, io: &I) -> bool {
        self.find(io).is_some()
    }

    /// Whether the peer has closed the connection, though data that it sent before may lie unread. `half_close`: the
    /// end of what it sends is no end of the connection, only a reset is.
    ///
    /// Neither waits nor reads.
    pub(super) fn has_peer_left(&self, io: &I, half_close: bool) -> bool {
        self.find(io).is_some_and(|socket| socket.has_peer_left(half_close))
    }

    /// Whether the connection is broken in both directions: the peer has reset it, or does not answer.
    ///
    /// Neither waits nor reads.
    pub(super) fn is_reset(&self, io: &I) -> bool {
        self.find(io).is_some_and(|socket| socket.is_reset())
    }

    /// Closes the connection in both directions. Does not wait.
    pub(super) fn shut_down(&self, io: &I) {
        if let Some(socket) = self.find(io) {
            socket.shut_down();
        }
    }

    fn find<'a>(&self, io: &'a I) -> Option<Socket<'a>> {
        if let Self::Within(socket) = self {
            return Some(Socket::Tcp(socket(io)));
        }
        let io: &dyn Any = io;
        #[cfg(unix)]
        if let Some(socket) = io.downcast_ref() {
            return Some(Socket::Unix(socket));
        }
        io.downcast_ref().map(Socket::Tcp)
    }
}

impl Socket<'_> {
    fn has_peer_left(&self, half_close: bool) -> bool {
        // The usual case: nothing lies unread. It costs one load, and an end would make the socket readable.
        if self.is_blocked() {
            return false;
        }
        let ends =
            if half_close { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        let Some(Ok(ready)) = self.ready(ends) else { return false };
        ready.is_read_closed() && (!half_close || ready.is_write_closed())
    }

    fn is_reset(&self) -> bool {
        if self.is_blocked() {
            return false;
        }
        let Some(Ok(ready)) = self.ready(Interest::READABLE | Interest::WRITABLE | Interest::ERROR)
        else {
            return false;
        };
        // Without an error, both sides have closed their halves, and what the peer sent before may lie unread.
        ready.is_error() && ready.is_read_closed() && ready.is_write_closed()
    }

    fn shut_down(&self) {
        let socket = match self {
            Self::Tcp(socket) => SockRef::from(*socket),
            #[cfg(unix)]
            Self::Unix(socket) => SockRef::from(*socket),
        };
        // Fails if it is closed already.
        let _ = socket.shutdown(Shutdown::Both);
    }

    fn is_blocked(&self) -> bool {
        let tried = match self {
            Self::Tcp(socket) => socket.try_io(Interest::READABLE, || Ok(())),
            #[cfg(unix)]
            Self::Unix(socket) => socket.try_io(Interest::READABLE, || Ok(())),
        };
        tried.is_err()
    }

    /// `None` where nothing is ready.
    fn ready(&self, interest: Interest) -> Option<io::Result<Ready>> {
        match self {
            Self::Tcp(socket) => socket.ready(interest).now_or_never(),
            #[cfg(unix)]
            Self::Unix(socket) => socket.ready(interest).now_or_never(),
        }
    }
}
