//! How fast the queue moves, by the grants of this process: what a refusal tells, and who waits in vain.
//!
//! Each grant of a place that waited is a sample: which turn was its own when it joined, and how long that took. Nothing
//! is asked and nothing is sent for it. Where the queue cannot be seen as a whole, nothing is told: in an outage, after
//! anything that changes how fast permits come free, where permits are passed on, and under a rate.

use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use smallvec::SmallVec;

use super::options::AcquireOptions;
use super::place::{Place, Sent};
use super::{Session, State};
use crate::claim::Tenant;
use crate::id::PlaceId;
use crate::ledger::{PlaceStatus, Reply};
use crate::reject::RejectReason;
use crate::time::Time;

/// The last grants of a line that count. Fewer are all from one phase of a burst, and in the next the line moves at
/// another speed.
const SAMPLES_MAX: usize = 128;
/// Fewer say nothing.
const SAMPLES_MIN: usize = 5;
/// Older ones say nothing. Until then, or for as many grants as count, those of a process that was frozen meanwhile tell
/// too long a wait: a call that comes late does not tell a freeze from a server that answers slowly, whose waits are true.
const AGE_MAX: Duration = Duration::from_secs(30);
/// The lines that have samples; beyond it, the one with the oldest is forgotten.
const LINES_MAX: usize = 8;
/// A share is halved beyond so many places, so that the latest count most.
const SHARE_MAX: u64 = 2048;
/// A request waits in vain if it is expected to wait this many times longer than it may. Below it, the scatter of the
/// estimate would refuse requests that had been served.
const MARGIN: u32 = 2;

/// What the session knows of the queue. The first place that waits creates it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Movement(Option<Box<Parts>>);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Parts {
    /// The limit in force. Under another one the queue moves at another speed.
    limit: u32,
    /// A request that came before this has waited for something else, too.
    since: Time,
    lines: Vec<Line>,
    /// The numbers of the places that left the queue, and that the backend still counts.
    left: BTreeSet<u64>,
    /// How many places were granted, or taken out by the backend, since a reply last had the length of the queue.
    gone: u64,
    /// How many places of other processes wait, by the last length of the queue.
    elsewhere: u64,
}

/// The samples of one line: that of a tenant, or the queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Line {
    tenant: Option<Tenant>,
    /// The oldest first.
    samples: VecDeque<Sample>,
    share: Share,
}

/// Which part of the places that wait is a tenant's. Counted in this process, where single moments say little, and taken
/// for that of other processes, of which only the sum is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Share {
    own: u64,
    all: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sample {
    turn: u32,
    waited: Duration,
    at: Time,
}

impl Movement {
    /// What was seen until now says nothing of what comes.
    pub(super) fn handle_change(&mut self, now: Time) {
        if let Some(parts) = &mut self.0 {
            parts.since = now;
            parts.lines.clear();
        }
    }

    /// A place leaves the queue, and the backend does not know yet.
    #[inline]
    pub(super) fn handle_leave(&mut self, place: &Place) {
        if let Some(parts) = self.0.as_mut().filter(|_| place.is_waiting()) {
            parts.left.insert(place.n);
        }
    }

    /// The backend does not count the place with this number any more.
    #[inline]
    pub(super) fn handle_left(&mut self, n: u64) {
        if let Some(parts) = &mut self.0 {
            parts.gone += u64::from(parts.left.remove(&n));
        }
    }

    /// A reply has the length of the queue.
    #[inline]
    pub(super) fn handle_length(&mut self) {
        if let Some(parts) = &mut self.0 {
            parts.gone = 0;
        }
    }

    /// So many places wait, and so many of them are own ones that have not left.
    #[inline]
    pub(super) fn handle_elsewhere(&mut self, waiting: u64, own: u64) {
        if let Some(parts) = &mut self.0 {
            parts.elsewhere = waiting.saturating_sub(own + parts.left.len() as u64);
        }
    }

    /// For explorers, in which no request waits in vain: forgets everything.
    pub(super) fn coarsen(&mut self) {
        *self = Self::default();
    }

    /// How many places left the queue that the backend still counts.
    fn left(&self) -> u64 {
        self.0.as_ref().map_or(0, |parts| parts.left.len() as u64)
    }

