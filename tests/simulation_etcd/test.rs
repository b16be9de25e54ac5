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

/// A process that stood still for nearly or just more than its lease knows of no newer keepalive yet. What it was granted
/// meanwhile it asks for again, which the cluster has to answer.
#[test]
fn a_process_that_stood_still_waits_for_a_keepalive() {
    for (seed, linger) in (1..16).flat_map(|seed| [(seed, 0), (seed, 400)]) {
        let stands = |process| match seed % 2 {
            0 => What::Freezes { process },
            _ => What::Suspends { process },
        };
        let plan = Plan::new(seed);
        let faults = (0..plan.processes as u64).map(|process| Fault {
            at: 1500 + process * 50,
            lasts: 1500 + seed * 60,
            what: stands(usize::try_from(process).unwrap_or(0)),
        });
        let name = |name: Name| Name { lease: 1000, linger, kind: Kind::Plain, rate: None, ..name };
        let names = plan.names.clone().into_iter().map(name).collect();
        let plan = Plan { faults: faults.collect(), faults_end: 5000, names, min_ttl: 2, ..plan };
        assert_eq!(run(&plan, false, &|| {}).violations, [], "seed {seed}");
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
