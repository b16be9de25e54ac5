//! A request for permits.

use crate::budget::Budget;
use crate::error::RejectReason;
use crate::name::Name;
use crate::protocol::{Charges, Claim, Further};
use crate::tenants::{TenantNumbers, TenantOverride};

/// A request for permits: which semaphore, how many permits, and for which tenant.
///
/// If all requests are alike, the name of a semaphore is enough: anything that converts into a [`Name`] converts into
/// an
/// `Ask`. With tenants, a freed permit goes to the tenant with the fewest permits in use by weight, and within a tenant
/// to the request that came first.
///
/// # Examples
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
    further: Vec<FurtherAsk>,
    /// What it is estimated to use.
    estimates: Vec<Estimate>,
    /// A cost was set, even if it is 1.
    is_shared: bool,
}

/// A further limit of a request: its name, the value for which it counts, and its cap.
#[derive(Clone, Debug)]
pub(crate) struct FurtherAsk {
    pub(crate) limit: Name,
    pub(crate) value: Name,
    pub(crate) cap: u32,
}

/// What a request is estimated to use of a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Estimate {
    pub(crate) budget: Budget,
    pub(crate) units: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Terms {
    weight: u32,
    cost: u32,
    class: u8,
    each: Option<u32>,
}

/// The terms of a request that sets none.
const DEFAULT_TERMS: Terms = Terms { weight: 1, cost: 1, class: 0, each: None };

impl Ask {
    /// The maximum weight of a tenant.
    pub const MAX_WEIGHT: u32 = Claim::WEIGHT_MAX;
    /// The maximum number of permits that a request may take.
    pub const MAX_COST: u32 = Claim::COST_MAX;
    /// The highest class.
    pub const MAX_CLASS: u8 = Claim::CLASS_MAX;
    /// The maximum number of [further limits](Self::also).
    pub const MAX_FURTHER: usize = Further::MAX;
    /// The maximum number of [budgets](Self::estimate).
    pub const MAX_BUDGETS: usize = Charges::MAX;

    /// Asks for one permit of the semaphore `name`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Ask, Name};
    ///
    /// let ask = Ask::of("openai");
    /// assert_eq!(ask.name(), &Name::new("openai"));
    /// assert_eq!(ask.tenant(), None);
    /// ```
    pub fn of(name: impl Into<Name>) -> Self {
        Self {
            name: name.into(),
            tenant: None,
            terms: DEFAULT_TERMS,
            further: Vec::new(),
            estimates: Vec::new(),
            is_shared: false,
        }
    }

