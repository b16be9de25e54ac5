//! A provider's quota of 300 requests a minute, and what four kinds of clients make of it.
//!
//! ```sh
//! cargo run --example provider_quota
//! ```
//!
//! A hundred requests in three processes always want to run. The provider counts by the minute, and answers what is above
//! its quota with 429 and the seconds until the next one. Four minutes pass in about a second, because the clock of Tokio
//! stands still while nothing is to be done. With `Semaphore::redis(url)` in place of a common [`MemoryBackend`], the
//! processes can be real ones.

#![allow(clippy::print_stdout, reason = "says what it saw")]

use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::{Feedback, Policy, PolicyBuilder, Semaphore};

const MINUTE: Duration = Duration::from_secs(60);
const MINUTES: u32 = 4;
const QUOTA: u32 = 300;
const PROCESSES: usize = 3;

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<(), Box<dyn Error>> {
    let patient = || Policy::builder(30).wait_timeout(Policy::MAX_WAIT_TIMEOUT);
    println!(
        "{QUOTA} requests a minute are allowed; {PROCESSES} processes ask for {MINUTES} minutes\n"
    );
    println!("{:46}429s a minute   served", "");
    row("each request waits as its 429 says", alone(false).await);
    row("each process waits as its last 429 says", alone(true).await);
    row("permit.feedback: the fleet waits", fleet(patient()).await?);
    row("the same with .rate(300, a minute)", fleet(patient().rate(QUOTA, MINUTE)).await?);
    Ok(())
}

fn row(what: &str, provider: Provider) {
    let refused = f64::from(provider.refused) / f64::from(MINUTES);
    let served = f64::from(provider.served) / f64::from(MINUTES * QUOTA) * 100.0;
    println!("{what:46}{refused:13.1}   {served:5.0}%");
}

/// A window that begins with each minute, as most providers have it.
#[derive(Clone, Copy, Debug)]
struct Provider {
    began: Instant,
    minute: u64,
    in_this_one: u32,
    served: u32,
    refused: u32,
}

impl Provider {
    fn new() -> Arc<Mutex<Self>> {
        let began = Instant::now();
        Arc::new(Mutex::new(Self { began, minute: 0, in_this_one: 0, served: 0, refused: 0 }))
    }

    /// Returns `Retry-After` if it refuses.
    fn ask(provider: &Mutex<Self>) -> Option<Duration> {
        let mut this = lock(provider);
        let minute = this.began.elapsed().as_secs() / 60;
        if minute > this.minute {
            (this.minute, this.in_this_one) = (minute, 0);
        }
        if this.in_this_one < QUOTA {
            this.in_this_one += 1;
            this.served += 1;
            return None;
        }
        this.refused += 1;
        let next = Duration::from_secs(60 * (minute + 1));
        Some(Duration::from_secs(next.saturating_sub(this.began.elapsed()).as_secs() + 1))
    }

    /// What it counted until the end of the last minute.
    async fn count(provider: &Mutex<Self>, mut clients: JoinSet<()>) -> Self {
        let began = lock(provider).began;
        sleep_until(began + MINUTES * MINUTE - Duration::from_millis(1)).await;
        clients.shutdown().await;
        *lock(provider)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long a request takes that is served.
fn work(n: u64, turn: u64) -> Duration {
    Duration::from_millis(500 + (n * 37 + turn * 101) % 1000)
}

/// Clients that know of no other process.
async fn alone(remembers: bool) -> Provider {
    let (provider, mut clients) = (Provider::new(), JoinSet::new());
    for process in 0..PROCESSES as u64 {
        let later = Arc::new(Mutex::new(Instant::now()));
        let permits = Arc::new(tokio::sync::Semaphore::new(10));
        for n in 0..34 {
            let (provider, later) = (Arc::clone(&provider), Arc::clone(&later));
            let permits = Arc::clone(&permits);
            clients.spawn(async move {
                for turn in 0.. {
                    let permit = permits.acquire().await;
                    let until = *lock(&later);
                    sleep_until(if remembers { until } else { Instant::now() }).await;
                    let Some(after) = Provider::ask(&provider) else {
                        sleep(work(n + 34 * process, turn)).await;
                        continue;
                    };
                    drop(permit);
                    let until = Instant::now() + after;
                    *lock(&later) = until;
                    sleep_until(until).await;
                }
            });
        }
    }
    Provider::count(&provider, clients).await
}

/// Clients that share their permits, and what the provider says.
async fn fleet(policy: PolicyBuilder) -> Result<Provider, Box<dyn Error>> {
    let (policy, backend) = (policy.build()?, MemoryBackend::new());
    let (provider, mut clients) = (Provider::new(), JoinSet::new());
    let processes = [(); PROCESSES].map(|()| Semaphore::new(backend.clone()));
    for (n, semaphore) in (0..102).zip(processes.iter().cycle()) {
        let (provider, semaphore) = (Arc::clone(&provider), semaphore.clone());
        let policy = policy.clone();
        clients.spawn(async move {
            for turn in 0.. {
                let Ok(permit) = semaphore.acquire("provider", &policy).await else { return };
                match Provider::ask(&provider) {
                    None => sleep(work(n, turn)).await,
                    Some(after) => permit.feedback(Feedback::Backoff(after)),
                }
            }
        });
    }
    let counted = Provider::count(&provider, clients).await;
    for semaphore in processes {
        semaphore.shutdown().await;
    }
    Ok(counted)
}
