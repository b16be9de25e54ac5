//! A limit that finds itself, on a real Redis: floods of refusals, very many names, and processes that hear nothing.

use std::time::Duration;

use tower_semaphore::backend::RedisBackend;
use tower_semaphore::backend::seam::{Backend, Change, OVERRIDES};
use tower_semaphore::protocol::{Adjustment, SentUnder};
use tower_semaphore::{Adaptive, Feedback, Permit, Policy, Semaphore};

use crate::support::eventually_or;
use crate::support::redis::TestRedis;
use crate::support::semaphore::waiting;
use crate::support::stopwatch::Stopwatch;

/// The most records.
const MOST: usize = 1000;

fn policy(min: u32, max: u32) -> Policy {
    let builder = Policy::builder(max).wait_timeout(Duration::from_secs(20));
    builder.adaptive(Adaptive::between(min, max)).build().unwrap()
}

async fn take_all(semaphore: &Semaphore, name: &str, policy: &Policy, count: usize) -> Vec<Permit> {
    let mut permits = Vec::new();
    for _ in 0..count {
        permits.push(semaphore.acquire(name.to_owned(), policy).await.unwrap());
    }
    permits
}

/// Waits until the limit of a name is lower than this. Returns it.
async fn lowered(semaphore: &Semaphore, name: &str, before: u32) -> u32 {
    eventually_or("it is lowered", async || {
        match semaphore.inspect(name.to_owned()).await.unwrap().limit {
            Some(limit) if limit < before => Ok(()),
            limit => Err(limit),
        }
    })
    .await;
    semaphore.inspect(name.to_owned()).await.unwrap().limit.unwrap()
}

/// Gives so many names a record.
async fn fill(server: &TestRedis, count: usize) {
    let backend = RedisBackend::builder(server.url()).build().unwrap();
    let key = backend.key(OVERRIDES);
    let connection = backend.connect(&backend.shard(&key)).await.unwrap().unwrap();
    let range = Adaptive::between(5, 100);
    let adjustment = Adjustment::Lower(SentUnder { version: 0, in_use: u32::MAX });
    let all = async {
        for i in 0..count {
            let change = Change::Adapt { range, adjustment };
            let name = format!("other{i}");
            connection.set_override(&key, &name.as_str().into(), change).await.unwrap();
        }
    };
    tokio::select! {
        () = all => {}
        () = connection.drive() => panic!("the connection was closed"),
    }
}

#[tokio::test]
async fn a_flood_of_refusals_is_one_call_of_each_process() {
    const PROCESSES: usize = 20;
    let server = TestRedis::start();
    let range = policy(5, 500);
    let nodes: Vec<_> = (0..PROCESSES).map(|_| server.semaphore()).collect();
    let mut permits = Vec::new();
    for node in &nodes {
        permits.extend(take_all(node, "x", &range, 25).await);
    }
    let _: String = server.command(&["CONFIG", "RESETSTAT"]);
    let began = Stopwatch::start();
    for _ in 0..20 {
        permits.iter().for_each(|permit| permit.feedback(Feedback::TooMany));
        tokio::task::yield_now().await;
    }
    let limit = lowered(&nodes[0], "x", 500).await;
    assert!(limit == 450, "{limit}");
    assert_eq!(server.calls("hset"), 1);
    // Those of `inspect`, and the reading of each process once in a second, are among these.
    let readings = PROCESSES as u64 * (began.elapsed().as_secs() + 2);
    let calls = server.calls("evalsha");
    assert!(calls <= PROCESSES as u64 + readings + 40, "{calls}");
    drop(permits);
}

/// All of a fleet wait, and the first call after a pause grants them all: the others do not know yet how many it granted.
#[tokio::test]
async fn one_refusal_after_a_pause_is_one_decrease() {
    let server = TestRedis::start();
    let (nodes, range) = ([server.semaphore(), server.semaphore()], policy(1, 20));
    for (round, count) in [(0, 10), (1, 4)] {
        // Its call is the first after the pause.
        let (operator, other) = (&nodes[round], &nodes[1 - round]);
        operator.pause("x").await.unwrap();
        for node in &nodes {
            assert_eq!(lowered(node, "x", 1).await, 0, "it is paused");
        }
        let wait = |node: &Semaphore| -> Vec<_> {
            (0..count).map(|_| tokio::spawn(node.acquire("x", &range))).collect()
        };
        let (own, others) = (wait(operator), wait(other));
        waiting(operator, "x", 2 * count).await;
        operator.resume("x").await.unwrap();
        let mut permits = Vec::new();
        for one in own {
            permits.push(one.await.unwrap().unwrap());
        }
        for one in others {
            let permit = one.await.unwrap().unwrap();
            permit.feedback(Feedback::TooMany);
            permits.push(permit);
        }
        let before = if round == 0 { 20 } else { 18 };
        eventually_or("it is lowered", async || match other.inspect("x").await.unwrap().adapted {
            Some(adapted) if adapted.limit < before => Ok(()),
            adapted => Err(adapted),
        })
        .await;
        let limit = other.inspect("x").await.unwrap().adapted.unwrap().limit;
        assert!(limit >= u32::try_from(2 * count * 9 / 10).unwrap(), "{limit}");
        drop(permits);
    }
}

/// It learns of the decreases that it asks for by their answers, and not a second later.
#[tokio::test]
async fn a_process_without_messages_knows_its_own_decreases_at_once() {
    let server = TestRedis::start();
    let (own, range) = (Semaphore::new(server.without_messages()), policy(1, 100));
    let mut limit = 100;
    let mut permits = Vec::new();
    let began = Stopwatch::start();
    for _ in 0..8 {
        permits.push(own.acquire("x", &range).await.unwrap());
        permits.last().unwrap().feedback(Feedback::TooMany);
        limit = lowered(&own, "x", limit).await;
    }
    // By its readings alone it took half a second each.
    assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
    drop(permits);
}

/// The upstreams of very many names refuse everything, and the server has no room for some of these names.
#[tokio::test]
async fn names_for_which_there_is_no_room_delay_no_other() {
    let server = TestRedis::start();
    let (own, range) = (server.semaphore(), policy(5, 100));
    let x = take_all(&own, "x", &range, 1).await;
    x[0].feedback(Feedback::TooMany);
    let mut limit = lowered(&own, "x", 100).await;
    fill(&server, MOST - 1).await;
    let mut others = Vec::new();
    for i in 0..40 {
        others.extend(take_all(&own, &format!("late{i}"), &range, 1).await);
    }
    let began = Stopwatch::start();
    for _ in 0..8 {
        others.iter().for_each(|permit| permit.feedback(Feedback::TooMany));
        let x = take_all(&own, "x", &range, 1).await;
        x[0].feedback(Feedback::TooMany);
        limit = lowered(&own, "x", limit).await;
    }
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    drop((x, others));
}
