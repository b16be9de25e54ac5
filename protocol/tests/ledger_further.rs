//! The ledger with further limits: each rule of them, and invariants of generated histories.

mod desk;

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use tower_semaphore_protocol::{
    Claim, FurtherLimit, PlaceId, PlaceStatus, Reply, TICKET_MIN, Tenant, WORK_MAX,
};

use self::desk::{Desk, LEASE, NODE, claim};

/// A limit of this number.
fn limit(number: u64, cap: u32) -> FurtherLimit {
    FurtherLimit::of_hash(number, cap)
}

/// Lines that are parked are ordered by times of 1/8 ms.
const TICK: u64 = 130;

fn at_desk(limit: u32) -> Desk {
    Desk { tick: TICK, ..Desk::new(limit) }
}

/// Without a tenant.
fn nobodys() -> Claim {
    Claim::without_tenant()
}

#[test]
fn a_place_is_granted_all_of_its_limits_or_none() {
    let mut desk = at_desk(10);
    let (route, model) = (limit(1, 2), limit(2, 1));
    let first = desk.come(claim(1).also(route).also(model));
    assert!(desk.holds(first));
    let under = |desk: &Desk| [route, model].map(|limit| desk.ledger.in_use_under(limit));
    assert_eq!(under(&desk), [1, 1]);
    let second = desk.come(claim(1).also(route).also(model));
    assert!(desk.waits(second), "the model is full");
    assert_eq!(under(&desk), [1, 1], "and the route is not held meanwhile");
    let other = desk.come(claim(2).also(route));
    assert!(desk.holds(other), "who needs only the route does not wait");
    assert_eq!(desk.hand_over(first), [second]);
    assert_eq!(under(&desk), [2, 1]);
    desk.release(&[second, other]);
    assert_eq!(under(&desk), [0, 0]);
    assert!(desk.ledger.is_empty());
}

#[test]
fn a_refusal_names_the_first_limit_that_is_full() {
    let mut desk = at_desk(10);
    let limits = [limit(1, 2), limit(2, 1), limit(3, 1)];
    let all = limits.into_iter().fold(claim(1).with_each(Some(2)), Claim::also);
    desk.come(claim(2).also(limits[1]));
    assert_eq!(desk.status_of(None, all), PlaceStatus::LimitFull(1));
    desk.come(claim(2).also(limits[0]));
    desk.come(claim(2).also(limits[0]));
    assert_eq!(desk.status_of(None, all), PlaceStatus::LimitFull(0));
    desk.come(claim(1));
    desk.come(claim(1));
    assert_eq!(desk.status_of(None, all), PlaceStatus::TenantFull);
    assert_eq!(desk.status_of(None, all.with_cost(2)), PlaceStatus::NeverFits);
    assert_eq!(desk.status_of(Some(9), all.with_cost(2)), PlaceStatus::NeverFits);
}

#[test]
fn a_full_limit_delays_nobody_who_does_not_need_it() {
    let mut desk = at_desk(3);
    let (full, free) = (limit(1, 1), limit(2, 3));
    let holder = desk.come(claim(1).also(full));
    let waits: Vec<_> = (0..5).map(|_| desk.come(claim(1).also(full))).collect();
    assert!(desk.ledger.turns().all(|(_, turn)| turn < 0.0), "it is not among the turns");
    let goes = desk.come(claim(1).also(free));
    assert!(desk.holds(goes), "the same tenant, for another route");
    let plain = desk.come(None);
    assert!(desk.holds(plain));
    let mut held = holder;
    for id in waits {
        assert!(desk.waits(id));
        assert_eq!(desk.hand_over(held), [id]);
        held = id;
    }
}

