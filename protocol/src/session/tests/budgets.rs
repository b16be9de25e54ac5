//! Requests that take of budgets, and say what they have used.

use super::*;
use crate::charge::Charge;
use crate::session::place::State;

const BUDGET: u64 = 7;

/// Takes so many ms of a budget, of which so many may be taken at once.
fn charged(taken_ms: u64, burst_ms: u64) -> AcquireOptions {
    let charge = Charge::of_hash(BUDGET, taken_ms * 1000, burst_ms * 1000).expect("in range");
    AcquireOptions { claim: Some(Claim::without_tenant().charged(charge)), ..OPTIONS }
}

fn local(share: u32, options: AcquireOptions) -> AcquireOptions {
    AcquireOptions { on_unavailable: OnUnavailable::Local(share), max_queue: None, ..options }
}

/// In how many ms the budget is full again, rounded up.
fn ahead(rig: &Rig) -> u64 {
    let now = (EPOCH_MS + rig.now_ms) * 1000;
    let number = Charge::of_hash(BUDGET, 0, 1).expect("in range").number();
    rig.ledger.budget_full_at(number).saturating_sub(now).div_ceil(1000)
}

fn is_admitted(rig: &mut Rig, options: AcquireOptions) -> bool {
    let index = rig.request_with(options);
    let is_admitted = rig.progress(index) == Progress::Admitted;
    rig.leave(index);
    is_admitted
}

#[test]
fn who_waits_for_a_budget_has_its_permit_when_that_has_enough() {
    let mut rig = Rig::new(100);
    let all: Vec<_> = (0..4).map(|_| rig.request_with(charged(500, 1000))).collect();
    rig.settle();
    let held =
        |rig: &mut Rig| all.iter().filter(|index| rig.progress(**index) == Progress::Held).count();
    assert_eq!(held(&mut rig), 2);
    rig.live(490);
    assert_eq!(held(&mut rig), 2, "never early");
    rig.live(20);
    assert_eq!(held(&mut rig), 3);
    rig.live(500);
    assert_eq!(held(&mut rig), 4);
}

#[test]
fn a_request_that_may_not_wait_is_told_when_its_budget_has_enough() {
    let mut rig = Rig::new(100);
    rig.request_with(charged(1000, 1000));
    rig.settle();
    rig.live(300);
    let index = rig.request_with(AcquireOptions { max_queue: None, ..charged(400, 1000) });
    rig.settle();
    let Progress::Refused { reason, ends_in, .. } = rig.progress(index) else { panic!() };
    assert_eq!((reason, ends_in), (RejectReason::Budget(0), Some(ms(100))));
}

#[test]
fn a_request_that_waits_in_vain_is_told_when_its_budget_has_enough() {
    let mut rig = Rig::new(100);
    rig.request_with(charged(1000, 1000));
    let index = rig.request_with(charged(400, 1000));
    rig.settle();
    rig.live(100);
    let now = rig.now();
    rig.session.handle_wait_timeout(index, now);
    let Progress::Refused { reason, ends_in, .. } = rig.progress(index) else { panic!() };
    assert_eq!((reason, ends_in), (RejectReason::QueueTimeout, Some(ms(300))));
}

#[test]
fn what_was_used_is_settled_once_whatever_becomes_of_the_calls() {
    // The call is carried out and its answer lost, or it is lost itself, or neither.
    for (is_carried_out, breaks) in [(true, true), (false, true), (true, false)] {
        let mut rig = Rig::new(100);
        let [one, other] = [(); 2].map(|()| rig.request_with(charged(400, 1000)));
        rig.settle();
        assert_eq!(ahead(&rig), 800);
        rig.session.handle_used(one, 0, 900_000);
        rig.session.handle_used(one, 0, 100_000);
        rig.session.handle_used(one, 1, 0);
        rig.leave(one);
        let call = rig.call().expect("a release");
        if is_carried_out {
            let reply = rig.carry_out(&call);
            assert_eq!(ahead(&rig), 500);
            if !breaks {
                let now = rig.now();
                rig.reply(&call.op, &reply, now);
            }
        }
        if breaks {
            rig.reconnect(same_data());
        }
        rig.settle();
        assert_eq!(ahead(&rig), 500, "{is_carried_out} {breaks}");
        // With the call of a newcomer.
        rig.session.handle_used(other, 0, 0);
        rig.leave(other);
        let next = rig.request_with(charged(50, 1000));
        let ops = rig.settle();
        assert!(matches!(&ops[..], [Op::Acquire { leaving, .. }] if leaving.len() == 1));
        assert_eq!((ahead(&rig), rig.progress(next)), (150, Progress::Held));
    }
}

