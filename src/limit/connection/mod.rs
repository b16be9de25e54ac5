//! A connection that holds the permit of its upgrade, and notices that its peer has left.

mod alarm;
mod guests;
mod io;
mod link;
mod service;
mod socket;

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Weak};

use http::StatusCode;

pub use self::io::ConnectionIo;
pub(super) use self::link::Inside;
use self::link::{Link, Phase};
pub use self::service::{OnConnection, OnConnectionFuture};
use crate::semaphore::Semaphore;

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

/// A request on a connection, until its response.
#[derive(Debug)]
struct Exchange {
    /// Of a connection that has one request at a time.
    link: Option<Weak<dyn Link>>,
    is_tunnel: bool,
}

/// Whether a response makes the connection one of another protocol. `is_tunnel`: the request asks for a tunnel.
pub(super) fn is_upgrade(status: StatusCode, is_tunnel: bool) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (is_tunnel && status.is_success())
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
    fn of_many(&self, is_of_many: bool) -> Self {
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
    fn begin(&self, is_tunnel: bool) -> Exchange {
        let link = (!self.is_of_many).then(|| Weak::clone(&self.link));
        if let Some(link) = link.as_ref().and_then(Weak::upgrade) {
            link.core().go_on(Phase::Request);
        }
        Exchange { link, is_tunnel }
    }
}

impl Exchange {
    fn answered(&mut self, status: StatusCode) {
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

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}
