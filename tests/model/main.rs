//! A model checker explores the protocol: the ledger itself, with a model of the processes, their
//! connections and their mailbox around it, and every fault at every moment, in a small scope.
//!
//! `server` has the ledger and the wrong ledgers of the mutants, `process` the rules by which a
//! process believes, `world` what moves and what must hold. Here are the scopes, and the mutants:
//! each rule undone, one at a time, and each of them has to be caught.

mod process;
mod server;
mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use self::world::{Action, Rule, Seen, World};

/// How a run is set up.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    name: &'static str,
    processes: u8,
    /// Requests of a process at a time, and of each in all.
    slots: usize,
    requests: [u8; 3],
    limit: u32,
    ticks: u8,
    /// Whether some requests may not wait.
    tries: bool,
    /// Whether time passes though someone has something to send.
    lazy: bool,
    /// Whether it takes time to connect again.
    away: bool,
    quarantine: bool,
    /// How it begins: what may happen is explored from there on.
    beginning: &'static [Action],
    faults: Faults,
    bug: Option<Bug>,
}

/// How often each fault strikes at the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Faults {
    slow: u8,
    breaks: u8,
    late_hints: u8,
    lost_hints: u8,
    crashes: u8,
    freezes: u8,
    restarts: u8,
    failovers: u8,
    flushes: u8,
}

/// A rule undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    // Of the process.
    RejoinWithSameId,
    RejoinWithNewTicket,
    LateGrantBelieved,
    HintWithoutLeaseEnd,
    ProofInEveryRenewal,
    DeadlineFromReceipt,
    ReleaseNotRepeated,
    AcquireNotRepeated,
    RepeatsUnderNewId,
    WaitersNotRenewed,
    RenewalDoesNotTellGrant,
    NoSelfFence,
    NoReassert,
    NoQuarantine,
    YoungServerTrusted,
    YoungByUptime,
    WaitsDemotesHolder,
    WaitsExtendsHolder,
    GoneDropsGrantedSince,
    StrangerNotReleased,
    AcquiresBeforeRenewals,
    EarlyHintDropped,
    KeptHintOutlivesConnection,
    LostIsRevived,
    // Of the server.
    RenewExtendsBeforeSweep,
    RenewDoesNotPromote,
    ReleasePromotesBeforeSweep,
    ReleaseDoesNotPromote,
    RetryReturnsEarly,
    RetryKeepsOldLease,
    NewcomerBarges,
    TryBarges,
    GoneNotPassedOver,
}

const BASE: Config = Config {
    name: "",
    processes: 2,
    slots: 1,
    requests: [2, 1, 0],
    limit: 1,
    ticks: 4,
    tries: false,
    lazy: false,
    away: false,
    quarantine: false,
    beginning: &[],
    faults: Faults {
        slow: 0,
        breaks: 0,
        late_hints: 0,
        lost_hints: 0,
        crashes: 0,
        freezes: 0,
        restarts: 0,
        failovers: 0,
        flushes: 0,
    },
    bug: None,
};

fn config(name: &str) -> Config {
    let deep = if configs().iter().any(|c| c.name == name) { Vec::new() } else { deep_configs() };
    configs()
        .into_iter()
        .chain(deep)
        .find(|config| config.name == name)
        .expect("a scope of this name")
}

