//! The limit, the headroom and the leases that count.

use std::time::Duration;

use super::place::Place;
use crate::adaptive::Adaptive;
use crate::overrides::{Mode, Override};
use crate::rate::Rate;
use crate::time::Time;

/// What the last request brought, and what an operator set in place of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Limits {
    limit: u32,
    headroom: u32,
    rate: Option<Rate>,
    lease: Duration,
    /// The longest lease since the session had nothing on the server.
    longest_lease: Duration,
    /// The last rate that came from a policy or an operator.
    last_rate: Option<Rate>,
    /// The longest window of these rates; 0 while all are the same.
    longest_window: Duration,
    overrides: Override,
    /// The lowest limit, if it finds itself.
    lowest: Option<u32>,
    /// The number in place of the policy's limit, if it has found one.
    number: Option<u32>,
    /// What counts in place of the policy's limit while nothing is paused: an operator's limit, else the number.
    in_place: Option<u32>,
    /// Nothing is granted before this.
    paused_until: Option<Time>,
}

impl Limits {
    /// A request came with this limit, headroom and rate.
    pub(super) fn handle_request(&mut self, limit: u32, headroom: u32, rate: Option<Rate>) {
        (self.limit, self.headroom, self.rate) = (limit, headroom, rate);
        self.note_rate(rate);
    }

    fn note_rate(&mut self, rate: Option<Rate>) {
        let Some(rate) = rate else { return };
        if let Some(last) = self.last_rate.replace(rate).filter(|last| *last != rate) {
            self.longest_window = self.longest_window.max(last.window()).max(rate.window());
        }
    }

    /// The longest window by which requests of this semaphore are judged, as far as this session knows; 0 if all have
    /// the same rate. The windows of a smooth rate differ by the cost, but for a longer one the latest start alone
    /// counts, and that is always kept.
    pub(super) const fn longest_window(&self) -> Duration {
        self.longest_window
    }

    /// A request asks for a place with this lease. `is_first`: nothing of this session is on the server.
    pub(super) fn handle_lease(&mut self, lease: Duration, is_first: bool) {
        self.lease = lease;
        self.longest_lease = if is_first { lease } else { self.longest_lease.max(lease) };
    }

    /// The policy was reloaded. Returns the limit in force before and after that.
    pub(super) fn handle_policy(&mut self, limit: u32, rate: Option<Rate>) -> (u32, u32) {
        let before = self.in_force();
        (self.limit, self.rate) = (limit, rate);
        self.note_rate(rate);
        (before, self.in_force())
    }

    /// An operator set something else. Returns the limit in force before and after that.
    pub(super) fn handle_override(&mut self, overrides: Override) -> (u32, u32) {
        let before = self.in_force();
        self.note_rate(overrides.rate);
        self.overrides = overrides;
        self.in_place = overrides.in_place().or(self.number);
        (before, self.in_force())
    }

    /// The limit finds itself within this range, or does not.
    pub(super) fn handle_range(&mut self, range: Option<Adaptive>) {
        self.lowest = range.map(Adaptive::min);
    }

    /// The limit has found this number. Returns the limit in force before and after that.
    pub(super) fn handle_number(&mut self, number: Option<u32>) -> (u32, u32) {
        let before = self.in_force();
        self.number = number;
        self.in_place = self.overrides.in_place().or(number);
        (before, self.in_force())
    }

    /// Grants were paused until this, or are no longer. Returns the limit in force before and after that.
    pub(super) fn handle_pause(&mut self, until: Option<Time>) -> (u32, u32) {
        let before = self.in_force();
        self.paused_until = until;
        (before, self.in_force())
    }

    /// When the pause ends; `None` once [`handle_pause`](Self::handle_pause) has ended it.
    pub(super) const fn paused_until(&self) -> Option<Time> {
        self.paused_until
    }

    /// The limit of the last request; 0 before the first.
    pub(super) const fn of_policy(&self) -> u32 {
        self.limit
    }

    pub(super) const fn headroom(&self) -> u32 {
        self.headroom
    }

    /// The lease of the last request.
    pub(super) const fn lease(&self) -> Duration {
        self.lease
    }

    pub(super) const fn longest_lease(&self) -> Duration {
        self.longest_lease
    }

    /// The longest lease that the server may know, or will.
    pub(super) fn any_lease(&self) -> Duration {
        self.lease.max(self.longest_lease)
    }

    /// The limit that counts.
    pub(super) fn in_force(&self) -> u32 {
        self.in_force_for(self.limit)
    }

    /// The limit that counts for requests that know this one.
    pub(super) fn in_force_for(&self, limit: u32) -> u32 {
        self.for_all().unwrap_or(limit)
    }

    /// The limit that counts for all requests, whatever limit they know: 0 during a pause; else an operator's; else the
    /// one that found itself.
    pub(super) fn for_all(&self) -> Option<u32> {
        if self.paused_until.is_some() { Some(0) } else { self.in_place }
    }

    /// The same, without regard to a pause until a time.
    pub(super) const fn in_place(&self) -> Option<u32> {
        self.in_place
    }

    /// The limit that found itself, unless a pause or an operator's limit is in force.
    pub(super) fn number_in_force(&self) -> Option<u32> {
        let is_free = self.paused_until.is_none() && self.overrides.in_place().is_none();
        self.number.filter(|_| is_free)
    }

    /// The rate of the last request, if it has one.
    pub(super) const fn rate_of_policy(&self) -> Option<Rate> {
        self.rate
    }

    /// The rate that an operator set in place of that of policies that have one.
    pub(super) const fn rate_of_operator(&self) -> Option<Rate> {
        self.overrides.rate
    }

    /// The rate that counts for requests whose policy has this one.
    pub(super) fn rate_for(&self, policy: Option<Rate>) -> Option<Rate> {
        let own = policy?;
        Some(self.overrides.rate.map_or(own, |set| set.in_place_of(own)))
    }

    /// The rate that counts for requests like the last one.
    pub(super) fn rate_in_force(&self) -> Option<Rate> {
        self.rate_for(self.rate)
    }

    /// Whether an operator drains the semaphore: new requests are refused.
    pub(super) fn is_draining(&self) -> bool {
        self.overrides.mode == Mode::Draining
    }

    /// Whether a place asks for more permits than it could ever have, under the limit that will count once the
    /// semaphore is not paused; where that finds itself, under the lowest: else it would depend on the moment.
    pub(super) fn never_fit(&self, place: &Place) -> bool {
        let Some(claim) = place.options.claim else { return false };
        let set = self.overrides.limit.filter(|limit| *limit > 0);
        let limit = set.or(self.lowest).unwrap_or(place.limit);
        let room = limit.saturating_sub(place.headroom());
        let rate = place.bound.and_then(|bound| bound.rate);
        let is_over_rate = rate.is_some_and(|rate| claim.cost() > rate.starts());
        (room > 0 && claim.cost() > room) || claim.exceeds_a_cap() || is_over_rate
    }
}
