//! Renewals and proofs: what keeps the leases of places alive, and restores them after a loss of data.

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;

use super::IDLE;
use super::place::{Acked, Place, State, WAITING_RENEWAL};
use super::places::Places;
use super::releases::{earlier, refusal_pause};
use crate::call::Op;
use crate::id::{Ids, PlaceId};
use crate::ledger::{LEAVES, NEVER_ENDS};
use crate::time::Time;

/// The renewals of a session. Places are identified by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Renewals {
    /// What is due is to be chosen, once the calls that are on their way are answered.
    is_due: bool,
    /// To be renewed.
    queue: VecDeque<u64>,
    /// To be shown with their proofs.
    proofs: VecDeque<u64>,
    /// Calls that are on their way.
    sent: usize,
    /// When places whose renewal was refused are tried again.
    retry_at: Option<Time>,
    /// After data may have been lost: newcomers wait until it is known what became of the places, over as many
    /// connections as that takes.
    is_resync: bool,
}

impl Renewals {
    /// Whether newcomers wait (rule 5).
    #[inline]
    pub(super) const fn is_resync(&self) -> bool {
        self.is_resync
    }

    /// Whether calls are on their way.
    pub(super) const fn is_any_sent(&self) -> bool {
        self.sent > 0
    }

    /// Whether renewals that were refused wait for their time.
    pub(super) const fn is_put_off(&self) -> bool {
        self.retry_at.is_some()
    }

    /// Whether places were chosen and not sent.
    #[inline]
    pub(super) fn has_unsent(&self) -> bool {
        !self.proofs.is_empty() || !self.queue.is_empty()
    }

    /// Whether nothing is to be sent now or later.
    #[inline]
    pub(super) fn is_at_rest(&self) -> bool {
        !self.is_due && !self.has_unsent()
    }

    /// Whether there is a call to send. `is_probe_due`: as a renewal, a probe waits for the calls on their way.
    pub(super) fn has_call(&self, is_probe_due: bool) -> bool {
        self.has_unsent() || self.may_choose(is_probe_due)
    }

    /// Whether places may be chosen, and there is a reason to.
    #[inline]
    pub(super) const fn may_choose(&self, is_probe_due: bool) -> bool {
        (self.is_due || is_probe_due) && self.sent == 0
    }

    /// Has what is due chosen and sent, once the calls that are on their way are answered.
    pub(super) const fn want(&mut self) {
        self.is_due = true;
    }

    /// Has the place renewed with the next call.
    pub(super) fn push(&mut self, n: u64) {
        self.queue.push_back(n);
    }

    /// Has the places renewed that were granted in a pause, with the next calls: each is a permit that nobody uses.
    pub(super) fn push_held_back(&mut self, places: &mut Places) {
        for place in places.iter_mut() {
            if std::mem::take(&mut place.held_back) && place.is_waiting() && !place.restoring {
                self.queue.push_back(place.n);
            }
        }
    }

    /// Has the place shown with its proof.
    pub(super) fn push_proof(&mut self, n: u64) {
        self.proofs.push_back(n);
    }

    /// Whether no renewals are chosen and unsent.
    #[inline]
    pub(super) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Chooses the places that are due, or half way there: so all places of a process come to be renewed by one call.
    pub(super) fn choose(&mut self, places: &mut Places, now: Time) {
        if !std::mem::take(&mut self.is_due) {
            return;
        }
        let mut waiting = Vec::new();
        for place in places.iter_mut() {
            if !self.is_soon(place, now) {
                continue;
            }
            place.refused = false;
            if let State::Admitted { .. } = place.state {
                place.acked = Acked::at(now);
                self.proofs.push_back(place.n);
                continue;
            }
            place.check = false;
            match place.state {
                State::Waiting { .. } => waiting.push(place.n),
                _ => self.queue.push_back(place.n),
            }
        }
        // Behind those that hold, however many they are.
        self.queue.extend(waiting);
    }

