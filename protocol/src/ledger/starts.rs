//! When permits with a rate were granted.

use std::collections::{BTreeSet, HashMap};
use std::hash::{Hash, Hasher};

use foldhash::fast::RandomState;

use crate::id::{NodeId, PlaceId};
use crate::rate::Rate;

/// The grants of the last window, each with the time (µs) at which it leaves the window. Nothing else takes one out:
/// neither a release nor the end of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Starts {
    by_end: BTreeSet<(u64, NodeId, u64)>,
    /// The end of each place's start, and how many it counts as.
    by_place: HashMap<(NodeId, u64), (u64, u32), RandomState>,
    /// In the window.
    count: u64,
}

impl Hash for Starts {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // What is kept by place is the same.
        self.by_end.hash(state);
        self.count.hash(state);
    }
}

impl Starts {
    pub(super) fn is_empty(&self) -> bool {
        self.by_end.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, u64, u64, u32)> + '_ {
        self.by_place.iter().map(|((node, n), (end, cost))| (*node, *n, *end, *cost))
    }

    /// When the last one leaves the window.
    pub(super) fn last_end(&self) -> Option<u64> {
        self.by_end.last().map(|(end, ..)| *end)
    }

    /// Forgets what has left the window.
    pub(super) fn expire(&mut self, now: u64) {
        while let Some(first) = self.by_end.first().copied().filter(|(end, ..)| *end <= now) {
            self.by_end.remove(&first);
            let (_, node, n) = first;
            if let Some((_, cost)) = self.by_place.remove(&(node, n)) {
                self.count -= u64::from(cost);
            }
        }
    }

    /// Whether the rate allows so many more grants.
    pub(super) fn has_room(&self, rate: Rate, cost: u64) -> bool {
        self.count + cost <= u64::from(rate.starts())
    }

    /// Notes that the place was granted. A call that is repeated moves its start.
    pub(super) fn push(&mut self, id: PlaceId, rate: Rate, now: u64) {
        self.remove(&id);
        let end = now.saturating_add(rate.window_us());
        self.by_place.insert((id.node, id.n), (end, id.cost()));
        self.by_end.insert((end, id.node, id.n));
        self.count += u64::from(id.cost());
    }

    pub(super) fn remove(&mut self, id: &PlaceId) {
        if let Some((end, cost)) = self.by_place.remove(&(id.node, id.n)) {
            self.by_end.remove(&(end, id.node, id.n));
            self.count -= u64::from(cost);
        }
    }

    /// In how many ms, rounded up and at least 1, the rate allows so many more grants.
    pub(super) fn opens_in(&self, rate: Rate, cost: u64, now: u64) -> u64 {
        let mut over = (self.count + cost).saturating_sub(u64::from(rate.starts()));
        for (end, node, n) in &self.by_end {
            let (_, costs) = self.by_place.get(&(*node, *n)).copied().unwrap_or_default();
            if over <= u64::from(costs) {
                return end.saturating_sub(now).div_ceil(1000).max(1);
            }
            over -= u64::from(costs);
        }
        1
    }
}
