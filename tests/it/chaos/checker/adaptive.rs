//! The rule of the limit that finds itself.

use serde::Serialize;

use super::{Check, Of};

/// What a run's adaptive limit did.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Numbers {
    /// The changes that were seen in Redis, and the decreases among them.
    pub(crate) changes: usize,
    pub(crate) decreases: usize,
    /// The responses that refused a request.
    pub(crate) refusals: usize,
}

impl Check<'_> {
    pub(super) fn adaptive(&mut self, key: usize) {
        if !self.run.rules.is_adaptive(key) {
            return;
        }
        let limit = self.run.rules.limits[key];
        let mut decreases: Vec<_> = self.run.numbers.iter().map(|number| number.lowered).collect();
        decreases.sort_unstable();
        decreases.dedup();
        for number in &self.run.numbers {
            if !(1..=limit).contains(&number.limit) {
                let text = format!("the limit is {}, of 1 to {limit}", number.limit);
                self.flag("adaptive", number.changed, key, text);
            }
        }
        let all = self.of_key(key, Of::default());
        let refusals = all.filter(|(_, request)| request.later && request.came().is_some()).count();
        if let Some(at) = decreases.get(refusals) {
            let text = format!("{} decreases, and {refusals} refusals", decreases.len());
            self.flag("adaptive", *at, key, text);
        }
        let (changes, decreases) = (self.run.numbers.len(), decreases.len());
        self.report.numbers = Some(Numbers { changes, decreases, refusals });
    }
}
