//! An operator's overrides and revocations.

use std::time::Duration;

use super::place::{Place, Sent};
use super::{Session, State};
use crate::id::PlaceId;
use crate::overrides::Override;
use crate::rate::Rate;
use crate::reject::RejectReason;
use crate::time::Time;

impl Session {
    /// Takes new overrides. If there are more permits now, waiters ask for them at once: only their process knows how many
    /// its policy allows.
    pub fn handle_override(&mut self, overrides: Override, now: Time) {
        let rate = self.limits.rate_of_operator();
        let change = self.limits.handle_override(overrides);
        self.follow_limit(change, now);
        if overrides.rate != rate {
            self.handle_rate(now);
        }
        // A place that can never be served would hold up its line.
        for index in self.indexes() {
            let Some(place) = self.places.get(index) else { continue };
            if (place.is_joining() || place.is_waiting()) && self.limits.never_fit(place) {
                if place.has_left() {
                    self.take_out(index, now);
                    continue;
                }
                self.leave_server(index, now);
                self.refuse(index, RejectReason::CostTooHigh, self.seen);
            }
        }
        self.admit_local(now);
    }

    /// An operator set the cap or the weight of a tenant, for requests that come from now on.
    pub fn handle_tenant_override(&mut self, now: Time) {
        self.movement.handle_change(now);
    }

    /// Grants nothing before `until`, whatever else is set; `None` ends that. Requests in flight go on, and those that
    /// wait keep their turns.
    pub fn handle_pause(&mut self, until: Option<Time>, now: Time) {
        let was_paused = self.limits.paused_until().is_some();
        let change = self.limits.handle_pause(until.filter(|until| now < *until));
        self.follow_limit(change, now);
        if was_paused && self.limits.paused_until().is_none() {
            self.renewals.push_held_back(&mut self.places);
        }
        self.admit_local(now);
        self.want_end_of_pause();
    }

    /// Ends the pause once its time is over.
    pub(super) fn end_pause(&mut self, now: Time) {
        if self.limits.paused_until().is_some_and(|until| until <= now) {
            self.handle_pause(None, now);
        }
        self.want_end_of_pause();
    }

    fn want_end_of_pause(&mut self) {
        self.limits.paused_until().into_iter().for_each(|until| self.want(until));
    }

    /// The limit in force has changed. If there are more permits, waiters ask for them.
    pub(super) fn follow_limit(&mut self, (before, after): (u32, u32), now: Time) {
        if after > before {
            self.probe.handle_raise(self.counts.has_waiting());
        }
        if after != before {
            self.movement.handle_change(now);
        }
        self.reuse.handle_limit(before, after, now);
    }

    /// When the pause ends; `None` once [`handle_timeout`](Self::handle_timeout) has noticed that it is over.
    #[must_use]
    pub const fn paused_until(&self) -> Option<Time> {
        self.limits.paused_until()
    }

    /// The limit in force for the last request.
    #[must_use]
    pub fn limit_in_force(&self) -> u32 {
        self.limits.in_force()
    }

    /// The rate in force for requests like the last one, if that has one.
    #[must_use]
    pub fn rate_in_force(&self) -> Option<Rate> {
        self.limits.rate_in_force()
    }

    /// The rate of the last request, whatever operators set.
    #[must_use]
    pub const fn policy_rate(&self) -> Option<Rate> {
        self.limits.rate_of_policy()
    }

    /// The limit of the last request, whatever operators set; `None`: no request has come, because a hint made this
    /// session.
    #[must_use]
    pub fn policy_limit(&self) -> Option<u32> {
        Some(self.limits.of_policy()).filter(|limit| *limit > 0)
    }

    /// Places were removed by a process that does not know the limit: if something waits here, it asks for what that freed.
    pub fn handle_freed(&mut self) {
        self.probe.want(self.counts.has_waiting());
    }

