//! Places on their way whose request was handed a permit.

use super::*;

/// A request has the only permit, and the place of the one before it is on its way: the call, and when it was sent.
fn with_a_spare_place(limit: u32) -> (Rig, usize, Call, Time) {
    let mut rig = Rig::new(limit);
    let first = rig.holder(REUSE);
    let second = rig.request_with(REUSE);
    let (call, sent) = (rig.call().expect("it asks"), rig.now());
    rig.leave(first);
    assert_eq!((rig.progress(second), rig.calls()), (Progress::Held, vec![]));
    (rig, second, call, sent)
}

#[test]
fn a_place_on_its_way_whose_request_was_handed_a_permit_is_there_for_the_next_request() {
    let (mut rig, second, call, sent) = with_a_spare_place(4);
    let third = rig.request_with(REUSE);
    assert_eq!((rig.progress(third), rig.calls()), (Progress::Joining, vec![]), "it is asked for");
    let reply = rig.carry_out(&call);
    rig.reply(&call.op, &reply, sent);
    assert_eq!((rig.progress(third), rig.ledger.in_use()), (Progress::Held, 2));
    // One more than there are places asks.
    let fourth = rig.holder(REUSE);
    [second, third, fourth].into_iter().for_each(|index| rig.leave(index));
    assert_eq!((rig.kept(), rig.calls()), (3, vec![]));
    rig.live(100);
    assert!(rig.ledger.is_empty() && rig.session.places.is_empty());
}

#[test]
fn many_requests_in_turn_ask_for_no_more_permits_than_they_are() {
    let mut rig = Rig::new(1000);
    let mut has = VecDeque::new();
    let mut calls = VecDeque::new();
    // Answers take five turns; in each a request of eight leaves, and another one comes.
    for turn in 0..500 {
        rig.pass(u64::from(turn % 4 == 0));
        if has.len() == 8 {
            let index = has.pop_front().unwrap();
            rig.leave(index);
        }
        has.push_back(rig.request_with(REUSE));
        while let Some(call) = rig.call() {
            calls.push_back((turn, rig.carry_out(&call), call, rig.now()));
        }
        while calls.front().is_some_and(|(at, ..)| at + 5 <= turn) {
            let (_, reply, call, sent) = calls.pop_front().unwrap();
            rig.reply(&call.op, &reply, sent);
        }
        assert!(rig.session.places.len() <= 8 && rig.ledger.in_use() <= 8);
    }
    assert!(has.iter().all(|index| rig.progress(*index) == Progress::Held));
}

#[test]
fn a_place_without_a_request_that_would_have_to_wait_goes() {
    let (mut rig, second, call, sent) = with_a_spare_place(1);
    let reply = rig.carry_out(&call);
    assert!(matches!(reply.statuses[..], [PlaceStatus::Waiting(_)]), "{reply:?}");
    rig.reply(&call.op, &reply, sent);
    rig.settle();
    assert_eq!((rig.ledger.in_use(), rig.ledger.waiting()), (1, 0));
    rig.leave(second);
    rig.live(100);
    assert!(rig.ledger.is_empty() && rig.session.places.is_empty());
    // One that is refused stands nowhere.
    let (mut rig, _, call, sent) = with_a_spare_place(1);
    let mut reply = rig.carry_out(&call);
    rig.ledger = Ledger::new();
    reply.statuses = smallvec![PlaceStatus::QueueFull];
    rig.reply(&call.op, &reply, sent);
    assert_eq!((rig.session.places.len(), rig.calls()), (1, vec![]));
}

#[test]
fn a_request_that_takes_over_a_place_is_not_served_before_those_that_came_before_it() {
    let mut rig = Rig::new(2);
    let first = rig.holder(REUSE);
    let [second, third] = [(); 2].map(|()| {
        let index = rig.request_with(REUSE);
        (index, rig.call().expect("it asks"), rig.now())
    });
    rig.leave(first);
    assert_eq!(rig.progress(second.0), Progress::Held);
    // The place of the second comes first, and the last request has it.
    let last = rig.request_with(REUSE);
    assert_eq!(rig.calls(), vec![]);
    for (_, call, sent) in [&second, &third] {
        let reply = rig.carry_out(call);
        rig.reply(&call.op, &reply, *sent);
    }
    assert_eq!((rig.progress(third.0), rig.progress(last)), (Progress::Held, Progress::Waiting));
    rig.settle();
    rig.leave(second.0);
    rig.settle();
    assert_eq!((rig.progress(last), rig.ledger.in_use()), (Progress::Held, 2));
}

