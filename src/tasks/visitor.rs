//! The way to have the watchdog visit something.

use std::fmt;
use std::sync::{Arc, Weak};

use super::Tasks;
use super::rounds::Visited;

/// The watchdog of a semaphore, which this does not keep alive.
#[derive(Clone)]
pub(crate) struct Visitor {
    tasks: Weak<Tasks>,
}

impl Visitor {
    pub(crate) fn new(tasks: &Arc<Tasks>) -> Self {
        Self { tasks: Arc::downgrade(tasks) }
    }

    /// Has something visited in each round. Returns whether there will be rounds.
    pub(crate) fn visit(&self, visited: Weak<dyn Visited>) -> bool {
        let Some(tasks) = self.tasks.upgrade() else { return false };
        let Some(is_first) = tasks.rounds.add(visited) else { return false };
        // Requests without a limit have started no tasks. If there is no runtime here either, nothing changes.
        let _ = tasks.ensure_running();
        if is_first {
            tasks.node().sessions.timers.wake();
        }
        true
    }
}

impl PartialEq for Visitor {
    fn eq(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.tasks, &other.tasks)
    }
}

impl fmt::Debug for Visitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visitor").finish_non_exhaustive()
    }
}
