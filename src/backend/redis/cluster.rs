//! The nodes of a cluster and the slots that each serves.
//!
//! The cluster client of the redis crate is not used: it repeats unanswered commands up to sixteen times, and its
//! connections have no timeouts. Only a map of slots is needed, which the nodes' own replies keep current.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Pipeline, Value, cmd};
use tokio::time::{Instant, sleep, timeout};

use super::dial::{Timeouts, dial};
use super::endpoint::Endpoint;
use super::error;
use super::multiplexed::Multiplexed;
use super::slots::{self, Slots, address, shard};
use crate::backend::Shard;
use crate::error::BackendError;

/// The shortest time between two requests for the map.
const REFRESH: Duration = Duration::from_millis(100);
/// The most nodes that are asked for the map at a time.
const ASKED_MAX: usize = 4;
/// How long to wait for one of them before the next one is asked as well.
const HEAD_START: Duration = Duration::from_millis(50);
/// How long a node that slots are migrating to is not asked after it gave no answer. The calls for other slots in the
/// same write wait for its answer.
const UNREACHABLE_PAUSE: Duration = Duration::from_secs(2);
/// The most names that are tried to find one in a slot of a given node.
const NAMES_MAX: u32 = 50_000;

/// A node that slots are migrating to.
enum Target {
    Open(Multiplexed),
    /// It gave no answer, and is not asked again before this time.
    Unreachable(Instant),
}

