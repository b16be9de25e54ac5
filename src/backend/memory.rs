//! Permits counted in this process.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};

use super::{
    Backend, Change, Connection, Counter, Embedded, Listing, Mailbox, Names, Overrides,
    PeerMessage, Queries, Query, QueryError, Shard, listing,
};
use crate::error::BackendError;
use crate::protocol::{BoundRate, Call, Grant, Ledger, NodeId, PlaceId, Reply, Time};
use crate::sharded::{self, Guard, Sharded};
use crate::sync::{Mutex, lock};

/// The embedded backend: the [`Ledger`] behind a lock.
///
/// For a single process and for tests; [`MemoryServer`](super::MemoryServer) is for tests of outages. Clones share
/// their permits: several [`Semaphore`]s on clones of one backend behave like several processes on one Redis.
///
/// # Examples
///
/// ```
/// use tower_semaphore::backend::MemoryBackend;
/// use tower_semaphore::{Policy, Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backend = MemoryBackend::new();
/// let (one, two) = (Semaphore::new(backend.clone()), Semaphore::new(backend));
/// let permit = one.try_acquire("openai", &Policy::new(1)).await?;
/// assert!(two.try_acquire("openai", &Policy::new(1)).await.is_err());
/// # drop(permit); Ok(()) }
/// ```
///
/// [`Semaphore`]: crate::Semaphore
#[derive(Clone, Debug, Default)]
pub struct MemoryBackend {
    shared: Arc<Shared>,
}

struct Shared {
    /// The ledgers by key, each behind a lock of its own. Kept while a process uses them or they have places.
    ledgers: Sharded<Arc<Mutex<Ledger>>>,
    nodes: Mutex<HashMap<NodeId, Weak<dyn Mailbox>>>,
    overrides: Mutex<Overrides>,
    began: Instant,
    /// The same in ns since 1970.
    began_ns: u64,
}

/// One process's handle on the ledger of a semaphore.
struct LedgerHandle {
    shared: Arc<Shared>,
    key: Arc<str>,
    ledger: Arc<Mutex<Ledger>>,
    /// The process's epoch, in ns by the backend's clock.
    epoch_ns: u64,
}

impl MemoryBackend {
    /// Creates a backend in which no permit is held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of semaphores with a waiting or held place.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.in_use()
    }

    /// Returns whether no semaphore has a place.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Loses all data: places, queues and overrides, like a Redis that was flushed.
    ///
    /// Each process notices it when it renews its leases, and its places are counted again. [`MemoryServer`] can also
    /// simulate an outage.
    ///
    /// [`MemoryServer`]: super::MemoryServer
    pub fn forget_all(&self) {
        for part in self.shared.ledgers.parts() {
            part.values().for_each(|ledger| *lock(ledger) = Ledger::new());
        }
        lock(&self.shared.overrides).clear();
        self.shared.announce_overrides();
    }
}

impl Shared {
    /// Returns the current time, in µs since 1970.
    fn now(&self) -> u64 {
        self.at(Instant::now()) / 1000
    }

    /// Returns the time in ns since 1970 by Tokio's clock, which a test can pause.
    fn at(&self, now: Instant) -> u64 {
        self.began_ns + nanos(now.saturating_duration_since(self.began))
    }

    /// Returns the number of ledgers with a place.
    fn in_use(&self) -> usize {
        let now = self.now();
        let of_part = |part: Guard<'_, Arc<Mutex<Ledger>>>| {
            part.values().filter(|ledger| has_places(ledger, now)).count()
        };
        self.ledgers.parts().map(of_part).sum()
    }

    /// Reads or changes the ledger of a key, if there is one. Holds the lock of its part, so that no handle is dropped
    /// between the change and the check whether the ledger is unused.
    fn with<T>(&self, key: &str, act: impl FnOnce(&mut Ledger) -> T) -> Option<T> {
        let mut part = self.ledgers.of(key);
        let done = act(&mut lock(part.get(key)?));
        self.tidy(&mut part, key);
        Some(done)
    }

    /// Returns the ledger of a key.
    fn ledger(&self, key: &Arc<str>) -> Arc<Mutex<Ledger>> {
        let mut part = self.ledgers.of(key);
        if let Some(ledger) = part.get(key) {
            return Arc::clone(ledger);
        }
        if part.len() == part.capacity() {
            // Places that processes left behind end with their leases, and nothing removes their ledgers then. Search
            // for those whenever the map would have to grow.
            let now = self.now();
            part.retain(|_, ledger| !is_unused(ledger, now));
            let len = part.len();
            part.reserve(len.max(1));
        }
        Arc::clone(part.entry(Arc::clone(key)).or_default())
    }

    /// Removes a ledger that no process uses and that has no places.
    fn tidy(&self, part: &mut Guard<'_, Arc<Mutex<Ledger>>>, key: &str) {
        if part.get(key).is_some_and(|ledger| is_unused(ledger, self.now())) {
            sharded::remove(part, key);
        }
    }

    /// Notifies all processes that the overrides changed. They may read them at once, so call this under no lock.
    fn announce_overrides(&self) {
        self.tell_all(|node| node.overridden());
    }

    fn tell_all(&self, tell: impl Fn(&dyn Mailbox)) {
        let nodes: Vec<_> = lock(&self.nodes).values().filter_map(Weak::upgrade).collect();
        nodes.iter().for_each(|node| tell(&**node));
    }

    /// Returns the mailbox of a process, if it still exists.
    fn mailbox(&self, node: NodeId) -> Option<Arc<dyn Mailbox>> {
        lock(&self.nodes).get(&node).and_then(Weak::upgrade)
    }
}

