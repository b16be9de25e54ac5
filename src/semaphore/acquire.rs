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
                // A grant that comes from here on is given back.
                let error = place.overdue();
                let error = match error {
                    Some(error) => AcquireError::Unavailable(error),
                    None => {
                        let (in_use, waiting) = place.seen();
                        this.full(FullReason::QueueTimeout, in_use, waiting)
                    }
                };
                this.state = State::Answered(Some(Err(error)));
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
        if let Some(error) = node.down() {
            return Err(error);
        }
        let max_queue = (!policy.wait_timeout.is_zero()).then_some(policy.max_queue);
        let terms = Terms { lease: policy.lease, max_queue };
        let serial = node.next_serial();
        let (gate, index) = node.with_gate(name, |places| places.join(serial, limit, terms, now));
        let index = index?;
        node.place_taken();
        Ok(Self { gate, index })
    }

    fn progress(&self, now: Instant, cx: &Context<'_>) -> Progress {
        self.gate.update(|places, _| places.progress(self.index, now, cx))
    }

    /// What the whole semaphore had when last heard of.
    fn seen(&self) -> (u64, u64) {
        self.gate.update(|places, _| places.seen())
    }

    /// Whether the backend is to blame for a request that waited too long.
    fn overdue(&self) -> Option<BackendError> {
        if let Some(error) = self.gate.node().down() {
            return Some(error);
        }
        self.gate
            .update(|places, _| places.is_joining(self.index))
            .then(|| BackendError::call("the backend gave no answer in time"))
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
        self.gate.update(|places, _| places.leave(self.index, Instant::now()));
        self.gate.node().place_left();
    }
}
