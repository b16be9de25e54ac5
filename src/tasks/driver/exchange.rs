//! What goes over one connection to a server, and what comes back.
//!
//! Everything that has come since the last write goes out in the next one, as one call for each session and
//! operation. A write does not wait for the answer to the one before. A [window](super::window) bounds what is
//! unanswered by the time that the server takes to answer. What keeps leases alive goes first, in writes of its own and
//! in the order in which the leases end; it has half of the window, and requests the other half. When the connection breaks, each
//! session asks again for what went unanswered.
//!
//! A connection is given up when a call, a question for overrides, or one of an operator goes unanswered, and nothing
//! else was answered meanwhile, not even a part of a write.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, FuturesUnordered};
use tokio::sync::futures::Notified;
use tokio::task::coop::unconstrained;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::batch::Batch;
use super::subtasks::{Subtasks, Which};
use super::window::{Unanswered, Window};
use crate::backend::{Answer, Connection, QueryError};
use crate::error::BackendError;
use crate::node::overrides::refresh::Refresh;
use crate::node::server::outbox::Purpose;
use crate::node::{Node, Server};

/// The most unanswered writes, some of which are left to what keeps leases alive.
const WRITES_MAX: usize = 64;
const WRITES_KEPT: usize = 8;
/// How often to read the overrides, in case messages are lost or forbidden.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The most unanswered messages to other processes.
const MESSAGES_IN_FLIGHT_MAX: usize = 64;

/// The subtasks of an exchange. Where several are woken at once, they are polled in this order.
const SUBTASKS: usize = 7;
/// What drives the connection; see [`Connection::drive`].
const LINK: usize = 0;
const ANSWERS: usize = 1;
const REFRESH: usize = 2;
const OUTBOX: usize = 3;
const ALARM: usize = 4;
const MESSAGES: usize = 5;
const REFRESH_TIMER: usize = 6;

/// Why a connection is of no further use.
pub(crate) struct Broken {
    pub(crate) error: BackendError,
    /// It was not closed, but went unanswered.
    pub(crate) was_given_up: bool,
    /// How many writes were answered on it.
    pub(crate) answered: u64,
}

/// One connection, with everything that is unanswered on it.
struct Exchange<'a> {
    node: &'a Node,
    server: &'a Arc<Server>,
    connection: &'a Arc<dyn Connection>,
    /// How long to wait for an answer.
    patience: Duration,
    batches: VecDeque<Batch>,
    answers: FuturesOrdered<BoxFuture<'static, Result<Vec<Answer>, BackendError>>>,
    window: Window,
    unanswered: Unanswered,
    refresh: Option<Refresh>,
    /// Messages, and questions whose answer does not matter, only that there is one.
    messages: FuturesUnordered<BoxFuture<'static, Result<Result<(), QueryError>, Elapsed>>>,
    answered_at: Instant,
    answered: u64,
    was_given_up: bool,
    /// How many requests answers may have woken since the outbox was looked at.
    woken: usize,
}

/// Sends calls and takes answers, until the connection breaks or nothing is left to do.
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
        batches: VecDeque::new(),
        answers: FuturesOrdered::new(),
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

