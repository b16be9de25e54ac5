//! Incoming replies and hints, routed to what they concern.

use std::time::Duration;

use smallvec::SmallVec;

use super::place::{Acked, Linger, Place};
use super::releases::Release;
use super::{Event, IDLE, Session, State};
use crate::call::Op;
use crate::id::PlaceId;
use crate::ledger::{Hint, PlaceStatus, Reply};
use crate::reject::RejectReason;
use crate::time::Time;

/// When a place is renewed again whose answer contradicted what is known of it.
const CHECK_AGAIN: Duration = Duration::from_millis(100);

/// When a call was sent whose reply has come.
#[derive(Clone, Copy, Debug)]
pub struct Sending {
    at: Time,
    leases_from: Time,
    late: bool,
}

impl Sending {
    /// The call was sent then, and the leases that its reply gives count from then on.
    #[must_use]
    pub const fn at(at: Time) -> Self {
        Self { at, leases_from: at, late: false }
    }

    /// The leases that the reply gives count from then on, where the backend knows of them by something other than the
    /// call. When they are renewed next depends on the sending alone.
    #[must_use]
    pub const fn leases_from(self, leases_from: Time) -> Self {
        Self { leases_from, ..self }
    }

    /// Calls that were sent later may have been carried out before this one.
    #[must_use]
    pub const fn late(self, late: bool) -> Self {
        Self { late, ..self }
    }
}

/// When a call was sent, and when its reply came.
#[derive(Clone, Copy)]
struct Timing {
    sent: Time,
    leases_from: Time,
    now: Time,
    late: bool,
}

impl Timing {
    const fn acked(self) -> Acked {
        Acked { sent: self.sent, leases_from: self.leases_from }
    }

    /// Whether a lease that the reply gives the place still runs.
    fn is_good(self, place: &Place) -> bool {
        self.now < self.leases_from + place.deadline().since(place.acked.leases_from)
    }
}

impl Session {
    /// Takes the reply to a call.
    pub fn handle_reply(&mut self, op: &Op, reply: &Reply, sending: Sending, now: Time) {
        let Sending { at: sent, leases_from, late } = sending;
        let timing = Timing { sent, leases_from, now, late };
        self.end_call(op);
        if self.reuse.is_on() {
            self.note_who_waits(op, reply, late, (sent, now));
        }
        if let Op::Acquire { leaving, .. } = op {
            self.end_releases(leaving);
        }
        if reply.usage.is_some() {
            self.seen = reply.usage;
            self.movement.handle_length();
        }
        match op {
            Op::Acquire { ids, .. } => self.process_joins(ids, reply, timing),
            Op::Renew { ids, .. } => {
                if reply.usage.is_some() && self.adapting.range().is_some() {
                    self.adapting.handle_usage(reply.usage);
                }
                for (id, status) in ids.iter().zip(&reply.statuses) {
                    self.process_renewal(id.n, *status, reply.lease_end, timing);
                }
            }
            Op::Reassert { proofs, .. } => {
                for ((id, _), status) in proofs.iter().zip(&reply.statuses) {
                    self.process_proof(*id, *status, reply.lease_end, timing);
                }
            }
            Op::Release { ids } => self.end_releases(ids),
            Op::Audit { .. } => self.process_audit(&reply.found, now),
        }
        if reply.usage.is_none() && !reply.granted.is_empty() {
            self.adapting.handle_grants();
        }
        for grant in &reply.granted {
            self.process_grant(grant.id, grant.lease_end, now);
        }
        if let Some(usage) = reply.usage {
            // It does not contain what the call granted.
            self.movement.handle_length();
            self.movement.handle_elsewhere(usage.waiting, self.counts.waiting());
        }
        self.end_refusals(op, now);
        if let Some(at) = self.probe.handle_reply(op, reply, self.counts.has_waiting(), now) {
            self.want(at);
        }
        self.end_resync();
        self.want_end(now);
    }

    /// Takes a refusal: the backend did nothing of this call, and the connection is good.
    pub fn handle_call_refused(&mut self, op: &Op, now: Time) {
        let (ids, proofs): (&[PlaceId], &[(PlaceId, u64)]) = match op {
            Op::Acquire { ids, .. } => (ids, &[]),
            Op::Reassert { proofs, .. } => (&[], proofs),
            Op::Release { .. } | Op::Renew { .. } | Op::Audit { .. } => (&[], &[]),
        };
        // A place that is not on the server needs no release.
        for id in ids.iter().chain(proofs.iter().map(|(id, _)| id)) {
            if let Some(place) = self.places.find(id.n)
                && let State::Joining { sent, .. } | State::Admitted { announced: sent } =
                    &mut place.state
            {
                sent.take_back();
            }
        }
        self.handle_call_error(op, now);
    }

