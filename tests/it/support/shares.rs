//! Tenants that load one semaphore, and what each of them got: in one line, or as tenants.
//!
//! On Tokio's paused clock the figures depend only on the rules.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tower_semaphore::{Ask, Policy, Semaphore};

/// The order in which requests are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// First come, first served.
    Arrival,
    Shares,
}

/// The requests of a tenant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) tenant: &'static str,
    pub(crate) clients: Clients,
    /// How long a permit is held, give or take a fifth.
    pub(crate) hold: Duration,
    pub(crate) weight: u32,
    pub(crate) class: u8,
    pub(crate) cost: u32,
    pub(crate) each: Option<u32>,
    /// When the first request comes, and after when none comes.
    pub(crate) during: (Duration, Duration),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Clients {
    /// This number of requests at once, and no more.
    Once(usize),
    /// This number of clients, each of which makes its next request at once.
    Again(usize),
    /// One request after this time on average, whatever becomes of earlier ones.
    Every(Duration),
}

impl Load {
    pub(crate) const fn new(tenant: &'static str, clients: Clients, hold_ms: u64) -> Self {
        Self {
            tenant,
            clients,
            hold: Duration::from_millis(hold_ms),
            weight: 1,
            class: 0,
            cost: 1,
            each: None,
            during: (Duration::ZERO, Duration::MAX),
        }
    }

    fn ask(&self, order: Order, is_costly: bool) -> Ask {
        let ask = Ask::of("quota");
        match order {
            // All in one line, if some of them take more than one permit.
            Order::Arrival if is_costly => ask.by("all").cost(self.cost),
            Order::Arrival => ask,
            Order::Shares => {
                let ask = ask.by(self.tenant).weight(self.weight).class(self.class);
                let ask = ask.cost(self.cost);
                if let Some(each) = self.each { ask.each(each) } else { ask }
            }
        }
    }
}

/// Some tenants, and what they share.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) permits: u32,
    pub(crate) headroom: u32,
    pub(crate) loads: Vec<Load>,
    pub(crate) length: Duration,
    /// Requests before this are not evaluated, because the line still has to fill.
    pub(crate) from: Duration,
}

impl Scenario {
    fn new(permits: u32, loads: impl Into<Vec<Load>>, from_ms: u64, length_ms: u64) -> Self {
        let [from, length] = [from_ms, length_ms].map(Duration::from_millis);
        Self { permits, headroom: 0, loads: loads.into(), length, from }
    }
}

/// One request, in time since the beginning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stay {
    pub(crate) asked: Duration,
    /// When it got its permits, if it did, and when they were freed.
    pub(crate) held: Option<(Duration, Duration)>,
}

/// The result of a tenant.
#[derive(Clone, Debug)]
pub(crate) struct Got {
    pub(crate) load: Load,
    pub(crate) stays: Vec<Stay>,
    window: (Duration, Duration),
}

impl Got {
    /// How long its requests that came after the beginning waited, in holds, sorted. Those that never got a permit
    /// waited until the end.
    pub(crate) fn waits(&self) -> Vec<f64> {
        let (from, to) = self.window;
        let stays = self.stays.iter().filter(|stay| stay.asked >= from);
        let wait = |stay: &Stay| stay.held.map_or(to, |held| held.0).saturating_sub(stay.asked);
        let mut waits: Vec<_> =
            stays.map(|stay| wait(stay).as_secs_f64() / self.load.hold.as_secs_f64()).collect();
        waits.sort_by(f64::total_cmp);
        waits
    }

    /// Returns the permits that it had in use on average.
    pub(crate) fn in_use(&self) -> f64 {
        self.in_use_between(self.window.0, self.window.1)
    }

    pub(crate) fn in_use_between(&self, from: Duration, to: Duration) -> f64 {
        let held = self.stays.iter().filter_map(|stay| stay.held);
        let time: f64 =
            held.map(|(a, b)| b.min(to).saturating_sub(a.max(from)).as_secs_f64()).sum();
        time * f64::from(self.load.cost) / (to - from).as_secs_f64()
    }
}

/// Returns the value below which this percentage of values lies.
pub(crate) fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted.len().checked_sub(1).map_or(f64::NAN, |last| sorted[last * percent / 100])
}

/// 1 if all are alike; 1/n if one has everything.
pub(crate) fn jain(values: &[f64]) -> f64 {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
    sum * sum / (values.len() as f64 * squares)
}

/// Returns what each tenant gets, in the order of the loads.
pub(crate) async fn run(semaphore: &Semaphore, scenario: &Scenario, order: Order) -> Vec<Got> {
    let policy = Policy::builder(scenario.permits)
        .headroom(if order == Order::Shares { scenario.headroom } else { 0 })
        .wait_timeout(Policy::MAX_WAIT_TIMEOUT)
        .build()
        .expect("a policy");
    let is_costly = scenario.loads.iter().any(|load| load.cost > 1);
    let semaphore = semaphore.clone();
    run_with(scenario, move |load| {
        let permit = semaphore.acquire(load.ask(order, is_costly), &policy);
        async move { permit.await.expect("a permit") }
    })
    .await
}

/// The same, for anything that grants permits.
pub(crate) async fn run_with<A, F, P>(scenario: &Scenario, acquire: A) -> Vec<Got>
where
    A: Fn(&Load) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = P> + Send + 'static,
    P: Send + 'static,
{
    let stage = Stage { began: Instant::now(), end: Instant::now() + scenario.length };
    let mut rng = Rng::with_seed(7);
    let mut all = Vec::new();
    for load in &scenario.loads {
        let stays = Arc::<Mutex<Vec<Stay>>>::default();
        let (acquire, load) = (acquire.clone(), *load);
        let tenant = Tenant { acquire, load, stays: Arc::clone(&stays), stage };
        all.push((load, stays, tokio::spawn(tenant.press(rng.fork()))));
    }
    let mut got = Vec::new();
    for (load, stays, task) in all {
        task.await.expect("no panic");
        let stays = std::mem::take(&mut *stays.lock().expect("no panic"));
        got.push(Got { load, stays, window: (scenario.from, scenario.length) });
    }
    got
}

