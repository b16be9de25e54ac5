//! Tenants that share the permits of a key.

use std::any::type_name_of_val;
use std::sync::Arc;

use http::request::Parts;

use super::ConcurrencyLimitBuilder;
#[cfg(doc)]
use crate::ask::Ask;
use crate::limit::cached::CachedPlan;
use crate::limit::fair::{EachSource, TenantSource};
use crate::limit::key::{KeyExtractor, MissingKey};
#[cfg(feature = "metrics")]
use crate::limit::labels::KeyLabels;
use crate::limit::required::{Part, Required};
use crate::name::Name;
use crate::policy::Limit;

/// # Tenants that share one quota
///
/// [`key`](Self::key) says which semaphore a request is counted in; [`fair_by`](Self::fair_by) says whose turn it
/// is in it. A permit that comes free goes to the tenant with the fewest in use, so a tenant that queues a thousand
/// requests, or whose requests take long, delays no other beyond a fair share. A tenant alone may use everything.
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
    /// Sets the extractor of the tenant.
    ///
    /// A permit that comes free goes to the tenant with the fewest in use, by weight; among equals to the one that
    /// has been at that level longest. Within a tenant, requests are served in the order in which they came.
    /// [`max_queue`](Self::max_queue) bounds the line of each tenant, [`max_waiting`](Self::max_waiting) those of all. A request without a tenant is rejected, unless
    /// [`on_missing_tenant`](Self::on_missing_tenant) says otherwise.
    ///
    /// Fairness is only as good as the identity: a client that can choose its tenant can be many. Take it from
    /// authentication; see also [`Semaphore::tenant_salt`](crate::Semaphore::tenant_salt).
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .build()
    /// # }
    /// ```
    pub fn fair_by(mut self, tenant: impl KeyExtractor) -> Self {
        let required = Required::new(Part::Tenant, None, type_name_of_val(&tenant));
        self.config.fair.tenant = Some(TenantSource { extractor: Arc::new(tenant), required });
        self
    }

    /// Sets what happens to a request without a tenant.
    ///
    /// By default the [extractor](KeyExtractor::missing_key) decides: most reject the request with 400,
    /// [`PeerIpKey`](crate::limit::PeerIpKey) with 500. The layer logs a warning at the first one, because what inserts
    /// the tenant may be further in than the layer; the response names the header that the request lacks, if the tenant
    /// is taken from one. With [`MissingKey::Shared`], requests without a tenant are one tenant together; with
    /// [`MissingKey::Bypass`], they pass without a permit.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::{HeaderKey, MissingKey};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // Anonymous requests share the turns and the cap of one tenant.
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .on_missing_tenant(MissingKey::Shared)
    ///     .build()
    /// # }
    /// ```
    pub const fn on_missing_tenant(mut self, missing_tenant: MissingKey) -> Self {
        self.missing_tenant = Some(missing_tenant);
        self
    }

    /// Sets the weight of a tenant, 1 to 64; any other counts as the nearest of these. The default is 1. See
    /// [`Ask::weight`].
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use http::request::Parts;
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// /// Inserted into the request's extensions by authentication.
    /// #[derive(Clone, Copy)]
    /// struct Plan { weight: u32 }
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .weight_by(|_: &Name, parts: &Parts| parts.extensions.get::<Plan>().map_or(1, |plan| plan.weight))
    ///     .build()
    /// # }
    /// ```
    pub fn weight_by<F>(mut self, weight: F) -> Self
    where
        F: Fn(&Name, &Parts) -> u32 + Send + Sync + 'static,
    {
        self.config.fair.weight = Some(Arc::new(weight));
        self
    }

    /// Sets the class of a request, 0 to 7. No request of a higher class is served while a tenant of a lower one
    /// may be: see [`Ask::class`]. The default is 0.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use http::request::Parts;
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // Batches are served after everything else.
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .class_by(|_: &Name, parts: &Parts| u8::from(parts.uri.path().starts_with("/batch")))
    ///     .build()
    /// # }
    /// ```
    pub fn class_by<F>(mut self, class: F) -> Self
    where
        F: Fn(&Name, &Parts) -> u8 + Send + Sync + 'static,
    {
        self.config.fair.class = Some(Arc::new(class));
        self
    }

    /// Sets how many permits only requests of class 0 may take: see
    /// [`PolicyBuilder::headroom`](crate::PolicyBuilder::headroom). Needs [`class_by`](Self::class_by) or
    /// [`plan_cached`](Self::plan_cached). Where
    /// [`limit_by`](Self::limit_by) gives a key no more than that, its requests of other classes wait in vain.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use http::request::Parts;
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // Batches take eight of ten permits at most.
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .class_by(|_: &Name, parts: &Parts| u8::from(parts.uri.path().starts_with("/batch")))
    ///     .headroom(2)
    ///     .build()
    /// # }
    /// ```
    pub const fn headroom(mut self, permits: u32) -> Self {
        self.headroom = permits;
        self.policy = self.policy.headroom(permits);
        self
    }

    /// Sets how many permits of a key one tenant may have in use. Enforced together with the limit, without another
    /// round trip. The default is no cap. It must not be more than the limit, if that is the same for all keys.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .each(4)
    ///     .build()
    /// # }
    /// ```
    pub fn each(mut self, cap: impl Into<Limit>) -> Self {
        self.each.set("each", EachSource::Fixed(cap.into()));
        self
    }

    /// Sets how many permits of a key a tenant may have in use, by tenant and request. With 0, the tenant's requests
    /// are rejected.
    ///
    /// Called for each request in the task that serves it: it must not block.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Semaphore};
    /// use http::request::Parts;
    /// use tower_semaphore::limit::HeaderKey;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .each_by(|tenant: &Name, _: &Parts| if tenant.as_str() == "acme" { 8 } else { 2 })
    ///     .build()
    /// # }
    /// ```
    pub fn each_by<F, L>(mut self, cap: F) -> Self
    where
        F: Fn(&Name, &Parts) -> L + Send + Sync + 'static,
        L: Into<Limit>,
    {
        let cap = EachSource::Sync(Arc::new(move |tenant, parts| cap(tenant, parts).into()));
        self.each.set("each_by", cap);
        self
    }

    /// Sets a source of [plans](crate::limit::Plan) by tenant, with a cache: one look-up for the cap, the weight, the class
    /// and the cost of its requests, from a database or behind an API.
    ///
    /// [`class_by`](Self::class_by) and [`cost_by`](Self::cost_by), which see the request, take the place of the plan's
    /// class and cost. A request whose plan is unknown is rejected with 503, unless
    /// [`on_failure`](crate::limit::CachedBuilder::on_failure) sets a plan for it.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::{CachedPlan, HeaderKey};
    ///
    /// # fn layer(semaphore: &Semaphore, plans: &CachedPlan) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .plan_cached(plans)
    ///     .build()
    /// # }
    /// ```
    pub fn plan_cached(mut self, plans: &CachedPlan) -> Self {
        self.config.fair.plan = Some(plans.clone());
        self
    }

    /// Sets which tenants the [metrics](crate::metrics) tell apart by a label `tenant`, in place of the label of
    /// [`key_labels`](Self::key_labels). The default is none, without such a label.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::{HeaderKey, KeyLabels};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .fair_by(HeaderKey::from_static("x-tenant"))
    ///     .tenant_labels(KeyLabels::first(100))
    ///     .build()
    /// # }
    /// ```
    #[cfg(feature = "metrics")]
    pub fn tenant_labels(mut self, labels: KeyLabels) -> Self {
        self.tenant_labels = Some(labels);
        self
    }

    /// Sets how many permits a request takes, all at once or none: see [`Ask::cost`]. The default is 1.
    ///
    /// Needs no tenants; without them, all requests of a key are in one line.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::request::Parts;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // A batch counts as four requests.
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .cost_by(|parts: &Parts| if parts.uri.path() == "/batch" { 4 } else { 1 })
    ///     .build()
    /// # }
    /// ```
    pub fn cost_by<F>(mut self, cost: F) -> Self
    where
        F: Fn(&Parts) -> u32 + Send + Sync + 'static,
    {
        self.config.fair.cost = Some(Arc::new(cost));
        self
    }
}
