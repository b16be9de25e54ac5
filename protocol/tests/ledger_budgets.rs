//! The ledger with budgets: generated histories beside a token bucket in the plainest terms.

#[expect(dead_code, reason = "others use more of it")]
mod desk;

use std::collections::BTreeMap;

use proptest::prelude::*;
use tower_semaphore_protocol::{
    Charge, Claim, FurtherLimit, LineId, PlaceId, PlaceStatus, Used, UsedOf,
};

use self::desk::{Desk, NODE, claim};

/// Of each budget, µs.
const BURST_US: u64 = 1_000_000;
const BURST: i128 = BURST_US as i128;
const BUDGETS: usize = 2;
const TENANTS: std::ops::Range<u64> = 1..4;

/// Tokens that refill one a µs.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: i128,
    at: i128,
}

impl Bucket {
    fn refill(&mut self, now: u64) {
        let now = i128::from(now);
        self.tokens = BURST.min(self.tokens + now - self.at);
        self.at = now;
    }
}

fn charge(budget: usize, taken: u64) -> Charge {
    Charge::of_hash(budget as u64, taken, BURST_US).unwrap()
}

/// Of a budget that each tenant has.
fn own_charge(tenant: u64, taken: u64) -> Charge {
    Charge::of_tenant(tenant, taken, BURST_US).unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    Come {
        tenant: Option<u64>,
        taken: [Option<u64>; BUDGETS],
        own: Option<u64>,
        waits: bool,
    },
    /// One of those that hold leaves; it used so many thousandths of what it took, and so much is left.
    Leave {
        which: usize,
        used: Option<u64>,
        ahead: u64,
    },
    GiveUp {
        which: usize,
    },
    Pass(u64),
    Limit(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let taken = || prop_oneof![3 => Just(None), 5 => (0..=1_000_000u64).prop_map(Some)];
    let tenant = prop_oneof![3 => Just(None), 2 => TENANTS.prop_map(Some)];
    let used = prop_oneof![1 => Just(None), 3 => (0..=1000u64).prop_map(Some), 1 => (1000..5000u64).prop_map(Some)];
    let ahead = prop_oneof![4 => Just(0), 1 => 0..2_000_000u64];
    prop_oneof![
        6 => (tenant, [taken(), taken()], taken(), prop::bool::weighted(0.8))
            .prop_map(|(tenant, taken, own, waits)| Step::Come { tenant, taken, own, waits }),
        4 => (any::<usize>(), used, ahead)
            .prop_map(|(which, used, ahead)| Step::Leave { which, used, ahead }),
        1 => any::<usize>().prop_map(|which| Step::GiveUp { which }),
        5 => (0..800_000u64).prop_map(Step::Pass),
        1 => (0..8u32).prop_map(Step::Limit),
    ]
}

struct Histories {
    desk: Desk,
    buckets: BTreeMap<u32, Bucket>,
    /// Those that hold, as far as they were seen to.
    held: Vec<PlaceId>,
}

impl Histories {
    fn new() -> Self {
        let desk = Desk::new(5);
        let at = i128::from(desk.now);
        let charges = (0..BUDGETS).map(|budget| charge(budget, 0));
        let charges = charges.chain(TENANTS.map(|tenant| own_charge(tenant, 0)));
        let buckets = charges.map(|charge| (charge.number(), Bucket { tokens: BURST, at }));
        Self { desk, buckets: buckets.collect(), held: Vec::new() }
    }

    fn refill(&mut self) {
        let now = self.desk.now;
        self.buckets.values_mut().for_each(|bucket| bucket.refill(now));
    }

    fn bucket(&mut self, charge: Charge) -> &mut Bucket {
        self.buckets.get_mut(&charge.number()).unwrap()
    }

    /// Takes the tokens of the places that were granted since; no place is granted without.
    fn take_granted(&mut self) {
        self.refill();
        let all: Vec<_> = self.desk.ledger.places().collect();
        // The leases of others are over.
        self.held.retain(|held| all.iter().any(|(id, ..)| id == held));
        for (id, _, ticket) in all {
            if ticket.is_some() || self.held.contains(&id) {
                continue;
            }
            self.held.push(id);
            for charge in id.charges().iter() {
                let bucket = self.bucket(charge);
                bucket.tokens -= i128::from(charge.taken());
                assert!(bucket.tokens >= 0, "{id} has more than there was: {bucket:?}");
            }
        }
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Come { tenant, taken, own, waits } => {
                let claim = tenant.map_or_else(Claim::without_tenant, claim);
                let charges =
                    (0..).zip(taken).filter_map(|(at, taken)| Some(charge(at, (*taken)?)));
                let own = tenant.zip(*own).map(|(tenant, taken)| own_charge(tenant, taken));
                let id = self.desk.id(own.into_iter().chain(charges).fold(claim, Claim::charged));
                self.desk.acquire_all(waits.then_some(100), &[id]);
            }
            Step::Leave { which, used, ahead } => {
                let Some(id) = (!self.held.is_empty()).then(|| self.held[which % self.held.len()])
                else {
                    return;
                };
                self.held.retain(|held| *held != id);
                if let Some(used) = used {
                    self.settle(id, *used, *ahead);
                }
                self.desk.release(&[id]);
            }
            Step::GiveUp { which } => {
                let waiting: Vec<_> = self.waiting();
                if !waiting.is_empty() {
                    let id = waiting[which % waiting.len()];
                    // It took nothing, whatever it says.
                    let used =
                        Used::as_charged(id.charges()).with(0, UsedOf { used: 0, ahead: 900_000 });
                    self.desk.ledger.settle_used(&[(id, used)], self.desk.now);
                    self.desk.release(&[id]);
                }
            }
            Step::Pass(us) => self.desk.now += us,
            Step::Limit(limit) => self.desk.limit = *limit,
        }
    }

    fn settle(&mut self, id: PlaceId, thousandths: u64, ahead: u64) {
        // The call comes with the tick of the release.
        let now = self.desk.now + self.desk.tick;
        self.buckets.values_mut().for_each(|bucket| bucket.refill(now));
        let mut used = Used::as_charged(id.charges());
        for (index, charge) in id.charges().iter().enumerate() {
            let of = charge.taken() * thousandths / 1000;
            used = used.with(index, UsedOf { used: of, ahead });
            let more = i128::from(of) - i128::from(charge.taken());
            let bucket = self.bucket(charge);
            let least = bucket.tokens.min(-BURST);
            bucket.tokens = (bucket.tokens - more).clamp(least, BURST);
            bucket.tokens = bucket.tokens.min(BURST - i128::from(ahead).min(BURST));
        }
        self.desk.ledger.settle_used(&[(id, used)], now);
        // Once, whatever is repeated after the release.
        let mut again = self.desk.ledger.clone();
        let caller = tower_semaphore_protocol::Caller {
            now,
            limit: 0,
            headroom: 0,
            for_all: true,
            max_waiting: 0,
            node: NODE,
            recalls: false,
        };
        again.release(caller, &[id], &mut |_, _| true);
        let before: Vec<_> = again.budgets().collect();
        again.settle_used(&[(id, used)], now);
        assert_eq!(again.budgets().collect::<Vec<_>>(), before);
    }

    fn waiting(&self) -> Vec<PlaceId> {
        let mut waiting: Vec<_> =
            self.desk.ledger.places().filter_map(|(id, _, t)| Some((t?, id))).collect();
        waiting.sort_unstable();
        waiting.into_iter().map(|(_, id)| id).collect()
    }

    /// The ledger knows what is left, and keeps back nobody whose turn it is and who could go.
    fn check(&mut self) {
        // So that whatever time allows is granted.
        self.desk.release(&[]);
        self.take_granted();
        let ledger = &self.desk.ledger;
        for (number, bucket) in &self.buckets {
            let full_at = ledger.budget_full_at(*number).max(self.desk.now);
            assert_eq!(i128::from(full_at - self.desk.now), BURST - bucket.tokens, "{number}");
        }
        if ledger.in_use() >= u64::from(self.desk.limit) {
            return;
        }
        let has =
            |charge: Charge| self.buckets[&charge.number()].tokens >= i128::from(charge.taken());
        let fits = |id: &PlaceId| id.charges().iter().all(has);
        let is_awake = |id: &PlaceId| id.charges().iter().filter(|c| c.is_tenants()).all(has);
        // The first of each line: one of them is next.
        let (mut lines, mut heads): (Vec<Option<LineId>>, Vec<PlaceId>) = (Vec::new(), Vec::new());
        for id in self.waiting() {
            if !lines.contains(&id.line()) {
                lines.push(id.line());
                heads.push(id);
            }
        }
        // One whose tenant's own budget has too little keeps back nobody else.
        heads.retain(is_awake);
        assert!(heads.is_empty() || !heads.iter().all(fits), "all of {heads:?} could go");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_ledger_keeps_its_budgets_as_a_token_bucket_does(steps in prop::collection::vec(step(), 10..80)) {
        let mut histories = Histories::new();
        for step in &steps {
            histories.take(step);
            histories.take_granted();
            histories.check();
        }
        // In the end everybody is served.
        histories.desk.limit = 100;
        for _ in 0..1000 {
            histories.desk.now += 100_000;
            let waiting = histories.waiting();
            if !waiting.is_empty() {
                histories.desk.renew(&waiting);
                histories.take_granted();
            }
            histories.check();
        }
        prop_assert!(histories.waiting().is_empty(), "{:?}", histories.waiting());
        let held = histories.held.clone();
        histories.desk.release(&held);
        histories.desk.now += 10_000_000;
        histories.desk.release(&[]);
        prop_assert!(histories.desk.ledger.is_empty());
    }
}

/// Of budget 0, whose burst is a second and which refills in as long.
fn taking(desk: &mut Desk, taken: u64) -> PlaceId {
    desk.id(Claim::without_tenant().charged(charge(0, taken)))
}

/// Whether a place that may not wait is granted at once.
fn is_granted(desk: &mut Desk, taken: u64) -> Option<PlaceId> {
    let id = taking(desk, taken);
    desk.acquire_all(None, &[id]);
    desk.holds(id).then_some(id)
}

#[test]
fn a_clock_that_steps_back_stops_a_budget_for_no_longer_than_a_burst() {
    let mut desk = Desk::new(100);
    is_granted(&mut desk, BURST_US / 2).expect("full");
    // As after a failover to a server whose clock is an hour behind.
    desk.now -= 3_600_000_000;
    desk.now += 2 * BURST_US;
    let id = taking(&mut desk, BURST_US / 10);
    let reply = desk.acquire_all(None, &[id]);
    assert!(desk.holds(id), "{:?}", reply.statuses);
}

/// Processes of two versions of a configuration name one budget with different bursts.
#[test]
fn a_place_with_a_short_burst_gives_back_no_more_than_it_took() {
    let mut desk = Desk::new(100);
    let number = charge(0, 0).number();
    let with_burst = |desk: &mut Desk, taken, burst| {
        let charge = Charge::of_hash(0, taken, burst).unwrap();
        let id = desk.id(Claim::without_tenant().charged(charge));
        desk.acquire_all(None, &[id]);
        assert!(desk.holds(id));
        id
    };
    let short = with_burst(&mut desk, 1000, 10_000);
    with_burst(&mut desk, 50 * BURST_US, 100 * BURST_US);
    let before = desk.ledger.budget_full_at(number);
    let used = Used::as_charged(short.charges()).with(0, UsedOf { used: 400, ahead: 0 });
    desk.ledger.settle_used(&[(short, used)], desk.now);
    assert_eq!(before - desk.ledger.budget_full_at(number), 600);
}

/// Of the tenant's own budget, whose burst is a second and which refills in as long.
fn own(tenant: u64, taken: u64) -> Claim {
    claim(tenant).charged(Charge::of_tenant(tenant, taken, BURST_US).unwrap())
}

/// Uses up the budget of a tenant.
fn use_up(desk: &mut Desk, tenant: u64) {
    let used = desk.come(own(tenant, BURST_US));
    assert!(desk.holds(used));
    desk.release(&[used]);
}

#[test]
fn the_end_of_a_lease_is_told_that_comes_before_a_line_wakes() {
    let mut desk = Desk::new(2);
    use_up(&mut desk, 1);
    let dead = desk.come(claim(3));
    desk.now += desk::LEASE * 1000 - 500_000;
    use_up(&mut desk, 1);
    let waits_for_both = desk.come(claim(2).with_cost(2));
    let before = desk.renew(&[waits_for_both]);
    assert!(before.earliest > 0 && before.opens_in == 0, "{before:?}");
    let asleep = desk.come(own(1, BURST_US));
    let reply = desk.renew(&[waits_for_both]);
    assert!(desk.waits(asleep) && desk.waits(waits_for_both) && desk.holds(dead));
    assert_eq!((reply.earliest, reply.opens_in), (before.earliest, 0));
    // Behind it comes the line's time.
    desk.now += 500_000;
    let reply = desk.renew(&[asleep]);
    assert!(desk.holds(waits_for_both) && desk.waits(asleep));
    desk.release(&[waits_for_both]);
    let reply_of_one = desk.renew(&[asleep]);
    assert!(reply_of_one.opens_in > 0 && reply_of_one.earliest == 0, "{reply:?} {reply_of_one:?}");
}

/// A line wakes once a place of its tenant leaves, and not when one is granted.
#[test]
fn a_grant_to_a_tenant_whose_line_is_asleep_keeps_nobody_back() {
    let mut desk = Desk::new(5);
    use_up(&mut desk, 1);
    let held = desk.come(claim(2).with_cost(2));
    assert!(desk.holds(held));
    let asleep = desk.come(own(1, BURST_US));
    let other = FurtherLimit::of_hash(7, 9);
    let ids = [claim(1).also(other), claim(2), claim(3).with_cost(5)].map(|of| desk.id(of));
    let reply = desk.acquire_all(None, &ids);
    assert!(desk.waits(asleep));
    assert_eq!(reply.statuses[..2], [PlaceStatus::Held; 2], "{reply:?}");
}

/// Though those that wait are renewed while no permit is free, which could wake their lines all at once.
#[test]
fn lines_that_are_asleep_delay_nobody_when_a_permit_comes_free() {
    let mut desk = Desk::new(2);
    let asleep: Vec<_> = (1..=600)
        .map(|tenant| {
            let of = |taken| Charge::of_tenant(tenant, taken, 1000 * BURST_US).unwrap();
            let used = desk.come(claim(tenant).charged(of(1000 * BURST_US)));
            desk.release(&[used]);
            desk.come(claim(tenant).charged(of(1000 * BURST_US)))
        })
        .collect();
    let held = [desk.come(claim(1000)), desk.come(claim(1000))];
    let next = desk.come(claim(1000));
    asleep.chunks(500).for_each(|ids| _ = desk.renew(ids));
    let reply = desk.release(&held[..1]);
    assert!(desk.holds(next), "{reply:?}");
}

/// A failover to a server whose clock is an hour behind.
#[test]
fn a_line_that_is_asleep_wakes_after_a_step_of_the_clock() {
    let mut desk = Desk::new(2);
    use_up(&mut desk, 1);
    let asleep = desk.come(own(1, BURST_US));
    desk.now -= 3_600_000_000;
    desk.renew(&[asleep]);
    desk.now += 2 * BURST_US;
    desk.renew(&[asleep]);
    assert!(desk.holds(asleep));
}
