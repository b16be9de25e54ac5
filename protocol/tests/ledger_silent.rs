//! A process that is gone keeps nobody back with a place that is next in turn and cannot be granted yet.

#[expect(dead_code, reason = "others use more of it")]
mod desk;

use std::time::Duration;

use tower_semaphore_protocol::{Bound, BoundRate, Charge, Claim, NodeId, PlaceId};

use self::desk::{Desk, NODE, claim};

const OTHER: NodeId = NodeId::new(2);

/// Several processes renew their waiting places each second.
const RENEWAL_US: u64 = 1_000_000;

/// A place of the other process comes, and waits if it must.
fn of_other(desk: &mut Desk, claim: Claim) -> PlaceId {
    let id = desk.id_of(OTHER, claim);
    desk.acquire_all(Some(10_000), &[id]);
    id
}

/// Whether places are granted within the renewals of three seconds, long before the lease of the first one ends.
fn are_granted_soon(desk: &mut Desk, ids: &[PlaceId]) -> bool {
    for _ in 0..3 {
        desk.now += RENEWAL_US;
        desk.renew(ids);
    }
    ids.iter().all(|id| desk.holds(*id))
}

#[test]
fn a_dead_place_that_waits_for_several_permits_is_found() {
    for tenant in [None, Some(7)] {
        let mut desk = Desk::new(4);
        let held = desk.come(claim(1));
        let of = |cost| tenant.map_or_else(Claim::without_tenant, claim).with_cost(cost);
        let large = of_other(&mut desk, of(4));
        let next = [desk.come(claim(2)), desk.come(claim(3))];
        assert!(desk.holds(held) && desk.waits(large) && desk.waits(next[0]));
        desk.gone.push(OTHER);
        assert!(are_granted_soon(&mut desk, &next), "{tenant:?}");
        assert!(!desk.waits(large));
    }
}

#[test]
fn a_dead_place_that_waits_for_a_budget_is_found_and_takes_nothing_of_it() {
    let mut desk = Desk::new(100);
    let burst_us = 3_600_000_000;
    let charge = |taken| Charge::of_hash(1, taken, burst_us).unwrap();
    let taking = |taken| Claim::without_tenant().charged(charge(taken));
    let used = desk.come(taking(burst_us / 2));
    assert!(desk.holds(used));
    let dead = [of_other(&mut desk, taking(burst_us)), of_other(&mut desk, taking(burst_us))];
    let next = desk.come(taking(burst_us / 4));
    assert!(desk.waits(dead[0]) && desk.waits(dead[1]) && desk.waits(next));
    let full_at = desk.ledger.budget_full_at(charge(0).number());
    desk.gone.push(OTHER);
    assert!(are_granted_soon(&mut desk, &[next]));
    assert!(!desk.waits(dead[0]) && !desk.waits(dead[1]));
    assert_eq!(desk.ledger.budget_full_at(charge(0).number()), full_at + burst_us / 4);
}

#[test]
fn a_dead_place_that_waits_for_its_rate_is_found() {
    let mut desk = Desk::new(100);
    let rate = BoundRate::new(4, Duration::from_secs(3600)).unwrap();
    let start = |desk: &mut Desk, node, cost| {
        let mut id = desk.id_of(node, Claim::without_tenant().with_cost(cost));
        id.bound = Some(Bound { limit: 100, headroom: 0, rate: Some(rate) });
        desk.acquire_all(Some(10_000), &[id]);
        id
    };
    let used = start(&mut desk, NODE, 2);
    let (dead, next) = (start(&mut desk, OTHER, 3), start(&mut desk, NODE, 1));
    assert!(desk.holds(used) && desk.waits(dead) && desk.waits(next));
    desk.gone.push(OTHER);
    assert!(are_granted_soon(&mut desk, &[next]));
}

/// A process that renews is there, whether a message reaches it or not.
#[test]
fn only_a_place_that_missed_its_renewals_is_asked_for() {
    let mut desk = Desk::new(4);
    let held = desk.come(claim(1));
    let large = of_other(&mut desk, claim(7).with_cost(4));
    let next = desk.come(claim(2));
    desk.gone.push(OTHER);
    for _ in 0..5 {
        desk.now += RENEWAL_US;
        desk.ask(OTHER, |ledger, caller, post| ledger.renew(caller, desk::LEASE, &[large], post));
        desk.renew(&[held, next]);
    }
    assert!(desk.waits(large) && desk.waits(next));
}

/// All of them missed their renewals, and the first process that comes back finds the others' mailboxes empty.
#[test]
fn after_an_outage_others_have_time_to_come_back() {
    let mut desk = Desk::new(4);
    let held = desk.come(claim(1));
    let large = of_other(&mut desk, claim(7).with_cost(4));
    let next = desk.come(claim(2));
    desk.now += 5 * RENEWAL_US;
    desk.gone.push(OTHER);
    desk.renew(&[held, next]);
    assert!(desk.waits(large));
    desk.now += RENEWAL_US;
    desk.renew(&[held, next]);
    assert!(!desk.waits(large) && desk.holds(next));
}

#[test]
fn some_hundred_dead_places_are_taken_out_in_one_call() {
    let mut desk = Desk::new(4);
    let held = desk.come(claim(1));
    let large: Vec<_> = (0..100).map(|_| of_other(&mut desk, claim(7).with_cost(4))).collect();
    let next = desk.come(claim(2).with_cost(2));
    desk.gone.push(OTHER);
    desk.now += 2 * RENEWAL_US;
    desk.renew(&[next]);
    desk.now += RENEWAL_US;
    desk.renew(&[next]);
    assert!(desk.holds(held) && desk.holds(next));
    assert!(large.iter().all(|id| !desk.waits(*id)));
}
