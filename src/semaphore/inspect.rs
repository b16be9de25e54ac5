//! Which semaphores there are, and who has them.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::Semaphore;
use super::node::Node;
use super::peers::{PeerAnswer, process};
use super::tallies::Tally;
use super::tenants::{TenantNumbers, TenantOverride};
use crate::backend::{ALL_NAMES, Listing, Names, PeerMessage};
use crate::error::{BackendError, ConfigError};
use crate::name::Name;
use crate::protocol::claim::{Claim, Tenant};
use crate::protocol::id::{NodeId, PlaceId};
use crate::protocol::overrides::Override;
use crate::protocol::session::Session;
use crate::protocol::time::Time;

/// How many holders and waiters an inspection lists.
const INSPECTED_MAX: u32 = 1000;
/// How many semaphores to list at a time, at the most.
const LISTED_MAX: u32 = 1000;
/// How often to go on where a piece of the backend's keys had no semaphore in it.
const PIECES_MAX: u32 = 100;

impl Node {
    /// What this process knows of the tenants of a semaphore: their names, and which of its places wait and for
    /// how long; `None`: nothing.
    #[expect(clippy::type_complexity, reason = "as they stand in a message")]
    pub(super) fn tenants_of(
        &self,
        name: &str,
        now: Time,
    ) -> Option<(Vec<(Tenant, Arc<str>)>, Vec<(u64, u64)>)> {
        const MOST: usize = PeerMessage::TENANTS_MAX;
        let shared = self.sessions.get(name)?;
        let state = shared.lock();
        let names = state.tenants.all().take(MOST);
        let names: Vec<_> = names.map(|(tenant, name)| (tenant, Arc::clone(name))).collect();
        let waiting = state.session.waiting_since(now, MOST);
        (!names.is_empty() || !waiting.is_empty()).then_some((names, waiting))
    }

    /// The limit that is set for a semaphore, or by which this process goes.
    fn limit_in_force(&self, name: &str) -> Option<u32> {
        let set = self.overrides.of(name).in_place();
        set.or_else(|| self.read_session(name, Session::policy_limit).flatten())
    }

    /// The holders and waiters of a semaphore.
    pub(super) async fn inspect(&self, name: &str, most: u32) -> Result<Listing, BackendError> {
        let key = self.backend().key(name);
        self.query(None, &key, |server| server.inspect(&key, most)).await
    }
}

