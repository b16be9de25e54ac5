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
//! | [`TENANT_LINES`] | gauge | – | tenants of which requests of this process wait |
//! | [`OVERTAKING_GRANTS`] | counter | – | grants that passed an older request of another tenant, of this process |
//! | [`PERMITS_LOST`] | counter | `policy` | permits whose lease could not be renewed in time |
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
//! | `tenant_limit` | was refused: its tenant had as many permits as it may |
//! | `cost_too_high` | was refused: it asked for more permits than it could ever have |
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
//! [`ConcurrencyLimitBuilder::key_labels`](crate::limit::ConcurrencyLimitBuilder::key_labels), or
//! [`tenant_labels`](crate::limit::ConcurrencyLimitBuilder::tenant_labels) for tenants.
//! `active_permits` counts what a semaphore counts, so neither `unlimited` nor `bypassed` requests.
//!
//! An exporter that keeps histograms in buckets should be given [`BUCKETS`]: permits are held for as
//! long as streams flow, and the usual buckets end at ten seconds.
//!
#![cfg_attr(feature = "metrics", doc = "```")]
#![cfg_attr(not(feature = "metrics"), doc = "```ignore")]
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

#[cfg_attr(not(feature = "metrics"), path = "backend_disabled.rs")]
pub(crate) mod backend;
#[cfg(feature = "metrics")]
mod names;
pub(crate) mod outcome;
#[cfg_attr(not(feature = "metrics"), path = "requests_disabled.rs")]
pub(crate) mod requests;

#[cfg(feature = "metrics")]
pub use self::names::*;
