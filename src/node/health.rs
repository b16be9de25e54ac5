//! The health of a semaphore: the state of its connection, and what went wrong since the process started.

use std::time::Duration;

use tokio::time::Instant;

use super::tallies::Tallies;
use crate::error::BackendError;
use crate::metrics::backend::BackendMeter;
use crate::metrics::requests::Meter;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// The health of a [`Semaphore`](crate::Semaphore), as [`health`](crate::Semaphore::health) returns it. The counts
/// are those of this process since its start.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// Whether the backend can be asked; with several servers, the worst state.
    pub connection: ConnectionState,
    /// Requests that were admitted by [`OnUnavailable::Admit`](crate::OnUnavailable::Admit) or
    /// [`OnUnavailable::Local`](crate::OnUnavailable::Local).
    pub admitted_by_policy: u64,
    /// Requests that were refused because the backend could not be asked. Includes requests to a layer in shadow, which
    /// are passed on all the same.
    pub refused_by_policy: u64,
    /// Permits that were lost while in use.
    pub lost: u64,
    /// How often the connection to the backend was lost.
    pub disconnects: u64,
    /// Semaphores that this process keeps a record of: those that are in use, or were within the last five seconds; in
    /// an outage of the backend, up to two leases longer.
    pub semaphores: usize,
    /// The end of the quarantine, during which nothing is granted because the backend may have lost data (see
    /// `AfterLoss::Quarantine`); with several servers, the last end. `None` if there is no quarantine, or it affects no
    /// semaphore that this process uses.
    pub quarantined_until: Option<Instant>,
    /// The number of semaphores that are paused until a time, by a response of the upstream or by
    /// [`pause_for`](crate::Semaphore::pause_for), as this process knows it.
    pub paused: usize,
    /// A warning for the operator of the backend, such as an eviction policy that loses semaphores.
    pub warning: Option<String>,
}

/// Whether the backend can be asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ConnectionState {
    /// The backend is in this process.
    Embedded,
    /// No connection has been needed yet, or one is being opened.
    Connecting,
    /// A connection is open.
    Up,
    /// The backend cannot be reached, and the policy answers in its place.
    Down {
        /// The error of the last attempt.
        error: BackendError,
        /// When the outage began.
        since: Instant,
    },
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    admitted: AtomicU64,
    refused: AtomicU64,
    lost: AtomicU64,
    disconnects: AtomicU64,
    /// Lost permits that are neither logged nor in a metric yet, and the meters that count them.
    uncounted: AtomicU64,
    losers: Mutex<Vec<Meter>>,
    loss_log: Mutex<LossLog>,
    has_unlogged: AtomicBool,
    /// A server may be in quarantine.
    has_quarantine: AtomicBool,
    /// When a refused call was last logged.
    refusal_logged: Mutex<Option<Instant>>,
    /// Since when lines about pauses and adaptive limits are counted, and how many there were.
    pauses_logged: Mutex<(Option<Instant>, u32)>,
    /// Rejected requests and lost permits of each semaphore.
    pub(crate) tallies: Tallies,
    pub(crate) meter: BackendMeter,
}

/// The state of the log of lost permits.
#[derive(Debug, Default)]
struct LossLog {
    unlogged: u64,
    last: Option<Instant>,
}

/// The shortest time between two log lines about lost permits.
const LOSS_LOG_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two log lines about refused calls.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// The most log lines at `INFO` about pauses until a time and adaptive limits, and in how long. Upstreams can pause
/// thousands of names.
const PAUSE_LOG_MAX: (u32, Duration) = (10, Duration::from_secs(1));

impl Counts {
    pub(crate) fn on_admitted(&self) {
        self.admitted.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn on_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a lost permit. [`log_lost`](Self::log_lost) tells its meter, because no metric is recorded under a lock.
    pub(crate) fn on_lost(&self, meter: Option<Meter>) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        lock(&self.losers).extend(meter);
        self.uncounted.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn on_quarantine(&self) {
        self.has_quarantine.store(true, Ordering::Release);
    }

    /// Returns whether a server may be in quarantine. Call [`on_quarantine`](Self::on_quarantine) if one still is.
    pub(crate) fn take_quarantine(&self) -> bool {
        self.has_quarantine.load(Ordering::Acquire)
            && self.has_quarantine.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn on_disconnected(&self) {
        self.disconnects.fetch_add(1, Ordering::Relaxed);
        self.meter.on_disconnected();
    }

    /// Counts and logs the permits lost since the last call; logs at most once a second unless `all` is set. Returns
    /// when to call again to log the rest. Must not be called under a lock.
    pub(crate) fn log_lost(&self, all: bool) -> Option<Instant> {
        if self.uncounted.load(Ordering::Relaxed) == 0 && !self.has_unlogged.load(Ordering::Relaxed)
        {
            return None;
        }
        let new = self.uncounted.swap(0, Ordering::Relaxed);
        let losers = std::mem::take(&mut *lock(&self.losers));
        losers.iter().for_each(Meter::on_lost);
        let now = Instant::now();
        let mut log = lock(&self.loss_log);
        log.unlogged += new;
        let again = log.last.map(|last| last + LOSS_LOG_INTERVAL).filter(|at| !all && now < *at);
        self.has_unlogged.store(again.is_some() && log.unlogged > 0, Ordering::Relaxed);
        if again.is_some() {
            return again.filter(|_| log.unlogged > 0);
        }
        let permits = std::mem::take(&mut log.unlogged);
        log.last = Some(now);
        drop(log);
        if permits > 0 {
            tracing::warn!(target: "tower_semaphore", permits, "permits were lost to their holders");
        }
        None
    }

    /// Logs, at most once a minute, that a reachable backend refused a call.
    pub(crate) fn log_refused_call(&self, semaphore: &str, error: &BackendError) {
        let now = Instant::now();
        let mut logged = lock(&self.refusal_logged);
        if logged.is_some_and(|at| now < at + REFUSAL_LOG_INTERVAL) {
            return;
        }
        *logged = Some(now);
        drop(logged);
        tracing::warn!(target: "tower_semaphore", semaphore, %error, "the backend refused a call");
    }

    /// Returns whether a line about a pause or an adaptive limit may be logged at `INFO`, and counts it.
    pub(crate) fn may_log_pause(&self) -> bool {
        let now = Instant::now();
        let mut logged = lock(&self.pauses_logged);
        let (since, count) = &mut *logged;
        if since.is_none_or(|since| since + PAUSE_LOG_MAX.1 <= now) {
            (*since, *count) = (Some(now), 0);
        }
        *count = count.saturating_add(1);
        *count <= PAUSE_LOG_MAX.0
    }

    pub(crate) fn health(
        &self,
        connection: ConnectionState,
        semaphores: usize,
        quarantined_until: Option<Instant>,
        warning: Option<String>,
    ) -> Health {
        Health {
            connection,
            admitted_by_policy: self.admitted.load(Ordering::Relaxed),
            refused_by_policy: self.refused.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            disconnects: self.disconnects.load(Ordering::Relaxed),
            semaphores,
            quarantined_until,
            paused: 0,
            warning,
        }
    }
}
