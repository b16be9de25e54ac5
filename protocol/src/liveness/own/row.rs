//! One row of this process, with one request under way at a time.

use std::time::Duration;

use super::{Action, RequestId, SILENT_AFTER};
use crate::liveness::{LeaseId, Revision, Sign, Term};
use crate::time::Time;

/// The first pause after a refusal. It doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(4);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct OwnRow {
    pub(super) seconds: u32,
    step: Step,
    /// When the step is to be taken.
    due: Time,
    flight: Option<Flight>,
    lease: Option<LeaseId>,
    /// The sign, as far as is known.
    sign: Option<Sign>,
    /// The last revision at which the watch saw it removed.
    removed_at: Revision,
    /// What the next reading of the sign proves.
    unproved: Option<Unproved>,
    registration: Option<Registration>,
    /// Refusals and unknown outcomes since the last proof.
    failures: u8,
}

/// What is asked next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Grant,
    Put,
    KeepAlive,
    Read,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flight {
    id: RequestId,
    sent: Time,
}

/// A grant or an acknowledged keepalive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Unproved {
    sent: Time,
    /// The term before a keepalive. A grant needs none: it went through the log.
    term: Option<Term>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Registration {
    /// From when the leases of its places count.
    pub(super) from: Time,
    /// Since when the sign is there.
    pub(super) revision: Revision,
}

impl OwnRow {
    pub(super) const fn new(seconds: u32) -> Self {
        Self {
            seconds,
            step: Step::Grant,
            due: Time::ZERO,
            flight: None,
            lease: None,
            sign: None,
            removed_at: 0,
            unproved: None,
            registration: None,
            failures: 0,
        }
    }

    pub(super) const fn lease(&self) -> Option<LeaseId> {
        self.lease
    }

    pub(super) const fn registration(&self) -> Option<Registration> {
        self.registration
    }

    pub(super) fn is_registered(&self) -> bool {
        self.registration.is_some()
            && self.lease.is_some()
            && self.sign.map(|sign| sign.lease) == self.lease
    }

    pub(super) const fn is_in_flight(&self) -> bool {
        self.flight.is_some()
    }

    pub(super) fn awaits(&self, id: RequestId) -> bool {
        self.flight.is_some_and(|flight| flight.id == id)
    }

    pub(super) fn is_due(&self, now: Time) -> bool {
        self.flight.is_none() && now >= self.due
    }

    /// Which of several rows goes first: the one whose lease has the least left.
    pub(super) fn urgency(&self) -> Time {
        self.due + self.interval()
    }

    /// A keepalive is sent every third of the lease (rule 2).
    fn interval(&self) -> Duration {
        Duration::from_secs(u64::from(self.seconds)) / 3
    }

    pub(super) fn poll_timeout(&self, has_room: bool) -> Option<Time> {
        match self.flight {
            Some(flight) => Some(flight.sent + SILENT_AFTER),
            None => Some(self.due).filter(|_| has_room),
        }
    }

    pub(super) fn send(&mut self, id: RequestId, now: Time) -> Action {
        self.flight = Some(Flight { id, sent: now });
        let seconds = self.seconds;
        match (self.step, self.lease) {
            (Step::Put, Some(lease)) => {
                let over = self.sign.map_or(0, |sign| sign.modified);
                Action::PutSign { seconds, lease, over }
            }
            (Step::KeepAlive, Some(lease)) => Action::KeepAlive { lease },
            (Step::Read, Some(_)) => Action::ReadSign { seconds },
            (Step::Grant, _) | (_, None) => Action::Grant { seconds },
        }
    }

    fn take_flight(&mut self) -> Time {
        self.flight.take().map_or(Time::ZERO, |flight| flight.sent)
    }

    fn go_to(&mut self, step: Step, now: Time) {
        (self.step, self.due) = (step, now);
    }

    pub(super) fn handle_granted(&mut self, lease: LeaseId, now: Time) {
        let sent = self.take_flight();
        self.lease = Some(lease);
        self.unproved = Some(Unproved { sent, term: None });
        self.go_to(Step::Put, now);
    }

    pub(super) fn handle_kept_alive(&mut self, term: Term, now: Time) {
        let sent = self.take_flight();
        self.unproved = Some(Unproved { sent, term: Some(term) });
        self.go_to(Step::Read, now);
    }

    pub(super) fn handle_no_lease(&mut self, now: Time) {
        self.flight = None;
        self.handle_lease_lost(now);
    }

    fn handle_lease_lost(&mut self, now: Time) {
        (self.lease, self.sign, self.unproved) = (None, None, None);
        self.go_to(Step::Grant, now);
    }

    pub(super) fn handle_sign(&mut self, sign: Option<Sign>, term: Term, now: Time) {
        self.flight = None;
        // The watch may be ahead of the answer.
        self.sign = sign.filter(|sign| sign.modified > self.removed_at);
        match self.sign {
            Some(sign) if Some(sign.lease) == self.lease => self.handle_own_sign(sign, term, now),
            Some(_) => self.go_to(Step::Put, now),
            // It was to be put over one that is gone.
            None if self.step == Step::Put && sign.is_none() => self.go_to(Step::Put, now),
            // The lease was revoked, though its keepalive may have been acknowledged.
            None => self.handle_lease_lost(now),
        }
    }

    /// The sign is there, so the lease was not revoked before it was read. It was renewed by the leader of the log if the
    /// term has not changed since before the keepalive: see rule 4.
    fn handle_own_sign(&mut self, sign: Sign, term: Term, now: Time) {
        self.step = Step::KeepAlive;
        let unproved = self.unproved.take();
        let proved = unproved.filter(|proof| proof.term.is_none_or(|before| before == term));
        let Some(Unproved { sent, .. }) = proved else {
            self.pause(now);
            return;
        };
        self.registration = Some(Registration { from: sent, revision: sign.created });
        self.failures = 0;
        self.due = sent + self.interval();
    }

    pub(super) fn handle_sign_gone(&mut self, revision: Revision, now: Time) {
        self.removed_at = self.removed_at.max(revision);
        if self.sign.is_some_and(|sign| sign.modified < revision) {
            self.flight = None;
            self.handle_lease_lost(now);
        }
    }

    pub(super) fn handle_refused(&mut self, now: Time) {
        self.flight = None;
        self.pause(now);
    }

    /// Returns whether there was no answer.
    pub(super) fn handle_timeout(&mut self, now: Time) -> bool {
        let is_silent = self.flight.is_some_and(|flight| now >= flight.sent + SILENT_AFTER);
        if is_silent {
            self.take_back(now);
        }
        is_silent
    }

    /// The request will not be answered. It is repeated at once, but for a grant: each that was carried out leaves a lease
    /// until that ends by itself.
    pub(super) fn take_back(&mut self, now: Time) {
        if self.flight.take().is_none() {
            return;
        }
        match self.step {
            Step::Grant => self.pause(now),
            // A keepalive is worth more than a proof of the one before.
            Step::Read if self.unproved.is_some_and(|unproved| unproved.term.is_some()) => {
                self.go_to(Step::KeepAlive, now);
            }
            step => self.go_to(step, now),
        }
    }

    fn pause(&mut self, now: Time) {
        let pause = PAUSE_MIN * (1 << self.failures.min(7));
        let longest = (self.interval() / 2).clamp(PAUSE_MIN, PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        self.due = now + pause.min(longest);
    }
}
