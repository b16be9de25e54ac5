//! The ledger with tenants: each rule of their turns, and invariants of generated histories.

mod desk;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use proptest::prelude::*;
use tower_semaphore_protocol::{
    Bound, BoundRate, Claim, LINE_MAX, Ledger, LineId, NodeId, PlaceId, PlaceStatus, RateUsage,
    Reply, TICKET_MIN, Tenant, WORK_MAX,
};

use self::desk::{BEGAN, Desk, LEASE, NODE, claim};

const OTHER: NodeId = NodeId::new(u64::MAX);

#[test]
fn a_permit_goes_to_the_tenant_with_the_fewest() {
    let mut desk = Desk::new(3);
    let held: Vec<_> = (0..3).map(|_| desk.come(claim(1))).collect();
    let a = desk.come(claim(1));
    let b = desk.come(claim(2));
    let c = desk.come(claim(3));
    let b2 = desk.come(claim(2));
    assert_eq!(desk.hand_over(held[0]), [b], "0 in use, and before c");
    assert_eq!(desk.hand_over(held[1]), [c]);
    // Each has one: the one that came to that level first.
    assert_eq!(desk.hand_over(held[2]), [a], "none in use any more");
    assert_eq!(desk.hand_over(a), [b2]);
}

#[test]
fn within_a_tenant_first_come_is_first_served() {
    let mut desk = Desk::new(1);
    let mut held = desk.come(claim(1));
    let line: Vec<_> = (0..5).map(|_| desk.come(claim(2))).collect();
    for id in line {
        assert_eq!(desk.hand_over(held), [id]);
        held = id;
    }
}

#[test]
fn equal_tenants_take_turns() {
    let mut desk = Desk::new(1);
    let mut held = desk.come(claim(9));
    let lines: Vec<Vec<_>> =
        (1..4).map(|t| (0..3).map(|_| desk.come(claim(t))).collect()).collect();
    for turn in 0..3 {
        for line in &lines {
            assert_eq!(desk.hand_over(held), [line[turn]]);
            held = line[turn];
        }
    }
}

#[test]
fn a_tenant_alone_may_have_everything() {
    let mut desk = Desk::new(4);
    let held: Vec<_> = (0..4).map(|_| desk.come(claim(1))).collect();
    assert!(held.iter().all(|id| desk.holds(*id)));
}

#[test]
fn weights_divide_what_is_in_use() {
    let mut desk = Desk::new(8);
    let heavy = claim(1).with_weight(3);
    let mut held: Vec<_> = (0..8).map(|_| desk.come(claim(9))).collect();
    for _ in 0..20 {
        desk.come(heavy);
        desk.come(claim(2));
    }
    while let Some(id) = held.pop() {
        desk.hand_over(id);
    }
    let [a, b] = [heavy, claim(2)].map(|claim| desk.ledger.in_use_by(claim.tenant()));
    assert_eq!((a, b), (6, 2));
}

#[test]
fn the_best_class_goes_first_and_headroom_is_left_to_it() {
    let mut desk = Desk::new(3);
    desk.headroom = 1;
    let batch = claim(2).with_class(1);
    let held: Vec<_> = (0..3).map(|_| desk.come(batch)).collect();
    assert!(desk.holds(held[0]) && desk.holds(held[1]) && desk.waits(held[2]));
    let now = desk.come(claim(1));
    assert!(desk.holds(now), "the headroom is for it, though one of class 1 waits");
    let next = desk.come(claim(1));
    assert_eq!(desk.hand_over(held[0]), [next], "the better class, though it has more in use");
    assert_eq!(desk.hand_over(next), []);
    assert_eq!(desk.hand_over(now), [held[2]]);
    assert_eq!(desk.status_of(None, claim(3)), PlaceStatus::Held, "and one that may not wait");
}

#[test]
fn a_tenant_at_its_cap_holds_nobody_up() {
    let mut desk = Desk::new(4);
    let a = claim(1).with_each(Some(2));
    let held: Vec<_> = (0..2).map(|_| desk.come(a)).collect();
    assert_eq!(desk.status_of(None, a), PlaceStatus::TenantFull);
    let waits = desk.come(a);
    assert!(desk.waits(waits));
    assert_eq!(desk.status_of(None, claim(2)), PlaceStatus::Held, "passes a line that is stopped");
    assert_eq!(desk.hand_over(held[0]), [waits]);
    assert_eq!(desk.ledger.in_use_by(a.tenant()), 2);
}

