//! The same with a server, where a call is in flight for a while. A proxy holds back what passes, so that a call can be
//! dropped in each phase, and the connection can then go on or break.
//!
//! The lease is far longer than the waits in these tests, so that nothing is left because it was released, not because
//! its lease ended. There is one exception, which the design allows to leave something for a lease: an acquire that
//! the network delivers to Redis after its release. With etcd, it finds that the semaphore has changed.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::task::JoinHandle;
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, service_fn};
use tower_semaphore::backend::RedisBackend;
use tower_semaphore::limit::ResponseBody;
use tower_semaphore::{
    AcquireError, ConcurrencyLimitLayer, ConnectionState, Permit, Policy, RejectReason, Semaphore,
};

#[cfg(feature = "etcd")]
use crate::support::etcd::TestEtcd;
use crate::support::eventually;
use crate::support::proxy::{Proxy, REPLIES, REQUESTS};
use crate::support::redis::TestRedis;

const WAIT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(60);
/// For calls that leave nothing, whatever happens.
const GIVEN_BACK: Lease = Lease { usual: LEASE, late: None };
/// For an acquire: what arrives late may stay for its lease.
const BY_LEASE: Lease = Lease { usual: LEASE, late: Some(Policy::MIN_LEASE) };
/// The time in which everything is released that does not wait for a lease. Generous, but far below `LEASE`.
const SOON: Duration = Duration::from_secs(5);

/// The server of a test.
#[derive(Clone)]
enum Server {
    Redis(Arc<TestRedis>),
    #[cfg(feature = "etcd")]
    Etcd(Arc<TestEtcd>),
}

impl Server {
    fn redis() -> Self {
        Self::Redis(Arc::new(TestRedis::start()))
    }

    #[cfg(feature = "etcd")]
    fn etcd() -> Self {
        Self::Etcd(Arc::new(TestEtcd::start()))
    }

    fn port(&self) -> u16 {
        match self {
            Self::Redis(redis) => redis.port(),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.client_port(),
        }
    }

    /// Creates a process that reaches the server directly.
    fn semaphore(&self) -> Semaphore {
        match self {
            Self::Redis(redis) => redis.semaphore(),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.semaphore(),
        }
    }

    /// Creates a process that reaches the server through a proxy, and does not give up what that holds back for a while.
    fn semaphore_behind(&self, proxy: &Proxy) -> Semaphore {
        match self {
            Self::Redis(_) => {
                let backend = RedisBackend::builder(proxy.url());
                let backend = backend.response_timeout(Duration::from_secs(20));
                Semaphore::new(backend.build().unwrap())
            }
            // Its second is longer than a cell takes.
            #[cfg(feature = "etcd")]
            Self::Etcd(_) => Semaphore::etcd(&format!("etcd://{}", proxy.address())).unwrap(),
        }
    }

    /// Whether what a call of this lease left may stay until that ends.
    fn leaves(&self, lease: Lease, then: Then) -> Option<Duration> {
        match self {
            Self::Redis(_) => lease.late.filter(|_| then == ArrivesLate),
            #[cfg(feature = "etcd")]
            Self::Etcd(_) => None,
        }
    }

    /// Whether a call that is dropped in this phase has something to send before the answer comes. With etcd, it waits for the
    /// transaction that is under way.
    const fn sends_at_once(&self, phase: Phase) -> bool {
        matches!(self, Self::Redis(_)) || matches!(phase, Unsent | Answered)
    }

    /// Returns the number of semaphores that are stored.
    async fn count(&self) -> u64 {
        self.stored("").await
    }

    async fn exists(&self, name: &str) -> bool {
        self.stored(name).await > 0
    }

    /// Returns how many semaphores are stored, or whether this one is.
    async fn stored(&self, name: &str) -> u64 {
        let (server, name) = (self.clone(), name.to_owned());
        let stored = move || match server {
            Self::Redis(redis) if name.is_empty() => redis.keys(),
            Self::Redis(redis) => redis.command(&["EXISTS", &format!("semaphore:{{{name}}}")]),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => {
                let key = format!("semaphore/s/{name}");
                let key = if name.is_empty() { key } else { key + "/" };
                etcd.ctl(&["get", "--prefix", "--keys-only", &key]).split_whitespace().count()
                    as u64
            }
        };
        tokio::task::spawn_blocking(stored).await.unwrap()
    }
}

/// Makes a test of each function on each server.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod redis {
            $(#[tokio::test]
            async fn $name() {
                super::$name(super::Server::redis()).await;
            })*
        }
        #[cfg(feature = "etcd")]
        mod etcd {
            $(#[tokio::test]
            async fn $name() {
                super::$name(super::Server::etcd()).await;
            })*
        }
    };
}

