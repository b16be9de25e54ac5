//! The speed of the backend on etcd, beside what etcd itself does in the same run.
//!
//! `cargo bench -p benches --features etcd --bench etcd` starts a cluster of three members for each case and ends it. Times
//! depend on the machine and never fail a run.

#![allow(clippy::print_stdout, reason = "a table is what it is for")]

#[path = "../../tests/it/support/faulty_proxy.rs"]
#[allow(dead_code, reason = "for the tests of etcd alone")]
mod faulty_proxy;
mod mutex;
#[path = "../../tests/it/support/ports.rs"]
mod ports;
#[path = "../../tests/it/support/etcd.rs"]
#[allow(dead_code, reason = "the tests need more of it")]
mod server;

use std::time::{Duration, Instant};

use clap::Parser;
use futures_util::future::join_all;
use tokio::runtime::Runtime;
use tower_semaphore::backend::etcd_wire::messages::{
    PutRequest, RangeRequest, RequestOp, TxnRequest,
};
use tower_semaphore::backend::etcd_wire::{Client, KeyRange, Settings, Url, WatchMessage};
use tower_semaphore::{Policy, Semaphore};

use self::mutex::Mutex;
use self::server::EtcdCluster;

/// Benchmarks of the semaphore on etcd.
#[derive(Parser)]
#[command(name = "etcd")]
struct Args {
    /// Only these cases, by name or a part of it.
    filters: Vec<String>,
    /// Takes a third of the time.
    #[arg(long)]
    quick: bool,
    /// Passed by cargo; ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Waits until something holds, for at most twenty seconds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "not in twenty seconds: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs for about this time.
type Case = fn(Duration);

fn main() {
    let args = Args::parse();
    let time = if args.quick { Duration::from_secs(1) } else { Duration::from_secs(4) };
    let cases: [(&str, Case); 4] = [
        ("uncontended", uncontended),
        ("grants", grants),
        ("hand-off", hand_off),
        ("contended", contended),
    ];
    for (name, case) in cases {
        if args.filters.is_empty() || args.filters.iter().any(|filter| name.contains(&**filter)) {
            println!("## {name}");
            case(time);
        }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn url(cluster: &EtcdCluster) -> String {
    let members: Vec<_> = cluster.members.iter().map(server::TestEtcd::address).collect();
    format!("etcd://{}", members.join(","))
}

/// Opens a connection to a member, and drives it in a task.
async fn open(cluster: &EtcdCluster, member: usize) -> Client {
    let url = Url::parse(&cluster.members[member].url()).unwrap();
    let settings = Settings::new(&url, Duration::from_secs(5)).unwrap();
    let (client, driver) = Client::open(&url.endpoints[0], &settings).await.unwrap();
    tokio::spawn(driver);
    client
}

/// Processes that have a connection.
async fn connected(url: &str, count: usize) -> Vec<Semaphore> {
    let processes: Vec<_> = (0..count).map(|_| Semaphore::etcd(url).unwrap()).collect();
    for process in &processes {
        drop(process.acquire("warm", &policy(1)).await.unwrap());
    }
    processes
}

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(60)).build().unwrap()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// An acquire, and its release, beside one transaction of the same size.
fn uncontended(time: Duration) {
    let cluster = EtcdCluster::start();
    runtime().block_on(async {
        let client = open(&cluster, 0).await;
        let semaphore = Semaphore::etcd(&cluster.members[0].url()).unwrap();
        let policy = policy(10);
        drop(semaphore.acquire("warm", &policy).await.unwrap());
        let (mut acquires, mut pairs, mut transactions) = (Vec::new(), Vec::new(), Vec::new());
        let end = Instant::now() + time;
        while Instant::now() < end {
            let began = Instant::now();
            let permit = semaphore.acquire("x", &policy).await.unwrap();
            acquires.push(began.elapsed());
            permit.release().await.unwrap();
            pairs.push(began.elapsed());
            let put = PutRequest { key: "k".into(), value: vec![7; 70].into(), lease: 0 };
            let request = TxnRequest { success: vec![RequestOp::from(put)], ..Default::default() };
            let began = Instant::now();
            client.txn(request).await.unwrap();
            transactions.push(began.elapsed());
        }
        let (acquire, pair, one) = (median(acquires), median(pairs), median(transactions));
        println!(
            "acquire {acquire:?}, with its release {pair:?}; one transaction {one:?}: {:.2} and {:.2} ×",
            acquire.as_secs_f64() / one.as_secs_f64(),
            pair.as_secs_f64() / one.as_secs_f64(),
        );
    });
}

/// Permits of a limit of one, handed on by some tasks of three processes, beside etcd's own lock.
fn grants(time: Duration) {
    for tasks in [1, 16] {
        let cluster = EtcdCluster::start();
        runtime().block_on(async {
            let by_lock = {
                let clients =
                    [open(&cluster, 0).await, open(&cluster, 1).await, open(&cluster, 2).await];
                let end = Instant::now() + time;
                let lock = |client: &Client| {
                    let client = client.clone();
                    tokio::spawn(async move {
                        let mutex = Mutex::new(client, "lock").await;
                        let mut count = 0;
                        while Instant::now() < end {
                            mutex.lock().await;
                            count += 1;
                            mutex.unlock().await;
                        }
                        count
                    })
                };
                let all = clients.iter().flat_map(|client| (0..tasks).map(move |_| client));
                sum(join_all(all.map(lock)).await, time)
            };
            let url = url(&cluster);
            let processes = connected(&url, 3).await;
            let end = Instant::now() + time;
            let work = |semaphore: &Semaphore| {
                let (semaphore, policy) = (semaphore.clone(), policy(1));
                tokio::spawn(async move {
                    let mut count = 0;
                    while Instant::now() < end {
                        drop(semaphore.acquire("x", &policy).await.unwrap());
                        count += 1;
                    }
                    count
                })
            };
            let all = processes.iter().flat_map(|process| (0..tasks).map(move |_| process));
            let here = sum(join_all(all.map(work)).await, time);
            println!(
                "3 × {tasks}: {here:.0} grants/s; concurrency.Mutex {by_lock:.0}: {:.1} ×",
                here / by_lock
            );
        });
    }
}

fn sum(counts: Vec<Result<u64, tokio::task::JoinError>>, time: Duration) -> f64 {
    let sum: u64 = counts.into_iter().map(Result::unwrap).sum();
    u32::try_from(sum).map_or(f64::MAX, f64::from) / time.as_secs_f64()
}

/// A permit from one process to the next, beside one commit and the event of it.
fn hand_off(time: Duration) {
    let cluster = EtcdCluster::start();
    runtime().block_on(async {
        let [writer, reader] = [open(&cluster, 0).await, open(&cluster, 1).await];
        let range = KeyRange { key: "k".into(), range_end: Default::default(), start_revision: 0 };
        let mut watch = reader.watch(vec![range]);
        assert!(matches!(watch.next().await.unwrap(), WatchMessage::Created { .. }));
        let of = |member: usize| Semaphore::etcd(&cluster.members[member].url()).unwrap();
        let (one, other, policy) = (of(0), of(1), policy(1));
        let (mut hand_offs, mut events) = (Vec::new(), Vec::new());
        let end = Instant::now() + time;
        while Instant::now() < end {
            let held = one.acquire("x", &policy).await.unwrap();
            let waits = tokio::spawn(other.acquire("x", &policy));
            while one.inspect("x").await.unwrap().waiting == 0 {}
            let began = Instant::now();
            drop(held);
            let permit = waits.await.unwrap().unwrap();
            hand_offs.push(began.elapsed());
            permit.release().await.unwrap();
            let put = PutRequest { key: "k".into(), value: vec![7; 70].into(), lease: 0 };
            let request = TxnRequest { success: vec![RequestOp::from(put)], ..Default::default() };
            let began = Instant::now();
            let (_, event) = tokio::join!(writer.txn(request), watch.next());
            assert!(matches!(event.unwrap(), WatchMessage::Events { .. }));
            events.push(began.elapsed());
        }
        let (hand_off, event) = (median(hand_offs), median(events));
        println!(
            "hand-off {hand_off:?}; a commit and its event {event:?}: {:.2} ×",
            hand_off.as_secs_f64() / event.as_secs_f64()
        );
    });
}

/// The longest wait of eight processes that contend, in medians.
fn contended(time: Duration) {
    for limit in [1, 100_000] {
        let cluster = EtcdCluster::start();
        runtime().block_on(async {
            let url = url(&cluster);
            let processes = connected(&url, 8).await;
            let end = Instant::now() + time;
            let work = |semaphore| {
                let policy = policy(limit);
                tokio::spawn(async move {
                    let mut waits = Vec::new();
                    while Instant::now() < end {
                        let began = Instant::now();
                        let permit = Semaphore::acquire(&semaphore, "x", &policy).await.unwrap();
                        waits.push(began.elapsed());
                        drop(permit);
                    }
                    waits
                })
            };
            let each: Vec<_> = join_all(processes.into_iter().map(work)).await;
            let each: Vec<Vec<Duration>> = each.into_iter().map(Result::unwrap).collect();
            let (least, most) = (each.iter().map(Vec::len).min(), each.iter().map(Vec::len).max());
            let all: Vec<_> = each.concat();
            let longest = all.iter().max().copied().unwrap_or_default();
            let (grants, median) = (all.len(), median(all));
            println!(
                "limit {limit}: {:.0} grants/s, median wait {median:?}, longest {longest:?}: {:.1} medians; grants of a \
                 process {least:?} to {most:?}",
                u32::try_from(grants).map_or(0.0, f64::from) / time.as_secs_f64(),
                longest.as_secs_f64() / median.as_secs_f64(),
            );
        });
    }
}

/// Reads a key alone.
fn read(key: impl Into<bytes::Bytes>) -> RangeRequest {
    RangeRequest { key: key.into(), ..Default::default() }
}
