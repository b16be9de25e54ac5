//! Leases are renewed, in time and as often as needed.

use super::*;
use crate::further::FurtherLimit;

#[test]
fn a_place_that_becomes_due_while_renewals_are_under_way_is_renewed_right_after_them() {
    let mut rig = Rig::new(2);
    let first = rig.request();
    rig.settle();
    rig.pass(600);
    let second = rig.request();
    rig.settle();
    assert_eq!(rig.progress(first), Progress::Held);
    assert_eq!(rig.progress(second), Progress::Held);
    // The first is due, and the answer takes its time.
    rig.pass(400);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    assert_eq!(renewal.op.places(), 1);
    let reply = rig.carry_out(&renewal);
    rig.pass(700);
    assert_eq!(rig.call(), None);
    rig.reply(&renewal.op, &reply, sent);
    // Meanwhile the second came to be due.
    let id = rig.id(second);
    let sent = rig.settle();
    assert!(sent.iter().any(|op| matches!(op, Op::Renew { ids, .. } if ids.contains(&id))));
}

#[test]
fn the_deadline_counts_from_when_the_renewal_was_sent() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = rig.carry_out(&call);
    rig.now_ms = 2000;
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(index), Progress::Held);
    rig.now_ms = 2998;
    assert!(!rig.session.is_lost(index, rig.now()));
    rig.now_ms = 2999;
    assert!(rig.session.is_lost(index, rig.now()));
    rig.pass(0);
    assert!(rig.session.is_known_lost(index));
    assert!(rig.session.take_events().contains(&Event::Lost(index)));
}

#[test]
fn an_answer_that_comes_after_the_deadline_is_asked_for_again() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = rig.carry_out(&call);
    rig.now_ms = 2999;
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(index), Progress::Waiting);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert!(!rig.session.is_lost(index, rig.now() + ms(2998)));
}

#[test]
fn a_permit_that_its_request_has_not_taken_by_its_deadline_waits_again() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.now_ms = 2999;
    assert_eq!(rig.progress(index), Progress::Waiting);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);

    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    // The watchdog comes first.
    rig.now_ms = 2999;
    rig.pass(0);
    assert!(!rig.session.is_known_lost(index));
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn a_lost_permit_is_not_revived_and_is_released() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.pass(1000);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    let reply = rig.carry_out(&renewal);
    rig.pass(1999);
    assert!(rig.session.is_known_lost(index));
    rig.reply(&renewal.op, &reply, sent);
    assert!(rig.session.is_known_lost(index));
    rig.settle();
    assert_eq!(rig.places(), []);
    rig.leave(index);
    assert_eq!(rig.settle(), []);
}

#[test]
fn waits_in_answer_to_a_holders_renewal_neither_demotes_nor_extends() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.pass(1000);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    let waits = Reply {
        lease_end: EPOCH_MS + 4000,
        statuses: smallvec![PlaceStatus::Waiting(EPOCH_MS * 1000)],
        ..Reply::default()
    };
    rig.reply(&renewal.op, &waits, sent);
    assert!(rig.session.is_held(index));
    // It is asked again soon, but not at once.
    assert_eq!(rig.call(), None);
    rig.pass(100);
    assert!(matches!(rig.call().map(|call| call.op), Some(Op::Renew { .. })));
    rig.pass(1899);
    assert!(rig.session.is_known_lost(index));
}

#[test]
fn gone_takes_nothing_from_a_place_that_was_granted_after_the_question() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    rig.settle();
    rig.pass(1000);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    rig.pass(10);
    let hint = rig.other_leaves(other)[0];
    rig.hint(hint);
    assert_eq!(rig.progress(index), Progress::Held);
    let gone = Reply { statuses: smallvec![PlaceStatus::Gone], ..Reply::default() };
    rig.reply(&renewal.op, &gone, sent);
    assert!(rig.session.is_held(index));
    let asked = rig.settle();
    assert!(matches!(&asked[..], [Op::Renew { .. }]), "{asked:?}");
}

#[test]
fn places_of_different_leases_are_renewed_in_calls_of_their_own() {
    let mut rig = Rig::new(8);
    for lease in [3, 6, 3, 6, 9] {
        let index =
            rig.request_with(AcquireOptions { lease: Duration::from_secs(lease), ..OPTIONS });
        rig.settle();
        rig.progress(index);
    }
    let now = rig.now();
    rig.session.handle_connected(Connected::default(), now);
    let calls = rig.calls();
    let mut renewed: Vec<_> = calls
        .iter()
        .filter(|call| matches!(call.op, Op::Renew { .. }))
        .map(|call| (call.op.lease_ms(), call.op.places()))
        .collect();
    renewed.sort_unstable();
    assert_eq!(renewed, [(3000, 2), (6000, 2), (9000, 1)]);
}

