//! Permits that are passed on, kept and recalled.

use super::*;
use crate::protocol::claim::{Claim, Tenant};
use crate::protocol::ledger::Hint;
use crate::protocol::overrides::{Mode, Override};

const REUSE: AcquireOptions = AcquireOptions { reuse_ms: 50, ..OPTIONS };

fn claim(tenant: u32) -> Option<Claim> {
    Some(Claim::new(Tenant::of_hash(u64::from(tenant))))
}

impl Rig {
    /// A request that has its permit.
    fn holder(&mut self, options: AcquireOptions) -> usize {
        let index = self.request_with(options);
        self.settle();
        assert_eq!(self.progress(index), Progress::Held);
        index
    }

    fn recall(&mut self) {
        let now = self.now();
        self.session.handle_recall(now);
    }

    /// A request comes and has its permit, and nothing is sent for it.
    fn reuses(&mut self, options: AcquireOptions) -> bool {
        let index = self.request_with(options);
        let is_held = self.progress(index) == Progress::Held;
        assert_eq!(is_held, !self.session.places.get(index).unwrap().is_joining());
        self.leave(index);
        is_held
    }

    /// Permits of the other process.
    fn in_use_elsewhere(&self) -> usize {
        let places = self.ledger.places();
        places.filter(|(id, _, ticket)| id.node == OTHER && ticket.is_none()).count()
    }

    fn kept(&self) -> usize {
        self.session.kept()
    }
}

/// A session that keeps the permit of its last request.
fn keeper(limit: u32) -> Rig {
    let mut rig = Rig::new(limit);
    let held = rig.holder(REUSE);
    rig.leave(held);
    assert_eq!((rig.kept(), rig.calls()), (1, vec![]), "kept, and nothing is sent");
    rig
}

#[test]
fn a_request_that_comes_takes_the_permit_that_was_given_back() {
    let mut rig = keeper(1);
    let (before, n) = (rig.places(), rig.session.places.iter().next().unwrap().1.n);
    for _ in 0..100 {
        let next = rig.request_with(REUSE);
        assert_eq!(rig.progress(next), Progress::Held);
        assert_eq!((rig.kept(), rig.id(next).n), (0, n));
        rig.leave(next);
    }
    assert_eq!((rig.calls(), rig.places()), (vec![], before));
}

#[test]
fn a_request_that_does_not_ask_for_it_gives_its_permit_back() {
    let mut rig = keeper(1);
    let held = rig.holder(OPTIONS);
    assert_eq!(rig.kept(), 0, "it went to the backend for this request");
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert!(rig.ledger.is_empty());
}

#[test]
fn a_request_that_waits_is_handed_the_permit_in_its_turn() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    let waits: Vec<_> = (0..3).map(|_| rig.request_with(REUSE)).collect();
    rig.settle();
    let (n, mut has) = (rig.id(first).n, first);
    for next in waits {
        assert_eq!(rig.progress(next), Progress::Waiting);
        rig.leave(has);
        assert_eq!((rig.progress(next), rig.id(next).n), (Progress::Held, n));
        let sent = rig.settle();
        assert!(matches!(&sent[..], [Op::Release { ids }] if ids.len() == 1), "{sent:?}");
        assert_eq!(rig.ledger.in_use(), 1);
        has = next;
    }
    // A later request has the index of the first, and another number.
    let other = rig.request_with(REUSE);
    assert_ne!(rig.id(other).n, n);
    rig.settle();
    rig.leave(has);
    assert_eq!((rig.progress(other), rig.id(other).n), (Progress::Held, n));
    rig.settle();
    rig.leave(other);
    rig.live(100);
    assert!(rig.ledger.is_empty() && rig.session.places.is_empty(), "nothing is left");
}

#[test]
fn the_handed_permit_is_renewed_lost_and_revoked_under_its_number() {
    let handed = || {
        let mut rig = Rig::new(1);
        let first = rig.holder(REUSE);
        let next = rig.request_with(REUSE);
        rig.settle();
        rig.leave(first);
        rig.settle();
        assert_eq!(rig.progress(next), Progress::Held);
        (rig, next)
    };
    let (mut rig, next) = handed();
    rig.live(10_000);
    assert_eq!((rig.progress(next), rig.ledger.in_use()), (Progress::Held, 1));
    let id = rig.id(next);
    let now = rig.now();
    assert_eq!(rig.session.held_for(id, now), Some(ms(10_000)));
    rig.session.handle_revoked(id, now);
    assert!(rig.session.was_lost(next));
    let (mut rig, next) = handed();
    rig.pass(3000);
    assert!(rig.session.was_lost(next), "its lease ended");
}

#[test]
fn a_request_that_has_not_been_answered_is_handed_the_permit() {
    for is_sent in [true, false] {
        let mut rig = Rig::new(1);
        let first = rig.holder(REUSE);
        let next = rig.request_with(REUSE);
        let (call, sent) = (is_sent.then(|| rig.call().unwrap()), rig.now());
        rig.leave(first);
        assert_eq!(rig.progress(next), Progress::Held);
        if let Some(call) = call {
            let reply = rig.carry_out(&call);
            rig.reply(&call.op, &reply, sent);
        }
        rig.settle();
        assert_eq!((rig.progress(next), rig.ledger.in_use()), (Progress::Held, 1));
        assert_eq!(rig.ledger.waiting(), 0, "nothing of it is left in the queue");
    }
}

