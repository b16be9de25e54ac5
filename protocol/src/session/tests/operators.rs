//! What operators set and revoke.

use super::*;
use crate::claim::Tenant;

#[test]
fn a_revoked_permit_is_lost_and_a_revoked_waiter_refused() {
    let mut rig = Rig::new(1);
    let holder = rig.request();
    rig.settle();
    rig.progress(holder);
    let waiter = rig.request();
    rig.settle();
    let (held, waits, now) = (rig.id(holder), rig.id(waiter), rig.now());
    rig.session.handle_revoked(waits, now);
    assert!(is_refused(rig.progress(waiter), RejectReason::Revoked));
    rig.session.handle_revoked(held, now);
    assert!(rig.session.is_known_lost(holder));
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_waiter_that_was_revoked_under_its_old_id_is_refused() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let id = rig.id(index);
    rig.ledger.revoke(id, true, EPOCH_MS * 1000);
    rig.pass(1000);
    assert!(matches!(rig.answer().op, Op::Renew { .. }));
    let now = rig.now();
    let question = rig.session.poll_revocation_check().expect("a question");
    rig.session.handle_revoked(id, now);
    rig.session.handle_revocations_known(question, now);
    assert!(is_refused(rig.progress(index), RejectReason::Revoked));
    rig.settle();
    assert_eq!(rig.places().len(), 1);
}

#[test]
fn waiters_ask_at_once_for_more_permits() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let now = rig.now();
    rig.session.handle_override(Override::parse("2 open").expect("an override"), now);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert_eq!(rig.session.limit_in_force(), 2);
}

#[test]
fn no_more_permits_are_no_reason_to_ask() {
    let mut rig = Rig::new(2);
    rig.other();
    rig.other();
    rig.request();
    rig.settle();
    let now = rig.now();
    for limit in [2, 1] {
        let set = Override { limit: Some(limit), ..Override::default() };
        rig.session.handle_override(set, now);
        assert_eq!(rig.session.urgency(), None, "{limit}");
    }
}

#[test]
fn more_permits_are_no_reason_to_ask_where_nobody_waits_any_more() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    let waits = rig.request();
    rig.settle();
    rig.progress(held);
    rig.leave(waits);
    rig.settle();
    let now = rig.now();
    rig.session.handle_override(Override::parse("2 open").expect("an override"), now);
    assert_eq!(rig.session.urgency(), None);
    rig.session.handle_revoked(
        PlaceId { node: OTHER, poll_only: false, n: 1, bound: None, claim: None },
        now,
    );
    assert_eq!(rig.session.urgency(), None);
}

#[test]
fn more_permits_are_given_out_in_an_outage_too() {
    let mut rig = Rig::new(3);
    let now = rig.now();
    rig.session.handle_override(Override::parse("1 open").expect("an override"), now);
    rig.session.handle_unreachable(now);
    let requests = [(); 3].map(|()| rig.request_with(with(OnUnavailable::Local(3))));
    let seen = requests.map(|index| rig.progress(index));
    assert_eq!(seen, [Progress::Admitted, Progress::Waiting, Progress::Waiting]);
    rig.session.handle_override(Override::parse("2 open").expect("an override"), now);
    let seen = requests.map(|index| rig.progress(index));
    assert_eq!(seen, [Progress::Admitted, Progress::Admitted, Progress::Waiting]);
}

#[test]
fn a_request_that_is_not_answered_yet_can_be_revoked() {
    let mut rig = Rig::new(1);
    let joins = rig.request();
    let (id, now) = (rig.id(joins), rig.now());
    rig.session.handle_revoked(PlaceId { node: OTHER, ..id }, now);
    assert_eq!(rig.progress(joins), Progress::Joining);
    rig.session.handle_revoked(id, now);
    assert!(is_refused(rig.progress(joins), RejectReason::Revoked));
}

