//! The exchange over one connection to a server: writes of calls, and their answers.
//!
//! Everything that has come since the last write goes out in the next one, as one call for each session and
//! operation. A write does not wait for the answer to the previous one. A [window](super::window) bounds what is
//! unanswered by the time that the server takes to answer. Calls that keep leases alive go first, in writes of their
//! own and in the order in which the leases end; they have half of the window, and requests the other half. When the
//! connection breaks, each session requests again what was not answered.
//!
//! A connection is given up for silence, not for slowness: when a call, a question for overrides, or an operator's
//! query is not answered in time, and nothing else was answered meanwhile, not even a part of a write.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, SelectAll};
use futures_util::{Stream, StreamExt};
use tokio::sync::futures::Notified;
use tokio::task::coop::unconstrained;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::batch::{Batch, Taken};
use super::subtasks::{Subtasks, Which};
use super::window::{Unanswered, Window};
use crate::backend::{Answer, Answers, Connection, QueryError};
use crate::error::BackendError;
use crate::node::overrides::refresh::Refresh;
use crate::node::server::outbox::Purpose;
use crate::node::{Node, Server};

/// The most writes without any answer, and how many of them are reserved for renewals.
const WRITES_MAX: usize = 64;
const WRITES_RESERVED: usize = 8;
/// How often to read the overrides, in case messages are lost or forbidden.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The most unanswered messages to other processes.
const MESSAGES_IN_FLIGHT_MAX: usize = 64;

/// The subtasks of an exchange. If several are woken at once, they are polled in this order.
const SUBTASKS: usize = 7;
/// Drives the connection; see [`Connection::drive`].
const LINK: usize = 0;
const ANSWERS: usize = 1;
const REFRESH: usize = 2;
const OUTBOX: usize = 3;
const ALARM: usize = 4;
const MESSAGES: usize = 5;
const REFRESH_TIMER: usize = 6;

/// A connection that is of no further use, and why.
pub(crate) struct Broken {
    pub(crate) error: BackendError,
    /// It was not closed, but the server did not answer.
    pub(crate) was_given_up: bool,
    /// The number of writes that were answered on it.
    pub(crate) answered: u64,
}

/// The answers to the batch of this number; `None` is their end.
struct AnswersTo {
    batch: u64,
    answers: Option<Answers>,
}

impl Stream for AnswersTo {
    type Item = (u64, Option<Result<Vec<(usize, Answer)>, BackendError>>);

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(answers) = &mut self.answers else { return Poll::Ready(None) };
        let part = std::task::ready!(answers.poll_next_unpin(cx));
        if part.is_none() {
            self.answers = None;
        }
        Poll::Ready(Some((self.batch, part)))
    }
}

/// One connection, with everything that is unanswered on it.
struct Exchange<'a> {
    node: &'a Node,
    server: &'a Arc<Server>,
    connection: &'a Arc<dyn Connection>,
    /// How long to wait for an answer.
    patience: Duration,
    /// Those that are not wholly answered, in the order in which they were sent.
    batches: BTreeMap<u64, Batch>,
    /// How many of them have no answer at all.
    silent: usize,
    answers: SelectAll<AnswersTo>,
    /// The number of the next batch.
    next: u64,
    window: Window,
    unanswered: Unanswered,
    refresh: Option<Refresh>,
    /// Messages, and questions whose answer does not matter, only that there is one.
    messages: FuturesUnordered<BoxFuture<'static, Result<Result<(), QueryError>, Elapsed>>>,
    answered_at: Instant,
    answered: u64,
    was_given_up: bool,
    /// The number of requests that answers may have woken since calls were last sent.
    woken: usize,
}

/// Sends calls and takes answers until the connection breaks or nothing is left to do.
pub(crate) async fn run(
    node: &Node,
    server: &Arc<Server>,
    connection: &Arc<dyn Connection>,
    link: BoxFuture<'_, ()>,
) -> Result<(), Broken> {
    let (patience, now) = (node.backend().response_timeout(), Instant::now());
    let mut exchange = Exchange {
        node,
        server,
        connection,
        patience,
        batches: BTreeMap::new(),
        silent: 0,
        answers: SelectAll::new(),
        next: 0,
        window: Window::new(patience, now),
        unanswered: Unanswered::default(),
        refresh: None,
        messages: FuturesUnordered::new(),
        answered_at: now,
        answered: 0,
        was_given_up: false,
        woken: 0,
    };
    let result = exchange.run(link).await;
    let Exchange { answered, was_given_up, .. } = exchange;
    exchange.end();
    result.map_err(|error| Broken { error, was_given_up, answered })
}

