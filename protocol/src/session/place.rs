//! One request's place, and the table of all places of a session.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::options::{AcquireOptions, OnUnavailable};
use crate::bound::Bound;
use crate::claim::Claim;
use crate::id::{NodeId, PlaceId};
use crate::reject::RejectReason;
use crate::time::Time;

/// Places of one process in one semaphore, at the most.
pub const PLACES_MAX: usize = 1 << 20;
const INDEX_BITS: u32 = PLACES_MAX.trailing_zeros();

/// How often a waiting place is renewed: a lost hint costs no more.
pub(super) const WAITING_RENEWAL: Duration = Duration::from_secs(1);
/// The same for a place that no hint can reach.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Lease ends are whole ms, rounded down: a place may end so much earlier than its lease.
pub(super) const LEASE_GRAIN: Duration = Duration::from_millis(1);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    /// The place's number on the wire. Its low bits are the index in the table, the others count the
    /// places of the session, so that no number is used twice.
    pub(super) n: u64,
    pub(super) poll_only: bool,
    /// Permits of the semaphore, as its request knows it.
    pub(super) limit: u32,
    /// What its id says of that; `None`: it may not wait. It stays as it is, like the number.
    pub(super) bound: Option<Bound>,
    pub(super) options: AcquireOptions,
    pub(super) state: State,
    /// The lease end that the backend acknowledged last, by its clock, ms.
    pub(super) lease_end: u64,
    /// When the call that this answered was sent; of a place in flight by policy, when it was last to be
    /// announced.
    pub(super) acked: Time,
    /// When its request got its permit; before that, when its request came.
    pub(super) held_at: Time,
    /// When the permit was granted, whatever request had it since.
    pub(super) granted_at: Time,
    /// Counts the requests of the session, so that they are served in the order in which they came.
    pub(super) arrival: u64,
    /// The request knows that it has its permit.
    pub(super) taken: bool,
    /// It once stood in a queue, the backend's or the process's own: to its request it waits from then
    /// on.
    pub(super) queued: bool,
    /// Ask about it with the next renewal, due or not.
    pub(super) check: bool,
    /// The backend refused its last renewal or proof: the next one waits for the time of the session.
    pub(super) refused: bool,
    /// A renewal found it gone, and it is being brought back: until that is answered, a renewal would only
    /// find it gone once more.
    pub(super) restoring: bool,
    pub(super) linger: Linger,
    /// The place that keeps its turn until this one stands there, and until when that needs to be released.
    pub(super) replaces: Option<Box<(PlaceId, Time)>>,
}

/// Whether a permit outlives its request, because the other side may still be working on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Linger {
    #[default]
    No,
    /// Its request was broken off, and has not left yet.
    Due,
    /// A layer further in rejected it, and it has not gone on since, so the other side never saw it.
    Spared,
    /// An attempt of it was passed on or answered: another that is rejected spares it no more.
    Reached,
    /// Its request was told that the permit is lost, in time to break off and linger; and has not left yet.
    Lost,
    /// Its request has left; it is released this many ms after its grant.
    Until(u32),
    /// Its request has left; it is kept until then for the next request of this process.
    Kept(Time),
    /// Its request was handed another permit; it is on its way to the backend, for the next request of this process.
    Spare,
}

/// In how many calls a place was named that may have been carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sent {
    No,
    Once,
    /// An earlier call went unanswered, so a refusal of the last one does not say that the place is not there.
    Again,
}

impl Sent {
    pub(super) const fn send(&mut self) {
        *self = match self {
            Self::No => Self::Once,
            Self::Once | Self::Again => Self::Again,
        };
    }

