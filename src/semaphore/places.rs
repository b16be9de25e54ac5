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
//!
//! [`ledger`]: crate::ledger

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

use super::health::Counts;
use super::policy::OnUnavailable;
use crate::backend::{Answer, Call, Op};
use crate::error::{BackendError, FullReason};
use crate::ledger::{Ids, NodeId, PlaceId, Reply, Standing, TICKET_MIN};

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
/// The proof of a place that no backend ever knew: it is in flight, so it is to be counted.
const NEVER_ENDS: u64 = TICKET_MIN - 1;
/// How long the record of an unused semaphore is kept.
const IDLE: Duration = Duration::from_secs(5);

/// This process's places in one semaphore.
#[derive(Debug)]
pub(super) struct Places {
    key: Arc<str>,
    node: NodeId,
    deaf: bool,
    /// Why the backend cannot be asked, while it cannot.
    away: Option<BackendError>,
    counts: Arc<Counts>,
    quarantine: Quarantine,
    limit: u32,
    /// The lease of whoever came last.
    lease: Duration,
    slots: Slab<Slot>,

    // What is to be sent.
    joins: VecDeque<u64>,
    releases: VecDeque<(PlaceId, Instant)>,
    reasserts: Vec<u64>,
    renew: bool,
    /// Renewals and reassertions that are on their way.
    renewing: usize,
    /// After a reconnect: joins wait until it is known what became of the places of before.
    resync: bool,

    /// When to look again, and whether that came to be earlier than the watchdog knows.
    wake_at: Option<Instant>,
    rescheduled: bool,
    /// When the earliest lease of all places of the semaphore ends, if anyone waits.
    ask_at: Option<Instant>,
    /// In use and waiting in the whole semaphore, when last heard of.
    seen: (u64, u64),
}

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
    waker: Option<Waker>,
    lost_wakers: Vec<Waker>,
}

/// After data was lost nothing is granted for one lease, where that is asked for: all calls of
/// this process say that there are no permits, so newcomers queue and nobody is promoted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Quarantine {
    pub(super) is_on: bool,
    pub(super) lost_at: Option<Instant>,
}

/// What a place asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) lease: Duration,
    /// How many may wait; `None`: this one may not.
    pub(super) max_queue: Option<u32>,
    pub(super) on_unavailable: OnUnavailable,
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
pub(super) enum Progress {
    Joining,
    Waiting,
    Held,
    Refused { reason: FullReason, in_use: u64, waiting: u64 },
    Failed(BackendError),
    Closed,
}

impl Slot {
    fn deadline(&self) -> Instant {
        self.acked + self.terms.lease
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
    pub(super) fn new(
        key: Arc<str>,
        node: NodeId,
        deaf: bool,
        away: Option<BackendError>,
        counts: Arc<Counts>,
        quarantine: Quarantine,
    ) -> Self {
        Self {
            key,
            node,
            deaf,
            away,
            counts,
            quarantine,
            limit: 0,
            lease: Duration::ZERO,
            slots: Slab::new(),
            joins: VecDeque::new(),
            releases: VecDeque::new(),
            reasserts: Vec::new(),
            renew: false,
            renewing: 0,
            resync: false,
            wake_at: None,
            rescheduled: false,
            ask_at: None,
            seen: (0, 0),
        }
    }

    // ===== requests =====

    /// A request comes. `serial` gives a number that was never given before in this process.
    pub(super) fn join(
        &mut self,
        serial: &mut dyn FnMut() -> u64,
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
        let n = number(serial(), index);
        entry.insert(Slot {
            n,
            deaf: self.deaf,
            terms,
            state: State::Joining { sent: false, hint: None },
            lease_end: 0,
            acked: now,
            held_at: now,
            doubt: false,
            waker: None,
            lost_wakers: Vec::new(),
        });
        self.joins.push_back(n);
        if self.wake_at.is_none() {
            self.want(now + IDLE);
        }
        if let Some(error) = self.away.clone() {
            self.turned_away(index, &error, now, serial, &mut Vec::new());
        }
        Ok(index)
    }

    /// How far the request has come. Whoever is not done is woken by `cx` when that changes.
    pub(super) fn progress(&mut self, index: usize, now: Instant, cx: &Context<'_>) -> Progress {
        let Some(slot) = self.slots.get_mut(index) else { return Progress::Closed };
        let local =
            self.away.is_some() && matches!(slot.terms.on_unavailable, OnUnavailable::Local(_));
        let progress = match &slot.state {
            State::Joining { .. } if local => Progress::Waiting,
            State::Joining { .. } => Progress::Joining,
            State::Waiting { .. } => Progress::Waiting,
            State::Held if now < slot.deadline() => return Progress::Held,
            State::Admitted { .. } => return Progress::Held,
            // Granted, but the request came for it too late: ask first.
            State::Held => {
                slot.state = State::Waiting { ticket: None };
                self.renew = true;
                Progress::Waiting
            }
            State::Refused(reason, in_use, waiting) => {
                return Progress::Refused { reason: *reason, in_use: *in_use, waiting: *waiting };
            }
            State::Failed(error) => return Progress::Failed(error.clone()),
            _ => return Progress::Closed,
        };
        if !slot.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            slot.waker = Some(cx.waker().clone());
        }
        progress
    }

