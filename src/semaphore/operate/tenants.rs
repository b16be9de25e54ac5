//! Operations on the tenants of a semaphore: caps and weights.

use super::Semaphore;
use crate::ask::Ask;
use crate::backend::Change;
use crate::error::BackendError;
use crate::name::Name;
use crate::tenants::{TenantChange, TenantOverride};

/// # Operations on tenants
///
/// An override of a tenant replaces what its requests ask for, in the whole fleet. It is kept like that of
/// [`set_limit`](Self::set_limit).
impl Semaphore {
    /// Sets the cap and the weight of a tenant of `name`, or has its requests decide again. What `change` does not name
    /// stays as it is.
    ///
    /// Applies to requests that come afterwards; requests that already wait keep their cap and weight.
    ///
    /// # Errors
    ///
    /// If the weight is out of range; otherwise as [`set_limit`](Self::set_limit). The cap and the weight of a tenant
    /// count as one name each.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, or fails, each part of the change may or may not have taken effect; it can be repeated.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::operate::TenantChange;
    /// use tower_semaphore::{Ask, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// // One permit at a time, and twice the share of a tenant with weight 1.
    /// semaphore.set_tenant("openai", "acme", TenantChange::new().limit(1).weight(2)).await?;
    ///
    /// let ask = || Ask::of("openai").by("acme");
    /// let permit = semaphore.try_acquire(ask(), &Policy::new(10)).await?;
    /// let error = semaphore.try_acquire(ask(), &Policy::new(10)).await.unwrap_err();
    /// assert_eq!(error.to_string(), "all 1 permits that the tenant may have are in use");
    ///
    /// semaphore.set_tenant("openai", "acme", TenantChange::new().limit(None)).await?;
    /// let set = semaphore.tenant_override_of("openai", "acme").await?;
    /// assert_eq!((set.limit, set.weight), (None, Some(2)));
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub async fn set_tenant(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
        change: TenantChange,
    ) -> Result<(), BackendError> {
        if let Some(weight) = change.new_weight().filter(|of| !(1..=Ask::MAX_WEIGHT).contains(of)) {
            let most = Ask::MAX_WEIGHT;
            return Err(BackendError::call(format!("weight is {weight}; expected 1 to {most}")));
        }
        for (field, value) in change.fields(&name.into(), &tenant.into()) {
            self.set(&field, Change::Limit(value)).await?;
        }
        self.running_node()?.catch_up().await
    }

    /// Returns the override of a tenant of `name`.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    /// use tower_semaphore::operate::TenantChange;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_tenant("openai", "acme", TenantChange::new().limit(5)).await?;
    /// let set = semaphore.tenant_override_of("openai", "acme").await?;
    /// assert_eq!((set.limit, set.weight), (Some(5), None));
    /// # Ok(()) }
    /// ```
    pub async fn tenant_override_of(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
    ) -> Result<TenantOverride, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.of_tenant(&name.into(), &tenant.into()))
    }
}
