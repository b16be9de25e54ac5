//! The server may have lost data: what is shown, asked and released before newcomers have permits.

use super::*;

#[test]
fn newcomers_wait_until_it_is_known_what_became_of_the_places() {
    let mut rig = Rig::new(1);
    let holder = rig.request();
    rig.settle();
    rig.progress(holder);
    let newcomer = rig.request();
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    let calls = rig.calls();
    assert!(matches!(&calls[..], [Call { op: Op::Renew { .. }, .. }]), "{calls:?}");
    let (now, reply) = (rig.now(), rig.carry_out(&calls[0]));
    rig.reply(&calls[0].op, &reply, now);
    // Lost or revoked? Until that is known, no proof is shown.
    let question = rig.session.poll_revocation_check().expect("a question");
    assert_eq!(rig.session.poll_revocation_check(), None);
    assert_eq!(rig.calls(), []);
    rig.session.handle_revocations_known(question, now);
    let ops = rig.settle();
    assert!(matches!(&ops[..], [Op::Reassert { .. }, Op::Acquire { .. }]), "{ops:?}");
    assert!(rig.session.is_held(holder));
    assert_eq!(rig.progress(newcomer), Progress::Waiting);
}

#[test]
fn newcomers_wait_though_what_is_to_be_known_is_refused() {
    let mut rig = Rig::new(1);
    // After a second it is not due yet.
    let lease = Duration::from_secs(9);
    let holder = rig.request_with(AcquireOptions { lease, ..OPTIONS });
    rig.settle();
    rig.progress(holder);
    let newcomer = rig.request();
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    for _ in 0..2 {
        let calls = rig.calls();
        assert!(matches!(&calls[..], [Call { op: Op::Renew { .. }, .. }]), "{calls:?}");
        rig.session.handle_call_error(&calls[0].op, rig.now());
        assert_eq!(rig.calls(), [], "not at once, and no newcomer");
        rig.pass(1000);
    }
    rig.settle();
    assert!(rig.session.is_held(holder));
    assert_eq!((rig.progress(newcomer), rig.ledger.in_use()), (Progress::Waiting, 1));
}

#[test]
fn a_waiter_that_the_server_lost_comes_back_under_a_new_id_with_its_ticket() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let before = rig.id(index);
    let ticket = rig.ledger.places().find_map(|(id, _, ticket)| ticket.filter(|_| id == before));
    rig.ledger = Ledger::new();
    rig.limit = 0;
    let now = rig.now();
    rig.session.handle_override(Override::parse("- paused").expect("an override"), now);
    rig.reconnect(Connected::default());
    rig.settle();
    let after = rig.id(index);
    assert_ne!(before, after);
    assert_eq!(
        rig.ledger.places().map(|(id, _, t)| (id, t)).collect::<Vec<_>>(),
        [(after, ticket)]
    );
}

#[test]
fn what_stands_there_unknown_after_a_loss_of_data_is_released() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    // A replica that has heard of the grant and not of the release.
    let replica = rig.ledger.clone();
    rig.leave(index);
    rig.settle();
    rig.ledger = replica;
    rig.pass(500);
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    assert!(matches!(&ops[..], [Op::Audit { .. }, Op::Release { .. }]), "{ops:?}");
    assert_eq!(rig.places(), []);
    // Not where the data is the same.
    rig.reconnect(Connected { same_data: true, ..Connected::default() });
    assert_eq!(rig.settle(), []);
}

#[test]
fn in_quarantine_no_call_has_permits() {
    let lost_at = Some(Time::ZERO);
    let quarantine = Quarantine { is_on: true, lost_at, ..Quarantine::default() };
    let mut rig = Rig::new(1);
    rig.session = Session::new(NODE, 1, Connected { quarantine, ..Connected::default() }, false);
    let index = rig.request();
    assert_eq!(rig.call().map(|call| call.limit), Some(0));
    rig = Rig::new(1);
    rig.session = Session::new(NODE, 1, Connected { quarantine, ..Connected::default() }, false);
    let again = rig.request();
    assert_eq!(index, again);
    rig.live(2990);
    assert_eq!(rig.progress(again), Progress::Waiting);
    rig.live(20);
    assert_eq!(rig.progress(again), Progress::Held);
}

