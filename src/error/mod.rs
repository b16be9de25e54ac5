//! Errors of building, of acquiring, and of the backend.

mod rejected;
mod words;

use std::error::Error;
use std::fmt;
use std::sync::Arc;

pub use self::rejected::Rejected;
pub(crate) use self::rejected::{Beside, ByTime, QueueSeen};
pub(crate) use self::words::{QUARANTINE, Seconds, Within};
pub use crate::protocol::RejectReason;
use crate::semaphore::Permit;

/// A setting that cannot be used. The message names the setting, its value and what is allowed.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore::Policy;
///
/// let error = Policy::builder(10).wait_timeout(Duration::from_secs(7200)).build().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "wait timeout is 7200s; expected 0 (reject at once) to 3600s"
/// );
/// ```
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

/// A failure of the backend: it could not be asked, or gave no usable answer.
///
/// Cheap to clone: one failure answers every request that it affects.
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
    /// Creates a failure of one call. The connection stays usable.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::BackendError;
    ///
    /// let error = BackendError::call("the script was refused");
    /// assert!(!error.is_connection());
    /// ```
    pub fn call(message: impl Into<String>) -> Self {
        Self::build(message.into(), false, None)
    }

    /// Creates a failure of the connection. It is closed, and another one is opened.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::BackendError;
    ///
    /// let cause = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    /// let error = BackendError::connection("the connection was reset").with_source(cause);
    /// assert!(error.is_connection());
    /// ```
    pub fn connection(message: impl Into<String>) -> Self {
        Self::build(message.into(), true, None)
    }

    /// Sets the [source](Error::source) of this error.
    #[must_use]
    pub fn with_source(self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::build(self.inner.message.clone(), self.inner.fatal, Some(source.into()))
    }

    /// Returns whether the connection is lost, so that calls on their way may or may not have been carried out.
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

/// Why no permit was granted.
///
/// # Examples
///
/// ```
/// use tower_semaphore::{AcquireError, Policy, Semaphore};
///
/// # async fn example(semaphore: &Semaphore, policy: &Policy) {
/// match semaphore.acquire("openai", policy).await {
///     Ok(permit) => drop(permit),
///     Err(AcquireError::Rejected(rejected)) if rejected.limit == 0 => println!("switched off"),
///     Err(AcquireError::Unavailable(error)) => println!("Redis is away: {error}"),
///     Err(error) => println!("{error}"),
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AcquireError {
    /// No permit could be granted in time: [`Rejected::reason`] says why.
    Rejected(Rejected),
    /// The backend could not be asked in time.
    Unavailable(BackendError),
    /// The semaphore was [shut down](crate::Semaphore::shutdown), or the request would have to wait after
    /// [`stop_waiting`](crate::Semaphore::stop_waiting).
    Closed,
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected(rejected) => rejected.said_of(None).fmt(f),
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

/// The lease of a permit was lost: another request may hold it by now.
///
/// A response body ends with this error if its permit is lost and the layer aborts on loss.
///
/// The message does not contain the [name](Self::name): it can be a client's key, and messages reach logs and clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseLost {
    name: Arc<str>,
}

impl LeaseLost {
    /// The error of a request whose permit, or one further out, is lost.
    pub(crate) fn of(permit: &Permit) -> Self {
        Self { name: permit.lost_name().into() }
    }

    /// Returns the name of the semaphore, [as it is stored](crate::Name::as_str).
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for LeaseLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the lease of the request's permit was lost")
    }
}

impl Error for LeaseLost {}
