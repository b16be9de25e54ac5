//! The locks and atomics of the shell around sessions.
//!
//! They are those of `std`, except in `tests/long locks`, which uses those of `shuttle`: it decides at each of them which
//! thread runs next.

#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};

use std::sync::PoisonError;

/// Locks, and ignores poisoning: no panic leaves the state behind these locks half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
