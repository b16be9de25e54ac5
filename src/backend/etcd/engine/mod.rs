//! What this process knows of a cluster, over all connections to it.
//!
//! The engine holds the replicas of the semaphores that the process uses, its signs of life, and what it knows of those of
//! others. Calls, answers of the cluster, events of the watch and time come in; [`Request`]s to the cluster and
//! [`Deliveries`] to this process come out. It does no I/O and reads no clock: see [`Link`](super::link::Link), which does.

mod answers;
mod deference;
mod events;
mod forgetting;
mod outcomes;
mod replies;
mod requests;
mod tracked;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

use self::answers::Asker;
pub(super) use self::answers::{Deliveries, Part};
pub(super) use self::events::Page;
use self::forgetting::Forgetting;
use self::replies::{answer_of, too_many_lengths};
pub(super) use self::requests::Request;
use self::tracked::{Pending, State, Tracked};
use super::clock::Now;
use super::keys::Keys;
use super::requests::{signed, unreadable};
use crate::backend::{AddressedCall, Answer};
use crate::error::BackendError;
use crate::protocol::liveness::{Grace, OtherRows, OwnRows};
use crate::protocol::replica::{Event, Replica, Row};
use crate::protocol::{NodeId, Time};

/// The shortest time after which a semaphore is settled again.
const WAKE_MIN: Duration = Duration::from_micros(100);

/// A lease that etcd rounds up to the shortest that it grants.
const SHORTEST: Duration = Duration::from_secs(1);

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
            (tracked.state, tracked.wakes_at, tracked.gathers_since) = (State::Idle, None, None);
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
    pub(super) fn is_registered(&self, number: u64, now: Now) -> bool {
        let shortest = self.own.shortest();
        self.connection == Some(number)
            && shortest.is_some_and(|seconds| self.own.is_alive(seconds, now.time))
    }

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

    /// The keys of all that are tracked, in an order that no hash decides.
    fn keys_of_all(&self) -> Vec<Arc<str>> {
        self.keys_of(|_| true)
    }

    fn keys_of(&self, is_meant: impl Fn(&Tracked) -> bool) -> Vec<Arc<str>> {
        let meant = self.tracked.iter().filter(|(_, tracked)| is_meant(tracked));
        let mut keys: Vec<_> = meant.map(|(key, _)| Arc::clone(key)).collect();
        keys.sort_unstable();
        keys
    }

    /// Takes what a replica has to say, and has it make its next transaction.
    fn settle(&mut self, key: &Arc<str>, now: Now) {
        self.hear(key, now);
        if let Some(tracked) = self.tracked.get_mut(key)
            && matches!(tracked.state, State::Idle | State::Gathers)
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
}
