//! The task that acts on deadlines: it renews leases that are due, reports lost ones, and makes its rounds.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Tasks;
use super::rounds::Round;
use crate::node::Node;
use crate::node::overrides::adapting::LimitBefore;
use crate::node::sessions::SESSIONS_AT_A_TIME;
use crate::protocol::Time;

/// How soon lost permits are reported after a suspension of the machine.
const SUSPENSION_CHECK: Duration = Duration::from_millis(500);
/// How long to sleep when nothing is due.
const NOTHING_DUE: Duration = Duration::from_secs(24 * 3600);

/// Handles each session when it is due, until the node is closed and empty.
pub(crate) async fn run(tasks: Arc<Tasks>) {
    let (node, rounds) = (tasks.node(), &tasks.rounds);
    while !node.is_finished() {
        let due = handle_due(node).await;
        // A round yields to leases that are due, so none is renewed late.
        let due = match rounds.begin() {
            Some(round) => make_round(round, node, due).await,
            None => due,
        };
        let due = due.map(|due| node.clock.instant(due));
        let due = [due, rounds.next(), node.counts.log_lost(false), node.end_quarantines()];
        let due = due.into_iter().flatten().min();
        let next = due.map_or(NOTHING_DUE, |due| due.saturating_duration_since(Instant::now()));
        // Tokio's timers stand still while the machine is suspended; leases in Redis do not.
        let may_be_late = due.is_some() && node.embedded().is_none();
        let next = if may_be_late { next.min(SUSPENSION_CHECK) } else { next };
        tokio::select! {
            biased;
            () = node.sessions.timers.came() => {}
            () = sleep(next) => {}
        }
    }
    rounds.end();
}

async fn make_round(mut round: Round<'_>, node: &Node, mut due: Option<Time>) -> Option<Time> {
    while round.go_on() {
        tokio::task::yield_now().await;
        due = handle_due(node).await;
    }
    due
}

/// Handles all sessions that are due. Returns when the next one is.
pub(crate) async fn handle_due(node: &Node) -> Option<Time> {
    loop {
        for _ in 0..SESSIONS_AT_A_TIME {
            let now = node.clock.now();
            let (timer, shared) = match node.sessions.timers.due(now) {
                Ok(due) => due,
                Err(next) => return next,
            };
            let mut state = shared.lock();
            state.on_timer(timer);
            let (paused, limit) = (state.session.paused_until(), LimitBefore::of(&state));
            if state.session.poll_timeout().is_some_and(|timeout| timeout <= now) {
                state.session.handle_timeout(now);
            }
            let (paused_after, limit) = (state.session.paused_until(), limit.changed(&state));
            let grows = state.session.poll_growth();
            node.finish(&shared, state, now, None);
            node.log_pause(shared.name(), paused, paused_after);
            node.tell_limit(&shared, limit);
            if let Some(range) = grows {
                node.raise(shared.name(), range);
            }
        }
        tokio::task::yield_now().await;
    }
}