    /// Takes a failure: this call may or may not have been carried out, and the connection is good.
    pub fn handle_call_error(&mut self, op: &Op, now: Time) {
        self.end_call(op);
        match op {
            Op::Acquire { leaving, ids, .. } => {
                self.put_releases_off(leaving, now);
                let places = ids.iter().filter_map(|id| self.places.index(id.n));
                let mut places: SmallVec<[(u64, usize); 4]> = places
                    .filter_map(|index| Some((self.places.get(index)?.arrival, index)))
                    .collect();
                places.sort_unstable();
                for (_, index) in places {
                    let place = self.places.get(index);
                    if place.is_some_and(Place::has_left) {
                        self.take_out(index, now);
                    } else if place.is_some_and(Place::is_joining) {
                        self.wait_or_fall_back(index, now);
                    }
                }
            }
            Op::Release { ids } => self.put_releases_off(ids, now),
            Op::Renew { lease_ms, ids } => {
                let at = self.renewals.handle_refused(ids.iter(), &mut self.places, *lease_ms, now);
                self.want(at);
            }
            Op::Reassert { lease_ms, proofs } => {
                for (id, _) in proofs {
                    self.end_restoring(id.n);
                }
                let ids = proofs.iter().map(|(id, _)| id);
                let at = self.renewals.handle_refused(ids, &mut self.places, *lease_ms, now);
                self.want(at);
            }
            Op::Audit { .. } => {
                self.audit.handle_refused();
                let at = self.releases.put_off(self.limits.lease(), now);
                self.want(at);
            }
        }
        self.end_resync();
        self.want_end(now);
    }

    /// Takes a hint: a place of this process was granted.
    pub fn handle_hint(&mut self, hint: Hint, now: Time) {
        let Hint { n, bound, claim, lease_end } = hint;
        self.handle_left_queue(n);
        self.adapting.handle_grants();
        let id = PlaceId { node: self.places.node(), poll_only: false, n, bound, claim };
        self.process_grant(id, lease_end, now);
    }

    /// Ends a call: it is answered, or will not be.
    pub(super) fn end_call(&mut self, op: &Op) {
        match op {
            Op::Renew { .. } | Op::Reassert { .. } => self.renewals.handle_answered(),
            Op::Audit { .. } => self.audit.handle_answered(),
            Op::Acquire { .. } | Op::Release { .. } => {}
        }
    }

    /// Releases the places on the server that are unknown here. A place whose release was acknowledged stands there
    /// again if this server had not heard of the release: nobody would renew it, and its permit would be idle for a
    /// lease. No number is used twice, so an unknown place is gone.
    fn process_audit(&mut self, found: &[PlaceId], now: Time) {
        for id in found {
            let place = self.places.with_number(id.n);
            let is_known =
                place.is_some_and(|p| p.is_there() || matches!(p.state, State::Releasing));
            if !is_known && !self.releases.has(*id) {
                self.release_stranger(*id, now);
            }
        }
    }

    /// Releases a place that a late reply shows, though the session has left it: its release may have been carried out
    /// before that call.
    fn release_late(&mut self, id: PlaceId, status: PlaceStatus, timing: Timing) {
        if timing.late && (status == PlaceStatus::Held || status.ticket().is_some()) {
            self.release_stranger(id, timing.now);
        }
    }

    /// Releases a place that is unknown here.
    fn release_stranger(&mut self, id: PlaceId, now: Time) {
        let until = now + self.limits.longest_lease().max(IDLE);
        if self.releases.push_stranger(Release { id, used: None, until }, self.places.len()) {
            self.want(now + IDLE);
        }
    }

    #[inline]
    fn process_joins(&mut self, ids: &[PlaceId], reply: &Reply, timing: Timing) {
        if self.adapting.range().is_some() {
            self.adapting.handle_usage(reply.usage);
        }
        let is_full = reply.usage.is_some()
            && reply.statuses.iter().any(|status| *status != PlaceStatus::Held);
        if is_full {
            self.note_turns(ids, reply, timing.now);
        }
        for (id, status) in ids.iter().zip(&reply.statuses) {
            self.process_join(*id, *status, reply, timing);
        }
        if is_full {
            self.refuse_hopeless(ids, reply, timing.now);
        }
    }

