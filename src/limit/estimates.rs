//! What requests take of budgets, and what responses say that was used.

use std::sync::Arc;

use http::request::Parts;

use crate::ask::Ask;
use crate::budget::Budget;
use crate::error::ConfigError;
use crate::feedback::Head;
use crate::semaphore::Permit;

pub(super) type EstimateOf = dyn Fn(&Parts) -> u64 + Send + Sync;
pub(super) type CountIn = dyn Fn(Head<'_>) -> Option<u64> + Send + Sync;

/// A budget of a layer.
pub(super) struct LayerBudget {
    budget: Budget,
    estimate: Arc<EstimateOf>,
    /// What a response says that its request used, and what is left by its provider.
    used: Option<Arc<CountIn>>,
    left: Option<Arc<CountIn>>,
}

/// What a reader of responses reads.
#[derive(Clone, Copy)]
pub(super) enum Says {
    Used,
    Left,
}

impl LayerBudget {
    pub(super) fn new(budget: Budget, estimate: Arc<EstimateOf>) -> Self {
        Self { budget, estimate, used: None, left: None }
    }

    pub(super) fn name(&self) -> &str {
        self.budget.name()
    }

    /// Whether each tenant has one.
    pub(super) const fn is_each(&self) -> bool {
        self.budget.is_each()
    }

    /// Adds what a request is estimated to use.
    pub(super) fn add_to(&self, ask: Ask, parts: &Parts) -> Ask {
        ask.estimate(&self.budget, (self.estimate)(parts))
    }

    /// Reads a response.
    pub(super) fn read(&self, head: Head<'_>, permit: &Permit) {
        let name = self.budget.name();
        if let Some(used) = self.used.as_ref().and_then(|used| used(head)) {
            permit.settle(name, used);
        }
        if let Some(left) = self.left.as_ref().and_then(|left| left(head)) {
            permit.budget_left(name, left);
        }
    }
}

/// Checks the budgets of a layer, and gives them their readers, each for the budget of a name.
///
/// # Errors
///
/// If there are too many, two have one name, or a reader has no budget.
pub(super) fn complete(
    budgets: &mut [LayerBudget],
    readers: Vec<(String, Says, Arc<CountIn>)>,
) -> Result<(), ConfigError> {
    if budgets.len() > Ask::MAX_BUDGETS {
        return Err(ConfigError::new(format!(
            "budget is called {} times; expected at most {} budgets",
            budgets.len(),
            Ask::MAX_BUDGETS
        )));
    }
    for (i, one) in budgets.iter().enumerate() {
        if budgets[..i].iter().any(|before| before.budget.name() == one.budget.name()) {
            return Err(ConfigError::new(format!(
                "two budgets are called {:?}; expected a name for each",
                one.budget.name()
            )));
        }
    }
    for (name, says, reader) in readers {
        let of = budgets.iter_mut().find(|of| of.budget.name() == name);
        let Some(of) = of else {
            let method = match says {
                Says::Used => "settle_by",
                Says::Left => "left_by",
            };
            return Err(ConfigError::new(format!(
                "{method} is set for {name:?}, and no budget is called that; set budget, too"
            )));
        };
        let slot = match says {
            Says::Used => &mut of.used,
            Says::Left => &mut of.left,
        };
        if slot.replace(reader).is_some() {
            return Err(ConfigError::new(format!(
                "a reader of responses is set twice for the {name} budget; expected one settle_by and one left_by"
            )));
        }
    }
    Ok(())
}
