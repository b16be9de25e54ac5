//! Generated histories compare the scripts of `lua/` with the ledger: the same operations at the same times must give
//! the same replies, the same messages and the same set.
//!
//! Some histories have tenants: places with claims, and some without between them.
//!
//! The scripts run on a real server. Only their clock is replaced, by two keys that the test sets, so that time can
//! stand still, jump and go back. The server's replies are decoded here, and not by the crate's own decoder.
//!
//! `TEST_HISTORIES` is the number of histories to generate; 2000 by default. A failure is printed as the shortest
//! history that still fails.

mod model;
mod mutants;
mod wire;

use std::cell::{Cell, RefCell};
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use tower_semaphore::protocol::{BoundRate, Charge, Claim, FurtherLimit, Tenant, WORK_MAX};

use self::model::{Expected, Model};
use self::wire::{Item, Lua, QUEUED, Wire};
use crate::support::redis::TestRedis;

const KEY: &str = "t:{x}";
const NODES: usize = 4;

// --- histories ----------------------------------------------------------------------------------

/// The history of one semaphore.
#[derive(Clone, Debug)]
struct History {
    /// Whether the result of PUBLISH is believed.
    counted: bool,
    limit: u32,
    headroom: u32,
    /// An id where there is none to choose from.
    fallback: Asks,
    steps: Vec<Step>,
}

/// What the numbers stand for is determined when the step is taken, so a history without some of its steps is a
/// history, too. Shrinking needs that.
#[derive(Clone, Debug)]
enum Step {
    Acquire { node: usize, leaving: Vec<Pick>, poll_only: bool, ids: Vec<Asks>, terms: Terms },
    AcquireAgain { node: usize, leaving: Vec<Pick>, picks: Vec<Pick>, terms: Terms },
    Release { node: usize, picks: Vec<Pick> },
    Renew { node: usize, picks: Vec<Pick>, lease_ms: u64 },
    Reassert { node: usize, proofs: Vec<(Pick, Proof)>, lease_ms: u64 },
    Inspect { most: usize, rate: Option<BoundRate> },
    Revoke { pick: Pick },
    Limit(u32),
    Headroom(u32),
    ForAll(bool),
    Time(Time),
    Subscribe { node: usize, alive: bool },
    Wipe,
}

/// The ids of the newcomers.
#[derive(Clone, Copy, Debug)]
struct Terms {
    lease_ms: u64,
    max_queue: Option<u32>,
    max_waiting: u32,
    /// Whether those that have to wait recall permits that other nodes keep.
    recalls: bool,
}

/// The id of a place.
#[derive(Clone, Debug)]
enum Pick {
    /// An id in the set.
    Present(usize),
    /// An id that was used before, present or not.
    Known(usize),
    /// An id that was never sent before.
    New { node: usize, poll_only: bool, asks: Asks },
}

/// What the id of a place contains besides its number.
#[derive(Clone, Copy, Debug, Default)]
struct Asks {
    /// Limit and headroom.
    bound: Option<(u32, u32)>,
    claim: Option<Claim>,
    rate: Option<BoundRate>,
}

impl Asks {
    /// A place with a rate has a bound and a claim in any case.
    fn with_rate(self, rate: Option<BoundRate>) -> Self {
        let bound = self.bound.or_else(|| rate.map(|_| (3, 0)));
        let claim = self.claim.or_else(|| rate.map(|_| Claim::without_tenant()));
        Self { bound, claim, rate }
    }
}

/// The proof of a place that is to be counted again.
#[derive(Clone, Debug)]
enum Proof {
    /// The lease end that it received last.
    LeaseEnd,
    /// The ticket that it received last, or else that of another place.
    Ticket(usize),
    /// A lease end at this distance from now, in ms.
    Near(i64),
    /// The proof of a place that no backend knew.
    Never,
    /// The next one replaces it.
    Leaves,
}

