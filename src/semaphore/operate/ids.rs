//! Ids of places and of tenants, as operators see them: opaque, so that the protocol's own can change.

use std::fmt;
use std::str::FromStr;

#[cfg(doc)]
use super::{Inspection, Semaphore, TenantUse};
use crate::error::ConfigError;
use crate::protocol;

/// The id of a place, of a request that holds or waits. Found in an [`Inspection`], and passed to
/// [`Semaphore::revoke`]. No other place ever has the same id.
///
/// # Examples
///
/// ```
/// use tower_semaphore::operate::PlaceId;
/// use tower_semaphore::{Policy, Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let semaphore = Semaphore::in_memory();
/// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
///
/// let shown = semaphore.inspect("openai").await?.holders[0].id.to_string();
/// let id: PlaceId = shown.parse()?;
/// assert!(semaphore.revoke("openai", id).await?);
/// # drop(permit);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaceId(pub(super) protocol::PlaceId);

impl fmt::Display for PlaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for PlaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PlaceId {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        protocol::PlaceId::parse(text.as_bytes()).map(Self).ok_or_else(|| {
            ConfigError::new(format!("place id is {text:?}; expected one from an inspection"))
        })
    }
}

/// The id of a tenant, the same in all processes with one `tenant_salt`. It connects the holders and waiters of an
/// [`Inspection`] with their [`TenantUse`], which has the name if that is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub(super) protocol::Tenant);

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
