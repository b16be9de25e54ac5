//! The place of one request: its state, its lease and its deadline.

use std::num::NonZeroU32;
use std::time::Duration;

use super::options::{AcquireOptions, OnUnavailable};
use super::releases::Release;
use crate::bound::Bound;
use crate::charge::{Charges, Used, UsedOf};
use crate::claim::Claim;
use crate::id::{NodeId, PlaceId};
use crate::ledger::Usage;
use crate::reject::RejectReason;
use crate::time::Time;

/// How often a waiting place is renewed: a lost hint costs at most this.
pub(super) const WAITING_RENEWAL: Duration = Duration::from_secs(1);
/// The same for a place that no hint can reach.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Lease ends are whole ms, rounded down: a place may end this much earlier than its lease.
pub(super) const LEASE_GRAIN: Duration = Duration::from_millis(1);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    /// The place's number on the wire. Its low bits are the index in the table, the others count the
    /// places of the session, so that no number is used twice.
    pub(super) n: u64,
    pub(super) poll_only: bool,
    /// The limit of the semaphore that its request brought.
    pub(super) limit: u32,
    /// The bound in its id; `None`: it may not wait. Like the number, it does not change with the limit.
    pub(super) bound: Option<Bound>,
    pub(super) options: AcquireOptions,
    pub(super) state: State,
    /// The lease end that the backend last acknowledged, by its clock, ms.
    pub(super) lease_end: u64,
    pub(super) acked: Acked,
    /// When its request got its permit; before that, when its request came.
    pub(super) held_at: Time,
    /// When the permit was granted, whatever request had it since.
    pub(super) granted_at: Time,
    /// The count of requests when it came, so that requests are served in order.
    pub(super) arrival: u64,
    /// The request knows that it has its permit.
    pub(super) taken: bool,
    /// It once stood in a queue, the backend's or the process's own: its request has been told that it waits.
    pub(super) queued: bool,
    /// The next renewal includes it, due or not.
    pub(super) check: bool,
    /// The backend refused its last renewal or proof: the next one waits until the session tries again.
    pub(super) refused: bool,
    /// A renewal found it gone, and it is being brought back: until that is answered, a renewal would find it gone again.
    pub(super) restoring: bool,
    /// It waits, and was granted its permit in a pause: the end of that asks for it again.
    pub(super) held_back: bool,
    /// The index of the further limit that was full when it joined the queue.
    pub(super) full: Option<u8>,
    pub(super) linger: Linger,
    /// The backend lost it, and what it took of budgets, and counts it again.
    pub(super) recounted: bool,
    /// What it has used of its budgets, once that is known.
    pub(super) used: Option<Box<Reported>>,
    /// Releases the place that keeps its turn until this one stands there.
    pub(super) replaces: Option<Box<Release>>,
    /// Which turn was its own when it joined the queue, or its tenant's line as far as that can be told; `None`: that is not
    /// known, or a grant was counted as a sample.
    pub(super) turn: Option<NonZeroU32>,
}

/// When the backend acknowledged a place last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Acked {
    /// When the call was sent, which decides when the next renewal is due; for a place in flight by policy, when its proof
    /// was last due.
    pub(super) sent: Time,
    /// From when on its lease counts. A backend may know of leases by something other than calls: then it is another time.
    pub(super) leases_from: Time,
}

impl Acked {
    pub(super) const fn at(sent: Time) -> Self {
        Self { sent, leases_from: sent }
    }
}

/// What was reported of the budgets of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Reported {
    used: Used,
    /// When each is full again at the earliest.
    full_at: [Time; Charges::MAX],
}

impl Reported {
    pub(super) fn nothing(charges: Charges) -> Self {
        Self { used: Used::as_charged(charges), full_at: [Time::ZERO; Charges::MAX] }
    }

    pub(super) fn use_up(&mut self, index: usize, used: u64) {
        self.used = self.used.with(index, UsedOf { used, ahead: 0 });
    }

    /// The last report counts: it is the provider's.
    pub(super) fn fill_at(&mut self, index: usize, at: Time) {
        self.full_at.get_mut(index).into_iter().for_each(|full_at| *full_at = at);
    }

    /// What is true of it at this time.
    pub(super) fn at(&self, now: Time) -> Used {
        (0..).zip(self.full_at).fold(self.used, |used, (index, full_at)| {
            let ahead = u64::try_from(full_at.since(now).as_micros()).unwrap_or(u64::MAX);
            used.with(index, UsedOf { ahead, ..used.of(index) })
        })
    }
}

/// Whether a permit outlives its request, because the other side may still be working on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Linger {
    #[default]
    No,
    /// Its request was broken off, and has not left yet.
    Due,
    /// A layer further in rejected it, and nothing followed, so the other side never saw it.
    Spared,
    /// An attempt was passed on or answered, so a later rejection does not spare it.
    Reached,
    /// Its request was told that the permit is lost, in time to break off and linger, and has not left yet.
    Lost,
    /// Its request has left; it is released this many ms after its grant.
    Until(u32),
    /// Its request has left; it is kept until then for the next request of this process.
    Kept(Time),
    /// Its request was handed another permit; it is on its way to the backend, for the next request of this process.
    Spare,
}

