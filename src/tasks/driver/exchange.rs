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
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, FuturesUnordered};
use tokio::task::coop::unconstrained;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout};

use super::subtasks::{Parts, Which};
use super::window::Window;
use crate::backend::{AddressedCall, Answer, Connection, QueryError};
use crate::error::BackendError;
use crate::node::overrides::refresh::{self, Refresh};
use crate::node::server::outbox::Purpose;
use crate::node::shared_session::{SharedSession, call_of};
use crate::node::{Node, Server};
use crate::protocol::Op;
use crate::protocol::Time;
use crate::protocol::session::Session;

/// The most unanswered writes, some of which are left to what keeps leases alive.
const WRITES_MAX: usize = 64;
const WRITES_KEPT: usize = 8;
/// The cost of a call without its places, as a number of places.
const CALL_COST: usize = 8;
/// How often to read the overrides, in case messages are lost or forbidden.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The most unanswered messages to other processes.
const MESSAGES_IN_FLIGHT_MAX: usize = 64;

/// The parts of an exchange. Where several are woken at once, they are polled in this order.
const PARTS: usize = 7;
/// What drives the connection; see [`Connection::drive`].
const LINK: usize = 0;
const ANSWERS: usize = 1;
const REFRESH: usize = 2;
const OUTBOX: usize = 3;
const ALARM: usize = 4;
const MESSAGES: usize = 5;
const REFRESH_TIMER: usize = 6;

/// The calls of one write.
struct Batch {
    calls: Arc<[AddressedCall]>,
    senders: Vec<(Arc<SharedSession>, u64)>,
    sent: Instant,
    /// The same, from which leases count.
    sent_at: Time,
    purpose: Purpose,
    /// In places, where a call counts as [`CALL_COST`] more.
    cost: usize,
}

/// Why a connection is of no further use.
pub(crate) struct Broken {
    pub(crate) error: BackendError,
    /// It was not closed, but went unanswered.
    pub(crate) was_given_up: bool,
    /// How many writes were answered on it.
    pub(crate) answered: u64,
}

/// What is unanswered, by purpose, in places.
#[derive(Clone, Copy, Default)]
struct Unanswered {
    keep_alive: usize,
    serve: usize,
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
    /// Messages, and other questions of which only matters that they are answered.
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

impl Exchange<'_> {
    async fn run(&mut self, mut link: BoxFuture<'_, ()>) -> Result<(), BackendError> {
        let (parts, outbox) = (Parts::<PARTS>::new(), &self.server.outbox);
        let mut came = pin!(outbox.came());
        let mut alarm = pin!(sleep(self.patience));
        let mut is_set = false;
        let mut refresh_timer = pin!(sleep(REFRESH_INTERVAL));
        let mut poll = |woken: Which| {
            let mut acts = woken.has(OUTBOX);
            if woken.has(LINK) && link.as_mut().poll(&mut parts.context(LINK)).is_ready() {
                return Poll::Ready(Err(self.take_the_last_answers()));
            }
            if woken.has(ANSWERS) {
                acts |= self.take_answers(&mut parts.context(ANSWERS))?;
            }
            if woken.has(REFRESH) {
                acts |= self.take_overrides(&mut parts.context(REFRESH))?;
            }
            while woken.has(OUTBOX) && came.as_mut().poll(&mut parts.context(OUTBOX)).is_ready() {
                came.set(outbox.came());
            }
            if woken.has(ALARM)
                && is_set
                && alarm.as_mut().poll(&mut parts.context(ALARM)).is_ready()
            {
                // This process may have stood still, with the answers in the socket.
                if link.as_mut().poll(&mut parts.context(LINK)).is_ready() {
                    return Poll::Ready(Err(self.take_the_last_answers()));
                }
                acts |= self.take_answers(&mut parts.context(ANSWERS))?;
                // Usually set for a batch that was answered meanwhile; then reset for the first one now.
                let due = self.first_is_due()?;
                is_set = due.is_some();
                if let Some(due) = due {
                    alarm.as_mut().reset(due);
                    parts.wake(ALARM);
                }
            }
            if woken.has(MESSAGES) {
                acts |= self.take_messages(&mut parts.context(MESSAGES))?;
            }
            if woken.has(REFRESH_TIMER)
                && refresh_timer.as_mut().poll(&mut parts.context(REFRESH_TIMER)).is_ready()
            {
                refresh::want(self.node);
                refresh_timer.as_mut().reset(Instant::now() + REFRESH_INTERVAL);
                parts.wake(REFRESH_TIMER);
                acts = true;
            }
            if !acts {
                return Poll::Pending;
            }
            if woken.has(OUTBOX) && std::mem::take(&mut self.woken) > 1 {
                // The first of those that were woken has something to send, and a runtime of several threads runs
                // this task next: each of the others would have a call of its own.
                parts.wake_after_others(OUTBOX);
                return Poll::Pending;
            }
            self.send_calls(&parts);
            if let Some(first) = self.batches.front()
                && !std::mem::replace(&mut is_set, true)
            {
                alarm.as_mut().reset(first.sent + self.patience);
                parts.wake(ALARM);
            }
            if let Some(due) = self.send_questions(&parts)
                && due < refresh_timer.deadline()
            {
                refresh_timer.as_mut().reset(due);
                parts.wake(REFRESH_TIMER);
            }
            if self.batches.is_empty() && self.node.is_finished() {
                return Poll::Ready(Ok(()));
            }
            Poll::Pending
        };
        poll_fn(|cx| parts.poll(cx, &mut poll)).await
    }

