//! Redis with Sentinel: what a semaphore promises, and masters that change.

use std::time::{Duration, Instant};

use tower_semaphore::Semaphore;

use crate::conformance::{self, Fleet};
use crate::support::crowd::Crowd;
use crate::support::sentinel::TestSentinel;
use crate::support::until;

impl Fleet for TestSentinel {
    fn node(&self) -> Semaphore {
        self.semaphore()
    }

    fn is_empty(&self) -> bool {
        self.servers[0].keys() == 0
    }

    fn wipe(&self) {
        self.servers[0].command::<()>(&["FLUSHALL"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_found_by_sentinel_keeps_what_a_semaphore_promises() {
    conformance::all(&TestSentinel::start()).await;
}

/// Waits for another master after `fail`; says how long that took, and until all were served again.
async fn changes(fail: impl FnOnce(&mut TestSentinel)) {
    let mut redis = TestSentinel::start();
    let names: Vec<_> = (0..10).map(|i| format!("tenant-{i}")).collect();
    let nodes = [redis.semaphore(), redis.semaphore_of_least_rights()];
    let crowd = Crowd::start(&nodes, &names);
    crowd.all_served(&names, Instant::now()).await;
    let before = redis.master();
    let failed = Instant::now();
    fail(&mut redis);
    until("another master is named", || redis.master() != before);
    let promoted = Instant::now();
    crowd.all_served(&names, promoted).await;
    let outcomes = crowd.stop().await;
    let mut back = Duration::ZERO;
    for name in &names {
        let served = outcomes.iter().filter(|o| o.name == *name && o.error.is_none());
        let after = served.filter(|o| o.asked > promoted).map(|o| o.at() - promoted);
        back = back.max(after.min().unwrap());
    }
    let refused = outcomes.iter().filter(|o| o.error.is_some()).count();
    let over = outcomes.iter().filter(|o| o.over).count();
    let longest = outcomes.iter().map(|o| o.took).max().unwrap();
    println!(
        "{} requests; another master {:?} after, all served again {back:?} later; {refused} refused, \
         {over} over the cap; longest wait {longest:?}",
        outcomes.len(),
        promoted - failed,
    );
    assert!(back < Duration::from_secs(1), "{back:?}");
    for o in &outcomes {
        // Who waits goes on waiting; nobody else waits for more than an answer.
        let bound = if o.error.is_none() { promoted - failed } else { Duration::ZERO };
        assert!(o.took < bound + Duration::from_millis(1500), "{o:?}");
        // What the old master acknowledged and did not send on in time is lost.
        let moment = failed..promoted + Duration::from_secs(1);
        assert!(!o.over || moment.contains(&o.at()), "{o:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_was_asked_for_is_followed() {
    changes(|redis| redis.failover()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_dies_is_replaced() {
    changes(|redis| redis.servers[0].kill()).await;
}
