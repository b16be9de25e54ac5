//! The settings of a semaphore, validated when they are built.

use std::time::Duration;

use crate::error::ConfigError;
#[doc(inline)]
pub use crate::protocol::session::OnUnavailable;

/// How long a request waits for the backend's first answer, and for an acknowledgement.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How many permits a semaphore has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// This many. With 0 every request is rejected.
    Permits(u32),
    /// No limit. Nothing is counted, and the backend is not asked.
    Unlimited,
}

impl From<u32> for Limit {
    fn from(permits: u32) -> Self {
        Self::Permits(permits)
    }
}

/// The settings of a semaphore: limit, wait timeout, queue and lease.
///
/// All users of one name should use the same policy. Where policies differ, as during a rolling deploy, each request
/// is judged by its own limit and headroom, and the queue keeps its order: requests with a higher limit wait behind the
/// first one while that waits for its lower limit.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore::Policy;
///
/// # fn main() -> Result<(), tower_semaphore::ConfigError> {
/// let policy = Policy::builder(10)
///     .wait_timeout(Duration::from_millis(500))
///     .lease(Duration::from_secs(5))
///     .max_queue(100)
///     .build()?;
/// assert_eq!(policy.lease(), Duration::from_secs(5));
/// assert_eq!(policy.max_queue(), 100);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub(crate) limit: Limit,
    pub(crate) wait_timeout: Duration,
    pub(crate) lease: Duration,
    pub(crate) max_queue: u32,
    /// `None`: derived from `max_queue`.
    pub(crate) max_waiting: Option<u32>,
    pub(crate) headroom: u32,
    pub(crate) linger: Duration,
    pub(crate) max_pause: Duration,
    pub(crate) reuse: bool,
    pub(crate) on_unavailable: OnUnavailable,
    /// The label of its requests in the metrics.
    pub(crate) name: &'static str,
}

/// Builds a [`Policy`].
#[derive(Clone, Debug)]
#[must_use = "`build` returns the policy"]
pub struct PolicyBuilder {
    policy: Policy,
}

impl Policy {
    /// The default wait timeout: 2 s.
    pub const DEFAULT_WAIT_TIMEOUT: Duration = Duration::from_secs(2);
    /// The longest wait timeout: an hour.
    pub const MAX_WAIT_TIMEOUT: Duration = Duration::from_secs(3600);
    /// The default lease: 10 s.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);
    /// The shortest lease: half a second.
    pub const MIN_LEASE: Duration = Duration::from_millis(500);
    /// The longest lease: a day.
    pub const MAX_LEASE: Duration = Duration::from_secs(24 * 3600);
    /// The longest pause that a response of the upstream can ask for by default: a minute.
    pub const DEFAULT_MAX_PAUSE: Duration = Duration::from_secs(60);
    /// The longest pause that a response of the upstream can be allowed to ask for: an hour.
    pub const MAX_MAX_PAUSE: Duration = Duration::from_secs(3600);
    /// How many requests may wait for one name in the whole fleet by default: 10,000.
    pub const DEFAULT_MAX_QUEUE: u32 = 10_000;

    /// Creates a policy with this limit, and the defaults for the rest.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Limit, Policy};
    ///
    /// assert_eq!(Policy::new(10).limit(), Limit::Permits(10));
    /// assert_eq!(Policy::new(Limit::Unlimited).limit(), Limit::Unlimited);
    /// ```
    #[must_use]
    pub fn new(limit: impl Into<Limit>) -> Self {
        Self {
            limit: limit.into(),
            wait_timeout: Self::DEFAULT_WAIT_TIMEOUT,
            lease: Self::DEFAULT_LEASE,
            max_queue: Self::DEFAULT_MAX_QUEUE,
            max_waiting: None,
            headroom: 0,
            linger: Duration::ZERO,
            max_pause: Self::DEFAULT_MAX_PAUSE,
            reuse: false,
            on_unavailable: OnUnavailable::default(),
            name: "default",
        }
    }

    /// Starts a policy with this limit and the defaults.
    pub fn builder(limit: impl Into<Limit>) -> PolicyBuilder {
        PolicyBuilder { policy: Self::new(limit) }
    }

