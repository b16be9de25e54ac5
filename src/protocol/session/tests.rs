//! One process's session beside a ledger, without a network: what is sent is answered when a test
//! says so.

use std::time::Duration;

use smallvec::smallvec;

use super::*;
use crate::protocol::call::{Call, Op};
use crate::protocol::ledger::{Caller, Grant, Ledger, PlaceStatus, Reply};

const NODE: NodeId = NodeId::new(1);
const OTHER: NodeId = NodeId::new(2);
/// Moment 0 by the server's clock, ms.
const EPOCH_MS: u64 = 1_700_000_000_000;

const OPTIONS: AcquireOptions = AcquireOptions {
    lease: Duration::from_secs(3),
    max_queue: Some(8),
    on_unavailable: OnUnavailable::Refuse,
};

/// Moments are ms, by the clocks of the process and the server alike.
const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

struct Rig {
    session: Session,
    ledger: Ledger,
    limit: u32,
    now_ms: u64,
    others: u64,
}

impl Rig {
    fn new(limit: u32) -> Self {
        let session = Session::new(NODE, 1, Connected::default(), false);
        Self { session, ledger: Ledger::new(), limit, now_ms: 0, others: 0 }
    }

    fn now(&self) -> Time {
        Time::ZERO + ms(self.now_ms)
    }

    fn ask(&self, node: NodeId, limit: u32) -> Caller {
        Caller { now: (EPOCH_MS + self.now_ms) * 1000, limit, node }
    }

    /// Time passes; the watchdog looks whenever it is to.
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

    /// The same, and what is to be sent is carried out and answered.
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
        self.session.progress(index, now)
    }

    fn leave(&mut self, index: usize) {
        let now = self.now();
        self.session.handle_leave(index, now);
    }

    /// The next call. A driver goes by the urgency: what it does not tell of is never sent, and a
    /// session that tells of something and sends nothing keeps its driver busy for nothing.
    fn call(&mut self) -> Option<Call> {
        let (urgency, now) = (self.session.urgency(), self.now());
        let call = self.session.poll_call(now);
        match &call {
            Some(call) => assert!(urgency.is_some(), "{call:?} would never be sent"),
            None => assert_eq!(self.session.urgency(), None, "nothing is to be sent"),
        }
        call
    }

    /// All calls that are to be sent.
    fn calls(&mut self) -> Vec<Call> {
        std::iter::from_fn(|| self.call()).collect()
    }

    fn carry_out(&mut self, call: &Call) -> Reply {
        let caller = self.ask(NODE, call.limit);
        let post: super::super::ledger::Post<'_> = &mut |_, _| true;
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
        self.session.handle_reply(op, reply, false, sent, now);
    }

    /// Sends what is to be sent, and answers it; until there is nothing more.
    fn settle(&mut self) -> Vec<Op> {
        let mut ops = Vec::new();
        for _ in 0..100 {
            let (calls, now) = (self.calls(), self.now());
            for call in &calls {
                let reply = self.carry_out(call);
                self.reply(&call.op, &reply, now);
            }
            if self.session.poll_revocation_check() {
                self.session.handle_revocations_known(now);
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
        let id = PlaceId { node: OTHER, poll_only: false, n: self.others };
        let caller = self.ask(OTHER, self.limit);
        self.ledger.acquire(caller, 3_600_000, Some(8), &[], &[id], &mut |_, _| true);
        id
    }

    /// It leaves. Gives the hints that come of it.
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
        self.session.handle_hint(grant.id.n, grant.lease_end, now);
    }

    fn places(&self) -> Vec<PlaceId> {
        let mut places: Vec<_> = self.ledger.places().map(|(id, ..)| id).collect();
        places.sort_unstable();
        places
    }

    fn is_over(&self) -> bool {
        self.session.is_over(self.now())
    }
}

// ===== when a session is dropped =====

#[test]
fn a_session_is_kept_for_a_failover_though_its_watchdog_is_late() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    rig.settle();
    // Granted when its next renewal is due already.
    rig.now_ms = 1000;
    let hint = rig.other_leaves(other)[0];
    rig.hint(hint);
    assert_eq!(rig.progress(index), Progress::Held);
    rig.leave(index);
    rig.settle();
    assert!(rig.session.is_idle());
    assert!(!rig.is_over(), "a failover within five seconds would not be audited");
    rig.pass(4999);
    assert!(!rig.is_over());
    rig.pass(1);
    assert!(rig.is_over());
}

// ===== how soon =====

#[test]
fn requests_and_releases_go_now_and_renewals_before_the_first_lease_ends() {
    let mut rig = Rig::new(2);
    assert_eq!(rig.session.urgency(), None);
    let first = rig.request();
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    assert_eq!(rig.session.urgency(), None);
    rig.pass(300);
    rig.request();
    rig.settle();
    // Held, and due after a third of the lease.
    rig.pass(700);
    assert_eq!(rig.session.urgency(), Some(Urgency::Before(Time::ZERO + ms(2999))));
    // With a request beside it, it is the request that is waited for.
    rig.request();
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    rig.leave(first);
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    assert_eq!(rig.session.urgency(), None);
}

#[test]
fn while_it_is_unknown_what_became_of_the_places_newcomers_are_not_urgent() {
    let mut rig = Rig::new(1);
    rig.request();
    rig.settle();
    rig.reconnect(Connected::default());
    assert!(matches!(rig.session.urgency(), Some(Urgency::Before(_))));
    let renewal = rig.call().expect("a renewal of everything");
    let second = rig.request();
    assert_eq!(rig.call(), None, "it waits for the answer");
    let (reply, now) = (rig.carry_out(&renewal), rig.now());
    rig.reply(&renewal.op, &reply, now);
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    rig.settle();
    assert_eq!(rig.progress(second), Progress::Waiting);
}

#[test]
fn an_audit_goes_when_there_is_time() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.leave(index);
    rig.settle();
    rig.reconnect(Connected::default());
    assert_eq!(rig.session.urgency(), Some(Urgency::Later));
    assert!(matches!(rig.settle()[..], [Op::Audit { .. }]));
}

#[test]
fn a_server_that_stopped_at_its_bound_is_called_again_at_once() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = Reply { more: true, ..rig.carry_out(&call) };
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.session.urgency(), Some(Urgency::Now));
    assert!(matches!(rig.settle()[..], [Op::Release { ref ids }] if ids.is_empty()));
    assert_eq!(rig.progress(index), Progress::Held);
    assert_eq!(rig.session.urgency(), None);
}

// ===== waiting =====

#[test]
fn a_place_that_no_hint_reaches_polls_and_any_other_asks_each_second() {
    for (poll_only, each) in [(false, 1000), (true, 100)] {
        let mut rig = Rig::new(1);
        rig.reconnect(Connected { poll_only, ..Connected::default() });
        rig.other();
        let waits = rig.request();
        rig.settle();
        assert_eq!(rig.id(waits).poll_only, poll_only);
        rig.pass(each - 1);
        assert_eq!(rig.calls(), [], "{poll_only}");
        rig.pass(1);
        assert!(matches!(rig.settle()[..], [Op::Renew { .. }]), "{poll_only}");
    }
}

