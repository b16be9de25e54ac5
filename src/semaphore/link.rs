//! The connection to a server of the backend, as requests see it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use super::health::{Counts, LinkState};
use super::link_meter::Level;
use super::lock;
use super::places::{Conditions, Quarantine};
use crate::backend::Server;
use crate::error::BackendError;

/// How things stand between a process and a server of its backend.
pub(super) struct Link {
    state: Mutex<State>,
    counts: Arc<Counts>,
    quarantines: bool,
    met: Mutex<Option<Met>>,
    was_deaf: AtomicBool,
    warning: Mutex<Option<String>>,
}

enum State {
    /// There is no connection yet, or it was lost just now: requests wait for it.
    Connecting,
    Up {
        deaf: bool,
        _open: Level,
    },
    /// It could not be opened, so requests are not made to wait for it.
    Down {
        error: BackendError,
        since: Instant,
        _away: Level,
    },
}

/// The server that was there last.
struct Met {
    /// See [`Server::data`].
    data: Option<String>,
    /// When data was lost before that, if it may matter still.
    lost_at: Option<Instant>,
}

impl Link {
    /// `quarantines`: whether a loss of data matters.
    pub(super) fn new(quarantines: bool, counts: Arc<Counts>) -> Self {
        Self {
            state: Mutex::new(State::Connecting),
            counts,
            quarantines,
            met: Mutex::default(),
            was_deaf: AtomicBool::new(false),
            warning: Mutex::default(),
        }
    }

    /// Why the server cannot be asked at present, if so.
    pub(super) fn down(&self) -> Option<BackendError> {
        match &*lock(&self.state) {
            State::Connecting | State::Up { .. } => None,
            State::Down { error, .. } => Some(error.clone()),
        }
    }

    pub(super) fn health(&self) -> LinkState {
        match &*lock(&self.state) {
            State::Connecting => LinkState::Connecting,
            State::Up { .. } => LinkState::Up,
            State::Down { error, since, .. } => {
                LinkState::Down { error: error.clone(), since: *since }
            }
        }
    }

    pub(super) fn warning(&self) -> Option<String> {
        lock(&self.warning).clone()
    }

    /// If there is a connection: whether it is deaf, and when data was lost, if that matters.
    pub(super) fn up(&self) -> Option<(bool, Option<Instant>)> {
        let State::Up { deaf, .. } = *lock(&self.state) else { return None };
        Some((deaf, lock(&self.met).as_ref().and_then(|met| met.lost_at)))
    }

    pub(super) fn conditions(&self) -> Conditions {
        let (deaf, away) = match &*lock(&self.state) {
            State::Connecting => (false, None),
            State::Up { deaf, .. } => (*deaf, None),
            State::Down { error, .. } => (false, Some(error.clone())),
        };
        let lost_at = lock(&self.met).as_ref().and_then(|met| met.lost_at);
        Conditions { deaf, away, quarantine: Quarantine { is_on: self.quarantines, lost_at } }
    }

    /// There is a new connection. Says when data was lost, as far as this server shows, if that
    /// matters.
    pub(super) fn connected(&self, server: &Server) -> Option<Instant> {
        self.warn(server.warning.as_deref());
        let lost_at = self.meet(server);
        let up = State::Up { deaf: server.deaf, _open: self.counts.meter.connected() };
        let before = std::mem::replace(&mut *lock(&self.state), up);
        match before {
            State::Down { since, .. } => {
                let away_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(target: "tower_semaphore", away_ms, "the backend is back");
            }
            _ => tracing::debug!(target: "tower_semaphore", "connected to the backend"),
        }
        let was_deaf = self.was_deaf.swap(server.deaf, Ordering::Relaxed);
        if server.deaf && !was_deaf {
            let what = "hints cannot be had, so waiting costs polling";
            tracing::warn!(target: "tower_semaphore", "{what}");
        }
        lost_at
    }

    /// Keeps a warning of the server's; tells of it, if it is another one than before.
    fn warn(&self, warning: Option<&str>) {
        let before = std::mem::replace(&mut *lock(&self.warning), warning.map(str::to_owned));
        if let Some(warning) = warning.filter(|warning| before.as_deref() != Some(warning)) {
            tracing::warn!(target: "tower_semaphore", warning, "the backend's operator should know");
        }
    }

    fn meet(&self, server: &Server) -> Option<Instant> {
        if !self.quarantines {
            return None;
        }
        let now = Instant::now();
        let mut met = lock(&self.met);
        let lost_at = match &*met {
            // A process that is new here knows the age of the data, if that.
            None => match server.age {
                Some(age) => now.checked_sub(age),
                None => Some(now),
            },
            Some(Met { data: Some(data), lost_at }) if Some(data) == server.data.as_ref() => {
                *lost_at
            }
            Some(_) => Some(now),
        };
        *met = Some(Met { data: server.data.clone(), lost_at });
        lost_at
    }

    /// The connection broke. That is no reason yet to turn anyone away.
    pub(super) fn disconnected(&self, error: &BackendError) {
        tracing::debug!(target: "tower_semaphore", %error, "the connection to the backend is lost");
        self.counts.disconnected();
        self.ended();
    }

    /// There is none to be had for now.
    pub(super) fn unreachable(&self, error: &BackendError) {
        self.counts.meter.connect_failed();
        if let State::Down { error: last, .. } = &mut *lock(&self.state) {
            *last = error.clone();
            return;
        }
        let _away = self.counts.meter.unavailable();
        let down = State::Down { error: error.clone(), since: Instant::now(), _away };
        let before = std::mem::replace(&mut *lock(&self.state), down);
        drop(before);
        tracing::warn!(
            target: "tower_semaphore",
            %error,
            "the backend is away: the policy answers in its place"
        );
    }

    /// Nobody sees to the connection any more.
    pub(super) fn ended(&self) {
        let before = std::mem::replace(&mut *lock(&self.state), State::Connecting);
        // Where no lock is held: what it counted ends with it.
        drop(before);
    }
}
