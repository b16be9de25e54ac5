//! Operators' calls in one process, and their effect on others.
//!
//! Each test in `both!` runs on each backend, with the semaphores of two processes.

use std::collections::HashMap;
use std::time::Duration;
#[cfg(feature = "redis")]
use std::{
    sync::atomic::{AtomicBool, Ordering},
    sync::{Arc, Weak},
};

#[cfg(feature = "redis")]
use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout};
#[cfg(feature = "redis")]
use tower_semaphore::BackendError;
use tower_semaphore::backend::MemoryBackend;
#[cfg(feature = "redis")]
use tower_semaphore::backend::RedisBackend;
#[cfg(feature = "redis")]
use tower_semaphore::backend::seam::{
    AddressedCall, Answers, Connection, Listing, Mailbox, Names, PeerMessage, QueryError,
    ServerInfo, Shard,
};
use tower_semaphore::backend::seam::{Backend, Change, OVERRIDES, Overrides, Queries, Query};
use tower_semaphore::operate::{Cursor, Mode, PlaceId};
use tower_semaphore::protocol;
#[cfg(feature = "redis")]
use tower_semaphore::{AcquireError, protocol::NodeId};
use tower_semaphore::{Name, Policy, RejectReason, Semaphore};

#[cfg(feature = "redis")]
use crate::support::redis::TestRedis;
use crate::support::semaphore::{rejection, waiting};
use crate::support::stopwatch::Stopwatch;
#[cfg(feature = "redis")]
use crate::support::told::Told;
use crate::support::{eventually, on_each};

/// What counts as "at once": half of the second after which every process reads by itself.
const AT_ONCE: Duration = Duration::from_millis(500);

macro_rules! both {
    ($($name:ident)*) => {
        /// All tests, one after the other, on another kind of server.
        #[cfg(feature = "redis")]
        pub(crate) async fn everywhere(node: &dyn Fn() -> Semaphore, wipe: &dyn Fn()) {
            $(println!("{}", stringify!($name));
            $name(node).await;
            wipe();)*
        }

        on_each! { $($name)* }
    };
}

both! {
    a_limit_counts_in_all_processes_until_it_is_cleared
    more_permits_wake_those_who_wait_at_once
    fewer_permits_take_none_away
    a_limit_is_kept_for_processes_that_come_later
    a_refusal_by_an_empty_semaphore_counts_nobody
    while_paused_nobody_is_granted_and_all_keep_their_turn
    clearing_a_limit_below_the_policys_wakes_those_who_wait
    a_draining_semaphore_serves_those_who_wait_and_refuses_newcomers
    a_drain_says_that_it_did_not_come_to_its_end
    what_is_set_for_one_name_leaves_all_others_alone
    a_revoked_permit_is_lost_to_its_holder_and_goes_to_the_next
    a_revoked_permit_is_not_counted_again
    a_revoked_request_is_refused_and_does_not_come_back
    a_revocation_of_nothing_says_so_and_harms_nobody
    what_a_dead_process_holds_can_be_revoked
    a_list_names_every_semaphore_that_someone_has
    what_is_set_is_listed_by_name
    an_inspection_tells_limit_and_age
    an_inspection_of_the_fleet_asks_the_others
}

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(20)).build().unwrap()
}

/// Waits until the other process applies another limit, within `most`.
async fn limit_of(semaphore: &Semaphore, name: &str, policy: &Policy, limit: u32, most: Duration) {
    let began = Stopwatch::start();
    loop {
        // Full, so that the answer shows the limit.
        let seen = rejection(semaphore.try_acquire(name, policy).await);
        if seen.limit == limit {
            return;
        }
        assert!(began.elapsed() < most, "still {}, not {limit}", seen.limit);
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

async fn a_limit_counts_in_all_processes_until_it_is_cleared(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let three = policy(3);
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(other.acquire("x", &three).await.unwrap());
    }
    operator.set_limit("x", 2).await.unwrap();
    assert_eq!(operator.limit_of("x").await.unwrap().limit, Some(2));
    assert_eq!(other.limit_of("x").await.unwrap().limit, Some(2));
    // This process applies it already.
    assert_eq!(rejection(operator.try_acquire("x", &three).await).limit, 2);
    limit_of(&other, "x", &three, 2, AT_ONCE).await;
    permits.pop();
    eventually("one is back", async || other.inspect("x").await.unwrap().in_use == 2).await;
    assert_eq!(rejection(other.try_acquire("x", &three).await).in_use, Some(2));
    operator.clear_limit("x").await.unwrap();
    assert_eq!(operator.limit_of("x").await.unwrap().limit, None);
    permits.push(other.acquire("x", &three).await.unwrap());
    limit_of(&other, "x", &three, 3, AT_ONCE).await;
}

async fn more_permits_wake_those_who_wait_at_once(node: &dyn Fn() -> Semaphore) {
    let (operator, a, b) = (node(), node(), node());
    let one = policy(1);
    let held = a.acquire("x", &one).await.unwrap();
    let mut waits = Vec::new();
    for i in 0..6 {
        waits.push(tokio::spawn([&a, &b][i % 2].acquire("x", &one)));
        waiting(&operator, "x", i as u64 + 1).await;
    }
    let began = Stopwatch::start();
    operator.set_limit("x", 5).await.unwrap();
    let mut permits = Vec::new();
    for wait in waits.drain(..4) {
        permits.push(timeout(AT_ONCE, wait).await.expect("at once").unwrap().unwrap());
    }
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert_eq!(operator.inspect("x").await.unwrap().waiting, 2);
    assert_eq!(rejection(a.try_acquire("x", &one).await).limit, 5);
    drop((held, permits));
    for wait in waits {
        drop(wait.await.unwrap().unwrap());
    }
}

async fn fewer_permits_take_none_away(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let three = policy(3);
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(other.acquire("x", &three).await.unwrap());
    }
    let next = tokio::spawn(other.acquire("x", &three));
    waiting(&operator, "x", 1).await;
    operator.set_limit("x", 1).await.unwrap();
    limit_of(&other, "x", &three, 1, AT_ONCE).await;
    assert!(permits.iter().all(|permit| !permit.is_lost()));
    for left in [2, 1] {
        permits.pop().unwrap().release().await.unwrap();
        let seen = operator.inspect("x").await.unwrap();
        assert_eq!((seen.in_use, seen.waiting), (left, 1), "still too many, or just as many");
    }
    permits.pop().unwrap().release().await.unwrap();
    let _ = next.await.unwrap().unwrap();
}

