//! The overrides that are set in place of policies.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::BackendError;
use crate::protocol::{
    Adapted, Adaptive, Adjustment, Mode, Override, Pause, PauseCause, PlaceId, Rate,
};

/// All overrides, as of one version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Another one after every change; 0 if nothing is set.
    pub version: u64,
    /// Increases with every change of a pause. A part of [`version`](Self::version).
    pub pauses_version: u64,
    /// Increases with every change of an adaptive limit. A part of [`version`](Self::version).
    pub adapted_version: u64,
    /// When they were read, in ms since 1970 by the backend's clock.
    pub now: u64,
    /// The overrides by name, without the rates.
    pub names: HashMap<Arc<str>, Override>,
    /// The rates by name.
    pub rates: HashMap<Arc<str>, Rate>,
    /// The pauses until a time, by name. Their ends may have passed.
    pub pauses: HashMap<Arc<str>, Pause>,
    /// The [`pauses_version`](Self::pauses_version) at which an operator last ended a pause of a name.
    pub resumed: HashMap<Arc<str>, u64>,
    /// The adaptive limits by name. They may be [over](Adapted::left).
    pub adapted: HashMap<Arc<str>, Adapted>,
    /// Revoked places, which must not be counted again, with the names of their semaphores, and when each record can be
    /// dropped, in ms by the backend's clock.
    pub revoked: HashMap<(PlaceId, Arc<str>), u64>,
}

/// A change of the overrides of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// See [`Override::limit`].
    Limit(Option<u32>),
    /// See [`Override::mode`].
    Mode(Mode),
    /// See [`Override::rate`].
    Rate(Option<Rate>),
    /// The pause until a time ends, and so does every one that a process asked for before it knew of this.
    Resume,
    /// Grants are paused until a time. An end that is not later than the known one changes nothing.
    Pause {
        /// How long from now on, in ms.
        pause_ms: u64,
        /// How much later it ends, in ms, if this is a change: requests that are answered together ask for almost the
        /// same end, and the first of them changes it for all.
        slack_ms: u64,
        /// The [`pauses_version`](Overrides::pauses_version) that the process knew when it asked for the pause. If the
        /// name was resumed since, nothing is changed.
        seen: u64,
        /// See [`Pause::by`].
        by: Arc<str>,
        /// See [`Pause::cause`].
        cause: PauseCause,
    },
    /// The limit of a name that finds its limit itself is lowered or raised: see [`Adapted::adjusted`].
    Adapt {
        /// The range of the limit.
        range: Adaptive,
        /// Whether it is lowered or raised.
        adjustment: Adjustment,
    },
    /// A place of the name is revoked.
    Revoked {
        /// The place.
        id: PlaceId,
        /// How long to keep the record, in ms; 0 removes it.
        keep_ms: u64,
        /// Whether every process is notified at once; otherwise each finds out when it reads the overrides next.
        tell: bool,
    },
}

impl Change {
    /// Returns whether every process is notified at once.
    #[must_use]
    pub const fn is_told(&self) -> bool {
        !matches!(self, Self::Revoked { tell: false, .. })
    }
}

impl Overrides {
    /// The largest number of records, counting names and revoked places.
    pub const MOST: usize = 1000;

    /// The largest number of pauses by operators, of pauses by others, and of names of which a resume is remembered. Each
    /// has room of its own, so that no upstream can fill that of operators.
    pub const PAUSES_MOST: usize = 500;

    /// The largest number of adaptive limits.
    pub const ADAPTED_MOST: usize = 1000;

    /// Returns the override of a name.
    #[must_use]
    pub fn of(&self, name: &str) -> Override {
        let mut set = self.names.get(name).copied().unwrap_or_default();
        set.rate = self.rates.get(name).copied();
        set
    }

    /// Forgets everything that is set.
    pub(super) fn clear(&mut self) {
        // A process takes a version that it knows for unchanged, so no version may be used twice.
        let version = self.version.saturating_add(1);
        *self =
            Self { version, pauses_version: version, adapted_version: version, ..Self::default() };
    }

