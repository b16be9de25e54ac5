//! The tenants that have places in this process, for what is told of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::claim::{Claim, Tenant};
use crate::lines::fits_each;

/// The places with a claim: those that wait, in the order in which they came to, and the permits in flight.
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
    /// A place waits from here on.
    pub(super) fn join(&mut self, index: usize, tenant: Tenant) {
        if self.by_index.is_empty() {
            self.next = 0;
        }
        self.by_index.insert(index, (self.next, tenant));
        self.order.insert((self.next, index));
        *self.lines.entry(tenant).or_default() += 1;
        self.next += 1;
    }

    /// A place does not wait any more; `granted`: because it has its permit.
    pub(super) fn leave(&mut self, index: usize, granted: bool) {
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
        if granted && oldest.is_some_and(|(at, (_, of))| *at < since && *of != tenant) {
            self.overtakes += 1;
        }
    }

    /// Permits of a tenant come to be in flight, or are not any more.
    pub(super) fn count(&mut self, tenant: Tenant, permits: u32, is_in: bool) {
        let count = self.in_flight.entry(tenant).or_default();
        let permits = u64::from(permits);
        *count = if is_in { *count + permits } else { count.saturating_sub(permits) };
        if *count == 0 {
            self.in_flight.remove(&tenant);
        }
    }

    /// Whether permits of this process alone keep a claim from fitting under its tenant's cap.
    pub(super) fn exceeds_each(&self, claim: Claim) -> bool {
        !fits_each(self.in_flight.get(&claim.tenant()).copied().unwrap_or(0), claim)
    }

    /// Whether a tenant has a place that waits or is in flight.
    pub(super) fn has(&self, tenant: Tenant) -> bool {
        self.lines.contains_key(&tenant) || self.in_flight.contains_key(&tenant)
    }

    /// How many tenants wait.
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }

    /// How many grants passed an older request of another tenant, since the last look.
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
