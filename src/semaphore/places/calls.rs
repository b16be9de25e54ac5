//! What goes out.

use std::sync::Arc;

use tokio::time::Instant;

use super::{BATCH_MAX, NEVER_ENDS, Places, RECOUNT_MAX, State, Terms, find, slot_id};
use crate::backend::{Call, Op};
use crate::ledger::{Ids, PlaceId};

impl Places {
    /// Whether there is anything to send.
    pub(in crate::semaphore) fn has_mail(&self) -> bool {
        !self.releases.is_empty()
            || !self.reasserts.is_empty()
            || (self.renew && self.renewing == 0)
            || self.recount
            || (!self.joins.is_empty() && !self.resync)
    }

    /// What is to be sent, in this order: releases first, so that a process always reads its own.
    /// Where nothing stands between them, newcomers take the last of them along in their call.
    pub(in crate::semaphore) fn collect(&mut self, now: Instant, out: &mut Vec<Call>) {
        let before = out.len();
        self.collect_releases(now, out);
        self.collect_reasserts(now, out);
        if self.renew && self.renewing == 0 {
            self.collect_renewals(now, out);
        }
        if std::mem::take(&mut self.recount) {
            out.push(self.call(Op::Inspect { most: RECOUNT_MAX }, now));
        }
        self.end_resync();
        if !self.resync {
            let mut leaving = Ids::new();
            if !self.joins.is_empty()
                && let Some(Call { op: Op::Release { ids }, .. }) = out[before..].last_mut()
            {
                leaving = std::mem::take(ids);
                out.pop();
            }
            self.collect_joins(leaving, now, out);
        }
    }

    fn collect_releases(&mut self, now: Instant, out: &mut Vec<Call>) {
        let mut releases = std::mem::take(&mut self.releases);
        let mut ids = Ids::new();
        for (id, until) in releases.drain(..) {
            // What its lease has ended is gone by itself; one lease later, because a call that was
            // under way may have given it a new one.
            if now >= until + self.lease {
                continue;
            }
            self.releasing.push_back((id, until));
            ids.push(id);
            if ids.len() == BATCH_MAX {
                out.push(self.call(Op::Release { ids: std::mem::take(&mut ids) }, now));
            }
        }
        if !ids.is_empty() {
            out.push(self.call(Op::Release { ids }, now));
        }
        // Empty, but with its room.
        self.releases = releases;
    }

    fn collect_reasserts(&mut self, now: Instant, out: &mut Vec<Call>) {
        let mut groups: Vec<(u64, Vec<(PlaceId, u64)>)> = Vec::new();
        for n in std::mem::take(&mut self.reasserts) {
            let Some(slot) = find(&mut self.slots, n) else { continue };
            let proof = match &mut slot.state {
                State::Waiting { ticket: Some(ticket) } => *ticket,
                State::Held => slot.lease_end,
                State::Admitted { announced } => {
                    *announced = true;
                    NEVER_ENDS
                }
                _ => continue,
            };
            let item = (slot_id(self.node, slot), proof);
            group(&mut groups, slot.lease_ms()).push(item);
        }
        for (lease_ms, proofs) in groups {
            for chunk in proofs.chunks(BATCH_MAX) {
                self.renewing += 1;
                out.push(self.call(Op::Reassert { lease_ms, proofs: chunk.to_vec() }, now));
            }
        }
    }

    fn collect_renewals(&mut self, now: Instant, out: &mut Vec<Call>) {
        self.renew = false;
        let mut groups: Vec<(u64, Vec<PlaceId>)> = Vec::new();
        for (_, slot) in &mut self.slots {
            // Held places go along once half of their time to the next renewal is over: so all
            // places of a process come to be renewed by one call.
            let due = match slot.state {
                State::Waiting { .. } => true,
                State::Held => self.resync || slot.doubt || now >= slot.acked + slot.interval() / 2,
                _ => false,
            };
            if due {
                slot.doubt = false;
                group(&mut groups, slot.lease_ms()).push(slot_id(self.node, slot));
            }
        }
        for (lease_ms, ids) in groups {
            for chunk in ids.chunks(BATCH_MAX) {
                self.renewing += 1;
                out.push(self.call(Op::Renew { lease_ms, ids: chunk.into() }, now));
            }
        }
    }

    fn collect_joins(&mut self, mut leaving: Ids, now: Instant, out: &mut Vec<Call>) {
        // Of those that the last call is for.
        let mut common: Option<Terms> = None;
        while let Some(n) = self.joins.pop_front() {
            let Some(slot) = find(&mut self.slots, n) else { continue };
            let State::Joining { sent, .. } = &mut slot.state else { continue };
            *sent = true;
            let (terms, lease_ms, id) = (slot.terms, slot.lease_ms(), slot_id(self.node, slot));
            if common == Some(terms)
                && let Some(Call { op: Op::Acquire { ids, .. }, .. }) = out.last_mut()
                && ids.len() < BATCH_MAX
            {
                ids.push(id);
                continue;
            }
            common = Some(terms);
            let (max_queue, ids) = (terms.max_queue, Ids::from_elem(id, 1));
            let leaving = std::mem::take(&mut leaving);
            out.push(self.call(Op::Acquire { leaving, lease_ms, max_queue, ids }, now));
        }
        // Whoever was to come is gone again.
        if !leaving.is_empty() {
            out.push(self.call(Op::Release { ids: leaving }, now));
        }
    }

    fn call(&self, op: Op, now: Instant) -> Call {
        let limit = match self.quarantined_until() {
            Some(end) if now < end => 0,
            _ => self.limit_in_force(),
        };
        Call { key: Arc::clone(&self.key), node: self.node, limit, op }
    }
}

fn group<T>(groups: &mut Vec<(u64, Vec<T>)>, key: u64) -> &mut Vec<T> {
    let at = groups.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
        groups.push((key, Vec::new()));
        groups.len() - 1
    });
    &mut groups[at].1
}