#[test]
fn whatever_ends_it_leaves_no_place_without_a_request() {
    type End = fn(&mut Rig, Call, Time);
    let ends: [(&str, End); 7] = [
        ("recall", |rig, call, sent| {
            rig.recall();
            let reply = rig.carry_out(&call);
            rig.reply(&call.op, &reply, sent);
        }),
        ("error", |rig, call, _| {
            let now = rig.now();
            rig.session.handle_call_error(&call.op, now);
        }),
        ("connection", |rig, call, _| {
            rig.session.handle_unanswered(&call.op);
            rig.reconnect(same_data());
        }),
        ("carried out", |rig, call, _| {
            let _ = rig.carry_out(&call);
            rig.session.handle_unanswered(&call.op);
            rig.reconnect(Connected::default());
        }),
        ("outage", |rig, call, _| {
            let now = rig.now();
            rig.session.handle_unanswered(&call.op);
            rig.session.handle_unreachable(now);
        }),
        ("close", |rig, call, sent| {
            let now = rig.now();
            rig.session.handle_close(now);
            let reply = rig.carry_out(&call);
            rig.reply(&call.op, &reply, sent);
        }),
        ("revocation", |rig, call, sent| {
            let Op::Acquire { ids, .. } = &call.op else { panic!("{call:?}") };
            let (id, now) = (ids[0], rig.now());
            let reply = rig.carry_out(&call);
            rig.session.handle_revoked(id, now);
            rig.reply(&call.op, &reply, sent);
        }),
    ];
    for (what, end) in ends {
        let (mut rig, second, call, sent) = with_a_spare_place(2);
        end(&mut rig, call, sent);
        rig.check();
        let places = rig.session.places.iter().map(|(index, _)| index).collect::<Vec<_>>();
        assert_eq!(places, [second], "{what}");
        if rig.session.is_outage() {
            rig.reconnect(same_data());
        }
        rig.leave(second);
        rig.live(2000);
        assert!(rig.ledger.is_empty() && rig.session.places.is_empty(), "{what}");
    }
}

#[test]
fn a_place_is_not_taken_over_past_a_request_of_another_tenant() {
    let [a, b] = [1, 2].map(|tenant| AcquireOptions { claim: claim(tenant), ..REUSE });
    let mut rig = Rig::new(2);
    let first = rig.holder(a);
    rig.pass(1);
    rig.renew(first);
    let second = rig.sent(a);
    rig.leave(first);
    assert_eq!(rig.progress(second.0), Progress::Held);
    let of_b = rig.sent(b);
    let last = rig.request_with(a);
    rig.answer_to(&second);
    rig.answer_to(&of_b);
    rig.settle();
    assert_eq!((rig.progress(of_b.0), rig.progress(last)), (Progress::Held, Progress::Waiting));
}

#[test]
fn a_place_is_not_taken_over_past_a_request_of_other_terms() {
    let mut rig = Rig::new(2);
    let first = rig.holder(REUSE);
    let second = rig.sent(REUSE);
    let other = rig.sent(AcquireOptions { max_queue: Some(9), ..REUSE });
    let third = rig.sent(REUSE);
    rig.leave(first);
    assert_eq!(rig.progress(second.0), Progress::Held);
    let last = rig.sent(REUSE);
    for sent in [&second, &other, &third, &last] {
        rig.answer_to(sent);
    }
    rig.settle();
    let progress = [other.0, third.0, last.0].map(|index| rig.progress(index));
    assert_eq!(progress, [Progress::Held, Progress::Waiting, Progress::Waiting]);
}

#[test]
fn those_that_take_a_place_over_have_their_turn_however_many_numbers_were_given_out() {
    let mut rig = Rig::new(1);
    rig.session = Session::new(NODE, (1 << 36) + 5, Connected::default(), false);
    let options = AcquireOptions { max_queue: Some(100), ..REUSE };
    let first = rig.holder(options);
    let second = rig.sent(options);
    rig.leave(first);
    let last = rig.request_with(options);
    assert_eq!(rig.calls(), vec![]);
    rig.answer_to(&second);
    let _later = rig.request_with(options);
    rig.settle();
    rig.leave(second.0);
    assert_eq!(rig.progress(last), Progress::Held);
}
