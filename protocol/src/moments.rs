//! Moments by key, the first of which is found at once.

use std::collections::{BTreeMap, BTreeSet};

/// The moments `T` of some keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Moments<K, T> {
    by_key: BTreeMap<K, T>,
    /// The same, the first moment first: of very many, few are looked at.
    by_time: BTreeSet<(T, K)>,
}

impl<K, T> Moments<K, T> {
    pub(crate) const fn new() -> Self {
        Self { by_key: BTreeMap::new(), by_time: BTreeSet::new() }
    }
}

impl<K, T> Default for Moments<K, T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Copy + Ord, T: Copy + Ord> Moments<K, T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (K, T)> + '_ {
        self.by_key.iter().map(|(key, at)| (*key, *at))
    }

    /// The same, the first moment first; those of one moment in the order of their keys.
    pub(crate) fn by_time(&self) -> impl Iterator<Item = (T, K)> + '_ {
        self.by_time.iter().copied()
    }

    pub(crate) fn of(&self, key: K) -> Option<T> {
        self.by_key.get(&key).copied()
    }

    pub(crate) fn first(&self) -> Option<T> {
        self.by_time.first().map(|(at, _)| *at)
    }

    pub(crate) fn last(&self) -> Option<T> {
        self.by_time.last().map(|(at, _)| *at)
    }

    /// The moment of this key is that; `None`: it has none.
    pub(crate) fn set(&mut self, key: K, at: Option<T>) {
        let before = match at {
            Some(at) => {
                self.by_time.insert((at, key));
                self.by_key.insert(key, at).filter(|before| *before != at)
            }
            None => self.by_key.remove(&key),
        };
        if let Some(before) = before {
            self.by_time.remove(&(before, key));
        }
    }

    /// Up to so many keys whose moments have come, the first first.
    pub(crate) fn due(&self, now: T, most: usize) -> impl Iterator<Item = K> + '_ {
        let due = self.by_time.iter().take_while(move |(at, _)| *at <= now);
        due.map(|(_, key)| *key).take(most)
    }

    /// Forgets those whose moments have come.
    pub(crate) fn expire(&mut self, now: T) {
        while let Some((_, key)) = self.by_time.first().copied().filter(|(at, _)| *at <= now) {
            self.set(key, None);
        }
    }
}
