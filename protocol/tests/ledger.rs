//! The ledger alone: each rule of the protocol, and invariants of generated histories.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use proptest::prelude::*;
use tower_semaphore_protocol::{
    Bound, Caller, Claim, Grant, HINT_WORK, Ledger, NodeId, Numbered, PlaceId, PlaceStatus, Reply,
    TICKET_MIN, Usage, WORK_MAX,
};

const A: NodeId = NodeId::new(1);
const B: NodeId = NodeId::new(u64::MAX);
const C: NodeId = NodeId::new(1 << 40);
const BEGAN: u64 = 1_795_169_853_126_543;
const LEASE: u64 = 10_000;

const fn id(node: NodeId, n: u64) -> PlaceId {
    PlaceId { node, poll_only: false, n, bound: None, claim: None }
}

const fn poll_only(node: NodeId, n: u64) -> PlaceId {
    PlaceId { node, poll_only: true, n, bound: None, claim: None }
}

/// A ledger with a clock, a limit, and a note of what was posted.
#[derive(Clone)]
struct Desk {
    ledger: Ledger,
    now: u64,
    limit: u32,
    recalls: bool,
    posted: Vec<(NodeId, Vec<Grant>)>,
    gone: Vec<NodeId>,
}

impl Desk {
    fn new(limit: u32) -> Self {
        Self::bounded(limit, WORK_MAX)
    }

    fn bounded(limit: u32, work_max: usize) -> Self {
        let ledger = Ledger::with_work_max(work_max);
        let (posted, gone) = (Vec::new(), Vec::new());
        Self { ledger, now: BEGAN, limit, recalls: false, posted, gone }
    }

    fn now_ms(&self) -> u64 {
        self.now / 1000
    }

    fn pass(&mut self, ms: u64) {
        self.now += ms * 1000;
    }

    fn ask(
        &mut self,
        node: NodeId,
        run: impl FnOnce(&mut Ledger, Caller, &mut dyn FnMut(NodeId, &[Grant]) -> bool) -> Reply,
    ) -> Reply {
        let Self { ledger, now, limit, recalls, posted, gone } = self;
        let caller = Caller {
            now: *now,
            limit: *limit,
            headroom: 0,
            for_all: false,
            max_waiting: 0,
            node,
            recalls: *recalls,
        };
        let reply = run(ledger, caller, &mut |to, grants| {
            assert_ne!(to, node, "own grants come in the reply");
            posted.push((to, grants.to_vec()));
            !gone.contains(&to)
        });
        if reply.lease_end > 0 {
            assert_eq!(reply.usage, usage(ledger.in_use(), ledger.waiting()));
        }
        let idle = ledger.waiting() > 0 && ledger.in_use() < u64::from(caller.limit);
        assert_eq!(reply.more, idle, "a permit is idle only if the caller is told to call again");
        assert!(!reply.more || reply.earliest == 0);
        reply
    }

    /// Calls again while the reply says `more`. Returns how often.
    fn go_on(&mut self, node: NodeId) -> usize {
        let mut calls = 1;
        while self.ask(node, |ledger, caller, post| ledger.release(caller, &[], post)).more {
            calls += 1;
        }
        calls
    }

    fn acquire_of(&mut self, node: NodeId, max_queue: Option<u32>, ids: &[PlaceId]) -> Reply {
        self.ask(node, |ledger, caller, post| {
            ledger.acquire(caller, LEASE, max_queue, &[], ids, post)
        })
    }

    fn acquire(&mut self, ids: &[PlaceId]) -> Vec<PlaceStatus> {
        self.acquire_of(ids[0].node, Some(1000), ids).statuses.to_vec()
    }

    fn try_acquire(&mut self, ids: &[PlaceId]) -> Vec<PlaceStatus> {
        self.acquire_of(ids[0].node, None, ids).statuses.to_vec()
    }

    fn release(&mut self, ids: &[PlaceId]) -> Reply {
        self.ask(ids[0].node, |ledger, caller, post| ledger.release(caller, ids, post))
    }

    fn renew(&mut self, ids: &[PlaceId]) -> Reply {
        self.ask(ids[0].node, |ledger, caller, post| ledger.renew(caller, LEASE, ids, post))
    }

    fn reassert(&mut self, proofs: &[(PlaceId, u64)]) -> Reply {
        let node = proofs[0].0.node;
        self.ask(node, |ledger, caller, post| ledger.reassert(caller, LEASE, proofs, post))
    }

    fn place(&self, id: PlaceId) -> Option<(u64, Option<u64>)> {
        self.ledger.places().find(|place| place.0 == id).map(|(_, end, ticket)| (end, ticket))
    }

    fn holds(&self, id: PlaceId) -> bool {
        matches!(self.place(id), Some((_, None)))
    }

    fn waits(&self, id: PlaceId) -> bool {
        matches!(self.place(id), Some((_, Some(_))))
    }
}

fn ticket(status: PlaceStatus) -> u64 {
    let PlaceStatus::Waiting(ticket) = status else { panic!("{status:?}") };
    ticket
}

// --- acquire --------------------------------------------------------------------------------------

fn usage(in_use: u64, waiting: u64) -> Option<Usage> {
    Some(Usage { in_use, waiting })
}

