//! What is counted of leases and of the connection to the backend. `link_meter_off.rs` is the same
//! without the feature.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Unit, counter, gauge, histogram};

use crate::backend::{Answer, Op};
use crate::ledger::Standing;
use crate::metrics::{
    BACKEND_CONNECTIONS, BACKEND_CONNECTS, BACKEND_DISCONNECTS, BACKEND_OPERATION_DURATION,
    BACKEND_UNAVAILABLE, LEASE_RENEWALS, PERMITS_LOST,
};

/// Counts for one `Semaphore`. Those of one process add up.
#[derive(Default)]
pub(super) struct LinkMeter {
    leases: OnceLock<Leases>,
    // Not there for the embedded backend, which has no connection.
    backend: OnceLock<Connection>,
}

struct Leases {
    lost: Counter,
    renewed: Counter,
    gone: Counter,
    failed: Counter,
}

struct Connection {
    // By operation, and by how it ended.
    durations: [[Histogram; 3]; OPS.len()],
    connections: Gauge,
    unavailable: Gauge,
    connected: Counter,
    failed: Counter,
    disconnects: Counter,
}

const OPS: [&str; 5] = ["acquire", "release", "renew", "reassert", "inspect"];

/// Of the operations on places; no others are counted.
const fn index_of(op: &Op) -> usize {
    match op {
        Op::Acquire { .. } => 0,
        Op::Release { .. } => 1,
        Op::Renew { .. } => 2,
        Op::Reassert { .. } => 3,
        _ => 4,
    }
}

impl LinkMeter {
    /// Makes the series, at their zero.
    pub(super) fn begin(&self, is_embedded: bool) {
        self.leases();
        if !is_embedded {
            self.backend();
        }
    }

    pub(super) fn lost(&self, permits: u64) {
        self.leases().lost.increment(permits);
    }

    /// The embedded backend answered: of interest is what became of leases.
    pub(super) fn answered_here(&self, op: &Op, answer: &Answer) {
        let Op::Renew { ids, .. } = op else { return };
        let leases = self.leases();
        match answer {
            Answer::Reply { reply, .. } => {
                let gone = reply.standings.iter().filter(|s| matches!(s, Standing::Gone)).count();
                leases.gone.increment(gone as u64);
                leases.renewed.increment(reply.standings.len().saturating_sub(gone) as u64);
            }
            _ => leases.failed.increment(ids.len() as u64),
        }
    }

    /// A call was answered after so long.
    pub(super) fn answered(&self, op: &Op, answer: &Answer, after: Duration) {
        let how = usize::from(matches!(answer, Answer::Failed(_)));
        self.backend().durations[index_of(op)][how].record(after.as_secs_f64());
        self.answered_here(op, answer);
    }

    /// The connection broke with this call unanswered.
    pub(super) fn unanswered(&self, op: &Op, after: Duration) {
        self.backend().durations[index_of(op)][2].record(after.as_secs_f64());
        if let Op::Renew { ids, .. } = op {
            self.leases().failed.increment(ids.len() as u64);
        }
    }

    pub(super) fn connected(&self) -> Level {
        self.backend().connected.increment(1);
        Level::raise(&self.backend().connections)
    }

    pub(super) fn connect_failed(&self) {
        self.backend().failed.increment(1);
    }

    pub(super) fn disconnected(&self) {
        self.backend().disconnects.increment(1);
    }

    pub(super) fn unavailable(&self) -> Level {
        Level::raise(&self.backend().unavailable)
    }

    fn leases(&self) -> &Leases {
        self.leases.get_or_init(Leases::new)
    }

    fn backend(&self) -> &Connection {
        self.backend.get_or_init(Connection::new)
    }
}

impl Leases {
    fn new() -> Self {
        use metrics::describe_counter;

        describe_counter!(PERMITS_LOST, Unit::Count, "Permits that were lost to their holders");
        describe_counter!(LEASE_RENEWALS, Unit::Count, "Leases that were to be renewed");
        Self {
            lost: counter!(PERMITS_LOST),
            renewed: counter!(LEASE_RENEWALS, "result" => "renewed"),
            gone: counter!(LEASE_RENEWALS, "result" => "gone"),
            failed: counter!(LEASE_RENEWALS, "result" => "failed"),
        }
    }
}

impl Connection {
    fn new() -> Self {
        use metrics::{describe_counter, describe_gauge, describe_histogram};

        const DURATION: &str = BACKEND_OPERATION_DURATION;
        describe_histogram!(DURATION, Unit::Seconds, "Calls to the backend, until the answer");
        describe_gauge!(BACKEND_CONNECTIONS, Unit::Count, "Open connections to backends");
        let away = "Backends that cannot be asked, so that the policy answers";
        describe_gauge!(BACKEND_UNAVAILABLE, Unit::Count, away);
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
            connected: counter!(BACKEND_CONNECTS, "result" => "connected"),
            failed: counter!(BACKEND_CONNECTS, "result" => "failed"),
            disconnects: counter!(BACKEND_DISCONNECTS),
        }
    }
}

/// A gauge is one higher as long as this lives.
pub(super) struct Level {
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

impl fmt::Debug for LinkMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkMeter").finish_non_exhaustive()
    }
}
