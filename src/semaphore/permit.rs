//! A granted permit.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use smallvec::SmallVec;

use super::place_handle::PlaceHandle;
use crate::error::BackendError;
use crate::feedback::Feedback;
use crate::policy::ANSWER_TIMEOUT;
use crate::protocol::PauseCause;
use crate::protocol::session::FurtherIn;

/// A permit of a [`Semaphore`](crate::Semaphore), held until it and all of its clones are dropped.
///
/// Dropping the last clone releases the permit. That never blocks, never panics and needs no runtime; the release is
/// sent with the next write to the backend. Until then, background tasks renew the permit every third of its lease.
///
/// A permit can be *lost*: if it could not be renewed for a whole lease (the backend was unreachable, or this process
/// was stopped), another request may hold it by now. [`lost`](Self::lost) notifies the holder at a deadline by this
/// process's monotonic clock, counted from when it sent the last renewal that was acknowledged.
///
/// In the extensions of a request, a permit stands for the permits of all layers that the request has passed: the
/// innermost one, with those [further out](Self::outer) behind it. It keeps all of them.
///
/// # Examples
///
/// A task that keeps a permit until it is done, or until the permit is lost:
///
/// ```
/// use tower_semaphore::{Policy, Semaphore};
///
/// # async fn work() {}
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let semaphore = Semaphore::in_memory();
/// let permit = semaphore.acquire("jobs", &Policy::new(1)).await?;
/// tokio::select! {
///     () = work() => {}
///     () = permit.lost() => eprintln!("stopped; another process may hold the permit"),
/// }
/// # Ok(()) }
/// ```
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
    /// No limit applies.
    Uncounted(Arc<str>),
}

impl Permit {
    pub(super) const fn new(place: PlaceHandle, waited: Duration) -> Self {
        Self { kind: Kind::Counted(place), waited, outer: None }
    }

    /// Creates a permit for a request to which no limit applies.
    pub(crate) fn uncounted(name: &str) -> Self {
        Self { kind: Kind::Uncounted(name.into()), waited: Duration::ZERO, outer: None }
    }

    /// Puts the permits of outer layers behind this one. A permit that is not counted does not hide one that is.
    pub(crate) fn within(self, outer: Self) -> Self {
        if outer.place().is_none() {
            return self;
        }
        match &self.kind {
            Kind::Uncounted(_) => outer,
            Kind::Counted(_) => Self { outer: Some(Box::new(outer)), ..self },
        }
    }

    /// Returns the permit of the next layer further out, if the request has passed several layers that count it.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Permit;
    ///
    /// /// The semaphores that count a request, the innermost first.
    /// fn names(permit: &Permit) -> Vec<&str> {
    ///     std::iter::successors(Some(permit), |permit| permit.outer()).map(Permit::name).collect()
    /// }
    /// ```
    #[must_use]
    pub fn outer(&self) -> Option<&Self> {
        self.outer.as_deref()
    }

