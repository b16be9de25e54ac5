//! The events of a run as data: made from a seed, and made smaller when the run fails.

use std::borrow::Cow;
use std::fmt;

use crate::chance::Rng;

/// The subject of a run: its kinds of faults, policies and callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scenario {
    /// No faults; callers that leave.
    Calm,
    /// Connections that are cut, stalled, half open, slow or refused; hints that are lost, late or doubled.
    Network,
    /// Servers that lose data: restarted empty, flushed, or replaced by a lagging replica.
    Loss,
    /// Servers that are unreachable or hang for seconds, under every outage policy.
    Outage,
    /// Calls that fail though the connection is good.
    Errors,
    /// Processes that crash, freeze, are slow.
    Processes,
    /// Operators that set limits, pause, drain, revoke and inspect.
    Operators,
    /// Several servers, each of which may be unreachable; names that move.
    Shards,
    /// Server clocks that drift and step.
    Clocks,
    /// Old and new policies side by side; processes that shut down and are replaced.
    Deploy,
    /// The Tower layer with response bodies, under faults of the network.
    Layer,
    /// Long leases, long holds, few requests.
    Leases,
    /// Answers that arrive just after they are given up.
    Tardy,
    /// Thousands of permits held by a process whose connection is cut.
    Large,
    /// Calls that are refused for minutes, under long leases.
    Refusals,
    /// Everything.
    All,
    /// Everything except loss of data, in short faults that never end: dozens each second.
    Hail,
    /// Very many processes request permits for thousands of tenants at once: after an outage, or without one.
    Crowd,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Self; 18] = [
        Self::Calm,
        Self::Network,
        Self::Loss,
        Self::Outage,
        Self::Errors,
        Self::Processes,
        Self::Operators,
        Self::Shards,
        Self::Clocks,
        Self::Deploy,
        Self::Layer,
        Self::Leases,
        Self::Tardy,
        Self::Large,
        Self::Refusals,
        Self::All,
        Self::Hail,
        Self::Crowd,
    ];

    /// Returns the name, as the command line takes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Network => "network",
            Self::Loss => "loss",
            Self::Outage => "outage",
            Self::Errors => "errors",
            Self::Processes => "processes",
            Self::Operators => "operators",
            Self::Shards => "shards",
            Self::Clocks => "clocks",
            Self::Deploy => "deploy",
            Self::Layer => "layer",
            Self::Leases => "leases",
            Self::Tardy => "tardy",
            Self::Large => "large",
            Self::Refusals => "refusals",
            Self::All => "all",
            Self::Hail => "hail",
            Self::Crowd => "crowd",
        }
    }

    /// Returns the scenario of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scenario| scenario.name() == name)
    }

    fn faults(self) -> Vec<Kind> {
        let network = [
            Kind::Cut,
            Kind::Cut,
            Kind::Stall,
            Kind::Blackhole,
            Kind::HalfOpen,
            Kind::SlowNetwork,
            Kind::ConnectFails,
            Kind::ConnectSlow,
            Kind::HintsLost,
            Kind::HintsLate,
            Kind::HintsTwice,
            Kind::PollOnly,
        ];
        let loss = [Kind::Restart, Kind::Flush, Kind::Failover];
        let outage = [Kind::Down, Kind::Hangs];
        let errors =
            [Kind::NoMemory, Kind::ReadOnly, Kind::Loading, Kind::NoRights, Kind::LateAnswers];
        let processes = [Kind::Crash, Kind::Freeze, Kind::Suspend, Kind::SlowProcess];
        match self {
            // The outage before the crowd.
            Self::Calm | Self::Operators | Self::Crowd => Vec::new(),
            Self::Network | Self::Layer => network.into(),
            Self::Loss => [&loss[..], &[Kind::Cut, Kind::HintsLost, Kind::LateAnswers]].concat(),
            Self::Outage => {
                [&outage[..], &[Kind::Cut, Kind::SlowNetwork, Kind::ConnectSlow]].concat()
            }
            Self::Errors => [&errors[..], &[Kind::Cut]].concat(),
            Self::Processes => [&processes[..], &[Kind::Cut]].concat(),
            Self::Shards => vec![Kind::Move, Kind::Move, Kind::Down, Kind::Cut, Kind::Failover],
            Self::Clocks => vec![Kind::ClockStep, Kind::Cut],
            Self::Deploy => vec![Kind::Leave, Kind::Cut],
            Self::Leases => vec![Kind::Cut, Kind::HintsLate, Kind::HintsTwice, Kind::Stall],
            Self::Tardy => vec![Kind::Stall],
            Self::Large => vec![Kind::Cut, Kind::Cut, Kind::Cut, Kind::Crash],
            Self::Refusals => {
                vec![Kind::Forbidden, Kind::Forbidden, Kind::NoMemory, Kind::FailsAfter, Kind::Cut]
            }
            Self::Hail => {
                [&network[..], &outage, &errors, &[Kind::Freeze, Kind::Suspend, Kind::SlowProcess]]
                    .concat()
            }
            Self::All => [
                &network[..],
                &loss,
                &outage,
                &errors,
                &processes,
                &[Kind::Move, Kind::ClockStep, Kind::Leave, Kind::Forbidden, Kind::FailsAfter],
            ]
            .concat(),
        }
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A connection is closed, with everything that is in flight.
    Cut,
    /// Nothing passes for a while in either direction, then everything does.
    Stall,
    /// Requests do not arrive, and neither side is notified.
    Blackhole,
    /// Requests arrive, answers do not.
    HalfOpen,
    /// Everything takes longer.
    SlowNetwork,
    /// Connections are refused.
    ConnectFails,
    /// Connections take long to open.
    ConnectSlow,
    /// Hints are lost.
    HintsLost,
    /// Hints are late.
    HintsLate,
    /// Hints are doubled.
    HintsTwice,
    /// Connections that open now cannot subscribe.
    PollOnly,
    /// The server is unreachable, and keeps its data.
    Down,
    /// The server hangs for a while.
    Hangs,
    /// The server is killed and started empty.
    Restart,
    /// The server loses everything, and keeps its connections.
    Flush,
    /// A replica takes over that has not received the last changes.
    Failover,
    /// Acquires and reassertions fail for lack of memory.
    NoMemory,
    /// All writes fail.
    ReadOnly,
    /// Everything fails, and so do connections.
    Loading,
    /// Calls that are not needed for permits fail.
    NoRights,
    /// All calls for one name fail.
    Forbidden,
    /// Calls for places are carried out, but reported as failed.
    FailsAfter,
    /// Calls overtake each other.
    LateAnswers,
    /// A name moves to another server, with its data.
    Move,
    /// The server's clock is changed.
    ClockStep,
    /// A process dies, and another one replaces it.
    Crash,
    /// A process stands still.
    Freeze,
    /// A process stands still, and so does its clock.
    Suspend,
    /// A process runs only from time to time.
    SlowProcess,
    /// A process is shut down, and another one replaces it.
    Leave,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 30] = [
        Self::Cut,
        Self::Stall,
        Self::Blackhole,
        Self::HalfOpen,
        Self::SlowNetwork,
        Self::ConnectFails,
        Self::ConnectSlow,
        Self::HintsLost,
        Self::HintsLate,
        Self::HintsTwice,
        Self::PollOnly,
        Self::Down,
        Self::Hangs,
        Self::Restart,
        Self::Flush,
        Self::Failover,
        Self::NoMemory,
        Self::ReadOnly,
        Self::Loading,
        Self::NoRights,
        Self::Forbidden,
        Self::FailsAfter,
        Self::LateAnswers,
        Self::Move,
        Self::ClockStep,
        Self::Crash,
        Self::Freeze,
        Self::Suspend,
        Self::SlowProcess,
        Self::Leave,
    ];

    /// Returns the name of its count.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cut => "fault: cut",
            Self::Stall => "fault: stall",
            Self::Blackhole => "fault: blackhole",
            Self::HalfOpen => "fault: half open",
            Self::SlowNetwork => "fault: slow network",
            Self::ConnectFails => "fault: connect fails",
            Self::ConnectSlow => "fault: connect slow",
            Self::HintsLost => "fault: hints lost",
            Self::HintsLate => "fault: hints late",
            Self::HintsTwice => "fault: hints twice",
            Self::PollOnly => "fault: poll only",
            Self::Down => "fault: down",
            Self::Hangs => "fault: hangs",
            Self::Restart => "fault: restart",
            Self::Flush => "fault: flush",
            Self::Failover => "fault: failover",
            Self::NoMemory => "fault: no memory",
            Self::ReadOnly => "fault: read only",
            Self::Loading => "fault: loading",
            Self::NoRights => "fault: no rights",
            Self::Forbidden => "fault: forbidden",
            Self::FailsAfter => "fault: fails after",
            Self::LateAnswers => "fault: late answers",
            Self::Move => "fault: move",
            Self::ClockStep => "fault: clock step",
            Self::Crash => "fault: crash",
            Self::Freeze => "fault: freeze",
            Self::Suspend => "fault: suspend",
            Self::SlowProcess => "fault: slow process",
            Self::Leave => "fault: leave",
        }
    }

    /// Returns how long it lasts, in ms.
    fn lasts(self, rng: &mut Rng) -> u64 {
        match self {
            Self::Cut | Self::Flush | Self::Move | Self::ClockStep => 0,
            Self::Failover | Self::Restart => rng.between(0, 800),
            Self::Freeze => rng.pick(&[100, 400, 900, 1500, 2500]),
            Self::Suspend => rng.pick(&[100, 900, 2500, 4000]),
            Self::Down | Self::Hangs => rng.pick(&[100, 400, 1000, 2000, 4000, 20_000]),
            Self::Crash | Self::Leave => rng.between(0, 1000),
            _ => rng.between(50, 1500),
        }
    }
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// When it begins, in ms.
    pub at: u64,
    /// How long it lasts, in ms.
    pub lasts: u64,
    /// Its kind.
    pub kind: Kind,
    /// The process, if it affects one or its connection.
    pub process: usize,
    /// The server, if it affects one or the connection to it.
    pub server: usize,
    /// The name, or an amount.
    pub what: u64,
}

