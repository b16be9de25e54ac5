//! Opens a connection to a server, prepares it and probes it.
//!
//! A replica, a server that is loading, a user without rights or a Redis that is too old fails here, once, and not in
//! each request.

use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock};

use futures_util::future::{Either, ready, select};
use futures_util::{FutureExt, TryStreamExt};
use redis::{
    AsyncConnectionConfig, ErrorKind, PushInfo, PushKind, RedisError, ServerErrorKind, Value, cmd,
};

use super::connection::{Member, Named, RedisConnection};
use super::dial::dial_named;
use super::endpoint::Endpoint;
use super::keys::Keys;
use super::multiplexed::{Driver, Multiplexed};
use super::{Caller, RedisBackend, Servers, error, info, messages, scripts};
use crate::backend::{AddressedCall, Answer, Connection, InOrder, OVERRIDES, Shard};
use crate::error::BackendError;
use crate::name::Name;
use crate::protocol::{Call, Ids, NodeId, Op, PlaceId};

impl RedisBackend {
    pub(super) async fn open_to(
        &self,
        shard: &Shard,
    ) -> Result<Option<RedisConnection>, BackendError> {
        match &self.servers {
            Servers::One(server) => self.open(server, None).await.map(Some),
            #[cfg(feature = "deadpool-redis")]
            Servers::Pool(pool) => {
                let connection =
                    tokio::time::timeout(self.timeouts.connect, super::dial::from_pool(pool));
                let connection = connection.await.map_err(|_| no_answer())??;
                self.prepare(connection.into(), None, None).await.map(Some)
            }
            Servers::Sentinel(sentinel) => {
                let server = sentinel.master(self.timeouts).await?;
                let mut opened = self.open(&server, None).await;
                match &mut opened {
                    Ok(opened) => {
                        let (by, timeouts) = (Arc::clone(sentinel), self.timeouts);
                        opened.named = Some(Named { by, server, timeouts });
                    }
                    // The server may be down, or no longer the master: ask another sentinel next.
                    Err(_) => sentinel.distrust(),
                }
                opened.map(Some)
            }
            Servers::Cluster(cluster) => {
                let refreshed = cluster.refresh(shard, self.timeouts).await;
                let Some(server) = cluster.endpoint(shard) else {
                    refreshed?;
                    return if cluster.is_complete() { Ok(None) } else { Err(no_master()) };
                };
                if refreshed.is_ok() && !cluster.has(shard) {
                    return Ok(None);
                }
                let (cluster, node) = (Arc::clone(cluster), shard.clone());
                let member = Member { cluster, node, timeouts: self.timeouts };
                self.open(&server, Some(member)).await.map(Some)
            }
        }
    }

    async fn open(
        &self,
        to: &Endpoint,
        member: Option<Member>,
    ) -> Result<RedisConnection, BackendError> {
        let (caller, keys) = (Arc::clone(&self.caller), self.keys.clone());
        let deliver = deliver(caller, keys, member.clone());
        let config = AsyncConnectionConfig::new().set_push_sender(deliver);
        let (connection, driver) = dial_named(to, config, self.timeouts).await?;
        self.prepare(connection.into(), Some(driver), member).await
    }

    /// Loads the scripts, probes the connection and subscribes to hints. A connection without a driver cannot receive
    /// hints.
    async fn prepare(
        &self,
        connection: Multiplexed,
        driver: Option<Driver>,
        member: Option<Member>,
    ) -> Result<RedisConnection, BackendError> {
        let set_up = self.set_up(connection, driver.is_some(), member);
        let prepared = async {
            let Some(driver) = driver else { return set_up.await };
            let (opened, driver) = match select(pin!(set_up), driver).await {
                Either::Left((opened, driver)) => (opened, driver),
                // The connection is closed, so the next command fails.
                Either::Right(((), set_up)) => (set_up.await, ready(()).boxed()),
            };
            Ok(RedisConnection { driver: Mutex::new(Some(driver)), ..opened? })
        };
        prepared.await
    }

    /// Waits for an answer, up to the response timeout. Each answer has this time, not all of them together: a server
    /// to which many processes return at once is slow, not unreachable.
    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, BackendError> {
        tokio::time::timeout(self.timeouts.answer, answer).await.map_err(|_| no_answer())
    }

