//! Waiting for a permit.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use super::ANSWER_TIMEOUT;
use super::node::{Gate, Node};
use super::permit::Permit;
use super::places::{Progress, Terms};
use super::policy::{Limit, Policy};
use crate::error::{AcquireError, BackendError, Full, FullReason};

/// The future of [`Semaphore::acquire`](crate::Semaphore::acquire).
///
/// # Cancel safety
///
/// Dropping it at any time leaves nothing: a place in the queue is left, and a permit that was
/// granted meanwhile is given back.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Acquire {
    state: State,
    began: Instant,
    wait_timeout: Duration,
    limit: u32,
    // Made only when there is something to wait for.
    alarm: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
enum State {
    Answered(Option<Result<Permit, AcquireError>>),
    Asking(Place),
}

/// A place in a gate; left when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    gate: Arc<Gate>,
    index: usize,
}

impl Acquire {
    pub(super) fn new(node: &Arc<Node>, name: &str, policy: &Policy) -> Self {
        let began = Instant::now();
        let mut limit = 0;
        let state = match policy.limit {
            _ if node.is_closed() => State::Answered(Some(Err(AcquireError::Closed))),
            Limit::Unlimited => State::Answered(Some(Ok(Permit::uncounted(name)))),
            Limit::Permits(0) => State::Answered(Some(Err(AcquireError::Full(Full::new(
                FullReason::Limit,
                0,
                0,
                0,
                Duration::ZERO,
            ))))),
            Limit::Permits(permits) => {
                limit = permits;
                match Place::take(node, name, permits, policy, began) {
                    Ok(place) => State::Asking(place),
                    Err(error) => State::Answered(Some(Err(AcquireError::Unavailable(error)))),
                }
            }
        };
        Self { state, began, wait_timeout: policy.wait_timeout, limit, alarm: None }
    }

    fn full(&self, reason: FullReason, in_use: u64, waiting: u64) -> AcquireError {
        AcquireError::Full(Full::new(reason, self.limit, in_use, waiting, self.began.elapsed()))
    }
}

impl Future for Acquire {
    type Output = Result<Permit, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            let place = match &mut this.state {
                State::Asking(place) => place,
                State::Answered(answer) => {
                    return Poll::Ready(answer.take().unwrap_or(Err(AcquireError::Closed)));
                }
            };
            let now = Instant::now();
            let until = match place.progress(now, cx) {
                Progress::Joining => this.began + ANSWER_TIMEOUT,
                Progress::Waiting => this.began + this.wait_timeout,
                Progress::Held => {
                    let State::Asking(place) =
                        std::mem::replace(&mut this.state, State::Answered(None))
                    else {
                        continue;
                    };
                    return Poll::Ready(Ok(Permit::new(place, now - this.began)));
                }
                Progress::Refused { reason, in_use, waiting } => {
                    let error = this.full(reason, in_use, waiting);
                    this.state = State::Answered(Some(Err(error)));
                    continue;
                }
                Progress::Failed(error) => {
                    this.state = State::Answered(Some(Err(AcquireError::Unavailable(error))));
                    continue;
                }
                Progress::Closed => {
                    this.state = State::Answered(Some(Err(AcquireError::Closed)));
                    continue;
                }
            };
            if now >= until {
                place.overdue(now);
                continue;
            }
            match &mut this.alarm {
                Some(alarm) if alarm.deadline() == until => {}
                Some(alarm) => alarm.as_mut().reset(until),
                None => this.alarm = Some(Box::pin(sleep_until(until))),
            }
            if let Some(alarm) = &mut this.alarm {
                ready!(alarm.as_mut().poll(cx));
            }
        }
    }
}

impl Place {
    fn take(
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
        let serial = &mut || node.next_serial();
        let (gate, index) = node.with_gate(name, |places| places.join(serial, limit, terms, now));
        let index = index?;
        node.place_taken();
        Ok(Self { gate, index })
    }

    fn progress(&self, now: Instant, cx: &Context<'_>) -> Progress {
        self.gate.update(|places, _| places.progress(self.index, now, cx))
    }

    fn overdue(&self, now: Instant) {
        let serial = &mut || self.gate.node().next_serial();
        self.gate.update(|places, wake| places.overdue(self.index, now, serial, wake));
    }

    pub(super) fn name(&self) -> &str {
        self.gate.name()
    }

    pub(super) fn is_lost(&self, cx: Option<&Context<'_>>) -> bool {
        self.gate.update(|places, _| places.is_lost(self.index, Instant::now(), cx))
    }

    /// Gives the permit back; what is left is to wait for the acknowledgement.
    pub(super) fn leave_slowly(&self) {
        self.gate.update(|places, _| places.leave_slowly(self.index, Instant::now()));
    }

    pub(super) fn poll_released(&self, cx: &Context<'_>) -> Poll<Result<(), BackendError>> {
        match self.gate.update(|places, _| places.poll_released(self.index, cx)) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let node = self.gate.node();
        let serial = &mut || node.next_serial();
        self.gate.update(|places, wake| places.leave(self.index, Instant::now(), serial, wake));
        node.place_left();
    }
}
