//! What is left of budgets.

use std::collections::BTreeMap;

use crate::charge::{AHEAD, Charge, Charges, Used, UsedOf};
use crate::moments::Moments;

/// When each budget will be full again, µs, by its number. See [`Charge`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Budgets(Moments<u32, u64>);

/// What the newcomers of a call take together, by budget.
pub(super) type Together = BTreeMap<u32, u64>;

impl Budgets {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.0.iter()
    }

    /// When each is full, µs, and its number; the first to be full first.
    pub(super) fn by_time(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.0.by_time()
    }

    /// Adds a budget as another ledger knew it. Returns whether there was none with this number.
    pub(super) fn restore(&mut self, number: u32, full_at: u64) -> bool {
        let is_new = self.0.of(number).is_none();
        self.0.set(number, Some(full_at));
        is_new
    }

    /// When the last one is full.
    pub(super) fn last_full(&self) -> Option<u64> {
        self.0.last()
    }

    pub(super) fn full_at(&self, number: u32) -> u64 {
        self.0.of(number).unwrap_or(0)
    }

    /// The same for this charge: now, or later.
    fn begins(&self, charge: Charge, now: u64) -> u64 {
        let full_at = self.full_at(charge.number());
        let is_possible = full_at <= now + 2 * charge.burst() + AHEAD;
        if is_possible { full_at.max(now) } else { now }
    }

    /// Forgets those that are full.
    pub(super) fn expire(&mut self, now: u64) {
        self.0.expire(now);
    }

    /// From when on the budgets allow these charges, µs, and the index of the last of them to do so; `None`: now.
    pub(super) fn opening_of(&self, charges: Charges, now: u64) -> Option<(u64, u8)> {
        let mut last = None;
        for (index, charge) in (0..).zip(charges.iter()) {
            let opening = self.opening(charge, 0, now);
            if opening > now && last.is_none_or(|(latest, _)| opening > latest) {
                last = Some((opening, index));
            }
        }
        last
    }

    /// The same of those budgets alone that are the tenant's own.
    pub(super) fn tenants_opening_of(&self, charges: Charges, now: u64) -> Option<u64> {
        let own = charges.iter().filter(|charge| charge.is_tenants());
        own.map(|charge| self.opening(charge, 0, now)).filter(|at| *at > now).max()
    }

    /// Whether the budgets allow these charges now, beside what others of the same call take.
    pub(super) fn allow(&self, charges: Charges, together: &mut Together, now: u64) -> bool {
        charges.iter().all(|charge| {
            let before = together.entry(charge.number()).or_default();
            let opening = self.opening(charge, *before, now);
            *before += charge.taken();
            opening <= now
        })
    }

    fn opening(&self, charge: Charge, before: u64, now: u64) -> u64 {
        (self.begins(charge, now) + before + charge.taken()).saturating_sub(charge.burst())
    }

    /// Takes what is charged. In flight after an outage or a loss of data, it may be more than the budgets allow.
    pub(super) fn take(&mut self, charges: Charges, now: u64) {
        for charge in charges.iter().filter(|charge| charge.taken() > 0) {
            self.take_more(charge, charge.taken(), now);
        }
    }

    fn take_more(&mut self, charge: Charge, more: u64, now: u64) {
        let before = self.begins(charge, now);
        let most = before.max(now + 2 * charge.burst());
        self.set(charge.number(), most.min(before + more), now);
    }

    /// Takes back what was charged just before.
    pub(super) fn undo(&mut self, charges: Charges, now: u64) {
        for charge in charges.iter() {
            self.give(charge, charge.taken(), now);
        }
    }

    fn give(&mut self, charge: Charge, back: u64, now: u64) {
        let full_at = self.begins(charge, now).saturating_sub(back);
        self.set(charge.number(), full_at, now);
    }

    fn set(&mut self, number: u32, full_at: u64, now: u64) {
        self.0.set(number, Some(full_at).filter(|at| *at > now));
    }

    /// Puts what was used in the place of what was charged. What is given back is that much, whatever the clock says: it
    /// may have stepped back, or the budget may be further ahead than this charge could take it.
    pub(super) fn settle(&mut self, charges: Charges, used: Used, now: u64) {
        for (charge, UsedOf { used, ahead }) in charges.iter().zip(used.iter()) {
            match used.checked_sub(charge.taken()) {
                Some(more) if more > 0 => self.take_more(charge, more, now),
                _ => {
                    let back = charge.taken() - used;
                    let full_at = self.full_at(charge.number()).saturating_sub(back);
                    self.set(charge.number(), full_at, now);
                }
            }
            if ahead > 0 {
                let least = now + ahead.min(charge.burst());
                self.set(charge.number(), self.begins(charge, now).max(least), now);
            }
        }
    }
}
