//! The result of a request in spans and metrics.

use crate::error::{AcquireError, RejectReason};

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Acquired,
    AcquiredAfterWait,
    Admitted,
    Local,
    Unlimited,
    Bypassed,
    Limit,
    TenantLimit,
    FurtherLimit,
    CostTooHigh,
    QueueFull,
    QueueTimeout,
    Hopeless,
    Quarantine,
    Paused,
    UpstreamPause,
    Rate,
    Budget,
    Draining,
    Revoked,
    MissingKey,
    MissingTenant,
    Unavailable,
    Closed,
    Canceled,
}

impl Outcome {
    /// The value of the label `result`.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::AcquiredAfterWait => "acquired_after_wait",
            Self::Admitted => "admitted",
            Self::Local => "local",
            Self::Unlimited => "unlimited",
            Self::Bypassed => "bypassed",
            Self::Limit => RejectReason::Limit.as_str(),
            Self::TenantLimit => RejectReason::TenantLimit.as_str(),
            Self::FurtherLimit => RejectReason::FurtherLimit(0).as_str(),
            Self::CostTooHigh => RejectReason::CostTooHigh.as_str(),
            Self::QueueFull => RejectReason::QueueFull.as_str(),
            Self::QueueTimeout => RejectReason::QueueTimeout.as_str(),
            Self::Hopeless => RejectReason::Hopeless.as_str(),
            Self::Quarantine => RejectReason::Quarantine.as_str(),
            Self::Paused => RejectReason::Paused.as_str(),
            Self::UpstreamPause => RejectReason::UpstreamPause.as_str(),
            Self::Rate => RejectReason::Rate.as_str(),
            Self::Budget => RejectReason::Budget(0).as_str(),
            Self::Draining => RejectReason::Draining.as_str(),
            Self::Revoked => RejectReason::Revoked.as_str(),
            Self::MissingKey => "missing_key",
            Self::MissingTenant => "missing_tenant",
            Self::Unavailable => "unavailable",
            Self::Closed => "closed",
            Self::Canceled => "request_canceled",
        }
    }

    pub(crate) const fn of_error(error: &AcquireError) -> Self {
        match error {
            AcquireError::Rejected(rejected) => match rejected.reason {
                RejectReason::TenantLimit => Self::TenantLimit,
                RejectReason::FurtherLimit(_) => Self::FurtherLimit,
                RejectReason::CostTooHigh => Self::CostTooHigh,
                RejectReason::QueueFull => Self::QueueFull,
                RejectReason::QueueTimeout => Self::QueueTimeout,
                RejectReason::Hopeless => Self::Hopeless,
                RejectReason::Quarantine => Self::Quarantine,
                RejectReason::Paused => Self::Paused,
                RejectReason::UpstreamPause => Self::UpstreamPause,
                RejectReason::Rate => Self::Rate,
                RejectReason::Budget(_) => Self::Budget,
                RejectReason::Draining => Self::Draining,
                RejectReason::Revoked => Self::Revoked,
                // `Limit`, the only other one.
                _ => Self::Limit,
            },
            AcquireError::Unavailable(_) => Self::Unavailable,
            AcquireError::Closed => Self::Closed,
        }
    }
}
