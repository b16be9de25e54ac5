//! The seam between a process and the place where permits are counted, for backends of your own and for tests.
//!
//! A [`Backend`] opens [`Connection`]s, which carry [`AddressedCall`]s one way and [`Answer`]s the other, and delivers
//! hints to a [`Mailbox`]. The [`Ledger`](crate::protocol::Ledger) defines what the calls mean.
//!
//! Public with the feature `unstable-backend`. It may change in any release, also in one that only mends a defect: name
//! an exact version of this crate.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, ready};
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::oneshot;
use tokio::task::coop::unconstrained;
use tokio::time::Instant;

pub use super::overrides::{Change, Overrides};
pub use super::peer_message::PeerMessage;
use crate::error::BackendError;
use crate::protocol::{Adapted, BoundRate, Call, Hint, NodeId, PlaceId, RateUsage, Reply, Time};
use crate::sync::{Mutex, lock};

/// Stands for the overrides in place of a name. No encoded name is equal to it.
pub const OVERRIDES: &str = "!overrides";

/// Stands for all names in place of one.
pub const ALL_NAMES: &str = "*";

/// Counts permits.
///
/// The seam between a process and the place where permits are counted.
pub trait Backend: Send + Sync + 'static {
    /// Sets the calling process and the mailbox for its hints. Called once, before a connection is opened and before
    /// anything is asked.
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>);

    /// The key of the semaphore of this name.
    fn key(&self, name: &str) -> Arc<str>;

    /// Returns the backend itself if it is in this process and answers at once. Then
    /// [`connect`](Self::connect) is never called.
    fn embedded(&self) -> Option<&dyn Embedded> {
        None
    }

    /// The server that counts the semaphore of this key, as far as is known.
    fn shard(&self, key: &str) -> Shard {
        let _ = key;
        Shard::default()
    }

    /// All known servers that count semaphores. The order stays the same as long as the servers do.
    fn shards(&self) -> Vec<Shard> {
        vec![Shard::default()]
    }

    /// A number that changes whenever the answers of [`shard`](Self::shard) may have changed. `None`: the backend does
    /// not track this, and every failed attempt to connect looks up the server of each semaphore.
    fn routing(&self) -> Option<u64> {
        None
    }

    /// Opens a connection to a server. Calls on it are carried out in the order in which they are sent. `None`: the
    /// server counts nothing, or no longer does; ask [`shard`](Self::shard) again.
    ///
    /// The backend itself bounds the time that this takes.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future abandons the attempt.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or refuses.
    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>>;

    /// For how long grants pause at least after data may have been lost, if they do: for one lease of the process in any
    /// case.
    fn quarantine(&self) -> Option<Duration> {
        None
    }

    /// How long a call may go unanswered before its connection is closed.
    fn response_timeout(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// For how long the machine has been suspended so far: by that much the clock of [`Instant`] stood still, and
    /// leases went on. `None`: the process reads that from the system. A backend in this process needs none of it,
    /// because its leases stand still as well.
    fn suspended(&self) -> Option<Duration> {
        None
    }

    /// The random seed of one process, from which its id and its jitter derive. The id must be unguessable: with it,
    /// others could release the places of the process. Only a simulation overrides this.
    fn seed(&self) -> u64 {
        getrandom::u64().unwrap_or_else(|_| {
            use std::hash::{BuildHasher, RandomState};
            RandomState::new().hash_one(std::process::id())
        })
    }
}

/// A connection to a backend, from its opening to its first failure.
pub trait Connection: Queries {
    /// The server at the other end.
    fn server(&self) -> &ServerInfo;

    /// Drives the connection: what is sent over it, answers and hints make progress while this is polled. Completes
    /// when the connection is closed, as far as that is noticed without a call.
    ///
    /// Called once, and before anything is sent.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes the connection, unless the connection is driven by a task of its own.
    fn drive(&self) -> BoxFuture<'_, ()>;

    /// Gives back at the server what the process itself has there, beside places. Called last: everything is answered, and
    /// nothing more will be sent. [`drive`](Self::drive) is polled meanwhile. The caller does not wait for it longer than
    /// the [`response_timeout`](Backend::response_timeout).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the server finds out by itself that the process is gone.
    fn finish(&self) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }

    /// When the server last answered a part of a batch, if that is known before the batch is answered. A batch takes
    /// longer than [`response_timeout`](Backend::response_timeout) where the server is slow; that it answers parts of it
    /// shows that it is there.
    fn heard_at(&self) -> Option<Instant> {
        None
    }

    /// Sends calls in one batch. Returns one answer for each, as they come.
    ///
    /// Each call is answered, unless the connection is lost: answers that end early end it. Batches are polled for the first
    /// time in the order in which they were sent. The calls of one key are carried out in
    /// order, and answered in order, over all batches: see [`InOrder`]. Those of other keys need not wait for them.
    ///
    /// # Cancel safety
    ///
    /// A batch whose answers are dropped may or may not be carried out.
    fn send(&self, calls: Arc<[AddressedCall]>) -> Answers;
}

