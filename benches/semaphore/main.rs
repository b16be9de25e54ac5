//! The cost and the speed of the crate, beside what there would be without it.
//!
//! `cargo bench -p benches --bench semaphore` starts its own Redis servers and processes, and ends them. Each figure
//! stands beside its reference from the same run: rounds of both alternate, and medians are compared. The table and the
//! plots are written to `target/bench/`.
//!
//! Times depend on the machine and never fail a run; counts (commands, allocations, instructions) do.
//!
//! The reference on Redis is the least that one could write by hand (`reference.rs`): it neither queues nor notifies
//! anyone.

#![allow(clippy::print_stdout, reason = "a table is what it is for")]

mod budget;
mod child;
mod contended;
mod counts;
mod crash;
mod drain;
mod fair;
mod fair_cost;
mod http;
mod ladder;
mod layer;
mod limits;
mod naive;
mod peers;
mod plots;
mod proxy;
mod queued;
mod rate;
mod redis;
mod reference;
mod requests;
mod reuse;
mod round_trips;
mod scale;
mod stats;
mod table;
mod threads;
mod throughput;
mod uncontended;
mod watchdog;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use allocation_counter::opt_out;
use clap::Parser;

use self::table::Table;

/// Benchmarks of the semaphore on Redis, and of its layer.
#[derive(Parser)]
#[command(name = "semaphore")]
struct Args {
    /// Only these cases, by name or a part of it.
    filters: Vec<String>,
    /// Takes one minute in all instead of seven.
    #[arg(long)]
    quick: bool,
    /// Lists the cases and does nothing.
    #[arg(long)]
    list: bool,
    /// Passed by cargo; ignored.
    #[arg(long, hide = true)]
    bench: bool,
    /// Runs as another process of a case.
    #[arg(long, hide = true)]
    child: Option<String>,
}

/// The context of a case, and where its figures go.
struct Context {
    quick: bool,
    table: Table,
    /// The directory of the table and the plots.
    directory: PathBuf,
}

impl Context {
    /// The number of rounds.
    const fn rounds(&self) -> usize {
        if self.quick { 3 } else { 5 }
    }

    /// Returns the first value in quick runs, else the second.
    fn either<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    fn seconds(&self, quick: f64, full: f64) -> Duration {
        Duration::from_secs_f64(self.either(quick, full))
    }
}

type Case = fn(&mut Context);

const CASES: [(&str, Case); 23] = [
    ("counts", counts::run),
    ("layer", layer::run),
    ("threads", threads::run),
    ("uncontended", uncontended::run),
    ("round-trips", round_trips::run),
    ("throughput", throughput::run),
    ("contended", contended::run),
    ("reuse", reuse::run),
    ("drain", drain::run),
    ("peers", peers::run),
    ("crash", crash::run),
    ("http", http::run),
    ("ladder", ladder::run),
    ("scale", scale::run),
    ("watchdog", watchdog::run),
    ("queued", queued::run),
    ("rate", rate::run),
    ("budget", budget::run),
    ("limits", limits::run),
    ("fair", fair::run),
    ("fair-cost", fair_cost::run),
    ("fair-cost-redis", fair_cost::run_on_redis),
    (fair::ON_REDIS, fair::run_on_redis),
];

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(job) = &args.child {
        let job = serde_json::from_str(job).expect("a job");
        opt_out(|| child::run(job));
        return ExitCode::SUCCESS;
    }
    if args.list {
        CASES.iter().for_each(|(name, _)| println!("{name}"));
        return ExitCode::SUCCESS;
    }
    let tmp = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let directory = tmp.parent().unwrap_or(&tmp).join("bench");
    std::fs::create_dir_all(&directory).expect("a directory for the table");
    let mut context = Context { quick: args.quick, table: Table::default(), directory };

    let (began, mut ran, mut broken) = (Instant::now(), 0, Vec::new());
    for (name, case) in CASES {
        if !is_wanted(name, &args.filters) {
            continue;
        }
        let before = Instant::now();
        // Servers and children end with the case, even if it fails, and the others still run. Only counts need the
        // counting allocator.
        let run =
            || if name == "counts" { case(&mut context) } else { opt_out(|| case(&mut context)) };
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            broken.push(name);
        }
        println!("\n{name}, {:.1} s\n{}", before.elapsed().as_secs_f64(), context.table.take_new());
        ran += 1;
    }

    let written = context.table.write(&context.directory);
    println!("{ran} cases in {:.0} s; {written}", began.elapsed().as_secs_f64());
    for missed in context.table.missed() {
        println!("MISSED {missed}");
    }
    for case in &broken {
        println!("BROKEN {case}");
    }
    if broken.is_empty() && !context.table.has_wrong_counts() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A filter that equals the name of a case selects that case alone.
fn is_wanted(name: &str, filters: &[String]) -> bool {
    let is_named = |filter: &String| CASES.iter().any(|(name, _)| name == filter);
    let means = |filter: &String| name == filter || !is_named(filter) && name.contains(&**filter);
    // Takes half a minute in real time, for what another case counts.
    let is_usual = name != fair::ON_REDIS;
    filters.is_empty() && is_usual || filters.iter().any(means)
}

/// Unless it says otherwise, a case measures on one thread.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Reads a clock that all processes of this machine share, in ns.
fn clock() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Raises the limit of open files.
fn descriptors() -> u32 {
    let limits = std::fs::read_to_string("/proc/self/limits").expect("Linux");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next()).expect("a limit");
    soft.parse().unwrap_or(u32::MAX)
}
