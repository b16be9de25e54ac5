//! How long a request may wait, in all layers together.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Extensions;
use http::request::Parts;
use tokio::time::Instant;

/// Waits that are shorter are not kept: they are the backend's answer, or no wait at all.
const GRAIN: Duration = Duration::from_millis(1);

/// How long the backend has to answer a request at least: one for which no time is left may still take a free permit.
const ANSWER_TIMEOUT_MIN: Duration = Duration::from_millis(100);

/// The time that a request may still wait for permits, in all layers that it passes.
///
/// It is in the request's extensions. Each layer counts how long the request waited for its permit, and lets it
/// wait for its own [`wait_timeout`](super::ConcurrencyLimitBuilder::wait_timeout) or for what is left of the
/// longest one so far, whichever is shorter. The waits of stacked layers therefore do not add up: together they
/// are no longer than the longest wait timeout among them. A layer with
/// [`wait_timeout_by`](super::ConcurrencyLimitBuilder::wait_timeout_by) counts with what that allowed the
/// request.
///
/// A middleware or handler outside the layers can insert a budget with a deadline, past which no layer inside lets
/// the request wait. A request for which no time is left takes a permit that is free; if there is none, it is
/// rejected at once with [`RefusalReason::QueueTimeout`](super::RefusalReason::QueueTimeout).
///
/// The deadline also bounds how long a layer waits for the answer of a backend that hangs, which is 1 s otherwise; but
/// each layer waits for it for 100 ms at least, so that a request without time can take a free permit. A request that
/// gets no answer until then is treated as [`on_unavailable`](super::ConcurrencyLimitBuilder::on_unavailable) says.
///
/// # What it does not bound
///
/// The budget is about permits. Apart from the deadline, it does not bound the wait for the backend's answer, which
/// ends after 1 s in each layer. It does not include the lookup of a key or limit, nor the time in which the inner
/// service becomes ready after the permit was granted, such as a wait for a slot of [`tower::buffer`] or
/// [`tower::limit`]. Neither its deadline nor
/// [`client_timeout`](super::ConcurrencyLimitBuilder::client_timeout) ends these or the call; no layer further inside
/// waits past the deadline because of them. To bound the whole, put a timeout outside the layer: Tower's,
/// tower-http's, or that of tonic, which obeys `grpc-timeout`. When it drops the call, the permit is released.
///
/// # Retries
///
/// A request's budget counts its waits from the first layer that passes it on, or from
/// [`insert_into`](Self::insert_into). Clones that are made of the request after that, such as the tries of a retry
/// layer, share the count: all tries together have one budget, and tries that wait at the same time, as a hedge makes
/// them, count that time once.
///
/// A layer outside the retry layer counts if the request came with a budget or a
/// [`client_timeout`](super::ConcurrencyLimitBuilder::client_timeout), or waited there; otherwise each try counts for
/// itself. With `insert_into` outside the retry layer, the tries always share their waits.
///
/// # One for each request
///
/// A budget that is only made counts nothing, and neither do its clones: two requests never share their waits. A
/// deadline, however, is a moment. A budget for all requests, as `axum::Extension` or tower-http's
/// `AddExtensionLayer` inserts it, has the deadline of the day it was made: once that has passed, no request waits any
/// more. Do not insert a budget with such a layer; make one for each request.
///
/// In the same way, a layer in which a request without a budget did not wait does not count among those whose longest
/// wait timeout bounds the waits further inside.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use http::Request;
/// use tower_semaphore::limit::WaitBudget;
///
/// let mut request = Request::new(());
/// request.extensions_mut().insert(WaitBudget::of(Duration::from_millis(300)));
/// ```
///
/// [`tower::buffer`]: https://docs.rs/tower/latest/tower/buffer
/// [`tower::limit`]: https://docs.rs/tower/latest/tower/limit
#[derive(Clone, Debug, Default)]
pub struct WaitBudget {
    deadline: Option<Instant>,
    /// The longest wait that a layer allowed the request.
    longest: Duration,
    /// `None` until it belongs to one request: clones of it may be inserted into others.
    waits: Option<Arc<Waits>>,
}

