//! The metric series of a layer's requests. `labels_disabled.rs` is the same without the feature.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use crate::error::ConfigError;
use crate::metrics::requests::Meter;
use crate::name::Name;

/// The keys that the metrics of a layer tell apart, with a bound.
///
/// Each label value has its own series for each outcome: with [`first`] or [`listed`] of *n* keys, a layer has some
/// sixty times *n* + 1 series, histograms included. All keys beyond the bound have the label `other`.
///
/// ```
/// use tower_semaphore::limit::KeyLabels;
///
/// let labels = KeyLabels::listed(["acme", "globex"]);
/// ```
///
/// [`first`]: Self::first
/// [`listed`]: Self::listed
#[derive(Clone, Debug, Default)]
pub struct KeyLabels {
    kind: Kind,
}

#[derive(Clone, Debug, Default)]
enum Kind {
    #[default]
    None,
    Listed(Vec<Name>),
    First(usize),
}

impl KeyLabels {
    /// The most keys that can be told apart: 10,000.
    pub const MAX: usize = 10_000;

    /// Tells no keys apart: there is no label.
    #[must_use]
    pub const fn none() -> Self {
        Self { kind: Kind::None }
    }

    /// Tells these keys apart. The label's value is [the name as it is stored](Name::as_str).
    pub fn listed<K: Into<Name>>(keys: impl IntoIterator<Item = K>) -> Self {
        Self { kind: Kind::Listed(keys.into_iter().map(Into::into).collect()) }
    }

    /// Tells the first `most` keys apart that the process sees. For trusted keys only: a client that can choose its
    /// key can use up the bound. In that case, [list](Self::listed) the keys that matter.
    ///
    /// ```
    /// use tower_semaphore::limit::KeyLabels;
    ///
    /// let labels = KeyLabels::first(100);
    /// ```
    #[must_use]
    pub const fn first(most: usize) -> Self {
        Self { kind: Kind::First(most) }
    }

    pub(super) const fn is_none(&self) -> bool {
        matches!(self.kind, Kind::None)
    }

    /// The meter of a layer of this name; `label` is that of the keys. `wait_timeout`: the one of all its
    /// requests, if there is one.
    pub(super) fn meter(
        &self,
        label: &'static str,
        layer: &str,
        wait_timeout: Option<Duration>,
    ) -> Result<LayerMeter, ConfigError> {
        let count = match &self.kind {
            Kind::None => 0,
            Kind::Listed(keys) => keys.len(),
            Kind::First(most) => *most,
        };
        if count > Self::MAX {
            return Err(ConfigError::new(format!(
                "number of {label} labels is {count}; expected 0 to {}",
                Self::MAX
            )));
        }
        let layer: Arc<str> = layer.into();
        let registered = |label| {
            let meter = Meter::new(&layer, label, wait_timeout);
            meter.register();
            meter
        };
        let of = |key: &str| registered(Some((label, key.into())));
        let by_key = match &self.kind {
            Kind::None => {
                return Ok(LayerMeter::whole(registered(None)));
            }
            Kind::Listed(keys) => keys.iter().map(|key| (key.clone(), of(key.as_str()))).collect(),
            Kind::First(_) => HashMap::new(),
        };
        let keyed = Keyed {
            label,
            layer: Arc::clone(&layer),
            wait_timeout,
            most: count,
            by_key: by_key.into(),
        };
        Ok(LayerMeter { rest: of("other"), keyed: Some(keyed) })
    }
}

/// Counts the requests of a layer.
pub(super) struct LayerMeter {
    rest: Meter,
    keyed: Option<Keyed>,
}

struct Keyed {
    label: &'static str,
    layer: Arc<str>,
    wait_timeout: Option<Duration>,
    most: usize,
    by_key: RwLock<HashMap<Name, Meter>>,
}

impl LayerMeter {
    const fn whole(meter: Meter) -> Self {
        Self { rest: meter, keyed: None }
    }

    /// The meter for requests with this key, if they have one.
    pub(super) fn of(&self, key: Option<&Name>) -> Meter {
        let (Some(keyed), Some(key)) = (&self.keyed, key) else { return self.rest.clone() };
        let known = keyed.by_key.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(meter) = known.get(key) {
            return meter.clone();
        }
        if known.len() >= keyed.most {
            return self.rest.clone();
        }
        drop(known);
        let mut known = keyed.by_key.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= keyed.most && !known.contains_key(key) {
            return self.rest.clone();
        }
        let new = || {
            let label = (keyed.label, key.as_str().into());
            Meter::new(&keyed.layer, Some(label), keyed.wait_timeout)
        };
        known.entry(key.clone()).or_insert_with(new).clone()
    }
}
