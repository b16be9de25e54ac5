//! The task that drives the connection to one server.
//!
//! Whatever came since the last time goes in one write: one call for each session and operation.
//! Nothing waits for the answer to the write before. What is on its way at a time is bounded, so that
//! the time of an answer does not depend on how much there is to be said: what keeps leases alive goes
//! out in the order in which they end, and a request never waits behind more of it than is on its way.
//! When the connection breaks, each session asks again for what went unanswered.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, OptionFuture};
use futures_util::stream::{FuturesOrdered, FuturesUnordered};
use tokio::time::{Instant, sleep, timeout};

use super::node::{Node, Server};
use super::sessions::SESSIONS_AT_A_TIME;
use super::shared_session::SharedSession;
use crate::backend::{AddressedCall, Answer, Connection, Overrides, QueryError};
use crate::error::BackendError;

/// Writes that are not answered yet, at the most.
const WRITES_MAX: usize = 64;
/// What a call costs the server, as places go: the script itself as much as so many of them.
const CALL_COST: usize = 8;
/// What goes out in one write, and what may be unanswered at a time: about 100 and 450 calls to keep
/// leases alive, 900 and 3600 in all.
const BACKGROUND: Window = Window { write: 1024, unanswered: 4096 };
const ALL: Window = Window { write: 8192, unanswered: 32_768 };
/// Pauses between attempts to connect: from the first to the longest. After a loss of data a process
/// may be so much later than another one to have its permits counted again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(250));
/// How often to read what operators set, for messages that are lost or forbidden.
const REFRESH: Duration = Duration::from_secs(1);
/// How long a connection to another server than the one that keeps overrides waits for them.
const OVERRIDES_TIMEOUT: Duration = Duration::from_millis(250);
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

/// A question for what operators set, with the sessions that wait for its answer.
struct Refresh {
    answer: BoxFuture<
        'static,
        Result<Result<Option<Overrides>, QueryError>, tokio::time::error::Elapsed>,
    >,
    question: u64,
    checking: Vec<Arc<SharedSession>>,
}

/// Keeps a connection to one server and sends over it, until the node is closed and empty, or that
/// server is not one of the backend's any more.
pub(super) async fn run(node: Arc<Node>, server: Arc<Server>) {
    let mut backoff = BACKOFF.0;
    loop {
        let connected = connect(&node, &server).await;
        let is_away = !matches!(connected, Ok(Some(_)));
        match connected {
            Ok(Some(connection)) => {
                let opened = Instant::now();
                announce(&node, &server, &connection).await;
                let Err(error) = serve(&node, &server, &connection).await else { break };
                server.disconnected(&error);
                // Not yet a reason to turn anyone away; nor to wait, unless it happens all the time.
                if opened.elapsed() > BACKOFF.1 {
                    backoff = BACKOFF.0;
                    continue;
                }
            }
            Ok(None) => {
                node.rehome_all(&server).await;
                // Perhaps it kept what operators set: then another one does now.
                want_overrides(&node);
                if node.servers.end(&server) {
                    break;
                }
            }
            Err(error) => {
                node.rehome_all(&server).await;
                unreachable(&node, &server, &error).await;
            }
        }
        let was_closed = node.is_closed();
        if is_away && was_closed && node.give_up(&server) {
            break;
        }
        tokio::select! {
            biased;
            () = closed(&node, &server), if !was_closed => {}
            () = sleep(node.jittered(backoff)) => {}
        }
        backoff = (backoff * 2).min(BACKOFF.1);
    }
    // Perhaps there is nothing left to do for the others.
    if node.is_finished() {
        node.wake_tasks();
    }
}

