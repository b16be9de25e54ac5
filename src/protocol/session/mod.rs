//! What one process waits for and holds in one semaphore, with local deadlines.
//!
//! A pure state machine like the [`Ledger`](super::ledger::Ledger), and the other half of the
//! protocol: the rules by which a process believes what it is told. Requests, replies, hints,
//! connections and time come in through `handle_*`; calls ([`Session::poll_call`]), events
//! ([`Session::take_events`]) and the next deadline ([`Session::poll_timeout`]) come out. After each
//! input, whoever drives a session takes out all three.
//!
//! The rules, each of which the model shows to be needed:
//!
//! 1. The deadline of a place counts from when the last acknowledged acquire or renewal was *sent*.
//!    What arrives after it is not believed: the session asks first. A permit in use that reaches its
//!    deadline is lost for good; one that its request has not taken yet is asked for again.
//! 2. A hint with a lease end lower than the last acknowledged one is from an earlier stay. One that
//!    comes before the answer to its acquire is kept until then.
//! 3. "Waits" in answer to the renewal of a held place neither demotes it nor extends its deadline.
//!    "Gone" in answer to a renewal that was sent while the place still waited takes nothing from a
//!    place granted since.
//! 4. An acquire that went unanswered is repeated with the same id; a release too. A promotion of an
//!    id that is not known here is answered by a release, and so is a late reply that finds one.
//! 5. After a reconnect: releases first. If the server may have lost data, renewals of everything
//!    come next, and new acquires wait for their answers.
//! 6. A promoted replica may not have heard of the last releases: what stands there of this process
//!    and is unknown here is released once more.
//! 7. A request whose wait is over has an answer, whatever the backend does: no input leaves it
//!    waiting past [`Session::handle_wait_timeout`].

mod connection;
mod outage;
mod overrides;
mod place;
mod reply;
#[cfg(test)]
mod tests;
mod transmit;

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;

pub use self::connection::{Connected, Quarantine};
pub use self::place::{AcquireOptions, PLACES_MAX};
use self::place::{Place, Places, State, WAITING_RENEWAL};
pub use self::transmit::Urgency;
use super::id::{NodeId, PlaceId};
use super::time::Time;
use crate::error::RejectReason;
use crate::protocol::overrides::{Mode, Override};

/// How long the record of an unused semaphore is kept, so that a failover finds it: see rule 6.
const IDLE: Duration = Duration::from_secs(5);

/// What becomes of a request while the backend cannot be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnUnavailable {
    /// It is refused. The default: the cap holds.
    #[default]
    Refuse,
    /// It passes, whatever is in flight: there is no cap until the backend is back. Where an operator
    /// paused the semaphore, or set its limit to 0, it is refused.
    Admit,
    /// It takes one of this many permits of the process's own, and waits for one as it would
    /// otherwise. Permits that the process held before count against them. With the limit divided by
    /// the number of processes the fleet keeps the cap, if no process held more than its share when
    /// the backend went away; what it held beyond that comes on top until it is released. A limit that
    /// an operator set is never passed; 0 or a pause lets nothing in.
    Local(u32),
}

/// This process's half of one semaphore.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Session {
    node: NodeId,
    places: Places,
    /// How many of the places are in flight, and how many wait.
    in_flight: u64,
    waiting: u64,
    /// The limit and the lease of the last request, and the longest lease since the table was empty.
    limit: u32,
    lease: Duration,
    longest_lease: Duration,
    /// What an operator set in place of the policy.
    overrides: Override,

    // The connection.
    /// Hints do not arrive.
    poll_only: bool,
    /// The backend cannot be asked.
    outage: bool,
    quarantine: Quarantine,
    /// In an outage: the places that wait for a share of the process's own, in the order of their
    /// requests.
    local_queue: VecDeque<u64>,
    /// After data may have been lost: joins wait until it is known what became of the places.
    resync: bool,

    // What is to be sent.
    joins: VecDeque<u64>,
    /// Each with the time from which it is gone by itself.
    releases: VecDeque<(PlaceId, Time)>,
    /// Those that were sent and not answered yet, in the order in which they were sent.
    releasing: VecDeque<(PlaceId, Time)>,
    /// Those that the backend refused: to be tried again after a while.
    deferred: Vec<(PlaceId, Time)>,
    renew: bool,
    renewals: VecDeque<u64>,
    reasserts: VecDeque<u64>,
    /// Renewals and reassertions that are on their way.
    renewing: usize,
    /// The server stopped promoting at its bound: it is to be called again.
    more: bool,
    audit: bool,
    auditing: bool,
    /// Places that are gone, each by its old number and its new one: lost by the backend, or revoked?
    revocation_checks: Vec<(u64, u64)>,
    /// That is still to be asked.
    ask_revocations: bool,

    // Time.
    timeout: Option<Time>,
    /// When a place left last.
    left_at: Option<Time>,
    /// When to ask just after the earliest lease end of the semaphore, if anyone waits.
    ask_at: Option<Time>,
    /// In use and waiting in the whole semaphore, when last heard of.
    seen: (u64, u64),
    events: SmallVec<[Event; 2]>,
}

