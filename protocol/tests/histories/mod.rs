//! Random histories of a ledger that use all that it has: tenants, costs, classes, further limits, rates, budgets, bounds
//! in ids, processes that poll or are gone, clocks that step, and leases that end by time or are ended from outside.

use std::time::Duration;

use proptest::prelude::*;
use tower_semaphore_protocol::{
    Bound, BoundRate, Caller, Charge, Claim, FurtherLimit, Grant, Ledger, NodeId, PlaceId, Reply,
    Tenant, Used, UsedOf,
};

const BEGAN: u64 = 1_795_169_853_126_543;
const NODES: [u64; 4] = [7, 0, u64::MAX, 0x0123_4567_89ab_cdef];
/// In place of a proof: the next place replaces this one.
const LEAVES: u64 = 0;
/// The proof of a place that no ledger knew.
const NEVER_ENDS: u64 = tower_semaphore_protocol::TICKET_MIN - 1;

/// What the places of a history have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    pub(crate) tenants: bool,
    pub(crate) further: bool,
    pub(crate) rates: bool,
    pub(crate) budgets: bool,
    pub(crate) tenants_budgets: bool,
}

/// What numbers stand for is determined when the step is taken, so a history without some of its steps is one, too.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Acquire { node: usize, leaving: Vec<usize>, asks: Vec<Asks>, again: Vec<usize>, terms: Terms },
    Release { node: usize, picks: Vec<usize>, used: Option<(u64, u64)> },
    Renew { node: usize, picks: Vec<usize>, lease_ms: u64 },
    Reassert { node: usize, proofs: Vec<(usize, u8)>, lease_ms: u64 },
    Revoke(usize),
    Forget { pick: usize, waiting: bool },
    Limit { limit: u32, headroom: u32, for_all: bool },
    Pass(i64),
    Gone(usize, bool),
}

/// What is beside the process and the number in the id of a place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asks {
    poll_only: bool,
    bound: Option<Bound>,
    claim: Option<Claim>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    lease_ms: u64,
    max_queue: Option<u32>,
    max_waiting: u32,
    recalls: bool,
}

fn rarely<T: Clone + std::fmt::Debug + 'static>(
    often: T,
    rarely: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = T> {
    prop_oneof![3 => Just(often), 2 => rarely]
}

fn if_any<T: std::fmt::Debug + 'static>(
    is_any: bool,
    weight: f64,
    of: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Option<T>> {
    if is_any { prop::option::weighted(weight, of).boxed() } else { of.prop_map(|_| None).boxed() }
}

/// Few budgets, whose bursts take about as long as histories go on.
fn charge(is_own: bool) -> impl Strategy<Value = Charge> {
    let burst = rarely(10_000_019, 1..30_000_000u64);
    let part = prop_oneof![1 => Just(0), 8 => 1..=1000u64, 2 => Just(1000)];
    (0..3u64, burst, part).prop_map(move |(hash, burst, part)| {
        let of = if is_own { Charge::of_tenant } else { Charge::of_hash };
        of(hash * 5_592_403, burst * part / 1000, burst).unwrap()
    })
}

fn claim(features: Features) -> impl Strategy<Value = Option<Claim>> {
    let Features { tenants, further, budgets, tenants_budgets, .. } = features;
    let tenant = if_any(tenants, 0.8, 0..4u64);
    let weights = (rarely(1, 1..=64u32), rarely(1, 1..5u32), rarely(0, 0..=7u8));
    let each = rarely(None, (1..4u32).prop_map(Some));
    let limit = (0..4u64, prop_oneof![4 => 1..4u32, 1 => 1..=u32::MAX]);
    let limits = prop::collection::vec(limit, if further { 0..=3 } else { 0..=0 });
    let charges = prop::collection::vec(charge(false), if budgets { 0..=2 } else { 0..=0 });
    let own = if_any(tenants_budgets, 0.8, charge(true));
    (prop::bool::weighted(0.15), tenant, weights, each, limits, charges, own).prop_map(
        |(is_plain, tenant, (weight, cost, class), each, limits, charges, own)| {
            let claim = tenant.map_or_else(Claim::without_tenant, |tenant| {
                Claim::new(Tenant::of_hash(tenant * 4_194_301))
            });
            let claim = claim.with_weight(weight).with_cost(cost).with_class(class).with_each(each);
            let also = |claim: Claim, (hash, cap): (u64, u32)| {
                claim.also(FurtherLimit::of_hash(hash * 5_592_401, cap))
            };
            let claim = limits.into_iter().fold(claim, also);
            let claim = own.into_iter().chain(charges).fold(claim, Claim::charged);
            let is_bare = claim == Claim::without_tenant();
            (!is_plain && !is_bare).then_some(claim)
        },
    )
}

