//! The leases and signs of life of this process.

mod revocations;
mod row;

use std::collections::BTreeSet;
use std::time::Duration;

use self::revocations::Revocations;
use self::row::OwnRow;
use super::{LeaseId, Revision, Sign, Term, deadline};
use crate::time::Time;

/// The most lease lengths of a process.
pub const LENGTHS_MAX: usize = 16;

/// A request that has not been answered after this is repeated, and its member is given up.
pub const SILENT_AFTER: Duration = Duration::from_millis(700);

/// The most requests under way at a time, so that many lengths make no burst.
const IN_FLIGHT_MAX: usize = 4;

/// Identifies a request and the answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A request to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// Goes with the answer.
    pub id: RequestId,
    /// What is to be done.
    pub action: Action,
}

/// What a [`Request`] asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Grant a lease. Answered by [`OwnRows::handle_granted`].
    Grant {
        /// Its length.
        seconds: u32,
    },
    /// Put the sign in one transaction, if its revision is still `over`, and read it in both branches. Answered by
    /// [`OwnRows::handle_sign`].
    PutSign {
        /// The length of its row.
        seconds: u32,
        /// The lease to attach it to.
        lease: LeaseId,
        /// The revision of the last change that is known of it; 0: it is not there.
        over: Revision,
    },
    /// Keep a lease alive. Answered by [`OwnRows::handle_kept_alive`].
    KeepAlive {
        /// The lease.
        lease: LeaseId,
    },
    /// Read the sign linearizably. Answered by [`OwnRows::handle_sign`].
    ReadSign {
        /// The length of its row.
        seconds: u32,
    },
    /// Revoke a lease. Answered by [`OwnRows::handle_revoked`].
    Revoke {
        /// The lease.
        lease: LeaseId,
    },
}

/// The rows of this process: a lease of the store and a sign of life for each lease length.
///
/// The driver passes answers, connections and time to `handle_*`. After each of these it sends what
/// [`poll_request`](Self::poll_request) returns until that is `None`, and calls [`handle_timeout`](Self::handle_timeout)
/// at [`poll_timeout`](Self::poll_timeout). See the [module](super) for an example.
///
/// A request is answered by the method that its action names, by [`handle_no_lease`](Self::handle_no_lease) if the store
/// says that there is no such lease, or by [`handle_refused`](Self::handle_refused) for any other error, known or
/// unknown outcome alike: each can be repeated.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnRows {
    /// In the order of their lengths, never empty unless closed.
    rows: Vec<OwnRow>,
    /// Whether the store has granted the shortest lease, and so told how short it can be.
    is_shortest_known: bool,
    revocations: Revocations,
    is_connected: bool,
    is_closed: bool,
    next_id: u64,
}

impl OwnRows {
    /// Creates the rows of a process with one length, the shortest.
    ///
    /// If the store grants no lease that short, what it grants is the shortest.
    #[must_use]
    pub fn new(shortest: Duration) -> Self {
        Self {
            rows: vec![OwnRow::new(whole_seconds(shortest))],
            is_shortest_known: false,
            revocations: Revocations::default(),
            is_connected: false,
            is_closed: false,
            next_id: 0,
        }
    }

    /// Adds a lease length, rounded up to whole seconds. Does nothing if there is one that long, or 16 of them.
    pub fn add(&mut self, lease: Duration) {
        let seconds = whole_seconds(lease).max(self.rows.first().map_or(0, |row| row.seconds));
        let at = self.rows.partition_point(|row| row.seconds < seconds);
        let is_there = self.rows.get(at).is_some_and(|row| row.seconds == seconds);
        if !is_there && !self.is_closed && self.rows.len() < LENGTHS_MAX {
            self.rows.insert(at, OwnRow::new(seconds));
        }
    }

    /// Removes a length and revokes its lease. The shortest one stays. The caller relies on no place of the row any more.
    pub fn remove(&mut self, seconds: u32) {
        let at = self.rows.iter().position(|row| row.seconds == seconds);
        if let Some(at) = at.filter(|at| *at > 0) {
            let row = self.rows.remove(at);
            self.revocations.extend(row.lease());
        }
    }