    fn send_calls(&mut self, parts: &Parts<PARTS>) {
        for purpose in Purpose::ALL {
            let writes = match purpose {
                Purpose::KeepAlive => WRITES_MAX,
                Purpose::Serve => WRITES_MAX - WRITES_KEPT,
            };
            while self.batches.len() < writes
                && let Some(batch) = self.collect(purpose)
            {
                self.answers.push_back(self.connection.send(Arc::clone(&batch.calls)));
                parts.wake(ANSWERS);
                *self.unanswered.of(purpose) += batch.cost;
                self.batches.push_back(batch);
            }
        }
    }

    /// Collects the calls of the next write, as far as there is room for them, if there are any.
    fn collect(&mut self, purpose: Purpose) -> Option<Batch> {
        let (node, server) = (self.node, self.server);
        if !server.outbox.has(purpose) {
            return None;
        }
        let sent = Instant::now();
        let sent_at = node.clock.time(sent);
        let of_this = *self.unanswered.of(purpose);
        let room = self.window.room(purpose, self.unanswered.all(), of_this);
        if room == 0 {
            self.window.is_full(purpose, sent);
            return None;
        }
        let (mut calls, mut senders, mut cost) = (Vec::new(), Vec::new(), 0);
        while cost < room
            && let Some(shared) = server.outbox.pop(purpose)
        {
            let collected = Collected { calls: &mut calls, senders: &mut senders };
            let room = room - cost;
            cost += collect_of(node, server, &shared, (purpose, room), sent_at, collected);
        }
        let calls = (!calls.is_empty()).then(|| calls.into())?;
        Some(Batch { calls, senders, sent, sent_at, purpose, cost })
    }

    /// Sends messages and questions. Returns when the next question for overrides is due, if it is not yet.
    fn send_questions(&mut self, parts: &Parts<PARTS>) -> Option<Instant> {
        while self.messages.len() < MESSAGES_IN_FLIGHT_MAX
            && let Some((key, to, message)) = self.server.next_message()
        {
            let sending = self.connection.send_message(&key, to, &message);
            self.messages.push(Box::pin(timeout(self.patience, sending)));
            parts.wake(MESSAGES);
        }
        if self.server.take_doubt() {
            // Any answer will do, a redirection too.
            let overrides = &self.node.overrides;
            let question = self.connection.overrides(overrides.key(), overrides.version());
            let question = async { question.await.map(drop) };
            self.messages.push(Box::pin(timeout(self.patience, question)));
            parts.wake(MESSAGES);
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
        parts.wake(REFRESH);
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
            self.woken += answered(self.node, &batch, answers);
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
        for batch in self.batches {
            let now = Instant::now();
            for (call, sender) in batch.calls.iter().zip(&batch.senders) {
                node.counts.meter.unanswered(&call.op, now - batch.sent);
                node.act_in(sender, node.clock.time(now), None, |session, _| {
                    session.handle_unanswered(&call.op)
                });
            }
        }
        if let Some(refresh) = self.refresh {
            refresh.abandon(node);
        }
    }
}

impl Unanswered {
    const fn of(&mut self, purpose: Purpose) -> &mut usize {
        match purpose {
            Purpose::KeepAlive => &mut self.keep_alive,
            Purpose::Serve => &mut self.serve,
        }
    }

