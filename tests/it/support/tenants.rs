//! Fifty tenants that make requests to two gateway processes, and an upstream that counts each of them.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::routing::any;
use futures_util::StreamExt;
use futures_util::future::join_all;
use serde::Deserialize;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::gateway::{Client, Gateway};

pub(crate) const TENANTS: usize = 50;
/// The cap of each tenant.
pub(crate) const LIMIT: usize = 2;
pub(crate) const WAIT: Duration = Duration::from_secs(3);
/// How long the upstream works on a request that is no stream.
const WORK: Duration = Duration::from_millis(40);
/// How long a stream lasts: longer than the longest failover. The lease is longer still.
const FLOW: Duration = Duration::from_secs(5);
const FRAME: Duration = Duration::from_millis(20);
/// Past every bound.
const LONG: Duration = Duration::from_secs(20);

/// The load, while this exists.
pub(crate) struct Tenants {
    gateways: Vec<Gateway>,
    upstream: String,
    client: Client,
    log: Arc<Mutex<Log>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
    watch: JoinHandle<()>,
}

/// Everything that was observed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    /// What the upstream observed.
    stays: Vec<Stay>,
    /// What the clients observed.
    asked: Vec<Asked>,
    /// When even this process could not run.
    stalls: Vec<Range<Instant>>,
}

#[derive(Clone, Debug)]
struct Stay {
    tenant: usize,
    came: Instant,
    left: Option<Instant>,
    is_stream: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) tenant: usize,
    pub(crate) sent: Instant,
    /// When the head of the response came.
    pub(crate) came: Instant,
    pub(crate) status: u16,
}

impl Asked {
    pub(crate) fn took(&self) -> Duration {
        self.came - self.sent
    }
}

pub(crate) fn name(tenant: usize) -> String {
    format!("tenant-{tenant}")
}

/// Returns the name of a tenant's semaphore in the gateways.
pub(crate) fn semaphore(tenant: usize) -> String {
    format!("gateway:tenant-{tenant}")
}

/// Every fifth tenant is under pressure: it always has more requests than permits.
pub(crate) const fn is_pressed(tenant: usize) -> bool {
    tenant.is_multiple_of(5)
}

impl Tenants {
    /// Starts one gateway for each URL of Redis, and clients of each tenant at each gateway.
    pub(crate) async fn start(urls: &[String]) -> Self {
        let log = Arc::<Mutex<Log>>::default();
        let mut tenants = Self {
            gateways: Vec::new(),
            upstream: upstream(Arc::clone(&log)).await,
            client: Client::new(),
            watch: tokio::spawn(watch(Arc::clone(&log))),
            log,
            stop: Arc::default(),
            clients: Vec::new(),
        };
        urls.iter().for_each(|url| tenants.add(url));
        tenants
    }

    /// Starts another gateway, with its clients.
    pub(crate) fn add(&mut self, redis: &str) {
        let (limit, wait) = (LIMIT.to_string(), format!("{}s", WAIT.as_secs()));
        let args = ["--key", "header:x-tenant", "--limit", &limit, "--wait", &wait];
        let args = [&["--redis", redis], &args[..]].concat();
        self.gateways.push(Gateway::start(&self.upstream, &args));
        for tenant in 0..TENANTS {
            for _ in 0..if is_pressed(tenant) { 3 } else { 1 } {
                let task = self.client_of(tenant, self.gateways.len() - 1);
                self.clients.push(tokio::spawn(task));
            }
        }
    }

    fn client_of(&self, tenant: usize, gateway: usize) -> impl Future<Output = ()> + use<> {
        let (client, log, stop) =
            (self.client.clone(), Arc::clone(&self.log), Arc::clone(&self.stop));
        let url = self.gateways[gateway].url().to_owned();
        async move {
            while !stop.load(Ordering::Relaxed) {
                let pause = if is_pressed(tenant) { 5..20 } else { 100..300 };
                sleep(Duration::from_millis(fastrand::u64(pause))).await;
                let request = http::Request::get(&url).header("x-tenant", name(tenant));
                let sent = Instant::now();
                let answer = timeout(LONG, client.send(request)).await.expect("an answer");
                let (came, status) = (Instant::now(), answer.0.as_u16());
                lock(&log).asked.push(Asked { tenant, sent, came, status });
                if status != 200 {
                    sleep(Duration::from_millis(fastrand::u64(50..150))).await;
                }
            }
        }
    }

    /// Starts a stream of each of these tenants, alternating between the gateways. Returns in the end how many of them
    /// did not come completely.
    pub(crate) async fn streams(&self, tenants: &[usize]) -> JoinHandle<usize> {
        let before = self.flowing();
        let streams = tenants.iter().enumerate().map(|(i, tenant)| {
            let url = self.gateways[i % self.gateways.len()].url();
            let url = format!("{url}/?stream_ms={}", FLOW.as_millis());
            let request = http::Request::get(url).header("x-tenant", name(*tenant));
            let client = self.client.clone();
            async move {
                let (status, body) = client.send(request).await;
                let frames = usize::try_from(FLOW.as_millis() / FRAME.as_millis()).unwrap();
                let whole = body.is_ok_and(|body| body.len() == frames * CHUNK.len());
                usize::from(status != 200 || !whole)
            }
        });
        let streams = tokio::spawn(join_all(streams.collect::<Vec<_>>()));
        super::eventually("they flow", async || self.flowing() == before + tenants.len()).await;
        tokio::spawn(async move { streams.await.unwrap().into_iter().sum() })
    }

