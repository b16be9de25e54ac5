//! A semaphore of which this process keeps a replica.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::answers::Asker;
use super::deference::Deference;
use crate::error::BackendError;
use crate::protocol::Time;
use crate::protocol::liveness::{OwnRows, deadline};
use crate::protocol::replica::{Change, Replica, Row, Transaction};

/// The pause after a transaction that failed, but not because another process was first. It doubles up to the longest.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// So often a transaction is made anew at once after another process was first. Then processes that contend would keep
/// each other from it, so each waits for a random time, and the longest such time doubles.
const LOSSES_AT_ONCE: u32 = 16;
const LOSS_PAUSE_MIN: Duration = Duration::from_millis(1);
const LOSS_PAUSE_MAX: Duration = Duration::from_millis(16);

/// What was seen so long ago is read again, in case the watch lost an event.
const SEEN_MAX: Duration = Duration::from_secs(30);

/// A semaphore that this process uses, or in which it forgets places of the dead.
pub(super) struct Tracked {
    pub(super) name: Arc<str>,
    pub(super) replica: Replica,
    /// The calls that the replica has not answered, in their order.
    pub(super) pending: VecDeque<Pending>,
    pub(super) state: State,
    /// When it is settled again.
    pub(super) wakes_at: Option<Time>,
    /// When a reading, a transaction or an event last told its value, and as of which revision.
    pub(super) seen: Option<(Time, u64)>,
    /// The revision of the newest value whose rows were noted.
    pub(super) noted: u64,
    /// Transactions that did not succeed since one did: how many were refused, and how many were too late.
    pub(super) deference: Deference,
    failures: u32,
    losses: u32,
    /// Why calls are refused.
    pub(super) error: Option<BackendError>,
}

/// A call that is not answered yet.
pub(super) struct Pending {
    pub(super) id: u64,
    pub(super) asker: Asker,
    /// The length of the row for the places that it names.
    pub(super) seconds: u32,
    /// The lease that the call asks for.
    pub(super) lease: Duration,
}

/// What its next transaction waits for.
pub(super) enum State {
    /// There may be none.
    Idle,
    /// It is in the queue.
    Queued,
    /// A sign of life of this process is to be put first.
    Parked,
    Paused(Time),
    /// Other processes go first.
    Defers,
    /// The last one has no outcome yet.
    InFlight(Flight),
}

/// What is to be known of a transaction when its outcome comes.
pub(super) struct Flight {
    pub(super) changed: u64,
    pub(super) absent: Vec<Row>,
    /// How many bytes it writes.
    pub(super) writes: usize,
    pub(super) sent: Time,
}

impl Flight {
    pub(super) fn new(transaction: &Transaction, sent: Time) -> Self {
        Self {
            changed: transaction.changed,
            absent: transaction.absent.clone(),
            writes: match &transaction.change {
                Change::Put(bytes) => bytes.len(),
                Change::Delete => 1,
                Change::Nothing => 0,
            },
            sent,
        }
    }
}

impl Tracked {
    pub(super) fn new(name: Arc<str>, replica: Replica) -> Self {
        Self {
            name,
            replica,
            pending: VecDeque::new(),
            state: State::Idle,
            wakes_at: None,
            seen: None,
            noted: 0,
            deference: Deference::default(),
            failures: 0,
            losses: 0,
            error: None,
        }
    }

    /// Takes out the call of this number.
    pub(super) fn take(&mut self, id: u64) -> Option<Pending> {
        let at = self.pending.iter().position(|pending| pending.id == id)?;
        self.pending.remove(at)
    }

    /// Its value as of this revision is known.
    pub(super) fn handle_seen(&mut self, revision: u64, now: Time) {
        if self.seen.is_none_or(|(_, before)| before <= revision) {
            self.seen = Some((now, revision));
        }
    }

    /// Whether what is known is enough to renew permits: their rows have had their signs of life without a gap since it was
    /// seen. What waits is to hear of its grant even if the watch lost the event, so it is read for that.
    ///
    /// Nor is it enough if a permit could be one that a session gives up already, because it lingers for up to half of its
    /// lease: the session would ask for it again at once, and again.
    pub(super) fn is_recent(&self, own: &OwnRows, now: Time) -> bool {
        let Some((at, revision)) = self.seen else { return false };
        let is_since = |pending: &Pending| {
            let registered_at = own.registered_at(pending.seconds);
            registered_at.and_then(|at| u64::try_from(at).ok()).is_some_and(|at| at <= revision)
        };
        let lasts = |pending: &Pending| {
            let from = own.leases_from(pending.seconds);
            from.is_some_and(|from| now + pending.lease / 2 < deadline(from, pending.seconds))
        };
        let is_enough = |pending: &Pending| is_since(pending) && lasts(pending);
        now < at + SEEN_MAX
            && !self.replica.asks_for_waiting()
            && self.pending.iter().all(is_enough)
    }

    pub(super) fn handle_success(&mut self) {
        (self.failures, self.losses) = (0, 0);
    }

    /// A transaction failed, or its outcome is unknown. Returns for how long to pause.
    pub(super) fn handle_failure(&mut self) -> Duration {
        let pause = PAUSE_MIN * (1 << self.failures.min(8));
        self.failures += 1;
        pause.min(PAUSE_MAX)
    }

    /// Another process was first. Returns for how long to pause, where `random` is from 0 to 1.
    pub(super) fn handle_loss(&mut self, random: f64) -> Duration {
        self.losses += 1;
        let Some(more) = self.losses.checked_sub(LOSSES_AT_ONCE) else { return Duration::ZERO };
        let longest = (LOSS_PAUSE_MIN * (1 << more.min(8))).min(LOSS_PAUSE_MAX);
        longest.mul_f64(random)
    }
}
