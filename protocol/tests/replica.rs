//! Replicas of a semaphore in a store that counts nothing: what histories with all faults leave, and single rules.

mod replicas;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use self::replicas::steps::history;
use self::replicas::{Counts, Fault, Fleet};

fn runner(cases: u32) -> TestRunner {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

#[test]
fn whatever_happens_the_chain_of_values_is_right_and_everybody_is_served() {
    let run = |history| Fleet::run(&history, Fault::None).map(|_| ()).map_err(TestCaseError::fail);
    runner(400).run(&history(), run).unwrap();
}

#[test]
fn histories_come_by_everything() {
    let (mut runner, mut of_fleets, mut of_processes) = (runner(0), [0; 7], [0; 3]);
    for _ in 0..150 {
        let history = history().new_tree(&mut runner).unwrap().current();
        let fleet = Fleet::run(&history, Fault::None).unwrap();
        let Counts { written, unchanged, lost, late, forgotten, answered_without, ahead } =
            fleet.counts;
        let counts = [written, unchanged, lost, late, forgotten, answered_without, ahead];
        of_fleets.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        for process in &fleet.processes {
            let counts = [process.granted, process.recalled, process.freed];
            of_processes.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
    }
    assert!(of_fleets.iter().all(|count| *count > 20), "{of_fleets:?}");
    assert!(of_processes.iter().all(|count| *count > 20), "{of_processes:?}");
}

/// Whether a history shows a fault as expected.
fn is_noticed(fault: Fault, expected: &str) -> bool {
    let mut runner = runner(0);
    (0..1_000).any(|_| {
        let history = history().new_tree(&mut runner).unwrap().current();
        Fleet::run(&history, fault).is_err_and(|what| what.contains(expected))
    })
}

#[test]
fn each_rule_that_is_not_obeyed_is_noticed() {
    for (fault, expected) in [
        (Fault::NoCompare, "is forgotten"),
        (Fault::GoesBack, "is said to be gone, and is there"),
        (Fault::DropsUnknown, "is not idle"),
        (Fault::TrustsUnknown, "is said to be"),
        (Fault::KeepsStrangers, "is not idle"),
        (Fault::ForgetsLiving, "is forgotten, and its process lives"),
        (Fault::OutOfTurn, "is granted"),
        (Fault::DeadWrite, "left"),
        (Fault::NoHints, "is Waiting in the end"),
        (Fault::IgnoresFreed, "is Waiting in the end"),
        (Fault::PassesOn, "permits, and has"),
    ] {
        assert!(is_noticed(fault, expected), "{fault:?}");
    }
}