on_both! {
    an_acquire_that_is_dropped_under_the_cap_leaves_nothing
    an_acquire_that_is_dropped_in_the_queue_leaves_nothing_and_stands_in_nobodys_way
    an_acquire_that_is_dropped_at_a_full_queue_leaves_nothing
    a_grant_that_reaches_nobody_any_more_is_given_back
    a_waiter_that_gave_up_leaves_nothing_however_its_leaving_fares
    a_release_that_is_dropped_is_carried_out
    a_permit_that_is_dropped_is_given_back_however_that_fares
    a_permit_that_is_dropped_while_it_is_renewed_leaves_nothing
    a_waiter_that_is_dropped_while_it_is_renewed_leaves_nothing
    to_stop_waiting_for_the_loss_of_a_permit_changes_nothing
    an_inspection_that_is_dropped_changes_nothing
    a_shutdown_that_is_dropped_gives_everything_back
    a_request_that_is_dropped_under_the_cap_leaves_nothing
    a_request_that_is_dropped_in_the_queue_leaves_nothing
    a_request_that_is_dropped_in_its_handler_leaves_nothing_however_that_fares
    a_body_that_is_dropped_after_any_frame_leaves_nothing_however_that_fares
    a_permit_may_be_dropped_on_a_thread_without_a_runtime
    a_permit_of_a_semaphore_that_is_gone_is_given_back_over_a_broken_connection
    an_acquire_made_anew_in_each_round_of_a_loop_leaves_nothing_stored
    aborting_and_panicking_while_holding_or_waiting_leaves_nothing_stored
}

/// How far a call has come when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Polled, but not written yet.
    Unsent,
    /// In flight to Redis.
    Sent,
    /// Executed, with its answer in flight.
    Executed,
    /// Answered, and its task is woken, but it is not polled any more.
    Answered,
}

/// What happens to the connection afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It goes on.
    GoesOn,
    /// It breaks, and everything in flight is lost.
    Breaks,
    /// It breaks after the messages of the drop were written; these are lost as well.
    BreaksLater,
    /// It breaks on this side. What is in flight to Redis arrives after everything that this process sends on its next
    /// connection.
    ArrivesLate,
}

use Phase::{Answered, Executed, Sent, Unsent};
use Then::{ArrivesLate, Breaks, BreaksLater, GoesOn};

/// The cells of a call whose drop has something to send.
const ALL: &[(Phase, Then)] = &[
    (Unsent, GoesOn),
    (Unsent, Breaks),
    (Sent, GoesOn),
    (Sent, Breaks),
    (Sent, BreaksLater),
    (Sent, ArrivesLate),
    (Executed, GoesOn),
    (Executed, Breaks),
    (Executed, BreaksLater),
    (Answered, GoesOn),
    (Answered, Breaks),
    (Answered, BreaksLater),
];

/// The cells of a call whose drop has nothing to send any more.
fn said() -> Vec<(Phase, Then)> {
    ALL.iter().copied().filter(|(_, then)| *then != BreaksLater).collect()
}

/// The cells of a call that sends something when it is dropped, and nothing before.
const ON_DROP: &[(Phase, Then)] = &[
    (Unsent, GoesOn),
    (Unsent, Breaks),
    (Sent, GoesOn),
    (Sent, Breaks),
    (Sent, ArrivesLate),
    (Executed, GoesOn),
    (Executed, Breaks),
];

#[derive(Clone, Copy)]
struct Lease {
    usual: Duration,
    /// The lease of a call that arrives late, if something of it may stay.
    late: Option<Duration>,
}

/// One cell of the table.
struct Cell {
    what: String,
    name: String,
    phase: Phase,
    then: Then,
    lease: Duration,
    /// Whether the design allows it to stay until its lease ends.
    by_lease: bool,
    proxy: Proxy,
    /// The process under test, behind the proxy.
    near: Semaphore,
    /// Another one.
    far: Semaphore,
    server: Server,
    /// Since when nothing is in the way any more.
    began: Instant,
}

impl Cell {
    fn policy(&self, limit: u32) -> Policy {
        Policy::builder(limit).wait_timeout(WAIT).lease(self.lease).build().unwrap()
    }

    async fn exists(&self) -> bool {
        self.server.exists(&self.name).await
    }

    async fn places(&self) -> (u64, u64) {
        let seen = self.far.inspect(&*self.name).await.unwrap();
        (seen.in_use, seen.waiting)
    }

    async fn until_places(&self, places: (u64, u64)) {
        let what = format!("{}: {places:?} hold and wait", self.what);
        eventually(&what, async || self.places().await == places).await;
    }

    async fn until_held(&self, way: usize, more_than: usize) {
        let what = format!("{}: something is on its way", self.what);
        eventually(&what, async || self.proxy.held(way) > more_than).await;
    }

    /// Returns the direction that is blocked in this phase.
    fn blocked(&self) -> Option<usize> {
        match self.phase {
            Unsent | Answered => None,
            Sent => Some(REQUESTS),
            Executed => Some(REPLIES),
        }
    }

    /// Makes a call, and brings it to the phase of the cell.
    async fn reach<F: Future>(&self, call: F) -> task::Spawn<F> {
        let mut call = task::spawn(call);
        if let Some(way) = self.blocked() {
            self.proxy.hold(way);
        }
        assert!(call.poll().is_pending(), "{}", self.what);
        match (self.phase, self.blocked()) {
            (Unsent, _) => {}
            (_, Some(way)) => self.until_held(way, 0).await,
            (_, None) => {
                let what = format!("{}: answered", self.what);
                eventually(&what, async || call.is_woken()).await;
            }
        }
        call
    }

