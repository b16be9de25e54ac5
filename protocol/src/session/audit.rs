//! The audit: which places of this process are on the server, after data may have been lost (rule 6).

use std::time::Duration;

use super::IDLE;
use crate::call::Op;
use crate::time::Time;

/// How many places of a semaphore an audit examines.
const AUDIT_MAX: u32 = 1000;

/// Whether an audit is owed, and when a place left last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Audit {
    is_due: bool,
    is_sent: bool,
    left_at: Option<Time>,
}

impl Audit {
    pub(super) const fn is_due(&self) -> bool {
        self.is_due
    }

    pub(super) const fn is_sent(&self) -> bool {
        self.is_sent
    }

    /// A place left, or came back under a new id: a replica that is promoted may not have heard of it.
    pub(super) const fn handle_left(&mut self, now: Time) {
        self.left_at = Some(now);
    }

    /// Whether a place left within this time.
    pub(super) fn has_left_within(&self, time: Duration, now: Time) -> bool {
        self.left_at.is_some_and(|at| now < at + time)
    }

    /// Until when the session is kept though it is unused: for this time after the last place left.
    pub(super) fn kept_until(&self, kept: Duration, now: Time) -> Time {
        self.left_at.map_or(now, |left_at| left_at + kept)
    }

    /// Forgets when the last place left: that is too long ago to matter.
    pub(super) const fn forget(&mut self) {
        self.left_at = None;
    }

    pub(super) const fn poll(&mut self) -> Op {
        (self.is_due, self.is_sent) = (false, true);
        Op::Audit { most: AUDIT_MAX }
    }

    /// The call was answered, or broke off.
    pub(super) const fn handle_answered(&mut self) {
        self.is_sent = false;
    }

    /// The call was not carried out, and there is another connection.
    pub(super) const fn handle_unanswered(&mut self) {
        self.is_due = true;
    }

    /// The call was refused. It is made again for as long as a place left not long ago.
    pub(super) const fn handle_refused(&mut self) {
        self.is_due = self.left_at.is_some();
    }

    /// A call that was sent will not be answered.
    pub(super) const fn take_back(&mut self) {
        self.is_due |= std::mem::replace(&mut self.is_sent, false);
    }

    pub(super) const fn handle_connected(&mut self, same_data: bool) {
        self.is_due |= !same_data && self.left_at.is_some();
    }

    /// For explorers: makes all moments equal at which a place left too late to be forgotten before `horizon`.
    pub(super) fn coarsen(&mut self, reuse: Duration, now: Time, horizon: Time) {
        if self.left_at.is_some_and(|at| at + IDLE >= horizon && now >= at + reuse) {
            self.left_at = Some(Time::ZERO + horizon.since(Time::ZERO + IDLE));
        }
    }
}
