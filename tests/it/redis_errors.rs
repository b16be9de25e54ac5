//! Each error that Redis can reply with: the answer to a request, and that nothing is left behind.

use std::cell::RefCell;
use std::error::Error;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use deadpool_redis::redis::{self, FromRedisValue};
use futures_util::future::join_all;
use tokio::net::TcpListener;
use tower_semaphore::backend::RedisBackend;
use tower_semaphore::{AcquireError, ConnectionState, Permit, Policy, Semaphore};
use tracing::Level;

use crate::support::eventually;
use crate::support::proxy::Proxy;
use crate::support::redis::{TestRedis, free_port};
use crate::support::semaphore::{down, empty, in_use, up, waiting, warm};
use crate::support::stopwatch::Stopwatch;
use crate::support::told::Told;

/// The time in which a request must be answered, whatever state Redis is in: to open a connection, or to wait for an
/// answer on it, on a busy machine.
const SOON: Duration = Duration::from_millis(1500);
/// The same, while it is known that Redis cannot be asked.
const AT_ONCE: Duration = Duration::from_millis(250);

fn policy(limit: u32, lease_ms: u64) -> Policy {
    Policy::builder(limit)
        .wait_timeout(Duration::from_secs(10))
        .lease(Duration::from_millis(lease_ms))
        .build()
        .unwrap()
}

/// The operator's own connection, which stays.
struct Admin(RefCell<redis::Connection>);

impl Admin {
    fn new(redis: &TestRedis) -> Self {
        let client = redis::Client::open(redis.url()).unwrap();
        Self(RefCell::new(client.get_connection().unwrap()))
    }

    fn run<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_run(words).unwrap()
    }

    fn try_run<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query(&mut *self.0.borrow_mut())
    }

    fn info(&self, section: &str, field: &str) -> String {
        let info: String = self.run(&["INFO", section]);
        let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("INFO {section} has no {field}")).trim().to_owned()
    }

    fn connections(&self) -> usize {
        self.info("stats", "total_connections_received").parse().unwrap()
    }
}

fn semaphore(url: impl Into<String>) -> Semaphore {
    Semaphore::new(RedisBackend::builder(url).build().unwrap())
}

/// Returns the error of a request that can get no permit because of Redis.
async fn told(semaphore: &Semaphore, name: &str, policy: &Policy, within: Duration) -> String {
    let began = Stopwatch::start();
    let answer = semaphore.acquire(name, policy).await;
    let took = began.elapsed();
    assert!(took < within, "it took {took:?} to answer {answer:?}");
    match answer {
        Err(error @ AcquireError::Unavailable(_)) => error.to_string(),
        other => panic!("expected that Redis cannot be asked, but: {other:?}"),
    }
}

