//! A process: its replica, and as much of a session as it needs.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tower_semaphore_protocol::replica::{Answer, Ended, Event, Replica, Transaction};
use tower_semaphore_protocol::{
    Call, Claim, Ids, NodeId, Op, PlaceId, PlaceStatus, Reply, Tenant, Time,
};

use super::store::{Outcome, Request, Store};
use super::{Fault, LEASES_MS, SHORT_S};

/// How far a place of the process has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Joining,
    Waiting,
    Held,
    /// It is to be released; `true`: a call says so.
    Leaving(bool),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Mine {
    pub(crate) id: PlaceId,
    pub(crate) state: State,
    lease_ms: u64,
    may_wait: bool,
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) node: NodeId,
    pub(crate) replica: Replica,
    pub(crate) is_alive: bool,
    pub(crate) mine: Vec<Mine>,
    pub(crate) pending: BTreeMap<u64, Call>,
    /// A transaction, and what became of it if the store has come to it.
    pub(crate) request: Option<(Request, Option<Outcome>)>,
    /// What the watch has not delivered yet.
    pub(crate) watch: VecDeque<(u64, Option<Vec<u8>>)>,
    /// Signs of life that ended, and those that came back.
    pub(crate) life: VecDeque<(Ended, bool)>,
    /// By how much its clock is off, µs.
    pub(crate) skew: i64,
    next: u64,
    next_call: u64,
    pub(crate) limit: u32,
    fault: Fault,
    /// With [`Fault::GoesBack`]: the revisions of the store, by those that the replica is told.
    revisions: Vec<u64>,
    pub(crate) freed: usize,
    pub(crate) granted: usize,
    pub(crate) recalled: usize,
}

impl Process {
    pub(crate) fn new(node: NodeId, limit: u32, fault: Fault) -> Self {
        Self {
            node,
            replica: Replica::new(node, Duration::from_secs(SHORT_S.into())),
            is_alive: true,
            mine: Vec::new(),
            pending: BTreeMap::new(),
            request: None,
            watch: VecDeque::new(),
            life: VecDeque::new(),
            skew: 0,
            next: 0,
            next_call: 0,
            limit,
            fault,
            revisions: vec![0],
            freed: 0,
            granted: 0,
            recalled: 0,
        }
    }

    fn call(&mut self, op: Op) {
        self.next_call += 1;
        let call = Call { limit: self.limit, max_waiting: u32::MAX, recalls: true, ..Call::of(op) };
        self.pending.insert(self.next_call, call.clone());
        self.replica.handle_call(self.next_call, call);
    }

    /// Makes newcomers; `leaving`: releases these of its places with the same call.
    pub(crate) fn acquire(
        &mut self,
        count: usize,
        may_wait: bool,
        is_short: bool,
        tenant: Option<u64>,
        leaving: &[usize],
    ) {
        let lease_ms = LEASES_MS[usize::from(!is_short)];
        let leaving = self.leave(leaving);
        let claim = tenant.map(|tenant| Claim::new(Tenant::of_hash(tenant * 4_194_301)));
        let mut ids = Ids::new();
        for _ in 0..count {
            self.next += 1;
            let id =
                PlaceId { node: self.node, poll_only: false, n: self.next, bound: None, claim };
            ids.push(id);
            self.mine.push(Mine { id, state: State::Joining, lease_ms, may_wait });
        }
        let max_queue = may_wait.then_some(1000);
        self.call(Op::Acquire { leaving, lease_ms, max_queue, ids });
    }

    fn leave(&mut self, picks: &[usize]) -> Vec<PlaceId> {
        let mut ids = Vec::new();
        for pick in picks {
            let there: Vec<_> =
                self.mine.iter_mut().filter(|mine| mine.state != State::Leaving(true)).collect();
            let count = there.len();
            if let Some(mine) = there.into_iter().nth(pick % count.max(1)) {
                mine.state = State::Leaving(true);
                ids.push(mine.id);
            }
        }
        ids
    }

    pub(crate) fn release(&mut self, picks: &[usize]) {
        let ids = self.leave(picks);
        if self.fault == Fault::PassesOn
            && !ids.is_empty()
            && let Some(next) = self.mine.iter_mut().find(|mine| mine.state == State::Waiting)
        {
            next.state = State::Held;
        }
        self.call(Op::Release { ids: ids.into() });
    }

    /// Releases all that has no answer yet.
    pub(crate) fn give_up(&mut self) {
        for mine in self.mine.iter_mut().filter(|mine| mine.state == State::Joining) {
            mine.state = State::Leaving(false);
        }
        self.release_due(false);
    }

