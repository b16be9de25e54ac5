//! Sweep and promote: expired places are removed, and free permits go to the next in turn.

use std::collections::BTreeMap;

use super::budgets::{Budgets, Together};
use super::fair::OfPlaces;
use super::{Caller, FURTHER_WORK, Grant, HINT_WORK, Leases, Ledger, Post, beyond_one};
use crate::bound_rate::BoundRate;
use crate::claim::{Claim, LineId};
use crate::id::{NodeId, PlaceId};
use crate::lines::{Spot, limits_of, spots_of, turn};

/// Whose turn it is.
enum Next {
    /// The head of the places without a line.
    InOrder(u64, PlaceId),
    /// The head of a line.
    Of(LineId, PlaceId, Claim),
}

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

    /// Whether a newcomer whose line is empty would be served before all waiting places, and can be.
    pub(super) fn is_next(&self, caller: Caller, id: PlaceId) -> bool {
        let (cost, class) = id.claim.map_or((1, 0), |claim| (claim.cost(), claim.class()));
        let has_room = self.in_use() + u64::from(cost) <= caller.room(class);
        if !has_room
            || !self.may_start(id, caller.now)
            || self.spot_of_newcomer(id, caller.now).is_some()
        {
            return false;
        }
        let Some((turn_of_first, first)) = self.next(caller) else { return true };
        // Of equal turns that of the places without a tenant comes first, then the lower number.
        match (id.claim_in_line(), first) {
            (None, _) => self.turn_in_order(caller.now) <= turn_of_first,
            (Some(claim), Next::InOrder(..)) if !claim.has_tenant() => false,
            (Some(claim), first) => {
                let units = if claim.has_tenant() { self.in_use_by(claim.tenant()) } else { 0 };
                let own = turn(class, units, claim.weight(), caller.now);
                let is_lower = |line| claim.line().is_some_and(|own| own < line);
                own < turn_of_first
                    || own == turn_of_first && matches!(first, Next::Of(line, ..) if is_lower(line))
            }
        }
    }

    /// Where a place that comes now, and whose line is empty, would park.
    pub(super) fn spot_of_newcomer(&self, id: PlaceId, now: u64) -> Option<Spot> {
        let claim = id.claim.filter(|claim| claim.has_further())?;
        self.lines.as_ref()?.lines.spot_of_newcomer(claim, now)
    }

    /// The turn of the places without a tenant, the head of which came at `since` (µs).
    fn turn_in_order(&self, since: u64) -> f64 {
        turn(0, self.held_in_order(), 1, since)
    }

    /// The next in turn. A head of those without a line that could never be served, because the limit was lowered since
    /// it came, is passed over with all behind it.
    fn next(&self, caller: Caller) -> Option<(f64, Next)> {
        let in_order = self.queue.first();
        let in_order = in_order.filter(|(_, id)| !Self::never_fits(caller, *id));
        let in_order =
            in_order.map(|(ticket, id)| (self.turn_in_order(*ticket), Next::InOrder(*ticket, *id)));
        let Some(fair) = &self.lines else { return in_order };
        let in_line = fair.lines.next().and_then(|(turn, line)| {
            let id = fair.lines.head(line)?;
            Some((turn, Next::Of(line, id, id.claim?)))
        });
        match (in_order, in_line) {
            // Neither has a tenant: they go in the order of their arrival.
            (Some((_, Next::InOrder(ticket, id))), Some(b)) if matches!(b.1, Next::Of(_, _, claim) if !claim.has_tenant()) =>
            {
                let own = turn(0, 0, 1, ticket);
                Some(if own <= b.0 { (own, Next::InOrder(ticket, id)) } else { b })
            }
            (Some(a), Some(b)) => Some(if a.0 <= b.0 { a } else { b }),
            (a, b) => a.or(b),
        }
    }

    /// Removes places whose lease has ended, the longest dead first, up to the bound on work. Returns the work that is
    /// left: if there is any, no dead place is left.
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        let now_ms = now / 1000;
        let work_max = self.work_max;
        if now_ms < self.quiet_until {
            return work_max;
        }
        let (mut dead, mut budget) = (Vec::new(), work_max);
        for leases in Leases::ALL {
            let ended = self.by_end().range((leases, 0, PlaceId::FIRST)..);
            let ended = ended.take_while(|(of, end, _)| *of == leases && *end <= now_ms);
            for (.., id) in ended {
                if budget == 0 {
                    break;
                }
                budget = budget.saturating_sub(id.cost() as usize + further_work(id));
                dead.push(*id);
            }
        }
        for id in &dead {
            self.take(id);
        }
        self.settle(now);
        self.quiet_until = self.earliest();
        budget
    }

    /// Up to how many permits in use a call grants. A call that frees permits looks past its limit once that is reached:
    /// the head may have a higher one.
    pub(super) fn most(&self, caller: Caller, frees: bool) -> u64 {
        let limit = u64::from(caller.limit);
        let looks_past = frees && !caller.for_all && self.in_use() >= limit;
        if looks_past { u64::MAX } else { limit }
    }

    /// While permits are free, grants the next in turn. Stops when the budget is spent; the last hint may exceed it.
    pub(super) fn promote(
        &mut self,
        caller: Caller,
        most: u64,
        mut budget: usize,
        post: Post<'_>,
    ) -> Vec<Grant> {
        let mut own = Vec::new();
        let mut absent = Vec::new();
        loop {
            let mut mail: Vec<(NodeId, Vec<Grant>)> = Vec::new();
            while budget > 0
                && let Some(id) = self.grant_next(caller, most, &mut budget, &absent)
            {
                let Some(lease_end) = self.places.get(&id).map(|place| place.lease_end) else {
                    continue;
                };
                let is_told = is_told(caller, id);
                if is_told && absent.contains(&id.node) {
                    self.take(&id);
                    self.settle(caller.now);
                    continue;
                }
                self.start(id, caller.now);
                let grant = Grant { id, lease_end };
                if id.node == caller.node {
                    own.push(grant);
                } else if is_told {
                    match mail.iter_mut().find(|(node, _)| *node == id.node) {
                        Some((_, grants)) => grants.push(grant),
                        None => {
                            mail.push((id.node, vec![grant]));
                            budget = budget.saturating_sub(HINT_WORK);
                        }
                    }
                }
            }
            let heard = absent.len();
            for (node, grants) in mail {
                if !post(node, &grants) {
                    absent.push(node);
                    for grant in grants {
                        self.take(&grant.id);
                        self.undo_start(&grant.id, caller.now);
                    }
                }
            }
            self.settle(caller.now);
            if absent.len() == heard {
                return own;
            }
        }
    }

    /// Grants the next in turn, if it can be served. A head that never can, because the limit was lowered since it came,
    /// stops its line, and one whose tenant's own budgets have too little puts it to sleep; all others wait for a head that
    /// can be served later.
    fn grant_next(
        &mut self,
        caller: Caller,
        most: u64,
        budget: &mut usize,
        absent: &[NodeId],
    ) -> Option<PlaceId> {
        let now = caller.now;
        while *budget > 0 {
            let in_use = self.in_use();
            // While no permit is free, the next in turn does not matter: that saves Redis two commands.
            if in_use >= most {
                return None;
            }
            *budget = budget.saturating_sub(self.take_passed());
            if *budget == 0 {
                return None;
            }
            let next = self.next(caller)?.1;
            let (Next::InOrder(_, id) | Next::Of(_, id, _)) = next;
            if let (Next::Of(line, ..), Some(fair)) = (&next, &mut self.lines)
                && fair.lines.restamp(*line, now, &OfPlaces)
            {
                *budget -= 1;
                continue;
            }
            if let (Next::Of(_, _, claim), Some(until)) = (&next, self.sleeps_until(caller, id))
                && let Some(fair) = &mut self.lines
            {
                *budget -= 1;
                fair.lines.sleep(*claim, until, now, &OfPlaces);
                continue;
            }
            if !self.fits(caller, id) && !Self::never_fits(caller, id) {
                return None;
            }
            match next {
                Next::InOrder(ticket, id) => {
                    // All behind it wait for it, whatever their limits: the order is that of joining.
                    *budget = budget.saturating_sub(id.cost() as usize);
                    self.queue.remove(&(ticket, id));
                    self.beyond_one += beyond_one(&id);
                    self.places.get_mut(&id)?.ticket = None;
                    return Some(id);
                }
                Next::Of(line, id, claim) => {
                    let fair = self.lines.as_mut()?;
                    if Self::never_fits(caller, id) {
                        *budget -= 1;
                        fair.lines.stop(claim, now, &OfPlaces);
                        continue;
                    }
                    if fair.lines.park(line, now, &OfPlaces) {
                        *budget -= 1;
                        continue;
                    }
                    *budget = budget.saturating_sub(claim.cost() as usize + further_work(&id));
                    if claim.has_further() && is_told(caller, id) && absent.contains(&id.node) {
                        self.take(&id);
                        self.settle(now);
                        continue;
                    }
                    let fair = self.lines.as_mut()?;
                    let ticket = self.places.get_mut(&id)?.ticket.take()?;
                    fair.lines.grant(claim, ticket, id, now, &OfPlaces);
                    return Some(id);
                }
            }
        }
        None
    }

    /// How many lines were parked anew since the last call of this.
    pub(super) fn take_passed(&mut self) -> usize {
        self.lines.as_mut().map_or(0, |fair| fair.lines.take_passed())
    }

    /// Whether the call stopped at the bound on work, of which the sweep left `budget`: promotion did, or a limit at which a
    /// line is parked may be held by the dead that are left.
    pub(super) fn stopped_early(&self, caller: Caller, most: u64, budget: usize) -> bool {
        let in_use = self.in_use();
        if budget == 0 && self.lines.as_ref().is_some_and(|fair| fair.lines.has_further()) {
            return true;
        }
        if in_use >= most {
            return false;
        }
        let is_due = |at| at <= caller.now;
        self.rouses_at().is_some_and(is_due)
            || self.next(caller).is_some_and(|(_, Next::InOrder(_, id) | Next::Of(_, id, _))| {
                Self::never_fits(caller, id)
                    || self.fits(caller, id)
                    || self.sleeps_until(caller, id).is_some()
            })
    }

    /// Until when the tenant's own budgets have too little for this place, which waits, µs; `None`: they have enough, or it
    /// waits for an operator, or forever.
    fn sleeps_until(&self, caller: Caller, id: PlaceId) -> Option<u64> {
        let is_kept = |_: &u64| caller.room_of(id) > 0 && !Self::never_fits(caller, id);
        self.tenants_budget_opening(id, caller.now).filter(is_kept)
    }

    /// From when on the tenant's own budgets allow the grant of a place, µs; `None`: now.
    pub(super) fn tenants_budget_opening(&self, id: PlaceId, now: u64) -> Option<u64> {
        self.budgets.as_ref()?.tenants_opening_of(id.charges(), now)
    }

    /// When the first line that is asleep is to get its turn, µs.
    pub(super) fn rouses_at(&self) -> Option<u64> {
        self.lines.as_ref()?.lines.rouses_at()
    }

    /// Gives some lines their turns that have been asleep until now.
    pub(super) fn rouse(&mut self, now: u64) {
        if let Some(fair) = &mut self.lines {
            fair.lines.rouse(now, &OfPlaces);
        }
    }

    /// Whether this place, which waits, could never be served: the limit was lowered since it came. If there are no
    /// permits, it waits for an operator.
    fn never_fits(caller: Caller, id: PlaceId) -> bool {
        let room = caller.room_of(id);
        room > 0 && (u64::from(id.cost()) > room || !Self::can_start(id))
    }

    /// Whether permits are free for this place, which waits, and its rate allows its grant.
    fn fits(&self, caller: Caller, id: PlaceId) -> bool {
        self.has_permits(caller, id) && self.may_start(id, caller.now)
    }

    fn has_permits(&self, caller: Caller, id: PlaceId) -> bool {
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
    fn undo_start(&mut self, id: &PlaceId, now: u64) {
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

    /// In how many ms the next call is due, though nothing leaves until then: rate and budgets allow the grant of the next
    /// in turn, if only they keep it back, or a line has been asleep for long enough; 0: nothing is.
    pub(super) fn opens_in_ms(&self, caller: Caller, most: u64) -> u64 {
        let is_timed =
            self.starts.is_some() || self.budgets.is_some() || self.rouses_at().is_some();
        if !is_timed || self.in_use() >= most {
            return 0;
        }
        let of_sleeper = self.rouses_at().map(|at| at.saturating_sub(caller.now).div_ceil(1000));
        let of_head = Some(self.head_opens_in(caller)).filter(|ms| *ms > 0);
        of_head.into_iter().chain(of_sleeper).min().unwrap_or(0)
    }

    fn head_opens_in(&self, caller: Caller) -> u64 {
        match self.next(caller) {
            Some((_, Next::InOrder(_, id) | Next::Of(_, id, _)))
                if Self::can_start(id)
                    && self.has_permits(caller, id)
                    && !self.may_start(id, caller.now) =>
            {
                self.opens_in(id, caller.now).1
            }
            _ => 0,
        }
    }
}

/// Whether the process of a place gets a message when that is granted.
fn is_told(caller: Caller, id: PlaceId) -> bool {
    id.node != caller.node && !id.poll_only
}

/// What the place costs beyond its permits.
fn further_work(id: &PlaceId) -> usize {
    if id.claim.is_some_and(Claim::has_further) { FURTHER_WORK } else { 0 }
}
