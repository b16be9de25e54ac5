//! One process: the shipped [`Session`], and what the shell in `src/node/` keeps beside it.

use std::collections::VecDeque;
use std::time::Duration;

use tower_semaphore_protocol::session::{AcquireOptions, Connected, PLACES_MAX, Quarantine};
use tower_semaphore_protocol::{Call, LineId, Op, PlaceId, Reply, Session, Time};

use super::server::{Id, TICK_MS, id_of};
use super::{Bug, Config};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pub(crate) me: u8,
    pub(crate) session: Option<Session>,
    /// The first number for the places of the next session.
    serial: u64,
    /// The present requests, and how many there have been.
    pub(crate) slots: Vec<Slot>,
    pub(crate) requests: u8,

    // Its connection.
    pub(crate) link: Link,
    connections: u8,
    /// The data that it met last, and when it lost some before.
    pub(crate) met: Option<u8>,
    pub(crate) lost_at: Option<u8>,
    /// The server that counts the semaphore, as far as the process knows.
    pub(crate) home: u8,
    /// How often that changed.
    pub(crate) stay: u8,
    /// The unanswered calls, in the order in which they were sent.
    pub(crate) calls: VecDeque<Transit>,

    // What an onlooker knows of the permits that the process passes on.
    pub(crate) others: Others,
    pub(crate) kept: Vec<Kept>,

    // The overrides and revocations, as far as the process knows.
    pub(crate) set: u8,
    pub(crate) told: u8,
    /// The session waits until revocations are known.
    pub(crate) checking: Option<u64>,

    pub(crate) frozen: bool,
    pub(crate) dead: bool,
    pub(crate) closed: bool,
    pub(crate) altered: Altered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Link {
    Connecting,
    Up,
    Down,
}

/// Whether a process may pass permits on, as an onlooker knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Others {
    Unknown,
    /// It received a recall, and no call that it sent later has found that no other process waits.
    Recalled,
    /// When a call was sent that found no other process waiting, and no more permits in use than the limit.
    Alone(u8),
}

/// A permit without a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kept {
    pub(crate) place: PlaceId,
    pub(crate) acked: u8,
    /// The terms of the request that had it.
    pub(crate) options: AcquireOptions,
    pub(crate) since: u8,
}

/// A request as its caller sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot {
    pub(crate) request: u8,
    pub(crate) index: usize,
    pub(crate) began: u8,
    pub(crate) options: AcquireOptions,
    pub(crate) phase: Phase,
    /// Its timer.
    pub(crate) until: Option<u8>,
    /// There is news for its task, which sleeps if it naps.
    pub(crate) woken: bool,
    pub(crate) napping: bool,
    /// It was admitted by policy; and was counted later.
    pub(crate) by_policy: bool,
    pub(crate) counted: bool,
    /// When the call was sent whose answer determines its deadline.
    pub(crate) acked: u8,
    /// The process knows its ticket.
    pub(crate) has_ticket: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Asking,
    Working,
    /// It waits for the acknowledgement of its release.
    Releasing,
}

/// An unanswered call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Transit {
    pub(crate) call: Call,
    /// The call that the session made, if a [`Bug`] changed it.
    pub(crate) meant: Option<Op>,
    pub(crate) sent: u8,
    pub(crate) stay: u8,
    /// The server does not carry it out in its turn, but later.
    pub(crate) late: bool,
    /// The number of places of other processes that it found waiting; and whether it was sent before a recall arrived.
    pub(crate) others: Option<usize>,
    pub(crate) is_stale: bool,
    /// Hints that the server sent before the answer, so that they arrive first.
    pub(crate) hints: Vec<Id>,
    pub(crate) answer: Option<Answer>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    Reply(Reply),
    Failed,
    Moved,
}

/// What a [`Bug`] has to remember.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Altered {
    /// Numbers in the session, and those that are sent instead.
    aliases: Vec<(u64, u64)>,
    /// Places that an acquire named, by index.
    asked: Vec<u64>,
    /// Hints for places whose acquire is unanswered.
    pub(crate) hints: Vec<tower_semaphore_protocol::Hint>,
}

pub(crate) fn time(tick: u8) -> Time {
    Time::since_epoch(Duration::from_millis(u64::from(tick) * TICK_MS))
}

pub(crate) const fn ticks(ticks: u8) -> Duration {
    Duration::from_millis(ticks as u64 * TICK_MS)
}

