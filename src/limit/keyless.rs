//! Notices a layer that never sees a key.

use std::sync::atomic::{AtomicU32, Ordering};

/// How many requests without a key, before the first one with a key, are a mistake.
const SUSPICIOUS: u32 = 100;

/// Counts requests that pass because their extractor found no key, until one has a key.
#[derive(Debug, Default)]
pub(super) struct Keyless {
    /// `SUSPICIOUS` or more: nothing is left to be noticed.
    passed: AtomicU32,
}

impl Keyless {
    /// A request has a key.
    pub(super) fn found(&self) {
        if self.passed.load(Ordering::Relaxed) < SUSPICIOUS {
            self.passed.store(SUSPICIOUS, Ordering::Relaxed);
        }
    }

    /// A request has none, and passes.
    pub(super) fn passed(&self, layer: &str) {
        if self.passed.load(Ordering::Relaxed) < SUSPICIOUS
            && self.passed.fetch_add(1, Ordering::Relaxed) + 1 == SUSPICIOUS
        {
            tracing::warn!(
                target: "tower_semaphore",
                layer,
                requests = SUSPICIOUS,
                "no request had a key so far, and the layer limits nothing; with `MatchedPathKey`, add it with \
                 `Router::layer`, `Router::route_layer` or `MethodRouter::layer`"
            );
        }
    }
}
