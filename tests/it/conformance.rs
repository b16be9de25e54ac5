//! One suite for all backends: the promises of a semaphore, whatever counts its permits.
//!
//! Each test gets a fleet: several semaphores, like those of several processes, on one backend.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tower_semaphore::backend::{MemoryBackend, MemoryServer};
use tower_semaphore::{AcquireError, Ask, Limit, Policy, RejectReason, Semaphore};

#[cfg(feature = "etcd")]
use crate::support::etcd::TestEtcd;
use crate::support::eventually;
#[cfg(feature = "redis")]
use crate::support::redis::TestRedis;
use crate::support::semaphore::{rejection, waiting};

pub(crate) trait Fleet {
    /// Adds a process.
    fn node(&self) -> Semaphore;
    /// Returns whether nothing is stored.
    fn is_empty(&self) -> bool;
    /// Loses everything, like a server that is killed and started empty.
    fn wipe(&self);
    /// How long a permit with the shortest lease may be missing after its process died.
    fn forgets_within(&self) -> Duration {
        Policy::MIN_LEASE + Duration::from_secs(1)
    }
}

impl Fleet for MemoryBackend {
    fn node(&self) -> Semaphore {
        Semaphore::new(self.clone())
    }

    fn is_empty(&self) -> bool {
        Self::is_empty(self)
    }

    fn wipe(&self) {
        self.forget_all();
    }
}

impl Fleet for MemoryServer {
    fn node(&self) -> Semaphore {
        Semaphore::new(self.clone())
    }

    fn is_empty(&self) -> bool {
        Self::is_empty(self)
    }

    fn wipe(&self) {
        self.forget_all();
    }
}

#[cfg(feature = "redis")]
impl Fleet for TestRedis {
    fn node(&self) -> Semaphore {
        self.semaphore()
    }

    fn is_empty(&self) -> bool {
        self.is_clear()
    }

    fn wipe(&self) {
        self.command::<()>(&["FLUSHALL"]);
    }
}

#[cfg(feature = "etcd")]
impl Fleet for TestEtcd {
    fn node(&self) -> Semaphore {
        self.semaphore()
    }

    fn is_empty(&self) -> bool {
        self.ctl(&["get", "--prefix", "--keys-only", "semaphore/s/"]).trim().is_empty()
    }

    fn wipe(&self) {
        self.ctl(&["del", "--prefix", "semaphore/s/"]);
        self.ctl(&["del", "semaphore/o"]);
    }

    fn forgets_within(&self) -> Duration {
        // The lease, rounded up, half a second in which etcd notices its end, the grace, and as much as for others.
        Duration::from_millis(1000 + 500 + 2000 + 1000)
    }
}

macro_rules! conformance {
    ($($name:ident)*) => {
        mod memory {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&tower_semaphore::backend::MemoryBackend::new()).await;
            })*
        }
        mod memory_server {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&tower_semaphore::backend::MemoryServer::new()).await;
            })*
        }
        #[cfg(feature = "redis")]
        mod redis {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&crate::support::redis::TestRedis::start()).await;
            })*
        }

        #[cfg(feature = "etcd")]
        mod etcd {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&crate::support::etcd::TestEtcd::start()).await;
            })*
        }

        /// All tests, one after the other, on a fleet that is slow to start.
        #[cfg(feature = "redis")]
        pub(crate) async fn all(fleet: &impl Fleet) {
            $(println!("{}", stringify!($name));
            $name(fleet).await;)*
        }
    };
}

conformance! {
    grants_up_to_the_limit_and_no_further
    hands_over_in_order
    names_do_not_share
    nobody_barges_while_someone_waits
    a_limit_of_zero_refuses_and_unlimited_stores_nothing
    a_waiter_gives_up_after_its_timeout
    a_full_queue_refuses_at_once
    waiters_that_give_up_cost_the_next_one_nothing
    a_grant_that_nobody_came_for_is_given_back
    a_permit_lives_as_long_as_its_last_clone
    an_acknowledged_release_is_seen_by_all
    a_process_reads_its_own_release
    inspect_shows_who_holds_and_who_waits
    a_permit_outlives_its_lease_while_its_process_lives
    a_waiter_outlives_its_lease_while_its_process_lives
    a_dead_process_loses_its_permits_with_their_lease
    a_dead_waiter_is_passed_over
    shutdown_gives_everything_back
    dropping_the_semaphore_leaves_its_permits_alive
    what_is_held_is_counted_again_after_a_loss_of_data
    a_waiter_keeps_its_turn_after_a_loss_of_data
    what_operators_set_is_lost_with_the_data
    a_crowd_never_passes_the_cap_and_leaves_nothing
    cancelling_at_random_leaves_nothing
    a_waiter_is_judged_by_its_own_limit_whatever_others_ask_under
    a_waiter_under_a_lower_limit_is_not_granted_past_it
    places_behind_a_lower_limit_keep_their_turn
    requests_that_wait_adopt_a_reloaded_policy_and_keep_their_turn
}

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(20)).build().unwrap()
}