/// What an exchange waits for, beside answers.
struct Events<'e, 'a> {
    /// Drives the connection. Ready once the connection is closed.
    link: BoxFuture<'e, ()>,
    /// Ready when there may be something to send.
    came: Pin<&'e mut Notified<'a>>,
    /// Goes off when the first batch must be answered.
    alarm: Pin<&'e mut Sleep>,
    is_alarm_set: bool,
    /// Goes off when the overrides are to be read: at `refresh_at` or, for a question that has to wait, before that.
    refresh_timer: Pin<&'e mut Sleep>,
    refresh_at: Instant,
}

impl<'a> Exchange<'a> {
    async fn run(&mut self, link: BoxFuture<'_, ()>) -> Result<(), BackendError> {
        let subtasks = Subtasks::new();
        let mut events = Events {
            link,
            came: pin!(self.server.outbox.came()),
            alarm: pin!(sleep(self.patience)),
            is_alarm_set: false,
            refresh_timer: pin!(sleep(REFRESH_INTERVAL)),
            refresh_at: Instant::now() + REFRESH_INTERVAL,
        };
        let mut poll = |woken| self.poll(&subtasks, &mut events, woken);
        poll_fn(|cx| subtasks.poll(cx, &mut poll)).await
    }

    /// Takes in everything that has come, then sends what there is to send.
    fn poll(
        &mut self,
        subtasks: &Subtasks<SUBTASKS>,
        events: &mut Events<'_, 'a>,
        woken: Which,
    ) -> Poll<Result<(), BackendError>> {
        if !self.take_in(subtasks, events, woken)? {
            return Poll::Pending;
        }
        if woken.has(OUTBOX) && std::mem::take(&mut self.woken) > 1 {
            // A multi-threaded runtime runs the task that was woken last first, so this task would run before all but
            // the first of these requests, and each of them would have a call of its own, for good.
            subtasks.wake_after_others(OUTBOX);
            return Poll::Pending;
        }
        self.send_calls(subtasks);
        if let Some(first) = self.first()
            && !std::mem::replace(&mut events.is_alarm_set, true)
        {
            events.alarm.as_mut().reset(first.sent + self.patience);
            subtasks.wake(ALARM);
        }
        if let Some(due) = self.send_questions(subtasks)
            && due < events.refresh_timer.deadline()
        {
            events.refresh_timer.as_mut().reset(due);
            subtasks.wake(REFRESH_TIMER);
        }
        if self.batches.is_empty() && self.node.is_finished() {
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    }

    /// Takes in everything that has come. Returns whether there may be something to send now.
    fn take_in(
        &mut self,
        subtasks: &Subtasks<SUBTASKS>,
        events: &mut Events<'_, 'a>,
        woken: Which,
    ) -> Result<bool, BackendError> {
        let mut acts = woken.has(OUTBOX);
        if woken.has(LINK) {
            self.drive(subtasks, events)?;
        }
        if woken.has(ANSWERS) {
            acts |= self.take_answers(&mut subtasks.context(ANSWERS))?;
        }
        if woken.has(REFRESH) {
            acts |= self.take_overrides(&mut subtasks.context(REFRESH))?;
        }
        if woken.has(OUTBOX) {
            let outbox = &self.server.outbox;
            while events.came.as_mut().poll(&mut subtasks.context(OUTBOX)).is_ready() {
                events.came.set(outbox.came());
            }
        }
        if woken.has(ALARM) {
            acts |= self.take_alarm(subtasks, events)?;
        }
        if woken.has(MESSAGES) {
            acts |= self.take_messages(&mut subtasks.context(MESSAGES))?;
        }
        if woken.has(REFRESH_TIMER)
            && events.refresh_timer.as_mut().poll(&mut subtasks.context(REFRESH_TIMER)).is_ready()
        {
            let now = Instant::now();
            if events.refresh_at <= now {
                self.node.want_overrides();
                events.refresh_at = now + REFRESH_INTERVAL;
            }
            events.refresh_timer.as_mut().reset(events.refresh_at);
            subtasks.wake(REFRESH_TIMER);
            acts = true;
        }
        Ok(acts)
    }

    /// Reads and writes the socket.
    fn drive(
        &mut self,
        subtasks: &Subtasks<SUBTASKS>,
        events: &mut Events<'_, '_>,
    ) -> Result<(), BackendError> {
        match events.link.as_mut().poll(&mut subtasks.context(LINK)) {
            Poll::Ready(()) => Err(self.take_last_answers()),
            Poll::Pending => Ok(()),
        }
    }

    /// If the alarm has gone off, checks whether the first batch has been unanswered for too long.
    fn take_alarm(
        &mut self,
        subtasks: &Subtasks<SUBTASKS>,
        events: &mut Events<'_, '_>,
    ) -> Result<bool, BackendError> {
        let mut cx = subtasks.context(ALARM);
        if !events.is_alarm_set || events.alarm.as_mut().poll(&mut cx).is_pending() {
            return Ok(false);
        }
        // This process may have been stopped, with the answers unread in its socket.
        self.drive(subtasks, events)?;
        let acts = self.take_answers(&mut subtasks.context(ANSWERS))?;
        // Usually the alarm was set for a batch that was answered meanwhile; set it for the one that is first now.
        let due = self.first_is_due()?;
        events.is_alarm_set = due.is_some();
        if let Some(due) = due {
            events.alarm.as_mut().reset(due);
            subtasks.wake(ALARM);
        }
        Ok(acts)
    }

    fn send_calls(&mut self, subtasks: &Subtasks<SUBTASKS>) {
        for purpose in Purpose::ALL {
            let writes = match purpose {
                Purpose::KeepAlive => WRITES_MAX,
                Purpose::Serve => WRITES_MAX - WRITES_RESERVED,
            };
            while self.silent < writes
                && let Some(batch) = self.collect(purpose)
            {
                let answers = self.connection.send(batch.calls());
                self.answers.push(AnswersTo { batch: self.next, answers: Some(answers) });
                subtasks.wake(ANSWERS);
                *self.unanswered.of(purpose) += batch.cost;
                self.batches.insert(self.next, batch);
                (self.next, self.silent) = (self.next + 1, self.silent + 1);
            }
        }
    }

    /// Collects the calls of the next write, as far as there is room, if there are any.
    fn collect(&mut self, purpose: Purpose) -> Option<Batch> {
        if !self.server.outbox.has(purpose) {
            return None;
        }
        let sent = Instant::now();
        let of_this = *self.unanswered.of(purpose);
        let room = self.window.room(purpose, self.unanswered.all(), of_this);
        if room == 0 {
            self.window.on_full(purpose, sent);
            return None;
        }
        Batch::collect(self.node, self.server, purpose, room, sent)
    }

    /// Sends messages, records and questions. Returns when the next record, or question for overrides, is due, if that is
    /// later.
    fn send_questions(&mut self, subtasks: &Subtasks<SUBTASKS>) -> Option<Instant> {
        while self.messages.len() < MESSAGES_IN_FLIGHT_MAX
            && let Some((key, to, message)) = self.server.next_message()
        {
            let sending = self.connection.send_message(&key, to, &message);
            self.messages.push(Box::pin(timeout(self.patience, sending)));
            subtasks.wake(MESSAGES);
        }
        if self.server.take_doubt() {
            // The answer does not matter: even a redirection shows that the connection works.
            let overrides = &self.node.overrides;
            let question = self.connection.overrides(overrides.key(), overrides.version());
            let question = async { question.await.map(drop) };
            self.messages.push(Box::pin(timeout(self.patience, question)));
            subtasks.wake(MESSAGES);
        }
        let record_due = self.send_records(subtasks);
        record_due.into_iter().chain(self.ask_overrides(subtasks)).min()
    }

    /// Sends the records that are due. Returns when the next one is, if that is later.
    fn send_records(&mut self, subtasks: &Subtasks<SUBTASKS>) -> Option<Instant> {
        if !self.node.overrides.has_unsent() || !self.node.keeps_overrides(self.server) {
            return None;
        }
        while let Some(recording) = self.node.send_record(self.connection) {
            self.messages.push(Box::pin(recording));
            subtasks.wake(MESSAGES);
        }
        self.node.record_due()
    }

    /// Asks for the overrides, if that is due. Returns when it is, if that is later.
    fn ask_overrides(&mut self, subtasks: &Subtasks<SUBTASKS>) -> Option<Instant> {
        let due = self
            .node
            .overrides
            .due(Instant::now())
            .filter(|_| self.refresh.is_none() && self.node.keeps_overrides(self.server))?;
        if due > Instant::now() {
            return Some(due);
        }
        self.refresh = Some(Refresh::begin(self.node, self.connection));
        subtasks.wake(REFRESH);
        None
    }

    /// Returns when the first unanswered batch must be answered, if there is one.
    fn first_is_due(&mut self) -> Result<Option<Instant>, BackendError> {
        let Some(first) = self.first() else { return Ok(None) };
        let due = first.sent.max(self.heard_at()) + self.patience;
        if due <= Instant::now() { Err(self.give_up()) } else { Ok(Some(due)) }
    }

    /// Returns the first batch that is not wholly answered.
    fn first(&self) -> Option<&Batch> {
        self.batches.first_key_value().map(|(_, batch)| batch)
    }

    /// Returns when the server last answered anything.
    fn heard_at(&self) -> Instant {
        self.connection.heard_at().map_or(self.answered_at, |at| at.max(self.answered_at))
    }

    fn give_up(&mut self) -> BackendError {
        self.was_given_up = true;
        unanswered(self.patience)
    }

    /// Takes the answer to the question for overrides, if it has come. Returns whether it has.
    fn take_overrides(&mut self, cx: &mut Context<'_>) -> Result<bool, BackendError> {
        let Some(refresh) = &mut self.refresh else { return Ok(false) };
        let Poll::Ready(answer) = refresh.answer.as_mut().poll(cx) else { return Ok(false) };
        let heard = self.check_answer(&answer);
        if let Some(refresh) = self.refresh.take() {
            refresh.end(self.node, answer);
        }
        heard.map(|()| true)
    }

    /// Takes the answers to messages. Returns whether there were any.
    fn take_messages(&mut self, cx: &mut Context<'_>) -> Result<bool, BackendError> {
        let mut any = false;
        while let Poll::Ready(Some(answer)) = self.messages.poll_next_unpin(cx) {
            self.check_answer(&answer)?;
            any = true;
        }
        Ok(any)
    }

    /// Takes the answers to writes. Returns whether there were any.
    fn take_answers(&mut self, cx: &mut Context<'_>) -> Result<bool, BackendError> {
        let mut any = false;
        while let Poll::Ready(Some((batch, part))) = self.answers.poll_next_unpin(cx) {
            match part.transpose()? {
                Some(answers) => self.take_part(batch, answers),
                None if self.batches.contains_key(&batch) => {
                    return Err(BackendError::connection("calls were left unanswered"));
                }
                None => continue,
            }
            any = true;
        }
        Ok(any)
    }

    /// Takes the answers that came before the connection was closed. Returns the error that ends it.
    fn take_last_answers(&mut self) -> BackendError {
        let taken = poll_fn(|cx| Poll::Ready(self.take_answers(cx)));
        // Unconstrained: Tokio's budget for this task may be used up, and no answer may be missed.
        match pin!(unconstrained(taken)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(error)) => error,
            Poll::Ready(Ok(_)) | Poll::Pending => closed(),
        }
    }

