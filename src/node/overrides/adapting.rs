//! How the limit of a semaphore that finds its limit itself is lowered and raised.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use super::{OverrideCache, adaptive};
use crate::metrics::requests::Meter;
use crate::node::Node;
use crate::node::shared_session::{SessionState, SharedSession};
use crate::protocol::{Adapted, Adaptive, SentUnder, Time};
use crate::sync::lock;

impl OverrideCache {
    fn lower(&self, name: &Arc<str>, range: Adaptive, sent: SentUnder, now: Time) -> bool {
        let mut state = lock(&self.state);
        // An operator's limit is in force, and what the upstream says changes nothing.
        let is_asked = state.overrides.of(name).limit.is_none()
            && state.adaptations.lower(name, range, sent, now);
        self.note_unsent(&state);
        is_asked
    }

    fn raise(&self, name: &Arc<str>, range: Adaptive, now: Time) -> bool {
        let mut state = lock(&self.state);
        let is_asked = state.adaptations.raise(name, range, now);
        self.note_unsent(&state);
        is_asked
    }

    fn hear(&self, name: &str, adapted: Adapted, spread: u16, now: Time) -> bool {
        let mut state = lock(&self.state);
        let asked = state.asked;
        state.adaptations.hear(name, adaptive::heard(adapted, spread, now), asked)
    }

    /// Returns the limit of a name, if one is in force, and when it last changed here.
    pub(crate) fn adapted_of(&self, name: &str, now: Time) -> Option<(Adapted, Time)> {
        let here = lock(&self.state).adaptations.of(name, now)?;
        Some((here.adapted, here.since))
    }
}

/// What the limit of a session was, before something that may change it.
pub(crate) struct LimitBefore(Option<u32>);

impl LimitBefore {
    pub(crate) fn of(state: &SessionState) -> Self {
        Self(state.session.adapted_limit())
    }

    /// Returns what is to be told once the lock is released; `None`: nothing changed.
    pub(crate) fn changed(self, state: &SessionState) -> Option<LimitChange> {
        let (before, after) = (self.0, state.session.adapted_limit());
        (before != after).then(|| LimitChange {
            before,
            after,
            max: state.session.adaptive().map(Adaptive::max),
            meter: state.adaptive_meter.clone(),
        })
    }
}

/// A change of the limit of a session, which is told under no lock.
pub(crate) struct LimitChange {
    before: Option<u32>,
    after: Option<u32>,
    max: Option<u32>,
    meter: Option<Meter>,
}

impl Node {
    /// The upstream refused a request of a name, which was sent under this: asks for a lower limit, unless it was lowered
    /// since.
    pub(crate) fn lower(&self, name: &Arc<str>, range: Adaptive, sent: SentUnder) {
        if self.overrides.lower(name, range, sent, self.now()) {
            self.send_records();
        }
    }

    /// Requests of a name wait for its limit, and it may grow: asks for that.
    pub(crate) fn raise(&self, name: &Arc<str>, range: Adaptive) {
        if self.overrides.raise(name, range, self.now()) {
            self.send_records();
        }
    }

    /// A message says that the limit of a name is this now.
    pub(crate) fn on_adapted(&self, name: &str, adapted: Adapted) {
        let now = self.now();
        if self.overrides.hear(name, adapted, self.spread(), now)
            && let Some(shared) = self.sessions.get(name)
        {
            self.apply_overrides(&shared, now);
        }
    }

    /// Returns which part of the longest delay of growth this process has, so that one asks before all others.
    pub(super) fn spread(&self) -> u16 {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(self.id());
        let [high, low, ..] = hash.to_be_bytes();
        u16::from_be_bytes([high, low])
    }

    /// Logs and counts that the limit of a session changed: at `INFO` where it leaves its maximum and where it returns to it,
    /// unless these are many.
    pub(crate) fn tell_limit(&self, shared: &SharedSession, change: Option<LimitChange>) {
        let Some(LimitChange { before, after, max, meter }) = change else { return };
        if let (Some(meter), Some(after)) = (meter, after) {
            meter.on_adapted(after, before.is_some_and(|before| after < before));
        }
        let semaphore = &**shared.name();
        const LOWERED: &str = "the limit is lowered: the upstream refuses requests";
        const BACK: &str = "the limit is at its maximum again";
        if max.is_none() || (before != max && after != max) || !self.counts.may_log_pause() {
            tracing::debug!(target: "tower_semaphore", semaphore, before, limit = after, "the adaptive limit changed");
        } else if after == max {
            tracing::info!(target: "tower_semaphore", semaphore, limit = after, "{BACK}");
        } else {
            tracing::info!(target: "tower_semaphore", semaphore, limit = after, "{LOWERED}");
        }
    }
}
