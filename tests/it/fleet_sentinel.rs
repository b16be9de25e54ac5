//! The promises of a semaphore on Redis with Sentinel, while masters change.

use std::time::Instant;

use tower_semaphore::Semaphore;

use crate::conformance::{self, Fleet};
use crate::support::failover::{Cost, Failover};
use crate::support::sentinel::TestSentinel;
use crate::support::tenants::{self, Tenants};
use crate::support::until;

impl Fleet for TestSentinel {
    fn node(&self) -> Semaphore {
        self.semaphore()
    }

    fn is_empty(&self) -> bool {
        self.servers[0].is_clear()
    }

    fn wipe(&self) {
        self.servers[0].command::<()>(&["FLUSHALL"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_found_by_sentinel_keeps_what_a_semaphore_promises() {
    conformance::all(&TestSentinel::start()).await;
}

/// Two gateways under load, while the master changes.
async fn changes(fail: impl FnOnce(&mut TestSentinel)) -> Cost {
    let mut redis = TestSentinel::start();
    let mut tenants = Tenants::start(&[redis.url(), redis.url_of_least_rights()]).await;
    let its: Vec<usize> = (0..tenants::TENANTS).collect();
    tenants.all_come(&its, Instant::now()).await;
    let calm = Instant::now();
    let streams = tenants.streams(&its[..its.len() / 2]).await;
    let before = redis.master();
    let failed = Instant::now();
    fail(&mut redis);
    until("another master is named", || redis.master() != before);
    let (promoted, named) = (Instant::now(), redis.master());
    let cost = Failover { calm, failed, promoted, its }.cost(&tenants).await;
    assert_eq!(streams.await.unwrap(), 0, "streams that did not come whole");
    assert_eq!(redis.master(), named, "there was another failover");
    tenants.stop().await;
    until("nothing is left", || redis.now().keys() == 0);
    cost
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_was_asked_for_is_followed() {
    changes(|redis| redis.failover()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_dies_is_replaced() {
    let cost = changes(|redis| redis.servers[0].kill()).await;
    assert!(cost.was_noticed(), "nobody noticed");
}

/// An old master that was not dead goes on for some ten seconds, until it is demoted. Processes that used it and
/// processes that come new must not both have all permits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_master_that_does_not_know_yet_is_left_at_once() {
    let redis = TestSentinel::start();
    let url = redis.url();
    let mut tenants = Tenants::start(&[url.clone(), url.clone()]).await;
    let its: Vec<usize> = (0..tenants::TENANTS).collect();
    tenants.all_come(&its, Instant::now()).await;
    redis.take_time();
    let calm = Instant::now();
    let streams = tenants.streams(&its[..its.len() / 2]).await;
    let before = redis.master();
    let failed = Instant::now();
    redis.failover();
    until("another master is named", || redis.master() != before);
    let promoted = Instant::now();
    tenants.add(&url);
    Failover { calm, failed, promoted, its }.cost(&tenants).await;
    let old: String = redis.servers[0].command(&["INFO", "replication"]);
    assert!(old.contains("role:master"), "it was told before this was over: {old}");
    assert_eq!(streams.await.unwrap(), 0, "streams that did not come whole");
    tenants.stop().await;
    until("nothing is left", || redis.now().keys() == 0);
}
