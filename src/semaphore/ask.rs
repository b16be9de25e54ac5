//! What is asked of a semaphore.

use super::tenants::{TenantNumbers, TenantOverride};
use crate::error::RejectReason;
use crate::name::Name;
use crate::protocol::claim::Claim;

/// A request for permits: of which semaphore, how many, and for which tenant.
///
/// The name of a semaphore is enough where all requests are alike; whatever makes a [`Name`] makes an `Ask`.
/// With a tenant, permits that come free go to the tenant with the fewest in use by weight, and within a tenant
/// to the request that came first.
///
/// ```
/// use tower_semaphore::{Ask, Policy, Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let semaphore = Semaphore::in_memory();
/// let policy = Policy::new(10);
///
/// let permit = semaphore.acquire(Ask::of("openai").by("acme").weight(2).each(4), &policy).await?;
/// assert_eq!(permit.cost(), 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Ask {
    name: Name,
    tenant: Option<Name>,
    terms: Terms,
    /// Its cost is compared, even if that is 1.
    is_shared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Terms {
    weight: u32,
    cost: u32,
    class: u8,
    each: Option<u32>,
}

/// The terms of a request that says nothing of them.
const USUAL: Terms = Terms { weight: 1, cost: 1, class: 0, each: None };

impl Ask {
    /// The highest weight of a tenant.
    pub const MAX_WEIGHT: u32 = Claim::WEIGHT_MAX;
    /// The most permits that a request may take.
    pub const MAX_COST: u32 = Claim::COST_MAX;
    /// The last class.
    pub const MAX_CLASS: u8 = Claim::CLASS_MAX;

    /// Asks for one permit of the semaphore `name`.
    pub fn of(name: impl Into<Name>) -> Self {
        Self { name: name.into(), tenant: None, terms: USUAL, is_shared: false }
    }

    /// The tenant whose request this is. Requests that name none, but a [cost](Self::cost), are one tenant
    /// together; those that ask for nothing but a name stand in a line of their own, in the order of their
    /// arrival.
    ///
    /// Fairness is only as good as the identity: take it from authentication, not from what a client may
    /// choose.
    #[must_use]
    pub fn by(mut self, tenant: impl Into<Name>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// The tenant's weight, by which its permits in use are divided where tenants are compared: with 2, it
    /// has twice as many as one with 1. From 1 to [`MAX_WEIGHT`](Self::MAX_WEIGHT); any other counts as the
    /// nearest of these. 1 unless set.
    #[must_use]
    pub const fn weight(mut self, weight: u32) -> Self {
        self.terms.weight = weight;
        self
    }

    /// How many permits the request takes, at once or not at all; 0 counts as 1. A request for more than
    /// [`MAX_COST`](Self::MAX_COST), or than it could ever have, is rejected at once. 1 unless set.
    ///
    /// One for many permits is waited for when its turn comes: permits stay free until there are enough.
    #[must_use]
    pub const fn cost(mut self, permits: u32) -> Self {
        self.terms.cost = permits;
        self.is_shared = true;
        self
    }

    /// The request's class, from 0 to [`MAX_CLASS`](Self::MAX_CLASS); a higher one counts as that. As long as
    /// a tenant of a lower class waits and may be served, none of a higher class is. 0 unless set.
    ///
    /// Within a tenant the order is that of arrival, whatever the classes. See
    /// [`PolicyBuilder::headroom`](crate::PolicyBuilder::headroom) for permits that are left to class 0.
    #[must_use]
    pub const fn class(mut self, class: u8) -> Self {
        self.terms.class = class;
        self
    }

    /// How many permits the tenant may have in use; 0: it is rejected. As many as there are, unless set.
    ///
    /// A tenant at its cap holds nobody up. What an operator
    /// [set](crate::Semaphore::set_tenant_limit) counts instead of this.
    #[must_use]
    pub const fn each(mut self, permits: u32) -> Self {
        self.terms.each = Some(permits);
        self
    }

    /// The semaphore's name.
    #[must_use]
    pub const fn name(&self) -> &Name {
        &self.name
    }

    /// The tenant, if the request names one.
    #[must_use]
    pub const fn tenant(&self) -> Option<&Name> {
        self.tenant.as_ref()
    }

    /// How many permits it asks for.
    pub(super) const fn permits(&self) -> u32 {
        self.terms.cost
    }

    /// How many its tenant may have in use, where an operator set `set` for that.
    pub(super) fn cap(&self, set: TenantOverride) -> Option<u32> {
        set.limit.or(self.terms.each)
    }

    /// Whether it is compared with others by more than its time.
    pub(super) fn is_fair(&self) -> bool {
        self.is_shared || self.tenant.is_some() || self.terms != USUAL
    }
}

impl<T: Into<Name>> From<T> for Ask {
    fn from(name: T) -> Self {
        Self::of(name)
    }
}

impl Ask {
    /// The claim that is made with this, where an operator set `set` for its tenant.
    ///
    /// # Errors
    ///
    /// Why none can be met.
    pub(super) fn claim(
        &self,
        numbers: &TenantNumbers,
        set: TenantOverride,
    ) -> Result<Claim, RejectReason> {
        let (Terms { weight, cost, class, .. }, each) = (self.terms, self.cap(set));
        if each == Some(0) {
            return Err(RejectReason::TenantLimit);
        }
        if cost > Self::MAX_COST {
            return Err(RejectReason::CostTooHigh);
        }
        Ok(Claim::new(numbers.of(self.tenant.as_ref()))
            .with_weight(set.weight.unwrap_or(weight))
            .with_cost(cost)
            .with_class(class)
            .with_each(each))
    }
}

#[cfg(test)]
mod tests {
    use super::Ask;
    use crate::error::RejectReason;
    use crate::name::Name;
    use crate::semaphore::tenants::{TenantNumbers, TenantOverride};

    #[test]
    fn a_name_alone_makes_no_claim() {
        assert!(!Ask::from("x").is_fair());
        assert!(!Ask::of(Name::new("x").part("y")).is_fair());
        assert!(!Ask::of("x").weight(1).is_fair());
        assert!(Ask::of("x").cost(1).is_fair() && Ask::of("x").by("a").is_fair());
        let big = Ask::of("x").cost(3);
        assert!(big.is_fair());
        let claim = big.claim(&TenantNumbers::salted(b""), TenantOverride::default()).unwrap();
        assert_eq!((claim.cost(), claim.weight(), claim.each()), (3, 1, None));
    }

    #[test]
    fn what_cannot_be_had_is_said() {
        let numbers = TenantNumbers::salted(b"");
        let claim = |ask: Ask, set| ask.claim(&numbers, set);
        let none = TenantOverride::default();
        assert_eq!(claim(Ask::of("x").by("a").each(0), none), Err(RejectReason::TenantLimit));
        assert_eq!(claim(Ask::of("x").by("a").cost(65), none), Err(RejectReason::CostTooHigh));
        let set = TenantOverride { limit: Some(3), weight: Some(7) };
        let claim = claim(Ask::of("x").by("a").each(0), set).unwrap();
        assert_eq!((claim.each(), claim.weight()), (Some(3), 7));
    }
}
