//! One process's replica of a semaphore that is stored as one value, under a key of a store with compare-and-swap.
//!
//! Such a store, like etcd, keeps for each key a value and the revision of its last change, but counts nothing: processes
//! do that themselves. A [`Replica`] holds the newest [`Value`] that its process knows. It applies the process's pending
//! calls to a copy of the ledger in it, and writes the copy with a [`Transaction`] that compares the revision. One that
//! loses brings back the newest value, and the calls are applied to that.
//!
//! It is a pure state machine like the [`Ledger`](crate::Ledger) and the [`Session`](crate::Session). A driver passes the
//! session's calls, values, and outcomes of transactions to `handle_*`, and takes the next transaction
//! ([`Replica::poll_transaction`]) and events ([`Replica::poll_event`]) after each of these.
//!
//! # Why it is safe
//!
//! *One writer wins*: a transaction is carried out only if the value is still the one that it was made from. So the values
//! of a key are a chain: each is the one before, after some operations of a ledger. Whatever a ledger promises for a
//! sequence of operations is true of the chain. *The replica only moves forward*: it ignores a value with a lower revision
//! than the known one. A replica that is behind can lose transactions, but cannot make a wrong grant, so a watch may
//! deliver late, twice or never.
//!
//! A call is answered only once a transaction with it was carried out, even if it changed nothing. The exception is a call
//! that only asks while the replica is [fresh](Replica::handle_fresh). Where it is certain who is next, a place is told of
//! its grant before. A transaction whose outcome is unknown is repeated
//! with the same ids, which changes nothing if it was carried out. If it is carried out later, the places that it leaves
//! are released as strangers.
//!
//! The README has the rules, under "A semaphore as one value".
//!
//! # What it leaves to others
//!
//! The replica does not decide whether a process is dead: see [`Ended`]. Its transactions name the signs of life that must
//! be there or absent, so that a process whose places may be forgotten changes nothing.
//!
//! # Examples
//!
//! ```
//! use std::time::Duration;
//! use tower_semaphore_protocol::replica::{Answer, Change, Event, Replica};
//! use tower_semaphore_protocol::{Call, NodeId, Op, PlaceId, PlaceStatus, Time};
//!
//! let node = NodeId::new(7);
//! let mut replica = Replica::new(node, Duration::from_secs(2));
//! let ids = [PlaceId { node, poll_only: false, n: 1, bound: None, claim: None }].into();
//! let acquire = Op::Acquire { leaving: vec![], lease_ms: 10_000, max_queue: Some(100), ids };
//! replica.handle_call(1, Call { limit: 1, ..Call::of(acquire) });
//!
//! let transaction = replica.poll_transaction(Time::ZERO, 1_795_169_853_126_543).expect("a call");
//! assert_eq!(transaction.changed, 0, "if the key is absent");
//! assert!(matches!(transaction.change, Change::Put(_)));
//!
//! replica.handle_committed(5);
//! let Some(Event::Answered { call: 1, answer: Answer::Reply(reply) }) = replica.poll_event() else { panic!() };
//! assert_eq!(reply.statuses[0], PlaceStatus::Held);
//! ```

mod calls;
mod company;
mod event;
mod known;
mod own_places;
mod rows;
mod succession;
mod transaction;
mod value;

use std::collections::VecDeque;
use std::time::Duration;

use self::calls::{Calls, is_well_formed};
pub use self::event::{Answer, Event};
use self::known::{Content, Known, Read, View};
use self::own_places::OwnPlaces;
pub use self::rows::Ended;
use self::rows::EndedRows;
use self::succession::Succession;
use self::transaction::Flight;
pub use self::transaction::{Change, Transaction};
pub use self::value::{Value, ValueError};
use crate::call::Call;
use crate::id::{NodeId, PlaceId};
use crate::ledger::{Grant, Reply};
pub use crate::row::Row;
use crate::time::Time;