    /// Releases what is to leave, and was not said so yet; with `all`, whatever holds, too.
    pub(crate) fn release_due(&mut self, all: bool) {
        let is_due = |mine: &&mut Mine| {
            mine.state == State::Leaving(false) || all && mine.state == State::Held
        };
        let mut ids = Ids::new();
        for mine in self.mine.iter_mut().filter(is_due) {
            mine.state = State::Leaving(true);
            ids.push(mine.id);
        }
        if !ids.is_empty() {
            self.call(Op::Release { ids });
        }
    }

    pub(crate) fn renew(&mut self) {
        for lease_ms in LEASES_MS {
            let is_there = |mine: &&Mine| {
                mine.lease_ms == lease_ms && matches!(mine.state, State::Waiting | State::Held)
            };
            let ids: Ids = self.mine.iter().filter(is_there).map(|mine| mine.id).collect();
            if !ids.is_empty() {
                self.call(Op::Renew { lease_ms, ids });
            }
        }
    }

    pub(crate) fn audit(&mut self) {
        self.call(Op::Audit { most: 1000 });
    }

    /// The connection breaks: calls that are not answered are made again, releases first.
    pub(crate) fn reconnect(&mut self) {
        self.replica.handle_dropped();
        self.pending.clear();
        for mine in self.mine.iter_mut().filter(|mine| mine.state == State::Leaving(true)) {
            mine.state = State::Leaving(false);
        }
        self.release_due(false);
        let joining = self.mine.iter().filter(|mine| mine.state == State::Joining);
        for Mine { id, lease_ms, may_wait, .. } in joining.copied().collect::<Vec<_>>() {
            let max_queue = may_wait.then_some(1000);
            self.call(Op::Acquire { leaving: vec![], lease_ms, max_queue, ids: [id].into() });
        }
    }

    pub(crate) fn poll(&mut self, now: u64, step: usize) -> Option<Request> {
        let limit = self.pending.values().map(|call| call.limit).max().unwrap_or(0);
        let time = Time::since_epoch(Duration::from_micros(now - super::BEGAN));
        let mut transaction =
            self.replica.poll_transaction(time, now.saturating_add_signed(self.skew))?;
        if self.fault == Fault::GoesBack && transaction.changed > 0 {
            let told = usize::try_from(transaction.changed).expect("few");
            transaction.changed = self.revisions[told];
        }
        Some(Request { node: self.node, transaction, step, limit })
    }

    pub(crate) fn handle_value(&mut self, revision: u64, bytes: Option<&[u8]>) {
        let revision = self.told(revision, bytes);
        self.replica.handle_value(revision, bytes);
        self.know_strangers();
    }

    pub(crate) fn handle_outcome(&mut self, outcome: Outcome, transaction: &Transaction) {
        match outcome {
            Outcome::Committed(revision) => {
                let is_written =
                    transaction.change != tower_semaphore_protocol::replica::Change::Nothing;
                let revision = if is_written { self.told(revision, Some(&[])) } else { revision };
                self.replica.handle_committed(revision);
            }
            Outcome::Lost(revision, bytes) => {
                let revision = self.told(revision, bytes.as_deref());
                self.replica.handle_lost(revision, bytes.as_deref());
                // It may be a sign of life that came back.
                self.take_life(true);
            }
        }
        self.know_strangers();
    }

    /// With [`Fault::GoesBack`], whatever comes has a higher revision than what came before.
    fn told(&mut self, revision: u64, _: Option<&[u8]>) -> u64 {
        if self.fault != Fault::GoesBack {
            return revision;
        }
        self.revisions.push(revision);
        self.revisions.len() as u64 - 1
    }

    /// With [`Fault::KeepsStrangers`], the replica is told that the process has every place that is there.
    fn know_strangers(&mut self) {
        if self.fault != Fault::KeepsStrangers {
            return;
        }
        let Some(value) = self.replica.value() else { return };
        let own = value.ledger.places().filter(|(id, ..)| id.node == self.node);
        let own: Vec<_> = own.map(|(id, ..)| id).collect();
        for id in own {
            if self.mine.iter().all(|mine| mine.id != id) {
                self.call(Op::Renew { lease_ms: LEASES_MS[0], ids: [id].into() });
            }
        }
    }

