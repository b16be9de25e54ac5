//! What the gateway counts of itself, in addition to the series of the crate. Without the feature `metrics`, nothing.

const RELOADS: &str = "gateway.reloads";
const UPSTREAM_ERRORS: &str = "gateway.upstream_errors";
const LINES_DROPPED: &str = "gateway.log_lines_dropped";
const CLIENT_CONNECTIONS: &str = "gateway.client_connections";
const UPSTREAM_CONNECTIONS: &str = "gateway.upstream_connections";

/// Why a request got 502 or 504.
#[derive(Clone, Copy, Debug)]
pub(crate) enum UpstreamError {
    /// No connection.
    Connect,
    /// No valid response.
    Response,
    /// No response in time.
    Timeout,
}

impl UpstreamError {
    const fn reason(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Response => "response",
            Self::Timeout => "timeout",
        }
    }
}

/// A log that drops the lines that it cannot take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Log {
    Access,
    Stderr,
}

impl Log {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Access => "access",
            Self::Stderr => "stderr",
        }
    }
}

/// Describes all series, and creates them with 0.
#[cfg(feature = "metrics")]
pub(crate) fn describe() {
    use metrics::{Unit, describe_counter, describe_gauge, gauge};

    describe_counter!(RELOADS, Unit::Count, "Reloads of the configuration");
    describe_counter!(UPSTREAM_ERRORS, Unit::Count, "Requests that got 502 or 504");
    describe_counter!(LINES_DROPPED, Unit::Count, "Lines that a log could not take");
    describe_gauge!(CLIENT_CONNECTIONS, Unit::Count, "Open connections of clients");
    describe_gauge!(UPSTREAM_CONNECTIONS, Unit::Count, "Open connections to the upstream");
    for succeeded in [true, false] {
        count(RELOADS, "result", result(succeeded), 0);
    }
    for error in [UpstreamError::Connect, UpstreamError::Response, UpstreamError::Timeout] {
        count(UPSTREAM_ERRORS, "reason", error.reason(), 0);
    }
    lines_dropped(Log::Access, 0);
    lines_dropped(Log::Stderr, 0);
    gauge!(CLIENT_CONNECTIONS).set(0.0);
    gauge!(UPSTREAM_CONNECTIONS).set(0.0);
}

pub(crate) fn reloaded(succeeded: bool) {
    count(RELOADS, "result", result(succeeded), 1);
}

pub(crate) fn upstream_failed(error: UpstreamError) {
    count(UPSTREAM_ERRORS, "reason", error.reason(), 1);
}

pub(crate) fn lines_dropped(log: Log, lines: u64) {
    count(LINES_DROPPED, "log", log.name(), lines);
}

const fn result(succeeded: bool) -> &'static str {
    if succeeded { "succeeded" } else { "failed" }
}

fn count(name: &'static str, label: &'static str, value: &'static str, by: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!(name, label => value).increment(by);
    #[cfg(not(feature = "metrics"))]
    let _ = (name, label, value, by);
}

/// An open connection; counted until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    series: &'static str,
}

impl OpenConnection {
    pub(crate) fn of_client() -> Self {
        Self::new(CLIENT_CONNECTIONS)
    }

    pub(crate) fn to_upstream() -> Self {
        Self::new(UPSTREAM_CONNECTIONS)
    }

    fn new(series: &'static str) -> Self {
        #[cfg(feature = "metrics")]
        metrics::gauge!(series).increment(1.0);
        Self { series }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        #[cfg(feature = "metrics")]
        metrics::gauge!(self.series).decrement(1.0);
        #[cfg(not(feature = "metrics"))]
        let _ = self.series;
    }
}