    fn process_join(&mut self, id: PlaceId, status: PlaceStatus, reply: &Reply, timing: Timing) {
        let Some(index) = self.places.index(id.n) else {
            return self.release_late(id, status, timing);
        };
        if self.places.get(index).is_some_and(|place| place.linger == Linger::Spare) {
            return self.process_spare(
                index,
                status,
                (reply.lease_end, timing.acked()),
                timing.now,
            );
        }
        let hint = match self.places.get(index) {
            Some(Place { state: State::Joining { hint, .. }, .. }) => *hint,
            Some(place) if place.is_live() => return,
            _ => return self.release_late(id, status, timing),
        };
        let seen = reply.usage;
        match status {
            PlaceStatus::Held => {
                self.acknowledge(index, reply.lease_end, timing.acked());
                self.grant(index, timing.now);
            }
            PlaceStatus::Waiting(ticket) | PlaceStatus::WaitingFor(ticket, _) => {
                if let (PlaceStatus::WaitingFor(_, limit), Some(place)) =
                    (status, self.places.get_mut(index))
                {
                    place.full = Some(limit);
                }
                self.acknowledge(index, reply.lease_end, timing.acked());
                self.note_turn_in_line(index);
                self.set(index, State::Waiting { ticket: Some(ticket) });
                self.events.push(Event::Progress(index));
                if hint.is_some_and(|lease_end| lease_end >= reply.lease_end) {
                    self.grant_after_wait(index, timing.now);
                } else {
                    self.want_renewal(index);
                    if let Some(end) = self.quarantined_until().filter(|end| timing.now < *end) {
                        self.want(end);
                    }
                }
                self.adopt_late(index, timing.now);
            }
            PlaceStatus::NoPermit => {
                let index = self.exchange_with_last(index);
                let reason = self.blame(index, RejectReason::Limit, seen, timing.sent);
                self.refuse(index, reason, seen);
            }
            PlaceStatus::QueueFull => {
                let index = self.exchange_with_last(index);
                let reason = self.blame(index, RejectReason::QueueFull, seen, timing.sent);
                self.refuse(index, reason, seen);
            }
            PlaceStatus::NoStart(opens_in) => {
                let reason = self.blame(index, RejectReason::Rate, seen, timing.sent);
                self.refuse(index, reason, seen);
                self.note_opening(index, timing.now + Duration::from_millis(opens_in));
            }
            PlaceStatus::NoBudget(budget, opens_in) => {
                let reason = self.blame(index, RejectReason::Budget(budget), seen, timing.sent);
                self.refuse(index, reason, seen);
                self.note_opening(index, timing.now + Duration::from_millis(opens_in));
            }
            PlaceStatus::TenantFull => self.refuse(index, RejectReason::TenantLimit, seen),
            PlaceStatus::LimitFull(limit) => {
                self.refuse(index, RejectReason::FurtherLimit(limit), seen);
            }
            PlaceStatus::NeverFits => self.refuse(index, RejectReason::CostTooHigh, seen),
            PlaceStatus::Gone => {}
        }
    }

    fn process_renewal(&mut self, n: u64, status: PlaceStatus, lease_end: u64, timing: Timing) {
        let Some(place) = self.places.find(n) else { return };
        match (place.state, status) {
            (State::Held, PlaceStatus::Gone) if place.granted_at > timing.sent => {
                place.check = true;
                self.renewals.want();
            }
            (State::Held | State::Waiting { .. }, PlaceStatus::Gone) => {
                self.check_revocation(n, timing.now)
            }
            _ => self.confirm(n, status, lease_end, timing),
        }
    }

    fn process_proof(&mut self, id: PlaceId, status: PlaceStatus, lease_end: u64, timing: Timing) {
        match status {
            PlaceStatus::Gone => self.handle_replaced_gone(id.n),
            // It was granted before the call came that was to replace it.
            PlaceStatus::Held => self.take_back(id.n, timing.now),
            _ => {}
        }
        self.end_restoring(id.n);
        let Some(index) = self.places.index(id.n) else {
            return self.release_late(id, status, timing);
        };
        let Some(place) = self.places.get_mut(index) else { return };
        // What it took is lost with the data.
        place.recounted |= (place.state, status) == (State::Held, PlaceStatus::Held);
        match (place.state, status) {
            (State::Held, PlaceStatus::Gone) => self.expire(index, timing.now),
            (State::Waiting { .. }, PlaceStatus::Gone) => self.renewals.want(),
            _ if !place.is_live() => self.release_late(id, status, timing),
            _ => self.confirm(id.n, status, lease_end, timing),
        }
    }

    /// A renewal or a proof found the place on the server.
    fn confirm(&mut self, n: u64, status: PlaceStatus, lease_end: u64, timing: Timing) {
        let Some(index) = self.places.index(n) else { return };
        let Some(place) = self.places.get_mut(index) else { return };
        match (place.state, status) {
            (State::Waiting { .. }, PlaceStatus::Held) => {
                self.acknowledge(index, lease_end, timing.acked());
                self.grant_after_wait(index, timing.now);
            }
            // A permit in flight by policy is counted from now on. If the reply is too old to be believed, the next one
            // counts: nothing takes the permit from the request.
            (State::Admitted { .. }, PlaceStatus::Held) if timing.is_good(place) => {
                self.acknowledge(index, lease_end, timing.acked());
                self.set(index, State::Held);
                self.want_renewal(index);
            }
            (State::Waiting { .. }, PlaceStatus::Waiting(ticket)) => {
                self.acknowledge(index, lease_end, timing.acked());
                self.set(index, State::Waiting { ticket: Some(ticket) });
                self.want_renewal(index);
            }
            (State::Held, PlaceStatus::Held) => {
                let is_over = timing.now >= place.lease_over();
                if timing.now >= place.deadline() {
                    self.expire(index, timing.now);
                }
                if !is_over {
                    self.acknowledge(index, lease_end, timing.acked());
                    self.want_renewal(index);
                }
            }
            (State::Held, PlaceStatus::Waiting(_)) => {
                // The next question comes soon, but not at once: that could go on for the whole lease.
                place.check = true;
                self.want(timing.now + CHECK_AGAIN);
            }
            _ => {}
        }
        self.adopt_late(index, timing.now);
    }

