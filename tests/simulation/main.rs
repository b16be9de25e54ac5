//! Runs the simulation from the command line: see `./tests/long simulation --help`.
//!
//! A child process runs the seeds, so that one that never ends is noticed and skipped: a thread of the child watches
//! the progress of its runs, and ends it.

#![allow(clippy::print_stdout, reason = "this is what the program is for")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use simulation::plan::{Plan, Planted, Scenario};
use simulation::shrink::shrink;
use simulation::world::{Outcome, run};

/// How long a run may make no progress, in CPU time: other programs may need the processor, too.
const PATIENCE: Duration = Duration::from_secs(2);
/// The exit code of a child whose run made no progress for that long.
const STUCK: i32 = 86;
/// The most attempts to make a plan smaller, for a run that ends and for one that does not.
const ATTEMPTS: (usize, usize) = (400, 100);
const TRACE_MAX: usize = 150;

#[derive(Clone, Debug)]
struct Options {
    seeds: u64,
    from: u64,
    seed: Option<u64>,
    minutes: Option<f64>,
    scenario: Option<Scenario>,
    planted: Option<Planted>,
    jobs: usize,
    /// Runs as a child, and reports results line by line.
    worker: bool,
    /// Runs as a child that checks one plan, made smaller in this way.
    keeps: Option<String>,
    shrinks: bool,
    counts: bool,
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            println!("{error}");
            return ExitCode::from(2);
        }
    };
    if options.worker {
        return work(&options);
    }
    match options.seed {
        Some(seed) => one(&options, seed),
        None => many(&options),
    }
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        seeds: 100,
        from: 1,
        seed: None,
        minutes: None,
        scenario: None,
        planted: None,
        jobs: 1,
        worker: false,
        keeps: None,
        shrinks: true,
        counts: true,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word}: a value is missing"));
        let number = |text: String| {
            text.parse::<u64>().map_err(|_| format!("{text:?} is not a whole number"))
        };
        match word.as_str() {
            "--seeds" => options.seeds = number(value()?)?,
            "--from" => options.from = number(value()?)?,
            "--seed" => options.seed = Some(number(value()?)?),
            "--jobs" => options.jobs = usize::try_from(number(value()?)?).unwrap_or(usize::MAX),
            "--minutes" => {
                let text = value()?;
                let minutes =
                    text.parse().ok().filter(|minutes: &f64| (0.0001..1e6).contains(minutes));
                let allowed = "allowed: a number above 0, up to a million";
                options.minutes =
                    Some(minutes.ok_or_else(|| format!("--minutes {text:?}; {allowed}"))?);
            }
            "--scenario" => {
                let name = value()?;
                let all: Vec<_> = Scenario::ALL.iter().map(|scenario| scenario.name()).collect();
                options.scenario = Some(Scenario::named(&name).ok_or_else(|| {
                    format!("scenario {name:?} is not known; allowed: {}", all.join(", "))
                })?);
            }
            "--plant" => {
                let name = value()?;
                let all = Planted::ALL.iter().map(|(planted, _)| *planted);
                let mut all = all.chain([Planted::Hangs, Planted::LoopsAtNeverFitting]);
                let found = all.find(|planted| format!("{planted:?}") == name);
                options.planted = Some(found.ok_or_else(|| format!("{name:?} is not known"))?);
            }
            "--worker" => options.worker = true,
            "--keeps" => options.keeps = Some(value()?),
            "--no-shrink" => options.shrinks = false,
            "--no-counts" => options.counts = false,
            _ => return Err(format!("{word:?} is not known; see ./tests/long simulation --help")),
        }
    }
    let jobs = u64::try_from(options.jobs).unwrap_or(u64::MAX);
    let counts = [("--seeds", options.seeds), ("--from", options.from), ("--jobs", jobs)];
    match counts.into_iter().find(|(_, count)| *count == 0) {
        // Returns the next job of a worker, from 0.
        Some((word, _)) if !options.worker => {
            Err(format!("{word} 0; allowed: a whole number from 1"))
        }
        _ => Ok(options),
    }
}

