//! The session of a name ends some seconds after its last use.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::sleep;
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::backend::seam::{Backend, Connection, Embedded, Mailbox, Shard};
use tower_semaphore::protocol::{Hint, NodeId};
use tower_semaphore::{AcquireError, BackendError, Policy, Semaphore};

/// How long a record may outlive the last use of its name: five seconds, and one more.
const KEPT: Duration = Duration::from_millis(6500);
const HOUR: Duration = Duration::from_secs(3600);

fn long_lease() -> Policy {
    Policy::builder(1).lease(HOUR).wait_timeout(HOUR).build().unwrap()
}

/// A backend whose mailbox is accessible: the embedded one or, if it is `away`, one with a server that cannot be
/// reached.
struct Watched {
    memory: MemoryBackend,
    away: bool,
    mailbox: Arc<Mutex<Option<Weak<dyn Mailbox>>>>,
}

impl Backend for Watched {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        *self.mailbox.lock().unwrap() = Some(Weak::clone(&mailbox));
        self.memory.attach(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.memory.key(name)
    }

    fn embedded(&self) -> Option<&dyn Embedded> {
        if self.away { None } else { self.memory.embedded() }
    }

    fn connect<'a>(
        &'a self,
        _: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        Box::pin(async { Err(BackendError::connection("it is away")) })
    }
}

fn records(semaphore: &Semaphore) -> usize {
    semaphore.health().semaphores
}

/// A semaphore on a server that cannot be reached.
fn away() -> Semaphore {
    let (memory, mailbox) = (MemoryBackend::new(), Arc::default());
    Semaphore::new(Watched { memory, away: true, mailbox })
}

#[tokio::test(start_paused = true)]
async fn a_record_ends_some_seconds_after_a_permit_with_a_long_lease() {
    for held in [Duration::ZERO, Duration::from_secs(10), Duration::from_secs(1500)] {
        let semaphore = Semaphore::in_memory();
        let permit = semaphore.acquire("x", &long_lease()).await.unwrap();
        assert_eq!(records(&semaphore), 1);
        sleep(held).await;
        assert_eq!(records(&semaphore), 1);
        drop(permit);
        sleep(KEPT).await;
        assert_eq!(records(&semaphore), 0, "held for {held:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_limit_of_a_name_is_forgotten_some_seconds_after_a_permit_with_a_long_lease() {
    let semaphore = Semaphore::in_memory();
    let permit = semaphore.acquire("x", &long_lease()).await.unwrap();
    sleep(Duration::from_secs(10)).await;
    assert_eq!(semaphore.inspect("x").await.unwrap().limit, Some(1));
    drop(permit);
    sleep(KEPT).await;
    assert_eq!(semaphore.inspect("x").await.unwrap().limit, None);
}

#[tokio::test(start_paused = true)]
async fn a_record_ends_some_seconds_after_a_wait_with_a_long_lease() {
    let semaphore = Semaphore::in_memory();
    let others = semaphore.acquire("x", &long_lease()).await.unwrap();
    let waits = tokio::spawn(semaphore.acquire("x", &long_lease()));
    sleep(Duration::from_secs(10)).await;
    waits.abort();
    assert!(waits.await.unwrap_err().is_cancelled());
    drop(others);
    sleep(KEPT).await;
    assert_eq!(records(&semaphore), 0);
}

#[tokio::test(start_paused = true)]
async fn a_stray_hint_leaves_no_record() {
    let mailbox: Arc<Mutex<Option<Weak<dyn Mailbox>>>> = Arc::default();
    let memory = MemoryBackend::new();
    let watched = Watched { memory, away: false, mailbox: Arc::clone(&mailbox) };
    let semaphore = Semaphore::new(watched);
    drop(semaphore.acquire("warm", &Policy::new(1)).await.unwrap());
    let mailbox = mailbox.lock().unwrap().clone().unwrap();
    mailbox
        .upgrade()
        .unwrap()
        .hint("stray", Hint { n: 7 << 20, bound: None, claim: None, lease_end: 1 });
    sleep(KEPT).await;
    assert_eq!(records(&semaphore), 0);
}

#[tokio::test(start_paused = true)]
async fn twenty_thousand_names_that_were_refused_in_an_outage_leave_no_records() {
    let semaphore = away();
    let policy = Policy::new(1);
    let first = semaphore.acquire("warm", &policy).await;
    assert!(matches!(first, Err(AcquireError::Unavailable(_))), "{first:?}");
    for i in 0..20_000 {
        let refused = semaphore.acquire(format!("x{i}"), &policy).await;
        assert!(matches!(refused, Err(AcquireError::Unavailable(_))), "{refused:?}");
    }
    sleep(KEPT).await;
    assert_eq!(records(&semaphore), 0);
}
