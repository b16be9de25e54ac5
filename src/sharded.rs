//! A map by name, in parts with a lock each: different names rarely share one.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::RandomState;

use crate::sync::{Mutex, MutexGuard, lock};

/// How many locks there are.
const SHARDS: usize = if cfg!(all(test, shuttle)) { 2 } else { 64 };

/// A map from names, behind a lock for each part of it.
pub(crate) struct Sharded<T> {
    parts: [Mutex<Part<T>>; SHARDS],
    hasher: RandomState,
}

type Part<T> = HashMap<Arc<str>, T, RandomState>;

/// A locked part of the map.
pub(crate) type Guard<'a, T> = MutexGuard<'a, Part<T>>;

impl<T> Sharded<T> {
    /// Locks the part in which this name is, if it is in the map.
    pub(crate) fn of(&self, name: &str) -> Guard<'_, T> {
        // Clients choose names: by a hash that they do not know, they cannot choose names that share a lock.
        lock(&self.parts[part_of(self.hasher.hash_one(name), SHARDS)])
    }

    /// Locks one part after the other.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Guard<'_, T>> {
        self.parts.iter().map(lock)
    }
}

/// Removes a name. The part gives room back once most of it is free.
pub(crate) fn remove<T>(part: &mut Guard<'_, T>, name: &str) -> Option<T> {
    let removed = part.remove(name);
    let len = part.len();
    if len < part.capacity() / 4 {
        part.shrink_to(2 * len);
    }
    removed
}

/// In which of so many parts a name with this hash is.
pub(crate) const fn part_of(hash: u64, parts: usize) -> usize {
    // The upper half: maps look for their entries by the lower one.
    (hash >> 32) as usize % parts
}

impl<T> Default for Sharded<T> {
    fn default() -> Self {
        Self { parts: std::array::from_fn(|_| Mutex::default()), hasher: RandomState::default() }
    }
}