/// The longest ledger, in bytes, to which waiting places are added: 256 KiB.
const VALUE_MAX: usize = 256 * 1024;

/// One process's view of a semaphore that is stored as one value.
///
/// A process keeps it from before its first call for the semaphore until [`is_idle`](Self::is_idle), over all connections:
/// it releases places of the process that it has never heard of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    node: NodeId,
    shortest_lease: Duration,
    value_max: usize,
    known: Known,
    /// Until when calls that only ask are answered from what is known.
    fresh_until: Time,
    own: OwnPlaces,
    calls: Calls,
    succession: Succession,
    ended: EndedRows,
    flight: Option<Flight>,
    connected_at: Time,
    events: VecDeque<Event>,
}

impl Replica {
    /// Creates the replica of a process, which takes the key for absent until it learns otherwise. The store grants no
    /// lease that is shorter than `shortest_lease`, and only such of whole seconds.
    #[must_use]
    pub fn new(node: NodeId, shortest_lease: Duration) -> Self {
        Self {
            node,
            shortest_lease,
            value_max: VALUE_MAX,
            known: Known::nothing(node),
            fresh_until: Time::ZERO,
            own: OwnPlaces::default(),
            calls: Calls::default(),
            succession: Succession::default(),
            ended: EndedRows::default(),
            flight: None,
            connected_at: Time::ZERO,
            events: VecDeque::new(),
        }
    }

    /// Sets another bound than 256 KiB on the ledgers to which waiting places are added, in bytes. For tests.
    pub fn set_value_max(&mut self, value_max: usize) {
        self.value_max = value_max;
    }

    /// There is a connection to the store.
    pub const fn handle_connected(&mut self, now: Time) {
        self.connected_at = now;
    }

    /// It is this time. Returns whether that made places strangers: those that no call has named for two of their leases,
    /// since when there is a connection. A session names each of its places every third of a lease, so it has none of these;
    /// releases that an outage took it longer to send than a lease lasts, it does not send any more.
    pub fn handle_time(&mut self, now: Time) -> bool {
        self.own.handle_time(now);
        let (read, shortest) = (self.known.as_read(), self.shortest_lease);
        let connected_for = now.since(self.connected_at);
        let named = self.calls.named();
        self.own.forget_if(|n, unnamed_for| {
            let lease = read.and_then(|read| read.view.lease_of(n)).unwrap_or(shortest);
            unnamed_for.min(connected_for) > lease * 2 && !named.contains(&n)
        })
    }

    /// Takes a call. Calls are carried out in the order in which they are taken; `id` returns with the answer.
    pub fn handle_call(&mut self, id: u64, call: Call) {
        if !is_well_formed(&call, self.node) {
            return self.answer(id, Answer::Refused);
        }
        self.own.handle_call(&call.op);
        self.succession.handle_limit(call.limit);
        self.calls.push(id, call);
        self.succeed();
        self.note_patience();
        self.refuse_if_stopped();
    }

    /// Takes a value that a read or a watch brought; `None`: the key is absent. `revision` is the one at which the key was
    /// changed last, or, if it is absent, any at which it was. A lower one than is known is ignored.
    pub fn handle_value(&mut self, revision: u64, value: Option<&[u8]>) {
        if revision > self.known.revision {
            let (known, error) = Known::read(revision, value, self.node);
            self.adopt(known, &[]);
            self.events.extend(error.map(Event::Stopped));
        }
        self.refuse_if_stopped();
    }

