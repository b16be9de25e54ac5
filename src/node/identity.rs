//! The identity of this process, as other processes see it.

use std::process;

use crate::error::BackendError;
use crate::protocol::NodeId;
use crate::sync::{Mutex, lock};

/// The identity of a process, created at the first use of its semaphore.
///
/// Two processes with one identity would take each other's permits for their own. A fork copies the identity, so the
/// child may not use a semaphore that has one. A semaphore that was built, but not used, before the fork gets one in
/// each process.
pub(crate) struct Identity {
    pub(crate) id: NodeId,
    process: u32,
    /// Jitters pauses.
    random: Mutex<fastrand::Rng>,
}

impl Identity {
    /// Makes the identity of this process from a random number.
    pub(crate) fn new(seed: u64) -> Self {
        Self::of(process::id(), seed)
    }

    pub(crate) fn of(process: u32, seed: u64) -> Self {
        let random = Mutex::new(fastrand::Rng::with_seed(!seed));
        Self { id: NodeId::new(seed), process, random }
    }

    /// Returns a random number from 0 to 1.
    pub(crate) fn random(&self) -> f64 {
        lock(&self.random).f64()
    }

    /// Checks that this is the process that it was made for.
    ///
    /// # Errors
    ///
    /// If this process is a fork of that one.
    pub(crate) fn check(&self) -> Result<(), BackendError> {
        let (here, before) = (process::id(), self.process);
        if here == before {
            return Ok(());
        }
        Err(BackendError::call(format!(
            "this semaphore was used in process {before}, of which process {here} is a fork; expected one that is made \
             or first used after the fork"
        )))
    }
}