#[test]
fn no_call_names_more_than_512_places() {
    let mut rig = Rig::new(2000);
    let indexes: Vec<_> = (0..1300).map(|_| rig.request()).collect();
    let places = |ops: &[Op]| ops.iter().map(Op::places).collect::<Vec<_>>();
    assert_eq!(places(&rig.settle()), [512, 512, 276]);
    for index in &indexes {
        assert_eq!(rig.progress(*index), Progress::Held);
    }
    rig.pass(1000);
    assert_eq!(places(&rig.settle()), [512, 512, 276]);
    for index in indexes {
        rig.leave(index);
    }
    assert_eq!(places(&rig.settle()), [512, 512, 276]);
    assert_eq!(rig.places(), []);
}

#[test]
fn a_place_counts_as_its_permits_under_each_limit() {
    let mut rig = Rig::new(2000);
    let limits = [1, 2, 3].map(|hash| FurtherLimit::of_hash(hash, 2000));
    let claim = Some(limits.into_iter().fold(Claim::without_tenant(), Claim::also));
    let indexes: Vec<_> =
        (0..300).map(|_| rig.request_with(AcquireOptions { claim, ..OPTIONS })).collect();
    let places = |ops: &[Op]| ops.iter().map(Op::places).collect::<Vec<_>>();
    assert_eq!(places(&rig.settle()), [128, 128, 44]);
    rig.pass(1000);
    assert_eq!(places(&rig.settle()), [128, 128, 44]);
    indexes.into_iter().for_each(|index| rig.leave(index));
    assert_eq!(places(&rig.settle()), [128, 128, 44]);
}

#[test]
fn a_permit_that_was_not_taken_in_time_is_asked_for_again() {
    let mut rig = Rig::new(1);
    let (limit, now) = (rig.limit, rig.now());
    let index = rig.session.handle_request(limit, OPTIONS, now).expect("room");
    rig.settle();
    rig.pass(3500);
    assert_eq!(rig.progress(index), Progress::Waiting);
    rig.live(100);
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn no_call_names_more_than_512_places_that_leave_and_come() {
    let mut rig = Rig::new(2000);
    for (leave, come) in [(512, 512), (500, 300), (600, 1)] {
        let leaving: Vec<_> = (0..leave).map(|_| rig.request()).collect();
        rig.settle();
        leaving.into_iter().for_each(|index| rig.leave(index));
        for _ in 0..come {
            rig.request();
        }
        let ops = rig.settle();
        assert!(ops.iter().all(|op| op.places() <= 512), "{leave} {come}");
        assert_eq!(ops.iter().map(Op::places).sum::<usize>(), leave + come);
    }
}

#[test]
fn a_long_lease_is_forgotten_with_the_last_place_that_had_it() {
    let mut rig = Rig::new(2);
    let long = AcquireOptions { lease: ms(3_600_000), ..OPTIONS };
    let longest = |rig: &mut Rig| {
        let index = rig.request();
        let longest = rig.session.limits.longest_lease();
        rig.settle();
        rig.leave(index);
        longest
    };
    let first = rig.request_with(long);
    rig.settle();
    assert_eq!(longest(&mut rig), long.lease, "it is there");
    rig.leave(first);
    assert_eq!(longest(&mut rig), long.lease, "its release is to be sent");
    let release = rig.call().expect("a release");
    assert_eq!(longest(&mut rig), long.lease, "its release is not answered");
    let now = rig.now();
    rig.session.handle_call_error(&release.op, now);
    assert_eq!(longest(&mut rig), long.lease, "its release is to be tried again");
    rig.pass(1000);
    rig.settle();
    assert_eq!(longest(&mut rig), OPTIONS.lease);
}

/// A backend that has a lease for all places of the process names the time of that.
#[test]
fn a_lease_can_count_from_before_the_call() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.now_ms = 1000;
    let call = rig.call().expect("an acquire");
    let reply = rig.carry_out(&call);
    let (sent, from) = (rig.now(), Time::ZERO + ms(400));
    rig.session.handle_reply(&call.op, &reply, Sending::at(sent).leases_from(from), sent);
    assert_eq!(rig.progress(index), Progress::Held);
    assert!(!rig.session.is_lost(index, Time::ZERO + ms(3398)));
    assert!(rig.session.is_lost(index, Time::ZERO + ms(3399)));
}

#[test]
fn it_is_asked_for_no_more_often_for_that() {
    let mut rig = Rig::new(1);
    rig.other();
    rig.request();
    rig.settle();
    let (mut calls, began) = (0, rig.now_ms);
    while rig.now_ms < began + 10_000 {
        rig.pass(5);
        if let Some(call) = rig.call() {
            calls += 1;
            let (sent, from) = (rig.now(), Time::ZERO + ms(rig.now_ms.saturating_sub(1200)));
            let reply = rig.carry_out(&call);
            rig.now_ms += 5;
            let now = rig.now();
            rig.session.handle_reply(&call.op, &reply, Sending::at(sent).leases_from(from), now);
        }
    }
    assert!((9..=11).contains(&calls), "{calls} calls");
}
