//! Permits that go from one request of this process straight to its next one (rule 9).
//!
//! A permit that is passed on stays one place of the backend, so nothing is counted twice and nothing is sent. It is
//! passed on only while this process knows that no other one waits, and for a bounded time after the call whose reply
//! said so. The idea is that of locks that stay with the node that used them last until another node asks, as in GFS2
//! ("glocks") and in NFSv4 (delegations); that it must not be done while others wait is what lock cohorting
//! (Dice, Marathe and Shavit, 2012) bounds by a count and this by a message.

mod own_waiting;
mod passing;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use self::own_waiting::OwnWaiting;
use super::options::{AcquireOptions, OnUnavailable};
use super::place::{Linger, Place};
use super::{Session, State};
use crate::call::Op;
use crate::claim::Claim;
use crate::ledger::{PlaceStatus, Reply};
use crate::time::Time;

/// What a session needs to pass permits on. The first request that asks for it creates it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Reuse {
    /// The requests of this process that have no permit, by arrival and index.
    queue: BTreeSet<(u64, usize)>,
    /// The same, by what they ask for.
    by_terms: BTreeMap<Terms, BTreeSet<(u64, usize)>>,
    /// Permits without a request, by number; the one used last is at the back.
    kept: VecDeque<u64>,
    /// Places without a request that are on their way to the backend, by number, the oldest in front.
    spare: VecDeque<u64>,
    own_waiting: OwnWaiting,
    alone: Option<Alone>,
    /// Calls sent before this say nothing of who waits.
    recalled_at: Option<Time>,
    /// The limit of the last call without newcomers. Calls sent before `limit_since` had another one.
    call_limit: Option<u32>,
    limit_since: Option<Time>,
    /// When the last call was sent whose reply said that another process waits; or a recall said so.
    others_at: Option<Time>,
    /// The place that is to be renewed for the sake of the reply, and when one was last chosen.
    ask: Option<u64>,
    asked_at: Option<Time>,
    /// How many permits went to another request since that was last asked.
    passed_on: u64,
}

/// No other process waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Alone {
    /// When the call was sent whose reply said so; where own places wait, that whose reply last said so of the first of
    /// them.
    heard: Time,
    /// Permits in use then, at most.
    in_use: u64,
}

/// What a request asks for. Requests with equal terms may exchange their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Terms {
    // The first field, so that requests of one claim are neighbours.
    claim: Option<Claim>,
    limit: u32,
    headroom: u32,
    lease: Duration,
    max_queue: Option<u32>,
    max_waiting: u32,
    /// The variant, and its share.
    on_unavailable: (u8, u32),
    linger_ms: u32,
    reuse_ms: u32,
}

impl Terms {
    fn of(place: &Place) -> Self {
        Self::new(place.limit, &place.options)
    }

    fn new(limit: u32, options: &AcquireOptions) -> Self {
        let AcquireOptions {
            lease,
            max_queue,
            max_waiting,
            on_unavailable,
            headroom,
            claim,
            linger_ms,
            reuse_ms,
        } = *options;
        let on_unavailable = match on_unavailable {
            OnUnavailable::Refuse => (0, 0),
            OnUnavailable::Admit => (1, 0),
            OnUnavailable::Local(share) => (2, share),
        };
        Self {
            claim,
            limit,
            headroom,
            lease,
            max_queue,
            max_waiting,
            on_unavailable,
            linger_ms,
            reuse_ms,
        }
    }
}

impl Reuse {
    fn join(&mut self, index: usize, place: &Place) {
        if self.queue.insert((place.arrival, index)) {
            self.by_terms.entry(Terms::of(place)).or_default().insert((place.arrival, index));
        }
    }

    fn leave(&mut self, index: usize, place: &Place) {
        if self.queue.remove(&(place.arrival, index))
            && let Entry::Occupied(mut same) = self.by_terms.entry(Terms::of(place))
        {
            same.get_mut().remove(&(place.arrival, index));
            if same.get().is_empty() {
                same.remove();
            }
        }
    }

    /// Whether all requests without a permit have one claim.
    fn has_one_claim(&self) -> bool {
        let [first, last] = [self.by_terms.first_key_value(), self.by_terms.last_key_value()]
            .map(|entry| entry.map(|(terms, _)| terms.claim));
        first == last
    }