fn ticks_of(duration: Duration) -> u8 {
    u8::try_from(duration.as_secs()).expect("a short time")
}

pub(crate) fn reuse_ticks(options: &AcquireOptions) -> u8 {
    ticks_of(Duration::from_millis(u64::from(options.reuse_ms)))
}

impl Slot {
    pub(crate) fn lease(&self) -> u8 {
        ticks_of(self.options.lease)
    }

    pub(crate) fn is_asking(&self) -> bool {
        self.phase == Phase::Asking
    }

    /// Returns the permits that it asks for.
    pub(crate) fn cost(&self) -> usize {
        self.options.claim.map_or(1, |claim| claim.cost() as usize)
    }

    /// Returns the line in which it stands, if it stands in one.
    pub(crate) fn line(&self) -> Option<LineId> {
        self.options.claim?.line()
    }
}

impl Process {
    pub(crate) fn new(me: u8) -> Self {
        Self {
            me,
            session: None,
            serial: 1,
            slots: Vec::new(),
            requests: 0,
            link: Link::Up,
            connections: 0,
            met: None,
            lost_at: None,
            home: 0,
            stay: 0,
            calls: VecDeque::new(),
            others: Others::Unknown,
            kept: Vec::new(),
            set: 0,
            told: 0,
            checking: None,
            frozen: false,
            dead: false,
            closed: false,
            altered: Altered::default(),
        }
    }

    /// Ends the process. What it has sent may still be read.
    pub(crate) fn crashed(&self) -> Self {
        let new = Self::new(self.me);
        Self { dead: true, link: Link::Connecting, requests: self.requests, met: self.met, ..new }
    }

    pub(crate) const fn is_awake(&self) -> bool {
        !self.dead && !self.frozen
    }

    pub(crate) fn is_up(&self) -> bool {
        self.link == Link::Up
    }

    /// Returns the id of this place on the server; `None` if it is not there.
    pub(crate) fn id(&self, index: usize) -> Option<Id> {
        let place = self.session.as_ref()?.place(index)?;
        Some(id_of(PlaceId { n: self.altered.out(place.n), ..place }))
    }

    /// Returns the request of a place of this process.
    pub(crate) fn slot_of(&self, id: Id) -> Option<&Slot> {
        self.slots.iter().find(|slot| self.id(slot.index) == Some(id))
    }

    pub(crate) fn knows(&self, id: Id) -> bool {
        !self.dead && self.slot_of(id).is_some_and(|slot| slot.phase != Phase::Releasing)
    }

    /// Returns its requests without a permit.
    pub(crate) fn without_permit(&self) -> Vec<Slot> {
        let Some(session) = &self.session else { return Vec::new() };
        let is_without = |slot: &&Slot| slot.is_asking() && !session.is_held(slot.index);
        self.slots.iter().filter(is_without).cloned().collect()
    }

    /// Returns whether it keeps this permit for a later request.
    pub(crate) fn keeps(&self, id: Id) -> bool {
        self.kept.iter().any(|kept| id_of(kept.place) == id)
    }

    /// Returns whether this process could use a place with this id.
    pub(crate) fn wants(&self, id: Id) -> bool {
        let session = self.session.as_ref();
        self.slot_of(id).is_some_and(|slot| {
            slot.phase != Phase::Releasing && !session.is_some_and(|s| s.is_known_lost(slot.index))
        })
    }

    /// Returns whether the caller goes on working: it has the permit, and checks the clock before it does anything.
    pub(crate) fn works(&self, slot: &Slot, now: u8, bug: Option<Bug>) -> bool {
        let Some(session) = &self.session else { return false };
        let fenced = bug != Some(Bug::NoSelfFence);
        slot.phase == Phase::Working
            && !if fenced {
                session.is_lost(slot.index, time(now))
            } else {
                session.is_known_lost(slot.index)
            }
    }