    /// Drops it there, and continues as the cell says.
    async fn drop_there<T>(&mut self, call: T) {
        let before = [self.proxy.held(REQUESTS), self.proxy.held(REPLIES)];
        let connections = self.proxy.connections();
        if self.then == BreaksLater && self.blocked().is_none() {
            self.proxy.hold(REQUESTS);
        }
        drop(call);
        match self.then {
            GoesOn => self.proxy.flow(),
            Breaks => self.proxy.cut(),
            BreaksLater => {
                let way = self.blocked().unwrap_or(REQUESTS);
                self.until_held(way, before[way]).await;
                self.proxy.cut();
            }
            ArrivesLate => {
                self.proxy.cut_near();
                let what = format!("{}: a new connection", self.what);
                eventually(&what, async || {
                    self.proxy.connections() > connections
                        && matches!(self.near.health().connection, ConnectionState::Up)
                        && self.near.inspect(&*self.name).await.is_ok()
                })
                .await;
                self.proxy.flow();
            }
        }
        self.began = Instant::now();
    }

    /// Waits until the request of another process has its permit, and drops that.
    async fn is_served(&self, other: JoinHandle<Result<Permit, AcquireError>>) {
        let served = tokio::time::timeout(SOON, other).await;
        drop(served.expect(&self.what).unwrap().expect(&self.what));
    }

    /// Asserts that nothing is left of it: no key, no permit, no waiter. Returns how long that took.
    async fn nothing_left(&self) -> Duration {
        let what = format!("{}: nobody holds or waits", self.what);
        eventually(&what, async || {
            // A place whose lease has ended is not listed any more, but counted until it is swept.
            let seen = self.far.inspect(&*self.name).await.unwrap();
            seen.holders.is_empty() && seen.waiters.is_empty()
        })
        .await;
        let took = self.began.elapsed();
        let second = Duration::from_secs(1);
        let bound = if self.by_lease { self.lease + second } else { SOON };
        assert!(took < bound, "{}: {took:?}", self.what);
        // The key of a place whose lease has ended is removed when it is used, or by its own expiry.
        let what = format!("{}: nothing is stored", self.what);
        eventually(&what, async || !self.exists().await).await;
        let stored = self.began.elapsed();
        let bound = if self.by_lease { 3 * self.lease + 2 * second } else { SOON };
        assert!(stored < bound, "{}: {stored:?}", self.what);
        // The cap can be reached, from here and from elsewhere, and not exceeded.
        let policy = self.policy(2);
        let one = self.far.try_acquire(&*self.name, &policy).await.expect(&self.what);
        // Its connection may still be on its way back.
        let what = format!("{}: it is answered again", self.what);
        let two = RefCell::new(Err(AcquireError::Closed));
        eventually(&what, async || {
            let answer = self.near.acquire(&*self.name, &policy).await;
            let is_answered = !matches!(answer, Err(AcquireError::Unavailable(_)));
            *two.borrow_mut() = answer;
            is_answered
        })
        .await;
        let two = two.into_inner();
        if !matches!(two, Err(AcquireError::Closed)) {
            let two = two.expect(&self.what);
            assert!(self.far.try_acquire(&*self.name, &policy).await.is_err(), "{}", self.what);
            two.release().await.expect(&self.what);
        }
        one.release().await.expect(&self.what);
        assert!(!self.exists().await, "{}", self.what);
        took
    }
}

/// Tests all cells at once, each with its own proxy and process; then nothing is stored.
async fn table(
    server: Server,
    what: &str,
    cells: &[(Phase, Then)],
    lease: Lease,
    test: impl AsyncFn(&mut Cell) -> Duration,
) {
    let far = server.semaphore();
    let cells =
        cells.iter().filter(|(phase, then)| *then != BreaksLater || server.sends_at_once(*phase));
    let rows = cells.enumerate().map(async |(i, (phase, then))| {
        let proxy = Proxy::start(server.port()).await;
        let near = server.semaphore_behind(&proxy);
        let name = format!("cell-{i}");
        // All connect at once, while other tests run: the first answers may take longer than a request waits for one.
        let first = format!("{what}, {name}: it is answered");
        eventually(&first, async || near.inspect(&*name).await.is_ok()).await;
        near.acquire(&*name, &Policy::new(1)).await.unwrap().release().await.unwrap();
        let mut cell = Cell {
            what: format!("{what}, {phase:?}, {then:?}"),
            name,
            phase: *phase,
            then: *then,
            lease: server.leaves(lease, *then).unwrap_or(lease.usual),
            by_lease: server.leaves(lease, *then).is_some(),
            proxy,
            near,
            far: far.clone(),
            server: server.clone(),
            began: Instant::now(),
        };
        let took = test(&mut cell).await;
        let by = if cell.by_lease { "by its lease" } else { "given back" };
        format!(
            "{what:<28} {:<10} {:<12} {took:>8.1?}  {by}",
            format!("{phase:?}"),
            format!("{then:?}")
        )
    });
    for row in join_all(rows).await {
        eprintln!("{row}");
    }
    assert_eq!(server.count().await, 0);
}