    /// Sets the tenant of the request.
    ///
    /// Requests without a tenant wait in one line, in the order of their arrival. Those among them that set a weight, a
    /// class or a cap, or take of a budget of [each](Budget::each) tenant, count as one tenant.
    ///
    /// Fairness is only as good as the identity: take it from authentication, not from a value that clients choose.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Ask;
    ///
    /// let ask = Ask::of("openai").by("acme");
    /// # let _ = ask;
    /// ```
    #[must_use]
    pub fn by(mut self, tenant: impl Into<Name>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Sets the weight of the tenant. When tenants are compared, their permits in use are divided by their weights: a
    /// tenant with weight 2 gets twice as many as one with weight 1.
    ///
    /// The default is 1, the maximum [`MAX_WEIGHT`](Self::MAX_WEIGHT). A value out of range counts as the nearest one
    /// in range.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Ask;
    ///
    /// let ask = Ask::of("openai").by("acme").weight(2);
    /// # let _ = ask;
    /// ```
    #[must_use]
    pub const fn weight(mut self, weight: u32) -> Self {
        self.terms.weight = weight;
        self
    }

    /// Sets how many permits the request takes. It gets all of them at once or none.
    ///
    /// The default is 1; 0 counts as 1. A request for more than [`MAX_COST`](Self::MAX_COST), or for more than it could
    /// ever get, is rejected at once. When a request for many permits is next, permits stay free until there are
    /// enough. Under a [rate](crate::PolicyBuilder::rate) it takes as many starts.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Ask;
    ///
    /// // A large model counts as four small ones.
    /// let ask = Ask::of("gpu").cost(4);
    /// # let _ = ask;
    /// ```
    #[must_use]
    pub const fn cost(mut self, permits: u32) -> Self {
        self.terms.cost = permits;
        self.is_shared = true;
        self
    }

    /// Sets the class of the request, from 0 to [`MAX_CLASS`](Self::MAX_CLASS); a higher value counts as the maximum.
    /// No request of a higher class is served while a tenant of a lower class waits and may be served.
    ///
    /// The default is 0. Requests of one tenant keep the order of their arrival, whatever their classes. See
    /// [`PolicyBuilder::headroom`](crate::PolicyBuilder::headroom) for permits that are reserved for class 0.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Ask;
    ///
    /// // Served after all interactive requests, which are of class 0.
    /// let ask = Ask::of("openai").by("nightly").class(1);
    /// # let _ = ask;
    /// ```
    #[must_use]
    pub const fn class(mut self, class: u8) -> Self {
        self.terms.class = class;
        self
    }

    /// Sets the cap of the tenant: the number of permits that it may have in use. With 0 its requests are rejected.
    ///
    /// By default there is no cap except the limit. A tenant at its cap does not delay others. An operator's
    /// [override](crate::Semaphore::set_tenant) replaces this.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Ask;
    ///
    /// let ask = Ask::of("openai").by("acme").each(4);
    /// # let _ = ask;
    /// ```
    #[must_use]
    pub const fn each(mut self, permits: u32) -> Self {
        self.terms.each = Some(permits);
        self
    }

    /// Adds a further limit: of all requests with the same `value` for this `limit`, such as a route or a model, no more
    /// than `cap` permits are in use, whoever asks. With 0 the request is rejected.
    ///
    /// The request gets a permit under the limit of the semaphore, that of its tenant, and each further one in one step, or
    /// waits and holds none. A full limit delays nobody who does not need it: the other requests of the same tenant go on.
    /// Requests with the same tenant and the same further limits are served in the order of their arrival; among others
    /// that could go, the tenant with the fewest permits in use is next, and without tenants the first that came. With a
    /// [cost](Self::cost) the request takes as many permits under each limit.
    ///
    /// With [`Limit::Unlimited`](crate::Limit::Unlimited) in the policy, the request counts under its other limits all the
    /// same.
    ///
    /// Up to [`MAX_FURTHER`](Self::MAX_FURTHER) limits with different names; a request with more is rejected with
    /// [`InvalidLimits`](RejectReason::InvalidLimits). Where requests of one value bring different caps, each is judged by
    /// its own when its turn comes, and those behind it wait.
    ///
    /// An operator's [override](crate::Semaphore::set_further_limit) replaces the cap.
    ///
    /// Limits and values are numbered as tenants are: by a [salted](crate::Semaphore::tenant_salt) hash of 24 bits.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{AcquireError, Ask, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), AcquireError> {
    /// # let semaphore = Semaphore::in_memory();
    /// let policy = Policy::new(50);
    /// let chat = |model: &str| Ask::of("llm").by("acme").also("route", "/chat", 20).also("model", model, 1);
    /// let _opus = semaphore.acquire(chat("opus"), &policy).await?;
    ///
    /// let error = semaphore.try_acquire(chat("opus"), &policy).await.unwrap_err();
    /// let AcquireError::Rejected(rejected) = error else { panic!("{error}") };
    /// assert_eq!(rejected.limit_name(), Some("model"));
    /// let _haiku = semaphore.acquire(chat("haiku"), &policy).await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn also(mut self, limit: impl Into<Name>, value: impl Into<Name>, cap: u32) -> Self {
        self.further.push(FurtherAsk { limit: limit.into(), value: value.into(), cap });
        self
    }