    /// Returns whether the session has something to send.
    pub(crate) fn has_mail(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.urgency().is_some())
    }

    /// Returns whether the watchdog is due.
    pub(crate) fn is_due(&self, now: u8) -> bool {
        let timeout = self.session.as_ref().and_then(Session::poll_timeout);
        timeout.is_some_and(|timeout| timeout <= time(now))
    }

    pub(crate) fn is_poll_only(&self, config: &Config) -> bool {
        config.poll_only[usize::from(self.me)]
            || (config.loses_subscription && self.connections > 0)
    }

    /// Returns what a session needs to know of the server.
    pub(crate) fn conditions(&self, config: &Config, same_data: bool) -> Connected {
        let is_on = config.quarantine && config.bug != Some(Bug::NoQuarantine);
        let lost_at = self.lost_at.filter(|_| is_on).map(time);
        let quarantine = Quarantine { is_on, lost_at, ..Quarantine::default() };
        if self.is_up() {
            Connected { poll_only: self.is_poll_only(config), same_data, quarantine }
        } else {
            Connected { quarantine, ..Connected::default() }
        }
    }

    pub(crate) fn connected(&mut self) {
        self.link = Link::Up;
        self.connections = 1;
    }

    /// Creates the session if there is none.
    pub(crate) fn begin_session(&mut self, config: &Config) {
        if self.session.is_none() {
            let connected = self.conditions(config, false);
            let node = super::server::NODES[usize::from(self.me)];
            let mut session = Session::new(node, self.serial, connected, self.link == Link::Down);
            session.handle_override(config.set(self.set), Time::ZERO);
            self.session = Some(session);
        }
    }

    /// Drops a session that is unused. Returns whether it did.
    pub(crate) fn retire(&mut self, now: u8) -> bool {
        let Some(session) = &self.session else { return false };
        let is_over = session.is_over(time(now));
        if is_over {
            self.serial = self.serial.max(session.serial());
            self.session = None;
        }
        is_over
    }
}

// ===== rules undone at the seam =====

impl Altered {
    fn out(&self, n: u64) -> u64 {
        self.aliases.iter().find(|(inner, _)| *inner == n).map_or(n, |(_, outer)| *outer)
    }

    fn inward(&self, n: u64) -> u64 {
        self.aliases.iter().find(|(_, outer)| *outer == n).map_or(n, |(inner, _)| *inner)
    }

    fn alias(&mut self, inner: u64, outer: u64) {
        self.aliases.retain(|(known, _)| *known != inner);
        self.aliases.push((inner, outer));
    }
}

impl Process {
    /// Returns what is sent for a call of the session.
    pub(crate) fn outgoing(&mut self, mut call: Call, bug: Option<Bug>) -> (Call, Option<Op>) {
        let Some(bug) = bug else { return (call, None) };
        let meant = call.op.clone();
        match (&mut call.op, bug) {
            // The acquire is repeated, under another number each time.
            (Op::Acquire { ids, .. }, Bug::RepeatsUnderNewId) => {
                for id in ids {
                    if self.altered.asked.contains(&id.n) {
                        self.altered.alias(id.n, id.n + 100 * PLACES_MAX as u64);
                    }
                    self.altered.asked.push(id.n);
                }
            }
            (Op::Acquire { leaving, ids, .. }, Bug::AcquireNotRepeated) => {
                if ids.iter().any(|id| self.altered.asked.contains(&id.n)) {
                    // Whatever the answer to that is, it is not the answer to them.
                    call.op = Op::Release { ids: std::mem::take(leaving).into() };
                } else {
                    self.altered.asked.extend(ids.iter().map(|id| id.n));
                }
            }
            (Op::Acquire { ids, .. }, Bug::RejoinWithSameId) => {
                self.altered.asked.extend(ids.iter().map(|id| id.n));
            }
            (Op::Reassert { proofs, .. }, Bug::RejoinWithSameId) => {
                for (id, proof) in proofs {
                    let place = |n: u64| n % PLACES_MAX as u64;
                    let first = self.altered.asked.iter().rev().find(|n| place(**n) == place(id.n));
                    if *proof >= tower_semaphore_protocol::TICKET_MIN
                        && let Some(first) = first.copied()
                    {
                        self.altered.alias(id.n, first);
                    }
                }
            }
            (Op::Reassert { lease_ms, proofs }, Bug::RejoinWithNewTicket) => {
                let ticket_min = tower_semaphore_protocol::TICKET_MIN;
                if proofs.iter().all(|(_, proof)| *proof >= ticket_min) {
                    let ids = proofs.iter().map(|(id, _)| *id).collect();
                    let leaving = [].into_iter().collect();
                    call.op = Op::Acquire { leaving, lease_ms: *lease_ms, max_queue: Some(8), ids };
                }
            }
            (Op::Renew { lease_ms, ids }, Bug::ProofInEveryRenewal) => {
                let now = lease_ms;
                let proofs = ids.iter().map(|id| (*id, super::server::server_ms(200, 0))).collect();
                if ids.iter().all(|id| {
                    self.slot_of(id_of(*id)).is_some_and(|slot| slot.phase == Phase::Working)
                }) {
                    call.op = Op::Reassert { lease_ms: *now, proofs };
                }
            }
            (Op::Renew { ids, .. }, Bug::WaitersNotRenewed) => {
                let asking = |id: &PlaceId| self.slot_of(id_of(*id)).is_some_and(Slot::is_asking);
                let kept = ids.iter().filter(|id| !asking(id)).copied().collect();
                *ids = kept;
            }
            (Op::Reassert { proofs, .. }, Bug::NoReassert) => proofs.clear(),
            (Op::Reassert { proofs, .. }, Bug::ProofWithoutClaim) => {
                proofs.iter_mut().for_each(|(id, _)| id.claim = None);
            }
            _ => {}
        }
        let altered = &self.altered;
        match &mut call.op {
            Op::Acquire { leaving, ids, .. } => {
                leaving.iter_mut().chain(ids).for_each(|id| id.n = altered.out(id.n));
            }
            Op::Release { ids } | Op::Renew { ids, .. } => {
                ids.iter_mut().for_each(|id| id.n = altered.out(id.n));
            }
            Op::Reassert { proofs, .. } => {
                proofs.iter_mut().for_each(|(id, _)| id.n = altered.out(id.n));
            }
            Op::Audit { .. } => {}
        }
        let meant = (call.op != meant).then_some(meant);
        (call, meant)
    }