#[test]
fn a_waiter_asks_just_after_the_earliest_lease_end() {
    let mut rig = Rig::new(1);
    // Held by a process that is dead; its lease ends in between two renewals.
    let dead = PlaceId { node: OTHER, poll_only: false, n: 77 };
    let caller = rig.ask(OTHER, 1);
    rig.ledger.acquire(caller, 1500, None, &[], &[dead], &mut |_, _| true);
    let waits = rig.request();
    rig.settle();
    rig.live(1490);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.live(30);
    assert_eq!(rig.progress(waits), Progress::Held);
}

#[test]
fn requests_that_leave_before_they_are_sent_leave_no_room_taken() {
    let mut rig = Rig::new(1);
    let (now, limit) = (rig.now(), rig.limit);
    // Nothing is sent: a connection is being opened.
    let request = |rig: &mut Rig| rig.session.handle_request(limit, OPTIONS, now).expect("room");
    let _first = request(&mut rig);
    for _ in 0..1000 {
        let (leaves, _stays) = (request(&mut rig), request(&mut rig));
        let last = request(&mut rig);
        rig.leave(leaves);
        rig.leave(last);
    }
    let places = rig.session.places.len();
    assert_eq!(places, 1001);
    assert!(rig.session.joins.len() <= 2 * places + 16, "{}", rig.session.joins.len());
    for _ in 0..1000 {
        let leaves = request(&mut rig);
        request(&mut rig);
        rig.leave(leaves);
        rig.session.places.iter().map(|(index, _)| index).last().into_iter().for_each(|index| {
            rig.session.handle_leave(index, now);
        });
        assert!(rig.session.joins.len() <= 2 * rig.session.places.len() + 17);
    }
    assert!(rig.session.places.len() < 1100);
}

// ===== when a wait is over =====

/// Another process has the one permit, and a request waits behind it.
fn waiting(options: AcquireOptions) -> (Rig, usize) {
    let mut rig = Rig::new(1);
    rig.other();
    let waits = rig.request_with(options);
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Waiting);
    (rig, waits)
}

fn time_out(rig: &mut Rig, index: usize) -> Progress {
    let now = rig.now();
    rig.session.handle_wait_timeout(index, now);
    rig.progress(index)
}

#[test]
fn a_request_in_the_queue_that_waited_long_enough_leaves_it() {
    for on_unavailable in [OnUnavailable::Refuse, OnUnavailable::Admit, OnUnavailable::Local(1)] {
        let (mut rig, waits) = waiting(with(on_unavailable));
        assert!(is_refused(time_out(&mut rig, waits), RejectReason::QueueTimeout));
        assert!(matches!(rig.settle()[..], [Op::Release { .. }]));
        assert_eq!(rig.places().len(), 1);
    }
}

#[test]
fn a_request_without_an_answer_is_answered_by_its_policy() {
    for (on_unavailable, expected) in [
        (OnUnavailable::Refuse, Progress::Failed),
        (OnUnavailable::Admit, Progress::Admitted),
        (OnUnavailable::Local(1), Progress::Admitted),
        (OnUnavailable::Local(0), Progress::Failed),
    ] {
        let mut rig = Rig::new(1);
        let joins = rig.request_with(with(on_unavailable));
        let _unanswered = rig.call().expect("an acquire");
        assert_eq!(rig.progress(joins), Progress::Joining);
        assert_eq!(time_out(&mut rig, joins), expected, "{on_unavailable:?}");
    }
}

#[test]
fn a_request_that_came_back_after_a_loss_still_waits() {
    let (mut rig, waits) = waiting(OPTIONS);
    rig.ledger = Ledger::new();
    // Its renewal finds it gone, and its ticket is not known: it joins once more.
    rig.session.set(waits, State::Waiting { ticket: None });
    rig.pass(1000);
    let (call, now) = (rig.call().expect("a renewal"), rig.now());
    let reply = rig.carry_out(&call);
    rig.reply(&call.op, &reply, now);
    assert!(rig.session.poll_revocation_check());
    rig.session.handle_revocations_known(now);
    assert!(matches!(rig.call().expect("an acquire").op, Op::Acquire { .. }));
    assert_eq!(rig.progress(waits), Progress::Waiting, "to its request it waits as before");
    assert!(is_refused(time_out(&mut rig, waits), RejectReason::QueueTimeout));
}

#[test]
fn a_request_that_waited_when_the_backend_went_is_answered_by_its_policy() {
    let (mut rig, waits) = waiting(with(OnUnavailable::Refuse));
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert_eq!(time_out(&mut rig, waits), Progress::Failed);
    // A share of its own is what it waits for now.
    let (mut rig, waits) = waiting(with(OnUnavailable::Local(0)));
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert!(is_refused(time_out(&mut rig, waits), RejectReason::QueueTimeout));
}

#[test]
fn in_an_outage_only_what_waits_for_a_share_seems_to_wait() {
    for (on_unavailable, expected) in
        [(OnUnavailable::Local(0), Progress::Waiting), (OnUnavailable::Refuse, Progress::Failed)]
    {
        let mut rig = Rig::new(1);
        let now = rig.now();
        rig.session.handle_unreachable(now);
        let joins = rig.request_with(with(on_unavailable));
        assert_eq!(rig.progress(joins), expected);
    }
}

// ===== connections that break =====

#[test]
fn a_break_leaves_nothing_under_way() {
    for audit in [false, true] {
        let mut rig = Rig::new(1);
        let index = rig.request();
        rig.settle();
        rig.progress(index);
        if audit {
            rig.leave(index);
            rig.settle();
            rig.reconnect(Connected::default());
        } else {
            rig.pass(1000);
        }
        let call = rig.call().expect("a renewal, or an audit");
        assert_eq!(audit, matches!(call.op, Op::Audit { .. }), "{call:?}");
        if !audit {
            rig.session.places.remove(index);
        }
        assert!(rig.session.is_busy());
        rig.session.handle_unanswered(&call.op);
        assert!(!rig.session.is_busy(), "no answer will come");
    }
}

#[test]
fn what_is_due_when_a_connection_opens_is_renewed_though_the_data_is_the_same() {
    let same = Connected { same_data: true, ..Connected::default() };
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    rig.pass(999);
    rig.reconnect(same);
    assert_eq!(rig.calls(), [], "it is not due");
    // Its watchdog is late.
    rig.now_ms += 1;
    rig.reconnect(same);
    assert!(matches!(rig.settle()[..], [Op::Renew { .. }]));
}

