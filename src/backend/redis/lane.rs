//! One connection to Redis: calls one way, answers and hints the other.
//!
//! The mailbox's subscription rides on the same connection (RESP3), so that there is one socket to
//! watch, and a lost one is noticed once.

use std::fmt;
use std::sync::Arc;

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{ConnectionInfo, Pipeline, RedisError, ServerErrorKind, Value};

use tokio::sync::watch;

use super::cluster::Cluster;
use super::dial::Patience;
use super::scripts;
use super::sentinel::Sentinel;
use crate::backend::{Answer, Call, Lane, Server, Shard};
use crate::error::BackendError;

/// A connection to Redis.
#[derive(Debug)]
pub struct RedisLane {
    pub(super) connection: MultiplexedConnection,
    pub(super) server: Server,
    /// Whether the connection was closed, where that shows.
    pub(super) closed: Option<watch::Receiver<bool>>,
    /// If the server is a node of a cluster.
    pub(super) member: Option<Member>,
    /// If the server is one that sentinels name.
    pub(super) named: Option<Named>,
}

/// A master by the word of sentinels.
#[derive(Clone)]
pub(super) struct Named {
    pub(super) by: Arc<Sentinel>,
    pub(super) info: ConnectionInfo,
    pub(super) patience: Patience,
}

/// A node of a cluster.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) cluster: Arc<Cluster>,
    pub(super) node: Shard,
    pub(super) patience: Patience,
}

impl Lane for RedisLane {
    fn server(&self) -> &Server {
        &self.server
    }

    async fn closed(&self) {
        let closed = async {
            let Some(closed) = &self.closed else { return std::future::pending().await };
            // An error says that nothing is left of the connection.
            let _ = closed.clone().wait_for(|closed| *closed).await;
        };
        let Some(Named { by, info, patience }) = &self.named else { return closed.await };
        tokio::select! {
            () = closed => {}
            () = by.replaced(info, *patience) => {}
        }
    }

    fn send(
        &self,
        calls: Arc<[Call]>,
    ) -> impl Future<Output = Result<Vec<Answer>, BackendError>> + Send + 'static {
        let mut connection = self.connection.clone();
        let member = self.member.clone();
        async move {
            let counted = member.is_none();
            let commands = calls.iter().map(|call| scripts::evalsha(call, counted));
            let mut values = send(&mut connection, commands).await?;

            // Scripts that this server does not know (any more) are sent whole. What was sent after
            // them may have been carried out before them.
            let mut late: Vec<usize> =
                values.iter().enumerate().filter(|(_, v)| is_unknown(v)).map(|(i, _)| i).collect();
            if !late.is_empty() {
                let whole = late.iter().map(|i| scripts::eval(&calls[*i], counted));
                let again = send(&mut connection, whole).await?;
                for (i, value) in late.iter().zip(again) {
                    values[*i] = value;
                }
            }
            if let Some(member) = &member {
                late.extend(member.ask(&calls, &mut values).await);
            }

            let mut answers = Vec::with_capacity(values.len());
            for (i, (call, value)) in calls.iter().zip(values).enumerate() {
                let mut answer = match (value, &member) {
                    (Value::ServerError(error), Some(member)) => member.failure(error.into())?,
                    (Value::ServerError(error), None) => failure(error.into())?,
                    (value, _) => scripts::decode(call, &value).unwrap_or_else(Answer::Failed),
                };
                if let Answer::Reply { late: is_late, .. } = &mut answer {
                    *is_late = late.contains(&i);
                }
                answers.push(answer);
            }
            Ok(answers)
        }
    }
}

impl Member {
    pub(super) fn is_master_of(&self, key: &str) -> bool {
        self.cluster.master(key) == self.node
    }