    /// Takes a revocation. A permit is lost; a request that waits is refused. Other waiters ask for what that freed: only
    /// their process knows the limit.
    pub fn handle_revoked(&mut self, id: PlaceId, now: Time) {
        self.probe.want(self.counts.has_waiting());
        if id.node != self.places.node() {
            return;
        }
        let n = self.revocations.current(id.n);
        let index = self.places.index(n).or_else(|| self.reload.replacement_of(n, &self.places));
        let Some(index) = index else { return };
        let Some(place) = self.places.get(index) else { return };
        if place.has_left() {
            // There is no holder to tell.
            self.take_out(index, now);
        } else if place.is_in_flight() && place.taken {
            self.lose(index, now);
        } else if place.is_live() || place.is_joining() {
            self.leave_server(index, now);
            self.refuse(index, RejectReason::Revoked, self.seen);
            self.admit_local(now);
        }
    }

    /// A renewal found a place gone. Its proof is not sent before it is known that it was not revoked.
    pub(super) fn check_revocation(&mut self, n: u64, now: Time) {
        let Some(index) = self.places.index(n) else { return };
        let Some(place) = self.places.get(index).filter(|place| !place.restoring) else { return };
        let mut new = n;
        if place.is_waiting() {
            // It returns under a new id: what names the old one must not reach this stay.
            new = self.places.renumber(index);
            // A replica that is promoted may still have the old one.
            self.audit.handle_left(now);
        }
        self.places.find(new).into_iter().for_each(|place| place.restoring = true);
        self.revocations.push(n, new);
    }

    /// The number of the question which places were revoked, if it is to be asked; once for each question. After the
    /// answer, call [`handle_revocations_known`](Self::handle_revocations_known).
    pub const fn poll_revocation_check(&mut self) -> Option<u64> {
        self.revocations.poll()
    }

    /// Takes the answer to this question, after its revocations: the other places that were gone when it was asked were
    /// lost by the backend. Places that were found gone since wait for the next answer.
    pub fn handle_revocations_known(&mut self, question: u64, now: Time) {
        for n in self.revocations.handle_known(question) {
            let Some(index) = self.places.index(n) else { continue };
            let Some(place) = self.places.get_mut(index) else { continue };
            match place.state {
                State::Held => {
                    self.renewals.push_proof(n);
                    self.handle_data_lost(now);
                }
                State::Waiting { ticket: Some(_) } => self.renewals.push_proof(n),
                State::Waiting { ticket: None } => {
                    place.restoring = false;
                    self.set(index, State::Joining { sent: Sent::No, hint: None });
                    self.joins.push(n);
                }
                _ => {}
            }
        }
        self.end_resync();
    }

    /// How long a place has had its permit; `None`: it has none.
    #[must_use]
    pub fn held_for(&self, id: PlaceId, now: Time) -> Option<Duration> {
        let place = self.places.get(self.places.index(id.n)?)?;
        place.is_in_flight().then(|| now.since(place.held_at))
    }

    /// How long a place has been waiting; `None`: it does not wait.
    #[must_use]
    pub fn waiting_for(&self, id: PlaceId, now: Time) -> Option<Duration> {
        let place = self.places.get(self.places.index(id.n)?)?;
        place.is_waiting().then(|| now.since(place.held_at))
    }

    /// The numbers of at most `most` waiting places of tenants, and how long they have waited, ms.
    #[must_use]
    pub fn waiting_since(&self, now: Time, most: usize) -> Vec<(u64, u64)> {
        let is_fair = |place: &Place| place.is_waiting() && place.options.tenant().is_some();
        let waiting = self.places.iter().filter(|(_, place)| is_fair(place)).take(most);
        waiting.map(|(_, place)| (place.n, ms(now.since(place.held_at)))).collect()
    }

    /// The numbers of at most `most` places that have a permit, and for how long, ms.
    #[must_use]
    pub fn held_since(&self, now: Time, most: usize) -> Vec<(u64, u64)> {
        let held = self.places.iter().filter(|(_, place)| place.is_in_flight()).take(most);
        held.map(|(_, place)| (place.n, ms(now.since(place.held_at)))).collect()
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
