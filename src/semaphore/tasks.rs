//! The background tasks of a process, from the first use of its semaphores to their end.
//!
//! One task starts the others and waits for them: the watchdog, and a driver for each server.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::node::Node;
use super::{driver, watchdog};
use crate::error::BackendError;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, lock};

/// The tasks of one node.
#[derive(Default)]
pub(super) struct Tasks {
    running: Arc<AtomicBool>,
    supervisor: Mutex<Option<JoinHandle<()>>>,
}

impl Tasks {
    /// Tasks that the caller runs itself.
    #[cfg(all(test, shuttle))]
    pub(super) fn run_elsewhere() -> Self {
        Self { running: Arc::new(AtomicBool::new(true)), ..Self::default() }
    }

    /// Starts the tasks, if they do not run: at first use, because only then is there a runtime, and
    /// again if that runtime was shut down meanwhile.
    ///
    /// # Errors
    ///
    /// If there is no Tokio runtime here.
    pub(super) fn ensure_running(&self, node: &Arc<Node>) -> Result<(), BackendError> {
        if self.running.load(Ordering::Acquire) {
            return Ok(());
        }
        let runtime = Handle::try_current().map_err(|_| {
            BackendError::call("a semaphore needs a Tokio runtime; there is none here")
        })?;
        let mut supervisor = lock(&self.supervisor);
        if self.running.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        node.counts.meter.begin(node.embedded().is_some());
        let running = Running { running: Arc::clone(&self.running), node: Arc::clone(node) };
        let before = supervisor.replace(runtime.spawn(supervise(running)));
        before.into_iter().for_each(|task| task.abort());
        Ok(())
    }

    /// Waits for the tasks, and ends them if that takes too long: what is left then ends with its lease.
    pub(super) async fn join(&self, patience: Duration) {
        let supervisor = lock(&self.supervisor).take();
        if let Some(mut supervisor) = supervisor
            && timeout(patience, &mut supervisor).await.is_err()
        {
            supervisor.abort();
            let _ = supervisor.await;
        }
    }
}

/// How long after a panic the tasks are started again.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// Keeps the tasks of a node running until they end by themselves. Whichever panics, all are ended and started
/// again: permits in use must not depend on a next request.
async fn supervise(running: Running) {
    while run(&running.node).await.is_err() {
        tracing::error!(target: "tower_semaphore", "a background task panicked; all are started again");
        running.node.servers.abandon();
        sleep(RESTART_PAUSE).await;
    }
}

/// Starts the tasks of a node, and waits for them.
///
/// # Errors
///
/// As soon as one panics. The others are ended.
async fn run(node: &Arc<Node>) -> Result<(), JoinError> {
    let mut tasks = JoinSet::new();
    tasks.spawn(watchdog::run(Arc::clone(node)));
    loop {
        if node.embedded().is_none() {
            while let Some(server) = node.servers.next_undriven() {
                tasks.spawn(driver::run(Arc::clone(node), server));
            }
        }
        tokio::select! {
            biased;
            ended = tasks.join_next() => match ended {
                Some(Ok(())) => {}
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            },
            () = node.servers.came() => {}
        }
    }
}

/// Says that the tasks are gone, however they went.
struct Running {
    running: Arc<AtomicBool>,
    node: Arc<Node>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.node.servers.abandon();
        if self.node.is_closed() {
            // Nobody looks after what is left: it ends with its lease.
            self.node.abandon(|_| true);
        }
        self.running.store(false, Ordering::Release);
    }
}
