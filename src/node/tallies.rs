//! Counts of each semaphore for operators. They outlive its sessions.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::RandomState;
use quick_cache::unsync::Cache;

use crate::protocol::Rate;
use crate::sharded::part_of;
use crate::sync::{Mutex, MutexGuard, lock};

/// About how many semaphores have counts. Names that are counted often stay; names that come once do not evict them.
const NAMES_MAX: usize = 1024;

/// The number of parts with a lock each: under overload, every request counts something.
const PARTS: usize = 16;

/// Counts by name.
pub(crate) struct Tallies {
    parts: [Mutex<Part>; PARTS],
    hasher: RandomState,
}

type Part = Cache<Arc<str>, Tally>;

/// What a process counted of one semaphore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) refused: u64,
    pub(crate) lost: u64,
    /// The limit of the last request, once the session is retired.
    pub(crate) limit: Option<u32>,
    /// The rate of the last request, likewise.
    pub(crate) rate: Option<Rate>,
}

impl Tallies {
    pub(crate) fn on_refused(&self, name: &str) {
        self.change(name, |tally| tally.refused = tally.refused.saturating_add(1));
    }

    pub(crate) fn on_lost(&self, name: &str) {
        self.change(name, |tally| tally.lost = tally.lost.saturating_add(1));
    }

    /// Keeps the limit and the rate of a session that is retired.
    pub(crate) fn on_retired(&self, name: &str, limit: u32, rate: Option<Rate>) {
        self.change(name, |tally| (tally.limit, tally.rate) = (Some(limit), rate));
    }

    pub(crate) fn of(&self, name: &str) -> Tally {
        self.part(name).get(name).copied().unwrap_or_default()
    }

    fn part(&self, name: &str) -> MutexGuard<'_, Part> {
        lock(&self.parts[part_of(self.hasher.hash_one(name), PARTS)])
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Tally)) {
        let mut by_name = self.part(name);
        let mut tally = by_name.get(name).copied().unwrap_or_default();
        change(&mut tally);
        by_name.insert(name.into(), tally);
    }
}

impl Default for Tallies {
    fn default() -> Self {
        let part = |_| Mutex::new(Cache::new(NAMES_MAX / PARTS));
        Self { parts: std::array::from_fn(part), hasher: RandomState::default() }
    }
}

impl fmt::Debug for Tallies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tallies").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{NAMES_MAX, Tallies, Tally};
    use crate::protocol::Rate;

    #[test]
    fn names_are_counted_apart_and_bounded() {
        let tallies = Tallies::default();
        tallies.on_refused("a");
        tallies.on_refused("a");
        tallies.on_lost("b");
        assert_eq!(tallies.of("a"), Tally { refused: 2, ..Tally::default() });
        let rate = Rate::parse("600/60000");
        tallies.on_retired("b", 5, rate);
        assert_eq!(tallies.of("b"), Tally { refused: 0, lost: 1, limit: Some(5), rate });
        assert_eq!(tallies.of("c"), Tally::default());
        for i in 0..3 * NAMES_MAX {
            tallies.on_refused(&i.to_string());
        }
        let kept: usize = tallies.parts.iter().map(|part| part.lock().unwrap().len()).sum();
        assert!(kept <= NAMES_MAX, "{kept}");
    }
}