#[test]
fn a_place_that_was_swept_keeps_its_estimate() {
    let mut rig = Rig::new(1);
    let index = rig.request_with(charged(60_000, 60_000));
    rig.settle();
    let now = rig.now();
    rig.session.handle_unreachable(now);
    rig.session.handle_used(index, 0, 0);
    rig.leave(index);
    rig.pass(4000);
    // Another process has its permit.
    let other = rig.other();
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!(rig.places(), [other]);
    assert_eq!(ahead(&rig), 56_000);
}

#[test]
fn what_is_left_by_the_provider_ages_until_the_release() {
    let mut rig = Rig::new(100);
    let index = rig.request_with(charged(10, 1000));
    rig.settle();
    rig.live(500);
    assert_eq!(ahead(&rig), 0);
    let now = rig.now();
    rig.session.handle_ahead(index, 0, 700_000, now);
    rig.live(300);
    rig.leave(index);
    rig.settle();
    assert_eq!(ahead(&rig), 400);
    // Never more than a burst, and never less than is known.
    let [one, two] = [(); 2].map(|()| rig.request_with(charged(10, 1000)));
    rig.settle();
    let now = rig.now();
    rig.session.handle_ahead(one, 0, 1000, now);
    rig.leave(one);
    rig.settle();
    assert_eq!(ahead(&rig), 420);
    rig.session.handle_ahead(two, 0, u64::MAX, now);
    rig.leave(two);
    rig.settle();
    assert_eq!(ahead(&rig), 1000);
}

#[test]
fn a_loss_of_data_fills_the_budget_and_what_is_used_beyond_an_estimate_counts_on() {
    let mut rig = Rig::new(100);
    let [cheap, dear] = [(); 2].map(|()| rig.request_with(charged(400, 1000)));
    rig.settle();
    let proof = rig.proof_after_a_loss();
    let (reply, now) = (rig.carry_out(&proof), rig.now());
    rig.reply(&proof.op, &reply, now);
    rig.settle();
    assert_eq!(ahead(&rig), 0, "it was charged before");
    rig.session.handle_used(cheap, 0, 0);
    rig.session.handle_used(dear, 0, 700_000);
    [cheap, dear].into_iter().for_each(|index| rig.leave(index));
    rig.settle();
    assert_eq!(ahead(&rig), 300);
}

#[test]
fn what_passed_in_an_outage_is_charged_once_it_is_counted() {
    let mut rig = outage(100);
    let all: Vec<_> = (0..10).map(|_| rig.request_with(local(100, charged(300, 1000)))).collect();
    let admitted: Vec<_> =
        all.into_iter().filter(|index| rig.progress(*index) == Progress::Admitted).collect();
    assert_eq!(admitted.len(), 3);
    rig.reconnect(Connected::default());
    rig.settle();
    assert_eq!((rig.places().len(), ahead(&rig)), (3, 900));
    let mut rig = outage(100);
    let admit = AcquireOptions { on_unavailable: OnUnavailable::Admit, ..charged(300, 1000) };
    for _ in 0..10 {
        rig.request_with(admit);
    }
    rig.reconnect(Connected::default());
    rig.settle();
    assert_eq!((rig.places().len(), ahead(&rig)), (10, 2000), "no more than two bursts");
}

#[test]
fn a_share_of_the_limit_has_the_same_part_of_the_budget() {
    // A fifth: 40 ms take 200 of 1000.
    let mut rig = outage(50);
    let options = local(10, charged(40, 1000));
    let passed = (0..10).filter(|_| is_admitted(&mut rig, options)).count();
    assert_eq!(passed, 5);
    rig.pass(190);
    assert!(!is_admitted(&mut rig, options));
    rig.pass(20);
    assert!(is_admitted(&mut rig, options) && !is_admitted(&mut rig, options));
    let index = rig.request_with(options);
    let Progress::Refused { reason, ends_in, .. } = rig.progress(index) else { panic!() };
    assert_eq!((reason, ends_in), (RejectReason::Budget(0), Some(ms(190))));
}

/// Takes of a budget that each tenant has.
fn tenants(tenant: u64, taken_ms: u64, burst_ms: u64) -> AcquireOptions {
    let charge = Charge::of_tenant(tenant, taken_ms * 1000, burst_ms * 1000).expect("in range");
    let claim = Claim::new(Tenant::of_hash(tenant)).charged(charge);
    AcquireOptions { claim: Some(claim), on_unavailable: OnUnavailable::Local(10), ..OPTIONS }
}

