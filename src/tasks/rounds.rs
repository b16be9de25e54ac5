//! The watchdog's rounds: it visits connections from time to time, because nothing wakes a task when a peer closes a
//! socket in which data lies unread.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::{Mutex, lock};

/// The pause between two rounds.
const PAUSE: Duration = Duration::from_millis(250);
/// The number of visits before leases that are due, and other tasks, have their turn.
const AT_A_TIME: usize = 500;

/// What the watchdog visits.
pub(crate) trait Visited: Send + Sync {
    /// Called in each round, under no lock. Returns whether to visit it again.
    fn visit(&self) -> bool;

    /// Called when the rounds end while it still wants visits.
    fn on_rounds_end(self: Arc<Self>);
}

/// The list of what is visited in each round.
#[derive(Default)]
pub(crate) struct Rounds {
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    visited: Vec<Weak<dyn Visited>>,
    next: Option<Instant>,
    is_over: bool,
}

/// A round. If it is interrupted, its list goes back to the next one.
pub(crate) struct Round<'a> {
    rounds: &'a Rounds,
    visited: Vec<Weak<dyn Visited>>,
    at: usize,
}

impl Round<'_> {
    /// Makes up to [`AT_A_TIME`] visits. Returns whether there are more to make.
    pub(crate) fn go_on(&mut self) -> bool {
        for _ in 0..AT_A_TIME {
            let Some(visited) = self.visited.get(self.at) else { return false };
            if visited.upgrade().is_some_and(|visited| visited.visit()) {
                self.at += 1;
            } else {
                self.visited.swap_remove(self.at);
            }
        }
        self.at < self.visited.len()
    }
}

impl Rounds {
    /// Adds something to the next rounds. Returns whether it is the only one, so that the watchdog has to be woken;
    /// `None` if there are no more rounds.
    pub(crate) fn add(&self, visited: Weak<dyn Visited>) -> Option<bool> {
        let mut list = lock(&self.list);
        if list.is_over {
            return None;
        }
        list.visited.push(visited);
        let is_first = list.next.is_none();
        if is_first {
            list.next = Some(Instant::now() + PAUSE);
        }
        Some(is_first)
    }

    /// Begins a round, if one is due.
    pub(crate) fn begin(&self) -> Option<Round<'_>> {
        let mut list = lock(&self.list);
        list.next.filter(|next| *next <= Instant::now())?;
        list.next = None;
        Some(Round { rounds: self, visited: std::mem::take(&mut list.visited), at: 0 })
    }

    /// Returns when the next round is due.
    pub(crate) fn next(&self) -> Option<Instant> {
        lock(&self.list).next
    }

    /// Ends the rounds for good.
    pub(crate) fn end(&self) {
        let mut list = lock(&self.list);
        list.is_over = true;
        let visited = std::mem::take(&mut list.visited);
        drop(list);
        notify_of_end(visited);
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.end();
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut visited = std::mem::take(&mut self.visited);
        let mut list = lock(&self.rounds.list);
        if list.is_over {
            drop(list);
            return notify_of_end(visited);
        }
        visited.append(&mut list.visited);
        if visited.capacity() > 4 * visited.len() + 64 {
            visited.shrink_to(2 * visited.len());
        }
        list.next = (!visited.is_empty()).then(|| Instant::now() + PAUSE);
        list.visited = visited;
    }
}

/// Must not be called under the lock.
fn notify_of_end(visited: impl IntoIterator<Item = Weak<dyn Visited>>) {
    visited.into_iter().filter_map(|visited| visited.upgrade()).for_each(|it| it.on_rounds_end());
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Weak};

    use tokio::time::sleep;

    use super::{AT_A_TIME, PAUSE, Visited};
    use crate::semaphore::Semaphore;

    /// Wants this number of visits.
    struct Guest {
        wanted: usize,
        visits: AtomicUsize,
        ends: AtomicUsize,
    }

    impl Guest {
        fn new(wanted: usize) -> Arc<Self> {
            Arc::new(Self { wanted, visits: AtomicUsize::new(0), ends: AtomicUsize::new(0) })
        }
    }

    impl Visited for Guest {
        fn visit(&self) -> bool {
            self.visits.fetch_add(1, Ordering::Relaxed) + 1 < self.wanted
        }

        fn on_rounds_end(self: Arc<Self>) {
            self.ends.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn add(semaphore: &Semaphore, guest: &Arc<Guest>) -> bool {
        let guest: Weak<Guest> = Arc::downgrade(guest);
        semaphore.visitor().visit(guest)
    }

    #[tokio::test(start_paused = true)]
    async fn each_is_visited_in_each_round_until_it_wants_no_more() {
        let semaphore = Semaphore::in_memory();
        let guests: Vec<_> = (0..3 * AT_A_TIME).map(|at| Guest::new(1 + at % 3)).collect();
        assert!(guests.iter().all(|guest| add(&semaphore, guest)));
        sleep(10 * PAUSE).await;
        for guest in guests {
            assert_eq!(guest.visits.load(Ordering::Relaxed), guest.wanted);
            assert_eq!(guest.ends.load(Ordering::Relaxed), 0);
        }
        // Another one comes, after rounds without any.
        let late = Guest::new(2);
        assert!(add(&semaphore, &late));
        sleep(3 * PAUSE).await;
        assert_eq!(late.visits.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_the_rounds_is_notified() {
        let semaphore = Semaphore::in_memory();
        let [before, after] = [Guest::new(usize::MAX), Guest::new(usize::MAX)];
        assert!(add(&semaphore, &before));
        semaphore.shutdown().await;
        assert_eq!(before.ends.load(Ordering::Relaxed), 1);
        assert!(!add(&semaphore, &after));
    }
}