#[derive(Clone, Debug)]
enum Time {
    /// Forward or back by this many µs.
    By(i64),
    /// To the lease end of a place, and this many ms further.
    LeaseEnd(usize, i64),
}

fn lease() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 1_000..30_000u64, 1 => 1..1_000u64, 1 => 30_000..86_400_000u64]
}

fn queue() -> impl Strategy<Value = Option<u32>> {
    prop_oneof![
        2 => Just(None),
        2 => Just(Some(0)),
        3 => (1..6u32).prop_map(Some),
        6 => (10..20_000u32).prop_map(Some),
        1 => Just(Some(u32::MAX)),
    ]
}

fn waiting() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(0), 4 => 1..12u32, 2 => 12..100u32, 5 => 20_000..40_000u32, 1 => Just(u32::MAX)]
}

fn limit() -> impl Strategy<Value = u32> {
    prop_oneof![12 => 1..6u32, 2 => 6..40u32, 1 => Just(0), 1 => 1..=u32::MAX]
}

/// Whether places have claims.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Of {
    Plain,
    Tenants,
    /// Most places have a rate, and so a claim.
    Rates,
    /// Most places have further limits, and some have a rate.
    Further,
    /// Most places take of budgets, and some have a rate or further limits.
    Budgets,
    /// Most places take of budgets of their tenants, and some have further limits.
    TenantsBudgets,
}

/// The claims of places: few tenants, so that they meet; few terms, so that levels do.
fn claim(of: Of) -> BoxedStrategy<Option<Claim>> {
    if of == Of::Plain {
        return Just(None).boxed();
    }
    let max = u64::from(Tenant::MAX);
    let tenant = prop_oneof![
        20 => prop::sample::select(vec![0, 1, 35, 1_234_567, max - 1]),
        1 => any::<u64>(),
    ];
    let weight = prop_oneof![6 => Just(1), 3 => 1..=3u32, 1 => 1..=64u32];
    let cost = prop_oneof![8 => Just(1), 3 => 2..=3u32, 1 => 4..=64u32];
    let class = prop_oneof![6 => Just(0), 2 => Just(1), 1 => 0..=7u8];
    let each = prop_oneof![
        7 => Just(None),
        3 => (1..=4u32).prop_map(Some),
        1 => (1..=Claim::EACH_MAX).prop_map(Some),
    ];
    let claim =
        (tenant, weight, cost, class, each).prop_map(|(tenant, weight, cost, class, each)| {
            let claim = Claim::new(Tenant::of_hash(tenant)).with_weight(weight).with_cost(cost);
            Some(claim.with_class(class).with_each(each))
        });
    let nobodys = prop_oneof![8 => Just(1), 3 => 2..=3u32, 1 => 4..=64u32]
        .prop_map(|cost| Some(Claim::without_tenant().with_cost(cost)));
    match of {
        Of::Rates => prop_oneof![4 => claim, 3 => nobodys, 1 => Just(None)].boxed(),
        Of::Further => {
            let any = prop_oneof![6 => claim, 4 => nobodys, 1 => Just(None)];
            // Few limits, so that places meet at them; two routes and two models, and others.
            let limit = (0..5u64, prop_oneof![5 => 1..4u32, 1 => 1..=u32::MAX]);
            (any, prop::collection::vec(limit, 0..=3))
                .prop_map(|(claim, limits)| {
                    let also = |claim: Claim, (hash, cap): (u64, u32)| {
                        claim.also(FurtherLimit::of_hash(hash * 3_355_442, cap))
                    };
                    claim.map(|claim| limits.into_iter().fold(claim, also))
                })
                .boxed()
        }
        Of::Budgets | Of::TenantsBudgets => {
            let is_own = of == Of::TenantsBudgets;
            let any = match is_own {
                false => prop_oneof![4 => claim, 6 => nobodys, 1 => Just(None)].boxed(),
                true => prop_oneof![10 => claim, 1 => nobodys, 1 => Just(None)].boxed(),
            };
            let further = if is_own { 5 } else { 1 };
            let limit = prop_oneof![9 => Just(None), further => (1..4u32).prop_map(Some)];
            let numbers = if is_own { 2..6 } else { 0..6 };
            (any, prop::collection::vec(charge(numbers), 0..=2), limit)
                .prop_map(|(claim, charges, limit)| {
                    let claim = claim.map(|claim| charges.into_iter().fold(claim, Claim::charged));
                    claim.map(|claim| match limit {
                        Some(cap) => claim.also(FurtherLimit::of_hash(7, cap)),
                        None => claim,
                    })
                })
                .boxed()
        }
        _ => prop_oneof![10 => claim, 4 => nobodys, 2 => Just(None)].boxed(),
    }
}

