//! What is set for a semaphore in place of its policy: by an operator, or for a time.

use std::fmt;
use std::sync::Arc;

use crate::rate::Rate;

/// What an operator set for a semaphore in place of its policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Override {
    /// The limit in permits; `None`: that of the policy.
    pub limit: Option<u32>,
    /// Whether permits are granted at all.
    pub mode: Mode,
    /// The rate in place of that of policies that have one; `None`: each has its own.
    pub rate: Option<Rate>,
}

/// Whether permits of a name are granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Permits are granted.
    #[default]
    Open,
    /// No permits are granted. Waiting requests keep waiting; newcomers queue or are rejected, as their policy says.
    Paused,
    /// Permits are granted to requests that wait already. Newcomers are rejected.
    Draining,
}

impl Override {
    /// The limit in place of that of the policy; 0 while no permits are granted.
    #[must_use]
    pub const fn in_place(self) -> Option<u32> {
        match self.mode {
            Mode::Paused => Some(0),
            Mode::Open | Mode::Draining => self.limit,
        }
    }
}

impl Override {
    /// Reads the text in Redis: the limit or `-`, a blank, the mode. The rate is kept apart from it. Hidden, because the
    /// library exports this type.
    #[doc(hidden)]
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (limit, mode) = text.split_once(' ')?;
        let limit = if limit == "-" { None } else { Some(limit.parse().ok()?) };
        let modes = [Mode::Open, Mode::Paused, Mode::Draining];
        let mode = modes.into_iter().find(|known| known.as_str() == mode)?;
        Some(Self { limit, mode, rate: None })
    }
}

impl Mode {
    /// Returns the mode as one lower-case word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Paused => "paused",
            Self::Draining => "draining",
        }
    }
}

/// A pause of grants until a time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Pause {
    /// When it ends, in ms since 1970 by the backend's clock.
    pub until: u64,
    /// The process that asked for it, by host and process id; `-` if they are unknown.
    pub by: Arc<str>,
    /// Why it was asked for.
    pub cause: PauseCause,
}

/// Why grants are paused until a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PauseCause {
    /// An operator asked for it.
    Operator,
    /// A caller passed on that the upstream asked for it.
    Upstream,
    /// The upstream asked for it, in a response with this status.
    Status(u16),
}

impl Pause {
    /// The most bytes of [`by`](Self::by).
    pub const BY_MAX: usize = 96;

    /// Creates a pause. `by` must be one word.
    #[must_use]
    pub const fn new(until: u64, by: Arc<str>, cause: PauseCause) -> Self {
        Self { until, by, cause }
    }

    /// Reads the text in Redis: the end, the version of the last resume, who, why. Returns the pause, which is none if its
    /// end is 0, and that version. Of what another program wrote, the numbers count in any case.
    #[must_use]
    pub fn parse(text: &str) -> Option<(Self, u64)> {
        let mut words = text.split(' ');
        let (until, resumed) = (words.next()?, words.next()?);
        let (by, cause) = (words.next()?, words.next()?);
        let is_pause = words.next().is_none() && !by.is_empty() && !cause.is_empty();
        // As `lua/pause.lua` reads them.
        let is_number =
            |text: &str| (1..=16).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_digit());
        let are_numbers = is_number(until) && is_number(resumed);
        // Operators see the name.
        let plain = |c: u8| c.is_ascii_alphanumeric() || b"._:-".contains(&c);
        let is_plain = by.len() <= Self::BY_MAX && by.bytes().all(plain);
        let cause = match cause {
            "operator" => PauseCause::Operator,
            status => status.parse().map_or(PauseCause::Upstream, PauseCause::Status),
        };
        let until = until.parse().ok().filter(|_| is_pause && are_numbers)?;
        let by = if is_plain { by } else { "-" }.into();
        Some((Self { until, by, cause }, resumed.parse().ok()?))
    }
}

/// One word: `operator`, `upstream`, or the status.
impl fmt::Display for PauseCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator => f.write_str("operator"),
            Self::Upstream => f.write_str("upstream"),
            Self::Status(status) => status.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Mode, Override, Pause, PauseCause};

    #[test]
    fn a_pause_that_the_script_writes_is_read() {
        for cause in [PauseCause::Operator, PauseCause::Upstream, PauseCause::Status(429)] {
            let pause = Pause::new(1_700_000_000_000, "host-1:17".into(), cause);
            let text = format!("1700000000000 7 host-1:17 {cause}");
            assert_eq!(Pause::parse(&text), Some((pause, 7)));
        }
        for other in [
            "",
            "5",
            "5 0",
            "5 0 x",
            "5 0 x ",
            "x 0 x 429",
            "5 x x 429",
            "5  x 429",
            "5 0  429",
            "+5 0 x 429",
            "5 0 x 429 x",
        ] {
            assert_eq!(Pause::parse(other), None, "{other}");
        }
        assert_eq!(Pause::parse("12345678901234567 0 x 429"), None, "not a time");
        for other in ["5 0 <b> ?".to_owned(), format!("5 0 {} -1", "x".repeat(97))] {
            let pause = Pause::new(5, "-".into(), PauseCause::Upstream);
            assert_eq!(Pause::parse(&other), Some((pause, 0)), "{other}");
        }
    }

    #[test]
    fn what_the_script_writes_is_read() {
        for mode in [Mode::Open, Mode::Paused, Mode::Draining] {
            for limit in [None, Some(0), Some(7), Some(u32::MAX)] {
                let text = limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
                let text = format!("{text} {}", mode.as_str());
                assert_eq!(
                    Override::parse(&text),
                    Some(Override { limit, mode, rate: None }),
                    "{text}"
                );
            }
        }
        for other in ["", "7", "7 ", "-1 open", "x open", "7 shut", "7 open "] {
            assert_eq!(Override::parse(other), None, "{other}");
        }
    }
}
