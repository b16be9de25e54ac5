//! The servers that count the permits of a run, in each shape that Redis runs in, and their faults.

use std::process::Command;
use std::time::Duration;

use deadpool_redis::redis::Value;
use tokio::task::block_in_place;
use tokio::time::sleep;
use tower_semaphore::Semaphore;

use super::history::{At, Fault, Recorder, What};
use super::load::{KEYS, name};
use super::plan::{Planned, Shape};
use crate::support::cluster::{MASTERS, TestCluster};
use crate::support::redis::{TestRedis, server_binary};
use crate::support::sentinel::TestSentinel;
use crate::support::until;

pub(super) enum Servers {
    One(TestRedis),
    Cluster(TestCluster),
    Sentinel(TestSentinel),
}

impl Servers {
    pub(super) fn start(shape: Shape) -> Self {
        match shape {
            Shape::One => Self::One(TestRedis::start_with(debuggable())),
            Shape::Cluster => Self::Cluster(TestCluster::start_with(debuggable())),
            Shape::Sentinel => Self::Sentinel(TestSentinel::start_with(debuggable())),
        }
    }

    /// The URL for a gateway, if it has no proxy of its own.
    pub(super) fn url(&self) -> Option<String> {
        match self {
            Self::One(_) => None,
            Self::Cluster(cluster) => Some(cluster.url()),
            Self::Sentinel(sentinel) => Some(sentinel.url()),
        }
    }

    /// Returns the server of a run with one server.
    pub(super) fn one(&self) -> &TestRedis {
        match self {
            Self::One(redis) => redis,
            _ => panic!("there are several"),
        }
    }

    /// Returns all live servers.
    fn all(&self) -> &[TestRedis] {
        match self {
            Self::One(redis) => std::slice::from_ref(redis),
            Self::Cluster(cluster) => &cluster.nodes,
            Self::Sentinel(sentinel) => &sentinel.servers,
        }
    }

    fn all_mut(&mut self) -> &mut [TestRedis] {
        match self {
            Self::One(redis) => std::slice::from_mut(redis),
            Self::Cluster(cluster) => &mut cluster.nodes,
            Self::Sentinel(sentinel) => &mut sentinel.servers,
        }
    }

    fn masters(&self) -> impl Iterator<Item = &TestRedis> {
        self.all().iter().filter(|server| is_master(server))
    }

    /// Returns what is left in them; what a server that does not answer has is unknown.
    pub(super) fn left(&self) -> Vec<String> {
        let left = |server: &TestRedis| {
            let keys = server.try_command::<Vec<String>>(&["KEYS", "*"]);
            keys.unwrap_or_else(|_| vec!["unknown".to_owned()])
        };
        self.masters().flat_map(left).collect()
    }

    /// Returns the URL of each.
    pub(super) fn urls(&self) -> Vec<String> {
        self.all().iter().map(TestRedis::url).collect()
    }

    /// Returns the semaphore of a process that no proxy stands before.
    pub(super) fn semaphore(&self) -> Semaphore {
        match self {
            Self::One(redis) => redis.semaphore(),
            Self::Cluster(cluster) => cluster.semaphore(),
            Self::Sentinel(sentinel) => sentinel.semaphore(),
        }
    }

    /// Returns the server that counts a key of the load.
    fn home(&self, key: usize) -> usize {
        match self {
            Self::One(_) => 0,
            Self::Cluster(cluster) => {
                cluster.owner(cluster.slot(&name(key)), 0).expect("a master of the slot")
            }
            Self::Sentinel(sentinel) => {
                let port = sentinel.now().port();
                sentinel.servers.iter().position(|server| server.port() == port).unwrap()
            }
        }
    }

    /// Has a fault affect the server of one of the keys, or all. Returns when it was over; after that, all servers
    /// recover before the next fault.
    pub(super) async fn befall(
        &mut self,
        planned: &Planned,
        fault: &mut Fault,
        recorder: &Recorder,
    ) -> At {
        let victim = block_in_place(|| self.home(planned.key));
        if !planned.what.befalls_all_servers() {
            fault.keys = block_in_place(|| {
                (0..KEYS.len()).filter(|key| self.home(*key) == victim).collect()
            });
        }
        let every = |words: &[&str]| {
            block_in_place(|| self.all().iter().for_each(|server| insist(server, words)));
        };
        match planned.what {
            What::KillPubsub => every(&["CLIENT", "KILL", "TYPE", "pubsub"]),
            What::KillNormal => every(&["CLIENT", "KILL", "TYPE", "normal"]),
            What::ScriptFlush => every(&["SCRIPT", "FLUSH"]),
            What::FlushAll => block_in_place(|| insist(&self.all()[victim], &["FLUSHALL"])),
            What::DebugSleep => {
                let time = planned.lasts.as_secs_f64().to_string();
                block_in_place(|| insist(&self.all()[victim], &["DEBUG", "SLEEP", &time]));
            }
            What::FreezeRedis => {
                block_in_place(|| self.all()[victim].signal("STOP"));
                sleep(planned.lasts).await;
                block_in_place(|| self.all()[victim].signal("CONT"));
                // There may be another master by now, or soon.
                block_in_place(|| self.settle());
            }
            What::RestartRedis => {
                block_in_place(|| self.all_mut()[victim].kill());
                sleep(planned.lasts).await;
                block_in_place(|| self.all_mut()[victim].restart());
            }
            What::KillMaster => {
                block_in_place(|| {
                    self.all_mut()[victim].kill();
                    self.replaced(victim);
                });
                let end = recorder.now();
                sleep(planned.lasts).await;
                block_in_place(|| self.come_back(victim));
                return end;
            }
            What::Failover | What::Handover => {
                block_in_place(|| match &*self {
                    Self::One(_) => unreachable!("it has no replica"),
                    Self::Cluster(cluster) => {
                        let replica = &cluster.nodes[cluster.replica_of(victim)];
                        insist(replica, &["CLUSTER", "FAILOVER"]);
                    }
                    Self::Sentinel(sentinel) => sentinel.failover(),
                });
                block_in_place(|| self.replaced(victim));
                let end = recorder.now();
                block_in_place(|| self.settle());
                return end;
            }
            What::MoveSlot => self.move_slot(planned.key, victim, planned.lasts).await,
            what => unreachable!("{what:?} befalls one gateway"),
        }
        recorder.now()
    }

