//! A connection to Redis: calls one way, answers and hints the other.
//!
//! The subscription to hints uses the same connection (RESP3). So a lost connection is noticed once, and replies and
//! hints arrive in the order in which Redis produced them.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all, ready, try_join_all};
use redis::{Cmd, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::task::coop::unconstrained;
use tokio::time::Instant;

use super::calls;
use super::cluster::Cluster;
use super::dial::Timeouts;
use super::endpoint::Endpoint;
use super::error::broken;
use super::multiplexed::{Driver, Multiplexed};
use super::queries::QueryCommand;
use super::scripts::By;
use super::sentinel::Sentinel;
use super::{error, queries};
use crate::backend::{
    AddressedCall, Answer, Answers, Change, Connection, InOrder, Listing, Names, Overrides,
    PeerMessage, Queries, Query, QueryError, ServerInfo, Shard,
};
use crate::error::BackendError;
use crate::protocol::{BoundRate, NodeId, PlaceId};

/// A connection to Redis.
pub(super) struct RedisConnection {
    pub(super) connection: Multiplexed,
    pub(super) server: ServerInfo,
    /// A batch that is sent again in part is answered before those behind it.
    pub(super) order: InOrder,
    /// Drives the connection, unless that has a task of its own: then it is not known when it is closed, and no hints
    /// arrive. Taken by [`drive`](Connection::drive).
    pub(super) driver: Mutex<Option<Driver>>,
    /// Set if the server is a node of a cluster.
    pub(super) member: Option<Member>,
    /// Set if sentinels named the server.
    pub(super) named: Option<Named>,
}

/// The most arguments in one part of a write, unless a single command has more. A server executes a part in a few
/// milliseconds, and each answered part shows that it is alive.
const PART_MAX: usize = 128;

/// A master that sentinels named.
#[derive(Clone)]
pub(super) struct Named {
    pub(super) by: Arc<Sentinel>,
    pub(super) server: Endpoint,
    pub(super) timeouts: Timeouts,
}

/// A node of a cluster.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) cluster: Arc<Cluster>,
    pub(super) node: Shard,
    pub(super) timeouts: Timeouts,
}

impl Connection for RedisConnection {
    fn server(&self) -> &ServerInfo {
        &self.server
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        // Without a driver it is not known when the connection is closed.
        let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner).take();
        let closed = driver.unwrap_or_else(|| std::future::pending().boxed());
        let Some(Named { by, server, timeouts }) = &self.named else { return closed };
        let replaced = by.replaced(server, *timeouts);
        async move {
            tokio::select! {
                biased;
                () = closed => {}
                () = replaced => {}
            }
        }
        .boxed()
    }

    fn heard_at(&self) -> Option<Instant> {
        self.connection.heard_at()
    }

    fn send(&self, calls: Arc<[AddressedCall]>) -> Answers {
        let (mut connection, member) = (self.connection.clone(), self.member.clone());
        self.order.answer(async move {
            let counted = member.is_none();
            let command = |i: usize, by| calls::command(&calls[i], by, counted);
            let (values, late) =
                run(&mut connection, member.as_ref(), calls.len(), command).await?;
            let mut answers = Vec::with_capacity(values.len());
            for (i, (call, value)) in calls.iter().zip(values).enumerate() {
                let answer = match value {
                    Value::ServerError(error) => {
                        let error = error.into();
                        let did_nothing = error::did_nothing(&error);
                        match failure(error, member.as_ref())? {
                            QueryError::Moved => Answer::Moved,
                            QueryError::Failed(error) if did_nothing => Answer::Refused(error),
                            QueryError::Failed(error) => Answer::Failed(error),
                        }
                    }
                    value => calls::answer(call, &value, late.contains(&i)),
                };
                answers.push((i, answer));
            }
            Ok(answers)
        })
    }
}

impl Queries for RedisConnection {
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing> {
        self.query(queries::inspect(key, most, rate))
    }

    fn list(&self, key: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        match from.map_or(Ok(0), |from| from.parse()) {
            Ok(from) => self.query(queries::list(key, from, most)),
            Err(_) => ready(Err(QueryError::of_position(from))).boxed(),
        }
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        let together = self.query(queries::overrides(key, known));
        if self.member.is_none() {
            return together;
        }
        let [set, pauses, adaptive] = queries::overrides_apart(key).map(|query| self.query(query));
        async move {
            match together.await {
                // Perhaps a node has some of the keys, and the others are where their slot migrates to.
                Err(QueryError::Moved) => {
                    let (set, pauses, adaptive) = (set.await?, pauses.await?, adaptive.await?);
                    Ok(Some(queries::put_together(set, pauses, adaptive)))
                }
                answer => answer,
            }
        }
        .boxed()
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.query(queries::set_override(key, name, change))
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.query(queries::revoke(key, id, take))
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.query(queries::send_message(key, to, message))
    }
}

impl RedisConnection {
    fn query<T: Send + 'static>(&self, query: QueryCommand<T>) -> Query<T> {
        let (mut connection, member) = (self.connection.clone(), self.member.clone());
        async move {
            let command = |_, by| (query.command)(by);
            let answered = run(&mut connection, member.as_ref(), 1, command).await;
            let (values, _) = answered.map_err(QueryError::Failed)?;
            match values.into_iter().next().unwrap_or(Value::Nil) {
                Value::ServerError(error) => {
                    let failure = failure(error.into(), member.as_ref());
                    Err(failure.unwrap_or_else(QueryError::Failed))
                }
                value => query.read(&value).map_err(QueryError::Failed),
            }
        }
        .boxed()
    }
}