    /// Returns the name of the semaphore, [as it is stored](crate::Name::as_str).
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Counted(place) => place.name(),
            Kind::Uncounted(name) => name,
        }
    }

    /// Returns how many permits of the semaphore this is: the [cost](crate::Ask::cost) of its request, by default 1; 0
    /// if no limit applies.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Ask, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire(Ask::of("gpu").cost(3), &Policy::new(8)).await?;
    /// assert_eq!(permit.cost(), 3);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn cost(&self) -> u32 {
        self.place().map_or(0, PlaceHandle::cost)
    }

    /// Returns how long the request waited for the permit.
    #[must_use]
    pub const fn waited(&self) -> Duration {
        self.waited
    }

    /// Returns whether the permit, or one [further out](Self::outer), is lost.
    ///
    /// Reads the clock: the result is `true` from the deadline on, even if this process was stopped and no task has
    /// noticed yet.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("api", &Policy::new(1)).await?;
    /// assert!(!permit.is_lost());
    /// let id = semaphore.inspect("api").await?.holders[0].id;
    /// semaphore.revoke("api", id).await?;
    /// assert!(permit.is_lost());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.places().any(PlaceHandle::is_lost)
    }

    /// Returns the name of the semaphore whose permit is lost: that of this one, unless one further out is.
    pub(crate) fn lost_name(&self) -> &str {
        let lost = self.places().find(|place| place.is_lost());
        lost.map_or_else(|| self.name(), |place| place.name())
    }

    /// Waits until the permit, or one [further out](Self::outer), is lost. Never returns if it is released first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("api", &Policy::new(1)).await?;
    /// let clone = permit.clone();
    /// let watcher = tokio::spawn(async move { clone.lost().await });
    /// # tokio::task::yield_now().await;
    ///
    /// semaphore.shutdown().await;
    /// watcher.await?;
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub async fn lost(&self) {
        Lost { permit: self, listeners: SmallVec::new() }.await;
    }

    /// Like [`lost`](Self::lost), for a hand-written future or body.
    ///
    /// Only the task of the last call on this permit is woken; each clone has a task of its own.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("api", &Policy::new(1)).await?;
    /// let is_lost = std::future::poll_fn(|cx| std::task::Poll::Ready(permit.poll_lost(cx).is_ready())).await;
    /// assert!(!is_lost);
    /// # Ok(()) }
    /// ```
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut is_lost = false;
        for place in self.places() {
            is_lost |= place.is_lost() || !place.on_lost(cx.waker());
        }
        if is_lost { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Has `waker` woken when the permit is lost. Returns `false` if it is known to be lost already; does not read the
    /// clock.
    pub(crate) fn on_lost(&self, waker: &Waker) -> bool {
        self.place().is_none_or(|place| place.on_lost(waker))
    }

    /// Releases the permit and those [further out](Self::outer), even if there are clones, and waits up to one second
    /// for the backend's acknowledgement. Returns at once if the permit was already lost, or released through a clone.
    ///
    /// Other clones hold no permit after this, and their [`is_lost`](Self::is_lost) does not show it: in a handler
    /// below the layer, the response streams on without a permit.
    ///
    /// # Errors
    ///
    /// If the backend did not acknowledge it. The permit is then freed over the next connection, or when its lease
    /// ends.
    ///
    /// # Cancel safety
    ///
    /// The permit is released even if this is dropped before it is done.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("api", &Policy::new(1)).await?;
    /// permit.release().await?;
    /// assert_eq!(semaphore.inspect("api").await?.in_use, 0);
    /// # Ok(()) }
    /// ```
    pub async fn release(self) -> Result<(), BackendError> {
        // Begun together, so that one write carries all releases.
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

    /// Marks the request of this permit as broken off: once the last clone is dropped, the permit stays taken for
    /// the [linger](crate::PolicyBuilder::linger) of its policy. Does nothing without a linger. Applies to the
    /// permits [further out](Self::outer) as well.
    ///
    /// The other side of a closed connection may go on with the request until it notices. If it counts the requests
    /// in flight, a permit that is freed at once admits one request too many.
    ///
    /// The layer calls this for requests that were broken off, and for the permit of an upgraded connection, such as a
    /// WebSocket.
    ///
    /// A lingering permit is renewed like any other. A process that dies or
    /// [shuts down](crate::Semaphore::shutdown) leaves it to its lease. [`release`](Self::release) ignores the
    /// linger and releases the permit at once.
    ///
    /// # Examples
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

    /// Passes on what a response of the upstream says about the requests that come next.
    ///
    /// [`Feedback::Backoff`] pauses the semaphore in the whole fleet: no permit is granted until then. In this process
    /// that applies at once, in others as soon as a message reaches them, at most 100 ms later where changes come thick,
    /// or within a second if the message is lost. Holders keep their permits, and waiting requests their turns;
    /// newcomers queue, or are rejected with [`UpstreamPause`](crate::RejectReason::UpstreamPause) and the time that is
    /// left. The pause is at most [`max_pause`](crate::PolicyBuilder::max_pause), and within that up to an eighth longer
    /// than was asked for, at most 250 ms. A pause that ends later stays as it is, and so do the limit and the mode that
    /// an operator set. [`Semaphore::resume`](crate::Semaphore::resume) ends it.
    ///
    /// If the limit [finds itself](crate::PolicyBuilder::adaptive), [`Backoff`](Feedback::Backoff) and
    /// [`TooMany`](Feedback::TooMany) lower it as well, unless it was lowered since this permit was granted: a pause ends, and
    /// as many requests as before would then be refused again.
    ///
    /// Never blocks, and never fails: if the backend cannot be asked, the pause applies in this process until it can, and
    /// the limit stays as it is.
    /// Does nothing for a permit to which no limit applies, or for permits [further out](Self::outer).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Feedback, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    /// // The upstream answered: 429, Retry-After: 20.
    /// permit.feedback(Feedback::Backoff(Duration::from_secs(20)));
    /// assert!(semaphore.try_acquire("openai", &Policy::new(10)).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn feedback(&self, feedback: Feedback) {
        self.feedback_of(feedback, PauseCause::Upstream);
    }

    /// Like [`feedback`](Self::feedback), with the cause.
    pub(crate) fn feedback_of(&self, feedback: Feedback, cause: PauseCause) {
        let Some(place) = self.place() else { return };
        match feedback {
            Feedback::None => {}
            Feedback::Backoff(duration) => {
                place.pause(duration, cause);
                place.lower();
            }
            Feedback::TooMany => place.lower(),
        }
    }

    /// Says what the request truly used of the [budget](crate::Budget) with this name, in its units. It replaces the estimate
    /// once the last clone is dropped, in the same step as the release; until then, the last report counts. Without one the
    /// estimate stands, as after a crash.
    ///
    /// What a request used beyond its estimate is charged until the budget is twice its burst behind. Then one report that is
    /// wrong stops all requests for as long as a burst takes to refill, and large ones for twice as long.
    ///
    /// Settles all budgets with this name, those of requests [further out](Self::outer), too. Returns whether there is one: not
    /// for a permit that is lost or released.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Ask, Budget, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let tokens = Budget::new("tokens", 80_000, Duration::from_secs(60))?;
    /// let ask = || Ask::of("openai").estimate(&tokens, 50_000);
    /// let permit = semaphore.acquire(ask(), &Policy::new(10)).await?;
    /// assert!(permit.settle("tokens", 1_950));
    /// drop(permit);
    /// assert!(semaphore.try_acquire(ask(), &Policy::new(10)).await.is_ok());
    /// # Ok(()) }
    /// ```
    #[expect(clippy::must_use_candidate, reason = "few ask whether there is such a budget")]
    pub fn settle(&self, budget: &str, used: u64) -> bool {
        self.places().filter(|place| place.settle(budget, used)).count() > 0
    }

    /// Says that the request used nothing of its [budgets](crate::Budget): it never reached its provider. The same as
    /// [`settle`](Self::settle) with 0 for each, also of requests [further out](Self::outer).
    ///
    /// A layer does this for a request that a layer further in rejected, if no attempt at it was passed on.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Ask, Budget, Policy, Semaphore};
    ///
    /// # async fn connect() -> Result<(), std::io::Error> { Err(std::io::ErrorKind::ConnectionRefused.into()) }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let tokens = Budget::new("tokens", 80_000, Duration::from_secs(60))?;
    /// let ask = || Ask::of("openai").estimate(&tokens, 50_000);
    /// let permit = semaphore.acquire(ask(), &Policy::new(10)).await?;
    /// if connect().await.is_err() {
    ///     permit.unused();
    /// }
    /// drop(permit);
    /// assert!(semaphore.try_acquire(ask(), &Policy::new(10)).await.is_ok());
    /// # Ok(()) }
    /// ```
    pub fn unused(&self) {
        self.places().for_each(PlaceHandle::unused);
    }

    /// Says how much of the [budget](crate::Budget) with this name is left by its provider, in its units, as a response says
    /// it. Others may use the same account, so once the last clone is dropped, no more is left than that, less the time since
    /// in which it refills; a provider never raises what is left. The last report counts.
    ///
    /// Use it for providers that fill a bucket. One that counts each minute by itself says 0 until the next one begins, and
    /// the budget then refills for as long as it does from nothing.
    ///
    /// Returns whether there is a budget with this name, as [`settle`](Self::settle) does.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Ask, Budget, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let tokens = Budget::new("tokens", 80_000, Duration::from_secs(60))?;
    /// let ask = || Ask::of("openai").estimate(&tokens, 5_000);
    /// let permit = semaphore.acquire(ask(), &Policy::new(10)).await?;
    /// // x-ratelimit-remaining-tokens: 1000
    /// permit.budget_left("tokens", 1_000);
    /// drop(permit);
    /// assert!(semaphore.try_acquire(ask(), &Policy::new(10)).await.is_err());
    /// # Ok(()) }
    /// ```
    #[expect(clippy::must_use_candidate, reason = "few ask whether there is such a budget")]
    pub fn budget_left(&self, budget: &str, left: u64) -> bool {
        self.places().filter(|place| place.left(budget, left)).count() > 0
    }

    /// Returns whether it has clones.
    pub(crate) fn is_shared(&self) -> bool {
        self.place().is_some_and(PlaceHandle::is_shared)
    }

    /// Notes an event further in, by which it is decided whether the permit lingers.
    pub(crate) fn further_in(&self, event: FurtherIn) {
        self.places().for_each(|place| place.further_in(event));
    }

    /// Iterates over the places of this permit and of those further out.
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

/// Waits for a loss. Removes its listeners when it is dropped.
struct Lost<'a> {
    permit: &'a Permit,
    /// The listener of each place, once this was polled.
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
