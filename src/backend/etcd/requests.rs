//! What the machines of the protocol ask for, as requests to etcd, and its responses as they take them.

use bytes::Bytes;

use super::keys::Keys;
use super::wire::messages::{
    Compare, CompareResult, DeleteRangeRequest, KeyValue, OpResponse, PutRequest, RangeRequest,
    RangeResponse, RequestOp, ResponseHeader, TxnRequest, TxnResponse,
};
use crate::error::BackendError;
use crate::protocol::liveness::{LeaseId, Revision, Row, Sign, Term};
use crate::protocol::replica::{Change, Transaction, ValueError};

/// A value, and the revision that it is as of; `None`: the key is absent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) revision: u64,
    pub(super) value: Option<Bytes>,
}

/// What became of the transaction of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Committed {
        revision: u64,
    },
    /// The value of that moment.
    Lost(Stored),
    /// The response is not one to this request.
    Malformed,
}

/// A key alone, as this member's leader has it.
pub(super) fn read(key: impl Into<Bytes>) -> RangeRequest {
    RangeRequest { key: key.into(), ..Default::default() }
}

/// The transaction of a replica.
pub(super) fn transaction(keys: &Keys, key: &str, transaction: &Transaction) -> TxnRequest {
    let key = || Bytes::copy_from_slice(key.as_bytes());
    let mut compare = vec![is_unchanged(key(), transaction.changed)];
    let is_present = |row: &Row| Compare::version(keys.sign(*row), CompareResult::Greater, 0);
    compare.extend(transaction.present.iter().map(is_present));
    let is_absent = |row: &Row| Compare::version(keys.sign(*row), CompareResult::Equal, 0);
    compare.extend(transaction.absent.iter().map(is_absent));
    let change = match &transaction.change {
        Change::Put(value) => Some(write(key(), Some(Bytes::copy_from_slice(value)))),
        Change::Delete => Some(write(key(), None)),
        Change::Nothing => None,
    };
    TxnRequest { compare, success: change.into_iter().collect(), failure: vec![read(key()).into()] }
}

/// Whether the last change of a key was at this revision; 0: it is absent.
pub(super) fn is_unchanged(key: Bytes, changed: u64) -> Compare {
    Compare::mod_revision(key, CompareResult::Equal, signed(changed))
}

/// Sets a key, or removes it.
pub(super) fn write(key: Bytes, value: Option<Bytes>) -> RequestOp {
    match value {
        Some(value) => PutRequest { key, value, lease: 0 }.into(),
        None => DeleteRangeRequest { key, ..Default::default() }.into(),
    }
}

pub(super) fn outcome(response: &TxnResponse) -> Outcome {
    let revision = revision_of(response.header);
    if response.succeeded {
        return Outcome::Committed { revision };
    }
    match range_of(response).map(stored) {
        Some(stored) => Outcome::Lost(stored),
        None => Outcome::Malformed,
    }
}

/// What a read of a semaphore's key found.
pub(super) fn stored(response: &RangeResponse) -> Stored {
    match response.kvs.first() {
        Some(kv) => Stored { revision: unsigned(kv.mod_revision), value: Some(kv.value.clone()) },
        None => Stored { revision: revision_of(response.header), value: None },
    }
}

/// Puts a sign of life, if its last change is the known one, and reads it.
pub(super) fn put_sign(keys: &Keys, row: Row, lease: LeaseId, over: Revision) -> TxnRequest {
    let key = keys.sign(row);
    TxnRequest {
        compare: vec![Compare::mod_revision(key.clone(), CompareResult::Equal, over)],
        success: vec![
            PutRequest { key: key.clone(), lease, ..Default::default() }.into(),
            read(key.clone()).into(),
        ],
        failure: vec![read(key).into()],
    }
}

/// The sign of life that a transaction or a read found, and the term of the leader that it came from.
pub(super) fn sign(
    response: &RangeResponse,
    header: Option<ResponseHeader>,
) -> (Option<Sign>, Term) {
    let sign = |kv: &KeyValue| Sign {
        lease: kv.lease,
        created: kv.create_revision,
        modified: kv.mod_revision,
    };
    (response.kvs.first().map(sign), header.map_or(0, |header| header.raft_term))
}

/// The sign of life that the transaction of [`put_sign`] found.
pub(super) fn sign_in(response: &TxnResponse) -> (Option<Sign>, Term) {
    let nothing = RangeResponse::default();
    sign(range_of(response).unwrap_or(&nothing), response.header)
}

/// The response to the read in a transaction, whichever branch it was in.
pub(super) fn range_of(response: &TxnResponse) -> Option<&RangeResponse> {
    response.responses.iter().find_map(|response| match &response.response {
        Some(OpResponse::Range(range)) => Some(range),
        _ => None,
    })
}

fn revision_of(header: Option<ResponseHeader>) -> u64 {
    header.map_or(0, |header| unsigned(header.revision))
}

pub(super) fn signed(revision: u64) -> Revision {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

/// The error for a semaphore whose value is not read.
pub(super) fn unreadable(name: &str, error: &ValueError) -> BackendError {
    BackendError::call(format!("semaphore {name} in etcd cannot be used: {error}"))
}

pub(super) fn unsigned(revision: i64) -> u64 {
    u64::try_from(revision).unwrap_or(0)
}
