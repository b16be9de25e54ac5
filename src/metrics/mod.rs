//! Metrics of semaphores and layers, for the facade of the crate [`metrics`](https://docs.rs/metrics).
//!
//! Install a recorder to collect them, preferably before anything else: each layer and semaphore then registers its
//! series, at zero, when it is built. With a recorder that is installed later, they register at their first use; a
//! recorder that is installed after that does not receive them. [`register`] registers those of a policy without a
//! layer.
//!
//! | instrument | kind, unit | labels | meaning |
//! |---|---|---|---|
//! | [`REQUESTS`] | counter | `policy`, `result` | requests by result |
//! | [`ACTIVE_PERMITS`] | gauge | `policy` | permits that this process holds |
//! | [`QUEUED_REQUESTS`] | gauge | `policy` | waiting requests of this process |
//! | [`TIME_IN_QUEUE`] | histogram, s | `policy` | from the request to its permit, or to the wait timeout |
//! | [`EXPECTED_WAIT`] | histogram, s | `policy` | how long another request would have waited, where a rejected one was [told](crate::Rejected::expected_wait) |
//! | [`PERMIT_DURATION`] | histogram, s | `policy` | how long permits were held |
//! | [`WAIT_TIMEOUT`] | gauge, s | `policy` | the configured wait timeout; not for a layer with `wait_timeout_by` |
//! | [`TENANT_LINES`] | gauge | – | tenants with waiting requests in this process |
//! | [`OVERTAKING_GRANTS`] | counter | – | grants that overtook an older request of another tenant in this process |
//! | [`PERMITS_PASSED_ON`] | counter | – | permits that went straight to the next request of this process: [`reuse`](crate::PolicyBuilder::reuse) |
//! | [`PERMITS_LOST`] | counter | `policy` | permits whose lease could not be renewed in time |
//! | [`LEASE_RENEWALS`] | counter | `result` | renewals of leases: `renewed`, `gone`, `failed` |
//! | [`BACKEND_OPERATION_DURATION`] | histogram, s | `op`, `error.type` | calls to Redis |
//! | [`BACKEND_CONNECTIONS`] | gauge | – | open connections to Redis: normally one |
//! | [`BACKEND_UNAVAILABLE`] | gauge | – | 1 while Redis is unavailable and the policy decides |
//! | [`BACKEND_QUARANTINED`] | gauge | – | 1 while Redis may have lost data and grants nothing for a lease |
//! | [`BACKEND_CONNECTS`] | counter | `result` | attempts to connect: `connected`, `failed` |
//! | [`BACKEND_DISCONNECTS`] | counter | – | connections that broke |
//!
//! `policy` is the name of the layer, or [`PolicyBuilder::name`](crate::PolicyBuilder::name). `result`
//! of a request is one of:
//!
//! | `result` | the request |
//! |---|---|
//! | `acquired` | got a permit immediately |
//! | `acquired_after_wait` | got one after waiting in the queue |
//! | `admitted` | passed without one, because the backend was unavailable: [`OnUnavailable::Admit`](crate::OnUnavailable::Admit) |
//! | `local` | took one from this process's share during an outage: [`OnUnavailable::Local`](crate::OnUnavailable::Local) |
//! | `unlimited` | needed no permit: [`Limit::Unlimited`](crate::Limit::Unlimited) |
//! | `bypassed` | bypassed the layer: `skip`, or no key and [`MissingKey::Bypass`](crate::limit::MissingKey::Bypass) |
//! | `limit` | was rejected: no permit was free, and it may not wait |
//! | `tenant_limit` | was rejected: its tenant had reached its limit |
//! | `further_limit` | was rejected: one of its further limits was full |
//! | `cost_too_high` | was rejected: it asked for more permits than it can ever get |
//! | `rate` | was rejected: see [`RejectReason::Rate`](crate::RejectReason::Rate) |
//! | `budget` | was rejected: see [`RejectReason::Budget`](crate::RejectReason::Budget) |
//! | `queue_full` | was rejected: the queue was full |
//! | `queue_timeout` | was rejected: its wait timeout passed |
//! | `hopeless` | was rejected: it would have waited in vain, see [`refuse_hopeless`](crate::PolicyBuilder::refuse_hopeless) |
//! | `quarantine` | was rejected: Redis might have lost data, and granted nothing for a lease |
//! | `paused` | was rejected: an operator had paused the semaphore, or set its limit to 0 |
//! | `upstream_pause` | was rejected: see [`Permit::feedback`](crate::Permit::feedback) and [`Semaphore::pause_for`](crate::Semaphore::pause_for) |
//! | `draining` | was rejected: see [`Semaphore::drain`](crate::Semaphore::drain) |
//! | `revoked` | was rejected: see [`Semaphore::revoke`](crate::Semaphore::revoke) |
//! | `missing_key` | was rejected: it had no key |
//! | `missing_tenant` | was rejected: it had no tenant |
//! | `unavailable` | was rejected: the backend was unavailable |
//! | `closed` | was rejected: the semaphore was shut down |
//! | `request_canceled` | left before it got an answer |
//!
//! No label contains a request's key, unless a layer is configured to, with a bound on the number of keys:
//! [`ConcurrencyLimitBuilder::key_labels`](crate::limit::ConcurrencyLimitBuilder::key_labels), or
//! [`tenant_labels`](crate::limit::ConcurrencyLimitBuilder::tenant_labels) for tenants.
//! `active_permits` does not include `unlimited` and `bypassed` requests, which take no permit.
//!
//! Configure exporters that use buckets for histograms with [`BUCKETS`]: permits are held as long as responses stream,
//! and default buckets end at ten seconds.
//!
//! # Examples
//!
//! ```ignore
//! use std::time::Duration;
//!
//! use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
//!
//! let mut exporter = PrometheusBuilder::new().with_recommended_naming(true);
//! for (name, buckets) in tower_semaphore::metrics::BUCKETS {
//!     exporter = exporter.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
//! }
//! let prometheus = exporter.install_recorder()?; // serve prometheus.render() on a route of yours
//!
//! // Moves recorded values into their buckets; otherwise they stay in memory until the next scrape.
//! let upkeep = prometheus.clone();
//! tokio::spawn(async move {
//!     let mut ticks = tokio::time::interval(Duration::from_secs(5));
//!     loop {
//!         ticks.tick().await;
//!         upkeep.run_upkeep();
//!     }
//! });
//! ```
//!
//! The dashboard and the alerts in `examples/observability` use the resulting names,
//! such as `concurrency_limit_requests_total` and `concurrency_limit_permit_duration_seconds_bucket`.

#[cfg_attr(not(feature = "metrics"), path = "backend_disabled.rs")]
pub(crate) mod backend;
#[cfg(feature = "metrics")]
mod names;
pub(crate) mod outcome;
#[cfg_attr(not(feature = "metrics"), path = "requests_disabled.rs")]
pub(crate) mod requests;

#[cfg(feature = "metrics")]
pub use self::names::*;
#[cfg(feature = "metrics")]
use crate::policy::Policy;

/// Registers the series of a policy, at zero, with the recorder that is installed now.
///
/// A layer does this when it is built. A policy is plain data, so call this for one that is used without a layer.
///
/// # Examples
///
/// ```
/// use tower_semaphore::{ConfigError, Policy, metrics};
///
/// # fn main() -> Result<(), ConfigError> {
/// let policy = Policy::builder(20).name("jobs").build()?;
/// metrics::register(&policy);
/// # Ok(()) }
/// ```
#[cfg(feature = "metrics")]
pub fn register(policy: &Policy) {
    let name = std::sync::Arc::from(policy.name);
    requests::Meter::new(&name, None, Some(policy.wait_timeout)).register();
}
