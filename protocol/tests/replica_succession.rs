//! Permits that go to the next place of the same process ahead of the transaction that says so.

use std::time::Duration;

use tower_semaphore_protocol::replica::{Answer, Change, Ended, Event, Replica, Row, Value};
use tower_semaphore_protocol::{Call, Claim, NodeId, Op, PlaceId, Time};

const CLOCK: u64 = 1_795_169_853_126_543;
const NODE: NodeId = NodeId::new(1);
const OTHER: NodeId = NodeId::new(2);

/// The key, and two processes.
struct Two {
    revision: u64,
    bytes: Option<Vec<u8>>,
    replicas: [Replica; 2],
    limit: u32,
    next: u64,
}

impl Two {
    /// `joined`: places that join one after the other, with a limit of 1.
    fn with(joined: &[(NodeId, u64)]) -> Self {
        let replicas = [NODE, OTHER].map(|node| Replica::new(node, Duration::from_secs(2)));
        let mut two = Self { revision: 1, bytes: None, replicas, limit: 1, next: 0 };
        for (node, n) in joined {
            two.call(*node, acquire(place(*node, *n), 10_000));
            two.commit(*node);
        }
        for node in [NODE, OTHER] {
            two.granted(node);
        }
        two
    }

    fn of(&mut self, node: NodeId) -> &mut Replica {
        &mut self.replicas[usize::from(node != NODE)]
    }

    fn call(&mut self, node: NodeId, op: Op) {
        self.next += 1;
        let (id, call) = (self.next, Call { limit: self.limit, ..Call::of(op) });
        self.of(node).handle_call(id, call);
    }

    fn release(&mut self, node: NodeId, n: u64) {
        self.call(node, Op::Release { ids: [place(node, n)].into() });
    }

    /// Makes the next transaction of a process.
    fn poll(&mut self, node: NodeId) -> (u64, Change) {
        let clock = CLOCK + self.revision * 1000;
        let transaction = self.of(node).poll_transaction(Time::ZERO, clock).expect("a transaction");
        (transaction.changed, transaction.change)
    }

    /// Carries a transaction out, if the key is as it was made for, and lets both hear of it. Returns whether it was.
    fn carry_out(&mut self, node: NodeId, (changed, change): (u64, Change)) -> bool {
        let (revision, bytes) = (self.revision, self.bytes.clone());
        if changed != if bytes.is_some() { revision } else { 0 } {
            self.of(node).handle_lost(revision, bytes.as_deref());
            return false;
        }
        match change {
            Change::Put(bytes) => {
                (self.revision, self.bytes) = (revision + 1, Some(bytes.to_vec()))
            }
            Change::Delete => (self.revision, self.bytes) = (revision + 1, None),
            Change::Nothing => {}
        }
        let (revision, bytes) = (self.revision, self.bytes.clone());
        self.of(node).handle_committed(revision);
        for replica in &mut self.replicas {
            replica.handle_value(revision, bytes.as_deref());
        }
        true
    }

    fn commit(&mut self, node: NodeId) {
        let transaction = self.poll(node);
        assert!(self.carry_out(node, transaction));
    }

    /// The places of which a process was told that they were granted.
    fn granted(&mut self, node: NodeId) -> Vec<u64> {
        let mut granted = Vec::new();
        while let Some(event) = self.of(node).poll_event() {
            match event {
                Event::Granted(hint) => granted.push(hint.n),
                Event::Answered { answer: Answer::Reply(reply), .. } => {
                    granted.extend(reply.granted.iter().map(|grant| grant.id.n));
                }
                _ => {}
            }
        }
        granted
    }

    /// The places that hold, and those that wait, in order.
    fn places(&self) -> (Vec<u64>, Vec<u64>) {
        let Some(bytes) = &self.bytes else { return Default::default() };
        let value = Value::decode(bytes).expect("a value");
        let mut places: Vec<_> = value.ledger.places().collect();
        places.sort_by_key(|(id, _, ticket)| (*ticket, id.n));
        let of = |holds| {
            let places = places.iter().filter(|(.., ticket)| ticket.is_none() == holds);
            places.map(|(id, ..)| id.n).collect()
        };
        (of(true), of(false))
    }
}

fn place(node: NodeId, n: u64) -> PlaceId {
    PlaceId { node, poll_only: false, n, bound: None, claim: None }
}

fn acquire(id: PlaceId, lease_ms: u64) -> Op {
    Op::Acquire { leaving: vec![], lease_ms, max_queue: Some(1000), ids: [id].into() }
}