#[test]
fn without_tenants_first_come_is_first_served_whatever_the_limits() {
    let mut desk = at_desk(1);
    let mut held = desk.come(None);
    let mut line = Vec::new();
    for i in 0..12 {
        desk.now += 1000;
        line.push(match i % 4 {
            0 => desk.come(None),
            1 => desk.come(nobodys().with_cost(1)),
            2 => desk.come(nobodys().also(limit(1, 5))),
            _ => desk.come(nobodys().also(limit(2, 5)).also(limit(3, 5))),
        });
    }
    for id in line {
        assert_eq!(desk.hand_over(held), [id]);
        held = id;
    }
}

#[test]
fn at_a_full_limit_the_tenant_with_the_fewest_permits_goes_first() {
    let mut desk = at_desk(20);
    let route = limit(1, 1);
    let held = desk.come(claim(9).also(route));
    for _ in 0..3 {
        desk.come(claim(1));
    }
    let heavy = desk.come(claim(1).also(route));
    let light = desk.come(claim(2).also(route));
    let best = desk.come(claim(3).with_class(0).also(route));
    let batch = desk.come(claim(4).with_class(1).also(route));
    let order = [light, best, heavy, batch];
    let mut last = held;
    for id in order {
        assert_eq!(desk.hand_over(last), [id]);
        last = id;
    }
}

#[test]
fn tenants_take_turns_at_a_limit() {
    let mut desk = at_desk(20);
    let route = limit(1, 1);
    let mut held = desk.come(claim(9).also(route));
    let lines: Vec<Vec<_>> =
        (1..4).map(|t| (0..3).map(|_| desk.come(claim(t).also(route))).collect()).collect();
    for turn in 0..3 {
        for line in &lines {
            desk.now += 20_000;
            assert_eq!(desk.hand_over(held), [line[turn]]);
            held = line[turn];
        }
    }
}

#[test]
fn what_leaves_at_a_full_limit_makes_room_for_those_behind_it() {
    let mut desk = at_desk(9);
    let route = limit(1, 2);
    let big = claim(1).also(route).with_cost(2);
    let held = desk.come(claim(9).also(route));
    let waits = desk.come(big);
    let behind = desk.come(claim(2).also(route));
    assert!(desk.waits(behind), "the big one is not passed, though there is room for one");
    assert_eq!(desk.hand_over(waits), [behind], "it has left");
    let waits = desk.come(big);
    let last = desk.come(claim(3).also(route));
    assert_eq!(desk.hand_over(held), [], "one is free, and it needs two");
    assert!(desk.waits(last));
    assert_eq!(desk.hand_over(behind), [waits]);
    assert_eq!(desk.hand_over(waits), [last]);
}

#[test]
fn a_place_that_dies_at_a_full_limit_is_forgotten() {
    let mut desk = at_desk(9);
    let route = limit(1, 1);
    let held = desk.come(claim(1).also(route));
    let dead = desk.come(claim(1).also(route));
    desk.now += LEASE * 1000 / 2;
    let lives = desk.come(claim(1).also(route));
    desk.renew(&[held]);
    desk.now += LEASE * 1000 * 3 / 4;
    desk.renew(&[held, lives]);
    assert!(!desk.waits(dead));
    assert_eq!(desk.hand_over(held), [lives]);
}

#[test]
fn a_tenants_cap_counts_over_all_of_its_lines() {
    let mut desk = at_desk(20);
    let capped = claim(1).with_each(Some(2));
    let held = [desk.come(capped.also(limit(1, 9))), desk.come(capped)];
    let waits = [desk.come(capped.also(limit(2, 9))), desk.come(capped)];
    assert!(waits.iter().all(|id| desk.waits(*id)));
    let other = desk.come(claim(2).also(limit(2, 9)));
    assert!(desk.holds(other), "others do not wait for it");
    let granted: Vec<_> = held.iter().flat_map(|id| desk.hand_over(*id)).collect();
    assert_eq!(granted.len(), 2);
    assert!(waits.iter().all(|id| desk.holds(*id)));
}

