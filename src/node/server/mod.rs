//! One server of the backend, as this process sees it: the connection to it, and the outbox for it.

pub(crate) mod outbox;
mod quarantine;
pub(crate) mod servers;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use self::outbox::Outbox;
use self::quarantine::ServerQuarantine;
use crate::backend::{Connection, PeerMessage, ServerInfo, Shard};
use crate::error::BackendError;
use crate::metrics::backend::Level;
use crate::node::clock::Clock;
use crate::node::health::{ConnectionState, Counts};
use crate::protocol::NodeId;
use crate::protocol::Time;
use crate::protocol::session::{Connected, Quarantine};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// The most messages to other processes that wait to be sent.
const MESSAGES_MAX: usize = 1000;

/// One server. `T` is a session, or stands for one in tests.
pub(crate) struct Server<T> {
    shard: Shard,
    clock: Clock,
    counts: Arc<Counts>,
    /// Whether a loss of data begins a quarantine, and for how long at least.
    quarantine: Option<Duration>,
    state: Mutex<State>,
    /// Whether the state is `Down`, for callers to which the lock would cost too much.
    is_down: AtomicBool,
    changed: Notify,
    met: Mutex<Option<Met>>,
    /// What operators see of it.
    shown_quarantine: ServerQuarantine,
    /// When it answered last.
    heard_at: Mutex<Option<Instant>>,
    was_poll_only: AtomicBool,
    warning: Mutex<Option<String>>,
    pub(crate) outbox: Outbox<T>,
    messages: Mutex<VecDeque<Message>>,
    /// The version of the routing by which its sessions were moved last.
    routing: AtomicU64,
    /// A question over its connection went unanswered, and the driver has not checked the connection yet.
    doubted: AtomicBool,
    /// It has left the backend, and no session is on it.
    ended: AtomicBool,
}

/// A message to another process: the key of its semaphore, the process, and the message.
pub(crate) type Message = (Arc<str>, NodeId, PeerMessage);

enum State {
    /// No connection is open yet, or it was lost just now. Requests wait for it.
    Connecting,
    Up {
        connection: Arc<dyn Connection>,
        connected: Connected,
        _open: Level,
    },
    /// The connection could not be opened. Requests do not wait for it.
    Down {
        error: BackendError,
        since: Instant,
        _away: Level,
    },
}

/// The data that the server had last.
struct Met {
    /// See [`ServerInfo::data`].
    data: Option<String>,
    /// When data was lost before that, if a quarantine may still be on.
    lost_at: Option<Time>,
}

/// How to reach a server.
pub(crate) enum Reach {
    Up(Arc<dyn Connection>),
    Down(BackendError),
    /// It has left the backend; ask another server.
    Ended,
}

impl<T> Server<T> {
    pub(crate) fn new(
        shard: Shard,
        clock: Clock,
        counts: Arc<Counts>,
        quarantine: Option<Duration>,
    ) -> Self {
        Self {
            shard,
            clock,
            counts,
            quarantine,
            state: Mutex::new(State::Connecting),
            is_down: AtomicBool::new(false),
            changed: Notify::new(),
            met: Mutex::default(),
            shown_quarantine: ServerQuarantine::default(),
            heard_at: Mutex::default(),
            was_poll_only: AtomicBool::new(false),
            warning: Mutex::default(),
            outbox: Outbox::new(),
            messages: Mutex::default(),
            routing: AtomicU64::new(0),
            doubted: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    pub(crate) const fn shard(&self) -> &Shard {
        &self.shard
    }

    // ===== its state =====

    /// Returns whether the policy answers in its place.
    pub(crate) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Acquire)
    }

    /// Returns why it cannot be asked, in an outage.
    pub(crate) fn down(&self) -> Option<BackendError> {
        if !self.is_down() {
            return None;
        }
        match &*lock(&self.state) {
            State::Connecting | State::Up { .. } => None,
            State::Down { error, .. } => Some(error.clone()),
        }
    }

