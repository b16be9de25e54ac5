//! What Redis itself says of a run: each start that it counts for a rate, and each pause and adaptive limit that it
//! records.
//!
//! They stay there for longer than it takes to look again, unless Redis loses them. Their times are by its clock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{Client, Cmd, FromRedisValue, RedisError, cmd};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::history::{Number, Pause, Recorder, Start, us};
use super::load::{PAUSED, name};

/// A tenth of the shortest pause, and a twentieth of a window.
const LOOK: Duration = Duration::from_millis(50);
/// A connection that is silent for this long is replaced: its server may have been stopped.
const SILENCE: Duration = Duration::from_millis(1000);
/// Starts that are older were seen before.
const RECENT: u64 = 2_000_000;

/// What was seen, in all servers.
struct Observer {
    recorder: Arc<Recorder>,
    /// The keys with a rate.
    rated: Vec<usize>,
    /// Which of the run's starts a member is. A call that is repeated moves its start.
    starts: Mutex<HashMap<(usize, String), usize>>,
}

/// Looks at all servers until the tasks are dropped.
pub(super) fn observe(recorder: &Arc<Recorder>, urls: Vec<String>) -> JoinSet<()> {
    let rates = recorder.lock().rules.rates.clone();
    let rated = (0..rates.len()).filter(|key| rates[*key].is_some()).collect();
    let observer = Observer { recorder: Arc::clone(recorder), rated, starts: Mutex::default() };
    let (observer, mut tasks) = (Arc::new(observer), JoinSet::new());
    for url in urls {
        let observer = Arc::clone(&observer);
        tasks.spawn(async move { observer.watch(&url).await });
    }
    tasks
}

impl Observer {
    async fn watch(&self, url: &str) {
        let client = Client::open(url).unwrap();
        let mut next = interval(LOOK);
        next.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut connection = None;
        loop {
            next.tick().await;
            if connection.is_none() {
                let opened = timeout(SILENCE, client.get_multiplexed_async_connection()).await;
                connection = opened.ok().and_then(Result::ok);
            }
            if let Some(open) = &mut connection
                && self.look(open).await.is_none()
            {
                connection = None;
            }
        }
    }

    /// Returns nothing if the connection is to be replaced.
    async fn look(&self, server: &mut MultiplexedConnection) -> Option<()> {
        for key in &self.rated {
            let now = self.recorder.by_clock(self.recorder.now());
            let newest = format!("({}", -((now - RECENT) as f64) / 1e6);
            let set = format!("semaphore:{{{}}}", name(*key));
            let mut words = cmd("ZRANGEBYSCORE");
            words.arg(set).arg("-inf").arg(newest).arg("WITHSCORES");
            self.note_starts(*key, ask(server, &words).await?.unwrap_or_default());
        }
        let mut words = cmd("HGET");
        words.arg("semaphore:{!overrides}:adaptive").arg(name(PAUSED));
        if let Some(Some(record)) = ask::<Option<String>>(server, &words).await? {
            self.note_number(&record);
        }
        let mut words = cmd("HMGET");
        words.arg("semaphore:{!overrides}:pauses").arg("@").arg(name(PAUSED));
        let answer = ask::<(Option<u64>, Option<String>)>(server, &words).await?;
        if let Some((Some(version), Some(record))) = answer {
            self.note_pause(version, &record);
        }
        Some(())
    }

    fn note_starts(&self, key: usize, members: Vec<(String, f64)>) {
        let (mut known, mut run) = (self.starts.lock().unwrap(), self.recorder.lock());
        for (member, score) in members {
            // A score holds its time to a quarter of a us.
            let time = Duration::from_secs_f64(-score) + Duration::from_nanos(500);
            let at = self.recorder.at(us(time));
            let index = *known.entry((key, member)).or_insert_with(|| {
                run.starts.push(Start { key, at });
                run.starts.len() - 1
            });
            run.starts[index].at = at;
        }
    }

    fn note_number(&self, record: &str) {
        let mut words = record.split(' ').map(|word| word.parse::<u64>().unwrap());
        let mut next = || words.next().unwrap();
        let limit = usize::try_from(next()).unwrap();
        let [lowered, changed] = [next(), next()].map(|at| self.recorder.at(at));
        let mut run = self.recorder.lock();
        if run.numbers.iter().all(|number| number.changed != changed) {
            run.numbers.push(Number { limit, lowered, changed });
        }
    }

    /// The version of all pauses is when the last one was written, and only one name is paused.
    fn note_pause(&self, version: u64, record: &str) {
        let ends = record.split(' ').next().and_then(|ends| ends.parse::<u64>().ok()).unwrap();
        let (written, ends) = (self.recorder.at(version), self.recorder.at(ends * 1000));
        let mut run = self.recorder.lock();
        if ends > written && run.pauses.iter().all(|pause| pause.written != written) {
            run.pauses.push(Pause { key: PAUSED, written, ends });
        }
    }
}

/// Returns nothing if the connection is to be replaced, and no answer if the server does not serve the key.
async fn ask<T: FromRedisValue>(
    server: &mut MultiplexedConnection,
    words: &Cmd,
) -> Option<Option<T>> {
    let is_broken = |error: &RedisError| error.is_io_error() || error.is_connection_dropped();
    match timeout(SILENCE, words.query_async(server)).await.ok()? {
        Ok(answer) => Some(Some(answer)),
        Err(error) if is_broken(&error) => None,
        Err(_) => Some(None),
    }
}
