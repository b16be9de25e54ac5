//! An etcd of a test's own: one member, or a cluster of three.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tower_semaphore::Semaphore;

use super::ports::free_port;
use super::until;

/// A member on free loopback ports, in a directory of its own; killed when this is dropped.
///
/// Heartbeats of 10 ms and elections of 100 ms make the shortest lease one second, and a lost leader is replaced within
/// a quarter of one.
pub(crate) struct TestEtcd {
    server: Child,
    dir: TempDir,
    ports: Ports,
    args: Vec<String>,
}

#[derive(Clone, Copy)]
struct Ports {
    client: u16,
    peer: u16,
    /// Serves health and metrics, without TLS and users.
    metrics: u16,
}

impl Ports {
    fn free() -> Self {
        Self { client: free_port(), peer: free_port(), metrics: free_port() }
    }
}

/// Returns the server to test with: `TEST_ETCD`, or the one in the PATH.
fn binary() -> String {
    std::env::var("TEST_ETCD").unwrap_or_else(|_| "etcd".to_owned())
}

/// Returns the operator's tool: the one beside the server, or the one in the PATH.
fn ctl_binary() -> String {
    let beside = Path::new(&binary()).with_file_name("etcdctl");
    let is_there = beside.components().count() > 1 && beside.exists();
    if is_there { beside.display().to_string() } else { "etcdctl".to_owned() }
}

impl TestEtcd {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(args: &[&str]) -> Self {
        let cluster = start(1, args);
        cluster.into_iter().next().unwrap()
    }

    /// Returns the URL of the member.
    pub(crate) fn url(&self) -> String {
        format!("etcd://{}", self.address())
    }

    /// Creates a process that shares its permits through this member.
    pub(crate) fn semaphore(&self) -> Semaphore {
        Semaphore::etcd(&self.url()).unwrap()
    }

    pub(crate) const fn client_port(&self) -> u16 {
        self.ports.client
    }

    /// Returns `host:port` for clients.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.ports.client)
    }

    /// Runs a command of `etcdctl`, and returns what it prints. The member must not use TLS.
    pub(crate) fn ctl(&self, words: &[&str]) -> String {
        let output = self.run_ctl(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "etcdctl {words:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a command of `etcdctl`. Returns whether it succeeded.
    pub(crate) fn try_ctl(&self, words: &[&str]) -> bool {
        self.run_ctl(words).status.success()
    }

    fn run_ctl(&self, words: &[&str]) -> Output {
        Command::new(ctl_binary())
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints={}", self.address()))
            .args(words)
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("{}: {error}", ctl_binary()))
    }

    /// Returns a number that the member counts.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let metrics = get(self.ports.metrics, "/metrics").unwrap_or_default();
        let mut lines =
            metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        lines.next().map_or(0.0, |value| value.trim().parse().unwrap())
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.metric("etcd_server_is_leader") == 1.0
    }

    /// Returns its id, as `etcdctl` takes it.
    pub(crate) fn id(&self) -> String {
        let status = self.ctl(&["endpoint", "status"]);
        status.split(", ").nth(1).unwrap_or_else(|| panic!("no id in {status}")).to_owned()
    }

    /// Returns the leases of all keys that begin with this.
    pub(crate) fn leases_of(&self, folder: &str) -> Vec<i64> {
        let read: serde_json::Value =
            serde_json::from_str(&self.ctl(&["get", "--prefix", folder, "-w", "json"])).unwrap();
        let kvs = read["kvs"].as_array().map_or(&[][..], Vec::as_slice);
        kvs.iter().map(|kv| kv["lease"].as_i64().expect("a lease")).collect()
    }

    /// Returns the number of streams of watches that it serves.
    pub(crate) fn watches(&self) -> f64 {
        self.metric("etcd_debugging_mvcc_watch_stream_total")
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }

    /// Starts it again, with the same ports and data, after it was killed.
    pub(crate) fn restart(&mut self) {
        // Another process can have one of its ports for a moment.
        for _ in 0..20 {
            self.server = spawn(&self.dir, self.ports, &self.args);
            if becomes(&mut self.server, || get(self.ports.metrics, "/metrics").is_some()) {
                return;
            }
        }
        panic!("the member does not come back");
    }

    /// Stops all of its threads, so that it holds its connections and answers nothing.
    pub(crate) fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets it go on.
    pub(crate) fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let pid = self.server.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }
}

