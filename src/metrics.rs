//! What semaphores and layers count, for the facade of the crate [`metrics`](https://docs.rs/metrics).
//!
//! Install a recorder, and it is all there: the series are made when a layer or a semaphore is first
//! used, so it does not matter whether the recorder or the layer is made first. What happens before
//! there is a recorder is not counted, then or later.
//!
//! | instrument | kind, unit | labels | what |
//! |---|---|---|---|
//! | [`REQUESTS`] | counter | `policy`, `result` | requests, by what became of them |
//! | [`ACTIVE_PERMITS`] | gauge | `policy` | permits that this process holds |
//! | [`QUEUED_REQUESTS`] | gauge | `policy` | requests of this process that wait |
//! | [`TIME_IN_QUEUE`] | histogram, s | `policy` | from the request to its permit, or to the wait timeout |
//! | [`PERMIT_DURATION`] | histogram, s | `policy` | for how long permits were held |
//! | [`WAIT_TIMEOUT`] | gauge, s | `policy` | how long a request may wait, as it was set |
//! | [`PERMITS_LOST`] | counter | – | permits whose lease could not be renewed in time |
//! | [`LEASE_RENEWALS`] | counter | `result` | leases that were renewed: `renewed`, `gone`, `failed` |
//! | [`BACKEND_OPERATION_DURATION`] | histogram, s | `op`, `error.type` | calls to Redis |
//! | [`BACKEND_CONNECTIONS`] | gauge | – | open connections to Redis: one, if all is well |
//! | [`BACKEND_UNAVAILABLE`] | gauge | – | 1 while Redis cannot be asked and the policy answers |
//! | [`BACKEND_CONNECTS`] | counter | `result` | attempts to connect: `connected`, `failed` |
//! | [`BACKEND_DISCONNECTS`] | counter | – | connections that broke |
//!
//! `policy` is the name of the layer, or [`PolicyBuilder::name`](crate::PolicyBuilder::name). `result`
//! of a request is one of:
//!
//! | `result` | the request |
//! |---|---|
//! | `acquired` | got a permit at once |
//! | `acquired_after_wait` | got one after it had waited in the queue |
//! | `admitted` | passed without one, because the backend was away: [`OnUnavailable::Admit`](crate::OnUnavailable::Admit) |
//! | `local` | took one of this process's own meanwhile: [`OnUnavailable::Local`](crate::OnUnavailable::Local) |
//! | `unlimited` | needed none: [`Limit::Unlimited`](crate::Limit::Unlimited) |
//! | `bypassed` | was let past the layer: `skip`, or no key and [`MissingKey::Bypass`](crate::limit::MissingKey::Bypass) |
//! | `limit` | was refused: no permit was free, and it might not wait |
//! | `queue_full` | was refused: as many waited as may |
//! | `queue_timeout` | was refused: it had waited as long as it might |
//! | `draining` | was refused: see [`Semaphore::drain`](crate::Semaphore::drain) |
//! | `revoked` | was refused: see [`Semaphore::revoke`](crate::Semaphore::revoke) |
//! | `missing_key` | was refused: it had no key |
//! | `unavailable` | was refused: the backend could not be asked |
//! | `closed` | was refused: the semaphore was shut down |
//! | `request_canceled` | left before there was an answer |
//!
//! No label holds a user's key, unless a layer is asked for it, with a bound:
//! [`ConcurrencyLimitBuilder::key_labels`](crate::limit::ConcurrencyLimitBuilder::key_labels).
//! `active_permits` counts what a semaphore counts, so neither `unlimited` nor `bypassed` requests.
//!
//! An exporter that keeps histograms in buckets should be given [`BUCKETS`]: permits are held for as
//! long as streams flow, and the usual buckets end at ten seconds.
//!
//! ```
//! use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut exporter = PrometheusBuilder::new().with_recommended_naming(true);
//! for (name, buckets) in tower_semaphore::metrics::BUCKETS {
//!     exporter = exporter.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
//! }
//! let prometheus = exporter.install_recorder()?;
//! // ... and on a route of your own: prometheus.render()
//! # Ok(()) }
//! ```
//!
//! The dashboard and the alerts in `examples/observability` are made for the names that come of this,
//! such as `concurrency_limit_requests_total` and `concurrency_limit_permit_duration_seconds_bucket`.

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