#[test]
fn a_tenant_without_budget_keeps_no_other_from_a_share() {
    let mut rig = outage(10);
    let admitted = |rig: &mut Rig, index| rig.progress(index) == Progress::Admitted;
    let used = rig.request_with(tenants(1, 1000, 1000));
    let waits = [400, 100].map(|taken| rig.request_with(tenants(1, taken, 1000)));
    let other = rig.request_with(tenants(2, 500, 1000));
    assert!(admitted(&mut rig, used) && admitted(&mut rig, other));
    rig.pass(390);
    // In their order, though the second needs less.
    assert!(waits.iter().all(|index| !admitted(&mut rig, *index)));
    rig.pass(20);
    assert_eq!(waits.map(|index| admitted(&mut rig, index)), [true, false]);
    // Another event comes before the second one's time.
    let third = rig.request_with(tenants(3, 1, 1000));
    assert!(admitted(&mut rig, third));
    rig.leave(third);
    rig.pass(100);
    assert!(admitted(&mut rig, waits[1]));
}

#[test]
fn who_waits_in_vain_is_not_told_when_another_tenants_budget_has_enough() {
    let mut rig = Rig::new(10);
    rig.request_with(tenants(1, 1000, 1000));
    rig.request_with(tenants(2, 1000, 1000));
    rig.settle();
    let short = rig.request_with(tenants(1, 100, 1000));
    let long = rig.request_with(tenants(2, 900, 1000));
    rig.settle();
    let now = rig.now();
    rig.session.handle_wait_timeout(long, now);
    let Progress::Refused { ends_in, .. } = rig.progress(long) else { panic!() };
    assert_eq!(ends_in, None);
    rig.live(110);
    assert_eq!(rig.progress(short), Progress::Held);
}

#[test]
fn what_is_given_back_serves_its_tenant_in_an_outage_too() {
    let mut rig = outage(10);
    let used = rig.request_with(tenants(1, 1000, 1000));
    let waits = rig.request_with(tenants(1, 400, 1000));
    assert!(rig.progress(waits) != Progress::Admitted);
    rig.session.handle_used(used, 0, 0);
    rig.leave(used);
    assert_eq!(rig.progress(waits), Progress::Admitted);
}

#[test]
fn what_takes_more_than_the_burst_of_a_share_waits_until_that_is_full() {
    let mut rig = outage(50);
    let large = local(10, charged(1000, 1000));
    assert!(is_admitted(&mut rig, large) && !is_admitted(&mut rig, large));
    rig.pass(4990);
    assert!(!is_admitted(&mut rig, large));
    rig.pass(20);
    assert!(is_admitted(&mut rig, large));
}

#[test]
fn without_a_limit_as_many_requests_as_a_share_has_permits_use_a_burst_up() {
    let mut rig = outage(u32::MAX);
    let passed = (0..10).filter(|_| is_admitted(&mut rig, local(4, charged(1, 1000)))).count();
    assert_eq!(passed, 4);
}

#[test]
fn what_the_backend_granted_counts_for_the_share_and_so_does_what_was_used() {
    let mut rig = Rig::new(10);
    let options = local(5, charged(200, 1000));
    let [one, other] = [(); 2].map(|()| rig.request_with(options));
    rig.settle();
    assert_eq!([one, other].map(|index| rig.progress(index)), [Progress::Held; 2]);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    // Of half of the budget, 800 are taken.
    assert!(!is_admitted(&mut rig, local(5, charged(110, 1000))));
    rig.session.handle_used(one, 0, 0);
    rig.leave(one);
    assert!(is_admitted(&mut rig, local(5, charged(110, 1000))));
    rig.session.handle_used(other, 0, u64::MAX);
    rig.leave(other);
    assert!(!is_admitted(&mut rig, local(5, charged(0, 1000))));
    rig.pass(1990);
    assert!(is_admitted(&mut rig, local(5, charged(490, 1000))), "no more than two bursts");
}

#[test]
fn no_permit_is_passed_on_where_requests_take_of_a_budget() {
    let mut rig = Rig::new(1);
    let options = AcquireOptions { reuse_ms: 50, ..charged(100, 1000) };
    let held = rig.request_with(options);
    let waits = rig.request_with(options);
    rig.settle();
    assert_eq!(rig.progress(held), Progress::Held);
    rig.leave(held);
    assert_eq!(rig.progress(waits), Progress::Waiting);
    rig.settle();
    assert_eq!((rig.progress(waits), ahead(&rig)), (Progress::Held, 200));
}