    /// Takes some of the answers to a batch. What is not answered stays, so that `end` notifies its sessions.
    fn take_part(&mut self, number: u64, answers: Vec<(usize, Answer)>) {
        let Entry::Occupied(mut entry) = self.batches.entry(number) else { return };
        self.answered_at = Instant::now();
        self.server.on_answer(self.answered_at);
        let batch = entry.get_mut();
        let was_silent = batch.is_silent;
        let Taken { woken, cost } = batch.take_answers(self.node, answers);
        self.woken += woken;
        *self.unanswered.of(batch.purpose) -= cost;
        if was_silent {
            // Those behind the first are slow for their names' sake, not for the server's.
            self.window.on_answer(cost, batch.sent, self.answered_at);
            (self.silent, self.answered) = (self.silent - 1, self.answered + 1);
        }
        if batch.is_answered() {
            entry.remove();
        }
    }

    /// Checks by an answer, or its absence, whether the connection works.
    fn check_answer<T>(
        &mut self,
        answer: &Result<Result<T, QueryError>, Elapsed>,
    ) -> Result<(), BackendError> {
        let now = Instant::now();
        match answer {
            Ok(answer) => match answer.as_ref().err().and_then(QueryError::of_connection) {
                Some(error) => Err(error.clone()),
                None => {
                    self.answered_at = now;
                    Ok(())
                }
            },
            Err(_) if now < self.heard_at() + self.patience => Ok(()),
            Err(_) => Err(self.give_up()),
        }
    }

    /// Notifies the sessions whose calls remain unanswered.
    fn end(self) {
        let node = self.node;
        self.batches.into_values().for_each(|batch| batch.abandon(node));
        if let Some(refresh) = self.refresh {
            refresh.abandon(node);
        }
    }
}

pub(crate) fn closed() -> BackendError {
    BackendError::connection("the connection was closed")
}

pub(crate) fn unanswered(patience: Duration) -> BackendError {
    BackendError::connection(format!("no answer within {patience:?}"))
}
