//! The schedule of faults, decided beforehand by the seed alone.

use std::time::Duration;

use fastrand::Rng;
use serde::Serialize;

use super::history::What;
use super::load::KEYS;

/// The number of gateways at a time.
pub(crate) const SLOTS: usize = 3;
/// How long one half of a round takes; see [`plan`].
const HALF: Duration = Duration::from_secs(4);
/// The time between two faults of the same gateway: starting a process takes a while.
const PAUSE: Duration = Duration::from_millis(200);

/// The longest delay of a link, in ms.
pub(crate) const MOST_DELAY: u64 = 200;

/// How Redis is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) enum Shape {
    #[default]
    One,
    Cluster,
    Sentinel,
}

/// A scheduled fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) at: Duration,
    pub(crate) what: What,
    /// The affected gateway or its link; `None` if it affects Redis, and so all.
    pub(crate) slot: Option<usize>,
    /// How long it lasts, if it does.
    pub(crate) lasts: Duration,
    /// Its strength, if it has one: the ms of a delay, or which half of a half-close.
    pub(crate) strength: u64,
    /// With several servers, the one of this key.
    pub(crate) key: usize,
}

/// The faults of a gateway, and those of Redis; the loss of scripts is of both kinds. Gateways that use several servers
/// have no proxy.
const fn kinds(shape: Shape) -> (&'static [What], &'static [What]) {
    match shape {
        Shape::One => (
            &[
                What::KillGateway,
                What::FreezeGateway,
                What::Delay,
                What::Stall,
                What::StallCut,
                What::Cut,
                What::HalfClose,
                What::ScriptFlush,
            ],
            &[
                What::FreezeRedis,
                What::RestartRedis,
                What::KillPubsub,
                What::KillNormal,
                What::FlushAll,
                What::DebugSleep,
            ],
        ),
        Shape::Cluster => (
            &[What::KillGateway, What::FreezeGateway, What::ScriptFlush, What::MoveSlot],
            &[
                What::KillMaster,
                What::Handover,
                What::FreezeRedis,
                What::KillPubsub,
                What::KillNormal,
                What::FlushAll,
                What::DebugSleep,
            ],
        ),
        Shape::Sentinel => (
            &[What::KillGateway, What::FreezeGateway, What::ScriptFlush],
            &[
                What::KillMaster,
                What::Failover,
                What::FreezeRedis,
                What::KillPubsub,
                What::KillNormal,
                What::FlushAll,
                What::DebugSleep,
            ],
        ),
    }
}

/// A fault every 200 to 700 ms, in rounds of two halves. In the first half, one gateway of the three is spared, which
/// shows what must hold for a process without faults. In the second, everything can happen. Faults that take long with
/// several servers delay the next ones.
pub(crate) fn plan(shape: Shape, seed: u64, length: Duration) -> Vec<Planned> {
    let (local, global) = kinds(shape);
    let mut rng = Rng::with_seed(seed);
    let mut plan = Vec::new();
    let mut at = Duration::from_millis(500);
    let mut spared = 0;
    let mut round = 0;
    // Until when each gateway, and Redis, is busy with a fault by this plan.
    let mut busy = [Duration::ZERO; SLOTS + 1];
    while at < length {
        let halves = at.as_millis() / HALF.as_millis();
        if halves / 2 >= round {
            spared = rng.usize(..SLOTS);
            round = halves / 2 + 1;
        }
        let calm = halves.is_multiple_of(2);
        let all = if calm { 0 } else { global.len() };
        let what = match rng.usize(..local.len() + all) {
            i if i < local.len() => local[i],
            i => global[i - local.len()],
        };
        let befalls_all = what.is_harmless() || global.contains(&what);
        let mut free: Vec<_> = (0..SLOTS)
            .filter(|slot| busy[*slot] <= at && !(calm && *slot == spared))
            .map(Some)
            .collect();
        if befalls_all {
            free = if busy[SLOTS] <= at { vec![None] } else { Vec::new() };
        }
        let Some(slot) = rng.choice(free) else {
            at += Duration::from_millis(50);
            continue;
        };
        let (lasts, strength) = extent(what, &mut rng);
        busy[slot.unwrap_or(SLOTS)] = at + lasts + settling(shape, what) + PAUSE;
        let key = if shape == Shape::One { 0 } else { rng.usize(..KEYS.len()) };
        plan.push(Planned { at, what, slot, lasts, strength, key });
        at += Duration::from_millis(rng.u64(200..700));
    }
    plan
}

