//! What becomes of permits when servers come and go, over a backend of two servers whose data is that of
//! the embedded one.

use std::future::{pending, ready};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::runtime::Builder;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

use super::{Permit, Semaphore};
use crate::backend::{
    AddressedCall, Answer, Backend, Change, Connection, Embedded, Listing, Mailbox, MemoryBackend,
    Names, Overrides, PeerMessage, Queries, Query, QueryError, ServerInfo, Shard,
};
use crate::error::{AcquireError, BackendError, RejectReason};
use crate::node::identity::Identity;
use crate::policy::{OnUnavailable, Policy, PolicyBuilder};
use crate::protocol::{Call, Hint, NodeId, PlaceId, Time};

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
    /// Connections up to this number take questions, and answer none.
    deaf: AtomicUsize,
    /// Over these, questions fail as over a connection that is gone.
    broken: AtomicUsize,
    /// a has lost its data: that is another one from here on.
    lost: AtomicBool,
    /// No connection can be had.
    down: AtomicBool,
    /// Connections break at once.
    flaps: AtomicBool,
    /// Calls go unanswered.
    is_mute: AtomicBool,
    /// How long each place of a call takes, µs, and until when there is work.
    place_us: AtomicUsize,
    busy_until: Mutex<Option<Instant>>,
    connects: AtomicUsize,
    /// How many processes have used it.
    attached: AtomicUsize,
    connected_at: Mutex<Vec<Instant>>,
    cut: Notify,
}

struct OneConnection {
    number: usize,
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

    /// Adds work for these calls. Returns when it is done, if it takes time.
    fn work(&self, calls: &[AddressedCall]) -> Option<Instant> {
        let place = Some(self.place_us.load(Ordering::SeqCst)).filter(|place| *place > 0)?;
        let places = calls.iter().map(|call| 1 + call.op.places()).sum::<usize>();
        let work = Duration::from_micros(u64::try_from(place * places).unwrap());
        let mut busy_until = self.busy_until.lock().unwrap();
        let done = busy_until.unwrap_or_else(Instant::now).max(Instant::now()) + work;
        *busy_until = Some(done);
        Some(done)
    }
}

impl Backend for TwoServers {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.attached.fetch_add(1, Ordering::SeqCst);
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
            let number = world.connects.fetch_add(1, Ordering::SeqCst) + 1;
            world.connected_at.lock().unwrap().push(Instant::now());
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
            let data = if world.is(|world| &world.lost) { "e" } else { "d" };
            let info = ServerInfo { data: Some(data.into()), ..ServerInfo::default() };
            Ok(Some(Arc::new(OneConnection { number, is_b, world: Arc::clone(world), info }) as _))
        }
        .boxed()
    }
}

impl Connection for OneConnection {
    fn server(&self) -> &ServerInfo {
        &self.info
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        if self.world.is(|world| &world.flaps) {
            return sleep(Duration::from_millis(1)).boxed();
        }
        self.world.cut.notified().boxed()
    }

    /// A server that works answers something all the time.
    fn heard_at(&self) -> Option<Instant> {
        let busy_until = *self.world.busy_until.lock().unwrap();
        Some(busy_until?.min(Instant::now()))
    }

    fn send(
        &self,
        calls: Arc<[AddressedCall]>,
    ) -> BoxFuture<'static, Result<Vec<Answer>, BackendError>> {
        let (world, is_b) = (Arc::clone(&self.world), self.is_b);
        async move {
            if world.is(|world| &world.is_mute) {
                return pending().await;
            }
            if let Some(done) = world.work(&calls) {
                sleep_until(done).await;
            }
            let memory = world.b_memory.as_ref().filter(|_| is_b).unwrap_or(&world.memory);
            let answer = |call: &AddressedCall| {
                let AddressedCall { key, node, limit, headroom, for_all, max_waiting, .. } = call;
                let call = Call {
                    limit: *limit,
                    headroom: *headroom,
                    for_all: *for_all,
                    max_waiting: *max_waiting,
                    recalls: call.recalls,
                    op: call.op.clone(),
                };
                let reply = memory.counter(key, Instant::now()).call(*node, &call, Time::ZERO);
                Answer::Reply { reply, late: false }
            };
            Ok(calls.iter().map(answer).collect())
        }
        .boxed()
    }
}

impl OneConnection {
    /// A question, if the connection is any good.
    fn ask<T: Send + 'static>(&self, ask: impl FnOnce(&MemoryBackend) -> Query<T>) -> Query<T> {
        if self.number <= self.world.deaf.load(Ordering::SeqCst) {
            return pending().boxed();
        }
        if self.number <= self.world.broken.load(Ordering::SeqCst) {
            let error = QueryError::Failed(BackendError::connection("gone"));
            return ready(Err(error)).boxed();
        }
        ask(&self.world.memory)
    }
}