impl Counter for LedgerHandle {
    fn call(&self, node: NodeId, call: &Call, now: Time) -> Reply {
        let mut hints: Vec<(Arc<dyn Mailbox>, Vec<Grant>)> = Vec::new();
        let post = &mut |node: NodeId, grants: &[Grant]| match self.shared.mailbox(node) {
            Some(mailbox) => {
                hints.push((mailbox, grants.to_vec()));
                true
            }
            None => false,
        };
        let mut ledger = lock(&self.ledger);
        let reply = ledger.carry_out(node, call, self.at(now), post);
        // Released first, because a process may make a call as soon as it gets its hint.
        drop(ledger);
        for (mailbox, grants) in hints {
            if grants.is_empty() {
                mailbox.recall(&self.key);
            }
            for grant in grants {
                mailbox.hint(&self.key, grant.into());
            }
        }
        reply
    }
}

impl Drop for LedgerHandle {
    /// Removes a ledger without places with its last handle.
    fn drop(&mut self) {
        let mut part = self.shared.ledgers.of(&self.key);
        // Under the lock of this part, as every handle is created and dropped.
        drop(std::mem::take(&mut self.ledger));
        self.shared.tidy(&mut part, &self.key);
    }
}

impl LedgerHandle {
    /// Converts a time of the process to µs since 1970.
    fn at(&self, now: Time) -> u64 {
        self.epoch_ns.saturating_add(now.nanos()) / 1000
    }
}

impl Backend for MemoryBackend {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        let mut nodes = lock(&self.shared.nodes);
        nodes.retain(|_, mailbox| mailbox.strong_count() > 0);
        nodes.insert(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        name.into()
    }

    fn embedded(&self) -> Option<&dyn Embedded> {
        Some(self)
    }

    fn suspended(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }

    fn connect<'a>(
        &'a self,
        _: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        let error = BackendError::connection("the embedded backend has no connections");
        ready(Err(error)).boxed()
    }
}

impl Embedded for MemoryBackend {
    fn counter(&self, key: &Arc<str>, epoch: Instant) -> Arc<dyn Counter> {
        let (shared, key) = (Arc::clone(&self.shared), Arc::clone(key));
        let (ledger, epoch_ns) = (shared.ledger(&key), shared.at(epoch));
        Arc::new(LedgerHandle { shared, key, ledger, epoch_ns })
    }
}

impl Queries for MemoryBackend {
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing> {
        let now = self.shared.now();
        let listing = self.shared.with(key, |ledger| listing::of(ledger, now, most, rate));
        let none = || listing::of(&Ledger::new(), now, most, rate);
        ready(Ok(listing.unwrap_or_else(none))).boxed()
    }

    fn list(&self, _: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        let (mut names, now) = (Vec::new(), self.shared.now());
        for part in self.shared.ledgers.parts() {
            let held = part.iter().filter(|(_, ledger)| has_places(ledger, now));
            names.extend(held.map(|(name, _)| Arc::clone(name)));
        }
        names.sort_unstable();
        ready(page(names, from, most)).boxed()
    }

    fn overrides(&self, _: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        let overrides = lock(&self.shared.overrides);
        let now = self.shared.now() / 1000;
        let news = (known != overrides.version).then(|| Overrides { now, ..overrides.clone() });
        ready(Ok(news)).boxed()
    }

    fn set_override(&self, _: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        let now = self.shared.now();
        let mut overrides = lock(&self.shared.overrides);
        let (before, is_told) = (overrides.version, change.is_told());
        let adapted_before = overrides.adapted_version;
        if !overrides.change(name, change, now / 1000) {
            return ready(Err(QueryError::Failed(Overrides::too_many(name)))).boxed();
        }
        if !is_told || overrides.version == before {
            return ready(Ok(())).boxed();
        }
        let adapted = overrides.adapted.get(name).copied();
        let adapted = adapted.filter(|_| overrides.adapted_version != adapted_before);
        drop(overrides);
        match adapted {
            Some(adapted) => self.shared.tell_all(|node| node.adapted(name, adapted)),
            None => self.shared.announce_overrides(),
        }
        ready(Ok(())).boxed()
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        let now = self.shared.now();
        let lease_end = self.shared.with(key, |ledger| ledger.revoke(id, take, now)).flatten();
        ready(Ok(lease_end.map(|end| end.saturating_sub(now / 1000)))).boxed()
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        let mailbox = self.shared.mailbox(to);
        // Not under the lock: the process may answer at once.
        mailbox.into_iter().for_each(|mailbox| mailbox.message(key, message.clone()));
        ready(Ok(())).boxed()
    }
}

