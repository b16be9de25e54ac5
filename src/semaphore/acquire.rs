//! Waiting for a permit.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Semaphore;
use super::instrument::Attempt;
use super::permit::Permit;
use super::place_handle::{PlaceHandle, PlaceOf};
use crate::ask::{Ask, Estimate, FurtherAsk};
use crate::error::{AcquireError, Beside, QueueSeen, RejectReason, Rejected};
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
    stage: Stage,
    began: Instant,
    wait_timeout: Duration,
    /// Until when to wait for the backend's answer, and since when it must have answered others to be waited for longer.
    answer_by: Instant,
    asked_at: Instant,
    is_out_of_time: bool,
    limit: u32,
    has_tenant: bool,
    attempt: Attempt,
    // Created only when there is something to wait for.
    alarm: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
enum Stage {
    /// `None` once the answer was taken.
    Answered(Option<Answer>),
    Asking(PlaceHandle),
}

type Answer = Result<Permit, AcquireError>;

/// A request, as a layer makes it.
pub(crate) struct AcquireRequest<'a> {
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
    pub(super) fn new(semaphore: &Semaphore, request: AcquireRequest<'_>) -> Self {
        let AcquireRequest { name, ask, policy, meter, is_out_of_time, answer_timeout, remembered } =
            request;
        let began = Instant::now();
        let attempt = Attempt::new(meter, name, policy);
        let mut limit = 0;
        let counted = match policy.counted_limit() {
            Limit::Unlimited if ask.is_some_and(Ask::counts_anyway) => Limit::Permits(u32::MAX),
            limit => limit,
        };
        let stage = match counted {
            _ if semaphore.node().is_closed() => Stage::failed(AcquireError::Closed),
            Limit::Unlimited => Stage::Answered(Some(Ok(Permit::uncounted(name.as_str())))),
            Limit::Permits(0) => {
                let name = name.as_str().into();
                Stage::failed(AcquireError::Rejected(Rejected::new(name, RejectReason::Limit, 0)))
            }
            Limit::Permits(permits) => {
                limit = permits;
                let (tenant, meter) = (ask.and_then(Ask::tenant), attempt.meter());
                let further = ask.map_or(&[][..], Ask::further);
                let estimates = ask.map_or(&[][..], Ask::estimates);
                let of =
                    PlaceOf { name, remembered, tenant, claim: None, further, estimates, meter };
                match semaphore.take_place(ask, of, permits, policy, began) {
                    Ok(place) => Stage::Asking(place),
                    Err(error) => Stage::failed(error),
                }
            }
        };
        if let Stage::Answered(Some(Err(AcquireError::Rejected(_)))) = &stage {
            semaphore.node().counts.tallies.on_refused(name.as_str());
        }
        let answer_timeout = answer_timeout.map_or(ANSWER_TIMEOUT, |at| at.min(ANSWER_TIMEOUT));
        Self {
            stage,
            began,
            wait_timeout: policy.wait_timeout,
            answer_by: began + answer_timeout,
            asked_at: began,
            is_out_of_time,
            limit,
            has_tenant: ask.is_some_and(|ask| ask.tenant().is_some()),
            attempt,
            alarm: None,
        }
    }

    /// Ends a request that was answered without a counted permit.
    fn answered(&mut self, answer: Option<Answer>, now: Instant) -> Answer {
        // Polled once more after it was ready.
        let answer = answer.unwrap_or(Err(AcquireError::Closed));
        self.attempt.on_answered(answer.as_ref().err(), now - self.began, self.wait_timeout);
        answer
    }

    /// Ends a request whose place has its permits.
    #[inline]
    fn granted(&mut self, by_policy: bool, now: Instant) -> Answer {
        let Stage::Asking(place) = std::mem::replace(&mut self.stage, Stage::Answered(None)) else {
            return Err(AcquireError::Closed);
        };
        let waited = now - self.began;
        if !by_policy {
            self.attempt.on_placed(|| place.id());
        }
        let hold = self.attempt.on_granted(by_policy, place.cost(), waited, now);
        Ok(Permit::new(place.granted(hold), waited))
    }

    /// Waits until the place may have made progress. Once the time for that is over, the next progress is the outcome.
    fn poll_wait(&mut self, has_joined: bool, now: Instant, cx: &mut Context<'_>) -> Poll<()> {
        if has_joined {
            self.attempt.on_queued();
        }
        let until = if has_joined { self.began + self.wait_timeout } else { self.answer_by };
        let Stage::Asking(place) = &self.stage else { return Poll::Ready(()) };
        if now >= until {
            self.time_out(has_joined, now);
            return Poll::Ready(());
        }
        match &mut self.alarm {
            Some(alarm) if alarm.deadline() == until => {}
            Some(alarm) => alarm.as_mut().reset(until),
            None => {
                place.ensure_renewed();
                self.alarm = Some(Box::pin(sleep_until(until)));
            }
        }
        self.alarm.as_mut().map_or(Poll::Ready(()), |alarm| alarm.as_mut().poll(cx))
    }

    /// The wait is over, or that for the first answer of the backend. The latter goes on if the server answers others.
    fn time_out(&mut self, has_joined: bool, now: Instant) {
        let Stage::Asking(place) = &self.stage else { return };
        if has_joined || !place.server_answers_since(self.asked_at) {
            return place.wait_timed_out(now);
        }
        // The queue is one of this process's own making: it waits there as in that of the backend.
        let end = self.began + self.wait_timeout;
        if now < end {
            let patience = place.response_timeout();
            self.answer_by = end.min(now + patience);
            self.asked_at = self.answer_by - patience;
        } else {
            place.answer_timed_out(now);
        }
    }

    /// Returns the error of a request that got no permit.
    fn error_of(&mut self, progress: Progress) -> AcquireError {
        let Stage::Asking(place) = &self.stage else { return AcquireError::Closed };
        match progress {
            Progress::Refused {
                reason,
                full,
                usage,
                limit,
                rate,
                is_tenant_full,
                ends_in,
                ahead,
                expected_wait,
                rate_wait,
            } => {
                if self.is_closed_for(reason, place) {
                    return AcquireError::Closed;
                }
                let reason = self.reason(reason, limit == Some(0) && !is_tenant_full);
                place.count_refusal();
                let name = Arc::clone(place.name());
                let claim = place.id().and_then(|id| id.claim);
                let further = place.further_limit(reason, full, claim);
                let budget = place.budget_of(reason);
                self.limit = limit.unwrap_or(self.limit);
                let (cost, each) = claim.map_or((1, None), |claim| (claim.cost(), claim.each()));
                let rejected = Rejected {
                    in_use: usage.map(|of| of.in_use),
                    waiting: usage.map(|of| of.waiting),
                    waited: self.began.elapsed(),
                    is_tenant_full,
                    ends_in,
                    beside: Beside { rate, further, budget, has_budgets: place.has_budgets() }
                        .boxed(),
                    queue: QueueSeen {
                        ahead,
                        expected_wait,
                        wait_timeout: self.wait_timeout,
                        rate_wait,
                    }
                    .boxed(),
                    has_tenant: self.has_tenant,
                    ..Rejected::new(name, reason, self.limit).asked(cost, each)
                };
                AcquireError::Rejected(rejected.with_refill())
            }
            Progress::Failed => {
                place.count_refusal();
                AcquireError::Unavailable(place.error())
            }
            _ => AcquireError::Closed,
        }
    }

    /// Returns whether a request that was refused for this would have waited if the queue were not closed: then it has
    /// the answer of those that did wait.
    fn is_closed_for(&self, reason: RejectReason, place: &PlaceHandle) -> bool {
        !self.wait_timeout.is_zero()
            && place.is_queue_closed()
            && (may_not_wait(reason)
                || matches!(reason, RejectReason::Quarantine | RejectReason::UpstreamPause))
    }

    /// Returns why a request was refused, as its caller sees it.
    const fn reason(&self, reason: RejectReason, is_paused: bool) -> RejectReason {
        match reason {
            RejectReason::Limit | RejectReason::QueueFull | RejectReason::QueueTimeout
                if is_paused =>
            {
                RejectReason::Paused
            }
            _ if may_not_wait(reason) && self.is_out_of_time => RejectReason::QueueTimeout,
            _ => reason,
        }
    }
}

