//! The tenants that have places in this process.

use std::collections::{BTreeMap, BTreeSet};

use super::place::State;
use crate::claim::{Claim, Tenant};
use crate::lines::fits_each;

/// The places with a claim that wait, in the order in which they began to, and the permits in flight of each tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Tenants {
    order: BTreeSet<(u64, usize)>,
    by_index: BTreeMap<usize, (u64, Tenant)>,
    lines: BTreeMap<Tenant, usize>,
    in_flight: BTreeMap<Tenant, u64>,
    next: u64,
    overtakes: u64,
}

impl Tenants {
    /// Follows the place at `index` from one state to another.
    #[inline(never)]
    pub(super) fn change(&mut self, index: usize, claim: Claim, before: State, after: State) {
        if before.is_in_flight() != after.is_in_flight() {
            self.count(claim.tenant(), claim.cost(), after.is_in_flight());
        }
        match (before, after) {
            (State::Waiting { .. }, State::Waiting { .. }) => {}
            (_, State::Waiting { .. }) => self.join(index, claim.tenant()),
            (State::Waiting { .. }, _) => self.leave(index, matches!(after, State::Held)),
            _ => {}
        }
    }

    /// The place at `index` is gone.
    pub(super) fn remove(&mut self, index: usize, claim: Claim, state: State) {
        self.leave(index, false);
        if state.is_in_flight() {
            self.count(claim.tenant(), claim.cost(), false);
        }
    }

    /// The place at `index` waits from now on.
    fn join(&mut self, index: usize, tenant: Tenant) {
        if self.by_index.is_empty() {
            self.next = 0;
        }
        self.by_index.insert(index, (self.next, tenant));
        self.order.insert((self.next, index));
        *self.lines.entry(tenant).or_default() += 1;
        self.next += 1;
    }

    /// The place at `index` stops waiting. `is_granted`: because it has its permit.
    fn leave(&mut self, index: usize, is_granted: bool) {
        let Some((since, tenant)) = self.by_index.remove(&index) else { return };
        self.order.remove(&(since, index));
        if let Some(count) = self.lines.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.lines.remove(&tenant);
            }
        }
        let oldest =
            self.order.first().and_then(|(at, index)| Some((at, self.by_index.get(index)?)));
        if is_granted && oldest.is_some_and(|(at, (_, of))| *at < since && *of != tenant) {
            self.overtakes += 1;
        }
    }

    /// Adds permits of a tenant to those in flight, or removes them.
    fn count(&mut self, tenant: Tenant, permits: u32, is_in: bool) {
        let count = self.in_flight.entry(tenant).or_default();
        let permits = u64::from(permits);
        *count = if is_in { *count + permits } else { count.saturating_sub(permits) };
        if *count == 0 {
            self.in_flight.remove(&tenant);
        }
    }

    /// Whether the permits of this process alone leave no room for the claim under its tenant's cap.
    pub(super) fn exceeds_each(&self, claim: Claim) -> bool {
        !fits_each(self.in_flight.get(&claim.tenant()).copied().unwrap_or(0), claim)
    }

    /// Whether a tenant has a place that waits or is in flight.
    pub(super) fn has(&self, tenant: Tenant) -> bool {
        self.lines.contains_key(&tenant) || self.in_flight.contains_key(&tenant)
    }

    /// How many places of a tenant wait.
    pub(super) fn waiting_of(&self, tenant: Tenant) -> usize {
        self.lines.get(&tenant).copied().unwrap_or(0)
    }

    /// How many tenants have a place that waits.
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }

    /// How many grants passed an older request of another tenant, since the last call.
    pub(super) const fn take_overtakes(&mut self) -> u64 {
        std::mem::replace(&mut self.overtakes, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::Tenants;
    use crate::claim::Tenant;

    #[test]
    fn a_grant_that_passes_another_tenants_older_request_is_counted() {
        let [a, b] = [1, 2].map(Tenant::of_hash);
        let mut waiting = Tenants::default();
        for (index, tenant) in [(3, a), (1, a), (2, b)] {
            waiting.join(index, tenant);
        }
        assert_eq!(waiting.lines(), 2);
        waiting.leave(2, true);
        assert_eq!((waiting.take_overtakes(), waiting.lines()), (1, 1));
        waiting.leave(3, true);
        waiting.leave(1, true);
        waiting.leave(1, true);
        assert_eq!((waiting.take_overtakes(), waiting.lines()), (0, 0));
        waiting.join(7, b);
        waiting.join(1, a);
        waiting.leave(1, false);
        assert_eq!(waiting.take_overtakes(), 0, "it left");
        waiting.leave(7, true);
        assert_eq!(waiting, Tenants { next: 2, ..Tenants::default() });
    }
}
