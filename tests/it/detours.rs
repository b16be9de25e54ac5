//! The cost of a call that takes a detour: for the calls in the same write, and for itself the next time.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tower_semaphore::backend::RedisBackend;
use tower_semaphore::{Ask, ConnectionState, Policy, Semaphore};

use crate::support::cluster::TestCluster;
use crate::support::eventually;
use crate::support::redis::TestRedis;
use crate::support::semaphore::warm;

#[tokio::test]
async fn a_plain_policy_on_a_set_with_tenants_makes_one_call_for_each_request() {
    const REQUESTS: u64 = 100;
    let redis = TestRedis::start();
    let (fair, plain) = (redis.semaphore(), redis.semaphore());
    // So low that a script has to examine the places.
    let policy = Policy::new(2);
    let held = fair.acquire(Ask::of("x").by("tenant"), &policy).await.unwrap();
    warm(&plain).await;
    let before = redis.calls("evalsha");
    for _ in 0..REQUESTS {
        plain.acquire("x", &policy).await.unwrap().release().await.unwrap();
    }
    let calls = redis.calls("evalsha") - before;
    // An acquire and a release for each, one of them twice every five seconds, and the reading of overrides.
    assert!(calls < 2 * REQUESTS + REQUESTS / 4, "{calls} calls for {REQUESTS} requests");
    drop(held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_on_its_way_to_a_node_that_is_away_does_not_delay_the_others() {
    let cluster = TestCluster::start();
    let from = cluster.home("x");
    let other = (0..).map(|n| format!("y{n}")).find(|name| cluster.home(name) == from).unwrap();
    let (to, slot) = ((from + 1) % 3, cluster.slot("x"));
    let (semaphore, policy) = (cluster.semaphore(), Policy::new(10));
    for name in ["x", &*other] {
        drop(semaphore.acquire(name, &policy).await.unwrap());
    }
    eventually("nothing is held", async || semaphore.inspect("x").await.unwrap().in_use == 0).await;
    cluster.begin_to_move(slot, from, to);
    cluster.nodes[to].signal("STOP");
    let ends = Arc::new(AtomicBool::new(false));
    let presses: Vec<_> = (0..4)
        .map(|_| {
            let (semaphore, policy, ends) = (semaphore.clone(), policy.clone(), Arc::clone(&ends));
            tokio::spawn(async move {
                while !ends.load(Ordering::Relaxed) {
                    let _ = semaphore.acquire("x", &policy).await;
                }
            })
        })
        .collect();
    let mut slow = 0;
    for _ in 0..20 {
        let began = Instant::now();
        semaphore.acquire(&*other, &policy).await.unwrap().release().await.unwrap();
        slow += usize::from(began.elapsed() > Duration::from_millis(200));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ends.store(true, Ordering::Relaxed);
    cluster.nodes[to].signal("CONT");
    for press in presses {
        press.await.unwrap();
    }
    assert!(slow <= 4, "{slow} of 20 requests for another slot were slow");
}

#[tokio::test]
async fn four_nodes_that_say_nothing_are_waited_for_once() {
    // They accept connections, and do nothing else.
    let silent: Vec<_> = (0..4).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let hosts: Vec<_> = silent.iter().map(|node| node.local_addr().unwrap().to_string()).collect();
    let backend = RedisBackend::builder(format!("redis-cluster://{}", hosts.join(",")))
        .connect_timeout(Duration::from_millis(500));
    let semaphore = Semaphore::new(backend.build().unwrap());
    let began = Instant::now();
    let refused = semaphore.acquire("x", &Policy::new(1)).await;
    assert!(refused.is_err());
    let is_down = async || matches!(semaphore.health().connection, ConnectionState::Down { .. });
    eventually("it is known to be away", is_down).await;
    let took = began.elapsed();
    assert!(took < Duration::from_millis(1500), "{took:?}");
}
