//! The values of metrics, from a recorder of the test's own.

use std::cell::RefCell;
use std::collections::BTreeMap;

use metrics::{LocalRecorderGuard, set_default_local_recorder};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

/// All series of this thread, including tasks; the test has the thread for itself.
pub(crate) struct Recorded {
    snapshotter: Snapshotter,
    // A snapshot removes what it returns.
    series: RefCell<BTreeMap<String, f64>>,
    _here: LocalRecorderGuard<'static>,
}

impl Recorded {
    pub(crate) fn new() -> Self {
        let recorder: &'static DebuggingRecorder = Box::leak(Box::default());
        let snapshotter = recorder.snapshotter();
        let _here = set_default_local_recorder(recorder);
        Self { snapshotter, series: RefCell::default(), _here }
    }

    /// Returns counters and gauges by value, and histograms by their number of values.
    pub(crate) fn all(&self) -> BTreeMap<String, f64> {
        let mut series = self.series.borrow_mut();
        for (key, _, _, value) in self.snapshotter.snapshot().into_vec() {
            let labels = key.key().labels();
            let labels: Vec<_> = labels.map(|l| format!("{}={}", l.key(), l.value())).collect();
            let name = format!("{}{{{}}}", key.key().name(), labels.join(","));
            *series.entry(name).or_default() += match value {
                #[allow(clippy::cast_precision_loss, reason = "small counts")]
                DebugValue::Counter(count) => count as f64,
                DebugValue::Gauge(level) => level.into_inner(),
                #[allow(clippy::cast_precision_loss, reason = "small counts")]
                DebugValue::Histogram(values) => values.len() as f64,
            };
        }
        series.clone()
    }

    /// Returns the value of an existing series: `name{label=value,...}`.
    pub(crate) fn get(&self, series: &str) -> f64 {
        let all = self.all();
        *all.get(series).unwrap_or_else(|| panic!("no {series} in {:#?}", all.keys()))
    }

    /// Returns the names, each with its unit and description.
    pub(crate) fn described(&self) -> BTreeMap<String, Option<(Option<&'static str>, String)>> {
        let series = self.snapshotter.snapshot().into_vec().into_iter();
        series
            .map(|(key, unit, text, _)| {
                let text = text.map(|text| (unit.map(|unit| unit.as_str()), text.to_string()));
                (key.key().name().to_owned(), text)
            })
            .collect()
    }
}
