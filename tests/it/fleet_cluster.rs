//! The promises of a semaphore on a Redis Cluster: masters that die, and slots that move.

use std::time::{Duration, Instant};

use tower_semaphore::{Policy, Semaphore};

use crate::conformance::{self, Fleet};
use crate::support::cluster::{MASTERS, TestCluster};
use crate::support::crowd::Crowd;
use crate::support::failover::Failover;
use crate::support::stopwatch::Stopwatch;
use crate::support::tenants::{self, Tenants};
use crate::support::{eventually, until};
use crate::{conformance_fair, conformance_limits};

impl Fleet for TestCluster {
    fn node(&self) -> Semaphore {
        self.semaphore()
    }

    fn is_empty(&self) -> bool {
        self.nodes.iter().take(MASTERS).all(|node| node.is_clear())
    }

    fn wipe(&self) {
        for node in self.nodes.iter().take(MASTERS) {
            node.command::<()>(&["FLUSHALL"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_what_a_semaphore_promises() {
    let cluster = TestCluster::start();
    conformance::all(&cluster).await;
    conformance_fair::all(&cluster).await;
    conformance_limits::all(&cluster).await;
    hints_arrive_on_each_shard(&cluster).await;
}

/// Without hints, a permit would be found by the next renewal, within a second.
async fn hints_arrive_on_each_shard(cluster: &TestCluster) {
    let (a, b) = (cluster.semaphore(), cluster.semaphore());
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(10)).build().unwrap();
    for name in names(12) {
        let held = a.acquire(&*name, &policy).await.unwrap();
        let waits = tokio::spawn(b.acquire(&*name, &policy));
        eventually("it waits", async || a.inspect(&*name).await.unwrap().waiting == 1).await;
        let freed = Stopwatch::start();
        drop(held);
        drop(waits.await.unwrap().unwrap());
        assert!(freed.elapsed() < Duration::from_millis(400), "{name}: {:?}", freed.elapsed());
    }
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("tenant-{i}")).collect()
}

/// Twice: once with a replica that has all data of its master, and once with one that lacks the last changes, because
/// Redis does not wait for its replicas.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_dies_under_two_gateways_harms_its_own_tenants_alone() {
    let mut cluster = TestCluster::start();
    let mut tenants = Tenants::start(&[cluster.url(), cluster.url_of_least_rights()]).await;
    let all: Vec<usize> = (0..tenants::TENANTS).collect();
    tenants.all_come(&all, Instant::now()).await;
    let mut as_before = 0;
    for (dead, loses) in [(0, false), (1, true)] {
        let is_its = |tenant: &usize| cluster.home(&tenants::semaphore(*tenant)) == dead;
        let its: Vec<usize> = (0..tenants::TENANTS).filter(is_its).collect();
        assert!(its.len() > 5 && its.len() < 35, "{its:?}");
        let calm = Instant::now();
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let replica = MASTERS + dead;
        if loses {
            // From here on the replica gets nothing more, not even what would be in its socket.
            cluster.nodes[replica].signal("STOP");
            cluster.nodes[dead].command::<u64>(&["CLIENT", "KILL", "TYPE", "replica"]);
        }
        let streams = tenants.streams(&its[..its.len() / 2]).await;
        let written = cluster.nodes[dead].replicated();
        cluster.nodes[dead].kill();
        let failed = Instant::now();
        if loses {
            cluster.nodes[replica].signal("CONT");
        }
        until("its replica is the master", || {
            let info: String = cluster.nodes[replica].command(&["INFO", "replication"]);
            info.contains("role:master")
        });
        let promoted = Instant::now();
        let lost = written.saturating_sub(cluster.nodes[replica].replicated());
        println!("{lost} bytes of its replication were lost with the master");
        assert!(!loses || lost > 1000, "nothing was lost");
        let cost = Failover { calm, failed, promoted, its }.cost(&tenants).await;
        assert!(cost.was_noticed(), "nobody noticed");
        as_before += usize::from(cost.others_waited_as_before());
        assert_eq!(streams.await.unwrap(), 0, "streams that did not come whole");
    }
    // In one round of two, because others use the machine, too.
    assert!(as_before > 0, "other shards waited for longer than before");
    tenants.stop().await;
    until("nothing is left", || cluster.nodes[2..].iter().all(|node| node.keys() == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_move_are_followed() {
    let cluster = TestCluster::start();
    let names = names(12);
    let nodes = [cluster.semaphore(), cluster.semaphore_of_least_rights()];
    let crowd = Crowd::start(&nodes, &names);
    crowd.all_served(&names, Instant::now()).await;
    let (from, to) = (0, 2);
    let moving: Vec<_> = names.iter().filter(|name| cluster.home(name) == from).collect();
    assert!(moving.len() > 2, "{moving:?}");
    for (i, name) in moving.iter().copied().enumerate() {
        let slot = cluster.slot(name);
        let set = |node: usize, words: &[&str]| cluster.set_slot(slot, node, words);
        cluster.begin_to_move(slot, from, to);
        tokio::time::sleep(Duration::from_millis(100)).await;
        cluster.migrate(slot, from, to);
        // Long enough for calls to be sent to the target.
        let served = Instant::now();
        crowd.all_served(std::slice::from_ref(name), served).await;
        let id = cluster.id(to);
        // In one order the old master is told last; in the other, both redirect to each other for a while, and must not
        // be asked as fast as they can answer.
        let order = if i % 2 == 0 { [to, from] } else { [from, to] };
        set(order[0], &["NODE", &id]);
        let moves = cluster.errors("MOVED");
        tokio::time::sleep(Duration::from_millis(200)).await;
        // Eight times a hold of 25 ms, two processes, there and back, with some calls each time.
        let moves = cluster.errors("MOVED") - moves;
        assert!(moves < 200, "sent on {moves} times");
        set(order[1], &["NODE", &id]);
        set(1, &["NODE", &id]);
        crowd.all_served(std::slice::from_ref(name), Instant::now()).await;
    }
    let (asks, moves) = (cluster.errors("ASK"), cluster.errors("MOVED"));
    let outcomes = crowd.stop().await;
    let longest = outcomes.iter().map(|o| o.took).max().unwrap();
    println!("{} requests, {asks} ASK, {moves} MOVED, longest wait {longest:?}", outcomes.len());
    assert!(asks > 0 && moves > 0, "{asks} {moves}");
    for o in &outcomes {
        assert!(o.error.is_none() && !o.over && o.took < Duration::from_secs(2), "{o:?}");
    }
    until("nothing is left", || cluster.is_empty());
    assert!(nodes.iter().all(|node| node.health().disconnects == 0));
}
