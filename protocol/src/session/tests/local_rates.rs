//! In an outage the process's own share has a part of the rate.

use super::rates::{rated, waiting};
use super::*;
use crate::bound_rate::BoundRate;
use crate::rate::Rate;

const DAY: u64 = 24 * 3600 * 1000;

fn shared(share: u32, starts: u32, window_ms: u64) -> AcquireOptions {
    AcquireOptions { on_unavailable: OnUnavailable::Local(share), ..rated(starts, window_ms) }
}

fn smooth(options: AcquireOptions) -> AcquireOptions {
    AcquireOptions { rate: options.rate.map(Rate::spread), ..options }
}

/// How many of the requests that come each `step_ms`, one after the other, pass in an outage.
fn admitted_in_turn(rig: &mut Rig, options: AcquireOptions, count: usize, step_ms: u64) -> u32 {
    let mut admitted = 0;
    for _ in 0..count {
        let index = rig.request_with(AcquireOptions { max_queue: None, ..options });
        admitted += u32::from(rig.progress(index) == Progress::Admitted);
        rig.leave(index);
        rig.pass(step_ms);
    }
    admitted
}

fn refusal(progress: Progress) -> (RejectReason, Option<Duration>) {
    let Progress::Refused { reason, ends_in, .. } = progress else { panic!("{progress:?}") };
    (reason, ends_in)
}

#[test]
fn a_share_that_is_less_than_a_start_has_one_in_a_longer_time() {
    // Of 10 starts a second, a twentieth: one in two seconds.
    let mut rig = outage(20);
    let options = AcquireOptions { on_unavailable: OnUnavailable::Local(1), ..rated(1, 100) };
    assert_eq!(admitted_in_turn(&mut rig, options, 100, 100), 5, "in ten seconds");
}

#[test]
fn the_starts_of_a_share_count_over_several_outages_and_for_calls_that_fail() {
    let mut rig = Rig::new(20);
    let options = AcquireOptions {
        on_unavailable: OnUnavailable::Local(1),
        max_queue: None,
        ..rated(40, 60_000)
    };
    let mut admitted = 0;
    for round in 0..10 {
        let now = rig.now();
        if round % 2 == 0 {
            rig.session.handle_unreachable(now);
        } else {
            rig.session.handle_connected(same_data(), now);
        }
        let index = rig.request_with(options);
        if round % 2 == 1 {
            let call = rig.call().expect("an acquire");
            rig.session.handle_call_refused(&call.op, now);
        }
        admitted += u32::from(rig.progress(index) == Progress::Admitted);
        rig.leave(index);
        rig.calls();
        rig.pass(100);
    }
    assert_eq!(admitted, 2, "a twentieth of the rate");
}

#[test]
fn what_a_share_started_counts_once_the_backend_is_back() {
    let mut rig = outage(4);
    let options = AcquireOptions { on_unavailable: OnUnavailable::Local(4), ..rated(4, 60_000) };
    let admitted: Vec<_> = (0..4).map(|_| rig.request_with(options)).collect();
    assert!(admitted.iter().all(|index| rig.progress(*index) == Progress::Admitted));
    rig.reconnect(Connected::default());
    rig.live(2000);
    admitted.into_iter().for_each(|index| rig.leave(index));
    let next = rig.request_with(options);
    rig.live(1000);
    assert_eq!(rig.progress(next), Progress::Waiting);
}

#[test]
fn a_share_of_the_limit_has_the_same_part_of_the_rate() {
    let mut rig = outage(4);
    let options = AcquireOptions { on_unavailable: OnUnavailable::Local(2), ..rated(8, 1000) };
    let mut admitted = 0;
    for _ in 0..8 {
        let index = rig.request_with(options);
        admitted += u32::from(rig.progress(index) == Progress::Admitted);
        rig.leave(index);
    }
    assert_eq!(admitted, 4, "half of the limit, and half of the rate");
    let waits = rig.request_with(options);
    rig.pass(990);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.pass(20);
    assert_eq!(rig.progress(waits), Progress::Admitted);
}