    fn flowing(&self) -> usize {
        lock(&self.log).stays.iter().filter(|stay| stay.is_stream && stay.left.is_none()).count()
    }

    /// Waits until each of these tenants has reached the upstream after a moment.
    pub(crate) async fn all_come(&self, tenants: &[usize], after: Instant) {
        super::eventually("each of them comes", async || {
            let log = lock(&self.log);
            tenants.iter().all(|tenant| log.first_after(*tenant, after).is_some())
        })
        .await;
    }

    pub(crate) fn seen(&self) -> Log {
        lock(&self.log).clone()
    }

    /// Ends the load. Nothing of it may be left at the upstream, and no request may have waited for more than a second
    /// longer than allowed. The gateways go on.
    pub(crate) async fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        join_all(self.clients.drain(..)).await.into_iter().for_each(Result::unwrap);
        let log = &self.log;
        super::eventually("nothing is left at the upstream", async || {
            lock(log).stays.iter().all(|stay| stay.left.is_some())
        })
        .await;
        let log = self.seen();
        for asked in &log.asked {
            let stalled = log.stalled(&(asked.sent..asked.came));
            let bound = WAIT + Duration::from_secs(1) + stalled;
            assert!(asked.took() < bound, "{asked:?}: {:?}", asked.took());
        }
    }
}

impl Drop for Tenants {
    fn drop(&mut self) {
        self.watch.abort();
        self.clients.iter().for_each(JoinHandle::abort);
    }
}

impl Log {
    /// Returns when a tenant first arrived after a moment.
    pub(crate) fn first_after(&self, tenant: usize, moment: Instant) -> Option<Instant> {
        let came = self.stays.iter().filter(|stay| stay.tenant == tenant && stay.came > moment);
        came.map(|stay| stay.came).min()
    }

    /// Returns what was sent between two moments, and answered.
    pub(crate) fn asked(&self, when: &Range<Instant>) -> impl Iterator<Item = &Asked> {
        self.asked.iter().filter(move |asked| when.contains(&asked.sent))
    }

    /// Returns the times in which the upstream had more of a tenant than allowed, and the most it had.
    pub(crate) fn over(&self, tenant: usize) -> (Vec<Range<Instant>>, usize) {
        let mut steps = Vec::new();
        for stay in self.stays.iter().filter(|stay| stay.tenant == tenant) {
            steps.push((stay.came, true));
            steps.extend(stay.left.map(|left| (left, false)));
        }
        // At the same moment, an end comes before an arrival.
        steps.sort_unstable();
        let (mut over, mut since) = (Vec::new(), None);
        let (mut in_flight, mut peak) = (0, 0);
        for (at, comes) in steps {
            in_flight = if comes { in_flight + 1 } else { in_flight - 1 };
            peak = peak.max(in_flight);
            match since {
                None if in_flight > LIMIT => since = Some(at),
                Some(from) if in_flight <= LIMIT => {
                    over.push(from..at);
                    since = None;
                }
                _ => {}
            }
        }
        over.extend(since.map(|from| from..Instant::now()));
        (over, peak)
    }

    /// Returns how long this machine stood still in this time.
    pub(crate) fn stalled(&self, when: &Range<Instant>) -> Duration {
        let overlap = |stall: &Range<Instant>| {
            stall.end.min(when.end).saturating_duration_since(stall.start.max(when.start))
        };
        self.stalls.iter().map(overlap).sum()
    }
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap()
}

async fn watch(log: Arc<Mutex<Log>>) {
    const PULSE: Duration = Duration::from_millis(10);
    let mut last = Instant::now();
    loop {
        sleep(PULSE).await;
        let now = Instant::now();
        if now - last > 3 * PULSE {
            lock(&log).stalls.push(last + PULSE..now);
        }
        last = now;
    }
}

// ===== upstream =====

const CHUNK: &str = "chunk\n";

#[derive(Deserialize)]
struct Work {
    #[serde(default)]
    stream_ms: u64,
}

/// A request at the upstream.
struct InFlight {
    log: Arc<Mutex<Log>>,
    stay: usize,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        lock(&self.log).stays[self.stay].left = Some(Instant::now());
    }
}

async fn upstream(log: Arc<Mutex<Log>>) -> String {
    let app = Router::new().fallback(any(work)).with_state(log);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    url
}

async fn work(
    State(log): State<Arc<Mutex<Log>>>,
    Query(work): Query<Work>,
    headers: HeaderMap,
) -> Body {
    let tenant = headers["x-tenant"].to_str().unwrap().strip_prefix("tenant-").unwrap();
    let tenant = tenant.parse().unwrap();
    let is_stream = work.stream_ms > 0;
    let stay = {
        let mut log = lock(&log);
        log.stays.push(Stay { tenant, came: Instant::now(), left: None, is_stream });
        log.stays.len() - 1
    };
    let in_flight = InFlight { log, stay };
    if !is_stream {
        sleep(WORK).await;
        // Before the answer: what comes because of that is not in flight together with it.
        drop(in_flight);
        return Body::from("done");
    }
    let frames = work.stream_ms / u64::try_from(FRAME.as_millis()).unwrap();
    let mut in_flight = Some(in_flight);
    Body::from_stream(futures_util::stream::iter(0..frames).then(move |i| {
        let last = in_flight.take_if(|_| i + 1 == frames);
        async move {
            sleep(FRAME).await;
            drop(last);
            Ok::<_, std::convert::Infallible>(Bytes::from_static(CHUNK.as_bytes()))
        }
    }))
}
