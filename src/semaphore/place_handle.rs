//! The handle of a request on its place.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{AcquireError, BackendError};
use crate::metrics::requests::{Hold, Meter};
use crate::name::Name;
use crate::node::Node;
use crate::node::sessions::Remembered;
use crate::node::shared_session::{SessionState, SharedSession};
use crate::policy::Policy;
use crate::protocol::session::{AcquireOptions, FurtherIn, PLACES_MAX, Progress};
use crate::protocol::{Claim, PlaceId};
use crate::tasks::Tasks;

/// For how long permits are passed on after a reply said that no other process waits.
const REUSE_MS: u32 = 50;

/// A handle on a place in a session. The place is left when the last handle is dropped.
#[derive(Debug)]
pub(super) struct PlaceHandle {
    tasks: Arc<Tasks>,
    shared: Arc<SharedSession>,
    index: usize,
    /// How many permits it takes.
    cost: u32,
    /// The number by which this handle waits for a loss.
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
    /// Counts the permit if it is lost.
    pub(super) meter: &'a Meter,
}

impl<'a> PlaceOf<'a> {
    /// Of no tenant.
    #[cfg(all(test, shuttle))]
    pub(super) const fn plain(name: &'a Name, meter: &'a Meter) -> Self {
        Self { name, remembered: None, tenant: None, claim: None, meter }
    }
}

