//! Permits that are handed to a request that waits.

use super::*;

#[test]
fn a_request_that_waits_is_handed_the_permit_in_its_turn() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    let waits: Vec<_> = (0..3).map(|_| rig.request_with(REUSE)).collect();
    rig.settle();
    let (n, mut has) = (rig.id(first).n, first);
    for next in waits {
        assert_eq!(rig.progress(next), Progress::Waiting);
        rig.leave(has);
        assert_eq!((rig.progress(next), rig.id(next).n), (Progress::Held, n));
        let sent = rig.settle();
        assert!(matches!(&sent[..], [Op::Release { ids }] if ids.len() == 1), "{sent:?}");
        assert_eq!(rig.ledger.in_use(), 1);
        has = next;
    }
    // A later request has the index of the first, and another number.
    let other = rig.request_with(REUSE);
    assert_ne!(rig.id(other).n, n);
    rig.settle();
    rig.leave(has);
    assert_eq!((rig.progress(other), rig.id(other).n), (Progress::Held, n));
    assert_eq!(rig.session.take_passed_on(), 4);
    rig.settle();
    rig.leave(other);
    rig.live(100);
    assert!(rig.ledger.is_empty() && rig.session.places.is_empty(), "nothing is left");
}

#[test]
fn a_request_that_waits_is_handed_nothing_once_what_is_known_is_too_old() {
    for (after, progress) in [(49, Progress::Held), (50, Progress::Waiting)] {
        let mut rig = Rig::new(1);
        let first = rig.holder(REUSE);
        let next = rig.request_with(REUSE);
        rig.settle();
        rig.pass(after);
        rig.leave(first);
        assert_eq!(rig.progress(next), progress, "{after} ms after the reply");
    }
}

#[test]
fn the_handed_permit_is_renewed_lost_and_revoked_under_its_number() {
    let handed = || {
        let mut rig = Rig::new(1);
        let first = rig.holder(REUSE);
        let next = rig.request_with(REUSE);
        rig.settle();
        rig.leave(first);
        rig.settle();
        assert_eq!(rig.progress(next), Progress::Held);
        (rig, next)
    };
    let (mut rig, next) = handed();
    rig.live(10_000);
    assert_eq!((rig.progress(next), rig.ledger.in_use()), (Progress::Held, 1));
    let id = rig.id(next);
    let now = rig.now();
    assert_eq!(rig.session.held_for(id, now), Some(ms(10_000)));
    rig.session.handle_revoked(id, now);
    assert!(rig.session.is_known_lost(next));
    let (mut rig, next) = handed();
    rig.pass(3000);
    assert!(rig.session.is_known_lost(next), "its lease ended");
}

#[test]
fn a_request_that_has_not_been_answered_is_handed_the_permit() {
    for is_sent in [true, false] {
        let mut rig = Rig::new(1);
        let first = rig.holder(REUSE);
        let next = rig.request_with(REUSE);
        let (call, sent) = (is_sent.then(|| rig.call().unwrap()), rig.now());
        rig.leave(first);
        assert_eq!(rig.progress(next), Progress::Held);
        if let Some(call) = call {
            let reply = rig.carry_out(&call);
            rig.reply(&call.op, &reply, sent);
        }
        rig.settle();
        assert_eq!((rig.progress(next), rig.ledger.in_use()), (Progress::Held, 1));
        assert_eq!(rig.ledger.waiting(), 0, "nothing of it is left in the queue");
    }
}

#[test]
fn among_tenants_only_the_backend_says_who_is_next() {
    let of = |tenant| AcquireOptions { claim: claim(tenant), ..REUSE };
    let mut rig = Rig::new(1);
    let first = rig.holder(of(1));
    let [same, other] = [1, 2].map(|tenant| rig.request_with(of(tenant)));
    rig.settle();
    rig.leave(first);
    assert_eq!((rig.progress(same), rig.progress(other)), (Progress::Waiting, Progress::Waiting));
    let n = rig.id(same).n;
    rig.settle();
    assert_eq!((rig.progress(same), rig.id(same).n), (Progress::Held, n), "by the backend");
    // Nor before the backend has heard of the other one.
    let mut rig = Rig::new(1);
    let first = rig.holder(of(1));
    let same = rig.request_with(of(1));
    rig.settle();
    rig.request_with(of(2));
    rig.leave(first);
    assert_eq!(rig.progress(same), Progress::Waiting);
    // Of one tenant, the permit is passed on.
    let mut rig = Rig::new(1);
    let first = rig.holder(of(1));
    let next = rig.request_with(of(1));
    rig.settle();
    rig.leave(first);
    assert_eq!(rig.progress(next), Progress::Held);
}

