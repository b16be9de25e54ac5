//! Limits beside that of the key: those of a route, of a model, or of anything else that requests have in common.

use std::sync::Arc;

use http::request::Parts;

use super::fair::CapOf;
use super::key::KeyExtractor;
use crate::ask::Ask;
use crate::error::ConfigError;
use crate::policy::Limit;

/// The maximum length of the name of a further limit: it stands in responses.
const NAME_MAX: usize = 64;

/// A further limit of a layer.
pub(super) struct FurtherLimit {
    pub(super) name: String,
    pub(super) value: Arc<dyn KeyExtractor>,
    pub(super) cap: Cap,
}

pub(super) enum Cap {
    Fixed(Limit),
    Sync(Arc<CapOf>),
}

impl FurtherLimit {
    /// Adds this limit to what a request asks for, if the request has a value for it.
    pub(super) fn add_to(&self, ask: Ask, parts: &Parts) -> Ask {
        let Some(value) = self.value.extract(parts) else { return ask };
        let cap = match &self.cap {
            Cap::Fixed(cap) => *cap,
            Cap::Sync(cap) => cap(&value, parts),
        };
        match cap {
            Limit::Permits(cap) => ask.also(&*self.name, value, cap),
            Limit::Unlimited => ask,
        }
    }
}

/// Checks the further limits of a layer, whose own limit may be the same for all keys.
///
/// # Errors
///
/// If there are too many, or a name or a cap is out of range.
pub(super) fn validate(limits: &[FurtherLimit], own: Option<Limit>) -> Result<(), ConfigError> {
    if limits.len() > Ask::MAX_FURTHER {
        return Err(ConfigError::new(format!(
            "also is called {} times; expected at most {} further limits",
            limits.len(),
            Ask::MAX_FURTHER
        )));
    }
    for (i, limit) in limits.iter().enumerate() {
        let name = &limit.name;
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        // The last two are what refusals call the cap of a tenant and the rate.
        let is_taken = ["each", "rate"].contains(&&**name);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(allowed) || is_taken {
            return Err(ConfigError::new(format!(
                "the name of a further limit is {name:?}; expected 1 to {NAME_MAX} of A-Z a-z 0-9 . _ -, \
                 but neither \"each\" nor \"rate\""
            )));
        }
        if limits[..i].iter().any(|before| before.name == *name) {
            return Err(ConfigError::new(format!(
                "two further limits are called {name:?}; expected a name for each"
            )));
        }
        match (&limit.cap, own) {
            (Cap::Fixed(Limit::Permits(0)), _) => {
                return Err(ConfigError::new(format!(
                    "the {name} limit is 0, which rejects every request that has one; expected 1 permit or more"
                )));
            }
            (Cap::Fixed(Limit::Permits(cap)), Some(Limit::Permits(own @ 1..))) if *cap > own => {
                return Err(ConfigError::new(format!(
                    "the {name} limit is {cap}, more than the limit of {own} permits, so it never counts; expected 1 \
                     to {own}"
                )));
            }
            _ => {}
        }
    }
    Ok(())
}
