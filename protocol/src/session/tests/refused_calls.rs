//! Calls that the server refuses: what is tried again, and when.

use super::*;

#[test]
fn a_refused_release_is_tried_again() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.leave(index);
    let release = rig.call().expect("a release");
    let now = rig.now();
    rig.session.handle_call_error(&release.op, now);
    assert_eq!(rig.calls(), []);
    assert!(!rig.session.is_idle());
    rig.pass(1000);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn what_is_refused_is_not_tried_again_each_time_that_something_else_is_due() {
    let mut rig = Rig::new(100);
    let mut held = Vec::new();
    for _ in 0..60 {
        rig.pass(10);
        let index = rig.request();
        rig.settle();
        assert_eq!(rig.progress(index), Progress::Held);
        held.push(index);
    }
    // Their leases end one after another, while the backend refuses all calls.
    let left = held.split_off(30);
    left.into_iter().for_each(|index| rig.leave(index));
    let mut calls = 0;
    for _ in 0..400 {
        rig.pass(10);
        let now = rig.now();
        for call in rig.calls() {
            calls += 1;
            rig.session.handle_call_error(&call.op, now);
        }
    }
    // Each of the thirty that are lost is released, and once a second all is tried again.
    assert!((30..=40).contains(&calls), "{calls} calls in four seconds");
}

#[test]
fn a_short_lease_outlives_a_refused_renewal_whatever_leases_others_have() {
    for is_reversed in [false, true] {
        let mut rig = Rig::new(2);
        let [short, long] = [600, 1500].map(|lease_ms| {
            let lease = ms(lease_ms);
            let held = rig.request_with(AcquireOptions { lease, ..OPTIONS });
            rig.settle();
            assert_eq!(rig.progress(held), Progress::Held);
            held
        });
        rig.live(390);
        rig.pass(10);
        let mut calls = rig.calls();
        assert_eq!(calls.len(), 2, "both are to be renewed: {calls:?}");
        if is_reversed {
            calls.reverse();
        }
        for call in &calls {
            rig.session.handle_call_error(&call.op, rig.now());
        }
        rig.live(3000);
        for held in [short, long] {
            assert!(!rig.session.is_lost(held, rig.now()));
        }
    }
}

#[test]
fn releases_that_are_refused_for_long_are_given_up_with_their_leases() {
    let mut rig = Rig::new(1000);
    let mut most = 0;
    for _ in 0..3000 {
        let index = rig.request();
        for calls in [true, false] {
            for call in rig.calls() {
                if matches!(call.op, Op::Release { .. }) {
                    rig.session.handle_call_error(&call.op, rig.now());
                } else {
                    let reply = rig.carry_out(&call);
                    rig.reply(&call.op, &reply, rig.now());
                }
            }
            if calls {
                rig.leave(index);
            }
        }
        rig.pass(10);
        most = most.max(rig.session.releases.kept());
    }
    // A hundred a second, for twice the lease and until the next try.
    assert!(most <= 800, "{most}");
}

#[test]
fn a_request_that_was_refused_leaves_nothing_to_be_released() {
    for policy in [OnUnavailable::Refuse, OnUnavailable::Admit] {
        let mut rig = Rig::new(1000);
        let long = AcquireOptions { lease: ms(60_000), ..with(policy) };
        for _ in 0..3000 {
            let index = rig.request_with(long);
            // The acquire, and the proof of a request that the policy admitted.
            for _ in 0..2 {
                for call in rig.calls() {
                    rig.session.handle_call_refused(&call.op, rig.now());
                }
                rig.progress(index);
            }
            rig.leave(index);
            assert_eq!(rig.calls(), [], "it is not there");
            rig.pass(10);
        }
        assert!(!rig.session.releases.is_any());
    }
}

#[test]
fn a_request_whose_acquire_went_unanswered_before_is_released_though_it_is_refused() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let acquire = rig.call().expect("an acquire");
    rig.carry_out(&acquire);
    rig.session.handle_unanswered(&acquire.op);
    rig.reconnect(same_data());
    let again = rig.call().expect("an acquire");
    assert_eq!(again.op, acquire.op);
    rig.session.handle_call_refused(&again.op, rig.now());
    assert_eq!(rig.progress(index), Progress::Failed);
    rig.leave(index);
    rig.settle();
    assert_eq!(rig.places(), [], "it was carried out the first time");
}

