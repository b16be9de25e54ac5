//! Places with claims: tenants in calls, strangers, proofs, and shares of the process's own.

use super::*;
use crate::claim::{Claim, Tenant};
use crate::lines::turn;

fn of(tenant: u64) -> Claim {
    Claim::new(Tenant::of_hash(tenant))
}

fn asks(claim: impl Into<Option<Claim>>) -> AcquireOptions {
    AcquireOptions { claim: claim.into(), ..OPTIONS }
}

fn shares(share: u32, claim: impl Into<Option<Claim>>) -> AcquireOptions {
    AcquireOptions { on_unavailable: OnUnavailable::Local(share), ..asks(claim) }
}

fn outage() -> Rig {
    let mut rig = Rig::new(9);
    rig.session.handle_unreachable(rig.now());
    rig
}

impl Rig {
    /// A tick passes, and a request comes.
    fn comes(&mut self, options: AcquireOptions) -> usize {
        self.now_ms += 1;
        self.request_with(options)
    }

    /// A tick passes, and a request leaves. Which of these are admitted now?
    fn admitted_when_leaves(&mut self, index: usize, waiting: &[usize]) -> Vec<usize> {
        self.now_ms += 1;
        self.leave(index);
        let admitted = |index: &&usize| self.progress(**index) == Progress::Admitted;
        waiting.iter().filter(admitted).copied().collect()
    }

    fn release_of_the_next_call(&mut self) -> Ids {
        match self.call().expect("a call").op {
            Op::Release { ids } => ids,
            op => panic!("{op:?}"),
        }
    }
}

// ===== calls =====

#[test]
fn requests_of_several_tenants_share_a_call() {
    let mut rig = Rig::new(3);
    let claims = [Some(of(1).with_cost(2)), None, Some(of(2).with_class(1).with_weight(3))];
    let indexes = claims.map(|claim| rig.request_with(asks(claim)));
    let ids: Ids = indexes.iter().map(|index| rig.id(*index)).collect();
    let call = rig.answer();
    match call.op {
        Op::Acquire { ids: asked, .. } => {
            assert_eq!(asked, ids);
            assert_eq!(asked.iter().map(|id| id.claim).collect::<Vec<_>>(), claims);
        }
        op => panic!("{op:?}"),
    }
    assert_eq!(rig.calls(), []);
    let seen = indexes.map(|index| rig.progress(index));
    assert_eq!(seen, [Progress::Held, Progress::Held, Progress::Waiting], "two units, and one");
    assert_eq!(rig.ledger.in_use(), 3);
    assert_eq!(rig.session.counts.in_flight(), 3, "units");
    rig.leave(indexes[0]);
    rig.settle();
    assert_eq!(rig.progress(indexes[2]), Progress::Held);
    assert_eq!((rig.ledger.in_use(), rig.session.counts.in_flight()), (2, 2));
}

#[test]
fn a_call_carries_the_headroom_of_the_last_request() {
    let mut rig = Rig::new(3);
    rig.request_with(AcquireOptions { headroom: 2, ..asks(of(1).with_class(1)) });
    assert_eq!(rig.call().expect("a call").headroom, 2);
}

#[test]
fn the_claim_stays_with_the_place_from_joining_to_release() {
    let claim = of(5).with_cost(2).with_each(Some(3));
    let mut rig = Rig::new(3);
    let index = rig.request_with(asks(claim));
    let id = rig.id(index);
    assert_eq!(id.claim, Some(claim));
    rig.settle();
    rig.pass(1000);
    match rig.answer().op {
        Op::Renew { ids, .. } => assert_eq!(ids[..], [id]),
        op => panic!("{op:?}"),
    }
    rig.leave(index);
    assert_eq!(rig.release_of_the_next_call()[..], [id]);
}

