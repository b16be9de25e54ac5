//! Permits that are kept for the next request.

use super::*;

#[test]
fn a_request_that_comes_takes_the_permit_that_was_given_back() {
    let mut rig = keeper(1);
    let (before, n) = (rig.places(), rig.session.places.iter().next().unwrap().1.n);
    for _ in 0..100 {
        let next = rig.request_with(REUSE);
        assert_eq!(rig.progress(next), Progress::Held);
        assert_eq!((rig.kept(), rig.id(next).n), (0, n));
        rig.leave(next);
    }
    assert_eq!((rig.calls(), rig.places()), (vec![], before));
    assert_eq!([(); 2].map(|()| rig.session.take_passed_on()), [100, 0]);
}

#[test]
fn a_request_that_does_not_ask_for_it_gives_its_permit_back() {
    let mut rig = keeper(1);
    let held = rig.holder(OPTIONS);
    assert_eq!(rig.kept(), 0, "it went to the backend for this request");
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert!(rig.ledger.is_empty());
}

#[test]
fn what_nobody_uses_is_given_back() {
    let mut rig = keeper(5);
    rig.pass(50);
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert!(rig.ledger.is_empty());
}

#[test]
fn a_drained_semaphore_gives_no_kept_permit_to_a_newcomer() {
    let mut rig = keeper(2);
    let now = rig.now();
    rig.session.handle_override(Override { mode: Mode::Draining, ..Override::default() }, now);
    let index = rig.request_with(REUSE);
    assert!(is_refused(rig.progress(index), RejectReason::Draining));
}

#[test]
fn other_terms_take_no_kept_permit_and_let_it_go() {
    for options in [
        AcquireOptions { lease: ms(5000), ..REUSE },
        AcquireOptions { max_queue: None, ..REUSE },
        AcquireOptions { claim: claim(1), ..REUSE },
    ] {
        let mut rig = keeper(1);
        let index = rig.request_with(options);
        assert_eq!(rig.progress(index), Progress::Joining);
        rig.settle();
        assert_eq!((rig.progress(index), rig.kept()), (Progress::Held, 0), "{options:?}");
    }
    let mut rig = keeper(1);
    rig.limit = 2;
    assert!(!rig.reuses(REUSE));
}

#[test]
fn a_request_that_comes_does_not_pass_one_that_could_not_use_the_kept_permit() {
    let mut rig = keeper(1);
    let first = rig.request_with(OPTIONS);
    let second = rig.request_with(REUSE);
    assert_eq!(rig.progress(second), Progress::Joining, "the other one came before it");
    rig.settle();
    assert_eq!((rig.progress(first), rig.progress(second)), (Progress::Held, Progress::Waiting));
}

#[test]
fn a_request_that_takes_a_kept_permit_too_late_waits_behind_those_that_came_before_it() {
    let mut rig = Rig::new(2);
    let first = rig.holder(REUSE);
    let early = rig.request_with(REUSE);
    rig.settle();
    rig.leave(first);
    let now = rig.now();
    let late = rig.session.handle_request(2, REUSE, now).expect("room");
    assert_eq!(rig.kept(), 0, "it has the permit of the first");
    // Neither request takes its permit while its lease runs, and others get both.
    rig.pass(3000);
    let others = [rig.other(), rig.other()];
    rig.settle();
    assert_eq!([early, late].map(|index| rig.progress(index)), [Progress::Waiting; 2]);
    for grant in rig.other_leaves(others[0]) {
        rig.hint(grant);
    }
    assert_eq!([early, late].map(|index| rig.progress(index)), [Progress::Held, Progress::Waiting]);
}

#[test]
fn requests_with_and_without_it_in_turn_keep_what_is_known() {
    let mut rig = Rig::new(4);
    let waits = rig.holder(OPTIONS);
    for _ in 0..10 {
        let [with, without] = [REUSE, OPTIONS].map(|options| rig.holder(options));
        rig.leave(without);
        rig.settle();
        rig.leave(with);
        assert_eq!(rig.kept(), 1);
        assert!(rig.reuses(REUSE));
    }
    rig.leave(waits);
}

#[test]
fn those_that_wait_again_after_an_outage_are_served_before_what_is_kept() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    let waits = rig.request_with(REUSE);
    rig.settle();
    let now = rig.now();
    rig.session.handle_unreachable(now);
    rig.reconnect(same_data());
    rig.settle();
    rig.leave(first);
    rig.settle();
    assert_eq!((rig.progress(waits), rig.kept()), (Progress::Held, 0));
}

#[test]
fn what_is_kept_does_not_outlive_its_connection_or_its_semaphore() {
    let mut rig = keeper(1);
    rig.reconnect(Connected::default());
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert!(rig.ledger.is_empty());
    let mut rig = keeper(1);
    let now = rig.now();
    rig.session.handle_close(now);
    rig.settle();
    assert!(rig.ledger.is_empty());
    let mut rig = keeper(1);
    rig.session.handle_unreachable(now);
    assert_eq!((rig.kept(), rig.session.counts.in_flight()), (0, 0));
}

#[test]
fn a_kept_permit_that_is_lost_concerns_nobody() {
    let mut rig = keeper(1);
    let id = rig.session.places.iter().next().unwrap().1.id(NODE);
    let now = rig.now();
    rig.session.take_events();
    rig.session.handle_revoked(id, now);
    assert!(rig.session.take_events().is_empty());
    assert!(!rig.reuses(REUSE));
}

