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
    assert!(rig.session.is_known_lost(held));
    assert_eq!(rig.progress(waiting), Progress::Closed);
    assert_eq!(rig.progress(joining), Progress::Closed);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_request_that_was_granted_and_has_not_looked_is_told_that_it_is_over() {
    let mut rig = Rig::new(2);
    let (taken, granted) = (rig.request(), rig.request());
    rig.settle();
    rig.progress(taken);
    rig.session.take_events();
    let now = rig.now();
    rig.session.handle_close(now);
    assert_eq!(rig.session.take_events()[..], [Event::Lost(taken), Event::Progress(granted)]);
    assert_eq!(rig.progress(granted), Progress::Closed);
    assert!(rig.session.is_known_lost(taken) && !rig.session.is_known_lost(granted));
}

#[test]
fn a_session_is_busy_as_long_as_anything_is_to_be_sent_or_answered() {
    let mut rig = Rig::new(1);
    assert!(!rig.session.is_busy());
    let index = rig.request();
    assert!(rig.session.is_busy(), "joins");
    let acquire = rig.call().expect("an acquire");
    let (reply, now) = (rig.carry_out(&acquire), rig.now());
    rig.reply(&acquire.op, &reply, now);
    rig.progress(index);
    assert!(rig.session.is_busy(), "holds");
    rig.pass(1000);
    let renewal = rig.call().expect("a renewal");
    rig.leave(index);
    let release = rig.call().expect("a release");
    assert!(rig.session.is_busy(), "is renewed and released");
    rig.reply(&release.op, &Reply::default(), now);
    assert!(rig.session.is_busy(), "is renewed");
    let gone = Reply { statuses: smallvec![PlaceStatus::Gone], ..Reply::default() };
    rig.reply(&renewal.op, &gone, now);
    assert!(!rig.session.is_busy(), "nothing is left");
    rig.reconnect(Connected::default());
    assert!(rig.session.is_busy(), "asks what stands there");
    let audit = rig.call().expect("an audit");
    assert!(rig.session.is_busy(), "is told what stands there");
    rig.reply(&audit.op, &Reply::default(), now);
    assert!(!rig.session.is_busy(), "nothing is left again");
}

#[test]
fn a_session_is_busy_until_its_releases_are_answered() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    let now = rig.now();
    assert!(rig.session.handle_release(index, now));
    assert!(rig.session.is_busy(), "to be sent");
    let release = rig.call().expect("a release");
    assert!(rig.session.is_busy(), "sent");
    rig.session.handle_call_error(&release.op, now);
    assert!(rig.session.is_busy(), "to be tried again");
    rig.pass(1000);
    rig.settle();
    assert!(!rig.session.is_busy(), "released");
}

#[test]
fn a_session_is_kept_as_long_as_a_request_looks_at_it() {
    let mut rig = Rig::new(1);
    rig.other();
    let refused = rig.request_with(AcquireOptions { max_queue: None, ..OPTIONS });
    rig.settle();
    rig.pass(60_000);
    assert!(!rig.session.is_busy());
    assert!(!rig.session.is_idle() && !rig.is_over());
    rig.leave(refused);
    rig.pass(6000);
    assert!(rig.is_over());
}

#[test]
fn a_session_is_in_use_while_a_request_joins_waits_or_holds() {
    let mut rig = Rig::new(1);
    assert!(!rig.session.is_in_use());
    let holds = rig.request();
    assert!(rig.session.is_in_use(), "joins");
    rig.settle();
    let waits = rig.request();
    rig.settle();
    rig.leave(holds);
    rig.call().expect("a release");
    assert!(rig.session.is_in_use() && rig.session.is_busy(), "waits");
    rig.leave(waits);
    assert!(!rig.session.is_in_use() && rig.session.is_busy(), "is released");
}

#[test]
fn requests_that_wait_can_be_answered_while_permits_stay() {
    // What passes permits on keeps a list of those that wait by what they asked for.
    for reuse_ms in [0, 50] {
        let mut rig = Rig::new(1);
        let options = AcquireOptions { reuse_ms, ..OPTIONS };
        let [held, waiting] = [(); 2].map(|()| rig.request_with(options));
        rig.settle();
        assert_eq!(rig.progress(held), Progress::Held);
        assert_eq!(rig.progress(waiting), Progress::Waiting);
        let joining = rig.request_with(options);
        rig.session.take_events();
        rig.session.handle_stop_waiting(rig.now());
        assert_eq!(
            rig.session.take_events()[..],
            [Event::Progress(waiting), Event::Progress(joining)]
        );
        for index in [waiting, joining] {
            assert_eq!(rig.progress(index), Progress::Closed);
        }
        assert_eq!(rig.progress(held), Progress::Held);
        rig.settle();
        assert_eq!(rig.places(), [rig.id(held)]);
    }
}
