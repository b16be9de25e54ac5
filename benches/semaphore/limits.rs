//! The cost of further limits beside a plain semaphore, and how fully they are used.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_semaphore::{Ask, Policy, Semaphore};

use super::redis::{Redis, until_waiting};
use super::stats::alternate;
use super::table::{Bound, Row};
use super::{Context, runtime};

const CASE: &str = "limits";

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    runtime().block_on(async {
        let semaphore = redis.semaphore();
        uncontended(context, &redis, &semaphore).await;
        hand_overs(context, &redis, &semaphore).await;
        parked(context, &redis, &semaphore).await;
        other_route(context, &redis).await;
        crossing(context, &redis).await;
        semaphore.shutdown().await;
    });
}

fn patient(permits: u32) -> Policy {
    let policy = Policy::builder(permits).wait_timeout(Duration::from_secs(60));
    policy.build().expect("a policy")
}

/// The names of the limits beside that of a tenant.
const LIMITS: [&str; 3] = ["route", "model", "region"];

/// A request of a tenant, with a cap, that has so many further limits.
fn ask(name: &str, tenant: u32, further: usize) -> Ask {
    let ask = Ask::of(name).by(format!("tenant {tenant}")).each(50);
    LIMITS[..further].iter().fold(ask, |ask, limit| ask.also(*limit, "one", 50))
}

async fn uncontended(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let rounds = context.either(600, 4000);
    let policy = Policy::new(100);
    // Beside ten that hold permits.
    let pairs = async |name: &str, make: &dyn Fn(u32) -> Ask| {
        let acquire = |n| semaphore.acquire(make(n), &policy);
        let _held = try_join_all((0..10).map(acquire)).await.expect(name);
        let before = redis.usage();
        for _ in 0..rounds {
            let permit = acquire(0).await.expect("a permit");
            permit.release().await.expect("an answer");
        }
        let usage = redis.usage().since(before);
        usage.per_script() * usage.scripts / f64::from(rounds)
    };
    for (what, further, most) in [
        ("acquire and release, a tenant and a route: Redis' time", 1, 2.0),
        ("the same, and a model", 2, 2.3),
        ("the same, and a region", 3, 2.7),
    ] {
        let (limited, plain) = alternate(
            context.rounds(),
            async || pairs("limited", &|n| ask("limited", n, further)).await,
            async || pairs("plain", &|_| Ask::of("plain")).await,
        )
        .await;
        let row = Row::new(CASE, what, "µs", &limited).against("plain", &limited, &plain);
        context.table.add(row.bound(Bound::RatioMost(most)));
    }
}

/// The µs of the scripts for each of the hand-overs of one permit, while the rest of these wait and so many others.
async fn hand_over(
    redis: &Redis,
    semaphore: &Semaphore,
    name: &str,
    permits: u32,
    asks: impl Iterator<Item = Ask>,
    others: u32,
) -> f64 {
    let policy = patient(permits);
    let mut asks = asks.peekable();
    let first = asks.peek().expect("some").clone();
    let mut held = semaphore.acquire(first, &policy).await.expect("a permit");
    // Requests that join in one call have no order, so any of them may be next.
    let mut line = FuturesUnordered::new();
    for ask in asks {
        let mut place = Box::pin(semaphore.acquire(ask, &policy));
        assert!((&mut place).now_or_never().is_none(), "there is one permit");
        line.push(place);
    }
    let waiting = u32::try_from(line.len()).expect("a few");
    until_waiting(semaphore, name, waiting + others).await;
    // Half of them, so that the number of tenants stays the same.
    let turns = (waiting / 2).min(200);
    let before = redis.usage();
    for _ in 0..turns {
        drop(held);
        held = line.next().await.expect("some wait").expect("a permit");
    }
    let usage = redis.usage().since(before);
    usage.per_script() * usage.scripts / f64::from(turns)
}

async fn hand_overs(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let of_tenants = |name: &'static str| {
        let ask = move |n: u32| Ask::of(name).by(format!("tenant {}", n % 50));
        (0..200).map(ask)
    };
    let plain = || (0..200).map(|_| Ask::of("line"));
    let full = || of_tenants("full").map(|ask| ask.also("route", "one", 1));
    let (limited, plain) = alternate(
        context.rounds(),
        async || hand_over(redis, semaphore, "full", 50, full(), 0).await,
        async || hand_over(redis, semaphore, "line", 1, plain(), 0).await,
    )
    .await;
    let what = "hand-over at a full route, 50 tenants wait, permits are free: Redis' time";
    let row = Row::new(CASE, what, "µs", &limited).against("plain", &limited, &plain);
    context.table.add(row.bound(Bound::RatioMost(3.5)));
}