    fn is_soon(&self, place: &Place, now: Time) -> bool {
        match place.state {
            _ if place.restoring || self.is_put_off() && place.refused => false,
            State::Waiting { .. } => true,
            State::Held => {
                let is_half_way = now >= place.acked.sent + place.interval() / 2;
                self.is_resync || place.check || place.refused || is_half_way
            }
            State::Admitted { .. } => {
                place.refused || now >= place.acked.sent + WAITING_RENEWAL / 2
            }
            _ => false,
        }
    }

    /// The next call, for at most `most` permits: proofs come first.
    pub(super) fn poll(&mut self, places: &mut Places, most: usize) -> Option<Op> {
        let op = self.poll_proofs(places, most).or_else(|| self.poll_queue(places, most))?;
        self.sent += 1;
        Some(op)
    }

    fn poll_proofs(&mut self, places: &mut Places, most: usize) -> Option<Op> {
        let (node, mut proofs) = (places.node(), Vec::new());
        let lease_ms = next_places(&mut self.proofs, places, most, |place, is_sent| {
            let proof = match place.state {
                State::Waiting { ticket: Some(ticket) } => ticket,
                State::Held => place.lease_end,
                State::Admitted { .. } => NEVER_ENDS,
                _ => return false,
            };
            if is_sent {
                if let State::Admitted { announced } = &mut place.state {
                    announced.send();
                }
                // Both would stand in the queue, and be granted.
                proofs.extend(place.replaces.as_ref().map(|replaced| (replaced.id, LEAVES)));
                proofs.push((place.id(node), proof));
            }
            true
        })?;
        Some(Op::Reassert { lease_ms, proofs })
    }

    fn poll_queue(&mut self, places: &mut Places, most: usize) -> Option<Op> {
        let (node, mut ids) = (places.node(), Ids::new());
        let lease_ms = next_places(&mut self.queue, places, most, |place, is_sent| {
            let is_there = matches!(place.state, State::Waiting { .. } | State::Held);
            if is_there && is_sent {
                ids.push(place.id(node));
            }
            is_there
        })?;
        Some(Op::Renew { lease_ms, ids })
    }

    /// A call was answered, or broke off.
    pub(super) const fn handle_answered(&mut self) {
        self.sent = self.sent.saturating_sub(1);
    }

    /// A call was not carried out, and there is another connection.
    pub(super) const fn handle_unanswered(&mut self) {
        self.is_due |= self.is_resync;
    }