/// Returns whether this is why a request is refused that may not wait.
const fn may_not_wait(reason: RejectReason) -> bool {
    matches!(
        reason,
        RejectReason::Limit
            | RejectReason::TenantLimit
            | RejectReason::FurtherLimit(_)
            | RejectReason::Rate
            | RejectReason::Budget(_)
    )
}

impl Stage {
    const fn failed(error: AcquireError) -> Self {
        Self::Answered(Some(Err(error)))
    }
}

impl Semaphore {
    /// Takes a place for a request, with its claim if it has one.
    #[inline]
    fn take_place(
        &self,
        ask: Option<&Ask>,
        of: PlaceOf<'_>,
        limit: u32,
        policy: &Policy,
        began: Instant,
    ) -> Result<PlaceHandle, AcquireError> {
        let tasks = &self.inner.tasks;
        tasks.ensure_running().map_err(AcquireError::Unavailable)?;
        let claim = self.claim_of(ask, limit)?;
        PlaceHandle::take(tasks, PlaceOf { claim, ..of }, limit, policy, began)
    }

    /// Returns the claim of a request, if it has one.
    fn claim_of(&self, ask: Option<&Ask>, limit: u32) -> Result<Option<Claim>, AcquireError> {
        let Some(ask) = ask.filter(|ask| ask.is_fair()) else { return Ok(None) };
        let overrides = &self.node().overrides;
        let set = ask.tenant().map(|tenant| overrides.of_tenant(ask.name(), tenant));
        let set = set.unwrap_or_default();
        let cap_of =
            |of: &FurtherAsk| overrides.cap_of(ask.name(), &of.limit, &of.value).unwrap_or(of.cap);
        ask.claim(&self.tenants, set, cap_of).map(Some).map_err(|reason| {
            let name = ask.name().as_str().into();
            let rejected = Rejected::new(name, reason, limit).asked(ask.permits(), ask.cap(set));
            let further = match reason {
                RejectReason::FurtherLimit(index) => ask.further().get(usize::from(index)),
                _ => None,
            };
            let further = further.map(|of| (of.limit.as_str().into(), cap_of(of)));
            let too_high = |of: &&Estimate| of.units > of.budget.burst_amount();
            let budget = ask.estimates().iter().find(too_high).cloned();
            AcquireError::Rejected(Rejected {
                has_tenant: ask.tenant().is_some(),
                beside: Beside { rate: None, further, has_budgets: budget.is_some(), budget }
                    .boxed(),
                ..rejected
            })
        })
    }
}

impl Future for Acquire {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        // A permit that is kept, or counted in this process, needs no wait: other tasks have their turn all the same.
        let coop = ready!(coop::poll_proceed(cx));
        let this = &mut *self;
        let answer = loop {
            let now = Instant::now();
            let progress = match &mut this.stage {
                Stage::Asking(place) => place.progress(now, cx),
                Stage::Answered(answer) => {
                    let answer = answer.take();
                    break this.answered(answer, now);
                }
            };
            match progress {
                Progress::Joining => ready!(this.poll_wait(false, now, cx)),
                Progress::Waiting => ready!(this.poll_wait(true, now, cx)),
                Progress::Held => break this.granted(false, now),
                Progress::Admitted => break this.granted(true, now),
                Progress::Refused { .. } | Progress::Failed | Progress::Closed => {
                    this.stage = Stage::failed(this.error_of(progress));
                }
            }
        };
        coop.made_progress();
        Poll::Ready(answer)
    }
}