/// The waits of all tries of a request.
#[derive(Debug, Default)]
struct Waits {
    spent: Mutex<Spent>,
}

#[derive(Debug, Default)]
struct Spent {
    /// How many tries are waiting, and since when there is one.
    waiting: u32,
    since: Option<Instant>,
    /// The time in which at least one was waiting, until then.
    before: Duration,
}

/// A wait that is counted until this is dropped.
#[derive(Debug)]
pub(super) struct CountedWait {
    waits: Arc<Waits>,
}

impl WaitBudget {
    /// A budget that ends after this time, counted from now.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::limit::WaitBudget;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let budget = WaitBudget::of(Duration::from_secs(2));
    /// assert!(budget.deadline().is_some());
    /// assert!(budget.waited().is_zero());
    /// # }
    /// ```
    #[must_use]
    pub fn of(budget: Duration) -> Self {
        // Too far away for a clock is no deadline.
        Self { deadline: Instant::now().checked_add(budget), ..Self::default() }
    }

    /// A budget that ends at this moment.
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::extract::Request;
    /// use axum::middleware::Next;
    /// use axum::response::Response;
    /// use tokio::time::Instant;
    /// use tower_semaphore::limit::WaitBudget;
    ///
    /// /// Authentication takes part of the time that a request may wait.
    /// async fn authenticate(mut request: Request, next: Next) -> Response {
    ///     let deadline = Instant::now() + Duration::from_secs(2);
    ///     // ... ask the identity provider ...
    ///     request.extensions_mut().insert(WaitBudget::until(deadline));
    ///     next.run(request).await
    /// }
    /// ```
    #[must_use]
    pub fn until(deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..Self::default() }
    }

    /// Inserts the budget into the extensions of a request, and counts the request's waits from here on.
    ///
    /// The request's clones share the count. Outside a retry layer this makes all tries share one budget, see
    /// [Retries](Self#retries). Replaces a budget that the request has.
    ///
    /// ```
    /// use http::Request;
    /// use tower::ServiceBuilder;
    /// use tower_semaphore::limit::WaitBudget;
    ///
    /// let stack = ServiceBuilder::new().map_request(|mut request: Request<String>| {
    ///     WaitBudget::default().insert_into(request.extensions_mut());
    ///     request
    /// });
    /// // ... .retry(policy).layer(concurrency_limit).service(client)
    /// # drop(stack);
    /// ```
    pub fn insert_into(self, extensions: &mut Extensions) {
        extensions.insert(Self { waits: Some(Arc::default()), ..self });
    }

    /// The moment after which no layer lets the request wait, if one was set.
    #[must_use]
    pub const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// How long the request has waited for permits, in all layers and tries. Zero for a budget that was made and not
    /// taken from a request.
    ///
    /// Includes a wait that goes on; excludes waits shorter than 1 ms, and layers in
    /// [shadow](super::ConcurrencyLimitBuilder::shadow), in which nothing waits.
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::Extension;
    /// use tower_semaphore::limit::WaitBudget;
    ///
    /// async fn handler(Extension(budget): Extension<WaitBudget>) -> String {
    ///     format!("waited {:?} for permits", budget.waited())
    /// }
    /// ```
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited_at(Instant::now)
    }

    fn waited_at(&self, now: impl Fn() -> Instant) -> Duration {
        self.waits.as_ref().map_or(Duration::ZERO, |waits| waits.waited(now))
    }

    /// The wait that is left of a layer's own wait timeout.
    pub(super) fn left(&self, wait_timeout: Duration, now: impl Fn() -> Instant) -> Duration {
        let budget = wait_timeout.max(self.longest);
        let left = wait_timeout.min(budget.saturating_sub(self.waited_at(&now)));
        match self.deadline {
            Some(deadline) if !left.is_zero() => {
                left.min(deadline.saturating_duration_since(now()))
            }
            _ => left,
        }
    }

    /// How long to wait for the backend's answer, for a request with a deadline.
    pub(super) fn answer_timeout(&self) -> Option<Duration> {
        let left = self.deadline?.saturating_duration_since(Instant::now());
        Some(left.max(ANSWER_TIMEOUT_MIN))
    }

    /// Counts from now on, until the wait is dropped. `None`: the layer counts it as it [passes](Self::pass_on) the
    /// request on.
    pub(super) fn wait(&self) -> Option<CountedWait> {
        let waits = self.waits.as_ref()?;
        let mut spent = waits.lock();
        if spent.waiting == 0 {
            spent.since = Some(Instant::now());
        }
        spent.waiting += 1;
        drop(spent);
        Some(CountedWait { waits: Arc::clone(waits) })
    }

    /// A client waits no longer than this, from now on.
    pub(super) fn end_with_client(parts: &mut Parts, timeout: Duration) {
        let Some(deadline) = Instant::now().checked_add(timeout) else { return };
        match parts.extensions.get_mut::<Self>() {
            Some(budget) => {
                let before = budget.deadline;
                budget.deadline = Some(before.map_or(deadline, |before| before.min(deadline)));
            }
            None => drop(parts.extensions.insert(Self::until(deadline))),
        }
    }

    /// A request is passed on by a layer that `allowed` it to wait so long, and in which it `waited`. From here on
    /// it has a budget of its own.
    pub(super) fn pass_on(parts: &mut Parts, waited: Duration, allowed: Duration) {
        match parts.extensions.get_mut::<Self>() {
            Some(budget) => {
                budget.longest = budget.longest.max(allowed);
                budget.waits.get_or_insert_with(|| Waits::begin(waited));
            }
            // Usual, and allocates nothing.
            None if waited < GRAIN || allowed.is_zero() => {}
            None => {
                let waits = Some(Waits::begin(waited));
                parts.extensions.insert(Self { longest: allowed, waits, ..Self::default() });
            }
        }
    }
}

