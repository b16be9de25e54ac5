//! Requests wait, and their wait is over.

use super::*;
use crate::bound::Bound;

#[test]
fn a_place_that_no_hint_reaches_polls_and_any_other_asks_each_second() {
    for (poll_only, each) in [(false, 1000), (true, 100)] {
        let mut rig = Rig::new(1);
        rig.reconnect(Connected { poll_only, ..Connected::default() });
        rig.other();
        let waits = rig.request();
        rig.settle();
        assert_eq!(rig.id(waits).poll_only, poll_only);
        rig.pass(each - 1);
        assert_eq!(rig.calls(), [], "{poll_only}");
        rig.pass(1);
        assert!(matches!(rig.settle()[..], [Op::Renew { .. }]), "{poll_only}");
    }
}

#[test]
fn a_waiter_asks_just_after_the_earliest_lease_end() {
    let mut rig = Rig::new(1);
    // Held by a process that is dead; its lease ends in between two renewals.
    let dead = PlaceId { node: OTHER, poll_only: false, n: 77, bound: None, claim: None };
    let caller = rig.ask(OTHER, 1);
    rig.ledger.acquire(caller, 1500, None, &[], &[dead], &mut |_, _| true);
    let waits = rig.request();
    rig.settle();
    rig.live(1490);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.live(30);
    assert_eq!(rig.progress(waits), Progress::Held);
}

#[test]
fn requests_that_leave_before_they_are_sent_leave_no_room_taken() {
    let mut rig = Rig::new(1);
    let (now, limit) = (rig.now(), rig.limit);
    // Nothing is sent: a connection is being opened.
    let request = |rig: &mut Rig| rig.session.handle_request(limit, OPTIONS, now).expect("room");
    let _first = request(&mut rig);
    for _ in 0..1000 {
        let (leaves, _stays) = (request(&mut rig), request(&mut rig));
        let last = request(&mut rig);
        rig.leave(leaves);
        rig.leave(last);
    }
    let places = rig.session.places.len();
    assert_eq!(places, 1001);
    assert!(rig.session.joins.len() <= 2 * places + 16, "{}", rig.session.joins.len());
    for _ in 0..1000 {
        let leaves = request(&mut rig);
        request(&mut rig);
        rig.leave(leaves);
        rig.session.places.iter().map(|(index, _)| index).last().into_iter().for_each(|index| {
            rig.session.handle_leave(index, now);
        });
        assert!(rig.session.joins.len() <= 2 * rig.session.places.len() + 17);
    }
    assert!(rig.session.places.len() < 1100);
}

fn time_out(rig: &mut Rig, index: usize) -> Progress {
    let now = rig.now();
    rig.session.handle_wait_timeout(index, now);
    rig.progress(index)
}

#[test]
fn a_request_in_the_queue_that_waited_long_enough_leaves_it() {
    for on_unavailable in [OnUnavailable::Refuse, OnUnavailable::Admit, OnUnavailable::Local(1)] {
        let (mut rig, waits) = waiter(with(on_unavailable));
        assert!(is_refused(time_out(&mut rig, waits), RejectReason::QueueTimeout));
        assert!(matches!(rig.settle()[..], [Op::Release { .. }]));
        assert_eq!(rig.places().len(), 1);
    }
}

#[test]
fn a_request_without_an_answer_is_answered_by_its_policy() {
    for (on_unavailable, expected) in [
        (OnUnavailable::Refuse, Progress::Failed),
        (OnUnavailable::Admit, Progress::Admitted),
        (OnUnavailable::Local(1), Progress::Admitted),
        (OnUnavailable::Local(0), Progress::Failed),
    ] {
        let mut rig = Rig::new(1);
        let joins = rig.request_with(with(on_unavailable));
        let _unanswered = rig.call().expect("an acquire");
        assert_eq!(rig.progress(joins), Progress::Joining);
        assert_eq!(time_out(&mut rig, joins), expected, "{on_unavailable:?}");
    }
}

#[test]
fn a_request_that_came_back_after_a_loss_still_waits() {
    let (mut rig, waits) = waiter(OPTIONS);
    rig.ledger = Ledger::new();
    // Its renewal finds it gone, and its ticket is not known: it joins once more.
    rig.session.set(waits, State::Waiting { ticket: None });
    rig.pass(1000);
    assert!(matches!(rig.answer().op, Op::Renew { .. }));
    let now = rig.now();
    let question = rig.session.poll_revocation_check().expect("a question");
    rig.session.handle_revocations_known(question, now);
    assert!(matches!(rig.call().expect("an acquire").op, Op::Acquire { .. }));
    assert_eq!(rig.progress(waits), Progress::Waiting, "to its request it waits as before");
    assert!(is_refused(time_out(&mut rig, waits), RejectReason::QueueTimeout));
}

