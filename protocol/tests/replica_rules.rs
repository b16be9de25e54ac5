//! Single rules of a replica: what it writes, when it need not, and what it says.

use std::time::Duration;

use tower_semaphore_protocol::replica::{
    Answer, Change, Ended, Event, Replica, Row, Transaction, Value, ValueError,
};
use tower_semaphore_protocol::{
    BoundRate, Call, Charge, Claim, Ids, NodeId, Op, PlaceId, PlaceStatus, Reply, Tenant, Time,
};

const CLOCK: u64 = 1_795_169_853_126_543;
const NODE: NodeId = NodeId::new(1);
const OTHER: NodeId = NodeId::new(2);
const LEASE: u64 = 10_000;

/// The key, and two processes that hear of every value at once.
struct Two {
    revision: u64,
    bytes: Option<Vec<u8>>,
    own: Replica,
    other: Replica,
    clock: u64,
    next: u64,
}

impl Two {
    fn new() -> Self {
        let [own, other] = [NODE, OTHER].map(replica);
        Self { revision: 1, bytes: None, own, other, clock: CLOCK, next: 0 }
    }

    fn of(&mut self, node: NodeId) -> &mut Replica {
        if node == NODE { &mut self.own } else { &mut self.other }
    }

    fn call(&mut self, node: NodeId, op: Op) -> u64 {
        self.next += 1;
        let (id, call) = (self.next, Call { limit: 1, ..Call::of(op) });
        self.of(node).handle_call(id, call);
        id
    }

    fn acquire(&mut self, node: NodeId, ids: &[u64]) -> u64 {
        self.call(node, acquire(ids.iter().map(|n| place(node, *n)).collect()))
    }

    fn poll(&mut self, node: NodeId) -> Option<Transaction> {
        self.clock += 1_000;
        let clock = self.clock;
        self.of(node).poll_transaction(Time::ZERO, clock)
    }

    /// Carries out the next transaction of a process, and lets both hear of it.
    fn commit(&mut self, node: NodeId) -> Change {
        let change = self.poll(node).expect("a transaction").change;
        self.write(&change);
        let revision = self.revision;
        self.of(node).handle_committed(revision);
        self.hear();
        change
    }

    fn write(&mut self, change: &Change) {
        match change {
            Change::Put(bytes) => self.bytes = Some(bytes.to_vec()),
            Change::Delete => self.bytes = None,
            Change::Nothing => return,
        }
        self.revision += 1;
    }

    fn hear(&mut self) {
        let (revision, bytes) = (self.revision, self.bytes.clone());
        self.own.handle_value(revision, bytes.as_deref());
        self.other.handle_value(revision, bytes.as_deref());
    }

    fn events(&mut self, node: NodeId) -> Vec<Event> {
        let replica = self.of(node);
        std::iter::from_fn(|| replica.poll_event()).collect()
    }

    fn replies(&mut self, node: NodeId) -> Vec<Reply> {
        let events = self.events(node).into_iter();
        let replies = events.filter_map(|event| match event {
            Event::Answered { answer: Answer::Reply(reply), .. } => Some(reply),
            _ => None,
        });
        replies.collect()
    }
}

fn replica(node: NodeId) -> Replica {
    Replica::new(node, Duration::from_millis(1_500))
}

fn place(node: NodeId, n: u64) -> PlaceId {
    PlaceId { node, poll_only: false, n, bound: None, claim: None }
}

fn acquire(ids: Ids) -> Op {
    Op::Acquire { leaving: vec![], lease_ms: LEASE, max_queue: Some(1000), ids }
}

fn release(node: NodeId, n: u64) -> Op {
    Op::Release { ids: [place(node, n)].into() }
}

fn renew(node: NodeId, numbers: &[u64]) -> Op {
    Op::Renew { lease_ms: LEASE, ids: numbers.iter().map(|n| place(node, *n)).collect() }
}

fn answered(call: u64, answer: Answer) -> Event {
    Event::Answered { call, answer }
}

