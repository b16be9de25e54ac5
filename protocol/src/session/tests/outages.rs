//! The backend cannot be asked.

use super::*;

#[test]
fn in_an_outage_the_policy_answers_newcomers() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let refused = rig.request_with(with(OnUnavailable::Refuse));
    assert_eq!(rig.progress(refused), Progress::Failed);
    for _ in 0..2 {
        let admitted = rig.request_with(with(OnUnavailable::Admit));
        assert_eq!(rig.progress(admitted), Progress::Admitted);
    }
    let local = rig.request_with(with(OnUnavailable::Local(2)));
    assert_eq!(rig.progress(local), Progress::Waiting, "two are in flight");
    assert_eq!(rig.calls(), []);
    assert!(rig.session.take_events().contains(&Event::Failed(refused)));
}

#[test]
fn an_outage_answers_those_that_join_and_leaves_those_in_the_queue() {
    for (policy, joining, waiting) in [
        (OnUnavailable::Refuse, Progress::Failed, Progress::Waiting),
        (OnUnavailable::Admit, Progress::Admitted, Progress::Admitted),
        (OnUnavailable::Local(2), Progress::Admitted, Progress::Admitted),
        (OnUnavailable::Local(0), Progress::Waiting, Progress::Waiting),
    ] {
        let mut rig = Rig::new(1);
        rig.other();
        let waits = rig.request_with(with(policy));
        rig.settle();
        let joins = rig.request_with(with(policy));
        let now = rig.now();
        rig.session.handle_unreachable(now);
        assert_eq!(rig.progress(waits), waiting, "{policy:?}");
        assert_eq!(rig.progress(joins), joining, "{policy:?}");
    }
}

#[test]
fn nothing_is_admitted_where_an_operator_paused_or_set_0() {
    for set in ["- paused", "0 open"] {
        let mut rig = Rig::new(1);
        let now = rig.now();
        rig.session.handle_override(Override::parse(set).expect("an override"), now);
        rig.session.handle_unreachable(now);
        let admit = rig.request_with(with(OnUnavailable::Admit));
        assert_eq!(rig.progress(admit), Progress::Failed, "{set}");
        let local = rig.request_with(with(OnUnavailable::Local(3)));
        assert_eq!(rig.progress(local), Progress::Waiting, "{set}");
        // The pause is over.
        rig.session.handle_override(Override::default(), now);
        assert_eq!(rig.progress(local), Progress::Admitted, "{set}");
    }
}

#[test]
fn draining_refuses_newcomers() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_override(Override::parse("- draining").expect("an override"), now);
    let index = rig.request();
    assert!(is_refused(rig.progress(index), RejectReason::Draining));
    assert_eq!(rig.calls(), []);
    rig.leave(index);
    assert!(rig.is_over());
}

#[test]
fn an_admitted_request_is_counted_when_the_backend_is_back() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let index = rig.request_with(with(OnUnavailable::Admit));
    rig.progress(index);
    rig.pass(10_000);
    assert!(rig.session.is_held(index));
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    assert!(matches!(&ops[0], Op::Reassert { .. }), "{ops:?}");
    assert_eq!(rig.places(), [rig.id(index)]);
    rig.leave(index);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_call_error_lets_the_policy_answer_and_an_admitted_request_is_announced_until_it_is_counted() {
    let mut rig = Rig::new(1);
    let index = rig.request_with(with(OnUnavailable::Admit));
    let acquire = rig.call().expect("an acquire");
    let now = rig.now();
    rig.session.handle_call_error(&acquire.op, now);
    assert_eq!(rig.progress(index), Progress::Admitted);
    for _ in 0..3 {
        // What the acquire may have left there is released, too.
        let calls = rig.calls();
        let now = rig.now();
        assert!(calls.iter().any(|call| matches!(call.op, Op::Reassert { .. })), "{calls:?}");
        for call in calls {
            rig.session.handle_call_error(&call.op, now);
        }
        rig.pass(1000);
    }
    rig.settle();
    assert_eq!(rig.places(), [rig.id(index)]);
    assert!(rig.session.is_held(index));
}

