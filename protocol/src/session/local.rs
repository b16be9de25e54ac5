//! The process's own share of a semaphore, which it grants in an outage.

use std::time::Duration;

use super::Session;
use super::options::OnUnavailable;
use super::place::{Place, State};
use super::places::Places;
use crate::claim::Claim;
use crate::lines::{Full, Lines, Register, line_of};
use crate::reject::RejectReason;
use crate::time::Time;

/// The places that wait for a share, in lines as in the ledger: first come, first served within a tenant, and among
/// tenants by the permits of this process that each has in use. One queue for those that waited when the backend failed
/// and for newcomers: with two, the order would depend on a timeout. Requests without a tenant are one line. Places are
/// identified by index, which stays the same whatever number a place gets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct LocalQueue {
    lines: Lines<usize>,
}

/// What the places of the process claim.
struct Of<'a>(&'a Places);

impl Register<usize> for Of<'_> {
    fn claim_of(&self, index: usize) -> Claim {
        self.0.get(index).map_or_else(Claim::without_tenant, Place::claim)
    }

    /// Arrivals are numbers, so the lines of requests without a tenant go by the time at which they began.
    fn arrival_of(&self, _: u64, now: u64) -> u64 {
        now
    }
}

impl LocalQueue {
    pub(super) const fn new() -> Self {
        Self { lines: Lines::new() }
    }

    /// A queue in which nobody waits yet, and the permits in flight count.
    pub(super) fn of(places: &Places) -> Self {
        let mut queue = Self::new();
        for (_, place) in places.iter().filter(|(_, place)| place.is_in_flight()) {
            queue.count(place.options.claim, true);
        }
        queue
    }

    /// How many places wait for a share.
    pub(super) const fn waiting(&self) -> u64 {
        self.lines.waiting()
    }

    pub(super) fn join(&mut self, index: usize, place: &Place) {
        self.lines.join(place.claim(), place.arrival, index);
        self.lines.touch(place.claim());
    }

    /// A place that may wait for a share leaves.
    pub(super) fn leave(&mut self, index: usize, place: &Place) {
        if !self.lines.is_empty() {
            self.lines.leave(place.claim(), place.arrival, index);
        }
    }

    /// Follows a place from one state to another.
    pub(super) fn change(&mut self, claim: Option<Claim>, before: State, after: State) {
        // Even if both are in flight: that settles the tenant.
        if before.is_in_flight() {
            self.count(claim, false);
        }
        if after.is_in_flight() {
            self.count(claim, true);
        }
    }

    /// Adds a place to those in flight, or removes it.
    pub(super) fn count(&mut self, claim: Option<Claim>, is_in: bool) {
        let claim = claim.unwrap_or_else(Claim::without_tenant);
        match is_in {
            true => self.lines.hold(claim),
            false => self.lines.free(claim),
        }
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> Vec<usize> {
        self.lines.places().collect()
    }

    #[cfg(test)]
    pub(super) const fn units(&self) -> u64 {
        self.lines.units()
    }

    /// The line of this place waits for no turn until then.
    fn sleep(&mut self, claim: Claim, until: Time, now: Time, places: &Places) {
        // Rounded up: it is not to be roused before.
        let until = micros(until + Duration::from_nanos(999));
        self.lines.sleep(claim, until, micros(now), &Of(places));
    }

    /// When the first line is to get its turn that waits for none.
    fn rouses_at(&self) -> Option<Time> {
        Some(Time::since_epoch(Duration::from_micros(self.lines.rouses_at()?)))
    }

    /// The place whose turn it is.
    fn next(&mut self, places: &Places, now: Time) -> Option<usize> {
        let (of, now) = (Of(places), micros(now));
        self.lines.settle(now, &of);
        self.lines.rouse(now, &of);
        loop {
            // Only a server's work is bounded.
            self.lines.take_passed();
            let (_, line) = self.lines.next()?;
            if !self.lines.restamp(line, now, &of) && !self.lines.park(line, now, &of) {
                return self.lines.head(line);
            }
        }
    }
}

fn micros(time: Time) -> u64 {
    u64::try_from(time.elapsed_since_epoch().as_micros()).unwrap_or(u64::MAX)
}

impl Session {
    /// While the process's own share has free permits, grants them to the places that wait for one, by their turns.
    pub(super) fn admit_local(&mut self, now: Time) {
        self.expire_own_starts(now);
        self.admit_next(now);
        let rouses_at = self.outage.as_ref().and_then(LocalQueue::rouses_at);
        rouses_at.into_iter().for_each(|at| self.want(at));
    }