#[test]
fn a_reload_leaves_the_charges_as_they_are() {
    let mut rig = Rig::new(1);
    let held = rig.request_with(charged(100, 1000));
    let waits = rig.request_with(charged(300, 1000));
    rig.settle();
    let now = rig.now();
    rig.session.handle_policy(2, 0, None, now);
    rig.settle();
    assert_eq!((rig.progress(waits), ahead(&rig)), (Progress::Held, 400));
    [held, waits].into_iter().for_each(|index| rig.leave(index));
    rig.settle();
    assert!(rig.places().is_empty());
}

#[test]
fn a_report_of_a_request_without_a_permit_or_a_budget_is_ignored() {
    let mut rig = Rig::new(1);
    let plain = rig.request();
    let waits = rig.request_with(charged(300, 1000));
    rig.settle();
    for index in [plain, waits] {
        rig.session.handle_used(index, 0, 0);
        let place = rig.session.places.get(index).expect("a place");
        assert!(place.used.is_none() && !matches!(place.state, State::Lost));
    }
}

#[test]
fn requests_of_different_estimates_share_a_call() {
    let mut rig = Rig::new(100);
    for taken in [100, 200, 600, 200] {
        rig.request_with(charged(taken, 1000));
    }
    let calls = rig.settle();
    assert!(matches!(&calls[..], [Op::Acquire { ids, .. }] if ids.len() == 4), "{calls:?}");
    let waiting = rig.ledger.places().filter(|(.., ticket)| ticket.is_some()).count();
    assert_eq!((ahead(&rig), waiting), (900, 1));
}

#[test]
fn a_process_that_used_more_than_its_part_has_it_again_soon() {
    let mut rig = Rig::new(30);
    // A third: the backend grants it all, and the part is three times as far ahead.
    let options = local(10, charged(500, 1000));
    for _ in 0..40 {
        let index = rig.request_with(options);
        rig.settle();
        assert_eq!(rig.progress(index), Progress::Held);
        rig.leave(index);
        rig.live(500);
    }
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert!(!is_admitted(&mut rig, local(10, charged(0, 1000))));
    // A burst, and what the last request takes.
    rig.pass(2500);
    assert!(is_admitted(&mut rig, local(10, charged(300, 1000))));
}

#[test]
fn a_request_that_a_layer_further_in_rejected_used_nothing_unless_an_attempt_passed() {
    use FurtherIn::{GoesOn, Passed, Rejected};
    for (events, says, left) in [
        (&[][..], None, 400),
        (&[Rejected], None, 0),
        (&[Rejected, Rejected], None, 0),
        (&[Passed, Rejected], None, 400),
        (&[Rejected, Passed], None, 400),
        (&[Rejected, GoesOn], None, 400),
        (&[Rejected], Some(300_000), 300),
    ] {
        let mut rig = Rig::new(100);
        let index = rig.request_with(charged(400, 1000));
        rig.settle();
        assert_eq!(rig.progress(index), Progress::Held);
        events.iter().for_each(|event| rig.session.handle_further_in(index, *event));
        says.into_iter().for_each(|used| assert!(rig.session.handle_used(index, 0, used)));
        rig.leave(index);
        rig.settle();
        assert_eq!(ahead(&rig), left, "{events:?}");
        assert!(rig.places().is_empty(), "nothing lingers");
    }
}

#[test]
fn an_acquire_that_is_repeated_charges_once() {
    // Its answer is lost, so it is sent again.
    let mut rig = Rig::new(100);
    let index = rig.request_with(charged(400, 1000));
    let call = rig.call().expect("an acquire");
    let _lost = rig.carry_out(&call);
    assert_eq!(ahead(&rig), 400);
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    assert_eq!((rig.places().len(), ahead(&rig)), (1, 400), "one place, one charge");
    rig.session.handle_used(index, 0, 0);
    rig.leave(index);
    rig.settle();
    assert_eq!(ahead(&rig), 0, "it used nothing");
}

