//! What drives a connection: its socket, and the streams on it.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, Either, select};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use hyper::rt::Executor;
use tokio::sync::mpsc;

/// Reads and writes the socket of a connection while it is polled. Completes when the connection is closed, which the
/// drop of its last [`Client`](super::Client) does, too. Closes the connection when it is dropped: then all its calls and
/// streams fail.
#[must_use = "a connection makes no progress unless its driver is polled"]
pub struct Driver {
    /// `None`: it is closed.
    connection: Option<BoxFuture<'static, ()>>,
    tasks: FuturesUnordered<BoxFuture<'static, ()>>,
    spawned: mpsc::UnboundedReceiver<BoxFuture<'static, ()>>,
}

/// Takes the tasks that hyper starts: one for the socket, and one or two for each call and stream.
#[derive(Clone)]
pub(super) struct Spawner(mpsc::UnboundedSender<BoxFuture<'static, ()>>);

/// The tasks of a connection that is about to be opened.
pub(super) struct Spawned(mpsc::UnboundedReceiver<BoxFuture<'static, ()>>);

impl Spawner {
    pub(super) fn new() -> (Self, Spawned) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), Spawned(receiver))
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Spawner {
    fn execute(&self, task: F) {
        // After the driver, nothing is left to do.
        let _ = self.0.send(task.boxed());
    }
}

impl Driver {
    pub(super) fn new(
        connection: impl Future<Output = ()> + Send + 'static,
        Spawned(spawned): Spawned,
    ) -> Self {
        Self { connection: Some(connection.boxed()), tasks: FuturesUnordered::new(), spawned }
    }

    /// Drives the connection until a future that uses it is ready.
    pub async fn until<T>(&mut self, future: impl Future<Output = T>) -> T {
        match select(pin!(future), &mut *self).await {
            Either::Left((output, _)) => output,
            // The connection is closed, so the future fails on its own.
            Either::Right(((), future)) => future.await,
        }
    }
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let Some(connection) = &mut this.connection else { return Poll::Ready(()) };
        let closed = connection.poll_unpin(cx).is_ready();
        // Tasks start further ones.
        loop {
            let mut is_idle = true;
            while let Poll::Ready(Some(task)) = this.spawned.poll_recv(cx) {
                this.tasks.push(task);
                is_idle = false;
            }
            while let Poll::Ready(Some(())) = this.tasks.poll_next_unpin(cx) {
                is_idle = false;
            }
            if is_idle {
                break;
            }
        }
        if !closed {
            return Poll::Pending;
        }
        this.connection = None;
        this.tasks.clear();
        Poll::Ready(())
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("is_closed", &self.connection.is_none())
            .finish_non_exhaustive()
    }
}
