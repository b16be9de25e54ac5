//! A reload: requests that wait adopt another policy, or another rate of an operator.
//!
//! The id of a place says what it is judged by, so a waiting place returns under a new id with its old ticket, like one
//! that the backend lost. The old place keeps the turn until the new one takes it, in one step: if both stood in the queue,
//! both could be granted, and a start would be spent on nobody.

use std::collections::BTreeSet;

use super::limits::Limits;
use super::options::AcquireOptions;
use super::place::{Place, Sent, State};
use super::places::Places;
use super::releases::Release;
use super::{IDLE, Session};
use crate::bound::Bound;
use crate::rate::Rate;
use crate::reject::RejectReason;
use crate::time::Time;

/// The policy that requests up to an arrival are judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Policy {
    limit: u32,
    headroom: u32,
    rate: Option<Rate>,
    arrival: u64,
}

/// What was reloaded last, and what became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Reload {
    policy: Option<Policy>,
    /// An operator set another rate.
    is_rate_changed: bool,
    /// How many places replace another, which still keeps their turn.
    replacing: usize,
}

impl Reload {
    #[cfg(test)]
    pub(super) const fn replacing(&self) -> usize {
        self.replacing
    }

    /// What the place is to be judged by from now on: its limit, bound and options; `None`: by what it is.
    fn terms_for(
        &self,
        place: &Place,
        limits: &Limits,
    ) -> Option<(u32, Option<Bound>, AcquireOptions)> {
        if !place.state.is_without_permit() || place.has_left() {
            return None;
        }
        let (limit, options) = match self.policy.filter(|policy| place.arrival <= policy.arrival) {
            Some(new) => (new.limit, place.options.reloaded(new.headroom, new.rate)),
            None => (place.limit, place.options),
        };
        let rate = limits.rate_for(options.rate);
        let bound = place.bound.and_then(|_| options.bound(limit, rate, limits.longest_window()));
        (bound != place.bound).then_some((limit, bound, options))
    }

    /// The limit and the rate by which a share has its part: those of the reload, though a place can adopt them only once
    /// it is answered.
    pub(super) fn limit_and_rate(&self, place: &Place) -> (u32, Option<Rate>) {
        match self.policy.filter(|policy| place.arrival <= policy.arrival) {
            Some(new) => (new.limit, new.rate),
            None => (place.limit, place.options.rate),
        }
    }

    /// The place replaces the one that `replaced` releases.
    fn replace(&mut self, place: &mut Place, replaced: Release) {
        place.replaces = Some(Box::new(replaced));
        self.replacing += 1;
    }

    /// Takes the release of the place that the one at `index` replaces.
    fn take_replaced(&mut self, index: usize, places: &mut Places) -> Option<Release> {
        if self.replacing == 0 {
            return None;
        }
        let replaced = places.get_mut(index)?.replaces.take()?;
        self.replacing -= 1;
        Some(*replaced)
    }

    /// The index of the place that replaces the one with this number.
    pub(super) fn replacement_of(&self, n: u64, places: &Places) -> Option<usize> {
        // All grants come here, and only those soon after a reload look at all places.
        if self.replacing == 0 {
            return None;
        }
        let replaces = |place: &Place| place.replaces.as_ref().is_some_and(|old| old.id.n == n);
        places.iter().find(|(_, place)| replaces(place)).map(|(index, _)| index)
    }
}

impl Session {
    /// Judges requests that wait by another limit, headroom and rate from now on; they keep their turn. A request whose
    /// call is unanswered adopts them once it is answered; in an outage the process's own share has them at once.
    pub fn handle_policy(&mut self, limit: u32, headroom: u32, rate: Option<Rate>, now: Time) {
        let rate_before = self.limits.rate_in_force();
        let (before, after) = self.limits.handle_policy(limit, rate);
        if self.limits.rate_in_force() != rate_before {
            self.probe.handle_rate(self.counts.has_waiting());
        }
        self.movement.handle_change(now);
        self.reuse.handle_limit(before, after, now);
        let arrival = self.places.last_arrival();
        self.reload.policy = Some(Policy { limit, headroom, rate, arrival });
        self.adopt_all(now);
        self.admit_local(now);
        self.want(now + IDLE);
    }

    /// An operator set another rate: requests that wait are judged by it from now on.
    pub(super) fn handle_rate(&mut self, now: Time) {
        self.reload.is_rate_changed = true;
        self.probe.handle_rate(self.counts.has_waiting());
        self.movement.handle_change(now);
        self.adopt_all(now);
    }

