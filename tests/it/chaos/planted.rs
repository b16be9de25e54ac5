//! Tests of the checker with known histories: a clean one passes, and each planted fault is found.

mod budget;
mod grants;

use super::checker::{Report, check};
use super::history::{At, End, Fair, Fault, Kind, Life, Request, Rules, Run, Stay, What};
use super::plan::Shape;

const MS: At = 1000;
const S: At = 1000 * MS;

/// Two keys, with one permit and with two; three gateways; ten seconds without faults: each key always has one more
/// request than permits.
fn clean() -> Run {
    let mut run = Run {
        rules: Rules {
            limits: vec![1, 2],
            rates: vec![None, None],
            budgets: vec![None, None],
            max_pause: S,
            wait: 3 * S,
            lease: S,
            shape: Shape::One,
            fair: Fair::Arrival,
            reuse: 0,
            adaptive: None,
            also: None,
        },
        gateways: vec![Life::default(); 3],
        ..Run::default()
    };
    for (key, limit) in [(0, 1), (1, 2)] {
        // Every 200 ms as many as allowed, each for 190 ms.
        for i in 0..50 {
            for n in 0..limit {
                let came = (i * 200 + 200 + n) * MS;
                let request = request(key, (i + n) % 3, came - 200 * MS, came, came + 190 * MS);
                run.requests.push(request);
            }
        }
    }
    let last =
        run.requests.iter().filter_map(|request| request.end.as_ref()).map(|end| end.0).max();
    run.empty = last.map(|last| last + 50 * MS);
    run.forgotten = run.empty;
    run
}

fn request(key: usize, gateway: At, sent: At, from: At, to: At) -> Request {
    Request {
        key,
        tenant: 0,
        model: None,
        gateway: usize::try_from(gateway).unwrap(),
        kind: Kind::Short,
        work: to - from,
        stream: 0,
        later: false,
        estimate: 0,
        used: 0,
        sent,
        stays: vec![Stay { from, to: Some(to), whole: true }],
        head: Some((to + MS, 200)),
        last_frame: Some(to + MS),
        end: Some((to + 2 * MS, End::Whole)),
    }
}

/// One that was not served.
fn refused(key: usize, gateway: At, sent: At, at: At, status: u16) -> Request {
    let end = Some((at + MS, End::Whole));
    let head = Some((at, status));
    Request { stays: Vec::new(), head, end, ..request(key, gateway, sent, at, at) }
}

fn fault(what: What, gateway: Option<usize>, begin: At, end: At) -> Fault {
    Fault { what, gateway, keys: Vec::new(), heir: None, begin, end }
}

/// Returns the first request of a key to arrive after a time.
fn first(run: &mut Run, key: usize, after: At) -> &mut Request {
    let comes = |request: &Request| request.key == key && request.stays[0].from >= after;
    run.requests.iter_mut().find(|request| comes(request)).unwrap()
}

fn rules(report: &Report) -> Vec<&'static str> {
    let mut rules: Vec<_> = report.violations.iter().map(|violation| violation.rule).collect();
    rules.dedup();
    rules
}

/// Plants a fault into a clean history. The checker must find it, and nothing else.
#[track_caller]
fn found_in(mut run: Run, rule: &str, plant: impl FnOnce(&mut Run)) {
    plant(&mut run);
    let report = check(&run);
    assert_eq!(rules(&report), [rule], "{report}");
}

/// What is excused does not fail the run.
#[track_caller]
fn excused_in(mut run: Run, happens: impl FnOnce(&mut Run)) {
    happens(&mut run);
    let report = check(&run);
    assert!(report.violations.is_empty(), "{report}");
}

#[track_caller]
fn found(rule: &str, plant: impl FnOnce(&mut Run)) {
    found_in(clean(), rule, plant);
}

#[track_caller]
fn excused(happens: impl FnOnce(&mut Run)) {
    excused_in(clean(), happens);
}

#[test]
fn a_clean_history_passes() {
    let report = check(&clean());
    assert!(report.violations.is_empty(), "{report}");
    assert_eq!((report.requests, report.granted, report.compared), (150, 150, 150));
    assert_eq!(report.peaks, [1, 2]);
    assert!(report.over_ms.abs() < 0.001);
}

// ===== cap =====

