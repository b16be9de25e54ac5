//! A connection that several callers share.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Reads and writes the socket of a connection while it is polled. Completes when the connection is closed, and closes
/// it when it is dropped.
pub(super) type Driver = BoxFuture<'static, ()>;

/// A connection, with the task that drives it if [`spawn`](Self::spawn) started one. The task is aborted with the last
/// clone; otherwise it would wait for every outstanding reply.
#[derive(Clone, Debug)]
pub(super) struct Multiplexed {
    connection: MultiplexedConnection,
    heard_at: Arc<Mutex<Option<Instant>>>,
    _task: Option<Arc<Task>>,
}

impl Multiplexed {
    /// Starts a task that drives the connection.
    pub(super) fn spawn(connection: MultiplexedConnection, driver: Driver) -> Self {
        let task = Task(tokio::spawn(driver));
        Self { _task: Some(Arc::new(task)), ..connection.into() }
    }

    /// Notes that the server answered a part of a write.
    pub(super) fn on_answer(&self) {
        let mut heard_at = self.heard_at.lock().unwrap_or_else(PoisonError::into_inner);
        *heard_at = Some(Instant::now());
    }

    /// Returns when the server last answered a part of a write.
    pub(super) fn heard_at(&self) -> Option<Instant> {
        *self.heard_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connection is driven elsewhere.
impl From<MultiplexedConnection> for Multiplexed {
    fn from(connection: MultiplexedConnection) -> Self {
        Self { connection, heard_at: Arc::default(), _task: None }
    }
}

impl Deref for Multiplexed {
    type Target = MultiplexedConnection;

    fn deref(&self) -> &MultiplexedConnection {
        &self.connection
    }
}

impl DerefMut for Multiplexed {
    fn deref_mut(&mut self) -> &mut MultiplexedConnection {
        &mut self.connection
    }
}

#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
