//! Which semaphores still have places of processes that are dead, and the search for those that nobody alive uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::protocol::liveness::{Cleanup, OtherRows};
use crate::protocol::replica::{Ended, Replica, Row};

/// What is being forgotten, and where.
#[derive(Default)]
pub(super) struct Forgetting {
    /// For each sign of life that has ended, the keys of the semaphores that still have places of it.
    asked: BTreeMap<Ended, BTreeSet<Arc<str>>>,
    pub(super) search: Search,
}

/// A search through all semaphores for places of rows without a sign of life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Search {
    /// Not begun. Each process searches once: a fleet that died as a whole left its places to the next one.
    #[default]
    Wanted,
    /// The next page begins with this key, or has been asked for.
    Runs {
        from: Option<Vec<u8>>,
        once_more: bool,
    },
    Done,
}

impl Search {
    fn want(&mut self) {
        match self {
            Self::Runs { once_more, .. } => *once_more = true,
            Self::Wanted | Self::Done => *self = Self::Wanted,
        }
    }

    /// Returns the key from which the next page is to be read, if one is; `Some(None)` is the first of all.
    pub(super) fn poll(&mut self) -> Option<Option<Vec<u8>>> {
        match self {
            Self::Wanted => {
                *self = Self::Runs { from: None, once_more: false };
                Some(None)
            }
            Self::Runs { from, .. } => from.take().map(Some),
            Self::Done => None,
        }
    }

    pub(super) const fn is_due(&self) -> bool {
        matches!(self, Self::Wanted | Self::Runs { from: Some(_), .. })
    }

    /// A page was read; `next` is where the next one begins.
    pub(super) fn handle_page(&mut self, next: Option<Vec<u8>>) {
        if let Self::Runs { from, once_more } = self {
            match next {
                Some(next) => *from = Some(next),
                None => *self = if *once_more { Self::Wanted } else { Self::Done },
            }
        }
    }

    /// The page that was asked for will not come.
    pub(super) fn handle_dropped(&mut self) {
        if matches!(self, Self::Runs { .. }) {
            *self = Self::Wanted;
        }
    }

    const fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}

impl Forgetting {
    /// A cleanup is due. Of several processes that live, the first searches for semaphores that nobody uses.
    pub(super) fn ask(&mut self, cleanup: Cleanup, others: &OtherRows) -> Option<Ended> {
        let ended = match cleanup {
            Cleanup::ForgetWaiting(row) => Ended::Waiting(row),
            Cleanup::Forget(row) => Ended::Row(row),
            Cleanup::List => return None,
        };
        // Asked once more, the replicas are told again.
        let is_new = self.asked.insert(ended, BTreeSet::new()).is_none();
        if is_new && others.is_first() {
            self.search.want();
        }
        Some(ended)
    }

    /// A semaphore has another value, or something was asked. Tells its replica what is to be forgotten.
    pub(super) fn note(&mut self, key: &Arc<str>, replica: &mut Replica) {
        for (ended, keys) in &mut self.asked {
            if !replica.has_places_of(*ended) {
                keys.remove(key);
            } else if keys.insert(Arc::clone(key)) {
                replica.handle_ended(*ended, true);
            }
        }
    }

    /// Returns the keys of the semaphores in which something of this row is being forgotten, and stops that.
    pub(super) fn stop(&mut self, row: Row) -> BTreeSet<Arc<str>> {
        let mut keys = BTreeSet::new();
        self.asked.retain(|ended, of| {
            let is_other = ended.row() != row;
            if !is_other {
                keys.append(of);
            }
            is_other
        });
        keys
    }

    /// Tells what is forgotten everywhere.
    pub(super) fn settle(&mut self, others: &mut OtherRows) {
        if !self.search.is_done() {
            return;
        }
        self.asked.retain(|ended, keys| {
            if keys.is_empty() {
                match *ended {
                    Ended::Waiting(row) => others.handle_waiting_forgotten(row),
                    Ended::Row(row) => others.handle_forgotten(row),
                }
            }
            !keys.is_empty()
        });
    }

    /// The connection is lost.
    pub(super) fn handle_disconnected(&mut self) {
        self.asked.clear();
        self.search.handle_dropped();
    }
}
