//! The requests of this process that have no permit, in the order of their arrival.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::claim::Claim;
use crate::session::options::{AcquireOptions, OnUnavailable};
use crate::session::place::Place;
use crate::session::places::Places;

/// The requests without a permit, by arrival and index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Line {
    requests: BTreeSet<(u64, usize)>,
    /// The same, by what they ask for.
    by_terms: BTreeMap<Terms, BTreeSet<(u64, usize)>>,
}

/// What a request asks for. Requests with equal terms may exchange their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Terms {
    // The first field, so that requests of one claim are neighbours.
    claim: Option<Claim>,
    limit: u32,
    headroom: u32,
    lease: Duration,
    max_queue: Option<u32>,
    max_waiting: u32,
    /// The variant, and its share.
    on_unavailable: (u8, u32),
    linger_ms: u32,
    reuse_ms: u32,
}

impl Terms {
    fn of(place: &Place) -> Self {
        Self::new(place.limit, &place.options)
    }

    pub(super) fn new(limit: u32, options: &AcquireOptions) -> Self {
        let AcquireOptions {
            lease,
            max_queue,
            max_waiting,
            on_unavailable,
            headroom,
            // A permit with a rate is not passed on.
            rate: _,
            claim,
            linger_ms,
            reuse_ms,
            // It has no effect here.
            patience_ms: _,
        } = *options;
        let on_unavailable = match on_unavailable {
            OnUnavailable::Refuse => (0, 0),
            OnUnavailable::Admit => (1, 0),
            OnUnavailable::Local(share) => (2, share),
        };
        Self {
            claim,
            limit,
            headroom,
            lease,
            max_queue,
            max_waiting,
            on_unavailable,
            linger_ms,
            reuse_ms,
        }
    }
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The index of the request that came first.
    pub(super) fn first(&self) -> Option<usize> {
        self.requests.first().map(|(_, index)| *index)
    }

    /// The request at `index` joins, if it has no permit, or leaves.
    pub(super) fn follow(&mut self, index: usize, place: &Place, is_in: bool) {
        if is_in && place.state.is_without_permit() && !place.has_left() {
            self.join(index, place);
        } else {
            self.leave(index, place);
        }
    }

    fn join(&mut self, index: usize, place: &Place) {
        if self.requests.insert((place.arrival, index)) {
            self.by_terms.entry(Terms::of(place)).or_default().insert((place.arrival, index));
        }
    }

    fn leave(&mut self, index: usize, place: &Place) {
        if self.requests.remove(&(place.arrival, index))
            && let Entry::Occupied(mut same) = self.by_terms.entry(Terms::of(place))
        {
            same.get_mut().remove(&(place.arrival, index));
            if same.get().is_empty() {
                same.remove();
            }
        }
    }

    /// Whether all requests have one claim.
    pub(super) fn has_one_claim(&self) -> bool {
        let [first, last] = [self.by_terms.first_key_value(), self.by_terms.last_key_value()]
            .map(|entry| entry.map(|(terms, _)| terms.claim));
        first == last
    }

    /// Whether a request asks for something else.
    pub(super) fn has_others_than(&self, terms: &Terms) -> bool {
        self.by_terms.keys().any(|other| other != terms)
    }

    /// The index of the first request that asks for the same as the one at `index`.
    #[inline(never)]
    pub(super) fn first_like(&self, index: usize, places: &Places) -> usize {
        self.like(index, places).and_then(BTreeSet::first).map_or(index, |(_, first)| *first)
    }

    /// The index of the last request that asks for the same as the one at `index`.
    #[inline(never)]
    pub(super) fn last_like(&self, index: usize, places: &Places) -> usize {
        self.like(index, places).and_then(BTreeSet::last).map_or(index, |(_, last)| *last)
    }

    fn like(&self, index: usize, places: &Places) -> Option<&BTreeSet<(u64, usize)>> {
        self.by_terms.get(&Terms::of(places.get(index)?))
    }
}

#[cfg(test)]
impl Line {
    pub(super) fn check(&self, places: &Places) {
        let waits = places.iter().filter(|(_, p)| p.state.is_without_permit() && !p.has_left());
        let requests: BTreeSet<_> = waits.map(|(index, place)| (place.arrival, index)).collect();
        assert_eq!(self.requests, requests, "requests without a permit");
        let mut by_terms: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for entry in &requests {
            let terms = Terms::of(places.get(entry.1).expect("a place"));
            by_terms.entry(terms).or_default().insert(*entry);
        }
        assert_eq!(self.by_terms, by_terms, "their terms");
    }
}
