//! One process's half of a semaphore: the places that wait or hold, with local deadlines.
//!
//! A [`Session`] is a pure state machine like the [`Ledger`](super::ledger::Ledger), and the other half of the protocol:
//! the rules by which a process trusts replies and hints. Requests, replies, hints, connections and time are passed to
//! `handle_*`. After each of these, the driver takes calls ([`Session::poll_call`]), events ([`Session::take_events`]) and
//! the next deadline ([`Session::poll_timeout`]).
//!
//! It is made of smaller machines, each in a file with its fields. They return when they have something to do next, and
//! what happened; the session routes inputs to them, changes the states of places and keeps the one timeout.
//!
//! The rules are in `../README.md`; comments name them by their numbers.

mod adaptive;
mod audit;
mod connection;
mod counts;
mod joins;
mod limits;
mod local;
mod local_budget;
mod local_rate;
mod movement;
mod options;
mod outage;
mod overrides;
mod pass_on;
mod place;
mod places;
mod probe;
mod quarantine;
mod releases;
mod reload;
mod renewals;
mod reply;
mod request;
mod reuse;
mod revocations;
mod tenants;
#[cfg(test)]
mod tests;
mod timeout;
mod transmit;

use std::time::Duration;

use smallvec::SmallVec;

pub use self::adaptive::AdaptedHere;
use self::adaptive::Adapting;
use self::audit::Audit;
pub use self::connection::Connected;
use self::counts::Counts;
use self::joins::Joins;
use self::limits::Limits;
use self::local::LocalQueue;
use self::local_budget::OwnBudgets;
use self::local_rate::OwnStarts;
use self::movement::Movement;
pub use self::options::{AcquireOptions, OnUnavailable};
use self::place::State;
pub use self::places::PLACES_MAX;
use self::places::Places;
use self::probe::Probe;
pub use self::quarantine::Quarantine;
use self::releases::Releases;
use self::reload::Reload;
use self::renewals::Renewals;
pub use self::reply::Sending;
pub use self::request::FurtherIn;
use self::reuse::Reuse;
use self::revocations::Revocations;
pub use self::transmit::Urgency;
use super::claim::Tenant;
use super::id::NodeId;
use super::time::Time;
use crate::ledger::Usage;
use crate::rate::Rate;
use crate::reject::RejectReason;

/// How long an unused session is kept, so that a failover finds it: see rule 6.
const IDLE: Duration = Duration::from_secs(5);

/// This process's half of one semaphore.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Session {
    places: Places,
    counts: Counts,
    limits: Limits,
    adapting: Adapting,
    /// Permits that are passed on, and to which requests.
    reuse: Reuse,
    /// In an outage: the places that wait for a share of the process's own.
    outage: Option<LocalQueue>,
    /// What requests with a share have started lately.
    own_starts: Option<Box<OwnStarts>>,
    /// What they have taken of budgets.
    own_budgets: Option<Box<OwnBudgets>>,
    quarantine: Quarantine,
    movement: Movement,

    // Calls.
    joins: Joins,
    releases: Releases,
    renewals: Renewals,
    probe: Probe,
    audit: Audit,
    revocations: Revocations,
    reload: Reload,

    // Outputs.
    timeout: Option<Time>,
    events: SmallVec<[Event; 2]>,
    /// Permits in use and places that wait in the whole semaphore, by the last reply that had them.
    seen: Option<Usage>,
}

