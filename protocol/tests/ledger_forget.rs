//! Places whose leases are ended from outside: which leave, and who is granted next.

#[expect(dead_code, reason = "others use more of it")]
mod desk;

use tower_semaphore_protocol::{Claim, FurtherLimit, NodeId, PlaceId, WORK_MAX};

use self::desk::{BEGAN, Desk, LEASE, NODE, claim};

const OTHER: NodeId = NodeId::new(2);

/// A desk whose leases end at one time, whenever they began: no lease end is a time.
struct Rows(Desk);

impl Rows {
    fn new(limit: u32) -> Self {
        Self(Desk { tick: 0, ..Desk::new(limit) })
    }

    /// A place comes to the row of this node.
    fn come(&mut self, node: NodeId, claim: impl Into<Option<Claim>>) -> PlaceId {
        let id = self.0.id_of(node, claim);
        self.0.acquire_all(Some(10_000), &[id]);
        id
    }

    fn forget(&mut self, node: NodeId) -> bool {
        self.0.ledger.forget(node, END, self.0.now)
    }

    fn forget_waiting(&mut self, node: NodeId) -> bool {
        self.0.ledger.forget_waiting(node, self.0.now)
    }
}

const END: u64 = BEGAN / 1000 + LEASE;

#[test]
fn the_next_in_turn_is_granted_by_the_call_after_it() {
    let mut rows = Rows::new(2);
    let dead = [rows.come(OTHER, None), rows.come(OTHER, None), rows.come(OTHER, None)];
    let next = [rows.come(NODE, None), rows.come(NODE, None), rows.come(NODE, None)];
    assert!(!rows.forget(OTHER), "none is left");
    assert!(dead.iter().all(|id| !rows.0.holds(*id) && !rows.0.waits(*id)));
    assert!(next.iter().all(|id| rows.0.waits(*id)), "it grants nothing itself");
    let granted: Vec<_> = rows.0.release(&[]).granted.iter().map(|grant| grant.id).collect();
    assert_eq!(granted, next[..2]);
}

#[test]
fn places_of_other_nodes_and_other_leases_stay() {
    let mut rows = Rows::new(9);
    let (dead, other) = (rows.come(OTHER, None), rows.come(NODE, None));
    let longer = rows.0.id_of(OTHER, None);
    rows.0.ask(OTHER, |ledger, caller, post| {
        ledger.acquire(caller, 2 * LEASE, None, &[], &[longer], post)
    });
    let polls = PlaceId { poll_only: true, ..rows.0.id_of(OTHER, None) };
    rows.0.acquire_all(None, &[polls]);
    assert!(!rows.forget(OTHER));
    assert!(!rows.0.holds(dead) && !rows.0.holds(polls));
    assert!(rows.0.holds(other) && rows.0.holds(longer));
}

#[test]
fn those_that_wait_can_go_first() {
    let mut rows = Rows::new(1);
    let (held, waits) = (rows.come(OTHER, None), rows.come(OTHER, claim(1)));
    let next = rows.come(NODE, claim(2));
    assert!(!rows.forget_waiting(OTHER));
    assert!(rows.0.holds(held) && !rows.0.waits(waits) && rows.0.waits(next));
    assert!(!rows.forget(OTHER));
    assert_eq!(rows.0.hand_over(held), [next]);
}

#[test]
fn those_that_wait_go_whatever_their_leases() {
    let mut rows = Rows::new(1);
    let held = rows.come(OTHER, None);
    let waits = rows.come(OTHER, None);
    let longer = rows.0.id_of(OTHER, None);
    rows.0.ask(OTHER, |ledger, caller, post| {
        ledger.acquire(caller, 2 * LEASE, Some(9), &[], &[longer], post)
    });
    let next = rows.come(NODE, None);
    assert!(rows.0.waits(waits) && rows.0.waits(longer));
    assert!(!rows.forget_waiting(OTHER));
    assert!(!rows.0.waits(waits) && !rows.0.waits(longer));
    assert!(rows.0.holds(held) && rows.0.waits(next));
}

#[test]
fn one_call_removes_so_many_and_those_that_wait_first() {
    let mut rows = Rows(Desk { tick: 0, ..Desk::bounded(10, 4) });
    for _ in 0..10 {
        rows.come(OTHER, None);
    }
    for _ in 0..5 {
        rows.come(OTHER, None);
    }
    let mut left = Vec::new();
    while rows.forget(OTHER) {
        left.push((rows.0.ledger.waiting(), rows.0.ledger.in_use()));
        assert!(left.len() < 9);
    }
    assert_eq!(left, [(1, 10), (0, 7), (0, 3)]);
    assert!(rows.0.ledger.is_empty());
}

#[test]
fn a_place_counts_as_the_work_that_its_removal_is() {
    let mut rows = Rows::new(1000);
    let limit = FurtherLimit::of_hash(1, 1000);
    for _ in 0..WORK_MAX / 10 + 1 {
        rows.come(OTHER, claim(1).with_cost(6).also(limit));
    }
    assert!(rows.forget(OTHER), "six permits and four for the limit");
    assert_eq!(rows.0.ledger.in_use(), 6);
    assert!(!rows.forget(OTHER) && rows.0.ledger.is_empty());
}

#[test]
fn the_lines_are_settled() {
    let mut rows = Rows::new(9);
    let capped = claim(1).with_each(Some(1));
    let route = FurtherLimit::of_hash(1, 1);
    rows.come(OTHER, capped);
    rows.come(OTHER, claim(2).also(route));
    let waits = [rows.come(NODE, capped), rows.come(NODE, claim(3).also(route))];
    let is_in_turn = |rows: &Rows| {
        let turns = rows.0.ledger.turns();
        turns.filter(|(_, turn)| *turn > 0.0 && turn.is_finite()).count()
    };
    assert_eq!(is_in_turn(&rows), 0, "one is stopped by its cap, one is parked at the route");
    assert!(!rows.forget(OTHER));
    assert_eq!(is_in_turn(&rows), 2);
    rows.0.release(&[]);
    assert!(waits.iter().all(|id| rows.0.holds(*id)));
}

#[test]
fn a_line_ends_with_its_last_place() {
    let mut rows = Rows::new(1);
    let route = FurtherLimit::of_hash(1, 1);
    for of in [claim(1), claim(2), claim(2).also(route), Claim::without_tenant().also(route)] {
        rows.come(OTHER, of);
    }
    assert!(!rows.forget_waiting(OTHER));
    assert_eq!((rows.0.ledger.turns().count(), rows.0.ledger.further_lines().count()), (0, 0));
    assert!(!rows.forget(OTHER) && rows.0.ledger.is_empty());
}

#[test]
fn it_is_repeated_without_effect() {
    let mut rows = Rows::new(1);
    rows.come(OTHER, claim(1));
    rows.come(NODE, claim(2));
    rows.come(NODE, claim(3));
    assert!(!rows.forget(OTHER));
    let bytes = |rows: &Rows| {
        let mut bytes = Vec::new();
        rows.0.ledger.encode(&mut bytes);
        bytes
    };
    let after = bytes(&rows);
    rows.0.now += 1_000;
    assert!(!rows.forget(OTHER) && !rows.forget_waiting(OTHER));
    assert!(!rows.forget(NodeId::new(3)));
    assert_eq!(bytes(&rows), after);
}