async fn a_limit_is_kept_for_processes_that_come_later(node: &dyn Fn() -> Semaphore) {
    let two = policy(2);
    {
        let operator = node();
        operator.set_limit("x", 1).await.unwrap();
        operator.pause("y").await.unwrap();
        operator.shutdown().await;
    }
    for _ in 0..3 {
        // Its very first call applies it.
        assert_eq!(rejection(node().try_acquire("y", &two).await).limit, 0);
        let other = node();
        let held = other.acquire("x", &two).await.unwrap();
        assert_eq!(rejection(other.try_acquire("x", &two).await).limit, 1);
        held.release().await.unwrap();
    }
}

async fn a_refusal_by_an_empty_semaphore_counts_nobody(node: &dyn Fn() -> Semaphore) {
    let operator = node();
    operator.pause("x").await.unwrap();
    let seen = rejection(operator.try_acquire("x", &policy(2)).await);
    assert_eq!((seen.reason, seen.in_use, seen.waiting), (RejectReason::Paused, Some(0), Some(0)));
}

async fn while_paused_nobody_is_granted_and_all_keep_their_turn(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let one = policy(1);
    let held = other.acquire("x", &one).await.unwrap();
    let first = tokio::spawn(other.acquire("x", &one));
    waiting(&operator, "x", 1).await;
    operator.pause("x").await.unwrap();
    assert_eq!(operator.limit_of("x").await.unwrap().mode, Mode::Paused);
    limit_of(&other, "x", &one, 0, AT_ONCE).await;
    held.release().await.unwrap();
    let second = tokio::spawn(operator.acquire("x", &one));
    waiting(&operator, "x", 2).await;
    // Longer than waiting processes take to call again.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let seen = operator.inspect("x").await.unwrap();
    assert_eq!((seen.in_use, seen.waiting), (0, 2));
    assert_eq!(rejection(other.try_acquire("x", &one).await).reason, RejectReason::Paused);
    let short = Policy::builder(1).wait_timeout(Duration::from_millis(20)).build().unwrap();
    assert_eq!(rejection(other.acquire("x", &short).await).reason, RejectReason::Paused);

    operator.resume("x").await.unwrap();
    let permit = timeout(AT_ONCE, first).await.expect("at once").unwrap().unwrap();
    assert!(!second.is_finished());
    drop(permit);
    let _ = second.await.unwrap().unwrap();
}

async fn clearing_a_limit_below_the_policys_wakes_those_who_wait(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    operator.set_limit("x", 0).await.unwrap();
    let wait = tokio::spawn(other.acquire("x", &policy(1)));
    waiting(&operator, "x", 1).await;
    operator.clear_limit("x").await.unwrap();
    let _ = timeout(AT_ONCE, wait).await.expect("at once").unwrap().unwrap();
}

async fn a_draining_semaphore_serves_those_who_wait_and_refuses_newcomers(
    node: &dyn Fn() -> Semaphore,
) {
    let (operator, other) = (node(), node());
    let one = policy(1);
    let held = other.acquire("x", &one).await.unwrap();
    let wait = tokio::spawn(other.acquire("x", &one));
    waiting(&operator, "x", 1).await;
    let drain = {
        let operator = operator.clone();
        tokio::spawn(async move { operator.drain("x", Duration::from_secs(20)).await })
    };
    eventually("newcomers are refused", async || {
        rejection(other.try_acquire("x", &one).await).reason == RejectReason::Draining
    })
    .await;
    let seen = rejection(other.acquire("x", &one).await);
    assert_eq!(seen.reason, RejectReason::Draining, "one that would wait");
    drop(held);
    let last = wait.await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!drain.is_finished(), "one is still there");
    drop(last);
    assert!(drain.await.unwrap().unwrap());
    assert_eq!(rejection(other.try_acquire("x", &one).await).reason, RejectReason::Draining);
    operator.resume("x").await.unwrap();
    eventually("it is open", async || other.try_acquire("x", &one).await.is_ok()).await;
}

async fn a_drain_says_that_it_did_not_come_to_its_end(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let held = other.acquire("x", &policy(1)).await.unwrap();
    for limit in [Duration::from_millis(120), Duration::ZERO] {
        let began = Instant::now();
        assert!(!operator.drain("x", limit).await.unwrap());
        assert!(began.elapsed() >= limit);
    }
    drop(held);
    assert!(operator.drain("x", Duration::MAX).await.unwrap());
}