#[test]
fn crossing_limits_leave_no_permit_idle() {
    let mut desk = at_desk(20);
    let limits = [limit(1, 1), limit(2, 1), limit(3, 1)];
    let pair = |i: usize| claim(i as u64).also(limits[i % 3]).also(limits[(i + 1) % 3]);
    let mut held: Vec<PlaceId> = Vec::new();
    for round in 0..10 {
        for i in 0..3 {
            let id = desk.come(pair(i));
            if desk.holds(id) {
                held.push(id);
            }
        }
        assert_eq!(held.len(), 1, "{round}: any two of them need one limit");
        held = desk.hand_over(held[0]);
    }
}

#[test]
fn a_turn_that_the_semaphore_keeps_back_is_not_lost_at_the_limit() {
    let mut desk = at_desk(2);
    let route = limit(1, 1);
    let [holder, other] = [desk.come(claim(1).also(route)), desk.come(claim(2))];
    let first = desk.come(claim(3).also(route));
    let second = desk.come(claim(4).also(route));
    // The route gets room while the semaphore is full: an operator lowered its limit.
    desk.limit = 1;
    assert_eq!(desk.hand_over(holder), []);
    assert_eq!(desk.hand_over(other), [first]);
    assert_eq!(desk.hand_over(first), [second]);
}

#[test]
fn a_tenants_lines_count_what_it_got_by_the_others() {
    let mut desk = at_desk(2);
    let [first, second] = [limit(1, 9), limit(2, 9)];
    let held = [desk.come(claim(9)), desk.come(claim(9))];
    let a = [desk.come(claim(1).also(first)), desk.come(claim(1).also(second))];
    let b = desk.come(claim(2));
    assert_eq!(desk.hand_over(held[0]), [a[0]]);
    assert_eq!(desk.hand_over(held[1]), [b], "a has one, by its other line");
    let c = desk.come(claim(3));
    assert_eq!(desk.hand_over(a[0]), [c], "it has had none in use for longer than a");
    assert_eq!(desk.hand_over(b), [a[1]]);
}

#[test]
fn a_release_brings_the_tenants_other_lines_forward() {
    let mut desk = at_desk(6);
    let [first, second] = [limit(1, 9), limit(2, 1)];
    let holder = desk.come(claim(9).also(second));
    let a: Vec<_> = (0..3).map(|_| desk.come(claim(1).also(first))).collect();
    let b = desk.come(claim(2));
    // Both wait at the second limit, a with three permits in use, b with one.
    let a_waits = desk.come(claim(1).also(second));
    let b_waits = desk.come(claim(2).also(second));
    desk.release(&a);
    assert_eq!(desk.hand_over(holder), [a_waits], "it has none in use any more");
    assert_eq!(desk.hand_over(a_waits), [b_waits]);
    desk.release(&[b, b_waits]);
    assert!(desk.ledger.is_empty());
}

/// Though the place that left came before an operator changed the weight.
#[test]
fn a_tenants_parked_line_has_its_own_weight() {
    let mut desk = at_desk(100);
    let route = limit(1, 5);
    let a: Vec<_> = (0..4).map(|_| desk.come(claim(1).also(route))).collect();
    desk.come(claim(2).also(route));
    let a_waits = desk.come(claim(1).with_weight(4).also(route));
    let b_waits = desk.come(claim(2).also(route));
    assert!(desk.waits(a_waits) && desk.waits(b_waits));
    assert_eq!(desk.hand_over(a[0]), [a_waits], "three quarters of its share against one of b");
}

#[test]
fn a_grant_takes_the_tenants_parked_lines_back() {
    let mut desk = at_desk(9);
    let [first, second] = [limit(1, 9), limit(2, 1)];
    let holder = desk.come(claim(9).also(second));
    let a_waits = desk.come(claim(1).also(second));
    let b_waits = desk.come(claim(2).also(second));
    // Since they parked, a got two permits elsewhere.
    let a: Vec<_> = (0..2).map(|_| desk.come(claim(1).also(first))).collect();
    assert!(a.iter().all(|id| desk.holds(*id)));
    assert_eq!(desk.hand_over(holder), [b_waits]);
    assert_eq!(desk.hand_over(b_waits), [a_waits]);
}