#[test]
fn permits_are_granted_up_to_the_limit() {
    let mut desk = Desk::new(2);
    assert_eq!(desk.try_acquire(&[id(A, 1)]), [PlaceStatus::Held]);
    assert_eq!(desk.try_acquire(&[id(B, 1), id(B, 2)]), [PlaceStatus::Held, PlaceStatus::NoPermit]);
    let refused = desk.acquire_of(C, None, &[id(C, 1)]);
    assert_eq!(refused.statuses[..], [PlaceStatus::NoPermit]);
    assert_eq!(refused.usage, usage(2, 0));
    assert_eq!(desk.place(id(C, 1)), None, "a refusal leaves nothing");
}

#[test]
fn a_lease_counts_from_the_ledgers_time() {
    let mut desk = Desk::new(1);
    let reply = desk.acquire_of(A, None, &[id(A, 1)]);
    assert_eq!(reply.lease_end, BEGAN / 1000 + LEASE);
    assert_eq!(desk.place(id(A, 1)), Some((reply.lease_end, None)));
}

#[test]
fn tickets_are_the_time_or_the_next_after_the_last() {
    let mut desk = Desk::new(1);
    let statuses = desk.acquire(&[id(A, 1), id(A, 2), id(A, 3)]);
    assert_eq!(
        statuses,
        [PlaceStatus::Held, PlaceStatus::Waiting(BEGAN), PlaceStatus::Waiting(BEGAN + 1)]
    );
    desk.now += 700;
    assert_eq!(desk.acquire(&[id(B, 1)]), [PlaceStatus::Waiting(BEGAN + 700)]);
    // A clock that steps back changes no order.
    desk.now -= 5_000_000;
    assert_eq!(desk.acquire(&[id(C, 1)]), [PlaceStatus::Waiting(BEGAN + 701)]);
}

#[test]
fn nobody_barges_while_anyone_waits() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1), id(A, 2)]);
    // The limit was raised by two, and nothing has been promoted yet: the place that waits is first.
    desk.limit = 3;
    assert_eq!(desk.try_acquire(&[id(B, 1), id(B, 2)]), [PlaceStatus::Held, PlaceStatus::NoPermit]);
    assert!(desk.holds(id(A, 2)));
    // And so for those that come after: a permit that comes free is not for the newcomer.
    desk.acquire(&[id(C, 1)]);
    desk.release(&[id(A, 1)]);
    assert!(desk.holds(id(C, 1)));
    assert_eq!(desk.try_acquire(&[id(A, 3)]), [PlaceStatus::NoPermit]);
}

#[test]
fn a_full_queue_refuses() {
    let mut desk = Desk::new(1);
    let reply = desk.acquire_of(A, Some(2), &[id(A, 1), id(A, 2), id(A, 3), id(A, 4)]);
    assert_eq!(
        reply.statuses[..],
        [
            PlaceStatus::Held,
            PlaceStatus::Waiting(BEGAN),
            PlaceStatus::Waiting(BEGAN + 1),
            PlaceStatus::QueueFull
        ]
    );
    assert_eq!(reply.usage, usage(1, 2));
    let reply = desk.acquire_of(B, Some(0), &[id(B, 1)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::QueueFull]);
    assert_eq!(desk.place(id(B, 1)), None);
}

#[test]
fn a_repeated_acquire_finds_its_place() {
    let mut desk = Desk::new(1);
    let first = desk.acquire(&[id(A, 1), id(A, 2)]);
    desk.pass(3_000);
    // It may not wait now, and the queue is full: a known place still stays.
    for max_queue in [None, Some(0), Some(9)] {
        let again = desk.acquire_of(A, max_queue, &[id(A, 1), id(A, 2)]);
        assert_eq!(again.statuses[..], first);
        assert_eq!(again.usage, usage(1, 1));
    }
    let lease_end = desk.now_ms() + LEASE;
    assert_eq!(desk.place(id(A, 1)), Some((lease_end, None)));
    assert_eq!(desk.place(id(A, 2)), Some((lease_end, Some(ticket(first[1])))));
}

#[test]
fn what_expired_is_swept_before_anything_is_granted() {
    let mut desk = Desk::new(2);
    desk.acquire(&[id(A, 1)]);
    desk.pass(5_000);
    desk.acquire(&[id(A, 2)]);
    desk.pass(4_999);
    assert_eq!(desk.try_acquire(&[id(B, 1)]), [PlaceStatus::NoPermit], "one ms is left");
    desk.pass(1);
    assert_eq!(desk.try_acquire(&[id(B, 1)]), [PlaceStatus::Held]);
    assert_eq!(desk.place(id(A, 1)), None);
    assert!(desk.holds(id(A, 2)));
}

// --- release --------------------------------------------------------------------------------------