/// What happens to requests while the server cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutagePolicy {
    /// They are refused.
    Refuse,
    /// They are admitted.
    Admit,
    /// This number is admitted.
    Local(u32),
}

/// The claim of a request, if tenants share its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskPlan {
    /// The tenant.
    pub tenant: u16,
    /// The tenant's weight.
    pub weight: u32,
    /// The request's class.
    pub class: u8,
    /// The number of permits that it takes.
    pub cost: u32,
    /// The cap of its tenant; 0 for none.
    pub each: u32,
    /// Its further limits, each with its value and its cap.
    pub also: [Option<(u8, u32)>; FURTHER.len()],
    /// What it takes of its budget.
    pub budget: Option<BudgetPlan>,
}

impl AskPlan {
    /// One permit for a tenant, and nothing else.
    #[must_use]
    pub const fn of(tenant: u16) -> Self {
        Self { tenant, weight: 1, class: 0, cost: 1, each: 0, also: [None; 2], budget: None }
    }
}

/// What a request takes of a budget of 100, and what of that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetPlan {
    /// The time in which the budget refills, in ms.
    pub per: u64,
    /// Each tenant has one.
    pub is_each: bool,
    /// What the request is estimated to use.
    pub estimate: u64,
    /// What it uses; `None`: it does not say.
    pub used: Option<u64>,
    /// What is left by its provider; `None`: that does not say.
    pub left: Option<u64>,
}

/// The names of further limits.
pub const FURTHER: [&str; 2] = ["model", "route"];

/// A process's policy for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyPlan {
    /// The limit.
    pub limit: u32,
    /// The permits that are reserved for class 0.
    pub headroom: u32,
    /// The length of the lease, in ms.
    pub lease: u64,
    /// How many requests may wait.
    pub max_queue: u32,
    /// What to do if the server cannot be asked.
    pub outage: OutagePolicy,
    /// How long a request may wait, if the layer decides that, in ms.
    pub wait: u64,
    /// How long a permit lingers if its request is broken off, in ms.
    pub linger: u64,
    /// Whether permits are passed on to the process's next request, if that may wait.
    pub reuse: bool,
    /// How many requests may start within a time, in ms.
    pub rate: Option<(u32, u64)>,
    /// For how long, in ms, the upstream wants no request, as one in ten is told.
    pub backoff: Option<u64>,
    /// How the limit finds itself, if it does.
    pub adaptive: Option<AdaptivePlan>,
}

