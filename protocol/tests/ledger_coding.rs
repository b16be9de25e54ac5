//! The ledger as bytes: what is read is what was written, goes on as that would, and has one form.

#[expect(dead_code, reason = "others use more of it")]
mod desk;
mod histories;

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tower_semaphore_protocol::{
    Claim, FurtherLimit, Ledger, LineId, NodeId, PlaceId, TICKET_MIN, Tenant, WORK_MAX,
};

use self::desk::{Desk, LEASE, NODE, claim};
use self::histories::{Step, World, history};

fn encoded(ledger: &Ledger) -> Vec<u8> {
    let mut bytes = Vec::new();
    ledger.encode(&mut bytes);
    bytes
}

fn decoded(bytes: &[u8], work_max: usize) -> Ledger {
    let mut ledger = Ledger::decode(bytes).unwrap_or_else(|error| panic!("{error}: {bytes:x?}"));
    ledger.set_work_max(work_max);
    ledger
}

/// The turns and what else is seen of lines.
fn lines(ledger: &Ledger) -> (HashMap<LineId, u64>, Vec<(LineId, Tenant)>) {
    let turns = ledger.turns().map(|(line, turn)| (line, turn.to_bits()));
    (turns.collect(), ledger.further_lines().collect())
}

/// Takes the steps with one ledger that is never written, with one that is read again after each, and with one that was
/// read once, at this step.
fn run(work_max: usize, steps: &[Step], at: usize) -> Result<(), TestCaseError> {
    let mut world = World::new();
    let mut ledger = Ledger::with_work_max(work_max);
    let mut reread = ledger.clone();
    let mut once = ledger.clone();
    for (i, step) in steps.iter().enumerate() {
        let Some(action) = world.action(step) else { continue };
        let outcome = action.take(&mut ledger, &world.gone);
        for (other, name) in [(&mut reread, "read again"), (&mut once, "once")] {
            prop_assert_eq!(&action.take(other, &world.gone), &outcome, "{}: {:?}", name, &action);
            prop_assert!(*other == ledger, "{name}: {action:?}");
            prop_assert_eq!(lines(other), lines(&ledger), "{}: {:?}", name, &action);
            prop_assert_eq!(encoded(other), encoded(&ledger), "{}: {:?}", name, &action);
        }
        world.look(&ledger);
        reread = decoded(&encoded(&reread), work_max);
        if i == at {
            once = reread.clone();
        }
        prop_assert!(reread == ledger && lines(&reread) == lines(&ledger), "{action:?}");
        prop_assert_eq!(encoded(&reread), encoded(&ledger));
    }
    Ok(())
}

/// The ledger after these steps.
fn after(steps: &[Step]) -> Ledger {
    let (mut world, mut ledger) = (World::new(), Ledger::new());
    for step in steps {
        if let Some(action) = world.action(step) {
            action.take(&mut ledger, &world.gone);
            world.look(&ledger);
        }
    }
    ledger
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_ledger_that_was_read_goes_on_as_the_one_that_was_written(
        (work_max, steps) in history(),
        at in 0..70usize,
    ) {
        run(work_max, &steps, at)?;
    }

    #[test]
    fn equal_ledgers_have_the_same_bytes_in_whatever_order_their_places_came(
        (_, steps) in history(),
        order in any::<u64>(),
    ) {
        let ledger = after(&steps);
        let mut places: Vec<_> = ledger.places().collect();
        places.sort_unstable_by_key(|(id, ..)| id.n);
        let one = returned(&places);
        places.sort_unstable_by_key(|(id, ..)| id.n.wrapping_mul(order | 1) >> 32);
        let other = returned(&places);
        prop_assert!(one == other && lines(&one) == lines(&other));
        prop_assert_eq!(encoded(&one), encoded(&other));
    }

    #[test]
    fn whatever_is_read_has_no_other_form(
        (_, steps) in history(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..5u8), 1..4),
    ) {
        let mut bytes = encoded(&after(&steps));
        for (at, byte, how) in edits {
            let at = at.index(bytes.len());
            edit(&mut bytes, at, byte, how);
        }
        check(&bytes);
    }

}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_are_refused_or_a_ledger(bytes in prop::collection::vec(few(), 0..80)) {
        check(&bytes);
        check(&[&[1, 1][..], &bytes].concat());
        check(&[&[1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 7][..], &bytes].concat());
    }
}

