//! Chaos: real gateways on one Redis, a fault every few hundred ms, and a checker that reads the result.
//!
//! Requests can name a model, of which each key has a few permits beside its limit. One key has a rate, and one a budget. The upstream of another asks for pauses, and an operator ends some of them. The
//! limit of that key can find itself.
//!
//! A run has a seed, which decides its schedule of faults: the same seed gives the same schedule. What the clients meet
//! still depends on the machine.

#![allow(clippy::print_stdout, reason = "a run's report is for its reader")]

mod checker;
mod history;
mod load;
mod memory;
mod observer;
mod plan;
mod planted;
mod servers;
mod soak;
mod world;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet, block_in_place};
use tokio::time::{Instant, sleep, sleep_until};

use self::checker::Report;
use self::history::{At, Budget, Fair, Kind, Rate, Recorder, Rules, Run, us};
use self::load::{ESTIMATE, KEYS, LIMITS, Load, ONE, PAUSED, RATED, SPENT, name, rule};
use self::plan::{Planned, SLOTS, Shape, plan};
use self::world::{LEASE, MAX_PAUSES, WAIT, World};
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway};
use crate::support::redis::TestRedis;

/// How long the load goes on after the last fault has ended.
const CALM: Duration = Duration::from_millis(3500);

/// The cap of each tenant of a key, if there are tenants.
const TENANTS: usize = 4;

/// Notes when this process itself could not run.
async fn watch_stalls(recorder: Arc<Recorder>) {
    const PULSE: At = 10_000;
    let mut last = recorder.now();
    loop {
        sleep(Duration::from_micros(PULSE)).await;
        let now = recorder.now();
        if now - last > 3 * PULSE {
            recorder.lock().stalls.push((last + PULSE, now));
        }
        last = now;
    }
}

/// What runs differ in.
#[derive(Clone, Copy, Debug, Default)]
struct Setting {
    shape: Shape,
    fair: Fair,
    /// The number of gateways that pass permits on.
    reuse: usize,
    /// How many permits of a key the requests with one model may have, if that is limited.
    also: Option<usize>,
}

/// Runs from beginning to end.
struct Course {
    recorder: Arc<Recorder>,
    world: Arc<World>,
    load: Arc<Load>,
    stalls: JoinHandle<()>,
    observer: JoinSet<()>,
}

/// The rates of the keys. Redis notes when it granted a permit with a rate, so the key with pauses has one, which is
/// never used up, unless its permits are to be passed on.
fn rates(reuse: usize) -> Vec<Option<Rate>> {
    let window = us(Duration::from_secs(1));
    let mut rates = vec![None; KEYS.len()];
    rates[RATED] = Some(Rate { starts: 20, window });
    rates[PAUSED] = (reuse == 0).then_some(Rate { starts: 1000, window });
    rates
}

/// The budgets of the keys: 50 a second, all tenants together.
fn budgets(fair: Fair) -> Vec<Option<Budget>> {
    let mut budgets = vec![None; KEYS.len()];
    let refill = us(Duration::from_secs(if fair == Fair::Arrival { 1 } else { 4 }));
    budgets[SPENT] = Some(Budget { burst: 50, refill, most: ESTIMATE });
    budgets
}

/// Ends some of the pauses, sooner or later after they began, until the faults are over.
async fn operate(course: &Course, is_over: &AtomicBool, seed: u64) {
    let semaphore = course.world.redis.lock().await.semaphore();
    let (recorder, mut rng, mut known) = (&course.recorder, Rng::with_seed(seed ^ 1), 0);
    while !is_over.load(Ordering::Relaxed) {
        sleep(Duration::from_millis(10)).await;
        let pauses = recorder.lock().pauses.len();
        if pauses == known || rng.u8(..3) > 0 {
            known = pauses;
            continue;
        }
        sleep(Duration::from_millis(rng.u64(..400))).await;
        let begin = recorder.now();
        let index = {
            let mut run = recorder.lock();
            known = run.pauses.len();
            run.resumes.push((begin, At::MAX));
            run.resumes.len() - 1
        };
        // One that fails may have been carried out.
        let _ = semaphore.resume(name(PAUSED)).await;
        recorder.lock().resumes[index].1 = recorder.now();
    }
    semaphore.shutdown().await;
}

