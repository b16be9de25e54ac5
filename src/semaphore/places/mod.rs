//! What this process waits for and holds in one semaphore, with local deadlines.
//!
//! A pure state machine like the [`ledger`], and the other half of the protocol: the rules by which
//! a process believes what it is told. Requests join and leave, answers and hints come in, time
//! passes; calls go out. Nothing here waits, locks or looks at a clock.
//!
//! The rules, each of which a model checker showed to be needed:
//!
//! 1. The deadline of a place counts from when the last acknowledged acquire or renewal was *sent*.
//!    What arrives after it is not believed: ask first. A held place that reaches it is lost for
//!    good.
//! 2. A hint with a lease end lower than the last acknowledged one is from an earlier stay. One that
//!    comes before its acquire's own answer is kept until then.
//! 3. "Waits" in answer to a holder's renewal neither demotes it nor extends its deadline. "Gone" in
//!    answer to a renewal that was sent while still waiting takes nothing from a place granted since.
//! 4. An acquire that went unanswered is repeated with the same id; a release too. A promotion for
//!    an id that is not known here is answered by a release.
//! 5. After a reconnect: releases, then renewals of everything, then new acquires.
//! 6. After a reconnect the data may be older than what was acknowledged (a failover): what stands
//!    there of this process, and is gone here, is released once more.
//!
//! [`ledger`]: crate::ledger

mod answers;
mod away;
mod calls;
mod operated;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::health::Counts;
use super::policy::OnUnavailable;
use crate::backend::{Mode, Override};
use crate::error::{BackendError, FullReason};
use crate::ledger::{NodeId, PlaceId, TICKET_MIN};

/// Places of one process in one semaphore, at the most.
const SLOTS_MAX: usize = 1 << 20;
const SLOT_BITS: u32 = SLOTS_MAX.trailing_zeros();
/// Places in one call, at the most.
const BATCH_MAX: usize = 512;
/// How often a waiting place is renewed: a lost hint costs no more.
const WAITING_RENEWAL: Duration = Duration::from_secs(1);
/// The same for a place that no hint can reach.
const DEAF_RENEWAL: Duration = Duration::from_millis(100);
/// How far behind the earliest lease end the next renewal comes.
const AFTER_LEASE_END: Duration = Duration::from_millis(2);
/// Lease ends are whole ms, rounded down: so much earlier than the lease a place may end.
const LEASE_GRAIN: Duration = Duration::from_millis(1);
/// The proof of a place that no backend ever knew: it is in flight, so it is to be counted.
const NEVER_ENDS: u64 = TICKET_MIN - 1;
/// Of the places that stand in a semaphore after a reconnect, those looked at: the earliest lease ends
/// first, which are the ones that nobody renews.
const RECOUNT_MAX: u32 = 1000;
/// How long the record of an unused semaphore is kept.
const IDLE: Duration = Duration::from_secs(5);

/// This process's places in one semaphore.
#[derive(Debug)]
pub(in crate::semaphore) struct Places {
    key: Arc<str>,
    node: NodeId,
    /// Counts all places of this process.
    serial: Arc<AtomicU64>,
    deaf: bool,
    /// Why the backend cannot be asked, while it cannot.
    away: Option<BackendError>,
    counts: Arc<Counts>,
    quarantine: Quarantine,
    /// What an operator set in place of the policy.
    over: Override,
    limit: u32,
    /// The lease of whoever came last.
    lease: Duration,
    slots: Slab<Slot>,

    // What is to be sent.
    joins: VecDeque<u64>,
    /// Each with the time from which it is gone by itself.
    releases: VecDeque<(PlaceId, Instant)>,
    /// Those that were sent and not answered yet, in the order in which they were sent.
    releasing: VecDeque<(PlaceId, Instant)>,
    /// Those that the backend refused: to be tried again after a while.
    deferred: Vec<(PlaceId, Instant)>,
    reasserts: Vec<u64>,
    /// Places that are gone, each by its old number and its new one: lost by the backend, or revoked?
    doubted: Vec<(u64, u64)>,
    /// That is still to be asked.
    doubt: bool,
    renew: bool,
    /// Renewals and reassertions that are on their way.
    renewing: usize,
    /// After a reconnect: joins wait until it is known what became of the places of before.
    resync: bool,
    /// When a place was left last.
    left_at: Option<Instant>,
    /// After a reconnect: what stands there of this process is still to be asked for.
    recount: bool,

