//! What the cache knows of one key.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout};

use super::OnUnknown;
use crate::error::{BackendError, Seconds};
use crate::limit::BoxError;

/// Pause after a failure before the source is asked again for the same key.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct CacheOptions<V> {
    pub(super) time_to_live: Duration,
    pub(super) stale_for: Duration,
    pub(super) timeout: Duration,
    pub(super) on_failure: OnUnknown<V>,
}

/// The cache entry of one key.
pub(super) struct Entry<V> {
    seen: Mutex<Seen<V>>,
    /// Held while the source is asked.
    pub(super) asking: Arc<tokio::sync::Mutex<()>>,
}

pub(super) struct Seen<V> {
    answer: Option<(V, Instant)>,
    /// The last failure since the answer.
    failure: Option<(BackendError, Instant)>,
}

impl<V> Default for Entry<V> {
    fn default() -> Self {
        Self { seen: Mutex::default(), asking: Arc::default() }
    }
}

impl<V> Default for Seen<V> {
    fn default() -> Self {
        Self { answer: None, failure: None }
    }
}

impl<V: Copy> Entry<V> {
    pub(super) fn seen(&self) -> MutexGuard<'_, Seen<V>> {
        // No panic leaves it half changed.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn ask(
        &self,
        source: BoxFuture<'static, Result<V, BoxError>>,
        options: &CacheOptions<V>,
    ) -> Result<V, BackendError> {
        let answer = match timeout(options.timeout, source).await {
            Ok(answer) => answer.map_err(|error| {
                BackendError::call(format!("the look-up failed: {error}")).with_source(error)
            }),
            Err(_) => Err(BackendError::call(format!(
                "the look-up had no answer within {}",
                Seconds(options.timeout)
            ))),
        };
        let now = Instant::now();
        let mut seen = self.seen();
        match answer {
            Ok(answer) => *seen = Seen { answer: Some((answer, now)), failure: None },
            Err(error) => {
                tracing::debug!(target: "tower_semaphore", %error, "the source of limits or plans failed; the cached answer is used, if there is one");
                seen.failure = Some((error, now));
            }
        }
        seen.outcome(options, now)
    }
}

impl<V: Copy> Seen<V> {
    /// The answer from the cache; `None`: the source is to be asked.
    pub(super) fn answer(
        &self,
        options: &CacheOptions<V>,
        now: Instant,
    ) -> Option<Result<V, BackendError>> {
        let is_fresh =
            |(answer, at): (V, Instant)| (now < at + options.time_to_live).then_some(Ok(answer));
        let is_paused = self.failure.as_ref().is_some_and(|(_, at)| now < *at + PAUSE);
        self.answer.and_then(is_fresh).or_else(|| is_paused.then(|| self.outcome(options, now)))
    }

    /// The answer without the source.
    fn outcome(&self, options: &CacheOptions<V>, now: Instant) -> Result<V, BackendError> {
        match (self.usable(options, now), &self.failure, options.on_failure) {
            (Some(answer), _, _) | (None, _, OnUnknown::Assume(answer)) => Ok(answer),
            (None, Some((error, _)), OnUnknown::Refuse) => Err(error.clone()),
            (None, None, OnUnknown::Refuse) => {
                Err(BackendError::call("the look-up has no answer yet"))
            }
        }
    }

    /// The last answer, if it may still be used.
    pub(super) fn usable(&self, options: &CacheOptions<V>, now: Instant) -> Option<V> {
        let (answer, at) = self.answer?;
        (now < at + options.time_to_live + options.stale_for).then_some(answer)
    }
}
