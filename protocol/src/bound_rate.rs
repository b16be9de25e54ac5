//! How many permits may be granted within a time, as a place's id says it.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use super::base36::{read_base36, write_base36};

/// At most this many grants in any window of this length, by the backend's clock.
///
/// A rate is a part of a place's [`Bound`](super::Bound), so whichever process grants the place observes it. A grant of a
/// place with a cost counts as that many.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BoundRate(NonZeroU64);

const WINDOW_BITS: u32 = 37;
const STARTS_BITS: u32 = 12;

impl BoundRate {
    /// The most grants in a window. The backend keeps the time of each.
    pub const STARTS_MAX: u32 = 4000;
    /// The shortest window.
    pub const WINDOW_MIN: Duration = Duration::from_millis(1);
    /// The longest window.
    pub const WINDOW_MAX: Duration = Duration::from_secs(24 * 60 * 60);
    /// Bytes of its text.
    pub(crate) const LEN: usize = 13;

    /// The rate of this many grants in a window of this length, of which whole µs count; `None`: there are none, or one
    /// of the two is out of range.
    #[must_use]
    pub fn new(starts: u32, window: Duration) -> Option<Self> {
        let in_range = (1..=Self::STARTS_MAX).contains(&starts)
            && (Self::WINDOW_MIN..=Self::WINDOW_MAX).contains(&window);
        let window_us = u64::try_from(window.as_micros()).ok()?;
        NonZeroU64::new(u64::from(starts) << WINDOW_BITS | window_us).filter(|_| in_range).map(Self)
    }

    /// The most grants in a window.
    #[must_use]
    pub const fn starts(self) -> u32 {
        (self.0.get() >> WINDOW_BITS) as u32 & ((1 << STARTS_BITS) - 1)
    }

    /// The same rate, each grant of which is kept for at least this long: another place of the same semaphore may be
    /// judged by a longer window.
    #[must_use]
    pub fn kept_for(self, longest: Duration) -> Self {
        let longest = longest.min(Self::WINDOW_MAX).as_micros();
        let windows = longest.div_ceil(self.window().as_micros());
        let doublings = u64::from(windows.next_power_of_two().trailing_zeros());
        Self(self.alone().0 | doublings << (WINDOW_BITS + STARTS_BITS))
    }

    /// For how long a grant is kept, in µs: the window, doubled a number of times.
    #[must_use]
    pub const fn kept_us(self) -> u64 {
        self.window_us() << self.doublings()
    }

    /// How often the window is doubled for the time for which a grant is kept.
    pub(crate) const fn doublings(self) -> u64 {
        self.0.get() >> (WINDOW_BITS + STARTS_BITS)
    }

    /// The rate of these parts; `None`: one of them is out of range.
    pub(crate) fn of_parts(starts: u32, window_us: u64, doublings: u64) -> Option<Self> {
        let rate = Self::new(starts, Duration::from_micros(window_us))?;
        // 37 bits of the window and 27 doublings are 64 bits.
        let kept_us =
            (doublings <= u64::from(u64::BITS - WINDOW_BITS)).then(|| window_us << doublings)?;
        Some(rate.kept_for(Duration::from_micros(kept_us)))
            .filter(|rate| rate.doublings() == doublings)
    }

    /// The same rate, each grant of which is kept for its window.
    #[must_use]
    pub fn alone(self) -> Self {
        let bits = self.0.get() & ((1 << (WINDOW_BITS + STARTS_BITS)) - 1);
        NonZeroU64::new(bits).map_or(self, Self)
    }

    /// The length of the window.
    #[must_use]
    pub const fn window(self) -> Duration {
        Duration::from_micros(self.window_us())
    }

    /// The same in µs.
    #[must_use]
    pub const fn window_us(self) -> u64 {
        self.0.get() & ((1 << WINDOW_BITS) - 1)
    }

    /// A slash, then to the base 36 the grants (3 digits), the window in µs (8), and how often it is doubled for the time
    /// for which a grant is kept (1). It follows the number of a place.
    pub(crate) fn text(self) -> [u8; Self::LEN] {
        let mut text = [b'/'; Self::LEN];
        write_base36(&mut text[1..4], u64::from(self.starts()));
        write_base36(&mut text[4..12], self.window_us());
        write_base36(&mut text[12..], self.doublings());
        text
    }

    /// Reads what [`text`](Self::text) writes.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text: &[u8; Self::LEN] = text.try_into().ok()?;
        let starts = u32::try_from(read_base36(&text[1..4])?).ok()?;
        let (window_us, doublings) = (read_base36(&text[4..12])?, read_base36(&text[12..])?);
        Self::of_parts(starts, window_us, doublings).filter(|rate| rate.text() == *text)
    }
}

impl fmt::Debug for BoundRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:?}", self.starts(), self.window())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::BoundRate;

    #[test]
    fn a_rate_is_read_back_as_it_was_written() {
        for (starts, window) in [
            (1, BoundRate::WINDOW_MIN),
            (600, Duration::from_secs(60)),
            (BoundRate::STARTS_MAX, BoundRate::WINDOW_MAX),
        ] {
            let rate = BoundRate::new(starts, window).unwrap();
            assert_eq!((rate.starts(), rate.window()), (starts, window));
            assert_eq!(BoundRate::parse(&rate.text()), Some(rate));
        }
        assert_eq!(BoundRate::new(600, Duration::from_secs(60)).unwrap().text(), *b"/0go000zq0ao0");
    }

    #[test]
    fn a_grant_is_kept_for_as_long_as_another_window_needs_it() {
        let ms = Duration::from_millis;
        for (window, longest, kept) in [
            (ms(100), ms(0), 100_000),
            (ms(100), ms(100), 100_000),
            (ms(100), ms(101), 200_000),
            (ms(100), ms(60_000), 102_400_000),
            (BoundRate::WINDOW_MAX, Duration::MAX, 86_400_000_000),
            (BoundRate::WINDOW_MIN, Duration::MAX, 1000 << 27),
        ] {
            let alone = BoundRate::new(BoundRate::STARTS_MAX, window).unwrap();
            let rate = alone.kept_for(ms(7)).kept_for(longest);
            assert_eq!(rate.kept_us(), kept, "{window:?} {longest:?}");
            assert_eq!((rate.starts(), rate.window(), rate.alone()), (4000, window, alone));
            assert_eq!(BoundRate::parse(&rate.text()), Some(rate));
        }
    }

    #[test]
    fn nothing_else_is_a_rate() {
        let second = Duration::from_secs(1);
        assert_eq!(BoundRate::new(0, second), None);
        assert_eq!(BoundRate::new(BoundRate::STARTS_MAX + 1, second), None);
        assert_eq!(BoundRate::new(1, BoundRate::WINDOW_MIN - Duration::from_nanos(1)), None);
        assert_eq!(BoundRate::new(1, BoundRate::WINDOW_MAX + Duration::from_nanos(1)), None);
        for text in [
            "",
            "/",
            "/0go00zq0zk",
            "/0go000zq0ao",
            "/0go000zq0aos",
            "/0go000zq0aoz",
            "/zzz00zq0zk0",
            "/0GO00zq0zk0",
            "-0go00zq0zk0",
        ] {
            assert_eq!(BoundRate::parse(text.as_bytes()), None, "{text}");
        }
    }
}
