//! A limit that finds itself: the number in force in place of the policy's limit, and when to ask for a higher one.

use std::time::Duration;

use super::Session;
use crate::adaptive::{Adapted, Adaptive, SentUnder};
use crate::ledger::Usage;
use crate::time::Time;

/// A number, as this process counts its times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdaptedHere {
    /// The number.
    pub adapted: Adapted,
    /// When it changed last, or later.
    pub since: Time,
    /// When it is over.
    pub ends: Time,
    /// Which part of a sixteenth of the interval, of 65,536, this process waits beyond it before it asks for growth: the
    /// first process that asks spares all others the call.
    pub spread: u16,
}

/// What the last request brought, and what is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Adapting {
    range: Option<Adaptive>,
    pub(super) known: Option<AdaptedHere>,
    /// Growth is not asked for before this.
    not_before: Time,
    is_growth_due: bool,
    /// The permits in use, if the last reply that could say so did: none does while permits are free. `None`, too, once
    /// another call granted more, unless that is above the number already.
    in_use: Option<u32>,
}

impl Adapting {
    pub(super) const fn range(&self) -> Option<Adaptive> {
        self.range
    }

    /// The limit in place of the policy's, if one is in force.
    fn number(&self) -> Option<u32> {
        Some(self.range?.clamp(self.known?.adapted.limit))
    }

    /// When to ask for growth, if the limit can grow.
    fn grows_at(&self) -> Option<Time> {
        let (range, known) = (self.range?, self.known?);
        let interval = range.interval();
        let at = known.since + interval + interval / 16 * u32::from(known.spread) / 65_536;
        (range.clamp(known.adapted.limit) < range.max()).then_some(at.max(self.not_before))
    }

    /// A reply came that says how many permits are in use, or is to an acquire.
    #[cold]
    pub(super) fn handle_usage(&mut self, usage: Option<Usage>) {
        self.in_use = usage.map(|usage| u32::try_from(usage.in_use).unwrap_or(u32::MAX));
    }

    /// A call granted permits whose reply does not say how many are in use. After a pause it may have granted all: a
    /// decrease must not begin at what was in use before.
    pub(super) fn handle_grants(&mut self) {
        let number = self.number();
        let is_over = |in_use: &u32| number.is_some_and(|number| *in_use > number);
        self.in_use = self.in_use.filter(is_over);
    }
}

impl Session {
    /// The range of the limit, if the policy of the last request lets it find itself.
    #[must_use]
    #[inline]
    pub const fn adaptive(&self) -> Option<Adaptive> {
        self.adapting.range()
    }

    /// From now on requests come with this range, or with none.
    pub fn handle_adaptive(&mut self, range: Option<Adaptive>, now: Time) {
        self.adapting.range = range;
        self.limits.handle_range(range);
        self.follow_number(now);
    }

    /// Takes the number in force; `None`: that of the policy is.
    pub fn handle_adapted(&mut self, known: Option<AdaptedHere>, now: Time) {
        if self.adapting.known != known {
            self.adapting.known = known;
            self.adapting.not_before = Time::ZERO;
            self.follow_number(now);
        }
    }

    fn follow_number(&mut self, now: Time) {
        let change = self.limits.handle_number(self.adapting.number());
        self.follow_limit(change, now);
        self.admit_local(now);
        self.want_growth(now);
    }

    /// The limit that finds itself, whatever else is in force; `None`: none does.
    #[must_use]
    pub fn adapted_limit(&self) -> Option<u32> {
        let range = self.adapting.range?;
        Some(self.adapting.number().unwrap_or_else(|| range.max()))
    }

    /// What a request is sent under that goes on now. While more permits are in use than the number, it was granted by a
    /// call that did not know of the last decrease, and belongs to what was sent before.
    #[must_use]
    pub fn sent_under(&self) -> SentUnder {
        let Adapting { known, in_use, .. } = self.adapting;
        let is_over = self.adapting.number().is_some_and(|number| in_use > Some(number));
        let version = known.filter(|_| !is_over).map_or(0, |known| known.adapted.changed);
        SentUnder { version, in_use: in_use.unwrap_or(u32::MAX) }
    }

    /// Whether to ask for growth now; once for each time.
    pub const fn poll_growth(&mut self) -> Option<Adaptive> {
        if std::mem::replace(&mut self.adapting.is_growth_due, false) {
            self.adapting.range
        } else {
            None
        }
    }

    /// Ends a number that is over, and notices that growth is due.
    pub(super) fn adapt(&mut self, now: Time) {
        if self.adapting.known.is_some_and(|known| known.ends <= now) {
            self.handle_adapted(None, now);
        }
        if self.counts.has_waiting() && self.adapting.grows_at().is_some_and(|at| at <= now) {
            let interval = self.adapting.range.map_or(Duration::ZERO, Adaptive::interval);
            self.adapting.is_growth_due = self.waits_for_number();
            // Another process may ask, or the request may be lost; or a permit was free for a moment.
            let pause = if self.adapting.is_growth_due { interval } else { interval / 8 };
            self.adapting.not_before = now + pause;
        }
        self.want_growth(now);
    }

    fn want_growth(&mut self, now: Time) {
        if self.counts.has_waiting()
            && let Some(at) = self.adapting.grows_at().filter(|at| now < *at)
        {
            self.want(at);
        }
    }

    /// Whether a request of this process waits that the number keeps back, and not a pause, an operator, a rate or its
    /// tenant's cap alone: a limit that is not used up tells nothing by growing.
    fn waits_for_number(&self) -> bool {
        let Some(number) = self.limits.number_in_force() else { return false };
        if self.is_outage() {
            return false;
        }
        let in_use = self.seen.map_or(0, |seen| seen.in_use);
        self.places.iter().filter(|(_, place)| place.is_waiting()).any(|(_, place)| {
            let room = u64::from(number.saturating_sub(place.headroom()));
            in_use + u64::from(place.cost()) > room
        })
    }
}
