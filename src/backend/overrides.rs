//! What operators set in place of policies.

use std::collections::HashMap;
use std::sync::Arc;

use crate::protocol::id::PlaceId;
use crate::protocol::overrides::{Mode, Override};

/// What is set for all names, as of one version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Another one, whenever something was changed. 0: nothing is set.
    pub version: u64,
    /// The names for which something is set.
    pub names: HashMap<Arc<str>, Override>,
    /// The places that were revoked, each with the name of its semaphore, and must not be counted again;
    /// with the time when that is not needed any more, ms by the backend's clock.
    pub revoked: HashMap<(PlaceId, Arc<str>), u64>,
}

/// A change of what is set for one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// See [`Override::limit`].
    Limit(Option<u32>),
    /// See [`Override::mode`].
    Mode(Mode),
    /// A place of the name is revoked.
    Revoked {
        /// The place.
        id: PlaceId,
        /// For how long that is to be remembered; 0: no more.
        keep_ms: u64,
        /// Whether every process is told; else each finds it out when it looks.
        tell: bool,
    },
}

impl Change {
    /// Whether every process is told.
    #[must_use]
    pub const fn is_told(&self) -> bool {
        !matches!(self, Self::Revoked { tell: false, .. })
    }
}

impl Overrides {
    /// How many names may have something set, revoked places among them.
    pub const MOST: usize = 1000;

    /// What is set for a name.
    #[must_use]
    pub fn of(&self, name: &str) -> Override {
        self.names.get(name).copied().unwrap_or_default()
    }

    /// Changes something, as `lua/override.lua` does; `false`: as much as may is set already.
    pub fn change(&mut self, name: &Arc<str>, change: Change, now_ms: u64) -> bool {
        self.revoked.retain(|_, end| *end > now_ms);
        let room = self.names.len() + self.revoked.len() < Self::MOST;
        let mut new = self.of(name);
        match change {
            Change::Limit(limit) => new.limit = limit,
            Change::Mode(mode) => new.mode = mode,
            Change::Revoked { id, keep_ms, .. } => {
                let place = (id, Arc::clone(name));
                if keep_ms == 0 {
                    self.revoked.remove(&place);
                } else if room || self.revoked.contains_key(&place) {
                    self.revoked.insert(place, now_ms.saturating_add(keep_ms));
                } else {
                    return false;
                }
            }
        }
        if new == Override::default() {
            self.names.remove(name);
        } else if room || self.names.contains_key(name) {
            self.names.insert(Arc::clone(name), new);
        } else {
            return false;
        }
        self.version += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Change, Overrides};
    use crate::protocol::id::PlaceId;

    #[test]
    fn a_place_is_revoked_in_one_semaphore() {
        let id: PlaceId = "00000000009:1".parse().unwrap();
        let (x, y): (Arc<str>, Arc<str>) = ("x".into(), "y".into());
        let mut set = Overrides::default();
        let revoked = |keep_ms| Change::Revoked { id, keep_ms, tell: true };
        assert!(set.change(&x, revoked(10), 100));
        assert!(set.change(&y, revoked(20), 100));
        let (of_x, of_y) = ((id, Arc::clone(&x)), (id, Arc::clone(&y)));
        assert_eq!(set.revoked, [(of_x.clone(), 110), (of_y.clone(), 120)].into());
        assert!(set.change(&y, revoked(0), 100));
        assert_eq!(set.revoked, [(of_x, 110)].into());
        assert!(set.change(&y, revoked(20), 110));
        assert_eq!(set.revoked, [(of_y, 130)].into(), "the other one has ended");
    }
}
