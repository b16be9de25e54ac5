//! The operator's page in a browser, while one fault after the other befalls a fleet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::support::browser::Browser;
use crate::support::eventually;
use crate::support::fleet::Fleet;
use crate::support::gateway::Gateway;
use crate::support::redis::free_port;

const HOSTILE: &str = "<script>alert(1)</script>";
const TENANTS: [&str; 3] = [HOSTILE, "acme", "umbrella"];
const LIMIT: usize = 3;

/// Clients that want an endless stream, at one gateway after the other, until they are stopped.
struct Clients {
    /// The number of clients.
    wanted: Arc<AtomicUsize>,
    tasks: Vec<JoinHandle<()>>,
}

impl Clients {
    fn start(fleet: &Fleet, tenant: &'static str, most: usize) -> Self {
        let wanted = Arc::new(AtomicUsize::new(0));
        let urls: Vec<String> = fleet.gateways.iter().map(|one| one.url().to_owned()).collect();
        let client = |i: usize| {
            let (wanted, urls) = (Arc::clone(&wanted), urls.clone());
            tokio::spawn(async move {
                for gateway in i.. {
                    let is_wanted = || i < wanted.load(Ordering::Relaxed);
                    if is_wanted() {
                        let stream = stream(&urls[gateway % urls.len()], tenant);
                        tokio::select! {
                            _ = stream => {}
                            () = async { while is_wanted() { pause().await } } => {}
                        }
                    }
                    pause().await;
                }
            })
        };
        let tasks = (0..most).map(client).collect();
        Self { wanted, tasks }
    }

