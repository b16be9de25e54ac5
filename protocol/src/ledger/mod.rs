//! The protocol as a pure state machine: no I/O, no clock, no randomness.
//!
//! A [`Ledger`] is one semaphore. Operations go in, with the time as an argument; a [`Reply`] comes
//! out, and hints for other nodes go through a closure. [`MemoryBackend`] is this ledger behind a
//! lock, and the scripts in `lua/` are this ledger in Redis commands: generated histories compare
//! the two, reply by reply.
//!
//! # The one idea
//!
//! *A place has one lease, from joining to leaving, whether it waits or holds.* A place that waits
//! also has a ticket; removing the ticket **is** the grant. Nothing else is stored: no
//! counter that could drift, nothing to initialise, nothing left when the last place is gone.
//!
//! Every operation that changes anything ends in the same way: sweep what has expired, then
//! promote, so that no permit is idle while any place waits. While any place waits, a newcomer
//! joins the queue or is refused.
//!
//! # Tenants
//!
//! A place whose id carries a [`Claim`](super::Claim) with a tenant stands in the line of that, and what the tenant
//! has in use says which line is next: see [`Lines`]. Places without a tenant are one line more,
//! with its tickets as they are. Without tenants, none of this exists.
//!
//! # Rates
//!
//! A place whose id carries a [`BoundRate`](super::BoundRate) is granted only if the window has room for it, too. The time of its grant is
//! kept for the length of the window, whatever becomes of the place.
//!
//! # Budgets
//!
//! A place whose claim has [charges](super::Charge) is granted only if its budgets allow them. They are taken with the
//! grant, and once the place leaves, what was truly used can be put in their place: see [`Ledger::settle_used`].
//!
//! # As bytes
//!
//! A backend that keeps each semaphore as one value stores what [`Ledger::encode`] writes. If it has leases of its own, it
//! says when one has ended: see [`Ledger::forget`].
//!
//! [`MemoryBackend`]: https://docs.rs/tower-semaphore/latest/tower_semaphore/backend/struct.MemoryBackend.html

mod acquire;
mod budgets;
mod carry_out;
mod coding;
mod fair;
mod fit;
mod forget;
mod promote;
mod reply;
mod starts;

use std::collections::{BTreeSet, HashMap};
use std::hash::{Hash, Hasher};

use self::budgets::Budgets;
pub use self::coding::DecodeError;
pub use self::fair::LINE_MAX;
use self::fair::{FairPlaces, OfPlaces, ticket_of};
use self::promote::Silent;
pub use self::reply::{Grant, Hint, PlaceStatus, RateUsage, Reply, Usage};
use self::starts::Starts;
use super::bound::Bound;
use super::bound_rate::BoundRate;
use super::charge::Used;
use super::claim::{Claim, LineId, Tenant};
use super::further::FurtherLimit;
use super::id::{NodeId, PlaceId};
use foldhash::fast::RandomState;

/// The lowest ticket. Tickets are µs since 1970, about 10¹⁵; scores below are lease ends, ms, about
/// 10¹².
pub const TICKET_MIN: u64 = 100_000_000_000_000;

/// The proof of a place that no backend ever knew: it is in flight, so it is to be counted.
pub(crate) const NEVER_ENDS: u64 = TICKET_MIN - 1;

/// In place of a proof: the next place replaces this one, which leaves if it waits; if it holds, the next one is not put
/// there.
pub(crate) const LEAVES: u64 = 0;

/// The bound on the work of one operation. A swept place and a granted head of the queue cost as much as their permits;
/// a place that is passed over costs 1, as does a line that is parked anew; a hint to another node costs [`HINT_WORK`]
/// more, and a place with further limits [`FURTHER_WORK`] more. The places that the operation names are not counted.
pub const WORK_MAX: usize = 500;

/// The cost of one hint to another node, out of [`WORK_MAX`].
pub const HINT_WORK: usize = 4;

/// What a place with further limits costs beyond its permits, out of [`WORK_MAX`]: what is parked at each limit may come
/// back.
pub const FURTHER_WORK: usize = 4;

