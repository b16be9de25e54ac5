//! Two processes of 32 tasks each contend for ten permits, and hold each for a moment.
//!
//! Measures how much of the time permits are in use, how fast they are handed over, and whether any request is passed
//! over, beside Tokio's semaphore with 64 tasks in one process, which is the best possible. A hold of 1 ms is 2 ms by
//! Tokio's timers, so the measured mean is used.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_redis::redis::aio::MultiplexedConnection;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tower_semaphore::{Permit, Policy, Semaphore};

use super::child::{self, Child, Parent};
use super::naive::{Naive, NaivePermit};
use super::plots;
use super::redis::{Redis, connect};
use super::stats::{each, max, mean, median, micros, quantile};
use super::table::{Bound, Row, number};
use super::{Context, clock, runtime};

const CASE: &str = "contended";
const LIMIT: u32 = 10;
const TASKS: u32 = 64;
const HOLD: Duration = Duration::from_millis(1);
/// The first requests of each task, which did not find a full queue.
const WARM_UP_NS: i64 = 200_000_000;

#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    side: Side,
    /// The port of the Redis server.
    url: String,
    /// The index of this process.
    process: u32,
    tasks: u32,
    time: Duration,
}

/// What grants the permits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Side {
    /// This crate, with releases that are not awaited.
    Dropped,
    /// This crate, with releases that are awaited.
    Acknowledged,
    /// The hand-written queue.
    Naive,
    Tokio,
}

const SIDES: [Side; 4] = [Side::Dropped, Side::Acknowledged, Side::Naive, Side::Tokio];

/// The times of one permit, by the clock of the machine.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Stay {
    called: i64,
    granted: i64,
    released: i64,
}

/// The figures of one round.
struct Round {
    use_share: f64,
    hold_ms: f64,
    /// The time from a release to the next holder, in µs.
    hand_offs: Vec<f64>,
    /// In ms.
    waits: Vec<f64>,
    grants: f64,
    passed_over: f64,
    overshoots: f64,
    ping: f64,
    scripts: f64,
    cpu: f64,
    per_script: f64,
}

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let time = context.seconds(1.2, 6.0);
    let mut seen: [Vec<Round>; 4] = Default::default();
    for round in 0..3 {
        let mut sides = SIDES;
        sides.rotate_left(round);
        for side in sides {
            seen[side as usize].push(self::round(&redis, side, time));
        }
    }
    let [ours, acknowledged, naive, tokio] = seen;
    rows(context, &ours, &acknowledged, &naive, &tokio);

    let all = |rounds: &[Round], of: fn(&Round) -> &Vec<f64>| -> Vec<f64> {
        rounds.iter().flat_map(of).copied().collect()
    };
    let ours_name = "tower-semaphore, two processes";
    let naive_name = "queue by hand, two processes";
    let tokio_name = "Tokio's semaphore, one process";
    for (file, title, axis, of) in [
        (
            "waits.svg",
            "Waiting for one of ten permits, 64 tasks",
            "ms from call to permit",
            (|round| &round.waits) as fn(&Round) -> &Vec<f64>,
        ),
        ("hand-off.svg", "From a release to the next holder", "µs", |round| &round.hand_offs),
    ] {
        plots::lines(
            &context.directory.join(file),
            title,
            (axis, "share"),
            &[
                plots::distribution(ours_name, &all(&ours, of)),
                plots::distribution(naive_name, &all(&naive, of)),
                plots::distribution(tokio_name, &all(&tokio, of)),
            ],
            false,
        );
    }
}