#[test]
fn a_permit_goes_from_process_to_process_by_the_values_alone() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    assert_eq!(two.replies(NODE)[0].statuses[..], [PlaceStatus::Held]);
    two.acquire(OTHER, &[1]);
    two.commit(OTHER);
    let reply = &two.replies(OTHER)[0];
    assert!(reply.statuses[0].ticket().is_some());
    assert_eq!(reply.earliest, 0, "no lease ends at a time");
    assert_eq!(two.events(NODE), [Event::Recalled]);

    two.call(NODE, release(NODE, 1));
    two.commit(NODE);
    let hint = match &two.events(OTHER)[..] {
        [Event::Granted(hint)] => *hint,
        events => panic!("{events:?}"),
    };
    assert_eq!((hint.n, hint.lease_end), (1, Row { node: OTHER, seconds: 10 }.lease_end()));

    two.call(OTHER, release(OTHER, 1));
    assert_eq!(two.commit(OTHER), Change::Delete);
    assert!(two.own.is_idle() && two.other.is_idle());
}

#[test]
fn a_process_is_recalled_once_while_others_wait() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    two.events(NODE);
    for n in 1..4 {
        two.acquire(OTHER, &[n]);
        two.commit(OTHER);
    }
    assert_eq!(two.events(NODE), [Event::Recalled]);
}

#[test]
fn a_grant_that_a_watch_brings_before_the_answer_is_told() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    two.acquire(OTHER, &[1]);
    let change = two.poll(OTHER).expect("a transaction").change;
    two.write(&change);
    let joined = two.revision;
    let (revision, bytes) = (two.revision, two.bytes.clone());
    two.own.handle_value(revision, bytes.as_deref());
    two.call(NODE, release(NODE, 1));
    two.commit(NODE);
    assert_eq!(two.events(OTHER), []);
    two.other.handle_committed(joined);
    let events = two.events(OTHER);
    assert!(matches!(events[..], [Event::Answered { .. }, Event::Granted(_)]), "{events:?}");
}

#[test]
fn calls_that_only_ask_need_no_transaction_while_the_replica_is_fresh() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    two.events(NODE);
    two.call(NODE, renew(NODE, &[1, 9]));
    assert_eq!(two.commit(NODE), Change::Nothing, "but it shows that the value is the newest");
    assert_eq!(two.replies(NODE)[0].statuses[..], [PlaceStatus::Held, PlaceStatus::Gone]);

    two.own.handle_fresh(Time::ZERO + Duration::from_secs(1));
    two.call(NODE, renew(NODE, &[1]));
    two.call(NODE, Op::Audit { most: 10 });
    assert_eq!(two.poll(NODE), None);
    let replies = two.replies(NODE);
    assert_eq!(
        (replies[0].statuses[0], &replies[1].found[..]),
        (PlaceStatus::Held, &[place(NODE, 1)][..])
    );

    two.call(NODE, Op::Renew { lease_ms: 2 * LEASE, ids: [place(NODE, 1)].into() });
    assert!(matches!(two.commit(NODE), Change::Put(_)), "it moves to another row");
    two.acquire(NODE, &[2]);
    assert!(two.poll(NODE).is_some(), "a newcomer is answered by the store");
}

#[test]
fn what_changes_nothing_is_not_written() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    let op = Op::Acquire {
        leaving: vec![],
        lease_ms: LEASE,
        max_queue: None,
        ids: [place(OTHER, 1)].into(),
    };
    two.call(OTHER, op);
    assert_eq!(two.commit(OTHER), Change::Nothing);
    assert_eq!(two.replies(OTHER)[0].statuses[..], [PlaceStatus::NoPermit]);
    assert!(two.other.is_idle());
}

