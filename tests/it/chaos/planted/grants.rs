//! Grants that a rate or a pause forbids.

use super::super::history::{Number, Pause, Rate, Start};
use super::*;

const RATED: usize = 2;
const PAUSED: usize = 3;

/// The clean history with two keys more. One starts as often as its rate of 20 in a second allows. The other is paused
/// for a second from 5 s on, because of the response to its last request before.
fn granting() -> Run {
    let mut run = clean();
    run.rules.limits.extend([5, 3]);
    run.rules.rates.extend([Some(Rate { starts: 20, window: S }), None]);
    run.rules.budgets.extend([None, None]);
    for came in (100 * MS..10 * S).step_by(50_000) {
        run.requests.push(request(RATED, came / 50_000 % 3, came - 10 * MS, came, came + 30 * MS));
        run.starts.push(Start { key: RATED, at: came - MS });
    }
    for came in (100 * MS..10 * S).step_by(100_000) {
        if !(5 * S..6250 * MS).contains(&came) {
            let own = request(PAUSED, came / 100_000 % 3, came - 10 * MS, came, came + 30 * MS);
            run.requests.push(own);
        }
    }
    run.pauses.push(Pause { key: PAUSED, written: 5 * S, ends: 6250 * MS });
    let asks = first(&mut run, PAUSED, 4900 * MS);
    asks.later = true;
    asks.head = Some((4931 * MS, 429));
    run
}

#[track_caller]
fn found(rule: &str, plant: impl FnOnce(&mut Run)) {
    found_in(granting(), rule, plant);
}

#[track_caller]
fn excused(happens: impl FnOnce(&mut Run)) {
    excused_in(granting(), happens);
}

#[test]
fn a_clean_history_with_a_rate_and_a_pause_passes() {
    let report = check(&granting());
    assert!(report.violations.is_empty(), "{report}");
    let starts = &report.starts[0];
    assert_eq!((starts.key, starts.count), (RATED, 198));
    assert_eq!((starts.most, starts.most_at_upstream), (20, 20));
    assert_eq!((report.pauses.asked, report.pauses.recorded), (1, 1));
    // All but the time of a message and the slack.
    assert!((report.pauses.judged_ms - 750.0).abs() < 1.0, "{report}");
}

// ===== rate =====

#[test]
fn one_start_over_the_rate_is_found_where_redis_counted_it() {
    found("rate", |run| run.starts.push(Start { key: RATED, at: 5025 * MS }));
}

#[test]
fn one_request_over_the_rate_is_found_at_the_upstream() {
    let extra = request(RATED, 0, 5015 * MS, 5025 * MS, 5040 * MS);
    found("rate", |run| run.requests.push(extra.clone()));
    // It may have started long before, with the first of its window.
    let waited = Request { sent: 3 * S, ..extra };
    let plant = |run: &mut Run| {
        run.requests.push(waited);
        run.requests.retain(|r| r.key != RATED || !(2990 * MS..3200 * MS).contains(&r.sent));
    };
    excused(|run| {
        plant(run);
        run.faults.push(fault(What::Stall, Some(0), 4 * S, 5020 * MS));
    });
}

#[test]
fn a_loss_of_data_allows_the_rate_once_more_and_not_twice() {
    // All that may start in the second after the loss does so at once, and one more if so planted.
    let plant = |run: &mut Run, more: At| {
        run.starts.retain(|start| !(5 * S..6 * S).contains(&start.at));
        run.starts.extend((0..20 + more).map(|i| Start { key: RATED, at: (5001 + i) * MS }));
    };
    let loss = |what| fault(what, None, 4995 * MS, 5 * S);
    found("rate", |run| plant(run, 0));
    excused(|run| {
        plant(run, 0);
        run.faults.push(loss(What::FlushAll));
    });
    found("rate", |run| {
        plant(run, 1);
        run.faults.push(loss(What::RestartRedis));
    });
    // A Redis that only stood still has lost nothing.
    found("rate", |run| {
        plant(run, 0);
        run.faults.push(loss(What::FreezeRedis));
    });
}

