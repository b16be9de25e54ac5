//! An etcd of a test's own: one member, or a cluster of three.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tower_semaphore::Semaphore;

use super::faulty_proxy::PeerLinks;
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
    /// Where the other members reach it.
    advertised: u16,
    /// Serves health and metrics, without TLS and users.
    metrics: u16,
}

impl Ports {
    fn free() -> Self {
        let peer = free_port();
        Self { client: free_port(), peer, advertised: peer, metrics: free_port() }
    }

    /// The peer URL that the cluster knows.
    fn peer_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.advertised)
    }

    /// The member, as `--initial-cluster` has it.
    fn listed(&self) -> String {
        format!("{}={}", self.peer, self.peer_url())
    }
}

/// Returns the server to test with: `TEST_ETCD`, or the one in the PATH.
fn binary() -> String {
    std::env::var("TEST_ETCD").unwrap_or_else(|_| "etcd".to_owned())
}

/// Returns a tool of operators: the one beside the server, or the one in the PATH.
fn tool(name: &str) -> String {
    let beside = Path::new(&binary()).with_file_name(name);
    let is_there = beside.components().count() > 1 && beside.exists();
    if is_there { beside.display().to_string() } else { name.to_owned() }
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
        Command::new(tool("etcdctl"))
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints={}", self.address()))
            .args(words)
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("etcdctl: {error}"))
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

    /// Returns a data directory with what was saved, for this member.
    fn unpack(&self, saved: &Saved, token: &str) -> PathBuf {
        let data = self.dir.path().join("restored");
        let run = |tool: &str| {
            Command::new(tool)
                .env("ETCDCTL_API", "3")
                .args(["snapshot", "restore"])
                .arg(saved.dir.path().join("snapshot"))
                .arg(format!("--data-dir={}", data.display()))
                .arg(format!("--name={}", self.ports.peer))
                .arg(format!("--initial-advertise-peer-urls={}", self.ports.peer_url()))
                .args(self.args.iter().filter(|arg| arg.starts_with("--initial-cluster=")))
                .arg(format!("--initial-cluster-token={token}"))
                .stdin(Stdio::null())
                .output()
        };
        // Since 3.6, a tool of its own does this.
        let output = run(&tool("etcdutl")).or_else(|_| run(&tool("etcdctl"))).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "snapshot restore: {said}");
        data
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
    /// Between the members, if the cluster was started so.
    links: Option<PeerLinks>,
}

impl EtcdCluster {
    pub(crate) fn start() -> Self {
        Self { members: start(3, &[]), links: None }
    }

    /// Starts a cluster whose members reach each other through proxies.
    pub(crate) fn start_with_links() -> Self {
        for _ in 0..5 {
            let mut ports = free_ports(3);
            let peers: Vec<_> = ports.iter().map(|ports| ports.peer).collect();
            let links = PeerLinks::start(&peers, {
                let peers = peers.clone();
                move |client, proxy| member_of(&peers, client, proxy)
            });
            for (ports, proxy) in ports.iter_mut().zip(links.addresses()) {
                ports.advertised = proxy.port();
            }
            if let Some(members) = try_start(ports, &[]) {
                return Self { members, links: Some(links) };
            }
        }
        panic!("{} did not start behind proxies", binary());
    }

    /// Stalls what a member says to the others, and what they say to it; or lets it pass again.
    pub(crate) fn cut_peers(&self, member: usize, [says, hears]: [bool; 2]) {
        let links = self.links.as_ref().expect("a cluster with links");
        for other in (0..self.members.len()).filter(|other| *other != member) {
            links.stall(member, other, says);
            links.stall(other, member, hears);
        }
    }

    /// Removes a member from the cluster, and has a new one with no data take its place and its ports.
    pub(crate) fn replace(&mut self, at: usize) {
        let id = self.members[at].id();
        let others = (at + 1) % self.members.len();
        // Where another member is new, it is to be in touch for five seconds first.
        until("the cluster lets it go", || {
            self.members[others].try_ctl(&["member", "remove", &id])
        });
        let member = &mut self.members[at];
        until("it ends by itself", || member.server.try_wait().unwrap().is_some());
        let (name, url) = (member.ports.peer.to_string(), member.ports.peer_url());
        let add = ["member", "add", &name, &format!("--peer-urls={url}")];
        until("the cluster takes another one", || self.members[others].try_ctl(&add));
        let member = &mut self.members[at];
        member.dir = TempDir::new().unwrap();
        if !member.args.iter().any(|arg| arg == EXISTING) {
            member.args.push(EXISTING.to_owned());
        }
        member.restart();
        let metrics = member.ports.metrics;
        until("it is part of the cluster", || is_healthy(metrics));
        assert_ne!(self.members[at].id(), id);
    }

