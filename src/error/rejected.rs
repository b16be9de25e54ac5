//! Requests that got no permit.

use std::sync::Arc;
use std::time::Duration;

use crate::ask::Estimate;
use crate::budget::Budget;
#[cfg(doc)]
use crate::policy::OnUnavailable;
#[doc(inline)]
use crate::protocol::Rate;
use crate::protocol::RejectReason;

/// Why a request was rejected, and what this process knew of the semaphore at that moment.
///
/// The message does not contain the [name](Self::name): it can be a client's key, and messages reach logs and clients.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rejected {
    /// The name of the semaphore, [as it is stored](crate::Name::as_str).
    pub name: Arc<str>,
    /// Why it was rejected.
    pub reason: RejectReason,
    /// The limit in force; [`u32::MAX`] if only a rate, further limits or budgets count.
    pub limit: u32,
    /// How many permits were in use in the fleet, by the last reply of the backend that contains it; a reply omits it
    /// while permits are free. `None` if there was no such reply.
    ///
    /// If [`OnUnavailable::Local`] rejected the request, in an outage, the count is that of this process.
    pub in_use: Option<u64>,
    /// How many requests of all tenants were waiting, counted as [`in_use`](Self::in_use) is.
    pub waiting: Option<u64>,
    /// How long the request waited.
    pub waited: Duration,
    /// How many permits the request asked for.
    pub cost: u32,
    /// The cap of its tenant, if it has one.
    pub each: Option<u32>,
    /// Whether the cap of its tenant was the reason, as far as that is known: always for
    /// [`TenantLimit`](RejectReason::TenantLimit); for a request that waited in vain, if its tenant reaches the cap
    /// in this process alone.
    pub is_tenant_full: bool,
    /// How soon the reason ends, if that is known: the rest of a [quarantine](RejectReason::Quarantine) or a
    /// [pause](RejectReason::UpstreamPause), or when the [rate](RejectReason::Rate) or the
    /// [budget](RejectReason::Budget) allows the next start.
    pub ends_in: Option<Duration>,
    /// Boxed, because results carry it.
    pub(crate) beside: Option<Box<Beside>>,
    /// What is known of the queue; `None` if nothing is.
    pub(crate) queue: Option<Box<QueueSeen>>,
    /// Whether the request has a tenant, whose line is a queue of its own.
    pub(crate) has_tenant: bool,
}

/// The limits beside that of the semaphore and the tenant's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Beside {
    pub(crate) rate: Option<Rate>,
    /// The further limit that was full, and its cap.
    pub(crate) further: Option<(Arc<str>, u32)>,
    /// The budget that kept the request back, as far as is known, and what it was estimated to use of it.
    pub(crate) budget: Option<Estimate>,
    /// Whether the request takes of a budget.
    pub(crate) has_budgets: bool,
}

/// What allowed no start, though there were permits.
pub(crate) enum ByTime<'a> {
    Rate,
    Budget(Option<&'a Estimate>),
    /// Which of several is not known.
    Either,
}

impl Beside {
    /// `None` if there are none.
    pub(crate) fn boxed(self) -> Option<Box<Self>> {
        let is_any = self.rate.is_some() || self.further.is_some() || self.has_budgets;
        is_any.then(|| Box::new(self))
    }
}

/// What a rejection tells of the queue. Boxed, because results carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueSeen {
    pub(crate) ahead: Option<u32>,
    pub(crate) expected_wait: Option<Duration>,
    /// How long the request could have waited.
    pub(crate) wait_timeout: Duration,
    /// How long the rate lets another request wait at least for those ahead, once it allows the next start.
    pub(crate) rate_wait: Duration,
}

impl QueueSeen {
    /// `None` if nothing is known.
    pub(crate) fn boxed(self) -> Option<Box<Self>> {
        let Self { ahead, expected_wait, rate_wait, .. } = self;
        let is_known = ahead.is_some() || expected_wait.is_some() || !rate_wait.is_zero();
        is_known.then(|| Box::new(self))
    }
}