fn short_lease(limit: u32) -> Policy {
    lease(limit, Policy::MIN_LEASE)
}

fn lease(limit: u32, lease: Duration) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(20)).lease(lease).build().unwrap()
}

async fn empty(fleet: &impl Fleet) {
    eventually("nothing is stored", async || fleet.is_empty()).await;
}

/// A process with places of `x` dies: everything in it stops at once, and nothing is released.
pub(crate) fn die_holding(node: Semaphore, ask: Ask, policy: Policy, held: usize, waiting: usize) {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            for _ in 0..held {
                std::mem::forget(node.acquire(ask.clone(), &policy).await.unwrap());
            }
            for _ in 0..waiting {
                std::mem::forget(tokio::spawn(node.acquire(ask.clone(), &policy)));
            }
            eventually("all are in", async || {
                let seen = node.inspect("x").await.unwrap();
                seen.in_use >= held as u64 && seen.waiting >= waiting as u64
            })
            .await;
        });
        runtime.shutdown_background();
        std::mem::forget(node);
    })
    .join()
    .unwrap();
}

async fn grants_up_to_the_limit_and_no_further(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = policy(3);
    let one = a.try_acquire("x", &policy).await.unwrap();
    let two = b.try_acquire("x", &policy).await.unwrap();
    let three = a.try_acquire("x", &policy).await.unwrap();
    for node in [&a, &b] {
        let rejected = rejection(node.try_acquire("x", &policy).await);
        assert_eq!((&*rejected.name, rejected.reason), ("x", RejectReason::Limit));
        assert_eq!((rejected.limit, rejected.in_use, rejected.waiting), (3, Some(3), Some(0)));
    }
    drop(two);
    eventually("it is free", async || b.inspect("x").await.unwrap().in_use == 2).await;
    let four = a.try_acquire("x", &policy).await.unwrap();
    drop((one, three, four));
    empty(fleet).await;
}

async fn hands_over_in_order(fleet: &impl Fleet) {
    let nodes = [fleet.node(), fleet.node(), fleet.node()];
    let policy = policy(1);
    let first = nodes[0].acquire("x", &policy).await.unwrap();
    let (done, mut order) = tokio::sync::mpsc::unbounded_channel();
    for i in 0..30 {
        let acquire = nodes[i % 3].acquire("x", &policy);
        let done = done.clone();
        tokio::spawn(async move {
            let permit = acquire.await.unwrap();
            done.send(i).unwrap();
            drop(permit);
        });
        waiting(&nodes[0], "x", i as u64 + 1).await;
    }
    drop(first);
    for i in 0..30 {
        assert_eq!(order.recv().await, Some(i));
    }
    empty(fleet).await;
}

async fn names_do_not_share(fleet: &impl Fleet) {
    let node = fleet.node();
    let policy = policy(1);
    let names = ["a", "b", "a:b", "{a}", "a}", "", "%", "A"];
    let mut permits = Vec::new();
    for name in names {
        permits.push(node.try_acquire(name, &policy).await.unwrap());
    }
    for name in names {
        rejection(node.try_acquire(name, &policy).await);
    }
    drop(permits);
    empty(fleet).await;
}

async fn nobody_barges_while_someone_waits(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let one = policy(1);
    let first = a.acquire("x", &one).await.unwrap();
    let second = tokio::spawn(b.acquire("x", &one));
    waiting(&a, "x", 1).await;
    // Even a caller with a higher limit goes behind the waiting requests.
    let seen = rejection(a.try_acquire("x", &one).await);
    assert_eq!((seen.reason, seen.waiting), (RejectReason::Limit, Some(1)));
    first.release().await.unwrap();
    rejection(a.try_acquire("x", &one).await);
    drop(second.await.unwrap().unwrap());
    empty(fleet).await;
}

