//! A semaphore that several Tokio runtimes of one process use.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tower_semaphore::{Permit, Policy, Semaphore};

const LEASE: Duration = Duration::from_secs(1);

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Acquires in this runtime: a semaphore looks for a runtime when it is called, not when the future is polled.
fn acquire_in(runtime: &Runtime, semaphore: &Semaphore, name: &str) -> Permit {
    runtime.block_on(async { semaphore.acquire(name, &policy()).await.unwrap() })
}

fn policy() -> Policy {
    Policy::builder(1).lease(LEASE).wait_timeout(Duration::ZERO).build().unwrap()
}

/// Holds a permit in one runtime for three leases, after the runtime of the first request has ended.
fn outlive_the_first(semaphore: &Semaphore, other: Option<&Semaphore>) {
    let (first, second) = (runtime(), runtime());
    drop(acquire_in(&first, semaphore, "warm"));
    let permit = acquire_in(&second, semaphore, "x");
    drop(first);
    assert_held(&second, other, &permit);
    second.block_on(semaphore.shutdown());
}

/// Observes the permit for three leases, and inspects it from another process: a call on its own semaphore would start
/// the tasks that have ended.
fn assert_held(runtime: &Runtime, other: Option<&Semaphore>, permit: &Permit) {
    let until = Instant::now() + 3 * LEASE;
    while Instant::now() < until {
        assert!(!permit.is_lost(), "nothing renews it");
        if let Some(other) = other {
            let asked = runtime.block_on(async { other.try_acquire("x", &policy()).await });
            asked.expect_err("another has the permit");
        }
        thread::sleep(LEASE / 10);
    }
}

#[test]
fn a_permit_outlives_the_runtime_of_the_first_request() {
    let semaphore = Semaphore::in_memory();
    outlive_the_first(&semaphore, None);
}

#[cfg(feature = "redis")]
#[test]
fn a_permit_in_redis_outlives_the_runtime_of_the_first_request() {
    let redis = crate::support::redis::TestRedis::start();
    outlive_the_first(&redis.semaphore(), Some(&redis.semaphore()));
}

#[test]
fn a_permit_outlives_every_runtime_but_its_own() {
    let semaphore = Semaphore::in_memory();
    let own = runtime();
    let permit = acquire_in(&own, &semaphore, "x");
    for _ in 0..20 {
        let other = runtime();
        drop(acquire_in(&other, &semaphore, "y"));
    }
    assert_held(&own, None, &permit);
}

/// The second runtime makes no request; the holder waits for a loss there.
#[test]
fn a_holder_in_another_runtime_is_told_of_a_loss() {
    let semaphore = Semaphore::in_memory();
    let (first, second) = (runtime(), runtime());
    let permit = acquire_in(&first, &semaphore, "x");
    let clone = permit.clone();
    let told = second.spawn(async move { clone.lost().await });
    // With it, a task that stands by.
    for _ in 0..5000 {
        if second.metrics().num_alive_tasks() > 1 {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    assert_held(&second, None, &permit);
    assert!(!told.is_finished());
    let revoked = second.block_on(async {
        let holder = semaphore.inspect("x").await.unwrap().holders.remove(0);
        semaphore.revoke("x", holder.id).await.unwrap()
    });
    assert!(revoked);
    second.block_on(async { tokio::time::timeout(LEASE, told).await.unwrap().unwrap() });
}

/// A multi-threaded runtime runs the task that was woken last first: here the driver, by the first task that it woke.
#[cfg(feature = "redis")]
#[test]
fn tasks_that_are_woken_together_share_their_calls() {
    const TASKS: u64 = 64;
    const PAIRS: u64 = 50;
    let redis = crate::support::redis::TestRedis::start();
    let calls = runtime().block_on(async {
        let semaphore = redis.semaphore();
        let policy = Policy::new(1000);
        drop(semaphore.acquire("warm", &policy).await.unwrap());
        redis.command::<()>(&["CONFIG", "RESETSTAT"]);
        let tasks = (0..TASKS).map(|_| {
            let (semaphore, policy) = (semaphore.clone(), policy.clone());
            tokio::spawn(async move {
                for _ in 0..PAIRS {
                    semaphore.acquire("x", &policy).await.unwrap().release().await.unwrap();
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        semaphore.shutdown().await;
        redis.calls("evalsha")
    });
    assert!(
        calls < TASKS * PAIRS / 2,
        "{calls} calls for {} acquires and releases",
        2 * TASKS * PAIRS
    );
}

#[test]
fn a_shutdown_does_not_wait_for_a_runtime_that_is_not_driven() {
    let (done, is_done) = channel();
    thread::spawn(move || {
        let idle = Builder::new_current_thread().enable_all().build().unwrap();
        let driven = runtime();
        let semaphore = Semaphore::in_memory();
        let _permit = acquire_in(&idle, &semaphore, "x");
        driven.block_on(semaphore.shutdown());
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(10)).expect("it waits forever");
}

#[test]
fn a_shutdown_does_not_wait_for_those_that_stand_by() {
    let idle = Builder::new_current_thread().enable_all().build().unwrap();
    let driven = runtime();
    let semaphore = Semaphore::in_memory();
    drop(acquire_in(&driven, &semaphore, "x"));
    // It leads: beside the supervisor there is a watchdog.
    while driven.metrics().num_alive_tasks() < 2 {
        thread::yield_now();
    }
    drop(acquire_in(&idle, &semaphore, "x"));
    let began = Instant::now();
    driven.block_on(semaphore.shutdown());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[cfg(feature = "redis")]
mod redis {
    use super::*;
    use crate::support::redis::TestRedis;

    fn connections(redis: &TestRedis) -> usize {
        let list: String = redis.command(&["CLIENT", "LIST"]);
        list.lines().filter(|line| !line.contains("cmd=client")).count()
    }

    #[test]
    fn one_runtime_leads_and_the_others_stand_by() {
        let redis = TestRedis::start();
        let semaphore = redis.semaphore();
        let runtimes = [(); 4].map(|()| runtime());
        for runtime in &runtimes {
            drop(acquire_in(runtime, &semaphore, "x"));
        }
        // The next request sees each release, so both go over one connection.
        for _ in 0..500 {
            for runtime in &runtimes {
                drop(acquire_in(runtime, &semaphore, "x"));
            }
        }
        assert_eq!(connections(&redis), 1);
    }
}
