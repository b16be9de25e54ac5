//! What a session knows of the requests of other processes.

use super::*;

#[test]
fn what_is_used_again_and_again_is_asked_about_forty_times_a_second() {
    let mut rig = keeper(4);
    let (mut calls, mut places) = (0, 0);
    for _ in 0..1000 {
        rig.pass(1);
        assert!(rig.reuses(REUSE), "at {} ms", rig.now_ms);
        for op in rig.settle() {
            let Op::Renew { ids, .. } = op else { panic!("{op:?}") };
            (calls, places) = (calls + 1, places + ids.len());
        }
    }
    assert!((38..=42).contains(&calls), "{calls} calls");
    assert_eq!(calls, places, "of one place each");
}

#[test]
fn a_question_renews_one_of_those_that_wait() {
    let mut rig = Rig::new(1);
    let mut has = rig.holder(REUSE);
    let waits: Vec<_> = (0..8).map(|_| rig.request_with(REUSE)).collect();
    rig.settle();
    let mut renewed = Vec::new();
    for next in waits {
        rig.pass(10);
        rig.leave(has);
        assert_eq!(rig.progress(next), Progress::Held, "though it came long ago");
        has = next;
        let ops = rig.settle().into_iter();
        renewed.extend(ops.filter_map(|op| match op {
            Op::Renew { ids, .. } => Some(ids.len()),
            _ => None,
        }));
    }
    assert_eq!(renewed, [2, 2]);
}

#[test]
fn a_recall_ends_it_until_a_later_call_says_that_nobody_else_waits() {
    let mut rig = keeper(1);
    let other = rig.other();
    assert_eq!(rig.recalled, [NODE]);
    rig.recall();
    assert_eq!((rig.settle().len(), rig.kept()), (1, 0));
    assert_eq!(rig.places(), [other]);
    assert!(!rig.reuses(REUSE));
    rig.settle();
    rig.other_leaves(other);
    rig.pass(1);
    // The reply says that nobody waits.
    let held = rig.holder(REUSE);
    rig.leave(held);
    assert_eq!(rig.kept(), 1);
}

#[test]
fn a_reply_to_what_was_sent_before_a_recall_does_not_undo_it() {
    let mut rig = Rig::new(2);
    let held = rig.request_with(REUSE);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    let reply = rig.carry_out(&call);
    rig.recall();
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(held), Progress::Held);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn without_a_recall_it_ends_when_the_question_is_answered() {
    let mut rig = keeper(1);
    rig.other();
    let mut passed_until = 0;
    for at in 1..200 {
        rig.pass(1);
        if rig.reuses(REUSE) {
            passed_until = at;
        }
        rig.settle();
    }
    assert!((20..=50).contains(&passed_until), "{passed_until} ms");
    assert_eq!(rig.in_use_elsewhere(), 1);
}

#[test]
fn without_any_answer_it_ends_after_its_time() {
    let mut rig = keeper(1);
    let mut passed_until = 0;
    for at in 1..200 {
        rig.pass(1);
        if rig.reuses(REUSE) {
            passed_until = at;
        }
        drop(rig.calls());
    }
    assert_eq!(passed_until, 49);
}

#[test]
fn who_waits_of_another_process_is_not_taken_for_ones_own() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    rig.other();
    let own = rig.request_with(REUSE);
    // The reply counts two: the other's, and this one.
    rig.settle();
    rig.leave(first);
    assert_eq!(rig.progress(own), Progress::Waiting, "it is not its turn");
    rig.settle();
    assert_eq!(rig.in_use_elsewhere(), 1);
}

#[test]
fn places_that_are_only_sent_do_not_count_as_ones_own() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    // Another process waits; and three of this process are on their way behind a renewal that says one waits.
    rig.other();
    rig.pass(1000);
    let (renewal, sent) = (rig.call().unwrap(), rig.now());
    let own: Vec<_> = (0..3).map(|_| rig.request_with(REUSE)).collect();
    let _ = rig.call().expect("they are sent");
    let reply = rig.carry_out(&renewal);
    assert_eq!(reply.usage.unwrap().waiting, 1);
    rig.reply(&renewal.op, &reply, sent);
    rig.leave(first);
    assert!(own.iter().all(|index| rig.progress(*index) != Progress::Held));
}