/// One more than allowed, at a time.
fn one_too_many(run: &mut Run, gateway: At, at: At) {
    run.requests.push(request(1, gateway, at - 20 * MS, at, at + 30 * MS));
}

#[test]
fn one_request_over_the_cap_is_found() {
    found("cap", |run| one_too_many(run, 1, 5050 * MS));
}

#[test]
fn a_stay_that_does_not_end_is_found_over_the_cap() {
    found("cap", |run| {
        let request = first(run, 1, 5 * S);
        request.stays[0].to = Some(5500 * MS);
        request.work = 500 * MS;
        request.head = Some((5501 * MS, 200));
        request.end = Some((5502 * MS, End::Whole));
    });
}

#[test]
fn who_comes_late_after_a_loss_is_found_over_the_cap() {
    let loss = |run: &mut Run| run.faults.push(fault(What::FlushAll, None, 3 * S, 3 * S));
    excused(|run| {
        loss(run);
        one_too_many(run, 1, 3050 * MS);
        one_too_many(run, 1, 4050 * MS);
    });
    found("cap", |run| {
        loss(run);
        one_too_many(run, 1, 4450 * MS);
    });
}

#[test]
fn more_than_twice_the_limit_is_found_even_after_a_loss() {
    let plant = |run: &mut Run, more| {
        run.faults.push(fault(What::RestartRedis, None, 3 * S, 3200 * MS));
        (0..more).for_each(|i| one_too_many(run, 1, (3450 + i) * MS));
    };
    excused(|run| plant(run, 2));
    found("cap", |run| plant(run, 3));
}

/// A stay from before a freeze, which goes on until after it, with two more admitted beside it.
fn frozen_beside(run: &mut Run, from: At, to: At) {
    run.faults.push(fault(What::FreezeGateway, Some(2), 4 * S, 6 * S));
    let request = Request {
        kind: Kind::Stream,
        stream: 3 * S,
        last_frame: Some(3990 * MS),
        end: Some((to + MS, End::Cut)),
        head: Some((from + MS, 200)),
        ..request(1, 2, from - 10 * MS, from, to)
    };
    run.requests.push(request);
    let stays = run.requests.iter_mut().rev();
    for request in stays.filter(|r| r.key == 1 && r.gateway == 2 && r.kind == Kind::Short) {
        // It serves no request meanwhile.
        if (3600 * MS..6100 * MS).contains(&request.stays[0].from) {
            request.gateway = 1;
        }
    }
    // Room for it until it is frozen.
    run.requests.retain(|request| {
        let came = request.stays[0].from;
        request.key == 0
            || request.kind == Kind::Stream
            || !(from - 200 * MS..4100 * MS).contains(&came)
    });
}

#[test]
fn a_frozen_holder_does_not_count_but_one_that_is_awake_does() {
    let frozen = |run: &mut Run| {
        frozen_beside(run, 3500 * MS, 6050 * MS);
        run.requests.iter_mut().filter(|r| r.kind == Kind::Stream).for_each(|r| {
            r.stays[0].whole = false;
        });
        // Another gateway has what it had in key 0.
        run.requests.iter_mut().filter(|r| r.key == 0).for_each(|r| r.gateway = 0);
    };
    excused(frozen);
    found("cap", |run| {
        frozen(run);
        run.faults[0].end = 4900 * MS;
    });
}

#[test]
fn who_left_does_not_count_but_one_that_stayed_does() {
    let plant = |run: &mut Run, left, to, end| {
        let leaving = first(run, 1, 5 * S);
        leaving.stays[0] = Stay { from: 5 * S, to: Some(to), whole: end == End::Whole };
        leaving.head = Some((left, 200));
        leaving.end = Some((left, end));
        run.requests.push(request(1, 0, 5030 * MS, 5040 * MS, 5100 * MS));
    };
    excused(|run| plant(run, 5030 * MS, 5120 * MS, End::Left));
    found("cap", |run| plant(run, 5060 * MS, 5120 * MS, End::Left));
    found("cap", |run| plant(run, 5192 * MS, 5190 * MS, End::Whole));
    // It was cut off, so its permit may have been gone for a moment, but not for this long.
    let cut = |run: &mut Run, to| {
        plant(run, to + MS, to, End::Cut);
        run.faults.push(fault(What::Stall, None, 4 * S, 5 * S));
    };
    excused(|run| cut(run, 5190 * MS));
    found("cap", |run| {
        cut(run, 5400 * MS);
        // One at a time beside it, except for the planted one.
        run.requests.retain(|r| r.key == 0 || !(5150 * MS..5400 * MS).contains(&r.stays[0].from));
    });
}