#[test]
fn a_hint_for_the_number_of_a_place_that_was_left_releases_it() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    let next = rig.request_with(REUSE);
    rig.settle();
    let n = rig.id(next).n;
    rig.leave(first);
    let now = rig.now();
    rig.session.handle_hint(Hint { n, bound: None, claim: None, lease_end: EPOCH_MS + 3000 }, now);
    rig.settle();
    assert_eq!((rig.progress(next), rig.ledger.in_use()), (Progress::Held, 1));
}

#[test]
fn a_request_is_judged_by_its_own_limit_whatever_others_of_its_process_know() {
    let mut rig = Rig::new(2);
    let small = rig.holder(REUSE);
    rig.limit = 10;
    for _ in 0..8 {
        rig.holder(OPTIONS);
    }
    rig.pass(5);
    rig.leave(small);
    rig.limit = 2;
    let next = rig.request_with(REUSE);
    rig.settle();
    assert_eq!(rig.progress(next), Progress::Waiting, "eight are in use");
}

#[test]
fn within_a_tenant_the_first_is_served_first_whoever_else_comes() {
    let [a, b] = [1, 2].map(|tenant| AcquireOptions { claim: claim(tenant), ..REUSE });
    let mut rig = Rig::new(2);
    let first = rig.holder(a);
    rig.pass(1);
    rig.renew(first);
    let [second, third] = [(); 2].map(|()| rig.sent(a));
    rig.leave(first);
    let last = rig.request_with(a);
    assert_eq!(rig.calls(), vec![], "it takes a place over");
    let of_b = rig.sent(b);
    for sent in [&second, &third, &of_b] {
        rig.answer_to(sent);
    }
    assert_eq!((rig.progress(third.0), rig.progress(last)), (Progress::Held, Progress::Waiting));
}

#[test]
fn the_last_to_come_is_the_one_that_finds_the_queue_full() {
    let options = AcquireOptions { max_queue: Some(1), ..REUSE };
    let mut rig = Rig::new(1);
    let first = rig.holder(options);
    let [second, third] = [(); 2].map(|()| rig.sent(options));
    rig.leave(first);
    let last = rig.request_with(options);
    assert_eq!((rig.progress(second.0), rig.calls()), (Progress::Held, vec![]));
    rig.answer_to(&second);
    rig.answer_to(&third);
    assert_eq!(rig.progress(third.0), Progress::Waiting);
    assert!(is_refused(rig.progress(last), RejectReason::QueueFull));
}

#[test]
fn a_request_is_refused_at_once_though_others_have_come_since() {
    let options = AcquireOptions { max_queue: None, ..REUSE };
    let mut rig = Rig::new(1);
    rig.other();
    let [first, second] = [(); 2].map(|()| rig.sent(options));
    rig.answer_to(&first);
    // The place of the second was not asked for earlier, so its reply is none for the first.
    assert!(is_refused(rig.progress(first.0), RejectReason::Limit));
    assert_eq!(rig.progress(second.0), Progress::Joining);
}

#[test]
fn a_share_of_an_outage_goes_to_the_request_that_came_first_whatever_place_it_has() {
    let local = AcquireOptions { on_unavailable: OnUnavailable::Local(2), ..REUSE };
    for is_refused in [false, true] {
        let mut rig = Rig::new(2);
        let first = rig.holder(local);
        let [second, third] = [(); 2].map(|()| rig.request_with(local));
        let call = rig.call().expect("both ask");
        rig.leave(first);
        let last = rig.request_with(local);
        assert_eq!((rig.progress(second), rig.calls()), (Progress::Held, vec![]));
        let now = rig.now();
        if is_refused {
            rig.session.handle_call_error(&call.op, now);
        } else {
            rig.session.handle_unreachable(now);
        }
        let progress = [third, last].map(|index| rig.progress(index));
        let next = if is_refused { Progress::Failed } else { Progress::Waiting };
        assert_eq!(progress, [Progress::Admitted, next], "{is_refused}");
    }
}
