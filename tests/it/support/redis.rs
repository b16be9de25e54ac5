//! A Redis of a test's own.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use deadpool_redis::redis::{self, FromRedisValue, RedisResult};
use tempfile::TempDir;
use tower_semaphore::Semaphore;
use tower_semaphore::backend::RedisBackend;

pub(crate) use super::ports::free_port;

/// A server on a free loopback port, in a directory of its own; killed when this is dropped.
pub(crate) struct TestRedis {
    server: Child,
    port: u16,
    dir: TempDir,
    args: Vec<String>,
}

/// Returns the server to test with: `TEST_REDIS_SERVER`, or the one in the PATH.
pub(crate) fn server_binary() -> String {
    std::env::var("TEST_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

impl TestRedis {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(args: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        // Another process can take the port between the check and the start.
        for _ in 0..5 {
            let port = free_port();
            let mut server = spawn(port, &dir, &args);
            if is_ready(port, &mut server) {
                return Self { server, port, dir, args };
            }
        }
        panic!("{} did not start; is it installed?", server_binary());
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Returns the semaphore of a process.
    pub(crate) fn semaphore(&self) -> Semaphore {
        Semaphore::new(RedisBackend::builder(self.url()).build().unwrap())
    }

    /// A backend for a process that no message reaches.
    pub(crate) fn without_messages(&self) -> RedisBackend {
        let words = "ACL SETUSER app reset on >secret resetchannels ~semaphore:* +@all";
        let _: String = self.command(&words.split(' ').collect::<Vec<_>>());
        let url = format!("redis://app:secret@127.0.0.1:{}/", self.port());
        RedisBackend::builder(url).build().unwrap()
    }

    /// Runs one command, on a connection of its own.
    pub(crate) fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_command(words).unwrap()
    }

    /// The same, while the server may be killed, or cut off its clients.
    pub(crate) fn try_command<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let client = redis::Client::open(self.url())?;
        let mut connection = client.get_connection()?;
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query(&mut connection)
    }

    /// Creates a user `app` with the password `secret`, and only these rights.
    pub(crate) fn let_in(&self, rights: &str) {
        let rights: Vec<_> = rights.split_whitespace().map(|right| format!("+{right}")).collect();
        let mut words = vec!["ACL", "SETUSER", "app", "reset", "on", ">secret"];
        // Redis 6.2 gives a new user all channels.
        words.extend(["~semaphore:*", "resetchannels", "&semaphore:*", "-@all"]);
        words.extend(rights.iter().map(String::as_str));
        self.command::<()>(&words);
    }

    pub(crate) fn keys(&self) -> u64 {
        self.command(&["DBSIZE"])
    }

    /// Returns whether nothing is stored, apart from what was resumed in the last hour.
    pub(crate) fn is_clear(&self) -> bool {
        let keys: Vec<String> = self.command(&["KEYS", "*"]);
        keys.iter().all(|key| key == "semaphore:{!overrides}:pauses")
    }

    /// Returns how far its writes have come, in bytes; for a replica, how many of them it has.
    pub(crate) fn replicated(&self) -> u64 {
        let info: String = self.command(&["INFO", "replication"]);
        let line = info.lines().find_map(|line| line.strip_prefix("master_repl_offset:"));
        line.unwrap().trim().parse().unwrap()
    }

    /// Returns how often a command was called since the start or the last `CONFIG RESETSTAT`.
    pub(crate) fn calls(&self, command: &str) -> u64 {
        let stats: String = self.command(&["INFO", "commandstats"]);
        let prefix = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&*prefix));
        line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    }

    /// Kills it with SIGKILL, so that nothing is saved.
    pub(crate) fn kill(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }

    /// Starts it again on the same port, empty.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            self.server = spawn(self.port, &self.dir, &self.args);
            if is_ready(self.port, &mut self.server) {
                return;
            }
            assert!(Instant::now() < end, "the server does not come back");
        }
    }

    /// Returns whether it was not killed.
    pub(crate) fn is_alive(&self) -> bool {
        std::path::Path::new(&format!("/proc/{}", self.server.id())).exists()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.id()
    }

    /// Sends it a signal: STOP, CONT, ...
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.server.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }
}

impl Drop for TestRedis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn spawn(port: u16, dir: &TempDir, args: &[String]) -> Child {
    let log = File::create(dir.path().join("log")).unwrap();
    Command::new(server_binary())
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
        .args(args)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", server_binary()))
}

fn is_ready(port: u16, server: &mut Child) -> bool {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap();
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        if server.try_wait().unwrap().is_some() {
            return false;
        }
        if let Ok(mut connection) = client.get_connection() {
            let pid: RedisResult<String> = redis::cmd("INFO").arg("server").query(&mut connection);
            // Checks that it is this server, not another one that took the port.
            if pid.is_ok_and(|info| info.contains(&format!("process_id:{}", server.id()))) {
                return true;
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = server.kill();
    let _ = server.wait();
    false
}
