//! Metrics of requests. The series of a label set are registered once and kept.
//!
//! `requests_disabled.rs` replaces this file without the feature.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Label, Unit, counter, gauge, histogram};
use tokio::time::Instant;

use super::names::{
    ACTIVE_PERMITS, ADAPTIVE_DECREASES, ADAPTIVE_LIMIT, EXPECTED_WAIT, PERMIT_DURATION,
    PERMITS_LOST, QUEUED_REQUESTS, REQUESTS, TIME_IN_QUEUE, WAIT_TIMEOUT,
};
use super::outcome::Outcome;

/// Counts the requests of one policy, or of one key or tenant of it.
#[derive(Clone)]
pub(crate) struct Meter {
    series: Arc<Lazy>,
}

/// The series of a meter, which are created at its first use: a handle that is created before a recorder is installed
/// records nothing, and layers and the recorder can be set up in any order.
struct Lazy {
    policy: Arc<str>,
    /// A second label: its name and its value.
    label: Option<(&'static str, Arc<str>)>,
    /// `None` if it depends on the request, which a gauge cannot show.
    wait_timeout: Option<Duration>,
    created: OnceLock<Series>,
    /// Created only where a limit finds itself.
    adaptive: OnceLock<Adaptive>,
}

struct Adaptive {
    limit: Gauge,
    decreases: Counter,
}

struct Series {
    requests: [Counter; OUTCOMES.len()],
    active: Gauge,
    queued: Gauge,
    time_in_queue: Histogram,
    expected_wait: Histogram,
    duration: Histogram,
    lost: Counter,
}

/// In the order of the enum.
const OUTCOMES: [Outcome; 25] = [
    Outcome::Acquired,
    Outcome::AcquiredAfterWait,
    Outcome::Admitted,
    Outcome::Local,
    Outcome::Unlimited,
    Outcome::Bypassed,
    Outcome::Limit,
    Outcome::TenantLimit,
    Outcome::FurtherLimit,
    Outcome::CostTooHigh,
    Outcome::QueueFull,
    Outcome::QueueTimeout,
    Outcome::Hopeless,
    Outcome::Quarantine,
    Outcome::Paused,
    Outcome::UpstreamPause,
    Outcome::Rate,
    Outcome::Budget,
    Outcome::Draining,
    Outcome::Revoked,
    Outcome::MissingKey,
    Outcome::MissingTenant,
    Outcome::Unavailable,
    Outcome::Closed,
    Outcome::Canceled,
];

impl Meter {
    /// Creates a meter for a policy, or for one value of a second label in it. Registers no series yet.
    pub(crate) fn new(
        policy: &Arc<str>,
        label: Option<(&'static str, Arc<str>)>,
        wait_timeout: Option<Duration>,
    ) -> Self {
        let policy = Arc::clone(policy);
        let (created, adaptive) = (OnceLock::new(), OnceLock::new());
        Self { series: Arc::new(Lazy { policy, label, wait_timeout, created, adaptive }) }
    }

    /// Registers its series at zero with the recorder that is installed now. Keeps no handle: if there is no recorder
    /// yet, they would record nothing, and the first use creates them again.
    pub(crate) fn register(&self) {
        let Lazy { policy, label, wait_timeout, .. } = &*self.series;
        drop(Series::new(policy, label.as_ref(), *wait_timeout));
    }

    /// Notes that a request joined the queue.
    pub(crate) fn on_queued(&self) {
        self.series().queued.increment(1.0);
    }

    /// Notes that a request ended, in the queue or before it.
    pub(crate) fn on_outcome(&self, outcome: Outcome, waited: Duration, was_queued: bool) {
        self.count(outcome);
        if was_queued {
            self.series().queued.decrement(1.0);
        }
        let waits = [
            Outcome::Acquired,
            Outcome::AcquiredAfterWait,
            Outcome::Admitted,
            Outcome::Local,
            Outcome::QueueTimeout,
        ];
        if waits.contains(&outcome) {
            self.series().time_in_queue.record(waited.as_secs_f64());
        }
    }

    /// Notes what a rejected request was told of the wait.
    pub(crate) fn on_expected_wait(&self, wait: Duration) {
        self.series().expected_wait.record(wait.as_secs_f64());
    }

    /// Counts a result without a wait.
    pub(crate) fn count(&self, outcome: Outcome) {
        self.series().requests[outcome as usize].increment(1);
    }

    /// Begins to measure permits that are held from `now` on.
    pub(crate) fn hold(&self, permits: u32, now: Instant) -> Hold {
        self.series().active.increment(f64::from(permits));
        Hold { of: Some((self.clone(), permits, now)) }
    }

    /// Counts a permit whose lease was lost.
    pub(crate) fn on_lost(&self) {
        self.series().lost.increment(1);
    }

    /// Shows a limit that finds itself, and counts whether it was lowered.
    pub(crate) fn on_adapted(&self, limit: u32, is_lowered: bool) {
        let Lazy { policy, label, adaptive, .. } = &*self.series;
        let series = adaptive.get_or_init(|| Adaptive::new(policy, label.as_ref()));
        series.limit.set(f64::from(limit));
        series.decreases.increment(u64::from(is_lowered));
    }

    fn series(&self) -> &Series {
        let Lazy { policy, label, wait_timeout, created, .. } = &*self.series;
        created.get_or_init(|| Series::new(policy, label.as_ref(), *wait_timeout))
    }
}

impl Series {
    fn new(
        policy: &Arc<str>,
        label: Option<&(&'static str, Arc<str>)>,
        wait_timeout: Option<Duration>,
    ) -> Self {
        describe();
        if let Some(wait_timeout) = wait_timeout {
            gauge!(WAIT_TIMEOUT, "policy" => Arc::clone(policy)).set(wait_timeout.as_secs_f64());
        }
        let labels = labels_of(policy, label);
        let requests = OUTCOMES.map(|outcome| {
            let mut labels = labels.clone();
            labels.push(Label::from_static_parts("result", outcome.as_str()));
            counter!(REQUESTS, labels)
        });
        Self {
            requests,
            active: gauge!(ACTIVE_PERMITS, labels.clone()),
            queued: gauge!(QUEUED_REQUESTS, labels.clone()),
            time_in_queue: histogram!(TIME_IN_QUEUE, labels.clone()),
            expected_wait: histogram!(EXPECTED_WAIT, labels.clone()),
            duration: histogram!(PERMIT_DURATION, labels.clone()),
            lost: counter!(PERMITS_LOST, labels),
        }
    }
}

impl Adaptive {
    fn new(policy: &Arc<str>, label: Option<&(&'static str, Arc<str>)>) -> Self {
        use metrics::{describe_counter, describe_gauge};

        let limit = "Limit in force of semaphores that find it themselves";
        describe_gauge!(ADAPTIVE_LIMIT, Unit::Count, limit);
        describe_counter!(ADAPTIVE_DECREASES, Unit::Count, "Decreases of such a limit");
        let labels = labels_of(policy, label);
        Self {
            limit: gauge!(ADAPTIVE_LIMIT, labels.clone()),
            decreases: counter!(ADAPTIVE_DECREASES, labels),
        }
    }
}

fn labels_of(policy: &Arc<str>, label: Option<&(&'static str, Arc<str>)>) -> Vec<Label> {
    let mut labels = vec![Label::new("policy", Arc::clone(policy))];
    labels.extend(label.map(|(name, value)| Label::new(*name, Arc::clone(value))));
    labels
}

fn describe() {
    use metrics::{describe_counter, describe_gauge, describe_histogram};

    describe_counter!(REQUESTS, Unit::Count, "Requests by result");
    describe_gauge!(ACTIVE_PERMITS, Unit::Count, "Permits that this process holds");
    describe_gauge!(QUEUED_REQUESTS, Unit::Count, "Waiting requests of this process");
    describe_counter!(PERMITS_LOST, Unit::Count, "Permits whose lease was lost");
    let to_permit = "From a request to its permit, or to its wait timeout";
    describe_histogram!(TIME_IN_QUEUE, Unit::Seconds, to_permit);
    let told = "Expected wait at the time of a rejection";
    describe_histogram!(EXPECTED_WAIT, Unit::Seconds, told);
    describe_histogram!(PERMIT_DURATION, Unit::Seconds, "How long permits were held");
    describe_gauge!(WAIT_TIMEOUT, Unit::Seconds, "Configured wait timeout");
}

/// Measures a permit while it is held.
#[derive(Clone, Default)]
pub(crate) struct Hold {
    of: Option<(Meter, u32, Instant)>,
}

impl Hold {
    pub(crate) const fn is_measured(&self) -> bool {
        self.of.is_some()
    }

    /// Ends the measurement. Call it once for all clones of a permit.
    pub(crate) fn end(&self, now: Instant) {
        if let Some((meter, permits, since)) = &self.of {
            let series = meter.series();
            series.active.decrement(f64::from(*permits));
            series.duration.record(now.saturating_duration_since(*since).as_secs_f64());
        }
    }
}

/// The meters of policies that are used without a layer.
#[derive(Default)]
pub(crate) struct Meters {
    /// The first eight, which are found without a lock.
    first: [OnceLock<(&'static str, Meter)>; 8],
    /// The rest. Names are `&'static str`, so their number is bounded by the program's text.
    others: Mutex<HashMap<&'static str, Meter>>,
}

impl Meters {
    pub(crate) fn of(&self, name: &'static str, wait_timeout: Duration) -> Meter {
        let new = || Meter::new(&Arc::from(name), None, Some(wait_timeout));
        for slot in &self.first {
            let (known, meter) = slot.get_or_init(|| (name, new()));
            if *known == name {
                return meter.clone();
            }
        }
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.entry(name).or_insert_with(new).clone()
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("policy", &self.series.policy).finish_non_exhaustive()
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}
