//! Metrics of leases and of connections to the backend.
//!
//! `backend_disabled.rs` replaces this file without the feature.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Unit, counter, gauge, histogram};

use super::names::{
    BACKEND_CONNECTIONS, BACKEND_CONNECTS, BACKEND_DISCONNECTS, BACKEND_OPERATION_DURATION,
    BACKEND_QUARANTINED, BACKEND_UNAVAILABLE, LEASE_RENEWALS, OVERTAKING_GRANTS, PAUSES,
    PERMITS_PASSED_ON, TENANT_LINES,
};
use crate::protocol::{Op, PauseCause, PlaceStatus, Reply};

/// Counts for one `Semaphore`. Several in one process share their series.
#[derive(Default)]
pub(crate) struct BackendMeter {
    leases: OnceLock<Leases>,
    tenants: OnceLock<Tenants>,
    passed_on: OnceLock<Counter>,
    pauses: OnceLock<Pauses>,
    /// Not set for the embedded backend, which has no connection.
    backend: OnceLock<ConnectionSeries>,
}

struct Leases {
    renewed: Counter,
    gone: Counter,
    failed: Counter,
}

struct Tenants {
    lines: Gauge,
    overtaking: Counter,
}

struct Pauses {
    operator: Counter,
    upstream: Counter,
}

struct ConnectionSeries {
    /// By operation, then by how it ended: answered, refused, or without an answer.
    durations: [[Histogram; 3]; OPS.len()],
    connections: Gauge,
    unavailable: Gauge,
    quarantined: Gauge,
    connected: Counter,
    failed: Counter,
    disconnects: Counter,
}

const OPS: [&str; 5] = ["acquire", "release", "renew", "reassert", "audit"];

/// Returns the index of the operation in [`OPS`].
const fn index_of(op: &Op) -> usize {
    match op {
        Op::Acquire { .. } => 0,
        Op::Release { .. } => 1,
        Op::Renew { .. } => 2,
        Op::Reassert { .. } => 3,
        Op::Audit { .. } => 4,
    }
}

impl BackendMeter {
    /// Registers the series at zero with the recorder that is installed now, and keeps no handle to them: see
    /// `Meter::register`.
    pub(crate) fn register(is_embedded: bool) {
        Self::default().begin(is_embedded);
    }

    /// Registers the series at zero, and keeps the handles.
    pub(crate) fn begin(&self, is_embedded: bool) {
        self.leases();
        self.tenants();
        self.permits_passed_on();
        self.pauses();
        if !is_embedded {
            self.backend();
        }
    }

    /// Notes that the number of waiting tenants changed.
    pub(crate) fn on_lines_changed(&self, before: usize, now: usize) {
        let (before, now) = (u32::try_from(before), u32::try_from(now));
        let change = f64::from(now.unwrap_or(u32::MAX)) - f64::from(before.unwrap_or(u32::MAX));
        self.tenants().lines.increment(change);
    }

    /// Counts grants that overtook older requests of other tenants.
    pub(crate) fn on_overtaking(&self, grants: u64) {
        self.tenants().overtaking.increment(grants);
    }

    /// Counts permits that went from one request straight to the next one.
    pub(crate) fn on_passed_on(&self, permits: u64) {
        self.permits_passed_on().increment(permits);
    }

    /// Counts a pause that this process asks for.
    pub(crate) fn on_pause(&self, cause: PauseCause) {
        let Pauses { operator, upstream } = self.pauses();
        if cause == PauseCause::Operator { operator } else { upstream }.increment(1);
    }

    /// Counts the renewals in a reply.
    pub(crate) fn on_reply(&self, op: &Op, reply: &Reply) {
        if let Op::Renew { .. } = op {
            let gone = reply.statuses.iter().filter(|s| matches!(s, PlaceStatus::Gone)).count();
            let leases = self.leases();
            leases.gone.increment(gone as u64);
            leases.renewed.increment(reply.statuses.len().saturating_sub(gone) as u64);
        }
    }

    /// Notes that a call was answered, or refused if not `is_reply`, after this time.
    pub(crate) fn on_answer(&self, op: &Op, is_reply: bool, after: Duration) {
        let how = usize::from(!is_reply);
        self.backend().durations[index_of(op)][how].record(after.as_secs_f64());
        if !is_reply && let Op::Renew { ids, .. } = op {
            self.leases().failed.increment(ids.len() as u64);
        }
    }

    /// Notes that the connection broke while this call was unanswered.
    pub(crate) fn on_unanswered(&self, op: &Op, after: Duration) {
        self.backend().durations[index_of(op)][2].record(after.as_secs_f64());
        if let Op::Renew { ids, .. } = op {
            self.leases().failed.increment(ids.len() as u64);
        }
    }