impl Queries for OneConnection {
    fn inspect(&self, key: &Arc<str>, most: u32) -> Query<Listing> {
        self.ask(|memory| memory.inspect(key, most))
    }

    fn list(&self, key: &Arc<str>, from: u64, most: u32) -> Query<Names> {
        self.ask(|memory| memory.list(key, from, most))
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        self.ask(|memory| memory.overrides(key, known))
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.ask(|memory| memory.set_override(key, name, change))
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.ask(|memory| memory.revoke(key, id, take))
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.ask(|memory| memory.send_message(key, to, message))
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
    let _ = semaphore.acquire("x", &policy(LEASE)).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
}

/// What operators set is all that is asked of b: nothing else shows that it does not answer any more.
#[tokio::test(start_paused = true)]
async fn a_connection_that_is_asked_for_overrides_alone_is_given_up_when_it_does_not_answer() {
    let (world, semaphore) = one_process(World::default());
    let policy = policy(LEASE);
    drop(semaphore.acquire("x", &policy).await.unwrap());
    let connects = world.connects.load(Ordering::SeqCst);
    world.deaf.store(connects, Ordering::SeqCst);
    for _ in 0..30 {
        drop(semaphore.acquire("x", &policy).await.unwrap());
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(world.connects.load(Ordering::SeqCst) - connects, 1, "connections opened meanwhile");
}

/// Nothing else is asked there: no semaphore of this process is in use.
#[tokio::test(start_paused = true)]
async fn a_connection_that_answers_no_operator_is_given_up() {
    type Fault = fn(&World) -> &AtomicUsize;
    let faults: [Fault; 2] = [|world| &world.deaf, |world| &world.broken];
    for fault in faults {
        let (world, semaphore) = one_process(settled());
        semaphore.pause("x").await.unwrap();
        sleep(Duration::from_secs(600)).await;
        let connects = world.connects.load(Ordering::SeqCst);
        fault(&world).store(connects, Ordering::SeqCst);
        let mut failed = 0;
        for _ in 0..20 {
            failed += usize::from(semaphore.inspect("x").await.is_err());
            sleep(Duration::from_millis(200)).await;
        }
        assert!(failed <= 3, "{failed} of 20 questions went unanswered");
        assert_eq!(world.connects.load(Ordering::SeqCst) - connects, 1, "connections opened");
        semaphore.resume("x").await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_fails_with_its_connection_shows_that() {
    let (world, semaphore) = one_process(settled());
    let permit = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    let connects = world.connects.load(Ordering::SeqCst);
    world.broken.store(connects, Ordering::SeqCst);
    sleep(Duration::from_secs(3)).await;
    assert!(world.connects.load(Ordering::SeqCst) > connects, "it goes on asking there");
    assert!(!permit.is_lost());
}

/// A hint for a place that nobody has.
const STRANGE: Hint = Hint { n: 1, bound: None, claim: None, lease_end: 1 };

#[tokio::test(start_paused = true)]
async fn hints_for_made_up_names_make_few_records() {
    let (_world, semaphore) = one_process(settled());
    drop(semaphore.acquire("x", &policy(LEASE)).await.unwrap());
    let node = Arc::clone(semaphore.node());
    for n in 0..10_000 {
        Mailbox::hint(&*node, &format!("n{n}"), STRANGE);
    }
    assert_eq!(semaphore.health().semaphores, 101);
    // Those that are in use hear all of theirs.
    let held = semaphore.acquire("y", &policy(LEASE)).await.unwrap();
    Mailbox::hint(&*node, "y", STRANGE);
    assert!(!held.is_lost());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(semaphore.health().semaphores, 1);
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
        let _ = other.acquire("x", &policy(LEASE)).await.unwrap();
    }
}

/// x is counted by a; b keeps what operators set, and with it what was revoked.
#[tokio::test(start_paused = true)]
async fn a_permit_that_outlives_its_semaphore_outlives_a_loss_of_data() {
    for keep in [true, false] {
        let other = Some(MemoryBackend::new());
        let (world, semaphore) = one_process(World { b_memory: other, ..World::default() });
        let (permit, _kept) = outlive(semaphore, keep).await;
        sleep(3 * LEASE).await;
        world.set(|world| &world.down, true);
        world.set(|world| &world.lost, true);
        world.memory.forget_all();
        world.cut();
        sleep(LEASE / 5).await;
        world.set(|world| &world.down, false);
        sleep(3 * LEASE).await;
        assert!(!permit.is_lost(), "semaphore kept: {keep}");
    }
}

#[tokio::test(start_paused = true)]
async fn newcomers_wait_for_what_is_held_whatever_comes_first_a_session_or_its_connection() {
    let b_memory = Some(MemoryBackend::new());
    let (world, semaphore) = one_process(World { b_memory, ..World::default() });
    let held = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    sleep(Duration::from_millis(400)).await;
    let node = semaphore.node();
    let b = node.servers.attach(&Shard::named("b"), 0);
    let connection = TwoServers(Arc::clone(&world)).connect(b.shard()).await.unwrap().unwrap();
    world.set(|world| &world.moved, true);
    // The driver of b has its new connection; before it tells its sessions, that of a sends one there.
    let connected = b.connected(&connection);
    node.rehome(&node.sessions.get("x").unwrap(), true);
    for shared in node.sessions.on(&b) {
        node.announce(&shared, connected);
    }
    semaphore.try_acquire("x", &policy(LONG)).await.unwrap_err();
    assert!(!held.is_lost());
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

/// As where the server is too busy to answer: a fleet that comes back at once, and in step, keeps it so.
#[tokio::test(start_paused = true)]
async fn a_connection_that_is_given_up_is_opened_again_after_a_pause() {
    let (world, semaphore) = one_process(settled());
    let _held = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    world.set(|world| &world.is_mute, true);
    world.connected_at.lock().unwrap().clear();
    // Something that goes unanswered at all times.
    for _ in 0..40 {
        semaphore.try_acquire("x", &policy(LONG)).await.unwrap_err();
    }
    let connected_at = world.connected_at.lock().unwrap().clone();
    let between = connected_at.windows(2).map(|pair| pair[1] - pair[0]);
    let shortest = between.min().unwrap();
    // It is given up after half a second, and the pause is 25 ms or more, of which half is left to chance.
    assert!(shortest >= Duration::from_millis(512), "{shortest:?}");
}

fn admits() -> PolicyBuilder {
    let wait = Duration::from_secs(10);
    Policy::builder(1).wait_timeout(wait).lease(LONG).on_unavailable(OnUnavailable::Admit)
}

#[tokio::test(start_paused = true)]
async fn no_policy_admits_a_request_that_a_slow_server_has_not_come_to() {
    let (world, semaphore) = one_process(settled());
    let policy = admits().build().unwrap();
    let held = semaphore.acquire("x", &policy).await.unwrap();
    // 3 s for an acquire.
    world.place_us.store(1_500_000, Ordering::SeqCst);
    let (began, mut waits) = (Instant::now(), Box::pin(semaphore.acquire("x", &policy)));
    assert!((&mut waits).now_or_never().is_none());
    let tried = semaphore.try_acquire("x", &policy).await;
    assert!(matches!(tried, Err(AcquireError::Unavailable(_))), "{tried:?}");
    assert_eq!(began.elapsed(), Duration::from_secs(1));
    let soon = admits().wait_timeout(Duration::from_secs(2)).build().unwrap();
    let refused = semaphore.acquire("x", &soon).await.unwrap_err();
    let AcquireError::Rejected(rejected) = &refused else { panic!("{refused}") };
    assert_eq!(rejected.reason, RejectReason::QueueTimeout);
    drop(held);
    world.place_us.store(0, Ordering::SeqCst);
    drop(waits.await.unwrap());
    let health = semaphore.health();
    assert_eq!((health.admitted_by_policy, health.disconnects), (0, 0));
}

/// 40,000 places take the server four seconds, in calls of up to 512.
#[tokio::test(start_paused = true)]
async fn a_crowd_costs_waiting_and_no_permit_connection_or_admission() {
    let (world, semaphore) = one_process(settled());
    world.place_us.store(100, Ordering::SeqCst);
    let short = Policy::builder(1).lease(LEASE).build().unwrap();
    let mut held = Vec::new();
    for name in 0..20 {
        held.push(semaphore.acquire(format!("held{name}"), &short).await.unwrap());
    }
    let policy = admits().max_queue(100_000).build().unwrap();
    let crowd = (0..40_000).map(|number| semaphore.acquire(format!("x{}", number % 9), &policy));
    let crowd: Vec<_> = crowd.map(tokio::spawn).collect();
    sleep(Duration::from_secs(8)).await;
    let health = semaphore.health();
    assert_eq!((health.lost, health.disconnects, health.admitted_by_policy), (0, 0, 0));
    // In spite of them, a newcomer for another name has its permit soon.
    let began = Instant::now();
    let _ = semaphore.acquire("new", &short).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    crowd.iter().for_each(tokio::task::JoinHandle::abort);
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

/// A task that runs where it is woken: it takes a permit under a new name.
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
    assert!(woken > 0, "it is told that no driver is left");
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
    // The driver wakes the next in line.
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
    let node = Arc::downgrade(semaphore.node());
    let session = Arc::downgrade(&semaphore.node().sessions.get("y").unwrap());
    drop(runtime);
    drop(permit);
    drop(semaphore);
    assert_eq!(node.strong_count(), 0);
    assert_eq!(session.strong_count(), 0, "session and server keep each other");
}

#[tokio::test]
async fn a_semaphore_that_is_only_made_before_a_fork_has_no_identity_yet() {
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
    // As the child finds it.
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
