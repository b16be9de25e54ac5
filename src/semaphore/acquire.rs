//! Waiting for a permit.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Semaphore;
use super::instrument::Attempt;
use super::permit::Permit;
use super::place_handle::{PlaceHandle, PlaceOf};
use crate::ask::Ask;
use crate::error::{AcquireError, RejectReason, Rejected};
use crate::metrics::requests::Meter;
use crate::name::Name;
use crate::node::sessions::Remembered;
use crate::policy::{ANSWER_TIMEOUT, Limit, Policy};
use crate::protocol::Claim;
use crate::protocol::session::Progress;

/// The future of [`Semaphore::acquire`](crate::Semaphore::acquire).
///
/// # Cancel safety
///
/// Dropping the future removes the caller from the queue; a permit that was already granted is released.
/// The caller's position is lost.
///
/// # Futures that are not polled
///
/// The request keeps its place until the future is dropped, whether it is polled or not, as that of
/// [`tokio::sync::Semaphore`] does once it was polled. When its turn comes, the permit is granted and stays taken, and
/// the wait timeout is noticed only by a poll. A future that is kept and not polled, such as one that a loop of
/// `select!` borrows while another branch awaits something else, therefore holds a permit of the whole fleet. Spawn
/// it, or drop it.
#[derive(Debug)]
#[must_use = "dropping this removes the request from the queue"]
pub struct Acquire {
    state: State,
    began: Instant,
    wait_timeout: Duration,
    /// Until when to wait for the backend's answer, and since when it must have answered others to be waited for longer.
    answer_by: Instant,
    asked_at: Instant,
    is_out_of_time: bool,
    limit: u32,
    claim: Option<Claim>,
    attempt: Attempt,
    // Created only when there is something to wait for.
    alarm: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
enum State {
    Answered(Option<Result<Permit, AcquireError>>),
    Asking(PlaceHandle),
}

/// A request, as a layer makes it.
pub(crate) struct Request<'a> {
    pub(crate) name: &'a Name,
    /// `None` where the name is all that is asked for.
    pub(crate) ask: Option<&'a Ask>,
    pub(crate) policy: &'a Policy,
    pub(crate) meter: Meter,
    /// It may not wait because its time for that is over: then this is what it is refused for.
    pub(crate) is_out_of_time: bool,
    /// It waits no longer than this for the backend's answer.
    pub(crate) answer_timeout: Option<Duration>,
    /// Where the record of the name was last, if all of these requests are for one name.
    pub(crate) remembered: Option<&'a Remembered>,
}

impl Acquire {
    pub(super) fn new(semaphore: &Semaphore, request: Request<'_>) -> Self {
        let Request { name, ask, policy, meter, is_out_of_time, answer_timeout, remembered } =
            request;
        let began = Instant::now();
        let attempt = Attempt::new(meter, name, policy);
        let (mut claim, mut limit) = (None, 0);
        let (tasks, node) = (&semaphore.inner.tasks, semaphore.node());
        let state =
            match policy.limit {
                _ if node.is_closed() => State::Answered(Some(Err(AcquireError::Closed))),
                Limit::Unlimited => State::Answered(Some(Ok(Permit::uncounted(name.as_str())))),
                Limit::Permits(0) => State::Answered(Some(Err(AcquireError::Rejected(
                    Rejected::new(RejectReason::Limit, 0, 0, 0, Duration::ZERO),
                )))),
                Limit::Permits(permits) => {
                    limit = permits;
                    let running = tasks.ensure_running();
                    let place = running
                        .map_err(AcquireError::Unavailable)
                        .and_then(|()| semaphore.claim_of(ask, permits))
                        .and_then(|made| {
                            claim = made;
                            let tenant = ask.and_then(Ask::tenant);
                            let meter = attempt.meter();
                            let of = PlaceOf { name, remembered, tenant, claim, meter };
                            PlaceHandle::take(tasks, of, permits, policy, began)
                        });
                    match place {
                        Ok(place) => State::Asking(place),
                        Err(error) => State::Answered(Some(Err(error))),
                    }
                }
            };
        if let State::Answered(Some(Err(AcquireError::Rejected(_)))) = &state {
            node.counts.tallies.refused(name.as_str());
        }
        let wait_timeout = policy.wait_timeout;
        let answer_timeout = answer_timeout.map_or(ANSWER_TIMEOUT, |at| at.min(ANSWER_TIMEOUT));
        Self {
            state,
            began,
            wait_timeout,
            answer_by: began + answer_timeout,
            asked_at: began,
            is_out_of_time,
            limit,
            claim,
            attempt,
            alarm: None,
        }
    }

