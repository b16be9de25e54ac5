//! Permits counted in this process.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use foldhash::fast::RandomState;
use tokio::time::Instant;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};

use super::{
    Backend, Change, Connection, Embedded, Listing, Mailbox, Names, Overrides, PeerMessage,
    Queries, Query, QueryError, Shard,
};
use crate::error::BackendError;
use crate::protocol::call::{Call, Op};
use crate::protocol::id::{NodeId, PlaceId};
use crate::protocol::ledger::{Caller, Grant, Ledger, Reply};
use crate::sync::{Mutex, MutexGuard};

/// Empty ledgers are dropped once there are more than this and half of all ledgers.
const EMPTY_MAX: usize = 64;

/// The embedded backend: the [`Ledger`] behind a lock.
///
/// For a single process and for tests. Clones share their permits: several [`Semaphore`]s on clones of one backend behave
/// like several processes on one Redis.
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

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    began: Instant,
    began_us: u64,
}

#[derive(Default)]
struct State {
    ledgers: HashMap<Arc<str>, Ledger, RandomState>,
    /// The number of empty ledgers among them, kept for the next request.
    empty: usize,
    nodes: HashMap<NodeId, Weak<dyn Mailbox>>,
    overrides: Overrides,
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
        let state = self.state();
        state.ledgers.len() - state.empty
    }

    /// Returns whether no semaphore has a place.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets every place, like a Redis that was killed and restarted empty.
    pub fn forget_all(&self) {
        let mut state = self.state();
        state.ledgers.clear();
        state.empty = 0;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        self.at(Instant::now())
    }

    // µs since 1970 by tokio's clock, which a test can pause.
    fn at(&self, now: Instant) -> u64 {
        self.shared.began_us + micros(now.saturating_duration_since(self.shared.began))
    }

    /// Runs `act` on the ledger of a key, and delivers the resulting hints.
    fn with_ledger<T>(
        &self,
        key: &Arc<str>,
        act: impl FnOnce(&mut Ledger, &mut dyn FnMut(NodeId, &[Grant]) -> bool) -> T,
    ) -> T {
        let mut hints: Vec<(Arc<dyn Mailbox>, Vec<Grant>)> = Vec::new();
        let mut state = self.state();
        let State { ledgers, empty, nodes, .. } = &mut *state;
        let post =
            &mut |node: NodeId, grants: &[Grant]| match nodes.get(&node).and_then(Weak::upgrade) {
                Some(mailbox) => {
                    hints.push((mailbox, grants.to_vec()));
                    true
                }
                None => false,
            };
        let ledger = match ledgers.get_mut(key) {
            Some(ledger) => ledger,
            None => {
                *empty += 1;
                ledgers.entry(Arc::clone(key)).or_default()
            }
        };
        let was_empty = ledger.is_empty();
        let result = act(ledger, post);
        match (was_empty, ledger.is_empty()) {
            (true, false) => *empty -= 1,
            (false, true) => *empty += 1,
            _ => {}
        }
        if *empty > EMPTY_MAX + ledgers.len() / 2 {
            ledgers.retain(|_, ledger| !ledger.is_empty());
            *empty = 0;
        }
        // A process may call as soon as it gets its hint, so the lock is released first.
        drop(state);
        for (mailbox, grants) in hints {
            if grants.is_empty() {
                mailbox.recall(key);
            }
            for grant in grants {
                mailbox.hint(key, grant.into());
            }
        }
        result
    }
}

impl Backend for MemoryBackend {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        let mut state = self.state();
        state.nodes.retain(|_, mailbox| mailbox.strong_count() > 0);
        state.nodes.insert(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        name.into()
    }

