//! The promises of a semaphore to tenants, whatever counts its permits.

use std::collections::VecDeque;
use std::time::Duration;

use futures_util::FutureExt;
#[cfg(feature = "redis")]
use tokio::time::Instant;
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::{AcquireError, Ask, Name, Permit, Policy, RejectReason, Semaphore};

use crate::conformance::Fleet;
#[cfg(feature = "redis")]
use crate::conformance::die_holding;
use crate::support::eventually;
#[cfg(feature = "redis")]
use crate::support::redis::TestRedis;

macro_rules! conformance {
    ($($name:ident)*) => {
        mod memory {
            $(#[tokio::test]
            async fn $name() {
                super::$name(&super::MemoryBackend::new()).await;
            })*
        }

        #[cfg(feature = "redis")]
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(&super::TestRedis::start()).await;
            })*
        }

        #[cfg(feature = "etcd")]
        mod etcd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
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

pub(crate) use conformance;

conformance! {
    a_permit_goes_to_the_tenant_with_the_fewest_over_all_processes
    no_tenant_passes_its_cap
    a_big_request_takes_all_its_permits_at_once
    requests_with_and_without_tenants_share_one_limit
    shares_come_back_after_a_loss_of_data
    a_place_of_a_tenant_can_be_revoked
    a_pause_and_a_lower_limit_hold_for_tenants
    what_can_never_fit_holds_nobody_up_after_a_pause
    each_request_is_judged_by_its_own_limit
    a_headroom_counts_for_those_that_brought_it_alone
    tenants_of_all_processes_are_seen
    a_waiter_that_leaves_leaves_nothing
    tenants_of_many_lines_are_all_served
}

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(500);

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(LONG).lease(Duration::from_secs(3)).build().unwrap()
}

fn by(tenant: &str) -> Ask {
    Ask::of("x").by(tenant)
}

async fn waiting(semaphore: &Semaphore, count: u64) {
    eventually("so many wait", async || semaphore.inspect("x").await.unwrap().waiting == count)
        .await;
}

async fn nothing_left(fleet: &impl Fleet) {
    eventually("nothing is stored", async || fleet.is_empty()).await;
}

/// A waiting request, which is in the queue when this returns.
async fn queued(
    semaphore: &Semaphore,
    ask: Ask,
    policy: &Policy,
) -> tokio::task::JoinHandle<Result<Permit, AcquireError>> {
    let before = semaphore.inspect("x").await.unwrap().waiting;
    let waits = tokio::spawn(semaphore.acquire(ask, policy));
    waiting(semaphore, before + 1).await;
    waits
}

async fn a_permit_goes_to_the_tenant_with_the_fewest_over_all_processes(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(2));
    let first = one.acquire(by("a"), &policy).await.unwrap();
    let second = two.acquire(by("a"), &policy).await.unwrap();
    let mut backlog = VecDeque::new();
    for i in 0..4 {
        let semaphore = if i % 2 == 0 { &one } else { &two };
        backlog.push_back(queued(semaphore, by("a"), &policy).await);
    }
    let late = queued(&two, by("b"), &policy).await;
    drop(first);
    let late = late.await.unwrap().expect("before all that came first");
    assert!(backlog.iter().all(|waits| !waits.is_finished()));
    // `a` has one, `b` one, and only `a` waits: in the order of their arrival.
    drop(second);
    while let Some(next) = backlog.pop_front() {
        let permit = next.await.unwrap().unwrap();
        assert_eq!(one.inspect("x").await.unwrap().waiting, backlog.len() as u64);
        drop(permit);
    }
    drop(late);
    nothing_left(fleet).await;
}

