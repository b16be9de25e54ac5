//! All integration tests, as one binary.

mod conformance;
#[cfg(feature = "redis")]
mod fleet;
mod layer;
mod support;
