//! Requests that wait adopt a policy that was reloaded.

use super::*;
use crate::bound::Bound;
use crate::rate::Rate;

/// A place of another process, which knows this limit: it holds, or waits.
fn other(rig: &mut Rig, n: u64, limit: u32, claim: Option<Claim>) -> PlaceId {
    let bound = Some(Bound { limit, headroom: 0, rate: None });
    let id = PlaceId { node: OTHER, poll_only: false, n, bound, claim };
    let caller = Caller { max_waiting: 1000, ..rig.ask(OTHER, limit) };
    rig.ledger.acquire(caller, 3_600_000, Some(1000), &[], &[id], &mut |_, _| true);
    id
}

fn waits(rig: &Rig, id: PlaceId) -> bool {
    rig.ledger.places().any(|(other, _, ticket)| other == id && ticket.is_some())
}

fn reload(rig: &mut Rig, limit: u32) {
    let now = rig.now();
    rig.session.handle_policy(limit, 0, None, now);
    rig.limit = limit;
}

#[test]
fn requests_that_wait_are_judged_by_a_new_limit_and_keep_their_turn() {
    let mut rig = Rig::new(1);
    other(&mut rig, 1, 1, None);
    let (first, second) = (rig.request(), rig.request());
    rig.settle();
    let before = rig.id(first);
    let tickets = |rig: &Rig| {
        let places = rig.ledger.places();
        let mut waiting: Vec<_> =
            places.filter_map(|(id, _, ticket)| Some((ticket?, id.bound))).collect();
        waiting.sort_unstable();
        waiting
    };
    let old = tickets(&rig);
    reload(&mut rig, 2);
    rig.settle();
    assert_ne!(rig.id(first), before);
    assert_eq!((rig.progress(first), rig.progress(second)), (Progress::Held, Progress::Waiting));
    assert_eq!(tickets(&rig), [(old[1].0, Some(Bound { limit: 2, headroom: 0, rate: None }))]);
    assert_eq!(rig.places().len(), 3, "no old place is left");
    // The same once more changes nothing.
    reload(&mut rig, 2);
    assert_eq!(rig.settle(), []);
    // While the backend is away, it is known when that is back.
    let now = rig.now();
    rig.session.handle_unreachable(now);
    rig.session.handle_policy(3, 0, None, now);
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!(rig.progress(second), Progress::Held);
    rig.live(2000);
    assert_eq!(rig.places().len(), 3);
}

#[test]
fn a_process_that_reloads_later_is_not_passed() {
    let mut rig = Rig::new(1);
    other(&mut rig, 1, 1, None);
    let first = rig.request();
    rig.settle();
    rig.now_ms += 1;
    let later = other(&mut rig, 2, 2, None);
    reload(&mut rig, 2);
    rig.settle();
    assert_eq!(rig.progress(first), Progress::Held);
    assert!(waits(&rig, later));
}

#[test]
fn a_request_that_is_granted_meanwhile_keeps_its_permit() {
    let mut rig = Rig::new(1);
    let holder = other(&mut rig, 1, 1, None);
    let first = rig.request();
    rig.settle();
    rig.now_ms += 1;
    let later = other(&mut rig, 2, 1, None);
    // Its hint is on its way while the process reloads; and while the new place is.
    let grants = rig.other_leaves(holder);
    assert_eq!(grants.len(), 1);
    reload(&mut rig, 2);
    for grant in grants {
        rig.hint(grant);
    }
    assert_eq!(rig.progress(first), Progress::Held);
    rig.settle();
    assert_eq!(rig.progress(first), Progress::Held);
    rig.live(1100);
    assert!(waits(&rig, later), "one is in use, of one");
    assert_eq!(rig.places().len(), 2);
}