impl Semaphore {
    /// Who holds permits of `name`, and who waits: up to a thousand places.
    ///
    /// # Errors
    ///
    /// If the backend gave no answer within a second.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn inspect(&self, name: impl Into<Name>) -> Result<Inspection, BackendError> {
        let (name, node) = (name.into(), self.running_node()?);
        let listing = node.inspect(name.as_str(), INSPECTED_MAX).await?;
        Ok(Inspection::new(name.as_str(), listing, node, &self.tenants, &HashMap::new()))
    }

    /// As [`inspect`](Self::inspect), and asks the other processes what they are called and for how
    /// long they have had their permits, since nobody else knows. Waits for their answers for 200 ms at
    /// the most: of a process that is gone or stands still, or that Redis forbids to subscribe, this
    /// tells no more than `inspect`. At most 64 processes are asked.
    ///
    /// # Errors
    ///
    /// If the backend gave no answer within a second.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn inspect_fleet(&self, name: impl Into<Name>) -> Result<Inspection, BackendError> {
        let (name, node) = (name.into(), self.running_node()?);
        let listing = node.inspect(name.as_str(), INSPECTED_MAX).await?;
        let others = listing.places.iter().map(|(place, ..)| place);
        let others = others.filter(|place| place.node != node.id() && !place.poll_only);
        let others = others.map(|place| place.node).collect();
        let name = name.as_str();
        let ask = |to| node.send_message(name, to, PeerMessage::AskHeld { by: node.id() });
        let answers = node.questions.ask(name, others, ask).await;
        Ok(Inspection::new(name, listing, node, &self.tenants, &answers))
    }

    /// Names the semaphores of which someone holds or waits for a permit: about `most` of them, from
    /// [`Cursor::default`] on, the beginning; [`Page::next`] tells how to go on.
    ///
    /// A semaphore that is there from the first page to the last comes at least once, and perhaps
    /// twice; one that comes or goes meanwhile may be among them or not. Redis walks all of its keys
    /// for that, a piece at a time: where it has many that are not semaphores, a page can be empty and
    /// still not the last. A cluster's masters are walked one after the other; one that cannot be asked
    /// is passed over and told in [`Page::away`], and while slots move or masters change some names
    /// can be missed.
    ///
    /// # Errors
    ///
    /// If `most` is not from 1 to 1000, or the backend cannot be asked, or does not allow for it.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn list(&self, from: Cursor, most: u32) -> Result<Page, BackendError> {
        if !(1..=LISTED_MAX).contains(&most) {
            return Err(BackendError::call(format!(
                "most: {most} semaphores at a time cannot be listed; allowed: 1 to {LISTED_MAX}"
            )));
        }
        let node = self.running_node()?;
        if from == Cursor::default() {
            // What is set stands beside the names; and with it a cluster's map is known.
            node.catch_up().await?;
        }
        let servers = node.backend().shards();
        let key = node.backend().key(ALL_NAMES);
        let (mut found, mut away, mut next) = (Vec::new(), Vec::new(), from);
        for _ in 0..PIECES_MAX {
            let Some(server) = servers.get(next.server) else { break };
            let names = node.query(Some(server), &key, |server| server.list(&key, next.at, most));
            let then = match names.await {
                Ok(Names { names, next }) => {
                    found.extend(names.iter().filter_map(|name| Name::from_stored(name)));
                    next
                }
                Err(error) if servers.len() == 1 => return Err(error),
                Err(error) => {
                    away.push(error);
                    0
                }
            };
            next = if then == 0 {
                Cursor { server: next.server + 1, at: 0 }
            } else {
                Cursor { at: then, ..next }
            };
            if !found.is_empty() {
                break;
            }
        }
        // Together: they go out in one write.
        let seen = join_all(found.iter().map(|name| node.inspect(name.as_str(), 1))).await;
        let mut semaphores = Vec::with_capacity(found.len());
        for (name, seen) in found.into_iter().zip(seen) {
            let Listing { in_use, waiting, .. } = seen?;
            let set = node.overrides.of(name.as_str());
            // One that is gone meanwhile is left out.
            if in_use > 0 || waiting > 0 {
                let limit = node.limit_in_force(name.as_str());
                semaphores.push(Listed { name, in_use, waiting, limit, set });
            }
        }
        let next = (next.server < servers.len()).then_some(next);
        Ok(Page { semaphores, away, next })
    }

    /// All tenants for which something is set in place of what their requests say, by semaphore and name; at
    /// most 1000.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn tenant_overrides(
        &self,
    ) -> Result<Vec<(Name, Name, TenantOverride)>, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.of_tenants())
    }

    /// All names for which something is set in place of their policy, whether anyone has a permit of
    /// them or not; at most 1000, by name.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn overrides(&self) -> Result<Vec<(Name, Override)>, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        let mut all = node.overrides.all();
        all.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        Ok(all
            .into_iter()
            .filter_map(|(name, set)| Some((Name::from_stored(&name)?, set)))
            .collect())
    }
}

/// Where a page of [`Semaphore::list`] begins. As text it is two numbers with a dash, for a URL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// Which of the servers.
    server: usize,
    /// As the server has it.
    at: u64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.server, self.at)
    }
}

impl FromStr for Cursor {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let read = || {
            let (server, at) = text.split_once('-')?;
            Some(Self { server: server.parse().ok()?, at: at.parse().ok()? })
        };
        read().ok_or_else(|| {
            ConfigError::new(format!(
                "cursor: {text:?} cannot be used; allowed: what a page gave as the next"
            ))
        })
    }
}

/// Some of the semaphores: the answer of [`Semaphore::list`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Page {
    /// The semaphores, in no order.
    pub semaphores: Vec<Listed>,
    /// Why servers of a cluster could not be asked, whose semaphores are missing here.
    pub away: Vec<BackendError>,
    /// Where the next page begins; `None`: this was the last.
    pub next: Option<Cursor>,
}

/// A semaphore that someone holds or waits for a permit of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Its name.
    pub name: Name,
    /// How many permits are out; those of dead processes count until they are swept.
    pub in_use: u64,
    /// How many requests wait; those of dead processes count until they are swept.
    pub waiting: u64,
    /// The limit that an operator set, or by which this process goes; `None`: nothing is set, and this process has
    /// not used the semaphore for some seconds. [`Semaphore::inspect_fleet`] asks the others.
    pub limit: Option<u32>,
    /// What is set in place of its policy, as this process knows it: a second old at the most.
    pub set: Override,
}

