//! A Redis with Sentinel, of a test's own: a master, two replicas, three sentinels.

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
    _dir: TempDir,
}

impl TestSentinel {
    pub(crate) fn start() -> Self {
        let quick = ["--repl-diskless-sync-delay", "0"];
        let master = TestRedis::start_with(&quick);
        let port = master.port();
        let mut servers = vec![master];
        for _ in 0..2 {
            let of = format!("127.0.0.1 {port}");
            servers.push(TestRedis::start_with(&[&quick[..], &["--replicaof", &of]].concat()));
        }
        until("the replicas are in step", || {
            let info: String = servers[0].command(&["INFO", "replication"]);
            info.matches("state=online").count() == 2
        });
        let sentinels = (0..3).map(|_| sentinel(port)).collect();
        let all = Self { servers, sentinels };
        // They look around every ten seconds, unless told otherwise.
        for sentinel in &all.sentinels {
            until("it answers", || sentinel.command::<String>(&["PING"]).is_ok());
        }
        all.periods(["200", "200", "200"]);
        all.settle();
        all
    }

    /// How often sentinels ask servers for their state, tell each other what they know, and ask each
    /// other; in ms.
    fn periods(&self, [info, publish, ask]: [&str; 3]) {
        let periods = ["INFO-PERIOD", info, "PUBLISH-PERIOD", publish, "ASK-PERIOD", ask];
        for sentinel in &self.sentinels {
            sentinel.command::<()>(&[&["SENTINEL", "DEBUG"], &periods[..]].concat()).unwrap();
        }
    }

    /// From here on sentinels take the time that they take unless told otherwise.
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

    /// As one writes it into a configuration; the first sentinel named is not there.
    pub(crate) fn url(&self) -> String {
        let ports = [free_port(), self.sentinels[0].port, self.sentinels[1].port];
        let hosts = ports.map(|port| format!("127.0.0.1:{port}")).join(",");
        format!("redis-sentinel://{hosts}/mymaster")
    }

    /// One process's semaphore.
    pub(crate) fn semaphore(&self) -> Semaphore {
        Semaphore::new(RedisBackend::builder(self.url()).build().unwrap())
    }

    /// For a process whose users, here and there, may do no more than they must.
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

    /// The master's port, as the sentinel says that is asked first.
    pub(crate) fn master(&self) -> u16 {
        let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
        let (_, port): (String, u16) = self.sentinels[0].command(&question).unwrap();
        port
    }

    /// The server that is the master, as a sentinel says.
    pub(crate) fn now(&self) -> &TestRedis {
        let port = self.master();
        self.servers.iter().find(|server| server.port() == port).unwrap()
    }

    pub(crate) fn failover(&self) {
        self.sentinels[2].command::<()>(&["SENTINEL", "FAILOVER", "mymaster"]).unwrap();
    }
}

fn sentinel(master: u16) -> Process {
    let dir = TempDir::new().unwrap();
    let port = free_port();
    let conf = format!(
        "port {port}\nbind 127.0.0.1\ndir {}\n\
         sentinel monitor mymaster 127.0.0.1 {master} 2\n\
         sentinel down-after-milliseconds mymaster 1000\n\
         sentinel failover-timeout mymaster 3000\nsentinel parallel-syncs mymaster 1\n",
        dir.path().display()
    );
    std::fs::write(dir.path().join("conf"), conf).unwrap();
    let process = Command::new(server_binary())
        .args([dir.path().join("conf").as_os_str(), "--sentinel".as_ref()])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(File::create(dir.path().join("log")).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Process { process, port, _dir: dir }
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