#[test]
fn a_tenant_keeps_its_turn() {
    let claim = |tenant| Some(Claim::new(Tenant::of_hash(tenant)));
    let mut rig = Rig::new(3);
    let holders: Vec<_> = (1..=3).map(|n| other(&mut rig, n, 3, claim(7))).collect();
    rig.now_ms += 10;
    let first = rig.request_with(AcquireOptions { claim: claim(1), ..OPTIONS });
    rig.settle();
    rig.now_ms += 10;
    let later = other(&mut rig, 9, 2, claim(2));
    rig.now_ms += 10;
    reload(&mut rig, 2);
    rig.settle();
    for holder in &holders[..2] {
        for grant in rig.other_leaves(*holder) {
            rig.hint(grant);
        }
    }
    rig.live(2000);
    assert_eq!(rig.progress(first), Progress::Held);
    assert!(waits(&rig, later));
}

#[test]
fn a_revoked_place_does_not_come_back() {
    for is_found_gone in [false, true] {
        let mut rig = Rig::new(1);
        other(&mut rig, 1, 1, None);
        let waits = rig.request();
        rig.settle();
        let id = rig.id(waits);
        // The message is on its way.
        rig.ledger.revoke(id, true, (EPOCH_MS + rig.now_ms) * 1000);
        if is_found_gone {
            rig.pass(1000);
            assert!(matches!(rig.answer().op, Op::Renew { .. }));
            assert!(rig.session.poll_revocation_check().is_some());
        }
        reload(&mut rig, 2);
        let now = rig.now();
        rig.session.handle_revoked(id, now);
        rig.settle();
        let progress = rig.progress(waits);
        assert!(is_refused(progress, RejectReason::Revoked), "{is_found_gone}: {progress:?}");
    }
}

#[test]
fn what_can_never_be_served_any_more_is_refused() {
    let claim = |tenant, cost| Some(Claim::new(Tenant::of_hash(tenant)).with_cost(cost));
    let mut rig = Rig::new(10);
    let ask = |rig: &mut Rig, tenant, cost| {
        let index = rig.request_with(AcquireOptions { claim: claim(tenant, cost), ..OPTIONS });
        rig.settle();
        index
    };
    let held: Vec<_> = (0..10).map(|_| ask(&mut rig, 1, 1)).collect();
    let (big, small) = (ask(&mut rig, 2, 5), ask(&mut rig, 2, 1));
    for index in &held {
        assert_eq!(rig.progress(*index), Progress::Held);
    }
    reload(&mut rig, 3);
    rig.settle();
    for index in held {
        rig.leave(index);
    }
    rig.live(2000);
    assert!(is_refused(rig.progress(big), RejectReason::CostTooHigh));
    assert_eq!(rig.progress(small), Progress::Held);
}

#[test]
fn with_a_limit_of_zero_nobody_waits_and_nobody_is_held_up() {
    let mut rig = Rig::new(1);
    let holder = other(&mut rig, 1, 1, None);
    let first = rig.request();
    rig.settle();
    rig.now_ms += 1;
    let later = other(&mut rig, 2, 10, None);
    reload(&mut rig, 0);
    rig.settle();
    assert!(is_refused(rig.progress(first), RejectReason::Limit));
    let caller = rig.ask(OTHER, 10);
    rig.ledger.release(caller, &[holder], &mut |_, _| true);
    rig.live(100);
    assert!(!waits(&rig, later));
}

#[test]
fn a_request_whose_call_is_on_its_way_adopts_the_limit_with_its_answer() {
    let mut rig = Rig::new(1);
    other(&mut rig, 1, 1, None);
    let waiting = rig.request();
    let call = rig.call().expect("an acquire");
    reload(&mut rig, 2);
    let (reply, now) = (rig.carry_out(&call), rig.now());
    rig.reply(&call.op, &reply, now);
    rig.settle();
    assert_eq!(rig.progress(waiting), Progress::Held);
    rig.live(2000);
    assert_eq!(rig.places().len(), 2);
    // A later request is judged by its own policy.
    rig.limit = 1;
    let own = rig.request();
    rig.settle();
    assert_eq!(rig.id(own).bound, Some(Bound { limit: 1, headroom: 0, rate: None }));
}

