//! Very many names are held when connections break, or when Redis loses its data.

use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use deadpool_redis::redis::{Client, Cmd, Connection, FromRedisValue, cmd};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tower_semaphore::{Policy, Semaphore};

use super::process::{self, Parent, Process};
use super::server::TestRedis;
use super::{Figures, count, seconds};

const LEASE: Duration = Duration::from_secs(10);
/// How long a process may print nothing: longer than it takes to acquire all its names.
const SILENCE: Duration = Duration::from_secs(120);
/// How long a request for a new name may take at any time.
const SERVED: Duration = Duration::from_secs(1);
/// How long a refusal may take: the answer timeout, and a moment.
const ANSWERED: Duration = Duration::from_millis(1200);
/// The most connections that a process may open after a fault.
const CONNECTIONS: f64 = 10.0;

/// Holds one permit of each of many names, and requests new names all the time.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
    prefix: String,
    names: usize,
}

/// What a process observed.
#[derive(Serialize, Deserialize)]
struct Report {
    lost: usize,
    /// The number of requests for new names.
    probes: Vec<Probe>,
    /// The greatest delay of a 10 ms timer, in seconds.
    late: f64,
    cpu: f64,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Probe {
    /// By a clock that all processes of this machine share, in seconds.
    began: f64,
    took: f64,
    served: bool,
}

/// A server, and a connection for queries about it.
struct Server {
    redis: TestRedis,
    admin: Connection,
}

impl Server {
    fn start() -> Self {
        let redis = TestRedis::start();
        let admin = Self::connect(&redis);
        Self { redis, admin }
    }

    fn connect(redis: &TestRedis) -> Connection {
        let client = Client::open(redis.url()).expect("a URL");
        client.get_connection().expect("a connection")
    }

    fn query<T: FromRedisValue>(&mut self, command: &Cmd) -> T {
        command.query(&mut self.admin).expect("an answer")
    }

    /// Returns the number of semaphores in use.
    fn names(&mut self) -> usize {
        self.query(&cmd("DBSIZE"))
    }

