//! The connection to the backend, as requests see it.

use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use super::health::{Counts, LinkState};
use super::lock;
use super::places::{Conditions, Quarantine};
use crate::backend::Server;
use crate::error::BackendError;

/// How things stand between a process and its backend.
pub(super) struct Link {
    state: Mutex<State>,
    counts: Arc<Counts>,
    quarantines: bool,
    met: Mutex<Option<Met>>,
}

enum State {
    /// There is no connection yet, or it was lost just now: requests wait for it.
    Connecting,
    Up {
        deaf: bool,
    },
    /// It could not be opened, so requests are not made to wait for it.
    Down {
        error: BackendError,
        since: Instant,
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
        Self { state: Mutex::new(State::Connecting), counts, quarantines, met: Mutex::default() }
    }

    /// Why the backend cannot be asked at present, if so.
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
            State::Down { error, since } => LinkState::Down { error: error.clone(), since: *since },
        }
    }

    pub(super) fn conditions(&self) -> Conditions {
        let (deaf, away) = match &*lock(&self.state) {
            State::Connecting => (false, None),
            State::Up { deaf } => (*deaf, None),
            State::Down { error, .. } => (false, Some(error.clone())),
        };
        let lost_at = lock(&self.met).as_ref().and_then(|met| met.lost_at);
        Conditions { deaf, away, quarantine: Quarantine { is_on: self.quarantines, lost_at } }
    }

    /// There is a new connection. Says when data was lost, as far as this server shows, if that
    /// matters.
    pub(super) fn connected(&self, server: &Server) -> Option<Instant> {
        if let Some(warning) = &server.warning {
            tracing::warn!("{warning}");
        }
        self.counts.warn(server.warning.clone());
        let lost_at = self.meet(server);
        let up = State::Up { deaf: server.deaf };
        if let State::Down { since, .. } = std::mem::replace(&mut *lock(&self.state), up) {
            tracing::info!(after = ?since.elapsed(), "the semaphore's backend is back");
        }
        lost_at
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
        tracing::debug!(%error, "the connection to the semaphore's backend is lost");
        self.counts.disconnected();
        *lock(&self.state) = State::Connecting;
    }

    /// There is none to be had for now.
    pub(super) fn unreachable(&self, error: &BackendError) {
        let mut state = lock(&self.state);
        let since = match &*state {
            State::Down { since, .. } => *since,
            State::Connecting | State::Up { .. } => {
                tracing::warn!(%error, "the semaphore's backend is away: the policy answers");
                Instant::now()
            }
        };
        *state = State::Down { error: error.clone(), since };
    }
}
