//! Requests: they come, wait, are answered and leave.

use std::time::Duration;

use super::local::LocalQueue;
use super::options::{AcquireOptions, OnUnavailable};
use super::place::{Linger, Place, Reported, State};
use super::places::PLACES_MAX;
use super::releases::Release;
use super::{Event, IDLE, Progress, Session};
use crate::charge::Charge;
use crate::id::PlaceId;
use crate::ledger::Usage;
use crate::reject::RejectReason;
use crate::time::Time;

/// What happens to a request in the layers further in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FurtherIn {
    /// One of them rejected an attempt.
    Rejected,
    /// One of them passed an attempt on, or something answered it.
    Passed,
    /// It goes on, whatever happened to its attempts: another one may go where there are no layers.
    GoesOn,
}

impl Session {
    /// Takes a new request. Returns the index of its place, which is valid until
    /// [`handle_leave`](Self::handle_leave); `None` if the process has [`PLACES_MAX`] places in the semaphore.
    pub fn handle_request(
        &mut self,
        limit: u32,
        mut options: AcquireOptions,
        now: Time,
    ) -> Option<usize> {
        if self.places.len() >= PLACES_MAX {
            return None;
        }
        options.fit_to_rate();
        self.limits.handle_request(limit, options.headroom, options.rate);
        if let Some(index) = self.reuse.take(limit, &options, now, &mut self.places, &self.limits) {
            return Some(index);
        }
        let is_first = self.places.is_empty() && !self.releases.is_any();
        self.limits.handle_lease(options.lease, is_first);
        let rate = self.limits.rate_for(options.rate);
        let bound = options.bound(limit, rate, self.limits.longest_window());
        let index = self.places.insert(limit, bound, options, now);
        self.counts.add_joining();
        self.reuse.follow(index, true, &self.places);
        let n = self.places.get(index).map_or(0, |place| place.n);
        self.want(now + IDLE);
        if self.limits.is_draining() {
            self.refuse(index, RejectReason::Draining, self.seen);
        } else if options.claim.is_some()
            && self.places.get(index).is_some_and(|place| self.limits.never_fit(place))
        {
            self.refuse(index, RejectReason::CostTooHigh, self.seen);
        } else if self.is_outage() {
            self.join_in_outage(index, now);
        } else {
            self.joins.push(n);
        }
        Some(index)
    }

    /// Returns the progress of the request at `index`. If it is not done, an [`Event::Progress`] says when to call this
    /// again.
    pub fn handle_poll(&mut self, index: usize, now: Time) -> Progress {
        let is_outage = self.is_outage();
        let Some(place) = self.places.get_mut(index) else { return Progress::Closed };
        match place.state {
            State::Joining { .. } => {
                let local = matches!(place.options.on_unavailable, OnUnavailable::Local(_));
                if place.queued || (is_outage && local) {
                    Progress::Waiting
                } else {
                    Progress::Joining
                }
            }
            State::Waiting { .. } => Progress::Waiting,
            State::Held if now < place.deadline() || place.taken => {
                place.taken = true;
                Progress::Held
            }
            // Granted, but the request comes for it too late: ask first.
            State::Held => {
                self.wait_again(index, now);
                self.handle_poll(index, now)
            }
            State::Admitted { .. } => {
                place.taken = true;
                Progress::Admitted
            }
            State::Refused { .. } => self.refused(index, now),
            State::Failed => Progress::Failed,
            State::Closed | State::Lost | State::Releasing | State::Released { .. } => {
                Progress::Closed
            }
        }
    }

