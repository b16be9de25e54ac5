//! The options of a request, and its policy for outages.

use std::time::Duration;

use crate::bound::Bound;
use crate::bound_rate::BoundRate;
use crate::claim::{Claim, Tenant};
use crate::rate::Rate;

/// What happens to requests while the backend is unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnUnavailable {
    /// Rejects them, so the limit holds. The default.
    #[default]
    Refuse,
    /// Admits them, however many are in flight: there is no limit until the backend is back. While an operator has
    /// paused the semaphore or set its limit to 0, they are rejected.
    Admit,
    /// Grants this many permits in each process, and requests wait for them as usual. Permits that the process already
    /// holds count. Set it to the limit divided by the number of processes to keep the limit in the fleet, provided
    /// that no process held more than its share when the outage began; the excess is in flight until it is released. A
    /// limit that an operator set is never exceeded; 0 or a pause admits nothing.
    Local(u32),
}

/// The options of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AcquireOptions {
    /// The lease.
    pub lease: Duration,
    /// The longest queue, or line of its tenant; `None`: this place may not wait.
    pub max_queue: Option<u32>,
    /// How many places may wait in the lines of all tenants.
    pub max_waiting: u32,
    /// What happens to it while the backend is unavailable.
    pub on_unavailable: OnUnavailable,
    /// The permits that are reserved for requests of class 0.
    pub headroom: u32,
    /// How many requests may start within a time, by its policy.
    pub rate: Option<Rate>,
    /// Its claim, where tenants share the semaphore. With a rate it has one in any case, and so has each request that
    /// takes several permits: see [`Claim::without_tenant`].
    pub claim: Option<Claim>,
    /// How long its permit stays taken if the request is broken off, in ms.
    pub linger_ms: u32,
    /// For how long, in ms, its permit may go to other requests of this process after a reply said that no other
    /// process waits; 0, or with a rate or a budget: each permit is given back.
    pub reuse_ms: u32,
    /// How long, in ms, its request waits, if it is refused at once where it is expected to wait for more than twice as
    /// long; 0: it is not. Has no effect where permits are passed on.
    pub patience_ms: u32,
}

impl AcquireOptions {
    /// What the id of a place says of the limit that its request knows, and of the rate in force for it, where others
    /// have windows of up to `longest`.
    pub(super) fn bound(&self, limit: u32, rate: Option<Rate>, longest: Duration) -> Option<Bound> {
        // Without a tenant it is of class 0.
        let headroom = if self.tenant().is_some() { self.headroom } else { 0 };
        let is_bound = self.max_queue.is_some() || rate.is_some();
        is_bound.then(|| Bound { limit, headroom, rate: self.bound_rate(rate, longest) })
    }

    /// The rate as this place is judged by it. Rates are in range for each cost, which can make a part of one longer.
    fn bound_rate(&self, rate: Option<Rate>, longest: Duration) -> Option<BoundRate> {
        let rate = rate?;
        Some(rate.of_cost(self.claim.map_or(1, Claim::cost))?.kept_for(longest))
    }

    /// Its tenant, if it has one.
    pub(super) fn tenant(&self) -> Option<Tenant> {
        self.claim.filter(|claim| claim.has_tenant()).map(Claim::tenant)
    }

    /// The same, where the policy has this headroom and this rate.
    pub(super) fn reloaded(self, headroom: u32, rate: Option<Rate>) -> Self {
        let mut options = Self { headroom, rate, ..self };
        options.fit_to_rate();
        options
    }

    /// Whether one acquire can carry places of both: a call has one lease, one limit of the queue, and so on.
    pub(super) fn may_share_a_call(&self, other: &Self) -> bool {
        let common = |options: &Self| Self {
            claim: None,
            linger_ms: 0,
            reuse_ms: 0,
            patience_ms: 0,
            ..*options
        };
        common(self) == common(other)
    }

    /// Whether time keeps its grant back, and not only permits: it has a rate, or takes of a budget.
    #[inline]
    pub(super) fn is_timed(&self) -> bool {
        self.rate.is_some() || self.claim.is_some_and(Claim::has_charges)
    }

    /// Changes what does not go with a rate or a budget.
    #[inline]
    pub(super) fn fit_to_rate(&mut self) {
        if self.is_timed() {
            self.fit_to_some_rate();
        }
    }

    fn fit_to_some_rate(&mut self) {
        // The next request would start without a call.
        self.reuse_ms = 0;
        // The scripts observe no rate of a place without a claim.
        self.claim = self.claim.or_else(|| Some(Claim::without_tenant()));
    }

    pub(super) fn lease_ms(&self) -> u64 {
        u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX)
    }

    /// At most half of the lease, as policies have it.
    pub(super) fn linger(&self) -> Duration {
        Duration::from_millis(u64::from(self.linger_ms)).min(self.lease / 2)
    }

    /// How long its request waits, if it does not wait in vain.
    pub(super) fn patience(&self) -> Option<Duration> {
        let patience = Duration::from_millis(u64::from(self.patience_ms));
        (!patience.is_zero()).then_some(patience)
    }

    pub(super) fn reuse(&self) -> Duration {
        Duration::from_millis(u64::from(self.reuse_ms))
    }
}