/// A connection, by which it is known already what operators set: what goes out first goes by that.
async fn connect(
    node: &Node,
    server: &Server,
) -> Result<Option<Arc<dyn Connection>>, BackendError> {
    let Some(connection) = node.backend().connect(server.shard()).await? else { return Ok(None) };
    if node.keeps_overrides(server) {
        let mut refresh = begin_refresh(node, &connection);
        let answer = (&mut refresh.answer).await;
        let broken = match &answer {
            Ok(Err(QueryError::Failed(error))) if error.is_connection() => Some(error.clone()),
            Ok(_) => None,
            Err(_) => Some(unanswered(node.backend().response_timeout())),
        };
        end_refresh(node, answer, refresh.question, refresh.checking);
        if let Some(error) = broken {
            return Err(error);
        }
    } else if !node.overrides.was_read() && !node.is_closed() {
        // Unless the server that keeps them is away, they are known then too.
        let _ = timeout(OVERRIDES_TIMEOUT, node.catch_up()).await;
    }
    Ok(Some(connection))
}

/// Tells all sessions of the server that there is a new connection.
async fn announce(node: &Node, server: &Arc<Server>, connection: &Arc<dyn Connection>) {
    let connected = server.connected(connection);
    for (count, shared) in node.sessions.on(server).into_iter().enumerate() {
        node.announce(&shared, connected);
        if count % SESSIONS_AT_A_TIME == SESSIONS_AT_A_TIME - 1 {
            tokio::task::yield_now().await;
        }
    }
}

/// There is no connection to be had for now: the policy answers. Sessions are told once.
async fn unreachable(node: &Node, server: &Arc<Server>, error: &BackendError) {
    if server.unreachable(error) {
        for shared in server.outbox.clear() {
            let mut state = shared.lock();
            // One that moved meanwhile stands in the outbox of its new server.
            if Arc::ptr_eq(&state.server, server) {
                state.queued = None;
            }
        }
        for (count, shared) in node.sessions.on(server).into_iter().enumerate() {
            node.act(&shared, node.now(), |session, now| {
                if !session.is_outage() {
                    session.handle_unreachable(now);
                }
            });
            if count % SESSIONS_AT_A_TIME == SESSIONS_AT_A_TIME - 1 {
                tokio::task::yield_now().await;
            }
        }
    }
    if node.keeps_overrides(server) {
        settle(node, node.overrides.take_checking());
    }
}