    /// The transaction was carried out at this revision of the store.
    pub fn handle_committed(&mut self, revision: u64) {
        let Some(flight) = self.flight.take() else { return };
        self.ended.handle_committed(&flight.forgotten);
        let Flight { value, change, replies, .. } = flight;
        let told: Vec<_> =
            replies.iter().flat_map(|reply| &reply.granted).map(|grant| grant.id).collect();
        for reply in replies {
            self.answer_next(reply);
        }
        let (changed, bytes) = match &change {
            Change::Put(bytes) => (revision, Some(&bytes[..])),
            Change::Delete => (0, None),
            Change::Nothing => return self.refuse_if_stopped(),
        };
        let value = if bytes.is_some() { value } else { Value::default() };
        let read = Read::of(value, bytes, self.node);
        if revision > self.known.revision {
            self.adopt(Known { revision, changed, content: Content::Read(Box::new(read)) }, &told);
        } else {
            // A watch was faster, and brought what came after it.
            self.tell_grants(&read.view, &told);
        }
        self.refuse_if_stopped();
    }

    /// The transaction was not carried out: one of its conditions was not met. The value and its revision are those of
    /// that moment, as for [`handle_value`](Self::handle_value).
    ///
    /// If it was a condition beside the revision, the driver first does something about it, such as
    /// [`handle_back`](Self::handle_back), or the next one is lost, too.
    pub fn handle_lost(&mut self, revision: u64, value: Option<&[u8]>) {
        self.flight = None;
        self.handle_value(revision, value);
    }