#[test]
fn nobody_passes_the_line_of_its_own_tenant() {
    let mut desk = Desk::new(10);
    let big = claim(1).with_each(Some(4)).with_cost(3);
    let small = big.with_cost(1);
    desk.come(small);
    desk.come(small);
    let waits = desk.come(big);
    assert!(desk.waits(waits));
    assert_eq!(desk.status_of(None, small), PlaceStatus::NoPermit);
    let behind = desk.come(small);
    assert!(desk.waits(behind), "it would fit, but one of its own is before it");
}

#[test]
fn a_big_request_is_waited_for() {
    let mut desk = Desk::new(4);
    let held: Vec<_> = (0..4).map(|_| desk.come(claim(1))).collect();
    let big = desk.come(claim(2).with_cost(3));
    for id in &held[..2] {
        assert_eq!(desk.hand_over(*id), []);
        let small = desk.come(claim(1));
        assert!(desk.waits(small), "what is free is the big one's");
    }
    assert_eq!(desk.hand_over(held[2]), [big]);
    assert_eq!(desk.ledger.in_use(), 4);
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let mut desk = Desk::new(4);
    let never = PlaceStatus::NeverFits;
    assert_eq!(desk.status_of(Some(10), claim(1).with_cost(5)), never);
    assert_eq!(desk.status_of(Some(10), claim(1).with_cost(3).with_each(Some(2))), never);
    desk.headroom = 2;
    assert_eq!(desk.status_of(Some(10), claim(1).with_cost(3).with_class(1)), never);
    assert_eq!(desk.status_of(Some(10), claim(1).with_cost(3)), PlaceStatus::Held);
    desk.limit = 0;
    assert!(matches!(desk.status_of(Some(10), claim(2)), PlaceStatus::Waiting(_)), "a pause");
    assert!(desk.ledger.in_use() == 3 && desk.ledger.waiting() == 1);
}

#[test]
fn a_head_that_a_lowered_limit_leaves_no_room_is_passed_over() {
    let mut desk = Desk::new(4);
    let held: Vec<_> = (0..4).map(|_| desk.come(claim(1))).collect();
    let big = desk.come(claim(2).with_cost(3));
    let small = desk.come(claim(3));
    desk.limit = 2;
    assert_eq!(desk.release(&held[..3]).granted.len(), 1);
    assert!(desk.holds(small) && desk.waits(big));
    desk.limit = 4;
    desk.release(&held[3..]);
    assert!(desk.waits(big));
    assert_eq!(desk.renew(&[big]).granted.len(), 1, "its renewal has it looked at once more");
}

#[test]
fn all_lines_together_are_bounded_and_a_long_one_leaves_room_for_the_others() {
    let mut desk = Desk::new(1);
    desk.come(claim(1));
    desk.max_waiting = 12;
    let waits = |desk: &mut Desk, tenant, queue| {
        let status = desk.status_of(Some(queue), claim(tenant));
        assert!(matches!(status, PlaceStatus::Waiting(_) | PlaceStatus::QueueFull), "{status:?}");
        status != PlaceStatus::QueueFull
    };
    let join = |desk: &mut Desk, tenant| (0..20).filter(|_| waits(desk, tenant, 100)).count();
    // Half, half of the rest, and so on: each newcomer finds room, until there are as many tenants.
    let lines: Vec<_> = (2..10).map(|tenant| join(&mut desk, tenant)).collect();
    assert_eq!(lines, [6, 3, 2, 1, 0, 0, 0, 0]);
    assert!(!waits(&mut desk, 2, 100));
    // Places without a tenant stand in a queue of their own bound, and count.
    let plain = desk.id(None);
    let status = desk.acquire_all(Some(100), &[plain]).statuses[0];
    assert!(matches!(status, PlaceStatus::Waiting(_)), "{status:?}");
    desk.max_waiting = 13;
    assert!(!waits(&mut desk, 11, 100));
    desk.max_waiting = 14;
    assert!(waits(&mut desk, 11, 100));
}

#[test]
fn the_line_of_a_tenant_is_bounded() {
    let mut desk = Desk::new(1);
    desk.come(claim(1));
    for _ in 0..2 {
        assert!(matches!(desk.status_of(Some(2), claim(1)), PlaceStatus::Waiting(_)));
    }
    assert_eq!(desk.status_of(Some(2), claim(1)), PlaceStatus::QueueFull);
    assert!(matches!(desk.status_of(Some(2), claim(2)), PlaceStatus::Waiting(_)));
}