/// How a limit finds itself below that of its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptivePlan {
    /// The lowest limit.
    pub min: u32,
    /// In how many ms the upstream begins once to refuse requests, for how long, and until when it does.
    pub every: u64,
    /// See there.
    pub lasts: u64,
    /// See there.
    pub until: u64,
}

impl AdaptivePlan {
    /// Returns whether the upstream refuses what is answered now, in ms.
    #[must_use]
    pub const fn refuses(self, at: u64) -> bool {
        at < self.until && at % self.every < self.lasts
    }
}

/// How a permit is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveBack {
    /// It is dropped.
    Drop,
    /// Its release is awaited.
    Release,
    /// Its release is begun, and not awaited.
    ReleaseLeft,
    /// A clone of it lives on for a while.
    Clone,
    /// Its request is broken off: a client leaves during the response, or a caller says so.
    BreakOff,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestPlan {
    /// When it comes, in ms.
    pub at: u64,
    /// Its process.
    pub process: usize,
    /// The name.
    pub name: usize,
    /// Its claim; `None` if only its time counts.
    pub ask: Option<AskPlan>,
    /// Limit and headroom, if they are not those of its process.
    pub bound: Option<(u32, u32)>,
    /// How long it may wait, in ms.
    pub wait: u64,
    /// How long it holds its permit, in ms.
    pub hold: u64,
    /// When its client leaves if it still waits, in ms after it came.
    pub leaves: Option<u64>,
    /// How its permit is released.
    pub back: GiveBack,
}

/// An operation of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// Sets a limit.
    SetLimit(u32),
    /// Clears it.
    ClearLimit,
    /// Pauses a name.
    Pause,
    /// Pauses it for this many ms.
    PauseFor(u64),
    /// Sets a rate, in starts and ms.
    SetRate(u32, u64),
    /// Clears it.
    ClearRate,
    /// Resumes it.
    Resume,
    /// Drains it, for at most this many ms.
    Drain(u64),
    /// Revokes a place, whichever comes first.
    Revoke,
    /// Inspects it.
    Inspect,
    /// Inspects it, and asks the other processes.
    InspectFleet,
    /// Lists names.
    List,
    /// Lists the overrides.
    Overrides,
}

/// An operator's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationPlan {
    /// When it is made, in ms.
    pub at: u64,
    /// Its process.
    pub process: usize,
    /// The name.
    pub name: usize,
    /// The operation.
    pub deed: Deed,
}

/// A planted fault: a rule undone on purpose, to see that the checker notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A server sometimes grants one permit too many.
    GrantsOneTooMany,
    /// A server promotes the second in the queue.
    PromotesOutOfOrder,
    /// A server takes out places and never promotes.
    ForgetsToPromote,
    /// A server drops releases, and reports them as done.
    DropsReleases,
    /// A server reports a place as granted without writing it.
    AnswersWithoutDoing,
    /// A process takes a grant for a refusal.
    LosesGrants,
    /// A process does not learn that its renewals were answered.
    NeverRenews,
    /// A client is woken again and again.
    Spins,
    /// A client never returns.
    Hangs,
    /// A client never releases its permit.
    KeepsPermit,
    /// A request that waits is not answered.
    NeverAnswers,
    /// A server does not bound the work of a call.
    WorksUnbounded,
    /// A server refuses releases, though nothing is wrong.
    RefusesReleases,
    /// A process sends each of its writes repeatedly.
    SendsAgain,
    /// A process repeats each released place in all later releases.
    ReleasesAgain,
    /// A process does not know how long its machine was suspended.
    ForgetsSuspension,
    /// A process opens many connections at once.
    ConnectsAgain,
    /// A process does not wait for answers before it writes more.
    WritesAhead,
    /// A client takes a refusal for the end of its semaphore.
    SaysClosed,
    /// A client takes a refusal for that of a quarantine.
    SaysQuarantined,
    /// Permits of broken-off requests do not linger.
    ForgetsToLinger,
    /// They linger longer than their policy allows.
    LingersTooLong,
    /// A permit lingers although its request ended normally.
    LingersAlways,
    /// A server judges waiting places by the limit of the caller.
    JudgesByCaller,
    /// A process applies the lowest limit when it frees permits.
    GoesByTheLowest,
    /// A process does not receive recalls.
    IgnoresRecalls,
    /// It also never learns that others wait: what it knows does not age.
    NeverHearsOfOthers,
    /// A waiting process takes all waiters for its own requests.
    TakesOthersForOwn,
    /// A process keeps permits for longer than it may.
    KeepsTooLong,
    /// A request is sent long after it came, after later ones.
    ComesLate,
    /// A process that can connect believes that it cannot.
    NeverConnects,
    /// A process misses some answers.
    LosesAnswers,
    /// A process does not learn of pauses.
    IgnoresPauses,
    /// A server lowers an adaptive limit at each refusal.
    LowersAtEach,
    /// A server lowers and raises an adaptive limit out of its range.
    LeavesRange,
    /// A process takes an adaptive limit for more than that of an operator.
    NumberBeatsOperator,
    /// A server raises an adaptive limit twice at once.
    GrowsAtOnce,
    /// A server raises an adaptive limit where a refusal would lower it.
    GrowsByRefusals,
    /// A server never raises an adaptive limit.
    NeverGrows,
    // From here on: a server whose ledger is [`Naive`](crate::naive::Naive).
    /// No fault: the test's own ledger, with all its rules. It has none for rates, so the plan's do not count.
    Naive,
    /// The plan's rates count.
    IgnoresRates,
    /// A turn is never changed.
    SettlesNothing,
    /// A turn begins again whenever its line changes.
    StampsAnew,
    /// A tenant's level is the number of permits that it waits for.
    LevelByWaiting,
    /// A grant from a line does not count for its tenant.
    ShareNotWritten,
    /// A tenant's own cap is ignored.
    IgnoresEach,
    /// A request for several permits is granted as soon as one is free.
    GrantsPastLimit,
    /// A request that fits passes one for several permits.
    SmallPassesBig,
    /// The changes of a sweep are not settled.
    SweepSettlesNobody,
    /// A grant does not raise its tenant's level.
    GrantKeepsLevel,
    /// A newcomer takes a free permit even if others wait.
    NewcomerPassesTurn,
    /// Tenants are served in the order in which their requests came.
    FirstComeAmongTenants,
    /// A release frees one permit, however many there were.
    ForgetsShares,
    /// All lines wait for one that its tenant's cap stops.
    WaitsForStopped,
    /// A request for more than there can be is examined again and again.
    LoopsAtNeverFitting,
}

