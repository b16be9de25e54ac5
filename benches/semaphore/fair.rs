//! The permits that tenants get of a shared quota: first come, first served, beside fair shares.
//!
//! The embedded backend runs on a paused clock, so these figures are counts, the same on every machine.
//! `cargo bench -p benches --bench semaphore -- fair-redis` measures the same with Redis, in real time. The plots in
//! docs/fair are drawn here: see docs/fair-to-whom.md.

#[path = "../../tests/it/support/shares.rs"]
mod shares;

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mea::admission::FairShare;
use tower_semaphore::Semaphore;

use self::shares::{Clients, Got, Load, Order, Scenario, jain, others, percentile, run_with};
use super::redis::Redis;
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "fair";
pub(crate) const ON_REDIS: &str = "fair-redis";
/// How long each load runs, in real time.
const SHORT: Duration = Duration::from_secs(4);

/// A load, and what is measured.
struct Figure {
    what: &'static str,
    unit: &'static str,
    scenario: fn() -> Scenario,
    figure: fn(&[Got]) -> f64,
    bound: Bound,
    /// Whether a limiter without weights and costs can serve it, too.
    is_plain: bool,
}

const fn figure(
    what: &'static str,
    unit: &'static str,
    scenario: fn() -> Scenario,
    figure: fn(&[Got]) -> f64,
    bound: Bound,
) -> Figure {
    Figure { what, unit, scenario, figure, bound, is_plain: true }
}

const FIGURES: [Figure; 6] = [
    figure(
        "A queues 1,000, nine others 10/s: their wait, p50",
        "holds",
        shares::backlog,
        |got| percentile(&others(got), 50),
        Bound::Most(0.3),
    ),
    figure(
        "the same, p99",
        "holds",
        shares::backlog,
        |got| percentile(&others(got), 99),
        Bound::Most(1.2),
    ),
    figure(
        "A 300 ms, backlogged; B ten clients of 10 ms: B in use",
        "permits",
        shares::long_and_short,
        |got| got[1].in_use(),
        Bound::Least(4.0),
    ),
    figure(
        "five backlogged, holds 1:2:4:8:16: Jain's index of permits in use",
        "",
        shares::holds,
        |got| jain(&got.iter().map(Got::in_use).collect::<Vec<_>>()),
        Bound::Least(0.99),
    ),
    Figure {
        is_plain: false,
        ..figure(
            "weights 3:1: permits in use, A to B",
            "",
            shares::weights,
            |got| got[0].in_use() / got[1].in_use(),
            Bound::Between(2.9, 3.1),
        )
    },
    Figure {
        is_plain: false,
        ..figure(
            "64 clients of 1 unit, one of all 16: its longest wait",
            "holds",
            shares::costs,
            |got| got[1].waits().last().copied().unwrap_or(f64::NAN),
            // A fifth longer than the usual hold: that of the longest one. Its turn comes at once.
            Bound::Most(1.5 * 1.2),
        )
    },
];

/// Runs all loads on the paused clock.
fn paused<T>(what: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().expect("a runtime").block_on(what)
}

fn embedded(scenario: &Scenario, order: Order) -> Vec<Got> {
    paused(async {
        let semaphore = Semaphore::in_memory();
        let got = shares::run(&semaphore, scenario, order).await;
        semaphore.shutdown().await;
        got
    })
}

/// An existing fair limiter for one process; it has neither weights nor costs.
fn by_mea(scenario: &Scenario) -> Vec<Got> {
    let permits = usize::try_from(scenario.permits).expect("a few");
    let quota = Arc::new(FairShare::<&str>::new(permits));
    let acquire = move |load: &Load| Arc::clone(&quota).acquire_owned(load.tenant);
    paused(run_with(scenario, acquire))
}

pub(crate) fn run(context: &mut Context) {
    for Figure { what, unit, scenario, figure, bound, is_plain } in &FIGURES {
        let scenario = scenario();
        let [arrival, shares] =
            [Order::Arrival, Order::Shares].map(|order| figure(&embedded(&scenario, order)));
        let row = Row::new(CASE, *what, unit, &[shares])
            .against("FIFO", &[shares], &[arrival])
            .bound(*bound)
            .counted();
        context.table.add(if *is_plain {
            row.note(format!("mea, one process: {}", number(figure(&by_mea(&scenario)))))
        } else {
            row
        });
    }
    pictures(&context.directory);
}

/// Runs the same through Redis, in real time.
pub(crate) fn run_on_redis(context: &mut Context) {
    let redis = Redis::start();
    for Figure { what, unit, scenario, figure, bound, .. } in &FIGURES {
        let scenario = scenario();
        let scenario = Scenario { length: scenario.length.min(SHORT), ..scenario };
        let [arrival, shares] = [Order::Arrival, Order::Shares].map(|order| {
            runtime().block_on(async {
                let semaphore = redis.semaphore();
                let got = shares::run(&semaphore, &scenario, order).await;
                semaphore.shutdown().await;
                figure(&got)
            })
        });
        let row = Row::new(ON_REDIS, *what, unit, &[shares]);
        context.table.add(row.against("FIFO", &[shares], &[arrival]).bound(*bound));
    }
}