fn rows(
    context: &mut Context,
    ours: &[Round],
    acknowledged: &[Round],
    naive: &[Round],
    tokio: &[Round],
) {
    const TOKIO: &str = "Tokio";
    let both = |figure: fn(&Round) -> f64| (each(ours, figure), each(tokio, figure));
    let mut row = |what: &str, unit, figure: fn(&Round) -> f64, bound: Option<Bound>, note| {
        let (a, b) = both(figure);
        let row = Row::new(CASE, what, unit, &a).against(TOKIO, &a, &b).note(note);
        context.table.add(match bound {
            Some(bound) => row.bound(bound),
            None => row,
        });
    };
    let holds = both(|r| r.hold_ms);
    let note = format!(
        "holds of {} ms, Tokio's {} ms",
        number(median(&holds.0)),
        number(median(&holds.1))
    );
    let none = String::new;
    row("time that permits are in use", "share", |r| r.use_share, Some(Bound::Least(0.90)), note);
    row("hand-off, p99", "µs", |r| quantile(&r.hand_offs, 0.99), None, none());
    row("wait, p50", "ms", |r| median(&r.waits), None, none());
    let longest: fn(&Round) -> f64 = |r| max(&r.waits) / median(&r.waits);
    row("longest wait, in medians", "×", longest, Some(Bound::Most(2.0)), none());
    row("grants", "", |r| r.grants, None, none());

    let table = &mut context.table;
    let (share, base) = (each(ours, |r| r.use_share), each(acknowledged, |r| r.use_share));
    table.add(
        Row::new(CASE, "time that permits are in use, release dropped", "share", &share)
            .against("acknowledged", &share, &base)
            .bound(Bound::RatioLeast(0.98)),
    );
    let (hand_off, ping) = (each(ours, |r| median(&r.hand_offs)), each(ours, |r| r.ping));
    table.add(
        Row::new(CASE, "hand-off, p50", "µs", &hand_off)
            .against("PING", &hand_off, &ping)
            .bound(Bound::Most(250.0)),
    );
    for (what, unit, figure) in [
        ("time that permits are in use", "share", (|r| r.use_share) as fn(&Round) -> f64),
        ("hand-off, p50", "µs", |r| median(&r.hand_offs)),
        ("Redis' CPU a grant", "µs", |r| r.cpu),
    ] {
        let (ours, base) = (each(ours, figure), each(naive, figure));
        table.add(Row::new(CASE, what, unit, &ours).against("queue by hand", &ours, &base));
    }
    let own = |what: &str, unit, figure: fn(&Round) -> f64, most| {
        Row::new(CASE, what, unit, &each(ours, figure)).bound(Bound::Most(most))
    };
    // A process that is stopped for this long would look, from outside, as if it were passed over.
    table.add(own("grants past who called 5 ms before", "", |r| r.passed_over, 0.0));
    table.add(own("times that more than ten were out", "", |r| r.overshoots, 0.0).counted());
    table.add(own("script calls a grant", "", |r| r.scripts, 2.0).counted());
    let note = format!("{} µs a script call", number(median(&each(ours, |r| r.per_script))));
    table.add(own("Redis' CPU a grant", "µs", |r| r.cpu, 28.0).note(note));
}

fn round(redis: &Redis, side: Side, time: Duration) -> Round {
    let processes = if side == Side::Tokio { 1 } else { 2 };
    let mut children: Vec<Child> = (0..processes)
        .map(|process| {
            let job = Job { side, url: redis.url(), process, tasks: TASKS / processes, time };
            Child::start(&child::Job::Contended(job))
        })
        .collect();
    for child in &mut children {
        assert_eq!(child.hear(), "ready");
    }
    let before = redis.usage();
    let begin = clock() + 50_000_000;
    for child in &mut children {
        child.tell(&begin.to_string());
    }
    // Rarely, because it is work for Redis as well.
    let pings = runtime().block_on(async {
        let mut connection = connect(&redis.url()).await;
        let mut pings = Vec::new();
        while clock() < begin + nanos(time) {
            sleep(Duration::from_millis(9)).await;
            pings.push(ping(&mut connection).await);
        }
        pings
    });
    let mut stays: Vec<Stay> = Vec::new();
    for child in &mut children {
        let told: Vec<Stay> = serde_json::from_str(&child.hear()).expect("stays");
        stays.extend(told);
    }
    let usage = redis.usage().since(before);
    let all = stays.len() as f64;
    let window = (begin + WARM_UP_NS, begin + nanos(time));
    Round {
        ping: median(&pings),
        scripts: usage.scripts / all,
        cpu: usage.cpu_us / all,
        per_script: usage.per_script(),
        ..judge(stays, window)
    }
}

