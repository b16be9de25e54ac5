//! Replaces `requests.rs` without the feature `metrics`: does nothing, at no cost.

use std::time::Duration;

use tokio::time::Instant;

use super::outcome::Outcome;

#[derive(Clone, Debug)]
pub(crate) struct Meter;

impl Meter {
    pub(crate) const fn on_queued(&self) {}
    pub(crate) const fn on_outcome(&self, _: Outcome, _: Duration, _: bool) {}
    pub(crate) const fn on_expected_wait(&self, _: Duration) {}
    pub(crate) const fn count(&self, _: Outcome) {}
    pub(crate) const fn on_lost(&self) {}
    pub(crate) const fn on_adapted(&self, _: u32, _: bool) {}
    pub(crate) const fn hold(&self, _: u32, _: Instant) -> Hold {
        Hold(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Hold(());

impl Hold {
    pub(crate) const fn is_measured(&self) -> bool {
        false
    }
    pub(crate) const fn end(&self, _: Instant) {}
}

#[derive(Debug, Default)]
pub(crate) struct Meters(());

impl Meters {
    pub(crate) const fn of(&self, _: &'static str, _: Duration) -> Meter {
        Meter
    }
}