    /// Waits until another server counts what this one counted.
    fn replaced(&self, victim: usize) {
        let port = self.all()[victim].port();
        until("another master is there", || match self {
            Self::One(_) => true,
            Self::Cluster(cluster) => {
                let others = (0..cluster.nodes.len()).filter(|node| *node != victim);
                others.filter(|node| is_master(&cluster.nodes[*node])).count() == MASTERS
            }
            Self::Sentinel(sentinel) => {
                let named = sentinel.named();
                named[0] != port && named.iter().all(|port| *port == named[0])
            }
        });
    }

    /// Starts a server that was killed again, as a replica.
    fn come_back(&mut self, victim: usize) {
        self.all_mut()[victim].restart();
        if let Self::Sentinel(sentinel) = self {
            let master = sentinel.now().port().to_string();
            insist(&sentinel.servers[victim], &["REPLICAOF", "127.0.0.1", &master]);
        }
        self.settle();
    }

    /// Waits until all is as it should be, whichever server is the master of what.
    fn settle(&self) {
        match self {
            Self::One(_) => {}
            Self::Cluster(cluster) => until("the cluster is well", || is_well(cluster)),
            Self::Sentinel(sentinel) => until("the sentinels agree", || {
                let masters = sentinel.servers.iter().filter(|server| is_master(server)).count();
                let named = sentinel.named();
                masters == 1
                    && named.iter().all(|port| *port == named[0])
                    && sentinel.is_settled()
                    && sentinel.servers.iter().all(is_in_step)
                    && replicas(sentinel.now()) == 2
            }),
        }
    }

    /// Moves the slot of a key, with its content, to the next master.
    async fn move_slot(&self, key: usize, from: usize, lasts: Duration) {
        let Self::Cluster(cluster) = self else { unreachable!("it has no slots") };
        let slot = block_in_place(|| cluster.slot(&name(key)));
        let masters: Vec<usize> = block_in_place(|| {
            (0..cluster.nodes.len()).filter(|node| is_master(&cluster.nodes[*node])).collect()
        });
        let at = masters.iter().position(|node| *node == from).unwrap();
        let to = masters[(at + 1) % masters.len()];
        block_in_place(|| cluster.begin_to_move(slot, from, to));
        sleep(lasts / 2).await;
        block_in_place(|| cluster.migrate(slot, from, to));
        sleep(lasts / 2).await;
        block_in_place(|| {
            cluster.end_move(slot, &masters, to);
            self.settle();
        });
    }
}

/// Waits for three masters, each with a replica in step, that agree on all slots.
fn is_well(cluster: &TestCluster) -> bool {
    let owners =
        |seen_by| (0..KEYS.len()).map(move |key| cluster.owner(cluster.slot(&name(key)), seen_by));
    let first: Vec<_> = owners(0).collect();
    cluster.nodes.iter().filter(|node| is_master(node)).count() == MASTERS
        && cluster.nodes.iter().enumerate().all(|(i, node)| {
            let info: String = node.command(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok")
                && owners(i).eq(first.iter().copied())
                && is_in_step(node)
        })
}

/// Repeats a command until it is executed, because servers cut off their clients when they change roles.
fn insist(server: &TestRedis, words: &[&str]) {
    until("the command is carried out", || server.try_command::<Value>(words).is_ok());
}

/// Returns nothing if the server does not answer.
fn replication(server: &TestRedis) -> String {
    server.try_command(&["INFO", "replication"]).unwrap_or_default()
}

fn is_master(server: &TestRedis) -> bool {
    server.is_alive() && replication(server).contains("role:master")
}

fn is_in_step(server: &TestRedis) -> bool {
    let info = replication(server);
    match info.contains("role:master") {
        true => info.contains("state=online"),
        false => info.contains("master_link_status:up"),
    }
}

fn replicas(server: &TestRedis) -> usize {
    replication(server).matches("state=online").count()
}

/// Since 7.0, DEBUG has to be enabled; before, the option is unknown.
fn debuggable() -> &'static [&'static str] {
    let version = Command::new(server_binary()).arg("--version").output().unwrap().stdout;
    if String::from_utf8_lossy(&version).contains("v=6.") {
        &[]
    } else {
        &["--enable-debug-command", "local"]
    }
}