#[test]
fn what_nobody_uses_is_given_back() {
    let mut rig = keeper(5);
    rig.pass(50);
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert!(rig.ledger.is_empty());
}

#[test]
fn what_is_used_again_and_again_is_asked_about_forty_times_a_second() {
    let mut rig = keeper(4);
    let (mut calls, mut places) = (0, 0);
    for _ in 0..1000 {
        rig.pass(1);
        assert!(rig.reuses(REUSE), "at {} ms", rig.now_ms);
        for op in rig.settle() {
            let Op::Renew { ids, .. } = op else { panic!("{op:?}") };
            (calls, places) = (calls + 1, places + ids.len());
        }
    }
    assert!((38..=42).contains(&calls), "{calls} calls");
    assert_eq!(calls, places, "of one place each");
}

#[test]
fn a_question_renews_one_of_those_that_wait() {
    let mut rig = Rig::new(1);
    let mut has = rig.holder(REUSE);
    let waits: Vec<_> = (0..8).map(|_| rig.request_with(REUSE)).collect();
    rig.settle();
    let mut renewed = Vec::new();
    for next in waits {
        rig.pass(10);
        rig.leave(has);
        assert_eq!(rig.progress(next), Progress::Held, "though it came long ago");
        has = next;
        let ops = rig.settle().into_iter();
        renewed.extend(ops.filter_map(|op| match op {
            Op::Renew { ids, .. } => Some(ids.len()),
            _ => None,
        }));
    }
    assert_eq!(renewed, [2, 2]);
}

#[test]
fn a_recall_ends_it_until_a_later_call_says_that_nobody_else_waits() {
    let mut rig = keeper(1);
    let other = rig.other();
    assert_eq!(rig.recalled, [NODE]);
    rig.recall();
    assert_eq!((rig.settle().len(), rig.kept()), (1, 0));
    assert_eq!(rig.places(), [other]);
    assert!(!rig.reuses(REUSE));
    rig.settle();
    rig.other_leaves(other);
    rig.pass(1);
    // The reply says that nobody waits.
    let held = rig.holder(REUSE);
    rig.leave(held);
    assert_eq!(rig.kept(), 1);
}

#[test]
fn a_reply_to_what_was_sent_before_a_recall_does_not_undo_it() {
    let mut rig = Rig::new(2);
    let held = rig.request_with(REUSE);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    let reply = rig.carry_out(&call);
    rig.recall();
    rig.reply(&call.op, &reply, sent);
    assert_eq!(rig.progress(held), Progress::Held);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn without_a_recall_it_ends_when_the_question_is_answered() {
    let mut rig = keeper(1);
    rig.other();
    let mut passed_until = 0;
    for at in 1..200 {
        rig.pass(1);
        if rig.reuses(REUSE) {
            passed_until = at;
        }
        rig.settle();
    }
    assert!((20..=50).contains(&passed_until), "{passed_until} ms");
    assert_eq!(rig.in_use_elsewhere(), 1);
}

#[test]
fn without_any_answer_it_ends_after_its_time() {
    let mut rig = keeper(1);
    let mut passed_until = 0;
    for at in 1..200 {
        rig.pass(1);
        if rig.reuses(REUSE) {
            passed_until = at;
        }
        drop(rig.calls());
    }
    assert_eq!(passed_until, 49);
}

#[test]
fn who_waits_of_another_process_is_not_taken_for_ones_own() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    rig.other();
    let own = rig.request_with(REUSE);
    // The reply counts two: the other's, and this one.
    rig.settle();
    rig.leave(first);
    assert_eq!(rig.progress(own), Progress::Waiting, "it is not its turn");
    rig.settle();
    assert_eq!(rig.in_use_elsewhere(), 1);
}

#[test]
fn places_that_are_only_sent_do_not_count_as_ones_own() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    // Another process waits; and three of this process are on their way behind a renewal that says one waits.
    rig.other();
    rig.pass(1000);
    let (renewal, sent) = (rig.call().unwrap(), rig.now());
    let own: Vec<_> = (0..3).map(|_| rig.request_with(REUSE)).collect();
    let _ = rig.call().expect("they are sent");
    let reply = rig.carry_out(&renewal);
    assert_eq!(reply.waiting, 1);
    rig.reply(&renewal.op, &reply, sent);
    rig.leave(first);
    assert!(own.iter().all(|index| rig.progress(*index) != Progress::Held));
}