#[test]
fn a_lower_limit_ends_the_passing_on_of_permits() {
    let reuse = AcquireOptions { reuse_ms: 50, ..OPTIONS };
    let mut rig = Rig::new(2);
    let (first, second) = (rig.request_with(reuse), rig.request_with(reuse));
    rig.settle();
    assert_eq!((rig.progress(first), rig.progress(second)), (Progress::Held, Progress::Held));
    reload(&mut rig, 1);
    rig.leave(first);
    assert_eq!(rig.session.kept(), 0);
}

#[test]
fn no_old_place_is_left_where_the_call_of_a_reload_fails() {
    for (is_carried_out, again) in [(false, None), (true, None), (false, Some(1)), (true, Some(1))]
    {
        let mut rig = Rig::new(3);
        for n in 1..=3 {
            other(&mut rig, n, 3, None);
        }
        let waiting = rig.request();
        rig.settle();
        reload(&mut rig, 2);
        let now = rig.now();
        let question = rig.session.poll_revocation_check().expect("it may have been revoked");
        rig.session.handle_revocations_known(question, now);
        let call = rig.call().expect("the new place");
        assert!(matches!(call.op, Op::Reassert { .. }));
        if is_carried_out {
            rig.carry_out(&call);
        }
        rig.session.handle_call_error(&call.op, now);
        if let Some(limit) = again {
            reload(&mut rig, limit);
            rig.settle();
        } else {
            // As soon as what failed is tried again, and before a lease ends.
            rig.live(1100);
        }
        assert_eq!(rig.progress(waiting), Progress::Waiting);
        let bound = Bound { limit: again.unwrap_or(2), headroom: 0, rate: None };
        assert_eq!(rig.id(waiting).bound, Some(bound));
        assert_eq!(rig.ledger.places().count(), 4, "carried out: {is_carried_out}, {again:?}");
    }
}

/// This many starts in this many ms.
fn rated(rate: &str) -> AcquireOptions {
    AcquireOptions { rate: Rate::parse(rate), ..OPTIONS }
}

/// An operator sets this rate; empty: none.
fn set_rate(rig: &mut Rig, rate: &str) {
    let now = rig.now();
    let set = Override { rate: Rate::parse(rate), ..Override::default() };
    rig.session.handle_override(set, now);
}

#[test]
fn requests_that_wait_are_judged_by_the_rate_that_an_operator_sets_and_keep_their_turn() {
    let mut rig = Rig::new(100);
    let all: Vec<_> = (0..6).map(|_| rig.request_with(rated("1/60000"))).collect();
    rig.settle();
    let held = |rig: &mut Rig| {
        let states: Vec<_> = all.iter().map(|index| rig.progress(*index)).collect();
        let held = states.iter().take_while(|state| **state == Progress::Held).count();
        assert!(states[held..].iter().all(|state| *state == Progress::Waiting), "{states:?}");
        held
    };
    assert_eq!(held(&mut rig), 1);
    set_rate(&mut rig, "3/60000");
    rig.settle();
    assert_eq!((held(&mut rig), rig.places().len()), (3, 6));
    // The same once more changes nothing.
    set_rate(&mut rig, "3/60000");
    assert_eq!(rig.settle(), []);
    set_rate(&mut rig, "2/60000");
    rig.live(59_000);
    assert_eq!(held(&mut rig), 3);
    rig.live(1100);
    assert_eq!(held(&mut rig), 5, "the first three starts have left the window");
    set_rate(&mut rig, "");
    rig.live(59_000);
    assert_eq!((held(&mut rig), rig.places().len()), (5, 6));
    rig.live(1100);
    assert_eq!(held(&mut rig), 6);
}

