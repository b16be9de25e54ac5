//! Counts of each semaphore that outlive its sessions, for operators.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::RandomState;
use quick_cache::unsync::Cache;

use crate::sharded::part_of;
use crate::sync::{Mutex, MutexGuard, lock};

/// About how many semaphores have counts: those that are counted often, so that names that come once drive none of
/// them out.
const NAMES_MAX: usize = 1024;

/// How many locks there are: under overload each request counts something.
const PARTS: usize = 16;

/// Counts by name. They outlive the session of a name that is not in use.
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
    /// The limit of its last request, once its session is gone.
    pub(crate) limit: Option<u32>,
}

impl Tallies {
    pub(crate) fn refused(&self, name: &str) {
        self.change(name, |tally| tally.refused = tally.refused.saturating_add(1));
    }

    pub(crate) fn lost(&self, name: &str) {
        self.change(name, |tally| tally.lost = tally.lost.saturating_add(1));
    }

    /// Notes that the session of a name is gone.
    pub(crate) fn retired(&self, name: &str, limit: u32) {
        self.change(name, |tally| tally.limit = Some(limit));
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

    #[test]
    fn names_are_counted_apart_and_bounded() {
        let tallies = Tallies::default();
        tallies.refused("a");
        tallies.refused("a");
        tallies.lost("b");
        assert_eq!(tallies.of("a"), Tally { refused: 2, ..Tally::default() });
        tallies.retired("b", 5);
        assert_eq!(tallies.of("b"), Tally { refused: 0, lost: 1, limit: Some(5) });
        assert_eq!(tallies.of("c"), Tally::default());
        for i in 0..3 * NAMES_MAX {
            tallies.refused(&i.to_string());
        }
        let kept: usize = tallies.parts.iter().map(|part| part.lock().unwrap().len()).sum();
        assert!(kept <= NAMES_MAX, "{kept}");
    }
}