    const fn all(self) -> usize {
        self.keep_alive + self.serve
    }
}

/// The calls of a write, and who makes them.
pub(crate) struct Collected<'a> {
    pub(crate) calls: &'a mut Vec<AddressedCall>,
    pub(crate) senders: &'a mut Vec<(Arc<SharedSession>, u64)>,
}

/// Collects the calls of one session for a purpose, as far as there is room. Returns their cost.
pub(crate) fn collect_of(
    node: &Node,
    server: &Arc<Server>,
    shared: &Arc<SharedSession>,
    (purpose, room): (Purpose, usize),
    now: Time,
    Collected { calls, senders }: Collected<'_>,
) -> usize {
    let mut state = shared.lock();
    // It may have been collected before, or have moved.
    if !Arc::ptr_eq(&state.server, server) || !state.queued.take(purpose) {
        return 0;
    }
    let (stay, mut cost) = (state.stay, 0);
    while cost < room {
        let most = (room - cost).saturating_sub(CALL_COST).max(CALL_COST);
        let call = match purpose {
            Purpose::KeepAlive => state.session.poll_keep_alive(most, now),
            Purpose::Serve => state.session.poll_serving(most, now),
        };
        let Some(call) = call else { break };
        cost += CALL_COST + call.op.places();
        calls.push(call_of(Arc::clone(shared.key()), node.id(), call));
        senders.push((Arc::clone(shared), stay));
    }
    state.enqueue(shared);
    cost
}

/// Passes answers to their sessions. Returns how many requests may have been woken.
fn answered(node: &Node, batch: &Batch, answers: Vec<Answer>) -> usize {
    let mut woken = 0;
    let (sent, now) = (batch.sent_at, node.clock.now());
    let after = now.since(sent);
    for ((call, sender), answer) in batch.calls.iter().zip(&batch.senders).zip(answers) {
        let (shared, stay) = sender;
        match answer {
            Answer::Moved => {
                let is_here = shared.lock().stay == *stay;
                if is_here {
                    node.rehome(shared, true);
                }
            }
            Answer::Reply { reply, late } => {
                node.counts.meter.answered(&call.op, true, after);
                node.counts.meter.replied(&call.op, &reply);
                woken += reply.granted.len();
                if let Op::Acquire { ids, .. } | Op::Release { ids } = &call.op {
                    woken += ids.len();
                }
                node.act_in(sender, now, None, |session, now| {
                    session.handle_reply(&call.op, &reply, late, sent, now);
                });
            }
            Answer::Failed(error) => {
                failed(node, sender, &call.op, &error, (now, after), Session::handle_call_error);
            }
            Answer::Refused(error) => {
                failed(node, sender, &call.op, &error, (now, after), Session::handle_call_refused);
            }
        }
    }
    if node.counts.log_lost(false).is_some() {
        // The watchdog logs the rest.
        node.sessions.timers.wake();
    }
    woken
}

/// Passes the failure of a call to its session.
fn failed(
    node: &Node,
    sender: &(Arc<SharedSession>, u64),
    op: &Op,
    error: &BackendError,
    (now, after): (Time, Duration),
    handle: fn(&mut Session, &Op, Time),
) {
    node.counts.meter.answered(op, false, after);
    node.counts.log_refused_call(sender.0.name(), error);
    node.act_in(sender, now, Some(error), |session, now| handle(session, op, now));
}

pub(crate) fn closed() -> BackendError {
    BackendError::connection("the connection was closed")
}

pub(crate) fn unanswered(patience: Duration) -> BackendError {
    BackendError::connection(format!("no answer within {patience:?}"))
}