    /// Forgets a place that is removed.
    fn forget(&mut self, place: &Place) {
        let numbers = match place.linger {
            Linger::Kept(_) => &mut self.kept,
            Linger::Spare => &mut self.spare,
            _ => return,
        };
        if let Some(at) = numbers.iter().position(|n| *n == place.n) {
            numbers.remove(at);
        }
    }
}

/// Permits in use and places that wait after a call with this limit, if the limit is known. `None`: the reply does not
/// say.
fn counted(op: &Op, reply: &Reply, limit: Option<u64>) -> Option<(u64, u64)> {
    match op {
        Op::Release { .. } | Op::Audit { .. } => None,
        _ if (reply.in_use, reply.waiting) != (0, 0) => Some((reply.in_use, reply.waiting)),
        // A short reply. Permits of tenants may be granted by one while lines of others are stopped.
        Op::Acquire { leaving, ids, .. }
            if leaving.iter().chain(ids).any(|id| id.claim.is_some()) =>
        {
            None
        }
        // A short reply: nobody waits, and the limit is kept.
        _ => Some((limit?, 0)),
    }
}

impl Session {
    /// Another process waits: kept permits are given back, and nothing is passed on until the reply to a call that is
    /// sent from here on says that no other process waits.
    pub fn handle_recall(&mut self, now: Time) {
        if let Some(reuse) = &mut self.reuse {
            (reuse.recalled_at, reuse.others_at) = (Some(now), Some(now));
            reuse.alone = None;
        }
    }

    /// How many permits went from one request of this process straight to its next one, since the last call.
    pub fn take_passed_on(&mut self) -> u64 {
        self.reuse.as_mut().map_or(0, |reuse| std::mem::take(&mut reuse.passed_on))
    }

