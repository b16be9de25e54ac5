//! The one task that sees time pass: it renews what is due and says when a lease is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::node::Node;
use crate::protocol::session::Session;

/// After so many sessions, other tasks have their turn.
const SESSIONS_AT_A_TIME: usize = 128;
/// Nothing is due for so long.
const FAR: Duration = Duration::from_secs(24 * 3600);

/// Looks at every session when its time comes, until the node is closed and empty.
pub(super) async fn run(node: Arc<Node>) {
    while !node.is_finished() {
        let due = [look(&node).await, node.counts.tell_of_lost(false)].into_iter().flatten().min();
        let next = due.unwrap_or_else(|| Instant::now() + FAR);
        tokio::select! {
            biased;
            () = node.sessions.schedule.came() => {}
            () = sleep_until(next) => {}
        }
    }
}

/// Looks at every session that is due; says when the next one is.
pub(super) async fn look(node: &Node) -> Option<Instant> {
    loop {
        for _ in 0..SESSIONS_AT_A_TIME {
            let now = Instant::now();
            let (look, shared) = match node.sessions.schedule.due(now) {
                Ok(due) => due,
                Err(next) => return next,
            };
            let mut state = shared.lock();
            if state.look == Some(look) {
                state.look = None;
            }
            drop(state);
            node.act(&shared, node.clock.time(now), |session: &mut Session, time| {
                if session.poll_timeout().is_some_and(|timeout| timeout <= time) {
                    session.handle_timeout(time);
                }
            });
        }
        tokio::task::yield_now().await;
    }
}
