//! How fast the queue moves, what a refusal tells of it, and who waits in vain.

use super::*;
use crate::rate::Rate;

/// How many were ahead of a request that waits no longer, and how long one that comes now would wait, in ms.
fn told(rig: &mut Rig, index: usize) -> (Option<u32>, Option<u64>) {
    let now = rig.now();
    rig.session.handle_wait_timeout(index, now);
    told_of(rig, index)
}

fn told_of(rig: &mut Rig, index: usize) -> (Option<u32>, Option<u64>) {
    let Progress::Refused { ahead, expected_wait, .. } = rig.progress(index) else {
        panic!("{:?}", rig.progress(index));
    };
    let ms = |wait: Duration| u64::try_from(wait.as_millis()).expect("a short time");
    (ahead, expected_wait.map(ms))
}

/// One permit, which moves on every `each_ms`: each of `grants` requests waited behind one, and the last holds it.
fn moving(rig: &mut Rig, options: AcquireOptions, grants: usize, each_ms: u64) -> usize {
    let mut holds = rig.request_with(options);
    rig.settle();
    for _ in 0..grants {
        let next = rig.request_with(options);
        rig.settle();
        rig.live(each_ms);
        rig.leave(holds);
        rig.settle();
        assert_eq!(rig.progress(next), Progress::Held);
        holds = next;
    }
    holds
}

/// Six requests wait at once, and the permit that `holds` has moves on to the next one each 100 ms.
fn queue_that_moves(rig: &mut Rig, mut holds: usize) {
    let waits = [(); 6].map(|()| rig.request());
    rig.settle();
    for next in waits {
        rig.live(100);
        rig.leave(holds);
        rig.settle();
        holds = next;
    }
}

/// Requests that wait, each of which came 10 ms after the one before.
fn waiters(rig: &mut Rig, count: usize) -> Vec<usize> {
    waiters_with(rig, OPTIONS, count)
}

fn waiters_with(rig: &mut Rig, options: AcquireOptions, count: usize) -> Vec<usize> {
    let waits = |rig: &mut Rig| {
        let index = rig.request_with(options);
        rig.settle();
        rig.pass(10);
        index
    };
    (0..count).map(|_| waits(rig)).collect()
}

const fn patient(patience_ms: u32) -> AcquireOptions {
    AcquireOptions { patience_ms, ..OPTIONS }
}

fn of_tenant(tenant: u64) -> AcquireOptions {
    AcquireOptions { claim: Some(Claim::new(Tenant::of_hash(tenant))), ..OPTIONS }
}

fn is_hopeless(rig: &mut Rig, options: AcquireOptions) -> bool {
    let index = rig.request_with(options);
    rig.settle();
    let progress = rig.progress(index);
    let is_hopeless = is_refused(progress, RejectReason::Hopeless);
    assert!(is_hopeless || progress == Progress::Waiting, "{progress:?}");
    rig.leave(index);
    rig.settle();
    is_hopeless
}

#[test]
fn a_refusal_tells_how_many_were_ahead() {
    let mut rig = Rig::new(1);
    for _ in 0..3 {
        rig.other();
    }
    // In one call, of which the last finds the queue full.
    let full = AcquireOptions { max_queue: Some(4), ..OPTIONS };
    let [first, second, third] = [0; 3].map(|_| rig.request_with(full));
    let none = rig.request_with(AcquireOptions { max_queue: None, ..OPTIONS });
    rig.settle();
    assert_eq!(told_of(&mut rig, third), (Some(4), None));
    assert_eq!(told_of(&mut rig, none), (Some(4), None));
    assert_eq!(told(&mut rig, first), (Some(2), None));
    assert_eq!(told(&mut rig, second), (Some(3), None), "as it joined");
}

#[test]
fn a_refusal_tells_the_expected_wait_once_five_of_this_process_were_granted() {
    for (grants, expected) in [(4, None), (5, Some(400))] {
        let mut rig = Rig::new(1);
        moving(&mut rig, OPTIONS, grants, 100);
        let waits = waiters(&mut rig, 4);
        // Three are left, so a newcomer has the fourth turn.
        assert_eq!(told(&mut rig, waits[3]), (Some(3), expected), "{grants}");
    }
}

#[test]
fn the_first_one_that_waits_counts_however_long_its_answer_takes() {
    let mut rig = Rig::new(1);
    let mut holds = rig.request();
    rig.settle();
    for _ in 0..5 {
        let next = rig.request();
        let (join, sent) = (rig.call().expect("an acquire"), rig.now());
        let reply = rig.carry_out(&join);
        rig.pass(20);
        rig.reply(&join.op, &reply, sent);
        rig.pass(80);
        rig.leave(holds);
        rig.settle();
        holds = next;
    }
    let asks = waiters(&mut rig, 1)[0];
    assert_eq!(told(&mut rig, asks), (Some(0), Some(100)));
    assert!(rig.session.is_held(holds));
}

