//! All integration tests, as one binary.

mod auto_traits;
mod cancellation;
#[cfg(feature = "redis")]
mod chaos;
mod conformance;
#[cfg(feature = "redis")]
mod differential;
#[cfg(feature = "redis")]
mod fleet;
#[cfg(all(feature = "axum", feature = "redis"))]
mod http;
#[cfg(all(feature = "axum", feature = "redis"))]
mod keys;
mod layer;
mod ledger;
#[cfg(feature = "redis")]
mod lua;
mod model;
#[cfg(feature = "redis")]
mod outage;
mod properties;
#[cfg(feature = "redis")]
mod redis_errors;
#[cfg(feature = "axum")]
mod refusals;
mod support;
