//! A request's handle on its place.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::ask::{Estimate, FurtherAsk};
use crate::error::{AcquireError, BackendError, RejectReason};
use crate::metrics::requests::{Hold, Meter};
use crate::name::Name;
use crate::node::Node;
use crate::node::overrides::pauses::Length;
use crate::node::sessions::Remembered;
use crate::node::shared_session::{SessionState, SharedSession};
use crate::policy::Policy;
use crate::protocol::session::{AcquireOptions, FurtherIn, PLACES_MAX, Progress};
use crate::protocol::{Claim, PauseCause, PlaceId};
use crate::tasks::Tasks;

/// How long permits are passed on after a reply that no other process waits.
const REUSE_MS: u32 = 50;

/// A handle on a place in a session. The place is left when the last handle is dropped.
#[derive(Debug)]
pub(super) struct PlaceHandle {
    tasks: Arc<Tasks>,
    shared: Arc<SharedSession>,
    /// Narrow, as the cost is, because a handle is moved often.
    index: u32,
    /// The number of permits that it takes.
    cost: u8,
    /// The longest pause that its request can ask for, in ms.
    max_pause_ms: u32,
    /// The limit finds itself.
    is_adaptive: bool,
    /// What its request is estimated to use; `None`: of nothing.
    estimates: Option<Arc<Vec<Estimate>>>,
    /// The number of this handle as a listener for a loss.
    listener: u32,
    hold: Hold,
}

/// The semaphore and the tenant of a place.
#[derive(Clone, Copy)]
pub(super) struct PlaceOf<'a> {
    pub(super) name: &'a Name,
    pub(super) remembered: Option<&'a Remembered>,
    pub(super) tenant: Option<&'a Name>,
    pub(super) claim: Option<Claim>,
    pub(super) further: &'a [FurtherAsk],
    pub(super) estimates: &'a [Estimate],
    /// The meter that counts a loss of the permit.
    pub(super) meter: &'a Meter,
}

impl<'a> PlaceOf<'a> {
    /// A place without a tenant.
    #[cfg(all(test, shuttle))]
    pub(super) const fn plain(name: &'a Name, meter: &'a Meter) -> Self {
        Self {
            name,
            remembered: None,
            tenant: None,
            claim: None,
            further: &[],
            estimates: &[],
            meter,
        }
    }
}

impl PlaceOf<'_> {
    /// Notes the names of its tenant and its further limits, and its budgets. Returns the name that already has the number of its tenant, if
    /// it is another one.
    fn note_names(&self, state: &mut SessionState) -> Option<Arc<str>> {
        let claim = self.claim?;
        for (limit, asked) in claim.further().iter().zip(self.further) {
            state.limits.note(limit.number(), &asked.limit, &asked.value);
        }
        for (charge, estimate) in claim.charges().iter().zip(self.estimates) {
            state.limits.note_budget(charge.number(), &estimate.budget, self.tenant);
        }
        let SessionState { tenants, session, .. } = state;
        tenants.note(claim.tenant(), self.tenant?, |tenant| session.has_tenant(tenant))
    }
}

