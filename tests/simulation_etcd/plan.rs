//! What happens in a run, made from its seed: processes, names, and faults.

use std::fmt;

use crate::chance::{Rng, mix};

/// The members of the cluster.
pub const MEMBERS: usize = 3;
/// Faults begin after the first of these, and are over at the second, in ms.
const FAULTS: (u64, u64) = (1000, 9000);
/// Within this time after it settled, each process is to be granted each name, in ms.
pub const PROBES: u64 = 8000;

/// What one seed decides.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub processes: usize,
    pub names: Vec<Name>,
    /// How many requests of one process there are for one name at a time.
    pub tasks: usize,
    pub whole_grace: bool,
    /// The shortest lease that the cluster grants, in seconds.
    pub min_ttl: i64,
    /// How far the wall clock of each process is off at first, in µs.
    pub skews: Vec<i64>,
    /// How much faster than the cluster's its clocks run, in millionths: less than the margin of a lease.
    pub drifts: Vec<i64>,
    pub faults: Vec<Fault>,
    /// When the last fault is over, in ms.
    pub faults_end: u64,
    pub planted: Option<Planted>,
}

/// A semaphore.
#[derive(Clone, Debug)]
pub struct Name {
    pub name: String,
    pub kind: Kind,
    /// The highest limit of a request.
    pub limit: u32,
    /// In ms.
    pub lease: u64,
    pub linger: u64,
    pub reuse: bool,
    /// If it has a rate, the most starts, and its window in ms.
    pub rate: Option<(u32, u64)>,
}

/// What the requests for a name have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// One limit, one permit each: every rule applies.
    Plain,
    /// Each request brings a limit of its own.
    Mixed,
    /// Tenants share the permits; some requests need several, or are under a further limit.
    Fair,
    /// So many starts in a time.
    Rated,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// In ms.
    pub at: u64,
    pub lasts: u64,
    pub what: What,
}

/// Which direction of a way stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    ToMember,
    FromMember,
    Both,
}

/// What happens in a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    // processes
    Dies { process: usize, silently: bool },
    Freezes { process: usize },
    Suspends { process: usize },
    ShutsDown { process: usize },
    ClockSteps { process: usize, by: i64 },
    // the network
    Cut { process: usize, member: usize },
    CutOff { process: usize, side: Side },
    Slow { process: usize, by: u64 },
    Refuses { process: usize, member: usize },
    // members
    MemberDown { member: usize },
    MemberFrozen { member: usize },
    Lags { member: usize, by: u64 },
    WatchLags { member: usize, by: u64 },
    // the cluster
    LosesLeader { unnoticed: u64 },
    Deposes,
    Compacts,
    NoSpace,
    EndsLeases { all: bool },
    Late { percent: u64 },
    Unanswered { percent: u64 },
    Refused { percent: u64 },
    WatchesLose { percent: u64 },
    WatchesEnd { percent: u64 },
    // operators
    Limits { process: usize, limit: u32 },
    Pauses { process: usize },
}

/// A rule that is removed on purpose, to test the judges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// Some comparisons of revisions hold that do not.
    ComparesWrongly,
    /// Comparisons of signs of life always hold.
    IgnoresPresence,
    /// Some transactions are answered, and not carried out.
    ForgetsWrite,
    /// The history lacks a change.
    HidesChange,
    /// A client goes on to use a permit that it gave back.
    UsesReturned,
    /// A client does not notice that its permit is lost.
    IgnoresLoss,
    /// A client never gives a permit back.
    KeepsPermit,
    /// A client asks, and is never answered.
    NeverAnswers,
    /// A client inspects a semaphore all the time.
    AsksAllTheTime,
    /// A future wakes itself all the time.
    Spins,
    /// A client takes a rejection for an outage.
    SaysUnavailable,
    /// No request is granted after the faults.
    IsNotServed,
}

