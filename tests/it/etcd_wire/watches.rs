//! Streams of changes.

use tower_semaphore::backend::etcd_wire::messages::{Event, EventType, KeyValue, PutRequest};
use tower_semaphore::backend::etcd_wire::{Client, KeyRange, Reason, Watch, WatchMessage};

use super::{key, open, put, revision, soon, write};
use crate::support::etcd::TestEtcd;
use crate::support::eventually;

pub(super) fn from(name: &str, end: &str, start_revision: i64) -> KeyRange {
    KeyRange { key: key(name), range_end: key(end), start_revision }
}

/// Writes a key, and returns its revision.
async fn set(client: &Client, name: &str, value: &str) -> i64 {
    revision(&soon(client.txn(write(put(name, value)))).await.unwrap())
}

async fn next(watch: &mut Watch) -> WatchMessage {
    soon(watch.next()).await.unwrap()
}

/// Awaits the events of a range.
async fn events(watch: &mut Watch, of: usize) -> (Vec<Event>, i64) {
    match next(watch).await {
        WatchMessage::Events { range, events, delivered } if range == of => (events, delivered),
        other => panic!("expected events of range {of}: {other:?}"),
    }
}

async fn created(watch: &mut Watch, of: usize) -> i64 {
    match next(watch).await {
        WatchMessage::Created { range, revision } if range == of => revision,
        other => panic!("range {of} is not watched: {other:?}"),
    }
}

fn changed(event: &Event) -> (&KeyValue, EventType) {
    (event.kv.as_ref().unwrap(), event.r#type())
}

#[tokio::test]
async fn several_ranges_are_watched_on_one_stream() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let before = set(&client, "s/a/L", "0").await;
    // What happened in between is delivered.
    let missed = set(&client, "s/b/L", "1").await;
    let ranges = vec![from("s/", "s0", before + 1), from("o", "", before + 1)];
    let mut watch = client.watch(ranges);
    assert_eq!(created(&mut watch, 0).await, missed);
    assert_eq!(created(&mut watch, 1).await, missed);
    let (some, delivered) = events(&mut watch, 0).await;
    let (kv, kind) = changed(&some[0]);
    assert_eq!((&*kv.key, &*kv.value, kind), (&b"s/b/L"[..], &b"1"[..], EventType::Put));
    assert_eq!((some.len(), kv.mod_revision, delivered), (1, missed, missed));

    let overrides = set(&client, "o", "2").await;
    set(&client, "other", "3").await;
    assert_eq!(events(&mut watch, 1).await.1, overrides);
    etcd.ctl(&["del", "s/a/L"]);
    let (some, delivered) = events(&mut watch, 0).await;
    let (kv, kind) = changed(&some[0]);
    assert_eq!((&*kv.key, kind, kv.version), (&b"s/a/L"[..], EventType::Delete, 0));
    assert_eq!(delivered, kv.mod_revision);

    watch.progress();
    let progress = next(&mut watch).await;
    assert!(matches!(progress, WatchMessage::Progress { revision } if revision == delivered));
}

#[tokio::test]
async fn all_events_of_a_transaction_come_together() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    created(&mut watch, 0).await;
    let mut both = write(put("s/a", "1"));
    both.success.push(put("s/b", "2").into());
    let at = revision(&soon(client.txn(both)).await.unwrap());
    let (some, delivered) = events(&mut watch, 0).await;
    assert_eq!((some.len(), delivered), (2, at));
}

#[tokio::test]
async fn a_start_that_was_compacted_is_told_with_the_oldest_that_is_left() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let first = set(&client, "s/a", "1").await;
    set(&client, "s/a", "2").await;
    let newest = set(&client, "s/a", "3").await;
    etcd.ctl(&["compact", &newest.to_string()]);
    let mut watch = client.watch(vec![from("s/", "s0", first), from("s/", "s0", newest)]);
    let (mut canceled, mut other) = (0, 0);
    // Both are created; then etcd looks for what they missed.
    while canceled == 0 || other == 0 {
        match next(&mut watch).await {
            WatchMessage::Created { .. } => {}
            WatchMessage::Canceled { range: 0, error, compact_revision } => {
                assert_eq!(error.reason(), Reason::Compacted, "{error}");
                assert!(!error.is_connection());
                canceled = compact_revision;
            }
            WatchMessage::Events { range: 1, delivered, .. } => other = delivered,
            unexpected => panic!("{unexpected:?}"),
        }
    }
    assert_eq!((canceled, other), (newest, newest));
    // A read says the same.
    let old = super::RangeRequest { revision: first, ..super::range("s/a") };
    let error = soon(client.range(old)).await.unwrap_err();
    assert!(error.reason() == Reason::Compacted && error.did_nothing(), "{error}");
}

#[tokio::test]
async fn a_large_response_comes_in_fragments() {
    const COUNT: i64 = 12;
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let large = "x".repeat(500_000);
    let mut revisions = Vec::new();
    for _ in 0..COUNT {
        revisions.push(set(&client, "s/a", &large).await);
    }
    let mut watch = client.watch(vec![from("s/", "s0", revisions[0])]);
    created(&mut watch, 0).await;
    let (mut seen, mut until, mut parts) = (Vec::new(), 0, 0);
    while until < *revisions.last().unwrap() {
        let (some, delivered) = events(&mut watch, 0).await;
        seen.extend(some.iter().map(|event| changed(event).0.mod_revision));
        assert!(delivered > until && *seen.last().unwrap() >= delivered);
        (until, parts) = (delivered, parts + 1);
    }
    assert_eq!(seen, revisions);
    assert!(parts > 2, "{parts}");
}

#[tokio::test]
async fn a_watch_that_is_dropped_ends_at_the_member() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let streams = || etcd.metric("etcd_debugging_mvcc_watch_stream_total");
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    created(&mut watch, 0).await;
    assert_eq!(streams(), 1.0);
    drop(watch);
    eventually("it has ended", async || streams() == 0.0).await;
    // Others go on.
    assert!(set(&client, "s/a", "1").await > 0);
}

/// Other calls of the connection are not held up by a watch that nobody reads.
#[tokio::test]
async fn a_watch_that_is_not_read_holds_up_no_call() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    created(&mut watch, 0).await;
    let large = "x".repeat(1_000_000);
    let mut last = 0;
    for _ in 0..10 {
        last = set(&client, "s/a", &large).await;
    }
    let mut until = 0;
    while until < last {
        until = events(&mut watch, 0).await.1;
    }
}

#[tokio::test]
async fn a_put_under_a_lease_that_is_gone_does_nothing() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let mut both = write(put("s/a", "1"));
    both.success.push(PutRequest { lease: 4711, ..put("n/1", "") }.into());
    let error = soon(client.txn(both)).await.unwrap_err();
    assert_eq!(error.reason(), Reason::LeaseNotFound);
    assert!(error.did_nothing() && !error.is_connection(), "{error}");
    assert_eq!(super::read(&client, "s/a").await, None);
}