    /// Returns the number of connections that were opened since its start.
    fn connections(&mut self) -> f64 {
        let stats: String = self.query(cmd("INFO").arg("stats"));
        let line = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        line.expect("a field").trim().parse().expect("a number")
    }
}

pub(crate) fn cut(figures: &mut Figures, names: usize) -> Result<(), String> {
    let mut server = Server::start();
    let mut holder = start(&server, "a", names);
    let _: String = holder.hear(SILENCE)?;
    // Not while all leases are renewed for the first time.
    sleep(LEASE / 2);
    figures.least("names held before, by Redis' count", count(server.names()), count(names));

    let before = server.connections();
    for kind in ["normal", "pubsub"] {
        server.query::<u64>(cmd("CLIENT").arg("KILL").arg("TYPE").arg(kind));
    }
    sleep(LEASE * 5 / 2);
    figures.most("connections opened after the cut", server.connections() - before, CONNECTIONS);
    let report = report(&mut holder)?;
    told(figures, &report, f64::INFINITY, f64::NEG_INFINITY);
    figures.least("names held after 2.5 leases", count(server.names()), count(names));
    Ok(())
}

pub(crate) fn restart(figures: &mut Figures, names: usize) -> Result<(), String> {
    let mut server = Server::start();
    let mut holders = ["a", "b", "c"].map(|prefix| start(&server, prefix, names));
    let all = names * holders.len();
    for holder in &holders {
        let _: String = holder.hear(SILENCE)?;
    }
    sleep(LEASE / 2);
    figures.least("names held before, by Redis' count", count(server.names()), count(all));

    let killed = clock();
    server.redis.restart();
    let (back, began) = (clock(), Instant::now());
    server.admin = Server::connect(&server.redis);
    while server.names() < all && began.elapsed() < 2 * LEASE {
        sleep(Duration::from_millis(50));
    }
    let counted = "seconds until all are counted again";
    figures.most(counted, seconds(began.elapsed()), seconds(LEASE));
    sleep(LEASE * 5 / 2);
    // Without the connection that found it ready, and the one for queries.
    let opened = (server.connections() - 2.0) / count(holders.len());
    figures.most("connections opened after it, by a process", opened, CONNECTIONS);
    for holder in &mut holders {
        let report = report(holder)?;
        told(figures, &report, killed, back);
    }
    figures.least("names held after 2.5 leases more", count(server.names()), count(all));
    Ok(())
}

fn start(server: &Server, prefix: &str, names: usize) -> Process {
    let job = Job { url: server.redis.url(), prefix: prefix.to_owned(), names };
    Process::start(&process::Job::Hold(job))
}

fn report(holder: &mut Process) -> Result<Report, String> {
    holder.tell("report");
    holder.hear(SILENCE)
}

/// Checks what a process reported. Each request for a new name must be served in time, except while the server was
/// `killed` and not yet `back` for a second; and each must be answered.
fn told(figures: &mut Figures, report: &Report, killed: f64, back: f64) {
    let excused =
        |probe: &&Probe| probe.began + probe.took >= killed && probe.began < back + seconds(SERVED);
    let slowest = |served: bool| {
        let probes = report.probes.iter().filter(|probe| probe.served == served);
        probes.map(|probe| probe.took).fold(0.0, f64::max)
    };
    let refused = report.probes.iter().filter(|probe| !probe.served);
    let unserved = refused.filter(|probe| !excused(probe)).count();
    figures.most("permits lost", count(report.lost), 0.0);
    figures.most(
        "slowest request for a new name that was served, s",
        slowest(true),
        seconds(SERVED),
    );
    figures.most("slowest that was refused, s", slowest(false), seconds(ANSWERED));
    figures.most("refused though the server was there for a second", count(unserved), 0.0);
    figures.tell("requests for a new name", count(report.probes.len()));
    figures.tell("a timer of 10 ms was late by, s", report.late);
    figures.tell("CPU time since all were held, s", report.cpu);
}

pub(crate) async fn child(job: &Job, parent: Parent) {
    const TICK: Duration = Duration::from_millis(10);
    let semaphore = Semaphore::redis(&job.url).expect("a URL");
    let policy = Policy::builder(1).lease(LEASE).wait_timeout(Duration::from_secs(30));
    let policy = policy.build().expect("in range");
    let names: Vec<String> = (0..job.names).map(|i| format!("{}{i}", job.prefix)).collect();
    let mut permits = Vec::new();
    for some in names.chunks(500) {
        let some = some.iter().map(|name| semaphore.acquire(&**name, &policy));
        permits.extend(join_all(some).await.into_iter().map(|permit| permit.expect("a permit")));
    }
    let cpu = process::cpu();
    parent.say(&"held");

    let late = Arc::<Mutex<Duration>>::default();
    let shared = Arc::clone(&late);
    let ticker = tokio::spawn(async move {
        loop {
            let before = Instant::now();
            tokio::time::sleep(TICK).await;
            let mut late = shared.lock().expect("no panic");
            *late = late.max(before.elapsed().saturating_sub(TICK));
        }
    });
    let probes = Arc::<Mutex<Vec<_>>>::default();
    let (asked, asking, prefix) = (Arc::clone(&probes), semaphore.clone(), job.prefix.clone());
    let prober = tokio::spawn(async move {
        for i in 0_u64.. {
            let acquire = asking.acquire(format!("{prefix}-new-{i}"), &policy);
            let (began, since) = (clock(), Instant::now());
            let probe = tokio::spawn(async move {
                let served = acquire.await.is_ok();
                Probe { began, took: seconds(since.elapsed()), served }
            });
            asked.lock().expect("no panic").push(probe);
            tokio::time::sleep(2 * TICK).await;
        }
    });

    let parent = parent.heard().await;
    prober.abort();
    ticker.abort();
    let asked = std::mem::take(&mut *probes.lock().expect("no panic"));
    let probes = join_all(asked).await.into_iter().map(|probe| probe.expect("no panic")).collect();
    let lost = permits.iter().filter(|permit| permit.is_lost()).count();
    let late = seconds(*late.lock().expect("no panic"));
    parent.say(&Report { lost, probes, late, cpu: process::cpu() - cpu });
    parent.heard().await;
}

fn clock() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    #[allow(clippy::cast_precision_loss, reason = "a clock that is years old is exact to 1 µs")]
    let seconds = |seconds: i64, ns: i64| seconds as f64 + ns as f64 / 1e9;
    seconds(now.tv_sec, now.tv_nsec)
}
