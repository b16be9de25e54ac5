//! Permits whose requests were broken off (rule 8).

use super::*;

const LINGERS: AcquireOptions = AcquireOptions { linger_ms: 400, ..OPTIONS };

/// A permit whose request was broken off and has left at 0, of a semaphore of one permit.
fn broken_off() -> Rig {
    broken_off_with(LINGERS)
}

fn broken_off_with(options: AcquireOptions) -> Rig {
    let mut rig = Rig::new(1);
    let index = rig.request_with(options);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    rig.session.handle_break_off(index);
    rig.leave(index);
    rig
}

#[test]
fn a_permit_that_was_broken_off_is_released_after_its_linger() {
    let mut rig = broken_off();
    rig.live(390);
    assert_eq!(rig.places().len(), 1, "it lingers");
    assert!(rig.session.is_in_use());
    rig.live(20);
    assert_eq!(rig.places(), []);
    assert!(rig.session.is_idle());
}

#[test]
fn a_waiter_is_granted_as_soon_as_a_permit_has_lingered() {
    let mut rig = broken_off();
    let waits = rig.request();
    rig.live(390);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.live(20);
    assert_eq!(rig.progress(waits), Progress::Held);
}

#[test]
fn without_a_linger_it_is_released_at_once() {
    let mut rig = broken_off_with(OPTIONS);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_request_that_ends_well_does_not_linger() {
    let mut rig = Rig::new(1);
    let index = rig.request_with(LINGERS);
    rig.settle();
    rig.progress(index);
    rig.leave(index);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_request_that_leaves_while_it_waits_does_not_linger() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request_with(LINGERS);
    rig.settle();
    rig.session.handle_break_off(index);
    rig.leave(index);
    rig.settle();
    assert_eq!(rig.places(), [other]);
}

#[test]
fn a_release_that_is_asked_for_does_not_linger() {
    let mut rig = Rig::new(1);
    let index = rig.request_with(LINGERS);
    rig.settle();
    rig.progress(index);
    rig.session.handle_break_off(index);
    let now = rig.now();
    assert!(rig.session.handle_release(index, now));
    rig.settle();
    rig.leave(index);
    assert_eq!(rig.places(), []);
    assert!(rig.session.is_idle());
}

#[test]
fn what_lingers_is_renewed_and_shown_as_proof_like_what_is_held() {
    let long = AcquireOptions { linger_ms: 1_400, ..OPTIONS };
    let mut rig = broken_off_with(long);
    rig.pass(1_000);
    let renewal = rig.answer();
    assert!(matches!(renewal.op, Op::Renew { .. }), "{renewal:?}");
    let proof = rig.proof_after_a_loss();
    let (reply, now) = (rig.carry_out(&proof), rig.now());
    rig.reply(&proof.op, &reply, now);
    assert_eq!(rig.places().len(), 1, "it is counted again");
    rig.live(410);
    assert_eq!(rig.places(), []);
}

#[test]
fn what_lingers_and_is_lost_is_forgotten() {
    let mut rig = broken_off_with(AcquireOptions { linger_ms: 60_000, ..OPTIONS });
    rig.session.take_events();
    // Nothing is answered for a lease.
    rig.pass(3_000);
    assert_eq!(rig.session.take_events()[..], [], "nobody is there to be told");
    assert!(!rig.session.is_in_use());
    rig.check();
    rig.settle();
    assert_eq!(rig.places(), [], "and it is released, in case it still stands there");
}

#[test]
fn what_lingers_can_be_revoked() {
    let mut rig = broken_off();
    let [id] = rig.places()[..] else { panic!("one place") };
    let now = rig.now();
    rig.session.handle_revoked(id, now);
    rig.check();
    assert!(!rig.session.is_in_use());
}

#[test]
fn a_session_that_closes_leaves_to_their_leases_what_lingers_and_what_would() {
    let mut rig = Rig::new(3);
    let [lingers, held, plain] =
        [LINGERS, LINGERS, OPTIONS].map(|options| rig.request_with(options));
    rig.settle();
    for index in [lingers, held, plain] {
        rig.progress(index);
    }
    let mut kept = [lingers, held].map(|index| rig.id(index));
    kept.sort_unstable();
    rig.session.handle_break_off(lingers);
    rig.leave(lingers);
    rig.session.take_events();
    let now = rig.now();
    rig.session.handle_close(now);
    assert_eq!(rig.session.take_events()[..], [Event::Lost(held), Event::Lost(plain)]);
    rig.settle();
    assert_eq!(rig.places(), kept);
    rig.leave(held);
    rig.leave(plain);
    rig.settle();
    assert_eq!(rig.places(), kept);
    assert!(rig.session.is_idle());
}

#[test]
fn in_an_outage_what_lingers_takes_its_part_of_the_share() {
    let share = AcquireOptions { linger_ms: 400, ..with(OnUnavailable::Local(1)) };
    let mut rig = broken_off_with(share);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let waits = rig.request_with(with(OnUnavailable::Local(1)));
    rig.pass(390);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.pass(10);
    assert_eq!(rig.progress(waits), Progress::Admitted);
}

/// A permit in use whose renewals are unanswered, so that its request is told of the loss at 2.6 of 3 s.
fn lost_in_time() -> (Rig, usize) {
    let mut rig = Rig::new(1);
    let index = rig.request_with(LINGERS);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    rig.session.take_events();
    rig.pass(2_590);
    let (events, now) = (rig.session.take_events(), rig.now());
    assert!(events.is_empty() && !rig.session.is_lost(index, now), "{events:?}");
    rig.pass(10);
    assert_eq!(rig.session.take_events()[..], [Event::Lost(index)]);
    (rig, index)
}

#[test]
fn a_permit_is_lost_while_its_lease_still_lasts_for_its_linger() {
    let (mut rig, index) = lost_in_time();
    let now = rig.now();
    assert!(rig.session.is_lost(index, now) && rig.session.is_known_lost(index));
    rig.leave(index);
    rig.pass(390);
    assert!(rig.session.is_in_use(), "it lingers");
    rig.check();
    rig.pass(10);
    assert!(!rig.session.is_in_use());
    assert_eq!(rig.session.take_events()[..], [], "its request was told");
}

/// A holder looks at the time itself, and may leave before the session's timeout is handled.
#[test]
fn a_permit_lingers_whose_request_leaves_at_its_deadline_before_it_is_told() {
    let mut rig = Rig::new(1);
    let index = rig.request_with(LINGERS);
    rig.settle();
    rig.progress(index);
    rig.pass(2_590);
    rig.session.take_events();
    rig.now_ms += 10;
    let now = rig.now();
    assert!(rig.session.is_lost(index, now) && !rig.session.is_known_lost(index));
    rig.leave(index);
    rig.live(380);
    assert_eq!(rig.places().len(), 1, "it lingers");
    rig.live(30);
    assert_eq!(rig.places(), []);
    assert_eq!(rig.session.take_events()[..], [], "nobody is there to be told");
}

#[test]
fn a_permit_that_is_lost_in_time_counts_until_its_request_has_left_and_lingered() {
    let (mut rig, index) = lost_in_time();
    // The backend answers again.
    rig.live(1_000);
    assert_eq!(rig.places().len(), 1, "it is renewed");
    let now = rig.now();
    assert!(rig.session.is_lost(index, now), "for good");
    rig.session.handle_break_off(index);
    rig.leave(index);
    rig.live(390);
    assert_eq!(rig.places().len(), 1, "it lingers");
    rig.live(20);
    assert_eq!(rig.places(), []);
    assert_eq!(rig.session.take_events()[..], [], "told once");
}

#[test]
fn a_permit_whose_holder_goes_on_past_the_lease_is_told_of_once() {
    let (mut rig, index) = lost_in_time();
    rig.pass(400);
    assert_eq!(rig.session.take_events()[..], []);
    let now = rig.now();
    assert!(rig.session.is_lost(index, now));
    rig.check();
    rig.leave(index);
    rig.settle();
    assert_eq!(rig.places(), [], "and it is released, in case it still stands there");
}

#[test]
fn an_answer_that_comes_in_the_linger_keeps_the_place_and_not_the_permit() {
    let mut rig = Rig::new(1);
    let index = rig.request_with(LINGERS);
    rig.settle();
    rig.progress(index);
    rig.session.take_events();
    rig.pass(1_000);
    let renewal = rig.call().expect("a renewal");
    let sent = rig.now();
    let reply = rig.carry_out(&renewal);
    rig.pass(1_800);
    rig.session.take_events();
    rig.reply(&renewal.op, &reply, sent);
    let now = rig.now();
    assert!(rig.session.is_lost(index, now), "it was told");
    rig.live(1_500);
    assert_eq!(rig.places().len(), 1);
}
