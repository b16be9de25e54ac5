//! The end of a node: waiting requests are answered and places released. A place that cannot be released ends with its
//! lease.

use std::sync::Arc;

use super::shared_session::SessionState;
use super::{Node, Server};
use crate::protocol::session::Session;
use crate::sync::atomic::Ordering;

impl Node {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes the node to new requests. The tasks end when the last place is gone.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.wake_tasks();
    }

    /// Rejects all waiting requests, and queues no more.
    pub(crate) fn stop_waiting(&self) {
        self.is_queue_closed.store(true, Ordering::Release);
        for shared in self.sessions.all() {
            self.act(&shared, self.now(), Session::handle_stop_waiting);
        }
    }

    pub(crate) fn is_queue_closed(&self) -> bool {
        self.is_queue_closed.load(Ordering::Acquire)
    }

    /// Releases all places.
    pub(crate) fn give_back(&self) {
        for shared in self.sessions.all() {
            self.act(&shared, self.now(), Session::handle_close);
        }
        self.counts.log_lost(true);
    }

    /// Returns whether nothing is left to do.
    pub(crate) fn is_finished(&self) -> bool {
        self.is_closed() && !self.sessions.is_busy()
    }

    /// Gives up on releases to a server that cannot be reached; those places end with their leases. A permit that
    /// outlives its semaphore is still renewed. Returns whether nothing is left on that server.
    pub(crate) fn give_up(&self, server: &Arc<Server>) -> bool {
        self.abandon(|state| Arc::ptr_eq(&state.server, server) && !state.session.is_in_use());
        self.wake_tasks();
        // The server that keeps the overrides stays: a permit held on another server may need to know of a revocation.
        // If this server is needed again, it gets a new driver.
        self.is_finished() || (!self.keeps_overrides(server) && self.servers.end(server))
    }

    /// Removes sessions in whatever state. Their permits are lost, and the holders are notified.
    pub(crate) fn abandon(&self, gone: impl Fn(&SessionState) -> bool) {
        let now = self.now();
        for shared in self.sessions.abandon(gone) {
            let mut state = shared.lock();
            let server = Arc::clone(&state.server);
            state.session.handle_close(now);
            self.finish(&shared, state, now, None);
            self.servers.detach(&server);
        }
    }

    pub(crate) fn wake_tasks(&self) {
        self.servers.wake();
        self.sessions.timers.wake();
    }
}