// ===== order =====

/// Sends the request that arrives at 5 s with key 0 this much earlier, before those sent after it.
fn passed_over(run: &mut Run) -> &mut Request {
    let request = first(run, 0, 5 * S);
    let sent = request.sent - 450 * MS;
    request.sent = sent;
    request
}

#[test]
fn a_request_that_is_passed_over_is_found() {
    found("order", |run| {
        passed_over(run);
    });
    excused(|run| {
        let gateway = passed_over(run).gateway;
        run.faults.push(fault(What::Cut, Some(gateway), 4500 * MS, 4500 * MS));
    });
    excused(|run| {
        passed_over(run);
        run.faults.push(fault(What::KillPubsub, None, 4500 * MS, 4500 * MS));
    });
}

#[test]
fn where_permits_are_passed_on_a_request_is_passed_by_for_a_moment_and_no_longer() {
    // The next one is sent 200 ms after the first, and arrives before it.
    let plant = |run: &mut Run, later: At| {
        let sent = passed_over(run).sent;
        run.requests.iter_mut().filter(|r| r.key == 0).for_each(|r| {
            if r.sent > sent && r.stays[0].from < 5 * S {
                r.sent = sent + later;
            }
        });
    };
    found("order", |run| plant(run, 130 * MS));
    excused(|run| {
        run.rules.reuse = 2;
        plant(run, 130 * MS);
    });
    found("order", |run| {
        run.rules.reuse = 2;
        plant(run, 170 * MS);
    });
}

#[test]
fn a_request_may_be_passed_over_while_a_pause_becomes_known() {
    // The one that passes it by arrives at 4.8 s.
    let plant = |run: &mut Run, asked: At| {
        passed_over(run);
        let asks = first(run, 0, asked);
        let came = asks.stays[0].from;
        asks.later = true;
        asks.head = Some((came + 191 * MS, 429));
    };
    excused(|run| plant(run, 4600 * MS));
    found("order", |run| plant(run, 4200 * MS));
}

#[test]
fn what_befalls_others_excuses_nobody_who_is_passed_over() {
    found("order", |run| {
        let gateway = passed_over(run).gateway;
        let other = (gateway + 1) % 3;
        run.faults.push(fault(What::Cut, Some(other), 4500 * MS, 4500 * MS));
        run.faults.push(fault(What::ScriptFlush, None, 4500 * MS, 4500 * MS));
    });
}

#[test]
fn a_request_that_waits_in_vain_while_later_ones_come_is_found() {
    found("order", |run| run.requests.push(refused(1, 0, 4 * S, 7 * S, 429)));
}

// ===== idle =====

#[test]
fn a_request_that_waits_beside_a_free_permit_is_found() {
    let plant = |run: &mut Run| {
        run.requests.retain(|r| r.key == 0 || !(4 * S..7 * S).contains(&r.stays[0].from));
        run.requests.push(refused(1, 0, 4 * S, 7 * S, 429));
    };
    found("idle", plant);
    excused(|run| {
        plant(run);
        run.faults.push(fault(What::StallCut, Some(0), 5 * S, 5 * S));
    });
}

// ===== answers =====

#[test]
fn a_head_that_comes_too_late_is_found() {
    found("answer", |run| run.requests.push(refused(0, 0, 4 * S, 8600 * MS, 200)));
}

#[test]
fn redis_is_no_excuse_for_no_answer_but_a_freeze_is() {
    let late = refused(0, 0, 4 * S, 8600 * MS, 503);
    found("answer", |run| {
        run.requests.push(late.clone());
        run.faults.push(fault(What::FreezeRedis, None, 5 * S, 8 * S));
    });
    excused(|run| {
        run.requests.push(late.clone());
        run.faults.push(fault(What::FreezeGateway, Some(0), 8 * S, 8400 * MS));
    });
}

#[test]
fn a_client_that_gave_up_is_found() {
    found("answer", |run| {
        let head = None;
        let end = Some((8 * S, End::Unanswered));
        run.requests.push(Request { head, end, ..refused(0, 0, 3 * S, 8 * S, 0) });
    });
}

