//! A store with leases, as etcd is one.

use std::collections::BTreeMap;

use tower_semaphore_protocol::liveness::{LeaseId, Revision, Row, Seen, Sign, Term};

/// True time in µs, by which the leases of the store run.
pub(crate) type Micros = u64;

pub(crate) const MS: Micros = 1000;

/// The shortest lease that is granted, in seconds.
const SHORTEST: u32 = 2;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub(crate) seconds: u32,
    pub(crate) ends_at: Micros,
}

/// A change that watches deliver.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Sign(Row, Seen),
    /// A row has a place, or none.
    Place(Row, bool),
}

#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) revision: Revision,
    pub(crate) term: Term,
    pub(crate) leases: BTreeMap<LeaseId, Lease>,
    pub(crate) signs: BTreeMap<Row, Sign>,
    /// One place of each row, by its id.
    pub(crate) places: BTreeMap<Row, u64>,
    pub(crate) changes: Vec<(Change, Revision)>,
    pub(crate) leaderless_until: Micros,
    next_lease: LeaseId,
}

impl Store {
    pub(crate) fn new() -> Self {
        Self {
            revision: 1,
            term: 1,
            leases: BTreeMap::new(),
            signs: BTreeMap::new(),
            places: BTreeMap::new(),
            changes: Vec::new(),
            leaderless_until: 0,
            next_lease: 100,
        }
    }

    fn change(&mut self, change: Change) -> Revision {
        self.revision += 1;
        self.changes.push((change, self.revision));
        self.revision
    }

    pub(crate) fn grant(&mut self, seconds: u32, now: Micros) -> (LeaseId, u32) {
        let seconds = seconds.max(SHORTEST);
        self.next_lease += 1;
        let lease = Lease { seconds, ends_at: now + u64::from(seconds) * 1000 * MS };
        self.leases.insert(self.next_lease, lease);
        (self.next_lease, seconds)
    }

    /// `None`: there is no such lease.
    pub(crate) fn keep_alive(&mut self, lease: LeaseId, now: Micros) -> Option<u32> {
        let lease = self.leases.get_mut(&lease)?;
        lease.ends_at = now + u64::from(lease.seconds) * 1000 * MS;
        Some(lease.seconds)
    }

    /// `None`: there is no such lease.
    pub(crate) fn put_sign(
        &mut self,
        row: Row,
        lease: LeaseId,
        over: Revision,
    ) -> Option<Option<Sign>> {
        let before = self.signs.get(&row).copied();
        if before.map_or(0, |sign| sign.modified) != over {
            return Some(before);
        }
        self.leases.get(&lease)?;
        let modified = self.change(Change::Sign(row, Seen::Alive));
        let created = before.map_or(modified, |sign| sign.created);
        let sign = Sign { lease, created, modified };
        self.signs.insert(row, sign);
        Some(Some(sign))
    }

    pub(crate) fn revoke(&mut self, lease: LeaseId) -> bool {
        let was_there = self.leases.remove(&lease).is_some();
        let signs = self.signs.iter().filter(|(_, sign)| sign.lease == lease);
        for row in signs.map(|(row, _)| *row).collect::<Vec<_>>() {
            self.signs.remove(&row);
            self.change(Change::Sign(row, Seen::Gone));
        }
        was_there
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        if now < self.leaderless_until {
            return;
        }
        let ended = self.leases.iter().filter(|(_, lease)| lease.ends_at <= now);
        for lease in ended.map(|(lease, _)| *lease).collect::<Vec<_>>() {
            self.revoke(lease);
        }
    }

    /// A new leader begins all leases anew.
    pub(crate) fn elect(&mut self, at: Micros) {
        self.term += 1;
        self.leaderless_until = at;
        for lease in self.leases.values_mut() {
            lease.ends_at = at + u64::from(lease.seconds) * 1000 * MS;
        }
    }

    /// Makes a place, guarded by the sign of its row. Returns the place that is there.
    pub(crate) fn acquire(&mut self, row: Row, id: u64) -> Option<u64> {
        if self.signs.contains_key(&row) && !self.places.contains_key(&row) {
            self.places.insert(row, id);
            self.change(Change::Place(row, true));
        }
        self.places.get(&row).copied()
    }

    /// Removes the place of a row. Returns whether there was one.
    pub(crate) fn forget(&mut self, row: Row) -> bool {
        let was_there = self.places.remove(&row).is_some();
        self.change(Change::Place(row, false));
        was_there
    }
}