fn configs() -> Vec<Config> {
    let none = Faults::default();
    vec![
        Config {
            name: "crash, lost hint",
            processes: 3,
            requests: [1, 1, 1],
            tries: true,
            faults: Faults { crashes: 1, lost_hints: 1, ..none },
            ..BASE
        },
        Config {
            name: "two permits",
            processes: 3,
            requests: [1, 1, 1],
            limit: 2,
            faults: Faults { crashes: 1, ..none },
            ..BASE
        },
        Config {
            name: "slow call, break",
            ticks: 2,
            faults: Faults { slow: 1, breaks: 1, ..none },
            ..BASE
        },
        Config {
            name: "slow call, break, crash",
            requests: [1, 1, 1],
            faults: Faults { slow: 1, breaks: 1, crashes: 1, ..none },
            ..BASE
        },
        Config {
            name: "freeze, late hint",
            ticks: 4,
            faults: Faults { freezes: 1, late_hints: 1, ..none },
            ..BASE
        },
        Config {
            name: "freeze, slow call",
            requests: [1, 1, 1],
            ticks: 3,
            faults: Faults { freezes: 1, slow: 1, ..none },
            ..BASE
        },
        Config {
            name: "restart, order",
            processes: 3,
            requests: [1, 1, 1],
            ticks: 1,
            faults: Faults { restarts: 1, ..none },
            ..BASE
        },
        Config {
            name: "restart, slow call",
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { restarts: 1, slow: 1, ..none },
            ..BASE
        },
        Config {
            name: "restart, two places a process",
            slots: 2,
            ticks: 2,
            faults: Faults { restarts: 1, ..none },
            ..BASE
        },
        Config {
            name: "restart, quarantine",
            requests: [2, 1, 0],
            ticks: 5,
            quarantine: true,
            faults: Faults { restarts: 1, ..none },
            ..BASE
        },
        Config {
            name: "failover, quarantine",
            ticks: 4,
            requests: [1, 1, 0],
            quarantine: true,
            faults: Faults { failovers: 1, ..none },
            ..BASE
        },
        Config {
            name: "failover",
            requests: [1, 1, 0],
            ticks: 4,
            faults: Faults { failovers: 1, ..none },
            ..BASE
        },
        Config {
            name: "flush, slow call, late hint",
            requests: [1, 1, 0],
            ticks: 2,
            faults: Faults { flushes: 1, slow: 1, late_hints: 1, ..none },
            ..BASE
        },
    ]
}

/// Larger scopes, for `MODEL_DEEP=1`: minutes each.
fn deep_configs() -> Vec<Config> {
    let none = Faults::default();
    let larger = |name: &'static str, of: &'static str| Config { name, ..config(of) };
    vec![
        Config {
            ticks: 3,
            away: true,
            faults: Faults { slow: 1, breaks: 1, late_hints: 1, ..none },
            ..larger("slow call, long break, late hint", "slow call, break")
        },
        Config {
            beginning: &[
                Action::Request { process: 0, wait: true },
                Action::Send { process: 0 },
                Action::Request { process: 1, wait: true },
                Action::SendSlow { process: 1 },
                Action::Execute { process: 1 },
                Action::Leave { process: 0, slot: 0 },
                Action::Send { process: 0 },
                Action::DelayHint(0),
                Action::Break { process: 1 },
            ],
            ticks: 3,
            away: true,
            faults: Faults { slow: 1, breaks: 1, late_hints: 1, ..none },
            ..larger("granted while away", "slow call, break")
        },
        Config {
            requests: [2, 1, 0],
            ..larger("flush, slow call, late hint, again", "flush, slow call, late hint")
        },
        Config { requests: [2, 1, 0], ..larger("restart, slow call, again", "restart, slow call") },
        Config { ticks: 3, ..larger("slow call, break, three ticks", "slow call, break") },
        Config {
            ticks: 5,
            requests: [2, 1, 0],
            ..larger("failover, quarantine, five ticks", "failover, quarantine")
        },
        Config {
            processes: 3,
            requests: [1, 1, 1],
            ..larger("restart, quarantine, three processes", "restart, quarantine")
        },
        Config {
            faults: Faults { slow: 2, breaks: 1, late_hints: 1, ..none },
            ..larger("two slow calls, break, late hint", "slow call, break")
        },
        Config { ticks: 5, ..larger("slow call, break, five ticks", "slow call, break") },
        Config {
            faults: Faults { slow: 1, breaks: 1, ..none },
            lazy: true,
            requests: [1, 1, 0],
            ..larger("nobody in a hurry", "slow call, break")
        },
        Config {
            processes: 3,
            requests: [1, 1, 1],
            ..larger("three processes, slow call, break", "slow call, break")
        },
        Config {
            ticks: 4,
            faults: Faults { restarts: 1, late_hints: 1, ..none },
            ..larger("restart, late hint, four ticks", "restart, order")
        },
        Config {
            ticks: 5,
            faults: Faults { restarts: 1, slow: 1, ..none },
            requests: [2, 1, 0],
            processes: 2,
            ..larger("restart, slow call, quarantine", "restart, quarantine")
        },
        Config {
            ticks: 6,
            faults: Faults { freezes: 2, late_hints: 1, slow: 1, ..none },
            ..larger("two freezes, slow call, late hint", "freeze, late hint")
        },
    ]
}