/// Sends commands in one write, and repeats those that need it. Returns a value for each, which may be an error of the
/// server, and the indexes of those that may have been executed after commands that were sent later.
async fn run(
    connection: &mut Multiplexed,
    member: Option<&Member>,
    count: usize,
    command: impl Fn(usize, By) -> Cmd,
) -> Result<(Vec<Value>, Vec<usize>), BackendError> {
    let mut values = send(connection, (0..count).map(|i| command(i, By::Hash))).await?;
    // A script that the server does not know is sent again in full. Commands that were sent later may have been
    // executed before it: a release behind the next acquire once caused a false 429.
    let mut late: Vec<usize> =
        values.iter().enumerate().filter(|(_, v)| is_unknown(v)).map(|(i, _)| i).collect();
    if !late.is_empty() {
        let again = send(connection, late.iter().map(|i| command(*i, By::Text))).await?;
        for (i, value) in late.iter().zip(again) {
            values[*i] = value;
        }
    }
    if let Some(member) = member {
        late.extend(member.ask(&command, &mut values).await);
    }
    Ok((values, late))
}

/// Classifies an error of the server: it affects this call alone, or the connection.
fn failure(error: RedisError, member: Option<&Member>) -> Result<QueryError, BackendError> {
    match member {
        Some(member) => member.failure(error),
        None => error::failure(error).map(QueryError::Failed),
    }
}

impl Member {
    pub(super) fn is_master_of(&self, key: &str) -> bool {
        self.cluster.master(key) == self.node
    }

    /// Repeats calls whose slot is migrating, on the node that it migrates to. Returns the indexes of those that were
    /// answered there.
    async fn ask(&self, command: impl Fn(usize, By) -> Cmd, values: &mut [Value]) -> Vec<usize> {
        let mut asked = Vec::new();
        let mut nodes: Vec<(String, Vec<usize>)> = Vec::new();
        for (i, value) in values.iter().enumerate() {
            if let Value::ServerError(error) = value
                && error.kind() == Some(ServerErrorKind::Ask)
                && let Some(to) = error.details().and_then(|text| text.split(' ').nth(1))
            {
                match nodes.iter_mut().find(|(node, _)| node == to) {
                    Some((_, those)) => those.push(i),
                    None => nodes.push((to.to_owned(), vec![i])),
                }
            }
        }
        // Concurrently, because the rest of the batch waits for the slowest.
        let answers = join_all(nodes.iter().map(|(to, those)| {
            // Scripts in full, because that node may not know them.
            let commands = those.iter().map(|i| command(*i, By::Text)).collect();
            self.cluster.ask(to, &self.node, commands, self.timeouts)
        }));
        let answers = answers.await;
        for ((to, those), answers) in nodes.into_iter().zip(answers) {
            match answers {
                Ok(answers) => {
                    for (i, answer) in those.iter().zip(answers) {
                        values[*i] = answer;
                    }
                    asked.extend(those);
                }
                // The sessions are redirected, and repeat these calls soon.
                Err(error) => {
                    tracing::debug!(target: "tower_semaphore", %error, to, "the node that a slot is migrating to could not be asked")
                }
            }
        }
        asked
    }

    fn failure(&self, error: RedisError) -> Result<QueryError, BackendError> {
        match error.code() {
            Some("MOVED") => {
                if let Some((to, slot)) = error.redirect_node() {
                    self.cluster.on_moved(slot, to, &self.node);
                }
                Ok(QueryError::Moved)
            }
            Some("ASK" | "TRYAGAIN") => Ok(QueryError::Moved),
            // Only this slot is down; the others are served.
            Some("CLUSTERDOWN") if error.detail().is_some_and(|text| text.contains("slot")) => {
                let text = format!("the cluster refused: {error}");
                Ok(QueryError::Failed(BackendError::call(text).with_source(error)))
            }
            _ => error::failure(error).map(QueryError::Failed),
        }
    }
}

impl fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConnection").field("server", &self.server).finish_non_exhaustive()
    }
}

impl fmt::Debug for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Named").field("address", self.server.address()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Sends commands in one write. Returns a value for each, which may be an error of the server.
async fn send(
    connection: &mut Multiplexed,
    commands: impl ExactSizeIterator<Item = Cmd>,
) -> Result<Vec<Value>, BackendError> {
    let (mut parts, mut part, mut size) = (Vec::new(), Pipeline::with_capacity(commands.len()), 0);
    for command in commands {
        let more = command.args_iter().len();
        if size > 0 && size + more > PART_MAX {
            parts.push(std::mem::take(&mut part));
            size = 0;
        }
        size += more;
        part.add_command(command);
    }
    if parts.is_empty() {
        // Unconstrained, as below.
        return unconstrained(send_part(connection, part)).await;
    }
    parts.push(part);
    let parts = parts.into_iter().map(|part| {
        let mut connection = (*connection).clone();
        async move {
            let values = send_part(&mut connection, part).await?;
            connection.on_answer();
            Ok::<_, BackendError>(values)
        }
    });
    // Unconstrained: a part that yields before it is sent would be overtaken by the next, or by another write.
    Ok(unconstrained(try_join_all(parts)).await?.concat())
}

async fn send_part(
    connection: &mut Multiplexed,
    pipeline: Pipeline,
) -> Result<Vec<Value>, BackendError> {
    let count = pipeline.len();
    let values = connection.send_packed_commands(&pipeline, 0, count).await.map_err(broken)?;
    if values.len() == count {
        Ok(values)
    } else {
        Err(BackendError::connection("Redis sent fewer replies than commands"))
    }
}

fn is_unknown(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}