#[test]
fn a_body_that_does_not_end_is_found() {
    found("answer", |run| first(run, 0, 5 * S).end = Some((8 * S, End::Whole)));
}

#[test]
fn a_client_that_never_ended_is_found() {
    found("answer", |run| first(run, 0, 5 * S).end = None);
}

#[test]
fn a_bad_gateway_is_found() {
    found("status", |run| first(run, 0, 5 * S).head.as_mut().unwrap().1 = 502);
}

#[test]
fn a_503_without_a_reason_is_found() {
    let plant = |run: &mut Run| run.requests.push(refused(0, 0, 5 * S, 6 * S, 503));
    found("status", plant);
    excused(|run| {
        plant(run);
        run.faults.push(fault(What::Stall, Some(0), 3900 * MS, 4 * S));
    });
}

#[test]
fn a_refusal_before_the_wait_is_over_is_found() {
    found("status", |run| {
        // None arrives meanwhile, so it is not passed over.
        run.requests.push(refused(0, 0, 5 * S, 5100 * MS, 429));
    });
}

#[test]
fn a_connection_that_breaks_is_found_unless_its_gateway_was_killed() {
    let plant = |run: &mut Run| {
        let request = first(run, 0, 9 * S);
        request.head = None;
        request.end.as_mut().unwrap().1 = End::Broken;
        request.gateway
    };
    found("status", |run| {
        plant(run);
    });
    excused(|run| {
        let gateway = plant(run);
        run.gateways[gateway].died = Some(9100 * MS);
    });
}

#[test]
fn a_connection_that_breaks_is_found_unless_its_gateway_slept_past_its_lease() {
    let plant = |run: &mut Run, slept: At| {
        run.gateways.push(Life { died: Some(8 * S), ..Life::default() });
        let request = first(run, 0, 6 * S);
        request.gateway = 3;
        let asleep = request.stays[0].to.unwrap();
        let awake = asleep + slept;
        request.head = None;
        request.end = Some((awake + 3 * MS, End::Broken));
        run.faults.push(fault(What::FreezeGateway, Some(3), asleep, awake));
    };
    found("status", |run| plant(run, 500 * MS));
    excused(|run| plant(run, 1500 * MS));
}

#[test]
fn a_cut_body_is_found_unless_there_was_a_reason() {
    let plant = |run: &mut Run| first(run, 0, 5 * S).end.as_mut().unwrap().1 = End::Cut;
    found("status", plant);
    excused(|run| {
        plant(run);
        run.faults.push(fault(What::FreezeRedis, None, 4 * S, 5 * S));
    });
}

#[test]
fn a_body_that_ends_too_early_without_an_error_is_found() {
    found("status", |run| {
        first(run, 0, 5 * S).end.as_mut().unwrap().1 = End::Short;
        run.faults.push(fault(What::FreezeRedis, None, 4 * S, 5 * S));
    });
}

#[test]
fn a_request_that_comes_twice_is_found() {
    found("status", |run| {
        let request = first(run, 0, 5 * S);
        let from = request.stays[0].to.unwrap() + MS;
        request.stays.push(Stay { from, to: Some(from + MS), whole: true });
    });
}

// ===== waking =====

#[test]
fn a_frozen_gateway_that_goes_on_after_waking_is_found() {
    let plant = |run: &mut Run, to: At, last_frame: At| {
        frozen_beside(run, 3500 * MS, to);
        run.requests.iter_mut().filter(|r| r.kind == Kind::Stream).for_each(|r| {
            r.stays[0].whole = false;
            r.last_frame = Some(last_frame);
        });
        run.requests.iter_mut().filter(|r| r.key == 0).for_each(|r| r.gateway = 0);
        // Nothing else of the key is there then, so that only this is wrong.
        let others = |r: &Request| r.key == 1 && r.kind == Kind::Short;
        run.requests.retain(|r| !(others(r) && (5900 * MS..6900 * MS).contains(&r.stays[0].from)));
    };
    excused(|run| plant(run, 6050 * MS, 3990 * MS));
    found("wake", |run| plant(run, 6050 * MS, 6010 * MS));
    found("wake", |run| plant(run, 6500 * MS, 3990 * MS));
}

// ===== recovery and rest =====

