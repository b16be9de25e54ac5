//! Budgets, such as tokens a minute.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::ConfigError;
use crate::protocol::Charge;

/// The maximum length of a budget's name: it stands in responses.
const NAME_MAX: usize = 64;

/// A budget of a semaphore: how much its requests may use within a time, such as 80,000 tokens a minute.
///
/// What a request will use is seldom known before it has its answer. So it takes an [estimate](crate::Ask::estimate) with
/// its permit, in the same step, or waits; and [`Permit::settle`](crate::Permit::settle) puts what it truly used in place
/// of that, once, when its permit is given back. If nothing is settled, as after a crash, the estimate stands.
///
/// It is a bucket, as that of most providers is: shared by all processes, it refills evenly, of 80,000 a minute 1,333 each
/// second by the clock of the backend, up to the [burst](Self::burst). In any time `t`, requests take at most
/// `burst + amount · t ÷ per` more than they give back, apart from what they use beyond their estimates. So a minute that
/// begins with a full bucket can have twice the amount, unless the burst is less; and when long requests end that were
/// estimated too high, others can use the difference at once, however long ago it was taken. The backend keeps one number
/// for it (the *generic cell rate algorithm*, ITU-T I.371), about 100 bytes in Redis.
///
/// Who waits for a budget waits for it to refill: let the [wait timeout](crate::PolicyBuilder::wait_timeout) be as long as
/// that takes for an estimate.
///
/// Requests wait for a budget in the order in which they wait for permits, and who is next keeps back those behind it,
/// whatever they ask for; unless it is a budget of [each](Self::each) tenant. A loss of data fills the budget. In an outage a
/// [local share](crate::OnUnavailable::Local) of the limit has the same part of the budget; without a limit, as many
/// requests as it has permits use up a burst.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore::{Ask, Budget, Policy, Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let semaphore = Semaphore::in_memory();
/// let tokens = Budget::new("tokens", 80_000, Duration::from_secs(60))?;
///
/// // The prompt, and the most that the answer may have.
/// let ask = Ask::of("openai").estimate(&tokens, 1_200 + 4_000);
/// let permit = semaphore.acquire(ask, &Policy::new(10)).await?;
/// // The answer says what was used.
/// permit.settle("tokens", 1_950);
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Budget {
    name: Arc<str>,
    amount: u64,
    per: Duration,
    burst: u64,
    is_each: bool,
}

impl Budget {
    /// The maximum amount.
    pub const MAX_AMOUNT: u64 = 1_000_000_000_000;
    /// The shortest time.
    pub const MIN_PER: Duration = Duration::from_millis(1);
    /// The longest time: a day.
    pub const MAX_PER: Duration = Duration::from_micros(Charge::BURST_MAX);

    /// Creates a budget: `amount` units, such as tokens, within `per`. All of it may be used at once.
    ///
    /// The name tells apart the budgets of a semaphore and stands in rejections. All users of a semaphore should agree on
    /// a budget: each request takes its part by its own. Those whose [bursts](Self::burst) take different times to refill,
    /// as while a configuration is rolled out, have a budget each, which begins full.
    ///
    /// # Errors
    ///
    /// If the name is not 1 to 64 of `A-Z a-z 0-9 . _ -`, or is `each` or `rate`, which have a meaning of their own; if the
    /// amount is 0 or more than [`MAX_AMOUNT`](Self::MAX_AMOUNT), or the time not [`MIN_PER`](Self::MIN_PER) to
    /// [`MAX_PER`](Self::MAX_PER).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Budget;
    ///
    /// let error = Budget::new("tokens", 0, Duration::from_secs(60)).unwrap_err();
    /// assert_eq!(error.to_string(), "the tokens budget is 0; expected 1 to 1000000000000");
    /// ```
    pub fn new(name: impl Into<String>, amount: u64, per: Duration) -> Result<Self, ConfigError> {
        let name = name.into();
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_taken = ["each", "rate"].contains(&&*name);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(allowed) || is_taken {
            return Err(ConfigError::new(format!(
                "the name of a budget is {name:?}; expected 1 to {NAME_MAX} of A-Z a-z 0-9 . _ -, but neither \"each\" \
                 nor \"rate\""
            )));
        }
        if !(1..=Self::MAX_AMOUNT).contains(&amount) {
            return Err(ConfigError::new(format!(
                "the {name} budget is {amount}; expected 1 to {}",
                Self::MAX_AMOUNT
            )));
        }
        if !(Self::MIN_PER..=Self::MAX_PER).contains(&per) {
            return Err(ConfigError::new(format!(
                "the time of the {name} budget is {per:?}; expected {:?} to {:?}",
                Self::MIN_PER,
                Self::MAX_PER
            )));
        }
        Ok(Self { name: name.into(), amount, per, burst: amount, is_each: false })
    }

