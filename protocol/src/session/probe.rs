//! The probe: one call for all places that wait, when a permit may be free for the first of them, or its rate allows its
//! grant.

use std::time::Duration;

use super::place::Place;
use super::places::Places;
use crate::call::Op;
use crate::ledger::Reply;
use crate::time::Time;

/// How long after the earliest lease end the probe is sent.
const AFTER_LEASE_END: Duration = Duration::from_millis(2);
/// Leases that end at short intervals are probed together: no more often than this.
const GAP: Duration = Duration::from_millis(100);
/// Grants that a rate allows at short intervals are probed for together: no more often than this.
const OPENING_GAP: Duration = Duration::from_millis(10);
/// How long a process without a waiting place probes for openings after it gave something back, because it may be the only
/// one that knows of them: places that wait elsewhere are renewed each second, and the reply tells their processes.
const OPENINGS_OF_OTHERS: Duration = Duration::from_secs(1);

/// When a probe is due. It renews one place that waits: every call sweeps and promotes, and its reply says when the next
/// lease ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Probe {
    is_due: bool,
    /// Just after the earliest lease end of the semaphore.
    at: Option<Time>,
    last_at: Option<Time>,
    /// When the rate allows the next grant.
    opens_at: Option<Time>,
    /// Until when this is asked for others.
    others_until: Option<Time>,
    /// The server stopped promoting at its bound: it is to be called again at once, with any call.
    has_more: bool,
    /// Something was given back by a call under a limit that may have been raised meanwhile.
    withheld: bool,
}

impl Probe {
    #[inline]
    pub(super) const fn is_due(&self) -> bool {
        self.is_due
    }

    #[inline]
    pub(super) const fn has_more(&self) -> bool {
        self.has_more
    }

    /// A permit may be free. `has_waiting`: a place of this process waits.
    pub(super) const fn want(&mut self, has_waiting: bool) {
        self.is_due |= has_waiting;
    }

    /// There are more permits than before: a waiting place asks for them. Without one, a call without places does it for
    /// what was given back meanwhile, because nobody else may know of that: the processes whose places wait may have
    /// seen the limit rise, and asked, before it was given back.
    pub(super) const fn handle_raise(&mut self, has_waiting: bool) {
        self.want(has_waiting);
        self.has_more |= self.withheld && !has_waiting;
    }

    /// Ends the wish for a probe. Returns whether there was one.
    pub(super) const fn take(&mut self) -> bool {
        std::mem::replace(&mut self.is_due, false)
    }

    /// Chooses the place to renew; `None`: there is none, and a call without places does the same. `is_put_off`: places
    /// that were refused are not tried yet.
    pub(super) fn choose(
        &mut self,
        places: &Places,
        is_put_off: bool,
        has_waiting: bool,
        now: Time,
    ) -> Option<u64> {
        self.last_at = Some(now);
        let is_there = |place: &Place| {
            place.is_waiting() && !place.restoring && !(is_put_off && place.refused)
        };
        let place = places.iter().find(|(_, place)| is_there(place));
        if place.is_none() {
            self.has_more |= has_waiting;
        }
        place.map(|(_, place)| place.n)
    }

    /// A call that promotes is sent. If it stops at its bound again, its reply says so. `is_for_all`: its limit is in
    /// place of the limits that places bring.
    pub(super) fn handle_call(&mut self, op: &Op, is_for_all: bool) {
        self.has_more = false;
        self.withheld = is_for_all && (self.withheld || gives_back(op));
    }

    /// When the rate allows the next grant, by the last reply that said so.
    pub(super) const fn opens_at(&self) -> Option<Time> {
        self.opens_at
    }

    /// Another rate is in force: when it allows the next grant is not known before the next answer.
    pub(super) fn handle_rate(&mut self, has_waiting: bool) {
        if self.opens_at.take().is_some() {
            self.want(has_waiting);
            self.has_more |= self.others_until.is_some() && !has_waiting;
        }
    }

    /// Notes when the next lease ends, or when the rate allows the next grant. Returns when to probe, if a reply says so.
    pub(super) fn handle_reply(
        &mut self,
        op: &Op,
        reply: &Reply,
        has_waiting: bool,
        now: Time,
    ) -> Option<Time> {
        self.has_more |= reply.more;
        if reply.opens_in > 0 {
            let at = now + Duration::from_millis(reply.opens_in);
            let at = self.last_at.map_or(at, |last_at| at.max(last_at + OPENING_GAP));
            self.opens_at = Some(at);
            if gives_back(op) && reply.usage.is_none_or(|usage| usage.waiting > 0) {
                self.others_until = Some(now + OPENINGS_OF_OTHERS);
            }
            return self.is_opening_awaited(has_waiting, at).then_some(at);
        }
        if reply.usage.is_some() {
            // Something else keeps the next in turn back, whatever an earlier reply said.
            self.opens_at = None;
        }
        if reply.earliest == 0 {
            return None;
        }
        let server_now = reply.lease_end.saturating_sub(op.lease_ms());
        let left = Duration::from_millis(reply.earliest.saturating_sub(server_now));
        let at = now + left + AFTER_LEASE_END;
        self.at = Some(self.last_at.map_or(at, |last_at| at.max(last_at + GAP)));
        self.at.filter(|_| has_waiting)
    }

    fn is_opening_awaited(&self, has_waiting: bool, at: Time) -> bool {
        has_waiting || self.others_until.is_some_and(|until| at <= until)
    }

    /// Returns when to call this again.
    pub(super) fn handle_timeout(&mut self, has_waiting: bool, now: Time) -> Option<Time> {
        let opening = self.handle_opening(has_waiting, now);
        opening.into_iter().chain(self.handle_lease_end(has_waiting, now)).min()
    }

    fn handle_opening(&mut self, has_waiting: bool, now: Time) -> Option<Time> {
        let at = self.opens_at?;
        let is_awaited = self.is_opening_awaited(has_waiting, at);
        if now < at {
            return is_awaited.then_some(at);
        }
        self.opens_at = None;
        self.want(has_waiting);
        // Without a waiting place of its own to renew, a call without places does the same.
        if is_awaited && !has_waiting {
            self.has_more = true;
            self.last_at = Some(now);
        }
        None
    }

    fn handle_lease_end(&mut self, has_waiting: bool, now: Time) -> Option<Time> {
        let at = self.at?;
        if has_waiting && now < at {
            return Some(at);
        }
        self.want(has_waiting);
        self.at = None;
        None
    }

    /// For explorers: rounds when it is due, and forgets what is too old to matter.
    pub(super) fn coarsen(&mut self, round: impl Fn(Time) -> Time, now: Time) {
        self.at = self.at.map(&round);
        self.last_at = self.last_at.filter(|at| now < *at + GAP).map(&round);
        self.opens_at = self.opens_at.map(&round);
        self.others_until = self.others_until.filter(|until| now <= *until).map(round);
    }
}

/// Whether it releases places, and so may leave a permit to others.
fn gives_back(op: &Op) -> bool {
    match op {
        Op::Release { ids } => !ids.is_empty(),
        Op::Acquire { leaving, .. } => !leaving.is_empty(),
        _ => false,
    }
}
