//! Requests that wait adopt a policy that was reloaded.

use super::*;
use crate::bound::Bound;

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
    rig.session.handle_policy(limit, 0, now);
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
    rig.session.handle_policy(3, 0, now);
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