#[test]
fn what_a_rate_remembers_is_removed_when_its_window_is_over() {
    let rate = BoundRate::new(1, Duration::from_secs(60)).expect("a rate");
    let bound = tower_semaphore_protocol::Bound { limit: 1, headroom: 0, rate: Some(rate) };
    let claim = Some(Claim::without_tenant());
    let id = PlaceId { bound: Some(bound), claim, ..place(NODE, 1) };
    let mut two = Two::new();
    two.call(NODE, acquire([id].into()));
    two.commit(NODE);
    assert_eq!(two.own.over_at(), None, "it has a place");
    two.call(NODE, Op::Release { ids: [id].into() });
    assert!(matches!(two.commit(NODE), Change::Put(_)));
    assert!(two.own.is_idle() && two.other.is_idle());
    let over_at = two.own.over_at().expect("a time");
    assert_eq!(two.other.over_at(), Some(over_at));
    assert_eq!(two.poll(NODE), None, "the window is not over");
    two.clock = over_at;
    assert_eq!(two.commit(OTHER), Change::Delete);
    assert_eq!(two.own.over_at(), None);
    assert_eq!(two.poll(NODE), None);
}

#[test]
fn renewals_of_places_that_wait_change_nothing_whatever_they_have() {
    let rate = BoundRate::new(1, Duration::from_secs(60)).expect("a rate");
    let tenant = |n| Claim::new(Tenant::of_hash(n));
    let bound = tower_semaphore_protocol::Bound { limit: 1, headroom: 0, rate: Some(rate) };
    let charge = Charge::of_tenant(3, 900_000, 1_000_000).expect("a charge");
    let claims = [
        (Some(tenant(1).with_each(Some(1))), None),
        (Some(tenant(1)), None),
        (Some(tenant(2).charged(charge)), None),
        (Some(Claim::without_tenant()), Some(bound)),
        (None, None),
    ];
    let mut two = Two::new();
    two.acquire(OTHER, &[1]);
    two.commit(OTHER);
    let ids: Ids = claims
        .iter()
        .zip(1..)
        .map(|((claim, bound), n)| PlaceId { claim: *claim, bound: *bound, ..place(NODE, n) })
        .collect();
    let op = Op::Acquire { leaving: vec![], lease_ms: LEASE, max_queue: Some(9), ids: ids.clone() };
    two.next += 1;
    two.own.handle_call(two.next, Call { limit: 1, max_waiting: 1000, ..Call::of(op) });
    assert!(matches!(two.commit(NODE), Change::Put(_)));
    assert_eq!(two.own.value().expect("a value").ledger.waiting(), 5);
    for _ in 0..5 {
        two.clock += 1_000_000;
        two.call(NODE, Op::Renew { lease_ms: LEASE, ids: ids.clone() });
        assert_eq!(two.commit(NODE), Change::Nothing);
    }
}

#[test]
fn a_call_that_names_a_place_twice_or_one_of_others_is_refused() {
    let mut two = Two::new();
    let twice = two.acquire(NODE, &[1, 1]);
    let of_other = two.call(NODE, release(OTHER, 1));
    let refused = [twice, of_other].map(|call| answered(call, Answer::Refused));
    assert_eq!(two.events(NODE), refused);
    assert_eq!(two.poll(NODE), None);
}

#[test]
fn a_place_may_be_released_twice_in_one_call() {
    let mut two = Two::new();
    two.acquire(NODE, &[1, 2]);
    two.commit(NODE);
    two.events(NODE);
    two.call(NODE, Op::Release { ids: [1, 2, 1].into_iter().map(|n| place(NODE, n)).collect() });
    two.commit(NODE);
    assert_eq!(two.replies(NODE).len(), 1);
    assert!(two.of(NODE).is_idle());
}

#[test]
fn a_transaction_has_as_many_places_as_one_call_may_have() {
    let mut two = Two::new();
    for first in [0, 300, 600] {
        two.acquire(NODE, &(first..first + 256).collect::<Vec<_>>());
    }
    for answers in [2, 1] {
        two.commit(NODE);
        assert_eq!(two.replies(NODE).len(), answers);
    }
    assert_eq!(two.poll(NODE), None);
}

