//! Outages of the upstream: a log line when one begins and one when it is over, not one for each request.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::counts::{self, UpstreamError};

/// How long no request may fail before an outage is over. Without it, an upstream that fails half of its requests
/// would be two lines for each of them.
const QUIET: Duration = Duration::from_secs(1);

/// Whether requests to the upstream fail.
#[derive(Debug, Default)]
pub(crate) struct Outages {
    /// Spares requests the lock while there is no outage.
    is_out: AtomicBool,
    outage: Mutex<Option<Outage>>,
}

#[derive(Clone, Copy, Debug)]
struct Outage {
    began: Instant,
    last: Instant,
    failed: u64,
}

impl Outages {
    fn lock(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request failed.
    pub(crate) fn failed(&self, kind: UpstreamError, error: Option<&(dyn Error + 'static)>) {
        counts::upstream_failed(kind);
        if self.goes_on(Instant::now()) {
            tracing::debug!(error, "a request to the upstream failed");
            return;
        }
        match kind {
            UpstreamError::Connect => tracing::warn!(error, "the upstream cannot be reached"),
            UpstreamError::Response => tracing::warn!(error, "the upstream sent no valid response"),
            UpstreamError::Timeout => tracing::warn!(error, "the upstream did not answer in time"),
        }
    }

    /// Counts a failure. Returns whether the outage had begun before it.
    fn goes_on(&self, now: Instant) -> bool {
        let mut outage = self.lock();
        let had_begun = outage.is_some();
        let outage = outage.get_or_insert(Outage { began: now, last: now, failed: 0 });
        outage.failed += 1;
        outage.last = now;
        self.is_out.store(true, Ordering::Relaxed);
        had_begun
    }

    /// A request got a response.
    pub(crate) fn answered(&self) {
        if !self.is_out.load(Ordering::Relaxed) {
            return;
        }
        let mut outage = self.lock();
        let Some(over) = outage.take_if(|outage| outage.last.elapsed() >= QUIET) else { return };
        self.is_out.store(false, Ordering::Relaxed);
        drop(outage);
        let lasted = over.last - over.began;
        tracing::info!(failed = over.failed, ?lasted, "the upstream answers again");
    }
}
