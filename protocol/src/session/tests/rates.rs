//! Requests that start by time: each grant counts for a window, whatever becomes of it.

use super::*;
use crate::bound::Bound;
use crate::bound_rate::BoundRate;
use crate::rate::Rate;

/// This many starts in this many ms.
pub(super) fn rated(starts: u32, window_ms: u64) -> AcquireOptions {
    AcquireOptions { rate: Rate::parse(&format!("{starts}/{window_ms}")), ..OPTIONS }
}

pub(super) fn waiting(rig: &mut Rig, places: &[usize]) -> usize {
    places.iter().filter(|index| rig.progress(**index) == Progress::Waiting).count()
}

#[test]
fn who_waits_for_the_window_has_its_permit_when_it_opens() {
    let mut rig = Rig::new(100);
    let all: Vec<_> = (0..6).map(|_| rig.request_with(rated(2, 1000))).collect();
    rig.settle();
    assert_eq!(waiting(&mut rig, &all), 4);
    rig.live(990);
    assert_eq!(waiting(&mut rig, &all), 4, "no start leaves its window early");
    rig.live(20);
    assert_eq!(waiting(&mut rig, &all), 2);
    assert!(all[..4].iter().all(|index| rig.progress(*index) == Progress::Held), "in order");
    rig.live(980);
    assert_eq!(waiting(&mut rig, &all), 2);
    rig.live(30);
    assert_eq!(waiting(&mut rig, &all), 0);
}

#[test]
fn a_request_that_ends_early_gives_no_start_back() {
    let mut rig = Rig::new(1);
    for _ in 0..2 {
        let index = rig.request_with(rated(2, 1000));
        rig.settle();
        assert_eq!(rig.progress(index), Progress::Held);
        rig.leave(index);
        rig.settle();
    }
    let third = rig.request_with(rated(2, 1000));
    rig.live(900);
    assert_eq!(rig.progress(third), Progress::Waiting);
    rig.live(200);
    assert_eq!(rig.progress(third), Progress::Held);
}

#[test]
fn a_request_that_may_not_wait_is_told_when_the_next_can_start() {
    let mut rig = Rig::new(100);
    rig.request_with(rated(1, 1000));
    rig.settle();
    rig.live(300);
    let index = rig.request_with(AcquireOptions { max_queue: None, ..rated(1, 1000) });
    rig.settle();
    let Progress::Refused { reason, ends_in, .. } = rig.progress(index) else { panic!() };
    assert_eq!((reason, ends_in), (RejectReason::Rate, Some(ms(700))));
    // It is not blamed where no permit is free.
    let mut rig = Rig::new(1);
    rig.request_with(rated(1, 1000));
    let index = rig.request_with(AcquireOptions { max_queue: None, ..rated(1, 1000) });
    rig.settle();
    assert!(is_refused(rig.progress(index), RejectReason::Limit));
}

#[test]
fn a_request_that_costs_more_than_the_rate_is_refused() {
    let mut rig = Rig::new(100);
    let claim = Some(Claim::new(Tenant::of_hash(7)).with_cost(3));
    let index = rig.request_with(AcquireOptions { claim, ..rated(2, 1000) });
    assert!(is_refused(rig.progress(index), RejectReason::CostTooHigh));
    // A smooth rate would need a day and a half for it.
    let rate = rated(2, 24 * 3600 * 1000).rate.map(Rate::spread);
    let index = rig.request_with(AcquireOptions { claim, rate, ..OPTIONS });
    assert!(is_refused(rig.progress(index), RejectReason::CostTooHigh));
    let [one, two] = [1, 2].map(|cost| {
        let claim = Some(Claim::new(Tenant::of_hash(7)).with_cost(cost));
        rig.request_with(AcquireOptions { claim, ..rated(2, 1000) })
    });
    rig.live(900);
    assert_eq!([one, two].map(|i| rig.progress(i)), [Progress::Held, Progress::Waiting]);
    rig.live(200);
    assert_eq!(rig.progress(two), Progress::Held);
}