impl PlaceHandle {
    /// Takes a place in the session of `of`, and creates the session if there is none.
    ///
    /// # Errors
    ///
    /// If the node is closed, or the session has no index left.
    #[inline]
    pub(super) fn take(
        tasks: &Arc<Tasks>,
        of: PlaceOf<'_>,
        limit: u32,
        policy: &Policy,
        now: Instant,
    ) -> Result<Self, AcquireError> {
        let PlaceOf { name, remembered, tenant, claim, .. } = of;
        let mut options = options(policy, claim);
        let node = tasks.node();
        let now = node.clock.time(now);
        let (mut same_number, mut shown) = (None, None);
        let take = |state: &mut SessionState, time| {
            // Read under the lock of the session: if it is not closed yet, `give_back` finds the place.
            if node.is_closed() {
                return Err(AcquireError::Closed);
            }
            if node.is_queue_closed() {
                // Read under the same lock as well, for `stop_waiting`.
                options.max_queue = None;
            }
            if policy.adaptive.is_some() || state.session.adaptive().is_some() {
                shown = state.adapt_within(policy.adaptive, Some(of.meter.clone()), time);
            }
            let Some(index) = state.session.handle_request(limit, options, time) else {
                return Err(AcquireError::Unavailable(BackendError::call(format!(
                    "this process has {PLACES_MAX} requests in one semaphore; no more are allowed"
                ))));
            };
            state.begin(index, of.meter.clone());
            same_number = of.note_names(state);
            Ok(index)
        };
        let (shared, index) = match remembered {
            Some(remembered) => node.with_remembered(remembered, name, now, take),
            None => node.with_session(name.as_str(), now, take),
        };
        if let Some((meter, limit)) = shown {
            meter.on_adapted(limit, false);
        }
        if let (Some(other), Some(tenant)) = (same_number, tenant) {
            // Not under the lock: a subscriber may use a semaphore itself.
            tracing::debug!(
                target: "tower_semaphore",
                semaphore = name.as_str(),
                tenant = tenant.as_str(),
                other = &*other,
                "two tenants have the same number; they share their turns and their cap"
            );
        }
        let index = u32::try_from(index?).unwrap_or(u32::MAX);
        let (tasks, hold) = (Arc::clone(tasks), Hold::default());
        let cost = claim.map_or(1, |claim| u8::try_from(claim.cost()).unwrap_or(u8::MAX));
        let max_pause_ms = policy.max_pause_ms();
        let is_adaptive = policy.adaptive.is_some();
        let estimates = (!of.estimates.is_empty()).then(|| Arc::new(of.estimates.to_vec()));
        Ok(Self {
            tasks,
            shared,
            index,
            cost,
            max_pause_ms,
            is_adaptive,
            estimates,
            listener: 0,
            hold,
        })
    }

    /// Its request has its permit and goes on. Sets the measurement of the permit.
    #[inline]
    pub(super) fn granted(mut self, hold: Hold) -> Self {
        self.hold = hold;
        if self.is_adaptive {
            self.note_sent();
        }
        self
    }

    #[cold]
    fn note_sent(&self) {
        self.shared.lock().note_sent(self.index());
    }

    fn node(&self) -> &Node {
        self.tasks.node()
    }

    #[cfg(all(test, shuttle))]
    pub(super) const fn session(&self) -> &Arc<SharedSession> {
        &self.shared
    }

    /// Returns the progress of the request. Unless that is final, `cx` is woken when it changes.
    #[inline]
    pub(super) fn progress(&self, now: Instant, cx: &Context<'_>) -> Progress {
        let now = self.node().clock.time(now);
        let mut state = self.shared.lock();
        let progress = state.session.handle_poll(self.index(), now);
        if matches!(progress, Progress::Held) {
            // The usual case, in which the poll changed nothing.
            return progress;
        }
        let is_pending = matches!(progress, Progress::Joining | Progress::Waiting);
        let abandoned = is_pending.then(|| state.wait(self.index(), cx.waker()));
        // The poll may have requested a permit again that came too late, or let the policy answer.
        self.node().finish(&self.shared, state, now, None);
        drop(abandoned);
        progress
    }

    /// Returns the id by which the backend knows the place.
    pub(super) fn id(&self) -> Option<PlaceId> {
        self.shared.lock().session.place(self.index())
    }

    /// Returns why the backend did not answer.
    pub(super) fn error(&self) -> BackendError {
        self.shared.lock().error(self.index())
    }

    /// Returns whether requests are no longer queued.
    pub(super) fn is_queue_closed(&self) -> bool {
        self.node().is_queue_closed()
    }

    pub(super) fn count_refusal(&self) {
        self.node().counts.tallies.on_refused(self.shared.name());
    }

    pub(super) fn wait_timed_out(&self, now: Instant) {
        let (now, index) = (self.node().clock.time(now), self.index());
        self.node().act(&self.shared, now, |session, now| session.handle_wait_timeout(index, now));
    }

    /// Notes that the answer timeout has passed while the server answers other calls: the request was only delayed.
    pub(super) fn answer_timed_out(&self, now: Instant) {
        let (now, index) = (self.node().clock.time(now), self.index());
        self.node()
            .act(&self.shared, now, |session, now| session.handle_answer_timeout(index, now));
    }

    /// Returns whether the server has answered anything after `then`.
    pub(super) fn server_answers_since(&self, then: Instant) -> bool {
        let server = Arc::clone(&self.shared.lock().server);
        server.answers_since(then)
    }