impl Rejected {
    /// Returns how many requests may start within a time, if the policy says so.
    #[must_use]
    pub fn rate(&self) -> Option<Rate> {
        self.beside.as_ref()?.rate
    }

    /// Returns the name of what kept the request back besides the limit of the semaphore.
    ///
    /// That is a [budget](crate::Budget), if the reason is [`Budget`](RejectReason::Budget), or
    /// [`CostTooHigh`](RejectReason::CostTooHigh) for an estimate above the burst. Or the name of the
    /// [further limit](crate::Ask::also), such as `route`, that was full, or that the request's cost exceeds: if the reason is [`FurtherLimit`](RejectReason::FurtherLimit), or maybe
    /// [`CostTooHigh`](RejectReason::CostTooHigh). With [`QueueTimeout`](RejectReason::QueueTimeout), of the limits that
    /// were full when the request began to wait, the first; it may have waited for others since.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Rejected;
    ///
    /// fn is_of_model(rejected: &Rejected) -> bool {
    ///     rejected.limit_name() == Some("model")
    /// }
    /// ```
    #[must_use]
    pub fn limit_name(&self) -> Option<&str> {
        self.further().map(|(name, _)| name).or_else(|| Some(self.budget()?.name()))
    }

    /// The further limit that was full, with its cap.
    pub(crate) fn further(&self) -> Option<(&str, u32)> {
        let (name, cap) = self.beside.as_ref()?.further.as_ref()?;
        Some((name, *cap))
    }

    /// Returns how many requests were ahead of this one when it joined the queue, or was rejected instead.
    ///
    /// `None` for a request with a [tenant](crate::Ask::by) or [further limits](crate::Ask::also), which waits in a line of
    /// its own, or in a semaphore with a
    /// [rate](crate::PolicyBuilder::rate), which has such lines, too; where permits are
    /// [reused](crate::PolicyBuilder::reuse); in an outage, and for a request that the backend was asked for twice
    /// because of one; and for a reason other than too many requests.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{AcquireError, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), AcquireError> {
    /// # let semaphore = Semaphore::in_memory();
    /// let policy = Policy::new(1);
    /// let _held = semaphore.acquire("openai", &policy).await?;
    /// let error = semaphore.try_acquire("openai", &policy).await.unwrap_err();
    /// if let AcquireError::Rejected(rejected) = error {
    ///     assert_eq!(rejected.ahead(), Some(0), "one is in use, and nobody waits");
    ///     assert_eq!(rejected.expected_wait(), None, "nobody has waited yet");
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn ahead(&self) -> Option<u32> {
        self.queue.as_ref()?.ahead
    }

    /// Returns how long a request that came at the moment of the rejection would wait for its permit.
    ///
    /// An estimate, from how fast the queue moved lately: from the last 128 permits of requests of this process that had
    /// waited, within 30 s, and of these from the half, at least five, whose turns were nearest to this one's. With a
    /// [tenant](crate::Ask::by), from those of the tenant, of whose requests in other processes the number is estimated,
    /// too: they are taken to have the same share of those that wait there as in this process.
    ///
    /// In a simulation of three processes, at 1.2 of what the limit served and in bursts of three times as much, half of
    /// the estimates were within 12 % of the true wait; with tenants, within 30 %.
    ///
    /// `None` where [`ahead`](Self::ahead) is, except for a tenant in a semaphore without a rate and of a request without
    /// further limits; and if this process has
    /// not seen that many since something changed how fast permits come free: another limit, a pause, an outage, a loss
    /// of data, a new connection.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Rejected;
    ///
    /// /// Whether to try another region.
    /// fn takes_long(rejected: &Rejected) -> bool {
    ///     rejected.expected_wait().is_some_and(|wait| wait > Duration::from_secs(10))
    /// }
    /// ```
    #[must_use]
    pub fn expected_wait(&self) -> Option<Duration> {
        self.queue.as_ref()?.expected_wait
    }