impl Course {
    async fn begin(Setting { shape, fair, reuse, also }: Setting) -> Self {
        let limits = LIMITS.to_vec();
        let [.., longest] = MAX_PAUSES;
        let rules = Rules {
            limits,
            rates: rates(reuse),
            budgets: budgets(fair),
            max_pause: us(longest),
            wait: us(WAIT),
            lease: us(LEASE),
            shape,
            fair,
            reuse,
            adaptive: number("CHAOS_ADAPTIVE").map(|_| PAUSED),
            also,
        };
        let recorder = Arc::new(Recorder::new(rules));
        let world = World::start(Arc::clone(&recorder)).await;
        // Each gateway has a connection before it counts.
        let client = Client::new();
        let addresses = *world.addresses.lock().unwrap();
        for (_, address) in addresses.into_iter().flatten() {
            let number = "0";
            recorder.sent(warm_up());
            let request = http::Request::get(format!("http://{address}/{}", rule(ONE)));
            let _ =
                client.send(request.header("x-key", KEYS[ONE]).header("x-number", number)).await;
        }
        recorder.lock().requests.clear();
        let stalls = tokio::spawn(watch_stalls(Arc::clone(&recorder)));
        let load = Arc::new(Load {
            recorder: Arc::clone(&recorder),
            addresses: Arc::clone(&world.addresses),
            stop: AtomicBool::new(false),
            tenants: if fair == Fair::Arrival { 1 } else { TENANTS },
            models: also.is_some(),
            bursts: reuse > 0,
            next_pause: AtomicU64::new(u64::MAX),
        });
        let urls = world.redis.lock().await.urls();
        let observer = observer::observe(&recorder, urls);
        Self { recorder, world, load, stalls, observer }
    }

    /// Carries out all faults, each at its time.
    async fn faults(&self, plan: Vec<Planned>) {
        let began = Instant::now();
        let mut faults = JoinSet::new();
        for planned in plan {
            sleep_until(began + planned.at).await;
            let victim = self.world.victim(&planned).await;
            let world = Arc::clone(&self.world);
            faults.spawn(async move { world.happen(planned, victim).await });
        }
        faults.join_all().await;
    }

    /// Returns, after the last of the load has ended, what is left, and the whole history.
    async fn end(self, seed: u64) -> Run {
        let Self { recorder, world, load, stalls, observer } = self;
        // A dead place in a semaphore that is not full is swept by no call, so all are filled once more.
        let mut rng = Rng::with_seed(seed);
        let burst = (0..KEYS.len()).flat_map(|key| [key; 12]).map(|key| {
            let (load, mut rng) = (&load, rng.fork());
            async move { load.request(key, Kind::Short, &mut rng).await }
        });
        join_all(burst).await;

        let redis = world.redis.lock().await;
        let until = Instant::now() + Duration::from_secs(8);
        let Rules { rates, budgets, .. } = recorder.lock().rules.clone();
        let is_kept = |n: &usize| rates[*n].is_some() || budgets[*n].is_some();
        let kept = |key: &String| {
            let mut names = (0..KEYS.len()).filter(is_kept).map(name);
            names.any(|name| key.contains(&format!("{{{name}}}")))
        };
        let (mut empty, mut forgotten, mut left) = (None, None, Vec::new());
        while forgotten.is_none() && Instant::now() < until {
            left = block_in_place(|| redis.left());
            // It is remembered for an hour that pauses were ended, and for ten minutes how a limit was found.
            left.retain(|key| !key.starts_with("semaphore:{!overrides}:"));
            if left.iter().all(&kept) {
                empty = empty.or_else(|| Some(recorder.now()));
            }
            forgotten = left.is_empty().then(|| recorder.now());
            sleep(Duration::from_millis(10)).await;
        }
        if forgotten.is_none() {
            println!("left in Redis: {left:?}");
        }
        stalls.abort();
        drop(observer);
        let mut run = recorder.lock().clone();
        (run.empty, run.forgotten) = (empty, forgotten);
        let stays = run.requests.iter().flat_map(|request| &request.stays);
        run.in_flight_left = stays.filter(|stay| stay.to.is_none()).count();
        run
    }
}

