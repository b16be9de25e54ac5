//! The names of all keys and channels in Redis.

use std::sync::Arc;

use crate::backend::prefix;
use crate::error::ConfigError;
use crate::protocol::NodeId;

/// Keys and channels: `<prefix>:{<name>}` is a semaphore, `<prefix>:@<node>` a node's mailbox;
/// `<prefix>:{!overrides}` has the overrides, `<prefix>:{!overrides}:pauses` the pauses until a time,
/// `<prefix>:{!overrides}:adaptive` the adaptive limits, and `<prefix>:@overrides` announces their changes.
///
/// Names are [encoded](crate::Name), so that nothing in them reaches this syntax. With the longest prefix and the
/// longest name, a key has 171 bytes.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: Arc<str>,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Result<Self, ConfigError> {
        if !prefix::is_allowed(prefix) {
            let allowed = prefix::ALLOWED;
            return Err(ConfigError::new(format!("key prefix is {prefix:?}; expected {allowed}")));
        }
        Ok(Self { prefix: prefix.into() })
    }

    pub(super) fn semaphore(&self, name: &str) -> Arc<str> {
        format!("{}:{{{name}}}", self.prefix).into()
    }

    /// Returns the name in a semaphore's key.
    pub(super) fn name<'a>(&self, key: &'a str) -> Option<&'a str> {
        key.strip_prefix(&*self.prefix)?.strip_prefix(":{")?.strip_suffix('}')
    }

    /// Returns the channel on which `lua/override.lua` announces changes.
    pub(super) fn overrides(&self) -> String {
        format!("{}:@overrides", self.prefix)
    }

    pub(super) fn mailbox(&self, node: NodeId) -> String {
        format!("{}:@{node}", self.prefix)
    }
}