#[test]
fn what_was_admitted_is_announced_over_the_next_connection() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let admitted = rig.request_with(with(OnUnavailable::Admit));
    assert_eq!(rig.progress(admitted), Progress::Admitted);
    rig.reconnect(Connected { same_data: true, ..Connected::default() });
    assert!(matches!(rig.settle()[..], [Op::Reassert { .. }]));
    assert_eq!(rig.places(), [rig.id(admitted)]);
    assert_eq!(rig.progress(admitted), Progress::Held);
}

#[test]
fn an_answer_to_an_announcement_that_is_too_old_is_asked_for_again() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let admitted = rig.request_with(with(OnUnavailable::Admit));
    rig.progress(admitted);
    rig.reconnect(Connected::default());
    let (sent, call) = (rig.now(), rig.call().expect("an announcement"));
    let reply = rig.carry_out(&call);
    rig.now_ms += 2999;
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(admitted), Progress::Admitted, "its lease may have ended");
    rig.live(2000);
    assert_eq!(rig.progress(admitted), Progress::Held);
    let now = rig.now();
    assert!(!rig.session.is_lost(admitted, now));
}

#[test]
fn what_an_audit_finds_and_the_session_knows_stays() {
    let mut rig = Rig::new(3);
    let (left, stays) = (rig.request(), rig.request());
    rig.settle();
    rig.leave(left);
    rig.settle();
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    assert!(ops.iter().any(|op| matches!(op, Op::Audit { .. })), "{ops:?}");
    assert!(!ops.iter().any(|op| matches!(op, Op::Release { .. })), "{ops:?}");
    assert_eq!(rig.places(), [rig.id(stays)]);
}

// ===== refusals and proofs =====

#[test]
fn a_refusal_tells_what_was_full_and_how_full() {
    let mut rig = Rig::new(1);
    rig.other();
    let none = rig.request_with(AcquireOptions { max_queue: None, ..OPTIONS });
    rig.settle();
    let limit = RejectReason::Limit;
    let seen = Progress::Refused { reason: limit, in_use: 1, waiting: 0, limit: None };
    assert_eq!(rig.progress(none), seen);
    let waits = rig.request_with(AcquireOptions { max_queue: Some(1), ..OPTIONS });
    rig.settle();
    assert_eq!(rig.progress(waits), Progress::Waiting);
    let full = rig.request_with(AcquireOptions { max_queue: Some(1), ..OPTIONS });
    rig.settle();
    let reason = RejectReason::QueueFull;
    let seen = Progress::Refused { reason, in_use: 1, waiting: 1, limit: None };
    assert_eq!(rig.progress(full), seen);
}

#[test]
fn a_proof_that_is_refused_costs_a_permit_and_a_waiter_asks_again() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    let waits = rig.request();
    rig.settle();
    let (ids, now) = ([held, waits].map(|index| rig.id(index)), rig.now());
    let op = Op::Reassert { lease_ms: 3000, proofs: ids.map(|id| (id, 1)).into() };
    let statuses = smallvec![PlaceStatus::Gone, PlaceStatus::Gone];
    rig.session.handle_reply(&op, &Reply { statuses, ..Reply::default() }, false, now, now);
    assert!(rig.session.is_lost(held, now));
    assert_eq!(rig.progress(waits), Progress::Waiting);
    assert!(rig.calls().iter().any(|call| matches!(call.op, Op::Renew { .. })));
}

#[test]
fn a_waiter_learns_its_new_ticket_and_keeps_its_lease() {
    let (mut rig, waits) = waiting(OPTIONS);
    rig.live(4000);
    // Renewed each second, it has outlived its first lease.
    assert_eq!(rig.progress(waits), Progress::Waiting);
    let before = rig.id(waits);
    let ticket = rig.ledger.places().find(|(id, ..)| *id == before).and_then(|(.., ticket)| ticket);
    // The server loses everything: it shows its ticket, and has its turn.
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    let shown = ops.iter().find_map(|op| match op {
        Op::Reassert { proofs, .. } => proofs.first().map(|(_, proof)| *proof),
        _ => None,
    });
    assert_eq!(shown, ticket, "{ops:?}");
}

#[test]
fn a_place_that_is_brought_back_is_not_renewed_before_that_is_answered() {
    let mut rig = Rig::new(1);
    let held = rig.request();
    rig.settle();
    rig.progress(held);
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    let (renewal, now) = (rig.call().expect("a renewal"), rig.now());
    let reply = rig.carry_out(&renewal);
    rig.reply(&renewal.op, &reply, now);
    assert!(rig.session.poll_revocation_check());
    // Due meanwhile.
    rig.pass(1100);
    assert_eq!(rig.calls(), [], "a renewal would only find it gone once more");
    let now = rig.now();
    rig.session.handle_revocations_known(now);
    assert!(matches!(rig.settle()[..], [Op::Reassert { .. }, ..]));
    // From then on it is renewed as ever.
    rig.live(1100);
    assert!(!rig.session.is_lost(held, rig.now()));
    rig.live(4000);
    assert!(!rig.session.is_lost(held, rig.now()));
    assert_eq!(rig.places(), [rig.id(held)]);
}

// ===== what is told of places =====

#[test]
fn a_session_tells_for_how_long_its_permits_have_been_held() {
    let mut rig = Rig::new(2);
    let first = rig.request();
    rig.settle();
    rig.pass(300);
    let second = rig.request();
    let waits = rig.request();
    rig.settle();
    rig.pass(200);
    let (now, ids) = (rig.now(), [first, second, waits].map(|index| rig.id(index)));
    let held = ids.map(|id| rig.session.held_for(id, now));
    assert_eq!(held, [Some(ms(500)), Some(ms(200)), None]);
    let unknown = PlaceId { n: ids[0].n + (1 << 20), ..ids[0] };
    assert_eq!(rig.session.held_for(unknown, now), None, "another stay at the same index");
    assert_eq!(rig.session.held_since(now, 9), [(ids[0].n, 500), (ids[1].n, 200)]);
    assert_eq!(rig.session.held_since(now, 1), [(ids[0].n, 500)]);
    assert_eq!([first, second, waits].map(|index| rig.session.is_held(index)), [true, true, false]);
}

#[test]
fn a_lost_permit_was_held_and_is_lost() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert!(rig.session.is_in_use());
    rig.pass(3000);
    let now = rig.now();
    assert!(rig.session.is_held(index) && rig.session.is_lost(index, now));
    assert!(rig.session.was_lost(index));
    assert!(!rig.session.is_in_use());
}

#[test]
fn the_next_session_of_a_name_uses_no_number_again() {
    let mut rig = Rig::new(1);
    let serial = rig.session.serial();
    let index = rig.request();
    let n = rig.id(index).n;
    assert!(rig.session.serial() > serial);
    let next = Session::new(NODE, rig.session.serial(), Connected::default(), false);
    rig.session = next;
    let index = rig.request();
    assert_ne!(rig.id(index).n, n);
    assert_eq!(place::index_of(n), 0);
    assert!(place::serial_of(rig.id(index).n) > place::serial_of(n));
}

