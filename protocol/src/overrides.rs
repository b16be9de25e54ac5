//! What an operator set for a semaphore in place of its policy.

/// What an operator set for a semaphore in place of its policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Override {
    /// The limit in permits; `None`: that of the policy.
    pub limit: Option<u32>,
    /// Whether permits are granted at all.
    pub mode: Mode,
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
    /// Reads the text in Redis: the limit or `-`, a blank, the mode. Hidden, because the library exports this type.
    #[doc(hidden)]
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (limit, mode) = text.split_once(' ')?;
        let limit = if limit == "-" { None } else { Some(limit.parse().ok()?) };
        let modes = [Mode::Open, Mode::Paused, Mode::Draining];
        let mode = modes.into_iter().find(|known| known.as_str() == mode)?;
        Some(Self { limit, mode })
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

#[cfg(test)]
mod tests {
    use super::{Mode, Override};

    #[test]
    fn what_the_script_writes_is_read() {
        for mode in [Mode::Open, Mode::Paused, Mode::Draining] {
            for limit in [None, Some(0), Some(7), Some(u32::MAX)] {
                let text = limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
                let text = format!("{text} {}", mode.as_str());
                assert_eq!(Override::parse(&text), Some(Override { limit, mode }), "{text}");
            }
        }
        for other in ["", "7", "7 ", "-1 open", "x open", "7 shut", "7 open "] {
            assert_eq!(Override::parse(other), None, "{other}");
        }
    }
}
