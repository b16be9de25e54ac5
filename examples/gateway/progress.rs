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
    pub(crate) drain: Duration,
}

/// When a part of a request or of its response was last transferred.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    /// Microseconds since then.
    moved: AtomicU64,
    upload: AtomicU8,
}

/// What a request's body waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Upload {
    /// Its next part, from the client.
    Client,
    /// The upstream, to take the next part.
    Upstream,
    /// Nothing: it is over.
    Ended,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let upload = AtomicU8::new(Upload::Upstream as u8);
        Self { began: Instant::now(), moved: AtomicU64::new(0), upload }
    }

    /// Records progress now.
    pub(crate) fn moved(&self) {
        let since = self.began.elapsed().as_micros();
        self.moved.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn last(&self) -> Instant {
        self.began + Duration::from_micros(self.moved.load(Ordering::Relaxed))
    }

    pub(crate) fn set_upload(&self, upload: Upload) {
        self.upload.store(upload as u8, Ordering::Relaxed);
    }

    pub(crate) fn upload(&self) -> Upload {
        match self.upload.load(Ordering::Relaxed) {
            0 => Upload::Client,
            1 => Upload::Upstream,
            _ => Upload::Ended,
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