#[test]
fn a_place_that_is_found_gone_after_the_question_waits_for_the_next_answer() {
    let mut rig = Rig::new(2);
    let (one, two) = (rig.request(), rig.request());
    rig.settle();
    rig.progress(one);
    rig.progress(two);
    let (first, second) = (rig.id(one), rig.id(two));
    let gone = Reply { statuses: smallvec![PlaceStatus::Gone], ..Reply::default() };
    let renew = |id| Op::Renew { lease_ms: 3000, ids: smallvec![id] };
    rig.pass(100);
    let now = rig.now();
    rig.reply(&renew(first), &gone, now);
    let question = rig.session.poll_revocation_check().expect("a question");
    // An operator revokes the second, whose renewal is answered before the question is.
    rig.reply(&renew(second), &gone, now);
    let next = rig.session.poll_revocation_check().expect("a question");
    let proofs = |rig: &mut Rig| {
        let ops = rig.calls().into_iter().map(|call| call.op);
        ops.flat_map(|op| match op {
            Op::Reassert { proofs, .. } => proofs.into_iter().map(|(id, _)| id).collect(),
            _ => Vec::new(),
        })
        .collect::<Vec<_>>()
    };
    rig.session.handle_revocations_known(question, now);
    assert_eq!(proofs(&mut rig), [first]);
    rig.session.handle_revoked(second, now);
    rig.session.handle_revocations_known(next, now);
    assert_eq!(proofs(&mut rig), []);
    assert!(rig.session.is_known_lost(two));
}

#[test]
fn waiters_ask_for_what_a_revocation_frees_elsewhere() {
    let (mut rig, _) = waiter(OPTIONS);
    let now = rig.now();
    rig.session.handle_revoked(
        PlaceId { node: OTHER, poll_only: false, n: 1, bound: None, claim: None },
        now,
    );
    assert!(rig.session.urgency().is_some());
}

#[test]
fn a_request_that_has_not_taken_its_permit_is_refused_when_that_is_revoked() {
    let mut rig = Rig::new(1);
    let (limit, now) = (rig.limit, rig.now());
    let index = rig.session.handle_request(limit, OPTIONS, now).expect("room");
    rig.settle();
    let id = rig.id(index);
    rig.session.handle_revoked(id, now);
    assert!(!rig.session.is_known_lost(index));
    assert!(is_refused(rig.progress(index), RejectReason::Revoked));
}

#[test]
fn a_pause_grants_nothing_before_its_end_and_keeps_the_turns() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    let waits = rig.request();
    rig.settle();
    let (now, until) = (rig.now(), rig.now() + ms(5000));
    rig.session.handle_pause(Some(until), now);
    rig.leave(held);
    let newcomer = rig.request();
    rig.live(4990);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert_eq!(rig.session.limit_in_force(), 0);
    rig.live(10);
    assert_eq!(rig.session.paused_until(), None);
    assert_eq!(rig.progress(waits), Progress::Held, "at the end, not at the next renewal");
    assert_eq!(rig.progress(newcomer), Progress::Waiting);
}

/// A process that does not know of a pause yet grants whatever is free, to waiting requests of all.
#[test]
fn what_another_process_grants_in_a_pause_is_held_back_until_its_end() {
    let mut rig = Rig::new(3);
    let held = [rig.request(), rig.request(), rig.request()];
    rig.settle();
    assert_eq!(held.map(|index| rig.progress(index)), [Progress::Held; 3]);
    let waits = [rig.request(), rig.request(), rig.request()];
    rig.settle();
    let now = rig.now();
    // It ends between two renewals.
    rig.session.handle_pause(Some(now + ms(5500)), now);
    rig.live(100);
    for index in held {
        rig.leave(index);
    }
    rig.settle();
    let (caller, mut grants) = (rig.ask(OTHER, 3), Vec::new());
    rig.ledger.release(caller, &[], &mut |_, hints| {
        grants.extend_from_slice(hints);
        true
    });
    assert_eq!(grants.len(), 3);
    // One message arrives, and the others are lost.
    rig.hint(grants[0]);
    for _ in 0..53 {
        rig.live(100);
        assert_eq!(waits.map(|index| rig.progress(index)), [Progress::Waiting; 3]);
    }
    rig.leave(waits[1]);
    let waits = [waits[0], waits[2]];
    rig.live(90);
    assert_eq!(waits.map(|index| rig.progress(index)), [Progress::Waiting; 2]);
    rig.live(10);
    let at_the_end = waits.map(|index| rig.progress(index));
    assert_eq!(at_the_end, [Progress::Held; 2], "not at the next renewal");
    assert_eq!(rig.places().len(), 2);
}

