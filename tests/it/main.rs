//! All integration tests, as one binary.

mod conformance;
#[cfg(feature = "redis")]
mod differential;
#[cfg(feature = "redis")]
mod fleet;
#[cfg(all(feature = "axum", feature = "redis"))]
mod http;
mod layer;
#[cfg(feature = "axum")]
mod refusals;
mod support;