    pub(crate) fn on_connected(&self) -> Level {
        self.backend().connected.increment(1);
        Level::raise(&self.backend().connections)
    }

    pub(crate) fn on_connect_failed(&self) {
        self.backend().failed.increment(1);
    }

    pub(crate) fn on_disconnected(&self) {
        self.backend().disconnects.increment(1);
    }

    pub(crate) fn on_outage(&self) -> Level {
        Level::raise(&self.backend().unavailable)
    }

    pub(crate) fn on_quarantine(&self) -> Level {
        Level::raise(&self.backend().quarantined)
    }

    fn leases(&self) -> &Leases {
        self.leases.get_or_init(Leases::new)
    }

    fn tenants(&self) -> &Tenants {
        self.tenants.get_or_init(Tenants::new)
    }

    fn permits_passed_on(&self) -> &Counter {
        self.passed_on.get_or_init(|| {
            let passed_on = "Permits that went straight to the next request of this process";
            metrics::describe_counter!(PERMITS_PASSED_ON, Unit::Count, passed_on);
            counter!(PERMITS_PASSED_ON)
        })
    }

    fn pauses(&self) -> &Pauses {
        self.pauses.get_or_init(|| {
            let pauses = "Pauses until a time that this process asked for";
            metrics::describe_counter!(PAUSES, Unit::Count, pauses);
            Pauses {
                operator: counter!(PAUSES, "cause" => "operator"),
                upstream: counter!(PAUSES, "cause" => "upstream"),
            }
        })
    }

    fn backend(&self) -> &ConnectionSeries {
        self.backend.get_or_init(ConnectionSeries::new)
    }
}

impl Leases {
    fn new() -> Self {
        use metrics::describe_counter;

        describe_counter!(LEASE_RENEWALS, Unit::Count, "Renewals of leases by result");
        Self {
            renewed: counter!(LEASE_RENEWALS, "result" => "renewed"),
            gone: counter!(LEASE_RENEWALS, "result" => "gone"),
            failed: counter!(LEASE_RENEWALS, "result" => "failed"),
        }
    }
}

impl Tenants {
    fn new() -> Self {
        use metrics::{describe_counter, describe_gauge};

        describe_gauge!(TENANT_LINES, Unit::Count, "Tenants with waiting requests in this process");
        let overtaking = "Grants that passed an older request of another tenant";
        describe_counter!(OVERTAKING_GRANTS, Unit::Count, overtaking);
        Self { lines: gauge!(TENANT_LINES), overtaking: counter!(OVERTAKING_GRANTS) }
    }
}

impl ConnectionSeries {
    fn new() -> Self {
        use metrics::{describe_counter, describe_gauge, describe_histogram};

        const DURATION: &str = BACKEND_OPERATION_DURATION;
        describe_histogram!(DURATION, Unit::Seconds, "Calls to the backend, to the answer");
        describe_gauge!(BACKEND_CONNECTIONS, Unit::Count, "Open connections to backends");
        let unavailable = "Backends that are unavailable, so that the policy decides";
        describe_gauge!(BACKEND_UNAVAILABLE, Unit::Count, unavailable);
        let quarantined = "Backends that may have lost data and grant nothing for a lease";
        describe_gauge!(BACKEND_QUARANTINED, Unit::Count, quarantined);
        describe_counter!(BACKEND_CONNECTS, Unit::Count, "Attempts to connect to a backend");
        describe_counter!(BACKEND_DISCONNECTS, Unit::Count, "Connections that broke");
        let durations = OPS.map(|op| {
            [
                histogram!(DURATION, "op" => op),
                histogram!(DURATION, "op" => op, "error.type" => "refused"),
                histogram!(DURATION, "op" => op, "error.type" => "connection"),
            ]
        });
        Self {
            durations,
            connections: gauge!(BACKEND_CONNECTIONS),
            unavailable: gauge!(BACKEND_UNAVAILABLE),
            quarantined: gauge!(BACKEND_QUARANTINED),
            connected: counter!(BACKEND_CONNECTS, "result" => "connected"),
            failed: counter!(BACKEND_CONNECTS, "result" => "failed"),
            disconnects: counter!(BACKEND_DISCONNECTS),
        }
    }
}

/// Keeps a gauge one higher until it is dropped.
pub(crate) struct Level {
    gauge: Gauge,
}

impl Level {
    fn raise(gauge: &Gauge) -> Self {
        gauge.increment(1.0);
        Self { gauge: gauge.clone() }
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        self.gauge.decrement(1.0);
    }
}

impl fmt::Debug for BackendMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackendMeter").finish_non_exhaustive()
    }
}
