//! Sets up a policy.

use std::num::NonZeroU32;
use std::time::Duration;

use super::{Limit, OnUnavailable, Policy};
use crate::error::ConfigError;
use crate::protocol::{Adaptive, BoundRate, Rate};

/// Builds a [`Policy`].
#[derive(Clone, Debug)]
#[must_use = "`build` returns the policy"]
pub struct PolicyBuilder {
    pub(super) policy: Policy,
    /// Checked by [`build`](PolicyBuilder::build): starts and window.
    pub(super) rate: Option<(u32, Duration)>,
    pub(super) is_smooth: bool,
}

impl PolicyBuilder {
    /// Sets how long a request may wait for a permit, from its call on. With zero it is rejected at once if no permit
    /// is free.
    ///
    /// The default is 2 s, the maximum an hour.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).wait_timeout(Duration::from_millis(500)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn wait_timeout(mut self, timeout: Duration) -> Self {
        self.policy.wait_timeout = timeout;
        self
    }

    /// Sets how long a permit outlives a process that dies. While the process lives, its permits are renewed every
    /// third of this.
    ///
    /// The default is 10 s; allowed are half a second to a day, in whole milliseconds. A short lease frees the permits of
    /// a dead process sooner; a long one rides out longer stalls of process and backend.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).lease(Duration::from_secs(5)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.policy.lease = lease;
        self
    }

    /// Sets how many requests may wait for one name in the whole fleet; further ones are rejected at once. Where
    /// requests name a [tenant](crate::Ask::by), this is the maximum of each tenant, and
    /// [`max_waiting`](Self::max_waiting) that of all of them.
    ///
    /// The default is 10,000. A full queue rejects requests regardless of their process. If a process has workers that
    /// ask again at once, set this to more than their number.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).max_queue(100).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn max_queue(mut self, places: u32) -> Self {
        self.policy.max_queue = places;
        self
    }

    /// Sets how many requests of [tenants](crate::Ask::by) may wait for one name in the whole fleet, in the lines of all
    /// tenants together; further ones are rejected at once. [`max_queue`](Self::max_queue) is the maximum of each line,
    /// so without this bound thousands of tenants could queue millions of requests, and each of them is renewed each
    /// second.
    ///
    /// A tenant may have as many waiting as there is room for others, so one with a long line leaves room for those
    /// that have none: alone it can have half of this waiting, and two tenants a third each.
    ///
    /// The default is 20,000, or twice [`max_queue`](Self::max_queue) if that is more.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // Each tenant 100, and all of them 2,000.
    /// let policy = Policy::builder(10).max_queue(100).max_waiting(2000).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn max_waiting(mut self, places: u32) -> Self {
        self.policy.max_waiting = Some(places);
        self
    }

    /// Sets how many permits are reserved for requests of class 0: see [`Ask::class`](crate::Ask::class). Must be less
    /// than the limit; where an operator lowers the limit to the headroom, the other classes wait.
    ///
    /// The default is none. In an outage, [`OnUnavailable::Local`] goes by class, and reserves nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // Batch jobs, of a higher class, leave two of ten permits to interactive requests.
    /// let policy = Policy::builder(10).headroom(2).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn headroom(mut self, permits: u32) -> Self {
        self.policy.headroom = permits;
        self
    }

    /// Sets how long a permit stays taken after its request was broken off: see [`Permit::break_off`]. Use it for
    /// the quota of a third party, such as an LLM provider, which notices late that a client left.
    ///
    /// The default is zero, the maximum half of the lease. A lease has at least that left when a process dies, so a
    /// crash frees no permit sooner than a request that is broken off. For the same reason a permit that cannot be
    /// renewed is [lost](crate::Permit::lost) this long before its lease ends.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // The provider needs some 50 ms to notice.
    /// let policy = Policy::builder(10).linger(Duration::from_millis(200)).build()?;
    /// # Ok(()) }
    /// ```
    ///
    /// [`Permit::break_off`]: crate::Permit::break_off
    pub const fn linger(mut self, linger: Duration) -> Self {
        self.policy.linger = linger;
        self
    }

    /// Sets whether a permit that is given back goes straight to the next request of this process, without a call to the
    /// backend, as long as this process knows that no other one waits. Use it for names that are hot in each process and
    /// whose permits are held for milliseconds, such as a pool in front of a database. Where a permit is held for a
    /// second, it saves nothing worth naming.
    ///
    /// The default is `false`. A permit that is given back while no request of this process waits is kept for at most
    /// 50 ms, and counts as in use. When a request of another process starts to wait, this process is notified and
    /// releases what it keeps. If that message is lost, or the other process does not set this, requests of this process
    /// can be granted ahead of the other's for at most 50 ms after the call whose reply last said that nobody else
    /// waits. [`Permit::release`] always gives a permit back.
    ///
    /// A request that may not wait joins no queue, and is rejected as long as another process uses and keeps the
    /// permits. [`build`](Self::build) therefore refuses a wait timeout of zero, and a queue of none.
    /// [`Semaphore::try_acquire`] and a layer's `wait_timeout_by` are not checked.
    ///
    /// A permit serves requests that ask for the same: limit, lease, tenant with weight, class, cost and cap, and so on.
    /// While requests of several tenants wait in this process, it passes nothing on, so that the next grant is the fair
    /// one.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(20).reuse(true).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    ///
    /// [`Permit::release`]: crate::Permit::release
    /// [`Semaphore::try_acquire`]: crate::Semaphore::try_acquire
    pub const fn reuse(mut self, reuse: bool) -> Self {
        self.policy.reuse = reuse;
        self
    }

    /// Sets whether a request is rejected at once, with [`RejectReason::Hopeless`], if it is expected to wait more than
    /// twice as long as it may: see [`Rejected::expected_wait`]. A request for which nothing is known waits as usual, and
    /// so does each under a [rate](Self::rate). The default is `false`.
    ///
    /// Use it only where requests of one name may wait for *different* times, by policy or by the deadlines of their
    /// callers: a caller with one second then learns immediately that twenty seconds of others are ahead of it. Where all
    /// wait equally long, those ahead give up before the wait becomes hopeless, and the permit that a request is refused
    /// goes to another one: nobody is served sooner, and some are refused in a burst that would have been served.
    ///
    /// Nothing is sent for it, except that a rejected request leaves the queue. Cannot be combined with
    /// [`reuse`](Self::reuse).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let batch = Policy::builder(10).wait_timeout(Duration::from_secs(60)).build()?;
    /// let interactive =
    ///     Policy::builder(10).wait_timeout(Duration::from_secs(1)).refuse_hopeless(true).build()?;
    /// # let _ = (batch, interactive); Ok(()) }
    /// ```
    ///
    /// [`RejectReason::Hopeless`]: crate::RejectReason::Hopeless
    /// [`Rejected::expected_wait`]: crate::Rejected::expected_wait
    pub const fn refuse_hopeless(mut self, refuse: bool) -> Self {
        self.policy.refuse_hopeless = refuse;
        self
    }

    /// Sets the longest pause that a response of the upstream can ask for: see [`Permit::feedback`]. The default is 60
    /// s; with zero, no response pauses anything. At most [`Policy::MAX_MAX_PAUSE`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).max_pause(Duration::from_secs(20)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    ///
    /// [`Permit::feedback`]: crate::Permit::feedback
    pub const fn max_pause(mut self, max_pause: Duration) -> Self {
        self.policy.max_pause = max_pause;
        self
    }

    /// Sets what happens to a request while the backend cannot be asked. The default is to refuse it.
    ///
    /// Requests that passed by this are counted by the backend as soon as it is back, as far as they are still in
    /// flight. A [local share](OnUnavailable::Local) must not be more than the limit.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{OnUnavailable, Policy};
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // A limit of 30 for three replicas: each admits 10 by itself in an outage.
    /// let policy = Policy::builder(30).on_unavailable(OnUnavailable::Local(10)).build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    pub const fn on_unavailable(mut self, on_unavailable: OnUnavailable) -> Self {
        self.policy.on_unavailable = on_unavailable;
        self
    }

    /// Sets the value of the label `policy` in the [metrics](crate::metrics), for requests under this policy. The name
    /// of a layer replaces it.
    ///
    /// The default is `default`. The metrics keep the name as long as the process lives, so it is `&'static`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).name("nightly").build()?;
    /// # let _ = policy; Ok(()) }
    /// ```
    #[cfg(feature = "metrics")]
    pub const fn name(mut self, name: &'static str) -> Self {
        self.policy.name = name;
        self
    }

    /// Sets how many requests may start within a time, beside the limit of those in flight: a request waits until both
    /// allow it, in the order of all.
    ///
    /// In no window of this length, by the clock of the backend, are more permits granted, across all processes. A
    /// grant counts for a window, whatever becomes of its request: a crash or an early end gives nothing back, and a
    /// rejected request takes nothing. A request with a [cost](crate::Ask::cost) counts as that many; one that costs
    /// more than the rate is rejected, unless the rate is smooth.
    ///
    /// Up to 4,000 in a window of 1 ms to a day. The backend keeps the time of each, about 120 bytes in Redis;
    /// [`smooth`](Self::smooth) allows for more. With [`Limit::Unlimited`] only the rate counts.
    ///
    /// All users of a name should use the same rate: each request is judged by its own, one without a rate is not
    /// counted, and a process that knows only a shorter window forgets starts that have left it. A loss of data empties
    /// the window, so up to twice as many can start until a window has passed.
    ///
    /// In an outage, a [local share](OnUnavailable::Local) of the limit has the same part of the rate; without a limit,
    /// as many starts as it has permits. These are whole starts, or one in a longer time, and spread over the window if
    /// the rate is smooth. What the process was granted in the window before counts against that, unless it has not used
    /// the name for five seconds. So where requests are spread evenly over the processes, an outage leaves the rate as it
    /// is; else up to twice as many can start until a window has passed, and three times as many if the data are lost
    /// within that window. What ended in the outage does not count after it.
    ///
    /// [Tenants](crate::Ask::by) are compared by the permits that they have in use, not by what they started: one whose
    /// requests are short starts more of them.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// // A provider's quota: ten requests at a time, and 600 a minute.
    /// let policy = Policy::builder(10).rate(600, Duration::from_secs(60)).build()?;
    /// assert_eq!(policy.rate().map(|rate| rate.starts()), Some(600));
    /// # Ok(()) }
    /// ```
    pub const fn rate(mut self, starts: u32, window: Duration) -> Self {
        self.rate = Some((starts, window));
        self
    }

    /// Spreads the [rate](Self::rate) evenly over its window: of 600 a minute, one may start each 100 ms, instead of 600
    /// at once. Use it where a provider looks at shorter windows than it says, and for rates above 4,000 in a window.
    ///
    /// Rates above 100 a second are spread over steps of 10 ms. A request with a cost takes as many turns, so those
    /// that follow wait for longer; a window can have its cost less one more than the rate. One whose turns take more
    /// than a day is rejected.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let policy = Policy::builder(10).rate(600, Duration::from_secs(60)).smooth().build()?;
    /// assert!(policy.rate().is_some_and(|rate| rate.is_smooth()));
    /// # Ok(()) }
    /// ```
    pub const fn smooth(mut self) -> Self {
        self.is_smooth = true;
        self
    }

    /// Lets the limit find itself within a range, by the refusals of the upstream: see [`Permit::feedback`]. Use it where
    /// nobody knows how many requests the upstream takes at a time, or where that changes. The limit of the policy must be
    /// the maximum, with which it begins.
    ///
    /// It is one number for the whole fleet. A burst of refusals lowers it once by a tenth, from what was in flight if that
    /// is known to be less: a refusal counts if its request went on after the last decrease was known. While requests wait
    /// for it, it grows by one in each [interval](Adaptive::grow_every). Nobody leads: the backend keeps the number, each
    /// process that sees a refusal asks for the decrease, and the first one whose requests wait asks for growth. Nothing is
    /// asked for it where permits are taken or given back. A limit that an operator
    /// [sets](crate::Semaphore::set_limit) is in force instead, and as long as it is, the number stays as it is.
    ///
    /// A number that did not change for ten minutes is forgotten, so nothing stays behind, and the limit is the maximum
    /// again; so it is after a loss of the backend's data. A message that is lost costs a second. The backend keeps up to
    /// 1,000 numbers; further names have the maximum.
    ///
    /// A request with a [cost](crate::Ask::cost) above the minimum is rejected with
    /// [`RejectReason::CostTooHigh`](crate::RejectReason::CostTooHigh).
    ///
    /// # Why not by latency
    ///
    /// A slow response is no refusal: an LLM takes as long as its answer, a database as long as its query. Limits that
    /// follow the latency shrink for every slow response, and grow to their maximum where an upstream that is overloaded
    /// fails fast, or always times out after the same time.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Adaptive, Feedback, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::builder(100).adaptive(Adaptive::between(5, 100)).build()?;
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("search", &policy).await?;
    /// // The upstream answered 503.
    /// permit.feedback(Feedback::TooMany);
    /// assert!(semaphore.inspect("search").await?.limit.is_some_and(|limit| limit < 100));
    /// # Ok(()) }
    /// ```
    ///
    /// [`Permit::feedback`]: crate::Permit::feedback
    pub const fn adaptive(mut self, range: Adaptive) -> Self {
        self.policy.adaptive = Some(range);
        self
    }

    /// Returns the range in which the limit finds itself, if it does.
    pub(crate) const fn range(&self) -> Option<Adaptive> {
        self.policy.adaptive
    }

    /// Sets the limit, in place of that with which the builder was made.
    pub(crate) const fn limit(mut self, limit: Limit) -> Self {
        self.policy.limit = limit;
        self
    }

    /// Checks the values and returns the policy.
    ///
    /// # Errors
    ///
    /// If a value is out of its range, or cannot be used beside the others: a local share that is more than the limit,
    /// for example, or [`reuse`](Self::reuse) with a [rate](Self::rate).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Policy;
    ///
    /// let error = Policy::builder(10).lease(Duration::ZERO).build().unwrap_err();
    /// assert_eq!(error.to_string(), "lease is 0ns; expected 500ms to 86400s");
    /// ```
    pub fn build(mut self) -> Result<Policy, ConfigError> {
        if self.is_smooth && self.rate.is_none() {
            let what = "smooth is set without a rate to spread; set rate, too";
            return Err(ConfigError::new(what));
        }
        if let Some((starts, window)) = self.rate {
            self.policy.rate = Some(checked_rate(starts, window, self.is_smooth)?);
        }
        self.policy.validate()?;
        Ok(self.policy)
    }
}

