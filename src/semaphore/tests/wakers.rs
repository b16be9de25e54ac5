//! Permits and waiting requests when tasks panic, runtimes end and processes fork.

use super::two_servers::{TwoServers, World};
use super::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Builder;
use tokio::time::sleep;

use crate::node::identity::Identity;
use crate::policy::Policy;
use crate::semaphore::{Permit, Semaphore};

/// A task that may own a permit, and is dropped with its last waker.
struct Task(#[expect(dead_code, reason = "it is there to be dropped")] Mutex<Option<Permit>>);

impl Wake for Task {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn no_waker_is_dropped_under_a_lock() {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let semaphore = Semaphore::in_memory();
        let permit = semaphore.acquire("x", &policy(LONG)).now_or_never().unwrap().unwrap();
        let short = Policy::builder(1).wait_timeout(Duration::from_millis(50)).build().unwrap();
        let mut waits = Box::pin(semaphore.acquire("x", &short));
        let task = Waker::from(Arc::new(Task(Mutex::new(Some(permit)))));
        assert!(waits.as_mut().poll_unpin(&mut Context::from_waker(&task)).is_pending());
        drop(task);
        // The timer of its wait drops its waker; then the future goes on in another task.
        runtime.block_on(sleep(Duration::from_millis(100)));
        let _ = waits.as_mut().poll_unpin(&mut Context::from_waker(Waker::noop()));
        done.send(()).unwrap();
    });
    assert!(is_done.recv_timeout(Duration::from_secs(10)).is_ok(), "it waits for its own lock");
}

/// A task that runs inside its waker, where it takes a permit of a new name.
struct Inline {
    semaphore: Semaphore,
    runtime: tokio::runtime::Handle,
    woken: AtomicUsize,
}

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        let _entered = self.runtime.enter();
        let name = format!("new {}", self.woken.fetch_add(1, Ordering::SeqCst));
        let _ = self.semaphore.acquire(&*name, &policy(LEASE)).now_or_never();
    }
}

#[test]
fn no_task_is_woken_under_a_lock_when_its_runtime_ends() {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let (_, semaphore) = one_process(World { b_is_slow: AtomicBool::new(true), ..settled() });
        let [ending, other] =
            [(); 2].map(|()| Builder::new_current_thread().enable_all().build().unwrap());
        let task = Inline {
            semaphore: semaphore.clone(),
            runtime: other.handle().clone(),
            woken: AtomicUsize::new(0),
        };
        let task = Arc::new(task);
        let waker = Waker::from(Arc::clone(&task));
        let mut question = Box::pin(semaphore.inspect("y"));
        // The supervisor starts its tasks, and the question waits for the first connection.
        ending.block_on(async {
            assert!(question.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
            sleep(Duration::from_millis(20)).await;
            assert!(question.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        });
        let before = task.woken.load(Ordering::SeqCst);
        drop(ending);
        done.send(task.woken.load(Ordering::SeqCst) - before).unwrap();
    });
    let woken = is_done.recv_timeout(Duration::from_secs(10)).expect("it waits for its own lock");
    assert!(woken > 0, "it was not notified that no driver is left");
}

/// A task whose first wake-up panics.
#[derive(Default)]
struct PanicsOnce(AtomicBool);

impl Wake for PanicsOnce {
    fn wake(self: Arc<Self>) {
        assert!(self.0.swap(true, Ordering::SeqCst), "a waker panics, as the test wants it");
    }
}

#[tokio::test(start_paused = true)]
async fn permits_outlive_a_background_task_that_panics() {
    let (world, semaphore) = one_process(settled());
    let held = semaphore.acquire("x", &policy(LEASE)).await.unwrap();
    let other = semaphore.acquire("y", &policy(LEASE)).await.unwrap();
    let task = Arc::new(PanicsOnce::default());
    let waker = Waker::from(Arc::clone(&task));
    let mut waits = Box::pin(semaphore.acquire("y", &policy(LEASE)));
    assert!(waits.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    sleep(Duration::from_millis(10)).await;
    // The driver wakes the next request.
    drop(other);
    let connects = world.connects.load(Ordering::SeqCst);
    sleep(Duration::from_millis(10)).await;
    assert!(task.0.load(Ordering::SeqCst), "it was woken");
    sleep(3 * LEASE).await;
    assert!(world.connects.load(Ordering::SeqCst) > connects, "the driver was started again");
    assert!(!held.is_lost());
    drop(waits.await.expect("the grant that the task was woken for"));
}

#[tokio::test]
async fn a_wait_for_a_loss_that_is_dropped_leaves_no_waker() {
    let semaphore = Semaphore::in_memory();
    let permit = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    let mut tasks = Vec::new();
    for clone in [false, true].repeat(10) {
        let task = Arc::new(Task(Mutex::default()));
        tasks.push(Arc::downgrade(&task));
        let waker = Waker::from(task);
        let mut context = Context::from_waker(&waker);
        if clone {
            assert!(permit.clone().poll_lost(&mut context).is_pending());
        } else {
            assert!(Box::pin(permit.lost()).poll_unpin(&mut context).is_pending());
        }
    }
    assert_eq!(tasks.iter().filter(|task| task.strong_count() > 0).count(), 0);
}

#[tokio::test]
async fn all_listeners_for_a_loss_are_woken() {
    let semaphore = Semaphore::in_memory();
    let permit = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    let clone = permit.clone();
    let waits = futures_util::future::join3(permit.lost(), permit.lost(), clone.lost());
    let mut waits = std::pin::pin!(waits);
    assert!((&mut waits).now_or_never().is_none());
    semaphore.shutdown().await;
    waits.await;
}

#[test]
fn nothing_outlives_a_semaphore_whose_runtime_is_gone() {
    let (_, semaphore) = one_process(settled());
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let permit = runtime.block_on(async { semaphore.acquire("y", &policy(LONG)).await.unwrap() });
    let node = Arc::downgrade(semaphore.node());
    let session = Arc::downgrade(&semaphore.node().sessions.get("y").unwrap());
    drop(runtime);
    drop(permit);
    drop(semaphore);
    assert_eq!(node.strong_count(), 0);
    assert_eq!(session.strong_count(), 0, "session and server keep each other");
}

#[tokio::test]
async fn a_semaphore_that_is_only_built_before_a_fork_has_no_identity_yet() {
    let backend = TwoServers::default();
    let semaphore = Semaphore::new(backend.clone());
    let _ = (semaphore.clone(), semaphore.health(), format!("{semaphore:?}"));
    assert_eq!(backend.0.attached.load(Ordering::SeqCst), 0, "each child would have this one");
    for _ in 0..2 {
        drop(semaphore.acquire("x", &Policy::new(1)).await.unwrap());
        assert_eq!(backend.0.attached.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_semaphore_that_was_used_before_a_fork_is_refused_in_the_child() {
    let backend = TwoServers::default();
    let semaphore = Semaphore::new(backend.clone());
    // The identity as the child finds it.
    let parent = std::process::id() + 1;
    assert!(semaphore.node().identity.set(Identity::of(parent, 7)).is_ok());
    for _ in 0..2 {
        let refused = semaphore.acquire("x", &Policy::new(1)).await.unwrap_err();
        let said =
            format!("was used in process {parent}, of which process {} is a fork", parent - 1);
        assert!(refused.to_string().contains(&said), "{refused}");
    }
    assert!(semaphore.inspect("x").await.is_err());
    assert_eq!(backend.0.connects.load(Ordering::SeqCst), 0);
}