    fn rejected(&self, reason: RejectReason, in_use: u64, waiting: u64) -> Rejected {
        let rejected = Rejected::new(reason, self.limit, in_use, waiting, self.began.elapsed());
        let cost = self.claim.map_or(1, Claim::cost);
        rejected.asked(cost, self.claim.and_then(Claim::each))
    }
}

impl Semaphore {
    /// Returns the claim of a request, if it has one.
    fn claim_of(&self, ask: Option<&Ask>, limit: u32) -> Result<Option<Claim>, AcquireError> {
        let Some(ask) = ask.filter(|ask| ask.is_fair()) else { return Ok(None) };
        let overrides = &self.node().overrides;
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
        // A permit that is kept, or counted in this process, needs no wait: other tasks have their turn all the same.
        let coop = ready!(coop::poll_proceed(cx));
        let this = &mut *self;
        loop {
            let place = match &mut this.state {
                State::Asking(place) => place,
                State::Answered(answer) => {
                    let answer = answer.take().unwrap_or(Err(AcquireError::Closed));
                    let (error, waited) = (answer.as_ref().err(), this.began.elapsed());
                    this.attempt.answered(error, waited, this.wait_timeout);
                    coop.made_progress();
                    return Poll::Ready(answer);
                }
            };
            let now = Instant::now();
            let progress = place.progress(now, cx);
            let until = match progress {
                Progress::Joining => this.answer_by,
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
                    if !by_policy {
                        this.attempt.placed(|| place.id());
                    }
                    let hold = this.attempt.granted(by_policy, place.cost(), waited, now);
                    coop.made_progress();
                    return Poll::Ready(Ok(Permit::new(place.measured(hold), waited)));
                }
                Progress::Refused { reason, in_use, waiting, limit, is_tenant_full, ends_in } => {
                    let may_not_wait =
                        matches!(reason, RejectReason::Limit | RejectReason::TenantLimit);
                    let is_closed = !this.wait_timeout.is_zero() && place.is_queue_closed();
                    if is_closed && (may_not_wait || reason == RejectReason::Quarantine) {
                        // It would have waited: it has the answer of those that did.
                        this.state = State::Answered(Some(Err(AcquireError::Closed)));
                        continue;
                    }
                    let reason = if may_not_wait && this.is_out_of_time {
                        RejectReason::QueueTimeout
                    } else {
                        reason
                    };
                    let reason = match reason {
                        RejectReason::Limit
                        | RejectReason::QueueFull
                        | RejectReason::QueueTimeout
                            if limit == Some(0) && !is_tenant_full =>
                        {
                            RejectReason::Paused
                        }
                        reason => reason,
                    };
                    place.count_refusal();
                    this.limit = limit.unwrap_or(this.limit);
                    let mut rejected = this.rejected(reason, in_use, waiting);
                    rejected.is_tenant_full = is_tenant_full;
                    rejected.ends_in = ends_in;
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
                let end = this.began + this.wait_timeout;
                match progress {
                    Progress::Joining if place.server_answers_since(this.asked_at) => {
                        // The queue is one of this process's own making: it waits there as in that of the backend.
                        if now < end {
                            let patience = place.response_timeout();
                            this.answer_by = end.min(now + patience);
                            this.asked_at = this.answer_by - patience;
                        } else {
                            place.answer_timed_out(now);
                        }
                    }
                    _ => place.wait_timed_out(now),
                }
                continue;
            }
            match &mut this.alarm {
                Some(alarm) if alarm.deadline() == until => {}
                Some(alarm) => alarm.as_mut().reset(until),
                None => {
                    place.ensure_looked_after();
                    this.alarm = Some(Box::pin(sleep_until(until)));
                }
            }
            if let Some(alarm) = &mut this.alarm {
                ready!(alarm.as_mut().poll(cx));
            }
        }
    }
}
