//! On a Redis Cluster: what a semaphore promises, masters that die, and slots that move.

use std::time::{Duration, Instant};

use tower_semaphore::{Policy, Semaphore};

use crate::conformance::{self, Fleet};
use crate::support::cluster::{MASTERS, TestCluster};
use crate::support::crowd::Crowd;
use crate::support::{eventually, until};

impl Fleet for TestCluster {
    fn node(&self) -> Semaphore {
        self.semaphore()
    }

    fn is_empty(&self) -> bool {
        self.nodes.iter().take(MASTERS).all(|node| node.keys() == 0)
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
    hints_arrive_on_each_shard(&cluster).await;
}

/// Without them a permit would be found by the next renewal, within a second.
async fn hints_arrive_on_each_shard(cluster: &TestCluster) {
    let (a, b) = (cluster.semaphore(), cluster.semaphore());
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(10)).build().unwrap();
    for name in names(12) {
        let held = a.acquire(&*name, &policy).await.unwrap();
        let waits = tokio::spawn(b.acquire(&*name, &policy));
        eventually("it waits", async || a.inspect(&*name).await.unwrap().waiting == 1).await;
        let freed = Instant::now();
        drop(held);
        drop(waits.await.unwrap().unwrap());
        assert!(freed.elapsed() < Duration::from_millis(400), "{name}: {:?}", freed.elapsed());
    }
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("tenant-{i}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_dies_harms_its_own_names_alone_and_they_are_served_again() {
    let mut cluster = TestCluster::start();
    let (dead, witness) = (1, 2);
    let names = names(30);
    let (its, others): (Vec<_>, Vec<_>) =
        names.iter().cloned().partition(|name| cluster.home(name) == dead);
    assert!(its.len() > 3 && others.len() > 10, "{its:?}");
    let slot = cluster.slot(&its[0]);
    let nodes = [cluster.semaphore(), cluster.semaphore_of_least_rights()];
    let crowd = Crowd::start(&nodes, &names);
    crowd.all_served(&names, Instant::now()).await;

    let before = cluster.nodes[dead].port();
    let killed = Instant::now();
    cluster.nodes[dead].kill();
    until("a replica was promoted", || {
        cluster.master(slot, witness).is_some_and(|port| port != before)
    });
    let promoted = Instant::now();
    crowd.all_served(&its, promoted).await;
    let outcomes = crowd.stop().await;

    let mut back = Duration::ZERO;
    for name in &its {
        let served = outcomes.iter().filter(|o| o.name == *name && o.error.is_none());
        let after = served.filter(|o| o.at() > promoted).map(|o| o.at() - promoted);
        back = back.max(after.min().unwrap());
    }
    let refused = outcomes.iter().filter(|o| o.error.is_some()).count();
    let over: Vec<_> = outcomes.iter().filter(|o| o.over).collect();
    let longest = |names: &[String]| {
        let those = outcomes.iter().filter(|o| names.contains(&o.name));
        those.map(|o| o.took).max().unwrap()
    };
    println!(
        "{} requests; promoted {:?} after the kill, all served again {back:?} later; {refused} \
         refused meanwhile, {} over the cap; longest wait {:?} there, {:?} elsewhere",
        outcomes.len(),
        promoted - killed,
        over.len(),
        longest(&its),
        longest(&others),
    );
    assert!(back < Duration::from_secs(1), "{back:?}");
    assert!(refused > 0, "nobody noticed");
    for o in &outcomes {
        if others.contains(&o.name) {
            assert!(o.error.is_none() && !o.over && o.took < Duration::from_secs(1), "{o:?}");
        } else {
            // Who waits goes on waiting; nobody else waits for more than an answer.
            let bound = if o.error.is_none() { promoted - killed } else { Duration::ZERO };
            assert!(o.took < bound + Duration::from_millis(1500), "{o:?}");
            // What Redis acknowledged and had not sent to the replica is lost with the master.
            let moment = promoted..promoted + Duration::from_secs(1);
            assert!(!o.over || moment.contains(&o.at()), "{o:?}");
        }
    }
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
    let (source, target) = (&cluster.nodes[from], &cluster.nodes[to]);
    let port = target.port().to_string();
    for (i, name) in moving.iter().copied().enumerate() {
        let slot = cluster.slot(name).to_string();
        let set = |node: usize, words: &[&str]| {
            cluster.nodes[node].command::<()>(&[&["CLUSTER", "SETSLOT", &slot], words].concat());
        };
        set(to, &["IMPORTING", &cluster.id(from)]);
        set(from, &["MIGRATING", &cluster.id(to)]);
        tokio::time::sleep(Duration::from_millis(100)).await;
        for round in 0..50 {
            let keys: Vec<String> = source.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"]);
            if keys.is_empty() {
                break;
            }
            assert!(round < 49, "{keys:?} do not go");
            let words = ["MIGRATE", "127.0.0.1", &port, "", "0", "1000", "KEYS"];
            let keys: Vec<&str> = keys.iter().map(|key| &**key).collect();
            source.command::<String>(&[&words, &keys[..]].concat());
        }
        // Long enough that it is asked for where it goes to.
        let served = Instant::now();
        crowd.all_served(std::slice::from_ref(name), served).await;
        let id = cluster.id(to);
        // In one order the old master knows it last; in the other, both say for a while that it is
        // the other one, and are not to be asked as fast as they can answer.
        let order = if i % 2 == 0 { [to, from] } else { [from, to] };
        set(order[0], &["NODE", &id]);
        let moves = cluster.errors("MOVED");
        tokio::time::sleep(Duration::from_millis(200)).await;
        // Eight times a hold of 25 ms, two processes, there and back, some calls each time.
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