#[test]
fn a_release_hands_over_to_the_head_of_the_queue() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1)]);
    for place in [id(B, 1), id(C, 1), id(B, 2)] {
        desk.acquire(&[place]);
        desk.pass(1);
    }
    let (lease_end, _) = desk.place(id(B, 1)).unwrap();
    let reply = desk.release(&[id(A, 1)]);
    assert_eq!((desk.ledger.in_use(), desk.ledger.waiting()), (1, 2));
    assert_eq!((reply.lease_end, reply.earliest), (0, 0), "a release gives no lease");
    assert!(reply.granted.is_empty());
    // The promoted place keeps its lease, and its node gets a hint with it.
    assert_eq!(desk.posted, [(B, vec![Grant { id: id(B, 1), lease_end }])]);
    assert_eq!(desk.place(id(B, 1)), Some((lease_end, None)));
    desk.release(&[id(B, 1)]);
    desk.release(&[id(C, 1)]);
    let order: Vec<_> = desk.posted.iter().map(|(_, grants)| grants[0].id).collect();
    // In the order in which they joined, whichever place is released.
    assert_eq!(order, [id(B, 1), id(C, 1), id(B, 2)]);
}

#[test]
fn own_grants_come_in_the_reply_and_are_not_posted() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1), id(A, 2)]);
    let lease_end = desk.now_ms() + LEASE;
    let reply = desk.release(&[id(A, 1)]);
    assert_eq!(reply.granted, [Grant { id: id(A, 2), lease_end }]);
    assert!(desk.posted.is_empty());
}

#[test]
fn a_node_gets_one_message_for_all_that_was_granted_at_once() {
    let mut desk = Desk::new(3);
    desk.acquire(&[id(A, 1), id(A, 2), id(A, 3)]);
    desk.acquire(&[id(B, 1)]);
    desk.acquire(&[id(C, 1)]);
    desk.acquire(&[id(B, 2)]);
    desk.release(&[id(A, 1), id(A, 2), id(A, 3)]);
    let told: Vec<_> =
        desk.posted.iter().map(|(to, g)| (*to, g.iter().map(|g| g.id.n).collect())).collect();
    assert_eq!(told, [(B, vec![1, 2]), (C, vec![1])]);
}

#[test]
fn a_waiting_place_leaves_by_release_and_repetitions_do_nothing() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1)]);
    desk.acquire(&[id(B, 1)]);
    desk.acquire(&[id(C, 1)]);
    for _ in 0..3 {
        desk.release(&[id(B, 1), id(B, 1), id(B, 99)]);
        assert_eq!((desk.ledger.in_use(), desk.ledger.waiting()), (1, 1));
    }
    assert!(desk.holds(id(A, 1)) && desk.waits(id(C, 1)) && desk.posted.is_empty());
}

#[test]
fn the_places_of_a_node_that_is_gone_are_passed_over() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1)]);
    desk.acquire(&[id(B, 1), id(B, 2)]);
    desk.acquire(&[id(C, 1)]);
    desk.gone.push(B);
    desk.release(&[id(A, 1)]);
    assert!(desk.holds(id(C, 1)));
    assert_eq!(desk.ledger.places().count(), 1);
}

#[test]
fn a_deaf_place_is_granted_without_a_message() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1)]);
    desk.acquire(&[poll_only(B, 1)]);
    desk.gone.push(B);
    desk.release(&[id(A, 1)]);
    assert!(desk.posted.is_empty() && desk.holds(poll_only(B, 1)));
    let reply = desk.renew(&[poll_only(B, 1)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::Held], "that is how it learns it");
}

#[test]
fn dead_waiters_are_not_granted() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1)]);
    desk.acquire(&[id(B, 1)]);
    desk.pass(6_000);
    desk.acquire(&[id(C, 1)]);
    desk.renew(&[id(A, 1)]);
    desk.pass(5_000);
    desk.release(&[id(A, 1)]);
    assert_eq!(desk.place(id(B, 1)), None);
    assert!(desk.holds(id(C, 1)));
    assert_eq!(desk.posted.len(), 1);
}

// --- renew ----------------------------------------------------------------------------------------

#[test]
fn a_renewal_reports_and_extends() {
    let mut desk = Desk::new(1);
    let waits = desk.acquire(&[id(A, 1), id(A, 2)])[1];
    desk.pass(4_000);
    let reply = desk.renew(&[id(A, 1), id(A, 2), id(A, 3)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::Held, waits, PlaceStatus::Gone]);
    assert_eq!(reply.lease_end, desk.now_ms() + LEASE);
    assert_eq!(desk.place(id(A, 1)), Some((reply.lease_end, None)));
    assert_eq!(desk.place(id(A, 2)), Some((reply.lease_end, Some(ticket(waits)))));
    assert_eq!(desk.place(id(A, 3)), None);
}

#[test]
fn a_renewal_does_not_bring_back_what_ended() {
    let mut desk = Desk::new(2);
    desk.acquire(&[id(A, 1), id(A, 2), id(A, 3)]);
    desk.pass(LEASE);
    let reply = desk.renew(&[id(A, 1), id(A, 2), id(A, 3)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::Gone; 3]);
    assert!(desk.ledger.is_empty());
}

#[test]
fn ids_show_as_they_stand_in_redis() {
    assert_eq!(format!("{:?} {:?}", A, poll_only(A, 36)), "00000000001 ~00000000001:10");
}

