//! Where permits are counted: in this process, or in Redis for a whole fleet.
//!
//! A [`Backend`] is what a [`Semaphore`] needs to know of it: it opens [`Connection`]s, which carry
//! [`AddressedCall`]s one way and [`Answer`]s the other, and it delivers hints to a [`Mailbox`]. What the calls
//! mean is written once, in the [`Ledger`](crate::protocol::ledger::Ledger).
//!
//! [`Semaphore`]: crate::Semaphore

mod memory;
mod overrides;
mod peer_message;
#[cfg(feature = "redis")]
mod redis;

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;

pub use self::memory::MemoryBackend;
pub use self::overrides::{Change, Overrides};
pub use self::peer_message::PeerMessage;
#[cfg(feature = "tls")]
pub use self::redis::TlsSettings;
#[cfg(all(fuzzing, feature = "redis"))]
pub(crate) use self::redis::fuzz;
#[cfg(feature = "redis")]
pub use self::redis::{AfterLoss, RedisBackend, RedisBackendBuilder};
/// The version whose pools [`RedisBackend::from_pool`] takes: 0.23, with `redis` 1 as
/// `deadpool_redis::redis`.
#[cfg(feature = "redis")]
pub use deadpool_redis;
/// The version whose configurations [`TlsSettings`] takes: 0.23.
#[cfg(feature = "tls")]
pub use rustls;

use tokio::time::Instant;

use crate::error::BackendError;
use crate::protocol::call::Op;
use crate::protocol::id::{NodeId, PlaceId};
use crate::protocol::ledger::{Hint, Reply};

/// Where overrides are kept, in place of a name: no name is encoded so.
pub const OVERRIDES: &str = "!overrides";

/// In place of a name: all of them.
pub const ALL_NAMES: &str = "*";

/// Counts permits.
///
/// This trait is the seam between the process and the place where permits are counted. It may
/// change in any release before 1.0.
pub trait Backend: Send + Sync + 'static {
    /// Says which process will call, once, before anything else. Hints for `node` go to `mailbox`.
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>);

    /// The key of the semaphore of this name.
    fn key(&self, name: &str) -> Arc<str>;

    /// The backend itself, if it is in this process and answers at once. Then
    /// [`connect`](Self::connect) is never called.
    fn embedded(&self) -> Option<&dyn Embedded> {
        None
    }

    /// Which of the backend's servers counts the semaphore of this key, as far as is known.
    fn shard(&self, key: &str) -> Shard {
        let _ = key;
        Shard::default()
    }

    /// All servers that count semaphores, as far as they are known; always in the same order, while
    /// they stay the same.
    fn shards(&self) -> Vec<Shard> {
        vec![Shard::default()]
    }

    /// A number that changes whenever [`shard`](Self::shard) may answer otherwise than before. `None`: that is
    /// not kept, and each attempt to connect that fails asks for all semaphores where they are counted.
    fn routing(&self) -> Option<u64> {
        None
    }

    /// Opens a connection to a server, over which calls are carried out in the order in which they
    /// are sent. `None`: it counts nothing (any more); ask [`shard`](Self::shard) again.
    ///
    /// Bounded in time by the backend itself. Dropping the future opens nothing.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or refuses.
    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>>;

    /// Whether nothing is to be granted for one lease after data may have been lost.
    fn quarantines(&self) -> bool {
        false
    }

    /// How long a call may go unanswered before its connection is given up.
    fn response_timeout(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// Randomness for one process: its id and its jitter come from it. A process's id must
    /// not be guessed: with it, its places could be released. Only a simulation has a reason to choose.
    fn seed(&self) -> u64 {
        getrandom::u64().unwrap_or_else(|_| {
            use std::hash::{BuildHasher, RandomState};
            RandomState::new().hash_one(std::process::id())
        })
    }
}

/// A connection to a backend, from its opening to its first failure.
pub trait Connection: Queries {
    /// What is at the other end.
    fn server(&self) -> &ServerInfo;

    /// Ready when the connection is closed, as far as that shows without a call.
    fn closed(&self) -> BoxFuture<'_, ()>;

    /// Sends calls together, to be carried out in their order. One answer each.
    ///
    /// Batches are polled in the order in which they were sent. A batch whose future is dropped may
    /// or may not be carried out.
    ///
    /// # Errors
    ///
    /// If the connection is lost; then any part of the calls may have been carried out, and nothing
    /// more will come through.
    fn send(
        &self,
        calls: Arc<[AddressedCall]>,
    ) -> BoxFuture<'static, Result<Vec<Answer>, BackendError>>;
}

