//! The rows of other processes, as seen by the watch on their signs of life.

mod absent;

use std::collections::BTreeMap;
use std::time::Duration;

use self::absent::{Absent, Ask};
use super::{Grace, Revision, Row};
use crate::id::NodeId;
use crate::time::Time;

/// The most rows that are tracked: 16 of each of 4,096 processes. Others are not forgotten before there is room.
pub const ROWS_MAX: usize = 65_536;

/// How much later each further process forgets, so that usually one does it for all (rule 9).
const STAGGER: Duration = Duration::from_millis(50);

/// The processes from this one on do it at the same time.
const RANK_MAX: u32 = 20;

/// How often the first of the living lists all signs; the second every two such times, and so on (rule 10).
const LIST_EVERY: Duration = Duration::from_secs(2);

const LIST_RANK_MAX: u32 = 8;

/// How many cleanups may be under way at a time.
const ASKED_MAX: usize = 16;

/// A driver that looks again later than this was frozen.
const LATE: Duration = Duration::from_millis(300);

/// How a sign is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// It was there.
    Alive,
    /// It was not there.
    Gone,
}

/// What is to be done about the rows of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cleanup {
    /// Remove the waiting places of the row, guarded by the absence of its sign. They hold nothing; a process that lives
    /// returns with their tickets. Answered by [`OtherRows::handle_waiting_forgotten`].
    ForgetWaiting(Row),
    /// Remove all places of the row, guarded by the absence of its sign. Answered by [`OtherRows::handle_forgotten`].
    Forget(Row),
    /// Read all signs linearizably: the watch may have lost an event. Answered by [`OtherRows::handle_listed`].
    List,
}

/// The rows of other processes: which live, and whose places are to be forgotten.
///
/// The driver passes what it sees of signs and of values, connections and time to `handle_*`. After each of these, and at
/// [`poll_timeout`](Self::poll_timeout), it carries out what [`poll_cleanup`](Self::poll_cleanup) returns, until that is
/// `None`.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore_protocol::liveness::{Cleanup, Grace, OtherRows, Row, Seen};
/// use tower_semaphore_protocol::{NodeId, Time};
///
/// let at = |ms| Time::since_epoch(Duration::from_millis(ms));
/// let row = Row { node: NodeId::new(7), seconds: 2 };
/// let mut others = OtherRows::new(NodeId::new(1), Grace::Half);
/// others.handle_opened([row], 10, at(0));
///
/// // The watch says that the sign of the other process is gone.
/// others.handle_sign(row, Seen::Gone, 20, at(1000));
/// assert_eq!(others.poll_cleanup(at(1000)), Some(Cleanup::ForgetWaiting(row)));
/// assert_eq!(others.poll_cleanup(at(1000)), None);
/// others.handle_waiting_forgotten(row);
/// assert_eq!(others.poll_timeout(), Some(at(2000)));
/// assert_eq!(others.poll_cleanup(at(2000)), Some(Cleanup::List));
/// assert_eq!(others.poll_cleanup(at(2000)), None);
/// others.handle_listed([], 20, at(2001));
///
/// // It did not come back within the grace, 2 s.
/// assert_eq!(others.poll_cleanup(at(3000)), Some(Cleanup::Forget(row)));
/// others.handle_forgotten(row);
/// assert_eq!(others.tracked(), 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OtherRows {
    node: NodeId,
    grace: Grace,
    /// The signs that are there, each with the newest revision as of which it was.
    alive: BTreeMap<Row, Revision>,
    /// Rows that may have places, and no sign.
    absent: BTreeMap<Row, Absent>,
    /// What is said of rows that are not tracked counts if it is newer than this.
    floor: Revision,
    is_connected: bool,
    /// When all signs are to be listed.
    list_at: Time,
    /// When the driver is expected to look again: long after that, it was frozen.
    expected_at: Option<Time>,
    /// As many cleanups as allowed are under way until then.
    full_until: Option<Time>,
}

impl OtherRows {
    /// Creates an empty view for the process `node`, which is one of the living.
    #[must_use]
    pub const fn new(node: NodeId, grace: Grace) -> Self {
        Self {
            node,
            grace,
            alive: BTreeMap::new(),
            absent: BTreeMap::new(),
            floor: 0,
            is_connected: false,
            list_at: Time::ZERO,
            expected_at: None,
            full_until: None,
        }
    }

