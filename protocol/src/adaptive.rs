//! A limit that finds itself: its range, the number that is in force for the whole fleet, and how that moves.

use std::fmt;
use std::time::Duration;

/// The range of a limit that finds itself, and how fast it grows.
///
/// Where nobody knows how many requests an upstream takes at a time, the upstream's own refusals tell. The limit begins at
/// the maximum. Each burst of refusals lowers it by a tenth, and while requests wait for it, it grows by one in each
/// interval. It is one number for a semaphore, whatever the number of processes.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_semaphore_protocol::Adaptive;
///
/// let adaptive = Adaptive::between(5, 100).grow_every(Duration::from_secs(2));
/// assert_eq!((adaptive.min(), adaptive.max()), (5, 100));
/// assert_eq!(adaptive.interval(), Duration::from_secs(2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Adaptive {
    min: u32,
    max: u32,
    grow_ms: u32,
}

impl Adaptive {
    /// The shortest interval in which a limit grows by one, and the default.
    pub const MIN_INTERVAL: Duration = Duration::from_secs(1);
    /// The longest interval in which a limit grows by one.
    pub const MAX_INTERVAL: Duration = Duration::from_secs(60);

    /// Creates a range, both ends included.
    #[must_use]
    pub const fn between(min: u32, max: u32) -> Self {
        Self { min, max, grow_ms: 1000 }
    }

    /// Sets the interval in which the limit grows by one while requests wait for it: 1 s, the default, to 60 s. Choose
    /// about as long as a request takes.
    #[must_use]
    pub fn grow_every(mut self, interval: Duration) -> Self {
        self.grow_ms = u32::try_from(interval.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
        self
    }

    /// Returns the lowest limit.
    #[must_use]
    pub const fn min(self) -> u32 {
        self.min
    }

    /// Returns the highest limit, with which it begins.
    #[must_use]
    pub const fn max(self) -> u32 {
        self.max
    }

    /// Returns the interval in which the limit [grows](Self::grow_every) by one.
    #[must_use]
    pub const fn interval(self) -> Duration {
        Duration::from_millis(self.grow_ms as u64)
    }

    /// Returns a limit that is within this range.
    #[must_use]
    pub fn clamp(self, limit: u32) -> u32 {
        limit.max(self.min).min(self.max)
    }
}

/// The number that is in force in place of a policy's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Adapted {
    /// The limit.
    pub limit: u32,
    /// The version at which it was last lowered.
    pub lowered: u64,
    /// The version of its last change. Versions are times of the backend's clock in µs, and never repeat.
    pub changed: u64,
}

/// A change that a process asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Adjustment {
    /// The upstream refused a request that was sent under this.
    Lower(SentUnder),
    /// Requests wait for the limit.
    Raise,
}

/// What a process knew of a semaphore when it sent a request to the upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SentUnder {
    /// [`Adapted::changed`] of the number in force; 0: the policy's limit was.
    pub version: u64,
    /// The permits in use; the highest number if that was not known.
    pub in_use: u32,
}

impl Adapted {
    /// How long a number stays in force that nobody changes.
    pub const KEPT: Duration = Duration::from_secs(600);