// ===== acquire =====

async fn an_acquire_that_is_dropped_under_the_cap_leaves_nothing(server: Server) {
    table(server, "acquire, free", ALL, BY_LEASE, async |cell| {
        let call = cell.reach(cell.near.acquire(&*cell.name, &cell.policy(1))).await;
        cell.drop_there(call).await;
        // A caller that wants it has it, even before.
        let next = cell.far.acquire(&*cell.name, &cell.policy(1)).await.unwrap();
        next.release().await.unwrap();
        cell.nothing_left().await
    })
    .await;
}

async fn an_acquire_that_is_dropped_in_the_queue_leaves_nothing_and_stands_in_nobodys_way(
    server: Server,
) {
    table(server, "acquire, full", ALL, BY_LEASE, async |cell| {
        let policy = Policy::builder(1).wait_timeout(WAIT).lease(LEASE).build().unwrap();
        let held = cell.far.acquire(&*cell.name, &policy).await.unwrap();
        let queue = async |ahead| {
            let waits = tokio::spawn(cell.far.acquire(&*cell.name, &policy));
            cell.until_places((1, ahead + 1)).await;
            Some(waits)
        };
        // Waiting would give the unwritten call the time to be written.
        let before = if cell.phase == Unsent { queue(0).await } else { None };
        let call = cell.reach(cell.near.acquire(&*cell.name, &cell.policy(1))).await;
        let other = match before {
            Some(waits) => waits,
            None => {
                let ahead = u64::from(matches!(cell.phase, Executed | Answered));
                cell.until_places((1, ahead)).await;
                queue(ahead).await.expect("it waits")
            }
        };
        cell.drop_there(call).await;
        drop(held);
        cell.is_served(other).await;
        cell.nothing_left().await
    })
    .await;
}

async fn an_acquire_that_is_dropped_at_a_full_queue_leaves_nothing(server: Server) {
    table(server, "acquire, queue full", ALL, BY_LEASE, async |cell| {
        let policy =
            Policy::builder(1).wait_timeout(WAIT).lease(LEASE).max_queue(1).build().unwrap();
        let held = cell.far.acquire(&*cell.name, &policy).await.unwrap();
        let waits = tokio::spawn(cell.far.acquire(&*cell.name, &policy));
        cell.until_places((1, 1)).await;
        let call = cell.reach(cell.near.acquire(&*cell.name, &policy)).await;
        if cell.phase == Answered && cell.then == BreaksLater {
            // It was rejected, so nothing is to be taken back.
            cell.then = Breaks;
        }
        cell.drop_there(call).await;
        assert_eq!(cell.places().await, (1, 1), "{}", cell.what);
        drop(held);
        drop(waits.await.unwrap().unwrap());
        cell.nothing_left().await
    })
    .await;
}

async fn a_grant_that_reaches_nobody_any_more_is_given_back(server: Server) {
    let cells = [
        (Executed, GoesOn),
        (Executed, Breaks),
        (Executed, BreaksLater),
        (Answered, GoesOn),
        (Answered, Breaks),
        (Answered, BreaksLater),
    ];
    table(server, "acquire, granted meanwhile", &cells, GIVEN_BACK, async |cell| {
        let policy = cell.policy(1);
        let held = cell.far.acquire(&*cell.name, &policy).await.unwrap();
        let mut call = task::spawn(cell.near.acquire(&*cell.name, &policy));
        assert_pending!(call.poll());
        // It knows that it waits.
        eventually(&cell.what, async || call.is_woken()).await;
        assert_pending!(call.poll());
        let behind = tokio::spawn(cell.far.acquire(&*cell.name, &policy));
        cell.until_places((1, 2)).await;
        if cell.phase == Executed {
            cell.proxy.hold(REPLIES);
        }
        held.release().await.unwrap();
        assert_eq!(cell.places().await, (1, 1), "{}", cell.what);
        match cell.phase {
            Executed => cell.until_held(REPLIES, 0).await,
            _ => eventually(&cell.what, async || call.is_woken()).await,
        }
        cell.drop_there(call).await;
        cell.is_served(behind).await;
        cell.nothing_left().await
    })
    .await;
}

async fn a_waiter_that_gave_up_leaves_nothing_however_its_leaving_fares(server: Server) {
    table(server, "acquire, timed out", ON_DROP, GIVEN_BACK, async |cell| {
        let policy = cell.policy(1);
        let held = cell.far.acquire(&*cell.name, &policy).await.unwrap();
        let patience = Duration::from_millis(300);
        let brief = Policy::builder(1).wait_timeout(patience).lease(cell.lease).build().unwrap();
        let mut call = Box::pin(cell.near.acquire(&*cell.name, &brief));
        let mut polled = task::spawn(&mut call);
        assert_pending!(polled.poll());
        cell.until_places((1, 1)).await;
        if let Some(way) = cell.blocked() {
            cell.proxy.hold(way);
        }
        match polled.await {
            Err(AcquireError::Rejected(rejected)) => {
                assert_eq!(rejected.reason, RejectReason::QueueTimeout)
            }
            other => panic!("{}: {other:?}", cell.what),
        }
        if let Some(way) = cell.blocked() {
            cell.until_held(way, 0).await;
        }
        cell.drop_there(call).await;
        if cell.then != ArrivesLate {
            cell.until_places((1, 0)).await;
        }
        drop(held);
        cell.nothing_left().await
    })
    .await;
}