async fn no_tenant_passes_its_cap(fleet: &impl Fleet) {
    let (one, two) = (fleet.node(), fleet.node());
    let now = Policy::builder(5).wait_timeout(Duration::ZERO).build().unwrap();
    let capped = || by("a").each(2);
    let held =
        [one.acquire(capped(), &now).await.unwrap(), two.acquire(capped(), &now).await.unwrap()];
    for semaphore in [&one, &two] {
        let refused = semaphore.acquire(capped(), &now).await.unwrap_err();
        let AcquireError::Rejected(refused) = refused else { panic!("{refused}") };
        assert_eq!(refused.reason, RejectReason::TenantLimit);
        assert_eq!((refused.limit, refused.each), (5, Some(2)));
    }
    let waits = queued(&two, capped(), &policy(5)).await;
    // Its line is stopped, and delays no other.
    let others: Vec<_> =
        [by("b"), by("c"), Ask::of("x")].into_iter().map(|ask| one.acquire(ask, &now)).collect();
    let mut passed = Vec::new();
    for other in others {
        passed.push(other.await.expect("there is room for three"));
    }
    drop(passed);
    let [mine, other] = held;
    drop(mine);
    drop(waits.await.unwrap().unwrap());
    drop(other);
    nothing_left(fleet).await;
}

async fn a_big_request_takes_all_its_permits_at_once(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(4));
    let mut small = VecDeque::new();
    for _ in 0..4 {
        small.push_back(one.acquire(by("a"), &policy).await.unwrap());
    }
    let big = queued(&two, by("b").cost(3), &policy).await;
    for _ in 0..2 {
        drop(small.pop_front());
        // The free permits are kept for it.
        let tried = one.try_acquire(by("a"), &policy).await;
        assert!(matches!(tried, Err(AcquireError::Rejected(_))));
    }
    assert!(!big.is_finished());
    drop(small.pop_front());
    let big = big.await.unwrap().unwrap();
    assert_eq!(big.cost(), 3);
    assert_eq!(one.inspect("x").await.unwrap().in_use, 4);
    let never = one.acquire(by("b").cost(5), &policy).await.unwrap_err();
    let AcquireError::Rejected(never) = never else { panic!("{never}") };
    assert_eq!((never.reason, never.cost), (RejectReason::CostTooHigh, 5));
    drop((big, small));
    nothing_left(fleet).await;
}

async fn requests_with_and_without_tenants_share_one_limit(fleet: &impl Fleet) {
    let (old, new, policy) = (fleet.node(), fleet.node(), policy(2));
    let held =
        [old.acquire("x", &policy).await.unwrap(), new.acquire(by("a"), &policy).await.unwrap()];
    assert!(old.try_acquire("x", &policy).await.is_err());
    assert!(new.try_acquire(by("b"), &policy).await.is_err());
    let plain = [queued(&old, "x".into(), &policy).await, queued(&old, "x".into(), &policy).await];
    let fair = queued(&new, by("b"), &policy).await;
    let [mine, yours] = held;
    // Those without a tenant have one permit, `b` has none.
    drop(yours);
    let fair = fair.await.unwrap().unwrap();
    drop(mine);
    let [first, second] = plain;
    let first = first.await.unwrap().unwrap();
    assert!(!second.is_finished(), "in their order");
    // Places of both kinds outlive their leases because they are renewed.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(!first.is_lost() && !fair.is_lost() && !second.is_finished());
    assert_eq!(old.inspect("x").await.unwrap().in_use, 2);
    drop(fair);
    drop((second.await.unwrap().unwrap(), first));
    nothing_left(fleet).await;
}

async fn shares_come_back_after_a_loss_of_data(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(3));
    let big = one.acquire(by("a").cost(2), &policy).await.unwrap();
    let small = two.acquire(by("b"), &policy).await.unwrap();
    fleet.wipe();
    eventually("all is counted again", async || one.inspect("x").await.unwrap().in_use == 3).await;
    assert!(!big.is_lost() && !small.is_lost());
    let older = queued(&one, by("a"), &policy).await;
    let other = queued(&two, by("c"), &policy).await;
    drop(small);
    let other = other.await.unwrap().expect("`a` has two, and it none");
    assert!(!older.is_finished());
    drop(big);
    drop((older.await.unwrap().unwrap(), other));
    nothing_left(fleet).await;
}