    /// Revokes all leases, so that others need not wait for their end. The caller relies on no place any more: it does not
    /// call this while permits linger.
    pub fn close(&mut self) {
        self.is_closed = true;
        for row in std::mem::take(&mut self.rows) {
            self.revocations.extend(row.lease());
        }
    }

    /// Whether it was closed, and nothing is left to be revoked.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed && self.revocations.is_empty()
    }

    /// Returns the shortest length, to whose row waiting places belong. `None` until the store has told it.
    #[must_use]
    pub fn shortest(&self) -> Option<u32> {
        self.rows.first().filter(|_| self.is_shortest_known).map(|row| row.seconds)
    }

    /// Returns the lease of the shortest row, if it has one: for what is to end with this process.
    #[must_use]
    pub fn shortest_lease(&self) -> Option<LeaseId> {
        self.rows.first().filter(|_| self.is_shortest_known)?.lease()
    }

    /// Returns the length of the row for places with this lease: the shortest that is as long. `None` until the store has
    /// told its shortest, and if no row is as long; then a place of this lease cannot be made.
    #[must_use]
    pub fn row_for(&self, lease: Duration) -> Option<u32> {
        let seconds = whole_seconds(lease);
        let mut rows = self.rows.iter().filter(|_| self.is_shortest_known);
        rows.find(|row| row.seconds >= seconds).map(|row| row.seconds)
    }

    /// Whether transactions may be guarded by the sign of this row: it is there as far as is known.
    #[must_use]
    pub fn is_registered(&self, seconds: u32) -> bool {
        self.row(seconds).is_some_and(OwnRow::is_registered)
    }

    /// Whether what is granted in this row can be relied on: it [is registered](Self::is_registered), and its lease still
    /// runs by the clock of this process. After a time in which the process did not run, only a keepalive proves that.
    #[must_use]
    pub fn is_alive(&self, seconds: u32, now: Time) -> bool {
        let runs = |from| now < deadline(from, seconds);
        self.is_registered(seconds) && self.leases_from(seconds).is_some_and(runs)
    }

    /// Returns from when the leases of this row's places count: the sending of the last keepalive, or of the grant, that
    /// is proved (rules 2 to 4). A place counts from then only if a value of the revision
    /// [`registered_at`](Self::registered_at), or a later one, shows it. [`deadline`](super::deadline) has its end.
    #[must_use]
    pub fn leases_from(&self, seconds: u32) -> Option<Time> {
        self.row(seconds)?.registration().map(|registration| registration.from)
    }

    /// Returns since which revision the row has had its sign without a gap (rule 5).
    #[must_use]
    pub fn registered_at(&self, seconds: u32) -> Option<Revision> {
        self.row(seconds)?.registration().map(|registration| registration.revision)
    }

    /// There is a connection, so requests can be sent.
    pub fn handle_connected(&mut self, now: Time) {
        self.handle_disconnected(now);
        self.is_connected = true;
    }

    /// The connection is lost. No request that was sent will be answered.
    pub fn handle_disconnected(&mut self, now: Time) {
        self.is_connected = false;
        self.rows.iter_mut().for_each(|row| row.take_back(now));
        self.revocations.take_back();
    }

    /// A lease was granted. One that nobody waits for any more is revoked.
    pub fn handle_granted(&mut self, id: RequestId, lease: LeaseId, ttl: u32, now: Time) {
        let Some(at) = self.find(id) else {
            self.revocations.extend(Some(lease));
            return;
        };
        if ttl < self.rows[at].seconds {
            self.revocations.extend(Some(lease));
            self.rows[at].handle_refused(now);
            return;
        }
        self.rows[at].handle_granted(lease, now);
        if !std::mem::replace(&mut self.is_shortest_known, true) {
            self.raise_to(ttl);
        }
    }

    /// Gives the shortest row, the only one with a lease, the length that the store granted.
    fn raise_to(&mut self, seconds: u32) {
        self.rows[0].seconds = seconds;
        let mut is_first = true;
        self.rows.retain(|row| std::mem::take(&mut is_first) || row.seconds > seconds);
    }

    /// A keepalive was answered, in this term of the answering member, as it was before the member renewed the lease (in
    /// etcd, `raft_term` of the answer's header).
    pub fn handle_kept_alive(&mut self, id: RequestId, ttl: u32, term: Term, now: Time) {
        let Some(at) = self.find(id) else { return };
        let row = &mut self.rows[at];
        if ttl < row.seconds {
            row.handle_refused(now);
        } else {
            row.handle_kept_alive(term, now);
        }
    }

    /// The sign was read or put, in this term of the answering member, as it was after that.
    pub fn handle_sign(&mut self, id: RequestId, sign: Option<Sign>, term: Term, now: Time) {
        if let Some(at) = self.find(id) {
            self.rows[at].handle_sign(sign, term, now);
        }
    }

    /// The store has no lease of the id that a keepalive, a put or a revocation named.
    pub fn handle_no_lease(&mut self, id: RequestId, now: Time) {
        match self.find(id) {
            Some(at) => self.rows[at].handle_no_lease(now),
            None => self.revocations.handle_done(id),
        }
    }

    /// A lease was revoked.
    pub fn handle_revoked(&mut self, id: RequestId) {
        self.revocations.handle_done(id);
    }

    /// A request failed, or its outcome is unknown. It is tried again after a pause.
    pub fn handle_refused(&mut self, id: RequestId, now: Time) {
        match self.find(id) {
            Some(at) => self.rows[at].handle_refused(now),
            None => self.revocations.handle_refused(id),
        }
    }

    /// The watch shows that a sign of this process was removed at this revision.
    pub fn handle_sign_gone(&mut self, seconds: u32, revision: Revision, now: Time) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.seconds == seconds) {
            row.handle_sign_gone(revision, now);
        }
    }

    /// These are all signs of this process that were there as of this revision, by their lengths.
    pub fn handle_listed(&mut self, there: &BTreeSet<u32>, revision: Revision, now: Time) {
        for row in self.rows.iter_mut().filter(|row| !there.contains(&row.seconds)) {
            // What was put since is newer.
            row.handle_sign_gone(revision, now);
        }
    }

    /// Takes back requests that were not answered for 700 ms. Returns whether there were any: then the caller connects to
    /// another member.
    pub fn handle_timeout(&mut self, now: Time) -> bool {
        let mut is_silent = self.revocations.handle_timeout(now);
        for row in &mut self.rows {
            is_silent |= row.handle_timeout(now);
        }
        is_silent
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout) and [`poll_request`](Self::poll_request) again.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        if !self.is_connected {
            return None;
        }
        let has_room = self.in_flight() < IN_FLIGHT_MAX;
        let rows = self.usable().iter().filter_map(|row| row.poll_timeout(has_room));
        rows.chain(self.revocations.poll_timeout()).min()
    }

    /// Returns the next request. It counts as sent at `now`, so the caller sends it after reading the clock.
    pub fn poll_request(&mut self, now: Time) -> Option<Request> {
        if !self.is_connected || self.in_flight() >= IN_FLIGHT_MAX {
            return None;
        }
        let id = RequestId(self.next_id);
        let usable = self.usable().len();
        let due = self.rows[..usable].iter_mut().filter(|row| row.is_due(now));
        let action = match due.min_by_key(|row| row.urgency()) {
            Some(row) => row.send(id, now),
            None => Action::Revoke { lease: self.revocations.send(id, now)? },
        };
        self.next_id += 1;
        Some(Request { id, action })
    }

    /// The rows that requests may be sent for: until the shortest length is known, the shortest alone.
    fn usable(&self) -> &[OwnRow] {
        if self.is_shortest_known { &self.rows } else { &self.rows[..self.rows.len().min(1)] }
    }

    fn in_flight(&self) -> usize {
        self.rows.iter().filter(|row| row.is_in_flight()).count() + self.revocations.in_flight()
    }

    /// The row that waits for this answer.
    fn find(&self, id: RequestId) -> Option<usize> {
        self.rows.iter().position(|row| row.awaits(id))
    }

    fn row(&self, seconds: u32) -> Option<&OwnRow> {
        self.rows.iter().find(|row| row.seconds == seconds)
    }
}

fn whole_seconds(lease: Duration) -> u32 {
    let seconds = lease.as_secs() + u64::from(lease.subsec_nanos() > 0);
    u32::try_from(seconds).unwrap_or(u32::MAX).max(1)
}
