//! How a semaphore is to be used: validated once, when it is built.

use std::time::Duration;

use crate::error::ConfigError;
pub use crate::protocol::session::OnUnavailable;

/// How long a request waits for the backend's first answer, and for an acknowledgement.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// How many permits a semaphore has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// So many. None at all for 0: everything is refused.
    Permits(u32),
    /// As many as are asked for. Nothing is counted and the backend is not asked.
    Unlimited,
}

impl From<u32> for Limit {
    fn from(permits: u32) -> Self {
        Self::Permits(permits)
    }
}

/// Limit, wait timeout, queue and lease of a semaphore.
///
/// All users of one name should use one policy. Where they differ, as during a rolling deploy, each call
/// is judged by the limit that its caller supplies.
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
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub(crate) limit: Limit,
    pub(crate) wait_timeout: Duration,
    pub(crate) lease: Duration,
    pub(crate) max_queue: u32,
    pub(crate) headroom: u32,
    pub(crate) linger: Duration,
    pub(crate) on_unavailable: OnUnavailable,
    /// Under which its requests are counted.
    pub(crate) name: &'static str,
}

/// Builds a [`Policy`].
#[derive(Clone, Debug)]
#[must_use = "`build` gives the policy"]
pub struct PolicyBuilder {
    policy: Policy,
}

impl Policy {
    /// How long to wait for a permit, unless said otherwise: 2 s.
    pub const DEFAULT_WAIT_TIMEOUT: Duration = Duration::from_secs(2);
    /// The longest wait timeout: an hour.
    pub const MAX_WAIT_TIMEOUT: Duration = Duration::from_secs(3600);
    /// The lease, unless said otherwise: 10 s.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);
    /// The shortest lease: half a second.
    pub const MIN_LEASE: Duration = Duration::from_millis(500);
    /// The longest lease: a day.
    pub const MAX_LEASE: Duration = Duration::from_secs(24 * 3600);
    /// How many may wait for one name, in the whole fleet, unless said otherwise: 10 000.
    pub const DEFAULT_MAX_QUEUE: u32 = 10_000;

    /// This limit, and the defaults for the rest.
    #[must_use]
    pub fn new(limit: impl Into<Limit>) -> Self {
        Self {
            limit: limit.into(),
            wait_timeout: Self::DEFAULT_WAIT_TIMEOUT,
            lease: Self::DEFAULT_LEASE,
            max_queue: Self::DEFAULT_MAX_QUEUE,
            headroom: 0,
            linger: Duration::ZERO,
            on_unavailable: OnUnavailable::default(),
            name: "default",
        }
    }

    /// Starts from this limit and the defaults.
    pub fn builder(limit: impl Into<Limit>) -> PolicyBuilder {
        PolicyBuilder { policy: Self::new(limit) }
    }

    /// The same policy with another limit.
    #[must_use]
    pub fn with_limit(mut self, limit: impl Into<Limit>) -> Self {
        self.limit = limit.into();
        self
    }

    /// The limit.
    #[must_use]
    pub const fn limit(&self) -> Limit {
        self.limit
    }
}

impl PolicyBuilder {
    /// How long a request may wait for a permit, from its call. Zero: it is refused at once.
    ///
    /// 2 s unless set; an hour at the most.
    pub const fn wait_timeout(mut self, timeout: Duration) -> Self {
        self.policy.wait_timeout = timeout;
        self
    }

    /// How long a permit outlives a process that dies. While the process lives, its permits are
    /// renewed every third of this.
    ///
    /// 10 s unless set; from half a second to a day, in whole ms. A short lease frees a dead
    /// process's permits sooner; a long one rides out longer stalls of process and backend.
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.policy.lease = lease;
        self
    }

    /// How many may wait for one name, in the whole fleet; further requests are rejected at once. Where
    /// requests name a [tenant](crate::Ask::by), so many of each tenant.
    ///
    /// 10 000 unless set.
    pub const fn max_queue(mut self, places: u32) -> Self {
        self.policy.max_queue = places;
        self
    }

    /// How many permits only requests of class 0 may take: see [`Ask::class`](crate::Ask::class). Less than
    /// the limit; where an operator lowers that to the headroom, the other classes wait.
    ///
    /// None unless set. In an outage, what [`OnUnavailable::Local`] lets pass goes by class, and leaves no
    /// headroom.
    pub const fn headroom(mut self, permits: u32) -> Self {
        self.policy.headroom = permits;
        self
    }

    /// How long a permit stays taken after its request was broken off: see [`Permit::break_off`]. For quotas
    /// that somebody else counts, such as an LLM provider, and which notices late that a client left.
    ///
    /// Zero unless set; at most half of the lease. That is what a lease has left at least whenever the process
    /// dies, so a crash frees no permit sooner than a request that is broken off.
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

    /// What becomes of a request while the backend cannot be asked. It is refused, unless set.
    ///
    /// What passed by this is counted by the backend as soon as it is back, as far as it is still
    /// in flight.
    pub const fn on_unavailable(mut self, on_unavailable: OnUnavailable) -> Self {
        self.policy.on_unavailable = on_unavailable;
        self
    }

    /// What the requests under this policy are called in the [metrics](crate::metrics): the value of
    /// their label `policy`. A layer's own name counts there instead of this.
    ///
    /// `default` unless set. Whatever it is set to is kept for as long as the process lives, which is
    /// why it is no `String`.
    #[cfg(feature = "metrics")]
    pub const fn name(mut self, name: &'static str) -> Self {
        self.policy.name = name;
        self
    }

    /// The policy.
    ///
    /// # Errors
    ///
    /// If a value is out of its range.
    pub fn build(self) -> Result<Policy, ConfigError> {
        let Policy { lease, wait_timeout, .. } = self.policy;
        if lease < Policy::MIN_LEASE || lease > Policy::MAX_LEASE {
            return Err(ConfigError::new(format!(
                "lease: {lease:?} is out of range; allowed: {:?} to {:?}",
                Policy::MIN_LEASE,
                Policy::MAX_LEASE
            )));
        }
        let linger = self.policy.linger;
        if linger > lease / 2 {
            return Err(ConfigError::new(format!(
                "linger: {linger:?} is more than half of the lease of {lease:?}; allowed: 0 to {:?}, or set \
                 a longer lease",
                lease / 2
            )));
        }
        if wait_timeout > Policy::MAX_WAIT_TIMEOUT {
            return Err(ConfigError::new(format!(
                "wait timeout: {wait_timeout:?} is too long; allowed: 0 (refuse at once) to {:?}",
                Policy::MAX_WAIT_TIMEOUT
            )));
        }
        if let Policy { limit: Limit::Permits(limit @ 1..), headroom, .. } = self.policy
            && headroom >= limit
        {
            return Err(ConfigError::new(format!(
                "headroom: {headroom} leaves nothing of {limit} permits to the other classes; allowed: 0 \
                 to {}",
                limit - 1
            )));
        }
        Ok(self.policy)
    }
}