/// A place of another process, with this rate. Returns its status.
fn other(rig: &mut Rig, n: u64, starts: u32, window_ms: u64) -> PlaceStatus {
    let bound =
        Bound { limit: rig.limit, headroom: 0, rate: BoundRate::new(starts, ms(window_ms)) };
    let claim = Some(Claim::without_tenant());
    let id = PlaceId { node: OTHER, poll_only: false, n, bound: Some(bound), claim };
    let caller = Caller { max_waiting: 100, ..rig.ask(OTHER, rig.limit) };
    let reply = rig.ledger.acquire(caller, 3_600_000, Some(8), &[], &[id], &mut |_, _| true);
    reply.statuses[0]
}

#[test]
fn the_process_that_gives_a_permit_back_asks_again_when_the_window_opens() {
    let mut rig = Rig::new(1);
    let own = rig.request_with(rated(1, 600));
    rig.settle();
    assert!(matches!(other(&mut rig, 1, 1, 600), PlaceStatus::Waiting(_)));
    rig.live(100);
    rig.leave(own);
    rig.live(480);
    let waits = |rig: &Rig| rig.ledger.places().any(|(.., ticket)| ticket.is_some());
    assert!(waits(&rig), "the permit is free, and the window is not open");
    rig.live(30);
    assert!(!waits(&rig), "nobody else knows that it opened");
    assert!(!rig.session.is_busy());
}

#[test]
fn without_a_waiting_place_of_its_own_it_asks_for_a_near_opening_only() {
    let mut rig = Rig::new(1);
    let own = rig.request_with(rated(1, 60_000));
    rig.settle();
    other(&mut rig, 1, 1, 60_000);
    rig.leave(own);
    rig.settle();
    rig.pass(4900);
    assert!(rig.settle().is_empty(), "the other process is told with its renewals");
    rig.pass(200);
    assert!(rig.is_over());
}

#[test]
fn a_process_without_a_waiting_place_asks_for_others_once() {
    let mut rig = Rig::new(1);
    let own = rig.request_with(rated(1, 100));
    rig.settle();
    for n in 1..=8 {
        other(&mut rig, n, 1, 100);
    }
    rig.leave(own);
    let mut calls = 0;
    for _ in 0..800 {
        rig.pass(1);
        calls += rig.settle().len();
    }
    assert!(calls <= 2, "{calls} calls for places of others");
}

#[test]
fn a_short_window_does_not_wait_for_the_starts_of_a_long_one() {
    let mut rig = Rig::new(100);
    for _ in 0..5 {
        rig.request_with(rated(5, 60_000));
    }
    rig.live(1500);
    let short = rig.request_with(rated(1, 1000));
    rig.settle();
    assert_eq!(rig.progress(short), Progress::Held);
    let long = rig.request_with(rated(5, 60_000));
    rig.live(1000);
    assert_eq!(rig.progress(long), Progress::Waiting);
}

#[test]
fn a_request_that_waits_in_vain_for_the_window_is_told_when_it_opens() {
    let mut rig = Rig::new(100);
    rig.request_with(rated(1, 60_000));
    rig.settle();
    let waits = rig.request_with(rated(1, 60_000));
    rig.live(1000);
    let now = rig.now();
    rig.session.handle_wait_timeout(waits, now);
    let Progress::Refused { reason, ends_in, .. } = rig.progress(waits) else { panic!() };
    assert_eq!(reason, RejectReason::QueueTimeout);
    assert!(ends_in.is_some_and(|left| left > ms(58_000) && left <= ms(59_001)), "{ends_in:?}");
    // Where no permit is free either, nothing is known of the time.
    let mut rig = Rig::new(1);
    rig.request_with(rated(9, 60_000));
    let waits = rig.request_with(rated(9, 60_000));
    rig.live(1000);
    let now = rig.now();
    rig.session.handle_wait_timeout(waits, now);
    assert!(matches!(rig.progress(waits), Progress::Refused { ends_in: None, .. }));
}

#[test]
fn windows_that_open_at_short_intervals_are_asked_for_together() {
    let mut rig = Rig::new(1000);
    for _ in 0..200 {
        rig.request_with(rated(1, 1));
    }
    let mut calls = 0;
    for _ in 0..50 {
        rig.pass(1);
        calls += rig.settle().len();
    }
    assert!(calls <= 8, "{calls} calls in 50 ms");
}

