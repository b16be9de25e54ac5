//! When permits with a rate were granted.

use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};

use foldhash::fast::RandomState;

use super::reply::RateUsage;
use crate::bound_rate::BoundRate;
use crate::id::{NodeId, PlaceId};

/// How far a start may lie in the future. Beyond that, the clock has stepped back since: the start is forgotten, because
/// it would keep others back until the clock shows its time again.
const AHEAD: u64 = 1_000_000;

/// The grants of the last window. Nothing but time takes one out: neither a release nor the end of a lease.
///
/// Each is judged by the window of the place that asks, so one with a short window does not wait for the starts of a
/// long one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Starts {
    /// In the order of their times, one for each permit.
    by_time: VecDeque<Start>,
    by_place: HashMap<(NodeId, u64), u64, RandomState>,
    /// For how long those are kept at most that were noted since there was none, µs.
    longest: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Start {
    /// When, µs.
    at: u64,
    /// When it leaves its own window.
    end: u64,
    node: NodeId,
    n: u64,
}

impl Hash for Starts {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // What is kept by place is the same.
        self.by_time.hash(state);
    }
}

impl Starts {
    pub(super) fn is_empty(&self) -> bool {
        self.by_time.is_empty()
    }

    /// Each permit's start: process, number of the place, when, and when it leaves its window (µs).
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, u64, u64, u64)> + '_ {
        self.by_time.iter().map(|start| (start.node, start.n, start.at, start.end))
    }

    /// For how long each is kept at most, µs.
    pub(super) const fn longest(&self) -> u64 {
        self.longest
    }

    /// Those of another ledger, without any yet.
    pub(super) fn kept_for(longest: u64) -> Self {
        Self { longest, ..Self::default() }
    }

    /// Adds the last start of another ledger. Returns whether those of one place are of one moment.
    pub(super) fn restore(&mut self, node: NodeId, n: u64, at: u64, end: u64) -> bool {
        let start = Start { at, end, node, n };
        let is_more_of_one = self.by_time.back() == Some(&start);
        self.by_time.push_back(start);
        self.by_place.insert((node, n), at).is_some() == is_more_of_one
    }

    /// Until when the last one is kept.
    pub(super) fn last_end(&self) -> Option<u64> {
        Some(self.by_time.back()?.at.saturating_add(self.longest))
    }

    /// Forgets what none of them keeps.
    pub(super) fn expire(&mut self, now: u64) {
        self.forget_left(self.longest, now);
        if self.by_time.is_empty() {
            self.longest = 0;
        }
        while let Some(last) = self.by_time.back().copied().filter(|last| last.at > now + AHEAD) {
            self.by_time.pop_back();
            self.by_place.remove(&(last.node, last.n));
        }
    }

    /// Forgets what a grant does not keep, if it needs the room. Nothing else may: a place that is not granted can have a
    /// shorter window than others.
    pub(super) fn make_room(&mut self, rate: BoundRate, cost: u32, now: u64) {
        if self.by_time.len() + cost as usize > rate.starts() as usize {
            self.forget_left(rate.kept_us(), now);
            // No window has more.
            let beyond = self.by_time.len().checked_sub(1 + BoundRate::STARTS_MAX as usize);
            if let Some(last) = beyond.and_then(|i| self.by_time.get(i)).map(|start| start.at) {
                while self.by_time.front().is_some_and(|first| first.at < last) {
                    self.forget_first();
                }
            }
        }
    }

    fn forget_left(&mut self, window: u64, now: u64) {
        let has_left = |first: &Start| first.at.saturating_add(window) <= now;
        while self.by_time.front().is_some_and(has_left) {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        if let Some(first) = self.by_time.pop_front() {
            self.by_place.remove(&(first.node, first.n));
        }
    }

    /// From when on the rate allows so many more grants, µs; `None`: now.
    pub(super) fn opening_of(&self, rate: BoundRate, cost: u32, now: u64) -> Option<u64> {
        // The latest start that must have left the window.
        let from_last = (rate.starts().saturating_sub(cost)) as usize;
        let at = self.by_time.len().checked_sub(1 + from_last)?;
        let opening = self.by_time.get(at)?.at.saturating_add(rate.window_us());
        (opening > now).then_some(opening)
    }

    /// How much of this rate is used. Also called when nothing was forgotten lately.
    pub(super) fn usage(&self, rate: BoundRate, now: u64) -> RateUsage {
        let end_of = |at: u64| at.saturating_add(rate.window_us());
        let latest_first = self.by_time.iter().rev().map(|start| start.at);
        let counts = latest_first
            .skip_while(|at| *at > now.saturating_add(AHEAD))
            .take_while(|at| end_of(*at) > now);
        let must_leave = counts.clone().nth((rate.starts() - 1) as usize);
        RateUsage {
            rate: rate.alone(),
            started: counts.count() as u64,
            opens_at: must_leave.map(end_of),
        }
    }

    /// Notes that the place was granted. A call that is repeated moves its start.
    pub(super) fn push(&mut self, id: PlaceId, rate: BoundRate, now: u64) {
        self.remove(&id);
        let end = now.saturating_add(rate.window_us());
        self.longest = self.longest.max(rate.kept_us());
        let start = Start { at: now, end, node: id.node, n: id.n };
        let place = self.by_time.partition_point(|start| start.at <= now);
        for _ in 0..id.cost() {
            self.by_time.insert(place, start);
        }
        self.by_place.insert((id.node, id.n), now);
    }

    pub(super) fn remove(&mut self, id: &PlaceId) {
        let Some(at) = self.by_place.remove(&(id.node, id.n)) else { return };
        let first = self.by_time.partition_point(|start| start.at < at);
        let last = self.by_time.partition_point(|start| start.at <= at);
        for i in (first..last).rev() {
            if self.by_time.get(i).is_some_and(|start| (start.node, start.n) == (id.node, id.n)) {
                self.by_time.remove(i);
            }
        }
    }
}
