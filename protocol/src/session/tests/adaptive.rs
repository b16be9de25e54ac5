//! A limit that finds itself.

use super::*;
use crate::adaptive::{Adapted, Adaptive, SentUnder};

const RANGE: Adaptive = Adaptive::between(1, 4);
const KEPT_MS: u64 = 600_000;

/// A session of a policy that allows four permits, with a number that has just changed.
fn adapted(limit: u32) -> Rig {
    let mut rig = Rig::new(4);
    rig.session.handle_adaptive(Some(RANGE), Time::ZERO);
    learn(&mut rig, limit);
    rig
}

fn learn(rig: &mut Rig, limit: u32) {
    let changed = (EPOCH_MS + rig.now_ms) * 1000;
    let adapted = Adapted { limit, lowered: changed, changed };
    let (since, ends) = (rig.now(), rig.now() + Adapted::KEPT);
    let now = rig.now();
    rig.session.handle_adapted(Some(AdaptedHere { adapted, since, ends, spread: 0 }), now);
}

/// Lets time pass, with all calls answered, until growth is to be asked for. Returns when.
fn growth_within(rig: &mut Rig, duration_ms: u64) -> Option<u64> {
    let end = rig.now_ms + duration_ms;
    while rig.now_ms < end {
        rig.live(10);
        if rig.session.poll_growth().is_some() {
            return Some(rig.now_ms);
        }
    }
    None
}

#[test]
fn it_is_the_limit_of_all_calls_and_of_what_is_told() {
    let mut rig = adapted(2);
    let all: Vec<_> = (0..3).map(|_| rig.request()).collect();
    rig.settle();
    assert_eq!(rig.session.limit_in_force(), 2);
    let held = all.iter().filter(|index| rig.progress(**index) == Progress::Held).count();
    assert_eq!(held, 2);
    let now = rig.now();
    rig.session.handle_wait_timeout(all[2], now);
    let told = match rig.progress(all[2]) {
        Progress::Refused { limit, .. } => limit,
        other => panic!("{other:?}"),
    };
    assert_eq!(told, Some(2));
}

#[test]
fn a_policy_without_a_range_has_its_own_limit() {
    let mut rig = adapted(2);
    rig.session.handle_adaptive(None, Time::ZERO);
    rig.request();
    rig.settle();
    assert_eq!((rig.session.limit_in_force(), rig.session.adapted_limit()), (4, None));
}

#[test]
fn it_stays_within_the_range_of_this_process() {
    let mut rig = adapted(0);
    rig.request();
    assert_eq!(rig.session.limit_in_force(), 1);
    learn(&mut rig, 9);
    assert_eq!(rig.session.limit_in_force(), 4);
}

#[test]
fn waiters_have_the_permits_of_growth_at_once() {
    let mut rig = adapted(1);
    let (_, second) = (rig.request(), rig.request());
    rig.settle();
    assert_eq!(rig.progress(second), Progress::Waiting);
    learn(&mut rig, 2);
    rig.settle();
    assert_eq!(rig.progress(second), Progress::Held);
}

#[test]
fn growth_is_asked_for_each_interval_while_requests_wait() {
    let mut rig = adapted(2);
    for _ in 0..2 {
        let index = rig.request();
        rig.settle();
        rig.progress(index);
    }
    assert_eq!(growth_within(&mut rig, 5000), None, "nobody waits");
    rig.request();
    rig.settle();
    // At the latest with the next renewal.
    let first = growth_within(&mut rig, 1100).expect("it is asked for");
    let again = growth_within(&mut rig, 1100).expect("the first request is lost");
    assert!(again - first >= 1000, "{first} {again}");
    learn(&mut rig, 3);
    let changed = rig.now_ms;
    rig.request();
    rig.settle();
    assert_eq!(growth_within(&mut rig, 1100), Some(changed + 1000));
    learn(&mut rig, 4);
    rig.request();
    assert_eq!(growth_within(&mut rig, 5000), None, "it is at its maximum");
}