/// A hand-over at one limit, while a thousand lines wait at another.
async fn parked(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let asks = |name: &'static str| {
        (0..200).map(move |n| Ask::of(name).by(format!("tenant {}", n % 50)).also("route", "a", 1))
    };
    let policy = patient(100);
    let full = |n: u32| {
        let ask = Ask::of("crowded").by(format!("parked {n}")).also("route", "b", 1);
        semaphore.acquire(ask, &policy)
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..context.rounds() {
        without.push(hand_over(redis, semaphore, "alone", 100, asks("alone"), 0).await);
        let _holder = full(0).await.expect("a permit");
        let mut lines: Vec<_> = (0..1000).map(|n| Box::pin(full(n))).collect();
        for line in &mut lines {
            assert!(line.now_or_never().is_none(), "the route is full");
        }
        until_waiting(semaphore, "crowded", 1000).await;
        with.push(hand_over(redis, semaphore, "crowded", 100, asks("crowded"), 1000).await);
        drop(lines);
    }
    let what = "hand-over at one route, while 1,000 lines wait at another: Redis' time";
    let row = Row::new(CASE, what, "µs", &with).against("without them", &with, &without);
    context.table.add(row.bound(Bound::RatioMost(1.2)));
}

/// A tenant's five permits wait for a full route: its other route.
async fn other_route(context: &mut Context, redis: &Redis) {
    let (length, hold) = (context.seconds(2.0, 8.0), Duration::from_millis(2));
    let served = async |name: &'static str, is_full: bool| {
        let semaphore = redis.semaphore();
        let policy = patient(50);
        let ask = |route: &str| Ask::of(name).by("acme").each(5).also("route", route, 10);
        let full = Ask::of(name).by("other").also("route", "full", 10);
        let _full = try_join_all((0..10).map(|_| semaphore.acquire(full.clone(), &policy))).await;
        let mut waiting = JoinSet::new();
        for _ in 0..if is_full { 5 } else { 0 } {
            let (semaphore, policy, ask) = (semaphore.clone(), policy.clone(), ask("full"));
            waiting.spawn(async move { semaphore.acquire(ask, &policy).await });
        }
        until_waiting(&semaphore, name, if is_full { 5 } else { 0 }).await;
        let (began, mut tasks) = (Instant::now(), JoinSet::new());
        for _ in 0..8 {
            let (semaphore, policy, ask) = (semaphore.clone(), policy.clone(), ask("free"));
            tasks.spawn(async move {
                let mut count = 0.0;
                while began.elapsed() < length {
                    let _permit = semaphore.acquire(ask.clone(), &policy).await.expect("a permit");
                    sleep(hold).await;
                    count += 1.0;
                }
                count
            });
        }
        let served: f64 = tasks.join_all().await.into_iter().sum();
        waiting.abort_all();
        semaphore.shutdown().await;
        served / length.as_secs_f64()
    };
    let (with, without) = alternate(
        context.rounds(),
        async || served("with", true).await,
        async || served("without", false).await,
    )
    .await;
    let what = "a tenant's other route, while five of it wait for a full one";
    let row = Row::new(CASE, what, "/s", &with).against("none waits", &with, &without);
    context.table.add(row.bound(Bound::RatioLeast(0.95)));
}

/// Three limits of one permit each, and requests for any two of them: one runs at a time.
async fn crossing(context: &mut Context, redis: &Redis) {
    let (length, hold) = (context.seconds(2.0, 8.0), Duration::from_millis(20));
    let policy = patient(50);
    let mut shares = Vec::new();
    for round in 0..context.rounds() {
        let nodes = [redis.semaphore(), redis.semaphore(), redis.semaphore()];
        let (began, mut tasks) = (Instant::now(), JoinSet::new());
        for (i, node) in nodes.iter().enumerate() {
            for _ in 0..4 {
                let (node, policy) = (node.clone(), policy.clone());
                let limits = [LIMITS[i], LIMITS[(i + 1) % 3]];
                let ask = Ask::of(format!("crossing {round}"));
                let ask = limits.into_iter().fold(ask, |ask, limit| ask.also(limit, "one", 1));
                tasks.spawn(async move {
                    let mut held = Duration::ZERO;
                    while began.elapsed() < length {
                        let permit = node.acquire(ask.clone(), &policy).await.expect("a permit");
                        let since = Instant::now();
                        sleep(hold).await;
                        held += since.elapsed();
                        permit.release().await.expect("an answer");
                    }
                    held
                });
            }
        }
        let held: Duration = tasks.join_all().await.into_iter().sum();
        shares.push(held.as_secs_f64() / began.elapsed().as_secs_f64());
        for node in nodes {
            node.shutdown().await;
        }
    }
    let what = "crossing limits, three processes: the part of the time in which one holds";
    context.table.add(Row::new(CASE, what, "", &shares).bound(Bound::Least(0.95)));
}
