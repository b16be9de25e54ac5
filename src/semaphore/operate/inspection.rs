//! The state of a semaphore at one moment, from the backend's listing and from what processes know.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::time::Duration;

#[cfg(doc)]
use super::Semaphore;
use super::budget_use::{self, BudgetUse};
use super::further_use::{FurtherLimitUse, FurtherUses};
use super::ids::{PlaceId, TenantId};
use crate::backend::Listing;
use crate::name::Name;
use crate::node::Node;
use crate::node::peers::{PeerAnswer, process};
use crate::node::tallies::Tally;
use crate::protocol::session::Session;
use crate::protocol::{self, Claim, NodeId, Override, PauseCause, Rate, RateUsage, Tenant, Time};
use crate::tenants::{TenantNumbers, TenantOverride};

/// The most holders and waiters that an inspection lists.
pub(super) const INSPECTED_MAX: u32 = 1000;

/// The holders and waiters of a semaphore at one moment, as [`Semaphore::inspect`] returns them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The number of permits in use.
    pub in_use: u64,
    /// The number of waiting requests.
    pub waiting: u64,
    /// The holders, in the order in which their leases end.
    pub holders: Vec<Holder>,
    /// The waiters: first those without a tenant, in the order of the queue, then those of each tenant.
    pub waiters: Vec<Waiter>,
    /// The override, as this process knows it: at most a second old.
    pub set: Override,
    /// The pause until a time, as this process knows it: at most a second old.
    pub paused: Option<Paused>,
    /// The limit that [found itself](crate::PolicyBuilder::adaptive), as this process knows it: at most a second old. `None`
    /// where no limit does, or it is still the maximum.
    pub adapted: Option<AdaptedLimit>,
    /// Whether there are more holders or waiters than are listed. If so, tenants may be missing, and the counts of
    /// others may be too low.
    pub is_cut: bool,
    /// The tenants that hold or wait, the one with the most permits in use first. Empty if no request names a tenant.
    pub tenants: Vec<TenantUse>,
    /// The [further limits](crate::Ask::also) of the listed requests, the one with the most waiting requests first.
    pub further_limits: Vec<FurtherLimitUse>,
    /// The limit in force: the one that an operator set; else the one that [found itself](Self::adapted); else that of the
    /// policy in this process; else the highest
    /// that another process [reported](Semaphore::inspect_fleet). `None` if nothing is set, and no process that uses
    /// the semaphore was asked or answered.
    pub limit: Option<u32>,
    /// The limit of the policy that this process used last, known some seconds after its last request: the best guess
    /// for a semaphore that is not in use. Kept for about a thousand semaphores, those that are counted most often.
    pub last_limit: Option<u32>,
    /// How much of the rate is used. `None` if nothing tells that there is one: no policy that is known has a rate, nor
    /// has a listed request. One that an operator [set](Override::rate) is then not in force, as far as is known.
    pub rate: Option<RateUse>,
    /// The [budgets](crate::Budget) that are not full, up to a hundred, or that this process uses, those first that take longest
    /// to be full.
    pub budgets: Vec<BudgetUse>,
    /// The processes that hold or wait for permits, and this one, by id.
    pub processes: Vec<ProcessUse>,
}

/// How much of a [rate](crate::PolicyBuilder::rate) is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateUse {
    /// The rate in force, where an operator's counts instead of a policy's: for the policy in this process; else the
    /// highest that another process [reported](Semaphore::inspect_fleet); else for the policy that this process used
    /// last, which is kept as [`last_limit`](Inspection::last_limit) is; else the one by which the listed request whose
    /// lease ends last is judged. If no policy is known here, one that an operator set counts as in force.
    pub rate: Rate,
    /// Whether `rate` is that of a listed request, because no policy is known: a part of the rate, if that is smooth.
    pub is_of_place: bool,
    /// The number of starts in the window that ends now, by the backend's clock. Of a smooth rate these are the starts in
    /// the part of its window by which requests are judged: in the last 100 ms, if it is 600 in 60 s. May be higher than
    /// the rate, if that was lowered.
    pub started: u64,
    /// How long it takes until the rate allows the next start of a request that costs one permit; `None` if it does now.
    pub opens_in: Option<Duration>,
}

