//! Permits that go from one request of this process straight to its next one (rule 9).
//!
//! A permit that is passed on stays one place of the backend, so nothing is counted twice and nothing is sent. It is
//! passed on only while this process knows that no other one waits, and for a bounded time after the call whose reply
//! said so. The idea is that of locks that stay with the node that used them last until another node asks, as in GFS2
//! ("glocks") and in NFSv4 (delegations); that it must not be done while others wait is what lock cohorting
//! (Dice, Marathe and Shavit, 2012) bounds by a count and this by a message.
//!
//! The session tells [`Reuse`] what happens, asks it what to do with a place, and does that. Nothing outside this folder
//! touches its fields.

mod line;
mod others;
mod own_waiting;
mod stock;

use std::time::Duration;

use self::line::{Line, Terms};
use self::others::Others;
use self::stock::Stock;
use super::audit::Audit;
use super::limits::Limits;
use super::options::AcquireOptions;
use super::place::{Acked, Place};
use super::places::{Places, serial_of};
use super::{Session, State};
use crate::call::Op;
use crate::ledger::Reply;
use crate::time::Time;

/// What a session needs to pass permits on. The first request that asks for it creates it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Reuse(Option<Box<Parts>>);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Parts {
    /// Whether other processes wait.
    others: Others,
    /// The requests of this process that have no permit.
    line: Line,
    /// The places that no request has.
    stock: Stock,
    /// How many permits went to another request since the last [`Reuse::take_passed_on`].
    passed_on: u64,
}

/// A reply, and what the session knows beside it.
pub(super) struct Heard<'a> {
    pub(super) op: &'a Op,
    pub(super) reply: &'a Reply,
    /// Calls that were sent later may have been carried out before this one.
    pub(super) late: bool,
    pub(super) sent: Time,
    pub(super) now: Time,
    /// Hints arrive, and the backend counts every permit of this process and grants them.
    pub(super) is_trusted: bool,
}

/// Where a permit goes whose request leaves.
pub(super) enum Next {
    /// To the request at this index.
    Request(usize),
    /// It is kept. Others are kept already, or what is known of other processes ends then.
    Kept(Option<Time>),
}

/// What becomes of kept permits as time passes.
pub(super) enum Idle {
    /// The permit at this index is given back.
    Release(usize),
    /// Nothing happens until then.
    Until(Time),
}

impl Reuse {
    /// Whether any request has asked for it.
    #[inline]
    pub(super) const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    fn begin(&mut self, places: &Places, now: Time) -> &mut Parts {
        self.0.get_or_insert_with(|| {
            // Earlier recalls left no trace.
            let mut parts = Parts { others: Others::starting_at(now), ..Parts::default() };
            for (index, place) in places.iter() {
                parts.line.follow(index, place, true);
            }
            Box::new(parts)
        })
    }

    /// Another process waits: kept permits are given back, and nothing is passed on until the reply to a call that is
    /// sent from now on says that no other process waits.
    pub(super) fn handle_recall(&mut self, now: Time) {
        self.0.iter_mut().for_each(|parts| parts.others.handle_recall(now));
    }

    /// Notes what a reply says of who waits.
    #[inline(never)]
    pub(super) fn handle_reply(
        &mut self,
        heard: &Heard<'_>,
        places: &Places,
        limits: &Limits,
        audit: &Audit,
    ) {
        let Some(parts) = &mut self.0 else { return };
        let Some(n) = parts.others.handle_reply(heard, places, limits) else { return };
        // If permits are used so often that the question is worth a call.
        let within = places.with_number(n).map(|place| place.options.reuse());
        if let Some(within) = within.filter(|within| audit.has_left_within(*within, heard.now)) {
            parts.others.ask_ahead(n, within, heard.now);
        }
    }

    /// A call without newcomers is sent, with this limit.
    #[inline]
    pub(super) fn handle_call(&mut self, limit: u32, now: Time) {
        if let Some(parts) = &mut self.0 {
            parts.others.handle_call(limit, now);
        }
    }

    /// Calls have another limit from now on.
    pub(super) fn handle_limit(&mut self, before: u32, after: u32, now: Time) {
        if let Some(parts) = self.0.as_mut().filter(|_| after != before) {
            parts.others.handle_limit(after < before, now);
        }
    }

    /// A permit is in flight that the backend does not count yet.
    pub(super) fn handle_admission(&mut self) {
        self.0.iter_mut().for_each(|parts| parts.others.forget());
    }

    /// Nothing is known of other processes from now on.
    pub(super) fn handle_break(&mut self) {
        self.0.iter_mut().for_each(|parts| parts.others.handle_break());
    }

    /// The place with this number has left the backend's queue.
    #[inline]
    pub(super) fn handle_left_queue(&mut self, n: u64) {
        if let Some(parts) = &mut self.0 {
            parts.others.handle_left_queue(n);
        }
    }

