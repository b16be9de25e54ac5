//! Users, passwords and rights.

use std::time::Duration;

use futures_util::future::join_all;
use tower_semaphore::backend::etcd_wire::{Reason, WatchMessage};
use tower_semaphore::{Policy, Semaphore};

use super::watches::from;
use super::{Connection, open, put, range, read, soon, try_open, write};
use crate::support::etcd::TestEtcd;
use crate::support::faulty_proxy::Proxy as FaultyProxy;
use crate::support::{eventually, eventually_or};

const ROOT: &str = "--user=root:rootpw";

const PASSWORDS_CHECKED: &str = "grpc_server_started_total{grpc_method=\"Authenticate\",grpc_service=\"etcdserverpb.Auth\",grpc_type=\"unary\"}";

const STATUS_ASKED: &str = "grpc_server_started_total{grpc_method=\"Status\",grpc_service=\"etcdserverpb.Maintenance\",grpc_type=\"unary\"}";

/// With a user `app` that has rights below `s/`, and one that has none.
fn with_users(etcd: &TestEtcd) {
    for words in [
        &["user", "add", "root:rootpw"][..],
        &["user", "grant-role", "root", "root"],
        &["role", "add", "shop"],
        &["role", "grant-permission", "shop", "--prefix=true", "readwrite", "s/"],
        &["user", "add", "app:hunt@er2"],
        &["user", "grant-role", "app", "shop"],
        &["user", "add", "nobody:hunter2"],
    ] {
        etcd.ctl(words);
    }
    etcd.ctl(&["auth", "enable"]);
}

fn url(etcd: &TestEtcd, who: &str) -> String {
    etcd.url().replace("://", &format!("://{who}@"))
}

/// Ends all tokens.
fn end_tokens(etcd: &TestEtcd) {
    etcd.ctl(&[ROOT, "auth", "disable"]);
    etcd.ctl(&["auth", "enable"]);
}

async fn writes(client: &Connection, value: &str) {
    soon(client.txn(write(put("s/a", value)))).await.unwrap();
    assert_eq!(&*read(client, "s/a").await.unwrap().value, value.as_bytes());
}

#[tokio::test]
async fn a_user_with_rights_is_served() {
    let etcd = TestEtcd::start();
    with_users(&etcd);
    let client = open(&url(&etcd, "app:hunt%40er2")).await;
    let mut watch = client.watch(vec![from("s/", "s0", 0), from("o", "", 0)]);
    let message = soon(watch.next()).await.unwrap();
    assert!(matches!(message, WatchMessage::Created { range: 0, .. }), "{message:?}");
    // Outside of its rights.
    let message = soon(watch.next()).await.unwrap();
    let WatchMessage::Canceled { range: 1, error, .. } = message else { panic!("{message:?}") };
    assert_eq!(error.reason(), Reason::PermissionDenied, "{error}");
    writes(&client, "1").await;
    let message = soon(watch.next()).await.unwrap();
    assert!(matches!(message, WatchMessage::Events { range: 0, .. }), "{message:?}");
    let grant = super::LeaseGrantRequest { ttl: 1, id: 0 };
    assert!(soon(client.lease_grant(grant)).await.is_ok());
    assert!(soon(client.status()).await.is_ok());
}

#[tokio::test]
async fn a_wrong_password_is_told_and_not_shown() {
    let etcd = TestEtcd::start();
    with_users(&etcd);
    let error = try_open(&url(&etcd, "app:wrongpw")).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(error.is_connection() && text.contains("authentication failed"), "{text}");
    let whom = format!("etcd at {} could not be used: ", etcd.address());
    assert!(error.to_string().starts_with(&whom), "{error}");
    assert!(error.to_string().ends_with("; check user and password in the URL"), "{error}");
    assert!(!text.contains("wrongpw"), "{text}");
}

