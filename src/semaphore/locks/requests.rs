//! Requests and permits, and what wakes them.

use std::sync::Arc;

use shuttle::future::block_on;
use shuttle::thread::spawn;

use super::backend::TestBackend;
use super::{
    NAME, advance, assert_nothing_left, either, explore, handle_due, policy, poll_once, process,
};
use crate::error::{AcquireError, RejectReason};
use crate::semaphore::{Acquire, Permit, Semaphore};
use crate::tasks::{driver, watchdog};

/// Takes a permit of a semaphore that has one free.
fn permit(process: &Semaphore, permits: u32) -> Permit {
    block_on(process.acquire(NAME, &policy(permits))).expect("a permit is free")
}

/// Makes a request that waits for the only permit.
fn waiter(process: &Semaphore) -> Acquire {
    let mut waiter = process.acquire(NAME, &policy(1));
    assert!(poll_once(&mut waiter).is_pending(), "the permit is free");
    waiter
}

#[test]
fn a_request_that_leaves_as_it_is_granted_passes_the_permit_on() {
    explore(|| {
        let backend = TestBackend::embedded();
        let (first, second) = (process(&backend), process(&backend));
        let held = permit(&first, 1);
        let (leaving, next) = if either() {
            (waiter(&first), waiter(&second))
        } else {
            (waiter(&second), waiter(&first))
        };
        let releases = spawn(move || drop(held));
        let leaves = spawn(move || drop(leaving));
        drop(block_on(next).expect("it is its turn"));
        releases.join().unwrap();
        leaves.join().unwrap();
        assert_nothing_left(&backend, &[&first, &second]);
    });
}

#[test]
fn a_request_that_is_granted_as_it_is_polled_is_woken() {
    explore(|| {
        let backend = TestBackend::embedded();
        let (first, second) = (process(&backend), process(&backend));
        let held = permit(&first, 1);
        // Another task has polled it before, or none has.
        let waiting = match (either(), either()) {
            (true, true) => waiter(&first),
            (true, false) => waiter(&second),
            (false, true) => first.acquire(NAME, &policy(1)),
            (false, false) => second.acquire(NAME, &policy(1)),
        };
        let releases = spawn(move || drop(held));
        drop(block_on(waiting).expect("it is its turn"));
        releases.join().unwrap();
        assert_nothing_left(&backend, &[&first, &second]);
    });
}

#[test]
fn threads_that_use_one_session_leave_nothing_unsent_and_nobody_asleep() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let process = process.clone();
                spawn(move || drop(permit(&process, 1)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_nothing_left(&backend, &[&process]);
        assert_eq!(backend.acquired().len(), 3);
    });
}

#[test]
fn a_holder_is_woken_when_its_permit_is_revoked_or_the_semaphore_closes() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let held = permit(&process, 1);
        let next = waiter(&process);
        let id = backend.acquired()[0];
        let by = process.clone();
        let ends = spawn(move || {
            if either() {
                assert!(block_on(by.revoke(NAME, id)).expect("the backend is here"));
            } else {
                by.node().close();
                by.node().give_back();
            }
        });
        let waits = spawn(move || match block_on(next) {
            Ok(_) | Err(AcquireError::Closed) => {}
            Err(error) => panic!("{error}"),
        });
        block_on(held.lost());
        assert!(held.is_lost());
        drop(held);
        ends.join().unwrap();
        waits.join().unwrap();
        assert_nothing_left(&backend, &[&process]);
    });
}