/// Makes requests all the time for a second, while it is known that Redis cannot be asked: each is answered at once.
/// Returns one of the texts.
async fn pressed(semaphore: &Semaphore, policy: &Policy, says: &str) -> String {
    let end = Instant::now() + Duration::from_secs(1);
    let mut asked = 0;
    loop {
        let text = told(semaphore, "pressed", policy, AT_ONCE).await;
        assert!(text.contains(says), "{text}");
        asked += 1;
        if Instant::now() >= end {
            assert!(asked > 20, "{asked}");
            return text;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The first pauses are short; then there are four to eight in a second.
fn assert_no_storm(connections: usize, over: Duration) {
    let most = 8 + 8 * usize::try_from(over.as_millis()).unwrap() / 1000;
    assert!(connections <= most, "{connections} connections were opened in {over:?}");
}

/// Returns everything that is visible of an error.
fn all_of(error: &(dyn Error + 'static)) -> String {
    let mut shown = format!("{error} {error:?}");
    let mut source = error.source();
    while let Some(error) = source {
        shown.push_str(&format!(" {error} {error:?}"));
        source = error.source();
    }
    shown
}

// ===== NOSCRIPT =====

#[tokio::test]
async fn forgotten_scripts_are_not_noticed_under_load() {
    let redis = TestRedis::start();
    let nodes = [redis.semaphore(), redis.semaphore()];
    let policy = policy(3, 5000);
    let in_flight = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let mut load = Vec::new();
    for worker in 0..24 {
        let (node, policy) = (nodes[worker % 2].clone(), policy.clone());
        let (in_flight, done) = (Arc::clone(&in_flight), Arc::clone(&done));
        load.push(tokio::spawn(async move {
            let mut served = 0;
            while !done.load(Ordering::Relaxed) {
                let permit = node.acquire("x", &policy).await.unwrap();
                assert!(in_flight.fetch_add(1, Ordering::SeqCst) < 3);
                tokio::task::yield_now().await;
                in_flight.fetch_sub(1, Ordering::SeqCst);
                drop(permit);
                served += 1;
            }
            served
        }));
    }
    let admin = Admin::new(&redis);
    for _ in 0..150 {
        admin.run::<()>(&["SCRIPT", "FLUSH"]);
        tokio::time::sleep(Duration::from_millis(7)).await;
    }
    done.store(true, Ordering::Relaxed);
    for worker in load {
        assert!(worker.await.unwrap() > 0, "a worker was never served");
    }
    // Whole scripts were sent again and again, so the fault did occur.
    assert!(redis.calls("eval") > 20, "{}", redis.calls("eval"));
    assert!(nodes.iter().all(|node| node.health().disconnects == 0));
    empty(&redis).await;
}

#[tokio::test]
async fn forgotten_scripts_do_not_make_a_process_miss_its_own_release() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let policy = policy(1, 5000);
    let admin = Admin::new(&redis);
    for round in 0..300 {
        let permit = semaphore.try_acquire("x", &policy).await;
        let permit = permit.unwrap_or_else(|error| panic!("round {round}: {error}"));
        admin.run::<()>(&["SCRIPT", "FLUSH"]);
        drop(permit);
    }
    empty(&redis).await;
}

// ===== LOADING =====

#[tokio::test]
async fn a_server_that_loads_its_data_is_waited_for() {
    // With a pause at each key; and the server serves its clients after every 2 MB that it has loaded.
    let mut redis = TestRedis::start_with(&["--key-load-delay", "2500", "--rdbcompression", "no"]);
    redis.command::<()>(&[
        "EVAL",
        "local text = string.rep('x', 60000)
         for i = 1, 1000 do redis.call('SET', 'other' .. i, text) end",
        "0",
    ]);
    let semaphore = redis.semaphore();
    let policy = policy(1, 20_000);
    let held = semaphore.acquire("x", &policy).await.unwrap();
    redis.command::<()>(&["SAVE"]);
    redis.restart();
    let began = Instant::now();
    let admin = Admin::new(&redis);
    assert_eq!(admin.info("persistence", "loading"), "1", "it loads too fast for this test");
    told(&semaphore, "pressed", &policy, SOON).await;
    down(&semaphore).await;
    let before = admin.connections();
    pressed(&semaphore, &policy, "loading the dataset").await;
    assert_eq!(admin.info("persistence", "loading"), "1", "it loads too fast for this test");
    assert_no_storm(admin.connections() - before, Duration::from_secs(1));
    let waits = tokio::spawn({
        let semaphore = semaphore.clone();
        async move {
            up(&semaphore).await;
            semaphore.acquire("x", &policy).await
        }
    });
    eventually("it is loaded", async || admin.info("persistence", "loading") == "0").await;
    let loaded = Stopwatch::start();
    assert!(began.elapsed() > Duration::from_millis(500));
    up(&semaphore).await;
    assert!(loaded.elapsed() < SOON, "{:?}", loaded.elapsed());
    waiting(&semaphore, "x", 1).await;
    in_use(&semaphore, "x", 1).await;
    assert!(!held.is_lost());
    drop(held);
    drop(waits.await.unwrap().unwrap());
    eventually("only what others keep there is left", async || redis.keys() == 1000).await;
}

/// All calls in flight together take longer than one answer may, and each answer comes in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_slow_and_answers_is_not_given_up() {
    const NAMES: u64 = 1000;
    let redis = TestRedis::start();
    let proxy = Proxy::start(redis.port()).await;
    let semaphore = Semaphore::new(RedisBackend::builder(proxy.url()).build().unwrap());
    let policy = policy(1, 9000);
    let held = (0..NAMES).map(|n| semaphore.acquire(format!("n{n}"), &policy));
    let held = join_all(held).await.into_iter().map(Result::unwrap).collect::<Vec<_>>();
    // About a hundred renewals in each write, and four writes in flight.
    proxy.slow(8_000);
    let before = redis.calls("evalsha");
    eventually("all are renewed", async || redis.calls("evalsha") >= before + NAMES).await;
    assert_eq!(proxy.connections(), 1, "it was given up");
    assert!(held.iter().all(|permit| !permit.is_lost()));
}

// ===== BUSY =====

#[tokio::test]
async fn a_script_that_does_not_end_is_survived() {
    let redis = TestRedis::start_with(&["--lua-time-limit", "100"]);
    let semaphore = redis.semaphore();
    let policy = policy(1, 8000);
    let held = semaphore.acquire("x", &policy).await.unwrap();
    let admin = Admin::new(&redis);
    let before = admin.connections();
    let began = Instant::now();
    let culprit = Admin::new(&redis);
    let culprit = std::thread::spawn(move || {
        culprit.try_run::<()>(&["EVAL", "while true do end", "0"]).unwrap_err().to_string()
    });
    eventually("it is busy", async || {
        let answer = admin.try_run::<()>(&["GET", "nothing"]);
        answer.is_err_and(|error| error.code() == Some("BUSY"))
    })
    .await;
    told(&semaphore, "pressed", &policy, SOON).await;
    down(&semaphore).await;
    let text = pressed(&semaphore, &policy, "BUSY").await;
    assert!(text.contains("SCRIPT KILL"), "{text}");
    assert!(!held.is_lost());
    admin.run::<()>(&["SCRIPT", "KILL"]);
    let back = Stopwatch::start();
    let answer = culprit.join().unwrap();
    assert!(answer.contains("killed"), "{answer}");
    up(&semaphore).await;
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    assert_no_storm(admin.connections() - before, began.elapsed());
    in_use(&semaphore, "x", 1).await;
    assert!(!held.is_lost());
    drop(held);
    drop(semaphore.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}

// ===== OOM =====

#[tokio::test]
async fn without_memory_nothing_new_is_granted_but_what_is_there_lives_and_is_given_back() {
    let redis = TestRedis::start();
    let (a, b) = (redis.semaphore(), redis.semaphore());
    let lease = Duration::from_millis(600);
    let policy = policy(1, 600);
    let held = a.acquire("x", &policy).await.unwrap();
    let first = tokio::spawn(b.acquire("x", &policy));
    waiting(&a, "x", 1).await;
    let admin = Admin::new(&redis);
    admin.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    for node in [&a, &b] {
        let text = told(node, "y", &policy, SOON).await;
        assert!(text.contains("OOM") && text.contains("maxmemory"), "{text}");
    }
    // Nor does a full server admit any request, or let it queue.
    told(&a, "x", &policy, SOON).await;
    tokio::time::sleep(3 * lease).await;
    assert!(!held.is_lost());
    let seen = a.inspect("x").await.unwrap();
    assert_eq!((seen.in_use, seen.waiting), (1, 1), "{seen:?}");
    // Handed over, and released.
    held.release().await.unwrap();
    let permit = first.await.unwrap().unwrap();
    tokio::time::sleep(3 * lease).await;
    assert!(!permit.is_lost());
    permit.release().await.unwrap();
    assert_eq!(redis.keys(), 0);
    // Not a reason to reconnect.
    assert!([&a, &b].iter().all(|node| node.health().disconnects == 0));
    admin.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    for node in [&a, &b] {
        drop(node.acquire("y", &policy).await.unwrap());
    }
    empty(&redis).await;
}

#[tokio::test]
async fn without_memory_a_lost_connection_costs_no_permit() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let lease = Duration::from_millis(900);
    let held = semaphore.acquire("x", &policy(1, 900)).await.unwrap();
    let admin = Admin::new(&redis);
    admin.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    admin.run::<()>(&["SCRIPT", "FLUSH"]);
    cut(&admin);
    eventually("it was cut", async || semaphore.health().disconnects == 1).await;
    up(&semaphore).await;
    tokio::time::sleep(3 * lease).await;
    assert!(!held.is_lost());
    held.release().await.unwrap();
    assert_eq!(redis.keys(), 0);
}

// ===== READONLY =====

#[tokio::test]
async fn a_primary_that_became_a_replica_is_not_asked_until_it_is_a_primary_again() {
    let redis = TestRedis::start();
    let primary = TestRedis::start_with(&["--repl-diskless-sync-delay", "0"]);
    let (a, b) = (redis.semaphore(), redis.semaphore());
    let policy = policy(1, 20_000);
    let held = a.acquire("x", &policy).await.unwrap();
    let waits = tokio::spawn(b.acquire("x", &policy));
    waiting(&a, "x", 1).await;
    let admin = Admin::new(&redis);
    admin.run::<()>(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]);
    let text = told(&a, "pressed", &policy, SOON).await;
    assert!(text.contains("read only replica"), "{text}");
    down(&a).await;
    // The other one finds out by itself: waiting places are renewed every second.
    down(&b).await;
    // Once it is synchronized, it has lost its data. Until then it may stand still.
    eventually("it is in step", async || {
        admin.info("replication", "master_link_status") == "up" && redis.keys() == 0
    })
    .await;
    let before = admin.connections();
    let began = Instant::now();
    pressed(&a, &policy, "read only replica").await;
    assert_no_storm((admin.connections() - before) / 2, began.elapsed());
    admin.run::<()>(&["REPLICAOF", "NO", "ONE"]);
    let back = Stopwatch::start();
    up(&a).await;
    up(&b).await;
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    // Both are back. A waiting request may even have been granted, if it was restored first.
    eventually("both are counted", async || {
        a.inspect("x").await.is_ok_and(|seen| seen.in_use >= 1 && seen.in_use + seen.waiting == 2)
    })
    .await;
    assert!(!held.is_lost());
    drop(held);
    drop(waits.await.unwrap().unwrap());
    empty(&redis).await;
    assert_eq!(primary.keys(), 0);
}

#[tokio::test]
async fn what_was_given_back_in_a_long_outage_is_not_forgotten() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let held = semaphore.acquire("x", &policy(1, 60_000)).await.unwrap();
    let admin = Admin::new(&redis);
    // A replica without a master keeps its data.
    admin.run::<()>(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]);
    drop(held);
    down(&semaphore).await;
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!(redis.keys(), 1);
    admin.run::<()>(&["REPLICAOF", "NO", "ONE"]);
    up(&semaphore).await;
    empty(&redis).await;
}