#[test]
fn a_ledger_is_its_places() {
    let hash = |desk: &Desk| {
        let mut hasher = DefaultHasher::new();
        desk.ledger.hash(&mut hasher);
        hasher.finish()
    };
    let (mut one, mut two) = (Desk::new(4), Desk::new(4));
    assert!(one.ledger == two.ledger && hash(&one) == hash(&two));
    one.acquire(&[id(A, 1)]);
    assert!(one.ledger != two.ledger && hash(&one) != hash(&two));
    two.acquire(&[id(A, 1)]);
    two.acquire(&[id(A, 2)]);
    two.release(&[id(A, 2)]);
    assert!(one.ledger == two.ledger && hash(&one) == hash(&two), "whatever was there besides");
}

#[test]
fn an_audit_lists_a_nodes_places_whose_lease_runs_those_that_end_first_first() {
    let mut desk = Desk::new(4);
    assert!(desk.ledger.is_empty());
    desk.acquire(&[id(A, 1)]);
    desk.pass(10);
    desk.acquire(&[id(B, 1)]);
    desk.pass(10);
    desk.acquire(&[id(A, 2), id(A, 3)]);
    assert!(!desk.ledger.is_empty());
    let audit = |desk: &Desk, most| desk.ledger.audit(desk.now, A, most);
    assert_eq!(audit(&desk, 9), [id(A, 1), id(A, 2), id(A, 3)]);
    assert_eq!(audit(&desk, 3), [id(A, 1), id(A, 2)], "another node's are counted, and not listed");
    desk.pass(LEASE - 21);
    assert_eq!(audit(&desk, 9).len(), 3, "the first lease runs for one more ms");
    desk.pass(1);
    assert_eq!(audit(&desk, 9), [id(A, 2), id(A, 3)], "it has ended");
}

#[test]
fn a_waiters_renewal_replaces_a_dead_holder() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1)]);
    desk.pass(1_000);
    let joined = desk.acquire_of(B, Some(9), &[id(B, 1)]);
    assert_eq!(joined.earliest, BEGAN / 1000 + LEASE, "so it knows when to ask");
    desk.pass(joined.earliest - desk.now_ms());
    let waits = joined.statuses[0];
    let reply = desk.renew(&[id(B, 1)]);
    assert_eq!(reply.statuses[..], [waits], "as it stood before the grants of this call");
    assert_eq!(reply.granted, [Grant { id: id(B, 1), lease_end: reply.lease_end }]);
    assert_eq!(reply.earliest, 0, "nobody waits any more");
}

// --- reassert -------------------------------------------------------------------------------------

#[test]
fn a_permit_that_was_lost_by_the_ledger_is_counted_again_even_past_the_limit() {
    let mut desk = Desk::new(1);
    let lease_end = desk.acquire_of(A, None, &[id(A, 1)]).lease_end;
    desk.ledger = Ledger::new();
    desk.acquire(&[id(B, 1)]);
    desk.pass(LEASE - 1);
    desk.renew(&[id(B, 1)]);
    let reply = desk.reassert(&[(id(A, 1), lease_end)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::Held]);
    assert_eq!(reply.usage.unwrap().in_use, 2);
    assert_eq!(desk.place(id(A, 1)), Some((desk.now_ms() + LEASE, None)));
}

#[test]
fn a_proof_that_has_ended_brings_nothing_back() {
    let mut desk = Desk::new(1);
    let lease_end = desk.acquire_of(A, None, &[id(A, 1)]).lease_end;
    desk.pass(LEASE);
    let reply = desk.reassert(&[(id(A, 1), lease_end)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::Gone]);
    assert!(desk.ledger.is_empty());
}

#[test]
fn a_ticket_gives_the_old_turn_under_a_new_id() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1)]);
    let old = ticket(desk.acquire(&[id(B, 1)])[0]);
    desk.ledger = Ledger::new();
    desk.pass(5);
    desk.acquire(&[id(A, 2)]);
    desk.acquire(&[id(C, 1)]);
    let reply = desk.reassert(&[(id(B, 2), old)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::Waiting(old)]);
    desk.release(&[id(A, 2)]);
    assert!(desk.holds(id(B, 2)) && desk.waits(id(C, 1)));
}

#[test]
fn a_reassertion_of_what_is_there_is_a_renewal() {
    let mut desk = Desk::new(1);
    let waits = desk.acquire(&[id(A, 1), id(A, 2)])[1];
    desk.pass(2_000);
    // Whatever the proof says.
    let reply = desk.reassert(&[(id(A, 1), 1), (id(A, 2), TICKET_MIN)]);
    assert_eq!(reply.statuses[..], [PlaceStatus::Held, waits]);
    assert_eq!(desk.place(id(A, 2)), Some((reply.lease_end, Some(ticket(waits)))));
}

// --- limits, bounds -------------------------------------------------------------------------------

#[test]
fn a_raised_limit_lets_waiters_in_and_a_lowered_one_lets_holders_end() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 1), id(A, 2), id(A, 3), id(A, 4)]);
    desk.limit = 3;
    let reply = desk.renew(&[id(A, 1)]);
    assert_eq!(reply.granted.iter().map(|grant| grant.id.n).collect::<Vec<_>>(), [2, 3]);
    desk.limit = 1;
    for n in [1, 2] {
        let reply = desk.release(&[id(A, n)]);
        assert!(reply.granted.is_empty(), "as many hold as may");
    }
    assert_eq!(desk.release(&[id(A, 3)]).granted[0].id, id(A, 4));
}