pub(super) struct Cluster {
    /// The nodes of the URL.
    seeds: Vec<Endpoint>,
    slots: Mutex<Slots>,
    /// Incremented with every change of the map.
    version: AtomicU64,
    refreshed: tokio::sync::Mutex<Option<(Instant, Result<(), BackendError>)>>,
    /// The nodes that slots are migrating to.
    targets: tokio::sync::Mutex<HashMap<Shard, Target>>,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Endpoint>) -> Self {
        Self {
            seeds,
            slots: Mutex::new(Slots::unknown()),
            version: AtomicU64::new(0),
            refreshed: tokio::sync::Mutex::default(),
            targets: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the master of a key; the unnamed one while it is unknown.
    pub(super) fn master(&self, key: &str) -> Shard {
        self.slots().master(slots::slot(key)).cloned().unwrap_or_default()
    }

    /// Returns all masters with slots; the unnamed one while none is known.
    pub(super) fn masters(&self) -> Vec<Shard> {
        let masters = self.slots().masters();
        if masters.is_empty() { vec![Shard::default()] } else { masters }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.slots().is_complete()
    }

    /// Returns whether a node has any slots.
    pub(super) fn has(&self, master: &Shard) -> bool {
        self.slots().has(master)
    }

    /// Returns how to connect to a node.
    pub(super) fn endpoint(&self, node: &Shard) -> Option<Endpoint> {
        let (host, port) = address(node)?;
        Some(self.seeds[0].at(host.to_owned(), port))
    }

    /// Returns a name in a slot that this master has.
    pub(super) fn name_at(&self, master: &Shard, key: impl Fn(&str) -> String) -> Option<String> {
        let slots = self.slots();
        let mut names = (0..NAMES_MAX).map(|n| format!("!probe{n}"));
        names.find(|name| slots.master(slots::slot(&key(name))) == Some(master))
    }

    /// Records the master of a slot from a node's redirection, and returns it.
    pub(super) fn on_moved(&self, slot: u16, to: &str, said_by: &Shard) -> Option<Shard> {
        let master = named(to, said_by)?;
        let mut slots = self.slots();
        if slots.master(slot) != Some(&master) {
            slots.set(slot, &master);
            self.version.fetch_add(1, Ordering::Release);
        }
        Some(master)
    }

    /// See [`Backend::routing`](crate::backend::Backend::routing).
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Requests the map of slots, unless that was done within [`REFRESH`]. `suspect` is asked last.
    pub(super) async fn refresh(
        &self,
        suspect: &Shard,
        timeouts: Timeouts,
    ) -> Result<(), BackendError> {
        let mut refreshed = self.refreshed.lock().await;
        if let Some((at, result)) = &*refreshed
            && at.elapsed() < REFRESH
        {
            return result.clone();
        }
        let result = self.ask_nodes(suspect, timeouts).await;
        *refreshed = Some((Instant::now(), result.clone()));
        result
    }

    async fn ask_nodes(&self, suspect: &Shard, timeouts: Timeouts) -> Result<(), BackendError> {
        let mut nodes = self.slots().nodes.clone();
        // In random order, so that the processes do not all ask the same nodes.
        fastrand::shuffle(&mut nodes);
        nodes.sort_by_key(|(host, port)| shard(host, *port) == *suspect);
        let known =
            nodes.into_iter().take(ASKED_MAX - 1).map(|(host, port)| self.seeds[0].at(host, port));
        let mut seeds = self.seeds.clone();
        fastrand::shuffle(&mut seeds);
        let mut why = String::new();
        // Concurrently, with a head start each: some nodes may be unreachable, and every connection waits for the map.
        let asked = known.chain(seeds).take(ASKED_MAX).zip(0..).map(|(node, nth)| async move {
            sleep(nth * HEAD_START).await;
            (ask_node(&node, timeouts).await, node)
        });
        let mut asked: FuturesUnordered<_> = asked.collect();
        while let Some((answer, node)) = asked.next().await {
            match answer {
                Ok(slots) => {
                    let nodes: Vec<_> = slots.nodes.iter().map(|(h, p)| shard(h, *p)).collect();
                    {
                        let mut known = self.slots();
                        let is_news = !known.is_same_map(&slots);
                        *known = slots;
                        self.version.fetch_add(u64::from(is_news), Ordering::Release);
                    }
                    self.targets.lock().await.retain(|node, _| nodes.contains(node));
                    return Ok(());
                }
                Err(error) => why += &format!("; {}: {error}", node.address()),
            }
        }
        Err(BackendError::connection(format!(
            "no node of the cluster returned the map of slots{why}"
        )))
    }

    /// Sends commands to the node that a slot is migrating to.
    pub(super) async fn ask(
        &self,
        to: &str,
        said_by: &Shard,
        commands: Vec<Cmd>,
        timeouts: Timeouts,
    ) -> Result<Vec<Value>, BackendError> {
        let node = named(to, said_by)
            .ok_or_else(|| BackendError::call("the redirection names no address"))?;
        // In half of the time, because the other calls of the batch wait for these.
        let answer = timeout(timeouts.answer / 2, self.ask_at(&node, commands, timeouts)).await;
        let answer = answer.unwrap_or_else(|_| Err(BackendError::call("no answer in time")));
        if answer.is_err() {
            // The connection may be half open. A later call opens another one.
            let mut targets = self.targets.lock().await;
            let was_unreachable = matches!(targets.get(&node), Some(Target::Unreachable(_)));
            if !was_unreachable {
                targets.insert(node, Target::Unreachable(Instant::now() + UNREACHABLE_PAUSE));
            }
        }
        answer
    }

    async fn ask_at(
        &self,
        node: &Shard,
        commands: Vec<Cmd>,
        timeouts: Timeouts,
    ) -> Result<Vec<Value>, BackendError> {
        let mut targets = self.targets.lock().await;
        let mut connection = match targets.get(node) {
            Some(Target::Open(connection)) => connection.clone(),
            Some(Target::Unreachable(until)) if Instant::now() < *until => {
                return Err(BackendError::call("it gave no answer a moment ago"));
            }
            Some(Target::Unreachable(_)) | None => {
                targets.remove(node);
                let server =
                    self.endpoint(node).ok_or_else(|| BackendError::call("no such node"))?;
                let connection = dial(&server, timeouts).await?;
                targets.insert(node.clone(), Target::Open(connection.clone()));
                connection
            }
        };
        drop(targets);
        let mut pipeline = Pipeline::with_capacity(2 * commands.len());
        for command in commands {
            pipeline.cmd("ASKING").add_command(command);
        }
        let count = pipeline.len();
        match connection.send_packed_commands(&pipeline, 0, count).await {
            Ok(values) if values.len() == count => {
                // If ASKING was refused, report that, and not the MOVED that follows from it.
                let pairs = values.chunks_exact(2).map(|pair| match pair {
                    [refused @ Value::ServerError(_), _] => refused.clone(),
                    [_, answer] => answer.clone(),
                    _ => Value::Nil,
                });
                Ok(pairs.collect())
            }
            Ok(_) => Err(BackendError::call("the node sent fewer replies than commands")),
            Err(error) => Err(error::broken(error)),
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn ask_node(node: &Endpoint, timeouts: Timeouts) -> Result<Slots, BackendError> {
    let mut connection = dial(node, timeouts).await?;
    let mut question = cmd("CLUSTER");
    let answer = question.arg("SLOTS").query_async::<Value>(&mut *connection);
    let answer = match timeout(timeouts.answer, answer).await {
        Ok(answer) => answer.map_err(error::broken)?,
        Err(_) => return Err(BackendError::connection("no answer in time")),
    };
    let address = node.address().to_string();
    let host = address.rsplit_once(':').map_or(&*address, |(host, _)| host);
    Slots::read(&answer, host)
        .ok_or_else(|| BackendError::connection("the reply to CLUSTER SLOTS cannot be read"))
}

/// Returns the node at an address. Without a host, it is on the host of the node that sent the address.
fn named(to: &str, said_by: &Shard) -> Option<Shard> {
    let (host, port) = to.rsplit_once(':')?;
    let host = if host.is_empty() { address(said_by)?.0 } else { host };
    Some(shard(host, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::{named, shard};

    #[test]
    fn a_node_that_is_named_without_its_host_is_on_the_same_one() {
        let by = shard("10.0.0.1", 7000);
        assert_eq!(named("10.0.0.2:7001", &by), Some(shard("10.0.0.2", 7001)));
        assert_eq!(named(":7001", &by), Some(shard("10.0.0.1", 7001)));
        assert_eq!(named("::1:7001", &by), Some(shard("::1", 7001)));
        assert_eq!(named("x", &by), None);
    }
}