    /// When to look again, and whether that came to be earlier than the watchdog knows.
    wake_at: Option<Instant>,
    rescheduled: bool,
    /// When the earliest lease of all places of the semaphore ends, if anyone waits.
    ask_at: Option<Instant>,
    /// In use and waiting in the whole semaphore, when last heard of.
    seen: (u64, u64),
    /// Whom this concerns: to be woken once the lock around all this is given up.
    woken: Woken,
}

/// Whom to wake; seldom more than one.
pub(in crate::semaphore) type Woken = SmallVec<[Waker; 2]>;

#[derive(Debug)]
struct Slot {
    /// The place's number on the wire. Its low bits are the slot, the others count all places of
    /// the process, so that no number is used twice.
    n: u64,
    deaf: bool,
    terms: Terms,
    state: State,
    /// The lease end that the backend acknowledged last, by its clock, in ms.
    lease_end: u64,
    /// When the call that this answered was sent.
    acked: Instant,
    held_at: Instant,
    /// Ask about it with the next renewal, due or not.
    doubt: bool,
    /// Handles on it: the request, then the clones of its permit.
    handles: usize,
    waker: Option<Waker>,
    lost_wakers: LostWakers,
}

/// Of one request: the task that answers it, and then the response's body.
type LostWakers = SmallVec<[Waker; 2]>;

/// Who was to be woken for a place that is gone. Dropped where no lock is held: with a waker can go
/// a task, and with that another permit.
#[derive(Debug)]
pub(in crate::semaphore) struct Wakers {
    _waker: Option<Waker>,
    _lost: LostWakers,
}

/// After data was lost nothing is granted for one lease, where that is asked for: all calls of
/// this process say that there are no permits, so newcomers queue and nobody is promoted.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::semaphore) struct Quarantine {
    pub(in crate::semaphore) is_on: bool,
    pub(in crate::semaphore) lost_at: Option<Instant>,
}

/// How things stand between this process and the backend.
#[derive(Clone, Debug, Default)]
pub(in crate::semaphore) struct Conditions {
    /// Hints do not arrive.
    pub(in crate::semaphore) deaf: bool,
    /// Why the backend cannot be asked, while it cannot.
    pub(in crate::semaphore) away: Option<BackendError>,
    pub(in crate::semaphore) quarantine: Quarantine,
}

/// What a place asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::semaphore) struct Terms {
    pub(in crate::semaphore) lease: Duration,
    /// How many may wait; `None`: this one may not.
    pub(in crate::semaphore) max_queue: Option<u32>,
    pub(in crate::semaphore) on_unavailable: OnUnavailable,
}

#[derive(Debug)]
enum State {
    /// Its acquire was not answered yet. `sent`: it may have been carried out.
    Joining {
        sent: bool,
        hint: Option<u64>,
    },
    /// The ticket is unknown after an answer that came too late to be believed.
    Waiting {
        ticket: Option<u64>,
    },
    Held,
    /// In flight by policy, because the backend was away: to be counted when it is back.
    /// `announced`: the backend may know it.
    Admitted {
        announced: bool,
    },
    Refused(FullReason, u64, u64),
    Failed(BackendError),
    Closed,
    Lost,
    /// Given back, by someone who waits for the acknowledgement.
    Releasing,
    Released(Result<(), BackendError>),
}

/// How far a place has come.
#[derive(Debug)]
pub(in crate::semaphore) enum Progress {
    Joining,
    Waiting,
    Held,
    /// In flight by policy.
    Admitted,
    /// `limit`: that which an operator set.
    Refused {
        reason: FullReason,
        in_use: u64,
        waiting: u64,
        limit: Option<u32>,
    },
    Failed(BackendError),
    Closed,
}

impl Slot {
    fn deadline(&self) -> Instant {
        self.acked + self.terms.lease - LEASE_GRAIN
    }

    fn interval(&self) -> Duration {
        let third = self.terms.lease / 3;
        match self.state {
            State::Waiting { .. } if self.deaf => third.min(DEAF_RENEWAL),
            State::Waiting { .. } => third.min(WAITING_RENEWAL),
            _ => third,
        }
    }

    fn lease_ms(&self) -> u64 {
        u64::try_from(self.terms.lease.as_millis()).unwrap_or(u64::MAX)
    }

    fn is_live(&self) -> bool {
        matches!(self.state, State::Waiting { .. } | State::Held | State::Admitted { .. })
    }

    fn is_joining(&self) -> bool {
        matches!(self.state, State::Joining { .. })
    }