/// Returns whether a ledger has a place whose lease still runs at `now`, in µs since 1970.
fn has_places(ledger: &Mutex<Ledger>, now: u64) -> bool {
    lock(ledger).places().any(|(_, lease_end, _)| lease_end > now / 1000)
}

/// Returns whether no process uses a ledger, no lease in it still runs, no grant in it counts for a rate, and no
/// budget is less than full.
fn is_unused(ledger: &Arc<Mutex<Ledger>>, now: u64) -> bool {
    Arc::strong_count(ledger) == 1
        && !has_places(ledger, now)
        && lock(ledger).kept_until().is_none_or(|end| end <= now)
}

/// A page of all names, from a position on, which is how many are passed.
fn page(names: Vec<Arc<str>>, from: Option<&str>, most: u32) -> Result<Names, QueryError> {
    let passed = from.map_or(Ok(0), str::parse).map_err(|_| QueryError::of_position(from))?;
    let all = names.len();
    let names: Vec<_> = names.into_iter().skip(passed).take(most as usize).collect();
    let next = passed.saturating_add(names.len());
    Ok(Names { names, next: (next < all).then(|| next.to_string().into()) })
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Default for Shared {
    fn default() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            ledgers: Sharded::default(),
            nodes: Mutex::default(),
            overrides: Mutex::default(),
            began: Instant::now(),
            began_ns: nanos(since_1970),
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("semaphores", &self.in_use())
            .field("nodes", &lock(&self.nodes).len())
            .finish()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use tokio::time::Instant;

    use super::MemoryBackend;
    use crate::backend::{Embedded, Queries};
    use crate::{Policy, Semaphore};

    #[test]
    fn a_name_that_an_operator_inspects_as_its_use_ends_leaves_nothing() {
        let (backend, key) = (MemoryBackend::new(), Arc::<str>::from("n"));
        let epoch = Instant::now();
        thread::scope(|scope| {
            let uses = scope.spawn(|| {
                for _ in 0..20_000 {
                    drop(backend.counter(&key, epoch));
                    assert!(backend.shared.ledgers.of(&key).is_empty(), "nobody removes it");
                }
            });
            while !uses.is_finished() {
                drop(backend.inspect(&key, 10, None));
            }
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_whose_last_place_an_operator_takes_leaves_nothing() {
        let backend = MemoryBackend::new();
        let one = Semaphore::new(backend.clone());
        one.acquire("n", &lingering()).await.unwrap().break_off();
        let other = Semaphore::new(backend.clone());
        let id = other.inspect("n").await.unwrap().holders[0].id;
        one.shutdown().await;
        drop(one);
        assert_eq!(backend.len(), 1);
        assert!(other.revoke("n", id).await.unwrap());
        assert!(backend.shared.ledgers.of("n").is_empty(), "nobody removes it");
    }

    #[tokio::test(start_paused = true)]
    async fn what_processes_leave_behind_is_removed_after_its_lease() {
        let backend = MemoryBackend::new();
        for round in 0..20 {
            for i in 0..100 {
                let semaphore = Semaphore::new(backend.clone());
                let name = format!("{round} {i}");
                semaphore.acquire(name, &lingering()).await.unwrap().break_off();
                semaphore.shutdown().await;
            }
            tokio::time::sleep(Duration::from_secs(20)).await;
            assert_eq!(backend.len(), 0, "leases have ended");
        }
        let ledgers: usize = backend.shared.ledgers.parts().map(|part| part.len()).sum();
        assert!(ledgers < 600, "{ledgers} of 2000 are left");
    }

    fn lingering() -> Policy {
        let policy = Policy::builder(1).lease(Duration::from_secs(10));
        policy.linger(Duration::from_secs(5)).build().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn names_that_are_not_used_any_more_leave_nothing() {
        let backend = MemoryBackend::new();
        let [one, other] = [(); 2].map(|()| Semaphore::new(backend.clone()));
        let held = one.acquire("held", &Policy::new(1)).await.unwrap();
        for i in 0..2000 {
            for semaphore in [&one, &other] {
                drop(semaphore.acquire(format!("n{i}"), &Policy::new(1)).await.unwrap());
            }
        }
        let ledgers =
            || backend.shared.ledgers.parts().map(|part| (part.len(), part.capacity())).unzip();
        let sum = |(len, room): (Vec<usize>, Vec<usize>)| {
            (len.iter().sum::<usize>(), room.iter().sum::<usize>())
        };
        assert_eq!(sum(ledgers()).0, 2001);
        tokio::time::sleep(Duration::from_secs(20)).await;
        let (len, room) = sum(ledgers());
        assert_eq!((one.health().semaphores, len), (1, 1));
        assert!(room < 500, "room for {room}");
        drop(held);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(sum(ledgers()).0, 0);
    }
}
