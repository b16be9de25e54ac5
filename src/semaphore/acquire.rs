//! Waiting for a permit.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use super::Semaphore;
use super::ask::Ask;
use super::instrument::Attempt;
use super::permit::Permit;
use super::place_handle::{PlaceHandle, PlaceOf};
use super::policy::{ANSWER_TIMEOUT, Limit, Policy};
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
#[must_use = "the request takes its place when it is made; dropping this gives the place back"]
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
    /// `ask`: where the name is not all that is asked for.
    pub(super) fn new(
        semaphore: &Semaphore,
        name: &str,
        ask: Option<&Ask>,
        policy: &Policy,
        meter: Meter,
    ) -> Self {
        let began = Instant::now();
        let attempt = Attempt::new(meter, name, policy);
        let (mut claim, mut limit) = (None, 0);
        let node = &semaphore.handle.node;
        let state =
            match policy.limit {
                _ if node.is_closed() => State::Answered(Some(Err(AcquireError::Closed))),
                Limit::Unlimited => State::Answered(Some(Ok(Permit::uncounted(name)))),
                Limit::Permits(0) => State::Answered(Some(Err(AcquireError::Rejected(
                    Rejected::new(RejectReason::Limit, 0, 0, 0, Duration::ZERO),
                )))),
                Limit::Permits(permits) => {
                    limit = permits;
                    let running = semaphore.handle.tasks.ensure_running(node);
                    let place = running
                        .map_err(AcquireError::Unavailable)
                        .and_then(|()| semaphore.claim_of(ask, permits))
                        .and_then(|made| {
                            claim = made;
                            let tenant = ask.and_then(Ask::tenant);
                            let of = PlaceOf { name, tenant, claim, meter: attempt.meter() };
                            PlaceHandle::take(node, of, permits, policy, began)
                        });
                    match place {
                        Ok(place) => State::Asking(place),
                        Err(error) => State::Answered(Some(Err(error))),
                    }
                }
            };
        if let State::Answered(Some(Err(AcquireError::Rejected(_)))) = &state {
            node.counts.tallies.refused(name);
        }
        let wait_timeout = policy.wait_timeout;
        let answer_timeout = ANSWER_TIMEOUT;
        Self { state, began, wait_timeout, answer_timeout, limit, claim, attempt, alarm: None }
    }

    /// Waits no longer than this for the backend's answer.
    pub(crate) const fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    fn rejected(&self, reason: RejectReason, in_use: u64, waiting: u64) -> Rejected {
        let rejected = Rejected::new(reason, self.limit, in_use, waiting, self.began.elapsed());
        let cost = self.claim.map_or(1, Claim::cost);
        rejected.asked(cost, self.claim.and_then(Claim::each))
    }
}

impl Semaphore {
    /// The claim that a request makes, if it makes one.
    fn claim_of(&self, ask: Option<&Ask>, limit: u32) -> Result<Option<Claim>, AcquireError> {
        let Some(ask) = ask.filter(|ask| ask.is_fair()) else { return Ok(None) };
        let overrides = &self.handle.node.overrides;
        let set = ask.tenant().map(|tenant| overrides.of_tenant(ask.name(), tenant));
        let set = set.unwrap_or_default();
        ask.claim(&self.tenants, set).map(Some).map_err(|reason| {
            let rejected = Rejected::new(reason, limit, 0, 0, Duration::ZERO);
            AcquireError::Rejected(rejected.asked(ask.permits(), ask.cap(set)))
        })
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
                Progress::Refused { reason, in_use, waiting, limit, is_tenant_full } => {
                    place.count_refusal();
                    this.limit = limit.unwrap_or(this.limit);
                    let mut rejected = this.rejected(reason, in_use, waiting);
                    rejected.is_tenant_full = is_tenant_full;
                    let error = AcquireError::Rejected(rejected);
                    this.state = State::Answered(Some(Err(error)));
                    continue;
                }
                Progress::Failed => {
                    let error = place.error();
                    place.count_refusal();
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