    fn embedded(&self) -> Option<&dyn Embedded> {
        Some(self)
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
    fn call(&self, key: &Arc<str>, node: NodeId, call: &Call, now: Instant) -> Reply {
        let Call { limit, headroom, recalls, .. } = *call;
        let caller = Caller { now: self.at(now), limit, headroom, node, recalls };
        self.with_ledger(key, |ledger, post| match &call.op {
            Op::Acquire { leaving, lease_ms, max_queue, ids } => {
                ledger.acquire(caller, *lease_ms, *max_queue, leaving, ids, post)
            }
            Op::Release { ids } => ledger.release(caller, ids, post),
            Op::Renew { lease_ms, ids } => ledger.renew(caller, *lease_ms, ids, post),
            Op::Reassert { lease_ms, proofs } => ledger.reassert(caller, *lease_ms, proofs, post),
            Op::Audit { most } => {
                let found = ledger.audit(caller.now, node, *most as usize);
                Reply { found, ..Reply::default() }
            }
        })
    }
}

impl Queries for MemoryBackend {
    fn inspect(&self, key: &Arc<str>, most: u32) -> Query<Listing> {
        let now = self.now();
        let listing = list(self.state().ledgers.get(key), now, most);
        ready(Ok(listing)).boxed()
    }

    fn list(&self, _: &Arc<str>, from: u64, most: u32) -> Query<Names> {
        let state = self.state();
        let held = state.ledgers.iter().filter(|(_, ledger)| !ledger.is_empty());
        let mut names: Vec<_> = held.map(|(name, _)| Arc::clone(name)).collect();
        drop(state);
        names.sort_unstable();
        let all = names.len() as u64;
        let passed = usize::try_from(from).unwrap_or(usize::MAX);
        let names: Vec<_> = names.into_iter().skip(passed).take(most as usize).collect();
        let next = from.saturating_add(names.len() as u64);
        ready(Ok(Names { names, next: if next < all { next } else { 0 } })).boxed()
    }

    fn overrides(&self, _: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        let state = self.state();
        let news = (known != state.overrides.version).then(|| state.overrides.clone());
        ready(Ok(news)).boxed()
    }

    fn set_override(&self, _: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        let now = self.now();
        let mut state = self.state();
        if !state.overrides.change(name, change, now / 1000) {
            let most = Overrides::MOST;
            let error = BackendError::call(format!(
                "{name}: {most} names have something set in place of their policy, as many as may"
            ));
            return ready(Err(QueryError::Failed(error))).boxed();
        }
        if !change.is_told() {
            return ready(Ok(())).boxed();
        }
        let nodes: Vec<_> = state.nodes.values().filter_map(Weak::upgrade).collect();
        drop(state);
        nodes.iter().for_each(|node| node.overridden());
        ready(Ok(())).boxed()
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        let now = self.now();
        let lease_end = self.with_ledger(key, |ledger, _| ledger.revoke(id, take, now));
        ready(Ok(lease_end.map(|end| end.saturating_sub(now / 1000)))).boxed()
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        let mailbox = self.state().nodes.get(&to).and_then(Weak::upgrade);
        // May say something itself: not under the lock.
        mailbox.into_iter().for_each(|mailbox| mailbox.message(key, message.clone()));
        ready(Ok(())).boxed()
    }
}

fn list(ledger: Option<&Ledger>, now: u64, most: u32) -> Listing {
    let Some(ledger) = ledger else { return Listing { now, ..Listing::default() } };
    let mut places: Vec<_> =
        ledger.places().filter(|(_, lease_end, _)| *lease_end > now / 1000).collect();
    places.sort_unstable_by_key(|(id, lease_end, _)| (*lease_end, *id));
    let waiting = places.iter().filter(|(_, _, ticket)| ticket.is_some()).count() as u64;
    let held = places.iter().filter(|(_, _, ticket)| ticket.is_none());
    let in_use = held.map(|(id, ..)| u64::from(id.cost())).sum();
    places.truncate(most as usize);
    Listing { now, in_use, waiting, places }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Default for Shared {
    fn default() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { state: Mutex::default(), began: Instant::now(), began_us: micros(since_1970) }
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("semaphores", &(self.ledgers.len() - self.empty))
            .field("nodes", &self.nodes.len())
            .finish()
    }
}
