//! The quarantine of one server, as operators see it.
//!
//! Each session has a quarantine of its own, which lasts for its lease. The server's lasts until the last of them is
//! over, so there is one log line at its beginning and one at its end, however many sessions there are.

use crate::error::QUARANTINE;
use crate::metrics::backend::{BackendMeter, Level};
use crate::protocol::Time;
use crate::sync::{Mutex, lock};

#[derive(Default)]
pub(crate) struct ServerQuarantine {
    state: Mutex<Option<Running>>,
}

struct Running {
    began: Time,
    until: Time,
    /// Set a moment later, because no gauge is raised under a lock.
    level: Option<Level>,
}

impl ServerQuarantine {
    /// Returns when it ends, if it is on.
    pub(crate) fn until(&self, now: Time) -> Option<Time> {
        lock(&self.state).as_ref().map(|state| state.until).filter(|until| now < *until)
    }

    /// Notes that a session is in quarantine. Returns whether the server's quarantine begins with that. Must not be
    /// called under a lock.
    pub(crate) fn note(&self, until: Time, now: Time, meter: &BackendMeter) -> bool {
        if now >= until {
            return false;
        }
        let mut state = lock(&self.state);
        if let Some(state) = &mut *state {
            state.until = state.until.max(until);
            return false;
        }
        *state = Some(Running { began: now, until, level: None });
        drop(state);
        let level = Some(meter.on_quarantine());
        // Dropped after the lock is released, because its gauge changes with it.
        let _spare = match &mut *lock(&self.state) {
            Some(state) => std::mem::replace(&mut state.level, level),
            None => level,
        };
        let for_ms = millis(until, now);
        tracing::warn!(target: "tower_semaphore", for_ms, "{QUARANTINE}");
        true
    }

    /// Ends it if it is over. Returns when it will end otherwise. Must not be called under a lock.
    pub(crate) fn end(&self, now: Time) -> Option<Time> {
        let mut state = lock(&self.state);
        if let Some(until) = state.as_ref().map(|state| state.until).filter(|until| now < *until) {
            return Some(until);
        }
        let Running { began, level: _level, .. } = state.take()?;
        drop(state);
        let after_ms = millis(now, began);
        tracing::info!(target: "tower_semaphore", after_ms, "the quarantine is over; permits are granted again");
        None
    }
}

fn millis(later: Time, earlier: Time) -> u64 {
    u64::try_from(later.since(earlier).as_millis()).unwrap_or(u64::MAX)
}