    fn admit_next(&mut self, now: Time) {
        while let Some(queue) = &mut self.outage {
            let Some(index) = queue.next(&self.places, now) else { return };
            let Some(place) = self.places.get(index) else { return };
            if self.exceeds_share(place) {
                self.fail(index, now);
            } else if self.has_share(place, now) {
                // It leaves the queue.
                self.admit(index, now);
            } else if let Some(until) = self.tenants_budget_opening(place, now) {
                let claim = place.claim();
                let Self { outage, places, .. } = self;
                outage.iter_mut().for_each(|queue| queue.sleep(claim, until, now, places));
            } else {
                let next = self.kept_by_rate_until(place, now);
                next.into_iter().for_each(|at| self.want(at));
                return;
            }
        }
    }

    /// Whether the policy lets this request pass too.
    pub(super) fn has_share(&self, place: &Place, now: Time) -> bool {
        self.has_permits(place) && self.local_opening(place, now).is_none()
    }

    /// Whether the policy has permits for it, whatever the rate says.
    fn has_permits(&self, place: &Place) -> bool {
        let share = self.share_of(place.options.on_unavailable);
        let is_local = matches!(place.options.on_unavailable, OnUnavailable::Local(_));
        let is_capped = is_local && place.options.claim.is_some_and(|claim| self.is_capped(claim));
        !is_capped && self.counts.in_flight().saturating_add(u64::from(place.cost())) <= share
    }

    /// Whether the permits of this process alone leave no room for the claim under one of its caps.
    fn is_capped(&self, claim: Claim) -> bool {
        let is_full = |queue: &LocalQueue| !queue.lines.has_room(claim);
        self.counts.tenants().exceeds_each(claim) || self.outage.as_ref().is_some_and(is_full)
    }

    /// Until when the rate keeps this place back, if there are permits for it.
    pub(super) fn kept_by_rate_until(&self, place: &Place, now: Time) -> Option<Time> {
        self.local_opening(place, now).filter(|_| self.has_permits(place))
    }

    /// Whether it asks for more than the share of its process. If there is no share, it waits for an operator.
    pub(super) fn exceeds_share(&self, place: &Place) -> bool {
        let share = self.share_of(place.options.on_unavailable);
        share > 0 && u64::from(place.cost()) > share
    }

    /// How many permits the policy allows in flight.
    pub(super) fn share_of(&self, on_unavailable: OnUnavailable) -> u64 {
        let set = self.limits.for_all();
        match on_unavailable {
            OnUnavailable::Refuse => 0,
            OnUnavailable::Admit if set == Some(0) => 0,
            OnUnavailable::Admit => u64::MAX,
            OnUnavailable::Local(share) => u64::from(set.map_or(share, |limit| share.min(limit))),
        }
    }

    /// Why the place may not wait for a share, with `before` of its line ahead of it; `None` if it may, as one that stood
    /// in the queue before the outage.
    pub(super) fn local_refusal(
        &self,
        place: &Place,
        before: u64,
        now: Time,
    ) -> Option<RejectReason> {
        match place.options.max_queue {
            _ if place.claim().exceeds_a_cap() => Some(RejectReason::CostTooHigh),
            _ if place.queued => None,
            None => Some(self.lack_of_share(place, now)),
            Some(max) => (before >= u64::from(max)).then_some(RejectReason::QueueFull),
        }
    }

    /// Why a place that may not wait has no share, as the ledger says it.
    pub(super) fn lack_of_share(&self, place: &Place, now: Time) -> RejectReason {
        let full = self.outage.as_ref().and_then(|queue| queue.lines.full(place.claim()));
        if full == Some(Full::Tenant) {
            RejectReason::TenantLimit
        } else if let Some(Full::Further(limit)) = full {
            RejectReason::FurtherLimit(limit)
        } else if self.kept_by_rate_until(place, now).is_some() {
            let rate = self.own_rate_opening(place, now);
            match self.own_budget_opening(place, now) {
                Some((at, budget)) if rate.is_none_or(|rate| rate < at) => {
                    RejectReason::Budget(budget)
                }
                _ => RejectReason::Rate,
            }
        } else {
            RejectReason::Limit
        }
    }

    /// How many wait for a share in the line of this place.
    pub(super) fn waiting_locally(&self, place: &Place) -> u64 {
        let line = line_of(place.claim());
        self.outage.as_ref().map_or(0, |queue| queue.lines.waiting_in(line))
    }
}
