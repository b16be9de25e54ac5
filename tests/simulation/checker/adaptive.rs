//! Watches limits that find themselves.
//!
//! | rule | what it says |
//! |---|---|
//! | `adaptive: range` | the number, and the limit of each call, is within the range |
//! | `adaptive: burst` | it is lowered because of a request that went on after it was lowered last, and was refused |
//! | `adaptive: operator` | a limit that an operator set counts in its place, once each process must know of it |
//! | `adaptive: interval` | it is raised no sooner than an interval after its last change, by the server's clock |
//! | `adaptive: growth` | it is raised by a process whose requests wait, or did lately |
//! | `adaptive: stuck` | it is raised while requests wait for it |

use std::collections::{BTreeSet, VecDeque};

use tower_semaphore_protocol::Adapted;

use super::{Checker, MS, PAUSE_KNOWN, S, since};
use crate::backend::{AdaptedStep, Step};
use crate::plan::Plan;

/// The interval in which such a limit grows, as in the plans.
const INTERVAL: u64 = S;
/// How long after its last request waited a process may ask for growth: it is asked for within a second or dropped.
const WAITED: u64 = 1500 * MS;
/// How long such a limit may stay as it is while requests wait for it: the interval, and twice the time in which each
/// process learns of a change whose message was lost.
const STUCK: u64 = INTERVAL + 3 * S;
/// How many refusals are remembered.
const REFUSALS_MAX: usize = 500;

/// The limit of a name, if it finds itself.
#[derive(Clone, Debug)]
pub(super) struct Numbers {
    /// By process of the plan: its range.
    ranges: Vec<(u32, u32)>,
    /// What is in force.
    now: Option<Adapted>,
    /// When it was last lowered, unless data was lost since.
    lowered: u64,
    /// When it last changed, by the server's clock, unless that was set, or data was lost since.
    changed: Option<u64>,
    /// By process: requests that the upstream refused lately, by when they got their permits.
    refusals: VecDeque<(usize, u64)>,
    /// What an operator has set, and since when.
    set: (Option<u32>, bool),
    set_since: u64,
    /// All limits that operators have set.
    all_set: BTreeSet<u32>,
    /// Since when requests wait for it, and it does not change.
    stuck: Option<u64>,
}

impl Numbers {
    /// Returns what the checker needs for a name; `None`: its limit is fixed.
    pub(super) fn new(plan: &Plan, name: usize) -> Option<Self> {
        let range = |policy: &crate::plan::PolicyPlan| Some((policy.adaptive?.min, policy.limit));
        let ranges: Option<Vec<_>> = plan.policies.iter().map(|own| range(&own[name])).collect();
        Some(Self {
            ranges: ranges?,
            now: None,
            lowered: 0,
            changed: None,
            refusals: VecDeque::new(),
            set: (None, false),
            set_since: 0,
            all_set: BTreeSet::new(),
            stuck: None,
        })
    }

    /// Returns the lowest limit that a process takes the number for.
    pub(super) fn lowest(&self) -> Option<u32> {
        let limit = self.now?.limit;
        self.ranges.iter().map(|(min, max)| limit.clamp(*min, *max)).min()
    }
}

impl Checker {
    /// Notes that the upstream refused a request that got its permit then.
    pub(super) fn upstream_refused(&mut self, process: usize, name: usize, granted: u64) {
        let Some(numbers) = &mut self.numbers[name] else { return };
        numbers.refusals.push_back((process, granted));
        if numbers.refusals.len() > REFUSALS_MAX {
            numbers.refusals.pop_front();
        }
    }

    /// Notes that an operator sets a limit.
    pub(super) fn set_instead(&mut self, name: usize, limit: u32) {
        self.numbers[name].iter_mut().for_each(|numbers| {
            numbers.all_set.insert(limit);
        });
    }

    /// Notes that the records of all limits may be lost, or older than they were.
    pub fn numbers_lost(&mut self) {
        for numbers in self.numbers.iter_mut().flatten() {
            (numbers.lowered, numbers.changed, numbers.stuck) = (0, None, None);
        }
    }

