//! The right to be in flight.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use super::ANSWER_TIMEOUT;
use super::place::Place;
use crate::error::BackendError;

/// A permit of a [`Semaphore`](crate::Semaphore): as long as it or a clone of it lives, one request
/// more is in flight.
///
/// Dropping the last clone gives it back. That never blocks, never panics and needs no runtime; the
/// release goes out with whatever else the process has to send. Until then the permit is renewed in
/// the background every third of its lease.
///
/// A permit can be *lost*: if it could not be renewed for a whole lease (the backend was away, or
/// this process stood still), another may hold it by now. Its holder is told by
/// [`lost`](Self::lost), at a deadline that this process keeps by its own monotonic clock, counted
/// from when it sent the last renewal that was acknowledged.
#[derive(Clone)]
pub struct Permit {
    held: Arc<Held>,
}

struct Held {
    /// `None` once it was given back, and for a permit that is not counted.
    place: Mutex<Option<Place>>,
    name: Box<str>,
    waited: Duration,
}

impl Permit {
    pub(super) fn new(place: Place, waited: Duration) -> Self {
        let name = place.name().into();
        Self { held: Arc::new(Held { place: Mutex::new(Some(place)), name, waited }) }
    }

    /// A permit where there is no limit.
    pub(super) fn uncounted(name: &str) -> Self {
        let held = Held { place: Mutex::new(None), name: name.into(), waited: Duration::ZERO };
        Self { held: Arc::new(held) }
    }

    /// The name of the semaphore, [as it is stored](crate::Name::as_str).
    #[must_use]
    pub fn name(&self) -> &str {
        &self.held.name
    }

    /// How long it took to get it.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.held.waited
    }

    /// Whether the permit is lost. Looks at the clock: true from the deadline on, even if this
    /// process stood still and nothing else has noticed yet.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.with_place(|place| place.is_lost(None)).unwrap_or(false)
    }

    /// Waits until the permit is lost; for ever, if it is given back first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again.
    pub async fn lost(&self) {
        poll_fn(|cx| self.poll_lost(cx)).await;
    }

    /// As [`lost`](Self::lost), for a future or a body written by hand.
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self.with_place(|place| place.is_lost(Some(cx))) {
            Some(true) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Gives the permit back now, whatever clones of it there are, and waits until the backend has
    /// acknowledged that: for one second at the most.
    ///
    /// # Errors
    ///
    /// If the backend could not be told. Then the permit comes free with the next connection, or
    /// when its lease ends.
    ///
    /// # Cancel safety
    ///
    /// The permit is given back even if this is dropped before it is done.
    pub async fn release(self) -> Result<(), BackendError> {
        let place = self.held.place.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(place) = place else { return Ok(()) };
        place.leave_slowly();
        let acknowledged = poll_fn(|cx| place.poll_released(cx));
        tokio::time::timeout(ANSWER_TIMEOUT, acknowledged).await.map_err(|_| {
            BackendError::call("the backend did not acknowledge the release in time")
        })?
    }

    fn with_place<T>(&self, look: impl FnOnce(&Place) -> T) -> Option<T> {
        let place = self.held.place.lock().unwrap_or_else(PoisonError::into_inner);
        place.as_ref().map(look)
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("name", &self.name())
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}
