//! Where permits are counted: in this process, or in Redis for a whole fleet.
//!
//! A [`Backend`] is what a [`Semaphore`] needs to know of it: calls in, [`Reply`]s out, and hints
//! from elsewhere into a [`Mailbox`]. The meaning of the calls is that of the [`ledger`], written
//! once.
//!
//! [`Semaphore`]: crate::Semaphore
//! [`ledger`]: crate::ledger

mod memory;
mod overrides;
#[cfg(feature = "redis")]
mod redis;
mod word;

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub use self::memory::MemoryBackend;
pub use self::overrides::{Change, Mode, Override, Overrides, Revocation};
#[cfg(all(fuzzing, feature = "redis"))]
pub(crate) use self::redis::fuzz;
#[cfg(feature = "redis")]
pub use self::redis::{AfterLoss, RedisBackend, RedisBackendBuilder};
pub use self::word::Word;

use tokio::time::Instant;

use crate::error::BackendError;
use crate::ledger::{Ids, NodeId, PlaceId, Reply};

/// Counts permits.
///
/// This trait is the seam between the process and the place where permits are counted. It may
/// change in any release before 1.0.
pub trait Backend: Send + Sync + 'static {
    /// One connection's life.
    type Lane: Lane;

    /// Says who will call, once, before anything else. Hints for `node` go to `mailbox`.
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>);

    /// Where a semaphore of this name is kept.
    fn key(&self, name: &str) -> Arc<str>;

    /// Whether [`call_now`](Self::call_now) answers. If so, [`connect`](Self::connect) is never
    /// called.
    fn is_immediate(&self) -> bool {
        false
    }

    /// Answers without waiting. Only called where [`is_immediate`](Self::is_immediate) says so, with
    /// a time that is past, but not long.
    fn call_now(&self, call: &Call, now: Instant) -> Answer {
        let _ = (call, now);
        Answer::Failed(BackendError::call("this backend does not answer at once"))
    }

    /// Which of the backend's servers counts the semaphore of this key, as far as is known.
    fn shard(&self, key: &str) -> Shard {
        let _ = key;
        Shard::default()
    }

    /// All of its servers that count semaphores, as far as they are known; always in the same order, where
    /// they stay the same.
    fn shards(&self) -> Vec<Shard> {
        vec![Shard::default()]
    }

    /// Opens a connection to a server, over which calls are carried out in the order in which they
    /// are sent. `None`: it counts nothing (any more); ask [`shard`](Self::shard) again.
    ///
    /// Bounded in time by the backend itself. Dropping the future opens nothing.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or refuses.
    fn connect(
        &self,
        shard: &Shard,
    ) -> impl Future<Output = Result<Option<Self::Lane>, BackendError>> + Send;

    /// Whether nothing is to be granted for one lease after data may have been lost.
    fn quarantines(&self) -> bool {
        false
    }

    /// How long a call may go unanswered before its connection is given up.
    fn response_timeout(&self) -> Duration {
        Duration::from_millis(500)
    }
}

/// A connection to a backend, from its opening to its first failure.
pub trait Lane: Send + Sync + 'static {
    /// What is at the other end.
    fn server(&self) -> &Server;

    /// Ready when the connection is closed, as far as that shows without a call.
    fn closed(&self) -> impl Future<Output = ()> + Send;

    /// Sends calls together, to be carried out in their order. One answer each.
    ///
    /// Batches are polled in the order in which they were sent. A batch whose future is dropped may
    /// or may not be carried out.
    ///
    /// # Errors
    ///
    /// If the connection broke: any of the calls may or may not have been carried out.
    fn send(
        &self,
        calls: Arc<[Call]>,
    ) -> impl Future<Output = Result<Vec<Answer>, BackendError>> + Send + 'static;
}

/// One of a backend's servers, by its name; or the only one, which needs none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Shard(Option<Arc<str>>);

impl Shard {
    /// The server of this name.
    pub fn named(name: impl Into<Arc<str>>) -> Self {
        Self(Some(name.into()))
    }

    /// Its name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

/// What a connection leads to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Server {
    /// Hints do not arrive as long as this connection is used.
    pub deaf: bool,
    /// Names the data behind the connection: another name means that some of it may have been lost.
    /// `None`: that cannot be found out.
    pub data: Option<String>,
    /// For how long the data has been there for certain. `None`: that cannot be found out.
    pub age: Option<Duration>,
    /// What its operator should know.
    pub warning: Option<String>,
}