#[test]
fn a_request_that_a_quarantine_refuses_is_told_so_unless_it_were_refused_anyway() {
    let quarantine =
        Quarantine { is_on: true, at_least: Duration::ZERO, lost_at: Some(Time::ZERO) };
    let connected = Connected { quarantine, ..Connected::default() };
    let mut rig = Rig::new(1);
    rig.session = Session::new(NODE, 1, connected, false);
    let none = AcquireOptions { max_queue: None, ..OPTIONS };
    let (waits, tries) = (rig.request(), rig.request_with(none));
    rig.settle();
    let Progress::Refused { reason: RejectReason::Quarantine, ends_in, .. } = rig.progress(tries)
    else {
        panic!("{:?}", rig.progress(tries));
    };
    assert_eq!(ends_in, Some(OPTIONS.lease));
    let full = rig.request_with(AcquireOptions { max_queue: Some(1), ..OPTIONS });
    rig.settle();
    assert!(is_refused(rig.progress(full), RejectReason::Quarantine));
    let now = rig.now();
    rig.session.handle_wait_timeout(waits, now);
    assert!(is_refused(rig.progress(waits), RejectReason::Quarantine));
    rig.settle();

    // A holder was counted again.
    let other = rig.other();
    let (waits, tries) = (rig.request(), rig.request_with(none));
    rig.settle();
    assert!(is_refused(rig.progress(tries), RejectReason::Limit));
    rig.session.handle_wait_timeout(waits, now);
    assert!(is_refused(rig.progress(waits), RejectReason::QueueTimeout));
    rig.settle();
    rig.other_leaves(other);

    // An operator admits nobody: that is no quarantine.
    rig.session.handle_override(Override { limit: Some(0), ..Override::default() }, now);
    let tries = rig.request_with(none);
    rig.settle();
    assert!(is_refused(rig.progress(tries), RejectReason::Limit));
    rig.session.handle_override(Override::default(), now);

    // It is over.
    let _other = rig.other();
    rig.live(3000);
    let tries = rig.request_with(none);
    rig.settle();
    assert!(is_refused(rig.progress(tries), RejectReason::Limit));
}

#[test]
fn what_an_audit_finds_and_the_session_knows_stays() {
    let mut rig = Rig::new(3);
    let (left, stays) = (rig.request(), rig.request());
    rig.settle();
    rig.leave(left);
    rig.settle();
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    assert!(ops.iter().any(|op| matches!(op, Op::Audit { .. })), "{ops:?}");
    assert!(!ops.iter().any(|op| matches!(op, Op::Release { .. })), "{ops:?}");
    assert_eq!(rig.places(), [rig.id(stays)]);
}

#[test]
fn after_a_loss_of_data_what_is_held_is_counted_before_newcomers_are() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    let newcomer = rig.request();
    let sent = rig.settle();
    let kinds: Vec<_> = sent.iter().map(std::mem::discriminant).collect();
    let renews = std::mem::discriminant(&Op::Renew { lease_ms: 0, ids: Ids::new() });
    let proves = std::mem::discriminant(&Op::Reassert { lease_ms: 0, proofs: Vec::new() });
    assert_eq!(kinds[..2], [renews, proves], "{sent:?}");
    assert_eq!(rig.progress(held), Progress::Held);
    assert_eq!(rig.progress(newcomer), Progress::Waiting);
    assert_eq!(rig.ledger.in_use(), 1);
}