#[test]
fn a_line_that_parked_before_the_times_begin_again_is_not_the_last() {
    let mut desk = at_desk(9);
    let route = limit(1, 1);
    // 2²⁴ times of 125 µs.
    let period = (1 << 24) * 125;
    desk.now = desk.now / period * period + period - 500;
    let holder = desk.come(claim(9).also(route));
    let first = desk.come(claim(1).also(route));
    desk.now += 1_000;
    let second = desk.come(claim(2).also(route));
    desk.renew(&[first, second]);
    assert_eq!(desk.hand_over(holder), [first]);
    assert_eq!(desk.hand_over(first), [second]);
}

#[test]
fn a_line_whose_head_can_never_be_served_frees_the_way_to_its_limits() {
    let mut desk = at_desk(4);
    let route = limit(1, 4);
    let holder = desk.come(claim(9).with_cost(3).also(route));
    let big = desk.come(claim(1).with_cost(3).also(route));
    let small = desk.come(claim(2).also(route));
    assert!(desk.waits(big) && desk.waits(small), "the big one is waited for");
    desk.limit = 2;
    assert_eq!(desk.hand_over(holder), [small], "three permits are more than there are now");
    desk.limit = 4;
    desk.renew(&[big]);
    assert!(desk.holds(big));
}

#[test]
fn a_line_that_comes_to_the_front_of_a_limit_by_a_release_elsewhere_goes_if_it_can() {
    let mut desk = at_desk(10);
    let route = |cap| limit(1, cap);
    desk.come(claim(9).also(route(2)));
    desk.come(claim(1));
    let b: Vec<_> = (0..2).map(|_| desk.come(claim(2))).collect();
    let first = desk.come(claim(1).also(route(1)));
    let second = desk.come(claim(2).also(route(2)));
    assert!(
        desk.waits(first) && desk.waits(second),
        "there is room by its own cap, but not before it"
    );
    desk.release(&b);
    assert!(desk.holds(second) && desk.waits(first));
}

#[test]
fn and_so_does_one_that_a_renewal_takes_to_the_front() {
    let mut desk = at_desk(10);
    let route = |cap| limit(1, cap);
    let period = (1 << 24) * 125;
    desk.now = desk.now / period * period + period - 600;
    let held = [desk.come(claim(9).also(route(2))), desk.come(claim(8).also(route(2)))];
    let first = desk.come(claim(1).also(route(2)));
    desk.now += 1_000;
    let second = desk.come(claim(2).also(route(1)));
    desk.release(&held[..1]);
    desk.renew(&[first]);
    assert!(desk.holds(first) && desk.waits(second));
}

#[test]
fn of_those_at_a_limit_the_tenant_that_has_the_fewest_now_comes_back() {
    let mut desk = at_desk(5);
    let route = limit(1, 1);
    let holder = desk.come(claim(9).also(route));
    desk.come(claim(1).also(route));
    let b_waits = desk.come(claim(2).also(route));
    // Since it parked, a got two permits; c and d have one each, and all are in use.
    for tenant in [1, 1, 3] {
        desk.come(claim(tenant));
    }
    let d = desk.come(claim(4));
    let c_waits = desk.come(claim(3));
    desk.limit = 4;
    assert_eq!(desk.hand_over(holder), [], "the route has room, the semaphore has none");
    assert_eq!(desk.hand_over(d), [b_waits]);
    assert!(desk.waits(c_waits));
}

#[test]
fn a_place_without_a_cap_makes_room_under_that_of_its_tenant() {
    let mut desk = at_desk(99);
    // So many that one fewer is the same level among the parked.
    let held: Vec<_> = (0..33).map(|_| desk.come(claim(1))).collect();
    let waits = desk.come(claim(1).with_each(Some(33)).also(limit(1, 9)));
    assert!(desk.waits(waits));
    assert_eq!(desk.hand_over(held[0]), [waits]);
}