#[test]
fn what_the_ledger_refuses_of_a_claim_is_told_as_it_is() {
    let mut rig = Rig::new(4);
    let capped = of(1).with_each(Some(1));
    let first = rig.request_with(asks(capped));
    rig.settle();
    assert_eq!(rig.progress(first), Progress::Held);
    for (claim, max_queue, reason) in [
        (capped, None, RejectReason::TenantLimit),
        (capped.with_cost(2), None, RejectReason::CostTooHigh),
        (of(2).with_cost(5), None, RejectReason::CostTooHigh),
        (of(2).with_cost(5), Some(8), RejectReason::CostTooHigh),
        (of(2).with_cost(4), None, RejectReason::Limit),
        (of(2).with_cost(4), Some(0), RejectReason::QueueFull),
    ] {
        let refused = rig.request_with(AcquireOptions { max_queue, ..asks(claim) });
        rig.settle();
        let progress = rig.progress(refused);
        assert!(is_refused(progress, reason), "{claim:?} {max_queue:?}: {progress:?}");
        rig.leave(refused);
    }
    assert_eq!(rig.settle(), [], "nothing of these is released");
}

#[test]
fn a_line_is_full_by_itself() {
    let mut rig = Rig::new(1);
    rig.other();
    let one = AcquireOptions { max_queue: Some(1), ..OPTIONS };
    let ask = |rig: &mut Rig, tenant| {
        let index = rig.request_with(AcquireOptions { claim: Some(of(tenant)), ..one });
        rig.settle();
        rig.progress(index)
    };
    assert_eq!(ask(&mut rig, 1), Progress::Waiting);
    assert!(is_refused(ask(&mut rig, 1), RejectReason::QueueFull));
    assert_eq!(ask(&mut rig, 2), Progress::Waiting);
}

// ===== strangers =====

#[test]
fn a_stranger_with_a_claim_is_released_under_its_whole_id() {
    let claim = of(7).with_cost(3).with_class(2);
    let stranger =
        PlaceId { node: NODE, poll_only: false, n: 99 << 20, bound: None, claim: Some(claim) };
    // By a hint.
    let mut rig = Rig::new(1);
    rig.hint(Grant { id: stranger, lease_end: EPOCH_MS + 3000 });
    assert_eq!(rig.release_of_the_next_call()[..], [stranger]);
    // By what a reply grants.
    let mut rig = Rig::new(1);
    rig.request();
    let (call, now) = (rig.call().expect("a call"), rig.now());
    let mut reply = rig.carry_out(&call);
    reply.granted.push(Grant { id: stranger, lease_end: EPOCH_MS + 3000 });
    rig.reply(&call.op, &reply, now);
    assert_eq!(rig.release_of_the_next_call()[..], [stranger]);
}

#[test]
fn a_hint_grants_a_place_with_a_claim() {
    let mut rig = Rig::new(1);
    let other = rig.other();
    let index = rig.request_with(asks(of(1)));
    rig.settle();
    let grants = rig.other_leaves(other);
    assert_eq!(grants.iter().map(|grant| grant.id).collect::<Vec<_>>(), [rig.id(index)]);
    rig.hint(grants[0]);
    assert_eq!(rig.progress(index), Progress::Held);
}

#[test]
fn what_an_audit_finds_is_released_under_its_whole_id() {
    let mut rig = Rig::new(2);
    let index = rig.request_with(asks(of(3).with_cost(2)));
    rig.settle();
    let (id, before) = (rig.id(index), rig.ledger.clone());
    rig.progress(index);
    rig.leave(index);
    rig.settle();
    assert!(rig.ledger.is_empty());
    // A replica takes over that has not heard of the release.
    rig.ledger = before;
    rig.reconnect(Connected::default());
    let ops = rig.settle();
    assert!(ops.contains(&Op::Release { ids: smallvec![id] }), "{ops:?}");
    assert!(rig.ledger.is_empty());
}

// ===== proofs =====