    /// Returns the budget that kept the request back: for the reason [`Budget`](RejectReason::Budget), or
    /// [`CostTooHigh`](RejectReason::CostTooHigh) for an estimate above its burst; and where the request waited in vain and
    /// only this one can have been it.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Rejected;
    ///
    /// fn used_up(rejected: &Rejected) -> Option<&str> {
    ///     rejected.budget().map(|budget| budget.name())
    /// }
    /// ```
    #[must_use]
    pub fn budget(&self) -> Option<&Budget> {
        self.estimate().map(|of| &of.budget)
    }

    /// The same with what the request was estimated to use.
    pub(crate) fn estimate(&self) -> Option<&Estimate> {
        let beside = self.beside.as_ref()?;
        let is_sure = !self.waited_in_vain() || beside.rate.is_none() && self.ends_in.is_some();
        beside.budget.as_ref().filter(|_| is_sure)
    }

    const fn waited_in_vain(&self) -> bool {
        matches!(self.reason, RejectReason::QueueTimeout | RejectReason::QueueFull)
    }

    /// Whether permits are free, and the request may not wait for those ahead of it.
    pub(crate) fn is_behind_others(&self) -> bool {
        self.reason == RejectReason::Limit
            && self.has_room()
            && self.waiting.is_some_and(|waiting| waiting > 0)
    }

    /// Whether permits were free for it.
    fn has_room(&self) -> bool {
        self.in_use.is_some_and(|in_use| in_use + u64::from(self.cost) <= u64::from(self.limit))
    }

    /// Adds when to try again, if the request waited in vain for a budget of its tenant. No reply says when that has enough;
    /// but it has after the time in which the estimate refills, unless others of the tenant take of it.
    pub(crate) fn with_refill(mut self) -> Self {
        let is_by_budget = self.reason == RejectReason::QueueTimeout
            && self.ends_in.is_none()
            && !self.is_tenant_full
            && self.has_room();
        if is_by_budget
            && let Some(Beside { rate: None, further: None, budget: Some(of), .. }) =
                self.beside.as_deref()
            && of.budget.is_each()
        {
            self.ends_in = Some(Duration::from_micros(of.budget.time_of(of.units)));
        }
        self
    }

    /// What kept the request back that time allows, as far as is known.
    pub(crate) fn by_time(&self) -> Option<ByTime<'_>> {
        match self.reason {
            RejectReason::Rate => Some(ByTime::Rate),
            RejectReason::Budget(_) => Some(ByTime::Budget(self.estimate())),
            _ if !self.waited_in_vain() || self.ends_in.is_none() => None,
            _ => match self.beside.as_deref()? {
                Beside { rate: Some(_), has_budgets: false, .. } => Some(ByTime::Rate),
                Beside { rate: None, budget: Some(budget), .. } => {
                    Some(ByTime::Budget(Some(budget)))
                }
                Beside { rate: None, has_budgets: true, .. } => Some(ByTime::Budget(None)),
                Beside { has_budgets: true, .. } => Some(ByTime::Either),
                _ => None,
            },
        }
    }

    /// A request that asks for one permit, has no tenant, and did not wait.
    pub(crate) const fn new(name: Arc<str>, reason: RejectReason, limit: u32) -> Self {
        Self {
            name,
            reason,
            limit,
            in_use: None,
            waiting: None,
            waited: Duration::ZERO,
            cost: 1,
            each: None,
            is_tenant_full: false,
            beside: None,
            ends_in: None,
            queue: None,
            has_tenant: false,
        }
    }

    /// Sets the cost of the request and the cap of its tenant.
    pub(crate) fn asked(mut self, cost: u32, each: Option<u32>) -> Self {
        self.cost = if cost == 0 { 1 } else { cost };
        self.each = each;
        self.is_tenant_full = matches!(self.reason, RejectReason::TenantLimit);
        self
    }
}