#[test]
fn with_several_servers_the_former_one_may_still_grant_for_a_moment() {
    let plant = |run: &mut Run, at| {
        run.rules.shape = Shape::Sentinel;
        run.faults.push(fault(What::Failover, None, 4900 * MS, 5 * S));
        run.starts.push(Start { key: RATED, at });
    };
    excused(|run| plant(run, 5300 * MS));
    found("rate", |run| plant(run, 8 * S));
    let slept = |run: &mut Run, until| {
        plant(run, 8 * S);
        run.faults.push(fault(What::FreezeGateway, Some(3), 4950 * MS, until));
        run.gateways.push(Life { died: Some(8 * S), ..Life::default() });
    };
    excused(|run| slept(run, 7800 * MS));
    found("rate", |run| slept(run, 6 * S));
}

#[test]
fn a_request_that_waits_although_the_rate_allows_more_is_found() {
    let plant = |run: &mut Run| {
        run.requests.retain(|r| r.key != RATED || !(4 * S..8 * S).contains(&r.stays[0].from));
        run.requests.push(refused(RATED, 0, 4500 * MS, 7500 * MS, 429));
    };
    found("idle", |run| {
        plant(run);
        run.starts.retain(|start| !(4 * S..8 * S).contains(&start.at));
    });
    // By Redis, others started.
    excused(plant);
}

// ===== pause =====

/// One that comes to the upstream in the pause.
fn one_in_the_pause(run: &mut Run, came: At) {
    run.requests.push(request(PAUSED, 1, came - 10 * MS, came, came + 30 * MS));
}

#[test]
fn a_grant_in_a_pause_is_found_wherever_it_is_seen() {
    found("pause", |run| one_in_the_pause(run, 5700 * MS));
    found("pause", |run| run.starts.push(Start { key: PAUSED, at: 5700 * MS }));
    // While the message is on its way, and in the slack at the end.
    for at in [5200 * MS, 6050 * MS] {
        excused(|run| one_in_the_pause(run, at));
        excused(|run| run.starts.push(Start { key: PAUSED, at }));
    }
    // Another key is not paused.
    excused(|run| run.starts.push(Start { key: 0, at: 5700 * MS }));
}

#[test]
fn one_that_was_granted_before_and_came_late_is_excused() {
    excused(|run| {
        run.requests.push(request(PAUSED, 1, 4900 * MS, 5700 * MS, 5730 * MS));
        run.faults.push(fault(What::FreezeGateway, Some(1), 4910 * MS, 5690 * MS));
    });
}

#[test]
fn a_resume_excuses_grants_in_what_is_left_of_the_pause() {
    excused(|run| {
        run.resumes.push((5500 * MS, 5510 * MS));
        one_in_the_pause(run, 5700 * MS);
    });
    found("pause", |run| {
        run.resumes.push((5800 * MS, 5810 * MS));
        one_in_the_pause(run, 5700 * MS);
    });
    found("pause", |run| {
        run.resumes.push((4900 * MS, 4990 * MS));
        one_in_the_pause(run, 5700 * MS);
    });
}

#[test]
fn what_a_fault_held_back_may_be_granted_when_it_ends_and_not_later() {
    let granted = |run: &mut Run, what, begin, end, at| {
        run.faults.push(fault(what, Some(2), begin, end));
        run.starts.push(Start { key: PAUSED, at });
    };
    for what in [What::Stall, What::StallCut, What::FreezeGateway] {
        excused(|run| granted(run, what, 4900 * MS, 5500 * MS, 5700 * MS));
        found("pause", |run| granted(run, what, 4900 * MS, 5500 * MS, 5800 * MS));
        // It cannot grant while it lasts; and if it began later, the process knew.
        found("pause", |run| granted(run, what, 4900 * MS, 5950 * MS, 5700 * MS));
        found("pause", |run| granted(run, what, 5300 * MS, 5500 * MS, 5700 * MS));
    }
    // At the upstream, it is not known whether it was before the end or after.
    let came = |run: &mut Run, at| {
        run.faults.push(fault(What::StallCut, Some(2), 4900 * MS, 5700 * MS));
        run.requests.push(request(PAUSED, 1, at - 210 * MS, at, at + 30 * MS));
    };
    excused(|run| came(run, 5710 * MS));
    found("pause", |run| came(run, 5690 * MS));
    excused(|run| granted(run, What::Delay, 4900 * MS, 5 * S, 5800 * MS));
    found("pause", |run| granted(run, What::Delay, 5300 * MS, 5800 * MS, 5700 * MS));
    excused(|run| granted(run, What::Cut, 5200 * MS, 5200 * MS, 5400 * MS));
    found("pause", |run| granted(run, What::Cut, 5200 * MS, 5200 * MS, 5500 * MS));
    // The next process reads it first.
    found("pause", |run| {
        granted(run, What::KillGateway, 5 * S, 5050 * MS, 5400 * MS);
        run.faults[0].gateway = None;
    });
}