impl RateUse {
    /// `rate` is the one that `usage` was judged by, if that is known other than by a place.
    fn new(usage: RateUsage, rate: Option<Rate>, now_us: u64) -> Self {
        let of_place = || {
            let starts = NonZeroU32::new(usage.rate.starts()).unwrap_or(NonZeroU32::MIN);
            Rate::new(starts, usage.rate.window(), false)
        };
        Self {
            rate: rate.unwrap_or_else(of_place),
            is_of_place: rate.is_none(),
            started: usage.started,
            opens_in: usage.opens_at.map(|at| Duration::from_micros(at.saturating_sub(now_us))),
        }
    }
}

/// A pause until a time, which a response of the upstream [asked for](crate::Permit::feedback) or an operator
/// [ordered](Semaphore::pause_for).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Paused {
    /// How much longer it lasts.
    pub left: Duration,
    /// The name of the process that asked for it: host and process id.
    pub by: String,
    /// Why it was asked for.
    pub cause: PauseCause,
}

/// A limit that [found itself](crate::PolicyBuilder::adaptive). A limit that an operator set is in force in place of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdaptedLimit {
    /// The limit.
    pub limit: u32,
    /// How long ago it changed last. Ten minutes after its last change the limit is that of the policy again.
    pub unchanged_for: Duration,
}

/// A process that uses a semaphore, as far as its places are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessUse {
    /// The random id of the process.
    pub node: String,
    /// Its name: see [`Holder::process`].
    pub process: Option<String>,
    /// Whether it is this process.
    pub is_own: bool,
    /// The number of permits that it has in use.
    pub in_use: u64,
    /// The number of those that it keeps for its next requests, if that is known; see [`PolicyBuilder::reuse`].
    ///
    /// [`PolicyBuilder::reuse`]: crate::PolicyBuilder::reuse
    pub kept: Option<u64>,
    /// The number of its waiting requests.
    pub waiting: u64,
    /// The limit of the policy of its last request, if that is known. An override takes precedence.
    pub limit: Option<u32>,
    /// The number of its requests that were rejected since its start, if that is known; does not include requests that
    /// gave up. Kept for about a thousand semaphores, those that are counted most often; 0 for others.
    pub refused: Option<u64>,
    /// The number of its permits that were lost. Kept likewise.
    pub lost: Option<u64>,
}

/// A tenant that holds or waits for permits, as far as its places are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantUse {
    /// Its id.
    pub id: TenantId,
    /// Its name, if this process, or one that [`Semaphore::inspect_fleet`] asked, has had a request of it.
    pub name: Option<Name>,
    /// The number of permits that it has in use.
    pub in_use: u64,
    /// The number of its waiting requests.
    pub waiting: u64,
    /// The weight of its last listed place.
    pub weight: u32,
    /// The cap of its last listed place; `None` without a cap.
    pub each: Option<u32>,
    /// How long its longest waiting request has waited, as far as that is known; see [`Waiter::waited`].
    pub longest_wait: Option<Duration>,
    /// Its override, if its name is known.
    pub set: TenantOverride,
}

/// A request that holds a permit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Its place, for [`Semaphore::revoke`].
    pub id: PlaceId,
    /// Its tenant, if it has one.
    pub tenant: Option<TenantId>,
    /// How many permits it takes.
    pub cost: u32,
    /// The random id of its process.
    pub node: String,
    /// The name of its process: host and process id. Known of this process and those that
    /// [`Semaphore::inspect_fleet`] asked.
    pub process: Option<String>,
    /// Whether it is a request of this process.
    pub is_own: bool,
    /// How long it has held its permit, if this process, or one that [`Semaphore::inspect_fleet`] asked, holds it.
    pub held: Option<Duration>,
    /// How long its lease lasts, unless it is renewed.
    pub lease_left: Duration,
}

/// A request that waits for a permit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// Its place, for [`Semaphore::revoke`].
    pub id: PlaceId,
    /// Its tenant, if it has one.
    pub tenant: Option<TenantId>,
    /// How many permits it takes.
    pub cost: u32,
    /// The random id of its process.
    pub node: String,
    /// The name of its process: host and process id. Known of this process and those that
    /// [`Semaphore::inspect_fleet`] asked.
    pub process: Option<String>,
    /// Whether it is a request of this process.
    pub is_own: bool,
    /// How long its lease lasts, unless it is renewed.
    pub lease_left: Duration,
    /// How long it has waited. For a request with a tenant or further limits, this is known only of this process and those that
    /// [`Semaphore::inspect_fleet`] asked.
    pub waited: Option<Duration>,
}

