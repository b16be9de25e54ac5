//! Links that are cut, in both directions or in one of them: those of a member to its peers, and those of a process.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::block_in_place;
use tokio::time::timeout;

use super::behind_proxies;
use super::load::CUT;
use super::world::{PROCESSES, World};
use crate::support::etcd::EtcdCluster;
use crate::support::eventually;
use crate::support::faulty_proxy::{Proxy, REPLIES, REQUESTS};

#[tokio::test(flavor = "multi_thread")]
async fn a_member_loses_its_peers() {
    loses_peers("a member without its peers", [true, true]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_is_not_heard_by_its_peers() {
    loses_peers("a member that its peers do not hear", [true, false]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_does_not_hear_its_peers() {
    loses_peers("a member that does not hear its peers", [false, true]).await;
}

/// A member loses its peers and not its clients, first one that follows and then the one that leads. What it says is lost, or
/// what is said to it, or both.
async fn loses_peers(what: &str, ways: [bool; 2]) {
    let cluster = block_in_place(EtcdCluster::start_with_links);
    let urls = vec![cluster.url(); PROCESSES];
    let world = World::with(cluster, &urls).await;
    for leads in [false, true] {
        let member = if leads { world.leader_beside(None) } else { world.used_follower() };
        world.cluster.cut_peers(member, ways);
        let cut = Instant::now();
        world.leader_beside(member);
        // Those that used this member, too, though it still accepts their connections.
        world.serves_all().await;
        println!("{what}, {leads}: all are served {:?} after it", cut.elapsed());
        let read = ["get", "--command-timeout=1s", "x"];
        let is_cut = block_in_place(|| !world.cluster.members[member].try_ctl(&read));
        assert!(is_cut, "it still reaches the others");
        world.cluster.cut_peers(member, [false, false]);
        block_in_place(|| world.cluster.wait_until_whole());
        world.serves_all().await;
    }
    world.finish(what).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_cut_off() {
    cuts_off("a process cut off", &[REQUESTS, REPLIES]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_not_heard() {
    cuts_off("a process that is not heard", &[REQUESTS]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_does_not_hear() {
    cuts_off("a process that does not hear", &[REPLIES]).await;
}

/// A process whose requests, or answers, or both, do not arrive any more.
async fn cuts_off(what: &str, ways: &[usize]) {
    let (world, proxies) = behind_proxies().await;
    let stall = |stalled| {
        let each = |proxy: &Proxy| ways.iter().for_each(|way| proxy.stall_way(*way, stalled));
        proxies.iter().for_each(each);
    };
    let (release, released) = watch::channel(false);
    let joined = async |in_use: u64, waiting: u64| {
        eventually("they have their places", async || {
            let seen = world.nodes[1].inspect(CUT).await;
            seen.is_ok_and(|seen| (seen.in_use, seen.waiting) == (in_use, waiting))
        })
        .await;
    };
    // It holds all permits, and is the first to wait; another process waits behind it.
    let lost = [0, 0].map(|number| world.load.hold(number, CUT, released.clone()));
    joined(2, 0).await;
    let returning = [0, 0, 0].map(|number| world.load.hold(number, CUT, released.clone()));
    joined(2, 3).await;
    let next = world.load.hold(1, CUT, released.clone());
    joined(2, 4).await;

    stall(true);
    let cut = Instant::now();
    for permit in lost {
        let (_, is_lost) = timeout(Duration::from_secs(3), permit).await.unwrap().unwrap();
        assert!(is_lost, "it relies on no permit past its lease");
    }
    println!("{what}: its permits were lost after {:?}", cut.elapsed());
    release.send_replace(true);
    let (granted, is_lost) = timeout(Duration::from_secs(7), next).await.unwrap().unwrap();
    println!("{what}: another process was granted them after {:?}", granted - cut);
    assert!(!is_lost);
    world.serves(1..PROCESSES).await;
    // What it had sent arrives late.
    stall(false);
    for permit in returning {
        let (_, is_lost) = timeout(Duration::from_secs(7), permit).await.unwrap().unwrap();
        assert!(!is_lost);
    }
    world.serves_all().await;
    let (_, report) = world.finish(what).await;
    assert_eq!(report.forgotten[CUT], [2, 3]);
    assert_eq!(report.signs_gone, 1);
}