    pub(crate) fn health(&self) -> ConnectionState {
        match &*lock(&self.state) {
            State::Connecting => ConnectionState::Connecting,
            State::Up { .. } => ConnectionState::Up,
            State::Down { error, since, .. } => {
                ConnectionState::Down { error: error.clone(), since: *since }
            }
        }
    }

    /// Returns until when it is in quarantine, if it is.
    pub(crate) fn quarantined_until(&self) -> Option<Instant> {
        let until = self.shown_quarantine.until(self.clock.time(Instant::now()))?;
        Some(self.clock.instant(until))
    }

    /// Notes that a session on it is in quarantine until then. Must not be called under a lock.
    pub(crate) fn note_quarantine(&self, until: Time, now: Time) -> bool {
        let begins = self.shown_quarantine.note(until, now, &self.counts.meter);
        if begins {
            self.counts.quarantine_began();
        }
        begins
    }

    /// Ends its quarantine if that is over. Otherwise returns when it will be, if it is on.
    pub(crate) fn end_quarantine(&self, now: Time) -> Option<Time> {
        self.shown_quarantine.end(now)
    }

    pub(crate) fn warning(&self) -> Option<String> {
        lock(&self.warning).clone()
    }

    /// Returns what a session that moves to this server needs to know.
    pub(crate) fn conditions(&self) -> Connected {
        let quarantine = self.last_loss();
        match &*lock(&self.state) {
            State::Up { connected, .. } => Connected { same_data: false, quarantine, ..*connected },
            _ => Connected { quarantine, ..Connected::default() },
        }
    }

    /// Notes that it answered a call.
    pub(crate) fn hear(&self, now: Instant) {
        *lock(&self.heard_at) = Some(now);
    }

    /// Returns whether it is connected and has answered a call, or a part of a write, since then.
    pub(crate) fn answers_since(&self, then: Instant) -> bool {
        let heard_at = *lock(&self.heard_at);
        let State::Up { connection, .. } = &*lock(&self.state) else { return false };
        heard_at.max(connection.heard_at()).is_some_and(|at| at > then)
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(&*lock(&self.state), State::Up { .. })
    }

    fn last_loss(&self) -> Quarantine {
        let lost_at = lock(&self.met).as_ref().and_then(|met| met.lost_at);
        let at_least = self.quarantine.unwrap_or_default();
        Quarantine { is_on: self.quarantine.is_some(), at_least, lost_at }
    }

    /// Waits until the connection is open, or known to be impossible.
    pub(crate) async fn reach(&self) -> Reach {
        loop {
            let changed = self.changed.notified();
            if self.ended.load(Ordering::Acquire) {
                return Reach::Ended;
            }
            match &*lock(&self.state) {
                State::Connecting => {}
                State::Up { connection, .. } => return Reach::Up(Arc::clone(connection)),
                State::Down { error, .. } => return Reach::Down(error.clone()),
            }
            changed.await;
        }
    }

    /// Notes a new connection. Returns what sessions need to know of it.
    pub(crate) fn connected(&self, connection: &Arc<dyn Connection>) -> Connected {
        let info = connection.server();
        self.warn(info.warning.as_deref());
        let same_data = self.meet(info);
        let connected =
            Connected { poll_only: info.poll_only, same_data, quarantine: self.last_loss() };
        let up = State::Up {
            connection: Arc::clone(connection),
            connected,
            _open: self.counts.meter.connected(),
        };
        match self.become_(up) {
            State::Down { since, .. } => {
                let away_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(target: "tower_semaphore", away_ms, "the backend is reachable again");
            }
            _ => tracing::debug!(target: "tower_semaphore", "connected to the backend"),
        }
        let was_poll_only = self.was_poll_only.swap(info.poll_only, Ordering::Relaxed);
        if info.poll_only && !was_poll_only {
            let what = "this connection cannot subscribe; waiting requests poll every 100 ms";
            tracing::warn!(target: "tower_semaphore", "{what}");
        }
        connected
    }

