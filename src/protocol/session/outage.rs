//! The backend cannot be asked: the policy answers in its place.

use std::collections::VecDeque;

use super::options::OnUnavailable;
use super::place::{Place, WAITING_RENEWAL, index_of, serial_of};
use super::{Event, Session, State};
use crate::error::RejectReason;
use crate::protocol::time::Time;

impl Session {
    /// The backend cannot be asked. For a request without a place the policy answers; one in the queue
    /// goes on waiting, unless the policy lets it pass. A caller that waits for an acknowledgement is
    /// told.
    pub fn handle_unreachable(&mut self, now: Time) {
        self.outage = true;
        self.take_calls_back();
        let mut places: Vec<_> =
            self.places.iter().map(|(index, place)| (place.n, index)).collect();
        places.sort_unstable_by_key(|(n, _)| serial_of(*n));
        self.local_queue = VecDeque::new();
        for (_, index) in places {
            let Some(place) = self.places.get(index) else { continue };
            match place.state {
                State::Joining { .. } | State::Waiting { .. } => self.meet_outage(index, now),
                State::Releasing => {
                    self.set(index, State::Released { acknowledged: false });
                    self.events.push(Event::Released(index));
                }
                _ => {}
            }
        }
        self.admit_local(now);
        // A place that was on its way and finds no share may have no queue to wait in, or too long a
        // one: the newest are refused.
        let (mut kept, mut refused) = (VecDeque::new(), Vec::new());
        for n in std::mem::take(&mut self.local_queue) {
            match self.places.find(n).and_then(|place| place.refused_locally(kept.len())) {
                None => {
                    self.places.find(n).into_iter().for_each(|place| place.queued = true);
                    kept.push_back(n);
                }
                Some(reason) => refused.push((index_of(n), reason)),
            }
        }
        self.local_queue = kept;
        for (index, reason) in refused {
            self.refuse_by_policy(index, reason, self.local_queue.len() as u64, now);
        }
        self.admit_local(now);
    }

    /// What an outage means for a place that has no permit.
    pub(super) fn meet_outage(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        match place.options.on_unavailable {
            OnUnavailable::Local(_) => {
                let serial = serial_of(place.n);
                let at = self.local_queue.partition_point(|n| serial_of(*n) < serial);
                self.local_queue.insert(at, place.n);
            }
            OnUnavailable::Refuse | OnUnavailable::Admit => self.wait_or_fall_back(index, now),
        }
    }

    /// The backend cannot be asked for this place. One that stood in the queue goes on waiting, if the policy
    /// has nothing better.
    pub(super) fn wait_or_fall_back(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        if place.queued && place.options.on_unavailable == OnUnavailable::Refuse {
            self.wait_on(index, now);
        } else {
            self.fall_back(index, now);
        }
    }

    /// A request that stood in the queue goes on waiting, though its place has to be asked for again: with
    /// its next renewal.
    fn wait_on(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get_mut(index).filter(|place| place.is_joining()) else {
            return;
        };
        place.acked = now;
        self.set(index, State::Waiting { ticket: None });
        self.want(now + WAITING_RENEWAL);
    }

    /// Whether the backend was last said to be out of reach.
    #[must_use]
    pub const fn is_outage(&self) -> bool {
        self.outage
    }

    /// A request comes in an outage.
    pub(super) fn join_in_outage(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        let n = place.n;
        if let OnUnavailable::Local(_) = place.options.on_unavailable {
            self.local_queue.push_back(n);
            self.admit_local(now);
            let before = self.local_queue.len().saturating_sub(1);
            if self.local_queue.back() == Some(&n)
                && let Some(reason) = self.places.find(n).and_then(|p| p.refused_locally(before))
            {
                self.refuse_by_policy(index, reason, before as u64, now);
            } else if let Some(place) = self.places.find(n).filter(|place| place.is_joining()) {
                place.queued = true;
            }
        } else {
            self.fall_back(index, now);
        }
    }

    /// While shares of the process's own are free, gives them to those that wait for one, in order.
    pub(super) fn admit_local(&mut self, now: Time) {
        while self.outage
            && let Some(n) = self.local_queue.front().copied()
        {
            let share = self.places.find(n).map(|place| place.options.on_unavailable);
            if share.is_some_and(|share| !self.has_share(share)) {
                return;
            }
            self.local_queue.pop_front();
            self.admit(index_of(n), now);
        }
    }

    /// Whether the policy lets one more request pass.
    fn has_share(&self, on_unavailable: OnUnavailable) -> bool {
        let set = self.overrides.in_place();
        match on_unavailable {
            OnUnavailable::Refuse => false,
            OnUnavailable::Admit => set != Some(0),
            OnUnavailable::Local(share) => {
                let share = set.map_or(share, |limit| share.min(limit));
                self.in_flight < u64::from(share)
            }
        }
    }

    /// The backend cannot be asked for this place, and the place does not wait for it any longer.
    pub(super) fn fall_back(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        if !place.is_joining() && !place.is_waiting() {
            return;
        }
        let (policy, may_wait) = (place.options.on_unavailable, place.options.max_queue.is_some());
        if self.has_share(policy) {
            self.admit(index, now);
        } else if matches!(policy, OnUnavailable::Local(_)) && !may_wait {
            self.refuse_by_policy(index, RejectReason::Limit, 0, now);
        } else {
            self.leave_server(index, now);
            self.set(index, State::Failed);
            self.events.push(Event::Failed(index));
        }
    }

    /// In flight without the backend: under a new id, because the old one may stand there as waiting.
    fn admit(&mut self, index: usize, now: Time) {
        self.leave_server(index, now);
        let n = self.places.number(index);
        let poll_only = self.poll_only;
        if let Some(place) = self.places.get_mut(index) {
            place.n = n;
            place.poll_only = poll_only;
            place.held_at = now;
            place.acked = now;
        }
        self.set(index, State::Admitted { announced: false });
        self.events.push(Event::Admitted(index));
        if !self.outage {
            // Only this call failed, or went unanswered: the backend can be told at once.
            self.reasserts.push_back(n);
        }
        self.want(now + WAITING_RENEWAL);
    }

    pub(super) fn refuse_by_policy(
        &mut self,
        index: usize,
        reason: RejectReason,
        waiting: u64,
        now: Time,
    ) {
        self.leave_server(index, now);
        self.set(index, State::Refused { reason, in_use: self.in_flight, waiting });
        self.events.push(Event::Refused(index));
    }

    /// A place waits for no share any more.
    pub(super) fn forget_local(&mut self, n: u64) {
        if self.local_queue.back() == Some(&n) {
            self.local_queue.pop_back();
        } else if self.local_queue.front() == Some(&n) {
            self.local_queue.pop_front();
        } else if !self.local_queue.is_empty()
            && let Ok(at) = self.local_queue.binary_search_by_key(&serial_of(n), |n| serial_of(*n))
        {
            self.local_queue.remove(at);
        }
    }
}

impl Place {
    /// Why it may not wait for a share of the process's own, behind so many others, if so. A place that
    /// stood in the queue before the outage may.
    fn refused_locally(&self, before: usize) -> Option<RejectReason> {
        match self.options.max_queue {
            _ if self.queued => None,
            None => Some(RejectReason::Limit),
            Some(max) => (before >= max as usize).then_some(RejectReason::QueueFull),
        }
    }
}