#[test]
fn requests_without_a_tenant_are_one_line_more() {
    let mut desk = Desk::new(2);
    let held = [desk.come(claim(1)), desk.come(claim(1))];
    let plain: Vec<_> = (0..3).map(|_| desk.come(None)).collect();
    let fair = desk.come(claim(2));
    assert_eq!(desk.hand_over(held[0]), [plain[0]]);
    assert_eq!(desk.hand_over(held[1]), [fair], "the one line has one, the other none");
    assert_eq!(desk.hand_over(fair), [plain[1]], "in their order");
    let late = desk.come(None);
    assert_eq!(desk.hand_over(plain[0]), [plain[2]]);
    assert_eq!(desk.hand_over(plain[1]), [late]);
}

#[test]
fn a_dead_holder_gives_its_units_back() {
    let mut desk = Desk::new(4);
    desk.come(claim(1).with_cost(4));
    desk.now += LEASE * 500;
    let waits = desk.come(claim(2).with_cost(4));
    desk.now += LEASE * 500;
    let reply = desk.renew(&[waits]);
    assert_eq!(reply.granted.len(), 1);
    assert_eq!(desk.ledger.in_use(), 4);
}

#[test]
fn a_node_that_does_not_listen_is_passed_over() {
    let mut desk = Desk::new(1);
    let held = desk.come(claim(1));
    desk.gone.push(OTHER);
    let dead = desk.id_of(OTHER, claim(2).with_cost(1));
    desk.acquire_all(Some(9), &[dead]);
    let alive = desk.come(claim(3));
    assert_eq!(desk.hand_over(held), [alive]);
    assert!(!desk.holds(dead) && !desk.waits(dead));
    assert_eq!(desk.ledger.in_use_by(claim(2).tenant()), 0);
}

#[test]
fn a_hint_carries_the_claim() {
    let mut desk = Desk::new(1);
    let held = desk.come(claim(1));
    let other = desk.id_of(OTHER, claim(2).with_weight(7));
    desk.acquire_all(Some(9), &[other]);
    desk.hand_over(held);
    assert_eq!(desk.posted.len(), 1);
    assert_eq!(desk.posted[0].id.claim, other.claim);
}

#[test]
fn shares_come_back_with_their_places() {
    let mut desk = Desk::new(4);
    let a = desk.come(claim(1).with_cost(2));
    let b = desk.come(claim(2).with_cost(2));
    let waits: Vec<_> = (0..3).map(|_| desk.come(claim(1))).collect();
    let proofs: Vec<_> = desk
        .ledger
        .places()
        .map(|(id, lease_end, ticket)| (id, ticket.unwrap_or(lease_end)))
        .collect();
    let turns: HashMap<_, _> = desk.ledger.turns().collect();
    desk.ledger = Ledger::new();
    let reply =
        desk.ask(NODE, |ledger, caller, post| ledger.reassert(caller, LEASE, &proofs, post));
    assert!(!reply.statuses.contains(&PlaceStatus::Gone));
    assert_eq!(desk.ledger.in_use(), 4);
    assert_eq!(desk.ledger.in_use_by(claim(1).tenant()), 2);
    assert_eq!(desk.ledger.turns().count(), turns.len());
    assert_eq!(desk.hand_over(b), [waits[0], waits[1]], "in their order, as before");
    assert!(desk.holds(a));
}

#[test]
fn a_call_of_several_tenants_is_granted_as_one_by_one() {
    let mut desk = Desk::new(4);
    let (a, b) = (claim(1).with_each(Some(2)), claim(2));
    let ids: Vec<_> = [a, b, a, a, b].into_iter().map(|claim| desk.id(claim)).collect();
    let reply = desk.acquire_all(Some(9), &ids);
    let held = |status: &PlaceStatus| *status == PlaceStatus::Held;
    let granted: Vec<_> = reply.statuses.iter().map(held).collect();
    assert_eq!(granted, [true, true, true, false, true]);
}

