//! Whether the backend can be asked, and what was answered in its place.

use std::time::Duration;

use tokio::time::Instant;

use super::tallies::Tallies;
use crate::error::BackendError;
use crate::metrics::backend::BackendMeter;
use crate::metrics::requests::Meter;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// How a [`Semaphore`](crate::Semaphore) is: the answer of
/// [`health`](crate::Semaphore::health). The counts are of this process, since its start.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// Whether the backend can be asked; of several servers, the one that is worst off.
    pub connection: ConnectionState,
    /// Requests that passed by [`OnUnavailable::Admit`](crate::OnUnavailable::Admit) or
    /// [`OnUnavailable::Local`](crate::OnUnavailable::Local).
    pub admitted_by_policy: u64,
    /// Requests that were refused because the backend could not be asked; those of a layer in shadow,
    /// which pass all the same, among them.
    pub refused_by_policy: u64,
    /// Permits that were lost to their holders.
    pub lost: u64,
    /// How often the connection to the backend was lost.
    pub disconnects: u64,
    /// Semaphores that this process keeps a record of: those that it uses, or used within the last five
    /// seconds; while the backend is away, for up to two leases more.
    pub semaphores: usize,
    /// What the backend's operator should know, such as an eviction policy that loses semaphores.
    pub warning: Option<String>,
}

/// Whether the backend can be asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ConnectionState {
    /// It is in this process.
    Embedded,
    /// Nothing was asked yet, or a connection is being opened.
    Connecting,
    /// There is a connection.
    Up,
    /// It cannot be reached, and the policy answers in its place.
    Down {
        /// Why.
        error: BackendError,
        /// Since when.
        since: Instant,
    },
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    admitted: AtomicU64,
    refused: AtomicU64,
    lost: AtomicU64,
    disconnects: AtomicU64,
    /// Of the permits that were lost, those that neither a log line nor a metric shows yet; and what counts them.
    uncounted: AtomicU64,
    losers: Mutex<Vec<Meter>>,
    loss_log: Mutex<LossLog>,
    has_unlogged: AtomicBool,
    /// When the last refused call was logged.
    refusal_logged: Mutex<Option<Instant>>,
    /// Of each semaphore, what its requests were refused and its holders lost.
    pub(super) tallies: Tallies,
    pub(super) meter: BackendMeter,
}

/// What was logged of lost permits.
#[derive(Debug, Default)]
struct LossLog {
    unlogged: u64,
    last: Option<Instant>,
}

/// How often lost permits are logged.
const LOSS_LOG_INTERVAL: Duration = Duration::from_secs(1);
/// How often a refused call is logged.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);

impl Counts {
    pub(super) fn admitted(&self) {
        self.admitted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn lost(&self, meter: Option<Meter>) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        lock(&self.losers).extend(meter);
        self.uncounted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn disconnected(&self) {
        self.disconnects.fetch_add(1, Ordering::Relaxed);
        self.meter.disconnected();
    }

    /// Logs and counts the permits that were lost since the last time: at once, but not more than once a
    /// second, unless it is to be `all` of them. Says when there is more to log. Not to be called under a
    /// lock.
    pub(super) fn log_lost(&self, all: bool) -> Option<Instant> {
        if self.uncounted.load(Ordering::Relaxed) == 0 && !self.has_unlogged.load(Ordering::Relaxed)
        {
            return None;
        }
        let new = self.uncounted.swap(0, Ordering::Relaxed);
        let losers = std::mem::take(&mut *lock(&self.losers));
        losers.iter().for_each(Meter::lost);
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

    /// Logs that the backend refused a call, though it is there: once a minute at the most.
    pub(super) fn log_refused_call(&self, semaphore: &str, error: &BackendError) {
        let now = Instant::now();
        let mut logged = lock(&self.refusal_logged);
        if logged.is_some_and(|at| now < at + REFUSAL_LOG_INTERVAL) {
            return;
        }
        *logged = Some(now);
        drop(logged);
        tracing::warn!(target: "tower_semaphore", semaphore, %error, "the backend refused a call");
    }

    pub(super) fn health(
        &self,
        connection: ConnectionState,
        semaphores: usize,
        warning: Option<String>,
    ) -> Health {
        Health {
            connection,
            admitted_by_policy: self.admitted.load(Ordering::Relaxed),
            refused_by_policy: self.refused.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            disconnects: self.disconnects.load(Ordering::Relaxed),
            semaphores,
            warning,
        }
    }
}