/// Something that a request, or who counts, is to be told of. Places are named by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Its request can go on: see [`Session::progress`].
    Progress(usize),
    /// It passed by policy, because the backend could not be asked.
    Admitted(usize),
    /// It was refused by policy, because the backend could not be asked or refused the call.
    Failed(usize),
    /// It was refused because the process's own share is used up.
    Refused(usize),
    /// A permit in use was lost to its holder.
    Lost(usize),
    /// Its release was answered: see [`Session::released`].
    Released(usize),
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// Its first answer is still to come.
    Joining,
    /// It waits for a permit.
    Waiting,
    /// It has a permit.
    Held,
    /// It is in flight by policy.
    Admitted,
    /// It was refused.
    Refused {
        /// Why.
        reason: RejectReason,
        /// Permits in use.
        in_use: u64,
        /// Places that wait.
        waiting: u64,
        /// The limit that an operator set, if any.
        limit: Option<u32>,
    },
    /// The backend could not be asked.
    Failed,
    /// The semaphore was shut down.
    Closed,
}

impl Session {
    /// A session without places. Its ids are numbered from `serial` on, which must not be less than
    /// the [`serial`](Self::serial) of any session that this process had for this semaphore before.
    #[must_use]
    pub fn new(node: NodeId, serial: u64, connected: Connected, is_outage: bool) -> Self {
        Self {
            node,
            places: Places::starting_at(serial),
            in_flight: 0,
            waiting: 0,
            limit: 0,
            lease: Duration::ZERO,
            longest_lease: Duration::ZERO,
            overrides: Override::default(),
            poll_only: connected.poll_only,
            outage: is_outage,
            quarantine: connected.quarantine,
            local_queue: VecDeque::new(),
            resync: false,
            joins: VecDeque::new(),
            releases: VecDeque::new(),
            releasing: VecDeque::new(),
            deferred: Vec::new(),
            renew: false,
            renewals: VecDeque::new(),
            reasserts: VecDeque::new(),
            renewing: 0,
            more: false,
            audit: false,
            auditing: false,
            revocation_checks: Vec::new(),
            ask_revocations: false,
            timeout: None,
            left_at: None,
            ask_at: None,
            seen: (0, 0),
            events: SmallVec::new(),
        }
    }

    // ===== requests =====

    /// A request comes. Gives the index of its place, until [`handle_leave`](Self::handle_leave);
    /// `None` if the process has [`PLACES_MAX`] places in the semaphore.
    pub fn handle_request(
        &mut self,
        limit: u32,
        options: AcquireOptions,
        now: Time,
    ) -> Option<usize> {
        if self.places.len() >= PLACES_MAX {
            return None;
        }
        self.limit = limit;
        self.lease = options.lease;
        self.longest_lease = self.longest_lease.max(options.lease);
        let poll_only = self.poll_only;
        let index = self.places.insert(|n| Place {
            n,
            poll_only,
            options,
            state: State::Joining { sent: false, hint: None },
            lease_end: 0,
            acked: now,
            held_at: now,
            taken: false,
            queued: false,
            check: false,
            restoring: false,
        });
        let n = self.places.get(index).map_or(0, |place| place.n);
        self.want(now + IDLE);
        if self.overrides.mode == Mode::Draining {
            self.refuse(index, RejectReason::Draining, self.seen);
        } else if self.outage {
            self.join_in_outage(index, now);
        } else {
            self.joins.push_back(n);
        }
        Some(index)
    }

