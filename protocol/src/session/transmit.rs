//! Outgoing calls: which is next, and how urgent it is.

use super::Session;
use crate::call::{Call, Op};
use crate::id::{Ids, PlaceId};
use crate::time::Time;

/// The most permits of the places in one call; the last place may take more.
pub(super) const CALL_MAX: usize = 512;
/// How soon a session's next call has to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Urgency {
    /// A request waits for it, here or elsewhere.
    Now,
    /// It keeps leases alive, the first of which ends then.
    Before(Time),
    /// It can wait.
    Later,
}

impl Session {
    /// How soon the next call has to be sent; `None`: there is none.
    #[must_use]
    pub fn urgency(&self) -> Option<Urgency> {
        if self.is_awaited() || !self.joins.is_empty() && self.has_renewals() {
            return Some(Urgency::Now);
        }
        let keeps_alive = self.keeps_alive().map(Urgency::Before);
        keeps_alive.or_else(|| self.may_audit().then_some(Urgency::Later))
    }

    /// Whether to call [`poll_serving`](Self::poll_serving), because a request waits for that, here or elsewhere.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.releases.has_unsent()
            || self.probe.has_more()
            || (!self.joins.is_empty() && !self.renewals.is_resync())
            || self.is_kept_for_nobody()
    }

    /// When the first lease ends that [`poll_keep_alive`](Self::poll_keep_alive) renews, if any.
    #[must_use]
    pub fn keeps_alive(&self) -> Option<Time> {
        if let Some(at) = self.reuse.asks_since() {
            return Some(at);
        }
        if !self.has_renewals() {
            return None;
        }
        let live = self.places.iter().filter(|(_, place)| place.is_live());
        Some(live.map(|(_, place)| place.deadline()).min().unwrap_or(Time::ZERO))
    }

    /// The common case: each call is followed by a poll that finds nothing.
    #[inline]
    fn has_nothing_to_send(&self) -> bool {
        !self.releases.has_unsent()
            && self.joins.is_empty()
            && self.renewals.is_at_rest()
            && !(self.probe.is_due() || self.probe.has_more() || self.audit.is_due())
            && self.reuse.asks_since().is_none()
            && !self.is_kept_for_nobody()
    }

    /// Whether to send an audit now: not just after one was refused.
    #[must_use]
    pub fn may_audit(&self) -> bool {
        self.audit.is_due() && !self.renewals.is_resync() && !self.releases.is_put_off()
    }

    fn has_renewals(&self) -> bool {
        self.renewals.has_call(self.probe.is_due())
    }

    /// The next call to send, until there is none for now. The order is releases, so that a process always reads its
    /// own; renewals; newcomers. If nothing stands between them, the call of the newcomers carries the last releases.
    #[inline]
    pub fn poll_call(&mut self, now: Time) -> Option<Call> {
        self.poll(CALL_MAX, true, now)
    }

    /// Like [`poll_call`](Self::poll_call) for at most `most` places, without the calls that renew leases:
    /// [`poll_keep_alive`](Self::poll_keep_alive) has those.
    pub fn poll_serving(&mut self, most: usize, now: Time) -> Option<Call> {
        self.poll(most.clamp(1, CALL_MAX), false, now)
    }

    #[inline]
    fn poll(&mut self, most: usize, renews: bool, now: Time) -> Option<Call> {
        if self.has_nothing_to_send() {
            self.end_resync();
            return None;
        }
        self.poll_next(most, renews, now)
    }

    /// Like [`poll`](Self::poll), where there may be something to send.
    fn poll_next(&mut self, most: usize, renews: bool, now: Time) -> Option<Call> {
        if self.is_kept_for_nobody() {
            self.release_kept(now);
        }
        if renews {
            self.take_question_up();
        }
        if self.releases.is_first_expired(self.limits.lease(), now) {
            self.drop_expired_releases(now);
        }
        if renews {
            self.choose_renewals(now);
        }
        self.end_resync();
        let joins = !self.renewals.is_resync() && self.joins.skip(&self.places);
        let between = renews && self.renewals.has_unsent();
        let call = if self.releases.has_unsent() {
            let (ids, used) = self.releases.poll(most);
            let limit = self.limit_to_promote(&ids);
            // What they free may be for a place with a higher limit than the newcomers'.
            let mut call =
                if joins && !between && self.joins.next_limit(&self.places) >= Some(limit) {
                    self.joins.poll(ids, most, &mut self.places)
                } else {
                    Call::of(Op::Release { ids })
                };
            call.used = used;
            call
        } else if between && let Some(op) = self.renewals.poll(&mut self.places, most) {
            Call::of(op)
        } else if joins {
            self.joins.poll(Ids::new(), most, &mut self.places)
        } else if self.may_audit() {
            Call::of(self.audit.poll())
        } else if self.probe.has_more() {
            Call::of(Op::Release { ids: Ids::new() })
        } else if renews
            && self.renewals.may_choose(self.probe.is_due())
            && self.renewals.is_queue_empty()
        {
            // The chosen places are gone, and others are still to be chosen.
            return self.poll(most, renews, now);
        } else {
            // The chosen places may be gone, and with them the reason why newcomers wait.
            let waited = self.renewals.is_resync();
            self.end_resync();
            return if waited && !self.renewals.is_resync() {
                self.poll(most, renews, now)
            } else {
                None
            };
        };
        Some(self.fill_in(call, now))
    }

    /// The next call that renews leases, ahead of all else, for at most `most` places; `None`: there is none for now.
    pub fn poll_keep_alive(&mut self, most: usize, now: Time) -> Option<Call> {
        let most = most.clamp(1, CALL_MAX);
        self.take_question_up();
        let op = loop {
            self.choose_renewals(now);
            match self.renewals.poll(&mut self.places, most) {
                // The chosen places are gone, and others are still to be chosen.
                None if self.renewals.may_choose(self.probe.is_due()) => {}
                None => {
                    self.end_resync();
                    return None;
                }
                Some(op) => break op,
            }
        };
        Some(self.fill_in(Call::of(op), now))
    }

    /// Has the places renewed whose reply says who waits.
    #[inline]
    fn take_question_up(&mut self) {
        if let Some((permit, first)) = self.reuse.poll_question(&self.places) {
            self.renewals.push(permit);
            first.into_iter().for_each(|first| self.renewals.push(first));
        }
    }

    #[inline]
    fn choose_renewals(&mut self, now: Time) {
        if !self.renewals.may_choose(self.probe.is_due()) || !self.renewals.is_queue_empty() {
            return;
        }
        self.renewals.choose(&mut self.places, now);
        if self.probe.take() && self.renewals.is_queue_empty() {
            let (is_put_off, has_waiting) = (self.renewals.is_put_off(), self.counts.has_waiting());
            let place = self.probe.choose(&self.places, is_put_off, has_waiting, now);
            place.into_iter().for_each(|n| self.renewals.push(n));
        }
    }

    /// Fills in by which limits the call is judged.
    #[inline]
    fn fill_in(&mut self, mut call: Call, now: Time) -> Call {
        if !matches!(call.op, Op::Acquire { .. }) {
            let ids = if let Op::Release { ids } = &call.op { &ids[..] } else { &[] };
            call.limit = self.limit_to_promote(ids);
            call.headroom = self.limits.headroom();
            self.reuse.handle_call(call.limit, now);
        }
        if let Some(limit) = self.limit_for_all(now) {
            (call.limit, call.for_all) = (limit, true);
        }
        if !matches!(call.op, Op::Audit { .. }) {
            self.probe.handle_call(&call.op, call.for_all);
        }
        call
    }

    /// The limit of a call without newcomers that releases these places: the highest that is known here, because each
    /// waiting place is judged by its own limit.
    fn limit_to_promote(&self, leaving: &[PlaceId]) -> u32 {
        let waiting = self.counts.highest_limit();
        let left = leaving.iter().filter_map(|id| id.bound).map(|bound| bound.limit).max();
        self.limits.of_policy().max(waiting.unwrap_or(0)).max(left.unwrap_or(0))
    }

    /// The limit that counts for all places, whatever they brought: an operator's, or 0 in a quarantine or a pause.
    fn limit_for_all(&self, now: Time) -> Option<u32> {
        match self.quarantined_until() {
            Some(end) if now < end => Some(0),
            _ => self.limits.for_all(),
        }
    }

    /// Drops the releases of places that are gone by themselves.
    pub(super) fn drop_expired_releases(&mut self, now: Time) {
        for id in self.releases.drop_expired(self.limits.lease(), now) {
            self.handle_left_queue(id.n);
        }
    }
}