    /// The last call was not carried out.
    pub(super) const fn take_back(&mut self) {
        if matches!(self, Self::Once) {
            *self = Self::No;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum State {
    /// Its acquire is unanswered.
    Joining {
        sent: Sent,
        hint: Option<u64>,
    },
    /// The ticket is unknown after an answer that came too late to be believed.
    Waiting {
        ticket: Option<u64>,
    },
    Held,
    /// In flight by policy, because the backend could not be asked: to be counted when it can.
    Admitted {
        announced: Sent,
    },
    Refused {
        reason: RejectReason,
        in_use: u64,
        waiting: u64,
    },
    Failed,
    Closed,
    Lost,
    /// Released by a caller that waits for the acknowledgement.
    Releasing,
    Released {
        acknowledged: bool,
    },
}

impl State {
    /// Whether its request has asked for a permit and has none.
    pub(super) const fn is_without_permit(self) -> bool {
        matches!(self, Self::Joining { .. } | Self::Waiting { .. })
    }
}

impl Place {
    /// From when on its permit may not be relied on.
    #[inline]
    pub(super) fn deadline(&self) -> Time {
        if self.options.linger_ms == 0 || self.has_left() || self.linger == Linger::Lost {
            self.lease_over()
        } else {
            self.acked + self.reliance()
        }
    }

    /// From when on the backend may have given its permit to another.
    pub(super) fn lease_over(&self) -> Time {
        self.acked + lease_at_least(self.options.lease)
    }

    /// For how long a request may use its permit without a renewal: its lease, less the linger, which is still to come
    /// when the request is broken off at the end of that.
    pub(super) fn reliance(&self) -> Duration {
        lease_at_least(self.options.lease).saturating_sub(self.options.linger())
    }

    pub(super) fn interval(&self) -> Duration {
        match self.state {
            State::Waiting { .. } if self.poll_only => (self.options.lease / 3).min(POLL_INTERVAL),
            State::Waiting { .. } => (self.options.lease / 3).min(WAITING_RENEWAL),
            _ => self.held_interval(),
        }
    }

    /// Two renewals may fail.
    pub(super) fn held_interval(&self) -> Duration {
        let AcquireOptions { lease, linger_ms, .. } = self.options;
        if linger_ms == 0 { lease / 3 } else { (lease - self.options.linger()) / 3 }
    }

    pub(super) fn lease_ms(&self) -> u64 {
        self.options.lease_ms()
    }

    /// By what it is compared with others.
    pub(super) fn claim(&self) -> Claim {
        self.options.claim.unwrap_or_else(Claim::nobodys)
    }

    /// How many permits it takes.
    pub(super) fn cost(&self) -> u32 {
        self.options.claim.map_or(1, Claim::cost)
    }

    /// Whether, in an outage, it waits for a share of the process's own.
    pub(super) const fn waits_locally(&self) -> bool {
        (self.is_joining() || self.is_waiting())
            && matches!(self.options.on_unavailable, OnUnavailable::Local(_))
    }

    /// Whether the backend is to know of it.
    pub(super) const fn is_live(&self) -> bool {
        matches!(self.state, State::Waiting { .. } | State::Held | State::Admitted { .. })
    }

    pub(super) const fn is_joining(&self) -> bool {
        matches!(self.state, State::Joining { .. })
    }

    pub(super) const fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }

    pub(super) const fn is_in_flight(&self) -> bool {
        matches!(self.state, State::Held | State::Admitted { .. })
    }

    /// Whether its permit outlives its request where that is broken off.
    pub(super) fn may_linger(&self) -> bool {
        self.is_in_flight() && self.taken && self.options.linger_ms > 0
    }

    /// Until when it stays without a request.
    pub(super) fn lingers_until(&self) -> Option<Time> {
        match self.linger {
            Linger::Until(ms) => Some(self.held_at + Duration::from_millis(u64::from(ms))),
            _ => None,
        }
    }

    /// Whether no request has it.
    pub(super) const fn has_left(&self) -> bool {
        matches!(self.linger, Linger::Until(_)) || self.is_for_the_next()
    }

    /// Whether no request has it, and the next one of this process may.
    pub(super) const fn is_for_the_next(&self) -> bool {
        matches!(self.linger, Linger::Kept(_) | Linger::Spare)
    }

    /// Its request has left, and it lingers. Returns until when.
    pub(super) fn begin_to_linger(&mut self, now: Time) -> Time {
        let held_ms = now.since(self.held_at).as_nanos().div_ceil(1_000_000);
        let held_ms = u32::try_from(held_ms).unwrap_or(u32::MAX);
        self.linger = Linger::Until(held_ms.saturating_add(self.options.linger_ms));
        self.lingers_until().unwrap_or(now)
    }

    /// Whether the backend may know it.
    pub(super) const fn is_there(&self) -> bool {
        match self.state {
            State::Joining { sent, .. } | State::Admitted { announced: sent } => {
                !matches!(sent, Sent::No)
            }
            State::Waiting { .. } | State::Held => true,
            _ => false,
        }
    }

    pub(super) const fn id(&self, node: NodeId) -> PlaceId {
        let (n, bound, claim) = (self.n, self.bound, self.options.claim);
        PlaceId { node, poll_only: self.poll_only, n, bound, claim }
    }
}

/// The places of a session by index; free indexes are used again, the lowest first, so that the table
/// shrinks after a burst.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Places {
    entries: Vec<Option<Place>>,
    free: BTreeSet<usize>,
    /// Numbers that name another index than that of their place: a permit that is passed on takes its number along.
    strays: BTreeMap<u64, usize>,
    /// Counts the numbers given out.
    serial: u64,
    arrivals: u64,
}

impl Places {
    /// Every index is below this.
    pub(super) const fn bound(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// From which on numbers are given out; and those before it are not.
    pub(super) const fn serial(&self) -> u64 {
        self.serial
    }

    pub(super) const fn starting_at(serial: u64) -> Self {
        Self {
            entries: Vec::new(),
            free: BTreeSet::new(),
            strays: BTreeMap::new(),
            serial,
            arrivals: 0,
        }
    }

    /// Adds what `make` makes of its number.
    #[inline]
    pub(super) fn insert(&mut self, make: impl FnOnce(u64) -> Place) -> usize {
        let index = self.free.pop_first().unwrap_or(self.entries.len());
        let place = make(self.number(index));
        if index == self.entries.len() {
            self.entries.push(Some(place));
        } else {
            self.entries[index] = Some(place);
        }
        index
    }

    #[inline]
    pub(super) fn remove(&mut self, index: usize) -> Option<Place> {
        let place = self.entries.get_mut(index)?.take()?;
        if index_of(place.n) != index {
            self.strays.remove(&place.n);
        }
        if index + 1 < self.entries.len() {
            self.free.insert(index);
            return Some(place);
        }
        self.entries.pop();
        while let Some(None) = self.entries.last() {
            self.entries.pop();
            self.free.remove(&self.entries.len());
        }
        if self.entries.capacity() > 4 * self.entries.len() + 64 {
            self.entries.shrink_to(2 * self.entries.len());
        }
        Some(place)
    }

    pub(super) fn get(&self, index: usize) -> Option<&Place> {
        self.entries.get(index)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut Place> {
        self.entries.get_mut(index)?.as_mut()
    }

    /// The place with this number.
    #[inline]
    pub(super) fn find(&mut self, n: u64) -> Option<&mut Place> {
        self.index(n).and_then(|index| self.get_mut(index))
    }

    /// Where the place with this number is.
    #[inline]
    pub(super) fn index(&self, n: u64) -> Option<usize> {
        let index = index_of(n);
        if self.get(index).is_some_and(|place| place.n == n) {
            return Some(index);
        }
        self.stray(n)
    }

    #[inline(never)]
    fn stray(&self, n: u64) -> Option<usize> {
        self.strays.get(&n).copied()
    }

    /// Gives the place at `index` a new number. Returns it.
    pub(super) fn renumber(&mut self, index: usize) -> u64 {
        let n = self.number(index);
        if let Some(place) = self.entries.get_mut(index).and_then(Option::as_mut) {
            let old = std::mem::replace(&mut place.n, n);
            if index_of(old) != index {
                self.strays.remove(&old);
            }
        }
        n
    }

    /// Gives the place at `index` a number that it had before.
    pub(super) fn set_number(&mut self, index: usize, n: u64) {
        let Some(place) = self.entries.get_mut(index).and_then(Option::as_mut) else { return };
        let before = std::mem::replace(&mut place.n, n);
        self.strays.remove(&before);
        if index_of(n) != index {
            self.strays.insert(n, index);
        }
    }

    /// The number of the last request.
    pub(super) const fn last_arrival(&self) -> u64 {
        self.arrivals
    }

    /// Counts the requests.
    pub(super) const fn next_arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    /// Exchanges what the backend knows of two places: their numbers and leases. Requests keep their indexes.
    pub(super) fn exchange(&mut self, one: usize, other: usize) {
        let (low, high) = (one.min(other), one.max(other));
        let Some((below, above)) = self.entries.split_at_mut_checked(high) else { return };
        let (Some(Some(a)), Some(Some(b))) = (below.get_mut(low), above.first_mut()) else {
            return;
        };
        std::mem::swap(&mut a.n, &mut b.n);
        std::mem::swap(&mut a.bound, &mut b.bound);
        std::mem::swap(&mut a.replaces, &mut b.replaces);
        std::mem::swap(&mut a.poll_only, &mut b.poll_only);
        std::mem::swap(&mut a.lease_end, &mut b.lease_end);
        std::mem::swap(&mut a.acked, &mut b.acked);
        std::mem::swap(&mut a.granted_at, &mut b.granted_at);
        std::mem::swap(&mut a.check, &mut b.check);
        std::mem::swap(&mut a.refused, &mut b.refused);
        std::mem::swap(&mut a.restoring, &mut b.restoring);
        for (n, index) in [(a.n, low), (b.n, high)] {
            if index_of(n) == index {
                self.strays.remove(&n);
            } else {
                self.strays.insert(n, index);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Place)> {
        self.entries.iter().enumerate().filter_map(|(index, place)| Some((index, place.as_ref()?)))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Place> {
        self.entries.iter_mut().filter_map(Option::as_mut)
    }

    /// A number that no place of this session had before, for the one at `index`.
    const fn number(&mut self, index: usize) -> u64 {
        let serial = self.serial;
        self.serial += 1;
        ((serial << INDEX_BITS) | index as u64) % (1 << 56)
    }
}

/// How long a lease lasts at least from when it was asked for.
pub(super) const fn lease_at_least(lease: Duration) -> Duration {
    // It was asked for in whole ms.
    let below_ms = Duration::from_nanos(lease.subsec_nanos() as u64 % 1_000_000);
    lease.saturating_sub(below_ms).saturating_sub(LEASE_GRAIN)
}

/// Where the place that got this number was in the table then.
pub(super) fn index_of(n: u64) -> usize {
    usize::try_from(n & (PLACES_MAX as u64 - 1)).unwrap_or(usize::MAX)
}

/// Numbers in the order in which they were given out.
pub(super) const fn serial_of(n: u64) -> u64 {
    n >> INDEX_BITS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::OnUnavailable;

    fn places(count: usize) -> Places {
        let mut places = Places::starting_at(7);
        for _ in 0..count {
            places.insert(|n| Place {
                n,
                poll_only: false,
                limit: 1,
                bound: None,
                options: AcquireOptions {
                    lease: Duration::from_secs(3),
                    max_queue: None,
                    max_waiting: 0,
                    on_unavailable: OnUnavailable::Refuse,
                    headroom: 0,
                    claim: None,
                    linger_ms: 0,
                    reuse_ms: 0,
                },
                state: State::Held,
                lease_end: 0,
                acked: Time::ZERO,
                held_at: Time::ZERO,
                granted_at: Time::ZERO,
                arrival: 0,
                taken: true,
                queued: false,
                check: false,
                refused: false,
                restoring: false,
                linger: Linger::No,
                replaces: None,
            });
        }
        places
    }

    #[test]
    fn a_number_tells_the_index_and_the_order() {
        let mut places = places(3);
        for (index, serial) in [(0, 7), (1, 8), (2, 9)] {
            let n = places.get(index).unwrap().n;
            assert_eq!((index_of(n), serial_of(n)), (index, serial));
            assert!(n < 1 << 56);
        }
        places.remove(1);
        assert_eq!(places.insert(|n| Place { n, ..places_of_one() }), 1);
        assert_eq!(serial_of(places.get(1).unwrap().n), 10);
    }

    fn places_of_one() -> Place {
        places(1).remove(0).unwrap()
    }

    #[test]
    fn the_table_gives_room_back_once_most_of_it_is_free() {
        let mut places = places(1000);
        let room = places.entries.capacity();
        for index in (500..1000).rev() {
            places.remove(index);
        }
        assert_eq!(places.entries.capacity(), room, "half of it is in use");
        for index in (10..500).rev() {
            places.remove(index);
            let (room, len) = (places.entries.capacity(), places.entries.len());
            assert!(room <= 4 * len + 64, "{room} for {len}");
            assert!(room >= 2 * len, "{room} for {len}");
        }
    }
}
