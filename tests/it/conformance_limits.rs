//! The promises of several limits in one step, whatever counts the permits.

use std::time::Duration;

use futures_util::future::join_all;
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::{AcquireError, Ask, Limit, Permit, Policy, RejectReason, Semaphore};

use crate::conformance::Fleet;
use crate::conformance_fair::conformance;
use crate::support::eventually;
#[cfg(feature = "redis")]
use crate::support::redis::TestRedis;

conformance! {
    all_limits_are_granted_in_one_step_or_none
    a_refusal_names_the_limit_that_is_full
    a_wait_in_vain_names_the_limit_that_was_full
    a_full_limit_delays_nobody_who_does_not_need_it
    without_tenants_the_first_that_can_go_goes
    at_a_full_limit_the_tenant_with_the_fewest_goes_first
    crossing_limits_are_used_in_full_and_leave_nothing
    without_a_common_limit_the_others_count
    places_come_back_under_all_their_limits_after_a_loss_of_data
    a_limit_outlives_a_process_that_leaves_its_line
    an_operator_sets_a_cap_for_all_processes
}

fn policy(limit: u32) -> Policy {
    let policy = Policy::builder(limit).wait_timeout(Duration::from_secs(20));
    policy.lease(Duration::from_secs(3)).build().unwrap()
}

fn at_once(limit: impl Into<Limit>) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::ZERO).build().unwrap()
}

fn by(tenant: &str, route: &str) -> Ask {
    Ask::of("x").by(tenant).also("route", route, 1)
}

async fn waiting(semaphore: &Semaphore, count: u64) {
    let all_wait = async || semaphore.inspect("x").await.unwrap().waiting == count;
    eventually("so many wait", all_wait).await;
}

async fn nothing_left(fleet: &impl Fleet) {
    eventually("nothing is stored", async || fleet.is_empty()).await;
}

type Waits = tokio::task::JoinHandle<Result<Permit, AcquireError>>;

/// A waiting request, which is in the queue when this returns.
async fn queued(semaphore: &Semaphore, ask: Ask, policy: &Policy) -> Waits {
    let before = semaphore.inspect("x").await.unwrap().waiting;
    let waits = tokio::spawn(semaphore.acquire(ask, policy));
    waiting(semaphore, before + 1).await;
    waits
}

async fn all_limits_are_granted_in_one_step_or_none(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(9));
    let both = || by("a", "/chat").also("model", "opus", 1);
    let first = one.acquire(both(), &policy).await.unwrap();
    let waits = queued(&two, by("b", "/other").also("model", "opus", 1), &policy).await;
    // It holds nothing of its free route meanwhile.
    drop(two.acquire(by("c", "/other"), &policy).await.unwrap());
    drop(first);
    let second = waits.await.unwrap().unwrap();
    let refused = one.acquire(both(), &at_once(9)).await.unwrap_err();
    assert!(matches!(&refused, AcquireError::Rejected(of) if of.limit_name() == Some("model")));
    drop(second);
    drop(one.acquire(both(), &policy).await.unwrap());
    nothing_left(fleet).await;
}

async fn a_refusal_names_the_limit_that_is_full(fleet: &impl Fleet) {
    let (one, two, now) = (fleet.node(), fleet.node(), at_once(9));
    let _held = one.acquire(by("a", "/chat"), &now).await.unwrap();
    let also = |ask: Ask| ask.also("model", "opus", 3);
    let AcquireError::Rejected(refused) =
        two.acquire(also(by("b", "/chat")), &now).await.unwrap_err()
    else {
        panic!("it is rejected")
    };
    assert_eq!(refused.reason, RejectReason::FurtherLimit(0));
    assert_eq!(refused.limit_name(), Some("route"));
    assert_eq!(
        AcquireError::Rejected(refused).to_string(),
        "all 1 permits that its route limit allows are in use"
    );
    let many = two.acquire(also(by("b", "/x")).cost(2), &now).await.unwrap_err();
    let AcquireError::Rejected(refused) = many else { panic!("{many}") };
    assert_eq!(refused.reason, RejectReason::CostTooHigh);
    assert_eq!(refused.limit_name(), Some("route"), "its cap is 1");
}

