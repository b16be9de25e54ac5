//! The simulation over etcd as a test: many seeds, each kind of fault, the same hash for the same seed, and a run that finds
//! each planted fault.

#![expect(clippy::print_stdout, reason = "what is found is shown by the test runner")]

use std::collections::BTreeMap;
use std::time::Instant;

use simulation_etcd::plan::{FAULT_KINDS, Fault, Kind, Name, Plan, Planted, What};
use simulation_etcd::world::{Outcome, run};

/// The seeds of the test of all rules.
const SEEDS: std::ops::Range<u64> = 1..41;
/// What occurs in these runs, beside each kind of fault.
const SHOWN: [&str; 9] = [
    "granted at once",
    "granted from a queue",
    "leases that ended by time",
    "left early",
    "lost",
    "places that returned",
    "places that were forgotten",
    "rejected",
    "unavailable",
];

fn run_seed(seed: u64) -> Outcome {
    run(&Plan::new(seed), false, &|| {})
}

#[test]
fn all_rules_hold_and_each_kind_of_fault_is_met() {
    let began = Instant::now();
    let mut counts = BTreeMap::new();
    let mut broken = Vec::new();
    for seed in SEEDS {
        let outcome = run_seed(seed);
        broken.extend(outcome.violations.into_iter().map(|violation| (seed, violation)));
        for (what, count) in outcome.counts {
            *counts.entry(what).or_insert(0) += count;
        }
    }
    println!("{} seeds took {:?}: {counts:#?}", SEEDS.end - SEEDS.start, began.elapsed());
    assert!(broken.is_empty(), "{broken:#?}");
    for what in FAULT_KINDS.iter().chain(&SHOWN) {
        assert!(counts.get(what).is_some_and(|count| *count > 0), "{what} did not occur");
    }
}

/// Processes that stood still for about their leases know of no newer keepalive yet. What others granted them meanwhile they
/// ask for again, which has to wait for the cluster.
#[test]
fn a_process_that_stood_still_waits_for_a_keepalive() {
    for (seed, linger) in (8..24).flat_map(|seed| [(seed, 0), (seed, 400)]) {
        let stands = |process| match seed % 2 {
            0 => What::Freezes { process },
            _ => What::Suspends { process },
        };
        let fault = |number: u64| Fault {
            at: 1500 + number * 3500,
            lasts: 1400 + (seed + 5 * number) % 12 * 90,
            what: stands(0),
        };
        let plan = Plan::new(seed);
        let name = Name {
            limit: 1,
            lease: 1000,
            linger,
            kind: Kind::Plain,
            rate: None,
            ..plan.names[0].clone()
        };
        let faults = (0..5).map(fault).collect();
        let names = vec![name];
        let plan = Plan { faults, faults_end: 19_000, names, min_ttl: 2, tasks: 3, ..plan };
        assert_eq!(run(&plan, false, &|| {}).violations, [], "seed {seed}, linger {linger}");
    }
}

#[test]
fn the_same_seed_gives_the_same_hash() {
    for seed in 3..6 {
        let (one, two) = (run_seed(seed), run_seed(seed));
        assert_eq!((one.hash, one.counts), (two.hash, two.counts), "seed {seed}");
    }
}

#[test]
fn each_planted_fault_is_found_by_its_rule() {
    let mut missed = Vec::new();
    for (planted, rule) in Planted::ALL {
        let found = (1..30).find(|seed| {
            let plan = Plan { planted: Some(planted), ..Plan::new(*seed) };
            let outcome = run(&plan, false, &|| {});
            outcome.violations.iter().any(|violation| violation.rule == rule)
        });
        match found {
            Some(seed) => println!("{planted:?}: seed {seed}: {rule}"),
            None => missed.push((planted, rule)),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