    /// How many places of this process do not wait any more of those in the last length of the queue.
    fn left_since(&self) -> u64 {
        self.left() + self.0.as_ref().map_or(0, |parts| parts.gone)
    }

    /// Returns what is known under this limit.
    fn begin(&mut self, limit: u32, now: Time) -> &mut Parts {
        let parts = self.0.get_or_insert_with(|| Box::new(Parts { limit, ..Parts::default() }));
        if parts.limit != limit {
            (parts.limit, parts.since) = (limit, now);
            parts.lines.clear();
        }
        parts
    }
}

impl Share {
    /// Adds the places that waited at one moment.
    const fn add(&mut self, moment: Self) {
        self.own += moment.own;
        self.all += moment.all;
        while self.all > SHARE_MAX {
            self.own /= 2;
            self.all /= 2;
        }
    }

    /// How many of these places are the tenant's, rounded.
    fn of(self, places: u64) -> u64 {
        let own = places.saturating_mul(self.own).saturating_add(self.all / 2);
        own.checked_div(self.all).unwrap_or(0)
    }
}

impl Parts {
    /// A request that came at `came` has its permit.
    fn push(&mut self, tenant: Option<Tenant>, came: Time, sample: Sample) {
        if came < self.since {
            return;
        }
        // The line of the last grant is the last one.
        let known = self.lines.iter().position(|line| line.tenant == tenant);
        let known = known.map(|index| self.lines.remove(index));
        if self.lines.len() == LINES_MAX {
            self.lines.remove(0);
        }
        let mut line = known.unwrap_or_else(|| Line {
            tenant,
            samples: VecDeque::new(),
            share: Share::default(),
        });
        if line.samples.len() == SAMPLES_MAX {
            line.samples.pop_front();
        }
        line.samples.push_back(sample);
        self.lines.push(line);
    }

    /// How many places of a tenant wait in other processes, if so many wait here at this moment, of its own and of all.
    fn elsewhere_of(&self, tenant: Tenant, here: Share) -> u64 {
        let line = self.lines.iter().find(|line| line.tenant == Some(tenant));
        let mut share = line.map_or_else(Share::default, |line| line.share);
        share.add(here);
        share.of(self.elsewhere)
    }

