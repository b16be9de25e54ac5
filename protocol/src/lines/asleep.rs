//! Lines that wait until budgets of their tenants have refilled.
//!
//! A budget can be a tenant's own. If one has too little for the first place of a line when its turn comes, the line is
//! *asleep* until it has enough, and delays nobody else. It gets its turn anew once that time has come, or a place of its
//! tenant leaves: that may have used less than it took.

use super::{Lines, Register, line_of};
use crate::claim::{Claim, LineId};

/// How many lines one call rouses.
const ROUSED_MAX: usize = 16;

impl<I: Copy + Ord> Lines<I> {
    pub(super) fn is_asleep(&self, line: LineId) -> bool {
        !self.asleep.is_empty() && self.asleep.of(line).is_some()
    }

    /// The line of this claim, whose turn it is, waits for none until then (µs).
    pub(crate) fn sleep(&mut self, claim: Claim, until: u64, now: u64, of: &impl Register<I>) {
        self.sleep_new(claim, until);
        if line_of(claim).is_further() {
            self.make_way(line_of(claim), now, of);
        }
    }

    /// The same of a line that has only just begun.
    pub(crate) fn sleep_new(&mut self, claim: Claim, until: u64) {
        self.lay(line_of(claim), until);
    }

    pub(super) fn lay(&mut self, line: LineId, until: u64) {
        if line.is_further() {
            self.stand(line, None);
        } else {
            self.set_turn(line.tenant(), None);
        }
        self.asleep.set(line, Some(until));
    }

    /// Gives some lines their turns whose time has come.
    pub(crate) fn rouse(&mut self, now: u64, of: &impl Register<I>) {
        let due: Vec<_> = self.asleep.due(now, ROUSED_MAX).collect();
        for line in due {
            if line.is_further() {
                self.settle_further(line, now, of);
            } else {
                self.settle_tenant(line.tenant(), now, of);
            }
        }
    }

    /// When the time of the first line comes that is asleep, µs.
    pub(crate) fn rouses_at(&self) -> Option<u64> {
        self.asleep.first()
    }

    /// The lines that are asleep, with their scores in Redis.
    pub(super) fn sleepers(&self) -> impl Iterator<Item = (LineId, f64)> + '_ {
        self.asleep.iter().map(|(line, until)| (line, -536_870_912.0 - until as f64 / 8_388_608.0))
    }
}
