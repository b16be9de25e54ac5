//! The cost of a fault for a process with very many names, and how a fleet finds its limit, in figures that have bounds.
//!
//! `tests/long storm` runs it. It starts its own Redis servers and processes, and ends them. It fails if a
//! bound is broken.

#![allow(clippy::print_stdout, reason = "figures are what it is for")]

mod adaptive;
mod crowd;
mod held;
mod lease_ends;
mod process;
mod refused;
mod waiters;

#[path = "../../tests/it/support/redis.rs"]
#[allow(dead_code, reason = "the tests need more of it")]
mod server;

#[path = "../../tests/it/support/upstream.rs"]
mod upstream;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use self::process::Job;

/// Faults with very many names, and bounds.
#[derive(Parser)]
#[command(name = "storm")]
struct Args {
    /// Only these scenarios; by default all.
    scenarios: Vec<Scenario>,
    /// The number of names or tenants in a process, instead of each scenario's own.
    #[arg(long)]
    names: Option<usize>,
    /// Passed by cargo; ignored.
    #[arg(long, hide = true)]
    bench: bool,
    /// Runs as another process of a scenario.
    #[arg(long, hide = true)]
    child: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Scenario {
    /// One process holds 50,000 names, and all connections are cut.
    Cut,
    /// Three processes hold 20,000 names each, and Redis is killed and started empty.
    Restart,
    /// 200,000 names, and then 5,000,000 requests on one name, are refused while Redis is down.
    Refused,
    /// 50,000 names are used for a few seconds with a lease of an hour.
    Released,
    /// 100,000 requests wait for one permit in a process that is killed.
    Waiters,
    /// 9,900 requests wait, and the leases of 100 permits of a killed process end one after the other.
    LeaseEnds,
    /// After an outage, 25 processes request permits for 8,000 tenants each at once.
    Crowd,
    /// The capacity of an upstream changes, and limits of one, three and twenty processes find that out.
    Adaptive,
    /// A process requests permits for 80,000 tenants at once, under a policy that admits in an outage.
    Flood,
}

/// The figures of all scenarios.
#[derive(Default)]
struct Figures {
    broken: usize,
}

impl Figures {
    /// A figure with an upper bound.
    fn most(&mut self, what: &str, value: f64, bound: f64) {
        let broken = value.is_nan() || value > bound;
        self.add(what, value, &format!("at most {bound}"), broken);
    }

    /// A figure with a lower bound.
    fn least(&mut self, what: &str, value: f64, bound: f64) {
        let broken = value.is_nan() || value < bound;
        self.add(what, value, &format!("at least {bound}"), broken);
    }

    /// A figure without a bound.
    fn tell(&mut self, what: &str, value: f64) {
        self.add(what, value, "", false);
    }

    fn add(&mut self, what: &str, value: f64, bound: &str, broken: bool) {
        self.broken += usize::from(broken);
        let verdict = if broken { "BROKEN" } else { "" };
        println!("  {what:<64} {value:>10.1}  {bound:<16} {verdict}");
    }

    /// A figure that must be 0.
    fn fail(&mut self, what: &str) {
        self.broken += 1;
        println!("  {what}  BROKEN");
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(job) = &args.child {
        let job: Job = serde_json::from_str(job).expect("a job");
        process::run(&job);
        return ExitCode::SUCCESS;
    }
    let all = Scenario::value_variants();
    let scenarios = if args.scenarios.is_empty() { all } else { &args.scenarios };
    let mut figures = Figures::default();
    for scenario in scenarios {
        let names = |own: usize| args.names.unwrap_or(own);
        println!("{scenario:?}");
        let result = match scenario {
            Scenario::Cut => held::cut(&mut figures, names(50_000)),
            Scenario::Restart => held::restart(&mut figures, names(20_000)),
            Scenario::Refused => refused::refused(&mut figures, names(200_000)),
            Scenario::Released => refused::released(&mut figures, names(50_000)),
            Scenario::Waiters => waiters::waiters(&mut figures, names(100_000)),
            Scenario::LeaseEnds => lease_ends::lease_ends(&mut figures, names(9900)),
            Scenario::Crowd => crowd::crowd(&mut figures, names(8000)),
            Scenario::Adaptive => adaptive::adaptive(&mut figures),
            Scenario::Flood => crowd::flood(&mut figures, names(80_000)),
        };
        if let Err(what) = result {
            figures.fail(&what);
        }
    }
    println!("{} bounds are broken", figures.broken);
    if figures.broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

fn count(number: usize) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}