#[tokio::test]
async fn a_primary_without_the_replicas_that_it_must_have_is_not_asked() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let policy = policy(1, 20_000);
    let (one, two) = (
        semaphore.acquire("one", &policy).await.unwrap(),
        semaphore.acquire("two", &policy).await.unwrap(),
    );
    let admin = Admin::new(&redis);
    admin.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("replicas"), "{text}");
    down(&semaphore).await;
    // Released when nothing can be written: that must not be forgotten.
    drop(one);
    let released = two.release().await;
    assert!(released.is_err());
    admin.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    empty(&redis).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}

// ===== MISCONF =====

#[tokio::test]
async fn a_server_that_cannot_save_is_not_asked_until_it_can() {
    let redis = TestRedis::start_with(&["--save", "3600", "1"]);
    let semaphore = redis.semaphore();
    let long = semaphore.acquire("long", &policy(1, 20_000)).await.unwrap();
    let given_back = semaphore.acquire("given-back", &policy(1, 20_000)).await.unwrap();
    let short = semaphore.acquire("short", &policy(1, 600)).await.unwrap();
    let admin = Admin::new(&redis);
    // The file cannot be put where a directory is, even if the server runs as root.
    let dir: Vec<String> = admin.run(&["CONFIG", "GET", "dir"]);
    let in_the_way = std::path::Path::new(&dir[1]).join("dump.rdb");
    std::fs::create_dir(&in_the_way).unwrap();
    admin.run::<()>(&["BGSAVE"]);
    eventually("a save has failed", async || {
        admin.info("persistence", "rdb_last_bgsave_status") == "err"
    })
    .await;
    let policy = policy(1, 20_000);
    let text = told(&semaphore, "pressed", &policy, SOON).await;
    assert!(text.contains("MISCONF"), "{text}");
    down(&semaphore).await;
    drop(given_back);
    let before = admin.connections();
    let began = Instant::now();
    let text = pressed(&semaphore, &policy, "MISCONF").await;
    assert!(text.contains("stop-writes-on-bgsave-error"), "{text}");
    assert_no_storm(admin.connections() - before, began.elapsed());
    // It refuses renewals, too, and the holder is notified.
    short.lost().await;
    assert!(!long.is_lost());
    std::fs::remove_dir(&in_the_way).unwrap();
    admin.run::<()>(&["BGSAVE"]);
    up(&semaphore).await;
    in_use(&semaphore, "long", 1).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    drop((long, short));
    empty(&redis).await;
}