impl Waits {
    fn begin(waited: Duration) -> Arc<Self> {
        let waits = Self::default();
        waits.lock().add(waited);
        Arc::new(waits)
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waited(&self, now: impl Fn() -> Instant) -> Duration {
        let spent = self.lock();
        let goes_on = spent.since.map(|since| now().saturating_duration_since(since));
        spent.before + goes_on.unwrap_or_default()
    }
}

impl Spent {
    fn add(&mut self, waited: Duration) {
        if waited >= GRAIN {
            self.before += waited;
        }
    }
}

impl Drop for CountedWait {
    fn drop(&mut self) {
        let mut spent = self.waits.lock();
        spent.waiting -= 1;
        if spent.waiting == 0
            && let Some(since) = spent.since.take()
        {
            spent.add(since.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(waited: Duration, longest: Duration) -> WaitBudget {
        WaitBudget { longest, waits: Some(Waits::begin(waited)), ..WaitBudget::default() }
    }

    #[test]
    fn a_layer_waits_for_what_those_outside_it_left() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let without = budget(second, Duration::ZERO);
        assert_eq!(without.left(3 * second, || now), 2 * second);
        assert_eq!(without.left(second / 2, || now), Duration::ZERO);
        let with = budget(second, 2 * second);
        assert_eq!(with.left(second / 2, || now), second / 2);
        assert_eq!(with.left(5 * second, || now), 4 * second);
        let budget = WaitBudget::until(now + second);
        assert_eq!(budget.left(3 * second, || now), second);
        assert_eq!(budget.left(second / 2, || now), second / 2);
        assert_eq!(budget.left(second, || now + 2 * second), Duration::ZERO);
    }

    #[test]
    fn what_is_shorter_than_a_millisecond_is_no_wait() {
        let shortest = Duration::from_millis(1);
        assert_eq!(budget(shortest, shortest).waited(), shortest);
        assert_eq!(budget(shortest / 2, shortest).waited(), Duration::ZERO);
    }
}
