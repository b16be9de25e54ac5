//! The wire to etcd, held against a real one.

mod failures;
mod users;
mod watches;

use std::ops::Deref;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tower_semaphore::BackendError;
use tower_semaphore::backend::etcd_wire::messages::{
    Compare, CompareResult, DeleteRangeRequest, KeyValue, LeaseGrantRequest, LeaseRevokeRequest,
    OpResponse, PutRequest, RangeRequest, TxnRequest, TxnResponse,
};
use tower_semaphore::backend::etcd_wire::{Client, Driver, Reason, Settings, Url, WireError};

use crate::support::etcd::TestEtcd;

/// Generous: benchmarks measure speed.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A connection that a task drives. Closed when this is dropped.
pub(crate) struct Connection {
    client: Client,
    driver: JoinHandle<()>,
}

impl From<(Client, Driver)> for Connection {
    fn from((client, driver): (Client, Driver)) -> Self {
        Self { client, driver: tokio::spawn(driver) }
    }
}

impl Deref for Connection {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Opens a connection to the first member of a URL.
async fn try_open(url: &str) -> Result<(Client, Driver), BackendError> {
    let url = Url::parse(url).unwrap();
    let settings = Settings::new(&url, SOON).unwrap();
    Client::open(&url.endpoints[0], &settings).await
}

pub(crate) async fn open(url: &str) -> Connection {
    try_open(url).await.unwrap().into()
}

/// What a call returns, which must not hang.
pub(crate) async fn soon<T>(call: impl Future<Output = T>) -> T {
    timeout(SOON, call).await.expect("it takes more than ten seconds")
}

fn key(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

pub(crate) fn put(name: &str, value: &str) -> PutRequest {
    PutRequest { key: key(name), value: key(value), lease: 0 }
}

/// Writes without a condition.
pub(crate) fn write(request: PutRequest) -> TxnRequest {
    TxnRequest { success: vec![request.into()], ..Default::default() }
}

fn range(name: &str) -> RangeRequest {
    RangeRequest { key: key(name), ..Default::default() }
}

async fn read(client: &Client, name: &str) -> Option<KeyValue> {
    soon(client.range(range(name))).await.unwrap().kvs.pop()
}

fn revision(response: &TxnResponse) -> i64 {
    response.header.unwrap().revision
}

#[tokio::test]
async fn a_transaction_takes_the_branch_that_the_comparisons_choose() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let request = |expected: i64| TxnRequest {
        compare: vec![
            Compare::mod_revision(key("s/a/L"), CompareResult::Equal, expected),
            // No intent is newer than this; there is none.
            Compare::mod_revision(key("s/a/i/"), CompareResult::Less, 1).up_to(key("s/a/i0")),
        ],
        success: vec![put("s/a/L", "ledger").into()],
        failure: vec![
            put("n/1", "intent").into(),
            RangeRequest { range_end: key("s/a0"), ..range("s/a/") }.into(),
        ],
    };
    let first = soon(client.txn(request(0))).await.unwrap();
    assert!(first.succeeded);
    assert!(matches!(first.responses[0].response, Some(OpResponse::Put(_))), "{first:?}");
    let header = first.header.unwrap();
    assert!(header.cluster_id != 0 && header.member_id != 0 && header.raft_term != 0);

    let lost = soon(client.txn(request(0))).await.unwrap();
    assert!(!lost.succeeded && revision(&lost) == header.revision + 1, "{lost:?}");
    let Some(OpResponse::Range(found)) = &lost.responses[1].response else { panic!("{lost:?}") };
    assert_eq!((found.kvs.len(), &*found.kvs[0].value), (1, &b"ledger"[..]));
    assert_eq!(found.kvs[0].mod_revision, header.revision);
    assert_eq!(read(&client, "n/1").await.unwrap().value, key("intent"));

    let delete = DeleteRangeRequest { key: key("s/a/L"), range_end: Bytes::new() };
    let delete = TxnRequest { success: vec![delete.into()], ..request(header.revision) };
    let deleted = soon(client.txn(delete)).await.unwrap();
    let Some(OpResponse::DeleteRange(gone)) = &deleted.responses[0].response else {
        panic!("{deleted:?}")
    };
    assert!(deleted.succeeded && gone.deleted == 1);
    assert_eq!(read(&client, "s/a/L").await, None);
}

#[tokio::test]
async fn a_range_is_read_in_pages_as_of_one_revision() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let mut last = 0;
    for name in ["s/a", "s/b", "s/c"] {
        last = revision(&soon(client.txn(write(put(name, name)))).await.unwrap());
    }
    let first = RangeRequest { range_end: key("s0"), limit: 2, keys_only: true, ..range("s/") };
    let page = soon(client.range(first)).await.unwrap();
    assert!(page.more && page.count == 3 && page.kvs.len() == 2, "{page:?}");
    assert!(page.kvs.iter().all(|kv| kv.value.is_empty()));
    soon(client.txn(write(put("s/d", "later")))).await.unwrap();
    let second = RangeRequest { range_end: key("s0"), revision: last, ..range("s/b\0") };
    let page = soon(client.range(second)).await.unwrap();
    let names: Vec<_> = page.kvs.iter().map(|kv| kv.key.clone()).collect();
    assert_eq!((names, page.more), (vec![key("s/c")], false));
}

