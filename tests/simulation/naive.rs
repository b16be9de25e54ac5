//! A ledger with tenants in the plainest terms, for planted faults: each is one rule undone.

use std::collections::{BTreeMap, BTreeSet};

use tower_semaphore_protocol::{
    Caller, Claim, Grant, NodeId, PlaceId, PlaceStatus, Reply, TICKET_MIN, Tenant, Usage,
};

use crate::fair::Stored;
use crate::plan::Planted;

type Post<'a> = &'a mut dyn FnMut(NodeId, &[Grant]) -> bool;

/// One semaphore.
#[derive(Clone, Debug)]
pub struct Naive {
    bug: Planted,
    places: BTreeMap<PlaceId, Place>,
    units: BTreeMap<Option<Tenant>, u64>,
    in_use: u64,
    turns: BTreeMap<Option<Tenant>, Turn>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    end: u64,
    ticket: Option<u64>,
    came: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    stopped: bool,
    class: u8,
    level: u64,
    since: u64,
}

fn tenant_of(id: PlaceId) -> Option<Tenant> {
    id.tenant()
}

fn room(caller: Caller, id: PlaceId) -> u64 {
    let for_all = caller.for_all.then_some(caller.limit);
    crate::fair::room(id, for_all, (caller.limit, caller.headroom))
}

impl Naive {
    /// Creates an empty semaphore without one of the rules.
    #[must_use]
    pub const fn new(bug: Planted) -> Self {
        Self {
            bug,
            places: BTreeMap::new(),
            units: BTreeMap::new(),
            in_use: 0,
            turns: BTreeMap::new(),
        }
    }

    /// As the ledger.
    #[must_use]
    pub const fn in_use(&self) -> u64 {
        self.in_use
    }