async fn a_limit_of_zero_refuses_and_unlimited_stores_nothing(fleet: &impl Fleet) {
    let node = fleet.node();
    let seen = rejection(node.acquire("x", &policy(0)).await);
    assert_eq!((seen.reason, seen.limit), (RejectReason::Limit, 0));
    let unlimited = Policy::new(Limit::Unlimited);
    let permit = node.acquire("x", &unlimited).await.unwrap();
    assert!(!permit.is_lost());
    assert!(fleet.is_empty());
    permit.release().await.unwrap();
}

async fn a_waiter_gives_up_after_its_timeout(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let held = a.acquire("x", &policy(1)).await.unwrap();
    let wait = Duration::from_millis(80);
    let brief = Policy::builder(1).wait_timeout(wait).build().unwrap();
    let seen = rejection(b.acquire("x", &brief).await);
    assert_eq!((seen.reason, seen.limit), (RejectReason::QueueTimeout, 1));
    assert!(seen.waited >= wait, "{:?}", seen.waited);
    waiting(&a, "x", 0).await;
    drop(held);
    drop(b.acquire("x", &brief).await.unwrap());
    empty(fleet).await;
}

async fn a_full_queue_refuses_at_once(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let narrow =
        Policy::builder(1).wait_timeout(Duration::from_secs(20)).max_queue(2).build().unwrap();
    let held = a.acquire("x", &narrow).await.unwrap();
    let waiters = [tokio::spawn(a.acquire("x", &narrow)), tokio::spawn(b.acquire("x", &narrow))];
    waiting(&a, "x", 2).await;
    let seen = rejection(b.acquire("x", &narrow).await);
    assert_eq!(
        (seen.reason, seen.in_use, seen.waiting),
        (RejectReason::QueueFull, Some(1), Some(2))
    );
    drop(held);
    for waiter in waiters {
        drop(waiter.await.unwrap().unwrap());
    }
    empty(fleet).await;
}

async fn waiters_that_give_up_cost_the_next_one_nothing(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = policy(1);
    let held = a.acquire("x", &policy).await.unwrap();
    let gone: Vec<_> = (0..20).map(|_| tokio::spawn(b.acquire("x", &policy))).collect();
    waiting(&a, "x", 20).await;
    let last = tokio::spawn(a.acquire("x", &policy));
    waiting(&a, "x", 21).await;
    for task in gone {
        task.abort();
    }
    waiting(&a, "x", 1).await;
    drop(held);
    drop(last.await.unwrap().unwrap());
    empty(fleet).await;
}

async fn a_grant_that_nobody_came_for_is_given_back(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = policy(1);
    let held = a.acquire("x", &policy).await.unwrap();
    // It is queued when it is called, and never polled.
    let unpolled = b.acquire("x", &policy);
    waiting(&a, "x", 1).await;
    drop(held);
    eventually("it was handed over", async || {
        let seen = a.inspect("x").await.unwrap();
        (seen.in_use, seen.waiting) == (1, 0) && b.inspect("x").await.unwrap().holders[0].is_own
    })
    .await;
    drop(unpolled);
    empty(fleet).await;
}

async fn a_permit_lives_as_long_as_its_last_clone(fleet: &impl Fleet) {
    let node = fleet.node();
    let policy = policy(1);
    let permit = node.acquire("x", &policy).await.unwrap();
    let clone = permit.clone();
    drop(permit);
    rejection(node.try_acquire("x", &policy).await);
    drop(clone);
    drop(node.try_acquire("x", &policy).await.unwrap());
    empty(fleet).await;
}

async fn an_acknowledged_release_is_seen_by_all(fleet: &impl Fleet) {
    let nodes = [fleet.node(), fleet.node()];
    let policy = policy(1);
    for i in 0..50 {
        let permit = nodes[i % 2].try_acquire("x", &policy).await.unwrap();
        let clone = permit.clone();
        permit.release().await.unwrap();
        assert!(!clone.is_lost());
        drop(clone);
    }
    assert!(fleet.is_empty());
}

async fn a_process_reads_its_own_release(fleet: &impl Fleet) {
    let node = fleet.node();
    let policy = policy(1);
    for _ in 0..500 {
        drop(node.try_acquire("x", &policy).await.unwrap());
    }
    empty(fleet).await;
}