/// Bytes that are likely to be counts and indexes.
fn few() -> impl Strategy<Value = u8> {
    prop_oneof![4 => 0..4u8, 2 => Just(0), 1 => any::<u8>()]
}

/// A ledger to which these places return in one call, under a limit of 0.
fn returned(places: &[(PlaceId, u64, Option<u64>)]) -> Ledger {
    let mut desk = Desk::new(0);
    let proof = |ticket: Option<u64>| ticket.unwrap_or(TICKET_MIN - 2);
    let proofs: Vec<_> = places.iter().map(|(id, _, ticket)| (*id, proof(*ticket))).collect();
    desk.ask(NODE, |ledger, caller, post| ledger.reassert(caller, LEASE, &proofs, post));
    desk.ledger
}

fn edit(bytes: &mut Vec<u8>, at: usize, byte: u8, how: u8) {
    match how {
        0 => bytes[at] = byte,
        1 => bytes[at] = bytes[at].wrapping_add(1),
        2 => bytes.insert(at, byte),
        3 if bytes.len() > 1 => _ = bytes.remove(at),
        _ => bytes.truncate(at + 1),
    }
}

/// Whatever is read is written as it was, and every operation on it ends.
fn check(bytes: &[u8]) {
    let Ok(mut ledger) = Ledger::decode(bytes) else { return };
    assert_eq!(encoded(&ledger), bytes);
    let mut desk = Desk::new(5);
    let ids: Vec<_> = ledger.places().map(|(id, ..)| id).collect();
    let newcomers = [desk.id(None), desk.id(claim(1)), desk.id(claim(1).also(limit(1)))];
    std::mem::swap(&mut desk.ledger, &mut ledger);
    desk.renew(&ids);
    desk.acquire_all(Some(10), &newcomers);
    let again = Ledger::decode(&encoded(&desk.ledger)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(again, desk.ledger);
    desk.limit = 100;
    desk.release(&ids);
    desk.release(&newcomers);
    assert_eq!((desk.ledger.in_use(), desk.ledger.waiting()), (0, 0));
    assert_eq!(desk.ledger.turns().count(), 0);
}

fn limit(number: u64) -> FurtherLimit {
    FurtherLimit::of_hash(number, 1)
}

/// What histories are to reach, if the tests above are to mean anything.
#[test]
fn histories_use_all_that_a_ledger_has() {
    let mut seen = BTreeSet::new();
    let config = Config { cases: 300, failure_persistence: None, ..Config::default() };
    let rng = proptest::test_runner::TestRng::deterministic_rng(config.rng_algorithm);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let seen_in = std::cell::RefCell::new(&mut seen);
    let run = runner.run(&history(), |(work_max, steps)| {
        let (mut world, mut ledger) = (World::new(), Ledger::with_work_max(work_max));
        for step in &steps {
            if let Some(action) = world.action(step) {
                let outcome = action.take(&mut ledger, &world.gone);
                world.look(&ledger);
                let mut seen = seen_in.borrow_mut();
                seen.extend(outcome.reply.more.then_some("more"));
                note(&ledger, &mut seen);
            }
        }
        Ok(())
    });
    assert!(run.is_ok());
    let all = ["asleep", "budget", "further", "in turn", "more", "parked", "plain", "polls"];
    let all = all.into_iter().chain(["rate", "start", "stopped", "two lease ends"]);
    assert_eq!(seen, all.collect());
}

fn note(ledger: &Ledger, seen: &mut BTreeSet<&'static str>) {
    seen.extend(ledger.starts().next().map(|_| "start"));
    seen.extend(ledger.budgets().next().map(|_| "budget"));
    for (line, turn) in ledger.turns() {
        let further = ledger.further_lines().any(|(other, _)| other == line);
        seen.extend(further.then_some("further"));
        seen.insert(match turn {
            f64::INFINITY => "stopped",
            turn if turn > 0.0 => "in turn",
            turn if turn > -1.0 => "parked",
            _ => "asleep",
        });
    }
    let mut last = None;
    for (id, lease_end, ticket) in ledger.places() {
        seen.extend(id.poll_only.then_some("polls"));
        seen.extend((ticket.is_some() && id.line().is_none()).then_some("plain"));
        seen.extend(id.rate().map(|_| "rate"));
        let is_other = last.replace(lease_end).is_some_and(|last| last != lease_end);
        seen.extend(is_other.then_some("two lease ends"));
    }
}

/// Two classes of requests whose lines have one number: a chance of 1 in 1.6·10⁷ for each two.
fn of_one_number() -> (Claim, Claim) {
    let mut lines: HashMap<_, Claim> = HashMap::new();
    for tenant in 1..100_000 {
        let of = claim(tenant).also(limit(1));
        if let Some(other) = lines.insert(of.line(), of) {
            return (other, of);
        }
    }
    panic!("none of 100,000 meet")
}

#[test]
fn a_line_of_two_tenants_stays_listed_under_the_first() {
    let (a, b) = of_one_number();
    let mut desk = Desk::new(1);
    desk.come(None);
    let first = desk.come(a);
    desk.come(b);
    desk.release(&[first]);
    let listed: Vec<_> = desk.ledger.further_lines().map(|(_, tenant)| tenant).collect();
    assert_eq!(listed, [a.tenant()], "though only the other's place is left");
    let bytes = encoded(&desk.ledger);
    let copy = decoded(&bytes, WORK_MAX);
    assert_eq!(lines(&copy), lines(&desk.ledger));
    assert_eq!(encoded(&copy), bytes);
}

#[test]
fn what_is_kept_without_a_place_is_written() {
    let mut desk = Desk::new(1);
    let empty = encoded(&desk.ledger);
    assert_eq!(empty, [&[1, 1][..], &[0; 11]].concat());
    assert!(decoded(&empty, WORK_MAX).is_empty());
    // All of a budget of nothing: it is full, though it was asked for.
    let nothing = tower_semaphore_protocol::Charge::of_hash(1, 0, 1000).unwrap();
    let id = desk.come(Claim::without_tenant().charged(nothing));
    let copy = decoded(&encoded(&desk.ledger), WORK_MAX);
    assert_eq!(copy, desk.ledger);
    desk.release(&[id]);
    assert_eq!(encoded(&desk.ledger), empty);
}

// --- size -------------------------------------------------------------------------------------------

/// Bytes for each of 10,000 waiting places of four processes, one of which comes each 0.3 ms. Their leases have one length,
/// and no end that is a time.
fn bytes_each(claim_of: impl Fn(u64) -> Option<Claim>) -> f64 {
    const NEVER: u64 = 90_000_000_000_000;
    let mut desk = Desk { tick: 300, ..Desk::new(1) };
    let count = 10_000;
    for i in 0..=count {
        let id = desk.id_of(NodeId::new(u64::MAX / (i % 4 + 1)), claim_of(i));
        desk.ask(id.node, |ledger, caller, post| {
            let lease_ms = NEVER - caller.now / 1000;
            ledger.acquire(caller, lease_ms, Some(100_000), &[], &[id], post)
        });
    }
    assert_eq!(desk.ledger.waiting(), count);
    let bytes = encoded(&desk.ledger);
    assert_eq!(decoded(&bytes, WORK_MAX), desk.ledger);
    bytes.len() as f64 / count as f64
}

#[test]
fn a_waiting_place_takes_five_bytes() {
    let plain = bytes_each(|_| None);
    assert!(plain <= 5.5, "{plain}");
}

#[test]
fn and_eight_with_a_tenant() {
    let tenants = bytes_each(|i| Some(claim(i * 7919 % 100)));
    assert!(tenants <= 8.0, "{tenants}");
    let further = bytes_each(|i| Some(claim(i * 7919 % 100).also(limit(i % 3))));
    assert!(further <= 8.0, "{further}");
}