/// The answers to a batch, in parts that come together: each with the index of its call.
///
/// # Errors
///
/// If the connection is lost. Any of the calls may have been carried out, and the connection is of no further use.
pub type Answers = BoxStream<'static, Result<Vec<(usize, Answer)>, BackendError>>;

/// A backend in this process, without a connection: each call is answered when it returns.
pub trait Embedded: Queries {
    /// Returns what counts the semaphore of this key, for a process whose times count from `epoch`. All that it
    /// returns for one key count together. Places remain when the last of them is dropped, and one may be dropped
    /// without having been used.
    fn counter(&self, key: &Arc<str>, epoch: Instant) -> Arc<dyn Counter>;
}

/// Counts one semaphore of a backend in this process.
pub trait Counter: Send + Sync + 'static {
    /// Carries out a call as of `now`, which is a moment ago at most. Hints for other processes are delivered before
    /// it returns.
    fn call(&self, node: NodeId, call: &Call, now: Time) -> Reply;
}

/// Operations that belong to no place.
///
/// # Errors
///
/// Each fails with [`QueryError::Moved`], having done nothing, if another server counts the semaphore now; and with
/// [`QueryError::Failed`] if the server refuses or cannot be reached.
pub trait Queries: Send + Sync + 'static {
    /// Lists holders and waiters, at most `most` of each, and how much of the rate is used; without one, of that of the
    /// listed place whose lease ends last, of those that have one.
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing>;

    /// Lists the names of semaphores in use, about `most` of them, from a position on; `None` is the start. A position may
    /// come from outside, and is then an error if the backend did not write it.
    fn list(&self, key: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names>;

    /// Reads what is set in place of policies, and paused; `None` if nothing changed since the version `known`.
    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>>;

    /// Changes what is set for a name in place of its policy, and notifies every process. The key is that of
    /// [`OVERRIDES`].
    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()>;

    /// Removes a place on behalf of an operator; with `take: false` only looks. The freed permit is granted when a
    /// process that knows the limit asks next. Returns what is or was left of the lease, in ms; `None` if the place
    /// was not there.
    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>>;

    /// Sends a message to another process, without knowing whether it arrives.
    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()>;
}

/// The pending answer to one of [`Queries`].
pub type Query<T> = BoxFuture<'static, Result<T, QueryError>>;

/// Why a query was not answered.
#[derive(Clone, Debug)]
pub enum QueryError {
    /// Nothing was done: another server counts this semaphore now. Ask [`Backend::shard`] again.
    Moved,
    /// The server refused, or cannot be reached.
    Failed(BackendError),
}

impl QueryError {
    /// A position for [`Queries::list`] that the backend did not write.
    pub(crate) fn of_position(from: Option<&str>) -> Self {
        let text =
            format!("position {:?}; expected one that a list ended with", from.unwrap_or(""));
        Self::Failed(BackendError::call(text))
    }

    /// The error, if it means that the connection is of no further use.
    pub(crate) fn of_connection(&self) -> Option<&BackendError> {
        match self {
            Self::Failed(error) => Some(error).filter(|error| error.is_connection()),
            Self::Moved => None,
        }
    }
}

/// One of a backend's servers by its name; the only server of a backend needs none.
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

/// The server at the other end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerInfo {
    /// Hints do not arrive while this connection is used.
    pub poll_only: bool,
    /// Identifies the data behind the connection: a different value means that some of it may have been lost. `None`:
    /// unknown.
    pub data: Option<String>,
    /// How long the data has existed at least. `None`: unknown.
    pub age: Option<Duration>,
    /// A warning for the operator of the server.
    pub warning: Option<String>,
}

/// A [`Call`] of one process, with the semaphore that it concerns.
#[derive(Clone, Debug)]
pub struct AddressedCall {
    /// The key of the semaphore: see [`Backend::key`].
    pub key: Arc<str>,
    /// The calling process.
    pub node: NodeId,
    /// What it does there.
    pub call: Call,
}

/// The answer to a call.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The reply of the ledger.
    Reply {
        /// The reply.
        reply: Reply,
        /// Whether calls that were sent later may have been carried out before this one.
        late: bool,
        /// From when on the leases count that it gives; `None`: from the sending of the batch.
        leases_from: Option<Instant>,
    },
    /// This call failed, and may or may not have been carried out. Others of its batch may have succeeded.
    Failed(BackendError),
    /// The server refused this call, and did nothing of it. Others of its batch may have succeeded.
    Refused(BackendError),
    /// Nothing was done: another server counts this semaphore now. Ask [`Backend::shard`] again.
    Moved,
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Self::Reply { reply, late: false, leases_from: None }
    }
}

/// Keeps the answers to the batches of a connection in order, where the calls of a batch are answered together.
#[derive(Debug, Default)]
pub struct InOrder {
    last: Mutex<Option<Answered>>,
}

/// Closed once a batch is answered. If its answers are dropped before, it receives what that batch waited for.
#[derive(Debug)]
struct Answered(oneshot::Receiver<Self>);