#[test]
fn a_permit_goes_on_as_long_as_its_process_comes_first() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2), (NODE, 3), (OTHER, 4), (NODE, 5)]);
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [2]);
    two.release(NODE, 2);
    assert_eq!(two.granted(NODE), [3]);
    assert_eq!(two.places(), (vec![1], vec![2, 3, 4, 5]), "nothing is written yet");
    two.commit(NODE);
    assert_eq!(two.places(), (vec![3], vec![4, 5]));
    two.release(NODE, 3);
    assert_eq!(two.granted(NODE), [0; 0], "another process is next");
    two.commit(NODE);
    assert_eq!((two.granted(NODE), two.granted(OTHER)), (vec![], vec![4]));
    assert_eq!(two.places(), (vec![4], vec![5]));
}

#[test]
fn it_goes_on_while_a_transaction_is_under_way() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2), (NODE, 3), (NODE, 4)]);
    two.release(NODE, 1);
    let first = two.poll(NODE);
    two.release(NODE, 2);
    two.release(NODE, 3);
    assert_eq!(two.granted(NODE), [2, 3, 4]);
    assert!(two.carry_out(NODE, first));
    assert_eq!(two.places(), (vec![2], vec![3, 4]), "the one that was next when it was made");
    two.commit(NODE);
    assert_eq!(two.places(), (vec![4], vec![]));
    two.release(NODE, 4);
    two.commit(NODE);
    assert_eq!(two.granted(NODE), [0; 0]);
    assert_eq!(two.bytes, None);
}

#[test]
fn what_a_transaction_gives_up_goes_to_nobody_before_its_outcome() {
    let mut two = Two::with(&[(NODE, 1), (OTHER, 2), (NODE, 3)]);
    two.release(NODE, 1);
    let given_up = two.poll(NODE);
    // The other one is gone, so this process comes first.
    two.release(OTHER, 2);
    two.commit(OTHER);
    assert_eq!(two.granted(NODE), [0; 0]);
    assert!(!two.carry_out(NODE, given_up));
    two.commit(NODE);
    assert_eq!(two.granted(NODE), [3]);
    assert_eq!(two.places(), (vec![3], vec![]));
}

#[test]
fn what_a_transaction_gives_up_while_nothing_is_granted_stays_given_up() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2)]);
    two.limit = 0;
    two.release(NODE, 1);
    let given_up = two.poll(NODE);
    two.limit = 1;
    two.call(NODE, Op::Renew { lease_ms: 10_000, ids: [place(NODE, 2)].into() });
    assert_eq!(two.granted(NODE), [0; 0]);
    assert!(two.carry_out(NODE, given_up));
    assert_eq!(two.places(), (vec![], vec![2]));
    two.commit(NODE);
    assert_eq!(two.places(), (vec![2], vec![]));
}

#[test]
fn what_was_passed_on_holds_whoever_writes_first() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2)]);
    two.release(NODE, 1);
    let late = two.poll(NODE);
    two.call(OTHER, acquire(place(OTHER, 3), 10_000));
    two.commit(OTHER);
    assert!(!two.carry_out(NODE, late));
    two.limit = 0;
    two.commit(NODE);
    assert_eq!(two.granted(NODE), [2]);
    assert_eq!(two.places(), (vec![2], vec![3]));
}

#[test]
fn a_connection_that_breaks_takes_nothing_back() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2), (OTHER, 3)]);
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [2]);
    two.of(NODE).handle_dropped();
    // Nothing is granted meanwhile.
    two.limit = 0;
    two.call(NODE, Op::Renew { lease_ms: 10_000, ids: [place(NODE, 2)].into() });
    two.commit(NODE);
    assert_eq!(two.places(), (vec![2], vec![3]), "the one that left is a stranger");
}

#[test]
fn what_others_removed_while_it_waited_keeps_the_permit_that_it_uses() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2), (OTHER, 3)]);
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [2]);
    // For a moment its shortest lease seemed to have ended.
    let row = Row { node: NODE, seconds: 2 };
    two.of(OTHER).handle_ended(Ended::Waiting(row), true);
    two.commit(OTHER);
    assert_eq!(two.places(), (vec![1], vec![3]));
    two.commit(NODE);
    assert_eq!(two.places(), (vec![2], vec![3]), "nobody else is granted it");
}