    /// Returns the number after a change at `version`, by the backend's clock; `None`: nothing changes. `before`: the
    /// number in force, if there is one.
    ///
    /// `lua/adapt.lua` does the same. A decrease is compared with the last *decrease*: one that was asked for by a
    /// request that was sent before is part of the same burst. If growth counted, too, requests that take long would
    /// always be too late.
    #[must_use]
    pub fn adjusted(
        before: Option<Self>,
        range: Adaptive,
        adjustment: Adjustment,
        (version, now): (u64, u64),
    ) -> Option<Self> {
        let current = range.clamp(before.map_or(range.max, |before| before.limit));
        match adjustment {
            Adjustment::Lower(sent) => {
                if before.is_some_and(|before| sent.version < before.lowered) {
                    return None;
                }
                let from = u64::from(current.min(sent.in_use));
                let limit = range.clamp(u32::try_from(from * 9 / 10).unwrap_or(u32::MAX));
                if limit < current {
                    return Some(Self { limit, lowered: version, changed: version });
                }
                // Refusals at the minimum keep it: without them it would end, and the maximum would follow.
                before
                    .filter(|before| before.changed.saturating_add(micros(Self::KEPT / 2)) <= now)
                    .map(|before| Self { changed: version, ..before })
            }
            Adjustment::Raise => {
                let before = before.filter(|_| current < range.max)?;
                // A clock that stepped back is no reason to wait.
                let is_early = now
                    .checked_sub(before.changed)
                    .is_some_and(|age| age < u64::from(range.grow_ms) * 1000);
                let raised = Self { limit: current + 1, lowered: before.lowered, changed: version };
                (!is_early).then_some(raised)
            }
        }
    }

    /// Returns how much longer it stays in force, at `now` µs by the backend's clock; zero: it is over.
    #[must_use]
    pub fn left(self, now: u64) -> Duration {
        let ends = self.changed.saturating_add(micros(Self::KEPT));
        Duration::from_micros(ends.saturating_sub(now)).min(Self::KEPT)
    }

    /// Reads the text in Redis, in a hash of this version: the limit, and the versions. `None`: the script did not write
    /// it.
    #[must_use]
    pub fn parse(text: &str, of_hash: u64) -> Option<Self> {
        let mut words = text.split(' ');
        let mut number = |digits: usize| {
            let word = words.next()?;
            let is_number =
                (1..=digits).contains(&word.len()) && word.bytes().all(|c| c.is_ascii_digit());
            word.parse::<u64>().ok().filter(|_| is_number)
        };
        let (limit, lowered, changed) = (number(10)?, number(16)?, number(16)?);
        let is_whole = words.next().is_none() && lowered <= changed && changed <= of_hash;
        let limit = u32::try_from(limit).ok().filter(|_| is_whole)?;
        Some(Self { limit, lowered, changed })
    }
}

