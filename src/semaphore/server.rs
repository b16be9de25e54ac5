//! One server of the backend, as this process sees it: the connection to it, and what is to be sent.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::clock::Clock;
use super::health::{ConnectionState, Counts};
use super::outbox::Outbox;
use crate::backend::{Connection, PeerMessage, ServerInfo, Shard};
use crate::error::BackendError;
use crate::metrics::backend::Level;
use crate::protocol::id::NodeId;
use crate::protocol::session::{Connected, Quarantine};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// Messages to other processes that wait to be sent, at the most.
const MESSAGES_MAX: usize = 1000;

/// One server. `T` is what is sent for: sessions.
pub(super) struct Server<T> {
    shard: Shard,
    clock: Clock,
    counts: Arc<Counts>,
    /// Whether a loss of data matters.
    quarantines: bool,
    state: Mutex<State>,
    /// The state is `Down`. Read where the lock would cost too much.
    is_down: AtomicBool,
    changed: Notify,
    met: Mutex<Option<Met>>,
    was_poll_only: AtomicBool,
    warning: Mutex<Option<String>>,
    pub(super) outbox: Outbox<T>,
    messages: Mutex<VecDeque<Message>>,
    /// The routing by which its sessions were last sent to where they are counted.
    routing: AtomicU64,
    /// Something was asked over its connection in vain, and nobody looked into that yet.
    doubted: AtomicBool,
    /// It is none of the backend's servers any more, and no session is left on it.
    ended: AtomicBool,
}

/// A message to another process: the key of the semaphore that it is about, to which process, and what.
pub(super) type Message = (Arc<str>, NodeId, PeerMessage);

enum State {
    /// There is no connection yet, or it was lost just now: requests wait for it.
    Connecting,
    Up {
        connection: Arc<dyn Connection>,
        connected: Connected,
        _open: Level,
    },
    /// It could not be opened, so requests are not made to wait for it.
    Down {
        error: BackendError,
        since: Instant,
        _away: Level,
    },
}

/// The data that was there last.
struct Met {
    /// See [`ServerInfo::data`].
    data: Option<String>,
    /// When data was lost before that, if it may still matter.
    lost_at: Option<Instant>,
}

/// How to reach a server.
pub(super) enum Reach {
    Up(Arc<dyn Connection>),
    Down(BackendError),
    /// Another server is to be asked.
    Ended,
}

impl<T> Server<T> {
    pub(super) fn new(shard: Shard, clock: Clock, counts: Arc<Counts>, quarantines: bool) -> Self {
        Self {
            shard,
            clock,
            counts,
            quarantines,
            state: Mutex::new(State::Connecting),
            is_down: AtomicBool::new(false),
            changed: Notify::new(),
            met: Mutex::default(),
            was_poll_only: AtomicBool::new(false),
            warning: Mutex::default(),
            outbox: Outbox::new(),
            messages: Mutex::default(),
            routing: AtomicU64::new(0),
            doubted: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    pub(super) const fn shard(&self) -> &Shard {
        &self.shard
    }

    // ===== its state =====

    /// Whether the policy answers in its place.
    pub(super) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Acquire)
    }

    /// Why it cannot be asked at present, if so.
    pub(super) fn down(&self) -> Option<BackendError> {
        if !self.is_down() {
            return None;
        }
        match &*lock(&self.state) {
            State::Connecting | State::Up { .. } => None,
            State::Down { error, .. } => Some(error.clone()),
        }
    }

    pub(super) fn health(&self) -> ConnectionState {
        match &*lock(&self.state) {
            State::Connecting => ConnectionState::Connecting,
            State::Up { .. } => ConnectionState::Up,
            State::Down { error, since, .. } => {
                ConnectionState::Down { error: error.clone(), since: *since }
            }
        }
    }

    pub(super) fn warning(&self) -> Option<String> {
        lock(&self.warning).clone()
    }

