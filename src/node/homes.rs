//! Moves sessions to other servers: in a cluster, slots move.

use std::sync::Arc;

use tokio::task::yield_now;

use super::server::servers::{REDIRECT_LOOP, REDIRECT_PAUSE};
use super::sessions::SESSIONS_AT_A_TIME;
use super::shared_session::{Queued, SharedSession};
use super::{Node, Server};

impl Node {
    /// Moves each session of this server whose semaphore another server counts now.
    pub(crate) async fn rehome_all(&self, server: &Arc<Server>) {
        // This is called after each failed connect, and there may be a hundred thousand sessions.
        if self.backend.routing().is_some_and(|routing| server.is_routed_by(routing)) {
            return;
        }
        for (count, shared) in self.sessions.on(server).into_iter().enumerate() {
            self.rehome(&shared, false);
            if count % SESSIONS_AT_A_TIME == SESSIONS_AT_A_TIME - 1 {
                yield_now().await;
            }
        }
    }

    /// Moves a session to the server that counts its semaphore now, and has it request everything again there.
    pub(crate) fn rehome(&self, shared: &Arc<SharedSession>, was_redirected: bool) {
        let server = self.servers.attach(&self.backend.shard(shared.key()), 1);
        let now = self.now();
        let mut state = shared.lock();
        if state.is_retired || (Arc::ptr_eq(&state.server, &server) && !was_redirected) {
            drop(state);
            self.servers.detach(&server);
            return;
        }
        let old = std::mem::replace(&mut state.server, Arc::clone(&server));
        state.stay += 1;
        state.queued = Queued::default();
        state.is_new_here = !server.is_up();
        let before = state.moved_at.replace(now);
        if was_redirected && before.is_some_and(|at| now < at + REDIRECT_LOOP) {
            state.held_until = Some(now + REDIRECT_PAUSE);
            self.sessions.timers.push(Arc::clone(shared), now + REDIRECT_PAUSE);
        }
        // Read after the move, so that a later change of the server's state finds this session.
        if server.is_up() {
            state.session.handle_connected(server.conditions(), now);
        } else if server.is_down() {
            state.session.handle_unreachable(now);
        }
        self.finish(shared, state, now, None);
        self.servers.detach(&old);
    }
}
