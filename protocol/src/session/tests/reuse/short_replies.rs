//! Short replies, and what they say of other processes.

use super::*;

#[test]
fn a_short_reply_says_that_nobody_waits_unless_it_is_to_places_of_tenants() {
    for (claim, kept) in [(None, 1), (claim(1), 0)] {
        let mut rig = Rig::new(2);
        let held = rig.request_with(AcquireOptions { claim, ..REUSE });
        let (call, now) = (rig.call().unwrap(), rig.now());
        let lease_end = EPOCH_MS + 3000;
        let reply = Reply { lease_end, statuses: smallvec![PlaceStatus::Held], ..Reply::default() };
        rig.reply(&call.op, &reply, now);
        assert_eq!(rig.progress(held), Progress::Held);
        rig.leave(held);
        assert_eq!(rig.kept(), kept, "{claim:?}");
    }
}

#[test]
fn where_a_short_reply_says_nothing_what_is_used_often_is_asked_about() {
    let of_tenant = AcquireOptions { claim: claim(1), ..REUSE };
    for (after, asks) in [(49, true), (50, false)] {
        let mut rig = Rig::new(2);
        let first = rig.sent(of_tenant);
        rig.answer_in_short_to(&first);
        assert_eq!(rig.calls(), [], "the first for long");
        rig.leave(first.0);
        rig.settle();
        rig.pass(after);
        let next = rig.sent(of_tenant);
        rig.answer_in_short_to(&next);
        let is_asked = matches!(&rig.calls()[..], [Call { op: Op::Renew { .. }, .. }]);
        assert_eq!(is_asked, asks, "{after} ms later");
    }
}

#[test]
fn a_reply_to_what_was_sent_before_it_began_says_nothing() {
    let mut rig = Rig::new(3);
    let before = rig.sent(OPTIONS);
    rig.pass(1);
    // Nothing is kept yet, so this is not noted.
    rig.recall();
    rig.pass(1);
    let of_tenant = rig.sent(AcquireOptions { claim: claim(1), ..REUSE });
    rig.answer_in_short_to(&before);
    rig.answer_in_short_to(&of_tenant);
    rig.leave(of_tenant.0);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn a_pause_or_a_lower_limit_is_not_undone_by_a_short_reply_to_what_was_sent_before() {
    for (mode, limit) in [(Mode::Paused, None), (Mode::Open, Some(1))] {
        let mut rig = Rig::new(2);
        let held: Vec<_> = (0..2).map(|_| rig.holder(REUSE)).collect();
        rig.pass(1000);
        let (call, sent) = (rig.call().unwrap(), rig.now());
        let now = rig.now();
        rig.session.handle_override(Override { mode, limit, ..Override::default() }, now);
        let statuses = smallvec![PlaceStatus::Held; 2];
        let reply = Reply { lease_end: EPOCH_MS + 4000, statuses, ..Reply::default() };
        rig.reply(&call.op, &reply, sent);
        rig.leave(held[0]);
        assert_eq!(rig.kept(), 0, "{mode:?}");
    }
}

#[test]
fn a_short_reply_under_another_limit_says_nothing() {
    let mut rig = Rig::new(10);
    let big = rig.request_with(OPTIONS);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    rig.pass(1);
    rig.limit = 2;
    let small = rig.request_with(REUSE);
    let statuses = smallvec![PlaceStatus::Held];
    let reply = Reply { lease_end: EPOCH_MS + 3000, statuses, ..Reply::default() };
    rig.reply(&call.op, &reply, sent);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    // Its own reply counts, and shows more in use than its limit.
    let mut reply = rig.carry_out(&call);
    reply.usage = Some(Usage { in_use: 3, waiting: 0 });
    rig.reply(&call.op, &reply, sent);
    rig.leave(small);
    assert_eq!(rig.kept(), 0);
    rig.leave(big);
}

#[test]
fn a_short_reply_counts_for_the_limit_of_its_own_call() {
    let mut rig = Rig::new(2);
    let small = rig.holder(REUSE);
    rig.limit = 10;
    for _ in 0..5 {
        rig.holder(OPTIONS);
    }
    rig.pass(60);
    let big = rig.request_with(OPTIONS);
    rig.limit = 2;
    // It comes and leaves before anything is sent.
    let dropped = rig.request_with(REUSE);
    rig.leave(dropped);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    let Reply { lease_end, statuses, .. } = rig.carry_out(&call);
    rig.reply(&call.op, &Reply { lease_end, statuses, ..Reply::default() }, sent);
    assert_eq!(rig.progress(big), Progress::Held);
    rig.leave(small);
    assert_eq!(rig.kept(), 0, "seven are in use");
}