#[test]
fn a_gateway_that_does_not_recover_is_found() {
    let plant = |run: &mut Run| {
        run.faults.push(fault(What::Cut, Some(0), 2 * S, 2 * S));
        run.requests.retain(|r| r.gateway != 0 || r.stays[0].from < S || r.sent > 9 * S);
    };
    found("recovery", plant);
    // Another fault affected it all the time.
    excused(|run| {
        plant(run);
        run.faults.push(fault(What::Stall, Some(0), 2500 * MS, 7 * S));
    });
}

#[test]
fn a_key_that_is_left_is_found() {
    found("rest", |run| run.empty = None);
    found("rest", |run| run.empty = run.empty.map(|at| at + 2 * S));
}

#[test]
fn a_request_that_is_left_at_the_upstream_is_found() {
    found("rest", |run| run.in_flight_left = 1);
}

// ===== several servers =====

fn fault_of_keys(what: What, keys: &[usize], begin: At, end: At) -> Fault {
    Fault { keys: keys.to_vec(), ..fault(what, None, begin, end) }
}

/// A refusal of key 1 while Redis is unreachable for these keys.
fn refused_meanwhile(run: &mut Run, what: What, keys: &[usize]) {
    run.rules.shape = Shape::Cluster;
    run.faults.push(fault_of_keys(what, keys, 5 * S, 5500 * MS));
    run.requests.push(refused(1, 1, 5100 * MS, 5110 * MS, 503));
}

#[test]
fn a_refusal_while_the_master_of_other_keys_is_away_is_found() {
    found("status", |run| refused_meanwhile(run, What::KillMaster, &[0]));
    excused(|run| refused_meanwhile(run, What::KillMaster, &[1]));
    excused(|run| refused_meanwhile(run, What::KillMaster, &[]));
}

#[test]
fn a_refusal_while_a_slot_moves_is_found() {
    found("status", |run| refused_meanwhile(run, What::MoveSlot, &[1]));
}

/// One too many for key 1 just after these keys got a new master.
fn too_many_after(run: &mut Run, what: What, keys: &[usize]) {
    run.rules.shape = Shape::Cluster;
    run.faults.push(fault_of_keys(what, keys, 5 * S, 5010 * MS));
    one_too_many(run, 1, 5050 * MS);
}

#[test]
fn one_too_many_is_let_pass_only_where_writes_were_lost() {
    excused(|run| too_many_after(run, What::KillMaster, &[1]));
    excused(|run| too_many_after(run, What::Failover, &[1]));
    excused(|run| too_many_after(run, What::FreezeRedis, &[1]));
    found("cap", |run| too_many_after(run, What::KillMaster, &[0]));
    found("cap", |run| too_many_after(run, What::Handover, &[1]));
    found("cap", |run| too_many_after(run, What::MoveSlot, &[1]));
}

#[test]
fn a_gateway_that_slept_through_a_failover_may_ask_the_old_master_once_more() {
    let sleeps = |run: &mut Run, what, until| {
        run.rules.shape = Shape::Sentinel;
        run.faults.push(fault_of_keys(what, &[], 3 * S, 3100 * MS));
        run.faults.push(fault(What::FreezeGateway, Some(3), 3050 * MS, until));
        run.gateways.push(Life::default());
        one_too_many(run, 3, 5050 * MS);
    };
    excused(|run| sleeps(run, What::Failover, 5 * S));
    found("cap", |run| sleeps(run, What::Failover, 4500 * MS));
    found("cap", |run| sleeps(run, What::KillMaster, 5 * S));
}

#[test]
fn a_gateway_that_serves_only_other_keys_after_a_failover_is_found() {
    found("recovery", |run| {
        run.rules.shape = Shape::Cluster;
        run.faults.push(fault_of_keys(What::KillMaster, &[0], 5 * S, 5010 * MS));
        for request in &mut run.requests {
            if request.key == 0 && request.sent > 4900 * MS && request.gateway == 1 {
                request.gateway = 2;
            }
        }
    });
}

#[test]
fn a_model_over_its_cap_is_found() {
    let mut run = clean();
    run.rules.also = Some(1);
    for (number, request) in run.requests.iter_mut().enumerate() {
        request.model = [Some(0), Some(1), None][number % 3];
    }
    assert_eq!(rules(&check(&run)), [""; 0]);
    let first = first(&mut run, 1, 4 * S).stays[0].from;
    // The other permit of the key at that time is of the same model.
    let together = run.requests.iter_mut().filter(|request| {
        request.key == 1 && request.stays.iter().any(|stay| stay.from.abs_diff(first) < 10 * MS)
    });
    assert_eq!(together.map(|request| request.model = Some(1)).count(), 2);
    assert_eq!(rules(&check(&run)), ["cap"]);
    run.rules.also = Some(2);
    assert_eq!(rules(&check(&run)), [""; 0], "two are allowed");
}

