//! Hints, refusals, proofs, and what a session tells of its places.

use super::*;
use crate::ledger::Hint;

#[test]
fn a_hint_that_comes_before_the_answer_is_kept_until_then() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = rig.carry_out(&call);
    let hint = rig.other_leaves(other)[0];
    rig.hint(hint);
    assert_eq!(rig.progress(index), Progress::Joining);
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn a_hint_of_an_earlier_stay_is_not_believed() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let (n, now) = (rig.id(index).n, rig.now());
    rig.session.handle_hint(Hint { n, bound: None, claim: None, lease_end: EPOCH_MS + 2999 }, now);
    assert_eq!(rig.progress(index), Progress::Waiting);
    rig.session.handle_hint(Hint { n, bound: None, claim: None, lease_end: EPOCH_MS + 3000 }, now);
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn a_hint_for_a_place_that_is_unknown_releases_it() {
    let mut rig = Rig::new(1);
    let stranger = PlaceId { node: NODE, poll_only: false, n: 77, bound: None, claim: None };
    rig.hint(Grant { id: stranger, lease_end: EPOCH_MS + 3000 });
    assert!(!rig.session.is_idle());
    assert_eq!(rig.settle(), [Op::Release { ids: smallvec![stranger] }]);
    assert!(rig.session.is_idle());
    rig.pass(5000);
    assert!(rig.is_over());
}

#[test]
fn a_refusal_tells_what_was_full_and_how_full() {
    let mut rig = Rig::new(1);
    rig.other();
    let none = rig.request_with(AcquireOptions { max_queue: None, ..OPTIONS });
    rig.settle();
    let limit = RejectReason::Limit;
    let seen = Progress::Refused {
        reason: limit,
        full: None,
        usage: Some(Usage { in_use: 1, waiting: 0 }),
        limit: None,
        rate: None,
        is_tenant_full: false,
        ends_in: None,
        ahead: Some(0),
        expected_wait: None,
        rate_wait: Duration::ZERO,
    };
    assert_eq!(rig.progress(none), seen);
    let waits = rig.request_with(AcquireOptions { max_queue: Some(1), ..OPTIONS });
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Waiting);
    let full = rig.request_with(AcquireOptions { max_queue: Some(1), ..OPTIONS });
    rig.settle();
    let reason = RejectReason::QueueFull;
    let seen = Progress::Refused {
        reason,
        full: None,
        usage: Some(Usage { in_use: 1, waiting: 1 }),
        limit: None,
        rate: None,
        is_tenant_full: false,
        ends_in: None,
        ahead: Some(1),
        expected_wait: None,
        rate_wait: Duration::ZERO,
    };
    assert_eq!(rig.progress(full), seen);
}

#[test]
fn a_proof_that_is_refused_costs_a_permit_and_a_waiter_asks_again() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    let waits = rig.request();
    rig.settle();
    let (ids, now) = ([held, waits].map(|index| rig.id(index)), rig.now());
    let op = Op::Reassert { lease_ms: 3000, proofs: ids.map(|id| (id, 1)).into() };
    let statuses = smallvec![PlaceStatus::Gone, PlaceStatus::Gone];
    rig.session.handle_reply(&op, &Reply { statuses, ..Reply::default() }, Sending::at(now), now);
    assert!(rig.session.is_lost(held, now));
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert!(rig.calls().iter().any(|call| matches!(call.op, Op::Renew { .. })));
}

#[test]
fn a_waiter_learns_its_new_ticket_and_keeps_its_lease() {
    let (mut rig, waits) = waiter(OPTIONS);
    rig.live(4000);
    // Renewed each second, it has outlived its first lease.
    assert_eq!(rig.progress(waits), Progress::Waiting);
    let before = rig.id(waits);
    let ticket = rig.ledger.places().find(|(id, ..)| *id == before).and_then(|(.., ticket)| ticket);
    // The server loses everything: it shows its ticket, and has its turn.
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    let shown = ops.iter().find_map(|op| match op {
        Op::Reassert { proofs, .. } => proofs.first().map(|(_, proof)| *proof),
        _ => None,
    });
    assert_eq!(shown, ticket, "{ops:?}");
}

