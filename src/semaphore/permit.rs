//! The right to be in flight.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use smallvec::SmallVec;

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
///
/// In a request's extensions it stands for the permits of all layers that the request has passed: the
/// innermost one, with those further out behind it ([`outer`](Self::outer)). It keeps all of them.
#[derive(Clone)]
#[must_use = "a permit that is dropped is released"]
pub struct Permit {
    kind: Kind,
    waited: Duration,
    outer: Option<Box<Self>>,
}

#[derive(Clone)]
enum Kind {
    Counted(PlaceHandle),
    /// Where there is no limit, or none that is in force.
    Uncounted(Arc<str>),
}

impl Permit {
    pub(super) const fn new(place: PlaceHandle, waited: Duration) -> Self {
        Self { kind: Kind::Counted(place), waited, outer: None }
    }

    /// A permit where there is no limit, or none that is in force.
    pub(crate) fn uncounted(name: &str) -> Self {
        Self { kind: Kind::Uncounted(name.into()), waited: Duration::ZERO, outer: None }
    }

    /// This permit with those of the layers outside behind it. One that is not counted takes no real one's place.
    pub(crate) fn within(self, outer: Self) -> Self {
        if outer.place().is_none() {
            return self;
        }
        match &self.kind {
            Kind::Uncounted(_) => outer,
            Kind::Counted(_) => Self { outer: Some(Box::new(outer)), ..self },
        }
    }

    /// The permit of the next layer further out, where the request has passed several that count it.
    #[must_use]
    pub fn outer(&self) -> Option<&Self> {
        self.outer.as_deref()
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

    /// Whether the permit is lost, or one [further out](Self::outer). Looks at the clock: true from the deadline on, even if this
    /// process stood still and nothing else has noticed yet.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.places().any(PlaceHandle::is_lost)
    }

    /// Waits until the permit is lost, or one [further out](Self::outer); never returns if it is released
    /// first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again.
    pub async fn lost(&self) {
        Lost { permit: self, listeners: SmallVec::new() }.await;
    }

    /// As [`lost`](Self::lost), for a future or a body written by hand. Wakes the task of the last call
    /// on this permit; clones have a task each.
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut is_lost = false;
        for place in self.places() {
            is_lost |= place.is_lost() || !place.on_lost(cx.waker());
        }
        if is_lost { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Has `waker` woken when the permit is lost; `false`: it is lost already. Does not look at the
    /// clock: that is the watchdog's.
    pub(crate) fn on_lost(&self, waker: &Waker) -> bool {
        self.place().is_none_or(|place| place.on_lost(waker))
    }

    /// Releases the permit now, whatever clones of it there are, and those [further out](Self::outer), and waits
    /// until the backend has acknowledged that: for one second at the most. If it was released by way of a
    /// clone already, or lost, there is nothing to wait for.
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
        // All of them at once: what rides in one call is answered together.
        let released: SmallVec<[_; 1]> = self.places().filter(|place| place.release()).collect();
        let acknowledged = async {
            for place in &released {
                poll_fn(|cx| place.poll_released(cx)).await?;
            }
            Ok(())
        };
        if released.is_empty() {
            return Ok(());
        }
        tokio::time::timeout(ANSWER_TIMEOUT, acknowledged).await.map_err(|_| {
            BackendError::call("the backend did not acknowledge the release in time")
        })?
    }

    /// Has the permit linger once its last clone is dropped, because what it was for was broken off: it stays
    /// taken for as long as its [policy](crate::PolicyBuilder::linger) says. Without a linger, nothing changes. The
    /// same holds for the permits [further out](Self::outer).
    ///
    /// The other side of a connection that was closed may go on with the request until it notices. Where that
    /// counts what is in flight, a permit that is free at once lets in one request too many.
    ///
    /// The permit is kept alive like any other meanwhile. A process that dies or
    /// [shuts down](crate::Semaphore::shutdown) leaves it to its lease. [`release`](Self::release) does not wait
    /// for the linger: it releases the permit at once.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # async fn call() -> Result<(), std::io::Error> { Err(std::io::ErrorKind::TimedOut.into()) }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let policy = Policy::builder(2).linger(Duration::from_millis(200)).build()?;
    /// let permit = semaphore.acquire("openai", &policy).await?;
    /// if call().await.is_err() {
    ///     permit.break_off();
    /// }
    /// drop(permit);
    /// assert_eq!(semaphore.inspect("openai").await?.in_use, 1);
    /// # Ok(()) }
    /// ```
    pub fn break_off(&self) {
        self.places().for_each(PlaceHandle::break_off);
    }

    /// Whether its request was refused by a layer further in, or passed on by it.
    pub(crate) fn refused_further_in(&self, is_refused: bool) {
        self.places().for_each(|place| place.refused_further_in(is_refused));
    }

    /// The places of this permit and of those further out.
    fn places(&self) -> impl Iterator<Item = &PlaceHandle> {
        std::iter::successors(Some(self), |permit| permit.outer()).filter_map(Self::place)
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
    /// One for each place, from the first look on.
    listeners: SmallVec<[u32; 1]>,
}

impl Future for Lost<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let permit = self.permit;
        if self.listeners.is_empty() {
            self.listeners.extend(permit.places().map(PlaceHandle::listen));
        }
        for (place, listener) in permit.places().zip(&self.listeners) {
            if place.is_lost() || !place.wait_for_loss(*listener, cx.waker()) {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        for (place, listener) in self.permit.places().zip(&self.listeners) {
            place.unlisten(*listener);
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