    /// The request at `index` joins those without a permit, or leaves them.
    #[inline]
    pub(super) fn follow(&mut self, index: usize, is_in: bool, places: &Places) {
        if let Some(parts) = &mut self.0 {
            parts.follow(index, is_in, places);
        }
    }

    /// The place is removed, or has a request again.
    #[inline]
    pub(super) fn forget(&mut self, place: &Place) {
        if let Some(parts) = &mut self.0 {
            parts.stock.forget(place);
        }
    }

    /// Gives a new request a place that no request has: the permit that was used last; or a place that is on its way, so
    /// that a process asks for no more permits than it has requests. Returns its index.
    #[inline]
    pub(super) fn take(
        &mut self,
        limit: u32,
        options: &AcquireOptions,
        now: Time,
        places: &mut Places,
        limits: &Limits,
    ) -> Option<usize> {
        if options.reuse_ms == 0 {
            return None;
        }
        self.begin(places, now).take(limit, options, now, places, limits)
    }

    /// The index of the request that came first of those that ask for the same as the one at `index`.
    #[inline]
    pub(super) fn first_in_turn(&self, index: usize, places: &Places) -> usize {
        self.0.as_ref().map_or(index, |parts| parts.line.first_like(index, places))
    }

    /// The index of the request that came last of those that ask for the same as the one at `index`, if its place was
    /// asked for earlier; else `index`.
    #[inline]
    pub(super) fn last_in_turn(&self, index: usize, places: &Places) -> usize {
        let Some(parts) = &self.0 else { return index };
        let last = parts.line.last_like(index, places);
        let serial = |index| places.get(index).map(|place| serial_of(place.n));
        if serial(last) < serial(index) { last } else { index }
    }

    /// Whether the permit at `index`, whose request leaves, may go to another request of this process.
    #[inline]
    pub(super) fn may_pass_on(
        &self,
        index: usize,
        now: Time,
        places: &Places,
        limits: &Limits,
    ) -> bool {
        self.0.as_ref().is_some_and(|parts| parts.may_pass_on(index, now, places, limits))
    }

    /// The permit at `index` goes to the request of this process that has waited longest, or is kept.
    #[inline(never)]
    pub(super) fn pass_on(&mut self, index: usize, now: Time, places: &mut Places) -> Next {
        let (Some(parts), Some(place)) = (&mut self.0, places.get_mut(index)) else {
            return Next::Kept(None);
        };
        let within = place.options.reuse();
        parts.others.ask_ahead(place.n, within, now);
        if let Some(to) = parts.line.first() {
            parts.passed_on += 1;
            return Next::Request(to);
        }
        let is_first = parts.stock.keep(place, now + within);
        Next::Kept(is_first.then(|| parts.others.known_until(within, now)))
    }

    /// The place at `index` is on its way, and its request was handed another permit: it is for the next request.
    pub(super) fn spare(&mut self, place: &mut Place) {
        if let Some(parts) = &mut self.0 {
            parts.stock.spare(place);
        }
    }

    /// Whether permits are kept that no request of this process will get.
    #[inline]
    pub(super) fn is_kept_for_nobody(&self, places: &Places, limits: &Limits) -> bool {
        self.0.as_ref().is_some_and(|parts| parts.is_kept_for_nobody(places, limits))
    }

    /// Ends the stock. Returns the numbers of all places that no request has.
    pub(super) fn take_all(&mut self) -> Vec<u64> {
        self.0.as_mut().map(|parts| parts.stock.take_all()).unwrap_or_default()
    }

    /// What becomes of the permit that was kept first: it is given back if it was not used for some time, or will not have
    /// been before long, and once what is known of other processes is too old.
    pub(super) fn poll_idle(&self, now: Time, places: &Places) -> Option<Idle> {
        let parts = self.0.as_ref()?;
        let index = places.index(parts.stock.first_kept()?)?;
        let (until, within) = places.get(index)?.kept()?;
        let known = parts.others.known_until(within, now);
        if now < known && now + within / 2 < until {
            return Some(Idle::Until(until.min(known)));
        }
        Some(Idle::Release(index))
    }

    /// Since when the question who waits is due, if it is.
    #[inline]
    pub(super) fn asks_since(&self) -> Option<Time> {
        self.0.as_ref()?.others.asks_since()
    }

    /// Takes the places that are to be renewed for the sake of the reply: a permit, if one is in use, and the first place
    /// that waits.
    #[inline]
    pub(super) fn poll_question(&mut self, places: &Places) -> Option<(u64, Option<u64>)> {
        self.0.as_mut()?.others.poll_question(places)
    }

    fn take_passed_on(&mut self) -> u64 {
        self.0.as_mut().map_or(0, |parts| std::mem::take(&mut parts.passed_on))
    }

