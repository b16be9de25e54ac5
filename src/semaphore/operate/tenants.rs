//! Operations on the tenants of a semaphore: caps and weights.

use super::Semaphore;
use crate::ask::Ask;
use crate::backend::Change;
use crate::error::BackendError;
use crate::name::Name;
use crate::tenants::{TenantOverride, limit_field, weight_field};

/// # Operations on tenants
///
/// An override of a tenant replaces what its requests ask for, in the whole fleet; see
/// [`set_limit`](Self::set_limit) for where it is kept.
impl Semaphore {
    /// Sets the cap of a tenant of `name`, in place of what its requests ask for: it gets no more permits than this.
    /// With 0 its requests are rejected.
    ///
    /// Applies to requests that come from then on; those that wait already keep their cap.
    ///
    /// # Errors
    ///
    /// As [`set_limit`](Self::set_limit); the cap of a tenant counts as one name more, and so does its weight.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Ask, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_tenant_limit("openai", "acme", 1).await?;
    ///
    /// let ask = || Ask::of("openai").by("acme");
    /// let permit = semaphore.try_acquire(ask(), &Policy::new(10)).await?;
    /// let error = semaphore.try_acquire(ask(), &Policy::new(10)).await.unwrap_err();
    /// assert_eq!(error.to_string(), "all 1 permits that the tenant may have are in use");
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub async fn set_tenant_limit(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
        permits: u32,
    ) -> Result<(), BackendError> {
        let field = limit_field(&name.into(), &tenant.into());
        self.change_field(&field, Change::Limit(Some(permits))).await
    }

    /// Clears the cap that [`set_tenant_limit`](Self::set_tenant_limit) set.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_tenant_limit("openai", "acme", 1).await?;
    /// semaphore.clear_tenant_limit("openai", "acme").await?;
    /// assert_eq!(semaphore.tenant_override_of("openai", "acme").await?.limit, None);
    /// # Ok(()) }
    /// ```
    pub async fn clear_tenant_limit(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
    ) -> Result<(), BackendError> {
        let field = limit_field(&name.into(), &tenant.into());
        self.change_field(&field, Change::Limit(None)).await
    }

    /// Sets the weight of a tenant of `name`, from 1 to [`Ask::MAX_WEIGHT`], in place of what its requests ask for.
    ///
    /// Applies to requests that come from then on.
    ///
    /// # Errors
    ///
    /// If the weight is out of range; else as [`set_tenant_limit`](Self::set_tenant_limit).
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// // Twice the share of a tenant with weight 1.
    /// semaphore.set_tenant_weight("openai", "acme", 2).await?;
    ///
    /// let error = semaphore.set_tenant_weight("openai", "acme", 65).await.unwrap_err();
    /// assert_eq!(error.to_string(), "weight: 65; allowed: 1 to 64");
    /// # Ok(()) }
    /// ```
    pub async fn set_tenant_weight(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
        weight: u32,
    ) -> Result<(), BackendError> {
        if !(1..=Ask::MAX_WEIGHT).contains(&weight) {
            let most = Ask::MAX_WEIGHT;
            return Err(BackendError::call(format!("weight: {weight}; allowed: 1 to {most}")));
        }
        let field = weight_field(&name.into(), &tenant.into());
        self.change_field(&field, Change::Limit(Some(weight))).await
    }

    /// Clears the weight that [`set_tenant_weight`](Self::set_tenant_weight) set.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_tenant_weight("openai", "acme", 2).await?;
    /// semaphore.clear_tenant_weight("openai", "acme").await?;
    /// assert_eq!(semaphore.tenant_override_of("openai", "acme").await?.weight, None);
    /// # Ok(()) }
    /// ```
    pub async fn clear_tenant_weight(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
    ) -> Result<(), BackendError> {
        let field = weight_field(&name.into(), &tenant.into());
        self.change_field(&field, Change::Limit(None)).await
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
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_tenant_limit("openai", "acme", 5).await?;
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