#[tokio::test]
async fn a_key_ends_with_its_lease_unless_it_is_kept_alive() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let grant = LeaseGrantRequest { ttl: 1, id: 0 };
    let lease = soon(client.lease_grant(grant)).await.unwrap();
    assert!(lease.ttl == 1 && lease.id != 0, "{lease:?}");
    let (kept, lost) = (lease.id, soon(client.lease_grant(grant)).await.unwrap().id);
    for (name, lease) in [("n/kept", kept), ("n/lost", lost)] {
        soon(client.txn(write(PutRequest { lease, ..put(name, "") }))).await.unwrap();
    }
    // One stream serves all leases.
    let mut alive = client.keep_alive();
    let ended = async {
        loop {
            assert!(alive.send(kept));
            let answer = alive.next().await.unwrap();
            assert_eq!((answer.lease, answer.ttl), (kept, Some(1)));
            if read(&client, "n/lost").await.is_none() {
                break;
            }
        }
    };
    soon(ended).await;
    assert_eq!(read(&client, "n/kept").await.unwrap().lease, kept);
    // Answers come in the order of the requests.
    assert!(alive.send(lost) && alive.send(kept));
    let (first, second) = (soon(alive.next()).await.unwrap(), soon(alive.next()).await.unwrap());
    assert_eq!((first.lease, first.ttl), (lost, None));
    assert_eq!((second.lease, second.ttl), (kept, Some(1)));

    soon(client.lease_revoke(LeaseRevokeRequest { id: kept })).await.unwrap();
    assert_eq!(read(&client, "n/kept").await, None);
    let again = soon(client.lease_revoke(LeaseRevokeRequest { id: kept })).await.unwrap_err();
    assert_eq!(again.reason(), Reason::LeaseNotFound);
}

#[tokio::test]
async fn keep_alives_are_bounded_while_nothing_is_sent() {
    let etcd = TestEtcd::start();
    let (client, _driver) = try_open(&etcd.url()).await.unwrap();
    let alive = client.keep_alive();
    assert_eq!((0..100).filter(|_| alive.send(1)).count(), 64);
}

#[tokio::test]
async fn a_member_tells_its_state() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let status = soon(client.status()).await.unwrap();
    assert!(status.version.starts_with("3."), "{status:?}");
    assert!(status.db_size >= status.db_size_in_use && status.db_size_in_use > 0, "{status:?}");
    assert_eq!(status.leader, status.header.unwrap().member_id);
    assert!(status.raft_term > 0 && status.raft_index > 0 && status.errors.is_empty());
}

/// A connection is its driver: nothing runs beside it.
#[tokio::test]
async fn no_task_is_started() {
    let etcd = TestEtcd::start();
    let before = Handle::current().metrics().num_alive_tasks();
    let (client, mut driver) = try_open(&etcd.url()).await.unwrap();
    let (mut watch, mut alive) =
        (client.watch(vec![watches::from("s/", "s0", 0)]), client.keep_alive());
    assert!(alive.send(1));
    let calls = async {
        watch.next().await.unwrap();
        alive.next().await.unwrap();
        client.txn(write(put("s/a", "1"))).await.unwrap();
        watch.next().await.unwrap();
    };
    soon(driver.until(calls)).await;
    assert_eq!(Handle::current().metrics().num_alive_tasks(), before);
    // Without its driver, the connection is closed, and says so.
    let mut call = tokio_test::task::spawn(client.txn(write(put("s/a", "2"))));
    assert!(call.poll().is_pending());
    drop(driver);
    let errors: [WireError; 3] = [
        soon(call).await.unwrap_err(),
        soon(watch.next()).await.unwrap_err(),
        soon(alive.next()).await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.reason(), Reason::Disconnected, "{error}");
        assert!(error.is_connection() && !error.did_nothing(), "{error}");
    }
    assert!(soon(client.status()).await.unwrap_err().is_connection());
}

/// When all that use a connection are dropped, it closes by itself.
#[tokio::test]
async fn a_driver_ends_with_its_last_user() {
    let etcd = TestEtcd::start();
    let (client, mut driver) = try_open(&etcd.url()).await.unwrap();
    let mut watch = client.watch(vec![watches::from("s/", "s0", 0)]);
    soon(driver.until(watch.next())).await.unwrap();
    drop((client, watch));
    soon(driver).await;
}
