//! The pauses whose records are to be sent, each in its turn.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::Time;

/// The names of these pauses.
#[derive(Default)]
pub(super) struct Unsent {
    due: BTreeSet<Arc<str>>,
    /// Those that had a record lately, by when that was sent.
    paced: BTreeSet<(Time, Arc<str>)>,
    /// The last one that was taken. The next one follows it, so each has its turn.
    last: Arc<str>,
}

impl Unsent {
    pub(super) fn is_empty(&self) -> bool {
        self.due.is_empty() && self.paced.is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.due.len() + self.paced.len()
    }

    /// Adds a name whose record waits for nothing.
    pub(super) fn insert(&mut self, name: &Arc<str>) {
        self.due.insert(Arc::clone(name));
    }

    /// Adds a name; `sent_at`: when it last had a record.
    pub(super) fn insert_after(&mut self, name: &Arc<str>, sent_at: Option<Time>) {
        match sent_at {
            Some(at) => _ = self.paced.insert((at, Arc::clone(name))),
            None => self.insert(name),
        }
    }

    /// Removes a name that was added with this.
    pub(super) fn remove(&mut self, name: &Arc<str>, sent_at: Option<Time>) {
        self.due.remove(name);
        if let Some(at) = sent_at {
            self.paced.remove(&(at, Arc::clone(name)));
        }
    }

    /// When the first of those is due that had a record lately, where records of a name are this far apart.
    pub(super) fn first_due(&self, interval: Duration) -> Option<Time> {
        self.paced.first().map(|(at, _)| *at + interval)
    }

    /// Takes the next name whose record is due.
    pub(super) fn take(&mut self, interval: Duration, now: Time) -> Option<Arc<str>> {
        while self.first_due(interval).is_some_and(|at| at <= now) {
            self.due.extend(self.paced.pop_first().map(|(_, name)| name));
        }
        let after = (Bound::Excluded(&*self.last), Bound::Unbounded);
        let name = self.due.range::<str, _>(after).next().or_else(|| self.due.first())?;
        let name = Arc::clone(name);
        self.due.remove(&name);
        self.last = Arc::clone(&name);
        Some(name)
    }
}