#[test]
fn a_hint_that_comes_takes_its_place_out_of_what_stands_there() {
    let mut rig = Rig::new(1);
    let first = rig.other();
    let own = rig.request_with(REUSE);
    rig.settle();
    let grant = rig.other_leaves(first)[0];
    rig.other();
    rig.hint(grant);
    assert_eq!(rig.progress(own), Progress::Held);
    rig.pass(1000);
    // One waits, and it is not this process's.
    rig.settle();
    rig.leave(own);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn nor_does_a_place_stand_there_whose_hint_was_handled_before_its_reply() {
    for renewed in [false, true] {
        let mut rig = Rig::new(1);
        let first = rig.other();
        let own = rig.request_with(REUSE);
        if renewed {
            rig.settle();
            rig.pass(1000);
        }
        let (call, sent) = (rig.call().unwrap(), rig.now());
        let reply = rig.carry_out(&call);
        assert!(matches!(reply.statuses[..], [PlaceStatus::Waiting(_)]), "{reply:?}");
        let grant = rig.other_leaves(first)[0];
        rig.hint(grant);
        rig.reply(&call.op, &reply, sent);
        assert_eq!(rig.progress(own), Progress::Held);
        rig.other();
        let next = rig.request_with(REUSE);
        // Two wait, and one of them is this process's.
        let (call, sent) = (rig.call().unwrap(), rig.now());
        let reply = rig.carry_out(&call);
        rig.reply(&call.op, &reply, sent);
        rig.leave(own);
        assert_eq!(rig.progress(next), Progress::Waiting, "it is not its turn");
        rig.settle();
        assert_eq!(rig.in_use_elsewhere(), 1);
    }
}

#[test]
fn what_is_above_the_limit_is_not_passed_on() {
    let mut rig = Rig::new(3);
    let held: Vec<_> = (0..3).map(|_| rig.holder(REUSE)).collect();
    rig.limit = 1;
    let last = rig.request_with(REUSE);
    rig.settle();
    for index in held {
        rig.leave(index);
        rig.settle();
    }
    assert_eq!((rig.progress(last), rig.ledger.in_use()), (Progress::Held, 1));
}

#[test]
fn nor_when_it_is_above_because_of_an_outage() {
    let admit = AcquireOptions { on_unavailable: OnUnavailable::Admit, ..REUSE };
    let mut rig = Rig::new(1);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    let admitted: Vec<_> = (0..3).map(|_| rig.request_with(admit)).collect();
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!(rig.ledger.in_use(), 3, "they are counted");
    for (left, index) in (0..3).rev().zip(admitted) {
        rig.leave(index);
        assert_eq!(rig.kept(), 0, "{left} are left");
        rig.settle();
    }
    assert!(rig.ledger.is_empty());
}

#[test]
fn a_renewal_that_finds_more_in_use_than_the_limit_ends_it() {
    let mut rig = keeper(1);
    // As another process does that counts what it let pass in an outage.
    let caller = rig.ask(OTHER, 1);
    let id = PlaceId { node: OTHER, poll_only: false, n: 9, claim: None };
    rig.ledger.reassert(caller, 3_000_000, &[(id, u64::MAX >> 20)], &mut |_, _| true);
    assert_eq!(rig.ledger.in_use(), 2);
    let mut last = 0;
    for at in 1..100 {
        rig.pass(1);
        if rig.reuses(REUSE) {
            last = at;
        }
        rig.settle();
    }
    assert!(last <= 26, "{last}");
    assert_eq!(rig.places(), [id]);
}

#[test]
fn a_lower_limit_of_an_operator_ends_it_and_a_pause_does() {
    for (mode, limit) in [(Mode::Open, Some(1)), (Mode::Paused, None)] {
        let mut rig = Rig::new(2);
        let held: Vec<_> = (0..2).map(|_| rig.holder(REUSE)).collect();
        held.into_iter().for_each(|index| rig.leave(index));
        assert_eq!(rig.kept(), 2);
        let now = rig.now();
        rig.session.handle_override(Override { mode, limit, ..Override::default() }, now);
        rig.settle();
        assert_eq!((rig.kept(), rig.ledger.in_use()), (0, 0), "{mode:?}");
    }
}

#[test]
fn a_drained_semaphore_gives_no_kept_permit_to_a_newcomer() {
    let mut rig = keeper(2);
    let now = rig.now();
    rig.session.handle_override(Override { mode: Mode::Draining, ..Override::default() }, now);
    let index = rig.request_with(REUSE);
    assert!(is_refused(rig.progress(index), RejectReason::Draining));
}

#[test]
fn other_terms_take_no_kept_permit_and_let_it_go() {
    for options in [
        AcquireOptions { lease: ms(5000), ..REUSE },
        AcquireOptions { max_queue: None, ..REUSE },
        AcquireOptions { claim: claim(1), ..REUSE },
    ] {
        let mut rig = keeper(1);
        let index = rig.request_with(options);
        assert_eq!(rig.progress(index), Progress::Joining);
        rig.settle();
        assert_eq!((rig.progress(index), rig.kept()), (Progress::Held, 0), "{options:?}");
    }
    let mut rig = keeper(1);
    rig.limit = 2;
    assert!(!rig.reuses(REUSE));
}

#[test]
fn a_request_that_comes_does_not_pass_one_that_could_not_use_the_kept_permit() {
    let mut rig = keeper(1);
    let first = rig.request_with(OPTIONS);
    let second = rig.request_with(REUSE);
    assert_eq!(rig.progress(second), Progress::Joining, "the other one came before it");
    rig.settle();
    assert_eq!((rig.progress(first), rig.progress(second)), (Progress::Held, Progress::Waiting));
}

#[test]
fn among_tenants_only_the_backend_says_who_is_next() {
    let of = |tenant| AcquireOptions { claim: claim(tenant), ..REUSE };
    let mut rig = Rig::new(1);
    let first = rig.holder(of(1));
    let [same, other] = [1, 2].map(|tenant| rig.request_with(of(tenant)));
    rig.settle();
    rig.leave(first);
    assert_eq!((rig.progress(same), rig.progress(other)), (Progress::Waiting, Progress::Waiting));
    let n = rig.id(same).n;
    rig.settle();
    assert_eq!((rig.progress(same), rig.id(same).n), (Progress::Held, n), "by the backend");
    // Of one tenant, the permit is passed on.
    let mut rig = Rig::new(1);
    let first = rig.holder(of(1));
    let next = rig.request_with(of(1));
    rig.settle();
    rig.leave(first);
    assert_eq!(rig.progress(next), Progress::Held);
}

#[test]
fn a_short_reply_to_places_of_tenants_says_nothing_of_who_waits() {
    let mut rig = Rig::new(2);
    let held = rig.request_with(AcquireOptions { claim: claim(1), ..REUSE });
    let (call, now) = (rig.call().unwrap(), rig.now());
    let lease_end = EPOCH_MS + 3000;
    let reply = Reply { lease_end, statuses: smallvec![PlaceStatus::Held], ..Reply::default() };
    rig.reply(&call.op, &reply, now);
    assert_eq!(rig.progress(held), Progress::Held);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn requests_with_and_without_it_in_turn_keep_what_is_known() {
    let mut rig = Rig::new(4);
    let waits = rig.holder(OPTIONS);
    for _ in 0..10 {
        let [with, without] = [REUSE, OPTIONS].map(|options| rig.holder(options));
        rig.leave(without);
        rig.settle();
        rig.leave(with);
        assert_eq!(rig.kept(), 1);
        assert!(rig.reuses(REUSE));
    }
    rig.leave(waits);
}

#[test]
fn those_that_wait_again_after_an_outage_are_served_before_what_is_kept() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    let waits = rig.request_with(REUSE);
    rig.settle();
    let now = rig.now();
    rig.session.handle_unreachable(now);
    rig.reconnect(same_data());
    rig.settle();
    rig.leave(first);
    rig.settle();
    assert_eq!((rig.progress(waits), rig.kept()), (Progress::Held, 0));
}

#[test]
fn what_is_kept_does_not_outlive_its_connection_or_its_semaphore() {
    let mut rig = keeper(1);
    rig.reconnect(Connected::default());
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert!(rig.ledger.is_empty());
    let mut rig = keeper(1);
    let now = rig.now();
    rig.session.handle_close(now);
    rig.settle();
    assert!(rig.ledger.is_empty());
    let mut rig = keeper(1);
    rig.session.handle_unreachable(now);
    assert_eq!((rig.kept(), rig.session.in_flight), (0, 0));
}

#[test]
fn a_kept_permit_that_is_lost_concerns_nobody() {
    let mut rig = keeper(1);
    let id = rig.session.places.iter().next().unwrap().1.id(NODE);
    let now = rig.now();
    rig.session.take_events();
    rig.session.handle_revoked(id, now);
    assert!(rig.session.take_events().is_empty());
    assert!(!rig.reuses(REUSE));
}

#[test]
fn a_permit_whose_request_never_took_it_is_kept_like_any_other() {
    let mut rig = Rig::new(1);
    let index = rig.session.handle_request(1, REUSE, rig.now()).unwrap();
    rig.settle();
    rig.leave(index);
    assert_eq!(rig.kept(), 1);
    drop(rig.calls());
    // Whatever happens to it, no request waits for it.
    rig.pass(4000);
    assert_eq!(rig.session.waiting, 0);
}

#[test]
fn a_permit_that_was_found_gone_is_not_passed_on_and_a_hot_one_is_found_so() {
    let mut rig = keeper(1);
    rig.ledger = Ledger::new();
    let mut asked = 0;
    for _ in 0..100 {
        rig.pass(1);
        rig.reuses(REUSE);
        let (calls, now) = (rig.calls(), rig.now());
        for call in calls {
            asked += u32::from(matches!(call.op, Op::Renew { .. }));
            let reply = rig.carry_out(&call);
            // Its request has changed meanwhile.
            rig.pass(1);
            rig.reuses(REUSE);
            rig.reply(&call.op, &reply, now);
        }
        if rig.session.poll_revocation_check().is_some() {
            rig.calls();
            assert_eq!(rig.kept(), 0);
            assert!(!rig.reuses(REUSE));
            return assert!(asked <= 2, "{asked}");
        }
    }
    panic!("it was never believed to be gone");
}

#[test]
fn a_lingering_permit_is_not_passed_on() {
    let mut rig = Rig::new(2);
    let held = rig.holder(AcquireOptions { linger_ms: 200, ..REUSE });
    rig.session.handle_break_off(held);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
    rig.live(300);
    assert!(rig.ledger.is_empty());
}

#[test]
fn the_permit_that_was_used_last_is_used_first_and_the_others_go() {
    let mut rig = Rig::new(4);
    let held: Vec<_> = (0..4).map(|_| rig.holder(REUSE)).collect();
    let last = rig.id(held[3]).n;
    held.into_iter().for_each(|index| rig.leave(index));
    for _ in 0..6 {
        rig.pass(10);
        let index = rig.request_with(REUSE);
        assert_eq!(rig.id(index).n, last);
        rig.leave(index);
        rig.settle();
    }
    assert_eq!((rig.kept(), rig.ledger.in_use()), (1, 1));
}

#[test]
fn a_hint_for_the_number_of_a_place_that_was_left_releases_it() {
    let mut rig = Rig::new(1);
    let first = rig.holder(REUSE);
    let next = rig.request_with(REUSE);
    rig.settle();
    let n = rig.id(next).n;
    rig.leave(first);
    let now = rig.now();
    rig.session.handle_hint(Hint { n, claim: None, lease_end: EPOCH_MS + 3000 }, now);
    rig.settle();
    assert_eq!((rig.progress(next), rig.ledger.in_use()), (Progress::Held, 1));
}

#[test]
fn who_waits_is_not_passed_though_releases_of_ones_own_were_given_up() {
    let mut rig = Rig::new(1);
    let held = rig.holder(REUSE);
    let gone: Vec<_> = (0..3).map(|_| rig.request_with(REUSE)).collect();
    rig.settle();
    // They leave while the backend refuses all calls, for more than two leases.
    gone.into_iter().for_each(|index| rig.leave(index));
    for _ in 0..120 {
        rig.pass(100);
        let now = rig.now();
        for call in rig.calls() {
            rig.session.handle_call_error(&call.op, now);
        }
    }
    rig.leave(held);
    rig.live(1000);
    let own = rig.holder(REUSE);
    rig.pass(1);
    rig.other();
    rig.recall();
    rig.pass(1);
    let next = rig.request_with(REUSE);
    rig.settle();
    rig.leave(own);
    assert_eq!(rig.progress(next), Progress::Waiting, "it is not its turn");
}

#[test]
fn a_pause_or_a_lower_limit_is_not_undone_by_a_short_reply_to_what_was_sent_before() {
    for (mode, limit) in [(Mode::Paused, None), (Mode::Open, Some(1))] {
        let mut rig = Rig::new(2);
        let held: Vec<_> = (0..2).map(|_| rig.holder(REUSE)).collect();
        rig.pass(1000);
        let (call, sent) = (rig.call().unwrap(), rig.now());
        let now = rig.now();
        rig.session.handle_override(Override { mode, limit, ..Override::default() }, now);
        let statuses = smallvec![PlaceStatus::Held; 2];
        let reply = Reply { lease_end: EPOCH_MS + 4000, statuses, ..Reply::default() };
        rig.reply(&call.op, &reply, sent);
        rig.leave(held[0]);
        assert_eq!(rig.kept(), 0, "{mode:?}");
    }
}

#[test]
fn a_request_is_judged_by_its_own_limit_whatever_others_of_its_process_know() {
    let mut rig = Rig::new(2);
    let small = rig.holder(REUSE);
    rig.limit = 10;
    for _ in 0..8 {
        rig.holder(OPTIONS);
    }
    rig.pass(5);
    rig.leave(small);
    rig.limit = 2;
    let next = rig.request_with(REUSE);
    rig.settle();
    assert_eq!(rig.progress(next), Progress::Waiting, "eight are in use");
}

#[test]
fn a_short_reply_under_another_limit_says_nothing() {
    let mut rig = Rig::new(10);
    let big = rig.request_with(OPTIONS);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    rig.pass(1);
    rig.limit = 2;
    let small = rig.request_with(REUSE);
    let statuses = smallvec![PlaceStatus::Held];
    let reply = Reply { lease_end: EPOCH_MS + 3000, statuses, ..Reply::default() };
    rig.reply(&call.op, &reply, sent);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    // Its own reply counts, and shows more in use than its limit.
    let mut reply = rig.carry_out(&call);
    reply.in_use = 3;
    rig.reply(&call.op, &reply, sent);
    rig.leave(small);
    assert_eq!(rig.kept(), 0);
    rig.leave(big);
}

#[test]
fn nothing_is_kept_that_no_recall_reaches_or_while_a_semaphore_is_drained() {
    let mut rig = Rig::new(2);
    rig.reconnect(Connected { poll_only: true, ..same_data() });
    let held = rig.holder(REUSE);
    rig.reconnect(same_data());
    let other = rig.holder(REUSE);
    rig.leave(held);
    assert_eq!(rig.kept(), 0, "it is poll only");
    let now = rig.now();
    rig.session.handle_override(Override { mode: Mode::Draining, ..Override::default() }, now);
    rig.leave(other);
    assert_eq!(rig.kept(), 0, "nobody can take it");
}

#[test]
fn a_permit_in_flight_by_policy_ends_it() {
    let admit = AcquireOptions { on_unavailable: OnUnavailable::Admit, ..REUSE };
    let mut rig = Rig::new(2);
    let held = rig.holder(admit);
    let next = rig.request_with(admit);
    let (call, now) = (rig.call().unwrap(), rig.now());
    rig.session.handle_call_error(&call.op, now);
    assert_eq!(rig.progress(next), Progress::Admitted);
    rig.leave(held);
    assert_eq!(rig.kept(), 0);
}

#[test]
fn what_is_lost_of_what_is_kept_does_not_stand_in_the_way() {
    let mut rig = Rig::new(2);
    let held: Vec<_> = (0..2).map(|_| rig.holder(REUSE)).collect();
    let last = rig.id(held[1]);
    held.into_iter().for_each(|index| rig.leave(index));
    let now = rig.now();
    rig.session.handle_revoked(last, now);
    assert_eq!(rig.kept(), 1);
    assert!(rig.reuses(REUSE));
}

#[test]
fn a_place_whose_lease_has_ended_there_does_not_stand_in_the_queue() {
    let mut rig = Rig::new(1);
    rig.holder(REUSE);
    let waits = rig.request_with(REUSE);
    rig.settle();
    // All but newcomers is refused until the leases have ended.
    let live = |rig: &mut Rig| {
        let (calls, now) = (rig.calls(), rig.now());
        for call in calls {
            if matches!(call.op, Op::Acquire { .. }) {
                let reply = rig.carry_out(&call);
                rig.reply(&call.op, &reply, now);
            } else {
                rig.session.handle_call_error(&call.op, now);
            }
        }
    };
    for _ in 0..5 {
        rig.pass(1000);
        live(&mut rig);
    }
    let next = rig.request_with(REUSE);
    live(&mut rig);
    assert_eq!(rig.progress(waits), Progress::Held, "it came first");
    rig.other();
    // One waits, and it is not this process's.
    let (id, sent) = (rig.id(waits), rig.now());
    let op = Op::Renew { lease_ms: 3000, ids: Ids::from_buf([id]) };
    let reply = rig.carry_out(&Call { limit: 1, headroom: 0, recalls: false, op: op.clone() });
    assert_eq!(reply.waiting, 1);
    rig.reply(&op, &reply, sent);
    rig.leave(waits);
    assert_ne!(rig.progress(next), Progress::Held, "it is not its turn");
}

/// A request has the only permit, and the place of the one before it is on its way: the call, and when it was sent.
fn with_a_spare_place(limit: u32) -> (Rig, usize, Call, Time) {
    let mut rig = Rig::new(limit);
    let first = rig.holder(REUSE);
    let second = rig.request_with(REUSE);
    let (call, sent) = (rig.call().expect("it asks"), rig.now());
    rig.leave(first);
    assert_eq!((rig.progress(second), rig.calls()), (Progress::Held, vec![]));
    (rig, second, call, sent)
}

#[test]
fn a_place_on_its_way_whose_request_was_handed_a_permit_is_there_for_the_next_request() {
    let (mut rig, second, call, sent) = with_a_spare_place(4);
    let third = rig.request_with(REUSE);
    assert_eq!((rig.progress(third), rig.calls()), (Progress::Joining, vec![]), "it is asked for");
    let reply = rig.carry_out(&call);
    rig.reply(&call.op, &reply, sent);
    assert_eq!((rig.progress(third), rig.ledger.in_use()), (Progress::Held, 2));
    // One more than there are places asks.
    let fourth = rig.holder(REUSE);
    [second, third, fourth].into_iter().for_each(|index| rig.leave(index));
    assert_eq!((rig.kept(), rig.calls()), (3, vec![]));
    rig.live(100);
    assert!(rig.ledger.is_empty() && rig.session.places.is_empty());
}

#[test]
fn many_requests_in_turn_ask_for_no_more_permits_than_they_are() {
    let mut rig = Rig::new(1000);
    let mut has = VecDeque::new();
    let mut calls = VecDeque::new();
    // Answers take five turns; in each a request of eight leaves, and another one comes.
    for turn in 0..500 {
        rig.pass(u64::from(turn % 4 == 0));
        if has.len() == 8 {
            let index = has.pop_front().unwrap();
            rig.leave(index);
        }
        has.push_back(rig.request_with(REUSE));
        while let Some(call) = rig.call() {
            calls.push_back((turn, rig.carry_out(&call), call, rig.now()));
        }
        while calls.front().is_some_and(|(at, ..)| at + 5 <= turn) {
            let (_, reply, call, sent) = calls.pop_front().unwrap();
            rig.reply(&call.op, &reply, sent);
        }
        assert!(rig.session.places.len() <= 8 && rig.ledger.in_use() <= 8);
    }
    assert!(has.iter().all(|index| rig.progress(*index) == Progress::Held));
}

#[test]
fn a_place_without_a_request_that_would_have_to_wait_goes() {
    let (mut rig, second, call, sent) = with_a_spare_place(1);
    let reply = rig.carry_out(&call);
    assert!(matches!(reply.statuses[..], [PlaceStatus::Waiting(_)]), "{reply:?}");
    rig.reply(&call.op, &reply, sent);
    rig.settle();
    assert_eq!((rig.ledger.in_use(), rig.ledger.waiting()), (1, 0));
    rig.leave(second);
    rig.live(100);
    assert!(rig.ledger.is_empty() && rig.session.places.is_empty());
    // One that is refused stands nowhere.
    let (mut rig, _, call, sent) = with_a_spare_place(1);
    let mut reply = rig.carry_out(&call);
    rig.ledger = Ledger::new();
    reply.statuses = smallvec![PlaceStatus::QueueFull];
    rig.reply(&call.op, &reply, sent);
    assert_eq!((rig.session.places.len(), rig.calls()), (1, vec![]));
}

#[test]
fn a_request_that_takes_over_a_place_is_not_served_before_those_that_came_before_it() {
    let mut rig = Rig::new(2);
    let first = rig.holder(REUSE);
    let [second, third] = [(); 2].map(|()| {
        let index = rig.request_with(REUSE);
        (index, rig.call().expect("it asks"), rig.now())
    });
    rig.leave(first);
    assert_eq!(rig.progress(second.0), Progress::Held);
    // The place of the second comes first, and the last request has it.
    let last = rig.request_with(REUSE);
    assert_eq!(rig.calls(), vec![]);
    for (_, call, sent) in [&second, &third] {
        let reply = rig.carry_out(call);
        rig.reply(&call.op, &reply, *sent);
    }
    assert_eq!((rig.progress(third.0), rig.progress(last)), (Progress::Held, Progress::Waiting));
    rig.settle();
    rig.leave(second.0);
    rig.settle();
    assert_eq!((rig.progress(last), rig.ledger.in_use()), (Progress::Held, 2));
}

#[test]
fn whatever_ends_it_leaves_no_place_without_a_request() {
    type End = fn(&mut Rig, Call, Time);
    let ends: [(&str, End); 7] = [
        ("recall", |rig, call, sent| {
            rig.recall();
            let reply = rig.carry_out(&call);
            rig.reply(&call.op, &reply, sent);
        }),
        ("error", |rig, call, _| {
            let now = rig.now();
            rig.session.handle_call_error(&call.op, now);
        }),
        ("connection", |rig, call, _| {
            rig.session.handle_unanswered(&call.op);
            rig.reconnect(same_data());
        }),
        ("carried out", |rig, call, _| {
            let _ = rig.carry_out(&call);
            rig.session.handle_unanswered(&call.op);
            rig.reconnect(Connected::default());
        }),
        ("outage", |rig, call, _| {
            let now = rig.now();
            rig.session.handle_unanswered(&call.op);
            rig.session.handle_unreachable(now);
        }),
        ("close", |rig, call, sent| {
            let now = rig.now();
            rig.session.handle_close(now);
            let reply = rig.carry_out(&call);
            rig.reply(&call.op, &reply, sent);
        }),
        ("revocation", |rig, call, sent| {
            let Op::Acquire { ids, .. } = &call.op else { panic!("{call:?}") };
            let (id, now) = (ids[0], rig.now());
            let reply = rig.carry_out(&call);
            rig.session.handle_revoked(id, now);
            rig.reply(&call.op, &reply, sent);
        }),
    ];
    for (what, end) in ends {
        let (mut rig, second, call, sent) = with_a_spare_place(2);
        end(&mut rig, call, sent);
        rig.check();
        let places = rig.session.places.iter().map(|(index, _)| index).collect::<Vec<_>>();
        assert_eq!(places, [second], "{what}");
        if rig.session.is_outage() {
            rig.reconnect(same_data());
        }
        rig.leave(second);
        rig.live(2000);
        assert!(rig.ledger.is_empty() && rig.session.places.is_empty(), "{what}");
    }
}

/// A reply to a renewal of this place alone, which says of all processes what it says.
fn renew(rig: &mut Rig, index: usize) {
    let (id, sent, limit) = (rig.id(index), rig.now(), rig.limit);
    let op = Op::Renew { lease_ms: 3000, ids: Ids::from_buf([id]) };
    let reply = rig.carry_out(&Call { limit, headroom: 0, recalls: false, op: op.clone() });
    rig.reply(&op, &reply, sent);
}

/// Whose call is on its way.
type Sent = (usize, Call, Time);

impl Rig {
    fn sent(&mut self, options: AcquireOptions) -> Sent {
        let index = self.request_with(options);
        (index, self.call().expect("it asks"), self.now())
    }

    fn answer_to(&mut self, (_, call, sent): &Sent) {
        let reply = self.carry_out(call);
        self.reply(&call.op, &reply, *sent);
    }
}

#[test]
fn a_place_is_not_taken_over_past_a_request_of_another_tenant() {
    let [a, b] = [1, 2].map(|tenant| AcquireOptions { claim: claim(tenant), ..REUSE });
    let mut rig = Rig::new(2);
    let first = rig.holder(a);
    rig.pass(1);
    renew(&mut rig, first);
    let second = rig.sent(a);
    rig.leave(first);
    assert_eq!(rig.progress(second.0), Progress::Held);
    let of_b = rig.sent(b);
    let last = rig.request_with(a);
    rig.answer_to(&second);
    rig.answer_to(&of_b);
    rig.settle();
    assert_eq!((rig.progress(of_b.0), rig.progress(last)), (Progress::Held, Progress::Waiting));
}

#[test]
fn within_a_tenant_the_first_is_served_first_whoever_else_comes() {
    let [a, b] = [1, 2].map(|tenant| AcquireOptions { claim: claim(tenant), ..REUSE });
    let mut rig = Rig::new(2);
    let first = rig.holder(a);
    rig.pass(1);
    renew(&mut rig, first);
    let [second, third] = [(); 2].map(|()| rig.sent(a));
    rig.leave(first);
    let last = rig.request_with(a);
    assert_eq!(rig.calls(), vec![], "it takes a place over");
    let of_b = rig.sent(b);
    for sent in [&second, &third, &of_b] {
        rig.answer_to(sent);
    }
    assert_eq!((rig.progress(third.0), rig.progress(last)), (Progress::Held, Progress::Waiting));
}

#[test]
fn a_place_is_not_taken_over_past_a_request_of_other_terms() {
    let mut rig = Rig::new(2);
    let first = rig.holder(REUSE);
    let second = rig.sent(REUSE);
    let other = rig.sent(AcquireOptions { max_queue: Some(9), ..REUSE });
    let third = rig.sent(REUSE);
    rig.leave(first);
    assert_eq!(rig.progress(second.0), Progress::Held);
    let last = rig.sent(REUSE);
    for sent in [&second, &other, &third, &last] {
        rig.answer_to(sent);
    }
    rig.settle();
    let progress = [other.0, third.0, last.0].map(|index| rig.progress(index));
    assert_eq!(progress, [Progress::Held, Progress::Waiting, Progress::Waiting]);
}

#[test]
fn the_last_to_come_is_the_one_that_finds_the_queue_full() {
    let options = AcquireOptions { max_queue: Some(1), ..REUSE };
    let mut rig = Rig::new(1);
    let first = rig.holder(options);
    let [second, third] = [(); 2].map(|()| rig.sent(options));
    rig.leave(first);
    let last = rig.request_with(options);
    assert_eq!((rig.progress(second.0), rig.calls()), (Progress::Held, vec![]));
    rig.answer_to(&second);
    rig.answer_to(&third);
    assert_eq!(rig.progress(third.0), Progress::Waiting);
    assert!(is_refused(rig.progress(last), RejectReason::QueueFull));
}

#[test]
fn a_share_of_an_outage_goes_to_the_request_that_came_first_whatever_place_it_has() {
    let local = AcquireOptions { on_unavailable: OnUnavailable::Local(2), ..REUSE };
    for is_refused in [false, true] {
        let mut rig = Rig::new(2);
        let first = rig.holder(local);
        let [second, third] = [(); 2].map(|()| rig.request_with(local));
        let call = rig.call().expect("both ask");
        rig.leave(first);
        let last = rig.request_with(local);
        assert_eq!((rig.progress(second), rig.calls()), (Progress::Held, vec![]));
        let now = rig.now();
        if is_refused {
            rig.session.handle_call_error(&call.op, now);
        } else {
            rig.session.handle_unreachable(now);
        }
        let progress = [third, last].map(|index| rig.progress(index));
        let next = if is_refused { Progress::Failed } else { Progress::Waiting };
        assert_eq!(progress, [Progress::Admitted, next], "{is_refused}");
    }
}

#[test]
fn those_that_take_a_place_over_have_their_turn_however_many_numbers_were_given_out() {
    let mut rig = Rig::new(1);
    rig.session = Session::new(NODE, (1 << 36) + 5, Connected::default(), false);
    let options = AcquireOptions { max_queue: Some(100), ..REUSE };
    let first = rig.holder(options);
    let second = rig.sent(options);
    rig.leave(first);
    let last = rig.request_with(options);
    assert_eq!(rig.calls(), vec![]);
    rig.answer_to(&second);
    let _later = rig.request_with(options);
    rig.settle();
    rig.leave(second.0);
    assert_eq!(rig.progress(last), Progress::Held);
}

#[test]
fn a_short_reply_counts_for_the_limit_of_its_own_call() {
    let mut rig = Rig::new(2);
    let small = rig.holder(REUSE);
    rig.limit = 10;
    for _ in 0..5 {
        rig.holder(OPTIONS);
    }
    rig.pass(60);
    let big = rig.request_with(OPTIONS);
    rig.limit = 2;
    // It comes and leaves before anything is sent.
    let dropped = rig.request_with(REUSE);
    rig.leave(dropped);
    let (call, sent) = (rig.call().unwrap(), rig.now());
    let Reply { lease_end, statuses, .. } = rig.carry_out(&call);
    rig.reply(&call.op, &Reply { lease_end, statuses, ..Reply::default() }, sent);
    assert_eq!(rig.progress(big), Progress::Held);
    rig.leave(small);
    assert_eq!(rig.kept(), 0, "seven are in use");
}

#[test]
fn a_place_whose_hint_was_lost_does_not_stand_there_once_a_reply_counts_fewer() {
    let mut rig = Rig::new(2);
    let others = [(); 2].map(|()| rig.other());
    let first = rig.request_with(REUSE);
    rig.settle();
    // It is granted, and never told.
    others.into_iter().for_each(|id| drop(rig.other_leaves(id)));
    let next = rig.request_with(REUSE);
    rig.answer();
    assert_eq!(rig.progress(first), Progress::Held, "it came first");
    rig.other();
    // One waits, and it is not this process's.
    renew(&mut rig, first);
    rig.leave(first);
    assert_ne!(rig.progress(next), Progress::Held, "it is not its turn");
}

#[test]
fn a_place_of_which_nothing_was_heard_for_long_is_not_certain_to_stand_there() {
    let mut rig = Rig::new(2);
    let holder = rig.holder(REUSE);
    let gone = rig.other();
    let first = rig.request_with(REUSE);
    rig.settle();
    // It is granted, never told, and another waits: as many as before.
    rig.other_leaves(gone);
    rig.other();
    for _ in 0..3 {
        rig.pass(20);
        renew(&mut rig, holder);
    }
    rig.leave(holder);
    assert_ne!(rig.progress(first), Progress::Held, "another waits for longer than that");
}

#[test]
fn what_is_kept_goes_back_once_it_is_not_known_that_nobody_else_waits() {
    let mut rig = keeper(1);
    rig.pass(20);
    assert!(rig.reuses(REUSE));
    rig.other();
    rig.pass(29);
    assert_eq!(rig.kept(), 1, "no recall came");
    rig.pass(1);
    assert_eq!(rig.kept(), 0);
    rig.settle();
    assert_eq!(rig.in_use_elsewhere(), 1, "it waits as long as that");
}