// ===== NOPERM and AUTH =====

const PASSWORD: &str = "open-sesame-4711";
/// The rights in the docs of `RedisBackend`, with the optional ones.
pub(crate) const LEAST: &str = "evalsha eval script|load subscribe publish time hget hgetall zadd zrem zcard zcount zmscore \
                     zrange zrangebyscore pttl pexpire hello";

/// A user with the least rights, except one.
fn user(admin: &Admin, name: &str, without: &str) -> String {
    let words = LEAST.split_whitespace().chain(["info"]).filter(|word| *word != without);
    let commands: Vec<String> = words.map(|word| format!("+{word}")).collect();
    let password = format!(">{PASSWORD}");
    let mut words = vec!["ACL", "SETUSER", name, "reset", "on", &password];
    // Redis 6.2 gives a new user all channels.
    words.extend(["~semaphore:*", "resetchannels", "&semaphore:*", "-@all"]);
    words.extend(commands.iter().map(String::as_str));
    admin.run::<()>(&words);
    name.to_owned()
}

fn url_of(redis: &TestRedis, user: &str, password: &str) -> String {
    format!("redis://{user}:{password}@127.0.0.1:{}/", redis.port())
}

/// Everything that the scripts do: grant, queue, reject, hand over to this process and to another, inspect, renew,
/// release.
async fn use_all(a: &Semaphore, b: &Semaphore, name: &str) -> Result<(), AcquireError> {
    let policy = policy(1, 900);
    let first: Permit = a.acquire(name, &policy).await?;
    let waits = [tokio::spawn(b.acquire(name, &policy)), tokio::spawn(b.acquire(name, &policy))];
    tokio::time::sleep(Duration::from_millis(50)).await;
    match a.try_acquire(name, &policy).await {
        Err(AcquireError::Rejected(_)) => {}
        other => drop(other?),
    }
    let seen = a.inspect(name).await.map_err(AcquireError::Unavailable)?;
    assert!(seen.in_use >= 1, "{seen:?}");
    tokio::time::sleep(Duration::from_millis(500)).await;
    drop(first);
    for waits in waits {
        let permit = waits.await.unwrap()?;
        permit.release().await.map_err(AcquireError::Unavailable)?;
    }
    Ok(())
}