/// A fault every few seconds, one at a time, and none that ends a process, because a new process has new memory.
pub(crate) fn gentle(seed: u64, length: Duration) -> Vec<Planned> {
    const LOCAL: [What; 6] =
        [What::FreezeGateway, What::Delay, What::Stall, What::StallCut, What::Cut, What::HalfClose];
    const GLOBAL: [What; 6] = [
        What::FreezeRedis,
        What::KillPubsub,
        What::KillNormal,
        What::FlushAll,
        What::DebugSleep,
        What::ScriptFlush,
    ];
    let mut rng = Rng::with_seed(seed);
    let mut plan = Vec::new();
    let mut at = Duration::from_secs(2);
    while at < length {
        let (what, slot) = match rng.usize(..LOCAL.len() + GLOBAL.len()) {
            i if i < LOCAL.len() => (LOCAL[i], Some(rng.usize(..SLOTS))),
            i => (GLOBAL[i - LOCAL.len()], None),
        };
        let (lasts, strength) = extent(what, &mut rng);
        plan.push(Planned { at, what, slot, lasts, strength, key: 0 });
        at += lasts + Duration::from_millis(rng.u64(1500..4000));
    }
    plan
}

/// About how long several servers are busy with a fault beyond its time.
const fn settling(shape: Shape, what: What) -> Duration {
    match (shape, what) {
        (Shape::One, _) => Duration::ZERO,
        (_, What::KillMaster) => Duration::from_secs(5),
        (_, What::Failover | What::Handover) => Duration::from_secs(2),
        (_, What::FreezeRedis) => Duration::from_secs(1),
        _ => Duration::ZERO,
    }
}

/// Returns how long a fault lasts, and how strong it is.
fn extent(what: What, rng: &mut Rng) -> (Duration, u64) {
    let lasts = match what {
        What::KillGateway => rng.u64(50..400),
        // Longer than the lease of 1 s.
        What::FreezeGateway => rng.u64(1200..2500),
        What::FreezeRedis => rng.u64(200..2000),
        What::RestartRedis | What::KillMaster => rng.u64(50..1000),
        What::MoveSlot => rng.u64(100..600),
        What::DebugSleep => rng.u64(200..800),
        What::Delay | What::Stall | What::StallCut => rng.u64(200..1500),
        _ => 0,
    };
    let strength = match what {
        What::Delay => rng.u64(5..=MOST_DELAY),
        _ => rng.u64(..2),
    };
    (Duration::from_millis(lasts), strength)
}

#[test]
fn a_seed_decides_the_schedule() {
    let length = Duration::from_secs(300);
    for (shape, count, fewest) in
        [(Shape::One, 14, 500), (Shape::Cluster, 11, 250), (Shape::Sentinel, 10, 250)]
    {
        assert_eq!(plan(shape, 7, length), plan(shape, 7, length));
        assert_ne!(plan(shape, 7, length), plan(shape, 8, length));
        for seed in 0..20 {
            let faults = plan(shape, seed, length);
            assert!((fewest..900).contains(&faults.len()), "{shape:?}: {} faults", faults.len());
            let kinds: std::collections::BTreeSet<_> =
                faults.iter().map(|fault| fault.what).collect();
            assert_eq!(kinds.len(), count, "{shape:?}, seed {seed}: {kinds:?}");
        }
    }
}

#[test]
fn a_gentle_schedule_ends_no_process() {
    for seed in 0..20 {
        let faults = gentle(seed, Duration::from_secs(600));
        assert!((150..250).contains(&faults.len()), "{} faults", faults.len());
        let ends = |what| matches!(what, What::KillGateway | What::RestartRedis);
        assert!(!faults.iter().any(|fault| ends(fault.what)));
        assert!(faults.windows(2).all(|pair| pair[0].at + pair[0].lasts < pair[1].at));
    }
}
