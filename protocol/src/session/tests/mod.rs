//! One process's session beside a ledger, without a network: a test decides when calls are answered.

mod adaptive;
mod budgets;
mod connections;
mod ending;
mod linger;
mod local_rates;
mod local_shares;
mod lost_data;
mod movement;
mod operators;
mod outages;
mod rate_waits;
mod rates;
mod refused_calls;
mod reload;
mod renewals;
mod replies;
mod reuse;
mod sending;
mod tenants;
mod waiting;

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::smallvec;

use super::places::serial_of;
use super::*;
use crate::call::{Call, Op};
use crate::claim::Claim;
use crate::id::{Ids, PlaceId};
use crate::ledger::{Caller, Grant, Ledger, PlaceStatus, Reply, Usage};
use crate::overrides::Override;

const NODE: NodeId = NodeId::new(1);
const OTHER: NodeId = NodeId::new(2);
/// Moment 0 by the server's clock, ms.
const EPOCH_MS: u64 = 1_700_000_000_000;

const OPTIONS: AcquireOptions = AcquireOptions {
    lease: Duration::from_secs(3),
    max_queue: Some(8),
    max_waiting: 100,
    on_unavailable: OnUnavailable::Refuse,
    headroom: 0,
    rate: None,
    claim: None,
    linger_ms: 0,
    reuse_ms: 0,
    patience_ms: 0,
};

/// Moments are ms, by the clocks of the process and the server alike.
const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A connection to the data of the one before.
fn same_data() -> Connected {
    Connected { same_data: true, ..Connected::default() }
}

struct Rig {
    session: Session,
    ledger: Ledger,
    limit: u32,
    now_ms: u64,
    others: u64,
    /// Processes that the ledger recalled permits from.
    recalled: Vec<NodeId>,
}

impl Rig {
    fn new(limit: u32) -> Self {
        let session = Session::new(NODE, 1, Connected::default(), false);
        Self { session, ledger: Ledger::new(), limit, now_ms: 0, others: 0, recalled: Vec::new() }
    }

    fn now(&self) -> Time {
        Time::ZERO + ms(self.now_ms)
    }

    fn ask(&self, node: NodeId, limit: u32) -> Caller {
        Caller {
            now: (EPOCH_MS + self.now_ms) * 1000,
            limit,
            headroom: 0,
            for_all: false,
            max_waiting: 0,
            node,
            recalls: false,
        }
    }

    /// Lets time pass; timeouts are handled when they are due.
    fn pass(&mut self, duration_ms: u64) {
        let end = self.now_ms + duration_ms;
        while let Some(at) = self.session.poll_timeout() {
            let at_ms = u64::try_from(at.elapsed_since_epoch().as_nanos().div_ceil(1_000_000))
                .expect("a short time")
                .max(self.now_ms);
            if at_ms > end {
                break;
            }
            self.now_ms = at_ms;
            self.session.handle_timeout(self.now());
            let next = self.session.poll_timeout();
            assert!(next.is_none_or(|next| next > self.now()), "the watchdog spins");
        }
        self.now_ms = end;
    }

    /// Lets time pass, and carries out and answers every call.
    fn live(&mut self, duration_ms: u64) {
        for _ in 0..duration_ms / 10 {
            self.pass(10);
            self.settle();
        }
    }

    fn request_with(&mut self, options: AcquireOptions) -> usize {
        let (limit, now) = (self.limit, self.now());
        let index = self.session.handle_request(limit, options, now).expect("room");
        self.progress(index);
        index
    }

    fn request(&mut self) -> usize {
        self.request_with(OPTIONS)
    }

    fn progress(&mut self, index: usize) -> Progress {
        let now = self.now();
        let progress = self.session.handle_poll(index, now);
        self.check();
        progress
    }

    /// Checks counts and queues against the places.
    fn check(&self) {
        let places = &self.session.places;
        self.session.counts.check(places);
        let units = self.session.counts.in_flight();
        let replacing = places.iter().filter(|(_, place)| place.replaces.is_some()).count();
        assert_eq!(self.session.reload.replacing(), replacing, "replacing");
        self.session.check_reuse();
        let places_of = |session: &Session| session.outage.as_ref().map(LocalQueue::places);
        let queue = places_of(&self.session);
        for index in queue.iter().flatten() {
            let place = self.session.places.get(*index);
            let is_there = place.is_some_and(|place| place.state.is_without_permit());
            assert!(is_there, "{index} waits for a share");
        }
        // No place waits for a free share.
        let mut rest = self.session.clone();
        rest.admit_local(self.now());
        assert_eq!(places_of(&rest), queue);
        if let Some(queue) = &self.session.outage {
            assert_eq!(queue.units(), units, "in flight by tenants");
        }
    }

    fn leave(&mut self, index: usize) {
        let now = self.now();
        self.session.handle_leave(index, now);
        self.check();
    }

    /// The next call. A driver goes by the urgency: a call without one is never sent, and an urgency without a call keeps
    /// the driver spinning.
    fn call(&mut self) -> Option<Call> {
        self.check();
        let (urgency, now) = (self.session.urgency(), self.now());
        let call = self.session.poll_call(now);
        match &call {
            Some(call) => assert!(urgency.is_some(), "{call:?} would never be sent"),
            None => assert_eq!(self.session.urgency(), None, "nothing is to be sent"),
        }
        call
    }

    /// Takes all calls.
    fn calls(&mut self) -> Vec<Call> {
        std::iter::from_fn(|| self.call()).collect()
    }

