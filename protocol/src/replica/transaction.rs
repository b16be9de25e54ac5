//! Transactions: what the calls make of the newest value.

use std::sync::Arc;

use super::Replica;
use super::calls::only_asks;
use super::known::Read;
use super::rows::Forgotten;
use super::value::{HEADER_LEN, Value};
use crate::call::{Call, Op};
use crate::id::PlaceId;
use crate::ledger::{Ledger, Reply};
use crate::row::Row;

/// The most strangers that one transaction releases.
const STRANGERS_MAX: usize = 512;

/// A compare-and-swap of one key.
///
/// One that fails a condition is [lost](Replica::handle_lost), whichever it was.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Transaction {
    /// The revision at which the key must have been changed last; 0: it must be absent.
    pub changed: u64,
    /// The rows of this process whose signs of life must be there: those of the calls, at least the shortest.
    pub present: Vec<Row>,
    /// The rows whose signs of life must be absent, because their places are forgotten.
    pub absent: Vec<Row>,
    /// What becomes of the key.
    pub change: Change,
}

/// What a transaction makes of the key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// It has this value.
    Put(Arc<[u8]>),
    /// It is absent: the semaphore is empty.
    Delete,
    /// It stays as it is. The transaction only shows that it is the newest.
    Nothing,
}

/// A transaction that has no outcome yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Flight {
    pub(super) value: Value,
    pub(super) change: Change,
    /// The replies to the first calls.
    pub(super) replies: Vec<Reply>,
    pub(super) present: Vec<Row>,
    pub(super) forgotten: Forgotten,
    only_asks: bool,
}

impl Flight {
    /// Whether the replica alone can answer the calls, if it is fresh.
    pub(super) fn needs_no_store(&self) -> bool {
        self.only_asks && self.change == Change::Nothing
    }
}

impl Replica {
    /// Applies to a copy of the ledger what has ended, then what was passed on, what is to be released, and the calls.
    pub(super) fn prepare(&self, clock: u64) -> Option<Flight> {
        let read = self.known.as_read()?;
        let time = read.value.next_time(clock);
        let mut ledger = read.value.ledger.clone();
        let forgotten = self.ended.forget(&mut ledger, time);
        self.succession.carry_out(&mut ledger, &self.own);
        let strangers = self.strangers(read);
        for id in strangers.iter().take(STRANGERS_MAX) {
            ledger.revoke(*id, true, time);
        }
        let is_removed = !forgotten.rows.is_empty() || !strangers.is_empty();
        let is_long = read.ledger.len() >= self.value_max;
        let replies: Vec<_> = self
            .calls
            .batch()
            .map(|call| self.carry_out(&mut ledger, call, time, is_long))
            .collect();
        let mut calls = self.calls.batch().map(|call| &call.op);
        let promotes = calls.any(|op| !matches!(op, Op::Audit { .. }));
        let value = Value {
            time,
            helped: read.value.helped,
            writer: self.node,
            is_promoted: promotes || read.value.is_promoted && !is_removed,
            ledger,
        };
        let change = change(read, &value);
        let only_asks = self.calls.batch().all(|call| only_asks(&call.op));
        let mut present: Vec<_> = self.calls.batch().map(|call| self.row_of(call)).collect();
        present.push(Row::of(self.node, 0, self.shortest_lease));
        present.sort_unstable();
        present.dedup();
        Some(Flight { value, change, replies, present, forgotten, only_asks })
    }

    /// Carries out a call. No lease end is a time, so the ledger finds no lease that has ended.
    fn carry_out(&self, ledger: &mut Ledger, call: &Call, time: u64, is_long: bool) -> Reply {
        let lease_ms = self.row_of(call).lease_end() - time / 1000;
        // Hints are not sent: each process finds its own places in the value.
        let post = &mut |_, _: &[_]| true;
        let mut reply = match &call.op {
            Op::Acquire { max_queue: Some(_), leaving, ids, lease_ms: asked } if is_long => {
                let (leaving, ids) = (leaving.clone(), ids.clone());
                let op = Op::Acquire { leaving, ids, lease_ms: *asked, max_queue: Some(0) };
                ledger.carry_out_for(self.node, &Call { op, ..call.clone() }, lease_ms, time, post)
            }
            _ => ledger.carry_out_for(self.node, call, lease_ms, time, post),
        };
        reply.earliest = 0;
        reply
    }

    /// The row of the places to which a call gives leases.
    fn row_of(&self, call: &Call) -> Row {
        Row::of(self.node, call.op.lease_ms(), self.shortest_lease)
    }

    /// The places of this process that it does not know, and that no call names.
    pub(super) fn strangers(&self, read: &Read) -> Vec<PlaceId> {
        let own = read.view.own.iter().map(|(id, ..)| *id);
        let mut strangers: Vec<_> = own.filter(|id| !self.own.has(id.n)).collect();
        if !strangers.is_empty() {
            let named = self.calls.named();
            strangers.retain(|id| !named.contains(&id.n));
        }
        strangers
    }
}

/// What is to be written, if anything is.
fn change(before: &Read, after: &Value) -> Change {
    if after.is_over() {
        return if before.is_absent() { Change::Nothing } else { Change::Delete };
    }
    let bytes = after.encode();
    if bytes[HEADER_LEN..] == before.ledger[..] {
        Change::Nothing
    } else {
        Change::Put(bytes.into())
    }
}
