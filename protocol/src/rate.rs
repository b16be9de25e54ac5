//! How many requests may start within a time, as a policy or an operator says it.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::bound_rate::BoundRate;

/// How many requests may start within a time: the rate of a policy, or the one that an operator set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    // A part of every request's future, so it is small.
    starts: NonZeroU32,
    /// With the highest bit set, the rate is smooth.
    window_ms: u32,
}

const SMOOTH: u32 = 1 << 31;

/// The shortest window over which a smooth rate is spread: closer steps would cost a call each.
const STEP: Duration = Duration::from_millis(10);

impl Rate {
    /// The rate of this many starts in a window of at most a day, which is rounded up to whole ms. Hidden, because the
    /// library exports this type.
    #[doc(hidden)]
    #[must_use]
    pub fn new(starts: NonZeroU32, window: Duration, is_smooth: bool) -> Self {
        let window_ms = u32::try_from(window.as_micros().div_ceil(1000)).unwrap_or(SMOOTH - 1);
        Self { starts, window_ms: if is_smooth { window_ms | SMOOTH } else { window_ms } }
    }

    /// Returns how many requests may start in a window.
    #[must_use]
    pub const fn starts(self) -> u32 {
        self.starts.get()
    }

    /// Returns the length of the window.
    #[must_use]
    pub const fn window(self) -> Duration {
        Duration::from_millis((self.window_ms & !SMOOTH) as u64)
    }

    /// Returns whether it is spread over its window.
    #[must_use]
    pub const fn is_smooth(self) -> bool {
        self.window_ms & SMOOTH != 0
    }

    /// As many starts as these in the same window, spread over it if this rate is.
    pub(crate) const fn with_starts(self, starts: NonZeroU32) -> Self {
        Self { starts, ..self }
    }

    /// The same, spread over its window.
    #[doc(hidden)]
    #[must_use]
    pub fn spread(self) -> Self {
        Self { window_ms: self.window_ms | SMOOTH, ..self }
    }

    /// Returns the rate by which the backend judges a request of this cost; `None` if it is out of range.
    ///
    /// A smooth rate is that of a part of its window: k starts in a time w, so that no window has more than k·⌈window ÷
    /// w⌉.
    #[doc(hidden)]
    #[must_use]
    pub fn of_cost(self, cost: u32) -> Option<BoundRate> {
        let (starts, window) = (self.starts(), self.window());
        if !self.is_smooth() {
            return BoundRate::new(starts, window);
        }
        let (window, step) = (window.as_nanos(), STEP.as_nanos());
        let at_once = u32::try_from((u128::from(starts) * step).div_ceil(window)).ok()?;
        let at_once = at_once.clamp(1, starts).max(cost);
        let part = match starts / at_once {
            // A cost above the rate takes several windows.
            0 => (window * u128::from(at_once)).div_ceil(u128::from(starts)),
            parts => window.div_ceil(u128::from(parts)),
        };
        let part = Duration::from_micros(u64::try_from(part.div_ceil(1000)).ok()?);
        if part > BoundRate::WINDOW_MAX {
            // It would start too often, so it never does: its cost is more than the longest window has.
            let longest = BoundRate::WINDOW_MAX.as_nanos();
            let most = u32::try_from(u128::from(starts) * longest / window).ok()?;
            return BoundRate::new(most, BoundRate::WINDOW_MAX);
        }
        BoundRate::new(at_once, part)
    }
}

impl Rate {
    /// The least time from one start to another that so many are between, counting the first.
    pub(crate) fn least_time_of(self, starts: u32) -> Duration {
        // The least part: those of higher costs are longer. What is not at once is at least one window later.
        let part = self.of_cost(1);
        part.map_or(Duration::ZERO, |part| part.window().saturating_mul(starts / part.starts()))
    }

    /// This rate, which an operator set, for requests whose policy has another one: spread if that is, or if there are
    /// more starts than the backend keeps.
    pub(crate) fn in_place_of(self, policy: Self) -> Self {
        let is_smooth = policy.is_smooth() || self.starts() > BoundRate::STARTS_MAX;
        if is_smooth { self.spread() } else { self }
    }

    /// The text in Redis: the starts, a slash, the window in ms.
    #[doc(hidden)]
    #[must_use]
    pub fn text(self) -> String {
        format!("{}/{}", self.starts, self.window_ms & !SMOOTH)
    }

    /// Reads what [`text`](Self::text) writes, if requests can be judged by it.
    #[doc(hidden)]
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (starts, window_ms) = text.split_once('/')?;
        let window_ms: u32 = window_ms.parse().ok()?;
        let window = Duration::from_millis(window_ms.into());
        let is_window = (BoundRate::WINDOW_MIN..=BoundRate::WINDOW_MAX).contains(&window);
        let rate = Self { starts: starts.parse().ok()?, window_ms };
        (is_window && rate.in_place_of(rate).of_cost(1).is_some()).then_some(rate)
    }
}

/// Such as `600/60s`.
impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:?}", self.starts, self.window())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::Duration;

    use super::Rate;

    const MINUTE: Duration = Duration::from_secs(60);

    fn rate(starts: u32, window: Duration, is_smooth: bool) -> Rate {
        Rate::new(NonZeroU32::new(starts).unwrap(), window, is_smooth)
    }

    fn smooth(starts: u32, window: Duration) -> Rate {
        rate(starts, window, true)
    }

    fn parts(rate: Rate, cost: u32) -> (u32, Duration) {
        let of_cost = rate.of_cost(cost).unwrap();
        (of_cost.starts(), of_cost.window())
    }

    #[test]
    fn a_smooth_rate_is_that_of_a_part_of_its_window() {
        let exact = rate(600, MINUTE, false);
        assert_eq!((parts(exact, 3), exact.is_smooth()), ((600, MINUTE), false));
        let even = smooth(600, MINUTE);
        assert_eq!((even.starts(), even.window(), even.is_smooth()), (600, MINUTE, true));
        assert_eq!(parts(even, 1), (1, Duration::from_millis(100)));
        assert_eq!(parts(even, 3), (3, Duration::from_millis(300)));
        assert_eq!(parts(smooth(60_000, MINUTE), 1), (10, Duration::from_millis(10)));
        assert_eq!(parts(smooth(2, MINUTE), 3), (3, Duration::from_secs(90)));
        // No window is longer than a day. What costs more than may start in one is never granted.
        let day = Duration::from_secs(24 * 3600);
        assert_eq!(parts(smooth(2, day / 24), 48), (48, day));
        assert_eq!(parts(smooth(2, day / 24), 49), (48, day));
        assert_eq!(parts(smooth(2, day), 1000), (2, day));
    }

    #[test]
    fn no_window_has_more_starts_than_a_smooth_rate_says() {
        for (starts, window) in [(7, 1), (100, 1), (6_999, 60), (61_234, 60), (399_000, 1)] {
            let window = Duration::from_secs(window);
            let (at_once, part) = parts(smooth(starts, window), 1);
            let most = u128::from(at_once) * window.as_micros().div_ceil(part.as_micros());
            assert!(most <= u128::from(starts), "{starts}: {at_once} in {part:?}");
            assert!(most * 100 >= u128::from(starts) * 98, "{starts}: {most} of them are used");
        }
    }

    #[test]
    fn a_window_is_never_shorter_than_it_says() {
        let rate = rate(1, Duration::from_micros(1_001), false);
        assert_eq!(rate.window(), Duration::from_millis(2));
    }
}