/// As when an operator's rate of one a day is cleared in an outage.
#[test]
fn a_start_of_a_share_counts_for_the_window_of_the_place_that_asks() {
    let mut rig = outage(4);
    let first = rig.request_with(shared(4, 1, DAY));
    assert_eq!(rig.progress(first), Progress::Admitted);
    rig.leave(first);
    rig.pass(300);
    let next = rig.request_with(shared(4, 1, 1000));
    rig.pass(690);
    assert_eq!(rig.progress(next), Progress::Waiting);
    rig.pass(20);
    assert_eq!(rig.progress(next), Progress::Admitted);
    rig.leave(next);
    let day = rig.request_with(shared(4, 2, DAY));
    rig.pass(60_000);
    assert_eq!(rig.progress(day), Progress::Waiting, "both count for the day");
}

#[test]
fn a_share_remembers_no_more_starts_than_a_window_can_have() {
    let mut rig = outage(4);
    let first = rig.request_with(shared(4, 1, DAY));
    rig.leave(first);
    let mut known = 0;
    for _ in 0..2 * BoundRate::STARTS_MAX {
        let index = rig.request_with(shared(4, 4, 1));
        assert_eq!(rig.progress(index), Progress::Admitted);
        rig.leave(index);
        known = known.max(rig.session.own_starts.as_ref().map_or(0, |starts| starts.len()));
        rig.pass(1);
    }
    assert_eq!(known, BoundRate::STARTS_MAX as usize);
}

#[test]
fn what_the_backend_granted_lately_counts_against_the_part_of_a_share() {
    let mut rig = Rig::new(4);
    let of = || shared(2, 8, 1000);
    for _ in 0..3 {
        let index = rig.request_with(of());
        rig.settle();
        assert_eq!(rig.progress(index), Progress::Held);
        rig.leave(index);
        rig.settle();
    }
    rig.pass(500);
    rig.session.handle_unreachable(rig.now());
    let all = [(); 3].map(|()| rig.request_with(of()));
    assert_eq!(rig.progress(all[0]), Progress::Admitted, "the fourth of its part");
    rig.leave(all[0]);
    assert_eq!(waiting(&mut rig, &all[1..]), 2);
    rig.pass(490);
    assert_eq!(waiting(&mut rig, &all[1..]), 2);
    rig.pass(20);
    assert_eq!(waiting(&mut rig, &all[1..]), 0);
}

#[test]
fn what_a_share_started_counts_though_nothing_is_in_flight() {
    let mut rig = outage(4);
    let options = AcquireOptions {
        on_unavailable: OnUnavailable::Local(1),
        max_queue: None,
        ..rated(4, 60_000)
    };
    let index = rig.request_with(options);
    assert_eq!(rig.progress(index), Progress::Admitted);
    rig.leave(index);
    rig.pass(59_000);
    assert!(!rig.is_over(), "a new session would know of no starts");
    rig.pass(2_000);
    assert!(rig.is_over());
}

#[test]
fn without_a_limit_a_share_starts_as_many_as_it_has_permits_and_spreads_them_if_the_rate_is_smooth()
{
    // 600 a minute, for five minutes.
    let options = shared(10, 600, 60_000);
    for (options, at_once) in [(options, 10), (smooth(options), 1)] {
        let mut rig = outage(u32::MAX);
        assert_eq!(admitted_in_turn(&mut rig, options, 20, 0), at_once, "{:?}", options.rate);
        rig.pass(60_000);
        let admitted = admitted_in_turn(&mut rig, options, 3000, 100);
        assert!((49..=50).contains(&admitted), "{admitted} in five minutes: {:?}", options.rate);
    }
}

