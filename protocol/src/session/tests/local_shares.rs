//! In an outage the requests of a process share a limit of its own, and wait for it.

use super::*;
use crate::ledger::Hint;

#[test]
fn shares_of_the_processs_own_are_given_in_the_order_of_the_requests() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    let [a, b, c] = [(); 3].map(|()| rig.request_with(with(OnUnavailable::Local(1))));
    rig.session.handle_unreachable(now);
    assert_eq!(
        [a, b, c].map(|i| rig.progress(i)),
        [Progress::Admitted, Progress::Waiting, Progress::Waiting]
    );
    let d = rig.request_with(with(OnUnavailable::Local(1)));
    rig.leave(a);
    assert_eq!(
        [b, c, d].map(|i| rig.progress(i)),
        [Progress::Admitted, Progress::Waiting, Progress::Waiting]
    );
    rig.leave(c);
    rig.leave(b);
    assert_eq!(rig.progress(d), Progress::Admitted);
}

#[test]
fn the_newest_are_refused_where_too_many_wait_for_a_share() {
    let short = AcquireOptions { max_queue: Some(1), ..with(OnUnavailable::Local(1)) };
    let tries = AcquireOptions { max_queue: None, ..short };
    let mut rig = Rig::new(1);
    let [a, b, c] = [(); 3].map(|()| rig.request_with(short));
    let at_once = rig.request_with(tries);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(a), Progress::Admitted);
    assert_eq!(rig.progress(b), Progress::Waiting);
    assert!(is_refused(rig.progress(c), RejectReason::QueueFull));
    assert!(is_refused(rig.progress(at_once), RejectReason::Limit));
    let newcomer = rig.request_with(short);
    assert!(is_refused(rig.progress(newcomer), RejectReason::QueueFull));
    let newcomer = rig.request_with(tries);
    assert!(is_refused(rig.progress(newcomer), RejectReason::Limit));
}

#[test]
fn a_share_is_never_more_than_what_an_operator_set() {
    let mut rig = Rig::new(4);
    let now = rig.now();
    rig.session.handle_override(Override::parse("1 open").expect("an override"), now);
    rig.session.handle_unreachable(now);
    let first = rig.request_with(with(OnUnavailable::Local(3)));
    let second = rig.request_with(with(OnUnavailable::Local(3)));
    assert_eq!(rig.progress(first), Progress::Admitted);
    assert_eq!(rig.progress(second), Progress::Waiting);
}

#[test]
fn a_local_share_is_given_out_in_order_and_the_newest_are_refused() {
    let mut rig = outage(9);
    let options = with_queue(OnUnavailable::Local(1), Some(2));
    let requests: Vec<_> = (0..4).map(|_| rig.request_with(options)).collect();
    let seen: Vec<_> = requests.iter().map(|index| rig.progress(*index)).collect();
    assert_eq!(seen[..3], [Progress::Admitted, Progress::Waiting, Progress::Waiting]);
    let full =
        |progress| matches!(progress, Progress::Refused { reason: RejectReason::QueueFull, .. });
    assert!(full(seen[3]), "{seen:?}");
    rig.leave(requests[0]);
    assert_eq!(rig.progress(requests[1]), Progress::Admitted);
    assert_eq!(rig.progress(requests[2]), Progress::Waiting);
    let now = rig.now();
    rig.session.handle_wait_timeout(requests[2], now);
    let timed_out =
        |progress| matches!(progress, Progress::Refused { reason: RejectReason::QueueTimeout, .. });
    assert!(timed_out(rig.progress(requests[2])));
}

#[test]
fn a_permit_that_is_lost_in_an_outage_frees_its_share_for_the_next() {
    let mut rig = Rig::new(1);
    let options = with_queue(OnUnavailable::Local(1), Some(8));
    let one = rig.request_with(options);
    rig.settle();
    assert_eq!(rig.progress(one), Progress::Held);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let two = rig.request_with(options);
    rig.pass(2000);
    assert_eq!(rig.progress(two), Progress::Waiting);
    rig.pass(1500);
    assert_eq!(rig.progress(two), Progress::Admitted);
}

