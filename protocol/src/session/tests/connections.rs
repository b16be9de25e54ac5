//! Connections break and open, to the same data or to other data.

use super::*;

#[test]
fn what_went_unanswered_is_asked_for_again_with_the_same_ids() {
    let mut rig = Rig::new(2);
    let first = rig.request();
    rig.settle();
    rig.progress(first);
    rig.leave(first);
    let second = rig.request();
    let sent = rig.calls();
    assert!(
        matches!(&sent[..], [Call { op: Op::Acquire { leaving, .. }, .. }] if leaving.len() == 1)
    );
    rig.session.handle_unanswered(&sent[0].op);
    assert_eq!(rig.calls(), []);
    rig.reconnect(Connected::default());
    let id = rig.id(second);
    let ops = rig.settle();
    assert!(matches!(&ops[0], Op::Acquire { leaving, ids, .. }
        if leaving.len() == 1 && ids[..] == [id]));
    assert_eq!(rig.progress(second), Progress::Held);
    assert_eq!(rig.places(), [id]);
}

#[test]
fn a_connection_to_the_same_data_sends_nothing_for_held_places() {
    let mut rig = Rig::new(2);
    for _ in 0..2 {
        let index = rig.request();
        rig.settle();
        rig.progress(index);
    }
    rig.pass(500);
    let same = Connected { same_data: true, ..Connected::default() };
    rig.reconnect(same);
    assert_eq!(rig.calls(), []);
    // A due place is still renewed.
    rig.pass(500);
    rig.reconnect(same);
    assert_eq!(rig.settle().len(), 1);
    // Where data may be lost, everything is.
    rig.pass(100);
    rig.reconnect(Connected::default());
    assert!(matches!(&rig.settle()[0], Op::Renew { ids, .. } if ids.len() == 2));
}

#[test]
fn a_waiter_asks_after_a_connection_broke_because_its_hint_may_be_lost() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    rig.settle();
    rig.other_leaves(other);
    rig.reconnect(Connected { same_data: true, ..Connected::default() });
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn a_late_reply_that_shows_a_place_that_was_left_releases_it() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, acquire) = (rig.now(), rig.call().expect("an acquire"));
    rig.leave(index);
    let release = rig.call().expect("a release");
    // The release is carried out first.
    rig.carry_out(&release);
    let reply = rig.carry_out(&acquire);
    rig.session.handle_reply(&acquire.op, &reply, Sending::at(sent).late(true), sent);
    rig.reply(&release.op, &Reply::default(), sent);
    assert_eq!(rig.places().len(), 1);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_late_reassertion_of_a_place_that_was_left_is_released() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    let (now, reassert) = (rig.now(), rig.proof_after_a_loss());
    rig.leave(index);
    let release = rig.call().expect("a release");
    rig.carry_out(&release);
    let reply = rig.carry_out(&reassert);
    rig.session.handle_reply(&reassert.op, &reply, Sending::at(now).late(true), now);
    rig.reply(&release.op, &Reply::default(), now);
    assert_eq!(rig.places().len(), 1);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_break_leaves_nothing_under_way() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.pass(1000);
    let renewal = rig.call().expect("a renewal");
    assert!(rig.session.renewals.is_any_sent());
    rig.session.handle_unanswered(&renewal.op);
    assert!(!rig.session.renewals.is_any_sent(), "no answer will come");
    rig.leave(index);
    rig.settle();
    rig.reconnect(Connected::default());
    let audit = rig.call().expect("an audit");
    rig.session.handle_unanswered(&audit.op);
    assert!(rig.session.audit.is_due() && !rig.session.audit.is_sent(), "it is asked again");
}

#[test]
fn what_is_due_when_a_connection_opens_is_renewed_though_the_data_is_the_same() {
    let same = Connected { same_data: true, ..Connected::default() };
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    rig.pass(999);
    rig.reconnect(same);
    assert_eq!(rig.calls(), [], "it is not due");
    // Its watchdog is late.
    rig.now_ms += 1;
    rig.reconnect(same);
    assert!(matches!(rig.settle()[..], [Op::Renew { .. }]));
}

#[test]
fn what_was_admitted_is_announced_over_the_next_connection() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let admitted = rig.request_with(with(OnUnavailable::Admit));
    assert_eq!(rig.progress(admitted), Progress::Admitted);
    rig.reconnect(Connected { same_data: true, ..Connected::default() });
    assert!(matches!(rig.settle()[..], [Op::Reassert { .. }]));
    assert_eq!(rig.places(), [rig.id(admitted)]);
    assert_eq!(rig.progress(admitted), Progress::Held);
}

#[test]
fn an_answer_to_an_announcement_that_is_too_old_is_asked_for_again() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let admitted = rig.request_with(with(OnUnavailable::Admit));
    rig.progress(admitted);
    rig.reconnect(Connected::default());
    let (sent, call) = (rig.now(), rig.call().expect("an announcement"));
    let reply = rig.carry_out(&call);
    rig.now_ms += 2999;
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(admitted), Progress::Admitted, "its lease may have ended");
    rig.live(2000);
    assert_eq!(rig.progress(admitted), Progress::Held);
    let now = rig.now();
    assert!(!rig.session.is_lost(admitted, now));
}

#[test]
fn a_new_connection_to_the_same_data_asks_for_nothing_that_is_held() {
    let mut rig = Rig::new(2);
    let held = rig.request();
    rig.settle();
    rig.reconnect(same_data());
    assert_eq!(rig.calls(), []);
    assert_eq!(rig.progress(held), Progress::Held);
}

#[test]
fn a_late_reply_that_brings_a_place_back_is_answered_by_a_release() {
    let mut rig = Rig::new(2);
    let held = rig.request();
    rig.settle();
    let (sent, proof) = (rig.now(), rig.proof_after_a_loss());
    // It leaves, and its release is carried out before the proof.
    rig.leave(held);
    rig.settle();
    let reply = rig.carry_out(&proof);
    assert_eq!(reply.statuses[..], [PlaceStatus::Held]);
    rig.session.handle_reply(&proof.op, &reply, Sending::at(sent).late(true), rig.now());
    rig.settle();
    assert!(rig.ledger.is_empty());
}

#[test]
fn a_late_proof_of_a_permit_that_is_being_released_is_answered_by_a_release() {
    let mut rig = Rig::new(2);
    let held = rig.request();
    rig.settle();
    let (sent, proof) = (rig.now(), rig.proof_after_a_loss());
    assert!(rig.session.handle_release(held, sent));
    let release = rig.call().expect("a release");
    rig.carry_out(&release);
    let reply = rig.carry_out(&proof);
    rig.session.handle_reply(&proof.op, &reply, Sending::at(sent).late(true), rig.now());
    rig.settle();
    assert!(rig.ledger.is_empty());
}

#[test]
fn what_was_sent_keeps_its_id_where_hints_do_not_arrive_any_more() {
    let mut rig = Rig::new(2);
    let sent = rig.request();
    let before = rig.id(sent);
    rig.call().expect("an acquire");
    let unsent = rig.request();
    rig.reconnect(Connected { poll_only: true, ..same_data() });
    assert_eq!(rig.id(sent), before);
    assert!(!rig.id(sent).poll_only);
    assert!(rig.id(unsent).poll_only);
}

#[test]
fn a_release_that_went_unanswered_does_not_outlive_its_lease_in_an_outage() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.leave(index);
    rig.call().expect("a release");
    // Its server went away while the session was on its way to another.
    rig.session.handle_unreachable(rig.now());
    rig.pass(6000);
    assert!(rig.is_over(), "until {:?}", rig.session.poll_timeout());
}