/// The caller of an operation: who asks, when, and under which limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    /// µs since 1970 by the ledger's one clock.
    pub now: u64,
    /// Permits of this semaphore, as the caller knows it: newcomers are judged by it, and so is a waiting place whose
    /// id has no [`Bound`]. A call that frees nothing grants no waiting place once this many are in use, whatever that
    /// place brought.
    pub limit: u32,
    /// The permits that are reserved for class 0.
    pub headroom: u32,
    /// The limit counts for all places, whatever they brought: an operator set it, or it withholds grants.
    pub for_all: bool,
    /// A place joins its tenant's line only while this one and all lines together are shorter than this.
    pub max_waiting: u32,
    /// The calling node.
    pub node: NodeId,
    /// Newcomers that have to wait recall permits that other nodes keep.
    pub recalls: bool,
}

impl Caller {
    const fn bound(self) -> Bound {
        Bound { limit: self.limit, headroom: self.headroom, rate: None }
    }

    /// How many permits may be in use once a newcomer of this class is granted.
    const fn room(self, class: u8) -> u64 {
        self.bound().room(class)
    }

    /// The same for a place that waits.
    fn room_of(self, id: PlaceId) -> u64 {
        let own = id.bound.unwrap_or_else(|| self.bound());
        let bound = if self.for_all { Bound { limit: self.limit, ..own } } else { own };
        bound.room(id.claim.map_or(0, Claim::class))
    }
}

/// Delivers hints to a node, or a recall if there are no grants. Returns `false` if nobody listens there, so the node is
/// gone.
pub type Post<'a> = &'a mut dyn FnMut(NodeId, &[Grant]) -> bool;

/// One semaphore: its places, held and waiting.
#[derive(Clone, Debug)]
pub struct Ledger {
    places: HashMap<PlaceId, Place, RandomState>,
    /// The places without a line that wait.
    queue: BTreeSet<(u64, PlaceId)>,
    /// The permits that places without a line hold beyond one each.
    beyond_one: u64,
    /// The places with a tenant or with further limits; `None`: there are none.
    lines: Option<Box<FairPlaces>>,
    /// The places by their leases, in the order in which they are swept. Kept only from the first place that
    /// waits until the last is gone: a semaphore that is never full does not pay for it.
    by_end: Option<BTreeSet<(Leases, u64, PlaceId)>>,
    /// The grants of places with a rate; `None`: there were none lately.
    starts: Option<Box<Starts>>,
    /// The budgets that are not full; `None`: there are none.
    budgets: Option<Box<Budgets>>,
    /// No lease ends before this, ms: until then there is nothing to sweep.
    quiet_until: u64,
    work_max: usize,
}

/// The kinds of leases, in the order of their scores in Redis: see `lua/acquire.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Leases {
    /// Of places that have a claim and no line.
    OfNobody,
    WithoutClaim,
    InLines,
}

impl Leases {
    const ALL: [Self; 3] = [Self::OfNobody, Self::WithoutClaim, Self::InLines];