    /// What a refused request is told.
    fn refused(&self, index: usize, now: Time) -> Progress {
        let Some(place) = self.places.get(index) else { return Progress::Closed };
        let State::Refused { reason, is_counted, is_local, opens_at, in_use, waiting, .. } =
            place.state
        else {
            return Progress::Closed;
        };
        let usage = Usage { in_use: in_use.into(), waiting: waiting.into() };
        let usage = is_counted.then_some(usage);
        let limit = self.limits.in_place();
        let by_itself = matches!(reason, RejectReason::QueueFull | RejectReason::QueueTimeout)
            && place.options.claim.is_some_and(|c| self.counts.tenants().exceeds_each(c));
        let is_tenant_full = reason == RejectReason::TenantLimit || by_itself;
        let is_blamed = limit != Some(0) && !is_tenant_full && reason.is_of_limit();
        let paused = self.limits.paused_until().filter(|_| is_blamed);
        let reason = paused.map_or(reason, |_| RejectReason::UpstreamPause);
        let opens_at = match is_local {
            true => self.kept_by_rate_until(place, now),
            false if opens_at > Time::ZERO => Some(opens_at),
            // What is known can be the time of another tenant.
            false if place.claim().charges().iter().any(Charge::is_tenants) => None,
            false => self.probe.opens_at(),
        };
        let end = match reason {
            // Nothing is granted before both are over.
            RejectReason::UpstreamPause | RejectReason::Quarantine => {
                self.quarantined_until().max(paused)
            }
            RejectReason::Rate | RejectReason::Budget(_) => opens_at,
            // A permit was free for the next in turn, and only its rate or its budgets kept it back.
            RejectReason::QueueTimeout | RejectReason::QueueFull if !is_tenant_full => {
                opens_at.filter(|_| place.options.is_timed())
            }
            _ => None,
        };
        let ends_in = end.map(|end| end.since(now));
        let rate = self.limits.rate_for(place.options.rate);
        let (ahead, expected_wait) = self.tell(index, reason, now);
        let rate_wait = self.rate_wait(index, reason);
        let full = place.full.filter(|_| reason == RejectReason::QueueTimeout);
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
        }
    }

    /// Records that the request at `index` was broken off: its permit lingers once the request leaves, because the
    /// other side may notice later (rule 8).
    pub fn handle_break_off(&mut self, index: usize) {
        let place = self.places.get_mut(index).filter(|place| place.may_linger());
        let goes_on = |place: &&mut Place| !matches!(place.linger, Linger::Spared | Linger::Lost);
        if let Some(place) = place.filter(goes_on) {
            place.linger = Linger::Due;
        }
    }

    /// Records what happened further in to the request at `index`. If a rejection there ends the request and no attempt was
    /// passed on, its permit does not linger, and it has used nothing of its budgets, unless it said so.
    pub fn handle_further_in(&mut self, index: usize, event: FurtherIn) {
        let Some(place) = self.places.get_mut(index).filter(|place| place.follows_further_in())
        else {
            return;
        };
        place.linger = match (place.linger, event) {
            (Linger::No, FurtherIn::Rejected) => Linger::Spared,
            (Linger::No | Linger::Spared, FurtherIn::Passed) => Linger::Reached,
            (Linger::Spared, FurtherIn::GoesOn) => Linger::No,
            (linger, _) => linger,
        };
    }

    /// Notes that the request at `index` has used so much of the budget of its charge of this index, µs: once its place
    /// leaves, that replaces the charge. The last report counts. Returns whether it does: a request without a permit has used
    /// nothing.
    pub fn handle_used(&mut self, index: usize, charge: usize, used: u64) -> bool {
        self.report(index, |reported| reported.use_up(charge, used))
    }

    /// Notes what a response said to the request at `index`: that the budget of its charge of this index is full again in
    /// this time (µs) at the earliest. The last report counts, once the place leaves. Returns whether it does.
    pub fn handle_ahead(&mut self, index: usize, charge: usize, ahead: u64, now: Time) -> bool {
        let full_at = now + Duration::from_micros(ahead.min(Charge::BURST_MAX));
        self.report(index, |reported| reported.fill_at(charge, full_at))
    }

    fn report(&mut self, index: usize, note: impl FnOnce(&mut Reported)) -> bool {
        let place = self.places.get_mut(index).filter(|place| place.is_in_flight());
        let Some(place) = place.filter(|place| place.claim().has_charges()) else { return false };
        let charges = place.claim().charges();
        note(place.used.get_or_insert_with(|| Box::new(Reported::nothing(charges))));
        true
    }

    /// Ends the request at `index`, whatever it had. Its permit is released, unless it lingers or is passed on. The index
    /// may be given to another request.
    pub fn handle_leave(&mut self, index: usize, now: Time) {
        let due = |place: &&mut Place| {
            let is_broken_off = matches!(place.linger, Linger::Due | Linger::Lost);
            // A holder can see the deadline pass before `handle_timeout` does.
            (is_broken_off && place.is_in_flight()) || place.is_lost_in_time(now)
        };
        if let Some(place) = self.places.get_mut(index).filter(due) {
            let until = place.begin_to_linger(now);
            self.want(until);
        } else if self.reuse.may_pass_on(index, now, &self.places, &self.limits) {
            self.pass_on(index, now);
        } else {
            self.take_out(index, now);
        }
    }

    /// Removes a place that no request has.
    #[inline]
    pub(super) fn take_out(&mut self, index: usize, now: Time) {
        self.reuse.follow(index, false, &self.places);
        self.release_replaced(index);
        let Some(place) = self.places.remove(index) else { return };
        self.reuse.forget(&place);
        if let Some(queue) = self.outage.as_mut().filter(|_| place.is_in_flight()) {
            queue.count(place.options.claim, false);
        }
        self.counts.remove(index, (place.limit, place.options.claim), place.state);
        if place.is_in_flight()
            && let Some(used) = place.used_at(now)
        {
            self.settle_own(&place, used, now);
        }
        if place.is_there() {
            self.releases.push(Release::of(self.places.node(), &place, now));
            self.movement.handle_leave(&place);
            self.audit.handle_left(now);
        } else if matches!(place.state, State::Joining { .. }) {
            self.joins.forget(place.n, &self.places);
        } else if matches!(place.state, State::Releasing | State::Released { .. } | State::Lost) {
            self.audit.handle_left(now);
        }
        if let Some(queue) = self.outage.as_mut().filter(|_| place.waits_locally()) {
            queue.leave(index, &place);
        }
        self.admit_local(now);
        self.want(now + IDLE);
        self.want_end(now);
    }

    /// Releases the permit at `index` for a caller that waits for the acknowledgement. Returns whether there will be one.
    pub fn handle_release(&mut self, index: usize, now: Time) -> bool {
        let Some(place) = self.places.get(index).filter(|place| place.is_in_flight()) else {
            return false;
        };
        let is_there = place.is_there();
        if is_there {
            self.releases.push(Release::of(self.places.node(), place, now));
            self.set(index, State::Releasing);
        } else {
            self.set(index, State::Released { acknowledged: true });
        }
        self.admit_local(now);
        is_there
    }

    /// Whether the release at `index` was acknowledged; `None`: it is not answered yet.
    #[must_use]
    pub fn release_answer(&self, index: usize) -> Option<bool> {
        let Some(place) = self.places.get(index) else { return Some(true) };
        match place.state {
            State::Releasing => None,
            State::Released { acknowledged } => Some(acknowledged),
            _ => Some(true),
        }
    }

    /// The id of the place at `index`. It changes where the old one must not be used again.
    #[must_use]
    pub fn place(&self, index: usize) -> Option<PlaceId> {
        self.places.id(index)
    }

    /// Whether the request has its permit, lost or not.
    #[must_use]
    pub fn is_held(&self, index: usize) -> bool {
        let place = self.places.get(index);
        place.is_some_and(|place| place.is_in_flight() || matches!(place.state, State::Lost))
    }

    /// Whether the permit is lost.
    #[must_use]
    pub fn is_lost(&self, index: usize, now: Time) -> bool {
        self.places.get(index).is_some_and(|place| match place.state {
            State::Lost => true,
            State::Held => place.linger == Linger::Lost || now >= place.deadline(),
            _ => false,
        })
    }

    /// Whether the permit is known to be lost. Unlike [`is_lost`](Self::is_lost), this does not look at the time.
    #[must_use]
    pub fn is_known_lost(&self, index: usize) -> bool {
        let is_lost =
            |place: &Place| matches!(place.state, State::Lost) || place.linger == Linger::Lost;
        self.places.get(index).is_some_and(is_lost)
    }

    /// Ends the wait of a request, for its first answer or for a permit. It has its final answer after this (rule 7).
    pub fn handle_wait_timeout(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        let local = matches!(place.options.on_unavailable, OnUnavailable::Local(_));
        match place.state {
            State::Joining { .. } | State::Waiting { .. } if self.is_outage() && local => {
                self.refuse_by_policy(index, RejectReason::QueueTimeout, now);
            }
            State::Waiting { .. } if !self.is_outage() => self.wait_in_vain(index, now),
            State::Joining { .. } if !self.is_outage() && place.queued => {
                self.wait_in_vain(index, now)
            }
            State::Joining { .. } | State::Waiting { .. } => self.fall_back(index, now),
            _ => {}
        }
        self.admit_local(now);
    }

    /// Like [`handle_wait_timeout`](Self::handle_wait_timeout), where the backend answers and has not come to this
    /// request yet: its call is unsent, or behind other calls of this process. That is no outage, so no policy admits
    /// it.
    pub fn handle_answer_timeout(&mut self, index: usize, now: Time) {
        let place = self.places.get(index).filter(|place| place.is_joining() && !place.queued);
        let Some(place) = place.filter(|_| !self.is_outage()) else {
            return self.handle_wait_timeout(index, now);
        };
        if place.options.max_queue.is_some() {
            self.leave_server(index, now);
            self.refuse(index, RejectReason::QueueTimeout, self.seen);
        } else {
            self.fail(index, now);
        }
    }

    /// Releases every place. Holders lose their permits, and requests are told that the semaphore is closed.
    pub fn handle_close(&mut self, now: Time) {
        self.outage.iter_mut().for_each(|queue| *queue = LocalQueue::new());
        for index in self.indexes() {
            let Some(place) = self.places.get(index) else { continue };
            if place.is_for_the_next() {
                self.take_out(index, now);
            } else if place.may_linger() {
                // It is not released: its lease ends it, as if the process had died.
                let is_taken = place.lingers_until().is_none();
                self.set(index, if is_taken { State::Lost } else { State::Closed });
                if is_taken {
                    self.tell_lost(index);
                } else {
                    self.take_out(index, now);
                }
            } else if place.is_in_flight() && place.taken {
                self.lose(index, now);
            } else if place.is_live() || place.is_joining() {
                self.leave_server(index, now);
                self.set(index, State::Closed);
                self.events.push(Event::Progress(index));
            }
        }
    }

    /// Tells the requests that have no permit that the semaphore is closed.
    pub fn handle_stop_waiting(&mut self, now: Time) {
        for index in self.indexes() {
            let Some(place) = self.places.get_mut(index).filter(|place| !place.taken) else {
                continue;
            };
            if place.is_joining() || place.is_waiting() {
                self.leave_server(index, now);
                self.set(index, State::Closed);
                self.events.push(Event::Progress(index));
            } else {
                // A request that takes its permit too late may not wait again.
                place.options.max_queue = None;
            }
        }
    }

    /// Takes the place off the server. The caller must set a state that says so too.
    pub(super) fn leave_server(&mut self, index: usize, now: Time) {
        self.release_replaced(index);
        let Some(place) = self.places.get(index) else { return };
        let n = place.n;
        if place.is_there() {
            self.releases.push(Release::of(self.places.node(), place, now));
            self.movement.handle_leave(place);
            self.audit.handle_left(now);
        } else if place.is_joining() {
            self.joins.forget(n, &self.places);
        }
        if let Some(queue) = self.outage.as_mut().filter(|_| place.waits_locally()) {
            queue.leave(index, place);
        }
    }

    /// Refuses a request that has waited as long as it may for a permit of the server.
    fn wait_in_vain(&mut self, index: usize, now: Time) {
        self.leave_server(index, now);
        let reason = self.blame(index, RejectReason::QueueTimeout, self.seen, now);
        self.refuse(index, reason, self.seen);
    }

    pub(super) fn refuse(&mut self, index: usize, reason: RejectReason, usage: Option<Usage>) {
        self.set(index, State::refused(reason, usage, false));
        self.note_refusal(index);
        self.events.push(Event::Progress(index));
    }

    /// The rate that refused the request at `index` allows it at this time.
    pub(super) fn note_opening(&mut self, index: usize, at: Time) {
        if let Some(place) = self.places.get_mut(index)
            && let State::Refused { opens_at, .. } = &mut place.state
        {
            *opens_at = at;
        }
    }

    /// Lets a request wait again that did not take its permit in time; it asks first. A request that may not wait has
    /// had no answer in time.
    pub(super) fn wait_again(&mut self, index: usize, now: Time) {
        self.set(index, State::Waiting { ticket: None });
        self.places.get_mut(index).into_iter().for_each(|place| place.restoring = false);
        if self.places.get(index).is_some_and(|place| place.options.max_queue.is_none()) {
            self.fall_back(index, now);
        } else if self.is_outage() {
            self.meet_outage(index, now);
        } else {
            self.renewals.want();
        }
        self.admit_local(now);
    }

    pub(super) fn lose(&mut self, index: usize, now: Time) {
        if self.places.get(index).is_some_and(Place::has_left) {
            // There is no holder to tell.
            return self.take_out(index, now);
        }
        self.leave_server(index, now);
        self.set(index, State::Lost);
        self.tell_lost(index);
        self.admit_local(now);
    }

    /// Tells the holder that its permit is lost, unless it was told in time.
    fn tell_lost(&mut self, index: usize) {
        if self.places.get(index).is_some_and(|place| place.linger != Linger::Lost) {
            self.events.push(Event::Lost(index));
        }
    }

    /// Loses a permit while its lease still lasts for as long as it may linger. Its request is told; the place stays until
    /// the request has left, and lingers then like that of any request that is broken off.
    pub(super) fn lose_in_time(&mut self, index: usize) {
        self.tell_lost(index);
        if let Some(place) = self.places.get_mut(index) {
            place.linger = Linger::Lost;
            let over = place.deadline();
            self.renewals.want();
            self.want(over);
        }
    }
}