    /// A call for these places was refused. Whatever else is due or refused meanwhile, they are tried again only as often
    /// as one place would be; where leases differ, in time for the shortest. Returns when.
    pub(super) fn handle_refused<'a>(
        &mut self,
        ids: impl Iterator<Item = &'a PlaceId>,
        places: &mut Places,
        lease_ms: u64,
        now: Time,
    ) -> Time {
        for id in ids {
            places.find(id.n).into_iter().for_each(|place| place.refused = true);
        }
        let pause = refusal_pause(Duration::from_millis(lease_ms));
        let at = earlier(self.retry_at, now + pause);
        self.retry_at = Some(at);
        at
    }

    /// No call that was sent will be answered.
    pub(super) const fn take_back(&mut self) {
        self.sent = 0;
    }

    /// There is a new connection: what is chosen for it depends on whether the server may have lost data.
    pub(super) fn handle_connected(&mut self, places: &mut Places, same_data: bool, now: Time) {
        self.queue.clear();
        self.proofs.clear();
        self.retry_at = None;
        let mut is_live = false;
        for place in places.iter_mut() {
            is_live |= place.is_live();
            place.restoring = false;
            let is_due = now >= place.acked.sent + place.interval();
            match place.state {
                State::Admitted { .. } => {
                    place.refused = false;
                    place.acked = Acked::at(now);
                    self.proofs.push_back(place.n);
                }
                State::Held => self.is_due |= is_due || place.check || place.refused,
                // Its hint may have been lost.
                State::Waiting { .. } => self.is_due = true,
                _ => {}
            }
        }
        // What is not known since an earlier connection is not known yet.
        self.is_resync = is_live && (self.is_resync || !same_data);
        self.is_due |= self.is_resync;
    }

    /// Lets newcomers go, if it is known what became of the places. `is_checking`: some are gone, and it is not known
    /// whether they were revoked.
    #[inline]
    pub(super) fn end_resync(&mut self, is_checking: bool, places: &Places) {
        if self.is_resync {
            self.end_resync_if_done(is_checking, places);
        }
    }

    #[inline(never)]
    fn end_resync_if_done(&mut self, is_checking: bool, places: &Places) {
        let is_refused = |place: &Place| place.refused && place.is_live();
        let is_any_refused = || places.iter().any(|(_, place)| is_refused(place));
        if self.sent == 0
            && self.is_at_rest()
            && !is_checking
            && !(self.is_put_off() && is_any_refused())
        {
            self.is_resync = false;
        }
    }

    /// Notices what is due. Returns the indexes of the places that reached their deadline or have lingered long enough,
    /// and when to call this again.
    pub(super) fn handle_timeout(
        &mut self,
        places: &Places,
        now: Time,
    ) -> (SmallVec<[usize; 4]>, Option<Time>) {
        if self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
            self.is_due = true;
        }
        let (mut expired, mut next) = (SmallVec::new(), self.retry_at);
        for (index, place) in places.iter() {
            match self.look(place, now) {
                Look::Expired => expired.push(index),
                Look::Alive { is_due, again_at } => {
                    self.is_due |= is_due;
                    next = again_at.map(|at| earlier(next, at)).or(next);
                }
            }
        }
        (expired, next)
    }

    fn look(&self, place: &Place, now: Time) -> Look {
        let lingers_until = place.lingers_until();
        if lingers_until.is_some_and(|until| now >= until) {
            return Look::Expired;
        }
        let (deadline, interval) = match place.state {
            State::Held if now >= place.deadline() => return Look::Expired,
            State::Held => (Some(place.deadline()), place.interval()),
            State::Waiting { .. } => (None, place.interval()),
            // Tried again and again, until it is counted.
            State::Admitted { .. } => (None, WAITING_RENEWAL),
            _ => {
                let again_at = Some(earlier(lingers_until, now + IDLE));
                return Look::Alive { is_due: false, again_at };
            }
        };
        let ends_at = lingers_until.into_iter().chain(deadline).min();
        if self.is_put_off() && place.refused {
            return Look::Alive { is_due: false, again_at: ends_at };
        }
        let is_checked = place.check && !matches!(place.state, State::Admitted { .. });
        let due = place.acked.sent + interval;
        let is_due = now >= due || is_checked;
        let again_at = earlier(ends_at, if is_due { now + interval } else { due });
        Look::Alive { is_due, again_at: Some(again_at) }
    }

    /// For explorers: rounds when refused renewals are tried again.
    pub(super) fn coarsen(&mut self, round: impl Fn(Time) -> Time, now: Time) {
        self.retry_at = self.retry_at.map(round).filter(|at| now < *at);
    }
}

/// What time brought to a place.
enum Look {
    /// It reached its deadline, or has lingered long enough.
    Expired,
    /// Whether it is to be renewed, and when to look again.
    Alive { is_due: bool, again_at: Option<Time> },
}

/// Takes places with one lease out of a queue, with at most `most` permits, and leaves the others there. `visit` returns
/// whether a place is still to be sent; with `true` it is sent now. Returns the lease of those sent.
fn next_places(
    queue: &mut VecDeque<u64>,
    places: &mut Places,
    most: usize,
    mut visit: impl FnMut(&mut Place, bool) -> bool,
) -> Option<u64> {
    let (mut common, mut permits, mut others) = (None, 0, VecDeque::new());
    while permits < most
        && let Some(n) = queue.pop_front()
    {
        let Some(place) = places.find(n) else { continue };
        let lease_ms = place.lease_ms();
        if !visit(place, false) {
            continue;
        }
        if *common.get_or_insert(lease_ms) == lease_ms {
            visit(place, true);
            permits += place.claim().work();
        } else {
            others.push_back(n);
        }
    }
    while let Some(n) = others.pop_back() {
        queue.push_front(n);
    }
    common
}