#[test]
fn a_loss_of_data_leaves_claims_and_order_as_they_were() {
    let mut rig = Rig::new(3);
    let [a, b] = [of(1).with_cost(2), of(2).with_weight(2)];
    let held = rig.request_with(asks(a));
    let more: Vec<_> = [b, a, a, b, b].into_iter().map(|claim| rig.comes(asks(claim))).collect();
    rig.settle();
    assert_eq!([held, more[0]].map(|index| rig.progress(index)), [Progress::Held; 2]);
    let tickets = |rig: &Rig| {
        let mut places: Vec<_> = rig.ledger.places().collect();
        // A place that waits comes back under another number, so by its claim and its ticket.
        places.sort_unstable_by_key(|(id, _, ticket)| (id.claim, *ticket));
        places.into_iter().map(|(id, _, ticket)| (id.claim, ticket)).collect::<Vec<_>>()
    };
    let (before, turns) = (tickets(&rig), rig.ledger.turns().count());
    let proof = rig.proof_after_a_loss();
    let Op::Reassert { proofs, .. } = &proof.op else { panic!("{proof:?}") };
    assert_eq!(proofs.len(), 6);
    let (reply, now) = (rig.carry_out(&proof), rig.now());
    rig.reply(&proof.op, &reply, now);
    rig.settle();
    assert_eq!(tickets(&rig), before);
    assert_eq!((rig.ledger.in_use(), rig.ledger.turns().count()), (3, turns));
    // Tenant 2 has half a unit by weight.
    rig.leave(held);
    rig.settle();
    let seen: Vec<_> = more[1..].iter().map(|index| rig.progress(*index)).collect();
    assert_eq!(seen, [Progress::Held, Progress::Waiting, Progress::Waiting, Progress::Waiting]);
}

#[test]
fn a_failover_that_lacks_a_line_gets_it_back_in_order() {
    let mut rig = Rig::new(1);
    let held = rig.request_with(asks(of(1)));
    rig.settle();
    rig.progress(held);
    let before = rig.ledger.clone();
    let line: Vec<_> = (0..3).map(|_| rig.comes(asks(of(2)))).collect();
    rig.settle();
    // The replica knows the holder alone.
    rig.ledger = before;
    rig.reconnect(Connected::default());
    rig.settle();
    let mut tickets: Vec<_> = rig.ledger.places().filter_map(|(_, _, ticket)| ticket).collect();
    tickets.sort_unstable();
    assert_eq!(tickets.len(), 3);
    let mut last = held;
    for index in line {
        rig.leave(last);
        rig.settle();
        assert_eq!(rig.progress(index), Progress::Held);
        last = index;
    }
}

#[test]
fn what_is_in_flight_by_policy_is_counted_with_its_cost() {
    let mut rig = outage();
    let options =
        AcquireOptions { on_unavailable: OnUnavailable::Admit, ..asks(of(4).with_cost(3)) };
    let index = rig.request_with(options);
    assert_eq!(rig.progress(index), Progress::Admitted);
    rig.reconnect(Connected::default());
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert_eq!(rig.ledger.in_use_by(Tenant::of_hash(4)), 3);
}

// ===== shares of the process's own =====

#[test]
fn a_share_goes_to_the_tenant_with_the_fewest_in_flight() {
    let mut rig = outage();
    let [a, b, c] = [1, 2, 3].map(|tenant| shares(3, of(tenant)));
    let held: Vec<_> = (0..3).map(|_| rig.comes(a)).collect();
    let waiting = [a, b, c, b].map(|options| rig.comes(options));
    let [a1, b1, c1, b2] = waiting;
    assert_eq!(rig.admitted_when_leaves(held[0], &waiting), [b1], "none in flight, before c");
    assert_eq!(rig.admitted_when_leaves(held[1], &[a1, c1, b2]), [c1]);
    assert_eq!(rig.admitted_when_leaves(held[2], &[a1, b2]), [a1], "none is in flight any more");
    assert_eq!(rig.admitted_when_leaves(c1, &[b2]), [b2]);
}

#[test]
fn a_share_is_weighed() {
    let mut rig = outage();
    let (heavy, light) = (shares(3, of(1).with_weight(2)), shares(3, of(2)));
    let held = [heavy, light, light].map(|options| rig.comes(options));
    let waiting = [light, heavy, heavy].map(|options| rig.comes(options));
    let [light1, heavy1, heavy2] = waiting;
    // One of weight 2 against one of weight 1.
    assert_eq!(rig.admitted_when_leaves(held[2], &waiting), [heavy1]);
    // Two of weight 2 against none of weight 1.
    assert_eq!(rig.admitted_when_leaves(held[1], &[light1, heavy2]), [light1]);
    assert_eq!(rig.admitted_when_leaves(held[0], &[heavy2]), [heavy2]);
}