    fn carry_out(&mut self, call: &Call) -> Reply {
        let (for_all, max_waiting) = (call.for_all, call.max_waiting);
        let caller = self.ask(NODE, call.limit);
        let caller = Caller { recalls: call.recalls, for_all, max_waiting, ..caller };
        let post: super::super::ledger::Post<'_> = &mut |_, _| true;
        self.ledger.settle_used(&call.used, caller.now);
        match &call.op {
            Op::Acquire { leaving, lease_ms, max_queue, ids } => {
                self.ledger.acquire(caller, *lease_ms, *max_queue, leaving, ids, post)
            }
            Op::Release { ids } => self.ledger.release(caller, ids, post),
            Op::Renew { lease_ms, ids } => self.ledger.renew(caller, *lease_ms, ids, post),
            Op::Reassert { lease_ms, proofs } => {
                self.ledger.reassert(caller, *lease_ms, proofs, post)
            }
            Op::Audit { most } => {
                let found = self.ledger.audit(caller.now, NODE, *most as usize);
                Reply { found, ..Reply::default() }
            }
        }
    }

    fn reply(&mut self, op: &Op, reply: &Reply, sent: Time) {
        let now = self.now();
        self.session.handle_reply(op, reply, Sending::at(sent), now);
    }

    /// Sends the next call, and answers it at once.
    fn answer(&mut self) -> Call {
        let (call, now) = (self.call().expect("a call"), self.now());
        let reply = self.carry_out(&call);
        self.reply(&call.op, &reply, now);
        call
    }

    /// The server loses everything, a renewal notices, and it was no revocation. Returns the proof that follows.
    fn proof_after_a_loss(&mut self) -> Call {
        self.ledger = Ledger::new();
        self.reconnect(Connected::default());
        let renewal = self.answer();
        assert!(matches!(renewal.op, Op::Renew { .. }), "{renewal:?}");
        let question = self.session.poll_revocation_check().expect("a question");
        let now = self.now();
        self.session.handle_revocations_known(question, now);
        let proof = self.call().expect("a proof");
        assert!(matches!(proof.op, Op::Reassert { .. }), "{proof:?}");
        proof
    }

    /// Sends and answers calls until there are none.
    fn settle(&mut self) -> Vec<Op> {
        let mut ops = Vec::new();
        for _ in 0..100 {
            let (calls, now) = (self.calls(), self.now());
            for call in &calls {
                let reply = self.carry_out(call);
                self.reply(&call.op, &reply, now);
            }
            if let Some(question) = self.session.poll_revocation_check() {
                self.session.handle_revocations_known(question, now);
            } else if calls.is_empty() {
                return ops;
            }
            ops.extend(calls.into_iter().map(|call| call.op));
        }
        panic!("it sends and sends");
    }

    /// The connection breaks with nothing under way, and opens again.
    fn reconnect(&mut self, connected: Connected) {
        let now = self.now();
        self.session.handle_connected(connected, now);
    }

    fn id(&self, index: usize) -> PlaceId {
        self.session.place(index).expect("a place")
    }

    /// A place of another process takes a permit, or waits.
    fn other(&mut self) -> PlaceId {
        self.others += 1;
        let id =
            PlaceId { node: OTHER, poll_only: false, n: self.others, bound: None, claim: None };
        let caller = Caller { recalls: true, ..self.ask(OTHER, self.limit) };
        let recalled = &mut self.recalled;
        self.ledger.acquire(caller, 3_600_000, Some(8), &[], &[id], &mut |node, grants| {
            if grants.is_empty() {
                recalled.push(node);
            }
            true
        });
        id
    }

    /// It leaves. Returns the hints that follow.
    fn other_leaves(&mut self, id: PlaceId) -> Vec<Grant> {
        let mut grants = Vec::new();
        let caller = self.ask(OTHER, self.limit);
        self.ledger.release(caller, &[id], &mut |_, hints| {
            grants.extend_from_slice(hints);
            true
        });
        grants
    }

    fn hint(&mut self, grant: Grant) {
        let now = self.now();
        self.session.handle_hint(grant.into(), now);
    }

    fn places(&self) -> Vec<PlaceId> {
        let mut places: Vec<_> = self.ledger.places().map(|(id, ..)| id).collect();
        places.sort_unstable();
        places
    }

    /// Whether a place waits, by the ledger.
    fn waits(&self, id: PlaceId) -> bool {
        let place = self.ledger.places().find(|(other, ..)| *other == id);
        place.expect("a place").2.is_some()
    }

    fn is_over(&self) -> bool {
        self.session.is_over(self.now())
    }
}

fn with(on_unavailable: OnUnavailable) -> AcquireOptions {
    AcquireOptions { on_unavailable, ..OPTIONS }
}

fn with_queue(on_unavailable: OnUnavailable, max_queue: Option<u32>) -> AcquireOptions {
    AcquireOptions { on_unavailable, max_queue, ..OPTIONS }
}

/// A process whose server cannot be asked.
fn outage(limit: u32) -> Rig {
    let mut rig = Rig::new(limit);
    rig.session.handle_unreachable(rig.now());
    rig
}

fn is_refused(progress: Progress, reason: RejectReason) -> bool {
    matches!(progress, Progress::Refused { reason: why, .. } if why == reason)
}

/// Another process has the one permit, and a request waits behind it.
fn waiter(options: AcquireOptions) -> (Rig, usize) {
    let mut rig = Rig::new(1);
    rig.other();
    let waits = rig.request_with(options);
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Waiting);
    (rig, waits)
}
