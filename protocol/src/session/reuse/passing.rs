//! The permits themselves: handed to the next request, or kept for it.

use std::collections::BTreeSet;

use super::Terms;
use crate::ledger::PlaceStatus;
use crate::session::options::AcquireOptions;
use crate::session::place::{Linger, Place, Sent};
use crate::session::places::serial_of;
use crate::session::{Event, Session, State};
use crate::time::Time;

impl Session {
    /// Whether a permit is good for one more request: more than half of the time for which one may use it is left.
    fn is_good_for_another(place: &Place, now: Time) -> bool {
        let half = (place.options.lease - place.options.linger()) / 2;
        !place.restoring && now + half < place.acked + place.reliance()
    }

    /// Gives a new request the permit that was used last, if one is kept for it.
    #[inline]
    pub(in crate::session) fn take_kept(
        &mut self,
        limit: u32,
        options: &AcquireOptions,
        now: Time,
    ) -> Option<usize> {
        if options.reuse_ms == 0 { None } else { self.take_kept_with(limit, options, now) }
    }

    #[inline(never)]
    fn take_kept_with(&mut self, limit: u32, options: &AcquireOptions, now: Time) -> Option<usize> {
        self.begin_reuse(now);
        let reuse = self.reuse.as_ref()?;
        if reuse.kept.is_empty() && reuse.spare.is_empty() {
            return None;
        }
        if self.limits.is_draining() || !self.is_alone(limit, options, now) {
            return None;
        }
        let Some(n) = reuse.kept.back().copied() else {
            return self.take_spare(limit, options, now);
        };
        // An earlier request could not use what is kept, so that is given back.
        if !reuse.queue.is_empty() {
            return None;
        }
        let index = self.places.index(n)?;
        let place = self.places.get_mut(index)?;
        if place.limit != limit
            || place.options != *options
            || !Self::is_good_for_another(place, now)
        {
            return None;
        }
        place.linger = Linger::No;
        place.taken = false;
        place.queued = false;
        place.held_at = now;
        let reuse = self.reuse.as_mut()?;
        reuse.kept.pop_back();
        reuse.passed_on += 1;
        self.ask_ahead(n, options.reuse(), now);
        Some(index)
    }

    /// Gives a new request a place that is on its way without one, so that a process asks for no more permits than it
    /// has requests.
    fn take_spare(&mut self, limit: u32, options: &AcquireOptions, now: Time) -> Option<usize> {
        let reuse = self.reuse.as_ref()?;
        let terms = Terms::new(limit, options);
        if reuse.by_terms.keys().any(|other| *other != terms) {
            // The request would have its place before some that came earlier.
            return None;
        }
        let n = reuse.spare.front().copied()?;
        let index = self.places.index(n)?;
        let place = self.places.get_mut(index)?;
        if place.limit != limit || place.options != *options {
            return None;
        }
        place.linger = Linger::No;
        place.taken = false;
        place.queued = false;
        (place.acked, place.held_at) = (now, now);
        let arrival = self.places.next_arrival();
        self.places.get_mut(index)?.arrival = arrival;
        self.reuse.as_mut()?.spare.pop_front();
        self.follow_queue(index, true);
        Some(index)
    }

    /// A place without a request is answered: its permit goes to the next request, or back.
    pub(in crate::session) fn spare_joined(
        &mut self,
        index: usize,
        status: PlaceStatus,
        (lease_end, sent): (u64, Time),
        now: Time,
    ) {
        let state = match status {
            PlaceStatus::Held => State::Held,
            PlaceStatus::Waiting(ticket) => State::Waiting { ticket: Some(ticket) },
            // The backend does not have it.
            _ => State::Closed,
        };
        let Some(place) = self.places.get_mut(index) else { return };
        if let Some(reuse) = &mut self.reuse {
            reuse.forget(place);
        }
        (place.lease_end, place.acked) = (lease_end, sent);
        (place.held_at, place.granted_at) = (now, now);
        place.linger = Linger::No;
        self.set(index, state);
        self.handle_leave(index, now);
    }

    /// The place at `index` is granted. If another request of the same terms came earlier, the two exchange their
    /// places. Returns the index of the request that has the permit.
    #[inline]
    pub(in crate::session) fn first_in_turn(&mut self, index: usize) -> usize {
        if self.reuse.is_none() { index } else { self.exchange_with_first(index) }
    }

    /// The place at `index` is refused. If a later request of the same terms has a place that was asked for earlier,
    /// that request is refused instead. Returns its index.
    #[inline]
    pub(in crate::session) fn last_in_turn(&mut self, index: usize) -> usize {
        if self.reuse.is_none() { index } else { self.exchange_with_last(index) }
    }

    #[inline(never)]
    fn exchange_with_first(&mut self, index: usize) -> usize {
        let Some(first) = self.same_terms(index).and_then(BTreeSet::first) else { return index };
        self.exchange_with(index, first.1)
    }