#[test]
fn a_request_that_waited_when_the_backend_went_is_answered_by_its_policy() {
    let (mut rig, waits) = waiter(with(OnUnavailable::Refuse));
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert_eq!(time_out(&mut rig, waits), Progress::Failed);
    // A share of its own is what it waits for now.
    let (mut rig, waits) = waiter(with(OnUnavailable::Local(0)));
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert!(is_refused(time_out(&mut rig, waits), RejectReason::QueueTimeout));
}

#[test]
fn in_an_outage_only_what_waits_for_a_share_seems_to_wait() {
    for (on_unavailable, expected) in
        [(OnUnavailable::Local(0), Progress::Waiting), (OnUnavailable::Refuse, Progress::Failed)]
    {
        let mut rig = Rig::new(1);
        let now = rig.now();
        rig.session.handle_unreachable(now);
        let joins = rig.request_with(with(on_unavailable));
        assert_eq!(rig.progress(joins), expected);
    }
}

#[test]
fn a_request_whose_wait_is_over_has_its_final_answer() {
    let is_final = |progress| !matches!(progress, Progress::Joining | Progress::Waiting);
    let policies = [
        OnUnavailable::Refuse,
        OnUnavailable::Admit,
        OnUnavailable::Local(0),
        OnUnavailable::Local(1),
    ];
    for policy in policies {
        for (sent, answered, outage, back) in
            (0..16).map(|bits: u8| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0, bits & 8 > 0))
        {
            for max_queue in [None, Some(8)] {
                let mut rig = Rig::new(1);
                rig.other();
                let index = rig.request_with(AcquireOptions { max_queue, ..with(policy) });
                if sent {
                    let call = rig.call().expect("an acquire");
                    if answered {
                        let (now, reply) = (rig.now(), rig.carry_out(&call));
                        rig.reply(&call.op, &reply, now);
                    }
                }
                let now = rig.now();
                if outage {
                    rig.session.handle_unreachable(now);
                }
                if back {
                    rig.reconnect(Connected::default());
                }
                rig.session.handle_wait_timeout(index, now);
                let progress = rig.progress(index);
                assert!(
                    is_final(progress),
                    "{policy:?} {sent} {answered} {outage} {back} {progress:?}"
                );
                rig.leave(index);
                rig.reconnect(Connected::default());
                rig.settle();
                assert_eq!(rig.places().len(), 1, "{policy:?} {sent} {answered} {outage} {back}");
            }
        }
    }
}

#[test]
fn a_waiter_asks_each_second_however_long_its_lease_is() {
    let (mut rig, _) = waiter(AcquireOptions { lease: ms(60_000), ..OPTIONS });
    rig.pass(999);
    assert_eq!(rig.session.urgency(), None);
    rig.pass(1);
    assert!(rig.session.urgency().is_some());
}

#[test]
fn whoever_leaves_before_it_is_sent_takes_nobody_along() {
    for leaves in 0..3 {
        let mut rig = Rig::new(3);
        let requests = [(); 3].map(|()| rig.request());
        rig.leave(requests[leaves]);
        rig.settle();
        let granted = requests.map(|index| rig.progress(index) == Progress::Held);
        assert_eq!(granted, [0, 1, 2].map(|n| n != leaves), "{leaves}");
    }
}

#[test]
fn a_newcomer_in_quarantine_asks_when_that_ends() {
    let mut rig = Rig::new(1);
    let quarantine = Quarantine { is_on: true, lost_at: Some(Time::ZERO), ..Quarantine::default() };
    let connected = Connected { quarantine, ..Connected::default() };
    rig.session = Session::new(NODE, 1, connected, false);
    rig.now_ms = 2400;
    rig.request();
    rig.settle();
    assert_eq!(rig.session.poll_timeout(), Some(Time::ZERO + ms(3000)));
}

fn very_many_wait(rig: &mut Rig) {
    for _ in 0..2000 {
        rig.request_with(AcquireOptions { max_queue: Some(10_000), ..OPTIONS });
    }
    rig.settle();
    assert_eq!(rig.session.counts.waiting(), 2000);
}

fn crowd(limit: u32) -> Rig {
    let mut rig = Rig::new(limit);
    for _ in 0..limit {
        rig.other();
    }
    very_many_wait(&mut rig);
    rig
}

fn places_of(calls: &[Op]) -> usize {
    calls.iter().map(Op::places).sum()
}

#[test]
fn one_call_asks_after_a_lease_end_for_all_that_wait() {
    let mut rig = Rig::new(1);
    let dead = PlaceId { node: OTHER, poll_only: false, n: 77, bound: None, claim: None };
    let caller = rig.ask(OTHER, 1);
    rig.ledger.acquire(caller, 500, None, &[], &[dead], &mut |_, _| true);
    very_many_wait(&mut rig);
    rig.pass(502);
    let calls = rig.settle();
    assert_eq!((calls.len(), places_of(&calls)), (1, 1), "{calls:?}");
    assert_eq!(rig.session.counts.in_flight(), 1, "the first has its permit");
}

