//! The part of a rate that the process's own share of the permits has while the backend cannot be asked.

use std::collections::VecDeque;
use std::time::Duration;

use super::Session;
use super::options::OnUnavailable;
use super::place::Place;
use crate::bound_rate::BoundRate;
use crate::time::Time;

/// The grants of the process's own share that count for a rate. They count on when the backend is back and fails again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct LocalStarts {
    /// Until when each counts, and for how many. The first to end is the first.
    ends: VecDeque<(Time, u32)>,
    count: u64,
}

/// As much of a rate as a share is of the limit.
struct Part {
    rate: BoundRate,
    share: u64,
    limit: u64,
}

impl Part {
    /// Whole starts in a window. Without a limit, as many as the share has permits.
    fn starts(&self) -> u64 {
        let starts = u64::from(self.rate.starts());
        if self.limit == u64::from(u32::MAX) {
            return starts.min(self.share);
        }
        starts * self.share / self.limit.max(1)
    }

    /// How long a start of this cost counts: longer than the window, if the part is less than the cost.
    fn counts_for(&self, cost: u32) -> Duration {
        let window = self.rate.window();
        if u64::from(cost) <= self.starts() {
            return window;
        }
        let part = u128::from(self.rate.starts()) * u128::from(self.share);
        let ns = window.as_nanos() * u128::from(cost) * u128::from(self.limit) / part.max(1);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

impl LocalStarts {
    fn expire(&mut self, now: Time) {
        while let Some((_, cost)) = self.ends.front().filter(|(end, _)| now >= *end) {
            self.count -= u64::from(*cost);
            self.ends.pop_front();
        }
    }
}

impl Session {
    /// Forgets the local starts that do not count any more.
    pub(super) fn expire_local_starts(&mut self, now: Time) {
        if let Some(starts) = &mut self.local_starts {
            starts.expire(now);
            if starts.ends.is_empty() {
                self.local_starts = None;
            }
        }
    }

    /// When the next local start stops counting.
    pub(super) fn next_local_start(&self) -> Option<Time> {
        let (at, _) = self.local_starts.as_ref()?.ends.front()?;
        Some(*at)
    }

    /// Notes that a place is admitted by policy.
    pub(super) fn start_locally(&mut self, index: usize, now: Time) {
        let Some(place) = self.places.get(index) else { return };
        let (Some(part), cost) = (self.part_of(place), place.cost()) else { return };
        let until = now + part.counts_for(cost);
        let starts = self.local_starts.get_or_insert_default();
        // A start by a longer window, of another policy or of a rate that an operator set, can end later than this one.
        let at = starts.ends.partition_point(|(end, _)| *end <= until);
        starts.ends.insert(at, (until, cost));
        starts.count += u64::from(cost);
    }

    /// Whether the share's part of the rate is used up.
    pub(super) fn exceeds_rate_of_share(&self, place: &Place) -> bool {
        let Some((part, starts)) = self.part_of(place).zip(self.local_starts.as_ref()) else {
            return false;
        };
        let (cost, most) = (u64::from(place.cost()), part.starts());
        if cost > most { starts.count > 0 } else { starts.count + cost > most }
    }

    fn part_of(&self, place: &Place) -> Option<Part> {
        let is_local = matches!(place.options.on_unavailable, OnUnavailable::Local(_));
        let rate = place.bound.filter(|_| is_local)?.rate?;
        let share = self.share_of(place.options.on_unavailable);
        Some(Part { rate, share, limit: place.limit.into() })
    }
}
