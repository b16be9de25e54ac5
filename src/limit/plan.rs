//! What a tenant may have, and how its turns count.

#[cfg(doc)]
use crate::ask::Ask;
use crate::policy::Limit;

/// The plan of a tenant: the cap, the weight, the class and the cost of its requests, in one answer.
///
/// For [`plan_cached`](super::ConcurrencyLimitBuilder::plan_cached), which looks it up by tenant. The limit that all
/// tenants share is not part of it: see [`limit_cached`](super::ConcurrencyLimitBuilder::limit_cached).
///
/// ```
/// use tower_semaphore::limit::Plan;
///
/// let free = Plan::new().each(1);
/// let paid = Plan::new().each(6).weight(3);
/// let batch = Plan::new().class(1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Plan {
    pub(super) each: Limit,
    pub(super) weight: u32,
    pub(super) class: u8,
    pub(super) cost: u32,
}

impl Plan {
    /// A plan without a cap, of weight 1 and class 0, whose requests cost one permit.
    pub const fn new() -> Self {
        Self { each: Limit::Unlimited, weight: 1, class: 0, cost: 1 }
    }

    /// Sets how many permits of a key the tenant may have in use. With 0, its requests are rejected.
    pub fn each(mut self, cap: impl Into<Limit>) -> Self {
        self.each = cap.into();
        self
    }

    /// Sets the weight, 1 to 64; any other counts as the nearest of these. See [`Ask::weight`].
    pub const fn weight(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }

    /// Sets the class, 0 to 7; a higher one counts as 7. See [`Ask::class`].
    pub const fn class(mut self, class: u8) -> Self {
        self.class = class;
        self
    }

    /// Sets how many permits each request takes, 1 to 64, all at once or none. See [`Ask::cost`].
    pub const fn cost(mut self, permits: u32) -> Self {
        self.cost = permits;
        self
    }
}

impl Default for Plan {
    fn default() -> Self {
        Self::new()
    }
}
