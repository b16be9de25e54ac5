//! Ten permits for three tenants: first come, first served compared with fair shares.
//!
//! ```sh
//! cargo run --example fair_quota
//! ```
//!
//! `batch` queues two hundred requests at once, each of which takes 100 ms. `chat` and `search` send a few requests of
//! 20 ms each. The same load runs twice for two seconds: once in one queue, once with a tenant in each [`Ask`]. With
//! `Semaphore::redis(url)` in place of `in_memory()`, all processes share the quota.

#![allow(clippy::print_stdout, reason = "says what it saw")]

use std::error::Error;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tower_semaphore::{Ask, Policy, Semaphore};

const QUOTA: u32 = 10;
const RUN: Duration = Duration::from_secs(2);
const LOADS: [Load; 3] = [
    Load { tenant: "batch", clients: 200, hold: Duration::from_millis(100), pause: Duration::ZERO },
    Load {
        tenant: "chat",
        clients: 3,
        hold: Duration::from_millis(20),
        pause: Duration::from_millis(80),
    },
    Load { tenant: "search", clients: 4, hold: Duration::from_millis(20), pause: Duration::ZERO },
];

/// The clients of a tenant, which acquire a permit, hold it, pause, and start again.
#[derive(Clone, Copy, Debug)]
struct Load {
    tenant: &'static str,
    clients: usize,
    hold: Duration,
    pause: Duration,
}

#[derive(Clone, Debug, Default)]
struct Got {
    waits: Vec<Duration>,
    held: Duration,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let by_arrival = run(|_| Ask::of("openai")).await?;
    let by_shares = run(|tenant| Ask::of("openai").by(tenant)).await?;

    println!("{QUOTA} permits for {} s\n", RUN.as_secs());
    println!("{:28}first come, first served      fair shares", "");
    let heads = "served  in use  median wait";
    println!("{:28}{heads}   {heads}", "tenant");
    for (load, (arrival, shares)) in LOADS.iter().zip(by_arrival.iter().zip(&by_shares)) {
        let tenant = format!("{}: {} clients, {:?}", load.tenant, load.clients, load.hold);
        println!("{tenant:28}{}   {}", row(arrival), row(shares));
    }
    Ok(())
}

/// Returns what each tenant got, with this request.
async fn run(ask: fn(&'static str) -> Ask) -> Result<Vec<Got>, Box<dyn Error>> {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(QUOTA).wait_timeout(2 * RUN).build()?;
    let end = Instant::now() + RUN;
    let mut clients = JoinSet::new();
    for (n, load) in LOADS.into_iter().enumerate() {
        for _ in 0..load.clients {
            let (semaphore, policy) = (semaphore.clone(), policy.clone());
            clients.spawn(async move {
                let mut got = Got::default();
                while Instant::now() < end {
                    let asked = Instant::now();
                    let permit = semaphore.acquire(ask(load.tenant), &policy);
                    // Dropping the future leaves the queue.
                    let Ok(Ok(permit)) = timeout_at(end, permit).await else { break };
                    got.waits.push(asked.elapsed());
                    let granted = Instant::now();
                    sleep(load.hold).await;
                    drop(permit);
                    got.held += granted.elapsed().min(end.saturating_duration_since(granted));
                    sleep(load.pause).await;
                }
                (n, got)
            });
        }
    }
    let mut all = vec![Got::default(); LOADS.len()];
    while let Some(client) = clients.join_next().await {
        let (n, got) = client?;
        all[n].waits.extend(got.waits);
        all[n].held += got.held;
    }
    semaphore.shutdown().await;
    Ok(all)
}

fn row(got: &Got) -> String {
    let mut waits = got.waits.clone();
    waits.sort();
    let median = match waits.get(waits.len() / 2) {
        Some(wait) => format!("{} ms", wait.as_millis()),
        None => "-".to_owned(),
    };
    let in_use = got.held.as_secs_f64() / RUN.as_secs_f64();
    format!("{:>6}  {in_use:>6.1}  {median:>11}", waits.len())
}