#[test]
fn earliest_is_told_only_while_anyone_waits() {
    let mut desk = Desk::new(1);
    assert_eq!(desk.acquire_of(A, Some(9), &[id(A, 1)]).earliest, 0);
    desk.pass(100);
    assert_eq!(desk.acquire_of(B, Some(9), &[id(B, 1)]).earliest, BEGAN / 1000 + LEASE);
    desk.pass(100);
    let reply = desk.renew(&[id(A, 1)]);
    assert_eq!(reply.earliest, BEGAN / 1000 + 100 + LEASE, "the waiter's own is the first now");
}

#[test]
fn one_call_takes_out_so_many_dead_and_no_more() {
    let mut desk = Desk::new(5_000);
    let many: Vec<_> = (0..2 * WORK_MAX as u64 + 10).map(|n| id(A, n)).collect();
    desk.acquire(&many);
    desk.pass(LEASE);
    for left in [WORK_MAX + 10, 10, 0] {
        desk.renew(&[id(B, 1)]);
        assert_eq!(desk.ledger.places().count(), left);
    }
}

#[test]
fn dead_waiters_past_one_sweep_are_not_granted_either() {
    let mut desk = Desk::new(1);
    desk.acquire(&[id(A, 0)]);
    let many: Vec<_> = (1..=WORK_MAX as u64 + 300).map(|n| id(B, n)).collect();
    desk.acquire_of(B, Some(u32::MAX), &many);
    desk.pass(LEASE - 1);
    desk.renew(&[id(A, 0)]);
    desk.acquire_of(C, Some(u32::MAX), &[id(C, 1)]);
    desk.pass(1);
    // The sweep alone reaches the bound.
    assert!(desk.release(&[id(A, 0)]).more);
    assert_eq!((desk.ledger.in_use(), desk.ledger.waiting()), (0, 301));
    assert_eq!(desk.go_on(A), 1);
    assert!(desk.holds(id(C, 1)));
    assert_eq!(desk.posted.len(), 1, "the dead are told nothing");
}

/// A holds the one permit, many of B wait, and one of C behind them; then B is gone.
fn behind_the_dead(work_max: usize, dead: u64) -> Desk {
    let mut desk = Desk::bounded(1, work_max);
    desk.acquire(&[id(A, 0)]);
    let many: Vec<_> = (1..=dead).map(|n| id(B, n)).collect();
    desk.acquire_of(B, Some(u32::MAX), &many);
    desk.acquire_of(C, Some(u32::MAX), &[id(C, 1)]);
    desk.gone.push(B);
    desk
}

#[test]
fn one_call_passes_over_so_many_places_of_a_dead_node_and_no_more() {
    let mut desk = behind_the_dead(WORK_MAX, 10 * WORK_MAX as u64);
    let reply = desk.release(&[id(A, 0)]);
    assert!(reply.more && reply.granted.is_empty());
    // One hint to it, and then it is known to be gone.
    let passed = (WORK_MAX - HINT_WORK) as u64;
    assert_eq!(desk.ledger.waiting(), 10 * WORK_MAX as u64 + 1 - passed);
    assert_eq!(desk.posted.len(), 1);
    assert_eq!(desk.go_on(A), 10);
    assert!(desk.holds(id(C, 1)));
}

#[test]
fn a_sweep_and_the_grants_behind_it_have_one_bound() {
    let mut desk = Desk::bounded(20, 10);
    let dying: Vec<_> = (0..4).map(|n| id(B, n)).collect();
    desk.acquire(&dying);
    desk.pass(1);
    let holding: Vec<_> = (0..16).map(|n| id(A, n)).collect();
    desk.acquire(&holding);
    let waiting: Vec<_> = (16..40).map(|n| id(A, n)).collect();
    desk.acquire(&waiting);
    desk.pass(LEASE - 1);
    // Four are swept, so six are left for grants.
    let reply = desk.release(&holding);
    assert!(reply.more);
    assert_eq!(reply.granted.len(), 6);
}

#[test]
fn a_hint_costs_more_than_a_place() {
    let mut desk = Desk::bounded(10, 2 * (1 + HINT_WORK) + 1);
    let holding: Vec<_> = (0..10).map(|n| id(A, n)).collect();
    desk.acquire(&holding);
    for n in 1..4 {
        desk.acquire(&[id(B, n)]);
        desk.acquire(&[id(C, n)]);
    }
    assert!(desk.release(&holding).more);
    // Two hints, and the one place more goes along.
    let granted: Vec<_> = desk.posted.iter().map(|(to, grants)| (*to, grants.len())).collect();
    assert_eq!(granted, [(B, 2), (C, 1)]);
}