#[test]
fn what_is_revoked_as_it_is_found_gone_does_not_come_back() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let held = permit(&process, 1);
        let waiting = waiter(&process);
        let of_holder = either();
        let id = backend.acquired()[usize::from(!of_holder)];
        let by = process.clone();
        // Both are due for renewal by now.
        advance(policy(1).lease / 2);
        let revokes = spawn(move || {
            assert!(block_on(by.revoke(NAME, id)).expect("the backend is here"));
        });
        let node = Arc::clone(process.node());
        let renews = spawn(move || handle_due(&node));
        if of_holder {
            block_on(held.lost());
            drop(block_on(waiting).expect("it is its turn"));
        } else {
            match block_on(waiting) {
                Err(AcquireError::Rejected(rejected)) => {
                    assert_eq!(rejected.reason, RejectReason::Revoked)
                }
                other => panic!("revoked, but answered with {other:?}"),
            }
        }
        drop(held);
        revokes.join().unwrap();
        renews.join().unwrap();
        assert_nothing_left(&backend, &[&process]);
    });
}

#[test]
fn a_permit_is_released_once_whichever_clone_does_it() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let held = permit(&process, 1);
        let next = waiter(&process);
        let (one, another) = (held.clone(), held);
        let releases = spawn(move || block_on(one.release()).expect("the backend is here"));
        let drops = spawn(move || {
            if either() {
                drop(another);
            } else {
                block_on(another.release()).expect("the backend is here");
            }
        });
        drop(block_on(next).expect("it is its turn"));
        releases.join().unwrap();
        drops.join().unwrap();
        assert_nothing_left(&backend, &[&process]);
    });
}

#[test]
fn a_shutdown_answers_every_request_and_ends_the_tasks_of_an_embedded_backend() {
    explore(|| shutdown(&TestBackend::embedded()));
}

#[test]
fn a_shutdown_answers_every_request_and_ends_the_tasks_of_a_connection() {
    explore(|| shutdown(&TestBackend::remote()));
}

fn shutdown(backend: &TestBackend) {
    let process = process(backend);
    let node = process.node();
    let mut tasks = Vec::new();
    let watched = Arc::clone(&process.inner.tasks);
    tasks.push(spawn(move || block_on(watchdog::run(watched))));
    // Makes a server.
    let first = process.acquire(NAME, &policy(1));
    if let Some(server) = node.servers.next_undriven().filter(|_| node.embedded().is_none()) {
        let driven = Arc::clone(node);
        tasks.push(spawn(move || block_on(driver::run(driven, server))));
    }
    let requests: Vec<_> = [Some(first), None]
        .into_iter()
        .map(|request| {
            let process = process.clone();
            spawn(move || {
                let request = request.unwrap_or_else(|| process.acquire(NAME, &policy(1)));
                match block_on(request) {
                    Ok(permit) => block_on(permit.lost()),
                    Err(AcquireError::Closed) => {}
                    Err(error) => panic!("{error}"),
                }
            })
        })
        .collect();
    let closed = Arc::clone(node);
    let closes = spawn(move || {
        closed.close();
        closed.give_back();
    });
    closes.join().unwrap();
    requests.into_iter().for_each(|request| request.join().unwrap());
    tasks.into_iter().for_each(|task| task.join().unwrap());
    assert!(node.is_finished());
    assert_nothing_left(backend, &[&process]);
}

#[test]
fn a_grant_over_a_connection_reaches_its_request() {
    explore(|| {
        let backend = TestBackend::remote();
        let process = process(&backend);
        let node = process.node();
        let first = process.acquire(NAME, &policy(1));
        let server = node.servers.next_undriven().expect("a session is on it");
        let driven = Arc::clone(node);
        let drives = spawn(move || block_on(driver::run(driven, server)));
        let requests: Vec<_> = [Some(first), None]
            .into_iter()
            .map(|request| {
                let process = process.clone();
                spawn(move || {
                    let request = request.unwrap_or_else(|| process.acquire(NAME, &policy(1)));
                    let permit = block_on(request).expect("it is its turn");
                    if either() {
                        block_on(permit.release()).expect("the backend is here");
                    }
                })
            })
            .collect();
        requests.into_iter().for_each(|request| request.join().unwrap());
        node.close();
        drives.join().unwrap();
        assert_nothing_left(&backend, &[&process]);
    });
}
