//! What this process knows of a cluster, over all connections to it.
//!
//! The engine holds the replicas of the semaphores that the process uses, its signs of life, and what it knows of those of
//! others. Calls, answers of the cluster, events of the watch and time come in; [`Request`]s to the cluster and
//! [`Deliveries`] to this process come out. It does no I/O and reads no clock: see [`Link`](super::link::Link), which does.

mod answers;
mod deference;
mod forgetting;
mod tracked;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use self::answers::Asker;
pub(super) use self::answers::{Deliveries, Part};
use self::forgetting::Forgetting;
use self::tracked::{Flight, Pending, State, Tracked};
use super::clock::Now;
use super::keys::Keys;
use super::requests::{Outcome, Stored};
use super::wire::WireError;
use crate::backend::{AddressedCall, Answer};
use crate::error::BackendError;
use crate::protocol::liveness::{self, Grace, OtherRows, OwnRows, Seen, margin};
use crate::protocol::replica::{self, Event, Replica, Row, Transaction, Value};
use crate::protocol::{NodeId, Time};

/// The most transactions under way at a time.
const TRANSACTIONS_MAX: usize = 64;

/// A watch that was silent for so long may be of no use: then what is known is read before anything rests on it.
const WATCH_SILENT: Duration = Duration::from_secs(1);

/// The most that one process writes of one semaphore, bytes in a ms. Each transaction writes the whole of it, and etcd
/// keeps each version until it is compacted.
const PACE: usize = 2_000;

/// The pause after a reading of several keys that was refused.
const READ_PAUSE: Duration = Duration::from_secs(1);

/// The shortest time after which a semaphore is settled again.
const WAKE_MIN: Duration = Duration::from_micros(100);

/// A lease that etcd rounds up to the shortest that it grants.
const SHORTEST: Duration = Duration::from_secs(1);

/// What is to be sent to the cluster.
pub(super) enum Request {
    /// For the signs of life of this process.
    Sign(liveness::Request),
    Transaction {
        key: Arc<str>,
        transaction: Transaction,
    },
    /// All signs of life.
    List,
    /// A page of all semaphores, from this key on; `None`: from the first.
    Search {
        from: Option<Vec<u8>>,
    },
}

/// Some semaphores that are stored.
pub(super) struct Page {
    /// Their keys, with the revisions of their last changes and their values.
    pub(super) values: Vec<(Arc<str>, u64, Bytes)>,
    /// The key from which the next page begins; `None`: there are no more.
    pub(super) next: Option<Vec<u8>>,
}

/// One process and a cluster.
pub(super) struct Engine {
    node: NodeId,
    keys: Keys,
    grace: Grace,
    /// The number of the connection in use; `None`: there is none.
    connection: Option<u64>,
    /// The newest revision that the cluster showed.
    revision: u64,
    has_lost_data: bool,
    pub(super) own: OwnRows,
    others: OtherRows,
    tracked: HashMap<Arc<str>, Tracked>,
    /// The keys of those that may have a transaction.
    queue: VecDeque<Arc<str>>,
    parked: Vec<Arc<str>>,
    /// When semaphores are to be settled again.
    timers: BTreeSet<(Time, Arc<str>)>,
    in_flight: usize,
    next_call: u64,
    forgetting: Forgetting,
    is_list_wanted: bool,
    /// No reading of several keys before this.
    read_at: Time,
    /// When the watch last said something.
    watch_heard_at: Option<Time>,
    /// How long a transaction takes.
    round_trip: Duration,
    random: fastrand::Rng,
    pub(super) deliveries: Deliveries,
}

impl Engine {
    /// `seed`: of the jitter of this process.
    pub(super) fn new(node: NodeId, keys: Keys, grace: Grace, seed: u64) -> Self {
        Self {
            node,
            keys,
            grace,
            connection: None,
            revision: 0,
            has_lost_data: false,
            own: OwnRows::new(SHORTEST),
            others: OtherRows::new(node, grace),
            tracked: HashMap::new(),
            queue: VecDeque::new(),
            parked: Vec::new(),
            timers: BTreeSet::new(),
            in_flight: 0,
            next_call: 0,
            forgetting: Forgetting::default(),
            is_list_wanted: false,
            read_at: Time::ZERO,
            watch_heard_at: None,
            round_trip: Duration::ZERO,
            random: fastrand::Rng::with_seed(seed),
            deliveries: Deliveries::default(),
        }
    }

