//! Names and buckets of metrics.

/// Counter of requests, by `policy` and `result`.
pub const REQUESTS: &str = "concurrency_limit.requests";
/// Gauge of the permits that this process holds, by `policy`.
pub const ACTIVE_PERMITS: &str = "concurrency_limit.active_permits";
/// Gauge of the waiting requests of this process, by `policy`.
pub const QUEUED_REQUESTS: &str = "concurrency_limit.queued_requests";
/// Histogram, in seconds, from a request to its permit, or to its wait timeout, by `policy`. Does not include requests
/// that were rejected immediately or that left.
pub const TIME_IN_QUEUE: &str = "concurrency_limit.request.time_in_queue";
/// Histogram, in seconds, of how long a request would have waited that came when another one was rejected, by `policy`: see
/// [`Rejected::expected_wait`](crate::Rejected::expected_wait). Does not include rejections that could not tell.
pub const EXPECTED_WAIT: &str = "concurrency_limit.request.expected_wait";
/// Histogram, in seconds, of how long permits were held, by `policy`.
pub const PERMIT_DURATION: &str = "concurrency_limit.permit.duration";
/// Gauge, in seconds, of the configured wait timeout, by `policy`.
pub const WAIT_TIMEOUT: &str = "concurrency_limit.wait_timeout";
/// Gauge of the limit in force of a semaphore that [finds its limit itself](crate::PolicyBuilder::adaptive), by `policy`. If
/// several keys of a policy have no label of their own, that of the one that changed last.
pub const ADAPTIVE_LIMIT: &str = "concurrency_limit.adaptive.limit";
/// Counter of the decreases of such a limit, by `policy`. Each process that uses the semaphore counts each.
pub const ADAPTIVE_DECREASES: &str = "concurrency_limit.adaptive.decreases";
/// Counter of permits whose lease was lost, by `policy`.
pub const PERMITS_LOST: &str = "concurrency_limit.permits.lost";
/// Counter of permits that went from one request of this process straight to its next one, and not back to the
/// backend: see [`PolicyBuilder::reuse`](crate::PolicyBuilder::reuse).
pub const PERMITS_PASSED_ON: &str = "concurrency_limit.permits.passed_on";
/// Counter of pauses until a time that this process asked for, by `cause`: `operator` or `upstream`.
pub const PAUSES: &str = "concurrency_limit.pauses";
/// Gauge of tenants with waiting requests in this process, over all semaphores that are fair between tenants.
pub const TENANT_LINES: &str = "concurrency_limit.tenant_lines";
/// Counter of grants that overtook an older request of another tenant in this process: where fair shares differ from
/// first come, first served.
pub const OVERTAKING_GRANTS: &str = "concurrency_limit.overtaking_grants";
/// Counter of renewals of leases, waiting or held, by `result`: `renewed`; `gone` if the backend no longer knew the
/// lease; `failed` if the backend was unavailable or refused.
pub const LEASE_RENEWALS: &str = "concurrency_limit.lease.renewals";
/// Histogram, in seconds, of calls to the backend, from the write to the answer, by `op`. Failed calls also have an
/// `error.type`: `refused` by the backend, or `connection`.
pub const BACKEND_OPERATION_DURATION: &str = "concurrency_limit.backend.operation.duration";
/// Gauge of open connections to backends.
pub const BACKEND_CONNECTIONS: &str = "concurrency_limit.backend.connections";
/// Gauge of backends that are unavailable, so that the policy decides in their place.
pub const BACKEND_UNAVAILABLE: &str = "concurrency_limit.backend.unavailable";
/// Gauge of backends that may have lost data and grant nothing for a lease: see `AfterLoss::Quarantine`.
pub const BACKEND_QUARANTINED: &str = "concurrency_limit.backend.quarantined";
/// Counter of attempts to connect, by `result`: `connected` or `failed`.
pub const BACKEND_CONNECTS: &str = "concurrency_limit.backend.connects";
/// Counter of connections that broke.
pub const BACKEND_DISCONNECTS: &str = "concurrency_limit.backend.disconnects";

/// Buckets for [`TIME_IN_QUEUE`], in seconds: from a round trip to the longest usual wait timeouts.
pub const TIME_IN_QUEUE_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0,
    60.0, 300.0,
];
/// Buckets for [`EXPECTED_WAIT`], in seconds: it is an estimate, so these are few.
pub const EXPECTED_WAIT_BUCKETS: &[f64] = &[0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Buckets for [`PERMIT_DURATION`], in seconds: from a fast handler to a stream of hours.
pub const PERMIT_DURATION_BUCKETS: &[f64] =
    &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0];
/// Buckets for [`BACKEND_OPERATION_DURATION`], in seconds: up to the default response timeout.
pub const BACKEND_OPERATION_DURATION_BUCKETS: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// All histograms with their buckets.
pub const BUCKETS: [(&str, &[f64]); 4] = [
    (TIME_IN_QUEUE, TIME_IN_QUEUE_BUCKETS),
    (EXPECTED_WAIT, EXPECTED_WAIT_BUCKETS),
    (PERMIT_DURATION, PERMIT_DURATION_BUCKETS),
    (BACKEND_OPERATION_DURATION, BACKEND_OPERATION_DURATION_BUCKETS),
];