#[test]
fn a_turn_counts_those_ahead_so_a_short_queue_and_a_long_one_tell_the_same() {
    let mut rig = Rig::new(1);
    let holds = moving(&mut rig, OPTIONS, 0, 0);
    queue_that_moves(&mut rig, holds);
    let [waits, _] = [(); 2].map(|()| rig.request());
    rig.settle();
    assert_eq!(told(&mut rig, waits), (Some(0), Some(200)));
}

/// Lets a request wait, and returns what it was told after that.
fn expected(rig: &mut Rig) -> Option<u64> {
    let waits = waiters(rig, 1)[0];
    let expected = told(rig, waits).1;
    rig.settle();
    expected
}

#[test]
fn the_last_half_of_at_most_128_grants_within_half_a_minute_counts() {
    let mut rig = Rig::new(1);
    let slow = moving(&mut rig, OPTIONS, 70, 200);
    rig.leave(slow);
    rig.settle();
    let fast = moving(&mut rig, OPTIONS, 63, 100);
    assert_eq!(expected(&mut rig), Some(101), "one of 64 is a slow one");
    rig.leave(fast);
    rig.settle();
    let fast = moving(&mut rig, OPTIONS, 1, 100);
    assert_eq!(expected(&mut rig), Some(100), "none of 64");
    rig.live(29_000);
    assert!(expected(&mut rig).is_some(), "the last ones are not that old");
    rig.live(1_000);
    assert_eq!(expected(&mut rig), None);
    assert!(rig.session.is_held(fast));
}

#[test]
fn of_all_grants_those_count_whose_turns_were_the_nearest() {
    let mut rig = Rig::new(1);
    let holds = moving(&mut rig, OPTIONS, 5, 400);
    // From the second turn on, one takes 100 ms.
    queue_that_moves(&mut rig, holds);
    let waits = waiters(&mut rig, 6);
    assert_eq!(told(&mut rig, waits[5]), (Some(5), Some(600)), "turns 2 to 6");
    rig.settle();
    for index in &waits[..5] {
        rig.leave(*index);
    }
    rig.settle();
    // The one of the first turn that took 100 ms is the last one, and four took 400 ms.
    assert_eq!(expected(&mut rig), Some(340));
}

#[test]
fn own_places_that_left_are_not_ahead() {
    for (options, ahead) in [(OPTIONS, Some(1)), (of_tenant(1), None)] {
        let mut rig = Rig::new(1);
        moving(&mut rig, options, 5, 100);
        let waits = waiters_with(&mut rig, options, 4);
        // A newcomer is on its way when they leave, so the reply still counts them.
        let newcomer = rig.request_with(options);
        let join = rig.call().expect("an acquire");
        for index in &waits[..3] {
            rig.leave(*index);
        }
        let (reply, now) = (rig.carry_out(&join), rig.now());
        assert_eq!(reply.usage, Some(Usage { in_use: 1, waiting: 5 }));
        rig.reply(&join.op, &reply, now);
        assert_eq!(told(&mut rig, newcomer), (ahead, Some(200)));
        // Once their releases are answered, they are not taken off twice.
        rig.settle();
        let last = rig.request_with(options);
        rig.settle();
        assert_eq!(told(&mut rig, last), (ahead, Some(200)));
    }
}

#[test]
fn those_that_gave_up_since_the_last_count_are_not_ahead_of_one_that_comes_now() {
    let mut rig = Rig::new(1);
    moving(&mut rig, OPTIONS, 5, 100);
    let waits = waiters(&mut rig, 6);
    let expected = |rig: &mut Rig, index| {
        let expected = told(rig, index).1;
        // Their releases are answered, and nothing is counted.
        rig.leave(index);
        rig.settle();
        expected
    };
    let all: Vec<_> = waits.into_iter().map(|index| expected(&mut rig, index)).collect();
    assert_eq!(all, [600, 500, 400, 300, 200, 100].map(Some));
}

#[test]
fn those_that_were_granted_since_the_last_count_are_not_ahead_either() {
    let mut rig = Rig::new(1);
    let holds = moving(&mut rig, OPTIONS, 5, 100);
    let waits = waiters(&mut rig, 4);
    rig.leave(holds);
    rig.settle();
    assert_eq!(rig.progress(waits[0]), Progress::Held);
    assert_eq!(
        told(&mut rig, waits[3]),
        (Some(3), Some(264)),
        "two are left, and one of the last five waited for 40 ms"
    );
}

