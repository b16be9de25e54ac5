//! What the watch and readings of several keys tell.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::Engine;
use super::tracked::{State, Tracked};
use crate::backend::etcd::clock::Now;
use crate::backend::etcd::requests::signed;
use crate::protocol::liveness::Seen;
use crate::protocol::replica::{Row, Value};

/// The pause after a reading of several keys that was refused.
const READ_PAUSE: Duration = Duration::from_secs(1);

/// Some semaphores that are stored.
pub(in crate::backend::etcd) struct Page {
    /// Their keys, with the revisions of their last changes and their values.
    pub(in crate::backend::etcd) values: Vec<(Arc<str>, u64, Bytes)>,
    /// The key from which the next page begins; `None`: there are no more.
    pub(in crate::backend::etcd) next: Option<Vec<u8>>,
}

impl Engine {
    /// Takes a value that the watch or a search brought; `None`: the key is absent.
    pub(in crate::backend::etcd) fn handle_value(
        &mut self,
        key: &str,
        revision: u64,
        value: Option<&[u8]>,
        now: Now,
    ) {
        self.note_revision(revision);
        let key = match self.tracked.get_key_value(key) {
            Some((key, _)) => Arc::clone(key),
            None if self.is_to_be_tracked(value) => key.into(),
            None => return,
        };
        let by = value.and_then(Value::writer_of).filter(|by| *by != self.node);
        if let Some(tracked) = self.track(&key, now) {
            if by.is_some_and(|by| tracked.deference.handle_write(by, now.time))
                && matches!(tracked.state, State::Defers)
            {
                tracked.state = State::Idle;
            }
            tracked.replica.handle_value(revision, value);
            tracked.handle_seen(revision, now.time);
            self.settle(&key, now);
        }
    }

    /// The watch said something.
    pub(in crate::backend::etcd) const fn handle_watch(&mut self, now: Now) {
        self.watch_heard_at = Some(now.time);
    }

    /// Whether a value of a semaphore that this process does not use can have places of this process: then a transaction
    /// of it was carried out late.
    fn is_to_be_tracked(&self, value: Option<&[u8]>) -> bool {
        value.and_then(Value::writer_of) == Some(self.node)
    }

    /// A sign of life was seen, or its end.
    pub(in crate::backend::etcd) fn handle_sign(
        &mut self,
        row: Row,
        seen: Seen,
        revision: u64,
        now: Now,
    ) {
        self.note_revision(revision);
        if row.node == self.node {
            if seen == Seen::Gone {
                self.own.handle_sign_gone(row.seconds, signed(revision), now.time);
            }
            return;
        }
        self.others.handle_sign(row, seen, signed(revision), now.time);
        if seen == Seen::Alive {
            self.handle_back(row, now);
        }
    }

    /// The sign of life of a row is there again, so nothing of it is forgotten.
    fn handle_back(&mut self, row: Row, now: Now) {
        for key in self.forgetting.stop(row) {
            if let Some(tracked) = self.tracked.get_mut(&key) {
                tracked.replica.handle_back(row);
            }
            self.settle(&key, now);
        }
    }

    /// All signs of life, as of this revision. `None`: they could not be read.
    pub(in crate::backend::etcd) fn handle_listed(
        &mut self,
        listed: Option<(Vec<Row>, u64)>,
        now: Now,
    ) {
        let Some((rows, revision)) = listed else {
            self.read_at = now.time + READ_PAUSE;
            self.is_list_wanted = true;
            return;
        };
        self.note_revision(revision);
        let back: BTreeSet<_> =
            rows.iter().copied().filter(|row| !self.others.is_alive(*row)).collect();
        self.note_own_signs(&rows, revision, now);
        self.others.handle_listed(rows, signed(revision), now.time);
        for row in back {
            self.handle_back(row, now);
        }
        // Those that were kept for rows that were not alive may be of no use any more.
        let is_due = |tracked: &mut Tracked| {
            tracked.replica.handle_time(now.time)
                || tracked.replica.is_idle() && tracked.pending.is_empty()
        };
        for key in self.keys_of_all() {
            if self.tracked.get_mut(&key).is_some_and(is_due) {
                self.settle(&key, now);
            }
        }
    }

    /// Signs of this process that are not among these were removed, and the watch may have lost the event.
    pub(super) fn note_own_signs(&mut self, rows: &[Row], revision: u64, now: Now) {
        let own = rows.iter().filter(|row| row.node == self.node);
        let there: BTreeSet<_> = own.map(|row| row.seconds).collect();
        self.own.handle_listed(&there, signed(revision), now.time);
    }

    /// A page of all semaphores. `None`: it could not be read.
    pub(in crate::backend::etcd) fn handle_searched(&mut self, page: Option<Page>, now: Now) {
        let Some(Page { values, next }) = page else {
            self.read_at = now.time + READ_PAUSE;
            self.forgetting.search.handle_dropped();
            return;
        };
        for (key, revision, value) in values {
            if self.tracked.contains_key(&key) || self.has_dead(&value) {
                if let Some(tracked) = self.track(&key, now) {
                    tracked.replica.handle_value(revision, Some(&value));
                }
                self.settle(&key, now);
            }
        }
        self.forgetting.search.handle_page(next);
        self.forgetting.settle(&mut self.others);
    }

    /// Whether a value has places of a row without a sign of life, or of this process, or is one that a dead process left
    /// to be removed.
    fn has_dead(&self, value: &[u8]) -> bool {
        // One that is not read is left to processes that can.
        let Ok(value) = Value::decode(value) else { return false };
        if value.over_at().is_some() && !self.others.is_living(value.writer) {
            return true;
        }
        value.ledger.places().any(|(id, lease_end, _)| {
            id.node == self.node || !self.others.is_alive(Row::with_lease_end(id.node, lease_end))
        })
    }
}