#[test]
fn a_process_waits_for_its_part_beyond_the_interval() {
    let mut rig = adapted(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.request();
    rig.settle();
    let here = rig.session.adapting.known.expect("a number");
    let late = AdaptedHere { spread: 32_768, ..here };
    rig.session.handle_adapted(Some(late), Time::ZERO);
    assert_eq!(growth_within(&mut rig, 2000), Some(1040), "1031.25 ms, in steps of ten");
}

#[test]
fn what_keeps_requests_back_beside_the_limit_is_no_reason_to_grow() {
    let waits = |rig: &mut Rig| {
        let index = rig.request();
        rig.settle();
        rig.progress(index);
        rig.request();
        rig.settle();
    };
    // An operator's limit.
    let mut rig = adapted(2);
    let now = rig.now();
    rig.session.handle_override(Override::parse("1 open").expect("an override"), now);
    waits(&mut rig);
    assert_eq!(rig.session.limit_in_force(), 1);
    assert_eq!(growth_within(&mut rig, 3000), None);
    rig.session.handle_override(Override::default(), now);
    assert_eq!(rig.session.limit_in_force(), 2);

    // The same number, set by an operator.
    let mut rig = adapted(1);
    let now = rig.now();
    rig.session.handle_override(Override::parse("1 open").expect("an override"), now);
    waits(&mut rig);
    assert_eq!(growth_within(&mut rig, 3000), None);

    // A pause.
    let mut rig = adapted(1);
    let until = Some(rig.now() + ms(5000));
    rig.session.handle_pause(until, Time::ZERO);
    waits(&mut rig);
    assert_eq!(growth_within(&mut rig, 4000), None);

    // The cap of a tenant.
    let mut rig = adapted(3);
    let claim = Claim::new(Tenant::of_hash(1)).with_each(Some(1));
    let options = AcquireOptions { claim: Some(claim), ..OPTIONS };
    let index = rig.request_with(options);
    rig.settle();
    rig.progress(index);
    rig.request_with(options);
    rig.settle();
    assert_eq!(growth_within(&mut rig, 3000), None);
}

#[test]
fn it_ends_by_itself() {
    let mut rig = adapted(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.live(KEPT_MS - 20);
    assert_eq!(rig.session.limit_in_force(), 1);
    // With the next renewal, at the latest.
    rig.live(1020);
    assert_eq!(rig.session.limit_in_force(), 4);
}

#[test]
fn it_keeps_no_session_alive() {
    let mut rig = adapted(1);
    let (first, second) = (rig.request(), rig.request());
    rig.settle();
    let now = rig.now();
    rig.session.handle_leave(second, now);
    rig.session.handle_leave(first, now);
    rig.settle();
    rig.live(6000);
    assert!(rig.session.is_over(rig.now()));
}

#[test]
fn a_request_that_costs_more_than_the_minimum_is_refused_at_any_time() {
    let mut rig = Rig::new(4);
    rig.session.handle_adaptive(Some(RANGE), Time::ZERO);
    let claim = Claim::without_tenant().with_cost(2);
    let index = rig.request_with(AcquireOptions { claim: Some(claim), ..OPTIONS });
    assert!(is_refused(rig.progress(index), RejectReason::CostTooHigh));
}

#[test]
fn a_request_knows_what_it_is_sent_under() {
    let mut rig = Rig::new(4);
    rig.session.handle_adaptive(Some(RANGE), Time::ZERO);
    let unknown = SentUnder { version: 0, in_use: u32::MAX };
    assert_eq!(rig.session.sent_under(), unknown);
    rig.other();
    rig.request();
    rig.settle();
    assert_eq!(rig.session.sent_under(), SentUnder { version: 0, in_use: 2 });
    learn(&mut rig, 3);
    let changed = (EPOCH_MS + rig.now_ms) * 1000;
    assert_eq!(rig.session.sent_under(), SentUnder { version: changed, in_use: 2 });
    learn(&mut rig, 1);
    assert_eq!(rig.session.sent_under().version, 0, "both were granted before the decrease");
}

/// What was in use before a pause, or under an operator's limit, says nothing of what a hint says was granted: a decrease
/// that began there would go to the minimum at once.
#[test]
fn a_grant_that_another_process_made_is_not_alone() {
    for is_known in [false, true] {
        let mut rig = Rig::new(4);
        rig.session.handle_adaptive(Some(RANGE), Time::ZERO);
        if is_known {
            learn(&mut rig, 4);
        }
        let now = rig.now();
        rig.session.handle_pause(Some(now + ms(1500)), now);
        let index = rig.request();
        rig.settle();
        rig.live(1200);
        assert_eq!(rig.session.sent_under().in_use, 0, "by the last renewal");
        // Another process ends the pause first, and grants all that wait.
        rig.pass(400);
        let gone = PlaceId { node: OTHER, poll_only: false, n: 9, bound: None, claim: None };
        let hints = rig.other_leaves(gone);
        rig.hint(hints[0]);
        assert_eq!(rig.progress(index), Progress::Held);
        assert_eq!(rig.session.sent_under().in_use, u32::MAX);
    }
}