#[test]
fn the_queue_of_requests_without_a_tenant_is_as_long_as_it_says() {
    let mut rig = Rig::new(100);
    let options = AcquireOptions { max_queue: Some(3), max_waiting: 4, ..rated(1, 1000) };
    let all: Vec<_> = (0..5).map(|_| rig.request_with(options)).collect();
    rig.settle();
    assert_eq!(waiting(&mut rig, &all), 3);
    assert!(is_refused(rig.progress(all[4]), RejectReason::QueueFull));
}

#[test]
fn once_only_the_limit_keeps_a_request_back_no_rate_is_blamed() {
    let mut rig = Rig::new(1);
    for _ in 0..2 {
        let first = rig.request_with(rated(2, 60_000));
        rig.settle();
        rig.leave(first);
    }
    let next = rig.request_with(rated(2, 60_000));
    rig.settle();
    assert_eq!(rig.progress(next), Progress::Waiting, "the window is full");
    // The server loses its data, and with them the starts.
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    rig.live(1_000);
    assert_eq!(rig.progress(next), Progress::Held);
    let waits = rig.request_with(rated(2, 60_000));
    rig.live(1_000);
    let now = rig.now();
    rig.session.handle_wait_timeout(waits, now);
    let Progress::Refused { reason, ends_in, .. } = rig.progress(waits) else { panic!() };
    assert_eq!((reason, ends_in), (RejectReason::QueueTimeout, None));
}

/// Another process, whose places wait in the same ledger.
struct Peer {
    session: Session,
    places: Vec<usize>,
}

impl Peer {
    fn new(rig: &Rig, options: AcquireOptions, count: usize) -> Self {
        let mut session = Session::new(OTHER, 1, Connected::default(), false);
        let join = |_| session.handle_request(rig.limit, options, rig.now()).expect("room");
        let places = (0..count).map(join).collect();
        Self { session, places }
    }

    /// Sends and answers what is due. Returns how many of its places have a permit.
    fn live(&mut self, rig: &mut Rig) -> usize {
        let now = rig.now();
        if self.session.poll_timeout().is_some_and(|at| at <= now) {
            self.session.handle_timeout(now);
        }
        while let Some(call) = self.session.poll_call(now) {
            let caller = Caller { max_waiting: call.max_waiting, ..rig.ask(OTHER, call.limit) };
            let post: crate::ledger::Post<'_> = &mut |_, _| true;
            let reply = match &call.op {
                Op::Acquire { leaving, lease_ms, max_queue, ids } => {
                    rig.ledger.acquire(caller, *lease_ms, *max_queue, leaving, ids, post)
                }
                Op::Release { ids } => rig.ledger.release(caller, ids, post),
                Op::Renew { lease_ms, ids } => rig.ledger.renew(caller, *lease_ms, ids, post),
                other => panic!("{other:?}"),
            };
            self.session.handle_reply(&call.op, &reply, Sending::at(now), now);
        }
        self.places.iter().filter(|index| self.session.is_held(**index)).count()
    }
}

#[test]
fn places_that_wait_elsewhere_are_granted_at_each_opening_once_permits_are_free() {
    let rated = AcquireOptions { max_queue: Some(100), ..rated(2, 100) };
    let mut rig = Rig::new(6);
    let own: Vec<_> = (0..6)
        .map(|_| {
            let index = rig.request_with(rated);
            rig.live(60);
            assert_eq!(rig.progress(index), Progress::Held);
            index
        })
        .collect();
    let mut peer = Peer::new(&rig, rated, 6);
    assert_eq!(peer.live(&mut rig), 0);
    rig.live(200);
    // All permits are given back at once: two start at once, and two each 100 ms.
    for index in own {
        rig.leave(index);
    }
    let mut granted = Vec::new();
    for _ in 0..30 {
        rig.pass(10);
        rig.settle();
        for (id, _, ticket) in rig.ledger.places().collect::<Vec<_>>() {
            if ticket.is_none() && id.node == OTHER && !granted.contains(&id) {
                granted.push(id);
            }
        }
        peer.live(&mut rig);
    }
    assert_eq!(granted.len(), 6);
}