#[test]
fn releases_that_are_refused_for_minutes_are_few_and_sent_seldom() {
    const HELD: usize = 5000;
    let mut rig = Rig::new(100_000);
    let long = AcquireOptions { lease: ms(600_000), ..OPTIONS };
    let held: Vec<_> = (0..HELD).map(|_| rig.request_with(long)).collect();
    rig.settle();
    held.into_iter().for_each(|index| rig.leave(index));
    let (mut first, mut named, mut calls) = (0, 0, 0);
    for second in 0..120 {
        rig.pass(1000);
        for call in rig.calls() {
            let Op::Release { ids } = &call.op else { continue };
            if second == 0 {
                first += ids.len();
            } else {
                (named, calls) = (named + ids.len(), calls + 1);
            }
            rig.session.handle_call_error(&call.op, rig.now());
        }
    }
    assert_eq!(first, HELD, "each once");
    assert!(calls <= 40, "{calls} calls in two minutes");
    assert!(named <= 40 * 512, "{named} places named in two minutes");
    assert!(rig.session.releases.kept() <= 4096, "{}", rig.session.releases.kept());
    // As soon as one is carried out, all that are left are.
    rig.live(5000);
    assert_eq!(rig.places().len(), HELD - 4096, "the others end with their leases");
}

#[test]
fn releases_are_tried_again_within_a_second_of_an_answer_however_long_they_were_refused() {
    let mut rig = Rig::new(10);
    let long = AcquireOptions { lease: ms(600_000), ..OPTIONS };
    let held = rig.request_with(long);
    rig.settle();
    rig.leave(held);
    for _ in 0..60 {
        for call in rig.calls() {
            rig.session.handle_call_error(&call.op, rig.now());
        }
        rig.pass(1000);
    }
    let other = rig.request_with(long);
    rig.settle();
    rig.live(1000);
    assert_eq!(rig.places(), [rig.id(other)]);
}

#[test]
fn what_was_refused_is_tried_again_in_its_time_though_others_are_refused_since() {
    let mut rig = Rig::new(10);
    let held = rig.request();
    rig.settle();
    let id = rig.id(held);
    rig.leave(held);
    for call in rig.calls() {
        rig.session.handle_call_error(&call.op, rig.now());
    }
    for round in 1..=110 {
        let index = rig.request();
        rig.settle();
        rig.leave(index);
        for call in rig.calls() {
            if round % 50 == 0 && rig.places().contains(&id) {
                rig.session.handle_call_error(&call.op, rig.now());
            } else {
                let reply = rig.carry_out(&call);
                rig.reply(&call.op, &reply, rig.now());
            }
        }
        rig.pass(10);
    }
    assert!(!rig.places().contains(&id), "its permit is idle");
}

#[test]
fn what_passed_in_an_outage_is_counted_before_newcomers_though_its_proof_is_refused() {
    let mut rig = Rig::new(1);
    let lease = ms(1000);
    rig.session.handle_unreachable(rig.now());
    let on_unavailable = OnUnavailable::Admit;
    let admitted = rig.request_with(AcquireOptions { on_unavailable, lease, ..OPTIONS });
    assert_eq!(rig.progress(admitted), Progress::Admitted);
    rig.reconnect(Connected::default());
    let newcomer = rig.request_with(AcquireOptions { lease, ..OPTIONS });
    for _ in 0..5 {
        let calls = rig.calls();
        assert!(matches!(&calls[..], [Call { op: Op::Reassert { .. }, .. }]), "{calls:?}");
        rig.session.handle_call_error(&calls[0].op, rig.now());
        assert_eq!(rig.calls(), []);
        rig.pass(334);
    }
    rig.live(1000);
    assert_eq!(rig.progress(newcomer), Progress::Waiting);
    assert_eq!(rig.ledger.in_use(), 1);
}

#[test]
fn a_proof_that_was_refused_is_shown_once_over_the_next_connection() {
    let mut rig = Rig::new(1);
    rig.session.handle_unreachable(rig.now());
    let admitted = rig.request_with(with(OnUnavailable::Admit));
    assert_eq!(rig.progress(admitted), Progress::Admitted);
    for _ in 0..2 {
        rig.reconnect(Connected::default());
        let calls = rig.calls();
        let [Call { op: Op::Reassert { proofs, .. }, .. }] = &calls[..] else {
            panic!("{calls:?}");
        };
        assert_eq!(proofs.len(), 1);
        rig.session.handle_call_error(&calls[0].op, rig.now());
    }
}

#[test]
fn newcomers_do_not_wait_for_what_was_refused_and_has_left() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    rig.reconnect(Connected::default());
    let renewal = rig.call().expect("a renewal");
    assert!(matches!(renewal.op, Op::Renew { .. }), "{renewal:?}");
    rig.session.handle_call_error(&renewal.op, rig.now());
    rig.leave(held);
    let newcomer = rig.request();
    rig.settle();
    assert_eq!(rig.places(), [rig.id(newcomer)], "nothing is to be known any more");
}