/// Returns the seed and the scenario of a job.
fn job(options: &Options, number: u64) -> (Scenario, u64) {
    match options.scenario {
        Some(scenario) => (scenario, options.from + number),
        None => {
            let all = Scenario::ALL;
            let which = usize::try_from(number).unwrap_or(0) % all.len();
            (all[which], options.from + number / all.len() as u64)
        }
    }
}

fn plan(options: &Options, scenario: Scenario, seed: u64) -> Plan {
    Plan { planted: options.planted, ..Plan::new(scenario, seed) }
}

// ===== the child =====

/// Ends this process if its run makes no progress any more.
fn watch(pulse: &Arc<AtomicU64>) {
    let pulse = Arc::clone(pulse);
    std::thread::spawn(move || {
        let began = Instant::now();
        let mut last = (0, Duration::ZERO);
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let beats = pulse.load(Ordering::Relaxed);
            let busy = busy().unwrap_or_else(|| began.elapsed());
            if beats != last.0 {
                last = (beats, busy);
            } else if busy.saturating_sub(last.1) > PATIENCE {
                std::process::exit(STUCK);
            }
        }
    });
}

/// Returns the CPU time of this process, if the system reports it.
fn busy() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // After the name, which is in brackets, user and system time are fields 12 and 13, in 1/100 s.
    let mut words = text.rsplit_once(") ")?.1.split(' ').skip(11);
    let mut ticks = || words.next()?.parse::<u64>().ok();
    Some(Duration::from_millis(10 * (ticks()? + ticks()?)))
}

fn work(options: &Options) -> ExitCode {
    let pulse = Arc::new(AtomicU64::new(0));
    watch(&pulse);
    let beat = || {
        pulse.fetch_add(1, Ordering::Relaxed);
    };
    if let (Some(seed), Some(scenario)) = (options.seed, options.scenario) {
        let Ok(plan) = kept_plan(options, scenario, seed) else { return ExitCode::from(2) };
        tell(scenario, seed, &run(&plan, false, &beat));
        return ExitCode::SUCCESS;
    }
    let began = Instant::now();
    let until = options.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0));
    let mut number = options.from;
    let numbers = Options { from: 1, ..options.clone() };
    loop {
        let over = match until {
            Some(until) => began.elapsed() > until,
            None => number >= options.from + options.seeds,
        };
        if over {
            return ExitCode::SUCCESS;
        }
        let (scenario, seed) = job(&numbers, number);
        println!("begins\t{}\t{seed}\t{number}", scenario.name());
        let _ = std::io::stdout().flush();
        tell(scenario, seed, &run(&plan(options, scenario, seed), false, &beat));
        number += options.jobs as u64;
    }
}

fn tell(scenario: Scenario, seed: u64, outcome: &Outcome) {
    let mut text = String::new();
    for (what, count) in &outcome.counts {
        text += &format!("count\t{what}\t{count}\n");
    }
    for violation in &outcome.violations {
        let name = scenario.name();
        text += &format!("violation\t{name}\t{seed}\t{}\t{violation}\n", violation.rule);
    }
    text += &format!("ends\t{}\t{:016x}", outcome.requests, outcome.hash);
    println!("{text}");
}

// ===== the parent =====

#[derive(Debug, Default)]
struct Totals {
    runs: u64,
    requests: u64,
    counts: BTreeMap<String, u64>,
    /// By rule and scenario: how many runs broke it, and the first of them.
    violations: BTreeMap<(String, String), (u64, u64, String)>,
    violated: u64,
}

fn child(options: &Options, from: u64, seeds: u64, minutes: Option<f64>) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--worker").args(["--from", &from.to_string(), "--seeds", &seeds.to_string()]);
    command.args(["--jobs", &options.jobs.to_string()]);
    if let Some(minutes) = minutes {
        command.args(["--minutes", &minutes.to_string()]);
    }
    if let Some(scenario) = options.scenario {
        command.args(["--scenario", scenario.name()]);
    }
    if let Some(planted) = options.planted {
        command.args(["--plant", &format!("{planted:?}")]);
    }
    command.stdout(Stdio::piped()).spawn()
}