#[tokio::test]
async fn the_least_rights_of_the_docs_are_enough() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    let name = user(&admin, "app", "");
    let url = url_of(&redis, &name, PASSWORD);
    let (a, b) = (semaphore(&*url), semaphore(&*url));
    use_all(&a, &b, "x").await.unwrap();
    // Handed over by a hint, not found by polling.
    let policy = policy(1, 20_000);
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let held = a.acquire("x", &policy).await.unwrap();
        let waits = tokio::spawn(b.acquire("x", &policy));
        waiting(&a, "x", 1).await;
        let freed = Stopwatch::start();
        drop(held);
        drop(waits.await.unwrap().unwrap());
        slowest = slowest.max(freed.elapsed());
    }
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    // Also scripts that were flushed, and lost data.
    let held = a.acquire("x", &policy).await.unwrap();
    admin.run::<()>(&["SCRIPT", "FLUSH"]);
    admin.run::<()>(&["FLUSHALL"]);
    cut(&admin);
    in_use(&b, "x", 1).await;
    held.release().await.unwrap();
    empty(&redis).await;
    let log: Vec<redis::Value> = admin.run(&["ACL", "LOG"]);
    assert!(log.is_empty(), "{log:?}");
}

#[tokio::test]
async fn a_right_that_is_missing_is_pointed_out_and_can_be_given_later() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    let trials: Vec<_> = LEAST
        .split_whitespace()
        .chain(["info"])
        .map(|missing| {
            let name = user(&admin, &format!("without-{missing}").replace('|', "-"), missing);
            let url = url_of(&redis, &name, PASSWORD);
            (missing, name, semaphore(&*url), semaphore(&*url))
        })
        .collect();
    // Each on semaphores of its own, and all of them together.
    let results = join_all(trials.iter().map(|(missing, name, a, b)| async move {
        let began = Stopwatch::start();
        let result = use_all(a, b, &format!("{name}-before")).await;
        (*missing, result, began.elapsed())
    }))
    .await;
    let mut unclear = Vec::new();
    for (missing, result, took) in results {
        assert!(took < 2 * SOON, "without {missing}: {took:?}");
        // The optional rights, and what is always allowed.
        let spare = ["info", "hello", "script|load", "subscribe", "eval", "hget", "hgetall"];
        if spare.contains(&missing) {
            result.unwrap_or_else(|error| panic!("without {missing}: {error}"));
            continue;
        }
        // A hand-over works without it, only later. No request shows that, so another test does.
        if missing == "publish" && result.is_ok() {
            let (_, _, a, b) = trials.iter().find(|trial| trial.0 == missing).unwrap();
            if a.health().warning.is_none() && b.health().warning.is_none() {
                unclear.push(format!("without {missing}: nobody is told"));
            }
            continue;
        }
        let text = result.map_err(|error| error.to_string()).expect_err(missing);
        assert!(!text.contains(PASSWORD), "without {missing}: {text}");
        if !text.contains("see RedisBackend") {
            unclear.push(format!("without {missing}: {text}"));
        }
    }
    for (_, name, ..) in &trials {
        user(&admin, name, "");
    }
    join_all(trials.iter().map(|(missing, name, a, b)| async move {
        let name = format!("{name}-after");
        let began = Stopwatch::start();
        loop {
            match use_all(a, b, &name).await {
                Ok(()) => break,
                Err(error) => assert!(began.elapsed() < SOON, "with {missing} again: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }))
    .await;
    empty(&redis).await;
    assert!(unclear.is_empty(), "no way out is shown: {unclear:#?}");
}

#[tokio::test]
async fn a_release_that_was_refused_is_sent_again() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    user(&admin, "app", "");
    let semaphore = semaphore(url_of(&redis, "app", PASSWORD));
    let held = semaphore.acquire("x", &policy(1, 60_000)).await.unwrap();
    admin.run::<()>(&["ACL", "SETUSER", "app", "-zrem"]);
    drop(held);
    eventually("it was refused", async || {
        !admin.run::<Vec<redis::Value>>(&["ACL", "LOG"]).is_empty()
    })
    .await;
    admin.run::<()>(&["ACL", "SETUSER", "app", "+zrem"]);
    empty(&redis).await;
}

#[tokio::test]
async fn a_wrong_password_is_named_and_never_shown() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    user(&admin, "app", "");
    let wrong = "not-so-secret-0815";
    let semaphore = semaphore(url_of(&redis, "app", wrong));
    let policy = policy(1, 5000);
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("WRONGPASS") || text.contains("password"), "{text}");
    let before = admin.connections();
    let began = Instant::now();
    pressed(&semaphore, &policy, "").await;
    assert_no_storm(admin.connections() - before, began.elapsed());
    let error = semaphore.acquire("x", &policy).await.unwrap_err();
    let shown = format!("{} {:?} {semaphore:?}", all_of(&error), semaphore.health());
    assert!(!shown.contains(wrong), "{shown}");
    let builder = RedisBackend::builder(url_of(&redis, "app", wrong));
    let shown = format!("{builder:?} {:?}", builder.clone().build().unwrap());
    assert!(!shown.contains(wrong), "{shown}");
    for url in [format!("redis//app:{wrong}@h"), format!("redis://app:{wrong}@h:x/")] {
        let error = RedisBackend::builder(url).build().unwrap_err();
        assert!(!format!("{error} {error:?}").contains(wrong), "{error:?}");
    }
    // The operator makes it the right one.
    admin.run::<()>(&["ACL", "SETUSER", "app", &format!(">{wrong}")]);
    up(&semaphore).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}

#[tokio::test]
async fn what_is_logged_has_no_password_in_it() {
    let told_of = Told::new();
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    user(&admin, "app", "");
    let wrong = "not-so-secret-0815";
    let policy = policy(1, 900);
    let refused = semaphore(url_of(&redis, "app", wrong));
    told(&refused, "x", &policy, SOON).await;
    // Connected, cut off, refused a command, locked out, and let in again.
    let semaphore = semaphore(url_of(&redis, "app", PASSWORD));
    let held = semaphore.acquire("x", &policy).await.unwrap();
    admin.run::<()>(&["ACL", "SETUSER", "app", "-zadd"]);
    semaphore.acquire("y", &policy).await.unwrap_err();
    admin.run::<()>(&["ACL", "DELUSER", "app"]);
    down(&semaphore).await;
    user(&admin, "app", "");
    up(&semaphore).await;
    drop(held);
    semaphore.shutdown().await;

    let items = [told_of.events(), told_of.spans()].concat();
    for (level, least) in [(Level::WARN, 2), (Level::INFO, 1), (Level::DEBUG, 4)] {
        let count = items.iter().filter(|item| item.level == level).count();
        assert!(count >= least, "{count} at {level}: {items:#?}");
    }
    let shown = format!("{items:?}");
    for secret in [PASSWORD, wrong] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[tokio::test]
async fn a_user_who_is_gone_and_comes_back_loses_nothing() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    user(&admin, "app", "");
    let semaphore = semaphore(url_of(&redis, "app", PASSWORD));
    let policy = policy(1, 10_000);
    let held = semaphore.acquire("x", &policy).await.unwrap();
    // This cuts its connections, too.
    admin.run::<()>(&["ACL", "DELUSER", "app"]);
    down(&semaphore).await;
    let text = pressed(&semaphore, &policy, "WRONGPASS").await;
    assert!(!text.contains(PASSWORD), "{text}");
    user(&admin, "app", "");
    up(&semaphore).await;
    assert!(!held.is_lost());
    in_use(&semaphore, "x", 1).await;
    drop(held);
    empty(&redis).await;
}

#[tokio::test]
async fn a_password_that_is_missing_is_named() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    admin.run::<()>(&["CONFIG", "SET", "requirepass", PASSWORD]);
    let semaphore = redis.semaphore();
    let policy = policy(1, 5000);
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("NOAUTH") || text.contains("uthentication required"), "{text}");
    admin.run::<()>(&["CONFIG", "SET", "requirepass", ""]);
    up(&semaphore).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}

