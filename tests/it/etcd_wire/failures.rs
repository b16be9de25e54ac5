//! What a call says when it fails.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;
use tower_semaphore::backend::etcd_wire::{Reason, WatchMessage};

use super::watches::from;
use super::{SOON, key, open, put, range, read, soon, try_open, write};
use crate::support::etcd::{EtcdCluster, TestEtcd};
use crate::support::eventually;
use crate::support::ports::free_port;

#[tokio::test]
async fn what_is_refused_was_not_carried_out() {
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    // etcd itself refuses the first, and its gRPC library the second.
    for (bytes, text) in [(1_600_000, "request is too large"), (3_000_000, "larger than max")] {
        let large = write(put("s/a", &"x".repeat(bytes)));
        let error = soon(client.txn(large)).await.unwrap_err();
        assert_eq!(error.reason(), Reason::TooLarge, "{error}");
        assert!(error.did_nothing() && !error.is_connection(), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    let mut twice = write(put("s/a", "1"));
    twice.success.push(put("s/a", "2").into());
    let error = soon(client.txn(twice)).await.unwrap_err();
    assert!(error.did_nothing() && !error.is_connection(), "{error}");
    assert!(error.to_string().contains("duplicate key"), "{error}");
    assert_eq!(read(&client, "s/a").await, None);
}

/// A request that was let in before the quota was reached may be carried out and refused nevertheless.
#[tokio::test]
async fn a_full_database_leaves_the_outcome_open() {
    let mut rounds = 0..10;
    while !is_carried_out_and_refused().await {
        rounds.next().expect("one of very many is carried out");
    }
}

/// Fills a database. Returns whether a request was carried out that was refused.
async fn is_carried_out_and_refused() -> bool {
    let etcd = TestEtcd::start_with(&["--quota-backend-bytes=1000000"]);
    let client = open(&etcd.url()).await;
    let large = "x".repeat(100_000);
    let mut found = false;
    // The size that the quota is compared with is as of the last commit of the database: ten a second.
    for batch in 0.. {
        assert!(batch < 500, "the quota holds");
        let names: Vec<_> = (0..8).map(|n| format!("s/{batch}/{n}")).collect();
        let calls = names.iter().map(|name| client.txn(write(put(name, &large))));
        let answers = soon(join_all(calls)).await;
        let mut refused = 0;
        for (name, answer) in names.iter().zip(answers) {
            let Err(error) = answer else { continue };
            assert_eq!(error.reason(), Reason::NoSpace, "{error}");
            assert!(!error.did_nothing() && !error.is_connection(), "{error}");
            refused += 1;
            found |= read(&client, name).await.is_some();
        }
        if refused == names.len() {
            break;
        }
    }
    eventually("the alarm is told", async || {
        let status = soon(client.status()).await.unwrap();
        status.errors.iter().any(|error| error.contains("NOSPACE"))
    })
    .await;
    found
}

#[tokio::test]
async fn nobody_at_the_port_is_told_with_the_address() {
    let address = format!("127.0.0.1:{}", free_port());
    let error = try_open(&format!("etcd://{address}")).await.unwrap_err();
    let text = error.to_string();
    assert!(error.is_connection());
    assert!(text.starts_with(&format!("etcd at {address} could not be reached: ")), "{text}");
    assert!(text.ends_with("; check that it listens on this port"), "{text}");
}

#[tokio::test]
async fn a_member_that_dies_takes_its_connections_with_it() {
    let mut etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    soon(watch.next()).await.unwrap();
    let mut alive = client.keep_alive();
    assert!(alive.send(1));
    soon(alive.next()).await.unwrap();
    etcd.freeze();
    let call = client.txn(write(put("s/a", "1")));
    let (call, ()) = tokio::join!(soon(call), async { etcd.kill() });
    for error in [
        call.unwrap_err(),
        soon(watch.next()).await.unwrap_err(),
        soon(watch.next()).await.unwrap_err(),
        soon(alive.next()).await.unwrap_err(),
        soon(client.status()).await.unwrap_err(),
    ] {
        assert_eq!(error.reason(), Reason::Disconnected, "{error}");
        assert!(error.is_connection() && !error.did_nothing(), "{error}");
    }
    etcd.restart();
    assert!(open(&etcd.url()).await.range(range("s/a")).await.is_ok());
}

#[tokio::test]
async fn a_call_to_a_frozen_member_can_be_abandoned() {
    const SHORT: Duration = Duration::from_millis(100);
    let etcd = TestEtcd::start();
    let client = open(&etcd.url()).await;
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    soon(watch.next()).await.unwrap();
    etcd.freeze();
    assert!(timeout(SHORT, client.txn(write(put("s/a", "1")))).await.is_err());
    watch.progress();
    assert!(timeout(SHORT, watch.next()).await.is_err());
    // The port still takes connections.
    let url = super::Url::parse(&etcd.url().replace("://", "://u:p@")).unwrap();
    let settings = super::Settings::new(&url, SHORT).unwrap();
    let error = super::Client::open(&url.endpoints[0], &settings).await.unwrap_err();
    assert!(error.to_string().contains("could not be reached in time"), "{error}");
    etcd.thaw();
    // Nothing was lost but the answer.
    assert!(soon(client.txn(write(put("s/b", "2")))).await.unwrap().succeeded);
    let mut has_progress = false;
    while !has_progress {
        has_progress = matches!(soon(watch.next()).await.unwrap(), WatchMessage::Progress { .. });
    }
}

#[tokio::test]
async fn another_member_serves_when_the_leader_dies() {
    let mut cluster = EtcdCluster::start();
    let leader = cluster.leader();
    let (client, other) = (
        open(&cluster.members[leader].url()).await,
        open(&cluster.members[(leader + 1) % 3].url()).await,
    );
    soon(other.txn(write(put("s/a", "1")))).await.unwrap();
    assert_eq!(read(&client, "s/a").await.unwrap().value, key("1"));
    cluster.members[leader].kill();
    let error = soon(client.range(range("s/a"))).await.unwrap_err();
    assert!(error.is_connection(), "{error}");
    // Elections take a moment; until then, every error says that the member has no leader, or that it is gone.
    eventually("a new leader serves", async || {
        match timeout(Duration::from_secs(1), other.txn(write(put("s/a", "2")))).await {
            Ok(Ok(response)) => response.succeeded,
            Ok(Err(error)) => {
                let reasons = [Reason::NoLeader, Reason::LeaderChanged, Reason::TimedOut];
                assert!(reasons.contains(&error.reason()), "{error}");
                false
            }
            Err(_) => false,
        }
    })
    .await;
    cluster.members[leader].restart();
    let again = open(&cluster.members[leader].url()).await;
    eventually("it is back", async || {
        let found = timeout(Duration::from_secs(1), again.range(range("s/a"))).await;
        found.is_ok_and(|found| found.is_ok_and(|found| found.kvs[0].value == key("2")))
    })
    .await;
}

#[tokio::test]
async fn without_a_quorum_calls_are_refused_and_streams_end() {
    let cluster = EtcdCluster::start();
    let leader = cluster.leader();
    let left = &cluster.members[(leader + 1) % 3];
    let client = open(&left.url()).await;
    let mut watch = client.watch(vec![from("s/", "s0", 0)]);
    soon(watch.next()).await.unwrap();
    cluster.members[leader].freeze();
    cluster.members[(leader + 2) % 3].freeze();
    let ended = soon(watch.next()).await.unwrap_err();
    assert_eq!(ended.reason(), Reason::NoLeader, "{ended}");
    let refused = soon(client.txn(write(put("s/a", "1")))).await.unwrap_err();
    assert_eq!(refused.reason(), Reason::NoLeader, "{refused}");
    assert!(refused.did_nothing() && refused.is_connection(), "{refused}");
    for member in &cluster.members {
        member.thaw();
    }
    let served = async {
        while client.txn(write(put("s/a", "2"))).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, served).await.expect("it serves again");
}

#[tokio::test]
async fn a_port_that_speaks_another_protocol_is_told() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serve = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let answer = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n";
        tokio::io::AsyncWriteExt::write_all(&mut stream, answer).await.unwrap();
        stream
    };
    let asks = async {
        let client = open(&format!("etcd://{address}")).await;
        client.status().await.unwrap_err()
    };
    let (_stream, error) = soon(async { tokio::join!(serve, asks) }).await;
    assert!(error.is_connection(), "{error}");
}
