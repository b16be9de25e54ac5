//! Permits that are passed on: what the session does with what [`Reuse`](super::reuse::Reuse) decides.

use super::place::{Acked, Sent, State};
use super::reuse::{Heard, Idle, Next};
use super::{Event, Session};
use crate::call::Op;
use crate::ledger::{PlaceStatus, Reply};
use crate::time::Time;

impl Session {
    /// Notes what a reply says of who waits.
    #[inline(never)]
    pub(super) fn note_who_waits(
        &mut self,
        op: &Op,
        reply: &Reply,
        late: bool,
        (sent, now): (Time, Time),
    ) {
        // A permit in use here that the backend does not count is missing in the reply.
        let is_counted = !self.renewals.is_resync() && !self.counts.has_admitted();
        let is_quarantined = self.quarantined_until().is_some_and(|end| now < end);
        let has_hints = !self.places.is_poll_only() && !self.is_outage();
        let is_trusted = is_counted && has_hints && !is_quarantined;
        let heard = Heard { op, reply, late, sent, now, is_trusted };
        self.reuse.handle_reply(&heard, &self.places, &self.limits, &self.audit);
    }

    /// The permit at `index`, whose request leaves, goes to the request of this process that has waited longest, or is
    /// kept for the next one.
    pub(super) fn pass_on(&mut self, index: usize, now: Time) {
        let to = match self.reuse.pass_on(index, now, &mut self.places) {
            Next::Request(to) => to,
            Next::Kept(until) => return until.into_iter().for_each(|at| self.want(at)),
        };
        let Some(before) = self.places.get(to).map(|place| place.state) else { return };
        // The permit takes its number along.
        self.places.exchange(index, to);
        self.set(to, State::Held);
        if let Some(place) = self.places.get_mut(to) {
            place.held_at = now;
        }
        self.events.push(Event::Progress(to));
        if matches!(before, State::Joining { sent: Sent::Once | Sent::Again, .. }) {
            // Its place is on its way, so the next request need not ask.
            if let Some(place) = self.places.get_mut(index) {
                self.reuse.spare(place);
            }
            self.set(index, before);
        } else {
            // Its place leaves the queue.
            self.set(index, before);
            self.take_out(index, now);
        }
    }

    /// A place without a request is answered: its permit goes to the next request, or back.
    pub(super) fn process_spare(
        &mut self,
        index: usize,
        status: PlaceStatus,
        (lease_end, acked): (u64, Acked),
        now: Time,
    ) {
        let state = match status {
            PlaceStatus::Held => State::Held,
            PlaceStatus::Waiting(ticket) | PlaceStatus::WaitingFor(ticket, _) => {
                State::Waiting { ticket: Some(ticket) }
            }
            // The backend does not have it.
            _ => State::Closed,
        };
        let Some(place) = self.places.get_mut(index) else { return };
        self.reuse.forget(place);
        place.end_spare();
        (place.lease_end, place.acked) = (lease_end, acked);
        (place.held_at, place.granted_at) = (now, now);
        self.set(index, state);
        self.handle_leave(index, now);
    }

    /// The place at `index` is granted. If another request of the same terms came earlier, the two exchange their
    /// places. Returns the index of the request that has the permit.
    #[inline]
    pub(super) fn exchange_with_first(&mut self, index: usize) -> usize {
        let first = self.reuse.first_in_turn(index, &self.places);
        if first == index { index } else { self.exchange(index, first) }
    }

    /// The place at `index` is refused. If a later request of the same terms has a place that was asked for earlier,
    /// that request is refused instead. Returns its index.
    #[inline]
    pub(super) fn exchange_with_last(&mut self, index: usize) -> usize {
        let last = self.reuse.last_in_turn(index, &self.places);
        if last == index { index } else { self.exchange(index, last) }
    }

    /// Exchanges the places of two requests without a permit. Returns the index of the other one.
    #[inline(never)]
    fn exchange(&mut self, index: usize, other: usize) -> usize {
        let [own, before] = [index, other].map(|index| self.places.get(index).map(|p| p.state));
        let (Some(own), Some(before)) = (own, before) else { return index };
        self.places.exchange(index, other);
        self.set(other, own);
        self.set(index, before);
        self.events.push(Event::Progress(index));
        other
    }

    /// Whether permits are kept that no request of this process will get.
    #[inline]
    pub(super) fn is_kept_for_nobody(&self) -> bool {
        self.reuse.is_kept_for_nobody(&self.places, &self.limits)
    }

    /// Gives back all places that have no request.
    pub(super) fn release_kept(&mut self, now: Time) {
        for n in self.reuse.take_all() {
            if let Some(index) = self.places.index(n) {
                self.take_out(index, now);
            }
        }
    }

    /// Gives back the permits that were kept for long enough.
    pub(super) fn release_idle(&mut self, now: Time) {
        while let Some(idle) = self.reuse.poll_idle(now, &self.places) {
            match idle {
                Idle::Release(index) => self.take_out(index, now),
                Idle::Until(at) => return self.want(at),
            }
        }
    }

    /// Nothing is known of other processes from now on.
    pub(super) fn end_reuse(&mut self, now: Time) {
        self.release_kept(now);
        self.reuse.handle_break();
    }
}
