//! The part of a rate that the process's own share of the permits has while the backend cannot be asked.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::time::Duration;

use super::Session;
use super::options::OnUnavailable;
use super::place::Place;
use crate::bound_rate::BoundRate;
use crate::rate::Rate;
use crate::time::Time;

/// The last grants of requests that have a share and a rate: those of the share, which count on when the backend is back
/// and fails again, and those of the backend. So a process whose part of the rate was used just before the backend failed
/// does not use it twice.
///
/// As in the ledger, each is judged by the window of the place that asks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct OwnStarts {
    /// In the order of their times.
    by_time: VecDeque<Start>,
    /// The permits of all.
    count: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Start {
    at: Time,
    cost: u32,
    /// When it leaves the window of its own place.
    end: Time,
}

/// As much of the rate in force as a share is of the limit; without a limit, as many starts as the share has permits.
struct Part {
    window: Duration,
    /// The starts in a window are `starts` by `of`: less than one, where there are more processes than starts.
    starts: u64,
    of: u64,
    /// The same in whole starts, spread over the window if the rate is; `None`: there are none.
    whole: Option<BoundRate>,
}

impl Part {
    fn new(rate: Rate, share: u64, limit: u32) -> Self {
        let all = u64::from(rate.starts());
        let (starts, of) = match limit {
            u32::MAX => (all.min(share), 1),
            _ => (all * share.min(limit.into()), u64::from(limit).max(1)),
        };
        let whole = u32::try_from(starts / of).ok().and_then(NonZeroU32::new);
        let whole = whole.and_then(|starts| rate.with_starts(starts).of_cost(1));
        Self { window: rate.window(), starts, of, whole }
    }

    /// How many may start at once.
    fn at_once(&self) -> u32 {
        self.whole.map_or(0, BoundRate::starts)
    }

    /// How long a start of this cost counts: as long as the part needs for it, if it is more than may start at once.
    fn counts_for(&self, cost: u32) -> Duration {
        if let Some(whole) = self.whole.filter(|whole| cost <= whole.starts()) {
            return whole.window();
        }
        if self.starts == 0 {
            // What the backend granted counts for a share that comes later, as at the end of a pause.
            return self.window;
        }
        let ns = self.window.as_nanos() * u128::from(cost) * u128::from(self.of);
        let ns = ns.div_ceil(u128::from(self.starts));
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

impl OwnStarts {
    fn push(&mut self, start: Start) {
        self.by_time.push_back(start);
        self.count += start.cost;
        // The latest of these are all that any rate asks for.
        self.forget(|first, count| count - first.cost >= BoundRate::STARTS_MAX);
    }

    fn expire(&mut self, now: Time) {
        self.forget(|first, _| first.end <= now);
    }

    fn forget(&mut self, is_over: impl Fn(&Start, u32) -> bool) {
        while let Some(first) = self.by_time.front().filter(|first| is_over(first, self.count)) {
            self.count -= first.cost;
            self.by_time.pop_front();
        }
    }

    /// When this part allows one more of this cost; `None`: now.
    fn opening(&self, part: &Part, cost: u32, now: Time) -> Option<Time> {
        let room = part.at_once().saturating_sub(cost);
        let starts = self.by_time.iter().rev();
        let counting = starts.map(|start| (start.at + part.counts_for(start.cost), start.cost));
        let mut counted = 0;
        // The latest may go on counting, as far as there is room. Of the others, one that was granted by the whole rate can
        // count longer than a later one.
        let beyond = counting.filter(|(end, _)| now < *end).filter(|(_, cost)| {
            counted += cost;
            counted > room
        });
        beyond.map(|(end, _)| end).max()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_time.len()
    }
}

impl Session {
    /// Forgets the starts that do not count any more.
    pub(super) fn expire_own_starts(&mut self, now: Time) {
        if let Some(starts) = &mut self.own_starts {
            starts.expire(now);
            if starts.by_time.is_empty() {
                self.own_starts = None;
            }
        }
        self.expire_own_budgets(now);
    }

    /// Until when the earliest start is remembered, or what was taken of a budget.
    pub(super) fn own_start_kept_until(&self) -> Option<Time> {
        let starts = self.own_starts.as_ref();
        let start = starts.and_then(|starts| starts.by_time.front()).map(|start| start.end);
        start.into_iter().chain(self.own_budgets_kept_until()).min()
    }

    /// Notes that a place is granted.
    pub(super) fn note_start(&mut self, index: usize, now: Time) {
        self.take_own(index, now);
        let Some(place) = self.places.get(index) else { return };
        let (Some(part), cost) = (self.part_of(place), place.cost()) else { return };
        let start = Start { at: now, cost, end: now + part.counts_for(cost) };
        self.own_starts.get_or_insert_default().push(start);
    }

    /// When the share's part of the rate and of the budgets allows this place; `None`: now, or the place has no such part.
    pub(super) fn local_opening(&self, place: &Place, now: Time) -> Option<Time> {
        let budget = self.own_budget_opening(place, now).map(|(at, _)| at);
        self.own_rate_opening(place, now).max(budget)
    }

    pub(super) fn own_rate_opening(&self, place: &Place, now: Time) -> Option<Time> {
        // First the starts: most sessions have none.
        let starts = self.own_starts.as_ref()?;
        starts.opening(&self.part_of(place)?, place.cost(), now)
    }

    fn part_of(&self, place: &Place) -> Option<Part> {
        let policy = place.options.on_unavailable;
        let is_local = matches!(policy, OnUnavailable::Local(_));
        let (limit, rate) = self.reload.limit_and_rate(place);
        let rate = self.limits.rate_for(rate.filter(|_| is_local))?;
        Some(Part::new(rate, self.share_of(policy), limit))
    }
}