// ===== WRONGTYPE =====

#[tokio::test]
async fn a_key_that_someone_else_uses_harms_only_its_own_name() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let policy = policy(1, 5000);
    warm(&semaphore).await;
    redis.command::<()>(&["SET", "semaphore:{x}", "mine"]);
    for _ in 0..20 {
        // One write for both.
        let (x, y) =
            tokio::join!(told(&semaphore, "x", &policy, SOON), semaphore.acquire("y", &policy));
        assert!(x.contains("WRONGTYPE"), "{x}");
        drop(y.unwrap());
    }
    let error = semaphore.inspect("x").await.unwrap_err();
    assert!(error.to_string().contains("WRONGTYPE"), "{error}");
    assert!(!error.is_connection());
    let health = semaphore.health();
    assert!(matches!(health.connection, ConnectionState::Up), "{health:?}");
    assert_eq!(health.disconnects, 0);
    assert_eq!(redis.command::<String>(&["GET", "semaphore:{x}"]), "mine");
    redis.command::<()>(&["DEL", "semaphore:{x}"]);
    drop(semaphore.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}

#[tokio::test]
async fn requests_that_are_refused_for_a_key_of_another_type_leave_nothing_to_be_sent() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let policy = policy(1, 60_000);
    warm(&semaphore).await;
    redis.command::<()>(&["SET", "semaphore:{x}", "mine"]);
    for _ in 0..40 {
        let requests = (0..50).map(|_| semaphore.acquire("x", &policy));
        for refused in join_all(requests).await {
            assert!(matches!(refused, Err(AcquireError::Unavailable(_))), "{refused:?}");
        }
    }
    // Refused calls are repeated each second.
    redis.command::<()>(&["CONFIG", "RESETSTAT"]);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let stats: String = redis.command(&["INFO", "stats"]);
    let bytes = stats.lines().find_map(|line| line.strip_prefix("total_net_input_bytes:"));
    let bytes: u64 = bytes.unwrap().trim().parse().unwrap();
    assert!(bytes < 5000, "{bytes} bytes in 2.5 s, behind 2000 requests that were refused");
}

