//! What is so with etcd alone. The promises that all backends make are in `conformance.rs` and its siblings.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::join_all;
use tower_semaphore::backend::EtcdBackend;
use tower_semaphore::operate::Cursor;
use tower_semaphore::{AcquireError, OnUnavailable, Policy, Semaphore};

use crate::etcd_wire::{open, put, write};
use crate::support::etcd::TestEtcd;
use crate::support::semaphore::rejection;
use crate::support::{eventually, eventually_or};

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(10)).build().unwrap()
}

fn lease(seconds: u64) -> Policy {
    Policy::builder(1).lease(Duration::from_secs(seconds)).build().unwrap()
}

/// The keys that begin with this, after the prefix.
fn keys(etcd: &TestEtcd, folder: &str) -> Vec<String> {
    let prefix = format!("semaphore/{folder}");
    let listed = etcd.ctl(&["get", "--prefix", "--keys-only", &prefix]);
    listed.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// A process that holds a permit of each name dies: everything in it stops at once.
fn die_holding_each(semaphore: Semaphore, names: Vec<String>, policy: Policy) {
    let dies = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for name in names {
                std::mem::forget(semaphore.acquire(name, &policy).await.unwrap());
            }
        });
        runtime.shutdown_background();
        std::mem::forget(semaphore);
    });
    dies.join().unwrap();
}

#[tokio::test]
async fn a_process_that_shuts_down_leaves_no_key() {
    let etcd = TestEtcd::start();
    let semaphore = etcd.semaphore();
    let permits =
        [semaphore.acquire("x", &policy(2)).await, semaphore.acquire("y", &lease(7)).await];
    assert_eq!(keys(&etcd, "s/"), ["semaphore/s/x/L", "semaphore/s/y/L"]);
    assert_eq!(keys(&etcd, "n/").len(), 3, "the shortest lease, the default, and 7 s");
    drop(permits);
    semaphore.shutdown().await;
    assert_eq!(keys(&etcd, ""), [""; 0]);
}

#[tokio::test]
async fn a_rate_that_nobody_uses_any_more_leaves_no_key() {
    let etcd = TestEtcd::start();
    let semaphore = etcd.semaphore();
    let policy = Policy::builder(5).rate(5, Duration::from_secs(1)).build().unwrap();
    drop(semaphore.acquire("x", &policy).await.unwrap());
    assert_eq!(keys(&etcd, "s/").len(), 1, "it counts for a second");
    eventually("it is removed", async || keys(&etcd, "s/").is_empty()).await;
}

#[tokio::test]
async fn a_fleet_that_died_as_a_whole_is_forgotten_by_the_next_process() {
    let etcd = TestEtcd::start();
    let short = Policy::builder(1).lease(Duration::from_secs(1)).build().unwrap();
    let names: Vec<_> = (0..40).map(|n| format!("n{n:02}")).collect();
    for some in names.chunks(20) {
        die_holding_each(etcd.semaphore(), some.to_vec(), short.clone());
    }
    eventually("their leases end", async || keys(&etcd, "n/").is_empty()).await;
    assert_eq!(keys(&etcd, "s/").len(), 40);
    // It uses none of these names.
    let next = etcd.semaphore();
    let held = next.acquire("other", &policy(1)).await.unwrap();
    eventually("they are forgotten", async || keys(&etcd, "s/") == ["semaphore/s/other/L"]).await;
    drop(held);
}

#[tokio::test]
async fn a_lease_is_rounded_up_and_outlived() {
    let etcd = TestEtcd::start();
    let (one, other) = (etcd.semaphore(), etcd.semaphore());
    let short = Policy::builder(1).lease(Policy::MIN_LEASE).build().unwrap();
    let held = one.acquire("x", &short).await.unwrap();
    let began = Instant::now();
    eventually("three leases pass", async || began.elapsed() > Duration::from_secs(3)).await;
    assert!(!held.is_lost());
    rejection(other.try_acquire("x", &short).await);
}

#[tokio::test]
async fn more_lengths_of_leases_than_there_may_be_are_refused() {
    let etcd = TestEtcd::start();
    let semaphore = etcd.semaphore();
    // One, the shortest, is always there.
    for seconds in 2..=16 {
        drop(semaphore.acquire("x", &lease(seconds)).await.unwrap());
    }
    let refused = semaphore.acquire("x", &lease(17)).await;
    let Err(AcquireError::Unavailable(error)) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("lease is 17 s, and 16 other lengths"), "{error}");
    drop(semaphore.acquire("x", &lease(9)).await.unwrap());
}

