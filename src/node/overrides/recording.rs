//! How records of pauses and of adaptive limits are sent to the server that keeps the overrides.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::pauses::{Length, Outcome};
use super::{ANNOUNCED_INTERVAL, OverrideCache, adaptive, pauses};
use crate::backend::{Change, Connection, QueryError};
use crate::node::Node;
use crate::protocol::{PauseCause, Time};
use crate::sync::atomic::Ordering;
use crate::sync::lock;

impl OverrideCache {
    /// Returns who asked for the pause of a name, why, and how much longer it lasts.
    pub(crate) fn pause_of(
        &self,
        name: &str,
        now: Time,
    ) -> Option<(Arc<str>, PauseCause, Duration)> {
        lock(&self.state).pauses.of(name, now)
    }

    /// Returns the number of names that are paused.
    pub(crate) fn paused(&self, now: Time) -> usize {
        lock(&self.state).pauses.len(now)
    }

    /// Forgets the pauses that are over.
    pub(crate) fn forget_ended_pauses(&self, now: Time) {
        lock(&self.state).pauses.forget_ended(now);
    }

    /// Returns whether a record is to be sent, now or later.
    pub(crate) fn has_unsent(&self) -> bool {
        self.has_unsent.load(Ordering::Acquire)
    }

    fn record_due(&self) -> Option<Time> {
        let state = lock(&self.state);
        state.pauses.due().into_iter().chain(state.adaptations.due()).min()
    }

    fn ask(&self, name: &Arc<str>, length: Length, cause: PauseCause, now: Time) -> bool {
        let mut state = lock(&self.state);
        let seen = state.overrides.pauses_version;
        let is_new = state.pauses.ask(name, length, cause, seen, now);
        self.note_unsent(&state);
        is_new
    }

    fn next_record(&self, interval: Duration, now: Time) -> Option<Record> {
        let mut state = lock(&self.state);
        let pause = state.pauses.next(interval, now).map(Record::Pause);
        let next = pause.or_else(|| state.adaptations.next(now).map(Record::Adapt));
        self.note_unsent(&state);
        next
    }

    fn on_outcome(&self, of: &Record, outcome: Outcome, now: Time) {
        let mut state = lock(&self.state);
        let question = state.asked + 1;
        match of {
            Record::Pause(of) => state.pauses.on_outcome(of, outcome, question, now),
            Record::Adapt(of) => state.adaptations.on_outcome(of, outcome, now),
        }
        self.note_unsent(&state);
    }
}

/// A record that is sent.
enum Record {
    Pause(pauses::Sending),
    Adapt(adaptive::Sending),
}

impl Record {
    const fn name(&self) -> &Arc<str> {
        match self {
            Self::Pause(of) => &of.name,
            Self::Adapt(of) => &of.name,
        }
    }

    fn change(&self) -> Change {
        match self {
            Self::Pause(of) => of.change.clone(),
            Self::Adapt(of) => of.change.clone(),
        }
    }
}

/// A record on its way. Dropped without an answer, it is sent again.
struct Recording {
    node: Weak<Node>,
    record: Record,
}

impl Recording {
    fn end(&self, outcome: Outcome) {
        if let Some(node) = self.node.upgrade() {
            node.overrides.on_outcome(&self.record, outcome, node.now());
            if matches!(self.record, Record::Adapt(_)) && node.keeper().conditions().poll_only {
                // No message brings what came of it.
                node.overrides.want();
            }
            node.ask_keeper();
        }
    }