#[test]
fn nobody_barges_where_promotion_stopped_early() {
    let mut desk = behind_the_dead(3 + HINT_WORK, 60);
    assert!(desk.release(&[id(A, 0)]).more);
    // The permit is free, and not for a newcomer.
    assert_eq!(desk.ledger.in_use(), 0);
    let refused = desk.acquire_of(A, None, &[id(A, 1)]);
    assert!(refused.more);
    assert_eq!(refused.statuses[..], [PlaceStatus::NoPermit]);
    let queued = desk.acquire_of(A, Some(1000), &[id(A, 2)]);
    let usage = queued.usage.unwrap();
    assert!(queued.more && usage.waiting > 0 && usage.in_use == 0);
    assert!(matches!(queued.statuses[..], [PlaceStatus::Waiting(_)]));
    assert!(desk.renew(&[id(A, 2)]).more);
    let back = desk.reassert(&[(id(A, 3), TICKET_MIN - 1)]);
    assert_eq!(back.usage.unwrap().in_use, 1, "that was in flight");
    assert!(!desk.release(&[id(A, 2)]).more, "so no permit is free");
    assert!(desk.release(&[id(A, 3)]).more);
    desk.go_on(A);
    assert!(desk.holds(id(C, 1)));
}

#[test]
fn more_is_not_said_under_a_limit_of_zero() {
    let mut desk = behind_the_dead(1, 10);
    desk.limit = 0;
    assert!(!desk.release(&[id(A, 0)]).more);
    assert_eq!(desk.ledger.waiting(), 11);
}

// --- recalls --------------------------------------------------------------------------------------

impl Desk {
    /// The nodes that were recalled since the last call.
    fn recalled(&mut self) -> Vec<NodeId> {
        let posted = std::mem::take(&mut self.posted).into_iter();
        posted.filter(|(_, grants)| grants.is_empty()).map(|(to, _)| to).collect()
    }
}

/// A full ledger with permits of `A`, of `B`, whose leases end later and which is recalled first, and of a node that no
/// message reaches.
fn full() -> Desk {
    let mut desk = Desk::new(4);
    desk.recalls = true;
    desk.acquire(&[id(A, 1), id(A, 2)]);
    desk.acquire(&[poll_only(C, 1)]);
    desk.pass(1);
    desk.acquire(&[id(B, 1)]);
    assert_eq!(desk.recalled(), [], "permits were free");
    desk
}

#[test]
fn the_first_to_wait_recalls_what_other_nodes_keep_once() {
    let mut desk = full();
    desk.acquire(&[id(C, 2), id(C, 3)]);
    assert_eq!(desk.recalled(), [B, A]);
    desk.acquire(&[id(C, 4)]);
    desk.acquire(&[id(C, 2)]);
    desk.renew(&[id(C, 2)]);
    assert_eq!(desk.recalled(), [], "somebody waits already");
    desk.release(&[id(C, 2), id(C, 3), id(C, 4)]);
    desk.acquire(&[id(B, 2)]);
    assert_eq!(desk.recalled(), [A], "a new queue has begun, and the caller is not recalled");
}

#[test]
fn a_queue_that_ends_as_another_begins_recalls() {
    let mut desk = full();
    desk.acquire(&[id(C, 2)]);
    desk.recalled();
    // The permit of B goes to the waiting place; the next one that waits is the first again.
    desk.ask(B, |ledger, caller, post| {
        ledger.acquire(caller, LEASE, Some(1000), &[id(B, 1)], &[id(B, 2)], post)
    });
    assert!(desk.holds(id(C, 2)) && desk.waits(id(B, 2)));
    assert_eq!(desk.recalled(), [C, A]);
}

#[test]
fn nothing_is_recalled_for_those_that_do_not_wait_or_do_not_ask_for_it() {
    let mut desk = full();
    desk.try_acquire(&[id(C, 2)]);
    desk.acquire_of(C, Some(0), &[id(C, 3)]);
    assert_eq!(desk.recalled(), []);
    desk.recalls = false;
    desk.acquire(&[id(C, 4)]);
    assert_eq!(desk.recalled(), []);
    desk.recalls = true;
    desk.acquire(&[id(C, 5)]);
    assert_eq!(desk.recalled(), [], "the queue began before");
}

#[test]
fn a_recall_that_nobody_hears_takes_nothing_out() {
    let mut desk = full();
    desk.gone = vec![A];
    desk.acquire(&[id(C, 2)]);
    assert_eq!(desk.recalled(), [B, A]);
    assert!(desk.holds(id(A, 1)) && desk.waits(id(C, 2)));
}

// --- ids ------------------------------------------------------------------------------------------

fn any_id() -> impl Strategy<Value = PlaceId> {
    let number = prop_oneof![0..100u64, 0..PlaceId::N_MAX, Just(PlaceId::N_MAX - 1)];
    let node = prop_oneof![any::<u64>(), Just(0), Just(u64::MAX)];
    (node, any::<bool>(), number).prop_map(|(node, poll_only, n)| {
        let node = NodeId::new(node);
        PlaceId { node, poll_only, n, bound: None, claim: None }
    })
}

