//! The sessions of a process by name, and the timers at which the watchdog handles them.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::server::Server;
use super::shared_session::{SessionState, SharedSession};
use super::timers::Timers;
use crate::protocol::Time;
use crate::protocol::session::Session;
use crate::sharded::{self, Sharded};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// The most sessions that a task handles before it yields.
pub(crate) const SESSIONS_AT_A_TIME: usize = 128;
/// The most sessions that hints create in a second.
const MADE_BY_HINTS_MAX: u32 = 100;
const SECOND: Duration = Duration::from_secs(1);

/// Every session, from its first request until it is unused.
pub(crate) struct Sessions {
    by_name: Sharded<Arc<SharedSession>>,
    /// The first number for the places of the next session. No retired session has used it or a higher one, so an id
    /// is never reused.
    serial: AtomicU64,
    /// A session was created since [`were_used`](Self::were_used) was last called.
    made: AtomicBool,
    /// The start of the current second, and the number of sessions that hints have created in it.
    made_by_hints: Mutex<Option<(Instant, u32)>>,
    pub(crate) timers: Timers<Arc<SharedSession>>,
}

/// The last session of a name, for a caller that uses one name again and again: it saves the lock of the registry.
#[derive(Default)]
pub(crate) struct Remembered(Mutex<Weak<SharedSession>>);

impl Remembered {
    #[inline]
    pub(crate) fn get(&self) -> Option<Arc<SharedSession>> {
        lock(&self.0).upgrade()
    }

    pub(crate) fn set(&self, shared: &Arc<SharedSession>) {
        *lock(&self.0) = Arc::downgrade(shared);
    }
}

impl Sessions {
    pub(crate) fn new() -> Self {
        Self {
            by_name: Sharded::default(),
            serial: AtomicU64::new(1),
            made: AtomicBool::new(false),
            made_by_hints: Mutex::default(),
            timers: Timers::new(),
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<SharedSession>> {
        self.by_name.of(name).get(name).cloned()
    }

    /// Inserts the session that `make` creates, given the first number of its places. `make` runs under the lock of the
    /// registry. `Err` is the session that already has the name.
    pub(crate) fn insert(
        &self,
        name: &Arc<str>,
        make: impl FnOnce(u64) -> SharedSession,
    ) -> Result<Arc<SharedSession>, Arc<SharedSession>> {
        let mut sessions = self.by_name.of(name);
        if let Some(session) = sessions.get(name) {
            return Err(Arc::clone(session));
        }
        let session = Arc::new(make(self.serial.load(Ordering::Relaxed)));
        sessions.insert(Arc::clone(name), Arc::clone(&session));
        self.made.store(true, Ordering::Relaxed);
        Ok(session)
    }

    /// Returns whether a hint for a name that is not in use may create a session now.
    pub(crate) fn may_be_made_by_hint(&self, now: Instant) -> bool {
        let mut made = lock(&self.made_by_hints);
        let (since, count) = made.filter(|(at, _)| now < *at + SECOND).unwrap_or((now, 0));
        *made = Some((since, count.saturating_add(1)));
        count < MADE_BY_HINTS_MAX
    }

    /// Removes an unused session. Returns its server, or `None` if the session is in use or was removed before.
    pub(crate) fn retire(
        &self,
        shared: &Arc<SharedSession>,
        now: Time,
    ) -> Option<Arc<Server<Arc<SharedSession>>>> {
        let mut sessions = self.by_name.of(shared.name());
        let mut state = shared.lock();
        if state.is_retired || !state.session.is_over(now) || state.is_busy {
            return None;
        }
        state.is_retired = true;
        let cancelled = state.take_timer().and_then(|timer| self.timers.remove(timer));
        // Under the lock of the registry, so that the next session of this name continues from this number.
        self.serial.fetch_max(state.session.serial(), Ordering::Relaxed);
        sharded::remove(&mut sessions, shared.name());
        let server = Arc::clone(&state.server);
        // Never the last handle, since `shared` is one: nothing is freed under the lock.
        drop(cancelled);
        Some(server)
    }

    /// Returns all sessions, sorted by name: nothing that has an effect depends on the hash seed.
    pub(crate) fn all(&self) -> Vec<Arc<SharedSession>> {
        let mut all = Vec::new();
        for part in self.by_name.parts() {
            all.extend(part.values().cloned());
        }
        all.sort_unstable_by(|a, b| a.name().cmp(b.name()));
        all
    }

    pub(crate) fn on(&self, server: &Arc<Server<Arc<SharedSession>>>) -> Vec<Arc<SharedSession>> {
        let mut all = self.all();
        all.retain(|shared| Arc::ptr_eq(&shared.lock().server, server));
        all
    }

    /// Returns whether there was a session since the last call, even if it is gone already.
    pub(crate) fn were_used(&self) -> bool {
        let made = self.made.swap(false, Ordering::Relaxed);
        made || self.by_name.parts().any(|part| !part.is_empty())
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.parts().map(|part| part.len()).sum()
    }

    /// Returns whether any session has places on a server, or something to send.
    pub(crate) fn is_busy(&self) -> bool {
        self.any(Session::is_busy)
    }

    /// Returns whether any session has a request that waits or holds a permit.
    pub(crate) fn are_in_use(&self) -> bool {
        self.any(Session::is_in_use)
    }

    fn any(&self, is: impl Fn(&Session) -> bool) -> bool {
        let is = |shared: &Arc<SharedSession>| is(&shared.lock().session);
        self.by_name.parts().any(|part| part.values().any(is))
    }

    /// Removes the sessions for which `gone` returns true, in whatever state they are.
    pub(crate) fn abandon(&self, gone: impl Fn(&SessionState) -> bool) -> Vec<Arc<SharedSession>> {
        let (mut removed, mut cancelled) = (Vec::new(), Vec::new());
        for mut part in self.by_name.parts() {
            part.retain(|_, shared| {
                // Checked and removed under one lock: a session that moves to another server meanwhile is needed there.
                let mut state = shared.lock();
                let gone = gone(&state);
                if gone {
                    state.is_retired = true;
                    let timer = state.take_timer();
                    cancelled.extend(timer.and_then(|timer| self.timers.remove(timer)));
                    removed.push(Arc::clone(shared));
                }
                !gone
            });
        }
        removed
    }
}