#[test]
fn a_refusal_in_a_pause_says_when_it_ends_unless_an_operator_paused() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_pause(Some(now + ms(700)), now);
    let no_wait = AcquireOptions { max_queue: None, ..OPTIONS };
    let index = rig.request_with(no_wait);
    rig.settle();
    rig.pass(200);
    let reason_of = |progress| match progress {
        Progress::Refused { reason, ends_in, limit, .. } => (reason, ends_in, limit),
        other => panic!("{other:?}"),
    };
    let seen = reason_of(rig.progress(index));
    assert_eq!(seen, (RejectReason::UpstreamPause, Some(ms(500)), None));
    rig.session.handle_override(Override::parse("- paused").expect("an override"), now);
    assert_eq!(reason_of(rig.progress(index)), (RejectReason::Limit, None, Some(0)));
    rig.session.handle_override(Override::parse("- draining").expect("an override"), now);
    let index = rig.request();
    assert!(is_refused(rig.progress(index), RejectReason::Draining));
}

#[test]
fn a_refusal_in_a_pause_and_a_quarantine_says_when_both_have_ended() {
    for (pause_ms, ends_ms) in [(700, 5000), (9000, 9000)] {
        let mut rig = Rig::new(1);
        let quarantine = Quarantine { is_on: true, at_least: ms(5000), lost_at: Some(rig.now()) };
        let connected = Connected { quarantine, ..Connected::default() };
        rig.session = Session::new(NODE, 1, connected, false);
        let now = rig.now();
        rig.session.handle_pause(Some(now + ms(pause_ms)), now);
        let options = AcquireOptions { max_queue: None, lease: ms(1000), ..OPTIONS };
        let index = rig.request_with(options);
        rig.settle();
        let Progress::Refused { reason: RejectReason::UpstreamPause, ends_in, .. } =
            rig.progress(index)
        else {
            panic!("{:?}", rig.progress(index));
        };
        assert_eq!(ends_in, Some(ms(ends_ms)));
    }
}

#[test]
fn a_pause_ends_when_it_is_said_to() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_pause(Some(now + ms(60_000)), now);
    let waits = rig.request();
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.session.handle_pause(None, now);
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Held);
    // An end that has passed is none.
    rig.session.handle_pause(Some(now), now);
    assert_eq!(rig.session.limit_in_force(), 1);
}

#[test]
fn a_session_is_not_kept_for_a_pause() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.leave(held);
    rig.settle();
    let now = rig.now();
    rig.session.handle_pause(Some(now + ms(3_600_000)), now);
    rig.pass(6000);
    assert!(rig.session.is_over(rig.now()));
}

#[test]
fn a_pause_grants_no_share_in_an_outage() {
    let mut rig = Rig::new(2);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    rig.session.handle_pause(Some(now + ms(500)), now);
    let waits = rig.request_with(with(OnUnavailable::Local(1)));
    let admit = rig.request_with(with(OnUnavailable::Admit));
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert_eq!(rig.progress(admit), Progress::Failed);
    rig.pass(500);
    assert_eq!(rig.progress(waits), Progress::Admitted);
}

