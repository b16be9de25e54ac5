//! Operators' calls on a Redis Cluster, where one shard keeps the overrides and they apply to all.

use std::collections::HashSet;
use std::time::Duration;

use tower_semaphore::operate::Cursor;
use tower_semaphore::{AcquireError, Policy, Semaphore};

use crate::conformance::Fleet;
use crate::operate;
use crate::support::cluster::{MASTERS, TestCluster};
use crate::support::stopwatch::Stopwatch;
use crate::support::{eventually, until};

/// The name under which the overrides are kept.
const KEPT: &str = "!overrides";

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(10)).build().unwrap()
}

/// A name on each master.
fn names(cluster: &TestCluster) -> Vec<String> {
    let home = |home| (0..).map(|i| format!("n{i}")).find(|name| cluster.home(name) == home);
    (0..MASTERS).map(|master| home(master).unwrap()).collect()
}

/// Returns the limit that a process applies; all permits must be in use.
async fn limit_seen(semaphore: &Semaphore, name: &str) -> Option<u32> {
    match semaphore.try_acquire(name, &policy(1)).await {
        Err(AcquireError::Rejected(rejected)) => Some(rejected.limit),
        _ => None,
    }
}

async fn all_listed(semaphore: &Semaphore) -> (HashSet<String>, usize) {
    let (mut names, mut away, mut from) = (HashSet::new(), 0, Some(Cursor::default()));
    while let Some(at) = from {
        let page = semaphore.list(at, 10).await.unwrap();
        names.extend(page.semaphores.iter().map(|one| one.name.as_str().to_owned()));
        away += page.away.len();
        from = page.next;
    }
    (names, away)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_reaches_every_shard() {
    let cluster = TestCluster::start();
    operate::everywhere(&|| cluster.semaphore(), &|| cluster.wipe()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_shard_that_keeps_it_dies_the_others_go_by_what_they_know() {
    let mut cluster = TestCluster::start();
    let keeper = cluster.home(KEPT);
    let names = names(&cluster);
    let mut elsewhere = names.clone();
    elsewhere.remove(keeper);
    let (operator, other) = (cluster.semaphore(), cluster.semaphore_of_least_rights());
    let mut held = Vec::new();
    for name in &elsewhere {
        operator.set_limit(&**name, 2).await.unwrap();
        for _ in 0..2 {
            held.push(other.acquire(&**name, &policy(1)).await.unwrap());
        }
    }
    cluster.nodes[keeper].kill();

    let began = Stopwatch::start();
    for name in &elsewhere {
        assert_eq!(limit_seen(&other, name).await, Some(2), "{name}");
    }
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    // A new process cannot know it, and is not kept from working.
    let newcomer = cluster.semaphore();
    eventually("the newcomer is answered", async || {
        limit_seen(&newcomer, &elsewhere[0]).await.is_some()
    })
    .await;
    println!("a newcomer was answered {:?} after the kill", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());

    until("a replica was promoted", || {
        let info: String = cluster.nodes[MASTERS + keeper].command(&["INFO", "replication"]);
        info.contains("role:master")
    });
    let promoted = Stopwatch::start();
    for name in &elsewhere {
        eventually("the newcomer knows it", async || limit_seen(&newcomer, name).await == Some(2))
            .await;
    }
    println!("the newcomer knew {:?} after the promotion", promoted.elapsed());
    eventually("it can be set again", async || operator.set_limit(&*elsewhere[0], 3).await.is_ok())
        .await;
    println!("it could be set {:?} after the promotion", promoted.elapsed());
    eventually("the others know it", async || {
        limit_seen(&other, &elsewhere[0]).await.is_none_or(|limit| limit == 3)
    })
    .await;
    println!("all went by it {:?} after the promotion", promoted.elapsed());
    assert!(promoted.elapsed() < Duration::from_secs(3), "{:?}", promoted.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_tells_which_shard_is_away_and_names_what_the_others_have() {
    let mut cluster = TestCluster::start();
    let names = names(&cluster);
    let semaphore = cluster.semaphore();
    let mut held = Vec::new();
    for name in &names {
        held.push(semaphore.acquire(&**name, &policy(1)).await.unwrap());
    }
    let all: HashSet<String> = names.iter().cloned().collect();
    assert_eq!(all_listed(&semaphore).await, (all.clone(), 0));
    // Not the shard that keeps the overrides, which is asked first. Its replica, too, so that the shard stays away.
    let dead = (cluster.home(KEPT) + 1) % MASTERS;
    cluster.nodes[MASTERS + dead].kill();
    cluster.nodes[dead].kill();
    let mut left = all;
    left.remove(&names[dead]);
    eventually("it is told", async || all_listed(&semaphore).await == (left.clone(), 1)).await;
}

/// Whether it was revoked cannot be asked, so it looks like a loss of data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_shard_lost_meanwhile_is_counted_again() {
    let mut cluster = TestCluster::start();
    let keeper = cluster.home(KEPT);
    let home = (keeper + 1) % MASTERS;
    let name = names(&cluster).swap_remove(home);
    let semaphore = cluster.semaphore();
    let policy = Policy::builder(1).lease(Duration::from_secs(2)).build().unwrap();
    let held = semaphore.acquire(&*name, &policy).await.unwrap();
    cluster.nodes[MASTERS + keeper].kill();
    cluster.nodes[keeper].kill();
    let gone: u64 = cluster.nodes[home].command(&["DEL", &format!("semaphore:{{{name}}}")]);
    assert_eq!(gone, 1);
    eventually("it is there again", async || {
        semaphore.inspect(&*name).await.is_ok_and(|seen| seen.in_use == 1)
    })
    .await;
    assert!(!held.is_lost());
}

/// Its source has what operators set, its target the pauses, and neither serves both keys in one call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_paused_is_known_while_its_slot_moves() {
    let cluster = TestCluster::start();
    let names = names(&cluster);
    let (operator, other) = (cluster.semaphore(), cluster.semaphore_of_least_rights());
    operator.set_limit(&*names[0], 2).await.unwrap();
    drop(other.acquire(&*names[1], &policy(1)).await.unwrap());
    let (from, slot) = (cluster.home(KEPT), cluster.slot(KEPT));
    cluster.begin_to_move(slot, from, (from + 1) % MASTERS);
    operator.pause_for(&*names[1], Duration::from_secs(30)).await.unwrap();
    let late = cluster.semaphore();
    for node in [&operator, &other, &late] {
        eventually("it is known", async || {
            node.inspect(&*names[1]).await.is_ok_and(|seen| seen.paused.is_some())
        })
        .await;
        assert_eq!(node.limit_of(&*names[0]).await.unwrap().limit, Some(2));
    }
    operator.resume(&*names[1]).await.unwrap();
    eventually("it is resumed", async || {
        other.inspect(&*names[1]).await.is_ok_and(|seen| seen.paused.is_none())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_set_moves_along_with_its_slot() {
    let cluster = TestCluster::start();
    let names = names(&cluster);
    let (operator, other) = (cluster.semaphore(), cluster.semaphore_of_least_rights());
    let mut held = Vec::new();
    for name in &names {
        operator.set_limit(&**name, 1).await.unwrap();
        held.push(other.acquire(&**name, &policy(1)).await.unwrap());
    }
    let (from, slot) = (cluster.home(KEPT), cluster.slot(KEPT));
    let to = (from + 1) % MASTERS;
    cluster.begin_to_move(slot, from, to);
    cluster.migrate(slot, from, to);
    // During the move: calls are redirected to the target.
    operator.set_limit(&*names[0], 2).await.unwrap();
    held.push(other.acquire(&*names[0], &policy(1)).await.unwrap());
    let id = cluster.id(to);
    (0..MASTERS).for_each(|node| cluster.set_slot(slot, (to + node) % MASTERS, &["NODE", &id]));
    // After the move.
    let moved = Stopwatch::start();
    operator.set_limit(&*names[1], 2).await.unwrap();
    held.push(other.acquire(&*names[1], &policy(1)).await.unwrap());
    println!("in force {:?} after the slot had moved", moved.elapsed());
    assert!(moved.elapsed() < Duration::from_secs(2), "{:?}", moved.elapsed());
    assert_eq!(limit_seen(&other, &names[2]).await, Some(1));
    // A newcomer applies it from its first call on, on any shard.
    for (name, limit) in names.iter().zip([2, 2, 1]) {
        assert_eq!(limit_seen(&cluster.semaphore(), name).await, Some(limit), "{name}");
    }
}