/// Few budgets, whose bursts take about as long as histories go on.
fn charge(numbers: Range<u64>) -> impl Strategy<Value = Charge> {
    let burst = prop_oneof![6 => Just(10_000_019), 1 => 1..30_000_000u64];
    let part = prop_oneof![1 => Just(0), 8 => 1..=1000u64, 1 => Just(1000)];
    // A tenant's own counts only for places with a tenant.
    (numbers, burst, part).prop_map(|(number, burst, part)| match number.checked_sub(3) {
        None => Charge::of_hash(number * 5_592_403, burst * part / 1000, burst).unwrap(),
        Some(own) => Charge::of_tenant(own * 14_556_671, burst * part / 1000, burst).unwrap(),
    })
}

/// The windows of rates, in µs.
const WINDOWS_US: [u64; 3] = [20_000_003, 6_000_001, 61_000_009];

/// Low rates, so that windows are full.
fn rate(of: Of) -> BoxedStrategy<Option<BoundRate>> {
    if matches!(of, Of::Plain | Of::Tenants) {
        return Just(None).boxed();
    }
    let window =
        prop_oneof![6 => Just(WINDOWS_US[0]), 1 => Just(WINDOWS_US[1]), 1 => Just(WINDOWS_US[2])];
    let rate = (prop_oneof![6 => 1..6u32, 1 => 6..70u32], window)
        .prop_map(|(starts, window)| BoundRate::new(starts, Duration::from_micros(window)));
    let longest = prop_oneof![3 => Just(0), 1 => Just(WINDOWS_US[2])];
    let rate = (rate, longest)
        .prop_map(|(rate, longest)| rate.map(|rate| rate.kept_for(Duration::from_micros(longest))));
    let none = if of == Of::Rates { 1 } else { 20 };
    prop_oneof![5 => rate, none => Just(None)].boxed()
}

fn asks(of: Of) -> impl Strategy<Value = Asks> {
    let bound = prop_oneof![
        3 => Just(None),
        6 => (1..6u32, 0..=2u32).prop_map(Some),
        1 => (any::<u32>(), any::<u32>()).prop_map(Some),
    ];
    (bound, claim(of), rate(of))
        .prop_map(move |(bound, claim, rate)| Asks { bound, claim, rate: None }.with_rate(rate))
}

fn pick(of: Of) -> impl Strategy<Value = Pick> {
    let index = || any::<u16>().prop_map(usize::from);
    prop_oneof![
        7 => index().prop_map(Pick::Present),
        2 => index().prop_map(Pick::Known),
        1 => (0..NODES, any::<bool>(), asks(of))
            .prop_map(|(node, poll_only, asks)| Pick::New { node, poll_only, asks }),
    ]
}

fn proof() -> impl Strategy<Value = Proof> {
    prop_oneof![
        4 => Just(Proof::LeaseEnd),
        3 => any::<u16>().prop_map(|i| Proof::Ticket(i.into())),
        2 => (-2..=2i64).prop_map(Proof::Near),
        1 => (-20_000..20_000i64).prop_map(Proof::Near),
        1 => Just(Proof::Never),
        2 => Just(Proof::Leaves),
    ]
}

