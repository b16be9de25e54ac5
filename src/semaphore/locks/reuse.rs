//! Permits that are passed on, while threads of their process and other processes request them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread::{JoinHandle, spawn};

use super::backend::TestBackend;
use super::{NAME, advance, assert_nothing_left, either, explore, handle_due, process};
use crate::policy::Policy;
use crate::semaphore::{PlaceId, Semaphore};

fn policy() -> Policy {
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(10)).reuse(true).build();
    policy.expect("a policy within its bounds")
}

/// Starts a thread that takes the only permit twice, once with a clone.
fn uses(process: &Semaphore, holders: &Arc<AtomicUsize>) -> JoinHandle<()> {
    let (process, holders) = (process.clone(), Arc::clone(holders));
    spawn(move || {
        for has_clone in [either(), false] {
            let permit = block_on(process.acquire(NAME, &policy())).expect("its turn comes");
            // Of `std`: threads do not switch here, but do at the clones.
            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two have the permit");
            let last = if has_clone { permit.clone() } else { permit };
            holders.fetch_sub(1, Ordering::SeqCst);
            drop(last);
        }
    })
}

/// Asserts that kept permits are given back in time.
fn assert_given_back(backend: &TestBackend, processes: &[&Semaphore]) {
    advance(Duration::from_millis(50));
    processes.iter().for_each(|process| handle_due(process.node()));
    assert_nothing_left(backend, processes);
}

#[test]
fn threads_pass_one_permit_on_and_nobody_is_left_asleep() {
    explore(|| {
        let (backend, holders) = (TestBackend::embedded(), Arc::default());
        let process = process(&backend);
        let threads: Vec<_> = (0..3).map(|_| uses(&process, &holders)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_given_back(&backend, &[&process]);
    });
}

#[test]
fn a_process_that_waits_gets_what_the_other_keeps() {
    explore(|| {
        let (backend, holders) = (TestBackend::embedded(), Arc::default());
        let (first, second) = (process(&backend), process(&backend));
        drop(block_on(first.acquire(NAME, &policy())).expect("it is free"));
        // No time passes: only the recall brings it back.
        let threads = [uses(&first, &holders), uses(&second, &holders)];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_given_back(&backend, &[&first, &second]);
    });
}

#[test]
fn what_is_kept_is_given_back_once_whatever_happens_to_it() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let permit = block_on(process.acquire(NAME, &policy())).expect("it is free");
        let by = process.clone();
        let ends = spawn(move || {
            let node = by.node();
            match (either(), either()) {
                (true, true) => node.give_back(),
                (true, false) => node.stop_waiting(),
                (false, true) => drop(block_on(by.revoke(NAME, by_id(&by)))),
                (false, false) => drop(by.acquire(NAME, &policy())),
            }
        });
        drop(permit);
        ends.join().unwrap();
        assert_given_back(&backend, &[&process]);
    });
}

/// Returns the id of the only place.
fn by_id(process: &Semaphore) -> PlaceId {
    let holders = block_on(process.inspect(NAME)).expect("the backend is here").holders;
    let never = || "00000000000:0".parse().expect("an id");
    holders.first().map_or_else(never, |holder| holder.id)
}