    /// How many rows are tracked.
    #[must_use]
    pub fn tracked(&self) -> usize {
        self.alive.len() + self.absent.len()
    }

    /// Whether the sign of a row is there, as far as is known.
    #[must_use]
    pub fn is_alive(&self, row: Row) -> bool {
        self.alive.contains_key(&row)
    }

    /// Whether a process has a sign of life, as far as is known.
    #[must_use]
    pub fn is_living(&self, node: NodeId) -> bool {
        let rows = Row { node, seconds: 0 }..=Row { node, seconds: u32::MAX };
        node == self.node || self.alive.range(rows).next().is_some()
    }

    /// Whether this process is the first of the living, as far as is known.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.rank(1) == 0
    }

    /// A watch begins after this revision, as of which these signs were there.
    ///
    /// Signs can have come back and gone unseen since the last watch, so each absence counts from now (rule 8).
    pub fn handle_opened(
        &mut self,
        signs: impl IntoIterator<Item = Row>,
        revision: Revision,
        now: Time,
    ) {
        self.handle_resumed(now);
        self.handle_listed(signs, revision, now);
    }

    /// A watch continues where the last one ended: the events since then follow. Absences count from now, too, because
    /// these events have not been seen yet.
    pub fn handle_resumed(&mut self, now: Time) {
        self.is_connected = true;
        self.restart(now);
    }

    /// The watch ended. Nothing is cleaned up until the next one.
    pub const fn handle_disconnected(&mut self) {
        self.is_connected = false;
        self.expected_at = None;
    }

    fn restart(&mut self, now: Time) {
        self.full_until = None;
        self.absent.values_mut().for_each(|absent| absent.restart(now));
    }

    /// All signs that were there as of this revision, read beside the watch.
    pub fn handle_listed(
        &mut self,
        signs: impl IntoIterator<Item = Row>,
        revision: Revision,
        now: Time,
    ) {
        for row in signs {
            self.handle_sign(row, Seen::Alive, revision, now);
        }
        let gone: Vec<_> = self
            .alive
            .iter()
            .filter(|(_, as_of)| **as_of < revision)
            .map(|(row, _)| *row)
            .collect();
        for row in gone {
            self.handle_sign(row, Seen::Gone, revision, now);
        }
        self.list_at = now + LIST_EVERY * (self.rank(LIST_RANK_MAX) + 1);
    }

    /// A sign was there, or was not, as of this revision: of an event its own, of a reading that of the store. What is
    /// older than the last that is known of the row is ignored (rule 6).
    pub fn handle_sign(&mut self, row: Row, seen: Seen, revision: Revision, now: Time) {
        if row.node == self.node || revision <= self.known_as_of(row) {
            return;
        }
        let (is_alive, absent) = (self.alive.contains_key(&row), self.absent.get_mut(&row));
        match (seen, absent) {
            (Seen::Gone, Some(absent)) => absent.as_of = revision,
            (Seen::Gone, None) if is_alive => {
                self.alive.remove(&row);
                self.absent.insert(row, Absent::gone(revision, now));
            }
            // It never had a place that this process knows.
            (Seen::Gone, None) => {}
            (Seen::Alive, absent) => {
                if absent.is_some() || is_alive || self.has_room() {
                    self.full_until = None;
                    self.absent.remove(&row);
                    self.alive.insert(row, revision);
                }
            }
        }
    }

    /// A value has a place of this row. If no sign of it is known, it counts as gone from now on (rule 11).
    pub fn handle_place(&mut self, row: Row, now: Time) {
        let is_tracked = self.alive.contains_key(&row) || self.absent.contains_key(&row);
        if row.node != self.node && !is_tracked && self.has_room() {
            self.absent.insert(row, Absent::never_seen(now));
        }
    }

    /// No value has a waiting place of the row any more, whoever removed it.
    pub fn handle_waiting_forgotten(&mut self, row: Row) {
        self.full_until = None;
        if let Some(absent) = self.absent.get_mut(&row) {
            absent.waiting = Ask::Done;
        }
    }

    /// No value has a place of the row any more, whoever removed it. If the sign came back meanwhile, the row lives.
    pub fn handle_forgotten(&mut self, row: Row) {
        self.full_until = None;
        if let Some(absent) = self.absent.remove(&row) {
            self.floor = self.floor.max(absent.as_of);
        }
    }

    /// Returns when to call [`poll_cleanup`](Self::poll_cleanup) again.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let delay = self.delay();
        let moments = self.absent.iter().flat_map(|(row, absent)| {
            absent.moments(self.is_shortest(*row), self.grace.of(row.seconds), delay)
        });
        let cleanup = moments.flatten().min().max(self.full_until);
        cleanup.into_iter().chain([self.list_at]).min().filter(|_| self.is_connected)
    }

    /// Returns the next cleanup. One that is not answered is returned again, after a time that grows.
    pub fn poll_cleanup(&mut self, now: Time) -> Option<Cleanup> {
        if !self.is_connected {
            return None;
        }
        // What happened meanwhile is still to be seen (rule 8).
        let expected = self.expected_at.and_then(|at| Some(at.max(self.poll_timeout()?)));
        if expected.is_some_and(|expected| now >= expected + LATE) {
            self.restart(now);
        }
        self.expected_at = Some(now);
        let asked = self.absent.values().filter_map(|absent| absent.asked_until(now));
        let (count, first) = asked.fold((0, None), |(count, first), until| {
            (count + 1, first.into_iter().chain([until]).min())
        });
        self.full_until = first.filter(|_| count >= ASKED_MAX);
        let cleanup = if self.full_until.is_none() { self.poll_row(now) } else { None };
        let cleanup = cleanup.or_else(|| self.poll_list(now));
        if cleanup.is_none() {
            self.expected_at = self.poll_timeout();
        }
        cleanup
    }

    fn poll_row(&mut self, now: Time) -> Option<Cleanup> {
        let delay = self.delay();
        let due = self.absent.iter().filter_map(|(row, absent)| {
            let grace = self.grace.of(row.seconds);
            let [waiting, all] = absent.moments(self.is_shortest(*row), grace, delay);
            let first = match (waiting, all) {
                (Some(waiting), all) if all.is_none_or(|all| waiting < all) => (waiting, false),
                (_, all) => (all?, true),
            };
            (now >= first.0).then_some((first, *row))
        });
        let ((_, is_all), row) = due.min()?;
        let absent = self.absent.get_mut(&row)?;
        if is_all {
            absent.all.ask(now);
            return Some(Cleanup::Forget(row));
        }
        absent.waiting.ask(now);
        Some(Cleanup::ForgetWaiting(row))
    }

    fn poll_list(&mut self, now: Time) -> Option<Cleanup> {
        if now < self.list_at {
            return None;
        }
        self.list_at = now + LIST_EVERY * (self.rank(LIST_RANK_MAX) + 1);
        Some(Cleanup::List)
    }

    /// Whether waiting places can belong to the row: no shorter one of its process is known.
    fn is_shortest(&self, row: Row) -> bool {
        let shorter = Row { seconds: 0, ..row }..row;
        self.alive.range(shorter.clone()).next().is_none()
            && self.absent.range(shorter).next().is_none()
    }

    fn delay(&self) -> Duration {
        STAGGER * self.rank(RANK_MAX)
    }

    /// How many living processes come before this one, at most `most`.
    fn rank(&self, most: u32) -> u32 {
        let mut before =
            self.alive.range(..Row { node: self.node, seconds: 0 }).map(|(row, _)| row.node);
        let (mut rank, mut last) = (0, None);
        while rank < most
            && let Some(node) = before.next()
        {
            rank += u32::from(last != Some(node));
            last = Some(node);
        }
        rank
    }

    fn known_as_of(&self, row: Row) -> Revision {
        let alive = self.alive.get(&row).copied();
        let absent = || self.absent.get(&row).map(|absent| absent.as_of);
        alive.or_else(absent).unwrap_or(self.floor)
    }

    fn has_room(&self) -> bool {
        self.tracked() < ROWS_MAX
    }
}