impl Planted {
    pub const ALL: [(Self, &'static str); 12] = [
        (Self::ComparesWrongly, "history"),
        (Self::IgnoresPresence, "history"),
        (Self::ForgetsWrite, "cap"),
        (Self::HidesChange, "history"),
        (Self::UsesReturned, "cap"),
        (Self::IgnoresLoss, "cap"),
        (Self::KeepsPermit, "left"),
        (Self::NeverAnswers, "hangs"),
        (Self::AsksAllTheTime, "work"),
        (Self::Spins, "spins"),
        (Self::SaysUnavailable, "answer"),
        (Self::IsNotServed, "served"),
    ];
}

/// The kinds of faults, as they are counted.
pub const FAULT_KINDS: [&str; 25] = [
    "dies",
    "freezes",
    "suspends",
    "shuts down",
    "clock steps",
    "cut",
    "cut off",
    "slow",
    "refuses",
    "member down",
    "member frozen",
    "lags",
    "watch lags",
    "loses leader",
    "deposes",
    "compacts",
    "no space",
    "ends leases",
    "late",
    "unanswered",
    "refused",
    "watches lose",
    "watches end",
    "limits",
    "pauses",
];

impl What {
    /// Returns the index of its kind.
    #[must_use]
    pub const fn kind(&self) -> usize {
        match self {
            Self::Dies { .. } => 0,
            Self::Freezes { .. } => 1,
            Self::Suspends { .. } => 2,
            Self::ShutsDown { .. } => 3,
            Self::ClockSteps { .. } => 4,
            Self::Cut { .. } => 5,
            Self::CutOff { .. } => 6,
            Self::Slow { .. } => 7,
            Self::Refuses { .. } => 8,
            Self::MemberDown { .. } => 9,
            Self::MemberFrozen { .. } => 10,
            Self::Lags { .. } => 11,
            Self::WatchLags { .. } => 12,
            Self::LosesLeader { .. } => 13,
            Self::Deposes => 14,
            Self::Compacts => 15,
            Self::NoSpace => 16,
            Self::EndsLeases { .. } => 17,
            Self::Late { .. } => 18,
            Self::Unanswered { .. } => 19,
            Self::Refused { .. } => 20,
            Self::WatchesLose { .. } => 21,
            Self::WatchesEnd { .. } => 22,
            Self::Limits { .. } => 23,
            Self::Pauses { .. } => 24,
        }
    }

    fn random(kind: usize, rng: &mut Rng, processes: usize) -> Self {
        let process = rng.index(processes);
        let member = rng.index(MEMBERS);
        let percent = rng.pick(&[2, 10, 30, 100]);
        match kind {
            0 => Self::Dies { process, silently: rng.percent(50) },
            1 => Self::Freezes { process },
            2 => Self::Suspends { process },
            3 => Self::ShutsDown { process },
            4 => {
                let by = i64::try_from(rng.below(6_000_000)).unwrap_or(0) - 3_000_000;
                Self::ClockSteps { process, by }
            }
            5 => Self::Cut { process, member },
            6 => {
                let side = rng.pick(&[Side::ToMember, Side::FromMember, Side::Both]);
                Self::CutOff { process, side }
            }
            7 => Self::Slow { process, by: rng.pick(&[5, 40, 300, 700]) },
            8 => Self::Refuses { process, member },
            9 => Self::MemberDown { member },
            10 => Self::MemberFrozen { member },
            11 => Self::Lags { member, by: rng.pick(&[20, 200, 1500]) },
            12 => Self::WatchLags { member, by: rng.pick(&[20, 200, 1500]) },
            13 => Self::LosesLeader { unnoticed: rng.below(1000) },
            14 => Self::Deposes,
            15 => Self::Compacts,
            16 => Self::NoSpace,
            17 => Self::EndsLeases { all: rng.percent(30) },
            18 => Self::Late { percent },
            19 => Self::Unanswered { percent },
            20 => Self::Refused { percent },
            21 => Self::WatchesLose { percent },
            22 => Self::WatchesEnd { percent },
            23 => Self::Limits { process, limit: rng.pick(&[0, 1]) },
            _ => Self::Pauses { process },
        }
    }
}

impl Plan {
    /// Makes the plan of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(mix(&[seed, 1]));
        let processes = rng.index(4) + 3;
        // Each run has a few kinds of faults, so that these meet; one in 24 has none. The first kind is by turns.
        let turn = usize::try_from(seed).unwrap_or(0) % (FAULT_KINDS.len() + 1);
        let mut kinds = vec![turn];
        kinds.extend((0..rng.below(5)).map(|_| rng.index(FAULT_KINDS.len())));
        let count = if turn == FAULT_KINDS.len() { 0 } else { rng.between(1, 14) };
        let mut faults: Vec<_> = (0..count)
            .map(|number| {
                let at = rng.between(FAULTS.0, FAULTS.1 - 200);
                let longest = rng.pick(&[50, 600, 2500, 6000]);
                let lasts = rng.between(10, longest).min(FAULTS.1 - at);
                let kind = if number == 0 { turn } else { rng.pick(&kinds) };
                Fault { at, lasts, what: What::random(kind, &mut rng, processes) }
            })
            .collect();
        faults.sort_by_key(|fault| fault.at);
        let operates =
            |fault: &Fault| matches!(fault.what, What::Limits { .. } | What::Pauses { .. });
        let has_operators = faults.iter().any(operates);
        let names = names(&mut rng, has_operators);
        let ends_leases = faults.iter().any(|fault| matches!(fault.what, What::EndsLeases { .. }));
        // Where etcd ends leases too early, only a whole grace keeps permits of longer leases.
        let is_long = names.iter().any(|name| name.lease > 2000);
        let whole_grace = rng.percent(25) || (ends_leases && is_long);
        let is_skewed = rng.percent(30);
        let skew = |_| match is_skewed {
            true => i64::try_from(rng.below(6_000_000)).unwrap_or(0) - 3_000_000,
            false => 0,
        };
        let skews = (0..processes).map(skew).collect();
        let is_drifting = rng.percent(30);
        let drift = |_| if is_drifting { rng.pick(&[-7000, -1000, 0, 5000]) } else { 0 };
        let drifts = (0..processes).map(drift).collect();
        let faults_end = faults.iter().map(|fault| fault.at + fault.lasts).max().unwrap_or(0);
        Self {
            seed,
            processes,
            names,
            tasks: rng.index(3) + 1,
            whole_grace,
            min_ttl: rng.pick(&[1, 2, 2]),
            skews,
            drifts,
            faults,
            faults_end: faults_end.max(3000),
            planted: None,
        }
    }