#[derive(Clone, Copy)]
struct Stage {
    began: Instant,
    end: Instant,
}

#[derive(Clone)]
struct Tenant<A> {
    acquire: A,
    load: Load,
    stays: Arc<Mutex<Vec<Stay>>>,
    stage: Stage,
}

impl<A, F, P> Tenant<A>
where
    A: Fn(&Load) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = P> + Send + 'static,
    P: Send + 'static,
{
    async fn press(self, mut rng: Rng) {
        let Stage { began, end } = self.stage;
        let (first, last) = self.load.during;
        let last = began + last.min(end - began);
        sleep_until(began + first).await;
        let mut tasks = JoinSet::new();
        match self.load.clients {
            Clients::Once(count) => {
                for _ in 0..count {
                    let (tenant, mut rng) = (self.clone(), rng.fork());
                    tasks.spawn(async move { tenant.request(&mut rng).await });
                }
            }
            Clients::Again(count) => {
                for _ in 0..count {
                    let (tenant, mut rng) = (self.clone(), rng.fork());
                    tasks.spawn(async move {
                        while Instant::now() < last {
                            tenant.request(&mut rng).await;
                        }
                    });
                }
            }
            Clients::Every(mean) => loop {
                sleep(mean.mul_f64(2.0 * rng.f64())).await;
                if Instant::now() >= last {
                    break;
                }
                let (tenant, mut rng) = (self.clone(), rng.fork());
                tasks.spawn(async move { tenant.request(&mut rng).await });
            },
        }
        tasks.join_all().await;
    }

    /// Makes one request, until the end of the run if necessary.
    async fn request(&self, rng: &mut Rng) {
        let Stage { began, end } = self.stage;
        let asked = began.elapsed();
        let hold = self.load.hold.mul_f64(0.8 + 0.4 * rng.f64());
        let held = match timeout_at(end, (self.acquire)(&self.load)).await {
            Ok(permit) => {
                let from = began.elapsed();
                sleep_until(end.min(Instant::now() + hold)).await;
                drop(permit);
                Some((from, began.elapsed()))
            }
            Err(_) => None,
        };
        self.stays.lock().expect("no panic").push(Stay { asked, held });
    }
}

// ===== the loads with promised figures =====

const OTHERS: [&str; 9] = ["B", "C", "D", "E", "F", "G", "H", "I", "J"];

/// A queues a thousand requests; nine others make ten each second.
pub(crate) fn backlog() -> Scenario {
    let mut loads = vec![Load::new("A", Clients::Once(1000), 20)];
    let every = Clients::Every(Duration::from_millis(100));
    loads.extend(OTHERS.map(|tenant| Load::new(tenant, every, 20)));
    Scenario::new(10, loads, 200, 2000)
}

/// Returns the waits of all but the first, together and sorted.
pub(crate) fn others(got: &[Got]) -> Vec<f64> {
    let mut waits: Vec<_> = got[1..].iter().flat_map(Got::waits).collect();
    waits.sort_by(f64::total_cmp);
    waits
}

/// A holds for 300 ms and always has more; B has ten clients of 10 ms.
pub(crate) fn long_and_short() -> Scenario {
    let a = Load::new("A", Clients::Again(50), 300);
    let b = Load::new("B", Clients::Again(10), 10);
    Scenario::new(10, [a, b], 1000, 20_000)
}

/// Five tenants that always have more, each with holds twice as long as the previous one.
pub(crate) fn holds() -> Scenario {
    let tenants = [("A", 10), ("B", 20), ("C", 40), ("D", 80), ("E", 160)];
    let loads = tenants.map(|(tenant, ms)| Load::new(tenant, Clients::Again(20), ms));
    Scenario::new(10, loads, 1000, 20_000)
}

pub(crate) fn weights() -> Scenario {
    let a = Load { weight: 3, ..Load::new("A", Clients::Again(30), 20) };
    let b = Load::new("B", Clients::Again(30), 20);
    Scenario::new(12, [a, b], 200, 10_000)
}

/// 64 clients that take one permit, and a request for all of them once a second.
pub(crate) fn costs() -> Scenario {
    let small = Load::new("small", Clients::Again(64), 10);
    let every = Clients::Every(Duration::from_secs(1));
    let big = Load { cost: 16, ..Load::new("big", every, 10) };
    Scenario::new(16, [small, big], 100, 20_000)
}

/// A always has more, and B comes for a part of the time; neither has more than four.
pub(crate) fn caps() -> Scenario {
    let a = Load { each: Some(4), ..Load::new("A", Clients::Again(50), 20) };
    let during = (Duration::from_millis(500), Duration::from_millis(1500));
    let b = Load { each: Some(4), during, ..Load::new("B", Clients::Again(20), 20) };
    Scenario::new(10, [a, b], 200, 2000)
}

/// Batches wait while others do, and leave two permits to them.
pub(crate) fn classes() -> Scenario {
    let batch = Load { class: 1, ..Load::new("batch", Clients::Again(50), 60) };
    let during = (Duration::from_millis(500), Duration::from_millis(1500));
    let every = Clients::Every(Duration::from_millis(5));
    let chat = Load { during, ..Load::new("chat", every, 20) };
    Scenario { headroom: 2, ..Scenario::new(10, [batch, chat], 200, 2000) }
}