impl Planted {
    /// All of them except [`Planted::Naive`], and [`Planted::Hangs`] and [`Planted::LoopsAtNeverFitting`], which need a
    /// process of their own.
    ///
    /// Each comes with the rule that it breaks.
    pub const ALL: [(Self, &str); 52] = [
        (Self::GrantsOneTooMany, "cap in the server"),
        (Self::PromotesOutOfOrder, "order"),
        (Self::ForgetsToPromote, "idle in the server"),
        (Self::DropsReleases, "orphan"),
        (Self::AnswersWithoutDoing, "cap"),
        (Self::LosesGrants, "orphan"),
        (Self::NeverRenews, "lost"),
        (Self::Spins, "spin"),
        (Self::KeepsPermit, "orphan"),
        (Self::NeverAnswers, "answer"),
        (Self::WorksUnbounded, "work: places"),
        (Self::RefusesReleases, "release"),
        (Self::SendsAgain, "work: calls"),
        (Self::ReleasesAgain, "work: named"),
        (Self::ForgetsSuspension, "cap"),
        (Self::ConnectsAgain, "work: connects"),
        (Self::WritesAhead, "work: unanswered"),
        (Self::SaysClosed, "closed"),
        (Self::SaysQuarantined, "refusal"),
        (Self::ForgetsToLinger, "linger"),
        (Self::LingersTooLong, "orphan"),
        (Self::LingersAlways, "orphan"),
        (Self::JudgesByCaller, "cap in the server"),
        (Self::GoesByTheLowest, "idle"),
        (Self::IgnoresRecalls, "recall"),
        (Self::NeverHearsOfOthers, "passed by"),
        (Self::TakesOthersForOwn, "passed by"),
        (Self::KeepsTooLong, "kept"),
        (Self::ComesLate, "own order"),
        (Self::NeverConnects, "admitted"),
        (Self::LosesAnswers, "work: reconnects"),
        (Self::IgnoresPauses, "pause"),
        (Self::LowersAtEach, "adaptive: burst"),
        (Self::LeavesRange, "adaptive: range"),
        (Self::NumberBeatsOperator, "adaptive: operator"),
        (Self::GrowsAtOnce, "adaptive: interval"),
        (Self::GrowsByRefusals, "adaptive: growth"),
        (Self::NeverGrows, "adaptive: stuck"),
        (Self::SettlesNothing, "turn"),
        (Self::StampsAnew, "turn"),
        (Self::LevelByWaiting, "turn"),
        (Self::ShareNotWritten, "turn"),
        (Self::IgnoresEach, "each in the server"),
        (Self::GrantsPastLimit, "cap in the server"),
        (Self::SmallPassesBig, "turn"),
        (Self::SweepSettlesNobody, "turn"),
        (Self::GrantKeepsLevel, "turn"),
        (Self::NewcomerPassesTurn, "turn"),
        (Self::FirstComeAmongTenants, "turn"),
        (Self::ForgetsShares, "idle in the server"),
        (Self::WaitsForStopped, "idle in the server"),
        (Self::IgnoresRates, "rate in the server"),
    ];

    /// Returns whether the server's ledger is the test's own.
    #[must_use]
    pub const fn is_of_tenants(self) -> bool {
        self as u8 >= Self::Naive as u8
    }
}

/// All events of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Its subject.
    pub scenario: Scenario,
    /// Its seed, which also decides latencies and ids.
    pub seed: u64,
    /// The number of servers.
    pub servers: usize,
    /// The number of names.
    pub names: usize,
    /// The number of names that are used all the time; the others are used once or twice.
    pub common: usize,
    /// The number of processes.
    pub processes: usize,
    /// The policies by process and name. A replacement has the next process's.
    pub policies: Vec<Vec<PolicyPlan>>,
    /// Whether nothing is granted for a lease after a loss of data.
    pub quarantine: bool,
    /// Whether servers know which processes listen.
    pub counted: bool,
    /// What a place costs a server, in ns.
    pub place_ns: u64,
    /// The drift of a server's clock, in µs per second.
    pub drift: Vec<i64>,
    /// How long processes run before they exchange messages, in ms.
    pub window: u64,
    /// The requests.
    pub requests: Vec<RequestPlan>,
    /// The faults.
    pub faults: Vec<FaultPlan>,
    /// The operators' calls.
    pub operations: Vec<OperationPlan>,
    /// When load and faults end, in ms.
    pub load: u64,
    /// The planted fault.
    pub planted: Option<Planted>,
}