    /// What is on its way to another node is asked for there: says which calls that were. Nothing of
    /// them was done here.
    async fn ask(&self, calls: &[Call], values: &mut [Value]) -> Vec<usize> {
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
        for (to, those) in nodes {
            let calls: Vec<&Call> = those.iter().map(|i| &calls[*i]).collect();
            match self.cluster.ask(&to, &self.node, &calls, self.patience).await {
                Ok(answers) => {
                    for (i, answer) in those.iter().zip(answers) {
                        values[*i] = answer;
                    }
                    asked.extend(those);
                }
                // Asked for again from the start, before long.
                Err(error) => {
                    tracing::debug!(target: "tower_semaphore", %error, to, "a slot that moves cannot be asked for")
                }
            }
        }
        asked
    }

    fn failure(&self, error: RedisError) -> Result<Answer, BackendError> {
        match error.code() {
            Some("MOVED") => {
                if let Some((to, slot)) = error.redirect_node() {
                    self.cluster.moved(slot, to, &self.node);
                }
                Ok(Answer::Moved)
            }
            Some("ASK" | "TRYAGAIN") => Ok(Answer::Moved),
            // Of this slot alone; the others are served.
            Some("CLUSTERDOWN") if error.detail().is_some_and(|text| text.contains("slot")) => {
                let text = format!("the cluster refused: {error}");
                Ok(Answer::Failed(BackendError::call(text).with_source(error)))
            }
            _ => failure(error),
        }
    }
}

impl fmt::Debug for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Named").field("address", self.info.addr()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("node", &self.node).finish_non_exhaustive()
    }
}

/// One write; one value for each command, errors of the server among them.
async fn send(
    connection: &mut MultiplexedConnection,
    commands: impl ExactSizeIterator<Item = deadpool_redis::redis::Cmd>,
) -> Result<Vec<Value>, BackendError> {
    let count = commands.len();
    let mut pipeline = Pipeline::with_capacity(count);
    for command in commands {
        pipeline.add_command(command);
    }
    let values = connection.send_packed_commands(&pipeline, 0, count).await.map_err(broken)?;
    if values.len() == count {
        Ok(values)
    } else {
        Err(BackendError::connection("Redis gave fewer answers than it was asked"))
    }
}

fn is_unknown(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

/// An error of the server: of this call alone, or a sign that this server is of no use for now.
fn failure(error: RedisError) -> Result<Answer, BackendError> {
    const OF_NO_USE: [&str; 8] = [
        "LOADING",
        "BUSY",
        "READONLY",
        "MASTERDOWN",
        "NOAUTH",
        "CLUSTERDOWN",
        "MISCONF",
        "NOREPLICAS",
    ];
    let text = format!("Redis refused: {error}{}", advice(&error));
    if error.code().is_some_and(|code| OF_NO_USE.contains(&code)) {
        return Err(BackendError::connection(text).with_source(error));
    }
    Ok(Answer::Failed(BackendError::call(text).with_source(error)))
}

/// What to do about an error, where it does not say so itself.
pub(super) fn advice(error: &RedisError) -> &'static str {
    let text = error.to_string();
    if text.contains("nknown Redis command") || text.contains("nknown command") {
        "; Redis 6.2 or later is needed"
    } else if error.code() == Some("NOPERM")
        || text.contains("can't run this command")
        || text.contains("has no permissions to run")
        || text.contains("can't publish")
    {
        "; see RedisBackend for what its user must be allowed to do"
    } else if error.code() == Some("MOVED") {
        "; this is a node of a cluster: say redis-cluster:// in its URL"
    } else if error.is_connection_dropped() {
        "; has it as many clients as it may (maxclients), or does it speak TLS on this port?"
    } else if error.is_timeout() {
        "; is it there, and does it speak TLS on this port if and only if the URL says rediss?"
    } else {
        ""
    }
}

pub(super) fn broken(error: RedisError) -> BackendError {
    let text = format!("the connection to Redis failed: {error}{}", advice(&error));
    BackendError::connection(text).with_source(error)
}
