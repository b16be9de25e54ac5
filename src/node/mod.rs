//! What one process knows of its semaphores: their sessions, the servers that count them, and the overrides.
//!
//! Every change of a session ends in [`Node::finish`]: act, then post what is to be sent, then wake the tasks that
//! wait for it. Nothing in here runs by itself; the [tasks](crate::tasks) do.
//!
//! # The four tables of a request
//!
//! Each step of a request takes the lock of one [`SharedSession`], which is found by name once:
//!
//! ```text
//!  semaphore/            node/                                   protocol/             backend/
//!
//!  PlaceHandle           SharedSession of "openai"               Session               one sorted set
//!  (Acquire, Permit)      Mutex<SessionState>
//!  ┌─────────────┐        ┌──────────────────────┐               ┌───────────────┐     ┌───────────────┐
//!  │ shared ─────┼──────► │ records by index     │   same index  │ places        │     │ members by id │
//!  │ index ──────┼──────► │ 0: handles, waker    │ ◄───────────► │ 0: held    ───┼───► │ node:17       │
//!  └─────────────┘        │ 1: handles, waker,   │               │ 1: waiting ───┼───► │ node:18       │
//!    clones share         │    lost wakers       │               │ 2: free       │     │ other:3       │
//!    the index            │ 2: spare             │               └───────────────┘     └───────────────┘
//!                         └──────────────────────┘                an index is reused;     all processes that
//!  what a request holds   which tasks to wake                     an id never is          share the semaphore
//! ```
//!
//! * The *handle* is what a request holds. Dropping the last one leaves the place.
//! * The *record* has what the session must not know: the wakers of the request and of the listeners for a loss, the
//!   error, and the meter. Events of the session name indexes, and [`Node::finish`] turns them into wakers.
//! * The *place* says whether the request joins, waits, holds or leaves, and until when it may rely on that.
//! * The *id* goes over the wire. Replies and hints name ids, and the session finds their places.

mod clock;
mod close;
pub(crate) mod health;
mod homes;
pub(crate) mod identity;
mod mailbox;
pub(crate) mod overrides;
pub(crate) mod peers;
mod query;
pub(crate) mod server;
pub(crate) mod sessions;
pub(crate) mod shared_session;
pub(crate) mod tallies;
mod timers;

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::time::Instant;

use self::clock::Clock;
use self::health::{ConnectionState, Counts, Health};
use self::identity::Identity;
use self::overrides::OverrideCache;
use self::peers::Questions;
use self::server::servers::Servers;
use self::sessions::{Remembered, Sessions};
use self::shared_session::{SessionState, SharedSession};
use crate::backend::{Backend, Counter, Embedded, OVERRIDES};
use crate::error::BackendError;
use crate::metrics::backend::BackendMeter;
use crate::metrics::requests::Meters;
use crate::name::Name;
use crate::protocol::NodeId;
use crate::protocol::Time;
use crate::protocol::session::{Connected, Sending, Session};
use crate::sync::MutexGuard;
use crate::sync::atomic::AtomicBool;

/// A server with sessions on it.
pub(crate) type Server = server::Server<Arc<SharedSession>>;

/// The part of a `Semaphore` that all of its clones share.
pub(crate) struct Node {
    /// Created at the first use; see [`Identity`].
    pub(crate) identity: OnceLock<Identity>,
    this: Weak<Self>,
    backend: Arc<dyn Backend>,
    pub(crate) clock: Clock,
    pub(crate) sessions: Sessions,
    pub(crate) servers: Servers<Arc<SharedSession>>,
    pub(crate) overrides: OverrideCache,
    pub(crate) questions: Questions,
    pub(crate) counts: Arc<Counts>,
    pub(crate) meters: Meters,
    pub(crate) closed: AtomicBool,
    /// Set once no request may wait any more.
    pub(crate) is_queue_closed: AtomicBool,
}