#[test]
fn without_a_tenant_nobody_passes_a_big_request_by_having_further_limits() {
    let mut desk = at_desk(2);
    let held = desk.come(None);
    let big = desk.come(nobodys().with_cost(2));
    // Lines know the time of arrival to the ms.
    desk.now += 1_000;
    let small = desk.come(nobodys().also(limit(1, 9)));
    assert!(desk.waits(small), "the big one came before it");
    assert_eq!(desk.hand_over(held), [big]);
    assert_eq!(desk.hand_over(big), [small]);
}

/// How many lines stand elsewhere after a release than before it.
fn moved_by(desk: &mut Desk, ids: &[PlaceId]) -> (usize, Reply) {
    let stand = |desk: &Desk| desk.ledger.turns().collect::<HashMap<_, _>>();
    let before = stand(desk);
    let reply = desk.release(ids);
    let after = stand(desk);
    let moved = before.iter().filter(|(line, score)| after.get(line) != Some(*score));
    (moved.count(), reply)
}

#[test]
fn no_call_gives_thousands_of_lines_their_turns_anew() {
    let mut desk = at_desk(99);
    let model = limit(1, 1);
    let held = desk.come(claim(9).also(model));
    for user in 0..3000 {
        desk.come(claim(1).also(limit(100 + user, 1)).also(model));
    }
    let light = desk.come(claim(2).also(model));
    // All lines of the first tenant parked while it had none in use.
    let other = desk.come(claim(1));
    assert!(desk.holds(other));
    let (mut moved, mut reply) = moved_by(&mut desk, &[held]);
    let mut calls = 1;
    while reply.more {
        assert!(moved <= WORK_MAX + 100, "{moved} in one call");
        (moved, reply) = moved_by(&mut desk, &[]);
        calls += 1;
    }
    assert!(moved <= WORK_MAX + 100, "{moved} in one call");
    assert!(desk.holds(light) && calls <= 10, "{calls} calls");
}

#[test]
fn nor_does_one_that_sweeps_a_process_with_many_limits() {
    let mut desk = at_desk(2000);
    let users = 0..500u64;
    let at = |user: u64| [1, 2, 3].map(|kind| limit(3 * user + kind, 1));
    for user in users.clone() {
        desk.come(at(user).into_iter().fold(claim(9), Claim::also));
    }
    desk.now += LEASE * 1000 / 2;
    for limit in users.flat_map(at) {
        desk.come(claim(8).also(limit));
    }
    desk.now += LEASE * 1000 / 2;
    let (moved, reply) = moved_by(&mut desk, &[]);
    assert!(moved <= WORK_MAX && reply.more, "{moved} in one call");
}

#[test]
fn a_line_whose_next_place_has_no_cap_leaves_the_cap_at_which_it_is_parked() {
    let mut desk = at_desk(9);
    let capped = claim(1).with_each(Some(1));
    let held = desk.come(capped.also(limit(1, 9)));
    let first = desk.come(capped.also(limit(2, 9)));
    let leaves = desk.come(capped.also(limit(3, 9)));
    // Of a policy without a cap.
    let second = desk.come(claim(1).also(limit(3, 9)));
    assert!([first, leaves, second].iter().all(|id| desk.waits(*id)));
    assert_eq!(desk.hand_over(leaves), [second]);
    assert!(desk.holds(held) && desk.waits(first));
}

#[test]
fn and_those_behind_it_come_to_the_front_there() {
    let mut desk = at_desk(9);
    let capped = |each| claim(1).with_each(Some(each));
    desk.come(claim(1));
    let (bound, free) =
        (desk.come(capped(1).also(limit(3, 9))), desk.id(claim(1).also(limit(3, 9))));
    let behind = desk.come(capped(3).also(limit(4, 9)));
    assert!(desk.waits(bound) && desk.waits(behind), "the first there has a lower cap");
    // It came first, and the server lost it.
    let proofs = [(free, TICKET_MIN + 1)];
    desk.ask(NODE, |ledger, caller, post| ledger.reassert(caller, LEASE, &proofs, post));
    assert!(desk.holds(free) && desk.holds(behind) && desk.waits(bound));
}

