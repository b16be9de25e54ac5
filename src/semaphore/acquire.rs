//! Waiting for a permit.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use super::Handle;
use super::ask::Ask;
use super::instrument::Attempt;
use super::permit::Permit;
use super::place_handle::PlaceHandle;
use super::policy::{ANSWER_TIMEOUT, Limit, Policy};
use super::tenants::TenantNumbers;
use crate::error::{AcquireError, RejectReason, Rejected};
use crate::metrics::requests::Meter;
use crate::protocol::claim::Claim;
use crate::protocol::session::Progress;

/// The future of [`Semaphore::acquire`](crate::Semaphore::acquire).
///
/// # Cancel safety
///
/// Dropping the future removes the caller from the queue; a permit that was already granted is released.
/// The caller's position is lost.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Acquire {
    state: State,
    began: Instant,
    wait_timeout: Duration,
    /// How long the backend's answer is waited for.
    answer_timeout: Duration,
    limit: u32,
    claim: Option<Claim>,
    attempt: Attempt,
    // Made only when there is something to wait for.
    alarm: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
enum State {
    Answered(Option<Result<Permit, AcquireError>>),
    Asking(PlaceHandle),
}

impl Acquire {
    pub(super) fn new(
        handle: &Handle,
        numbers: &TenantNumbers,
        ask: &Ask,
        policy: &Policy,
        meter: Meter,
    ) -> Self {
        let began = Instant::now();
        let name = ask.name().as_str();
        let attempt = Attempt::new(meter, name, policy);
        let mut claim = None;
        let mut limit = 0;
        let state =
            match policy.limit {
                _ if handle.node.is_closed() => State::Answered(Some(Err(AcquireError::Closed))),
                Limit::Unlimited => State::Answered(Some(Ok(Permit::uncounted(name)))),
                Limit::Permits(0) => State::Answered(Some(Err(AcquireError::Rejected(
                    Rejected::new(RejectReason::Limit, 0, 0, 0, Duration::ZERO),
                )))),
                Limit::Permits(permits) => {
                    limit = permits;
                    let place = handle
                        .tasks
                        .ensure_running(&handle.node)
                        .map_err(AcquireError::Unavailable)
                        .and_then(|()| {
                            let set = ask
                                .tenant()
                                .map(|tenant| handle.node.overrides.of_tenant(ask.name(), tenant));
                            let set = set.unwrap_or_default();
                            ask.claim(numbers, set).map_err(|reason| {
                                let zero = Duration::ZERO;
                                let rejected = Rejected::new(reason, permits, 0, 0, zero);
                                AcquireError::Rejected(rejected.asked(ask.permits(), ask.cap(set)))
                            })
                        })
                        .and_then(|made| {
                            claim = made;
                            PlaceHandle::take(&handle.node, ask, made, permits, policy, began)
                        });
                    match place {
                        Ok(place) => State::Asking(place),
                        Err(error) => State::Answered(Some(Err(error))),
                    }
                }
            };
        let wait_timeout = policy.wait_timeout;
        let answer_timeout = ANSWER_TIMEOUT;
        Self { state, began, wait_timeout, answer_timeout, limit, claim, attempt, alarm: None }
    }

    /// Waits no longer than this for the backend's answer.
    pub(crate) const fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    fn full(&self, reason: RejectReason, in_use: u64, waiting: u64) -> AcquireError {
        let rejected = Rejected::new(reason, self.limit, in_use, waiting, self.began.elapsed());
        let cost = self.claim.map_or(1, Claim::cost);
        AcquireError::Rejected(rejected.asked(cost, self.claim.and_then(Claim::each)))
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
                    let answer = answer.take().unwrap_or(Err(AcquireError::Closed));
                    this.attempt.answered(answer.as_ref().err(), this.began.elapsed());
                    return Poll::Ready(answer);
                }
            };
            let now = Instant::now();
            let progress = place.progress(now, cx);
            let until = match progress {
                Progress::Joining => this.began + this.answer_timeout,
                Progress::Waiting => {
                    this.attempt.queued();
                    this.began + this.wait_timeout
                }
                Progress::Held | Progress::Admitted => {
                    let State::Asking(place) =
                        std::mem::replace(&mut this.state, State::Answered(None))
                    else {
                        continue;
                    };
                    let waited = now - this.began;
                    let by_policy = matches!(progress, Progress::Admitted);
                    let hold = this.attempt.granted(by_policy, place.cost(), waited, now);
                    return Poll::Ready(Ok(Permit::new(place.measured(hold), waited)));
                }
                Progress::Refused { reason, in_use, waiting, limit } => {
                    this.limit = limit.unwrap_or(this.limit);
                    let error = this.full(reason, in_use, waiting);
                    this.state = State::Answered(Some(Err(error)));
                    continue;
                }
                Progress::Failed => {
                    let error = place.error();
                    this.state = State::Answered(Some(Err(AcquireError::Unavailable(error))));
                    continue;
                }
                Progress::Closed => {
                    this.state = State::Answered(Some(Err(AcquireError::Closed)));
                    continue;
                }
            };
            if now >= until {
                place.wait_timed_out(now);
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
