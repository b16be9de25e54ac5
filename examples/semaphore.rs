//! Permits without HTTP, for workers and jobs: take one, wait for one, look who has them, and know
//! when one is lost.
//!
//! ```sh
//! cargo run --example semaphore
//! ```

#![allow(clippy::print_stdout, reason = "says what it does")]

use std::time::Duration;

use tokio::time::sleep;
use tower_semaphore::{AcquireError, Permit, Policy, Semaphore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // One for the whole process; with `Semaphore::redis(url)` for the whole fleet.
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(2).wait_timeout(Duration::from_secs(1)).build()?;

    let first = semaphore.acquire("scraper", &policy).await?;
    let second = semaphore.acquire("scraper", &policy).await?;

    // Both are out. This one does not wait:
    match semaphore.try_acquire("scraper", &policy).await {
        Err(AcquireError::Rejected(rejected)) => {
            println!("full: {} of {}", rejected.in_use, rejected.limit)
        }
        other => return Err(format!("expected a full semaphore, got {other:?}").into()),
    }

    // This one does. It has its place in the queue from here on, not from its first poll.
    let third = semaphore.acquire("scraper", &policy);
    let seen = semaphore.inspect("scraper").await?;
    println!("in use: {}, waiting: {}", seen.in_use, seen.waiting);
    for holder in &seen.holders {
        println!("  {} has a lease for {:?}", holder.id, holder.lease_left);
    }

    // A permit comes back by drop; the head of the queue has it at once.
    drop(first);
    let third = third.await?;
    println!("the third one waited {:?}", third.waited());

    // Or by `release`, for who wants to know that it is back.
    second.release().await?;

    // Long work should stop when its permit is lost: another may have it by then. Renewals keep it
    // while this process and the backend live.
    println!("work: {}", guarded(&third, sleep(Duration::from_millis(50))).await);

    // A shutdown gives all back, also what is still held.
    let work = tokio::spawn(async move { guarded(&third, sleep(Duration::from_secs(60))).await });
    semaphore.shutdown().await;
    println!("work at shutdown: {}", work.await?);
    assert!(matches!(semaphore.acquire("scraper", &policy).await, Err(AcquireError::Closed)));
    Ok(())
}

/// Works as long as the permit is good.
async fn guarded(permit: &Permit, work: impl Future<Output = ()>) -> &'static str {
    tokio::select! {
        () = work => "done",
        () = permit.lost() => "stopped, the permit is lost",
    }
}
