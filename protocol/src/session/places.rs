//! The places of a session, by index and by number.

use std::collections::{BTreeMap, BTreeSet};

use super::options::AcquireOptions;
use super::place::{Acked, Linger, Place, Sent, State};
use crate::bound::Bound;
use crate::id::{NodeId, PlaceId};
use crate::time::Time;

/// The most places that one process can have in one semaphore.
pub const PLACES_MAX: usize = 1 << 20;
const INDEX_BITS: u32 = PLACES_MAX.trailing_zeros();

/// The table of places. Free indexes are used again, the lowest first, so that the table shrinks after a burst.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Places {
    node: NodeId,
    /// No hint can reach new places.
    poll_only: bool,
    entries: Vec<Option<Place>>,
    free: BTreeSet<usize>,
    /// The indexes of the places whose number names another one: a permit that is passed on takes its number along.
    strays: BTreeMap<u64, usize>,
    /// How many numbers were given out, by earlier sessions too.
    serial: u64,
    /// How many requests came.
    arrivals: u64,
}

impl Places {
    pub(super) const fn new(node: NodeId, serial: u64, poll_only: bool) -> Self {
        Self {
            node,
            poll_only,
            entries: Vec::new(),
            free: BTreeSet::new(),
            strays: BTreeMap::new(),
            serial,
            arrivals: 0,
        }
    }

    /// The process whose places these are.
    pub(super) const fn node(&self) -> NodeId {
        self.node
    }

    /// Whether no hint can reach new places.
    pub(super) const fn is_poll_only(&self) -> bool {
        self.poll_only
    }

    pub(super) const fn set_poll_only(&mut self, poll_only: bool) {
        self.poll_only = poll_only;
    }

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

    /// The serial of the next number.
    pub(super) const fn serial(&self) -> u64 {
        self.serial
    }

    /// Adds the place of a new request. Returns its index.
    #[inline]
    pub(super) fn insert(
        &mut self,
        limit: u32,
        bound: Option<Bound>,
        options: AcquireOptions,
        now: Time,
    ) -> usize {
        let index = self.free.pop_first().unwrap_or(self.entries.len());
        let place = Place {
            n: self.number(index),
            poll_only: self.poll_only,
            limit,
            bound,
            options,
            state: State::Joining { sent: Sent::No, hint: None },
            lease_end: 0,
            acked: Acked::at(now),
            held_at: now,
            granted_at: now,
            arrival: self.next_arrival(),
            taken: false,
            queued: false,
            check: false,
            refused: false,
            restoring: false,
            held_back: false,
            full: None,
            linger: Linger::No,
            recounted: false,
            used: None,
            replaces: None,
            turn: None,
        };
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

    /// The id of the place at `index`.
    pub(super) fn id(&self, index: usize) -> Option<PlaceId> {
        Some(self.get(index)?.id(self.node))
    }

    /// The place with this number.
    pub(super) fn with_number(&self, n: u64) -> Option<&Place> {
        self.index(n).and_then(|index| self.get(index))
    }

    /// The place with this number.
    #[inline]
    pub(super) fn find(&mut self, n: u64) -> Option<&mut Place> {
        self.index(n).and_then(|index| self.get_mut(index))
    }

    /// The index of the place with this number.
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

    /// Gives the place at `index` a new id, because the old one must not be used again. Returns its number.
    pub(super) fn renumber(&mut self, index: usize) -> u64 {
        let n = self.number(index);
        if let Some(place) = self.entries.get_mut(index).and_then(Option::as_mut) {
            let old = std::mem::replace(&mut place.n, n);
            place.poll_only = self.poll_only;
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

    /// The arrival of the last request.
    pub(super) const fn last_arrival(&self) -> u64 {
        self.arrivals
    }

    /// Counts a request. Returns its arrival.
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
        std::mem::swap(&mut a.held_back, &mut b.held_back);
        std::mem::swap(&mut a.full, &mut b.full);
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

/// The index of the place that was given this number.
pub(super) fn index_of(n: u64) -> usize {
    usize::try_from(n & (PLACES_MAX as u64 - 1)).unwrap_or(usize::MAX)
}

/// The order in which numbers were given out.
pub(super) const fn serial_of(n: u64) -> u64 {
    n >> INDEX_BITS
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::session::OnUnavailable;

    const OPTIONS: AcquireOptions = AcquireOptions {
        lease: Duration::from_secs(3),
        max_queue: None,
        max_waiting: 0,
        on_unavailable: OnUnavailable::Refuse,
        headroom: 0,
        rate: None,
        claim: None,
        linger_ms: 0,
        reuse_ms: 0,
        patience_ms: 0,
    };

    fn places(count: usize) -> Places {
        let mut places = Places::new(NodeId::new(1), 7, false);
        for _ in 0..count {
            places.insert(1, None, OPTIONS, Time::ZERO);
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
        assert_eq!(places.insert(1, None, OPTIONS, Time::ZERO), 1);
        assert_eq!(serial_of(places.get(1).unwrap().n), 10);
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
