//! How a layer is told of tenants.

use std::sync::Arc;

use http::request::Parts;

use super::cached::CachedLimit;
use super::fair::EachSource;
use super::key::KeyExtractor;
#[cfg(feature = "metrics")]
use super::labels::KeyLabels;
use super::layer::ConcurrencyLimitBuilder;
use crate::name::Name;
#[cfg(doc)]
use crate::semaphore::Ask;
use crate::semaphore::Limit;

/// # Tenants that share one quota
///
/// [`key`](Self::key) says which semaphore a request is counted in; `fair_by` says whose turn it is in it. A
/// permit that comes free goes to the tenant with the fewest in use, so one that queues a thousand requests,
/// or whose requests take long, makes nobody wait longer than a fair share does. A tenant alone may use
/// everything.
///
/// ```
/// use http::request::Parts;
/// use tower_semaphore::limit::HeaderKey;
/// use tower_semaphore::{ConcurrencyLimitLayer, Name, Semaphore};
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// let semaphore = Semaphore::in_memory();
/// let layer = ConcurrencyLimitLayer::builder(&semaphore, "openai")
///     .limit(10)
///     .fair_by(HeaderKey::from_static("x-tenant"))
///     .weight_by(|tenant: &Name, _: &Parts| if tenant.as_str() == "acme" { 3 } else { 1 })
///     .each(4)
///     .class_by(|_: &Name, parts: &Parts| u8::from(parts.uri.path().starts_with("/batch")))
///     .headroom(2)
///     .build()?;
/// # Ok(()) }
/// ```
impl ConcurrencyLimitBuilder {
    /// The tenant whose request it is. Permits of a key that come free go to the tenant with the fewest in use,
    /// by weight; among equals to the one that has been at that level longest. Within a tenant: first come,
    /// first served. Requests of no tenant are one tenant together.
    ///
    /// Fairness is only as good as the identity: a client that can choose its tenant can be many. Take it from
    /// authentication; see also [`Semaphore::tenant_salt`](crate::Semaphore::tenant_salt).
    ///
    /// [`max_queue`](Self::max_queue) then bounds the line of each tenant.
    pub fn fair_by(mut self, tenant: impl KeyExtractor) -> Self {
        self.fair.tenant = Some(Arc::new(tenant));
        self
    }

    /// The weight of a tenant, from 1 to 64; any other counts as the nearest of these. See [`Ask::weight`]. 1
    /// unless set.
    pub fn weight_by<F>(mut self, weight: F) -> Self
    where
        F: Fn(&Name, &Parts) -> u32 + Send + Sync + 'static,
    {
        self.fair.weight = Some(Arc::new(weight));
        self
    }

    /// The class of a request, from 0 to 7; as long as a tenant of a lower one may be served, none of a higher
    /// one is: see [`Ask::class`]. 0 unless set.
    pub fn class_by<F>(mut self, class: F) -> Self
    where
        F: Fn(&Name, &Parts) -> u8 + Send + Sync + 'static,
    {
        self.fair.class = Some(Arc::new(class));
        self
    }

    /// How many permits only requests of class 0 may take: see
    /// [`PolicyBuilder::headroom`](crate::PolicyBuilder::headroom). Where [`limit_by`](Self::limit_by) gives a key
    /// no more than that, its requests of other classes wait in vain.
    pub const fn headroom(mut self, permits: u32) -> Self {
        self.headroom = permits;
        self.policy = self.policy.headroom(permits);
        self
    }

    /// How many permits of a key one tenant may have in use, in the same step and round trip as the limit. As
    /// many as there are, unless set.
    pub fn each(mut self, cap: impl Into<Limit>) -> Self {
        self.fair.each = Some(EachSource::Fixed(cap.into()));
        self
    }

    /// How many permits of a key a tenant may have in use, by tenant: called for each request, so it should be
    /// quick. 0: the tenant is refused.
    pub fn each_by<F, L>(mut self, cap: F) -> Self
    where
        F: Fn(&Name, &Parts) -> L + Send + Sync + 'static,
        L: Into<Limit>,
    {
        self.fair.each =
            Some(EachSource::Sync(Arc::new(move |tenant, parts| cap(tenant, parts).into())));
        self
    }

    /// How many permits of a key a tenant may have in use, from a source of yours whose answers are remembered:
    /// see [`limit_cached`](Self::limit_cached). It is asked by tenant.
    pub fn each_cached(mut self, caps: &CachedLimit) -> Self {
        self.fair.each = Some(EachSource::Cached(caps.clone()));
        self
    }

    /// The tenants that the [metrics](crate::metrics) tell apart, by a label `tenant` in place of that of
    /// [`key_labels`](Self::key_labels). None unless set: there is no such label then.
    #[cfg(feature = "metrics")]
    pub fn tenant_labels(mut self, labels: KeyLabels) -> Self {
        self.tenant_labels = Some(labels);
        self
    }

    /// How many permits a request takes, at once or not at all: see [`Ask::cost`]. 1 unless set.
    ///
    /// Needs no tenants; without them, all requests of a key stand in one line.
    pub fn cost_by<F>(mut self, cost: F) -> Self
    where
        F: Fn(&Parts) -> u32 + Send + Sync + 'static,
    {
        self.fair.cost = Some(Arc::new(cost));
        self
    }
}