#[test]
fn a_line_goes_by_time_and_by_its_last_place() {
    // No place is granted, and no lease ends.
    let mut desk = Desk::new(0);
    let ticket = |desk: &mut Desk| {
        let ids = [desk.id(claim(1))];
        let reply = desk.ask(NODE, |ledger, caller, post| {
            ledger.acquire(caller, u64::from(u32::MAX), Some(99), &[], &ids, post)
        });
        match reply.statuses[0] {
            PlaceStatus::Waiting(ticket) => ticket - TICKET_MIN,
            status => panic!("{status:?}"),
        }
    };
    let first = ticket(&mut desk);
    assert_eq!(first, desk.now / 1000 % (1 << 27) + 1);
    // The same ms; then the clock goes back.
    let second = ticket(&mut desk);
    assert!(second == first + 1 || second == first + 2, "{first} {second}");
    desk.now -= 5_000_000;
    assert_eq!(ticket(&mut desk), second + 1);
    desk.now += 65_000_000;
    assert_eq!(ticket(&mut desk), first + 60_000);
    // The time begins again every 37 hours; a line that is there goes on.
    desk.now += (1 << 27) * 1000 - 60_000_000;
    assert_eq!(ticket(&mut desk), first + 60_001);
}

#[test]
fn places_that_come_back_after_a_loss_of_data_stand_before_newcomers() {
    let mut desk = Desk::new(1);
    desk.come(claim(9));
    let old: Vec<_> = (0..3).map(|_| desk.come(claim(1))).collect();
    let proofs: Vec<_> =
        desk.ledger.places().filter_map(|(id, _, ticket)| Some((id, ticket?))).collect();
    desk.ledger = Ledger::new();
    desk.now += 50_000;
    let mut held = desk.come(claim(9));
    let new: Vec<_> = (0..2).map(|_| desk.come(claim(1))).collect();
    desk.ask(NODE, |ledger, caller, post| ledger.reassert(caller, LEASE, &proofs, post));
    for id in old.into_iter().chain(new) {
        assert_eq!(desk.hand_over(held), [id]);
        held = id;
    }
}

#[test]
fn a_ticket_never_leaves_its_line() {
    let mut desk = Desk::new(1);
    desk.come(claim(1));
    for proof in [TICKET_MIN, TICKET_MIN + LINE_MAX, u64::MAX] {
        let id = desk.id(claim(2));
        desk.ask(NODE, |ledger, caller, post| ledger.reassert(caller, LEASE, &[(id, proof)], post));
        let (.., ticket) = desk.ledger.places().find(|(place, ..)| *place == id).unwrap();
        let ticket = ticket.unwrap();
        assert!((TICKET_MIN + 1..=TICKET_MIN + LINE_MAX).contains(&ticket));
    }
    assert_eq!(desk.status_of(Some(9), claim(2)), PlaceStatus::Waiting(TICKET_MIN + LINE_MAX));
}

#[test]
fn a_bounded_call_says_more_and_comes_to_an_end() {
    let mut desk = Desk::bounded(6, 2);
    let held: Vec<_> = (0..6).map(|_| desk.come(claim(1))).collect();
    let big: Vec<_> = (2..7).map(|t| desk.come(claim(t).with_cost(5))).collect();
    let small: Vec<_> = (10..14).map(|t| desk.come(claim(t))).collect();
    desk.limit = 4;
    let mut reply = desk.release(&held);
    let mut calls = 0;
    while reply.more {
        reply = desk.release(&[]);
        calls += 1;
        assert!(calls < 20, "it ends");
    }
    assert!(small.iter().all(|id| desk.holds(*id)));
    assert!(big.iter().all(|id| desk.waits(*id)), "there is no room for them any more");
}

// --- histories --------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Step {
    Acquire { claims: Vec<Option<Claim>>, wait: bool, leaving: Vec<usize> },
    Release(Vec<usize>),
    Renew(Vec<usize>),
    Reassert(Vec<usize>),
    Revoke(usize),
    Limit(u32, u32),
    Pass(u64),
}