    fn end_restoring(&mut self, n: u64) {
        self.places.find(n).into_iter().for_each(|place| place.restoring = false);
    }

    fn acknowledge(&mut self, index: usize, lease_end: u64, acked: Acked) {
        if let Some(place) = self.places.get_mut(index) {
            place.lease_end = lease_end;
            place.acked = acked;
        }
    }

    fn want_renewal(&mut self, index: usize) {
        if let Some(at) = self.places.get(index).map(|place| place.acked.sent + place.interval()) {
            self.want(at);
        }
    }

    fn process_grant(&mut self, id: PlaceId, lease_end: u64, now: Time) {
        self.take_back(id.n, now);
        let Some(index) = self.places.index(id.n) else {
            return self.release_stranger(id, now);
        };
        let Some(place) = self.places.get_mut(index) else { return };
        match &mut place.state {
            State::Joining { hint, .. } => *hint = Some(lease_end),
            State::Waiting { .. } if lease_end >= place.lease_end => {
                self.grant_after_wait(index, now)
            }
            _ => {}
        }
    }

    /// Gives the place that waits its permit. In a pause, a process that does not know of it yet granted that: the backend
    /// counts it, and the end of the pause asks for it again.
    fn grant_after_wait(&mut self, index: usize, now: Time) {
        if self.limits.paused_until().is_some_and(|until| now < until) {
            self.places.get_mut(index).into_iter().for_each(|place| place.held_back = true);
            self.want_renewal(index);
        } else {
            self.grant(index, now);
        }
    }

    /// Gives the place its permit. If the news is too old to believe, the session asks first.
    fn grant(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get_mut(index) else { return };
        if now >= place.deadline() {
            if place.is_waiting() {
                self.renewals.want();
            } else {
                self.wait_again(index, now);
            }
            return;
        }
        let index = self.exchange_with_first(index);
        if let (Some(queue), Some(place)) = (&mut self.outage, self.places.get(index))
            && place.waits_locally()
        {
            queue.leave(index, place);
        }
        let Some(place) = self.places.get(index) else { return };
        if place.turn.is_some() {
            self.note_grant(index, now);
        }
        let Some(place) = self.places.get_mut(index) else { return };
        place.held_at = now;
        place.granted_at = now;
        if place.options.is_timed() {
            self.note_start(index, now);
        }
        self.set(index, State::Held);
        self.events.push(Event::Progress(index));
        self.want_renewal(index);
    }

    /// Ends releases that were carried out.
    fn end_releases(&mut self, ids: &[PlaceId]) {
        self.releases.handle_done(ids.len());
        for id in ids {
            self.movement.handle_left(id.n);
            self.answer_release(id.n, true);
        }
    }

    /// Keeps releases that were refused for later.
    fn put_releases_off(&mut self, ids: &[PlaceId], now: Time) {
        if ids.is_empty() {
            return;
        }
        let (dropped, at) = self.releases.handle_refused(ids.len(), self.limits.lease(), now);
        dropped.iter().for_each(|id| self.handle_left_queue(id.n));
        at.into_iter().for_each(|at| self.want(at));
        for id in ids {
            self.answer_release(id.n, false);
        }
    }

    /// The backend carried a call out, so refused releases are tried again sooner.
    fn end_refusals(&mut self, op: &Op, now: Time) {
        let has_released = match op {
            Op::Audit { .. } => return,
            Op::Release { ids } => !ids.is_empty(),
            Op::Acquire { leaving, .. } => !leaving.is_empty(),
            Op::Renew { .. } | Op::Reassert { .. } => false,
        };
        if let Some(at) = self.releases.end_refusals(has_released, self.limits.lease(), now) {
            self.want(at);
        }
    }

    fn answer_release(&mut self, n: u64, acknowledged: bool) {
        let Some(index) = self.places.index(n) else { return };
        if self.places.get(index).is_some_and(|place| matches!(place.state, State::Releasing)) {
            self.set(index, State::Released { acknowledged });
            self.events.push(Event::Released(index));
        }
    }
}
