//! A Redis with Sentinel, of a test's own: a master, two replicas, three sentinels.

use std::collections::HashMap;
use std::fs::File;
use std::process::{Child, Command, Stdio};

use deadpool_redis::redis::{self, FromRedisValue, RedisResult};
use tempfile::TempDir;
use tower_semaphore::Semaphore;
use tower_semaphore::backend::RedisBackend;

use super::redis::{TestRedis, free_port, server_binary};
use super::until;
use crate::redis_errors::LEAST;

/// The first server is the master at first.
pub(crate) struct TestSentinel {
    pub(crate) servers: Vec<TestRedis>,
    sentinels: Vec<Process>,
}

struct Process {
    process: Child,
    port: u16,
    /// The port by which others know it.
    at: u16,
    _dir: TempDir,
}

impl TestSentinel {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts them, with these arguments for each server.
    pub(crate) fn start_with(args: &[&str]) -> Self {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self::start_each(|| args.clone(), TestRedis::port, Vec::new)
    }

    /// Starts them, with arguments of its own for each server, and lines for each sentinel's configuration; `port` is
    /// how all others know a server.
    pub(crate) fn start_each(
        args: impl Fn() -> Vec<String>,
        port: impl Fn(&TestRedis) -> u16,
        lines: impl Fn() -> Vec<(&'static str, String)>,
    ) -> Self {
        let server = |more: &[&str]| {
            let args = args();
            let args = args.iter().map(|arg| &**arg).chain(more.iter().copied());
            let all: Vec<&str> =
                ["--repl-diskless-sync-delay", "0"].into_iter().chain(args).collect();
            TestRedis::start_with(&all)
        };
        let master = server(&[]);
        let port = port(&master);
        let mut servers = vec![master];
        for _ in 0..2 {
            servers.push(server(&["--replicaof", &format!("127.0.0.1 {port}")]));
        }
        until("the replicas are in step", || {
            let info: String = servers[0].command(&["INFO", "replication"]);
            info.matches("state=online").count() == 2
        });
        let sentinels = (0..3).map(|_| sentinel(port, &lines())).collect();
        let all = Self { servers, sentinels };
        // By default they look around every ten seconds.
        for sentinel in &all.sentinels {
            until("it answers", || sentinel.command::<String>(&["PING"]).is_ok());
        }
        // Four intervals of the second one must be longer than a failover: otherwise a sentinel that has not heard of
        // it by then makes the new master a replica again.
        all.periods(["200", "600", "200"]);
        all.settle();
        all
    }

    /// How often sentinels ask servers for their state, tell each other what they know, and ask each other, in ms.
    fn periods(&self, [info, publish, ask]: [&str; 3]) {
        let periods = ["INFO-PERIOD", info, "PUBLISH-PERIOD", publish, "ASK-PERIOD", ask];
        for sentinel in &self.sentinels {
            sentinel.command::<()>(&[&["SENTINEL", "DEBUG"], &periods[..]].concat()).unwrap();
        }
    }

    /// Lets sentinels take their default times from here on.
    pub(crate) fn take_time(&self) {
        self.periods(["10000", "2000", "1000"]);
    }

    /// Waits until each sentinel knows the others and both replicas.
    fn settle(&self) {
        until("the sentinels know of all", || {
            self.sentinels.iter().all(|sentinel| {
                let info: RedisResult<String> = sentinel.command(&["INFO", "sentinel"]);
                info.is_ok_and(|info| {
                    info.contains("status=ok") && info.contains("slaves=2,sentinels=3")
                })
            })
        });
    }

    /// Returns the URL as one writes it in a configuration; the first sentinel in it does not exist.
    pub(crate) fn url(&self) -> String {
        let ports = [free_port(), self.sentinels[0].at, self.sentinels[1].at];
        let hosts = ports.map(|port| format!("127.0.0.1:{port}")).join(",");
        format!("redis-sentinel://{hosts}/mymaster")
    }

    /// Returns the semaphore of a process.
    pub(crate) fn semaphore(&self) -> Semaphore {
        Semaphore::new(RedisBackend::builder(self.url()).build().unwrap())
    }

    /// Returns the URL for a process whose users have only the necessary rights on both.
    pub(crate) fn url_of_least_rights(&self) -> String {
        self.servers.iter().for_each(|server| server.let_in(&format!("{LEAST} info")));
        for sentinel in &self.sentinels {
            let right = "+sentinel|get-master-addr-by-name";
            let words = ["ACL", "SETUSER", "asker", "reset", "on", ">hidden", "-@all", right];
            sentinel.command::<()>(&words).unwrap();
        }
        let url = self.url().replace("://", "://app:secret@");
        format!("{url}?sentinel_username=asker&sentinel_password=hidden")
    }

    /// Returns the master's port, according to the first sentinel.
    pub(crate) fn master(&self) -> u16 {
        let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
        let (_, port): (String, u16) = self.sentinels[0].command(&question).unwrap();
        port
    }

    /// The same, according to each sentinel.
    pub(crate) fn named(&self) -> Vec<u16> {
        let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
        let ask = |sentinel: &Process| sentinel.command::<(String, u16)>(&question).unwrap().1;
        self.sentinels.iter().map(ask).collect()
    }

    /// Returns whether no sentinel knows of anything to do.
    pub(crate) fn is_settled(&self) -> bool {
        self.sentinels.iter().all(|sentinel| {
            let question = ["SENTINEL", "MASTER", "mymaster"];
            let master: HashMap<String, String> = sentinel.command(&question).unwrap();
            master["flags"] == "master" && master["num-slaves"] == "2"
        })
    }

    /// Returns the server that is the master, according to a sentinel.
    pub(crate) fn now(&self) -> &TestRedis {
        let port = self.master();
        self.servers.iter().find(|server| server.port() == port).unwrap()
    }

    /// Fails over as soon as a sentinel finds a replica fit for it.
    pub(crate) fn failover(&self) {
        let failover = ["SENTINEL", "FAILOVER", "mymaster"];
        until("a failover begins", || self.sentinels[2].command::<()>(&failover).is_ok());
    }
}

fn sentinel(master: u16, lines: &[(&'static str, String)]) -> Process {
    let dir = TempDir::new().unwrap();
    let port = free_port();
    let conf = format!(
        "port {port}\nbind 127.0.0.1\ndir {}\n\
         sentinel monitor mymaster 127.0.0.1 {master} 2\n\
         sentinel down-after-milliseconds mymaster 1000\n\
         sentinel failover-timeout mymaster 3000\nsentinel parallel-syncs mymaster 1\n",
        dir.path().display()
    );
    let more: String = lines.iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    std::fs::write(dir.path().join("conf"), more + &conf).unwrap();
    let secret = lines.iter().find(|(name, _)| *name == "tls-port");
    let at = secret.map_or(port, |(_, port)| port.parse().unwrap());
    let process = Command::new(server_binary())
        .args([dir.path().join("conf").as_os_str(), "--sentinel".as_ref()])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(File::create(dir.path().join("log")).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Process { process, port, at, _dir: dir }
}

impl Process {
    fn command<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}/", self.port))?;
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query(&mut client.get_connection()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