impl Node {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Arc<Self> {
        BackendMeter::register(backend.embedded().is_some());
        let counts = Arc::<Counts>::default();
        let clock = Clock::new(Arc::clone(&backend));
        let node = Arc::new_cyclic(|this| Self {
            identity: OnceLock::new(),
            this: Weak::clone(this),
            clock: clock.clone(),
            sessions: Sessions::new(),
            servers: Servers::new(clock, Arc::clone(&counts), backend.quarantine()),
            overrides: OverrideCache::new(backend.key(OVERRIDES)),
            questions: Questions::default(),
            counts,
            meters: Meters::default(),
            closed: AtomicBool::new(false),
            is_queue_closed: AtomicBool::new(false),
            backend,
        });
        if node.embedded().is_some() {
            // No other process shares these permits, so a fork cannot take another's for its own.
            node.identity();
            node.learn_now();
        } else if cfg!(all(test, shuttle)) {
            // Shuttle may suspend a thread inside `get_or_init`, which would block the others.
            node.identity();
        }
        node
    }

    pub(crate) fn id(&self) -> NodeId {
        self.identity().id
    }

    pub(crate) fn identity(&self) -> &Identity {
        self.identity.get_or_init(|| {
            let identity = Identity::new(self.backend.seed());
            let this = Weak::clone(&self.this);
            self.backend.attach(identity.id, this);
            identity
        })
    }