#[test]
fn lease_ends_at_short_intervals_are_asked_after_together() {
    let mut rig = Rig::new(100);
    for n in 0..100 {
        let dead = PlaceId { node: OTHER, poll_only: false, n, bound: None, claim: None };
        let caller = rig.ask(OTHER, 100);
        rig.ledger.acquire(caller, 200 + 5 * n, None, &[], &[dead], &mut |_, _| true);
    }
    very_many_wait(&mut rig);
    let mut calls = Vec::new();
    for _ in 0..80 {
        rig.pass(10);
        calls.extend(rig.settle());
    }
    assert_eq!(rig.session.counts.in_flight(), 100);
    assert!(calls.len() <= 20, "{} calls in 0.8 s", calls.len());
}

#[test]
fn one_call_asks_for_all_that_wait_when_an_operator_raises_the_limit_or_revokes() {
    let mut rig = crowd(1);
    let now = rig.now();
    rig.session.handle_override(Override::parse("3 open").expect("an override"), now);
    let calls = rig.settle();
    assert_eq!(
        (calls.len(), places_of(&calls), rig.session.counts.in_flight()),
        (1, 1, 2),
        "{calls:?}"
    );

    let mut rig = crowd(1);
    let held = rig.places().into_iter().find(|id| id.node == OTHER).expect("held");
    let now = rig.now();
    rig.ledger.revoke(held, true, (EPOCH_MS + rig.now_ms) * 1000);
    rig.session.handle_revoked(held, now);
    let calls = rig.settle();
    assert_eq!(
        (calls.len(), places_of(&calls), rig.session.counts.in_flight()),
        (1, 1, 1),
        "{calls:?}"
    );
}

// ===== several limits in one process =====

#[test]
fn a_call_that_frees_permits_goes_up_to_the_highest_limit_that_waits() {
    let mut rig = Rig::new(10);
    let held: Vec<_> = (0..10).map(|_| rig.request()).collect();
    rig.settle();
    for index in &held {
        assert_eq!(rig.progress(*index), Progress::Held);
    }
    let waits = rig.request();
    rig.settle();
    rig.limit = 8;
    let refused = rig.request_with(AcquireOptions { max_queue: None, ..OPTIONS });
    rig.settle();
    assert!(is_refused(rig.progress(refused), RejectReason::Limit));
    rig.leave(refused);
    rig.leave(held[0]);
    // With a newcomer that knows the lower limit, the permits are freed by a call of their own.
    let newcomer = rig.request();
    let calls = rig.settle();
    assert!(matches!(&calls[..], [Op::Release { .. }, Op::Acquire { .. }]), "{calls:?}");
    assert_eq!(rig.progress(waits), Progress::Held);
    assert_eq!(rig.progress(newcomer), Progress::Waiting);
}

#[test]
fn the_id_of_a_place_says_what_it_is_judged_by_if_it_may_wait() {
    let mut rig = Rig::new(3);
    let waits = rig.request_with(AcquireOptions { headroom: 2, ..OPTIONS });
    let bound = |rig: &Rig, index| rig.id(index).bound;
    assert_eq!(
        bound(&rig, waits),
        Some(Bound { limit: 3, headroom: 0, rate: None }),
        "no class, no headroom"
    );
    let claim = Some(Claim::new(Tenant::of_hash(1)));
    let fair = rig.request_with(AcquireOptions { headroom: 2, claim, ..OPTIONS });
    assert_eq!(bound(&rig, fair), Some(Bound { limit: 3, headroom: 2, rate: None }));
    let never = rig.request_with(AcquireOptions { max_queue: None, ..OPTIONS });
    assert_eq!(bound(&rig, never), None);
    // An operator's limit counts for all, and leaves ids as they are.
    let now = rig.now();
    rig.session.handle_override(Override::parse("1 open").expect("an override"), now);
    assert_eq!(bound(&rig, waits), Some(Bound { limit: 3, headroom: 0, rate: None }));
    let call = rig.call().expect("a call");
    assert_eq!((call.limit, call.for_all), (1, true));
}

#[test]
fn a_permit_freed_under_a_lower_limit_goes_to_the_head_at_once() {
    let mut rig = Rig::new(2);
    let held: Vec<_> = (0..2).map(|_| rig.request()).collect();
    rig.settle();
    for index in &held {
        assert_eq!(rig.progress(*index), Progress::Held);
    }
    let caller = Caller { limit: 10, ..rig.ask(OTHER, 10) };
    let bound = Some(Bound { limit: 10, headroom: 0, rate: None });
    let ids = [1, 2, 3, 4, 5, 6, 7, 8, 9].map(|n| PlaceId {
        node: OTHER,
        poll_only: false,
        n,
        bound,
        claim: None,
    });
    rig.ledger.acquire(caller, 60_000, Some(100), &[], &ids, &mut |_, _| true);
    assert_eq!(rig.ledger.waiting(), 1);
    rig.leave(held[0]);
    rig.settle();
    assert_eq!((rig.ledger.in_use(), rig.ledger.waiting()), (10, 0), "nine, and one of two");
}