#[test]
fn the_order_is_that_within_a_model() {
    let mut run = clean();
    run.rules.also = Some(1);
    let late = request(0, 0, 3 * S, 5 * S + 195 * MS, 5 * S + 199 * MS);
    run.requests.push(Request { model: Some(1), ..late });
    assert_eq!(rules(&check(&run)), [""; 0], "another model");
    run.requests.last_mut().unwrap().model = None;
    assert_eq!(rules(&check(&run)), ["order"]);
}

#[test]
fn a_full_model_may_wait_beside_a_free_permit() {
    for (tenant, other) in [(0, 1), (1, 1)] {
        let mut run = clean();
        run.rules.also = Some(1);
        if tenant == 1 {
            run.rules.fair = Fair::Each(2);
        }
        run.requests.retain(|request| request.key == 0);
        let long = request(1, 0, 0, 200 * MS, 4 * S);
        run.requests.push(Request { work: 4 * S, model: Some(0), ..long });
        let waits = request(1, 1, S, 4 * S + 10 * MS, 4 * S + 20 * MS);
        run.requests.push(Request { model: Some(0), tenant, ..waits });
        assert_eq!(rules(&check(&run)), [""; 0]);
        // A request of another model, or without one, would have to be served.
        for model in [Some(other), None] {
            run.requests.last_mut().unwrap().model = model;
            assert_eq!(rules(&check(&run)), ["idle"], "{model:?}");
        }
    }
}

/// The clean history, with three tenants, each of which has this cap.
fn of_tenants(each: usize) -> Run {
    let mut run = clean();
    run.rules.fair = Fair::Each(each);
    for (number, request) in run.requests.iter_mut().enumerate() {
        request.tenant = number % 3;
    }
    run
}

#[test]
fn a_tenant_over_its_cap_is_found() {
    let run = of_tenants(1);
    assert_eq!(rules(&check(&run)), [""; 0]);
    let mut run = run;
    let at = 4 * S;
    let first = first(&mut run, 1, at).stays[0].from;
    // The other permit of the key at that time goes to the same tenant.
    let together = run.requests.iter_mut().filter(|request| {
        request.key == 1 && request.stays.iter().any(|stay| stay.from.abs_diff(first) < 10 * MS)
    });
    let mut count = 0;
    for request in together {
        request.tenant = 2;
        count += 1;
    }
    assert_eq!(count, 2);
    let report = check(&run);
    assert_eq!(rules(&report), ["cap"], "{report}");
    run.rules.fair = Fair::Each(2);
    assert_eq!(rules(&check(&run)), [""; 0], "two are allowed");
}

#[test]
fn the_order_is_that_within_a_tenant() {
    let mut run = clean();
    run.rules.fair = Fair::Shares;
    // One waits for long, while others of its key are served that came later.
    let late = request(0, 0, 3 * S, 5 * S + 195 * MS, 5 * S + 199 * MS);
    run.requests.push(Request { tenant: 1, ..late });
    assert_eq!(rules(&check(&run)), [""; 0], "another tenant");
    run.requests.last_mut().unwrap().tenant = 0;
    assert_eq!(rules(&check(&run)), ["order"]);
}

#[test]
fn a_tenant_at_its_cap_may_wait_beside_a_free_permit() {
    let mut run = clean();
    run.rules.fair = Fair::Each(1);
    // The second permit of the key is free all the time, and a tenant waits behind itself.
    run.requests.retain(|request| request.key == 0);
    let long = request(1, 0, 0, 200 * MS, 4 * S);
    run.requests.push(Request { work: 4 * S, ..long });
    let waits = request(1, 1, S, 4 * S + 10 * MS, 4 * S + 20 * MS);
    run.requests.push(waits);
    assert_eq!(rules(&check(&run)), [""; 0]);
    // A request of another tenant would have to be served.
    run.requests.last_mut().unwrap().tenant = 1;
    assert_eq!(rules(&check(&run)), ["idle"]);
}
