//! Pauses until a time: their ends by this process's clock, and those that this process asks for.
//!
//! A pause that a response of the upstream asks for applies here at once. The driver of the server that keeps the
//! overrides records it there, which notifies the other processes. From the first reading after that on, what was read
//! counts: so a pause that an operator ended meanwhile ends here, too.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use super::{Known, OverrideCache};
use crate::backend::{Change, Connection, QueryError};
use crate::node::Node;
use crate::node::peers::process;
use crate::protocol::{Pause, PauseCause, Time};
use crate::sync::atomic::Ordering;
use crate::sync::lock;

/// How much longer a pause lasts than was asked for: the requests that are answered next ask for almost the same end,
/// and are to change nothing.
const SLACK: Duration = Duration::from_millis(250);
/// How often the record of a pause is sent to another server, as slots move.
const REDIRECTS_MAX: u8 = 5;

/// A pause that this process asks for.
#[derive(Debug)]
pub(super) struct Ask {
    /// When it ends, without the slack.
    until: Time,
    cause: PauseCause,
    state: AskState,
    redirects: u8,
}

#[derive(Debug, PartialEq, Eq)]
enum AskState {
    Unsent,
    Sent,
    /// It was answered, and the question of this number finds it among the overrides, unless it was ended.
    Answered(u64),
}

impl Ask {
    fn ends(&self) -> Time {
        self.until + SLACK
    }

    pub(super) fn is_over(&self, now: Time) -> bool {
        self.ends() <= now
    }

    /// Returns whether the answer to this question replaces it.
    pub(super) fn is_read_by(&self, question: u64) -> bool {
        matches!(self.state, AskState::Answered(by) if by <= question)
    }
}

impl Known {
    /// Returns when a pause that was read ends by this process's clock. It never ends early, because the answer came
    /// later than the server's time in it.
    pub(super) fn end_of(&self, pause: &Pause) -> Time {
        match pause.until.checked_sub(self.overrides.now) {
            Some(left_ms) => self.read_at + Duration::from_millis(left_ms),
            None => {
                let since = Duration::from_millis(self.overrides.now - pause.until);
                self.read_at.checked_sub(since).unwrap_or(Time::ZERO)
            }
        }
    }

    /// Returns when the known pause of a name ends, or when it ended a moment ago.
    pub(super) fn paused_until(&self, name: &str) -> Option<Time> {
        let read = self.overrides.pauses.get(name).map(|pause| self.end_of(pause));
        read.max(self.asks.get(name).map(Ask::ends))
    }
}

impl OverrideCache {
    /// Returns the known pause of a name, and how much longer it lasts.
    pub(crate) fn pause_of(&self, name: &str, now: Time) -> Option<(Pause, Duration)> {
        let state = lock(&self.state);
        let pause = state.overrides.pauses.get(name)?;
        let left = state.end_of(pause).since(now);
        (!left.is_zero()).then(|| (pause.clone(), left))
    }

    /// Returns the number of names whose known pause lasts.
    pub(crate) fn paused(&self, now: Time) -> usize {
        let state = lock(&self.state);
        let read = state.overrides.pauses.iter();
        let read = read.filter(|(_, pause)| now < state.end_of(pause));
        let asked = state.asks.iter().filter(|(_, ask)| !ask.is_over(now));
        let names: BTreeSet<_> =
            read.map(|(name, _)| name).chain(asked.map(|(name, _)| name)).collect();
        names.len()
    }

    /// Notes that a pause until then is to be recorded. Returns whether it ends later than any that is known.
    fn ask(&self, name: &Arc<str>, until: Time, cause: PauseCause) -> bool {
        let mut state = lock(&self.state);
        if state.paused_until(name) >= Some(until) {
            return false;
        }
        let ask = Ask { until, cause, state: AskState::Unsent, redirects: 0 };
        let old = state.asks.insert(Arc::clone(name), ask);
        if old.is_none_or(|old| old.state != AskState::Unsent) {
            state.unsent.push_back(Arc::clone(name));
        }
        self.has_asks.store(true, Ordering::Release);
        true
    }

    /// Returns whether a pause may have to be recorded.
    pub(crate) fn has_asks(&self) -> bool {
        self.has_asks.load(Ordering::Acquire)
    }