#[test]
fn a_rate_that_an_operator_sets_is_spread_as_that_of_the_policy_is() {
    let second = Duration::from_secs(1);
    let policy = Rate::new(std::num::NonZeroU32::MIN, second, true);
    let mut rig = Rig::new(100);
    set_rate(&mut rig, "10/1000");
    let options = AcquireOptions { rate: Some(policy), ..OPTIONS };
    let all: Vec<_> = (0..3).map(|_| rig.request_with(options)).collect();
    rig.settle();
    assert_eq!(rig.progress(all[1]), Progress::Waiting);
    rig.live(110);
    assert_eq!(rig.progress(all[1]), Progress::Held);
    assert_eq!(rig.progress(all[2]), Progress::Waiting);
    assert_eq!(rig.session.rate_in_force().map(Rate::starts), Some(10));
    // More than the backend keeps is spread in any case.
    set_rate(&mut rig, "60000/60000");
    let exact = rig.request_with(rated("1/1000"));
    let rate = rig.id(exact).rate().map(|rate| (rate.starts(), rate.window()));
    assert_eq!(rate, Some((10, ms(10))));
}

#[test]
fn a_request_whose_policy_has_no_rate_has_none_that_an_operator_sets() {
    let mut rig = Rig::new(1);
    set_rate(&mut rig, "1/60000");
    rig.request();
    let waits = rig.request();
    let claim = Some(Claim::new(Tenant::of_hash(7)));
    let fair = rig.request_with(AcquireOptions { claim, ..OPTIONS });
    rig.settle();
    assert_eq!(rig.session.rate_in_force(), None);
    assert_eq!([waits, fair].map(|index| rig.id(index).rate()), [None, None]);
    set_rate(&mut rig, "2/60000");
    assert_eq!(rig.settle(), [], "nothing is to be replaced");
}

#[test]
fn a_limit_and_a_rate_that_change_together_replace_a_place_once() {
    let mut rig = Rig::new(1);
    rig.request_with(rated("5/1000"));
    let waits = rig.request_with(rated("5/1000"));
    rig.settle();
    let serial = rig.session.serial();
    let now = rig.now();
    rig.session.handle_policy(2, 0, Rate::parse("7/1000"), now);
    rig.limit = 2;
    assert_eq!(rig.session.serial(), serial + 1);
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Held);
    let bound = rig.id(waits).bound.expect("a bound");
    assert_eq!((bound.limit, bound.rate.map(|rate| rate.starts())), (2, Some(7)));
    assert_eq!(rig.places().len(), 2);
}

#[test]
fn a_request_whose_call_is_unanswered_adopts_the_rate_once_it_is() {
    let mut rig = Rig::new(100);
    let first = rig.request_with(rated("1/60000"));
    let second = rig.request_with(rated("1/60000"));
    let call = rig.call().expect("an acquire");
    set_rate(&mut rig, "2/60000");
    let (reply, sent) = (rig.carry_out(&call), rig.now());
    rig.reply(&call.op, &reply, sent);
    rig.settle();
    assert_eq!([first, second].map(|index| rig.progress(index)), [Progress::Held; 2]);
}

#[test]
fn a_request_that_costs_more_than_a_new_rate_is_refused() {
    let mut rig = Rig::new(9);
    let claim = Some(Claim::new(Tenant::of_hash(7)).with_cost(5));
    let options = AcquireOptions { claim, ..rated("5/60000") };
    rig.request_with(options);
    let waits = rig.request_with(options);
    rig.settle();
    set_rate(&mut rig, "4/60000");
    let Progress::Refused { reason, rate, .. } = rig.progress(waits) else { panic!() };
    assert_eq!((reason, rate), (RejectReason::CostTooHigh, Rate::parse("4/60000")));
    rig.settle();
    assert_eq!(rig.places().len(), 1);
    let later = rig.request_with(options);
    assert!(is_refused(rig.progress(later), RejectReason::CostTooHigh));
}

#[test]
fn a_share_has_its_part_of_the_rate_that_an_operator_sets() {
    let mut rig = outage(4);
    set_rate(&mut rig, "4/1000");
    let options = AcquireOptions { on_unavailable: OnUnavailable::Local(2), ..rated("8/1000") };
    let mut admit = || {
        let index = rig.request_with(AcquireOptions { max_queue: None, ..options });
        let is_admitted = rig.progress(index) == Progress::Admitted;
        rig.leave(index);
        is_admitted
    };
    assert_eq!([(); 3].map(|()| admit()), [true, true, false]);
}

