//! Progress of a request, and the timeouts for it.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The timeouts of all requests. `None`: no timeout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) header: Option<Duration>,
    pub(crate) upstream: Option<Duration>,
    pub(crate) idle: Option<Duration>,
    /// For a connection to the upstream without a request.
    pub(crate) upstream_idle: Option<Duration>,
    /// How long a connection is silent before its peer is probed.
    pub(crate) keepalive: Option<Duration>,
    pub(crate) drain: Duration,
}

/// When a part of a request or of its response was last transferred.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    /// Microseconds since then.
    moved: AtomicU64,
    waits: AtomicU8,
}

/// What a request's body waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Waits {
    /// Its next part, from the client.
    Client,
    /// The upstream, to take the next part.
    Upstream,
    /// Nothing: it is over.
    Nothing,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let waits = AtomicU8::new(Waits::Upstream as u8);
        Self { began: Instant::now(), moved: AtomicU64::new(0), waits }
    }

    /// Records progress now.
    pub(crate) fn moved(&self) {
        let since = self.began.elapsed().as_micros();
        self.moved.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn last(&self) -> Instant {
        self.began + Duration::from_micros(self.moved.load(Ordering::Relaxed))
    }

    pub(crate) fn set_waits(&self, waits: Waits) {
        self.waits.store(waits as u8, Ordering::Relaxed);
    }

    /// What the request's body waits for.
    pub(crate) fn waits(&self) -> Waits {
        match self.waits.load(Ordering::Relaxed) {
            0 => Waits::Client,
            1 => Waits::Upstream,
            _ => Waits::Nothing,
        }
    }
}

/// Waits until the deadline; without one, never resolves.
pub(crate) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