// ===== pictures =====

/// Tenants that are drawn as one area, and its label.
type Areas = &'static [(&'static str, std::ops::Range<usize>)];

fn pictures(directory: &Path) {
    let short = |scenario: Scenario| Scenario { length: Duration::from_secs(2), ..scenario };
    let two: Areas = &[("A", 0..1), ("B", 1..2)];
    let pictures: [(&str, &str, Scenario, Areas); 6] = [
        ("backlog", "fair shares", shares::backlog(), &[("A", 0..1), ("nine others", 1..10)]),
        ("holds", "fair shares", short(shares::long_and_short()), two),
        ("weights", "weights 3 : 1", short(shares::weights()), two),
        ("caps", "each(4)", shares::caps(), two),
        ("classes", "classes, headroom 2", shares::classes(), &[("batch", 0..1), ("chat", 1..2)]),
        ("costs", "fair shares", costs(), &[("1 unit each", 0..1), ("16 units", 1..2)]),
    ];
    for (name, title, scenario, areas) in pictures {
        let panels = [("first come, first served", Order::Arrival), (title, Order::Shares)];
        let panels = panels.map(|(title, order)| (title, embedded(&scenario, order)));
        let text = picture(&scenario, areas, &panels);
        std::fs::write(directory.join(format!("fair-{name}.svg")), text).expect("written");
    }
}

/// Short enough to show what happens before a large request.
fn costs() -> Scenario {
    let mut scenario = Scenario { length: Duration::from_millis(300), ..shares::costs() };
    scenario.loads[1].clients = Clients::Every(Duration::from_millis(60));
    scenario
}

/// Rounds to a tenth of a pixel.
fn number_of(pixels: f64) -> String {
    let text = format!("{pixels:.1}");
    text.strip_suffix(".0").unwrap_or(&text).to_owned()
}

const COLOURS: [&str; 2] = ["#0072b2", "#e69f00"];
const STEPS: u32 = 100;
const WIDTH: f64 = 330.0;
const HEIGHT: f64 = 150.0;

/// Draws permits in use over time, stacked by tenant.
fn picture(scenario: &Scenario, areas: Areas, panels: &[(&str, Vec<Got>)]) -> String {
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 760 232\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"760\" height=\"232\" \
         fill=\"#fff\"/>\n",
    );
    let permits = f64::from(scenario.permits);
    let length = scenario.length.as_secs_f64();
    for (n, (title, got)) in panels.iter().enumerate() {
        let left = 36.0 + n as f64 * 374.0;
        let _ = write!(
            svg,
            "<g transform=\"translate({left} 28)\">\n<text x=\"{}\" y=\"-10\" \
             text-anchor=\"middle\" font-weight=\"bold\">{title}</text>\n",
            WIDTH / 2.0
        );
        let step = scenario.length / STEPS;
        let mut below = vec![0.0; STEPS as usize];
        for ((_, tenants), colour) in areas.iter().zip(COLOURS) {
            let mut above = below.clone();
            for (i, value) in (0..STEPS).zip(&mut above) {
                let in_use = |got: &Got| got.in_use_between(step * i, step * (i + 1));
                *value += got[tenants.clone()].iter().map(in_use).sum::<f64>();
            }
            let x = |i: usize| number_of(i as f64 / f64::from(STEPS) * WIDTH);
            let y = |value: &f64| number_of(HEIGHT - value / permits * HEIGHT);
            let mut path = format!("M0 {}", y(&above[0]));
            for (i, value) in above.iter().enumerate() {
                let _ = write!(path, "V{}H{}", y(value), x(i + 1));
            }
            for (i, value) in below.iter().enumerate().rev() {
                let _ = write!(path, "V{}H{}", y(value), x(i));
            }
            let _ = writeln!(svg, "<path fill=\"{colour}\" d=\"{path}Z\"/>");
            below = above;
        }
        let _ = write!(
            svg,
            "<path d=\"M0 0V{HEIGHT}H{WIDTH}M0 0H{WIDTH}\" fill=\"none\" stroke=\"#555\"/>\n\
             <text x=\"-6\" y=\"4\" text-anchor=\"end\">{permits}</text>\n\
             <text x=\"-6\" y=\"{HEIGHT}\" text-anchor=\"end\">0</text>\n\
             <text x=\"0\" y=\"{y}\">0</text>\n\
             <text x=\"{WIDTH}\" y=\"{y}\" text-anchor=\"end\">{length} s</text>\n</g>\n",
            y = HEIGHT + 16.0
        );
    }
    for (i, ((name, _), colour)) in areas.iter().zip(COLOURS).enumerate() {
        let x = 36.0 + i as f64 * 140.0;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"208\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"218\">{name}</text>",
            x + 18.0
        );
    }
    let _ = writeln!(svg, "<text x=\"740\" y=\"218\" text-anchor=\"end\">permits in use</text>");
    svg.push_str("</svg>\n");
    svg
}
