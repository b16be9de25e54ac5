//! `meter.rs` without the feature `metrics`: nothing is counted, and nothing is paid for it.

use std::time::Duration;

use tokio::time::Instant;

use super::attempt::Outcome;
use super::policy::Policy;

#[derive(Clone, Debug)]
pub(crate) struct Meter;

impl Meter {
    pub(super) const fn queued(&self) {}
    pub(super) const fn over(&self, _: Outcome, _: Duration, _: bool) {}
    pub(crate) const fn count(&self, _: Outcome) {}
    pub(super) const fn hold(&self, _: Instant) -> Hold {
        Hold(())
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Hold(());

impl Hold {
    pub(super) const fn is_measured(&self) -> bool {
        false
    }
    pub(super) const fn ended(&self, _: Instant) {}
}

#[derive(Debug, Default)]
pub(super) struct Meters(());

impl Meters {
    pub(super) const fn of(&self, _: &Policy) -> Meter {
        Meter
    }
}