#[test]
fn a_caller_that_waits_for_its_release_is_told() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    let now = rig.now();
    assert!(rig.session.handle_release(index, now));
    assert_eq!(rig.session.release_answer(index), None);
    rig.settle();
    assert_eq!(rig.session.release_answer(index), Some(true));
    assert!(rig.session.take_events().contains(&Event::Released(index)));

    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    let now = rig.now();
    assert!(rig.session.handle_release(index, now));
    rig.session.handle_unreachable(now);
    assert_eq!(rig.session.release_answer(index), Some(false));
}

#[test]
fn a_limit_of_zero_lets_nobody_pass_in_an_outage() {
    for policy in [OnUnavailable::Admit, OnUnavailable::Local(3)] {
        let mut rig = outage(3);
        let now = rig.now();
        let none = Override { limit: Some(0), ..Override::default() };
        rig.session.handle_override(none, now);
        let request = rig.request_with(with_queue(policy, Some(8)));
        rig.session.handle_wait_timeout(request, now);
        let progress = rig.progress(request);
        assert!(matches!(progress, Progress::Failed | Progress::Refused { .. }), "{progress:?}");
    }
}

#[test]
fn a_refused_request_leaves_nothing_behind_in_an_outage() {
    let mut rig = outage(3);
    let request = rig.request();
    assert_eq!(rig.progress(request), Progress::Failed);
    rig.leave(request);
    assert!(rig.is_over());
}

#[test]
fn what_was_admitted_after_an_error_is_announced_until_it_is_counted() {
    let mut rig = Rig::new(3);
    let request = rig.request_with(with_queue(OnUnavailable::Admit, Some(8)));
    let call = rig.call().expect("an acquire");
    let now = rig.now();
    rig.session.handle_call_error(&call.op, now);
    assert_eq!(rig.progress(request), Progress::Admitted);
    for _ in 0..5 {
        for call in rig.calls() {
            let now = rig.now();
            rig.session.handle_call_error(&call.op, now);
        }
        rig.pass(500);
    }
    assert_eq!(rig.ledger.in_use(), 0);
    rig.live(1500);
    assert_eq!(rig.ledger.in_use(), 1);
}

#[test]
fn the_table_of_places_shrinks_after_a_burst() {
    let mut rig = outage(9);
    let kept = rig.request_with(with_queue(OnUnavailable::Admit, None));
    let burst: Vec<_> =
        (0..1000).map(|_| rig.request_with(with_queue(OnUnavailable::Admit, None))).collect();
    assert_eq!(rig.session.index_bound(), 1001);
    burst.into_iter().for_each(|index| rig.leave(index));
    assert_eq!(rig.session.index_bound(), 1);
    assert_eq!(rig.progress(kept), Progress::Admitted);
}

#[test]
fn a_session_whose_server_came_back_is_dropped_as_soon_as_any_other() {
    let minute = AcquireOptions { lease: ms(60_000), ..OPTIONS };
    let mut rig = Rig::new(1);
    let index = rig.request_with(minute);
    rig.settle();
    rig.progress(index);
    rig.leave(index);
    rig.settle();
    rig.session.handle_unreachable(rig.now());
    rig.pass(10_000);
    assert!(rig.session.is_outage());
    assert!(!rig.session.is_over(rig.now()), "what it released may come back");
    rig.session.handle_connected(same_data(), rig.now());
    assert!(!rig.session.is_outage());
    rig.settle();
    rig.pass(1000);
    assert!(rig.session.is_over(rig.now()), "until {:?}", rig.session.poll_timeout());
}

#[test]
fn an_admitted_request_that_leaves_is_released_if_the_backend_may_know_it() {
    for announced in [false, true] {
        let mut rig = outage(3);
        let request = rig.request_with(with_queue(OnUnavailable::Admit, None));
        rig.reconnect(Connected::default());
        if announced {
            let call = rig.call().expect("a proof");
            assert!(matches!(call.op, Op::Reassert { .. }), "{call:?}");
        }
        let id = rig.id(request);
        rig.leave(request);
        let ops: Vec<_> = rig.calls().into_iter().map(|call| call.op).collect();
        let release = Op::Release { ids: smallvec![id] };
        assert_eq!(ops.contains(&release), announced, "{ops:?}");
    }
}