#[test]
fn a_permit_whose_request_never_took_it_is_kept_like_any_other() {
    let mut rig = Rig::new(1);
    let index = rig.session.handle_request(1, REUSE, rig.now()).unwrap();
    rig.settle();
    rig.leave(index);
    assert_eq!(rig.kept(), 1);
    drop(rig.calls());
    // Whatever happens to it, no request waits for it.
    rig.pass(4000);
    assert_eq!(rig.session.counts.waiting(), 0);
}

#[test]
fn a_permit_that_was_found_gone_is_not_passed_on_and_a_hot_one_is_found_so() {
    let mut rig = keeper(1);
    rig.ledger = Ledger::new();
    let mut asked = 0;
    for _ in 0..100 {
        rig.pass(1);
        rig.reuses(REUSE);
        let (calls, now) = (rig.calls(), rig.now());
        for call in calls {
            asked += u32::from(matches!(call.op, Op::Renew { .. }));
            let reply = rig.carry_out(&call);
            // Its request has changed meanwhile.
            rig.pass(1);
            rig.reuses(REUSE);
            rig.reply(&call.op, &reply, now);
        }
        if rig.session.poll_revocation_check().is_some() {
            rig.calls();
            assert_eq!(rig.kept(), 0);
            assert!(!rig.reuses(REUSE));
            return assert!(asked <= 2, "{asked}");
        }
    }
    panic!("it was never believed to be gone");
}

#[test]
fn nor_is_one_of_which_it_is_not_known_whether_it_was_revoked() {
    let mut rig = Rig::new(2);
    let held = rig.holder(REUSE);
    rig.ledger = Ledger::new();
    rig.renew(held);
    // Nobody has said yet.
    let question = rig.session.poll_revocation_check();
    assert!(question.is_some());
    rig.holder(REUSE);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn a_permit_is_kept_while_more_than_half_of_its_lease_is_left() {
    // Of three seconds, less the millisecond by which lease ends are rounded.
    for (after, kept) in [(1498, 1), (1499, 0)] {
        let mut rig = Rig::new(2);
        let held = rig.holder(REUSE);
        rig.pass(after);
        // Its renewal is not answered.
        let other = rig.request_with(REUSE);
        let calls = rig.calls();
        let acquire = calls.iter().find(|call| matches!(call.op, Op::Acquire { .. }));
        let acquire = acquire.expect("the other's call");
        let reply = rig.carry_out(acquire);
        rig.reply(&acquire.op, &reply, rig.now());
        assert_eq!(rig.progress(other), Progress::Held);
        rig.leave(held);
        assert_eq!(rig.kept(), kept, "after {after} ms");
    }
}

#[test]
fn a_lingering_permit_is_not_passed_on() {
    let mut rig = Rig::new(2);
    let held = rig.holder(AcquireOptions { linger_ms: 200, ..REUSE });
    rig.session.handle_break_off(held);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
    rig.live(300);
    assert!(rig.ledger.is_empty());
}

#[test]
fn the_permit_that_was_used_last_is_used_first_and_the_others_go() {
    let mut rig = Rig::new(4);
    let held: Vec<_> = (0..4).map(|_| rig.holder(REUSE)).collect();
    let last = rig.id(held[3]).n;
    held.into_iter().for_each(|index| rig.leave(index));
    for _ in 0..6 {
        rig.pass(10);
        let index = rig.request_with(REUSE);
        assert_eq!(rig.id(index).n, last);
        rig.leave(index);
        rig.settle();
    }
    assert_eq!((rig.kept(), rig.ledger.in_use()), (1, 1));
}

#[test]
fn nothing_is_kept_that_no_recall_reaches_or_while_a_semaphore_is_drained() {
    let mut rig = Rig::new(2);
    rig.reconnect(Connected { poll_only: true, ..same_data() });
    let held = rig.holder(REUSE);
    rig.reconnect(same_data());
    let other = rig.holder(REUSE);
    rig.leave(held);
    assert_eq!(rig.kept(), 0, "it is poll only");
    let now = rig.now();
    rig.session.handle_override(Override { mode: Mode::Draining, ..Override::default() }, now);
    rig.leave(other);
    assert_eq!(rig.kept(), 0, "nobody can take it");
}

#[test]
fn what_is_lost_of_what_is_kept_does_not_stand_in_the_way() {
    let mut rig = Rig::new(2);
    let held: Vec<_> = (0..2).map(|_| rig.holder(REUSE)).collect();
    let last = rig.id(held[1]);
    held.into_iter().for_each(|index| rig.leave(index));
    let now = rig.now();
    rig.session.handle_revoked(last, now);
    assert_eq!(rig.kept(), 1);
    assert!(rig.reuses(REUSE));
}

#[test]
fn what_is_kept_goes_back_once_it_is_not_known_that_nobody_else_waits() {
    let mut rig = keeper(1);
    rig.pass(20);
    assert!(rig.reuses(REUSE));
    rig.other();
    rig.pass(29);
    assert_eq!(rig.kept(), 1, "no recall came");
    rig.pass(1);
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert_eq!(rig.in_use_elsewhere(), 1, "it waits as long as that");
}