async fn what_is_set_for_one_name_leaves_all_others_alone(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let names = ["x", "@", "!", "{x}", "x y", "", "%", "-", "=", "<script>", "\r\n", "!overrides"];
    for (i, name) in names.iter().enumerate() {
        operator.set_limit(name, 100 + u32::try_from(i).unwrap()).await.unwrap();
    }
    operator.drain("x", Duration::ZERO).await.unwrap();
    for (i, name) in names.iter().enumerate() {
        let set = other.limit_of(name).await.unwrap();
        assert_eq!(set.limit, Some(100 + u32::try_from(i).unwrap()), "{name:?}");
        assert_eq!(set.mode, if i == 0 { Mode::Draining } else { Mode::Open }, "{name:?}");
    }
    drop(other.try_acquire("y", &policy(1)).await.unwrap());
    let seen = rejection(other.try_acquire("x", &policy(1)).await);
    assert_eq!((seen.reason, seen.limit), (RejectReason::Draining, 100));
}

/// Returns the id of the only holder.
async fn holder(semaphore: &Semaphore, name: &str) -> PlaceId {
    let seen = semaphore.inspect(name).await.unwrap();
    assert_eq!(seen.holders.len(), 1, "{seen:?}");
    seen.holders[0].id
}

async fn a_revoked_permit_is_lost_to_its_holder_and_goes_to_the_next(node: &dyn Fn() -> Semaphore) {
    let (operator, a, b) = (node(), node(), node());
    let one = policy(1);
    let held = a.acquire("x", &one).await.unwrap();
    let next = tokio::spawn(b.acquire("x", &one));
    waiting(&operator, "x", 1).await;
    let lost = tokio::spawn({
        let held = held.clone();
        async move { held.lost().await }
    });
    let id = holder(&operator, "x").await;
    assert!(operator.revoke("x", id).await.unwrap());
    timeout(AT_ONCE, lost).await.expect("at once").unwrap();
    assert!(held.is_lost());
    let next = timeout(AT_ONCE, next).await.expect("at once").unwrap().unwrap();
    assert_ne!(holder(&operator, "x").await, id);
    assert!(!operator.revoke("x", id).await.unwrap(), "once is enough");
    assert!(!next.is_lost());
    // Its holder releases what is no longer its own.
    held.release().await.unwrap();
    assert_eq!(operator.inspect("x").await.unwrap().in_use, 1);
}

async fn a_revoked_permit_is_not_counted_again(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    // Renewed every 170 ms.
    let brief = Policy::builder(2).lease(Policy::MIN_LEASE).build().unwrap();
    let (first, second) =
        (other.acquire("x", &brief).await.unwrap(), other.acquire("x", &brief).await.unwrap());
    let seen = operator.inspect("x").await.unwrap();
    let id = seen.holders[0].id;
    assert!(operator.revoke("x", id).await.unwrap());
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        let seen = operator.inspect("x").await.unwrap();
        assert_eq!(seen.in_use, 1, "{seen:?}");
        assert_ne!(seen.holders[0].id, id);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(first.is_lost() != second.is_lost(), "one of them, and only that");
    assert_eq!(other.health().lost, 1);
}

async fn a_revoked_request_is_refused_and_does_not_come_back(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let one = policy(1);
    let held = other.acquire("x", &one).await.unwrap();
    let first = tokio::spawn(other.acquire("x", &one));
    waiting(&operator, "x", 1).await;
    let second = tokio::spawn(other.acquire("x", &one));
    waiting(&operator, "x", 2).await;
    let id = operator.inspect("x").await.unwrap().waiters[0].id;
    assert!(operator.revoke("x", id).await.unwrap());
    let refused = timeout(AT_ONCE, first).await.expect("at once").unwrap();
    assert_eq!(rejection(refused).reason, RejectReason::Revoked);
    // Longer than waiting processes take to call again.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let seen = operator.inspect("x").await.unwrap();
    assert_eq!((seen.in_use, seen.waiting), (1, 1));
    drop(held);
    let _ = second.await.unwrap().unwrap();
}

async fn a_revocation_of_nothing_says_so_and_harms_nobody(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let held = other.acquire("x", &policy(1)).await.unwrap();
    let id = holder(&operator, "x").await;
    assert!(!operator.revoke("y", id).await.unwrap(), "another semaphore");
    let never: PlaceId = "00000000001:1".parse().unwrap();
    assert!(!operator.revoke("x", never).await.unwrap());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!held.is_lost());
    assert_eq!(holder(&operator, "x").await, id);
}

async fn what_a_dead_process_holds_can_be_revoked(node: &dyn Fn() -> Semaphore) {
    let (operator, b) = (node(), node());
    let dead = node();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            std::mem::forget(dead.acquire("x", &policy(1)).await.unwrap());
        });
        runtime.shutdown_background();
        std::mem::forget(dead);
    })
    .join()
    .unwrap();
    let next = tokio::spawn(b.acquire("x", &policy(1)));
    waiting(&operator, "x", 1).await;
    let id = holder(&operator, "x").await;
    assert!(operator.revoke("x", id).await.unwrap());
    // Only the operator frees it; waiters call at once, long before the lease ends.
    let _ = timeout(AT_ONCE, next).await.expect("at once").unwrap().unwrap();
}