/// As [`parse`](Adapted::parse) reads it.
impl fmt::Display for Adapted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.limit, self.lowered, self.changed)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Adapted, Adaptive, Adjustment, SentUnder};

    const RANGE: Adaptive = Adaptive::between(5, 100);
    const SECOND: u64 = 1_000_000;

    fn number(limit: u32, lowered: u64, changed: u64) -> Adapted {
        Adapted { limit, lowered, changed }
    }

    fn lower(before: Option<Adapted>, version: u64, in_use: u32, at: u64) -> Option<Adapted> {
        let sent = SentUnder { version, in_use };
        Adapted::adjusted(before, RANGE, Adjustment::Lower(sent), (at, at))
    }

    fn raise(before: Option<Adapted>, at: u64) -> Option<Adapted> {
        Adapted::adjusted(before, RANGE, Adjustment::Raise, (at, at))
    }

    #[test]
    fn a_burst_lowers_it_once() {
        let first = lower(None, 0, u32::MAX, 7).unwrap();
        assert_eq!(first, number(90, 7, 7));
        assert_eq!(lower(Some(first), 0, u32::MAX, 8), None, "sent before the decrease");
        assert_eq!(lower(Some(first), 7, u32::MAX, 9), Some(number(81, 9, 9)));
    }

    #[test]
    fn growth_makes_no_request_one_that_was_sent_too_early() {
        let grown = raise(Some(number(50, 7, 7)), SECOND + 7).unwrap();
        assert_eq!(grown, number(51, 7, SECOND + 7));
        assert_eq!(lower(Some(grown), 7, u32::MAX, 2 * SECOND).unwrap().limit, 45);
    }

    #[test]
    fn a_decrease_begins_at_what_was_in_flight() {
        assert_eq!(lower(None, 0, 41, 7).unwrap().limit, 36);
        assert_eq!(lower(Some(number(50, 1, 1)), 1, 90, 7).unwrap().limit, 45, "or at the limit");
    }

    #[test]
    fn it_stays_within_its_range() {
        assert_eq!(lower(Some(number(5, 1, 1)), 1, u32::MAX, 7), None);
        assert_eq!(lower(None, 0, 1, 7).unwrap().limit, 5);
        assert_eq!(raise(Some(number(100, 1, 1)), 9 * SECOND), None);
        assert_eq!(raise(None, 9 * SECOND), None, "it is at the maximum");
        // Of a process with another range.
        assert_eq!(raise(Some(number(1, 1, 1)), 9 * SECOND).unwrap().limit, 6);
        assert_eq!(raise(Some(number(300, 1, 1)), 9 * SECOND), None);
        assert_eq!(lower(Some(number(300, 1, 1)), 1, u32::MAX, 7).unwrap().limit, 90);
        for before in 2..=10 {
            let all = Adaptive::between(1, 10);
            let sent = SentUnder { version: 1, in_use: u32::MAX };
            let lower = Adjustment::Lower(sent);
            let after = Adapted::adjusted(Some(number(before, 1, 1)), all, lower, (7, 7)).unwrap();
            assert!(after.limit < before && after.limit >= 1, "{before}: {after:?}");
        }
    }

    /// Else ten minutes of refusals at the minimum ended in the maximum.
    #[test]
    fn refusals_at_the_minimum_keep_it() {
        let kept = 600 * SECOND;
        let before = number(5, 7, SECOND);
        assert_eq!(lower(Some(before), 7, 3, SECOND + kept / 2 - 1), None, "it was written lately");
        let at = SECOND + kept / 2;
        assert_eq!(lower(Some(before), 7, 3, at), Some(number(5, 7, at)));
        assert_eq!(lower(Some(before), 6, 3, at), None, "sent before the decrease");
        // As another range has it.
        assert_eq!(lower(Some(number(2, 7, SECOND)), 7, 3, at), Some(number(2, 7, at)));
    }

    #[test]
    fn it_grows_once_in_an_interval() {
        let before = number(50, 1, SECOND);
        assert_eq!(raise(Some(before), 2 * SECOND - 1), None);
        assert_eq!(raise(Some(before), 2 * SECOND), Some(number(51, 1, 2 * SECOND)));
        let stepped_back = Adapted::adjusted(Some(before), RANGE, Adjustment::Raise, (9, 5));
        assert_eq!(stepped_back.map(|after| after.limit), Some(51));
        let slow = RANGE.grow_every(Duration::from_secs(3));
        let raise = |at| Adapted::adjusted(Some(before), slow, Adjustment::Raise, (at, at));
        assert_eq!(raise(4 * SECOND - 1), None);
        assert!(raise(4 * SECOND).is_some());
    }

    #[test]
    fn it_lasts_as_long_as_it_changes() {
        let one = number(50, SECOND, SECOND);
        assert_eq!(one.left(SECOND), Adapted::KEPT);
        assert_eq!(one.left(600 * SECOND), Duration::from_secs(1));
        assert_eq!(one.left(601 * SECOND), Duration::ZERO);
        assert_eq!(one.left(0), Adapted::KEPT, "no longer, whatever the clock says");
    }

    #[test]
    fn only_what_the_script_writes_is_read() {
        let one = number(38, 6, 1_700_000_000_000_000);
        assert_eq!(Adapted::parse(&one.to_string(), one.changed), Some(one));
        for other in [
            "",
            "5",
            "5 6",
            "5 6 7 8",
            "5 8 7",
            "5 6 9",
            "-5 6 7",
            "+5 6 7",
            "5  7",
            "5 6 7 ",
            "5.5 6 7",
            "4294967296 6 7",
            "00000000005 6 7",
            "5 00000000000000006 7",
            "x 6 7",
        ] {
            assert_eq!(Adapted::parse(other, 8), None, "{other:?}");
        }
    }
}
