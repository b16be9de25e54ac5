//! Whether other processes wait, as far as replies, hints and recalls tell.

use std::time::Duration;

use super::Heard;
use super::own_waiting::OwnWaiting;
use crate::call::Op;
use crate::ledger::{PlaceStatus, Reply};
use crate::session::limits::Limits;
use crate::session::place::Place;
use crate::session::places::Places;
use crate::time::Time;

/// What this process knows of the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Others {
    own_waiting: OwnWaiting,
    alone: Option<Alone>,
    /// Replies to calls sent before this do not say who waits now.
    recalled_at: Option<Time>,
    /// The limit of the last call without newcomers. Calls sent before `limit_since` had another one.
    call_limit: Option<u32>,
    limit_since: Option<Time>,
    /// When the last call was sent whose reply said that another process waits; or a recall said so.
    others_at: Option<Time>,
    /// The place that is to be renewed for the sake of the reply, and when one was last chosen.
    ask: Option<u64>,
    asked_at: Option<Time>,
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

impl Others {
    pub(super) fn starting_at(now: Time) -> Self {
        Self { limit_since: Some(now), ..Self::default() }
    }

    /// Whether it is known, by a call sent within this time, that no other process waits, and that no more permits are in
    /// use than this limit.
    pub(super) fn is_alone(&self, limit: u32, within: Duration, now: Time) -> bool {
        self.alone.is_some_and(|alone| now < alone.heard + within) && self.keeps(limit)
    }

    /// Whether no other process waited, and no more permits were in use than this limit, however long ago that is.
    pub(super) fn keeps(&self, limit: u32) -> bool {
        self.alone.is_some_and(|alone| alone.in_use <= u64::from(limit))
    }

    /// Until when that counts, if it counts for this time.
    pub(super) fn known_until(&self, within: Duration, now: Time) -> Time {
        self.alone.map_or(now, |alone| alone.heard + within)
    }

    pub(super) const fn handle_recall(&mut self, now: Time) {
        (self.recalled_at, self.others_at) = (Some(now), Some(now));
        self.alone = None;
    }

    /// A call without newcomers is sent, with this limit.
    pub(super) fn handle_call(&mut self, limit: u32, now: Time) {
        if self.call_limit.replace(limit) != Some(limit) {
            self.limit_since = Some(now);
        }
    }

    /// Calls have another limit from now on. If it is lower, nothing is passed on until a reply says how many permits are
    /// in use.
    pub(super) const fn handle_limit(&mut self, is_lower: bool, now: Time) {
        self.limit_since = Some(now);
        if is_lower {
            self.recalled_at = Some(now);
            self.alone = None;
        }
    }

    /// It is not known any more that no other process waits.
    pub(super) const fn forget(&mut self) {
        self.alone = None;
    }

    pub(super) fn handle_break(&mut self) {
        (self.alone, self.ask) = (None, None);
        self.own_waiting.clear();
    }

    pub(super) fn handle_left_queue(&mut self, n: u64) {
        self.own_waiting.remove(n);
    }

    /// Notes what a reply says. Returns a place to renew for the sake of the next reply, if that would say more.
    pub(super) fn handle_reply(
        &mut self,
        heard: &Heard<'_>,
        places: &Places,
        limits: &Limits,
    ) -> Option<u64> {
        let Heard { op, reply, late, sent, .. } = *heard;
        let counted = counted(op, reply, self.limit_of(op, places, limits));
        self.own_waiting.hear(op, reply, late, sent, places);
        if late {
            return None;
        }
        let own = self.own_waiting.len();
        if counted.is_some_and(|(_, waiting)| waiting > own) {
            self.others_at = self.others_at.max(Some(sent));
        }
        if self.is_outdated(sent) {
            return None;
        }
        let Some((in_use, waiting)) = counted else {
            let Op::Acquire { ids, .. } = op else { return None };
            return ids.first().map(|id| id.n);
        };
        if waiting < own {
            // A hint was lost, and the reply does not say which.
            self.own_waiting.clear();
        }
        let is_alone = waiting <= self.own_waiting.len();
        let is_known = heard.is_trusted && !reply.statuses.contains(&PlaceStatus::Gone);
        let first = self.own_waiting.heard();
        // Of as many, one may be another process's, which waited before, if a hint was lost since the first was heard of.
        let is_certain = first.is_none_or(|at| self.others_at < Some(at));
        let heard = first.map_or(sent, |at| at.min(sent));
        self.alone = (is_alone && is_known && is_certain).then_some(Alone { heard, in_use });
        self.own_waiting.numbers().next().filter(|_| is_alone && !is_certain)
    }