async fn run(setting: Setting, seed: u64, length: Duration) -> Run {
    println!("{setting:?}, seed {seed}, {length:?} of faults");
    let course = Course::begin(setting).await;
    let clients = course.load.start(seed);
    let is_over = AtomicBool::new(false);
    let faults = async {
        course.faults(plan(setting.shape, seed, length)).await;
        is_over.store(true, Ordering::Relaxed);
    };
    tokio::join!(faults, operate(&course, &is_over, seed));
    // One that nothing disturbs, so that each run has a pause to judge.
    course.load.ask_for_pause();
    sleep(CALM).await;
    course.load.stop.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    course.end(seed).await
}

fn warm_up() -> history::Request {
    history::Request {
        key: ONE,
        tenant: 0,
        model: None,
        gateway: 0,
        kind: Kind::Short,
        work: 0,
        stream: 0,
        later: false,
        estimate: 0,
        used: 0,
        sent: 0,
        stays: Vec::new(),
        head: None,
        last_frame: None,
        end: None,
    }
}

/// Returns the directory of the build's other results.
fn target() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}

fn write(what: &str, path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    println!("{what}: {}", path.display());
}

/// Prints the report and writes it; with the whole history, if something was wrong.
fn publish(seed: u64, run: &Run, report: &Report) {
    print!("{report}");
    let text = serde_json::to_string_pretty(report).unwrap();
    write("report", &target().join(format!("chaos-{seed}.json")), &text);
    explain(seed, run, report);
}

/// Prints violations.
fn explain(seed: u64, run: &Run, report: &Report) {
    if !report.violations.is_empty() {
        let text = serde_json::to_string(run).unwrap();
        write("history", &target().join(format!("chaos-{seed}-history.json")), &text);
        for violation in report.violations.iter().take(3) {
            println!("{}", checker::around(run, violation));
        }
    }
}

/// Returns a number from the environment.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

