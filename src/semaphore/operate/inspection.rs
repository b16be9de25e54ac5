//! The state of a semaphore at one moment, from the listing of the backend and what processes know.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

#[cfg(doc)]
use super::Semaphore;
use crate::backend::Listing;
use crate::name::Name;
use crate::node::Node;
use crate::node::peers::{PeerAnswer, process};
use crate::node::tallies::Tally;
use crate::protocol::session::Session;
use crate::protocol::{Claim, NodeId, Override, PlaceId, Tenant};
use crate::tenants::{TenantNumbers, TenantOverride};

/// The most holders and waiters that an inspection lists.
pub(super) const INSPECTED_MAX: u32 = 1000;

/// The holders and waiters of a semaphore at one moment, as [`Semaphore::inspect`] returns them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// How many permits are in use.
    pub in_use: u64,
    /// How many requests wait.
    pub waiting: u64,
    /// The holders, in the order in which their leases end.
    pub holders: Vec<Holder>,
    /// The waiters: first those without a tenant, in the order of the queue, then those of each tenant.
    pub waiters: Vec<Waiter>,
    /// The override, as this process knows it: at most a second old.
    pub set: Override,
    /// Whether there are more holders or waiters than are listed. Then tenants may be missing, and the counts of
    /// others too low.
    pub is_cut: bool,
    /// The tenants that hold or wait, the one with the most permits in use first. Empty where requests name none.
    pub tenants: Vec<TenantUse>,
    /// The limit in force: the one that an operator set; else that of the policy in this process; else the highest
    /// that another process [reported](Semaphore::inspect_fleet). `None` if nothing is set, and no process that uses
    /// the semaphore was asked or answered.
    pub limit: Option<u32>,
    /// The limit of the policy that this process used last, known from some seconds after its last request on: the
    /// best guess where the semaphore is not in use. Kept for about a thousand semaphores, those that it
    /// counted most often.
    pub last_limit: Option<u32>,
    /// The processes that hold or wait for permits, and this one, by id.
    pub processes: Vec<ProcessUse>,
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
    /// How many permits it has in use.
    pub in_use: u64,
    /// How many of those it keeps for its next requests, if that is known: see [`PolicyBuilder::reuse`].
    ///
    /// [`PolicyBuilder::reuse`]: crate::PolicyBuilder::reuse
    pub kept: Option<u64>,
    /// How many of its requests wait.
    pub waiting: u64,
    /// The limit of the policy of its last request, if that is known. An override precedes it.
    pub limit: Option<u32>,
    /// How many of its requests were rejected since its start, if that is known. Kept for about a thousand
    /// semaphores, those that it counted most often; 0 for another one. Does not count requests that gave up.
    pub refused: Option<u64>,
    /// How many permits were lost to their holders in it. Kept likewise.
    pub lost: Option<u64>,
}

/// A tenant that holds or waits for permits, as far as its places are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantUse {
    /// The number of the tenant, which is part of the ids of its places.
    pub id: Tenant,
    /// Its name, if this process, or one that [`Semaphore::inspect_fleet`] asked, has had a request of it.
    pub name: Option<Name>,
    /// How many permits it has in use.
    pub in_use: u64,
    /// How many of its requests wait.
    pub waiting: u64,
    /// The weight of its last listed place.
    pub weight: u32,
    /// The cap of its last listed place; `None` without a cap.
    pub each: Option<u32>,
    /// How long its longest waiting request has waited, as far as that is known: see [`Waiter::waited`].
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
    pub tenant: Option<Tenant>,
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
    pub tenant: Option<Tenant>,
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
    /// How long it has waited. For a request with a tenant, this is known only of this process and those that
    /// [`Semaphore::inspect_fleet`] asked.
    pub waited: Option<Duration>,
}

