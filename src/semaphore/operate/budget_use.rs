//! The budgets of a semaphore, as an inspection sees them.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::backend::Listing;
use crate::budget::Budget;
use crate::further::NamedBudget;
use crate::name::Name;
use crate::node::Node;

/// A [budget](crate::Budget) that is not full, or that this process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetUse {
    /// The budget, as the last request of this process that takes of it has it; `None`: none did in the last seconds.
    pub budget: Option<Budget>,
    /// Whose it is, if [each](crate::Budget::each) tenant has one; `None`: that of all, that of the requests without a
    /// tenant, or not known here.
    pub tenant: Option<Name>,
    /// In what time it is full again, by the backend's clock, if nothing more is used. More than it takes to refill its
    /// burst, if more was used than was estimated.
    pub full_in: Duration,
}

impl BudgetUse {
    /// Returns how much may be used at once now, in the budget's units; `None` if the budget is not known here.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        Some(self.budget.as_ref()?.left_if_full_in(self.full_in))
    }
}

/// Returns the budgets of a listing, those first that take longest to be full.
pub(super) fn budgets(name: &str, listing: &Listing, own: &Node) -> Vec<BudgetUse> {
    let mut seen: BTreeMap<u32, BudgetUse> = BTreeMap::new();
    let unknown = |full_in| BudgetUse { budget: None, tenant: None, full_in };
    for (number, full_at) in &listing.budgets {
        let full_in = Duration::from_micros(full_at.saturating_sub(listing.now));
        seen.insert(*number, unknown(full_in));
    }
    own.read_limits(name, |names| {
        for (number, NamedBudget { budget, tenant }) in names.budgets() {
            let known = match budget.is_each() {
                // There are as many of those that are full as there are tenants.
                true => seen.get_mut(number),
                false => Some(seen.entry(*number).or_insert_with(|| unknown(Duration::ZERO))),
            };
            if let Some(known) = known {
                known.budget = Some(budget.clone());
                known.tenant.clone_from(tenant);
            }
        }
    });
    let mut seen: Vec<_> = seen.into_values().collect();
    seen.sort_by_key(|one| std::cmp::Reverse(one.full_in));
    seen
}
