//! The process's side: the rules of `places.rs`, in small.
//!
//! Ticks stand for the clock, one renewal interval each; a number is a request and which stay of it.

use std::collections::VecDeque;

use tower_semaphore::ledger::{Reply, Standing};

use super::Bug;
use super::server::{LEASE, Proof, end_of, id_of, ticket_of};

/// Stays of one request: each has a number of its own.
const STAYS: u8 = 8;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pub(crate) me: u8,
    pub(crate) slots: Vec<Slot>,
    pub(crate) requests: u8,
    pub(crate) releases: Vec<(u8, u8)>,
    reasserts: Vec<u8>,
    renew: bool,
    renewing: u8,
    resync: bool,
    joins: Vec<u8>,

    pub(crate) connected: bool,
    /// The server that it saw last; none before its first connection.
    pub(crate) seen: Option<u8>,
    pub(crate) quarantine: u8,
    pub(crate) frozen: bool,
    pub(crate) dead: bool,
    /// Sent on the connection and not carried out yet; and carried out, with the answer on its way.
    pub(crate) wire: VecDeque<Call>,
    pub(crate) back: VecDeque<(Call, Reply)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot {
    pub(crate) n: u8,
    wait: bool,
    pub(crate) state: State,
    end: u8,
    pub(crate) acked: u8,
    doubt: bool,
    /// The caller was told that it has the permit, and works.
    pub(crate) taken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    Joining { sent: bool, hint: Option<u8> },
    Waiting { ticket: Option<u16> },
    Held,
    Lost,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) op: Op,
    pub(crate) limit: u32,
    pub(crate) sent: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    Acquire {
        ids: Vec<u8>,
        wait: bool,
    },
    Release {
        ids: Vec<u8>,
    },
    /// Each with whether it was held when this was sent.
    Renew {
        ids: Vec<(u8, bool)>,
    },
    Reassert {
        proofs: Vec<(u8, Proof)>,
    },
}

/// What happened in a process that someone outside wants to know.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// A promotion came for a place that is not known here.
    pub(crate) stranger: Vec<u8>,
    pub(crate) lost_without_cause: bool,
    pub(crate) lost_at_deadline: bool,
    pub(crate) hint_repaired: bool,
    pub(crate) rejoined: bool,
    pub(crate) refused: bool,
    pub(crate) hint_came_first: bool,
    pub(crate) too_late: bool,
}

impl Slot {
    pub(crate) const fn request(&self) -> u8 {
        self.n / STAYS
    }

    const fn deadline(&self) -> u8 {
        self.acked + LEASE
    }

    /// Whether the caller goes on working: it has the permit, and looks at the clock before it does
    /// anything.
    pub(crate) fn works(&self, now: u8, bug: Option<Bug>) -> bool {
        let lost = match self.state {
            State::Lost => true,
            State::Held => now >= self.deadline() && bug != Some(Bug::NoSelfFence),
            _ => false,
        };
        self.taken && !lost
    }
}

pub(crate) const fn request_of(n: u8) -> u8 {
    n / STAYS
}

impl Process {
    pub(crate) fn new(me: u8) -> Self {
        Self {
            me,
            slots: Vec::new(),
            requests: 0,
            releases: Vec::new(),
            reasserts: Vec::new(),
            renew: false,
            renewing: 0,
            resync: false,
            joins: Vec::new(),
            connected: true,
            seen: None,
            quarantine: 0,
            frozen: false,
            dead: false,
            wire: VecDeque::new(),
            back: VecDeque::new(),
        }
    }

    pub(crate) const fn is_awake(&self) -> bool {
        !self.dead && !self.frozen
    }

    pub(crate) fn knows(&self, n: u8) -> bool {
        !self.dead && self.slots.iter().any(|slot| slot.n == n)
    }

    /// Whether a place of this number would be of use here.
    pub(crate) fn wants(&self, n: u8) -> bool {
        !self.dead && self.slots.iter().any(|slot| slot.n == n && slot.state != State::Lost)
    }