#[test]
fn a_sweep_that_stops_at_the_bound_says_so_where_a_line_is_parked() {
    let mut desk = at_desk(2000);
    for user in 0..600 {
        desk.come(claim(9).also(limit(100 + user, 1)));
    }
    desk.come(claim(9).also(limit(1, 1)));
    desk.now += LEASE * 1000 / 2;
    let waits = desk.come(claim(1).also(limit(1, 1)));
    desk.now += LEASE * 1000 / 2;
    // All that hold are dead. Until the last of them is swept, its limit is full.
    let mut reply = desk.release(&[]);
    while reply.more {
        reply = desk.release(&[]);
    }
    assert!(desk.holds(waits), "{} are left", desk.ledger.in_use());
}

// --- histories --------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Step {
    Acquire { claims: Vec<Option<Claim>>, wait: bool, leaving: Vec<usize> },
    Release(Vec<usize>),
    Renew(Vec<usize>),
    Reassert(Vec<usize>),
    Revoke(usize),
    Limit(u32),
    Pass(u64),
}

/// The claims of a history. Where all cost one permit and each limit has one cap, an idle permit is a defect whoever
/// waits first.
fn a_claim(is_even: bool) -> impl Strategy<Value = Option<Claim>> {
    let each = prop_oneof![3 => Just(None), 2 => (1..4u32).prop_map(Some)];
    let cost =
        if is_even { Just(1u32).boxed() } else { prop_oneof![4 => Just(1), 1 => 2..4u32].boxed() };
    let limits = prop::collection::vec((0..4u64, 1..4u32), 0..=3);
    (0..4u64, 1..3u32, cost, 0..2u8, each, limits).prop_map(
        move |(tenant, weight, cost, class, each, limits)| {
            let of_tenant = claim(tenant)
                .with_weight(weight)
                .with_cost(cost)
                .with_class(class)
                .with_each(if is_even { (tenant > 1).then_some(2) } else { each });
            let base = match (tenant, is_even) {
                (0, _) if limits.is_empty() => return None,
                (0, _) => nobodys().with_cost(cost),
                _ => of_tenant,
            };
            let cap = |number: u64, cap| if is_even { 1 + (number % 3) as u32 } else { cap };
            let also = |claim: Claim, (number, any)| claim.also(limit(number, cap(number, any)));
            Some(limits.into_iter().fold(base, also))
        },
    )
}

fn step(is_even: bool) -> impl Strategy<Value = Step> {
    let places = || prop::collection::vec(any::<u16>().prop_map(usize::from), 0..4);
    let claims = prop::collection::vec(a_claim(is_even), 1..4);
    prop_oneof![
        8 => (claims, any::<bool>(), places())
            .prop_map(|(claims, wait, leaving)| Step::Acquire { claims, wait, leaving }),
        5 => places().prop_map(Step::Release),
        2 => places().prop_map(Step::Renew),
        1 => places().prop_map(Step::Reassert),
        1 => any::<u16>().prop_map(|i| Step::Revoke(i.into())),
        1 => (1..8u32).prop_map(Step::Limit),
        2 => (0..6_000_000u64).prop_map(Step::Pass),
    ]
}

impl Desk {
    fn holders(&self) -> HashSet<PlaceId> {
        self.ledger.places().filter(|place| place.2.is_none()).map(|place| place.0).collect()
    }