#[test]
fn leases_are_whole_seconds_and_none_is_shorter_than_the_store_grants() {
    let shortest = Duration::from_millis(1_500);
    let seconds = |lease_ms| Row::of(NODE, lease_ms, shortest).seconds;
    assert_eq!([0, 1_999, 2_000, 2_001, 86_400_000].map(seconds), [2, 2, 2, 3, 86_400]);
    assert!(
        Row::of(NODE, u64::MAX, shortest).lease_end() < tower_semaphore_protocol::TICKET_MIN - 1
    );
}

#[test]
fn time_goes_on_whatever_the_clocks_say() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    let time = |two: &Two| two.own.value().expect("a value").time;
    let before = time(&two);
    two.clock -= 5_000_000;
    two.acquire(OTHER, &[1]);
    two.commit(OTHER);
    assert_eq!(time(&two), before + 1);
    two.clock = u64::MAX / 2;
    two.acquire(OTHER, &[2]);
    two.commit(OTHER);
    assert!(time(&two) > before + 1);
    two.acquire(OTHER, &[3]);
    two.commit(OTHER);
    let ledger = &two.own.value().expect("a value").ledger;
    assert_eq!((ledger.in_use(), ledger.waiting()), (1, 3), "no lease has ended");
    two.clock = CLOCK;
    two.acquire(OTHER, &[4]);
    two.commit(OTHER);
    assert_eq!(time(&two), two.clock, "the clock that was far ahead is not believed");
    two.call(NODE, release(NODE, 1));
    two.commit(NODE);
    let held = two.own.value().expect("a value").ledger.places().find(|place| place.2.is_none());
    assert_eq!(held.map(|place| place.0), Some(place(OTHER, 1)), "the order stays");
    let bytes = two.bytes.clone().expect("a value");
    assert!(Value::decode(&bytes).is_ok());
}

#[test]
fn a_transaction_that_is_carried_out_late_leaves_a_stranger() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    let late = two.poll(NODE).expect("a transaction").change;
    two.own.handle_unknown();
    two.call(NODE, release(NODE, 1));
    assert_eq!(two.commit(NODE), Change::Nothing, "it joins and leaves");
    assert_eq!(two.replies(NODE)[0].statuses[..], [PlaceStatus::Held]);
    assert!(two.own.is_idle());

    two.write(&late);
    two.hear();
    assert!(!two.own.is_idle());
    assert_eq!(two.commit(NODE), Change::Delete);
    assert!(two.own.is_idle());
}

#[test]
fn a_refused_transaction_refuses_its_calls_and_one_in_doubt_fails_them() {
    let mut two = Two::new();
    let first = two.acquire(NODE, &[1]);
    assert!(two.poll(NODE).is_some());
    two.own.handle_unknown();
    let second = two.acquire(NODE, &[2]);
    assert!(two.poll(NODE).is_some());
    two.own.handle_refused();
    let expected = [answered(first, Answer::Failed), answered(second, Answer::Refused)];
    assert_eq!(two.events(NODE), expected);
    assert_eq!(two.poll(NODE), None);
}

#[test]
fn a_dead_row_is_forgotten_if_it_is_still_absent() {
    let mut two = Two::new();
    two.acquire(OTHER, &[1]);
    two.commit(OTHER);
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    two.events(NODE);
    let row = Row { node: OTHER, seconds: 10 };
    two.own.handle_ended(Ended::Row(row), false);
    assert_eq!(two.poll(NODE), None, "another process is to do it");
    two.own.handle_back(row);
    two.own.handle_ended(Ended::Row(row), true);
    let transaction = two.poll(NODE).expect("a transaction");
    assert_eq!(transaction.absent, [row]);

    two.own.handle_lost(two.revision, two.bytes.clone().as_deref());
    two.own.handle_back(row);
    assert_eq!(two.poll(NODE), None, "it has come back");
    two.own.handle_ended(Ended::Row(row), true);
    two.commit(NODE);
    assert_eq!(two.events(NODE), [Event::Freed], "who waits is to make a call");
    two.call(NODE, Op::Release { ids: Ids::new() });
    two.commit(NODE);
    assert_eq!(two.replies(NODE)[0].granted[0].id, place(NODE, 1));
}

