//! Pauses until a time, as this process knows them.
//!
//! A response of the upstream pauses its own process at once. The server that keeps the overrides has a record of each
//! pause, which the other processes read (`lua/pause.lua`).
//!
//! ```text
//!   a response ── ask ──► unsent ── next ──► sent ── recorded ──► written ◄── read ── another process, an operator
//!                          ▲  ▲                │                     │
//!                          │  └── no answer, ──┘                     │
//!                          │      refused                            │
//!                          └── a reading does not find the record ───┘
//! ```
//!
//! A pause is known until its end by this process's clock, or until a reading says that its name was resumed since. A
//! record that is missing ends nothing: the server lost it, or has no room for it. Each process that knows the pause
//! sends its record again, and the first of them restores it for all.
//!
//! *What a resume ends.* A resume is a record, too, with the version of the server's pauses at which it was written. Here
//! it ends the pause that is known when it is first read, whatever its version: after a loss of data versions may begin
//! below those before it. At the server it ends the pauses that are sent with a lower version: each pause remembers the
//! one that this process had read when it was asked for, or last read. No clock is compared, so neither a repeat nor a
//! process that was cut off brings a pause back.
//!
//! *What is bounded.* One record of a process is in flight; after one that was refused, or not answered, none is sent for
//! [`RETRY`]. Records of one name are [`ANNOUNCED_INTERVAL`] apart: other processes read changes that come thick no more
//! often, and a pause that is longer than that has not ended there when its later end is recorded. A process knows at
//! most [`KNOWN_MAX`] pauses, and forgets them when they end, whether the server answers or not.

mod unsent;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use self::unsent::Unsent;
use super::ANNOUNCED_INTERVAL;
use crate::backend::{Change, Overrides};
use crate::node::peers::process;
use crate::node::server::servers::REDIRECT_LOOP;
use crate::protocol::{Pause, PauseCause, Time};

/// How much longer a pause lasts at most than was asked for: see [`Length::slack`].
const SLACK: Duration = Duration::from_millis(250);
/// The part of a pause that it lasts longer at most.
const SLACK_PART: u32 = 8;
/// How long to send no record after one that was refused, or not answered.
pub(super) const RETRY: Duration = Duration::from_secs(1);
/// A lost record is not worth a call if less is left of the pause. The end here is later than that in the record, by the
/// time that the answer took, so a record that just ended is no lost one.
const WORTH_RESTORING: Duration = Duration::from_secs(1);
/// The most pauses that a process knows.
const KNOWN_MAX: usize = 1 << 16;
/// The longest pauses. A record that says more is from before the server's clock stepped back.
const LONGEST_OF_UPSTREAM: Duration = Duration::from_secs(3600);
pub(crate) const LONGEST_OF_OPERATOR: Duration = Duration::from_secs(24 * 3600);

/// The pauses that this process knows.
#[derive(Default)]
pub(super) struct Pauses {
    known: HashMap<Arc<str>, KnownPause>,
    /// Those that are to be sent.
    unsent: Unsent,
    /// The number of records that were sent, and whether the last one is unanswered.
    sent: u64,
    is_sending: bool,
    /// No record is sent before this.
    not_before: Option<Time>,
    /// When a server last answered that another one keeps the overrides.
    moved_at: Option<Time>,
    /// When those that are over were last searched.
    searched_at: Option<Time>,
}

/// How long a response asks to pause.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Length {
    /// At most `most`.
    pub(crate) pause: Duration,
    /// The longest pause that a response may ask for.
    pub(crate) most: Duration,
}

impl Length {
    /// How much longer the pause lasts: the requests that are answered next ask for almost the same end, and are to
    /// change nothing. A part of the pause, so that a short one is short.
    fn slack(self) -> Duration {
        SLACK.min(self.pause / SLACK_PART).min(self.most.saturating_sub(self.pause))
    }
}

#[derive(Debug)]
struct KnownPause {
    /// When it ends here.
    ends: Time,
    /// The end that the record must have at least.
    asked: Time,
    by: Arc<str>,
    cause: PauseCause,
    /// The version of the pauses that was known when this process asked for it, or last read it.
    seen: u64,
    record: Record,
    /// When its last record was sent.
    sent_at: Option<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Record {
    Unsent,
    Sent,
    /// The answers to the question of this number and to later ones have it, unless it was lost.
    Written(u64),
}

/// The record of a pause that is sent.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) name: Arc<str>,
    pub(super) change: Change,
    number: u64,
    asked: Time,
}

/// What came of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is written, or a record that ends as late; or the name was resumed since.
    Recorded,
    /// The connection broke. The next one repeats it.
    Unanswered,
    /// The server refused it, or did not answer in time.
    Refused,
    /// Another server keeps the overrides.
    Moved,
}

