//! Permits and requests while servers come and go.

use super::two_servers::{TwoServers, World};
use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep};

use crate::backend::{Backend, Change, Mailbox, MemoryBackend, OVERRIDES, Queries, Shard};
use crate::error::{AcquireError, RejectReason};
use crate::policy::{OnUnavailable, Policy, PolicyBuilder};
use crate::protocol::{Hint, Mode};
use crate::semaphore::{Permit, Semaphore};

#[tokio::test(start_paused = true)]
async fn a_session_that_moves_away_from_a_dying_server_is_sent_to_the_next() {
    let (world, semaphore) = one_process(World::default());
    drop(semaphore.acquire("warm", &policy(LEASE)).await.unwrap());
    drop(semaphore.acquire("x", &policy(LEASE)).await.unwrap());
    sleep(Duration::from_millis(400)).await;
    // All connections break. The one to b opens again at once.
    world.set(|world| &world.a_dies, true);
    world.cut();
    sleep(Duration::from_millis(50)).await;
    let began = Instant::now();
    let _ = semaphore.acquire("x", &policy(LEASE)).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
}

/// Overrides are all that is asked of b: nothing else shows that it does not answer any more.
#[tokio::test(start_paused = true)]
async fn a_connection_that_is_asked_for_overrides_alone_is_given_up_when_it_does_not_answer() {
    let (world, semaphore) = one_process(World::default());
    let policy = policy(LEASE);
    drop(semaphore.acquire("x", &policy).await.unwrap());
    let connects = world.connects.load(Ordering::SeqCst);
    world.silent.store(connects, Ordering::SeqCst);
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
    let faults: [Fault; 2] = [|world| &world.silent, |world| &world.broken];
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

/// A hint for a place that no process has.
const STRANGE: Hint = Hint { n: 1, bound: None, claim: None, lease_end: 1 };

#[tokio::test(start_paused = true)]
async fn hints_for_invented_names_create_few_sessions() {
    let (_world, semaphore) = one_process(settled());
    drop(semaphore.acquire("x", &policy(LEASE)).await.unwrap());
    let node = Arc::clone(semaphore.node());
    for n in 0..10_000 {
        Mailbox::hint(&*node, &format!("n{n}"), STRANGE);
    }
    assert_eq!(semaphore.health().semaphores, 101);
    // A name in use still receives its hints.
    let held = semaphore.acquire("y", &policy(LEASE)).await.unwrap();
    Mailbox::hint(&*node, "y", STRANGE);
    assert!(!held.is_lost());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(semaphore.health().semaphores, 1);
}

/// Takes a permit and drops its semaphore, unless a clone is to be kept.
async fn outlive(semaphore: Semaphore, keep: bool) -> (Permit, Option<Semaphore>) {
    let permit = semaphore.acquire("x", &policy(LEASE)).await.unwrap();
    (permit, keep.then_some(semaphore))
}

#[tokio::test(start_paused = true)]
async fn the_holder_of_a_permit_that_outlives_its_semaphore_is_notified_of_its_loss() {
    for keep in [true, false] {
        let (world, semaphore) = one_process(settled());
        let (permit, _kept) = outlive(semaphore, keep).await;
        let clone = permit.clone();
        let waits = tokio::spawn(async move { clone.lost().await });
        world.set(|world| &world.down, true);
        world.cut();
        sleep(3 * LEASE).await;
        assert!(permit.is_lost(), "by the clock it is");
        assert!(waits.is_finished(), "its holder was not notified; semaphore kept: {keep}");
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

/// a counts x; b keeps the overrides, and with them the revocations.
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
    // The driver of b has its new connection. Before it notifies its sessions, the driver of a moves one to b.
    let connected = b.on_connected(&connection);
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

/// A server that is too busy to answer stays busy if its whole fleet comes back at once.
#[tokio::test(start_paused = true)]
async fn a_connection_that_is_given_up_is_opened_again_after_a_pause() {
    let (world, semaphore) = one_process(settled());
    let _held = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    world.set(|world| &world.is_mute, true);
    world.connected_at.lock().unwrap().clear();
    // At any time, some call is unanswered.
    for _ in 0..40 {
        semaphore.try_acquire("x", &policy(LONG)).await.unwrap_err();
    }
    let connected_at = world.connected_at.lock().unwrap().clone();
    let between = connected_at.windows(2).map(|pair| pair[1] - pair[0]);
    let shortest = between.min().unwrap();
    // It is given up after half a second; then there is a pause of 25 ms or more, half of which is random.
    assert!(shortest >= Duration::from_millis(512), "{shortest:?}");
}

fn admits() -> PolicyBuilder {
    let wait = Duration::from_secs(10);
    Policy::builder(1).wait_timeout(wait).lease(LONG).on_unavailable(OnUnavailable::Admit)
}

#[tokio::test(start_paused = true)]
async fn no_policy_admits_a_request_that_a_slow_server_has_not_reached() {
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
    // A newcomer for another name still gets its permit soon.
    let began = Instant::now();
    let _ = semaphore.acquire("new", &short).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    crowd.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(start_paused = true)]
async fn newcomers_wait_for_what_is_held_if_the_next_server_lacks_its_data() {
    let b_memory = Some(MemoryBackend::new());
    let (world, semaphore) = one_process(World { b_memory, ..World::default() });
    drop(semaphore.acquire("warm", &policy(LONG)).await.unwrap());
    let held = semaphore.acquire("x", &policy(LONG)).await.unwrap();
    sleep(Duration::from_millis(400)).await;
    // a is gone with its data. b is known, and its connection is being reopened.
    world.set(|world| &world.a_ends, true);
    world.set(|world| &world.b_is_slow, true);
    world.cut();
    semaphore.try_acquire("x", &policy(LONG)).await.unwrap_err();
    assert!(!held.is_lost());
}

/// Both connections of a process break; meanwhile an operator pauses x. The server that counts x is back first.
#[tokio::test(start_paused = true)]
async fn what_is_set_is_read_again_before_the_first_call_to_any_server() {
    let (world, semaphore) = one_process(World::default());
    drop(semaphore.acquire("x", &policy(LEASE)).await.unwrap());
    sleep(Duration::from_secs(2)).await;
    // From here on, b takes 100 ms to accept a connection. It is there, and answers.
    world.set(|world| &world.b_is_slow, true);
    world.set(|world| &world.down, true);
    world.cut();
    sleep(Duration::from_millis(5)).await;
    let pause =
        world.memory.set_override(&OVERRIDES.into(), &"x".into(), Change::Mode(Mode::Paused));
    pause.await.unwrap();
    world.set(|world| &world.down, false);
    let answer = loop {
        match semaphore.try_acquire("x", &policy(LEASE)).await {
            Err(AcquireError::Unavailable(_)) => sleep(Duration::from_millis(1)).await,
            answer => break answer,
        }
    };
    // a is connected after 25 ms at most, b after 112 ms at least.
    match answer {
        Err(AcquireError::Rejected(rejected)) => assert_eq!(rejected.reason, RejectReason::Paused),
        other => panic!("a paused semaphore granted a permit after a reconnect: {other:?}"),
    }
}

/// A process starts just after the slot of the overrides has moved, with a map from a node that does not know yet.
#[tokio::test(start_paused = true)]
async fn a_first_call_waits_for_overrides_that_have_just_moved() {
    let (world, semaphore) = one_process(World::default());
    world.set(|world| &world.a_kept, true);
    world.set(|world| &world.b_is_slow, true);
    let pause =
        world.memory.set_override(&OVERRIDES.into(), &"x".into(), Change::Mode(Mode::Paused));
    pause.await.unwrap();
    let rejected = match semaphore.try_acquire("x", &policy(LEASE)).await {
        Err(AcquireError::Rejected(rejected)) => rejected,
        other => panic!("the first call passed a pause: {other:?}"),
    };
    assert_eq!(rejected.reason, RejectReason::Paused);
}

/// b answers calls all the time, but not each question for overrides.
async fn one_process_of_a_busy_server(world: World) -> (Arc<World>, Semaphore) {
    let (world, semaphore) = one_process(world);
    drop(semaphore.acquire("warm", &policy(LEASE)).await.unwrap());
    *world.busy_until.lock().unwrap() = Some(Instant::now() + LONG);
    (world, semaphore)
}

#[tokio::test(start_paused = true)]
async fn an_operators_question_that_is_lost_is_asked_again_at_once() {
    let (world, semaphore) = one_process_of_a_busy_server(World::default()).await;
    world.lost_questions.store(1, Ordering::SeqCst);
    let began = Instant::now();
    semaphore.limit_of("x").await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(600), "{:?}", began.elapsed());
    assert_eq!(world.connects.load(Ordering::SeqCst), 1, "connections opened");
}

#[tokio::test(start_paused = true)]
async fn a_first_call_passes_no_pause_because_questions_are_lost() {
    let response_timeout = Some(Duration::from_millis(100));
    let world = World { response_timeout, ..World::default() };
    let (world, semaphore) = one_process_of_a_busy_server(world).await;
    // That after the message, and that before the first call to a.
    world.lost_questions.store(2, Ordering::SeqCst);
    let pause =
        world.memory.set_override(&OVERRIDES.into(), &"x".into(), Change::Mode(Mode::Paused));
    pause.await.unwrap();
    match semaphore.try_acquire("x", &policy(LEASE)).await {
        Err(AcquireError::Rejected(rejected)) => assert_eq!(rejected.reason, RejectReason::Paused),
        other => panic!("the first call passed a pause: {other:?}"),
    }
}

/// Two names, one of which the server takes its time for, and a permit of the other.
async fn while_one_is_hot() -> (Arc<World>, Semaphore, impl Future<Output = Permit>, Permit) {
    let (world, semaphore) = one_process(settled());
    drop(semaphore.acquire("warm", &policy(LEASE)).await.unwrap());
    world.set(|world| &world.is_hot, true);
    let hot = tokio::spawn(semaphore.acquire("hot", &policy(LEASE)));
    // Both are sent in one batch.
    let quiet = semaphore.acquire("quiet", &policy(LEASE)).await.unwrap();
    assert!(!hot.is_finished());
    (world, semaphore, async { hot.await.unwrap().unwrap() }, quiet)
}

#[tokio::test(start_paused = true)]
async fn a_call_that_takes_long_holds_up_no_other_name() {
    let (world, semaphore, hot, quiet) = while_one_is_hot().await;
    for _ in 0..30 {
        drop(semaphore.acquire("other", &policy(LEASE)).await.unwrap());
        sleep(Duration::from_millis(100)).await;
    }
    let connects = world.connects.load(Ordering::SeqCst);
    world.set(|world| &world.is_hot, false);
    world.cool.notify_waiters();
    drop((hot.await, quiet));
    assert_eq!(world.connects.load(Ordering::SeqCst), connects, "the connection is good");
}

/// Each batch has a call for it, and none is answered as a whole.
#[tokio::test(start_paused = true)]
async fn nor_do_many_calls_for_it() {
    let (world, semaphore, hot, quiet) = while_one_is_hot().await;
    let mut more = Vec::new();
    for _ in 0..100 {
        more.push(tokio::spawn(semaphore.acquire("hot", &policy(LEASE))));
        drop(semaphore.acquire("other", &policy(LEASE)).await.unwrap());
    }
    world.set(|world| &world.is_hot, false);
    world.cool.notify_waiters();
    drop((hot.await, quiet));
    for waits in more {
        drop(waits.await.unwrap().unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_answered_of_a_batch_is_not_asked_for_again() {
    let (world, semaphore, hot, quiet) = while_one_is_hot().await;
    world.set(|world| &world.is_hot, false);
    world.cut();
    let hot = hot.await;
    let seen = [semaphore.inspect("hot").await.unwrap(), semaphore.inspect("quiet").await.unwrap()];
    assert_eq!(seen.map(|seen| (seen.in_use, seen.waiting)), [(1, 0); 2]);
    drop((hot, quiet));
}
