//! One server of the backend, as this process sees it: its connection, and the outbox of its driver.

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

/// The most messages to other processes that wait to be sent. More are dropped.
const MESSAGES_MAX: usize = 1000;

/// One server. `T` is a session, or a stand-in for one in tests.
pub(crate) struct Server<T> {
    shard: Shard,
    clock: Clock,
    counts: Arc<Counts>,
    /// Whether a loss of data begins a quarantine, and for how long at least.
    quarantine: Option<Duration>,
    state: Mutex<ServerState>,
    /// Whether the state is `Down`. Each call of each session reads it, so it has no lock.
    is_down: AtomicBool,
    changed: Notify,
    last_data: Mutex<Option<LastData>>,
    /// The quarantine as operators see it.
    shown_quarantine: ServerQuarantine,
    /// When it last answered.
    heard_at: Mutex<Option<Instant>>,
    was_poll_only: AtomicBool,
    warning: Mutex<Option<String>>,
    pub(crate) outbox: Outbox<T>,
    messages: Mutex<VecDeque<Message>>,
    /// The version of the routing for which its sessions were last checked.
    routing: AtomicU64,
    /// A query over its connection went unanswered, and the driver has not checked the connection since.
    doubted: AtomicBool,
    /// It has left the backend, and no session is on it.
    ended: AtomicBool,
}

/// A message to another process: the key of its semaphore, the process, and the message.
pub(crate) type Message = (Arc<str>, NodeId, PeerMessage);

enum ServerState {
    /// No connection is open yet, or it was just lost. Requests wait for it.
    Connecting,
    Up {
        connection: Arc<dyn Connection>,
        connected: Connected,
        _open: Level,
    },
    /// The connection could not be opened. Requests do not wait for it, their policies apply.
    Down {
        error: BackendError,
        since: Instant,
        _outage: Level,
    },
}

/// The data that the server had on its last connection, as the server identifies it. A key that marks the data would be
/// in another slot, and there even when nothing is in use.
struct LastData {
    /// See [`ServerInfo::data`].
    data: Option<String>,
    /// When the data before it was lost, if a quarantine may still be on.
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
            state: Mutex::new(ServerState::Connecting),
            is_down: AtomicBool::new(false),
            changed: Notify::new(),
            last_data: Mutex::default(),
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

