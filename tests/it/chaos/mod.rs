//! Chaos: real gateways on one Redis, a fault every few hundred ms, and a checker that reads what
//! came of it.
//!
//! A run has a seed, which decides its schedule of faults: the same seed, the same schedule. What
//! the clients meet with still depends on the machine.

#![allow(clippy::print_stdout, reason = "a run's report is for its reader")]

mod checker;
mod history;
mod load;
mod plan;
mod planted;
mod proxy;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep, sleep_until};

use self::checker::Report;
use self::history::{At, Fault, Kind, Recorder, Rules, Run, What, us};
use self::load::{Addresses, FEW, KEYS, LIMITS, LONG, Load, ONE};
use self::plan::{Planned, SLOTS, plan};
use self::proxy::Proxy;
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway};
use crate::support::redis::{TestRedis, server_binary};

const WAIT: Duration = Duration::from_secs(3);
const LEASE: Duration = Duration::from_secs(1);
/// How long the load goes on after the last fault is over.
const CALM: Duration = Duration::from_millis(2500);

/// Redis, the gateways, and the links between them.
struct World {
    recorder: Arc<Recorder>,
    upstream: String,
    addresses: Addresses,
    redis: Arc<Mutex<TestRedis>>,
    slots: Vec<Slot>,
}

struct Slot {
    proxy: Proxy,
    gateway: Arc<Mutex<Option<Running>>>,
}

struct Running {
    number: usize,
    process: Gateway,
}

/// What a fault befalls, for as long as it lasts.
enum Victim {
    Redis(OwnedMutexGuard<TestRedis>),
    Gateway(OwnedMutexGuard<Option<Running>>),
}

impl World {
    async fn start(recorder: Arc<Recorder>) -> Arc<Self> {
        let upstream = load::upstream(Arc::clone(&recorder)).await;
        let redis = block_in_place(start_redis);
        let port = redis.port();
        let mut slots = Vec::new();
        for _ in 0..SLOTS {
            slots.push(Slot { proxy: Proxy::start(port).await, gateway: Arc::default() });
        }
        let world = Arc::new(Self {
            recorder,
            upstream,
            addresses: Arc::new(StdMutex::new([None; SLOTS])),
            redis: Arc::new(Mutex::new(redis)),
            slots,
        });
        for slot in 0..SLOTS {
            let mut gateway = Arc::clone(&world.slots[slot].gateway).lock_owned().await;
            world.start_gateway(slot, &mut gateway).await;
        }
        world
    }

    async fn start_gateway(&self, slot: usize, to: &mut Option<Running>) -> usize {
        let redis = self.slots[slot].proxy.url();
        let limits = KEYS.iter().zip(LIMITS).map(|(key, limit)| format!("{key}={limit}"));
        let mut args: Vec<String> =
            ["--redis", &redis, "--key", "header:x-key", "--limit", "1"].map(str::to_owned).into();
        args.extend(limits.flat_map(|limit| ["--limit-for".to_owned(), limit]));
        args.extend(["--wait", "3s", "--lease", "1s"].map(str::to_owned));
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let process = block_in_place(|| Gateway::start(&self.upstream, &args));
        let address: SocketAddr = process.url().strip_prefix("http://").unwrap().parse().unwrap();
        let number = self.recorder.born();
        *to = Some(Running { number, process });
        self.addresses.lock().unwrap()[slot] = Some((number, address));
        number
    }

    /// What the fault befalls: taken in the order of the schedule, one fault at a time.
    async fn victim(&self, planned: &Planned) -> Victim {
        match planned.slot {
            Some(slot) => Victim::Gateway(Arc::clone(&self.slots[slot].gateway).lock_owned().await),
            None => Victim::Redis(Arc::clone(&self.redis).lock_owned().await),
        }
    }

    /// Lets a fault happen, from its beginning to its end.
    async fn happen(&self, planned: Planned, mut victim: Victim) {
        let mut fault = Fault {
            what: planned.what,
            gateway: match &victim {
                Victim::Gateway(running) => running.as_ref().map(|running| running.number),
                Victim::Redis(_) => None,
            },
            heir: None,
            begin: self.recorder.now(),
            end: 0,
        };
        // While it lasts it is known already, in case that the run ends badly.
        let index = {
            let mut run = self.recorder.lock();
            run.faults.push(Fault { end: At::MAX, ..fault.clone() });
            run.faults.len() - 1
        };
        fault.end = match &mut victim {
            Victim::Redis(redis) => self.befall_redis(&planned, redis).await,
            Victim::Gateway(running) => self.befall_gateway(&planned, running, &mut fault).await,
        };
        self.recorder.lock().faults[index] = fault;
    }