async fn a_list_names_every_semaphore_that_someone_has(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    assert_eq!(operator.list(Cursor::default(), 10).await.unwrap().next, None);
    let two = policy(2);
    let hostile = ["<script>alert(1)</script>", "{x}", "*", "", "a\r\nb", "../..", "é", "@"];
    let mut names: Vec<Name> = hostile.iter().map(Name::from).collect();
    names.extend((0..250).map(|i| Name::new("tenant").part(i.to_string())));
    names.push(Name::new("x".repeat(500)));
    let mut permits = Vec::new();
    for name in &names {
        permits.push(other.acquire(name.clone(), &two).await.unwrap());
    }
    permits.push(other.acquire(hostile[0], &two).await.unwrap());
    operator.set_limit(hostile[0], 1).await.unwrap();
    let wait = tokio::spawn(other.acquire(hostile[0], &two));
    waiting(&operator, hostile[0], 1).await;

    let (mut seen, mut from, mut pages) = (HashMap::new(), Some(Cursor::default()), 0);
    while let Some(at) = from {
        let page = operator.list(at, 20).await.unwrap();
        assert!(page.semaphores.len() < 100, "{}", page.semaphores.len());
        seen.extend(page.semaphores.into_iter().map(|one| (one.name.clone(), one)));
        from = page.next;
        pages += 1;
        assert!(pages < 100, "it has no end");
    }
    assert!(pages > 3, "{pages}");
    assert_eq!(seen.len(), names.len());
    for name in &names {
        let one = &seen[name];
        let most = if *name == Name::from(hostile[0]) { (2, 1, Some(1)) } else { (1, 0, None) };
        assert_eq!((one.in_use, one.waiting, one.set.limit), most, "{name}");
    }
    for most in [0, 1001] {
        let error = operator.list(Cursor::default(), most).await.unwrap_err();
        assert!(error.to_string().contains("1 to 1000"), "{error}");
    }
    wait.abort();
}

async fn what_is_set_is_listed_by_name(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    operator.pause(Name::new("b").part("/")).await.unwrap();
    operator.set_limit("a", 3).await.unwrap();
    let all = other.overrides().await.unwrap();
    let shown: Vec<_> =
        all.iter().map(|(name, set)| (name.as_str(), set.limit, set.mode)).collect();
    assert_eq!(shown, [("a", Some(3), Mode::Open), ("b:%2F", None, Mode::Paused)]);
    // A listed name can be used as it is.
    other.resume(all[1].0.clone()).await.unwrap();
    assert_eq!(operator.overrides().await.unwrap().len(), 1);
}

async fn an_inspection_of_the_fleet_asks_the_others(node: &dyn Fn() -> Semaphore) {
    let (operator, a, b) = (node(), node(), node());
    let one = policy(1);
    let began = Instant::now();
    let held = a.acquire("x", &one).await.unwrap();
    let wait = tokio::spawn(b.acquire("x", &one));
    waiting(&operator, "x", 1).await;
    let seen = operator.inspect("x").await.unwrap();
    assert_eq!((seen.holders[0].held, seen.holders[0].process.as_deref()), (None, None));
    // On a busy machine an answer may come too late.
    eventually("they answer", async || {
        let seen = operator.inspect_fleet("x").await.unwrap();
        seen.holders[0].held.is_some() && seen.waiters[0].process.is_some()
    })
    .await;
    let (early, since) = (operator.inspect_fleet("x").await.unwrap(), Instant::now());
    let age = early.holders[0].held.unwrap_or_default();
    assert!(age <= since - began, "{age:?}");
    eventually("it grows older", async || {
        let seen = operator.inspect_fleet("x").await.unwrap();
        seen.holders[0].held.is_some_and(|held| held > age && held <= began.elapsed())
    })
    .await;
    let seen = early;
    // All of them are in this process.
    let id = format!(":{}", std::process::id());
    for process in [&seen.holders[0].process, &seen.waiters[0].process] {
        assert!(process.as_ref().is_none_or(|process| process.ends_with(&id)), "{process:?}");
    }
    let own = a.inspect_fleet("x").await.unwrap();
    assert!(own.holders[0].is_own && own.holders[0].held.is_some());
    drop(held);
    drop(wait.await.unwrap().unwrap());
}