#[test]
fn a_permit_that_is_given_back_is_not_taken_off_those_ahead() {
    let mut rig = Rig::new(1);
    let holds = moving(&mut rig, OPTIONS, 5, 100);
    waiters(&mut rig, 2);
    let newcomer = rig.request();
    let (join, now) = (rig.call().expect("an acquire"), rig.now());
    rig.leave(holds);
    let reply = rig.carry_out(&join);
    rig.reply(&join.op, &reply, now);
    assert_eq!(told(&mut rig, newcomer), (Some(2), Some(300)));
}

#[test]
fn a_request_that_was_revoked_is_told_nothing_of_the_queue() {
    let mut rig = Rig::new(1);
    moving(&mut rig, OPTIONS, 5, 100);
    let waits = waiters(&mut rig, 1)[0];
    let (id, now) = (rig.id(waits), rig.now());
    rig.session.handle_revoked(id, now);
    assert_eq!(told_of(&mut rig, waits), (None, None));
}

#[test]
fn a_newcomer_that_left_before_its_answer_is_not_ahead() {
    let mut rig = Rig::new(1);
    moving(&mut rig, OPTIONS, 5, 100);
    let [leaves, newcomer] = [(); 2].map(|()| rig.request());
    let join = rig.call().expect("an acquire");
    rig.leave(leaves);
    let (reply, now) = (rig.carry_out(&join), rig.now());
    rig.reply(&join.op, &reply, now);
    assert_eq!(told(&mut rig, newcomer), (Some(0), Some(100)));
}