#[test]
fn a_reload_gives_and_takes_a_rate() {
    let mut rig = Rig::new(1);
    let claim = Some(Claim::new(Tenant::of_hash(7)));
    rig.request();
    let fair = rig.request_with(AcquireOptions { claim, reuse_ms: 50, ..OPTIONS });
    let plain = rig.request();
    rig.settle();
    let rates = |rig: &Rig| [fair, plain].map(|index| rig.id(index).rate().is_some());
    let now = rig.now();
    rig.session.handle_policy(1, 0, Rate::parse("1/1000"), now);
    rig.settle();
    assert_eq!(rates(&rig), [true, true]);
    rig.session.handle_policy(1, 0, None, now);
    rig.settle();
    assert_eq!(rates(&rig), [false, false]);
    assert_eq!(rig.places().len(), 3);
}

#[test]
fn a_request_that_waits_through_an_outage_keeps_its_turn_where_a_rate_was_set_meanwhile() {
    for is_set in [false, true] {
        let mut rig = Rig::new(1);
        let holder = other(&mut rig, 1, 1, Some(Claim::without_tenant()));
        let waits = rig.request_with(rated("9/1000"));
        rig.settle();
        // The server has forgotten it, and the answer to its return is lost.
        let id = rig.id(waits);
        let caller = rig.ask(NODE, 1);
        rig.ledger.release(caller, &[id], &mut |_, _| true);
        rig.pass(1000);
        rig.answer();
        rig.session
            .places
            .iter_mut()
            .for_each(|place| place.state = State::Waiting { ticket: None });
        let question = rig.session.poll_revocation_check().expect("a question");
        let now = rig.now();
        rig.session.handle_revocations_known(question, now);
        let call = rig.call().expect("a join");
        assert!(matches!(call.op, Op::Acquire { .. }), "{call:?}");
        rig.carry_out(&call);
        let now = rig.now();
        rig.session.handle_unreachable(now);
        rig.now_ms += 1;
        let later = other(&mut rig, 2, 1, Some(Claim::without_tenant()));
        rig.reconnect(same_data());
        if is_set {
            set_rate(&mut rig, "8/1000");
        }
        rig.settle();
        rig.now_ms += 1;
        for grant in rig.other_leaves(holder) {
            rig.hint(grant);
        }
        rig.live(1500);
        assert_eq!(rig.progress(waits), Progress::Held, "{is_set}");
        assert!(rig.waits(later), "{is_set}");
    }
}

#[test]
fn what_started_by_a_rate_that_is_cleared_does_not_use_up_a_share() {
    let mut rig = outage(2);
    let try_at = |rig: &mut Rig, rate: &str| {
        let on_unavailable = OnUnavailable::Local(2);
        let options = AcquireOptions { on_unavailable, max_queue: None, ..rated(rate) };
        let index = rig.request_with(options);
        let is_admitted = rig.progress(index) == Progress::Admitted;
        rig.leave(index);
        is_admitted
    };
    set_rate(&mut rig, "1/86400000");
    assert_eq!([(); 2].map(|()| try_at(&mut rig, "4/1000")), [true, false]);
    set_rate(&mut rig, "");
    for second in 0..3 {
        let admitted = (0..4).filter(|_| try_at(&mut rig, "4/1000")).count();
        assert!(
            admitted >= 3,
            "{admitted} in second {second}: one start of the former rate may still count"
        );
        rig.pass(1001);
    }
}