/// Of a rate of 3 in a minute: grants of 1 and 2 permits, a second apart.
#[test]
fn a_ledger_tells_how_much_of_a_rate_is_used() {
    let rate = BoundRate::new(3, Duration::from_secs(60)).unwrap();
    let (second, minute) = (1_000_000, 60_000_000);
    let mut desk = Desk::new(10);
    assert_eq!(desk.ledger.usage_of(rate, BEGAN), RateUsage::unused(rate));
    let mut starts = Vec::new();
    for cost in [1, 2] {
        let mut id = desk.id(claim(1).with_cost(cost));
        id.bound = Some(Bound { limit: 10, headroom: 0, rate: Some(rate) });
        assert_eq!(desk.acquire_all(None, &[id]).statuses[..], [PlaceStatus::Held]);
        starts.push(desk.now);
        // What is given back has started all the same.
        desk.release(&[id]);
        desk.now += second;
    }
    let used = |at: u64| {
        let usage = desk.ledger.usage_of(rate, at);
        (usage.started, usage.opens_at)
    };
    let [first, last] = starts[..] else { panic!("{starts:?}") };
    assert_eq!(used(last), (3, Some(first + minute)));
    assert_eq!(used(first + minute - 1), (3, Some(first + minute)));
    assert_eq!(used(first + minute), (2, None), "it is open at the moment that was told");
    assert_eq!(used(last + minute), (0, None));
    // The clock has stepped back: to before the last, to a second before it, and to before both.
    assert_eq!(used(last - second), (3, Some(first + minute)));
    assert_eq!(used(last - second - 1), (1, None), "the last one counts for nothing");
    assert_eq!(used(first - second - 1), (0, None));
    let one = BoundRate::new(1, Duration::from_secs(10)).unwrap();
    let usage = desk.ledger.usage_of(one, last);
    assert_eq!((usage.started, usage.opens_at), (3, Some(last + 10 * second)), "of another rate");
}

fn a_claim() -> impl Strategy<Value = Option<Claim>> {
    let each = prop_oneof![3 => Just(None), 2 => (1..6u32).prop_map(Some)];
    let cost = prop_oneof![4 => Just(1u32), 1 => 2..5u32];
    let claimed =
        (0..4u64, 1..4u32, cost, 0..3u8, each).prop_map(|(tenant, weight, cost, class, each)| {
            claim(tenant).with_weight(weight).with_cost(cost).with_class(class).with_each(each)
        });
    prop_oneof![6 => claimed.prop_map(Some), 1 => Just(None)]
}

fn step() -> impl Strategy<Value = Step> {
    let places = || prop::collection::vec(any::<u16>().prop_map(usize::from), 0..4);
    prop_oneof![
        6 => (prop::collection::vec(a_claim(), 1..4), any::<bool>(), places())
            .prop_map(|(claims, wait, leaving)| Step::Acquire { claims, wait, leaving }),
        4 => places().prop_map(Step::Release),
        2 => places().prop_map(Step::Renew),
        1 => places().prop_map(Step::Reassert),
        1 => any::<u16>().prop_map(|i| Step::Revoke(i.into())),
        1 => (1..10u32, 0..3u32).prop_map(|(limit, headroom)| Step::Limit(limit, headroom)),
        2 => (0..6_000_000u64).prop_map(Step::Pass),
    ]
}

impl Desk {
    /// What holds after every operation.
    fn check(
        &mut self,
        reply: &Reply,
        before: &HashSet<PlaceId>,
        forced: u64,
    ) -> Result<(), TestCaseError> {
        let places: Vec<_> = self.ledger.places().collect();
        let (mut units, mut heads) = (HashMap::<Tenant, u64>::new(), HashMap::new());
        let (mut in_use, mut in_order) = (0, false);
        for (id, _, ticket) in &places {
            let cost = id.claim.map_or(1, |claim| u64::from(claim.cost()));
            match (ticket, id.claim) {
                (None, Some(claim)) => *units.entry(claim.tenant()).or_default() += cost,
                (Some(ticket), Some(claim)) => {
                    let line = LineId::from(claim.tenant());
                    let head = heads.entry(line).or_insert((*ticket, *id));
                    *head = (*head).min((*ticket, *id));
                }
                (Some(_), None) => in_order = true,
                (None, None) => {}
            }
            in_use += if ticket.is_none() { cost } else { 0 };
        }
        // In use, of all and of each.
        prop_assert_eq!(self.ledger.in_use(), in_use);
        for (tenant, units) in &units {
            prop_assert_eq!(self.ledger.in_use_by(*tenant), *units);
        }
        // A turn for each line, and for nothing else.
        let turns: HashMap<_, _> = self.ledger.turns().collect();
        prop_assert_eq!(turns.keys().collect::<HashSet<_>>(), heads.keys().collect());
        let mut first: Option<(f64, LineId, Claim)> = None;
        for (line, (_, id)) in &heads {
            let claim = id.claim.expect("a head has one");
            let used = units.get(&claim.tenant()).copied().unwrap_or(0);
            let turn = turns[line];
            let is_stopped =
                claim.each().is_some_and(|each| used + u64::from(claim.cost()) > u64::from(each));
            if is_stopped {
                prop_assert_eq!(turn, f64::INFINITY);
            } else if turn.is_finite() {
                let level = (used * 64 / u64::from(claim.weight()) + 1) as f64 * 2f64.powi(52);
                let factor = 2f64.powi(80 * i32::from(claim.class()));
                prop_assert!(turn >= level * factor && turn < (level + 2f64.powi(52)) * factor);
                if first.is_none_or(|(least, of, _)| (turn, *line) < (least, of)) {
                    first = Some((turn, *line, claim));
                }
            }
        }
        // No permit is idle while a turn that fits waits, unless the reply says `more`.
        let room = |claim: Claim| {
            let left = if claim.class() == 0 { 0 } else { self.headroom };
            u64::from(self.limit.saturating_sub(left))
        };
        if !reply.more
            && !in_order
            && let Some((.., claim)) = first
        {
            let fits = in_use + u64::from(claim.cost()) <= room(claim);
            let turns = &turns;
            prop_assert!(
                !fits,
                "{claim:?} waits, {in_use} in use of {}: {places:?} {turns:?}",
                self.limit
            );
        }
        // The cap holds for each newcomer, and for each grant.
        let new = places.iter().filter(|(id, _, ticket)| ticket.is_none() && !before.contains(id));
        if new.count() > 0 {
            prop_assert!(
                in_use <= u64::from(self.limit).max(forced),
                "{} of {}",
                in_use,
                self.limit
            );
        }
        Ok(())
    }
}

