//! The protocol as a pure state machine: no I/O, no clock, no randomness.
//!
//! A [`Ledger`] is one semaphore. Operations go in, with the time as an argument; a [`Reply`] comes
//! out, and hints for other nodes go through a closure. [`MemoryBackend`] is this ledger behind a
//! lock, and the scripts in `lua/` are this ledger in the words of Redis: generated histories hold
//! the two against each other, reply by reply.
//!
//! # The one idea
//!
//! *A place has one lease, from joining to leaving, whether it waits or holds.* A place that waits
//! has a ticket besides; taking the ticket away **is** the grant. Nothing else is stored: no
//! counter that could drift, nothing to initialise, nothing left when the last place is gone.
//!
//! Every operation that changes anything ends in the same way: sweep what has expired, then
//! promote, so that no permit is idle while anyone waits. While anyone waits nobody barges: a
//! newcomer joins the queue or is refused.
//!
//! [`MemoryBackend`]: crate::backend::MemoryBackend

use std::collections::{BTreeSet, HashMap};
use std::hash::{Hash, Hasher};

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::id::{NodeId, PlaceId};

/// Scores from here on are tickets (µs since 1970, about 10¹⁵); those below are lease ends (ms,
/// about 10¹²).
pub const TICKET_MIN: u64 = 100_000_000_000_000;

/// The bound on the work of one operation. A place that is swept costs 1, and so does a head of the
/// queue that is granted or passed over; a hint to another node costs [`HINT_WORK`] more. The places
/// that the operation names are not counted.
pub const WORK_MAX: usize = 500;

/// The cost of one hint to another node, out of [`WORK_MAX`].
pub const HINT_WORK: usize = 4;

/// What the ledger says of one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceStatus {
    /// It is not there, or not any more.
    Gone,
    /// It has a permit.
    Held,
    /// It waits, and this is its ticket.
    Waiting(u64),
    /// It was refused: no permit is free, and it may not wait.
    NoPermit,
    /// It was refused: as many wait as may.
    QueueFull,
}

/// A place that was promoted, with the lease end that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The place.
    pub id: PlaceId,
    /// The end of its lease, ms by the ledger's clock.
    pub lease_end: u64,
}

/// What an operation answers; a release tells its grants alone. Redis leaves the counts out, too, where
/// permits are free and nobody needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reply {
    /// The lease end that the operation gave, ms; 0 where it gives none.
    pub lease_end: u64,
    /// The earliest lease end among all places, ms, while anyone waits; else 0, and 0 if `more`.
    /// Asking again just after it replaces a dead holder without delay.
    pub earliest: u64,
    /// How many places hold, after the operation.
    pub in_use: u64,
    /// How many places wait, after the operation.
    pub waiting: u64,
    /// One for each id of the operation, in its order; as they stood *before* the grants below,
    /// but for `acquire`.
    pub statuses: SmallVec<[PlaceStatus; 1]>,
    /// Places of the calling node that this operation granted. Other nodes get a hint.
    pub granted: Vec<Grant>,
    /// The places of the calling node that an audit found.
    pub found: Vec<PlaceId>,
    /// The bound on work was reached while permits were free and places waited: call again. A
    /// [`release`](Ledger::release) of no ids is enough.
    pub more: bool,
}

/// What every operation brings along: who asks, when, and under which limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    /// µs since 1970 by the ledger's one clock.
    pub now: u64,
    /// Permits of this semaphore, as the caller knows it.
    pub limit: u32,
    /// The calling node.
    pub node: NodeId,
}

/// Delivers hints to a node; `false` says that nobody listens there, so that the node is gone.
pub type Post<'a> = &'a mut dyn FnMut(NodeId, &[Grant]) -> bool;

