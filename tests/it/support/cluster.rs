//! A Redis Cluster of a test's own: three masters, each with a replica. Needs Redis 7, or Valkey.

use deadpool_redis::redis::Value;
use tower_semaphore::Semaphore;
use tower_semaphore::backend::RedisBackend;

use super::redis::{TestRedis, free_port};
use super::until;
use crate::redis_errors::LEAST;

pub(crate) const MASTERS: usize = 3;
const SLOTS: usize = 16384;

/// The first three nodes are masters at first, each with a third of the slots.
pub(crate) struct TestCluster {
    pub(crate) nodes: Vec<TestRedis>,
}

impl TestCluster {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts one, with these arguments for each node.
    pub(crate) fn start_with(args: &[&str]) -> Self {
        Self::start_each(|| args.iter().map(|arg| (*arg).to_owned()).collect())
    }

    /// Starts one, with arguments of its own for each node.
    pub(crate) fn start_each(args: impl Fn() -> Vec<String>) -> Self {
        let mut buses = Vec::new();
        let mut nodes = Vec::new();
        for _ in 0..2 * MASTERS {
            let bus = free_port().to_string();
            let own = [
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                &bus,
                "--cluster-node-timeout",
                "1000",
                // A shard without a master does not stop the others.
                "--cluster-require-full-coverage",
                "no",
                "--repl-diskless-sync-delay",
                "0",
            ];
            let args = args();
            let args: Vec<&str> = args.iter().map(|arg| &**arg).collect();
            nodes.push(TestRedis::start_with(&[&own[..], &args].concat()));
            buses.push(bus);
        }
        let cluster = Self { nodes };
        for (i, node) in cluster.nodes.iter().enumerate().take(MASTERS) {
            let (first, last) = (i * SLOTS / MASTERS, (i + 1) * SLOTS / MASTERS - 1);
            let (first, last) = (first.to_string(), last.to_string());
            node.command::<()>(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
            node.command::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(i + 1).to_string()]);
        }
        for (node, bus) in cluster.nodes.iter().zip(&buses).skip(1) {
            let port = node.port().to_string();
            cluster.nodes[0].command::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, bus]);
        }
        until("all have met", || {
            cluster.nodes.iter().all(|node| {
                let seen: String = node.command(&["CLUSTER", "NODES"]);
                seen.lines().count() == 2 * MASTERS && !seen.contains("handshake")
            })
        });
        for i in 0..MASTERS {
            let master = cluster.id(i);
            cluster.nodes[MASTERS + i].command::<()>(&["CLUSTER", "REPLICATE", &master]);
        }
        until("all is well", || {
            cluster.nodes.iter().enumerate().all(|(i, node)| {
                let info: String = node.command(&["CLUSTER", "INFO"]);
                let replication: String = node.command(&["INFO", "replication"]);
                info.contains("cluster_state:ok")
                    && info.contains("cluster_slots_ok:16384")
                    && (i < MASTERS || replication.contains("master_link_status:up"))
                    && node.command::<Vec<Vec<Value>>>(&["CLUSTER", "SLOTS"]).len() == MASTERS
            })
        });
        // A replica that does not appear to be in step would not be promoted.
        until("the replicas are in step", || {
            cluster.nodes.iter().take(MASTERS).all(|node| {
                node.command::<String>(&["INFO", "replication"]).contains("state=online")
            })
        });
        cluster
    }

    /// Returns the URL as one writes it in a configuration: some of the nodes.
    pub(crate) fn url(&self) -> String {
        let (a, b) = (self.nodes[1].port(), self.nodes[MASTERS + 2].port());
        format!("redis-cluster://127.0.0.1:{a},127.0.0.1:{b}")
    }

    /// Returns the semaphore of a process.
    pub(crate) fn semaphore(&self) -> Semaphore {
        Semaphore::new(RedisBackend::builder(self.url()).build().unwrap())
    }

    /// Returns the URL for a process whose user has only the necessary rights.
    pub(crate) fn url_of_least_rights(&self) -> String {
        let rights = format!("{LEAST} cluster|slots asking info");
        self.nodes.iter().for_each(|node| node.let_in(&rights));
        self.url().replace("://", "://app:secret@")
    }

    /// Returns the semaphore of such a process.
    pub(crate) fn semaphore_of_least_rights(&self) -> Semaphore {
        Semaphore::new(RedisBackend::builder(self.url_of_least_rights()).build().unwrap())
    }

    pub(crate) fn id(&self, node: usize) -> String {
        self.nodes[node].command(&["CLUSTER", "MYID"])
    }

    /// Returns the slot of a name.
    pub(crate) fn slot(&self, name: &str) -> usize {
        self.nodes[MASTERS - 1].command(&["CLUSTER", "KEYSLOT", &format!("semaphore:{{{name}}}")])
    }

    /// Returns which of the masters has this name at first.
    pub(crate) fn home(&self, name: &str) -> usize {
        let slot = self.slot(name);
        (0..MASTERS).find(|i| slot < (i + 1) * SLOTS / MASTERS).unwrap()
    }

    /// Returns the node that is the master of this slot, as another node sees it.
    pub(crate) fn owner(&self, slot: usize, seen_by: usize) -> Option<usize> {
        let ranges: Vec<Value> = self.nodes[seen_by].command(&["CLUSTER", "SLOTS"]);
        let port = ranges.iter().find_map(|range| {
            let Value::Array(range) = range else { return None };
            let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &**range else {
                return None;
            };
            let Some(Value::Int(port)) = master.get(1) else { return None };
            (*first..=*last).contains(&i64::try_from(slot).unwrap()).then_some(*port)
        })?;
        self.nodes.iter().position(|node| i64::from(node.port()) == port)
    }

    /// Returns the node that replicates this master.
    pub(crate) fn replica_of(&self, master: usize) -> usize {
        let line = format!("master_port:{}\r\n", self.nodes[master].port());
        let is_its = |node: &TestRedis| {
            node.is_alive() && node.command::<String>(&["INFO", "replication"]).contains(&line)
        };
        self.nodes.iter().position(is_its).expect("a replica")
    }

    /// Begins to move a slot to another master: keys that are not there any more are requested from the other.
    pub(crate) fn begin_to_move(&self, slot: usize, from: usize, to: usize) {
        self.set_slot(slot, to, &["IMPORTING", &self.id(from)]);
        self.set_slot(slot, from, &["MIGRATING", &self.id(to)]);
    }

    /// Moves all that is in the slot, while it is used.
    pub(crate) fn migrate(&self, slot: usize, from: usize, to: usize) {
        let (slot, port) = (slot.to_string(), self.nodes[to].port().to_string());
        for round in 0..50 {
            let words = ["CLUSTER", "GETKEYSINSLOT", &slot, "10"];
            let keys: Vec<String> = self.nodes[from].command(&words);
            if keys.is_empty() {
                break;
            }
            assert!(round < 49, "{keys:?} do not go");
            let words = ["MIGRATE", "127.0.0.1", &port, "", "0", "1000", "KEYS"];
            let keys: Vec<&str> = keys.iter().map(|key| &**key).collect();
            self.nodes[from].command::<String>(&[&words, &keys[..]].concat());
        }
    }

    /// Completes the move of the slot: the new master is told first.
    pub(crate) fn end_move(&self, slot: usize, masters: &[usize], to: usize) {
        let id = self.id(to);
        self.set_slot(slot, to, &["NODE", &id]);
        for node in masters.iter().filter(|node| **node != to) {
            self.set_slot(slot, *node, &["NODE", &id]);
        }
    }

    pub(crate) fn set_slot(&self, slot: usize, node: usize, words: &[&str]) {
        let command = ["CLUSTER", "SETSLOT", &slot.to_string()];
        self.nodes[node].command::<()>(&[&command, words].concat());
    }

    /// Returns how often any node replied with this error.
    pub(crate) fn errors(&self, code: &str) -> u64 {
        let prefix = format!("errorstat_{code}:count=");
        let count = |node: &TestRedis| {
            let stats: String = node.command(&["INFO", "errorstats"]);
            let line = stats.lines().find_map(|line| line.strip_prefix(&*prefix));
            line.map_or(0, |count| count.trim().parse::<u64>().unwrap())
        };
        self.nodes.iter().map(count).sum()
    }
}
