//! The open connections of one listener, of which the one that has been idle for longest can be closed.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::connection::Activity;

/// The open connections of one listener.
pub(crate) struct Connections {
    state: Mutex<State>,
    /// Closes one in use, if none is idle: the oldest one.
    closes_any: bool,
}

#[derive(Default)]
struct State {
    serial: u64,
    open: HashMap<u64, Arc<Activity>>,
    /// Those that were idle for longest when all were last looked at, the longest first. To look at all of them for each
    /// new connection would cost more than to serve it.
    idle: VecDeque<(Instant, u64)>,
}

/// One of the connections, until it is dropped.
pub(crate) struct Entered {
    connections: Arc<Connections>,
    serial: u64,
}

impl Connections {
    /// `closes_any`: if none is idle, the oldest one can be closed.
    pub(crate) fn new(closes_any: bool) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), closes_any })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn enter(self: &Arc<Self>, activity: &Arc<Activity>) -> Entered {
        let mut state = self.lock();
        state.serial += 1;
        let serial = state.serial;
        state.open.insert(serial, Arc::clone(activity));
        drop(state);
        Entered { connections: Arc::clone(self), serial }
    }

    /// Closes the connection that has been idle for longest, for a new one. Returns whether there is one.
    pub(crate) fn replace_one(&self) -> bool {
        let mut state = self.lock();
        if state.close_one() {
            return true;
        }
        state.look();
        if state.close_one() {
            return true;
        }
        let oldest = state.open.keys().min().copied().filter(|_| self.closes_any);
        oldest.is_some_and(|oldest| state.close(oldest))
    }

    /// Closes the connection that has been idle for longest, but not the one that came last: it may be what the
    /// descriptor was needed for, because the system says that there is none before it says that nothing waits to be
    /// accepted. Returns whether there is one.
    pub(crate) fn spare_one(&self) -> bool {
        let mut state = self.lock();
        let serial = state.serial;
        let last = state.open.remove(&serial);
        let mut is_closed = state.close_one();
        if !is_closed {
            state.look();
            is_closed = state.close_one();
        }
        if let Some(last) = last {
            state.open.insert(serial, last);
        }
        is_closed
    }
}

impl State {
    /// Finds the eighth of all connections that has been idle for longest.
    fn look(&mut self) {
        let open = self.open.iter();
        let idle = open.filter_map(|(serial, activity)| Some((activity.idle_since()?, *serial)));
        let mut idle: Vec<_> = idle.collect();
        idle.sort_unstable();
        idle.truncate(self.open.len().div_ceil(8));
        self.idle = idle.into();
    }

    fn close_one(&mut self) -> bool {
        while let Some((since, serial)) = self.idle.pop_front() {
            let activity = self.open.get(&serial);
            if activity.is_some_and(|activity| activity.idle_since() == Some(since)) {
                return self.close(serial);
            }
        }
        false
    }

    /// It is not closed twice.
    fn close(&mut self, serial: u64) -> bool {
        let activity = self.open.remove(&serial);
        activity.is_some_and(|activity| {
            activity.close();
            true
        })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.connections.lock().open.remove(&self.serial);
    }
}