/// How many calls named a place and may have been carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sent {
    No,
    Once,
    /// An earlier call is unanswered, so a refusal of the last one does not prove that the place is not on the server.
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
    /// In flight by policy, because the backend could not be asked. It is counted once the backend can be asked.
    Admitted {
        announced: Sent,
    },
    Refused {
        reason: RejectReason,
        /// Whether the counts are known. With an `Option` of both, every place would be larger.
        is_counted: bool,
        /// Whether the process's own share is what it was refused.
        is_local: bool,
        /// When its rate allows it, if the reply told it so; else zero. With an `Option`, every place would be larger.
        opens_at: Time,
        /// The turn that a request would have had that came then, as in [`Place::turn`].
        next: Option<NonZeroU32>,
        in_use: u32,
        waiting: u32,
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
    pub(super) fn refused(reason: RejectReason, usage: Option<Usage>, is_local: bool) -> Self {
        let Usage { in_use, waiting } = usage.unwrap_or_default();
        Self::Refused {
            reason,
            is_counted: usage.is_some(),
            is_local,
            opens_at: Time::ZERO,
            next: None,
            in_use: u32::try_from(in_use).unwrap_or(u32::MAX),
            waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
        }
    }

    /// Whether its request has asked for a permit and has none.
    pub(super) const fn is_without_permit(self) -> bool {
        matches!(self, Self::Joining { .. } | Self::Waiting { .. })
    }

    /// Whether its request has a permit, or passed by policy.
    pub(super) const fn is_in_flight(self) -> bool {
        matches!(self, Self::Held | Self::Admitted { .. })
    }
}

impl Place {
    /// When its permit stops being reliable.
    #[inline]
    pub(super) fn deadline(&self) -> Time {
        if self.options.linger_ms == 0 || self.has_left() || self.linger == Linger::Lost {
            self.lease_over()
        } else {
            self.acked.leases_from + self.reliance()
        }
    }

    /// When the backend may grant its permit to another place.
    pub(super) fn lease_over(&self) -> Time {
        self.acked.leases_from + lease_at_least(self.options.lease)
    }

    /// How long a request may use its permit without a renewal: its lease, less the linger, which follows if the request
    /// is broken off then.
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

    /// A third of the time, so two renewals may fail.
    pub(super) fn held_interval(&self) -> Duration {
        let AcquireOptions { lease, linger_ms, .. } = self.options;
        if linger_ms == 0 { lease / 3 } else { (lease - self.options.linger()) / 3 }
    }

    pub(super) fn lease_ms(&self) -> u64 {
        self.options.lease_ms()
    }

    /// Its claim, or that of a request without a tenant.
    pub(super) fn claim(&self) -> Claim {
        self.options.claim.unwrap_or_else(Claim::without_tenant)
    }

    /// How many permits it must leave free.
    pub(super) fn headroom(&self) -> u32 {
        if self.claim().class() == 0 { 0 } else { self.options.headroom }
    }

    /// How many permits it takes.
    pub(super) fn cost(&self) -> u32 {
        self.options.claim.map_or(1, Claim::cost)
    }

    /// Whether it waits for the process's own share in an outage.
    pub(super) const fn waits_locally(&self) -> bool {
        (self.is_joining() || self.is_waiting())
            && matches!(self.options.on_unavailable, OnUnavailable::Local(_))
    }

    /// Whether the backend should know it.
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
        self.state.is_in_flight()
    }

    /// Whether its permit outlives its request if that is broken off.
    pub(super) fn may_linger(&self) -> bool {
        self.is_in_flight() && self.taken && self.options.linger_ms > 0
    }

    /// Whether it matters what happens to its request further in: its permit may linger, or it took of a budget.
    pub(super) fn follows_further_in(&self) -> bool {
        self.may_linger()
            || self.is_in_flight()
                && self.taken
                && self.options.claim.is_some_and(Claim::has_charges)
    }

    /// What it has used of its budgets, as far as that is known: nothing, if its request never went on, or a layer further
    /// in rejected it. What the backend lost is not given back.
    #[inline]
    pub(super) fn used_at(&self, now: Time) -> Option<Used> {
        let claim = self.options.claim.as_ref().filter(|claim| claim.has_charges())?;
        self.used_of(claim.charges(), now)
    }

    fn used_of(&self, charges: Charges, now: Time) -> Option<Used> {
        let used = match &self.used {
            Some(used) => Some(used.at(now)),
            None if !self.taken || self.linger == Linger::Spared => Some(Used::NOTHING),
            None => None,
        };
        if self.recounted { used.map(|used| used.at_least(charges)) } else { used }
    }

    /// Whether its request is in flight, and its lease still lasts, so that it can linger.
    pub(super) fn can_linger(&self, now: Time) -> bool {
        self.may_linger() && !self.has_left() && now < self.lease_over()
    }

    /// Whether its deadline has passed in time to linger.
    pub(super) fn is_lost_in_time(&self, now: Time) -> bool {
        self.can_linger(now) && self.state == State::Held && now >= self.deadline()
    }

    /// When it is released, if it lingers without a request.
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

    /// Until when it is kept, and for how long permits are.
    pub(super) fn kept(&self) -> Option<(Time, Duration)> {
        let Linger::Kept(until) = self.linger else { return None };
        Some((until, self.options.reuse()))
    }

    /// A new request has it.
    pub(super) const fn begin_again(&mut self, arrival: u64, now: Time) {
        self.linger = Linger::No;
        (self.taken, self.queued) = (false, false);
        (self.arrival, self.held_at) = (arrival, now);
    }

    /// It is not on its way any more.
    pub(super) const fn end_spare(&mut self) {
        self.linger = Linger::No;
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

/// How long a lease lasts at least, from the sending of its call.
pub(super) const fn lease_at_least(lease: Duration) -> Duration {
    // The call carried whole ms.
    let below_ms = Duration::from_nanos(lease.subsec_nanos() as u64 % 1_000_000);
    lease.saturating_sub(below_ms).saturating_sub(LEASE_GRAIN)
}