    /// Keeps the warning of the server, and logs it if it is a new one.
    fn warn(&self, warning: Option<&str>) {
        let before = std::mem::replace(&mut *lock(&self.warning), warning.map(str::to_owned));
        if let Some(warning) = warning.filter(|warning| before.as_deref() != Some(warning)) {
            tracing::warn!(target: "tower_semaphore", warning, "the backend is not configured as it should be");
        }
    }

    /// Compares the data behind a new connection. Returns whether it is certainly the same as before.
    fn meet(&self, info: &ServerInfo) -> bool {
        let now = self.clock.now();
        let mut met = lock(&self.met);
        let (same, lost_at) = match &*met {
            // On the first connection, all that is known is the age of the data, if that.
            None => (
                false,
                match info.age {
                    Some(age) => now.checked_sub(age),
                    None => Some(now),
                },
            ),
            Some(Met { data: Some(data), lost_at }) if Some(data) == info.data.as_ref() => {
                (true, *lost_at)
            }
            Some(_) => (false, Some(now)),
        };
        let lost_at = lost_at.filter(|_| self.quarantine.is_some());
        *met = Some(Met { data: info.data.clone(), lost_at });
        same
    }

    /// Notes that the connection broke. That is not an outage yet.
    pub(crate) fn disconnected(&self, error: &BackendError) {
        tracing::debug!(target: "tower_semaphore", %error, "the connection to the backend is lost");
        self.counts.disconnected();
        self.abandoned();
    }

    /// Notes that no connection can be opened. Returns whether an outage begins with that.
    pub(crate) fn unreachable(&self, error: &BackendError) -> bool {
        self.counts.meter.connect_failed();
        if let State::Down { error: last, .. } = &mut *lock(&self.state) {
            *last = error.clone();
            return false;
        }
        let _away = self.counts.meter.unavailable();
        self.become_(State::Down { error: error.clone(), since: Instant::now(), _away });
        tracing::warn!(
            target: "tower_semaphore",
            %error,
            "the backend is unreachable; the policy answers in its place"
        );
        true
    }

    /// Notes that the connection is gone, or that no driver keeps it.
    pub(crate) fn abandoned(&self) {
        self.become_(State::Connecting);
    }

    /// Returns whether its sessions were moved by this version of the routing, and notes that they are now.
    pub(crate) fn is_routed_by(&self, routing: u64) -> bool {
        self.routing.swap(routing, Ordering::AcqRel) == routing
    }

    /// Notes that a question went unanswered: the driver checks the connection.
    pub(crate) fn doubt(&self) {
        self.doubted.store(true, Ordering::Release);
        self.outbox.wake();
    }

    /// Returns whether the connection is to be checked, once.
    pub(crate) fn take_doubt(&self) -> bool {
        self.doubted.load(Ordering::Acquire) && self.doubted.swap(false, Ordering::AcqRel)
    }

    /// Notes that it has left the backend.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.changed.notify_waiters();
        self.outbox.wake();
    }

    fn become_(&self, state: State) -> State {
        let is_down = matches!(state, State::Down { .. });
        let mut current = lock(&self.state);
        self.is_down.store(is_down, Ordering::Release);
        let before = std::mem::replace(&mut *current, state);
        drop(current);
        self.changed.notify_waiters();
        // Dropped by the caller, under no lock: gauges change with it.
        before
    }

    // ===== messages to other processes =====

    /// Queues a message that needs no answer. Drops it if too many wait.
    pub(crate) fn send_message(&self, message: Message) {
        let mut messages = lock(&self.messages);
        if messages.len() < MESSAGES_MAX {
            messages.push_back(message);
            drop(messages);
            self.outbox.wake();
        }
    }

    pub(crate) fn next_message(&self) -> Option<Message> {
        lock(&self.messages).pop_front()
    }
}