    /// Applies a change, as `lua/override.lua`, `lua/pause.lua` and `lua/adapt.lua` do. Returns `false` if there are as many records as may
    /// already. A change that changes nothing keeps the version.
    pub fn change(&mut self, name: &Arc<str>, change: Change, now_ms: u64) -> bool {
        self.revoked.retain(|_, end| *end > now_ms);
        let room = self.names.len() + self.rates.len() + self.revoked.len() < Self::MOST;
        let mut new = self.names.get(name).copied().unwrap_or_default();
        match change {
            Change::Limit(limit) => new.limit = limit,
            Change::Mode(mode) => new.mode = mode,
            Change::Rate(rate) => {
                if rate.is_some() && !room && !self.rates.contains_key(name) {
                    return false;
                }
                self.rates.remove(name);
                self.rates.extend(rate.map(|rate| (Arc::clone(name), rate)));
            }
            Change::Resume => {
                self.resume(name, now_ms);
                return true;
            }
            Change::Pause { pause_ms, slack_ms, seen, by, cause } => {
                let until = now_ms.saturating_add(pause_ms);
                let pause = Pause::new(until.saturating_add(slack_ms), by, cause);
                return self.resumed.get(name).is_some_and(|resumed| *resumed > seen)
                    || self.pauses.get(name).is_some_and(|known| until <= known.until)
                    || self.pause(name, pause, now_ms);
            }
            Change::Adapt { range, adjustment } => {
                return self.adapt(name, range, adjustment, now_ms);
            }
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
        self.advance(now_ms);
        true
    }

    /// The error where [`change`](Self::change) has no room.
    pub(super) fn too_many(name: &str) -> BackendError {
        let (most, pauses, adapted) = (Self::MOST, Self::PAUSES_MOST, Self::ADAPTED_MOST);
        BackendError::call(format!(
            "{name}: {most} names have something set in place of their policy, {pauses} are paused until a time, or \
             {adapted} have a limit that finds itself, as many as may"
        ))
    }

    fn advance(&mut self, now_ms: u64) {
        self.version = self.next_version(now_ms);
    }

    /// Returns a version that was not used before, even if data was lost.
    fn next_version(&self, now_ms: u64) -> u64 {
        now_ms.saturating_mul(1000).max(self.version.saturating_add(1))
    }

    /// Changes an adaptive limit, if there is a reason to. Returns `false` if there are too many.
    fn adapt(
        &mut self,
        name: &Arc<str>,
        range: Adaptive,
        adjustment: Adjustment,
        now_ms: u64,
    ) -> bool {
        let now = now_ms.saturating_mul(1000);
        self.adapted.retain(|_, adapted| !adapted.left(now).is_zero());
        let before = self.adapted.get(name).copied();
        let version = self.next_version(now_ms);
        let Some(after) = Adapted::adjusted(before, range, adjustment, (version, now)) else {
            return true;
        };
        if before.is_none() && self.adapted.len() >= Self::ADAPTED_MOST {
            return false;
        }
        self.adapted.insert(Arc::clone(name), after);
        (self.version, self.adapted_version) = (version, version);
        true
    }

    fn resume(&mut self, name: &Arc<str>, now_ms: u64) {
        self.advance(now_ms);
        self.pauses_version = self.version;
        self.pauses.remove(name);
        self.resumed.insert(Arc::clone(name), self.version);
        if self.resumed.len() > Self::PAUSES_MOST
            && let Some(oldest) = self.resumed.iter().min_by_key(|(_, at)| **at)
        {
            let oldest = Arc::clone(oldest.0);
            self.resumed.remove(&oldest);
        }
    }

    /// Records a pause. Returns `false` if there are too many of its kind.
    fn pause(&mut self, name: &Arc<str>, pause: Pause, now_ms: u64) -> bool {
        self.pauses.retain(|_, pause| pause.until > now_ms);
        let is_operators = |pause: &Pause| pause.cause == PauseCause::Operator;
        let is_same = |other: &&Pause| is_operators(other) == is_operators(&pause);
        if !self.pauses.contains_key(name)
            && self.pauses.values().filter(is_same).count() >= Self::PAUSES_MOST
        {
            return false;
        }
        self.pauses.insert(Arc::clone(name), pause);
        self.advance(now_ms);
        self.pauses_version = self.version;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Change, Overrides};
    use crate::protocol::PlaceId;

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
