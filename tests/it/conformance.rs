//! One suite for every backend: what a semaphore promises, whoever counts.
//!
//! Each test gets a fleet: several semaphores, as of several processes, on one backend.

use std::time::Duration;

use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::{AcquireError, FullReason, Policy, Semaphore};

use crate::support::redis::TestRedis;

trait Fleet {
    /// One more process.
    fn node(&self) -> Semaphore;
    /// Whether nothing is stored.
    fn is_empty(&self) -> bool;
}

impl Fleet for MemoryBackend {
    fn node(&self) -> Semaphore {
        Semaphore::new(self.clone())
    }

    fn is_empty(&self) -> bool {
        Self::is_empty(self)
    }
}

impl Fleet for TestRedis {
    fn node(&self) -> Semaphore {
        self.semaphore()
    }

    fn is_empty(&self) -> bool {
        self.keys() == 0
    }
}

macro_rules! conformance {
    ($($name:ident)*) => {
        mod memory {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&tower_semaphore::backend::MemoryBackend::new()).await;
            })*
        }
        mod redis {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&crate::support::redis::TestRedis::start()).await;
            })*
        }
    };
}

conformance! {
    grants_up_to_the_limit_and_no_further
    hands_over_in_order
}

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(5)).build().unwrap()
}

async fn empty(fleet: &impl Fleet) {
    crate::support::eventually("nothing is stored", async || fleet.is_empty()).await;
}

async fn grants_up_to_the_limit_and_no_further(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = policy(3);
    let one = a.try_acquire("x", &policy).await.unwrap();
    let two = b.try_acquire("x", &policy).await.unwrap();
    let three = a.try_acquire("x", &policy).await.unwrap();
    for node in [&a, &b] {
        match node.try_acquire("x", &policy).await {
            Err(AcquireError::Full(full)) => {
                assert_eq!(full.reason, FullReason::Limit);
                assert_eq!((full.limit, full.in_use, full.waiting), (3, 3, 0));
            }
            other => panic!("{other:?}"),
        }
    }
    drop(two);
    let four = a.try_acquire("x", &policy).await;
    drop((one, three, four));
    empty(fleet).await;
}

async fn hands_over_in_order(fleet: &impl Fleet) {
    let nodes = [fleet.node(), fleet.node(), fleet.node()];
    let policy = policy(1);
    let first = nodes[0].acquire("x", &policy).await.unwrap();
    let (done, mut order) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = Vec::new();
    for i in 0..30 {
        let waiting = nodes[i % 3].acquire("x", &policy);
        let done = done.clone();
        tasks.push(tokio::spawn(async move {
            let permit = waiting.await.unwrap();
            done.send(i).unwrap();
            drop(permit);
        }));
        crate::support::eventually("it waits", async || {
            nodes[0].inspect("x").await.unwrap().waiting == i as u64 + 1
        })
        .await;
    }
    drop(first);
    for i in 0..30 {
        assert_eq!(order.recv().await, Some(i));
    }
    empty(fleet).await;
}