    /// Checks that this process may use the semaphore.
    ///
    /// # Errors
    ///
    /// If this process is a fork of one that has used the semaphore.
    pub(crate) fn check_identity(&self) -> Result<(), BackendError> {
        if self.embedded().is_some() { Ok(()) } else { self.identity().check() }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn embedded(&self) -> Option<&dyn Embedded> {
        self.backend.embedded()
    }

    pub(crate) fn health(&self) -> Health {
        Health { paused: self.overrides.paused(self.now()), ..self.health_of_backend() }
    }

    fn health_of_backend(&self) -> Health {
        if self.embedded().is_some() {
            return self.counts.health(ConnectionState::Embedded, self.sessions.len(), None, None);
        }
        let servers = self.servers.all();
        let states = servers.iter().map(|server| server.health());
        let worst = states.max_by_key(|state| match state {
            ConnectionState::Embedded | ConnectionState::Up => 0,
            ConnectionState::Connecting => 1,
            ConnectionState::Down { .. } => 2,
        });
        let warning = servers.iter().find_map(|server| server.warning());
        let worst = worst.unwrap_or(ConnectionState::Connecting);
        let quarantined_until = servers.iter().filter_map(|one| one.quarantined_until()).max();
        self.counts.health(worst, self.sessions.len(), quarantined_until, warning)
    }

    /// Ends the quarantines of servers that are over. Returns when the next one ends.
    pub(crate) fn end_quarantines(&self) -> Option<Instant> {
        if !self.counts.take_quarantine() {
            return None;
        }
        let (now, servers) = (self.now(), self.servers.all());
        let next = servers.iter().filter_map(|server| server.end_quarantine(now)).min()?;
        self.counts.on_quarantine();
        Some(self.clock.instant(next))
    }

    /// Returns between half of a pause and all of it, so that the processes of a fleet do not reconnect in step.
    pub(crate) fn jittered(&self, pause: Duration) -> Duration {
        pause.mul_f64(0.5 + 0.5 * self.identity().random())
    }

    /// Acts on the session of a name, and creates it if there is none.
    pub(crate) fn with_session<T>(
        &self,
        name: &str,
        now: Time,
        mut act: impl FnMut(&mut SessionState, Time) -> T,
    ) -> (Arc<SharedSession>, T) {
        loop {
            let shared = self.session(name);
            if let Some(result) = self.act_unless_retired(&shared, now, &mut act) {
                return (shared, result);
            }
        }
    }

    /// Like [`with_session`](Self::with_session), for a caller that remembers the session of its name.
    #[inline]
    pub(crate) fn with_remembered<T>(
        &self,
        remembered: &Remembered,
        name: &Name,
        now: Time,
        mut act: impl FnMut(&mut SessionState, Time) -> T,
    ) -> (Arc<SharedSession>, T) {
        if let Some(shared) = remembered.get()
            && let Some(result) = self.act_unless_retired(&shared, now, &mut act)
        {
            return (shared, result);
        }
        let (shared, result) = self.with_session(name.as_str(), now, act);
        remembered.set(&shared);
        (shared, result)
    }

    /// Acts on a session; `None` if it was removed from the registry.
    #[inline]
    fn act_unless_retired<T>(
        &self,
        shared: &Arc<SharedSession>,
        now: Time,
        act: impl FnOnce(&mut SessionState, Time) -> T,
    ) -> Option<T> {
        let mut state = shared.lock();
        if state.is_retired {
            return None;
        }
        let result = act(&mut state, now);
        self.finish(shared, state, now, None);
        Some(result)
    }

    fn session(&self, name: &str) -> Arc<SharedSession> {
        if let Some(shared) = self.sessions.get(name) {
            return shared;
        }
        let name: Arc<str> = name.into();
        let key = self.backend.key(&name);
        let counter = self.embedded().map(|embedded| embedded.counter(&key, self.clock.epoch()));
        let server = self.servers.attach(&self.backend.shard(&key), 1);
        let made = self.sessions.insert(&name, |serial| {
            // Read under the lock of the registry: a later change of the server's state finds this session.
            let mut session =
                Session::new(self.id(), serial, server.conditions(), server.is_down());
            self.overrides.apply(&name, &mut session, self.now());
            SharedSession::new(Arc::clone(&name), key, counter, session, Arc::clone(&server))
        });
        match made {
            Ok(shared) => {
                // The slot may have moved to another server since its shard was looked up.
                if self.backend.shard(shared.key()) != *server.shard() {
                    self.rehome(&shared, false);
                }
                shared
            }
            Err(shared) => {
                self.servers.detach(&server);
                shared
            }
        }
    }

    /// Reads the session of a name, if there is one.
    pub(crate) fn read_session<T>(
        &self,
        name: &str,
        read: impl FnOnce(&Session) -> T,
    ) -> Option<T> {
        let shared = self.sessions.get(name)?;
        let state = shared.lock();
        Some(read(&state.session))
    }

    /// Returns the current time.
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// Tells a session of a new connection of its server.
    pub(crate) fn announce(&self, shared: &Arc<SharedSession>, connected: Connected) {
        let now = self.now();
        let mut state = shared.lock();
        // That the server kept its data says nothing about a session that came to it during the break.
        let same_data = connected.same_data && !std::mem::take(&mut state.is_new_here);
        state.session.handle_connected(Connected { same_data, ..connected }, now);
        self.finish(shared, state, now, None);
    }

    /// Acts on a session, then posts, then wakes. `now` must not be in the future.
    pub(crate) fn act<T>(
        &self,
        shared: &Arc<SharedSession>,
        now: Time,
        act: impl FnOnce(&mut Session, Time) -> T,
    ) -> T {
        let mut state = shared.lock();
        let result = act(&mut state.session, now);
        self.finish(shared, state, now, None);
        result
    }

    /// Like [`act`](Self::act), for an answer of a server, with its error if there is one. Does nothing if the session
    /// has moved to another server since the call.
    pub(crate) fn act_in(
        &self,
        (shared, stay): &(Arc<SharedSession>, u64),
        now: Time,
        error: Option<&BackendError>,
        act: impl FnOnce(&mut Session, Time),
    ) {
        let mut state = shared.lock();
        if state.stay == *stay {
            act(&mut state.session, now);
            self.finish(shared, state, now, error);
        }
    }

    /// Posts what a session has to send, and wakes the tasks that its events concern.
    pub(crate) fn finish<'a>(
        &self,
        shared: &'a Arc<SharedSession>,
        mut state: MutexGuard<'a, SessionState>,
        now: Time,
        error: Option<&BackendError>,
    ) {
        if state.is_retired {
            // No task renews it any more, so it sends nothing and needs no timer.
            let woken = state.take_events(shared.name(), error, &self.counts);
            drop(state);
            return woken.wake();
        }
        match shared.counter() {
            Some(counter) => state = self.call_embedded(counter, shared, state, now),
            None => self.post(shared, &mut state, now),
        }
        let woken = state.take_events(shared.name(), error, &self.counts);
        let timeout = state.due_before_timer();
        let is_over = state.session.is_over(now);
        let mut replaced = None;
        if let Some(due) = timeout.filter(|_| !is_over) {
            let timers = &self.sessions.timers;
            let timer = timers.push(Arc::clone(shared), due);
            replaced = state.set_timer(timer, due).and_then(|timer| timers.remove(timer));
        }
        let quarantine =
            state.session.quarantined_until().map(|until| (Arc::clone(&state.server), until));
        // The tasks end with the last busy session.
        let may_end = self.is_closed() && !state.session.is_busy();
        drop(state);
        drop(replaced);
        if is_over {
            self.retire(shared, now);
        }
        if let Some((server, until)) = quarantine
            && server.note_quarantine(until, now)
        {
            // The watchdog sleeps until the earliest deadline, and now has to end this, too.
            self.sessions.timers.wake();
        }
        if may_end {
            self.wake_tasks();
        }
        woken.wake();
    }

