//! The settings of a layer, checked, and made the layer.

use std::any::type_name;
use std::sync::Arc;
use std::time::Duration;

use super::ConcurrencyLimitBuilder;
use crate::error::ConfigError;
use crate::limit::estimates;
use crate::limit::key::{GlobalKey, MissingKey};
use crate::limit::labels::LayerMeter;
use crate::limit::layer::ConcurrencyLimitLayer;
use crate::limit::required::{Part, Required};
use crate::limit::settings::{KeySource, LimitSource, OnLost, Settings};
use crate::limit::shadow::Shadow;
use crate::limit::versions::Versions;
use crate::name::Name;
use crate::policy::{Limit, Policy};
use crate::semaphore::Remembered;

/// Longest name of a layer, in bytes.
const NAME_MAX: usize = 40;
/// Longest pause that clients are told to make, before jitter.
pub(in crate::limit) const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// # Building
impl ConcurrencyLimitBuilder {
    /// Builds the layer.
    ///
    /// # Errors
    ///
    /// If no limit is set, or it is set twice; if a value is out of its range, or has no effect beside the others.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
    /// let semaphore = Semaphore::in_memory();
    /// let error = ConcurrencyLimitLayer::builder(&semaphore, "api").build().unwrap_err();
    /// assert!(error.to_string().starts_with("limit is not set"));
    /// ```
    pub fn build(mut self) -> Result<ConcurrencyLimitLayer, ConfigError> {
        self.validate()?;
        let (key, extractor) = self.take_key()?;
        let Some(limit) = self.take_limit()? else {
            return Err(ConfigError::new(
                "limit is not set; expected a number of permits, `Limit::Unlimited`, or a closure",
            ));
        };
        let fixed = match limit {
            LimitSource::Fixed(limit) => Some(limit),
            _ => None,
        };
        // Of those that a function returns, the maximum finds itself.
        let usual =
            self.policy.range().map_or(Limit::Unlimited, |range| Limit::Permits(range.max()));
        let policy = self.policy.clone().limit(fixed.unwrap_or(usual)).build()?;
        self.complete_fair(fixed, policy.rate.is_some())?;
        self.complete_budgets(&policy)?;
        if self.config.on_response.is_some()
            && fixed == Some(Limit::Unlimited)
            && policy.rate.is_none()
            && !self.config.fair.counts_anyway()
        {
            return Err(ConfigError::new(
                "on_response is set on an unlimited layer, which pauses nothing; set a limit of permits, a rate or a budget",
            ));
        }
        let meter = self.meter(&policy)?;
        if self.shadow {
            self.config.on_lost = OnLost::Continue;
        }
        Ok(ConcurrencyLimitLayer::new(Settings {
            config: self.config,
            policy,
            full_name: Name::new(&self.name),
            remembered: Remembered::default(),
            name: self.name.into(),
            key,
            key_required: Required::new(Part::Key, self.missing_key, extractor),
            limit,
            meter,
            is_metered_by_tenant: self.tenant_labels.is_some(),
            shadow: self.shadow.then(Shadow::default),
            versions: Versions::default(),
        }))
    }

    /// Checks each value by itself.
    fn validate(&self) -> Result<(), ConfigError> {
        let name = &self.name;
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(allowed) {
            return Err(ConfigError::new(format!(
                "layer name is {name:?}; expected 1 to {NAME_MAX} of A-Z a-z 0-9 . _ -"
            )));
        }
        let full_status = self.config.full_status;
        if !full_status.is_client_error() && !full_status.is_server_error() {
            return Err(ConfigError::new(format!(
                "full status is {full_status}; expected 400 to 599"
            )));
        }
        validate_missing("missing key", self.missing_key)?;
        validate_missing("missing tenant", self.missing_tenant)?;
        let retry_after = self.config.retry_after;
        if retry_after > RETRY_AFTER_MAX {
            return Err(ConfigError::new(format!(
                "retry after is {retry_after:?}; expected 0 to {RETRY_AFTER_MAX:?}"
            )));
        }
        Ok(())
    }

    /// The source of the key, with the type of its extractor.
    fn take_key(&mut self) -> Result<(KeySource, &'static str), ConfigError> {
        match (self.key.take()?, self.missing_key) {
            (Some(key), _) => Ok(key),
            (None, None) => Ok((KeySource::Sync(Arc::new(GlobalKey)), type_name::<GlobalKey>())),
            (None, Some(_)) => Err(ConfigError::new(
                "on_missing_key is set without a key that could be missing; set key, too",
            )),
        }
    }

    /// The source of the limit; one that finds itself begins at its maximum.
    fn take_limit(&mut self) -> Result<Option<LimitSource>, ConfigError> {
        let range = self.policy.range();
        let maximum = range.map(|range| LimitSource::Fixed(Limit::Permits(range.max())));
        Ok(self.limit.take()?.or(maximum))
    }

    /// Completes how tenants share a key, whose limit may be `fixed`, and checks that.
    fn complete_fair(&mut self, fixed: Option<Limit>, has_rate: bool) -> Result<(), ConfigError> {
        let fair = &mut self.config.fair;
        fair.each = self.each.take()?;
        fair.validate(self.headroom, fixed, has_rate, self.tenant_labels.is_some())?;
        match (&mut fair.tenant, self.missing_tenant) {
            (Some(tenant), missing) => tenant.required.missing = missing,
            (None, Some(_)) => {
                return Err(ConfigError::new(
                    "on_missing_tenant is set without a tenant to apply it to; set fair_by, too",
                ));
            }
            (None, None) => {}
        }
        if self.tenant_labels.is_some() && !self.key_labels.is_none() {
            return Err(ConfigError::new(
                "tenant_labels is set beside key_labels; set one of them",
            ));
        }
        Ok(())
    }

    fn complete_budgets(&mut self, policy: &Policy) -> Result<(), ConfigError> {
        let fair = &mut self.config.fair;
        if policy.reuse && !fair.budgets.is_empty() {
            return Err(ConfigError::new(
                "reuse is set beside a budget, and a request that takes over a permit would take nothing of it; expected \
                 one of the two",
            ));
        }
        for further in &fair.further {
            if fair.budgets.iter().any(|of| of.name() == further.name) {
                return Err(ConfigError::new(format!(
                    "a budget and a further limit are called {:?}; expected a name for each",
                    further.name
                )));
            }
        }
        estimates::complete(&mut fair.budgets, std::mem::take(&mut self.readers))
    }

    fn meter(&self, policy: &Policy) -> Result<LayerMeter, ConfigError> {
        // A gauge shows one value: none, where it depends on the request.
        let wait_timeout = self.config.wait_timeout.is_none().then_some(policy.wait_timeout);
        // A layer in shadow has series of its own, apart from those of an enforcing one.
        let name = if self.shadow { format!("shadow:{}", self.name) } else { self.name.clone() };
        match &self.tenant_labels {
            Some(labels) => labels.meter("tenant", &name, wait_timeout),
            None => self.key_labels.meter("key", &name, wait_timeout),
        }
    }
}

fn validate_missing(what: &str, missing: Option<MissingKey>) -> Result<(), ConfigError> {
    match missing {
        Some(MissingKey::Reject(status))
            if !status.is_client_error() && !status.is_server_error() =>
        {
            Err(ConfigError::new(format!("status for a {what} is {status}; expected 400 to 599")))
        }
        _ => Ok(()),
    }
}
