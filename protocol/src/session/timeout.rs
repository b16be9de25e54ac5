//! Time: deadlines, and the end of an unused session.

use std::time::Duration;

use super::place::{Acked, WAITING_RENEWAL};
use super::{Event, IDLE, Session};
use crate::time::Time;

impl Session {
    /// When to call [`handle_timeout`](Self::handle_timeout); `None`: never.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Time> {
        self.timeout
    }

    /// Lets time pass: permits are lost at their deadlines, due leases are renewed, and what is over is forgotten.
    pub fn handle_timeout(&mut self, now: Time) {
        self.timeout = None;
        self.drop_expired_releases(now);
        if let Some(at) = self.releases.handle_timeout(self.limits.lease(), now) {
            self.want(at);
        }
        let (expired, next) = self.renewals.handle_timeout(&self.places, now);
        next.into_iter().for_each(|at| self.want(at));
        for index in expired {
            self.expire(index, now);
        }
        self.release_idle(now);
        self.expire_own_starts(now);
        let idle_until = self.idle_until(now);
        if now < idle_until {
            self.want(idle_until);
        } else {
            self.audit.forget();
        }
        let (is_over, end) = self.quarantine.handle_timeout(self.limits.any_lease(), now);
        end.into_iter().for_each(|at| self.want(at));
        if is_over {
            self.movement.handle_change(now);
            // No script runs by itself: a call of a process whose places wait starts the grants.
            self.probe.handle_raise(self.counts.has_waiting());
        }
        self.end_pause(now);
        self.adapt(now);
        // The rate of the process's own share may allow a grant.
        self.admit_local(now);
        if let Some(at) = self.probe.handle_timeout(self.counts.has_waiting(), now) {
            self.want(at);
        }
        if self.timeout.is_none() && !self.is_idle() {
            self.want(now + IDLE);
        }
    }

    /// Whether there is no place, and nothing to send or to wait for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.places.is_empty() && !self.is_busy()
    }

    /// Whether the session can be dropped: it is idle, and a failover that has not heard of its last
    /// releases would not find it any more (rule 6).
    #[must_use]
    pub fn is_over(&self, now: Time) -> bool {
        // A session that is made later learns of the pause.
        let is_for_pause = self.timeout == self.limits.paused_until();
        let is_due = is_for_pause || self.timeout.is_none_or(|timeout| timeout <= now);
        is_due && self.is_idle() && now >= self.idle_until(now)
    }

    /// Whether a request waits or has a permit that is neither lost nor given back.
    #[must_use]
    pub const fn is_in_use(&self) -> bool {
        self.counts.is_any()
    }

    /// Whether the backend may have a place of this session, or something is to be sent.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.is_in_use()
            || self.releases.is_any()
            || self.renewals.is_any_sent()
            || self.audit.is_sent()
            // In an outage nothing is asked, and the record is not kept for it.
            || (self.audit.is_due() && !self.is_outage())
    }

    /// For explorers that use only multiples of `grain` as moments: rounds moments up to those, and moments after
    /// `horizon` down to it, and forgets what decides nothing, so that sessions with the same future are equal. `reuse`:
    /// the longest time for which permits are passed on.
    #[doc(hidden)]
    pub fn coarsen(&mut self, grain: Duration, reuse: Duration, now: Time, horizon: Time) {
        let round = |at: Time| {
            let grains = at.elapsed_since_epoch().as_nanos().div_ceil(grain.as_nanos());
            let at = Time::ZERO + grain * u32::try_from(grains).unwrap_or(u32::MAX);
            at.min(horizon)
        };
        self.timeout = self.timeout.map(round);
        self.probe.coarsen(round, now);
        self.releases.coarsen(round, now);
        self.renewals.coarsen(round, now);
        self.audit.coarsen(reuse, now, horizon);
        self.seen = None;
        self.movement.coarsen();
        let is_renewing = self.renewals.is_any_sent();
        for place in self.places.iter_mut() {
            place.turn = None;
            if place.is_joining() {
                place.acked = Acked::at(Time::ZERO);
            }
            if place.is_joining() || !is_renewing {
                (place.held_at, place.granted_at) = (Time::ZERO, Time::ZERO);
            }
        }
        self.reuse.coarsen(reuse, now);
    }

    /// Handles a place that reached its deadline or has lingered long enough.
    pub(super) fn expire(&mut self, index: usize, now: Time) {
        let place = self.places.get(index);
        if place.is_some_and(|place| place.can_linger(now)) {
            self.lose_in_time(index);
        } else if place.is_some_and(|place| place.taken) {
            self.lose(index, now);
        } else {
            self.wait_again(index, now);
            self.events.push(Event::Progress(index));
            self.want(now + WAITING_RENEWAL);
        }
    }

    /// If nothing is left, has the session end at its time, and not when something was due.
    pub(super) fn want_end(&mut self, now: Time) {
        if self.is_idle() {
            self.want(self.idle_until(now));
        }
    }

    /// Until when the session is kept though it is unused; in an outage, until what was released just before it can do
    /// no harm, and what it has started counts no more.
    pub(super) fn idle_until(&self, now: Time) -> Time {
        if !self.is_outage() {
            return self.audit.kept_until(IDLE, now);
        }
        let until = self.audit.kept_until(self.limits.longest_lease().max(IDLE), now);
        self.own_start_kept_until().map_or(until, |end| end.max(until))
    }

    /// Has [`handle_timeout`](Self::handle_timeout) called then, or earlier.
    pub(super) fn want(&mut self, at: Time) {
        if self.timeout.is_none_or(|timeout| at < timeout) {
            self.timeout = Some(at);
        }
    }
}