    /// How far the request at `index` has come. If it is not done, a [`Event::Progress`] says when to
    /// look again.
    pub fn progress(&mut self, index: usize, now: Time) -> Progress {
        let Some(place) = self.places.get_mut(index) else { return Progress::Closed };
        match place.state {
            State::Joining { .. } => {
                let local = matches!(place.options.on_unavailable, OnUnavailable::Local(_));
                if place.queued || (self.outage && local) {
                    Progress::Waiting
                } else {
                    Progress::Joining
                }
            }
            State::Waiting { .. } => Progress::Waiting,
            State::Held if now < place.deadline() || place.taken => {
                place.taken = true;
                Progress::Held
            }
            // Granted, but the request comes for it too late: ask first.
            State::Held => {
                self.wait_again(index, now);
                self.progress(index, now)
            }
            State::Admitted { .. } => {
                place.taken = true;
                Progress::Admitted
            }
            State::Refused { reason, in_use, waiting } => {
                let limit = self.overrides.in_place();
                Progress::Refused { reason, in_use, waiting, limit }
            }
            State::Failed => Progress::Failed,
            State::Closed | State::Lost | State::Releasing | State::Released { .. } => {
                Progress::Closed
            }
        }
    }

    /// The request leaves, whatever it had; its permit is released. Its index may be given to another.
    pub fn handle_leave(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.remove(index) else { return };
        self.forget_state(place.state);
        if place.is_there() {
            self.releases.push_back(release_of(self.node, &place, now));
            self.left_at = Some(now);
        } else if matches!(place.state, State::Joining { .. }) {
            self.forget_join(place.n);
        } else if matches!(place.state, State::Releasing | State::Released { .. } | State::Lost) {
            self.left_at = Some(now);
        }
        self.forget_local(place.n);
        if place.is_in_flight() {
            self.admit_local(now);
        }
        self.want(now + IDLE);
        self.want_end(now);
    }

    /// Releases the permit at `index` for a caller that waits for the acknowledgement. `false`: there
    /// is none to wait for.
    pub fn handle_release(&mut self, index: usize, now: Time) -> bool {
        let Some(place) = self.places.get(index).filter(|place| place.is_in_flight()) else {
            return false;
        };
        let is_there = place.is_there();
        if is_there {
            self.releases.push_back(release_of(self.node, place, now));
            self.set(index, State::Releasing);
        } else {
            self.set(index, State::Released { acknowledged: true });
        }
        self.admit_local(now);
        is_there
    }

    /// Whether the release at `index` was acknowledged; `None`: it is not answered yet.
    #[must_use]
    pub fn released(&self, index: usize) -> Option<bool> {
        let Some(place) = self.places.get(index) else { return Some(true) };
        match place.state {
            State::Releasing => None,
            State::Released { acknowledged } => Some(acknowledged),
            _ => Some(true),
        }
    }

    /// The id of the place at `index`. A place gets another one where the old one must not be used
    /// again.
    #[must_use]
    pub fn place(&self, index: usize) -> Option<PlaceId> {
        Some(self.places.get(index)?.id(self.node))
    }

    /// Whether the request has its permit, lost or not.
    #[must_use]
    pub fn is_held(&self, index: usize) -> bool {
        let place = self.places.get(index);
        place.is_some_and(|place| place.is_in_flight() || matches!(place.state, State::Lost))
    }

    /// Whether the permit is lost.
    #[must_use]
    pub fn is_lost(&self, index: usize, now: Time) -> bool {
        self.places.get(index).is_some_and(|place| match place.state {
            State::Lost => true,
            State::Held => now >= place.deadline(),
            _ => false,
        })
    }

    /// As [`is_lost`](Self::is_lost), as far as that was noticed: without a look at the time.
    #[must_use]
    pub fn was_lost(&self, index: usize) -> bool {
        self.places.get(index).is_some_and(|place| matches!(place.state, State::Lost))
    }

    /// The request has waited as long as it may: for its first answer, or for a permit. It has its
    /// final answer after this (rule 7).
    pub fn handle_wait_timeout(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        let local = matches!(place.options.on_unavailable, OnUnavailable::Local(_));
        match place.state {
            State::Joining { .. } | State::Waiting { .. } if self.outage && local => {
                let waiting = self.local_queue.len() as u64;
                self.refuse_by_policy(index, RejectReason::QueueTimeout, waiting, now);
            }
            State::Waiting { .. } if !self.outage => {
                self.leave_server(index, now);
                self.refuse(index, RejectReason::QueueTimeout, self.seen);
            }
            State::Joining { .. } if !self.outage && place.queued => {
                self.leave_server(index, now);
                self.refuse(index, RejectReason::QueueTimeout, self.seen);
            }
            State::Joining { .. } | State::Waiting { .. } => self.fall_back(index, now),
            _ => {}
        }
    }

    /// Releases every place: permits are lost to their holders, requests are told that it is over.
    pub fn handle_close(&mut self, now: Time) {
        self.local_queue.clear();
        for index in self.indexes() {
            let Some(place) = self.places.get(index) else { continue };
            if place.is_in_flight() && place.taken {
                self.lose(index, now);
            } else if place.is_live() || place.is_joining() {
                self.leave_server(index, now);
                self.set(index, State::Closed);
                self.events.push(Event::Progress(index));
            }
        }
    }

