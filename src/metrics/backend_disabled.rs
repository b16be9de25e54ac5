//! Replaces `backend.rs` without the feature `metrics`: does nothing, at no cost.

use std::time::Duration;

use crate::protocol::{Op, PauseCause, Reply};

#[derive(Debug, Default)]
pub(crate) struct BackendMeter;

impl BackendMeter {
    pub(crate) const fn register(_: bool) {}
    pub(crate) const fn begin(&self, _: bool) {}
    pub(crate) const fn on_lines_changed(&self, _: usize, _: usize) {}
    pub(crate) const fn on_overtaking(&self, _: u64) {}
    pub(crate) const fn on_passed_on(&self, _: u64) {}
    pub(crate) const fn on_pause(&self, _: PauseCause) {}
    pub(crate) const fn on_reply(&self, _: &Op, _: &Reply) {}
    pub(crate) const fn on_answer(&self, _: &Op, _: bool, _: Duration) {}
    pub(crate) const fn on_unanswered(&self, _: &Op, _: Duration) {}
    pub(crate) const fn on_connected(&self) -> Level {
        Level
    }
    pub(crate) const fn on_connect_failed(&self) {}
    pub(crate) const fn on_disconnected(&self) {}
    pub(crate) const fn on_outage(&self) -> Level {
        Level
    }
    pub(crate) const fn on_quarantine(&self) -> Level {
        Level
    }
}

pub(crate) struct Level;