fn time() -> impl Strategy<Value = Time> {
    let second = 1_000_000i64;
    prop_oneof![
        3 => (1..5_000i64).prop_map(Time::By),
        4 => (0..3 * second).prop_map(Time::By),
        2 => (0..40 * second).prop_map(Time::By),
        2 => (-5 * second..0).prop_map(Time::By),
        4 => (any::<u16>(), -1..=1i64).prop_map(|(i, ms)| Time::LeaseEnd(i.into(), ms)),
    ]
}

fn step(of: Of, batch: RangeInclusive<usize>) -> impl Strategy<Value = Step> {
    let most = *batch.end();
    let sizes = batch.clone();
    let picks = move || prop::collection::vec(pick(of), sizes.clone());
    let few = move || prop::collection::vec(pick(of), 0..=most);
    let leaving = move || prop_oneof![Just(Vec::new()), few()];
    let terms = || {
        (lease(), queue(), waiting(), any::<bool>()).prop_map(
            |(lease_ms, max_queue, max_waiting, recalls)| Terms {
                lease_ms,
                max_queue,
                max_waiting,
                recalls,
            },
        )
    };
    let proofs = prop::collection::vec((pick(of), proof()), batch.clone());
    let ids = (prop::collection::vec(asks(of), batch), rate(of)).prop_map(|(mut ids, rate)| {
        ids.iter_mut().for_each(|asks| *asks = asks.with_rate(rate));
        ids
    });
    let node = 0..NODES;
    let step = prop_oneof![
        30 => (node.clone(), leaving(), prop::bool::weighted(0.15), ids, terms()).prop_map(
            |(node, leaving, poll_only, ids, terms)| Step::Acquire { node, leaving, poll_only, ids, terms }
        ),
        6 => (node.clone(), leaving(), picks(), terms()).prop_map(
            |(node, leaving, picks, terms)| Step::AcquireAgain { node, leaving, picks, terms }
        ),
        18 => (node.clone(), few()).prop_map(|(node, picks)| Step::Release { node, picks }),
        14 => (node.clone(), picks(), lease())
            .prop_map(|(node, picks, lease_ms)| Step::Renew { node, picks, lease_ms }),
        8 => (node.clone(), proofs, lease())
            .prop_map(|(node, proofs, lease_ms)| Step::Reassert { node, proofs, lease_ms }),
        4 => (1..=4 * most, rate(Of::Rates)).prop_map(|(most, rate)| Step::Inspect { most, rate }),
        4 => pick(of).prop_map(|pick| Step::Revoke { pick }),
        4 => limit().prop_map(Step::Limit),
        2 => any::<bool>().prop_map(Step::ForAll),
        16 => time().prop_map(Step::Time),
        4 => (node, any::<bool>()).prop_map(|(node, alive)| Step::Subscribe { node, alive }),
        1 => Just(Step::Wipe),
    ];
    match of {
        Of::Plain => step.boxed(),
        _ => prop_oneof![40 => step, 1 => (0..=3u32).prop_map(Step::Headroom)].boxed(),
    }
}

fn history(
    of: Of,
    batch: RangeInclusive<usize>,
    steps: RangeInclusive<usize>,
) -> impl Strategy<Value = History> {
    let headroom = if of == Of::Plain { 0 } else { 2u32 };
    let is_rated = !matches!(of, Of::Plain | Of::Tenants);
    let claim = is_rated.then(|| Claim::new(Tenant::of_hash(0)));
    let fallback = Asks { claim, ..Asks::default() };
    (
        prop::bool::weighted(0.8),
        limit(),
        0..=headroom,
        prop::collection::vec(step(of, batch), steps),
    )
        .prop_map(move |(counted, limit, headroom, steps)| History {
            counted,
            limit,
            headroom,
            fallback,
            steps,
        })
}

// --- the tests ------------------------------------------------------------------------------------

fn histories() -> u32 {
    std::env::var("TEST_HISTORIES").map_or(2000, |n| n.parse().expect("TEST_HISTORIES: a number"))
}

