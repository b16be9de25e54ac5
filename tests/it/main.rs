//! All integration tests, as one binary.

mod conformance;
mod support;