    /// Checks a change.
    pub fn adapted(&mut self, at: u64, process: usize, step: &AdaptedStep) {
        let AdaptedStep { name, now, before, after } = *step;
        let Some(numbers) = &mut self.numbers[name] else { return };
        let (lowered, changed) = (numbers.lowered, numbers.changed.replace(now));
        let is_lowered = before.is_none_or(|before| after.limit < before.limit);
        let is_raised = before.is_some_and(|before| after.limit > before.limit);
        if is_lowered {
            numbers.lowered = at;
        }
        let is_in = |(min, max): &(u32, u32)| (*min..=*max).contains(&after.limit);
        let is_in_range = numbers.ranges.iter().any(is_in);
        let is_founded = numbers
            .refusals
            .iter()
            .any(|(of, granted)| *of == process && (before.is_none() || *granted > lowered));
        if !is_in_range {
            self.flag("adaptive: range", at, format!("the limit of n{name} is {}", after.limit));
        }
        if is_lowered {
            self.count("adaptive limits lowered");
            if !is_founded {
                let text = format!(
                    "process {process} lowers the limit of n{name} to {}, and none of its requests that were refused went on after it was lowered at {} ms",
                    after.limit,
                    lowered / MS
                );
                self.flag("adaptive: burst", at, text);
            }
        }
        if is_raised {
            self.count("adaptive limits raised");
            let text = format!("process {process} raises the limit of n{name} to {}", after.limit);
            let early = changed.filter(|changed| now < changed + INTERVAL);
            if let Some(changed) = early.filter(|_| !self.is_clock_set) {
                let ms = now.saturating_sub(changed) / MS;
                self.flag(
                    "adaptive: interval",
                    at,
                    format!("{text}, {ms} ms after its last change"),
                );
            }
            let life = &self.lives[process];
            let waits = !life.queues[name].is_empty() || life.waited[name] + WAITED >= at;
            if !waits && self.is_quiet(process, at.saturating_sub(WAITED)) {
                self.flag(
                    "adaptive: growth",
                    at,
                    format!("{text}, and none of its requests waits"),
                );
            }
        }
    }

    /// Notes what the server that keeps the overrides has of a name.
    pub fn look_at_overrides(
        &mut self,
        at: u64,
        name: usize,
        set: (Option<u32>, bool),
        adapted: Option<Adapted>,
    ) {
        let Some(numbers) = &mut self.numbers[name] else { return };
        if numbers.set != set {
            (numbers.set, numbers.set_since) = (set, at);
        }
        if numbers.now != adapted {
            (numbers.now, numbers.stuck) = (adapted, None);
        }
    }

    /// Checks whether requests wait for the number, and it does not grow. `waits`: those of living processes do.
    pub(super) fn look_at_growth(&mut self, at: u64, name: usize, units: u64, waits: bool) {
        let unsettled = self.unsettled[name].max(self.call_errors_until);
        let Some(numbers) = &mut self.numbers[name] else { return };
        let top = numbers.ranges.iter().map(|(_, max)| *max).min();
        let limit = numbers.lowest().filter(|limit| Some(*limit) < top);
        let is_stuck = waits
            && numbers.set == (None, false)
            && limit.is_some_and(|limit| units >= u64::from(limit));
        let from = since(&mut numbers.stuck, is_stuck, at);
        if from.is_some_and(|from| at > from.max(unsettled) + STUCK) {
            numbers.stuck = None;
            let text = format!("requests wait for n{name}, whose limit stays at {limit:?}");
            self.flag("adaptive: stuck", at, text);
        }
    }

    /// Checks by which limit a process has a call judged.
    pub(super) fn limit_of_call(&mut self, at: u64, step: &Step<'_>) {
        let (name, limit) = (step.name, step.limit);
        let Some(numbers) = &self.numbers[name] else { return };
        let node = step.node.filter(|_| step.op != "look");
        let process = self.lives.iter().position(|life| node.is_some() && life.node == node);
        let Some(process) = process else { return };
        let (min, max) = numbers.ranges[self.lives[process].slot];
        if step.for_all
            && limit > 0
            && !numbers.all_set.contains(&limit)
            && !(min..=max).contains(&limit)
        {
            let text = format!("a call of process {process} for n{name} has the limit {limit}");
            return self.flag("adaptive: range", at, text);
        }
        let (set, set_since) = (numbers.set, numbers.set_since);
        let (Some(set), false) = set else { return };
        if at < set_since + PAUSE_KNOWN || !self.is_quiet(process, set_since) {
            return;
        }
        self.count("calls under an operator's limit in place of an adaptive one");
        if limit > 0 && (limit != set || !step.for_all) {
            let text = format!(
                "a call of process {process} for n{name} has the limit {limit}, and an operator set {set} {} ms before",
                (at - set_since) / MS
            );
            self.flag("adaptive: operator", at, text);
        }
    }

    /// Returns whether nothing has kept a process from any server since then.
    fn is_quiet(&self, process: usize, since: u64) -> bool {
        let servers = self.disturbed[0].len();
        self.call_errors_until < since
            && (0..servers).all(|server| self.quiet_since(process, server) < since)
    }
}
