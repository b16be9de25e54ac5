//! What an operator can do while everything runs.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::Semaphore;
use super::ask::Ask;
#[cfg(doc)]
use super::permit::Permit;
#[cfg(doc)]
use super::policy::Limit;
use super::policy::Policy;
use super::tenants::{TenantOverride, limit_field, weight_field};
use crate::backend::{Change, OVERRIDES};
use crate::error::BackendError;
#[cfg(doc)]
use crate::error::RejectReason;
use crate::name::Name;
use crate::protocol::id::PlaceId;
use crate::protocol::overrides::{Mode, Override};

/// How often to look whether a semaphore has run empty.
const DRAIN_POLL: Duration = Duration::from_millis(50);

/// For how long a revocation is remembered if the lease is unknown, ms: the longest lease, counted from
/// a renewal that may come while the revocation is under way.
const LONGEST_MS: u64 = (Policy::MAX_LEASE.as_secs() + 60) * 1000;

/// # What an operator can do
///
/// What is set here for a name counts in place of its policy, in the whole fleet. It is kept where the
/// permits are counted, for as long as that keeps it, until it is taken back; at most 1000 names can
/// have something set. Every process is told at once, and looks each second besides, while it uses any
/// semaphore. This process goes by it when the call is done.
///
/// A policy of 0 or of [`Limit::Unlimited`] is answered without the backend, so nothing that is set
/// here reaches it.
///
/// All of these fail if the backend gave no answer within a second, or refuses. Where a call is dropped
/// before it is done, or fails, what it asked for may or may not be in force; it can be repeated.
impl Semaphore {
    /// Gives `name` this many permits, whatever its policy says. Raising the limit wakes waiters at once.
    /// Lowering it revokes nothing; granting resumes when usage falls below it.
    ///
    /// 0 is as good as [`pause`](Self::pause).
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked, or 1000 names have something set already.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, the limit may or may not be set.
    pub async fn set_limit(&self, name: impl Into<Name>, limit: u32) -> Result<(), BackendError> {
        self.change(name, Change::Limit(Some(limit))).await
    }

    /// Takes back what [`set_limit`](Self::set_limit) set: the policy's own limit counts again.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not be done.
    pub async fn clear_limit(&self, name: impl Into<Name>) -> Result<(), BackendError> {
        self.change(name, Change::Limit(None)).await
    }