fn asks(features: Features) -> impl Strategy<Value = Asks> {
    let second = |s: u64| Duration::from_micros(s * 1_000_001);
    let window = rarely(second(20), prop_oneof![Just(second(3)), Just(second(60))]);
    let rate = (1..6u32, window, rarely(0, Just(60))).prop_map(move |(starts, window, longest)| {
        BoundRate::new(starts, window).unwrap().kept_for(second(longest))
    });
    let rate = if_any(features.rates, 0.7, rate);
    let bound = (prop::bool::ANY, prop_oneof![9 => 1..8u32, 1 => any::<u32>()], 0..3u32);
    (prop::bool::weighted(0.15), bound, claim(features), rate).prop_map(
        |(poll_only, (is_bound, limit, headroom), claim, rate)| {
            // Only places with a claim have a rate and a headroom.
            let claim = claim.or_else(|| rate.map(|_| Claim::without_tenant()));
            let headroom = if claim.is_some() { headroom } else { 0 };
            let bound = Bound { limit, headroom, rate };
            Asks { poll_only, bound: (is_bound || rate.is_some()).then_some(bound), claim }
        },
    )
}

fn step(features: Features) -> impl Strategy<Value = Step> {
    let place = || any::<u16>().prop_map(usize::from);
    let places = move |most| prop::collection::vec(place(), 0..most);
    let node = 0..NODES.len();
    let lease = || prop_oneof![6 => Just(10_000), 2 => Just(2_000), 2 => 1..40_000u64];
    let max_queue = prop_oneof![1 => Just(None), 3 => (0..20u32).prop_map(Some)];
    let terms = (lease(), max_queue, prop_oneof![1 => 0..9u32, 4 => Just(u32::MAX)], any::<bool>())
        .prop_map(|(lease_ms, max_queue, max_waiting, recalls)| Terms {
            lease_ms,
            max_queue,
            max_waiting,
            recalls,
        });
    let asks = prop::collection::vec(asks(features), 1..4);
    let used = prop::option::of((0..3000u64, rarely(0, 0..2_000_000u64)));
    let pass = prop_oneof![
        6 => 0..2_000_000i64,
        2 => 0..30_000_000i64,
        1 => -3_000_000..0i64,
        1 => Just(36 * 60 * 1_000_000),
    ];
    prop_oneof![
        12 => (node.clone(), places(3), asks, rarely(Vec::new(), places(3)), terms).prop_map(
            |(node, leaving, asks, again, terms)| Step::Acquire { node, leaving, asks, again, terms }
        ),
        7 => (node.clone(), places(4), used)
            .prop_map(|(node, picks, used)| Step::Release { node, picks, used }),
        4 => (node.clone(), places(5), lease())
            .prop_map(|(node, picks, lease_ms)| Step::Renew { node, picks, lease_ms }),
        3 => (node.clone(), prop::collection::vec((place(), any::<u8>()), 1..4), lease())
            .prop_map(|(node, proofs, lease_ms)| Step::Reassert { node, proofs, lease_ms }),
        1 => place().prop_map(Step::Revoke),
        1 => (place(), any::<bool>()).prop_map(|(pick, waiting)| Step::Forget { pick, waiting }),
        2 => (0..8u32, 0..3u32, prop::bool::weighted(0.2))
            .prop_map(|(limit, headroom, for_all)| Step::Limit { limit, headroom, for_all }),
        5 => pass.prop_map(Step::Pass),
        1 => (node, any::<bool>()).prop_map(|(node, gone)| Step::Gone(node, gone)),
    ]
}