/// The call that ends the pause is for all, whatever each knows.
#[test]
fn the_end_of_a_pause_changes_no_requests_own_limit() {
    let mut rig = Rig::new(2);
    let narrow = [rig.request(), rig.request(), rig.request()];
    rig.settle();
    let _ = narrow.map(|index| rig.progress(index));
    rig.limit = 100;
    let wide = rig.request();
    rig.settle();
    let (now, until) = (rig.now(), rig.now() + ms(1000));
    rig.session.handle_pause(Some(until), now);
    for _ in 0..5 {
        rig.live(500);
        assert_eq!(rig.progress(narrow[2]), Progress::Waiting, "two of two are in use");
    }
    assert_eq!(rig.progress(wide), Progress::Waiting, "it came later");
}

#[test]
fn the_end_of_a_pause_refuses_no_request_for_its_cost() {
    let mut rig = Rig::new(20);
    let now = rig.now();
    rig.session.handle_pause(Some(now + ms(1000)), now);
    rig.live(1010);
    let claim = Some(Claim::new(Tenant::of_hash(7)).with_cost(5));
    let index = rig.request_with(AcquireOptions { claim, ..OPTIONS });
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
}

/// The only permit is held here, and a place of another process waits for it.
fn held_and_waited_for() -> (Rig, usize, PlaceId) {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    let other = rig.other();
    (rig, held, other)
}

/// Data were lost: nothing is granted for five seconds.
fn begin_quarantine(rig: &mut Rig) {
    let quarantine = Quarantine { is_on: true, at_least: ms(5000), lost_at: Some(rig.now()) };
    rig.reconnect(Connected { quarantine, ..Connected::default() });
    rig.settle();
}

/// Another process has ended the pause already, and asked before this one gave anything back.
#[test]
fn what_was_given_back_in_a_pause_is_asked_for_at_its_end_though_nobody_waits_here() {
    let (mut rig, held, other) = held_and_waited_for();
    let now = rig.now();
    rig.session.handle_pause(Some(now + ms(1000)), now);
    rig.leave(held);
    rig.settle();
    assert!(rig.waits(other));
    rig.pass(1000);
    let calls = rig.settle();
    assert!(matches!(&calls[..], [Op::Release { ids }] if ids.is_empty()), "{calls:?}");
    assert!(!rig.waits(other));
    // Once.
    let now = rig.now();
    rig.session.handle_pause(Some(now + ms(1000)), now);
    rig.pass(1000);
    assert_eq!(rig.settle(), []);
}

#[test]
fn what_was_given_back_in_a_quarantine_is_asked_for_at_its_end() {
    let (mut rig, held, other) = held_and_waited_for();
    begin_quarantine(&mut rig);
    rig.leave(held);
    rig.settle();
    assert!(rig.waits(other));
    rig.live(5000);
    assert!(!rig.waits(other));
}

#[test]
fn what_was_given_back_is_asked_for_once_both_a_pause_and_a_quarantine_have_ended() {
    for pause_ms in [4000, 6000] {
        let (mut rig, held, other) = held_and_waited_for();
        begin_quarantine(&mut rig);
        let now = rig.now();
        rig.session.handle_pause(Some(now + ms(pause_ms)), now);
        rig.leave(held);
        rig.settle();
        rig.live(pause_ms.max(5000));
        assert!(!rig.waits(other), "paused for {pause_ms} ms");
    }
}

#[test]
fn what_was_given_back_under_a_lower_limit_is_asked_for_once_that_is_raised() {
    let mut rig = Rig::new(2);
    let held = [(); 2].map(|()| rig.request());
    rig.settle();
    let other = rig.other();
    let set = |rig: &mut Rig, limit| {
        let now = rig.now();
        rig.session.handle_override(Override { limit: Some(limit), ..Override::default() }, now);
    };
    set(&mut rig, 1);
    // The limit is 2 again. The process of the place that waits has learned of that, and asked.
    rig.leave(held[0]);
    rig.settle();
    assert!(rig.waits(other), "this process does not know of it yet");
    set(&mut rig, 2);
    rig.settle();
    assert!(!rig.waits(other));
}
