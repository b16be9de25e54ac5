//! The places that no request has: permits that are kept, and places on their way to the backend.

use std::collections::VecDeque;

use crate::session::place::{Linger, Place};
use crate::time::Time;

/// Places by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Stock {
    /// Permits; the one used last is at the back.
    kept: VecDeque<u64>,
    /// Places on their way to the backend, the oldest in front.
    spare: VecDeque<u64>,
}

impl Stock {
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty() && self.spare.is_empty()
    }

    /// How many permits are kept.
    pub(super) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// The permit that was kept first.
    pub(super) fn first_kept(&self) -> Option<u64> {
        self.kept.front().copied()
    }

    /// The permit that was used last.
    pub(super) fn last_kept(&self) -> Option<u64> {
        self.kept.back().copied()
    }

    pub(super) fn first_spare(&self) -> Option<u64> {
        self.spare.front().copied()
    }

    /// Keeps a permit until then. Returns whether it is the only one.
    pub(super) fn keep(&mut self, place: &mut Place, until: Time) -> bool {
        place.linger = Linger::Kept(until);
        place.taken = true;
        self.kept.push_back(place.n);
        self.kept.len() == 1
    }

    /// Keeps the place of a request that was handed a permit while its own call was in flight, for the next request.
    /// Without spare places, each such request would cost a call more: 64 tasks sent 30,000 a second instead of 213.
    pub(super) fn spare(&mut self, place: &mut Place) {
        place.linger = Linger::Spare;
        place.taken = true;
        self.spare.push_back(place.n);
    }

    /// The place is removed, or has a request again.
    pub(super) fn forget(&mut self, place: &Place) {
        let numbers = match place.linger {
            Linger::Kept(_) => &mut self.kept,
            Linger::Spare => &mut self.spare,
            _ => return,
        };
        // The one used last is the next.
        if numbers.back() == Some(&place.n) {
            numbers.pop_back();
        } else if let Some(at) = numbers.iter().position(|n| *n == place.n) {
            numbers.remove(at);
        }
    }

    /// Ends it. Returns the numbers of all places.
    pub(super) fn take_all(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.kept).into_iter().chain(std::mem::take(&mut self.spare)).collect()
    }
}

#[cfg(test)]
impl Stock {
    pub(super) fn check(&self, places: &crate::session::places::Places) {
        let of = |is: fn(&Linger) -> bool| {
            let places = places.iter().filter(|(_, place)| is(&place.linger));
            let mut numbers: Vec<_> = places.map(|(_, place)| place.n).collect();
            numbers.sort_unstable();
            numbers
        };
        let sorted = |numbers: &VecDeque<u64>| {
            let mut numbers: Vec<_> = numbers.iter().copied().collect();
            numbers.sort_unstable();
            numbers
        };
        assert_eq!(sorted(&self.kept), of(|it| matches!(it, Linger::Kept(_))), "kept permits");
        assert_eq!(sorted(&self.spare), of(|it| *it == Linger::Spare), "spare places");
    }
}