/// The holders and waiters of a semaphore at one moment: the answer of [`Semaphore::inspect`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// How many permits are out.
    pub in_use: u64,
    /// How many requests wait.
    pub waiting: u64,
    /// Who holds, the one whose lease ends first in front.
    pub holders: Vec<Holder>,
    /// Who waits, the head of the queue in front; behind that, line by line, those with a tenant.
    pub waiters: Vec<Waiter>,
    /// What is set in place of its policy, as this process knows it: a second old at the most.
    pub set: Override,
    /// Whether more hold or wait than are listed: then some tenants may be missing, and others have more than is
    /// told.
    pub is_cut: bool,
    /// The tenants that hold or wait, the one with the most in use in front; none where requests name none.
    pub tenants: Vec<TenantUse>,
    /// The limit in force: the one that an operator set; else the one by which this process goes; else the highest
    /// that another process [told](Semaphore::inspect_fleet). `None`: nothing is set, and no process that uses the
    /// semaphore was asked or answered.
    pub limit: Option<u32>,
    /// The limit of the last policy by which this process went, some seconds after its last request: the best guess
    /// where nobody uses the semaphore. Known of the 1024 semaphores that it counted last.
    pub last_limit: Option<u32>,
    /// The processes that hold permits or wait for them, and this one, by id.
    pub processes: Vec<ProcessUse>,
}

/// A process that uses a semaphore, among the places that were listed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessUse {
    /// The process, by a random id.
    pub node: String,
    /// What it is called: see [`Holder::process`].
    pub process: Option<String>,
    /// Whether it is this process.
    pub is_own: bool,
    /// How many permits it has in use.
    pub in_use: u64,
    /// How many of its requests wait.
    pub waiting: u64,
    /// The limit of its policy, as its last request brought it, if that is known; what operators set goes before it.
    pub limit: Option<u32>,
    /// How many of its requests were refused, if that is known: since its start, while the semaphore is among the
    /// 1024 that it counted last. Requests that gave up are not among them.
    pub refused: Option<u64>,
    /// How many permits were lost to their holders in it, likewise.
    pub lost: Option<u64>,
}

/// A tenant that holds permits or waits for them, among the places that were listed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantUse {
    /// The tenant by its number, as it stands in the ids of its places.
    pub id: Tenant,
    /// Its name. Known where this process has had a request of it, or one of those has that
    /// [`Semaphore::inspect_fleet`] asked.
    pub name: Option<Name>,
    /// How many permits it has in use.
    pub in_use: u64,
    /// How many of its requests wait.
    pub waiting: u64,
    /// Its weight, as its last place has it.
    pub weight: u32,
    /// How many permits it may have in use, as its last place has it; `None`: as many as there are.
    pub each: Option<u32>,
    /// How long the one of its requests has been waiting that waits longest, as far as that is known: see
    /// [`Waiter::waited`].
    pub longest_wait: Option<Duration>,
    /// What is set for it in place of what its requests say, if its name is known.
    pub set: TenantOverride,
}

/// One that holds a permit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Its place, as [`Semaphore::revoke`] takes it.
    pub id: PlaceId,
    /// Its tenant, if it has one.
    pub tenant: Option<Tenant>,
    /// How many permits it takes.
    pub cost: u32,
    /// Its process, by a random id.
    pub node: String,
    /// What its process is called: host and process id. Known for this one, and for those that
    /// [`Semaphore::inspect_fleet`] asked.
    pub process: Option<String>,
    /// Whether it is one of this process.
    pub is_own: bool,
    /// For how long it has had its permit; known for this process's own, and for those of processes that
    /// [`Semaphore::inspect_fleet`] asked.
    pub held: Option<Duration>,
    /// When its lease ends, unless it is renewed.
    pub lease_left: Duration,
}

/// One that waits for a permit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// Its place, as [`Semaphore::revoke`] takes it.
    pub id: PlaceId,
    /// Its tenant, if it has one.
    pub tenant: Option<Tenant>,
    /// How many permits it takes.
    pub cost: u32,
    /// Its process, by a random id.
    pub node: String,
    /// What its process is called: host and process id. Known for this one, and for those that
    /// [`Semaphore::inspect_fleet`] asked.
    pub process: Option<String>,
    /// Whether it is one of this process.
    pub is_own: bool,
    /// When its lease ends, unless it is renewed.
    pub lease_left: Duration,
    /// How long it has been waiting. Of a place with a tenant that is known for this process's own, and for
    /// those of processes that [`Semaphore::inspect_fleet`] asked.
    pub waited: Option<Duration>,
}

impl Inspection {
    fn new(
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
                let seen = tenants.entry(claim.tenant()).or_insert_with(|| TenantUse::new(claim));
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
            // What another process says is believed if it can be true.
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
            waiting: 0,
            limit: told.and_then(|told| told.limit),
            refused: told.and_then(|told| told.tally).map(|tally| tally.refused),
            lost: told.and_then(|told| told.tally).map(|tally| tally.lost),
        }
    }
}

impl TenantUse {
    fn new(claim: Claim) -> Self {
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
