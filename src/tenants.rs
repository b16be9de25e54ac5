//! Tenants by name and number, and their overrides.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::budget::Budget;
use crate::name::Name;
use crate::protocol::{FurtherLimit, Tenant};

/// The most tenants whose names a session remembers: those with places in this process, and others while there is room.
const NAMES_MAX: usize = 1000;

/// The name that stands for requests without a tenant, as in a layer.
const NO_TENANT: &str = "!";

/// Numbers tenants, in the same way in all processes that have the same salt.
#[derive(Clone)]
pub(crate) struct TenantNumbers {
    salted: Arc<Sha256>,
}

impl TenantNumbers {
    pub(crate) fn salted(salt: &[u8]) -> Self {
        let mut hash = Sha256::new();
        // With the length of the salt, so that no part of the salt can pass for the beginning of a name.
        hash.update((salt.len() as u64).to_le_bytes());
        hash.update(salt);
        Self { salted: Arc::new(hash) }
    }

    /// Returns the number of a tenant, or of the requests without one.
    pub(crate) fn of(&self, tenant: Option<&Name>) -> Tenant {
        let mut hash = Sha256::clone(&self.salted);
        hash.update(tenant.map_or(NO_TENANT, Name::as_str));
        Tenant::of_hash(first_of(hash))
    }

    /// Returns the hash of a budget, which determines its number: by its name, and by the time of its burst, because how far
    /// ahead a budget can be depends on that, and processes that differ would take the budget of the others for a clock
    /// that has stepped back; with that of a tenant, or of the requests without one, if each has a budget of its own.
    pub(crate) fn of_budget(&self, budget: &Budget, of: Option<Option<&Name>>) -> u64 {
        let mut hash = Sha256::clone(&self.salted);
        hash.update("budget ");
        hash.update(budget.name());
        hash.update(budget.time_of(budget.burst_amount()).to_le_bytes());
        if let Some(tenant) = of {
            // No name of a budget has a blank.
            hash.update(" ");
            hash.update(tenant.map_or(NO_TENANT, Name::as_str));
        }
        first_of(hash)
    }

    /// Returns a further limit by its number.
    pub(crate) fn of_limit(&self, limit: &Name, value: &Name, cap: u32) -> FurtherLimit {
        let mut hash = Sha256::clone(&self.salted);
        hash.update((limit.as_str().len() as u64).to_le_bytes());
        hash.update(limit.as_str());
        hash.update(value.as_str());
        FurtherLimit::of_hash(first_of(hash), cap)
    }
}

fn first_of(hash: Sha256) -> u64 {
    let digest: [u8; 32] = hash.finalize().into();
    u64::from_le_bytes(digest.first_chunk::<8>().copied().unwrap_or_default())
}

/// Not derived, because the salt may be a secret.
impl fmt::Debug for TenantNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantNumbers").finish_non_exhaustive()
    }
}

/// The names of the tenants of a semaphore that this process has seen.
#[derive(Debug, Default)]
pub(crate) struct TenantNames {
    names: BTreeMap<Tenant, Arc<str>>,
}

impl TenantNames {
    /// Notes the name of a tenant. `is_here` returns whether a tenant has a place in this process. Returns the name
    /// that already has this number, if it is another one.
    pub(crate) fn note(
        &mut self,
        tenant: Tenant,
        name: &Name,
        is_here: impl Fn(Tenant) -> bool,
    ) -> Option<Arc<str>> {
        if let Some(known) = self.names.get(&tenant) {
            return (**known != *name.as_str()).then(|| Arc::clone(known));
        }
        if self.names.len() >= NAMES_MAX {
            // Invented names displace only each other.
            self.names.retain(|tenant, _| is_here(*tenant));
        }
        if self.names.len() < NAMES_MAX {
            self.names.insert(tenant, name.as_str().into());
        }
        None
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (Tenant, &Arc<str>)> {
        self.names.iter().map(|(tenant, name)| (*tenant, name))
    }
}

/// The cap and the weight that an operator set for a tenant. They replace what its requests ask for.
///
/// [`Semaphore::set_tenant`](crate::Semaphore::set_tenant) changes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantOverride {
    /// The cap; `None` if its requests decide.
    pub limit: Option<u32>,
    /// The weight; `None` if its requests decide.
    pub weight: Option<u32>,
}