    // ===== the connection =====

    /// Whether a cluster that is at this revision has lost what this process knows of it.
    pub(super) const fn is_older(&self, revision: u64) -> bool {
        revision < self.revision || self.has_lost_data
    }

    /// Whether a key was found to be older than before.
    pub(super) const fn has_lost_data(&self) -> bool {
        self.has_lost_data
    }

    /// Nothing that is known is true of the cluster: it is another one, or was restored.
    pub(super) fn forget_all(&mut self) {
        let (node, keys, next_call) = (self.node, self.keys.clone(), self.next_call);
        let (deliveries, seed) = (take(&mut self.deliveries), self.random.u64(..));
        *self = Self { next_call, deliveries, ..Self::new(node, keys, self.grace, seed) };
    }

    /// There is a connection of this number. Its watch begins after this revision, as of which these signs of life were
    /// there.
    pub(super) fn handle_connected(
        &mut self,
        number: u64,
        rows: Vec<Row>,
        revision: u64,
        now: Now,
    ) {
        self.connection = Some(number);
        self.own.handle_connected(now.time);
        self.handle_watched(rows, revision, now);
        // Places of calls that nobody repeats are strangers.
        for key in self.keys_of_all() {
            if let Some(tracked) = self.tracked.get_mut(&key) {
                tracked.replica.handle_connected(now.time);
            }
            self.settle(&key, now);
        }
    }

    /// There is another watch, which begins after this revision.
    pub(super) fn handle_watched(&mut self, rows: Vec<Row>, revision: u64, now: Now) {
        self.note_revision(revision);
        // What happened since the last watch is not seen by this one.
        self.tracked.values_mut().for_each(|tracked| tracked.seen = None);
        self.note_own_signs(&rows, revision, now);
        self.others.handle_opened(rows, signed(revision), now.time);
    }

    /// A connection is lost. Its calls are not answered.
    pub(super) fn handle_disconnected(&mut self, number: u64, error: &BackendError, now: Now) {
        if self.connection != Some(number) {
            return;
        }
        (self.connection, self.watch_heard_at) = (None, None);
        self.own.handle_disconnected(now.time);
        self.others.handle_disconnected();
        self.forgetting.handle_disconnected();
        self.queue.clear();
        self.parked.clear();
        self.timers.clear();
        self.in_flight = 0;
        for tracked in self.tracked.values_mut() {
            tracked.replica.handle_dropped();
            (tracked.state, tracked.wakes_at) = (State::Idle, None);
            for pending in tracked.pending.drain(..) {
                // Those behind the first of a batch come too late, and do nothing.
                _ = pending.asker.batch.send(Err(error.clone()));
            }
        }
        for key in self.keys_of_all() {
            self.settle(&key, now);
        }
    }

    /// The process ends: its leases are revoked, unless places of it linger, which end with their leases. Returns whether
    /// they are.
    pub(super) fn close(&mut self) -> bool {
        let is_idle = self.tracked.values().all(|tracked| tracked.replica.is_idle());
        if is_idle {
            self.own.close();
        }
        is_idle
    }

    /// Whether this process may write over the connection of this number.
    pub(super) fn is_registered(&self, number: u64) -> bool {
        let shortest = self.own.shortest();
        self.connection == Some(number)
            && shortest.is_some_and(|seconds| self.own.is_registered(seconds))
    }

    fn note_revision(&mut self, revision: u64) {
        self.revision = self.revision.max(revision);
    }

    // ===== calls =====