/// One semaphore: its places, held and waiting.
#[derive(Clone, Debug)]
pub struct Ledger {
    places: HashMap<PlaceId, Place, RandomState>,
    queue: BTreeSet<(u64, PlaceId)>,
    /// The places by lease end. Kept only from the first place that waits until the last is gone:
    /// a semaphore that is never full does not pay for it.
    by_end: Option<BTreeSet<(u64, PlaceId)>>,
    /// No lease ends before this, ms: until then there is nothing to sweep.
    quiet_until: u64,
    work_max: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Place {
    lease_end: u64,
    ticket: Option<u64>,
}

impl Ledger {
    /// A semaphore that nobody has.
    #[must_use]
    pub fn new() -> Self {
        Self::with_work_max(WORK_MAX)
    }

    /// As [`new`](Self::new), with another bound than [`WORK_MAX`], at least 1. For tests: a small bound
    /// is reached by short histories.
    #[must_use]
    pub fn with_work_max(work_max: usize) -> Self {
        Self {
            places: HashMap::default(),
            queue: BTreeSet::new(),
            by_end: None,
            quiet_until: 0,
            work_max: work_max.max(1),
        }
    }

    /// Whether no place is left: then there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// How many places hold, dead ones among them until they are swept.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        (self.places.len() - self.queue.len()) as u64
    }