impl Pauses {
    /// Returns when the pause of a name ends.
    pub(super) fn end_of(&self, name: &str) -> Option<Time> {
        self.known.get(name).map(|pause| pause.ends)
    }

    /// Returns who asked for the pause of a name, why, and how much longer it lasts.
    pub(super) fn of(&self, name: &str, now: Time) -> Option<(Arc<str>, PauseCause, Duration)> {
        let pause = self.known.get(name).filter(|pause| now < pause.ends)?;
        Some((Arc::clone(&pause.by), pause.cause, pause.ends.since(now)))
    }

    /// Returns the number of names that are paused.
    pub(super) fn len(&self, now: Time) -> usize {
        self.known.values().filter(|pause| now < pause.ends).count()
    }

    /// Notes that a response asks for a pause; `seen`: the version of the pauses that is known. Returns whether it ends
    /// later than any that is known.
    pub(super) fn ask(
        &mut self,
        name: &Arc<str>,
        length: Length,
        cause: PauseCause,
        seen: u64,
        now: Time,
    ) -> bool {
        let (known, until) = (self.known.get(name), now + length.pause);
        let sent_at = known.and_then(|known| known.sent_at);
        if known.is_some_and(|known| known.ends >= until) {
            return false;
        }
        if known.is_none() && self.known.len() >= KNOWN_MAX {
            // Not for each of them: a search takes long, and most of them last for longer.
            if self.searched_at.is_none_or(|at| at + RETRY <= now) {
                self.forget_ended(now);
            }
            if self.known.len() >= KNOWN_MAX {
                return false;
            }
        }
        self.unsent.insert_after(name, sent_at);
        let (ends, by, record) = (until + length.slack(), own_process(), Record::Unsent);
        let pause = KnownPause { ends, asked: until, by, cause, seen, record, sent_at };
        self.known.insert(Arc::clone(name), pause);
        true
    }

    /// Forgets the pauses that are over. One that had a record lately is kept, so that the next of its name waits.
    pub(super) fn forget_ended(&mut self, now: Time) {
        self.searched_at = Some(now);
        let Self { known, unsent, .. } = self;
        known.retain(|name, pause| {
            let goes_on = now < pause.ends;
            if !goes_on {
                unsent.remove(name, pause.sent_at);
            }
            goes_on || pause.sent_at.is_some_and(|at| now < at + ANNOUNCED_INTERVAL)
        });
    }

    /// Whether a record is to be sent, now or later.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Returns when the first record is due that waits for the time between those of one name. While one is in flight,
    /// none is: what comes of it is the time to look again.
    pub(super) fn due(&self) -> Option<Time> {
        let due = self.unsent.first_due(ANNOUNCED_INTERVAL).filter(|_| !self.is_sending)?;
        Some(self.not_before.map_or(due, |at| due.max(at)))
    }

    /// Returns the next record to send, where those of one name are this far apart.
    pub(super) fn next(&mut self, interval: Duration, now: Time) -> Option<Sending> {
        if self.is_sending || self.not_before.is_some_and(|at| now < at) {
            return None;
        }
        while let Some(name) = self.unsent.take(interval, now) {
            // One that was repeated meanwhile can be here twice.
            let pause = self.known.get_mut(&name);
            let Some(pause) = pause.filter(|pause| pause.record == Record::Unsent) else {
                continue;
            };
            if pause.asked <= now {
                // Only the slack is left.
                pause.record = Record::Written(u64::MAX);
                continue;
            }
            (pause.record, pause.sent_at) = (Record::Sent, Some(now));
            (self.is_sending, self.sent) = (true, self.sent + 1);
            let pause_ms = ms_up(pause.asked.since(now));
            let change = Change::Pause {
                pause_ms,
                slack_ms: ms_up(pause.ends.since(now)) - pause_ms,
                seen: pause.seen,
                by: Arc::clone(&pause.by),
                cause: pause.cause,
            };
            return Some(Sending { name, change, number: self.sent, asked: pause.asked });
        }
        None
    }

    /// Notes what came of a record, once; `question`: the number of the next question.
    pub(super) fn on_outcome(&mut self, of: &Sending, outcome: Outcome, question: u64, now: Time) {
        if !self.is_sending || self.sent != of.number {
            return;
        }
        self.is_sending = false;
        let moved_before = self.moved_at;
        match outcome {
            Outcome::Recorded | Outcome::Unanswered => {}
            Outcome::Refused => self.not_before = Some(now + RETRY),
            Outcome::Moved => {
                // Two servers can redirect to each other.
                let is_loop = moved_before.is_some_and(|at| now < at + REDIRECT_LOOP);
                self.not_before = is_loop.then(|| now + RETRY);
                self.moved_at = Some(now);
            }
        }
        let pause = self.known.get_mut(&of.name);
        let is_this = |one: &&mut KnownPause| one.record == Record::Sent && one.asked == of.asked;
        let Some(pause) = pause.filter(is_this) else { return };
        if outcome == Outcome::Recorded {
            pause.record = Record::Written(question);
        } else {
            pause.record = Record::Unsent;
            self.unsent.insert(&of.name);
        }
    }

