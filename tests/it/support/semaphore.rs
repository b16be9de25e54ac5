//! What tests wait for in a semaphore, and what they expect of it.

use tower_semaphore::operate::Inspection;
use tower_semaphore::{AcquireError, Permit, Rejected, Semaphore};
#[cfg(feature = "redis")]
use tower_semaphore::{ConnectionState, Policy};

#[cfg(feature = "redis")]
use super::eventually;
use super::eventually_or;
#[cfg(feature = "redis")]
use super::redis::TestRedis;

#[cfg(feature = "redis")]
/// Waits until there is a connection, on which nothing is unanswered.
pub(crate) async fn warm(semaphore: &Semaphore) {
    let permit = semaphore.acquire("warm", &Policy::new(1)).await.unwrap();
    permit.release().await.unwrap();
}

#[cfg(feature = "redis")]
pub(crate) async fn down(semaphore: &Semaphore) {
    eventually("it is down", async || {
        matches!(semaphore.health().connection, ConnectionState::Down { .. })
    })
    .await;
}

#[cfg(feature = "redis")]
pub(crate) async fn up(semaphore: &Semaphore) {
    eventually("it is up", async || matches!(semaphore.health().connection, ConnectionState::Up))
        .await;
}

#[cfg(feature = "redis")]
pub(crate) async fn empty(redis: &TestRedis) {
    eventually("nothing is left", async || redis.keys() == 0).await;
}

#[cfg(feature = "redis")]
pub(crate) async fn in_use(semaphore: &Semaphore, name: &str, count: u64) {
    inspected(semaphore, name, &format!("{count} in use"), |seen| seen.in_use == count).await;
}

pub(crate) async fn waiting(semaphore: &Semaphore, name: &str, count: u64) {
    inspected(semaphore, name, &format!("{count} wait"), |seen| seen.waiting == count).await;
}

async fn inspected(
    semaphore: &Semaphore,
    name: &str,
    what: &str,
    holds: impl Fn(&Inspection) -> bool,
) {
    eventually_or(what, async || {
        let seen = semaphore.inspect(name).await;
        if seen.as_ref().is_ok_and(&holds) { Ok(()) } else { Err(seen) }
    })
    .await;
}

/// The rejection of a request.
pub(crate) fn rejection(result: Result<Permit, AcquireError>) -> Rejected {
    match result {
        Err(AcquireError::Rejected(rejected)) => rejected,
        other => panic!("not rejected: {other:?}"),
    }
}
