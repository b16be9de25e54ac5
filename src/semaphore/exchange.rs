//! What goes over one connection to a server, and what comes back.
//!
//! Whatever came since the last time goes in one write: one call for each session and operation.
//! Nothing waits for the answer to the write before. What is on its way at a time is bounded, so that
//! the time of an answer does not depend on how much there is to be said: what keeps leases alive goes
//! out in the order in which they end, and a request never waits behind more of it than is on its way.
//! When the connection breaks, each session asks again for what went unanswered.
//!
//! A server that answers at all is there. A connection over which something was asked in vain, and nothing
//! was answered meanwhile, is given up: be it a call, a question for overrides, or one of an operator.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, OptionFuture};
use futures_util::stream::{FuturesOrdered, FuturesUnordered};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout};

use super::node::{Node, Server};
use super::refresh::{self, Refresh};
use super::shared_session::{SharedSession, call_of};
use crate::backend::{AddressedCall, Answer, Connection, QueryError};
use crate::error::BackendError;

/// Writes that are not answered yet, at the most.
const WRITES_MAX: usize = 64;
/// What a call costs the server, as places go: the script itself as much as so many of them.
const CALL_COST: usize = 8;
/// What goes out in one write, and what may be unanswered at a time: about 100 and 450 calls to keep
/// leases alive, 900 and 3600 in all.
const BACKGROUND: Window = Window { write: 1024, unanswered: 4096 };
const ALL: Window = Window { write: 8192, unanswered: 32_768 };
/// How often to read what operators set, for messages that are lost or forbidden.
const REFRESH: Duration = Duration::from_secs(1);
/// Messages to other processes that are on their way at a time.
const MESSAGES_IN_FLIGHT_MAX: usize = 64;

/// Bounds on what is sent, as the server's work goes.
#[derive(Clone, Copy)]
struct Window {
    write: usize,
    unanswered: usize,
}

/// What went out in one write.
struct Batch {
    calls: Arc<[AddressedCall]>,
    senders: Vec<(Arc<SharedSession>, u64)>,
    sent: Instant,
    cost: Cost,
}

#[derive(Clone, Copy, Default)]
struct Cost {
    background: usize,
    all: usize,
}

/// One connection, with what is on its way.
struct Exchange<'a> {
    node: &'a Node,
    server: &'a Arc<Server>,
    connection: &'a Arc<dyn Connection>,
    /// How long an answer is waited for.
    patience: Duration,
    batches: VecDeque<Batch>,
    answers: FuturesOrdered<BoxFuture<'static, Result<Vec<Answer>, BackendError>>>,
    on_its_way: Cost,
    refresh: Option<Refresh>,
    /// Messages, and other questions whose answers say only that the server is there.
    messages: FuturesUnordered<BoxFuture<'static, Result<Result<(), QueryError>, Elapsed>>>,
    answered_at: Instant,
}

/// Sends and takes answers, until the connection breaks, or nothing is left to do.
pub(super) async fn run(
    node: &Node,
    server: &Arc<Server>,
    connection: &Arc<dyn Connection>,
) -> Result<(), BackendError> {
    let mut exchange = Exchange {
        node,
        server,
        connection,
        patience: node.backend().response_timeout(),
        batches: VecDeque::new(),
        answers: FuturesOrdered::new(),
        on_its_way: Cost::default(),
        refresh: None,
        messages: FuturesUnordered::new(),
        answered_at: Instant::now(),
    };
    let result = exchange.run().await;
    exchange.end();
    result
}

