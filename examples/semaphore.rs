//! Permits without HTTP, for workers and jobs: acquire one, inspect the semaphore, and notice when a permit is lost.
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
    // Counts in this process; `Semaphore::redis(url)` counts in the whole fleet.
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(2).wait_timeout(Duration::from_secs(1)).build()?;

    let first = semaphore.acquire("scraper", &policy).await?;
    let second = semaphore.acquire("scraper", &policy).await?;

    // Both permits are in use. This request does not wait:
    match semaphore.try_acquire("scraper", &policy).await {
        Err(error @ AcquireError::Rejected(_)) => println!("{error}"),
        other => return Err(format!("expected a full semaphore, got {other:?}").into()),
    }

    // This one does. It joins the queue here, not when it is first polled.
    let third = semaphore.acquire("scraper", &policy);
    let seen = semaphore.inspect("scraper").await?;
    println!("in use: {}, waiting: {}", seen.in_use, seen.waiting);
    for holder in &seen.holders {
        println!("  {} has a lease for {:?}", holder.id, holder.lease_left);
    }

    // Dropping a permit releases it; the head of the queue gets it at once.
    drop(first);
    let third = third.await?;
    println!("the third one waited {:?}", third.waited());

    // `release` also waits for the acknowledgement.
    second.release().await?;

    // Long work should stop when its permit is lost: another process may hold it by then.
    println!("work: {}", guarded(&third, sleep(Duration::from_millis(50))).await);

    // A shutdown releases everything, including permits that are still held.
    let work = tokio::spawn(async move { guarded(&third, sleep(Duration::from_secs(60))).await });
    semaphore.shutdown().await;
    println!("work at shutdown: {}", work.await?);
    assert!(matches!(semaphore.acquire("scraper", &policy).await, Err(AcquireError::Closed)));
    Ok(())
}

/// Works until the permit is lost.
async fn guarded(permit: &Permit, work: impl Future<Output = ()>) -> &'static str {
    tokio::select! {
        () = work => "done",
        () = permit.lost() => "stopped, the permit is lost",
    }
}
