//! What operators set and revoke.

use super::*;

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
    assert!(rig.session.was_lost(holder));
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
    rig.ledger.revoke(id, true);
    rig.pass(1000);
    assert!(matches!(rig.answer().op, Op::Renew { .. }));
    let now = rig.now();
    assert!(rig.session.poll_revocation_check());
    rig.session.handle_revoked(id, now);
    rig.session.handle_revocations_known(now);
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
    rig.session.handle_override("2 open".parse().expect("an override"), now);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert_eq!(rig.session.limit_in_force(), 2);
}