// ===== renewals =====

#[test]
fn a_place_that_becomes_due_while_renewals_are_under_way_is_renewed_right_after_them() {
    let mut rig = Rig::new(2);
    let first = rig.request();
    rig.settle();
    rig.pass(600);
    let second = rig.request();
    rig.settle();
    assert_eq!(rig.progress(first), Progress::Held);
    assert_eq!(rig.progress(second), Progress::Held);
    // The first is due, and the answer takes its time.
    rig.pass(400);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    assert_eq!(renewal.op.places(), 1);
    let reply = rig.carry_out(&renewal);
    rig.pass(700);
    assert_eq!(rig.call(), None);
    rig.reply(&renewal.op, &reply, sent);
    // Meanwhile the second came to be due.
    let id = rig.id(second);
    let sent = rig.settle();
    assert!(sent.iter().any(|op| matches!(op, Op::Renew { ids, .. } if ids.contains(&id))));
}

#[test]
fn the_deadline_counts_from_when_the_renewal_was_sent() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = rig.carry_out(&call);
    rig.now_ms = 2000;
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(index), Progress::Held);
    rig.now_ms = 2998;
    assert!(!rig.session.is_lost(index, rig.now()));
    rig.now_ms = 2999;
    assert!(rig.session.is_lost(index, rig.now()));
    rig.pass(0);
    assert!(rig.session.was_lost(index));
    assert!(rig.session.take_events().contains(&Event::Lost(index)));
}

#[test]
fn an_answer_that_comes_after_the_deadline_is_asked_for_again() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = rig.carry_out(&call);
    rig.now_ms = 2999;
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(index), Progress::Waiting);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert!(!rig.session.is_lost(index, rig.now() + ms(2998)));
}

#[test]
fn a_permit_that_its_request_has_not_taken_by_its_deadline_waits_again() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.now_ms = 2999;
    assert_eq!(rig.progress(index), Progress::Waiting);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);

    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    // The watchdog comes first.
    rig.now_ms = 2999;
    rig.pass(0);
    assert!(!rig.session.was_lost(index));
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn a_lost_permit_is_not_revived_and_is_released() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.pass(1000);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    let reply = rig.carry_out(&renewal);
    rig.pass(1999);
    assert!(rig.session.was_lost(index));
    rig.reply(&renewal.op, &reply, sent);
    assert!(rig.session.was_lost(index));
    rig.settle();
    assert_eq!(rig.places(), []);
    rig.leave(index);
    assert_eq!(rig.settle(), []);
}

#[test]
fn waits_in_answer_to_a_holders_renewal_neither_demotes_nor_extends() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.pass(1000);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    let waits = Reply {
        lease_end: EPOCH_MS + 4000,
        statuses: smallvec![PlaceStatus::Waiting(EPOCH_MS * 1000)],
        ..Reply::default()
    };
    rig.reply(&renewal.op, &waits, sent);
    assert!(rig.session.is_held(index));
    // It is asked again soon, but not at once.
    assert_eq!(rig.call(), None);
    rig.pass(100);
    assert!(matches!(rig.call().map(|call| call.op), Some(Op::Renew { .. })));
    rig.pass(1899);
    assert!(rig.session.was_lost(index));
}

#[test]
fn gone_takes_nothing_from_a_place_that_was_granted_after_the_question() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    rig.settle();
    rig.pass(1000);
    let (sent, renewal) = (rig.now(), rig.call().expect("a renewal"));
    rig.pass(10);
    let hint = rig.other_leaves(other)[0];
    rig.hint(hint);
    assert_eq!(rig.progress(index), Progress::Held);
    let gone = Reply { statuses: smallvec![PlaceStatus::Gone], ..Reply::default() };
    rig.reply(&renewal.op, &gone, sent);
    assert!(rig.session.is_held(index));
    let asked = rig.settle();
    assert!(matches!(&asked[..], [Op::Renew { .. }]), "{asked:?}");
}

#[test]
fn places_of_different_leases_are_renewed_in_calls_of_their_own() {
    let mut rig = Rig::new(8);
    for lease in [3, 6, 3, 6, 9] {
        let index =
            rig.request_with(AcquireOptions { lease: Duration::from_secs(lease), ..OPTIONS });
        rig.settle();
        rig.progress(index);
    }
    let now = rig.now();
    rig.session.handle_connected(Connected::default(), now);
    let calls = rig.calls();
    let mut renewed: Vec<_> = calls
        .iter()
        .filter(|call| matches!(call.op, Op::Renew { .. }))
        .map(|call| (call.op.lease_ms(), call.op.places()))
        .collect();
    renewed.sort_unstable();
    assert_eq!(renewed, [(3000, 2), (6000, 2), (9000, 1)]);
}

#[test]
fn no_call_names_more_than_512_places() {
    let mut rig = Rig::new(2000);
    let indexes: Vec<_> = (0..1300).map(|_| rig.request()).collect();
    let places = |ops: &[Op]| ops.iter().map(Op::places).collect::<Vec<_>>();
    assert_eq!(places(&rig.settle()), [512, 512, 276]);
    for index in &indexes {
        assert_eq!(rig.progress(*index), Progress::Held);
    }
    rig.pass(1000);
    assert_eq!(places(&rig.settle()), [512, 512, 276]);
    for index in indexes {
        rig.leave(index);
    }
    assert_eq!(places(&rig.settle()), [512, 512, 276]);
    assert_eq!(rig.places(), []);
}

// ===== hints =====

#[test]
fn a_hint_that_comes_before_the_answer_is_kept_until_then() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    let (sent, call) = (rig.now(), rig.call().expect("an acquire"));
    let reply = rig.carry_out(&call);
    let hint = rig.other_leaves(other)[0];
    rig.hint(hint);
    assert_eq!(rig.progress(index), Progress::Joining);
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn a_hint_of_an_earlier_stay_is_not_believed() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let (n, now) = (rig.id(index).n, rig.now());
    rig.session.handle_hint(n, EPOCH_MS + 2999, now);
    assert_eq!(rig.progress(index), Progress::Waiting);
    rig.session.handle_hint(n, EPOCH_MS + 3000, now);
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn a_hint_for_a_place_that_is_unknown_releases_it() {
    let mut rig = Rig::new(1);
    let stranger = PlaceId { node: NODE, poll_only: false, n: 77 };
    rig.hint(Grant { id: stranger, lease_end: EPOCH_MS + 3000 });
    assert!(!rig.session.is_idle());
    assert_eq!(rig.settle(), [Op::Release { ids: smallvec![stranger] }]);
    assert!(rig.session.is_idle());
    rig.pass(5000);
    assert!(rig.is_over());
}

// ===== connections =====