async fn an_inspection_tells_limit_and_age(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    let began = Instant::now();
    let _held = other.acquire("x", &policy(2)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    let (own, foreign) = (other.inspect("x").await.unwrap(), operator.inspect("x").await.unwrap());
    assert_eq!((own.limit, foreign.limit), (Some(2), None));
    let age = own.holders[0].held.unwrap();
    assert!(age >= Duration::from_millis(30) && age <= began.elapsed(), "{age:?}");
    assert_eq!(foreign.holders[0].held, None);
    assert_eq!(own.holders[0].node, foreign.holders[0].node);
    assert!(own.holders[0].id.to_string().contains(&own.holders[0].node));
    operator.set_limit("x", 7).await.unwrap();
    assert_eq!(operator.inspect("x").await.unwrap().limit, Some(7));
    eventually("it is told", async || other.inspect("x").await.unwrap().limit == Some(7)).await;
}

/// The answer of the backend to a query.
async fn asked<B: Backend, T>(backend: &B, query: impl Fn(&dyn Queries) -> Query<T>) -> T {
    if let Some(embedded) = backend.embedded() {
        return query(embedded).await.unwrap();
    }
    let shard = backend.shard(&backend.key(OVERRIDES));
    let connection = backend.connect(&shard).await.unwrap().unwrap();
    let driven = connection.drive();
    let answer = query(&*connection);
    tokio::select! {
        answer = answer => answer.unwrap(),
        () = driven => panic!("the connection was closed"),
    }
}

/// Changes the record of one revoked place.
async fn remember<B: Backend>(backend: &B, id: protocol::PlaceId, name: &str, keep_ms: u64) {
    let (key, name) = (backend.key(OVERRIDES), name.into());
    let change = Change::Revoked { id, keep_ms, tell: true };
    asked(backend, |server| server.set_override(&key, &name, change.clone())).await;
}

/// Reads all overrides.
async fn all_set<B: Backend>(backend: &B) -> Overrides {
    let key = backend.key(OVERRIDES);
    asked(backend, |server| server.overrides(&key, 0)).await.unwrap_or_default()
}

async fn an_id_of_two_names_is_revoked_for_one<B: Backend>(backend: B) {
    let id: protocol::PlaceId = "00000000007:1".parse().unwrap();
    remember(&backend, id, "x", 60_000).await;
    remember(&backend, id, "y", 60_000).await;
    assert_eq!(all_set(&backend).await.revoked.len(), 2);
    remember(&backend, id, "z", 0).await;
    remember(&backend, id, "y", 0).await;
    let left: Vec<_> = all_set(&backend).await.revoked.into_keys().collect();
    assert_eq!(left, [(id, "x".into())]);
    remember(&backend, id, "x", 0).await;
    assert_eq!(all_set(&backend).await.revoked.len(), 0);
}

#[tokio::test]
async fn an_id_that_two_names_have_is_revoked_for_one_of_them() {
    an_id_of_two_names_is_revoked_for_one(MemoryBackend::new()).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn an_id_that_two_names_have_is_revoked_for_one_of_them_in_redis() {
    let server = TestRedis::start();
    let backend = RedisBackend::builder(server.url()).build().unwrap();
    an_id_of_two_names_is_revoked_for_one(backend).await;
    assert_eq!(server.keys(), 0);
}

/// A backend that loses its answer to the first removal, so that the operator repeats it.
#[cfg(feature = "redis")]
struct AskedTwice(RedisBackend);

#[cfg(feature = "redis")]
struct AskedTwiceConnection(Arc<dyn Connection>, Arc<AtomicBool>);

#[cfg(feature = "redis")]
impl Backend for AskedTwice {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.attach(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.0.key(name)
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        Box::pin(async move {
            let connection = self.0.connect(shard).await?;
            let twice =
                |connection| Arc::new(AskedTwiceConnection(connection, Arc::default())) as _;
            Ok(connection.map(twice))
        })
    }
}

#[cfg(feature = "redis")]
impl Connection for AskedTwiceConnection {
    fn server(&self) -> &ServerInfo {
        self.0.server()
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        self.0.drive()
    }

    fn send(&self, calls: Arc<[AddressedCall]>) -> Answers {
        self.0.send(calls)
    }
}

#[cfg(feature = "redis")]
impl Queries for AskedTwiceConnection {
    fn inspect(
        &self,
        key: &Arc<str>,
        most: u32,
        rate: Option<protocol::BoundRate>,
    ) -> Query<Listing> {
        self.0.inspect(key, most, rate)
    }

    fn list(&self, key: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        self.0.list(key, from, most)
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        self.0.overrides(key, known)
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.0.set_override(key, name, change)
    }

    fn revoke(&self, key: &Arc<str>, id: protocol::PlaceId, take: bool) -> Query<Option<u64>> {
        let (answer, done) = (self.0.revoke(key, id, take), Arc::clone(&self.1));
        Box::pin(async move {
            let answer = answer.await;
            // As if a slot were migrating, and its node did not answer in time.
            if take && !done.swap(true, Ordering::Relaxed) {
                Err(QueryError::Moved)
            } else {
                answer
            }
        })
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.0.send_message(key, to, message)
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_revocation_that_is_asked_for_twice_is_not_undone() {
    let server = TestRedis::start();
    let backend = RedisBackend::builder(server.url()).build().unwrap();
    let operator = Semaphore::new(AskedTwice(backend));
    let poll_only = Semaphore::new(server.without_messages());
    let brief = Policy::builder(1).lease(Policy::MIN_LEASE).build().unwrap();
    let held = poll_only.acquire("x", &brief).await.unwrap();
    let id = holder(&operator, "x").await;
    assert!(operator.revoke("x", id).await.unwrap());
    let revoked = Stopwatch::start();
    while !held.is_lost() {
        assert_eq!(operator.inspect("x").await.unwrap().in_use, 0, "it came back");
        assert!(revoked.elapsed() < Duration::from_millis(1500), "not within a second");
    }
    assert_eq!(operator.inspect("x").await.unwrap().in_use, 0, "it came back");
    // It cannot be known that its holder did not release it, so the record lasts for the longest lease.
    let left: i64 = server.command(&["PTTL", "semaphore:{!overrides}"]);
    assert!(left > 23 * 3600 * 1000, "{left}");
}

/// Two operators: neither undoes the record that the other one shortens or keeps.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_permit_that_two_operators_revoke_at_once_does_not_come_back() {
    let server = TestRedis::start();
    let (one, two) = (server.semaphore(), server.semaphore());
    let poll_only = Semaphore::new(server.without_messages());
    let brief = Policy::builder(1).lease(Policy::MIN_LEASE).build().unwrap();
    for _ in 0..5 {
        let held = poll_only.acquire("x", &brief).await.unwrap();
        let id = holder(&one, "x").await;
        let (a, b) = tokio::join!(one.revoke("x", id), two.revoke("x", id));
        assert!(a.unwrap() | b.unwrap());
        while !held.is_lost() {
            assert_eq!(one.inspect("x").await.unwrap().in_use, 0, "it came back");
        }
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn an_event_says_what_applies_while_the_overrides_cannot_be_read() {
    let server = TestRedis::start();
    let told = Told::new();
    let warnings = || -> Vec<String> {
        let events = told.aloud().into_iter().map(|event| event.name);
        events.filter(|name| name.contains("the overrides cannot be read")).collect()
    };
    let known = server.semaphore();
    known.set_limit("x", 1).await.unwrap();
    let held = known.acquire("x", &policy(2)).await.unwrap();
    server.command::<()>(&["SET", "semaphore:{!overrides}", "not a hash"]);
    eventually("its reads fail", async || !warnings().is_empty()).await;
    assert_eq!(
        warnings(),
        ["the overrides cannot be read; those that were read before stay in force"]
    );
    assert!(known.try_acquire("x", &policy(2)).await.is_err(), "the limit of the operator holds");

    // One that begins now has read none.
    let new = server.semaphore();
    let policy_alone = new.acquire("x", &policy(2)).await.unwrap();
    eventually("its reads fail", async || warnings().len() > 1).await;
    assert_eq!(warnings()[1..], ["the overrides cannot be read; only policies apply"]);
    drop((held, policy_alone));
}

#[tokio::test]
async fn at_most_a_thousand_names_have_something_set() {
    let operator = Semaphore::in_memory();
    for i in 0..1000 {
        operator.set_limit(i.to_string(), 7).await.unwrap();
    }
    no_more_than_a_thousand(&operator).await;
}

/// Where 0 to 999 have a limit of 7.
async fn no_more_than_a_thousand(operator: &Semaphore) {
    let error = operator.set_limit("one more", 7).await.unwrap_err();
    assert!(error.to_string().contains("1000 names"), "{error}");
    assert_eq!(operator.limit_of("one more").await.unwrap().limit, None);
    let held = operator.acquire("x", &policy(1)).await.unwrap();
    let id = holder(operator, "x").await;
    operator.revoke("x", id).await.unwrap_err();
    assert!(!held.is_lost());
    // A rate is one more, beside a limit too.
    let minute = Duration::from_secs(60);
    let error = operator.set_rate("5", 7, minute).await.unwrap_err();
    assert!(error.to_string().contains("1000 names"), "{error}");
    // Existing overrides can be changed and cleared.
    operator.set_limit("5", 8).await.unwrap();
    operator.pause("6").await.unwrap();
    operator.clear_limit("7").await.unwrap();
    operator.set_limit("one more", 7).await.unwrap();
    assert_eq!(operator.limit_of("5").await.unwrap().limit, Some(8));
    operator.clear_limit("one more").await.unwrap();
    operator.set_rate("5", 7, minute).await.unwrap();
    operator.set_rate("5", 8, minute).await.unwrap();
    operator.set_rate("8", 7, minute).await.unwrap_err();
}

// --- Redis ------------------------------------------------------------------------------------

#[cfg(feature = "redis")]
#[tokio::test]
async fn nothing_is_kept_where_nothing_is_set() {
    let server = TestRedis::start();
    let operator = server.semaphore();
    for _ in 0..2 {
        operator.set_limit("x", 3).await.unwrap();
        operator.pause("x").await.unwrap();
        operator.set_limit("y", 3).await.unwrap();
        assert_eq!(server.command::<u64>(&["EXISTS", "semaphore:{!overrides}"]), 1);
        operator.resume("x").await.unwrap();
        assert_eq!(operator.limit_of("x").await.unwrap().limit, Some(3), "it was kept");
        operator.clear_limit("y").await.unwrap();
        operator.clear_limit("never set").await.unwrap();
        operator.clear_limit("x").await.unwrap();
        assert!(server.is_clear());
    }
    let left: u64 = server.command(&["PTTL", "semaphore:{!overrides}:pauses"]);
    assert!((3_600_000..=3_660_000).contains(&left), "that it was resumed, for an hour: {left}");
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_process_that_messages_do_not_reach_learns_it_within_a_second() {
    let server = TestRedis::start();
    let (operator, poll_only) = (server.semaphore(), Semaphore::new(server.without_messages()));
    let one = policy(1);
    let held = poll_only.acquire("x", &one).await.unwrap();
    operator.set_limit("x", 2).await.unwrap();
    // A second, the round trips, and a slow machine.
    let began = Stopwatch::start();
    let second = loop {
        if let Ok(permit) = poll_only.try_acquire("x", &one).await {
            break permit;
        }
        assert!(began.elapsed() < Duration::from_millis(1500), "not within a second");
        tokio::time::sleep(Duration::from_millis(3)).await;
    };
    // It may not publish either: the others find out by themselves.
    let wait = tokio::spawn(operator.acquire("x", &one));
    waiting(&operator, "x", 1).await;
    poll_only.set_limit("x", 3).await.unwrap();
    let _ = timeout(Duration::from_millis(2500), wait).await.expect("soon").unwrap().unwrap();
    drop((held, second));
}

/// A rejected request leaves nothing, so most of the time no semaphore is in use.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_process_whose_requests_are_all_refused_learns_it_within_a_second() {
    let server = TestRedis::start();
    let (operator, poll_only) = (server.semaphore(), Semaphore::new(server.without_messages()));
    let one = policy(1);
    let held = operator.acquire("x", &one).await.unwrap();
    assert_eq!(rejection(poll_only.try_acquire("x", &one).await).limit, 1);
    operator.set_limit("x", 2).await.unwrap();
    let began = Stopwatch::start();
    while poll_only.try_acquire("x", &one).await.is_err() {
        assert!(began.elapsed() < Duration::from_millis(1500), "not within a second");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    drop(held);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn what_is_set_is_read_again_by_a_process_that_lost_its_connection() {
    let server = TestRedis::start();
    let (operator, other) = (server.semaphore(), server.semaphore());
    let two = policy(2);
    let held = other.acquire("x", &two).await.unwrap();
    // All connections except this one are cut; messages meanwhile reach no process.
    let _: u64 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    let _: u64 = server.command(&["HSET", "semaphore:{!overrides}", "@", "5", "x", "1 open"]);
    limit_of_eventually(&other, &two, 1).await;
    // A later version of this crate may write what this one cannot read.
    let _: u64 =
        server.command(&["HSET", "semaphore:{!overrides}", "@", "6", "x", "1 open", "y", "?"]);
    eventually("the version is known", async || {
        operator.limit_of("x").await.is_ok_and(|set| set.limit == Some(1))
    })
    .await;
    drop(held);
}

/// Fields that another program or a later version wrote: they do no harm to the rest.
#[cfg(feature = "redis")]
#[tokio::test]
async fn fields_that_cannot_be_read_are_passed_over() {
    const KEY: &str = "semaphore:{!overrides}";
    let server = TestRedis::start();
    let (operator, other) = (server.semaphore(), server.semaphore());
    operator.set_limit("x", 1).await.unwrap();
    let foreign = "return redis.call('HSET', KEYS[1], 'a\\255', '1 open', 'b', '\\255', 'c', '?', \
                   'd', '-1 open', 'e', '1 ajar', '@nobody', '9', '@nobody x', '9', \
                   '@00000000009:1 x', 'soon', '@00000000009:1\\255 x', '9', '@00000000009:1', '9', \
                   '@00000000009:2 f\\255', '9', '@@', '', '', '')";
    let written: usize = server.command(&["EVAL", foreign, "1", KEY]);
    assert_eq!(written, 13);
    for version in
        ["7", "soon", "", "-1", "1e400", "nan", "9007199254740992", "18446744073709551616"]
    {
        server.command::<()>(&["HSET", KEY, "@", version]);
        // A field that is written like this is read at the next reading.
        eventually("the rest is read", async || {
            other.limit_of("x").await.unwrap().limit == Some(1)
        })
        .await;
        let all = server.semaphore().overrides().await.unwrap();
        let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["x"], "{version:?}");
        // The hash is not read all the time.
        let held = other.acquire("x", &policy(5)).await.unwrap();
        let before = server.calls("hgetall");
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let reads = server.calls("hgetall") - before;
        assert!(reads <= 5, "{version:?}: {reads} reads in 1.5 s");
        // It can be written.
        let id = holder(&operator, "x").await;
        assert!(operator.revoke("x", id).await.unwrap());
        timeout(AT_ONCE, held.lost()).await.expect("at once");
        operator.set_limit("x", 2).await.unwrap();
        eventually("it is told", async || other.limit_of("x").await.unwrap().limit == Some(2))
            .await;
        operator.set_limit("x", 1).await.unwrap();
        let now: u64 = server.command(&["HGET", KEY, "@"]);
        assert!(
            (1_500_000_000_000_000..9_000_000_000_000_000).contains(&now),
            "{version:?}: {now}"
        );
    }
    // One of them is set.
    operator.pause("c").await.unwrap();
    assert_eq!(other.limit_of("c").await.unwrap().mode, Mode::Paused);
    let fields: Vec<String> = server.command(&["HMGET", KEY, "d", "e", "@nobody", "@@", ""]);
    assert_eq!(fields, ["-1 open", "1 ajar", "9", "", ""], "what others wrote stays");
}

#[cfg(feature = "redis")]
async fn limit_of_eventually(semaphore: &Semaphore, policy: &Policy, limit: u32) {
    eventually("it is known", async || match semaphore.try_acquire("x", policy).await {
        Err(AcquireError::Rejected(rejected)) => rejected.limit == limit,
        _ => false,
    })
    .await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn who_may_not_read_what_is_set_is_served_by_the_policy() {
    let server = TestRedis::start();
    let words = "ACL SETUSER app reset on >secret ~* &* +@all -hget -hgetall -hmget";
    let _: String = server.command(&words.split(' ').collect::<Vec<_>>());
    let url = format!("redis://app:secret@127.0.0.1:{}/", server.port());
    let backend = RedisBackend::builder(url).build().unwrap();
    let semaphore = Semaphore::new(backend);
    let held = semaphore.acquire("x", &policy(1)).await.unwrap();
    let error = semaphore.set_limit("x", 2).await.unwrap_err();
    assert!(error.to_string().contains("see RedisBackend"), "{error}");
    assert_eq!(rejection(semaphore.try_acquire("x", &policy(1)).await).limit, 1);
    drop(held);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn while_redis_is_away_a_paused_semaphore_admits_nobody() {
    use tower_semaphore::OnUnavailable;
    let mut server = TestRedis::start();
    let semaphore = server.semaphore();
    let admit = Policy::builder(1)
        .wait_timeout(Duration::from_secs(20))
        .on_unavailable(OnUnavailable::Admit)
        .build()
        .unwrap();
    semaphore.pause("x").await.unwrap();
    server.kill();
    crate::support::semaphore::down(&semaphore).await;
    let refused = semaphore.acquire("x", &admit).await;
    assert!(matches!(refused, Err(AcquireError::Unavailable(_))), "{refused:?}");
    drop(semaphore.acquire("y", &admit).await.unwrap());
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn at_most_a_thousand_names_have_something_set_in_redis() {
    let server = TestRedis::start();
    let mut words = ["HSET", "semaphore:{!overrides}", "@", "1"].map(str::to_owned).to_vec();
    for i in 0..1000 {
        words.extend([i.to_string(), "7 open".to_owned()]);
    }
    let _: u64 = server.command(&words.iter().map(|word| &**word).collect::<Vec<_>>());
    no_more_than_a_thousand(&server.semaphore()).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_revocation_is_forgotten_when_the_lease_would_have_ended() {
    let server = TestRedis::start();
    let (operator, other) = (server.semaphore(), server.semaphore());
    let brief = Policy::builder(1).lease(Policy::MIN_LEASE).build().unwrap();
    let held = other.acquire("x", &brief).await.unwrap();
    let id = holder(&operator, "x").await;
    assert!(operator.revoke("x", id).await.unwrap());
    assert_eq!(server.keys(), 1, "only that is there");
    let left: i64 = server.command(&["PTTL", "semaphore:{!overrides}"]);
    assert!((1..=500).contains(&left), "{left}");
    eventually("it is forgotten", async || server.keys() == 0).await;
    // Beside something that is kept, it is removed with the next change.
    operator.set_limit("y", 5).await.unwrap();
    let held_again = other.acquire("x", &brief).await.unwrap();
    let id = holder(&operator, "x").await;
    assert!(operator.revoke("x", id).await.unwrap());
    let left: i64 = server.command(&["PTTL", "semaphore:{!overrides}"]);
    assert_eq!(left, -1, "the limit stays");
    tokio::time::sleep(Policy::MIN_LEASE).await;
    operator.set_limit("y", 6).await.unwrap();
    let fields: Vec<String> = server.command(&["HKEYS", "semaphore:{!overrides}"]);
    assert_eq!(fields.len(), 2, "{fields:?}");
    operator.clear_limit("y").await.unwrap();
    assert_eq!(server.keys(), 0);
    drop((held, held_again));
}

/// A process that no message reaches finds its place gone, and asks why before it shows its proof.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_process_that_messages_do_not_reach_does_not_bring_a_revoked_permit_back() {
    let server = TestRedis::start();
    let (operator, poll_only) = (server.semaphore(), Semaphore::new(server.without_messages()));
    // Renewed every 170 ms, and so five times before it reads by itself.
    let brief = Policy::builder(1).lease(Policy::MIN_LEASE).build().unwrap();
    for _ in 0..3 {
        let held = poll_only.acquire("x", &brief).await.unwrap();
        let id = holder(&operator, "x").await;
        assert!(operator.revoke("x", id).await.unwrap());
        let revoked = Stopwatch::start();
        while !held.is_lost() {
            assert_eq!(operator.inspect("x").await.unwrap().in_use, 0, "it came back");
            assert!(revoked.elapsed() < Duration::from_millis(1500), "not within a second");
        }
        assert_eq!(operator.inspect("x").await.unwrap().in_use, 0, "it came back");
    }
    // A loss of data is distinguished from that.
    let held = poll_only.acquire("x", &brief).await.unwrap();
    let _: String = server.command(&["FLUSHALL"]);
    crate::support::semaphore::in_use(&operator, "x", 1).await;
    assert!(!held.is_lost());
}

/// Semaphores among many keys of other programs.
#[cfg(feature = "redis")]
#[tokio::test]
async fn keys_of_others_are_passed_over() {
    let server = TestRedis::start();
    let semaphore = server.semaphore();
    let mut words = vec!["MSET".to_owned()];
    for i in 0..3000 {
        words.extend([format!("other:{i}"), "1".to_owned()]);
    }
    let _: String = server.command(&words.iter().map(|word| &**word).collect::<Vec<_>>());
    let _: u64 = server.command(&["ZADD", "semaphore:{not a name}", "1", "x"]);
    let _: String = server.command(&["SET", "semaphore:{text}", "x"]);
    semaphore.set_limit("set", 5).await.unwrap();
    let _held = semaphore.acquire("x", &policy(1)).await.unwrap();
    let (mut found, mut from) = (Vec::new(), Some(Cursor::default()));
    while let Some(at) = from {
        let page = semaphore.list(at, 50).await.unwrap();
        found.extend(page.semaphores.into_iter().map(|one| one.name));
        from = page.next;
    }
    assert_eq!(found, [Name::from("x")]);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_process_that_does_not_answer_is_not_waited_for() {
    let server = TestRedis::start();
    let (operator, other) = (server.semaphore(), server.semaphore());
    let _held = other.acquire("x", &policy(2)).await.unwrap();
    let places: Vec<String> = server.command(&["ZRANGE", "semaphore:{x}", "0", "-1", "WITHSCORES"]);
    let _: u64 = server.command(&["ZADD", "semaphore:{x}", &places[1], "00000000009:1"]);
    let asked = Stopwatch::start();
    let seen = operator.inspect_fleet("x").await.unwrap();
    assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    assert_eq!(seen.holders.len(), 2);
    eventually("what the other one tells is there all the same", async || {
        let seen = operator.inspect_fleet("x").await.unwrap();
        seen.holders.iter().filter(|one| one.held.is_some()).count() == 1
    })
    .await;
}