    /// Saves the data of the cluster.
    pub(crate) fn save(&self) -> Saved {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("snapshot");
        self.members[0].ctl(&["snapshot", "save", &file.display().to_string()]);
        Saved { dir }
    }

    /// Ends all members, and starts them again with these data. The cluster keeps its id, unless it is to be another one.
    pub(crate) fn restore(&mut self, saved: &Saved, is_other: bool) {
        let token = if is_other { "another" } else { "etcd-cluster" };
        let data: Vec<_> = self.members.iter().map(|member| member.unpack(saved, token)).collect();
        self.members.iter_mut().for_each(TestEtcd::kill);
        for (member, data) in self.members.iter_mut().zip(data) {
            let used = member.dir.path().join("data");
            fs::remove_dir_all(&used).unwrap();
            fs::rename(data, used).unwrap();
        }
        let start =
            |member: &mut TestEtcd| member.server = spawn(&member.dir, member.ports, &member.args);
        self.members.iter_mut().for_each(start);
        for member in &mut self.members {
            let metrics = member.ports.metrics;
            if !becomes(&mut member.server, || get(metrics, "/metrics").is_some()) {
                member.restart();
            }
        }
        self.wait_until_whole();
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

/// A new member joins a cluster that is there.
const EXISTING: &str = "--initial-cluster-state=existing";

/// The data of a cluster as of one moment.
pub(crate) struct Saved {
    dir: TempDir,
}

/// Returns which of the members with these peer ports the client of a connection to a proxy is.
///
/// Each member advertises one address to all others, so only the sockets themselves tell them apart.
fn member_of(peers: &[u16], client: SocketAddr, proxy: SocketAddr) -> Option<usize> {
    let ends = [client.port(), proxy.port()].map(|port| format!("0100007F:{port:04X}"));
    let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
    let mut sockets = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let socket = sockets.find(|fields| fields[1..3] == ends)?;
    let socket = PathBuf::from(format!("socket:[{}]", socket[9]));
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(args) = fs::read_to_string(process.path().join("cmdline")) else { continue };
        let is_of = |peer: &u16| args.split('\0').any(|arg| arg == listens(*peer));
        let Some(member) = peers.iter().position(is_of) else { continue };
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        if files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|of| of == socket)) {
            return Some(member);
        }
    }
    None
}

fn free_ports(count: usize) -> Vec<Ports> {
    (0..count).map(|_| Ports::free()).collect()
}

/// Starts the members of a cluster, and waits until all are part of it.
fn start(count: usize, args: &[&str]) -> Vec<TestEtcd> {
    // Another process can take a port between the check and the start.
    for _ in 0..5 {
        if let Some(members) = try_start(free_ports(count), args) {
            return members;
        }
    }
    panic!("{} did not start; is it installed?", binary());
}

fn try_start(ports: Vec<Ports>, args: &[&str]) -> Option<Vec<TestEtcd>> {
    let all: Vec<_> = ports.iter().map(Ports::listed).collect();
    let all = format!("--initial-cluster={}", all.join(","));
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

/// The argument by which a member is told from others.
fn listens(peer: u16) -> String {
    format!("--listen-peer-urls=http://127.0.0.1:{peer}")
}

fn spawn(dir: &TempDir, ports: Ports, args: &[String]) -> Child {
    let is_tls = args.iter().any(|arg| arg.starts_with("--cert-file"));
    let client = format!("http{}://127.0.0.1:{}", if is_tls { "s" } else { "" }, ports.client);
    let log = File::options().create(true).append(true).open(dir.path().join("log")).unwrap();
    Command::new(binary())
        .arg(format!("--name={}", ports.peer))
        .arg(format!("--data-dir={}", dir.path().join("data").display()))
        .arg(format!("--listen-client-urls={client}"))
        .arg(format!("--advertise-client-urls={client}"))
        .arg(listens(ports.peer))
        .arg(format!("--initial-advertise-peer-urls={}", ports.peer_url()))
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