#[test]
fn nobody_is_told_to_come_back_when_a_rate_opens_that_is_no_longer_in_force() {
    for is_reload in [false, true] {
        let mut rig = Rig::new(2);
        rig.request_with(rated("1/86400000"));
        let second = rig.request_with(rated("1/86400000"));
        rig.settle();
        assert_eq!(rig.progress(second), Progress::Waiting);
        if is_reload {
            let now = rig.now();
            rig.session.handle_policy(2, 0, Rate::parse("1000/60000"), now);
        } else {
            set_rate(&mut rig, "1000/60000");
        }
        rig.live(100);
        assert_eq!(rig.progress(second), Progress::Held);
        let third = rig.request_with(rated("1000/60000"));
        rig.live(100);
        let now = rig.now();
        rig.session.handle_wait_timeout(third, now);
        let Progress::Refused { reason, ends_in, .. } = rig.progress(third) else { panic!() };
        assert_eq!((reason, ends_in), (RejectReason::QueueTimeout, None), "{is_reload}");
    }
}

/// Three requests whose call is unanswered wait in an outage for the one permit of a share; the first had it.
fn unanswered_in_an_outage(limit: u32, rate: &str) -> (Rig, [usize; 3]) {
    let mut rig = Rig::new(10);
    let all = [(); 4].map(|()| rig.request_with(with(OnUnavailable::Local(1))));
    rig.call().expect("an acquire");
    rig.session.handle_unreachable(rig.now());
    assert_eq!(rig.progress(all[0]), Progress::Admitted);
    let now = rig.now();
    rig.session.handle_policy(limit, 0, Rate::parse(rate), now);
    rig.limit = limit;
    rig.leave(all[0]);
    let [_, waits @ ..] = all;
    (rig, waits)
}

#[test]
fn a_share_has_its_part_of_a_rate_that_is_reloaded_whether_a_request_is_answered_or_not() {
    let (mut rig, [first, second, third]) = unanswered_in_an_outage(10, "10/60000");
    assert_eq!(rig.progress(first), Progress::Admitted);
    rig.leave(first);
    rig.pass(59_000);
    assert_eq!(rig.progress(second), Progress::Waiting, "one a minute");
    rig.pass(1_001);
    assert_eq!(rig.progress(second), Progress::Admitted);
    // It counts once the backend is back.
    rig.leave(third);
    rig.reconnect(same_data());
    rig.settle();
    rig.leave(second);
    rig.settle();
    assert_eq!((rig.places().len(), rig.ledger.starts().count()), (0, 1));
}

#[test]
fn a_limit_of_zero_that_is_reloaded_in_an_outage_refuses_requests_whose_call_is_unanswered() {
    let (mut rig, all) = unanswered_in_an_outage(0, "");
    for index in all {
        assert!(is_refused(rig.progress(index), RejectReason::Limit));
    }
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!(rig.places(), []);
}

/// The window opens, and another process whose places wait calls: right before the call that replaces the places, with
/// its messages or without them, or right after it.
#[test]
fn no_start_is_spent_on_a_place_that_is_being_replaced() {
    for (is_before, is_heard) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut rig = Rig::new(100);
        let all: Vec<_> = (0..6).map(|_| rig.request_with(rated("2/1000"))).collect();
        rig.settle();
        rig.pass(990);
        set_rate(&mut rig, "3/1000");
        let question = rig.session.poll_revocation_check().expect("they may have been revoked");
        let now = rig.now();
        rig.session.handle_revocations_known(question, now);
        if !is_before {
            while !matches!(rig.answer().op, Op::Reassert { .. }) {}
        }
        rig.now_ms += 15;
        let (caller, mut grants) = (rig.ask(OTHER, 100), Vec::new());
        rig.ledger.release(caller, &[], &mut |_, hints| {
            grants.extend_from_slice(hints);
            true
        });
        assert!(!grants.is_empty());
        for grant in grants.into_iter().filter(|_| is_heard) {
            rig.hint(grant);
        }
        // The next window opens later, and a lost message costs less.
        rig.live(950);
        let held = all.iter().filter(|index| rig.progress(**index) == Progress::Held).count();
        assert_eq!(held, 5, "two, and three when the window opened: {is_before}, {is_heard}");
        assert_eq!(rig.places().len(), 6, "{is_before}, {is_heard}");
    }
}
