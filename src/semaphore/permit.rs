//! The right to be in flight.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::place_handle::PlaceHandle;
use super::policy::ANSWER_TIMEOUT;
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
    kind: Kind,
    waited: Duration,
}

#[derive(Clone)]
enum Kind {
    Counted(PlaceHandle),
    /// Where there is no limit, or none that is in force.
    Uncounted(Arc<str>),
}

impl Permit {
    pub(super) const fn new(place: PlaceHandle, waited: Duration) -> Self {
        Self { kind: Kind::Counted(place), waited }
    }

    /// A permit where there is no limit, or none that is in force.
    pub(crate) fn uncounted(name: &str) -> Self {
        Self { kind: Kind::Uncounted(name.into()), waited: Duration::ZERO }
    }

    /// The name of the semaphore, [as it is stored](crate::Name::as_str).
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Counted(place) => place.name(),
            Kind::Uncounted(name) => name,
        }
    }

    /// How many permits of the semaphore this is; 1 unless [asked for](crate::Ask::cost) otherwise. 0, if it
    /// is not counted: where there is no limit, or none that is in force.
    #[must_use]
    pub fn cost(&self) -> u32 {
        self.place().map_or(0, PlaceHandle::cost)
    }

    /// How long it took to get it.
    #[must_use]
    pub const fn waited(&self) -> Duration {
        self.waited
    }

    /// Whether the permit is lost. Looks at the clock: true from the deadline on, even if this
    /// process stood still and nothing else has noticed yet.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.place().is_some_and(|place| place.is_lost())
    }

    /// Waits until the permit is lost; never returns if it is released first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again.
    pub async fn lost(&self) {
        Lost { permit: self, listener: None }.await;
    }

    /// As [`lost`](Self::lost), for a future or a body written by hand. Wakes the task of the last call
    /// on this permit; clones have a task each.
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self.place() {
            Some(place) if place.is_lost() || !place.on_lost(cx.waker()) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Has `waker` woken when the permit is lost; `false`: it is lost already. Does not look at the
    /// clock: that is the watchdog's.
    pub(crate) fn on_lost(&self, waker: &Waker) -> bool {
        self.place().is_none_or(|place| place.on_lost(waker))
    }

    /// Gives the permit back now, whatever clones of it there are, and waits until the backend has
    /// acknowledged that: for one second at the most. If it was given back by way of a clone
    /// already, or lost, there is nothing to wait for.
    ///
    /// Other clones hold no permit after this, and [`is_lost`](Self::is_lost) does not tell them: in a
    /// handler below the layer, the response streams on without a permit.
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
        let Some(place) = self.place().filter(|place| place.release()) else {
            return Ok(());
        };
        let acknowledged = poll_fn(|cx| place.poll_released(cx));
        tokio::time::timeout(ANSWER_TIMEOUT, acknowledged).await.map_err(|_| {
            BackendError::call("the backend did not acknowledge the release in time")
        })?
    }

    const fn place(&self) -> Option<&PlaceHandle> {
        match &self.kind {
            Kind::Counted(place) => Some(place),
            Kind::Uncounted(_) => None,
        }
    }
}

/// Waits for a loss; leaves nothing when it is dropped.
struct Lost<'a> {
    permit: &'a Permit,
    listener: Option<u32>,
}

impl Future for Lost<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(place) = self.permit.place() else { return Poll::Pending };
        if place.is_lost() {
            return Poll::Ready(());
        }
        let listener = *self.listener.get_or_insert_with(|| place.listen());
        if place.wait_for_loss(listener, cx.waker()) { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        if let (Some(place), Some(listener)) = (self.permit.place(), self.listener) {
            place.unlisten(listener);
        }
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