async fn a_place_of_a_tenant_can_be_revoked(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(2));
    let held = two.acquire(by("a").cost(2), &policy).await.unwrap();
    let waits = queued(&two, by("b"), &policy).await;
    let revoked = queued(&two, by("c"), &policy).await;
    let seen = one.inspect("x").await.unwrap();
    let place = seen.waiters.iter().max_by_key(|one| one.id).unwrap().id;
    assert!(one.revoke("x", place).await.unwrap());
    let error = revoked.await.unwrap().unwrap_err();
    let AcquireError::Rejected(error) = error else { panic!("{error}") };
    assert_eq!(error.reason, RejectReason::Revoked);
    assert!(one.revoke("x", seen.holders[0].id).await.unwrap());
    let next = waits.await.unwrap().unwrap();
    held.lost().await;
    drop(next);
    nothing_left(fleet).await;
}

async fn a_pause_and_a_lower_limit_hold_for_tenants(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(2));
    one.pause("x").await.unwrap();
    let waits = queued(&two, by("a"), &policy).await;
    one.set_limit("x", 1).await.unwrap();
    one.resume("x").await.unwrap();
    let held = waits.await.unwrap().unwrap();
    let waits = queued(&two, by("a"), &policy).await;
    assert!(one.acquire(by("b").cost(2), &policy).await.is_err(), "it could never fit");
    one.clear_limit("x").await.unwrap();
    drop(waits.await.unwrap().unwrap());
    drop(held);
    nothing_left(fleet).await;
}

fn too_much(result: &Result<Permit, AcquireError>) {
    let Err(AcquireError::Rejected(rejected)) = result else { panic!("{result:?}") };
    assert_eq!(rejected.reason, RejectReason::CostTooHigh);
}

async fn what_can_never_fit_holds_nobody_up_after_a_pause(fleet: &impl Fleet) {
    let (one, policy) = (fleet.node(), policy(4));
    let of = |cost| Ask::of("x").cost(cost);
    one.pause("x").await.unwrap();
    too_much(&one.acquire(of(8), &policy).await);
    let waits = queued(&one, of(4), &policy).await;
    let behind = queued(&one, of(2), &policy).await;
    // Nor does one that could have been served when it came.
    one.set_limit("x", 3).await.unwrap();
    too_much(&waits.await.unwrap());
    one.resume("x").await.unwrap();
    drop(behind.await.unwrap().unwrap());
    one.clear_limit("x").await.unwrap();
    drop(one.acquire(of(4), &policy).await.unwrap());
    nothing_left(fleet).await;
}

/// No hint shows that its process is gone, because it is not granted. A cluster cannot tell, so this is not one of all.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_dead_waiter_that_is_kept_back_is_passed_over() {
    let fleet = TestRedis::start();
    let lease = Duration::from_secs(60);
    let policy = Policy::builder(4).wait_timeout(LONG).lease(lease).build().unwrap();
    let node = fleet.node();
    let held = node.acquire(by("a"), &policy).await.unwrap();
    die_holding(fleet.node(), by("b").cost(4), policy.clone(), 0, 3);
    let began = Instant::now();
    let behind = node.acquire(by("c").cost(2), &policy).await.unwrap();
    let took = began.elapsed();
    assert!(took < lease / 4, "{took:?}");
    drop((held, behind));
    nothing_left(&fleet).await;
}

async fn each_request_is_judged_by_its_own_limit(fleet: &impl Fleet) {
    let one = fleet.node();
    let (low, high) = (Policy::builder(4).wait_timeout(SHORT).build().unwrap(), policy(8));
    // Concurrently, so that one write carries them. What does not fit is refused.
    let (big, small) =
        tokio::join!(one.acquire(by("a").cost(6), &high), one.acquire(by("b"), &low));
    drop((big.unwrap(), small));
    let kept = Policy::builder(4).headroom(2).wait_timeout(LONG).build().unwrap();
    let of_class = || by("a").class(1);
    let (three, one_more) =
        tokio::join!(one.acquire(of_class().cost(3), &low), one.acquire(by("b"), &kept));
    drop((three.unwrap(), one_more));
    nothing_left(fleet).await;
}

