//! The bytes of messages, as etcd reads and writes them.

use bytes::Bytes;
use prost::Message;

use super::*;

/// Bytes as hexadecimal digits; spaces are for the reader.
fn bytes(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|c| *c != b' ').collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

#[track_caller]
fn assert_wire<M: Message + Default + PartialEq + fmt::Debug>(message: &M, wire: &str) {
    assert_eq!(message.encode_to_vec(), bytes(wire));
    assert_eq!(M::decode(&*bytes(wire)).as_ref(), Ok(message));
}

fn key(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

#[test]
fn a_transaction_is_written_as_etcd_reads_it() {
    let put = PutRequest { key: key("k"), value: key("v"), lease: 7 };
    let delete = DeleteRangeRequest { key: key("k"), range_end: key("l") };
    let range = RangeRequest { key: key("k"), limit: 300, keys_only: true, ..Default::default() };
    let request = TxnRequest {
        compare: vec![
            Compare::mod_revision(key("k"), CompareResult::Equal, 5),
            Compare::version(key("n"), CompareResult::Greater, 0),
            Compare::mod_revision(key("i"), CompareResult::Less, 9).up_to(key("j")),
        ],
        success: vec![put.into(), delete.into()],
        failure: vec![range.into()],
    };
    assert_wire(
        &request,
        // mod_revision(k) = 5; a value of 0 is written, because it is one of several kinds
        "0a 07  10 02  1a 01 6b  30 05 \
         0a 07  08 01  1a 01 6e  20 00 \
         0a 0d  08 02  10 02  1a 01 69  30 09  82 04 01 6a \
         12 0a  12 08  0a 01 6b  12 01 76  18 07 \
         12 08  1a 06  0a 01 6b  12 01 6c \
         1a 0a  0a 08  0a 01 6b  18 ac 02  40 01",
    );
}

#[test]
fn a_response_of_a_transaction_is_read() {
    let header = ResponseHeader { cluster_id: 1, member_id: u64::MAX, revision: 300, raft_term: 2 };
    let kv = KeyValue {
        key: key("k"),
        create_revision: 2,
        mod_revision: 3,
        version: 4,
        value: key("v"),
        lease: -1,
    };
    let range = RangeResponse { header: None, kvs: vec![kv], more: true, count: 5 };
    let response = TxnResponse {
        header: Some(header),
        succeeded: true,
        responses: vec![
            ResponseOp { response: Some(OpResponse::Put(PutResponse::default())) },
            ResponseOp { response: Some(OpResponse::Range(range)) },
        ],
    };
    assert_wire(
        &response,
        "0a 12  08 01  10 ff ff ff ff ff ff ff ff ff 01  18 ac 02  20 02 \
         10 01 \
         1a 02  12 00 \
         1a 1f  0a 1d  12 17  0a 01 6b  10 02  18 03  20 04  2a 01 76  30 ff ff ff ff ff ff ff ff ff 01  18 01  20 05",
    );
}

#[test]
fn a_field_that_is_not_known_is_skipped() {
    // `prev_kv` of a put, and a field of a later version.
    let read = PutResponse::decode(&*bytes("0a 02 18 05  12 03 0a 01 6b  a8 06 01")).unwrap();
    let header = ResponseHeader { revision: 5, ..Default::default() };
    assert_eq!(read, PutResponse { header: Some(header) });
}

#[test]
fn messages_of_leases_are_written_and_read() {
    assert_wire(&LeaseGrantRequest { ttl: 2, id: 0 }, "08 02");
    assert_wire(&LeaseGrantResponse { header: None, id: 16, ttl: 2 }, "10 10  18 02");
    assert_wire(&LeaseRevokeRequest { id: 16 }, "08 10");
    assert_wire(&LeaseKeepAliveRequest { id: 16 }, "08 10");
    assert_wire(&LeaseKeepAliveResponse { header: None, id: 16, ttl: 0 }, "10 10");
}

#[test]
fn messages_of_watches_are_written_and_read() {
    let create = WatchCreateRequest {
        key: key("s/"),
        range_end: key("s0"),
        start_revision: 6,
        watch_id: 1,
        fragment: true,
        ..Default::default()
    };
    let request = |union| WatchRequest { request: Some(union) };
    assert_wire(
        &request(WatchRequestUnion::Create(create)),
        "0a 0e  0a 02 73 2f  12 02 73 30  18 06  38 01  40 01",
    );
    let cancel = WatchCancelRequest { watch_id: 1 };
    assert_wire(&request(WatchRequestUnion::Cancel(cancel)), "12 02  08 01");
    assert_wire(&request(WatchRequestUnion::Progress(WatchProgressRequest {})), "1a 00");

    let deleted = KeyValue { key: key("k"), mod_revision: 9, ..Default::default() };
    let response = WatchResponse {
        watch_id: 1,
        fragment: true,
        events: vec![
            Event { r#type: EventType::Put.into(), kv: Some(KeyValue::default()) },
            Event { r#type: EventType::Delete.into(), kv: Some(deleted) },
        ],
        ..Default::default()
    };
    assert_wire(&response, "10 01  38 01  5a 02  12 00  5a 09  08 01  12 05  0a 01 6b  18 09");
    let canceled = WatchResponse {
        watch_id: -1,
        created: true,
        canceled: true,
        compact_revision: 4,
        cancel_reason: "x".to_owned(),
        ..Default::default()
    };
    assert_wire(&canceled, "10 ff ff ff ff ff ff ff ff ff 01  18 01  20 01  28 04  32 01 78");
}

#[test]
fn messages_of_users_and_members_are_written_and_read() {
    let request = AuthenticateRequest { name: "u".to_owned(), password: "p".to_owned() };
    assert_wire(&request, "0a 01 75  12 01 70");
    let response = AuthenticateResponse { header: None, token: "t.1".to_owned() };
    assert_wire(&response, "12 03 74 2e 31");
    assert_wire(&StatusRequest {}, "");
    let response = StatusResponse {
        version: "3.4".to_owned(),
        db_size: 20480,
        leader: 8,
        raft_index: 9,
        raft_term: 2,
        errors: vec!["e".to_owned()],
        db_size_in_use: 4096,
        is_learner: true,
        db_size_quota: 1,
        ..Default::default()
    };
    assert_wire(
        &response,
        "12 03 33 2e 34  18 80 a0 01  20 08  28 09  30 02  42 01 65  48 80 20  50 01  60 01",
    );
}

#[test]
fn neither_password_nor_token_is_shown() {
    let request = AuthenticateRequest { name: "u".to_owned(), password: "hunter2".to_owned() };
    let response = AuthenticateResponse { header: None, token: "hunter2".to_owned() };
    assert!(!format!("{request:?} {response:?}").contains("hunter2"));
}
