//! What operators set in place of policies.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::ledger::PlaceId;

/// What an operator set for one name in place of its policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Override {
    /// Permits; `None`: as many as the policy says.
    pub limit: Option<u32>,
    /// Whether permits are given out at all.
    pub mode: Mode,
}

/// Whether permits of a name are given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// As always.
    #[default]
    Open,
    /// To nobody. Who waits goes on waiting, and newcomers queue or are refused, as the policy lets
    /// them.
    Paused,
    /// To those who wait already. Newcomers are refused.
    Draining,
}

/// What is set for all names, as of one version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Another one, whenever something was changed. 0: nothing is set.
    pub version: u64,
    /// The names for which something is set.
    pub names: HashMap<Arc<str>, Override>,
    /// The places that were revoked, and must not be counted again.
    pub revoked: HashMap<PlaceId, Revocation>,
}

/// A place that was revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// The name of its semaphore.
    pub name: Arc<str>,
    /// When this is not needed any more, ms by the backend's clock.
    pub end: u64,
}

/// A change of what is set for one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// See [`Override::limit`].
    Limit(Option<u32>),
    /// See [`Override::mode`].
    Mode(Mode),
    /// A place is revoked.
    Revoked {
        /// The place.
        id: PlaceId,
        /// For how long that is to be remembered; 0: no more.
        keep_ms: u64,
    },
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
    pub(super) fn change(&mut self, name: &Arc<str>, change: Change, now_ms: u64) -> bool {
        self.revoked.retain(|_, revocation| revocation.end > now_ms);
        let room = self.names.len() + self.revoked.len() < Self::MOST;
        let mut new = self.of(name);
        match change {
            Change::Limit(limit) => new.limit = limit,
            Change::Mode(mode) => new.mode = mode,
            Change::Revoked { id, keep_ms: 0 } => {
                self.revoked.remove(&id);
            }
            Change::Revoked { id, keep_ms } => {
                if !room && !self.revoked.contains_key(&id) {
                    return false;
                }
                let end = now_ms.saturating_add(keep_ms);
                self.revoked.insert(id, Revocation { name: Arc::clone(name), end });
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

/// As it stands in Redis.
impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            Some(limit) => write!(f, "{limit} {}", self.mode.as_str()),
            None => write!(f, "- {}", self.mode.as_str()),
        }
    }
}

/// As it stands in Redis.
impl FromStr for Override {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (limit, mode) = text.split_once(' ').ok_or(())?;
        let limit = if limit == "-" { None } else { Some(limit.parse().map_err(|_| ())?) };
        let modes = [Mode::Open, Mode::Paused, Mode::Draining];
        let mode = modes.into_iter().find(|known| known.as_str() == mode).ok_or(())?;
        Ok(Self { limit, mode })
    }
}

impl Mode {
    /// The mode as one lower-case word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Paused => "paused",
            Self::Draining => "draining",
        }
    }
}