#[test]
fn a_share_goes_to_the_lowest_class_and_within_a_tenant_in_order() {
    let mut rig = outage();
    let (batch, urgent) = (shares(1, of(1).with_class(1)), shares(1, of(2)));
    let mut last = rig.comes(urgent);
    let waiting = [batch, batch, urgent, urgent].map(|options| rig.comes(options));
    let [batch1, batch2, urgent1, urgent2] = waiting;
    for next in [urgent1, urgent2, batch1, batch2] {
        let rest: Vec<_> = waiting.into_iter().filter(|index| *index >= next).collect();
        let admitted = rig.admitted_when_leaves(last, &rest);
        assert_eq!(admitted, [next]);
        last = next;
    }
}

#[test]
fn requests_of_no_tenant_are_one_line_among_the_others() {
    let mut rig = outage();
    let (plain, fair) = (shares(2, None), shares(2, of(1)));
    let held = [plain, plain].map(|options| rig.comes(options));
    let [plain1, fair1] = [plain, fair].map(|options| rig.comes(options));
    assert_eq!(rig.admitted_when_leaves(held[0], &[plain1, fair1]), [fair1]);
    assert_eq!(rig.admitted_when_leaves(held[1], &[plain1]), [plain1]);
}

#[test]
fn a_tenant_at_its_cap_holds_nobody_up() {
    let mut rig = outage();
    let capped = shares(3, of(1).with_each(Some(1)));
    let first = rig.comes(capped);
    let second = rig.comes(capped);
    assert_eq!([first, second].map(|i| rig.progress(i)), [Progress::Admitted, Progress::Waiting]);
    let other = rig.comes(shares(3, of(2)));
    assert_eq!(rig.progress(other), Progress::Admitted);
    let tries = rig.comes(AcquireOptions { max_queue: None, ..capped });
    assert!(is_refused(rig.progress(tries), RejectReason::TenantLimit));
    let never = rig.comes(shares(3, of(1).with_each(Some(1)).with_cost(2)));
    assert!(is_refused(rig.progress(never), RejectReason::CostTooHigh));
    assert_eq!(rig.admitted_when_leaves(first, &[second]), [second]);
}

#[test]
fn a_request_for_several_waits_for_enough_of_the_share() {
    let mut rig = outage();
    let held = [(); 3].map(|()| rig.comes(shares(3, of(1))));
    let big = rig.comes(shares(3, of(2).with_cost(2)));
    let small = rig.comes(shares(3, of(1)));
    let admitted = rig.admitted_when_leaves(held[0], &[big, small]);
    assert!(admitted.is_empty(), "the big one is waited for: {admitted:?}");
    assert_eq!(rig.session.counts.in_flight(), 2);
    assert_eq!(rig.admitted_when_leaves(held[1], &[big, small]), [big]);
    assert_eq!(rig.session.counts.in_flight(), 3);
    assert_eq!(rig.admitted_when_leaves(big, &[small]), [small]);
}

#[test]
fn a_request_for_more_than_the_share_fails_and_holds_nobody_up() {
    let mut rig = outage();
    let held = rig.comes(shares(2, of(1)));
    let never = rig.comes(shares(2, of(2).with_cost(3)));
    assert_eq!(rig.progress(never), Progress::Failed, "it may fit after the outage");
    let next = rig.comes(shares(2, of(2)));
    assert_eq!([held, next].map(|index| rig.progress(index)), [Progress::Admitted; 2]);
    // Without any share it waits for an operator.
    let none = rig.comes(shares(0, of(3).with_cost(2)));
    assert_eq!(rig.progress(none), Progress::Waiting);
}

#[test]
fn one_that_asks_for_more_than_the_share_fails_though_it_may_not_wait() {
    let mut rig = outage();
    let held = [(); 2].map(|()| rig.comes(shares(2, of(1))));
    let behind = rig.comes(shares(2, of(1)));
    for tenant in [1, 2] {
        let tries = AcquireOptions { max_queue: None, ..shares(2, of(tenant).with_cost(3)) };
        let never = rig.comes(tries);
        assert_eq!(rig.progress(never), Progress::Failed, "{tenant}");
    }
    assert_eq!(rig.admitted_when_leaves(held[0], &[behind]), [behind]);
}