    /// Sets how much may be used at once, once nothing was used for long enough. The default is the amount, as providers
    /// have it that fill a bucket. Where a provider counts each minute for itself, amount and burst together must not be
    /// more than its quota: of 80,000 a minute, 60,000 with a burst of 20,000.
    ///
    /// Each request takes whole µs of the budget's time, rounded up.
    ///
    /// A request whose estimate is more than this is rejected at once, with
    /// [`CostTooHigh`](crate::RejectReason::CostTooHigh).
    ///
    /// # Errors
    ///
    /// If it is 0 or more than the amount.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::Budget;
    ///
    /// # fn main() -> Result<(), tower_semaphore::ConfigError> {
    /// let tokens = Budget::new("tokens", 80_000, Duration::from_secs(60))?.burst(20_000)?;
    /// assert_eq!(tokens.to_string(), "80000/60s,burst=20000");
    /// # Ok(()) }
    /// ```
    pub fn burst(mut self, units: u64) -> Result<Self, ConfigError> {
        if !(1..=self.amount).contains(&units) {
            return Err(ConfigError::new(format!(
                "the burst of the {} budget is {units}; expected 1 to its amount of {}",
                self.name, self.amount
            )));
        }
        self.burst = units;
        Ok(self)
    }

    /// Each tenant has one of its own, such as 8,000 tokens a minute for each customer beside 80,000 for all. Where a
    /// tenant's is used up, its requests wait, and nobody else: what they need is free for other tenants meanwhile.
    ///
    /// With an estimate of 1 it is a rate of each tenant. Such a bucket can start twice the amount in a time that begins with
    /// a full one, unlike [`Policy::rate`](crate::PolicyBuilder::rate), so set a [burst](Self::burst) where that is too many.
    ///
    /// Requests without a tenant that take of it count as one tenant. Among those of a tenant that have different
    /// [further limits](crate::Ask::also), whoever finds enough goes first: small estimates can keep a large one waiting.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_semaphore::{Ask, Budget, Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let semaphore = Semaphore::in_memory();
    /// let minute = Duration::from_secs(60);
    /// let requests = Budget::new("requests", 60, minute)?.burst(1)?.each();
    /// let policy = Policy::new(10);
    /// let ask = |tenant| Ask::of("openai").by(tenant).estimate(&requests, 1);
    ///
    /// let _permit = semaphore.acquire(ask("acme"), &policy).await?;
    /// assert!(semaphore.try_acquire(ask("acme"), &policy).await.is_err());
    /// assert!(semaphore.try_acquire(ask("globex"), &policy).await.is_ok());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn each(mut self) -> Self {
        self.is_each = true;
        self
    }

    /// Returns whether [each](Self::each) tenant has one of its own.
    #[must_use]
    pub const fn is_each(&self) -> bool {
        self.is_each
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns how much may be used within [`per`](Self::per).
    #[must_use]
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// Returns the time in which the amount may be used.
    #[must_use]
    pub const fn per(&self) -> Duration {
        self.per
    }

    /// Returns how much may be used [at once](Self::burst).
    #[must_use]
    pub const fn burst_amount(&self) -> u64 {
        self.burst
    }

    /// Returns how long the budget refills for this many units, in µs, rounded up.
    pub(crate) fn time_of(&self, units: u64) -> u64 {
        let us = u128::from(units) * self.per.as_micros();
        u64::try_from(us.div_ceil(u128::from(self.amount))).unwrap_or(u64::MAX)
    }

    /// Returns what a request takes that is estimated to use this many units; `hash` is that of the budget's name, and of its
    /// tenant if each has one. `None`: more than may be used at once.
    pub(crate) fn charge(&self, hash: u64, units: u64) -> Option<Charge> {
        let charge = if self.is_each { Charge::of_tenant } else { Charge::of_hash };
        charge(hash, self.time_of(units), self.time_of(self.burst)).filter(|_| units <= self.burst)
    }

    /// Returns how many units may be used at once, if the budget is full again in this time.
    pub(crate) fn left_if_full_in(&self, full_in: Duration) -> u64 {
        let us = u128::from(self.time_of(self.burst)).saturating_sub(full_in.as_micros());
        u64::try_from(us * u128::from(self.amount) / self.per.as_micros()).unwrap_or(u64::MAX)
    }

    /// Returns in what time the budget is full again, µs, of which this many units are left.
    pub(crate) fn time_to_full(&self, left: u64) -> u64 {
        self.time_of(self.burst).saturating_sub(self.time_of(left))
    }
}

