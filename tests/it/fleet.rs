//! Several processes on one Redis, seen from outside: the crate's purpose.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http_body_util::BodyExt;
use tower_semaphore::Policy;

use crate::support::eventually;
use crate::support::fleet::Fleet;
use crate::support::gateway::Client;
use crate::support::redis::TestRedis;

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

/// Returns how long it takes to get a permit that will be freed, with requests all the time from now on.
async fn until_free(fleet: &Fleet, gateway: usize) -> Duration {
    let began = Instant::now();
    eventually("a permit is free", async || {
        fleet.client.get(&fleet.url(gateway, "/")).await == 200
    })
    .await;
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cap_holds_and_is_used_over_three_gateways() {
    let fleet = Arc::new(Fleet::start(3, &["--limit", "5", "--wait", "30s"]).await);
    // The cap in each round; the rest in one round of three, because others use the machine, too. What a hand-over costs is
    // for the benchmarks; a permit that a message did not reach is idle for up to a second.
    let mut rounds = Vec::new();
    for _ in 0..3 {
        let (rate, median, p99) = crowd(&fleet).await;
        assert_eq!(fleet.upstream.seen().peak, 5, "as many as may be, and never one more");
        println!("{rate:.1} requests/s of 125; waited {median:?}, p99 {p99:?}");
        if rate >= 75.0 && p99 <= 2 * median {
            fleet.quiet().await;
            return;
        }
        rounds.push((rate, median, p99));
    }
    panic!("at least 75 requests/s, and a p99 of twice the median at the most: {rounds:?}");
}

/// 45 clients for four seconds, with 40 ms for each request: requests a second, and how long they waited.
async fn crowd(fleet: &Arc<Fleet>) -> (f64, Duration, Duration) {
    let waits = Arc::new(Mutex::new(Vec::new()));
    let began = Instant::now();
    let time = Duration::from_secs(4);
    join_all((0..45).map(|i| {
        let (fleet, waits) = (Arc::clone(fleet), Arc::clone(&waits));
        tokio::spawn(async move {
            let url = fleet.url(i, "/?ms=40");
            while began.elapsed() < time {
                let sent = Instant::now();
                assert_eq!(fleet.client.get(&url).await, 200);
                let wait = sent.elapsed().saturating_sub(Duration::from_millis(40));
                waits.lock().unwrap().push(wait);
            }
        })
    }))
    .await
    .into_iter()
    .for_each(Result::unwrap);
    let took = began.elapsed();
    let mut waits = std::mem::take(&mut *waits.lock().unwrap());
    let rate = waits.len() as f64 / took.as_secs_f64();
    // The first request of each client did not find a full queue.
    waits.drain(..45);
    waits.sort();
    (rate, percentile(&waits, 50), percentile(&waits, 99))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_come_is_first_served_over_three_gateways() {
    let fleet = Arc::new(Fleet::start(3, &["--limit", "1", "--wait", "30s"]).await);
    for gateway in 0..3 {
        // From here on each has its connections.
        assert_eq!(fleet.client.get(&fleet.url(gateway, "/")).await, 200);
    }
    // Newcomers come all the time, without numbers.
    let pressing: Vec<_> = (0..6)
        .map(|i| {
            let fleet = Arc::clone(&fleet);
            tokio::spawn(async move {
                loop {
                    fleet.client.get(&fleet.url(i, "/?ms=2")).await;
                }
            })
        })
        .collect();
    // In one round of three: on a busy machine two requests that are sent 18 ms apart may reach Redis in the other
    // order.
    let mut rounds = Vec::new();
    for first in [0, 90, 180] {
        let numbers: Vec<usize> = (first..first + 90).collect();
        in_turn(&fleet, &numbers).await;
        let arrivals = fleet.upstream.seen().arrivals.split_off(first);
        if arrivals.iter().copied().eq(numbers.iter().map(|number| *number as u64)) {
            break;
        }
        rounds.push(arrivals);
    }
    assert!(rounds.len() < 3, "out of order: {rounds:?}");
    pressing.iter().for_each(tokio::task::JoinHandle::abort);
    let seen = fleet.upstream.seen();
    assert_eq!(seen.peak, 1);
    assert!(seen.total > 110, "the newcomers did not press: {}", seen.total);
    fleet.quiet().await;
}

/// Sends one request for each number, one after the other, each to another gateway, until all are answered.
async fn in_turn(fleet: &Arc<Fleet>, numbers: &[usize]) {
    let mut sent = Vec::new();
    let mut next = tokio::time::interval(Duration::from_millis(18));
    for number in numbers.iter().copied() {
        next.tick().await;
        let fleet = Arc::clone(fleet);
        sent.push(tokio::spawn(async move {
            let url = fleet.url(number, "/?ms=12");
            let request = http::Request::get(url).header("x-number", number);
            assert_eq!(fleet.client.send(request).await.0, 200);
        }));
    }
    join_all(sent).await.into_iter().for_each(Result::unwrap);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_keeps_its_permit_until_it_ends_or_its_client_leaves() {
    let mut fleet = Fleet::start(1, &["--limit", "1", "--lease", "500ms"]).await;
    fleet.add(&["--limit", "1", "--lease", "500ms", "--wait", "0s"]);

    // Four leases long.
    let mut body = fleet.client.open(&fleet.url(0, "/?stream_ms=2000")).await.into_body();
    let mut refused = 0;
    while let Some(frame) = body.frame().await {
        frame.unwrap();
        // Whether the other is refused after the last frame depends on a few ms.
        if !http_body::Body::is_end_stream(&body) && fleet.upstream.seen().in_flight == 1 {
            let status = fleet.client.get(&fleet.url(1, "/")).await;
            refused += usize::from(status == 429);
        }
    }
    let freed = until_free(&fleet, 1).await;
    println!("free {freed:?} after the end of the stream; {refused} were refused before");
    assert!(refused >= 90, "only {refused} were refused");
    assert!(freed < Duration::from_millis(500), "{freed:?}");

    let mut body = fleet.client.open(&fleet.url(0, "/?stream_ms=5000")).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(fleet.client.get(&fleet.url(1, "/")).await, 429);
    drop(body);
    let freed = until_free(&fleet, 1).await;
    println!("free {freed:?} after the client left");
    assert!(freed < Duration::from_millis(500), "{freed:?}");
    fleet.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_leave_cost_the_next_one_nothing() {
    let fleet = Fleet::start(2, &["--limit", "1", "--wait", "30s"]).await;
    let holder = fleet.client.open(&fleet.url(0, "/?stream_ms=20000")).await.into_body();
    let leaving: Vec<_> = (0..20)
        .map(|i| {
            let (client, url) = (Client::new(), fleet.url(i, "/?ms=1"));
            tokio::spawn(async move { client.get(&url).await })
        })
        .collect();
    let watch = fleet.redis.semaphore();
    let waiting = async || watch.inspect("gateway").await.unwrap().waiting;
    eventually("all wait", async || waiting().await == 20).await;
    let next = {
        let (client, url) = (Client::new(), fleet.url(1, "/"));
        tokio::spawn(async move { client.get(&url).await })
    };
    eventually("one more waits", async || waiting().await == 21).await;
    leaving.iter().for_each(tokio::task::JoinHandle::abort);
    eventually("the others left", async || waiting().await == 1).await;
    drop(holder);
    let began = Instant::now();
    assert_eq!(next.await.unwrap(), 200);
    let took = began.elapsed();
    println!("served {took:?} after the holder left");
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert_eq!(fleet.upstream.seen().total, 2, "those who left never came");
    drop(watch);
    fleet.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_gateway_frees_its_permits_with_their_lease() {
    let args = ["--limit", "4", "--wait", "30s", "--lease", "1s"];
    let mut fleet = Fleet::start(2, &args).await;
    let watch = fleet.redis.semaphore();
    let mut doomed = Vec::new();
    for _ in 0..4 {
        doomed.push(fleet.client.open(&fleet.url(0, "/?stream_ms=60000")).await);
    }
    let waiting: Vec<_> = (0..40)
        .map(|_| {
            let (client, url) = (Client::new(), fleet.url(0, "/?ms=1"));
            tokio::spawn(async move { client.try_get(&url).await })
        })
        .collect();
    eventually("they wait", async || watch.inspect("gateway").await.unwrap().waiting == 40).await;
    let others: Vec<_> = (0..10)
        .map(|_| {
            let (client, url) = (Client::new(), fleet.url(1, "/?ms=1"));
            tokio::spawn(async move { client.get(&url).await })
        })
        .collect();
    eventually("others wait", async || watch.inspect("gateway").await.unwrap().waiting == 50).await;
    fleet.gateways[0].kill();
    let began = Instant::now();
    for other in others {
        assert_eq!(other.await.unwrap(), 200);
    }
    let took = began.elapsed();
    println!(
        "the other gateway's waiters were served {took:?} after the kill, with a lease of 1 s"
    );
    assert!(took < Duration::from_secs(2), "{took:?}");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    drop((doomed, watch));
    fleet.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_costs_two_script_calls_at_most() {
    let fleet = Fleet::start(1, &["--limit", "10"]).await;
    let url = fleet.url(0, "/");
    assert_eq!(fleet.client.get(&url).await, 200);
    eventually("it is given back", async || fleet.redis.keys() == 0).await;
    fleet.redis.command::<()>(&["CONFIG", "RESETSTAT"]);
    for _ in 0..100 {
        assert_eq!(fleet.client.get(&url).await, 200);
    }
    eventually("all are given back", async || fleet.redis.keys() == 0).await;
    let stats: String = fleet.redis.command(&["INFO", "commandstats"]);
    // The commands of the scripts, and this test's own queries.
    let expected = [
        "evalsha",
        "time",
        "zcard",
        "zcount",
        "zadd",
        "zrem",
        "pexpire",
        "pttl",
        "dbsize",
        "info",
        "config|resetstat",
        "client|setinfo",
        "hello",
    ];
    for line in stats.lines().filter_map(|line| line.strip_prefix("cmdstat_")) {
        let command = line.split(':').next().unwrap();
        assert!(expected.contains(&command), "{command} was called: {line}");
    }
    // One less wherever a newcomer's call carries a release.
    let calls = fleet.redis.calls("evalsha");
    assert!((101..=200).contains(&calls), "{calls}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_drains_a_gateway() {
    let mut fleet = Fleet::start(2, &["--limit", "1", "--wait", "30s"]).await;
    let url = fleet.url(0, "/?stream_ms=700");
    let body = fleet.client.open(&url).await.into_body();
    let gateway = fleet.gateways.remove(0);
    gateway.signal("TERM");
    // The stream in flight ends as it should, and then the process.
    let text = body.collect().await.unwrap().to_bytes();
    assert_eq!(text.len(), 35 * "chunk\n".len());
    assert_eq!(gateway.exit().await, Some(0));
    // Its permit is back long before the lease of 10 s ends.
    let freed = until_free(&fleet, 0).await;
    assert!(freed < Duration::from_secs(2), "{freed:?}");
    fleet.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_renewed_beside_more_requests_than_the_server_can_take() {
    const NAMES: usize = 8000;
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let policy = Policy::builder(1).lease(Duration::from_secs(4)).build().unwrap();
    let held = (0..20).map(|n| semaphore.acquire(format!("held{n}"), &policy));
    let held = join_all(held).await.into_iter().map(Result::unwrap).collect::<Vec<_>>();
    let until = Instant::now() + Duration::from_secs(6);
    let busy = (0..NAMES).map(|n| {
        let (semaphore, policy) = (semaphore.clone(), policy.clone());
        tokio::spawn(async move {
            while Instant::now() < until {
                drop(semaphore.acquire(format!("busy{n}"), &policy).await);
            }
        })
    });
    join_all(busy).await.into_iter().for_each(Result::unwrap);
    let lost = held.iter().filter(|permit| permit.is_lost()).count();
    assert_eq!(lost, 0, "permits were lost");
}