#[test]
fn a_line_for_shares_is_full_by_itself() {
    let full = |tenant| AcquireOptions { max_queue: Some(1), ..shares(1, of(tenant)) };
    // Those that come in an outage, and those that meet one.
    for meets in [false, true] {
        let mut rig = if meets { Rig::new(1) } else { outage() };
        let indexes = [1, 1, 1, 2, 2].map(|tenant| rig.comes(full(tenant)));
        if meets {
            rig.session.handle_unreachable(rig.now());
        }
        let [held, one, over, two, over_too] = indexes;
        assert_eq!(rig.progress(held), Progress::Admitted);
        assert_eq!([one, two].map(|index| rig.progress(index)), [Progress::Waiting; 2]);
        for index in [over, over_too] {
            assert!(is_refused(rig.progress(index), RejectReason::QueueFull), "{meets}");
        }
    }
}

#[test]
fn what_was_in_flight_before_counts_for_its_tenant() {
    let mut rig = Rig::new(9);
    let before = [(); 2].map(|()| rig.comes(shares(3, of(1))));
    rig.settle();
    assert_eq!(before.map(|index| rig.progress(index)), [Progress::Held; 2]);
    rig.session.handle_unreachable(rig.now());
    let third = rig.comes(shares(3, of(2)));
    assert_eq!(rig.progress(third), Progress::Admitted);
    let waiting = [1, 2, 3].map(|tenant| rig.comes(shares(3, of(tenant))));
    let [one, two, three] = waiting;
    assert_eq!(rig.admitted_when_leaves(before[0], &waiting), [three]);
    // One, two and three have one each: the one that came to that level first.
    assert_eq!(rig.admitted_when_leaves(before[1], &[one, two]), [one]);
    assert_eq!(rig.admitted_when_leaves(one, &[two]), [two]);
}

#[test]
fn a_line_that_waits_leaves_nothing_behind() {
    let mut rig = outage();
    let indexes = [1, 1, 2, 3].map(|tenant| rig.comes(shares(1, of(tenant))));
    for index in indexes.into_iter().rev() {
        rig.leave(index);
    }
    rig.session.admit_local(rig.now());
    assert_eq!(rig.session.outage, Some(LocalQueue::new()));
}

#[test]
fn a_turn_of_a_share_is_that_of_the_ledger() {
    // The same history in both: the same order of grants.
    let costs = [(1_u32, 1, 0), (1, 1, 0), (2, 2, 0), (1, 1, 1), (3, 1, 1), (2, 1, 0), (3, 1, 0)];
    let claims: Vec<_> = (costs.iter().cycle().take(21))
        .map(|(tenant, cost, class)| {
            of(u64::from(*tenant)).with_cost(*cost).with_class(*class).with_weight(tenant * 2 - 1)
        })
        .collect();
    assert!(turn(0, 1, 1, 0) < turn(1, 0, 1, 0));
    let order = |mut rig: Rig, is_outage: bool| {
        let options = |claim| AcquireOptions { max_queue: Some(99), ..shares(4, claim) };
        let indexes: Vec<_> = claims
            .iter()
            .map(|claim| {
                let index = rig.comes(options(*claim));
                if !is_outage {
                    rig.settle();
                }
                index
            })
            .collect();
        let (mut held, mut order) = (Vec::new(), Vec::new());
        while order.len() < indexes.len() {
            for index in &indexes {
                let has = matches!(rig.progress(*index), Progress::Held | Progress::Admitted);
                if has && !order.contains(index) {
                    order.push(*index);
                    held.push(*index);
                }
            }
            let first = held.remove(0);
            rig.now_ms += 1;
            let now = rig.now();
            rig.session.handle_release(first, now);
            if !is_outage {
                rig.settle();
            }
        }
        order
    };
    assert_eq!(order(outage(), true), order(Rig::new(4), false));
}
