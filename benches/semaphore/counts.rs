//! Counts that are the same on every machine: allocations, instructions, commands.

use std::fs;
use std::process::{Command, Stdio};

use allocation_counter::measure;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tower_semaphore::{Policy, Semaphore};

use super::child;
use super::redis::Redis;
use super::requests::{Before, Extensions, answer};
use super::table::{Bound, Row};
use super::{Context, runtime};

const CASE: &str = "counts";
const REQUESTS: u32 = 1000;
/// Instructions that the layer may add to a request on the embedded backend: 1 % more than were counted on x86-64 with
/// Rust 1.95.0 when this was written. About 1,700 of them are the price of having no second way for a single place: an
/// acquire and a release each make a `Call`, and take its `Reply` apart, like those of a backend behind a connection.
/// Some 140 are the machine that HTTP and other requests share, some 30 ask whether the limit finds itself, some 100 came
/// with what a place knows of a pause and of a full limit, and some 260 with budgets: an id has room for two. Where the other 600 came from since 9,041 were counted (the
/// machines of a session, the mark of the version) was not measured.
const INSTRUCTIONS_MAX: f64 = 11_070.0;

/// The number of requests in a process whose instructions are counted.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    before: Before,
    requests: u32,
}

pub(crate) fn run(context: &mut Context) {
    allocations(context);
    commands(context);
    instructions(context);
}

/// Returns the allocations of one request, after enough others that no lasting ones are left to make.
fn allocated(some: impl AsyncFn(u32)) -> f64 {
    let runtime = runtime();
    runtime.block_on(some(REQUESTS));
    let [once, thrice] = [REQUESTS, 3 * REQUESTS]
        .map(|count| measure(|| runtime.block_on(some(count))).count_total as f64);
    rounded((thrice - once) / f64::from(2 * REQUESTS))
}

/// In tenths: rare allocations do not count.
fn rounded(each: f64) -> f64 {
    (each * 10.0).round() / 10.0
}

fn allocations(context: &mut Context) {
    let embedded = Semaphore::in_memory();
    let [routed, alone] = [Extensions::Some, Extensions::None].map(|extensions| {
        let [bare, tower, ours] = [Before::Nothing, Before::Tower, Before::Ours].map(|before| {
            allocated(async |count| answer(before, extensions, count, &embedded).await)
        });
        [bare, tower - bare, ours - bare]
    });
    let policy = Policy::new(1000);
    let permit = allocated(async |count| {
        for _ in 0..count {
            drop(embedded.acquire("bench", &policy).await.expect("a permit"));
        }
    });
    let redis = Redis::start();
    let on_redis = {
        let semaphore = redis.semaphore();
        let all = allocated(async |count| {
            answer(Before::Ours, Extensions::Some, count, &semaphore).await;
        });
        all - routed[0]
    };
    let reused = {
        let semaphore = redis.semaphore();
        let policy = Policy::builder(1000).reuse(true).build().expect("in range");
        allocated(async |count| {
            for _ in 0..count {
                drop(semaphore.acquire("bench", &policy).await.expect("a permit"));
            }
        })
    };

    let table = &mut context.table;
    for (what, [_, tower, ours], most) in [
        ("allocations that the layer adds, embedded", routed, 3.0),
        ("the same, for a request without extensions", alone, 5.0),
    ] {
        table.add(
            Row::new(CASE, what, "", &[ours])
                .against("tower::limit", &[ours], &[tower])
                .bound(Bound::Most(most))
                .counted(),
        );
    }
    table.add(Row::new(CASE, "allocations of acquire and drop, embedded", "", &[permit]));
    table.add(
        Row::new(CASE, "allocations of acquire and drop, Redis, permit passed on", "", &[reused])
            .bound(Bound::Most(1.0))
            .counted(),
    );
    table.add(
        Row::new(CASE, "allocations that the layer adds, Redis", "", &[on_redis])
            .note("the connection's own among them"),
    );
}

fn commands(context: &mut Context) {
    let redis = Redis::start();
    let usage = runtime().block_on(async {
        let semaphore = redis.semaphore();
        answer(Before::Ours, Extensions::Some, 10, &semaphore).await;
        let before = redis.usage();
        answer(Before::Ours, Extensions::Some, REQUESTS, &semaphore).await;
        // The last release is sent after its response.
        for _ in 0..1000 {
            if semaphore.inspect("bench").await.expect("an answer").in_use == 0 {
                break;
            }
        }
        let usage = redis.usage().since(before);
        semaphore.shutdown().await;
        usage
    });
    context.table.add(
        Row::new(
            CASE,
            "script calls of a request, Redis",
            "",
            &[rounded(usage.scripts / f64::from(REQUESTS))],
        )
        .bound(Bound::Most(2.0))
        .counted(),
    );
    let all = [rounded(usage.calls / f64::from(REQUESTS))];
    context.table.add(Row::new(CASE, "all commands of a request, Redis", "", &all).against(
        "by hand",
        &all,
        &[8.0],
    ));
}

fn instructions(context: &mut Context) {
    if !can_count() {
        let row = Row::new(CASE, "instructions of a request", "", &[f64::NAN]);
        context.table.add(row.note("not counted: there is no valgrind"));
        return;
    }
    let [bare, tower, ours] = [Before::Nothing, Before::Tower, Before::Ours].map(|before| {
        let [some, more] =
            [500, 1500].map(|requests| counted(&child::Job::Requests(Job { before, requests })));
        (more - some) / 1000.0
    });
    let added = [ours - bare];
    let mut row = Row::new(CASE, "instructions that the layer adds, embedded", "", &added)
        .against("tower::limit", &added, &[tower - bare])
        .note(format!("a request without a layer: {bare:.0}"));
    if cfg!(target_arch = "x86_64") {
        row = row.bound(Bound::Most(INSTRUCTIONS_MAX)).counted();
    }
    context.table.add(row);
}

/// Returns whether instructions can be counted here.
pub(crate) fn can_count() -> bool {
    Command::new("valgrind").arg("--version").stdout(Stdio::null()).status().is_ok()
}

/// Counts the instructions of a whole process, with callgrind.
pub(crate) fn counted(job: &child::Job) -> f64 {
    let directory = TempDir::new().expect("a directory");
    let out = directory.path().join("callgrind");
    let job = serde_json::to_string(job).expect("JSON");
    let status = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe().expect("this program"))
        .args(["--child", &job])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("valgrind");
    assert!(status.success(), "valgrind: {status}");
    let profile = fs::read_to_string(out).expect("a profile");
    let total = profile.lines().rev().find_map(|line| line.strip_prefix("totals: "));
    total.expect("a total").trim().parse().expect("a number")
}

pub(crate) fn child(job: &Job) {
    let semaphore = Semaphore::in_memory();
    runtime().block_on(answer(job.before, Extensions::Some, job.requests, &semaphore));
}