    /// Returns the linger in ms, rounded up.
    pub(crate) fn linger_ms(&self) -> u32 {
        if self.linger.is_zero() {
            return 0;
        }
        u32::try_from(self.linger.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
    }

    /// Returns the longest pause in ms, rounded up.
    pub(crate) fn max_pause_ms(&self) -> u32 {
        u32::try_from(self.max_pause.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
    }

    /// Returns the policy with another limit.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Limit, Policy};
    ///
    /// let free = Policy::new(2);
    /// let paying = free.clone().with_limit(20);
    /// assert_eq!(paying.limit(), Limit::Permits(20));
    /// ```
    #[must_use]
    pub fn with_limit(mut self, limit: impl Into<Limit>) -> Self {
        self.limit = limit.into();
        self
    }

    /// Returns the number of permits.
    #[must_use]
    pub const fn limit(&self) -> Limit {
        self.limit
    }

    /// Returns how long a request may [wait](PolicyBuilder::wait_timeout) for a permit.
    #[must_use]
    pub const fn wait_timeout(&self) -> Duration {
        self.wait_timeout
    }

    /// Returns how long a permit [outlives](PolicyBuilder::lease) a process that dies.
    #[must_use]
    pub const fn lease(&self) -> Duration {
        self.lease
    }

    /// Returns how many requests may wait [in one line](PolicyBuilder::max_queue).
    #[must_use]
    pub const fn max_queue(&self) -> u32 {
        self.max_queue
    }

    /// Returns how many requests of tenants may wait [in all lines](PolicyBuilder::max_waiting): the default, if it
    /// was not set.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// assert_eq!(Policy::new(10).max_waiting(), 20_000);
    /// assert_eq!(Policy::builder(10).max_queue(15_000).build()?.max_waiting(), 30_000);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_waiting(&self) -> u32 {
        let longest = self.max_queue.max(Self::DEFAULT_MAX_QUEUE);
        self.max_waiting.unwrap_or_else(|| longest.saturating_mul(2))
    }

    /// Returns how many permits are [reserved](PolicyBuilder::headroom) for requests of class 0.
    #[must_use]
    pub const fn headroom(&self) -> u32 {
        self.headroom
    }

    /// Returns the longest pause that a response of the upstream [can ask for](PolicyBuilder::max_pause).
    #[must_use]
    pub const fn max_pause(&self) -> Duration {
        self.max_pause
    }

    /// Returns how long a permit [stays taken](PolicyBuilder::linger) after its request was broken off.
    #[must_use]
    pub const fn linger(&self) -> Duration {
        self.linger
    }

    /// Returns whether a process [reuses](PolicyBuilder::reuse) permits for its own requests.
    #[must_use]
    pub const fn reuse(&self) -> bool {
        self.reuse
    }

    /// Returns what happens to a request while the [backend is unavailable](PolicyBuilder::on_unavailable).
    #[must_use]
    pub const fn on_unavailable(&self) -> OnUnavailable {
        self.on_unavailable
    }

    /// Returns the value of the label `policy` in the metrics of the feature `metrics`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Checks each value, and the values against each other.
    fn validate(&self) -> Result<(), ConfigError> {
        self.validate_times()?;
        if self.reuse && (self.wait_timeout.is_zero() || self.max_queue == 0) {
            return Err(ConfigError::new(
                "reuse is set with a wait timeout or a max queue of zero, and a request that may not wait is \
                 rejected while another process keeps a permit that nobody uses; expected a longer wait timeout \
                 and queue, or no reuse",
            ));
        }
        match self.limit {
            Limit::Permits(limit @ 1..) => self.validate_against(limit),
            Limit::Permits(0) | Limit::Unlimited => Ok(()),
        }
    }

    fn validate_times(&self) -> Result<(), ConfigError> {
        let Self { lease, linger, wait_timeout, .. } = *self;
        if lease < Self::MIN_LEASE || lease > Self::MAX_LEASE {
            return Err(ConfigError::new(format!(
                "lease is {lease:?}; expected {:?} to {:?}",
                Self::MIN_LEASE,
                Self::MAX_LEASE
            )));
        }
        if linger > lease / 2 {
            return Err(ConfigError::new(format!(
                "linger is {linger:?}, more than half of the lease of {lease:?}; expected 0 to {:?}, or a \
                 longer lease",
                lease / 2
            )));
        }
        if wait_timeout > Self::MAX_WAIT_TIMEOUT {
            return Err(ConfigError::new(format!(
                "wait timeout is {wait_timeout:?}; expected 0 (reject at once) to {:?}",
                Self::MAX_WAIT_TIMEOUT
            )));
        }
        if self.max_pause > Self::MAX_MAX_PAUSE {
            return Err(ConfigError::new(format!(
                "longest pause is {:?}; expected 0 (never pause) to {:?}",
                self.max_pause,
                Self::MAX_MAX_PAUSE
            )));
        }
        Ok(())
    }

    fn validate_against(&self, limit: u32) -> Result<(), ConfigError> {
        let headroom = self.headroom;
        if headroom >= limit {
            return Err(ConfigError::new(format!(
                "headroom is {headroom}, which leaves nothing of {limit} permits to the other classes; expected 0 \
                 to {}",
                limit - 1
            )));
        }
        if let OnUnavailable::Local(share) = self.on_unavailable
            && share > limit
        {
            return Err(ConfigError::new(format!(
                "local share is {share}, more than the limit of {limit} permits; expected 0 to \
                 {limit}, which is the limit divided by the number of processes"
            )));
        }
        Ok(())
    }
}

impl PolicyBuilder {
    /// Sets how long a request may wait for a permit, from its call on. With zero it is rejected at once if no permit
    /// is free.
    ///
    /// The default is 2 s, the maximum an hour.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).wait_timeout(Duration::from_millis(500)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn wait_timeout(mut self, timeout: Duration) -> Self {
        self.policy.wait_timeout = timeout;
        self
    }

