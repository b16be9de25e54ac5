//! The simulation as a test: many seeds, each kind of fault, the same hash for the same seed, and a run that finds each
//! planted fault.

#![expect(clippy::print_stdout, reason = "what is found is shown by the test runner")]

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Instant;

use simulation::fair::Done;
use simulation::further;
use simulation::plan::{FaultPlan, Kind, OutagePolicy, Plan, Planted, Scenario};
use simulation::world::{Outcome, run};
use tower_semaphore_protocol::{Claim, FurtherLimit, NodeId, PlaceId, TICKET_MIN, Tenant};

/// The number of runs in the test of all rules.
const RUNS: usize = 500;
/// The number of runs that meet each kind of fault at least once.
const KINDS: [&str; 38] = [
    "policy: refuse",
    "policy: admit",
    "policy: local",
    "policy: quarantine",
    "policy: reuse",
    "policy: adaptive",
    "refused by the upstream",
    "adaptive limits lowered",
    "adaptive limits raised",
    "calls under an operator's limit in place of an adaptive one",
    "poll-only connections",
    "calls overtaken",
    "calls of closed connections",
    "messages lost",
    "messages late",
    "messages twice",
    "recalls",
    "recalls lost",
    "recalls looked at",
    "kept permits used",
    "permits passed on",
    "refused: limit",
    "refused: queue full",
    "refused: queue timeout",
    "refused: further limit",
    "refused: draining",
    "refused: unavailable",
    "refused: 429",
    "refused: tenant limit",
    "refused: cost too high",
    "requests of tenants",
    "requests for several permits",
    "turns judged",
    "broken off",
    "broken off before the response",
    "broken off in the response",
    "broken off by a crash",
    "broken off by a shutdown",
];

