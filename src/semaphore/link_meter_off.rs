//! `link_meter.rs` without the feature `metrics`.

use std::time::Duration;

use crate::backend::{Answer, Op};

#[derive(Debug, Default)]
pub(super) struct LinkMeter;

impl LinkMeter {
    pub(super) const fn begin(&self, _: bool) {}
    pub(super) const fn lost(&self, _: u64) {}
    pub(super) const fn answered_here(&self, _: &Op, _: &Answer) {}
    pub(super) const fn answered(&self, _: &Op, _: &Answer, _: Duration) {}
    pub(super) const fn unanswered(&self, _: &Op, _: Duration) {}
    pub(super) const fn connected(&self) -> Level {
        Level
    }
    pub(super) const fn connect_failed(&self) {}
    pub(super) const fn disconnected(&self) {}
    pub(super) const fn unavailable(&self) -> Level {
        Level
    }
}

pub(super) struct Level;