impl Plan {
    /// Makes the plan of a seed.
    #[must_use]
    pub fn new(scenario: Scenario, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ ((scenario as u64 + 1) << 56));
        let large = scenario == Scenario::Large;
        let long = scenario == Scenario::Leases;
        let servers = match scenario {
            Scenario::Shards => 3,
            Scenario::All => rng.pick(&[1, 1, 2, 3]),
            _ => 1,
        };
        let crowd = scenario == Scenario::Crowd;
        let common = match scenario {
            Scenario::Large => 1,
            Scenario::Crowd => 3,
            _ => rng.pick(&[1, 2, 2, 3, 4]),
        };
        let names = common + if large || crowd { 0 } else { rng.pick(&[0, 3, 10]) };
        let processes = if crowd { 20 } else { rng.pick(&[2, 3, 3, 4]) };
        let load = match scenario {
            Scenario::Large => 12_000,
            Scenario::Crowd => 9000,
            Scenario::Outage => rng.pick(&[3000, 5000, 8000, 30_000]),
            Scenario::Refusals => 60_000,
            _ => rng.pick(&[3000, 5000, 8000]),
        };
        let policies = Self::policies(scenario, rng, names, processes);
        let mut plan = Self {
            scenario,
            seed,
            servers,
            names,
            common,
            processes,
            policies,
            quarantine: matches!(scenario, Scenario::Loss | Scenario::All) && rng.percent(40),
            counted: rng.percent(60),
            place_ns: match scenario {
                Scenario::Large => 20_000,
                // As if each had a tenant of its own, and the server were slow.
                Scenario::Crowd => rng.pick(&[100_000, 150_000, 200_000]),
                _ => rng.pick(&[2000, 10_000]),
            },
            drift: (0..servers).map(|_| 0).collect(),
            window: rng.pick(&[1, 2, 2, 4]),
            requests: Vec::new(),
            faults: Vec::new(),
            operations: Vec::new(),
            load,
            planted: None,
        };
        if matches!(scenario, Scenario::Clocks | Scenario::All) {
            plan.drift
                .iter_mut()
                .for_each(|drift| *drift = i64::from(rng.pick(&[-200, 0, 0, 200])));
        }
        plan.add_requests(rng, large, long);
        plan.add_faults(rng);
        plan.add_operations(rng);
        if crowd {
            return plan;
        }
        plan.add_tenants(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 71])));
        plan.add_bounds(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 103])));
        plan.add_lingers(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 83])));
        plan.add_reuse(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 97])));
        plan.add_rates(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 109])));
        plan.add_pauses(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 113])));
        plan.add_adaptive(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 149])));
        plan.add_further_limits(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 151])));
        plan.add_budgets(&mut Rng::new(crate::chance::mix(&[seed, scenario as u64, 157])));
        plan
    }

    /// Has some names used under several limits in one process.
    fn add_bounds(&mut self, rng: &mut Rng) {
        if matches!(self.scenario, Scenario::Large | Scenario::Tardy | Scenario::Layer) {
            return;
        }
        for name in 0..self.names {
            if !rng.percent(30) {
                continue;
            }
            let limit = rng.pick(&[1, 2, 2, 3, 4, 8]);
            let headroom = rng.pick(&[0, 0, 0, 1, 2]).min(limit - 1);
            let part = rng.pick(&[5, 20, 50]);
            for request in self.requests.iter_mut().filter(|request| request.name == name) {
                if rng.percent(part) {
                    request.bound = Some((limit, headroom));
                }
            }
        }
    }

    /// Returns the limits and headrooms of the requests for a name.
    pub fn bounds(&self, name: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        let policies = self.policies.iter().map(move |own| (own[name].limit, own[name].headroom));
        let requests = self.requests.iter().filter(move |request| request.name == name);
        policies.chain(requests.filter_map(|request| request.bound))
    }

    /// Has some requests broken off, and the permits of some names linger then.
    fn add_lingers(&mut self, rng: &mut Rng) {
        if matches!(self.scenario, Scenario::Large | Scenario::Tardy) {
            return;
        }
        for name in 0..self.names {
            let part = rng.pick(&[0, 0, 20, 8, 4, 2, 2]);
            for policy in self.policies.iter_mut().map(|own| &mut own[name]) {
                // At most half of the lease, and no more than a run has time for.
                policy.linger = policy.lease.checked_div(part).unwrap_or(0).min(5000);
            }
        }
        let broken_off = rng.pick(&[0, 10, 40]);
        for request in &mut self.requests {
            if rng.percent(broken_off) {
                request.back = GiveBack::BreakOff;
            }
        }
    }

    /// The plan without rates, further limits and budgets, if the server's ledger has none, and that is not what is to be found.
    #[must_use]
    pub fn for_its_ledger(&self) -> Cow<'_, Self> {
        let knows_rates = |bug: Planted| bug == Planted::IgnoresRates || !bug.is_of_tenants();
        if self.planted.is_none_or(knows_rates) {
            return Cow::Borrowed(self);
        }
        let mut plan = self.clone();
        for policy in plan.policies.iter_mut().flatten() {
            (policy.rate, policy.adaptive) = (None, None);
        }
        for ask in plan.requests.iter_mut().filter_map(|request| request.ask.as_mut()) {
            (ask.also, ask.budget) = ([None; 2], None);
        }
        Cow::Owned(plan)
    }

    /// Has the requests of some names start by time, with room for the most that one costs.
    fn add_rates(&mut self, rng: &mut Rng) {
        if matches!(self.scenario, Scenario::Large | Scenario::Tardy | Scenario::Layer) {
            return;
        }
        for name in 0..self.names {
            if !rng.percent(20) {
                continue;
            }
            let rate = Some(some_rate(rng));
            for policy in self.policies.iter_mut().map(|own| &mut own[name]) {
                (policy.rate, policy.reuse) = (rate, false);
            }
        }
    }

    /// Has the upstreams of some names ask for pauses, and operators set pauses and rates.
    fn add_pauses(&mut self, rng: &mut Rng) {
        if matches!(self.scenario, Scenario::Large | Scenario::Tardy | Scenario::Layer) {
            return;
        }
        for name in 0..self.names {
            let backoff = rng.percent(10).then(|| rng.pick(&[100, 400, 1500, 4000]));
            self.policies.iter_mut().for_each(|own| own[name].backoff = backoff);
        }
        if self.operations.is_empty() {
            return;
        }
        let mut at = rng.between(100, 2000);
        while at < self.load {
            let (process, name) = (rng.index(self.processes), rng.index(self.common));
            // What has left a shorter window is forgotten, so that of the policy stays.
            let (starts, ms) = some_rate(rng);
            let ms = self.policies[0][name].rate.map_or(ms, |(_, of_policy)| of_policy);
            let deed = match rng.below(4) {
                0 | 1 => Deed::PauseFor(rng.pick(&[100, 900, 3000, 6000])),
                2 => Deed::SetRate(starts, ms),
                _ => Deed::ClearRate,
            };
            self.operations.push(OperationPlan { at, process, name, deed });
            at += rng.between(300, 4000);
        }
        self.operations.sort_by_key(|operation| operation.at);
    }

    /// Has the limits of some names find themselves: their upstreams refuse requests from time to time.
    fn add_adaptive(&mut self, rng: &mut Rng) {
        if matches!(self.scenario, Scenario::Large | Scenario::Tardy | Scenario::Layer) {
            return;
        }
        for name in 0..self.names {
            let (is_chosen, part) = (rng.percent(25), rng.pick(&[1, 2, 4]));
            let every = rng.pick(&[300, 1000, 2500]);
            let lasts = rng.pick(&[5, 50, every / 4]);
            let has_room = |own: &Vec<PolicyPlan>| own[name].limit > own[name].headroom + 1;
            if !is_chosen || !self.policies.iter().all(has_room) {
                continue;
            }
            for policy in self.policies.iter_mut().map(|own| &mut own[name]) {
                let min = (policy.limit / part).clamp(policy.headroom + 1, policy.limit - 1);
                policy.adaptive = Some(AdaptivePlan { min, every, lasts, until: self.load });
            }
            // Their limit is no other than that of their process.
            let requests = self.requests.iter_mut().filter(|request| request.name == name);
            requests.for_each(|request| request.bound = None);
        }
    }

    /// Has permits of some names passed on; for some of these not by every process, as in a rolling change.
    fn add_reuse(&mut self, rng: &mut Rng) {
        for name in 0..self.names {
            let part = rng.pick(&[0, 0, 100, 100, 100, 50]);
            for policy in self.policies.iter_mut().map(|own| &mut own[name]) {
                policy.reuse = rng.percent(part) && policy.max_queue > 0;
            }
        }
    }

    /// Has tenants share some names, together with requests without a tenant, as while a fleet introduces
    /// tenants.
    fn add_tenants(&mut self, rng: &mut Rng) {
        for name in 0..self.names {
            if !rng.percent(45) {
                continue;
            }
            let differ = matches!(self.scenario, Scenario::Deploy | Scenario::All);
            let headroom = rng.pick(&[0, 0, 0, 1, 2]);
            for policy in &mut self.policies {
                policy[name].headroom = headroom.min(policy[name].limit - 1);
            }
            let tenants: Vec<_> = (0..rng.pick(&[2, 2, 3, 5, 12]))
                .map(|tenant| AskPlan {
                    weight: rng.pick(&[1, 1, 1, 2, 3, 64]),
                    class: rng.pick(&[0, 0, 0, 1, 7]),
                    each: rng.pick(&[0, 0, 0, 1, 2, 4]),
                    ..AskPlan::of(tenant)
                })
                .collect();
            let cost_max = rng.pick(&[1, 1, 2, 3, 5]);
            let plain = rng.pick(&[0, 0, 10, 50]);
            // One of them may make most of the requests.
            let first = rng.pick(&[0, 50, 90]);
            for request in self.requests.iter_mut().filter(|request| request.name == name) {
                let first = if rng.percent(first) { tenants[0] } else { rng.pick(&tenants) };
                let mut ask = AskPlan { cost: rng.pick(&[1, cost_max]), ..first };
                if rng.percent(10) {
                    (ask.weight, ask.class) = (rng.pick(&[1, 5]), rng.pick(&[0, 1]));
                }
                if differ && request.process % 2 == 1 {
                    ask.each = ask.each.saturating_sub(1);
                }
                let limit = self.policies[request.process][name].limit;
                if rng.percent(95) {
                    ask.cost = ask.cost.min(limit).min(if ask.each > 0 { ask.each } else { limit });
                }
                request.ask = Some(ask).filter(|_| !rng.percent(plain));
            }
        }
    }

    /// Has requests of tenants count under further limits, for some names.
    fn add_further_limits(&mut self, rng: &mut Rng) {
        let differ = matches!(self.scenario, Scenario::Deploy | Scenario::All);
        for name in 0..self.names {
            if !rng.percent(40) {
                continue;
            }
            let caps = FURTHER.map(|_| rng.pick(&[1, 1, 2, 3, 5]));
            let parts = FURTHER.map(|_| rng.pick(&[0, 30, 80, 100]));
            let values = FURTHER.map(|_| rng.pick(&[1, 2, 4]));
            for request in self.requests.iter_mut().filter(|request| request.name == name) {
                let is_other = differ && request.process % 2 == 1;
                let Some(ask) = &mut request.ask else { continue };
                for (kind, also) in ask.also.iter_mut().enumerate() {
                    let value = u8::try_from(rng.between(0, values[kind])).unwrap_or(0);
                    let cap = if is_other { caps[kind] + 1 } else { caps[kind] };
                    *also = rng.percent(parts[kind]).then_some((value, cap));
                    if also.is_some() && rng.percent(95) {
                        ask.cost = ask.cost.min(cap);
                    }
                }
            }
        }
    }

    /// Has requests of tenants take of a budget, for some names.
    fn add_budgets(&mut self, rng: &mut Rng) {
        if matches!(self.scenario, Scenario::Large | Scenario::Tardy | Scenario::Layer) {
            return;
        }
        for name in 0..self.names {
            if !rng.percent(25) {
                continue;
            }
            let (per, is_each) = (rng.pick(&[500, 2000, 6000]), rng.percent(50));
            let (part, most) = (rng.pick(&[50, 100]), rng.pick(&[10, 40, 100]));
            for request in self.requests.iter_mut().filter(|request| request.name == name) {
                let Some(ask) = &mut request.ask else { continue };
                let estimate = rng.between(0, most);
                let used = rng.percent(70).then(|| rng.between(0, estimate * 3 / 2));
                let left = rng.percent(10).then(|| rng.between(0, 100));
                let budget = BudgetPlan { per, is_each, estimate, used, left };
                ask.budget = rng.percent(part).then_some(budget);
            }
        }
    }

    fn policies(
        scenario: Scenario,
        rng: &mut Rng,
        names: usize,
        processes: usize,
    ) -> Vec<Vec<PolicyPlan>> {
        let base: Vec<_> = (0..names)
            .map(|_| PolicyPlan {
                headroom: 0,
                limit: match scenario {
                    Scenario::Large => rng.pick(&[30_000, 30_000, 3]),
                    Scenario::Crowd => rng.pick(&[60, 100]),
                    _ => rng.pick(&[1, 1, 2, 3, 5, 10]),
                },
                lease: match scenario {
                    Scenario::Large | Scenario::Tardy => 10_000,
                    Scenario::Crowd => rng.pick(&[5000, 10_000]),
                    Scenario::Leases | Scenario::Refusals => {
                        rng.pick(&[5000, 15_000, 60_000, 600_000])
                    }
                    Scenario::Outage | Scenario::Errors | Scenario::Loss | Scenario::Network => {
                        rng.pick(&[500, 1000, 2000, 3000, 10_000])
                    }
                    _ => rng.pick(&[500, 1000, 1500, 2000, 3000]),
                },
                max_queue: match scenario {
                    Scenario::Large | Scenario::Crowd => 100_000,
                    _ => rng.pick(&[0, 3, 20, 1000, 1000, 1000]),
                },
                outage: match scenario {
                    Scenario::Outage
                    | Scenario::Errors
                    | Scenario::Refusals
                    | Scenario::All
                    | Scenario::Hail
                    | Scenario::Crowd
                    | Scenario::Shards => match rng.below(4) {
                        0 | 1 => OutagePolicy::Refuse,
                        2 => OutagePolicy::Admit,
                        _ => OutagePolicy::Local(rng.pick(&[1, 1, 2, 4])),
                    },
                    Scenario::Tardy => OutagePolicy::Local(rng.pick(&[1, 2])),
                    Scenario::Network if rng.percent(30) => OutagePolicy::Local(rng.pick(&[1, 2])),
                    _ => OutagePolicy::Refuse,
                },
                wait: rng.pick(&[0, 200, 1000, 2500]),
                linger: 0,
                reuse: false,
                rate: None,
                backoff: None,
                adaptive: None,
            })
            .collect();
        let differ = matches!(scenario, Scenario::Deploy | Scenario::All);
        (0..processes)
            .map(|_| {
                let mut own = base.clone();
                if differ && rng.percent(50) {
                    for policy in &mut own {
                        policy.limit = rng.pick(&[1, 2, 4, 8]);
                        policy.lease = rng.pick(&[500, 1000, 2000, 3000]);
                    }
                }
                for policy in &mut own {
                    if let OutagePolicy::Local(share) = &mut policy.outage {
                        // A policy rejects a larger one.
                        *share = (*share).min(policy.limit);
                    }
                }
                own
            })
            .collect()
    }

    fn add_requests(&mut self, rng: &mut Rng, large: bool, long: bool) {
        if large {
            for _ in 0..rng.pick(&[500, 4000, 10_000]) {
                let at = rng.between(0, 1500);
                self.requests.push(RequestPlan {
                    at,
                    process: 0,
                    name: 0,
                    ask: None,
                    bound: None,
                    wait: 2000,
                    hold: rng.between(9000, 14_000),
                    leaves: None,
                    back: GiveBack::Drop,
                });
            }
            self.requests.sort_by_key(|request| request.at);
            return;
        }
        if self.scenario == Scenario::Tardy {
            self.add_tardy(rng);
            return;
        }
        if self.scenario == Scenario::Crowd {
            self.add_crowd(rng);
            return;
        }
        // The load comes in waves, each with habits of its own.
        let mut at = 0;
        while at < self.load {
            let lasts = rng.between(200, 1500);
            let name = if rng.percent(50) { Some(rng.index(self.common)) } else { None };
            let process = if rng.percent(30) { Some(rng.index(self.processes)) } else { None };
            let rate = if long { rng.between(2, 20) } else { rng.pick(&[5, 30, 150, 400, 1000]) };
            let waits = rng.pick(&[0, 100, 500, 1500, 3000, 5000]);
            let holds = if long {
                rng.pick(&[20, 200, 8000])
            } else {
                rng.pick(&[0, 2, 5, 5, 20, 20, 100, 100, 800, 6000])
            };
            let leaving = rng.pick(&[0, 0, 20, 60]);
            let until = (at + lasts).min(self.load);
            for _ in 0..(rate * lasts / 1000).max(1) {
                let name = name.unwrap_or_else(|| rng.index(self.common));
                self.requests.push(RequestPlan {
                    at: rng.between(at, until),
                    process: process.unwrap_or_else(|| rng.index(self.processes)),
                    name,
                    ask: None,
                    bound: None,
                    wait: if rng.percent(80) { waits } else { rng.pick(&[0, 50, 1000, 3000]) },
                    hold: rng.between(holds / 2, holds),
                    leaves: rng.percent(leaving).then(|| rng.pick(&[0, 1, 2, 3, 5, 20, 300, 1200])),
                    back: rng.pick(&[
                        GiveBack::Drop,
                        GiveBack::Drop,
                        GiveBack::Drop,
                        GiveBack::Release,
                        GiveBack::ReleaseLeft,
                        GiveBack::Clone,
                    ]),
                });
            }
            at = until + if rng.percent(40) { rng.between(0, 800) } else { 0 };
            if at == until && until >= self.load {
                break;
            }
        }
        for name in self.common..self.names {
            for _ in 0..rng.pick(&[1, 1, 3]) {
                self.requests.push(RequestPlan {
                    at: rng.between(0, self.load),
                    process: rng.index(self.processes),
                    name,
                    ask: None,
                    bound: None,
                    wait: rng.pick(&[0, 500, 3000]),
                    hold: rng.pick(&[0, 50, 6000]),
                    leaves: rng.percent(20).then(|| rng.pick(&[0, 2, 1200])),
                    back: GiveBack::Drop,
                });
            }
        }
        self.requests.sort_by_key(|request| request.at);
    }

    /// Has each process hold permits of some names, and then request permits of another name for very many tenants at
    /// once.
    fn add_crowd(&mut self, rng: &mut Rng) {
        let (back, leaves) = (GiveBack::Drop, None);
        for process in 0..self.processes {
            for name in 1..self.names {
                let at = rng.between(0, 100);
                let (ask, wait, hold) = (None, 2000, rng.between(6000, 8000));
                let plan =
                    RequestPlan { at, process, name, ask, wait, hold, leaves, back, bound: None };
                self.requests.push(plan);
            }
        }
        let mut comes = 1500;
        if rng.percent(50) {
            let (kind, process, server, what) = (Kind::Down, 0, 0, 0);
            let fault = FaultPlan { at: 1000, lasts: 2000, kind, process, server, what };
            self.faults.push(fault);
            // By then, all have noticed that it is over.
            comes = 3600;
        }
        let (many, spread) = (rng.pick(&[20, 50, 150, 400]), rng.pick(&[1, 20, 300]));
        for process in 0..self.processes {
            for number in 0..many {
                let at = comes + rng.between(0, spread);
                let tenant = u16::try_from(process * many + number).unwrap_or(0);
                let ask = AskPlan::of(tenant);
                let (name, ask, wait) = (0, Some(ask), rng.pick(&[0, 1000, 3000]));
                let hold = rng.between(5, 50);
                let plan =
                    RequestPlan { at, process, name, ask, wait, hold, leaves, back, bound: None };
                self.requests.push(plan);
            }
        }
        self.requests.sort_by_key(|request| request.at);
    }

    /// Makes stalls that end about when the delayed answers are given up, and callers that may not wait while their
    /// process has used up its share.
    fn add_tardy(&mut self, rng: &mut Rng) {
        let name = 0;
        for process in 0..self.processes {
            for _ in 0..3 {
                let at = rng.between(0, 100);
                let back = GiveBack::Drop;
                let (wait, hold, leaves) = (0, rng.between(5000, 9000), None);
                let ask = None;
                let bound = None;
                let plan = RequestPlan { at, process, name, ask, bound, wait, hold, leaves, back };
                self.requests.push(plan);
            }
        }
        let (mut at, what) = (rng.between(300, 1000), rng.below(40));
        while at + 2000 < self.load {
            let (process, server) = (rng.index(self.processes), 0);
            let lasts = rng.between(700, 1000);
            self.faults.push(FaultPlan { at, lasts, kind: Kind::Stall, process, server, what });
            let kind = Kind::SlowNetwork;
            self.faults.push(FaultPlan { at, lasts: 1800, kind, process, server, what });
            for _ in 0..20 {
                let (wait, leaves, back) = (rng.pick(&[0, 0, 500]), None, GiveBack::Drop);
                let at = at + rng.between(0, 800);
                let (hold, ask) = (5, None);
                let bound = None;
                let plan = RequestPlan { at, process, name, ask, bound, wait, hold, leaves, back };
                self.requests.push(plan);
            }
            at += rng.between(2500, 6000);
        }
        self.requests.sort_by_key(|request| request.at);
    }

    fn add_faults(&mut self, rng: &mut Rng) {
        let kinds = self.scenario.faults();
        if kinds.is_empty() || matches!(self.scenario, Scenario::Tardy | Scenario::Crowd) {
            return;
        }
        let hail = self.scenario == Scenario::Hail;
        let mut at = rng.between(100, 1500);
        let pause = if hail { rng.pick(&[4, 8, 16]) } else { rng.pick(&[100, 400, 1200, 4000]) };
        while at < self.load {
            let kind = rng.pick(&kinds);
            let fault = FaultPlan {
                at,
                lasts: match self.scenario {
                    Scenario::Hail => kind.lasts(rng).min(rng.between(1, 60)),
                    Scenario::Refusals => rng.pick(&[1000, 10_000, 30_000, 50_000]),
                    _ => kind.lasts(rng),
                },
                kind,
                process: rng.index(self.processes),
                server: rng.index(self.servers),
                what: rng.next() % 1000,
            };
            at += rng.between(pause / 2, pause * 2);
            let single = self.servers == 1 && kind == Kind::Move;
            if !single && fault.at + fault.lasts <= self.load {
                self.faults.push(fault);
            }
            if self.scenario == Scenario::Large {
                at += 5000;
            }
        }
    }

    fn add_operations(&mut self, rng: &mut Rng) {
        let pause = match self.scenario {
            Scenario::Operators => rng.pick(&[50, 200, 600]),
            Scenario::All => 800,
            Scenario::Shards => 1500,
            _ => return,
        };
        let mut at = rng.between(100, 600);
        while at < self.load {
            let deed = match rng.below(12) {
                0 | 1 => Deed::SetLimit(rng.pick(&[0, 1, 2, 5, 20])),
                2 => Deed::ClearLimit,
                3 => Deed::Pause,
                4 => Deed::Resume,
                5 => Deed::Drain(rng.pick(&[0, 300, 2000])),
                6 | 7 => Deed::Revoke,
                8 => Deed::Inspect,
                9 => Deed::InspectFleet,
                10 => Deed::List,
                _ => Deed::Overrides,
            };
            let (process, name) = (rng.index(self.processes), rng.index(self.common));
            self.operations.push(OperationPlan { at, process, name, deed });
            if matches!(deed, Deed::Pause | Deed::Drain(_)) {
                let at = at + rng.between(50, 1500);
                self.operations.push(OperationPlan { at, process, name, deed: Deed::Resume });
            }
            at += rng.between(pause / 2, pause * 2);
        }
        self.operations.sort_by_key(|operation| operation.at);
    }

    /// Returns whether tenants share a name.
    #[must_use]
    pub fn is_fair(&self, name: usize) -> bool {
        self.requests.iter().any(|request| request.name == name && request.ask.is_some())
    }

    /// Returns the longest lease of a name, in ms; or of all names.
    #[must_use]
    pub fn longest_lease(&self, name: Option<usize>) -> u64 {
        let of = |own: &Vec<PolicyPlan>| match name {
            Some(name) => own[name].lease,
            None => own.iter().map(|policy| policy.lease).max().unwrap_or(0),
        };
        self.policies.iter().map(of).max().unwrap_or(0)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} {}: {} servers, {} processes, {} names, quarantine {}, counted {}, window {} ms",
            self.scenario.name(),
            self.seed,
            self.servers,
            self.processes,
            self.names,
            self.quarantine,
            self.counted,
            self.window
        )?;
        for (process, policies) in self.policies.iter().enumerate() {
            for (name, policy) in policies.iter().enumerate() {
                writeln!(f, "  policy of process {process} for n{name}: {policy:?}")?;
            }
        }
        for fault in &self.faults {
            writeln!(f, "  {:>6} ms {fault:?}", fault.at)?;
        }
        for operation in &self.operations {
            writeln!(f, "  {:>6} ms {operation:?}", operation.at)?;
        }
        let shown = 40;
        for (number, request) in self.requests.iter().enumerate().take(shown) {
            writeln!(f, "  {:>6} ms request {number}: {request:?}", request.at)?;
        }
        if self.requests.len() > shown {
            writeln!(f, "  and {} requests more", self.requests.len() - shown)?;
        }
        Ok(())
    }
}

fn some_rate(rng: &mut Rng) -> (u32, u64) {
    (rng.pick(&[5, 6, 9, 20]), rng.pick(&[50, 200, 700, 1500]))
}