async fn tenants_of_all_processes_are_seen(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(2));
    let held = [
        one.acquire(by("a").weight(3), &policy).await.unwrap(),
        two.acquire(by("b").each(2), &policy).await.unwrap(),
    ];
    let waits = queued(&two, by("b").each(2), &policy).await;
    let seen = one.inspect_fleet("x").await.unwrap();
    let names: Vec<_> = seen.tenants.iter().map(|one| one.name.clone().unwrap()).collect();
    assert_eq!(names, [Name::new("b"), Name::new("a")]);
    let [b, a] = &seen.tenants[..] else { panic!("{seen:?}") };
    assert_eq!((b.in_use, b.waiting, b.each), (1, 1, Some(2)));
    assert!(b.longest_wait.is_some());
    assert_eq!((a.in_use, a.waiting, a.weight), (1, 0, 3));
    drop(held);
    drop(waits.await.unwrap().unwrap());
    nothing_left(fleet).await;
}

async fn a_waiter_that_leaves_leaves_nothing(fleet: &impl Fleet) {
    let (one, policy) = (fleet.node(), policy(1));
    let held = one.acquire(by("a"), &policy).await.unwrap();
    let mut waits: Vec<_> =
        (0..4).map(|i| one.acquire(by(&format!("t{}", i % 2)), &policy)).collect();
    for wait in &mut waits {
        assert!(wait.now_or_never().is_none());
    }
    waiting(&one, 4).await;
    waits.clear();
    waiting(&one, 0).await;
    drop(one.try_acquire(by("b").cost(1), &policy).await.unwrap_err());
    drop(held);
    nothing_left(fleet).await;
}

async fn tenants_of_many_lines_are_all_served(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(3));
    let requests = (0..120u32).map(|i| {
        let semaphore = if i % 2 == 0 { &one } else { &two };
        let ask = by(&format!("t{}", i % 7)).cost(i % 3 + 1).class((i % 2) as u8).weight(i % 4 + 1);
        let ask = if i % 5 == 0 { Ask::of("x") } else { ask.each(3) };
        semaphore.acquire(ask, &policy)
    });
    let tasks: Vec<_> = requests
        .map(|request| tokio::spawn(async move { drop(request.await.expect("a permit")) }))
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    nothing_left(fleet).await;
}

async fn a_headroom_counts_for_those_that_brought_it_alone(fleet: &impl Fleet) {
    let (one, two) = (fleet.node(), fleet.node());
    let without = policy(3);
    let with = Policy::builder(3).headroom(2).wait_timeout(LONG).build().unwrap();
    for other in [&one, &two] {
        let mut held = Vec::new();
        for tenant in ["a", "b"] {
            held.push(one.acquire(by(tenant), &without).await.unwrap());
        }
        held.push(one.acquire(by("c"), &without).await.unwrap());
        let waits = queued(&one, by("d").class(1), &without).await;
        // Another request brings a headroom, which would leave two permits idle.
        drop(other.try_acquire(by("e").class(1), &with).await.unwrap_err());
        held.pop().unwrap().release().await.unwrap();
        let permit = tokio::time::timeout(Duration::from_millis(1500), waits).await;
        drop(permit.expect("within a second and a round trip").unwrap().unwrap());
        // And vice versa: a request with a headroom keeps to it, whatever frees the permits.
        let waits = queued(&one, by("f").class(1), &with).await;
        for _ in 0..2 {
            drop(other.try_acquire(by("g").class(1), &without).await);
            tokio::time::sleep(Duration::from_millis(600)).await;
            assert!(!waits.is_finished(), "two are in use, and two are left to class 0");
        }
        held.clear();
        drop(waits.await.unwrap().unwrap());
        nothing_left(fleet).await;
    }
}
