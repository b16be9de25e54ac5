//! Tenants that share one quota over several gateways.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::support::eventually;
use crate::support::fleet::Fleet;
use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::shares::percentile;

const FAIR: [&str; 2] = ["--fair-by", "header:x-tenant"];
const OTHERS: [&str; 9] = ["B", "C", "D", "E", "F", "G", "H", "I", "J"];
/// Of the backlog: long, compared with what a busy machine adds to it.
const HOLD: Duration = Duration::from_millis(50);
/// Longer than any test.
const PATIENT: [&str; 2] = ["--wait", "60s"];

/// The gateways, and the upstream.
struct Stage<'a> {
    urls: Vec<String>,
    upstream: &'a Upstream,
    client: Client,
}

impl<'a> Stage<'a> {
    fn of(fleet: &'a Fleet) -> Self {
        let urls = fleet.gateways.iter().map(|gateway| gateway.url().to_owned()).collect();
        Self { urls, upstream: &fleet.upstream, client: fleet.client.clone() }
    }

    fn alone(gateway: &Gateway, upstream: &'a Upstream) -> Self {
        Self { urls: vec![gateway.url().to_owned()], upstream, client: Client::new() }
    }

    /// Sends one request. Returns how long it took.
    fn ask(&self, gateway: usize, tenant: &str, ms: u64) -> JoinHandle<Duration> {
        let url = format!("{}/?ms={ms}", self.urls[gateway % self.urls.len()]);
        let request = http::Request::get(url).header("x-tenant", tenant);
        let client = self.client.clone();
        tokio::spawn(async move {
            let sent = Instant::now();
            assert_eq!(client.send(request).await.0, 200);
            sent.elapsed()
        })
    }

    /// Clients that ask again at once, each at its own gateway, until they are stopped.
    fn again(
        &self,
        tenant: &'static str,
        count: usize,
        ms: u64,
        stop: &Arc<AtomicBool>,
    ) -> Clients {
        let clients = (0..count).map(|n| {
            let url = format!("{}/?ms={ms}", self.urls[n % self.urls.len()]);
            let (client, stop) = (self.client.clone(), Arc::clone(stop));
            tokio::spawn(async move {
                let mut served = 0;
                while !stop.load(Ordering::Relaxed) {
                    let request = http::Request::get(&url).header("x-tenant", tenant);
                    assert_eq!(client.send(request).await.0, 200);
                    served += 1;
                }
                served
            })
        });
        Clients(clients.collect())
    }
}

struct Clients(Vec<JoinHandle<usize>>);

impl Clients {
    /// Returns how many requests were served.
    async fn end(self) -> usize {
        join_all(self.0).await.into_iter().map(Result::unwrap).sum()
    }
}

/// A queues six hundred requests, nine others send three each second. Returns how many holds the others wait, at the
/// median and at the 99th percentile.
async fn backlog(stage: &Stage<'_>) -> (f64, f64) {
    let ms = u64::try_from(HOLD.as_millis()).unwrap();
    let queued: Vec<_> = (0..600).map(|n| stage.ask(n, "A", ms)).collect();
    eventually("A has all permits", async || stage.upstream.seen().in_flight == 10).await;
    sleep(Duration::from_millis(300)).await;
    let mut waits = Vec::new();
    for n in 0..54 {
        sleep(Duration::from_millis(37)).await;
        waits.push(stage.ask(n, OTHERS[n % OTHERS.len()], ms));
    }
    let is_long = queued.iter().any(|request| !request.is_finished());
    let waits = join_all(waits).await.into_iter().map(Result::unwrap);
    let mut holds: Vec<_> =
        waits.map(|took| took.saturating_sub(HOLD).as_secs_f64() / HOLD.as_secs_f64()).collect();
    holds.sort_by(f64::total_cmp);
    assert!(is_long, "the backlog was served before the others came");
    for request in queued {
        request.await.unwrap();
    }
    (percentile(&holds, 50), percentile(&holds, 99))
}

/// A holds for 300 ms and always has more, B has ten clients of 10 ms. Returns the permits that A leaves to B, and how
/// many requests of B were served in about four seconds.
async fn long_and_short(stage: &Stage<'_>) -> (f64, usize) {
    let stop = Arc::<AtomicBool>::default();
    let long = stage.again("A", 40, 300, &stop);
    let short = stage.again("B", 10, 10, &stop);
    sleep(Duration::from_secs(1)).await;
    let from = Instant::now();
    sleep(Duration::from_secs(3)).await;
    let left = 10.0 - stage.upstream.average_of("A", from, Instant::now());
    stop.store(true, Ordering::Relaxed);
    long.end().await;
    (left, short.end().await)
}