    // ===== time =====

    /// When [`handle_timeout`](Self::handle_timeout) is to be called; `None`: nothing is left to be
    /// looked after.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Time> {
        self.timeout
    }

    /// Time has passed: a permit that reached its deadline is lost, what is due is renewed, what is
    /// over is forgotten.
    pub fn handle_timeout(&mut self, now: Time) {
        self.timeout = None;
        self.releases.extend(self.deferred.drain(..));
        let lease = self.lease;
        self.releases.retain(|(_, until)| now < *until + lease);
        let mut expired: SmallVec<[usize; 4]> = SmallVec::new();
        let mut next: Option<Time> = None;
        let mut want = |at: Time| next = Some(next.map_or(at, |next| next.min(at)));
        let mut renew = false;
        for (index, place) in self.places.iter() {
            let due = place.acked + place.interval();
            match place.state {
                State::Held if now >= place.deadline() => {
                    expired.push(index);
                    continue;
                }
                State::Held => want(place.deadline()),
                State::Waiting { .. } => {}
                // Tried again and again, until it is counted.
                State::Admitted { .. } => {
                    if now >= place.acked + WAITING_RENEWAL {
                        renew = true;
                        want(now + WAITING_RENEWAL);
                    } else {
                        want(place.acked + WAITING_RENEWAL);
                    }
                    continue;
                }
                _ => {
                    want(now + IDLE);
                    continue;
                }
            }
            if now >= due || place.check {
                renew = true;
                want(now + place.interval());
            } else {
                want(due);
            }
        }
        // Sent once the renewals that are on their way are answered.
        self.renew |= renew;
        if let Some((_, until)) = self.releases.front() {
            want(*until + lease);
        }
        let idle_until = self.idle_until(now);
        if now < idle_until {
            want(idle_until);
        } else {
            self.left_at = None;
        }
        match self.quarantined_until() {
            Some(end) if now < end => want(end),
            // No script runs by itself: the renewals of the waiters start the grants.
            Some(_) => {
                self.quarantine.lost_at = None;
                self.renew |= self.waiting > 0;
            }
            None => {}
        }
        match self.ask_at {
            Some(at) if self.waiting > 0 && now < at => want(at),
            Some(_) => {
                self.renew |= self.waiting > 0;
                self.ask_at = None;
            }
            None => {}
        }
        for index in expired {
            self.expire(index, now);
        }
        if let Some(next) = next {
            self.want(next);
        } else if !self.is_idle() {
            self.want(now + IDLE);
        }
    }

    /// Whether nothing is here, nor on its way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.places.is_empty() && !self.is_busy()
    }

    /// Whether the session can be dropped: it is idle, and a failover that has not heard of its last
    /// releases would not find it any more (rule 6).
    #[must_use]
    pub fn is_over(&self, now: Time) -> bool {
        let is_due = self.timeout.is_none_or(|timeout| timeout <= now);
        is_due && self.is_idle() && now >= self.idle_until(now)
    }

    /// Whether the backend may have a place of this session, or something is to be sent.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.releases.is_empty()
            || !self.releasing.is_empty()
            || !self.deferred.is_empty()
            || self.renewing > 0
            || self.audit
            || self.auditing
            || self.places.iter().any(|(_, place)| {
                place.is_live() || matches!(place.state, State::Joining { .. } | State::Releasing)
            })
    }

    /// The indexes of all places are below this.
    #[must_use]
    pub const fn index_bound(&self) -> usize {
        self.places.bound()
    }

    /// The number of the next place: see [`new`](Self::new).
    #[must_use]
    pub const fn serial(&self) -> u64 {
        self.places.serial()
    }

    // ===== what comes out =====

    /// All events, the oldest first.
    pub fn take_events(&mut self) -> SmallVec<[Event; 2]> {
        std::mem::take(&mut self.events)
    }

    /// For explorers that look at whole multiples of `grain` only: rounds what is to be done in between
    /// up, puts off what is to be done after `horizon` to that, and forgets what decides nothing, so
    /// that sessions with the same future are equal.
    #[doc(hidden)]
    pub fn coarsen(&mut self, grain: Duration, horizon: Time) {
        let round = |at: Time| {
            let grains = at.elapsed_since_epoch().as_nanos().div_ceil(grain.as_nanos());
            let at = Time::ZERO + grain * u32::try_from(grains).unwrap_or(u32::MAX);
            at.min(horizon)
        };
        self.timeout = self.timeout.map(round);
        self.ask_at = self.ask_at.map(round);
        if self.left_at.is_some_and(|left_at| left_at + IDLE >= horizon) {
            self.left_at = Some(Time::ZERO + horizon.since(Time::ZERO + IDLE));
        }
        self.seen = (0, 0);
        let is_renewing = self.renewing > 0;
        for place in self.places.iter_mut() {
            if place.is_joining() {
                (place.acked, place.held_at) = (Time::ZERO, Time::ZERO);
            } else if !is_renewing {
                place.held_at = Time::ZERO;
            }
        }
    }

    // ===== what the other files share =====

    fn indexes(&self) -> Vec<usize> {
        self.places.iter().map(|(index, _)| index).collect()
    }

    /// Changes the state of a place, and what is counted of it.
    fn set(&mut self, index: usize, state: State) {
        let Some(place) = self.places.get_mut(index) else { return };
        let before = std::mem::replace(&mut place.state, state);
        if matches!(state, State::Waiting { .. }) {
            place.queued = true;
        }
        self.forget_state(before);
        match state {
            State::Held | State::Admitted { .. } => self.in_flight += 1,
            State::Waiting { .. } => self.waiting += 1,
            _ => {}
        }
    }

    const fn forget_state(&mut self, state: State) {
        match state {
            State::Held | State::Admitted { .. } => self.in_flight -= 1,
            State::Waiting { .. } => self.waiting -= 1,
            _ => {}
        }
    }

    /// The place is not wanted on the server any more. The state that it gets now must say so too.
    fn leave_server(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        let n = place.n;
        if place.is_there() {
            self.releases.push_back(release_of(self.node, place, now));
            self.left_at = Some(now);
        } else if place.is_joining() {
            self.forget_join(n);
        }
        self.forget_local(n);
    }

    /// Takes a place that was never sent out of what is to be sent.
    fn forget_join(&mut self, n: u64) {
        if self.joins.back() == Some(&n) {
            self.joins.pop_back();
        } else if self.joins.front() == Some(&n) {
            self.joins.pop_front();
        } else {
            // Passed over when its turn comes; but never more of them than of others.
            let places = &mut self.places;
            if self.joins.len() > 2 * places.len() + 16 {
                self.joins.retain(|n| places.find(*n).is_some_and(|place| place.is_joining()));
            }
        }
    }

    fn refuse(&mut self, index: usize, reason: RejectReason, (in_use, waiting): (u64, u64)) {
        self.set(index, State::Refused { reason, in_use, waiting });
        self.events.push(Event::Progress(index));
    }

    /// The permit comes too late for a request that has not taken it yet: the request waits again, and
    /// asks first. One that may not wait has had no answer in time.
    fn wait_again(&mut self, index: usize, now: Time) {
        self.set(index, State::Waiting { ticket: None });
        self.places.get_mut(index).into_iter().for_each(|place| place.restoring = false);
        if self.places.get(index).is_some_and(|place| place.options.max_queue.is_none()) {
            self.fall_back(index, now);
        } else {
            self.renew = true;
        }
    }

    /// A held place reached its deadline.
    fn expire(&mut self, index: usize, now: Time) {
        if self.places.get(index).is_some_and(|place| place.taken) {
            self.lose(index, now);
        } else {
            self.wait_again(index, now);
            self.events.push(Event::Progress(index));
            self.want(now + WAITING_RENEWAL);
        }
    }

    fn lose(&mut self, index: usize, now: Time) {
        self.leave_server(index, now);
        self.set(index, State::Lost);
        self.events.push(Event::Lost(index));
        self.admit_local(now);
    }

    /// If nothing is left, the session ends at its time, and not when something was due.
    fn want_end(&mut self, now: Time) {
        if self.is_idle() {
            self.want(self.idle_until(now));
        }
    }

    /// Until when the session is kept though it is unused; in an outage for as long as what was
    /// released just before it can be of any harm.
    fn idle_until(&self, now: Time) -> Time {
        let kept = if self.outage { self.longest_lease.max(IDLE) } else { IDLE };
        self.left_at.map_or(now, |left_at| left_at + kept)
    }

    fn want(&mut self, at: Time) {
        if self.timeout.is_none_or(|timeout| at < timeout) {
            self.timeout = Some(at);
        }
    }
}

/// What releases a place, and from when on that is not needed any more.
fn release_of(node: NodeId, place: &Place, now: Time) -> (PlaceId, Time) {
    (place.id(node), now + place.options.lease)
}