// ===== release =====

async fn a_release_that_is_dropped_is_carried_out(server: Server) {
    table(server, "release", &said(), GIVEN_BACK, async |cell| {
        let permit = cell.near.acquire(&*cell.name, &cell.policy(1)).await.unwrap();
        let behind = tokio::spawn(cell.far.acquire(&*cell.name, &cell.policy(1)));
        cell.until_places((1, 1)).await;
        let call = cell.reach(permit.release()).await;
        cell.drop_there(call).await;
        cell.is_served(behind).await;
        cell.nothing_left().await
    })
    .await;
}

async fn a_permit_that_is_dropped_is_given_back_however_that_fares(server: Server) {
    table(server, "permit", ON_DROP, GIVEN_BACK, async |cell| {
        let permit = cell.near.acquire(&*cell.name, &cell.policy(1)).await.unwrap();
        let behind = tokio::spawn(cell.far.acquire(&*cell.name, &cell.policy(1)));
        cell.until_places((1, 1)).await;
        let call = cell.reach(dropping(permit)).await;
        cell.drop_there(call).await;
        cell.is_served(behind).await;
        cell.nothing_left().await
    })
    .await;
}

/// Drops it when it is polled, and then never completes.
async fn dropping<T>(what: T) {
    drop(what);
    pending::<()>().await;
}

// ===== renew, lost =====

/// Long enough for these tests, and renewed every two seconds.
const RENEWED: Duration = Duration::from_secs(6);

/// Waits until a renewal has come to the phase of the cell.
async fn renewal(cell: &Cell, interval: Duration) {
    match cell.blocked() {
        Some(way) => {
            cell.proxy.hold(way);
            cell.until_held(way, 0).await;
        }
        None if cell.phase == Answered => tokio::time::sleep(interval + interval / 4).await,
        None => {}
    }
}

async fn a_permit_that_is_dropped_while_it_is_renewed_leaves_nothing(server: Server) {
    table(server, "permit, renewed", ALL, Lease { usual: RENEWED, late: None }, async |cell| {
        let policy = Policy::builder(1).lease(RENEWED).wait_timeout(WAIT).build().unwrap();
        let permit = cell.near.acquire(&*cell.name, &policy).await.unwrap();
        let mut lost = task::spawn(permit.lost());
        assert_pending!(lost.poll());
        renewal(cell, RENEWED / 3).await;
        assert_pending!(lost.poll());
        drop(lost);
        // A renewal that arrives after the release does not bring the place back.
        cell.drop_there(permit).await;
        cell.nothing_left().await
    })
    .await;
}

async fn a_waiter_that_is_dropped_while_it_is_renewed_leaves_nothing(server: Server) {
    table(server, "acquire, renewed", ALL, GIVEN_BACK, async |cell| {
        let policy = Policy::builder(1).lease(LEASE).wait_timeout(WAIT).build().unwrap();
        let held = cell.far.acquire(&*cell.name, &policy).await.unwrap();
        let mut call = task::spawn(cell.near.acquire(&*cell.name, &policy));
        assert_pending!(call.poll());
        cell.until_places((1, 1)).await;
        renewal(cell, Duration::from_secs(1)).await;
        cell.drop_there(call).await;
        cell.until_places((1, 0)).await;
        drop(held);
        cell.nothing_left().await
    })
    .await;
}

async fn to_stop_waiting_for_the_loss_of_a_permit_changes_nothing(server: Server) {
    table(server, "lost", &said(), Lease { usual: RENEWED, late: None }, async |cell| {
        let policy = Policy::builder(1).lease(RENEWED).wait_timeout(WAIT).build().unwrap();
        let permit = cell.near.acquire(&*cell.name, &policy).await.unwrap();
        let watched = permit.clone();
        let mut lost = task::spawn(async move { watched.lost().await });
        assert_pending!(lost.poll());
        renewal(cell, RENEWED / 3).await;
        cell.drop_there(lost).await;
        // It is still held and renewed, and its loss can be awaited again.
        let lease = tokio::time::timeout(RENEWED + RENEWED / 4, permit.lost()).await;
        assert!(lease.is_err(), "{}: the permit was lost", cell.what);
        assert!(cell.far.try_acquire(&*cell.name, &policy).await.is_err(), "{}", cell.what);
        cell.began = Instant::now();
        drop(permit);
        cell.nothing_left().await
    })
    .await;
}

