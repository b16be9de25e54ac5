//! A setting that several methods make, of which one is called, once.

use crate::error::ConfigError;

/// A setting. The second call of one of its methods is an error when the layer is built: the first would have no
/// effect.
pub(super) struct Once<T> {
    name: &'static str,
    /// With the method that set it.
    set: Option<(&'static str, T)>,
    again: Option<&'static str>,
}

impl<T> Once<T> {
    pub(super) const fn new(name: &'static str) -> Self {
        Self { name, set: None, again: None }
    }

    pub(super) fn set(&mut self, method: &'static str, value: T) {
        if self.set.is_some() {
            self.again.get_or_insert(method);
        } else {
            self.set = Some((method, value));
        }
    }

    /// Takes the value, if it was set.
    ///
    /// # Errors
    ///
    /// If it was set twice.
    pub(super) fn take(&mut self) -> Result<Option<T>, ConfigError> {
        let name = self.name;
        match (self.set.take(), self.again) {
            (Some((first, _)), Some(second)) => Err(ConfigError::new(format!(
                "{name} is set by `{first}` and again by `{second}`; set it once"
            ))),
            (set, _) => Ok(set.map(|(_, value)| value)),
        }
    }
}