/// A backend in this process.
pub trait Embedded: Queries {
    /// Carries a call out, at a time that is past, but not long. Hints for other processes are
    /// delivered before it returns.
    fn call(
        &self,
        key: &Arc<str>,
        node: NodeId,
        call: &crate::protocol::Call,
        now: Instant,
    ) -> Reply;
}

/// Questions and orders that belong to no place.
///
/// # Errors
///
/// Each fails with [`QueryError::Moved`] if another server counts the semaphore now, and nothing was
/// done; else if the server refuses or cannot be reached.
pub trait Queries: Send + Sync + 'static {
    /// Lists who holds and who waits; at most `most` of each.
    fn inspect(&self, key: &Arc<str>, most: u32) -> Query<Listing>;

    /// Names semaphores in use, about `most` of them, from the position `from` on; 0: the beginning.
    fn list(&self, key: &Arc<str>, from: u64, most: u32) -> Query<Names>;

    /// Reads what operators set in place of policies; `None`: nothing changed since the version
    /// `known`.
    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>>;

    /// Sets something for a name in place of its policy, and tells every process. The key is that of
    /// [`OVERRIDES`].
    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()>;

    /// Takes a place out on an operator's word; with `take: false` only looks. What that frees is
    /// granted when a process asks that knows the limit. Gives for how long the place's lease goes on,
    /// or would have, ms; `None`: it was not there.
    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>>;

    /// Sends a message to another process. Whether anyone hears it is not known.
    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()>;
}

/// The answer to one of [`Queries`], still to come.
pub type Query<T> = BoxFuture<'static, Result<T, QueryError>>;

/// Why a query was not answered.
#[derive(Clone, Debug)]
pub enum QueryError {
    /// Nothing was done: another server counts this semaphore now; ask [`Backend::shard`] again.
    Moved,
    /// The server refused, or cannot be reached.
    Failed(BackendError),
}

impl QueryError {
    /// The error, if it is the connection's: nothing more can be asked over that.
    pub(crate) fn of_connection(&self) -> Option<&BackendError> {
        match self {
            Self::Failed(error) => Some(error).filter(|error| error.is_connection()),
            Self::Moved => None,
        }
    }
}

/// One of a backend's servers, by its name; or the only one, which needs none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
pub struct ServerInfo {
    /// Hints do not arrive as long as this connection is used.
    pub poll_only: bool,
    /// Names the data behind the connection: another name means that some of it may have been lost.
    /// `None`: that cannot be found out.
    pub data: Option<String>,
    /// For how long the data has been there for certain. `None`: that cannot be found out.
    pub age: Option<Duration>,
    /// What its operator should know.
    pub warning: Option<String>,
}

/// A [`Call`](crate::protocol::Call) of one process, with the semaphore that it is for.
#[derive(Clone, Debug)]
pub struct AddressedCall {
    /// The key of the semaphore: see [`Backend::key`].
    pub key: Arc<str>,
    /// The calling process.
    pub node: NodeId,
    /// Permits of the semaphore, as the process knows it.
    pub limit: u32,
    /// So many of them are left to requests of class 0.
    pub headroom: u32,
    /// What to do.
    pub op: Op,
}

/// What came back for a call.
#[derive(Clone, Debug)]
pub enum Answer {
    /// What the ledger answered.
    Reply {
        /// The reply.
        reply: Reply,
        /// Whether calls that were sent later may have been carried out before this one.
        late: bool,
    },
    /// This call failed; others may not have.
    Failed(BackendError),
    /// Nothing was done: another server counts this semaphore now; ask [`Backend::shard`] again.
    Moved,
}

/// The holders and waiters of a semaphore, at one moment of the backend's clock.
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

/// Some of the semaphores in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Their names. A name can come twice, in two answers.
    pub names: Vec<Arc<str>>,
    /// The position to go on from; 0: that was all.
    pub next: u64,
}

/// Takes messages for one process.
pub trait Mailbox: Send + Sync {
    /// A place of this process, in the semaphore `name`, was granted. Never blocks.
    ///
    /// A hint may come late, twice or never: the grant itself is data in the backend.
    fn hint(&self, name: &str, hint: Hint);

    /// An operator set something in place of a policy: see [`Queries::overrides`]. Never blocks.
    ///
    /// As a hint, it may come late, twice or never.
    fn overridden(&self);

    /// A message of another process, about the semaphore `name`. Never blocks.
    fn message(&self, name: &str, message: PeerMessage);
}