async fn a_wait_in_vain_names_the_limit_that_was_full(fleet: &impl Fleet) {
    let (one, two, long) = (fleet.node(), fleet.node(), policy(3));
    let short = Policy::builder(3).wait_timeout(Duration::from_millis(1500)).build().unwrap();
    let also = |route: &str| by("b", route).also("model", "opus", 2);
    let held = one.acquire(by("a", "/chat"), &long).await.unwrap();
    // The first of a line, and one behind it; longer than a renewal takes.
    let waits = [also("/chat"), also("/chat")].map(|ask| two.acquire(ask, &short));
    for refused in join_all(waits).await {
        let Err(AcquireError::Rejected(refused)) = refused else { panic!("{refused:?}") };
        assert_eq!(refused.reason, RejectReason::QueueTimeout);
        assert_eq!(refused.limit_name(), Some("route"));
        let text = AcquireError::Rejected(refused).to_string();
        assert!(text.ends_with("; its route limit of 1 was full when it began to wait"), "{text}");
    }
    let all = join_all([1, 2].map(|n| one.acquire(by("c", &format!("/{n}")), &long))).await;
    let refused = two.acquire(also("/other"), &short).await;
    let Err(AcquireError::Rejected(refused)) = refused else { panic!("{refused:?}") };
    assert_eq!(refused.limit_name(), None, "it was the limit of the semaphore");
    drop((held, all));
    nothing_left(fleet).await;
}

async fn a_full_limit_delays_nobody_who_does_not_need_it(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(9));
    let holder = one.acquire(by("a", "/full"), &policy).await.unwrap();
    let mut waits = Vec::new();
    for node in [&one, &two, &one] {
        waits.push(queued(node, by("a", "/full").each(5), &policy).await);
    }
    // The same tenant, another, and one without limits.
    let asks = [by("a", "/free").each(5), by("b", "/other"), Ask::of("x")];
    let free = join_all(asks.map(|ask| two.acquire(ask, &at_once(9)))).await;
    assert!(free.into_iter().all(|permit| permit.is_ok()));
    let mut held = holder;
    for next in waits {
        assert!(!next.is_finished());
        drop(held);
        held = next.await.unwrap().expect("in the order of their arrival");
    }
    drop(held);
    nothing_left(fleet).await;
}

async fn without_tenants_the_first_that_can_go_goes(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(1));
    let ask = |route: &str| Ask::of("x").also("route", route, 1);
    let mut held = one.acquire(Ask::of("x"), &policy).await.unwrap();
    let mut line = Vec::new();
    for (node, ask) in [
        (&two, ask("/a")),
        (&one, Ask::of("x")),
        (&one, ask("/b")),
        (&two, ask("/a")),
        (&two, Ask::of("x")),
    ] {
        line.push(queued(node, ask, &policy).await);
        // Lines with further limits know the time of arrival to the ms.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for next in line {
        assert!(!next.is_finished());
        drop(held);
        held = next.await.unwrap().unwrap();
    }
    drop(held);
    nothing_left(fleet).await;
}

async fn at_a_full_limit_the_tenant_with_the_fewest_goes_first(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(9));
    let holder = one.acquire(by("c", "/full"), &policy).await.unwrap();
    let heavy = join_all((0..3).map(|_| one.acquire(Ask::of("x").by("heavy"), &policy))).await;
    assert!(heavy.iter().all(Result::is_ok));
    let first = queued(&one, by("heavy", "/full"), &policy).await;
    let light = queued(&two, by("light", "/full"), &policy).await;
    drop(holder);
    let light = light.await.unwrap().expect("it has none in use");
    assert!(!first.is_finished());
    drop(light);
    drop((first.await.unwrap().unwrap(), heavy));
    nothing_left(fleet).await;
}