#[test]
fn what_is_used_beyond_an_estimate_counts_for_the_share_whatever_was_taken_before() {
    let mut rig = outage(50);
    // Its estimate has refilled by the time at which it says what it used.
    let one = rig.request_with(local(50, charged(10, 1000)));
    assert_eq!(rig.progress(one), Progress::Admitted);
    rig.pass(500);
    // Something that brings the watchdog to the session.
    assert!(is_admitted(&mut rig, local(50, charged(0, 1000))));
    rig.session.handle_used(one, 0, 1_500_000);
    rig.leave(one);
    assert!(!is_admitted(&mut rig, local(50, charged(500, 1000))), "1.5 bursts were used just now");
}

#[test]
fn what_a_provider_says_counts_for_the_share_too() {
    let mut rig = outage(50);
    let one = rig.request_with(local(50, charged(10, 1000)));
    let now = rig.now();
    rig.session.handle_ahead(one, 0, 1_000_000, now);
    rig.leave(one);
    assert!(
        !is_admitted(&mut rig, local(50, charged(10, 1000))),
        "the provider says that none is left"
    );
}

#[test]
fn a_request_that_never_took_its_permit_used_nothing() {
    // The client goes away while its acquire is on its way.
    let mut rig = Rig::new(100);
    let gone = rig.request_with(charged(900, 1000));
    let call = rig.call().expect("an acquire");
    let (reply, now) = (rig.carry_out(&call), rig.now());
    rig.leave(gone);
    rig.reply(&call.op, &reply, now);
    rig.settle();
    assert_eq!((rig.places().len(), ahead(&rig)), (0, 0), "a permit that nobody had");
}

#[test]
fn a_request_that_passes_in_an_outage_while_its_acquire_was_carried_out_is_charged_once() {
    let mut rig = Rig::new(100);
    let options = AcquireOptions { on_unavailable: OnUnavailable::Admit, ..charged(400, 10_000) };
    let index = rig.request_with(options);
    let call = rig.call().expect("an acquire");
    let _lost = rig.carry_out(&call);
    assert_eq!(ahead(&rig), 400);
    let now = rig.now();
    rig.session.handle_unreachable(now);
    assert_eq!(rig.progress(index), Progress::Admitted);
    rig.reconnect(same_data());
    rig.settle();
    assert_eq!((rig.places().len(), ahead(&rig)), (1, 400), "one request, one charge");
}

#[test]
fn an_audit_does_not_overtake_a_settlement_that_was_refused() {
    let mut rig = Rig::new(100);
    let index = rig.request_with(charged(9000, 10_000));
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    rig.session.handle_used(index, 0, 100_000);
    rig.leave(index);
    // A replica that is promoted refuses the release at first, because it has no memory left, and answers the audit.
    rig.reconnect(Connected::default());
    let (calls, now) = (rig.calls(), rig.now());
    assert!(
        matches!(&calls[..], [release, audit] if matches!(release.op, Op::Release { .. })
        && matches!(audit.op, Op::Audit { .. })),
        "{calls:?}"
    );
    let found = rig.carry_out(&calls[1]);
    assert_eq!(found.found.len(), 1);
    rig.session.handle_call_refused(&calls[0].op, now);
    rig.reply(&calls[1].op, &found, now);
    rig.settle();
    rig.live(2000);
    assert!(rig.places().is_empty());
    assert_eq!(ahead(&rig), 0, "100 were used, two seconds ago");
}