impl Inspection {
    pub(super) fn new(
        name: &str,
        listing: Listing,
        rate: Option<Rate>,
        own: &Node,
        numbers: &TenantNumbers,
        answers: &HashMap<NodeId, PeerAnswer>,
    ) -> Self {
        let is_cut = listing.places.len() >= INSPECTED_MAX as usize;
        let budgets = budget_use::budgets(name, &listing, own);
        let mut seen = Seen {
            name,
            own,
            answers,
            backend_us: listing.now,
            now: own.now(),
            holders: Vec::new(),
            queue: Vec::new(),
            tenants: BTreeMap::new(),
            further: FurtherUses::default(),
            processes: BTreeMap::from([(own.id(), ProcessUse::own(name, own))]),
        };
        for (place, lease_end, ticket) in listing.places {
            seen.add(place, lease_end, ticket);
        }
        let tenants = seen.named_tenants(numbers);
        let Seen { holders, mut queue, further, processes, .. } = seen;
        queue.sort_by_key(|(tenant, ticket, _)| (*tenant, *ticket));
        Self {
            in_use: listing.in_use,
            waiting: listing.waiting,
            holders,
            waiters: queue.into_iter().map(|(.., waiter)| waiter).collect(),
            set: own.overrides.of(name),
            paused: own.overrides.pause_of(name, own.now()).map(|(by, cause, left)| Paused {
                left,
                by: by.to_string(),
                cause,
            }),
            adapted: own.adapted(name),
            is_cut,
            tenants,
            further_limits: further.named(name, own),
            limit: own
                .limit_in_force(name)
                .or_else(|| processes.values().filter_map(|process| process.limit).max()),
            last_limit: own.counts.tallies.of(name).limit,
            rate: listing.rate.map(|usage| RateUse::new(usage, rate, listing.now)),
            budgets,
            processes: processes.into_values().collect(),
        }
    }
}

/// What this process, and the processes that were asked, know of the places of a listing.
struct Seen<'a> {
    name: &'a str,
    own: &'a Node,
    answers: &'a HashMap<NodeId, PeerAnswer>,
    /// The time of the listing, in µs by the backend's clock and by this process's.
    backend_us: u64,
    now: Time,
    holders: Vec<Holder>,
    /// The waiters, each with the tenant and the ticket by which they are sorted.
    queue: Vec<(Option<Tenant>, u64, Waiter)>,
    tenants: BTreeMap<Tenant, TenantUse>,
    further: FurtherUses,
    processes: BTreeMap<NodeId, ProcessUse>,
}