    /// Puts a session into the outbox of its server, if it has something to send.
    fn post(&self, shared: &Arc<SharedSession>, state: &mut SessionState, now: Time) {
        if let Some(question) = state.session.poll_revocation_check() {
            self.overrides.check_revocations(shared, question);
            self.ask_keeper();
        }
        // Nothing is sent in an outage. The session keeps what it has to send, and is posted again afterwards.
        if state.server.is_down() || state.held_until.is_some_and(|until| now < until) {
            return;
        }
        state.enqueue(shared);
    }

    /// Carries out the calls of a session on the embedded backend. One thread at a time does this for each session, so
    /// its calls keep their order.
    fn call_embedded<'a>(
        &self,
        counter: &dyn Counter,
        shared: &'a Arc<SharedSession>,
        mut state: MutexGuard<'a, SessionState>,
        now: Time,
    ) -> MutexGuard<'a, SessionState> {
        // The thread that is carrying out calls polls the session again before it ends.
        if state.is_busy {
            return state;
        }
        loop {
            if let Some(question) = state.session.poll_revocation_check() {
                state.is_busy = true;
                drop(state);
                self.learn_now();
                state = shared.lock();
                // Another thread may have read them, and not yet applied them to this session.
                for id in self.overrides.revoked_of(shared.name()) {
                    state.session.handle_revoked(id, now);
                }
                state.session.handle_revocations_known(question, now);
            } else if let Some(call) = state.session.poll_call(now) {
                state.is_busy = true;
                drop(state);
                let reply = counter.call(self.id(), &call, now);
                self.counts.meter.on_reply(&call.op, &reply);
                state = shared.lock();
                state.session.handle_reply(&call.op, &reply, Sending::at(now), now);
            } else {
                break;
            }
        }
        state.is_busy = false;
        state
    }

    /// Removes an unused session.
    fn retire(&self, shared: &Arc<SharedSession>, now: Time) {
        if let Some(server) = self.sessions.retire(shared, now) {
            let state = shared.lock();
            if let Some(limit) = state.session.policy_limit() {
                let rate = state.session.policy_rate();
                self.counts.tallies.on_retired(shared.name(), limit, rate);
            }
            drop(state);
            self.servers.detach(&server);
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A session owns its server and an outbox owns its sessions: without this, the cycle would never be freed.
        self.servers.all().iter().for_each(|server| drop(server.outbox.clear()));
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let id = self.identity.get().map(|identity| identity.id);
        f.debug_struct("Node").field("id", &id).finish_non_exhaustive()
    }
}
