//! What an operator set for a semaphore in place of its policy.

use std::fmt;
use std::str::FromStr;

/// What an operator set for one name in place of its policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Override {
    /// Permits; `None`: as many as the policy says.
    pub limit: Option<u32>,
    /// Whether permits are given out at all.
    pub mode: Mode,
}

/// Whether permits of a name are given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// As always.
    #[default]
    Open,
    /// To nobody. Waiting requests keep waiting; newcomers queue or are refused, as their policy says.
    Paused,
    /// To requests that wait already. Newcomers are refused.
    Draining,
}

impl Override {
    /// The limit in place of the policy's; 0 where no permits are given out.
    #[must_use]
    pub const fn in_place(self) -> Option<u32> {
        match self.mode {
            Mode::Paused => Some(0),
            Mode::Open | Mode::Draining => self.limit,
        }
    }
}

/// As it stands in Redis.
impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            Some(limit) => write!(f, "{limit} {}", self.mode.as_str()),
            None => write!(f, "- {}", self.mode.as_str()),
        }
    }
}

/// As it stands in Redis.
impl FromStr for Override {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (limit, mode) = text.split_once(' ').ok_or(())?;
        let limit = if limit == "-" { None } else { Some(limit.parse().map_err(|_| ())?) };
        let modes = [Mode::Open, Mode::Paused, Mode::Draining];
        let mode = modes.into_iter().find(|known| known.as_str() == mode).ok_or(())?;
        Ok(Self { limit, mode })
    }
}

impl Mode {
    /// The mode as one lower-case word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Paused => "paused",
            Self::Draining => "draining",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Mode, Override};

    #[test]
    fn what_is_set_is_read_back_as_it_was_written() {
        for mode in [Mode::Open, Mode::Paused, Mode::Draining] {
            for limit in [None, Some(0), Some(7), Some(u32::MAX)] {
                let set = Override { limit, mode };
                assert_eq!(set.to_string().parse(), Ok(set));
            }
        }
        assert_eq!(Override { limit: Some(7), mode: Mode::Paused }.to_string(), "7 paused");
        for other in ["", "7", "7 ", "-1 open", "x open", "7 shut", "7 open "] {
            assert_eq!(other.parse::<Override>(), Err(()), "{other}");
        }
    }
}
