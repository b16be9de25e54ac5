//! In an outage the process's own share has a part of the rate.

use super::rates::{rated, waiting};
use super::*;
use crate::bound_rate::BoundRate;

const DAY: u64 = 24 * 3600 * 1000;

fn shared(share: u32, starts: u32, window_ms: u64) -> AcquireOptions {
    AcquireOptions { on_unavailable: OnUnavailable::Local(share), ..rated(starts, window_ms) }
}

#[test]
fn a_share_that_is_less_than_a_start_has_one_in_a_longer_time() {
    // Of 10 starts a second, a twentieth: one in two seconds.
    let mut rig = outage(20);
    let options = AcquireOptions { on_unavailable: OnUnavailable::Local(1), ..rated(1, 100) };
    let mut admitted = 0;
    for _ in 0..100 {
        let index = rig.request_with(AcquireOptions { max_queue: None, ..options });
        admitted += u32::from(rig.progress(index) == Progress::Admitted);
        rig.leave(index);
        rig.pass(100);
    }
    assert_eq!(admitted, 5, "in ten seconds");
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
