//! The names and buckets of what is counted.

/// Counter of requests, by `policy` and `result`.
pub const REQUESTS: &str = "concurrency_limit.requests";
/// Gauge of the permits that this process holds, by `policy`.
pub const ACTIVE_PERMITS: &str = "concurrency_limit.active_permits";
/// Gauge of the requests of this process that wait in a queue, by `policy`.
pub const QUEUED_REQUESTS: &str = "concurrency_limit.queued_requests";
/// Histogram, in seconds, from a request to its permit, or to its wait timeout, by `policy`. Requests
/// that were refused at once, or that left, are not in it.
pub const TIME_IN_QUEUE: &str = "concurrency_limit.request.time_in_queue";
/// Histogram, in seconds, of how long permits were held, by `policy`.
pub const PERMIT_DURATION: &str = "concurrency_limit.permit.duration";
/// Gauge, in seconds, of the wait timeout that a `policy` is set to.
pub const WAIT_TIMEOUT: &str = "concurrency_limit.wait_timeout";
/// Counter of permits that were lost to their holders.
pub const PERMITS_LOST: &str = "concurrency_limit.permits.lost";
/// Gauge of tenants of which requests of this process wait, over all semaphores that are fair between
/// tenants: each has a line.
pub const TENANT_LINES: &str = "concurrency_limit.tenant_lines";
/// Counter of grants that passed an older request of this process, of another tenant: what fair shares did
/// otherwise than first come, first served.
pub const OVERTAKING_GRANTS: &str = "concurrency_limit.overtaking_grants";
/// Counter of leases, waiting or held, that were to be renewed, by `result`: `renewed`; `gone` where
/// the backend did not know them any more; `failed` where it could not be asked, or refused.
pub const LEASE_RENEWALS: &str = "concurrency_limit.lease.renewals";
/// Histogram, in seconds, of calls to the backend, from the write to the answer, by `op`. Where a
/// call failed there is an `error.type` too: `refused` by the backend, or `connection`.
pub const BACKEND_OPERATION_DURATION: &str = "concurrency_limit.backend.operation.duration";
/// Gauge of open connections to backends.
pub const BACKEND_CONNECTIONS: &str = "concurrency_limit.backend.connections";
/// Gauge of backends that cannot be asked, so that the policy answers in their place.
pub const BACKEND_UNAVAILABLE: &str = "concurrency_limit.backend.unavailable";
/// Counter of attempts to connect, by `result`: `connected` or `failed`.
pub const BACKEND_CONNECTS: &str = "concurrency_limit.backend.connects";
/// Counter of connections that broke.
pub const BACKEND_DISCONNECTS: &str = "concurrency_limit.backend.disconnects";

/// Buckets for [`TIME_IN_QUEUE`], in seconds: from a round trip to the longest wait timeouts.
pub const TIME_IN_QUEUE_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0,
    60.0, 300.0,
];
/// Buckets for [`PERMIT_DURATION`], in seconds: from a quick handler to a stream of some hours.
pub const PERMIT_DURATION_BUCKETS: &[f64] =
    &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0];
/// Buckets for [`BACKEND_OPERATION_DURATION`], in seconds: up to the time at which an answer is
/// given up.
pub const BACKEND_OPERATION_DURATION_BUCKETS: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// Every histogram with its buckets.
pub const BUCKETS: [(&str, &[f64]); 3] = [
    (TIME_IN_QUEUE, TIME_IN_QUEUE_BUCKETS),
    (PERMIT_DURATION, PERMIT_DURATION_BUCKETS),
    (BACKEND_OPERATION_DURATION, BACKEND_OPERATION_DURATION_BUCKETS),
];
