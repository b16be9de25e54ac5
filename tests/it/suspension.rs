//! A machine that is suspended: its clock stands still, and leases go on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::timeout;
use tower_semaphore::backend::seam::{Backend, Connection, Mailbox, Shard};
use tower_semaphore::backend::{MemoryBackend, RedisBackend};
use tower_semaphore::protocol::NodeId;
use tower_semaphore::{AcquireError, BackendError, Policy, Semaphore};

use crate::support::eventually;
use crate::support::redis::TestRedis;
use crate::support::semaphore::in_use;

const LEASE: Duration = Duration::from_secs(60);

/// The machine of a process.
#[derive(Clone, Default)]
struct Machine {
    suspended_ms: Arc<AtomicU64>,
}

/// The backend of a process there.
struct On(RedisBackend, Machine);

impl Machine {
    fn process(&self, redis: &TestRedis) -> Semaphore {
        let backend = RedisBackend::builder(redis.url()).build().unwrap();
        Semaphore::new(On(backend, self.clone()))
    }

    /// Suspends and resumes it, in no time by its clock.
    fn suspend(&self, duration: Duration) {
        let ms = u64::try_from(duration.as_millis()).unwrap();
        self.suspended_ms.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Backend for On {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.attach(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.0.key(name)
    }

    fn routing(&self) -> Option<u64> {
        self.0.routing()
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        self.0.connect(shard)
    }

    fn suspended(&self) -> Option<Duration> {
        Some(Duration::from_millis(self.1.suspended_ms.load(Ordering::SeqCst)))
    }
}

fn policy() -> Policy {
    Policy::builder(1).lease(LEASE).build().unwrap()
}

#[tokio::test]
async fn a_process_whose_machine_was_suspended_past_its_leases_knows_at_once() {
    let (redis, machine) = (TestRedis::start(), Machine::default());
    let semaphore = machine.process(&redis);
    let permit = semaphore.acquire("x", &policy()).await.unwrap();
    let holder = permit.clone();
    let told = tokio::spawn(async move { holder.lost().await });
    tokio::task::yield_now().await;
    machine.suspend(LEASE / 2);
    assert!(!permit.is_lost(), "half of its lease is left");
    machine.suspend(LEASE / 2);
    assert!(permit.is_lost());
    let told = timeout(Duration::from_secs(2), told).await;
    assert!(told.is_ok(), "its holder is told, though no timer has gone on");
    assert_eq!(semaphore.health().lost, 1);
}

#[tokio::test]
async fn a_suspension_that_leases_outlast_costs_no_permit() {
    let (redis, machine) = (TestRedis::start(), Machine::default());
    let semaphore = machine.process(&redis);
    let permit = semaphore.acquire("x", &policy()).await.unwrap();
    let lease_end = || {
        let places: Vec<(String, u64)> =
            redis.command(&["ZRANGE", "semaphore:{x}", "0", "-1", "WITHSCORES"]);
        places[0].1
    };
    for _ in 0..3 {
        let before = lease_end();
        // Twice as much is less than a lease: the last renewal may be answered without being received yet.
        machine.suspend(2 * LEASE / 5);
        eventually("it is renewed", async || lease_end() > before).await;
        assert!(!permit.is_lost());
    }
    in_use(&semaphore, "x", 1).await;
}

#[tokio::test]
async fn a_permit_that_was_kept_before_a_suspension_is_given_to_nobody_after_it() {
    let (redis, machine) = (TestRedis::start(), Machine::default());
    let (asleep, awake) = (machine.process(&redis), redis.semaphore());
    drop(awake.acquire("warm", &policy()).await.unwrap());
    let reuse = Policy::builder(1).lease(LEASE).reuse(true).build().unwrap();
    drop(asleep.acquire("x", &reuse).await.unwrap());
    machine.suspend(2 * LEASE);
    // By the server's clock as well.
    redis.command::<()>(&["DEL", "semaphore:{x}"]);
    let _permit = awake.try_acquire("x", &policy()).await.unwrap();
    let second = timeout(Duration::from_secs(1), asleep.acquire("x", &reuse)).await;
    assert!(second.is_err(), "two hold the one permit: {second:?}");
}

#[tokio::test]
async fn permits_of_the_embedded_backend_outlive_a_suspension() {
    let backend = MemoryBackend::new();
    assert_eq!(backend.suspended(), Some(Duration::ZERO), "nobody else could have taken them");
    let semaphore = Semaphore::new(backend);
    let permit = semaphore.acquire("x", &policy()).await.unwrap();
    let refused = semaphore.try_acquire("x", &policy()).await;
    assert!(matches!(refused, Err(AcquireError::Rejected(_))), "{refused:?}");
    assert!(!permit.is_lost());
}
