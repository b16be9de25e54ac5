//! The newest value that the process knows.

use std::time::Duration;

use super::value::{HEADER_LEN, Value, ValueError};
use crate::id::{NodeId, PlaceId};
use crate::ledger::{Grant, Ledger};
use crate::row::Row;

/// A value, and what it says of this process's places.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Known {
    /// The value is as of this revision of the store.
    pub(super) revision: u64,
    /// When it was last changed; 0: it is absent.
    pub(super) changed: u64,
    pub(super) content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    Read(Box<Read>),
    /// It is not read, so nothing is written.
    Unreadable,
}

/// A value that was read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Read {
    pub(super) value: Value,
    /// What the ledger is as bytes, to tell whether another one differs.
    pub(super) ledger: Vec<u8>,
    pub(super) view: View,
    is_absent: bool,
}

/// What a ledger says of the places of one process, and of those of others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct View {
    /// Its places in the order of their numbers, with their lease ends and the tickets of those that wait.
    pub(super) own: Vec<(PlaceId, u64, Option<u64>)>,
    /// Whether a place of this process waits in the order of arrival.
    pub(super) queues: bool,
    /// Whether places of other processes wait.
    pub(super) others_wait: bool,
    /// Its places that are the first of the queue, in order, with their lease ends. Empty where lines of tenants decide.
    pub(super) first_in_queue: Vec<(PlaceId, u64)>,
    /// The rows of other processes that have places, in order.
    pub(super) other_rows: Vec<Row>,
}

impl Known {
    /// Nothing is known, so the key is taken for absent: if it is not, the first transaction loses.
    pub(super) fn nothing(node: NodeId) -> Self {
        let content = Content::Read(Box::new(Read::of(Value::default(), None, node)));
        Self { revision: 0, changed: 0, content }
    }

    pub(super) fn read(
        revision: u64,
        bytes: Option<&[u8]>,
        node: NodeId,
    ) -> (Self, Option<ValueError>) {
        let changed = if bytes.is_some() { revision } else { 0 };
        let value = bytes.map_or_else(|| Ok(Value::default()), Value::decode);
        let (content, error) = match value {
            Ok(value) => (Content::Read(Box::new(Read::of(value, bytes, node))), None),
            Err(error) => (Content::Unreadable, Some(error)),
        };
        (Self { revision, changed, content }, error)
    }

    pub(super) fn as_read(&self) -> Option<&Read> {
        match &self.content {
            Content::Read(read) => Some(read),
            Content::Unreadable => None,
        }
    }
}

impl Read {
    /// `bytes`: the encoded value; `None`: it is absent.
    pub(super) fn of(value: Value, bytes: Option<&[u8]>, node: NodeId) -> Self {
        let ledger = bytes.and_then(|bytes| bytes.get(HEADER_LEN..)).map(<[u8]>::to_vec);
        let ledger = ledger.unwrap_or_else(|| {
            let mut out = Vec::new();
            value.ledger.encode(&mut out);
            out
        });
        let view = View::of(&value.ledger, node);
        Self { value, ledger, view, is_absent: bytes.is_none() }
    }

    /// Whether there is no key.
    pub(super) const fn is_absent(&self) -> bool {
        self.is_absent
    }

    /// Whether the key would be of no further use at this time.
    pub(super) fn is_over(&self, time: u64) -> bool {
        !self.is_absent && self.value.over_at().is_some_and(|at| at <= time)
    }
}

impl View {
    fn of(ledger: &Ledger, node: NodeId) -> Self {
        let mut view = Self::default();
        for (id, lease_end, ticket) in ledger.places() {
            if id.node == node {
                view.queues |= ticket.is_some() && id.claim.is_none();
                view.own.push((id, lease_end, ticket));
            } else {
                view.others_wait |= ticket.is_some();
                let row = Row::with_lease_end(id.node, lease_end);
                // Most of them follow one of the same row.
                if view.other_rows.last() != Some(&row) {
                    view.other_rows.push(row);
                }
            }
        }
        view.other_rows.sort_unstable();
        view.other_rows.dedup();
        view.own.sort_unstable_by_key(|(id, ..)| id.n);
        let queue = ledger.queue().take_while(|(id, _)| id.node == node);
        view.first_in_queue = queue.collect();
        view
    }

    /// A place of this process that holds, with its lease end.
    pub(super) fn held(&self, n: u64) -> Option<(PlaceId, u64)> {
        let at = self.own.binary_search_by_key(&n, |(id, ..)| id.n).ok()?;
        let (id, lease_end, ticket) = self.own[at];
        ticket.is_none().then_some((id, lease_end))
    }

    /// The length of the lease of a place.
    pub(super) fn lease_of(&self, n: u64) -> Option<Duration> {
        let at = self.own.binary_search_by_key(&n, |(id, ..)| id.n).ok()?;
        let (id, lease_end, _) = self.own[at];
        Some(Duration::from_secs(Row::with_lease_end(id.node, lease_end).seconds.into()))
    }

    pub(super) fn waits(&self, n: u64) -> bool {
        let at = self.own.binary_search_by_key(&n, |(id, ..)| id.n);
        at.is_ok_and(|at| self.own[at].2.is_some())
    }

    pub(super) fn holds(&self, n: u64) -> bool {
        self.held(n).is_some()
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.own.iter().any(|(.., ticket)| ticket.is_some())
    }

    /// The places of this process that waited before, and hold now.
    pub(super) fn granted_since<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = Grant> {
        before.own.iter().filter(|(.., ticket)| ticket.is_some()).filter_map(|(id, ..)| {
            let at = self.own.binary_search_by_key(&id.n, |(id, ..)| id.n).ok()?;
            let (id, lease_end, ticket) = self.own[at];
            ticket.is_none().then_some(Grant { id, lease_end })
        })
    }
}
