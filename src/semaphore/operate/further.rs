//! Operations on the further limits of a semaphore: their caps.

use super::Semaphore;
#[cfg(doc)]
use crate::ask::Ask;
use crate::backend::Change;
use crate::error::BackendError;
use crate::further::{FurtherLimitOverride, cap_field};
use crate::name::Name;

/// # Operations on further limits
///
/// An override of a [further limit](Ask::also) replaces the cap that requests ask for, in the whole fleet. It is kept like
/// that of [`set_limit`](Self::set_limit).
impl Semaphore {
    /// Sets the cap of a further limit of `name`: the requests with this `value` for this `limit` have no more permits in
    /// use than this. With 0 they are rejected; with `None` they decide again.
    ///
    /// Applies to requests that come afterwards; requests that already wait keep their cap. A cap above 2²⁴ − 1 counts as
    /// that. Requests for which a layer finds no value, or [`Limit::Unlimited`](crate::Limit::Unlimited) as the cap, do not
    /// count under the limit, whatever is set.
    ///
    /// # Errors
    ///
    /// As [`set_limit`](Self::set_limit). Each further limit counts as one name.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, or fails, the change may or may not have taken effect; it can be repeated.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Ask, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_further_limit("llm", "model", "opus", 1).await?;
    ///
    /// let ask = || Ask::of("llm").also("model", "opus", 10);
    /// let permit = semaphore.try_acquire(ask(), &Policy::new(50)).await?;
    /// let error = semaphore.try_acquire(ask(), &Policy::new(50)).await.unwrap_err();
    /// assert_eq!(error.to_string(), "all 1 permits that its model limit allows are in use");
    ///
    /// semaphore.set_further_limit("llm", "model", "opus", None).await?;
    /// let other = semaphore.try_acquire(ask(), &Policy::new(50)).await?;
    /// # drop((permit, other));
    /// # Ok(()) }
    /// ```
    pub async fn set_further_limit(
        &self,
        name: impl Into<Name>,
        limit: impl Into<Name>,
        value: impl Into<Name>,
        cap: impl Into<Option<u32>>,
    ) -> Result<(), BackendError> {
        let field = cap_field(&name.into(), &limit.into(), &value.into());
        self.set(&field, Change::Limit(cap.into())).await?;
        self.running_node()?.catch_up().await
    }

    /// Returns the cap that an operator set for a further limit of `name`; `None` if none is set.
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
    /// semaphore.set_further_limit("llm", "route", "/chat", 5).await?;
    /// assert_eq!(semaphore.further_limit_of("llm", "route", "/chat").await?, Some(5));
    /// # Ok(()) }
    /// ```
    pub async fn further_limit_of(
        &self,
        name: impl Into<Name>,
        limit: impl Into<Name>,
        value: impl Into<Name>,
    ) -> Result<Option<u32>, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.cap_of(&name.into(), &limit.into(), &value.into()))
    }

    /// Returns the overrides of all further limits, by semaphore, limit and value; at most 1000.
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
    /// semaphore.set_further_limit("llm", "route", "/chat", 5).await?;
    /// for set in semaphore.further_limit_overrides().await? {
    ///     println!("{} of {}: {} {}", set.cap, set.semaphore, set.limit, set.value);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn further_limit_overrides(&self) -> Result<Vec<FurtherLimitOverride>, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.of_further_limits())
    }
}
