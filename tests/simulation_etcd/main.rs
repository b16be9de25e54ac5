//! Runs the simulation over etcd from the command line: see `./tests/long simulation-etcd --help`.

#![allow(clippy::print_stdout, reason = "this is what the program is for")]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use simulation_etcd::plan::{Plan, Planted};
use simulation_etcd::world::{Outcome, run};

/// How long a run may make no progress.
const PATIENCE: Duration = Duration::from_secs(30);
/// The exit code if one made none.
const STUCK: i32 = 86;
/// How many violations of a run are shown.
const SHOWN: usize = 5;

#[derive(Clone, Debug)]
struct Options {
    from: u64,
    seeds: u64,
    /// Runs this seed alone, and shows what was seen.
    seed: Option<u64>,
    minutes: Option<u64>,
    jobs: u64,
    planted: Option<Planted>,
}

#[derive(Debug, Default)]
struct Totals {
    runs: u64,
    /// By their own clocks, in ms.
    lasted: u64,
    violations: u64,
    counts: BTreeMap<&'static str, u64>,
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            println!("{error}");
            return ExitCode::from(2);
        }
    };
    if let Some(seed) = options.seed {
        let plan = Plan { planted: options.planted, ..Plan::new(seed) };
        println!("{plan}");
        let outcome = run(&plan, true, &|| {});
        outcome.trace.iter().for_each(|line| println!("{line}"));
        outcome.counts.iter().for_each(|(what, count)| println!("{count:>12} {what}"));
        tell(seed, &outcome, usize::MAX);
        println!("hash {:016x}", outcome.hash);
        return if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    many(&options)
}

fn options() -> Result<Options, String> {
    let mut options =
        Options { from: 1, seeds: 100, seed: None, minutes: None, jobs: 1, planted: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word}: a value is missing"))?;
        let number = || {
            let number = value.parse::<u64>().ok().filter(|number| *number > 0);
            number.ok_or_else(|| format!("{word} {value}; allowed: a whole number from 1"))
        };
        match word.as_str() {
            "--from" => options.from = number()?,
            "--seeds" => options.seeds = number()?,
            "--seed" => options.seed = Some(number()?),
            "--minutes" => options.minutes = Some(number()?),
            "--jobs" => options.jobs = number()?,
            "--plant" => {
                let mut all = Planted::ALL.iter().map(|(planted, _)| *planted);
                let found = all.find(|planted| format!("{planted:?}") == value);
                options.planted = Some(found.ok_or_else(|| format!("{value:?} is not known"))?);
            }
            _ => return Err(format!("{word:?}: see ./tests/long simulation-etcd --help")),
        }
    }
    Ok(options)
}

fn many(options: &Options) -> ExitCode {
    let began = Instant::now();
    let next = AtomicU64::new(options.from);
    let totals = Mutex::new(Totals::default());
    let pulses: Vec<_> = (0..options.jobs).map(|_| AtomicU64::new(0)).collect();
    let seeds: Vec<_> = (0..options.jobs).map(|_| AtomicU64::new(0)).collect();
    let working = AtomicU64::new(options.jobs);
    std::thread::scope(|scope| {
        for (pulse, current) in pulses.iter().zip(&seeds) {
            let (next, totals, working) = (&next, &totals, &working);
            scope.spawn(move || {
                work(options, began, (next, current, pulse), totals);
                working.fetch_sub(1, Ordering::Relaxed);
            });
        }
        watch(&pulses, &seeds, &working);
    });
    let totals = totals.into_inner().unwrap_or_default();
    for (what, count) in &totals.counts {
        println!("{count:>12} {what}");
    }
    let Totals { runs, lasted, violations, .. } = totals;
    let seconds = began.elapsed().as_secs_f64();
    println!("{runs} runs, {} virtual seconds in {seconds:.1} s", lasted / 1000);
    println!("{violations} violations");
    if violations == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one seed after the other.
fn work(
    options: &Options,
    began: Instant,
    (next, current, pulse): (&AtomicU64, &AtomicU64, &AtomicU64),
    totals: &Mutex<Totals>,
) {
    let until = options.minutes.map(|minutes| Duration::from_secs(minutes * 60));
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        let is_over = match until {
            Some(until) => began.elapsed() > until,
            None => seed >= options.from + options.seeds,
        };
        if is_over {
            return;
        }
        current.store(seed, Ordering::Relaxed);
        let plan = Plan { planted: options.planted, ..Plan::new(seed) };
        let outcome = run(&plan, false, &|| _ = pulse.fetch_add(1, Ordering::Relaxed));
        tell(seed, &outcome, SHOWN);
        let Ok(mut totals) = totals.lock() else { return };
        totals.runs += 1;
        totals.lasted += outcome.lasted;
        totals.violations += outcome.violations.len() as u64;
        for (what, count) in outcome.counts {
            let sum = totals.counts.entry(what).or_default();
            *sum = if what.starts_with("most") { count.max(*sum) } else { *sum + count };
        }
    }
}

fn tell(seed: u64, outcome: &Outcome, most: usize) {
    let found = &outcome.violations;
    if !found.is_empty() {
        println!("seed {seed}: {} violations", found.len());
        found.iter().take(most).for_each(|violation| println!("  {violation}"));
        println!("    ./tests/long simulation-etcd --seed {seed}");
    }
}

/// Ends this program if a run makes no progress any more.
fn watch(pulses: &[AtomicU64], seeds: &[AtomicU64], working: &AtomicU64) {
    let mut last: Vec<_> = pulses.iter().map(|_| (0, Instant::now())).collect();
    while working.load(Ordering::Relaxed) > 0 {
        std::thread::sleep(Duration::from_millis(50));
        for ((pulse, seed), (before, at)) in pulses.iter().zip(seeds).zip(&mut last) {
            let pulse = pulse.load(Ordering::Relaxed);
            if pulse != *before {
                (*before, *at) = (pulse, Instant::now());
            } else if at.elapsed() > PATIENCE
                && working.load(Ordering::Relaxed) == seeds.len() as u64
            {
                let seed = seed.load(Ordering::Relaxed);
                println!("seed {seed}: stuck: the run makes no progress");
                std::process::exit(STUCK);
            }
        }
    }
}
