//! What tests wait for, in a semaphore on Redis.

use tower_semaphore::{ConnectionState, Policy, Semaphore};

use super::eventually;
use super::redis::TestRedis;

/// Waits until there is a connection, on which nothing is unanswered.
pub(crate) async fn warm(semaphore: &Semaphore) {
    let permit = semaphore.acquire("warm", &Policy::new(1)).await.unwrap();
    permit.release().await.unwrap();
}

pub(crate) async fn down(semaphore: &Semaphore) {
    eventually("it is down", async || {
        matches!(semaphore.health().connection, ConnectionState::Down { .. })
    })
    .await;
}

pub(crate) async fn up(semaphore: &Semaphore) {
    eventually("it is up", async || matches!(semaphore.health().connection, ConnectionState::Up))
        .await;
}

pub(crate) async fn empty(redis: &TestRedis) {
    eventually("nothing is left", async || redis.keys() == 0).await;
}

pub(crate) async fn in_use(semaphore: &Semaphore, name: &str, count: u64) {
    eventually("so many are in use", async || {
        semaphore.inspect(name).await.is_ok_and(|seen| seen.in_use == count)
    })
    .await;
}

pub(crate) async fn waiting(semaphore: &Semaphore, name: &str, count: u64) {
    eventually("so many wait", async || {
        semaphore.inspect(name).await.is_ok_and(|seen| seen.waiting == count)
    })
    .await;
}