#[test]
fn a_share_of_a_smooth_rate_is_spread_over_the_window_whatever_a_request_costs() {
    // 1,000 a second, of which 150 are those of the share. Requests come at whole ms.
    let options = smooth(shared(15, 60_000, 60_000));
    let mut rig = outage(100);
    let admitted = admitted_in_turn(&mut rig, options, 2000, 1);
    assert!((280..=302).contains(&admitted), "{admitted} in two seconds");
    // One each 6 s, and nothing for 18 s after one that counts as three.
    let options = smooth(shared(10, 600, 60_000));
    let claim = Some(Claim::new(Tenant::of_hash(7)).with_cost(3));
    let mut rig = outage(u32::MAX);
    assert_eq!(admitted_in_turn(&mut rig, AcquireOptions { claim, ..options }, 1, 17_990), 1);
    assert_eq!(admitted_in_turn(&mut rig, options, 1, 20), 0);
    assert_eq!(admitted_in_turn(&mut rig, options, 1, 5_990), 1);
    assert_eq!(admitted_in_turn(&mut rig, options, 2, 20), 1);
}

#[test]
fn a_share_has_its_part_of_the_rate_that_an_operator_set() {
    let mut rig = Rig::new(u32::MAX);
    let set = Override { rate: Rate::parse("5/1000"), ..Override::default() };
    rig.session.handle_override(set, rig.now());
    rig.session.handle_unreachable(rig.now());
    let options = shared(10, 600, 60_000);
    assert_eq!(admitted_in_turn(&mut rig, options, 20, 0), 5);
    let waits = rig.request_with(options);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.session.handle_override(Override::default(), rig.now());
    assert_eq!(rig.progress(waits), Progress::Admitted, "the sixth of ten in a minute");
}

#[test]
fn a_request_that_the_part_of_a_rate_keeps_back_is_told_of_the_rate_and_when_the_next_can_start() {
    for limit in [2, u32::MAX] {
        let mut rig = outage(limit);
        let tries = |share| AcquireOptions { max_queue: None, ..shared(share, 2, 60_000) };
        let first = rig.request_with(tries(2));
        rig.pass(1_000);
        let second = rig.request_with(tries(2));
        // No permit is free.
        let third = rig.request_with(tries(2));
        assert_eq!(refusal(rig.progress(third)), (RejectReason::Limit, None));
        rig.leave(first);
        rig.pass(9_000);
        let third = rig.request_with(tries(2));
        assert_eq!(refusal(rig.progress(third)), (RejectReason::Rate, Some(ms(50_000))));
        // It is as late as the request is when it asks.
        rig.pass(1_000);
        assert_eq!(refusal(rig.progress(third)), (RejectReason::Rate, Some(ms(49_000))));
        rig.leave(second);
        let claim = Some(Claim::without_tenant().with_cost(2));
        let two = rig.request_with(AcquireOptions { claim, ..tries(2) });
        let both = (RejectReason::Rate, Some(ms(50_000)));
        assert_eq!(refusal(rig.progress(two)), both, "once both have left the window");
        rig.pass(49_000);
        let next = rig.request_with(tries(2));
        assert_eq!(rig.progress(next), Progress::Admitted);
    }
}

#[test]
fn a_request_that_was_on_its_way_when_its_call_failed_is_told_of_the_part_of_the_rate() {
    let options = AcquireOptions { max_queue: None, ..shared(1, 1, 60_000) };
    let mut rig = outage(1);
    let first = rig.request_with(options);
    assert_eq!(rig.progress(first), Progress::Admitted);
    rig.leave(first);
    rig.session.handle_connected(same_data(), rig.now());
    rig.pass(20_000);
    let second = rig.request_with(options);
    let call = rig.call().expect("an acquire");
    rig.session.handle_call_refused(&call.op, rig.now());
    assert_eq!(refusal(rig.progress(second)), (RejectReason::Rate, Some(ms(40_000))));
    let third = rig.request_with(options);
    rig.session.handle_unreachable(rig.now());
    assert_eq!(refusal(rig.progress(third)), (RejectReason::Rate, Some(ms(40_000))));
}