#[tokio::test]
async fn a_permit_that_was_lost_while_its_renewal_was_on_its_way_leaves_nothing() {
    let cells = [(Sent, GoesOn), (Sent, Breaks), (Executed, GoesOn), (Executed, Breaks)];
    table(
        Server::redis(),
        "lost, for good",
        &cells,
        Lease { usual: Policy::MIN_LEASE, late: None },
        async |cell| {
            let permit = cell.near.acquire(&*cell.name, &cell.policy(1)).await.unwrap();
            renewal(cell, Duration::ZERO).await;
            permit.lost().await;
            // The late renewal and its answer do not revive it.
            cell.drop_there(()).await;
            eventually(&cell.what, async || cell.near.inspect(&*cell.name).await.is_ok()).await;
            assert!(permit.is_lost(), "{}", cell.what);
            let took = cell.nothing_left().await;
            assert!(permit.is_lost(), "{}", cell.what);
            took
        },
    )
    .await;
}

// ===== inspect, shutdown =====

async fn an_inspection_that_is_dropped_changes_nothing(server: Server) {
    table(server, "inspect", &said(), GIVEN_BACK, async |cell| {
        let policy = Policy::builder(1).lease(LEASE).build().unwrap();
        let permit = cell.near.acquire(&*cell.name, &policy).await.unwrap();
        let (near, name) = (cell.near.clone(), cell.name.clone());
        let call = cell.reach(async move { near.inspect(name).await }).await;
        cell.drop_there(call).await;
        cell.until_places((1, 0)).await;
        let what = format!("{}: the next one is answered", cell.what);
        eventually(&what, async || {
            cell.near.inspect(&*cell.name).await.is_ok_and(|seen| seen.holders[0].is_own)
        })
        .await;
        assert!(!permit.is_lost(), "{}", cell.what);
        cell.began = Instant::now();
        drop(permit);
        cell.nothing_left().await
    })
    .await;
}

async fn a_shutdown_that_is_dropped_gives_everything_back(server: Server) {
    let cells: Vec<_> = said().into_iter().filter(|(_, then)| *then != ArrivesLate).collect();
    table(server, "shutdown", &cells, GIVEN_BACK, async |cell| {
        let permit = cell.near.acquire(&*cell.name, &cell.policy(1)).await.unwrap();
        let waits = tokio::spawn(cell.near.acquire(&*cell.name, &cell.policy(1)));
        cell.until_places((1, 1)).await;
        let behind = tokio::spawn(cell.far.acquire(&*cell.name, &cell.policy(1)));
        cell.until_places((1, 2)).await;
        let near = cell.near.clone();
        let call = cell.reach(async move { near.shutdown().await }).await;
        cell.drop_there(call).await;
        assert!(matches!(waits.await.unwrap(), Err(AcquireError::Closed)), "{}", cell.what);
        assert!(permit.is_lost(), "{}", cell.what);
        cell.is_served(behind).await;
        cell.nothing_left().await
    })
    .await;
}

// ===== the layer =====

type Frames = Pin<Box<dyn http_body::Body<Data = Bytes, Error = Infallible> + Send>>;

/// The layer over a handler that answers at once, with three frames; or never.
fn layered(
    cell: &Cell,
    answers: bool,
) -> impl Service<
    Request<()>,
    Response = Response<ResponseBody<Frames>>,
    Error = Infallible,
    Future: Send,
> + use<> {
    let handler = service_fn(move |request: Request<()>| async move {
        assert!(request.extensions().get::<Permit>().is_some());
        if !answers {
            pending::<()>().await;
        }
        let frames = (0..3).map(|_| Ok(Frame::data(Bytes::from_static(b"frame"))));
        let body = StreamBody::new(futures_util::stream::iter(frames));
        Ok::<_, Infallible>(Response::new(Box::pin(body) as Frames))
    });
    let layer = ConcurrencyLimitLayer::builder(&cell.near, &*cell.name)
        .limit(1)
        .wait_timeout(WAIT)
        .lease(cell.lease);
    layer.build().unwrap().layer(handler)
}

async fn a_request_that_is_dropped_under_the_cap_leaves_nothing(server: Server) {
    table(server, "request, free", ALL, BY_LEASE, async |cell| {
        let call = cell.reach(layered(cell, true).call(Request::new(()))).await;
        cell.drop_there(call).await;
        cell.nothing_left().await
    })
    .await;
}

async fn a_request_that_is_dropped_in_the_queue_leaves_nothing(server: Server) {
    table(server, "request, full", ALL, BY_LEASE, async |cell| {
        let policy = Policy::builder(1).wait_timeout(WAIT).lease(LEASE).build().unwrap();
        let held = cell.far.acquire(&*cell.name, &policy).await.unwrap();
        let call = cell.reach(layered(cell, true).call(Request::new(()))).await;
        cell.drop_there(call).await;
        drop(held);
        cell.nothing_left().await
    })
    .await;
}

