//! Sweep and promote: expired places are removed, and free permits go to the next in turn.

use super::fair::OfPlaces;
use super::{Caller, FURTHER_WORK, Grant, HINT_WORK, Leases, Ledger, Post, beyond_one};
use crate::claim::{Claim, LineId};
use crate::id::{NodeId, PlaceId};
use crate::lines::{Spot, turn};

/// The lease end before which a call examines whether the process of the next in turn is gone, ms; 0: it does not.
#[derive(Clone, Copy)]
pub(super) struct Silent(u64);

impl Silent {
    pub(super) const NOT_EXAMINED: Self = Self(0);

    /// In a call that renews leases, which end then. Waiting places are renewed each second; where lengths of leases differ,
    /// more or fewer are examined. `before`: the lease ends of the waiting places that it renews. If all of them have
    /// missed renewals, too, as after an outage, others get time to come back.
    pub(super) fn behind(lease_end: u64, mut before: impl Iterator<Item = u64>) -> Self {
        let early = lease_end.saturating_sub(2000);
        if before.any(|end| end >= early) { Self(early) } else { Self::NOT_EXAMINED }
    }
}

/// Whose turn it is.
enum Next {
    /// The head of the places without a line.
    InOrder(u64, PlaceId),
    /// The head of a line.
    Of(LineId, PlaceId, Claim),
}

impl Ledger {
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
                budget = budget.saturating_sub(work_of(id));
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
        silent: Silent,
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
            let silent = self.silent_head(caller, most, budget, silent);
            let silent = silent.filter(|id| mail.iter().all(|(node, _)| *node != id.node));
            if silent.is_some() {
                budget = budget.saturating_sub(HINT_WORK);
            }
            let mut any_gone = false;
            for (node, grants) in mail {
                if !post(node, &grants) {
                    any_gone = true;
                    absent.push(node);
                    for grant in grants {
                        self.take(&grant.id);
                        self.undo_start(&grant.id, caller.now);
                    }
                }
            }
            if let Some(id) = silent
                && !post(id.node, &[])
            {
                any_gone = true;
                absent.push(id.node);
            }
            self.settle(caller.now);
            if !any_gone {
                return own;
            }
        }
    }

    /// The next in turn, if it keeps others back until permits, its rate or its budgets have enough for it, and its
    /// process has not renewed it for a while: nothing else would tell that this is gone.
    fn silent_head(
        &self,
        caller: Caller,
        most: u64,
        budget: usize,
        Silent(before): Silent,
    ) -> Option<PlaceId> {
        if before == 0 || budget == 0 || self.in_use() >= most {
            return None;
        }
        let (_, Next::InOrder(_, id) | Next::Of(_, id, _)) = self.next(caller)?;
        let lease_end = self.places.get(&id)?.lease_end;
        // Without room it waits for an operator.
        let is_kept = caller.room_of(id) > 0 && !self.fits(caller, id);
        Some(id).filter(|id| is_told(caller, *id) && is_kept && lease_end < before)
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
            // One whose process is gone is taken out, whether it could be granted or not.
            let is_gone =
                is_told(caller, id) && absent.contains(&id.node) && caller.room_of(id) > 0;
            if !self.fits(caller, id) && !Self::never_fits(caller, id) && !is_gone {
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
                    *budget = budget.saturating_sub(work_of(&id));
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

/// What the removal or the grant of a place costs out of the bound on work.
pub(super) fn work_of(id: &PlaceId) -> usize {
    let further = if id.claim.is_some_and(Claim::has_further) { FURTHER_WORK } else { 0 };
    id.cost() as usize + further
}