impl Drop for TestEtcd {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A cluster of three members, each of which can be killed, frozen and started again.
pub(crate) struct EtcdCluster {
    pub(crate) members: Vec<TestEtcd>,
}

impl EtcdCluster {
    pub(crate) fn start() -> Self {
        Self { members: start(3, &[]) }
    }

    /// Returns the URL of all members.
    pub(crate) fn url(&self) -> String {
        let addresses: Vec<_> = self.members.iter().map(TestEtcd::address).collect();
        format!("etcd://{}", addresses.join(","))
    }

    /// Returns the index of the member that leads, once one does.
    pub(crate) fn leader(&self) -> usize {
        self.leader_beside(None)
    }

    /// Like [`leader`](Self::leader), without asking this member.
    pub(crate) fn leader_beside(&self, other: impl Into<Option<usize>>) -> usize {
        let (mut leader, other) = (None, other.into());
        until("a member leads", || {
            let mut members = self.members.iter().enumerate();
            leader = members.position(|(at, member)| Some(at) != other && member.is_leader());
            leader.is_some()
        });
        leader.unwrap()
    }

    /// Waits until all members are in touch with a leader.
    pub(crate) fn wait_until_whole(&self) {
        until("all members are healthy", || {
            self.members.iter().all(|member| is_healthy(member.ports.metrics))
        });
    }
}

/// Starts the members of a cluster, and waits until all are part of it.
fn start(count: usize, args: &[&str]) -> Vec<TestEtcd> {
    // Another process can take a port between the check and the start.
    for _ in 0..5 {
        if let Some(members) = try_start(count, args) {
            return members;
        }
    }
    panic!("{} did not start; is it installed?", binary());
}

fn try_start(count: usize, args: &[&str]) -> Option<Vec<TestEtcd>> {
    let ports: Vec<_> = (0..count).map(|_| Ports::free()).collect();
    let all = ports.iter().map(|ports| format!("{0}=http://127.0.0.1:{0}", ports.peer));
    let all = format!("--initial-cluster={}", all.collect::<Vec<_>>().join(","));
    let args = args.iter().map(|arg| (*arg).to_owned()).chain([all]).collect::<Vec<_>>();
    let start = |ports| {
        let dir = TempDir::new().unwrap();
        TestEtcd { server: spawn(&dir, ports, &args), dir, ports, args: args.clone() }
    };
    let mut members: Vec<_> = ports.into_iter().map(start).collect();
    // Without the others, no member is healthy, so all are started before.
    let healthy = |member: &mut TestEtcd| {
        let metrics = member.ports.metrics;
        becomes(&mut member.server, || is_healthy(metrics))
    };
    members.iter_mut().all(healthy).then_some(members)
}

fn spawn(dir: &TempDir, ports: Ports, args: &[String]) -> Child {
    let is_tls = args.iter().any(|arg| arg.starts_with("--cert-file"));
    let client = format!("http{}://127.0.0.1:{}", if is_tls { "s" } else { "" }, ports.client);
    let peer = format!("http://127.0.0.1:{}", ports.peer);
    let log = File::options().create(true).append(true).open(dir.path().join("log")).unwrap();
    Command::new(binary())
        .arg(format!("--name={}", ports.peer))
        .arg(format!("--data-dir={}", dir.path().join("data").display()))
        .arg(format!("--listen-client-urls={client}"))
        .arg(format!("--advertise-client-urls={client}"))
        .arg(format!("--listen-peer-urls={peer}"))
        .arg(format!("--initial-advertise-peer-urls={peer}"))
        .arg(format!("--listen-metrics-urls=http://127.0.0.1:{}", ports.metrics))
        .args(["--heartbeat-interval=10", "--election-timeout=100", "--logger=zap"])
        .args(args)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", binary()))
}

/// Waits until a server that was started does what it should. Returns `false` if it ends instead, and ends it if it
/// takes ten seconds.
fn becomes(server: &mut Child, mut ready: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        if server.try_wait().unwrap().is_some() {
            return false;
        }
        if ready() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = server.kill();
    let _ = server.wait();
    false
}

/// Returns whether a member answers, and the cluster with it.
fn is_healthy(metrics: u16) -> bool {
    get(metrics, "/health").is_some_and(|health| health.contains("\"health\":\"true\""))
}

/// Reads a page of the port for metrics.
fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    Some(page)
}