    fn adopt_all(&mut self, now: Time) {
        // Places that are about to return under ids that were never sent.
        let unsent: BTreeSet<u64> = self.revocations.numbers().collect();
        for index in self.indexes() {
            self.adopt(index, |n| unsent.contains(&n), now);
        }
    }

    /// The place at `index` was answered: it adopts what was reloaded meanwhile, and the place that it replaces leaves.
    pub(super) fn adopt_late(&mut self, index: usize, now: Time) {
        self.release_replaced(index);
        if self.reload.policy.is_some() || self.reload.is_rate_changed {
            self.adopt(index, |_| false, now);
        }
    }

    fn adopt(&mut self, index: usize, is_unsent: impl Fn(u64) -> bool, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        let Some((limit, bound, options)) = self.reload.terms_for(place, &self.limits) else {
            return;
        };
        let n = place.n;
        let is_new_to_the_backend = match place.state {
            State::Joining { sent, .. } if sent != Sent::No => {
                return self.adopt_limit_of_zero(index, limit, now);
            }
            State::Joining { .. } => true,
            // Only an answer tells its turn: a place that replaced it would come last.
            State::Waiting { ticket: None } if !place.restoring => {
                return self.adopt_limit_of_zero(index, limit, now);
            }
            _ if place.restoring && !is_unsent(n) => return,
            _ => place.restoring,
        };
        let replaced = Release::of(self.places.node(), place, now);
        if !is_new_to_the_backend {
            // A place of an earlier reload, if the call that was to end it failed.
            self.release_replaced(index);
        }
        self.judge_by(index, (limit, bound, options));
        if let Some(place) = self.places.get_mut(index).filter(|_| !is_new_to_the_backend) {
            self.reload.replace(place, replaced);
        }
        if self.places.get(index).is_some_and(|place| limit == 0 || self.limits.never_fit(place)) {
            let reason = if limit == 0 { RejectReason::Limit } else { RejectReason::CostTooHigh };
            self.leave_server(index, now);
            return self.refuse(index, reason, self.seen);
        }
        if !is_new_to_the_backend {
            self.handle_left_queue(n);
            // An operator may have revoked it, and the message may be on its way.
            self.check_revocation(n, now);
        }
    }

    /// The place at `index`, which never had a permit, is judged by these.
    fn judge_by(
        &mut self,
        index: usize,
        (limit, bound, options): (u32, Option<Bound>, AcquireOptions),
    ) {
        self.reuse.follow(index, false, &self.places);
        if let Some(place) = self.places.get_mut(index) {
            if place.is_waiting() {
                self.counts.change_limit(place.limit, limit);
            }
            (place.limit, place.bound, place.options) = (limit, bound, options);
        }
        self.reuse.follow(index, true, &self.places);
    }

    /// The place at `index` has left the server and is about to pass under a new id, which can say what was reloaded.
    pub(super) fn adopt_before_it_passes(&mut self, index: usize) {
        let place = self.places.get(index);
        if let Some(terms) = place.and_then(|place| self.reload.terms_for(place, &self.limits)) {
            self.judge_by(index, terms);
        }
    }

    /// A place that adopts a limit once it is answered: in an outage it is not, and the process's own share must not
    /// serve it under a limit of zero.
    fn adopt_limit_of_zero(&mut self, index: usize, limit: u32, now: Time) {
        if limit == 0 && self.is_outage() {
            self.leave_server(index, now);
            self.refuse(index, RejectReason::Limit, self.seen);
        }
    }

    /// Releases the place that the one at `index` replaces.
    pub(super) fn release_replaced(&mut self, index: usize) {
        if let Some(replaced) = self.reload.take_replaced(index, &mut self.places) {
            self.releases.push(replaced);
        }
    }

    /// The place that is being replaced has left the server.
    pub(super) fn handle_replaced_gone(&mut self, n: u64) {
        let index = self.reload.replacement_of(n, &self.places);
        index.and_then(|index| self.reload.take_replaced(index, &mut self.places));
    }

    /// A place that is being replaced was granted: its request has it again, under the number that the server knows.
    pub(super) fn take_back(&mut self, n: u64, now: Time) {
        let Some(index) = self.reload.replacement_of(n, &self.places) else { return };
        let Some(Release { id: old, .. }) = self.reload.take_replaced(index, &mut self.places)
        else {
            return;
        };
        let node = self.places.node();
        let Some(place) = self.places.get_mut(index) else { return };
        let new = Release::of(node, place, now);
        (place.bound, place.poll_only, place.restoring) = (old.bound, old.poll_only, false);
        self.places.set_number(index, old.n);
        if !self.revocations.forget(new.id.n) {
            // It may stand on the server.
            self.releases.push(new);
        }
    }
}
