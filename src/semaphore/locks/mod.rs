//! Scenarios in which locks and wake-ups meet, under thousands of schedules each.
//!
//! `tests/long locks` runs these. Locks and atomics are those of [`shuttle`], which runs one thread at a time and decides at
//! each of them which thread goes on: at random, and by priorities that change at a few points ([PCT]). The clock
//! stands still unless a scenario advances it, and no timer goes off, so a waiting task goes on only if it is woken. A
//! schedule fails if all threads wait.
//!
//! Threads do not switch at Tokio's `Notify`, but it still wakes the tasks of a scenario.
//!
//! [PCT]: https://www.microsoft.com/en-us/research/publication/a-randomized-scheduler-with-probabilistic-guarantees-of-finding-bugs/

mod backend;
mod overrides;
mod requests;
mod reuse;
mod sessions;
mod subtasks;

use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use tokio::runtime::Builder;

use self::backend::TestBackend;
use super::Semaphore;
use crate::node::Node;
use crate::policy::Policy;
use crate::tasks::watchdog;

const NAME: &str = "x";

/// The number of points at which PCT changes the priorities of threads.
const DEPTH: usize = 3;

/// Schedules of each kind for each scenario.
const SCHEDULES: u64 = 1500;

/// The stack of a thread, in bytes, enough for a debug build.
const STACK: usize = 1 << 18;

/// The most steps of a schedule. One that takes more spins.
const STEPS: usize = 20_000;

/// Runs a scenario under many schedules, which `LOCKS_SEED` and `LOCKS_SCHEDULES` decide.
fn explore(scenario: fn()) {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    // Never dropped: dropping it wakes the tasks that wait for its clock, and a failed schedule leaves some behind.
    let runtime = ManuallyDrop::new(runtime.expect("a runtime without I/O"));
    let _entered = runtime.enter();
    let (seed, schedules) = (setting("LOCKS_SEED", 1), setting("LOCKS_SCHEDULES", SCHEDULES));
    let schedules = usize::try_from(schedules).expect("a number of schedules");
    let mut config = Config::new();
    config.stack_size = STACK;
    config.silence_warnings = true;
    config.max_steps = MaxSteps::FailAfter(STEPS);
    let random = RandomScheduler::new_from_seed(seed, schedules);
    Runner::new(random, config.clone()).run(scenario);
    let pct = PctScheduler::new_from_seed(seed, DEPTH, schedules);
    Runner::new(pct, config).run(scenario);
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Chooses one of two variants of a scenario.
fn either() -> bool {
    thread_rng().gen_bool(0.5)
}

fn advance(time: Duration) {
    let _ = poll_once(tokio::time::advance(time));
}

/// Polls once, with a waker that does nothing.
fn poll_once<F: Future>(future: F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Creates a process, whose tasks the scenario runs itself.
fn process(backend: &TestBackend) -> Semaphore {
    Semaphore::new(backend.clone())
}

fn policy(permits: u32) -> Policy {
    let policy = Policy::builder(permits).wait_timeout(Duration::from_secs(10)).build();
    policy.expect("a policy within its bounds")
}

/// Has the watchdog handle all sessions that are due.
fn handle_due(node: &Node) {
    assert!(
        poll_once(watchdog::handle_due(node)).is_ready(),
        "more sessions than the scenario has"
    );
}

/// Asserts that no place is on the backend, and nothing is left to send.
fn assert_nothing_left(backend: &TestBackend, processes: &[&Semaphore]) {
    for process in processes {
        let node = process.node();
        for shared in node.sessions.all() {
            let state = shared.lock();
            assert_eq!(state.session.urgency(), None, "left to be sent: {:?}", state.session);
            assert!(!state.is_busy, "a thread is still to carry out calls");
        }
        assert!(!node.sessions.is_busy(), "something is left of a session");
    }
    assert!(backend.is_empty(), "a place is left on the backend");
}
