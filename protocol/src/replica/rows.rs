//! Leases of the store in place of lease ends, and those that have ended.

use std::collections::BTreeMap;

use crate::ledger::Ledger;
use crate::row::Row;

/// A sign of life that has ended, and so which places are forgotten. Those that wait come first, or they would be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ended {
    /// That of the shortest row of a process: its places that wait go, whatever their rows. They hold nothing, so no grace
    /// is needed.
    Waiting(Row),
    /// That of a row, and the grace after it: all places of the row go.
    Row(Row),
}

impl Ended {
    /// The row whose sign of life it is.
    #[must_use]
    pub const fn row(self) -> Row {
        let (Self::Row(row) | Self::Waiting(row)) = self;
        row
    }

    pub(super) fn has_places(self, ledger: &Ledger) -> bool {
        ledger.places().any(|(id, lease_end, ticket)| match self {
            Self::Row(row) => id.node == row.node && lease_end == row.lease_end(),
            Self::Waiting(row) => id.node == row.node && ticket.is_some(),
        })
    }

    /// Returns whether some are left.
    fn forget(self, ledger: &mut Ledger, time: u64) -> bool {
        match self {
            Self::Row(row) => ledger.forget(row.node, row.lease_end(), time),
            Self::Waiting(row) => ledger.forget_waiting(row.node, time),
        }
    }
}

/// The signs of life that have ended and whose places may still be there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct EndedRows {
    /// Each with whether this process is to forget it, even if it has no call to make.
    ended: BTreeMap<Ended, bool>,
}

/// What a transaction forgets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Forgotten {
    /// The rows whose places it removes: their signs of life must still be absent.
    pub(super) rows: Vec<Row>,
    /// Those of which none is left.
    pub(super) settled: Vec<Ended>,
}

impl EndedRows {
    pub(super) fn handle_ended(&mut self, ended: Ended, is_due: bool) {
        *self.ended.entry(ended).or_default() |= is_due;
    }

    pub(super) fn handle_back(&mut self, row: Row) {
        self.ended.retain(|ended, _| ended.row() != row);
    }

    pub(super) fn handle_committed(&mut self, forgotten: &Forgotten) {
        for ended in &forgotten.settled {
            self.ended.remove(ended);
        }
    }

    /// Whether this process is to forget some of the places of this ledger.
    pub(super) fn is_due(&self, ledger: &Ledger) -> bool {
        let mut due = self.ended.iter().filter(|(_, is_due)| **is_due);
        due.any(|(ended, _)| ended.has_places(ledger))
    }

    /// Removes what has ended, up to the bound on the work of one operation.
    pub(super) fn forget(&self, ledger: &mut Ledger, time: u64) -> Forgotten {
        let mut forgotten = Forgotten::default();
        for ended in self.ended.keys().copied() {
            if ended.has_places(ledger) {
                if !forgotten.rows.contains(&ended.row()) {
                    forgotten.rows.push(ended.row());
                }
                if ended.forget(ledger, time) {
                    break;
                }
            }
            forgotten.settled.push(ended);
        }
        forgotten
    }
}
