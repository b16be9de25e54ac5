//! What becomes of permits when servers come and go, over a backend of two servers whose data is that of
//! the embedded one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::runtime::Builder;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::{Permit, Policy, Semaphore};
use crate::backend::{
    AddressedCall, Answer, Backend, Change, Connection, Embedded, Listing, Mailbox, MemoryBackend,
    Names, Overrides, PeerMessage, Queries, Query, ServerInfo, Shard,
};
use crate::error::BackendError;
use crate::protocol::Call;
use crate::protocol::id::{NodeId, PlaceId};

/// Servers `a`, which counts `x` at first, and `b`, which counts all else.
#[derive(Clone, Default)]
struct TwoServers(Arc<World>);

#[derive(Default)]
struct World {
    memory: MemoryBackend,
    /// The data of b, if that is not the same.
    b_memory: Option<MemoryBackend>,
    /// b counts `x`.
    moved: AtomicBool,
    /// The next attempt to connect to a finds out that b counts `x`, and that a cannot be reached.
    a_dies: AtomicBool,
    /// The same, and that a is no server of the backend any more.
    a_ends: AtomicBool,
    b_is_slow: AtomicBool,
    /// No connection can be had.
    down: AtomicBool,
    /// Connections break at once.
    flaps: AtomicBool,
    connects: AtomicUsize,
    cut: Notify,
}

struct OneConnection {
    is_b: bool,
    world: Arc<World>,
    info: ServerInfo,
}

impl World {
    fn is(&self, flag: impl Fn(&Self) -> &AtomicBool) -> bool {
        flag(self).load(Ordering::SeqCst)
    }

    fn set(&self, flag: impl Fn(&Self) -> &AtomicBool, value: bool) {
        flag(self).store(value, Ordering::SeqCst);
    }

    fn cut(&self) {
        self.cut.notify_waiters();
    }
}

impl Backend for TwoServers {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.memory.attach(node, Weak::clone(&mailbox));
        self.0.b_memory.iter().for_each(|memory| memory.attach(node, Weak::clone(&mailbox)));
    }

    fn key(&self, name: &str) -> Arc<str> {
        name.into()
    }

    fn shard(&self, key: &str) -> Shard {
        Shard::named(if key == "x" && !self.0.is(|world| &world.moved) { "a" } else { "b" })
    }

    fn shards(&self) -> Vec<Shard> {
        vec![Shard::named("a"), Shard::named("b")]
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        let world = &self.0;
        async move {
            world.connects.fetch_add(1, Ordering::SeqCst);
            let is_b = shard.name() == Some("b");
            if world.is(|world| &world.down) {
                return Err(BackendError::connection("down"));
            }
            if !is_b && world.is(|world| &world.a_dies) {
                // The map of slots is asked for first; then a does not answer.
                sleep(Duration::from_millis(100)).await;
                world.set(|world| &world.moved, true);
                return Err(BackendError::connection("a is dead"));
            }
            if !is_b && world.is(|world| &world.a_ends) {
                world.set(|world| &world.moved, true);
                return Ok(None);
            }
            if is_b && world.is(|world| &world.b_is_slow) {
                sleep(Duration::from_millis(100)).await;
            }
            let info = ServerInfo { data: Some("d".into()), ..ServerInfo::default() };
            Ok(Some(Arc::new(OneConnection { is_b, world: Arc::clone(world), info }) as _))
        }
        .boxed()
    }
}

impl Connection for OneConnection {
    fn server(&self) -> &ServerInfo {
        &self.info
    }

    fn closed(&self) -> BoxFuture<'_, ()> {
        if self.world.is(|world| &world.flaps) {
            return sleep(Duration::from_millis(1)).boxed();
        }
        self.world.cut.notified().boxed()
    }

    fn send(
        &self,
        calls: Arc<[AddressedCall]>,
    ) -> BoxFuture<'static, Result<Vec<Answer>, BackendError>> {
        let (world, is_b) = (Arc::clone(&self.world), self.is_b);
        async move {
            let memory = world.b_memory.as_ref().filter(|_| is_b).unwrap_or(&world.memory);
            let answer = |call: &AddressedCall| {
                let AddressedCall { key, node, limit, op } = call;
                let call = Call { limit: *limit, op: op.clone() };
                let reply = memory.call(key, *node, &call, Instant::now());
                Answer::Reply { reply, late: false }
            };
            Ok(calls.iter().map(answer).collect())
        }
        .boxed()
    }
}

impl Queries for OneConnection {
    fn inspect(&self, key: &Arc<str>, most: u32) -> Query<Listing> {
        self.world.memory.inspect(key, most)
    }

    fn list(&self, key: &Arc<str>, from: u64, most: u32) -> Query<Names> {
        self.world.memory.list(key, from, most)
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        self.world.memory.overrides(key, known)
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.world.memory.set_override(key, name, change)
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.world.memory.revoke(key, id, take)
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.world.memory.send_message(key, to, message)
    }
}

