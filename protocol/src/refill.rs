//! When budgets will be full again.

use std::collections::{BTreeMap, BTreeSet};

/// The budgets that are not full, by number; `T`: a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Refills<T> {
    full_at: BTreeMap<u32, T>,
    /// The same, the first to be full first: of very many, few are looked at.
    by_time: BTreeSet<(T, u32)>,
}

impl<T> Default for Refills<T> {
    fn default() -> Self {
        Self { full_at: BTreeMap::new(), by_time: BTreeSet::new() }
    }
}

impl<T: Copy + Ord> Refills<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.full_at.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, T)> + '_ {
        self.full_at.iter().map(|(number, at)| (*number, *at))
    }

    pub(crate) fn of(&self, number: u32) -> Option<T> {
        self.full_at.get(&number).copied()
    }

    pub(crate) fn first(&self) -> Option<T> {
        self.by_time.first().map(|(at, _)| *at)
    }

    pub(crate) fn last(&self) -> Option<T> {
        self.by_time.last().map(|(at, _)| *at)
    }

    /// It will be full then; `None`: it is.
    pub(crate) fn set(&mut self, number: u32, at: Option<T>) {
        let before = match at {
            Some(at) => {
                self.by_time.insert((at, number));
                self.full_at.insert(number, at).filter(|before| *before != at)
            }
            None => self.full_at.remove(&number),
        };
        if let Some(before) = before {
            self.by_time.remove(&(before, number));
        }
    }

    /// Forgets those that are full.
    pub(crate) fn expire(&mut self, now: T) {
        while let Some((_, number)) = self.by_time.first().copied().filter(|(at, _)| *at <= now) {
            self.set(number, None);
        }
    }
}
