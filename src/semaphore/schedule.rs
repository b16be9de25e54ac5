//! What is to be looked at, and when.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::Mutex;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::lock;

/// Looks that are to come, the earliest first.
pub(super) struct Schedule<T> {
    looks: Mutex<BinaryHeap<Look<T>>>,
    came: Notify,
}

struct Look<T> {
    at: Instant,
    what: T,
}

impl<T> Schedule<T> {
    pub(super) fn new() -> Self {
        Self { looks: Mutex::default(), came: Notify::new() }
    }

    pub(super) fn push(&self, what: T, at: Instant) {
        let mut looks = lock(&self.looks);
        let first = looks.peek().is_none_or(|look| at < look.at);
        looks.push(Look { at, what });
        drop(looks);
        if first {
            self.wake();
        }
    }

    /// The next look that is due; or else when there is one, if at all.
    pub(super) fn due(&self, now: Instant) -> Result<(Instant, T), Option<Instant>> {
        let mut looks = lock(&self.looks);
        match looks.peek() {
            Some(look) if look.at <= now => {}
            next => return Err(next.map(|look| look.at)),
        }
        looks.pop().map(|Look { at, what }| (at, what)).ok_or(None)
    }

    /// Until there may be something that is due earlier.
    pub(super) async fn came(&self) {
        self.came.notified().await;
    }

    pub(super) fn wake(&self) {
        self.came.notify_one();
    }

    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *lock(&self.looks));
        // Where no lock is held: what ends here may look at this.
        drop(all);
    }
}

impl<T> PartialEq for Look<T> {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl<T> Eq for Look<T> {}

impl<T> PartialOrd for Look<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Look<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        // The earliest is the greatest, as a `BinaryHeap` wants it.
        Reverse(self.at).cmp(&Reverse(other.at))
    }
}