/// What places have, the bound on work, and the steps.
pub(crate) fn history() -> impl Strategy<Value = (usize, Vec<Step>)> {
    let any = || prop::bool::weighted(0.4);
    let features = (any(), any(), any(), any(), any()).prop_map(
        |(tenants, further, rates, budgets, tenants_budgets)| {
            let tenants = tenants || tenants_budgets;
            Features { tenants, further, rates, budgets, tenants_budgets }
        },
    );
    let work_max = prop_oneof![3 => Just(tower_semaphore_protocol::WORK_MAX), 1 => 1..12usize];
    (work_max, features.prop_flat_map(|features| prop::collection::vec(step(features), 1..70)))
}

/// An operation, as each of several equal ledgers is asked for it.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Acquire {
        caller: Caller,
        lease_ms: u64,
        max_queue: Option<u32>,
        leaving: Vec<PlaceId>,
        ids: Vec<PlaceId>,
    },
    Release {
        caller: Caller,
        ids: Vec<PlaceId>,
        used: Vec<(PlaceId, Used)>,
    },
    Renew {
        caller: Caller,
        lease_ms: u64,
        ids: Vec<PlaceId>,
    },
    Reassert {
        caller: Caller,
        lease_ms: u64,
        proofs: Vec<(PlaceId, u64)>,
    },
    Revoke {
        id: PlaceId,
        now: u64,
    },
    Forget {
        id: PlaceId,
        lease_end: u64,
        waiting: bool,
        now: u64,
    },
}

/// What an operation says: the reply, and the messages to other nodes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) reply: Reply,
    lease_end: Option<u64>,
    is_more: bool,
    posted: Vec<(NodeId, Vec<Grant>)>,
}

impl Action {
    pub(crate) fn take(&self, ledger: &mut Ledger, gone: &[NodeId]) -> Outcome {
        let mut outcome = Outcome::default();
        let posted = &mut outcome.posted;
        let post = &mut |node: NodeId, grants: &[Grant]| {
            posted.push((node, grants.to_vec()));
            !gone.contains(&node)
        };
        match self {
            Self::Acquire { caller, lease_ms, max_queue, leaving, ids } => {
                outcome.reply = ledger.acquire(*caller, *lease_ms, *max_queue, leaving, ids, post);
            }
            Self::Release { caller, ids, used } => {
                ledger.settle_used(used, caller.now);
                outcome.reply = ledger.release(*caller, ids, post);
            }
            Self::Renew { caller, lease_ms, ids } => {
                outcome.reply = ledger.renew(*caller, *lease_ms, ids, post);
            }
            Self::Reassert { caller, lease_ms, proofs } => {
                outcome.reply = ledger.reassert(*caller, *lease_ms, proofs, post);
            }
            Self::Revoke { id, now } => outcome.lease_end = ledger.revoke(*id, true, *now),
            Self::Forget { id, lease_end, waiting: false, now } => {
                outcome.is_more = ledger.forget(id.node, *lease_end, *now);
            }
            Self::Forget { id, waiting: true, now, .. } => {
                outcome.is_more = ledger.forget_waiting(id.node, *now);
            }
        }
        outcome
    }
}

/// The callers of a history, and what they know.
pub(crate) struct World {
    now: u64,
    limit: u32,
    headroom: u32,
    for_all: bool,
    next: u64,
    pub(crate) gone: Vec<NodeId>,
    /// Each place that there was, with its last lease end and its last ticket.
    known: Vec<(PlaceId, u64, Option<u64>)>,
}

impl World {
    pub(crate) const fn new() -> Self {
        Self {
            now: BEGAN,
            limit: 4,
            headroom: 0,
            for_all: false,
            next: 0,
            gone: Vec::new(),
            known: Vec::new(),
        }
    }

    pub(crate) fn caller(&self, node: usize, max_waiting: u32, recalls: bool) -> Caller {
        let Self { now, limit, headroom, for_all, .. } = *self;
        let node = NodeId::new(NODES[node]);
        Caller { now, limit, headroom, for_all, max_waiting, node, recalls }
    }