    /// The request is gone, whatever it had; its permit is given back.
    pub(super) fn leave(
        &mut self,
        index: usize,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        if let Some(slot) = self.slots.try_remove(index) {
            self.give_back(&slot, now);
            if slot.is_in_flight() {
                self.admit_next(now, serial, wake);
            }
        }
    }

    /// As [`leave`](Self::leave), for someone who waits for the acknowledgement.
    pub(super) fn leave_slowly(&mut self, index: usize, now: Instant) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        let held = matches!(slot.state, State::Held | State::Admitted { announced: true });
        slot.state = if held { State::Releasing } else { State::Released(Ok(())) };
        if held {
            let (id, lease) = (slot_id(self.node, slot), slot.terms.lease);
            self.releases.push_back((id, now + lease));
        }
    }

    /// Whether a release was acknowledged; with the backend's error if it failed.
    pub(super) fn poll_released(
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

    /// Whether the permit is lost; if not, `cx` is woken when it is.
    pub(super) fn is_lost(&mut self, index: usize, now: Instant, cx: Option<&Context<'_>>) -> bool {
        let Some(slot) = self.slots.get_mut(index) else { return false };
        match slot.state {
            State::Lost => true,
            State::Held if now >= slot.deadline() => true,
            State::Held => {
                if let Some(cx) = cx
                    && !slot.lost_wakers.iter().any(|waker| waker.will_wake(cx.waker()))
                {
                    slot.lost_wakers.push(cx.waker().clone());
                }
                false
            }
            _ => false,
        }
    }

    /// The request has waited as long as it may. What comes for it from here on is too late.
    pub(super) fn overdue(
        &mut self,
        index: usize,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        let local = matches!(slot.terms.on_unavailable, OnUnavailable::Local(_));
        match (&slot.state, self.away.clone()) {
            (State::Joining { .. }, Some(_)) if local => {
                let in_use = self.in_flight();
                self.refuse(index, FullReason::QueueTimeout, in_use, wake);
            }
            (State::Joining { .. }, away) => {
                let error = away
                    .unwrap_or_else(|| BackendError::call("the backend gave no answer in time"));
                self.turned_away(index, &error, now, serial, wake);
            }
            (State::Waiting { .. }, Some(error)) => {
                self.turned_away(index, &error, now, serial, wake);
            }
            (State::Waiting { .. }, None) => {
                let (in_use, waiting) = self.seen;
                let (id, lease) = (slot_id(self.node, slot), slot.terms.lease);
                slot.state = State::Refused(FullReason::QueueTimeout, in_use, waiting);
                self.releases.push_back((id, now + lease));
            }
            _ => {}
        }
    }

    // ===== calls out =====

    /// Whether there is anything to send.
    pub(super) fn has_mail(&self) -> bool {
        !self.releases.is_empty()
            || !self.reasserts.is_empty()
            || (self.renew && self.renewing == 0)
            || (!self.joins.is_empty() && !self.resync)
    }

    /// What is to be sent, in this order: releases first, so that a process always reads its own.
    pub(super) fn collect(&mut self, now: Instant, out: &mut impl Extend<Call>) {
        self.collect_releases(now, out);
        self.collect_reasserts(now, out);
        if self.renew && self.renewing == 0 {
            self.collect_renewals(now, out);
        }
        self.end_resync();
        if !self.resync {
            self.collect_joins(now, out);
        }
    }

    fn collect_releases(&mut self, now: Instant, out: &mut impl Extend<Call>) {
        while !self.releases.is_empty() {
            let batch = self.releases.len().min(BATCH_MAX);
            // What its lease has ended is gone by itself.
            let ids: Ids = self
                .releases
                .drain(..batch)
                .filter(|(_, until)| now < *until)
                .map(|r| r.0)
                .collect();
            if !ids.is_empty() {
                out.extend([self.call(Op::Release { ids }, now)]);
            }
        }
    }

    fn collect_reasserts(&mut self, now: Instant, out: &mut impl Extend<Call>) {
        let mut groups: Vec<(u64, Vec<(PlaceId, u64)>)> = Vec::new();
        for n in std::mem::take(&mut self.reasserts) {
            let Some(slot) = find(&mut self.slots, n) else { continue };
            let proof = match &mut slot.state {
                State::Waiting { ticket: Some(ticket) } => *ticket,
                State::Held => slot.lease_end,
                State::Admitted { announced } => {
                    *announced = true;
                    NEVER_ENDS
                }
                _ => continue,
            };
            let item = (slot_id(self.node, slot), proof);
            group(&mut groups, slot.lease_ms()).push(item);
        }
        for (lease_ms, proofs) in groups {
            for chunk in proofs.chunks(BATCH_MAX) {
                self.renewing += 1;
                out.extend([self.call(Op::Reassert { lease_ms, proofs: chunk.to_vec() }, now)]);
            }
        }
    }

    fn collect_renewals(&mut self, now: Instant, out: &mut impl Extend<Call>) {
        self.renew = false;
        let mut groups: Vec<(u64, Vec<PlaceId>)> = Vec::new();
        for (_, slot) in &mut self.slots {
            // Held places go along once half of their time to the next renewal is over: so all
            // places of a process come to be renewed by one call.
            let due = match slot.state {
                State::Waiting { .. } => true,
                State::Held => self.resync || slot.doubt || now >= slot.acked + slot.interval() / 2,
                _ => false,
            };
            if due {
                slot.doubt = false;
                group(&mut groups, slot.lease_ms()).push(slot_id(self.node, slot));
            }
        }
        for (lease_ms, ids) in groups {
            for chunk in ids.chunks(BATCH_MAX) {
                self.renewing += 1;
                out.extend([self.call(Op::Renew { lease_ms, ids: chunk.into() }, now)]);
            }
        }
    }

    fn collect_joins(&mut self, now: Instant, out: &mut impl Extend<Call>) {
        let mut batch: Option<(Terms, Ids)> = None;
        while let Some(n) = self.joins.pop_front() {
            let Some(slot) = find(&mut self.slots, n) else { continue };
            let State::Joining { sent, .. } = &mut slot.state else { continue };
            *sent = true;
            let (terms, id) = (slot.terms, slot_id(self.node, slot));
            match &mut batch {
                Some((same, ids)) if *same == terms && ids.len() < BATCH_MAX => ids.push(id),
                _ => {
                    let full = batch.replace((terms, Ids::from_elem(id, 1)));
                    out.extend(full.map(|full| self.acquire(full, now)));
                }
            }
        }
        out.extend(batch.map(|batch| self.acquire(batch, now)));
    }

    fn acquire(&self, (terms, ids): (Terms, Ids), now: Instant) -> Call {
        let lease_ms = u64::try_from(terms.lease.as_millis()).unwrap_or(u64::MAX);
        self.call(Op::Acquire { lease_ms, max_queue: terms.max_queue, ids }, now)
    }

    fn call(&self, op: Op, now: Instant) -> Call {
        let limit = match self.quarantined_until() {
            Some(end) if now < end => 0,
            _ => self.limit,
        };
        Call { key: Arc::clone(&self.key), node: self.node, limit, op }
    }

    fn quarantined_until(&self) -> Option<Instant> {
        let lost_at = self.quarantine.lost_at.filter(|_| self.quarantine.is_on)?;
        Some(lost_at + self.lease.max(self.longest_lease()))
    }

    /// The backend forgot a place that was held, or may have.
    fn data_was_lost(&mut self, at: Instant) {
        if self.quarantine.is_on {
            self.quarantine.lost_at = Some(at);
            if let Some(end) = self.quarantined_until() {
                self.want(end);
            }
        }
    }

    // ===== answers and hints in =====

    /// An answer came for a call that was sent at `sent`.
    pub(super) fn answered(
        &mut self,
        op: &Op,
        answer: Answer,
        sent: Instant,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        if matches!(op, Op::Renew { .. } | Op::Reassert { .. }) {
            self.renewing = self.renewing.saturating_sub(1);
        }
        match answer {
            Answer::Reply { reply, late } => {
                self.replied(op, &reply, late, sent, now, serial, wake);
            }
            Answer::Failed(error) => self.failed(op, &error, now, serial, wake),
            Answer::Listing(_) => {}
        }
        self.end_resync();
    }

    #[expect(clippy::too_many_arguments, reason = "an answer is what it is")]
    fn replied(
        &mut self,
        op: &Op,
        reply: &Reply,
        late: bool,
        sent: Instant,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        self.seen = (reply.in_use, reply.waiting);
        match op {
            Op::Acquire { ids, .. } => {
                for (id, standing) in ids.iter().zip(&reply.standings) {
                    self.joined(*id, *standing, reply, late, sent, now, wake);
                }
            }
            Op::Renew { ids, .. } => {
                for (id, standing) in ids.iter().zip(&reply.standings) {
                    self.renewed(id.n, *standing, reply.lease_end, sent, now, serial, wake);
                }
            }
            Op::Reassert { proofs, .. } => {
                for ((id, _), standing) in proofs.iter().zip(&reply.standings) {
                    self.reasserted(id.n, *standing, reply.lease_end, sent, now, wake);
                }
            }
            Op::Release { ids } => {
                for id in ids {
                    self.released(id.n, &Ok(()), wake);
                }
            }
            Op::Inspect { .. } => {}
        }
        for grant in &reply.granted {
            self.promoted(grant.id, grant.lease_end, now, wake);
        }
        if reply.earliest > 0 {
            let server_now = reply.lease_end.saturating_sub(lease_ms_of(op));
            let left = Duration::from_millis(reply.earliest.saturating_sub(server_now));
            let at = now + left + AFTER_LEASE_END;
            self.ask_at = Some(at);
            if self.slots.iter().any(|(_, slot)| matches!(slot.state, State::Waiting { .. })) {
                self.want(at);
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "an answer is what it is")]
    fn joined(
        &mut self,
        id: PlaceId,
        standing: Standing,
        reply: &Reply,
        late: bool,
        sent: Instant,
        now: Instant,
        wake: &mut Vec<Waker>,
    ) {
        let Some(slot) = find(&mut self.slots, id.n) else {
            // Its release was sent after it; but only if nothing was resent does that mean that it
            // was carried out after it.
            if late && matches!(standing, Standing::Held | Standing::Waits(_)) {
                self.releases.push_back((id, now + IDLE));
            }
            return;
        };
        let State::Joining { hint, .. } = slot.state else { return };
        match standing {
            Standing::Held => {
                slot.lease_end = reply.lease_end;
                slot.acked = sent;
                self.grant(id.n, now, wake);
            }
            Standing::Waits(ticket) => {
                slot.lease_end = reply.lease_end;
                slot.acked = sent;
                slot.state = State::Waiting { ticket: Some(ticket) };
                wake.extend(slot.waker.take());
                let at = slot.acked + slot.interval();
                if hint.is_some_and(|lease_end| lease_end >= reply.lease_end) {
                    self.grant(id.n, now, wake);
                } else {
                    let quarantined = self.quarantined_until().filter(|end| now < *end);
                    self.want(quarantined.map_or(at, |end| at.min(end)));
                }
            }
            Standing::NoPermit | Standing::QueueFull => {
                let reason = match standing {
                    Standing::NoPermit => FullReason::Limit,
                    _ => FullReason::QueueFull,
                };
                slot.state = State::Refused(reason, reply.in_use, reply.waiting);
                wake.extend(slot.waker.take());
            }
            Standing::Gone => {}
        }
    }

    #[expect(clippy::too_many_arguments, reason = "an answer is what it is")]
    fn renewed(
        &mut self,
        n: u64,
        standing: Standing,
        lease_end: u64,
        sent: Instant,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        let Some(slot) = find(&mut self.slots, n) else { return };
        match (&slot.state, standing) {
            (State::Held, Standing::Gone) if slot.held_at > sent => {
                slot.doubt = true;
                self.renew = true;
            }
            (State::Held, Standing::Gone) => {
                self.reasserts.push(n);
                self.data_was_lost(now);
            }
            (State::Waiting { ticket }, Standing::Gone) => {
                // Back under a new id: what still names the old one must not reach this stay.
                let ticket = *ticket;
                let index = slot_index(n);
                slot.n = number(serial(), index);
                slot.deaf = self.deaf;
                let n = slot.n;
                if ticket.is_some() {
                    self.reasserts.push(n);
                } else {
                    slot.state = State::Joining { sent: false, hint: None };
                    self.joins.push_back(n);
                }
            }
            _ => self.confirmed(n, standing, lease_end, sent, now, wake),
        }
    }

    fn reasserted(
        &mut self,
        n: u64,
        standing: Standing,
        lease_end: u64,
        sent: Instant,
        now: Instant,
        wake: &mut Vec<Waker>,
    ) {
        let Some(slot) = find(&mut self.slots, n) else { return };
        match (&slot.state, standing) {
            (State::Held, Standing::Gone) => self.lose(slot_index(n), now, wake),
            (State::Waiting { .. }, Standing::Gone) => self.renew = true,
            _ => self.confirmed(n, standing, lease_end, sent, now, wake),
        }
    }

    /// A renewal found the place.
    fn confirmed(
        &mut self,
        n: u64,
        standing: Standing,
        lease_end: u64,
        sent: Instant,
        now: Instant,
        wake: &mut Vec<Waker>,
    ) {
        let Some(slot) = find(&mut self.slots, n) else { return };
        let interval = slot.interval();
        match (&mut slot.state, standing) {
            (State::Waiting { .. } | State::Admitted { .. }, Standing::Held) => {
                slot.lease_end = lease_end;
                slot.acked = sent;
                self.grant(n, now, wake);
            }
            (State::Waiting { ticket }, Standing::Waits(number)) => {
                *ticket = Some(number);
                slot.lease_end = lease_end;
                slot.acked = sent;
                self.want(sent + interval);
            }
            (State::Held, Standing::Held) => {
                if now >= slot.deadline() {
                    self.lose(slot_index(n), now, wake);
                } else {
                    slot.lease_end = lease_end;
                    slot.acked = sent;
                    self.want(sent + interval);
                }
            }
            (State::Held, Standing::Waits(_)) => {
                slot.doubt = true;
                self.renew = true;
            }
            _ => {}
        }
    }

    /// A hint, or a promotion in the answer to a call of this node's own.
    pub(super) fn hint(&mut self, n: u64, lease_end: u64, now: Instant, wake: &mut Vec<Waker>) {
        self.promoted(PlaceId { node: self.node, deaf: false, n }, lease_end, now, wake);
    }

    fn promoted(&mut self, id: PlaceId, lease_end: u64, now: Instant, wake: &mut Vec<Waker>) {
        let Some(slot) = find(&mut self.slots, id.n) else {
            self.releases.push_back((id, now + IDLE));
            return;
        };
        match &mut slot.state {
            State::Joining { hint, .. } => *hint = Some(lease_end),
            State::Waiting { .. } if lease_end >= slot.lease_end => self.grant(id.n, now, wake),
            _ => {}
        }
    }

    /// The place has a permit; if that is news too old to believe, asks first.
    fn grant(&mut self, n: u64, now: Instant, wake: &mut Vec<Waker>) {
        let Some(slot) = find(&mut self.slots, n) else { return };
        if now >= slot.deadline() {
            if !matches!(slot.state, State::Waiting { .. }) {
                slot.state = State::Waiting { ticket: None };
            }
            self.renew = true;
            return;
        }
        slot.state = State::Held;
        slot.held_at = now;
        wake.extend(slot.waker.take());
        let at = slot.acked + slot.interval();
        self.want(at);
    }

    fn lose(&mut self, index: usize, now: Instant, wake: &mut Vec<Waker>) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        slot.state = State::Lost;
        self.counts.lost();
        wake.append(&mut slot.lost_wakers);
        let id = slot_id(self.node, slot);
        let lease = slot.terms.lease;
        self.releases.push_back((id, now + lease));
    }

    fn released(&mut self, n: u64, result: &Result<(), BackendError>, wake: &mut Vec<Waker>) {
        if let Some(slot) = find(&mut self.slots, n)
            && matches!(slot.state, State::Releasing)
        {
            slot.state = State::Released(result.clone());
            wake.extend(slot.waker.take());
        }
    }

    fn failed(
        &mut self,
        op: &Op,
        error: &BackendError,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        match op {
            Op::Acquire { ids, .. } => {
                for id in ids {
                    if find(&mut self.slots, id.n).is_some() {
                        self.turned_away(slot_index(id.n), error, now, serial, wake);
                    }
                }
            }
            Op::Release { ids } => {
                for id in ids {
                    self.released(id.n, &Err(error.clone()), wake);
                }
            }
            // Due again at the next look, well before the lease ends.
            _ => {}
        }
    }

    // ===== while the backend is away =====

    /// The backend cannot be asked for this place: the policy answers.
    fn turned_away(
        &mut self,
        index: usize,
        error: &BackendError,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        let in_flight = self.in_flight();
        let Some(slot) = self.slots.get(index) else { return };
        if !matches!(slot.state, State::Joining { .. } | State::Waiting { .. }) {
            return;
        }
        match (slot.terms.on_unavailable, slot.terms.max_queue) {
            (OnUnavailable::Admit, _) => self.admit(index, now, serial, wake),
            (OnUnavailable::Local(share), _) if in_flight < u64::from(share) => {
                self.admit(index, now, serial, wake);
            }
            (OnUnavailable::Local(_), None) => {
                self.refuse(index, FullReason::Limit, in_flight, wake);
            }
            // Waits until one of this process's own is free, or the backend is back.
            (OnUnavailable::Local(_), Some(max)) if self.away.is_some() => {
                let waiting = self.slots.iter().filter(|(_, slot)| slot.is_joining()).count();
                if waiting > max as usize {
                    self.refuse(index, FullReason::QueueFull, in_flight, wake);
                }
            }
            _ => {
                let slot = &mut self.slots[index];
                let there = slot.is_there();
                slot.state = State::Failed(error.clone());
                wake.extend(slot.waker.take());
                self.counts.refused();
                if there {
                    let (id, lease) = (slot_id(self.node, slot), slot.terms.lease);
                    self.releases.push_back((id, now + lease));
                }
            }
        }
    }

    /// In flight without the backend: under a new id, because the old one may stand there as
    /// waiting.
    fn admit(
        &mut self,
        index: usize,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        if slot.is_there() {
            self.releases.push_back((slot_id(self.node, slot), now + slot.terms.lease));
        }
        slot.n = number(serial(), index);
        slot.deaf = self.deaf;
        slot.state = State::Admitted { announced: false };
        slot.held_at = now;
        wake.extend(slot.waker.take());
        self.counts.admitted();
        if self.away.is_none() {
            // Only this call failed: the backend can be told at once.
            let n = slot.n;
            self.reasserts.push(n);
        }
    }

    fn refuse(&mut self, index: usize, reason: FullReason, in_use: u64, wake: &mut Vec<Waker>) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        slot.state = State::Refused(reason, in_use, 0);
        wake.extend(slot.waker.take());
        self.counts.refused();
    }

    /// One of this process's own came free while the backend is away: the next one has it.
    fn admit_next(&mut self, now: Instant, serial: &mut dyn FnMut() -> u64, wake: &mut Vec<Waker>) {
        let Some(error) = self.away.clone() else { return };
        let next = self.slots.iter().filter(|(_, slot)| slot.is_joining());
        if let Some((index, _)) = next.min_by_key(|(_, slot)| slot.n >> SLOT_BITS) {
            self.turned_away(index, &error, now, serial, wake);
        }
    }

    fn in_flight(&self) -> u64 {
        self.slots.iter().filter(|(_, slot)| slot.is_in_flight()).count() as u64
    }

    // ===== connection and time =====

    /// A connection broke with this call unanswered: it may or may not have been carried out.
    pub(super) fn unanswered(&mut self, op: &Op, now: Instant) {
        match op {
            Op::Release { ids } => {
                let until = now + self.longest_lease();
                for id in ids.iter().rev() {
                    self.releases.push_front((*id, until));
                }
            }
            Op::Renew { .. } | Op::Reassert { .. } => {
                self.renewing = self.renewing.saturating_sub(1);
            }
            // Taken up again from the slots, when there is a connection.
            Op::Acquire { .. } | Op::Inspect { .. } => {}
        }
    }

    /// There is a new connection: ask for everything again, in the order of rule 5.
    pub(super) fn connected(&mut self, deaf: bool, lost_at: Option<Instant>) {
        self.deaf = deaf;
        if let Some(at) = lost_at {
            self.data_was_lost(at);
        }
        self.away = None;
        self.renewing = 0;
        let admitted =
            self.slots.iter().filter(|(_, slot)| matches!(slot.state, State::Admitted { .. }));
        self.reasserts = admitted.map(|(_, slot)| slot.n).collect();
        let mut joins: Vec<u64> = self
            .slots
            .iter()
            .filter(|(_, slot)| matches!(slot.state, State::Joining { .. }))
            .map(|(_, slot)| slot.n)
            .collect();
        joins.sort_unstable_by_key(|n| n >> SLOT_BITS);
        self.joins = joins.into();
        self.resync = self.slots.iter().any(|(_, slot)| slot.is_live());
        self.renew = self.resync;
    }

    /// The backend cannot be reached: for who has no place yet the policy answers, and who waits for
    /// an acknowledgement is told. Who waits in the queue goes on waiting, unless the policy lets
    /// him pass.
    pub(super) fn unreachable(
        &mut self,
        error: &BackendError,
        now: Instant,
        serial: &mut dyn FnMut() -> u64,
        wake: &mut Vec<Waker>,
    ) {
        self.away = Some(error.clone());
        let mut slots: Vec<_> = self.slots.iter().map(|(index, slot)| (slot.n, index)).collect();
        slots.sort_unstable_by_key(|(n, _)| n >> SLOT_BITS);
        for (n, index) in slots {
            let slot = &self.slots[index];
            let waits = matches!(slot.state, State::Waiting { .. });
            if slot.is_joining() || (waits && slot.terms.on_unavailable == OnUnavailable::Admit) {
                self.turned_away(index, error, now, serial, wake);
            }
            self.released(n, &Err(error.clone()), wake);
        }
    }

    /// Gives everything back.
    pub(super) fn close(&mut self, now: Instant, wake: &mut Vec<Waker>) {
        let indexes: Vec<_> = self.slots.iter().map(|(index, _)| index).collect();
        for index in indexes {
            let Some(slot) = self.slots.get_mut(index) else { continue };
            match slot.state {
                State::Held | State::Admitted { .. } => self.lose(index, now, wake),
                State::Joining { .. } | State::Waiting { .. } => {
                    if slot.is_there() {
                        let (id, lease) = (slot_id(self.node, slot), slot.terms.lease);
                        self.releases.push_back((id, now + lease));
                    }
                    slot.state = State::Closed;
                    wake.extend(slot.waker.take());
                }
                _ => {}
            }
        }
    }

    /// Time passed: who reached his deadline is lost, and what is due is renewed. Says when to look
    /// again; never, if nothing is left.
    pub(super) fn tick(&mut self, now: Instant, wake: &mut Vec<Waker>) -> Option<Instant> {
        self.wake_at = None;
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
            if now >= due {
                self.renew |= self.renewing == 0;
                want(now + slot.interval());
            } else {
                want(due);
            }
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
            self.lose(index, now, wake);
        }
        self.wake_at = next;
        next
    }

    /// The time at which to look, if it came to be earlier than was known.
    pub(super) fn rescheduled(&mut self) -> Option<Instant> {
        std::mem::take(&mut self.rescheduled).then_some(self.wake_at)?
    }

    /// When the watchdog is to look next.
    pub(super) const fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }

    /// Sees to it that there is a next look: this one, unless there is one already.
    pub(super) fn look_again(&mut self, at: Instant) -> Instant {
        *self.wake_at.get_or_insert(at)
    }

    /// Whether nothing is here, nor on its way.
    pub(super) fn is_idle(&self) -> bool {
        self.slots.is_empty() && !self.is_busy()
    }

    /// Whether there is a place in the backend, or something to send.
    pub(super) fn is_busy(&self) -> bool {
        !self.releases.is_empty()
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
        if self.renewing == 0 && self.reasserts.is_empty() && !self.renew {
            self.resync = false;
        }
    }

    fn give_back(&mut self, slot: &Slot, now: Instant) {
        if slot.is_there() {
            self.releases.push_back((slot_id(self.node, slot), now + slot.terms.lease));
        }
    }

    fn longest_lease(&self) -> Duration {
        self.slots.iter().map(|(_, slot)| slot.terms.lease).max().unwrap_or(IDLE)
    }
}

const fn number(serial: u64, index: usize) -> u64 {
    ((serial << SLOT_BITS) | index as u64) % (1 << 56)
}

fn slot_index(n: u64) -> usize {
    usize::try_from(n & (SLOTS_MAX as u64 - 1)).unwrap_or(usize::MAX)
}

const fn slot_id(node: NodeId, slot: &Slot) -> PlaceId {
    PlaceId { node, deaf: slot.deaf, n: slot.n }
}

fn find(slots: &mut Slab<Slot>, n: u64) -> Option<&mut Slot> {
    slots.get_mut(slot_index(n)).filter(|slot| slot.n == n)
}

fn group<T>(groups: &mut Vec<(u64, Vec<T>)>, key: u64) -> &mut Vec<T> {
    let at = groups.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
        groups.push((key, Vec::new()));
        groups.len() - 1
    });
    &mut groups[at].1
}

const fn lease_ms_of(op: &Op) -> u64 {
    match op {
        Op::Acquire { lease_ms, .. }
        | Op::Renew { lease_ms, .. }
        | Op::Reassert { lease_ms, .. } => *lease_ms,
        Op::Release { .. } | Op::Inspect { .. } => 0,
    }
}
