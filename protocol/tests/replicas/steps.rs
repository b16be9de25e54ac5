//! Histories of a fleet.

use proptest::prelude::*;

/// What numbers stand for is determined when the step is taken, so a history without some of its steps is one, too.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Acquire {
        at: usize,
        count: usize,
        may_wait: bool,
        is_short: bool,
        tenant: u64,
        leaving: Vec<usize>,
    },
    Release {
        at: usize,
        picks: Vec<usize>,
    },
    Renew(usize),
    Audit(usize),
    /// Polls a transaction and sends it, lets the store carry it out, and brings the answer, as far as said.
    Exchange {
        at: usize,
        stages: u8,
    },
    /// The outcome of the transaction on its way is unknown; `true`: it may still be carried out.
    Unknown {
        at: usize,
        is_late: bool,
    },
    /// The same, and the newcomers leave before they have an answer.
    GiveUp(usize),
    /// A transaction that was given up is carried out.
    Late(usize),
    Refuse(usize),
    Reconnect(usize),
    /// The watch brings as many values.
    Watch {
        at: usize,
        count: usize,
    },
    /// The watch loses what it has not brought yet.
    Miss(usize),
    Read(usize),
    /// A value that is long outdated comes.
    Stale {
        at: usize,
        pick: usize,
    },
    Crash(usize),
    /// A sign of life ends, of a process that lives and may come back, or of a dead one.
    Lapse {
        at: usize,
        is_short: bool,
    },
    Return(usize),
    /// The process hears of a sign of life that ended or came back.
    Life(usize),
    Revoke(usize),
    Limit(u32),
    Pass {
        us: u64,
        revisions: u64,
    },
    Skew {
        at: usize,
        us: i64,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct History {
    pub(crate) processes: usize,
    pub(crate) limit: u32,
    pub(crate) tenants: bool,
    pub(crate) steps: Vec<Step>,
}

fn step() -> impl Strategy<Value = Step> {
    let at = || any::<u8>().prop_map(usize::from);
    let picks = || prop::collection::vec(at(), 0..3);
    let acquire = (at(), 1..4usize, prop::bool::weighted(0.8), any::<bool>(), 0..3u64, picks());
    prop_oneof![
        8 => acquire.prop_map(|(at, count, may_wait, is_short, tenant, leaving)| {
            Step::Acquire { at, count, may_wait, is_short, tenant, leaving }
        }),
        6 => (at(), picks()).prop_map(|(at, picks)| Step::Release { at, picks }),
        3 => at().prop_map(Step::Renew),
        1 => at().prop_map(Step::Audit),
        24 => (at(), prop_oneof![3 => Just(3u8), 2 => 1..=2u8])
            .prop_map(|(at, stages)| Step::Exchange { at, stages }),
        4 => (at(), any::<bool>()).prop_map(|(at, is_late)| Step::Unknown { at, is_late }),
        3 => at().prop_map(Step::GiveUp),
        3 => at().prop_map(Step::Late),
        1 => at().prop_map(Step::Refuse),
        1 => at().prop_map(Step::Reconnect),
        10 => (at(), 1..4usize).prop_map(|(at, count)| Step::Watch { at, count }),
        2 => at().prop_map(Step::Miss),
        3 => at().prop_map(Step::Read),
        2 => (at(), at()).prop_map(|(at, pick)| Step::Stale { at, pick }),
        1 => at().prop_map(Step::Crash),
        2 => (at(), any::<bool>()).prop_map(|(at, is_short)| Step::Lapse { at, is_short }),
        2 => at().prop_map(Step::Return),
        3 => at().prop_map(Step::Life),
        1 => at().prop_map(Step::Revoke),
        1 => (0..5u32).prop_map(Step::Limit),
        6 => (0..2_000_000u64, 0..5u64).prop_map(|(us, revisions)| Step::Pass { us, revisions }),
        1 => (at(), -4_000_000..4_000_000i64).prop_map(|(at, us)| Step::Skew { at, us }),
    ]
}

pub(crate) fn history() -> impl Strategy<Value = History> {
    let steps = prop::collection::vec(step(), 1..120);
    (2..5usize, 1..5u32, prop::bool::weighted(0.25), steps)
        .prop_map(|(processes, limit, tenants, steps)| History { processes, limit, tenants, steps })
}