    /// Takes the calls of a batch over the connection of this number.
    pub(super) fn handle_calls(
        &mut self,
        number: u64,
        calls: &[AddressedCall],
        batch: &UnboundedSender<Part>,
        now: Now,
    ) {
        let shortest = self.own.shortest().filter(|_| self.connection == Some(number));
        let Some(shortest) = shortest else {
            _ = batch.send(Err(BackendError::connection("the connection to etcd is closed")));
            return;
        };
        for (index, AddressedCall { key, call, .. }) in calls.iter().enumerate() {
            let asker = Asker { batch: batch.clone(), index };
            let lease = Duration::from_millis(call.op.lease_ms());
            let shortest = Duration::from_secs(u64::from(shortest));
            let Row { seconds, .. } = Row::of(self.node, call.op.lease_ms(), shortest);
            self.own.add(lease);
            if self.own.row_for(lease) != Some(seconds) {
                self.deliveries.answer(asker, Answer::Refused(too_many_lengths(seconds)));
                continue;
            }
            let id = self.next_call;
            self.next_call += 1;
            let Some(tracked) = self.track(key, now) else { continue };
            tracked.pending.push_back(Pending { id, asker, seconds, lease });
            tracked.replica.handle_time(now.time);
            tracked.replica.handle_call(id, call.clone());
            self.settle(key, now);
        }
    }

    /// Returns a semaphore that is tracked from now on. `None` if this is no key of a semaphore.
    fn track(&mut self, key: &Arc<str>, now: Now) -> Option<&mut Tracked> {
        let shortest = self.own.shortest()?;
        if !self.tracked.contains_key(key) {
            let name = self.keys.name(key)?.into();
            let mut replica = Replica::new(self.node, Duration::from_secs(u64::from(shortest)));
            replica.handle_connected(now.time);
            self.tracked.insert(Arc::clone(key), Tracked::new(name, replica));
        }
        self.tracked.get_mut(key)
    }

    fn keys_of_all(&self) -> Vec<Arc<str>> {
        self.tracked.keys().cloned().collect()
    }

    /// Takes what a replica has to say, and has it make its next transaction.
    fn settle(&mut self, key: &Arc<str>, now: Now) {
        self.hear(key, now);
        if let Some(tracked) = self.tracked.get_mut(key)
            && matches!(tracked.state, State::Idle)
            && self.connection.is_some()
        {
            tracked.state = State::Queued;
            self.queue.push_back(Arc::clone(key));
        }
    }

    /// Takes what a replica has to say. Drops one that is of no use any more.
    fn hear(&mut self, key: &Arc<str>, now: Now) {
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        while let Some(event) = tracked.replica.poll_event() {
            match event {
                Event::Answered { call, answer } => {
                    if let Some(pending) = tracked.take(call) {
                        let answer = answer_of(answer, &pending, tracked, &self.own, now);
                        self.deliveries.answer(pending.asker, answer);
                    }
                }
                Event::Granted(hint) => self.deliveries.hint(&tracked.name, hint),
                Event::Recalled => self.deliveries.recall(&tracked.name),
                Event::Freed => self.deliveries.freed(&tracked.name),
                Event::Stopped(error) => tracked.error = Some(unreadable(&tracked.name, &error)),
            }
        }
        let revision = tracked.replica.revision();
        if tracked.noted != revision {
            tracked.noted = revision;
            tracked.replica.other_rows().for_each(|row| self.others.handle_place(row, now.time));
            self.forgetting.note(key, &mut tracked.replica);
            self.forgetting.settle(&mut self.others);
        }
        let is_idle = tracked.replica.is_idle() && tracked.pending.is_empty();
        let over_at = tracked.replica.over_at().filter(|_| self.is_to_be_removed(key));
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        if is_idle
            && over_at.is_none()
            && tracked.replica.other_rows().all(|row| self.others.is_alive(row))
        {
            self.tracked.remove(key);
        } else if let Some(over_at) = over_at.filter(|at| *at > now.wall) {
            self.wake(key, Duration::from_micros(over_at.saturating_sub(now.wall)), now);
        }
    }

    /// Whether this process is to remove a key that has no places any more: it wrote the value, or a process that is dead
    /// did.
    fn is_to_be_removed(&self, key: &str) -> bool {
        let value = self.tracked.get(key).and_then(|tracked| tracked.replica.value());
        value.is_some_and(|value| value.writer == self.node || !self.others.is_living(value.writer))
    }