    /// Returns when it was over.
    async fn befall_redis(&self, planned: &Planned, redis: &mut TestRedis) -> At {
        match planned.what {
            What::FreezeRedis => {
                signal(redis.pid(), "STOP");
                sleep(planned.lasts).await;
                signal(redis.pid(), "CONT");
            }
            What::RestartRedis => {
                redis.kill();
                sleep(planned.lasts).await;
                block_in_place(|| redis.restart());
            }
            What::KillPubsub => {
                block_in_place(|| redis.command::<u64>(&["CLIENT", "KILL", "TYPE", "pubsub"]));
            }
            What::KillNormal => {
                block_in_place(|| redis.command::<u64>(&["CLIENT", "KILL", "TYPE", "normal"]));
            }
            What::ScriptFlush => block_in_place(|| redis.command(&["SCRIPT", "FLUSH"])),
            What::FlushAll => block_in_place(|| redis.command(&["FLUSHALL"])),
            What::DebugSleep => {
                let time = planned.lasts.as_secs_f64().to_string();
                block_in_place(|| redis.command(&["DEBUG", "SLEEP", &time]))
            }
            what => unreachable!("{what:?} befalls one gateway"),
        }
        self.recorder.now()
    }

    async fn befall_gateway(
        &self,
        planned: &Planned,
        running: &mut Option<Running>,
        fault: &mut Fault,
    ) -> At {
        let slot = planned.slot.unwrap();
        let proxy = &self.slots[slot].proxy;
        match planned.what {
            What::KillGateway => {
                if let Some(Running { number, mut process }) = running.take() {
                    let died = self.recorder.now();
                    self.recorder.lock().gateways[number].died = Some(died);
                    self.addresses.lock().unwrap()[slot] = None;
                    block_in_place(|| process.kill());
                }
                sleep(planned.lasts).await;
                fault.heir = Some(self.start_gateway(slot, running).await);
            }
            What::FreezeGateway => {
                let process = &running.as_ref().unwrap().process;
                block_in_place(|| process.signal("STOP"));
                sleep(planned.lasts).await;
                // The time before: what comes after waking comes after it.
                let end = self.recorder.now();
                block_in_place(|| process.signal("CONT"));
                return end;
            }
            What::Delay => {
                proxy.delay(Duration::from_millis(planned.strength));
                sleep(planned.lasts).await;
                proxy.delay(Duration::ZERO);
            }
            What::Stall | What::StallCut => {
                proxy.stall(true);
                sleep(planned.lasts).await;
                if planned.what == What::StallCut {
                    proxy.cut();
                }
                proxy.stall(false);
            }
            What::Cut => proxy.cut(),
            What::HalfClose => proxy.half_close(planned.strength == 1),
            what => unreachable!("{what:?} befalls all"),
        }
        self.recorder.now()
    }
}

fn start_redis() -> TestRedis {
    // Since 7.0 DEBUG has to be asked for; before, the option is not known.
    let version = Command::new(server_binary()).arg("--version").output().unwrap().stdout;
    if String::from_utf8_lossy(&version).contains("v=6.") {
        TestRedis::start()
    } else {
        TestRedis::start_with(&["--enable-debug-command", "local"])
    }
}

fn signal(pid: u32, name: &str) {
    let pid = pid.to_string();
    let status = block_in_place(|| Command::new("kill").args(["-s", name, &pid]).status());
    assert!(status.unwrap().success());
}

/// Notes when this process itself was not let on.
async fn watch_stalls(recorder: Arc<Recorder>) {
    const PULSE: At = 10_000;
    let mut last = recorder.now();
    loop {
        sleep(Duration::from_micros(PULSE)).await;
        let now = recorder.now();
        if now - last > 3 * PULSE {
            recorder.lock().stalls.push((last + PULSE, now));
        }
        last = now;
    }
}

