//! A deterministic simulation of the crate: all of it above the `Backend` seam, on virtual time, with randomness,
//! network, servers and faults from one seed.
//!
//! A [`Plan`](plan::Plan) is made from a seed and has everything that happens; [`run`](world::run) carries it out and
//! reports what was wrong. Each process has a runtime of its own, with a paused clock, so that it can die and stand
//! still as a whole. Processes run in turn for a window of a few milliseconds and exchange messages only between
//! windows, so their order in a window does not matter.

pub mod backend;
pub mod chance;
pub mod checker;
mod counted;
pub mod fair;
pub mod further;
pub mod naive;
pub mod plan;
pub mod process;
pub mod shrink;
pub mod world;
