//! What processes believe to hold, against what is stored.

use std::collections::{BTreeMap, BTreeSet};

use tower_semaphore_protocol::{NodeId, PlaceId};

use super::process::{Process, State};
use super::store::{Store, Version};

/// Counts the permits of each process that others removed: it may still believe to hold them.
#[derive(Debug, Default)]
pub(crate) struct Beliefs {
    removed: BTreeMap<NodeId, usize>,
    /// How many versions were looked at.
    seen: usize,
}

impl Beliefs {
    /// A permit that a process uses is one that it holds in the newest value, under whichever place: then as many are in
    /// use as the values say.
    pub(crate) fn check(&mut self, store: &Store, processes: &[Process]) -> Result<(), String> {
        for pair in store.history.windows(2).skip(self.seen) {
            let by = pair[1].by.as_ref().map(|request| request.node);
            let (before, after) = (held(&pair[0]), pair[1].places());
            let gone = before.into_iter().filter(|id| !after.contains_key(id));
            for id in gone.filter(|id| by != Some(id.node)) {
                *self.removed.entry(id.node).or_default() += 1;
            }
        }
        self.seen = store.history.len() - 1;
        let stored = held(store.newest());
        for Process { node, mine, .. } in processes.iter().filter(|process| process.is_alive) {
            let believed = mine.iter().filter(|mine| mine.state == State::Held).count();
            let stored = stored.iter().filter(|id| id.node == *node).count();
            let removed = self.removed.get(node).copied().unwrap_or_default();
            if believed > stored + removed {
                return Err(format!("{node} uses {believed} permits, and has {stored}"));
            }
        }
        Ok(())
    }
}

fn held(version: &Version) -> BTreeSet<PlaceId> {
    let held = version.places().into_iter().filter(|(_, (_, ticket))| ticket.is_none());
    held.map(|(id, _)| id).collect()
}
