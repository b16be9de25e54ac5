//! A row without a sign of life.

use std::time::Duration;

use crate::liveness::Revision;
use crate::time::Time;

/// Events of the watch on signs can come later than those on values, so the waiting places of a row that was never seen
/// alive are left for this time.
const SETTLES_IN: Duration = Duration::from_millis(500);

/// An unanswered cleanup is repeated after this, and then after twice as long each time.
const REPEAT_AFTER: Duration = Duration::from_secs(1);

/// How often the time doubles.
const DOUBLINGS: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Absent {
    /// The newest revision as of which the sign was gone; 0: it was never seen.
    pub(super) as_of: Revision,
    /// From when the grace counts.
    since: Time,
    is_never_seen: bool,
    pub(super) waiting: Ask,
    pub(super) all: Ask,
}

/// Whether a cleanup was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Ask {
    Open,
    Asked { times: u8, again_at: Time },
    Done,
}

impl Ask {
    /// When it is to be asked for, if the first time is `first`.
    const fn moment(self, first: Time) -> Option<Time> {
        match self {
            Self::Open => Some(first),
            Self::Asked { again_at, .. } => Some(again_at),
            Self::Done => None,
        }
    }

    pub(super) fn ask(&mut self, now: Time) {
        let times = match *self {
            Self::Asked { times, .. } => (times + 1).min(DOUBLINGS),
            Self::Open | Self::Done => 0,
        };
        *self = Self::Asked { times, again_at: now + REPEAT_AFTER * (1 << times) };
    }

    fn asked_until(self, now: Time) -> Option<Time> {
        match self {
            Self::Asked { again_at, .. } => Some(again_at).filter(|again_at| now < *again_at),
            Self::Open | Self::Done => None,
        }
    }
}

impl Absent {
    /// The sign was there before.
    pub(super) const fn gone(as_of: Revision, now: Time) -> Self {
        Self { as_of, since: now, is_never_seen: false, waiting: Ask::Open, all: Ask::Open }
    }

    /// A value has a place of the row.
    pub(super) const fn never_seen(now: Time) -> Self {
        Self { is_never_seen: true, ..Self::gone(0, now) }
    }

    /// Has the grace count from now.
    pub(super) fn restart(&mut self, now: Time) {
        self.since = now;
        self.all = Ask::Open;
    }

    /// Until when an answer is awaited; `None` if none is.
    pub(super) fn asked_until(&self, now: Time) -> Option<Time> {
        [self.waiting, self.all].into_iter().filter_map(|ask| ask.asked_until(now)).max()
    }

    /// When the waiting places and when all places are to be forgotten.
    pub(super) fn moments(
        &self,
        is_shortest: bool,
        grace: Duration,
        delay: Duration,
    ) -> [Option<Time>; 2] {
        let settled = if self.is_never_seen { SETTLES_IN } else { Duration::ZERO };
        let waiting = self.waiting.moment(self.since + settled + delay).filter(|_| is_shortest);
        [waiting, self.all.moment(self.since + grace + delay)]
    }
}
