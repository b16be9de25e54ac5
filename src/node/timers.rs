//! The timers at which the watchdog handles sessions.

use std::collections::BTreeMap;

use tokio::sync::Notify;

use crate::protocol::Time;
use crate::sync::{Mutex, lock};

/// Timers, the earliest first.
pub(crate) struct Timers<T> {
    pending: Mutex<Pending<T>>,
    came: Notify,
}

struct Pending<T> {
    by_time: BTreeMap<Timer, T>,
    /// Counts timers, so that equal ones keep their order.
    serial: u64,
}

/// One timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Timer {
    at: Time,
    serial: u64,
}

impl<T> Timers<T> {
    pub(crate) fn new() -> Self {
        let pending = Pending { by_time: BTreeMap::new(), serial: 0 };
        Self { pending: Mutex::new(pending), came: Notify::new() }
    }

    pub(crate) fn push(&self, what: T, at: Time) -> Timer {
        let mut pending = lock(&self.pending);
        pending.serial += 1;
        let timer = Timer { at, serial: pending.serial };
        let first = pending.by_time.keys().next().is_none_or(|first| timer < *first);
        pending.by_time.insert(timer, what);
        drop(pending);
        if first {
            self.wake();
        }
        timer
    }

    /// Cancels a timer.
    pub(crate) fn remove(&self, timer: Timer) -> Option<T> {
        lock(&self.pending).by_time.remove(&timer)
    }

    /// Takes out the next timer that is due. `Err` is when the next one will be, if there is one.
    pub(crate) fn due(&self, now: Time) -> Result<(Timer, T), Option<Time>> {
        let mut pending = lock(&self.pending);
        match pending.by_time.first_entry() {
            Some(first) if first.key().at <= now => Ok(first.remove_entry()),
            next => Err(next.map(|next| next.key().at)),
        }
    }

    /// Waits until an earlier timer may have come.
    pub(crate) async fn came(&self) {
        self.came.notified().await;
    }

    pub(crate) fn wake(&self) {
        self.came.notify_one();
    }
}
