//! The sets in which tenants were found lately.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long calls on such a set begin with the scripts for tenants. After that the scripts for plain sets are tried
/// again, because the tenants may be gone, and those scripts cost less.
const REMEMBERED: Duration = Duration::from_secs(5);
/// The most sets that are remembered.
const SETS_MAX: usize = 10_000;

/// Remembers these sets, so that not every call on one is made twice.
#[derive(Debug, Default)]
pub(super) struct Tenanted(Mutex<HashMap<Arc<str>, Instant>>);

impl Tenanted {
    /// Returns whether tenants were found in a set lately.
    pub(super) fn has(&self, key: &str) -> bool {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Most processes have no tenants; spare them the hash.
        !found.is_empty() && found.get(key).is_some_and(|until| Instant::now() < *until)
    }

    /// Notes that a set has tenants.
    pub(super) fn insert(&self, key: &Arc<str>) {
        let now = Instant::now();
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if found.len() >= SETS_MAX {
            found.retain(|_, until| now < *until);
        }
        if found.len() < SETS_MAX {
            found.insert(Arc::clone(key), now + REMEMBERED);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::advance;

    use super::{SETS_MAX, Tenanted};

    #[tokio::test(start_paused = true)]
    async fn a_bounded_number_of_sets_is_remembered_for_a_while() {
        let (sets, key) = (Tenanted::default(), |n: usize| Arc::<str>::from(n.to_string()));
        for n in 0..=SETS_MAX {
            sets.insert(&key(n));
        }
        assert!(sets.has("0") && !sets.has(&key(SETS_MAX)), "one too many");
        advance(Duration::from_secs(5)).await;
        assert!(!sets.has("0"));
        sets.insert(&key(SETS_MAX));
        assert!(sets.has(&key(SETS_MAX)), "older ones made room");
        assert_eq!(sets.0.lock().unwrap().len(), 1);
    }
}