/// An event for a request or for the metrics. Places are identified by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Its request can go on: see [`Session::handle_poll`].
    Progress(usize),
    /// The policy admitted it, because the backend was unavailable.
    Admitted(usize),
    /// The policy rejected it, because the backend was unavailable or refused the call.
    Failed(usize),
    /// It was rejected because the process's share is used up.
    Refused(usize),
    /// The lease of a permit in use was lost.
    Lost(usize),
    /// Its release was answered: see [`Session::release_answer`].
    Released(usize),
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// It awaits its first answer.
    Joining,
    /// It waits for a permit.
    Waiting,
    /// It has a permit.
    Held,
    /// The policy admitted it.
    Admitted,
    /// It was rejected.
    Refused {
        /// Why.
        reason: RejectReason,
        /// Of a request that waited in vain: the index of the further limit that was full when it joined the queue, as far
        /// as the reply said.
        full: Option<u8>,
        /// What was counted: by the backend, or in an outage in this process. `None` if nothing was.
        usage: Option<Usage>,
        /// The limit in place of that of the policy, if any: the one that an operator set, or that found itself.
        limit: Option<u32>,
        /// The rate in force for it: that of its policy, or the one that an operator set in its place.
        rate: Option<Rate>,
        /// Whether the tenant's own cap is the reason, as far as is known here: the ledger said so, or the permits of this
        /// process alone reach it.
        is_tenant_full: bool,
        /// How much longer the quarantine or the pause lasts that is the reason, or until the rate or a budget allows the next grant.
        ends_in: Option<Duration>,
        /// How many were ahead of it when it joined the queue, or was refused instead; `None` if that is not known, as
        /// where tenants have lines of their own.
        ahead: Option<u32>,
        /// How long a request that came now would wait, by how fast the queue moves; `None` if that is not known.
        expected_wait: Option<Duration>,
        /// How long the rate lets a request that came now wait at least for those ahead of it, from the moment when it
        /// allows the next start.
        rate_wait: Duration,
    },
    /// The backend was unavailable.
    Failed,
    /// The semaphore was shut down.
    Closed,
}

impl Session {
    /// Creates a session without places. Its ids are numbered from `serial` on, which must not be less than the
    /// [`serial`](Self::serial) of any earlier session of this process for this semaphore.
    #[must_use]
    pub fn new(node: NodeId, serial: u64, connected: Connected, is_outage: bool) -> Self {
        Self {
            places: Places::new(node, serial, connected.poll_only),
            counts: Counts::default(),
            limits: Limits::default(),
            adapting: Adapting::default(),
            reuse: Reuse::default(),
            outage: is_outage.then(LocalQueue::new),
            own_starts: None,
            own_budgets: None,
            quarantine: connected.quarantine,
            movement: Movement::default(),
            joins: Joins::default(),
            releases: Releases::default(),
            renewals: Renewals::default(),
            probe: Probe::default(),
            audit: Audit::default(),
            revocations: Revocations::default(),
            reload: Reload::default(),
            timeout: None,
            seen: None,
            events: SmallVec::new(),
        }
    }

    /// The indexes of all places are below this.
    #[must_use]
    pub const fn index_bound(&self) -> usize {
        self.places.bound()
    }

    /// The number of the next place: see [`new`](Self::new).
    #[must_use]
    pub const fn serial(&self) -> u64 {
        self.places.serial()
    }

    /// Whether there are events.
    #[must_use]
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Takes all events, the oldest first.
    #[inline]
    pub fn take_events(&mut self) -> SmallVec<[Event; 2]> {
        std::mem::take(&mut self.events)
    }

    /// How many tenants have waiting requests in this process.
    #[must_use]
    pub fn lines(&self) -> usize {
        self.counts.tenants().lines()
    }

    /// How many grants passed an older request of another tenant of this process, since the last call.
    pub const fn take_overtakes(&mut self) -> u64 {
        self.counts.tenants_mut().take_overtakes()
    }

    /// Whether a tenant has a place here that waits or is in flight.
    #[must_use]
    pub fn has_tenant(&self, tenant: Tenant) -> bool {
        self.counts.tenants().has(tenant)
    }

    fn indexes(&self) -> Vec<usize> {
        self.places.iter().map(|(index, _)| index).collect()
    }

    /// Changes the state of a place, and what is counted of it.
    #[inline]
    fn set(&mut self, index: usize, state: State) {
        let Some(place) = self.places.get_mut(index) else { return };
        let before = std::mem::replace(&mut place.state, state);
        if matches!(state, State::Waiting { .. }) {
            place.queued = true;
        }
        let (limit, claim) = (place.limit, place.options.claim);
        if self.reuse.is_on() && before.is_without_permit() != state.is_without_permit() {
            self.reuse.follow(index, state.is_without_permit(), &self.places);
        }
        if let Some(queue) = &mut self.outage {
            queue.change(claim, before, state);
        }
        self.counts.change(index, (limit, claim), (before, state));
    }
}
