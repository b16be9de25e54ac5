//! What a place needs to be granted: permits, starts of its rate, and budgets.

use std::collections::BTreeMap;

use super::budgets::{Budgets, Together};
use super::{Caller, Ledger};
use crate::bound_rate::BoundRate;
use crate::claim::Claim;
use crate::id::PlaceId;
use crate::lines::{Spot, limits_of, spots_of};

impl Ledger {
    /// Whether all newcomers can be granted at once, with nothing to sweep: no waiting place could be served, and every
    /// cap has room. If no id of the call has a claim, nobody waits at all, because a reply in short tells that to the
    /// caller.
    pub(super) fn all_fit(&self, caller: Caller, leaving: &[PlaceId], ids: &[PlaceId]) -> bool {
        if !self.queue.is_empty() {
            return false;
        }
        let Some(fair) = &self.lines else {
            if ids.iter().all(|id| id.claim.is_none()) {
                return self.in_use() + ids.len() as u64 <= u64::from(caller.limit);
            }
            return !self.would_charge_again(ids) && self.fit_in_lines(caller, ids);
        };
        // A caller that gives something back is told when a line wakes, which takes a long reply.
        if self.would_charge_again(ids) || !leaving.is_empty() && self.rouses_at().is_some() {
            return false;
        }
        let has_claims = || leaving.iter().chain(ids).any(|id| id.claim.is_some());
        (fair.lines.waiting() == 0 || has_claims())
            && fair.lines.nobody_in_turn()
            && self.fit_in_lines(caller, ids)
    }

    /// Whether the call is repeated, for places that have taken of budgets.
    fn would_charge_again(&self, ids: &[PlaceId]) -> bool {
        let is_known = |id: &PlaceId| !id.charges().is_empty() && self.places.contains_key(id);
        ids.iter().any(is_known)
    }

    fn fit_in_lines(&self, caller: Caller, ids: &[PlaceId]) -> bool {
        let mut in_use = self.in_use();
        // The permits that this call asks for, by tenant and by further limit.
        let mut asked: BTreeMap<Spot, u64> = BTreeMap::new();
        for id in ids {
            let Some(claim) = id.claim else {
                in_use += 1;
                continue;
            };
            let cost = u64::from(claim.cost());
            in_use += cost;
            let Some(line) = claim.line() else { continue };
            let lines = self.lines.as_ref().map(|fair| &fair.lines);
            let are_in_the_way = if claim.has_further() {
                self.waiting() > 0
            } else {
                lines.is_some_and(|lines| lines.waiting_in(line) > 0)
            };
            if are_in_the_way {
                return false;
            }
            for (spot, cap) in limits_of(claim) {
                let used = lines.map_or(0, |lines| lines.used_at(spot, claim));
                let before = asked.get(&spot).copied().unwrap_or(0);
                if used + before + cost > u64::from(cap) {
                    return false;
                }
            }
            for spot in spots_of(claim) {
                *asked.entry(spot).or_default() += cost;
            }
        }
        // The strictest of their classes counts for all of them, and the strictest of their rates.
        let is_first = |id: &PlaceId| id.claim.is_none_or(|claim| claim.class() == 0);
        let rates = || ids.iter().filter_map(|id| Some((id.rate()?, id.cost())));
        let starts = rates().map(|(_, cost)| cost).sum();
        in_use <= caller.room(u8::from(!ids.iter().all(is_first)))
            && rates().all(|(rate, _)| self.has_starts(rate, starts, caller.now))
            && self.budgets_allow(ids, caller.now)
    }

    /// Whether this place, which waits, could never be served: the limit was lowered since it came. If there are no
    /// permits, it waits for an operator.
    pub(super) fn never_fits(caller: Caller, id: PlaceId) -> bool {
        let room = caller.room_of(id);
        room > 0 && (u64::from(id.cost()) > room || !Self::can_start(id))
    }

    /// Whether permits are free for this place, which waits, and its rate allows its grant.
    pub(super) fn fits(&self, caller: Caller, id: PlaceId) -> bool {
        self.has_permits(caller, id) && self.may_start(id, caller.now)
    }

