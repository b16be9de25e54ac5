//! A fleet under a fault whose parts are known: its cost, in figures from outside.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::StatusCode;
use http_body_util::BodyExt;
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{sleep, timeout};

use crate::support::eventually;
use crate::support::fleet::Fleet;
use crate::support::gateway::{Client, Gateway};

/// Past every bound of these tests.
const LONG: Duration = Duration::from_secs(15);

// ===== Redis is killed, and comes back empty =====

const LIMIT: usize = 5;
const WAIT: Duration = Duration::from_secs(1);
const GONE: Duration = Duration::from_millis(1500);

/// A request of the load, and its outcome.
struct Asked {
    gateway: usize,
    sent: Instant,
    came: Instant,
    status: StatusCode,
}

/// Short requests by thirty clients, ten for each of three gateways, until it is stopped.
struct Load {
    asked: Arc<Mutex<Vec<Asked>>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(fleet: &Fleet) -> Self {
        let (asked, stop) = (Arc::<Mutex<Vec<Asked>>>::default(), Arc::<AtomicBool>::default());
        let clients = (0..30).map(|i| {
            let (client, url, gateway) = (fleet.client.clone(), fleet.url(i, "/?ms=20"), i % 3);
            let (asked, stop) = (Arc::clone(&asked), Arc::clone(&stop));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let sent = Instant::now();
                    let status = timeout(LONG, client.get(&url)).await.expect("an answer");
                    let came = Instant::now();
                    asked.lock().unwrap().push(Asked { gateway, sent, came, status });
                    if status != StatusCode::OK {
                        sleep(Duration::from_millis(40)).await;
                    }
                }
            })
        });
        let clients = clients.collect();
        Self { asked, stop, clients }
    }

    async fn stop(self) -> Vec<Asked> {
        self.stop.store(true, Ordering::Relaxed);
        join_all(self.clients).await.into_iter().for_each(Result::unwrap);
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_killed_under_load_and_started_empty_costs_little() {
    let limit = LIMIT.to_string();
    let mut fleet = Fleet::start(3, &["--limit", &limit, "--wait", "1s"]).await;
    for gateway in 0..3 {
        assert_eq!(fleet.client.get(&fleet.url(gateway, "/")).await, 200);
    }
    // With a lease of 10 s, which is longer than all of this.
    let streams: Vec<_> = (0..2)
        .map(|gateway| {
            let (client, url) = (fleet.client.clone(), fleet.url(gateway, "/?stream_ms=6000"));
            tokio::spawn(async move {
                let body = client.open(&url).await.into_body().collect().await;
                (body.unwrap().to_bytes().len(), Instant::now())
            })
        })
        .collect();
    eventually("they flow", async || fleet.upstream.seen().in_flight == 2).await;
    let load = Load::start(&fleet);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(fleet.upstream.over(LIMIT), Duration::ZERO);

    block_in_place(|| fleet.redis.kill());
    let gone = Instant::now();
    sleep(GONE).await;
    let starting = Instant::now();
    block_in_place(|| fleet.redis.restart());
    let back = Instant::now();
    sleep(Duration::from_secs(2)).await;
    let asked = load.stop().await;
    let stopped = Instant::now();

    let slowest = asked.iter().map(|asked| asked.came - asked.sent).max().unwrap();
    let sent_meanwhile = |asked: &&Asked| asked.sent >= gone && asked.sent < starting;
    let meanwhile: Vec<_> = asked.iter().filter(sent_meanwhile).collect();
    let refused = meanwhile.iter().filter(|asked| asked.status == 503).count();
    let served = (0..3).map(|gateway| {
        let anew = |asked: &&Asked| {
            asked.gateway == gateway && asked.sent >= gone && asked.status == StatusCode::OK
        };
        let first = asked.iter().filter(anew).map(|asked| asked.came).min();
        first.expect("served again").saturating_duration_since(back)
    });
    let served: Vec<_> = served.collect();
    let over = fleet.upstream.over(LIMIT);
    let peak = fleet.upstream.seen().peak;
    let mut statuses = BTreeMap::<_, usize>::new();
    for asked in &asked {
        *statuses.entry(asked.status.as_u16()).or_default() += 1;
    }
    println!(
        "{statuses:?}, the slowest after {slowest:?}; {refused} of {} refused while Redis was gone; \
         served again after {served:?}; over the cap for {over:?}, {peak} at the most",
        meanwhile.len(),
    );
    assert!(slowest < WAIT + Duration::from_millis(500), "{slowest:?}");
    for asked in &meanwhile {
        let allowed = asked.status == 503 || (asked.status == 200 && asked.came >= starting);
        assert!(allowed, "{} after {:?}", asked.status, asked.came - asked.sent);
    }
    assert!(refused > 100, "{refused}");
    // Requests that waited when Redis went may have waited in vain.
    assert!(statuses.keys().all(|status| [200, 429, 503].contains(status)), "{statuses:?}");
    assert!(served.iter().all(|served| *served < Duration::from_secs(1)), "{served:?}");
    assert!(over < Duration::from_millis(300), "{over:?}");
    assert!(peak <= 2 * LIMIT, "{peak}");
    for stream in streams {
        let (length, ended) = stream.await.unwrap();
        assert_eq!(length, 300 * "chunk\n".len());
        assert!(ended > stopped, "it was to flow all the while");
    }
    fleet.quiet().await;
}

// ===== a gateway stands still =====

/// What a client receives of a stream, as it comes.
#[derive(Default)]
struct Got {
    frames: Mutex<Vec<Instant>>,
    /// When it ended, and how.
    end: Mutex<Option<(Instant, Result<(), String>)>>,
}

impl Got {
    /// Reads all the time, so that nothing stays in a buffer.
    fn read(mut body: hyper::body::Incoming) -> Arc<Self> {
        let got = Arc::<Self>::default();
        let notes = Arc::clone(&got);
        tokio::spawn(async move {
            let end = loop {
                match body.frame().await {
                    Some(Ok(_)) => notes.frames.lock().unwrap().push(Instant::now()),
                    Some(Err(error)) => break Err(error.to_string()),
                    None => break Ok(()),
                }
            };
            *notes.end.lock().unwrap() = Some((Instant::now(), end));
        });
        got
    }

    fn frames(&self) -> usize {
        self.frames.lock().unwrap().len()
    }
}

/// Returns whether the whole process is stopped by a signal.
fn is_stopped(gateway: &Gateway) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", gateway.pid())).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('T')
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_wakes_past_its_lease_sends_not_one_frame_more() {
    let lease = Duration::from_secs(1);
    let fleet = Fleet::start(2, &["--limit", "1", "--lease", "1s", "--wait", "30s"]).await;
    for gateway in 0..2 {
        assert_eq!(fleet.client.get(&fleet.url(gateway, "/")).await, 200);
    }
    let stream = Got::read(fleet.client.open(&fleet.url(0, "/?stream_ms=60000")).await.into_body());
    let next = {
        let (client, url) = (Client::new(), fleet.url(1, "/?stream_ms=60000"));
        tokio::spawn(async move { (client.open(&url).await, Instant::now()) })
    };
    let watch = fleet.redis.semaphore();
    eventually("the other waits", async || watch.inspect("gateway").await.unwrap().waiting == 1)
        .await;
    // A held place is renewed, and not lost, while its gateway lives.
    sleep(2 * lease).await;
    assert!(stream.frames() > 50 && !next.is_finished());

    fleet.gateways[0].signal("STOP");
    eventually("it stands still", async || is_stopped(&fleet.gateways[0])).await;
    let stopped = Instant::now();
    let (response, came) = timeout(LONG, next).await.expect("served").unwrap();
    assert_eq!(response.status(), 200);
    let served = came - stopped;
    // Well past the lease. The client has long received what was in the kernel. What the upstream has sent meanwhile is
    // unread in the gateway's socket.
    sleep((2 * lease).saturating_sub(stopped.elapsed())).await;
    let before = stream.frames();
    sleep(Duration::from_millis(500)).await;
    assert_eq!((before, fleet.upstream.seen().in_flight), (stream.frames(), 2));

    let woken = Instant::now();
    fleet.gateways[0].signal("CONT");
    eventually("its stream ends", async || stream.end.lock().unwrap().is_some()).await;
    let (ended, how) = stream.end.lock().unwrap().clone().unwrap();
    let after = stream.frames() - before;
    let ended = ended - woken;
    eventually("it leaves the upstream", async || fleet.upstream.seen().in_flight == 1).await;
    let left = woken.elapsed();
    println!(
        "served elsewhere {served:?} after the stop, with a lease of {lease:?}; woken after {:?}: \
         ended after {ended:?} with {how:?}, {after} frames more; left the upstream after {left:?}",
        woken - stopped
    );
    assert!(served < lease + Duration::from_secs(1), "{served:?}");
    assert_eq!(after, 0, "frames after waking");
    assert!(how.is_err(), "an end that looks as it should");
    assert!(ended < Duration::from_millis(200), "{ended:?}");
    drop((response, watch));
    fleet.quiet().await;
}

// ===== hints and scripts are lost =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_freed_permit_reaches_its_waiter_though_all_subscriptions_and_scripts_are_lost() {
    let fleet = Fleet::start(2, &["--limit", "1", "--wait", "30s"]).await;
    let watch = fleet.redis.semaphore();
    let mut all = Vec::new();
    for round in 0..8 {
        let mut held = Some(fleet.client.open(&fleet.url(round, "/?stream_ms=60000")).await);
        let waits = {
            let (client, url) = (fleet.client.clone(), fleet.url(round + 1, "/?ms=1"));
            tokio::spawn(async move { (client.open(&url).await.status(), Instant::now()) })
        };
        eventually("it waits", async || {
            watch.inspect("gateway").await.is_ok_and(|seen| (seen.in_use, seen.waiting) == (1, 1))
        })
        .await;
        let mut freed = Instant::now();
        let mut cut = 0;
        for step in 0..3 {
            // Released before the cuts, in between, or after them, because the client leaves.
            if step == round % 3 {
                freed = Instant::now();
                drop(held.take());
            }
            block_in_place(|| match step {
                0 => {
                    cut += fleet.redis.command::<u64>(&["CLIENT", "KILL", "TYPE", "pubsub"]);
                    cut += fleet.redis.command::<u64>(&["CLIENT", "KILL", "TYPE", "normal"]);
                }
                1 => fleet.redis.command::<()>(&["SCRIPT", "FLUSH"]),
                _ => {}
            });
        }
        let (status, came) = timeout(LONG, waits).await.expect("served").unwrap();
        let took = came - freed;
        all.push(took);
        assert_eq!(status, 200);
        // The connection of each gateway, and the test's own.
        assert!(cut >= 3, "round {round}: only {cut} connections were cut");
        assert!(took < Duration::from_millis(1200), "round {round}: {took:?}");
    }
    println!("served at the latest {:?} after it was freed: {all:?}", all.iter().max().unwrap());
    drop(watch);
    fleet.quiet().await;
}
