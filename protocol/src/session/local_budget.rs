//! What of a budget the process's own share of the permits has while the backend cannot be asked.

use std::time::Duration;

use super::Session;
use super::options::OnUnavailable;
use super::place::Place;
use crate::charge::{Charge, Charges, Used, UsedOf};
use crate::moments::Moments;
use crate::time::Time;

/// When the process's part of each budget will be full again. What the backend granted counts, too, so a process that used
/// its part just before the backend failed does not use it twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct OwnBudgets(Moments<u32, Time>);

/// As much of a budget as a share is of the limit, so what is charged takes it longer. Without a limit, as many requests as
/// the share has permits use a burst up.
#[derive(Clone, Copy)]
struct Part {
    share: u64,
    limit: u32,
}

impl Part {
    /// How long so much of a charge's budget takes.
    fn time_of(self, charge: Charge, taken: u64) -> Duration {
        let share = self.share.max(1);
        let us = match self.limit {
            u32::MAX => taken.max(charge.burst() / share),
            limit => {
                let all = u128::from(taken) * u128::from(limit);
                u64::try_from(all.div_ceil(u128::from(share.min(limit.into()).max(1))))
                    .unwrap_or(u64::MAX)
            }
        };
        // More has the same effect.
        Duration::from_micros(us.min(3 * Charge::BURST_MAX))
    }
}

impl OwnBudgets {
    fn full_at(&self, charge: Charge, now: Time) -> Time {
        self.0.of(charge.number()).map_or(now, |at| at.max(now))
    }

    /// When a budget allows this charge. One that takes more than the burst of the part waits until the part is full.
    fn opening(&self, charge: Charge, part: Part, now: Time) -> Option<Time> {
        let taken = part.time_of(charge, charge.taken());
        let beyond = Duration::from_micros(charge.burst()).saturating_sub(taken);
        let full_at = self.full_at(charge, now);
        (full_at > now + beyond).then(|| now + (full_at.since(now) - beyond))
    }

    fn take(&mut self, charge: Charge, part: Part, now: Time) {
        self.take_more(charge, part.time_of(charge, charge.taken()), part, now);
    }

    /// As in the backend, no charge takes a budget much further ahead than twice its burst: only as far as one alone does.
    fn take_more(&mut self, charge: Charge, more: Duration, part: Part, now: Time) {
        let full_at = self.full_at(charge, now);
        let burst = Duration::from_micros(charge.burst());
        let most = now + burst + burst.max(part.time_of(charge, charge.taken()));
        self.0.set(charge.number(), Some((full_at + more).min(most.max(full_at))));
    }

    fn settle(&mut self, charge: Charge, UsedOf { used, ahead }: UsedOf, part: Part, now: Time) {
        let taken = part.time_of(charge, charge.taken());
        let used = part.time_of(charge, used);
        match used.checked_sub(taken) {
            Some(more) => self.take_more(charge, more, part, now),
            None => {
                let left = self.full_at(charge, now).since(now).saturating_sub(taken - used);
                self.0.set(charge.number(), Some(now + left));
            }
        }
        if ahead > 0 {
            let least = now + Duration::from_micros(ahead.min(charge.burst()));
            self.0.set(charge.number(), Some(self.full_at(charge, now).max(least)));
        }
    }
}

impl Session {
    /// Forgets the parts that are full.
    #[inline]
    pub(super) fn expire_own_budgets(&mut self, now: Time) {
        if let Some(budgets) = &mut self.own_budgets {
            budgets.0.expire(now);
            if budgets.0.is_empty() {
                self.own_budgets = None;
            }
        }
    }

    /// When the first part is full that is not.
    pub(super) fn own_budgets_kept_until(&self) -> Option<Time> {
        self.own_budgets.as_ref()?.0.first()
    }

    /// Charges the place that is granted.
    pub(super) fn take_own(&mut self, index: usize, now: Time) {
        let Some((charges, part)) = self.places.get(index).and_then(|place| self.charged(place))
        else {
            return;
        };
        let budgets = self.own_budgets.get_or_insert_default();
        charges.iter().for_each(|charge| budgets.take(charge, part, now));
    }

    /// Puts what the place has used in the place of its charges.
    pub(super) fn settle_own(&mut self, place: &Place, used: Used, now: Time) {
        let Some((charges, part)) = self.charged(place) else { return };
        let budgets = self.own_budgets.get_or_insert_default();
        let pairs = charges.iter().zip(used.iter());
        pairs.for_each(|(charge, of)| budgets.settle(charge, of, part, now));
    }

    /// When the share's part of the budgets allows this place, and the index of the last of them to do so; `None`: now, or
    /// the place has no such part.
    pub(super) fn own_budget_opening(&self, place: &Place, now: Time) -> Option<(Time, u8)> {
        let budgets = self.own_budgets.as_ref()?;
        let (charges, part) = self.charged(place)?;
        let openings = (0..)
            .zip(charges.iter())
            .filter_map(|(index, charge)| budgets.opening(charge, part, now).map(|at| (at, index)));
        openings.max_by_key(|(at, _)| *at)
    }

    /// The same of those budgets alone that are the tenant's own.
    pub(super) fn tenants_budget_opening(&self, place: &Place, now: Time) -> Option<Time> {
        let budgets = self.own_budgets.as_ref()?;
        let (charges, part) = self.charged(place)?;
        let tenants = charges.iter().filter(|charge| charge.is_tenants());
        tenants.filter_map(|charge| budgets.opening(charge, part, now)).max()
    }

    /// The charges of a place that may have a share, and its part of the budgets.
    fn charged(&self, place: &Place) -> Option<(Charges, Part)> {
        let charges = place.options.claim?.charges();
        let policy = place.options.on_unavailable;
        if charges.is_empty() || !matches!(policy, OnUnavailable::Local(_)) {
            return None;
        }
        let (limit, _) = self.reload.limit_and_rate(place);
        Some((charges, Part { share: self.share_of(policy), limit }))
    }
}
