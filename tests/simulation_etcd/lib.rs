//! A deterministic simulation of the crate over etcd: all of it, down to the stream of bytes to a member, on virtual time,
//! with network, cluster and faults from one seed.
//!
//! A [`Plan`](plan::Plan) is made from a seed and has everything that happens; [`run`](world::run) carries it out and
//! reports what was wrong. Each process has a runtime of its own, with a paused clock, so that it can die and stand still
//! as a whole; so has the cluster. Runtimes run in turn for a window of a millisecond and exchange bytes only between
//! windows, so their order in a window does not matter. The members speak real gRPC.
//!
//! The history of what is stored is judged by the judge of the tests on real clusters; what clients believe is judged by
//! the [`checker`].

#![allow(
    missing_debug_implementations,
    missing_docs,
    clippy::must_use_candidate,
    reason = "for the test beside it alone"
)]

#[path = "../simulation/chance.rs"]
pub mod chance;
pub mod checker;
pub mod client;
pub mod cluster;
#[path = "../simulation/counted.rs"]
mod counted;
#[path = "../it/etcd_faults/history.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests on real clusters")]
mod history;
#[path = "../it/etcd_faults/judge.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests on real clusters")]
mod judge;
pub mod network;
pub mod plan;
pub mod process;
pub mod server;
pub mod store;
pub mod watching;
pub mod world;