    /// Whether the backend may know it.
    fn is_there(&self) -> bool {
        match self.state {
            // One that was never sent stands in `joins` still, and is passed over there.
            State::Joining { sent, .. } => sent,
            State::Admitted { announced } => announced,
            State::Waiting { .. } | State::Held => true,
            _ => false,
        }
    }

    fn is_in_flight(&self) -> bool {
        matches!(self.state, State::Held | State::Admitted { .. })
    }
}

impl Places {
    pub(in crate::semaphore) fn new(
        key: Arc<str>,
        node: NodeId,
        serial: Arc<AtomicU64>,
        counts: Arc<Counts>,
        link: Conditions,
    ) -> Self {
        let Conditions { deaf, away, quarantine } = link;
        Self {
            key,
            node,
            serial,
            deaf,
            away,
            counts,
            quarantine,
            over: Override::default(),
            limit: 0,
            lease: Duration::ZERO,
            slots: Slab::new(),
            joins: VecDeque::new(),
            releases: VecDeque::new(),
            releasing: VecDeque::new(),
            deferred: Vec::new(),
            reasserts: Vec::new(),
            doubted: Vec::new(),
            doubt: false,
            renew: false,
            renewing: 0,
            resync: false,
            left_at: None,
            recount: false,
            wake_at: None,
            rescheduled: false,
            ask_at: None,
            seen: (0, 0),
            woken: Woken::new(),
        }
    }

    // ===== requests =====

    /// A request comes.
    pub(in crate::semaphore) fn join(
        &mut self,
        limit: u32,
        terms: Terms,
        now: Instant,
    ) -> Result<usize, BackendError> {
        if self.slots.len() >= SLOTS_MAX {
            return Err(BackendError::call(format!(
                "this process has {SLOTS_MAX} places in one semaphore, as many as it may"
            )));
        }
        self.limit = limit;
        self.lease = terms.lease;
        let entry = self.slots.vacant_entry();
        let index = entry.key();
        let n = number(&self.serial, index);
        entry.insert(Slot {
            n,
            deaf: self.deaf,
            terms,
            state: State::Joining { sent: false, hint: None },
            lease_end: 0,
            acked: now,
            held_at: now,
            doubt: false,
            handles: 1,
            waker: None,
            lost_wakers: LostWakers::new(),
        });
        if self.wake_at.is_none() {
            self.want(now + IDLE);
        }
        if self.over.mode == Mode::Draining {
            self.turn_newcomer_away(index);
            return Ok(index);
        }
        self.joins.push_back(n);
        if let Some(error) = self.away.clone() {
            self.turned_away(index, &error, now);
        }
        Ok(index)
    }