/// Runs seeds in a child, and goes on after those that never end.
fn supervise(options: &Options, first: u64, totals: &mut Totals) -> std::io::Result<()> {
    let began = Instant::now();
    let base = options.from - 1;
    let (mut from, last) = (first, options.seeds);
    loop {
        let left = options.minutes.map(|m| m - began.elapsed().as_secs_f64() / 60.0);
        if left.is_some_and(|left| left <= 0.0) || (left.is_none() && from >= last) {
            return Ok(());
        }
        let mut options = options.clone();
        options.from = 1;
        let count = last.saturating_sub(from);
        let mut child = child(&options, from + base * scenarios(&options), count, left)?;
        let mut current = None;
        let Some(output) = child.stdout.take() else { return Ok(()) };
        let mut broken: Vec<String> = Vec::new();
        for line in BufReader::new(output).lines() {
            let line = line?;
            let words: Vec<_> = line.split('\t').collect();
            match words[..] {
                ["begins", scenario, seed, number] => {
                    current = Some((scenario.to_owned(), seed.to_owned(), number.to_owned()));
                    broken.clear();
                }
                ["count", what, count] => {
                    let count = count.parse::<u64>().unwrap_or(0);
                    let sum = totals.counts.entry(what.to_owned()).or_default();
                    *sum = if what.starts_with("most") { count.max(*sum) } else { *sum + count };
                }
                ["violation", scenario, seed, rule, text] => {
                    totals.violated += 1;
                    if !broken.iter().any(|known| known == rule) {
                        broken.push(rule.to_owned());
                        totals.broke(rule, scenario, seed, text);
                    }
                }
                ["ends", requests, _] => {
                    totals.runs += 1;
                    totals.requests += requests.parse::<u64>().unwrap_or(0);
                    current = None;
                }
                _ => println!("{line}"),
            }
        }
        let status = child.wait()?;
        let Some((scenario, seed, number)) = current else {
            // It ends well between two runs, or after a broken rule, which is counted already.
            let is_counted = status.success() || totals.violated > 0;
            let ended = || std::io::Error::other(format!("a worker ended: {status}"));
            return if is_counted { Ok(()) } else { Err(ended()) };
        };
        let rule = if status.code() == Some(STUCK) { "stuck" } else { "crash" };
        totals.runs += 1;
        totals.violated += 1;
        totals.broke(rule, &scenario, &seed, &format!("{rule}: the run came to no end ({status})"));
        let number = number.parse::<u64>().unwrap_or(0) - base * scenarios(&options);
        from = number + options.jobs as u64;
    }
}

fn scenarios(options: &Options) -> u64 {
    if options.scenario.is_some() { 1 } else { Scenario::ALL.len() as u64 }
}

impl Totals {
    fn broke(&mut self, rule: &str, scenario: &str, seed: &str, text: &str) {
        let seed = seed.parse().unwrap_or(0);
        let first = || (0, seed, text.to_owned());
        self.violations.entry((rule.into(), scenario.into())).or_insert_with(first).0 += 1;
    }
}