    /// What holds after every operation.
    fn check(
        &self,
        reply: &Reply,
        before: &HashSet<PlaceId>,
        is_forced: bool,
        is_even: bool,
    ) -> Result<(), TestCaseError> {
        let (mut used, mut by_tenant) = (HashMap::new(), HashMap::<Tenant, u64>::new());
        let (mut heads, mut first) = (HashMap::new(), None);
        let mut in_use = 0;
        for (id, _, ticket) in self.ledger.places() {
            let cost = u64::from(id.cost());
            match (ticket, id.line()) {
                (None, _) => {
                    in_use += cost;
                    let claim = id.claim.unwrap_or_else(nobodys);
                    *by_tenant.entry(claim.tenant()).or_default() += cost;
                    for limit in claim.further().iter() {
                        *used.entry(limit.number()).or_default() += cost;
                    }
                }
                (Some(ticket), Some(line)) => {
                    let head = heads.entry(line).or_insert((ticket, id));
                    *head = (*head).min((ticket, id));
                }
                (Some(ticket), None) => {
                    let head = first.get_or_insert((ticket, id));
                    *head = (*head).min((ticket, id));
                }
            }
        }
        prop_assert_eq!(self.ledger.in_use(), in_use);
        let used_under = |number: u32| used.get(&number).copied().unwrap_or(0u64);
        let used_by = |tenant| by_tenant.get(&tenant).copied().unwrap_or(0);
        for number in 0..4 {
            let limit = limit(number, 1);
            prop_assert_eq!(self.ledger.in_use_under(limit), used_under(limit.number()));
        }
        // Each line stands somewhere, once, and no other does.
        let turns: Vec<_> = self.ledger.turns().map(|(line, _)| line).collect();
        prop_assert_eq!(turns.len(), heads.len());
        prop_assert_eq!(turns.into_iter().collect::<HashSet<_>>(), heads.keys().copied().collect());
        let has_room = |id: &PlaceId| {
            let cost = u64::from(id.cost());
            let claim = id.claim.unwrap_or_else(nobodys);
            let each =
                claim.each().is_none_or(|each| used_by(claim.tenant()) + cost <= each.into());
            let further =
                |limit: FurtherLimit| used_under(limit.number()) + cost <= limit.cap().into();
            in_use + cost <= self.limit.into() && each && claim.further().iter().all(further)
        };
        // No permit is idle.
        if is_even && !reply.more {
            for (_, id) in heads.values().chain(&first) {
                prop_assert!(!has_room(id), "{id} waits: {:?}", self.ledger);
            }
        }
        // No limit is passed by a grant. Where caps differ, each place is judged by its own.
        if !is_forced && is_even {
            for id in self.holders().difference(before) {
                let claim = id.claim.unwrap_or_else(nobodys);
                prop_assert!(in_use <= self.limit.into());
                prop_assert!(
                    claim.each().is_none_or(|each| used_by(claim.tenant()) <= each.into())
                );
                for limit in claim.further().iter() {
                    prop_assert!(used_under(limit.number()) <= limit.cap().into(), "{limit:?}");
                }
            }
        }
        Ok(())
    }
}