    pub(super) fn has_permits(&self, caller: Caller, id: PlaceId) -> bool {
        self.in_use() + u64::from(id.cost()) <= caller.room_of(id)
    }

    /// Whether the place's rate, if it has one, allows so many grants in a window.
    pub(super) fn can_start(id: PlaceId) -> bool {
        id.rate().is_none_or(|rate| id.cost() <= rate.starts())
    }

    /// Whether the place's rate and its budgets, if it has any, allow its grant now.
    pub(super) fn may_start(&self, id: PlaceId, now: u64) -> bool {
        id.rate().is_none_or(|rate| self.has_starts(rate, id.cost(), now))
            && self.budget_opening(id, now).is_none()
    }

    /// From when on its budgets allow the grant of a place, µs, and the index of the last of them to do so; `None`: now.
    pub(super) fn budget_opening(&self, id: PlaceId, now: u64) -> Option<(u64, u8)> {
        self.budgets.as_ref()?.opening_of(id.charges(), now)
    }

    /// Whether the budgets allow the grant of all of these places now.
    fn budgets_allow(&self, ids: &[PlaceId], now: u64) -> bool {
        if ids.iter().all(|id| id.charges().is_empty()) {
            return true;
        }
        let (none, mut together) = (Budgets::default(), Together::new());
        let budgets = self.budgets.as_deref().unwrap_or(&none);
        ids.iter().all(|id| budgets.allow(id.charges(), &mut together, now))
    }

    fn has_starts(&self, rate: BoundRate, cost: u32, now: u64) -> bool {
        let opening = self.starts.as_ref().and_then(|starts| starts.opening_of(rate, cost, now));
        cost <= rate.starts() && opening.is_none()
    }

    /// Notes that the place is granted, if it has a rate or takes of a budget.
    pub(super) fn start(&mut self, id: PlaceId, now: u64) {
        self.make_room(id, id.cost(), now);
        self.note_start(id, now);
    }

    /// Forgets starts, if the grant of so many permits needs their room; `id`: one of the places, which have one rate.
    pub(super) fn make_room(&mut self, id: PlaceId, cost: u32, now: u64) {
        if let (Some(rate), Some(starts)) = (id.rate(), &mut self.starts) {
            starts.make_room(rate, cost, now);
        }
    }

    /// The same, without making room.
    pub(super) fn note_start(&mut self, id: PlaceId, now: u64) {
        if let Some(rate) = id.rate() {
            self.starts.get_or_insert_default().push(id, rate, now);
        }
        if id.claim.is_some_and(Claim::has_charges) {
            self.budgets.get_or_insert_default().take(id.charges(), now);
        }
    }

    /// Takes back that the place was granted: its process is gone.
    pub(super) fn undo_start(&mut self, id: &PlaceId, now: u64) {
        self.starts.iter_mut().for_each(|starts| starts.remove(id));
        self.budgets.iter_mut().for_each(|budgets| budgets.undo(id.charges(), now));
    }

    /// Forgets the grants that do not count any more, and the budgets that are full.
    #[inline]
    pub(super) fn expire_starts(&mut self, now: u64) {
        if let Some(budgets) = &mut self.budgets {
            budgets.expire(now);
            if budgets.is_empty() {
                self.budgets = None;
            }
        }
        if let Some(starts) = &mut self.starts {
            starts.expire(now);
            if starts.is_empty() {
                self.starts = None;
            }
        }
    }

    /// Which budget keeps the place back for longest, if none of its rate; and in how many ms, rounded up and at least 1,
    /// both allow its grant.
    pub(super) fn opens_in(&self, id: PlaceId, now: u64) -> (Option<u8>, u64) {
        let by_rate = id
            .rate()
            .zip(self.starts.as_ref())
            .and_then(|(rate, starts)| starts.opening_of(rate, id.cost(), now));
        let by_budget = self.budget_opening(id, now);
        let budget = by_budget.filter(|(opening, _)| by_rate.is_none_or(|other| other < *opening));
        let opening = budget.map(|(opening, _)| opening).or(by_rate);
        let ms = opening.map_or(1, |opening| opening.saturating_sub(now).div_ceil(1000).max(1));
        (budget.map(|(_, index)| index), ms)
    }
}