impl Inspection {
    pub(super) fn new(
        name: &str,
        listing: Listing,
        own: &Node,
        numbers: &TenantNumbers,
        told: &HashMap<NodeId, PeerAnswer>,
    ) -> Self {
        let (now, local) = (listing.now, own.now());
        let (mut holders, mut queue) = (Vec::new(), Vec::new());
        let mut tenants: BTreeMap<Tenant, TenantUse> = BTreeMap::new();
        let is_cut = listing.places.len() >= INSPECTED_MAX as usize;
        let mut processes = BTreeMap::from([(own.id(), ProcessUse::own(name, own))]);
        for (place, lease_end, ticket) in listing.places {
            let lease_left = Duration::from_millis(lease_end.saturating_sub(now / 1000));
            let is_own = place.node == own.id();
            let (id, node, cost) = (place, place.node.to_string(), place.cost());
            let told = told.get(&place.node);
            let named = if is_own { Some(&**process()) } else { told.map(|told| &*told.process) };
            let process = named.filter(|named| !named.is_empty()).map(ToOwned::to_owned);
            let user = processes
                .entry(place.node)
                .or_insert_with(|| ProcessUse::other(place.node, process.clone(), told));
            let tenant = place.claim.map(Claim::tenant);
            let mut in_line = place.claim.map(|claim| {
                let seen = tenants.entry(claim.tenant()).or_insert_with(|| TenantUse::of(claim));
                (seen.weight, seen.each) = (claim.weight(), claim.each());
                seen
            });
            match ticket {
                None => {
                    let held =
                        own.read_session(name, |session| session.held_for(place, local)).flatten();
                    let told = told.and_then(|told| told.held.get(&place.n).copied());
                    let held = held.filter(|_| is_own).or(told);
                    user.in_use += u64::from(cost);
                    if let Some(seen) = &mut in_line {
                        seen.in_use += u64::from(cost);
                    }
                    let holder =
                        Holder { id, tenant, cost, node, process, is_own, held, lease_left };
                    holders.push(holder);
                }
                Some(ticket) => {
                    let told = told.and_then(|told| told.waiting.get(&place.n).copied());
                    let known = || {
                        own.read_session(name, |session| session.waiting_for(place, local))
                            .flatten()
                            .filter(|_| is_own)
                    };
                    let waited = match tenant {
                        None => Some(Duration::from_micros(now.saturating_sub(ticket))),
                        Some(_) => known().or(told),
                    };
                    user.waiting += 1;
                    if let Some(seen) = &mut in_line {
                        seen.waiting += 1;
                        seen.longest_wait = seen.longest_wait.max(waited);
                    }
                    let waiter =
                        Waiter { id, tenant, cost, node, process, is_own, lease_left, waited };
                    queue.push((tenant, ticket, waiter));
                }
            }
        }
        queue.sort_by_key(|(tenant, ticket, _)| (*tenant, *ticket));
        let set = own.overrides.of(name);
        let mut tenants: Vec<_> = tenants.into_values().collect();
        let names = own.tenants_of(name, local).map(|(names, _)| names).unwrap_or_default();
        let names = told.values().flat_map(|told| &told.tenants).chain(&names);
        let names: HashMap<_, _> = names.map(|(tenant, name)| (*tenant, name)).collect();
        for seen in &mut tenants {
            // The name that another process reports must have this number.
            let known = names.get(&seen.id).and_then(|name| Name::from_stored(name));
            seen.name = known.filter(|name| numbers.of(Some(name)) == seen.id);
            if let (Some(semaphore), Some(tenant)) = (Name::from_stored(name), &seen.name) {
                seen.set = own.overrides.of_tenant(&semaphore, tenant);
            }
        }
        tenants.sort_by_key(|seen| std::cmp::Reverse((seen.in_use, seen.waiting)));
        Self {
            in_use: listing.in_use,
            waiting: listing.waiting,
            holders,
            waiters: queue.into_iter().map(|(.., waiter)| waiter).collect(),
            set,
            is_cut,
            tenants,
            limit: own
                .limit_in_force(name)
                .or_else(|| processes.values().filter_map(|process| process.limit).max()),
            last_limit: own.counts.tallies.of(name).limit,
            processes: processes.into_values().collect(),
        }
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
            limit: own.read_session(name, Session::policy_limit).flatten(),
            refused: Some(refused),
            lost: Some(lost),
        }
    }

    fn other(node: NodeId, process: Option<String>, told: Option<&PeerAnswer>) -> Self {
        Self {
            node: node.to_string(),
            process,
            is_own: false,
            in_use: 0,
            kept: told.map(|told| told.kept),
            waiting: 0,
            limit: told.and_then(|told| told.limit),
            refused: told.and_then(|told| told.tally).map(|tally| tally.refused),
            lost: told.and_then(|told| told.tally).map(|tally| tally.lost),
        }
    }
}

impl TenantUse {
    pub(crate) fn of(claim: Claim) -> Self {
        Self {
            id: claim.tenant(),
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
