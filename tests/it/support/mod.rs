//! Helpers that the tests share.

#[cfg(all(feature = "admin", feature = "redis"))]
pub(crate) mod admin;
#[cfg(all(feature = "admin", feature = "redis"))]
pub(crate) mod browser;
#[cfg(feature = "redis")]
pub(crate) mod cluster;
#[cfg(feature = "redis")]
pub(crate) mod crowd;
#[cfg(feature = "etcd")]
pub(crate) mod etcd;
#[cfg(feature = "redis")]
pub(crate) mod failover;
#[cfg(any(feature = "etcd", feature = "redis"))]
#[cfg_attr(
    not(all(feature = "etcd", feature = "redis")),
    allow(dead_code, reason = "some of it is for tests with one of the two")
)]
pub(crate) mod faulty_proxy;
#[cfg(feature = "redis")]
pub(crate) mod fleet;
#[cfg(feature = "redis")]
pub(crate) mod gateway;
#[cfg(feature = "redis")]
pub(crate) mod grpc;
#[cfg(feature = "axum")]
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "most of it is for tests with Redis"))]
pub(crate) mod http;
#[cfg(any(feature = "etcd", feature = "redis"))]
pub(crate) mod ports;
#[cfg(feature = "redis")]
pub(crate) mod proxy;
#[cfg(feature = "metrics")]
pub(crate) mod recorded;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "redis")]
pub(crate) mod scripts;
pub(crate) mod semaphore;
#[cfg(feature = "redis")]
pub(crate) mod sentinel;
pub(crate) mod shares;
pub(crate) mod stopwatch;
#[cfg(feature = "redis")]
pub(crate) mod tenants;
#[cfg(feature = "tls")]
pub(crate) mod tls;
pub(crate) mod told;
pub(crate) mod upstream;
#[cfg(feature = "redis")]
pub(crate) mod wire;

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

/// Makes a test of each function on each backend. It is passed what connects a process to that backend.
macro_rules! on_each {
    ($($name:ident)*) => {
        mod memory {
            use tower_semaphore::Semaphore;
            use tower_semaphore::backend::MemoryBackend;
            $(#[tokio::test]
            async fn $name() {
                let backend = MemoryBackend::new();
                super::$name(&|| Semaphore::new(backend.clone())).await;
            })*
        }
        #[cfg(feature = "redis")]
        mod redis {
            use crate::support::redis::TestRedis;
            $(#[tokio::test]
            async fn $name() {
                let server = TestRedis::start();
                super::$name(&|| server.semaphore()).await;
            })*
        }
        #[cfg(feature = "etcd")]
        mod etcd {
            use crate::support::etcd::TestEtcd;
            $(#[tokio::test]
            async fn $name() {
                let server = TestEtcd::start();
                super::$name(&|| server.semaphore()).await;
            })*
        }
    };
}
pub(crate) use on_each;

/// Waits until something holds, for at most ten seconds; checks every few ms.
pub(crate) async fn eventually<F, Fut>(what: &str, mut holds: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let look = || {
        let holds = holds();
        async { if holds.await { Ok(()) } else { Err("it does not hold") } }
    };
    eventually_or(what, look).await;
}

/// Like [`eventually`]; a failure tells what was seen instead.
pub(crate) async fn eventually_or<F, Fut, T>(what: &str, mut look: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<(), T>>,
    T: Debug,
{
    let end = Instant::now() + Duration::from_secs(10);
    while let Err(seen) = look().await {
        assert!(Instant::now() < end, "not in ten seconds: {what}; {seen:?}");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Waits until something holds while nothing else has to run, for at most twenty seconds.
#[cfg(any(feature = "etcd", feature = "redis"))]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "not in twenty seconds: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
