//! `labels.rs` without the feature `metrics`.

use std::time::Duration;

use crate::error::ConfigError;
use crate::metrics::requests::Meter;
use crate::name::Name;

#[derive(Clone, Debug, Default)]
pub(super) struct KeyLabels(());

impl KeyLabels {
    pub(super) const fn is_none(&self) -> bool {
        true
    }

    #[allow(clippy::unnecessary_wraps, reason = "with the feature it can fail")]
    pub(super) const fn meter(
        &self,
        _: &'static str,
        _: &str,
        _: Option<Duration>,
    ) -> Result<LayerMeter, ConfigError> {
        Ok(LayerMeter)
    }
}

pub(super) struct LayerMeter;

impl LayerMeter {
    pub(super) const fn of(&self, _: Option<&Name>) -> Meter {
        Meter
    }
}