fn run(steps: Vec<Step>, work_max: usize) -> Result<(), TestCaseError> {
    let mut desk = Desk::bounded(4, work_max);
    let mut known: Vec<(PlaceId, u64)> = Vec::new();
    for step in steps {
        let holders = |desk: &Desk| -> HashSet<PlaceId> {
            desk.ledger.places().filter(|place| place.2.is_none()).map(|place| place.0).collect()
        };
        let (before, mut forced) = (holders(&desk), 0);
        let pick = |picks: &[usize]| -> Vec<PlaceId> {
            let mut ids: Vec<_> = picks
                .iter()
                .filter(|_| !known.is_empty())
                .map(|i| known[i % known.len()].0)
                .collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        let reply = match step.clone() {
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
                let proofs: Vec<_> = pick(&picks)
                    .into_iter()
                    .filter_map(|id| known.iter().find(|known| known.0 == id).copied())
                    .collect();
                let reply = desk.ask(NODE, |ledger, caller, post| {
                    ledger.reassert(caller, LEASE, &proofs, post)
                });
                forced = u64::MAX;
                reply
            }
            Step::Revoke(i) => {
                if let [id] = pick(&[i])[..] {
                    let now = desk.now;
                    desk.ledger.revoke(id, true, now);
                }
                // Like the places that wait then.
                desk.release(&[])
            }
            Step::Limit(limit, headroom) => {
                (desk.limit, desk.headroom) = (limit, headroom);
                let waiting: Vec<_> =
                    desk.ledger.places().filter(|p| p.2.is_some()).map(|p| p.0).collect();
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
        let what = format!("{step:?}");
        desk.check(&reply, &before, forced)
            .map_err(|error| TestCaseError::fail(format!("{what}: {error}")))?;
        let mut calls = 0;
        let mut reply = reply;
        while reply.more {
            let before = holders(&desk);
            reply = desk.release(&[]);
            desk.check(&reply, &before, forced)?;
            calls += 1;
            prop_assert!(calls < 100, "it ends");
        }
    }
    // Where all that hold leave, all that wait are granted.
    (desk.limit, desk.headroom) = (20, 0);
    for _ in 0..200 {
        let waiting: Vec<_> = desk.ledger.places().filter(|p| p.2.is_some()).map(|p| p.0).collect();
        let held: Vec<_> = desk.ledger.places().filter(|p| p.2.is_none()).map(|p| p.0).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        desk.renew(&waiting);
        desk.release(&held);
    }
    prop_assert!(desk.ledger.waiting() == 0, "some are never granted");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_in_every_history(steps in prop::collection::vec(step(), 1..60)) {
        run(steps, WORK_MAX)?;
    }

    #[test]
    fn and_with_a_small_bound_on_work(steps in prop::collection::vec(step(), 1..60)) {
        run(steps, 3)?;
    }
}