async fn run(seed: u64, length: Duration) -> Run {
    println!("seed {seed}, {length:?} of faults");
    let limits = LIMITS.to_vec();
    let rules = Rules { limits, wait: us(WAIT), lease: us(LEASE) };
    let recorder = Arc::new(Recorder::new(rules));
    let world = World::start(Arc::clone(&recorder)).await;
    // Each gateway has a connection before it counts.
    let client = Client::new();
    let addresses = *world.addresses.lock().unwrap();
    for (_, address) in addresses.into_iter().flatten() {
        let number = "0";
        recorder.sent(warm_up());
        let request = http::Request::get(format!("http://{address}/"));
        let _ = client.send(request.header("x-key", KEYS[ONE]).header("x-number", number)).await;
    }
    recorder.lock().requests.clear();
    let stalls = tokio::spawn(watch_stalls(Arc::clone(&recorder)));
    let load = Arc::new(Load {
        recorder: Arc::clone(&recorder),
        addresses: Arc::clone(&world.addresses),
        stop: AtomicBool::new(false),
    });
    let clients = load.start(seed);

    let began = Instant::now();
    let mut faults = JoinSet::new();
    for planned in plan(seed, length) {
        sleep_until(began + planned.at).await;
        let victim = world.victim(&planned).await;
        let world = Arc::clone(&world);
        faults.spawn(async move { world.happen(planned, victim).await });
    }
    faults.join_all().await;
    sleep(CALM).await;
    load.stop.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    // A dead place in a semaphore that is not full is swept by nobody, so all are filled once more.
    let mut rng = Rng::with_seed(seed);
    let burst = [ONE, FEW, LONG].into_iter().flat_map(|key| [key; 12]).map(|key| {
        let (load, mut rng) = (&load, rng.fork());
        async move { load.request(key, Kind::Short, &mut rng).await }
    });
    join_all(burst).await;

    let redis = world.redis.lock().await;
    let until = Instant::now() + Duration::from_secs(8);
    let mut empty = None;
    while empty.is_none() && Instant::now() < until {
        let keys = block_in_place(|| redis.keys());
        empty = (keys == 0).then(|| recorder.now());
        sleep(Duration::from_millis(10)).await;
    }
    if empty.is_none() {
        let left: Vec<String> = block_in_place(|| redis.command(&["KEYS", "*"]));
        println!("left in Redis: {left:?}");
    }
    stalls.abort();
    let mut run = recorder.lock().clone();
    run.empty = empty;
    let stays = run.requests.iter().flat_map(|request| &request.stays);
    run.in_flight_left = stays.filter(|stay| stay.to.is_none()).count();
    run
}

fn warm_up() -> history::Request {
    history::Request {
        key: ONE,
        gateway: 0,
        kind: Kind::Short,
        work: 0,
        stream: 0,
        sent: 0,
        stays: Vec::new(),
        head: None,
        last_frame: None,
        end: None,
    }
}

/// Where the build's other results are.
fn target() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}

/// Prints the report and writes it down; with the whole history, if something was wrong.
fn publish(seed: u64, run: &Run, report: &Report) {
    print!("{report}");
    let path = target().join(format!("chaos-{seed}.json"));
    std::fs::write(&path, serde_json::to_string_pretty(report).unwrap()).unwrap();
    println!("report: {}", path.display());
    if !report.violations.is_empty() {
        let path = target().join(format!("chaos-{seed}-history.json"));
        std::fs::write(&path, serde_json::to_string(run).unwrap()).unwrap();
        println!("history: {}", path.display());
        for violation in report.violations.iter().take(3) {
            println!("{}", checker::around(run, violation));
        }
    }
}

async fn chaos(seed: u64, length: Duration) -> Report {
    let run = run(seed, length).await;
    let report = checker::check(&run);
    publish(seed, &run, &report);
    assert!(report.violations.is_empty(), "seed {seed}: {} violations", report.violations.len());
    report
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short() {
    let report = chaos(3, Duration::from_secs(18)).await;
    // That there was something to see.
    assert!(report.granted > 500, "{} granted", report.granted);
    assert!(report.compared > 100, "{} compared", report.compared);
    assert!(report.faults.len() >= 10, "{:?}", report.faults);
}

/// Found by seed 21: while the client takes nothing, nobody asks the body for frames, and so nobody
/// tells it that the lease is lost; the upstream works on, beside whoever got the permit next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_nobody_reads_is_cut_when_its_lease_is_lost() {
    let recorder = Arc::new(Recorder::new(Rules::default()));
    let upstream = load::upstream(Arc::clone(&recorder)).await;
    let mut redis = block_in_place(start_redis);
    let args = ["--redis", &redis.url(), "--limit", "1", "--lease", "1s"];
    let gateway = block_in_place(|| Gateway::start(&upstream, &args));
    recorder.sent(warm_up());
    let mut client =
        TcpStream::connect(gateway.url().strip_prefix("http://").unwrap()).await.unwrap();
    let request = format!("GET /?bytes={} HTTP/1.1\r\nhost: x\r\nx-number: 0\r\n\r\n", load::MUCH);
    client.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), b'H');
    // Past this, the buffers on the way are full.
    sleep(Duration::from_millis(500)).await;
    assert!(recorder.lock().requests[0].stays[0].to.is_none());
    redis.kill();
    let killed = Instant::now();
    eventually("the upstream is left", async || recorder.lock().requests[0].stays[0].to.is_some())
        .await;
    let took = killed.elapsed();
    assert!(took < 2 * LEASE, "cut {took:?} after Redis was gone, with a lease of {LEASE:?}");
    drop(client);
}

/// By hand, through `tests/chaos`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: ./tests/chaos --minutes 10"]
async fn long() {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
    };
    let seed = number("CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..1 << 32));
    let minutes = number("CHAOS_MINUTES").unwrap_or(10);
    chaos(seed, Duration::from_secs(60 * minutes)).await;
}
