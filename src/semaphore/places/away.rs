//! The backend goes away, and comes back; perhaps without its data.

use tokio::time::Instant;

use super::{Places, SLOT_BITS, State, number, release_of};
use crate::backend::Mode;
use crate::error::{BackendError, FullReason};
use crate::semaphore::policy::OnUnavailable;

impl Places {
    /// The backend cannot be reached: for who has no place yet the policy answers, and who waits for
    /// an acknowledgement is told. Who waits in the queue goes on waiting, unless the policy lets
    /// him pass.
    pub(in crate::semaphore) fn unreachable(&mut self, error: &BackendError, now: Instant) {
        self.away = Some(error.clone());
        let mut slots: Vec<_> = self.slots.iter().map(|(index, slot)| (slot.n, index)).collect();
        slots.sort_unstable_by_key(|(n, _)| n >> SLOT_BITS);
        for (n, index) in slots {
            let slot = &self.slots[index];
            let waits = matches!(slot.state, State::Waiting { .. });
            if slot.is_joining() || (waits && slot.terms.on_unavailable == OnUnavailable::Admit) {
                self.turned_away(index, error, now);
            }
            self.released(n, &Err(error.clone()));
        }
    }

    /// There is a new connection: ask for everything again, in the order of rule 5. `again`: not the
    /// first one of this process.
    pub(in crate::semaphore) fn connected(
        &mut self,
        deaf: bool,
        lost_at: Option<Instant>,
        again: bool,
    ) {
        self.deaf = deaf;
        if let Some(at) = lost_at {
            self.data_was_lost(at);
        }
        self.away = None;
        self.renewing = 0;
        self.doubted.clear();
        self.doubt = false;
        while let Some(unanswered) = self.releasing.pop_back() {
            self.releases.push_front(unanswered);
        }
        self.releases.extend(self.deferred.drain(..));
        let admitted =
            self.slots.iter().filter(|(_, slot)| matches!(slot.state, State::Admitted { .. }));
        self.reasserts = admitted.map(|(_, slot)| slot.n).collect();
        let mut joins: Vec<u64> = Vec::new();
        for (_, slot) in &mut self.slots {
            if let State::Joining { sent, hint } = &mut slot.state {
                // A hint that was kept is of the connection before, and perhaps of data before.
                *hint = None;
                // An id that was sent stays as it is.
                let sent = *sent;
                slot.deaf = if sent { slot.deaf } else { deaf };
                joins.push(slot.n);
            }
        }
        joins.sort_unstable_by_key(|n| n >> SLOT_BITS);
        self.joins = joins.into();
        self.resync = self.slots.iter().any(|(_, slot)| slot.is_live());
        self.renew = self.resync;
        self.recount = again;
    }

    /// The backend cannot be asked for this place: the policy answers.
    pub(super) fn turned_away(&mut self, index: usize, error: &BackendError, now: Instant) {
        let in_flight = self.in_flight();
        let paused = self.over.mode == Mode::Paused;
        let Some(slot) = self.slots.get(index) else { return };
        if !matches!(slot.state, State::Joining { .. } | State::Waiting { .. }) {
            return;
        }
        match (slot.terms.on_unavailable, slot.terms.max_queue) {
            (OnUnavailable::Admit, _) if !paused => self.admit(index, now),
            (OnUnavailable::Local(share), _) if !paused && in_flight < u64::from(share) => {
                self.admit(index, now);
            }
            (OnUnavailable::Local(_), None) => {
                self.refuse(index, FullReason::Limit, in_flight);
            }
            // Waits until one of this process's own is free, or the backend is back.
            (OnUnavailable::Local(_), Some(max)) if self.away.is_some() => {
                let waiting = self.slots.iter().filter(|(_, slot)| slot.is_joining()).count();
                if waiting > max as usize {
                    self.refuse(index, FullReason::QueueFull, in_flight);
                }
            }
            _ => {
                let slot = &mut self.slots[index];
                let there = slot.is_there();
                slot.state = State::Failed(error.clone());
                self.woken.extend(slot.waker.take());
                self.counts.refused();
                if there {
                    self.releases.push_back(release_of(self.node, slot, now));
                }
            }
        }
    }

    /// In flight without the backend: under a new id, because the old one may stand there as
    /// waiting.
    fn admit(&mut self, index: usize, now: Instant) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        if slot.is_there() {
            self.releases.push_back(release_of(self.node, slot, now));
        }
        slot.n = number(&self.serial, index);
        slot.deaf = self.deaf;
        slot.state = State::Admitted { announced: false };
        slot.held_at = now;
        self.woken.extend(slot.waker.take());
        self.counts.admitted();
        if self.away.is_none() {
            // Only this call failed: the backend can be told at once.
            let n = slot.n;
            self.reasserts.push(n);
        }
    }

    pub(super) fn refuse(&mut self, index: usize, reason: FullReason, in_use: u64) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        slot.state = State::Refused(reason, in_use, 0);
        self.woken.extend(slot.waker.take());
        self.counts.refused();
    }

    /// One of this process's own came free while the backend is away: the next one has it.
    pub(super) fn admit_next(&mut self, now: Instant) {
        let Some(error) = self.away.clone() else { return };
        let next = self.slots.iter().filter(|(_, slot)| slot.is_joining());
        if let Some((index, _)) = next.min_by_key(|(_, slot)| slot.n >> SLOT_BITS) {
            self.turned_away(index, &error, now);
        }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.slots.iter().filter(|(_, slot)| slot.is_in_flight()).count() as u64
    }

    pub(super) fn quarantined_until(&self) -> Option<Instant> {
        let lost_at = self.quarantine.lost_at.filter(|_| self.quarantine.is_on)?;
        Some(lost_at + self.lease.max(self.longest_lease()))
    }

    /// The backend forgot a place that was held, or may have.
    pub(super) fn data_was_lost(&mut self, at: Instant) {
        if self.quarantine.is_on {
            self.quarantine.lost_at = Some(at);
            if let Some(end) = self.quarantined_until() {
                self.want(end);
            }
        }
    }
}