#[test]
fn what_went_unanswered_is_asked_for_again_with_the_same_ids() {
    let mut rig = Rig::new(2);
    let first = rig.request();
    rig.settle();
    rig.progress(first);
    rig.leave(first);
    let second = rig.request();
    let sent = rig.calls();
    assert!(
        matches!(&sent[..], [Call { op: Op::Acquire { leaving, .. }, .. }] if leaving.len() == 1)
    );
    rig.session.handle_unanswered(&sent[0].op);
    assert_eq!(rig.calls(), []);
    rig.reconnect(Connected::default());
    let id = rig.id(second);
    let ops = rig.settle();
    assert!(matches!(&ops[0], Op::Acquire { leaving, ids, .. }
        if leaving.len() == 1 && ids[..] == [id]));
    assert_eq!(rig.progress(second), Progress::Held);
    assert_eq!(rig.places(), [id]);
}

#[test]
fn a_connection_to_the_same_data_sends_nothing_for_held_places() {
    let mut rig = Rig::new(2);
    for _ in 0..2 {
        let index = rig.request();
        rig.settle();
        rig.progress(index);
    }
    rig.pass(500);
    let same = Connected { same_data: true, ..Connected::default() };
    rig.reconnect(same);
    assert_eq!(rig.calls(), []);
    // What is due is renewed all the same.
    rig.pass(500);
    rig.reconnect(same);
    assert_eq!(rig.settle().len(), 1);
    // Where data may be lost, everything is.
    rig.pass(100);
    rig.reconnect(Connected::default());
    assert!(matches!(&rig.settle()[0], Op::Renew { ids, .. } if ids.len() == 2));
}

#[test]
fn a_waiter_asks_after_a_connection_broke_because_its_hint_may_be_lost() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request();
    rig.settle();
    rig.other_leaves(other);
    rig.reconnect(Connected { same_data: true, ..Connected::default() });
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn newcomers_wait_until_it_is_known_what_became_of_the_places() {
    let mut rig = Rig::new(1);
    let holder = rig.request();
    rig.settle();
    rig.progress(holder);
    let newcomer = rig.request();
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    let calls = rig.calls();
    assert!(matches!(&calls[..], [Call { op: Op::Renew { .. }, .. }]), "{calls:?}");
    let (now, reply) = (rig.now(), rig.carry_out(&calls[0]));
    rig.reply(&calls[0].op, &reply, now);
    // Lost or revoked? Until that is known, no proof is shown.
    assert!(rig.session.poll_revocation_check());
    assert!(!rig.session.poll_revocation_check());
    assert_eq!(rig.calls(), []);
    rig.session.handle_revocations_known(now);
    let ops = rig.settle();
    assert!(matches!(&ops[..], [Op::Reassert { .. }, Op::Acquire { .. }]), "{ops:?}");
    assert!(rig.session.is_held(holder));
    assert_eq!(rig.progress(newcomer), Progress::Waiting);
}

#[test]
fn a_waiter_that_the_server_lost_comes_back_under_a_new_id_with_its_ticket() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let before = rig.id(index);
    let ticket = rig.ledger.places().find_map(|(id, _, ticket)| ticket.filter(|_| id == before));
    rig.ledger = Ledger::new();
    rig.limit = 0;
    let now = rig.now();
    rig.session.handle_override("- paused".parse().expect("an override"), now);
    rig.reconnect(Connected::default());
    rig.settle();
    let after = rig.id(index);
    assert_ne!(before, after);
    assert_eq!(
        rig.ledger.places().map(|(id, _, t)| (id, t)).collect::<Vec<_>>(),
        [(after, ticket)]
    );
}

#[test]
fn what_stands_there_unknown_after_a_loss_of_data_is_released() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    // A replica that has heard of the grant and not of the release.
    let replica = rig.ledger.clone();
    rig.leave(index);
    rig.settle();
    rig.ledger = replica;
    rig.pass(500);
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    assert!(matches!(&ops[..], [Op::Audit { .. }, Op::Release { .. }]), "{ops:?}");
    assert_eq!(rig.places(), []);
    // Not where the data is the same.
    rig.reconnect(Connected { same_data: true, ..Connected::default() });
    assert_eq!(rig.settle(), []);
}

#[test]
fn in_quarantine_no_call_has_permits() {
    let lost_at = Some(Time::ZERO);
    let quarantine = Quarantine { is_on: true, lost_at };
    let mut rig = Rig::new(1);
    rig.session = Session::new(NODE, 1, Connected { quarantine, ..Connected::default() }, false);
    let index = rig.request();
    assert_eq!(rig.call().map(|call| call.limit), Some(0));
    rig = Rig::new(1);
    rig.session = Session::new(NODE, 1, Connected { quarantine, ..Connected::default() }, false);
    let again = rig.request();
    assert_eq!(index, again);
    rig.live(2990);
    assert_eq!(rig.progress(again), Progress::Waiting);
    rig.live(20);
    assert_eq!(rig.progress(again), Progress::Held);
}

#[test]
fn a_late_reply_that_shows_a_place_that_was_left_releases_it() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    let (sent, acquire) = (rig.now(), rig.call().expect("an acquire"));
    rig.leave(index);
    let release = rig.call().expect("a release");
    // The release is carried out first.
    rig.carry_out(&release);
    let reply = rig.carry_out(&acquire);
    rig.session.handle_reply(&acquire.op, &reply, true, sent, sent);
    rig.reply(&release.op, &Reply::default(), sent);
    assert_eq!(rig.places().len(), 1);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_late_reassertion_of_a_place_that_was_left_is_released() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.ledger = Ledger::new();
    rig.reconnect(Connected::default());
    let (now, renewal) = (rig.now(), rig.call().expect("a renewal"));
    let reply = rig.carry_out(&renewal);
    rig.reply(&renewal.op, &reply, now);
    rig.session.poll_revocation_check();
    rig.session.handle_revocations_known(now);
    let reassert = rig.call().expect("a reassertion");
    rig.leave(index);
    let release = rig.call().expect("a release");
    rig.carry_out(&release);
    let reply = rig.carry_out(&reassert);
    rig.session.handle_reply(&reassert.op, &reply, true, now, now);
    rig.reply(&release.op, &Reply::default(), now);
    assert_eq!(rig.places().len(), 1);
    rig.settle();
    assert_eq!(rig.places(), []);
}

// ===== outages =====

fn with(on_unavailable: OnUnavailable) -> AcquireOptions {
    AcquireOptions { on_unavailable, ..OPTIONS }
}

fn is_refused(progress: Progress, reason: RejectReason) -> bool {
    matches!(progress, Progress::Refused { reason: why, .. } if why == reason)
}