#[test]
fn a_place_that_is_brought_back_is_not_renewed_before_that_is_answered() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    assert!(matches!(rig.answer().op, Op::Renew { .. }));
    let question = rig.session.poll_revocation_check().expect("a question");
    // Due meanwhile.
    rig.pass(1100);
    assert_eq!(rig.calls(), [], "a renewal would only find it gone once more");
    let now = rig.now();
    rig.session.handle_revocations_known(question, now);
    assert!(matches!(rig.settle()[..], [Op::Reassert { .. }, ..]));
    // After that it is renewed as before.
    rig.live(1100);
    assert!(!rig.session.is_lost(held, rig.now()));
    rig.live(4000);
    assert!(!rig.session.is_lost(held, rig.now()));
    assert_eq!(rig.places(), [rig.id(held)]);
}

#[test]
fn a_session_tells_for_how_long_its_permits_have_been_held() {
    let mut rig = Rig::new(2);
    let first = rig.request();
    rig.settle();
    rig.pass(300);
    let second = rig.request();
    let waits = rig.request();
    rig.settle();
    rig.pass(200);
    let (now, ids) = (rig.now(), [first, second, waits].map(|index| rig.id(index)));
    let held = ids.map(|id| rig.session.held_for(id, now));
    assert_eq!(held, [Some(ms(500)), Some(ms(200)), None]);
    let unknown = PlaceId { n: ids[0].n + (1 << 20), ..ids[0] };
    assert_eq!(rig.session.held_for(unknown, now), None, "another stay at the same index");
    assert_eq!(rig.session.held_since(now, 9), [(ids[0].n, 500), (ids[1].n, 200)]);
    assert_eq!(rig.session.held_since(now, 1), [(ids[0].n, 500)]);
    assert_eq!([first, second, waits].map(|index| rig.session.is_held(index)), [true, true, false]);
}

#[test]
fn a_lost_permit_was_held_and_is_lost() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert!(rig.session.is_in_use());
    rig.pass(3000);
    let now = rig.now();
    assert!(rig.session.is_held(index) && rig.session.is_lost(index, now));
    assert!(rig.session.is_known_lost(index));
    assert!(!rig.session.is_in_use());
}

#[test]
fn the_next_session_of_a_name_uses_no_number_again() {
    let mut rig = Rig::new(1);
    let serial = rig.session.serial();
    let index = rig.request();
    let n = rig.id(index).n;
    assert!(rig.session.serial() > serial);
    let next = Session::new(NODE, rig.session.serial(), Connected::default(), false);
    rig.session = next;
    let index = rig.request();
    assert_ne!(rig.id(index).n, n);
    assert_eq!(places::index_of(n), 0);
    assert!(serial_of(rig.id(index).n) > serial_of(n));
}

#[test]
fn a_hint_kept_until_the_answer_counts_from_the_lease_end_that_it_names() {
    for (earlier, held) in [(1, false), (0, true)] {
        let mut rig = Rig::new(1);
        rig.other();
        let index = rig.request();
        let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
        let reply = rig.carry_out(&call);
        let hint = Grant { id: rig.id(index), lease_end: reply.lease_end - earlier };
        rig.hint(hint);
        rig.reply(&call.op, &reply, sent);
        assert_eq!(rig.progress(index) == Progress::Held, held, "{earlier} ms earlier");
    }
}

#[test]
fn a_reply_in_short_leaves_what_was_seen() {
    let mut rig = Rig::new(1);
    rig.other();
    let waits = rig.request();
    rig.settle();
    let now = rig.now();
    rig.reply(&Op::Release { ids: Ids::new() }, &Reply::default(), now);
    rig.session.handle_wait_timeout(waits, now);
    let reason = RejectReason::QueueTimeout;
    let seen = Progress::Refused {
        reason,
        full: None,
        usage: Some(Usage { in_use: 1, waiting: 1 }),
        limit: None,
        rate: None,
        is_tenant_full: false,
        ends_in: None,
        ahead: Some(0),
        expected_wait: None,
        rate_wait: Duration::ZERO,
    };
    assert_eq!(rig.progress(waits), seen);
}

