//! Operations on a running fleet: limits, pauses, drains, revocations.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::ids::PlaceId;
use crate::backend::Change;
use crate::error::BackendError;
#[cfg(doc)]
use crate::error::RejectReason;
use crate::name::Name;
use crate::node::overrides::pauses::{LONGEST_OF_OPERATOR as PAUSE_MAX, pause_by_operator};
#[cfg(doc)]
use crate::policy::Limit;
use crate::policy::{Policy, rate_in_place};
use crate::protocol::{self, Mode, Override, PauseCause};
#[cfg(doc)]
use crate::semaphore::Permit;
use crate::semaphore::Semaphore;

/// How often a drain checks whether a semaphore is empty.
const DRAIN_POLL: Duration = Duration::from_millis(50);

/// How long a revocation is remembered if the lease is unknown, in ms: the longest lease, and a minute for a renewal
/// that is made while the revocation is under way.
const LONGEST_MS: u64 = (Policy::MAX_LEASE.as_secs() + 60) * 1000;

/// # Operations
///
/// An override of a name replaces its policy in the whole fleet. The backend keeps it until it is cleared; at most 1000
/// names can have one. Operators can pause 500 further names [until a time](Self::pause_for). Every process is notified
/// at once, and also reads the overrides each second in which it uses any semaphore. Where changes come thick, it reads
/// them together, each 100 ms. This process has applied the override when the call returns.
///
/// A policy with a limit of 0 or [`Limit::Unlimited`] is answered without the backend, so no override affects it.
///
/// All of these fail if the backend gives no answer within a second, or refuses. A call that fails, or is dropped
/// before it completes, may or may not have taken effect; it can be repeated.
impl Semaphore {
    /// Sets the limit of `name`, which replaces that of its policy. Raising the limit wakes waiters at once. Lowering
    /// it revokes nothing; granting resumes when usage falls below it.
    ///
    /// 0 has the effect of [`pause`](Self::pause).
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked, or 1000 names have an override already.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_limit("openai", 2).await?;
    ///
    /// // The policy says 1, the operator 2.
    /// let one = semaphore.try_acquire("openai", &Policy::new(1)).await?;
    /// let two = semaphore.try_acquire("openai", &Policy::new(1)).await?;
    /// # drop((one, two));
    /// # Ok(()) }
    /// ```
    pub async fn set_limit(&self, name: impl Into<Name>, limit: u32) -> Result<(), BackendError> {
        self.change(name, Change::Limit(Some(limit))).await
    }

    /// Clears the limit that [`set_limit`](Self::set_limit) set. The limit of the policy is in force again.
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
    /// semaphore.set_limit("openai", 2).await?;
    /// semaphore.clear_limit("openai").await?;
    /// assert_eq!(semaphore.limit_of("openai").await?.limit, None);
    /// # Ok(()) }
    /// ```
    pub async fn clear_limit(&self, name: impl Into<Name>) -> Result<(), BackendError> {
        self.change(name, Change::Limit(None)).await
    }

    /// Sets the rate of `name`, which replaces that of its policy: in no window of this length do more requests start.
    /// Requests that wait keep their turns, and are judged by it at once.
    ///
    /// It replaces only what is there: requests whose policy has no rate have none, and if that of the last request of
    /// `name` in this process has none, this is an error. It is spread over its window if the rate of the policy is
    /// [smooth](crate::PolicyBuilder::smooth), or if it is more than 4000. Requests that already started count on. A
    /// request that costs more than a rate that is not spread is rejected.
    ///
    /// What started under a shorter window counts for the policy's once that is cleared; at most the last 4,000 starts
    /// do. A longer window counts from the moment at which it is set.
    ///
    /// # Errors
    ///
    /// If the rate is 0, the window is not from 1 ms to 24 h, more than 4000 requests may start in 10 ms, or this process
    /// uses `name` without a rate; otherwise as [`set_limit`](Self::set_limit). The limit and the rate of a name count as
    /// one name each.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let minute = Duration::from_secs(60);
    /// semaphore.set_rate("openai", 1, minute).await?;
    ///
    /// // The policy says 600, the operator 1.
    /// let policy = Policy::builder(10).rate(600, minute).build()?;
    /// let permit = semaphore.try_acquire("openai", &policy).await?;
    /// assert!(semaphore.try_acquire("openai", &policy).await.is_err());
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub async fn set_rate(
        &self,
        name: impl Into<Name>,
        starts: u32,
        window: Duration,
    ) -> Result<(), BackendError> {
        let rate = rate_in_place(starts, window);
        let rate = rate.map_err(|error| BackendError::call(error.to_string()))?;
        let name = name.into();
        if self.running_node()?.has_no_rate(name.as_str()) {
            let text = format!(
                "the policy of {:?} in this process has no rate, so nothing would be judged by {rate}; set a rate in the \
                 policy first",
                name.as_str()
            );
            return Err(BackendError::call(text));
        }
        self.change(name, Change::Rate(Some(rate))).await
    }