fn many(options: &Options) -> ExitCode {
    let began = Instant::now();
    let mut totals = Totals::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.jobs as u64)
            .map(|first| {
                scope.spawn(move || {
                    let mut totals = Totals::default();
                    let result = supervise(options, first, &mut totals);
                    (totals, result)
                })
            })
            .collect();
        for worker in workers {
            let Ok((part, result)) = worker.join() else {
                println!("a worker panicked");
                totals.violated += 1;
                continue;
            };
            if let Err(error) = result {
                println!("{error}");
                totals.violated += 1;
            }
            totals.runs += part.runs;
            totals.requests += part.requests;
            totals.violated += part.violated;
            for (what, count) in part.counts {
                *totals.counts.entry(what).or_default() += count;
            }
            for (key, (count, seed, text)) in part.violations {
                totals.violations.entry(key).or_insert((0, seed, text)).0 += count;
            }
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    if options.counts {
        for (what, count) in &totals.counts {
            println!("{count:>12} {what}");
        }
    }
    let faults: u64 = totals
        .counts
        .iter()
        .filter(|(what, _)| what.starts_with("fault: "))
        .map(|(_, count)| count)
        .sum();
    let rate = totals.requests as f64 / seconds / options.jobs as f64;
    println!(
        "{} runs, {} requests, {faults} faults in {seconds:.1} s: {rate:.0} requests a second and worker",
        totals.runs, totals.requests
    );
    for ((rule, scenario), (count, seed, text)) in &totals.violations {
        println!("{count} runs of {scenario} broke a rule: {rule}; the first: {text}");
        println!("    {}", repeat(options, *seed, scenario));
    }
    println!("{} violations", totals.violated);
    if let Some(((rule, scenario), (_, seed, _))) = totals.violations.iter().next()
        && options.shrinks
        && let Some(scenario) = Scenario::named(scenario)
    {
        explain(options, scenario, *seed, rule);
    }
    if totals.violated == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The command that runs one seed again.
fn repeat(options: &Options, seed: u64, scenario: &str) -> String {
    let planted = options.planted.map(|planted| format!(" --plant {planted:?}"));
    let planted = planted.unwrap_or_default();
    format!("./tests/long simulation --seed {seed} --scenario {scenario}{planted}")
}

// ===== one seed =====

/// Returns whether a plan breaks a rule. A child runs it, because it may never end.
fn rules(options: &Options, plan: &Plan) -> Vec<(String, String)> {
    let Ok(program) = std::env::current_exe() else { return Vec::new() };
    let mut command = Command::new(program);
    command.args(["--worker", "--seed", &plan.seed.to_string()]);
    command.args(["--scenario", plan.scenario.name(), "--keeps", &kept(options, plan)]);
    if let Some(planted) = options.planted {
        command.args(["--plant", &format!("{planted:?}")]);
    }
    let Ok(output) = command.output() else { return Vec::new() };
    if output.status.code() == Some(STUCK) {
        return vec![("stuck".into(), "stuck: the run comes to no end".into())];
    }
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return vec![("crash".into(), text)];
    }
    let mut rules = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        if let ["violation", _, _, rule, text] = line.split('\t').collect::<Vec<_>>()[..] {
            rules.push((rule.to_owned(), text.to_owned()));
        }
    }
    rules
}

fn one(options: &Options, seed: u64) -> ExitCode {
    let scenarios = match options.scenario {
        Some(scenario) => vec![scenario],
        None => Scenario::ALL.into(),
    };
    let mut code = ExitCode::SUCCESS;
    for scenario in scenarios {
        let plan = match kept_plan(options, scenario, seed) {
            Ok(plan) => plan,
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::from(2);
            }
        };
        let rules = rules(options, &plan);
        println!("{} {seed}: {} violations", scenario.name(), rules.len());
        for (_, text) in rules.iter().take(10) {
            println!("  {text}");
        }
        if let Some((rule, _)) = rules.first() {
            code = ExitCode::FAILURE;
            if options.shrinks {
                explain(options, scenario, seed, rule);
            }
        }
    }
    code
}

