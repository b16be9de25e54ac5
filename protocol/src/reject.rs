//! Why a request gets no permit.

/// The reason of a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectReason {
    /// All permits are in use, or other requests wait for one, and this request may not wait.
    Limit,
    /// The queue is full.
    QueueFull,
    /// The tenant is at its cap, and this request may not wait; or its cap is 0.
    TenantLimit,
    /// The request's [further limit](super::Further) of this index, from 0, is full, and this request may not wait; or its
    /// cap is 0.
    FurtherLimit(u8),
    /// The request names more than three further limits, or one of them twice; or more than two budgets, or one of them
    /// twice.
    InvalidLimits,
    /// The request asks for more permits than it could ever get: more than the limit, the part of it that its class
    /// may use, the cap of its tenant or of a further limit, or the starts of a rate that is not smooth. Or it is estimated
    /// to use more of a budget than may be used at once.
    CostTooHigh,
    /// As many permits were granted lately as the rate allows, or in an outage the part of it that the process's own share
    /// has, and this request may not wait.
    Rate,
    /// The budget of this index, from 0, does not allow what the request is estimated to use, or in an outage the part of
    /// it that the process's own share has, and this request may not wait.
    Budget(u8),
    /// No permit came free within the wait timeout, or the rate or a budget allowed no grant.
    QueueTimeout,
    /// The request would wait in vain: by how fast the queue moves, for more than twice as long as it may. Only for
    /// requests that ask for this answer.
    Hopeless,
    /// The backend may have lost data, and grants nothing for one lease, so that permits in use are counted again first (see
    /// `AfterLoss::Quarantine`); and this request may not wait, or waited in vain, or found the queue full. A request
    /// that would have been rejected without the quarantine, as far as that is known, has one of the other reasons.
    Quarantine,
    /// An operator paused the semaphore or set its limit to 0, and this request may not wait, or waited in vain, or
    /// found the queue full.
    Paused,
    /// Grants are paused until a time, because the upstream asked for that, or an operator; and this request may not
    /// wait, or waited in vain, or found the queue full. If an operator also paused the semaphore without an end, the
    /// reason is [`Paused`](Self::Paused).
    UpstreamPause,
    /// An operator drains the semaphore.
    Draining,
    /// An operator revoked its place.
    Revoked,
}

impl RejectReason {
    /// Whether this says that no permit was free or came free.
    pub(crate) const fn is_of_limit(self) -> bool {
        matches!(
            self,
            Self::Limit | Self::QueueFull | Self::QueueTimeout | Self::Rate | Self::Budget(_)
        )
    }

    /// Whether this says that there are more requests than permits.
    pub(crate) const fn is_full(self) -> bool {
        self.is_of_limit()
            || matches!(self, Self::TenantLimit | Self::FurtherLimit(_) | Self::Hopeless)
    }

    /// Returns the reason in snake case, such as `queue_full`, as problem documents and metrics have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::QueueFull => "queue_full",
            Self::TenantLimit => "tenant_limit",
            Self::FurtherLimit(_) => "further_limit",
            Self::InvalidLimits => "invalid_limits",
            Self::CostTooHigh => "cost_too_high",
            Self::Rate => "rate",
            Self::Budget(_) => "budget",
            Self::QueueTimeout => "queue_timeout",
            Self::Hopeless => "hopeless",
            Self::Quarantine => "quarantine",
            Self::Paused => "paused",
            Self::UpstreamPause => "upstream_pause",
            Self::Draining => "draining",
            Self::Revoked => "revoked",
        }
    }
}
