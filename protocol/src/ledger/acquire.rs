//! Newcomers: granted, queued or refused.

use smallvec::SmallVec;

use super::fair::next_in_line;
use super::promote::Silent;
use super::{Caller, Ledger, PlaceStatus, Post, Reply};
use crate::claim::Claim;
use crate::id::{NodeId, PlaceId};
use crate::lines::Full;

/// How many places, those with the latest lease ends, are examined for nodes to recall permits from.
const RECALL_MAX: usize = 128;

impl Ledger {
    /// Removes the leaving places, as [`release`](Self::release) does; then grants each newcomer a
    /// permit, lets it join the queue, or refuses it.
    ///
    /// `max_queue` says how many may wait; `None`: these ids may not. A known id keeps its place, and
    /// its lease is renewed, so a repetition is safe.
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
        self.begin(caller.now);
        self.settle(caller.now);
        self.rouse(caller.now);
        let mut reply =
            Reply { lease_end: (caller.now / 1000).saturating_add(lease_ms), ..Reply::default() };
        let mut budget = self.work_max;
        if self.all_fit(caller, leaving, ids) {
            if self.starts.is_some()
                && let Some(last) = ids.last()
            {
                let cost = ids.iter().map(|id| id.cost()).sum();
                self.make_room(*last, cost, caller.now);
            }
            for id in ids {
                self.put(*id, reply.lease_end, None);
                self.note_start(*id, caller.now);
                reply.statuses.push(PlaceStatus::Held);
            }
            self.settle(caller.now);
        } else {
            // It may be full: waiting places go first, then the newcomers.
            budget = self.sweep(caller.now);
            let most = self.most(caller, !leaving.is_empty());
            reply.granted = self.promote(caller, most, budget, Silent::NOT_EXAMINED, post);
            let is_first = self.waiting() == 0;
            let others = if caller.recalls && is_first && max_queue.is_some_and(|max| max > 0) {
                self.used_last(caller.node)
            } else {
                SmallVec::new()
            };
            self.join(caller, max_queue, ids, &mut reply);
            if self.waiting() > 0 {
                for node in others {
                    post(node, &[]);
                }
            }
        }
        self.close(caller, budget, &mut reply);
        reply
    }

    /// Takes the newcomers one by one.
    fn join(&mut self, caller: Caller, max_queue: Option<u32>, ids: &[PlaceId], reply: &mut Reply) {
        let mut last = self.queue.last().map_or(0, |(ticket, _)| *ticket);
        for id in ids {
            let known = self.places.get(id).map(|place| place.status());
            let status = known.unwrap_or_else(|| self.newcomer(caller, *id, max_queue, &mut last));
            match status {
                PlaceStatus::Held => {
                    self.put(*id, reply.lease_end, None);
                    if known.is_none() {
                        self.start(*id, caller.now);
                    }
                }
                PlaceStatus::Waiting(ticket) | PlaceStatus::WaitingFor(ticket, _) => {
                    let begins = known.is_none() && self.waiting_in_line_of(id) == 0;
                    let spot = if begins { self.spot_of_newcomer(*id, caller.now) } else { None };
                    let sleeps_until = self.tenants_budget_opening(*id, caller.now);
                    self.put(*id, reply.lease_end, Some(ticket));
                    if let (Some(spot), Some(claim)) = (spot, id.claim) {
                        self.fair().lines.park_new(claim, spot, caller.now);
                    } else if let (true, Some(until), Some(claim)) =
                        (begins, sleeps_until, id.claim)
                        && self.full_for(claim).is_none()
                    {
                        self.settle(caller.now);
                        self.fair().lines.sleep_new(claim, until);
                    }
                }
                _ => {}
            }
            self.settle(caller.now);
            reply.statuses.push(status);
        }
    }

    /// The other nodes among the examined places, the latest used first.
    fn used_last(&mut self, caller: NodeId) -> SmallVec<[NodeId; 4]> {
        let mut nodes = SmallVec::new();
        for (.., id) in self.by_end().iter().rev().take(RECALL_MAX) {
            if !id.poll_only && id.node != caller && !nodes.contains(&id.node) {
                nodes.push(id.node);
            }
        }
        nodes
    }

    /// Grants, queues or refuses an unknown place. `last`: the last ticket of the queue.
    fn newcomer(
        &self,
        caller: Caller,
        id: PlaceId,
        max_queue: Option<u32>,
        last: &mut u64,
    ) -> PlaceStatus {
        let (waiting, ticket) = match (id.line(), &self.lines) {
            (None, _) => (self.queue.len() as u64, caller.now.max(last.saturating_add(1))),
            (Some(_), None) => (0, next_in_line(caller.now, None)),
            (Some(line), Some(fair)) => {
                let ticket = next_in_line(caller.now, fair.lines.last_ticket(line));
                (fair.lines.waiting_in(line), ticket)
            }
        };
        let refused = self.refused(caller, id);
        if refused == PlaceStatus::NeverFits {
            return refused;
        }
        if waiting == 0 && refused == PlaceStatus::NoPermit && self.is_next(caller, id) {
            return PlaceStatus::Held;
        }
        match max_queue {
            None => refused,
            Some(max) if waiting >= u64::from(max) => PlaceStatus::QueueFull,
            // A line may take half of the room that is left, so a tenant without a place finds room.
            Some(_)
                if id.line().is_some()
                    && waiting + self.waiting() >= u64::from(caller.max_waiting) =>
            {
                PlaceStatus::QueueFull
            }
            Some(_) => {
                if id.line().is_none() {
                    *last = ticket;
                }
                match refused {
                    PlaceStatus::LimitFull(index) => PlaceStatus::WaitingFor(ticket, index),
                    _ => PlaceStatus::Waiting(ticket),
                }
            }
        }
    }

    /// How many wait in the line of this place, if it stands in one.
    fn waiting_in_line_of(&self, id: &PlaceId) -> u64 {
        let line = self.lines.as_ref().zip(id.line());
        line.map_or(0, |(fair, line)| fair.lines.waiting_in(line))
    }

    /// Why a place that may not wait is refused.
    fn refused(&self, caller: Caller, id: PlaceId) -> PlaceStatus {
        let Some(claim) = id.claim else { return PlaceStatus::NoPermit };
        let (cost, room) = (u64::from(claim.cost()), caller.room(claim.class()));
        // If there are no permits, it waits for an operator.
        let never = (room > 0 && cost > room) || claim.exceeds_a_cap() || !Self::can_start(id);
        match self.full_for(claim) {
            _ if never => PlaceStatus::NeverFits,
            Some(Full::Tenant) => PlaceStatus::TenantFull,
            Some(Full::Further(index)) => PlaceStatus::LimitFull(index),
            None if self.in_use() + cost <= room && !self.may_start(id, caller.now) => {
                match self.opens_in(id, caller.now) {
                    (None, ms) => PlaceStatus::NoStart(ms),
                    (Some(budget), ms) => PlaceStatus::NoBudget(budget, ms),
                }
            }
            None => PlaceStatus::NoPermit,
        }
    }

    /// The first limit of a claim that is full, besides that of the semaphore.
    fn full_for(&self, claim: Claim) -> Option<Full> {
        let lines = &self.lines.as_ref()?.lines;
        lines.full(claim)
    }
}