    /// Clears the rate that [`set_rate`](Self::set_rate) set. The rate of the policy is in force again.
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
    /// use std::time::Duration;
    /// use tower_semaphore::Semaphore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_rate("openai", 300, Duration::from_secs(60)).await?;
    /// semaphore.clear_rate("openai").await?;
    /// assert_eq!(semaphore.limit_of("openai").await?.rate, None);
    /// # Ok(()) }
    /// ```
    pub async fn clear_rate(&self, name: impl Into<Name>) -> Result<(), BackendError> {
        self.change(name, Change::Rate(None)).await
    }

    /// Returns the override of `name`: its limit, its rate and its mode. [`inspect`](Self::inspect) tells of a pause
    /// until a time.
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
    /// use tower_semaphore::operate::Mode;
    /// use tower_semaphore::Semaphore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_limit("openai", 2).await?;
    /// let set = semaphore.limit_of("openai").await?;
    /// assert_eq!((set.limit, set.mode), (Some(2), Mode::Open));
    /// # Ok(()) }
    /// ```
    pub async fn limit_of(&self, name: impl Into<Name>) -> Result<Override, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.of(name.into().as_str()))
    }

    /// Pauses `name`: no permit is granted until [`resume`](Self::resume). Holders keep their permits, waiting requests
    /// keep waiting, and newcomers queue or are rejected ([`Paused`](RejectReason::Paused)), according to their policy.
    /// If the backend cannot be asked meanwhile, they are rejected even if the policy would admit them.
    ///
    /// # Errors
    ///
    /// As [`set_limit`](Self::set_limit).
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.pause("openai").await?;
    /// assert!(semaphore.try_acquire("openai", &Policy::new(10)).await.is_err());
    ///
    /// semaphore.resume("openai").await?;
    /// assert!(semaphore.try_acquire("openai", &Policy::new(10)).await.is_ok());
    /// # Ok(()) }
    /// ```
    pub async fn pause(&self, name: impl Into<Name>) -> Result<(), BackendError> {
        self.change(name, Change::Mode(Mode::Paused)).await
    }

    /// Pauses `name` for this long: no permit is granted until then by the backend's clock, or until
    /// [`resume`](Self::resume). Holders keep their permits, and waiting requests their turns. Newcomers queue, or are
    /// rejected with [`RejectReason::UpstreamPause`] and the time that is left. A pause that is known to end later stays
    /// as it is, and so do the limit and the mode that an operator set.
    ///
    /// # Errors
    ///
    /// If `duration` is not from 1 ms to 24 h, the backend cannot be asked, or operators pause 500 names until a time
    /// already.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{AcquireError, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.pause_for("openai", Duration::from_millis(50)).await?;
    ///
    /// let error = semaphore.try_acquire("openai", &Policy::new(10)).await.unwrap_err();
    /// assert!(matches!(error, AcquireError::Rejected(rejected) if rejected.ends_in.is_some()));
    ///
    /// let policy = Policy::builder(10).wait_timeout(Duration::from_secs(1)).build()?;
    /// assert!(semaphore.acquire("openai", &policy).await.is_ok());
    /// # Ok(()) }
    /// ```
    pub async fn pause_for(
        &self,
        name: impl Into<Name>,
        duration: Duration,
    ) -> Result<(), BackendError> {
        if !(Duration::from_millis(1)..=PAUSE_MAX).contains(&duration) {
            let text = format!("pause is {duration:?}; expected 1ms to {PAUSE_MAX:?}");
            return Err(BackendError::call(text));
        }
        self.change(name, pause_by_operator(duration)).await?;
        self.node().counts.meter.on_pause(PauseCause::Operator);
        Ok(())
    }

    /// Grants permits of `name` again after a [`pause`](Self::pause), a [`pause_for`](Self::pause_for) or a
    /// [`drain`](Self::drain), up to the limit of the policy or the one that is [set](Self::set_limit). See
    /// [`pause`](Self::pause) for an example.
    ///
    /// It also ends every pause of an upstream that a process asked for before it learned of this, even if the process
    /// is cut off from the backend meanwhile. The backend remembers that for an hour, the longest
    /// [`max_pause`](crate::PolicyBuilder::max_pause), of at least the last 450 names.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, it may or may not have taken effect.
    pub async fn resume(&self, name: impl Into<Name>) -> Result<(), BackendError> {
        let name = name.into();
        self.set(name.as_str(), Change::Resume).await?;
        self.change(name, Change::Mode(Mode::Open)).await
    }

    /// Drains `name`: rejects newcomers with [`RejectReason::Draining`], and still serves requests that already wait,
    /// in their turn. Waits up to `timeout` until no request holds a permit or waits, and returns whether that was
    /// reached. In either case, newcomers are rejected until [`resume`](Self::resume).
    ///
    /// A process that misses the message can admit newcomers for one more second.
    ///
    /// # Errors
    ///
    /// As [`set_limit`](Self::set_limit), or if the backend cannot be asked when the timeout ends.
    ///
    /// # Cancel safety
    ///
    /// Once newcomers are rejected, dropping this ends only the wait.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    /// assert!(!semaphore.drain("openai", Duration::from_millis(10)).await?);
    ///
    /// drop(permit);
    /// assert!(semaphore.drain("openai", Duration::from_secs(1)).await?);
    /// semaphore.resume("openai").await?;
    /// # Ok(()) }
    /// ```
    pub async fn drain(
        &self,
        name: impl Into<Name>,
        timeout: Duration,
    ) -> Result<bool, BackendError> {
        let name = name.into();
        let began = Instant::now();
        // A century is effectively no timeout, and the sum cannot overflow.
        let until = began + timeout.min(Duration::from_secs(100 * 365 * 24 * 3600));
        self.change(name.clone(), Change::Mode(Mode::Draining)).await?;
        loop {
            let next = Instant::now() + DRAIN_POLL;
            let inspects = self.running_node()?.inspect(name.as_str(), 1);
            let seen = timeout_at(next.max(until), inspects).await;
            match seen {
                Ok(Ok(seen)) if seen.in_use == 0 && seen.waiting == 0 => return Ok(true),
                Ok(Err(error)) if Instant::now() >= until => return Err(error),
                _ if Instant::now() >= until => return Ok(false),
                _ => sleep_until(next.min(until)).await,
            }
        }
    }

    /// Revokes the place `id` of `name`, an id of [`inspect`](Self::inspect). A holder loses its permit, and
    /// [`Permit::lost`] notifies it; a waiting request is rejected with [`RejectReason::Revoked`]. A freed permit goes
    /// to the head of the queue.
    ///
    /// Returns `false` if there is no such place. Otherwise the place is gone when this returns. Its process learns that
    /// as it learns of an override, within a second if the message is lost, and does not count the place again.
    ///
    /// With [`reuse`](crate::PolicyBuilder::reuse), a place goes from one request to the next. The request that has it
    /// at that moment loses it.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked, or there are 1000 overrides and revoked places already.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped, or fails, the place may or may not be revoked; it can be repeated.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    ///
    /// let id = semaphore.inspect("openai").await?.holders[0].id;
    /// assert!(semaphore.revoke("openai", id).await?);
    /// assert!(permit.is_lost());
    /// assert!(!semaphore.revoke("openai", id).await?);
    /// # Ok(()) }
    /// ```
    pub async fn revoke(&self, name: impl Into<Name>, id: PlaceId) -> Result<bool, BackendError> {
        let (name, PlaceId(id)) = (name.into(), id);
        let Some(seen_ms) = self.take(&name, id, false).await? else { return Ok(false) };
        // The record is written first, so that a process that finds its place gone can read why. It is not announced
        // yet: a holder that is notified releases its place at once, and the place would be gone before it is removed
        // below.
        let revoked = |keep_ms, tell| Change::Revoked { id, keep_ms, tell };
        self.set(name.as_str(), revoked(LONGEST_MS, false)).await?;
        let taken_ms = self.take(&name, id, true).await?;
        // The announcement also has waiting processes call, which grants what was freed.
        self.set(name.as_str(), revoked(keep_ms(seen_ms, taken_ms), true)).await?;
        self.running_node()?.catch_up().await?;
        Ok(true)
    }

    /// Looks up a place, or removes it. Returns how much of its lease is left, in ms, if it is there.
    async fn take(
        &self,
        name: &Name,
        id: protocol::PlaceId,
        take: bool,
    ) -> Result<Option<u64>, BackendError> {
        let node = self.running_node()?;
        let key = node.backend().key(name.as_str());
        node.query(None, &key, |server| server.revoke(&key, id, take)).await
    }
}

/// Returns how long a revocation is remembered, in ms: until no proof of its place is valid. `seen_ms` and `taken_ms`
/// are what was left of its lease when it was found, and when it was removed.
fn keep_ms(seen_ms: u64, taken_ms: Option<u64>) -> u64 {
    // It was gone already: its holder released it, or another operator removed it, or an earlier attempt of this call
    // whose reply was lost. These cannot be told apart, and in the last two cases a proof may still be shown.
    let Some(left_ms) = taken_ms else { return LONGEST_MS };
    // A replica that was promoted in between may have missed a renewal that was seen.
    left_ms.max(seen_ms)
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_MS, keep_ms};
    use crate::policy::Policy;

    #[test]
    fn a_revocation_is_remembered_until_no_proof_is_valid() {
        assert_eq!(keep_ms(300, Some(200)), 300);
        assert_eq!(keep_ms(300, Some(500)), 500, "renewed in between");
        assert_eq!(keep_ms(0, Some(0)), 0);
        for seen_ms in [0, 300] {
            assert_eq!(keep_ms(seen_ms, None), LONGEST_MS);
        }
        assert!(u128::from(LONGEST_MS) > Policy::MAX_LEASE.as_millis());
    }
}