fn checked_rate(starts: u32, window: Duration, is_smooth: bool) -> Result<Rate, ConfigError> {
    let (shortest, longest) = (BoundRate::WINDOW_MIN, BoundRate::WINDOW_MAX);
    if !(shortest..=longest).contains(&window) {
        return Err(ConfigError::new(format!(
            "window of the rate is {window:?}; expected {shortest:?} to {longest:?}"
        )));
    }
    let Some(starts) = NonZeroU32::new(starts) else {
        return Err(ConfigError::new(
            "rate is 0, which rejects every request; expected 1 or more, or no rate",
        ));
    };
    let rate = Rate::new(starts, window, is_smooth);
    if rate.of_cost(1).is_none() {
        let most = BoundRate::STARTS_MAX;
        let (of, advice) =
            if is_smooth { ("10 ms", "") } else { ("a window", "; or a smooth one") };
        return Err(ConfigError::new(format!(
            "rate is {starts} in {window:?}; expected at most {most} in {of}{advice}"
        )));
    }
    Ok(rate)
}

/// Returns this rate, which replaces that of any policy.
///
/// # Errors
///
/// If it is out of range.
pub(crate) fn rate_in_place(starts: u32, window: Duration) -> Result<Rate, ConfigError> {
    // More than the backend keeps is spread in any case.
    checked_rate(starts, window, starts > BoundRate::STARTS_MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::checked_rate;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_out_of_range_is_said() {
        let error = |starts, window, is_smooth| {
            checked_rate(starts, window, is_smooth).unwrap_err().to_string()
        };
        assert_eq!(
            error(0, MINUTE, false),
            "rate is 0, which rejects every request; expected 1 or more, or no rate"
        );
        assert_eq!(
            error(4_001, MINUTE, false),
            "rate is 4001 in 60s; expected at most 4000 in a window; or a smooth one"
        );
        assert_eq!(
            error(u32::MAX, MINUTE, true),
            "rate is 4294967295 in 60s; expected at most 4000 in 10 ms"
        );
        let window = "expected 1ms to 86400s";
        assert_eq!(error(1, Duration::ZERO, false), format!("window of the rate is 0ns; {window}"));
        assert_eq!(
            error(1, Duration::MAX, true),
            format!("window of the rate is {:?}; {window}", Duration::MAX)
        );
    }
}