#[test]
fn what_a_failover_brought_back_is_released_once_more() {
    let mut rig = Rig::new(2);
    let (kept, left) = (rig.request(), rig.request());
    rig.settle();
    let before = rig.ledger.clone();
    rig.leave(left);
    rig.settle();
    rig.ledger = before;
    rig.reconnect(Connected::default());
    rig.settle();
    assert_eq!(rig.places(), [rig.id(kept)]);
}

#[test]
fn a_new_connection_does_not_end_a_quarantine_early() {
    let mut rig = Rig::new(1);
    let began = Some(rig.now());
    let quarantine = |lost_at| Quarantine { is_on: true, lost_at, ..Quarantine::default() };
    rig.reconnect(Connected { quarantine: quarantine(began), ..same_data() });
    rig.pass(60_000);
    let held = rig.request();
    rig.settle();
    rig.ledger = Ledger::new();
    rig.live(1100);
    assert_eq!(rig.progress(held), Progress::Held);
    rig.reconnect(Connected { quarantine: quarantine(began), ..same_data() });
    rig.request();
    let joins = rig.calls();
    assert!(joins.iter().all(|call| call.limit == 0), "{joins:?}");
}

#[test]
fn a_place_that_was_revoked_before_it_was_taken_is_looked_for_after_a_failover() {
    let mut rig = Rig::new(2);
    let (limit, now) = (rig.limit, rig.now());
    let index = rig.session.handle_request(limit, OPTIONS, now).expect("room");
    rig.settle();
    let (before, id) = (rig.ledger.clone(), rig.id(index));
    rig.session.handle_revoked(id, now);
    rig.settle();
    rig.leave(index);
    rig.ledger = before;
    rig.reconnect(Connected::default());
    rig.settle();
    assert!(rig.ledger.is_empty());
}

#[test]
fn an_audit_is_made_only_of_other_data_and_only_after_something_left() {
    for (left, same_data, audits) in
        [(true, true, false), (true, false, true), (false, false, false), (false, true, false)]
    {
        let mut rig = Rig::new(2);
        let index = rig.request();
        rig.settle();
        rig.progress(index);
        if left {
            let leaves = rig.request();
            rig.settle();
            rig.leave(leaves);
            rig.settle();
        }
        rig.reconnect(Connected { same_data, ..Connected::default() });
        let ops = rig.settle();
        let audited = ops.iter().any(|op| matches!(op, Op::Audit { .. }));
        assert_eq!(audited, audits, "{left} {same_data}: {ops:?}");
    }
}

#[test]
fn an_audit_releases_what_is_unknown_and_no_release_that_is_on_its_way_again() {
    let mut rig = Rig::new(4);
    let (first, second) = (rig.request(), rig.request());
    rig.settle();
    let (one, two) = (rig.id(first), rig.id(second));
    rig.leave(first);
    rig.settle();
    rig.leave(second);
    rig.call().expect("the release of the second");
    let now = rig.now();
    let found = Reply { found: vec![one, two], ..Reply::default() };
    rig.session.handle_reply(&Op::Audit { most: 10 }, &found, Sending::at(now), now);
    let calls: Vec<_> = rig.calls().into_iter().map(|call| call.op).collect();
    assert_eq!(calls, [Op::Release { ids: smallvec![one] }]);
}

#[test]
fn waiters_ask_when_the_quarantine_ends_and_not_before() {
    let mut rig = Rig::new(1);
    let before = rig.request();
    rig.settle();
    rig.leave(before);
    rig.settle();
    rig.pass(100);
    let quarantine = Quarantine { is_on: true, lost_at: Some(Time::ZERO), ..Quarantine::default() };
    rig.reconnect(Connected { quarantine, ..same_data() });
    // Sooner than the waiter would ask anyway.
    rig.live(2300);
    let waits = rig.request();
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.pass(599);
    assert_eq!(rig.session.urgency(), None);
    rig.pass(1);
    assert!(rig.session.urgency().is_some(), "the quarantine is over");
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Held);
}