    pub(super) fn response_timeout(&self) -> Duration {
        self.node().backend().response_timeout()
    }

    pub(super) fn name(&self) -> &Arc<str> {
        self.shared.name()
    }

    pub(super) const fn cost(&self) -> u32 {
        self.cost as u32
    }

    const fn index(&self) -> usize {
        self.index as usize
    }

    pub(super) fn is_lost(&self) -> bool {
        let now = self.node().now();
        self.shared.lock().session.is_lost(self.index(), now)
    }

    /// Has `waker` woken when the permit is lost, instead of this handle's previous one. Returns `false` if it is known
    /// to be lost already.
    pub(super) fn on_lost(&self, waker: &Waker) -> bool {
        self.wait_for_loss(self.listener, waker)
    }

    /// Like [`on_lost`](Self::on_lost), for a listener that [`listen`](Self::listen) added.
    pub(super) fn wait_for_loss(&self, listener: u32, waker: &Waker) -> bool {
        let mut state = self.shared.lock();
        // Without reading the clock: the watchdog does, and wakes the listener.
        if state.session.is_known_lost(self.index()) {
            return false;
        }
        let abandoned = state.wait_for_loss(self.index(), listener, waker);
        drop(state);
        drop(abandoned);
        true
    }

    /// Lets the current runtime take over the renewals, should the one that makes them be shut down.
    pub(super) fn ensure_renewed(&self) {
        // If there is no runtime here, nothing changes.
        let _ = self.tasks.ensure_running();
    }

    /// Adds a listener for a loss, until [`unlisten`](Self::unlisten). Returns its number.
    pub(super) fn listen(&self) -> u32 {
        self.ensure_renewed();
        self.shared.lock().add_listener(self.index())
    }

    pub(super) fn unlisten(&self, listener: u32) {
        let abandoned = self.shared.lock().remove_listener(self.index(), listener);
        drop(abandoned);
    }

    /// Releases the permit, even if there are clones. Returns whether there is an acknowledgement to wait for.
    pub(super) fn release(&self) -> bool {
        let (now, index) = (Instant::now(), self.index());
        let at = self.node().clock.time_unless_suspended(now);
        let (ended, awaited) = self.node().act(&self.shared, at, |session, now| {
            let held = self.hold.is_measured() && session.is_held(index);
            let awaited = session.handle_release(index, now);
            (held && !session.is_held(index), awaited)
        });
        if ended {
            self.hold.end(now);
        }
        awaited
    }

    /// Has the permit linger once the last handle is gone.
    pub(super) fn break_off(&self) {
        self.shared.lock().session.handle_break_off(self.index());
    }

    /// Notes an event further in, by which it is decided whether the permit lingers.
    pub(super) fn further_in(&self, event: FurtherIn) {
        self.shared.lock().session.handle_further_in(self.index(), event);
    }

    /// Pauses the semaphore, for as long as the policy allows at most.
    pub(super) fn pause(&self, duration: Duration, cause: PauseCause) {
        let most = Duration::from_millis(self.max_pause_ms.into());
        let length = Length { pause: duration.min(most), most };
        if !length.pause.is_zero() {
            self.node().pause(self.shared.name(), length, cause);
        }
    }

    /// The upstream refused its request: asks for a lower limit, if the limit finds itself.
    pub(super) fn lower(&self) {
        if !self.is_adaptive {
            return;
        }
        let sent = self.shared.lock().sent(self.index());
        if let Some((range, sent)) = sent {
            self.node().lower(self.shared.name(), range, sent);
        }
    }

    /// Returns name and cap of the further limit for which a request with this claim was refused. `full`: the index of the
    /// one that was full when it began to wait.
    #[cold]
    pub(super) fn further_limit(
        &self,
        reason: RejectReason,
        full: Option<u8>,
        claim: Option<Claim>,
    ) -> Option<(Arc<str>, u32)> {
        let claim = claim?;
        let mut further = claim.further().iter();
        let limit = match reason {
            RejectReason::FurtherLimit(index) => further.nth(index.into()),
            RejectReason::QueueTimeout => further.nth(full?.into()),
            RejectReason::CostTooHigh => further.find(|limit| limit.cap() < claim.cost()),
            _ => None,
        }?;
        let state = self.shared.lock();
        let (name, _) = state.limits.of(limit.number())?;
        Some((name.as_str().into(), limit.cap()))
    }