#[test]
fn in_an_outage_the_policy_answers_newcomers() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let refused = rig.request_with(with(OnUnavailable::Refuse));
    assert_eq!(rig.progress(refused), Progress::Failed);
    for _ in 0..2 {
        let admitted = rig.request_with(with(OnUnavailable::Admit));
        assert_eq!(rig.progress(admitted), Progress::Admitted);
    }
    let local = rig.request_with(with(OnUnavailable::Local(2)));
    assert_eq!(rig.progress(local), Progress::Waiting, "two are in flight");
    assert_eq!(rig.calls(), []);
    assert!(rig.session.take_events().contains(&Event::Failed(refused)));
}

#[test]
fn an_outage_answers_those_that_join_and_leaves_those_in_the_queue() {
    for (policy, joining, waiting) in [
        (OnUnavailable::Refuse, Progress::Failed, Progress::Waiting),
        (OnUnavailable::Admit, Progress::Admitted, Progress::Admitted),
        (OnUnavailable::Local(2), Progress::Admitted, Progress::Admitted),
        (OnUnavailable::Local(0), Progress::Waiting, Progress::Waiting),
    ] {
        let mut rig = Rig::new(1);
        rig.other();
        let waits = rig.request_with(with(policy));
        rig.settle();
        let joins = rig.request_with(with(policy));
        let now = rig.now();
        rig.session.handle_unreachable(now);
        assert_eq!(rig.progress(waits), waiting, "{policy:?}");
        assert_eq!(rig.progress(joins), joining, "{policy:?}");
    }
}

#[test]
fn shares_of_the_processs_own_are_given_in_the_order_of_the_requests() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    let [a, b, c] = [(); 3].map(|()| rig.request_with(with(OnUnavailable::Local(1))));
    rig.session.handle_unreachable(now);
    assert_eq!(
        [a, b, c].map(|i| rig.progress(i)),
        [Progress::Admitted, Progress::Waiting, Progress::Waiting]
    );
    let d = rig.request_with(with(OnUnavailable::Local(1)));
    rig.leave(a);
    assert_eq!(
        [b, c, d].map(|i| rig.progress(i)),
        [Progress::Admitted, Progress::Waiting, Progress::Waiting]
    );
    rig.leave(c);
    rig.leave(b);
    assert_eq!(rig.progress(d), Progress::Admitted);
}

#[test]
fn the_newest_are_refused_where_too_many_wait_for_a_share() {
    let short = AcquireOptions { max_queue: Some(1), ..with(OnUnavailable::Local(1)) };
    let tries = AcquireOptions { max_queue: None, ..short };
    let mut rig = Rig::new(1);
    let [a, b, c] = [(); 3].map(|()| rig.request_with(short));
    let at_once = rig.request_with(tries);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(a), Progress::Admitted);
    assert_eq!(rig.progress(b), Progress::Waiting);
    assert!(is_refused(rig.progress(c), RejectReason::QueueFull));
    assert!(is_refused(rig.progress(at_once), RejectReason::Limit));
    let newcomer = rig.request_with(short);
    assert!(is_refused(rig.progress(newcomer), RejectReason::QueueFull));
    let newcomer = rig.request_with(tries);
    assert!(is_refused(rig.progress(newcomer), RejectReason::Limit));
}

#[test]
fn nothing_is_admitted_where_an_operator_paused_or_set_0() {
    for set in ["- paused", "0 open"] {
        let mut rig = Rig::new(1);
        let now = rig.now();
        rig.session.handle_override(set.parse().expect("an override"), now);
        rig.session.handle_unreachable(now);
        let admit = rig.request_with(with(OnUnavailable::Admit));
        assert_eq!(rig.progress(admit), Progress::Failed, "{set}");
        let local = rig.request_with(with(OnUnavailable::Local(3)));
        assert_eq!(rig.progress(local), Progress::Waiting, "{set}");
        // The pause is over.
        rig.session.handle_override(Override::default(), now);
        assert_eq!(rig.progress(local), Progress::Admitted, "{set}");
    }
}

#[test]
fn a_share_is_never_more_than_what_an_operator_set() {
    let mut rig = Rig::new(4);
    let now = rig.now();
    rig.session.handle_override("1 open".parse().expect("an override"), now);
    rig.session.handle_unreachable(now);
    let first = rig.request_with(with(OnUnavailable::Local(3)));
    let second = rig.request_with(with(OnUnavailable::Local(3)));
    assert_eq!(rig.progress(first), Progress::Admitted);
    assert_eq!(rig.progress(second), Progress::Waiting);
}

#[test]
fn draining_refuses_newcomers() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_override("- draining".parse().expect("an override"), now);
    let index = rig.request();
    assert!(is_refused(rig.progress(index), RejectReason::Draining));
    assert_eq!(rig.calls(), []);
    rig.leave(index);
    assert!(rig.is_over());
}

#[test]
fn an_admitted_request_is_counted_when_the_backend_is_back() {
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let index = rig.request_with(with(OnUnavailable::Admit));
    rig.progress(index);
    rig.pass(10_000);
    assert!(rig.session.is_held(index));
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    assert!(matches!(&ops[0], Op::Reassert { .. }), "{ops:?}");
    assert_eq!(rig.places(), [rig.id(index)]);
    rig.leave(index);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_call_error_lets_the_policy_answer_and_an_admitted_request_is_announced_until_it_is_counted() {
    let mut rig = Rig::new(1);
    let index = rig.request_with(with(OnUnavailable::Admit));
    let acquire = rig.call().expect("an acquire");
    let now = rig.now();
    rig.session.handle_call_error(&acquire.op, now);
    assert_eq!(rig.progress(index), Progress::Admitted);
    for _ in 0..3 {
        // What the acquire may have left there is released, too.
        let calls = rig.calls();
        let now = rig.now();
        assert!(calls.iter().any(|call| matches!(call.op, Op::Reassert { .. })), "{calls:?}");
        for call in calls {
            rig.session.handle_call_error(&call.op, now);
        }
        rig.pass(1000);
    }
    rig.settle();
    assert_eq!(rig.places(), [rig.id(index)]);
    assert!(rig.session.is_held(index));
}

#[test]
fn a_refused_release_is_tried_again() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    rig.leave(index);
    let release = rig.call().expect("a release");
    let now = rig.now();
    rig.session.handle_call_error(&release.op, now);
    assert_eq!(rig.calls(), []);
    assert!(!rig.session.is_idle());
    rig.pass(1000);
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_caller_that_waits_for_its_release_is_told() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    let now = rig.now();
    assert!(rig.session.handle_release(index, now));
    assert_eq!(rig.session.released(index), None);
    rig.settle();
    assert_eq!(rig.session.released(index), Some(true));
    assert!(rig.session.take_events().contains(&Event::Released(index)));

    let mut rig = Rig::new(1);
    let index = rig.request();
    rig.settle();
    rig.progress(index);
    let now = rig.now();
    assert!(rig.session.handle_release(index, now));
    rig.session.handle_unreachable(now);
    assert_eq!(rig.session.released(index), Some(false));
}

// ===== rule 7 =====

