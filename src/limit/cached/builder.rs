//! How a cache is set up.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use quick_cache::sync::Cache;

use super::entry::CacheOptions;
use super::{Cached, Inner, OnUnknown, Source};
use crate::error::ConfigError;

/// Most keys in a cache.
const CAPACITY_MAX: usize = 10_000_000;
/// Longest time that an answer may be used, fresh or stale.
const TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Longest time that a request may wait for an answer.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// Builds a [`Cached`].
///
/// Made by [`Cached::builder`].
#[must_use]
pub struct CachedBuilder<V> {
    source: Arc<Source<V>>,
    capacity: usize,
    options: CacheOptions<V>,
}

impl<V: Copy> CachedBuilder<V> {
    pub(super) fn new(source: Arc<Source<V>>) -> Self {
        let options = CacheOptions {
            time_to_live: Duration::from_secs(60),
            stale_for: Duration::from_secs(600),
            timeout: Duration::from_millis(500),
            on_failure: OnUnknown::default(),
        };
        Self { source, capacity: 10_000, options }
    }

    /// Sets the most keys that the cache holds, 1 to 10 million. The default is 10,000.
    ///
    /// ```
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).capacity(100_000).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys;
        self
    }

    /// Sets how long an answer is fresh: more than zero, at most a week. The default is 60 s.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).time_to_live(Duration::from_secs(10)).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn time_to_live(mut self, time: Duration) -> Self {
        self.options.time_to_live = time;
        self
    }

    /// Sets how much longer an answer is used while the source fails, at most a week. The default is 10 min; with
    /// zero, it is not used then.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).stale_for(Duration::from_secs(3600)).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn stale_for(mut self, time: Duration) -> Self {
        self.options.stale_for = time;
        self
    }

    /// Sets how long the source may take before that counts as a failure: more than zero, at most a minute. The
    /// default is 500 ms.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::CachedLimit;
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).timeout(Duration::from_millis(100)).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = timeout;
        self
    }

    /// Sets what happens to a request whose limit or plan is unknown, because the source fails and the cache has nothing
    /// recent enough. The default is [`OnUnknown::Refuse`].
    ///
    /// ```
    /// use tower_semaphore::Limit;
    /// use tower_semaphore::limit::{CachedLimit, OnUnknown};
    ///
    /// # async fn plan() -> Result<u32, std::io::Error> { Ok(5) }
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let plans = CachedLimit::builder(|_, _| plan()).on_failure(OnUnknown::Assume(Limit::Permits(1))).build()?;
    /// # Ok(()) }
    /// ```
    pub const fn on_failure(mut self, on_failure: OnUnknown<V>) -> Self {
        self.options.on_failure = on_failure;
        self
    }

    /// Builds the cache, which is empty.
    ///
    /// # Errors
    ///
    /// If a value is out of its range.
    pub fn build(self) -> Result<Cached<V>, ConfigError> {
        let CacheOptions { time_to_live, stale_for, timeout, .. } = self.options;
        if !(1..=CAPACITY_MAX).contains(&self.capacity) {
            return Err(ConfigError::new(format!(
                "capacity is {} keys; expected 1 to {CAPACITY_MAX}",
                self.capacity
            )));
        }
        if time_to_live.is_zero() || time_to_live > TIME_MAX {
            return Err(ConfigError::new(format!(
                "time to live is {time_to_live:?}; expected more than 0, to {TIME_MAX:?}"
            )));
        }
        if stale_for > TIME_MAX {
            return Err(ConfigError::new(format!(
                "stale for is {stale_for:?}; expected 0 to {TIME_MAX:?}"
            )));
        }
        if timeout.is_zero() || timeout > TIMEOUT_MAX {
            return Err(ConfigError::new(format!(
                "timeout is {timeout:?}; expected more than 0, to {TIMEOUT_MAX:?}"
            )));
        }
        let entries = Cache::new(self.capacity);
        let inner = Inner { source: self.source, options: self.options, entries };
        Ok(Cached { inner: Arc::new(inner) })
    }
}

impl<V: Copy> Clone for CachedBuilder<V> {
    fn clone(&self) -> Self {
        let Self { source, capacity, options } = self;
        Self { source: Arc::clone(source), capacity: *capacity, options: *options }
    }
}

impl<V: fmt::Debug> fmt::Debug for CachedBuilder<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedBuilder")
            .field("capacity", &self.capacity)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