impl Seen<'_> {
    fn add(&mut self, place: protocol::PlaceId, lease_end: u64, ticket: Option<u64>) {
        let answer = self.answers.get(&place.node);
        let is_own = place.node == self.own.id();
        let name = if is_own { Some(&**process()) } else { answer.map(|of| &*of.process) };
        let process = name.filter(|name| !name.is_empty()).map(ToOwned::to_owned);
        self.processes
            .entry(place.node)
            .or_insert_with(|| ProcessUse::other(place.node, process.clone(), answer));
        if let Some(claim) = place.claim.filter(|claim| claim.has_tenant()) {
            let seen = self.tenants.entry(claim.tenant()).or_insert_with(|| TenantUse::of(claim));
            (seen.weight, seen.each) = (claim.weight(), claim.each());
        }
        self.further.add(place, ticket.is_some());
        let lease_left = Duration::from_millis(lease_end.saturating_sub(self.backend_us / 1000));
        match ticket {
            None => self.add_holder(place, process, lease_left),
            Some(ticket) => self.add_waiter(place, process, lease_left, ticket),
        }
    }

    fn add_holder(
        &mut self,
        place: protocol::PlaceId,
        process: Option<String>,
        lease_left: Duration,
    ) {
        let (tenant, cost) = (place.tenant(), place.cost());
        let is_own = place.node == self.own.id();
        if let Some(user) = self.processes.get_mut(&place.node) {
            user.in_use += u64::from(cost);
        }
        if let Some(seen) = tenant.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            seen.in_use += u64::from(cost);
        }
        let held =
            if is_own { self.here(|session, now| session.held_for(place, now)) } else { None };
        let as_reported = || self.answers.get(&place.node)?.held.get(&place.n).copied();
        self.holders.push(Holder {
            id: PlaceId(place),
            tenant: tenant.map(TenantId),
            cost,
            node: place.node.to_string(),
            process,
            is_own,
            held: held.or_else(as_reported),
            lease_left,
        });
    }

    fn add_waiter(
        &mut self,
        place: protocol::PlaceId,
        process: Option<String>,
        lease_left: Duration,
        ticket: u64,
    ) {
        let tenant = place.tenant();
        let is_own = place.node == self.own.id();
        let as_reported = || self.answers.get(&place.node)?.waiting.get(&place.n).copied();
        let waited = if place.line().is_none() {
            Some(Duration::from_micros(self.backend_us.saturating_sub(ticket)))
        } else if is_own {
            self.here(|session, now| session.waiting_for(place, now)).or_else(as_reported)
        } else {
            as_reported()
        };
        if let Some(user) = self.processes.get_mut(&place.node) {
            user.waiting += 1;
        }
        if let Some(seen) = tenant.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            seen.waiting += 1;
            seen.longest_wait = seen.longest_wait.max(waited);
        }
        let waiter = Waiter {
            id: PlaceId(place),
            tenant: tenant.map(TenantId),
            cost: place.cost(),
            node: place.node.to_string(),
            process,
            is_own,
            lease_left,
            waited,
        };
        self.queue.push((tenant, ticket, waiter));
    }

    /// Reads the session of this process, if there is one.
    fn here<T>(&self, read: impl FnOnce(&Session, Time) -> Option<T>) -> Option<T> {
        self.own.read_session(self.name, |session| read(session, self.now)).flatten()
    }

    /// Takes the tenants out with their names and overrides, the one with the most permits in use first.
    fn named_tenants(&mut self, numbers: &TenantNumbers) -> Vec<TenantUse> {
        let names = self.own.tenants_of(self.name, self.now);
        let names = names.map(|(names, _)| names).unwrap_or_default();
        let names = self.answers.values().flat_map(|answer| &answer.tenants).chain(&names);
        let names: HashMap<_, _> = names.map(|(tenant, name)| (*tenant, name)).collect();
        let mut tenants: Vec<_> = std::mem::take(&mut self.tenants).into_values().collect();
        for seen in &mut tenants {
            // Another process may report any name, so check that it has this number.
            let known = names.get(&seen.id.0).and_then(|name| Name::from_stored(name));
            seen.name = known.filter(|name| numbers.of(Some(name)) == seen.id.0);
            if let (Some(semaphore), Some(tenant)) = (Name::from_stored(self.name), &seen.name) {
                seen.set = self.own.overrides.of_tenant(&semaphore, tenant);
            }
        }
        tenants.sort_by_key(|seen| std::cmp::Reverse((seen.in_use, seen.waiting)));
        tenants
    }
}

impl ProcessUse {
    fn own(name: &str, own: &Node) -> Self {
        let Tally { refused, lost, .. } = own.counts.tallies.of(name);
        Self {
            node: own.id().to_string(),
            process: Some(process().to_string()),
            is_own: true,
            in_use: 0,
            kept: Some(own.read_session(name, Session::kept).unwrap_or_default() as u64),
            waiting: 0,
            limit: own
                .read_session(name, Session::policy_limit)
                .flatten()
                .filter(|of| *of < u32::MAX),
            refused: Some(refused),
            lost: Some(lost),
        }
    }

    fn other(node: NodeId, process: Option<String>, answer: Option<&PeerAnswer>) -> Self {
        Self {
            node: node.to_string(),
            process,
            is_own: false,
            in_use: 0,
            kept: answer.map(|answer| answer.kept),
            waiting: 0,
            limit: answer.and_then(|answer| answer.limit).filter(|of| *of < u32::MAX),
            refused: answer.and_then(|answer| answer.tally).map(|tally| tally.refused),
            lost: answer.and_then(|answer| answer.tally).map(|tally| tally.lost),
        }
    }
}

impl TenantUse {
    pub(crate) fn of(claim: Claim) -> Self {
        Self {
            id: TenantId(claim.tenant()),
            name: None,
            in_use: 0,
            waiting: 0,
            weight: claim.weight(),
            each: claim.each(),
            longest_wait: None,
            set: TenantOverride::default(),
        }
    }
}
