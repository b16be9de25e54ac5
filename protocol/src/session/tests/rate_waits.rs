//! What a refusal tells of those ahead that the rate lets start only one after another.

use super::*;
use crate::bound::Bound;
use crate::rate::Rate;

/// This many starts in this many ms. The queue has room for 25.
fn rated(starts: u32, window_ms: u64) -> AcquireOptions {
    let rate = Rate::parse(&format!("{starts}/{window_ms}"));
    AcquireOptions { rate, max_queue: Some(25), ..OPTIONS }
}

fn smooth(starts: u32, window_ms: u64) -> AcquireOptions {
    let exact = rated(starts, window_ms);
    AcquireOptions { rate: exact.rate.map(Rate::spread), ..exact }
}

fn of_tenant(options: AcquireOptions, tenant: u64) -> AcquireOptions {
    let claim = Some(Claim::new(Tenant::of_hash(tenant)));
    AcquireOptions { claim, max_waiting: 100, ..options }
}

/// Until the rate allows the next start, and from then on, as a refusal tells.
fn told(rig: &mut Rig, index: usize) -> (Option<Duration>, Duration) {
    let Progress::Refused { ends_in, rate_wait, expected_wait, .. } = rig.progress(index) else {
        panic!("{:?}", rig.progress(index));
    };
    assert_eq!(expected_wait, None);
    (ends_in, rate_wait)
}

fn refused(rig: &mut Rig, options: AcquireOptions) -> Duration {
    let index = rig.request_with(options);
    rig.settle();
    told(rig, index).1
}

fn requests(rig: &mut Rig, count: usize, options: AcquireOptions) -> Vec<usize> {
    let all = (0..count).map(|_| rig.request_with(options)).collect();
    rig.settle();
    all
}

#[test]
fn a_refusal_tells_how_long_the_rate_needs_for_those_ahead() {
    for (options, at_once, wait) in [
        (rated(10, 1000), 10, 2000),
        (rated(30, 1000), 30, 0),
        (rated(25, 1000), 25, 1000),
        (smooth(10, 1000), 1, 2500),
        (smooth(2000, 1000), 20, 10),
        (rated(1, 3_600_000), 1, 25 * 3_600_000),
    ] {
        // Where the limit is full, too, the rate is not blamed.
        for limit in [1000, at_once] {
            let mut rig = Rig::new(limit);
            let all = requests(&mut rig, at_once as usize + 25, options);
            let waits = all[at_once as usize..].to_vec();
            assert!(waits.iter().all(|index| rig.progress(*index) == Progress::Waiting));
            assert_eq!(refused(&mut rig, options), ms(wait), "full: {options:?}");
            let none = AcquireOptions { max_queue: None, ..options };
            assert_eq!(refused(&mut rig, none), ms(wait), "may not wait: {options:?}");
        }
    }
}

#[test]
fn one_that_waits_in_vain_is_told_how_long_those_need_that_still_wait() {
    let mut rig = Rig::new(100);
    let all = requests(&mut rig, 26, smooth(10, 1000));
    for (left, index) in all[1..].iter().enumerate() {
        let now = rig.now();
        rig.session.handle_wait_timeout(*index, now);
        let others = 24 - u64::try_from(left).expect("few");
        assert_eq!(told(&mut rig, *index).1, ms(100 * others));
    }
}

#[test]
fn no_request_starts_earlier_than_a_refusal_tells_or_much_later() {
    for (options, window_ms) in
        [(rated(10, 1000), 1000), (smooth(10, 1000), 100), (rated(7, 300), 300)]
    {
        let mut rig = Rig::new(100);
        requests(&mut rig, 10, options);
        rig.live(30);
        while rig.session.seen.is_none_or(|seen| seen.waiting < 25) {
            requests(&mut rig, 1, options);
        }
        rig.live(20);
        let full = requests(&mut rig, 1, options)[0];
        let (next, wait) = told(&mut rig, full);
        let least = next.expect("the rate keeps the next one back") + wait;
        // It comes now, and finds room.
        let came = rig.now();
        let own = requests(&mut rig, 1, AcquireOptions { max_queue: Some(100), ..options })[0];
        while rig.progress(own) != Progress::Held {
            assert!(rig.now().since(came) < ms(10_000));
            rig.live(10);
        }
        let took = rig.now().since(came);
        assert!(took >= least, "{options:?}: {took:?} of {least:?}");
        // Answers are late by 10 ms at each opening.
        assert!(took <= (least + ms(window_ms)) * 5 / 4, "{options:?}: {took:?} of {least:?}");
    }
}

/// Lets places of another process wait.
fn elsewhere(rig: &mut Rig, count: u64, options: AcquireOptions) {
    for n in 1..=count {
        let rate = options.rate.and_then(|rate| rate.of_cost(1));
        let bound = Some(Bound { limit: 100, headroom: 0, rate });
        let claim = options.claim.or_else(|| Some(Claim::without_tenant()));
        let id = PlaceId { node: OTHER, poll_only: false, n, bound, claim };
        let caller = Caller { max_waiting: 100, ..rig.ask(OTHER, 100) };
        let reply = rig.ledger.acquire(caller, 3_600_000, Some(50), &[], &[id], &mut |_, _| true);
        assert!(matches!(reply.statuses[0], PlaceStatus::Waiting(_)));
    }
}

#[test]
fn those_of_other_processes_are_ahead_too() {
    let mut rig = Rig::new(100);
    let options = smooth(10, 1000);
    requests(&mut rig, 1, options);
    elsewhere(&mut rig, 20, options);
    let none = AcquireOptions { max_queue: None, ..options };
    assert_eq!(refused(&mut rig, none), ms(2000));
}

#[test]
fn a_tenant_is_told_of_its_own_line_in_this_process() {
    let mut rig = Rig::new(100);
    requests(&mut rig, 6, of_tenant(smooth(10, 1000), 1));
    // How many of them are of which tenant is an estimate, and this is a bound.
    elsewhere(&mut rig, 20, of_tenant(smooth(10, 1000), 1));
    for (tenant, wait) in [(1, 500), (2, 0)] {
        let none = AcquireOptions { max_queue: None, ..of_tenant(smooth(10, 1000), tenant) };
        assert_eq!(refused(&mut rig, none), ms(wait), "{tenant}");
    }
}

#[test]
fn the_rate_in_force_counts() {
    let mut rig = Rig::new(100);
    requests(&mut rig, 11, smooth(10, 1000));
    let now = rig.now();
    rig.session
        .handle_override(Override { rate: Rate::parse("10/2000"), ..Override::default() }, now);
    rig.settle();
    let none = AcquireOptions { max_queue: None, ..smooth(10, 1000) };
    assert_eq!(refused(&mut rig, none), ms(2000));
}

#[test]
fn nothing_is_told_without_a_rate_or_while_the_queue_does_not_matter() {
    let none = |options| AcquireOptions { max_queue: None, ..options };
    let mut rig = Rig::new(1);
    requests(&mut rig, 6, OPTIONS);
    assert_eq!(refused(&mut rig, none(OPTIONS)), Duration::ZERO);
    let mut rig = Rig::new(100);
    requests(&mut rig, 6, smooth(10, 1000));
    assert_eq!(refused(&mut rig, none(smooth(10, 1000))), ms(500));
    let until = rig.now() + ms(700);
    let now = rig.now();
    rig.session.handle_pause(Some(until), now);
    let index = rig.request_with(none(smooth(10, 1000)));
    rig.settle();
    assert_eq!(told(&mut rig, index), (Some(ms(700)), Duration::ZERO));
}