impl PlaceHandle {
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
        let mut same_number = None;
        let take = |state: &mut SessionState, time| {
            // Read under the lock of the session: if it is not closed yet, `give_back` finds the place.
            if node.is_closed() {
                return Err(AcquireError::Closed);
            }
            if node.is_queue_closed() {
                // The same holds for `stop_waiting`.
                options.max_queue = None;
            }
            let Some(index) = state.session.handle_request(limit, options, time) else {
                return Err(AcquireError::Unavailable(BackendError::call(format!(
                    "this process has {PLACES_MAX} requests in one semaphore; no more are allowed"
                ))));
            };
            state.begin(index, of.meter.clone());
            if let (Some(claim), Some(tenant)) = (claim, tenant) {
                let SessionState { tenants, session, .. } = state;
                same_number = tenants.note(claim.tenant(), tenant, |t| session.has_tenant(t));
            }
            Ok(index)
        };
        let (shared, index) = match remembered {
            Some(remembered) => node.with_remembered(remembered, name, now, take),
            None => node.with_session(name.as_str(), now, take),
        };
        if let (Some(other), Some(tenant)) = (same_number, tenant) {
            // Not under the lock.
            tracing::debug!(
                target: "tower_semaphore",
                semaphore = name.as_str(),
                tenant = tenant.as_str(),
                other = &*other,
                "two tenants have the same number; they share their turns and their cap"
            );
        }
        let index = index?;
        let (tasks, hold) = (Arc::clone(tasks), Hold::default());
        let cost = claim.map_or(1, Claim::cost);
        Ok(Self { tasks, shared, index, cost, listener: 0, hold })
    }

    /// Measures the permit, which was granted, from here on.
    pub(super) fn measured(mut self, hold: Hold) -> Self {
        self.hold = hold;
        self
    }

    fn node(&self) -> &Node {
        self.tasks.node()
    }

    #[cfg(all(test, shuttle))]
    pub(super) const fn session(&self) -> &Arc<SharedSession> {
        &self.shared
    }

    /// Returns the progress of the request. Unless it is done, `cx` is woken when it changes.
    pub(super) fn progress(&self, now: Instant, cx: &Context<'_>) -> Progress {
        let now = self.node().clock.time(now);
        let mut state = self.shared.lock();
        let progress = state.session.handle_poll(self.index, now);
        if matches!(progress, Progress::Held) {
            // The usual case, in which the poll changed nothing.
            return progress;
        }
        let is_pending = matches!(progress, Progress::Joining | Progress::Waiting);
        let abandoned = is_pending.then(|| state.wait(self.index, cx.waker()));
        // A permit that came too late is asked for again, or the policy answered.
        self.node().finish(&self.shared, state, now, None);
        drop(abandoned);
        progress
    }

    /// Returns the id of the place, as the backend knows it.
    pub(super) fn id(&self) -> Option<PlaceId> {
        self.shared.lock().session.place(self.index)
    }

    /// Returns why the backend did not answer.
    pub(super) fn error(&self) -> BackendError {
        self.shared.lock().error(self.index)
    }

    /// Whether no request may wait any more.
    pub(super) fn is_queue_closed(&self) -> bool {
        self.node().is_queue_closed()
    }

    pub(super) fn count_refusal(&self) {
        self.node().counts.tallies.refused(self.shared.name());
    }

    pub(super) fn wait_timed_out(&self, now: Instant) {
        let (now, index) = (self.node().clock.time(now), self.index);
        self.node().act(&self.shared, now, |session, now| session.handle_wait_timeout(index, now));
    }

    /// As [`wait_timed_out`](Self::wait_timed_out), where the server answers other calls.
    pub(super) fn answer_timed_out(&self, now: Instant) {
        let (now, index) = (self.node().clock.time(now), self.index);
        self.node()
            .act(&self.shared, now, |session, now| session.handle_answer_timeout(index, now));
    }

    /// Whether the server has answered something since then.
    pub(super) fn server_answers_since(&self, then: Instant) -> bool {
        let server = Arc::clone(&self.shared.lock().server);
        server.answers_since(then)
    }

    pub(super) fn response_timeout(&self) -> Duration {
        self.node().backend().response_timeout()
    }

    pub(super) fn name(&self) -> &str {
        self.shared.name()
    }

    pub(super) const fn cost(&self) -> u32 {
        self.cost
    }

    pub(super) fn is_lost(&self) -> bool {
        let now = self.node().now();
        self.shared.lock().session.is_lost(self.index, now)
    }

    /// Wakes `waker` when the permit is lost, in place of the last one of this handle. Returns `false` if it is lost
    /// already.
    pub(super) fn on_lost(&self, waker: &Waker) -> bool {
        self.wait_for_loss(self.listener, waker)
    }

    /// As [`on_lost`](Self::on_lost), for a listener of its own: see [`listen`](Self::listen).
    pub(super) fn wait_for_loss(&self, listener: u32, waker: &Waker) -> bool {
        let mut state = self.shared.lock();
        // Does not look at the clock: the watchdog does.
        if state.session.was_lost(self.index) {
            return false;
        }
        let abandoned = state.wait_for_loss(self.index, listener, waker);
        drop(state);
        drop(abandoned);
        true
    }

    /// Lets the current runtime take over the renewals, in case that of the request is shut down.
    pub(super) fn ensure_looked_after(&self) {
        // Without a runtime here, nothing changes.
        let _ = self.tasks.ensure_running();
    }

    /// Returns the number of a new listener for a loss, until [`unlisten`](Self::unlisten).
    pub(super) fn listen(&self) -> u32 {
        self.ensure_looked_after();
        self.shared.lock().add_listener(self.index)
    }

    pub(super) fn unlisten(&self, listener: u32) {
        let abandoned = self.shared.lock().remove_listener(self.index, listener);
        drop(abandoned);
    }

    /// Releases the permit, whatever clones there are. Returns whether there is an acknowledgement to wait for.
    pub(super) fn release(&self) -> bool {
        let (now, index) = (Instant::now(), self.index);
        let at = self.node().clock.time_unless_suspended(now);
        let (ended, awaited) = self.node().act(&self.shared, at, |session, now| {
            let held = self.hold.is_measured() && session.is_held(index);
            let awaited = session.handle_release(index, now);
            (held && !session.is_held(index), awaited)
        });
        if ended {
            self.hold.ended(now);
        }
        awaited
    }

    /// Lets the permit linger once the last handle is gone.
    pub(super) fn break_off(&self) {
        self.shared.lock().session.handle_break_off(self.index);
    }

    /// Notes what became of its request further in, for whether it lingers.
    pub(super) fn further_in(&self, event: FurtherIn) {
        self.shared.lock().session.handle_further_in(self.index, event);
    }

    /// Returns whether there are other handles on the place.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.lock().is_shared(self.index)
    }

    pub(super) fn poll_released(&self, cx: &Context<'_>) -> Poll<Result<(), BackendError>> {
        let mut state = self.shared.lock();
        match state.session.released(self.index) {
            Some(true) => Poll::Ready(Ok(())),
            Some(false) => Poll::Ready(Err(state.error(self.index))),
            None => {
                let abandoned = state.wait(self.index, cx.waker());
                drop(state);
                drop(abandoned);
                Poll::Pending
            }
        }
    }
}

/// Returns what a place is asked for with, under this policy.
fn options(policy: &Policy, claim: Option<Claim>) -> AcquireOptions {
    AcquireOptions {
        lease: policy.lease,
        max_queue: (!policy.wait_timeout.is_zero()).then_some(policy.max_queue),
        max_waiting: policy.max_waiting(),
        on_unavailable: policy.on_unavailable,
        headroom: policy.headroom,
        claim,
        linger_ms: policy.linger_ms(),
        reuse_ms: if policy.reuse { REUSE_MS } else { 0 },
    }
}

impl Clone for PlaceHandle {
    fn clone(&self) -> Self {
        let listener = self.shared.lock().share(self.index);
        let (tasks, shared) = (Arc::clone(&self.tasks), Arc::clone(&self.shared));
        let Self { index, cost, .. } = *self;
        Self { tasks, shared, index, cost, listener, hold: self.hold.clone() }
    }
}

impl Drop for PlaceHandle {
    fn drop(&mut self) {
        let index = self.index;
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
            self.hold.ended(now);
        }
    }
}