#[test]
fn what_is_forgotten_is_granted_with_it_if_there_is_a_call() {
    let mut two = Two::new();
    two.acquire(OTHER, &[1]);
    two.acquire(OTHER, &[2]);
    two.commit(OTHER);
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    two.events(NODE);
    let row = Row { node: OTHER, seconds: 10 };
    for ended in [Ended::Waiting(row), Ended::Row(row)] {
        two.own.handle_ended(ended, false);
    }
    two.call(NODE, renew(NODE, &[1]));
    two.commit(NODE);
    assert_eq!(two.replies(NODE)[0].granted[0].id, place(NODE, 1));
    assert_eq!(two.own.value().expect("a value").ledger.in_use(), 1);
}

#[test]
fn no_place_waits_in_a_value_that_is_too_long() {
    let mut two = Two::new();
    two.own.set_value_max(40);
    two.acquire(NODE, &[1, 2, 3]);
    two.commit(NODE);
    two.events(NODE);
    two.acquire(NODE, &[4]);
    two.commit(NODE);
    assert_eq!(two.replies(NODE)[0].statuses[..], [PlaceStatus::QueueFull]);
}

#[test]
fn an_unknown_version_stops_the_replica_until_it_is_gone() {
    let mut two = Two::new();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    two.events(NODE);
    let waits = two.acquire(NODE, &[2]);
    let mut bytes = two.bytes.clone().expect("a value");
    bytes[0] = 2;
    two.own.handle_value(two.revision + 1, Some(&bytes));
    let error = ValueError::Version { version: 2, oldest_writer: 1 };
    let expected = [Event::Stopped(error), answered(waits, Answer::Refused)];
    assert_eq!(two.events(NODE), expected);
    let late = two.acquire(NODE, &[3]);
    assert_eq!(two.events(NODE), [answered(late, Answer::Refused)]);
    assert_eq!((two.poll(NODE), two.own.value()), (None, None));

    two.revision += 2;
    two.hear();
    two.acquire(NODE, &[4]);
    two.commit(NODE);
    assert_eq!(two.replies(NODE).len(), 1);
}

#[test]
fn a_call_in_flight_is_answered_though_the_value_is_not_read_any_more() {
    let mut two = Two::new();
    let call = two.acquire(NODE, &[1]);
    assert!(two.poll(NODE).is_some());
    two.own.handle_value(9, Some(&[7; 40]));
    two.own.handle_committed(5);
    let events = two.events(NODE);
    assert!(matches!(events[0], Event::Stopped(_)), "{events:?}");
    assert!(
        matches!(events[1], Event::Answered { call: of, answer: Answer::Reply(_) } if of == call)
    );
}

#[test]
fn what_is_reserved_for_intents_is_kept() {
    let mut two = Two::new();
    two.acquire(OTHER, &[1]);
    two.commit(OTHER);
    let mut value = two.own.value().expect("a value").clone();
    value.helped = 77;
    two.revision += 1;
    two.bytes = Some(value.encode());
    two.hear();
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    assert_eq!(two.other.value().expect("a value").helped, 77);
}

#[test]
fn a_place_that_was_gone_and_joins_with_the_next_call_is_no_stranger() {
    let mut two = Two::new();
    two.call(NODE, renew(NODE, &[1]));
    two.acquire(NODE, &[1]);
    two.commit(NODE);
    let replies = two.replies(NODE);
    assert_eq!(replies[0].statuses[..], [PlaceStatus::Gone]);
    assert_eq!(replies[1].statuses[..], [PlaceStatus::Held]);
    assert_eq!(two.poll(NODE), None);
}