/// One operation on one semaphore, for any number of places.
#[derive(Clone, Debug)]
pub struct Call {
    /// Where the semaphore is kept: see [`Backend::key`].
    pub key: Arc<str>,
    /// The calling node.
    pub node: NodeId,
    /// Permits of the semaphore, as the caller knows it.
    pub limit: u32,
    /// What to do.
    pub op: Op,
}

/// An operation of the [`Ledger`](crate::ledger::Ledger).
#[derive(Clone, Debug)]
pub enum Op {
    /// Take places out; then grant each of the others a permit, let it join the queue, or refuse it.
    Acquire {
        /// The places that leave: what was given back since the last call goes along.
        leaving: Ids,
        /// Length of the lease, ms.
        lease_ms: u64,
        /// How many may wait; `None`: these may not.
        max_queue: Option<u32>,
        /// The places that come.
        ids: Ids,
    },
    /// Take places out, waiting or held.
    Release {
        /// The places.
        ids: Ids,
    },
    /// Give leases anew.
    Renew {
        /// Length of the lease, ms.
        lease_ms: u64,
        /// The places.
        ids: Ids,
    },
    /// Renew with proof.
    Reassert {
        /// Length of the lease, ms.
        lease_ms: u64,
        /// Places, each with its last lease end (ms) or ticket (µs).
        proofs: Vec<(PlaceId, u64)>,
    },
    /// List who holds and who waits.
    Inspect {
        /// How many of each to list at the most.
        most: u32,
    },
    /// Read what operators set in place of policies. The key is that of [`OVERRIDES`], as it is for
    /// [`Op::Override`].
    Overrides {
        /// The version that is known already.
        known: u64,
    },
    /// Set something for a name in place of its policy, and tell every process.
    Override {
        /// The name.
        name: Arc<str>,
        /// What becomes different.
        change: Change,
    },
    /// Take a place out on an operator's word. What that frees is granted when someone asks who knows
    /// the limit.
    Revoke {
        /// The place.
        id: PlaceId,
        /// Whether to do it; else only look.
        take: bool,
    },
    /// Name semaphores that someone has. The key is that of [`EVERY`].
    List {
        /// Where to go on; 0: the beginning.
        from: u64,
        /// About how many.
        most: u32,
    },
    /// Say something to another process. Whether anybody hears it is not told.
    Tell {
        /// To whom.
        to: NodeId,
        /// What.
        word: Word,
    },
}

/// Where overrides are kept, in place of a name: no name is encoded so.
pub const OVERRIDES: &str = "!overrides";

/// In place of a name: all of them.
pub const EVERY: &str = "*";

/// What came back for a call.
#[derive(Clone, Debug)]
pub enum Answer {
    /// What the ledger answered.
    Reply {
        /// The answer.
        reply: Reply,
        /// Whether calls that were sent later may have been carried out before this one.
        late: bool,
    },
    /// The answer to [`Op::Inspect`].
    Listing(Listing),
    /// The answer to [`Op::Overrides`]; `None`: what is known is what is set.
    Overrides(Option<Overrides>),
    /// The answer to [`Op::Override`] and [`Op::Tell`]: it was done.
    Done,
    /// The answer to [`Op::Revoke`]: for how long the place's lease goes on, or would have, ms; `None`: it
    /// was not there.
    Revoked(Option<u64>),
    /// The answer to [`Op::List`].
    Names {
        /// Some of the names. A name can come twice, in two answers.
        names: Vec<Arc<str>>,
        /// Where to go on; 0: that was all.
        next: u64,
    },
    /// This call failed; others may not have.
    Failed(BackendError),
    /// Nothing was done: another server counts this semaphore now; ask [`Backend::shard`] again.
    Moved,
}

/// Who holds and who waits in a semaphore, at one moment of the backend's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The moment, µs since 1970.
    pub now: u64,
    /// How many hold.
    pub in_use: u64,
    /// How many wait.
    pub waiting: u64,
    /// Places with their lease ends (ms) and, where they wait, tickets (µs).
    pub places: Vec<(PlaceId, u64, Option<u64>)>,
}

/// Takes hints: "this place was granted".
pub trait Mailbox: Send + Sync {
    /// A place of this node, in the semaphore `name`, was granted, with the lease end that it keeps (ms). Never blocks.
    ///
    /// A hint may come late, twice or never: the grant itself is data in the backend.
    fn hint(&self, name: &str, n: u64, lease_end: u64);

    /// Something was set for the semaphore `name` in place of its policy. Never blocks.
    ///
    /// As a hint, it may come late, twice or never.
    fn overridden(&self, name: &str);

    /// Another process says something about the semaphore `name`. Never blocks.
    fn told(&self, name: &str, word: Word);
}