impl Exchange<'_> {
    async fn run(&mut self) -> Result<(), BackendError> {
        // These are for the whole connection: to make them again for each answer costs more than the rest.
        let mut closed = pin!(self.connection.closed());
        let mut alarm = pin!(sleep(self.patience));
        let mut is_set = false;
        let mut refresh_timer = pin!(sleep(REFRESH));
        loop {
            self.send_calls();
            if let Some(first) = self.batches.front()
                && !std::mem::replace(&mut is_set, true)
            {
                alarm.as_mut().reset(first.sent + self.patience);
            }
            if let Some(due) = self.send_questions()
                && due < refresh_timer.deadline()
            {
                refresh_timer.as_mut().reset(due);
            }
            if self.batches.is_empty() && self.node.is_finished() {
                return Ok(());
            }
            let refreshed =
                OptionFuture::from(self.refresh.as_mut().map(|refresh| &mut refresh.answer));
            tokio::select! {
                biased;
                Some(answer) = self.answers.next() => self.take_answer(answer)?,
                () = &mut closed => {
                    return Err(BackendError::connection("the connection was closed"));
                }
                Some(answer) = refreshed => {
                    let heard = self.hear(&answer);
                    if let Some(refresh) = self.refresh.take() {
                        refresh.end(self.node, answer);
                    }
                    heard?;
                }
                () = self.server.outbox.came() => {}
                // Set for a batch that was answered meanwhile, most often: then for the one that is first
                // now.
                () = &mut alarm, if is_set => match self.batches.front() {
                    Some(first) => {
                        let due = first.sent.max(self.answered_at) + self.patience;
                        if due <= Instant::now() {
                            return Err(unanswered(self.patience));
                        }
                        alarm.as_mut().reset(due);
                    }
                    None => is_set = false,
                },
                Some(answer) = self.messages.next() => self.hear(&answer)?,
                () = &mut refresh_timer => {
                    refresh::want(self.node);
                    refresh_timer.as_mut().reset(Instant::now() + REFRESH);
                }
            }
        }
    }

    fn send_calls(&mut self) {
        while self.batches.len() < WRITES_MAX {
            let batch = collect(self.node, self.server, self.on_its_way, Instant::now());
            if batch.calls.is_empty() {
                break;
            }
            self.answers.push_back(self.connection.send(Arc::clone(&batch.calls)));
            self.on_its_way.background += batch.cost.background;
            self.on_its_way.all += batch.cost.all;
            self.batches.push_back(batch);
        }
    }

    /// Sends what belongs to no place. Says when the next question for overrides is due, if it is not yet.
    fn send_questions(&mut self) -> Option<Instant> {
        while self.messages.len() < MESSAGES_IN_FLIGHT_MAX
            && let Some((key, to, message)) = self.server.next_message()
        {
            let sending = self.connection.send_message(&key, to, &message);
            self.messages.push(Box::pin(timeout(self.patience, sending)));
        }
        if self.server.take_doubt() {
            // Any answer will do, a redirection too.
            let overrides = &self.node.overrides;
            let question = self.connection.overrides(overrides.key(), overrides.version());
            let question = async { question.await.map(drop) };
            self.messages.push(Box::pin(timeout(self.patience, question)));
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
        None
    }

    fn take_answer(
        &mut self,
        answer: Result<Vec<Answer>, BackendError>,
    ) -> Result<(), BackendError> {
        // Taken out once it is answered: what is left is asked for again.
        let answers = answer?;
        if let Some(batch) = self.batches.pop_front() {
            self.answered_at = Instant::now();
            self.on_its_way.background -= batch.cost.background;
            self.on_its_way.all -= batch.cost.all;
            answered(self.node, &batch, answers);
        }
        Ok(())
    }

    /// What a question says of the connection, whatever its answer.
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
            Err(_) if now < self.answered_at + self.patience => Ok(()),
            Err(_) => Err(unanswered(self.patience)),
        }
    }

    /// Nothing is answered any more.
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

/// What is to be sent there now, and may be.
fn collect(node: &Node, server: &Arc<Server>, on_its_way: Cost, sent: Instant) -> Batch {
    let (mut calls, mut senders, mut cost) = (Vec::new(), Vec::new(), Cost::default());
    let all = ALL.write.min(ALL.unanswered.saturating_sub(on_its_way.all));
    while cost.all < all
        && let Some(shared) = server.outbox.pop_now()
    {
        cost.all +=
            collect_of(node, server, shared, all - cost.all, sent, &mut calls, &mut senders);
    }
    let room = BACKGROUND.unanswered.saturating_sub(on_its_way.background);
    // Beside what requests wait for, and not after it: leases end whatever else there is to do.
    let background = BACKGROUND.write.min(room);
    while cost.background < background
        && let Some(shared) = server.outbox.pop_background()
    {
        let left = background - cost.background;
        cost.background += collect_of(node, server, shared, left, sent, &mut calls, &mut senders);
    }
    cost.all += cost.background;
    Batch { calls: calls.into(), senders, sent, cost }
}

/// What one session has to send, as far as there is room. Says what it costs the server.
pub(super) fn collect_of(
    node: &Node,
    server: &Arc<Server>,
    shared: Arc<SharedSession>,
    room: usize,
    sent: Instant,
    calls: &mut Vec<AddressedCall>,
    senders: &mut Vec<(Arc<SharedSession>, u64)>,
) -> usize {
    let mut state = shared.lock();
    // It may have been taken out before, or have gone elsewhere.
    if !Arc::ptr_eq(&state.server, server) || state.queued.take().is_none() {
        return 0;
    }
    let (stay, mut cost, now) = (state.stay, 0, node.clock.time(sent));
    while cost < room {
        let Some(call) = state.session.poll_call(now) else { return cost };
        cost += CALL_COST + call.op.places();
        calls.push(call_of(Arc::clone(shared.key()), node.id(), call));
        senders.push((Arc::clone(&shared), stay));
    }
    if let Some(urgency) = state.session.urgency() {
        state.queued = Some(urgency);
        drop(state);
        server.outbox.push(shared, urgency);
    }
    cost
}

fn answered(node: &Node, batch: &Batch, answers: Vec<Answer>) {
    let [sent, now] = [batch.sent, Instant::now()].map(|at| node.clock.time(at));
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
                node.act_in(sender, now, None, |session, now| {
                    session.handle_reply(&call.op, &reply, late, sent, now);
                });
            }
            Answer::Failed(error) => {
                node.counts.meter.answered(&call.op, false, after);
                node.counts.log_refused_call(shared.name(), &error);
                node.act_in(sender, now, Some(&error), |session, now| {
                    session.handle_call_error(&call.op, now);
                });
            }
        }
    }
    if node.counts.log_lost(false).is_some() {
        // The watchdog logs the rest.
        node.sessions.timers.wake();
    }
}

pub(super) fn unanswered(patience: Duration) -> BackendError {
    BackendError::connection(format!("no answer within {patience:?}"))
}