/// The turn of a batch to be answered.
struct Turn {
    before: Option<Answered>,
    done: Option<oneshot::Sender<Answered>>,
}

impl Turn {
    /// Waits until all batches before it are answered.
    async fn come(mut self) {
        while let Some(Answered(before)) = &mut self.before {
            // Unconstrained: with Tokio's budget used up, a batch would wait in vain, and those behind it with it.
            self.before = unconstrained(before).await.ok();
        }
        self.done = None;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let (Some(before), Some(done)) = (self.before.take(), self.done.take()) {
            // An error says that no batch follows.
            _ = done.send(before);
        }
    }
}

impl InOrder {
    /// Returns what a batch answers, once those before it are answered. The future sends the batch when it is polled for
    /// the first time.
    pub fn answer(
        &self,
        answer: impl Future<Output = Result<Vec<(usize, Answer)>, BackendError>> + Send + 'static,
    ) -> Answers {
        let (done, answered) = oneshot::channel();
        let before = lock(&self.last).replace(Answered(answered));
        let turn = Turn { before, done: Some(done) };
        let answers = async move {
            let answers = answer.await;
            turn.come().await;
            answers
        };
        answers.into_stream().boxed()
    }
}

/// The holders and waiters of a semaphore at one moment by the backend's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The moment, µs since 1970.
    pub now: u64,
    /// The number of permits in use.
    pub in_use: u64,
    /// The number of waiting places.
    pub waiting: u64,
    /// Places with their lease ends (ms) and, where they wait, tickets (µs).
    pub places: Vec<(PlaceId, u64, Option<u64>)>,
    /// How much of the rate is used; `None`: there is none.
    pub rate: Option<RateUsage>,
    /// Up to a hundred budgets that are not full: number, and when it will be, µs since 1970.
    pub budgets: Vec<(u32, u64)>,
}

/// Some of the semaphores in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Their names. A name can appear in two answers.
    pub names: Vec<Arc<str>>,
    /// The position to continue from, as the backend writes it: not `0`, and of letters, digits and `-._~`. `None`: there
    /// are no more.
    pub next: Option<Arc<str>>,
}

/// Receives messages for one process.
pub trait Mailbox: Send + Sync {
    /// A permit was granted to a place of this process in the semaphore `name`. Never blocks.
    ///
    /// A hint may arrive late, twice or never: the grant itself is data in the backend.
    fn hint(&self, name: &str, hint: Hint);

    /// A request of another process waits for the semaphore `name`: permits that this process keeps for its own next
    /// requests are given back. Never blocks.
    ///
    /// Called where an acquire that [recalls](Call::recalls) finds no permit free, and its newcomers are the
    /// first to wait; and by a renewal, for the next in turn, if that has to wait and its lease ends early: what matters then
    /// is whether anybody listens. Like a hint, it may arrive late, twice or never; without it, requests of this process are granted
    /// ahead of the other's for at most 50 ms. Hints and replies should be delivered in the order in which they were
    /// made: who else waits is concluded from them.
    fn recall(&self, name: &str);

    /// Places of the semaphore `name` were removed by a process that does not know its limit, so what they left may be free:
    /// waiting requests of this process ask for it. Never blocks.
    ///
    /// Like a hint, it may arrive late, twice or never; renewals of what waits ask for it, too.
    fn freed(&self, name: &str);

    /// An operator set something in place of a policy: see [`Queries::overrides`]. Never blocks.
    ///
    /// Like a hint, it may arrive late, twice or never.
    fn overridden(&self);

    /// The limit of the semaphore `name`, which finds its limit itself, is this now: see [`Change::Adapt`]. Never blocks.
    ///
    /// Like a hint, it may arrive late, twice or never.
    fn adapted(&self, name: &str, adapted: Adapted);

    /// A message from another process about the semaphore `name`. Never blocks.
    fn message(&self, name: &str, message: PeerMessage);

    /// The warning of the server is another one since it was connected to: see [`ServerInfo::warning`]. Never blocks.
    fn warned(&self, warning: Option<&str>);
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::{pending, ready};

    fn is_answered(answers: &mut Answers) -> bool {
        answers.next().now_or_never().is_some()
    }

    #[test]
    fn batches_are_answered_in_the_order_in_which_they_were_sent() {
        let order = InOrder::default();
        let (sender, first) = oneshot::channel::<()>();
        let mut first = order.answer(first.map(|_| Ok(Vec::new())));
        let mut second = order.answer(ready(Ok(Vec::new())));
        assert!(!is_answered(&mut second));
        drop(sender);
        assert!(is_answered(&mut first));
        assert!(is_answered(&mut second));
    }

    #[test]
    fn a_batch_that_is_dropped_lets_none_pass_those_before_it() {
        let order = InOrder::default();
        let mut first = order.answer(pending());
        let second = order.answer(ready(Ok(Vec::new())));
        let mut third = order.answer(ready(Ok(Vec::new())));
        assert!(!is_answered(&mut first) && !is_answered(&mut third));
        drop(second);
        assert!(!is_answered(&mut third));
        drop(first);
        assert!(is_answered(&mut third));
    }
}
