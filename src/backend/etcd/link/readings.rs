//! Readings of several keys.

use std::sync::Arc;

use super::requests;
use crate::backend::PeerMessage;
use crate::backend::etcd::engine::Page;
use crate::backend::etcd::keys::{Folder, Keys};
use crate::backend::etcd::wire::messages::{KeyValue, RangeRequest};
use crate::backend::etcd::wire::{Client, WireError};
use crate::protocol::liveness::Row;

/// The most signs of life, and the most semaphores, in one reading: etcd accepts values of 1.5 MiB, and a message of up to
/// 16 MiB is read.
const SIGNS_MAX: i64 = 1000;
pub(super) const SEMAPHORES_MAX: i64 = 8;

/// The signs of life as of a revision.
pub(in crate::backend::etcd) type Signs = (Vec<Row>, u64);

/// Reads all signs of life, as of one revision.
pub(in crate::backend::etcd) async fn signs(
    client: &Client,
    keys: &Keys,
) -> Result<Signs, WireError> {
    let Folder { mut key, range_end } = keys.signs();
    let (mut rows, mut revision) = (Vec::new(), 0);
    loop {
        let request = RangeRequest {
            key,
            range_end: range_end.clone(),
            limit: SIGNS_MAX,
            revision,
            keys_only: true,
            ..Default::default()
        };
        let page = client.range(request).await?;
        if revision == 0 {
            revision = page.header.map_or(0, |header| header.revision);
        }
        rows.extend(page.kvs.iter().filter_map(|kv| keys.row(&kv.key)));
        match page.kvs.last() {
            Some(last) if page.more => key = behind(&last.key).into(),
            _ => return Ok((rows, requests::unsigned(revision))),
        }
    }
}

/// The first key behind this one.
pub(in crate::backend::etcd) fn behind(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}

pub(super) fn page_of(kvs: Vec<KeyValue>, more: bool) -> Page {
    let next = kvs.last().filter(|_| more).map(|last| behind(&last.key));
    let value = |kv: KeyValue| {
        let key = std::str::from_utf8(&kv.key).ok()?.into();
        Some((key, requests::unsigned(kv.mod_revision), kv.value))
    };
    Page { values: kvs.into_iter().filter_map(value).collect(), next }
}

/// Reads a message to this process: the name of a semaphore, a line break, and the message.
pub(super) fn read_message(bytes: &[u8]) -> Option<(Arc<str>, PeerMessage)> {
    let (name, message) = std::str::from_utf8(bytes).ok()?.split_once('\n')?;
    Some((name.into(), PeerMessage::parse(message)?))
}