    fn of(id: &PlaceId) -> Self {
        match id.claim {
            None => Self::WithoutClaim,
            Some(claim) if claim.is_in_line() => Self::InLines,
            Some(_) => Self::OfNobody,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Place {
    lease_end: u64,
    ticket: Option<u64>,
}

impl Place {
    fn status(self) -> PlaceStatus {
        self.ticket.map_or(PlaceStatus::Held, PlaceStatus::Waiting)
    }
}

impl Ledger {
    /// Creates a semaphore without places.
    #[must_use]
    pub fn new() -> Self {
        Self::with_work_max(WORK_MAX)
    }

    /// Like [`new`](Self::new), with another bound than [`WORK_MAX`], at least 1. For tests: short histories reach a small
    /// bound.
    #[must_use]
    pub fn with_work_max(work_max: usize) -> Self {
        Self {
            places: HashMap::default(),
            queue: BTreeSet::new(),
            beyond_one: 0,
            lines: None,
            by_end: None,
            starts: None,
            budgets: None,
            quiet_until: 0,
            work_max: work_max.max(1),
        }
    }

    /// Sets another bound than [`WORK_MAX`], at least 1. For tests, as [`with_work_max`](Self::with_work_max).
    pub fn set_work_max(&mut self, work_max: usize) {
        self.work_max = work_max.max(1);
    }

    /// Whether no place is left, no grant that counts for a rate, and every budget is full: then there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty() && self.starts_kept().is_none() && self.budgets_kept().is_none()
    }

    fn starts_kept(&self) -> Option<&Starts> {
        self.starts.as_deref().filter(|starts| !starts.is_empty())
    }

    fn budgets_kept(&self) -> Option<&Budgets> {
        self.budgets.as_deref().filter(|budgets| !budgets.is_empty())
    }

    /// The grants that count for a rate, once for each permit: process, number of the place, when it was, and when it
    /// leaves its window (µs).
    pub fn starts(&self) -> impl Iterator<Item = (NodeId, u64, u64, u64)> + '_ {
        self.starts.iter().flat_map(|starts| starts.iter())
    }

    /// How much of this rate is used at `now`, in µs since 1970.
    #[must_use]
    pub fn usage_of(&self, rate: BoundRate, now: u64) -> RateUsage {
        let starts = self.starts.as_ref();
        starts.map_or_else(|| RateUsage::unused(rate), |starts| starts.usage(rate, now))
    }

    /// When the last grant that counts for a rate leaves its window, in µs; `None`: there is none.
    #[must_use]
    pub fn counts_starts_until(&self) -> Option<u64> {
        self.starts.as_ref()?.last_end()
    }

    /// The budgets that are not full: number, and when it will be full again, in µs.
    pub fn budgets(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.budgets.iter().flat_map(|budgets| budgets.iter())
    }

    /// When the budget with this number will be full again, in µs; not after now if it is.
    #[must_use]
    pub fn budget_full_at(&self, number: u32) -> u64 {
        self.budgets.as_ref().map_or(0, |budgets| budgets.full_at(number))
    }

    /// Until when anything is kept that does not depend on a place, in µs: grants that count for a rate, and budgets that
    /// are not full. `None`: nothing is.
    #[must_use]
    pub fn kept_until(&self) -> Option<u64> {
        let full = self.budgets.as_ref().and_then(|budgets| budgets.last_full());
        self.counts_starts_until().max(full)
    }

    /// Puts what places have truly used in the place of their charges, right before the operation that they leave by. A
    /// place that waits, or is not there any more, is ignored, so a repetition is safe.
    #[inline]
    pub fn settle_used(&mut self, used: &[(PlaceId, Used)], now: u64) {
        if !used.is_empty() {
            self.settle_some(used, now);
        }
    }

    fn settle_some(&mut self, used: &[(PlaceId, Used)], now: u64) {
        for (id, used) in used {
            let holds = self.places.get(id).is_some_and(|place| place.ticket.is_none());
            if holds && !id.charges().is_empty() {
                let budgets = self.budgets.get_or_insert_default();
                budgets.settle(id.charges(), *used, now);
                if budgets.is_empty() {
                    self.budgets = None;
                }
            }
        }
    }

    /// How many permits are in use, including those of dead places that are not swept yet.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        let in_lines = self.lines.as_ref().map_or(0, |fair| fair.lines.units());
        self.held_without_line() + in_lines
    }

    /// How many permits places without a tenant hold, also those with further limits.
    fn held_in_order(&self) -> u64 {
        self.held_without_line() + self.in_use_by(Tenant::NOBODY)
    }

    fn held_without_line(&self) -> u64 {
        let in_lines = self.lines.as_ref().map_or(0, |fair| fair.count);
        (self.places.len() - self.queue.len() - in_lines) as u64 + self.beyond_one
    }