/// Few, that differ in what follows the process, by numbers with digits in common.
fn an_id_of_few() -> impl Strategy<Value = PlaceId> {
    let number = (1..36u64, 0..11u32, 0..3u64)
        .prop_map(|(digit, zeros, less)| (digit % 3 + 1) * 36u64.pow(zeros) - less.min(digit % 2));
    let bound =
        prop::option::of((0..3u32).prop_map(|limit| Bound { limit, headroom: 0, rate: None }));
    let claim =
        prop::option::of((0..3u32).prop_map(|cost| Claim::without_tenant().with_cost(cost)));
    (0..2u64, any::<bool>(), number, bound, claim).prop_map(|(node, poll_only, n, bound, claim)| {
        PlaceId { node: NodeId::new(node), poll_only, n, bound, claim }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn so_are_those_of_one_process(a in an_id_of_few(), b in an_id_of_few()) {
        prop_assert_eq!(a.cmp(&b), a.to_string().as_bytes().cmp(b.to_string().as_bytes()), "{} {}", a, b);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_id_is_read_as_it_was_written(id in any_id()) {
        let text = id.to_string();
        prop_assert!(text.len() <= 24, "{text}");
        prop_assert_eq!(text.parse(), Ok(id));
        prop_assert_eq!(PlaceId::parse(text.as_bytes()), Some(id));
        let n = text.split_once(':').unwrap().1;
        prop_assert_eq!(PlaceId::parse_number(n.as_bytes()), Some(Numbered { n: id.n, bound: None, claim: None }));
        prop_assert_eq!(NodeId::parse(id.node.to_string().as_bytes()), Some(id.node));
    }

    #[test]
    fn ids_are_ordered_as_their_texts_are(a in any_id(), b in any_id()) {
        prop_assert_eq!(a.cmp(&b), a.to_string().as_bytes().cmp(b.to_string().as_bytes()));
    }

    #[test]
    fn what_is_no_id_is_not_read_as_one(text in "~?[0-9A-Za-z]{9,12}:?[0-9A-Za-z]{0,13}") {
        if let Some(id) = PlaceId::parse(text.as_bytes()) {
            prop_assert_eq!(id.to_string(), text);
        }
    }
}

#[test]
fn an_id_has_one_text() {
    let text = id(B, 35).to_string();
    let (node, n) = text.split_once(':').unwrap();
    assert_eq!(n, "z");
    for other in [
        String::new(),
        format!("{node}:"),
        format!("{node}:Z"),
        format!("{node}:0z"),
        format!("{node}z"),
        format!("~~{node}:z"),
        format!("{node}:z "),
        format!("zzzzzzzzzzz:{n}"),
    ] {
        assert_eq!(PlaceId::parse(other.as_bytes()), None, "{other:?}");
    }
}

// --- every history --------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Step {
    Acquire {
        node: usize,
        leaving: Option<usize>,
        count: u64,
        lease_ms: u64,
        max_queue: Option<u32>,
    },
    Release(usize),
    Renew(usize, u64),
    /// A permit is counted again that the ledger never knew.
    Reassert {
        node: usize,
        lease_ms: u64,
    },
    Limit(u32),
    Pass(u64),
    Gone(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let lease = || 1..20_000u64;
    prop_oneof![
        6 => (
            0..3usize,
            prop::option::weighted(0.3, 0..100usize),
            1..4u64,
            lease(),
            prop::option::of(0..30u32),
        )
            .prop_map(|(node, leaving, count, lease_ms, max_queue)| {
                Step::Acquire { node, leaving, count, lease_ms, max_queue }
            }),
        4 => any::<u16>().prop_map(|i| Step::Release(i.into())),
        3 => (any::<u16>(), lease()).prop_map(|(i, lease_ms)| Step::Renew(i.into(), lease_ms)),
        1 => (0..3usize, lease()).prop_map(|(node, lease_ms)| Step::Reassert { node, lease_ms }),
        1 => (1..6u32).prop_map(Step::Limit),
        4 => (0..8_000_000u64).prop_map(Step::Pass),
        1 => (0..3usize, any::<bool>()).prop_map(|(node, gone)| Step::Gone(node, gone)),
    ]
}

type Places = HashMap<PlaceId, (u64, Option<u64>)>;

fn places(ledger: &Ledger) -> Places {
    ledger.places().map(|(id, end, ticket)| (id, (end, ticket))).collect()
}

fn held(places: &Places, now_ms: u64) -> u64 {
    places.values().filter(|(end, ticket)| ticket.is_none() && *end > now_ms).count() as u64
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn cap_order_and_progress_hold_in_every_history(
        limit in 1..6u32,
        work_max in prop_oneof![Just(WORK_MAX), 1..12usize],
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let nodes = [A, B, C];
        let mut desk = Desk::bounded(limit, work_max);
        let is_bounded = work_max < WORK_MAX;
        let mut next = 0;
        for step in steps {
            let before = places(&desk.ledger);
            let mut known: Vec<_> = before.keys().copied().collect();
            known.sort_unstable();
            let pick = |i: usize| known.get(i % known.len().max(1)).copied();
            let mut reasserted = None;
            let mut swept = true;
            desk.posted.clear();
            let reply = match step {
                Step::Acquire { node, leaving, count, lease_ms, max_queue } => {
                    let ids: Vec<_> = (0..count).map(|n| id(nodes[node], next + n)).collect();
                    next += count;
                    let leaving: Vec<_> = leaving.and_then(pick).into_iter().collect();
                    let stay = before.iter().filter(|(id, _)| !leaving.contains(id));
                    let (queue, held): (Vec<_>, Vec<_>) = stay.partition(|(_, (_, t))| t.is_some());
                    swept = !queue.is_empty()
                        || held.len() as u64 + count > u64::from(desk.limit);
                    let mut apart = desk.clone();
                    let reply = desk.ask(nodes[node], |ledger, caller, post| {
                        ledger.acquire(caller, lease_ms, max_queue, &leaving, &ids, post)
                    });
                    // In one call it is as in two, but for the bound on the work of each.
                    if !is_bounded {
                        let mut granted = apart
                            .ask(nodes[node], |ledger, caller, post| {
                                ledger.release(caller, &leaving, post)
                            })
                            .granted;
                        let mut second = apart.ask(nodes[node], |ledger, caller, post| {
                            ledger.acquire(caller, lease_ms, max_queue, &[], &ids, post)
                        });
                        granted.append(&mut second.granted);
                        second.granted = granted;
                        prop_assert_eq!(&second, &reply);
                        prop_assert_eq!(&apart.ledger, &desk.ledger);
                        prop_assert_eq!(&apart.posted, &desk.posted);
                    }
                    reply
                }
                Step::Release(i) => {
                    let Some(place) = pick(i) else { continue };
                    let reply = desk.release(&[place]);
                    prop_assert!(desk.place(place).is_none());
                    // If no other place waits, nothing is granted.
                    swept = before.iter().any(|(id, (_, t))| *id != place && t.is_some());
                    reply
                }
                Step::Renew(i, lease_ms) => {
                    let Some(place) = pick(i) else { continue };
                    desk.ask(place.node, |ledger, caller, post| {
                        ledger.renew(caller, lease_ms, &[place], post)
                    })
                }
                Step::Reassert { node, lease_ms } => {
                    let place = id(nodes[node], next);
                    next += 1;
                    reasserted = Some(place);
                    let proofs = [(place, desk.now_ms() + 1)];
                    desk.ask(nodes[node], |ledger, caller, post| {
                        ledger.reassert(caller, lease_ms, &proofs, post)
                    })
                }
                Step::Limit(to) => {
                    desk.limit = to;
                    continue;
                }
                Step::Pass(us) => {
                    desk.now += us;
                    continue;
                }
                Step::Gone(node, gone) => {
                    desk.gone.retain(|other| *other != nodes[node]);
                    if gone {
                        desk.gone.push(nodes[node]);
                    }
                    continue;
                }
            };
            let (after, now_ms, limit) = (places(&desk.ledger), desk.now_ms(), desk.limit);

            // Cap: what was granted now, was granted under the limit.
            let granted = after.iter().any(|(id, (_, ticket))| {
                let held_before = matches!(before.get(id), Some((_, None)));
                ticket.is_none() && !held_before && Some(*id) != reasserted
            });
            if granted {
                prop_assert!(held(&after, now_ms) <= u64::from(limit), "{after:?}");
            }
            // Progress: no permit is idle while a place waits, and no dead place is left.
            let (in_use, waiting) = (desk.ledger.in_use(), desk.ledger.waiting());
            let idle = waiting > 0 && in_use < u64::from(limit);
            prop_assert!(!idle || reply.more && is_bounded, "{in_use} {waiting}");
            if swept && !is_bounded {
                prop_assert!(after.values().all(|(end, _)| *end > now_ms), "{after:?}");
            }
            // Order: a promoted place had a lower ticket than each place that still waits, and no
            // newcomer holds while one of them waits.
            let waited = || before.iter().filter_map(|(id, (_, t))| Some((id, (*t)?, after.get(id)?)));
            let promoted = waited().filter(|(_, _, (_, t))| t.is_none()).map(|(_, t, _)| t).max();
            let left = waited().filter(|(_, _, (_, t))| t.is_some()).map(|(_, t, _)| t).min();
            if let Some(left) = left {
                prop_assert!(promoted.is_none_or(|last| last < left), "{before:?} {after:?}");
                let newcomer = after.iter().any(|(id, (_, ticket))| {
                    ticket.is_none() && !before.contains_key(id) && Some(*id) != reasserted
                });
                prop_assert!(!newcomer, "{before:?} {after:?}");
            }
            // Tickets are given once.
            let mut tickets: Vec<_> = after.values().filter_map(|(_, ticket)| *ticket).collect();
            let count = tickets.len();
            tickets.sort_unstable();
            tickets.dedup();
            prop_assert_eq!(tickets.len(), count);
            // Each place that was promoted elsewhere was told, with the lease end in the ledger.
            for (to, grants) in &desk.posted {
                for grant in grants {
                    prop_assert_eq!(grant.id.node, *to);
                    match after.get(&grant.id) {
                        Some(place) => prop_assert_eq!(*place, (grant.lease_end, None)),
                        None => prop_assert!(desk.gone.contains(to)),
                    }
                }
            }
            if reply.earliest != 0 {
                prop_assert_eq!(after.values().map(|(end, _)| *end).min(), Some(reply.earliest));
            }
        }

        // The places that are left leave or die: nothing stays.
        let all: Vec<_> = places(&desk.ledger).into_keys().collect();
        let (leaving, dying) = all.split_at(all.len() / 2);
        if !leaving.is_empty() {
            desk.release(leaving);
        }
        if !dying.is_empty() {
            desk.pass(20_000);
            for _ in 0..dying.len().div_ceil(work_max) {
                desk.renew(&[id(A, next)]);
            }
        }
        prop_assert!(desk.ledger.is_empty());
    }
}