/// What a run found.
struct Found {
    states: usize,
    seen: u32,
    /// The rules that broke, and how.
    broken: Vec<(&'static str, String)>,
}

/// Explores a scope. Breadth first gives the shortest way to what is wrong; where that is far away,
/// depth first is there sooner.
fn explore(config: &Config, stop: HasDiscoveries, depth_first: bool) -> Found {
    fn found(checker: &impl Checker<World>, seen: u32) -> Found {
        let discoveries = checker.discoveries().into_iter();
        let broken = discoveries.map(|(rule, path)| {
            let steps = path.into_actions();
            let steps: Vec<_> = steps.iter().map(|step| format!("  {step:?}")).collect();
            (rule, steps.join("\n"))
        });
        Found { states: checker.unique_state_count(), seen, broken: broken.collect() }
    }
    let seen = Arc::new(AtomicU32::new(0));
    let world = World { config: config.clone(), seen: Arc::clone(&seen) };
    let checker = world.checker().threads(2).finish_when(stop);
    if depth_first {
        let checker = checker.spawn_dfs().join();
        found(&checker, seen.load(Ordering::Relaxed))
    } else {
        let checker = checker.spawn_bfs().join();
        found(&checker, seen.load(Ordering::Relaxed))
    }
}

/// Faults and habits that a scope must have shown, or it proves nothing.
const SHOWN: [(&str, &[Seen]); 10] = [
    ("crash, lost hint", &[Seen::HintLost, Seen::HintRepaired, Seen::Refused, Seen::PassedOver]),
    ("two permits", &[Seen::PassedOver]),
    ("slow call, break", &[Seen::LateSocket, Seen::Orphan, Seen::Stranger, Seen::HintFirst]),
    ("freeze, slow call", &[Seen::LostAtDeadline]),
    ("freeze, late hint", &[Seen::TooLate, Seen::LostAtDeadline, Seen::Rejoined]),
    ("restart, order", &[Seen::Restored, Seen::Rejoined, Seen::OverCap]),
    ("restart, slow call", &[Seen::Restored, Seen::OverCap]),
    ("restart, quarantine", &[Seen::Restored, Seen::Rejoined, Seen::Quarantined]),
    ("failover, quarantine", &[Seen::Restored, Seen::Quarantined]),
    ("flush, slow call, late hint", &[Seen::Restored, Seen::OverCap]),
];

#[test]
fn the_protocol_keeps_its_rules_through_every_fault() {
    let only = std::env::var("MODEL_ONLY").ok();
    let mut all = 0;
    let mut scopes = configs();
    if std::env::var_os("MODEL_DEEP").is_some() {
        scopes.extend(deep_configs());
    }
    for config in scopes {
        if only.as_ref().is_some_and(|only| config.name != only) {
            continue;
        }
        let start = Instant::now();
        let Found { states, seen, broken } = explore(&config, HasDiscoveries::AnyFailures, false);
        all += states;
        eprintln!("{states:>9} states in {:>6.1?}: {}", start.elapsed(), config.name);
        if let Some((rule, steps)) = broken.first() {
            panic!("{rule} does not hold in {}:\n{steps}", config.name);
        }
        let always = [Seen::LimitReached, Seen::SomeoneWaits];
        let shown = SHOWN.iter().filter(|(name, _)| *name == config.name).flat_map(|(_, w)| *w);
        for what in always.iter().chain(shown) {
            assert!(seen & *what as u32 != 0, "{} never shows {what:?}", config.name);
        }
        let may_pass = config.faults.restarts + config.faults.failovers + config.faults.flushes > 0
            && !config.quarantine;
        assert!(may_pass || seen & Seen::OverCap as u32 == 0, "{}: over the cap", config.name);
    }
    eprintln!("{all:>9} states");
}

/// Each rule undone, where, and what must break then.
const MUTANTS: [(Bug, &str, Rule); 33] = [
    (Bug::RejoinWithSameId, "flush, slow call, late hint, again", Rule::Grounded),
    (Bug::RejoinWithNewTicket, "restart, order", Rule::Order),
    (Bug::LateGrantBelieved, "freeze, late hint", Rule::Grounded),
    (Bug::HintWithoutLeaseEnd, "granted while away", Rule::Grounded),
    (Bug::ProofInEveryRenewal, "slow call, break, three ticks", Rule::NoLeak),
    (Bug::DeadlineFromReceipt, "slow call, break, three ticks", Rule::Grounded),
    (Bug::ReleaseNotRepeated, "slow call, break", Rule::NoLeak),
    (Bug::AcquireNotRepeated, "slow call, break", Rule::Served),
    (Bug::RepeatsUnderNewId, "slow call, break", Rule::NoLeak),
    (Bug::WaitersNotRenewed, "crash, lost hint", Rule::Served),
    (Bug::RenewalDoesNotTellGrant, "crash, lost hint", Rule::Aware),
    (Bug::NoSelfFence, "freeze, late hint", Rule::Grounded),
    (Bug::NoReassert, "restart, order", Rule::NotLostEarly),
    (Bug::NoQuarantine, "restart, quarantine", Rule::CapByBelief),
    (Bug::YoungServerTrusted, "restart, quarantine", Rule::CapByBelief),
    (Bug::WaitsDemotesHolder, "failover", Rule::Grounded),
    (Bug::WaitsExtendsHolder, "failover", Rule::Grounded),
    (Bug::GoneDropsGrantedSince, "flush, slow call, late hint", Rule::NotLostEarly),
    (Bug::StrangerNotReleased, "slow call, break", Rule::NoLeak),
    (Bug::AcquiresBeforeRenewals, "restart, two places a process", Rule::CapByProcess),
    (Bug::EarlyHintDropped, "slow call, break", Rule::Aware),
    (Bug::KeptHintOutlivesConnection, "restart, slow call, again", Rule::Grounded),
    (Bug::LostIsRevived, "slow call, break, three ticks", Rule::Grounded),
    (Bug::RenewExtendsBeforeSweep, "slow call, break, three ticks", Rule::DeadStayDead),
    (Bug::RenewDoesNotPromote, "crash, lost hint", Rule::NoIdlePermit),
    (Bug::ReleasePromotesBeforeSweep, "crash, lost hint", Rule::NoIdlePermit),
    (Bug::ReleaseDoesNotPromote, "two permits", Rule::NoIdlePermit),
    (Bug::RetryReturnsEarly, "slow call, break, crash", Rule::NoIdlePermit),
    (Bug::RetryKeepsOldLease, "slow call, break, three ticks", Rule::Grounded),
    (Bug::NewcomerBarges, "crash, lost hint", Rule::Order),
    (Bug::TryBarges, "crash, lost hint", Rule::Order),
    (Bug::GoneNotPassedOver, "crash, lost hint", Rule::GonePassedOver),
    (Bug::YoungByUptime, "failover, quarantine", Rule::CapByBelief),
];

#[test]
fn each_rule_undone_is_caught() {
    let only = std::env::var("MODEL_ONLY").ok();
    let mut missed = Vec::new();
    for (bug, name, rule) in MUTANTS {
        if only.as_ref().is_some_and(|only| format!("{bug:?}") != *only) {
            continue;
        }
        let start = Instant::now();
        let config = Config { bug: Some(bug), ..config(name) };
        let far = config.faults.restarts + config.faults.failovers + config.faults.flushes > 0;
        let stop = HasDiscoveries::AnyOf([rule.name()].into());
        let Found { states, broken, .. } = explore(&config, stop, far);
        let caught = broken.iter().find(|(broken, _)| *broken == rule.name());
        eprintln!("{bug:?}: {rule:?} after {states} states, {:.1?}", start.elapsed());
        match caught {
            Some((_, steps)) if only.is_some() => eprintln!("{steps}"),
            Some(_) => {}
            None => missed.push(format!("{bug:?} in {name}: {rule:?} holds")),
        }
    }
    assert!(missed.is_empty(), "not caught:\n{}", missed.join("\n"));
}