    /// As the ledger.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.places.values().filter(|place| place.ticket.is_some()).count() as u64
    }

    /// As the ledger.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// As the ledger.
    pub fn places(&self) -> impl Iterator<Item = Stored> + '_ {
        self.places.iter().map(|(id, place)| (*id, place.end, place.ticket))
    }

    fn units_of(&self, tenant: Option<Tenant>) -> u64 {
        self.units.get(&tenant).copied().unwrap_or(0)
    }

    fn line(&self, tenant: Option<Tenant>) -> impl Iterator<Item = (u64, PlaceId)> + '_ {
        let in_line = self.places.iter().filter(move |(id, _)| tenant_of(**id) == tenant);
        in_line.filter_map(|(id, place)| Some((place.ticket?, *id)))
    }

    fn passes_each(&self, id: PlaceId) -> bool {
        let Some(claim) = id.claim else { return false };
        let units = self.units_of(tenant_of(id)) + u64::from(claim.cost());
        self.bug != Planted::IgnoresEach && claim.each().is_some_and(|each| units > u64::from(each))
    }

    fn turn_of(&self, id: PlaceId, since: u64) -> Turn {
        let (tenant, units) = (tenant_of(id), self.units_of(tenant_of(id)));
        let stopped = self.passes_each(id) && self.bug != Planted::WaitsForStopped;
        let (class, weight) = id.claim.map_or((0, 1), |claim| (claim.class(), claim.weight()));
        let counted = match self.bug {
            Planted::LevelByWaiting => self.line(tenant).count() as u64,
            _ => units,
        };
        match self.bug {
            Planted::FirstComeAmongTenants => Turn { stopped, class: 0, level: 0, since },
            _ => Turn { stopped, class, level: 64 * counted / u64::from(weight), since },
        }
    }

    fn settle(&mut self, tenant: Option<Tenant>, now: u64) {
        let Some((ticket, head)) = self.line(tenant).min() else {
            self.turns.remove(&tenant);
            return;
        };
        let before = self.turns.get(&tenant).copied();
        if before.is_some() && self.bug == Planted::SettlesNothing {
            return;
        }
        let mut turn = self.turn_of(head, now);
        let is_same = |before: &Turn| {
            (before.stopped, before.class, before.level) == (turn.stopped, turn.class, turn.level)
        };
        if let Some(before) = before.filter(is_same).filter(|_| self.bug != Planted::StampsAnew) {
            turn.since = before.since;
        }
        if tenant.is_none() {
            turn.since = ticket;
        }
        if self.bug == Planted::FirstComeAmongTenants {
            turn.since = self.places.get(&head).map_or(now, |place| place.came);
        }
        self.turns.insert(tenant, turn);
    }

    fn hold(&mut self, id: PlaceId) {
        *self.units.entry(tenant_of(id)).or_default() += u64::from(id.cost());
        self.in_use += u64::from(id.cost());
    }

    fn take(&mut self, id: PlaceId) -> Option<Option<Tenant>> {
        let place = self.places.remove(&id)?;
        if place.ticket.is_none() {
            let cost = match self.bug {
                Planted::ForgetsShares => 1,
                _ => u64::from(id.cost()),
            };
            let units = self.units.entry(tenant_of(id)).or_default();
            *units = units.saturating_sub(cost);
            self.in_use = self.in_use.saturating_sub(cost);
        }
        if self.places.is_empty() {
            (self.units, self.turns, self.in_use) = (BTreeMap::new(), BTreeMap::new(), 0);
        }
        Some(tenant_of(id))
    }

    fn take_all(&mut self, ids: &[PlaceId], now: u64) {
        let touched: BTreeSet<_> = ids.iter().filter_map(|id| self.take(*id)).collect();
        touched.into_iter().for_each(|tenant| self.settle(tenant, now));
    }

    fn sweep(&mut self, now: u64) {
        let dead = self.places.iter().filter(|(_, place)| place.end <= now / 1000);
        let dead: Vec<_> = dead.map(|(id, _)| *id).collect();
        if self.bug == Planted::SweepSettlesNobody {
            dead.into_iter().for_each(|id| {
                self.take(id);
            });
        } else {
            self.take_all(&dead, now);
        }
    }

    /// Returns the line whose turn it is, and its head.
    fn next(&mut self) -> Option<(Option<Tenant>, PlaceId)> {
        loop {
            let turns = self.turns.iter().filter(|(_, turn)| !turn.stopped);
            let (_, tenant) = turns.map(|(tenant, turn)| (*turn, *tenant)).min()?;
            match self.line(tenant).min() {
                Some((_, head)) => return Some((tenant, head)),
                None => self.turns.remove(&tenant),
            };
        }
    }

    fn promote(&mut self, caller: Caller, post: Post<'_>) -> Vec<Grant> {
        let mut own = Vec::new();
        while let Some((mut tenant, mut id)) = self.next() {
            let (cost, mut most) = (u64::from(id.cost()), room(caller, id));
            if most == 0 || self.passes_each(id) {
                break;
            }
            if cost > most {
                if self.bug != Planted::LoopsAtNeverFitting
                    && let Some(turn) = self.turns.get_mut(&tenant)
                {
                    turn.stopped = true;
                }
                continue;
            }
            if self.bug == Planted::GrantsPastLimit && self.in_use < most {
                most += cost;
            }
            if self.in_use + cost > most {
                let fits = |id: PlaceId| {
                    self.in_use + u64::from(id.cost()) <= room(caller, id) && !self.passes_each(id)
                };
                let heads = self.turns.keys().filter_map(|of| Some((*of, self.line(*of).min()?.1)));
                let small = heads.into_iter().find(|(_, id)| fits(*id));
                match small.filter(|_| self.bug == Planted::SmallPassesBig) {
                    Some(small) => (tenant, id) = small,
                    None => break,
                }
            }
            let Some(place) = self.places.get_mut(&id) else { break };
            place.ticket = None;
            let lease_end = place.end;
            self.hold(id);
            if self.bug == Planted::ShareNotWritten {
                let units = self.units.entry(tenant).or_default();
                *units -= u64::from(id.cost());
            }
            let is_last = self.line(tenant).next().is_none();
            if self.bug != Planted::GrantKeepsLevel || is_last {
                self.settle(tenant, caller.now);
            }
            let grant = Grant { id, lease_end };
            if id.node == caller.node {
                own.push(grant);
            } else if !id.poll_only && !post(id.node, &[grant]) {
                self.take_all(&[id], caller.now);
            }
        }
        own
    }

    /// As the ledger.
    pub fn acquire(
        &mut self,
        caller: Caller,
        lease_ms: u64,
        max_queue: Option<u32>,
        leaving: &[PlaceId],
        ids: &[PlaceId],
        post: Post<'_>,
    ) -> Reply {
        let (now, end) = (caller.now, caller.now / 1000 + lease_ms);
        self.take_all(leaving, now);
        self.sweep(now);
        let mut reply = Reply { lease_end: end, ..Reply::default() };
        reply.granted = self.promote(caller, post);
        for id in ids {
            let status = match self.places.get_mut(id) {
                Some(place) => {
                    place.end = end;
                    place.ticket.map_or(PlaceStatus::Held, PlaceStatus::Waiting)
                }
                None => self.newcomer(caller, *id, max_queue, end),
            };
            reply.statuses.push(status);
        }
        self.close(reply)
    }

    fn newcomer(
        &mut self,
        caller: Caller,
        id: PlaceId,
        max_queue: Option<u32>,
        end: u64,
    ) -> PlaceStatus {
        let (tenant, now) = (tenant_of(id), caller.now);
        let (cost, most) = (u64::from(id.cost()), room(caller, id));
        let is_over = |claim: Claim| claim.each().is_some_and(|each| claim.cost() > each);
        if (most > 0 && cost > most) || id.claim.is_some_and(is_over) {
            return PlaceStatus::NeverFits;
        }
        let own = self.turn_of(id, now);
        let waiting = self.line(tenant).count() as u64;
        let is_first = self
            .turns
            .iter()
            .filter(|(_, turn)| !turn.stopped)
            .all(|(of, turn)| (own, tenant) < (*turn, *of));
        let may = (waiting == 0 && is_first) || self.bug == Planted::NewcomerPassesTurn;
        let last = self.line(tenant).max().map(|(ticket, _)| ticket);
        let mut put = |ticket| self.places.insert(id, Place { end, ticket, came: now });
        let passes_each = |units: u64, claim: Claim| {
            claim.each().is_some_and(|each| units + u64::from(claim.cost()) > u64::from(each))
        };
        let units = self.units.get(&tenant).copied().unwrap_or(0);
        let is_stopped = self.bug != Planted::IgnoresEach
            && id.claim.is_some_and(|claim| passes_each(units, claim));
        if may && !is_stopped && self.in_use + cost <= most {
            put(None);
            self.hold(id);
            self.settle(tenant, now);
            return PlaceStatus::Held;
        }
        match max_queue {
            None if is_stopped => PlaceStatus::TenantFull,
            None => PlaceStatus::NoPermit,
            Some(max) if waiting >= u64::from(max) => PlaceStatus::QueueFull,
            Some(_) => {
                let ticket = match tenant {
                    None => now.max(last.unwrap_or(0) + 1),
                    Some(_) => last.unwrap_or(TICKET_MIN) + 1,
                };
                put(Some(ticket));
                self.settle(tenant, now);
                PlaceStatus::Waiting(ticket)
            }
        }
    }

    /// As the ledger.
    pub fn release(&mut self, caller: Caller, ids: &[PlaceId], post: Post<'_>) -> Reply {
        self.take_all(ids, caller.now);
        self.sweep(caller.now);
        Reply { granted: self.promote(caller, post), ..Reply::default() }
    }

    /// As the ledger.
    pub fn revoke(&mut self, id: PlaceId, take: bool, now: u64) -> Option<u64> {
        let end = self.places.get(&id)?.end;
        if take {
            self.take_all(&[id], now);
        }
        Some(end)
    }

    /// As the ledger.
    pub fn renew(
        &mut self,
        caller: Caller,
        lease_ms: u64,
        ids: &[PlaceId],
        post: Post<'_>,
    ) -> Reply {
        let proofs: Vec<_> = ids.iter().map(|id| (*id, 0)).collect();
        self.reassert(caller, lease_ms, &proofs, post)
    }

    /// As the ledger.
    pub fn reassert(
        &mut self,
        caller: Caller,
        lease_ms: u64,
        proofs: &[(PlaceId, u64)],
        post: Post<'_>,
    ) -> Reply {
        let (now, end) = (caller.now, caller.now / 1000 + lease_ms);
        let mut reply = Reply { lease_end: end, ..Reply::default() };
        self.sweep(now);
        for (id, proof) in proofs {
            let status = match self.places.get_mut(id) {
                Some(place) => {
                    place.end = end;
                    place.ticket.map_or(PlaceStatus::Held, PlaceStatus::Waiting)
                }
                None if *proof >= TICKET_MIN => PlaceStatus::Waiting(*proof),
                None if *proof > now / 1000 => PlaceStatus::Held,
                None => PlaceStatus::Gone,
            };
            let is_new = !self.places.contains_key(id);
            if let (true, PlaceStatus::Held | PlaceStatus::Waiting(_)) = (is_new, status) {
                let ticket = match status {
                    PlaceStatus::Waiting(ticket) => Some(ticket),
                    _ => None,
                };
                self.places.insert(*id, Place { end, ticket, came: now });
                if ticket.is_none() {
                    self.hold(*id);
                }
            }
            reply.statuses.push(status);
        }
        let touched: BTreeSet<_> = proofs.iter().map(|(id, _)| tenant_of(*id)).collect();
        touched.into_iter().for_each(|tenant| self.settle(tenant, now));
        reply.granted = self.promote(caller, post);
        self.close(reply)
    }

    /// As the ledger.
    #[must_use]
    pub fn audit(&self, now: u64, node: NodeId, most: usize) -> Vec<PlaceId> {
        let living = self.places.iter().filter(|(_, place)| place.end > now / 1000);
        let own = living.map(|(id, _)| *id).filter(|id| id.node == node);
        own.take(most).collect()
    }

    fn close(&self, mut reply: Reply) -> Reply {
        let usage = Usage { in_use: self.in_use, waiting: self.waiting() };
        reply.usage = Some(usage);
        if usage.waiting > 0 {
            reply.earliest = self.places.values().map(|place| place.end).min().unwrap_or(0);
        }
        reply
    }
}
