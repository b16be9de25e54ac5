//! When a session is over.

use super::*;

#[test]
fn a_session_is_kept_for_a_failover_though_its_watchdog_is_late() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    rig.settle();
    // Granted when its next renewal is due already.
    rig.now_ms = 1000;
    let hint = rig.other_leaves(other)[0];
    rig.hint(hint);
    assert_eq!(rig.progress(index), Progress::Held);
    rig.leave(index);
    rig.settle();
    assert!(rig.session.is_idle());
    assert!(!rig.is_over(), "a failover within five seconds would not be audited");
    rig.pass(4999);
    assert!(!rig.is_over());
    rig.pass(1);
    assert!(rig.is_over());
}

#[test]
fn a_session_whose_places_were_never_sent_is_over_at_once() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    assert!(!rig.is_over());
    rig.leave(index);
    assert!(rig.is_over());
}

#[test]
fn every_place_is_released_at_the_end() {
    let mut rig = Rig::new(1);
    let [held, waiting] = [(); 2].map(|()| rig.request());
    rig.settle();
    rig.progress(held);
    let joining = rig.request();
    let now = rig.now();
    rig.session.handle_close(now);
    assert!(rig.session.was_lost(held));
    assert_eq!(rig.progress(waiting), Progress::Closed);
    assert_eq!(rig.progress(joining), Progress::Closed);
    rig.settle();
    assert_eq!(rig.places(), []);
}
