//! A layer that only counts: it lets pass what it would have rejected.
//!
//! It takes permits like any other layer, and never queues: only then do all processes count together. A counter beside
//! the semaphore would show the true number in flight, and leak at a crash.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::refusal::{Refusal, RefusalReason};

/// How long a request waits for the backend's answer in shadow.
pub(super) const SHADOW_TIMEOUT: Duration = Duration::from_millis(100);

/// Why a request would have been rejected, or would have had to wait, if its layer were not in
/// [`shadow`](super::ConcurrencyLimitBuilder::shadow).
///
/// It is in the extensions of the request, for the handler, and in those of the response, for layers outside this
/// one.
///
/// ```
/// use http::Request;
/// use tower_semaphore::limit::WouldRefuse;
///
/// fn is_beyond_the_limit<B>(request: &Request<B>) -> bool {
///     let would = request.extensions().get::<WouldRefuse>();
///     would.is_some_and(|would| would.refusal().reason.is_full())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct WouldRefuse {
    refusal: Arc<Refusal>,
}

impl WouldRefuse {
    /// The refusal that there would have been. Its reason is [`RefusalReason::Limit`] even if the layer has a wait
    /// timeout, and the request would have had to wait first.
    #[must_use]
    pub fn refusal(&self) -> &Refusal {
        &self.refusal
    }
}

/// The counts of a layer in shadow: see [`shadow_counts`](super::ConcurrencyLimitLayer::shadow_counts).
///
/// Counts requests of this process since the layer was built. All of them passed. Requests that the layer skips, or
/// lets pass for lack of a key, are not included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShadowCounts {
    /// Requests that would have passed at once.
    pub passed: u64,
    /// Requests that found all permits in use: they would have had to wait, or with a wait timeout of zero would
    /// have been rejected.
    pub full: u64,
    /// Requests that found their tenant at its cap.
    pub tenant_limit: u64,
    /// Requests that would have been rejected, or would have had to wait, because a
    /// [further limit](super::ConcurrencyLimitBuilder::also) was full.
    pub further_limit: u64,
    /// Requests that asked for more permits than they could ever have.
    pub cost_too_high: u64,
    /// Requests that would have been rejected because they have no key.
    pub missing_key: u64,
    /// Requests that would have been rejected because they have no tenant.
    pub missing_tenant: u64,
    /// Requests that would have been rejected because their limit could not be looked up.
    pub limit_unknown: u64,
    /// Requests that would have been rejected because an operator [drains](crate::Semaphore::drain) the semaphore, or
    /// revoked the request's place.
    pub draining: u64,
    /// Requests that might have been rejected: the backend was unavailable, did not answer within 100 ms, or was in
    /// quarantine, or the semaphore was shut down.
    pub unavailable: u64,
}

/// What a layer in shadow counts.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    passed: AtomicU64,
    full: AtomicU64,
    tenant_limit: AtomicU64,
    further_limit: AtomicU64,
    cost_too_high: AtomicU64,
    missing_key: AtomicU64,
    missing_tenant: AtomicU64,
    limit_unknown: AtomicU64,
    draining: AtomicU64,
    unavailable: AtomicU64,
}

impl Shadow {
    pub(super) fn passed(&self) {
        self.passed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts and logs a refusal that is not enforced.
    pub(super) fn instead_of(&self, refusal: Refusal) -> WouldRefuse {
        let count = match refusal.reason {
            RefusalReason::Limit
            | RefusalReason::Rate
            | RefusalReason::Budget
            | RefusalReason::QueueFull
            | RefusalReason::QueueTimeout
            | RefusalReason::Hopeless => &self.full,
            RefusalReason::TenantLimit => &self.tenant_limit,
            RefusalReason::FurtherLimit => &self.further_limit,
            RefusalReason::CostTooHigh => &self.cost_too_high,
            RefusalReason::MissingKey => &self.missing_key,
            RefusalReason::MissingTenant => &self.missing_tenant,
            RefusalReason::LimitUnknown => &self.limit_unknown,
            RefusalReason::Paused
            | RefusalReason::UpstreamPause
            | RefusalReason::Draining
            | RefusalReason::Revoked => &self.draining,
            RefusalReason::Quarantine
            | RefusalReason::Unavailable
            | RefusalReason::Closed
            | RefusalReason::LeaseLost => &self.unavailable,
        };
        count.fetch_add(1, Ordering::Relaxed);
        let rejected = refusal.rejected.as_ref();
        tracing::debug!(
            target: "tower_semaphore",
            layer = &*refusal.policy,
            key = refusal.key.as_ref().map(|key| key.as_str()),
            tenant = refusal.tenant.as_ref().map(|tenant| tenant.as_str()),
            reason = refusal.reason.as_str(),
            limit = rejected.map(|rejected| rejected.limit),
            in_use = rejected.and_then(|rejected| rejected.in_use),
            waiting = rejected.and_then(|rejected| rejected.waiting),
            "the request passes in shadow; it would have been rejected, or would have had to wait"
        );
        WouldRefuse { refusal: Arc::new(refusal) }
    }

    pub(super) fn counts(&self) -> ShadowCounts {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ShadowCounts {
            passed: count(&self.passed),
            full: count(&self.full),
            tenant_limit: count(&self.tenant_limit),
            further_limit: count(&self.further_limit),
            cost_too_high: count(&self.cost_too_high),
            missing_key: count(&self.missing_key),
            missing_tenant: count(&self.missing_tenant),
            limit_unknown: count(&self.limit_unknown),
            draining: count(&self.draining),
            unavailable: count(&self.unavailable),
        }
    }
}
