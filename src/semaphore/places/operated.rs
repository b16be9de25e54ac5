//! What operators do to a semaphore while it is used.

use std::time::Duration;

use tokio::time::Instant;

use super::{Places, Slot, State, find, number, release_of, slot_index};
use crate::backend::{Mode, Override};
use crate::error::FullReason;
use crate::ledger::PlaceId;

impl Places {
    /// The same, with what an operator set before there was a record of it here.
    pub(in crate::semaphore) const fn overridden(mut self, over: Override) -> Self {
        self.over = over;
        self
    }

    /// An operator set something else. If there are more permits now, those who wait ask for them at
    /// once: only their process knows how many its policy allows.
    pub(in crate::semaphore) fn set_override(&mut self, over: Override) {
        let before = self.limit_in_force();
        self.over = over;
        if self.limit_in_force() > before {
            self.renew |= self.anyone_waits();
        }
    }

    /// The limit that goes along with every call.
    pub(in crate::semaphore) fn limit_in_force(&self) -> u32 {
        self.over.in_place().unwrap_or(self.limit)
    }

    /// Refuses one that came while the semaphore is to run empty.
    pub(super) fn turn_newcomer_away(&mut self, index: usize) {
        let (in_use, waiting) = self.seen;
        if let Some(slot) = self.slots.get_mut(index) {
            slot.state = State::Refused(FullReason::Draining, in_use, waiting);
        }
    }

    /// An operator revoked a place. Its permit is lost; a request that waits is refused. Whoever else
    /// waits asks for what that freed: only his process knows the limit.
    pub(in crate::semaphore) fn revoked(&mut self, id: PlaceId, now: Instant) {
        self.renew |= self.anyone_waits();
        if id.node != self.node {
            return;
        }
        let renamed = self.doubted.iter().find(|(old, _)| *old == id.n);
        let n = renamed.map_or(id.n, |(_, new)| *new);
        let (in_use, waiting) = self.seen;
        let Some(slot) = find(&mut self.slots, n) else { return };
        match slot.state {
            State::Held | State::Admitted { .. } => self.lose(slot_index(n), now),
            State::Joining { .. } | State::Waiting { .. } => {
                if slot.is_there() {
                    self.releases.push_back(release_of(self.node, slot, now));
                }
                slot.state = State::Refused(FullReason::Revoked, in_use, waiting);
                self.woken.extend(slot.waker.take());
            }
            _ => {}
        }
    }

    /// A renewal found a place gone. Before it is shown its proof, it must be known that it was not
    /// revoked; and that from an answer to a question that is asked from here on, because what is
    /// revoked is told first and taken out then.
    pub(super) fn gone(&mut self, n: u64) {
        if self.doubted.iter().any(|(_, new)| *new == n) {
            return;
        }
        let (serial, deaf) = (&self.serial, self.deaf);
        let Some(slot) = find(&mut self.slots, n) else { return };
        if matches!(slot.state, State::Waiting { .. }) {
            // Back under a new id: what still names the old one must not reach this stay.
            slot.n = number(serial, slot_index(n));
            slot.deaf = deaf;
        }
        let new = slot.n;
        self.doubted.push((n, new));
        self.doubt = true;
    }

    /// Whether it is to be asked if places were revoked; says so once.
    pub(in crate::semaphore) const fn take_doubt(&mut self) -> bool {
        std::mem::replace(&mut self.doubt, false)
    }

    /// What was revoked is known: the other places that are gone were lost by the backend.
    pub(in crate::semaphore) fn doubt_settled(&mut self, now: Instant) {
        for (_, n) in std::mem::take(&mut self.doubted) {
            let Some(slot) = find(&mut self.slots, n) else { continue };
            match slot.state {
                State::Held => {
                    self.reasserts.push(n);
                    self.data_was_lost(now);
                }
                State::Waiting { ticket: Some(_) } => self.reasserts.push(n),
                State::Waiting { ticket: None } => {
                    slot.state = State::Joining { sent: false, hint: None };
                    self.joins.push_back(n);
                }
                _ => {}
            }
        }
        self.end_resync();
    }

    /// For how long a place has had its permit.
    pub(in crate::semaphore) fn held_for(&self, id: PlaceId, now: Instant) -> Option<Duration> {
        let slot = self.slots.get(slot_index(id.n)).filter(|slot| slot.n == id.n)?;
        slot.is_in_flight().then(|| now.saturating_duration_since(slot.held_at))
    }

    /// Places that have a permit, and for how long, ms.
    pub(in crate::semaphore) fn held_since(&self, now: Instant, most: usize) -> Vec<(u64, u64)> {
        let held = self.slots.iter().filter(|(_, slot)| slot.is_in_flight()).take(most);
        let ms = |slot: &Slot| now.saturating_duration_since(slot.held_at).as_millis();
        held.map(|(_, slot)| (slot.n, u64::try_from(ms(slot)).unwrap_or(u64::MAX))).collect()
    }

    fn anyone_waits(&self) -> bool {
        self.slots.iter().any(|(_, slot)| matches!(slot.state, State::Waiting { .. }))
    }
}

impl Override {
    /// The limit in place of the policy's.
    pub(in crate::semaphore) const fn in_place(self) -> Option<u32> {
        match self.mode {
            Mode::Paused => Some(0),
            Mode::Open | Mode::Draining => self.limit,
        }
    }
}