async fn crossing_limits_are_used_in_full_and_leave_nothing(fleet: &impl Fleet) {
    let (nodes, policy) = ([fleet.node(), fleet.node(), fleet.node()], policy(9));
    let limits = ["a", "b", "c"];
    // Any two of them need one limit, so that stacked limits would wait for each other.
    let tasks = (0..30).map(|i| {
        let (node, policy) = (nodes[i % 3].clone(), policy.clone());
        let ask = Ask::of("x").by(["t", "u"][i % 2]);
        let ask = ask.also(limits[i % 3], "v", 1).also(limits[(i + 1) % 3], "v", 1);
        tokio::spawn(async move {
            for _ in 0..5 {
                drop(node.acquire(ask.clone(), &policy).await.unwrap());
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    nothing_left(fleet).await;
}

async fn without_a_common_limit_the_others_count(fleet: &impl Fleet) {
    let (one, two) = (fleet.node(), fleet.node());
    let now = at_once(Limit::Unlimited);
    let held = one.acquire(by("a", "/chat"), &now).await.unwrap();
    let refused = two.acquire(by("b", "/chat"), &now).await.unwrap_err();
    assert!(matches!(&refused, AcquireError::Rejected(of) if of.limit_name() == Some("route")));
    drop(two.acquire(by("b", "/other"), &now).await.unwrap());
    held.release().await.unwrap();
    drop(two.acquire(by("b", "/chat"), &now).await.unwrap());
    nothing_left(fleet).await;
}

async fn places_come_back_under_all_their_limits_after_a_loss_of_data(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(9));
    let held = one.acquire(by("a", "/chat").also("model", "opus", 1), &policy).await.unwrap();
    fleet.wipe();
    // Until it is renewed, another could have its permits.
    eventually("it is back", async || one.inspect("x").await.unwrap().in_use == 1).await;
    let also = |ask: Ask| ask.also("model", "opus", 1);
    for (ask, full) in [(by("d", "/chat"), "route"), (also(by("d", "/other")), "model")] {
        let refused = two.acquire(ask, &at_once(9)).await.unwrap_err();
        assert!(matches!(&refused, AcquireError::Rejected(of) if of.limit_name() == Some(full)));
    }
    let first = queued(&two, by("b", "/chat"), &policy).await;
    let second = queued(&one, also(by("c", "/other")), &policy).await;
    drop(held);
    drop((first.await.unwrap().unwrap(), second.await.unwrap().unwrap()));
    nothing_left(fleet).await;
}

async fn a_limit_outlives_a_process_that_leaves_its_line(fleet: &impl Fleet) {
    let (one, two, policy) = (fleet.node(), fleet.node(), policy(9));
    let held = one.acquire(by("a", "/chat"), &policy).await.unwrap();
    let leaves = queued(&two, by("b", "/chat"), &policy).await;
    let stays = queued(&one, by("c", "/chat"), &policy).await;
    leaves.abort();
    waiting(&one, 1).await;
    drop(held);
    drop(stays.await.unwrap().unwrap());
    nothing_left(fleet).await;
}

async fn an_operator_sets_a_cap_for_all_processes(fleet: &impl Fleet) {
    let (one, operator, now) = (fleet.node(), fleet.node(), at_once(9));
    let ask = || Ask::of("x").also("route", "/chat", 1).also("model", "opus", 3);
    let held = one.acquire(ask(), &now).await.unwrap();
    one.acquire(ask(), &now).await.unwrap_err();
    let set = async |cap: Option<u32>| {
        operator.set_further_limit("x", "route", "/chat", cap).await.unwrap();
        // The other process has it, too, by the time that it answers this.
        assert_eq!(one.further_limit_of("x", "route", "/chat").await.unwrap(), cap);
    };
    set(Some(2)).await;
    let second = one.acquire(ask(), &now).await.unwrap();
    let refused = async || one.acquire(ask(), &now).await.unwrap_err().to_string();
    let text = |cap| format!("all {cap} permits that its route limit allows are in use");
    assert_eq!(refused().await, text(2));
    drop(one.acquire(by("a", "/other"), &now).await.unwrap());
    let seen = operator.inspect_fleet("x").await.unwrap();
    let caps: Vec<_> = seen.further_limits.iter().map(|seen| (seen.cap, seen.set)).collect();
    assert!(caps.iter().all(|(_, set)| set.is_none()), "it has had no request of them: {caps:?}");
    let seen = one.inspect("x").await.unwrap();
    let route = seen.further_limits.iter().find(|seen| seen.name == Some("route".into())).unwrap();
    assert_eq!(route.set, Some(2));

    drop((held, second));
    set(Some(0)).await;
    assert_eq!(refused().await, "the request may have no permits: its route limit is 0");
    let all = operator.further_limit_overrides().await.unwrap();
    let all: Vec<_> = all.iter().map(|set| (set.semaphore.as_str(), set.cap)).collect();
    assert_eq!(all, [("x", 0)]);
    assert!(operator.overrides().await.unwrap().is_empty());
    assert!(operator.tenant_overrides().await.unwrap().is_empty());

    set(None).await;
    let held = one.acquire(ask(), &now).await.unwrap();
    assert_eq!(refused().await, text(1), "what requests ask for");
    drop(held);
    nothing_left(fleet).await;
}