async fn a_request_that_is_dropped_in_its_handler_leaves_nothing_however_that_fares(
    server: Server,
) {
    table(server, "request, in its handler", ON_DROP, GIVEN_BACK, async |cell| {
        let mut call = Box::pin(layered(cell, false).call(Request::new(())));
        let mut polled = task::spawn(&mut call);
        assert!(polled.poll().is_pending());
        eventually(&cell.what, async || polled.is_woken()).await;
        assert!(polled.poll().is_pending());
        drop(polled);
        cell.until_places((1, 0)).await;
        let call = cell.reach(dropping(call)).await;
        cell.drop_there(call).await;
        cell.nothing_left().await
    })
    .await;
}

async fn a_body_that_is_dropped_after_any_frame_leaves_nothing_however_that_fares(server: Server) {
    for frames in 0..=4 {
        table(
            server.clone(),
            &format!("body, after {frames} polls"),
            ON_DROP,
            GIVEN_BACK,
            async |cell| {
                let response = layered(cell, true).call(Request::new(())).await.unwrap();
                let mut body = response.into_body();
                for _ in 0..frames.min(3) {
                    assert!(body.frame().await.unwrap().is_ok());
                }
                cell.until_places((1, 0)).await;
                if frames < 4 {
                    let call = cell.reach(dropping(body)).await;
                    cell.drop_there(call).await;
                } else {
                    // It is released at its end, not when the body is gone.
                    let call = cell
                        .reach(async move {
                            assert!(body.frame().await.is_none());
                            let _body = body;
                            pending::<()>().await;
                        })
                        .await;
                    if cell.phase != Unsent {
                        cell.drop_there(()).await;
                        cell.nothing_left().await;
                        drop(call);
                    } else {
                        cell.drop_there(call).await;
                    }
                }
                cell.nothing_left().await
            },
        )
        .await;
    }
}

// ===== how and where it is dropped =====

async fn a_permit_may_be_dropped_on_a_thread_without_a_runtime(server: Server) {
    let semaphore = server.semaphore();
    let policy = Policy::builder(1).wait_timeout(WAIT).lease(LEASE).build().unwrap();
    let permit = semaphore.acquire("x", &policy).await.unwrap();
    let mut waits = Box::pin(semaphore.acquire("x", &policy));
    assert_pending!(task::spawn(&mut waits).poll());
    eventually("it waits", async || semaphore.inspect("x").await.unwrap().waiting == 1).await;
    std::thread::spawn(move || drop((waits, permit))).join().unwrap();
    eventually("nothing is stored", async || server.count().await == 0).await;
    // The last handle with what it had, before its first connection and after it.
    for connected in [false, true] {
        let one = server.semaphore();
        let acquire = one.acquire("x", &policy);
        if connected {
            let permit = acquire.await.unwrap();
            std::thread::spawn(move || drop((one, permit))).join().unwrap();
        } else {
            std::thread::spawn(move || drop((one, acquire))).join().unwrap();
        }
        eventually("nothing is stored", async || server.count().await == 0).await;
    }
}

#[test]
fn what_is_dropped_after_its_runtime_was_shut_down_comes_free_with_its_lease() {
    let redis = TestRedis::start();
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
    };
    let policy = |lease| Policy::builder(1).wait_timeout(WAIT).lease(lease).build().unwrap();
    let semaphore = redis.semaphore();
    let first = runtime();
    let (permit, waits) = first.block_on(async {
        let policy = policy(Policy::MIN_LEASE);
        let permit = semaphore.acquire("x", &policy).await.unwrap();
        let mut waits = Box::pin(semaphore.acquire("x", &policy));
        assert_pending!(task::spawn(&mut waits).poll());
        eventually("it waits", async || semaphore.inspect("x").await.unwrap().waiting == 1).await;
        (permit, waits)
    });
    first.shutdown_background();
    drop((permit, waits));
    let began = Instant::now();
    let second = runtime();
    second.block_on(async {
        // Another process, which receives no message.
        let other = redis.semaphore();
        let granted = other.acquire("x", &policy(LEASE)).await.unwrap();
        assert!(began.elapsed() < Policy::MIN_LEASE + Duration::from_secs(1));
        granted.release().await.unwrap();
        assert_eq!(redis.keys(), 0);
        // The semaphore works on with the next runtime.
        semaphore.acquire("x", &policy(LEASE)).await.unwrap().release().await.unwrap();
        assert_eq!(redis.keys(), 0);
    });
}

#[test]
fn no_memory_is_kept_in_whatever_order_permit_semaphore_and_runtime_go() {
    let redis = TestRedis::start();
    super::drops_in_each_order(|| RedisBackend::builder(redis.url()).build().unwrap());
}

async fn a_permit_of_a_semaphore_that_is_gone_is_given_back_over_a_broken_connection(
    server: Server,
) {
    let proxy = Proxy::start(server.port()).await;
    let policy = Policy::builder(1).wait_timeout(WAIT).lease(LEASE).build().unwrap();
    let semaphore = server.semaphore_behind(&proxy);
    let permit = semaphore.acquire("x", &policy).await.unwrap();
    drop(semaphore);
    proxy.hold(REQUESTS);
    drop(permit);
    eventually("the release is on its way", async || proxy.held(REQUESTS) > 0).await;
    proxy.cut();
    eventually("nothing is stored", async || server.count().await == 0).await;
}

