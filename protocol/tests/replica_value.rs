//! A stored value: its header, and what is refused.

use std::time::Duration;

use tower_semaphore_protocol::replica::{Change, Replica, Value};
use tower_semaphore_protocol::{Call, NodeId, Op, PlaceId, Time};

const CLOCK: u64 = 1_795_169_853_126_543;
const NODE: NodeId = NodeId::new(1);

fn acquire(n: u64) -> Call {
    let ids = [PlaceId { node: NODE, poll_only: false, n, bound: None, claim: None }].into();
    let op = Op::Acquire { leaving: vec![], lease_ms: 10_000, max_queue: Some(9), ids };
    Call { limit: 9, ..Call::of(op) }
}

/// A value with one place.
fn value() -> Value {
    let mut replica = Replica::new(NODE, Duration::from_secs(2));
    replica.handle_call(1, acquire(1));
    match replica.poll_transaction(Time::ZERO, CLOCK).map(|transaction| transaction.change) {
        Some(Change::Put(bytes)) => Value::decode(&bytes).expect("a value"),
        change => panic!("{change:?}"),
    }
}

#[test]
fn the_header_is_written_as_in_version_1() {
    let value = Value {
        time: 0x0102_0304_0506,
        helped: 0x0708,
        writer: NodeId::new(u64::MAX),
        is_promoted: false,
        ..Value::default()
    };
    let header = [1, 1, 1, 6, 5, 4, 3, 2, 1, 0, 0, 8, 7, 0, 0, 0, 0, 0, 0];
    let bytes = value.encode();
    assert_eq!(bytes[..19], header);
    assert_eq!(bytes[19..27], [255; 8]);
    assert_eq!(Value::decode(&bytes), Ok(value));
}

#[test]
fn a_value_that_is_not_as_it_is_written_is_refused() {
    let bytes = value().encode();
    assert_eq!(bytes.len(), 60, "27 of them are the header");
    let error = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        Value::decode(&bytes).expect_err("it is refused").to_string()
    };
    assert_eq!(
        error(&|bytes| bytes[1] = 2),
        "version of a semaphore is 1, to be changed from version 2 on; expected 1"
    );
    assert_eq!(error(&|bytes| bytes[2] = 2), "flags of a semaphore is 2; expected 0 to 1");
    assert_eq!(
        error(&|bytes| bytes[10] = 255),
        "time of a semaphore is 18376481649524750223; expected 0 to 89999999999999999"
    );
    assert_eq!(
        error(&|bytes| bytes.truncate(20)),
        "length of a semaphore is 20 bytes; expected more"
    );
    assert!(error(&|bytes| bytes.push(0)).contains("of a ledger is 1; expected 0"));

    let mut value = Value::decode(&bytes).expect("a value");
    value.ledger.carry_out(NODE, &acquire(2), CLOCK, &mut |_, _| true);
    let error = Value::decode(&value.encode()).expect_err("its lease ends by time").to_string();
    assert!(error.starts_with("lease end of a semaphore is 1795169863126; expected"), "{error}");
}
