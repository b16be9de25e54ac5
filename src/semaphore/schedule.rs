//! What is to be looked at, and when.

use std::collections::BTreeMap;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::lock;
use crate::sync::Mutex;

/// Looks that are to come, the earliest first.
pub(super) struct Schedule<T> {
    looks: Mutex<Looks<T>>,
    came: Notify,
}

struct Looks<T> {
    by_time: BTreeMap<Look, T>,
    /// Counts what came, so that equals keep their order.
    serial: u64,
}

/// One look that is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Look {
    at: Instant,
    serial: u64,
}

impl<T> Schedule<T> {
    pub(super) fn new() -> Self {
        let looks = Looks { by_time: BTreeMap::new(), serial: 0 };
        Self { looks: Mutex::new(looks), came: Notify::new() }
    }

    pub(super) fn push(&self, what: T, at: Instant) -> Look {
        let mut looks = lock(&self.looks);
        looks.serial += 1;
        let look = Look { at, serial: looks.serial };
        let first = looks.by_time.keys().next().is_none_or(|first| look < *first);
        looks.by_time.insert(look, what);
        drop(looks);
        if first {
            self.wake();
        }
        look
    }

    /// Takes a look back.
    pub(super) fn remove(&self, look: Look) -> Option<T> {
        lock(&self.looks).by_time.remove(&look)
    }

    /// The next look that is due; or else when there is one, if at all.
    pub(super) fn due(&self, now: Instant) -> Result<(Look, T), Option<Instant>> {
        let mut looks = lock(&self.looks);
        match looks.by_time.first_entry() {
            Some(first) if first.key().at <= now => Ok(first.remove_entry()),
            next => Err(next.map(|next| next.key().at)),
        }
    }

    /// Waits until there may be something that is due earlier.
    pub(super) async fn came(&self) {
        self.came.notified().await;
    }

    pub(super) fn wake(&self) {
        self.came.notify_one();
    }
}

impl Look {
    pub(super) const fn at(self) -> Instant {
        self.at
    }
}