async fn an_acquire_made_anew_in_each_round_of_a_loop_leaves_nothing_stored(server: Server) {
    let (a, b) = (server.semaphore(), server.semaphore());
    let policy = Policy::builder(1).wait_timeout(WAIT).lease(LEASE).build().unwrap();
    let mut held = Some(b.acquire("x", &policy).await.unwrap());
    let mut ticks = tokio::time::interval(Duration::from_millis(2));
    let mut rounds = 0;
    let permit = loop {
        tokio::select! {
            permit = a.acquire("x", &policy) => break permit.unwrap(),
            _ = ticks.tick() => rounds += 1,
        }
        if rounds == 100 {
            held = None;
        }
        // A caller that starts over again and again may never be granted; but not here.
        assert!(rounds < 5000);
    };
    assert!(held.is_none());
    eventually("none of the others waits", async || {
        let seen = b.inspect("x").await.unwrap();
        (seen.in_use, seen.waiting) == (1, 0)
    })
    .await;
    drop(permit);
    eventually("nothing is stored", async || server.count().await == 0).await;
}

async fn aborting_and_panicking_while_holding_or_waiting_leaves_nothing_stored(server: Server) {
    let semaphore = server.semaphore();
    let policy = Policy::builder(2).wait_timeout(WAIT).lease(LEASE).build().unwrap();
    let hold = |panics: Arc<tokio::sync::Notify>| {
        let acquire = semaphore.acquire("x", &policy);
        async move {
            let _permit = acquire.await.unwrap();
            panics.notified().await;
            panic!("while holding, as it is told to");
        }
    };
    let panics = Arc::new(tokio::sync::Notify::new());
    let holds = tokio::spawn(hold(Arc::clone(&panics)));
    let aborted = tokio::spawn(hold(Arc::default()));
    eventually("both hold", async || semaphore.inspect("x").await.unwrap().in_use == 2).await;
    let waits = tokio::spawn(hold(Arc::default()));
    eventually("one waits", async || semaphore.inspect("x").await.unwrap().waiting == 1).await;
    waits.abort();
    aborted.abort();
    panics.notify_one();
    assert!(holds.await.unwrap_err().is_panic());
    eventually("nothing is stored", async || server.count().await == 0).await;
}

/// What is left is found; otherwise the tables above prove nothing.
async fn an_acquire_that_is_forgotten_leaves_something(server: Server) {
    table(server, "acquire, forgotten", &[(Answered, GoesOn)], GIVEN_BACK, async |cell| {
        let call = cell.reach(cell.near.acquire(&*cell.name, &cell.policy(1))).await;
        cell.drop_there(std::mem::ManuallyDrop::new(call)).await;
        cell.nothing_left().await
    })
    .await;
}

#[tokio::test]
#[should_panic(expected = "nobody holds or waits")]
async fn what_is_left_in_redis_is_found() {
    an_acquire_that_is_forgotten_leaves_something(Server::redis()).await;
}

#[cfg(feature = "etcd")]
#[tokio::test]
#[should_panic(expected = "nobody holds or waits")]
async fn what_is_left_in_etcd_is_found() {
    an_acquire_that_is_forgotten_leaves_something(Server::etcd()).await;
}

/// The proxy does what it is for; otherwise the tables above prove nothing.
#[tokio::test]
async fn the_proxy_keeps_back_lets_go_and_breaks() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let redis = TestRedis::start();
    let proxy = Proxy::start(redis.port()).await;
    let address = proxy.url();
    let address = address.trim_start_matches("redis://").trim_end_matches('/');
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut pong = [0; 7];
    stream.write_all(b"PING\r\n").await.unwrap();
    stream.read_exact(&mut pong).await.unwrap();
    assert_eq!(&pong, b"+PONG\r\n");
    // Not executed.
    proxy.hold(REQUESTS);
    stream.write_all(b"SET a 1\r\n").await.unwrap();
    eventually("it is held", async || proxy.held(REQUESTS) == 9).await;
    assert_eq!(redis.keys(), 0);
    // Executed, not answered.
    proxy.hold(REPLIES);
    proxy.flow();
    stream.read_exact(&mut pong[..5]).await.unwrap();
    proxy.hold(REPLIES);
    stream.write_all(b"DEL a\r\n").await.unwrap();
    eventually("it is done", async || redis.keys() == 0).await;
    eventually("its answer is held", async || proxy.held(REPLIES) == 4).await;
    // Never answered.
    proxy.cut();
    assert_eq!(stream.read(&mut pong).await.unwrap_or(0), 0);
    assert_eq!(proxy.held(REPLIES), 0);
    // Executed after its sender has gone.
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    eventually("it is there", async || proxy.connections() == 2).await;
    proxy.hold(REQUESTS);
    stream.write_all(b"SET a 1\r\n").await.unwrap();
    eventually("it is held", async || proxy.held(REQUESTS) == 9).await;
    proxy.cut_near();
    assert_eq!(stream.read(&mut pong).await.unwrap_or(0), 0);
    assert_eq!(redis.keys(), 0);
    proxy.flow();
    eventually("it arrives", async || redis.keys() == 1).await;
}