    /// Has a semaphore settled again after this time, if that is not due before.
    fn wake(&mut self, key: &Arc<str>, after: Duration, now: Now) {
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        let at = now.time + after.max(WAKE_MIN);
        if tracked.wakes_at.is_none_or(|wakes_at| at < wakes_at) {
            if let Some(before) = tracked.wakes_at.replace(at) {
                self.timers.remove(&(before, Arc::clone(key)));
            }
            self.timers.insert((at, Arc::clone(key)));
        }
    }

    // ===== requests =====

    /// Returns the next request.
    pub(super) fn poll_request(&mut self, now: Now) -> Option<Request> {
        self.connection?;
        if let Some(request) = self.own.poll_request(now.time) {
            return Some(Request::Sign(request));
        }
        self.poll_cleanups(now);
        if let Some(request) = self.poll_transaction(now) {
            return Some(request);
        }
        // Before its first lease, this process could track nothing that it finds.
        if now.time < self.read_at || self.own.shortest().is_none() {
            return None;
        }
        if take(&mut self.is_list_wanted) {
            return Some(Request::List);
        }
        self.forgetting.search.poll().map(|from| Request::Search { from })
    }

    fn poll_cleanups(&mut self, now: Now) {
        while let Some(cleanup) = self.others.poll_cleanup(now.time) {
            let Some(ended) = self.forgetting.ask(cleanup, &self.others) else {
                self.is_list_wanted = true;
                continue;
            };
            let concerned = self.tracked.iter().filter(|(_, tracked)| {
                tracked.replica.other_rows().any(|row| row.node == ended.row().node)
            });
            for key in concerned.map(|(key, _)| Arc::clone(key)).collect::<Vec<_>>() {
                if let Some(tracked) = self.tracked.get_mut(&key) {
                    self.forgetting.note(&key, &mut tracked.replica);
                }
                self.settle(&key, now);
            }
            self.forgetting.settle(&mut self.others);
        }
    }

    fn poll_transaction(&mut self, now: Now) -> Option<Request> {
        while self.in_flight < TRANSACTIONS_MAX
            && let Some(key) = self.queue.pop_front()
        {
            // It may have been dropped, and tracked anew, since.
            let tracked = self.tracked.get_mut(&key);
            let is_queued = |tracked: &&mut Tracked| matches!(tracked.state, State::Queued);
            let Some(tracked) = tracked.filter(is_queued) else { continue };
            let shortest = self.own.shortest().unwrap_or_default();
            let mut seconds = tracked.pending.iter().map(|pending| pending.seconds);
            if !self.own.is_registered(shortest) || !seconds.all(|s| self.own.is_registered(s)) {
                tracked.state = State::Parked;
                self.parked.push(key);
                continue;
            }
            if let Some(pause) = tracked.deference.pause(now.time) {
                tracked.state = State::Defers;
                self.wake(&key, pause, now);
                continue;
            }
            tracked.state = State::Idle;
            if self.watch_heard_at.is_some_and(|at| now.time < at + WATCH_SILENT)
                && tracked.is_recent(&self.own, now.time)
            {
                tracked.replica.handle_fresh(now.time + Duration::from_millis(1));
            } else {
                tracked.replica.handle_fresh(Time::ZERO);
            }
            if let Some(transaction) = tracked.replica.poll_transaction(now.time, now.wall) {
                tracked.state = State::InFlight(Flight::new(&transaction, now.time));
                self.in_flight += 1;
                return Some(Request::Transaction { key, transaction });
            }
            // Renewals may have been answered without one.
            self.hear(&key, now);
        }
        None
    }