    /// Returns the budget that kept the request back, and what it was estimated to use of it, as far as is known.
    #[cold]
    pub(super) fn budget_of(&self, reason: RejectReason) -> Option<Estimate> {
        let estimates = self.estimates.as_ref()?;
        match reason {
            RejectReason::Budget(index) => estimates.get(usize::from(index)),
            RejectReason::QueueTimeout | RejectReason::QueueFull if estimates.len() == 1 => {
                estimates.first()
            }
            _ => None,
        }
        .cloned()
    }

    /// Returns whether the request takes of a budget.
    pub(super) const fn has_budgets(&self) -> bool {
        self.estimates.is_some()
    }

    /// Returns the index of the budget with this name.
    fn budget(&self, name: &str) -> Option<(usize, &Estimate)> {
        let estimates = self.estimates.as_ref()?;
        estimates.iter().enumerate().find(|(_, of)| of.budget.name() == name)
    }

    /// Notes that the request used nothing of its budgets.
    pub(super) fn unused(&self) {
        for index in 0..self.estimates.as_ref().map_or(0, |estimates| estimates.len()) {
            self.shared.lock().session.handle_used(self.index(), index, 0);
        }
    }

    /// Notes what the request used of the budget with this name. Returns whether that counts.
    pub(super) fn settle(&self, name: &str, used: u64) -> bool {
        let Some((index, of)) = self.budget(name) else { return false };
        let used = of.budget.time_of(used);
        self.shared.lock().session.handle_used(self.index(), index, used)
    }

    /// Notes how much is left of the budget with this name, by its provider. Returns whether that counts.
    pub(super) fn left(&self, name: &str, left: u64) -> bool {
        let Some((index, of)) = self.budget(name) else { return false };
        let (ahead, now) = (of.budget.time_to_full(left), self.node().now());
        self.shared.lock().session.handle_ahead(self.index(), index, ahead, now)
    }

    /// Returns whether there are other handles on the place.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.lock().is_shared(self.index())
    }

    pub(super) fn poll_released(&self, cx: &Context<'_>) -> Poll<Result<(), BackendError>> {
        let mut state = self.shared.lock();
        match state.session.release_answer(self.index()) {
            Some(true) => Poll::Ready(Ok(())),
            Some(false) => Poll::Ready(Err(state.error(self.index()))),
            None => {
                let abandoned = state.wait(self.index(), cx.waker());
                drop(state);
                drop(abandoned);
                Poll::Pending
            }
        }
    }
}

/// Returns the options of a place under this policy.
fn options(policy: &Policy, claim: Option<Claim>) -> AcquireOptions {
    AcquireOptions {
        lease: policy.lease,
        max_queue: (!policy.wait_timeout.is_zero()).then_some(policy.max_queue),
        max_waiting: policy.max_waiting(),
        on_unavailable: policy.on_unavailable,
        headroom: policy.headroom,
        rate: policy.rate,
        claim,
        linger_ms: policy.linger_ms(),
        reuse_ms: if policy.reuse { REUSE_MS } else { 0 },
        patience_ms: policy.patience_ms(),
    }
}

impl Clone for PlaceHandle {
    fn clone(&self) -> Self {
        let listener = self.shared.lock().share(self.index());
        let (tasks, shared) = (Arc::clone(&self.tasks), Arc::clone(&self.shared));
        let Self { index, cost, max_pause_ms, is_adaptive, .. } = *self;
        let (estimates, hold) = (self.estimates.clone(), self.hold.clone());
        Self { tasks, shared, index, cost, max_pause_ms, is_adaptive, estimates, listener, hold }
    }
}

impl Drop for PlaceHandle {
    fn drop(&mut self) {
        let index = self.index();
        let mut state = self.shared.lock();
        let (is_last, abandoned) = state.end(index, self.listener);
        if !is_last {
            drop(state);
            return drop(abandoned);
        }
        let now = Instant::now();
        let held = self.hold.is_measured() && state.session.is_held(index);
        let at = self.node().clock.time_unless_suspended(now);
        state.session.handle_leave(index, at);
        state.trim();
        self.node().finish(&self.shared, state, at, None);
        drop(abandoned);
        if held {
            self.hold.end(now);
        }
    }
}
