//! The ways to reach a single server: a Unix socket, and a user's pool.

use std::time::Duration;

use deadpool_redis::redis::IntoConnectionInfo;
use deadpool_redis::{Manager, Pool, Runtime};
use tower_semaphore::backend::RedisBackend;
use tower_semaphore::{ConnectionState, Policy, Semaphore};

use crate::support::redis::TestRedis;
use crate::support::semaphore::{empty, waiting};

/// One request holds, the other waits, and gets the permit.
async fn hands_over(a: &Semaphore, b: &Semaphore, redis: &TestRedis) {
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(10)).build().unwrap();
    for _ in 0..3 {
        let held = a.acquire("x", &policy).await.unwrap();
        let waits = tokio::spawn(b.acquire("x", &policy));
        waiting(a, "x", 1).await;
        drop(held);
        drop(waits.await.unwrap().unwrap());
    }
    assert!(matches!(b.health().connection, ConnectionState::Up), "{:?}", b.health());
    empty(redis).await;
}

#[tokio::test]
async fn a_server_is_reached_by_its_unix_socket() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("redis.sock");
    let path = path.to_str().unwrap();
    let redis = TestRedis::start_with(&["--unixsocket", path]);
    redis.command::<()>(&["ACL", "SETUSER", "app", "on", ">p w", "~*", "&*", "+@all"]);
    let url = |scheme: &str| format!("{scheme}://{path}?db=3&user=app&pass=p%20w");
    let nodes = ["redis+unix", "unix"].map(|scheme| Semaphore::redis(&url(scheme)).unwrap());
    hands_over(&nodes[0], &nodes[1], &redis).await;
    let clients: String = redis.command(&["CLIENT", "LIST"]);
    let ours = clients.lines().filter(|line| line.contains("user=app"));
    assert_eq!(ours.filter(|line| line.contains(path) && line.contains("db=3")).count(), 2);
}

#[tokio::test]
async fn a_pool_of_ones_own_can_be_used() {
    let redis = TestRedis::start();
    let manager = Manager::new(redis.url().into_connection_info().unwrap()).unwrap();
    let pool = Pool::builder(manager).max_size(4).runtime(Runtime::Tokio1).build().unwrap();
    let node = || Semaphore::new(RedisBackend::from_pool(pool.clone()).build().unwrap());
    let (a, b) = (node(), node());
    hands_over(&a, &b, &redis).await;
    // Together with other processes, which do receive hints.
    hands_over(&redis.semaphore(), &b, &redis).await;
    // Its connections are not those that the pool keeps.
    assert_eq!(pool.status().size, 0);
    // A connection that breaks is replaced.
    redis.command::<()>(&["CLIENT", "KILL", "TYPE", "normal"]);
    let policy = Policy::new(1);
    drop(a.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}