    /// Returns when to poll for requests again, if nothing happens before.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        let is_reading = self.is_list_wanted || self.forgetting.search.is_due();
        let read_at = Some(self.read_at).filter(|_| is_reading && self.own.shortest().is_some());
        let timer = self.timers.first().map(|(at, _)| *at);
        let timeouts = [self.own.poll_timeout(), self.others.poll_timeout(), timer, read_at];
        timeouts.into_iter().flatten().min()
    }

    /// Does what is due. Returns whether the member did not answer in time.
    pub(super) fn handle_timeout(&mut self, now: Now) -> bool {
        while let Some((at, key)) = self.timers.pop_first() {
            if at > now.time {
                self.timers.insert((at, key));
                break;
            }
            if let Some(tracked) = self.tracked.get_mut(&key) {
                tracked.wakes_at = None;
                match tracked.state {
                    // It was woken for something else.
                    State::Paused(until) if now.time < until => {
                        self.wake(&key, until.since(now.time), now);
                    }
                    State::Paused(_) | State::Defers => tracked.state = State::Idle,
                    _ => {}
                }
                self.settle(&key, now);
            }
        }
        self.own.handle_timeout(now.time)
    }

    // ===== answers of the cluster =====

    /// The signs of life of this process may have changed.
    pub(super) fn handle_own_sign(&mut self, now: Now) {
        for key in take(&mut self.parked) {
            if let Some(tracked) = self.tracked.get_mut(&key)
                && matches!(tracked.state, State::Parked)
            {
                tracked.state = State::Idle;
                self.settle(&key, now);
            }
        }
    }

    /// Takes what became of a transaction.
    pub(super) fn handle_outcome(
        &mut self,
        key: &Arc<str>,
        outcome: Result<Outcome, &WireError>,
        now: Now,
    ) {
        let revision = match &outcome {
            Ok(Outcome::Committed { revision } | Outcome::Lost(Stored { revision, .. })) => {
                *revision
            }
            _ => 0,
        };
        self.note_revision(revision);
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        let State::InFlight(flight) = std::mem::replace(&mut tracked.state, State::Idle) else {
            return;
        };
        self.in_flight -= 1;
        if revision > 0 {
            tracked.handle_seen(revision, now.time);
            let took = now.time.since(flight.sent);
            self.round_trip = (self.round_trip * 7 + took) / 8;
        }
        let mut pause = Duration::ZERO;
        match outcome {
            Ok(Outcome::Committed { revision }) => {
                tracked.handle_success();
                if flight.writes > 0 {
                    tracked.deference.handle_own_write(self.round_trip, now.time);
                    pause = paced(flight.writes);
                }
                tracked.replica.handle_committed(revision);
            }
            Ok(Outcome::Lost(Stored { revision, value })) => {
                let changed = if value.is_some() { revision } else { 0 };
                // As after a restore, with other keys written since.
                self.has_lost_data |= value.is_some() && changed < flight.changed;
                if changed == flight.changed {
                    // A sign of life was not as it should be, which the watch will tell, or a listing.
                    flight.absent.iter().for_each(|row| tracked.replica.handle_back(*row));
                    self.is_list_wanted |= !flight.absent.is_empty();
                    pause = tracked.handle_failure();
                } else {
                    pause = tracked.handle_loss(self.random.f64());
                }
                tracked.replica.handle_lost(revision, value.as_deref());
            }
            Ok(Outcome::Malformed) => {
                pause = tracked.handle_failure();
                tracked.replica.handle_unknown();
            }
            Err(error) => {
                tracked.error = Some(error.clone().into());
                pause = tracked.handle_failure();
                if error.did_nothing() {
                    tracked.replica.handle_refused();
                } else {
                    tracked.replica.handle_unknown();
                }
            }
        }
        if !pause.is_zero() {
            tracked.state = State::Paused(now.time + pause);
            self.wake(key, pause, now);
        }
        self.settle(key, now);
    }

    /// Takes a value that the watch or a search brought; `None`: the key is absent.
    pub(super) fn handle_value(
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
    pub(super) const fn handle_watch(&mut self, now: Now) {
        self.watch_heard_at = Some(now.time);
    }

    /// Whether a value of a semaphore that this process does not use can have places of this process: then a transaction
    /// of it was carried out late.
    fn is_to_be_tracked(&self, value: Option<&[u8]>) -> bool {
        value.and_then(Value::writer_of) == Some(self.node)
    }

    /// A sign of life was seen, or its end.
    pub(super) fn handle_sign(&mut self, row: Row, seen: Seen, revision: u64, now: Now) {
        self.note_revision(revision);
        if row.node == self.node {
            if seen == Seen::Gone {
                self.own.handle_sign_gone(row.seconds, signed(revision), now.time);
            }
            return;
        }
        self.others.handle_sign(row, seen, signed(revision), now.time);
        if seen == Seen::Alive {
            for key in self.forgetting.stop(row) {
                if let Some(tracked) = self.tracked.get_mut(&key) {
                    tracked.replica.handle_back(row);
                }
                self.settle(&key, now);
            }
        }
    }

    /// All signs of life, as of this revision. `None`: they could not be read.
    pub(super) fn handle_listed(&mut self, listed: Option<(Vec<Row>, u64)>, now: Now) {
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
            for key in self.forgetting.stop(row) {
                if let Some(tracked) = self.tracked.get_mut(&key) {
                    tracked.replica.handle_back(row);
                }
            }
        }
        // Those that were kept for rows that were not alive may be of no use any more.
        let is_due = |tracked: &mut Tracked| {
            tracked.replica.handle_time(now.time)
                || tracked.replica.is_idle() && tracked.pending.is_empty()
        };
        let due = self
            .tracked
            .iter_mut()
            .filter_map(|(key, tracked)| is_due(tracked).then(|| Arc::clone(key)));
        for key in due.collect::<Vec<_>>() {
            self.settle(&key, now);
        }
    }

    /// Signs of this process that are not among these were removed, and the watch may have lost the event.
    fn note_own_signs(&mut self, rows: &[Row], revision: u64, now: Now) {
        let own = rows.iter().filter(|row| row.node == self.node);
        let there: BTreeSet<_> = own.map(|row| row.seconds).collect();
        self.own.handle_listed(&there, signed(revision), now.time);
    }

    /// A page of all semaphores. `None`: it could not be read.
    pub(super) fn handle_searched(&mut self, page: Option<Page>, now: Now) {
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

/// For how long to write a semaphore of so many bytes no more.
fn paced(bytes: usize) -> Duration {
    let ms = u64::try_from(bytes / PACE).unwrap_or(u64::MAX);
    Duration::from_millis(ms)
}

/// The answer to a call, and from when its leases count.
fn answer_of(
    answer: replica::Answer,
    pending: &Pending,
    tracked: &Tracked,
    own: &OwnRows,
    now: Now,
) -> Answer {
    let error = || {
        let unknown = || BackendError::call("etcd did not carry out the transaction");
        tracked.error.clone().unwrap_or_else(unknown)
    };
    match answer {
        replica::Answer::Reply(reply) => {
            if pending.lease.is_zero() {
                return reply.into();
            }
            match leases_from(pending, own, now) {
                Some(from) => Answer::Reply { reply, late: false, leases_from: Some(from) },
                None => Answer::Failed(BackendError::call("the lease ended meanwhile")),
            }
        }
        replica::Answer::Refused => Answer::Refused(error()),
        replica::Answer::Failed => Answer::Failed(error()),
    }
}

/// From when the leases of a call count, for a session, which takes them to be as long as the call asked, less 1 ms: they
/// are as long as etcd's lease, less its margin.
fn leases_from(pending: &Pending, own: &OwnRows, now: Now) -> Option<tokio::time::Instant> {
    let longer = Duration::from_secs(u64::from(pending.seconds)).saturating_sub(pending.lease);
    let from = own.leases_from(pending.seconds)? + longer + Duration::from_millis(1);
    now.instant_of(from.checked_sub(margin(pending.seconds))?)
}

fn too_many_lengths(seconds: u32) -> BackendError {
    let most = liveness::LENGTHS_MAX;
    BackendError::call(format!(
        "lease is {seconds} s, and {most} other lengths are in use; expected at most {most} of one process"
    ))
}

fn unreadable(name: &str, error: &replica::ValueError) -> BackendError {
    BackendError::call(format!("semaphore {name} in etcd cannot be used: {error}"))
}

fn signed(revision: u64) -> liveness::Revision {
    i64::try_from(revision).unwrap_or(i64::MAX)
}
