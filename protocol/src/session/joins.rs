//! Newcomers: the places whose acquire is to be sent.

use std::collections::VecDeque;

use super::options::AcquireOptions;
use super::place::{Sent, State};
use super::places::Places;
use crate::call::{Call, Op};
use crate::id::{Ids, PlaceId};

/// The newcomers of a session, by number, in the order of their arrival. Some may be none any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Joins {
    queue: VecDeque<u64>,
}

impl Joins {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn push(&mut self, n: u64) {
        self.queue.push_back(n);
    }

    /// The place is no newcomer any more, and was never sent.
    pub(super) fn forget(&mut self, n: u64, places: &Places) {
        if self.queue.back() == Some(&n) {
            self.queue.pop_back();
        } else if self.queue.front() == Some(&n) {
            self.queue.pop_front();
        } else if self.queue.len() > 2 * places.len() + 16 {
            // Others are passed over when their turn comes; but there are never more of them than of newcomers.
            self.queue.retain(|n| is_newcomer(*n, places));
        }
    }

    /// Drops what is no newcomer any more from the front. Returns whether there is a newcomer.
    pub(super) fn skip(&mut self, places: &Places) -> bool {
        while let Some(n) = self.queue.front() {
            if is_newcomer(*n, places) {
                return true;
            }
            self.queue.pop_front();
        }
        false
    }

    /// The limit of the first newcomer.
    pub(super) fn next_limit(&self, places: &Places) -> Option<u32> {
        self.queue.front().and_then(|n| places.with_number(*n)).map(|place| place.limit)
    }

    /// One call for the first newcomers that ask for the same, of whatever tenants, in the order of their arrival: as
    /// many as there is room for beside those that leave. If there is no room, the call only releases those.
    pub(super) fn poll(&mut self, leaving: Ids, most: usize, places: &mut Places) -> Call {
        let (node, mut ids) = (places.node(), Ids::new());
        let (mut common, mut recalls): (Option<(u32, AcquireOptions)>, bool) = (None, false);
        let mut permits = leaving.iter().map(PlaceId::work).sum::<usize>();
        while permits < most
            && let Some(n) = self.queue.front().copied()
        {
            let place = match places.find(n) {
                Some(place) if place.is_joining() => place,
                _ => {
                    self.queue.pop_front();
                    continue;
                }
            };
            match &common {
                None => common = Some((place.limit, place.options)),
                Some((limit, options)) => {
                    if *limit != place.limit || !options.may_share_a_call(&place.options) {
                        break;
                    }
                }
            }
            if let State::Joining { sent, .. } = &mut place.state {
                sent.send();
            }
            recalls |= place.options.reuse_ms > 0;
            permits += place.claim().work();
            ids.push(place.id(node));
            self.queue.pop_front();
        }
        let Some((limit, options)) = common else { return Call::of(Op::Release { ids: leaving }) };
        let AcquireOptions { headroom, max_waiting, max_queue, .. } = options;
        let leaving = if leaving.is_empty() { Vec::new() } else { leaving.into_vec() };
        let op = Op::Acquire { leaving, lease_ms: options.lease_ms(), max_queue, ids };
        Call { limit, headroom, for_all: false, max_waiting, recalls, used: Vec::new(), op }
    }

    /// There is a new connection: every place without an answer is asked for again.
    pub(super) fn handle_connected(&mut self, places: &mut Places) {
        let poll_only = places.is_poll_only();
        let mut joins = Vec::new();
        for place in places.iter_mut() {
            let State::Joining { sent, hint } = &mut place.state else { continue };
            // A hint that was kept is of the connection before, and perhaps of data before. An id that was sent stays
            // as it is.
            *hint = None;
            if *sent == Sent::No {
                place.poll_only = poll_only;
            }
            joins.push((place.arrival, place.n));
        }
        joins.sort_unstable();
        self.queue = joins.into_iter().map(|(_, n)| n).collect();
    }
}

fn is_newcomer(n: u64, places: &Places) -> bool {
    places.with_number(n).is_some_and(|place| place.is_joining())
}