    /// Returns the next pause to record, with its name and its end.
    fn next_ask(&self, now: Time) -> Option<(Arc<str>, Time, Change)> {
        let mut state = lock(&self.state);
        while let Some(name) = state.unsent.pop_front() {
            let Some(ask) = state.asks.get_mut(&name) else { continue };
            if ask.is_over(now) {
                state.asks.remove(&name);
            } else if ask.state == AskState::Unsent {
                ask.state = AskState::Sent;
                let change = pause(ask.until.since(now), SLACK, ask.cause);
                return Some((name, ask.until, change));
            }
        }
        self.has_asks.store(false, Ordering::Release);
        None
    }

    /// Notes what came of recording a pause.
    fn on_ask_answered(&self, name: &Arc<str>, until: Time, answer: &Result<(), QueryError>) {
        let mut state = lock(&self.state);
        let next = state.asked + 1;
        let Some(ask) = state.asks.get_mut(name).filter(|ask| ask.until == until) else { return };
        match answer {
            Err(QueryError::Moved) if ask.redirects < REDIRECTS_MAX => {
                (ask.state, ask.redirects) = (AskState::Unsent, ask.redirects + 1);
                state.unsent.push_back(Arc::clone(name));
                self.has_asks.store(true, Ordering::Release);
            }
            // The next connection repeats it.
            Err(QueryError::Failed(error)) if error.is_connection() => {}
            _ => {
                ask.state = AskState::Answered(next);
                state.wanted = true;
            }
        }
    }

    /// Has pauses recorded again whose records were not answered before the connection broke.
    pub(crate) fn on_asks_unanswered(&self) {
        let mut state = lock(&self.state);
        let Known { asks, unsent, .. } = &mut *state;
        for (name, ask) in asks.iter_mut().filter(|(_, ask)| ask.state == AskState::Sent) {
            ask.state = AskState::Unsent;
            unsent.push_back(Arc::clone(name));
            self.has_asks.store(true, Ordering::Release);
        }
    }

    /// Has the next reading alone count for a name: an operator ends its pause.
    pub(crate) fn forget_ask(&self, name: &str) {
        let mut state = lock(&self.state);
        let next = state.asked + 1;
        if let Some(ask) = state.asks.get_mut(name) {
            ask.state = AskState::Answered(next);
        }
    }
}

/// Returns the change that records a pause.
pub(crate) fn pause(pause: Duration, slack: Duration, cause: PauseCause) -> Change {
    let by = if process().is_empty() { "-".into() } else { Arc::clone(process()) };
    Change::Pause { pause_ms: ms_up(pause), slack_ms: ms_up(slack), by, cause }
}

/// Whole ms: a pause never ends early.
fn ms_up(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl Node {
    /// Pauses the grants of a name for this long, here at once, and in the whole fleet. Does nothing if a pause that
    /// ends as late is known.
    pub(crate) fn pause(&self, name: &Arc<str>, duration: Duration, cause: PauseCause) {
        let until = self.now() + duration;
        if let Some(embedded) = self.embedded() {
            if lock(&self.overrides.state).paused_until(name) < Some(until) {
                let change = pause(duration, SLACK, cause);
                let key = self.overrides.key();
                let _ = embedded.set_override(key, name, change).now_or_never();
                self.counts.meter.on_pause(cause);
                self.learn_now();
            }
        } else if self.overrides.ask(name, until, cause) {
            self.counts.meter.on_pause(cause);
            if let Some(shared) = self.sessions.get(name) {
                self.apply_overrides(&shared, self.now());
            }
            self.ask_keeper();
        }
    }

    /// Returns the next record of a pause, sent over a connection to the server that keeps the overrides.
    pub(crate) fn record_pause(
        &self,
        connection: &Arc<dyn Connection>,
    ) -> Option<impl Future<Output = Result<(), QueryError>> + Send + 'static + use<>> {
        let (name, until, change) = self.overrides.next_ask(self.now())?;
        let recording = connection.set_override(self.overrides.key(), &name, change);
        let node = self.this.clone();
        Some(async move {
            let answer = recording.await;
            if let Some(node) = node.upgrade() {
                node.overrides.on_ask_answered(&name, until, &answer);
                if let Err(QueryError::Failed(error)) = &answer
                    && !error.is_connection()
                {
                    node.counts.log_refused_call(&name, error);
                }
                node.ask_keeper();
            }
            answer
        })
    }
}