#[tokio::test]
async fn nobody_without_rights_or_without_a_name_is_served() {
    let etcd = TestEtcd::start();
    with_users(&etcd);
    let nobody = open(&url(&etcd, "nobody:hunter2")).await;
    let error = soon(nobody.txn(write(put("s/a", "1")))).await.unwrap_err();
    assert_eq!(error.reason(), Reason::PermissionDenied, "{error}");
    assert!(error.did_nothing() && !error.is_connection(), "{error}");
    let unnamed = open(&etcd.url()).await;
    let error = soon(unnamed.range(range("s/a"))).await.unwrap_err();
    assert_eq!(error.reason(), Reason::NotAuthenticated, "{error}");
    assert!(error.did_nothing() && error.is_connection(), "{error}");
}

#[tokio::test]
async fn a_token_that_ended_is_renewed_once_for_all() {
    let etcd = TestEtcd::start();
    with_users(&etcd);
    let client = open(&url(&etcd, "app:hunt%40er2")).await;
    writes(&client, "1").await;
    end_tokens(&etcd);
    // A watch asks for no token itself.
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    let message = soon(watch.next()).await.unwrap();
    let WatchMessage::Canceled { error, .. } = message else { panic!("{message:?}") };
    assert_eq!(error.reason(), Reason::InvalidToken, "{error}");
    let checked = || etcd.metric(PASSWORDS_CHECKED);
    let before = checked();
    let calls = (0..8).map(|_| client.range(range("s/a")));
    let answers = soon(join_all(calls)).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(checked() - before, 1.0);
    writes(&client, "2").await;
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    let message = soon(watch.next()).await.unwrap();
    assert!(matches!(message, WatchMessage::Created { .. }), "{message:?}");
    // Where none is to be had any more, that is told.
    etcd.ctl(&[ROOT, "user", "delete", "app"]);
    let error = soon(client.range(range("s/a"))).await.unwrap_err();
    assert_eq!(error.reason(), Reason::NotAuthenticated, "{error}");
    assert!(error.did_nothing() && error.is_connection(), "{error}");
}

#[tokio::test]
async fn users_may_be_enabled_later() {
    let etcd = TestEtcd::start();
    let client = open(&url(&etcd, "app:hunt%40er2")).await;
    writes(&client, "1").await;
    with_users(&etcd);
    writes(&client, "2").await;
}

/// A check of a password takes etcd a tenth of a second, and it makes one after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_that_connects_at_once_is_let_in() {
    const FLEET: u8 = 40;
    let etcd = TestEtcd::start();
    with_users(&etcd);
    let proxy = FaultyProxy::start(etcd.client_port()).await;
    let before = etcd.metric(PASSWORDS_CHECKED);
    let url = format!("etcd://app:hunt%40er2@{}/s", proxy.address());
    let fleet: Vec<_> = (0..FLEET).map(|_| Semaphore::etcd(url.as_str()).unwrap()).collect();
    let policy = Policy::builder(100).wait_timeout(Duration::from_secs(30)).build().unwrap();
    let served = async || {
        let acquires = fleet.iter().map(|process| process.acquire("x", &policy));
        let refused: Vec<_> =
            join_all(acquires).await.into_iter().filter_map(Result::err).collect();
        if refused.is_empty() { Ok(()) } else { Err(refused) }
    };
    eventually_or("all are served", &served).await;
    assert_eq!(etcd.metric(PASSWORDS_CHECKED) - before, f64::from(FLEET));
    // Nor is any checked when they come again.
    proxy.cut();
    eventually_or("all are served again", &served).await;
    assert_eq!(etcd.metric(PASSWORDS_CHECKED) - before, f64::from(FLEET));
}

#[tokio::test]
async fn a_wrong_password_is_not_checked_again_and_again() {
    let etcd = TestEtcd::start();
    with_users(&etcd);
    let before = etcd.metric(PASSWORDS_CHECKED);
    let process = Semaphore::etcd(&format!("{}/s", url(&etcd, "app:wrong"))).unwrap();
    let policy = Policy::builder(1).build().unwrap();
    let Err(error) = process.acquire("x", &policy).await else { panic!("it was let in") };
    assert!(format!("{error:?}").contains("authentication failed"), "{error:?}");
    eventually("it has come often", async || etcd.metric(STATUS_ASKED) >= 12.0).await;
    assert!(etcd.metric(PASSWORDS_CHECKED) - before <= 2.0);
}