#[test]
fn an_admitted_request_is_counted_past_the_limit() {
    let mut rig = outage(1);
    let request = rig.request_with(with_queue(OnUnavailable::Admit, None));
    rig.other();
    rig.reconnect(Connected::default());
    rig.settle();
    assert_eq!(rig.progress(request), Progress::Held);
    assert_eq!((rig.ledger.in_use(), rig.ledger.waiting()), (2, 0));
}

#[test]
fn a_permit_that_is_not_taken_in_time_in_an_outage_is_asked_for_by_the_policy() {
    for (policy, answer) in [
        (OnUnavailable::Local(1), Progress::Admitted),
        (OnUnavailable::Admit, Progress::Admitted),
        (OnUnavailable::Refuse, Progress::Waiting),
    ] {
        let mut rig = Rig::new(1);
        let (limit, now) = (rig.limit, rig.now());
        let index = rig.session.handle_request(limit, with(policy), now).expect("room");
        rig.settle();
        rig.session.handle_unreachable(rig.now());
        rig.pass(3100);
        assert_eq!(rig.progress(index), answer, "{policy:?}");
        let next = rig.request_with(with(policy));
        rig.leave(index);
        let answer = match policy {
            OnUnavailable::Refuse => Progress::Failed,
            _ => Progress::Admitted,
        };
        assert_eq!(rig.progress(next), answer, "{policy:?}");
    }
}

/// A request that stood in the queue, that the server forgot, and that is to join again.
fn rejoins(on_unavailable: OnUnavailable) -> (Rig, usize) {
    let (mut rig, waits) = waiter(with(on_unavailable));
    rig.ledger = Ledger::new();
    rig.other();
    rig.session.set(waits, State::Waiting { ticket: None });
    rig.pass(1000);
    rig.answer();
    let question = rig.session.poll_revocation_check().expect("a question");
    rig.session.handle_revocations_known(question, rig.now());
    (rig, waits)
}

#[test]
fn a_request_that_is_to_join_again_waits_through_an_outage_as_in_the_queue() {
    let (mut rig, waits) = rejoins(OnUnavailable::Refuse);
    rig.session.handle_unreachable(rig.now());
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.reconnect(same_data());
    rig.live(1500);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert!(rig.places().contains(&rig.id(waits)), "it stands in the queue again");
}

#[test]
fn a_request_that_is_to_join_again_waits_on_though_that_is_refused() {
    for (policy, answer) in [
        (OnUnavailable::Refuse, Progress::Waiting),
        (OnUnavailable::Admit, Progress::Admitted),
        (OnUnavailable::Local(1), Progress::Admitted),
    ] {
        let (mut rig, waits) = rejoins(policy);
        let call = rig.call().expect("an acquire");
        assert!(matches!(call.op, Op::Acquire { .. }), "{call:?}");
        let now = rig.now();
        rig.session.handle_call_error(&call.op, now);
        assert_eq!(rig.progress(waits), answer, "{policy:?}");
        if policy == OnUnavailable::Refuse {
            assert_eq!(rig.calls(), [], "not at once");
        }
        rig.live(2500);
        assert!(rig.places().contains(&rig.id(waits)), "{policy:?}");
    }
}

#[test]
fn newcomers_are_sent_though_what_was_to_be_shown_is_gone() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let index = rig.request_with(with(OnUnavailable::Admit));
    assert_eq!(rig.progress(index), Progress::Admitted);
    rig.reconnect(Connected::default());
    // Before anything is sent.
    rig.leave(index);
    while rig.session.urgency().is_some() && rig.session.poll_call(now).is_some() {}
    let next = rig.request();
    rig.settle();
    assert_eq!(rig.progress(next), Progress::Held);
}