    /// For explorers: forgets what is too old to decide anything.
    pub(super) fn coarsen(&mut self, within: Duration, now: Time) {
        let Some(parts) = &mut self.0 else { return };
        parts.passed_on = 0;
        parts.others.coarsen(within, now, parts.stock.kept() > 0);
    }
}

impl Parts {
    #[inline(never)]
    fn follow(&mut self, index: usize, is_in: bool, places: &Places) {
        if let Some(place) = places.get(index) {
            self.line.follow(index, place, is_in);
        }
    }

    #[inline(never)]
    fn take(
        &mut self,
        limit: u32,
        options: &AcquireOptions,
        now: Time,
        places: &mut Places,
        limits: &Limits,
    ) -> Option<usize> {
        if self.stock.is_empty() || limits.is_draining() {
            return None;
        }
        let in_force = limits.in_force_for(limit);
        if !self.others.is_alone(in_force, options.reuse(), now) {
            return None;
        }
        let Some(n) = self.stock.last_kept() else {
            return self.take_spare(limit, options, now, places);
        };
        // An earlier request could not use what is kept, so that is given back.
        if !self.line.is_empty() {
            return None;
        }
        let index = places.index(n)?;
        let place = places.get(index)?;
        if place.limit != limit || place.options != *options || !is_good_for_another(place, now) {
            return None;
        }
        let arrival = places.next_arrival();
        let place = places.get_mut(index)?;
        self.stock.forget(place);
        place.begin_again(arrival, now);
        self.passed_on += 1;
        self.others.ask_ahead(n, options.reuse(), now);
        Some(index)
    }

    fn take_spare(
        &mut self,
        limit: u32,
        options: &AcquireOptions,
        now: Time,
        places: &mut Places,
    ) -> Option<usize> {
        if self.line.has_others_than(&Terms::new(limit, options)) {
            // The request would have its place before some that came earlier.
            return None;
        }
        let index = places.index(self.stock.first_spare()?)?;
        let place = places.get(index)?;
        if place.limit != limit || place.options != *options {
            return None;
        }
        let arrival = places.next_arrival();
        let place = places.get_mut(index)?;
        self.stock.forget(place);
        place.begin_again(arrival, now);
        place.acked = Acked::at(now);
        self.line.follow(index, place, true);
        Some(index)
    }

    #[inline(never)]
    fn may_pass_on(&self, index: usize, now: Time, places: &Places, limits: &Limits) -> bool {
        let Some(place) = places.get(index) else { return false };
        let in_force = limits.in_force_for(place.limit);
        if place.options.reuse_ms == 0
            || !matches!(place.state, State::Held)
            || place.has_left()
            // No recall reaches such a place.
            || place.poll_only
            || !is_good_for_another(place, now)
            || !self.others.is_alone(in_force, place.options.reuse(), now)
        {
            return false;
        }
        let Some(first) = self.line.first() else { return !limits.is_draining() };
        // Only the backend knows whose turn it is among tenants.
        self.line.has_one_claim()
            && places
                .get(first)
                .is_some_and(|other| (other.limit, other.options) == (place.limit, place.options))
    }

    fn is_kept_for_nobody(&self, places: &Places, limits: &Limits) -> bool {
        let last = self.stock.last_kept().and_then(|n| places.with_number(n));
        last.is_some_and(|last| {
            !self.line.is_empty() || !self.others.keeps(limits.in_force_for(last.limit))
        })
    }
}

/// Whether a permit is good for one more request: more than half of the time for which one may use it is left.
fn is_good_for_another(place: &Place, now: Time) -> bool {
    let half = (place.options.lease - place.options.linger()) / 2;
    !place.restoring && now + half < place.acked.leases_from + place.reliance()
}

impl Session {
    /// Another process waits: kept permits are given back, and nothing is passed on until the reply to a call that is
    /// sent from now on says that no other process waits.
    pub fn handle_recall(&mut self, now: Time) {
        self.reuse.handle_recall(now);
    }

    /// How many permits went from one request of this process straight to its next one, since the last call.
    pub fn take_passed_on(&mut self) -> u64 {
        self.reuse.take_passed_on()
    }

    /// How many permits are kept for the next requests of this process.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.reuse.0.as_ref().map_or(0, |parts| parts.stock.kept())
    }
}

#[cfg(test)]
impl Session {
    /// Checks what is noted for passing permits on against the places.
    pub(super) fn check_reuse(&self) {
        let Some(parts) = &self.reuse.0 else { return };
        parts.line.check(&self.places);
        parts.stock.check(&self.places);
        let left = self.releases.ids().map(|id| id.n).collect();
        parts.others.check(&self.places, &left);
        for (index, place) in self.places.iter() {
            let found = self.places.index(place.n);
            assert_eq!(found, Some(index), "each place is found by its number");
        }
    }
}
