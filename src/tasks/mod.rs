//! The background tasks of a process, from the first use of a semaphore until its end.
//!
//! Each Tokio runtime that uses a semaphore runs one supervisor. One of the supervisors leads: it starts the
//! watchdog and a driver for each server, and waits for them. The others stand by. When the runtime of the leader
//! is shut down, another supervisor takes over, so permits in use outlive every runtime but the last.
//!
//! A runtime that exists and is not driven keeps the lead. From outside it looks like one that is busy, so taking the
//! lead away would need heartbeats, and its tasks could go on beside those of the next leader.

pub(crate) mod driver;
pub(crate) mod rounds;
pub(crate) mod visitor;
pub(crate) mod watchdog;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Counter;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::{self, Handle};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinError, JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use self::rounds::Rounds;
use crate::error::BackendError;
use crate::node::Node;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// The pause before the tasks are started again after a panic or the end of a runtime: the old ones may still be in
/// their last step.
const RESTART_PAUSE: Duration = Duration::from_millis(100);
/// How long a shutdown waits for tasks that it has aborted. They never end in a runtime that is not driven.
const ABORT_TIMEOUT: Duration = Duration::from_millis(100);

/// Numbers the generations of all nodes, so that [`STARTED`] never takes one node for another.
static GENERATIONS: Counter = Counter::new(0);

thread_local! {
    /// The runtime in which this thread last saw a supervisor, with the generation of its tasks. Most requests find
    /// theirs here and need no lock.
    static STARTED: Cell<Option<(u64, runtime::Id)>> = const { Cell::new(None) };
}

/// A node, and its background tasks.
///
/// The node does not know of its tasks, so nothing in it can wait for one.
pub(crate) struct Tasks {
    node: Arc<Node>,
    pub(crate) rounds: Rounds,
    supervisors: Mutex<Vec<Supervisor>>,
    /// Changes whenever a supervisor ends.
    generation: AtomicU64,
    /// The runtime of the supervisor that leads.
    leader: Mutex<Option<runtime::Id>>,
    /// Notified when no supervisor leads any more.
    vacant: Notify,
}

struct Supervisor {
    runtime: runtime::Id,
    /// `None` until it is spawned, and once a shutdown waits for it.
    task: Option<JoinHandle<()>>,
}

impl Tasks {
    /// Creates the tasks of a node. None runs yet.
    pub(crate) fn new(node: Arc<Node>) -> Arc<Self> {
        Arc::new(Self {
            node,
            rounds: Rounds::default(),
            supervisors: Mutex::default(),
            generation: AtomicU64::new(next_generation()),
            leader: Mutex::default(),
            vacant: Notify::new(),
        })
    }

    #[inline]
    pub(crate) const fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Starts a supervisor in the current runtime, unless it has one.
    ///
    /// # Errors
    ///
    /// If this is not called in a Tokio runtime and no runtime has used this node before, or if this process is a fork
    /// of one that has used it.
    pub(crate) fn ensure_running(self: &Arc<Self>) -> Result<(), BackendError> {
        if cfg!(all(test, shuttle)) {
            // A scenario of tests/locks runs the tasks itself.
            return Ok(());
        }
        let generation = self.generation.load(Ordering::Acquire);
        let Ok(runtime) = Handle::try_current() else {
            if lock(&self.supervisors).is_empty() {
                let what = "a semaphore needs a Tokio runtime; there is none here";
                return Err(BackendError::call(what));
            }
            return Ok(());
        };
        let here = (generation, runtime.id());
        if STARTED.get() != Some(here) {
            self.node.check_identity()?;
            self.start_in(&runtime);
            STARTED.set(Some(here));
        }
        Ok(())
    }

    fn start_in(self: &Arc<Self>, runtime: &Handle) {
        let id = runtime.id();
        let mut supervisors = lock(&self.supervisors);
        if supervisors.iter().any(|supervisor| supervisor.runtime == id) {
            return;
        }
        supervisors.push(Supervisor { runtime: id, task: None });
        drop(supervisors);
        self.node.counts.meter.begin(self.node.embedded().is_some());
        // Not under the lock: a runtime that is being shut down drops the task at once, which takes the lock.
        let task = runtime.spawn(supervise(Registered { tasks: Arc::clone(self), runtime: id }));
        let mut supervisors = lock(&self.supervisors);
        if let Some(started) = supervisors.iter_mut().find(|started| started.runtime == id) {
            started.task = Some(task);
        }
    }