    /// Returns how long after the last fault everybody is to be served again, in ms: what a dead process held is free after
    /// its lease, which a new leader has extended and whose end is noticed late, and after the grace.
    #[must_use]
    pub fn settle(&self) -> u64 {
        let longest = self.names.iter().map(|name| name.lease).max().unwrap_or(0);
        let lease = longest.max(self.min_ttl.unsigned_abs() * 1000);
        let grace = if self.whole_grace { lease } else { lease / 2 };
        lease + 1500 + grace.max(2000) + 1500
    }

    /// Whether all wall clocks show the same time.
    #[must_use]
    pub fn has_one_time(&self) -> bool {
        let steps = |fault: &Fault| matches!(fault.what, What::ClockSteps { .. });
        self.skews.iter().chain(&self.drifts).all(|by| *by == 0) && !self.faults.iter().any(steps)
    }

    /// Returns by how much the wall clocks of processes can differ, in ms, where that counts: starts under a rate are
    /// forgotten by them.
    #[must_use]
    pub fn clocks_differ(&self) -> u64 {
        if self.names.iter().all(|name| name.rate.is_none()) {
            return 0;
        }
        let steps = self.faults.iter().map(|fault| match fault.what {
            What::ClockSteps { by, .. } => by.unsigned_abs(),
            _ => 0,
        });
        let skews = self.skews.iter().map(|skew| skew.unsigned_abs()).max().unwrap_or(0);
        (2 * skews + steps.sum::<u64>()) / 1000
    }
}

fn names(rng: &mut Rng, has_operators: bool) -> Vec<Name> {
    let mut kinds = vec![Kind::Plain];
    // What operators do to a name excuses that permits are idle.
    kinds.extend(has_operators.then_some(Kind::Mixed));
    let others = [Kind::Plain, Kind::Mixed, Kind::Fair, Kind::Rated];
    kinds.extend((0..rng.below(3)).map(|_| rng.pick(&others)));
    let named = kinds.into_iter().enumerate().map(|(at, kind)| {
        let limit = u32::try_from(rng.pick(&[1, 1, 2, 3, 5])).unwrap_or(1);
        let rate = (kind == Kind::Rated).then(|| (rng.pick(&[2, 4]), rng.pick(&[400, 1000])));
        Name {
            name: format!("{kind:?}{at}").to_lowercase(),
            kind,
            limit: if kind == Kind::Fair { limit + 1 } else { limit },
            lease: rng.pick(&[1000, 1000, 2000, 3000]),
            linger: if rng.percent(20) { rng.between(5, 100) } else { 0 },
            reuse: rng.percent(20),
            rate,
        }
    });
    named.collect()
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processes, tasks, whole_grace, min_ttl, skews, drifts, .. } = self;
        writeln!(
            f,
            "{processes} processes, {tasks} requests each at a time, skews {skews:?}, drifts {drifts:?}"
        )?;
        writeln!(f, "whole grace {whole_grace}, leases of {min_ttl} s at least")?;
        for name in &self.names {
            writeln!(f, "{name:?}")?;
        }
        for Fault { at, lasts, what } in &self.faults {
            writeln!(f, "{at:>6} ms, for {lasts:>5}: {what:?}")?;
        }
        Ok(())
    }
}
