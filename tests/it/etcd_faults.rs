//! Faults of etcd under load: three members and six processes, while one observer watches everything that is stored.
//!
//! Two things judge each run. A counter at the upstream, in this process, has the permits in use. The history of the
//! values has everything else: see [`judge`].

mod history;
mod judge;
mod links;
mod load;
mod observer;
mod planted;
mod rebuilt;
mod world;

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::block_in_place;
use tokio::time::sleep;
use tower_semaphore::ConnectionState;

use self::load::{KEPT, limit};
use self::world::{PROCESSES, World};
use crate::support::etcd::EtcdCluster;
use crate::support::eventually;
use crate::support::faulty_proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_is_killed() {
    let mut world = World::start().await;
    for _ in 0..2 {
        let leader = world.leader_beside(None);
        world.cluster.members[leader].kill();
        world.leader_beside(leader);
        world.serves_all().await;
        block_in_place(|| world.cluster.members[leader].restart());
        block_in_place(|| world.cluster.wait_until_whole());
        world.serves_all().await;
    }
    world.finish("leader killed twice").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_is_frozen() {
    let world = World::start().await;
    let leader = world.leader_beside(None);
    world.cluster.members[leader].freeze();
    world.leader_beside(leader);
    world.serves_all().await;
    // Longer than its leases, and than the timeout of every request that it still has.
    sleep(Duration::from_secs(2)).await;
    world.serves_all().await;
    world.cluster.members[leader].thaw();
    block_in_place(|| world.cluster.wait_until_whole());
    world.serves_all().await;
    world.finish("leader frozen").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_is_moved() {
    let world = World::start().await;
    for _ in 0..2 {
        let leader = world.leader_beside(None);
        let next = (leader + 1) % 3;
        let id = block_in_place(|| world.cluster.members[next].id());
        world.ctl(leader, &["move-leader", &id]);
        assert_ne!(world.leader_beside(leader), leader);
        world.serves_all().await;
    }
    world.finish("leader moved twice").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_is_killed() {
    let mut world = World::start().await;
    let follower = world.used_follower();
    world.cluster.members[follower].kill();
    world.serves_all().await;
    block_in_place(|| world.cluster.members[follower].restart());
    block_in_place(|| world.cluster.wait_until_whole());
    world.serves_all().await;
    world.finish("follower killed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_is_lost_and_comes_back() {
    let world = World::start().await;
    let leader = world.leader_beside(None);
    let frozen = [leader, (leader + 1) % 3];
    frozen.iter().for_each(|at| world.cluster.members[*at].freeze());
    eventually("all processes know", async || {
        let is_down = |state| matches!(state, ConnectionState::Down { .. });
        world.nodes.iter().all(|node| is_down(node.health().connection))
    })
    .await;
    // Longer than a lease: no lease ends at etcd meanwhile.
    sleep(Duration::from_secs(1)).await;
    frozen.iter().for_each(|at| world.cluster.members[*at].thaw());
    let thawed = Instant::now();
    world.serves_all().await;
    println!("two of three frozen: all are served {:?} after they are back", thawed.elapsed());
    block_in_place(|| world.cluster.wait_until_whole());
    let (experience, _) = world.finish("two of three frozen").await;
    assert!(experience.unavailable > 0);
    assert!(experience.names.values().all(|of| of.longest_gap > Duration::from_secs(1)));
}

/// One process connects anew all the time, over a slow link, so that what its watches are to begin with is compacted.
#[tokio::test(flavor = "multi_thread")]
async fn the_history_is_compacted() {
    let (world, proxies) = behind_proxies().await;
    proxies.iter().for_each(|proxy| proxy.delay(Duration::from_millis(20)));
    let mut compacted = 0;
    for round in 0..15 {
        let seen = world.observer.seen();
        assert!(seen > compacted, "the load writes");
        compacted = seen;
        world.ctl(round % 3, &["compact", &seen.to_string()]);
        if round % 3 == 0 {
            proxies.iter().for_each(Proxy::cut);
        }
        sleep(Duration::from_millis(200)).await;
    }
    // With the delay, the process is rarely the first to write.
    proxies.iter().for_each(|proxy| proxy.delay(Duration::ZERO));
    world.serves_all().await;
    world.finish("compacted every 200 ms").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_revoked() {
    let world = World::start().await;
    let (release, released) = watch::channel(false);
    let kept: Vec<_> =
        (0..PROCESSES).map(|number| world.load.hold(number, KEPT, released.clone())).collect();
    eventually("each process holds a permit", async || {
        world.nodes[0].inspect(KEPT).await.is_ok_and(|seen| seen.in_use == u64::from(limit(KEPT)))
    })
    .await;
    let leases = || block_in_place(|| world.cluster.members[0].leases_of("semaphore/n/"));
    // Each has one for the load and one for its permit.
    let first = leases();
    assert_eq!(first.len(), 2 * PROCESSES);
    for lease in &first {
        world.ctl(0, &["lease", "revoke", &format!("{lease:x}")]);
        eventually("its process has another one", async || {
            let now = leases();
            now.len() == first.len() && !now.contains(lease)
        })
        .await;
    }
    world.serves_all().await;
    // Longer than the grace: what is wrongly forgotten is forgotten by now.
    sleep(Duration::from_secs(3)).await;
    world.serves_all().await;
    release.send_replace(true);
    for permit in kept {
        assert!(!permit.await.unwrap().1, "no permit is lost");
    }
    let (_, report) = world.finish("leases revoked").await;
    assert!(report.signs_gone >= 2 * PROCESSES, "{report:?}");
    assert!(report.signs_back >= 2 * PROCESSES, "{report:?}");
    assert!(!report.forgotten.contains_key(KEPT), "{report:?}");
}

/// Starts processes each of which has proxies of its own before all members, and returns those of the first. A process that
/// alone had proxies would be further away than the others, and so would rarely be the first to write.
async fn behind_proxies() -> (World, Vec<Proxy>) {
    let cluster = block_in_place(EtcdCluster::start);
    let (mut proxies, mut urls) = (Vec::new(), Vec::new());
    for _ in 0..PROCESSES {
        let mut of_one = Vec::new();
        for member in &cluster.members {
            of_one.push(Proxy::start(member.client_port()).await);
        }
        let addresses: Vec<_> = of_one.iter().map(|proxy| proxy.address().to_string()).collect();
        urls.push(format!("etcd://{}", addresses.join(",")));
        proxies.push(of_one);
    }
    let world = World::with(cluster, &urls).await;
    let first = proxies.swap_remove(0);
    // The others are never told anything, and go on until the end of the test.
    std::mem::forget(proxies);
    (world, first)
}
