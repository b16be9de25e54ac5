//! Further limits and budgets by name and number, and the overrides of limits.

use std::collections::BTreeMap;

use crate::budget::Budget;
use crate::name::Name;

/// The most further limits whose names a session remembers.
const NAMES_MAX: usize = 1000;

/// The names and the values of the further limits of a semaphore that this process has seen, and its budgets, by number.
#[derive(Debug, Default)]
pub(crate) struct LimitNames {
    names: BTreeMap<u32, (Name, Name)>,
    budgets: BTreeMap<u32, NamedBudget>,
}

/// A budget, and whose it is if each tenant has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedBudget {
    pub(crate) budget: Budget,
    pub(crate) tenant: Option<Name>,
}

impl LimitNames {
    /// Notes a further limit.
    pub(crate) fn note(&mut self, number: u32, limit: &Name, value: &Name) {
        if self.names.len() >= NAMES_MAX && !self.names.contains_key(&number) {
            // Invented values displace all others; who uses those names them again.
            self.names.clear();
        }
        self.names.entry(number).or_insert_with(|| (limit.clone(), value.clone()));
    }

    /// Notes a budget of a request of this tenant.
    pub(crate) fn note_budget(&mut self, number: u32, budget: &Budget, tenant: Option<&Name>) {
        let tenant = tenant.filter(|_| budget.is_each());
        let is_known = |of: &NamedBudget| of.budget == *budget && of.tenant.as_ref() == tenant;
        if self.budgets.get(&number).is_some_and(is_known) {
            return;
        }
        if self.budgets.len() >= NAMES_MAX && !self.budgets.contains_key(&number) {
            self.budgets.clear();
        }
        self.budgets
            .insert(number, NamedBudget { budget: budget.clone(), tenant: tenant.cloned() });
    }

    /// Returns the budgets, by number.
    pub(crate) const fn budgets(&self) -> &BTreeMap<u32, NamedBudget> {
        &self.budgets
    }

    /// Returns name and value of the limit with this number.
    pub(crate) fn of(&self, number: u32) -> Option<&(Name, Name)> {
        self.names.get(&number)
    }
}

/// The cap that an operator set for a further limit. It replaces what requests ask for.
///
/// [`Semaphore::set_further_limit`](crate::Semaphore::set_further_limit) changes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct FurtherLimitOverride {
    /// The semaphore.
    pub semaphore: Name,
    /// The name of the limit, such as `route`.
    pub limit: Name,
    /// Its value, such as `/chat`.
    pub value: Name,
    /// The cap, permits.
    pub cap: u32,
}

/// Returns the field that keeps the cap of a further limit, among the overrides by name. No name is empty or contains an
/// `@`, so it is neither [a tenant's](crate::tenants::limit_field) nor that of a rate, which ends with `@@rate`.
pub(crate) fn cap_field(semaphore: &Name, limit: &Name, value: &Name) -> String {
    format!("{semaphore}@@{limit}@{value}")
}

/// Returns the semaphore, the name and the value of the further limit whose cap this field keeps; `None` for any other
/// field.
pub(crate) fn limit_of_field(field: &str) -> Option<[Name; 3]> {
    let (semaphore, limit) = field.split_once("@@")?;
    let (limit, value) = limit.split_once('@')?;
    Some([Name::from_stored(semaphore)?, Name::from_stored(limit)?, Name::from_stored(value)?])
}

#[cfg(test)]
mod tests {
    use super::{cap_field, limit_of_field};
    use crate::name::Name;
    use crate::tenants::{limit_field, tenant_of_field, weight_field};

    #[test]
    fn a_field_is_of_a_tenant_or_of_a_further_limit() {
        let names = ["", "rate", "weight", "a@b@@c", "route:x"].map(Name::new);
        for (semaphore, limit) in
            names.iter().flat_map(|one| names.iter().map(move |two| (one, two)))
        {
            for value in &names {
                let field = cap_field(semaphore, limit, value);
                let of = [semaphore, limit, value].map(Name::clone);
                assert_eq!(limit_of_field(&field), Some(of), "{field}");
                assert_eq!(tenant_of_field(&field), None, "{field}");
                assert!(!field.ends_with("@@rate"), "{field}");
            }
            assert_eq!(limit_of_field(&limit_field(semaphore, limit)), None);
            assert_eq!(limit_of_field(&weight_field(semaphore, limit)), None);
        }
        assert_eq!(limit_of_field("openai@@rate"), None);
    }
}