    /// Removes the supervisor of a runtime, which has ended. Returns whether it was the last one.
    fn on_ended(&self, runtime: runtime::Id) -> bool {
        let mut supervisors = lock(&self.supervisors);
        let ended = supervisors.iter().position(|supervisor| supervisor.runtime == runtime);
        let ended = ended.map(|at| supervisors.swap_remove(at));
        let is_last = supervisors.is_empty();
        drop(supervisors);
        drop(ended);
        self.generation.store(next_generation(), Ordering::Release);
        is_last
    }

    /// Waits for the tasks, and aborts them if that takes too long. Places that are left then end with their leases.
    pub(crate) async fn join(&self, patience: Duration) {
        let leader = *lock(&self.leader);
        // Once nothing is left to do, the leader may have ended already.
        let may_lead =
            |runtime| leader.map_or_else(|| !self.node.is_finished(), |leader| leader == runtime);
        let (mut leading, mut others) = (Vec::new(), Vec::new());
        for supervisor in lock(&self.supervisors).iter_mut() {
            let tasks = if may_lead(supervisor.runtime) { &mut leading } else { &mut others };
            tasks.extend(supervisor.task.take());
        }
        // The others have nothing to do, and would never end in a runtime that is not driven.
        others.iter().for_each(JoinHandle::abort);
        let aborts: Vec<_> = leading.iter().map(JoinHandle::abort_handle).collect();
        let mut leading = join_all(leading);
        if timeout(patience, &mut leading).await.is_err() {
            aborts.iter().for_each(AbortHandle::abort);
            let _ = timeout(ABORT_TIMEOUT, leading).await;
        }
        let _ = timeout(ABORT_TIMEOUT, join_all(others)).await;
    }
}

fn next_generation() -> u64 {
    GENERATIONS.fetch_add(1, Ordering::Relaxed)
}

/// Takes the lead once no other supervisor has it. Returns when the node is closed and empty.
async fn supervise(registered: Registered) {
    let Registered { tasks, runtime } = &registered;
    let mut has_stood_by = false;
    while !tasks.node.is_finished() {
        let vacant = tasks.vacant.notified();
        let Some(lead) = Lead::take(tasks, *runtime) else {
            has_stood_by = true;
            vacant.await;
            continue;
        };
        if std::mem::take(&mut has_stood_by) {
            tracing::info!(
                target: "tower_semaphore",
                "the runtime of the background tasks was shut down; they go on in another"
            );
            sleep(RESTART_PAUSE).await;
        }
        match lead.run().await {
            Ok(()) => return,
            // Started again here: permits in use must not depend on another request coming.
            Err(error) if error.is_panic() => tracing::error!(
                target: "tower_semaphore",
                "a background task panicked; all are started again"
            ),
            Err(_) => {}
        }
        drop(lead);
        sleep(RESTART_PAUSE).await;
    }
}

/// The lead. Another supervisor can take it once this is dropped.
struct Lead<'a> {
    tasks: &'a Arc<Tasks>,
}

impl<'a> Lead<'a> {
    fn take(tasks: &'a Arc<Tasks>, runtime: runtime::Id) -> Option<Self> {
        let mut leader = lock(&tasks.leader);
        leader.is_none().then(|| {
            *leader = Some(runtime);
            Self { tasks }
        })
    }

    /// Runs the tasks of a node until they end by themselves.
    ///
    /// # Errors
    ///
    /// As soon as one panics. The others are aborted.
    async fn run(&self) -> Result<(), JoinError> {
        let node = &self.tasks.node;
        let mut tasks = JoinSet::new();
        tasks.spawn(watchdog::run(Arc::clone(self.tasks)));
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
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        // The next leader starts a driver for each server that has none.
        self.tasks.node.servers.abandon();
        *lock(&self.tasks.leader) = None;
        self.tasks.vacant.notify_waiters();
    }
}

/// The supervisor of a runtime, until it ends by itself or the runtime is shut down.
struct Registered {
    tasks: Arc<Tasks>,
    runtime: runtime::Id,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let node = &self.tasks.node;
        if !self.tasks.on_ended(self.runtime) {
            return;
        }
        if node.is_closed() {
            // No task renews the places that are left: they end with their leases.
            node.abandon(|_| true);
        } else if node.sessions.are_in_use() {
            tracing::warn!(
                target: "tower_semaphore",
                "the last Tokio runtime of this semaphore was shut down before the semaphore was; \
                 its permits end with their leases unless another runtime uses it before"
            );
        }
    }
}

impl fmt::Debug for Tasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tasks").field("node", &self.node).finish_non_exhaustive()
    }
}