#[test]
fn a_request_whose_wait_is_over_has_its_final_answer() {
    let is_final = |progress| !matches!(progress, Progress::Joining | Progress::Waiting);
    let policies = [
        OnUnavailable::Refuse,
        OnUnavailable::Admit,
        OnUnavailable::Local(0),
        OnUnavailable::Local(1),
    ];
    for policy in policies {
        for (sent, answered, outage, back) in
            (0..16).map(|bits: u8| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0, bits & 8 > 0))
        {
            for max_queue in [None, Some(8)] {
                let mut rig = Rig::new(1);
                rig.other();
                let index = rig.request_with(AcquireOptions { max_queue, ..with(policy) });
                if sent {
                    let call = rig.call().expect("an acquire");
                    if answered {
                        let (now, reply) = (rig.now(), rig.carry_out(&call));
                        rig.reply(&call.op, &reply, now);
                    }
                }
                let now = rig.now();
                if outage {
                    rig.session.handle_unreachable(now);
                }
                if back {
                    rig.reconnect(Connected::default());
                }
                rig.session.handle_wait_timeout(index, now);
                let progress = rig.progress(index);
                assert!(
                    is_final(progress),
                    "{policy:?} {sent} {answered} {outage} {back} {progress:?}"
                );
                rig.leave(index);
                rig.reconnect(Connected::default());
                rig.settle();
                assert_eq!(rig.places().len(), 1, "{policy:?} {sent} {answered} {outage} {back}");
            }
        }
    }
}

// ===== operators =====

#[test]
fn a_revoked_permit_is_lost_and_a_revoked_waiter_refused() {
    let mut rig = Rig::new(1);
    let holder = rig.request();
    rig.settle();
    rig.progress(holder);
    let waiter = rig.request();
    rig.settle();
    let (held, waits, now) = (rig.id(holder), rig.id(waiter), rig.now());
    rig.session.handle_revoked(waits, now);
    assert!(is_refused(rig.progress(waiter), RejectReason::Revoked));
    rig.session.handle_revoked(held, now);
    assert!(rig.session.was_lost(holder));
    rig.settle();
    assert_eq!(rig.places(), []);
}

#[test]
fn a_waiter_that_was_revoked_under_its_old_id_is_refused() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let id = rig.id(index);
    rig.ledger.revoke(id, true);
    rig.pass(1000);
    let (now, renewal) = (rig.now(), rig.call().expect("a renewal"));
    let reply = rig.carry_out(&renewal);
    rig.reply(&renewal.op, &reply, now);
    assert!(rig.session.poll_revocation_check());
    rig.session.handle_revoked(id, now);
    rig.session.handle_revocations_known(now);
    assert!(is_refused(rig.progress(index), RejectReason::Revoked));
    rig.settle();
    assert_eq!(rig.places().len(), 1);
}

#[test]
fn waiters_ask_at_once_for_more_permits() {
    let mut rig = Rig::new(1);
    rig.other();
    let index = rig.request();
    rig.settle();
    let now = rig.now();
    rig.session.handle_override("2 open".parse().expect("an override"), now);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert_eq!(rig.session.limit_in_force(), 2);
}

// ===== the end =====

#[test]
fn a_session_whose_places_were_never_sent_is_over_at_once() {
    let mut rig = Rig::new(1);
    let index = rig.request();
    assert!(!rig.is_over());
    rig.leave(index);
    assert!(rig.is_over());
}

#[test]
fn every_place_is_released_at_the_end() {
    let mut rig = Rig::new(1);
    let [held, waiting] = [(); 2].map(|()| rig.request());
    rig.settle();
    rig.progress(held);
    let joining = rig.request();
    let now = rig.now();
    rig.session.handle_close(now);
    assert!(rig.session.was_lost(held));
    assert_eq!(rig.progress(waiting), Progress::Closed);
    assert_eq!(rig.progress(joining), Progress::Closed);
    rig.settle();
    assert_eq!(rig.places(), []);
}

mod more {
    use super::*;

    // ===== connections =====

    fn same_data() -> Connected {
        Connected { same_data: true, ..Connected::default() }
    }

    #[test]
    fn a_new_connection_to_the_same_data_asks_for_nothing_that_is_held() {
        let mut rig = Rig::new(2);
        let held = rig.request();
        rig.settle();
        rig.reconnect(same_data());
        assert_eq!(rig.calls(), []);
        assert_eq!(rig.progress(held), Progress::Held);
    }

    #[test]
    fn after_a_loss_of_data_what_is_held_is_counted_before_newcomers_are() {
        let mut rig = Rig::new(1);
        let held = rig.request();
        rig.settle();
        rig.ledger = Ledger::new();
        rig.reconnect(Connected::default());
        let newcomer = rig.request();
        let sent = rig.settle();
        let kinds: Vec<_> = sent.iter().map(std::mem::discriminant).collect();
        let renews =
            std::mem::discriminant(&Op::Renew { lease_ms: 0, ids: crate::protocol::Ids::new() });
        let proves = std::mem::discriminant(&Op::Reassert { lease_ms: 0, proofs: Vec::new() });
        assert_eq!(kinds[..2], [renews, proves], "{sent:?}");
        assert_eq!(rig.progress(held), Progress::Held);
        assert_eq!(rig.progress(newcomer), Progress::Waiting);
        assert_eq!(rig.ledger.in_use(), 1);
    }

    #[test]
    fn what_a_failover_brought_back_is_released_once_more() {
        let mut rig = Rig::new(2);
        let (kept, left) = (rig.request(), rig.request());
        rig.settle();
        let before = rig.ledger.clone();
        rig.leave(left);
        rig.settle();
        rig.ledger = before;
        rig.reconnect(Connected::default());
        rig.settle();
        assert_eq!(rig.places(), [rig.id(kept)]);
    }

    #[test]
    fn a_late_reply_that_brings_a_place_back_is_answered_by_a_release() {
        let mut rig = Rig::new(2);
        let held = rig.request();
        rig.settle();
        rig.ledger = Ledger::new();
        rig.reconnect(Connected::default());
        let renewal = rig.call().expect("a renewal");
        let (sent, reply) = (rig.now(), rig.carry_out(&renewal));
        rig.reply(&renewal.op, &reply, sent);
        assert!(rig.session.poll_revocation_check());
        rig.session.handle_revocations_known(sent);
        let proof = rig.call().expect("a proof");
        // It leaves, and its release is carried out before the proof.
        rig.leave(held);
        rig.settle();
        let reply = rig.carry_out(&proof);
        assert_eq!(reply.statuses[..], [PlaceStatus::Held]);
        rig.session.handle_reply(&proof.op, &reply, true, sent, rig.now());
        rig.settle();
        assert!(rig.ledger.is_empty());
    }

    // ===== outages =====

    fn with(on_unavailable: OnUnavailable, max_queue: Option<u32>) -> AcquireOptions {
        AcquireOptions { on_unavailable, max_queue, ..OPTIONS }
    }