// ===== a server that cannot be used, or not be reached =====

#[tokio::test]
async fn a_server_that_is_too_old_is_told_what_is_needed() {
    for missing in ["ZMSCORE", "HELLO"] {
        let redis = TestRedis::start_with(&["--rename-command", missing, ""]);
        let semaphore = redis.semaphore();
        let policy = policy(1, 5000);
        let text = told(&semaphore, "x", &policy, SOON).await;
        assert!(text.contains("Redis 6.2 or later is needed"), "{missing}: {text}");
        down(&semaphore).await;
        let before: usize = Admin::new(&redis).connections();
        pressed(&semaphore, &policy, "Redis 6.2 or later is needed").await;
        let opened = Admin::new(&redis).connections() - before;
        assert_no_storm(opened, Duration::from_secs(1));
        assert_eq!(redis.keys(), 0);
    }
}

#[tokio::test]
async fn a_database_that_is_not_there_is_named() {
    let redis = TestRedis::start();
    let semaphore = semaphore(format!("{}99", redis.url()));
    let text = told(&semaphore, "x", &policy(1, 5000), SOON).await;
    assert!(text.contains("DB") || text.contains("database"), "{text}");
}

#[tokio::test]
async fn a_server_with_too_many_clients_is_named_and_used_when_it_has_room() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    admin.run::<()>(&["CONFIG", "SET", "maxclients", "1"]);
    let semaphore = redis.semaphore();
    let policy = policy(1, 5000);
    let text = told(&semaphore, "x", &policy, SOON).await;
    down(&semaphore).await;
    let rejected =
        |admin: &Admin| -> usize { admin.info("stats", "rejected_connections").parse().unwrap() };
    let before = rejected(&admin);
    let began = Instant::now();
    pressed(&semaphore, &policy, "").await;
    assert_no_storm(rejected(&admin) - before, began.elapsed());
    admin.run::<()>(&["CONFIG", "SET", "maxclients", "100"]);
    up(&semaphore).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
    assert!(text.contains("clients"), "{text}");
}

#[tokio::test]
async fn a_server_that_closes_at_once_is_not_stormed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&accepted);
    let server = tokio::spawn(async move {
        loop {
            drop(listener.accept().await.unwrap());
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    let semaphore = semaphore(format!("redis://127.0.0.1:{port}/"));
    let policy = policy(1, 5000);
    let began = Instant::now();
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("could not be reached"), "{text}");
    down(&semaphore).await;
    pressed(&semaphore, &policy, "could not be reached").await;
    assert_no_storm(accepted.load(Ordering::Relaxed), began.elapsed());
    server.abort();
}

#[tokio::test]
async fn a_server_that_says_nothing_is_answered_for_in_time() {
    // The kernel accepts connections, and no process reads from them.
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let semaphore = semaphore(format!("redis://127.0.0.1:{port}/"));
    let policy = policy(1, 5000);
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("timed out") || text.contains("in time"), "{text}");
    down(&semaphore).await;
    pressed(&semaphore, &policy, "could not be reached").await;
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_and_used_when_it_comes() {
    let mut redis = TestRedis::start();
    redis.kill();
    let semaphore = redis.semaphore();
    let policy = policy(1, 5000);
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("refused"), "{text}");
    pressed(&semaphore, &policy, "refused").await;
    redis.restart();
    up(&semaphore).await;
    drop(semaphore.acquire("x", &policy).await.unwrap());
    empty(&redis).await;
}

