//! Releases: those that are to be sent, those that are unanswered, and those that the backend refused.

use std::collections::VecDeque;
use std::time::Duration;

use super::place::{Place, WAITING_RENEWAL};
use super::transmit::CALL_MAX;
use crate::charge::Used;
use crate::id::{Ids, NodeId, PlaceId};
use crate::time::Time;

/// The most releases of unknown places that are kept until they are sent.
const STRANGERS_MAX: usize = 1000;
/// The most refused releases that are kept. Beyond it, those with the earliest lease ends are dropped.
const REFUSED_MAX: usize = 8 * CALL_MAX;
/// The longest pause before refused releases are tried again.
const PAUSE_MAX: Duration = Duration::from_secs(4);

/// How long a refused call is not tried again: as long as one place with this lease would wait.
pub(super) fn refusal_pause(lease: Duration) -> Duration {
    let third = if lease.is_zero() { WAITING_RENEWAL } else { lease / 3 };
    third.min(WAITING_RENEWAL)
}

/// The release of one place.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Release {
    pub(super) id: PlaceId,
    /// What it has used of its budgets, if that is known. In a box, because most take of none.
    pub(super) used: Option<Box<Used>>,
    /// When the lease ends, so that no release is needed.
    pub(super) until: Time,
}

impl Release {
    #[inline]
    pub(super) fn of(node: NodeId, place: &Place, now: Time) -> Self {
        let used = place.used_at(now).map(Box::new);
        Self { id: place.id(node), used, until: now + place.options.lease }
    }

    /// Whether nothing needs to be sent any more. One lease later than `until`, because a call that was under way may
    /// have renewed the place.
    fn is_over(&self, lease: Duration, now: Time) -> bool {
        now >= self.until + lease
    }
}

/// The releases of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Releases {
    unsent: VecDeque<Release>,
    /// Sent and unanswered, in the order in which they were sent.
    sent: VecDeque<Release>,
    /// Refused by the backend, about in the order in which their leases end.
    refused: VecDeque<Release>,
    /// When refused releases and audits are tried again.
    retry_at: Option<Time>,
    /// The next pause before that, if it is longer than the first.
    pause: Option<Duration>,
}

impl Releases {
    /// Whether the backend may have a place that was given up.
    pub(super) fn is_any(&self) -> bool {
        !self.unsent.is_empty() || !self.sent.is_empty() || !self.refused.is_empty()
    }

    /// Whether there is one to send.
    #[inline]
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Whether the backend refused a release or an audit just before.
    pub(super) const fn is_put_off(&self) -> bool {
        self.retry_at.is_some()
    }

    /// Whether the release of this place is to be sent, or unanswered.
    pub(super) fn has(&self, id: PlaceId) -> bool {
        let mut all = self.unsent.iter().chain(&self.sent).chain(&self.refused);
        all.any(|release| release.id == id)
    }

    pub(super) fn push(&mut self, release: Release) {
        self.unsent.push_back(release);
    }

    /// Adds the release of an unknown place. Returns whether there was room: hints come from whoever may publish, and a
    /// flood of them must not fill the memory.
    pub(super) fn push_stranger(&mut self, release: Release, places: usize) -> bool {
        let has_room = self.unsent.len() < STRANGERS_MAX + places;
        if has_room {
            self.unsent.push_back(release);
        }
        has_room
    }

    /// The next places to release, with at most `most` permits; the last one may take more. And what they have used of their
    /// budgets.
    pub(super) fn poll(&mut self, most: usize) -> (Ids, Vec<(PlaceId, Used)>) {
        let mut used = Vec::new();
        if self.unsent.len() == 1
            && let Some(release) = self.unsent.pop_front()
        {
            // The common case.
            used.extend(release.used.as_ref().map(|used| (release.id, **used)));
            let ids = Ids::from_buf([release.id]);
            self.sent.push_back(release);
            return (ids, used);
        }
        let (mut ids, mut permits) = (Ids::new(), 0);
        while permits < most
            && let Some(release) = self.unsent.pop_front()
        {
            permits += release.id.work();
            ids.push(release.id);
            used.extend(release.used.as_ref().map(|used| (release.id, **used)));
            self.sent.push_back(release);
        }
        (ids, used)
    }

    /// Drops the releases of places whose leases have ended. Returns the places.
    pub(super) fn drop_expired(&mut self, lease: Duration, now: Time) -> Ids {
        let mut expired = Ids::new();
        let mut is_needed = |release: &Release| {
            let is_over = release.is_over(lease, now);
            if is_over {
                expired.push(release.id);
            }
            !is_over
        };
        self.unsent.retain(&mut is_needed);
        self.refused.retain(&mut is_needed);
        expired
    }