/// What an exchange waits for, beside the answers to what it sent.
struct Events<'e, 'a> {
    /// What drives the connection. Ready once that is closed.
    link: BoxFuture<'e, ()>,
    /// There may be something to send.
    came: Pin<&'e mut Notified<'a>>,
    /// When the first batch must be answered.
    alarm: Pin<&'e mut Sleep>,
    is_alarm_set: bool,
    /// When the overrides are to be read.
    refresh_timer: Pin<&'e mut Sleep>,
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
        };
        let mut poll = |woken| self.poll(&subtasks, &mut events, woken);
        poll_fn(|cx| subtasks.poll(cx, &mut poll)).await
    }

    /// Takes in what has come, and then sends what there is to send.
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
            // The first of those that were woken has something to send, and a runtime of several threads runs
            // this task next: each of the others would have a call of its own.
            subtasks.wake_after_others(OUTBOX);
            return Poll::Pending;
        }
        self.send_calls(subtasks);
        if let Some(first) = self.batches.front()
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

    /// Takes in what has come. Returns whether there may be something to send now.
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
            self.node.want_overrides();
            events.refresh_timer.as_mut().reset(Instant::now() + REFRESH_INTERVAL);
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
            Poll::Ready(()) => Err(self.take_the_last_answers()),
            Poll::Pending => Ok(()),
        }
    }

    /// Looks whether the first batch has gone unanswered for too long, if the alarm goes off.
    fn take_alarm(
        &mut self,
        subtasks: &Subtasks<SUBTASKS>,
        events: &mut Events<'_, '_>,
    ) -> Result<bool, BackendError> {
        let mut cx = subtasks.context(ALARM);
        if !events.is_alarm_set || events.alarm.as_mut().poll(&mut cx).is_pending() {
            return Ok(false);
        }
        // This process may have stood still, with the answers in the socket.
        self.drive(subtasks, events)?;
        let acts = self.take_answers(&mut subtasks.context(ANSWERS))?;
        // Usually it was set for a batch that was answered meanwhile; it is set again for the first one now.
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
                Purpose::Serve => WRITES_MAX - WRITES_KEPT,
            };
            while self.batches.len() < writes
                && let Some(batch) = self.collect(purpose)
            {
                self.answers.push_back(self.connection.send(batch.calls()));
                subtasks.wake(ANSWERS);
                *self.unanswered.of(purpose) += batch.cost;
                self.batches.push_back(batch);
            }
        }
    }

    /// Collects the calls of the next write, as far as there is room for them, if there are any.
    fn collect(&mut self, purpose: Purpose) -> Option<Batch> {
        if !self.server.outbox.has(purpose) {
            return None;
        }
        let sent = Instant::now();
        let of_this = *self.unanswered.of(purpose);
        let room = self.window.room(purpose, self.unanswered.all(), of_this);
        if room == 0 {
            self.window.is_full(purpose, sent);
            return None;
        }
        Batch::collect(self.node, self.server, purpose, room, sent)
    }

    /// Sends messages and questions. Returns when the next question for overrides is due, if it is not yet.
    fn send_questions(&mut self, subtasks: &Subtasks<SUBTASKS>) -> Option<Instant> {
        while self.messages.len() < MESSAGES_IN_FLIGHT_MAX
            && let Some((key, to, message)) = self.server.next_message()
        {
            let sending = self.connection.send_message(&key, to, &message);
            self.messages.push(Box::pin(timeout(self.patience, sending)));
            subtasks.wake(MESSAGES);
        }
        if self.server.take_doubt() {
            // Any answer will do, a redirection too.
            let overrides = &self.node.overrides;
            let question = self.connection.overrides(overrides.key(), overrides.version());
            let question = async { question.await.map(drop) };
            self.messages.push(Box::pin(timeout(self.patience, question)));
            subtasks.wake(MESSAGES);
        }
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

    /// Returns by when the first batch must be answered, if any is unanswered.
    fn first_is_due(&mut self) -> Result<Option<Instant>, BackendError> {
        let Some(first) = self.batches.front() else { return Ok(None) };
        let due = first.sent.max(self.heard_at()) + self.patience;
        if due <= Instant::now() { Err(self.give_up()) } else { Ok(Some(due)) }
    }

    /// When the server answered something last.
    fn heard_at(&self) -> Instant {
        self.connection.heard_at().map_or(self.answered_at, |at| at.max(self.answered_at))
    }

    fn give_up(&mut self) -> BackendError {
        self.was_given_up = true;
        unanswered(self.patience)
    }

    /// Takes the overrides, if they are there. Returns whether they are.
    fn take_overrides(&mut self, cx: &mut Context<'_>) -> Result<bool, BackendError> {
        let Some(refresh) = &mut self.refresh else { return Ok(false) };
        let Poll::Ready(answer) = refresh.answer.as_mut().poll(cx) else { return Ok(false) };
        let heard = self.hear(&answer);
        if let Some(refresh) = self.refresh.take() {
            refresh.end(self.node, answer);
        }
        heard.map(|()| true)
    }

    /// Hears of messages that have arrived or failed. Returns whether there were any.
    fn take_messages(&mut self, cx: &mut Context<'_>) -> Result<bool, BackendError> {
        let mut any = false;
        while let Poll::Ready(Some(answer)) = self.messages.poll_next_unpin(cx) {
            self.hear(&answer)?;
            any = true;
        }
        Ok(any)
    }

    /// Takes the answers that are there. Returns whether there were any.
    fn take_answers(&mut self, cx: &mut Context<'_>) -> Result<bool, BackendError> {
        let mut any = false;
        while let Poll::Ready(Some(answer)) = self.answers.poll_next_unpin(cx) {
            self.take_answer(answer)?;
            any = true;
        }
        Ok(any)
    }

    /// Takes the answers that came before the connection was closed. Returns why it ends.
    fn take_the_last_answers(&mut self) -> BackendError {
        let taken = poll_fn(|cx| Poll::Ready(self.take_answers(cx)));
        // However much was polled before: what was answered counts.
        match pin!(unconstrained(taken)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(error)) => error,
            Poll::Ready(Ok(_)) | Poll::Pending => closed(),
        }
    }

    fn take_answer(
        &mut self,
        answer: Result<Vec<Answer>, BackendError>,
    ) -> Result<(), BackendError> {
        // Removed only once it is answered: the sessions ask again for the rest.
        let answers = answer?;
        if let Some(batch) = self.batches.pop_front() {
            self.answered_at = Instant::now();
            self.answered += 1;
            self.server.hear(self.answered_at);
            *self.unanswered.of(batch.purpose) -= batch.cost;
            self.window.answered(batch.cost, batch.sent, self.answered_at);
            self.woken += batch.take_answers(self.node, answers);
        }
        Ok(())
    }

    /// Learns from an answer, or from its absence, whether the connection works.
    fn hear<T>(
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

    /// Tells the sessions that their calls go unanswered.
    fn end(self) {
        let node = self.node;
        self.batches.into_iter().for_each(|batch| batch.abandon(node));
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
