//! Leases of this process that nobody needs any more.

use std::collections::VecDeque;

use super::{RequestId, SILENT_AFTER};
use crate::liveness::LeaseId;
use crate::time::Time;

/// The most leases that are remembered for this. Others end by themselves.
const LEASES_MAX: usize = 64;

/// How often one is tried. Then it ends by itself.
const TRIES: u8 = 3;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Revocations {
    waiting: VecDeque<(LeaseId, u8)>,
    sent: Vec<Sent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Sent {
    id: RequestId,
    lease: LeaseId,
    tries: u8,
    at: Time,
}

impl Revocations {
    pub(super) fn extend(&mut self, lease: Option<LeaseId>) {
        let has_room = self.waiting.len() < LEASES_MAX;
        self.waiting.extend(lease.filter(|_| has_room).map(|lease| (lease, 0)));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.sent.is_empty()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.sent.len()
    }

    pub(super) fn send(&mut self, id: RequestId, now: Time) -> Option<LeaseId> {
        let (lease, tries) = self.waiting.pop_front()?;
        self.sent.push(Sent { id, lease, tries: tries + 1, at: now });
        Some(lease)
    }

    pub(super) fn handle_done(&mut self, id: RequestId) {
        self.sent.retain(|sent| sent.id != id);
    }

    pub(super) fn handle_refused(&mut self, id: RequestId) {
        self.take_back_if(|sent| sent.id == id);
    }

    pub(super) fn take_back(&mut self) {
        self.take_back_if(|_| true);
    }

    /// Returns whether one was not answered.
    pub(super) fn handle_timeout(&mut self, now: Time) -> bool {
        self.take_back_if(|sent| now >= sent.at + SILENT_AFTER)
    }

    fn take_back_if(&mut self, is_meant: impl Fn(&Sent) -> bool) -> bool {
        let before = self.sent.len();
        let meant = self.sent.iter().filter(|sent| is_meant(sent) && sent.tries < TRIES);
        self.waiting.extend(meant.map(|sent| (sent.lease, sent.tries)));
        self.sent.retain(|sent| !is_meant(sent));
        self.sent.len() < before
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.sent.iter().map(|sent| sent.at + SILENT_AFTER).min()
    }
}
