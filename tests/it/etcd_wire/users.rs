//! Users, passwords and rights.

use tower_semaphore::backend::etcd_wire::{Reason, WatchMessage};

use super::watches::from;
use super::{Connection, open, put, range, read, soon, try_open, write};
use crate::support::etcd::TestEtcd;

const ROOT: &str = "--user=root:rootpw";

const PASSWORDS_CHECKED: &str = "grpc_server_started_total{grpc_method=\"Authenticate\",grpc_service=\"etcdserverpb.Auth\",grpc_type=\"unary\"}";

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
    let answers = soon(futures_util::future::join_all(calls)).await;
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