    /// It is not known whether the transaction was carried out, and it may still be. The next one has the same calls, with
    /// the same ids.
    pub fn handle_unknown(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.calls.handle_unknown(flight.replies.len());
        }
        self.refuse_if_stopped();
    }

    /// The store refused the transaction, which was not carried out. Its calls are refused. Anything else in it is left for
    /// the next one, before which the driver waits.
    pub fn handle_refused(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.refuse(flight.replies.len());
        }
    }

    /// Drops all calls without an answer, as when a connection breaks: the session makes those again that it still needs. A
    /// transaction in flight may still be carried out.
    pub fn handle_dropped(&mut self) {
        self.flight = None;
        self.calls.clear();
    }

    /// The known value is recent: until then, calls that only ask are answered from it. The driver says so after a read, or
    /// when a watch reports its progress.
    pub fn handle_fresh(&mut self, until: Time) {
        self.fresh_until = until;
    }

    /// A sign of life has ended: the next transaction forgets its places. With `is_due`, one is made for that, if the known
    /// value has such places; otherwise they go with one that is made for calls.
    pub fn handle_ended(&mut self, ended: Ended, is_due: bool) {
        self.ended.handle_ended(ended, is_due);
    }

    /// The sign of life of a row has come back before its places were forgotten.
    pub fn handle_back(&mut self, row: Row) {
        self.ended.handle_back(row);
    }

    /// Returns the next transaction, if there is something to write, to ask or to remove, and none in flight. `clock`: µs since 1970 by
    /// the process's wall clock.
    pub fn poll_transaction(&mut self, now: Time, clock: u64) -> Option<Transaction> {
        while self.flight.is_none() && self.wants_transaction(clock) {
            let flight = self.prepare(clock)?;
            if now < self.fresh_until && flight.needs_no_store() {
                flight.replies.into_iter().for_each(|reply| self.answer_next(reply));
                continue;
            }
            let (present, absent) = (flight.present.clone(), flight.forgotten.rows.clone());
            let change = flight.change.clone();
            self.succession.handle_sent(&flight.value.ledger);
            self.flight = Some(flight);
            return Some(Transaction { changed: self.known.changed, present, absent, change });
        }
        None
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns whether the process has no place and no call, so that the replica can be dropped.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let has_places = self.known.as_read().is_some_and(|read| !read.view.own.is_empty());
        self.calls.is_empty() && self.flight.is_none() && self.own.is_empty() && !has_places
    }

    /// Whether a call names a place that waits, as far as is known.
    #[must_use]
    pub fn asks_for_waiting(&self) -> bool {
        let Some(read) = self.known.as_read() else { return false };
        read.view.has_waiting() && self.calls.named().iter().any(|n| read.view.waits(*n))
    }

    /// Whether the newest value that is known has places that go with this sign of life.
    #[must_use]
    pub fn has_places_of(&self, ended: Ended) -> bool {
        self.known.as_read().is_some_and(|read| ended.has_places(&read.value.ledger))
    }

    /// When the key is to be removed, µs since 1970, if nobody uses it until then: its last place has left, but it remembers
    /// what rates and budgets count. A driver keeps the replica until then if its process wrote the value, or if the one
    /// that did is dead.
    #[must_use]
    pub fn over_at(&self) -> Option<u64> {
        self.known.as_read().filter(|read| !read.is_absent())?.value.over_at()
    }

    /// The newest value that is known; `None` if it is not read.
    #[must_use]
    pub fn value(&self) -> Option<&Value> {
        self.known.as_read().map(|read| &read.value)
    }

    /// The rows of other processes that have places in the newest value, in order.
    pub fn other_rows(&self) -> impl Iterator<Item = Row> {
        let rows = self.known.as_read().map(|read| &*read.view.other_rows);
        rows.unwrap_or_default().iter().copied()
    }

    /// The revision that the value is as of.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        self.known.revision
    }

    fn wants_transaction(&self, clock: u64) -> bool {
        let Some(read) = self.known.as_read() else { return false };
        !self.calls.is_empty()
            || !self.strangers(read).is_empty()
            || self.ended.is_due(&read.value.ledger)
            || read.is_over(read.value.next_time(clock))
    }

    /// Takes a newer value, and says what it means for this process; `told`: the grants that replies contain.
    fn adopt(&mut self, known: Known, told: &[PlaceId]) {
        let before = std::mem::replace(&mut self.known, known);
        let before = before.as_read().map(|read| &read.view);
        let nothing = View::default();
        self.tell_grants(before.unwrap_or(&nothing), told);
        let Some(read) = self.known.as_read() else { return };
        self.succession.handle_value(&read.view, &self.own);
        let others_waited = before.is_some_and(|view| view.others_wait);
        if read.view.others_wait && !others_waited && !read.view.own.is_empty() {
            self.events.push_back(Event::Recalled);
        }
        if !read.value.is_promoted && read.view.has_waiting() {
            self.events.push_back(Event::Freed);
        }
        self.succeed();
    }

    /// Says which places were granted since, unless a reply does or the process has left them.
    fn tell_grants(&mut self, before: &View, told: &[PlaceId]) {
        let Some(read) = self.known.as_read() else { return };
        let grants = read.view.granted_since(before);
        let is_told =
            |grant: &Grant| told.contains(&grant.id) || self.succession.is_told(grant.id.n);
        let news = grants.filter(|grant| self.own.has(grant.id.n) && !is_told(grant));
        self.events.extend(news.map(|grant| Event::Granted(grant.into())));
    }

    /// Answers the first call.
    fn answer_next(&mut self, mut reply: Reply) {
        // Of the others, the process heard earlier, or has left them.
        let is_news = |id: &PlaceId| self.own.has(id.n) && !self.succession.is_told(id.n);
        reply.granted.retain(|grant| is_news(&grant.id));
        if let Some(pending) = self.calls.pop() {
            self.own.handle_reply(&pending.call.op, &reply, &self.calls);
            self.answer(pending.id, Answer::Reply(reply));
        }
    }

    fn answer(&mut self, call: u64, answer: Answer) {
        self.events.push_back(Event::Answered { call, answer });
    }

    /// Refuses the first calls.
    fn refuse(&mut self, count: usize) {
        for pending in (0..count).map_while(|_| self.calls.pop()) {
            if !pending.in_doubt {
                self.own.handle_refused(&pending.call.op);
            }
            let answer = if pending.in_doubt { Answer::Failed } else { Answer::Refused };
            self.events.push_back(Event::Answered { call: pending.id, answer });
        }
    }

    fn refuse_if_stopped(&mut self) {
        if self.flight.is_none() && self.known.as_read().is_none() {
            self.refuse(self.calls.len());
        }
    }
}