    fn pick(&self, picks: &[usize]) -> Vec<PlaceId> {
        // Mostly late ones: they are there.
        let late = self.known.len().min(24);
        let mut ids = Vec::new();
        for id in picks.iter().filter(|_| late > 0) {
            let id = self.known[self.known.len() - 1 - id % late].0;
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }

    fn newcomer(&mut self, node: usize, Asks { poll_only, bound, claim }: Asks) -> PlaceId {
        self.next += 1;
        PlaceId { node: NodeId::new(NODES[node]), poll_only, n: self.next, bound, claim }
    }

    /// The operation of a step; `None`: it is none.
    pub(crate) fn action(&mut self, step: &Step) -> Option<Action> {
        self.now += 97;
        Some(match step.clone() {
            Step::Acquire { node, leaving, asks, again, terms } => {
                let mut ids: Vec<_> = asks.iter().map(|asks| self.newcomer(node, *asks)).collect();
                let (leaving, again) = (self.pick(&leaving), self.pick(&again));
                ids.extend(again.into_iter().filter(|id| !leaving.contains(id)));
                let Terms { lease_ms, max_queue, max_waiting, recalls } = terms;
                let caller = self.caller(node, max_waiting, recalls);
                Action::Acquire { caller, lease_ms, max_queue, leaving, ids }
            }
            Step::Release { node, picks, used } => {
                let ids = self.pick(&picks);
                let used = used.map(|(thousandths, ahead)| {
                    let of = |id: &PlaceId| (*id, used_by(*id, thousandths, ahead));
                    ids.iter().map(of).collect()
                });
                let used = used.unwrap_or_default();
                Action::Release { caller: self.caller(node, 0, false), ids, used }
            }
            Step::Renew { node, picks, lease_ms } => {
                let ids = self.pick(&picks);
                Action::Renew { caller: self.caller(node, 0, false), lease_ms, ids }
            }
            Step::Reassert { node, proofs, lease_ms } => {
                let of = proofs.iter().filter_map(|(pick, kind)| self.proof(*pick, *kind));
                let mut proofs: Vec<(PlaceId, u64)> = Vec::new();
                for proof in of {
                    // No call names a place twice.
                    if proofs.iter().all(|(id, _)| *id != proof.0) {
                        proofs.push(proof);
                    }
                }
                Action::Reassert { caller: self.caller(node, 0, false), lease_ms, proofs }
            }
            Step::Revoke(pick) => {
                Action::Revoke { id: *self.pick(&[pick]).first()?, now: self.now }
            }
            Step::Forget { pick, waiting } => {
                let id = *self.pick(&[pick]).first()?;
                let lease_end = self.known.iter().find(|known| known.0 == id)?.1;
                Action::Forget { id, lease_end, waiting, now: self.now }
            }
            Step::Limit { limit, headroom, for_all } => {
                (self.limit, self.headroom, self.for_all) = (limit, headroom, for_all);
                let ids = self.known.iter().map(|known| known.0).collect();
                Action::Renew { caller: self.caller(0, 0, false), lease_ms: 10_000, ids }
            }
            Step::Pass(us) => {
                self.now = self.now.saturating_add_signed(us);
                let caller = self.caller(0, 0, false);
                Action::Release { caller, ids: Vec::new(), used: Vec::new() }
            }
            Step::Gone(node, is_gone) => {
                let node = NodeId::new(NODES[node]);
                self.gone.retain(|other| *other != node);
                self.gone.extend(is_gone.then_some(node));
                return None;
            }
        })
    }

    fn proof(&self, pick: usize, kind: u8) -> Option<(PlaceId, u64)> {
        let id = *self.pick(&[pick]).first()?;
        let (_, lease_end, ticket) = *self.known.iter().find(|known| known.0 == id)?;
        let proof = match kind % 8 {
            0 => LEAVES,
            1 => NEVER_ENDS,
            2 | 3 => lease_end,
            _ => ticket.unwrap_or(lease_end),
        };
        Some((id, proof))
    }

    /// Notes the places that there are.
    pub(crate) fn look(&mut self, ledger: &Ledger) {
        let mut places: Vec<_> = ledger.places().collect();
        places.sort_unstable_by_key(|(id, ..)| id.n);
        for (id, lease_end, ticket) in places {
            match self.known.iter_mut().find(|known| known.0 == id) {
                Some(known) => *known = (id, lease_end, ticket.or(known.2)),
                None => self.known.push((id, lease_end, ticket)),
            }
        }
    }
}

fn used_by(id: PlaceId, thousandths: u64, ahead: u64) -> Used {
    let mut used = Used::as_charged(id.charges());
    for (index, charge) in id.charges().iter().enumerate() {
        used = used.with(index, UsedOf { used: charge.taken() * thousandths / 1000, ahead });
    }
    used
}