    /// How many permits are kept for the next requests of this process.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.reuse.as_ref().map_or(0, |reuse| reuse.kept.len())
    }

    /// Takes a reply's word for who waits.
    #[inline]
    pub(super) fn hear_who_waits(
        &mut self,
        op: &Op,
        reply: &Reply,
        late: bool,
        timing: (Time, Time),
    ) {
        if self.reuse.is_some() {
            self.hear_counts(op, reply, late, timing);
        }
    }

    #[inline(never)]
    fn hear_counts(&mut self, op: &Op, reply: &Reply, late: bool, (sent, now): (Time, Time)) {
        // Calls of one limit are made for all of their places.
        let limit = match op {
            Op::Acquire { ids, .. } => ids
                .first()
                .and_then(|id| self.places.get(self.places.index(id.n)?))
                .map(|place| place.limit),
            _ => self.reuse.as_ref().and_then(|reuse| reuse.call_limit),
        };
        let limit = limit.map(|limit| u64::from(self.limits.in_force_for(limit)));
        // A permit in use here that the backend does not count is missing in the reply.
        let is_counted = !self.renewals.is_resync() && !self.counts.has_admitted();
        let is_quarantined = self.quarantined_until().is_some_and(|end| now < end);
        let hears = !self.places.is_poll_only() && !self.is_outage();
        let Some(reuse) = &mut self.reuse else { return };
        reuse.own_waiting.hear(op, reply, late, sent, &self.places);
        if late {
            return;
        }
        let counted = counted(op, reply, limit);
        let own = reuse.own_waiting.len();
        if counted.is_some_and(|(_, waiting)| waiting > own) {
            reuse.others_at = reuse.others_at.max(Some(sent));
        }
        let is_over = reuse.recalled_at.is_some_and(|at| sent <= at)
            || reuse.limit_since.is_some_and(|at| sent < at);
        if is_over {
            return;
        }
        let Some((in_use, waiting)) = counted else {
            if let Op::Acquire { ids, .. } = op
                && let Some(id) = ids.first()
            {
                self.ask_if_hot(id.n, now);
            }
            return;
        };
        if waiting < own {
            // A hint was lost, and the reply does not say which.
            reuse.own_waiting.clear();
        }
        let is_gone = reply.statuses.contains(&PlaceStatus::Gone);
        let is_alone = waiting <= reuse.own_waiting.len();
        let is_known = is_counted && hears && !is_quarantined && !is_gone;
        let first = reuse.own_waiting.heard();
        // Of as many, one may be another process's, which waited before, if a hint was lost since the first was heard of.
        let is_certain = first.is_none_or(|at| reuse.others_at < Some(at));
        let heard = first.map_or(sent, |at| at.min(sent));
        reuse.alone = (is_alone && is_known && is_certain).then_some(Alone { heard, in_use });
        let first = reuse.own_waiting.numbers().next().filter(|_| is_alone && !is_certain);
        if let Some(first) = first {
            self.ask_if_hot(first, now);
        }
    }

    /// A place of this process has left the queue.
    pub(super) fn left_queue(&mut self, n: u64) {
        if let Some(reuse) = &mut self.reuse {
            reuse.own_waiting.remove(n);
        }
    }

    /// Whether this process knows, by a call sent not long ago, that no other one waits, and that no more permits are in
    /// use than the limit of these terms.
    fn is_alone(&self, limit: u32, options: &AcquireOptions, now: Time) -> bool {
        let alone = self.reuse.as_ref().and_then(|reuse| reuse.alone);
        alone.is_some_and(|alone| now < alone.heard + options.reuse() && self.keeps(alone, limit))
    }

    fn keeps(&self, alone: Alone, limit: u32) -> bool {
        alone.in_use <= u64::from(self.limits.in_force_for(limit))
    }

    /// A call without newcomers is sent, with this limit.
    #[inline]
    pub(super) fn note_limit_of_calls(&mut self, limit: u32, now: Time) {
        if let Some(reuse) = &mut self.reuse
            && reuse.call_limit.replace(limit) != Some(limit)
        {
            reuse.limit_since = Some(now);
        }
    }

    /// Calls have another limit from here on. If it is lower, nothing is passed on until a reply says how many permits
    /// are in use.
    #[inline]
    pub(super) fn limit_changed(&mut self, is_lower: bool, now: Time) {
        if let Some(reuse) = &mut self.reuse {
            reuse.limit_since = Some(now);
            if is_lower {
                reuse.recalled_at = Some(now);
                reuse.alone = None;
            }
        }
    }

    /// A permit is in flight that the backend does not count yet.
    pub(super) fn hear_of_admission(&mut self) {
        if let Some(reuse) = &mut self.reuse {
            reuse.alone = None;
        }
    }

    /// A request joins those without a permit, or leaves them.
    #[inline]
    pub(super) fn follow_queue(&mut self, index: usize, is_in: bool) {
        if self.reuse.is_some() {
            self.move_in_queue(index, is_in);
        }
    }

    #[inline(never)]
    fn move_in_queue(&mut self, index: usize, is_in: bool) {
        let (Some(reuse), Some(place)) = (&mut self.reuse, self.places.get(index)) else { return };
        match is_in {
            true if place.state.is_without_permit() && !place.has_left() => {
                reuse.join(index, place);
            }
            _ => reuse.leave(index, place),
        }
    }

    /// Permits are passed on from the first request that asks for it.
    fn begin_reuse(&mut self, now: Time) {
        if self.reuse.is_none() {
            // Earlier recalls left no trace.
            let reuse = Reuse { limit_since: Some(now), ..Reuse::default() };
            self.reuse = Some(Box::new(reuse));
            for index in self.indexes() {
                self.follow_queue(index, true);
            }
        }
    }

    /// Has a place renewed before what is known of other processes is too old: the reply says who waits.
    fn ask_ahead(&mut self, n: u64, within: Duration, now: Time) {
        let Some(reuse) = &mut self.reuse else { return };
        let is_old = |at: Time| now >= at + within / 2;
        if reuse.alone.is_none_or(|alone| is_old(alone.heard)) && reuse.asked_at.is_none_or(is_old)
        {
            (reuse.ask, reuse.asked_at) = (Some(n), Some(now));
        }
    }

    /// The same, if permits are used so often that the question is worth a call.
    fn ask_if_hot(&mut self, n: u64, now: Time) {
        let Some(within) = self.places.find(n).map(|place| place.options.reuse()) else { return };
        if self.audit.has_left_within(within, now) {
            self.ask_ahead(n, within, now);
        }
    }

    /// Since when the question who waits is due, if it is.
    #[inline]
    pub(super) fn asks_since(&self) -> Option<Time> {
        let reuse = self.reuse.as_ref().filter(|reuse| reuse.ask.is_some())?;
        reuse.asked_at
    }

    /// Takes the places that are to be renewed for the sake of the reply: a permit, if one is in use, and the first place
    /// that waits.
    #[inline]
    pub(super) fn take_question(&mut self) -> Option<(u64, Option<u64>)> {
        if self.reuse.is_none() { None } else { self.take_question_of_reuse() }
    }

    #[inline(never)]
    fn take_question_of_reuse(&mut self) -> Option<(u64, Option<u64>)> {
        let reuse = self.reuse.as_mut()?;
        let permit = reuse.ask.take()?;
        let waits = |n: &u64| {
            let place = self.places.index(*n).and_then(|index| self.places.get(index));
            place.is_some_and(|place| matches!(place.state, State::Waiting { .. }))
        };
        Some((permit, reuse.own_waiting.numbers().find(waits).filter(|first| *first != permit)))
    }

    /// A place is removed.
    #[inline]
    pub(super) fn forget_kept(&mut self, place: &Place) {
        if let Some(reuse) = &mut self.reuse {
            reuse.forget(place);
        }
    }

    /// For explorers: forgets what is too old to decide anything.
    pub(super) fn coarsen_reuse(&mut self, within: Duration, now: Time) {
        let Some(reuse) = &mut self.reuse else { return };
        reuse.passed_on = 0;
        let is_old = |at: Time| now >= at + within;
        reuse.recalled_at = reuse.recalled_at.filter(|at| !is_old(*at));
        reuse.asked_at = reuse.asked_at.filter(|at| !is_old(*at));
        reuse.limit_since = reuse.limit_since.filter(|at| !is_old(*at));
        reuse.others_at = reuse.others_at.filter(|at| !is_old(*at));
        reuse.own_waiting.coarsen(Time::ZERO + now.since(Time::ZERO + within));
        if reuse.kept.is_empty() {
            reuse.alone = reuse.alone.filter(|alone| !is_old(alone.heard));
        }
    }

    /// Nothing is known of other processes from here on.
    pub(super) fn end_reuse(&mut self, now: Time) {
        self.release_kept(now);
        if let Some(reuse) = &mut self.reuse {
            reuse.alone = None;
            reuse.ask = None;
            reuse.own_waiting.clear();
        }
    }
}

