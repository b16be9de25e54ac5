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

/// From this loss on, a transaction is made anew only after a random part of a round trip. A process that has no turn yet
/// hears of its loss a little later than the next in turn hears of the write, and would lose again each time.
const LOSSES_AT_ONCE: u32 = 12;
const LOSS_PAUSE_MAX: Duration = Duration::from_millis(20);

/// A transaction that writes more bytes than this is made anew only after a random time. The longest is two round trips
/// after the first loss, and doubles with each of the next four.
const LARGE: usize = 8 * 1024;
const LOSS_SLOTS_LOG: u32 = 5;
const LARGE_LOSS_PAUSE_MAX: Duration = Duration::from_millis(250);

/// How many round trips calls wait for others if nobody misses them yet, and for how long at most. The turns of some other
/// processes fit into it.
const GATHERS: u32 = 4;
const GATHERS_MAX: Duration = Duration::from_millis(20);

/// What was seen this long ago is read again, in case the watch lost an event.
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
    pub(super) deference: Deference,
    /// Since when calls wait for others to be written with.
    pub(super) gathers_since: Option<Time>,
    /// Transactions that did not succeed since one did: how many were refused, and how many were too late.
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
    /// Further calls are to go with those that there are.
    Gathers,
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
            gathers_since: None,
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

    /// For how long calls wait for others, so that one transaction writes them all.
    pub(super) fn gather(&mut self, round_trip: Duration, now: Time) -> Option<Duration> {
        if !self.replica.may_wait() {
            return None;
        }
        let until =
            *self.gathers_since.get_or_insert(now) + (round_trip * GATHERS).min(GATHERS_MAX);
        (now < until).then(|| until.since(now))
    }

    pub(super) fn handle_success(&mut self) {
        (self.failures, self.losses, self.gathers_since) = (0, 0, None);
    }

    /// A transaction failed, or its outcome is unknown. Returns for how long to pause.
    pub(super) fn handle_failure(&mut self) -> Duration {
        let pause = PAUSE_MIN * (1 << self.failures.min(8));
        self.failures += 1;
        pause.min(PAUSE_MAX)
    }

    /// Another process was first. Returns for how long to pause, where `random` is from 0 to 1. `writes`: how many bytes the
    /// transaction would have written.
    pub(super) fn handle_loss(
        &mut self,
        writes: usize,
        round_trip: Duration,
        random: f64,
    ) -> Duration {
        self.losses += 1;
        if writes > LARGE {
            // In vain, it costs the cluster as much as one that succeeds.
            let slots = 1 << self.losses.min(LOSS_SLOTS_LOG);
            return (round_trip * slots).mul_f64(random).min(LARGE_LOSS_PAUSE_MAX);
        }
        if self.losses < LOSSES_AT_ONCE {
            return Duration::ZERO;
        }
        round_trip.min(LOSS_PAUSE_MAX).mul_f64(random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Call, NodeId, Op, PlaceId};

    const ROUND_TRIP: Duration = Duration::from_millis(2);

    fn at(ms: u64) -> Time {
        Time::since_epoch(Duration::from_millis(1000 + ms))
    }

    /// One place holds, and these wait.
    fn with_waiting(waiting: u64) -> Tracked {
        let mut replica = Replica::new(NodeId::new(1), Duration::from_secs(2));
        for n in 0..=waiting {
            join(&mut replica, n);
            replica.poll_transaction(at(0), 1_795_169_853_126_543).unwrap();
            replica.handle_committed(n + 1);
        }
        Tracked::new("x".into(), replica)
    }

    fn join(replica: &mut Replica, n: u64) {
        let id = PlaceId { node: NodeId::new(1), poll_only: false, n, bound: None, claim: None };
        let op =
            Op::Acquire { leaving: vec![], lease_ms: 2000, max_queue: Some(100), ids: [id].into() };
        replica.handle_call(n, Call { limit: 1, ..Call::of(op) });
    }

    #[test]
    fn calls_wait_for_others_once_and_for_some_round_trips() {
        let mut tracked = with_waiting(1);
        assert_eq!(tracked.gather(ROUND_TRIP, at(0)), None, "there are none");
        join(&mut tracked.replica, 2);
        assert_eq!(tracked.gather(ROUND_TRIP, at(10)), Some(Duration::from_millis(8)));
        join(&mut tracked.replica, 3);
        assert_eq!(tracked.gather(ROUND_TRIP, at(15)), Some(Duration::from_millis(3)));
        assert_eq!(tracked.gather(ROUND_TRIP, at(18)), None);
        tracked.handle_loss(100, ROUND_TRIP, 0.5);
        assert_eq!(tracked.gather(ROUND_TRIP, at(19)), None, "they have waited");
        tracked.handle_success();
        let far = Duration::from_millis(80);
        assert_eq!(tracked.gather(far, at(20)), Some(Duration::from_millis(20)));
    }

    #[test]
    fn what_is_large_is_not_sent_in_vain_again_and_again() {
        let ms = |losses: u32, writes| {
            let mut tracked = with_waiting(0);
            (1..losses).for_each(|_| _ = tracked.handle_loss(writes, ROUND_TRIP, 1.0));
            tracked.handle_loss(writes, ROUND_TRIP, 1.0).as_millis()
        };
        assert_eq!([1, 11, 12, 50].map(|losses| ms(losses, 1000)), [0, 0, 2, 2]);
        assert_eq!([1, 2, 3, 50].map(|losses| ms(losses, 50_000)), [4, 8, 16, 64]);
        let far = Duration::from_millis(80);
        let pause = with_waiting(0).handle_loss(50_000, far, 1.0);
        assert_eq!(pause, Duration::from_millis(160));
    }

    #[test]
    fn the_first_that_waits_is_written_at_once() {
        let mut tracked = with_waiting(0);
        join(&mut tracked.replica, 1);
        assert_eq!(tracked.gather(ROUND_TRIP, at(0)), None);
    }
}