/// A change of the override of a tenant, for [`Semaphore::set_tenant`](crate::Semaphore::set_tenant). What it does not
/// name stays as it is.
///
/// # Examples
///
/// ```
/// use tower_semaphore::operate::TenantChange;
///
/// let cap = TenantChange::new().limit(5);
/// let both = TenantChange::new().limit(5).weight(2);
/// let clear_weight = TenantChange::new().weight(None);
/// # let _ = (cap, both, clear_weight);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "`set_tenant` applies it"]
pub struct TenantChange {
    limit: Option<Option<u32>>,
    weight: Option<Option<u32>>,
}

impl TenantChange {
    /// Creates a change that changes nothing yet.
    pub const fn new() -> Self {
        Self { limit: None, weight: None }
    }

    /// Sets the cap of the tenant: it gets no more permits than this. With 0 its requests are rejected; with `None`
    /// they decide again.
    pub fn limit(self, permits: impl Into<Option<u32>>) -> Self {
        Self { limit: Some(permits.into()), ..self }
    }

    /// Sets the weight of the tenant, from 1 to [`Ask::MAX_WEIGHT`](crate::Ask::MAX_WEIGHT). With `None` its requests
    /// decide again.
    pub fn weight(self, weight: impl Into<Option<u32>>) -> Self {
        Self { weight: Some(weight.into()), ..self }
    }

    /// Returns the weight that it sets, if it sets one.
    pub(crate) fn new_weight(self) -> Option<u32> {
        self.weight.flatten()
    }

    /// Returns the fields that it changes, each with its new value. Fields to clear come first: the backend keeps a
    /// bounded number, and this makes room for the others.
    pub(crate) fn fields(self, name: &Name, tenant: &Name) -> Vec<(String, Option<u32>)> {
        let limit = self.limit.map(|limit| (limit_field(name, tenant), limit));
        let weight = self.weight.map(|weight| (weight_field(name, tenant), weight));
        let mut fields: Vec<_> = limit.into_iter().chain(weight).collect();
        fields.sort_by_key(|(_, value)| value.is_some());
        fields
    }
}

/// Returns the field that keeps the cap of a tenant, among the overrides by name. No name contains an `@`.
pub(crate) fn limit_field(name: &Name, tenant: &Name) -> String {
    format!("{name}@{tenant}")
}

/// Returns the field that keeps the weight of a tenant.
pub(crate) fn weight_field(name: &Name, tenant: &Name) -> String {
    format!("{name}@{tenant}@weight")
}

/// Returns the semaphore and the tenant whose cap or weight this field keeps; `None` for any other field.
pub(crate) fn tenant_of_field(field: &str) -> Option<(Name, Name)> {
    let (name, tenant) = field.split_once('@')?;
    let tenant = tenant.strip_suffix("@weight").unwrap_or(tenant);
    Some((Name::from_stored(name)?, Name::from_stored(tenant)?))
}

#[cfg(test)]
mod tests {
    use super::{NAMES_MAX, TenantNames, TenantNumbers};
    use crate::name::Name;
    use crate::protocol::Tenant;

    #[test]
    fn numbers_depend_on_name_and_salt_alone() {
        let number = |salt: &[u8], name| TenantNumbers::salted(salt).of(Some(&Name::new(name)));
        assert_eq!(number(b"s", "acme"), number(b"s", "acme"));
        assert_ne!(number(b"s", "acme"), number(b"t", "acme"));
        assert_ne!(number(b"s", "acme"), number(b"s", "other"));
        assert_ne!(number(b"sa", "cme"), number(b"s", "acme"));
        // The numbers must stay the same from release to release.
        assert_eq!(number(b"", "acme").number(), 3_238_251);
    }

    #[test]
    fn a_salt_is_not_shown() {
        assert_eq!(format!("{:?}", TenantNumbers::salted(b"secret")), "TenantNumbers { .. }");
    }

    #[test]
    fn a_bounded_number_of_names_is_kept() {
        let mut names = TenantNames::default();
        let first = Tenant::of_hash(0);
        for n in 0..3 * NAMES_MAX as u64 {
            let other =
                names.note(Tenant::of_hash(n), &Name::new(n.to_string()), |tenant| tenant == first);
            assert_eq!(other, None);
            assert!(names.all().any(|(tenant, _)| tenant == Tenant::of_hash(n)));
            assert!(names.all().any(|(tenant, _)| tenant == first), "it has a place");
            assert!(names.all().count() <= NAMES_MAX);
        }
        let other = names.note(first, &Name::new("other"), |_| true);
        assert_eq!(other.as_deref(), Some("0"));
    }
}
