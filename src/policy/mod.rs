//! The settings of a semaphore, validated when they are built.

mod adaptive;
mod builder;

use std::time::Duration;

pub use self::builder::PolicyBuilder;
pub(crate) use self::builder::rate_in_place;
use crate::error::ConfigError;
#[doc(inline)]
pub use crate::protocol::session::OnUnavailable;
use crate::protocol::{Adaptive, Rate};

/// How long a request waits for the backend's first answer, and for an acknowledgement.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How many permits a semaphore has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// This many. With 0 every request is rejected.
    Permits(u32),
    /// No limit. Nothing is counted, and the backend is not asked, unless there is a [rate](PolicyBuilder::rate).
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
    pub(crate) rate: Option<Rate>,
    pub(crate) adaptive: Option<Adaptive>,
    pub(crate) wait_timeout: Duration,
    pub(crate) lease: Duration,
    pub(crate) max_queue: u32,
    /// `None`: derived from `max_queue`.
    pub(crate) max_waiting: Option<u32>,
    pub(crate) headroom: u32,
    pub(crate) linger: Duration,
    pub(crate) max_pause: Duration,
    pub(crate) reuse: bool,
    pub(crate) refuse_hopeless: bool,
    pub(crate) on_unavailable: OnUnavailable,
    /// The label of its requests in the metrics.
    pub(crate) name: &'static str,
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
            rate: None,
            adaptive: None,
            wait_timeout: Self::DEFAULT_WAIT_TIMEOUT,
            lease: Self::DEFAULT_LEASE,
            max_queue: Self::DEFAULT_MAX_QUEUE,
            max_waiting: None,
            headroom: 0,
            linger: Duration::ZERO,
            max_pause: Self::DEFAULT_MAX_PAUSE,
            reuse: false,
            refuse_hopeless: false,
            on_unavailable: OnUnavailable::default(),
            name: "default",
        }
    }

    /// Starts a policy with this limit and the defaults.
    pub fn builder(limit: impl Into<Limit>) -> PolicyBuilder {
        PolicyBuilder { policy: Self::new(limit), rate: None, is_smooth: false }
    }

    /// Returns the number of permits as it is counted: with a rate, requests are counted in any case.
    pub(crate) const fn counted_limit(&self) -> Limit {
        match (self.limit, self.rate) {
            (Limit::Unlimited, Some(_)) => Limit::Permits(u32::MAX),
            (limit, _) => limit,
        }
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

    /// Returns how long a request waits that is refused if it would wait in vain, in ms, rounded up; 0: none is.
    pub(crate) fn patience_ms(&self) -> u32 {
        if !self.refuse_hopeless {
            return 0;
        }
        u32::try_from(self.wait_timeout.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
    }

    /// Returns the policy with another limit, which does not [find itself](PolicyBuilder::adaptive) if it is not the maximum
    /// of that.
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
        self.set_limit(limit.into());
        self
    }

    /// Sets another limit: see [`with_limit`](Self::with_limit).
    #[inline]
    pub(crate) fn set_limit(&mut self, limit: Limit) {
        self.limit = limit;
        if let Some(range) = self.adaptive
            && limit != Limit::Permits(range.max())
        {
            self.adaptive = None;
        }
    }

    /// Returns the number of permits.
    #[must_use]
    pub const fn limit(&self) -> Limit {
        self.limit
    }

    /// Returns how many requests may [start within a time](PolicyBuilder::rate).
    #[must_use]
    pub const fn rate(&self) -> Option<Rate> {
        self.rate
    }

    /// Returns the range in which the limit [finds itself](PolicyBuilder::adaptive), if it does.
    #[must_use]
    pub const fn adaptive(&self) -> Option<Adaptive> {
        self.adaptive
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

    /// Returns whether a request is rejected at once that would [wait in vain](PolicyBuilder::refuse_hopeless).
    #[must_use]
    pub const fn refuse_hopeless(&self) -> bool {
        self.refuse_hopeless
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
        self.validate_rate()?;
        self.validate_adaptive()?;
        if self.reuse && (self.wait_timeout.is_zero() || self.max_queue == 0) {
            return Err(ConfigError::new(
                "reuse is set with a wait timeout or a max queue of zero, and a request that may not wait is \
                 rejected while another process keeps a permit that nobody uses; expected a longer wait timeout \
                 and queue, or no reuse",
            ));
        }
        if self.refuse_hopeless && self.reuse {
            return Err(ConfigError::new(
                "refuse_hopeless is set beside reuse, under which nobody can tell how long a request will wait; \
                 expected one of the two",
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

    fn validate_rate(&self) -> Result<(), ConfigError> {
        let Some(rate) = self.rate else { return Ok(()) };
        if self.reuse {
            return Err(ConfigError::new(format!(
                "reuse is set beside a rate of {rate}, and a request that takes over a permit would start without \
                 being counted; expected one of the two"
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
