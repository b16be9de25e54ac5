//! What goes out.

use std::collections::VecDeque;

use super::options::AcquireOptions;
use super::place::{Place, WAITING_RENEWAL};
use super::places::Places;
use super::{Session, State};
use crate::call::{Call, Op};
use crate::id::{Ids, PlaceId};
use crate::ledger::TICKET_MIN;
use crate::time::Time;

/// Places in one call, at the most; where they take several permits, so many permits, and the last place may
/// take more.
pub(super) const CALL_MAX: usize = 512;
/// The proof of a place that no backend ever knew: it is in flight, so it is to be counted.
const NEVER_ENDS: u64 = TICKET_MIN - 1;

/// What a call says of its requests beside the operation.
struct CallHead {
    limit: u32,
    headroom: u32,
    max_waiting: u32,
    recalls: bool,
}

/// How soon a session's next call is to go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Urgency {
    /// A request waits for it, here or elsewhere.
    Now,
    /// It keeps leases alive, the first of which ends then.
    Before(Time),
    /// Any time will do.
    Later,
}

impl Session {
    /// Whether there is anything to send, and how soon; `None`: there is nothing.
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
            || self.more
            || (!self.joins.is_empty() && !self.resync)
            || self.is_kept_for_nobody()
    }

    /// By when to call [`poll_keep_alive`](Self::poll_keep_alive), if leases are to be renewed: the end of the first
    /// one.
    #[must_use]
    pub fn keeps_alive(&self) -> Option<Time> {
        if let Some(at) = self.asks_since() {
            return Some(at);
        }
        if !self.has_renewals() {
            return None;
        }
        let live = self.places.iter().filter(|(_, place)| place.is_live());
        Some(live.map(|(_, place)| place.deadline()).min().unwrap_or(Time::ZERO))
    }

    /// What most looks find: each call is followed by one.
    #[inline]
    fn has_nothing_to_send(&self) -> bool {
        !self.releases.has_unsent()
            && self.joins.is_empty()
            && self.reasserts.is_empty()
            && self.renewals.is_empty()
            && !(self.renew || self.ask || self.audit.is_due() || self.more)
            && self.asks_since().is_none()
            && !self.is_kept_for_nobody()
    }

    /// Whether what stands there of this process is to be asked now: not just after that was refused.
    #[must_use]
    pub fn may_audit(&self) -> bool {
        self.audit.is_due() && !self.resync && !self.releases.is_put_off()
    }

    fn has_renewals(&self) -> bool {
        !self.reasserts.is_empty()
            || !self.renewals.is_empty()
            || ((self.renew || self.ask) && self.renewing == 0)
    }

    /// The next call to send, until there is none for now. In this order: releases, so that a process
    /// always reads its own; renewals; newcomers. Where nothing stands between them, newcomers take the
    /// last releases along in their call.
    #[inline]
    pub fn poll_call(&mut self, now: Time) -> Option<Call> {
        self.poll(CALL_MAX, true, now)
    }

    /// As [`poll_call`](Self::poll_call), but for calls that renew leases: [`poll_keep_alive`](Self::poll_keep_alive)
    /// has those. For at most so many places.
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

    /// As [`poll`](Self::poll), where there may be something to send.
    fn poll_next(&mut self, most: usize, renews: bool, now: Time) -> Option<Call> {
        if self.is_kept_for_nobody() {
            self.release_kept(now);
        }
        if renews && let Some((permit, first)) = self.take_question() {
            self.renewals.push_back(permit);
            self.renewals.extend(first);
        }
        if self.releases.is_first_expired(self.limits.lease(), now) {
            self.drop_expired_releases(now);
        }
        if renews {
            self.begin_to_renew(now);
        }
        self.end_resync();
        let joins = !self.resync && self.skip_to_join();
        let between = renews && (!self.reasserts.is_empty() || !self.renewals.is_empty());
        let mut head = CallHead {
            limit: self.limits.of_policy(),
            headroom: self.limits.headroom(),
            max_waiting: 0,
            recalls: false,
        };
        let op = if self.releases.has_unsent() {
            let ids = self.releases.poll(most);
            let limit = self.limit_to_promote(&ids);
            // What they free may be for a place of a higher limit than the newcomers know.
            if joins && !between && self.next_limit() >= Some(limit) {
                self.next_acquire(ids, most, &mut head)
            } else {
                Op::Release { ids }
            }
        } else if between && let Some(op) = self.next_of_leases(most) {
            op
        } else if joins {
            self.next_acquire(Ids::new(), most, &mut head)
        } else if self.may_audit() {
            self.audit.poll()
        } else if self.more {
            Op::Release { ids: Ids::new() }
        } else if renews
            && (self.renew || self.ask)
            && self.renewing == 0
            && self.renewals.is_empty()
        {
            // The places that were to be renewed before are gone, and the others are still to be.
            return self.poll(most, renews, now);
        } else {
            // What was to be shown or asked may be gone, and with it the reason why newcomers wait.
            let waited = self.resync;
            self.end_resync();
            return if waited && !self.resync { self.poll(most, renews, now) } else { None };
        };
        Some(self.call_of(op, head, now))
    }

    /// The next call that renews leases, ahead of all else that is to be sent; `None`: there is none for now. For at
    /// most so many places.
    pub fn poll_keep_alive(&mut self, most: usize, now: Time) -> Option<Call> {
        let most = most.clamp(1, CALL_MAX);
        if let Some((permit, first)) = self.take_question() {
            self.renewals.push_back(permit);
            self.renewals.extend(first);
        }
        let op = loop {
            self.begin_to_renew(now);
            match self.next_of_leases(most) {
                // Those that were to be renewed before are gone, and the others are still to be.
                None if (self.renew || self.ask) && self.renewing == 0 => {}
                None => {
                    self.end_resync();
                    return None;
                }
                Some(op) => break op,
            }
        };
        let head = CallHead {
            limit: self.limits.of_policy(),
            headroom: self.limits.headroom(),
            max_waiting: 0,
            recalls: false,
        };
        Some(self.call_of(op, head, now))
    }

    #[inline]
    fn begin_to_renew(&mut self, now: Time) {
        if (self.renew || self.ask) && self.renewing == 0 && self.renewals.is_empty() {
            if self.renew {
                self.begin_renewals(now);
            }
            if std::mem::take(&mut self.ask) && self.renewals.is_empty() {
                self.begin_to_ask(now);
            }
        }
    }

    fn next_of_leases(&mut self, most: usize) -> Option<Op> {
        let op = self.next_reassert(most).or_else(|| self.next_renewal(most))?;
        self.renewing += 1;
        Some(op)
    }

    fn call_of(&mut self, op: Op, mut head: CallHead, now: Time) -> Call {
        // Whatever it is, it promotes; if only up to its bound again, its reply says so.
        if !matches!(op, Op::Audit { .. }) {
            self.more = false;
        }
        if !matches!(op, Op::Acquire { .. }) {
            let ids = if let Op::Release { ids } = &op { &ids[..] } else { &[] };
            head.limit = self.limit_to_promote(ids);
            self.note_limit_of_calls(head.limit, now);
        }
        let CallHead { limit, headroom, max_waiting, recalls } = head;
        let set = self.limit_for_all(now);
        let (limit, for_all) = (set.unwrap_or(limit), set.is_some());
        Call { limit, headroom, for_all, max_waiting, recalls, op }
    }

    /// Up to how many permits in use a call without newcomers grants, which releases these places. Each place that waits
    /// is judged by its own limit; this is the highest that is known here.
    fn limit_to_promote(&self, leaving: &[PlaceId]) -> u32 {
        let waiting = self.counts.highest_limit();
        let left = leaving.iter().filter_map(|id| id.bound).map(|bound| bound.limit).max();
        self.limits.of_policy().max(waiting.unwrap_or(0)).max(left.unwrap_or(0))
    }

    /// The limit of the next newcomer.
    fn next_limit(&mut self) -> Option<u32> {
        self.joins.front().and_then(|n| self.places.find(*n)).map(|place| place.limit)
    }

    /// The limit that counts for all places, whatever they brought: an operator's, or none in a quarantine.
    fn limit_for_all(&self, now: Time) -> Option<u32> {
        match self.quarantined_until() {
            Some(end) if now < end => Some(0),
            _ => self.limits.of_operator(),
        }
    }

    /// Drops the releases of places that are gone by themselves.
    pub(super) fn drop_expired_releases(&mut self, now: Time) {
        for id in self.releases.drop_expired(self.limits.lease(), now) {
            self.left_queue(id.n);
        }
    }

    /// Places that are due, or half way there: so all places of a process come to be renewed by one
    /// call.
    fn begin_renewals(&mut self, now: Time) {
        self.renew = false;
        let (resync, is_put_off) = (self.resync, self.renew_at.is_some());
        let mut waiting = Vec::new();
        for place in self.places.iter_mut() {
            let due = match place.state {
                _ if place.restoring || is_put_off && place.refused => false,
                State::Waiting { .. } => true,
                State::Held => {
                    let is_soon = now >= place.acked + place.interval() / 2;
                    resync || place.check || place.refused || is_soon
                }
                State::Admitted { .. } => {
                    if place.refused || now >= place.acked + WAITING_RENEWAL / 2 {
                        place.refused = false;
                        place.acked = now;
                        self.reasserts.push_back(place.n);
                    }
                    false
                }
                _ => false,
            };
            if due {
                (place.check, place.refused) = (false, false);
                if place.is_waiting() {
                    waiting.push(place.n);
                } else {
                    self.renewals.push_back(place.n);
                }
            }
        }
        // Behind those that hold, however many they are.
        self.renewals.extend(waiting);
    }

    /// A permit may be free for whichever place is first. One call finds out for all of them, and its reply says when
    /// the next lease ends: the renewal of any place that waits.
    fn begin_to_ask(&mut self, now: Time) {
        self.asked_at = Some(now);
        let is_put_off = self.renew_at.is_some();
        let is_there = |place: &Place| {
            place.is_waiting() && !place.restoring && !(is_put_off && place.refused)
        };
        match self.places.iter().find(|(_, place)| is_there(place)) {
            Some((_, place)) => self.renewals.push_back(place.n),
            // A call without places sweeps and promotes, too.
            None => self.more |= self.counts.has_waiting(),
        }
    }

    fn next_reassert(&mut self, most: usize) -> Option<Op> {
        let (node, mut proofs) = (self.places.node(), Vec::new());
        let lease_ms =
            next_places(&mut self.reasserts, &mut self.places, most, |place, now_sent| {
                let proof = match place.state {
                    State::Waiting { ticket: Some(ticket) } => ticket,
                    State::Held => place.lease_end,
                    State::Admitted { .. } => NEVER_ENDS,
                    _ => return false,
                };
                if now_sent {
                    if let State::Admitted { announced } = &mut place.state {
                        announced.send();
                    }
                    proofs.push((place.id(node), proof));
                }
                true
            })?;
        Some(Op::Reassert { lease_ms, proofs })
    }

    fn next_renewal(&mut self, most: usize) -> Option<Op> {
        let (node, mut ids) = (self.places.node(), Ids::new());
        let lease_ms =
            next_places(&mut self.renewals, &mut self.places, most, |place, now_sent| {
                let is_there = matches!(place.state, State::Waiting { .. } | State::Held);
                if is_there && now_sent {
                    ids.push(place.id(node));
                }
                is_there
            })?;
        Some(Op::Renew { lease_ms, ids })
    }

    /// Passes over joins that are none any more; whether there is one.
    fn skip_to_join(&mut self) -> bool {
        while let Some(n) = self.joins.front() {
            if self.places.find(*n).is_some_and(|place| place.is_joining()) {
                return true;
            }
            self.joins.pop_front();
        }
        false
    }

    /// The joins in front that ask for the same, of whatever tenants, in the order of their arrival; as many as
    /// there is room for beside those that leave. What else the call says of them goes into `head`.
    fn next_acquire(&mut self, leaving: Ids, most: usize, head: &mut CallHead) -> Op {
        let (node, mut ids) = (self.places.node(), Ids::new());
        let mut common: Option<(u32, AcquireOptions)> = None;
        let mut permits = leaving.iter().map(|id| id.cost() as usize).sum::<usize>();
        while permits < most
            && let Some(n) = self.joins.front().copied()
        {
            let place = match self.places.find(n) {
                Some(place) if place.is_joining() => place,
                // It is no newcomer any more.
                _ => {
                    self.joins.pop_front();
                    continue;
                }
            };
            match &common {
                None => common = Some((place.limit, place.options)),
                Some((limit, options)) => {
                    if *limit != place.limit || !options.may_share_a_call(&place.options) {
                        break;
                    }
                }
            }
            if let State::Joining { sent, .. } = &mut place.state {
                sent.send();
            }
            head.recalls |= place.options.reuse_ms > 0;
            permits += place.cost() as usize;
            ids.push(place.id(node));
            self.joins.pop_front();
        }
        match common {
            Some((limit, options)) => {
                let lease_ms = options.lease_ms();
                (head.limit, head.headroom) = (limit, options.headroom);
                head.max_waiting = options.max_waiting;
                Op::Acquire { leaving, lease_ms, max_queue: options.max_queue, ids }
            }
            None => Op::Release { ids: leaving },
        }
    }
}

/// Takes places with one lease out of a queue, with at most so many permits, and leaves the others
/// there. `visit` says whether a place is still to be sent; with `true` it is sent now. Gives the lease
/// of those sent.
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
            permits += place.cost() as usize;
        } else {
            others.push_back(n);
        }
    }
    while let Some(n) = others.pop_back() {
        queue.push_front(n);
    }
    common
}