    /// Takes in a reading that differs from the one before, and adds the names whose pauses changed.
    pub(super) fn take_in(&mut self, reading: &Reading<'_>, changed: &mut BTreeSet<Arc<str>>) {
        let Self { known, unsent, .. } = self;
        let (old, new) = (reading.old, reading.new);
        for (name, resumed) in &new.resumed {
            let is_news = old.resumed.get(name) != Some(resumed);
            if is_news && let Some(pause) = known.remove(name) {
                unsent.remove(name, pause.sent_at);
                changed.insert(Arc::clone(name));
            }
        }
        for (name, record) in &new.pauses {
            let is_same = old.pauses.get(name) == Some(record);
            let before = known.get(name).map(|pause| pause.ends);
            let pause = known.get_mut(name);
            match pause.map(|pause| (pause.sent_at, pause.find(record, is_same, reading))) {
                Some((sent_at, true)) => unsent.remove(name, sent_at),
                // One that was read before is over here.
                None if !is_same && reading.now < reading.end_of(record) => {
                    known.insert(Arc::clone(name), KnownPause::read(record, reading));
                }
                _ => {}
            }
            if known.get(name).map(|pause| pause.ends) != before {
                changed.insert(Arc::clone(name));
            }
        }
        for (name, pause) in known {
            // After a loss of data, versions may begin below those before it.
            pause.seen = pause.seen.min(new.pauses_version);
            if pause.is_lost(reading) {
                pause.record = Record::Unsent;
                unsent.insert(name);
            }
        }
    }
}

impl KnownPause {
    fn read(record: &Pause, reading: &Reading<'_>) -> Self {
        let (ends, by) = (reading.end_of(record), Arc::clone(&record.by));
        let (seen, found) = (reading.new.pauses_version, Record::Written(reading.question + 1));
        let cause = record.cause;
        Self { ends, asked: ends, by, cause, seen, record: found, sent_at: None }
    }

    /// Takes over its record in a reading, unless that ends too early. `is_same`: the one before had it, too.
    fn find(&mut self, record: &Pause, is_same: bool, reading: &Reading<'_>) -> bool {
        let is_written = matches!(self.record, Record::Written(_));
        // What was written is found again, within what the times of two answers may differ.
        let slack = if is_written { SLACK } else { Duration::ZERO };
        let found = Self::read(record, reading);
        if is_written && is_same {
            (self.seen, self.record) = (found.seen, found.record);
        } else if found.ends + slack >= self.asked {
            *self = Self { sent_at: self.sent_at, ..found };
        } else {
            return false;
        }
        true
    }

    /// Whether a reading should have its record, and did not.
    fn is_lost(&self, reading: &Reading<'_>) -> bool {
        matches!(self.record, Record::Written(from) if from <= reading.question)
            && self.asked.since(reading.now) > WORTH_RESTORING
    }
}

/// The answer to a question, beside the one before it.
pub(super) struct Reading<'a> {
    pub(super) old: &'a Overrides,
    pub(super) new: &'a Overrides,
    pub(super) question: u64,
    pub(super) now: Time,
}

impl Reading<'_> {
    /// Returns when a pause ends by this process's clock. It never ends early, because the answer came later than the
    /// server's time in it.
    fn end_of(&self, pause: &Pause) -> Time {
        let left = Duration::from_millis(pause.until.saturating_sub(self.new.now));
        let longest = match pause.cause {
            PauseCause::Operator => LONGEST_OF_OPERATOR,
            _ => LONGEST_OF_UPSTREAM + SLACK,
        };
        self.now + left.min(longest)
    }
}

/// Returns the change that records an operator's pause. No earlier resume ends it.
pub(crate) fn pause_by_operator(pause: Duration) -> Change {
    let (pause_ms, by, cause) = (ms_up(pause), own_process(), PauseCause::Operator);
    Change::Pause { pause_ms, slack_ms: 0, seen: u64::MAX, by, cause }
}

fn own_process() -> Arc<str> {
    if process().is_empty() { "-".into() } else { Arc::clone(process()) }
}

/// Whole ms: a pause never ends early.
fn ms_up(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(all(test, not(shuttle)))]
mod tests;
