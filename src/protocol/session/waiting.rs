//! The tenants of which requests of this process wait, for what is told of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::claim::Tenant;

/// The places with a claim that wait, in the order in which they came to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct WaitingTenants {
    order: BTreeSet<(u64, usize)>,
    by_index: BTreeMap<usize, (u64, Tenant)>,
    lines: BTreeMap<Tenant, usize>,
    next: u64,
    overtakes: u64,
}

impl WaitingTenants {
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
    use super::WaitingTenants;
    use crate::protocol::claim::Tenant;

    #[test]
    fn a_grant_that_passes_another_tenants_older_request_is_counted() {
        let [a, b] = [1, 2].map(Tenant::of_hash);
        let mut waiting = WaitingTenants::default();
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
        assert_eq!(waiting, WaitingTenants { next: 2, ..WaitingTenants::default() });
    }
}