    /// What a session is to know that comes to this server.
    pub(super) fn conditions(&self) -> Connected {
        let quarantine = self.quarantine();
        match &*lock(&self.state) {
            State::Up { connected, .. } => Connected { same_data: false, quarantine, ..*connected },
            _ => Connected { quarantine, ..Connected::default() },
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(&*lock(&self.state), State::Up { .. })
    }

    fn quarantine(&self) -> Quarantine {
        let lost_at = lock(&self.met).as_ref().and_then(|met| met.lost_at);
        Quarantine { is_on: self.quarantines, lost_at: lost_at.map(|at| self.clock.time(at)) }
    }

    /// Waits until it is known how to reach it.
    pub(super) async fn reach(&self) -> Reach {
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

    /// There is a new connection. Gives what sessions are to know of it.
    pub(super) fn connected(&self, connection: &Arc<dyn Connection>) -> Connected {
        let info = connection.server();
        self.warn(info.warning.as_deref());
        let same_data = self.meet(info);
        let connected =
            Connected { poll_only: info.poll_only, same_data, quarantine: self.quarantine() };
        let up = State::Up {
            connection: Arc::clone(connection),
            connected,
            _open: self.counts.meter.connected(),
        };
        match self.become_(up) {
            State::Down { since, .. } => {
                let away_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(target: "tower_semaphore", away_ms, "the backend is back");
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

    /// Keeps a warning of the server's; tells of it, if it is another one than before.
    fn warn(&self, warning: Option<&str>) {
        let before = std::mem::replace(&mut *lock(&self.warning), warning.map(str::to_owned));
        if let Some(warning) = warning.filter(|warning| before.as_deref() != Some(warning)) {
            tracing::warn!(target: "tower_semaphore", warning, "the backend's operator should know");
        }
    }

    /// Looks at the data behind a new connection: whether it is certain to be the same as before.
    fn meet(&self, info: &ServerInfo) -> bool {
        let now = Instant::now();
        let mut met = lock(&self.met);
        let (same, lost_at) = match &*met {
            // A process that is new here knows the age of the data, if that.
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
        *met = Some(Met { data: info.data.clone(), lost_at: lost_at.filter(|_| self.quarantines) });
        same
    }

    /// The connection broke. That is no reason yet to turn anyone away.
    pub(super) fn disconnected(&self, error: &BackendError) {
        tracing::debug!(target: "tower_semaphore", %error, "the connection to the backend is lost");
        self.counts.disconnected();
        self.abandoned();
    }

    /// No connection is to be had for now. Whether that is news.
    pub(super) fn unreachable(&self, error: &BackendError) -> bool {
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
            "the backend is away: the policy answers in its place"
        );
        true
    }

    /// Nobody looks after the connection any more.
    pub(super) fn abandoned(&self) {
        self.become_(State::Connecting);
    }

    /// Whether its sessions were sent to where they are counted by this routing; notes that they are to be
    /// from here on.
    pub(super) fn is_routed_by(&self, routing: u64) -> bool {
        self.routing.swap(routing, Ordering::AcqRel) == routing
    }

    /// Something was asked over its connection in vain: its driver sees whether that is any good.
    pub(super) fn doubt(&self) {
        self.doubted.store(true, Ordering::Release);
        self.outbox.wake();
    }

    /// Whether there is something to look into.
    pub(super) fn take_doubt(&self) -> bool {
        self.doubted.load(Ordering::Acquire) && self.doubted.swap(false, Ordering::AcqRel)
    }

    /// It is none of the backend's servers any more.
    pub(super) fn end(&self) {
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
        // What the state before counted ends with it, where no lock is held.
        before
    }

    // ===== messages to other processes =====

    /// Sends a message that needs no answer, unless too many are waiting to be sent.
    pub(super) fn send_message(&self, message: Message) {
        let mut messages = lock(&self.messages);
        if messages.len() < MESSAGES_MAX {
            messages.push_back(message);
            drop(messages);
            self.outbox.wake();
        }
    }

    pub(super) fn next_message(&self) -> Option<Message> {
        lock(&self.messages).pop_front()
    }
}
