//! Watching keys.

use std::fmt;

use bytes::Bytes;

use super::error::WireError;
use super::exchange::Exchange;
use super::messages::{
    Event, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchRequestUnion, WatchResponse,
};

/// A stream of the changes of some ranges of keys. Dropping it ends the stream.
///
/// A range is refused with [`InvalidToken`](super::Reason::InvalidToken) if the token of the connection has ended. Any
/// call of the [`Client`](super::Client) renews it; then a new watch succeeds.
///
/// Events of one revision are delivered together or one after the other, and those of a range in the order of
/// revisions. While the stream is not read, up to 2 MiB of it wait in this process, and the rest at the member.
pub struct Watch {
    exchange: Exchange<WatchRequest, WatchResponse>,
    /// The number of ranges that etcd has answered for: it answers in their order.
    answered: usize,
}

/// The keys from `key` up to and without `range_end`; the key alone if that is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    pub key: Bytes,
    pub range_end: Bytes,
    /// The first revision whose changes are delivered; 0: the next one.
    pub start_revision: i64,
}

/// What a watch delivers. `range` is the index of a range in those that were named.
#[derive(Clone, Debug)]
pub enum WatchMessage {
    /// The range is watched.
    Created {
        range: usize,
        /// The newest revision of the member. Events before it may follow.
        revision: i64,
    },
    /// Keys of the range changed.
    Events {
        range: usize,
        events: Vec<Event>,
        /// All events of the range up to this revision have been delivered.
        ///
        /// It is not the revision in the header of the response: in a watch that catches up, that one is the newest of
        /// the member, and events before it follow.
        delivered: i64,
    },
    /// The answer to [`Watch::progress`].
    Progress {
        /// The newest revision of the member. Before versions 3.4.25 and 3.5.8, events before it may follow.
        revision: i64,
    },
    /// The range is no longer watched, or never was. Other ranges are.
    Canceled {
        range: usize,
        error: WireError,
        /// The oldest revision that is left, if that of the range is not; else 0.
        compact_revision: i64,
    },
}

impl Watch {
    pub(super) fn new(
        ranges: Vec<KeyRange>,
        open: impl FnOnce(usize) -> Exchange<WatchRequest, WatchResponse>,
    ) -> Self {
        // Room for one progress request besides.
        let exchange = open(ranges.len() + 1);
        for (range, KeyRange { key, range_end, start_revision }) in ranges.into_iter().enumerate() {
            let create = WatchCreateRequest {
                key,
                range_end,
                start_revision,
                watch_id: id(range),
                fragment: true,
                ..Default::default()
            };
            let has_room = exchange.send(request(WatchRequestUnion::Create(create)));
            debug_assert!(has_room, "the queue has room for all ranges");
        }
        Self { exchange, answered: 0 }
    }

    /// Asks the member for its revision, so that it says something. Does nothing if such a request is still unsent.
    pub fn progress(&self) {
        let _ = self.exchange.send(request(WatchRequestUnion::Progress(WatchProgressRequest {})));
    }

    /// Returns the next message.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no message.
    ///
    /// # Errors
    ///
    /// If the stream has ended. It is of no further use.
    pub async fn next(&mut self) -> Result<WatchMessage, WireError> {
        loop {
            let response = self.exchange.next().await?;
            if let Some(message) = read(response, &mut self.answered) {
                return Ok(message);
            }
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

const fn request(request: WatchRequestUnion) -> WatchRequest {
    WatchRequest { request: Some(request) }
}

/// Names a range in the stream. 0 would let etcd choose.
fn id(range: usize) -> i64 {
    i64::try_from(range + 1).unwrap_or(i64::MAX)
}

/// Reads a response. `None`: it says nothing.
fn read(response: WatchResponse, answered: &mut usize) -> Option<WatchMessage> {
    let revision = response.header.map_or(0, |header| header.revision);
    let of_id = || usize::try_from(response.watch_id - 1).ok();
    // A watch that is refused has no id, so answers are told apart by their order.
    let range = if response.created {
        *answered += 1;
        Some(*answered - 1)
    } else {
        of_id()
    };
    if response.canceled || response.compact_revision > 0 {
        let compact_revision = response.compact_revision;
        let error = if compact_revision > 0 {
            WireError::compacted(compact_revision)
        } else {
            WireError::of_reason(&response.cancel_reason)
        };
        return Some(WatchMessage::Canceled { range: range?, error, compact_revision });
    }
    if response.created {
        return Some(WatchMessage::Created { range: range?, revision });
    }
    let last = response.events.iter().rev().find_map(|event| event.kv.as_ref());
    let Some(last) = last.map(|kv| kv.mod_revision) else {
        // Also where etcd reports the revision of one range on its own account.
        return Some(WatchMessage::Progress { revision }).filter(|_| !response.fragment);
    };
    // The next fragment may have more of the same revision.
    let delivered = if response.fragment { last - 1 } else { last };
    Some(WatchMessage::Events { range: range?, events: response.events, delivered })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::etcd::wire::Reason;
    use crate::backend::etcd::wire::messages::{KeyValue, ResponseHeader};

    fn response(watch_id: i64) -> WatchResponse {
        let header = ResponseHeader { revision: 90, ..Default::default() };
        WatchResponse { header: Some(header), watch_id, ..Default::default() }
    }

    fn events(revisions: &[i64]) -> Vec<Event> {
        let kv = |mod_revision| KeyValue { mod_revision, ..Default::default() };
        revisions.iter().map(|n| Event { kv: Some(kv(*n)), ..Default::default() }).collect()
    }

    #[test]
    fn a_refused_range_is_told_by_its_turn() {
        let mut answered = 0;
        let created = WatchResponse { created: true, ..response(1) };
        let Some(WatchMessage::Created { range: 0, revision: 90 }) = read(created, &mut answered)
        else {
            panic!("not created")
        };
        let refused = WatchResponse {
            created: true,
            canceled: true,
            cancel_reason: "etcdserver: permission denied".to_owned(),
            ..response(-1)
        };
        let refused = read(refused, &mut answered);
        let Some(WatchMessage::Canceled { range: 1, error, compact_revision: 0 }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(error.reason(), Reason::PermissionDenied);
    }

    #[test]
    fn what_is_delivered_ends_with_the_last_event() {
        let mut answered = 2;
        for (fragment, delivered) in [(true, 7), (false, 8)] {
            let some = WatchResponse { fragment, events: events(&[6, 8]), ..response(2) };
            let read = read(some, &mut answered);
            let Some(WatchMessage::Events { range: 1, events, delivered: found }) = read else {
                panic!("{read:?}")
            };
            assert_eq!((events.len(), found), (2, delivered));
        }
        assert_eq!(answered, 2);
    }

    #[test]
    fn compaction_and_progress_are_read() {
        let compacted = WatchResponse { canceled: true, compact_revision: 5, ..response(2) };
        let compacted = read(compacted, &mut 2);
        let Some(WatchMessage::Canceled { range: 1, error, compact_revision: 5 }) = compacted
        else {
            panic!("{compacted:?}")
        };
        assert_eq!(error.reason(), Reason::Compacted);
        let progress = read(response(-1), &mut 2);
        assert!(matches!(progress, Some(WatchMessage::Progress { revision: 90 })), "{progress:?}");
    }
}