/// Returns the lines that a child of the program printed.
fn simulate(words: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_simulate")).args(words).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

fn hashes(text: &str) -> Vec<String> {
    text.lines().filter(|line| line.starts_with("ends\t")).map(ToOwned::to_owned).collect()
}

/// Runs that the crate fails today are listed in `known.txt`, by rule and scenario.
fn is_known(rule: &str, scenario: &str) -> bool {
    include_str!("known.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .any(|line| line.split('\t').eq([rule, scenario]) || line.split('\t').eq([rule, "*"]))
}

#[test]
fn all_rules_hold_and_each_kind_of_fault_is_met() {
    let began = Instant::now();
    let runs = RUNS.to_string();
    let (code, text) = simulate(&["--seeds", &runs, "--jobs", "2", "--no-shrink"]);
    let took = began.elapsed();
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        if let Some((count, what)) = line.trim_start().split_once(' ')
            && let Ok(count) = count.parse::<u64>()
        {
            counts.insert(what.to_owned(), count);
        }
    }
    let names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
    for what in names.iter().chain(&KINDS) {
        assert!(counts.get(*what).is_some_and(|count| *count > 0), "{what} did not occur:\n{text}");
    }
    let mut broken = Vec::new();
    for line in text.lines() {
        let Some((head, _)) = line.split_once("; the first:") else { continue };
        let Some((runs, rule)) = head.split_once(" broke a rule: ") else { continue };
        let scenario = runs.rsplit(' ').next().unwrap_or("");
        if !is_known(rule, scenario) {
            broken.push(line.to_owned());
        }
    }
    assert!(broken.is_empty(), "{broken:#?}\n{text}");
    let is_anything_known = include_str!("known.txt").lines().any(|line| !line.starts_with('#'));
    assert!(code == Some(0) || is_anything_known, "{code:?}\n{text}");
    println!("{RUNS} runs took {took:?}");
}

#[test]
fn the_same_seed_gives_the_same_hash() {
    for scenario in Scenario::ALL {
        let once = || {
            let words = ["--worker", "--scenario", scenario.name(), "--from", "3", "--seeds", "3"];
            simulate(&words)
        };
        let ((first, one), (second, two)) = (once(), once());
        assert_eq!((first, second), (Some(0), Some(0)), "{}", scenario.name());
        assert_eq!(hashes(&one), hashes(&two), "{}", scenario.name());
        assert_eq!(hashes(&one).len(), 3, "{one}");
    }
}

/// The hashes of a few runs: other builds and machines must get the same.
#[test]
fn other_builds_give_the_same_hash() {
    let hash = |scenario, seed| run(&Plan::new(scenario, seed), false, &|| {}).hash;
    let scenarios = [
        Scenario::Calm,
        Scenario::Loss,
        Scenario::Operators,
        Scenario::Processes,
        Scenario::Layer,
        // With a limit that finds itself.
        Scenario::Network,
    ];
    let seen: Vec<_> = scenarios
        .into_iter()
        .map(|scenario| format!("{} {:016x}", scenario.name(), hash(scenario, 5)))
        .collect();
    let known: Vec<_> = include_str!("hashes.txt").lines().collect();
    assert_eq!(seen, known, "if the crate or a plan is meant to behave otherwise: {seen:#?}");
}

/// Returns the first run that finds a planted fault.
fn found(planted: Planted, rule: &str) -> Option<(Scenario, u64, Outcome)> {
    let scenarios = match planted {
        Planted::WorksUnbounded => vec![Scenario::Large],
        Planted::SweepSettlesNobody | Planted::ForgetsSuspension => vec![Scenario::Processes],
        Planted::NeverConnects => vec![Scenario::Crowd],
        _ => vec![Scenario::Calm, Scenario::Operators, Scenario::Leases],
    };
    (1..160).find_map(|seed| {
        scenarios.iter().copied().find_map(|scenario| {
            let mut plan = Plan { planted: Some(planted), ..Plan::new(scenario, seed) };
            let arranged: Option<fn(&mut Plan)> = match planted {
                Planted::WorksUnbounded => Some(all_in_one_that_crashes),
                Planted::ForgetsSuspension => Some(suspended_and_then_cut_off),
                _ => None,
            };
            if let Some(arrange) = arranged {
                arrange(&mut plan);
                let bounded = run(&Plan { planted: None, ..plan.clone() }, false, &|| {});
                assert_eq!(bounded.violations, []);
            }
            let outcome = run(&plan, false, &|| {});
            let is_found = outcome.violations.iter().any(|violation| violation.rule == rule);
            is_found.then_some((scenario, seed, outcome))
        })
    })
}

/// A process that holds permits is suspended for longer than its leases, and cannot reach a server when it resumes; the
/// requests of the others wait for these permits.
fn suspended_and_then_cut_off(plan: &mut Plan) {
    plan.faults = Vec::new();
    for policy in plan.policies.iter_mut().flatten() {
        (policy.lease, policy.linger, policy.limit, policy.headroom) = (1500, 0, 1, 0);
        (policy.outage, policy.adaptive) = (OutagePolicy::Refuse, None);
    }
    for (number, request) in plan.requests.iter_mut().enumerate() {
        request.process = usize::from(number >= plan.names);
        request.name = number % plan.names;
        request.at = if request.process == 0 { 100 } else { 500 };
        (request.wait, request.hold) = (8000, if request.process == 0 { 2900 } else { 50 });
        (request.ask, request.bound, request.leaves) = (None, None, None);
    }
    let fault =
        |kind, at, lasts, server| FaultPlan { at, lasts, kind, process: 0, server, what: 1 };
    plan.faults.push(fault(Kind::Suspend, 500, 1600, 0));
    for server in 0..plan.servers {
        plan.faults.push(fault(Kind::Blackhole, 500, 2500, server));
        plan.faults.push(fault(Kind::ConnectFails, 2000, 1000, server));
    }
}

/// Nearly all requests are of one process, wait for the only permit, and die together.
fn all_in_one_that_crashes(plan: &mut Plan) {
    for policy in plan.policies.iter_mut().flatten() {
        (policy.limit, policy.adaptive) = (1, None);
    }
    for (number, request) in plan.requests.iter_mut().enumerate() {
        (request.at, request.wait) = (100, 8000);
        request.process = usize::from(number % 100 == 0);
    }
    let crash =
        FaultPlan { at: 2000, lasts: 100, kind: Kind::Crash, process: 0, server: 0, what: 1 };
    plan.faults = vec![crash];
}

#[test]
fn each_planted_fault_is_found_by_its_rule() {
    let mut missed = Vec::new();
    for (planted, rule) in Planted::ALL {
        match found(planted, rule) {
            Some((scenario, seed, _)) => {
                println!("{planted:?}: {} {seed}: {rule}", scenario.name());
            }
            None => missed.push((planted, rule)),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn a_run_that_comes_to_no_end_is_found() {
    for (planted, scenario, from) in
        [("Hangs", "calm", "1"), ("LoopsAtNeverFitting", "operators", "59")]
    {
        let words = ["--plant", planted, "--scenario", scenario, "--from", from];
        let (code, text) = simulate(&[&words[..], &["--seeds", "1", "--no-shrink"]].concat());
        assert_eq!(code, Some(1), "{planted}");
        assert!(text.contains("broke a rule: stuck"), "{planted}: {text}");
    }
}

/// Distinguishes the planted faults of tenants: without any, the judge finds nothing wrong with the ledger in which
/// they are planted.
#[test]
fn the_naive_ledger_breaks_no_rule_by_itself() {
    for seed in 1..13 {
        let plan = Plan { planted: Some(Planted::Naive), ..Plan::new(Scenario::Calm, seed) };
        let outcome = run(&plan, false, &|| {});
        assert_eq!(outcome.violations, [], "{seed}");
    }
}

/// What a ledger did to places under one limit of one permit: from which it began, and to what it came.
fn judged(before: &[(u64, Option<u64>)], after: &[(u64, Option<u64>)]) -> Option<&'static str> {
    let claim = Claim::new(Tenant::of_hash(1)).also(FurtherLimit::of_hash(7, 1));
    let id =
        |n| PlaceId { node: NodeId::new(1), poll_only: false, n, bound: None, claim: Some(claim) };
    let stored = |places: &[(u64, Option<u64>)]| -> Vec<_> {
        places.iter().map(|(n, ticket)| (id(*n), 5000, ticket.map(|at| TICKET_MIN + at))).collect()
    };
    let (before, after) = (stored(before), stored(after));
    let done = Done {
        before: &before,
        after: &after,
        now: 1_000_000,
        limit: 9,
        headroom: 0,
        for_all: false,
        leaving: &[],
        used: &[],
        coming: &[],
        promotes: true,
        more: false,
    };
    further::judge(&done).map(|(rule, _)| rule)
}

#[test]
fn what_a_ledger_does_wrong_with_further_limits_is_found() {
    let (holds, waits) = (None, Some);
    assert_eq!(judged(&[(1, waits(1)), (2, waits(2))], &[(1, holds), (2, waits(2))]), None);
    let too_many = judged(&[(1, holds), (2, waits(2))], &[(1, holds), (2, holds)]);
    assert_eq!(too_many, Some("each in the server"));
    let passed = judged(&[(1, waits(1)), (2, waits(2))], &[(1, waits(1)), (2, holds)]);
    assert_eq!(passed, Some("order"));
    assert_eq!(judged(&[(1, waits(1))], &[(1, waits(1))]), Some("idle in the server"));
    assert_eq!(judged(&[(1, holds), (2, waits(2))], &[(1, holds), (2, waits(2))]), None);
}