#[tokio::test]
async fn a_host_that_has_no_address_is_named() {
    // No label is that long, so no server has to be asked.
    let semaphore = semaphore(format!("redis://{}.invalid/", "x".repeat(70)));
    let policy = policy(1, 5000);
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("could not be reached"), "{text}");
    assert!(text.contains("lookup") || text.contains("resolve"), "{text}");
    pressed(&semaphore, &policy, "could not be reached").await;
}

// ===== TLS =====

#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_to_a_port_without_it_is_answered_for() {
    let redis = TestRedis::start();
    let semaphore = semaphore(format!("rediss://127.0.0.1:{}/", redis.port()));
    let policy = policy(1, 5000);
    let text = told(&semaphore, "x", &policy, SOON).await;
    assert!(text.contains("could not be reached"), "{text}");
    down(&semaphore).await;
    let before = Admin::new(&redis).connections();
    pressed(&semaphore, &policy, "could not be reached").await;
    assert_no_storm(Admin::new(&redis).connections() - before, Duration::from_secs(1));
    assert!(text.contains("TLS") || text.contains("tls"), "{text}");
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn a_certificate_that_nobody_vouches_for_is_named() {
    use crate::support::tls::{self, Tls};

    let Some(tls) = Tls::new() else { return };
    let args = tls.args();
    let redis = TestRedis::start_with(&args.iter().map(|arg| &**arg).collect::<Vec<_>>());
    let port = tls::port(&redis);
    let policy = policy(1, 5000);
    let with_tls = semaphore(format!("rediss://127.0.0.1:{port}/"));
    let text = told(&with_tls, "x", &policy, SOON).await;
    assert!(text.contains("certificate"), "{text}");
    pressed(&with_tls, &policy, "certificate").await;
    // And vice versa.
    let without = semaphore(format!("redis://127.0.0.1:{port}/"));
    let text = told(&without, "x", &policy, SOON).await;
    assert!(text.contains("could not be reached"), "{text}");
    assert_eq!(redis.keys(), 0);
}

// ===== connections that are cut =====

/// Cuts all connections except the operator's.
fn cut(admin: &Admin) {
    for kind in ["pubsub", "normal"] {
        admin.run::<()>(&["CLIENT", "KILL", "TYPE", kind]);
    }
}

#[tokio::test]
async fn a_freed_permit_arrives_although_all_connections_are_cut_at_that_moment() {
    let redis = TestRedis::start();
    let (a, b) = (redis.semaphore(), redis.semaphore());
    let policy = policy(1, 6000);
    let admin = Admin::new(&redis);
    for round in 0..12 {
        let held = a.acquire("x", &policy).await.unwrap();
        let waits = tokio::spawn(b.acquire("x", &policy));
        waiting(&a, "x", 1).await;
        let mut held = Some(held);
        let mut freed = Instant::now();
        for step in 0..3 {
            // First released, then cut; then the other way round; then in between.
            if step == [0, 2, 1][round % 3] {
                freed = Instant::now();
                drop(held.take());
                if round % 2 == 0 {
                    // So that it is sent, or even executed.
                    tokio::task::yield_now().await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            match step {
                0 => cut(&admin),
                1 => admin.run::<()>(&["SCRIPT", "FLUSH"]),
                _ => {}
            }
        }
        let permit = waits.await.unwrap().unwrap();
        let took = freed.elapsed();
        assert!(took < Duration::from_millis(1200), "round {round}: {took:?}");
        assert!(!permit.is_lost());
        drop(permit);
    }
    assert!(b.health().disconnects >= 6, "{:?}", b.health());
    empty(&redis).await;
}

#[tokio::test]
async fn a_connection_that_was_cut_is_noticed_though_nothing_is_asked() {
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    empty(&redis).await;
    let admin = Admin::new(&redis);
    cut(&admin);
    eventually("it is noticed", async || semaphore.health().disconnects == 1).await;
    up(&semaphore).await;
    redis.kill();
    down(&semaphore).await;
}

#[tokio::test]
async fn a_process_that_stood_still_keeps_its_connection_if_it_was_answered_meanwhile() {
    let redis = TestRedis::start();
    let admin = Admin::new(&redis);
    let semaphore = redis.semaphore();
    let policy = Policy::new(1);
    drop(semaphore.acquire("warm", &policy).await.unwrap());
    let before = admin.connections();
    for round in 0..3 {
        // The call is written, and then nothing runs for longer than a server may take to answer.
        let waits = tokio::spawn(semaphore.acquire(format!("t{round}"), &policy));
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        std::thread::sleep(Duration::from_millis(700));
        drop(waits.await.unwrap().unwrap());
    }
    assert_eq!(admin.connections(), before);
    semaphore.shutdown().await;
}