    /// Sets how long a permit outlives a process that dies. While the process lives, its permits are renewed every
    /// third of this.
    ///
    /// The default is 10 s; allowed are half a second to a day, in whole milliseconds. A short lease frees the permits of
    /// a dead process sooner; a long one rides out longer stalls of process and backend.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).lease(Duration::from_secs(5)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.policy.lease = lease;
        self
    }

    /// Sets how many requests may wait for one name in the whole fleet; further ones are rejected at once. Where
    /// requests name a [tenant](crate::Ask::by), this is the maximum of each tenant, and
    /// [`max_waiting`](Self::max_waiting) that of all of them.
    ///
    /// The default is 10,000. A full queue rejects requests regardless of their process. If a process has workers that
    /// ask again at once, set this to more than their number.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).max_queue(100).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn max_queue(mut self, places: u32) -> Self {
        self.policy.max_queue = places;
        self
    }

    /// Sets how many requests of [tenants](crate::Ask::by) may wait for one name in the whole fleet, in the lines of all
    /// tenants together; further ones are rejected at once. [`max_queue`](Self::max_queue) is the maximum of each line,
    /// so without this bound thousands of tenants could queue millions of requests, and each of them is renewed each
    /// second.
    ///
    /// A tenant may have as many waiting as there is room for others, so one with a long line leaves room for those
    /// that have none: alone it can have half of this waiting, and two tenants a third each.
    ///
    /// The default is 20,000, or twice [`max_queue`](Self::max_queue) if that is more.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // Each tenant 100, and all of them 2,000.
    /// let policy = Policy::builder(10).max_queue(100).max_waiting(2000).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn max_waiting(mut self, places: u32) -> Self {
        self.policy.max_waiting = Some(places);
        self
    }

    /// Sets how many permits are reserved for requests of class 0: see [`Ask::class`](crate::Ask::class). Must be less
    /// than the limit; where an operator lowers the limit to the headroom, the other classes wait.
    ///
    /// The default is none. In an outage, [`OnUnavailable::Local`] goes by class, and reserves nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // Batch jobs, of a higher class, leave two of ten permits to interactive requests.
    /// let policy = Policy::builder(10).headroom(2).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn headroom(mut self, permits: u32) -> Self {
        self.policy.headroom = permits;
        self
    }

    /// Sets how long a permit stays taken after its request was broken off: see [`Permit::break_off`]. Use it for
    /// the quota of a third party, such as an LLM provider, which notices late that a client left.
    ///
    /// The default is zero, the maximum half of the lease. A lease has at least that left when a process dies, so a
    /// crash frees no permit sooner than a request that is broken off. For the same reason a permit that cannot be
    /// renewed is [lost](crate::Permit::lost) this long before its lease ends.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // The provider needs some 50 ms to notice.
    /// let policy = Policy::builder(10).linger(Duration::from_millis(200)).build()?;
    /// # Ok(()) }
    /// ```
    ///
    /// [`Permit::break_off`]: crate::Permit::break_off
    pub const fn linger(mut self, linger: Duration) -> Self {
        self.policy.linger = linger;
        self
    }

    /// Sets whether a permit that is given back goes straight to the next request of this process, without a call to the
    /// backend, as long as this process knows that no other one waits. Use it for names that are hot in each process and
    /// whose permits are held for milliseconds, such as a pool in front of a database. Where a permit is held for a
    /// second, it saves nothing worth naming.
    ///
    /// The default is `false`. A permit that is given back while no request of this process waits is kept for at most
    /// 50 ms, and counts as in use. When a request of another process starts to wait, this process is notified and
    /// releases what it keeps. If that message is lost, or the other process does not set this, requests of this process
    /// can be granted ahead of the other's for at most 50 ms after the call whose reply last said that nobody else
    /// waits. [`Permit::release`] always gives a permit back.
    ///
    /// A request that may not wait joins no queue, and is rejected as long as another process uses and keeps the
    /// permits. [`build`](Self::build) therefore refuses a wait timeout of zero, and a queue of none.
    /// [`Semaphore::try_acquire`] and a layer's `wait_timeout_by` are not checked.
    ///
    /// A permit serves requests that ask for the same: limit, lease, tenant with weight, class, cost and cap, and so on.
    /// While requests of several tenants wait in this process, it passes nothing on, so that the next grant is the fair
    /// one.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(20).reuse(true).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    ///
    /// [`Permit::release`]: crate::Permit::release
    /// [`Semaphore::try_acquire`]: crate::Semaphore::try_acquire
    pub const fn reuse(mut self, reuse: bool) -> Self {
        self.policy.reuse = reuse;
        self
    }

    /// Sets the longest pause that a response of the upstream can ask for: see [`Permit::feedback`]. The default is 60
    /// s; with zero, no response pauses anything. At most [`Policy::MAX_MAX_PAUSE`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).max_pause(Duration::from_secs(20)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    ///
    /// [`Permit::feedback`]: crate::Permit::feedback
    pub const fn max_pause(mut self, max_pause: Duration) -> Self {
        self.policy.max_pause = max_pause;
        self
    }

    /// Sets what happens to a request while the backend cannot be asked. The default is to refuse it.
    ///
    /// Requests that passed by this are counted by the backend as soon as it is back, as far as they are still in
    /// flight. A [local share](OnUnavailable::Local) must not be more than the limit.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{OnUnavailable, Policy};
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // A limit of 30 for three replicas: each admits 10 by itself in an outage.
    /// let policy = Policy::builder(30).on_unavailable(OnUnavailable::Local(10)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn on_unavailable(mut self, on_unavailable: OnUnavailable) -> Self {
        self.policy.on_unavailable = on_unavailable;
        self
    }

    /// Sets the value of the label `policy` in the [metrics](crate::metrics), for requests under this policy. The name
    /// of a layer replaces it.
    ///
    /// The default is `default`. The metrics keep the name as long as the process lives, so it is `&'static`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).name("nightly").build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    #[cfg(feature = "metrics")]
    pub const fn name(mut self, name: &'static str) -> Self {
        self.policy.name = name;
        self
    }

    /// Sets the limit, in place of that with which the builder was made.
    pub(crate) const fn limit(mut self, limit: Limit) -> Self {
        self.policy.limit = limit;
        self
    }

    /// Checks the values and returns the policy.
    ///
    /// # Errors
    ///
    /// If a value is out of its range, or a local share is more than the limit.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// let error = Policy::builder(10).lease(Duration::ZERO).build().unwrap_err();
    /// assert_eq!(error.to_string(), "lease is 0ns; expected 500ms to 86400s");
    /// ```
    pub fn build(self) -> Result<Policy, ConfigError> {
        self.policy.validate()?;
        Ok(self.policy)
    }
}