    /// Has the request take of a [`Budget`] what it is estimated to use, with its permit, in the same step. See
    /// [`Permit::settle`](crate::Permit::settle) for what it truly used.
    ///
    /// Who is next and has too little waits, and all behind it wait, too, whatever they ask for: unlike a
    /// [further limit](Self::also), a budget that is used up delays everybody. One of [each](Budget::each) tenant delays
    /// that tenant alone: of its requests with the same further limits, all behind the first one that waits. An estimate above the budget's
    /// [burst](Budget::burst) is rejected with [`CostTooHigh`](RejectReason::CostTooHigh). An estimate of 0 takes nothing, and
    /// is granted unless others have used more than there was. Up to
    /// [`MAX_BUDGETS`](Self::MAX_BUDGETS) budgets with different names; a request with more is rejected with
    /// [`InvalidLimits`](RejectReason::InvalidLimits).
    ///
    /// With [`Limit::Unlimited`](crate::Limit::Unlimited) in the policy, the request takes of its budgets all the same. With
    /// a budget, permits are not [reused](crate::PolicyBuilder::reuse).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{AcquireError, Ask, Budget, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let semaphore = Semaphore::in_memory();
    /// let tokens = Budget::new("tokens", 80_000, Duration::from_secs(60))?;
    /// let ask = || Ask::of("openai").by("acme").estimate(&tokens, 50_000);
    /// let _permit = semaphore.acquire(ask(), &Policy::new(10)).await?;
    ///
    /// let error = semaphore.try_acquire(ask(), &Policy::new(10)).await.unwrap_err();
    /// let AcquireError::Rejected(rejected) = error else { panic!("{error}") };
    /// assert_eq!(rejected.limit_name(), Some("tokens"));
    /// assert!(rejected.ends_in.is_some_and(|wait| wait < Duration::from_secs(16)));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn estimate(mut self, budget: &Budget, units: u64) -> Self {
        self.estimates.push(Estimate { budget: budget.clone(), units });
        self
    }

    /// Returns the name of the semaphore.
    #[must_use]
    pub const fn name(&self) -> &Name {
        &self.name
    }

    /// Returns the tenant, if the request has one.
    #[must_use]
    pub const fn tenant(&self) -> Option<&Name> {
        self.tenant.as_ref()
    }

    /// Returns the number of permits that it asks for.
    pub(crate) const fn permits(&self) -> u32 {
        self.terms.cost
    }

    /// Returns the cap of its tenant, given the override of that tenant.
    pub(crate) fn cap(&self, set: TenantOverride) -> Option<u32> {
        set.limit.or(self.terms.each)
    }

    /// Returns whether it needs a claim: without one, only the time of its arrival counts.
    pub(crate) fn is_fair(&self) -> bool {
        self.is_shared
            || self.tenant.is_some()
            || self.terms != DEFAULT_TERMS
            || !self.further.is_empty()
            || !self.estimates.is_empty()
    }

    /// Returns whether it counts under something besides the limit of the semaphore and its tenant's cap.
    pub(crate) const fn counts_anyway(&self) -> bool {
        !self.further.is_empty() || !self.estimates.is_empty()
    }

    /// Returns what it is estimated to use.
    pub(crate) fn estimates(&self) -> &[Estimate] {
        &self.estimates
    }

    /// Returns its further limits.
    pub(crate) fn further(&self) -> &[FurtherAsk] {
        &self.further
    }
}

impl<T: Into<Name>> From<T> for Ask {
    fn from(name: T) -> Self {
        Self::of(name)
    }
}

impl Ask {
    /// Returns the claim of this request, given the override of its tenant, and the cap in force of each further limit.
    ///
    /// # Errors
    ///
    /// If it can never be met.
    pub(crate) fn claim(
        &self,
        numbers: &TenantNumbers,
        set: TenantOverride,
        cap_of: impl Fn(&FurtherAsk) -> u32,
    ) -> Result<Claim, RejectReason> {
        let (Terms { weight, cost, class, .. }, each) = (self.terms, self.cap(set));
        if each == Some(0) {
            return Err(RejectReason::TenantLimit);
        }
        if cost > Self::MAX_COST {
            return Err(RejectReason::CostTooHigh);
        }
        let is_nobodys =
            self.tenant.is_none() && !self.estimates.iter().any(|of| of.budget.is_each());
        let claim = if is_nobodys && self.terms == (Terms { cost, ..DEFAULT_TERMS }) {
            Claim::without_tenant().with_cost(cost)
        } else {
            Claim::new(numbers.of(self.tenant.as_ref()))
                .with_weight(set.weight.unwrap_or(weight))
                .with_cost(cost)
                .with_class(class)
                .with_each(each)
        };
        let claim = self.with_charges(claim, numbers)?;
        if self.further.is_empty() { Ok(claim) } else { self.with_further(claim, numbers, cap_of) }
    }