async fn inspect_shows_who_holds_and_who_waits(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = policy(1);
    let seen = a.inspect("x").await.unwrap();
    assert_eq!((seen.in_use, seen.waiting), (0, 0));
    assert!(seen.holders.is_empty() && seen.waiters.is_empty());
    let held = a.acquire("x", &policy).await.unwrap();
    let first = tokio::spawn(b.acquire("x", &policy));
    waiting(&a, "x", 1).await;
    let second = tokio::spawn(a.acquire("x", &policy));
    waiting(&a, "x", 2).await;
    let seen = b.inspect("x").await.unwrap();
    let holders: Vec<_> = seen.holders.iter().map(|holder| holder.is_own).collect();
    let waiters: Vec<_> = seen.waiters.iter().map(|waiter| waiter.is_own).collect();
    assert_eq!((holders, waiters), (vec![false], vec![true, false]));
    assert!(seen.waiters[0].waited >= seen.waiters[1].waited);
    let lease = seen.holders[0].lease_left;
    assert!(lease > Duration::from_secs(8) && lease <= Policy::DEFAULT_LEASE, "{lease:?}");
    drop(held);
    drop(first.await.unwrap().unwrap());
    drop(second.await.unwrap().unwrap());
    empty(fleet).await;
}

async fn a_permit_outlives_its_lease_while_its_process_lives(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = short_lease(1);
    let held = a.acquire("x", &policy).await.unwrap();
    let end = Instant::now() + 4 * Policy::MIN_LEASE;
    while Instant::now() < end {
        rejection(b.try_acquire("x", &policy).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!held.is_lost());
    drop(held);
    empty(fleet).await;
}

async fn a_waiter_outlives_its_lease_while_its_process_lives(fleet: &impl Fleet) {
    let (a, b, c) = (fleet.node(), fleet.node(), fleet.node());
    let policy = short_lease(1);
    let held = a.acquire("x", &policy).await.unwrap();
    let first = tokio::spawn(b.acquire("x", &policy));
    waiting(&a, "x", 1).await;
    let second = tokio::spawn(c.acquire("x", &policy));
    waiting(&a, "x", 2).await;
    tokio::time::sleep(3 * Policy::MIN_LEASE).await;
    assert_eq!(a.inspect("x").await.unwrap().waiting, 2);
    drop(held);
    let permit = first.await.unwrap().unwrap();
    assert!(!second.is_finished());
    drop(permit);
    drop(second.await.unwrap().unwrap());
    empty(fleet).await;
}

async fn a_dead_process_loses_its_permits_with_their_lease(fleet: &impl Fleet) {
    let policy = short_lease(2);
    die_holding(fleet.node(), Ask::of("x"), policy.clone(), 2, 0);
    let began = Instant::now();
    let node = fleet.node();
    let waiters: Vec<_> = (0..2).map(|_| tokio::spawn(node.acquire("x", &policy))).collect();
    for waiter in waiters {
        // Kept until both are there.
        std::mem::forget(waiter.await.unwrap().unwrap());
    }
    let took = began.elapsed();
    assert!(took < fleet.forgets_within(), "{took:?}");
    node.shutdown().await;
    empty(fleet).await;
}

async fn a_dead_waiter_is_passed_over(fleet: &impl Fleet) {
    let policy = short_lease(1);
    let node = fleet.node();
    let held = node.acquire("x", &policy).await.unwrap();
    die_holding(fleet.node(), Ask::of("x"), policy.clone(), 0, 5);
    let last = tokio::spawn(node.acquire("x", &policy));
    eventually("it waits", async || node.inspect("x").await.unwrap().waiting > 0).await;
    let began = Instant::now();
    drop(held);
    drop(last.await.unwrap().unwrap());
    let took = began.elapsed();
    assert!(took < fleet.forgets_within(), "{took:?}");
    empty(fleet).await;
}

async fn shutdown_gives_everything_back(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = policy(1);
    let held = a.acquire("x", &policy).await.unwrap();
    let waiter = tokio::spawn(a.acquire("x", &policy));
    waiting(&b, "x", 1).await;
    let other = tokio::spawn(b.acquire("x", &policy));
    waiting(&b, "x", 2).await;
    a.shutdown().await;
    assert!(matches!(waiter.await.unwrap(), Err(AcquireError::Closed)));
    held.lost().await;
    assert!(held.is_lost());
    drop(other.await.unwrap().unwrap());
    assert!(matches!(a.acquire("x", &policy).await, Err(AcquireError::Closed)));
    a.shutdown().await;
    drop(held);
    b.shutdown().await;
    assert!(fleet.is_empty());
}

async fn dropping_the_semaphore_leaves_its_permits_alive(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = short_lease(1);
    let held = a.acquire("x", &policy).await.unwrap();
    drop(a);
    tokio::time::sleep(2 * Policy::MIN_LEASE).await;
    rejection(b.try_acquire("x", &policy).await);
    assert!(!held.is_lost());
    drop(held);
    empty(fleet).await;
}

async fn what_is_held_is_counted_again_after_a_loss_of_data(fleet: &impl Fleet) {
    let (a, b) = (fleet.node(), fleet.node());
    let policy = lease(2, Duration::from_secs(2));
    let held = a.acquire("x", &policy).await.unwrap();
    fleet.wipe();
    // The next renewal finds it gone and shows its proof.
    eventually("it is counted again", async || b.inspect("x").await.unwrap().in_use == 1).await;
    assert!(!held.is_lost());
    let other = b.try_acquire("x", &policy).await.unwrap();
    rejection(b.try_acquire("x", &policy).await);
    drop((held, other));
    empty(fleet).await;
}

async fn a_waiter_keeps_its_turn_after_a_loss_of_data(fleet: &impl Fleet) {
    // One process, because it restores its holders together with its waiters. Another process's waiters can come back
    // first, and be granted before the holder is counted again.
    let (node, other) = (fleet.node(), fleet.node());
    let policy = lease(1, Duration::from_secs(2));
    let held = node.acquire("x", &policy).await.unwrap();
    let mut waiters = VecDeque::new();
    for i in 0..6 {
        waiters.push_back(tokio::spawn(node.acquire("x", &policy)));
        waiting(&other, "x", i + 1).await;
    }
    fleet.wipe();
    eventually("all are back", async || {
        let seen = other.inspect("x").await.unwrap();
        (seen.in_use, seen.waiting) == (1, 6)
    })
    .await;
    drop(held);
    while let Some(first) = waiters.pop_front() {
        let permit = first.await.unwrap().unwrap();
        assert!(waiters.iter().all(|other| !other.is_finished()));
        drop(permit);
    }
    empty(fleet).await;
}

async fn what_operators_set_is_lost_with_the_data(fleet: &impl Fleet) {
    let (one, other) = (fleet.node(), fleet.node());
    one.set_limit("x", 2).await.unwrap();
    let held = other.acquire("x", &short_lease(1)).await.unwrap();
    drop(other.try_acquire("x", &short_lease(1)).await.unwrap());
    fleet.wipe();
    eventually("it is gone", async || other.limit_of("x").await.unwrap().limit.is_none()).await;
    eventually("the permit is counted", async || other.inspect("x").await.unwrap().in_use == 1)
        .await;
    let refused = other.try_acquire("x", &short_lease(1)).await;
    assert!(refused.is_err(), "the limit of the policy applies");
    // A process that knew the overrides before does not take something else for them.
    other.set_limit("x", 3).await.unwrap();
    eventually("it is known", async || one.limit_of("x").await.unwrap().limit == Some(3)).await;
    one.clear_limit("x").await.unwrap();
    drop(held);
    empty(fleet).await;
}

async fn a_crowd_never_passes_the_cap_and_leaves_nothing(fleet: &impl Fleet) {
    let nodes: Vec<_> = (0..3).map(|_| fleet.node()).collect();
    let names: Vec<_> = (0..4).map(|i| format!("crowd-{i}")).collect();
    let in_flight: Arc<Vec<AtomicU32>> = Arc::new(names.iter().map(|_| 0.into()).collect());
    let peak = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for task in 0..60 {
        let (node, which) = (nodes[task % 3].clone(), task % 4);
        let name = names[which].clone();
        let (in_flight, peak) = (Arc::clone(&in_flight), Arc::clone(&peak));
        tasks.push(tokio::spawn(async move {
            for _ in 0..20 {
                let permit = node.acquire(&name, &policy(3)).await.unwrap();
                let now = in_flight[which].fetch_add(1, Ordering::SeqCst) + 1;
                peak.fetch_max(now, Ordering::SeqCst);
                tokio::task::yield_now().await;
                in_flight[which].fetch_sub(1, Ordering::SeqCst);
                drop(permit);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    // Never more; and not fewer, or it would not have been a crowd.
    assert_eq!(peak.load(Ordering::SeqCst), 3);
    empty(fleet).await;
}

async fn cancelling_at_random_leaves_nothing(fleet: &impl Fleet) {
    let nodes: Vec<_> = (0..2).map(|_| fleet.node()).collect();
    let policy = policy(2);
    let mut tasks = Vec::new();
    for task in 0..40u64 {
        let node = nodes[(task % 2) as usize].clone();
        let policy = policy.clone();
        tasks.push(tokio::spawn(async move {
            for round in 0..25u64 {
                // Between not at all and long enough to be granted.
                let patience = Duration::from_micros((task * 37 + round * 101) % 3000);
                let acquire = node.acquire("x", &policy);
                if let Ok(permit) = timeout(patience, acquire).await {
                    tokio::task::yield_now().await;
                    drop(permit.unwrap());
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    empty(fleet).await;
    // Nothing was lost on the way either: the cap can still be reached.
    let one = nodes[0].try_acquire("x", &policy).await.unwrap();
    let two = nodes[1].try_acquire("x", &policy).await.unwrap();
    drop((one, two));
    empty(fleet).await;
}

async fn a_waiter_is_judged_by_its_own_limit_whatever_others_ask_under(fleet: &impl Fleet) {
    let (one, other) = (fleet.node(), fleet.node());
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(one.try_acquire("x", &policy(10)).await.unwrap());
    }
    let mut waits = one.acquire("x", &policy(10));
    assert!(timeout(Duration::from_millis(50), &mut waits).await.is_err(), "all are in use");
    // The last call had a lower limit, in this process and in another; permits are free all the same.
    for node in [&one, &other] {
        rejection(node.try_acquire("x", &policy(8)).await);
    }
    held.pop().unwrap().release().await.unwrap();
    let permit = timeout(Duration::from_millis(900), waits).await.expect("within a second");
    drop((permit.unwrap(), held));
    empty(fleet).await;
}

async fn a_waiter_under_a_lower_limit_is_not_granted_past_it(fleet: &impl Fleet) {
    let (one, other) = (fleet.node(), fleet.node());
    for releases in [&one, &other] {
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(releases.try_acquire("x", &policy(10)).await.unwrap());
        }
        let mut waits = one.acquire("x", &policy(8));
        assert!(timeout(Duration::from_millis(50), &mut waits).await.is_err(), "all are in use");
        // Under a higher limit the permits that these releases free would go to the waiting places.
        for in_use in [9, 8] {
            held.pop().unwrap().release().await.unwrap();
            rejection(releases.try_acquire("x", &policy(10)).await);
            assert!(timeout(Duration::from_millis(1200), &mut waits).await.is_err(), "{in_use}");
        }
        held.pop().unwrap().release().await.unwrap();
        let permit = timeout(Duration::from_millis(900), waits).await.expect("the eighth");
        drop((permit.unwrap(), held));
        empty(fleet).await;
    }
}

async fn places_behind_a_lower_limit_keep_their_turn(fleet: &impl Fleet) {
    let (one, other) = (fleet.node(), fleet.node());
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(one.try_acquire("x", &policy(3)).await.unwrap());
    }
    let (mut low, mut high) = (one.acquire("x", &policy(2)), other.acquire("x", &policy(3)));
    assert!(timeout(Duration::from_millis(50), &mut low).await.is_err());
    assert!(timeout(Duration::from_millis(50), &mut high).await.is_err());
    held.pop().unwrap().release().await.unwrap();
    assert!(timeout(Duration::from_millis(1200), &mut high).await.is_err(), "the other is first");
    assert!(timeout(Duration::from_millis(1), &mut low).await.is_err(), "two are in use");
    held.pop().unwrap().release().await.unwrap();
    let low = timeout(Duration::from_secs(1), low).await.expect("its turn").unwrap();
    let high = timeout(Duration::from_secs(2), high).await.expect("and the next").unwrap();
    drop((low, high, held));
    empty(fleet).await;
}

async fn requests_that_wait_adopt_a_reloaded_policy_and_keep_their_turn(fleet: &impl Fleet) {
    let (one, other) = (fleet.node(), fleet.node());
    let held = one.acquire("x", &policy(1)).await.unwrap();
    let mut first = one.acquire("x", &policy(1));
    assert!(timeout(Duration::from_millis(50), &mut first).await.is_err());
    // The other process has reloaded already.
    let mut waits = other.acquire("x", &policy(2));
    assert!(timeout(Duration::from_millis(50), &mut waits).await.is_err());
    one.update_waiting("x", &policy(2));
    let permit = timeout(Duration::from_millis(900), first).await.expect("a few round trips");
    assert!(
        timeout(Duration::from_millis(50), &mut waits).await.is_err(),
        "two are in use, of two"
    );
    drop(held);
    drop(timeout(Duration::from_secs(2), waits).await.expect("its turn").unwrap());
    drop(permit.unwrap());
    empty(fleet).await;
}
