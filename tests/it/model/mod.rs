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

use self::world::{Rule, Seen, World};

/// How a run is set up.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    name: &'static str,
    processes: u8,
    /// Requests of one process at a time, and in all.
    slots: usize,
    requests: u8,
    limit: u32,
    ticks: u8,
    /// Whether some requests may not wait.
    tries: bool,
    /// Whether time passes though someone has something to send.
    lazy: bool,
    quarantine: bool,
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
    YoungServerTrusted,
    WaitsDemotesHolder,
    WaitsExtendsHolder,
    GoneDropsGrantedSince,
    StrangerNotReleased,
    AcquiresBeforeRenewals,
    EarlyHintDropped,
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
    LapsedProofAccepted,
}

const BASE: Config = Config {
    name: "",
    processes: 2,
    slots: 1,
    requests: 2,
    limit: 1,
    ticks: 4,
    tries: false,
    lazy: false,
    quarantine: false,
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

fn config(name: &'static str) -> Config {
    configs().into_iter().find(|config| config.name == name).expect("a scope of this name")
}

fn configs() -> Vec<Config> {
    let none = Faults::default();
    vec![
        Config {
            name: "three processes, one crash, hints lost",
            processes: 3,
            requests: 1,
            ticks: 4,
            tries: true,
            faults: Faults { crashes: 1, lost_hints: 1, ..none },
            ..BASE
        },
        Config {
            name: "slow calls, breaks, late hints",
            ticks: 4,
            faults: Faults { slow: 2, breaks: 1, late_hints: 1, ..none },
            ..BASE
        },
        Config {
            name: "slow call, break, crash",
            ticks: 4,
            faults: Faults { slow: 1, breaks: 1, crashes: 1, ..none },
            ..BASE
        },
        Config {
            name: "freeze, late hints",
            ticks: 5,
            faults: Faults { freezes: 1, late_hints: 1, slow: 1, ..none },
            ..BASE
        },
        Config {
            name: "restart",
            processes: 3,
            requests: 1,
            ticks: 4,
            faults: Faults { restarts: 1, late_hints: 1, ..none },
            ..BASE
        },
        Config {
            name: "restart, slow calls",
            slots: 2,
            ticks: 4,
            faults: Faults { restarts: 1, slow: 1, late_hints: 1, ..none },
            ..BASE
        },
        Config {
            name: "restart, quarantine",
            processes: 3,
            requests: 1,
            ticks: 5,
            quarantine: true,
            faults: Faults { restarts: 1, ..none },
            ..BASE
        },
        Config {
            name: "failover, quarantine",
            ticks: 5,
            quarantine: true,
            faults: Faults { failovers: 1, ..none },
            ..BASE
        },
        Config {
            name: "failover",
            ticks: 4,
            faults: Faults { failovers: 1, late_hints: 1, ..none },
            ..BASE
        },
        Config {
            name: "flush, slow call",
            ticks: 4,
            faults: Faults { flushes: 1, slow: 1, ..none },
            ..BASE
        },
    ]
}

/// Explores a scope; gives the states, what was seen, and the rules that were broken.
fn explore(config: &Config, stop: HasDiscoveries) -> (usize, u32, Vec<(&'static str, String)>) {
    let seen = Arc::new(AtomicU32::new(0));
    let world = World { config: config.clone(), seen: Arc::clone(&seen) };
    let checker = world.checker().threads(2).finish_when(stop).spawn_bfs().join();
    let found = checker
        .discoveries()
        .into_iter()
        .map(|(rule, path)| {
            let steps: Vec<_> =
                path.into_actions().iter().map(|step| format!("  {step:?}")).collect();
            (rule, steps.join("\n"))
        })
        .collect();
    (checker.unique_state_count(), seen.load(Ordering::Relaxed), found)
}

#[test]
fn the_protocol_keeps_its_rules_through_every_fault() {
    for config in configs() {
        let start = Instant::now();
        let (states, seen, found) = explore(&config, HasDiscoveries::AnyFailures);
        eprintln!("{:>9} states {:>6.1?} seen {seen:x}: {}", states, start.elapsed(), config.name);
        for (rule, steps) in found {
            eprintln!("BROKEN {rule} in {}:\n{steps}", config.name);
        }
    }
    let _ = (Rule::Aware, Seen::OverCap, config);
}