fn policy(lease: Duration) -> Policy {
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(10)).lease(lease);
    policy.build().unwrap()
}

const LEASE: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

/// One process on two servers; `x` is on b, unless it is to move there.
fn one_process(world: World) -> (Arc<World>, Semaphore) {
    let backend = TwoServers(Arc::new(world));
    (Arc::clone(&backend.0), Semaphore::new(backend))
}

fn settled() -> World {
    World { moved: AtomicBool::new(true), ..World::default() }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_moves_away_from_a_dying_server_is_sent_to_the_next() {
    let (world, semaphore) = one_process(World::default());
    drop(semaphore.acquire("warm", &policy(LEASE)).await.unwrap());
    drop(semaphore.acquire("x", &policy(LEASE)).await.unwrap());
    sleep(Duration::from_millis(400)).await;
    // All connections break. That of b opens again at once.
    world.set(|world| &world.a_dies, true);
    world.cut();
    sleep(Duration::from_millis(50)).await;
    let began = Instant::now();
    semaphore.acquire("x", &policy(LEASE)).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
}

/// Takes a permit and drops its semaphore, but for a clone that is given back.
async fn outlive(semaphore: Semaphore, keep: bool) -> (Permit, Option<Semaphore>) {
    let permit = semaphore.acquire("x", &policy(LEASE)).await.unwrap();
    (permit, keep.then_some(semaphore))
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_outlives_its_semaphore_is_told_of_its_loss() {
    for keep in [true, false] {
        let (world, semaphore) = one_process(settled());
        let (permit, _kept) = outlive(semaphore, keep).await;
        let clone = permit.clone();
        let told = tokio::spawn(async move { clone.lost().await });
        world.set(|world| &world.down, true);
        world.cut();
        sleep(3 * LEASE).await;
        assert!(permit.is_lost(), "by the clock it is");
        assert!(told.is_finished(), "nobody told its holder; semaphore kept: {keep}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_outlives_its_semaphore_outlives_a_short_outage() {
    for keep in [true, false] {
        let (world, semaphore) = one_process(settled());
        let (permit, _kept) = outlive(semaphore, keep).await;
        world.set(|world| &world.down, true);
        world.cut();
        sleep(LEASE / 3).await;
        world.set(|world| &world.down, false);
        sleep(5 * LEASE).await;
        assert!(!permit.is_lost(), "it is not renewed; semaphore kept: {keep}");
        let other = Semaphore::new(TwoServers(Arc::clone(&world)));
        other.try_acquire("x", &policy(LEASE)).await.unwrap_err();
        drop(permit);
        other.acquire("x", &policy(LEASE)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn reconnects_are_paced_though_the_semaphore_is_gone() {
    for keep in [true, false] {
        let (world, semaphore) = one_process(settled());
        let _held = outlive(semaphore, keep).await;
        world.set(|world| &world.flaps, true);
        world.cut();
        sleep(Duration::from_secs(2)).await;
        let connects = world.connects.load(Ordering::SeqCst);
        assert!(connects <= 40, "{connects} connections in 2 s; semaphore kept: {keep}");
    }
}

#[tokio::test(start_paused = true)]
async fn newcomers_wait_for_what_is_held_where_the_next_server_has_not_its_data() {
    let b_memory = Some(MemoryBackend::new());
    let (world, semaphore) = one_process(World { b_memory, ..World::default() });
    drop(semaphore.acquire("warm", &policy(LONG)).await.unwrap());
    let held = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    sleep(Duration::from_millis(400)).await;
    // a is gone with its data. b is known, and its connection is being opened again.
    world.set(|world| &world.a_ends, true);
    world.set(|world| &world.b_is_slow, true);
    world.cut();
    semaphore.try_acquire("x", &policy(LONG)).await.unwrap_err();
    assert!(!held.is_lost());
}

/// A task that may own a permit: with its last waker it is gone.
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
        // The timer of its wait lets go of the waker; then the future goes on in another task.
        runtime.block_on(sleep(Duration::from_millis(100)));
        let _ = waits.as_mut().poll_unpin(&mut Context::from_waker(Waker::noop()));
        done.send(()).unwrap();
    });
    assert!(is_done.recv_timeout(Duration::from_secs(10)).is_ok(), "it waits for its own lock");
}

#[tokio::test]
async fn a_wait_for_a_loss_that_was_given_up_leaves_nothing() {
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
async fn all_that_wait_for_a_loss_are_told() {
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
    let node = Arc::downgrade(&semaphore.handle.node);
    let session = Arc::downgrade(&semaphore.handle.node.sessions.get("y").unwrap());
    drop(runtime);
    drop(permit);
    drop(semaphore);
    assert_eq!(node.strong_count(), 0);
    assert_eq!(session.strong_count(), 0, "session and server keep each other");
}