#[test]
fn nobody_asks_when_a_quarantine_ends_that_nobody_waits_in() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    rig.live(900);
    let quarantine =
        Quarantine { is_on: true, lost_at: Some(Time::ZERO + ms(500)), ..Quarantine::default() };
    rig.reconnect(Connected { quarantine, ..same_data() });
    rig.live(2590);
    rig.pass(20);
    assert_eq!(rig.session.urgency(), None);
}

#[test]
fn what_is_not_known_of_lost_data_is_asked_over_the_next_connection_too() {
    for (is_sent, is_away) in [(false, false), (true, false), (true, true)] {
        let mut rig = Rig::new(1);
        let held = rig.request();
        rig.settle();
        rig.progress(held);
        rig.ledger = Ledger::new();
        rig.reconnect(Connected::default());
        if is_sent {
            let renewal = rig.call().expect("a renewal");
            rig.session.handle_unanswered(&renewal.op);
            assert_eq!(rig.session.urgency(), Some(Urgency::Before(Time::ZERO + ms(2999))));
        }
        if is_away {
            rig.session.handle_unreachable(rig.now());
        }
        rig.reconnect(same_data());
        let newcomer = rig.request();
        rig.settle();
        assert!(rig.session.is_held(held));
        assert_eq!(rig.progress(newcomer), Progress::Waiting, "{is_sent} {is_away}");
    }
}

#[test]
fn what_a_failover_brought_back_is_looked_for_until_there_is_an_answer() {
    for breaks in 0..4 {
        let mut rig = Rig::new(1);
        let index = rig.request();
        rig.settle();
        let replica = rig.ledger.clone();
        rig.leave(index);
        rig.settle();
        rig.ledger = replica;
        rig.reconnect(Connected::default());
        if breaks > 0 {
            let audit = rig.call().expect("an audit");
            if breaks < 3 {
                rig.session.handle_unanswered(&audit.op);
            }
        }
        if breaks > 1 {
            rig.session.handle_unreachable(rig.now());
            assert!(!rig.session.is_busy(), "the record is not kept for it");
        }
        rig.reconnect(same_data());
        rig.settle();
        assert_eq!(rig.places(), [], "{breaks}");
    }
}

#[test]
fn what_a_failover_brought_back_is_looked_for_again_if_that_is_refused() {
    for refused in [2, 100] {
        let mut rig = Rig::new(1);
        let index = rig.request();
        rig.settle();
        let replica = rig.ledger.clone();
        rig.leave(index);
        rig.settle();
        rig.ledger = replica;
        rig.reconnect(Connected::default());
        let mut asked = 0;
        for _ in 0..100 {
            for call in rig.calls() {
                asked += u32::from(matches!(call.op, Op::Audit { .. }));
                if asked <= refused {
                    rig.session.handle_call_error(&call.op, rig.now());
                } else {
                    let reply = rig.carry_out(&call);
                    rig.reply(&call.op, &reply, rig.now());
                }
            }
            rig.pass(100);
        }
        rig.settle();
        // Each second, as long as it can be of use.
        assert_eq!(asked, if refused == 2 { 3 } else { 6 });
        assert_eq!(rig.places().is_empty(), refused == 2);
        assert!(!rig.session.is_busy() && rig.session.is_over(rig.now()));
    }
}

#[test]
fn the_old_id_of_a_waiter_that_a_failover_brought_back_is_released() {
    let (mut rig, waits) = waiter(OPTIONS);
    let replica = rig.ledger.clone();
    let old = rig.id(waits);
    rig.ledger.revoke(old, true, EPOCH_MS * 1000);
    rig.pass(1000);
    rig.settle();
    assert_ne!(rig.id(waits), old);
    rig.ledger = replica;
    rig.reconnect(Connected::default());
    rig.settle();
    let places = rig.places();
    assert!(places.contains(&rig.id(waits)) && !places.contains(&old), "{places:?}");
}