#[test]
fn a_request_that_waits_in_vain_for_the_part_of_a_rate_is_told_when_the_next_can_start() {
    let mut rig = outage(10);
    let options = AcquireOptions { max_queue: Some(1), ..shared(5, 2, 60_000) };
    let first = rig.request_with(options);
    let waits = rig.request_with(options);
    let full = rig.request_with(options);
    assert_eq!(refusal(rig.progress(full)), (RejectReason::QueueFull, Some(ms(60_000))));
    rig.pass(20_000);
    let now = rig.now();
    rig.session.handle_wait_timeout(waits, now);
    assert_eq!(refusal(rig.progress(waits)), (RejectReason::QueueTimeout, Some(ms(40_000))));
    rig.leave(first);
    // Where no permit is free either, nothing is known of the time.
    let mut rig = outage(10);
    let options = AcquireOptions { max_queue: Some(1), ..shared(1, 10, 60_000) };
    rig.request_with(options);
    let waits = rig.request_with(options);
    let now = rig.now();
    rig.session.handle_wait_timeout(waits, now);
    assert_eq!(refusal(rig.progress(waits)), (RejectReason::QueueTimeout, None));
}

#[test]
fn no_rate_is_blamed_while_nothing_is_granted() {
    let options = AcquireOptions { max_queue: None, ..shared(1, 1, 60_000) };
    let mut rig = outage(1);
    let first = rig.request_with(options);
    rig.leave(first);
    let until = rig.now() + ms(5_000);
    rig.session.handle_pause(Some(until), rig.now());
    let paused = rig.request_with(options);
    assert_eq!(refusal(rig.progress(paused)), (RejectReason::UpstreamPause, Some(ms(5_000))));
    rig.session.handle_override(Override::parse("0 open").expect("an override"), rig.now());
    let paused = rig.request_with(options);
    assert_eq!(refusal(rig.progress(paused)), (RejectReason::Limit, None));
}

#[test]
fn what_the_backend_granted_while_there_is_no_share_is_kept_for_its_window() {
    let mut rig = Rig::new(1000);
    let index = rig.request_with(shared(1, 1000, 10_000));
    let (call, sent) = (rig.call().expect("an acquire"), rig.now());
    let reply = rig.carry_out(&call);
    let until = rig.now() + ms(1_000);
    rig.session.handle_pause(Some(until), rig.now());
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(index), Progress::Held);
    rig.leave(index);
    rig.settle();
    rig.live(9_000);
    rig.session.handle_unreachable(rig.now());
    let next = rig.request_with(shared(1, 1000, 10_000));
    assert_eq!(rig.progress(next), Progress::Waiting, "one of its window has started");
    rig.pass(1_000);
    assert_eq!(rig.progress(next), Progress::Admitted);
    rig.leave(next);
    rig.reconnect(same_data());
    rig.live(11_000);
    assert!(rig.is_over());
}

#[test]
fn what_the_backend_granted_by_the_whole_rate_counts_as_long_as_the_part_needs_for_it() {
    let mut rig = Rig::new(u32::MAX);
    let options = smooth(shared(10, 600, 60_000));
    for cost in [3, 1] {
        let claim = Some(Claim::without_tenant().with_cost(cost));
        let index = rig.request_with(AcquireOptions { claim, ..options });
        rig.settle();
        assert_eq!(rig.progress(index), Progress::Held);
        rig.leave(index);
        rig.live(300);
    }
    rig.session.handle_unreachable(rig.now());
    let next = rig.request_with(AcquireOptions { max_queue: None, ..options });
    // By its part, one in 6 s, the first had taken 18 s, and the second is over before.
    assert_eq!(refusal(rig.progress(next)), (RejectReason::Rate, Some(ms(17_400))));
}

#[test]
fn a_share_above_the_limit_of_a_request_has_no_more_than_the_whole_rate() {
    let mut rig = outage(2);
    assert_eq!(admitted_in_turn(&mut rig, shared(10, 4, 60_000), 10, 0), 4);
}

#[test]
fn under_admit_no_rate_counts() {
    let mut rig = outage(2);
    let options = AcquireOptions { on_unavailable: OnUnavailable::Admit, ..rated(1, 60_000) };
    assert_eq!(admitted_in_turn(&mut rig, options, 10, 0), 10);
}
