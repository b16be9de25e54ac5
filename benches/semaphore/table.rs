//! The results: figures beside their references and bounds.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::stats::{median, spread};

/// One line of the table.
#[derive(Serialize)]
pub(crate) struct Row {
    case: &'static str,
    what: String,
    unit: &'static str,
    ours: f64,
    /// The least and the greatest of all rounds.
    ours_spread: (f64, f64),
    against: Option<&'static str>,
    reference: Option<f64>,
    reference_spread: Option<(f64, f64)>,
    /// The median of the ratios of ours to the reference, round by round; not the ratio of the medians.
    ratio: Option<f64>,
    bound: Option<Bound>,
    /// A count that misses its bound fails the run.
    is_count: bool,
    verdict: Option<Verdict>,
    note: String,
}

/// The bound of a figure; `Ratio…` bounds its ratio to the reference.
#[derive(Clone, Copy, Serialize)]
pub(crate) enum Bound {
    Most(f64),
    Least(f64),
    Between(f64, f64),
    RatioLeast(f64),
    RatioMost(f64),
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Missed,
}

impl Row {
    /// Adds a line. `ours` has one figure for each round.
    pub(crate) fn new(
        case: &'static str,
        what: impl Into<String>,
        unit: &'static str,
        ours: &[f64],
    ) -> Self {
        Self {
            case,
            what: what.into(),
            unit,
            ours: median(ours),
            ours_spread: spread(ours),
            against: None,
            reference: None,
            reference_spread: None,
            ratio: None,
            bound: None,
            is_count: false,
            verdict: None,
            note: String::new(),
        }
    }

    /// Adds a reference, and the ratios round by round.
    pub(crate) fn against(mut self, name: &'static str, ours: &[f64], reference: &[f64]) -> Self {
        let ratios: Vec<f64> = ours.iter().zip(reference).map(|(a, b)| a / b).collect();
        self.against = Some(name);
        self.reference = Some(median(reference));
        self.reference_spread = Some(spread(reference));
        self.ratio = Some(median(&ratios)).filter(|ratio| ratio.is_finite());
        self
    }

    pub(crate) fn bound(mut self, bound: Bound) -> Self {
        let ratio = self.ratio.unwrap_or(f64::NAN);
        let is_kept = match bound {
            Bound::Most(most) => self.ours <= most,
            Bound::Least(least) => self.ours >= least,
            Bound::Between(least, most) => (least..=most).contains(&self.ours),
            Bound::RatioLeast(least) => ratio >= least,
            Bound::RatioMost(most) => ratio <= most,
        };
        self.bound = Some(bound);
        self.verdict = Some(if is_kept { Verdict::Ok } else { Verdict::Missed });
        self
    }

    /// A count fails the run if it misses its bound.
    pub(crate) fn counted(mut self) -> Self {
        self.is_count = true;
        self
    }

    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    fn cells(&self) -> [String; 9] {
        let bound = match self.bound {
            None => String::new(),
            Some(Bound::Most(most)) => format!("≤ {}", number(most)),
            Some(Bound::Least(least)) => format!("≥ {}", number(least)),
            Some(Bound::Between(least, most)) => format!("{} to {}", number(least), number(most)),
            Some(Bound::RatioLeast(least)) => format!("≥ {}×", number(least)),
            Some(Bound::RatioMost(most)) => format!("≤ {}×", number(most)),
        };
        let verdict = match self.verdict {
            None => "",
            Some(Verdict::Ok) => "ok",
            Some(Verdict::Missed) => "MISSED",
        };
        let reference = match (self.reference, self.against) {
            (Some(value), Some(name)) => {
                format!("{} ({name})", with_spread(value, self.reference_spread))
            }
            _ => String::new(),
        };
        [
            self.case.to_owned(),
            self.what.clone(),
            with_spread(self.ours, Some(self.ours_spread)),
            self.unit.to_owned(),
            reference,
            self.ratio.map_or_else(String::new, |ratio| format!("{}×", number(ratio))),
            bound,
            verdict.to_owned(),
            self.note.clone(),
        ]
    }
}

const HEADS: [&str; 9] =
    ["case", "what", "ours", "unit", "reference", "ratio", "bound", "", "besides"];

/// All lines.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
    shown: usize,
}

impl Table {
    pub(crate) fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Returns the lines since the last call, for a terminal.
    pub(crate) fn take_new(&mut self) -> String {
        let new: Vec<[String; 9]> = self.rows[self.shown..].iter().map(Row::cells).collect();
        self.shown = self.rows.len();
        let width = |column: usize| {
            let cells = new.iter().map(|cells| cells[column].chars().count());
            cells.chain([HEADS[column].len()]).max().unwrap_or(0)
        };
        let mut text = String::new();
        for cells in std::iter::once(&HEADS.map(str::to_owned)).chain(&new) {
            // Without the name of the case, which is the heading.
            for (column, cell) in cells.iter().enumerate().skip(1) {
                let _ = write!(text, "  {cell:<width$}", width = width(column));
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }

    fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let mut text = line(&HEADS.map(str::to_owned));
        text.push_str(&"|---".repeat(HEADS.len()));
        text.push_str("|\n");
        self.rows.iter().for_each(|row| text.push_str(&line(&row.cells())));
        text.push_str(
            "\nMedians of all rounds, with [the least – the most]. The ratio is the median of the \
             rounds' ratios.\n",
        );
        text
    }

    /// Writes the table, and prints where.
    pub(crate) fn write(&self, directory: &Path) -> String {
        let json = serde_json::to_string_pretty(&self.rows).expect("the table is JSON");
        std::fs::write(directory.join("table.json"), json).expect("written");
        std::fs::write(directory.join("table.md"), self.markdown()).expect("written");
        format!("the table and the plots are in {}", directory.display())
    }

    pub(crate) fn missed(&self) -> impl Iterator<Item = String> {
        let missed = self.rows.iter().filter(|row| row.verdict == Some(Verdict::Missed));
        missed.map(|row| {
            let [case, what, ours, unit, _, ratio, bound, ..] = row.cells();
            format!("{case}: {what}: {ours} {unit} {ratio}, allowed {bound}")
        })
    }

    pub(crate) fn has_wrong_counts(&self) -> bool {
        self.rows.iter().any(|row| row.is_count && row.verdict == Some(Verdict::Missed))
    }
}

fn with_spread(value: f64, spread: Option<(f64, f64)>) -> String {
    match spread.map(|(least, most)| (number(least), number(most))) {
        Some((least, most)) if least != most => format!("{} [{least} – {most}]", number(value)),
        _ => number(value),
    }
}

/// Formats three significant digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "–".to_owned(),
        size if size >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.01 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}