/// Evaluates the times of all permits within the window.
fn judge(mut stays: Vec<Stay>, (from, to): (i64, i64)) -> Round {
    stays.sort_by_key(|stay| stay.granted);
    let limit = LIMIT as usize;
    let is_in = |stay: &Stay| (from..to).contains(&stay.granted);
    let in_window: Vec<Stay> = stays.iter().copied().filter(is_in).collect();

    // All permits are always in use, so the n-th grant had the permit of the (n - limit)-th release.
    let mut releases: Vec<i64> = stays.iter().map(|stay| stay.released).collect();
    releases.sort_unstable();
    let next = stays.iter().skip(limit).zip(&releases);
    let hand_offs = next.filter(|(stay, _)| is_in(stay));
    let hand_offs =
        hand_offs.map(|(stay, release)| (stay.granted - release) as f64 / 1e3).collect();

    // The earliest call among the permits that are granted later.
    let (mut passed_over, mut earliest) = (0, i64::MAX);
    for stay in stays.iter().rev() {
        if is_in(stay) && earliest < stay.called - 5_000_000 {
            passed_over += 1;
        }
        earliest = earliest.min(stay.called);
    }

    let mut events: Vec<(i64, i32)> =
        stays.iter().flat_map(|stay| [(stay.granted, 1), (stay.released, -1)]).collect();
    // At equal times the release comes first, which is no overlap.
    events.sort_unstable();
    let (mut out, mut overshoots) = (0, 0);
    for (_, change) in events {
        out += change;
        overshoots += u32::from(change > 0 && out > LIMIT.cast_signed());
    }

    let ms = |from: i64, to: i64| (to - from) as f64 / 1e6;
    let holds: Vec<f64> = in_window.iter().map(|stay| ms(stay.granted, stay.released)).collect();
    let grants = in_window.len() as f64;
    Round {
        use_share: grants * mean(&holds) / (f64::from(LIMIT) * ms(from, to)),
        hold_ms: mean(&holds),
        hand_offs,
        waits: in_window.iter().map(|stay| ms(stay.called, stay.granted)).collect(),
        grants,
        passed_over: f64::from(passed_over),
        overshoots: f64::from(overshoots),
        ping: f64::NAN,
        scripts: f64::NAN,
        cpu: f64::NAN,
        per_script: f64::NAN,
    }
}

async fn ping(connection: &mut MultiplexedConnection) -> f64 {
    let began = Instant::now();
    deadpool_redis::redis::cmd("PING").exec_async(connection).await.expect("an answer");
    micros(began.elapsed())
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).expect("not for years")
}

#[derive(Clone)]
enum Gate {
    Ours(Semaphore, Policy, Side),
    Naive(Naive, Arc<str>),
    Tokio(Arc<tokio::sync::Semaphore>),
}

enum Held {
    Ours(Permit, Side),
    Naive(NaivePermit),
    Tokio(tokio::sync::OwnedSemaphorePermit),
}

impl Gate {
    async fn acquire(&self) -> Held {
        match self {
            Self::Ours(semaphore, policy, side) => {
                Held::Ours(semaphore.acquire("s", policy).await.expect("a permit"), *side)
            }
            Self::Naive(naive, name) => Held::Naive(naive.acquire(name, LIMIT).await),
            Self::Tokio(semaphore) => {
                let permit = Arc::clone(semaphore).acquire_owned().await.expect("a permit");
                Held::Tokio(permit)
            }
        }
    }
}

impl Held {
    async fn release(self) {
        match self {
            Self::Ours(permit, Side::Acknowledged) => permit.release().await.expect("an answer"),
            Self::Ours(permit, _) => drop(permit),
            Self::Naive(permit) => drop(permit),
            Self::Tokio(permit) => drop(permit),
        }
    }
}

pub(crate) fn child(job: &Job, parent: &Parent) {
    let runtime = runtime();
    let stays = runtime.block_on(async {
        let gate = match job.side {
            Side::Dropped | Side::Acknowledged => {
                let policy = Policy::builder(LIMIT).wait_timeout(Duration::from_secs(60));
                let semaphore = Semaphore::redis(&job.url).expect("a URL");
                Gate::Ours(semaphore, policy.build().expect("in range"), job.side)
            }
            Side::Naive => Gate::Naive(Naive::connect(&job.url, job.process).await, "s".into()),
            Side::Tokio => Gate::Tokio(Arc::new(tokio::sync::Semaphore::new(LIMIT as usize))),
        };
        // The connection is open from here on.
        gate.acquire().await.release().await;
        parent.say("ready");
        let begin: i64 = parent.hear().parse().expect("a time");
        let end = begin + nanos(job.time);
        let tasks = (0..job.tasks).map(|_| {
            let gate = gate.clone();
            tokio::spawn(async move {
                let wait = u64::try_from(begin - clock()).unwrap_or(0);
                sleep(Duration::from_nanos(wait)).await;
                let mut stays = Vec::new();
                while clock() < end {
                    let called = clock();
                    let held = gate.acquire().await;
                    let granted = clock();
                    sleep(HOLD).await;
                    let released = clock();
                    held.release().await;
                    stays.push(Stay { called, granted, released });
                }
                stays
            })
        });
        let stays = join_all(tasks).await.into_iter().flat_map(|stays| stays.expect("no panic"));
        let stays: Vec<Stay> = stays.collect();
        if let Gate::Ours(semaphore, ..) = &gate {
            semaphore.shutdown().await;
        }
        stays
    });
    parent.say(&serde_json::to_string(&stays).expect("stays are JSON"));
}