    async fn set_up(
        &self,
        mut connection: Multiplexed,
        subscribes: bool,
        member: Option<Member>,
    ) -> Result<RedisConnection, BackendError> {
        let server = self.in_time(info::ask(&mut connection)).await??;
        let driver = Mutex::default();
        let mut opened = RedisConnection {
            connection,
            server,
            order: InOrder::default(),
            driver,
            member,
            named: None,
        };
        // Refusals are ignored: without the right to load scripts, each is sent in full, once.
        let scripts = scripts::load();
        let count = scripts.len();
        let loaded = opened.connection.send_packed_commands(&scripts, 0, count);
        self.in_time(loaded).await?.map_err(error::broken)?;
        let Some((node, _)) = self.caller.get() else { return Ok(opened) };
        self.probe(&mut opened, *node).await?;
        if subscribes {
            let channels = [self.keys.mailbox(*node), self.keys.overrides()];
            match self.in_time(opened.connection.subscribe(&channels)).await? {
                Ok(()) => opened.server.poll_only = false,
                Err(error) if is_forbidden(&error) => {
                    tracing::debug!(target: "tower_semaphore", %error, "may not subscribe");
                }
                Err(error) => return Err(error::broken(error)),
            }
        }
        Ok(opened)
    }

    /// Tests whether this server is usable: it is not a replica, is not loading, knows the newest command that the
    /// scripts use, and permits this user to call them. Leaves no data behind.
    async fn probe(&self, opened: &mut RedisConnection, node: NodeId) -> Result<(), BackendError> {
        let ids =
            Ids::from_elem(PlaceId { node, poll_only: true, n: 0, bound: None, claim: None }, 1);
        let acquire =
            Op::Acquire { leaving: ids.to_vec(), lease_ms: 1, max_queue: None, ids: ids.clone() };
        // No encoded name is equal to this.
        let name = match &opened.member {
            None => "!probe".to_owned(),
            Some(Member { cluster, node, .. }) => {
                let key = |name: &str| self.keys.semaphore(name).to_string();
                let Some(name) = cluster.name_at(node, key) else { return Ok(()) };
                name
            }
        };
        let key = self.keys.semaphore(&name);
        let calls = [acquire, Op::Release { ids }].map(|op| AddressedCall {
            key: Arc::clone(&key),
            node,
            call: Call { for_all: true, ..Call::of(op) },
        });
        for (_, answer) in self.in_time(opened.send(Arc::from(calls)).try_concat()).await?? {
            if let Answer::Failed(error) | Answer::Refused(error) = answer {
                return Err(BackendError::connection(error.to_string()).with_source(error));
            }
        }
        // No process has this id, so no process receives the message.
        let channel = self.keys.mailbox(NodeId::new(0));
        let published = cmd("PUBLISH").arg(channel).arg("").to_owned();
        let published = published.query_async::<()>(&mut *opened.connection);
        if let Err(error) = self.in_time(published).await? {
            if !is_forbidden(&error) {
                return Err(error::broken(error));
            }
            let advice = error::advice(&error);
            opened.server.warning.get_or_insert_with(|| {
                format!("hints cannot be sent, so waiting requests of other processes poll: {error}{advice}")
            });
        }
        Ok(())
    }
}

/// Returns a function that passes on hints. It runs in the task that drives the connection, and must not block.
fn deliver(
    caller: Arc<OnceLock<Caller>>,
    keys: Keys,
    member: Option<Member>,
) -> impl Fn(PushInfo) -> Result<(), ()> + Send + Sync + 'static {
    move |push| {
        let PushInfo { kind: PushKind::Message, data } = push else { return Ok(()) };
        let [_, Value::BulkString(message)] = data.as_slice() else { return Ok(()) };
        let mailbox = caller.get().and_then(|(_, mailbox)| mailbox.upgrade()).ok_or(())?;
        if let Some((key, hints)) = messages::hints(message)
            && let Some(name) = keys.name(key)
            && (name == OVERRIDES || Name::from_stored(name).is_some())
            // In a cluster each message arrives from every node; take it from the master alone.
            && member.as_ref().is_none_or(|member| member.is_master_of(key))
        {
            if name == OVERRIDES {
                match messages::adapted(message) {
                    Some((name, adapted)) => mailbox.adapted(name, adapted),
                    None => mailbox.overridden(),
                }
                return Ok(());
            }
            if let Some(message) = messages::peer_message(message) {
                mailbox.message(name, message);
                return Ok(());
            }
            if messages::is_recall(message) {
                mailbox.recall(name);
            }
            hints.for_each(|hint| mailbox.hint(name, hint));
        }
        Ok(())
    }
}

fn is_forbidden(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm)
}

fn no_answer() -> BackendError {
    BackendError::connection("Redis did not respond in time")
}

fn no_master() -> BackendError {
    BackendError::connection(
        "no node of the cluster serves this slot; expected a cluster that covers all slots",
    )
}
