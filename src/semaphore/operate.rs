//! What an operator can do while everything runs.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::Semaphore;
use super::node::another_answer;
#[cfg(doc)]
use super::permit::Permit;
#[cfg(doc)]
use super::policy::Limit;
use super::policy::Policy;
use crate::backend::{Answer, Change, Mode, OVERRIDES, Op, Override};
use crate::error::BackendError;
#[cfg(doc)]
use crate::error::FullReason;
use crate::ledger::PlaceId;
use crate::name::Name;

/// How often to look whether a semaphore has run empty.
const LOOK: Duration = Duration::from_millis(50);

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
    /// Gives `name` so many permits, whatever its policy says. More wake those who wait at once. With
    /// fewer nobody loses his permit, but nobody gets one until there are fewer in use.
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
        self.handle.node.catch_up().await?;
        Ok(self.handle.node.override_of(name.into().as_str()))
    }

    /// Gives out no permits of `name` until [`resume`](Self::resume). Who holds one keeps it; who waits
    /// goes on waiting, and newcomers queue or are refused, as their policy lets them. If the backend
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

    /// Lets `name` run empty: newcomers are refused, with [`FullReason::Draining`], and who waits
    /// already is still served in his turn. Waits until nobody holds or waits, for `timeout` at the
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
            let next = Instant::now() + LOOK;
            let look = self.handle.node.list(name.as_str(), 1);
            let seen = timeout_at(next.max(until), look).await;
            match seen {
                Ok(Ok(seen)) if seen.in_use == 0 && seen.waiting == 0 => return Ok(true),
                Ok(Err(error)) if Instant::now() >= until => return Err(error),
                _ if Instant::now() >= until => return Ok(false),
                _ => sleep_until(next.min(until)).await,
            }
        }
    }

    /// Takes the place `id` of `name` from whoever has it: a permit is lost to its holder, as
    /// [`Permit::lost`] tells, and a request that waits is refused, with [`FullReason::Revoked`]. What
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
        if self.take(&name, id, false).await?.is_none() {
            return Ok(false);
        }
        // First the word, then the deed: a process that finds its place gone can read why. Many give it
        // back themselves when they have heard.
        let keep_ms = u64::try_from(Policy::MAX_LEASE.as_millis()).unwrap_or(u64::MAX);
        self.set(&name, Change::Revoked { id, keep_ms }).await?;
        let left_ms = self.take(&name, id, true).await?;
        // With it, those who wait are told that something is free. From its lease's end on, nothing
        // can prove any more that the place was there.
        let keep_ms = left_ms.unwrap_or(0);
        self.set(&name, Change::Revoked { id, keep_ms }).await?;
        self.handle.node.catch_up().await?;
        Ok(true)
    }

    /// Looks for a place, or takes it out: for how long its lease goes on, ms, if it is there.
    async fn take(
        &self,
        name: &Name,
        id: PlaceId,
        take: bool,
    ) -> Result<Option<u64>, BackendError> {
        match self.handle.node.ask(name.as_str(), Op::Revoke { id, take }).await? {
            Answer::Revoked(left_ms) => Ok(left_ms),
            _ => Err(another_answer()),
        }
    }

    async fn change(&self, name: impl Into<Name>, change: Change) -> Result<(), BackendError> {
        self.set(&name.into(), change).await?;
        self.handle.node.catch_up().await
    }

    async fn set(&self, name: &Name, change: Change) -> Result<(), BackendError> {
        let op = Op::Override { name: name.as_str().into(), change };
        self.handle.node.ask(OVERRIDES, op).await.map(drop)
    }
}