    fn log(&self, error: &QueryError) {
        if let QueryError::Failed(error) = error
            && !error.is_connection()
            && let Some(node) = self.node.upgrade()
        {
            node.counts.log_refused_call(self.record.name(), error);
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(node) = self.node.upgrade() {
            node.overrides.on_outcome(&self.record, Outcome::Unanswered, node.now());
        }
    }
}

fn outcome_of(answer: &Result<Result<(), QueryError>, Elapsed>) -> Outcome {
    match answer {
        Ok(Ok(())) => Outcome::Recorded,
        Ok(Err(QueryError::Moved)) => Outcome::Moved,
        Ok(Err(QueryError::Failed(error))) if error.is_connection() => Outcome::Unanswered,
        Ok(Err(QueryError::Failed(_))) | Err(_) => Outcome::Refused,
    }
}

impl Node {
    /// Pauses the grants of a name for this long, here at once, and in the whole fleet. Does nothing if a pause that
    /// ends as late is known.
    pub(crate) fn pause(&self, name: &Arc<str>, length: Length, cause: PauseCause) {
        if !self.overrides.ask(name, length, cause, self.now()) {
            return;
        }
        self.counts.meter.on_pause(cause);
        if let Some(shared) = self.sessions.get(name) {
            self.apply_overrides(&shared, self.now());
        }
        self.send_records();
        if self.embedded().is_some() {
            self.learn_now();
        }
    }

    /// Has what is unsent sent.
    pub(super) fn send_records(&self) {
        if self.embedded().is_some() { self.record_now() } else { self.ask_keeper() }
    }

    /// Records what is unsent with the embedded backend. Nothing is sent for it, so nothing has to wait.
    pub(super) fn record_now(&self) {
        let Some(embedded) = self.embedded() else { return };
        while let Some(record) = self.overrides.next_record(Duration::ZERO, self.now()) {
            let answer =
                embedded.set_override(self.overrides.key(), record.name(), record.change());
            let outcome =
                answer.now_or_never().map_or(Outcome::Refused, |answer| outcome_of(&Ok(answer)));
            self.overrides.on_outcome(&record, outcome, self.now());
        }
    }

    /// Returns when a record is due that may not be sent yet.
    pub(crate) fn record_due(&self) -> Option<Instant> {
        let due = self.overrides.record_due()?;
        Some(Instant::now() + due.since(self.now()))
    }

    /// Returns the next record, sent over a connection to the server that keeps the overrides, with the answer
    /// within the response timeout.
    pub(crate) fn send_record(
        &self,
        connection: &Arc<dyn Connection>,
    ) -> Option<
        impl Future<Output = Result<Result<(), QueryError>, Elapsed>> + Send + 'static + use<>,
    > {
        let record = self.overrides.next_record(ANNOUNCED_INTERVAL, self.now())?;
        let answer = connection.set_override(self.overrides.key(), record.name(), record.change());
        let answer = timeout(self.backend().response_timeout(), answer);
        let recording = Recording { node: self.this.clone(), record };
        Some(async move {
            let answer = answer.await;
            if let Ok(Err(error)) = &answer {
                recording.log(error);
            }
            recording.end(outcome_of(&answer));
            answer
        })
    }

    /// Logs that a pause of a name began, ended, or ends later, as a session was told. Where these are many, only some
    /// are at `INFO`.
    pub(crate) fn log_pause(&self, name: &str, before: Option<Time>, after: Option<Time>) {
        let now = self.now();
        match (before, after) {
            (None, Some(_)) => {
                let Some((by, cause, left)) = self.overrides.pause_of(name, now) else { return };
                let for_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
                const EVENT: &str = "grants are paused until a time";
                if self.counts.may_log_pause() {
                    tracing::info!(target: "tower_semaphore", semaphore = name, for_ms, by = &*by, %cause, "{EVENT}");
                } else {
                    tracing::debug!(target: "tower_semaphore", semaphore = name, for_ms, by = &*by, %cause, "{EVENT}");
                }
            }
            (Some(_), None) => {
                const EVENT: &str = "grants are no longer paused until a time";
                if self.counts.may_log_pause() {
                    tracing::info!(target: "tower_semaphore", semaphore = name, "{EVENT}");
                } else {
                    tracing::debug!(target: "tower_semaphore", semaphore = name, "{EVENT}");
                }
            }
            (Some(earlier), Some(until)) if earlier < until => {
                let left = until.since(now);
                let for_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
                tracing::debug!(target: "tower_semaphore", semaphore = name, for_ms, "a pause ends later");
            }
            _ => {}
        }
    }
}
