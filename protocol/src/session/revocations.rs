//! Revocation checks: whether a place that is gone was revoked, or lost by the backend.
//!
//! Only the answer to a question that is asked after the place was found gone counts, because a revocation is recorded
//! first and carried out then.

/// A place that is gone, by the number that it had and the one that it has now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Check {
    old: u64,
    new: u64,
    /// The first question whose answer counts.
    question: u64,
}

/// The revocation checks of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Revocations {
    checks: Vec<Check>,
    is_question_due: bool,
    /// The number of the next question.
    question: u64,
}

impl Revocations {
    /// Whether a place is being checked.
    pub(super) const fn is_checking(&self) -> bool {
        !self.checks.is_empty()
    }

    /// The number that this place has now.
    pub(super) fn current(&self, n: u64) -> u64 {
        self.checks.iter().find(|check| check.old == n).map_or(n, |check| check.new)
    }

    /// The numbers that places being checked have now.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.checks.iter().map(|check| check.new)
    }

    /// Has the place checked that had the number `old`, and has `new` now.
    pub(super) fn push(&mut self, old: u64, new: u64) {
        self.checks.push(Check { old, new, question: self.question });
        self.is_question_due = true;
    }

    /// The place with this number is not to be checked. Returns whether it was.
    pub(super) fn forget(&mut self, n: u64) -> bool {
        let checks = self.checks.len();
        self.checks.retain(|check| check.new != n);
        self.checks.len() < checks
    }

    /// The number of the question to ask, if one is due.
    pub(super) const fn poll(&mut self) -> Option<u64> {
        if !std::mem::replace(&mut self.is_question_due, false) {
            return None;
        }
        self.question += 1;
        Some(self.question - 1)
    }

    /// The question was answered. Returns the numbers of the places that it was asked for.
    pub(super) fn handle_known(&mut self, question: u64) -> Vec<u64> {
        let is_known = |check: &Check| check.question <= question;
        let (known, unknown) =
            std::mem::take(&mut self.checks).into_iter().partition::<Vec<_>, _>(is_known);
        self.checks = unknown;
        known.into_iter().map(|check| check.new).collect()
    }

    /// There is a new connection: whether the places are gone is asked again. Returns their numbers.
    pub(super) fn handle_connected(&mut self) -> Vec<u64> {
        self.is_question_due = false;
        std::mem::take(&mut self.checks).into_iter().map(|check| check.new).collect()
    }
}