#[test]
fn a_hint_that_comes_takes_its_place_out_of_what_stands_there() {
    let mut rig = Rig::new(1);
    let first = rig.other();
    let own = rig.request_with(REUSE);
    rig.settle();
    let grant = rig.other_leaves(first)[0];
    rig.other();
    rig.hint(grant);
    assert_eq!(rig.progress(own), Progress::Held);
    rig.pass(1000);
    // One waits, and it is not this process's.
    rig.settle();
    rig.leave(own);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn nor_does_a_place_stand_there_whose_hint_was_handled_before_its_reply() {
    for renewed in [false, true] {
        let mut rig = Rig::new(1);
        let first = rig.other();
        let own = rig.request_with(REUSE);
        if renewed {
            rig.settle();
            rig.pass(1000);
        }
        let (call, sent) = (rig.call().unwrap(), rig.now());
        let reply = rig.carry_out(&call);
        assert!(matches!(reply.statuses[..], [PlaceStatus::Waiting(_)]), "{reply:?}");
        let grant = rig.other_leaves(first)[0];
        rig.hint(grant);
        rig.reply(&call.op, &reply, sent);
        assert_eq!(rig.progress(own), Progress::Held);
        rig.other();
        let next = rig.request_with(REUSE);
        // Two wait, and one of them is this process's.
        let (call, sent) = (rig.call().unwrap(), rig.now());
        let reply = rig.carry_out(&call);
        rig.reply(&call.op, &reply, sent);
        rig.leave(own);
        assert_eq!(rig.progress(next), Progress::Waiting, "it is not its turn");
        rig.settle();
        assert_eq!(rig.in_use_elsewhere(), 1);
    }
}

#[test]
fn what_is_above_the_limit_is_not_passed_on() {
    let mut rig = Rig::new(3);
    let held: Vec<_> = (0..3).map(|_| rig.holder(REUSE)).collect();
    rig.limit = 1;
    let last = rig.request_with(REUSE);
    rig.settle();
    for index in held {
        rig.leave(index);
        rig.settle();
    }
    assert_eq!((rig.progress(last), rig.ledger.in_use()), (Progress::Held, 1));
}

#[test]
fn nor_when_it_is_above_because_of_an_outage() {
    let admit = AcquireOptions { on_unavailable: OnUnavailable::Admit, ..REUSE };
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let admitted: Vec<_> = (0..3).map(|_| rig.request_with(admit)).collect();
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!(rig.ledger.in_use(), 3, "they are counted");
    for (left, index) in (0..3).rev().zip(admitted) {
        rig.leave(index);
        assert_eq!(rig.kept(), 0, "{left} are left");
        rig.settle();
    }
    assert!(rig.ledger.is_empty());
}

#[test]
fn a_renewal_that_finds_more_in_use_than_the_limit_ends_it() {
    let mut rig = keeper(1);
    // As another process does that counts what it let pass in an outage.
    let caller = rig.ask(OTHER, 1);
    let id = PlaceId { node: OTHER, poll_only: false, n: 9, bound: None, claim: None };
    rig.ledger.reassert(caller, 3_000_000, &[(id, u64::MAX >> 20)], &mut |_, _| true);
    assert_eq!(rig.ledger.in_use(), 2);
    let mut last = 0;
    for at in 1..100 {
        rig.pass(1);
        if rig.reuses(REUSE) {
            last = at;
        }
        rig.settle();
    }
    assert!(last <= 26, "{last}");
    assert_eq!(rig.places(), [id]);
}

#[test]
fn a_lower_limit_of_an_operator_ends_it_and_a_pause_does() {
    for (mode, limit) in [(Mode::Open, Some(1)), (Mode::Paused, None)] {
        let mut rig = Rig::new(2);
        let held: Vec<_> = (0..2).map(|_| rig.holder(REUSE)).collect();
        held.into_iter().for_each(|index| rig.leave(index));
        assert_eq!(rig.kept(), 2);
        let now = rig.now();
        rig.session.handle_override(Override { mode, limit, ..Override::default() }, now);
        rig.settle();
        assert_eq!((rig.kept(), rig.ledger.in_use()), (0, 0), "{mode:?}");
    }
}

#[test]
fn who_waits_is_not_passed_though_releases_of_ones_own_were_given_up() {
    let mut rig = Rig::new(1);
    let held = rig.holder(REUSE);
    let gone: Vec<_> = (0..3).map(|_| rig.request_with(REUSE)).collect();
    rig.settle();
    // They leave while the backend refuses all calls, for more than two leases.
    gone.into_iter().for_each(|index| rig.leave(index));
    for _ in 0..120 {
        rig.pass(100);
        let now = rig.now();
        for call in rig.calls() {
            rig.session.handle_call_error(&call.op, now);
        }
    }
    rig.leave(held);
    rig.live(1000);
    let own = rig.holder(REUSE);
    rig.pass(1);
    rig.other();
    rig.recall();
    rig.pass(1);
    let next = rig.request_with(REUSE);
    rig.settle();
    rig.leave(own);
    assert_eq!(rig.progress(next), Progress::Waiting, "it is not its turn");
}

#[test]
fn a_permit_in_flight_by_policy_ends_it() {
    let admit = AcquireOptions { on_unavailable: OnUnavailable::Admit, ..REUSE };
    let mut rig = Rig::new(2);
    let held = rig.holder(admit);
    let next = rig.request_with(admit);
    let (call, now) = (rig.call().unwrap(), rig.now());
    rig.session.handle_call_error(&call.op, now);
    assert_eq!(rig.progress(next), Progress::Admitted);
    // This reply does not count it.
    rig.renew(held);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn what_is_heard_in_quarantine_or_where_no_recall_arrives_says_nothing() {
    let lost_at = Some(Time::ZERO + ms(100));
    let quarantine = Quarantine { is_on: true, lost_at, ..Quarantine::default() };
    for connected in [
        Connected { quarantine, ..Connected::default() },
        Connected { poll_only: true, ..same_data() },
    ] {
        let mut rig = Rig::new(2);
        let held = rig.holder(REUSE);
        rig.pass(100);
        rig.reconnect(connected);
        rig.live(100);
        rig.renew(held);
        rig.leave(held);
        assert_eq!(rig.kept(), 0, "{connected:?}");
    }
}

#[test]
fn a_place_whose_lease_has_ended_there_does_not_stand_in_the_queue() {
    let mut rig = Rig::new(1);
    rig.holder(REUSE);
    let waits = rig.request_with(REUSE);
    rig.settle();
    // All but newcomers is refused until the leases have ended.
    let live = |rig: &mut Rig| {
        let (calls, now) = (rig.calls(), rig.now());
        for call in calls {
            if matches!(call.op, Op::Acquire { .. }) {
                let reply = rig.carry_out(&call);
                rig.reply(&call.op, &reply, now);
            } else {
                rig.session.handle_call_error(&call.op, now);
            }
        }
    };
    for _ in 0..5 {
        rig.pass(1000);
        live(&mut rig);
    }
    let next = rig.request_with(REUSE);
    live(&mut rig);
    assert_eq!(rig.progress(waits), Progress::Held, "it came first");
    rig.other();
    // One waits, and it is not this process's.
    let (id, sent) = (rig.id(waits), rig.now());
    let op = Op::Renew { lease_ms: 3000, ids: Ids::from_buf([id]) };
    let reply = rig.carry_out(&Call { limit: 1, max_waiting: 100, ..Call::of(op.clone()) });
    assert_eq!(reply.usage.unwrap().waiting, 1);
    rig.reply(&op, &reply, sent);
    rig.leave(waits);
    assert_ne!(rig.progress(next), Progress::Held, "it is not its turn");
}

#[test]
fn a_place_whose_hint_was_lost_does_not_stand_there_once_a_reply_counts_fewer() {
    let mut rig = Rig::new(2);
    let others = [(); 2].map(|()| rig.other());
    let first = rig.request_with(REUSE);
    rig.settle();
    // It is granted, and never told.
    others.into_iter().for_each(|id| drop(rig.other_leaves(id)));
    let next = rig.request_with(REUSE);
    rig.answer();
    assert_eq!(rig.progress(first), Progress::Held, "it came first");
    rig.other();
    // One waits, and it is not this process's.
    rig.renew(first);
    rig.leave(first);
    assert_ne!(rig.progress(next), Progress::Held, "it is not its turn");
}

#[test]
fn a_place_of_which_nothing_was_heard_for_long_is_not_certain_to_stand_there() {
    let mut rig = Rig::new(2);
    let holder = rig.holder(REUSE);
    let gone = rig.other();
    let first = rig.request_with(REUSE);
    rig.settle();
    // It is granted, never told, and another waits: as many as before.
    rig.other_leaves(gone);
    rig.other();
    for _ in 0..3 {
        rig.pass(20);
        rig.renew(holder);
    }
    rig.leave(holder);
    assert_ne!(rig.progress(first), Progress::Held, "another waits for longer than that");
}

#[test]
fn who_waits_is_not_forgotten_until_ones_own_places_are_known_to_wait_still() {
    for recalled in [false, true] {
        let mut rig = Rig::new(2);
        let holder = rig.holder(REUSE);
        let gone = rig.other();
        let first = rig.request_with(REUSE);
        rig.settle();
        let other = rig.other();
        rig.pass(60);
        rig.renew(first);
        if recalled {
            rig.recall();
        }
        // It is granted, and never told: now one place waits, and one of its own did.
        rig.pass(1);
        rig.other_leaves(gone);
        rig.renew(holder);
        rig.leave(holder);
        assert_ne!(rig.progress(first), Progress::Held, "another waits for 61 ms");
        rig.settle();
        assert!(rig.places().contains(&other));
    }
}

#[test]
fn once_the_others_are_gone_it_asks_whether_its_own_places_wait_still() {
    let mut rig = Rig::new(1);
    let holder = rig.holder(REUSE);
    let first = rig.request_with(REUSE);
    rig.settle();
    let other = rig.other();
    rig.pass(5);
    rig.renew(holder);
    rig.other_leaves(other);
    rig.pass(5);
    let left = rig.request_with(REUSE);
    rig.settle();
    rig.leave(left);
    let next = rig.request_with(REUSE);
    let question = Op::Renew { lease_ms: 3000, ids: Ids::from_buf([rig.id(first)]) };
    assert_eq!(rig.settle().iter().filter(|op| **op == question).count(), 1);
    rig.leave(holder);
    assert_eq!(rig.progress(first), Progress::Held, "nothing was sent for it");
    assert_eq!(rig.session.take_passed_on(), 1);
    assert_eq!(rig.progress(next), Progress::Waiting);
}

#[test]
fn questions_that_are_refused_keep_no_other_permit_from_its_renewal() {
    let mut rig = Rig::new(10);
    let long = rig.holder(REUSE);
    let mut refused_at = 0;
    for _ in 0..2000 {
        let index = rig.request_with(REUSE);
        for call in rig.calls() {
            if matches!(call.op, Op::Renew { .. }) && rig.now_ms >= refused_at + 500 {
                refused_at = rig.now_ms;
                rig.session.handle_call_error(&call.op, rig.now());
            } else {
                let reply = rig.carry_out(&call);
                rig.reply(&call.op, &reply, rig.now());
            }
        }
        rig.settle();
        rig.leave(index);
        assert!(!rig.session.is_known_lost(long), "lost after {} ms", rig.now_ms);
        rig.pass(5);
    }
}