/// Shows the smallest plan that breaks a rule, and its events.
fn explain(options: &Options, scenario: Scenario, seed: u64, rule: &str) {
    let Ok(whole) = kept_plan(options, scenario, seed) else { return };
    let stuck = rule == "stuck" || rule == "crash";
    let most = if stuck { ATTEMPTS.1 } else { ATTEMPTS.0 };
    let small = shrink(&whole, most, |plan| rules(options, plan).iter().any(|(r, _)| r == rule));
    println!("--- {rule}, made smaller:\n{small}");
    let kept = kept(options, &small);
    println!("    {} --keeps {kept}", repeat(options, seed, scenario.name()));
    if stuck {
        return;
    }
    let outcome = run(&small, true, &|| {});
    let at = outcome.violations.iter().find(|violation| violation.rule == rule);
    let Some(violation) = at else { return };
    let until = violation.at;
    let before = |line: &&String| {
        let ms = line.split_whitespace().next().and_then(|ms| ms.parse::<f64>().ok());
        ms.is_some_and(|ms| ms <= (until as f64) / 1000.0 + 1.0)
    };
    let lines: Vec<_> = outcome.trace.iter().filter(before).collect();
    let skipped = lines.len().saturating_sub(TRACE_MAX);
    if skipped > 0 {
        println!("--- {skipped} lines before");
    }
    lines.iter().skip(skipped).for_each(|line| println!("{line}"));
    println!("--- {violation}");
}

// ===== smaller plans as text =====

/// Which parts of its seed's plan a plan keeps: `<processes>/<requests>/<faults>/<operations>`.
fn kept(options: &Options, small: &Plan) -> String {
    let whole = plan(options, small.scenario, small.seed);
    format!(
        "{}/{}/{}/{}",
        small.processes,
        ranges(&whole.requests, &small.requests),
        ranges(&whole.faults, &small.faults),
        ranges(&whole.operations, &small.operations)
    )
}

fn ranges<T: PartialEq>(whole: &[T], part: &[T]) -> String {
    let mut indexes: Vec<usize> = Vec::new();
    let mut from = 0;
    for item in part {
        let Some(at) = whole[from..].iter().position(|known| known == item) else { continue };
        indexes.push(from + at);
        from += at + 1;
    }
    let mut text: Vec<String> = Vec::new();
    let mut run: Option<(usize, usize)> = None;
    for index in indexes.into_iter().map(Some).chain([None]) {
        run = match (run, index) {
            (Some((first, last)), Some(index)) if index == last + 1 => Some((first, index)),
            (run, index) => {
                text.extend(run.map(|(first, last)| format!("{first}-{last}")));
                index.map(|index| (index, index))
            }
        };
    }
    text.join(",")
}

/// Returns the plan of a seed, or the parts of it to keep.
fn kept_plan(options: &Options, scenario: Scenario, seed: u64) -> Result<Plan, String> {
    let mut plan = plan(options, scenario, seed);
    if let Some(keeps) = &options.keeps {
        keep(&mut plan, keeps)?;
    }
    Ok(plan)
}

fn keep(plan: &mut Plan, keeps: &str) -> Result<(), String> {
    let form = "allowed: <processes>/<requests>/<faults>/<operations>, as a run prints it";
    let [processes, requests, faults, operations] = keeps.split('/').collect::<Vec<_>>()[..] else {
        return Err(format!("--keeps {keeps:?}; {form}"));
    };
    let kept = processes.parse().ok().filter(|kept| (1..=plan.processes).contains(kept));
    let kept = kept.ok_or_else(|| {
        format!("--keeps {keeps:?}: {processes:?} processes; allowed: 1 to {}", plan.processes)
    })?;
    select(&mut plan.requests, requests)?;
    select(&mut plan.faults, faults)?;
    select(&mut plan.operations, operations)?;
    plan.processes = kept;
    plan.policies.truncate(kept);
    plan.requests.retain(|request| request.process < kept);
    plan.faults.retain(|fault| fault.process < kept);
    plan.operations.retain(|operation| operation.process < kept);
    Ok(())
}

fn select<T: Clone>(items: &mut Vec<T>, ranges: &str) -> Result<(), String> {
    let whole = std::mem::take(items);
    for range in ranges.split(',').filter(|range| !range.is_empty()) {
        let bounds = range.split_once('-').and_then(|(first, last)| {
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
        });
        let some = bounds.and_then(|(first, last)| whole.get(first..=last));
        let some = some.ok_or_else(|| {
            format!("--keeps: {range:?}; allowed: <first>-<last> below {}", whole.len())
        })?;
        items.extend(some.iter().cloned());
    }
    Ok(())
}
