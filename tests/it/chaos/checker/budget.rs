//! The rule of how much requests may use.

use serde::Serialize;

use super::super::history::{At, Budget, Request, Run};
use super::{Check, MESSAGE, MS, Of, ms};

/// How many of the grants behind the first of a time are looked at.
const GRANTS: usize = 3000;

/// What requests used of a budget.
#[derive(Debug, Serialize)]
pub(crate) struct Spent {
    pub(crate) key: usize,
    pub(crate) whose: String,
    pub(crate) count: usize,
    pub(crate) used: u64,
    /// The most that they used in any time beyond what refilled meanwhile.
    pub(crate) peak: u64,
}

impl Budget {
    fn refills_in(&self, time: At) -> u64 {
        time * self.burst / self.refill
    }
}

impl Run {
    /// The requests that came to the upstream, with the time in which each was granted, in the order of its begin.
    fn granted_of(&self, key: usize, of: Of) -> Vec<((At, At), &Request)> {
        let of_key = self.requests.iter().filter(|request| request.key == key && of.has(request));
        let mut all: Vec<_> =
            of_key.filter_map(|request| Some((self.granted(request)?, request))).collect();
        all.sort_by_key(|(grant, _)| *grant);
        all
    }

    /// Returns the times in which the budget of a key may have too little for a request: not for long after the last of
    /// its grants, because each was granted only where there was enough for it.
    pub(super) fn spent(&self, key: usize, of: Of) -> Vec<(At, At)> {
        let Some(budget) = self.rules.budgets[key] else { return Vec::new() };
        let until = |to: At| to + budget.most * budget.refill / budget.burst + MESSAGE;
        // A budget is not that of a model.
        let whose = Of { model: None, ..of };
        let grants = self.granted_of(key, whose);
        grants.into_iter().map(|((from, to), _)| (from, until(to))).collect()
    }
}

impl Check<'_> {
    pub(super) fn budget(&mut self, key: usize, of: Of, budget: Budget) {
        let run = self.run;
        let grants = run.granted_of(key, of);
        let given_back = run.rules.limits[key] as u64 * budget.most;
        let (mut peak, mut flagged) = (0, 0);
        for (i, ((begin, _), _)) in grants.iter().enumerate() {
            let (mut end, mut used) = (*begin, 0);
            for ((_, to), request) in grants.iter().skip(i).take(GRANTS) {
                end = end.max(*to);
                used += request.used;
                let at_once = used.saturating_sub(budget.refills_in(end - begin));
                peak = peak.max(at_once);
                if at_once <= budget.burst + given_back || *begin < flagged {
                    continue;
                }
                let losses = run.faults.iter().filter(|fault| {
                    fault.what.is_loss(run.rules.shape)
                        && fault.befalls(key)
                        && run.loses_starts(fault, *begin, end)
                });
                let most = (budget.burst + given_back) * (1 + losses.count() as u64);
                if at_once > most {
                    let text = format!(
                        "requests{of} used {used} within {} ms from {:.1} ms on; {} at most",
                        (end - begin) / MS,
                        ms(*begin),
                        most + budget.refills_in(end - begin)
                    );
                    self.flag("budget", end, key, text);
                    flagged = end;
                    break;
                }
            }
        }
        let used = grants.iter().map(|(_, request)| request.used).sum();
        let count = grants.len();
        self.report.budgets.push(Spent { key, whose: of.to_string(), count, used, peak });
    }
}