    /// The limit in force for a call. Calls of one limit are made for all of their places.
    fn limit_of(&self, op: &Op, places: &Places, limits: &Limits) -> Option<u64> {
        let limit = match op {
            Op::Acquire { ids, .. } => {
                ids.first().and_then(|id| places.with_number(id.n)).map(|place| place.limit)
            }
            _ => self.call_limit,
        };
        limit.map(|limit| u64::from(limits.in_force_for(limit)))
    }

    /// Whether the reply to a call sent then says nothing of now.
    fn is_outdated(&self, sent: Time) -> bool {
        self.recalled_at.is_some_and(|at| sent <= at)
            || self.limit_since.is_some_and(|at| sent < at)
    }

    /// Has a place renewed before what is known is too old: the reply says who waits.
    pub(super) fn ask_ahead(&mut self, n: u64, within: Duration, now: Time) {
        let is_old = |at: Time| now >= at + within / 2;
        if self.alone.is_none_or(|alone| is_old(alone.heard)) && self.asked_at.is_none_or(is_old) {
            (self.ask, self.asked_at) = (Some(n), Some(now));
        }
    }

    /// Since when a place is to be renewed for the sake of the reply, if one is.
    #[inline]
    pub(super) const fn asks_since(&self) -> Option<Time> {
        if self.ask.is_none() { None } else { self.asked_at }
    }

    #[inline(never)]
    pub(super) fn poll_question(&mut self, places: &Places) -> Option<(u64, Option<u64>)> {
        let permit = self.ask.take()?;
        let waits = |n: &u64| places.with_number(*n).is_some_and(Place::is_waiting);
        Some((permit, self.own_waiting.numbers().find(waits).filter(|first| *first != permit)))
    }

    /// For explorers: forgets what is too old to decide anything.
    pub(super) fn coarsen(&mut self, within: Duration, now: Time, is_any_kept: bool) {
        let is_old = |at: Time| now >= at + within;
        self.recalled_at = self.recalled_at.filter(|at| !is_old(*at));
        self.asked_at = self.asked_at.filter(|at| !is_old(*at));
        self.limit_since = self.limit_since.filter(|at| !is_old(*at));
        self.others_at = self.others_at.filter(|at| !is_old(*at));
        self.own_waiting.coarsen(Time::ZERO + now.since(Time::ZERO + within));
        if !is_any_kept {
            self.alone = self.alone.filter(|alone| !is_old(alone.heard));
        }
    }
}

/// Permits in use and places that wait after a call with this limit, if the limit is known. `None`: the reply does not
/// say.
fn counted(op: &Op, reply: &Reply, limit: Option<u64>) -> Option<(u64, u64)> {
    match op {
        Op::Release { .. } | Op::Audit { .. } => None,
        _ if reply.usage.is_some() => reply.usage.map(|of| (of.in_use, of.waiting)),
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

#[cfg(test)]
impl Others {
    /// `left`: the places whose release is not answered.
    pub(super) fn check(&self, places: &Places, left: &std::collections::BTreeSet<u64>) {
        self.own_waiting.check();
        for n in self.own_waiting.numbers() {
            let waits = places.with_number(n).is_some_and(|place| place.state.is_without_permit());
            assert!(waits || left.contains(&n), "{n} stands in the queue");
        }
    }
}