    /// What is set for `name` in place of its policy.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn limit_of(&self, name: impl Into<Name>) -> Result<Override, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.of(name.into().as_str()))
    }

    /// Gives a tenant of `name` this cap, whatever its requests say: it has no more permits in use. 0 rejects
    /// its requests.
    ///
    /// Counts for requests that come from then on; those that wait already keep the cap that they came with.
    ///
    /// ```
    /// # use tower_semaphore::Semaphore;
    /// # async fn example(semaphore: &Semaphore) -> Result<(), tower_semaphore::BackendError> {
    /// semaphore.set_tenant_limit("openai", "acme", 2).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`set_limit`](Self::set_limit); the cap of a tenant counts as one name more, and so does its weight.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not be done.
    pub async fn set_tenant_limit(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
        permits: u32,
    ) -> Result<(), BackendError> {
        let field = limit_field(&name.into(), &tenant.into());
        self.change_field(&field, Change::Limit(Some(permits))).await
    }

    /// Takes back what [`set_tenant_limit`](Self::set_tenant_limit) set.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not be done.
    pub async fn clear_tenant_limit(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
    ) -> Result<(), BackendError> {
        let field = limit_field(&name.into(), &tenant.into());
        self.change_field(&field, Change::Limit(None)).await
    }

    /// Gives a tenant of `name` this weight, whatever its requests say: from 1 to
    /// [`Ask::MAX_WEIGHT`].
    ///
    /// Counts for requests that come from then on.
    ///
    /// # Errors
    ///
    /// If the weight is out of range; else as [`set_tenant_limit`](Self::set_tenant_limit).
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not be done.
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

    /// Takes back what [`set_tenant_weight`](Self::set_tenant_weight) set.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not be done.
    pub async fn clear_tenant_weight(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
    ) -> Result<(), BackendError> {
        let field = weight_field(&name.into(), &tenant.into());
        self.change_field(&field, Change::Limit(None)).await
    }

    /// What is set for a tenant of `name` in place of what its requests say.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn tenant_override_of(
        &self,
        name: impl Into<Name>,
        tenant: impl Into<Name>,
    ) -> Result<TenantOverride, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.of_tenant(&name.into(), &tenant.into()))
    }

    /// Grants no permits of `name` until [`resume`](Self::resume). Holders keep their permits, waiting
    /// requests keep waiting, and newcomers queue or are refused, as their policy says. If the backend
    /// cannot be asked meanwhile, they are refused even where the policy would admit them.
    ///
    /// # Errors
    ///
    /// As [`set_limit`](Self::set_limit).
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not be done.
    pub async fn pause(&self, name: impl Into<Name>) -> Result<(), BackendError> {
        self.change(name, Change::Mode(Mode::Paused)).await
    }

    /// Gives out permits of `name` again after a [`pause`](Self::pause) or [`drain`](Self::drain), as
    /// many as its policy allows or as were [set](Self::set_limit).
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not be done.
    pub async fn resume(&self, name: impl Into<Name>) -> Result<(), BackendError> {
        self.change(name, Change::Mode(Mode::Open)).await
    }

    /// Lets `name` run empty: newcomers are refused, with [`RejectReason::Draining`], and requests that wait
    /// already are still served in their turn. Waits until nobody holds or waits, for `timeout` at the
    /// most, and says whether it came to that. Newcomers are refused until
    /// [`resume`](Self::resume), in any case.
    ///
    /// A process that the message does not reach can let newcomers in for a second more.
    ///
    /// # Errors
    ///
    /// As [`set_limit`](Self::set_limit); or if the backend could not be asked in the end.
    ///
    /// # Cancel safety
    ///
    /// Once it has begun to wait, dropping it changes nothing: newcomers are refused still.
    pub async fn drain(
        &self,
        name: impl Into<Name>,
        timeout: Duration,
    ) -> Result<bool, BackendError> {
        let name = name.into();
        let began = Instant::now();
        // A century is as good as for ever, and can be added.
        let until = began + timeout.min(Duration::from_secs(100 * 365 * 24 * 3600));
        self.change(name.clone(), Change::Mode(Mode::Draining)).await?;
        loop {
            let next = Instant::now() + DRAIN_POLL;
            let look = self.running_node()?.inspect(name.as_str(), 1);
            let seen = timeout_at(next.max(until), look).await;
            match seen {
                Ok(Ok(seen)) if seen.in_use == 0 && seen.waiting == 0 => return Ok(true),
                Ok(Err(error)) if Instant::now() >= until => return Err(error),
                _ if Instant::now() >= until => return Ok(false),
                _ => sleep_until(next.min(until)).await,
            }
        }
    }

    /// Takes the place `id` of `name` from its holder: a permit is lost to its holder, as
    /// [`Permit::lost`] tells, and a request that waits is refused, with [`RejectReason::Revoked`]. What
    /// that frees goes to the head of the queue. [`inspect`](Self::inspect) tells the ids.
    ///
    /// The place is free when this is done. Its process is told at once, and finds it out within a
    /// second if the message is lost; it does not count the place again. `false`: there was no such
    /// place.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked, or 1000 names and revoked places are remembered already.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, or fails, the place may or may not be revoked; it can be repeated.
    pub async fn revoke(&self, name: impl Into<Name>, id: PlaceId) -> Result<bool, BackendError> {
        let name = name.into();
        let Some(seen_ms) = self.take(&name, id, false).await? else { return Ok(false) };
        // The record comes first, so that a process that finds its place gone can read why. It is silent:
        // a holder that is told releases its place at once, and then nobody knows who took it out.
        let revoked = |keep_ms, tell| Change::Revoked { id, keep_ms, tell };
        self.set(name.as_str(), revoked(LONGEST_MS, false)).await?;
        let taken_ms = self.take(&name, id, true).await?;
        // With it, those who wait are told that something is free.
        self.set(name.as_str(), revoked(keep_ms(seen_ms, taken_ms), true)).await?;
        self.running_node()?.catch_up().await?;
        Ok(true)
    }

    /// Looks for a place, or takes it out: for how long its lease goes on, ms, if it is there.
    async fn take(
        &self,
        name: &Name,
        id: PlaceId,
        take: bool,
    ) -> Result<Option<u64>, BackendError> {
        let node = self.running_node()?;
        let key = node.backend().key(name.as_str());
        node.query(None, &key, |server| server.revoke(&key, id, take)).await
    }

    async fn change(&self, name: impl Into<Name>, change: Change) -> Result<(), BackendError> {
        self.change_field(name.into().as_str(), change).await
    }

    async fn change_field(&self, field: &str, change: Change) -> Result<(), BackendError> {
        self.set(field, change).await?;
        self.running_node()?.catch_up().await
    }

    async fn set(&self, field: &str, change: Change) -> Result<(), BackendError> {
        let node = self.running_node()?;
        let (key, name) = (node.backend().key(OVERRIDES), Arc::from(field));
        node.query(None, &key, |server| server.set_override(&key, &name, change)).await
    }
}

/// For how long a revocation is remembered, ms: until no proof of its place is good any more. `seen_ms` and
/// `taken_ms` were left of its lease when it was looked for, and when it was taken out.
fn keep_ms(seen_ms: u64, taken_ms: Option<u64>) -> u64 {
    // Not there: released by its holder, or taken out by another operator or by a try of this call whose
    // answer was lost. These cannot be told apart, and in the last two a proof may still be shown.
    let Some(left_ms) = taken_ms else { return LONGEST_MS };
    // A replica that took over in between may have missed a renewal that was seen.
    left_ms.max(seen_ms)
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_MS, keep_ms};
    use crate::semaphore::policy::Policy;

    #[test]
    fn a_revocation_is_remembered_until_no_proof_is_good() {
        assert_eq!(keep_ms(300, Some(200)), 300);
        assert_eq!(keep_ms(300, Some(500)), 500, "renewed in between");
        assert_eq!(keep_ms(0, Some(0)), 0);
        for seen_ms in [0, 300] {
            assert_eq!(keep_ms(seen_ms, None), LONGEST_MS);
        }
        assert!(u128::from(LONGEST_MS) > Policy::MAX_LEASE.as_millis());
    }
}