    /// The outcome of the transaction is unknown.
    pub(crate) fn handle_unknown(&mut self) {
        match self.fault {
            Fault::DropsUnknown => {
                self.replica.handle_dropped();
                for (_, call) in std::mem::take(&mut self.pending) {
                    self.handle_failed(&call.op, false);
                }
            }
            Fault::TrustsUnknown => self.replica.handle_committed(self.replica.revision() + 1),
            _ => self.replica.handle_unknown(),
        }
    }

    pub(crate) fn take_life(&mut self, all: bool) {
        while let Some((ended, is_back)) = self.life.pop_front() {
            if is_back {
                self.replica.handle_back(ended.row());
            } else {
                self.replica.handle_ended(ended, true);
            }
            if !all {
                return;
            }
        }
    }

    /// Takes all events. `revision`: at which the last transaction was carried out.
    pub(crate) fn take_events(
        &mut self,
        store: &Store,
        revision: Option<u64>,
    ) -> Result<(), String> {
        while let Some(event) = self.replica.poll_event() {
            match event {
                Event::Answered { call, answer } => {
                    let Some(made) = self.pending.remove(&call) else { continue };
                    match answer {
                        Answer::Reply(reply) => {
                            self.handle_reply(&made.op, &reply, store, revision)?;
                        }
                        Answer::Refused => self.handle_failed(&made.op, false),
                        Answer::Failed => self.handle_failed(&made.op, true),
                    }
                }
                Event::Granted(hint) => {
                    self.granted += 1;
                    self.grant(hint.n);
                }
                Event::Recalled => self.recalled += 1,
                Event::Freed => {
                    self.freed += 1;
                    if self.fault != Fault::IgnoresFreed {
                        self.call(Op::Release { ids: Ids::new() });
                    }
                }
                Event::Stopped(error) => return Err(format!("stopped: {error}")),
            }
        }
        Ok(())
    }

    fn place(&mut self, n: u64) -> Option<&mut Mine> {
        self.mine.iter_mut().find(|mine| mine.id.n == n)
    }

    fn grant(&mut self, n: u64) {
        if let Some(mine) = self.place(n).filter(|mine| mine.state == State::Waiting) {
            mine.state = State::Held;
        }
    }

    fn handle_reply(
        &mut self,
        op: &Op,
        reply: &Reply,
        store: &Store,
        revision: Option<u64>,
    ) -> Result<(), String> {
        self.remove(op.leaving());
        match op {
            Op::Acquire { ids, .. } => {
                for (id, status) in ids.iter().zip(&reply.statuses) {
                    self.handle_join(*id, *status, store, revision)?;
                }
            }
            Op::Renew { ids, .. } => {
                for (id, status) in ids.iter().zip(&reply.statuses) {
                    if *status == PlaceStatus::Held {
                        self.grant(id.n);
                    } else if *status == PlaceStatus::Gone {
                        if store.newest().places().contains_key(id) {
                            return Err(format!("{id} is said to be gone, and is there"));
                        }
                        self.remove(&[*id]);
                    }
                }
            }
            _ => {}
        }
        for grant in &reply.granted {
            self.grant(grant.id.n);
        }
        Ok(())
    }

    fn handle_join(
        &mut self,
        id: PlaceId,
        status: PlaceStatus,
        store: &Store,
        revision: Option<u64>,
    ) -> Result<(), String> {
        let Some(mine) = self.place(id.n) else { return Ok(()) };
        let is_joining = mine.state == State::Joining;
        let state = match status {
            PlaceStatus::Held => State::Held,
            status if status.ticket().is_some() => State::Waiting,
            _ => {
                if is_joining {
                    self.remove(&[id]);
                }
                return Ok(());
            }
        };
        if is_joining {
            mine.state = state;
            let places = revision.map(|revision| store.version(revision).places());
            let is_there = places.and_then(|places| places.get(&id).copied());
            if is_there.is_none_or(|(_, ticket)| state == State::Held && ticket.is_some()) {
                return Err(format!("{id} is said to be {state:?} at {revision:?}, and is not"));
            }
        }
        Ok(())
    }

    fn handle_failed(&mut self, op: &Op, in_doubt: bool) {
        for id in op.leaving() {
            if let Some(mine) = self.place(id.n) {
                mine.state = State::Leaving(false);
            }
        }
        let Op::Acquire { ids, .. } = op else { return };
        for id in ids {
            let Some(mine) = self.place(id.n).filter(|mine| mine.state == State::Joining) else {
                continue;
            };
            if in_doubt {
                mine.state = State::Leaving(false);
            } else {
                self.remove(&[*id]);
            }
        }
    }

    fn remove(&mut self, ids: &[PlaceId]) {
        self.mine.retain(|mine| !ids.contains(&mine.id));
    }
}
