//! A Redis server of a case's own, and what it reports of its work.

#[path = "../../tests/it/support/ports.rs"]
mod ports;
#[path = "../../tests/it/support/redis.rs"]
#[allow(dead_code, reason = "the tests need more of it")]
mod server;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::time::Duration;

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::io::tcp::TcpSettings;
use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, Cmd, Connection, FromRedisValue, IntoConnectionInfo, Pipeline,
};
use tokio::time::sleep;
use tower_semaphore::Semaphore;

use self::server::TestRedis;

/// A server, killed when this is dropped, and a connection for queries about it.
pub(crate) struct Redis {
    server: TestRedis,
    admin: Mutex<Connection>,
}

impl Redis {
    pub(crate) fn start() -> Self {
        let server = TestRedis::start();
        let admin = Client::open(server.url()).and_then(|client| client.get_connection());
        Self { server, admin: Mutex::new(admin.expect("a connection")) }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.server.port()).into()
    }

    pub(crate) fn semaphore(&self) -> Semaphore {
        Semaphore::redis(&self.url()).expect("a URL")
    }

    /// Blocks, so do not call it during a measurement.
    pub(crate) fn query<T: FromRedisValue>(&self, command: &Cmd) -> T {
        let mut admin = self.admin.lock().expect("no panic");
        command.query(&mut *admin).expect("an answer")
    }

    pub(crate) fn pipeline(&self, commands: &Pipeline) {
        let mut admin = self.admin.lock().expect("no panic");
        commands.exec(&mut *admin).expect("an answer");
    }

    fn info(&self, section: &str) -> BTreeMap<String, String> {
        let text: String = self.query(Cmd::new().arg("INFO").arg(section));
        let pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// Returns what it has done since its start.
    pub(crate) fn usage(&self) -> Usage {
        let cpu = self.info("cpu");
        let seconds = |name: &str| cpu[name].parse::<f64>().expect("seconds");
        let cpu_us = (seconds("used_cpu_user") + seconds("used_cpu_sys")) * 1e6;
        let stats = self.info("commandstats");
        let (mut calls, mut scripts, mut script_us) = (0.0, 0.0, 0.0);
        for (name, fields) in &stats {
            let field = |field: &str| -> f64 {
                let fields = fields.split(',').filter_map(|pair| pair.split_once('='));
                let value = fields.into_iter().find(|(name, _)| *name == field);
                value.expect("a field").1.parse().expect("a number")
            };
            match &**name {
                "cmdstat_info" => {}
                "cmdstat_evalsha" => {
                    scripts = field("calls");
                    script_us = field("usec");
                    calls += scripts;
                }
                _ => calls += field("calls"),
            }
        }
        Usage { cpu_us, calls, scripts, script_us }
    }

    /// Returns the bytes in use, without the buffers of clients.
    pub(crate) fn memory(&self) -> f64 {
        let memory = self.info("memory");
        let bytes = |name: &str| memory[name].parse::<f64>().expect("bytes");
        bytes("used_memory") - bytes("mem_clients_normal")
    }
}

/// The work of a server, as it reports it.
#[derive(Clone, Copy)]
pub(crate) struct Usage {
    /// CPU time, of users and system, in µs.
    pub(crate) cpu_us: f64,
    /// All commands except INFO, including those in scripts.
    pub(crate) calls: f64,
    /// Calls of EVALSHA.
    pub(crate) scripts: f64,
    script_us: f64,
}

impl Usage {
    /// Returns the work since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            cpu_us: self.cpu_us - before.cpu_us,
            calls: self.calls - before.calls,
            scripts: self.scripts - before.scripts,
            script_us: self.script_us - before.script_us,
        }
    }

    /// Returns the µs of a script call, by `commandstats`.
    pub(crate) fn per_script(self) -> f64 {
        self.script_us / self.scripts
    }
}

/// Waits until this number of places wait.
pub(crate) async fn until_waiting(semaphore: &Semaphore, name: &str, count: u32) {
    for _ in 0..2500 {
        if semaphore.inspect(name).await.expect("an answer").waiting >= u64::from(count) {
            return;
        }
        sleep(Duration::from_millis(2)).await;
    }
    panic!("not all of them wait");
}

/// A connection as one would write it by hand: one socket for all tasks, no delay, no timeouts.
pub(crate) async fn connect(url: &str) -> MultiplexedConnection {
    let info = url.into_connection_info().expect("a URL");
    let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let client = Client::open(info).expect("a URL");
    client.get_multiplexed_async_connection_with_config(&config).await.expect("a connection")
}