    /// How far the request has come. Whoever is not done is woken by `cx` when that changes.
    pub(in crate::semaphore) fn progress(
        &mut self,
        index: usize,
        now: Instant,
        cx: &Context<'_>,
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(index) else { return Progress::Closed };
        let local =
            self.away.is_some() && matches!(slot.terms.on_unavailable, OnUnavailable::Local(_));
        let progress = match &slot.state {
            State::Joining { .. } if local => Progress::Waiting,
            State::Joining { .. } => Progress::Joining,
            State::Waiting { .. } => Progress::Waiting,
            State::Held if now < slot.deadline() => return Progress::Held,
            State::Admitted { .. } => return Progress::Admitted,
            // Granted, but the request came for it too late: ask first.
            State::Held => {
                slot.state = State::Waiting { ticket: None };
                self.renew = true;
                Progress::Waiting
            }
            State::Refused(reason, in_use, waiting) => {
                let (reason, in_use, waiting) = (*reason, *in_use, *waiting);
                return Progress::Refused { reason, in_use, waiting, limit: self.over.in_place() };
            }
            State::Failed(error) => return Progress::Failed(error.clone()),
            _ => return Progress::Closed,
        };
        if !slot.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            slot.waker = Some(cx.waker().clone());
        }
        progress
    }

    /// There is one handle more.
    pub(in crate::semaphore) fn share(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.handles += 1;
        }
    }

    /// A handle is gone. With the last one the place is, whatever it had; its permit is given back.
    /// `None`: that was not the last one.
    pub(in crate::semaphore) fn leave(&mut self, index: usize, now: Instant) -> Option<Wakers> {
        let slot = self.slots.get_mut(index)?;
        slot.handles -= 1;
        if slot.handles > 0 {
            return None;
        }
        let slot = self.slots.remove(index);
        self.left_at = Some(now);
        self.give_back(&slot, now);
        if slot.is_in_flight() {
            self.admit_next(now);
        }
        Some(Wakers { _waker: slot.waker, _lost: slot.lost_wakers })
    }

    /// Gives the permit back, whatever handles there are, for someone who waits for the
    /// acknowledgement. `false`: there is none to be waited for.
    pub(in crate::semaphore) fn give_back_now(&mut self, index: usize, now: Instant) -> bool {
        let Some(slot) = self.slots.get_mut(index) else { return false };
        if !slot.is_in_flight() {
            return false;
        }
        let is_there = slot.is_there();
        slot.state = State::Released(Ok(()));
        if is_there {
            slot.state = State::Releasing;
            self.releases.push_back(release_of(self.node, slot, now));
        }
        self.admit_next(now);
        is_there
    }

    /// Whether a release was acknowledged; with the backend's error if it failed.
    pub(in crate::semaphore) fn poll_released(
        &mut self,
        index: usize,
        cx: &Context<'_>,
    ) -> Option<Result<(), BackendError>> {
        let Some(slot) = self.slots.get_mut(index) else { return Some(Ok(())) };
        match &slot.state {
            State::Released(result) => Some(result.clone()),
            State::Releasing => {
                slot.waker = Some(cx.waker().clone());
                None
            }
            _ => Some(Ok(())),
        }
    }

    /// Whether the request has its permit still, lost or not.
    pub(in crate::semaphore) fn is_held(&self, index: usize) -> bool {
        let slot = self.slots.get(index);
        slot.is_some_and(|slot| slot.is_in_flight() || matches!(slot.state, State::Lost))
    }

    /// Whether the permit is lost.
    pub(in crate::semaphore) fn is_lost(&self, index: usize, now: Instant) -> bool {
        self.slots.get(index).is_some_and(|slot| match slot.state {
            State::Lost => true,
            State::Held => now >= slot.deadline(),
            _ => false,
        })
    }

    /// Wakes `waker` when the permit is lost; `false`: it is lost already.
    pub(in crate::semaphore) fn on_lost(&mut self, index: usize, waker: &Waker) -> bool {
        let Some(slot) = self.slots.get_mut(index) else { return true };
        if matches!(slot.state, State::Lost) {
            return false;
        }
        if !slot.lost_wakers.iter().any(|known| known.will_wake(waker)) {
            slot.lost_wakers.push(waker.clone());
        }
        true
    }

    /// The request has waited as long as it may. What comes for it from here on is too late.
    pub(in crate::semaphore) fn overdue(&mut self, index: usize, now: Instant) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        let local = matches!(slot.terms.on_unavailable, OnUnavailable::Local(_));
        match (&slot.state, self.away.clone()) {
            (State::Joining { .. }, Some(_)) if local => {
                let in_use = self.in_flight();
                self.refuse(index, FullReason::QueueTimeout, in_use);
            }
            (State::Joining { .. }, away) => {
                let error = away
                    .unwrap_or_else(|| BackendError::call("the backend gave no answer in time"));
                self.turned_away(index, &error, now);
            }
            (State::Waiting { .. }, Some(error)) => {
                self.turned_away(index, &error, now);
            }
            (State::Waiting { .. }, None) => {
                let (in_use, waiting) = self.seen;
                slot.state = State::Refused(FullReason::QueueTimeout, in_use, waiting);
                self.releases.push_back(release_of(self.node, slot, now));
            }
            _ => {}
        }
    }

    // ===== time =====

    /// Gives everything back.
    pub(in crate::semaphore) fn close(&mut self, now: Instant) {
        let indexes: Vec<_> = self.slots.iter().map(|(index, _)| index).collect();
        for index in indexes {
            let Some(slot) = self.slots.get_mut(index) else { continue };
            match slot.state {
                State::Held | State::Admitted { .. } => self.lose(index, now),
                State::Joining { .. } | State::Waiting { .. } => {
                    if slot.is_there() {
                        self.releases.push_back(release_of(self.node, slot, now));
                    }
                    slot.state = State::Closed;
                    self.woken.extend(slot.waker.take());
                }
                _ => {}
            }
        }
    }

    /// Time passed: who reached his deadline is lost, and what is due is renewed. Says when to look
    /// again; never, if nothing is left.
    pub(in crate::semaphore) fn tick(&mut self, now: Instant) -> Option<Instant> {
        self.wake_at = None;
        self.releases.extend(self.deferred.drain(..));
        let mut lost = Vec::new();
        let mut next: Option<Instant> = None;
        let mut want = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        let mut waits = false;
        for (index, slot) in &self.slots {
            let due = slot.acked + slot.interval();
            match slot.state {
                State::Held if now >= slot.deadline() => {
                    lost.push(index);
                    continue;
                }
                State::Held => want(slot.deadline()),
                State::Waiting { .. } => waits = true,
                // Admitted ones are known to no one who could forget them.
                _ => {
                    want(now + IDLE);
                    continue;
                }
            }
            if now >= due || slot.doubt {
                self.renew |= self.renewing == 0;
                want(now + slot.interval());
            } else {
                want(due);
            }
        }
        // A name that is used now and then keeps its record: see `recount`.
        if let Some(end) = self.left_at.map(|left_at| left_at + IDLE).filter(|end| now < *end) {
            want(end);
        }
        match self.quarantined_until() {
            Some(end) if now < end => want(end),
            // No script runs by itself: the renewals of those who wait start the grants.
            Some(_) => {
                self.quarantine.lost_at = None;
                self.renew |= waits;
            }
            None => {}
        }
        match self.ask_at {
            Some(at) if waits && now < at => want(at),
            Some(_) => {
                self.renew |= waits;
                self.ask_at = None;
            }
            None => {}
        }
        for index in lost {
            self.lose(index, now);
        }
        self.wake_at = next;
        next
    }

    /// Whom to wake.
    pub(in crate::semaphore) fn take_woken(&mut self) -> Woken {
        std::mem::take(&mut self.woken)
    }

    /// The time at which to look, if it came to be earlier than was known.
    pub(in crate::semaphore) fn rescheduled(&mut self) -> Option<Instant> {
        std::mem::take(&mut self.rescheduled).then_some(self.wake_at)?
    }

    /// When the watchdog is to look next.
    pub(in crate::semaphore) const fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }

    /// Sees to it that there is a next look: this one, unless there is one already.
    pub(in crate::semaphore) fn look_again(&mut self, at: Instant) -> Instant {
        *self.wake_at.get_or_insert(at)
    }

    /// Whether nothing is here, nor on its way.
    pub(in crate::semaphore) fn is_idle(&self) -> bool {
        self.slots.is_empty() && !self.is_busy()
    }

    /// Whether there is a place in the backend, or something to send.
    pub(in crate::semaphore) fn is_busy(&self) -> bool {
        !self.releases.is_empty()
            || !self.releasing.is_empty()
            || !self.deferred.is_empty()
            || self.renewing > 0
            || self.slots.iter().any(|(_, slot)| {
                slot.is_live() || matches!(slot.state, State::Joining { .. } | State::Releasing)
            })
    }

    fn want(&mut self, at: Instant) {
        if self.wake_at.is_none_or(|wake_at| at < wake_at) {
            self.wake_at = Some(at);
            self.rescheduled = true;
        }
    }

    fn end_resync(&mut self) {
        let settled = self.reasserts.is_empty() && self.doubted.is_empty();
        if self.renewing == 0 && settled && !self.renew {
            self.resync = false;
        }
    }

    fn give_back(&mut self, slot: &Slot, now: Instant) {
        if slot.is_there() {
            self.releases.push_back(release_of(self.node, slot, now));
        }
    }

    fn longest_lease(&self) -> Duration {
        self.slots.iter().map(|(_, slot)| slot.terms.lease).max().unwrap_or(IDLE)
    }
}

/// A number that no place of this process had before, for a place in this slot.
fn number(serial: &AtomicU64, index: usize) -> u64 {
    ((serial.fetch_add(1, Ordering::Relaxed) << SLOT_BITS) | index as u64) % (1 << 56)
}

fn slot_index(n: u64) -> usize {
    usize::try_from(n & (SLOTS_MAX as u64 - 1)).unwrap_or(usize::MAX)
}

const fn slot_id(node: NodeId, slot: &Slot) -> PlaceId {
    PlaceId { node, deaf: slot.deaf, n: slot.n }
}

/// What gives a place back, and from when on that is not needed any more.
fn release_of(node: NodeId, slot: &Slot, now: Instant) -> (PlaceId, Instant) {
    (slot_id(node, slot), now + slot.terms.lease)
}

fn find(slots: &mut Slab<Slot>, n: u64) -> Option<&mut Slot> {
    slots.get_mut(slot_index(n)).filter(|slot| slot.n == n)
}
