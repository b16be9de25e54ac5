//! The sets in which tenants were found.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long calls on such a set use the scripts for tenants at once. After that the scripts for plain sets are tried
/// again, because tenants may be gone and those cost less.
const REMEMBERED: Duration = Duration::from_secs(5);
/// The most sets that are remembered.
const SETS_MAX: usize = 10_000;

/// Remembers them, so that not every call on one is made twice.
#[derive(Debug, Default)]
pub(super) struct Tenanted(Mutex<HashMap<Arc<str>, Instant>>);

impl Tenanted {
    /// Returns whether tenants were found in a set a moment ago.
    pub(super) fn has(&self, key: &str) -> bool {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Most processes have none.
        !found.is_empty() && found.get(key).is_some_and(|until| Instant::now() < *until)
    }

    /// Notes that there are tenants in a set.
    pub(super) fn found(&self, key: &Arc<str>) {
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
    async fn sets_are_remembered_for_a_while_and_so_many_of_them() {
        let (sets, key) = (Tenanted::default(), |n: usize| Arc::<str>::from(n.to_string()));
        for n in 0..=SETS_MAX {
            sets.found(&key(n));
        }
        assert!(sets.has("0") && !sets.has(&key(SETS_MAX)), "one too many");
        advance(Duration::from_secs(5)).await;
        assert!(!sets.has("0"));
        sets.found(&key(SETS_MAX));
        assert!(sets.has(&key(SETS_MAX)), "older ones made room");
        assert_eq!(sets.0.lock().unwrap().len(), 1);
    }
}
