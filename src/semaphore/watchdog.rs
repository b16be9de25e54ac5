//! The one task that sees time pass: it renews what is due and says when a lease is lost.

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::node::Node;

/// Looks at every gate when its time comes, until the node is closed and empty.
pub(super) async fn run(node: Arc<Node>) {
    let far = std::time::Duration::from_secs(24 * 3600);
    while !node.is_finished() {
        let due = [node.look(), node.tell_of_lost()].into_iter().flatten().min();
        let next = due.unwrap_or_else(|| Instant::now() + far);
        tokio::select! {
            () = sleep_until(next) => {}
            () = node.look_came() => {}
        }
    }
    node.forget();
}
