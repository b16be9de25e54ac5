//! Changes of the overrides, which are one key: those that a process asks for meanwhile are written together.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Mutex as Turn, oneshot};
use tokio::time::{Instant, sleep};

use super::overrides;
use super::queries::{Questions, TRIES_MAX, contended};
use crate::backend::{Change, Overrides, QueryError};
use crate::sync::{Mutex, lock};

/// What one process writes of the overrides in the long run, bytes in a ms: each change writes all of them, and hundreds of
/// adaptive limits can change each second. etcd keeps each version until it is compacted.
const PACE: usize = 200;
/// Only what is written beyond that at this pace is delayed: 8 MB.
const BURST: Duration = Duration::from_secs(40);
/// The longest pause between two changes: who asks for one does not wait longer than this for those before.
const PAUSE_MAX: Duration = Duration::from_millis(250);

type Answer = Result<(), QueryError>;

/// Changes that are asked for and not written yet.
#[derive(Debug, Default)]
pub(super) struct Changes {
    asked: Mutex<Vec<Asked>>,
    /// The caller that holds it writes for all.
    turn: Turn<Pace>,
}

/// When all that was written would have been, at the pace. As in the generic cell rate algorithm.
#[derive(Debug, Default)]
struct Pace(Option<Instant>);

#[derive(Debug)]
struct Asked {
    name: Arc<str>,
    change: Change,
    answer: oneshot::Sender<Answer>,
}

/// Changes that are being written. Those without an answer go back when this is dropped, as when the caller that writes
/// them leaves: the next one writes them again.
struct Batch<'a> {
    changes: &'a Changes,
    asked: Vec<Asked>,
}

impl Changes {
    /// Changes the overrides of a name.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the change may or may not be carried out. Those of others are.
    pub(super) async fn ask(
        &self,
        questions: &Questions,
        name: Arc<str>,
        change: Change,
    ) -> Answer {
        let (answer, mut answered) = oneshot::channel();
        lock(&self.asked).push(Asked { name, change, answer });
        let mut pace = self.turn.lock().await;
        loop {
            if let Ok(answer) = answered.try_recv() {
                return answer;
            }
            sleep(pace.pause(Instant::now())).await;
            let mut batch = Batch { changes: self, asked: std::mem::take(&mut *lock(&self.asked)) };
            let written = batch.write(questions).await;
            pace.handle_written(written, Instant::now());
        }
    }
}

impl Batch<'_> {
    /// Writes the changes, and answers those who asked. Returns how many bytes were written.
    async fn write(&mut self, questions: &Questions) -> usize {
        self.asked.retain(|asked| !asked.answer.is_closed());
        let mut written = 0;
        let tried = self.try_write(questions, &mut written).await;
        let all = std::mem::take(&mut self.asked);
        match tried {
            Ok(answers) => {
                for (asked, answer) in all.into_iter().zip(answers) {
                    _ = asked.answer.send(answer);
                }
            }
            Err(error) => {
                for asked in all {
                    _ = asked.answer.send(Err(error.clone()));
                }
            }
        }
        written
    }

    async fn try_write(
        &self,
        questions: &Questions,
        written: &mut usize,
    ) -> Result<Vec<Answer>, QueryError> {
        for _ in 0..TRIES_MAX {
            let (before, changed) = questions.read_overrides().await?;
            let now_ms = questions.environment.wall() / 1000;
            let (after, answers) = self.apply(&before, now_ms);
            if after == before {
                return Ok(answers);
            }
            let value = overrides::encode(&after).map(Bytes::from);
            *written += value.as_ref().map_or(0, Bytes::len);
            if questions.swap(questions.keys.overrides(), changed, value).await? {
                return Ok(answers);
            }
        }
        Err(contended())
    }

    fn apply(&self, before: &Overrides, now_ms: u64) -> (Overrides, Vec<Answer>) {
        let mut after = before.clone();
        let mut answers = Vec::new();
        for Asked { name, change, .. } in &self.asked {
            let has_room = after.change(name, change.clone(), now_ms);
            let too_many = || QueryError::Failed(Overrides::too_many(name));
            answers.push(has_room.then_some(()).ok_or_else(too_many));
        }
        (after, answers)
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        lock(&self.changes.asked).append(&mut self.asked);
    }
}

impl Pace {
    fn pause(&self, now: Instant) -> Duration {
        let ahead = self.0.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        ahead.saturating_sub(BURST).min(PAUSE_MAX)
    }

    fn handle_written(&mut self, bytes: usize, now: Instant) {
        let ms = u64::try_from(bytes / PACE).unwrap_or(u64::MAX);
        // What was delayed by less than it should have been is forgiven.
        let most = now + BURST + PAUSE_MAX;
        self.0 = Some((self.0.unwrap_or(now).max(now) + Duration::from_millis(ms)).min(most));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_beyond_a_burst_is_delayed_and_nobody_waits_long() {
        let (now, mut pace) = (Instant::now(), Pace::default());
        pace.handle_written(8_000_000, now);
        assert_eq!(pace.pause(now), Duration::ZERO);
        pace.handle_written(20_000, now);
        assert_eq!(pace.pause(now), Duration::from_millis(100));
        assert_eq!(pace.pause(now + Duration::from_millis(100)), Duration::ZERO);
        pace.handle_written(8_000_000, now);
        assert_eq!(pace.pause(now), PAUSE_MAX);
        assert_eq!(pace.pause(now + PAUSE_MAX), Duration::ZERO);
    }
}