#[test]
fn what_was_not_refused_is_renewed_in_its_time() {
    let mut rig = Rig::new(2);
    let long = rig.request_with(AcquireOptions { lease: ms(9000), ..OPTIONS });
    rig.settle();
    rig.progress(long);
    rig.pass(2990);
    let short = rig.request_with(AcquireOptions { lease: ms(500), ..OPTIONS });
    rig.settle();
    rig.progress(short);
    rig.pass(10);
    let calls = rig.calls();
    assert!(matches!(&calls[..], [Call { op: Op::Renew { lease_ms: 9000, .. }, .. }]), "{calls:?}");
    rig.session.handle_call_error(&calls[0].op, rig.now());
    rig.live(2000);
    assert!(!rig.session.is_lost(short, rig.now()), "lost, though nothing of it was refused");
}

/// Sends what is to be sent, once, and answers it.
fn answer_calls(rig: &mut Rig) {
    for call in rig.calls() {
        let (reply, now) = (rig.carry_out(&call), rig.now());
        rig.reply(&call.op, &reply, now);
    }
}

/// A place that is renewed out of turn is not due for long: without a time of its own the retry would wait for that.
const LONG: AcquireOptions = AcquireOptions { lease: Duration::from_secs(60), ..OPTIONS };

#[test]
fn a_question_out_of_turn_that_is_refused_is_asked_again_within_a_second() {
    let mut rig = Rig::new(1);
    let holder = rig.other();
    let waits = rig.request_with(LONG);
    rig.settle();
    rig.pass(1000);
    let (renewal, sent) = (rig.call().expect("a renewal"), rig.now());
    rig.pass(1);
    for grant in rig.other_leaves(holder) {
        rig.hint(grant);
    }
    assert_eq!(rig.progress(waits), Progress::Held);
    rig.ledger = Ledger::new();
    rig.pass(1);
    let reply = rig.carry_out(&renewal);
    assert_eq!(reply.statuses[..], [PlaceStatus::Gone]);
    rig.reply(&renewal.op, &reply, sent);
    let again = rig.call().expect("it asks again");
    assert!(matches!(again.op, Op::Renew { .. }));
    rig.session.handle_call_error(&again.op, rig.now());
    rig.live(2000);
    assert_eq!(rig.ledger.in_use(), 1, "counted again");
}

#[test]
fn a_proof_out_of_turn_that_is_refused_is_shown_again_within_a_second() {
    let mut rig = Rig::new(1);
    let held = rig.request_with(LONG);
    rig.settle();
    rig.progress(held);
    rig.pass(12_000);
    // It waits: the permit is half way to its renewal, and is renewed along with it.
    let waits = rig.request_with(LONG);
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.ledger = Ledger::new();
    rig.pass(1000);
    answer_calls(&mut rig);
    rig.leave(waits);
    answer_calls(&mut rig);
    let question = rig.session.poll_revocation_check().expect("a question");
    rig.session.handle_revocations_known(question, rig.now());
    let proof = rig.call().expect("a proof");
    assert!(matches!(proof.op, Op::Reassert { .. }), "{proof:?}");
    rig.session.handle_call_error(&proof.op, rig.now());
    rig.live(2000);
    assert_eq!(rig.ledger.in_use(), 1, "counted again");
}

#[test]
fn with_reuse_a_fresh_permit_that_the_server_lost_is_counted_again_though_that_is_refused_once() {
    let mut rig = Rig::new(1);
    let reuse = AcquireOptions { reuse_ms: 50, ..LONG };
    let mut held = rig.request_with(reuse);
    rig.settle();
    rig.progress(held);
    let mut was_refused = false;
    for at in 0..100 {
        if at == 50 {
            rig.ledger = Ledger::new();
        }
        rig.leave(held);
        held = rig.request_with(reuse);
        rig.progress(held);
        answer_calls(&mut rig);
        if let Some(question) = rig.session.poll_revocation_check() {
            rig.session.handle_revocations_known(question, rig.now());
            let proof = rig.call().expect("a proof");
            assert!(matches!(proof.op, Op::Reassert { .. }), "{proof:?}");
            rig.session.handle_call_error(&proof.op, rig.now());
            was_refused = true;
            break;
        }
        rig.pass(5);
    }
    assert!(was_refused, "the question who waits finds that it is gone");
    assert_eq!(rig.progress(held), Progress::Held);
    rig.live(2000);
    assert!(!rig.session.is_lost(held, rig.now()));
    assert_eq!(rig.ledger.in_use(), 1, "counted again");
}