#[cfg(test)]
impl Session {
    /// What is noted for passing permits on is what there is.
    pub(super) fn check_reuse(&self) {
        let Some(reuse) = &self.reuse else { return };
        let places = || self.places.iter();
        let waits = places().filter(|(_, p)| p.state.is_without_permit() && !p.has_left());
        let queue: BTreeSet<_> = waits.map(|(index, place)| (place.arrival, index)).collect();
        assert_eq!(reuse.queue, queue, "requests without a permit");
        let mut by_terms: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for entry in &queue {
            let terms = Terms::of(self.places.get(entry.1).expect("a place"));
            by_terms.entry(terms).or_default().insert(*entry);
        }
        assert_eq!(reuse.by_terms, by_terms, "their terms");
        let is_kept = |place: &Place| matches!(place.linger, Linger::Kept(_));
        let kept: BTreeSet<_> = places().filter(|(_, p)| is_kept(p)).map(|(_, p)| p.n).collect();
        assert_eq!(reuse.kept.iter().copied().collect::<BTreeSet<_>>(), kept, "kept permits");
        assert_eq!(reuse.kept.len(), kept.len(), "each once");
        let spare = places().filter(|(_, place)| place.linger == Linger::Spare);
        let spare: BTreeSet<_> = spare.map(|(_, place)| place.n).collect();
        assert_eq!(reuse.spare.iter().copied().collect::<BTreeSet<_>>(), spare, "spare places");
        assert_eq!(reuse.spare.len(), spare.len(), "each once");
        let left: BTreeSet<_> = self.releases.ids().map(|id| id.n).collect();
        reuse.own_waiting.check();
        for n in reuse.own_waiting.numbers() {
            let place = self.places.index(n).and_then(|index| self.places.get(index));
            let waits = place.is_some_and(|place| place.state.is_without_permit());
            assert!(waits || left.contains(&n), "{n} stands in the queue");
        }
        for (index, place) in places() {
            assert_eq!(
                self.places.index(place.n),
                Some(index),
                "each place is found by its number"
            );
        }
    }
}