    #[inline(never)]
    fn exchange_with_last(&mut self, index: usize) -> usize {
        let Some(last) = self.same_terms(index).and_then(BTreeSet::last) else { return index };
        let [own, other] = [index, last.1].map(|index| self.places.get(index));
        match (own, other) {
            (Some(own), Some(other)) if serial_of(other.n) < serial_of(own.n) => {
                self.exchange_with(index, last.1)
            }
            _ => index,
        }
    }

    /// The requests without a permit that ask for the same as the one at `index`.
    fn same_terms(&self, index: usize) -> Option<&BTreeSet<(u64, usize)>> {
        self.reuse.as_ref()?.by_terms.get(&Terms::of(self.places.get(index)?))
    }

    /// Exchanges the places of two requests without a permit. Returns the index of the other one.
    fn exchange_with(&mut self, index: usize, other: usize) -> usize {
        let [own, before] = [index, other].map(|index| self.places.get(index).map(|p| p.state));
        let (Some(own), Some(before)) = (own, before) else { return index };
        if other == index {
            return index;
        }
        self.places.exchange(index, other);
        self.set(other, own);
        self.set(index, before);
        self.events.push(Event::Progress(index));
        other
    }

    /// Whether the permit at `index`, whose request leaves, may go to another request of this process.
    #[inline]
    pub(in crate::session) fn may_pass_on(&self, index: usize, now: Time) -> bool {
        self.reuse.is_some() && self.may_pass_on_now(index, now)
    }

    #[inline(never)]
    fn may_pass_on_now(&self, index: usize, now: Time) -> bool {
        let (Some(reuse), Some(place)) = (&self.reuse, self.places.get(index)) else {
            return false;
        };
        if place.options.reuse_ms == 0
            || !matches!(place.state, State::Held)
            || place.has_left()
            // No recall reaches such a place.
            || place.poll_only
            || !Self::is_good_for_another(place, now)
            || !self.is_alone(place.limit, &place.options, now)
        {
            return false;
        }
        let Some((_, first)) = reuse.queue.first() else {
            return !self.limits.is_draining();
        };
        // Only the backend knows whose turn it is among tenants.
        reuse.has_one_claim()
            && self
                .places
                .get(*first)
                .is_some_and(|other| (other.limit, other.options) == (place.limit, place.options))
    }

    /// Gives the permit at `index` to the request of this process that has waited longest, or keeps it.
    #[inline(never)]
    pub(in crate::session) fn pass_on(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        let (n, within) = (place.n, place.options.reuse());
        self.ask_ahead(n, within, now);
        let Some(reuse) = &mut self.reuse else { return };
        let Some((_, to)) = reuse.queue.first().copied() else {
            let is_first = reuse.kept.is_empty();
            let known = reuse.alone.map_or(now, |alone| alone.heard + within);
            reuse.kept.push_back(n);
            if let Some(place) = self.places.get_mut(index) {
                place.linger = Linger::Kept(now + within);
                place.taken = true;
            }
            if is_first {
                self.want(known);
            }
            return;
        };
        let Some(before) = self.places.get(to).map(|place| place.state) else { return };
        reuse.passed_on += 1;
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
                place.linger = Linger::Spare;
                place.taken = true;
            }
            self.set(index, before);
            if let (Some(reuse), Some(place)) = (&mut self.reuse, self.places.get(index)) {
                reuse.spare.push_back(place.n);
            }
            return;
        }
        // Its place leaves the queue.
        self.set(index, before);
        self.take_out(index, now);
    }

    /// Whether permits are kept that no request of this process will get.
    #[inline]
    pub(in crate::session) fn is_kept_for_nobody(&self) -> bool {
        self.reuse.as_ref().is_some_and(|reuse| {
            let last = reuse.kept.back().and_then(|n| self.places.get(self.places.index(*n)?));
            last.is_some_and(|last| {
                !reuse.queue.is_empty()
                    || reuse.alone.is_none_or(|alone| !self.keeps(alone, last.limit))
            })
        })
    }

    /// Gives back all places that have no request.
    pub(in crate::session) fn release_kept(&mut self, now: Time) {
        let Some(reuse) = &mut self.reuse else { return };
        for n in std::mem::take(&mut reuse.kept).into_iter().chain(std::mem::take(&mut reuse.spare))
        {
            if let Some(index) = self.places.index(n) {
                self.take_out(index, now);
            }
        }
    }

    /// Gives back permits that were not used for some time, or will have been before long; and all of them once what
    /// is known of other processes is too old.
    pub(in crate::session) fn release_idle(&mut self, now: Time) {
        while let Some(reuse) = &self.reuse
            && let Some(n) = reuse.kept.front().copied()
        {
            let Some(index) = self.places.index(n) else { return };
            let Some(place) = self.places.get(index) else { return };
            let Linger::Kept(until) = place.linger else { return };
            let within = place.options.reuse();
            let known = reuse.alone.map_or(now, |alone| alone.heard + within);
            if now < known && now + within / 2 < until {
                return self.want(until.min(known));
            }
            self.take_out(index, now);
        }
    }
}