/// Generates histories until one differs, which is then made as short as possible.
fn run(
    lua: &Lua,
    cases: u32,
    shrink: u32,
    histories: &impl Strategy<Value = History>,
) -> Result<[usize; 2], String> {
    let server = TestRedis::start();
    let wire = RefCell::new(Wire::open(&server));
    wire.borrow_mut().load(lua);
    let counts = Cell::new([0; 2]);
    let config =
        Config { cases, max_shrink_iters: shrink, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(histories, |history| {
        let [count, early] = wire.borrow_mut().check(lua, &history).map_err(TestCaseError::fail)?;
        let [counts_before, early_before] = counts.get();
        counts.set([counts_before + count, early_before + early]);
        Ok(())
    });
    match outcome {
        Ok(()) => Ok(counts.get()),
        Err(TestError::Fail(why, history)) => Err(format!("{why}\n{history:#?}")),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}

#[test]
fn the_scripts_do_what_the_ledger_does() {
    let cases = histories();
    let [operations, _] = run(&Lua::as_it_is(), cases, 4000, &history(Of::Plain, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(operations >= 50 * cases as usize, "only {operations} operations were compared");
}

/// A bound on work that small histories reach.
const SMALL_WORK: usize = 8;

#[test]
fn they_stop_at_the_same_bound_on_work() {
    let lua = Lua::new(SMALL_WORK, |_, text| text.to_owned());
    let [operations, early] = run(&lua, histories(), 4000, &history(Of::Plain, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(early > operations / 400, "only {early} of {operations} reached the bound");
}

#[test]
fn they_do_so_with_hundreds_of_places_too() {
    let cases = histories().div_ceil(50);
    run(&Lua::as_it_is(), cases, 200, &history(Of::Plain, 1..=512, 10..=20))
        .unwrap_or_else(|difference| panic!("{difference}"));
}

#[test]
fn they_share_between_tenants_as_the_ledger_does() {
    let cases = histories();
    let [operations, _] = run(&Lua::as_it_is(), cases, 4000, &history(Of::Tenants, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(operations >= 50 * cases as usize, "only {operations} operations were compared");
}

#[test]
fn with_tenants_they_stop_at_the_same_bound_on_work() {
    let lua = Lua::new(SMALL_WORK, |_, text| text.to_owned());
    let [operations, early] = run(&lua, histories(), 4000, &history(Of::Tenants, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(early > operations / 400, "only {early} of {operations} reached the bound");
}

#[test]
fn they_do_so_with_hundreds_of_places_of_tenants_too() {
    let cases = histories().div_ceil(50);
    run(&Lua::as_it_is(), cases, 200, &history(Of::Tenants, 1..=512, 10..=20))
        .unwrap_or_else(|difference| panic!("{difference}"));
}

#[test]
fn they_observe_rates_as_the_ledger_does() {
    let cases = histories();
    let [operations, _] = run(&Lua::as_it_is(), cases, 4000, &history(Of::Rates, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(operations >= 50 * cases as usize, "only {operations} operations were compared");
}

#[test]
fn with_rates_they_stop_at_the_same_bound_on_work() {
    let lua = Lua::new(SMALL_WORK, |_, text| text.to_owned());
    let [operations, early] = run(&lua, histories(), 4000, &history(Of::Rates, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(early > operations / 1000, "only {early} of {operations} reached the bound");
}

#[test]
fn they_do_so_with_hundreds_of_places_with_rates_too() {
    let cases = histories().div_ceil(50);
    run(&Lua::as_it_is(), cases, 200, &history(Of::Rates, 1..=512, 10..=20))
        .unwrap_or_else(|difference| panic!("{difference}"));
}

#[test]
fn they_park_lines_at_further_limits_as_the_ledger_does() {
    let cases = histories();
    let [operations, _] = run(&Lua::as_it_is(), cases, 4000, &history(Of::Further, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(operations >= 50 * cases as usize, "only {operations} operations were compared");
}

#[test]
fn with_further_limits_they_stop_at_the_same_bound_on_work() {
    let lua = Lua::new(SMALL_WORK, |_, text| text.to_owned());
    let [operations, early] = run(&lua, histories(), 4000, &history(Of::Further, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(early > operations / 1000, "only {early} of {operations} reached the bound");
}

#[test]
fn they_do_so_with_hundreds_of_places_with_further_limits_too() {
    let cases = histories().div_ceil(50);
    run(&Lua::as_it_is(), cases, 200, &history(Of::Further, 1..=512, 10..=20))
        .unwrap_or_else(|difference| panic!("{difference}"));
}

#[test]
fn they_charge_budgets_as_the_ledger_does() {
    let cases = histories();
    let [operations, _] = run(&Lua::as_it_is(), cases, 4000, &history(Of::Budgets, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(operations >= 40 * cases as usize, "only {operations} operations were compared");
}

#[test]
fn with_budgets_they_stop_at_the_same_bound_on_work() {
    let lua = Lua::new(SMALL_WORK, |_, text| text.to_owned());
    let [operations, early] = run(&lua, histories(), 4000, &history(Of::Budgets, 1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(early > operations / 1000, "only {early} of {operations} reached the bound");
}

#[test]
fn they_put_lines_to_sleep_as_the_ledger_does() {
    let (lua, small) = (Lua::as_it_is(), Lua::new(SMALL_WORK, |_, text| text.to_owned()));
    for lua in [lua, small] {
        run(&lua, histories() / 2, 4000, &history(Of::TenantsBudgets, 1..=4, 50..=90))
            .unwrap_or_else(|difference| panic!("{difference}"));
    }
}

#[test]
fn they_charge_budgets_for_hundreds_of_places_too() {
    let cases = histories().div_ceil(50);
    run(&Lua::as_it_is(), cases, 200, &history(Of::Budgets, 1..=512, 10..=20))
        .unwrap_or_else(|difference| panic!("{difference}"));
}

fn acquire(node: usize, lease_ms: u64) -> Step {
    let terms = Terms { lease_ms, max_queue: Some(20_000), max_waiting: 40_000, recalls: false };
    Step::Acquire {
        node,
        leaving: Vec::new(),
        poll_only: false,
        ids: vec![Asks::default(); 512],
        terms,
    }
}

/// One history, written by hand.
fn told(limit: u32, steps: Vec<Step>) -> Vec<Expected> {
    let server = TestRedis::start();
    let lua = Lua::as_it_is();
    let mut wire = Wire::open(&server);
    wire.load(&lua);
    let history = History { counted: true, limit, headroom: 0, fallback: Asks::default(), steps };
    wire.check(&lua, &history).unwrap_or_else(|difference| panic!("{difference}"));
    Model::new(&lua, &history).run(&history).expected
}

fn number_of(expected: &Expected, at: usize) -> i64 {
    match &expected.reply {
        Item::List(items) => match items[at] {
            Item::Int(number) => number,
            _ => panic!("{items:?}"),
        },
        reply => panic!("{reply:?}"),
    }
}

/// Returns how many hold and how many wait, by the members of the set.
fn counts(expected: &Expected) -> (usize, usize) {
    let waiting = expected.set.iter().filter(|(member, _)| member.starts_with(QUEUED)).count();
    (expected.set.len() - 2 * waiting, waiting)
}

#[test]
fn a_sweep_of_more_dead_than_one_call_takes_out_goes_on_with_the_next() {
    let mut steps: Vec<_> = (0..NODES).map(|node| acquire(node, 5_000)).collect();
    steps.extend([acquire(0, 60_000), Step::Time(Time::By(6_000_000))]);
    // 1536 hold and 512 wait, all of them dead by now; another 512 wait and live.
    for _ in 0..7 {
        steps.push(Step::Renew {
            node: 1,
            picks: vec![Pick::New { node: 1, poll_only: false, asks: Asks::default() }],
            lease_ms: 5_000,
        });
    }
    let expected = told(1536, steps);
    assert_eq!((number_of(&expected[4], 2), number_of(&expected[4], 3)), (1536, 1024));
    let swept: Vec<_> = expected[5..].iter().map(|e| e.set.len()).collect();
    // Three thousand and more members, then five hundred places fewer each time, then only those that live.
    assert!(swept[0] > 2000 && swept[6] == 512, "{swept:?}");
    assert!(swept.windows(2).all(|two| two[0] - two[1] <= 2 * WORK_MAX), "{swept:?}");
    assert!(expected[5..].iter().any(|e| e.more) && !expected.last().unwrap().more);
}

#[test]
fn a_tenant_with_very_many_lines_gets_its_turns_anew_in_parts() {
    let terms =
        Terms { lease_ms: 60_000, max_queue: Some(99), max_waiting: 20_000, recalls: false };
    let acquire = |claims: Vec<Claim>| Step::Acquire {
        node: 0,
        leaving: Vec::new(),
        poll_only: false,
        ids: claims
            .into_iter()
            .map(|claim| Asks { claim: Some(claim), ..Asks::default() })
            .collect(),
        terms,
    };
    let [a, b] = [1, 2].map(|hash| Claim::new(Tenant::of_hash(hash)));
    let each = |claim: Claim| (0..20).map(move |hash| claim.also(FurtherLimit::of_hash(hash, 1)));
    let release = |known| Step::Release { node: 0, picks: vec![Pick::Known(known)] };
    // One holds under each of twenty limits; another has three permits, and waits for all of them.
    let mut steps =
        vec![acquire(each(b).collect()), acquire(vec![a; 3]), acquire(each(a).collect())];
    for known in 20..23 {
        steps.extend([Step::Time(Time::By(1_000_007)), release(known)]);
    }
    steps.extend((0..20).map(release));
    let expected = told(30, steps);
    let parked = |expected: &Expected| {
        let lines = expected.set.iter().filter(|(member, _)| member.starts_with('t'));
        lines.map(|(_, score)| score.to_bits()).collect::<Vec<_>>()
    };
    // Sixteen of them.
    let [before, after] = [&expected[2], &expected[3]].map(parked);
    assert_eq!(before.len(), 20);
    assert_eq!(after.iter().filter(|score| before.contains(score)).count(), 4);
    assert_eq!(parked(expected.last().unwrap()), [0; 0], "all are served");
}

#[test]
fn thousands_of_lines_that_are_parked_anew_count_as_work() {
    let terms =
        Terms { lease_ms: 60_000, max_queue: Some(99), max_waiting: 20_000, recalls: false };
    let acquire = |claims: Vec<Claim>| Step::Acquire {
        node: 0,
        leaving: Vec::new(),
        poll_only: false,
        ids: claims
            .into_iter()
            .map(|claim| Asks { claim: Some(claim), ..Asks::default() })
            .collect(),
        terms,
    };
    let [a, b, c] = [1, 2, 3].map(|hash| Claim::new(Tenant::of_hash(hash)));
    let model = FurtherLimit::of_hash(0, 1);
    let many = (1..=1_200).map(|hash| a.also(FurtherLimit::of_hash(hash, 1)).also(model));
    // All of a's lines park while it has no permit; then it gets one.
    let mut steps = vec![acquire(vec![c.also(model)])];
    steps.extend(many.collect::<Vec<_>>().chunks(150).map(|claims| acquire(claims.to_vec())));
    steps.extend([Step::Time(Time::By(1_007)), acquire(vec![b.also(model)]), acquire(vec![a])]);
    // The step of the clock is no call.
    let first = steps.len() - 1;
    steps.push(Step::Release { node: 0, picks: vec![Pick::Known(0)] });
    steps.extend((0..3).map(|_| Step::Release { node: 0, picks: Vec::new() }));
    let expected = told(30, steps);
    let replies: Vec<_> = expected[first..].iter().map(|expected| &expected.reply).collect();
    let is_more =
        |reply: &Item| matches!(reply, Item::List(items) if matches!(items[..], [Item::Int(1)]));
    assert!(replies[..2].iter().all(|reply| is_more(reply)), "{replies:?}");
    assert!(matches!(replies[2], Item::List(items) if items.len() == 2), "{replies:?}");
}

#[test]
fn hundreds_are_granted_at_once_across_nodes() {
    let mut steps: Vec<_> = (0..NODES).map(|node| acquire(node, 60_000)).collect();
    steps.extend([
        Step::Subscribe { node: 2, alive: false },
        Step::Limit(1_900),
        Step::Release { node: 3, picks: vec![Pick::Known(0)] },
    ]);
    steps.extend((0..4).map(|_| Step::Release { node: 3, picks: Vec::new() }));
    let expected = told(1, steps);
    let last = expected.last().unwrap();
    let early: Vec<_> = expected.iter().map(|e| e.more).collect();
    assert_eq!(early, [false, false, false, false, true, true, true, true, false]);
    // Node 2 does not listen any more: its 512 are removed, and all others are in.
    assert_eq!(counts(last), (3 * 512 - 1, 0));
    // One message for each node and call; the bound splits both nodes' grants into two calls.
    let messages: Vec<_> = expected.iter().flat_map(|e| &e.messages).collect();
    let told: usize = messages.iter().map(|(_, text)| text.split(' ').count() / 2).sum();
    assert_eq!((messages.len(), told), (4, 511 + 512));
}

#[test]
fn those_whose_leases_end_last_are_recalled_and_no_more_places_are_looked_at() {
    let terms = |lease_ms, recalls| Terms {
        lease_ms,
        max_queue: Some(20_000),
        max_waiting: 40_000,
        recalls,
    };
    let acquire = |node, claim, count: usize, terms| {
        let ids = vec![Asks { claim, ..Asks::default() }; count];
        Step::Acquire { node, leaving: Vec::new(), poll_only: false, ids, terms }
    };
    let tenant = Some(Claim::new(Tenant::of_hash(7)));
    for (claim, first, told_of) in
        [(None, 127, 2), (None, 128, 1), (tenant, 127, 2), (tenant, 128, 1)]
    {
        let steps = vec![
            acquire(0, claim, first, terms(11_000, false)),
            acquire(1, claim, 1, terms(10_000, false)),
            acquire(2, claim, 1, terms(12_000, true)),
            acquire(3, claim, 1, terms(12_000, true)),
        ];
        let limit = u32::try_from(first).unwrap() + 1;
        let expected = told(limit, steps);
        let messages: Vec<_> = expected.iter().map(|e| e.messages.len()).collect();
        let last = messages.len() - 1;
        assert_eq!((messages[last - 1], messages[last]), (told_of, 0), "{messages:?}");
        assert!(expected[last - 1].messages.iter().all(|(_, text)| text == KEY));
    }
}

#[test]
fn more_dead_waiters_than_one_sweep_takes_out_get_no_permit() {
    let mut steps = vec![acquire(0, 60_000)];
    steps.extend((0..5).map(|i| acquire(1 + i % 3, 5_000)));
    steps.extend([
        acquire(3, 60_000),
        Step::Time(Time::By(6_000_000)),
        Step::Release { node: 0, picks: (0..512).map(Pick::Known).collect() },
    ]);
    steps.extend((0..6).map(|_| Step::Release { node: 0, picks: Vec::new() }));
    let expected = told(512, steps);
    // The sweep alone reaches the bound, which leaves nothing for grants.
    assert!(expected[7].more && counts(&expected[7]) == (0, 5 * 512 + 512 - WORK_MAX));
    assert_eq!(counts(expected.last().unwrap()), (512, 0));
}