fn run(steps: Vec<Step>, work_max: usize, is_even: bool) -> Result<(), TestCaseError> {
    let mut desk = Desk { tick: TICK, ..Desk::bounded(4, work_max) };
    let mut known: Vec<(PlaceId, u64)> = Vec::new();
    for step in steps {
        let before = desk.holders();
        let pick = |picks: &[usize]| -> Vec<PlaceId> {
            let known =
                picks.iter().filter(|_| !known.is_empty()).map(|i| known[i % known.len()].0);
            let mut ids: Vec<_> = known.collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        let mut is_forced = false;
        let mut reply = match step.clone() {
            Step::Acquire { claims, wait, leaving } => {
                let leaving = pick(&leaving);
                let ids: Vec<_> = claims.into_iter().map(|claim| desk.id(claim)).collect();
                desk.ask(NODE, |ledger, caller, post| {
                    ledger.acquire(caller, LEASE, wait.then_some(3), &leaving, &ids, post)
                })
            }
            Step::Release(picks) => desk.release(&pick(&picks)),
            Step::Renew(picks) => desk.renew(&pick(&picks)),
            Step::Reassert(picks) => {
                is_forced = true;
                let ids = pick(&picks);
                let proof = |id: PlaceId| known.iter().find(|known| known.0 == id).copied();
                let proofs: Vec<_> = ids.into_iter().filter_map(proof).collect();
                desk.ask(NODE, |ledger, caller, post| ledger.reassert(caller, LEASE, &proofs, post))
            }
            Step::Revoke(i) => {
                let now = desk.now;
                pick(&[i]).into_iter().for_each(|id| _ = desk.ledger.revoke(id, true, now));
                desk.release(&[])
            }
            Step::Limit(limit) => {
                desk.limit = limit;
                let places = desk.ledger.places().filter(|place| place.2.is_some());
                let waiting: Vec<_> = places.map(|place| place.0).collect();
                desk.renew(&waiting)
            }
            Step::Pass(us) => {
                desk.now += us;
                desk.release(&[])
            }
        };
        for (id, lease_end, ticket) in desk.ledger.places() {
            let proof = ticket.unwrap_or(lease_end);
            match known.iter_mut().find(|known| known.0 == id) {
                Some(known) => known.1 = proof,
                None => known.push((id, proof)),
            }
        }
        let mut before = before;
        for calls in 0.. {
            prop_assert!(calls < 100, "it ends");
            desk.check(&reply, &before, is_forced, is_even)
                .map_err(|error| TestCaseError::fail(format!("{step:?}: {error}")))?;
            if !reply.more {
                break;
            }
            before = desk.holders();
            reply = desk.release(&[]);
        }
    }
    // Where all that hold leave, all that wait are granted.
    desk.limit = 20;
    for _ in 0..200 {
        let places = |desk: &Desk, waits: bool| -> Vec<PlaceId> {
            let places = desk.ledger.places().filter(|place| place.2.is_some() == waits);
            places.map(|place| place.0).collect()
        };
        let waiting = places(&desk, true);
        if waiting.is_empty() {
            return Ok(());
        }
        desk.renew(&waiting);
        let held = places(&desk, false);
        desk.release(&held);
    }
    prop_assert!(desk.ledger.waiting() == 0, "some are never granted: {:?}", desk.ledger);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_permit_is_idle_where_all_cost_the_same(steps in prop::collection::vec(step(true), 1..60)) {
        run(steps, WORK_MAX, true)?;
    }

    #[test]
    fn and_with_a_small_bound_on_work(steps in prop::collection::vec(step(true), 1..60)) {
        run(steps, 3, true)?;
    }

    #[test]
    fn all_are_served_whatever_they_cost(steps in prop::collection::vec(step(false), 1..60)) {
        run(steps, WORK_MAX, false)?;
    }
}

/// The time in the turn of a parked line begins again after half an hour: who came before that is not last from then on.
#[test]
fn nobody_without_a_tenant_starves_when_the_times_begin_again() {
    let mut desk = Desk { tick: 130, ..Desk::new(100) };
    let none = Claim::without_tenant;
    let route = FurtherLimit::of_hash(1, 1);
    let model = |n| FurtherLimit::of_hash(n, 50);
    let period = (1 << 24) * 125;
    desk.now = desk.now / period * period + period - 1_000_000;
    let mut held = desk.come(none().also(route));
    let early = desk.come(none().also(route).also(model(2)));
    desk.now += 1_000_000;
    let mut waiting = vec![early, desk.come(none().also(route).also(model(3)))];
    let mut passed = 0;
    while held != early {
        desk.now += 100_000;
        waiting.push(desk.come(none().also(route).also(model(3))));
        if passed % 10 == 9 {
            waiting.retain(|id| desk.waits(*id));
            desk.renew(&waiting);
        }
        held = desk.hand_over(held)[0];
        passed += 1;
        assert!(passed <= 12, "{passed} later ones were granted first");
    }
}