#[test]
fn places_that_no_call_names_any_more_are_given_back() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2)]);
    let at = |s| Time::since_epoch(Duration::from_secs(s));
    two.of(NODE).handle_connected(at(100));
    assert!(!two.of(NODE).handle_time(at(120)), "two leases of 10 s since it is connected");
    two.call(NODE, Op::Renew { lease_ms: 10_000, ids: [place(NODE, 2)].into() });
    two.commit(NODE);
    assert!(two.of(NODE).handle_time(at(121)));
    two.commit(NODE);
    assert_eq!(two.places(), (vec![], vec![2]));
    // Its session asks for what that freed.
    two.call(NODE, Op::Renew { lease_ms: 10_000, ids: [place(NODE, 2)].into() });
    two.commit(NODE);
    assert_eq!(two.places(), (vec![2], vec![]));
}

#[test]
fn what_the_order_or_the_limit_does_not_allow_waits_for_the_transaction() {
    // Another process comes first.
    let mut two = Two::with(&[(NODE, 1), (OTHER, 2), (NODE, 3)]);
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [0; 0]);
    // The limit is lower now.
    let mut two = Two::with(&[(NODE, 1), (NODE, 2)]);
    two.limit = 0;
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [0; 0]);
    // The next one left.
    let mut two = Two::with(&[(NODE, 1), (NODE, 2), (NODE, 3)]);
    two.release(NODE, 2);
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [3]);
}

#[test]
fn what_differs_in_lease_or_cost_waits_for_the_transaction() {
    let mut two = Two::with(&[(NODE, 1)]);
    two.call(NODE, acquire(place(NODE, 2), 20_000));
    two.commit(NODE);
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [0; 0], "another lease ends with another sign of life");
    let mut two = Two::with(&[(NODE, 1)]);
    two.limit = 2;
    let costly = PlaceId { claim: Some(Claim::without_tenant().with_cost(2)), ..place(NODE, 2) };
    two.call(NODE, acquire(costly, 10_000));
    two.commit(NODE);
    two.release(NODE, 1);
    assert_eq!(two.granted(NODE), [0; 0]);
    two.commit(NODE);
    assert_eq!(two.granted(NODE), [2]);
}

#[test]
fn what_nobody_misses_yet_may_wait() {
    let mut two = Two::with(&[(NODE, 1), (NODE, 2), (NODE, 3), (OTHER, 4)]);
    assert!(!two.of(NODE).may_wait(), "there is nothing to write");
    two.call(NODE, acquire(place(NODE, 5), 10_000));
    assert!(two.of(NODE).may_wait(), "its process has its turn before");
    two.release(NODE, 1);
    two.release(NODE, 2);
    assert!(two.of(NODE).may_wait(), "the third has the permit");
    let leaving = vec![place(NODE, 3)];
    let ids = [place(NODE, 6)].into();
    two.call(NODE, Op::Acquire { leaving, lease_ms: 10_000, max_queue: Some(1000), ids });
    assert!(!two.of(NODE).may_wait(), "another process is next");
    two.commit(NODE);
    assert_eq!(two.places(), (vec![4], vec![5, 6]), "one transaction wrote all");
}

#[test]
fn what_others_or_the_caller_wait_for_is_written_at_once() {
    let behind_its_own = || Two::with(&[(OTHER, 1), (NODE, 2), (NODE, 3)]);
    let join = |max_queue, claim| {
        let ids = [PlaceId { claim, ..place(NODE, 9) }].into();
        Op::Acquire { leaving: vec![], lease_ms: 10_000, max_queue, ids }
    };
    let ids = || [place(NODE, 3)].into();
    for (op, may_wait) in [
        (join(Some(5), None), true),
        (join(Some(0), None), false),
        (join(None, None), false),
        (join(Some(5), Some(Claim::without_tenant().with_cost(2))), false),
        (Op::Release { ids: ids() }, false),
        (Op::Renew { lease_ms: 10_000, ids: ids() }, false),
        (Op::Audit { most: 9 }, false),
    ] {
        let (mut two, text) = (behind_its_own(), format!("{op:?}"));
        two.call(NODE, op.clone());
        assert_eq!(two.of(NODE).may_wait(), may_wait, "{text}");
        // It is the same beside one that may.
        two.call(NODE, join(Some(5), None));
        assert_eq!(two.of(NODE).may_wait(), may_wait, "{text}");
    }
    // No place of its process waits there.
    let mut two = Two::with(&[(NODE, 1), (OTHER, 2)]);
    two.call(NODE, join(Some(5), None));
    assert!(!two.of(NODE).may_wait());
    two.release(NODE, 1);
    assert!(!two.of(NODE).may_wait());
}
