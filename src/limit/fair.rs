//! What a request asks for where tenants share the permits of a key.

use std::sync::Arc;

use http::request::Parts;

use super::cached::{CachedPlan, Found, Lookup};
use super::estimates::LayerBudget;
use super::further::{self, FurtherLimit};
use super::key::KeyExtractor;
use super::plan::Plan;
use super::required::Required;
use crate::ask::Ask;
use crate::error::{BackendError, ConfigError};
use crate::name::Name;
use crate::policy::Limit;

pub(super) type Weigh = dyn Fn(&Name, &Parts) -> u32 + Send + Sync;
pub(super) type Classify = dyn Fn(&Name, &Parts) -> u8 + Send + Sync;
pub(super) type CapOf = dyn Fn(&Name, &Parts) -> Limit + Send + Sync;
pub(super) type CostOf = dyn Fn(&Parts) -> u32 + Send + Sync;

/// How the tenant, weight, class, cost, cap, further limits and estimates of a request are found. Empty for a layer without
/// tenants, costs, further limits and budgets.
#[derive(Default)]
pub(super) struct Fair {
    pub(super) tenant: Option<TenantSource>,
    pub(super) weight: Option<Arc<Weigh>>,
    pub(super) class: Option<Arc<Classify>>,
    pub(super) cost: Option<Arc<CostOf>>,
    pub(super) each: Option<EachSource>,
    pub(super) further: Vec<FurtherLimit>,
    pub(super) budgets: Vec<LayerBudget>,
    /// The cap and the weight; the class and the cost, too, unless the layer has them from a request.
    pub(super) plan: Option<CachedPlan>,
}

pub(super) struct TenantSource {
    pub(super) extractor: Arc<dyn KeyExtractor>,
    pub(super) required: Required,
}

pub(super) enum EachSource {
    Fixed(Limit),
    Sync(Arc<CapOf>),
}

/// What a request asks for, or the lookup of its tenant's plan.
pub(super) enum Asked {
    Known(Result<Ask, (Name, BackendError)>),
    Later(Ask, Lookup<Plan>),
}

impl Fair {
    /// Whether requests ask for more than a permit of a key.
    pub(super) fn is_set(&self) -> bool {
        self.tenant.is_some()
            || self.cost.is_some()
            || !self.further.is_empty()
            || !self.budgets.is_empty()
    }

    /// Whether requests count under something besides the limit and their tenant's cap.
    pub(super) fn counts_anyway(&self) -> bool {
        !self.further.is_empty() || !self.budgets.is_empty()
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    ///
    /// If one has no effect without another, or rejects every request.
    pub(super) fn validate(
        &self,
        headroom: u32,
        limit: Option<Limit>,
        has_rate: bool,
        has_tenant_labels: bool,
    ) -> Result<(), ConfigError> {
        if self.tenant.is_none() {
            let set = [
                ("weight_by", self.weight.is_some()),
                ("class_by", self.class.is_some()),
                ("each", self.each.is_some()),
                ("plan_cached", self.plan.is_some()),
                ("tenant_labels", has_tenant_labels),
            ];
            if let Some((name, _)) = set.into_iter().find(|(_, is_set)| *is_set) {
                return Err(ConfigError::new(format!(
                    "{name} is set without a tenant to apply it to; set fair_by, too"
                )));
            }
            if let Some(each) = self.budgets.iter().find(|of| of.is_each()) {
                return Err(ConfigError::new(format!(
                    "the {} budget is of each tenant, and there are no tenants; set fair_by, too",
                    each.name()
                )));
            }
        }
        further::validate(&self.further, limit)?;
        let counts = has_rate || self.counts_anyway();
        if self.is_set() && limit == Some(Limit::Unlimited) && !counts {
            let name = if self.tenant.is_some() { "fair_by" } else { "cost_by" };
            return Err(ConfigError::new(format!(
                "{name} is set on an unlimited layer, which counts nothing; set a limit of permits, a rate, a further limit or a budget"
            )));
        }
        if self.plan.is_some() {
            let set = [("each", self.each.is_some()), ("weight_by", self.weight.is_some())];
            if let Some((name, _)) = set.into_iter().find(|(_, is_set)| *is_set) {
                return Err(ConfigError::new(format!(
                    "{name} is set beside plan_cached, whose plans have it; set one of them"
                )));
            }
        }
        if headroom > 0 && self.class.is_none() && self.plan.is_none() {
            return Err(ConfigError::new(format!(
                "headroom is {headroom}, and there is no class but 0, to which it is left; set class_by or plan_cached, too"
            )));
        }
        if let Some(EachSource::Fixed(Limit::Permits(0))) = self.each {
            return Err(ConfigError::new(
                "each is 0, which rejects every request; expected 1 permit or more, or `Limit::Unlimited`",
            ));
        }
        if let Some(EachSource::Fixed(Limit::Permits(each))) = self.each
            && let Some(Limit::Permits(limit @ 1..)) = limit
            && each > limit
        {
            return Err(ConfigError::new(format!(
                "each is {each}, more than the limit of {limit} permits, so it caps no tenant; expected 1 to \
                 {limit}, or `Limit::Unlimited`"
            )));
        }
        Ok(())
    }

    /// What a request of this tenant asks for; `None` where there are no tenants.
    pub(super) fn ask(&self, name: Name, tenant: Option<Name>, parts: &Parts) -> Asked {
        let mut ask = Ask::of(name);
        if let Some(cost) = &self.cost {
            ask = ask.cost(cost(parts));
        }
        for limit in &self.further {
            ask = limit.add_to(ask, parts);
        }
        for budget in &self.budgets {
            ask = budget.add_to(ask, parts);
        }
        let Some(tenant) = tenant else { return Asked::Known(Ok(ask)) };
        if let Some(weight) = &self.weight {
            ask = ask.weight(weight(&tenant, parts));
        }
        if let Some(class) = &self.class {
            ask = ask.class(class(&tenant, parts));
        }
        if let Some(plans) = &self.plan {
            return match plans.find(&tenant, parts) {
                Found::Known(Ok(plan)) => Asked::Known(Ok(self.with_plan(ask.by(tenant), plan))),
                Found::Known(Err(error)) => Asked::Known(Err((tenant, error))),
                Found::Later(lookup) => Asked::Later(ask.by(tenant), lookup),
            };
        }
        let cap = match &self.each {
            None => Limit::Unlimited,
            Some(EachSource::Fixed(cap)) => *cap,
            Some(EachSource::Sync(cap)) => cap(&tenant, parts),
        };
        Asked::Known(Ok(with_cap(ask.by(tenant), cap)))
    }

    /// Adds the plan of the tenant.
    pub(super) fn with_plan(&self, ask: Ask, plan: Plan) -> Ask {
        let mut ask = with_cap(ask, plan.each).weight(plan.weight);
        if self.class.is_none() {
            ask = ask.class(plan.class);
        }
        if self.cost.is_none() {
            ask = ask.cost(plan.cost);
        }
        ask
    }
}

/// Adds the cap of the tenant.
fn with_cap(ask: Ask, cap: Limit) -> Ask {
    match cap {
        Limit::Permits(permits) => ask.each(permits),
        Limit::Unlimited => ask,
    }
}