    /// Returns what the session receives for the answer to a call.
    pub(crate) fn incoming(&self, op: &mut Op, reply: &mut Reply, sent: u8, bug: Option<Bug>) {
        use tower_semaphore_protocol::PlaceStatus;
        let Some(bug) = bug else { return };
        if bug == Bug::WaitersTakenForOwn && !matches!(op, Op::Release { .. }) {
            reply.usage.iter_mut().for_each(|usage| usage.waiting = 0);
        }
        for grant in &mut reply.granted {
            grant.id.n = self.altered.inward(grant.id.n);
        }
        let knows = |id: PlaceId| {
            let session = self.session.as_ref();
            self.slots.iter().any(|slot| session.is_some_and(|s| s.place(slot.index) == Some(id)))
        };
        let phase = |id: &PlaceId| {
            let session = self.session.as_ref();
            let mut slots = self.slots.iter();
            slots
                .find(|slot| session.is_some_and(|s| s.place(slot.index) == Some(*id)))
                .map(|slot| (slot.phase, slot.acked))
        };
        match bug {
            Bug::StrangerNotReleased => reply.granted.retain(|grant| knows(grant.id)),
            Bug::HintWithoutLeaseEnd => {
                reply.granted.iter_mut().for_each(|grant| grant.lease_end = u64::MAX);
            }
            Bug::StrangersNotAudited => reply.found.clear(),
            _ => {}
        }
        match (op, bug) {
            (Op::Renew { ids, .. }, Bug::RenewalDoesNotTellGrant)
                if ids.iter().all(|id| phase(id).is_some_and(|(p, _)| p == Phase::Asking)) =>
            {
                reply.statuses.retain(|status| *status != PlaceStatus::Held);
            }
            (op @ Op::Renew { .. }, Bug::GoneDropsGrantedSince) => {
                let Op::Renew { lease_ms, ids } = &*op else { return };
                let holds = |(id, status): (&PlaceId, &PlaceStatus)| {
                    let phase = phase(id);
                    *status == PlaceStatus::Gone
                        && phase.is_some_and(|(p, acked)| p == Phase::Working && acked <= sent)
                };
                if ids.iter().zip(&reply.statuses).all(holds) {
                    // As if the proof had been shown.
                    let proofs = ids.iter().map(|id| (*id, 0)).collect();
                    *op = Op::Reassert { lease_ms: *lease_ms, proofs };
                }
            }
            (Op::Reassert { proofs, .. }, Bug::NoReassert) => {
                reply.statuses = proofs.iter().map(|_| PlaceStatus::Gone).collect();
            }
            _ => {}
        }
    }

    /// Returns the number by which the session knows a place that a hint names.
    pub(crate) fn hinted(&self, n: u64) -> u64 {
        self.altered.inward(n)
    }
}