#[test]
fn a_waiter_asks_early_only_if_it_was_told_of_a_lease_end() {
    let (mut rig, _) = waiter(OPTIONS);
    let now = rig.now();
    rig.session.handle_timeout(now);
    let before = rig.session.poll_timeout();
    rig.reply(&Op::Renew { lease_ms: 3000, ids: Ids::new() }, &Reply::default(), now);
    assert_eq!(rig.session.poll_timeout(), before);
    // And a holder does not care.
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    let earliest = EPOCH_MS + 100;
    let lease_end = EPOCH_MS + 3000;
    let reply = Reply {
        lease_end,
        earliest,
        usage: Some(Usage { in_use: 1, waiting: 1 }),
        ..Reply::default()
    };
    let before = rig.session.poll_timeout();
    rig.reply(&Op::Renew { lease_ms: 3000, ids: Ids::new() }, &reply, now);
    assert_eq!(rig.session.poll_timeout(), before);
    rig.session.handle_timeout(now);
    assert_eq!(rig.session.poll_timeout(), before);
    rig.pass(103);
    assert_eq!(rig.session.urgency(), None);
}

#[test]
fn a_late_reply_to_what_is_waited_for_changes_nothing_and_to_what_is_over_releases() {
    let mut rig = Rig::new(1);
    rig.other();
    let waits = rig.request();
    let (call, now) = (rig.call().expect("an acquire"), rig.now());
    let reply = rig.carry_out(&call);
    rig.reply(&call.op, &reply, now);
    rig.session.handle_reply(&call.op, &reply, Sending::at(now).late(true), now);
    assert_eq!(rig.calls(), []);
    let id = rig.id(waits);
    rig.session.handle_wait_timeout(waits, now);
    rig.settle();
    // Not a late one: its release is carried out behind it.
    rig.session.handle_reply(&call.op, &reply, Sending::at(now), now);
    assert_eq!(rig.calls(), []);
    rig.session.handle_reply(&call.op, &reply, Sending::at(now).late(true), now);
    let ops: Vec<_> = rig.calls().into_iter().map(|call| call.op).collect();
    assert_eq!(ops, [Op::Release { ids: smallvec![id] }]);
    // Nor is there anything to release where it was refused.
    let refused = Reply { statuses: smallvec![PlaceStatus::QueueFull], ..reply };
    rig.session.handle_reply(&call.op, &refused, Sending::at(now).late(true), now);
    assert_eq!(rig.calls(), []);
}

#[test]
fn a_flood_of_hints_for_unknown_places_is_bounded() {
    let mut rig = Rig::new(3);
    for _ in 0..3 {
        rig.request();
    }
    rig.settle();
    for n in 0..2000 {
        let id =
            PlaceId { node: NODE, poll_only: false, n: (1 << 50) + n, bound: None, claim: None };
        rig.hint(Grant { id, lease_end: EPOCH_MS + 3000 });
    }
    let released = rig.settle().iter().map(Op::places).sum::<usize>();
    assert_eq!(released, 1003);
}

#[test]
fn the_proof_of_a_waiter_is_the_ticket_that_it_was_told_last() {
    let (mut rig, waits) = waiter(OPTIONS);
    rig.pass(1000);
    let renewal = rig.call().expect("a renewal");
    let (mut reply, now) = (rig.carry_out(&renewal), rig.now());
    reply.statuses = smallvec![PlaceStatus::Waiting(1_800_000_000_000_001)];
    rig.reply(&renewal.op, &reply, now);
    let proof = rig.proof_after_a_loss();
    let proofs = vec![(rig.id(waits), 1_800_000_000_000_001)];
    assert_eq!(proof.op, Op::Reassert { lease_ms: 3000, proofs });
}

#[test]
fn a_waiter_asks_just_after_the_earliest_lease_end_that_it_was_told() {
    let (mut rig, _) = waiter(OPTIONS);
    let (lease_end, earliest, now) = (EPOCH_MS + 3000, EPOCH_MS + 100, rig.now());
    let reply = Reply {
        lease_end,
        earliest,
        usage: Some(Usage { in_use: 1, waiting: 1 }),
        ..Reply::default()
    };
    rig.reply(&Op::Renew { lease_ms: 3000, ids: Ids::new() }, &reply, now);
    assert_eq!(rig.session.poll_timeout(), Some(now + ms(102)));
}