/// Whatever becomes of the calls that give places back, each is settled once.
#[test]
fn histories_settle_each_place_once_whatever_becomes_of_its_calls() {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) % below
    };
    for history in 0..1000 {
        let mut rig = Rig::new(1000);
        let day = 86_400_000;
        let long = |taken| AcquireOptions { lease: ms(3_600_000), ..charged(taken, day) };
        let base = rig.request_with(long(3_600_000));
        rig.settle();
        assert_eq!(rig.progress(base), Progress::Held);
        let mut due = 3_600_000;
        let mut held: Vec<(usize, u64, Option<u64>)> = Vec::new();
        for _ in 0..60 {
            match random(9) {
                0..=2 => {
                    let taken = 1 + random(100_000);
                    let index = rig.request_with(long(taken));
                    rig.settle();
                    match rig.progress(index) {
                        Progress::Held => held.push((index, taken, None)),
                        other => panic!("{other:?}"),
                    }
                }
                3 | 4 if !held.is_empty() => {
                    let at = usize::try_from(random(held.len() as u64)).unwrap();
                    let used = random(200_000);
                    rig.session.handle_used(held[at].0, 0, used * 1000);
                    held[at].2 = Some(used);
                }
                5 | 6 if !held.is_empty() => {
                    let at = usize::try_from(random(held.len() as u64)).unwrap();
                    let (index, taken, used) = held.swap_remove(at);
                    if random(3) == 0 {
                        let now = rig.now();
                        rig.session.handle_release(index, now);
                    }
                    rig.leave(index);
                    due += used.unwrap_or(taken);
                }
                7 => {
                    // What was sent meets some fate.
                    let (calls, now) = (rig.calls(), rig.now());
                    let mut is_broken = false;
                    for call in calls {
                        let fate = random(5);
                        let reply = (fate < 4 && !is_broken).then(|| rig.carry_out(&call));
                        match (fate, reply) {
                            _ if is_broken => {}
                            (0 | 2, Some(reply)) => rig.reply(&call.op, &reply, now),
                            (1, _) => rig.session.handle_call_error(&call.op, now),
                            _ => is_broken = true,
                        }
                    }
                    if is_broken {
                        if random(2) == 0 {
                            rig.session.handle_unreachable(now);
                            rig.pass(random(50));
                        }
                        rig.reconnect(same_data());
                    }
                    rig.settle();
                }
                _ => rig.pass(1 + random(20)),
            }
        }
        for (index, taken, used) in held {
            rig.leave(index);
            due += used.unwrap_or(taken);
        }
        rig.leave(base);
        rig.settle();
        rig.live(5000);
        assert!(rig.places().is_empty(), "{history}");
        assert_eq!(ahead(&rig) + rig.now_ms, due, "{history}");
    }
}

/// A place that was granted while the process was cut off, and is given up before it hears of that.
#[test]
fn a_request_that_gave_up_before_it_heard_of_its_grant_used_nothing() {
    let mut rig = Rig::new(1);
    let held = rig.request_with(charged(10, 10_000));
    let waits = rig.request_with(charged(9000, 10_000));
    rig.settle();
    assert_eq!(rig.progress(held), Progress::Held);
    rig.leave(held);
    let release = rig.call().expect("a release");
    let (_lost, now) = (rig.carry_out(&release), rig.now());
    assert_eq!(ahead(&rig), 9010);
    rig.session.handle_wait_timeout(waits, now);
    rig.leave(waits);
    rig.reconnect(same_data());
    rig.settle();
    assert!(rig.places().is_empty());
    assert_eq!(ahead(&rig), 10, "its request was told that it waited in vain");
}

#[test]
fn who_waits_for_the_budget_of_a_share_is_woken() {
    let mut rig = outage(50);
    // A fifth of the limit: 40 ms take 200.
    let options = AcquireOptions { max_queue: Some(8), ..local(10, charged(40, 1000)) };
    let all: Vec<_> = (0..8).map(|_| rig.request_with(options)).collect();
    let passed = |rig: &mut Rig| {
        all.iter().filter(|index| rig.progress(**index) == Progress::Admitted).count()
    };
    assert_eq!(passed(&mut rig), 5);
    rig.pass(201);
    assert_eq!(passed(&mut rig), 6);
    // One used nothing.
    rig.session.handle_used(all[0], 0, 0);
    rig.leave(all[0]);
    assert_eq!(rig.progress(all[6]), Progress::Admitted);
    rig.pass(201);
    assert_eq!(rig.progress(all[7]), Progress::Admitted);
}

#[test]
fn a_permit_that_lingers_settles_once_at_the_end() {
    let mut rig = Rig::new(100);
    let options = AcquireOptions { linger_ms: 1000, ..charged(9000, 10_000) };
    let index = rig.request_with(options);
    rig.settle();
    assert_eq!(rig.progress(index), Progress::Held);
    rig.session.handle_used(index, 0, 5_000_000);
    rig.session.handle_break_off(index);
    rig.leave(index);
    rig.live(500);
    assert_eq!(ahead(&rig), 8500);
    rig.live(1000);
    assert_eq!(ahead(&rig), 3500);
    assert!(rig.places().is_empty());
}

#[test]
fn a_permit_that_is_kept_goes_to_no_request_with_a_budget() {
    let mut rig = Rig::new(1);
    let kept = rig.request_with(AcquireOptions { reuse_ms: 50, ..OPTIONS });
    rig.settle();
    assert_eq!(rig.progress(kept), Progress::Held);
    let waits = rig.request_with(AcquireOptions { reuse_ms: 50, ..charged(100, 1000) });
    rig.leave(kept);
    assert_ne!(rig.progress(waits), Progress::Held);
    rig.settle();
    assert_eq!((rig.progress(waits), ahead(&rig)), (Progress::Held, 100));
}