#[test]
fn a_pause_whose_record_may_be_lost_is_not_judged() {
    let lost = |run: &mut Run, begin, shape, what| {
        run.rules.shape = shape;
        run.faults.push(fault(what, None, begin, begin));
        run.starts.push(Start { key: PAUSED, at: 5700 * MS });
    };
    excused(|run| lost(run, 5100 * MS, Shape::One, What::FlushAll));
    found("pause", |run| lost(run, 5800 * MS, Shape::One, What::FlushAll));
    found("pause", |run| lost(run, 3 * S, Shape::One, What::FlushAll));
    excused(|run| lost(run, 5 * S, Shape::Cluster, What::Handover));
    found("pause", |run| lost(run, 5 * S, Shape::Cluster, What::MoveSlot));
}

#[test]
fn a_name_that_is_not_granted_after_its_pause_is_found() {
    let plant = |run: &mut Run| {
        run.requests.retain(|r| r.key != PAUSED || !(5 * S..9200 * MS).contains(&r.stays[0].from));
        run.requests.push(refused(PAUSED, 0, 6200 * MS, 9200 * MS, 429));
    };
    found("idle", plant);
    excused(|run| {
        plant(run);
        run.pauses.push(Pause { key: PAUSED, written: 6 * S, ends: 7 * S });
    });
}

#[test]
fn a_refusal_because_of_a_pause_is_found_where_there_is_none() {
    let refusal = |at| refused(PAUSED, 0, at - 3 * S, at, 503);
    // Nothing came before it that was sent later.
    let alone = |run: &mut Run, at: At| {
        run.requests.retain(|r| r.key != PAUSED || r.later || r.stays[0].from < at - 3 * S);
        run.requests.push(request(PAUSED, 0, 9400 * MS, 9500 * MS, 9520 * MS));
        run.requests.push(refusal(at));
    };
    excused(|run| alone(run, 5600 * MS));
    // The process that was told pauses itself without any record.
    excused(|run| {
        alone(run, 5600 * MS);
        run.pauses.clear();
    });
    let report = {
        let mut run = granting();
        alone(&mut run, 9 * S);
        check(&run)
    };
    assert!(rules(&report).contains(&"status"), "{report}");
}

#[test]
fn a_429_of_the_upstream_is_none_of_the_gateway() {
    found("status", |run| first(run, PAUSED, 3 * S).head.as_mut().unwrap().1 = 429);
}

#[test]
fn a_key_that_is_not_served_after_the_last_fault_is_found() {
    let plant = |run: &mut Run, at| {
        run.faults.push(fault(What::ScriptFlush, None, at, at));
        run.requests.retain(|r| r.key != PAUSED || r.sent < 8 * S);
    };
    found("progress", |run| plant(run, 8 * S));
    excused(|run| plant(run, 7 * S));
}

#[test]
fn starts_that_are_kept_for_too_long_are_found() {
    found("rest", |run| run.forgotten = None);
    found("rest", |run| run.forgotten = run.forgotten.map(|at| at + 6 * S));
    excused(|run| run.forgotten = run.forgotten.map(|at| at + 4 * S));
}

#[test]
fn an_adaptive_limit_out_of_its_range_or_lowered_for_nothing_is_found() {
    let adapt = |run: &mut Run, limit, more: usize| {
        run.rules.adaptive = Some(PAUSED);
        let refusals = run.requests.iter().filter(|r| r.key == PAUSED && r.later).count();
        for at in (1..).take(refusals + more).map(|n| n * S) {
            run.numbers.push(Number { limit, lowered: at, changed: at });
            run.numbers.push(Number { limit, lowered: at, changed: at + S / 2 });
        }
    };
    found("adaptive", |run| adapt(run, 0, 0));
    found("adaptive", |run| adapt(run, 1000, 0));
    found("adaptive", |run| adapt(run, 1, 1));
    excused(|run| adapt(run, 1, 0));
}
