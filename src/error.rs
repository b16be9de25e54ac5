//! What can go wrong: while building, while acquiring, while talking to a backend.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A setting that cannot be used. Names the setting, the value and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    message: String,
}

impl ConfigError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ConfigError {}

/// The backend could not be asked, or gave no usable answer.
///
/// Cheap to clone: one failure answers every request that it struck.
#[derive(Clone, Debug)]
pub struct BackendError {
    inner: Arc<BackendErrorInner>,
}

#[derive(Debug)]
struct BackendErrorInner {
    message: String,
    fatal: bool,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl BackendError {
    /// A failure of one call; the connection is good.
    pub fn call(message: impl Into<String>) -> Self {
        Self::build(message.into(), false, None)
    }

    /// A failure of the connection: nothing more will come through it.
    pub fn connection(message: impl Into<String>) -> Self {
        Self::build(message.into(), true, None)
    }

    /// Keeps what caused this one.
    #[must_use]
    pub fn with_source(self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::build(self.inner.message.clone(), self.inner.fatal, Some(source.into()))
    }

    /// Whether the connection is lost, so that what was on its way may or may not have been done.
    #[must_use]
    pub fn is_connection(&self) -> bool {
        self.inner.fatal
    }

    fn build(message: String, fatal: bool, source: Option<Box<dyn Error + Send + Sync>>) -> Self {
        Self { inner: Arc::new(BackendErrorInner { message, fatal, source }) }
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.message)
    }
}

impl Error for BackendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.inner.source.as_deref().map(|source| source as _)
    }
}

/// Why no permit was given.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AcquireError {
    /// No permit is granted now: [`Rejected::reason`] says why.
    Rejected(Rejected),
    /// The backend could not be asked in time.
    Unavailable(BackendError),
    /// The semaphore was shut down.
    Closed,
}

/// Why a request was rejected, and the semaphore as it was seen then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rejected {
    /// What stood in the way.
    pub reason: RejectReason,
    /// The limit in force, permits.
    pub limit: u32,
    /// How many permits were out.
    pub in_use: u64,
    /// How many requests were waiting.
    pub waiting: u64,
    /// How long this one waited.
    pub waited: Duration,
    /// How many permits it asked for.
    pub cost: u32,
    /// How many permits its tenant may have in use, if that has a cap of its own.
    pub each: Option<u32>,
    /// Whether that cap was in the way, as far as is known: always for
    /// [`TenantLimit`](RejectReason::TenantLimit); for a request that waited in vain, if its tenant's permits in
    /// this process alone reach the cap.
    pub is_tenant_full: bool,
}

/// What stood in the way of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectReason {
    /// All permits are out, or others wait for one, and this request may not wait.
    Limit,
    /// As many requests wait as may.
    QueueFull,
    /// The tenant has as many permits in use as it may, and this request may not wait; or it may have none.
    TenantLimit,
    /// The request asks for more permits than it could ever have: than the limit, what is left of it to its
    /// class, or its tenant's own cap.
    CostTooHigh,
    /// No permit came free within the wait timeout.
    QueueTimeout,
    /// An operator lets the semaphore run empty: see [`Semaphore::drain`](crate::Semaphore::drain).
    Draining,
    /// An operator took its place out: see [`Semaphore::revoke`](crate::Semaphore::revoke).
    Revoked,
}

impl RejectReason {
    /// The reason as one lower-case word, as it stands in problem documents and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::QueueFull => "queue_full",
            Self::TenantLimit => "tenant_limit",
            Self::CostTooHigh => "cost_too_high",
            Self::QueueTimeout => "queue_timeout",
            Self::Draining => "draining",
            Self::Revoked => "revoked",
        }
    }
}

impl Rejected {
    pub(crate) const fn new(
        reason: RejectReason,
        limit: u32,
        in_use: u64,
        waiting: u64,
        waited: Duration,
    ) -> Self {
        Self { reason, limit, in_use, waiting, waited, cost: 1, each: None, is_tenant_full: false }
    }

    /// The same, of a request for so many permits, by a tenant that may have so many.
    pub(crate) const fn asked(mut self, cost: u32, each: Option<u32>) -> Self {
        self.cost = if cost == 0 { 1 } else { cost };
        self.each = each;
        self.is_tenant_full = matches!(self.reason, RejectReason::TenantLimit);
        self
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected(rejected) => match rejected.reason {
                RejectReason::Limit => write!(f, "all {} permits are in use", rejected.limit),
                RejectReason::QueueFull => {
                    write!(f, "the queue is full: {} requests are waiting", rejected.waiting)
                }
                RejectReason::TenantLimit => match rejected.each {
                    Some(0) => f.write_str("the tenant may have no permits"),
                    Some(each) => {
                        write!(f, "all {each} permits that the tenant may have are in use")
                    }
                    None => f.write_str("all permits that the tenant may have are in use"),
                },
                RejectReason::CostTooHigh => {
                    let Rejected { cost, limit, .. } = rejected;
                    write!(
                        f,
                        "it asks for {cost} permits; allowed: 1 to 64, the limit is {limit}"
                    )?;
                    rejected.each.map_or(Ok(()), |each| write!(f, ", its tenant's cap {each}"))
                }
                RejectReason::QueueTimeout => {
                    write!(
                        f,
                        "none of {} permits came free in {:?}",
                        rejected.limit, rejected.waited
                    )
                }
                RejectReason::Draining => {
                    f.write_str("no newcomers are let in: it is being drained")
                }
                RejectReason::Revoked => f.write_str("its place was revoked"),
            },
            Self::Unavailable(error) => {
                write!(f, "the semaphore's backend is unavailable: {error}")
            }
            Self::Closed => f.write_str("the semaphore was shut down"),
        }
    }
}

impl Error for AcquireError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unavailable(error) => Some(error),
            _ => None,
        }
    }
}

/// The lease of a permit was lost: another may hold it by now.
///
/// A response body ends with this error when its permit is lost and the layer aborts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseLost;

impl LeaseLost {
    pub(crate) const fn new() -> Self {
        Self
    }
}

impl fmt::Display for LeaseLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the lease of the request's permit was lost")
    }
}

impl Error for LeaseLost {}