/// Passes if one round of three is good, because others use the machine, too.
async fn in_some_round<T: std::fmt::Debug>(
    mut round: impl AsyncFnMut() -> T,
    is_good: impl Fn(&T) -> bool,
) {
    let mut rounds = Vec::new();
    for _ in 0..3 {
        let figures = round().await;
        println!("{figures:.2?}");
        if is_good(&figures) {
            return;
        }
        rounds.push(figures);
    }
    panic!("{rounds:.2?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_makes_nobody_else_wait() {
    let args = [&["--limit", "10"], &FAIR[..], &PATIENT].concat();
    let fleet = Fleet::start(2, &args).await;
    let stage = Stage::of(&fleet);
    in_some_round(async || backlog(&stage).await, |(p50, p99)| *p50 <= 1.0 && *p99 <= 4.0).await;
    assert_eq!(fleet.upstream.seen().peak, 10, "as many as may be, and never one more");
    fleet.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_requests_leave_their_share_to_short_ones() {
    let args = [&["--limit", "10"], &FAIR[..], &PATIENT].concat();
    let fleet = Fleet::start(2, &args).await;
    let stage = Stage::of(&fleet);
    in_some_round(
        async || long_and_short(&stage).await,
        |(left, served)| *left >= 2.5 && *served >= 300,
    )
    .await;
    assert_eq!(fleet.upstream.seen().peak, 10, "as many as may be, and never one more");
    fleet.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_gateway_alone_is_fair_without_redis() {
    let args = [&["--limit", "10"], &FAIR[..], &PATIENT].concat();
    let upstream = Upstream::start().await;
    let gateway = Gateway::start(&upstream.url(), &args);
    let stage = Stage::alone(&gateway, &upstream);
    in_some_round(async || backlog(&stage).await, |(p50, p99)| *p50 <= 1.0 && *p99 <= 4.0).await;
    in_some_round(
        async || long_and_short(&stage).await,
        |(left, served)| *left >= 2.5 && *served >= 300,
    )
    .await;
    assert_eq!(upstream.seen().peak, 10, "as many as may be, and never one more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_tenant_has_more_than_its_cap_at_the_upstream() {
    let args =
        [&["--limit", "10", "--each", "3", "--each-for", "D=1"], &FAIR[..], &PATIENT].concat();
    let fleet = Fleet::start(2, &args).await;
    let stage = Stage::of(&fleet);
    let stop = Arc::<AtomicBool>::default();
    // At first A is alone, and seven permits stay free.
    let mut clients = vec![stage.again("A", 20, 20, &stop)];
    sleep(Duration::from_millis(500)).await;
    assert_eq!(fleet.upstream.seen().peak, 3);
    clients.extend(["B", "C", "D", "E"].map(|tenant| stage.again(tenant, 12, 15, &stop)));
    sleep(Duration::from_secs(2)).await;
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        assert!(client.end().await > 0);
    }
    for tenant in ["A", "B", "C", "E"] {
        assert_eq!(fleet.upstream.peak_of(tenant), 3, "{tenant}");
    }
    assert_eq!(fleet.upstream.peak_of("D"), 1);
    assert_eq!(fleet.upstream.seen().peak, 10);
    fleet.quiet().await;
}

/// During a deploy, one gateway knows of tenants and the other does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_without_tenants_keeps_the_cap_and_nobody_starves() {
    let (limit, hold) = (["--limit", "5"], 20);
    let mut fleet = Fleet::start(1, &[&limit, &FAIR[..], &PATIENT].concat()).await;
    fleet.add(&[&limit[..], &PATIENT].concat());
    let stage = Stage::of(&fleet);
    // Lines at both of them, and more requests behind the old one.
    let queued: Vec<_> = (0..400).map(|n| stage.ask(usize::from(n % 4 > 0), "A", hold)).collect();
    eventually("all permits are in use", async || fleet.upstream.seen().in_flight == 5).await;
    sleep(Duration::from_millis(200)).await;
    let began = Instant::now();
    let (mut fair, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        fair.push(stage.ask(0, "B", hold));
        plain.push(stage.ask(1, "B", hold));
        sleep(Duration::from_millis(30)).await;
    }
    for request in fair {
        request.await.unwrap();
    }
    let fair = began.elapsed();
    for request in plain {
        request.await.unwrap();
    }
    let plain = began.elapsed();
    for request in queued {
        request.await.unwrap();
    }
    println!(
        "B was served in {fair:?} by shares, in {plain:?} by arrival; all in {:?}",
        began.elapsed()
    );
    assert_eq!(fleet.upstream.seen().peak, 5, "as many as may be, and never one more");
    assert!(fair < plain, "it waits for the line of those without tenants: {fair:?}");
    fleet.quiet().await;
}