    /// Whether the first release to send is not needed any more.
    pub(super) fn is_first_expired(&self, lease: Duration, now: Time) -> bool {
        self.unsent.front().is_some_and(|release| release.is_over(lease, now))
    }

    /// Tries refused releases again once their pause is over. Returns when to call this again.
    pub(super) fn handle_timeout(&mut self, lease: Duration, now: Time) -> Option<Time> {
        self.retry_at = self.retry_at.filter(|at| now < *at);
        if self.retry_at.is_none() && self.unsent.is_empty() && self.sent.is_empty() {
            self.retry(lease);
        }
        let first = self.unsent.front().or_else(|| self.refused.front());
        let over = first.map(|release| release.until + lease);
        self.retry_at.into_iter().chain(over).min()
    }

    /// Moves as many refused releases as go in one call to those to be sent. The others follow once that is carried out.
    fn retry(&mut self, lease: Duration) {
        if self.refused.is_empty() {
            return;
        }
        let pause = self.pause.unwrap_or_else(|| refusal_pause(lease));
        self.pause = Some((2 * pause).min(PAUSE_MAX));
        let mut permits = 0;
        while permits < CALL_MAX
            && let Some(release) = self.refused.pop_front()
        {
            permits += release.id.work();
            self.unsent.push_back(release);
        }
    }

    /// The first `count` of those that were sent were carried out: replies come in the order of the calls.
    pub(super) fn handle_done(&mut self, count: usize) {
        match count {
            0 => {}
            1 => drop(self.sent.pop_front()),
            _ => drop(self.sent.drain(..count.min(self.sent.len()))),
        }
    }

    /// The first `count` of those that were sent were refused. Returns the places that are left to their leases, and when
    /// the others are tried again.
    pub(super) fn handle_refused(
        &mut self,
        count: usize,
        lease: Duration,
        now: Time,
    ) -> (Ids, Option<Time>) {
        let refused = self.sent.drain(..count.min(self.sent.len()));
        let is_older =
            |new: &Release| self.refused.front().is_some_and(|first| new.until <= first.until);
        let (older, newer): (Vec<_>, Vec<_>) = refused.partition(is_older);
        older.into_iter().rev().for_each(|release| self.refused.push_front(release));
        self.refused.extend(newer);
        let surplus = self.refused.len().saturating_sub(REFUSED_MAX);
        let dropped = self.refused.drain(..surplus).map(|release| release.id).collect();
        if self.retry_at.is_none() {
            let pause = self.pause.unwrap_or_else(|| refusal_pause(lease));
            self.retry_at = Some(now + pause);
        }
        (dropped, self.retry_at)
    }

    /// An audit was refused: it is tried again after a pause, as releases are. Returns when.
    pub(super) fn put_off(&mut self, lease: Duration, now: Time) -> Time {
        let at = earlier(self.retry_at, now + refusal_pause(lease));
        self.retry_at = Some(at);
        at
    }

    /// The backend carried out a call. If it released something, all refused releases follow; else the pause is the first
    /// one again. Returns when they are tried.
    pub(super) fn end_refusals(
        &mut self,
        has_released: bool,
        lease: Duration,
        now: Time,
    ) -> Option<Time> {
        if self.refused.is_empty() {
            return None;
        }
        if has_released {
            self.unsent.extend(self.refused.drain(..));
            (self.retry_at, self.pause) = (None, None);
        } else if let Some(at) = self.retry_at {
            (self.retry_at, self.pause) = (Some(at.min(now + refusal_pause(lease))), None);
            return self.retry_at;
        }
        None
    }

    /// The calls that were sent will not be answered: their releases are sent again.
    pub(super) fn take_back(&mut self) {
        while let Some(unanswered) = self.sent.pop_back() {
            self.unsent.push_front(unanswered);
        }
    }

    /// There is a new connection, which has refused nothing yet.
    pub(super) fn handle_connected(&mut self) {
        self.take_back();
        self.unsent.extend(self.refused.drain(..));
        (self.retry_at, self.pause) = (None, None);
    }

    /// For explorers: rounds when refused releases are tried again.
    pub(super) fn coarsen(&mut self, round: impl Fn(Time) -> Time, now: Time) {
        self.retry_at = self.retry_at.map(round).filter(|at| now < *at);
    }

    /// How many are kept until they are sent.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.unsent.len() + self.refused.len()
    }

    /// The places that may still stand on the server.
    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = PlaceId> {
        self.unsent.iter().chain(&self.sent).chain(&self.refused).map(|release| release.id)
    }
}

/// The earlier of two moments, if there is a first one.
pub(super) fn earlier(before: Option<Time>, at: Time) -> Time {
    before.map_or(at, |before| before.min(at))
}