/// Until the connection breaks, or nothing is left to do.
async fn serve(
    node: &Node,
    server: &Arc<Server>,
    connection: &Arc<dyn Connection>,
) -> Result<(), BackendError> {
    let patience = node.backend().response_timeout();
    let mut answers = FuturesOrdered::new();
    let mut batches: VecDeque<Batch> = VecDeque::new();
    let mut on_its_way = Cost::default();
    let mut messages = FuturesUnordered::new();
    let mut refresh: Option<Refresh> = None;
    // These are for the whole connection: to make them again for each answer costs more than the rest.
    let mut closed = pin!(connection.closed());
    let mut alarm = pin!(sleep(patience));
    let mut is_set = false;
    // A server that answers at all is there: what is on its way may take longer than one answer.
    let mut answered_at = Instant::now();
    let mut refresh_timer = pin!(sleep(REFRESH));
    let error = loop {
        while batches.len() < WRITES_MAX {
            let sent = Instant::now();
            let batch = collect(node, server, on_its_way, sent);
            if batch.calls.is_empty() {
                break;
            }
            answers.push_back(connection.send(Arc::clone(&batch.calls)));
            on_its_way.background += batch.cost.background;
            on_its_way.all += batch.cost.all;
            batches.push_back(batch);
            if !std::mem::replace(&mut is_set, true) {
                alarm.as_mut().reset(sent + patience);
            }
        }
        if refresh.is_none()
            && let Some(due) = node.overrides.due(Instant::now())
            && node.keeps_overrides(server)
        {
            if due <= Instant::now() {
                refresh = Some(begin_refresh(node, connection));
            } else if due < refresh_timer.deadline() {
                refresh_timer.as_mut().reset(due);
            }
        }
        while messages.len() < MESSAGES_IN_FLIGHT_MAX
            && let Some((key, to, message)) = server.next_message()
        {
            messages.push(timeout(patience, connection.send_message(&key, to, &message)));
        }
        if batches.is_empty() && node.is_finished() {
            return Ok(());
        }
        let refreshed = OptionFuture::from(refresh.as_mut().map(|refresh| &mut refresh.answer));
        tokio::select! {
            biased;
            Some(answer) = answers.next() => {
                let Some(batch) = batches.pop_front() else { continue };
                match answer {
                    Ok(answers) => {
                        answered_at = Instant::now();
                        on_its_way.background -= batch.cost.background;
                        on_its_way.all -= batch.cost.all;
                        answered(node, &batch, answers);
                    }
                    Err(error) => {
                        batches.push_front(batch);
                        break error;
                    }
                }
            }
            () = &mut closed => break BackendError::connection("the connection was closed"),
            Some(answer) = refreshed => {
                if let Some(Refresh { question, checking, .. }) = refresh.take() {
                    end_refresh(node, answer, question, checking);
                }
            }
            () = server.outbox.came() => {}
            // Set for a batch that was answered meanwhile, most often: then for the one that is first now.
            () = &mut alarm, if is_set => match batches.front().map(|b| b.sent.max(answered_at) + patience) {
                Some(due) if due <= Instant::now() => {
                    break unanswered(patience);
                }
                Some(due) => alarm.as_mut().reset(due),
                None => is_set = false,
            },
            Some(_) = messages.next() => {}
            () = &mut refresh_timer => {
                want_overrides(node);
                refresh_timer.as_mut().reset(Instant::now() + REFRESH);
            }
        }
    };
    for batch in batches {
        let now = Instant::now();
        for (call, sender) in batch.calls.iter().zip(&batch.senders) {
            node.counts.meter.unanswered(&call.op, now - batch.sent);
            node.act_in(sender, node.clock.time(now), None, |session, _| {
                session.handle_unanswered(&call.op)
            });
        }
    }
    if let Some(refresh) = refresh {
        node.overrides.ended(refresh.question, refresh.checking);
    }
    Err(error)
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
        calls.push(super::shared_session::call_of(Arc::clone(shared.key()), node.id(), call));
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

// ===== overrides =====

fn begin_refresh(node: &Node, connection: &Arc<dyn Connection>) -> Refresh {
    let (question, checking) = node.overrides.begin();
    let answer = connection.overrides(node.overrides.key(), node.overrides.version());
    let answer = Box::pin(timeout(node.backend().response_timeout(), answer));
    Refresh { answer, question, checking }
}

fn end_refresh(
    node: &Node,
    answer: Result<Result<Option<Overrides>, QueryError>, tokio::time::error::Elapsed>,
    question: u64,
    checking: Vec<Arc<SharedSession>>,
) {
    let answer = match answer {
        Ok(Ok(news)) => Ok(news),
        Ok(Err(QueryError::Failed(error))) => Err(error),
        Ok(Err(QueryError::Moved)) => {
            node.overrides.moved(question, checking, Instant::now());
            return ask_keeper(node);
        }
        // The connection is given up before long, and the next one begins with the question.
        Err(_) => return node.overrides.ended(question, checking),
    };
    let news = node.overrides.answered(question, answer);
    node.learn(&news, node.now());
    settle(node, checking);
}

/// The revocations are known to these sessions.
fn settle(node: &Node, checking: Vec<Arc<SharedSession>>) {
    for shared in checking {
        node.act(&shared, node.now(), |session, now| session.handle_revocations_known(now));
    }
}

/// It is time to ask, if any semaphore was used.
fn want_overrides(node: &Node) {
    if !node.is_closed() && node.sessions.were_used() {
        node.overrides.want();
        ask_keeper(node);
    }
}

/// Wakes the driver of the server that keeps what operators set; every driver does, so that there is one.
fn ask_keeper(node: &Node) {
    if !node.is_closed() {
        node.keeper().outbox.wake();
    }
}

fn unanswered(patience: Duration) -> BackendError {
    BackendError::connection(format!("no answer within {patience:?}"))
}

async fn closed(node: &Node, server: &Server) {
    while !node.is_closed() {
        server.outbox.came().await;
    }
}
