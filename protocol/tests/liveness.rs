//! Signs of life: a fleet over a simulated store, with faults; and each rule removed once.
//!
//! What the runs exclude is said in `fleet/mod.rs`.

mod fleet;

use fastrand::Rng;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tower_semaphore_protocol::NodeId;
use tower_semaphore_protocol::liveness::{Grace, Row};

use self::fleet::plan::{Fault, Plan, Removed, plan};
use self::fleet::{Report, run};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96, failure_persistence: None, rng_seed: RngSeed::Fixed(20), ..ProptestConfig::default()
    })]

    #[test]
    fn no_process_relies_on_a_place_that_others_forgot(plan in plan()) {
        let (report, _) = run(&plan);
        prop_assert_eq!(report.violation, None);
        prop_assert_eq!(report.lost, Vec::<String>::new());
    }
}

/// How long one row takes to be forgotten, from the death of its process on, in ms.
fn forgotten_after(report: &Report, row: Row) -> Vec<u64> {
    let killed = report.killed.values().next().expect("one was killed");
    let rows = report.forgotten.iter().filter(|(forgotten, _)| *forgotten == row);
    rows.map(|(_, at)| at - killed).collect()
}

#[test]
fn a_dead_process_is_forgotten_once_by_one_process_within_lease_and_grace() {
    for grace in [Grace::Half, Grace::Whole] {
        for seed in 0..12 {
            let dead = usize::try_from(seed % 3).unwrap();
            let faults = vec![(5000 + seed * 97, Fault::Kill { process: dead })];
            let (report, _) = run(&Plan { faults, ..Plan::quiet(seed, 3, grace) });
            assert!(report.violation.is_none() && report.lost.is_empty(), "{report:?}");
            for seconds in [2, 4, 9] {
                let row = Row { node: NodeId::new(dead as u64 + 1), seconds };
                let took = forgotten_after(&report, row);
                let (lease, grace) = (u64::from(seconds) * 1000, grace.of(seconds).as_millis());
                let bound = lease + 500 + u64::try_from(grace).unwrap() * 1005 / 1000 + 100;
                assert!(took.len() == 1 && took[0] < bound, "{row:?}: {took:?}, {bound}");
                assert_eq!(report.attempts[&row], 1, "{row:?}");
            }
        }
    }
}

#[test]
fn a_connected_process_whose_leases_are_revoked_loses_no_place() {
    for seed in 0..20 {
        let revoke = |n: u64| {
            let (process, length) =
                (usize::try_from(n % 3).unwrap(), usize::try_from(n / 3 % 3).unwrap());
            (3000 + n * 2500 + seed * 31, Fault::Revoke { process, length })
        };
        let faults = (0..9).map(revoke).collect();
        let (report, _) = run(&Plan { faults, ..Plan::quiet(seed, 3, Grace::Half) });
        assert!(report.early_revocations >= 5, "{report:?}");
        assert!(report.violation.is_none() && report.lost.is_empty(), "{report:?}");
        assert_eq!((report.places_made, &report.forgotten[..]), (9, &[][..]));
    }
}

/// A plan in which a rule matters.
fn plan_for(removed: Removed, seed: u64) -> Plan {
    let mut rng = Rng::with_seed(seed);
    let at = rng.u64(4000..9000);
    let process = rng.usize(..2);
    let revoke = |length| Fault::Revoke { process, length };
    let base = Plan { delay_ms: 5, drift: 4500, ..Plan::quiet(seed, 2, Grace::Half) };
    match removed {
        Removed::Reading | Removed::Term => {
            let elect = Fault::Elect { gap_ms: 300, deposed_ms: 9500, attached: process };
            let cut = Fault::Cut { process, ms: 12_000 };
            Plan { faults: vec![(at, elect), (at + rng.u64(6000..9000), cut)], ..base }
        }
        Removed::Sending => {
            let ms = *rng.choice(&[3300, 7500]).unwrap();
            let freeze = Fault::Freeze { process, ms, timers_first: false };
            let cut = Fault::Cut { process, ms: 12_000 };
            let faults = vec![(at, freeze), (at + ms + rng.u64(300..1000), cut)];
            Plan { faults, delay_ms: 250, ..base }
        }
        Removed::Margin => {
            let mut faults = Vec::new();
            for (n, at) in (at..24_000).step_by(5000).enumerate() {
                let at = at + rng.u64(..1500);
                faults.push((at, Fault::Cut { process: n % 2, ms: 10_000 }));
                faults.extend([1, 2].map(|length| (at, Fault::Revoke { process: n % 2, length })));
            }
            Plan { faults, grace: Grace::Whole, ..base }
        }
        Removed::RegisteredAt => {
            Plan { faults: vec![(at, Fault::Cut { process, ms: 9000 })], ..base }
        }
        Removed::Grace | Removed::Registering => Plan { faults: vec![(at, revoke(2))], ..base },
        Removed::Guard => {
            let deaf = Fault::Deaf { process: 1 - process, ms: 9000 };
            let faults = vec![(at, revoke(rng.usize(..3))), (at + rng.u64(5..20), deaf)];
            Plan { faults, ..base }
        }
        Removed::Restart => {
            let freeze = Fault::Freeze { process: 1 - process, ms: 3500, timers_first: true };
            let faults =
                vec![(at, revoke(0)), (at + 300, freeze), (at + rng.u64(3500..3790), revoke(0))];
            Plan { faults, delay_ms: 250, ..base }
        }
    }
}

/// How many runs it takes to find that a rule is missing.
fn runs_until_found(removed: Removed) -> u64 {
    for seed in 0..400 {
        let plan = plan_for(removed, seed);
        let (without, _) = run(&plan.clone().without(removed));
        let is_found = match removed {
            Removed::Registering => !without.lost.is_empty(),
            _ => without.violation.is_some(),
        };
        if is_found {
            let (with, _) = run(&plan);
            assert!(with.violation.is_none() && with.lost.is_empty(), "{plan:?}: {with:?}");
            return seed + 1;
        }
    }
    panic!("{removed:?} is not missed");
}

#[test]
fn with_all_rules_the_same_runs_find_nothing() {
    for removed in RULES {
        for seed in 1000..1012 {
            let plan = plan_for(removed, seed);
            let (report, _) = run(&plan);
            assert!(report.violation.is_none() && report.lost.is_empty(), "{plan:?}: {report:?}");
        }
    }
}

const RULES: [Removed; 9] = [
    Removed::Reading,
    Removed::Term,
    Removed::Sending,
    Removed::Margin,
    Removed::RegisteredAt,
    Removed::Grace,
    Removed::Registering,
    Removed::Guard,
    Removed::Restart,
];

macro_rules! removed {
    ($($name:ident: $removed:ident,)*) => {
        $(#[test]
        fn $name() {
            println!("found in run {}", runs_until_found(Removed::$removed));
        })*
    };
}

removed! {
    a_missing_reading_is_found: Reading,
    a_missing_comparison_of_terms_is_found: Term,
    counting_from_the_answer_is_found: Sending,
    a_missing_margin_is_found: Margin,
    counting_places_that_were_seen_before_the_registration_is_found: RegisteredAt,
    a_missing_grace_is_found: Grace,
    a_missing_registration_is_found: Registering,
    a_missing_guard_is_found: Guard,
    acting_on_stale_absences_is_found: Restart,
}

#[test]
fn runs_are_repeatable() {
    let plan = plan_for(Removed::Sending, 7);
    let [one, other] = [run(&plan).0, run(&plan).0].map(|report| format!("{report:?}"));
    assert_eq!(one, other);
}
