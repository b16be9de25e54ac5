//! How soon a call is sent.

use super::*;

#[test]
fn requests_and_releases_go_now_and_renewals_before_the_first_lease_ends() {
    let mut rig = Rig::new(2);
    assert_eq!(rig.session.urgency(), None);
    let first = rig.request();
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    assert_eq!(rig.session.urgency(), None);
    rig.pass(300);
    rig.request();
    rig.settle();
    // Held, and due after a third of the lease.
    rig.pass(700);
    assert_eq!(rig.session.urgency(), Some(Urgency::Before(Time::ZERO + ms(2999))));
    // With a request beside it, it is the request that is waited for.
    rig.request();
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    rig.leave(first);
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    assert_eq!(rig.session.urgency(), None);
}

#[test]
fn while_it_is_unknown_what_became_of_the_places_newcomers_are_not_urgent() {
    let mut rig = Rig::new(1);
    rig.request();
    rig.settle();
    rig.reconnect(Connected::default());
    assert!(matches!(rig.session.urgency(), Some(Urgency::Before(_))));
    let renewal = rig.call().expect("a renewal of everything");
    let second = rig.request();
    assert_eq!(rig.call(), None, "it waits for the answer");
    let (reply, now) = (rig.carry_out(&renewal), rig.now());
    rig.reply(&renewal.op, &reply, now);
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    assert_eq!(rig.progress(second), Progress::Waiting);
}

#[test]
fn an_audit_goes_when_there_is_time() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.leave(index);
    rig.settle();
    rig.reconnect(Connected::default());
    assert_eq!(rig.session.urgency(), Some(Urgency::Later));
    assert!(matches!(rig.settle()[..], [Op::Audit { .. }]));
}

#[test]
fn a_server_that_stopped_at_its_bound_is_called_again_at_once() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = Reply { more: true, ..rig.carry_out(&call) };
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    assert!(matches!(rig.settle()[..], [Op::Release { ref ids }] if ids.is_empty()));
    assert_eq!(rig.progress(index), Progress::Held);
    assert_eq!(rig.session.urgency(), None);
}

#[test]
fn releases_go_first_and_newcomers_last_with_nothing_between_in_one_call() {
    let mut rig = Rig::new(4);
    let (stays, leaves) = (rig.request(), rig.request());
    rig.settle();
    rig.progress(stays);
    // Nothing stands between them.
    rig.leave(leaves);
    let joins = rig.request();
    let ops = |rig: &mut Rig| rig.settle();
    assert!(matches!(&ops(&mut rig)[..], [Op::Acquire { leaving, .. }] if leaving.len() == 1));
    // Renewals do.
    rig.pass(1000);
    rig.leave(joins);
    rig.request();
    let seen = ops(&mut rig);
    let [Op::Release { .. }, Op::Renew { .. }, Op::Acquire { leaving, .. }] = &seen[..] else {
        panic!("{seen:?}");
    };
    assert!(leaving.is_empty());
    // So do proofs.
    rig.session.handle_unreachable(rig.now());
    rig.request_with(with(OnUnavailable::Admit));
    rig.reconnect(Connected { same_data: true, ..Connected::default() });
    rig.leave(stays);
    rig.request();
    let seen = ops(&mut rig);
    assert!(
        matches!(seen[..], [Op::Release { .. }, Op::Reassert { .. }, Op::Acquire { .. }]),
        "{seen:?}"
    );
}

#[test]
fn a_quarantine_ends_with_the_lease_though_the_watchdog_is_late() {
    for (now_ms, limit) in [(2999, 0), (3000, 1), (9000, 1)] {
        let mut rig = Rig::new(1);
        let quarantine =
            Quarantine { is_on: true, lost_at: Some(Time::ZERO), ..Quarantine::default() };
        let connected = Connected { quarantine, ..Connected::default() };
        rig.session = Session::new(NODE, 1, connected, false);
        rig.now_ms = now_ms;
        rig.request();
        assert_eq!(rig.call().map(|call| call.limit), Some(limit), "{now_ms}");
    }
}

#[test]
fn a_release_is_not_sent_where_the_lease_ended_long_ago_though_the_watchdog_is_late() {
    for (late_ms, sent) in [(5999, true), (6000, false)] {
        let mut rig = Rig::new(1);
        let index = rig.request();
        rig.settle();
        rig.leave(index);
        rig.now_ms = late_ms;
        let released = rig.calls().iter().any(|call| matches!(call.op, Op::Release { .. }));
        assert_eq!(released, sent, "{late_ms}");
    }
}

#[test]
fn what_only_the_process_makes_of_its_permits_divides_no_call() {
    let mut rig = Rig::new(3);
    rig.request();
    rig.request_with(AcquireOptions { linger_ms: 10, ..OPTIONS });
    rig.request_with(AcquireOptions { reuse_ms: 50, ..OPTIONS });
    let calls = rig.calls();
    assert!(
        matches!(&calls[..], [Call { op: Op::Acquire { ids, .. }, .. }] if ids.len() == 3),
        "{calls:?}"
    );
}

/// A driver takes the calls that keep leases alive first, however many others there are.
#[test]
fn renewals_are_taken_ahead_of_releases_and_newcomers() {
    let mut rig = Rig::new(2);
    let first = rig.request();
    rig.request();
    let waits = rig.request();
    rig.settle();
    rig.pass(1000);
    rig.leave(first);
    rig.request();
    let now = rig.now();
    assert!(rig.session.is_awaited());
    assert_eq!(rig.session.keeps_alive(), Some(Time::ZERO + ms(2999)));
    // Those that hold go first; in calls as small as may be.
    let mut renewed = Vec::new();
    while let Some(call) = rig.session.poll_keep_alive(1, now) {
        let Op::Renew { ids, .. } = call.op else { panic!("{call:?}") };
        renewed.extend(ids);
    }
    assert_eq!(renewed, [rig.id(1), rig.id(waits)]);
    assert_eq!(rig.session.keeps_alive(), None);
    let call = rig.session.poll_serving(9, now).expect("the release and the newcomer");
    assert!(matches!(&call.op, Op::Acquire { leaving, ids, .. } if leaving.len() + ids.len() == 2));
    assert!(!rig.session.is_awaited());
    assert_eq!(rig.session.poll_serving(9, now), None);
}

#[test]
fn what_serves_requests_waits_for_renewals_only_after_a_loss_of_data() {
    let mut rig = Rig::new(3);
    rig.request();
    rig.settle();
    rig.pass(1000);
    rig.request();
    let now = rig.now();
    assert!(matches!(rig.session.poll_serving(9, now), Some(Call { op: Op::Acquire { .. }, .. })));
    rig.reconnect(Connected::default());
    assert!(!rig.session.is_awaited());
    assert_eq!(rig.session.poll_serving(9, now), None);
    let renewal = rig.session.poll_keep_alive(9, now).expect("a renewal of what is held");
    let reply = rig.carry_out(&renewal);
    rig.reply(&renewal.op, &reply, now);
    assert!(rig.session.is_awaited());
}

#[test]
fn a_call_names_no_more_places_than_it_may() {
    let mut rig = Rig::new(1);
    for _ in 0..8 {
        rig.request();
    }
    let now = rig.now();
    for most in [3, 1, 4] {
        let call = rig.session.poll_serving(most, now).expect("newcomers");
        assert_eq!(call.op.places(), most);
    }
}