    fn find(&mut self, n: u8) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.n == n)
    }

    // ===== requests =====

    pub(crate) fn join(&mut self, wait: bool, now: u8) {
        let n = self.requests * STAYS;
        self.requests += 1;
        self.slots.push(Slot {
            n,
            wait,
            state: State::Joining { sent: false, hint: None },
            end: 0,
            acked: now,
            doubt: false,
            taken: false,
        });
        self.joins.push(n);
    }

    pub(crate) fn leave(&mut self, index: usize, now: u8) {
        let slot = self.slots.remove(index);
        let there = match slot.state {
            State::Joining { sent, .. } => sent,
            State::Waiting { .. } | State::Held => true,
            State::Lost => false,
        };
        self.joins.retain(|n| *n != slot.n);
        self.reasserts.retain(|n| *n != slot.n);
        if there {
            self.releases.push((slot.n, now + LEASE));
        }
    }

    // ===== calls out =====

    pub(crate) fn has_mail(&self) -> bool {
        !self.releases.is_empty()
            || !self.reasserts.is_empty()
            || (self.renew && self.renewing == 0)
            || (!self.joins.is_empty() && !self.resync)
    }

    /// Whether all that is to be sent is a question that was just answered "waits" for a holder.
    /// The process asks it again and again; time passes over that.
    pub(crate) fn only_doubts(&self) -> bool {
        self.releases.is_empty()
            && self.reasserts.is_empty()
            && self.slots.iter().any(|slot| slot.doubt)
    }

    pub(crate) fn collect(&mut self, now: u8, limit: u32, bug: Option<Bug>) -> Vec<Call> {
        let mut ops = Vec::new();
        let ids: Vec<_> =
            self.releases.drain(..).filter(|(_, until)| now < *until).map(|r| r.0).collect();
        if !ids.is_empty() {
            ops.push(Op::Release { ids });
        }
        let joins_first = bug == Some(Bug::AcquiresBeforeRenewals);
        if joins_first {
            self.collect_joins(&mut ops, bug);
        }
        let mut proofs = Vec::new();
        for n in std::mem::take(&mut self.reasserts) {
            let Some(slot) = self.find(n) else { continue };
            match slot.state {
                State::Waiting { ticket: Some(ticket) } => proofs.push((n, Proof::Ticket(ticket))),
                State::Held => proofs.push((n, Proof::End(slot.end))),
                _ => {}
            }
        }
        if !proofs.is_empty() {
            self.renewing += 1;
            ops.push(Op::Reassert { proofs });
        }
        if self.renew && self.renewing == 0 {
            self.collect_renewals(&mut ops, now, bug);
        }
        self.end_resync();
        if !self.resync && !joins_first {
            self.collect_joins(&mut ops, bug);
        }
        ops.into_iter().map(|op| Call { op, limit, sent: now }).collect()
    }

    fn collect_renewals(&mut self, ops: &mut Vec<Op>, now: u8, bug: Option<Bug>) {
        self.renew = false;
        let (mut ids, mut proofs) = (Vec::new(), Vec::new());
        let resync = self.resync;
        for slot in &mut self.slots {
            match slot.state {
                State::Waiting { .. } if bug != Some(Bug::WaitersNotRenewed) => {
                    ids.push((slot.n, false));
                }
                State::Held if resync || slot.doubt || now > slot.acked => {
                    if bug == Some(Bug::ProofInEveryRenewal) {
                        proofs.push((slot.n, Proof::End(slot.end)));
                    } else {
                        ids.push((slot.n, true));
                    }
                }
                _ => continue,
            }
            slot.doubt = false;
        }
        if !ids.is_empty() {
            self.renewing += 1;
            ops.push(Op::Renew { ids });
        }
        if !proofs.is_empty() {
            self.renewing += 1;
            ops.push(Op::Reassert { proofs });
        }
    }

    fn collect_joins(&mut self, ops: &mut Vec<Op>, bug: Option<Bug>) {
        for mut n in std::mem::take(&mut self.joins) {
            let Some(slot) = self.find(n) else { continue };
            let State::Joining { sent, .. } = &mut slot.state else { continue };
            if *sent && bug == Some(Bug::RepeatsUnderNewId) {
                slot.n += 1;
                n = slot.n;
            }
            *sent = true;
            ops.push(Op::Acquire { ids: vec![n], wait: slot.wait });
        }
    }

    // ===== answers and hints in =====

    pub(crate) fn answered(
        &mut self,
        call: &Call,
        reply: &Reply,
        now: u8,
        bug: Option<Bug>,
        notes: &mut Notes,
    ) {
        if matches!(call.op, Op::Renew { .. } | Op::Reassert { .. }) {
            self.renewing = self.renewing.saturating_sub(1);
        }
        let sent = if bug == Some(Bug::DeadlineFromReceipt) { now } else { call.sent };
        let end = if reply.lease_end > 0 { end_of(reply.lease_end) } else { 0 };
        match &call.op {
            Op::Acquire { ids, .. } => {
                for (n, standing) in ids.iter().zip(&reply.standings) {
                    self.joined(*n, *standing, end, sent, now, bug, notes);
                }
            }
            Op::Renew { ids } => {
                for ((n, held), standing) in ids.iter().zip(&reply.standings) {
                    self.renewed(*n, *held, *standing, (end, sent, now), bug, notes);
                }
            }
            Op::Reassert { proofs } => {
                for ((n, _), standing) in proofs.iter().zip(&reply.standings) {
                    self.reasserted(*n, *standing, (end, sent, now), bug, notes);
                }
            }
            Op::Release { .. } => {}
        }
        for grant in &reply.granted {
            self.promoted(id_of(grant.id).1, end_of(grant.lease_end), now, bug, notes);
        }
        self.end_resync();
    }

    #[expect(clippy::too_many_arguments, reason = "an answer is what it is")]
    fn joined(
        &mut self,
        n: u8,
        standing: Standing,
        end: u8,
        sent: u8,
        now: u8,
        bug: Option<Bug>,
        notes: &mut Notes,
    ) {
        let Some(index) = self.slots.iter().position(|slot| slot.n == n) else { return };
        let slot = &mut self.slots[index];
        let State::Joining { hint, .. } = slot.state else { return };
        match standing {
            Standing::Held => {
                (slot.end, slot.acked) = (end, sent);
                self.grant(n, now, bug, notes);
            }
            Standing::Waits(ticket) => {
                (slot.end, slot.acked) = (end, sent);
                slot.state = State::Waiting { ticket: Some(ticket_of(ticket)) };
                if hint.is_some_and(|hint| hint >= end || bug == Some(Bug::HintWithoutLeaseEnd)) {
                    notes.hint_came_first = true;
                    self.grant(n, now, bug, notes);
                }
            }
            Standing::NoPermit | Standing::QueueFull => {
                notes.refused = true;
                self.slots.remove(index);
            }
            Standing::Gone => {}
        }
    }

    fn renewed(
        &mut self,
        n: u8,
        held: bool,
        standing: Standing,
        times: (u8, u8, u8),
        bug: Option<Bug>,
        notes: &mut Notes,
    ) {
        let Some(slot) = self.find(n) else { return };
        match (slot.state, standing) {
            (State::Held, Standing::Gone) if !held => {
                if bug == Some(Bug::GoneDropsGrantedSince) {
                    self.lose(n, times.2, notes);
                } else {
                    slot.doubt = true;
                    self.renew = true;
                }
            }
            (State::Held, Standing::Gone) => {
                if bug == Some(Bug::NoReassert) {
                    self.lose(n, times.2, notes);
                } else {
                    self.reasserts.push(n);
                }
            }
            (State::Waiting { ticket }, Standing::Gone) => {
                notes.rejoined = true;
                let keeps_ticket = ticket.is_some() && bug != Some(Bug::RejoinWithNewTicket);
                if bug != Some(Bug::RejoinWithSameId) {
                    slot.n += 1;
                }
                let n = slot.n;
                if keeps_ticket {
                    self.reasserts.push(n);
                } else {
                    slot.state = State::Joining { sent: false, hint: None };
                    self.joins.push(n);
                }
            }
            _ => self.confirmed(n, standing, times, bug, notes),
        }
    }

    fn reasserted(
        &mut self,
        n: u8,
        standing: Standing,
        times: (u8, u8, u8),
        bug: Option<Bug>,
        notes: &mut Notes,
    ) {
        let Some(slot) = self.find(n) else { return };
        match (slot.state, standing) {
            (State::Held, Standing::Gone) => {
                slot.state = State::Lost;
                self.releases.push((n, times.2 + LEASE));
            }
            (State::Waiting { .. }, Standing::Gone) => self.renew = true,
            _ => self.confirmed(n, standing, times, bug, notes),
        }
    }

    fn confirmed(
        &mut self,
        n: u8,
        standing: Standing,
        (end, sent, now): (u8, u8, u8),
        bug: Option<Bug>,
        notes: &mut Notes,
    ) {
        let Some(slot) = self.find(n) else { return };
        match (&mut slot.state, standing) {
            (State::Waiting { .. }, Standing::Held) => {
                (slot.end, slot.acked) = (end, sent);
                if bug == Some(Bug::RenewalDoesNotTellGrant) {
                    return;
                }
                notes.hint_repaired = true;
                self.grant(n, now, bug, notes);
            }
            (State::Waiting { ticket }, Standing::Waits(number)) => {
                *ticket = Some(ticket_of(number));
                (slot.end, slot.acked) = (end, sent);
            }
            (State::Held, Standing::Held) => {
                if now >= slot.deadline() && bug != Some(Bug::NoSelfFence) {
                    self.lose(n, now, notes);
                } else {
                    (slot.end, slot.acked) = (end, sent);
                }
            }
            (State::Held, Standing::Waits(ticket)) => match bug {
                Some(Bug::WaitsDemotesHolder) => {
                    slot.state = State::Waiting { ticket: Some(ticket_of(ticket)) };
                    (slot.end, slot.acked) = (end, sent);
                }
                Some(Bug::WaitsExtendsHolder) => (slot.end, slot.acked) = (end, sent),
                _ => {
                    slot.doubt = true;
                    self.renew = true;
                }
            },
            (State::Lost, Standing::Held) if bug == Some(Bug::LostIsRevived) => {
                slot.state = State::Held;
                (slot.end, slot.acked) = (end, sent);
            }
            _ => {}
        }
    }

    /// A hint, or a promotion in the answer to an own call.
    pub(crate) fn promoted(
        &mut self,
        n: u8,
        end: u8,
        now: u8,
        bug: Option<Bug>,
        notes: &mut Notes,
    ) {
        let Some(slot) = self.find(n) else {
            notes.stranger.push(n);
            if bug != Some(Bug::StrangerNotReleased) {
                self.releases.push((n, now + LEASE));
            }
            return;
        };
        match &mut slot.state {
            State::Joining { .. } if bug == Some(Bug::EarlyHintDropped) => {}
            State::Joining { hint, .. } => *hint = Some(end),
            State::Waiting { .. } if end >= slot.end || bug == Some(Bug::HintWithoutLeaseEnd) => {
                self.grant(n, now, bug, notes);
            }
            _ => {}
        }
    }

    fn grant(&mut self, n: u8, now: u8, bug: Option<Bug>, notes: &mut Notes) {
        let Some(slot) = self.find(n) else { return };
        if now >= slot.deadline() {
            notes.too_late = true;
            if bug != Some(Bug::LateGrantBelieved) {
                if !matches!(slot.state, State::Waiting { .. }) {
                    slot.state = State::Waiting { ticket: None };
                }
                self.renew = true;
                return;
            }
            slot.acked = now;
        }
        slot.state = State::Held;
        slot.taken = true;
    }

    fn lose(&mut self, n: u8, now: u8, notes: &mut Notes) {
        let Some(slot) = self.find(n) else { return };
        if now < slot.deadline() {
            notes.lost_without_cause = true;
        } else {
            notes.lost_at_deadline = true;
        }
        slot.state = State::Lost;
        self.releases.push((n, now + LEASE));
    }

    // ===== connection and time =====

    /// The connection broke, with these calls unanswered.
    pub(crate) fn disconnected(&mut self, calls: &[Call], now: u8, bug: Option<Bug>) {
        self.connected = false;
        for call in calls.iter().rev() {
            match &call.op {
                Op::Release { ids } if bug != Some(Bug::ReleaseNotRepeated) => {
                    for n in ids.iter().rev() {
                        self.releases.insert(0, (*n, now + LEASE));
                    }
                }
                Op::Renew { .. } | Op::Reassert { .. } => {
                    self.renewing = self.renewing.saturating_sub(1);
                }
                _ => {}
            }
        }
    }

    pub(crate) fn reconnected(&mut self, bug: Option<Bug>) {
        self.connected = true;
        self.renewing = 0;
        self.reasserts.clear();
        for slot in &mut self.slots {
            // What was granted on the connection of before may be lost with its server: the
            // repeated acquire asks, and only its answer counts.
            if let State::Joining { hint, .. } = &mut slot.state
                && bug != Some(Bug::KeptHintOutlivesConnection)
            {
                *hint = None;
            }
        }
        self.joins = self
            .slots
            .iter()
            .filter(|slot| match slot.state {
                State::Joining { sent, .. } => !sent || bug != Some(Bug::AcquireNotRepeated),
                _ => false,
            })
            .map(|slot| slot.n)
            .collect();
        self.resync =
            self.slots.iter().any(|slot| matches!(slot.state, State::Waiting { .. } | State::Held));
        self.renew = self.resync;
    }

    /// The watchdog looks.
    pub(crate) fn tick(&mut self, now: u8, bug: Option<Bug>, notes: &mut Notes) {
        let mut lost = Vec::new();
        for slot in &self.slots {
            match slot.state {
                State::Held if now >= slot.deadline() && bug != Some(Bug::NoSelfFence) => {
                    lost.push(slot.n);
                    continue;
                }
                State::Waiting { .. } if bug == Some(Bug::WaitersNotRenewed) => continue,
                State::Held | State::Waiting { .. } => {}
                _ => continue,
            }
            if now > slot.acked {
                self.renew |= self.renewing == 0;
            }
        }
        for n in lost {
            self.lose(n, now, notes);
        }
    }

    fn end_resync(&mut self) {
        if self.renewing == 0 && self.reasserts.is_empty() && !self.renew {
            self.resync = false;
        }
    }
}
