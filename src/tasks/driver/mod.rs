//! The task that keeps a connection to one server, and notifies sessions when it opens and when it breaks.

pub(crate) mod batch;
mod exchange;
pub(crate) mod subtasks;
mod window;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, select};
use tokio::time::{Instant, sleep, timeout};

use self::exchange::{Broken, unanswered};
use crate::backend::{Connection, QueryError};
use crate::error::BackendError;
use crate::node::overrides::refresh::Refresh;
use crate::node::sessions::SESSIONS_AT_A_TIME;
use crate::node::shared_session::Queued;
use crate::node::{Node, Server};

/// The first and the longest pause between attempts to connect. After a loss of data, one process may have its permits
/// counted again later than another by this much.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(250));
/// A connection that answered and lived this long was of use: a break of it is no reason for a pause.
const USEFUL: Duration = Duration::from_secs(1);
/// How long a connection waits for the overrides of another server.
const OVERRIDES_TIMEOUT: Duration = Duration::from_millis(250);

/// Keeps a connection to one server and sends over it, until the node is closed and empty, or the server has left the
/// backend.
pub(crate) async fn run(node: Arc<Node>, server: Arc<Server>) {
    let mut backoff = BACKOFF.0;
    loop {
        let connected = match node.check_identity() {
            Ok(()) => node.backend().connect(server.shard()).await,
            Err(error) => Err(error),
        };
        let used = match connected {
            Ok(Some(connection)) => use_up(&node, &server, &connection).await.map(Some),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        let is_unreachable = !matches!(used, Ok(Some(_)));
        match used {
            Ok(Some(Used::Finished)) => break,
            Ok(Some(Used::Lost { opened, broken })) => {
                server.on_disconnected(&broken.error);
                if broken.answered > 0 && opened.elapsed() > USEFUL {
                    backoff = BACKOFF.0;
                    // One break is not an outage, and needs no pause. But if the server was too busy to answer, the
                    // fleet must not come back in step.
                    if !broken.was_given_up {
                        continue;
                    }
                }
            }
            Ok(None) => {
                node.rehome_all(&server).await;
                // If it kept the overrides, another server does now.
                node.want_overrides();
                if node.servers.end(&server) {
                    break;
                }
            }
            Err(error) => {
                node.rehome_all(&server).await;
                on_unreachable(&node, &server, &error).await;
            }
        }
        let was_closed = node.is_closed();
        if is_unreachable && was_closed && node.give_up(&server) {
            break;
        }
        tokio::select! {
            biased;
            () = closed(&node, &server), if !was_closed => {}
            () = sleep(node.jittered(backoff)) => {}
        }
        backoff = (backoff * 2).min(BACKOFF.1);
    }
    // The other tasks may have nothing left to do either.
    if node.is_finished() {
        node.wake_tasks();
    }
}

/// How the use of a connection ended.
enum Used {
    /// Nothing is left to do.
    Finished,
    Lost {
        opened: Instant,
        broken: Broken,
    },
}

/// Uses a connection until it breaks or nothing is left to do.
///
/// # Errors
///
/// If it breaks before the overrides are read.
async fn use_up(
    node: &Node,
    server: &Arc<Server>,
    connection: &Arc<dyn Connection>,
) -> Result<Used, BackendError> {
    let mut closed = connection.drive();
    read_overrides(node, server, connection, &mut closed).await?;
    let opened = Instant::now();
    // The socket is driven meanwhile: sessions may be many.
    let announced = pin!(announce(node, server, connection));
    if let Either::Right(((), announced)) = select(announced, &mut closed).await {
        announced.await;
        let broken = Broken { error: exchange::closed(), was_given_up: false, answered: 0 };
        return Ok(Used::Lost { opened, broken });
    }
    Ok(match exchange::run(node, server, connection, (&mut closed).boxed()).await {
        Ok(()) => {
            let finished = timeout(node.backend().response_timeout(), connection.finish());
            select(pin!(finished), closed).await;
            Used::Finished
        }
        Err(broken) => Used::Lost { opened, broken },
    })
}

/// Reads the overrides before anything else is sent over a connection, so that neither a restart nor a reconnect bypasses
/// a pause. A message that announced one while this connection was down may be lost.
async fn read_overrides(
    node: &Node,
    server: &Server,
    connection: &Arc<dyn Connection>,
    closed: &mut BoxFuture<'_, ()>,
) -> Result<(), BackendError> {
    let mut are_elsewhere = !node.keeps_overrides(server);
    if !are_elsewhere {
        let mut refresh = Refresh::begin(node, connection);
        let (answer, is_closed) = match select(&mut refresh.answer, closed).await {
            Either::Left((answer, _)) => (answer, false),
            // The answer is there already, or fails at once.
            Either::Right(((), answer)) => (answer.await, true),
        };
        let broken = match &answer {
            Ok(answer) => answer.as_ref().err().and_then(QueryError::of_connection).cloned(),
            Err(_) => Some(unanswered(node.backend().response_timeout())),
        };
        let broken = broken.or_else(|| is_closed.then(exchange::closed));
        are_elsewhere = matches!(answer, Ok(Err(QueryError::Moved)));
        refresh.end(node, answer);
        if let Some(error) = broken {
            return Err(error);
        }
    }
    if are_elsewhere && !node.is_closed() {
        let _ = timeout(OVERRIDES_TIMEOUT, catch_up(node)).await;
    }
    Ok(())
}

/// Asks the other server that keeps the overrides, also while that reconnects: both connections often break at once.
async fn catch_up(node: &Node) {
    while node.catch_up().await.is_err_and(|error| error.is_connection()) {
        sleep(BACKOFF.0).await;
    }
}

/// Notifies all sessions of the server of its new connection.
async fn announce(node: &Node, server: &Arc<Server>, connection: &Arc<dyn Connection>) {
    let connected = server.on_connected(connection);
    for (count, shared) in node.sessions.on(server).into_iter().enumerate() {
        node.announce(&shared, connected);
        if count % SESSIONS_AT_A_TIME == SESSIONS_AT_A_TIME - 1 {
            tokio::task::yield_now().await;
        }
    }
}

/// Notes that no connection can be opened, and notifies each session once. From then on their policies apply.
async fn on_unreachable(node: &Node, server: &Arc<Server>, error: &BackendError) {
    if server.on_unreachable(error) {
        for shared in server.outbox.clear() {
            let mut state = shared.lock();
            // A session that moved meanwhile is in the outbox of its new server.
            if Arc::ptr_eq(&state.server, server) {
                state.queued = Queued::default();
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
        node.settle_checks();
        node.overrides.forget_ended_pauses(node.now());
    }
}

async fn closed(node: &Node, server: &Server) {
    while !node.is_closed() {
        server.outbox.came().await;
    }
}
