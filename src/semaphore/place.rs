//! A request's hold on its place.

use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::Instant;

use super::node::{Gate, Node};
use super::places::{Progress, Terms};
use super::policy::Policy;
use crate::error::BackendError;

/// A place in a gate; left when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    gate: Arc<Gate>,
    index: usize,
}

impl Place {
    pub(super) fn take(
        node: &Arc<Node>,
        name: &str,
        limit: u32,
        policy: &Policy,
        now: Instant,
    ) -> Result<Self, BackendError> {
        node.ensure_running()?;
        let max_queue = (!policy.wait_timeout.is_zero()).then_some(policy.max_queue);
        let on_unavailable = policy.on_unavailable;
        let terms = Terms { lease: policy.lease, max_queue, on_unavailable };
        let (gate, index) = node.with_gate(name, |places| places.join(limit, terms, now));
        let index = index?;
        node.place_taken();
        Ok(Self { gate, index })
    }

    pub(super) fn progress(&self, now: Instant, cx: &Context<'_>) -> Progress {
        self.gate.update(|places| places.progress(self.index, now, cx))
    }

    pub(super) fn overdue(&self, now: Instant) {
        self.gate.update(|places| places.overdue(self.index, now));
    }

    pub(super) fn name(&self) -> &str {
        self.gate.name()
    }

    pub(super) fn is_lost(&self, cx: Option<&Context<'_>>) -> bool {
        self.gate.update(|places| places.is_lost(self.index, Instant::now(), cx))
    }

    /// Gives the permit back; what is left is to wait for the acknowledgement.
    pub(super) fn leave_slowly(&self) {
        self.gate.update(|places| places.leave_slowly(self.index, Instant::now()));
    }

    pub(super) fn poll_released(&self, cx: &Context<'_>) -> Poll<Result<(), BackendError>> {
        match self.gate.update(|places| places.poll_released(self.index, cx)) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let node = self.gate.node();
        self.gate.update(|places| places.leave(self.index, Instant::now()));
        node.place_left();
    }
}
