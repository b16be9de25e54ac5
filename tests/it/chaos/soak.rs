//! Soak: the same world for many minutes, with new names all the time, while the memory of all processes is watched.
//!
//! Requests come at a steady rate, whatever becomes of earlier ones. No process ends, so that its memory is one line.
//! The history is checked like that of any run, for the keys with a limit of their own including cap and order.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use serde::Serialize;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};

use super::checker::{self, Report};
use super::history::{At, End, Kind, Run, us};
use super::load::{self, FEW, KEYS, LONG, Load, ONE};
use super::memory::{Series, Verdict, median};
use super::plan::gentle;
use super::world::World;
use super::{Course, Setting, explain, number, target, write};

/// The names except [`KEYS`]: each has one permit.
const TENANTS: usize = KEYS.len();
/// One in this number of the last names comes again now and then, with or without a record by then.
const RECENT: u64 = 5000;
/// An acquire that was cancelled and executed late leaves its key for at most four leases.
const CALM: Duration = Duration::from_secs(5);
const SAMPLE: Duration = Duration::from_secs(1);

/// Below this, a run shows no growth: the first burst after a freeze adds some MiB at once.
const SHORT: Duration = Duration::from_secs(600);

/// What a process may add, in MiB. In 20 minutes at 200 requests/s, each gateway serves 60 000 requests of 40 000 names
/// between the times that are compared: 3 MiB are 50 bytes a request, less than any record takes. Below that is what an
/// allocator keeps of a peak.
const RSS: f64 = 3.0;
/// The same for what Redis counts exactly: MiB, and keys.
const USED: f64 = 0.5;
const LEFT: f64 = 50.0;

/// One sample of all processes; memory in MiB.
struct Sample {
    at: Duration,
    gateways: Vec<f64>,
    redis: f64,
    used: f64,
    keys: f64,
}

/// By medians, except for exact counts.
#[derive(Debug, Default, Serialize)]
struct Minute {
    requests: usize,
    ok: usize,
    refused: usize,
    unavailable: usize,
    /// Cut, or left by their clients.
    unfinished: usize,
    faults: usize,
    gateways_mib: Vec<f64>,
    redis_mib: f64,
    redis_used_mib: f64,
    keys: f64,
}

#[derive(Debug, Serialize)]
struct Soak {
    seed: u64,
    seconds: u64,
    rate: u32,
    /// The number of names.
    names: u64,
    verdicts: Vec<Verdict>,
    minutes: Vec<Minute>,
    report: Report,
}

/// Sends requests until it is stopped. Returns the number of their names.
async fn press(load: Arc<Load>, seed: u64, rate: u32) -> u64 {
    let mut rng = Rng::with_seed(!seed);
    let mut names: u64 = 0;
    let mut requests = JoinSet::new();
    let mut next = interval(Duration::from_secs(1) / rate);
    while !load.stop.load(Ordering::Relaxed) {
        next.tick().await;
        while let Some(done) = requests.try_join_next() {
            done.unwrap();
        }
        let key = match rng.u32(..1000) {
            0..120 => ONE,
            120..240 => FEW,
            // A little more than its three permits can serve.
            240..255 => LONG,
            _ => TENANTS,
        };
        let name = match KEYS.get(key) {
            Some(name) => (*name).to_owned(),
            None if names > 0 && rng.u8(..3) == 0 => {
                format!("tenant {}", rng.u64(names.saturating_sub(RECENT)..names))
            }
            None => {
                names += 1;
                format!("tenant {}", names - 1)
            }
        };
        let kind = if key == TENANTS { kind(&mut rng) } else { load::kind(&mut rng, key) };
        let (load, mut rng) = (Arc::clone(&load), rng.fork());
        requests.spawn(async move { load.request_of(key, &name, kind, &mut rng).await });
    }
    requests.join_all().await;
    names + u64::try_from(KEYS.len()).unwrap()
}

fn kind(rng: &mut Rng) -> Kind {
    match rng.u16(..1000) {
        0..4 => Kind::Slow,
        4..24 => Kind::Leaving,
        24..44 => Kind::Stream,
        44..94 => Kind::Impatient,
        94..194 => Kind::Post,
        _ => Kind::Short,
    }
}

/// Returns the memory of a process, in MiB.
fn rss(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<f64>().unwrap() / 1024.0
}

/// Samples all processes every second, or as soon as Redis answers.
async fn watch(world: Arc<World>, began: Instant, samples: Arc<Mutex<Vec<Sample>>>) {
    let pids = world.pids().await;
    let mut next = interval(SAMPLE);
    next.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        next.tick().await;
        let gateways = pids.iter().map(|pid| rss(*pid)).collect();
        // Holding this keeps faults away from Redis.
        let servers = world.redis.lock().await;
        let redis = servers.one();
        let sample = block_in_place(|| {
            let info: String = redis.command(&["INFO", "memory"]);
            let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
            Sample {
                at: began.elapsed(),
                gateways,
                redis: rss(redis.pid()),
                used: used.parse::<f64>().unwrap() / f64::from(1 << 20),
                keys: redis.keys() as f64,
            }
        });
        drop(servers);
        samples.lock().unwrap().push(sample);
    }
}

