//! The span and the metrics of a request for a permit.

use std::time::Duration;

use tokio::time::Instant;
use tracing::field::{Empty, display};
use tracing::{Span, debug, debug_span};

use crate::error::AcquireError;
use crate::metrics::outcome::Outcome;
use crate::metrics::requests::{Hold, Meter};
use crate::name::Name;
use crate::policy::{Limit, OnUnavailable, Policy};
use crate::protocol::PlaceId;

/// The span and the metrics of one request for a permit. If this is dropped before there is an outcome, the request was
/// canceled.
#[derive(Debug)]
pub(super) struct Attempt {
    meter: Meter,
    /// `None` once there is an outcome.
    span: Option<Span>,
    is_local: bool,
    is_queued: bool,
}

impl Attempt {
    #[inline]
    pub(super) fn new(meter: Meter, name: &Name, policy: &Policy) -> Self {
        let limit = match policy.limit {
            Limit::Permits(permits) => Some(permits),
            Limit::Unlimited => None,
        };
        let span = debug_span!(
            target: "tower_semaphore",
            "acquire",
            semaphore = name.as_str(),
            limit,
            place = Empty,
            outcome = Empty,
            waited_ms = Empty
        );
        let is_local = matches!(policy.on_unavailable, OnUnavailable::Local(_));
        Self { meter, span: Some(span), is_local, is_queued: false }
    }

    pub(super) const fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Notes that the request waits in the queue.
    pub(super) fn on_queued(&mut self) {
        if !std::mem::replace(&mut self.is_queued, true) {
            self.meter.on_queued();
        }
    }

    /// Records the place of the request, by which operators know it.
    pub(super) fn on_placed(&self, place: impl FnOnce() -> Option<PlaceId>) {
        if let Some(span) = self.span.as_ref().filter(|span| !span.is_disabled())
            && let Some(place) = place()
        {
            span.record("place", display(place));
        }
    }

    /// Notes that the request has its permits: `by_policy`, if the backend could not be asked.
    pub(super) fn on_granted(
        &mut self,
        by_policy: bool,
        permits: u32,
        waited: Duration,
        now: Instant,
    ) -> Hold {
        let outcome = match (by_policy, self.is_local, self.is_queued) {
            (true, false, _) => Outcome::Admitted,
            (true, true, _) => Outcome::Local,
            (false, _, true) => Outcome::AcquiredAfterWait,
            (false, _, false) => Outcome::Acquired,
        };
        self.end(outcome, waited);
        self.meter.hold(permits, now)
    }

    /// Notes that the request was answered without a counted permit.
    pub(super) fn on_answered(
        &mut self,
        error: Option<&AcquireError>,
        waited: Duration,
        wait_timeout: Duration,
    ) {
        let outcome = error.map_or(Outcome::Unlimited, Outcome::of_error);
        // Record the timeout itself: the moment that it took to notice would put the request into the next bucket.
        let waited = if outcome == Outcome::QueueTimeout { wait_timeout } else { waited };
        if let Some(AcquireError::Rejected(rejected)) = error
            && let Some(wait) = rejected.expected_wait()
        {
            self.meter.on_expected_wait(wait);
        }
        self.end(outcome, waited);
    }

    fn end(&mut self, outcome: Outcome, waited: Duration) {
        // The span ends here, even if the future is kept.
        let Some(span) = self.span.take() else { return };
        self.meter.on_outcome(outcome, waited, self.is_queued);
        let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        let outcome = outcome.as_str();
        if !span.is_disabled() {
            span.record("outcome", outcome);
            span.record("waited_ms", waited_ms);
        }
        debug!(target: "tower_semaphore", parent: &span, outcome, waited_ms, "answered");
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.end(Outcome::Canceled, Duration::ZERO);
    }
}
