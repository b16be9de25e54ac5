//! Sessions, the servers that they are on, and the outboxes that they are in.

use std::sync::Arc;
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread::{spawn, yield_now};
use tokio::time::Instant;

use super::backend::TestBackend;
use super::{NAME, advance, assert_nothing_left, explore, handle_due, policy, process};
use crate::node::server::Reach;
use crate::node::server::outbox::Purpose;
use crate::node::sessions::Remembered;
use crate::node::{Node, Server};
use crate::semaphore::place_handle::{PlaceHandle, PlaceOf};
use crate::tasks::Tasks;
use crate::tasks::driver::batch::{Collected, collect_of};

/// An unused session is retired after this time.
const UNUSED: Duration = Duration::from_secs(6);

/// Any number of calls.
const ROOM: usize = usize::MAX;

fn place(node: &Arc<Node>) -> PlaceHandle {
    place_of(node, None)
}

fn place_of(node: &Arc<Node>, remembered: Option<&Remembered>) -> PlaceHandle {
    let (name, meter) = (NAME.into(), node.meters.of("default", Duration::ZERO));
    // With tasks that never run: the scenario acts in their place.
    let place = PlaceHandle::take(
        &Tasks::new(Arc::clone(node)),
        PlaceOf { remembered, ..PlaceOf::plain(&name, &meter) },
        2,
        &policy(2),
        Instant::now(),
    );
    place.expect("a place is free")
}

/// Takes a place, and asserts that it is in the session of the registry.
fn place_in_use(node: &Arc<Node>) -> PlaceHandle {
    in_use(node, place(node))
}

fn in_use(node: &Arc<Node>, place: PlaceHandle) -> PlaceHandle {
    let known = node.sessions.get(NAME).expect("a session in use");
    assert!(Arc::ptr_eq(place.session(), &known), "two sessions of one name");
    assert!(!place.session().lock().is_retired, "a retired session is in use");
    place
}

/// Leaves a session that the watchdog retires when it runs.
fn unused_session(node: &Arc<Node>) {
    drop(place(node));
    advance(UNUSED);
}

/// Asserts that every server counts the sessions that are on it, and that all sessions are on one of these servers.
fn assert_counted(node: &Arc<Node>) {
    let counted = node.servers.counted();
    let on_servers: usize = counted.iter().map(|(server, _)| node.sessions.on(server).len()).sum();
    assert_eq!(on_servers, node.sessions.len(), "a session is on a server that was given up");
    for (server, sessions) in counted {
        assert_eq!(sessions, node.sessions.on(&server).len(), "a server counts its sessions wrong");
    }
}

/// Runs the watchdog until no session is left, and asserts that no server counts one.
fn assert_all_retire(node: &Arc<Node>) {
    for _ in 0..2 {
        advance(UNUSED);
        handle_due(node);
    }
    assert_eq!(node.sessions.len(), 0, "an unused session is kept");
    assert_counted(node);
    for server in node.servers.all() {
        assert!(node.servers.end(&server), "sessions are counted that are gone");
    }
}

/// Takes out everything that a server's driver would send.
fn collect(node: &Node, server: &Arc<Server>, room: usize) -> usize {
    let (mut calls, mut senders) = (Vec::new(), Vec::new());
    for purpose in Purpose::ALL {
        while let Some(shared) = server.outbox.pop(purpose) {
            let collected = Collected { calls: &mut calls, senders: &mut senders };
            collect_of(node, server, &shared, (purpose, room), node.now(), collected);
        }
    }
    calls.len()
}

#[test]
fn no_request_lands_in_a_retired_session() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let node = process.node();
        unused_session(node);
        let watched = Arc::clone(node);
        let watches = spawn(move || handle_due(&watched));
        let requests: Vec<_> = (0..2)
            .map(|_| {
                let node = Arc::clone(node);
                spawn(move || {
                    drop(place_in_use(&node));
                    place_in_use(&node)
                })
            })
            .collect();
        let places: Vec<_> = requests.into_iter().map(|request| request.join().unwrap()).collect();
        watches.join().unwrap();
        assert_counted(node);
        drop(places);
        assert_nothing_left(&backend, &[&process]);
        assert_all_retire(node);
    });
}