/// What changes how fast the queue moves.
type Change = (&'static str, fn(&mut Rig));

const CHANGES: [Change; 7] = [
    ("an operator's limit", |rig| {
        let overrides = Override { limit: Some(1), ..Override::default() };
        let none = Override { limit: Some(2), ..Override::default() };
        let now = rig.now();
        rig.session.handle_override(none, now);
        rig.session.handle_override(overrides, now);
    }),
    ("a policy", |rig| {
        let now = rig.now();
        rig.session.handle_policy(1, 0, None, now);
    }),
    ("a pause", |rig| {
        let now = rig.now();
        rig.session.handle_pause(Some(now + ms(10)), now);
        rig.live(20);
    }),
    ("an outage", |rig| {
        let now = rig.now();
        rig.session.handle_unreachable(now);
        rig.reconnect(same_data());
    }),
    ("a connection", |rig| rig.reconnect(same_data())),
    ("a loss of data", |rig| {
        let now = rig.now();
        rig.session.handle_data_lost(now);
    }),
    ("another limit of requests", |rig| {
        rig.limit = 2;
        let index = rig.request();
        rig.settle();
        rig.leave(index);
        rig.limit = 1;
        let index = rig.request();
        rig.settle();
        rig.leave(index);
        rig.settle();
    }),
];

#[test]
fn nothing_is_told_after_what_changes_how_fast_the_queue_moves() {
    for (what, change) in CHANGES {
        let mut rig = Rig::new(1);
        let mut holds = moving(&mut rig, OPTIONS, 16, 100);
        // These wait through the change, and say nothing of what comes after it.
        let waits: Vec<_> = [(); 6].map(|()| rig.request()).into();
        rig.settle();
        rig.pass(1);
        change(&mut rig);
        rig.settle();
        rig.live(10);
        for next in waits {
            rig.leave(holds);
            rig.settle();
            assert_eq!(rig.progress(next), Progress::Held, "{what}");
            holds = next;
        }
        let asks = rig.request();
        rig.settle();
        assert_eq!(told(&mut rig, asks), (Some(0), None), "{what}");
        rig.settle();
        rig.leave(holds);
        rig.settle();
        moving(&mut rig, OPTIONS, 5, 100);
        let asks = rig.request();
        rig.settle();
        assert_eq!(told(&mut rig, asks), (Some(0), Some(100)), "{what}");
    }
}

#[test]
fn samples_say_nothing_of_a_limit_that_a_request_has_just_brought() {
    let mut rig = Rig::new(1);
    moving(&mut rig, OPTIONS, 5, 100);
    let asks = waiters(&mut rig, 1)[0];
    rig.limit = 2;
    rig.request();
    assert_eq!(told(&mut rig, asks), (Some(0), None));
}

#[test]
fn a_request_that_is_asked_for_twice_has_no_turn() {
    let mut rig = Rig::new(1);
    rig.other();
    let asks = rig.request();
    let join = rig.call().expect("an acquire");
    rig.carry_out(&join);
    rig.other();
    rig.pass(10);
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!(told(&mut rig, asks), (None, None), "the other one came later");
}

#[test]
fn in_an_outage_with_a_limit_of_0_and_where_permits_are_passed_on_nothing_is_told() {
    let mut rig = Rig::new(1);
    moving(&mut rig, with(OnUnavailable::Local(1)), 5, 100);
    let asks = rig.request_with(with(OnUnavailable::Local(1)));
    rig.settle();
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(told(&mut rig, asks), (None, None));

    let mut rig = Rig::new(1);
    moving(&mut rig, OPTIONS, 5, 100);
    let asks = rig.request();
    rig.settle();
    let now = rig.now();
    rig.session.handle_override(Override { limit: Some(0), ..Override::default() }, now);
    assert_eq!(told(&mut rig, asks), (None, None));

    let mut rig = Rig::new(1);
    let holds = moving(&mut rig, OPTIONS, 5, 100);
    let before = rig.request();
    rig.settle();
    let reuse = rig.request_with(AcquireOptions { reuse_ms: 50, ..OPTIONS });
    let asks = rig.request_with(patient(1));
    rig.settle();
    assert_eq!(told(&mut rig, asks), (None, None), "it does not wait in vain, either");
    assert_eq!(told(&mut rig, before), (Some(0), None));
    rig.leave(reuse);
    rig.leave(holds);
}

#[test]
fn a_tenant_is_told_of_its_own_line() {
    let [slow, fast] = [1, 2].map(of_tenant);
    let mut rig = Rig::new(1);
    let holds = moving(&mut rig, fast, 5, 100);
    rig.leave(holds);
    rig.settle();
    let holds = moving(&mut rig, slow, 5, 300);
    let waits = [slow, slow, fast, slow].map(|options| rig.request_with(options));
    rig.settle();
    assert_eq!(told(&mut rig, waits[3]), (None, Some(900)), "two of its own are ahead");
    assert_eq!(told(&mut rig, waits[2]), (None, Some(100)));
    assert!(rig.session.is_held(holds));
}

/// A place of a tenant in another process takes the permit, or waits.
fn elsewhere(rig: &mut Rig, options: AcquireOptions) -> PlaceId {
    rig.others += 1;
    let id =
        PlaceId { node: OTHER, poll_only: false, n: rig.others, bound: None, claim: options.claim };
    let caller = Caller { max_waiting: 1000, ..rig.ask(OTHER, 1) };
    rig.ledger.acquire(caller, 3_600_000, Some(500), &[], &[id], &mut |_, _| true);
    id
}

#[test]
fn a_tenants_line_in_other_processes_is_ahead_of_its_request_too() {
    let tenant = of_tenant(1);
    let mut rig = Rig::new(1);
    moving(&mut rig, tenant, 5, 100);
    for _ in 0..4 {
        elsewhere(&mut rig, tenant);
    }
    let waits = waiters_with(&mut rig, tenant, 2);
    assert_eq!(told(&mut rig, waits[1]), (None, Some(600)), "four there, and one here");
    let none = rig.request_with(AcquireOptions { max_queue: None, ..tenant });
    rig.settle();
    assert_eq!(told_of(&mut rig, none), (None, Some(600)));
}

#[test]
fn of_the_places_in_other_processes_a_tenant_has_the_share_that_it_has_here() {
    let [tenant, other] = [1, 2].map(of_tenant);
    let mut rig = Rig::new(1);
    moving(&mut rig, tenant, 5, 100);
    for _ in 0..8 {
        elsewhere(&mut rig, tenant);
    }
    waiters_with(&mut rig, other, 3);
    // It was alone when four of its own came, is one of four now, and so is the one that would come.
    let asks = rig.request_with(tenant);
    rig.settle();
    assert_eq!(told(&mut rig, asks), (None, Some(500)), "6 of 12, so 4 of 8");
}

#[test]
fn of_many_lines_those_that_moved_last_are_known() {
    let mut rig = Rig::new(1);
    for tenant in 0..9 {
        let holds = moving(&mut rig, of_tenant(tenant), 5, 20);
        rig.leave(holds);
        rig.settle();
        if tenant == 7 {
            let holds = moving(&mut rig, of_tenant(0), 1, 20);
            rig.leave(holds);
            rig.settle();
        }
    }
    rig.other();
    let asks = |rig: &mut Rig, tenant| {
        let index = rig.request_with(of_tenant(tenant));
        rig.settle();
        told(rig, index).1.is_some()
    };
    let known: Vec<_> = (0..9).filter(|tenant| asks(&mut rig, *tenant)).collect();
    assert_eq!(known, [0, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_request_that_would_wait_more_than_twice_as_long_as_it_may_is_refused() {
    let mut rig = Rig::new(1);
    moving(&mut rig, OPTIONS, 5, 100);
    let waits = waiters(&mut rig, 3);
    // It has the fourth turn, which takes 400 ms.
    for (patience_ms, expected) in [(0, false), (199, true), (200, false), (1000, false)] {
        assert_eq!(is_hopeless(&mut rig, patient(patience_ms)), expected, "{patience_ms}");
    }
    assert_eq!(rig.places().len(), 4, "those that were refused have left");
    assert!(waits.iter().all(|index| rig.progress(*index) == Progress::Waiting));
}

#[test]
fn what_is_left_of_its_own_wait_decides() {
    let mut rig = Rig::new(1);
    moving(&mut rig, OPTIONS, 5, 100);
    let asks = rig.request_with(patient(90));
    let (join, sent) = (rig.call().expect("an acquire"), rig.now());
    // 50 ms would have been enough, but 39 ms are left.
    rig.pass(51);
    let reply = rig.carry_out(&join);
    rig.reply(&join.op, &reply, sent);
    assert!(is_refused(rig.progress(asks), RejectReason::Hopeless));
    assert_eq!(told_of(&mut rig, asks), (Some(0), Some(100)));
}

#[test]
fn requests_that_may_wait_for_different_times_share_a_call() {
    let mut rig = Rig::new(2);
    for patience_ms in [1, 2] {
        rig.request_with(patient(patience_ms));
    }
    assert_eq!(rig.settle().len(), 1);
}

#[test]
fn places_whose_releases_were_not_answered_in_time_are_not_taken_off_for_ever() {
    let mut rig = Rig::new(1);
    let held: Vec<_> = (0..4).map(|_| rig.other()).collect();
    let leaves = rig.request();
    rig.settle();
    let now = rig.now();
    rig.session.handle_unreachable(now);
    rig.leave(leaves);
    // Its release is over one lease after its own.
    rig.pass(6_000);
    rig.reconnect(same_data());
    rig.settle();
    let asks = rig.request();
    rig.settle();
    assert_eq!(told(&mut rig, asks).0, Some(3));
    assert_eq!(held.len(), 4);
}

#[test]
fn where_a_window_opens_soon_nobody_waits_in_vain_because_others_waited_for_all_of_it() {
    let rated = AcquireOptions { rate: Rate::parse("1/4000"), ..OPTIONS };
    let mut rig = Rig::new(100);
    let mut holds = rig.request_with(rated);
    rig.settle();
    for _ in 0..5 {
        let next = rig.request_with(rated);
        rig.live(4_010);
        assert_eq!(rig.progress(next), Progress::Held);
        rig.leave(holds);
        holds = next;
    }
    rig.live(3_800);
    let asks = rig.request_with(AcquireOptions { patience_ms: 1_000, ..rated });
    rig.settle();
    assert_eq!(rig.progress(asks), Progress::Waiting);
    rig.live(200);
    assert_eq!(rig.progress(asks), Progress::Held);
    assert!(rig.session.is_held(holds));
}

#[test]
fn a_tenant_whose_line_is_mostly_elsewhere_does_not_wait_in_vain_for_a_few_more() {
    let tenant = AcquireOptions { max_queue: Some(100), max_waiting: 1000, ..of_tenant(1) };
    let mut rig = Rig::new(1);
    let mut others = VecDeque::new();
    for _ in 0..10 {
        others.push_back(elsewhere(&mut rig, tenant));
    }
    // Each permit is given back after 100 ms. One request of this process waits at a time, behind ten of another.
    for _ in 0..6 {
        let own = rig.request_with(tenant);
        rig.settle();
        for _ in 0..10 {
            others.push_back(elsewhere(&mut rig, tenant));
        }
        for _ in 0..10 {
            rig.live(100);
            let id = others.pop_front().expect("ten of them");
            rig.other_leaves(id).into_iter().for_each(|grant| rig.hint(grant));
        }
        assert_eq!(rig.progress(own), Progress::Held);
        rig.live(100);
        rig.leave(own);
        rig.settle();
    }
    // Five come together: the last one will have its permit after 1.5 s.
    let asks: Vec<_> =
        (0..5).map(|_| rig.request_with(AcquireOptions { patience_ms: 2_000, ..tenant })).collect();
    rig.settle();
    for index in asks {
        assert_eq!(rig.progress(index), Progress::Waiting);
    }
}