#[test]
fn whoever_leaves_the_queue_for_shares_makes_room_in_it() {
    let options = with_queue(OnUnavailable::Local(1), Some(3));
    for leaves in 1..4 {
        let mut rig = outage(9);
        let requests: Vec<_> = (0..4).map(|_| rig.request_with(options)).collect();
        rig.leave(requests[leaves]);
        let next = rig.request_with(options);
        assert_eq!(rig.progress(next), Progress::Waiting, "{leaves}");
        let full = rig.request_with(options);
        let reason = RejectReason::QueueFull;
        let seen = Progress::Refused {
            reason,
            full: None,
            usage: Some(Usage { in_use: 1, waiting: 3 }),
            limit: None,
            rate: None,
            is_tenant_full: false,
            ends_in: None,
            ahead: None,
            expected_wait: None,
            rate_wait: Duration::ZERO,
        };
        assert_eq!(rig.progress(full), seen, "{leaves}");
        let rest: Vec<_> = requests
            .into_iter()
            .enumerate()
            .filter(|(i, _)| *i != leaves)
            .map(|(_, r)| r)
            .collect();
        for pair in rest.windows(2) {
            assert_eq!(rig.progress(pair[0]), Progress::Admitted, "{leaves}");
            assert_eq!(rig.progress(pair[1]), Progress::Waiting, "{leaves}");
            rig.leave(pair[0]);
        }
    }
}

#[test]
fn a_request_that_waited_before_waits_on_whatever_its_queue_may_hold() {
    let (mut rig, waits) = waiter(with_queue(OnUnavailable::Local(0), Some(1)));
    // The server forgets it, and it is on its way there again.
    rig.ledger = Ledger::new();
    rig.other();
    rig.session.places.iter_mut().for_each(|place| place.state = State::Waiting { ticket: None });
    rig.pass(1000);
    rig.answer();
    let question = rig.session.poll_revocation_check().expect("a question");
    let now = rig.now();
    rig.session.handle_revocations_known(question, now);
    let newcomer = rig.request_with(with_queue(OnUnavailable::Local(0), Some(1)));
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert!(is_refused(rig.progress(newcomer), RejectReason::QueueFull));
}

#[test]
fn the_next_in_line_has_its_share_whoever_leaves() {
    for leaves in [Rig::leave, |rig: &mut Rig, index| {
        let now = rig.now();
        rig.session.handle_wait_timeout(index, now);
    }] {
        let mut rig = outage(5);
        let one = rig.request_with(with(OnUnavailable::Local(1)));
        let two = rig.request_with(with(OnUnavailable::Local(1)));
        let three = rig.request_with(with(OnUnavailable::Local(3)));
        let seen = [one, two, three].map(|index| rig.progress(index));
        assert_eq!(seen, [Progress::Admitted, Progress::Waiting, Progress::Waiting]);
        leaves(&mut rig, two);
        assert_eq!(rig.progress(three), Progress::Admitted);
    }
}

#[test]
fn whoever_waited_before_the_outage_waits_on_however_many_do() {
    let (mut rig, first) = waiter(with(OnUnavailable::Local(0)));
    let second = rig.request_with(with(OnUnavailable::Local(0)));
    rig.settle();
    rig.session.places.iter_mut().for_each(|place| place.options.max_queue = Some(0));
    rig.session.handle_unreachable(rig.now());
    assert_eq!([first, second].map(|index| rig.progress(index)), [Progress::Waiting; 2]);
}

#[test]
fn a_place_that_is_granted_in_an_outage_does_not_stand_in_the_way_of_a_share() {
    let local = AcquireOptions { on_unavailable: OnUnavailable::Local(1), ..OPTIONS };
    let mut rig = Rig::new(1);
    rig.other();
    let waits = [(); 2].map(|()| rig.request_with(local));
    rig.settle();
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let progress = waits.map(|index| rig.progress(index));
    assert_eq!(progress, [Progress::Admitted, Progress::Waiting]);
    // A new connection brings its hint before it is announced.
    let n = rig.id(waits[1]).n;
    rig.session.handle_hint(Hint { n, bound: None, claim: None, lease_end: EPOCH_MS + 3000 }, now);
    assert_eq!(rig.progress(waits[1]), Progress::Held);
    waits.into_iter().for_each(|index| rig.leave(index));
    let next = rig.request_with(local);
    assert_eq!(rig.progress(next), Progress::Admitted);
}