#[test]
fn a_layer_that_remembers_a_session_that_is_retired_finds_the_next_one() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let node = process.node();
        let remembered = Arc::new(Remembered::default());
        drop(place_of(node, Some(&remembered)));
        advance(UNUSED);
        let watched = Arc::clone(node);
        let watches = spawn(move || handle_due(&watched));
        let requests: Vec<_> = (0..2)
            .map(|_| {
                let (node, remembered) = (Arc::clone(node), Arc::clone(&remembered));
                spawn(move || {
                    drop(in_use(&node, place_of(&node, Some(&remembered))));
                    in_use(&node, place_of(&node, Some(&remembered)))
                })
            })
            .collect();
        // Another layer, which does not remember the session.
        let place = place_in_use(node);
        let mut places: Vec<_> =
            requests.into_iter().map(|request| request.join().unwrap()).collect();
        places.push(place);
        watches.join().unwrap();
        let known = node.sessions.get(NAME).expect("a session in use");
        let last = place_of(node, Some(&remembered));
        assert!(Arc::ptr_eq(last.session(), &known), "an older session is remembered");
        assert_counted(node);
        drop((places, last));
        assert_nothing_left(&backend, &[&process]);
        assert_all_retire(node);
    });
}

#[test]
fn a_session_that_is_retired_at_once_is_retired_once() {
    explore(|| {
        let backend = TestBackend::embedded();
        let process = process(&backend);
        let node = process.node();
        unused_session(node);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let node = Arc::clone(node);
                spawn(move || {
                    handle_due(&node);
                    // Finds the session unused, and retires it.
                    node.with_session(NAME, node.now(), |_, _| ());
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_all_retire(node);
    });
}

#[test]
fn a_session_that_moves_as_it_is_retired_is_counted_where_it_is() {
    explore(|| {
        let backend = TestBackend::remote();
        let process = process(&backend);
        let node = process.node();
        let unused = place(node);
        let old = Arc::clone(&unused.session().lock().server);
        // Its request was never sent, so the session is retired at once.
        let leaves = spawn(move || drop(unused));
        let (moved, server, moves) = (Arc::clone(node), Arc::clone(&old), backend.clone());
        let drives = spawn(move || {
            moves.move_home();
            // As its driver does, until no session comes any more.
            loop {
                block_on(moved.rehome_all(&server));
                if moved.servers.end(&server) {
                    break;
                }
                yield_now();
            }
            assert!(matches!(block_on(server.reach()), Reach::Ended));
        });
        let requested = Arc::clone(node);
        let requests = spawn(move || place_in_use(&requested));
        let place = requests.join().unwrap();
        leaves.join().unwrap();
        drives.join().unwrap();
        assert_counted(node);
        assert!(!Arc::ptr_eq(&place.session().lock().server, &old), "on a server that is ended");
        drop(place);
        assert_all_retire(node);
    });
}

#[test]
fn a_server_that_is_given_up_takes_no_session_of_another_one_along() {
    explore(|| {
        let backend = TestBackend::remote();
        let process = process(&backend);
        let node = process.node();
        let place = place(node);
        let shared = Arc::clone(place.session());
        let old = Arc::clone(&shared.lock().server);
        let (given_up, server) = (Arc::clone(node), Arc::clone(&old));
        let gives_up = spawn(move || given_up.give_up(&server));
        backend.move_home();
        node.rehome(&shared, false);
        gives_up.join().unwrap();
        let state = shared.lock();
        let is_abandoned = node.sessions.get(NAME).is_none();
        assert_eq!(is_abandoned, state.is_retired);
        assert_eq!(is_abandoned, Arc::ptr_eq(&state.server, &old), "it had gone elsewhere");
        drop(state);
        drop(place);
    });
}

#[test]
fn a_wait_for_a_server_ends_with_the_server() {
    explore(|| {
        let backend = TestBackend::remote();
        let process = process(&backend);
        let node = process.node();
        let server = node.servers.attach(&crate::backend::Shard::named("0"), 0);
        let reached = Arc::clone(&server);
        let waits = spawn(move || assert!(matches!(block_on(reached.reach()), Reach::Ended)));
        assert!(node.servers.end(&server));
        waits.join().unwrap();
    });
}

#[test]
fn what_is_to_be_sent_is_in_the_outbox() {
    explore(|| {
        let backend = TestBackend::remote();
        let process = process(&backend);
        let node = process.node();
        let first = place(node);
        let shared = Arc::clone(first.session());
        let server = Arc::clone(&shared.lock().server);
        let (collects, collected) = (Arc::clone(node), Arc::clone(&server));
        let drives = spawn(move || {
            for room in [1, ROOM] {
                collect(&collects, &collected, room);
            }
        });
        let requested = Arc::clone(node);
        let requests = spawn(move || {
            drop(first);
            place(&requested)
        });
        let (moved, session) = (Arc::clone(node), Arc::clone(&shared));
        let sends_on = spawn(move || moved.rehome(&session, true));
        let second = requests.join().unwrap();
        drives.join().unwrap();
        sends_on.join().unwrap();
        let state = shared.lock();
        assert!(state.session.urgency().is_none() || state.queued.is_any());
        drop(state);
        collect(node, &server, ROOM);
        assert_eq!(shared.lock().session.urgency(), None, "it was not in the outbox");
        assert!(!shared.lock().queued.is_any());
        drop(second);
        collect(node, &server, ROOM);
    });
}
