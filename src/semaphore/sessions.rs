//! The sessions of a process by name, and when the watchdog is to look at them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::time::Instant;

use super::server::Server;
use super::shared_session::{SessionState, SharedSession};
use super::timers::Timers;
use crate::protocol::time::Time;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// After so many sessions in a row, a task lets other tasks have their turn.
pub(super) const SESSIONS_AT_A_TIME: usize = 128;
/// So many sessions a second are made because a hint names them, at the most.
const MADE_BY_HINTS_MAX: u32 = 100;
const SECOND: Duration = Duration::from_secs(1);

/// Every session, from its first request until it is unused.
pub(super) struct Sessions {
    by_name: Mutex<HashMap<Arc<str>, Arc<SharedSession>, RandomState>>,
    /// From which on the next session numbers its places: no session that is gone went so far.
    serial: AtomicU64,
    /// One was made since it was asked last whether any was used.
    made: AtomicBool,
    /// How many hints were let make one, since then.
    made_by_hints: Mutex<Option<(Instant, u32)>>,
    pub(super) timers: Timers<Arc<SharedSession>>,
}

impl Sessions {
    pub(super) fn new() -> Self {
        Self {
            by_name: Mutex::default(),
            serial: AtomicU64::new(1),
            made: AtomicBool::new(false),
            made_by_hints: Mutex::default(),
            timers: Timers::new(),
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<SharedSession>> {
        lock(&self.by_name).get(name).cloned()
    }

    /// The session of a name; else the one that `make` makes, from the number on that it is given.
    /// `make` runs where nobody walks over the sessions meanwhile. `Err`: another one was there first.
    pub(super) fn insert(
        &self,
        name: &Arc<str>,
        make: impl FnOnce(u64) -> SharedSession,
    ) -> Result<Arc<SharedSession>, Arc<SharedSession>> {
        let mut sessions = lock(&self.by_name);
        if let Some(session) = sessions.get(name) {
            return Err(Arc::clone(session));
        }
        let session = Arc::new(make(self.serial.load(Ordering::Relaxed)));
        sessions.insert(Arc::clone(name), Arc::clone(&session));
        self.made.store(true, Ordering::Relaxed);
        Ok(session)
    }

    /// Whether a hint for a name that is not in use may make a session now.
    pub(super) fn may_be_made_by_hint(&self, now: Instant) -> bool {
        let mut made = lock(&self.made_by_hints);
        let (since, count) = made.filter(|(at, _)| now < *at + SECOND).unwrap_or((now, 0));
        *made = Some((since, count.saturating_add(1)));
        count < MADE_BY_HINTS_MAX
    }

    /// Takes a session out that is unused. Gives the server that it was on; `None`: it is in use, or was
    /// taken out before.
    pub(super) fn retire(
        &self,
        shared: &Arc<SharedSession>,
        now: Time,
    ) -> Option<Arc<Server<Arc<SharedSession>>>> {
        let mut sessions = lock(&self.by_name);
        let mut state = shared.lock();
        if state.is_retired || !state.session.is_over(now) || state.is_busy {
            return None;
        }
        state.is_retired = true;
        let cancelled = state.timer.take().and_then(|timer| self.timers.remove(timer));
        // Under the lock of the registry: the next session of this name numbers its places from there.
        self.serial.fetch_max(state.session.serial(), Ordering::Relaxed);
        sessions.remove(shared.name());
        let len = sessions.len();
        if len < sessions.capacity() / 4 {
            sessions.shrink_to(2 * len);
        }
        let server = Arc::clone(&state.server);
        // What it holds is not the last handle: this one is `shared`.
        drop(cancelled);
        Some(server)
    }

    /// All sessions, by name: in no order that depends on how they are hashed.
    pub(super) fn all(&self) -> Vec<Arc<SharedSession>> {
        let mut all: Vec<_> = lock(&self.by_name).values().cloned().collect();
        all.sort_unstable_by(|a, b| a.name().cmp(b.name()));
        all
    }

    pub(super) fn on(&self, server: &Arc<Server<Arc<SharedSession>>>) -> Vec<Arc<SharedSession>> {
        let mut all = self.all();
        all.retain(|shared| Arc::ptr_eq(&shared.lock().server, server));
        all
    }

    /// Whether there was any since this was asked last: of a request that is refused none may be left.
    pub(super) fn were_used(&self) -> bool {
        let made = self.made.swap(false, Ordering::Relaxed);
        made || !lock(&self.by_name).is_empty()
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.by_name).len()
    }

    /// Whether any session has something on a server, or something to send.
    pub(super) fn is_busy(&self) -> bool {
        lock(&self.by_name).values().any(|shared| shared.lock().session.is_busy())
    }

    /// Takes out the sessions for which `gone` says so, whatever they have.
    pub(super) fn abandon(&self, gone: impl Fn(&SessionState) -> bool) -> Vec<Arc<SharedSession>> {
        let (mut dropped, mut cancelled) = (Vec::new(), Vec::new());
        lock(&self.by_name).retain(|_, shared| {
            // Under one lock: a session that moves to another server meanwhile is needed there.
            let mut state = shared.lock();
            let gone = gone(&state);
            if gone {
                state.is_retired = true;
                cancelled.extend(state.timer.take().and_then(|timer| self.timers.remove(timer)));
                dropped.push(Arc::clone(shared));
            }
            !gone
        });
        dropped
    }
}
