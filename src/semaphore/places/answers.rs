//! What comes in: answers to calls, and hints.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    AFTER_LEASE_END, DEAF_RENEWAL, IDLE, Places, State, WAITING_RENEWAL, find, release_of,
    slot_index,
};
use crate::backend::{Answer, Listing, Op};
use crate::error::{BackendError, FullReason};
use crate::ledger::{PlaceId, Reply, Standing};

impl Places {
    /// An answer came for a call that was sent at `sent`.
    pub(in crate::semaphore) fn answered(
        &mut self,
        op: &Op,
        answer: Answer,
        sent: Instant,
        now: Instant,
    ) {
        if matches!(op, Op::Renew { .. } | Op::Reassert { .. }) {
            self.renewing = self.renewing.saturating_sub(1);
        }
        match answer {
            Answer::Reply { reply, late } => {
                self.replied(op, &reply, late, sent, now);
            }
            Answer::Failed(error) => self.failed(op, &error, now),
            Answer::Listing(listing) => self.recounted(&listing, now),
            _ => {}
        }
        self.end_resync();
    }

    fn replied(&mut self, op: &Op, reply: &Reply, late: bool, sent: Instant, now: Instant) {
        // An answer in short says nothing of it.
        if (reply.in_use, reply.waiting) != (0, 0) {
            self.seen = (reply.in_use, reply.waiting);
        }
        match op {
            Op::Acquire { leaving, ids, .. } => {
                self.left(leaving);
                for (id, standing) in ids.iter().zip(&reply.standings) {
                    self.joined(*id, *standing, reply, late, sent, now);
                }
            }
            Op::Renew { ids, .. } => {
                for (id, standing) in ids.iter().zip(&reply.standings) {
                    self.renewed(id.n, *standing, reply.lease_end, sent, now);
                }
            }
            Op::Reassert { proofs, .. } => {
                for ((id, _), standing) in proofs.iter().zip(&reply.standings) {
                    self.reasserted(id.n, *standing, reply.lease_end, sent, now);
                }
            }
            Op::Release { ids } => self.left(ids),
            _ => {}
        }
        for grant in &reply.granted {
            self.promoted(grant.id, grant.lease_end, now);
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

    /// What stands there after a reconnect. A place that was given back, and acknowledged, stands
    /// there again if the server that is asked now had not heard of that: nobody would renew it, and
    /// its permit would be idle for a lease. No number is used twice, so what is not known is gone.
    fn recounted(&mut self, listing: &Listing, now: Instant) {
        for (id, ..) in listing.places.iter().filter(|(id, ..)| id.node == self.node) {
            let slot = find(&mut self.slots, id.n);
            if !slot.is_some_and(|slot| slot.is_there() || matches!(slot.state, State::Releasing)) {
                self.releases.push_back((*id, now + IDLE));
            }
        }
    }

    fn joined(
        &mut self,
        id: PlaceId,
        standing: Standing,
        reply: &Reply,
        late: bool,
        sent: Instant,
        now: Instant,
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
                self.grant(id.n, now);
            }
            Standing::Waits(ticket) => {
                slot.lease_end = reply.lease_end;
                slot.acked = sent;
                slot.state = State::Waiting { ticket: Some(ticket) };
                self.woken.extend(slot.waker.take());
                let at = slot.acked + slot.interval();
                if hint.is_some_and(|lease_end| lease_end >= reply.lease_end) {
                    self.grant(id.n, now);
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
                self.woken.extend(slot.waker.take());
            }
            Standing::Gone => {}
        }
    }

    fn renewed(&mut self, n: u64, standing: Standing, lease_end: u64, sent: Instant, now: Instant) {
        let Some(slot) = find(&mut self.slots, n) else { return };
        match (&slot.state, standing) {
            (State::Held, Standing::Gone) if slot.held_at > sent => {
                slot.doubt = true;
                self.renew = true;
            }
            (State::Held | State::Waiting { .. }, Standing::Gone) => self.gone(n),
            _ => self.confirmed(n, standing, lease_end, sent, now),
        }
    }

    fn reasserted(
        &mut self,
        n: u64,
        standing: Standing,
        lease_end: u64,
        sent: Instant,
        now: Instant,
    ) {
        let Some(slot) = find(&mut self.slots, n) else { return };
        match (&slot.state, standing) {
            (State::Held, Standing::Gone) => self.lose(slot_index(n), now),
            (State::Waiting { .. }, Standing::Gone) => self.renew = true,
            _ => self.confirmed(n, standing, lease_end, sent, now),
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
    ) {
        let Some(slot) = find(&mut self.slots, n) else { return };
        let interval = slot.interval();
        match (&mut slot.state, standing) {
            (State::Waiting { .. } | State::Admitted { .. }, Standing::Held) => {
                slot.lease_end = lease_end;
                slot.acked = sent;
                self.grant(n, now);
            }
            (State::Waiting { ticket }, Standing::Waits(number)) => {
                *ticket = Some(number);
                slot.lease_end = lease_end;
                slot.acked = sent;
                self.want(sent + interval);
            }
            (State::Held, Standing::Held) => {
                if now >= slot.deadline() {
                    self.lose(slot_index(n), now);
                } else {
                    slot.lease_end = lease_end;
                    slot.acked = sent;
                    self.want(sent + interval);
                }
            }
            (State::Held, Standing::Waits(_)) => {
                // Asked again soon, but not at once: that could go on as long as the lease.
                slot.doubt = true;
                self.want(now + DEAF_RENEWAL);
            }
            _ => {}
        }
    }

    /// A hint, or a promotion in the answer to a call of this node's own.
    pub(in crate::semaphore) fn hint(&mut self, n: u64, lease_end: u64, now: Instant) {
        self.promoted(PlaceId { node: self.node, deaf: false, n }, lease_end, now);
    }

    fn promoted(&mut self, id: PlaceId, lease_end: u64, now: Instant) {
        let Some(slot) = find(&mut self.slots, id.n) else {
            self.releases.push_back((id, now + IDLE));
            return;
        };
        match &mut slot.state {
            State::Joining { hint, .. } => *hint = Some(lease_end),
            State::Waiting { .. } if lease_end >= slot.lease_end => self.grant(id.n, now),
            _ => {}
        }
    }

    /// The place has a permit; if that is news too old to believe, asks first.
    fn grant(&mut self, n: u64, now: Instant) {
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
        self.woken.extend(slot.waker.take());
        let at = slot.acked + slot.interval();
        self.want(at);
    }

    pub(super) fn lose(&mut self, index: usize, now: Instant) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        slot.state = State::Lost;
        self.counts.lost();
        self.woken.extend(slot.lost_wakers.drain(..));
        self.releases.push_back(release_of(self.node, slot, now));
    }

    /// Releases were carried out.
    fn left(&mut self, ids: &[PlaceId]) {
        // Answers come in the order of the calls.
        self.releasing.drain(..ids.len().min(self.releasing.len()));
        for id in ids {
            self.released(id.n, &Ok(()));
        }
    }

    /// Releases were refused.
    fn stayed(&mut self, ids: &[PlaceId], error: &BackendError, now: Instant) {
        if ids.is_empty() {
            return;
        }
        let refused = self.releasing.drain(..ids.len().min(self.releasing.len()));
        self.deferred.extend(refused);
        self.want(now + WAITING_RENEWAL);
        for id in ids {
            self.released(id.n, &Err(error.clone()));
        }
    }

    pub(super) fn released(&mut self, n: u64, result: &Result<(), BackendError>) {
        if let Some(slot) = find(&mut self.slots, n)
            && matches!(slot.state, State::Releasing)
        {
            slot.state = State::Released(result.clone());
            self.woken.extend(slot.waker.take());
        }
    }

    fn failed(&mut self, op: &Op, error: &BackendError, now: Instant) {
        match op {
            Op::Acquire { leaving, ids, .. } => {
                self.stayed(leaving, error, now);
                for id in ids {
                    if find(&mut self.slots, id.n).is_some() {
                        self.turned_away(slot_index(id.n), error, now);
                    }
                }
            }
            Op::Release { ids } => self.stayed(ids, error, now),
            // Due again at the next look, well before the lease ends.
            _ => {}
        }
    }

    /// A connection broke with this call unanswered: it may or may not have been carried out. What it
    /// was about is taken up again when there is a connection.
    pub(in crate::semaphore) fn unanswered(&mut self, op: &Op) {
        if matches!(op, Op::Renew { .. } | Op::Reassert { .. }) {
            self.renewing = self.renewing.saturating_sub(1);
        }
    }
}

const fn lease_ms_of(op: &Op) -> u64 {
    match op {
        Op::Acquire { lease_ms, .. }
        | Op::Renew { lease_ms, .. }
        | Op::Reassert { lease_ms, .. } => *lease_ms,
        _ => 0,
    }
}
