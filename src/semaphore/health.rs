//! Whether the backend can be asked, and what was answered in its place.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

use crate::error::BackendError;

/// How a [`Semaphore`](crate::Semaphore) is: the answer of
/// [`health`](crate::Semaphore::health). The counts are of this process, since its start.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// Whether the backend can be asked.
    pub link: LinkState,
    /// Requests that passed by [`OnUnavailable::Admit`](crate::OnUnavailable::Admit) or
    /// [`OnUnavailable::Local`](crate::OnUnavailable::Local).
    pub admitted_by_policy: u64,
    /// Requests that were refused because the backend could not be asked.
    pub refused_by_policy: u64,
    /// Permits that were lost to their holders.
    pub lost: u64,
    /// How often the connection to the backend was lost.
    pub disconnects: u64,
    /// What the backend's operator should know, such as an eviction policy that loses semaphores.
    pub warning: Option<String>,
}

/// Whether the backend can be asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LinkState {
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
    warning: Mutex<Option<String>>,
}

impl Counts {
    pub(super) fn admitted(&self) {
        self.admitted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn disconnected(&self) {
        self.disconnects.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn warn(&self, warning: Option<String>) {
        *self.warning.lock().unwrap_or_else(PoisonError::into_inner) = warning;
    }

    pub(super) fn health(&self, link: LinkState) -> Health {
        Health {
            link,
            admitted_by_policy: self.admitted.load(Ordering::Relaxed),
            refused_by_policy: self.refused.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            disconnects: self.disconnects.load(Ordering::Relaxed),
            warning: self.warning.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}
