//! Plots of samples over time, as SVG.

use std::fmt::Write;
use std::time::Duration;

use maud::{Markup, html};
use tokio::time::Instant;

use super::history::{KEPT, Sample};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 170.0;
const LEFT: f64 = 44.0;
const RIGHT: f64 = 470.0;
const TOP: f64 = 18.0;
const BOTTOM: f64 = 142.0;

/// Samples further apart than this are not connected: nobody viewed the page in between.
const GAP: Duration = Duration::from_secs(10);

/// One plot.
pub(super) struct Plot<'a> {
    pub(super) title: &'static str,
    pub(super) unit: &'static str,
    pub(super) samples: &'a [Sample],
    pub(super) value: fn(&Sample) -> u64,
    /// A line beside that of the values.
    pub(super) limit: fn(&Sample) -> Option<u64>,
    pub(super) now: Instant,
}

impl Plot<'_> {
    pub(super) fn render(&self) -> Markup {
        let last = self.samples.last();
        let value = last.map_or(0, self.value);
        let limit = last.and_then(self.limit);
        let peak = self.samples.iter().map(self.value).max().unwrap_or(0);
        let limits = self.samples.iter().filter_map(self.limit);
        let step = step_of(limits.chain([peak]).max().unwrap_or(0));
        // The top is a multiple of the step, and above the limit: what exceeds the limit, and the line itself, are seen.
        let above = self.samples.iter().filter_map(self.limit).map(|limit| limit / step + 1);
        let count = above.chain([peak.div_ceil(step), 1]).max().unwrap_or(1);
        let top = step.saturating_mul(count);
        let lines = self.lines(|sample| Some((self.value)(sample)), top);
        let limits = self.lines(self.limit, top);
        html! {
            figure {
                figcaption {
                    b { (self.title) } ", " (self.unit) ": " (value) " now, " (peak) " at the most"
                    @if let Some(limit) = limit { ", limit " (limit) }
                }
                svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img"
                    aria-label={ (self.title) " over the last four minutes" } {
                    @for i in 0..=count {
                        @let y = format!("{:.1}", y_of(step.saturating_mul(i), top));
                        line.grid x1=(LEFT) x2=(RIGHT) y1=(y) y2=(y) {}
                        text.y x=(LEFT - 6.0) y=(y) { (step.saturating_mul(i)) }
                    }
                    @for minutes in 0..=4_u32 {
                        @let x = x_of(Duration::from_secs(60) * minutes);
                        text.x.now[minutes == 0] x={ (format!("{x:.1}")) } y=(BOTTOM + 18.0) {
                            @if minutes == 0 { "now" } @else { "−" (minutes) " min" }
                        }
                    }
                    @for points in &limits { polyline.limit points=(points) {} }
                    @for points in &lines { polyline.value points=(points) {} }
                    @if let Some(limit) = limit {
                        text.limit x=(LEFT + 4.0) y=(format!("{:.1}", y_of(limit, top) - 4.0)) {
                            "limit " (limit)
                        }
                    }
                }
            }
        }
    }

    /// The points of each stretch without a gap.
    fn lines(&self, value: impl Fn(&Sample) -> Option<u64>, top: u64) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        let mut before: Option<Instant> = None;
        for sample in self.samples {
            let Some(value) = value(sample) else {
                before = None;
                continue;
            };
            let goes_on = before.is_some_and(|before| sample.at - before <= GAP);
            before = Some(sample.at);
            if !goes_on {
                lines.push(String::new());
            }
            let x = x_of(self.now.saturating_duration_since(sample.at));
            if let Some(line) = lines.last_mut() {
                let _ = write!(line, "{x:.1},{:.1} ", y_of(value, top));
            }
        }
        lines.iter().map(|line| line.trim_end().to_owned()).collect()
    }
}

/// The smallest of 1, 2, 5, 10, 20, 50, … with which at most five lines stand above the lowest.
fn step_of(top: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        for factor in [1, 2, 5] {
            let step = power.saturating_mul(factor);
            if top.div_ceil(step) <= 5 {
                return step;
            }
        }
        power = power.saturating_mul(10);
    }
}

fn x_of(ago: Duration) -> f64 {
    RIGHT - (RIGHT - LEFT) * (ago.as_secs_f64() / KEPT.as_secs_f64()).min(1.0)
}

fn y_of(value: u64, top: u64) -> f64 {
    BOTTOM - (BOTTOM - TOP) * (value as f64 / top.max(1) as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::super::history::Sample;
    use super::{HEIGHT, Plot, TOP, WIDTH, step_of};

    fn plot(values: &[u64], limit: Option<u32>) -> String {
        let now = Instant::now() + Duration::from_secs(500);
        let sample = |(i, in_use): (usize, &u64)| {
            let ago = Duration::from_secs(2) * u32::try_from(values.len() - i - 1).unwrap();
            Sample { at: now - ago, in_use: *in_use, waiting: 0, limit }
        };
        let samples: Vec<_> = values.iter().enumerate().map(sample).collect();
        let plot = Plot {
            title: "In use",
            unit: "permits",
            samples: &samples,
            value: |sample| sample.in_use,
            limit: |sample| sample.limit.map(u64::from),
            now,
        };
        plot.render().into_string()
    }

    #[test]
    fn there_is_room_above_the_limit() {
        for limit in [0, 1, 5, 7, 10, 50, 1000] {
            for peak in [0, u64::from(limit) / 2, u64::from(limit)] {
                let svg = plot(&[peak, 0], Some(limit));
                let (_, line) = svg.split_once("polyline class=\"limit\" points=\"").unwrap();
                let (_, y) = line.split(['"', ' ']).next().unwrap().split_once(',').unwrap();
                let y: f64 = y.parse().unwrap();
                // Room for the words above the line, too.
                assert!(y > TOP + 10.0, "limit {limit}, peak {peak}: {y}");
            }
        }
    }

    #[test]
    fn a_plot_stays_within_its_frame() {
        for values in [&[][..], &[0], &[u64::MAX, 0, 1], &[7; 240]] {
            for limit in [None, Some(0), Some(7), Some(u32::MAX)] {
                let svg = plot(values, limit);
                let lines = svg.split("points=\"").skip(1);
                for point in lines.flat_map(|line| line.split('"').next().unwrap().split(' ')) {
                    let (x, y) = point.split_once(',').unwrap();
                    assert!((0.0..=WIDTH).contains(&x.parse().unwrap()), "{point}");
                    assert!((0.0..=HEIGHT).contains(&y.parse().unwrap()), "{point}");
                }
            }
        }
    }

    #[test]
    fn it_has_times_units_and_the_limit() {
        let svg = plot(&[3, 5, 4], Some(6));
        for part in ["permits: 4 now, 5 at the most, limit 6", "−4 min", ">now<", ">limit 6<"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!plot(&[3], None).contains("limit"), "it is not known");
    }

    #[test]
    fn its_axis_has_few_round_numbers() {
        for (top, step) in [(0, 1), (1, 1), (5, 1), (6, 2), (11, 5), (26, 10), (1000, 200)] {
            assert_eq!(step_of(top), step, "{top}");
        }
        assert!(step_of(u64::MAX) >= u64::MAX / 5);
    }
}