#[tokio::test]
async fn a_value_of_a_later_version_stops_its_name_alone() {
    let etcd = TestEtcd::start();
    let semaphore = etcd.semaphore();
    let version = "\u{2}\u{2}later";
    etcd.ctl(&["put", "semaphore/s/x/L", version]);
    let refused = semaphore.acquire("x", &policy(1)).await;
    let Err(AcquireError::Unavailable(error)) = refused else { panic!("{refused:?}") };
    let said = "semaphore x in etcd cannot be used: version of a semaphore is 2";
    assert!(error.to_string().contains(said), "{error}");
    let error = semaphore.inspect("x").await.unwrap_err();
    assert!(error.to_string().contains(said), "{error}");
    drop(semaphore.acquire("y", &policy(1)).await.unwrap());
    assert!(etcd.ctl(&["get", "semaphore/s/x/L"]).contains(version), "it is left alone");
    // As soon as it is gone, the name is of use again.
    etcd.ctl(&["del", "semaphore/s/x/L"]);
    eventually_or("it can be used", async || semaphore.acquire("x", &policy(1)).await.map(drop))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_restarts_forgets_nothing() {
    let mut etcd = TestEtcd::start();
    let (one, other) = (etcd.semaphore(), etcd.semaphore());
    let held = one.acquire("x", &policy(1)).await.unwrap();
    etcd.kill();
    let outage = async || {
        matches!(other.try_acquire("x", &policy(1)).await, Err(AcquireError::Unavailable(_)))
    };
    eventually("it is an outage", outage).await;
    tokio::task::block_in_place(|| etcd.restart());
    let refused =
        async || matches!(other.try_acquire("x", &policy(1)).await, Err(AcquireError::Rejected(_)));
    eventually("it is over", refused).await;
    assert!(!held.is_lost());
    drop(held);
    eventually("it is free", async || other.try_acquire("x", &policy(1)).await.is_ok()).await;
}

#[tokio::test]
async fn changes_of_many_names_are_written_together() {
    let etcd = TestEtcd::start();
    let (semaphore, names) = (etcd.semaphore(), 0..200);
    drop(semaphore.acquire("x", &policy(1)).await.unwrap());
    let set = |n: u32| Box::pin(semaphore.set_limit(format!("n{n}"), n));
    let mut changes: Vec<_> = names.map(set).collect();
    // All are asked for, and the one that writes for the others leaves.
    for change in &mut changes {
        assert!(change.now_or_never().is_none());
    }
    drop(changes.remove(0));
    for result in join_all(changes).await {
        result.unwrap();
    }
    let overrides = semaphore.overrides().await.unwrap();
    assert!(overrides.len() >= 199, "{overrides:?}");
    let fields = etcd.ctl(&["get", "semaphore/o", "-w", "fields"]);
    let version = fields.lines().find_map(|line| line.strip_prefix("\"Version\" : ")).unwrap();
    assert!(version.parse::<u32>().unwrap() <= 4, "{version} writes");
}

#[tokio::test]
async fn a_full_database_is_an_outage() {
    let etcd = TestEtcd::start_with(&["--quota-backend-bytes=2000000"]);
    let semaphore = etcd.semaphore();
    drop(semaphore.acquire("x", &policy(1)).await.unwrap());
    let big = "x".repeat(100_000);
    eventually("it is full", async || !etcd.try_ctl(&["put", "big", &big])).await;
    let refuse = Policy::builder(1).build().unwrap();
    let why = async || match semaphore.try_acquire("x", &refuse).await {
        Err(AcquireError::Unavailable(error)) if error.to_string().contains("space") => Ok(()),
        other => Err(other.map(drop)),
    };
    eventually_or("it is an outage", why).await;
    let admit = Policy::builder(1).on_unavailable(OnUnavailable::Admit).build().unwrap();
    drop(semaphore.acquire("x", &admit).await.unwrap());
    etcd.ctl(&["del", "big"]);
    let status = etcd.ctl(&["endpoint", "status", "-w", "fields"]);
    let revision = status.lines().find_map(|line| line.strip_prefix("\"Revision\" : "));
    etcd.ctl(&["compact", revision.unwrap()]);
    etcd.ctl(&["defrag"]);
    etcd.ctl(&["alarm", "disarm"]);
    eventually("it is over", async || semaphore.try_acquire("x", &refuse).await.is_ok()).await;
}

#[tokio::test]
async fn a_process_that_writes_nothing_learns_that_the_database_is_full() {
    let etcd = TestEtcd::start_with(&["--quota-backend-bytes=2000000"]);
    let semaphore = etcd.semaphore();
    let _held = semaphore.acquire("x", &policy(1)).await.unwrap();
    assert_eq!(semaphore.health().warning, None);
    let (client, big) = (open(&etcd.url()).await, "x".repeat(1_000_000));
    eventually("it is full", async || client.txn(write(put("big", &big))).await.is_err()).await;
    let warned = async || {
        let warning = semaphore.health().warning;
        if warning.as_ref().is_some_and(|text| text.contains("no space left")) {
            return Ok(());
        }
        Err(warning)
    };
    eventually_or("it is said", warned).await;
}

#[tokio::test]
async fn values_that_are_as_large_as_etcd_accepts_stop_no_search() {
    let etcd = TestEtcd::start();
    let (client, big) = (open(&etcd.url()).await, "x".repeat(1_400_000));
    for n in 0..20 {
        let large = put(&format!("semaphore/s/{n}/L"), &big);
        client.txn(write(large)).await.unwrap();
    }
    die_holding_each(etcd.semaphore(), vec!["z".to_owned()], lease(1));
    let other = etcd.semaphore();
    let _held = other.acquire("other", &policy(1)).await.unwrap();
    eventually("it is forgotten", async || !keys(&etcd, "s/").contains(&"semaphore/s/z/L".into()))
        .await;
}

#[tokio::test]
async fn all_names_are_listed_page_by_page() {
    let etcd = TestEtcd::start();
    let semaphore = etcd.semaphore();
    let mut held = Vec::new();
    for n in 0..25 {
        held.push(semaphore.acquire(format!("a/{n:02}"), &policy(1)).await.unwrap());
    }
    let (mut listed, mut from) = (Vec::new(), Some(Cursor::default()));
    while let Some(cursor) = from {
        // As an operator's page passes it on.
        let cursor = cursor.to_string().parse().unwrap();
        let page = semaphore.list(cursor, 10).await.unwrap();
        assert!(page.semaphores.len() <= 10);
        listed.extend(page.semaphores.iter().map(|listed| listed.name.to_string()));
        from = page.next;
    }
    listed.sort_unstable();
    assert_eq!(listed, (0..25).map(|n| format!("a%2F{n:02}")).collect::<Vec<_>>());
    let error = semaphore.list("0-7".parse().unwrap(), 10).await.unwrap_err();
    assert!(error.to_string().contains("position \"7\""), "{error}");
}

#[tokio::test]
async fn prefixes_are_apart() {
    let etcd = TestEtcd::start();
    let url = etcd.url();
    let of = |url: &str| Semaphore::new(EtcdBackend::builder(url).build().unwrap());
    let [one, other] = [of(&format!("{url}/a")), of(&format!("{url}/a-b"))];
    let held = one.acquire("x", &policy(1)).await.unwrap();
    drop(other.try_acquire("x", &policy(1)).await.unwrap());
    rejection(of(&format!("{url}/a")).try_acquire("x", &policy(1)).await);
    drop(held);
    let error = EtcdBackend::builder(&url).prefix("a/b").build().unwrap_err().to_string();
    assert!(error.contains("prefix is \"a/b\"; expected 1 to 40"), "{error}");
    let error = EtcdBackend::builder(url).connect_timeout(Duration::ZERO).build().unwrap_err();
    assert_eq!(error.to_string(), "connect timeout is 0; expected more than 0");
}

#[tokio::test]
async fn renewals_of_what_is_held_are_one_keepalive_for_each_length() {
    let etcd = TestEtcd::start();
    let semaphore = etcd.semaphore();
    let mut held = Vec::new();
    for name in 0..300 {
        held.push(semaphore.acquire(format!("n{name}"), &lease(2)).await.unwrap());
    }
    let counts = || {
        let of = |name| etcd.metric(&format!("etcd_{name}"));
        let names = ["debugging_lease_renewed_total", "server_proposals_committed_total"];
        (names.map(of), of("debugging_mvcc_range_total"))
    };
    let ([renewed, proposed], read) = counts();
    eventually("leases are renewed", async || counts().0[0] > renewed + 15.0).await;
    let ([renewed_then, proposed_then], read_then) = counts();
    assert_eq!(proposed, proposed_then, "nothing goes through the log");
    // A reading proves each keepalive; the overrides, and the signs of life, are read now and then.
    let beside = read_then - read - (renewed_then - renewed);
    assert!(beside < 30.0, "{beside} readings, of 300 names");
    assert!(held.iter().all(|permit| !permit.is_lost()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_queue_is_written_at_a_pace() {
    let etcd = TestEtcd::start();
    let [one, other] = [etcd.semaphore(), etcd.semaphore()];
    let held = one.acquire("x", &policy(1)).await.unwrap();
    let waiting: Vec<_> = (0..4000).map(|_| tokio::spawn(one.acquire("x", &policy(1)))).collect();
    eventually("all wait", async || one.inspect("x").await.unwrap().waiting == 4000).await;
    let size = || etcd.metric("etcd_debugging_mvcc_total_put_size_in_bytes");
    let (before, began) = (size(), Instant::now());
    let briefly = Policy::builder(1).wait_timeout(Duration::from_millis(1)).build().unwrap();
    let mut joined = 0;
    while size() - before < 2_000_000.0 {
        let all = (0..16).map(|_| other.acquire("x", &briefly));
        joined += join_all(all).await.len();
        assert!(joined < 100_000 && began.elapsed() < Duration::from_secs(30));
    }
    let (bytes, took) = (size() - before, began.elapsed());
    // One process renews its places, the other one writes: 4 MB a second.
    assert!(bytes < 4_400_000.0 * took.as_secs_f64() + 200_000.0, "{bytes} bytes in {took:?}");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    drop(held);
}