async fn chaos(setting: Setting, seed: u64, length: Duration) -> Report {
    let run = run(setting, seed, length).await;
    let report = checker::check(&run);
    publish(seed, &run, &report);
    assert!(report.violations.is_empty(), "seed {seed}: {} violations", report.violations.len());
    report
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short() {
    let report =
        chaos(Setting { reuse: 2, ..Setting::default() }, 3, Duration::from_secs(18)).await;
    // The run must have met these.
    assert!(report.granted > 500, "{} granted", report.granted);
    assert!(report.compared > 100, "{} compared", report.compared);
    assert!(report.faults.len() >= 10, "{:?}", report.faults);
    // The rate was used up, and a grant in a pause would have been found.
    assert!(report.starts[0].count > 100 && report.starts[0].most >= 20, "{:?}", report.starts);
    assert!(report.pauses.judged_ms > 100.0, "{:?}", report.pauses);
    // The budget was used up, too.
    assert!(report.budgets[0].used > 300 && report.budgets[0].peak > 30, "{:?}", report.budgets);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_with_tenants() {
    let report =
        chaos(Setting { fair: Fair::Each(2), ..Setting::default() }, 5, Duration::from_secs(14))
            .await;
    assert!(report.granted > 300, "{} granted", report.granted);
    assert!(report.faults.len() >= 8, "{:?}", report.faults);
    assert!(report.starts.iter().all(|starts| starts.count > 50), "{:?}", report.starts);
    assert!(report.pauses.judged_ms > 100.0, "{:?}", report.pauses);
    assert_eq!(report.budgets.len(), TENANTS, "one of each tenant");
    assert!(report.budgets.iter().any(|spent| spent.peak > 30), "{:?}", report.budgets);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_with_further_limits() {
    let setting = Setting { fair: Fair::Shares, also: Some(2), ..Setting::default() };
    let report = chaos(setting, 7, Duration::from_secs(14)).await;
    assert!(report.granted > 300, "{} granted", report.granted);
    assert!(report.faults.len() >= 8, "{:?}", report.faults);
    assert!(report.compared > 50, "{} compared", report.compared);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_on_a_cluster() {
    on_several(Shape::Cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_on_sentinel() {
    on_several(Shape::Sentinel).await;
}

async fn on_several(shape: Shape) {
    let reuse = if shape == Shape::Cluster { SLOTS } else { 0 };
    let setting = Setting { shape, reuse, ..Setting::default() };
    let report = chaos(setting, 3, Duration::from_secs(14)).await;
    assert!(report.granted > 300, "{} granted", report.granted);
    assert!(report.faults.len() >= 4, "{:?}", report.faults);
    assert!(report.starts.iter().all(|starts| starts.count > 50), "{:?}", report.starts);
    assert!(report.pauses.recorded > 0, "{:?}", report.pauses);
}

/// Found by seed 21: while the client reads nothing, no task polls the body for frames, so the body does not learn that
/// the lease is lost; the upstream works on, beside the request that got the permit next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_nobody_reads_is_cut_when_its_lease_is_lost() {
    let recorder = Arc::new(Recorder::new(Rules::default()));
    let upstream = load::upstream(Arc::clone(&recorder)).await;
    let mut redis = TestRedis::start();
    let args = ["--redis", &redis.url(), "--limit", "1", "--lease", "1s"];
    let gateway = block_in_place(|| Gateway::start(&upstream, &args));
    recorder.sent(warm_up());
    let mut client =
        TcpStream::connect(gateway.url().strip_prefix("http://").unwrap()).await.unwrap();
    let request = format!("GET /?bytes={} HTTP/1.1\r\nhost: x\r\nx-number: 0\r\n\r\n", load::MUCH);
    client.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), b'H');
    // Past this, the buffers on the way are full.
    sleep(Duration::from_millis(500)).await;
    assert!(recorder.lock().requests[0].stays[0].to.is_none());
    redis.kill();
    let killed = Instant::now();
    eventually("the upstream is left", async || recorder.lock().requests[0].stays[0].to.is_some())
        .await;
    let took = killed.elapsed();
    assert!(took < 2 * LEASE, "cut {took:?} after Redis was gone, with a lease of {LEASE:?}");
    drop(client);
}

/// By hand, through `tests/long chaos`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: ./tests/long chaos --minutes 10"]
async fn long() {
    let seed = number("CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..1 << 32));
    let minutes = number("CHAOS_MINUTES").unwrap_or(10);
    let shape = match std::env::var("CHAOS_SHAPE").as_deref() {
        Ok("cluster") => Shape::Cluster,
        Ok("sentinel") => Shape::Sentinel,
        _ => Shape::One,
    };
    let fair = match (std::env::var_os("CHAOS_FAIR_BY"), number("CHAOS_EACH")) {
        (None, _) => Fair::Arrival,
        (Some(_), None) => Fair::Shares,
        (Some(_), Some(each)) => Fair::Each(each.try_into().expect("a few")),
    };
    let reuse = number("CHAOS_REUSE").map_or(0, |reuse| reuse.try_into().expect("a few"));
    let also = number("CHAOS_ALSO").map(|also| also.try_into().expect("a few"));
    let setting = Setting { shape, fair, reuse, also };
    chaos(setting, seed, Duration::from_secs(60 * minutes)).await;
}
