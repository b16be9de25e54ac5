//! What the cache knows of one key.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::OnUnknown;
use super::call::Call;
use crate::error::BackendError;

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
}

pub(super) struct Seen<V> {
    /// The last answer, and when it came.
    answer: Option<(V, Instant)>,
    /// The last failure since the answer.
    failure: Option<(BackendError, Instant)>,
    /// The last call, and until when requests wait for it. If none of them is polled, the next one drives it on; after
    /// another pause it is too old, and is replaced.
    call: Weak<Call<V>>,
    until: Instant,
}

/// What is known without another call of the source.
pub(super) enum Known<V> {
    Answer(Result<V, BackendError>),
    /// The source is being asked, and a request waits until then.
    Running(Arc<Call<V>>, Instant),
}

impl<V> Default for Entry<V> {
    fn default() -> Self {
        let (call, until) = (Weak::new(), Instant::now());
        Self { seen: Mutex::new(Seen { answer: None, failure: None, call, until }) }
    }
}

impl<V: Copy> Entry<V> {
    pub(super) fn seen(&self) -> MutexGuard<'_, Seen<V>> {
        // No panic leaves it half changed.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a call. Returns what a request that waited for it gets.
    pub(super) fn end(
        &self,
        call: &Arc<Call<V>>,
        answer: Result<V, BackendError>,
        options: &CacheOptions<V>,
    ) -> Result<V, BackendError> {
        let (mut seen, now) = (self.seen(), Instant::now());
        let is_news = seen.end(call);
        let error = match answer {
            Ok(answer) if is_news => {
                // The request that takes it may not have been polled for long.
                (seen.answer, seen.failure) = (Some((answer, now.min(seen.until))), None);
                return Ok(answer);
            }
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        if is_news {
            seen.failure = Some((error.clone(), now));
        }
        let instead = seen.instead_of(&error, options, now);
        drop(seen);
        if is_news {
            tracing::debug!(target: "tower_semaphore", %error, "the source of limits or plans failed; the cached answer is used, if there is one");
        }
        instead
    }
}

impl<V: Copy> Seen<V> {
    /// The answer from the cache, or the call to wait for; `None`: the source is to be asked.
    pub(super) fn known(&mut self, options: &CacheOptions<V>, now: Instant) -> Option<Known<V>> {
        if let Some((answer, at)) = self.answer
            && now < at + options.time_to_live
        {
            return Some(Known::Answer(Ok(answer)));
        }
        if let Some((error, at)) = &self.failure
            && now < *at + PAUSE
        {
            return Some(Known::Answer(self.instead_of(error, options, now)));
        }
        if now >= self.until + PAUSE {
            return None;
        }
        // Only the request that asks waits, if there is a stale answer for the others.
        if now < self.until
            && self.call.strong_count() > 0
            && let Some(answer) = self.usable(options, now)
        {
            return Some(Known::Answer(Ok(answer)));
        }
        let call = self.call.upgrade()?;
        if now >= self.until {
            // Those that wait for it are not polled, or are about to end it.
            self.until = now + options.timeout;
        }
        Some(Known::Running(call, self.until))
    }

    /// Begins a call, unless another request has meanwhile.
    pub(super) fn begin(
        &mut self,
        call: &Arc<Call<V>>,
        options: &CacheOptions<V>,
        now: Instant,
    ) -> Known<V> {
        self.known(options, now).unwrap_or_else(|| {
            (self.call, self.until) = (Arc::downgrade(call), now + options.timeout);
            Known::Running(Arc::clone(call), self.until)
        })
    }

    /// Forgets a call. Returns whether it was the last one, and was not forgotten before.
    pub(super) fn end(&mut self, call: &Arc<Call<V>>) -> bool {
        let is_last = self.call.as_ptr() == Arc::as_ptr(call);
        if is_last {
            self.call = Weak::new();
        }
        is_last
    }

    /// What a request gets if the source has failed.
    fn instead_of(
        &self,
        error: &BackendError,
        options: &CacheOptions<V>,
        now: Instant,
    ) -> Result<V, BackendError> {
        match (self.usable(options, now), options.on_failure) {
            (Some(answer), _) | (None, OnUnknown::Assume(answer)) => Ok(answer),
            (None, OnUnknown::Refuse) => Err(error.clone()),
        }
    }

    /// The last answer, if it may still be used.
    fn usable(&self, options: &CacheOptions<V>, now: Instant) -> Option<V> {
        let (answer, at) = self.answer?;
        (now < at + options.time_to_live + options.stale_for).then_some(answer)
    }
}