    /// Returns whether it is unreachable, so that policies apply.
    pub(crate) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Acquire)
    }

    /// Returns the reason for the outage, if there is one.
    pub(crate) fn down(&self) -> Option<BackendError> {
        if !self.is_down() {
            return None;
        }
        match &*lock(&self.state) {
            ServerState::Connecting | ServerState::Up { .. } => None,
            ServerState::Down { error, .. } => Some(error.clone()),
        }
    }

    pub(crate) fn health(&self) -> ConnectionState {
        match &*lock(&self.state) {
            ServerState::Connecting => ConnectionState::Connecting,
            ServerState::Up { .. } => ConnectionState::Up,
            ServerState::Down { error, since, .. } => {
                ConnectionState::Down { error: error.clone(), since: *since }
            }
        }
    }

    /// Returns the end of its quarantine, if it is in one.
    pub(crate) fn quarantined_until(&self) -> Option<Instant> {
        let until = self.shown_quarantine.until(self.clock.time(Instant::now()))?;
        Some(self.clock.instant(until))
    }

    /// Notes that one of its sessions is in quarantine. Returns whether the server's quarantine begins with that. Must
    /// not be called under a lock.
    pub(crate) fn note_quarantine(&self, until: Time, now: Time) -> bool {
        let begins = self.shown_quarantine.note(until, now, &self.counts.meter);
        if begins {
            self.counts.on_quarantine();
        }
        begins
    }

    /// Ends its quarantine if that is over. Returns when it will end otherwise.
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
            ServerState::Up { connected, .. } => {
                Connected { same_data: false, quarantine, ..*connected }
            }
            _ => Connected { quarantine, ..Connected::default() },
        }
    }

    /// Notes that it answered a call.
    pub(crate) fn on_answer(&self, now: Instant) {
        *lock(&self.heard_at) = Some(now);
    }

    /// Returns whether it is connected and has answered a call, or a part of a write, after `then`.
    pub(crate) fn answers_since(&self, then: Instant) -> bool {
        let heard_at = *lock(&self.heard_at);
        let ServerState::Up { connection, .. } = &*lock(&self.state) else { return false };
        heard_at.max(connection.heard_at()).is_some_and(|at| at > then)
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(&*lock(&self.state), ServerState::Up { .. })
    }

    fn last_loss(&self) -> Quarantine {
        let lost_at = lock(&self.last_data).as_ref().and_then(|last| last.lost_at);
        let at_least = self.quarantine.unwrap_or_default();
        Quarantine { is_on: self.quarantine.is_some(), at_least, lost_at }
    }

    /// Waits until the connection is open or could not be opened.
    pub(crate) async fn reach(&self) -> Reach {
        loop {
            let changed = self.changed.notified();
            if self.ended.load(Ordering::Acquire) {
                return Reach::Ended;
            }
            match &*lock(&self.state) {
                ServerState::Connecting => {}
                ServerState::Up { connection, .. } => return Reach::Up(Arc::clone(connection)),
                ServerState::Down { error, .. } => return Reach::Down(error.clone()),
            }
            changed.await;
        }
    }

    /// Notes a new connection. Returns what sessions need to know of it.
    pub(crate) fn on_connected(&self, connection: &Arc<dyn Connection>) -> Connected {
        let info = connection.server();
        self.set_warning(info.warning.as_deref());
        let same_data = self.has_same_data(info);
        let connected =
            Connected { poll_only: info.poll_only, same_data, quarantine: self.last_loss() };
        let up = ServerState::Up {
            connection: Arc::clone(connection),
            connected,
            _open: self.counts.meter.on_connected(),
        };
        match self.set_state(up) {
            ServerState::Down { since, .. } => {
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
    pub(crate) fn set_warning(&self, warning: Option<&str>) {
        let before = std::mem::replace(&mut *lock(&self.warning), warning.map(str::to_owned));
        if let Some(warning) = warning.filter(|warning| before.as_deref() != Some(warning)) {
            tracing::warn!(target: "tower_semaphore", warning, "the backend is not configured as it should be");
        }
    }

    /// Compares the data of a new connection with that of the last one. Returns whether it is certainly the same.
    fn has_same_data(&self, info: &ServerInfo) -> bool {
        let now = self.clock.now();
        let mut last = lock(&self.last_data);
        let (same, lost_at) = match &*last {
            // On the first connection, at most the age of the data is known.
            None => (
                false,
                match info.age {
                    Some(age) => now.checked_sub(age),
                    None => Some(now),
                },
            ),
            Some(LastData { data: Some(data), lost_at }) if Some(data) == info.data.as_ref() => {
                (true, *lost_at)
            }
            Some(_) => (false, Some(now)),
        };
        let lost_at = lost_at.filter(|_| self.quarantine.is_some());
        *last = Some(LastData { data: info.data.clone(), lost_at });
        same
    }

    /// Notes that the connection broke. Only a failure to reconnect is an outage.
    pub(crate) fn on_disconnected(&self, error: &BackendError) {
        tracing::debug!(target: "tower_semaphore", %error, "the connection to the backend is lost");
        self.counts.on_disconnected();
        self.on_abandoned();
    }

    /// Notes that no connection can be opened. Returns whether an outage begins with that.
    pub(crate) fn on_unreachable(&self, error: &BackendError) -> bool {
        self.counts.meter.on_connect_failed();
        if let ServerState::Down { error: last, .. } = &mut *lock(&self.state) {
            *last = error.clone();
            return false;
        }
        let _outage = self.counts.meter.on_outage();
        self.set_state(ServerState::Down { error: error.clone(), since: Instant::now(), _outage });
        tracing::warn!(
            target: "tower_semaphore",
            %error,
            "the backend is unreachable; the policy answers in its place"
        );
        true
    }

    /// Notes that the connection is gone, or that no driver keeps it.
    pub(crate) fn on_abandoned(&self) {
        self.set_state(ServerState::Connecting);
    }

    /// Returns whether its sessions were checked for this version of the routing, and notes that they are now.
    pub(crate) fn is_routed_by(&self, routing: u64) -> bool {
        self.routing.swap(routing, Ordering::AcqRel) == routing
    }

    /// Has the driver check the connection, because a query went unanswered.
    pub(crate) fn doubt(&self) {
        self.doubted.store(true, Ordering::Release);
        self.outbox.wake();
    }

    /// Returns whether the connection is to be checked, and clears that.
    pub(crate) fn take_doubt(&self) -> bool {
        self.doubted.load(Ordering::Acquire) && self.doubted.swap(false, Ordering::AcqRel)
    }

    /// Notes that it has left the backend.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.changed.notify_waiters();
        self.outbox.wake();
    }

    /// Returns the previous state, which must not be dropped under a lock: its gauges change with it.
    fn set_state(&self, state: ServerState) -> ServerState {
        let is_down = matches!(state, ServerState::Down { .. });
        let mut current = lock(&self.state);
        self.is_down.store(is_down, Ordering::Release);
        let before = std::mem::replace(&mut *current, state);
        drop(current);
        self.changed.notify_waiters();
        before
    }

    // ===== messages to other processes =====

    /// Queues a message that needs no answer, or drops it if too many wait.
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