    /// How long the request with this turn waits, if that can be told. `is_least`: not longer than those of its line did on
    /// average, because a tenant's turn is an estimate itself.
    fn expected_wait(
        &self,
        tenant: Option<Tenant>,
        turn: u32,
        is_least: bool,
        now: Time,
    ) -> Option<Duration> {
        let line = self.lines.iter().find(|line| line.tenant == tenant)?;
        let is_recent = |sample: &&Sample| now.since(sample.at) <= AGE_MAX;
        let mut samples: SmallVec<[&Sample; SAMPLES_MAX]> =
            line.samples.iter().filter(is_recent).collect();
        if samples.len() < SAMPLES_MIN {
            return None;
        }
        let mean = sum(&samples).1 / samples.len() as u128;
        // A turn in a long queue takes less time than in a short one, because more of those ahead give up.
        samples.sort_unstable_by_key(|sample| (sample.turn.abs_diff(turn), Reverse(sample.at)));
        samples.truncate(SAMPLES_MIN.max(samples.len() / 2));
        let (turns, waited) = sum(&samples);
        let nanos = (waited * u128::from(turn)).checked_div(turns)?;
        let nanos = if is_least { nanos.min(mean) } else { nanos };
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// The turns and the waits, ns, of all of them.
fn sum(samples: &[&Sample]) -> (u128, u128) {
    samples.iter().fold((0, 0), |(turns, waited), sample| {
        (turns + u128::from(sample.turn), waited + sample.waited.as_nanos())
    })
}

impl Session {
    /// Notes the turns of newcomers that find no permit, before the reply changes their states.
    #[inline(never)]
    pub(super) fn note_turns(&mut self, ids: &[PlaceId], reply: &Reply, now: Time) {
        let Some(usage) = reply.usage.filter(|_| !self.reuse.is_on()) else { return };
        if usage.waiting > 0 {
            self.movement.begin(self.limits.in_force(), now);
        }
        // The newcomers are the last in the queue, in their order.
        let mut behind = reply.statuses.iter().filter(|status| waits(status)).count() as u64;
        self.movement.handle_elsewhere(usage.waiting, self.counts.waiting() + behind);
        for (id, status) in ids.iter().zip(&reply.statuses) {
            let ahead = usage.waiting.saturating_sub(behind + self.movement.left());
            behind -= u64::from(waits(status));
            match (self.places.index(id.n), id.tenant()) {
                (Some(index), None) => self.set_turn(index, ahead),
                (Some(_), Some(_)) if waits(status) => {}
                (Some(index), Some(_)) => self.note_turn_in_line(index),
                // Its request left before this reply.
                (None, _) if waits(status) => {
                    self.movement.0.iter_mut().for_each(|parts| _ = parts.left.insert(id.n));
                }
                (None, _) => {}
            }
        }
    }

    /// Notes the turn of a place of a tenant that is about to wait, or refused instead.
    #[inline(never)]
    pub(super) fn note_turn_in_line(&mut self, index: usize) {
        let options = self.places.get(index).map(|place| place.options);
        let Some(tenant) = options.and_then(|options| options.tenant()) else { return };
        let ahead = options.map_or(0, |options| self.ahead_in_line(tenant, &options));
        self.set_turn(index, ahead);
        let here = self.share_here(tenant);
        if let Some(parts) = &mut self.movement.0
            && let Some(line) = parts.lines.iter_mut().find(|line| line.tenant == Some(tenant))
        {
            line.share.add(here);
        }
    }

    /// How many places are ahead of a newcomer in its tenant's line. Replies do not contain the length of the line, but how
    /// many wait in all. Under a rate the turn is a bound, so only those count that are known.
    fn ahead_in_line(&self, tenant: Tenant, options: &AcquireOptions) -> u64 {
        let here = self.counts.tenants().waiting_of(tenant) as u64;
        let parts = self.movement.0.as_deref().filter(|_| !options.is_timed());
        here + parts.map_or(0, |parts| parts.elsewhere_of(tenant, self.share_here(tenant)))
    }

    /// A tenant's share of those that wait in this process, with a newcomer.
    fn share_here(&self, tenant: Tenant) -> Share {
        let own = self.counts.tenants().waiting_of(tenant) as u64;
        Share { own: own + 1, all: self.counts.waiting() + 1 }
    }

    /// A place that was asked for twice may stand anywhere, and how long one with further limits waits depends on which of
    /// them is full.
    fn set_turn(&mut self, index: usize, ahead: u64) {
        if let Some(place) = self.places.get_mut(index)
            && matches!(place.state, State::Joining { sent: Sent::Once, .. })
            && !place.claim().has_further()
        {
            place.turn = turn_after(ahead);
        }
    }

    /// Refuses the newcomers that would wait in vain.
    #[inline(never)]
    pub(super) fn refuse_hopeless(&mut self, ids: &[PlaceId], reply: &Reply, now: Time) {
        for (id, _) in ids.iter().zip(&reply.statuses).filter(|(_, status)| waits(status)) {
            let index = self.places.index(id.n).filter(|index| self.waits_in_vain(*index, now));
            if let Some(index) = index {
                self.leave_server(index, now);
                self.refuse(index, RejectReason::Hopeless, reply.usage);
            }
        }
    }

    /// The place with this number has left the backend's queue.
    pub(super) fn handle_left_queue(&mut self, n: u64) {
        self.reuse.handle_left_queue(n);
        self.movement.handle_left(n);
    }

    /// Whether a request is expected to wait for much longer than it may.
    fn waits_in_vain(&self, index: usize, now: Time) -> bool {
        let Some(place) = self.places.get(index).filter(|place| place.is_waiting()) else {
            return false;
        };
        let Some(patience) = place.options.patience() else { return false };
        let left = patience.saturating_sub(now.since(place.held_at));
        let expected = self.expected_wait(place, place.turn, place.options.tenant().is_some(), now);
        expected.is_some_and(|expected| expected > left * MARGIN)
    }

    /// Takes the grant of a place that has waited, as a sample of how fast its line moves.
    #[inline(never)]
    pub(super) fn note_grant(&mut self, index: usize, now: Time) {
        let limit = self.limits.in_force();
        let Some(place) = self.places.get_mut(index) else { return };
        let Some(turn) = place.turn.take() else { return };
        let (tenant, came) = (place.options.tenant(), place.held_at);
        let sample = Sample { turn: turn.get(), waited: now.since(came), at: now };
        let parts = self.movement.begin(limit, now);
        parts.gone += 1;
        parts.push(tenant, came, sample);
    }

    /// Notes which turn a request would have that came now, in place of the one that was refused.
    pub(super) fn note_refusal(&mut self, index: usize) {
        let place = self.places.get(index).filter(|place| place.turn.is_some());
        let Some(&Place { options, state: State::Refused { waiting, .. }, .. }) = place else {
            return;
        };
        let ahead = match options.tenant() {
            None => u64::from(waiting).saturating_sub(self.movement.left_since()),
            Some(tenant) => self.ahead_in_line(tenant, &options),
        };
        if let Some(Place { state: State::Refused { next, .. }, .. }) = self.places.get_mut(index) {
            *next = turn_after(ahead);
        }
    }

    /// What a refusal tells of the queue: how many were ahead of the request, unless its tenant has a line of its own;
    /// and how long a request would wait that came then.
    pub(super) fn tell(
        &self,
        index: usize,
        reason: RejectReason,
        now: Time,
    ) -> (Option<u32>, Option<Duration>) {
        let place = self.places.get(index).filter(|_| self.is_told(reason));
        let Some(place) = place else { return (None, None) };
        let State::Refused { next, .. } = place.state else { return (None, None) };
        let ahead = place.turn.filter(|_| place.options.tenant().is_none());
        (ahead.map(|turn| turn.get() - 1), self.expected_wait(place, next, false, now))
    }

    /// How long the rate lets a request wait at least that comes now, in place of a refused one, from the next start on.
    /// Unlike an [expected wait](Self::tell), this is a bound: each of those ahead is one start or more, however fast
    /// permits come free. It is less for a request that outlasts some of them in the queue.
    pub(super) fn rate_wait(&self, index: usize, reason: RejectReason) -> Duration {
        let place = self.places.get(index).filter(|_| self.is_told(reason));
        let next = place.and_then(|place| match place.state {
            State::Refused { next, .. } => next,
            _ => None,
        });
        let rate = place.and_then(|place| self.limits.rate_for(place.options.rate));
        let wait = rate.zip(next).map(|(rate, turn)| rate.least_time_of(turn.get() - 1));
        wait.unwrap_or_default()
    }

    /// Whether the queue matters to a refusal, and can be seen. While nothing is granted by order of an operator, it does
    /// not matter.
    fn is_told(&self, reason: RejectReason) -> bool {
        reason.is_full() && !self.is_outage() && self.limits.in_force() > 0
    }

    /// How long a request like this one waits that has this turn, if that can be told.
    fn expected_wait(
        &self,
        place: &Place,
        turn: Option<NonZeroU32>,
        is_least: bool,
        now: Time,
    ) -> Option<Duration> {
        let parts = self.movement.0.as_ref()?;
        // A window opens for all its starts at once, however long each of them has waited.
        let is_even = !self.reuse.is_on() && !place.options.is_timed();
        let is_known = is_even && parts.limit == self.limits.in_force();
        let turn = turn.filter(|_| is_known)?.get();
        parts.expected_wait(place.options.tenant(), turn, is_least, now)
    }
}

const fn waits(status: &PlaceStatus) -> bool {
    status.ticket().is_some()
}

fn turn_after(ahead: u64) -> Option<NonZeroU32> {
    NonZeroU32::new(u32::try_from(ahead).unwrap_or(u32::MAX).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::{SHARE_MAX, Share};

    #[test]
    fn a_share_is_that_of_the_last_places_seen() {
        let mut share = Share::default();
        assert_eq!(share.of(100), 0);
        for _ in 0..1000 {
            share.add(Share { own: 3, all: 4 });
        }
        assert_eq!((share.of(100), share.of(3), share.of(1)), (75, 2, 1), "rounded");
        for _ in 0..SHARE_MAX {
            share.add(Share { own: 0, all: 4 });
        }
        assert_eq!(share.of(100), 0);
        assert!((SHARE_MAX / 2..=SHARE_MAX).contains(&share.all));
        share.add(Share { own: 1 << 20, all: 1 << 20 });
        assert!((999..=1000).contains(&share.of(1000)), "{share:?}");
        assert_eq!(Share { own: 1, all: 2 }.of(u64::MAX), u64::MAX / 2);
    }
}
