//! What a connection waits for.

use std::future::{Future, pending};
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::{Instant, Sleep, sleep};

use super::{Answered, Link};
use crate::backend::etcd::wire::{KeptAlive, Watch, WatchMessage, WireError};

/// A watch that has been silent for this time is asked for its revision.
const WATCH_ASKED: Duration = Duration::from_millis(400);

/// The shortest time between two questions for the status of the member, and how much longer it may be.
const STATUS_INTERVAL: Duration = Duration::from_secs(4);
const STATUS_JITTER_MS: u64 = 2000;

/// What happens on a connection.
pub(super) enum Event {
    Closed,
    KeptAlive(Result<KeptAlive, WireError>),
    Answered(Result<Answered, WireError>),
    /// The engine has something to do.
    Due,
    StatusDue,
    /// Calls came, or the process ends.
    Called,
    Watched(Result<WatchMessage, WireError>),
    /// The watch has said nothing for a while.
    Silent,
}

type Next<'a> = Pin<&'a mut (dyn Future<Output = Event> + Send)>;

/// When something is due.
pub(super) struct Timers {
    due: Pin<Box<Sleep>>,
    is_due: bool,
    silent: Pin<Box<Sleep>>,
    status: Pin<Box<Sleep>>,
    answers_first: bool,
}

impl Timers {
    pub(super) fn new() -> Self {
        Self {
            due: Box::pin(sleep(Duration::ZERO)),
            is_due: false,
            silent: Box::pin(sleep(WATCH_ASKED)),
            status: Box::pin(sleep(status_interval())),
            answers_first: false,
        }
    }

    /// Sets when the engine has something to do.
    pub(super) fn set_due(&mut self, due: Option<Instant>) {
        self.is_due = due.is_some();
        if let Some(at) = due
            && self.due.deadline() != at
        {
            self.due.as_mut().reset(at);
        }
    }

    /// Sets what has happened to happen again.
    fn handle(&mut self, event: &Event) {
        let now = Instant::now();
        match event {
            Event::StatusDue => self.status.as_mut().reset(now + status_interval()),
            Event::Watched(_) | Event::Silent => self.silent.as_mut().reset(now + WATCH_ASKED),
            _ => {}
        }
    }
}

impl Link {
    /// Waits for what happens next, and drives the connection meanwhile.
    ///
    /// Answers and everything else come first in turn, since both can be ready all the time; not by chance, so that a seed
    /// determines a simulated run.
    pub(super) async fn next_event(&mut self) -> Event {
        let Self { driver, keep_alive, answers, watch, timers, shared, .. } = self;
        timers.answers_first = !timers.answers_first;
        let answers_first = timers.answers_first;
        let event = {
            let answered = async {
                tokio::select! {
                    biased;
                    kept = keep_alive.next() => Event::KeptAlive(kept),
                    Some(answered) = answers.next() => Event::Answered(answered),
                }
            };
            let told = async {
                tokio::select! {
                    biased;
                    () = &mut timers.due, if timers.is_due => Event::Due,
                    () = &mut timers.status => Event::StatusDue,
                    () = shared.called.notified() => Event::Called,
                    message = next_of(watch) => Event::Watched(message),
                    () = &mut timers.silent => Event::Silent,
                }
            };
            let (answered, told) = (pin!(answered), pin!(told));
            let (first, second): (Next<'_>, Next<'_>) =
                if answers_first { (answered, told) } else { (told, answered) };
            tokio::select! {
                biased;
                () = driver => Event::Closed,
                event = first => event,
                event = second => event,
            }
        };
        timers.handle(&event);
        event
    }
}

async fn next_of(watch: &mut Option<Watch>) -> Result<WatchMessage, WireError> {
    match watch {
        Some(watch) => watch.next().await,
        None => pending().await,
    }
}

fn status_interval() -> Duration {
    STATUS_INTERVAL + Duration::from_millis(fastrand::u64(..STATUS_JITTER_MS))
}
