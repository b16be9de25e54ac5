//! The locks and atomics of the shell around sessions.
//!
//! They are those of `std`, except in `tests/locks`: there they are those of `shuttle`, which decides at
//! each of them which thread goes on.

#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};

use std::sync::PoisonError;

/// No state behind these locks is left half changed by a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
