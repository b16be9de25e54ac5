//! A store with one key that matters: its value, its revision, and every value that it ever had.

use std::collections::{BTreeMap, BTreeSet};

use tower_semaphore_protocol::replica::{Change, Row, Transaction, Value};
use tower_semaphore_protocol::{NodeId, PlaceId};

use super::Fault;

/// A transaction on its way, and what is remembered of its making.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) node: NodeId,
    pub(crate) transaction: Transaction,
    /// When it was made.
    pub(crate) step: usize,
    /// The highest limit of the calls that were pending then.
    pub(crate) limit: u32,
}

/// A value that the key had.
#[derive(Clone, Debug)]
pub(crate) struct Version {
    pub(crate) revision: u64,
    pub(crate) bytes: Option<Vec<u8>>,
    /// What it was written by; `None`: by an operator.
    pub(crate) by: Option<Request>,
    /// When it was written.
    pub(crate) step: usize,
    /// The signs of life that were there.
    pub(crate) signs: BTreeSet<(NodeId, u32)>,
}

/// What becomes of a transaction.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Committed(u64),
    Lost(u64, Option<Vec<u8>>),
}

#[derive(Debug)]
pub(crate) struct Store {
    revision: u64,
    pub(crate) signs: BTreeSet<(NodeId, u32)>,
    pub(crate) history: Vec<Version>,
}

impl Store {
    pub(crate) fn new() -> Self {
        let signs = BTreeSet::new();
        let first = Version { revision: 0, bytes: None, by: None, step: 0, signs: signs.clone() };
        Self { revision: 10, signs, history: vec![first] }
    }

    pub(crate) fn newest(&self) -> &Version {
        self.history.last().expect("the first is kept")
    }

    /// The key as a read finds it: where it is absent, as of now.
    pub(crate) fn read(&self) -> (u64, Option<Vec<u8>>) {
        let newest = self.newest();
        let revision = if newest.bytes.is_some() { newest.revision } else { self.revision };
        (revision, newest.bytes.clone())
    }

    /// Keys that do not matter change.
    pub(crate) fn pass(&mut self, revisions: u64) {
        self.revision += revisions;
    }

    pub(crate) fn execute(&mut self, request: &Request, step: usize, fault: Fault) -> Outcome {
        let Transaction { changed, present, absent, change } = &request.transaction;
        let newest = self.newest();
        let is_newest = *changed == if newest.bytes.is_some() { newest.revision } else { 0 };
        let has_sign = |Row { node, seconds }: &Row| self.signs.contains(&(*node, *seconds));
        let is_alive = present.iter().all(has_sign);
        let is_absent = !absent.iter().any(has_sign);
        if fault == Fault::ForgetsLiving && is_newest
            || fault == Fault::NoCompare && is_absent
            || fault == Fault::DeadWrite && is_newest && is_absent
            || is_newest && is_alive && is_absent
        {
            let bytes = match change {
                Change::Nothing => return Outcome::Committed(self.revision),
                Change::Put(bytes) => Some(bytes.to_vec()),
                Change::Delete => None,
            };
            self.write(bytes, Some(request.clone()), step);
            return Outcome::Committed(self.revision);
        }
        let (revision, bytes) = self.read();
        Outcome::Lost(revision, bytes)
    }

    pub(crate) fn write(&mut self, bytes: Option<Vec<u8>>, by: Option<Request>, step: usize) {
        self.revision += 1;
        let (revision, signs) = (self.revision, self.signs.clone());
        self.history.push(Version { revision, bytes, by, step, signs });
    }

    pub(crate) fn version(&self, revision: u64) -> &Version {
        let at = self.history.partition_point(|version| version.revision <= revision);
        &self.history[at - 1]
    }
}

impl Version {
    pub(crate) fn value(&self) -> Value {
        let bytes = self.bytes.as_deref();
        bytes.map_or_else(Value::default, |bytes| Value::decode(bytes).expect("a value"))
    }

    /// The places, with their lease ends and tickets.
    pub(crate) fn places(&self) -> BTreeMap<PlaceId, (u64, Option<u64>)> {
        let value = self.value();
        value.ledger.places().map(|(id, lease_end, ticket)| (id, (lease_end, ticket))).collect()
    }
}