    fn outage(limit: u32) -> Rig {
        let mut rig = Rig::new(limit);
        rig.session.handle_unreachable(rig.now());
        rig
    }

    #[test]
    fn a_local_share_is_given_out_in_order_and_the_newest_are_refused() {
        let mut rig = outage(9);
        let options = with(OnUnavailable::Local(1), Some(2));
        let requests: Vec<_> = (0..4).map(|_| rig.request_with(options)).collect();
        let seen: Vec<_> = requests.iter().map(|index| rig.progress(*index)).collect();
        assert_eq!(seen[..3], [Progress::Admitted, Progress::Waiting, Progress::Waiting]);
        let full = |progress| {
            matches!(progress, Progress::Refused { reason: RejectReason::QueueFull, .. })
        };
        assert!(full(seen[3]), "{seen:?}");
        rig.leave(requests[0]);
        assert_eq!(rig.progress(requests[1]), Progress::Admitted);
        assert_eq!(rig.progress(requests[2]), Progress::Waiting);
        let now = rig.now();
        rig.session.handle_wait_timeout(requests[2], now);
        let timed_out = |progress| {
            matches!(progress, Progress::Refused { reason: RejectReason::QueueTimeout, .. })
        };
        assert!(timed_out(rig.progress(requests[2])));
    }

    #[test]
    fn a_limit_of_zero_lets_nobody_pass_in_an_outage() {
        for policy in [OnUnavailable::Admit, OnUnavailable::Local(3)] {
            let mut rig = outage(3);
            let now = rig.now();
            let none = Override { limit: Some(0), ..Override::default() };
            rig.session.handle_override(none, now);
            let request = rig.request_with(with(policy, Some(8)));
            rig.session.handle_wait_timeout(request, now);
            let progress = rig.progress(request);
            assert!(
                matches!(progress, Progress::Failed | Progress::Refused { .. }),
                "{progress:?}"
            );
        }
    }

    #[test]
    fn a_refused_request_leaves_nothing_behind_in_an_outage() {
        let mut rig = outage(3);
        let request = rig.request();
        assert_eq!(rig.progress(request), Progress::Failed);
        rig.leave(request);
        assert!(rig.is_over());
    }

    #[test]
    fn what_was_admitted_after_an_error_is_announced_until_it_is_counted() {
        let mut rig = Rig::new(3);
        let request = rig.request_with(with(OnUnavailable::Admit, Some(8)));
        let call = rig.call().expect("an acquire");
        let now = rig.now();
        rig.session.handle_call_error(&call.op, now);
        assert_eq!(rig.progress(request), Progress::Admitted);
        for _ in 0..5 {
            for call in rig.calls() {
                let now = rig.now();
                rig.session.handle_call_error(&call.op, now);
            }
            rig.pass(500);
        }
        assert_eq!(rig.ledger.in_use(), 0);
        rig.live(1500);
        assert_eq!(rig.ledger.in_use(), 1);
    }

    #[test]
    fn a_permit_that_was_not_taken_in_time_is_asked_for_again() {
        let mut rig = Rig::new(1);
        let (limit, now) = (rig.limit, rig.now());
        let index = rig.session.handle_request(limit, OPTIONS, now).expect("room");
        rig.settle();
        rig.pass(3500);
        assert_eq!(rig.progress(index), Progress::Waiting);
        rig.live(100);
        assert_eq!(rig.progress(index), Progress::Held);
    }

    #[test]
    fn a_new_connection_does_not_end_a_quarantine_early() {
        let mut rig = Rig::new(1);
        let began = Some(rig.now());
        let quarantine = |lost_at| Quarantine { is_on: true, lost_at };
        rig.reconnect(Connected { quarantine: quarantine(began), ..same_data() });
        rig.pass(60_000);
        let held = rig.request();
        rig.settle();
        rig.ledger = Ledger::new();
        rig.live(1100);
        assert_eq!(rig.progress(held), Progress::Held);
        rig.reconnect(Connected { quarantine: quarantine(began), ..same_data() });
        rig.request();
        let joins = rig.calls();
        assert!(joins.iter().all(|call| call.limit == 0), "{joins:?}");
    }

    #[test]
    fn a_late_proof_of_a_permit_that_is_being_released_is_answered_by_a_release() {
        let mut rig = Rig::new(2);
        let held = rig.request();
        rig.settle();
        rig.ledger = Ledger::new();
        rig.reconnect(Connected::default());
        let renewal = rig.call().expect("a renewal");
        let (sent, reply) = (rig.now(), rig.carry_out(&renewal));
        rig.reply(&renewal.op, &reply, sent);
        assert!(rig.session.poll_revocation_check());
        rig.session.handle_revocations_known(sent);
        let proof = rig.call().expect("a proof");
        assert!(rig.session.handle_release(held, sent));
        let release = rig.call().expect("a release");
        rig.carry_out(&release);
        let reply = rig.carry_out(&proof);
        rig.session.handle_reply(&proof.op, &reply, true, sent, rig.now());
        rig.settle();
        assert!(rig.ledger.is_empty());
    }

    #[test]
    fn a_place_that_was_revoked_before_it_was_taken_is_looked_for_after_a_failover() {
        let mut rig = Rig::new(2);
        let (limit, now) = (rig.limit, rig.now());
        let index = rig.session.handle_request(limit, OPTIONS, now).expect("room");
        rig.settle();
        let (before, id) = (rig.ledger.clone(), rig.id(index));
        rig.session.handle_revoked(id, now);
        rig.settle();
        rig.leave(index);
        rig.ledger = before;
        rig.reconnect(Connected::default());
        rig.settle();
        assert!(rig.ledger.is_empty());
    }

    #[test]
    fn the_table_of_places_shrinks_after_a_burst() {
        let mut rig = outage(9);
        let kept = rig.request_with(with(OnUnavailable::Admit, None));
        let burst: Vec<_> =
            (0..1000).map(|_| rig.request_with(with(OnUnavailable::Admit, None))).collect();
        assert_eq!(rig.session.index_bound(), 1001);
        burst.into_iter().for_each(|index| rig.leave(index));
        assert_eq!(rig.session.index_bound(), 1);
        assert_eq!(rig.progress(kept), Progress::Admitted);
    }

    #[test]
    fn a_permit_that_is_lost_in_an_outage_frees_its_share_for_the_next() {
        let mut rig = Rig::new(1);
        let options = with(OnUnavailable::Local(1), Some(8));
        let one = rig.request_with(options);
        rig.settle();
        assert_eq!(rig.progress(one), Progress::Held);
        let now = rig.now();
        rig.session.handle_unreachable(now);
        let two = rig.request_with(options);
        rig.pass(2000);
        assert_eq!(rig.progress(two), Progress::Waiting);
        rig.pass(1500);
        assert_eq!(rig.progress(two), Progress::Admitted);
    }
}