/// Such as `80000/60s`, with a burst `80000/60s,burst=20000`, of each tenant `8000/60s,each`.
impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:?}", self.amount, self.per)?;
        if self.burst < self.amount {
            write!(f, ",burst={}", self.burst)?;
        }
        if self.is_each { f.write_str(",each") } else { Ok(()) }
    }
}

/// Such as `tokens 80000/60s`.
impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {self}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Budget;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_out_of_range_is_said() {
        let error =
            |name: &str, amount, per| Budget::new(name, amount, per).unwrap_err().to_string();
        for name in ["", "each", "rate", "to kens", "tökens", &"x".repeat(65)] {
            assert!(error(name, 1, MINUTE).contains("expected 1 to 64 of A-Z"), "{name}");
        }
        assert_eq!(
            error("t", Budget::MAX_AMOUNT + 1, MINUTE),
            "the t budget is 1000000000001; expected 1 to 1000000000000"
        );
        let time = "expected 1ms to 86400s";
        assert_eq!(
            error("t", 1, Duration::ZERO),
            format!("the time of the t budget is 0ns; {time}")
        );
        assert!(error("t", 1, Budget::MAX_PER * 2).ends_with(time));
        let burst = |units| Budget::new("t", 10, MINUTE).unwrap().burst(units);
        assert_eq!(
            burst(11).unwrap_err().to_string(),
            "the burst of the t budget is 11; expected 1 to its amount of 10"
        );
        assert!(burst(0).is_err() && burst(10).is_ok() && burst(1).is_ok());
    }

    #[test]
    fn a_unit_takes_its_part_of_the_time() {
        let tokens = Budget::new("tokens", 80_000, MINUTE).unwrap();
        assert_eq!(
            [0, 1, 3, 80_000].map(|units| tokens.time_of(units)),
            [0, 750, 2250, 60_000_000]
        );
        let charge = tokens.charge(7, 1000).unwrap();
        assert_eq!((charge.taken(), charge.burst()), (750_000, 60_000_000));
        assert!(tokens.charge(7, 80_000).is_some() && tokens.charge(7, 80_001).is_none());
        assert_eq!(tokens.time_to_full(80_000), 0);
        assert_eq!(tokens.time_to_full(79_000), 750_000);
        assert_eq!(tokens.time_to_full(u64::MAX), 0);
        let left = |ms| tokens.left_if_full_in(Duration::from_millis(ms));
        assert_eq!([0, 750, 60_000, 90_000].map(left), [80_000, 79_000, 0, 0]);
        let few = Budget::new("few", 7, Duration::from_secs(1)).unwrap().burst(2).unwrap();
        assert_eq!((few.time_of(1), few.charge(7, 3)), (142_858, None));
        let many = Budget::new("many", Budget::MAX_AMOUNT, Budget::MIN_PER).unwrap();
        assert_eq!((many.time_of(1), many.time_of(u64::MAX)), (1, 18_446_744_074));
        assert!(many.burst(1).unwrap().charge(7, 1).is_some());
    }
}
