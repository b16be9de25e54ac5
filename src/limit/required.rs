//! The key and the tenant that a request must have, and what happens to a request without.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::{HeaderName, StatusCode};

use super::key::MissingKey;
use super::refusal::RefusalReason;
use crate::metrics::outcome::Outcome;

/// How many requests without a key, before the first one with a key, are a mistake.
const SUSPICIOUS: u32 = 100;

/// What a request must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Key,
    Tenant,
}

/// A part that requests must have, and what is noticed of those without.
#[derive(Debug)]
pub(super) struct Required {
    pub(super) part: Part,
    /// What the layer was told to do with a request without. `None`: as the extractor says.
    pub(super) missing: Option<MissingKey>,
    /// The type of the extractor, which finds a mistake in the order of layers.
    pub(super) extractor: &'static str,
    /// Requests that passed without, until one has it. `SUSPICIOUS` or more: nothing is left to be noticed.
    passed: AtomicU32,
    has_warned: AtomicBool,
    /// The same for what the server lacks.
    has_blamed_server: AtomicBool,
}

impl Part {
    pub(super) const fn reason(self) -> RefusalReason {
        match self {
            Self::Key => RefusalReason::MissingKey,
            Self::Tenant => RefusalReason::MissingTenant,
        }
    }

    pub(super) const fn outcome(self) -> Outcome {
        match self {
            Self::Key => Outcome::MissingKey,
            Self::Tenant => Outcome::MissingTenant,
        }
    }
}

impl Required {
    pub(super) fn new(part: Part, missing: Option<MissingKey>, extractor: &'static str) -> Self {
        Self {
            part,
            missing,
            extractor,
            passed: AtomicU32::new(0),
            has_warned: AtomicBool::new(false),
            has_blamed_server: AtomicBool::new(false),
        }
    }

    /// A request has it.
    pub(super) fn found(&self) {
        if self.passed.load(Ordering::Relaxed) < SUSPICIOUS {
            self.passed.store(SUSPICIOUS, Ordering::Relaxed);
        }
    }

    /// The first rejected request, if none had it before and the layer does not say what happens then.
    fn may_be_mistaken(&self) -> bool {
        self.missing.is_none()
            && self.passed.load(Ordering::Relaxed) < SUSPICIOUS
            && !self.has_warned.swap(true, Ordering::Relaxed)
    }

    /// A request lacks it, and passes because the extractor lets it.
    pub(super) fn passed(&self, layer: &str) {
        if self.missing.is_some()
            || self.passed.load(Ordering::Relaxed) >= SUSPICIOUS
            || self.passed.fetch_add(1, Ordering::Relaxed) + 1 != SUSPICIOUS
        {
            return;
        }
        let extractor = self.extractor;
        match self.part {
            Part::Key => tracing::warn!(
                target: "tower_semaphore",
                layer,
                extractor,
                requests = SUSPICIOUS,
                "no request had a key so far, and the layer limits nothing; with `MatchedPathKey`, add it with \
                 `Router::layer`, `Router::route_layer` or `MethodRouter::layer`"
            ),
            Part::Tenant => tracing::warn!(
                target: "tower_semaphore",
                layer,
                extractor,
                requests = SUSPICIOUS,
                "no request had a tenant so far, and the layer limits nothing"
            ),
        }
    }

    /// The extractor rejects a request with this status, which blames the server. The first one is told of.
    fn blame_server(&self, layer: &str, status: StatusCode) {
        if self.has_blamed_server.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::error!(
            target: "tower_semaphore",
            layer,
            extractor = self.extractor,
            %status,
            "the server does not insert what the key or the tenant of this layer is taken from; insert it outside \
             the layer; for `PeerIpKey::from_axum`, serve with `limit::serve` or \
             `into_make_service_with_connect_info`"
        );
    }

    /// A request lacks it, and is rejected with this status.
    pub(super) fn rejected(&self, layer: &str, header: Option<&HeaderName>, status: StatusCode) {
        let (extractor, header) = (self.extractor, header.map(HeaderName::as_str));
        let is_servers = self.missing.is_none() && status.is_server_error();
        if is_servers {
            self.blame_server(layer, status);
        }
        match self.part {
            // All of them may lack it, because what its extractor reads is not inserted, or further in.
            Part::Key if !is_servers && self.may_be_mistaken() => tracing::warn!(
                target: "tower_semaphore",
                layer,
                extractor,
                header,
                %status,
                "a request has no key for this layer, and none had one so far: see its `key` and `on_missing_key`; \
                 what inserts the key must be outside the layer"
            ),
            Part::Key => tracing::debug!(
                target: "tower_semaphore",
                layer,
                extractor,
                header,
                %status,
                "the request has no key for this layer: see its `key` and `on_missing_key`"
            ),
            // All of them may lack it, because what finds the tenant is further in than the layer.
            Part::Tenant if !is_servers && !self.has_warned.swap(true, Ordering::Relaxed) => {
                tracing::warn!(
                    target: "tower_semaphore",
                    layer,
                    extractor,
                    header,
                    %status,
                    "a request has no tenant for this layer: see its `fair_by` and `on_missing_tenant`; what inserts \
                     the tenant must be outside the layer"
                )
            }
            Part::Tenant => tracing::debug!(
                target: "tower_semaphore",
                layer,
                extractor,
                header,
                %status,
                "the request has no tenant for this layer: see its `fair_by` and `on_missing_tenant`"
            ),
        }
    }
}
