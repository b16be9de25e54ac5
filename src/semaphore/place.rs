//! A request's hold on its place.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::meter::Hold;
use super::node::{Gate, Node};
use super::places::{Progress, Terms};
use super::policy::Policy;
use crate::error::BackendError;

/// A handle on a place in a gate, which is left when the last one is dropped.
#[derive(Debug)]
pub(super) struct Place {
    gate: Arc<Gate>,
    index: usize,
    hold: Hold,
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
        let (gate, index) = node.with_gate(name, now, |places| places.join(limit, terms, now));
        let index = index?;
        node.place_taken();
        Ok(Self { gate, index, hold: Hold::default() })
    }

    /// The place of a permit that was granted, and is measured from here on.
    pub(super) fn measured(mut self, hold: Hold) -> Self {
        self.hold = hold;
        self
    }

    pub(super) fn progress(&self, now: Instant, cx: &Context<'_>) -> Progress {
        self.gate.update(now, |places| places.progress(self.index, now, cx))
    }

    pub(super) fn overdue(&self, now: Instant) {
        self.gate.update(now, |places| places.overdue(self.index, now));
    }

    pub(super) fn name(&self) -> &str {
        self.gate.name()
    }

    pub(super) fn is_lost(&self) -> bool {
        let now = Instant::now();
        self.gate.look(|places| places.is_lost(self.index, now))
    }

    /// Wakes `waker` when the permit is lost; `false`: it is lost already.
    pub(super) fn on_lost(&self, waker: &Waker) -> bool {
        self.gate.look(|places| places.on_lost(self.index, waker))
    }

    /// Gives the permit back, whatever clones there are; says whether there is an acknowledgement
    /// to wait for.
    pub(super) fn give_back_now(&self) -> bool {
        let now = Instant::now();
        let (ended, awaited) = self.gate.update(now, |places| {
            let held = self.hold.is_measured() && places.is_held(self.index);
            let awaited = places.give_back_now(self.index, now);
            (held && !places.is_held(self.index), awaited)
        });
        if ended {
            self.hold.ended(now);
        }
        awaited
    }

    pub(super) fn poll_released(&self, cx: &Context<'_>) -> Poll<Result<(), BackendError>> {
        match self.gate.look(|places| places.poll_released(self.index, cx)) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Clone for Place {
    fn clone(&self) -> Self {
        self.gate.look(|places| places.share(self.index));
        let (gate, hold) = (Arc::clone(&self.gate), self.hold.clone());
        Self { gate, index: self.index, hold }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = Instant::now();
        let (held, left) = self.gate.update(now, |places| {
            let held = self.hold.is_measured() && places.is_held(self.index);
            (held, places.leave(self.index, now))
        });
        if left.is_some() {
            self.gate.node().place_left();
            if held {
                self.hold.ended(now);
            }
        }
    }
}
