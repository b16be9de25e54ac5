//! The task that acts on time: it renews leases that are due, and tells when one is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::node::Node;
use super::sessions::SESSIONS_AT_A_TIME;

/// How long to sleep when nothing is due.
const FAR: Duration = Duration::from_secs(24 * 3600);

/// Handles each session when it is due, until the node is closed and empty.
pub(super) async fn run(node: Arc<Node>) {
    while !node.is_finished() {
        let due = handle_due(&node).await;
        let due = [due, node.counts.log_lost(false), node.end_quarantines()];
        let due = due.into_iter().flatten().min();
        let next = due.unwrap_or_else(|| Instant::now() + FAR);
        tokio::select! {
            biased;
            () = node.sessions.timers.came() => {}
            () = sleep_until(next) => {}
        }
    }
}

/// Handles all sessions that are due. Returns when the next one is.
pub(super) async fn handle_due(node: &Node) -> Option<Instant> {
    loop {
        for _ in 0..SESSIONS_AT_A_TIME {
            let now = Instant::now();
            let (timer, shared) = match node.sessions.timers.due(now) {
                Ok(due) => due,
                Err(next) => return next,
            };
            let now = node.clock.time(now);
            let mut state = shared.lock();
            state.timer_went_off(timer);
            if state.session.poll_timeout().is_some_and(|timeout| timeout <= now) {
                state.session.handle_timeout(now);
            }
            node.finish(&shared, state, now, None);
        }
        tokio::task::yield_now().await;
    }
}