    fn want(&self, count: usize) {
        self.wanted.store(count, Ordering::Relaxed);
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

/// Reads until the stream breaks, or is refused.
async fn stream(gateway: &str, tenant: &str) -> std::io::Result<()> {
    let mut socket = TcpStream::connect(gateway.strip_prefix("http://").unwrap()).await?;
    let request = format!(
        "GET /?stream_ms=600000 HTTP/1.1\r\nhost: x\r\nx-tenant: {tenant}\r\nconnection: close\r\n\r\n"
    );
    socket.write_all(request.as_bytes()).await?;
    let mut buffer = [0; 4096];
    while socket.read(&mut buffer).await? > 0 {}
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_shows_what_the_upstream_has_whatever_breaks() {
    let Some(mut browser) = Browser::start().await else { return };
    let port = free_port().to_string();
    let limit = LIMIT.to_string();
    let args = ["--key", "header:x-tenant", "--limit", &limit, "--lease", "2s", "--wait", "60s"];
    let mut fleet = Fleet::start(0, &[]).await;
    fleet.add(&[&args[..], &["--admin", &port]].concat());
    fleet.add(&args);
    fleet.add(&args);
    let clients = TENANTS.map(|tenant| Clients::start(&fleet, tenant, 9));
    clients[0].want(2);
    let url = format!("http://127.0.0.1:{port}/");
    browser.open(&url).await;
    browser.click(&format!("gateway:{HOSTILE}")).await;
    browser.wait_for("document.querySelector('polyline') !== null").await;

    let mut longest = Duration::ZERO;
    for (round, fault) in FAULTS.into_iter().enumerate() {
        let counts = [1 + round * 5 % 9, 1 + round * 2 % 9, 1 + round * 7 % 9];
        for (clients, count) in clients.iter().zip(counts) {
            clients.want(count);
        }
        strike(&mut fleet, fault, &args).await;
        let struck = Instant::now();
        let (in_use, waiting) = (counts[0].min(LIMIT), counts[0].saturating_sub(LIMIT));
        shows(&mut browser, &fleet, counts, in_use, waiting, fault).await;
        longest = longest.max(struck.elapsed());
        println!("{fault:?}: {in_use} in use, {waiting} wait; right after {:?}", struck.elapsed());
        if matches!(fault, Fault::RedisKilled) {
            clients.iter().for_each(|clients| clients.want(0));
            eventually("all end", async || fleet.upstream.seen().in_flight == 0).await;
        }
    }
    println!("all {} rounds; the longest took {longest:?}", FAULTS.len());
    assert_eq!(browser.dialogs, [""; 0], "a name was run");

    // All tenants beside each other.
    browser.open(&url).await;
    let rows = "[...document.querySelectorAll('tbody tr')].map(row => \
                [0, 2, 5].map(i => row.cells[i].textContent).join(' ')).sort().join('|')";
    let round = FAULTS.len() - 1;
    let counts = [1 + round * 5 % 9, 1 + round * 2 % 9, 1 + round * 7 % 9];
    let mut wanted: Vec<String> = TENANTS
        .iter()
        .zip(counts)
        .map(|(tenant, count)| {
            format!("gateway:{tenant} {} {}", count.min(LIMIT), count.saturating_sub(LIMIT))
        })
        .collect();
    wanted.sort();
    let wanted = serde_json::Value::from(wanted.join("|"));
    browser.wait_for(&format!("{rows} === {wanted}")).await;
    drop(clients);
    fleet.quiet().await;
}

/// Asserts that the page's numbers equal those of the upstream, and the expected ones, at one moment.
async fn shows(
    browser: &mut Browser,
    fleet: &Fleet,
    counts: [usize; 3],
    in_use: usize,
    waiting: usize,
    fault: Fault,
) {
    let end = Instant::now() + Duration::from_secs(20);
    // Without its data, Redis may admit newcomers beside the holders, until these end.
    let may_exceed = matches!(fault, Fault::RedisKilled);
    let page = "['in-use', 'waiting', 'stale-reason'].map(id => \
                document.getElementById(id)?.textContent).join()";
    loop {
        let upstream = TENANTS.map(|tenant| fleet.upstream.in_flight_of(tenant));
        let shown = browser.eval(page).await;
        let right = counts.map(|count| count.min(LIMIT));
        let (in_use, waiting) = if may_exceed {
            (upstream[0], counts[0].saturating_sub(upstream[0]))
        } else {
            (in_use, waiting)
        };
        let is_right = if may_exceed {
            (0..3).all(|i| upstream[i] >= right[i] && upstream[i] <= 2 * LIMIT)
        } else {
            upstream == right
        };
        if is_right && shown == format!("{in_use},{waiting},") {
            return;
        }
        assert!(
            Instant::now() < end,
            "{fault:?}: the page shows {shown}, the upstream has {upstream:?}, not {right:?}"
        );
        pause().await;
    }
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    GatewayKilled,
    GatewayFrozen,
    ConnectionsCut,
    RedisFrozen,
    RedisKilled,
    ScriptsForgotten,
}

const FAULTS: [Fault; 9] = [
    Fault::None,
    Fault::GatewayKilled,
    Fault::ConnectionsCut,
    Fault::GatewayFrozen,
    Fault::ScriptsForgotten,
    Fault::RedisFrozen,
    Fault::RedisKilled,
    Fault::GatewayKilled,
    Fault::None,
];

async fn strike(fleet: &mut Fleet, fault: Fault, args: &[&str]) {
    // While a permit is held and others wait.
    pause().await;
    match fault {
        Fault::None => {}
        Fault::GatewayKilled => {
            fleet.gateways[1].kill();
            let listen = fleet.gateways[1].url().strip_prefix("http://").unwrap().to_owned();
            let redis = fleet.redis.url();
            let args = [&["--redis", &redis, "--listen", &listen], args].concat();
            let mut command = Gateway::command();
            command.args(["--upstream", &fleet.upstream.url()]).args(args);
            fleet.gateways[1] = Gateway::running(command.spawn().unwrap());
        }
        Fault::GatewayFrozen => {
            fleet.gateways[2].signal("STOP");
            // Past its lease.
            tokio::time::sleep(Duration::from_millis(2500)).await;
            fleet.gateways[2].signal("CONT");
        }
        Fault::ConnectionsCut => {
            fleet.redis.command::<u64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            fleet.redis.command::<u64>(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        }
        Fault::RedisFrozen => {
            fleet.redis.signal("STOP");
            tokio::time::sleep(Duration::from_millis(1500)).await;
            fleet.redis.signal("CONT");
        }
        Fault::RedisKilled => {
            fleet.redis.kill();
            tokio::time::sleep(Duration::from_millis(500)).await;
            fleet.redis.restart();
        }
        Fault::ScriptsForgotten => fleet.redis.command::<()>(&["SCRIPT", "FLUSH"]),
    }
}