    /// How many places wait, including dead ones that are not swept yet.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        let in_lines = self.lines.as_ref().map_or(0, |fair| fair.lines.waiting());
        self.queue.len() as u64 + in_lines
    }

    /// The places in no order: id, lease end (ms), and the ticket of a waiting one.
    pub fn places(&self) -> impl Iterator<Item = (PlaceId, u64, Option<u64>)> + '_ {
        self.places.iter().map(|(id, place)| (*id, place.lease_end, place.ticket))
    }

    /// The turns of the lines that wait as scores, in no order; infinite where a tenant's own cap stops it or the head can
    /// never be served, between -1 and 0 where it is parked at a limit, below -2²⁹ where it is asleep.
    pub fn turns(&self) -> impl Iterator<Item = (LineId, f64)> + '_ {
        self.lines.iter().flat_map(|fair| fair.lines.turns())
    }

    /// The lines of places with further limits that wait, and the tenants of these.
    pub fn further_lines(&self) -> impl Iterator<Item = (LineId, Tenant)> + '_ {
        self.lines.iter().flat_map(|fair| fair.lines.further_lines())
    }

    /// Permits in use by a tenant, or by places with further limits and no tenant.
    #[must_use]
    pub fn in_use_by(&self, tenant: Tenant) -> u64 {
        self.lines.as_ref().map_or(0, |fair| fair.lines.units_of(tenant))
    }

    /// Permits in use under a further limit.
    #[must_use]
    pub fn in_use_under(&self, limit: FurtherLimit) -> u64 {
        self.lines.as_ref().map_or(0, |fair| fair.lines.units_under(limit))
    }

    /// Removes places, waiting or held, and grants what that frees to the head of the queue.
    ///
    /// An unknown id is ignored, so a repetition is safe. Without ids it sweeps and promotes: that is
    /// the call to make after a reply with [`more`](Reply::more).
    #[inline]
    pub fn release(&mut self, caller: Caller, ids: &[PlaceId], post: Post<'_>) -> Reply {
        for id in ids {
            self.take(id);
        }
        self.begin(caller.now);
        if self.queue.is_empty() && self.lines.is_none() {
            return Reply::default();
        }
        self.settle(caller.now);
        self.rouse(caller.now);
        self.hand_on(caller, post)
    }

    /// Begins an operation.
    #[inline]
    fn begin(&mut self, now: u64) {
        self.expire_starts(now);
        self.take_passed();
    }

    /// Grants free permits, if any place waits.
    fn hand_on(&mut self, caller: Caller, post: Post<'_>) -> Reply {
        if self.waiting() == 0 {
            return Reply::default();
        }
        let budget = self.sweep(caller.now);
        let most = self.most(caller, true);
        let granted = self.promote(caller, most, budget, Silent::NOT_EXAMINED, post);
        let more = self.stopped_early(caller, most, budget);
        let opens_in = if more { 0 } else { self.opens_in_ms(caller, most) };
        Reply { granted, more, opens_in, ..Reply::default() }
    }

    /// Removes a place, waiting or held, for an operator; or only looks. Returns when its lease ends, or
    /// would have ended, ms. The operator does not know the limit, so the freed permit is granted by the
    /// next call that does.
    pub fn revoke(&mut self, id: PlaceId, take: bool, now: u64) -> Option<u64> {
        let lease_end = self.places.get(&id)?.lease_end;
        if take {
            self.take_passed();
            self.take(&id);
            self.settle(now);
        }
        Some(lease_end)
    }

    /// Renews the leases of places, waiting or held.
    pub fn renew(
        &mut self,
        caller: Caller,
        lease_ms: u64,
        ids: &[PlaceId],
        post: Post<'_>,
    ) -> Reply {
        let mut reply =
            Reply { lease_end: (caller.now / 1000).saturating_add(lease_ms), ..Reply::default() };
        self.begin(caller.now);
        // The sweep comes first, so a late renewal does not revive a place.
        let budget = self.sweep(caller.now);
        let waiting = ids.iter().filter_map(|id| self.places.get(id));
        let waiting = waiting.filter(|place| place.ticket.is_some());
        let silent = Silent::behind(reply.lease_end, waiting.map(|place| place.lease_end));
        for id in ids {
            let status = match self.places.get(id).copied() {
                None => PlaceStatus::Gone,
                Some(place) => {
                    self.put(*id, reply.lease_end, place.ticket);
                    if let (Some(fair), Some(claim), Some(_)) =
                        (&mut self.lines, id.claim_in_line(), place.ticket)
                    {
                        fair.lines.renewed(claim, caller.now, &OfPlaces);
                    }
                    place.status()
                }
            };
            reply.statuses.push(status);
        }
        self.settle(caller.now);
        self.rouse(caller.now);
        reply.granted = self.promote(caller, caller.limit.into(), budget, silent, post);
        self.close(caller, budget, &mut reply);
        reply
    }

    /// Renews with proof, for places that a renewal found gone.
    ///
    /// The last score of a place is the proof: a lease end in the future shows that the ledger lost a
    /// permit that is in flight, so it is counted again, even past the limit; a ticket gives a waiting
    /// place its old turn, under a new id. A score of 0 takes out a place that waits, which the next one replaces; if it
    /// holds by now, it stays, and the next one is not put there.
    pub fn reassert(
        &mut self,
        caller: Caller,
        lease_ms: u64,
        proofs: &[(PlaceId, u64)],
        post: Post<'_>,
    ) -> Reply {
        let now_ms = caller.now / 1000;
        let mut reply = Reply { lease_end: now_ms.saturating_add(lease_ms), ..Reply::default() };
        self.begin(caller.now);
        let budget = self.sweep(caller.now);
        // Like the script, this reads all of them before it writes any.
        let known: Vec<_> = proofs.iter().map(|(id, _)| self.places.get(id).copied()).collect();
        let mut replaced_holds = false;
        for ((id, proof), place) in proofs.iter().zip(known) {
            let is_void = std::mem::take(&mut replaced_holds);
            let status = match place {
                Some(Place { ticket: Some(_), .. }) if *proof == LEAVES => PlaceStatus::Gone,
                Some(place) => {
                    replaced_holds = *proof == LEAVES;
                    place.status()
                }
                None if is_void => PlaceStatus::Gone,
                None if *proof >= TICKET_MIN => PlaceStatus::Waiting(ticket_of(*id, *proof)),
                None if *proof > now_ms => PlaceStatus::Held,
                None => PlaceStatus::Gone,
            };
            match status {
                PlaceStatus::Held => {
                    self.put(*id, reply.lease_end, None);
                    // It started in an outage, and counts from now on.
                    if place.is_none() && *proof == NEVER_ENDS {
                        self.note_start(*id, caller.now);
                    }
                    if let (None, Some(claim), Some(fair)) =
                        (place, id.claim_in_line(), &mut self.lines)
                    {
                        fair.lines.touch_tenant(claim);
                    }
                }
                PlaceStatus::Waiting(ticket) => {
                    self.put(*id, reply.lease_end, Some(ticket));
                    // With its old ticket it can be the first of its line.
                    if let (None, Some(claim), Some(fair)) =
                        (place, id.claim_in_line(), &mut self.lines)
                    {
                        fair.lines.touch(claim);
                    }
                }
                _ if place.is_some() => self.take(id),
                _ => {}
            }
            reply.statuses.push(status);
        }
        self.settle(caller.now);
        self.rouse(caller.now);
        let most = caller.limit.into();
        reply.granted = self.promote(caller, most, budget, Silent::NOT_EXAMINED, post);
        self.close(caller, budget, &mut reply);
        reply
    }

    /// Lists the places of `node` among the `most` live ones with the earliest lease ends.
    #[must_use]
    pub fn audit(&self, now: u64, node: NodeId, most: usize) -> Vec<PlaceId> {
        let mut places: Vec<_> =
            self.places().filter(|(_, lease_end, _)| *lease_end > now / 1000).collect();
        places.sort_unstable_by_key(|(id, lease_end, _)| (*lease_end, *id));
        let own = places.into_iter().take(most).map(|(id, ..)| id);
        own.filter(|id| id.node == node).collect()
    }

    /// `budget`: what the sweep left of the bound on work.
    fn close(&mut self, caller: Caller, budget: usize, reply: &mut Reply) {
        let most = u64::from(caller.limit);
        let usage = Usage { in_use: self.in_use(), waiting: self.waiting() };
        reply.usage = Some(usage);
        if usage.waiting > 0 {
            reply.more = self.stopped_early(caller, most, budget);
            let opens_in = if reply.more { 0 } else { self.opens_in_ms(caller, most) };
            // A lease that ends before a line wakes may serve others.
            let ends_before = opens_in > 0
                && self.rouses_at().is_some()
                && self.earliest() < caller.now / 1000 + opens_in;
            if opens_in > 0 && !ends_before {
                reply.opens_in = opens_in;
            } else if !reply.more {
                reply.earliest = self.earliest();
            }
        }
    }

    fn earliest(&mut self) -> u64 {
        if self.places.is_empty() {
            return u64::MAX;
        }
        let index = self.by_end();
        let (mut earliest, mut next) = (u64::MAX, index.first());
        while let Some((leases, end, _)) = next {
            earliest = earliest.min(*end);
            let behind = Leases::ALL.into_iter().find(|other| other > leases);
            next = behind.and_then(|behind| index.range((behind, 0, PlaceId::FIRST)..).next());
        }
        earliest
    }

    fn by_end(&mut self) -> &BTreeSet<(Leases, u64, PlaceId)> {
        self.by_end.get_or_insert_with(|| {
            let entry = |(id, place): (&PlaceId, &Place)| (Leases::of(id), place.lease_end, *id);
            self.places.iter().map(entry).collect()
        })
    }

    fn put(&mut self, id: PlaceId, lease_end: u64, ticket: Option<u64>) {
        self.quiet_until = self.quiet_until.min(lease_end);
        let before = self.places.insert(id, Place { lease_end, ticket });
        match (id.claim, ticket) {
            (Some(claim), _) if claim.is_in_line() => self.fair().put(id, claim, before, ticket),
            (_, Some(ticket)) => _ = self.queue.insert((ticket, id)),
            (Some(_), None) if before.is_none() => self.beyond_one += beyond_one(&id),
            (_, None) => {}
        }
        if let Some(index) = &mut self.by_end
            && before.is_none_or(|before| before.lease_end != lease_end)
        {
            let leases = Leases::of(&id);
            if let Some(before) = before {
                index.remove(&(leases, before.lease_end, id));
            }
            index.insert((leases, lease_end, id));
        }
    }

    fn take(&mut self, id: &PlaceId) {
        let Some(place) = self.places.remove(id) else {
            // A caller of Redis does not learn which existed, so their tenants are settled in any case.
            if let (Some(fair), Some(claim)) = (&mut self.lines, id.claim_in_line()) {
                fair.lines.left(claim);
            }
            return;
        };
        match (id.claim, place.ticket) {
            (None, None) => {}
            (Some(claim), _) if claim.is_in_line() => self.fair().take(*id, claim, place),
            (_, Some(ticket)) => _ = self.queue.remove(&(ticket, *id)),
            (Some(_), None) => self.beyond_one -= beyond_one(id),
        }
        if let Some(index) = &mut self.by_end {
            index.remove(&(Leases::of(id), place.lease_end, *id));
            if index.is_empty() {
                self.by_end = None;
            }
        }
    }

    fn fair(&mut self) -> &mut FairPlaces {
        self.lines.get_or_insert_with(|| Box::new(FairPlaces::new()))
    }

    /// Settles the tenants whose places changed.
    #[inline]
    fn settle(&mut self, now: u64) {
        if self.lines.is_some() {
            self.settle_lines(now);
        }
    }

    fn settle_lines(&mut self, now: u64) {
        let Some(fair) = &mut self.lines else { return };
        fair.lines.settle(now, &OfPlaces);
        if fair.count == 0 {
            self.lines = None;
        }
    }
}

/// The permits that the place takes beyond one.
fn beyond_one(id: &PlaceId) -> u64 {
    u64::from(id.cost() - 1)
}

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

// Two ledgers are equal if their places, starts and budgets are: everything else is derived from them.

impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        self.places == other.places
            && self.starts_kept() == other.starts_kept()
            && self.budgets_kept() == other.budgets_kept()
    }
}

impl Eq for Ledger {}

impl Hash for Ledger {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut places: Vec<_> = self.places.iter().collect();
        places.sort_unstable_by_key(|(id, _)| **id);
        places.hash(state);
        self.starts_kept().hash(state);
        self.budgets_kept().hash(state);
    }
}
