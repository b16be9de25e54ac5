//! The sessions that have something to send to a server, the most urgent first.
//!
//! Renewals go first and by themselves: behind a burst of requests they would come too late, and a permit would be
//! lost.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::protocol::Time;
use crate::protocol::session::Urgency;
use crate::sync::{Mutex, lock};

/// A queue with three classes: calls that requests wait for, renewals, and the rest.
///
/// An item can be in several classes, and more than once. The driver checks whether it still has something to send.
pub(crate) struct Outbox<T> {
    queue: Mutex<Queue<T>>,
    came: Notify,
}

/// What a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To keep leases alive.
    KeepAlive,
    /// Everything else.
    Serve,
}

impl Purpose {
    /// The most urgent first.
    pub(crate) const ALL: [Self; 2] = [Self::KeepAlive, Self::Serve];
}

struct Queue<T> {
    now: VecDeque<T>,
    before: BinaryHeap<Reverse<Due<T>>>,
    later: VecDeque<T>,
    /// Counts items, so that equal ones keep their order.
    serial: u64,
}

struct Due<T> {
    at: Time,
    serial: u64,
    item: T,
}

impl<T> Outbox<T> {
    pub(crate) fn new() -> Self {
        let (now, later) = (VecDeque::new(), VecDeque::new());
        let queue = Queue { now, before: BinaryHeap::new(), later, serial: 0 };
        Self { queue: Mutex::new(queue), came: Notify::new() }
    }

    pub(crate) fn push(&self, item: T, urgency: Urgency) {
        let mut queue = lock(&self.queue);
        match urgency {
            Urgency::Now => queue.now.push_back(item),
            Urgency::Before(at) => {
                queue.serial += 1;
                let serial = queue.serial;
                queue.before.push(Reverse(Due { at, serial, item }));
            }
            Urgency::Later => queue.later.push_back(item),
        }
        drop(queue);
        self.wake();
    }

    /// Returns whether there is an item for this purpose.
    pub(crate) fn has(&self, purpose: Purpose) -> bool {
        let queue = lock(&self.queue);
        match purpose {
            Purpose::KeepAlive => !queue.before.is_empty(),
            Purpose::Serve => !queue.now.is_empty() || !queue.later.is_empty(),
        }
    }

    /// Takes out the next item for this purpose: the one whose lease ends first, or one that a request waits for.
    pub(crate) fn pop(&self, purpose: Purpose) -> Option<T> {
        let mut queue = lock(&self.queue);
        match purpose {
            Purpose::KeepAlive => queue.before.pop().map(|Reverse(due)| due.item),
            Purpose::Serve => queue.now.pop_front().or_else(|| queue.later.pop_front()),
        }
    }

    /// Takes everything out.
    pub(crate) fn clear(&self) -> Vec<T> {
        let mut queue = lock(&self.queue);
        let mut all = Vec::from(std::mem::take(&mut queue.now));
        all.extend(std::mem::take(&mut queue.before).into_iter().map(|Reverse(due)| due.item));
        all.extend(std::mem::take(&mut queue.later));
        all
    }

    /// Waits until an item may have come.
    pub(crate) fn came(&self) -> Notified<'_> {
        self.came.notified()
    }

    pub(crate) fn wake(&self) {
        self.came.notify_one();
    }
}

impl<T> PartialEq for Due<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Due<T> {}

impl<T> PartialOrd for Due<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Due<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Outbox, Purpose};
    use crate::protocol::Time;
    use crate::protocol::session::Urgency;

    #[test]
    fn the_earliest_lease_end_goes_first_and_equals_keep_their_order() {
        let outbox = Outbox::new();
        let before = |s| Urgency::Before(Time::since_epoch(Duration::from_secs(s)));
        for (item, urgency) in [
            ("audit", Urgency::Later),
            ("third", before(7)),
            ("first", before(5)),
            ("second", before(5)),
            ("request", Urgency::Now),
        ] {
            outbox.push(item, urgency);
        }
        for item in ["request", "audit"] {
            assert_eq!(outbox.pop(Purpose::Serve), Some(item));
        }
        for item in ["first", "second", "third"] {
            assert_eq!(outbox.pop(Purpose::KeepAlive), Some(item));
        }
        assert!(Purpose::ALL.iter().all(|purpose| outbox.pop(*purpose).is_none()));
    }
}