    /// How many places wait, dead ones among them until they are swept.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.queue.len() as u64
    }

    /// The places and what they have: id, lease end (ms), ticket while it waits. In no order.
    pub fn places(&self) -> impl Iterator<Item = (PlaceId, u64, Option<u64>)> + '_ {
        self.places.iter().map(|(id, place)| (*id, place.lease_end, place.ticket))
    }

    /// Takes out those that are leaving, as [`release`](Self::release) does; then grants each place a
    /// permit, lets it join the queue, or refuses it.
    ///
    /// `max_queue` says how many may wait; `None`: these ids may not. An id that is there keeps its
    /// place and its lease is renewed, so a repetition is safe.
    pub fn acquire(
        &mut self,
        caller: Caller,
        lease_ms: u64,
        max_queue: Option<u32>,
        leaving: &[PlaceId],
        ids: &[PlaceId],
        post: Post<'_>,
    ) -> Reply {
        for id in leaving {
            self.take(id);
        }
        let mut reply =
            Reply { lease_end: (caller.now / 1000).saturating_add(lease_ms), ..Reply::default() };
        if self.queue.is_empty() && self.in_use() + ids.len() as u64 <= u64::from(caller.limit) {
            for id in ids {
                self.put(*id, reply.lease_end, None);
                reply.statuses.push(PlaceStatus::Held);
            }
        } else {
            // Full, or so it looks: waiting places go first, and only then the newcomers.
            let budget = self.sweep(caller.now);
            reply.granted = self.promote(caller, budget, post);
            let mut last = self.queue.last().map_or(0, |(ticket, _)| *ticket);
            for id in ids {
                let status = if let Some(place) = self.places.get(id) {
                    place.ticket.map_or(PlaceStatus::Held, PlaceStatus::Waiting)
                } else if self.queue.is_empty() && self.in_use() < u64::from(caller.limit) {
                    PlaceStatus::Held
                } else {
                    match max_queue {
                        None => PlaceStatus::NoPermit,
                        Some(max) if self.waiting() >= u64::from(max) => PlaceStatus::QueueFull,
                        Some(_) => {
                            last = caller.now.max(last + 1);
                            PlaceStatus::Waiting(last)
                        }
                    }
                };
                match status {
                    PlaceStatus::Held => self.put(*id, reply.lease_end, None),
                    PlaceStatus::Waiting(ticket) => self.put(*id, reply.lease_end, Some(ticket)),
                    _ => {}
                }
                reply.statuses.push(status);
            }
        }
        self.close(caller, reply)
    }

    /// Takes places out, waiting or held, and hands what that frees to the head of the queue.
    ///
    /// An id that is not there is passed over, so a repetition is safe. With no ids it sweeps and
    /// promotes: that is the call to make after a reply with [`more`](Reply::more).
    pub fn release(&mut self, caller: Caller, ids: &[PlaceId], post: Post<'_>) -> Reply {
        for id in ids {
            self.take(id);
        }
        let mut granted = Vec::new();
        if !self.queue.is_empty() {
            let budget = self.sweep(caller.now);
            granted = self.promote(caller, budget, post);
        }
        Reply { granted, more: self.stopped_early(caller), ..Reply::default() }
    }

    /// Takes a place out, waiting or held, on an operator's word; or only looks. Says when its lease
    /// ends, or would have, ms. Who does that does not know the limit: what it frees is granted when
    /// someone asks who does.
    pub fn revoke(&mut self, id: PlaceId, take: bool) -> Option<u64> {
        let lease_end = self.places.get(&id)?.lease_end;
        if take {
            self.take(&id);
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
        // First the dead, then the leases: a place that ended is not brought back by asking late.
        let budget = self.sweep(caller.now);
        for id in ids {
            let status = match self.places.get(id).copied() {
                None => PlaceStatus::Gone,
                Some(place) => {
                    self.put(*id, reply.lease_end, place.ticket);
                    place.ticket.map_or(PlaceStatus::Held, PlaceStatus::Waiting)
                }
            };
            reply.statuses.push(status);
        }
        reply.granted = self.promote(caller, budget, post);
        self.close(caller, reply)
    }

    /// A renewal with proof, for places that a renewal found gone.
    ///
    /// The score that a place had last is the proof: a lease end that has not come yet shows that
    /// the ledger lost a permit which is in flight, so it is counted again, even past the limit; a
    /// ticket gives a place that waited its old turn, under a new id.
    pub fn reassert(
        &mut self,
        caller: Caller,
        lease_ms: u64,
        proofs: &[(PlaceId, u64)],
        post: Post<'_>,
    ) -> Reply {
        let now_ms = caller.now / 1000;
        let mut reply = Reply { lease_end: now_ms.saturating_add(lease_ms), ..Reply::default() };
        let budget = self.sweep(caller.now);
        // As the script does, look at all of them before any is written.
        let known: Vec<_> = proofs.iter().map(|(id, _)| self.places.get(id).copied()).collect();
        for ((id, proof), place) in proofs.iter().zip(known) {
            let status = match place {
                Some(place) => place.ticket.map_or(PlaceStatus::Held, PlaceStatus::Waiting),
                None if *proof >= TICKET_MIN => PlaceStatus::Waiting(*proof),
                None if *proof > now_ms => PlaceStatus::Held,
                None => PlaceStatus::Gone,
            };
            match status {
                PlaceStatus::Held => self.put(*id, reply.lease_end, None),
                PlaceStatus::Waiting(ticket) => self.put(*id, reply.lease_end, Some(ticket)),
                _ => {}
            }
            reply.statuses.push(status);
        }
        reply.granted = self.promote(caller, budget, post);
        self.close(caller, reply)
    }

    /// Lists the places of `node`, among those `most` with the earliest lease ends that run still.
    #[must_use]
    pub fn audit(&self, now: u64, node: NodeId, most: usize) -> Vec<PlaceId> {
        let mut places: Vec<_> =
            self.places().filter(|(_, lease_end, _)| *lease_end > now / 1000).collect();
        places.sort_unstable_by_key(|(id, lease_end, _)| (*lease_end, *id));
        let own = places.into_iter().take(most).map(|(id, ..)| id);
        own.filter(|id| id.node == node).collect()
    }

    /// Takes out places whose lease has ended, the longest dead first, up to the bound on work. Returns
    /// what is left of that: if anything is, no dead place is left.
    fn sweep(&mut self, now: u64) -> usize {
        let now_ms = now / 1000;
        let work_max = self.work_max;
        if now_ms < self.quiet_until {
            return work_max;
        }
        let ended = self.by_end().iter().take_while(|(end, _)| *end <= now_ms);
        let dead: Vec<_> = ended.take(work_max).copied().collect();
        for (_, id) in &dead {
            self.take(id);
        }
        self.quiet_until = self.earliest();
        work_max - dead.len()
    }

    /// While permits are free, takes the ticket of the head of the queue away: that is the grant. Stops
    /// when the budget is spent; a last hint may cost more than is left of it.
    fn promote(&mut self, caller: Caller, mut budget: usize, post: Post<'_>) -> Vec<Grant> {
        let limit = u64::from(caller.limit);
        let mut own = Vec::new();
        let mut absent = Vec::new();
        while !self.queue.is_empty() && self.in_use() < limit && budget > 0 {
            let mut mail: Vec<(NodeId, Vec<Grant>)> = Vec::new();
            while self.in_use() < limit && budget > 0 {
                let Some((_, id)) = self.queue.pop_first() else { break };
                budget -= 1;
                let Some(place) = self.places.get_mut(&id) else { continue };
                place.ticket = None;
                let grant = Grant { id, lease_end: place.lease_end };
                if id.node == caller.node {
                    own.push(grant);
                } else if !id.poll_only {
                    if absent.contains(&id.node) {
                        self.take(&id);
                        continue;
                    }
                    match mail.iter_mut().find(|(node, _)| *node == id.node) {
                        Some((_, grants)) => grants.push(grant),
                        None => {
                            mail.push((id.node, vec![grant]));
                            budget = budget.saturating_sub(HINT_WORK);
                        }
                    }
                }
            }
            for (node, grants) in mail {
                if !post(node, &grants) {
                    absent.push(node);
                    for grant in grants {
                        self.take(&grant.id);
                    }
                }
            }
        }
        own
    }

    /// Whether promotion stopped at the bound on work.
    fn stopped_early(&self, caller: Caller) -> bool {
        !self.queue.is_empty() && self.in_use() < u64::from(caller.limit)
    }

    fn close(&mut self, caller: Caller, mut reply: Reply) -> Reply {
        reply.in_use = self.in_use();
        reply.waiting = self.waiting();
        reply.more = self.stopped_early(caller);
        if reply.waiting > 0 && !reply.more {
            reply.earliest = self.earliest();
        }
        reply
    }

    fn earliest(&mut self) -> u64 {
        if self.places.is_empty() {
            return u64::MAX;
        }
        self.by_end().first().map_or(u64::MAX, |(end, _)| *end)
    }

    fn by_end(&mut self) -> &BTreeSet<(u64, PlaceId)> {
        self.by_end.get_or_insert_with(|| {
            self.places.iter().map(|(id, place)| (place.lease_end, *id)).collect()
        })
    }

    fn put(&mut self, id: PlaceId, lease_end: u64, ticket: Option<u64>) {
        self.quiet_until = self.quiet_until.min(lease_end);
        let before = self.places.insert(id, Place { lease_end, ticket });
        if let Some(ticket) = ticket {
            self.queue.insert((ticket, id));
        }
        if let Some(index) = &mut self.by_end {
            if let Some(before) = before {
                index.remove(&(before.lease_end, id));
            }
            index.insert((lease_end, id));
        }
    }

    fn take(&mut self, id: &PlaceId) {
        let Some(place) = self.places.remove(id) else { return };
        if let Some(ticket) = place.ticket {
            self.queue.remove(&(ticket, *id));
        }
        if let Some(index) = &mut self.by_end {
            index.remove(&(place.lease_end, *id));
            if index.is_empty() {
                self.by_end = None;
            }
        }
    }
}

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

// A ledger is its places: what is derived from them takes no part in comparing two.

impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        self.places == other.places
    }
}

impl Eq for Ledger {}

impl Hash for Ledger {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut places: Vec<_> = self.places.iter().collect();
        places.sort_unstable_by_key(|(id, _)| **id);
        places.hash(state);
    }
}
