//! An outage: the backend cannot be asked, and the policy answers in its place.

use std::collections::BTreeMap;

use super::local::LocalQueue;
use super::options::OnUnavailable;
use super::place::{Acked, Sent, WAITING_RENEWAL};
use super::{Event, Session, State};
use crate::claim::LineId;
use crate::ledger::Usage;
use crate::lines::line_of;
use crate::reject::RejectReason;
use crate::time::Time;

impl Session {
    /// Begins an outage. The policy answers requests without a place; a request in the queue keeps waiting, unless the
    /// policy lets it pass. Callers that wait for an acknowledgement are told that there is none.
    pub fn handle_unreachable(&mut self, now: Time) {
        self.outage.get_or_insert_with(LocalQueue::new);
        self.movement.handle_change(now);
        self.end_reuse(now);
        self.take_calls_back();
        let mut places: Vec<_> =
            self.places.iter().map(|(index, place)| (place.arrival, index)).collect();
        places.sort_unstable();
        self.outage = Some(LocalQueue::of(&self.places));
        for (_, index) in &places {
            let Some(place) = self.places.get(*index) else { continue };
            match place.state {
                State::Joining { .. } | State::Waiting { .. } => self.meet_outage(*index, now),
                State::Releasing => {
                    self.set(*index, State::Released { acknowledged: false });
                    self.events.push(Event::Released(*index));
                }
                _ => {}
            }
        }
        self.admit_local(now);
        // A place that was on its way and finds no share may have no queue to wait in, or a full one: the newest are
        // refused.
        let mut kept: BTreeMap<LineId, u64> = BTreeMap::new();
        for (_, index) in places {
            let Some(place) = self.places.get(index).filter(|place| place.waits_locally()) else {
                continue;
            };
            let before = kept.entry(line_of(place.claim())).or_default();
            if self.exceeds_share(place) {
                self.fail(index, now);
                continue;
            }
            match self.local_refusal(place, *before, now) {
                None => {
                    *before += 1;
                    self.places.get_mut(index).into_iter().for_each(|place| place.queued = true);
                }
                Some(reason) => self.refuse_by_policy(index, reason, now),
            }
        }
        self.admit_local(now);
    }

    /// What an outage means for a place that has no permit.
    pub(super) fn meet_outage(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        match place.options.on_unavailable {
            OnUnavailable::Local(_) => {
                if let Some(queue) = &mut self.outage {
                    queue.join(index, place);
                }
            }
            OnUnavailable::Refuse | OnUnavailable::Admit => self.wait_or_fall_back(index, now),
        }
    }

    /// The backend cannot be asked for this place. A request that stood in the queue keeps waiting if its policy has
    /// nothing better.
    pub(super) fn wait_or_fall_back(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        if place.queued && place.options.on_unavailable == OnUnavailable::Refuse {
            self.wait_on(index, now);
        } else {
            self.fall_back(index, now);
        }
    }

    /// Lets a request that stood in the queue wait on. Its next renewal asks for its place again.
    fn wait_on(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get_mut(index).filter(|place| place.is_joining()) else {
            return;
        };
        place.acked = Acked::at(now);
        self.set(index, State::Waiting { ticket: None });
        self.want(now + WAITING_RENEWAL);
    }

    /// Whether there is an outage.
    #[must_use]
    pub const fn is_outage(&self) -> bool {
        self.outage.is_some()
    }

    /// Takes a new request in an outage.
    pub(super) fn join_in_outage(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        if !matches!(place.options.on_unavailable, OnUnavailable::Local(_)) {
            return self.fall_back(index, now);
        }
        if let Some(queue) = &mut self.outage {
            queue.join(index, place);
        }
        self.admit_local(now);
        let Some(place) = self.places.get(index).filter(|place| place.waits_locally()) else {
            return;
        };
        if self.exceeds_share(place) {
            return self.fail(index, now);
        }
        let before = self.waiting_locally(place).saturating_sub(1);
        match self.local_refusal(place, before, now) {
            Some(reason) => self.refuse_by_policy(index, reason, now),
            None => self.places.get_mut(index).into_iter().for_each(|place| place.queued = true),
        }
    }

    /// Ends the wait for the backend: the policy answers.
    pub(super) fn fall_back(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        if !place.is_joining() && !place.is_waiting() {
            return;
        }
        self.expire_own_starts(now);
        let Some(place) = self.places.get(index) else { return };
        let (policy, may_wait) = (place.options.on_unavailable, place.options.max_queue.is_some());
        if self.has_share(place, now) {
            self.admit(index, now);
        } else if matches!(policy, OnUnavailable::Local(_))
            && !may_wait
            && !self.exceeds_share(place)
        {
            let reason = self.lack_of_share(place, now);
            self.refuse_by_policy(index, reason, now);
        } else {
            self.fail(index, now);
        }
    }

    /// Fails a request that the policy does not let pass.
    pub(super) fn fail(&mut self, index: usize, now: Time) {
        self.leave_server(index, now);
        self.set(index, State::Failed);
        self.events.push(Event::Failed(index));
    }

    /// Lets a request pass without the backend, under a new id, because the old one may wait there.
    pub(super) fn admit(&mut self, index: usize, now: Time) {
        self.leave_server(index, now);
        let n = self.places.renumber(index);
        self.adopt_before_it_passes(index);
        if let Some(place) = self.places.get_mut(index) {
            place.held_at = now;
            place.granted_at = now;
            place.acked = Acked::at(now);
        }
        self.reuse.handle_admission();
        self.note_start(index, now);
        self.set(index, State::Admitted { announced: Sent::No });
        self.events.push(Event::Admitted(index));
        if !self.is_outage() {
            // Only this call failed, or went unanswered: the backend can be told at once.
            self.renewals.push_proof(n);
        }
        self.want(now + WAITING_RENEWAL);
    }

    /// Refuses a request because this process's share, or its part of the rate, is used up: the counts are the process's
    /// own.
    pub(super) fn refuse_by_policy(&mut self, index: usize, reason: RejectReason, now: Time) {
        self.leave_server(index, now);
        let waiting = self.outage.as_ref().map_or(0, LocalQueue::waiting);
        let usage = Usage { in_use: self.counts.in_flight(), waiting };
        self.set(index, State::refused(reason, Some(usage), true));
        self.events.push(Event::Refused(index));
    }
}
