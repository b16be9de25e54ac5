//! Requests that a budget forbids.

use super::super::history::Budget;
use super::*;

const SPENT: usize = 2;

/// The clean history with one key more, whose requests use 50 a second, ten each, all of which they may.
fn spending() -> Run {
    let mut run = clean();
    run.rules.limits.push(2);
    run.rules.rates.push(None);
    run.rules.budgets.push(Some(Budget { burst: 50, refill: S, most: 10 }));
    for came in (200 * MS..10 * S).step_by(200_000) {
        run.requests.push(using(10, came));
    }
    run
}

fn using(used: u64, came: At) -> Request {
    let request = request(SPENT, came / 50_000 % 3, came - 10 * MS, came, came + 30 * MS);
    Request { estimate: 10, used, ..request }
}

#[track_caller]
fn found(rule: &str, plant: impl FnOnce(&mut Run)) {
    found_in(spending(), rule, plant);
}

#[track_caller]
fn excused(happens: impl FnOnce(&mut Run)) {
    excused_in(spending(), happens);
}

/// So many requests, one after the other.
fn burst(run: &mut Run, count: u64) {
    run.requests.extend((0..count).map(|i| using(10, 5010 * MS + i * MS)));
}

#[test]
fn a_clean_history_with_a_budget_passes() {
    let report = check(&spending());
    assert!(report.violations.is_empty(), "{report}");
    let [spent] = &*report.budgets else { panic!("{report}") };
    assert_eq!((spent.key, spent.count, spent.used), (SPENT, 49, 490));
    assert!((10..=11).contains(&spent.peak), "{report}");
}

/// The burst, and what two may have given back.
#[test]
fn more_than_the_budget_is_found_and_what_is_given_back_is_not() {
    let short = |run: &mut Run, count| {
        burst(run, count);
        // Each for so short a time that there are no more than two at once.
        run.requests.iter_mut().filter(|r| r.key == SPENT).for_each(|request| {
            request.stays[0].to = Some(request.stays[0].from + MS);
        });
    };
    excused(|run| short(run, 6));
    found("budget", |run| short(run, 8));
    excused(|run| {
        short(run, 8);
        run.faults.push(fault(What::FlushAll, None, 5000 * MS, 5011 * MS));
    });
    found("budget", |run| {
        short(run, 15);
        run.faults.push(fault(What::FlushAll, None, 5000 * MS, 5011 * MS));
    });
    found("budget", |run| {
        short(run, 8);
        run.faults.push(fault(What::FreezeRedis, None, 5000 * MS, 5011 * MS));
    });
}

#[test]
fn each_tenant_has_a_budget_of_its_own() {
    let plant = |run: &mut Run, of: fn(usize) -> usize| {
        run.rules.fair = Fair::Shares;
        burst(run, 8);
        for (i, request) in run.requests.iter_mut().filter(|r| r.key == SPENT).enumerate() {
            request.tenant = of(i);
            request.stays[0].to = Some(request.stays[0].from + MS);
        }
    };
    excused(|run| plant(run, |i| i % 2));
    found("budget", |run| plant(run, |_| 1));
}

#[test]
fn a_request_that_waits_although_the_budget_has_enough_is_found() {
    let plant = |run: &mut Run| {
        run.requests.retain(|r| r.key != SPENT || !(4 * S..8 * S).contains(&r.stays[0].from));
        run.requests.push(refused(SPENT, 0, 4500 * MS, 7500 * MS, 429));
    };
    found("idle", plant);
    // Others use it meanwhile.
    excused(|run| {
        plant(run);
        run.requests.push(Request { sent: 4300 * MS, ..using(10, 6000 * MS) });
    });
}
