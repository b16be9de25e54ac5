//! The servers that this process uses, each with the number of sessions on it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::Server;
use crate::backend::Shard;
use crate::node::clock::Clock;
use crate::node::health::Counts;
use crate::sync::{Mutex, lock};

/// A session that is redirected twice within this time waits for [`REDIRECT_PAUSE`]: two servers can redirect to each
/// other for a moment.
pub(crate) const REDIRECT_LOOP: Duration = Duration::from_millis(100);
/// The pause of a session that two servers redirect to each other.
pub(crate) const REDIRECT_PAUSE: Duration = Duration::from_millis(25);

/// The servers of a backend; most have one. Each has a connection and a driver of its own, so an outage of one affects
/// only the semaphores that it counts.
pub(crate) struct Servers<T> {
    clock: Clock,
    counts: Arc<Counts>,
    quarantine: Option<Duration>,
    all: Mutex<Vec<Entry<T>>>,
    /// A server without a driver has come.
    came: Notify,
}

struct Entry<T> {
    server: Arc<Server<T>>,
    sessions: usize,
    /// It has a driver.
    is_driven: bool,
}

impl<T> Servers<T> {
    pub(crate) fn new(clock: Clock, counts: Arc<Counts>, quarantine: Option<Duration>) -> Self {
        Self { clock, counts, quarantine, all: Mutex::default(), came: Notify::new() }
    }

    pub(crate) fn all(&self) -> Vec<Arc<Server<T>>> {
        lock(&self.all).iter().map(|entry| Arc::clone(&entry.server)).collect()
    }

    /// Returns all servers, each with the number of sessions on it.
    #[cfg(all(test, shuttle))]
    pub(crate) fn counted(&self) -> Vec<(Arc<Server<T>>, usize)> {
        lock(&self.all).iter().map(|entry| (Arc::clone(&entry.server), entry.sessions)).collect()
    }

    /// Returns the server of a shard, and adds this number of sessions to it.
    pub(crate) fn attach(&self, shard: &Shard, sessions: usize) -> Arc<Server<T>> {
        let mut all = lock(&self.all);
        if let Some(entry) = all.iter_mut().find(|entry| entry.server.shard() == shard) {
            entry.sessions += sessions;
            return Arc::clone(&entry.server);
        }
        let counts = Arc::clone(&self.counts);
        let server = Server::new(shard.clone(), self.clock.clone(), counts, self.quarantine);
        let server = Arc::new(server);
        all.push(Entry { server: Arc::clone(&server), sessions, is_driven: false });
        drop(all);
        self.came.notify_one();
        server
    }

    /// Subtracts a session from a server.
    pub(crate) fn detach(&self, server: &Arc<Server<T>>) {
        let mut all = lock(&self.all);
        if let Some(entry) = all.iter_mut().find(|entry| Arc::ptr_eq(&entry.server, server)) {
            entry.sessions -= 1;
        }
    }

    /// Removes a server if no session is left on it. Returns whether it did.
    pub(crate) fn end(&self, server: &Arc<Server<T>>) -> bool {
        let mut all = lock(&self.all);
        let before = all.len();
        all.retain(|entry| entry.sessions > 0 || !Arc::ptr_eq(&entry.server, server));
        let ended = all.len() < before;
        drop(all);
        if ended {
            server.end();
        }
        ended
    }

    /// Returns a server without a driver, and marks it as driven.
    pub(crate) fn next_undriven(&self) -> Option<Arc<Server<T>>> {
        let mut all = lock(&self.all);
        let entry = all.iter_mut().find(|entry| !entry.is_driven)?;
        entry.is_driven = true;
        Some(Arc::clone(&entry.server))
    }

    /// Waits until there may be a server without a driver.
    pub(crate) async fn came(&self) {
        self.came.notified().await;
    }

    /// Marks all servers as having neither driver nor connection. All drivers must have ended, and none may start
    /// meanwhile.
    pub(crate) fn abandon(&self) {
        // Not under the lock: callers are woken, and connections dropped.
        self.all().iter().for_each(|server| server.on_abandoned());
        lock(&self.all).iter_mut().for_each(|entry| entry.is_driven = false);
    }

    /// Wakes all drivers.
    pub(crate) fn wake(&self) {
        lock(&self.all).iter().for_each(|entry| entry.server.outbox.wake());
    }
}