async fn soak(seed: u64, length: Duration, rate: u32) -> Soak {
    println!("seed {seed}, {length:?}, {rate} requests/s");
    let course = Course::begin(Setting::default()).await;
    let (began, start) = (Instant::now(), course.recorder.now());
    let samples = Arc::<Mutex<Vec<Sample>>>::default();
    let watching = tokio::spawn(watch(Arc::clone(&course.world), began, Arc::clone(&samples)));
    let pressing = tokio::spawn(press(Arc::clone(&course.load), seed, rate));
    course.faults(gentle(seed, length)).await;
    sleep_until(began + length).await;
    watching.abort();
    sleep(CALM).await;
    course.load.stop.store(true, Ordering::Relaxed);
    let names = pressing.await.unwrap();
    let run = course.end(seed).await;

    let report = checker::check(&run);
    explain(seed, &run, &report);
    let samples = std::mem::take(&mut *samples.lock().unwrap());
    let verdicts = series(&samples).iter().map(|series| series.verdict(length)).collect();
    let minutes = minutes(&run, start, length, &samples);
    Soak { seed, seconds: length.as_secs(), rate, names, verdicts, minutes, report }
}

fn series(samples: &[Sample]) -> Vec<Series> {
    let of = |what: String, allowed, much: &dyn Fn(&Sample) -> f64| {
        let samples = samples.iter().map(|sample| (sample.at, much(sample))).collect();
        Series { what, allowed, samples }
    };
    let gateways = samples.first().map_or(0, |sample| sample.gateways.len());
    let mut all: Vec<_> = (0..gateways)
        .map(|g| of(format!("gateway {g}, MiB"), RSS, &|sample| sample.gateways[g]))
        .collect();
    all.push(of("Redis, MiB".to_owned(), RSS, &|sample| sample.redis));
    all.push(of("Redis, MiB it counts".to_owned(), USED, &|sample| sample.used));
    all.push(of("keys".to_owned(), LEFT, &|sample| sample.keys));
    all
}

fn minutes(run: &Run, start: At, length: Duration, samples: &[Sample]) -> Vec<Minute> {
    const MINUTE: Duration = Duration::from_secs(60);
    let count = length.as_secs().div_ceil(60);
    let minute_of = |at: At| usize::try_from(at.saturating_sub(start) / us(MINUTE)).unwrap();
    let mut minutes: Vec<Minute> = (0..count).map(|_| Minute::default()).collect();
    for request in &run.requests {
        let Some(minute) = minutes.get_mut(minute_of(request.sent)) else { continue };
        minute.requests += 1;
        match request.head {
            Some((_, 200)) => minute.ok += 1,
            Some((_, 429)) => minute.refused += 1,
            Some((_, 503)) => minute.unavailable += 1,
            _ => {}
        }
        let whole = matches!(request.end, Some((_, End::Whole)));
        minute.unfinished += usize::from(!whole);
    }
    for fault in &run.faults {
        if let Some(minute) = minutes.get_mut(minute_of(fault.begin)) {
            minute.faults += 1;
        }
    }
    for (number, minute) in (0..).zip(&mut minutes) {
        let span = MINUTE * number..MINUTE * (number + 1);
        let of_it: Vec<_> = samples.iter().filter(|sample| span.contains(&sample.at)).collect();
        let median_of = |much: &dyn Fn(&Sample) -> f64| {
            median(of_it.iter().map(|sample| much(sample))).unwrap_or(f64::NAN)
        };
        let gateways = of_it.first().map_or(0, |sample| sample.gateways.len());
        minute.gateways_mib =
            (0..gateways).map(|g| median_of(&|sample| sample.gateways[g])).collect();
        minute.redis_mib = median_of(&|sample| sample.redis);
        minute.redis_used_mib = median_of(&|sample| sample.used);
        minute.keys = median_of(&|sample| sample.keys);
    }
    minutes
}

impl fmt::Display for Soak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.report)?;
        writeln!(f, "{} names", self.names)?;
        writeln!(
            f,
            "minute requests     200    429    503 unfinished faults  gateways, MiB          Redis, MiB  counted  keys"
        )?;
        for (number, minute) in self.minutes.iter().enumerate() {
            let gateways = minute.gateways_mib.iter().map(|mib| format!("{mib:6.2}"));
            writeln!(
                f,
                "{number:>6} {:>8} {:>7} {:>6} {:>6} {:>10} {:>6}  {:<22} {:>10.2} {:>8.2} {:>5}",
                minute.requests,
                minute.ok,
                minute.refused,
                minute.unavailable,
                minute.unfinished,
                minute.faults,
                gateways.collect::<Vec<_>>().join(" "),
                minute.redis_mib,
                minute.redis_used_mib,
                minute.keys,
            )?;
        }
        for verdict in &self.verdicts {
            writeln!(f, "{verdict}")?;
        }
        Ok(())
    }
}

/// By hand, through `tests/long soak`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: ./tests/long soak --minutes 20"]
async fn long() {
    let seed = number("SOAK_SEED").unwrap_or_else(|| fastrand::u64(..1 << 32));
    let minutes = number("SOAK_MINUTES").unwrap_or(20);
    let rate = number("SOAK_RATE").unwrap_or(200).try_into().expect("a rate that can be had");
    let soak = soak(seed, Duration::from_secs(60 * minutes), rate).await;
    print!("{soak}");
    let text = serde_json::to_string_pretty(&soak).unwrap();
    write("report", &target().join(format!("soak-{seed}.json")), &text);
    let violations = soak.report.violations.len();
    let mut growing = soak.verdicts.iter().filter(|verdict| !verdict.flat).count();
    if soak.seconds < SHORT.as_secs() {
        println!("growth is not judged: that takes {SHORT:?}");
        growing = 0;
    }
    assert!(violations == 0 && growing == 0, "{violations} violations, {growing} not flat");
}