    fn with_charges(&self, claim: Claim, numbers: &TenantNumbers) -> Result<Claim, RejectReason> {
        let estimates = &self.estimates;
        let is_twice = |(i, one): (usize, &Estimate)| {
            estimates[..i].iter().any(|before| before.budget.name() == one.budget.name())
        };
        if estimates.len() > Self::MAX_BUDGETS || estimates.iter().enumerate().any(is_twice) {
            return Err(RejectReason::InvalidLimits);
        }
        estimates.iter().try_fold(claim, |claim, Estimate { budget, units }| {
            let tenant = budget.is_each().then_some(self.tenant.as_ref());
            let charge = budget.charge(numbers.of_budget(budget, tenant), *units);
            Ok(claim.charged(charge.ok_or(RejectReason::CostTooHigh)?))
        })
    }

    fn with_further(
        &self,
        claim: Claim,
        numbers: &TenantNumbers,
        cap_of: impl Fn(&FurtherAsk) -> u32,
    ) -> Result<Claim, RejectReason> {
        let is_twice = |(i, one): (usize, &FurtherAsk)| {
            self.further[..i].iter().any(|before| before.limit == one.limit)
        };
        if self.further.len() > Self::MAX_FURTHER || self.further.iter().enumerate().any(is_twice) {
            return Err(RejectReason::InvalidLimits);
        }
        (0..).zip(&self.further).try_fold(claim, |claim, (index, one)| match cap_of(one) {
            0 => Err(RejectReason::FurtherLimit(index)),
            cap => Ok(claim.also(numbers.of_limit(&one.limit, &one.value, cap))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Ask;
    use crate::error::RejectReason;
    use crate::name::Name;
    use crate::tenants::{TenantNumbers, TenantOverride};

    #[test]
    fn a_name_alone_makes_no_claim() {
        assert!(!Ask::from("x").is_fair());
        assert!(!Ask::of(Name::new("x").part("y")).is_fair());
        assert!(!Ask::of("x").weight(1).is_fair());
        assert!(Ask::of("x").cost(1).is_fair() && Ask::of("x").by("a").is_fair());
        let big = Ask::of("x").cost(3);
        assert!(big.is_fair());
        let claim = big
            .claim(&TenantNumbers::salted(b""), TenantOverride::default(), |one| one.cap)
            .unwrap();
        assert_eq!((claim.cost(), claim.weight(), claim.each()), (3, 1, None));
    }

    #[test]
    fn further_limits_are_part_of_the_claim() {
        let numbers = TenantNumbers::salted(b"");
        let claim = |ask: Ask| ask.claim(&numbers, TenantOverride::default(), |one| one.cap);
        let route = |value: &str, cap| Ask::of("x").also("route", value, cap);
        let one = claim(route("/a", 3)).unwrap();
        assert!(one.has_further() && !one.has_tenant() && route("/a", 3).is_fair());
        assert_eq!(one.further().iter().map(|limit| limit.cap()).collect::<Vec<_>>(), [3]);
        let number = |ask: Ask| claim(ask).unwrap().further().iter().next().unwrap().number();
        assert_eq!(number(route("/a", 3)), number(route("/a", 4)));
        assert_ne!(number(route("/a", 3)), number(route("/b", 3)));
        // Neither name nor value can pass for a part of the other.
        let [ab, a] = [("ab", "c"), ("a", "bc")].map(|(l, v)| number(Ask::of("x").also(l, v, 1)));
        assert_ne!(ab, a);
        let capless = route("/a", 3).also("model", "m", 0);
        assert_eq!(claim(capless), Err(RejectReason::FurtherLimit(1)));
        assert_eq!(claim(route("/a", 3).also("route", "/b", 3)), Err(RejectReason::InvalidLimits));
        let four = ["a", "b", "c"].into_iter().fold(route("/a", 3), |ask, l| ask.also(l, "v", 1));
        assert_eq!(claim(four), Err(RejectReason::InvalidLimits));
    }

    #[test]
    fn a_request_that_can_never_be_met_is_rejected() {
        let numbers = TenantNumbers::salted(b"");
        let claim = |ask: Ask, set| ask.claim(&numbers, set, |one| one.cap);
        let none = TenantOverride::default();
        assert_eq!(claim(Ask::of("x").by("a").each(0), none), Err(RejectReason::TenantLimit));
        assert_eq!(claim(Ask::of("x").by("a").cost(65), none), Err(RejectReason::CostTooHigh));
        let set = TenantOverride { limit: Some(3), weight: Some(7) };
        let claim = claim(Ask::of("x").by("a").each(0), set).unwrap();
        assert_eq!((claim.each(), claim.weight()), (Some(3), 7));
    }
}
