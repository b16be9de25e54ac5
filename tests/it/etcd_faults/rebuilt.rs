//! Members that are replaced, and a cluster whose data go back.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::block_in_place;
use tokio::time::{sleep_until, timeout};
use tower_semaphore::{Policy, Semaphore};

use super::judge::judge;
use super::load::{KEPT, MOVED, limit};
use super::world::World;
use crate::support::etcd::EtcdCluster;
use crate::support::faulty_proxy::Proxy;
use crate::support::{eventually, eventually_or};

/// The longest lease, what etcd needs to notice its end, and the grace.
const SETTLED: Duration = Duration::from_millis(3000 + 500 + 2000);

/// A key that is written after the data were saved.
const LATER: &str = "later";

#[tokio::test(flavor = "multi_thread")]
async fn members_are_replaced() {
    let mut world = World::start().await;
    for leads in [false, true] {
        let member = if leads { world.leader_beside(None) } else { world.used_follower() };
        block_in_place(|| world.cluster.replace(member));
        block_in_place(|| world.cluster.wait_until_whole());
        world.serves_all().await;
    }
    world.finish("two members replaced").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_go_back() {
    goes_back("data restored", false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_go_back_as_those_of_another_cluster() {
    goes_back("data restored as another cluster", true).await;
}

/// All members get older data, under load. `is_other`: the cluster gets another id, too.
async fn goes_back(what: &str, is_other: bool) {
    let mut world = World::start().await;
    let releases = [(); 2].map(|()| watch::Sender::new(false));
    let hold = |world: &World, number, name, until: usize| {
        world.load.hold(number, name, releases[until].subscribe())
    };
    let joined = async |world: &World, name: &'static str, in_use: u64| {
        eventually_or("they have their places", async || {
            let seen = world.nodes[1].inspect(name).await.map(|seen| (seen.in_use, seen.waiting));
            if seen.as_ref().is_ok_and(|seen| *seen == (in_use, 0)) { Ok(()) } else { Err(seen) }
        })
        .await;
    };
    // Three stay as they are. One will be known to etcd alone, and so will both of the other name.
    let mut kept: Vec<_> = (0..3).map(|number| hold(&world, number, KEPT, 1)).collect();
    let before = [hold(&world, 3, KEPT, 0), hold(&world, 0, MOVED, 0), hold(&world, 0, MOVED, 0)];
    joined(&world, KEPT, 4).await;
    joined(&world, MOVED, 2).await;
    let saved = block_in_place(|| world.cluster.save());
    let known = world.observer.seen();
    world.ctl(0, &["put", LATER, ""]);
    releases[0].send_replace(true);
    for permit in before {
        assert!(!permit.await.unwrap().1);
    }
    // These etcd will not know.
    kept.extend([4, 5].map(|number| hold(&world, number, KEPT, 1)));
    joined(&world, KEPT, 5).await;
    let moved = [1, 1].map(|number| hold(&world, number, MOVED, 1));
    joined(&world, MOVED, 2).await;
    world.serves_all().await;

    let history = world.another_history().await;
    let violations = judge(&history, |name| limit(name).into()).violations;
    assert!(violations.is_empty(), "before: {violations:?}");
    let began = Instant::now();
    block_in_place(|| world.cluster.restore(&saved, is_other));
    let restored = Instant::now();
    assert_eq!(world.ctl(0, &["get", LATER]), "", "the data went back");
    world.serves_all().await;
    println!("{what}: {:?} down, all are served {:?} later", restored - began, restored.elapsed());

    sleep_until((restored + SETTLED).into()).await;
    world.settled(known..=world.observer.seen());
    joined(&world, KEPT, 5).await;
    joined(&world, MOVED, 2).await;
    world.serves_all().await;
    releases[1].send_replace(true);
    for permit in kept.into_iter().chain(moved) {
        let (_, is_lost) = timeout(Duration::from_secs(5), permit).await.unwrap().unwrap();
        // There was room for each of them, and the members were away for less than a lease.
        assert!(!is_lost, "those that etcd did not know are counted again");
    }
    let (_, report) = world.finish(what).await;
    assert!(!report.forgotten.contains_key(KEPT), "{report:?}");
}

/// What it released is held in the older data, and by the time that it connects these are at a later revision than the last
/// one that it saw: only the id of the cluster shows that the data are others.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_comes_late_to_other_data_releases_what_it_does_not_have() {
    let mut cluster = block_in_place(EtcdCluster::start);
    let proxy = Proxy::start(cluster.members[0].client_port()).await;
    let late = Semaphore::etcd(&format!("etcd://{}", proxy.address())).unwrap();
    let other = Semaphore::etcd(&cluster.url()).unwrap();
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(8)).build().unwrap();
    let permit = late.acquire("x", &policy).await.unwrap();
    let saved = block_in_place(|| cluster.save());
    permit.release().await.unwrap();
    proxy.stall(true);
    proxy.cut();
    block_in_place(|| cluster.restore(&saved, true));
    eventually("the data are used", async || other.acquire("y", &policy).await.is_ok()).await;
    for _ in 0..50 {
        eventually("it goes on", async || other.acquire("y", &policy).await.is_ok()).await;
    }
    assert_eq!(other.inspect("x").await.unwrap().in_use, 1, "as the data have it");
    proxy.stall(false);
    eventually("it is back", async || late.acquire("z", &policy).await.is_ok()).await;
    drop(other.acquire("x", &policy).await.expect("it is released"));
}
