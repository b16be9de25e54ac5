//! The one counter where all operations of a process meet, and go out together.
//!
//! Whatever came since the last time goes in one write: one call for each semaphore and operation.
//! Nothing waits for the answer to the write before. When the connection breaks, what was not
//! answered goes back to where it came from, and is asked for again on the next one.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use tokio::time::{Instant, sleep};

use super::node::{Ended, LOOK, Node};
use super::wire::{Sender, Wire};
use crate::backend::{Answer, Backend, Call, Lane};
use crate::error::BackendError;

/// Writes that are not answered yet, at the most.
const UNANSWERED_MAX: usize = 64;
/// Pauses between attempts to connect: from the first to the longest. After a loss of data that is
/// also how much later than a newcomer one that holds may be counted again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(250));

/// What went out in one write.
struct Batch {
    calls: Arc<[Call]>,
    senders: Vec<Sender>,
    sent: Instant,
}

/// Keeps a connection to one server and sends over it, until the node is closed and empty, or that
/// server is not one of the backend's any more.
pub(super) async fn run<B: Backend>(node: Arc<Node>, wire: Arc<Wire>, backend: Arc<B>) -> Ended {
    let mut backoff = BACKOFF.0;
    loop {
        let connected = connect(&node, &wire, &*backend).await;
        let is_away = !matches!(connected, Ok(Some(_)));
        match connected {
            Ok(Some(lane)) => {
                let opened = Instant::now();
                node.connected(&wire, lane.server());
                let timeout = backend.response_timeout();
                let Err(error) = serve(&node, &wire, &lane, timeout).await else {
                    break;
                };
                node.disconnected(&wire, &error);
                // Not yet a reason to turn anyone away; nor to wait, unless it happens all the time.
                if opened.elapsed() > BACKOFF.1 {
                    backoff = BACKOFF.0;
                    continue;
                }
            }
            Ok(None) => {
                node.rehome_all(&wire);
                if node.end(&wire) {
                    return Ended::Alone;
                }
            }
            Err(error) => {
                node.rehome_all(&wire);
                node.unreachable(&wire, &error);
            }
        }
        // What is still to be given back then ends with its lease.
        if is_away && node.is_closed() {
            node.give_up(&wire);
            break;
        }
        tokio::select! {
            () = sleep(jittered(backoff)) => {}
            () = closed(&node, &wire) => {}
        }
        backoff = (backoff * 2).min(BACKOFF.1);
    }
    if !node.is_finished() {
        return Ended::Alone;
    }
    node.forget();
    Ended::WithNode
}

/// A connection, by which it is known already what operators set: what goes out first goes by that.
async fn connect<B: Backend>(
    node: &Arc<Node>,
    wire: &Wire,
    backend: &B,
) -> Result<Option<B::Lane>, BackendError> {
    let Some(lane) = backend.connect(wire.shard()).await? else { return Ok(None) };
    let Some((call, to)) = node.first_question(wire) else {
        node.read_overrides().await;
        return Ok(Some(lane));
    };
    let (sent, timeout) = (Instant::now(), backend.response_timeout());
    let answers = tokio::time::timeout(timeout, lane.send([call.clone()].into())).await;
    match answers.unwrap_or_else(|_| Err(unanswered(timeout))) {
        Ok(answers) => {
            let answer = answers.into_iter().next().unwrap_or(Answer::Moved);
            Node::answered(&call, to, answer, sent, Instant::now());
            Ok(Some(lane))
        }
        Err(error) => {
            Node::unanswered(&call, to, &error, sent);
            Err(error)
        }
    }
}

/// Until the connection breaks, or nothing is left to do.
async fn serve(
    node: &Arc<Node>,
    wire: &Arc<Wire>,
    lane: &impl Lane,
    timeout: Duration,
) -> Result<(), BackendError> {
    let mut answers = FuturesOrdered::new();
    let mut batches: VecDeque<Batch> = VecDeque::new();
    // Both are for the whole connection: to make them anew for each answer costs more than the rest.
    let mut closed = pin!(lane.closed());
    let mut alarm = pin!(sleep(timeout));
    let mut is_set = false;
    let mut look = pin!(sleep(LOOK));
    let error = loop {
        if batches.len() < UNANSWERED_MAX {
            let sent = Instant::now();
            let (calls, senders) = node.collect(wire, sent);
            if !calls.is_empty() {
                let calls: Arc<[Call]> = calls.into();
                answers.push_back(lane.send(Arc::clone(&calls)));
                batches.push_back(Batch { calls, senders, sent });
                if !std::mem::replace(&mut is_set, true) {
                    alarm.as_mut().reset(sent + timeout);
                }
            }
        }
        if batches.is_empty() && node.is_finished() {
            return Ok(());
        }
        tokio::select! {
            biased;
            Some(answer) = answers.next() => match (answer, batches.pop_front()) {
                (Ok(answers), Some(batch)) => {
                    let now = Instant::now();
                    for ((call, to), answer) in batch.calls.iter().zip(batch.senders).zip(answers) {
                        Node::answered(call, to, answer, batch.sent, now);
                    }
                    node.wake_to_tell();
                }
                (Err(error), batch) => {
                    batches.extend(batch);
                    batches.rotate_right(1);
                    break error;
                }
                (Ok(_), None) => {}
            },
            () = &mut closed => break BackendError::connection("the connection was closed"),
            () = wire.mail_came(), if batches.len() < UNANSWERED_MAX => {}
            // Set for a batch that was answered meanwhile, most often: then for the one that is first now.
            () = &mut alarm, if is_set => match batches.front().map(|batch| batch.sent + timeout) {
                Some(due) if due <= Instant::now() => {
                    break unanswered(timeout);
                }
                Some(due) => alarm.as_mut().reset(due),
                None => is_set = false,
            },
            () = &mut look => {
                node.look_for_overrides(wire);
                look.as_mut().reset(Instant::now() + LOOK);
            }
        }
    };
    // Backwards, because each goes to the front of what is to be sent.
    for batch in batches.into_iter().rev() {
        for (call, to) in batch.calls.iter().zip(batch.senders).rev() {
            Node::unanswered(call, to, &error, batch.sent);
        }
    }
    Err(error)
}

fn unanswered(timeout: Duration) -> BackendError {
    BackendError::connection(format!("no answer within {timeout:?}"))
}

async fn closed(node: &Node, wire: &Wire) {
    while !node.is_closed() {
        wire.mail_came().await;
    }
}

/// Between half of it and all of it, so that a fleet does not come back in step.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * fastrand::f64())
}
