//! The permits that tenants get of a shared semaphore, by first come, first served and by fair shares.
//!
//! On a paused clock, so the figures depend only on the rules.

use std::time::Duration;

use tower_semaphore::Semaphore;

use crate::support::shares::{
    self, Got, Order, Scenario, backlog, costs, holds, jain, long_and_short, others, percentile,
    run, weights,
};

async fn both(scenario: Scenario) -> [Vec<Got>; 2] {
    let [arrival, shares] = [Semaphore::in_memory(), Semaphore::in_memory()];
    [run(&arrival, &scenario, Order::Arrival).await, run(&shares, &scenario, Order::Shares).await]
}

/// Asserts that never more permits are in use than there are.
fn most(got: &[Got]) -> u32 {
    let mut changes = Vec::new();
    for got in got {
        let held = got.stays.iter().filter_map(|stay| stay.held);
        for (from, to) in held.filter(|(from, to)| from < to) {
            changes.extend([(from, 1, got.load.cost), (to, 0, got.load.cost)]);
        }
    }
    // What is freed at an instant is granted at the same.
    changes.sort();
    let (mut now, mut most) = (0, 0);
    for (_, is_grant, cost) in changes {
        now = if is_grant == 1 { now + cost } else { now - cost };
        most = most.max(now);
    }
    most
}

#[tokio::test(start_paused = true)]
async fn a_backlog_makes_nobody_else_wait() {
    let [arrival, shares] = both(backlog()).await.map(|got| {
        assert_eq!(most(&got), 10);
        let waits = others(&got);
        (percentile(&waits, 50), percentile(&waits, 99))
    });
    println!(
        "holds that others wait, p50 and p99: {arrival:.2?} by arrival, {shares:.2?} by shares"
    );
    assert!(arrival.0 > 20.0, "{arrival:?}");
    assert!(shares.0 <= 0.3 && shares.1 <= 1.2, "{shares:?}");
}

#[tokio::test(start_paused = true)]
async fn long_holds_take_no_more_than_their_share() {
    let [arrival, shares] = both(long_and_short()).await.map(|got| {
        assert_eq!(most(&got), 10);
        got[1].in_use()
    });
    println!("permits that B has in use: {arrival:.2} by arrival, {shares:.2} by shares");
    assert!(arrival < 1.0, "{arrival}");
    assert!(shares >= 4.0, "{shares}");
}

#[tokio::test(start_paused = true)]
async fn tenants_of_all_holds_have_the_same() {
    let [arrival, shares] = both(holds()).await.map(|got| {
        assert_eq!(most(&got), 10);
        jain(&got.iter().map(Got::in_use).collect::<Vec<_>>())
    });
    println!("Jain's index: {arrival:.4} by arrival, {shares:.4} by shares");
    assert!(shares >= 0.99, "{shares}");
}

#[tokio::test(start_paused = true)]
async fn weights_are_kept() {
    let [arrival, shares] = both(weights()).await.map(|got| {
        assert_eq!(most(&got), 12);
        got[0].in_use() / got[1].in_use()
    });
    println!("A to B, of weights 3 to 1: {arrival:.3} by arrival, {shares:.3} by shares");
    assert!((0.9..1.1).contains(&arrival), "{arrival}");
    assert!((2.9..=3.1).contains(&shares), "{shares}");
}

#[tokio::test(start_paused = true)]
async fn a_request_for_everything_gets_its_turn() {
    let [arrival, shares] = both(costs()).await.map(|got| {
        assert_eq!(most(&got), 16);
        *got[1].waits().last().unwrap()
    });
    println!("holds that the big one waits: {arrival:.2} by arrival, {shares:.2} by shares");
    // In one line, 64 that came before it are served first, 16 at a time.
    assert!(arrival <= 1.5 * 1.2 + 4.0 * 1.2, "{arrival}");
    // It has the fewest in use, so its turn comes at once; and the longest hold is 1.2.
    assert!(shares <= 1.5 * 1.2, "{shares}");
}

#[tokio::test(start_paused = true)]
async fn caps_and_classes_are_kept() {
    let ms = Duration::from_millis;
    let [_, caps] = both(shares::caps()).await;
    for got in &caps {
        assert!(most(std::slice::from_ref(got)) <= 4, "{}", got.load.tenant);
    }
    let [arrival, shares] = both(shares::classes()).await;
    let [batch, chat] = &shares[..] else { panic!("two tenants") };
    assert_eq!(most(std::slice::from_ref(batch)), 8, "two permits are left to class 0");
    let [alone, beside] = [(200, 500), (700, 1500)]
        .map(|(from, to)| [batch, chat].map(|got| got.in_use_between(ms(from), ms(to))));
    let [before, wait] = [&arrival[1], chat].map(|chat| percentile(&chat.waits(), 99));
    println!("in use by batch and chat: {alone:.2?}, and where both come {beside:.2?}");
    println!("holds that chat waits, p99: {before:.2} by arrival, {wait:.2} by shares");
    assert!(alone[0] > 7.9 && beside[1] > 3.5, "{alone:?}, {beside:?}");
    assert!(before > 10.0 && wait < 0.5, "{before}, {wait}");
}
